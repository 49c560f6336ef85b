//! Companions that vanished without our doing: deleted, or without our label. A watch shows both alike.

use std::collections::{BTreeSet, HashMap};

use super::{companion::Companion, packed::Uid};
use crate::{
    object::ObjectKey,
    policy::{content::Digest, list::MAX_ITEMS},
};

/// The maximum of places without a known UID that are kept for one source: those that it can list by name, and its own
/// namespace. Each is kept until it has been read, and a pattern matches any number of namespaces; a source that is
/// renamed while it is paused wants other places each time.
pub const MAX_PLACES: usize = MAX_ITEMS + 1;

/// What is known of a companion that no watch shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LostCompanion {
    pub(super) source: ObjectKey,
    /// Identifies it when it is found without its marks. None if no companion was seen here, but the source wanted one.
    pub(super) uid: Option<Uid>,
    /// The UID of its source, as a digest.
    pub(super) source_uid: Option<Digest>,
    /// Its marks said that it stays when its source is gone.
    pub(super) keep: bool,
    /// Another replica may have released it: it was to stay, or a list shows that it is gone, and nobody here has seen
    /// what happened to it before.
    maybe_released: bool,
    /// A live read has found it. Only then does it count as a delete.
    pub(super) found: bool,
    /// It was there when [`LostCompanions::retain_young`] was called last.
    pub(super) aged: bool,
}

/// What there is to do about a lost companion.
#[derive(PartialEq, Eq)]
pub enum LostTask {
    /// Its source wants one there, or nothing may be done now.
    None,
    /// It was to stay when its source does not want it any more.
    Forget,
    /// It has to be looked for, and deleted.
    Find,
}

/// How it became known that a companion is gone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SeenBy {
    /// The watch has shown every state of it.
    Watch,
    /// A list shows that it is gone by now.
    List,
}

/// Lost companions by name, one for each, and by source.
#[derive(Debug, Default)]
pub struct LostCompanions {
    by_name: HashMap<ObjectKey, LostCompanion>,
    by_source: HashMap<ObjectKey, BTreeSet<ObjectKey>>,
    /// Sources with companions in other namespaces that a live read has found, and these.
    found_cross_namespace: BTreeSet<(ObjectKey, ObjectKey)>,
}

impl LostCompanion {
    /// A companion that was known.
    pub fn of(source: &ObjectKey, companion: &Companion, seen_by: SeenBy) -> Self {
        let keep = companion.state.keep;
        Self {
            uid: Some(companion.uid.clone()),
            keep,
            maybe_released: keep || seen_by == SeenBy::List,
            ..Self::unseen(source.clone(), companion.state.source_uid)
        }
    }

    /// A place at which a source with this UID wanted a companion, and none was seen.
    pub const fn unseen(source: ObjectKey, source_uid: Option<Digest>) -> Self {
        Self { source, uid: None, source_uid, keep: false, maybe_released: false, found: false, aged: false }
    }

    pub const fn is_found(&self) -> bool {
        self.found
    }

    /// Whether it is about the same companion of the same source, whatever has been learned of it since.
    pub(super) fn is_same(&self, other: &Self) -> bool {
        (&self.source, &self.uid, self.source_uid) == (&other.source, &other.uid, other.source_uid)
    }

    /// Whether an object is the lost companion by its UID. One without any mark may have been released: then it is not
    /// ours, although we know its UID.
    pub fn has_uid_of(&self, object: &Companion) -> bool {
        self.uid.as_ref() == Some(&object.uid) && (object.has_marks() || !self.maybe_released)
    }

    /// Whether an object is the lost companion: by its UID, or because it names the UID of the source and we have an
    /// entry in its managedFields. One annotation alone proves nothing, because a restored or exported copy has it,
    /// too. An object that names no source may have become a source.
    pub fn is(&self, object: &Companion) -> bool {
        let marked = self.source_uid.is_some()
            && object.state.source_uid == self.source_uid
            && object.state.written_by_us
            && object.state.source.as_ref().is_none_or(|named| *named == self.source);
        (self.has_uid_of(object) || marked)
            && !object.state.terminating
            && !(object.state.is_source && object.state.source.is_none())
    }
}

impl LostCompanions {
    pub fn get(&self, at: &ObjectKey) -> Option<&LostCompanion> {
        self.by_name.get(at)
    }

    pub fn of<'a>(&'a self, source: &ObjectKey) -> impl Iterator<Item = (&'a ObjectKey, &'a LostCompanion)> {
        let names = self.by_source.get(source).into_iter().flatten();
        names.filter_map(|at| self.by_name.get_key_value(at))
    }

    pub fn iter(&self) -> impl Iterator<Item = (&ObjectKey, &LostCompanion)> {
        self.by_name.iter()
    }

    pub fn sources(&self) -> impl Iterator<Item = &ObjectKey> {
        self.by_source.keys()
    }

    /// The sources that have lost a companion in a namespace.
    pub fn sources_with_places_in(&self, namespace: &str) -> impl Iterator<Item = &ObjectKey> {
        let in_here = move |(_, places): &(&ObjectKey, &BTreeSet<ObjectKey>)| {
            places.iter().any(|at| *at.namespace == *namespace)
        };
        self.by_source.iter().filter(in_here).map(|(source, _)| source)
    }

    pub fn insert(&mut self, at: ObjectKey, lost: LostCompanion) {
        self.remove(&at);
        self.by_source.entry(lost.source.clone()).or_default().insert(at.clone());
        self.by_name.insert(at, lost);
    }

    /// How many more places without a known UID may be kept for a source.
    pub fn places_left(&self, source: &ObjectKey) -> usize {
        let places = self.of(source).filter(|(_, lost)| lost.uid.is_none());
        MAX_PLACES.saturating_sub(places.count())
    }

    /// The source of each companion in another namespace that a live read has found, in order.
    pub fn found_cross_namespace(&self) -> impl Iterator<Item = &ObjectKey> {
        self.found_cross_namespace.iter().map(|(source, _)| source)
    }

    pub fn remove(&mut self, at: &ObjectKey) {
        let Some(lost) = self.by_name.remove(at) else { return };
        if let Some(places) = self.by_source.get_mut(&lost.source) {
            places.remove(at);
            if places.is_empty() {
                self.by_source.remove(&lost.source);
            }
        }
        self.found_cross_namespace.remove(&(lost.source, at.clone()));
    }

    /// Marks a lost companion as found, unless another one has taken its place since it was read.
    pub fn set_found(&mut self, at: &ObjectKey, read: &LostCompanion) {
        if let Some(lost) = self.by_name.get_mut(at).filter(|lost| lost.is_same(read) && !lost.found) {
            lost.found = true;
            if lost.source.namespace != at.namespace {
                self.found_cross_namespace.insert((lost.source.clone(), at.clone()));
            }
        }
    }

    pub fn retain(&mut self, keep: impl Fn(&ObjectKey, &LostCompanion) -> bool) {
        let gone = self.by_name.iter().filter(|(at, lost)| !keep(at, lost)).map(|(at, _)| at.clone());
        gone.collect::<Vec<_>>().iter().for_each(|at| self.remove(at));
    }

    /// Forgets those that are old, unless they are to be kept, and makes the others old.
    pub fn retain_young(&mut self, keep: impl Fn(&ObjectKey, &LostCompanion) -> bool) {
        self.retain(|at, lost| !lost.aged || keep(at, lost));
        self.by_name.values_mut().for_each(|lost| lost.aged = true);
    }
}
