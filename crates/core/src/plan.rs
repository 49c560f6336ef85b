//! A source and the world in, the missing changes out: none when every companion is right.
//!
//! [`plan`] covers a whole source. [`plan_companion`] covers one of its companions, with the same rules: the controller
//! asks it once more just before a write, so that what is written is what the source wants at that moment.

pub mod outcome;
mod trouble;

pub use trouble::{Holder, Trouble};

use std::{borrow::Cow, cell::LazyCell};

use crate::{
    object::ObjectKey,
    policy::{MAX_QUOTED_CHARS, Targets, content::Digest},
    text::shorten,
    world::{Companion, Eligibility, LostCompanion, Source, World, uid_digest},
};

/// What is missing for one source.
#[derive(Debug, Default)]
pub struct Plan {
    pub changes: Vec<Change>,
    pub troubles: Vec<Trouble>,
    /// How many companions the source asks for, in namespaces that take them.
    pub wanted: usize,
    /// How many of those do not have what the source has: they are missing, differ, or their name is taken.
    pub out_of_step: usize,
}

/// One write; for [`Action::Recreate`], a delete and a create.
#[derive(Debug, Clone)]
pub struct Change {
    pub at: ObjectKey,
    pub action: Action,
}

/// `known` is the state that the change was decided on; the write is conditional on it.
#[derive(Debug, Clone)]
pub enum Action {
    Create {
        reason: WriteReason,
    },
    Update {
        reason: WriteReason,
        known: Box<Companion>,
    },
    Recreate {
        reason: WriteReason,
        known: Box<Companion>,
    },
    Delete {
        reason: DeleteReason,
        known: Box<Companion>,
    },
    /// Takes our marks off a companion and leaves the object to its namespace.
    Release {
        reason: DeleteReason,
        known: Box<Companion>,
    },
    /// Looks for a companion that no watch shows. If it is there, another plan deletes it.
    DeleteLost {
        reason: DeleteReason,
        lost: Box<LostCompanion>,
    },
}

/// Why a companion is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WriteReason {
    New,
    SourceChanged,
    Adopted,
    Healed(Heal),
}

/// What somebody did to a companion that has to be undone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Heal {
    Deleted,
    Content,
    Type,
    Immutable,
    Label,
    Marks,
    Owner,
    Finalizer,
}

/// A change after which an object does not exist, or is no companion any more. It cannot be undone, so the source is
/// read live first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Removal {
    /// The brake is asked first, too.
    Delete,
    Release,
}

/// Why a companion is deleted or released.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum DeleteReason {
    SourceGone,
    /// The source exists and has lost its label. Only a live read can tell.
    Unlabelled,
    NotWanted,
}

/// What to do about one companion.
#[derive(Debug)]
pub enum Decision {
    Nothing,
    Change(Action),
    Trouble(Trouble),
}

/// A namespace that a source asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target<'a> {
    pub namespace: &'a str,
    pub eligibility: Eligibility,
    /// The source lists the namespace by name, not just with a pattern or selector that matches it.
    pub explicit: bool,
}

/// The namespaces that sources of `home` with these targets ask for, in order of their names, whether or not they get a
/// companion.
pub fn targets<'a>(
    world: &'a World,
    home: &'a str,
    targets: &'a Targets,
) -> impl Iterator<Item = Target<'a>> {
    world.namespaces().wanted(home, targets).into_iter().map(move |namespace| Target {
        namespace,
        eligibility: world.namespaces().eligibility(home, namespace, targets),
        explicit: targets.names_explicitly(home, namespace),
    })
}

impl Target<'_> {
    /// Why there is no companion in a namespace that the source lists by name. A pattern may match a namespace that
    /// takes no companions: that is no trouble.
    pub fn trouble(&self, world: &World, home: &str) -> Option<Trouble> {
        let namespace = || self.namespace.to_owned();
        match self.eligibility {
            _ if !self.explicit => None,
            Eligibility::NotAccepted => Some(Trouble::NotAccepted {
                namespace: namespace(),
                home: home.to_owned(),
                command: world.namespaces().how_to_accept(home, self.namespace),
            }),
            Eligibility::Never => Some(Trouble::Excluded(namespace())),
            Eligibility::Missing => Some(Trouble::NoNamespace(namespace())),
            Eligibility::Terminating | Eligibility::Eligible => None,
        }
    }
}

