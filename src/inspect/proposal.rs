//! What would happen to companions if an object were applied: the guard's verdict, and the mirror's plan.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{IpAddr, Ipv4Addr},
};

use futures::{StreamExt, stream};
use kube::Client;
use serde::Serialize;
use serde_json::{Map, Value};

use super::{
    snapshot::{Snapshot, read_object},
    status::describe_holder,
};
use crate::{
    client::{Failure, user_info},
    guard::{
        access::{AccessChecker, AccessError},
        defaulting::stamp_defaults,
        denial::Denial,
        fair_semaphore::Caller,
        request::{Operation, Request, User},
        review::{Case, Rules, Scope, Verdict},
    },
    object::{Kind, Object, ObjectKey},
    plan::{Action, Decision, Holder, TargetContext, Trouble, WriteReason, decide, plan_as},
    policy::Policy,
    world::{ObservedSource, Source},
};

/// What `kubectl apply` compares with.
const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";
/// How many companions are read to compare their keys.
const MAX_COMPARED: usize = 50;
const CONCURRENT_READS: usize = 16;

/// Why nothing can be said about an object.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0} has no metadata.name: kubectl apply needs one")]
    NoName(&'static str),
    #[error("{0} cannot be read as a ConfigMap or Secret: check its fields")]
    Unreadable(ObjectKey),
    #[error("{0} cannot be read: {1}")]
    Live(ObjectKey, Failure),
    #[error("who you are cannot be asked: {0}")]
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
    /// Why the guard refuses it, if it does.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refused: Option<String>,
    pub warnings: Vec<String>,
    pub changes: Vec<ProposedChange>,
    pub conflicts: Vec<ProposedConflict>,
    /// How many new companions were not checked for other objects of that name, because they cannot be read.
    pub not_checked: usize,
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
            Verdict::Deny(denial) => Err(denied(&denial)),
            Verdict::Allow { warnings } => Ok(warnings),
            Verdict::CheckAccess { required, then } => {
                let caller = Caller::Peer(IpAddr::V4(Ipv4Addr::LOCALHOST));
                match self.access.check(caller, &self.user, request.kind, &required).await {
                    Ok(()) => snapshot
                        .world
                        .read(|world| then.decide(world, Scope::All))
                        .map_err(|denial| denied(&denial)),
                    Err(AccessError::Unavailable(why)) => Err(denied(&Denial::Unanswered(why))),
                    Err(AccessError::Forbidden(access)) => {
                        let reach =
                            snapshot.world.read(|world| then.reach(world, access.namespace.as_deref()));
                        Err(denied(&Denial::NoRight {
                            user: self.user.name.clone(),
                            verb: access.verb,
                            name: access.name,
                            source: then.key().clone(),
                            reach,
                        }))
                    }
                }
            }
        }
    }
}

/// What would happen if this object were applied as `kubectl apply` does it.
pub async fn propose(
    client: &Client,
    snapshot: &mut Snapshot,
    author: &Author,
    kind: Kind,
    namespace: &str,
    manifest: Value,
) -> Result<Proposal, Error> {
    let name = manifest["metadata"]["name"].as_str().ok_or(Error::NoName(kind.as_str()))?.to_owned();
    let key = ObjectKey::new(kind, namespace, &name);
    let live = read_value(client, &key).await.map_err(|failure| Error::Live(key.clone(), failure))?;
    let mut applied = apply(live.as_ref(), encode_string_data(manifest));
    applied["metadata"]["namespace"] = namespace.into();
    let read = |value: &Value| {
        serde_json::from_value::<Object>(value.clone()).map_err(|_| Error::Unreadable(key.clone()))
    };
    let request = |new: Object| -> Result<Request, Error> {
        let operation = match &live {
            None => Operation::Create { new },
            Some(old) => {
                Operation::Update { old: read(old)?, new, unchanged: live.as_ref() == Some(&applied) }
            }
        };
        let (namespace, user) = (namespace.to_owned(), author.user.clone());
        Ok(Request { kind, namespace, user, operation, dry_run: true })
    };
    let (patch, mut warnings) = snapshot.world.read(|world| -> Result<_, Error> {
        Ok(stamp_defaults(&author.rules, world, &request(read(&applied)?)?))
    })?;
    let mut stamped = applied.clone();
    // It was made for this object.
    drop(json_patch::patch(&mut stamped, &patch));
    let verdict = author.judge(snapshot, &request(read(&stamped)?)?).await;
    let keys = snapshot.scope.keys.clone();
    let new = read(&stamped)?;
    let was_source = snapshot.world.read(|world| world.source(&key).is_some());
    let is_source = keys.is_source(&new.metadata.labels);
    let mut proposal = Proposal {
        kind: kind.as_str(),
        namespace: namespace.to_owned(),
        name,
        is_source: is_source || was_source,
        refused: verdict.as_ref().err().cloned(),
        warnings: Vec::new(),
        changes: Vec::new(),
        conflicts: Vec::new(),
        not_checked: 0,
    };
    warnings.extend(verdict.unwrap_or_default());
    proposal.warnings = warnings;
    if proposal.is_source && proposal.refused.is_none() {
        let source =
            is_source.then(|| ObservedSource::read(&keys, &snapshot.scope.rules, kind, new.clone()).source);
        proposal.plan(client, snapshot, &key, source.as_ref(), Some(&new)).await;
    }
    Ok(proposal)
}

