//! The Lease as the API server sends it, read as far as the election needs it.
//!
//! The API server stores Leases that k8s-openapi's type cannot be read from: a time in the year 10000 or before the
//! year 0, managedFields that are nested too deeply. A Lease that cannot be read cannot be renewed or taken over
//! either: no replica would write anything until somebody deletes it.

use std::{collections::BTreeMap, time::Duration};

use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;

/// The fields of a Lease that the election uses: client-go's `LeaderElectionRecord`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "Wire", into = "Wire")]
pub struct LeaseRecord {
    /// Empty when the Lease was released.
    pub holder: String,
    /// How long the Lease is the holder's after each renewal.
    pub duration: Duration,
    pub transitions: i32,
    /// By the clock of the holder. For the others, any other time is a change.
    pub acquire_time: Option<MicroTime>,
    /// By the clock of the holder, which alone asks whether it is earlier or later. For the others, any other time is a
    /// renewal. A time that cannot be read counts as none: no replica writes such a time.
    pub renew_time: Option<MicroTime>,
    /// Without a resourceVersion when the Lease was deleted.
    pub metadata: LeaseMetadata,
}

/// What each write must send back, because an update removes what it leaves out: annotations and labels of others. The
/// API server keeps the rest.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct LeaseMetadata {
    pub name: Option<String>,
    pub uid: Option<String>,
    pub resource_version: Option<String>,
    pub labels: Option<BTreeMap<String, String>>,
    pub annotations: Option<BTreeMap<String, String>>,
    pub finalizers: Option<Vec<String>>,
    pub owner_references: Option<Value>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Wire {
    #[serde(skip_deserializing)]
    api_version: &'static str,
    #[serde(skip_deserializing)]
    kind: &'static str,
    metadata: LeaseMetadata,
    #[serde(default)]
    spec: Option<Spec>,
}

#[derive(Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Spec {
    holder_identity: Option<String>,
    lease_duration_seconds: Option<i32>,
    lease_transitions: Option<i32>,
    #[serde(deserialize_with = "time")]
    acquire_time: Option<MicroTime>,
    #[serde(deserialize_with = "time")]
    renew_time: Option<MicroTime>,
}

fn time<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<MicroTime>, D::Error> {
    let text = Option::<String>::deserialize(deserializer)?;
    Ok(text.and_then(|text| text.parse().ok()).map(MicroTime))
}

impl From<Wire> for LeaseRecord {
    fn from(Wire { metadata, spec, .. }: Wire) -> Self {
        let spec = spec.unwrap_or_default();
        let seconds = u64::try_from(spec.lease_duration_seconds.unwrap_or_default()).unwrap_or_default();
        Self {
            holder: spec.holder_identity.unwrap_or_default(),
            duration: Duration::from_secs(seconds),
            transitions: spec.lease_transitions.unwrap_or_default(),
            acquire_time: spec.acquire_time,
            renew_time: spec.renew_time,
            metadata,
        }
    }
}

impl From<LeaseRecord> for Wire {
    fn from(record: LeaseRecord) -> Self {
        let spec = Spec {
            holder_identity: Some(record.holder),
            lease_duration_seconds: Some(i32::try_from(record.duration.as_secs()).unwrap_or(i32::MAX)),
            lease_transitions: Some(record.transitions),
            acquire_time: record.acquire_time,
            renew_time: record.renew_time,
        };
        let api_version = "coordination.k8s.io/v1";
        let kind = "Lease";
        Self { api_version, kind, metadata: record.metadata, spec: Some(spec) }
    }
}

impl LeaseRecord {
    pub fn annotation(&self, key: &str) -> Option<&str> {
        self.metadata.annotations.as_ref()?.get(key).map(String::as_str)
    }

    pub const fn is_deleted(&self) -> bool {
        self.metadata.resource_version.is_none()
    }

    /// Whether neither the holder nor another replica has written it since `known`. Metadata is left out: a Lease that
    /// somebody annotates every second must expire when its holder is dead.
    pub(crate) fn is_unchanged_since(&self, known: &Self) -> bool {
        let ignore_metadata = |record: &Self| Self { metadata: LeaseMetadata::default(), ..record.clone() };
        self.is_deleted() == known.is_deleted() && ignore_metadata(self) == ignore_metadata(known)
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
            let lease: LeaseRecord = serde_json::from_str(&text).unwrap();
            assert_eq!(lease.metadata.labels.as_ref().unwrap()["a"], "b");
            assert_eq!((&lease.renew_time, lease.transitions), (&None, 3), "{time}");
            let sent = serde_json::to_value(lease).unwrap();
            assert_eq!((&sent["kind"], &sent["spec"]["holderIdentity"]), (&"Lease".into(), &"other".into()));
        }
    }
}