/// Patterns and selectors of sources of `home` that match nothing.
pub(crate) fn unmatched(world: &World, home: &str, targets: &Targets) -> impl Iterator<Item = Trouble> {
    let consent = targets.needs_consent;
    let trouble =
        move |pattern: String| Trouble::NoMatch { pattern: shorten(&pattern, MAX_QUOTED_CHARS), consent };
    world.namespaces().unmatched(home, targets).into_iter().map(trouble)
}

/// A place where a source wants a companion, has one, or had one that is lost.
#[derive(Debug)]
pub struct Place<'a> {
    pub at: Cow<'a, ObjectKey>,
    /// The namespace as a target; none if the source does not want a companion here, or not any more.
    pub target: Option<Target<'a>>,
    /// The companion that is there.
    pub found: Option<&'a Companion>,
    pub decision: Decision,
}

/// Every place of a source, in order, and what there is to do: what the controller carries out, and what people are
/// shown. A source that is being deleted keeps what it has. `source` may be in another state than the world knows, and
/// `object` returns what has a name where no companion of the source does.
pub fn places<'a>(
    world: &'a World,
    key: &'a ObjectKey,
    source: Option<&'a Source>,
    in_step: Option<Digest>,
    object: impl Fn(&ObjectKey) -> Option<&'a Companion>,
) -> impl Iterator<Item = Place<'a>> {
    let planner = Planner { world, key, source, in_step };
    let policy = source.filter(|source| !source.terminating).and_then(Source::policy);
    let name = policy.map_or("", |policy| &policy.companion);
    // One copy for all companions that are missing.
    let shared_name = LazyCell::new(|| world.shared_name(name));
    let targets = policy.map(|policy| targets(world, &key.namespace, &policy.targets));
    let mut targets = targets.into_iter().flatten().peekable();
    let mut companions = world.companions_of(key).peekable();
    let mut lost = world.lost_of(key).peekable();
    std::iter::from_fn(move || {
        let of = |at: &'a ObjectKey| (&*at.namespace, &*at.name);
        let next = [
            targets.peek().map(|target| (target.namespace, name)),
            companions.peek().map(|(at, _)| of(at)),
            lost.peek().map(|at| of(at)),
        ];
        let next = next.into_iter().flatten().min()?;
        let target = targets.next_if(|target| (target.namespace, name) == next);
        let ours = companions.next_if(|(at, _)| of(at) == next);
        let lost = lost.next_if(|at| of(at) == next);
        let at = match ours.map(|(at, _)| at).or(lost) {
            Some(at) => Cow::Borrowed(at),
            None => Cow::Owned(ObjectKey {
                kind: key.kind,
                namespace: world.shared_name(next.0),
                name: shared_name.clone(),
            }),
        };
        let found = ours.map(|(_, found)| found);
        let eligibility = target.map(|target| target.eligibility);
        let decision = planner.decide(&at, eligibility, found, || found.or_else(|| object(&at)));
        Some(Place { at, target, found, decision })
    })
}

/// Plans for one source. `in_step` is the source's digest when nothing was left to write for it: while the
/// source still has that digest, a companion that differs was changed by somebody else, and its update is a heal.
pub fn plan(world: &World, key: &ObjectKey, in_step: Option<Digest>) -> Plan {
    plan_as(world, key, world.source(key), in_step)
}

/// As [`plan`], for a source in another state than the world knows, or that does not exist.
fn plan_as(world: &World, key: &ObjectKey, source: Option<&Source>, in_step: Option<Digest>) -> Plan {
    let mut plan = Plan::default();
    let home = &*key.namespace;
    let present = source.filter(|source| !source.terminating);
    match present.map(|source| (source, &source.desired)) {
        Some((source, Ok(desired))) => {
            plan.troubles.extend(source.mistakes.iter().cloned().map(Trouble::Mistake));
            plan.troubles.extend(unmatched(world, home, &desired.policy.targets));
        }
        Some((_, Err(fault))) => plan.troubles.push(Trouble::Fault(fault.clone())),
        None => {}
    }
    for Place { at, target, decision, .. } in places(world, key, source, in_step, |at| world.companion(at)) {
        if let Some(target) = target {
            plan.troubles.extend(target.trouble(world, home));
            if target.eligibility == Eligibility::Eligible && *at != *key {
                plan.wanted += 1;
                plan.out_of_step += usize::from(!matches!(decision, Decision::Nothing));
            }
        }
        match decision {
            Decision::Nothing => {}
            Decision::Change(action) => plan.changes.push(Change { at: at.into_owned(), action }),
            Decision::Trouble(trouble) => plan.troubles.push(trouble),
        }
    }
    if present.and_then(Source::policy).is_some_and(|policy| policy.paused) {
        plan.pause(|at| world.eligibility(key, source, &at.namespace).is_refusal());
    }
    plan
}

