//! PURE. What is known, and which sources to look at again when it changes.

mod namespaces;

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    sync::Arc,
};

use crate::{
    content::{Content, Digest, Hasher, Payload},
    keys::Keys,
    marks::{self, Marks, RemovableKeys},
    object::{Kind, Meta, Object, ObjectKey, OwnerReference},
    policy::{Fault, Policy, pattern::Patterns},
};

pub use namespaces::{Admission, Defaults, Namespace};

/// One of the watches that feed the world.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Stream {
    Namespaces,
    Companions(Kind),
    Sources(Kind),
}

/// The hard limits that the mirror holds, whatever annotations say.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Lockstep's own namespace: neither sources nor targets.
    pub own_namespace: String,
    /// Targets only where the namespace's `accept-from` allows. `kube-*` always belongs here.
    pub excluded: Patterns,
}

/// A source, reduced to what is needed to plan and to write its companions.
#[derive(Debug)]
pub struct Source {
    pub key: ObjectKey,
    pub uid: String,
    pub resource_version: String,
    pub terminating: bool,
    /// What it asks for, or why it gets nothing.
    pub wish: Result<Wish, Fault>,
    /// Changes with everything that can change a companion.
    pub digest: Digest,
    version: u64,
    epoch: u32,
}

/// What companions of a source must be.
#[derive(Debug)]
pub struct Wish {
    pub policy: Policy,
    pub payload: Payload,
    pub content: Digest,
    pub marks: Marks,
    pub marks_digest: Digest,
    /// The names of the keys, for logs.
    pub key_names: String,
}

/// What is kept of a companion: who it is and digests of what it holds, never the content.
#[derive(Debug, Clone)]
pub struct Companion {
    pub uid: String,
    pub resource_version: String,
    /// Whose it is: because we know its UID, or by its annotation.
    pub source: Option<ObjectKey>,
    /// The `source-checksum` it shows is that of its content: it was not edited since it was written.
    pub intact: bool,
    pub content: Digest,
    pub marks: Digest,
    pub owners: Digest,
    pub controller_uid: Option<String>,
    /// The garbage collector will take it when its source goes.
    pub owned_by_source: bool,
    pub extras: Option<Box<RemovableKeys>>,
    pub type_: Option<String>,
    pub immutable: bool,
    pub finalizers: bool,
    pub terminating: bool,
    pub has_labels: bool,
    pub has_annotations: bool,
    /// Bears our label.
    pub labelled: bool,
    /// We have an entry in its managedFields.
    pub written_by_us: bool,
    /// It is itself a source.
    pub is_source: bool,
    /// Who else wrote it last, by field manager.
    pub other_manager: Option<String>,
    version: u64,
    /// The list, or the watch that followed it, that showed it last; zero when none has.
    epoch: u32,
    /// The list during or after which we wrote it; zero when we did not.
    written: u32,
}

/// What stands where a companion is or should be, by what it shows. Whose it is, the world knows better.
#[derive(Debug, Clone)]
pub struct Found {
    key: ObjectKey,
    companion: Companion,
    /// The name of the owner that has the UID of the source.
    owner: Option<String>,
}

/// What an event about a source meant.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum News {
    Seen,
    Changed,
    Gone,
}

/// What a change of the world calls for.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Effect {
    /// The sources to reconcile again.
    pub requeue: Vec<ObjectKey>,
    pub news: Vec<(ObjectKey, News)>,
}

pub struct World {
    keys: Arc<Keys>,
    limits: Limits,
    sources: HashMap<ObjectKey, Arc<Source>>,
    companions: HashMap<ObjectKey, Companion>,
    /// Companions by the source they belong to, whether that exists or not.
    by_source: HashMap<ObjectKey, BTreeSet<ObjectKey>>,
    /// Sources by the companion they want, so that a companion's fate reaches everyone who waits for its name.
    by_wish: HashMap<WishKey, BTreeSet<ObjectKey>>,
    namespaces: BTreeMap<String, (Namespace, u32)>,
    /// All namespaces have been listed once.
    namespaces_listed: bool,
    /// Companions that vanished while their source still stood, with it: making them again is a heal.
    lost: HashMap<ObjectKey, Lost>,
    epochs: HashMap<Stream, u32>,
    /// Companions that we deleted, by UID, until the watch has shown their end: what it still tells is the past.
    graves: HashMap<ObjectKey, String>,
    /// How far the watch of companions has come. An object that one of our writes returns, but that is older than
    /// this and unknown, has come and gone already.
    horizon: HashMap<Kind, u64>,
}

