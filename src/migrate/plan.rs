//! PURE. What would move: sources with their copies, and what is left to a person. [`survey`] needs only metadata, and
//! says which objects have to be read; [`judge`] looks at these, with the mirror's own rules for adoption.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    reason::Reason,
    tool::{CopyOf, Push, Role, Tool},
};
use crate::{
    keys::Keys,
    object::{Meta, Object, ObjectKey},
    plan::{Action, Decision, Holder, TargetContext, Trouble, decide, targets},
    policy::{self, pattern::Pattern},
    world::{Eligibility, ObservedCompanion, ObservedSource, World},
};

/// What the rules below need to know about the cluster.
pub struct Context<'a> {
    pub tool: Tool,
    pub keys: &'a Keys,
    /// It knows the namespaces.
    pub world: &'a World,
    /// kubernetes-replicator ran with `--allow-all`.
    pub allow_all: bool,
    /// Sources whose `namespace/name` this pattern does not match are left out.
    pub only: Option<&'a Pattern>,
}

/// A source that may move, judged by metadata alone.
#[derive(Debug, PartialEq)]
pub struct Candidate {
    pub source: ObjectKey,
    push: Option<Push>,
    /// Copies that people created, to be filled from this source.
    pulled: Vec<ObjectKey>,
    /// The name of all its copies.
    pub companion: String,
    copies_labels: bool,
}

/// A source that moves, and its copies.
#[derive(Debug, PartialEq, Eq)]
pub struct Move {
    pub source: Subject,
    /// Our annotations for the source.
    pub ours: BTreeMap<String, String>,
    /// What is adopted.
    pub copies: Vec<Subject>,
    /// How many of the copies have other content than the source, and will get that of the source.
    pub outdated: usize,
    /// Targets without a copy: Lockstep creates one.
    pub creates: Vec<ObjectKey>,
    pub notes: Vec<String>,
}

/// An object whose metadata changes, with the annotations of the tool that it has now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Subject {
    pub key: ObjectKey,
    pub uid: String,
    pub theirs: BTreeMap<String, String>,
}

/// What a person has to look at.
#[derive(Debug, PartialEq, Eq)]
pub struct ByHand {
    pub object: ObjectKey,
    pub reasons: Vec<Reason>,
}

/// The `accept-adopt-from` of a Namespace, for as long as its copies are being adopted.
#[derive(Debug, PartialEq, Eq)]
pub struct Acceptance {
    pub namespace: String,
    pub uid: String,
    pub before: Option<String>,
    pub during: String,
}

#[derive(Debug, Default, PartialEq, Eq)]
pub struct Plan {
    pub moves: Vec<Move>,
    pub by_hand: Vec<ByHand>,
    pub acceptances: Vec<Acceptance>,
    /// Other objects with annotations of the tool: copies whose source is gone, for example.
    pub leftovers: Vec<ObjectKey>,
}

/// The sources that may move, and what is left to a person already.
#[must_use]
pub fn survey(context: &Context<'_>, objects: &BTreeMap<ObjectKey, Meta>) -> (Vec<Candidate>, Vec<ByHand>) {
    let role = |key: &ObjectKey, meta: &Meta| context.tool.role(key.kind, meta);
    let is_asked_for =
        |source: &ObjectKey| context.only.is_none_or(|pattern| pattern.matches(&source.to_string()));
    let mut by_hand = Vec::new();
    let mut pulled: BTreeMap<&ObjectKey, Vec<ObjectKey>> = BTreeMap::new();
    for (key, meta) in objects {
        let Role::Copy(CopyOf { source, pulled: true, filled }) = role(key, meta) else { continue };
        if !is_asked_for(source.as_ref().unwrap_or(key)) {
            continue;
        }
        match puller(context, objects, key, source, filled) {
            Ok(source) => pulled.entry(source).or_default().push(key.clone()),
            Err(reason) => by_hand.push(ByHand { object: key.clone(), reasons: vec![reason] }),
        }
    }
    let mut candidates = Vec::new();
    for (key, meta) in objects.iter().filter(|(key, _)| is_asked_for(key)) {
        let pulled = pulled.remove(key).unwrap_or_default();
        let (push, copies_labels) = match role(key, meta) {
            Role::Source(wish) => (wish.push, wish.copies_labels),
            Role::Nothing if !pulled.is_empty() => (Ok(None), false),
            Role::Nothing | Role::Copy(_) => continue,
        };
        match candidate(key, push, pulled, copies_labels) {
            Ok(candidate) => candidates.push(candidate),
            Err(reason) => by_hand.push(ByHand { object: key.clone(), reasons: vec![reason] }),
        }
    }
    (candidates, by_hand)
}

