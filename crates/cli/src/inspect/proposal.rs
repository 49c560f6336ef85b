//! What would happen to companions if an object were applied: the API server says in a dry run what it would store, and
//! whether somebody refuses it; the plan for that object says the rest.

use std::collections::{BTreeMap, BTreeSet};

use futures::{StreamExt, stream};
use http::{HeaderMap, header::WARNING};
use kube::{
    Client,
    api::{Patch, PatchParams, PostParams},
    core::Request,
};
use serde::Serialize;
use serde_json::{Value, json};

use super::{
    refusal::{denial, try_write},
    snapshot::{Snapshot, read_object},
    status::{describe_holder, without_kind},
};
use lockstep_cluster::client;
use lockstep_core::{
    failure::Failure,
    keys::Keys,
    object::{Kind, Object, ObjectKey, names},
    plan::{
        Trouble, decide,
        outcome::{self, Outcome, PlaceEffect, Verb},
    },
    policy::{Policy, Targets},
    text::shorten,
    world::{ObservedSource, Source},
};

/// How much of a refusal is quoted.
const MAX_REASON_CHARS: usize = 500;
/// What `kubectl apply` compares with, and its name in managedFields.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";
const FIELD_MANAGER: &str = "kubectl-client-side-apply";
/// How many companions are read to compare their keys.
const MAX_COMPARED: usize = 50;
const CONCURRENT_READS: usize = 16;
/// How many new companions are checked for other objects of that name.
const MAX_LOOKUPS: usize = 1000;

/// Why nothing can be said about an object.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("a {0} has no valid metadata.name or metadata.namespace: kubectl apply needs them")]
    NoName(&'static str),
    #[error("{0} cannot be read: {1}")]
    Read(ObjectKey, Failure),
    #[error("a dry run of {0} failed: {1}")]
    DryRun(ObjectKey, Failure),
}

/// What would happen because of one object.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Proposal {
    #[serde(flatten)]
    pub key: ObjectKey,
    /// Whether it is a source, before or after. Lockstep does nothing about other objects.
    pub is_source: bool,
    /// Why the webhook, or the API server itself, refuses it, if one does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
    pub warnings: Vec<String>,
    pub changes: Vec<ProposedChange>,
    /// How many new companions were not checked for other objects of that name, because they cannot be read.
    pub not_checked: usize,
    /// Which namespaces it reaches cannot be told, because the person may not see them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub not_seen: Vec<String>,
}

#[derive(Serialize)]
pub struct ProposedChange {
    pub verb: Verb,
    #[serde(flatten, serialize_with = "without_kind")]
    pub at: ObjectKey,
    pub reason: String,
    /// Which keys differ from those of the companion as it is; none if it was not compared. Never a value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keys: Option<KeyDiff>,
}

/// The names of keys that differ.
#[derive(Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct KeyDiff {
    pub added: Vec<String>,
    pub changed: Vec<String>,
    pub removed: Vec<String>,
}

impl KeyDiff {
    /// Compares the content of a companion with what it would be.
    fn between(before: &Object, after: &Object, policy: &Policy) -> Self {
        let old = [&before.data, &before.binary_data].into_iter().flatten().flatten();
        let old: BTreeMap<&str, &String> = old.map(|(key, value)| (key.as_str(), value)).collect();
        let new = [&after.data, &after.binary_data].map(|map| policy.keys.selected(map.as_ref()));
        let mut diff = Self::default();
        let mut removed: BTreeSet<&str> = old.keys().copied().collect();
        for (key, value) in new.into_iter().flatten().collect::<BTreeMap<_, _>>() {
            removed.remove(key);
            match old.get(key) {
                None => diff.added.push(key.to_owned()),
                Some(found) if *found != value => diff.changed.push(key.to_owned()),
                Some(_) => {}
            }
        }
        diff.removed = removed.into_iter().map(str::to_owned).collect();
        diff
    }
}

/// A manifest for a plan.
pub struct Manifest {
    pub kind: Kind,
    pub namespace: String,
    pub object: Value,
}

impl Manifest {
    /// The namespaces that a plan for it looks at: its own, and those that it lists by name.
    pub fn namespaces(&self, keys: &Keys) -> impl Iterator<Item = String> {
        let listed = self.object["metadata"]["annotations"][&keys.target_namespaces].as_str();
        let listed = listed.and_then(|text| Targets::list(text, &self.namespace).ok());
        listed.into_iter().flat_map(|targets| targets.names).chain([self.namespace.clone()])
    }
}

