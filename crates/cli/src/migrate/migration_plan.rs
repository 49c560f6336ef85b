//! PURE. What would move: sources with their copies, and what is left to the person. [`MigrationPlan::find`] needs only
//! metadata, and says which sources have to be read; [`MigrationPlan::add`] looks at one, with the controller's own
//! rules for adoption; [`MigrationPlan::finish`] looks at all of them together.

use std::collections::{BTreeMap, BTreeSet};

use super::{
    not_movable::NotMovable,
    tool::{NamespaceSelection, Tool, ToolRole},
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
    pub namespaces: &'a BTreeMap<String, Meta>,
    /// kubernetes-replicator ran with `--allow-all`.
    pub allow_all: bool,
    /// Sources whose `namespace/name` this pattern does not match are left out.
    pub only: Option<&'a Pattern>,
}

/// A source of the tool, and the copies that name it.
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
#[derive(Debug, PartialEq)]
pub struct Move {
    pub entry: SourceEntry,
    /// How many of the copies have other content than the source, and will get that of the source.
    pub outdated: usize,
    /// Targets without a copy: Lockstep creates one.
    pub creates: Vec<ObjectKey>,
    pub notes: Vec<String>,
}

/// What the person has to look at.
#[derive(Debug, PartialEq)]
pub struct ByHand {
    pub object: ObjectKey,
    pub reasons: Vec<NotMovable>,
}

#[derive(Debug, Default, PartialEq)]
pub struct MigrationPlan {
    pub moves: Vec<Move>,
    pub by_hand: Vec<ByHand>,
    /// Namespaces whose `accept-adopt-from` is extended while their copies are being adopted.
    pub namespaces: Vec<NamespaceEntry>,
}

impl MigrationPlan {
    /// The sources that may move, judged by metadata alone, and what is left to the person already.
    pub fn find(context: &Context<'_>, objects: &BTreeMap<ObjectKey, Meta>) -> (Self, Vec<ToolSource>) {
        let is_asked_for =
            |source: &ObjectKey| context.only.is_none_or(|pattern| pattern.matches(&source.to_string()));
        let (mut plan, mut sources) = (Self::default(), Vec::new());
        let mut pulled: BTreeMap<&ObjectKey, Vec<ObjectKey>> = BTreeMap::new();
        for (key, meta) in objects {
            let ToolRole::Copy { source, pulled: true } = context.tool.role(key.kind, meta) else { continue };
            if !is_asked_for(source.as_ref().unwrap_or(key)) {
                continue;
            }
            match source_of(context, objects, key, source) {
                Ok(source) => pulled.entry(source).or_default().push(key.clone()),
                Err(reason) => plan.leave(key, vec![reason]),
            }
        }
        for (key, meta) in objects.iter().filter(|(key, _)| is_asked_for(key)) {
            let pulled = pulled.remove(key).unwrap_or_default();
            let (push, copies_labels) = match context.tool.role(key.kind, meta) {
                ToolRole::Source { push, copies_labels } => (push, copies_labels),
                ToolRole::Nothing if !pulled.is_empty() => (Ok(NamespaceSelection::default()), false),
                ToolRole::Nothing | ToolRole::Copy { .. } => continue,
            };
            match push.and_then(|push| tool_source(key, push, pulled, copies_labels)) {
                Ok(source) => sources.push(source),
                Err(reason) => plan.leave(key, vec![reason]),
            }
        }
        (plan, sources)
    }

    /// Adds a source, or leaves it to the person. `found` are the source and the objects of its kind that have the name
    /// of its copies, in any namespace, as far as they exist.
    pub fn add(&mut self, context: &Context<'_>, of: &ToolSource, found: BTreeMap<ObjectKey, Object>) {
        match plan_move(context, of, found) {
            Ok(planned) => self.moves.push(planned),
            Err(reasons) => self.leave(&of.key, reasons),
        }
    }

