//! A cluster to try plans on: objects as the API server would keep them, and the world that watches them.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use super::{ObjectBuilder, keys, namespace, world};
use crate::{
    content::{Content, Digest},
    marks,
    object::{Kind, ManagedFields, Meta, Object, ObjectKey},
    plan::{Action, Change, Decision, Plan, Seen, Trouble, Why, decide, plan},
    world::state::{Companion, Source, Stream, Wish, World},
};

pub struct Cluster {
    pub world: World,
    objects: BTreeMap<ObjectKey, Object>,
    namespaces: BTreeMap<String, Meta>,
    clock: u64,
    /// The sources whose companions were right, as the mirror's ledgers remember them.
    settled: HashMap<ObjectKey, Digest>,
    /// By UID: the sources for which an object ever bore our marks.
    marked_for: HashMap<String, BTreeSet<String>>,
}

/// Where a write met something that it may not touch, or that has yet to go.
pub type Obstacle = (ObjectKey, Option<Trouble>);

impl Cluster {
    #[must_use]
    pub fn with(namespaces: &[&str]) -> Self {
        let mut cluster = Self {
            world: world(),
            objects: BTreeMap::new(),
            namespaces: BTreeMap::new(),
            clock: 100,
            settled: HashMap::new(),
            marked_for: HashMap::new(),
        };
        namespaces.iter().for_each(|name| cluster.namespace(namespace(name)));
        cluster
    }

    // --- what people do

    pub fn namespace(&mut self, draft: ObjectBuilder) {
        let meta = draft.object.metadata;
        self.world.apply_namespace(&meta);
        self.namespaces.insert(meta.name.clone(), meta);
    }

    /// The namespace controller has emptied it.
    pub fn drop_namespace(&mut self, name: &str) {
        let inside: Vec<ObjectKey> =
            self.objects.keys().filter(|key| *key.namespace == *name).cloned().collect();
        inside.iter().for_each(|key| self.store(key, None, false));
        self.namespaces.remove(name);
        self.world.delete_namespace(name);
    }

    /// Creates an object, or replaces all of one but its UID.
    pub fn put(&mut self, draft: ObjectBuilder) -> ObjectKey {
        let key = draft.key();
        let mut object = draft.object;
        object.metadata.uid = match self.objects.get(&key) {
            Some(known) => known.metadata.uid.clone(),
            None => format!("uid-{}", self.clock),
        };
        self.store(&key, Some(object), false);
        key
    }

    /// Deletes an object, if it is there, and makes it anew.
    pub fn put_anew(&mut self, draft: ObjectBuilder) -> ObjectKey {
        self.store(&draft.key(), None, false);
        self.put(draft)
    }

    /// Edits an object, behind the guard. What the API server would not let pass is dropped.
    pub fn edit(&mut self, key: &ObjectKey, edit: impl FnOnce(&mut Object)) {
        let Some(before) = self.objects.get(key).cloned() else { return };
        let mut after = before.clone();
        edit(&mut after);
        write_entry(&mut after, "kubectl-edit");
        if may_become(&before, &after) {
            self.store(key, Some(after), false);
        }
    }

    pub fn delete(&mut self, key: &ObjectKey) {
        let Some(mut object) = self.objects.get(key).cloned() else { return };
        object.metadata.deletion_timestamp = Some("2026-01-01T00:00:00Z".to_owned());
        self.store(key, Some(object), false);
    }

    /// What the garbage collector does: an object goes when none of its owners is left.
    pub fn collect_garbage(&mut self) {
        let alive: BTreeSet<&str> = self.objects.values().map(|object| &*object.metadata.uid).collect();
        let orphaned = |object: &Object| {
            let owners = &object.metadata.owner_references;
            !owners.is_empty() && owners.iter().all(|owner| !alive.contains(&*owner.uid))
        };
        let garbage = self.objects.iter().filter(|(_, object)| orphaned(object));
        for key in garbage.map(|(key, _)| key.clone()).collect::<Vec<_>>() {
            self.delete(&key);
        }
    }

