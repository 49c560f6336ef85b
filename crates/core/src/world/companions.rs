//! The companions that the watches show, by name and by source.
//!
//! There may be a hundred thousand of them. Each is kept once, with its name, and takes a few bytes more in each index.

use std::{
    collections::HashMap,
    hash::{BuildHasher, RandomState},
};

use hashbrown::{HashTable, hash_table::Entry};
use slab::Slab;

use super::companion::Companion;
use crate::object::ObjectKey;

#[derive(Default)]
pub struct Companions {
    slots: Slab<(ObjectKey, Companion)>,
    by_name: HashTable<Slot>,
    /// Tenants choose the names, so nobody may know which of them collide.
    hasher: RandomState,
    by_source: HashMap<ObjectKey, OfSource>,
    /// How many are in other namespaces than their source, and how many sources have any there.
    cross_namespace: usize,
    cross_namespace_sources: usize,
}

/// A position in [`Companions::slots`]: half as large as the `usize` that the slab has.
type Slot = u32;

/// The companions of a source, whether or not it exists.
#[derive(Default)]
struct OfSource {
    /// In order of namespace and name. All have the kind of the source.
    slots: Vec<Slot>,
    /// How many of them are in other namespaces.
    cross_namespace: usize,
}

impl Companions {
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    pub fn iter(&self) -> impl Iterator<Item = (&ObjectKey, &Companion)> {
        self.slots.iter().map(|(_, (key, companion))| (key, companion))
    }

    pub fn get(&self, key: &ObjectKey) -> Option<&Companion> {
        self.find(key).map(|slot| &self.slots[slot as usize].1)
    }

    /// The lists that showed a companion last, and during which we wrote it last.
    pub fn set_epochs(&mut self, key: &ObjectKey, epoch: u32, written_epoch: u32) {
        if let Some(slot) = self.find(key) {
            let companion = &mut self.slots[slot as usize].1;
            companion.epoch = epoch;
            companion.written_epoch = written_epoch;
        }
    }

    /// The companions of a source, in order of their namespaces, and in each of their names.
    pub fn of(&self, source: &ObjectKey) -> impl Iterator<Item = (&ObjectKey, &Companion)> {
        let slots = self.by_source.get(source).map(|of| of.slots.as_slice()).unwrap_or_default();
        slots.iter().map(|slot| &self.slots[*slot as usize]).map(|(key, companion)| (key, companion))
    }

    /// The sources that have companions, whether they exist or not.
    pub fn sources(&self) -> impl Iterator<Item = &ObjectKey> {
        self.by_source.keys()
    }

    pub fn has_any(&self, source: &ObjectKey) -> bool {
        self.by_source.contains_key(source)
    }

    /// The sources that have a companion in a namespace, whether they exist or not.
    pub fn sources_in(&self, namespace: &str) -> impl Iterator<Item = &ObjectKey> {
        let in_here = move |(_, of): &(&ObjectKey, &OfSource)| {
            let namespace_of = |slot: Slot| &*self.slots[slot as usize].0.namespace;
            of.slots.binary_search_by(|slot| namespace_of(*slot).cmp(namespace)).is_ok()
        };
        self.by_source.iter().filter(in_here).map(|(source, _)| source)
    }

    /// How many companions are in other namespaces than their source, and how many sources have any there.
    pub const fn cross_namespace(&self) -> (usize, usize) {
        (self.cross_namespace, self.cross_namespace_sources)
    }

    /// Whether a source has companions in other namespaces.
    pub fn crosses_namespaces(&self, source: &ObjectKey) -> bool {
        self.by_source.get(source).is_some_and(|of| of.cross_namespace > 0)
    }

    /// Adds a companion, or replaces the one that has its name.
    pub fn put(&mut self, key: ObjectKey, companion: Companion) {
        let hash = self.hasher.hash_one(&key);
        let Self { slots, by_name, hasher, .. } = self;
        let has_name = |slot: &Slot| slots[*slot as usize].0 == key;
        let hash_of = |slot: &Slot| hasher.hash_one(&slots[*slot as usize].0);
        let (slot, former) = match by_name.entry(hash, has_name, hash_of) {
            Entry::Occupied(known) => {
                let slot = *known.get();
                let former = std::mem::replace(&mut slots[slot as usize].1, companion);
                (slot, Some(former))
            }
            Entry::Vacant(free) => {
                let slot = Slot::try_from(slots.vacant_key())
                    .unwrap_or_else(|_| unreachable!("more companions than etcd can hold"));
                free.insert(slot);
                slots.insert((key, companion));
                (slot, None)
            }
        };
        let source = self.slots[slot as usize].1.state.source.clone();
        let former = former.map(|former| former.state.source.clone());
        if former.as_ref() != Some(&source) {
            if let Some(former) = former.flatten() {
                self.leave(&former, slot);
            }
            if let Some(source) = source {
                self.join(source, slot);
            }
        }
    }

    pub fn remove(&mut self, key: &ObjectKey) -> Option<Companion> {
        let slot = self.find(key)?;
        if let Some(source) = self.slots[slot as usize].1.state.source.clone() {
            self.leave(&source, slot);
        }
        let hash = self.hasher.hash_one(key);
        if let Ok(found) = self.by_name.find_entry(hash, |known| *known == slot) {
            found.remove();
        }
        Some(self.slots.remove(slot as usize).1)
    }

