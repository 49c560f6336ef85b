//! What would happen to companions if an object were applied: the guard's verdict, and the mirror's plan.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr},
};

use futures::{StreamExt, stream};
use k8s_openapi::ByteString;
use kube::Client;
use serde::Serialize;
use serde_json::{Map, Value};

use super::{
    snapshot::{Snapshot, View, read_object},
    status::describe_holder,
};
use crate::{
    client::{Failure, user_info},
    guard::{
        access::AccessChecker,
        admission_request::{Operation, Request, User},
        defaulting::stamp_defaults,
        denial::Denial,
        fair_semaphore::Caller,
        review::{Case, Rules, Verdict},
    },
    keys::Keys,
    names,
    object::{Kind, Object, ObjectKey},
    plan::{Action, Decision, Holder, TargetContext, Trouble, WriteReason, decide, plan_as},
    policy::{Policy, Targets},
    world::{ObservedSource, Source},
};

/// What `kubectl apply` compares with.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";
/// How many companions are read to compare their keys.
const MAX_COMPARED: usize = 50;
const CONCURRENT_READS: usize = 16;
/// How many new companions are checked for other objects of that name.
const MAX_LOOKUPS: usize = 1000;

/// Why nothing can be said about an object.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0} has no valid metadata.name: kubectl apply needs one")]
    NoName(&'static str),
    #[error("{0} has no valid metadata.namespace: correct it")]
    NoNamespace(&'static str),
    #[error("{0} cannot be read as a ConfigMap or Secret: check its fields")]
    Unreadable(ObjectKey),
    #[error("{0} cannot be read: {1}")]
    Live(ObjectKey, Failure),
    #[error("the API server did not say which user you are: {0}")]
    Identity(Failure),
}

/// What would happen because of one object.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Proposal {
    pub kind: &'static str,
    pub namespace: String,
    pub name: String,
    /// Whether it is a source, before or after. Lockstep does nothing about other objects.
    pub is_source: bool,
    /// Why the guard, or the API server itself, refuses it, if one does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
    pub warnings: Vec<String>,
    pub changes: Vec<ProposedChange>,
    pub conflicts: Vec<ProposedConflict>,
    /// How many new companions were not checked for other objects of that name, because they cannot be read.
    pub not_checked: usize,
    /// Which namespaces it reaches cannot be told, because the person may not see them.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub not_seen: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ProposedChange {
    pub verb: Verb,
    pub namespace: String,
    pub name: String,
    pub reason: &'static str,
    /// Which keys differ from those of the companion as it is; none if it was not compared. Never a value.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keys: Option<KeyDiff>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct ProposedConflict {
    pub namespace: String,
    pub name: String,
    pub holder: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verb {
    Create,
    Update,
    Recreate,
    Adopt,
    Delete,
    Release,
}

/// The names of keys that differ.
#[derive(Debug, Clone, Default, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct KeyDiff {
    pub added: Vec<String>,
    pub changed: Vec<String>,
    pub removed: Vec<String>,
}

impl Verb {
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Update => "update",
            Self::Recreate => "recreate",
            Self::Adopt => "adopt",
            Self::Delete => "delete",
            Self::Release => "release",
        }
    }
}

impl KeyDiff {
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.added.is_empty() && self.changed.is_empty() && self.removed.is_empty()
    }

    /// Compares the content of a companion with what it would be.
    fn between(before: &Object, after: &Object, policy: &Policy) -> Self {
        type Data = Option<BTreeMap<String, String>>;
        let mut diff = Self::default();
        let maps: [fn(&Object) -> &Data; 2] = [|object| &object.data, |object| &object.binary_data];
        for of in maps {
            let old: BTreeMap<&str, &str> =
                of(before).iter().flatten().map(|(key, value)| (key.as_str(), value.as_str())).collect();
            let new: BTreeMap<&str, &str> =
                policy.keys.selected(of(after).as_ref()).map(|(key, value)| (key, value.as_ref())).collect();
            for (key, value) in &new {
                match old.get(key) {
                    None => diff.added.push((*key).to_owned()),
                    Some(found) if found != value => diff.changed.push((*key).to_owned()),
                    Some(_) => {}
                }
            }
            diff.removed
                .extend(old.keys().filter(|key| !new.contains_key(*key)).map(|key| (*key).to_owned()));
        }
        diff
    }
}

/// The person who asks, and the guard's rules for them.
pub struct Author {
    user: User,
    rules: Rules,
    access: AccessChecker,
}

