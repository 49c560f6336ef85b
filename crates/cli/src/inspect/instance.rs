//! The running replicas of one instance, as far as a person may see them.

use std::time::Duration;

use futures::future::join_all;
use k8s_openapi::jiff::Timestamp;
use kube::{Client, api::ListParams, core::Request};
use serde::Serialize;
use serde_json::Value;

use super::pages::read_pages;
use lockstep_cluster::{
    client::{self, REQUEST_TIMEOUT},
    lease_client::{LeaseApi, LeaseClient},
};
use lockstep_core::{
    certs::webhooks::{self, WebhookConfiguration, WebhookKind},
    failure::Failure,
    keys::Keys,
    lease::{
        hold::{HeldDeletes, HoldAnnotations},
        lease_state::LeaseState,
        settings::PublishedSettings,
    },
    world::Scope,
};

/// The label of Lockstep's pods, and of everything else that `lockstep manifests` prints.
pub(crate) const APP_LABEL: &str = "app.kubernetes.io/name=lockstep";
/// The port of `--ops-bind` in a pod that does not name it.
const DEFAULT_OPS_PORT: i64 = 8080;

/// Both webhook configurations, or why one cannot be read.
type Webhooks = Vec<(WebhookKind, Result<WebhookConfiguration, Failure>)>;

/// What could be read, and why the rest could not.
pub struct Instance {
    pub domain: String,
    /// The one that it runs in.
    pub namespace: String,
    /// Those that do not depend on its suffix.
    pub keys: Keys,
    pub lease: Result<LeaseState, Failure>,
    pub webhooks: Webhooks,
    pub replicas: Result<Vec<Replica>, Failure>,
}

/// What people and scripts are shown of it.
#[derive(Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct InstanceSummary {
    /// The holder of the Lease.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub leader: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub version: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ca_expires: Option<Timestamp>,
    pub replicas: Vec<Replica>,
}

/// A pod of Lockstep.
#[derive(Clone, PartialEq, Serialize)]
pub struct Replica {
    pub name: String,
    pub ready: bool,
    pub image: String,
    /// Where it serves its metrics.
    #[serde(skip)]
    pub ops_port: i64,
}

impl Instance {
    pub async fn read(client: &Client, domain: &str, namespace: &str, now: Timestamp) -> Self {
        let keys = Keys::new(domain, "");
        let lease = LeaseClient::new(client.clone(), namespace, &keys.instance);
        let (lease, webhooks, replicas) = tokio::join!(
            lease.get(REQUEST_TIMEOUT),
            read_webhooks(client, &keys.instance),
            read_replicas(client, namespace)
        );
        let lease = lease.map(|lease| LeaseState::of(lease, &keys, now));
        let (domain, namespace) = (domain.to_owned(), namespace.to_owned());
        Self { domain, namespace, keys, lease, webhooks, replicas }
    }

    /// Whether nothing of it was found.
    pub fn is_absent(&self) -> bool {
        matches!(self.lease, Err(Failure::NotFound))
            && self.replicas.as_ref().is_ok_and(Vec::is_empty)
            && self.webhooks.iter().all(|(_, found)| matches!(found, Err(Failure::NotFound)))
    }

    /// When the first of the webhooks trusts no CA any more; none if one trusts none, or there are no webhooks.
    pub fn ca_expiry(&self) -> Result<Option<Timestamp>, &Failure> {
        let found = self.webhooks.iter().filter(|(_, found)| !matches!(found, Err(Failure::NotFound)));
        let found: Result<Vec<_>, _> = found.map(|(_, found)| found.as_ref()).collect();
        found.map(|found| webhooks::ca_expiry(found.into_iter()))
    }

    /// Whether cert-manager manages the webhook's certificate: Lockstep then has no rights on its CA.
    pub fn is_injected_by_cert_manager(&self) -> bool {
        self.webhooks
            .iter()
            .any(|(_, found)| found.as_ref().is_ok_and(WebhookConfiguration::is_injected_by_cert_manager))
    }

    pub fn summary(&self) -> InstanceSummary {
        let lease = self.lease.as_ref().ok();
        InstanceSummary {
            leader: lease.and_then(|lease| lease.leader.clone()),
            version: lease.and_then(|lease| Some(lease.settings.as_ref()?.version.clone())),
            ca_expires: self.ca_expiry().ok().flatten(),
            replicas: self.replicas.clone().unwrap_or_default(),
        }
    }

    /// The settings of the leader, else the defaults.
    pub fn settings(&self) -> PublishedSettings {
        let published = self.lease.as_ref().ok().and_then(|lease| lease.settings.clone());
        published.unwrap_or_default()
    }

    /// The deletes that are held, if the Lease says so.
    pub fn deletes_held(&self, now: Timestamp) -> Option<HeldDeletes> {
        HoldAnnotations::read(&self.keys, &self.lease.as_ref().ok()?.annotations).in_force(now)
    }

    /// What is watched, as far as it is known.
    pub fn scope(&self) -> Scope {
        self.settings().scope(&self.domain, &self.namespace)
    }

    /// What a person may have to know about settings that could not be read.
    pub(crate) fn caveat(&self) -> Option<String> {
        let lease = format!("the Lease {}/{}", self.namespace, self.keys.instance);
        let assumed = "the default flags are assumed";
        match &self.lease {
            Ok(LeaseState { settings: Some(_), .. }) => None,
            Ok(_) => Some(format!("{lease} has no settings, so {assumed}")),
            Err(Failure::NotFound) => Some(format!(
                "{lease} does not exist, so {assumed}: check --domain and --lockstep-namespace, and that Lockstep runs"
            )),
            Err(failure) => Some(format!("{lease} cannot be read ({failure}), so {assumed}")),
        }
    }
}

/// Reads both webhook configurations of this name.
pub(crate) async fn read_webhooks(client: &Client, name: &str) -> Webhooks {
    join_all(WebhookKind::ALL.map(async |kind| (kind, client::get(client, kind.path(), name).await))).await
}

async fn read_replicas(client: &Client, namespace: &str) -> Result<Vec<Replica>, Failure> {
    let path = format!("/api/v1/namespaces/{namespace}/pods");
    let (pods, params) = (Request::new(path), ListParams::default().labels(APP_LABEL));
    read_pages(client, params, |params| pods.list(params), |pod| Some(Replica::of(&pod))).await
}

impl Replica {
    /// The type of k8s-openapi, with all of its fields, would take half a megabyte of the binary.
    fn of(pod: &Value) -> Self {
        let all = |list: &Value| list.as_array().cloned().unwrap_or_default();
        let container = &pod["spec"]["containers"][0];
        let ops = all(&container["ports"]).into_iter().find(|port| port["name"] == "ops");
        let conditions = all(&pod["status"]["conditions"]);
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        Self {
            name: text(&pod["metadata"]["name"]),
            ready: conditions.iter().any(|one| one["type"] == "Ready" && one["status"] == "True"),
            image: text(&container["image"]),
            ops_port: ops.and_then(|port| port["containerPort"].as_i64()).unwrap_or(DEFAULT_OPS_PORT),
        }
    }
}

/// `3s`, `5m`, `2h`, `7d`: as kubectl prints an age.
pub fn age(since: Timestamp, now: Timestamp) -> String {
    let elapsed = Duration::try_from(now.duration_since(since)).unwrap_or_default().as_secs();
    match elapsed {
        0..120 => format!("{elapsed}s"),
        120..7200 => format!("{}m", elapsed / 60),
        7200..172_800 => format!("{}h", elapsed / 3600),
        _ => format!("{}d", elapsed / 86_400),
    }
}
