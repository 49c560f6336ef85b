//! The API calls that the mirror makes for companions. Every update names the state it was decided on, every delete
//! the very object.

use std::{sync::Arc, time::Duration};

use json_patch::Patch as Operations;
use kube::{
    Client,
    api::{DeleteParams, GetParams, Patch, PatchParams, PostParams, Preconditions},
    core::Request,
};
use serde::de::{DeserializeOwned, IgnoredAny};

use crate::{
    client::{Failure, with_timeout},
    keys::Keys,
    leader::Claim,
    object::{Meta, Object, ObjectKey},
    world::Companion,
};

/// How long one call may take.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// What [`super::apply`] needs of the API server; tests have one in memory.
pub trait CompanionApi: Send + Sync + 'static {
    fn get(&self, key: &ObjectKey) -> impl Future<Output = Result<Object, Failure>> + Send;

    /// Reads an object without its content.
    fn get_metadata(&self, key: &ObjectKey) -> impl Future<Output = Result<Meta, Failure>> + Send;

    /// Creates an object from its JSON and returns it as it is stored.
    fn create(&self, at: &ObjectKey, body: Vec<u8>) -> impl Future<Output = Result<Object, Failure>> + Send;

    fn patch(
        &self,
        at: &ObjectKey,
        operations: Operations,
    ) -> impl Future<Output = Result<Object, Failure>> + Send;

    /// Deletes just this object in just this version. That it is gone already counts as success.
    fn delete(&self, at: &ObjectKey, known: &Companion) -> impl Future<Output = Result<(), Failure>> + Send;
}

/// Another API, for as long as this replica leads.
pub struct WhileLeading<A> {
    api: A,
    claim: Claim,
}

/// The API server, for as long as this replica leads.
pub type KubeApi = WhileLeading<KubeCalls>;

/// The API server, whether this replica leads or not.
pub struct KubeCalls {
    client: Client,
    keys: Arc<Keys>,
}

impl KubeApi {
    #[must_use]
    pub const fn new(client: Client, keys: Arc<Keys>, claim: Claim) -> Self {
        Self::of(KubeCalls { client, keys }, claim)
    }
}

impl<A: CompanionApi> WhileLeading<A> {
    #[must_use]
    pub const fn of(api: A, claim: Claim) -> Self {
        Self { api, claim }
    }

    /// Nothing is sent before the call is awaited.
    async fn call<T>(&self, call: impl Future<Output = Result<T, Failure>>) -> Result<T, Failure> {
        if !self.claim.is_held() {
            return Err(Failure::NotLeader);
        }
        call.await
    }
}

impl<A: CompanionApi> CompanionApi for WhileLeading<A> {
    async fn get(&self, key: &ObjectKey) -> Result<Object, Failure> {
        self.call(self.api.get(key)).await
    }

    async fn get_metadata(&self, key: &ObjectKey) -> Result<Meta, Failure> {
        self.call(self.api.get_metadata(key)).await
    }

    async fn create(&self, at: &ObjectKey, body: Vec<u8>) -> Result<Object, Failure> {
        self.call(self.api.create(at, body)).await
    }

    async fn patch(&self, at: &ObjectKey, operations: Operations) -> Result<Object, Failure> {
        self.call(self.api.patch(at, operations)).await
    }

    async fn delete(&self, at: &ObjectKey, known: &Companion) -> Result<(), Failure> {
        self.call(self.api.delete(at, known)).await
    }
}

impl KubeCalls {
    async fn call<T: DeserializeOwned>(
        &self,
        request: Result<http::Request<Vec<u8>>, kube::core::request::Error>,
    ) -> Result<T, Failure> {
        let request = request.map_err(|error| Failure::Unavailable(error.to_string()))?;
        with_timeout(REQUEST_TIMEOUT, self.client.request(request)).await
    }

    fn field_manager(&self) -> Option<String> {
        Some(self.keys.instance.clone())
    }
}

impl CompanionApi for KubeCalls {
    async fn get(&self, key: &ObjectKey) -> Result<Object, Failure> {
        self.call(collection(key).get(&key.name, &GetParams::default())).await
    }

    async fn get_metadata(&self, key: &ObjectKey) -> Result<Meta, Failure> {
        let request = collection(key).get_metadata(&key.name, &GetParams::default());
        self.call::<Object>(request).await.map(|object| object.metadata)
    }

    async fn create(&self, at: &ObjectKey, body: Vec<u8>) -> Result<Object, Failure> {
        let params = PostParams { field_manager: self.field_manager(), ..PostParams::default() };
        self.call(collection(at).create(&params, body)).await
    }

    async fn patch(&self, at: &ObjectKey, operations: Operations) -> Result<Object, Failure> {
        let params = PatchParams { field_manager: self.field_manager(), ..PatchParams::default() };
        let patch: Patch<()> = Patch::Json(operations);
        self.call(collection(at).patch(&at.name, &params, &patch)).await
    }

    async fn delete(&self, at: &ObjectKey, known: &Companion) -> Result<(), Failure> {
        let params = DeleteParams::background().preconditions(Preconditions {
            uid: Some(known.uid.to_string()),
            resource_version: Some(known.resource_version.to_string()),
        });
        match self.call::<IgnoredAny>(collection(at).delete(&at.name, &params)).await {
            Ok(_) | Err(Failure::NotFound) => Ok(()),
            Err(failure) => Err(failure),
        }
    }
}

fn collection(key: &ObjectKey) -> Request {
    Request::new(format!("/api/v1/namespaces/{}/{}", key.namespace, key.kind.plural()))
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use serde_json::{Value, json};
    use tokio::sync::watch;

    use super::*;
    use crate::{
        object::Kind,
        testing::{
            api::{ApiRequest, api_server},
            companion, keys, read_companion,
        },
    };

    /// An API server that answers everything with an object, and the bodies of the requests that it got.
    fn api(claim: Claim) -> (KubeApi, Arc<Mutex<Vec<Value>>>) {
        let bodies = Arc::new(Mutex::new(Vec::new()));
        let got = bodies.clone();
        let client = api_server(move |ApiRequest { body, .. }| {
            got.lock().unwrap().push(body);
            std::future::ready((200, json!({"metadata": {"name": "colors-synced"}})))
        });
        (KubeApi::new(client, keys(), claim), bodies)
    }

    fn known() -> (ObjectKey, Companion) {
        let draft = companion("away", "colors-synced").uid("the-uid").version(7);
        (draft.key(), read_companion(Kind::ConfigMap, draft.object()).companion().clone())
    }

    #[tokio::test]
    async fn delete_names_the_uid_and_version_that_it_was_decided_on() {
        let ((api, bodies), (at, known)) = (api(Claim::permanent()), known());
        api.delete(&at, &known).await.unwrap();
        let bodies = bodies.lock().unwrap();
        assert_eq!(bodies.len(), 1);
        assert_eq!(bodies[0]["preconditions"], json!({"uid": "the-uid", "resourceVersion": "7"}));
    }

    #[tokio::test]
    async fn nothing_is_sent_without_the_claim() {
        let (_sender, receiver) = watch::channel(None);
        let ((api, bodies), (at, known)) = (api(Claim::from_receiver(receiver)), known());
        let body = json!({"metadata": {"name": "colors-synced"}}).to_string().into_bytes();
        assert!(matches!(api.create(&at, body).await, Err(Failure::NotLeader)));
        assert!(matches!(api.patch(&at, Operations(Vec::new())).await, Err(Failure::NotLeader)));
        assert!(matches!(api.delete(&at, &known).await, Err(Failure::NotLeader)));
        assert!(bodies.lock().unwrap().is_empty());
    }
}