/// A companion that vanished, or lost its label: to a watch, that is the same.
struct Lost {
    source: ObjectKey,
    /// Should it turn up without its marks, this tells that it is ours.
    uid: String,
}

/// A companion's name, in one namespace if only that can be meant.
type WishKey = (Kind, Option<Arc<str>>, String);

impl World {
    #[must_use]
    pub fn new(keys: Arc<Keys>, limits: Limits) -> Self {
        Self {
            keys,
            limits,
            sources: HashMap::new(),
            companions: HashMap::new(),
            by_source: HashMap::new(),
            by_wish: HashMap::new(),
            namespaces: BTreeMap::new(),
            namespaces_listed: false,
            lost: HashMap::new(),
            epochs: HashMap::new(),
            graves: HashMap::new(),
            horizon: HashMap::new(),
        }
    }

    // --- questions

    #[must_use]
    pub fn source(&self, key: &ObjectKey) -> Option<&Arc<Source>> {
        self.sources.get(key)
    }

    #[must_use]
    pub fn companion(&self, key: &ObjectKey) -> Option<&Companion> {
        self.companions.get(key)
    }

    /// The companions that belong to a source, whether it exists or not.
    pub fn companions_of(&self, source: &ObjectKey) -> impl Iterator<Item = (&ObjectKey, &Companion)> {
        self.by_source
            .get(source)
            .into_iter()
            .flatten()
            .filter_map(|key| Some((key, self.companions.get(key)?)))
    }

    /// Every source that exists or has companions: what a resync looks at.
    #[must_use]
    pub fn all_sources(&self) -> Vec<ObjectKey> {
        let gone = self.by_source.keys().filter(|key| !self.sources.contains_key(*key));
        self.sources.keys().chain(gone).cloned().collect()
    }

    #[must_use]
    pub fn source_count(&self) -> usize {
        self.sources.len()
    }

    /// How many sources have companions, whether they still exist or not.
    #[must_use]
    pub fn mirrored_count(&self) -> usize {
        self.by_source.len()
    }

    #[must_use]
    pub fn companion_count(&self) -> usize {
        self.companions.len()
    }

    /// The source that has, or comes first in line for, a place; another than `asking`. One that goes has no claim.
    #[must_use]
    pub fn claimant(&self, at: &ObjectKey, asking: Option<&ObjectKey>) -> Option<ObjectKey> {
        let stands = |source: &&ObjectKey| {
            self.sources.get(*source).is_some_and(|source| !source.terminating)
                && self.admission(&source.namespace, &at.namespace) == Admission::Admitted
        };
        let holder = self.companions.get(at).and_then(|companion| companion.source.as_ref());
        match holder.filter(stands) {
            Some(holder) => (Some(holder) != asking).then(|| holder.clone()),
            None => {
                self.concerned(at, None).into_iter().find(|source| Some(source) != asking && stands(&source))
            }
        }
    }

    #[must_use]
    pub fn was_lost(&self, companion: &ObjectKey) -> bool {
        self.lost.contains_key(companion)
    }

    /// Whether a source is the first, by name, of those that want a place: it may take what belongs to none of them.
    #[must_use]
    pub fn is_first_in_line(&self, source: &ObjectKey, at: &ObjectKey) -> bool {
        self.concerned(at, None).first() == Some(source)
    }

    // --- relists

    /// A fresh list begins: what it does not mention will be swept when it ends.
    pub fn begin(&mut self, stream: Stream) {
        *self.epochs.entry(stream).or_default() += 1;
        if let Stream::Companions(kind) = stream {
            self.horizon.remove(&kind);
        }
    }

