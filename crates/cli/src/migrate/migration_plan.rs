//! PURE. What would move: sources with their copies, and what is left to the person. [`find_sources`] needs only
//! metadata, and says which objects have to be read; [`plan_move`] looks at these, with the controller's own rules for
//! adoption.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    not_movable::NotMovable,
    tool::{NamespaceSelection, Role, Tool},
    undo_file::{NamespaceEntry, ObjectEntry, SourceEntry},
};
use lockstep_core::{
    keys::Keys,
    object::{Meta, Object, ObjectKey},
    plan::{can_be_adopted, must_recreate, targets},
    policy::{self, pattern::Pattern},
    world::{Eligibility, ObservedCompanion, ObservedSource, Source, World},
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

/// A source of the tool, and the copies that name it.
#[derive(Debug, PartialEq, Eq)]
pub struct ToolSource {
    pub key: ObjectKey,
    push: NamespaceSelection,
    /// Copies that people created, to be filled from this source.
    pulled: Vec<ObjectKey>,
    /// The name of all its copies.
    pub copy_name: String,
    copies_labels: bool,
}

/// A source that moves, and its copies.
#[derive(Debug, PartialEq, Eq)]
pub struct Move {
    pub entry: SourceEntry,
    /// How many of the copies have other content than the source, and will get that of the source.
    pub outdated: usize,
    /// Targets without a copy: Lockstep creates one.
    pub creates: Vec<ObjectKey>,
    pub notes: Vec<String>,
}

/// What the person has to look at.
#[derive(Debug, PartialEq, Eq)]
pub struct ByHand {
    pub object: ObjectKey,
    pub reasons: Vec<NotMovable>,
}

#[derive(Debug, Default, PartialEq, Eq)]
pub struct MigrationPlan {
    pub moves: Vec<Move>,
    pub by_hand: Vec<ByHand>,
    /// Namespaces whose `accept-adopt-from` is extended while their copies are being adopted.
    pub namespaces: Vec<NamespaceEntry>,
}

/// The sources that may move, judged by metadata alone, and what is left to the person already.
pub fn find_sources(
    context: &Context<'_>,
    objects: &BTreeMap<ObjectKey, Meta>,
) -> (Vec<ToolSource>, Vec<ByHand>) {
    let is_asked_for =
        |source: &ObjectKey| context.only.is_none_or(|pattern| pattern.matches(&source.to_string()));
    let mut by_hand = Vec::new();
    let mut leave = |object: &ObjectKey, reason| {
        by_hand.push(ByHand { object: object.clone(), reasons: vec![reason] });
    };
    let mut pulled: BTreeMap<&ObjectKey, Vec<ObjectKey>> = BTreeMap::new();
    for (key, meta) in objects {
        let Role::Copy { source, pulled: true } = context.tool.role(key.kind, meta) else { continue };
        if !is_asked_for(source.as_ref().unwrap_or(key)) {
            continue;
        }
        match source_of(context, objects, key, source) {
            Ok(source) => pulled.entry(source).or_default().push(key.clone()),
            Err(reason) => leave(key, reason),
        }
    }
    let mut sources = Vec::new();
    for (key, meta) in objects.iter().filter(|(key, _)| is_asked_for(key)) {
        let pulled = pulled.remove(key).unwrap_or_default();
        let (push, copies_labels) = match context.tool.role(key.kind, meta) {
            Role::Source { push, copies_labels } => (push, copies_labels),
            Role::Nothing if !pulled.is_empty() => (Ok(NamespaceSelection::default()), false),
            Role::Nothing | Role::Copy { .. } => continue,
        };
        match push.and_then(|push| tool_source(key, push, pulled, copies_labels)) {
            Ok(source) => sources.push(source),
            Err(reason) => leave(key, reason),
        }
    }
    (sources, by_hand)
}

/// The source of a copy that pulls, if it may.
fn source_of<'a>(
    context: &Context<'_>,
    objects: &'a BTreeMap<ObjectKey, Meta>,
    copy: &ObjectKey,
    source: Option<ObjectKey>,
) -> Result<&'a ObjectKey, NotMovable> {
    let source = source.ok_or(NotMovable::NoSource)?;
    let Some((key, meta)) = objects.get_key_value(&source) else {
        return Err(NotMovable::SourceMissing(source));
    };
    if matches!(context.tool.role(source.kind, meta), Role::Copy { .. }) {
        return Err(NotMovable::SourceIsCopy(source));
    }
    match context.tool.permitted(source.kind, meta, context.allow_all) {
        Ok(permitted) if permitted.matches(context.world.namespaces(), &copy.namespace) => Ok(key),
        Ok(_) => Err(NotMovable::NotPermitted(source)),
        Err(reason) => Err(NotMovable::OfSource(source, Box::new(reason))),
    }
}

