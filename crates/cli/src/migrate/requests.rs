//! The API calls of a migration, with the rights of the person who runs it.

use std::{collections::BTreeMap, fmt, time::Duration};

use kube::{
    Client,
    api::{GetParams, ListParams, Patch, PatchParams},
    core::Request,
};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::Value;
use tokio::sync::Semaphore;

use super::{label, tool::Tool};
use lockstep_cluster::client::with_timeout;
use lockstep_core::{
    failure::Failure,
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

pub struct Requests {
    client: Client,
    /// How the API server's message begins when the webhook refuses a request.
    denial: String,
    in_flight: Semaphore,
}

/// What a patch is for.
#[derive(Debug, Clone, Copy)]
pub enum Place<'a> {
    Object(&'a ObjectKey),
    Namespace(&'a str),
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

type HttpRequest = Result<http::Request<Vec<u8>>, kube::core::request::Error>;

impl Requests {
    pub fn new(client: Client, keys: &Keys) -> Self {
        let denial = format!(".{}\" denied the request: ", keys.instance);
        Self { client, denial, in_flight: Semaphore::new(CONCURRENCY) }
    }

    /// Sends a request, and again if the API server asks for a pause.
    async fn call<T: DeserializeOwned>(&self, request: HttpRequest) -> Result<T, Failure> {
        let request = request.map_err(|error| Failure::Unavailable(error.to_string()))?;
        // It is never closed.
        let _permit = self.in_flight.acquire().await.ok();
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
        let mut answer = self.client.request(request).await;
        // The webhook never quotes content, and what it says is what the person needs to know.
        if let Err(kube::Error::Api(status)) = &mut answer
            && let Some((_, message)) = status.message.split_once(&self.denial)
        {
            status.message = message.to_owned();
        }
        answer
    }

    /// Reads all pages of a list. `page` makes the request for one.
    async fn list<T: DeserializeOwned>(
        &self,
        labels: Option<&str>,
        page: impl Fn(&ListParams) -> HttpRequest,
    ) -> Result<Vec<T>, Failure> {
        let label_selector = labels.map(str::to_owned);
        let mut params = ListParams { label_selector, limit: Some(PAGE), ..ListParams::default() };
        let mut items = Vec::new();
        loop {
            let found: Page<T> = self.call(page(&params)).await?;
            items.extend(found.items.into_iter().flatten());
            params.continue_token = found.metadata.continue_.filter(|token| !token.is_empty());
            if params.continue_token.is_none() {
                return Ok(items);
            }
        }
    }

    async fn list_metadata(&self, path: &str, labels: Option<&str>) -> Result<Vec<Meta>, Failure> {
        let request = Request::new(path);
        let found: Vec<NamespaceObject> = self.list(labels, |params| request.list_metadata(params)).await?;
        Ok(found.into_iter().map(|object| object.metadata).collect())
    }

    async fn list_whole(&self, path: &str) -> Result<Vec<Value>, Failure> {
        let request = Request::new(path);
        self.list(None, |params| request.list(params)).await
    }

    pub async fn namespaces(&self) -> Result<BTreeMap<String, Meta>, Failure> {
        let found = self.list_metadata("/api/v1/namespaces", None).await?;
        Ok(found.into_iter().map(|meta| (meta.name.clone(), meta)).collect())
    }

    /// The metadata of all objects of a kind, or of those with these labels.
    pub async fn objects(
        &self,
        kind: Kind,
        labels: Option<&str>,
    ) -> Result<BTreeMap<ObjectKey, Meta>, Failure> {
        let found = self.list_metadata(&format!("/api/v1/{}", kind.plural()), labels).await?;
        Ok(found.into_iter().map(|meta| (ObjectKey::of(kind, &meta), meta)).collect())
    }

    pub async fn get(&self, key: &ObjectKey) -> Result<Option<Object>, Failure> {
        let (collection, name) = Place::Object(key).split();
        found(self.call(collection.get(name, &GetParams::default())).await)
    }

    pub async fn metadata(&self, place: Place<'_>) -> Result<Option<Meta>, Failure> {
        let (collection, name) = place.split();
        let answer = self.call(collection.get_metadata(name, &GetParams::default())).await;
        Ok(found::<NamespaceObject>(answer)?.map(|object| object.metadata))
    }

    /// A merge patch of the metadata.
    pub async fn patch(&self, place: Place<'_>, metadata: &Value, dry_run: bool) -> Result<(), Failure> {
        let (collection, name) = place.split();
        let field_manager = Some(FIELD_MANAGER.to_owned());
        let params = PatchParams { dry_run, field_manager, ..PatchParams::default() };
        let patch = Patch::Merge(serde_json::json!({"metadata": metadata}));
        let _: NamespaceObject = self.call(collection.patch_metadata(name, &params, &patch)).await?;
        Ok(())
    }

    /// The Deployments and CronJobs of the tool that run, or are stopping, each with what to do about it.
    pub async fn running(&self, tool: Tool) -> Result<Vec<String>, Failure> {
        let mut running = Vec::new();
        for workload in self.list_whole("/apis/apps/v1/deployments").await? {
            if is_of(tool, &workload["spec"]["template"]["spec"]) {
                let is_on = workload["spec"]["replicas"] != 0;
                let stop = |name: &str| format!("scale deployment {name} --replicas=0");
                running.extend(self.remedy(tool, "Deployment", &workload, is_on, stop).await?);
            }
        }
        for workload in self.list_whole("/apis/batch/v1/cronjobs").await? {
            if is_of(tool, &workload["spec"]["jobTemplate"]["spec"]["template"]["spec"]) {
                let is_on = workload["spec"]["suspend"] != true;
                let stop =
                    |name: &str| format!("patch cronjob {name} -p '{{\"spec\":{{\"suspend\":true}}}}'");
                running.extend(self.remedy(tool, "CronJob", &workload, is_on, stop).await?);
            }
        }
        Ok(running)
    }

    /// How to stop a workload, or that its pods have not ended yet; none if it is stopped.
    async fn remedy(
        &self,
        tool: Tool,
        kind: &str,
        workload: &Value,
        is_on: bool,
        stop: impl Fn(&str) -> String,
    ) -> Result<Option<String>, Failure> {
        let text = |field: &str| workload["metadata"][field].as_str().unwrap_or_default();
        let (namespace, name) = (text("namespace"), text("name"));
        if is_on {
            return Ok(Some(format!("{kind} {namespace}/{name}: kubectl -n {namespace} {}", stop(name))));
        }
        let pods = self.list_whole(&format!("/api/v1/namespaces/{namespace}/pods")).await?;
        let has_ended = |pod: &Value| matches!(pod["status"]["phase"].as_str(), Some("Succeeded" | "Failed"));
        let is_stopping = pods.iter().any(|pod| is_of(tool, &pod["spec"]) && !has_ended(pod));
        Ok(is_stopping
            .then(|| format!("{kind} {namespace}/{name}: it is stopping, wait for its pods to end")))
    }
}

impl<'a> Place<'a> {
    /// The collection and the name.
    fn split(self) -> (Request, &'a str) {
        match self {
            Self::Object(key) => {
                let path = format!("/api/v1/namespaces/{}/{}", key.namespace, key.kind.plural());
                (Request::new(path), &key.name)
            }
            Self::Namespace(name) => (Request::new("/api/v1/namespaces"), name),
        }
    }
}

impl fmt::Display for Place<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Object(key) => f.write_str(&label(key)),
            Self::Namespace(name) => write!(f, "namespace {name}"),
        }
    }
}