    /// A list as of `version` has ended. What it did not bring is gone, except what we wrote after that version.
    pub fn end(&mut self, stream: Stream, version: u64) -> Effect {
        let epoch = self.epoch(stream);
        let mut effect = Effect::default();
        match stream {
            Stream::Sources(kind) => {
                let stale = |(key, source): (&ObjectKey, &Arc<Source>)| {
                    (key.kind == kind && source.epoch != epoch).then(|| key.clone())
                };
                for key in self.sources.iter().filter_map(stale).collect::<Vec<_>>() {
                    effect.add(self.forget_source(&key));
                }
            }
            Stream::Companions(kind) => {
                self.horizon.insert(kind, version);
                self.graves.retain(|key, _| key.kind != kind);
                let stale = |(key, companion): (&ObjectKey, &Companion)| {
                    let newer = companion.written == epoch && companion.version > version;
                    (key.kind == kind && companion.epoch != epoch && !newer).then(|| key.clone())
                };
                for key in self.companions.iter().filter_map(stale).collect::<Vec<_>>() {
                    effect.add(self.forget_companion(&key));
                }
            }
            Stream::Namespaces => {
                self.namespaces.retain(|_, (_, seen)| *seen == epoch);
                self.lost.retain(|companion, _| self.namespaces.contains_key(&*companion.namespace));
                self.namespaces_listed = true;
            }
        }
        effect
    }

    fn epoch(&self, stream: Stream) -> u32 {
        self.epochs.get(&stream).copied().unwrap_or_default()
    }

    // --- sources

    /// A watch or a list shows a source.
    pub fn apply_source(&mut self, source: Source) -> Effect {
        let key = source.key.clone();
        let epoch = self.epoch(Stream::Sources(key.kind));
        let source = Source { epoch, ..source };
        let known = self.sources.get(&key);
        // An older state never undoes a newer one. A fresh list does, for what was there before it began: after an
        // etcd restore, versions run backwards.
        if known.is_some_and(|known| known.epoch == epoch && source.version < known.version) {
            return Effect::default();
        }
        let news = match known {
            None => News::Seen,
            Some(known) if known.digest == source.digest && known.terminating == source.terminating => {
                // Only the version moved: remember it for the live read, but there is nothing to do.
                self.sources.insert(key, Arc::new(source));
                return Effect::default();
            }
            Some(_) => News::Changed,
        };
        self.unindex_wish(&key);
        if let Some(wish) = wish_key(&source) {
            self.by_wish.entry(wish).or_default().insert(key.clone());
        }
        self.sources.insert(key.clone(), Arc::new(source));
        let mut lost = std::mem::take(&mut self.lost);
        lost.retain(|at, lost| lost.source != key || self.wants_at(&key, at));
        self.lost = lost;
        Effect { requeue: vec![key.clone()], news: vec![(key, news)] }
    }

    pub fn delete_source(&mut self, kind: Kind, meta: &Meta) -> Effect {
        let key = ObjectKey::of(kind, meta);
        match self.sources.get(&key) {
            // The end of an earlier object of this name says nothing about this one.
            Some(known) if known.uid == meta.uid => self.forget_source(&key),
            _ => Effect::default(),
        }
    }

    fn forget_source(&mut self, key: &ObjectKey) -> Effect {
        self.unindex_wish(key);
        self.sources.remove(key);
        self.lost.retain(|_, lost| lost.source != *key);
        Effect { requeue: vec![key.clone()], news: vec![(key.clone(), News::Gone)] }
    }

    fn unindex_wish(&mut self, source: &ObjectKey) {
        if let Some(wish) = self.sources.get(source).and_then(|source| wish_key(source))
            && let Some(wanting) = self.by_wish.get_mut(&wish)
        {
            wanting.remove(source);
            if wanting.is_empty() {
                self.by_wish.remove(&wish);
            }
        }
    }

    // --- companions

