//! A cluster in memory: objects as the API server keeps them, the world that watches them, and the controller's own
//! code that writes to them. The end-to-end tests show the same on a real API server.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::{Arc, Mutex, MutexGuard},
};

use serde_json::{Value, json};

use super::{ObjectBuilder, SOURCE_CACHE, keys, namespace, world_with_source_cache};
use crate::{
    failure::Failure,
    object::{Kind, ManagedFields, Meta, Object, ObjectKey},
    plan::{
        Action, Change, Decision, DeleteReason, Plan, Removal, Trouble, WriteReason, plan, plan_companion,
    },
    policy::{
        content::{Content, Digest},
        marks,
    },
    world::{Companion, ObservedCompanion, SharedWorld, WatchId, World},
    writes::{
        companion_write::{
            ApplyError, CompanionWrite, History, LiveSource, PlannedWrite, Start, WriteOutcome,
            confirm_removals, read_source,
        },
        write_request::CompanionRequest,
    },
};

pub struct Cluster {
    pub world: SharedWorld,
    source_cache: usize,
    store: Store,
    /// The digests of sources whose companions were right, as the controller remembers them.
    in_step: HashMap<ObjectKey, Digest>,
}

/// The objects of a cluster. It answers at once, and a watch shows each change after its answer.
#[derive(Clone, Default)]
pub struct Store(Arc<Mutex<Objects>>);

#[derive(Default)]
struct Objects {
    objects: BTreeMap<ObjectKey, Object>,
    namespaces: BTreeMap<String, Meta>,
    clock: u64,
    /// How often an object was read with its content.
    reads: usize,
    /// Events that the watches have not shown yet.
    events: Vec<WatchEvent>,
    /// By UID: the sources that an object ever named in its annotation.
    marked_for: HashMap<String, BTreeSet<String>>,
    /// By UID: the source for which the controller created an object.
    created_for: HashMap<String, ObjectKey>,
    /// The UIDs of objects whose marks ever said that they stay when their source is gone.
    marked_to_stay: BTreeSet<String>,
    /// Companions that the controller has released, as they were then, until somebody else writes them.
    released: BTreeMap<ObjectKey, Object>,
}

enum WatchEvent {
    Applied(WatchId, Object),
    Deleted(WatchId, Meta),
}

/// A companion that could not be written, and why.
pub type Failed = (ObjectKey, Option<Trouble>);

impl Cluster {
    pub fn with(namespaces: &[&str]) -> Self {
        Self::with_source_cache(namespaces, SOURCE_CACHE)
    }

    /// A cluster whose world keeps so many bytes of payloads.
    pub fn with_source_cache(namespaces: &[&str], source_cache: usize) -> Self {
        let store = Store::default();
        store.lock().clock = 100;
        let shared = SharedWorld::from(world_with_source_cache(source_cache));
        let mut cluster = Self { world: shared, source_cache, store, in_step: HashMap::new() };
        namespaces.iter().for_each(|name| cluster.namespace(namespace(name)));
        cluster
    }

    // --- changes by users and by Kubernetes

    pub fn namespace(&mut self, draft: ObjectBuilder) {
        let meta = draft.object.metadata;
        self.world.write(|world| world.apply_namespace(&meta));
        self.store.lock().namespaces.insert(meta.name.clone(), meta);
    }

    /// Removes a namespace and the objects in it, as the namespace controller does.
    pub fn drop_namespace(&mut self, name: &str) {
        let objects = &mut self.store.lock();
        let inside: Vec<ObjectKey> =
            objects.objects.keys().filter(|key| *key.namespace == *name).cloned().collect();
        inside.iter().for_each(|key| drop(objects.store(key, None)));
        objects.namespaces.remove(name);
        show(&self.world, objects);
        self.world.write(|world| world.delete_namespace(name));
    }