fn tool_source(
    key: &ObjectKey,
    push: NamespaceSelection,
    pulled: Vec<ObjectKey>,
    copies_labels: bool,
) -> Result<ToolSource, NotMovable> {
    let mut names: BTreeSet<&str> = pulled.iter().map(|copy| &*copy.name).collect();
    names.extend((!push.is_empty()).then_some(&*key.name));
    let copy_name = match names.into_iter().collect::<Vec<_>>()[..] {
        [] => return Err(NotMovable::NobodyPulls),
        [name] => name.to_owned(),
        ref several => return Err(NotMovable::Names(several.join(", "))),
    };
    let copies_labels = copies_labels && !push.is_empty();
    Ok(ToolSource { key: key.clone(), push, pulled, copy_name, copies_labels })
}

/// Whether a source and its copies can move. `found` are the objects of its kind that have the name of its copies, in
/// any namespace, as far as they exist.
pub fn plan_move(
    context: &Context<'_>,
    of: &ToolSource,
    source: Object,
    mut found: BTreeMap<ObjectKey, Object>,
) -> Result<Move, Vec<NotMovable>> {
    let (keys, key) = (context.keys, &of.key);
    let meta = &source.metadata;
    if meta.is_terminating() {
        return Err(vec![NotMovable::Terminating]);
    }
    if meta.labels.keys().chain(meta.annotations.keys()).any(|key| keys.is_ours(key)) {
        return Err(vec![NotMovable::AlreadyOurs]);
    }
    let object = ObjectEntry::new(key, meta, context.tool);
    let written = annotations(context, of).ok_or_else(|| vec![NotMovable::NoTargets])?;
    let mut notes = Vec::new();
    notes.extend(manager(meta).map(|by| {
        format!("it is part of {by}: make the same change there, or the next update brings the old annotations back")
    }));
    if of.copies_labels && !of.pulled.is_empty() {
        notes.push("its pulled copies get the labels of the source, too".to_owned());
    }
    let source_keys = data_keys(&source);

    // The object as it will be.
    let mut future = source;
    future.metadata.annotations.retain(|key, _| !object.removed.contains_key(key));
    future.metadata.annotations.extend(written.clone());
    future.metadata.labels.insert(keys.managed.clone(), "true".to_owned());
    let namespaces = context.world.namespaces();
    let future = ObservedSource::read(keys, namespaces.rules(), key.kind, future).source;
    let desired = future.desired.as_ref().map_err(|fault| vec![NotMovable::Fault(fault.clone())])?;

    let (mut copies, mut creates, mut outdated) = (Vec::new(), Vec::new(), 0);
    let mut reasons = Vec::new();
    for target in targets(context.world, &key.namespace, &desired.policy.targets) {
        let at = ObjectKey::new(key.kind, target.namespace, &of.copy_name);
        if at == *key {
            continue;
        }
        let object = found.remove(&at);
        let is_needed = target.explicit || object.is_some();
        match target.eligibility {
            Eligibility::Terminating => {}
            Eligibility::Missing => notes.push(format!("namespace {} does not exist", target.namespace)),
            Eligibility::Never if *target.namespace == namespaces.rules().own_namespace => {
                notes.extend(object.map(|_| {
                    format!(
                        "{at} is in Lockstep's own namespace and stays as it is, without updates: delete it"
                    )
                }));
            }
            Eligibility::Never if is_needed => reasons.push(NotMovable::Excluded { at }),
            Eligibility::NotAccepted if is_needed => {
                let command = namespaces.how_to_accept(&key.namespace, target.namespace);
                reasons.push(NotMovable::NotAccepted { at, command });
            }
            Eligibility::Never | Eligibility::NotAccepted => {}
            Eligibility::Eligible => match object {
                None => creates.push(at),
                Some(object) => {
                    let entry = ObjectEntry::new(&at, &object.metadata, context.tool);
                    match adoption(context, &future, &source_keys, at, object) {
                        Ok(is_outdated) => {
                            copies.push(entry);
                            outdated += usize::from(is_outdated);
                        }
                        Err(reason) => reasons.push(reason),
                    }
                }
            },
        }
    }
    let entry = SourceEntry { object, written, copies };
    if reasons.is_empty() { Ok(Move { entry, outdated, creates, notes }) } else { Err(reasons) }
}