/// The part of [`plan`] about one companion.
pub fn plan_companion(world: &World, key: &ObjectKey, at: &ObjectKey, in_step: Option<Digest>) -> Decision {
    let policy = world.policy(key);
    if policy.is_some_and(|policy| policy.paused) && !world.is_refused(key, &at.namespace) {
        return Decision::Nothing;
    }
    let wanted = policy.filter(|_| world.wants_at(key, at));
    let eligibility =
        wanted.map(|policy| world.namespaces().eligibility(&key.namespace, &at.namespace, &policy.targets));
    let there = world.companion(at);
    let ours = there.filter(|found| found.state.source.as_ref() == Some(key));
    Planner { world, key, source: world.source(key), in_step }.decide(at, eligibility, ours, || there)
}

/// What decisions about all places of a source depend on.
struct Planner<'a> {
    world: &'a World,
    key: &'a ObjectKey,
    source: Option<&'a Source>,
    in_step: Option<Digest>,
}

impl Planner<'_> {
    /// Decides about one place. `wanted`: whether the source may have a companion in the namespace, if it wants one
    /// here. `ours` is the companion that is there, `there` the object, whosever it is.
    fn decide<'a>(
        &self,
        at: &ObjectKey,
        wanted: Option<Eligibility>,
        ours: Option<&Companion>,
        there: impl FnOnce() -> Option<&'a Companion>,
    ) -> Decision {
        let Some(source) = self.source else { return self.remove(at, ours, DeleteReason::SourceGone) };
        match wanted {
            _ if source.terminating => Decision::Nothing,
            Some(Eligibility::Missing | Eligibility::Terminating) => Decision::Nothing,
            // A pattern matches the source's own namespace, and the companion has the source's name.
            Some(Eligibility::Eligible) if at == self.key => Decision::Nothing,
            Some(Eligibility::Eligible) => {
                decide(self.world, source, at, there(), self.in_step == Some(source.digest))
            }
            _ if source.desired.is_err() => match ours {
                // It belongs to a source that had the name of this one and another UID. The marks that say so are ours
                // only if we wrote them.
                Some(found)
                    if found.state.written_by_us
                        && found.state.source_uid.is_some_and(|uid| uid != uid_digest(&source.uid)) =>
                {
                    self.remove(at, ours, DeleteReason::SourceGone)
                }
                Some(_) if self.refuses(at) => self.remove(at, ours, DeleteReason::NotWanted),
                Some(_) => Decision::Nothing,
                None => self.remove(at, None, DeleteReason::SourceGone),
            },
            Some(Eligibility::NotAccepted | Eligibility::Never) | None => {
                self.remove(at, ours, DeleteReason::NotWanted)
            }
        }
    }

    /// Deletes or releases a companion, unless it is being deleted already, alone or with its namespace. Where the
    /// namespace takes no companions, nothing stays. Without a companion, looks for a lost one.
    fn remove(&self, at: &ObjectKey, ours: Option<&Companion>, reason: DeleteReason) -> Decision {
        let Some(found) = ours else {
            let lost = self.world.unwanted_lost_at(self.key, at);
            return lost.map_or(Decision::Nothing, |lost| {
                Decision::Change(Action::DeleteLost { reason, lost: Box::new(lost.clone()) })
            });
        };
        if found.state.terminating || self.world.namespaces().is_gone_or_terminating(&at.namespace) {
            return Decision::Nothing;
        }
        let known = Box::new(found.clone());
        let stays =
            !self.refuses(at) && World::is_kept(self.source, found.state.source_uid, found.state.keep);
        Decision::Change(if stays {
            Action::Release { reason, known }
        } else {
            Action::Delete { reason, known }
        })
    }

    /// Whether the namespace takes no companions of the source.
    fn refuses(&self, at: &ObjectKey) -> bool {
        self.world.eligibility(self.key, self.source, &at.namespace).is_refusal()
    }
}

