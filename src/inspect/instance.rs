//! The running replicas of one instance, as far as a person may see them.

use std::{collections::BTreeMap, time::Duration};

use k8s_openapi::jiff::Timestamp;
use kube::{
    Api, Client,
    api::{ListParams, ObjectList, ObjectMeta},
};
use serde::{Deserialize, Serialize};

use crate::{
    certs::webhooks::{self, WebhookConfiguration, WebhookKind},
    client::{self, Failure, REQUEST_TIMEOUT, with_timeout},
    config::published::PublishedSettings,
    hold::{HoldAnnotations, later},
    keys::Keys,
    leader::{LeaseObject, LeaseRecord},
    world::Scope,
};

/// The label of Lockstep's pods, and of everything else that `lockstep manifests` prints.
const APP_LABEL: &str = "app.kubernetes.io/name=lockstep";
/// The port of `--ops-bind` in a pod that does not name it.
const DEFAULT_OPS_PORT: i32 = 8080;

/// Which instance a person asks about.
#[derive(Debug, Clone)]
pub struct InstanceName {
    pub domain: String,
    /// The namespace that Lockstep itself runs in.
    pub namespace: String,
}

/// What could be read, and why the rest could not.
#[derive(Debug, Clone)]
pub struct Instance {
    pub name: InstanceName,
    pub lease: Result<LeaseState, Failure>,
    /// When the first of the webhooks trusts no CA any more; none if one trusts none, or there are no webhooks.
    pub ca_expiry: Result<Option<Timestamp>, Failure>,
    pub replicas: Result<Vec<Replica>, Failure>,
}

#[derive(Debug, Clone)]
pub struct LeaseState {
    /// None if the Lease was released, or has expired.
    pub leader: Option<String>,
    pub renewed: Option<Timestamp>,
    /// None if an earlier build leads, which does not publish them.
    pub settings: Option<PublishedSettings>,
    pub annotations: BTreeMap<String, String>,
}

/// A pod of Lockstep.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Replica {
    pub name: String,
    pub ready: bool,
    pub image: String,
    /// Where it serves its metrics.
    #[serde(skip)]
    pub ops_port: i32,
}

impl LeaseState {
    #[must_use]
    pub fn of(lease: LeaseRecord, keys: &Keys, now: Timestamp) -> Self {
        let annotations = lease.metadata.annotations.unwrap_or_default();
        let renewed = lease.renew_time.map(|time| time.0);
        // The clocks of this machine and of the leader may differ by a few seconds.
        let is_held = renewed.is_some_and(|renewed| now < later(renewed, lease.duration * 2));
        let settings = annotations.get(&keys.settings).and_then(|text| serde_json::from_str(text).ok());
        let leader = Some(lease.holder).filter(|holder| is_held && !holder.is_empty());
        Self { leader, renewed, settings, annotations }
    }
}

impl Instance {
    pub async fn read(client: &Client, name: InstanceName, now: Timestamp) -> Self {
        let keys = Keys::new(&name.domain, "");
        let lease = read_lease(client, &name, &keys, now);
        let (lease, ca_expiry, replicas) =
            tokio::join!(lease, read_ca_expiry(client, &keys), read_replicas(client, &name));
        Self { name, lease, ca_expiry, replicas }
    }

    /// The settings of the leader, else the defaults.
    #[must_use]
    pub fn settings(&self) -> PublishedSettings {
        let published = self.lease.as_ref().ok().and_then(|lease| lease.settings.clone());
        published.unwrap_or_default()
    }

    /// Until when deletes are held, if the Lease says so.
    #[must_use]
    pub fn deletes_held_until(&self, now: Timestamp) -> Option<Timestamp> {
        let keys = Keys::new(&self.name.domain, "");
        let annotations = &self.lease.as_ref().ok()?.annotations;
        HoldAnnotations::read(&keys, annotations).in_force(now).map(|hold| hold.until)
    }

    /// What is watched, as far as it is known.
    #[must_use]
    pub fn scope(&self) -> Scope {
        self.settings().scope(&self.name.domain, &self.name.namespace)
    }