    /// Creates an object, or replaces all of one but its UID.
    pub fn put(&mut self, draft: ObjectBuilder) -> ObjectKey {
        let key = draft.key();
        let mut object = draft.object;
        let objects = &mut self.store.lock();
        object.metadata.uid = match objects.objects.get(&key) {
            Some(known) => known.metadata.uid.clone(),
            None => format!("uid-{}", objects.clock),
        };
        objects.released.remove(&key);
        objects.store(&key, Some(object));
        show(&self.world, objects);
        key
    }

    /// Deletes an object, if it exists, and creates it anew.
    pub fn put_anew(&mut self, draft: ObjectBuilder) -> ObjectKey {
        self.store.lock().store(&draft.key(), None);
        self.put(draft)
    }

    /// Edits an object without asking the webhook. An edit that the API server would refuse has no effect.
    pub fn edit(&mut self, key: &ObjectKey, edit: impl FnOnce(&mut Object)) {
        let objects = &mut self.store.lock();
        let Some(before) = objects.objects.get(key).cloned() else { return };
        let mut after = before.clone();
        edit(&mut after);
        set_manager(&mut after, "kubectl-edit");
        if may_become(&before, &after) {
            objects.released.remove(key);
            objects.store(key, Some(after));
            show(&self.world, objects);
        }
    }

    /// As [`Self::edit`], before the watch shows it.
    pub fn edit_unseen(&mut self, key: &ObjectKey, edit: impl FnOnce(&mut Object)) {
        let objects = &mut self.store.lock();
        let mut after = objects.objects.get(key).cloned().expect("an object to edit");
        edit(&mut after);
        objects.store(key, Some(after));
    }

    /// The watches show what has changed.
    pub fn show(&mut self) {
        show(&self.world, &mut self.store.lock());
    }

    pub fn delete(&mut self, key: &ObjectKey) {
        let objects = &mut self.store.lock();
        objects.delete(key);
        show(&self.world, objects);
    }

    /// What the garbage collector does: deletes objects none of whose owners exists.
    pub fn collect_garbage(&mut self) {
        let garbage: Vec<ObjectKey> = {
            let objects = &self.store.lock().objects;
            let alive: BTreeSet<&str> = objects.values().map(|object| &*object.metadata.uid).collect();
            let orphaned = |object: &Object| {
                let owners = &object.metadata.owner_references;
                !owners.is_empty() && owners.iter().all(|owner| !alive.contains(&*owner.uid))
            };
            objects.iter().filter(|(_, object)| orphaned(object)).map(|(key, _)| key.clone()).collect()
        };
        garbage.iter().for_each(|key| self.delete(key));
    }

    /// The process ends and another starts, which knows only what it lists.
    pub fn restart(&mut self) {
        self.in_step.clear();
        let objects = self.store.lock();
        self.world.write(|known| {
            *known = world_with_source_cache(self.source_cache);
            for meta in objects.namespaces.values() {
                known.apply_namespace(meta);
            }
            for (key, object) in &objects.objects {
                for watch in watched_by(key.kind, object) {
                    apply(known, watch, object.clone());
                }
            }
        });
    }

    // --- queries

    /// The API server of this cluster.
    pub fn api(&self) -> Store {
        self.store.clone()
    }

    pub fn object(&self, key: &ObjectKey) -> Option<Object> {
        self.store.lock().objects.get(key).cloned()
    }

    /// What the world knows of a companion.
    pub fn companion(&self, at: &ObjectKey) -> Option<Companion> {
        self.world.read(|world| world.companion(at).cloned())
    }

    /// Whether a source exists and has no fault.
    pub fn is_well_formed(&self, key: &ObjectKey) -> bool {
        self.world.read(|world| world.source(key).is_some_and(|source| source.desired.is_ok()))
    }

    /// Every source that a resync reconciles, in order.
    pub fn all_sources(&self) -> BTreeSet<ObjectKey> {
        self.world.read(World::all_sources).into_iter().collect()
    }