    /// Says whose an object is. A UID that we know as our own work outweighs what somebody wrote into the annotation.
    #[must_use]
    pub fn identify(&self, found: Found) -> (ObjectKey, Companion) {
        let Found { key, mut companion, owner } = found;
        let known = self.companions.get(&key).filter(|known| known.uid == companion.uid);
        let lost = self.lost.get(&key).filter(|lost| lost.uid == companion.uid).map(|lost| &lost.source);
        if let Some(source) = known.and_then(|known| known.source.as_ref()).or(lost) {
            companion.source = Some(source.clone());
        } else if let Some(named) = &mut companion.source
            && let Some((same, _)) = self.by_source.get_key_value(named)
        {
            *named = same.clone();
        }
        companion.owned_by_source = companion.source.as_ref().is_some_and(|source| {
            source.namespace == key.namespace && owner.is_some_and(|owner| *owner == *source.name)
        });
        (key, companion)
    }

    /// A watch or a list shows a companion.
    pub fn apply_companion(&mut self, found: Found) -> Effect {
        let (key, mut companion) = self.identify(found);
        let kind = key.kind;
        companion.epoch = self.epoch(Stream::Companions(kind));
        self.advance(kind, companion.version);
        if self.graves.get(&key) == Some(&companion.uid) {
            if !companion.terminating {
                return Effect::default();
            }
            // This is not the past: a finalizer keeps it.
            self.graves.remove(&key);
        }
        self.put_companion(key, companion)
    }

    /// One of our own writes returned a companion. The watch may be behind it, or already further.
    pub fn companion_written(&mut self, found: Found) -> Effect {
        let (key, mut companion) = self.identify(found);
        let kind = key.kind;
        companion.written = self.epoch(Stream::Companions(kind));
        let horizon = self.horizon.get(&kind).copied().unwrap_or_default();
        let gone = self.graves.get(&key) == Some(&companion.uid)
            || (!self.companions.contains_key(&key) && companion.version <= horizon);
        // No watch of ours would ever tell the end of one without our label.
        if gone || !companion.labelled {
            return Effect { requeue: self.concerned(&key, companion.source.as_ref()), news: Vec::new() };
        }
        self.put_companion(key, companion)
    }

    fn advance(&mut self, kind: Kind, version: u64) {
        let horizon = self.horizon.entry(kind).or_default();
        *horizon = version.max(*horizon);
    }

    fn put_companion(&mut self, key: ObjectKey, mut companion: Companion) -> Effect {
        let epoch = self.epoch(Stream::Companions(key.kind));
        if let Some(known) = self.companions.get_mut(&key) {
            let trusted = known.epoch == epoch || known.written == epoch;
            let same = known.resource_version == companion.resource_version
                && (&known.uid, known.content, known.marks)
                    == (&companion.uid, companion.content, companion.marks);
            // An older state never undoes a newer one, and an echo is no news.
            if same || (trusted && companion.version < known.version) {
                known.epoch = known.epoch.max(companion.epoch);
                known.written = known.written.max(companion.written);
                return Effect::default();
            }
            companion.epoch = companion.epoch.max(known.epoch);
            companion.written = companion.written.max(known.written);
        }
        self.lost.remove(&key);
        let requeue = self.concerned(&key, companion.source.as_ref());
        if let Some(known) = self.companions.get(&key)
            && known.source != companion.source
        {
            self.unindex_companion(&key);
        }
        if let Some(source) = &companion.source {
            self.by_source.entry(source.clone()).or_default().insert(key.clone());
        }
        self.companions.insert(key, companion);
        Effect { requeue, news: Vec::new() }
    }

    pub fn delete_companion(&mut self, kind: Kind, meta: &Meta) -> Effect {
        let key = ObjectKey::of(kind, meta);
        self.advance(kind, meta.version());
        if self.graves.get(&key) == Some(&meta.uid) {
            self.graves.remove(&key);
            return Effect::default();
        }
        match self.companions.get(&key) {
            Some(known) if known.uid == meta.uid && known.version <= meta.version() => {
                self.forget_companion(&key)
            }
            _ => Effect::default(),
        }
    }

    /// A write of ours found it gone (404).
    pub fn companion_vanished(&mut self, key: &ObjectKey, uid: &str) -> Effect {
        match self.companions.get(key) {
            Some(known) if known.uid == uid => self.forget_companion(key),
            _ => Effect::default(),
        }
    }

