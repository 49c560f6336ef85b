//! PURE. A source and the world in, the changes that are missing out: none when all is right.

use std::fmt;

use crate::{
    marks,
    object::ObjectKey,
    policy::{Fault, Targets},
    world::state::{Admission, Companion, Source, World},
};

/// What is missing for one source.
#[derive(Debug, Default)]
pub struct Plan {
    pub changes: Vec<Change>,
    pub troubles: Vec<Trouble>,
}

/// One write, or a delete and a create for [`Action::Replace`].
#[derive(Debug, Clone)]
pub struct Change {
    pub at: ObjectKey,
    pub action: Action,
}

/// `known` is the state that the change was decided on: the write is good for exactly that state.
#[derive(Debug, Clone)]
pub enum Action {
    Create { why: Why },
    Update { why: Why, known: Box<Companion> },
    Replace { why: Why, known: Box<Companion> },
    Delete { why: Removal, known: Box<Companion> },
}

/// Why a companion is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Why {
    New,
    SourceChanged,
    Adopted,
    Healed(Heal),
}

/// What had happened to a companion that had to be put right.
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

/// Why a companion is deleted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Removal {
    SourceGone,
    NotWanted,
}

/// What keeps a source from having what it asks for. Its message is the text of a Warning Event.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Trouble {
    #[error("{0}")]
    Fault(Fault),
    #[error("{at}: the name is held by {holder}; nothing was overwritten")]
    Conflict { at: ObjectKey, holder: Holder },
    #[error(
        "namespace {namespace} takes no companions from {home} until its accept-from annotation names it"
    )]
    NotAccepted { namespace: String, home: String },
    #[error("namespace {0} is excluded and never a target")]
    Excluded(String),
    #[error("{at}: the API server calls it invalid: {detail}; it is tried again when the source changes")]
    Invalid { at: ObjectKey, detail: String },
    #[error("{at}: not allowed: {detail}")]
    Forbidden { at: ObjectKey, detail: String },
    #[error("{at}: {manager} undoes us again and again ({times} times); healing it less often")]
    Fight { at: ObjectKey, manager: String, times: u32 },
    #[error(
        "{companions} companions of {sources} sources would go at once, more than half of all: they stay until {until}, in case this is an accident"
    )]
    Accident { companions: usize, sources: usize, until: String },
}

/// Who holds a name that a source wants for its companion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Holder {
    /// Not ours, and not to be adopted.
    Foreign,
    /// Not ours, and `adopt` does not reach it: it is controlled by something else, a finalizer waits for it, it is
    /// itself a source, or it is going.
    Bound,
    /// Not ours, in a namespace that does not accept from ours.
    NotAccepting,
    Companion {
        of: ObjectKey,
    },
}

/// What to do about one place where a companion should be.
#[derive(Debug)]
pub enum Decision {
    Nothing,
    Change(Change),
    Trouble(Trouble),
}

/// A namespace that a source asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target<'a> {
    pub namespace: &'a str,
    pub admission: Admission,
    /// The source lists the namespace by name; no pattern or selector merely matches it.
    pub outright: bool,
}

/// The namespaces that sources of `home` with these targets ask for, in order, whether or not they get a companion.
pub fn targets<'a>(
    world: &'a World,
    home: &'a str,
    targets: &'a Targets,
) -> impl Iterator<Item = Target<'a>> {
    world.wanted_namespaces(home, targets).into_iter().map(move |namespace| Target {
        namespace,
        admission: world.admission(home, namespace),
        outright: targets.names_explicitly(home, namespace),
    })
}

impl Target<'_> {
    /// Why there is no companion in a namespace that the source lists by name. A pattern may match a namespace that
    /// takes no companions: that is no trouble.
    #[must_use]
    pub fn trouble(&self, home: &str) -> Option<Trouble> {
        let namespace = || self.namespace.to_owned();
        match self.admission {
            Admission::NotAccepted if self.outright => {
                Some(Trouble::NotAccepted { namespace: namespace(), home: home.to_owned() })
            }
            Admission::Never if self.outright => Some(Trouble::Excluded(namespace())),
            Admission::NotAccepted | Admission::Never | Admission::Absent | Admission::Admitted => None,
        }
    }
}