    /// Whether an object proves, now or earlier, that it is this source's companion. Our label is no proof.
    pub fn is_marked_for(&self, source: &ObjectKey, at: &ObjectKey) -> bool {
        let objects = self.store.lock();
        let Some(Object { metadata: meta, .. }) = objects.objects.get(at) else { return false };
        let owner = meta.controller().map(|owner| &owner.uid);
        objects.marked_for.get(&meta.uid).is_some_and(|sources| sources.contains(&source.to_string()))
            || objects.objects.get(source).is_some_and(|source| owner == Some(&source.metadata.uid))
            || objects.is_known_by_entry_only(at)
    }

    /// The source for which the controller created an object.
    pub fn created_for(&self, at: &ObjectKey) -> Option<ObjectKey> {
        let objects = self.store.lock();
        objects.created_for.get(&objects.objects.get(at)?.metadata.uid).cloned()
    }

    /// Whether an object's marks ever said that it stays when its source is gone.
    pub fn was_marked_to_stay(&self, at: &ObjectKey) -> bool {
        let objects = self.store.lock();
        objects.objects.get(at).is_some_and(|object| objects.marked_to_stay.contains(&object.metadata.uid))
    }

    /// Objects that exist and that the controller has released, as they were then. Nobody else has written them since.
    pub fn released(&self) -> Vec<(ObjectKey, Object)> {
        let objects = self.store.lock();
        let uid = |key: &ObjectKey| objects.objects.get(key).map(|object| &object.metadata.uid);
        let exists = |(key, then): &(&ObjectKey, &Object)| uid(key) == Some(&then.metadata.uid);
        objects.released.iter().filter(exists).map(|(key, then)| (key.clone(), then.clone())).collect()
    }

    /// Whether nothing but our label and our entry in `managedFields` says that an object is ours.
    pub fn is_known_by_entry_only(&self, at: &ObjectKey) -> bool {
        self.store.lock().is_known_by_entry_only(at)
    }

    // --- the controller

    pub fn plan(&self, source: &ObjectKey) -> Plan {
        self.world.read(|world| plan(world, source, self.in_step.get(source).copied()))
    }

    /// What the plan for one companion does.
    pub fn plan_companion(&self, source: &ObjectKey, at: &ObjectKey) -> Option<Planned> {
        let in_step = self.in_step.get(source).copied();
        match self.world.read(|world| plan_companion(world, source, at, in_step)) {
            Decision::Change(action) => Some(Planned::of(&action)),
            Decision::Nothing | Decision::Trouble(_) => None,
        }
    }

    /// Plans and applies, once.
    pub fn reconcile(&mut self, source: &ObjectKey) -> Vec<Failed> {
        let plan = self.plan(source);
        self.apply(source, plan)
    }

    /// Applies a plan with the controller's own code. Nobody else writes meanwhile, so that no cache is stale.
    pub fn apply(&mut self, key: &ObjectKey, plan: Plan) -> Vec<Failed> {
        let removal = |change: &Change| Some((change.at.clone(), change.action.removal()?));
        let removals: Vec<(ObjectKey, Removal)> = plan.changes.iter().filter_map(removal).collect();
        let mut confirmed = Vec::new();
        if !removals.is_empty() {
            let live = self.store.send(key, CompanionRequest::GetMetadata).map(|object| object.metadata);
            let answer = self.world.read(|world| confirm_removals(&keys(), world, key, removals, live));
            confirmed = answer.expect("the cache is fresh").removals;
        }
        let mut failed = Vec::new();
        for Change { at, action } in plan.changes {
            let removal = action.removal();
            if removal.is_some_and(|removal| !confirmed.contains(&(at.clone(), removal))) {
                // It was left to the garbage collector.
                self.delete(&at);
                continue;
            }
            let write = PlannedWrite { source: key.clone(), at: at.clone(), removal, permits: usize::MAX };
            let history = History { in_step: self.in_step.get(key).copied(), failed: false };
            let outcome = self.write(&write, history);
            show(&self.world, &mut self.store.lock());
            match outcome {
                Ok(_) => {}
                Err(ApplyError::Retry { trouble, .. }) => failed.push((at, trouble.map(|trouble| *trouble))),
                Err(ApplyError::StaleCache) => panic!("{at}: the write met a stale cache"),
            }
        }
        if let Some(source) = self.world.read(|world| world.shared_source(key)) {
            self.in_step.insert(key.clone(), source.digest);
        }
        failed
    }

