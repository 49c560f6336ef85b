//! The API calls of a migration, with the rights of the person who runs it.

use std::{collections::BTreeMap, time::Duration};

use k8s_openapi::api::authorization::v1::{
    ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec,
};
use kube::{
    Api, Client,
    api::{GetParams, ListParams, Patch, PatchParams, PostParams},
    core::Request,
};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;
use tokio::sync::Semaphore;

use super::tool::Tool;
use crate::{
    client::{Failure, with_timeout},
    keys::Keys,
    object::{Kind, Meta, NamespaceObject, Object, ObjectKey},
};

const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Objects in one page of a list.
const PAGE: u32 = 500;
/// Requests in flight, whatever the callers do at a time.
pub const CONCURRENCY: usize = 16;
/// How often the API server may ask for a pause before a request fails.
const MAX_PAUSES: usize = 5;
/// The field manager of what a migration writes.
const FIELD_MANAGER: &str = "lockstep-migrate";

pub struct Cluster {
    client: Client,
    /// How the API server's message begins when the guard refuses a request.
    guard: String,
    requests: Semaphore,
}

/// What a patch is for.
#[derive(Debug, Clone, Copy)]
pub enum Place<'a> {
    Object(&'a ObjectKey),
    Namespace(&'a str),
}

/// A workload of the tool that runs, or that will start pods again.
#[derive(Debug, PartialEq, Eq)]
pub struct Running {
    pub what: String,
    /// How to stop it; none if it is stopping.
    pub command: Option<String>,
}

#[derive(Deserialize)]
struct Page<T> {
    #[serde(default)]
    metadata: PageMeta,
    /// An empty list of metadata is null.
    items: Option<Vec<T>>,
}

#[derive(Deserialize, Default)]
struct PageMeta {
    #[serde(default, rename = "continue")]
    continue_: Option<String>,
}

impl Cluster {
    #[must_use]
    pub fn new(client: Client, keys: &Keys) -> Self {
        Self {
            client,
            guard: format!(".{}\" denied the request: ", keys.instance),
            requests: Semaphore::new(CONCURRENCY),
        }
    }

    /// Sends a request, and again if the API server asks for a pause.
    async fn call<T: DeserializeOwned>(
        &self,
        request: Result<http::Request<Vec<u8>>, kube::core::request::Error>,
    ) -> Result<T, Failure> {
        let request = request.map_err(|error| Failure::Unavailable(error.to_string()))?;
        // It is never closed.
        let _permit = self.requests.acquire().await.ok();
        let mut pauses = 0;
        loop {
            match with_timeout(REQUEST_TIMEOUT, self.send(request.clone())).await {
                Err(Failure::Throttled(pause)) if pauses < MAX_PAUSES => {
                    pauses += 1;
                    tokio::time::sleep(pause).await;
                }
                answer => return answer,
            }
        }
    }

    async fn send<T: DeserializeOwned>(&self, request: http::Request<Vec<u8>>) -> Result<T, kube::Error> {
        match self.client.request(request).await {
            // The guard never quotes content, and what it says is what the person needs to know.
            Err(kube::Error::Api(mut status)) if status.message.contains(&self.guard) => {
                let (_, message) = status.message.split_once(&self.guard).unwrap_or_default();
                status.message = message.to_owned();
                Err(kube::Error::Api(status))
            }
            answer => answer,
        }
    }

    async fn list<T: DeserializeOwned>(
        &self,
        path: &str,
        labels: Option<&str>,
        metadata_only: bool,
    ) -> Result<Vec<T>, Failure> {
        let (request, mut items) = (Request::new(path), Vec::new());
        let mut params = ListParams::default().limit(PAGE);
        params.label_selector = labels.map(str::to_owned);
        loop {
            let page: Page<T> = match metadata_only {
                true => self.call(request.list_metadata(&params)).await?,
                false => self.call(request.list(&params)).await?,
            };
            items.extend(page.items.into_iter().flatten());
            match page.metadata.continue_.filter(|token| !token.is_empty()) {
                Some(token) => params.continue_token = Some(token),
                None => return Ok(items),
            }
        }
    }

    pub async fn namespaces(&self) -> Result<BTreeMap<String, Meta>, Failure> {
        let found: Vec<NamespaceObject> = self.list("/api/v1/namespaces", None, true).await?;
        Ok(found.into_iter().map(|namespace| (namespace.metadata.name.clone(), namespace.metadata)).collect())
    }

    /// The metadata of all objects of a kind, or of those with these labels.
    pub async fn objects(
        &self,
        kind: Kind,
        labels: Option<&str>,
    ) -> Result<BTreeMap<ObjectKey, Meta>, Failure> {
        let found: Vec<NamespaceObject> =
            self.list(&format!("/api/v1/{}", kind.plural()), labels, true).await?;
        Ok(found.into_iter().map(|object| (ObjectKey::of(kind, &object.metadata), object.metadata)).collect())
    }

    pub async fn get(&self, key: &ObjectKey) -> Result<Option<Object>, Failure> {
        found(self.call(collection(key).get(&key.name, &GetParams::default())).await)
    }

    pub async fn metadata(&self, place: Place<'_>) -> Result<Option<Meta>, Failure> {
        let (collection, name) = place.split();
        let object: Option<NamespaceObject> =
            found(self.call(collection.get_metadata(name, &GetParams::default())).await)?;
        Ok(object.map(|object| object.metadata))
    }

    /// A merge patch of the metadata.
    pub async fn patch(&self, place: Place<'_>, metadata: &Value, dry_run: bool) -> Result<(), Failure> {
        let (collection, name) = place.split();
        let field_manager = Some(FIELD_MANAGER.to_owned());
        let params = PatchParams { dry_run, field_manager, ..PatchParams::default() };
        let patch = Patch::Merge(serde_json::json!({"metadata": metadata}));
        self.call::<NamespaceObject>(collection.patch_metadata(name, &params, &patch)).await.map(drop)
    }

    /// Whether this person may patch objects of a kind in a namespace.
    pub async fn may_patch(&self, kind: Kind, namespace: &str) -> Result<bool, Failure> {
        let attributes = ResourceAttributes {
            namespace: Some(namespace.to_owned()),
            resource: Some(kind.plural().to_owned()),
            verb: Some("patch".to_owned()),
            ..ResourceAttributes::default()
        };
        let spec =
            SelfSubjectAccessReviewSpec { resource_attributes: Some(attributes), ..Default::default() };
        let review = SelfSubjectAccessReview { spec, ..Default::default() };
        let reviews: Api<SelfSubjectAccessReview> = Api::all(self.client.clone());
        let answer = with_timeout(REQUEST_TIMEOUT, reviews.create(&PostParams::default(), &review)).await?;
        Ok(answer.status.is_some_and(|status| status.allowed))
    }

    /// The Deployments and CronJobs of the tool that run, or are stopping.
    pub async fn running(&self, tool: Tool) -> Result<Vec<Running>, Failure> {
        let mut running = Vec::new();
        let deployments: Vec<Value> = self.list("/apis/apps/v1/deployments", None, false).await?;
        for found in deployments.iter().filter(|found| is_of(tool, &found["spec"]["template"])) {
            let (namespace, name) = names(found);
            let what = format!("Deployment {namespace}/{name}");
            if found["spec"]["replicas"].as_u64() != Some(0) {
                let command = format!("kubectl -n {namespace} scale deployment {name} --replicas=0");
                running.push(Running { what, command: Some(command) });
            } else if self.has_pods(namespace, &found["spec"]["selector"]["matchLabels"]).await? {
                running.push(Running { what, command: None });
            }
        }
        let cron_jobs: Vec<Value> = self.list("/apis/batch/v1/cronjobs", None, false).await?;
        for found in
            cron_jobs.iter().filter(|found| is_of(tool, &found["spec"]["jobTemplate"]["spec"]["template"]))
        {
            let (namespace, name) = names(found);
            let what = format!("CronJob {namespace}/{name}");
            if found["spec"]["suspend"] != true {
                let command = format!(
                    "kubectl -n {namespace} patch cronjob {name} -p '{{\"spec\":{{\"suspend\":true}}}}'"
                );
                running.push(Running { what, command: Some(command) });
            } else if found["status"]["active"].as_array().is_some_and(|active| !active.is_empty()) {
                running.push(Running { what, command: None });
            }
        }
        Ok(running)
    }

    /// Whether a Deployment that was scaled down has pods that have not ended.
    async fn has_pods(&self, namespace: &str, labels: &Value) -> Result<bool, Failure> {
        let pairs = labels.as_object().into_iter().flatten();
        let pairs: Vec<String> =
            pairs.map(|(key, value)| format!("{key}={}", value.as_str().unwrap_or_default())).collect();
        let path = format!("/api/v1/namespaces/{namespace}/pods");
        let pods: Vec<Value> = self.list(&path, Some(&pairs.join(",")), false).await?;
        let has_ended = |pod: &Value| matches!(pod["status"]["phase"].as_str(), Some("Succeeded" | "Failed"));
        Ok(!pods.iter().all(has_ended))
    }
}

impl<'a> Place<'a> {
    fn split(self) -> (Request, &'a str) {
        match self {
            Self::Object(key) => (collection(key), &key.name),
            Self::Namespace(name) => (Request::new("/api/v1/namespaces"), name),
        }
    }
}

fn collection(key: &ObjectKey) -> Request {
    Request::new(format!("/api/v1/namespaces/{}/{}", key.namespace, key.kind.plural()))
}

fn found<T>(answer: Result<T, Failure>) -> Result<Option<T>, Failure> {
    match answer {
        Ok(object) => Ok(Some(object)),
        Err(Failure::NotFound) => Ok(None),
        Err(failure) => Err(failure),
    }
}

/// Whether a container of a pod template has the tool's image, from any registry and with any tag.
fn is_of(tool: Tool, template: &Value) -> bool {
    let containers = template["spec"]["containers"].as_array().into_iter().flatten();
    let mut images = containers.filter_map(|container| container["image"].as_str());
    images.any(|image| {
        let name = image.rsplit('/').next().unwrap_or_default();
        name.split([':', '@']).next() == Some(tool.image())
    })
}

fn names(object: &Value) -> (&str, &str) {
    let text = |field: &str| object["metadata"][field].as_str().unwrap_or_default();
    (text("namespace"), text("name"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn workloads_of_the_tool_are_known_by_their_image() {
        let template =
            |image: &str| json!({"spec": {"containers": [{"image": "proxy:1"}, {"image": image}]}});
        for image in [
            "quay.io/mittwald/kubernetes-replicator:v2.12.4",
            "registry.example:5000/mirror/kubernetes-replicator@sha256:00",
            "kubernetes-replicator",
        ] {
            assert!(is_of(Tool::Replicator, &template(image)), "{image}");
            assert!(!is_of(Tool::Reflector, &template(image)), "{image}");
        }
        assert!(is_of(Tool::Reflector, &template("docker.io/emberstack/kubernetes-reflector:10.0.63")));
        assert!(!is_of(Tool::Reflector, &json!({})));
    }
}