/// Whether the controller would adopt this object in place, and whether that changes its content.
fn adoption(
    context: &Context<'_>,
    future: &Source,
    source_keys: &BTreeSet<String>,
    at: ObjectKey,
    object: Object,
) -> Result<bool, NotMovable> {
    let source = &future.key;
    let meta = &object.metadata;
    let is_pulled = match context.tool.role(source.kind, meta) {
        Role::Copy { source: of, pulled } if of.as_ref().is_none_or(|of| of == source) => pulled,
        Role::Copy { .. } | Role::Source { .. } | Role::Nothing => return Err(NotMovable::Foreign { at }),
    };
    // A pushed copy has labels of its source: only what a person created is known to be managed by a tool.
    if let Some(by) = manager(meta).filter(|_| is_pulled) {
        return Err(NotMovable::ManagedCopy { at, by });
    }
    if context.keys.has_marks(meta) {
        return Err(NotMovable::Companion { at });
    }
    // The controller refuses only a controlling owner. It removes others, which may be what somebody relies on.
    if !meta.owner_references.is_empty() {
        return Err(NotMovable::Bound { at });
    }
    let extra: Vec<String> = data_keys(&object).difference(source_keys).cloned().collect();
    let observed = ObservedCompanion::read(context.keys, source.kind, object);
    let found = observed.companion();
    let is_outdated = future.desired.as_ref().is_ok_and(|desired| desired.content != found.content);
    // `accept-adopt-from` is set before, and taken back afterwards.
    if !can_be_adopted(found) {
        Err(NotMovable::Bound { at })
    } else if must_recreate(future, found) {
        Err(NotMovable::Recreate { at })
    } else if !extra.is_empty() {
        Err(NotMovable::ExtraKeys { at, keys: extra.join(", ") })
    } else {
        Ok(is_outdated)
    }
}

fn data_keys(object: &Object) -> BTreeSet<String> {
    [&object.data, &object.binary_data].into_iter().flatten().flat_map(BTreeMap::keys).cloned().collect()
}

/// Our annotations for a source; none if it names no target.
fn annotations(context: &Context<'_>, of: &ToolSource) -> Option<BTreeMap<String, String>> {
    let (keys, home) = (context.keys, &*of.key.namespace);
    let mut list: Vec<&str> =
        of.push.patterns.iter().map(Pattern::as_str).filter(|pattern| *pattern != home).collect();
    for copy in &of.pulled {
        if *copy.namespace == *home {
            list.push(".");
        } else if !policy::pattern::any_matches(&of.push.patterns, &copy.namespace) {
            list.push(&copy.namespace);
        }
    }
    let mut ours = BTreeMap::new();
    if !list.is_empty() {
        ours.insert(keys.target_namespaces.clone(), list.join(","));
    }
    ours.extend(of.push.selector.clone().map(|selector| (keys.target_selector.clone(), selector)));
    if ours.is_empty() {
        return None;
    }
    ours.insert(keys.adopt.clone(), "true".to_owned());
    if of.copy_name == *of.key.name {
        ours.insert(keys.companion_name.clone(), "=".to_owned());
    } else if of.copy_name != format!("{}{}", of.key.name, keys.suffix) {
        ours.insert(keys.companion_name.clone(), of.copy_name.clone());
    }
    if of.copies_labels {
        ours.insert(keys.copy_labels.clone(), "*".to_owned());
    }
    // When a source is deleted, Reflector leaves copies that people created.
    if context.tool == Tool::Reflector && of.push.is_empty() {
        ours.insert(keys.when_removed.clone(), "keep".to_owned());
    }
    Some(ours)
}