/// Decides about one companion, given the object of that name: as the world knows it, or as it was just read.
/// `in_step`: all companions of the source, as it is now, were right.
pub fn decide(
    world: &World,
    source: &Source,
    at: &ObjectKey,
    found: Option<&Companion>,
    in_step: bool,
) -> Decision {
    let Ok(desired) = &source.desired else { return Decision::Nothing };
    let Some(found) = found else {
        let reason = if world.was_lost(at) { WriteReason::Healed(Heal::Deleted) } else { WriteReason::New };
        return Decision::Change(Action::Create { reason });
    };
    let known = || Box::new(found.clone());
    let write = |reason| {
        Decision::Change(if must_recreate(source, found) {
            Action::Recreate { reason, known: known() }
        } else {
            Action::Update { reason, known: known() }
        })
    };
    let holder = match ownership(source, found, || world.is_first_wanting(&source.key, at)) {
        Ownership::Ours => None,
        Ownership::Other(of) => Some(Holder::Companion { of }),
        Ownership::Foreign if !desired.policy.adopt => Some(Holder::Foreign),
        Ownership::Foreign if !can_be_adopted(found) => Some(Holder::Bound),
        Ownership::Foreign => {
            if world.namespaces().accepts_adoption(&source.key.namespace, &at.namespace) {
                return write(WriteReason::Adopted);
            }
            Some(Holder::NotAccepting)
        }
    };
    if let Some(holder) = holder {
        return Decision::Trouble(Trouble::Conflict { at: at.clone(), holder });
    }
    if found.state.terminating {
        // The companion is created again once it is deleted. Only a finalizer that somebody added can delay that.
        return if found.state.finalizers {
            let reason = WriteReason::Healed(Heal::Finalizer);
            Decision::Change(Action::Update { reason, known: known() })
        } else {
            Decision::Nothing
        };
    }
    let Some(heal) = first_difference(source, at, found) else { return Decision::Nothing };
    let edited = in_step || (found.state.content != desired.content && !found.state.intact);
    write(if edited { WriteReason::Healed(heal) } else { WriteReason::SourceChanged })
}

/// Whether nothing but the consent of its namespace keeps a foreign object from being adopted.
pub fn can_be_adopted(found: &Companion) -> bool {
    found.state.controller_uid.is_none()
        && !found.state.is_source
        && !found.state.finalizers
        && !found.state.terminating
}

enum Ownership {
    Ours,
    Other(ObjectKey),
    Foreign,
}

/// Whether an object is a companion, and of which source, by its marks.
///
/// Our label alone proves nothing, because anybody can set it. Our entry in managedFields alone proves nothing, because
/// it names no source and outlives our marks. Both together prove that an object without a controller is a companion,
/// of the first source that wants it; so do our entry and the UID of the source. An object that names a source is a
/// companion, never a source. An object that names none may be a source, and then no ownerReference makes it a
/// companion.
fn ownership(source: &Source, found: &Companion, is_first_wanting: impl FnOnce() -> bool) -> Ownership {
    match (&found.state.source, &found.state.controller_uid) {
        (Some(named), _) if *named == source.key => Ownership::Ours,
        (Some(named), _) => Ownership::Other(named.clone()),
        (None, _) if found.state.is_source => Ownership::Foreign,
        (None, Some(owner)) if **owner == *source.uid => Ownership::Ours,
        (None, None) if found.state.labelled && found.state.written_by_us && is_first_wanting() => {
            Ownership::Ours
        }
        (None, None)
            if found.state.written_by_us && found.state.source_uid == Some(uid_digest(&source.uid)) =>
        {
            Ownership::Ours
        }
        (None, _) => Ownership::Foreign,
    }
}

/// The most serious difference between a companion and what its source wants; `None` when there is none.
pub fn first_difference(source: &Source, at: &ObjectKey, found: &Companion) -> Option<Heal> {
    let desired = source.desired.as_ref().ok()?;
    if found.state.content != desired.content {
        Some(if found.state.type_ != desired.type_ {
            Heal::Type
        } else if found.state.immutable != desired.immutable {
            Heal::Immutable
        } else {
            Heal::Content
        })
    } else if !found.state.labelled {
        Some(Heal::Label)
    } else if found.state.marks != desired.marks {
        Some(Heal::Marks)
    } else if found.state.owners != source.expected_owners_digest(&at.namespace) {
        Some(Heal::Owner)
    } else {
        found.state.finalizers.then_some(Heal::Finalizer)
    }
}

/// The API server lets no update change immutable content or a Secret's type: delete and create.
pub fn must_recreate(source: &Source, found: &Companion) -> bool {
    source.desired.as_ref().is_ok_and(|desired| {
        (found.state.immutable && found.state.content != desired.content)
            || found.state.type_ != desired.type_
    })
}

