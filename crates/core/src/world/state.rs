//! What the watches have shown, and which sources to reconcile when it changes.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use super::{
    NamespaceRules, WatchId,
    companion::{Companion, CompanionState, ObservedCompanion, uid_digest},
    companions::Companions,
    lost::{LostCompanion, LostCompanions, LostTask, SeenBy},
    namespaces::{Eligibility, Namespaces},
    packed::{Interner, Uid},
    payloads::{Payload, Payloads},
    relist::{Tombstone, WatchProgress},
    source::{ObservedSource, Source},
    wanted::Wanted,
};
use crate::{
    keys::Keys,
    object::{Kind, Meta, ObjectKey},
    policy::{Policy, Targets, WhenRemoved, content::Digest},
};

/// What happened to a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SourceEvent {
    Added,
    Changed,
    Removed,
}

/// What follows from a change of the world.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Effect {
    /// The sources to reconcile.
    pub requeue: Vec<ObjectKey>,
    pub events: Vec<(ObjectKey, SourceEvent)>,
}

pub struct World {
    sources: HashMap<ObjectKey, Arc<Source>>,
    payloads: Payloads,
    companions: Companions,
    /// Names and namespaces of sources and companions.
    names: Interner<str>,
    companion_states: Interner<CompanionState>,
    wanted: Wanted,
    namespaces: Namespaces,
    /// All namespaces have been listed once.
    namespaces_listed: bool,
    lost: LostCompanions,
    progress: WatchProgress,
}

impl World {
    /// Keeps at most `source_cache` bytes of sources' payloads.
    pub fn new(keys: Arc<Keys>, rules: NamespaceRules, source_cache: usize) -> Self {
        Self {
            sources: HashMap::new(),
            payloads: Payloads::new(source_cache),
            companions: Companions::default(),
            names: Interner::default(),
            companion_states: Interner::default(),
            wanted: Wanted::default(),
            namespaces: Namespaces::new(keys, rules),
            namespaces_listed: false,
            lost: LostCompanions::default(),
            progress: WatchProgress::default(),
        }
    }

    // --- queries

    pub const fn namespaces(&self) -> &Namespaces {
        &self.namespaces
    }

    pub fn source(&self, key: &ObjectKey) -> Option<&Source> {
        self.sources.get(key).map(|source| &**source)
    }

    pub fn shared_source(&self, key: &ObjectKey) -> Option<Arc<Source>> {
        self.sources.get(key).cloned()
    }

    /// What a source asks for; none if it does not exist or is malformed.
    pub fn policy(&self, source: &ObjectKey) -> Option<&Policy> {
        self.source(source)?.policy()
    }

    /// What is written to the companions of a source, if it is kept.
    pub fn payload(&self, source: &Source) -> Option<Arc<Payload>> {
        self.payloads.get(&source.key, source.digest)
    }

    /// How many bytes of payloads are kept.
    pub const fn payload_bytes(&self) -> usize {
        self.payloads.bytes()
    }

    pub fn companion(&self, key: &ObjectKey) -> Option<&Companion> {
        self.companions.get(key)
    }

    /// A name or a namespace, shared with the objects that have it: there may be many more keys than names.
    pub(crate) fn shared_name(&self, name: &str) -> Arc<str> {
        self.names.get(name).unwrap_or_else(|| name.into())
    }

    /// The companions that belong to a source, whether it exists or not, in order of their namespaces, and in
    /// each of their names.
    pub fn companions_of(&self, source: &ObjectKey) -> impl Iterator<Item = (&ObjectKey, &Companion)> {
        self.companions.of(source)
    }

    /// Every source that exists or has companions, in no order. [`super::SharedWorld::all_sources`] sorts them.
    pub fn all_sources(&self) -> Vec<ObjectKey> {
        let with_lost = self.lost.sources().filter(|key| !self.companions.has_any(key));
        let removed =
            self.companions.sources().chain(with_lost).filter(|key| !self.sources.contains_key(*key));
        self.sources.keys().chain(removed).cloned().collect()
    }