/// What writes an object, by the marks that it leaves.
fn manager(meta: &Meta) -> Option<String> {
    let annotation = |key: &str| meta.annotations.get(key);
    if let Some(name) = annotation("meta.helm.sh/release-name") {
        Some(format!("the Helm release {name}"))
    } else if annotation("argocd.argoproj.io/tracking-id").is_some() {
        Some("an Argo CD application".to_owned())
    } else if let Some(name) = meta.labels.get("kustomize.toolkit.fluxcd.io/name") {
        Some(format!("the Flux Kustomization {name}"))
    } else {
        let name = annotation("cert-manager.io/certificate-name")?;
        Some(format!("the Certificate {name} (secretTemplate)"))
    }
}

impl MigrationPlan {
    /// Puts together what was planned for each source. Two sources that want the same copy are left to the person.
    pub fn new(
        context: &Context<'_>,
        namespaces: &BTreeMap<String, Meta>,
        moves: Vec<Move>,
        by_hand: Vec<ByHand>,
    ) -> Self {
        let mut plan = Self { moves, by_hand, namespaces: Vec::new() };
        let mut claims: BTreeMap<ObjectKey, Vec<ObjectKey>> = BTreeMap::new();
        for planned in &plan.moves {
            for at in planned.places() {
                claims.entry(at).or_default().push(planned.entry.object.key());
            }
        }
        plan.leave(|planned| {
            let source = planned.entry.object.key();
            planned.places().find_map(|at| {
                let other = claims[&at].iter().find(|other| **other != source)?.clone();
                Some(NotMovable::Contested { at, other })
            })
        });
        let extended = extended_namespaces(context, namespaces, &plan.moves);
        plan.leave(|planned| {
            let mut copies = planned.entry.copies.iter().map(|copy| &copy.namespace);
            let namespace = copies.find(|name| extended.get(*name).is_some_and(Option::is_none))?.clone();
            Some(NotMovable::Adoption { namespace, key: context.keys.accept_adopt_from.clone() })
        });
        plan.namespaces = extended.into_values().flatten().collect();
        plan.by_hand.sort_by(|a, b| a.object.cmp(&b.object));
        plan
    }

    /// Leaves the sources to the person for which there is a reason.
    fn leave(&mut self, reason: impl Fn(&Move) -> Option<NotMovable>) {
        for planned in std::mem::take(&mut self.moves) {
            match reason(&planned) {
                None => self.moves.push(planned),
                Some(reason) => {
                    self.by_hand.push(ByHand { object: planned.entry.object.key(), reasons: vec![reason] });
                }
            }
        }
    }
}

impl Move {
    /// Where companions will be.
    fn places(&self) -> impl Iterator<Item = ObjectKey> {
        self.entry.copies.iter().map(ObjectEntry::key).chain(self.creates.iter().cloned())
    }
}

/// The namespaces that do not accept the adoption of all copies yet, with an `accept-adopt-from` that does; none where
/// it cannot be extended.
fn extended_namespaces(
    context: &Context<'_>,
    namespaces: &BTreeMap<String, Meta>,
    moves: &[Move],
) -> BTreeMap<String, Option<NamespaceEntry>> {
    let mut homes: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for SourceEntry { object, copies, .. } in moves.iter().map(|planned| &planned.entry) {
        for copy in copies {
            if !context.world.namespaces().accepts_adoption(&object.namespace, &copy.namespace) {
                homes.entry(&copy.namespace).or_default().insert(&object.namespace);
            }
        }
    }
    let extended = homes.into_iter().map(|(name, homes)| {
        let meta = namespaces.get(name);
        let before = meta.and_then(|meta| meta.annotations.get(&context.keys.accept_adopt_from).cloned());
        let known = before.as_deref().filter(|text| !text.trim().is_empty());
        let during = known.into_iter().chain(homes.iter().copied()).collect::<Vec<_>>().join(",");
        let accepts =
            policy::namespace_patterns(&during).is_ok_and(|list| homes.iter().all(|home| list.matches(home)));
        let entry = meta.filter(|_| accepts).map(|meta| {
            let (name, uid) = (name.to_owned(), meta.uid.clone());
            NamespaceEntry { name, uid, before, during }
        });
        (name.to_owned(), entry)
    });
    extended.collect()
}

#[cfg(test)]
mod tests;