    /// What a person may have to know about settings that could not be read.
    #[must_use]
    pub fn caveat(&self) -> Option<String> {
        let lease = format!("the Lease {}/lockstep.{}", self.name.namespace, self.name.domain);
        let assumed = "the default flags are assumed";
        match &self.lease {
            Ok(LeaseState { settings: Some(_), .. }) => None,
            Ok(_) => {
                Some(format!("{lease} has no settings, so {assumed}: the leader is of an earlier version"))
            }
            Err(Failure::NotFound) => Some(format!(
                "{lease} does not exist, so {assumed}: check --domain and --lockstep-namespace, and that Lockstep runs"
            )),
            Err(failure) => Some(format!("{lease} cannot be read ({failure}), so {assumed}")),
        }
    }
}

async fn read_lease(
    client: &Client,
    name: &InstanceName,
    keys: &Keys,
    now: Timestamp,
) -> Result<LeaseState, Failure> {
    let leases = Api::<LeaseObject>::namespaced(client.clone(), &name.namespace);
    let lease = with_timeout(REQUEST_TIMEOUT, leases.get(&keys.instance)).await?;
    Ok(LeaseState::of(lease.into(), keys, now))
}

async fn read_ca_expiry(client: &Client, keys: &Keys) -> Result<Option<Timestamp>, Failure> {
    let mut configurations = Vec::new();
    for kind in WebhookKind::ALL {
        match read_configuration(client, kind, &keys.instance).await {
            Ok(configuration) => configurations.push(configuration),
            Err(Failure::NotFound) => {}
            Err(failure) => return Err(failure),
        }
    }
    Ok(webhooks::ca_expiry(configurations.iter()))
}

pub async fn read_configuration(
    client: &Client,
    kind: WebhookKind,
    name: &str,
) -> Result<WebhookConfiguration, Failure> {
    client::get(client, kind.path(), name).await
}

/// What is looked at of a pod. The type of k8s-openapi, with all of its fields, would take half a megabyte of the binary.
#[derive(Debug, Clone, Deserialize)]
struct Pod {
    metadata: ObjectMeta,
    spec: Option<PodSpec>,
    status: Option<PodStatus>,
}

#[derive(Debug, Clone, Deserialize)]
struct PodSpec {
    containers: Vec<Container>,
}

#[derive(Debug, Clone, Deserialize)]
struct Container {
    image: Option<String>,
    ports: Option<Vec<ContainerPort>>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ContainerPort {
    name: Option<String>,
    container_port: i32,
}

#[derive(Debug, Clone, Deserialize)]
struct PodStatus {
    conditions: Option<Vec<PodCondition>>,
}

#[derive(Debug, Clone, Deserialize)]
struct PodCondition {
    #[serde(rename = "type")]
    type_: String,
    status: String,
}

async fn read_replicas(client: &Client, name: &InstanceName) -> Result<Vec<Replica>, Failure> {
    let pods = format!("/api/v1/namespaces/{}/pods", name.namespace);
    let request = kube::core::Request::new(pods).list(&ListParams::default().labels(APP_LABEL));
    let request = request.map_err(|error| Failure::Unavailable(error.to_string()))?;
    let pods: ObjectList<Pod> = with_timeout(REQUEST_TIMEOUT, client.request(request)).await?;
    Ok(pods.items.into_iter().map(Replica::from).collect())
}

impl From<Pod> for Replica {
    fn from(pod: Pod) -> Self {
        let conditions = pod.status.and_then(|status| status.conditions).unwrap_or_default();
        let container = pod.spec.and_then(|spec| spec.containers.into_iter().next());
        let ports = container.iter().flat_map(|container| container.ports.iter().flatten());
        let ops_port =
            ports.filter(|port| port.name.as_deref() == Some("ops")).map(|port| port.container_port);
        let ops_port = ops_port.max().unwrap_or(DEFAULT_OPS_PORT);
        let image = container.and_then(|container| container.image);
        Self {
            name: pod.metadata.name.unwrap_or_default(),
            ready: conditions.iter().any(|one| one.type_ == "Ready" && one.status == "True"),
            image: image.unwrap_or_default(),
            ops_port,
        }
    }
}

/// `3s`, `5m`, `2h`, `7d`: as kubectl prints an age.
#[must_use]
pub fn age(since: Timestamp, now: Timestamp) -> String {
    let elapsed = Duration::try_from(now.duration_since(since)).unwrap_or_default().as_secs();
    match elapsed {
        0..120 => format!("{elapsed}s"),
        120..7200 => format!("{}m", elapsed / 60),
        7200..172_800 => format!("{}h", elapsed / 3600),
        _ => format!("{}d", elapsed / 86_400),
    }
}