/// The source of a copy that pulls, if it may.
fn puller<'a>(
    context: &Context<'_>,
    objects: &'a BTreeMap<ObjectKey, Meta>,
    copy: &ObjectKey,
    source: Option<ObjectKey>,
    filled: bool,
) -> Result<&'a ObjectKey, Reason> {
    let source = source.ok_or(Reason::NoSource)?;
    let Some((key, meta)) = objects.get_key_value(&source) else { return Err(Reason::SourceMissing(source)) };
    if matches!(context.tool.role(source.kind, meta), Role::Copy(_)) {
        return Err(Reason::SourceIsCopy(source));
    }
    let pull = context.tool.pull(source.kind, meta, context.allow_all);
    match pull.permits(context.world.namespaces(), &copy.namespace, filled) {
        true => Ok(key),
        false => Err(Reason::NotPermitted(source)),
    }
}

fn candidate(
    source: &ObjectKey,
    push: Result<Option<Push>, Reason>,
    pulled: Vec<ObjectKey>,
    copies_labels: bool,
) -> Result<Candidate, Reason> {
    let push = push?;
    let own_name = push.as_ref().map(|_| source.name.to_string());
    let names: BTreeSet<String> = pulled.iter().map(|copy| copy.name.to_string()).chain(own_name).collect();
    let mut names: Vec<String> = names.into_iter().collect();
    match (names.pop(), names.is_empty()) {
        (None, _) => Err(Reason::NobodyPulls),
        (Some(companion), true) => {
            let copies_labels = copies_labels && push.is_some();
            Ok(Candidate { source: source.clone(), push, pulled, companion, copies_labels })
        }
        (Some(last), false) => Err(Reason::Names([names, vec![last]].concat())),
    }
}

