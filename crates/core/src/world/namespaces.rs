//! Namespaces: which of them a source reaches, and what they say about it.

use std::{
    collections::{BTreeMap, BTreeSet},
    ops::Bound,
    sync::Arc,
};

use kube_core::{Selector, SelectorExt};

use super::NamespaceRules;
use crate::{
    keys::Keys,
    object::Meta,
    policy::{
        self, Targets,
        defaults::Defaults,
        list::MAX_LIST_BYTES,
        mistake::Mistake,
        pattern::{Pattern, Patterns, any_matches},
    },
    text,
};

/// How many labels of a namespace are kept, in the order of their keys. Kubernetes limits neither their number nor
/// their total length.
const MAX_LABELS: usize = 256;
/// A command repeats an `accept-from` of at most this length.
const MAX_REPEATED_BYTES: usize = 200;

/// All namespaces that the watch has shown.
pub struct Namespaces {
    keys: Arc<Keys>,
    rules: NamespaceRules,
    namespaces: BTreeMap<String, Namespace>,
    /// Those with an `accept-from`: the only ones that sources with `consent: required` can reach.
    accepting: BTreeSet<String>,
}

/// A namespace, reduced to what decides whether it is a target.
#[derive(Debug, Clone, PartialEq)]
pub struct Namespace {
    labels: BTreeMap<String, String>,
    deletion_timestamp: Option<String>,
    excluded: bool,
    accept_from: Patterns,
    accept_adopt_from: Patterns,
    /// One of these two is malformed.
    malformed: bool,
    /// What is wrong with its annotations, or has no effect although somebody probably meant something by it.
    complaint: Option<String>,
    /// What its `default-…` annotations say, valid or not.
    defaults: Defaults,
    /// The list, or the watch after it, that showed it last.
    epoch: u32,
}

/// Whether a namespace may hold companions of sources from another one, or from itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Eligibility {
    Eligible,
    /// It does not exist: there is nothing to do until it does.
    Missing,
    /// It is being deleted: the namespace controller deletes what is in there.
    Terminating,
    /// It has the `exclude` label, or it is Lockstep's own.
    Never,
    /// It is a `kube-*` namespace or excluded by a flag, or the source needs its consent, and its `accept-from` does
    /// not name the source's namespace.
    NotAccepted,
}

impl Eligibility {
    /// The namespace takes no companions of the source, whatever the source says.
    pub const fn is_refusal(self) -> bool {
        matches!(self, Self::NotAccepted | Self::Never)
    }
}

/// What the watch showed of a namespace.
pub struct NamespaceChange {
    /// None if it is new.
    pub before: Option<Namespace>,
    /// What is wrong with its annotations, if anything: for the log, because no webhook sees namespaces.
    pub complaint: Option<String>,
}

impl Namespaces {
    pub const fn new(keys: Arc<Keys>, rules: NamespaceRules) -> Self {
        Self { keys, rules, namespaces: BTreeMap::new(), accepting: BTreeSet::new() }
    }

    pub const fn rules(&self) -> &NamespaceRules {
        &self.rules
    }

    pub fn get(&self, name: &str) -> Option<&Namespace> {
        self.namespaces.get(name)
    }

