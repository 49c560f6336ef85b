//! Which sources want which companion.

use std::{collections::BTreeSet, sync::Arc};

use super::source::Source;
use crate::object::{Kind, ObjectKey};

/// Sources by the companion they want. One set for all: a set for each name, with one source in it, takes 600 bytes.
#[derive(Debug, Default)]
pub struct Wanted(BTreeSet<(DesiredName, ObjectKey)>);

/// A companion's name and a namespace that the source lists; none if a pattern or a selector may match any.
type DesiredName = (Kind, Option<Arc<str>>, Arc<str>);

impl Wanted {
    pub fn add_source(&mut self, source: &Source) {
        for name in desired_names(source) {
            self.0.insert((name, source.key.clone()));
        }
    }

    pub fn remove_source(&mut self, source: &Source) {
        for name in desired_names(source) {
            self.0.remove(&(name, source.key.clone()));
        }
    }

    /// The sources whose companions have this name, and may be wanted in this namespace: those that list it, and
    /// those with a pattern or a selector. Each in order.
    pub fn sources_by_name(&self, companion: &ObjectKey) -> [impl Iterator<Item = &ObjectKey>; 2] {
        let ObjectKey { kind, namespace, name } = companion.clone();
        [Some(namespace), None].map(|namespace| {
            let desired = (kind, namespace, name.clone());
            let first = ObjectKey { kind, namespace: Arc::default(), name: Arc::default() };
            let from_first = self.0.range((desired.clone(), first)..);
            from_first.take_while(move |(name, _)| *name == desired).map(|(_, source)| source)
        })
    }
}

fn desired_names(source: &Source) -> Vec<DesiredName> {
    let Some(policy) = source.policy() else { return Vec::new() };
    let name = |namespace| (source.key.kind, namespace, Arc::from(policy.companion.as_str()));
    let targets = &policy.targets;
    if targets.has_patterns() {
        return vec![name(None)];
    }
    let listed = targets.names.iter().map(|namespace| Arc::from(namespace.as_str()));
    let own = targets.own.then(|| source.key.namespace.clone());
    listed.chain(own).map(|namespace| name(Some(namespace))).collect()
}