    /// Sends what a write asks for, as the controller does.
    fn write(&self, planned: &PlannedWrite, history: History) -> WriteOutcome {
        let start = |read| {
            self.world
                .read(|world| CompanionWrite::start(&keys(), world, planned, history, read, planned.permits))
        };
        let mut started = start(None)?;
        if let Start::ReadSource(source) = started {
            let rules = self.world.read(|world| world.namespaces().rules().clone());
            let answer = self.store.send(&source.key, CompanionRequest::Get);
            let observed = read_source(&keys(), &rules, &source, answer)?;
            let (digest, payload) = (observed.source.digest, observed.payload.clone());
            self.world.write(|world| world.source_read(observed));
            let Some(payload) = payload else { return Ok(None) };
            started = start(Some(LiveSource { digest, payload }))?;
        }
        let Start::Write(mut write) = started else { return Ok(None) };
        loop {
            let request = self.world.read(|world| write.request(&keys(), world))?;
            let answer = self.store.send(&planned.at, request);
            let answer = answer.map(|object| ObservedCompanion::read(&keys(), planned.at.kind, object));
            if let Some(outcome) = self.world.write(|world| write.answer(world, answer)).outcome {
                return outcome;
            }
        }
    }
}

impl Store {
    /// How often an object was read with its content.
    pub fn reads(&self) -> usize {
        self.lock().reads
    }

    fn lock(&self) -> MutexGuard<'_, Objects> {
        self.0.lock().expect("no test panicked while it held the lock")
    }

    /// Answers a request of the controller.
    pub fn send(&self, at: &ObjectKey, request: CompanionRequest) -> Result<Object, Failure> {
        match request {
            CompanionRequest::Get => {
                let mut objects = self.lock();
                objects.reads += 1;
                objects.objects.get(at).cloned().ok_or(Failure::NotFound)
            }
            CompanionRequest::GetMetadata => {
                let objects = self.lock();
                let metadata = objects.objects.get(at).ok_or(Failure::NotFound)?.metadata.clone();
                Ok(Object { metadata, ..Object::default() })
            }
            CompanionRequest::Create(body) => self.create(at, &body),
            CompanionRequest::Patch(operations) => self.patch(at, &operations),
            CompanionRequest::Delete { uid, resource_version } => {
                let objects = &mut self.lock();
                let known = &objects.objects.get(at).ok_or(Failure::NotFound)?.metadata;
                if uid != known.uid || resource_version != known.resource_version {
                    return Err(Failure::Conflict);
                }
                objects.delete(at);
                Ok(Object::default())
            }
        }
    }

    fn create(&self, at: &ObjectKey, body: &[u8]) -> Result<Object, Failure> {
        let objects = &mut self.lock();
        if objects.objects.contains_key(at) {
            return Err(Failure::AlreadyExists);
        }
        let namespace = objects.namespaces.get(&*at.namespace).expect("no create without a namespace");
        assert!(!namespace.is_terminating(), "{at}: a create in a namespace that is being deleted");
        let mut object: Object = serde_json::from_slice(body).expect("an object");
        assert_eq!(ObjectKey::of(at.kind, &object.metadata), *at);
        object.metadata.uid = format!("uid-{}", objects.clock);
        object.metadata.creation_timestamp = Some(super::CREATED.to_owned());
        set_manager(&mut object, &keys().instance);
        let named = ObjectKey::parse(at.kind, &object.metadata.annotations[&keys().source]);
        objects.created_for.insert(object.metadata.uid.clone(), named.expect("a source"));
        Ok(objects.store(at, Some(object)).expect("it was stored"))
    }

    fn patch(&self, at: &ObjectKey, operations: &json_patch::Patch) -> Result<Object, Failure> {
        let objects = &mut self.lock();
        let before = objects.objects.get(at).cloned().ok_or(Failure::NotFound)?;
        let mut after = to_json(&before);
        json_patch::patch(&mut after, operations).expect("a patch that fits");
        let mut after: Object = serde_json::from_value(after).expect("an object");
        if after.metadata.resource_version != before.metadata.resource_version {
            return Err(Failure::Conflict);
        }
        set_manager(&mut after, &keys().instance);
        assert!(may_become(&before, &after), "{at}: the API server refuses this update");
        let is_companion =
            |object: &Object| watched_by(at.kind, object).any(|by| by == WatchId::Companions(at.kind));
        let released = is_companion(&before) && !is_companion(&after);
        // The update that removes the last finalizer of a terminating object returns it once more.
        let stored = objects.store(at, Some(after.clone())).unwrap_or(after);
        if released {
            // From now on nothing proves that it is a companion, and it may outlive its source.
            objects.marked_for.remove(&stored.metadata.uid);
            objects.created_for.remove(&stored.metadata.uid);
            objects.released.insert(at.clone(), stored.clone());
        }
        Ok(stored)
    }
}

