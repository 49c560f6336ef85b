//! Sees every change of a cluster and says what is wrong with it: at every moment, and once Lockstep has caught up.

mod rights;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
};

use crate::{
    names::Names,
    object::{Key, Kind, Object, Snapshot},
    rules::{self, Policy, Reading, Welcome, welcome},
};

/// Who made a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Writer {
    /// A person or another tool.
    Person,
    /// Lockstep's controller.
    Lockstep,
    /// The garbage collector, the namespace controller, or the API server when the last finalizer goes.
    Kubernetes,
}

/// One change of one object, as a watch shows it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    pub by: Writer,
    pub at: Key,
    /// `None` if it is gone now.
    pub after: Option<Object>,
}

/// What is wrong: which rule is broken, where, and how.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Violation(pub String);

/// Follows a cluster from its beginning.
pub struct Judge {
    names: Names,
    now: Snapshot,
    /// Every state that a source or a namespace ever had.
    states: BTreeMap<Key, Vec<State>>,
    /// By UID.
    companions: BTreeMap<String, Known>,
    /// The UIDs of objects that ever had a mark of a companion, whoever put it there.
    marked: BTreeSet<String>,
    /// By UID: the sources that an object ever named.
    named: BTreeMap<String, BTreeSet<Key>>,
    /// By UID: the labels and annotations that people have put on objects.
    theirs: BTreeMap<String, BTreeSet<String>>,
    violations: Vec<Violation>,
}

/// One state of a source or of a namespace.
struct State {
    object: Object,
    reading: Reading,
}

/// What Lockstep knows, or could know, about an object that it has written.
struct Known {
    /// The source for which Lockstep wrote it last, and its UID.
    source: Key,
    source_uid: Option<String>,
    /// Whether its marks said then, or say since, that it stays when its source is gone.
    keep: bool,
    /// It lost its label or the name of its source at a time when no replica was there to see it, or when it was to
    /// stay and its source did not want it or was another one of the same name.
    forgotten: bool,
}

