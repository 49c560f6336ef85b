//! The Lease as the API server sends it, read as far as the election needs it.
//!
//! The API server stores Leases that k8s-openapi's type cannot be read from: a time in the year 10000 or before the year
//! 0, managedFields that are nested too deeply. A Lease that cannot be read cannot be renewed or taken over either: no
//! replica would write anything until somebody deletes it.

use std::{borrow::Cow, collections::BTreeMap, time::Duration};

use k8s_openapi::{
    NamespaceResourceScope,
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::{MicroTime, OwnerReference},
};
use kube::{Resource, api::ObjectMeta};
use serde::{Deserialize, Deserializer, Serialize};

use super::decide::LeaseRecord;

/// A Lease. Of its metadata, it has what a write must send back, because an update removes what it leaves out; the API
/// server keeps the rest. A time that cannot be read counts as none: no replica writes such a time.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
#[serde(transparent)]
pub struct LeaseObject(pub Lease);

#[derive(Deserialize)]
struct Received {
    metadata: Metadata,
    #[serde(default)]
    spec: Option<Spec>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct Metadata {
    name: Option<String>,
    namespace: Option<String>,
    uid: Option<String>,
    resource_version: Option<String>,
    labels: Option<BTreeMap<String, String>>,
    annotations: Option<BTreeMap<String, String>>,
    finalizers: Option<Vec<String>>,
    owner_references: Option<Vec<OwnerReference>>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct Spec {
    holder_identity: Option<String>,
    lease_duration_seconds: Option<i32>,
    lease_transitions: Option<i32>,
    acquire_time: Option<String>,
    renew_time: Option<String>,
    preferred_holder: Option<String>,
    strategy: Option<String>,
}

impl<'de> Deserialize<'de> for LeaseObject {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let Received { metadata, spec } = Received::deserialize(deserializer)?;
        let time = |text: Option<String>| text?.parse().ok().map(MicroTime);
        Ok(Self(Lease {
            metadata: ObjectMeta {
                name: metadata.name,
                namespace: metadata.namespace,
                uid: metadata.uid,
                resource_version: metadata.resource_version,
                labels: metadata.labels,
                annotations: metadata.annotations,
                finalizers: metadata.finalizers,
                owner_references: metadata.owner_references,
                ..ObjectMeta::default()
            },
            spec: spec.map(|spec| LeaseSpec {
                holder_identity: spec.holder_identity,
                lease_duration_seconds: spec.lease_duration_seconds,
                lease_transitions: spec.lease_transitions,
                acquire_time: time(spec.acquire_time),
                renew_time: time(spec.renew_time),
                preferred_holder: spec.preferred_holder,
                strategy: spec.strategy,
            }),
        }))
    }
}

impl Resource for LeaseObject {
    type DynamicType = ();
    type Scope = NamespaceResourceScope;

    fn kind(_: &()) -> Cow<'_, str> {
        Lease::kind(&())
    }

    fn group(_: &()) -> Cow<'_, str> {
        Lease::group(&())
    }

    fn version(_: &()) -> Cow<'_, str> {
        Lease::version(&())
    }

    fn plural(_: &()) -> Cow<'_, str> {
        Lease::plural(&())
    }

    fn meta(&self) -> &ObjectMeta {
        &self.0.metadata
    }

    fn meta_mut(&mut self) -> &mut ObjectMeta {
        &mut self.0.metadata
    }
}

impl From<LeaseObject> for LeaseRecord {
    fn from(LeaseObject(lease): LeaseObject) -> Self {
        let spec = lease.spec.unwrap_or_default();
        let seconds = spec.lease_duration_seconds.unwrap_or_default();
        Self {
            holder: spec.holder_identity.unwrap_or_default(),
            duration: Duration::from_secs(u64::try_from(seconds).unwrap_or_default()),
            transitions: spec.lease_transitions.unwrap_or_default(),
            acquire_time: spec.acquire_time,
            renew_time: spec.renew_time,
            metadata: lease.metadata,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lease_that_the_api_server_stores_can_be_read_and_is_sent_back() {
        let deep = format!("{}{{}}{}", "{\"f:a\":".repeat(300), "}".repeat(300));
        for time in
            ["10000-01-01T23:58:59.000000Z", "-0001-12-31T00:01:00.000000Z", "9999-12-31T23:59:59.999999Z"]
        {
            let text = format!(
                r#"{{"kind":"Lease","apiVersion":"coordination.k8s.io/v1",
                "metadata":{{"name":"x","labels":{{"a":"b"}},"creationTimestamp":"{time}","managedFields":[
                {{"manager":"odd","time":"{time}","fieldsV1":{deep}}}]}},
                "spec":{{"holderIdentity":"other","renewTime":"{time}","acquireTime":null,"leaseTransitions":3}}}}"#
            );
            let LeaseObject(lease) = serde_json::from_str(&text).unwrap();
            assert_eq!(lease.metadata.labels.as_ref().unwrap()["a"], "b");
            let spec = lease.spec.clone().unwrap();
            assert_eq!((spec.renew_time, spec.lease_transitions), (None, Some(3)), "{time}");
            let sent = serde_json::to_value(LeaseObject(lease)).unwrap();
            assert_eq!((&sent["kind"], &sent["spec"]["holderIdentity"]), (&"Lease".into(), &"other".into()));
        }
    }
}