/// Plans for one source. `settled` says that its companions were right for the source as it is now, so that
/// whatever differs was done to them.
#[must_use]
pub fn plan(world: &World, key: &ObjectKey, settled: bool) -> Plan {
    let mut plan = Plan::default();
    let Some(source) = world.source(key) else {
        plan.remove_all(world, key, Removal::SourceGone, |_| true);
        return plan;
    };
    if source.terminating {
        return plan;
    }
    let wish = match &source.wish {
        Ok(wish) => wish,
        Err(fault) => {
            plan.troubles.push(Trouble::Fault(fault.clone()));
            return plan;
        }
    };
    if wish.policy.paused {
        return plan;
    }

    let home = &*key.namespace;
    let mut places = std::collections::BTreeSet::new();
    for target in targets(world, home, &wish.policy.targets) {
        let at = ObjectKey::new(key.kind, target.namespace, &wish.policy.companion);
        match target.admission {
            Admission::Absent => {
                // What is there goes with the namespace; it is not ours to delete meanwhile.
                places.insert(at);
            }
            Admission::NotAccepted | Admission::Never => plan.troubles.extend(target.trouble(home)),
            // A pattern reached the source itself.
            Admission::Admitted if at == *key => {}
            Admission::Admitted => {
                let found = world.companion(&at);
                match decide(source, &at, found, Seen::by(world, source, &at, found, settled)) {
                    Decision::Nothing => {}
                    Decision::Change(change) => plan.changes.push(change),
                    Decision::Trouble(trouble) => plan.troubles.push(trouble),
                }
                places.insert(at);
            }
        }
    }
    plan.remove_all(world, key, Removal::NotWanted, |at| !places.contains(at));
    plan
}

/// What the world knows about a place, besides what stands there.
#[derive(Debug, Clone, Copy)]
pub struct Seen {
    pub settled: bool,
    /// A companion was here and vanished.
    pub lost: bool,
    /// The namespace has said that it takes what the source's namespace brings.
    pub accepts: bool,
    /// What stands there names no source, and no other that wants the place comes before this one.
    pub first: bool,
}

/// Decides about one place, given what stands there: as the world knows it, or as it was just read.
#[must_use]
pub fn decide(source: &Source, at: &ObjectKey, found: Option<&Companion>, seen: Seen) -> Decision {
    let Ok(wish) = &source.wish else { return Decision::Nothing };
    let change = |action| Decision::Change(Change { at: at.clone(), action });
    let Some(found) = found else {
        return change(Action::Create { why: if seen.lost { Why::Healed(Heal::Deleted) } else { Why::New } });
    };
    let known = || Box::new(found.clone());
    match whose(source, found, seen.first) {
        Ownership::Ours => {}
        Ownership::Other(of) => {
            return Decision::Trouble(Trouble::Conflict { at: at.clone(), holder: Holder::Companion { of } });
        }
        Ownership::Foreign => {
            let holder = if !wish.policy.adopt {
                Holder::Foreign
            } else if found.controller_uid.is_some()
                || found.is_source
                || found.finalizers
                || found.terminating
            {
                Holder::Bound
            } else if !seen.accepts {
                Holder::NotAccepting
            } else if must_replace(source, found) {
                return change(Action::Replace { why: Why::Adopted, known: known() });
            } else {
                return change(Action::Update { why: Why::Adopted, known: known() });
            };
            return Decision::Trouble(Trouble::Conflict { at: at.clone(), holder });
        }
    }
    if found.terminating {
        // It goes, and comes back when it is gone. Only a finalizer that somebody added can hold it up.
        return if found.finalizers {
            change(Action::Update { why: Why::Healed(Heal::Finalizer), known: known() })
        } else {
            Decision::Nothing
        };
    }
    let Some(heal) = difference(source, at, found) else { return Decision::Nothing };
    let edited = seen.settled || (found.content != wish.content && !found.intact);
    let why = if edited { Why::Healed(heal) } else { Why::SourceChanged };
    if must_replace(source, found) {
        change(Action::Replace { why, known: known() })
    } else {
        change(Action::Update { why, known: known() })
    }
}

impl Seen {
    /// What a world knows about a place where a source wants a companion.
    #[must_use]
    pub fn by(
        world: &World,
        source: &Source,
        at: &ObjectKey,
        found: Option<&Companion>,
        settled: bool,
    ) -> Self {
        let nobodys = found.is_some_and(|found| found.source.is_none());
        Self {
            settled,
            lost: world.was_lost(at),
            accepts: world.accepts(&source.key.namespace, &at.namespace),
            first: nobodys && world.is_first_in_line(&source.key, at),
        }
    }
}

enum Ownership {
    Ours,
    Other(ObjectKey),
    Foreign,
}

/// Whose an object is, by its marks. Our label alone is no proof, and our entry in managedFields names no source and
/// outlives our marks: the two together count, where nobody else owns the object, for the first that wants it. What
/// names a source is never one itself; what names none may be, and then it is no companion, whoever wrote an
/// ownerReference on it.
fn whose(source: &Source, found: &Companion, first: bool) -> Ownership {
    match (&found.source, &found.controller_uid) {
        (Some(named), _) if *named == source.key => Ownership::Ours,
        (Some(named), _) => Ownership::Other(named.clone()),
        (None, _) if found.is_source => Ownership::Foreign,
        (None, Some(owner)) if *owner == source.uid => Ownership::Ours,
        (None, None) if found.labelled && found.written_by_us && first => Ownership::Ours,
        (None, _) => Ownership::Foreign,
    }
}