    /// Whether a source has companions, or had some that have to be looked for.
    pub fn has_companions(&self, source: &ObjectKey) -> bool {
        self.companions.has_any(source) || self.lost.of(source).next().is_some()
    }

    /// The places at which a source had a companion that is lost, in order.
    pub(crate) fn lost_of(&self, source: &ObjectKey) -> impl Iterator<Item = &ObjectKey> {
        self.lost.of(source).map(|(at, _)| at)
    }

    /// The lost companion of a source at a place that the source does not want, or not any more.
    pub(crate) fn unwanted_lost_at(&self, source: &ObjectKey, at: &ObjectKey) -> Option<&LostCompanion> {
        self.lost.get(at).filter(|lost| lost.source == *source && self.task(at, lost) == LostTask::Find)
    }

    /// The places at which a source had a companion that may still exist, without our label.
    pub(crate) fn lost_with_known_uid(&self, source: &ObjectKey) -> impl Iterator<Item = &ObjectKey> {
        self.lost.of(source).filter(|(_, lost)| lost.uid.is_some()).map(|(at, _)| at)
    }

    /// What there is to do about a lost companion.
    fn task(&self, at: &ObjectKey, lost: &LostCompanion) -> LostTask {
        let source = self.source(&lost.source);
        let is_refused = self.is_refused(&lost.source, &at.namespace);
        let is_former = |source: &Source| lost.source_uid.is_some_and(|uid| uid != uid_digest(&source.uid));
        let is_unwanted = match source {
            None => true,
            Some(source) if source.terminating => false,
            // A recreated source wants companions under the same names. This one may have been released before, and
            // then it does not belong to the new source. If it still has its marks, these say so.
            Some(source) if lost.keep && is_former(source) => true,
            _ if is_refused => true,
            Some(source) => match source.policy() {
                // A source that becomes malformed keeps its companions. Another UID is another source.
                None => is_former(source),
                Some(policy) => !policy.paused && !self.wants_at(&lost.source, at),
            },
        };
        if !is_unwanted || self.namespaces.is_gone_or_terminating(&at.namespace) {
            LostTask::None
        } else if !is_refused && Self::is_kept(source, lost.source_uid, lost.keep) {
            LostTask::Forget
        } else {
            LostTask::Find
        }
    }

    /// Whether a companion that is no longer wanted is released instead of deleted. Its source decides. If the source
    /// is gone, malformed or another one of the same name, the companion's own marks (`marked`) do.
    pub(crate) fn is_kept(source: Option<&Source>, source_uid: Option<Digest>, marked: bool) -> bool {
        let same = |source: &&Source| source_uid.is_none_or(|uid| uid == uid_digest(&source.uid));
        let present = source.filter(same).and_then(Source::policy);
        present.map_or(marked, |policy| policy.when_removed == WhenRemoved::Keep)
    }

    /// Whether a namespace takes no companions of a source, whatever the source says. What a malformed or deleted
    /// source said about consent is not known.
    pub(crate) fn is_refused(&self, source: &ObjectKey, namespace: &str) -> bool {
        self.eligibility(source, self.source(source), namespace).is_refusal()
    }

    /// Whether a source in this state may have a companion in a namespace. A malformed source keeps those that it has.
    pub(crate) fn eligibility(
        &self,
        key: &ObjectKey,
        source: Option<&Source>,
        namespace: &str,
    ) -> Eligibility {
        let unknown = Targets::default();
        let targets = source.and_then(Source::policy).map_or(&unknown, |policy| &policy.targets);
        self.namespaces.eligibility(&key.namespace, namespace, targets)
    }

