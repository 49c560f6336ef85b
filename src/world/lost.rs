//! PURE. Companions that vanished without our doing: deleted, or without our label. A watch shows both alike.

use std::collections::{BTreeSet, HashMap};

use super::{companion::Companion, index::remove};
use crate::{content::Digest, object::ObjectKey};

/// What is known of a companion that no watch shows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LostCompanion {
    pub(super) source: ObjectKey,
    /// Identifies it when it is found without its marks. None if no companion was seen here, but the source wanted one.
    pub(super) uid: Option<String>,
    /// The UID of its source, as a digest.
    pub(super) source_uid: Option<Digest>,
    /// A live read has found it. Only then does it count as a delete.
    pub(super) found: bool,
    /// It was there when [`LostCompanions::retain_young`] was called last.
    pub(super) aged: bool,
}

/// Lost companions by name, one for each, and by source.
#[derive(Debug, Default)]
pub struct LostCompanions {
    by_name: HashMap<ObjectKey, LostCompanion>,
    by_source: HashMap<ObjectKey, BTreeSet<ObjectKey>>,
}

impl LostCompanion {
    pub const fn new(source: ObjectKey, uid: Option<String>, source_uid: Option<Digest>) -> Self {
        Self { source, uid, source_uid, found: false, aged: false }
    }

    #[must_use]
    pub const fn is_found(&self) -> bool {
        self.found
    }

    /// Whether an object is the lost companion: by its UID, or because it names the UID of the source and we have an
    /// entry in its managedFields. One annotation alone proves nothing, because a restored or exported copy has it,
    /// too. An object that names no source may have become a source.
    #[must_use]
    pub fn is(&self, object: &Companion) -> bool {
        let known = self.uid.as_ref() == Some(&object.uid);
        let marked = self.source_uid.is_some()
            && object.source_uid == self.source_uid
            && object.written_by_us
            && object.source.as_ref().is_none_or(|named| *named == self.source);
        (known || marked) && !object.terminating && !(object.is_source && object.source.is_none())
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

    pub fn sources(&self) -> impl Iterator<Item = &ObjectKey> {
        self.by_source.keys()
    }

    pub fn insert(&mut self, at: ObjectKey, lost: LostCompanion) {
        self.remove(&at);
        self.by_source.entry(lost.source.clone()).or_default().insert(at.clone());
        self.by_name.insert(at, lost);
    }

    /// Remembers a place that a source wanted, unless something is known about it already.
    pub fn insert_place(&mut self, at: ObjectKey, lost: LostCompanion) {
        if !self.by_name.contains_key(&at) {
            self.insert(at, lost);
        }
    }

    pub fn remove(&mut self, at: &ObjectKey) {
        if let Some(lost) = self.by_name.remove(at) {
            remove(&mut self.by_source, &lost.source, at);
        }
    }

    pub fn set_found(&mut self, at: &ObjectKey) {
        if let Some(lost) = self.by_name.get_mut(at) {
            lost.found = true;
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