fn found<T>(answer: Result<T, Failure>) -> Result<Option<T>, Failure> {
    match answer {
        Err(Failure::NotFound) => Ok(None),
        answer => answer.map(Some),
    }
}

/// Whether a container of a pod has the tool's image, from any registry and with any tag.
fn is_of(tool: Tool, pod: &Value) -> bool {
    let containers = pod["containers"].as_array().into_iter().flatten();
    let mut images = containers.filter_map(|container| container["image"].as_str());
    images.any(|image| {
        let name = image.rsplit('/').next().unwrap_or_default();
        name.split([':', '@']).next() == Some(tool.image())
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn workloads_of_the_tool_are_known_by_their_image() {
        let pod = |image: &str| json!({"containers": [{"image": "proxy:1"}, {"image": image}]});
        for image in [
            "quay.io/mittwald/kubernetes-replicator:v2.12.4",
            "registry.example:5000/mirror/kubernetes-replicator@sha256:00",
            "kubernetes-replicator",
        ] {
            assert!(is_of(Tool::Replicator, &pod(image)), "{image}");
            assert!(!is_of(Tool::Reflector, &pod(image)), "{image}");
        }
        assert!(is_of(Tool::Reflector, &pod("docker.io/emberstack/kubernetes-reflector:10.0.63")));
        assert!(!is_of(Tool::Reflector, &json!({})));
    }
}