    /// We deleted it ourselves.
    pub fn companion_deleted(&mut self, key: &ObjectKey, uid: &str) -> Effect {
        if self.companions.get(key).is_some_and(|known| known.uid == uid) {
            self.graves.insert(key.clone(), uid.to_owned());
        }
        let effect = self.companion_vanished(key, uid);
        self.lost.remove(key);
        effect
    }

    fn forget_companion(&mut self, key: &ObjectKey) -> Effect {
        self.unindex_companion(key);
        let (uid, source) =
            self.companions.remove(key).map(|gone| (gone.uid, gone.source)).unwrap_or_default();
        // What its source does not want there any more was not lost: another replica removed it.
        if let Some(source) = source.as_ref().filter(|source| self.wants_at(source, key))
            && !self.is_going(&key.namespace)
        {
            self.lost.insert(key.clone(), Lost { source: source.clone(), uid });
        }
        Effect { requeue: self.concerned(key, source.as_ref()), news: Vec::new() }
    }

    fn unindex_companion(&mut self, key: &ObjectKey) {
        if let Some(source) = self.companions.get(key).and_then(|companion| companion.source.clone())
            && let Some(companions) = self.by_source.get_mut(&source)
        {
            companions.remove(key);
            if companions.is_empty() {
                self.by_source.remove(&source);
            }
        }
    }

    /// The source a companion belongs to, and every other that wants its place.
    fn concerned(&self, companion: &ObjectKey, owner: Option<&ObjectKey>) -> Vec<ObjectKey> {
        let name = companion.name.to_string();
        let here = (companion.kind, Some(companion.namespace.clone()), name.clone());
        let anywhere = (companion.kind, None, name);
        let wanting = [here, anywhere].into_iter().filter_map(|key| self.by_wish.get(&key)).flatten();
        let mut concerned: BTreeSet<&ObjectKey> =
            wanting.filter(|source| self.wants(source, &companion.namespace)).collect();
        concerned.extend(owner);
        concerned.into_iter().cloned().collect()
    }

    /// Whether a source wants its companion at just this place.
    fn wants_at(&self, source: &ObjectKey, at: &ObjectKey) -> bool {
        let wish = self.sources.get(source).and_then(|source| source.wish.as_ref().ok());
        wish.is_some_and(|wish| *wish.policy.companion == *at.name) && self.wants(source, &at.namespace)
    }

    /// Whether a source wants a companion in a namespace.
    #[must_use]
    pub fn wants(&self, source: &ObjectKey, namespace: &str) -> bool {
        let empty = BTreeMap::new();
        let labels = self.namespaces.get(namespace).map_or(&empty, |(ns, _)| &ns.labels);
        self.sources
            .get(source)
            .and_then(|source| source.wish.as_ref().ok())
            .is_some_and(|wish| wish.policy.targets.wants(&source.namespace, namespace, labels))
    }
}

// --- objects as they come; read before the world is taken, for others wait for it meanwhile

impl Source {
    #[must_use]
    pub fn read(keys: &Keys, limits: &Limits, kind: Kind, object: Object) -> Self {
        let key = ObjectKey::of(kind, &object.metadata);
        let policy = Policy::of(keys, &limits.own_namespace, &key, &object);
        let (meta, content) = Content::split(object);
        let wish = policy.map(|policy| Wish::new(keys, &key, &meta, policy, content));
        let mut hasher = Hasher::new();
        hasher.text("uid", &meta.uid);
        match &wish {
            Ok(wish) => {
                hasher.digest("content", &wish.content);
                hasher.digest("marks", &wish.marks_digest);
                // The policy has no canonical form; its Debug form is one for as long as this process lives.
                hasher.text("policy", &format!("{:?}", wish.policy));
            }
            Err(fault) => hasher.text("fault", &fault.to_string()),
        }
        Self {
            key,
            terminating: meta.is_terminating(),
            wish,
            digest: hasher.finish(),
            version: meta.version(),
            epoch: 0,
            uid: meta.uid,
            resource_version: meta.resource_version,
        }
    }
}