    /// The process ends and another begins: all it knows is what is there.
    pub fn restart(&mut self) {
        self.world = world();
        self.settled.clear();
        for meta in self.namespaces.values() {
            self.world.apply_namespace(meta);
        }
        for (key, object) in &self.objects {
            for stream in watched_by(key.kind, object) {
                apply(&mut self.world, stream, object.clone());
            }
        }
    }

    // --- what is there

    #[must_use]
    pub fn object(&self, key: &ObjectKey) -> Option<&Object> {
        self.objects.get(key)
    }

    /// Every source that a resync would look at, in order.
    #[must_use]
    pub fn all_sources(&self) -> BTreeSet<ObjectKey> {
        self.world.all_sources().into_iter().collect()
    }

    /// Whether an object bears proof, now or before, of being this source's companion. Our label is none.
    #[must_use]
    pub fn is_marked_for(&self, source: &ObjectKey, at: &ObjectKey) -> bool {
        let Some(Object { metadata: meta, .. }) = self.objects.get(at) else { return false };
        let owner = meta.controller().map(|owner| &owner.uid);
        self.marked_for.get(&meta.uid).is_some_and(|sources| sources.contains(&source.to_string()))
            || self.objects.get(source).is_some_and(|source| owner == Some(&source.metadata.uid))
            || self.is_known_by_entry_only(at)
    }

    /// Whether nothing but our entry in `managedFields` says that an object is ours.
    #[must_use]
    pub fn is_known_by_entry_only(&self, at: &ObjectKey) -> bool {
        self.objects.get(at).is_some_and(|object| {
            let named = object.metadata.annotations.get(&keys().source);
            named.is_none_or(|text| ObjectKey::parse(at.kind, text).is_none())
                && object.metadata.controller().is_none()
                && object.metadata.labels.get(&keys().companion).is_some_and(|value| value == "true")
                && object.metadata.managed_fields.iter().any(|entry| entry.manager == keys().instance)
        })
    }

    // --- what the mirror does

    #[must_use]
    pub fn plan(&self, source: &ObjectKey) -> Plan {
        plan(&self.world, source, self.is_settled(source))
    }

    fn is_settled(&self, key: &ObjectKey) -> bool {
        self.world.source(key).is_some_and(|source| self.settled.get(key) == Some(&source.digest))
    }

    /// Plans and carries out, once.
    pub fn settle(&mut self, source: &ObjectKey) -> Vec<Obstacle> {
        let plan = self.plan(source);
        self.carry_out(source, plan)
    }

    /// Carries out a plan as the mirror does, against what is really there.
    pub fn carry_out(&mut self, key: &ObjectKey, plan: Plan) -> Vec<Obstacle> {
        let source = self.world.source(key).cloned();
        let settled = self.is_settled(key);
        let mut obstacles = Vec::new();
        for Change { at, action } in plan.changes {
            let mut next = Some(action);
            for _ in 0..4 {
                let Some(action) = next.take() else { break };
                match self.attempt(source.as_deref(), &at, action, settled) {
                    Ok(step) => next = step,
                    Err(trouble) => obstacles.push((at.clone(), trouble)),
                }
            }
            assert!(next.is_none(), "{at}: a change that never ends");
        }
        if let Some(source) = source {
            self.settled.insert(key.clone(), source.digest);
        }
        obstacles
    }