/// Whether a source and its copies can move. `found` are the objects of its kind that have the name of its copies, in
/// any namespace, as far as they exist.
pub fn judge(
    context: &Context<'_>,
    candidate: &Candidate,
    source: Object,
    found: BTreeMap<ObjectKey, Object>,
) -> Result<Move, Vec<Reason>> {
    let (keys, key) = (context.keys, &candidate.source);
    let meta = &source.metadata;
    if meta.is_terminating() {
        return Err(vec![Reason::Terminating]);
    }
    if meta.labels.keys().chain(meta.annotations.keys()).any(|key| keys.is_ours(key)) {
        return Err(vec![Reason::AlreadyOurs]);
    }
    let subject = Subject { key: key.clone(), uid: meta.uid.clone(), theirs: context.tool.annotations(meta) };
    let ours = annotations(context, candidate).ok_or_else(|| vec![Reason::NoTargets])?;
    let mut notes: Vec<String> = manager(meta).into_iter().map(|by| by.note()).collect();
    if candidate.copies_labels && !candidate.pulled.is_empty() {
        notes.push("its pulled copies get the labels of the source, too".to_owned());
    }
    let source_keys = data_keys(&source);

    // The object as it will be.
    let mut future = source;
    future.metadata.annotations.retain(|key, _| !subject.theirs.contains_key(key));
    future.metadata.annotations.extend(ours.clone());
    future.metadata.labels.insert(keys.managed.clone(), "true".to_owned());
    let rules = context.world.namespaces().rules();
    let future = ObservedSource::read(keys, rules, key.kind, future).source;
    let desired = future.desired.as_ref().map_err(|fault| vec![Reason::Fault(fault.clone())])?;

    let mut planned =
        Move { source: subject, ours, copies: Vec::new(), outdated: 0, creates: Vec::new(), notes };
    let mut reasons = Vec::new();
    let mut found = found;
    for target in targets(context.world, &key.namespace, &desired.policy.targets) {
        let at = ObjectKey::new(key.kind, target.namespace, &candidate.companion);
        if at == *key {
            continue;
        }
        let object = found.remove(&at);
        let is_here = target.explicit || object.is_some();
        match target.eligibility {
            Eligibility::Terminating => {}
            Eligibility::Missing => {
                planned.notes.push(format!("namespace {} does not exist", target.namespace))
            }
            Eligibility::Never if *target.namespace == rules.own_namespace => {
                if object.is_some() {
                    planned.notes.push(format!(
                        "{at} is in Lockstep's own namespace and stays as it is, without updates: delete it"
                    ));
                }
            }
            Eligibility::Never if is_here => reasons.push(Reason::Excluded { at }),
            Eligibility::NotAccepted if is_here => {
                let command = context.world.namespaces().how_to_accept(&key.namespace, target.namespace);
                reasons.push(Reason::NotAccepted { at, command });
            }
            Eligibility::Never | Eligibility::NotAccepted => {}
            Eligibility::Eligible => match object {
                None => planned.creates.push(at),
                Some(object) => {
                    let theirs = context.tool.annotations(&object.metadata);
                    let uid = object.metadata.uid.clone();
                    match adoption(context, key, &future, &source_keys, &at, object) {
                        Ok(is_outdated) => {
                            planned.copies.push(Subject { key: at, uid, theirs });
                            planned.outdated += usize::from(is_outdated);
                        }
                        Err(reason) => reasons.push(reason),
                    }
                }
            },
        }
    }
    if reasons.is_empty() { Ok(planned) } else { Err(reasons) }
}

/// Whether the mirror would adopt this object in place, and whether that changes its content.
fn adoption(
    context: &Context<'_>,
    source: &ObjectKey,
    future: &crate::world::Source,
    source_keys: &BTreeSet<String>,
    at: &ObjectKey,
    object: Object,
) -> Result<bool, Reason> {
    let at = || at.clone();
    let meta = &object.metadata;
    let copy = match context.tool.role(source.kind, meta) {
        Role::Copy(copy) if copy.source.as_ref().is_none_or(|of| of == source) => copy,
        Role::Copy(_) | Role::Source(_) | Role::Nothing => return Err(Reason::Foreign { at: at() }),
    };
    // A pushed copy has labels of its source: only what a person created is known to be managed by a tool.
    if let Some(by) = manager(meta).filter(|_| copy.pulled) {
        return Err(Reason::ManagedCopy { at: at(), by: by.0 });
    }
    // The mirror refuses only controllers. It removes other owners, which may be what somebody relies on.
    if !meta.owner_references.is_empty() {
        return Err(Reason::Bound { at: at() });
    }
    let extra: Vec<String> = data_keys(&object).difference(source_keys).cloned().collect();
    let observed = ObservedCompanion::read(context.keys, source.kind, object);
    let found = observed.companion();
    let is_outdated = future.desired.as_ref().is_ok_and(|desired| desired.content != found.content);
    // `accept-adopt-from` is set before, and taken back afterwards.
    let accepting = TargetContext { in_step: false, lost: false, accepts: true, first_in_line: false };
    match decide(future, &at(), Some(found), accepting) {
        Decision::Change(change) => match change.action {
            Action::Update { .. } if extra.is_empty() => Ok(is_outdated),
            Action::Update { .. } => Err(Reason::ExtraKeys { at: at(), keys: extra.join(", ") }),
            _ => Err(Reason::Recreate { at: at() }),
        },
        Decision::Trouble(Trouble::Conflict { holder: Holder::Companion { of }, .. }) => {
            Err(Reason::Companion { at: at(), of })
        }
        Decision::Trouble(_) => Err(Reason::Bound { at: at() }),
        // It has our marks already.
        Decision::Nothing => Err(Reason::Companion { at: at(), of: source.clone() }),
    }
}