    /// Whether the sources are being listed again and the list has not shown this one yet. It may be gone, after a
    /// restore of etcd for example, so nothing is written for it. It is enqueued when the list shows it.
    pub fn is_unconfirmed(&self, source: &ObjectKey) -> bool {
        let watch = WatchId::Sources(source.kind);
        self.progress.is_listing(watch)
            && self.sources.get(source).is_some_and(|known| known.epoch != self.progress.epoch(watch))
    }

    /// Counts the lists of a watch.
    pub(crate) fn epoch(&self, watch: WatchId) -> u32 {
        self.progress.epoch(watch)
    }

    pub fn source_count(&self) -> usize {
        self.sources.len()
    }

    /// How many companions are in other namespaces than their source, lost ones that were found included, and how many
    /// sources have any there, whether they still exist or not.
    pub fn cross_namespace_counts(&self) -> (usize, usize) {
        let (companions, sources) = self.companions.cross_namespace();
        let mut found: Vec<&ObjectKey> = self.lost.found_cross_namespace().collect();
        let companions = companions + found.len();
        found.dedup();
        found.retain(|source| !self.companions.crosses_namespaces(source));
        (companions, sources + found.len())
    }

    pub fn companion_count(&self) -> usize {
        self.companions.len()
    }

    /// The source, other than `asking`, that has this companion, or else the first that wants its name. A source that
    /// is being deleted does not count.
    pub(crate) fn competing_source(&self, at: &ObjectKey, asking: Option<&ObjectKey>) -> Option<ObjectKey> {
        let counts = |source: &&ObjectKey| {
            self.source(source).is_some_and(|source| !source.terminating && self.is_eligible(source, at))
        };
        let holder = self.companions.get(at).and_then(|companion| companion.state.source.as_ref());
        match holder.filter(counts) {
            Some(holder) => (Some(holder) != asking).then(|| holder.clone()),
            None => self.first_wanting(at, |source| Some(source) != asking && counts(&source)).cloned(),
        }
    }

    /// Whether a companion vanished although its source wants it: creating it again is a heal.
    pub(crate) fn was_lost(&self, at: &ObjectKey) -> bool {
        self.lost.get(at).is_some_and(|lost| lost.uid.is_some() && self.wants_at(&lost.source, at))
    }

    /// Whether a source is the first, by name, of those that want this companion. Only the first may take over an
    /// object that belongs to none of them.
    pub(crate) fn is_first_wanting(&self, source: &ObjectKey, at: &ObjectKey) -> bool {
        self.first_wanting(at, |source| !self.is_refused(source, &at.namespace)) == Some(source)
    }

    /// Whether a source wants its companion under just this name in just this namespace.
    pub fn wants_at(&self, source: &ObjectKey, at: &ObjectKey) -> bool {
        self.policy(source).is_some_and(|policy| {
            *policy.companion == *at.name
                && self.namespaces.is_wanted(&source.namespace, &policy.targets, &at.namespace)
        })
    }

    /// The first, by name, of the sources that want a companion and that count.
    fn first_wanting(&self, at: &ObjectKey, counts: impl Fn(&ObjectKey) -> bool) -> Option<&ObjectKey> {
        // Anybody may write sources with many patterns, so these are asked last.
        let counts = |source: &&ObjectKey| counts(source) && self.wants_at(source, at);
        self.wanted.sources_by_name(at).into_iter().filter_map(|mut sources| sources.find(&counts)).min()
    }

    /// Whether the controller writes this companion for this source.
    pub(crate) fn is_written_for(&self, source: &ObjectKey, at: &ObjectKey) -> bool {
        self.wants_at(source, at)
            && self
                .source(source)
                .is_some_and(|source| source.active_policy().is_some() && self.is_eligible(source, at))
    }

    fn is_eligible(&self, source: &Source, at: &ObjectKey) -> bool {
        self.eligibility(&source.key, Some(source), &at.namespace) == Eligibility::Eligible
    }

