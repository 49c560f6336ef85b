//! The Lease of a running instance, through whose annotations people's commands talk to the leader.

use std::time::Duration;

use anyhow::anyhow;
use kube::Client;
use serde_json::{Value, json};

use super::connection::Connection;
use lockstep_cluster::{
    client::{self, REQUEST_TIMEOUT},
    lease_client::LeaseClient,
};
use lockstep_core::{
    failure::Failure,
    keys::{self, Keys},
    lease::record::LeaseRecord,
};

/// How often a command that waits for the leader reads the Lease.
pub const POLL_INTERVAL: Duration = Duration::from_secs(1);

pub struct LeaseHandle {
    lease: LeaseClient,
    pub client: Client,
    pub keys: Keys,
    pub connection: Connection,
}

impl LeaseHandle {
    /// With the rights of the current kubeconfig.
    pub async fn connect(connection: &Connection) -> anyhow::Result<Self> {
        let client = client::build(connection.config().await?, |_, _| {})?;
        let keys = Keys::new(&connection.domain, keys::SUFFIX);
        let lease = LeaseClient::new(client.clone(), &connection.lockstep_namespace, &keys.instance);
        Ok(Self { lease, client, keys, connection: connection.clone() })
    }

    /// Reads the Lease with an empty patch: for commands for which the right to patch it is enough.
    pub async fn read_with_patch(&self) -> anyhow::Result<LeaseRecord> {
        self.patch(&json!({})).await
    }

    pub async fn annotate(&self, key: &str, value: &str) -> anyhow::Result<LeaseRecord> {
        self.patch(&json!({"metadata": {"annotations": {key: value}}})).await
    }

    async fn patch(&self, patch: &Value) -> anyhow::Result<LeaseRecord> {
        let written = self.lease.merge(patch, REQUEST_TIMEOUT).await;
        written.map_err(|failure| explain(&self.connection, "patch", &failure))
    }
}

/// One line for a request about the Lease with this verb that failed.
pub fn explain(connection: &Connection, verb: &str, failure: &Failure) -> anyhow::Error {
    let lease = format!("{}/lockstep.{}", connection.lockstep_namespace, connection.domain);
    match failure {
        Failure::NotFound => anyhow!(
            "there is no Lease {lease}: check --lockstep-namespace and --domain, and that Lockstep runs with leader election"
        ),
        Failure::Forbidden(detail) => anyhow!(
            "no right to {verb} the Lease {lease} ({detail}): ask for the verb {verb} on it, and check \
             --lockstep-namespace and --domain"
        ),
        other => anyhow!("cannot {verb} the Lease {lease}: {other}"),
    }
}
