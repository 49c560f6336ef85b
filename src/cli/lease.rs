//! The Lease of a running instance, through whose annotations people's commands talk to the leader.

use std::time::Duration;

use anyhow::anyhow;
use clap::Args;
use k8s_openapi::api::coordination::v1::Lease;
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};

use crate::{
    client::{self, Failure, with_timeout},
    config,
    keys::Keys,
    ops::metrics::Metrics,
};

const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// How often a command that waits for the leader reads the Lease.
pub const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// Which instance a command is for.
#[derive(Debug, Clone, Args)]
pub struct Instance {
    /// Prefix of all labels and annotations
    #[arg(long, env = "LOCKSTEP_DOMAIN", default_value = config::DOMAIN, value_parser = config::domain)]
    pub domain: String,

    /// Lockstep's own namespace
    #[arg(long, env = "LOCKSTEP_NAMESPACE", default_value = config::NAMESPACE, value_parser = config::namespace)]
    pub namespace: String,
}

pub struct LeaseHandle {
    api: Api<Lease>,
    pub client: Client,
    pub keys: Keys,
    namespace: String,
}

impl LeaseHandle {
    /// With the rights of the current kubeconfig.
    pub async fn connect(instance: &Instance) -> anyhow::Result<Self> {
        let client = client::build(client::config().await?, &Metrics::new())?;
        Ok(Self {
            api: Api::namespaced(client.clone(), &instance.namespace),
            client,
            keys: Keys::new(&instance.domain, config::SUFFIX),
            namespace: instance.namespace.clone(),
        })
    }

    pub async fn read(&self) -> Result<Lease, Failure> {
        with_timeout(REQUEST_TIMEOUT, self.api.get(&self.keys.instance)).await
    }

    /// Reads the Lease with an empty patch: for commands for which the right to patch it is enough.
    pub async fn read_with_patch(&self) -> Result<Lease, Failure> {
        self.patch(&json!({})).await
    }

    pub async fn annotate(&self, key: &str, value: &str) -> Result<Lease, Failure> {
        self.patch(&json!({"metadata": {"annotations": {key: value}}})).await
    }

    async fn patch(&self, patch: &Value) -> Result<Lease, Failure> {
        let (name, params) = (&self.keys.instance, PatchParams::default());
        with_timeout(REQUEST_TIMEOUT, self.api.patch(name, &params, &Patch::Merge(patch))).await
    }

    /// One line for a request with this verb that failed.
    pub fn explain(&self, verb: &str, failure: &Failure) -> anyhow::Error {
        let (namespace, name) = (&self.namespace, &self.keys.instance);
        match failure {
            Failure::NotFound => anyhow!(
                "there is no Lease {namespace}/{name}: check --namespace and --domain, and that Lockstep runs with \
                 leader election"
            ),
            Failure::Forbidden(detail) => anyhow!(
                "no right to {verb} the Lease {namespace}/{name} ({detail}): ask for the verb {verb} on it, and check \
                 --namespace and --domain"
            ),
            other => anyhow!("cannot {verb} the Lease {namespace}/{name}: {other}"),
        }
    }
}

pub fn annotation<'a>(lease: &'a Lease, key: &str) -> Option<&'a str> {
    lease.metadata.annotations.as_ref()?.get(key).map(String::as_str)
}