/// What would happen if this object were applied as `kubectl apply` does it.
pub async fn propose(
    client: &Client,
    snapshot: &mut Snapshot,
    Manifest { kind, namespace, object }: Manifest,
) -> Result<Proposal, Error> {
    let name = object["metadata"]["name"].as_str().filter(|name| names::is_subdomain(name));
    let name = name.filter(|_| names::is_label(&namespace)).ok_or(Error::NoName(kind.as_str()))?;
    let (key, keys) = (ObjectKey::new(kind, &namespace, name), snapshot.scope.keys.clone());
    let was_source = snapshot.world.read(|world| world.source(&key).is_some());
    let mut proposal = Proposal {
        is_source: was_source || object["metadata"]["labels"][&keys.managed] == "true",
        ..Proposal::about(&key)
    };
    let Some(object) = dry_run(client, &keys.instance, &mut proposal, object).await? else {
        return Ok(proposal);
    };
    let source = keys
        .is_source(&object.metadata.labels)
        .then(|| ObservedSource::read(&keys, &snapshot.scope.rules, kind, object.clone()).source);
    proposal.is_source |= source.is_some();
    if proposal.is_source {
        proposal.plan(client, snapshot, source.as_ref(), Some(&object)).await;
    }
    Ok(proposal)
}

/// The object that the API server would store if the manifest were applied; none if it refuses it. Adds why, or the
/// warnings to its author.
async fn dry_run(
    client: &Client,
    instance: &str,
    proposal: &mut Proposal,
    mut manifest: Value,
) -> Result<Option<Object>, Error> {
    let key = &proposal.key;
    let live = match read_object(client, key).await {
        Ok(live) => Some(live),
        Err(Failure::NotFound) => None,
        Err(failure) => return Err(Error::Read(key.clone(), failure)),
    };
    let metadata = &mut manifest["metadata"];
    metadata["namespace"] = json!(&*key.namespace);
    if metadata["annotations"].is_null() {
        // As kubectl does, so that those of others stay.
        metadata["annotations"] = json!({});
    }
    let objects = Request::new(format!("/api/v1/namespaces/{}/{}", key.namespace, key.kind.plural()));
    let field_manager = Some(FIELD_MANAGER.to_owned());
    let request = match live {
        None => {
            let params = PostParams { dry_run: true, field_manager };
            objects.create(&params, manifest.to_string().into_bytes())
        }
        Some(live) => {
            let last = live.metadata.annotations.get(LAST_APPLIED);
            let last = last.and_then(|text| serde_json::from_str(text).ok()).unwrap_or_default();
            let params = PatchParams { dry_run: true, field_manager, ..PatchParams::default() };
            objects.patch(&key.name, &params, &Patch::Merge(patch_of(&last, manifest)))
        }
    };
    let failed = |failure| Error::DryRun(key.clone(), failure);
    let status = match try_write(client, request).await.map_err(failed)? {
        Ok((headers, body)) => {
            let object = serde_json::from_slice(&body);
            let undecodable = |error| failed(client::failure(kube::Error::SerdeError(error)));
            proposal.warnings = warnings(&headers);
            return Ok(Some(object.map_err(undecodable)?));
        }
        Err(status) => status,
    };
    proposal.refused = Some(match (denial(&status, instance), Failure::from(status.clone())) {
        (Some(denial), _) => denial.to_owned(),
        (None, Failure::Forbidden(why)) => {
            format!("{why} (a plan for a file is a dry run: it needs the right to write)")
        }
        // These messages quote no content.
        (None, Failure::NotFound | Failure::Unavailable(_)) => shorten(&status.message, MAX_REASON_CHARS),
        (None, failure) => failure.to_string(),
    });
    Ok(None)
}

/// What `kubectl apply` amounts to as a JSON merge patch: the manifest, and null for what the last one had and this one
/// has not.
fn patch_of(last: &Value, mut manifest: Value) -> Value {
    if let (Value::Object(last), Value::Object(new)) = (last, &mut manifest) {
        for (key, old) in last {
            let now = new.entry(key).or_insert(Value::Null);
            *now = patch_of(old, now.take());
        }
    }
    manifest
}

/// The texts of `Warning: 299 - "text"`, without the plan of the webhook: the one that is made here says more.
fn warnings(headers: &HeaderMap) -> Vec<String> {
    let text = |value: &http::HeaderValue| {
        let value = String::from_utf8_lossy(value.as_bytes());
        let text = value.split_once('"')?.1.strip_suffix('"')?;
        Some(text.replace("\\\"", "\"").replace("\\\\", "\\"))
    };
    let all = headers.get_all(WARNING).iter().filter_map(text);
    all.filter(|text| !text.starts_with(outcome::WARNING)).collect()
}

/// What the controller has left to do for a source as it is.
pub async fn pending(client: &Client, snapshot: &mut Snapshot, key: &ObjectKey) -> Proposal {
    let source = snapshot.world.read(|world| world.shared_source(key));
    let live = read_object(client, key).await.ok();
    let mut proposal = Proposal { is_source: true, ..Proposal::about(key) };
    proposal.plan(client, snapshot, source.as_deref(), live.as_ref()).await;
    proposal
}

impl Proposal {
    fn about(key: &ObjectKey) -> Self {
        Self {
            key: key.clone(),
            is_source: false,
            refused: None,
            warnings: Vec::new(),
            changes: Vec::new(),
            not_checked: 0,
            not_seen: Vec::new(),
        }
    }

