//! PURE. Namespaces: which of them a source reaches, and what they say about it.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Bound,
    sync::Arc,
};

use super::{Effect, Source, Stream, World};
use crate::{
    object::Meta,
    policy::{
        Fault, Targets,
        pattern::{BadPattern, Patterns},
    },
};

/// A namespace, reduced to what decides whether it is a target.
#[derive(Debug, PartialEq)]
pub struct Namespace {
    pub(super) labels: BTreeMap<String, String>,
    pub(super) terminating: bool,
    excluded: bool,
    accept_from: Patterns,
    /// What is wrong with its `accept-from`, if anything.
    fault: Option<Fault>,
    defaults: Defaults,
}

/// What a namespace wants stamped on sources that are made there, as it is written: `default-…`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Defaults {
    pub target_namespaces: Option<String>,
    pub target_selector: Option<String>,
    pub protect: Option<String>,
}

/// Whether a namespace may hold companions of sources of another (or the same).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Admission {
    Admitted,
    /// Terminating, or not there at all: nothing to do until that changes.
    Absent,
    /// It bears the `exclude` label, or it is Lockstep's own.
    Never,
    /// It is excluded by a flag or is a `kube-*` one, and its `accept-from` does not name the source's namespace.
    NotAccepted,
}

impl World {
    /// The namespaces that a policy asks for, in order, without judging whether they may be targets.
    #[must_use]
    pub fn wanted_namespaces<'a>(&'a self, home: &'a str, targets: &'a Targets) -> BTreeSet<&'a str> {
        let mut wanted: BTreeSet<&str> = BTreeSet::new();
        if targets.own {
            wanted.insert(home);
        }
        wanted.extend(targets.names.iter().map(String::as_str));
        for prefix in &targets.prefixes {
            let from = (Bound::Included(prefix.as_str()), Bound::Unbounded);
            let run = self.namespaces.range::<str, _>(from).map(|(name, _)| name.as_str());
            wanted.extend(run.take_while(|name| name.starts_with(prefix.as_str())));
        }
        if targets.selector.is_some() {
            let matching =
                self.namespaces.iter().filter(|(name, (ns, _))| targets.wants(home, name, &ns.labels));
            wanted.extend(matching.map(|(name, _)| name.as_str()));
        }
        wanted
    }

    /// Whether sources of `home` may have companions in `namespace`.
    #[must_use]
    pub fn admission(&self, home: &str, namespace: &str) -> Admission {
        let Some((target, _)) = self.namespaces.get(namespace) else { return Admission::Absent };
        if target.excluded || namespace == self.limits.own_namespace {
            Admission::Never
        } else if target.terminating {
            Admission::Absent
        } else if self.is_excluded(namespace) && !target.accept_from.matches(home) {
            Admission::NotAccepted
        } else {
            Admission::Admitted
        }
    }

    /// Whether a namespace has said that it takes what sources of `home` bring. To itself it need not say so.
    #[must_use]
    pub fn accepts(&self, home: &str, namespace: &str) -> bool {
        home == namespace || self.invites(home, namespace)
    }

    /// Whether a namespace's `accept-from` names another, or itself.
    #[must_use]
    pub fn invites(&self, home: &str, namespace: &str) -> bool {
        self.namespaces.get(namespace).is_some_and(|(ns, _)| ns.accept_from.matches(home))
    }

    /// What a namespace wants stamped on its sources; none when it is not known.
    #[must_use]
    pub fn defaults(&self, namespace: &str) -> Option<&Defaults> {
        self.namespaces.get(namespace).map(|(ns, _)| &ns.defaults)
    }

    #[must_use]
    pub fn is_terminating(&self, namespace: &str) -> bool {
        self.namespaces.get(namespace).is_some_and(|(ns, _)| ns.terminating)
    }

    /// Whether companions in a namespace are beyond our care because it goes, or is gone.
    #[must_use]
    pub fn is_going(&self, namespace: &str) -> bool {
        self.namespaces.get(namespace).is_none_or(|(ns, _)| ns.terminating)
    }

    fn is_excluded(&self, namespace: &str) -> bool {
        namespace.starts_with("kube-") || self.limits.excluded.matches(namespace)
    }

    /// Returns what to look at, and what is wrong with the namespace's `accept-from`, if anything.
    pub fn apply_namespace(&mut self, meta: &Meta) -> (Effect, Option<Fault>) {
        let epoch = self.epoch(Stream::Namespaces);
        let (accept_from, fault) = match meta.annotations.get(&self.keys.accept_from).map(|text| text.parse())
        {
            None => (Patterns::default(), None),
            Some(Ok(patterns)) => (patterns, None),
            Some(Err(error)) => {
                let error: BadPattern = error;
                let fault =
                    Fault::Annotation { key: self.keys.accept_from.clone(), problem: error.to_string() };
                (Patterns::default(), Some(fault))
            }
        };
        let namespace = Namespace {
            excluded: meta.labels.get(&self.keys.exclude).is_some_and(|value| value == "true"),
            terminating: meta.is_terminating(),
            labels: meta.labels.clone(),
            accept_from,
            fault: fault.clone(),
            defaults: Defaults {
                target_namespaces: meta.annotations.get(&self.keys.default_target_namespaces).cloned(),
                target_selector: meta.annotations.get(&self.keys.default_target_selector).cloned(),
                protect: meta.annotations.get(&self.keys.default_protect).cloned(),
            },
        };
        let before = self.namespaces.insert(meta.name.clone(), (namespace, epoch));
        let (now, _) = &self.namespaces[&meta.name];
        if before.as_ref().is_some_and(|(before, _)| before == now) {
            return (Effect::default(), None);
        }
        if !self.namespaces_listed {
            // Nobody plans before everything is listed, and then every source is looked at.
            return (Effect::default(), fault);
        }
        let wanting = |source: &&Arc<Source>| {
            source.wish.as_ref().is_ok_and(|wish| {
                let wants =
                    |ns: &Namespace| wish.policy.targets.wants(&source.key.namespace, &meta.name, &ns.labels);
                wants(now) || before.as_ref().is_some_and(|(before, _)| wants(before))
            })
        };
        let requeue = self.sources.values().filter(wanting).map(|source| source.key.clone()).collect();
        (Effect { requeue, news: Vec::new() }, fault)
    }

    /// Its companions go with it and say so themselves.
    pub fn delete_namespace(&mut self, name: &str) {
        self.namespaces.remove(name);
        self.lost.retain(|companion, _| *companion.namespace != *name);
    }
}