    fn attempt(
        &mut self,
        source: Option<&Source>,
        at: &ObjectKey,
        action: Action,
        settled: bool,
    ) -> Result<Option<Action>, Option<Trouble>> {
        if let Action::Delete { known, .. } = &action {
            self.remove(at, known);
            return Ok(None);
        }
        let source = source.expect("only a source that is there has companions written");
        let wish = source.wish.as_ref().expect("a source that gets nothing has no companions written");
        match action {
            Action::Create { .. } if self.objects.contains_key(at) => self.look(source, at, settled),
            Action::Create { .. } => {
                let place = self.namespaces.get(&*at.namespace).expect("no create where no namespace is");
                assert!(!place.is_terminating(), "{at}: a create in a namespace that goes");
                let mut draft = ObjectBuilder { kind: at.kind, ..super::object(&at.namespace, &at.name) };
                draft.object.metadata.uid = format!("uid-{}", self.clock);
                fill(&mut draft.object, source, wish, at);
                self.store(at, Some(draft.object), true);
                Ok(None)
            }
            Action::Update { known, .. } => {
                let before = self.expect(at, &known);
                let mut after = before.clone();
                after.metadata.finalizers.clear();
                if !known.terminating {
                    for extra in known.extras.iter() {
                        after.metadata.labels.retain(|key, _| !extra.labels.contains(key));
                        after.metadata.annotations.retain(|key, _| !extra.annotations.contains(key));
                    }
                    fill(&mut after, source, wish, at);
                }
                assert!(may_become(&before, &after), "{at}: the API server refuses this update");
                self.store(at, Some(after), true);
                Ok(None)
            }
            Action::Replace { why, known } => {
                self.remove(at, &known);
                Ok(Some(Action::Create { why }))
            }
            Action::Delete { .. } => Ok(None),
        }
    }

    /// A create found something that no watch of ours had shown.
    fn look(
        &mut self,
        source: &Source,
        at: &ObjectKey,
        settled: bool,
    ) -> Result<Option<Action>, Option<Trouble>> {
        let there = super::read_companion(at.kind, self.objects[at].clone());
        let (_, found) = self.world.identify(there.clone());
        let mut seen = Seen::by(&self.world, source, at, Some(&found), settled);
        seen.settled |= seen.lost;
        match decide(source, at, Some(&found), seen) {
            Decision::Change(change) => Ok(Some(change.action)),
            Decision::Trouble(trouble) => Err(Some(trouble)),
            Decision::Nothing if found.terminating => Err(None),
            Decision::Nothing => {
                self.world.companion_written(there);
                Ok(None)
            }
        }
    }

    /// What a write was decided on must be what is there: nobody was faster here.
    fn expect(&self, at: &ObjectKey, known: &Companion) -> Object {
        let object = self.objects.get(at).unwrap_or_else(|| panic!("{at}: a write to what is not there"));
        let meta = &object.metadata;
        let (there, decided_on) =
            ((&meta.uid, &meta.resource_version), (&known.uid, &known.resource_version));
        assert_eq!(there, decided_on, "{at}: a write on a state that has passed");
        object.clone()
    }

    fn remove(&mut self, at: &ObjectKey, known: &Companion) {
        let mut object = self.expect(at, known);
        self.world.companion_deleted(at, &known.uid);
        object.metadata.deletion_timestamp = Some("2026-01-01T00:00:00Z".to_owned());
        self.store(at, Some(object), false);
    }

    // --- what the API server does

    /// Keeps a new state and shows it to the watches. The answer to a write of ours comes before its echo.
    fn store(&mut self, key: &ObjectKey, after: Option<Object>, ours: bool) {
        self.clock += 1;
        let version = self.clock.to_string();
        let before = self.objects.remove(key);
        let after = after.map(|mut object| {
            object.metadata.resource_version.clone_from(&version);
            object
        });
        if let Some(answer) = after.as_ref().filter(|_| ours) {
            self.world.companion_written(super::read_companion(key.kind, answer.clone()));
        }
        let after = after
            .filter(|object| !object.metadata.is_terminating() || !object.metadata.finalizers.is_empty());
        if let Some(object) = &after {
            self.objects.insert(key.clone(), object.clone());
            if let Some(named) = object.metadata.annotations.get(&keys().source) {
                self.marked_for.entry(object.metadata.uid.clone()).or_default().insert(named.clone());
            }
        }
        for stream in [Stream::Sources(key.kind), Stream::Companions(key.kind)] {
            let shown = |object: &Option<Object>| {
                object.clone().filter(|object| watched_by(key.kind, object).any(|watch| watch == stream))
            };
            match (shown(&before), shown(&after)) {
                (_, Some(object)) => apply(&mut self.world, stream, object),
                (Some(object), None) => {
                    // A watch by label shows the last state that it matched, with the version of the change.
                    let meta = Meta { resource_version: version.clone(), ..object.metadata };
                    match stream {
                        Stream::Sources(kind) => self.world.delete_source(kind, &meta),
                        _ => self.world.delete_companion(key.kind, &meta),
                    };
                }
                (None, None) => {}
            }
        }
    }
}