    /// The sources to reconcile when no object has the name of a companion any more: its owner, and unless that writes
    /// it again, the first of the others that want it. If all that wait were reconciled, all but one would just fail
    /// again.
    fn affected_by_removal(&self, at: &ObjectKey, owner: Option<&ObjectKey>) -> Vec<ObjectKey> {
        let next = match owner {
            Some(owner) if self.is_written_for(owner, at) => None,
            _ => self.first_wanting(at, |source| Some(source) != owner && self.is_written_for(source, at)),
        };
        owner.into_iter().chain(next).cloned().collect()
    }

    /// The sources to reconcile when a companion has changed: its owner and its former owner. If it has no owner and
    /// that is new, or whether it can be adopted has changed, every source that wants it.
    fn affected(&self, at: &ObjectKey, former: Option<&Companion>, now: &Companion) -> Vec<ObjectKey> {
        let former_owner = former.and_then(|former| former.state.source.as_ref());
        let mut affected: BTreeSet<&ObjectKey> = former_owner.into_iter().chain(&now.state.source).collect();
        let same =
            |former: &Companion| former.state.source.is_none() && former.availability() == now.availability();
        if now.state.source.is_none() && !former.is_some_and(same) {
            let wanting = self.wanted.sources_by_name(at).into_iter().flatten();
            affected.extend(wanting.filter(|source| self.wants_at(source, at)));
        }
        affected.into_iter().cloned().collect()
    }

    // --- lists

    /// A fresh list begins: what it does not show is removed when it ends.
    pub fn list_begins(&mut self, watch: WatchId) {
        self.progress.list_begins(watch);
    }

    /// A list as of `version` has ended. Removes objects that it did not show, except those we wrote after it.
    pub fn list_ends(&mut self, watch: WatchId, version: u64) -> Effect {
        let epoch = self.progress.epoch(watch);
        self.progress.list_ends(watch, version);
        let mut effect = Effect::default();
        match watch {
            WatchId::Sources(kind) => {
                let stale = |(key, source): (&ObjectKey, &Arc<Source>)| {
                    (key.kind == kind && source.epoch != epoch).then(|| key.clone())
                };
                for key in self.sources.iter().filter_map(stale).collect::<BTreeSet<_>>() {
                    effect.add(self.forget_source(&key));
                }
            }
            WatchId::Companions(kind) => {
                let stale = |(key, companion): (&ObjectKey, &Companion)| {
                    let newer = companion.written_epoch == epoch && companion.version() > version;
                    (key.kind == kind && companion.epoch != epoch && !newer).then(|| key.clone())
                };
                for key in self.companions.iter().filter_map(stale).collect::<BTreeSet<_>>() {
                    effect.add(self.forget_companion(&key, SeenBy::List));
                }
            }
            WatchId::Namespaces => {
                self.namespaces.retain_epoch(epoch);
                self.lost.retain(|at, _| self.namespaces.get(&at.namespace).is_some());
                self.namespaces_listed = true;
                effect.requeue.extend(self.forget_lost_not_looked_for(None));
            }
        }
        effect
    }

    // --- namespaces

    /// The watch shows a namespace. Returns what is wrong with its annotations, too.
    pub fn apply_namespace(&mut self, meta: &Meta) -> (Effect, Option<String>) {
        let epoch = self.progress.epoch(WatchId::Namespaces);
        let Some(change) = self.namespaces.apply(meta, epoch) else { return Default::default() };
        if !self.namespaces_listed {
            // Nothing is planned before everything is listed, and then every source is enqueued.
            return (Effect::default(), change.complaint);
        }
        let known = self.namespaces.get(&meta.name);
        let wanting = |source: &&Arc<Source>| {
            let mut states = known.into_iter().chain(&change.before);
            source.policy().is_some_and(|policy| {
                states.any(|state| state.matters_to(&policy.targets, &source.key.namespace, &meta.name))
            })
        };
        let mut requeue: BTreeSet<ObjectKey> =
            self.sources.values().filter(wanting).map(|source| source.key.clone()).collect();
        // A source that is gone, malformed or paused may have companions where it wants none. They could not be deleted
        // before the namespace was known, or must be now that it is excluded.
        let in_here = self.companions.sources_in(&meta.name);
        requeue.extend(in_here.chain(self.lost.sources_with_places_in(&meta.name)).cloned());
        requeue.extend(self.forget_lost_not_looked_for(None));
        (Vec::from_iter(requeue).into(), change.complaint)
    }

