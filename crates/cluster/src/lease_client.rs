//! The requests for the Lease of an instance.

use std::time::Duration;

use kube::{
    Client,
    api::{GetParams, Patch, PatchParams, PostParams},
    core::{Request, request},
};
use serde_json::{Value, json};

use crate::client;
use lockstep_core::{failure::Failure, lease::record::LeaseRecord};

/// What the election needs of the API server; the simulation has one in memory.
pub trait LeaseApi: Send + Sync + 'static {
    fn get(&self, timeout: Duration) -> impl Future<Output = Result<LeaseRecord, Failure>> + Send;

    /// Replaces this version of the Lease, or creates one if it has no version.
    fn write(
        &self,
        lease: &LeaseRecord,
        timeout: Duration,
    ) -> impl Future<Output = Result<LeaseRecord, Failure>> + Send;
}

/// The Lease of an instance, at the API server.
#[derive(Clone)]
pub struct LeaseClient {
    client: Client,
    collection: String,
    name: String,
}

impl LeaseClient {
    pub fn new(client: Client, namespace: &str, name: &str) -> Self {
        let collection = format!("/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases");
        Self { client, collection, name: name.to_owned() }
    }

    pub async fn merge(&self, patch: &Value, timeout: Duration) -> Result<LeaseRecord, Failure> {
        let patch = Patch::Merge(patch);
        self.send(self.request().patch(&self.name, &PatchParams::default(), &patch), timeout).await
    }

    fn request(&self) -> Request {
        Request::new(&self.collection)
    }

    async fn send(
        &self,
        request: Result<http::Request<Vec<u8>>, request::Error>,
        timeout: Duration,
    ) -> Result<LeaseRecord, Failure> {
        client::send(&self.client, timeout, request).await
    }
}

impl LeaseApi for LeaseClient {
    async fn get(&self, timeout: Duration) -> Result<LeaseRecord, Failure> {
        self.send(self.request().get(&self.name, &GetParams::default()), timeout).await
    }

    async fn write(&self, lease: &LeaseRecord, timeout: Duration) -> Result<LeaseRecord, Failure> {
        let params = PostParams::default();
        let body = json!(lease).to_string().into_bytes();
        let request = if lease.metadata.resource_version.is_some() {
            self.request().replace(&self.name, &params, body)
        } else {
            self.request().create(&params, body)
        };
        self.send(request, timeout).await
    }
}