/// Whether a source wants a companion at a place.
enum Wish {
    Wanted,
    /// Nothing is written for the source, or not for this companion: it stays as it is.
    AsItIs,
    Unwanted(&'static str),
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl Judge {
    #[must_use]
    pub const fn new(names: Names) -> Self {
        Self {
            names,
            now: Snapshot::new(),
            states: BTreeMap::new(),
            companions: BTreeMap::new(),
            marked: BTreeSet::new(),
            named: BTreeMap::new(),
            theirs: BTreeMap::new(),
            violations: Vec::new(),
        }
    }

    /// The cluster has changed. Feed every change, in the order in which they happened.
    pub fn record(&mut self, Change { by, at, after }: Change) {
        let before = self.now.get(&at).cloned();
        if by == Writer::Lockstep {
            self.check_write(&at, before.as_ref(), after.as_ref());
        }
        match after {
            Some(object) => self.put(by, at, object),
            None => drop(self.now.remove(&at)),
        }
        if by == Writer::Person {
            self.forget_left_alone();
        }
    }

    /// A companion that has lost its label, that was to stay and that its source does not want is left to its
    /// namespace, without a write that shows it. If the source wants it again later, it is an object like any other.
    /// That is also true if there is another source of the same name: the companion may have been released before that
    /// was created.
    fn forget_left_alone(&mut self) {
        let left_alone = |(at, object): &(&Key, &Object)| {
            let Some(known) = self.companions.get(&object.uid) else { return false };
            let is_other = |source: &Object| known.source_uid.as_ref().is_some_and(|uid| *uid != source.uid);
            !is_labelled(&self.names, object)
                && (known.keep || self.keeps(&known.source))
                && (matches!(self.wish(&known.source, at, object), Wish::Unwanted(_))
                    || self.now.get(&known.source).is_some_and(is_other))
        };
        let uids: Vec<String> =
            self.now.iter().filter(left_alone).map(|(_, object)| object.uid.clone()).collect();
        for uid in uids {
            self.companions.entry(uid).and_modify(|known| known.forgotten = true);
        }
    }

    /// Every replica has lost its memory. Call it when the last replica that remembers has ended, and once more when
    /// the first new one has listed everything: what people do in between is seen by nobody.
    pub fn memory_lost(&mut self) {
        for (at, object) in &self.now {
            let shows = named_source(&self.names, at, object).is_some() && is_labelled(&self.names, object);
            if let Some(known) = self.companions.get_mut(&object.uid).filter(|_| !shows) {
                known.forgotten = true;
            }
        }
    }

    /// etcd was restored from a backup: the cluster is in this state now, without changes that led there.
    pub fn restored(&mut self, now: Snapshot) {
        self.now.clear();
        for (at, object) in now {
            self.put(Writer::Person, at, object);
        }
        self.memory_lost();
    }

    /// The cluster as it is now.
    #[must_use]
    pub const fn now(&self) -> &Snapshot {
        &self.now
    }

    /// What was wrong at any moment so far: that never heals.
    #[must_use]
    pub fn violations(&self) -> &[Violation] {
        &self.violations
    }

    /// What would be wrong if the cluster stayed as it is. Empty when Lockstep has caught up.
    #[must_use]
    pub fn unsettled(&self) -> Vec<Violation> {
        let mut wrong = Vec::new();
        for (key, source) in &self.now {
            if let Some(policy) = self.active_policy(key, source) {
                for namespace in self.namespaces_for(&policy, key) {
                    let at = Key::new(key.kind, namespace, &policy.companion);
                    if at != *key {
                        wrong.extend(self.check_place(key, source, &policy, &at));
                    }
                }
            }
        }
        for (at, object) in &self.now {
            wrong.extend(self.check_wanted(at, object));
        }
        wrong
    }

    fn put(&mut self, by: Writer, at: Key, object: Object) {
        if by == Writer::Person {
            let before = self.now.get(&at).filter(|before| before.uid == object.uid);
            let known = |key: &&String| {
                before.is_some_and(|before| {
                    before.labels.contains_key(*key) || before.annotations.contains_key(*key)
                })
            };
            // The annotation that says what was copied is gone: from now on nobody knows.
            let copied = |object: &Object| object.annotations.get(&self.names.key("copied")).cloned();
            let forgotten = before.is_some_and(|before| copied(before) != copied(&object));
            let keys = object.labels.keys().chain(object.annotations.keys());
            let new = keys.filter(|key| forgotten || !known(key));
            self.theirs.entry(object.uid.clone()).or_default().extend(new.cloned());
        }
        let has_marks = has_marks(&self.names, &object);
        if has_marks {
            let named = named_source(&self.names, &at, &object);
            self.named.entry(object.uid.clone()).or_default().extend(named);
            self.marked.insert(object.uid.clone());
        }
        if by == Writer::Lockstep {
            match named_source(&self.names, &at, &object) {
                Some(source) => {
                    let keep = says_keep(&self.names, &object);
                    let source_uid = object.annotations.get(&self.names.key("source-uid")).cloned();
                    let known = Known { source, source_uid, keep, forgotten: false };
                    self.companions.insert(object.uid.clone(), known);
                }
                // Lockstep has released it: from now on it is an object like any other.
                None if !has_marks => {
                    // What was copied stays, too.
                    let keys = object.labels.keys().chain(object.annotations.keys()).cloned();
                    self.theirs.entry(object.uid.clone()).or_default().extend(keys);
                    self.companions.remove(&object.uid);
                    self.marked.remove(&object.uid);
                }
                None => {}
            }
        } else if says_keep(&self.names, &object) {
            self.companions.entry(object.uid.clone()).and_modify(|known| known.keep = true);
        }
        let reading = Reading::of(&self.names, &at, &object);
        if at.kind == Kind::Namespace || reading != Reading::NoSource {
            let state = State { object: object.clone(), reading };
            self.states.entry(at.clone()).or_default().push(state);
        }
        self.now.insert(at, object);
    }

    // --- at every moment

    fn check_write(&mut self, at: &Key, before: Option<&Object>, after: Option<&Object>) {
        let mut wrong = Vec::new();
        if at.kind == Kind::Namespace {
            wrong.push(format!("{at}: Lockstep writes a Namespace"));
        }
        if let Some(before) = before {
            // A replacement under the same name is another object.
            let same = after.is_none_or(|after| after.uid == before.uid);
            let is_foreign = !self.marked.contains(&before.uid) && !self.companions.contains_key(&before.uid);
            let adopted = match after {
                Some(after) => self.may_adopt(at, after),
                // Immutable content and a type can only be replaced.
                None => self.may_be_replaced(at, before),
            };
            if !same || (is_foreign && !adopted) {
                wrong.push(format!("{at}: Lockstep touches a foreign object"));
            }
        }
        if let (Some(before), None) = (before, after)
            && self.must_stay(at, before)
        {
            wrong.push(format!("{at}: Lockstep deletes a companion that was to stay"));
        }
        // It is about to be released: its marks say first that it stays.
        let announced = before.zip(after).is_some_and(|(before, after)| self.only_stays(before, after));
        let written = |after: &&Object| has_marks(&self.names, after) && !after.terminating && !announced;
        if let Some(after) = after.filter(written) {
            match named_source(&self.names, at, after) {
                None => wrong.push(format!("{at}: Lockstep writes a companion that names no source")),
                Some(source) => wrong.extend(self.check_content(&source, at, after)),
            }
        }
        self.violations.extend(wrong.into_iter().map(Violation));
    }

    /// Whether a write adds that a companion stays when its source is gone, and changes nothing else.
    fn only_stays(&self, before: &Object, after: &Object) -> bool {
        let mut expected = before.clone();
        expected.annotations.insert(self.names.key("when-removed"), "keep".to_owned());
        let (version, managers) = (after.version.clone(), after.managers.clone());
        Object { version, managers, ..expected } == *after
    }

    /// What Lockstep writes is the companion of a state that its source had, in a namespace that the source reached.
    fn check_content(&self, source: &Key, at: &Key, written: &Object) -> Option<String> {
        let mut closest: Option<Vec<String>> = None;
        for state in self.states.get(source).into_iter().flatten() {
            let Reading::Source(policy) = &state.reading else { continue };
            let companion = policy.companion_in(&self.names, source, &state.object, &at.namespace);
            let mut differences = companion.differences(&self.names, written, &self.theirs(written));
            if policy.companion != at.name || !self.ever_welcome(&policy.targets, source, &at.namespace) {
                differences.push("the source never wanted a companion here".to_owned());
            }
            if differences.is_empty() {
                return None;
            }
            if closest.as_ref().is_none_or(|closest| differences.len() < closest.len()) {
                closest = Some(differences);
            }
        }
        let why = closest.unwrap_or_else(|| vec![format!("{source} was never a source")]).join("; ");
        Some(format!("{at}: Lockstep writes what {source} never said: {why}"))
    }

    /// The labels and annotations that people have put on an object.
    fn theirs(&self, object: &Object) -> BTreeSet<String> {
        self.theirs.get(&object.uid).cloned().unwrap_or_default()
    }

    /// Whether a namespace, in any state that it had, was a target of a source with these targets.
    fn ever_welcome(&self, targets: &rules::Targets, source: &Key, namespace: &str) -> bool {
        let home = &source.namespace;
        self.states.get(&Key::namespace(namespace)).into_iter().flatten().any(|state| {
            let welcome = rules::welcome_of(&self.names, &state.object, home, namespace, Some(targets));
            targets.want(home, namespace, &state.object.labels) && welcome == Welcome::Yes
        })
    }

    /// Whether Lockstep may take over an object by this write: some state of the source says so, and some state of the
    /// namespace.
    fn may_adopt(&self, at: &Key, after: &Object) -> bool {
        named_source(&self.names, at, after).is_some_and(|source| self.adopts(&source, at))
    }

    /// Whether Lockstep may delete a foreign object to create a companion in its place.
    fn may_be_replaced(&self, at: &Key, object: &Object) -> bool {
        let replaced = |source: &Key| {
            let mut states = self.states.get(source).into_iter().flatten();
            object.immutable || states.any(|state| state.object.type_ != object.type_)
        };
        let mut sources = self.states.keys().filter(|source| source.kind == at.kind);
        sources.any(|source| replaced(source) && self.adopts(source, at))
    }

    fn adopts(&self, source: &Key, at: &Key) -> bool {
        let mut states = self.states.get(source).into_iter().flatten();
        let asks = states.any(|state| {
            matches!(&state.reading, Reading::Source(policy) if policy.adopt && policy.companion == at.name)
        });
        let mut namespaces = self.states.get(&Key::namespace(&at.namespace)).into_iter().flatten();
        let accepted = source.namespace == at.namespace
            || namespaces.any(|state| {
                rules::accepts(&self.names, &state.object, "accept-adopt-from", &source.namespace)
            });
        asks && accepted
    }

    /// Whether `when-removed: keep` forbids the delete of a companion, whatever Lockstep has seen so far: every state
    /// of its source says so, its namespace never refused it, and it never had to be deleted to be created again.
    fn must_stay(&self, at: &Key, companion: &Object) -> bool {
        let Some(source) = named_source(&self.names, at, companion) else { return false };
        let states: Vec<&State> = self.states.get(&source).into_iter().flatten().collect();
        let keeps = |state: &&State| match &state.reading {
            Reading::Source(policy) => policy.keep,
            Reading::Malformed(_) | Reading::NoSource => false,
        };
        let barred = |state: &State| {
            states.iter().any(|source_state| {
                let Reading::Source(policy) = &source_state.reading else { return false };
                let targets = Some(&policy.targets);
                rules::welcome_of(&self.names, &state.object, &source.namespace, &at.namespace, targets)
                    != Welcome::Yes
            })
        };
        let recreated = companion.immutable
            || states.iter().any(|state| state.object.immutable || state.object.type_ != companion.type_);
        says_keep(&self.names, companion)
            && !states.is_empty()
            && states.iter().all(keeps)
            && !self.states.get(&Key::namespace(&at.namespace)).into_iter().flatten().any(barred)
            && !recreated
    }

    // --- when Lockstep has caught up

    /// The policy of a source for which companions are written now.
    fn active_policy(&self, key: &Key, object: &Object) -> Option<Policy> {
        match Reading::of(&self.names, key, object) {
            Reading::Source(policy) if !policy.paused && !object.terminating => Some(*policy),
            _ => None,
        }
    }

    fn namespaces_for<'a>(&'a self, policy: &'a Policy, key: &'a Key) -> impl Iterator<Item = &'a str> {
        self.now
            .keys()
            .filter(|at| at.kind == Kind::Namespace)
            .map(|at| at.name.as_str())
            .filter(|name| matches!(self.wish_in(policy, key, name), Wish::Wanted))
    }

