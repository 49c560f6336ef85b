//! Changes → API calls. Every update is good for one state only, every delete for one object.

use std::{collections::BTreeMap, time::Duration};

use json_patch::{Patch as Operations, PatchOperation};
use kube::{
    Client,
    api::{DeleteParams, Patch, PatchParams, PostParams, Preconditions},
    core::Request,
};
use serde::Serialize;
use serde_json::{Value, json, value::RawValue};
use tokio::sync::Semaphore;

use crate::{
    client::{Failure, with_timeout},
    keys::Keys,
    leader::Claim,
    marks,
    object::{Kind, Object, ObjectKey, OwnerReference},
    patch,
    world::state::{Companion, Source, Wish},
};

/// How long one call may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// Writes companions, so many at a time.
pub struct Writer {
    client: Client,
    keys: std::sync::Arc<Keys>,
    claim: Claim,
    permits: Semaphore,
    writes: u32,
}

/// A request with so much content takes one of the permits, a larger one more of them: what is under way at once, and
/// so the memory for it, is bounded.
const SHARE: usize = 64 * 1024;

/// A companion as it is created. Content is spliced in as it was packed, not parsed again.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Body<'a> {
    api_version: &'static str,
    kind: &'static str,
    metadata: BodyMeta<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    data: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    binary_data: Option<&'a RawValue>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    type_: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    immutable: Option<bool>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct BodyMeta<'a> {
    namespace: &'a str,
    name: &'a str,
    labels: &'a BTreeMap<String, String>,
    annotations: &'a BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    owner_references: Vec<OwnerReference>,
}

impl Writer {
    #[must_use]
    pub fn new(client: Client, keys: std::sync::Arc<Keys>, claim: Claim, writes: usize) -> Self {
        let bound = u32::try_from(writes).unwrap_or(u32::MAX);
        Self { client, keys, claim, permits: Semaphore::new(writes), writes: bound }
    }

    pub async fn get(&self, key: &ObjectKey) -> Result<Object, Failure> {
        let _permit = self.permits.acquire().await;
        let request = collection(key).get(&key.name, &kube::api::GetParams::default());
        self.call(request).await
    }

    /// Creates a companion and returns it as the API server has it.
    pub async fn create(&self, source: &Source, wish: &Wish, at: &ObjectKey) -> Result<Object, Failure> {
        let payload = &wish.payload;
        // Before the body is built: of a thousand writes that wait, none holds one.
        let _permit = self.permits.acquire_many(self.share(wish)).await;
        let body = Body {
            api_version: "v1",
            kind: at.kind.as_str(),
            metadata: BodyMeta {
                namespace: &at.namespace,
                name: &at.name,
                labels: &wish.marks.labels,
                annotations: &wish.marks.annotations,
                owner_references: marks::expected_owners(&source.key, &source.uid, &at.namespace),
            },
            data: payload.data.as_deref(),
            binary_data: payload.binary.as_deref(),
            type_: payload.type_.as_deref(),
            immutable: payload.immutable.then_some(true),
        };
        let body = serde_json::to_vec(&body).map_err(unsendable)?;
        let params = PostParams { field_manager: Some(self.keys.instance.clone()), ..PostParams::default() };
        self.call(collection(at).create(&params, body)).await
    }

    /// Puts a companion right: content and marks are replaced, what others put there stays.
    pub async fn update(
        &self,
        source: &Source,
        wish: &Wish,
        at: &ObjectKey,
        known: &Companion,
    ) -> Result<Object, Failure> {
        let _permit = self.permits.acquire_many(self.share(wish)).await;
        let operations = operations(source, wish, at, known)?;
        let params =
            PatchParams { field_manager: Some(self.keys.instance.clone()), ..PatchParams::default() };
        let patch: Patch<()> = Patch::Json(operations);
        self.call(collection(at).patch(&at.name, &params, &patch)).await
    }