    /// A namespace was deleted. Its companions are deleted with it, and their watch shows that.
    pub fn delete_namespace(&mut self, name: &str) {
        self.namespaces.delete(name);
        self.lost.retain(|at, _| *at.namespace != *name);
    }

    // --- sources

    /// A live read shows a source. Whether it exists is for the watch to say: one that the world does not know, by now,
    /// was deleted after the read.
    pub fn source_read(&mut self, ObservedSource { source, payload }: ObservedSource) -> Effect {
        match self.sources.get(&source.key) {
            Some(known) if known.uid == source.uid && known.version <= source.version => {
                let source = Source { epoch: known.epoch, ..source };
                self.put_source(source, payload)
            }
            _ => Effect::default(),
        }
    }

    /// A watch or a list shows a source.
    pub fn apply_source(&mut self, ObservedSource { source, payload }: ObservedSource) -> Effect {
        let epoch = self.progress.epoch(WatchId::Sources(source.key.kind));
        let source = Source { epoch, ..source };
        // An older state never replaces a newer one, unless a fresh list shows it: after an etcd restore, versions run
        // backwards.
        let known = self.sources.get(&source.key);
        if known.is_some_and(|known| known.epoch == epoch && source.version < known.version) {
            return Effect::default();
        }
        self.put_source(source, payload)
    }

    fn put_source(&mut self, source: Source, payload: Option<Arc<Payload>>) -> Effect {
        let key = self.intern_key(source.key.clone());
        let source = Source { key: key.clone(), ..source };
        // The webhook lets anybody edit a source that is being deleted, because nothing is written for it. What it asks
        // for now has not been reviewed: its companions are those of its last state before.
        let source = match self.sources.get(&key) {
            Some(known) if source.terminating && known.uid == source.uid => {
                Source { desired: known.desired.clone(), digest: known.digest, ..source }
            }
            _ => source,
        };
        // Nothing is written for a source that is paused or being deleted.
        match payload.filter(|_| source.active_policy().is_some()) {
            Some(payload) => self.payloads.put(&key, source.digest, payload),
            None => self.payloads.remove(&key),
        }
        let source = Arc::new(source);
        let former = self.sources.insert(key.clone(), source.clone());
        if let Some(former) = &former {
            if former.digest == source.digest && former.terminating == source.terminating {
                // Only the version changed. The live read before deletes compares it.
                let is_confirmed = former.epoch != source.epoch;
                return if is_confirmed { vec![key].into() } else { Effect::default() };
            }
            self.wanted.remove_source(former);
        }
        self.wanted.add_source(&source);
        let event = if former.is_some() { SourceEvent::Changed } else { SourceEvent::Added };
        self.source_changed(key, former, event)
    }

    fn source_changed(&mut self, key: ObjectKey, former: Option<Arc<Source>>, event: SourceEvent) -> Effect {
        if let Some(former) = former {
            self.remember_places(&former);
        }
        let mut requeue = vec![key.clone()];
        requeue.extend(self.forget_lost_not_looked_for(Some(&key)));
        Effect { requeue, events: vec![(key, event)] }
    }

    pub fn delete_source(&mut self, kind: Kind, meta: &Meta) -> Effect {
        let key = ObjectKey::of(kind, meta);
        match self.sources.get(&key) {
            // The event may be about an earlier object of this name.
            Some(known) if known.uid == meta.uid => self.forget_source(&key),
            _ => Effect::default(),
        }
    }