    fn wish_in(&self, policy: &Policy, key: &Key, namespace: &str) -> Wish {
        let Some(found) = self.now.get(&Key::namespace(namespace)) else { return Wish::AsItIs };
        match welcome(&self.names, &self.now, &key.namespace, namespace, Some(&policy.targets)) {
            Welcome::Gone => Wish::AsItIs,
            Welcome::Barred => Wish::Unwanted("its namespace takes no companions of the source"),
            Welcome::Yes if policy.targets.want(&key.namespace, namespace, &found.labels) => Wish::Wanted,
            Welcome::Yes => Wish::Unwanted("the source does not want it there"),
        }
    }

    /// What a source says about an object that is, or was, its companion.
    fn wish(&self, key: &Key, at: &Key, companion: &Object) -> Wish {
        let Some(source) = self.now.get(key) else { return Wish::Unwanted("its source is gone") };
        match Reading::of(&self.names, key, source) {
            Reading::NoSource => Wish::Unwanted("its source is no longer labelled"),
            _ if source.terminating => Wish::AsItIs,
            Reading::Malformed(_) => {
                let uid = companion.annotations.get(&self.names.key("source-uid"));
                let of_former = uid.is_some_and(|uid| *uid != source.uid)
                    && companion.managers.contains(&self.names.manager());
                match welcome(&self.names, &self.now, &key.namespace, &at.namespace, None) {
                    _ if of_former => Wish::Unwanted("its source is gone, and the new one is malformed"),
                    // Whether a source that is malformed needs acceptance is not known; `exclude` is.
                    Welcome::Barred if !at.namespace.starts_with("kube-") => {
                        Wish::Unwanted("its namespace is excluded")
                    }
                    _ => Wish::AsItIs,
                }
            }
            Reading::Source(policy) => {
                let wish = self.wish_in(&policy, key, &at.namespace);
                let barred =
                    welcome(&self.names, &self.now, &key.namespace, &at.namespace, Some(&policy.targets))
                        == Welcome::Barred;
                match wish {
                    _ if policy.paused && !barred => Wish::AsItIs,
                    Wish::Wanted if policy.companion != at.name || at == key => {
                        Wish::Unwanted("its name is another one now")
                    }
                    wish => wish,
                }
            }
        }
    }

