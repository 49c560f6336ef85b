//! The API calls that the controller makes for companions. Every update names the state it was decided on, every delete
//! the very object.

use std::{sync::Arc, time::Duration};

use kube::{
    Client,
    api::{DeleteParams, GetParams, Patch, PatchParams, PostParams, Preconditions},
    core::Request,
};

use lockstep_cluster::client;
use lockstep_core::{
    failure::Failure,
    keys::Keys,
    object::{Object, ObjectKey},
    writes::write_request::CompanionRequest,
};

/// How long one call may take.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);

/// What [`super::apply`] needs of the API server; tests have one in memory.
pub trait CompanionApi: Send + Sync + 'static {
    /// Returns the object as it is stored; of a delete, any object.
    fn send(
        &self,
        at: &ObjectKey,
        request: CompanionRequest,
    ) -> impl Future<Output = Result<Object, Failure>> + Send;
}

/// The API server.
pub struct KubeApi {
    pub client: Client,
    pub keys: Arc<Keys>,
}

impl CompanionApi for KubeApi {
    async fn send(&self, at: &ObjectKey, request: CompanionRequest) -> Result<Object, Failure> {
        let manager = Some(self.keys.instance.clone());
        let api = Request::new(format!("/api/v1/namespaces/{}/{}", at.namespace, at.kind.plural()));
        let name = &at.name;
        let request = match request {
            CompanionRequest::Get => api.get(name, &GetParams::default()),
            CompanionRequest::GetMetadata => api.get_metadata(name, &GetParams::default()),
            CompanionRequest::Create(body) => {
                let params = PostParams { field_manager: manager, ..PostParams::default() };
                api.create(&params, body)
            }
            CompanionRequest::Patch(operations) => {
                let params = PatchParams { field_manager: manager, ..PatchParams::default() };
                api.patch(name, &params, &Patch::Json::<()>(operations))
            }
            CompanionRequest::Delete { uid, resource_version } => {
                let preconditions =
                    Preconditions { uid: Some(uid), resource_version: Some(resource_version) };
                api.delete(name, &DeleteParams::background().preconditions(preconditions))
            }
        };
        client::send(&self.client, REQUEST_TIMEOUT, request).await
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use serde_json::{Value, json};

    use super::*;
    use lockstep_cluster::testing::api::{ApiRequest, api_server};
    use lockstep_core::{
        object::Kind,
        testing::{companion, keys, read_companion},
        world::Companion,
    };

    /// An API server that answers everything with an object, and the bodies of the requests that it got.
    fn api() -> (KubeApi, Arc<Mutex<Vec<Value>>>) {
        let bodies = Arc::new(Mutex::new(Vec::new()));
        let got = bodies.clone();
        let client = api_server(move |ApiRequest { body, .. }| {
            got.lock().unwrap().push(body);
            std::future::ready((200, json!({"metadata": {"name": "colors-synced"}})))
        });
        (KubeApi { client, keys: keys() }, bodies)
    }

    fn known() -> (ObjectKey, Companion) {
        let draft = companion("away", "colors-synced").uid("the-uid").version(7);
        (draft.key(), read_companion(Kind::ConfigMap, draft.object()).companion().clone())
    }

    #[tokio::test]
    async fn delete_names_the_uid_and_version_that_it_was_decided_on() {
        let ((api, bodies), (at, known)) = (api(), known());
        api.send(&at, CompanionRequest::delete(&known)).await.unwrap();
        let bodies = bodies.lock().unwrap();
        assert_eq!(bodies.len(), 1);
        assert_eq!(bodies[0]["preconditions"], json!({"uid": "the-uid", "resourceVersion": "7"}));
    }
}