    fn forget_source(&mut self, key: &ObjectKey) -> Effect {
        let former = self.sources.remove(key);
        if let Some(former) = &former {
            self.wanted.remove_source(former);
        }
        self.payloads.remove(key);
        self.source_changed(key.clone(), former, SourceEvent::Removed)
    }

    /// Remembers the places at which a former state of a source wanted a companion, the present one does not, and none
    /// is known: one that lost its label before this process started may be there. At most `MAX_PLACES` are kept for a
    /// source, and none if its companions were to stay.
    fn remember_places(&mut self, former: &Source) {
        let (key, Some(policy)) = (&former.key, former.policy()) else { return };
        let present = self.source(key);
        let has_same_places = present.is_some_and(|present| match present.policy() {
            Some(now) => (&now.targets, &now.companion) == (&policy.targets, &policy.companion),
            None => present.uid == former.uid,
        });
        let keep = policy.when_removed == WhenRemoved::Keep;
        let left = self.lost.places_left(key);
        let former_uid = Some(uid_digest(&former.uid));
        if has_same_places || left == 0 || Self::is_kept(present, former_uid, keep) {
            return;
        }
        let is_missing = |at: &ObjectKey| {
            at != key
                && self.lost.get(at).is_none()
                && self.companions.get(at).is_none_or(|found| found.state.source.is_none())
                && self.is_eligible(former, at)
                && !self.wants_at(key, at)
        };
        let wanted = self.namespaces.wanted(&key.namespace, &policy.targets).into_iter();
        let wanted = wanted.map(|namespace| ObjectKey::new(key.kind, namespace, &policy.companion));
        let missing: Vec<ObjectKey> = wanted.filter(is_missing).take(left).collect();
        for at in missing {
            self.lost.insert(at, LostCompanion::unseen(key.clone(), former_uid));
        }
    }

    // --- lost companions

    /// A live read has found this lost companion. Another one may have taken its place meanwhile.
    pub(crate) fn lost_found(&mut self, at: &ObjectKey, lost: &LostCompanion) {
        self.lost.set_found(at, lost);
    }

    /// A live read has shown that this lost companion does not exist, or we have deleted it. Another one may have taken
    /// its place meanwhile.
    pub(crate) fn lost_gone(&mut self, at: &ObjectKey, lost: &LostCompanion) -> Effect {
        if self.lost.get(at).is_some_and(|known| known.is_same(lost)) {
            self.lost.remove(at);
        }
        let is_free = self.companions.get(at).is_none();
        if is_free { self.affected_by_removal(at, None).into() } else { Effect::default() }
    }

    /// Forgets lost companions, of one source or of all, that are not looked for. One that another replica has released
    /// looks lost, too: it must not be taken for a companion when its source is created again. Returns the sources that
    /// may have the names now.
    fn forget_lost_not_looked_for(&mut self, source: Option<&ObjectKey>) -> Vec<ObjectKey> {
        let of_source = source.into_iter().flat_map(|source| self.lost.of(source));
        let of_all = source.is_none().then(|| self.lost.iter()).into_iter().flatten();
        let forgotten = of_source.chain(of_all).filter(|(at, lost)| self.task(at, lost) == LostTask::Forget);
        let forgotten: Vec<ObjectKey> = forgotten.map(|(at, _)| at.clone()).collect();
        forgotten.iter().for_each(|at| self.lost.remove(at));
        forgotten.iter().flat_map(|at| self.affected_by_removal(at, None)).collect()
    }

    /// A standby forgets lost companions that nobody wants, some time after the leader has looked for them.
    pub fn forget_unwanted_lost(&mut self) {
        let mut lost = std::mem::take(&mut self.lost);
        lost.retain_young(|at, lost| self.task(at, lost) == LostTask::None);
        self.lost = lost;
    }

    // --- companions

