//! The API calls of a migration, with the rights of the person who runs it.

use std::{collections::BTreeMap, fmt, time::Duration};

use kube::{
    Client,
    api::{GetParams, ListParams, Patch, PatchParams},
    core::Request,
};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::{label, tool::Tool};
use crate::inspect::{
    pages::{self, patiently, read_pages},
    refusal::denial,
};
use lockstep_cluster::client::with_timeout;
use lockstep_core::{
    failure::Failure,
    keys::Keys,
    object::{Kind, Meta, NamespaceObject, Object, ObjectKey},
};

const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Requests in flight.
pub const CONCURRENCY: usize = 16;
/// The field manager of what a migration writes.
const FIELD_MANAGER: &str = "lockstep-migrate";

pub struct Requests {
    client: Client,
    instance: String,
}

/// What a patch is for.
#[derive(Clone, Copy)]
pub enum ObjectPath<'a> {
    Object(&'a ObjectKey),
    Namespace(&'a str),
}

impl Requests {
    pub fn new(client: Client, keys: &Keys) -> Self {
        Self { client, instance: keys.instance.clone() }
    }

    async fn call<T: DeserializeOwned>(&self, request: pages::Request) -> Result<T, Failure> {
        let request = request.map_err(|error| Failure::Unavailable(error.to_string()))?;
        patiently(|| with_timeout(REQUEST_TIMEOUT, self.send(request.clone()))).await
    }

    async fn send<T: DeserializeOwned>(&self, request: http::Request<Vec<u8>>) -> Result<T, kube::Error> {
        let mut answer = self.client.request(request).await;
        // What the webhook says is what the person needs to know.
        if let Err(kube::Error::Api(status)) = &mut answer
            && let Some(denial) = denial(status, &self.instance).map(str::to_owned)
        {
            status.message = denial;
        }
        answer
    }

    async fn list_metadata(&self, path: &str, labels: Option<&str>) -> Result<Vec<Meta>, Failure> {
        let (request, label_selector) = (Request::new(path), labels.map(str::to_owned));
        let params = ListParams { label_selector, ..ListParams::default() };
        let keep = |object: NamespaceObject| Some(object.metadata);
        read_pages(&self.client, params, |params| request.list_metadata(params), keep).await
    }

    async fn list_whole(&self, path: &str) -> Result<Vec<Value>, Failure> {
        let request = Request::new(path);
        read_pages(&self.client, ListParams::default(), |params| request.list(params), Some).await
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
        let (collection, name) = ObjectPath::Object(key).split();
        found(self.call(collection.get(name, &GetParams::default())).await)
    }

    pub async fn metadata(&self, place: ObjectPath<'_>) -> Result<Option<Meta>, Failure> {
        let (collection, name) = place.split();
        let answer = self.call(collection.get_metadata(name, &GetParams::default())).await;
        Ok(found::<NamespaceObject>(answer)?.map(|object| object.metadata))
    }

    /// A merge patch of the metadata.
    pub async fn patch(&self, place: ObjectPath<'_>, metadata: &Value, dry_run: bool) -> Result<(), Failure> {
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
            let spec = &workload["spec"];
            let stop = (spec["replicas"] != 0).then_some(("scale deployment", "--replicas=0"));
            running.extend(self.remedy(tool, "Deployment", &workload, &spec["template"], stop).await?);
        }
        for workload in self.list_whole("/apis/batch/v1/cronjobs").await? {
            let spec = &workload["spec"];
            let stop =
                (spec["suspend"] != true).then_some(("patch cronjob", r#"-p '{"spec":{"suspend":true}}'"#));
            let pod = &spec["jobTemplate"]["spec"]["template"];
            running.extend(self.remedy(tool, "CronJob", &workload, pod, stop).await?);
        }
        Ok(running)
    }

    /// How to stop a workload, or that its pods have not ended yet; none if it is stopped, or not of the tool. `stop`
    /// is what goes around its name in kubectl's command.
    async fn remedy(
        &self,
        tool: Tool,
        kind: &str,
        workload: &Value,
        pod: &Value,
        stop: Option<(&str, &str)>,
    ) -> Result<Option<String>, Failure> {
        if !is_of(tool, pod) {
            return Ok(None);
        }
        let text = |field: &str| workload["metadata"][field].as_str().unwrap_or_default();
        let (namespace, name) = (text("namespace"), text("name"));
        if let Some((verb, flags)) = stop {
            return Ok(Some(format!(
                "{kind} {namespace}/{name}: kubectl -n {namespace} {verb} {name} {flags}"
            )));
        }
        let pods = self.list_whole(&format!("/api/v1/namespaces/{namespace}/pods")).await?;
        let has_ended = |pod: &Value| matches!(pod["status"]["phase"].as_str(), Some("Succeeded" | "Failed"));
        let is_stopping = pods.iter().any(|pod| is_of(tool, pod) && !has_ended(pod));
        Ok(is_stopping
            .then(|| format!("{kind} {namespace}/{name}: it is stopping, wait for its pods to end")))
    }
}

impl<'a> ObjectPath<'a> {
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

impl fmt::Display for ObjectPath<'_> {
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
    let containers = pod["spec"]["containers"].as_array().into_iter().flatten();
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
        let pod = |image: &str| json!({"spec": {"containers": [{"image": "proxy:1"}, {"image": image}]}});
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