    pub async fn delete(&self, at: &ObjectKey, known: &Companion) -> Result<(), Failure> {
        let params = DeleteParams::background().preconditions(Preconditions {
            uid: Some(known.uid.clone()),
            resource_version: Some(known.resource_version.clone()),
        });
        let _permit = self.permits.acquire().await;
        let answer = self.call::<serde::de::IgnoredAny>(collection(at).delete(&at.name, &params)).await;
        match answer {
            Ok(_) | Err(Failure::NotFound) => Ok(()),
            Err(failure) => Err(failure),
        }
    }

    fn share(&self, wish: &Wish) -> u32 {
        u32::try_from(1 + wish.payload.len() / SHARE).unwrap_or(u32::MAX).min(self.writes)
    }

    async fn call<T: serde::de::DeserializeOwned>(
        &self,
        request: Result<http::Request<Vec<u8>>, kube::core::request::Error>,
    ) -> Result<T, Failure> {
        let request = request.map_err(|error| Failure::Unavailable(error.to_string()))?;
        // The last moment: it may have waited long for a permit.
        if !self.claim.is_held() {
            return Err(Failure::NotLeader);
        }
        with_timeout(PATIENCE, self.client.request(request)).await
    }
}

fn collection(key: &ObjectKey) -> Request {
    Request::new(format!("/api/v1/namespaces/{}/{}", key.namespace, key.kind.plural()))
}

/// A JSON patch that needs nothing of the old object but what [`Companion`] keeps of it.
///
/// `add` replaces what is there; a null value takes a field away.
fn operations(
    source: &Source,
    wish: &Wish,
    at: &ObjectKey,
    known: &Companion,
) -> Result<Operations, Failure> {
    let mut ops = vec![patch::only_if_version(&known.resource_version)];
    if known.finalizers {
        ops.push(patch::add(&["metadata", "finalizers"], json!([])));
    }
    if known.terminating {
        return Ok(Operations(ops));
    }
    let raw = |raw: Option<&RawValue>| match raw {
        Some(raw) => serde_json::from_str::<Value>(raw.get()).map_err(unsendable),
        None => Ok(Value::Null),
    };
    ops.push(patch::add(&["data"], raw(wish.payload.data.as_deref())?));
    if at.kind == Kind::ConfigMap {
        ops.push(patch::add(&["binaryData"], raw(wish.payload.binary.as_deref())?));
    }
    ops.push(patch::add(&["immutable"], if wish.payload.immutable { json!(true) } else { Value::Null }));
    let owners = marks::expected_owners(&source.key, &source.uid, &at.namespace);
    ops.push(patch::add(&["metadata", "ownerReferences"], json!(owners)));

    let none = marks::RemovableKeys::default();
    let extras = known.extras.as_deref().unwrap_or(&none);
    put(&mut ops, "labels", &wish.marks.labels, known.has_labels, &extras.labels);
    put(&mut ops, "annotations", &wish.marks.annotations, known.has_annotations, &extras.annotations);
    Ok(Operations(ops))
}

/// Sets what is wanted in a map, beside what is not ours, and removes those of `extras` that are not wanted.
fn put(
    ops: &mut Vec<PatchOperation>,
    map: &str,
    wanted: &BTreeMap<String, String>,
    exists: bool,
    extras: &[String],
) {
    if !exists {
        ops.push(patch::add(&["metadata", map], json!(wanted)));
        return;
    }
    for key in extras.iter().filter(|key| !wanted.contains_key(*key)) {
        ops.push(patch::remove(&["metadata", map, key]));
    }
    for (key, value) in wanted {
        ops.push(patch::add(&["metadata", map, key], json!(value)));
    }
}

/// Our own types always serialise; if not, the error must not quote what it choked on.
#[allow(clippy::needless_pass_by_value)]
fn unsendable(_: serde_json::Error) -> Failure {
    Failure::Unavailable("a request could not be written as JSON".to_owned())
}