impl Source {
    /// What it asks for, unless nothing may be written for it now: it is malformed, being deleted, or paused.
    #[must_use]
    pub fn active_policy(&self) -> Option<&Policy> {
        let policy = &self.wish.as_ref().ok()?.policy;
        (!self.terminating && !policy.paused).then_some(policy)
    }

    /// The names of the keys that are copied, for logs.
    #[must_use]
    pub fn key_names(&self) -> Option<&String> {
        self.wish.as_ref().ok().map(|wish| &wish.key_names)
    }

    /// How many bytes of content each companion gets.
    #[must_use]
    pub fn payload_len(&self) -> usize {
        self.wish.as_ref().map_or(0, |wish| wish.payload.len())
    }
}

impl Wish {
    fn new(keys: &Keys, key: &ObjectKey, meta: &Meta, policy: Policy, content: Content) -> Self {
        let content = content.select(&policy.keys);
        let digest = content.digest();
        let marks = Marks::expected(keys, key, meta, &policy, digest.checksum());
        Self {
            policy,
            payload: content.to_payload(),
            content: digest,
            marks_digest: marks.digest(),
            marks,
            key_names: content.key_names(),
        }
    }
}

impl Found {
    #[must_use]
    pub fn read(keys: &Keys, kind: Kind, object: Object) -> Self {
        let (meta, content) = Content::split(object);
        let digest = content.digest();
        let marks = Marks::found(keys, &meta);
        let extras = marks.removable_keys(keys);
        let uid = meta.annotations.get(&keys.source_uid);
        let ours = |owner: &&OwnerReference| owner.kind == kind.as_str() && Some(&owner.uid) == uid;
        let owner = meta.owner_references.iter().find(ours).map(|owner| owner.name.clone());
        let foreign = meta.managed_fields.iter().filter(|entry| entry.manager != keys.instance);
        let companion = Companion {
            source: meta.annotations.get(&keys.source).and_then(|text| ObjectKey::parse(kind, text)),
            intact: meta.annotations.get(&keys.source_checksum) == Some(&digest.checksum()),
            content: digest,
            marks: marks.digest(),
            owners: marks::owners_digest(&meta.owner_references),
            owned_by_source: false,
            controller_uid: meta.controller().map(|owner| owner.uid.clone()),
            extras: (!extras.is_empty()).then(|| Box::new(extras)),
            type_: content.type_,
            immutable: content.immutable,
            finalizers: !meta.finalizers.is_empty(),
            terminating: meta.is_terminating(),
            has_labels: !meta.labels.is_empty(),
            has_annotations: !meta.annotations.is_empty(),
            labelled: meta.labels.get(&keys.companion).is_some_and(|value| value == "true"),
            written_by_us: meta.managed_fields.iter().any(|entry| entry.manager == keys.instance),
            is_source: keys.is_source(&meta.labels),
            other_manager: foreign.max_by(|a, b| a.time.cmp(&b.time)).map(|entry| entry.manager.clone()),
            version: meta.version(),
            epoch: 0,
            written: 0,
            uid: meta.uid.clone(),
            resource_version: meta.resource_version.clone(),
        };
        Self { key: ObjectKey::of(kind, &meta), companion, owner }
    }
}

/// Where in [`World::by_wish`] a source stands.
fn wish_key(source: &Source) -> Option<WishKey> {
    let policy = &source.wish.as_ref().ok()?.policy;
    let home = policy.targets.only_own().then(|| source.key.namespace.clone());
    Some((source.key.kind, home, policy.companion.clone()))
}

impl Effect {
    fn add(&mut self, other: Self) {
        self.requeue.extend(other.requeue);
        self.news.extend(other.news);
    }
}

impl Stream {
    /// Its name in logs, metrics and `/readyz`.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Namespaces => "namespaces",
            Self::Companions(Kind::ConfigMap) => "companion configmaps",
            Self::Companions(Kind::Secret) => "companion secrets",
            Self::Sources(Kind::ConfigMap) => "source configmaps",
            Self::Sources(Kind::Secret) => "source secrets",
        }
    }
}

#[cfg(test)]
mod tests;