fn data_keys(object: &Object) -> BTreeSet<String> {
    [&object.data, &object.binary_data].into_iter().flatten().flat_map(BTreeMap::keys).cloned().collect()
}

/// Our annotations for a source; none if it names no target.
fn annotations(context: &Context<'_>, candidate: &Candidate) -> Option<BTreeMap<String, String>> {
    let (keys, home) = (context.keys, &*candidate.source.namespace);
    let push = candidate.push.clone().unwrap_or_default();
    let others = push.patterns.iter().filter(|pattern| !(pattern.is_name() && pattern.as_str() == home));
    let mut list: Vec<String> = others.map(ToString::to_string).collect();
    for copy in &candidate.pulled {
        let item = if *copy.namespace == *home { "." } else { &copy.namespace };
        if !policy::pattern::any_matches(&push.patterns, &copy.namespace) || item == "." {
            list.push(item.to_owned());
        }
    }
    if list.is_empty() && push.selector.is_none() {
        return None;
    }
    let mut ours = BTreeMap::from([(keys.adopt.clone(), "true".to_owned())]);
    if !list.is_empty() {
        ours.insert(keys.target_namespaces.clone(), list.join(","));
    }
    ours.extend(push.selector.map(|selector| (keys.target_selector.clone(), selector)));
    let name = &*candidate.source.name;
    match candidate.companion.strip_prefix(name) {
        Some("") => drop(ours.insert(keys.companion_name.clone(), "=".to_owned())),
        Some(suffix) if suffix == keys.suffix => {}
        _ => drop(ours.insert(keys.companion_name.clone(), candidate.companion.clone())),
    }
    if candidate.copies_labels {
        ours.insert(keys.copy_labels.clone(), "*".to_owned());
    }
    // When a source is deleted, Reflector leaves copies that people created.
    if context.tool == Tool::Reflector && candidate.push.is_none() {
        ours.insert(keys.when_removed.clone(), "keep".to_owned());
    }
    Some(ours)
}

/// The tool that writes an object, by the marks that it leaves.
struct Manager(String);

impl Manager {
    fn note(&self) -> String {
        format!(
            "it is part of {}: make the same change there, or the next update brings the old annotations back",
            self.0
        )
    }
}

fn manager(meta: &Meta) -> Option<Manager> {
    let annotation = |key: &str| meta.annotations.get(key);
    let text = if let Some(name) = annotation("meta.helm.sh/release-name") {
        format!("the Helm release {name}")
    } else if annotation("argocd.argoproj.io/tracking-id").is_some() {
        "an Argo CD application".to_owned()
    } else if let Some(name) = meta.labels.get("kustomize.toolkit.fluxcd.io/name") {
        format!("the Flux Kustomization {name}")
    } else if let Some(name) = annotation("cert-manager.io/certificate-name") {
        format!("the Certificate {name} (secretTemplate)")
    } else {
        return None;
    };
    Some(Manager(text))
}