impl Author {
    pub async fn new(client: &Client, rules: Rules) -> Result<Self, Error> {
        let info = user_info(client).await.map_err(Error::Identity)?;
        let user = User {
            name: info.username.unwrap_or_default(),
            uid: info.uid.unwrap_or_default(),
            groups: info.groups.unwrap_or_default(),
            extra: info.extra.unwrap_or_default(),
        };
        Ok(Self { user, rules, access: AccessChecker::for_itself(client.clone()) })
    }

    /// The guard's verdict: warnings, or the message of a denial.
    async fn judge(&self, snapshot: &Snapshot, request: &Request) -> Result<Vec<String>, String> {
        let Some(case) = Case::read(&self.rules, request) else { return Ok(Vec::new()) };
        let denied = |denial: &Denial| denial.message(&self.rules.keys);
        match snapshot.world.read(|world| case.judge(world)) {
            // The guard allows a restored companion only with --client-ca, which this command does not know of.
            Verdict::Deny(denial) | Verdict::CheckRestore { otherwise: denial, .. } => Err(denied(&denial)),
            Verdict::Allow { warnings } => Ok(warnings),
            Verdict::CheckAccess { required, then } => {
                let caller = Caller::Peer(IpAddr::V4(Ipv4Addr::LOCALHOST));
                let checked = self.access.check(caller, &self.user, request.kind, &required).await;
                let decided = snapshot.world.read(|world| then.decide_after(world, &self.user, checked));
                decided.map_err(|denial| denied(&denial))
            }
        }
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

/// What would happen if this object were applied as `kubectl apply` does it. `new_namespaces` are created with it.
pub async fn propose(
    client: &Client,
    snapshot: &mut Snapshot,
    author: &Author,
    Manifest { kind, namespace, object }: Manifest,
    new_namespaces: &BTreeSet<String>,
) -> Result<Proposal, Error> {
    let name = object["metadata"]["name"].as_str().filter(|name| names::is_subdomain(name));
    let name = name.ok_or(Error::NoName(kind.as_str()))?.to_owned();
    if !names::is_label(&namespace) {
        return Err(Error::NoNamespace(kind.as_str()));
    }
    let key = ObjectKey::new(kind, &namespace, &name);
    let live = read_value(client, &key).await.map_err(|failure| Error::Live(key.clone(), failure))?;
    let mut applied = apply(live.as_ref(), as_stored(kind, object));
    applied["metadata"]["namespace"] = namespace.as_str().into();
    let read = |value: &Value| {
        serde_json::from_value::<Object>(value.clone()).map_err(|_| Error::Unreadable(key.clone()))
    };
    let request = |new: Object| -> Result<Request, Error> {
        let operation = match &live {
            None => Operation::Create { new },
            Some(old) => Operation::Update { old: read(old)?, new },
        };
        let (namespace, user) = (namespace.clone(), author.user.clone());
        Ok(Request { kind, namespace, user, operation, dry_run: true })
    };
    let (patch, warnings) = snapshot.world.read(|world| -> Result<_, Error> {
        Ok(stamp_defaults(&author.rules, world, &request(read(&applied)?)?))
    })?;
    let mut stamped = applied.clone();
    // The patch was computed from this object, so it applies.
    drop(json_patch::patch(&mut stamped, &patch));
    let keys = snapshot.scope.keys.clone();
    let new = read(&stamped)?;
    let was_source = snapshot.world.read(|world| world.source(&key).is_some());
    let is_source = keys.is_source(&new.metadata.labels);
    let mut proposal = Proposal { is_source: is_source || was_source, ..Proposal::about(&key) };
    let exists = snapshot.world.read(|world| world.namespaces().get(&namespace).is_some());
    let verdict =
        if !exists && snapshot.view.sees_namespace(&namespace) && !new_namespaces.contains(&namespace) {
            Err(format!("namespace {namespace} does not exist"))
        } else if let Some(field) = live.as_ref().and_then(|live| immutable_change(live, &applied)) {
            Err(format!("{field} of {key} is immutable: delete the object and create it again"))
        } else if is_reviewed(&keys, live.as_ref().map(read).transpose()?.as_ref(), &new) {
            author.judge(snapshot, &request(read(&stamped)?)?).await
        } else {
            Ok(Vec::new())
        };
    match verdict {
        Ok(more) => proposal.warnings = warnings.into_iter().chain(more).collect(),
        Err(refusal) => proposal.refused = Some(refusal),
    }
    if proposal.is_source && proposal.refused.is_none() {
        let source =
            is_source.then(|| ObservedSource::read(&keys, &snapshot.scope.rules, kind, new.clone()).source);
        proposal.plan(client, snapshot, &key, source.as_ref(), Some(&new)).await;
    }
    Ok(proposal)
}

/// Whether a webhook of the guard is called for it: what the selectors in `deploy/base/webhook.yaml` say.
fn is_reviewed(keys: &Keys, old: Option<&Object>, new: &Object) -> bool {
    let matches = |object: &Object| {
        keys.is_source(&object.metadata.labels) || object.metadata.labels.contains_key(&keys.companion)
    };
    let is_new_companion = || keys.is_kept_free(&new.metadata.name) || keys.has_marks(&new.metadata);
    old.is_some_and(matches) || matches(new) || (old.is_none() && is_new_companion())
}

/// The field that the API server does not let change.
fn immutable_change(live: &Value, applied: &Value) -> Option<&'static str> {
    let differs = |field: &str| live.get(field) != applied.get(field);
    if differs("type") {
        return Some("type");
    }
    let frozen = ["data", "binaryData", "immutable"];
    (live["immutable"] == true).then(|| frozen.into_iter().find(|field| differs(field))).flatten()
}

/// What the mirror has left to do for a source as it is.
pub async fn pending(client: &Client, snapshot: &mut Snapshot, key: &ObjectKey) -> Proposal {
    let source = snapshot.world.read(|world| world.source(key).cloned());
    let live = read_object(client, key).await.ok();
    let mut proposal = Proposal { is_source: true, ..Proposal::about(key) };
    proposal.plan(client, snapshot, key, source.as_deref(), live.as_ref()).await;
    proposal
}

impl Proposal {
    fn about(key: &ObjectKey) -> Self {
        Self {
            kind: key.kind.as_str(),
            namespace: key.namespace.to_string(),
            name: key.name.to_string(),
            is_source: false,
            refused: None,
            warnings: Vec::new(),
            changes: Vec::new(),
            conflicts: Vec::new(),
            not_checked: 0,
            not_seen: Vec::new(),
        }
    }