    /// Every namespace, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.namespaces.keys().map(|name| &**name)
    }

    /// The namespaces that a policy asks for, in order, whether or not they may be targets. Patterns of a source that
    /// needs consent match only namespaces that accept it: anybody may write such a source, so whether a namespace
    /// accepts it is asked before its up to a hundred patterns are.
    pub fn wanted<'a>(&'a self, home: &'a str, targets: &'a Targets) -> Vec<&'a str> {
        let mut wanted: Vec<&str> = targets.names.iter().map(String::as_str).collect();
        wanted.extend(targets.own.then_some(home));
        if targets.needs_consent {
            wanted.extend(self.accepting(home).filter(|name| self.is_wanted(home, targets, name)));
        } else {
            for pattern in &targets.patterns {
                let names = self.starting_with(pattern.prefix()).filter(|name| pattern.matches(name));
                wanted.extend(names.filter(|name| !any_matches(&targets.excluded, name)));
            }
            if targets.selector.is_some() {
                let names = self.namespaces.keys().map(String::as_str);
                wanted.extend(names.filter(|name| self.is_wanted(home, targets, name)));
            }
        }
        wanted.sort_unstable();
        wanted.dedup();
        wanted
    }

    /// The other namespaces whose `accept-from` matches `home`.
    fn accepting<'a>(&'a self, home: &'a str) -> impl Iterator<Item = &'a str> + 'a {
        let names = self.accepting.iter().map(String::as_str);
        names.filter(move |name| *name != home && self.accept_from_matches(home, name))
    }

    fn starting_with<'a>(&'a self, prefix: &'a str) -> impl Iterator<Item = &'a str> + 'a {
        let from = (Bound::Included(prefix), Bound::Unbounded);
        let names = self.namespaces.range::<str, _>(from).map(|(name, _)| name.as_str());
        names.take_while(move |name| name.starts_with(prefix))
    }

    /// Whether a policy asks for this namespace.
    pub fn is_wanted(&self, home: &str, targets: &Targets, name: &str) -> bool {
        match self.get(name) {
            Some(known) => known.matches(targets, home, name),
            None => targets.wants(home, name, &BTreeMap::new()),
        }
    }

    /// Whether sources of `home` with these targets may have companions in a namespace.
    pub fn eligibility(&self, home: &str, name: &str, targets: &Targets) -> Eligibility {
        let Some(target) = self.get(name) else { return Eligibility::Missing };
        let needs_acceptance = name.starts_with("kube-")
            || self.rules.excluded.matches(name)
            || (targets.needs_consent && home != name);
        if target.excluded || name == self.rules.own_namespace {
            Eligibility::Never
        } else if target.is_terminating() {
            Eligibility::Terminating
        } else if needs_acceptance && !target.accept_from.matches(home) {
            Eligibility::NotAccepted
        } else {
            Eligibility::Eligible
        }
    }

    /// The patterns and the selector of a source that match no namespace, or none that accepts the source if it needs
    /// consent.
    pub(crate) fn unmatched(&self, home: &str, targets: &Targets) -> Vec<String> {
        if !targets.has_patterns() {
            return Vec::new();
        }
        let is_candidate = |name: &&str| !any_matches(&targets.excluded, name);
        // Found once for all patterns: anybody may write a source that needs consent.
        let accepting: Option<Vec<&str>> =
            targets.needs_consent.then(|| self.accepting(home).filter(is_candidate).collect());
        let any = |prefix: &str, matches: &dyn Fn(&str) -> bool| match &accepting {
            Some(names) => names.iter().any(|name| matches(name)),
            None => self.starting_with(prefix).any(|name| matches(name) && is_candidate(&name)),
        };
        let matches_none = |pattern: &&Pattern| !any(pattern.prefix(), &|name| pattern.matches(name));
        let selects_none = |selector: &&Selector| {
            !any("", &|name| self.get(name).is_some_and(|known| selector.matches(&known.labels)))
        };
        let patterns = targets.patterns.iter().filter(matches_none).map(ToString::to_string);
        patterns.chain(targets.selector.iter().filter(selects_none).map(ToString::to_string)).collect()
    }

    /// How a namespace can accept sources of `home`: a command that keeps what it accepts already, if there is one.
    pub fn how_to_accept(&self, home: &str, name: &str) -> String {
        self.how_to_add(&self.keys.accept_from, |known| &known.accept_from, home, name)
    }

    /// As [`Self::how_to_accept`], for the adoption of objects.
    pub fn how_to_accept_adoption(&self, home: &str, name: &str) -> String {
        self.how_to_add(&self.keys.accept_adopt_from, |known| &known.accept_adopt_from, home, name)
    }

    fn how_to_add(&self, key: &str, of: impl Fn(&Namespace) -> &Patterns, home: &str, name: &str) -> String {
        let known = self.get(name);
        let accepted = known.map(|known| of(known).to_string()).unwrap_or_default();
        let malformed = known.is_some_and(|known| known.malformed);
        let excluded = known.is_some_and(|known| any_matches(&of(known).excluded, home));
        if malformed || excluded || accepted.len() > MAX_REPEATED_BYTES {
            return format!("let its annotation {key} match {home}, with kubectl edit namespace {name}");
        }
        match accepted.as_str() {
            "" => format!("kubectl annotate namespace {name} {key}={home}"),
            _ => format!("kubectl annotate --overwrite namespace {name} '{key}={accepted},{home}'"),
        }
    }

    /// Whether sources of `home` may adopt objects in a namespace. In their own namespace they always may.
    pub fn accepts_adoption(&self, home: &str, name: &str) -> bool {
        home == name || self.get(name).is_some_and(|known| known.accept_adopt_from.matches(home))
    }

    /// Whether the `accept-from` of a namespace matches `home`.
    pub(crate) fn accept_from_matches(&self, home: &str, name: &str) -> bool {
        self.get(name).is_some_and(|known| known.accept_from.matches(home))
    }

    /// The defaults for sources in a namespace; none when it is not known.
    pub fn defaults(&self, name: &str) -> Option<&Defaults> {
        self.get(name).map(|known| &known.defaults)
    }

    pub fn is_terminating(&self, name: &str) -> bool {
        self.get(name).is_some_and(|known| known.is_terminating())
    }

    /// Whether an object is deleted with its namespace. Nothing can be created in a terminating namespace: an object
    /// that is younger than the deletion is in a namespace of the same name that this watch has not shown yet.
    pub(crate) fn is_terminating_with(&self, name: &str, object: &Meta) -> bool {
        let Some(deleted) = self.get(name).and_then(|known| known.deletion_timestamp.as_ref()) else {
            return false;
        };
        // The API server writes every time in UTC with whole seconds, so the texts compare like the times.
        object.creation_timestamp.as_ref().is_some_and(|created| created <= deleted)
    }

    /// Whether the namespace controller deletes what is in a namespace, or has done so.
    pub fn is_gone_or_terminating(&self, name: &str) -> bool {
        self.get(name).is_none_or(|known| known.is_terminating())
    }

    /// Takes in a namespace that the watch shows; none if nothing that we use has changed.
    pub fn apply(&mut self, meta: &Meta, epoch: u32) -> Option<NamespaceChange> {
        let namespace = Namespace::read(&self.keys, meta, epoch);
        if let Some(known) = self.namespaces.get_mut(&meta.name) {
            known.epoch = epoch;
            if *known == namespace {
                return None;
            }
        }
        let complaint = namespace.complaint.clone();
        if namespace.accept_from.is_empty() {
            self.accepting.remove(&meta.name);
        } else {
            self.accepting.insert(meta.name.clone());
        }
        let before = self.namespaces.insert(meta.name.clone(), namespace);
        Some(NamespaceChange { before, complaint })
    }

    pub fn delete(&mut self, name: &str) {
        self.namespaces.remove(name);
        self.accepting.remove(name);
    }

    /// A list has ended: removes the namespaces that it did not show.
    pub(crate) fn retain_epoch(&mut self, epoch: u32) {
        self.namespaces.retain(|_, known| known.epoch == epoch);
        self.accepting.retain(|name| self.namespaces.contains_key(name));
    }
}