    /// Leaves sources to the person that want the same copy as another one.
    pub fn finish(mut self, context: &Context<'_>) -> Self {
        let mut claims: BTreeMap<ObjectKey, Vec<ObjectKey>> = BTreeMap::new();
        for planned in &self.moves {
            for at in planned.places() {
                claims.entry(at.clone()).or_default().push(planned.entry.object.key.clone());
            }
        }
        for planned in std::mem::take(&mut self.moves) {
            let source = &planned.entry.object.key;
            let contested = planned.places().find_map(|at| {
                let other = claims[at].iter().find(|other| *other != source)?;
                Some(NotMovable::Contested { at: at.clone(), other: other.clone() })
            });
            match contested {
                None => self.moves.push(planned),
                Some(reason) => self.leave(source, vec![reason]),
            }
        }
        self.namespaces = extended_namespaces(context, &self.moves);
        self.by_hand.sort_by(|a, b| a.object.cmp(&b.object));
        self
    }

    fn leave(&mut self, object: &ObjectKey, reasons: Vec<NotMovable>) {
        self.by_hand.push(ByHand { object: object.clone(), reasons });
    }
}

impl Move {
    /// Where companions will be.
    fn places(&self) -> impl Iterator<Item = &ObjectKey> {
        self.entry.copies.iter().map(|copy| &copy.key).chain(&self.creates)
    }
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
    if matches!(context.tool.role(source.kind, meta), ToolRole::Copy { .. }) {
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

/// Whether a source and its copies can move.
fn plan_move(
    context: &Context<'_>,
    of: &ToolSource,
    mut found: BTreeMap<ObjectKey, Object>,
) -> Result<Move, Vec<NotMovable>> {
    let (keys, key) = (context.keys, &of.key);
    let source = found.remove(key).ok_or_else(|| vec![NotMovable::SourceMissing(key.clone())])?;
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
        ToolRole::Copy { source: of, pulled } if of.as_ref().is_none_or(|of| of == source) => pulled,
        ToolRole::Copy { .. } | ToolRole::Source { .. } | ToolRole::Nothing => {
            return Err(NotMovable::Foreign { at });
        }
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
    let (home, namespace) = (&*source.namespace, &*at.namespace);
    let accepts = context.world.namespaces().accepts_adoption(home, namespace);
    if !accepts && extended(context, namespace, &[home].into()).is_none() {
        let key = context.keys.accept_adopt_from.clone();
        return Err(NotMovable::Adoption { namespace: namespace.to_owned(), key });
    }
    let extra: Vec<String> = data_keys(&object).difference(source_keys).cloned().collect();
    let observed = ObservedCompanion::read(context.keys, source.kind, object);
    let found = observed.companion();
    let is_outdated = future.desired.as_ref().is_ok_and(|desired| desired.content != found.state.content);
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

/// The namespaces that do not accept the adoption of all copies yet, with an `accept-adopt-from` that does.
fn extended_namespaces(context: &Context<'_>, moves: &[Move]) -> Vec<NamespaceEntry> {
    let mut homes: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for SourceEntry { object, copies, .. } in moves.iter().map(|planned| &planned.entry) {
        for copy in copies {
            let (home, namespace) = (&object.key.namespace, &copy.key.namespace);
            if !context.world.namespaces().accepts_adoption(home, namespace) {
                homes.entry(namespace).or_default().insert(home);
            }
        }
    }
    homes.into_iter().filter_map(|(name, homes)| extended(context, name, &homes)).collect()
}

/// A namespace with an `accept-adopt-from` that accepts these as well; none if it cannot be extended.
fn extended(context: &Context<'_>, name: &str, homes: &BTreeSet<&str>) -> Option<NamespaceEntry> {
    let meta = context.namespaces.get(name)?;
    let before = meta.annotations.get(&context.keys.accept_adopt_from).cloned();
    let known = before.as_deref().filter(|text| !text.trim().is_empty());
    let during = known.into_iter().chain(homes.iter().copied()).collect::<Vec<_>>().join(",");
    let accepting = policy::namespace_patterns(&during).ok()?;
    let (name, uid) = (name.to_owned(), meta.uid.clone());
    homes.iter().all(|home| accepting.matches(home)).then_some(NamespaceEntry { name, uid, before, during })
}

#[cfg(test)]
mod tests;