    /// Notes which of its targets this person may not see, and takes back what was said about them.
    fn leave_out_unseen(&mut self, view: &View, kind: Kind, targets: &Targets) {
        for name in targets.names.iter().filter(|name| !view.sees_companions(kind, name)) {
            let missing = Trouble::NoNamespace(name.clone()).to_string();
            self.warnings.retain(|warning| *warning != missing);
            self.not_seen.push(format!("namespace {name}"));
        }
        if targets.has_patterns() && !view.sees_all_namespaces() {
            self.warnings.retain(|warning| !warning.contains("matches no namespace"));
            self.not_seen.push("the namespaces that a pattern or a selector matches".to_owned());
        }
    }

    /// Adds what the mirror would do for the source in this state.
    async fn plan(
        &mut self,
        client: &Client,
        snapshot: &mut Snapshot,
        key: &ObjectKey,
        source: Option<&Source>,
        object: Option<&Object>,
    ) {
        let plan = snapshot.world.read(|world| plan_as(world, key, source, None));
        let is_create = |action: &Action| matches!(action, Action::Create { .. });
        let creates = plan.changes.iter().filter(|change| is_create(&change.action));
        let creates = creates.map(|change| change.at.clone()).take(MAX_LOOKUPS).collect();
        snapshot.look_up(client, creates).await;
        for trouble in plan.troubles {
            match trouble {
                Trouble::Conflict { at, holder } => self.conflict(&at, &holder),
                Trouble::Fault(fault) => self.warnings.push(format!("it cannot be mirrored: {fault}")),
                other if !self.warnings.contains(&other.to_string()) => self.warnings.push(other.to_string()),
                _ => {}
            }
        }
        for change in plan.changes {
            // A create may meet an object that no list shows.
            let decision = match (source, &change.action) {
                (Some(source), Action::Create { .. }) => snapshot.world.read(|world| {
                    let found = snapshot.object(world, &change.at);
                    self.not_checked += usize::from(!snapshot.is_known(world, &change.at));
                    let context = TargetContext::of(world, source, &change.at, found, None);
                    decide(source, &change.at, found, context)
                }),
                _ => Decision::Change(change),
            };
            match decision {
                Decision::Nothing => {}
                Decision::Trouble(Trouble::Conflict { at, holder }) => self.conflict(&at, &holder),
                Decision::Trouble(other) => self.warnings.push(other.to_string()),
                Decision::Change(change) => self.changes.extend(proposed(&change.at, &change.action)),
            }
        }
        self.changes.sort_by(|a, b| (a.verb, &a.namespace).cmp(&(b.verb, &b.namespace)));
        if let Some(Ok(desired)) = source.map(|source| &source.desired) {
            self.leave_out_unseen(&snapshot.view, key.kind, &desired.policy.targets);
        }
        if let (Some(object), Some(source)) = (object, source)
            && let Ok(desired) = &source.desired
        {
            self.compare_keys(client, key.kind, object, &desired.policy).await;
        }
    }