    /// The sources that an object may belong to: the one that Lockstep wrote it for, and the one that it names.
    fn owners(&self, at: &Key, object: &Object) -> Vec<Key> {
        let known = self.companions.get(&object.uid).filter(|known| !known.forgotten);
        let mut owners: Vec<Key> = known.map(|known| known.source.clone()).into_iter().collect();
        owners.extend(named_source(&self.names, at, object));
        owners.dedup();
        owners
    }

    /// The sources that an object ever named, if Lockstep never wrote it: it belongs to the first one that a replica
    /// has seen it name.
    fn named_before(&self, object: &Object) -> impl Iterator<Item = &Key> {
        let known = self.companions.get(&object.uid).filter(|known| !known.forgotten);
        self.named.get(&object.uid).filter(|_| known.is_none()).into_iter().flatten()
    }

    /// A source wants a companion at a place: it is there and right, or somebody else holds the place rightly.
    fn check_place(&self, key: &Key, source: &Object, policy: &Policy, at: &Key) -> Option<Violation> {
        let fail = |why: &str| Some(Violation(format!("{at}, companion of {key}: {why}")));
        let Some(found) = self.now.get(at) else { return fail("missing") };
        let companion = policy.companion_in(&self.names, key, source, &at.namespace);
        let differences = companion.differences(&self.names, found, &self.theirs(found));
        if differences.is_empty() && !found.terminating {
            return None;
        }
        let (owners, known) = (self.owners(at, found), self.companions.get(&found.uid));
        let held_by_another = owners
            .iter()
            .chain(self.named_before(found))
            .filter(|owner| *owner != key)
            .any(|owner| !matches!(self.wish(owner, at, found), Wish::Unwanted(_)));
        // One that was to stay and has no mark may have been released, for all that a replica knows.
        let maybe_released = !has_marks(&self.names, found) && known.is_some_and(|known| known.keep);
        if held_by_another || maybe_released {
            return None;
        }
        if owners.contains(key) {
            return fail(&differences.join("; "));
        }
        // Orphans of other sources are found elsewhere. What is left is foreign.
        if !owners.is_empty() {
            return None;
        }
        let bound = found.owners.iter().any(|owner| owner.controller)
            || !found.finalizers.is_empty()
            || found.terminating
            || is_managed(&self.names, found);
        let accepted = key.namespace == at.namespace
            || self.now.get(&Key::namespace(&at.namespace)).is_some_and(|namespace| {
                rules::accepts(&self.names, namespace, "accept-adopt-from", &key.namespace)
            });
        match policy.adopt && accepted && !bound {
            true => fail("an object that it may adopt has its name"),
            false => None,
        }
    }