impl Namespace {
    fn read(keys: &Keys, meta: &Meta, epoch: u32) -> Self {
        let mut fault = None;
        let mut patterns =
            |key: &str| match meta.annotations.get(key).map(|text| policy::namespace_patterns(text)) {
                None => Patterns::default(),
                Some(Ok(patterns)) => patterns,
                Some(Err(problem)) => {
                    fault.get_or_insert_with(|| policy::fault(key, &problem));
                    Patterns::default()
                }
            };
        let accept_from = patterns(&keys.accept_from);
        let accept_adopt_from = patterns(&keys.accept_adopt_from);
        let malformed = fault.is_some();
        let complaint = fault
            .map(|fault| format!("{fault}; this annotation has no effect until it is corrected"))
            .or_else(|| Mistake::on_namespace(keys, meta).map(|mistake| mistake.to_string()));
        // One byte more than a list may have: a default that is too long stays invalid, and costs no more than that.
        let default = |key: &str| {
            meta.annotations.get(key).map(|text| text::prefix(text, MAX_LIST_BYTES + 1).to_owned())
        };
        let labels = meta.labels.iter().take(MAX_LABELS);
        Self {
            labels: labels.map(|(key, value)| (key.clone(), value.clone())).collect(),
            deletion_timestamp: meta.deletion_timestamp.clone(),
            excluded: meta.labels.get(&keys.exclude).is_some_and(|value| value == "true"),
            accept_from,
            accept_adopt_from,
            malformed,
            complaint,
            defaults: Defaults {
                target_namespaces: default(&keys.default_target_namespaces),
                target_selector: default(&keys.default_target_selector),
                protect: default(&keys.default_protect),
            },
            epoch,
        }
    }

    pub fn matches(&self, targets: &Targets, home: &str, name: &str) -> bool {
        targets.wants(home, name, &self.labels)
    }

    /// Whether a change of the namespace matters to a source.
    pub(super) fn matters_to(&self, targets: &Targets, home: &str, name: &str) -> bool {
        let reached = !targets.needs_consent || self.accept_from.matches(home);
        targets.names_explicitly(home, name) || (reached && self.matches(targets, home, name))
    }

    const fn is_terminating(&self) -> bool {
        self.deletion_timestamp.is_some()
    }
}