/// What the mirror has left to do for a source as it is.
pub async fn pending(client: &Client, snapshot: &mut Snapshot, key: &ObjectKey) -> Proposal {
    let source = snapshot.world.read(|world| world.source(key).cloned());
    let live = read_object(client, key).await.ok();
    let mut proposal = Proposal {
        kind: key.kind.as_str(),
        namespace: key.namespace.to_string(),
        name: key.name.to_string(),
        is_source: true,
        refused: None,
        warnings: Vec::new(),
        changes: Vec::new(),
        conflicts: Vec::new(),
        not_checked: 0,
    };
    proposal.plan(client, snapshot, key, source.as_deref(), live.as_ref()).await;
    proposal
}

impl Proposal {
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
        let creates: Vec<ObjectKey> = plan
            .changes
            .iter()
            .filter(|change| is_create(&change.action))
            .map(|change| change.at.clone())
            .collect();
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
        WriteReason::LacksLabels => "lacks the labels that name its source",
        WriteReason::Adopted => "an object of that name is taken over",
        WriteReason::Healed(_) => "changed by somebody else",
    };
    // Its content and everything else is right.
    if action.only_adds_labels() {
        return None;
    }
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

/// `stringData` of a Secret is for people; the API server stores `data`.
fn encode_string_data(mut manifest: Value) -> Value {
    let Some(Value::Object(texts)) = manifest.as_object_mut().and_then(|object| object.remove("stringData"))
    else {
        return manifest;
    };
    if !manifest["data"].is_object() {
        manifest["data"] = Value::Object(Map::new());
    }
    for (key, text) in texts {
        let bytes = k8s_openapi::ByteString(text.as_str().unwrap_or_default().as_bytes().to_vec());
        manifest["data"][key] = serde_json::to_value(bytes).unwrap_or_default();
    }
    manifest
}

/// The object that `kubectl apply` would store: keys of the manifest win, keys that the last one had and this one has not
/// are removed, all others stay.
fn apply(live: Option<&Value>, manifest: Value) -> Value {
    let Some(live) = live else { return manifest };
    let last: Value = live["metadata"]["annotations"][LAST_APPLIED]
        .as_str()
        .and_then(|text| serde_json::from_str(text).ok())
        .unwrap_or_default();
    let mut merged = live.clone();
    for path in [&["metadata", "labels"][..], &["metadata", "annotations"], &["data"], &["binaryData"]] {
        let at = |value: &Value| path.iter().fold(Some(value.clone()), |value, key| value?.get(key).cloned());
        let map = |value: &Value| at(value).and_then(|map| map.as_object().cloned()).unwrap_or_default();
        let (mut result, new, old) = (map(live), map(&manifest), map(&last));
        let removed: BTreeSet<&String> = old.keys().filter(|key| !new.contains_key(*key)).collect();
        result.retain(|key, _| !removed.contains(key));
        result.extend(new);
        let target = path.iter().fold(&mut merged, |value, key| &mut value[*key]);
        *target = Value::Object(result);
    }
    for key in ["type", "immutable"] {
        if let Some(value) = manifest.get(key) {
            merged[key] = value.clone();
        } else if last.get(key).is_some()
            && let Some(object) = merged.as_object_mut()
        {
            object.remove(key);
        }
    }
    merged
}