/// What is wrong with a companion, the gravest first; `None` when it is as it should be.
fn difference(source: &Source, at: &ObjectKey, found: &Companion) -> Option<Heal> {
    let wish = source.wish.as_ref().ok()?;
    let owners = marks::expected_owners(&source.key, &source.uid, &at.namespace);
    if found.content != wish.content {
        Some(if found.type_.as_deref() != wish.payload.type_.as_deref() {
            Heal::Type
        } else if found.immutable != wish.payload.immutable {
            Heal::Immutable
        } else {
            Heal::Content
        })
    } else if !found.labelled {
        Some(Heal::Label)
    } else if found.marks != wish.marks_digest {
        Some(Heal::Marks)
    } else if found.owners != marks::owners_digest(&owners) {
        Some(Heal::Owner)
    } else if found.finalizers {
        Some(Heal::Finalizer)
    } else {
        None
    }
}

/// What the API server does not let an update change: immutable content, and a Secret's type.
fn must_replace(source: &Source, found: &Companion) -> bool {
    source.wish.as_ref().is_ok_and(|wish| {
        (found.immutable && found.content != wish.content)
            || found.type_.as_deref() != wish.payload.type_.as_deref()
    })
}

impl Action {
    /// What was planned before and could not be done is no heal now.
    pub fn count_as_no_heal(&mut self) {
        match self {
            Self::Create { why } if matches!(why, Why::Healed(_)) => *why = Why::New,
            Self::Update { why, .. } | Self::Replace { why, .. } if matches!(why, Why::Healed(_)) => {
                *why = Why::SourceChanged;
            }
            _ => {}
        }
    }

    /// Who else wrote last what is to be put right.
    #[must_use]
    pub fn other_manager(&self) -> Option<String> {
        match self {
            Self::Create { .. } => None,
            Self::Update { known, .. } | Self::Replace { known, .. } | Self::Delete { known, .. } => {
                known.other_manager.clone()
            }
        }
    }
}

impl Plan {
    fn remove_all(
        &mut self,
        world: &World,
        source: &ObjectKey,
        why: Removal,
        gone: impl Fn(&ObjectKey) -> bool,
    ) {
        let doomed = world
            .companions_of(source)
            .filter(|(at, found)| gone(at) && !found.terminating && !world.is_going(&at.namespace));
        self.changes.extend(doomed.map(|(at, found)| Change {
            at: at.clone(),
            action: Action::Delete { why, known: Box::new(found.clone()) },
        }));
    }

    #[must_use]
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

    /// The word for it in logs, Events and metrics.
    #[must_use]
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
}

impl Removal {
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::SourceGone => "source gone",
            Self::NotWanted => "no longer a target",
        }
    }
}

impl Trouble {
    /// Whether this is the same trouble as another, though its text may differ: it is told once.
    #[must_use]
    pub fn is_same_as(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Fight { at, manager, .. }, Self::Fight { at: other, manager: same, .. }) => {
                at == other && manager == same
            }
            (Self::Accident { .. }, Self::Accident { .. }) => true,
            _ => self == other,
        }
    }

    /// The reason of its Warning Event.
    #[must_use]
    pub const fn event_reason(&self) -> &'static str {
        match self {
            Self::Fault(_) => "Refused",
            Self::Conflict { .. } => "Conflict",
            Self::NotAccepted { .. } | Self::Excluded(_) => "NotAccepted",
            Self::Invalid { .. } => "Invalid",
            Self::Forbidden { .. } => "Forbidden",
            Self::Fight { .. } => "Fight",
            Self::Accident { .. } => "DeletesHeld",
        }
    }

    /// The `reason` label of metrics.
    #[must_use]
    pub const fn label(&self) -> &'static str {
        match self {
            Self::Fault(fault) => fault.label(),
            Self::Conflict { .. } => "conflict",
            Self::NotAccepted { .. } => "not_accepted",
            Self::Excluded(_) => "excluded",
            Self::Invalid { .. } => "invalid",
            Self::Forbidden { .. } => "forbidden",
            Self::Fight { .. } => "fight",
            Self::Accident { .. } => "accident",
        }
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Foreign => f.write_str("an object that is not ours (adopt=true would take it over)"),
            Self::Bound => {
                f.write_str("an object that another controller owns or waits for, or that is itself a source")
            }
            Self::NotAccepting => f.write_str(
                "an object that is not ours, in a namespace whose accept-from does not let us adopt it",
            ),
            Self::Companion { of } => write!(f, "the companion of {of}"),
        }
    }
}

#[cfg(test)]
mod tests;