fn watched_by(kind: Kind, object: &Object) -> impl Iterator<Item = Stream> {
    let watches = [
        (keys().managed.clone(), Stream::Sources(kind)),
        (keys().companion.clone(), Stream::Companions(kind)),
    ];
    let labels = object.metadata.labels.clone();
    watches
        .into_iter()
        .filter(move |(label, _)| labels.get(label).is_some_and(|value| value == "true"))
        .map(|(_, stream)| stream)
}

fn apply(world: &mut World, stream: Stream, object: Object) {
    match stream {
        Stream::Sources(kind) => world.apply_source(super::read_source(kind, object)),
        Stream::Companions(kind) => world.apply_companion(super::read_companion(kind, object)),
        Stream::Namespaces => unreachable!("namespaces are no objects of this kind"),
    };
}

/// Content and marks as a source wishes them, beside what others put there.
fn fill(object: &mut Object, source: &Source, wish: &Wish, at: &ObjectKey) {
    let map = |raw: &Option<Box<serde_json::value::RawValue>>| {
        raw.as_ref().map(|raw| serde_json::from_str(raw.get()).expect("a payload is a map"))
    };
    object.data = map(&wish.payload.data);
    object.binary_data = map(&wish.payload.binary);
    object.type_ = wish.payload.type_.as_deref().map(str::to_owned);
    object.immutable = wish.payload.immutable.then_some(true);
    object.metadata.labels.extend(wish.marks.labels.clone());
    object.metadata.annotations.extend(wish.marks.annotations.clone());
    object.metadata.owner_references = marks::expected_owners(&source.key, &source.uid, &at.namespace);
    write_entry(object, &keys().instance);
}

fn write_entry(object: &mut Object, manager: &str) {
    object.metadata.managed_fields.retain(|entry| entry.manager != manager);
    object
        .metadata
        .managed_fields
        .push(ManagedFields { manager: manager.to_owned(), ..ManagedFields::default() });
}

/// Whether the API server lets an update pass: an immutable object keeps its content, a Secret its type, and what
/// terminates gets no new finalizer.
fn may_become(before: &Object, after: &Object) -> bool {
    let frozen = before.immutable == Some(true);
    let more = after.metadata.finalizers.len() > before.metadata.finalizers.len();
    before.type_ == after.type_
        && !(frozen && Content::split(before.clone()).1 != Content::split(after.clone()).1)
        && !(before.metadata.is_terminating() && more)
}

/// What a plan does at each place, without the state that it was decided on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    Create(Why),
    Update(Why),
    Replace(Why),
    Delete(crate::plan::Removal),
}

/// The changes of a plan, to compare: place and step.
#[must_use]
pub fn steps(plan: &Plan) -> Vec<(String, Step)> {
    let step = |change: &Change| {
        let step = match &change.action {
            Action::Create { why } => Step::Create(*why),
            Action::Update { why, .. } => Step::Update(*why),
            Action::Replace { why, .. } => Step::Replace(*why),
            Action::Delete { why, .. } => Step::Delete(*why),
        };
        (change.at.to_string(), step)
    };
    plan.changes.iter().map(step).collect()
}