impl Plan {
    /// Puts together what was judged. Two sources that want the same copy are left to a person.
    #[must_use]
    pub fn new(
        context: &Context<'_>,
        objects: &BTreeMap<ObjectKey, Meta>,
        namespaces: &BTreeMap<String, Meta>,
        moves: Vec<Move>,
        by_hand: Vec<ByHand>,
    ) -> Self {
        let mut plan = Self { moves, by_hand, ..Self::default() };
        let mut claims: BTreeMap<ObjectKey, Vec<ObjectKey>> = BTreeMap::new();
        for planned in &plan.moves {
            for at in planned.places() {
                claims.entry(at.clone()).or_default().push(planned.source.key.clone());
            }
        }
        let contested = |planned: &Move| {
            planned.places().find_map(|at| {
                let other = claims[at].iter().find(|other| **other != planned.source.key)?;
                Some(Reason::Contested { at: at.clone(), other: other.clone() })
            })
        };
        plan.leave_to_people(contested);
        let (acceptances, refused) = acceptances(context, namespaces, &plan.moves);
        plan.acceptances = acceptances;
        plan.leave_to_people(|planned| {
            let namespace = planned.copies.iter().find_map(|copy| refused.get(&*copy.key.namespace))?;
            let key = context.keys.accept_adopt_from.clone();
            Some(Reason::Adoption { namespace: namespace.clone(), key })
        });
        plan.by_hand.sort_by(|a, b| a.object.cmp(&b.object));
        plan.leftovers = plan.leftovers(context, objects);
        plan
    }

    fn leave_to_people(&mut self, reason: impl Fn(&Move) -> Option<Reason>) {
        for planned in std::mem::take(&mut self.moves) {
            match reason(&planned) {
                None => self.moves.push(planned),
                Some(reason) => {
                    self.by_hand.push(ByHand { object: planned.source.key, reasons: vec![reason] });
                }
            }
        }
    }

    /// Objects with annotations of the tool that neither move nor belong to what is left to a person.
    fn leftovers(&self, context: &Context<'_>, objects: &BTreeMap<ObjectKey, Meta>) -> Vec<ObjectKey> {
        if context.only.is_some() {
            return Vec::new();
        }
        let subjects = |planned: &Move| {
            let copies = planned.copies.iter().map(|copy| copy.key.clone());
            std::iter::once(planned.source.key.clone()).chain(copies).collect::<Vec<_>>()
        };
        let known: BTreeSet<ObjectKey> = self.moves.iter().flat_map(subjects).collect();
        // A pushed copy has the name of its source.
        let by_hand: BTreeSet<_> =
            self.by_hand.iter().map(|item| (item.object.kind, &item.object.name)).collect();
        let is_left = |(key, meta): &(&ObjectKey, &Meta)| {
            !context.tool.annotations(meta).is_empty()
                && !known.contains(*key)
                && !by_hand.contains(&(key.kind, &key.name))
        };
        objects.iter().filter(is_left).map(|(key, _)| key.clone()).collect()
    }
}

impl Move {
    /// Where companions will be.
    pub fn places(&self) -> impl Iterator<Item = &ObjectKey> {
        self.copies.iter().map(|copy| &copy.key).chain(&self.creates)
    }
}

/// The values of `accept-adopt-from` with which all copies can be adopted, and the namespaces where there is none.
fn acceptances(
    context: &Context<'_>,
    namespaces: &BTreeMap<String, Meta>,
    moves: &[Move],
) -> (Vec<Acceptance>, BTreeSet<String>) {
    let mut homes: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for planned in moves {
        let home = &*planned.source.key.namespace;
        for copy in &planned.copies {
            if !context.world.namespaces().accepts_adoption(home, &copy.key.namespace) {
                homes.entry(&*copy.key.namespace).or_default().insert(home);
            }
        }
    }
    let (mut acceptances, mut refused) = (Vec::new(), BTreeSet::new());
    for (namespace, homes) in homes {
        let meta = namespaces.get(namespace);
        let before = meta.and_then(|meta| meta.annotations.get(&context.keys.accept_adopt_from).cloned());
        let known = before.iter().map(String::as_str).filter(|text| !text.trim().is_empty());
        let during = known.chain(homes.iter().copied()).collect::<Vec<_>>().join(",");
        let accepts =
            policy::namespace_patterns(&during).is_ok_and(|list| homes.iter().all(|home| list.matches(home)));
        match meta {
            Some(meta) if accepts => acceptances.push(Acceptance {
                namespace: namespace.to_owned(),
                uid: meta.uid.clone(),
                before,
                during,
            }),
            _ => drop(refused.insert(namespace.to_owned())),
        }
    }
    (acceptances, refused)
}

#[cfg(test)]
mod tests;