    /// Finds the source that an object belongs to. A known UID outweighs the annotation, which anybody can write, but
    /// not that all marks are gone from a companion that was to stay: another replica may have released it.
    pub fn identify(&self, observed: ObservedCompanion) -> (ObjectKey, Companion) {
        let ObservedCompanion { key, mut companion, owner } = observed;
        let known = self.companions.get(&key).filter(|known| known.uid == companion.uid);
        let lost = self.lost.get(&key).filter(|lost| lost.has_uid_of(&companion));
        let lost = lost.map(|lost| (&lost.source, lost.keep));
        let deleted = self.progress.tombstone(&key, &companion.uid);
        let deleted = deleted.and_then(|deleted| Some((deleted.source.as_ref()?, deleted.keep)));
        let has_marks = companion.has_marks();
        // Nobody shares it yet.
        let state = Arc::make_mut(&mut companion.state);
        let known = known.filter(|known| has_marks || !known.state.keep);
        let known = known.and_then(|known| Some((known.state.source.as_ref()?, known.state.keep)));
        if let Some((source, keep)) = known.or(lost).or(deleted) {
            // Somebody removed what says so: that must not turn a release into a delete.
            state.keep |= keep && state.source.is_none();
            state.source = Some(source.clone());
        }
        let source = state.source.as_ref().filter(|source| source.namespace == key.namespace);
        let owner = owner.filter(|(_, name)| source.is_some_and(|source| **name == *source.name));
        state.source_owner = owner.map(|(position, _)| position);
        (key, companion)
    }

    /// A watch or a list shows a companion.
    pub fn apply_companion(&mut self, observed: ObservedCompanion) -> Effect {
        let (key, mut companion) = self.identify(observed);
        let kind = key.kind;
        companion.epoch = self.progress.epoch(WatchId::Companions(kind));
        self.progress.saw_version(kind, companion.version());
        if self.progress.tombstone(&key, &companion.uid).is_some() {
            if !companion.state.terminating {
                return Effect::default();
            }
            // This state is current: a finalizer delays the deletion.
            self.progress.remove_tombstone(&key);
        }
        self.put_companion(key, companion)
    }

    /// One of our own writes returned a companion. The watch may be behind that write or ahead of it.
    pub(crate) fn companion_written(&mut self, observed: ObservedCompanion) -> Effect {
        let (key, mut companion) = self.identify(observed);
        let kind = key.kind;
        companion.written_epoch = self.progress.epoch(WatchId::Companions(kind));
        let deleted = self.progress.tombstone(&key, &companion.uid).is_some()
            || (self.companions.get(&key).is_none() && self.progress.has_passed(kind, companion.version()));
        if !deleted && !companion.state.labelled {
            // No watch of ours would ever show the deletion of an object without our label.
            self.lose(&key, &companion, SeenBy::Watch);
        }
        if deleted || !companion.state.labelled {
            return Vec::from_iter(companion.state.source.clone()).into();
        }
        self.put_companion(key, companion)
    }

    fn put_companion(&mut self, key: ObjectKey, mut companion: Companion) -> Effect {
        let epoch = self.progress.epoch(WatchId::Companions(key.kind));
        if let Some(known) = self.companions.get(&key) {
            let trusted = known.epoch == epoch || known.written_epoch == epoch;
            let same = known.resource_version == companion.resource_version
                && (&known.uid, known.state.content, known.state.marks)
                    == (&companion.uid, companion.state.content, companion.state.marks);
            let seen = known.epoch.max(companion.epoch);
            let written = known.written_epoch.max(companion.written_epoch);
            // An older state never replaces a newer one, and the watch event of our own write changes nothing.
            if same || (trusted && companion.version() < known.version()) {
                self.companions.set_epochs(&key, seen, written);
                return Effect::default();
            }
            companion.epoch = seen;
            companion.written_epoch = written;
        }
        self.lost.remove(&key);
        let requeue = self.affected(&key, self.companions.get(&key), &companion);
        let key = self.intern_key(key);
        companion.state = self.intern_state(companion.state);
        self.companions.put(key, companion);
        requeue.into()
    }

