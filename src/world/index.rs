//! PURE. Which companions belong to which source, and which sources want which companion.

use std::{
    collections::{BTreeSet, HashMap},
    sync::Arc,
};

use super::source::{Desired, Source};
use crate::object::{Kind, ObjectKey};

#[derive(Debug, Default)]
pub struct Index {
    /// Companions by the source they belong to, whether or not that source exists.
    by_source: HashMap<ObjectKey, BTreeSet<ObjectKey>>,
    away: AwayCounts,
    /// Sources by the companion they want. One set for all: a set for each name, with one source in it, takes 600 bytes.
    by_desired: BTreeSet<(DesiredName, ObjectKey)>,
}

/// How many companions are in other namespaces than their source.
#[derive(Debug, Default)]
pub struct AwayCounts {
    by_source: HashMap<ObjectKey, usize>,
    total: usize,
}

/// A companion's name and a namespace that the source lists; none if a pattern or a selector may match any.
type DesiredName = (Kind, Option<Arc<str>>, Arc<str>);

impl Index {
    pub fn companions_of(&self, source: &ObjectKey) -> impl Iterator<Item = &ObjectKey> {
        self.by_source.get(source).into_iter().flatten()
    }

    /// The sources that have companions, whether they exist or not.
    pub fn sources(&self) -> impl ExactSizeIterator<Item = &ObjectKey> {
        self.by_source.keys()
    }

    /// The sources that have a companion in a namespace, whether they exist or not.
    pub fn sources_with_companions_in(&self, namespace: &str) -> impl Iterator<Item = &ObjectKey> {
        sources_in(&self.by_source, namespace)
    }

    pub fn has_companions(&self, source: &ObjectKey) -> bool {
        self.by_source.contains_key(source)
    }

    pub fn add_companion(&mut self, source: &ObjectKey, companion: &ObjectKey) {
        let added = self.by_source.entry(source.clone()).or_default().insert(companion.clone());
        if added {
            self.away.add(source, companion);
        }
    }

    pub fn remove_companion(&mut self, source: &ObjectKey, companion: &ObjectKey) {
        let removed = remove(&mut self.by_source, source, companion);
        if removed {
            self.away.remove(source, companion);
        }
    }

    pub const fn away(&self) -> &AwayCounts {
        &self.away
    }

    pub fn add_source(&mut self, source: &Source) {
        for name in desired_names(source) {
            self.by_desired.insert((name, source.key.clone()));
        }
    }

    pub fn remove_source(&mut self, source: &Source) {
        for name in desired_names(source) {
            self.by_desired.remove(&(name, source.key.clone()));
        }
    }

    /// The sources whose companions have this name, and may be wanted in this namespace: those that list it, and
    /// those with a pattern or a selector. Each in order.
    pub fn sources_by_name(&self, companion: &ObjectKey) -> [impl Iterator<Item = &ObjectKey>; 2] {
        let ObjectKey { kind, namespace, name } = companion.clone();
        [Some(namespace), None].map(|namespace| {
            let desired = (kind, namespace, name.clone());
            let first = ObjectKey { kind, namespace: Arc::default(), name: Arc::default() };
            let from_first = self.by_desired.range((desired.clone(), first)..);
            from_first.take_while(move |(name, _)| *name == desired).map(|(_, source)| source)
        })
    }
}

impl AwayCounts {
    pub fn add(&mut self, source: &ObjectKey, companion: &ObjectKey) {
        if source.namespace != companion.namespace {
            self.total += 1;
            *self.by_source.entry(source.clone()).or_default() += 1;
        }
    }

    /// Removes one that was added.
    pub fn remove(&mut self, source: &ObjectKey, companion: &ObjectKey) {
        if source.namespace == companion.namespace {
            return;
        }
        self.total -= 1;
        if let Some(away) = self.by_source.get_mut(source) {
            *away -= 1;
            if *away == 0 {
                self.by_source.remove(source);
            }
        }
    }

    /// How many companions these and the others are, and of how many sources.
    pub fn with(&self, others: &Self) -> (usize, usize) {
        let more = others.by_source.keys().filter(|source| !self.by_source.contains_key(*source));
        (self.total + others.total, self.by_source.len() + more.count())
    }
}

fn desired_names(source: &Source) -> Vec<DesiredName> {
    let Ok(Desired { policy, .. }) = &source.desired else { return Vec::new() };
    let name = |namespace| (source.key.kind, namespace, Arc::from(policy.companion.as_str()));
    let targets = &policy.targets;
    if targets.has_patterns() {
        return vec![name(None)];
    }
    let listed = targets.names.iter().map(|namespace| Arc::from(namespace.as_str()));
    let own = targets.own.then(|| source.key.namespace.clone());
    listed.chain(own).map(|namespace| name(Some(namespace))).collect()
}

/// The sources that have a place in a namespace.
pub fn sources_in<'a>(
    by_source: &'a HashMap<ObjectKey, BTreeSet<ObjectKey>>,
    namespace: &str,
) -> impl Iterator<Item = &'a ObjectKey> + use<'a> {
    let (namespace, none): (Arc<str>, Arc<str>) = (namespace.into(), Arc::default());
    let in_here = move |(source, places): &(&ObjectKey, &BTreeSet<ObjectKey>)| {
        let first = ObjectKey { kind: source.kind, namespace: namespace.clone(), name: none.clone() };
        places.range(first..).next().is_some_and(|at| at.namespace == namespace)
    };
    by_source.iter().filter(in_here).map(|(source, _)| source)
}

/// Whether the value was there.
pub fn remove<K: Eq + std::hash::Hash>(
    map: &mut HashMap<K, BTreeSet<ObjectKey>>,
    key: &K,
    value: &ObjectKey,
) -> bool {
    let Some(values) = map.get_mut(key) else { return false };
    let removed = values.remove(value);
    if values.is_empty() {
        map.remove(key);
    }
    removed
}