impl Objects {
    /// Stores a new state as the API server does, with a new version, and queues what the watches show of it. An object
    /// that is being deleted is gone once it has no finalizers.
    fn store(&mut self, key: &ObjectKey, after: Option<Object>) -> Option<Object> {
        self.clock += 1;
        let version = self.clock.to_string();
        let before = self.objects.remove(key);
        let after = after
            .filter(|object| !object.metadata.is_terminating() || !object.metadata.finalizers.is_empty())
            .map(|mut object| {
                object.metadata.resource_version.clone_from(&version);
                // A field that the kind does not have is dropped.
                object.binary_data = object.binary_data.filter(|_| key.kind == Kind::ConfigMap);
                object
            });
        if let Some(object) = &after {
            self.objects.insert(key.clone(), object.clone());
            if let Some(named) = object.metadata.annotations.get(&keys().source) {
                self.marked_for.entry(object.metadata.uid.clone()).or_default().insert(named.clone());
            }
            if marks::say_keep(&keys(), &object.metadata) {
                self.marked_to_stay.insert(object.metadata.uid.clone());
            }
        }
        for watch in [WatchId::Sources(key.kind), WatchId::Companions(key.kind)] {
            let shown = |object: &Option<Object>| {
                object.clone().filter(|object| watched_by(key.kind, object).any(|shown_by| shown_by == watch))
            };
            self.events.extend(match (shown(&before), shown(&after)) {
                (_, Some(object)) => Some(WatchEvent::Applied(watch, object)),
                // A watch by label shows the last state that it matched, with the version of the change.
                (Some(object), None) => Some(WatchEvent::Deleted(
                    watch,
                    Meta { resource_version: version.clone(), ..object.metadata },
                )),
                (None, None) => None,
            });
        }
        after
    }

    fn delete(&mut self, key: &ObjectKey) {
        let Some(mut object) = self.objects.get(key).cloned() else { return };
        object.metadata.deletion_timestamp = Some("2026-01-01T00:00:00Z".to_owned());
        self.store(key, Some(object));
    }

    fn is_known_by_entry_only(&self, at: &ObjectKey) -> bool {
        self.objects.get(at).is_some_and(|object| {
            let named = object.metadata.annotations.get(&keys().source);
            named.is_none_or(|text| ObjectKey::parse(at.kind, text).is_none())
                && object.metadata.controller().is_none()
                && object.metadata.labels.get(&keys().companion).is_some_and(|value| value == "true")
                && object.metadata.managed_fields.iter().any(|entry| entry.manager == keys().instance)
        })
    }
}