impl Action {
    /// Counts a heal as an ordinary write: an earlier attempt at it failed, so nothing was undone since.
    pub(crate) fn without_heal(mut self) -> Self {
        if self.is_heal() {
            match &mut self {
                Self::Create { reason } => *reason = WriteReason::New,
                Self::Update { reason, .. } | Self::Recreate { reason, .. } => {
                    *reason = WriteReason::SourceChanged;
                }
                Self::Delete { .. } | Self::Release { .. } | Self::DeleteLost { .. } => {}
            }
        }
        self
    }

    /// Why it sends content; none if it does not.
    pub(crate) const fn write_reason(&self) -> Option<WriteReason> {
        match self {
            Self::Create { reason } | Self::Update { reason, .. } | Self::Recreate { reason, .. } => {
                Some(*reason)
            }
            Self::Delete { .. } | Self::Release { .. } | Self::DeleteLost { .. } => None,
        }
    }

    /// What has to be approved before it is carried out; none for writes, and for a first look at a lost companion.
    pub const fn removal(&self) -> Option<Removal> {
        match self {
            Self::Delete { .. } => Some(Removal::Delete),
            Self::DeleteLost { lost, .. } if lost.is_found() => Some(Removal::Delete),
            Self::Release { .. } => Some(Removal::Release),
            Self::Create { .. } | Self::Update { .. } | Self::Recreate { .. } | Self::DeleteLost { .. } => {
                None
            }
        }
    }

    pub const fn is_heal(&self) -> bool {
        matches!(self.write_reason(), Some(WriteReason::Healed(_)))
    }

    /// Whether it is a heal, or may turn out to be one: a create may meet a companion that has lost its label.
    pub const fn may_heal(&self) -> bool {
        self.is_heal() || matches!(self, Self::Create { .. })
    }

    /// The field manager, other than ours, that last wrote the object.
    pub(crate) fn other_manager(&self) -> Option<&str> {
        match self {
            Self::Create { .. } | Self::DeleteLost { .. } => None,
            Self::Update { known, .. }
            | Self::Recreate { known, .. }
            | Self::Delete { known, .. }
            | Self::Release { known, .. } => known.state.other_manager.as_deref(),
        }
    }
}

impl Plan {
    /// Nothing is written while a source is paused, except that namespaces that refuse it lose their companions.
    fn pause(&mut self, is_refused: impl Fn(&ObjectKey) -> bool) {
        self.troubles.retain(|trouble| !matches!(trouble, Trouble::Conflict { .. }));
        let planned = self.changes.len();
        self.changes.retain(|change| change.action.write_reason().is_none() && is_refused(&change.at));
        let waiting = planned - self.changes.len();
        if waiting > 0 {
            self.troubles.push(Trouble::Paused(waiting));
        }
    }

    /// The companions that it deletes.
    pub fn deletes(&self) -> impl Iterator<Item = &ObjectKey> {
        let is_delete = |change: &&Change| change.action.removal() == Some(Removal::Delete);
        self.changes.iter().filter(is_delete).map(|change| &change.at)
    }

    pub fn is_empty(&self) -> bool {
        self.changes.is_empty() && self.troubles.is_empty()
    }
}

impl Heal {
    pub const ALL: [Self; 8] = [
        Self::Deleted,
        Self::Content,
        Self::Type,
        Self::Immutable,
        Self::Label,
        Self::Marks,
        Self::Owner,
        Self::Finalizer,
    ];

    /// Its name in logs, Events and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Deleted => "deleted",
            Self::Content => "content",
            Self::Type => "type",
            Self::Immutable => "immutable",
            Self::Label => "label",
            Self::Marks => "marks",
            Self::Owner => "owner",
            Self::Finalizer => "finalizer",
        }
    }

    /// The part of a companion that differs, as a message calls it.
    const fn of_object(self) -> &'static str {
        match self {
            Self::Deleted | Self::Content => "its data",
            Self::Type => "its type",
            Self::Immutable => "`immutable`",
            Self::Label => "Lockstep's companion label",
            Self::Marks => "labels or annotations that Lockstep sets",
            Self::Owner => "its ownerReferences",
            Self::Finalizer => "its finalizers",
        }
    }
}

impl DeleteReason {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::SourceGone => "source gone",
            Self::Unlabelled => "no longer labelled",
            Self::NotWanted => "no longer a target",
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