    fn intern_key(&mut self, ObjectKey { kind, namespace, name }: ObjectKey) -> ObjectKey {
        ObjectKey { kind, namespace: self.names.intern(namespace), name: self.names.intern(name) }
    }

    fn intern_state(&mut self, mut state: Arc<CompanionState>) -> Arc<CompanionState> {
        if let Some(source) = state.source.clone() {
            let source = self.intern_key(source);
            Arc::make_mut(&mut state).source = Some(source);
        }
        self.companion_states.intern(state)
    }

    pub fn delete_companion(&mut self, kind: Kind, meta: &Meta) -> Effect {
        let key = ObjectKey::of(kind, meta);
        self.progress.saw_version(kind, meta.version());
        if self.progress.tombstone(&key, &meta.uid.as_str().into()).is_some() {
            self.progress.remove_tombstone(&key);
            return Effect::default();
        }
        match self.companions.get(&key) {
            Some(known) if known.uid == *meta.uid && known.version() <= meta.version() => {
                self.forget_companion(&key, SeenBy::Watch)
            }
            _ => Effect::default(),
        }
    }

    /// A write of ours found that the companion does not exist (404).
    pub(crate) fn companion_vanished(&mut self, key: &ObjectKey, uid: &Uid) -> Effect {
        match self.companions.get(key) {
            Some(known) if known.uid == *uid => self.forget_companion(key, SeenBy::Watch),
            _ => Effect::default(),
        }
    }

    /// We took our marks off the companion. The watch shows that as a deletion, because it selects by our label.
    pub(crate) fn companion_released(&mut self, key: &ObjectKey, uid: &Uid) -> Effect {
        self.companion_removed(key, uid, false)
    }

    /// We deleted the companion ourselves.
    pub(crate) fn companion_deleted(&mut self, key: &ObjectKey, uid: &Uid) -> Effect {
        self.companion_removed(key, uid, true)
    }

    fn companion_removed(&mut self, key: &ObjectKey, uid: &Uid, deleted: bool) -> Effect {
        if let Some(known) = self.companions.get(key).filter(|known| known.uid == *uid) {
            let source = known.state.source.clone().filter(|_| deleted);
            let tombstone = Tombstone { uid: uid.clone(), source, keep: known.state.keep };
            self.progress.add_tombstone(key, tombstone);
        }
        let effect = self.companion_vanished(key, uid);
        self.lost.remove(key);
        effect
    }

    fn forget_companion(&mut self, key: &ObjectKey, seen_by: SeenBy) -> Effect {
        let Some(companion) = self.companions.remove(key) else { return Effect::default() };
        self.lose(key, &companion, seen_by);
        self.affected_by_removal(key, companion.state.source.as_ref()).into()
    }

    /// Remembers a companion that no watch shows any more. The namespace controller deletes companions for good. Before
    /// all namespaces are listed, a namespace that is not known may exist; those that do not are forgotten with the
    /// list.
    fn lose(&mut self, key: &ObjectKey, companion: &Companion, seen_by: SeenBy) {
        let Some(source) = &companion.state.source else { return };
        if !self.namespaces_listed || !self.namespaces.is_gone_or_terminating(&key.namespace) {
            let lost = LostCompanion::of(source, companion, seen_by);
            if self.task(key, &lost) != LostTask::Forget {
                self.lost.insert(key.clone(), lost);
            }
        }
    }
}

impl From<Vec<ObjectKey>> for Effect {
    fn from(requeue: Vec<ObjectKey>) -> Self {
        Self { requeue, events: Vec::new() }
    }
}

impl Effect {
    fn add(&mut self, other: Self) {
        self.requeue.extend(other.requeue);
        self.events.extend(other.events);
    }
}