/// Delivers the queued events of the watches to the world.
fn show(world: &SharedWorld, objects: &mut Objects) {
    world.write(|world| {
        for event in objects.events.drain(..) {
            match event {
                WatchEvent::Applied(watch, object) => apply(world, watch, object),
                WatchEvent::Deleted(WatchId::Sources(kind), meta) => drop(world.delete_source(kind, &meta)),
                WatchEvent::Deleted(WatchId::Companions(kind), meta) => {
                    drop(world.delete_companion(kind, &meta));
                }
                WatchEvent::Deleted(WatchId::Namespaces, _) => unreachable!("namespaces are not stored"),
            }
        }
    });
}

/// An object as the API server would send it.
fn to_json(object: &Object) -> Value {
    let meta = &object.metadata;
    let managed = meta.managed_fields.iter();
    let managed: Vec<Value> =
        managed.map(|entry| json!({"manager": entry.manager, "time": entry.time})).collect();
    let mut json = json!({
        "metadata": {
            "name": meta.name,
            "namespace": meta.namespace,
            "uid": meta.uid,
            "resourceVersion": meta.resource_version,
            "ownerReferences": meta.owner_references,
            "finalizers": meta.finalizers,
            "managedFields": managed,
            "deletionTimestamp": meta.deletion_timestamp,
        },
        "data": object.data,
        "binaryData": object.binary_data,
        "type": object.type_,
        "immutable": object.immutable,
    });
    // The API server leaves out an empty map, and a patch that adds an entry to it fails.
    for (name, map) in [("labels", &meta.labels), ("annotations", &meta.annotations)] {
        if !map.is_empty() {
            json["metadata"][name] = json!(map);
        }
    }
    json
}

fn watched_by(kind: Kind, object: &Object) -> impl Iterator<Item = WatchId> {
    let watches = [
        (keys().managed.clone(), WatchId::Sources(kind)),
        (keys().companion.clone(), WatchId::Companions(kind)),
    ];
    let labels = object.metadata.labels.clone();
    watches
        .into_iter()
        .filter(move |(label, _)| labels.get(label).is_some_and(|value| value == "true"))
        .map(|(_, watch)| watch)
}

fn apply(world: &mut World, watch: WatchId, object: Object) {
    match watch {
        WatchId::Sources(kind) => world.apply_source(super::read_source(kind, object)),
        WatchId::Companions(kind) => world.apply_companion(super::read_companion(kind, object)),
        WatchId::Namespaces => unreachable!("namespaces are no objects of this kind"),
    };
}

fn set_manager(object: &mut Object, manager: &str) {
    object.metadata.managed_fields.retain(|entry| entry.manager != manager);
    object
        .metadata
        .managed_fields
        .push(ManagedFields { manager: manager.to_owned(), ..ManagedFields::default() });
}

/// Whether the API server allows an update: an immutable object keeps its content, a Secret its type, and an object
/// that is being deleted gets no new finalizer.
fn may_become(before: &Object, after: &Object) -> bool {
    let frozen = before.immutable == Some(true);
    let more = after.metadata.finalizers.len() > before.metadata.finalizers.len();
    before.type_ == after.type_
        && !(frozen && Content::split(before.clone()).1 != Content::split(after.clone()).1)
        && !(before.metadata.is_terminating() && more)
}

/// What a plan does to each companion, without the state that it was decided on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Planned {
    Create(WriteReason),
    Update(WriteReason),
    Recreate(WriteReason),
    Delete(DeleteReason),
    Release(DeleteReason),
    DeleteLost(DeleteReason),
}

impl Planned {
    fn of(action: &Action) -> Self {
        match action {
            Action::Create { reason } => Self::Create(*reason),
            Action::Update { reason, .. } => Self::Update(*reason),
            Action::Recreate { reason, .. } => Self::Recreate(*reason),
            Action::Delete { reason, .. } => Self::Delete(*reason),
            Action::Release { reason, .. } => Self::Release(*reason),
            Action::DeleteLost { reason, .. } => Self::DeleteLost(*reason),
        }
    }
}

/// The changes of a plan, to compare.
pub fn planned(plan: &Plan) -> Vec<(String, Planned)> {
    plan.changes.iter().map(|change| (change.at.to_string(), Planned::of(&change.action))).collect()
}