    /// Whether a source says that its companions stay.
    fn keeps(&self, key: &Key) -> bool {
        let source = self.now.get(key).map(|source| Reading::of(&self.names, key, source));
        matches!(source, Some(Reading::Source(policy)) if policy.keep)
    }

    /// A companion exists only if its source wants it, or leaves it as it is.
    fn check_wanted(&self, at: &Key, object: &Object) -> Option<Violation> {
        let in_step_with_namespace =
            self.now.get(&Key::namespace(&at.namespace)).is_some_and(|namespace| !namespace.terminating);
        if at.kind == Kind::Namespace || !in_step_with_namespace {
            return None;
        }
        // It is being deleted. A finalizer that somebody else has put there may delay that.
        if object.terminating {
            return None;
        }
        let labelled = is_labelled(&self.names, object);
        let known = self.companions.get(&object.uid).filter(|known| !known.forgotten);
        // An annotation alone proves nothing, because a restored or exported copy has it, too.
        let owners = if labelled || known.is_some() { self.owners(at, object) } else { Vec::new() };
        if owners.is_empty() {
            return None;
        }
        // One without any mark may be left as it is: it may have been released. So may one that has become a source
        // itself.
        let is_source = is_managed(&self.names, object) && named_source(&self.names, at, object).is_none();
        if !has_marks(&self.names, object) || is_source {
            return None;
        }
        // One that was to stay, by its marks or by its source, and has lost its label is left as it is.
        if !labelled
            && (known.is_some_and(|known| known.keep) || owners.iter().any(|owner| self.keeps(owner)))
        {
            return None;
        }
        let mut why = "";
        for owner in owners.iter().chain(self.named_before(object)) {
            match self.wish(owner, at, object) {
                Wish::Unwanted(reason) => why = reason,
                Wish::Wanted | Wish::AsItIs => return None,
            }
        }
        Some(Violation(format!("{at}, companion of {}: still there, but {why}", owners[0])))
    }
}

fn has_marks(names: &Names, object: &Object) -> bool {
    object.labels.contains_key(&names.key("companion"))
        || ["source", "source-uid"].iter().any(|name| object.annotations.contains_key(&names.key(name)))
}

fn is_labelled(names: &Names, object: &Object) -> bool {
    object.labels.get(&names.key("companion")).is_some_and(|value| value == "true")
}

fn is_managed(names: &Names, object: &Object) -> bool {
    object.labels.get(&names.key("managed")).is_some_and(|value| value == "true")
}

fn says_keep(names: &Names, object: &Object) -> bool {
    object.annotations.get(&names.key("when-removed")).is_some_and(|value| value == "keep")
}

/// The source that a companion names.
fn named_source(names: &Names, at: &Key, object: &Object) -> Option<Key> {
    let (namespace, name) = object.annotations.get(&names.key("source"))?.split_once('/')?;
    Some(Key::new(at.kind, namespace, name))
}

#[cfg(test)]
mod tests;