    /// Adds what the controller would do for the source in this state.
    async fn plan(
        &mut self,
        client: &Client,
        snapshot: &mut Snapshot,
        source: Option<&Source>,
        object: Option<&Object>,
    ) {
        let key = &self.key;
        let mut outcome = snapshot.world.read(|world| Outcome::of(world, key, source));
        let creates = outcome.creates().take(MAX_LOOKUPS).cloned().collect();
        snapshot.look_up(client, creates).await;
        snapshot.world.read(|world| {
            // A create may meet an object that no list shows.
            outcome.complete(|at| {
                let (source, found) = (source?, snapshot.read_of(at)?);
                Some(PlaceEffect::of(&decide(world, source, at, found, false)))
            });
        });
        let policy = source.and_then(|source| Some(&source.desired.as_ref().ok()?.policy));
        let view = &snapshot.view;
        for trouble in outcome.troubles {
            let text = match &trouble {
                Trouble::Fault(fault) => format!("it cannot be mirrored: {fault}"),
                other => other.to_string(),
            };
            if view.can_tell(key.kind, &trouble) && !self.warnings.contains(&text) {
                self.warnings.push(text);
            }
        }
        if let Some(Policy { targets, .. }) = policy {
            let unseen = targets.names.iter().filter(|name| !view.sees_companions(key.kind, name));
            self.not_seen.extend(unseen.map(|name| format!("namespace {name}")));
            if targets.has_patterns() && !view.sees_all_namespaces() {
                self.not_seen.push("the namespaces that a pattern or a selector matches".to_owned());
            }
        }
        self.not_checked = outcome.not_checked;
        for (at, effect) in outcome.effects {
            let verb = effect.verb();
            let reason = match effect {
                PlaceEffect::Change(_, reason) => reason.to_owned(),
                PlaceEffect::Conflict(holder) => format!("held by {}", describe_holder(&holder)),
            };
            self.changes.push(ProposedChange { verb, at, reason, keys: None });
        }
        self.changes.sort_by(|a, b| (a.verb, &a.at).cmp(&(b.verb, &b.at)));
        if let (Some(object), Some(policy)) = (object, policy) {
            self.compare_keys(client, object, policy).await;
        }
    }

    /// Reads companions that would change, and compares their keys with those of the source.
    async fn compare_keys(&mut self, client: &Client, object: &Object, policy: &Policy) {
        let is_compared =
            |change: &&mut ProposedChange| matches!(change.verb, Verb::Update | Verb::Recreate | Verb::Adopt);
        let compared = self.changes.iter_mut().filter(is_compared).take(MAX_COMPARED);
        stream::iter(compared)
            .for_each_concurrent(CONCURRENT_READS, |change| async move {
                let found = read_object(client, &change.at).await.ok();
                change.keys = found.map(|found| KeyDiff::between(&found, object, policy));
            })
            .await;
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn patch_removes_what_the_last_manifest_had_and_keeps_what_others_wrote() {
        let last = json!({
            "metadata": {"labels": {"old": "1"}, "annotations": {"gone": "1"}},
            "data": {"a": "1", "b": "1"}, "immutable": true,
        });
        let manifest =
            json!({"metadata": {"name": "c", "labels": {"new": "1"}, "annotations": {}}, "data": {"a": "2"}});
        assert_eq!(patch_of(&Value::Null, manifest.clone()), manifest);
        assert_eq!(
            patch_of(&last, manifest),
            json!({
                "metadata": {"name": "c", "labels": {"new": "1", "old": null}, "annotations": {"gone": null}},
                "data": {"a": "2", "b": null}, "immutable": null,
            })
        );
    }

    #[test]
    fn warnings_are_read_from_headers_without_the_plan() {
        let mut headers = HeaderMap::new();
        for value in [r#"299 - "a \"b\" \\ é""#, "299 - \"lockstep plan: create 1\"", "nonsense"] {
            headers.append(WARNING, http::HeaderValue::from_bytes(value.as_bytes()).unwrap());
        }
        assert_eq!(warnings(&headers), [r#"a "b" \ é"#]);
    }

    #[test]
    fn keys_are_compared_under_the_names_they_are_copied_to() {
        let object =
            |data: Value| serde_json::from_value::<Object>(json!({"metadata": {}, "data": data})).unwrap();
        let keys = lockstep_core::testing::keys();
        let source = lockstep_core::testing::source("home", "s").annotate("keys", "a,b=c");
        let policy = Policy::parse(&keys, &source.object.metadata).unwrap();
        let before = object(json!({"a": "1", "d": "1"}));
        let after = object(json!({"a": "2", "b": "1", "e": "1"}));
        let diff = KeyDiff::between(&before, &after, &policy);
        let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        assert_eq!((diff.added, diff.changed, diff.removed), (names(&["c"]), names(&["a"]), names(&["d"])));
        let all = Policy { keys: Default::default(), ..policy };
        assert_eq!(KeyDiff::between(&before, &before, &all), KeyDiff::default());
    }
}
