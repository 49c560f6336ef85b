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
    /// How many of these companions are in other namespaces than their source, by source.
    away_by_source: HashMap<ObjectKey, usize>,
    away: usize,
    /// Sources by the companion they want.
    by_desired: HashMap<DesiredName, BTreeSet<ObjectKey>>,
}

/// A companion's name and a namespace that the source lists; none if a prefix or a selector may match any.
type DesiredName = (Kind, Option<Arc<str>>, String);

impl Index {
    pub fn companions_of(&self, source: &ObjectKey) -> impl Iterator<Item = &ObjectKey> {
        self.by_source.get(source).into_iter().flatten()
    }

    /// The sources that have companions, whether they exist or not.
    pub fn sources(&self) -> impl ExactSizeIterator<Item = &ObjectKey> {
        self.by_source.keys()
    }

    /// The key of a source that has companions, so that all of them share one allocation.
    pub fn shared_key(&self, source: &ObjectKey) -> Option<&ObjectKey> {
        self.by_source.get_key_value(source).map(|(key, _)| key)
    }

    pub fn add_companion(&mut self, source: &ObjectKey, companion: &ObjectKey) {
        let added = self.by_source.entry(source.clone()).or_default().insert(companion.clone());
        if added && source.namespace != companion.namespace {
            self.away += 1;
            *self.away_by_source.entry(source.clone()).or_default() += 1;
        }
    }

    pub fn remove_companion(&mut self, source: &ObjectKey, companion: &ObjectKey) {
        let removed = remove(&mut self.by_source, source, companion);
        if removed && source.namespace != companion.namespace {
            self.away -= 1;
            if let Some(away) = self.away_by_source.get_mut(source) {
                *away -= 1;
                if *away == 0 {
                    self.away_by_source.remove(source);
                }
            }
        }
    }

    /// How many companions are in other namespaces than their source, and how many sources have any there.
    pub fn away_counts(&self) -> (usize, usize) {
        (self.away, self.away_by_source.len())
    }

    pub fn add_source(&mut self, source: &Source) {
        for name in desired_names(source) {
            self.by_desired.entry(name).or_default().insert(source.key.clone());
        }
    }

    pub fn remove_source(&mut self, source: &Source) {
        for name in desired_names(source) {
            remove(&mut self.by_desired, &name, &source.key);
        }
    }

    /// The sources whose companions have this name, and may be wanted in this namespace: those that list it, and
    /// those with a prefix or a selector. Each in order.
    pub fn sources_by_name(&self, companion: &ObjectKey) -> [impl Iterator<Item = &ObjectKey>; 2] {
        let name = companion.name.to_string();
        let here = (companion.kind, Some(companion.namespace.clone()), name.clone());
        let anywhere = (companion.kind, None, name);
        [here, anywhere].map(|name| self.by_desired.get(&name).into_iter().flatten())
    }
}

fn desired_names(source: &Source) -> Vec<DesiredName> {
    let Ok(Desired { policy, .. }) = &source.desired else { return Vec::new() };
    let name = |namespace| (source.key.kind, namespace, policy.companion.clone());
    let targets = &policy.targets;
    if !targets.prefixes.is_empty() || targets.selector.is_some() {
        return vec![name(None)];
    }
    let listed = targets.names.iter().map(|namespace| Arc::from(namespace.as_str()));
    let own = targets.own.then(|| source.key.namespace.clone());
    listed.chain(own).map(|namespace| name(Some(namespace))).collect()
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