    fn find(&self, key: &ObjectKey) -> Option<Slot> {
        let has_name = |slot: &Slot| self.slots[*slot as usize].0 == *key;
        self.by_name.find(self.hasher.hash_one(key), has_name).copied()
    }

    /// The position of a companion among those of its source: where it is, or where it belongs.
    fn position(slots: &Slab<(ObjectKey, Companion)>, of: &OfSource, slot: Slot) -> Result<usize, usize> {
        let key = &slots[slot as usize].0;
        of.slots.binary_search_by(|known| slots[*known as usize].0.cmp(key))
    }

    fn join(&mut self, source: ObjectKey, slot: Slot) {
        let crosses = self.slots[slot as usize].0.namespace != source.namespace;
        let of = self.by_source.entry(source).or_default();
        let place = Self::position(&self.slots, of, slot);
        debug_assert!(place.is_err(), "it is there already");
        let (Ok(position) | Err(position)) = place;
        of.slots.insert(position, slot);
        if crosses {
            self.cross_namespace += 1;
            self.cross_namespace_sources += usize::from(of.cross_namespace == 0);
            of.cross_namespace += 1;
        }
    }

    fn leave(&mut self, source: &ObjectKey, slot: Slot) {
        let of = self.by_source.get_mut(source);
        let place = of.and_then(|of| Some((Self::position(&self.slots, of, slot).ok()?, of)));
        debug_assert!(place.is_some(), "it is not there");
        let Some((position, of)) = place else { return };
        of.slots.remove(position);
        if self.slots[slot as usize].0.namespace != source.namespace {
            self.cross_namespace -= 1;
            of.cross_namespace -= 1;
            self.cross_namespace_sources -= usize::from(of.cross_namespace == 0);
        }
        if of.slots.is_empty() {
            self.by_source.remove(source);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::{prelude::*, sample::select};

    use super::*;
    use crate::testing::{companion, configmap, read_companion};

    const NAMESPACES: [&str; 3] = ["away", "far", "home"];
    const SOURCES: [&str; 3] = ["home/a", "far/a", ""];

    /// A companion in a namespace, of a source or of none, is put there; or it is removed.
    fn operation() -> impl Strategy<Value = (ObjectKey, Option<&'static str>)> {
        let key = (select(&NAMESPACES), select(&["a-synced", "b-synced"]));
        let key = key.prop_map(|(namespace, name)| configmap(namespace, name));
        (key, prop_oneof![3 => select(&SOURCES).prop_map(Some), 1 => Just(None)])
    }

    fn of(key: &ObjectKey, source: &str) -> Companion {
        let draft = companion(&key.namespace, &key.name);
        let draft = if source.is_empty() { draft } else { draft.of(source) };
        read_companion(draft.kind, draft.object()).companion
    }

    proptest! {
        #[test]
        fn both_indexes_show_what_was_put_and_not_removed(operations in prop::collection::vec(operation(), 0..60)) {
            let mut companions = Companions::default();
            let mut expected: BTreeMap<ObjectKey, &str> = BTreeMap::new();
            for (key, source) in operations {
                match source {
                    Some(source) => {
                        companions.put(key.clone(), of(&key, source));
                        expected.insert(key, source);
                    }
                    None => {
                        prop_assert_eq!(companions.remove(&key).is_some(), expected.remove(&key).is_some());
                    }
                }
                prop_assert_eq!(companions.len(), expected.len());
                let source_of = |found: &Companion| found.state.source.as_ref().map(ToString::to_string).unwrap_or_default();
                let shown: BTreeMap<_, _> = companions.iter().map(|(key, found)| (key.clone(), source_of(found))).collect();
                let all: BTreeMap<_, _> = expected.iter().map(|(key, source)| (key.clone(), (*source).to_owned())).collect();
                prop_assert_eq!(&shown, &all);
                prop_assert!(all.iter().all(|(key, source)| companions.get(key).map(source_of).as_ref() == Some(source)));
                let mut away = (0, 0);
                for source in SOURCES.iter().filter(|source| !source.is_empty()) {
                    let (home, name) = source.split_once('/').unwrap();
                    let source_key = configmap(home, name);
                    let of_source = || expected.iter().filter(|(_, of)| *of == source).map(|(key, _)| key);
                    prop_assert!(companions.of(&source_key).map(|(key, _)| key).eq(of_source()), "in order");
                    prop_assert_eq!(companions.has_any(&source_key), of_source().next().is_some());
                    let in_others = of_source().filter(|key| *key.namespace != *home).count();
                    prop_assert_eq!(companions.crosses_namespaces(&source_key), in_others > 0);
                    away = (away.0 + in_others, away.1 + usize::from(in_others > 0));
                }
                prop_assert_eq!(companions.cross_namespace(), away);
                for namespace in NAMESPACES {
                    let in_here = expected.iter().filter(|(key, of)| *key.namespace == *namespace && !of.is_empty());
                    let expected: BTreeSet<String> = in_here.map(|(_, of)| (*of).to_owned()).collect();
                    let shown: BTreeSet<String> = companions.sources_in(namespace).map(ToString::to_string).collect();
                    prop_assert_eq!(shown, expected);
                }
            }
        }
    }
}