    fn conflict(&mut self, at: &ObjectKey, holder: &Holder) {
        let (namespace, name) = (at.namespace.to_string(), at.name.to_string());
        self.conflicts.push(ProposedConflict { namespace, name, holder: describe_holder(holder) });
    }

    /// Reads companions that would change, and compares their keys with those of the source.
    async fn compare_keys(&mut self, client: &Client, kind: Kind, object: &Object, policy: &Policy) {
        let is_compared =
            |change: &&mut ProposedChange| matches!(change.verb, Verb::Update | Verb::Recreate | Verb::Adopt);
        let compared = self.changes.iter_mut().filter(is_compared).take(MAX_COMPARED);
        stream::iter(compared)
            .for_each_concurrent(CONCURRENT_READS, |change| async move {
                let at = ObjectKey::new(kind, &change.namespace, &change.name);
                let found = read_object(client, &at).await.ok();
                change.keys = found.map(|found| KeyDiff::between(&found, object, policy));
            })
            .await;
    }
}

fn proposed(at: &ObjectKey, action: &Action) -> Option<ProposedChange> {
    let written = |reason: WriteReason| match reason {
        WriteReason::New => "new",
        WriteReason::SourceChanged => "source changed",
        WriteReason::Adopted => "an object of that name is taken over",
        WriteReason::Healed(_) => "changed by somebody else",
    };
    let (verb, reason) = match action {
        Action::Create { reason } => (Verb::Create, written(*reason)),
        Action::Update { reason: WriteReason::Adopted, .. }
        | Action::Recreate { reason: WriteReason::Adopted, .. } => {
            (Verb::Adopt, written(WriteReason::Adopted))
        }
        Action::Update { reason, .. } => (Verb::Update, written(*reason)),
        Action::Recreate { reason, .. } => (Verb::Recreate, written(*reason)),
        Action::Delete { reason, .. } => (Verb::Delete, reason.as_str()),
        Action::Release { reason, .. } => (Verb::Release, reason.as_str()),
        Action::DeleteLost { .. } => return None,
    };
    let (namespace, name) = (at.namespace.to_string(), at.name.to_string());
    Some(ProposedChange { verb, namespace, name, reason, keys: None })
}

/// The object as it is; none if it does not exist.
async fn read_value(client: &Client, at: &ObjectKey) -> Result<Option<Value>, Failure> {
    match super::snapshot::read_as(client, at).await {
        Ok(value) => Ok(Some(value)),
        Err(Failure::NotFound) => Ok(None),
        Err(failure) => Err(failure),
    }
}

/// A manifest as the API server stores it: `stringData` of a Secret is `data`, base64 has one form, and a Secret has a type.
fn as_stored(kind: Kind, mut manifest: Value) -> Value {
    let encode = |bytes: Vec<u8>| serde_json::to_value(ByteString(bytes)).unwrap_or_default();
    if kind == Kind::Secret
        && let Some(Value::Object(texts)) =
            manifest.as_object_mut().and_then(|object| object.remove("stringData"))
    {
        if !manifest["data"].is_object() {
            manifest["data"] = Value::Object(Map::new());
        }
        for (key, text) in texts {
            manifest["data"][key] = encode(text.as_str().unwrap_or_default().as_bytes().to_vec());
        }
    }
    let encoded = if kind == Kind::Secret { "data" } else { "binaryData" };
    for value in
        manifest.get_mut(encoded).and_then(Value::as_object_mut).into_iter().flatten().map(|(_, value)| value)
    {
        let text: String = value.as_str().unwrap_or_default().split_whitespace().collect();
        if let Ok(ByteString(bytes)) = serde_json::from_value(Value::String(text)) {
            *value = if value.is_null() { Value::Null } else { encode(bytes) };
        }
    }
    manifest
}

/// The object that `kubectl apply` would store: keys of the manifest win, keys that the last one had and this one has not
/// are removed, all others stay.
fn apply(live: Option<&Value>, mut manifest: Value) -> Value {
    let Some(live) = live else {
        // A Secret is `Opaque` unless it says otherwise.
        if manifest["kind"] == "Secret" && manifest.get("type").is_none() {
            manifest["type"] = "Opaque".into();
        }
        return manifest;
    };
    let last: Value = live["metadata"]["annotations"][LAST_APPLIED]
        .as_str()
        .and_then(|text| serde_json::from_str(text).ok())
        .unwrap_or_default();
    let mut merged = live.clone();
    for path in [&["metadata", "labels"][..], &["metadata", "annotations"], &["data"], &["binaryData"]] {
        let map = |value: &Value| {
            let at = path.iter().fold(value, |value, key| &value[*key]);
            at.as_object().cloned().unwrap_or_default()
        };
        let (mut result, new, old) = (map(live), map(&manifest), map(&last));
        result.retain(|key, _| new.contains_key(key) || !old.contains_key(key));
        result.extend(new);
        result.retain(|_, value| !value.is_null());
        let (field, parents) = path.split_last().unwrap_or((&"", &[]));
        let parent = parents.iter().fold(&mut merged, |value, key| &mut value[*key]);
        if !result.is_empty() {
            parent[*field] = Value::Object(result);
        } else if let Some(parent) = parent.as_object_mut() {
            parent.remove(*field);
        }
    }
    if let Some(type_) = manifest.get("type") {
        merged["type"] = type_.clone();
    }
    match manifest.get("immutable") {
        Some(immutable) => merged["immutable"] = immutable.clone(),
        None if last.get("immutable").is_some() => {
            drop(merged.as_object_mut().map(|object| object.remove("immutable")))
        }
        None => {}
    }
    merged
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn apply_keeps_what_others_wrote_and_removes_what_the_last_manifest_had() {
        let last =
            json!({"metadata": {"labels": {"old": "1"}}, "data": {"a": "1", "b": "1"}, "immutable": true});
        let live = json!({
            "metadata": {
                "name": "c", "uid": "u", "labels": {"old": "1", "theirs": "1"},
                "annotations": {LAST_APPLIED: last.to_string(), "theirs": "1"},
            },
            "data": {"a": "1", "b": "1", "theirs": "1"}, "immutable": true,
        });
        let manifest = json!({"metadata": {"name": "c", "labels": {"new": "1"}}, "data": {"a": "2"}});
        let applied = apply(Some(&live), manifest.clone());
        assert_eq!(applied["metadata"]["labels"], json!({"new": "1", "theirs": "1"}));
        assert_eq!(applied["metadata"]["annotations"]["theirs"], "1");
        assert_eq!(applied["metadata"]["uid"], "u");
        assert_eq!(applied["data"], json!({"a": "2", "theirs": "1"}));
        assert_eq!(applied.get("immutable"), None);
        assert_eq!(apply(None, manifest.clone()), manifest);
    }

    #[test]
    fn string_data_of_a_secret_becomes_data_and_wins() {
        let manifest = json!({"data": {"a": "b2xk", "b": "Yg=="}, "stringData": {"a": "new"}});
        assert_eq!(as_stored(Kind::Secret, manifest), json!({"data": {"a": "bmV3", "b": "Yg=="}}));
        let wrapped = json!({"data": {"a": "bm\n V3 "}, "stringData": {}});
        assert_eq!(as_stored(Kind::Secret, wrapped), json!({"data": {"a": "bmV3"}}));
        let configmap = json!({"stringData": {"a": "x"}});
        assert_eq!(as_stored(Kind::ConfigMap, configmap.clone()), configmap);
    }

    #[test]
    fn immutable_fields_cannot_be_applied() {
        let live = json!({"type": "Opaque", "data": {"a": "1"}});
        assert_eq!(immutable_change(&live, &live), None);
        assert_eq!(immutable_change(&live, &json!({"type": "x", "data": {"a": "1"}})), Some("type"));
        assert_eq!(immutable_change(&live, &json!({"type": "Opaque", "data": {}})), None);
        let frozen = json!({"data": {"a": "1"}, "immutable": true});
        assert_eq!(immutable_change(&frozen, &json!({"data": {"a": "2"}, "immutable": true})), Some("data"));
    }

    #[test]
    fn keys_are_compared_under_the_names_they_are_copied_to() {
        let object =
            |data: Value| serde_json::from_value::<Object>(json!({"metadata": {}, "data": data})).unwrap();
        let keys = crate::testing::keys();
        let source = crate::testing::source("home", "s").annotate("keys", "a,b=c");
        let policy = Policy::parse(&keys, &source.object.metadata).unwrap();
        let before = object(json!({"a": "1", "d": "1"}));
        let after = object(json!({"a": "2", "b": "1", "e": "1"}));
        let diff = KeyDiff::between(&before, &after, &policy);
        let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect::<Vec<_>>();
        assert_eq!((diff.added, diff.changed, diff.removed), (names(&["c"]), names(&["a"]), names(&["d"])));
        assert!(
            KeyDiff::between(&before, &before, &Policy { keys: Default::default(), ..policy }).is_empty()
        );
    }
}
