//! PURE. A source and each of its companions: what is right, what is not, and why. Asks the same plan as the
//! controller.

use std::{collections::BTreeMap, fmt};

use k8s_openapi::jiff::Timestamp;
use serde::{Serialize, Serializer};

use super::snapshot::{Snapshot, View};
use lockstep_core::{
    object::ObjectKey,
    plan::{
        Action, Decision, Holder, Place, Trouble, first_difference,
        outcome::{PlaceEffect, Verb},
        plan,
    },
    policy::Targets,
    text::{counted, shorten},
    world::{Eligibility, Source, World},
};

/// How much of a message a state quotes.
const MAX_QUOTED_CHARS: usize = 200;

#[derive(Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SourceStatus {
    #[serde(flatten)]
    pub key: ObjectKey,
    /// What it asks for, as in `target-namespaces`; the selector behind it.
    pub targets: String,
    /// How many companions it wants where they may exist, and how many of them are right.
    pub wanted: usize,
    pub in_step: usize,
    /// How many companions of the wanted ones this person may not see. They count in neither number.
    pub not_seen: usize,
    /// When the source, or one of its companions, was last written.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub changed: Option<Timestamp>,
    #[serde(flatten)]
    pub state: SourceHealth,
    pub healthy: bool,
    pub message: String,
    /// What its author should know, as in its Warning Events.
    #[serde(serialize_with = "reasons_and_messages")]
    pub troubles: Vec<Trouble>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub companions: Vec<CompanionStatus>,
}

fn reasons_and_messages<S: Serializer>(troubles: &[Trouble], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_seq(troubles.iter().map(|trouble| {
        BTreeMap::from([("reason", trouble.event_reason().to_owned()), ("message", trouble.to_string())])
    }))
}

/// A companion is of the kind of its source.
pub(super) fn without_kind<S: Serializer>(at: &ObjectKey, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.collect_map([("namespace", &at.namespace), ("name", &at.name)])
}

/// The most important thing to know about a source. The variants are in the order in which they are looked for.
#[derive(Debug, PartialEq, Serialize)]
#[serde(tag = "state", rename_all = "kebab-case", rename_all_fields = "camelCase")]
pub enum SourceHealth {
    /// It is malformed, or cannot be a source.
    Refused {
        reason: String,
    },
    /// It is being deleted: nothing is written for it.
    BeingDeleted,
    /// This person may not see whether it exists.
    SourceNotSeen,
    /// Deletes of its companions look like an accident, and are held.
    DeletesHeld {
        count: usize,
        until: Timestamp,
    },
    /// It does not exist, and this many companions of it do.
    SourceGone {
        count: usize,
    },
    /// This many companions do not follow it.
    Paused {
        count: usize,
    },
    /// In this many places another object has the name.
    Conflicts {
        count: usize,
    },
    /// The controller has not written or deleted this many companions yet.
    Behind {
        count: usize,
    },
    /// What this person sees is right, but not all of it can be seen.
    NotSeen,
    /// No namespace matches, or none of them has accepted it.
    NoTarget {
        consent: bool,
    },
    /// This many namespaces that it lists by name do not exist, or take no companions.
    MissingTargets {
        count: usize,
    },
    InStep,
}

#[derive(Debug, PartialEq, Serialize)]
pub struct CompanionStatus {
    #[serde(flatten, serialize_with = "without_kind")]
    pub at: ObjectKey,
    #[serde(flatten)]
    pub state: PlaceState,
    /// The state in words.
    pub message: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub written: Option<Timestamp>,
}

/// What is known of one companion that a source wants or has.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "state", content = "detail", rename_all = "kebab-case")]
pub enum PlaceState {
    InStep,
    Missing,
    /// It is there, and this differs from what it should be.
    Differs(&'static str),
    /// An object of that name is about to be taken over.
    Adopting,
    /// Another object has the name.
    Conflict(String),
    /// The source does not want it any more.
    Unwanted(&'static str),
    BeingDeleted,
    /// Its source is malformed, so that it stays as it is.
    Frozen,
    NoNamespace,
    NamespaceTerminating,
    /// The namespace is never a target.
    Excluded,
    /// The namespace has not accepted sources of that namespace.
    NotAccepted,
    /// This person may not see it.
    NotSeen,
}

impl PlaceState {
    /// Whether the controller has something to write or to delete there.
    const fn is_behind(&self) -> bool {
        matches!(self, Self::Missing | Self::Differs(_) | Self::Adopting | Self::Unwanted(_))
    }

    /// Whether the source wants a companion there, and may have it.
    const fn is_wanted(&self) -> bool {
        matches!(
            self,
            Self::InStep
                | Self::Missing
                | Self::Differs(_)
                | Self::Adopting
                | Self::Conflict(_)
                | Self::BeingDeleted
        )
    }
}

impl CompanionStatus {
    /// Whether it would be deleted, and its delete be held: companions beside their source never are.
    pub fn may_be_held(&self, home: &str) -> bool {
        *self.at.namespace != *home && matches!(self.state, PlaceState::Unwanted(_))
    }
}

impl SourceHealth {
    /// Whether everything is as its author asked for.
    const fn is_healthy(&self) -> bool {
        matches!(self, Self::InStep | Self::BeingDeleted | Self::Paused { count: 0 })
    }
}

impl fmt::Display for SourceHealth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused { reason } => write!(f, "refused: {}", shorten(reason, MAX_QUOTED_CHARS)),
            Self::BeingDeleted => f.write_str("being deleted"),
            Self::SourceNotSeen => f.write_str("you may not see the source"),
            Self::DeletesHeld { count, until } => {
                write!(f, "{} held until {until:.0}", counted(*count, "delete"))
            }
            Self::SourceGone { count } => {
                write!(f, "source gone, {} left", counted(*count, "companion"))
            }
            Self::Paused { count: 0 } => f.write_str("paused"),
            Self::Paused { count } => write!(f, "paused, {} behind", counted(*count, "change")),
            Self::Conflicts { count } => f.write_str(&counted(*count, "conflict")),
            Self::Behind { count } => write!(f, "{count} to write"),
            Self::NotSeen => f.write_str("not all seen"),
            Self::NoTarget { consent: false } => f.write_str("matches no namespace"),
            Self::NoTarget { consent: true } => f.write_str("no matching namespace has accepted it"),
            Self::MissingTargets { count } => {
                write!(f, "{} without a companion", counted(*count, "namespace"))
            }
            Self::InStep => f.write_str("in step"),
        }
    }
}

impl fmt::Display for PlaceState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InStep => f.write_str("in step"),
            Self::Missing => f.write_str("missing"),
            Self::Differs(what) => write!(f, "differs: {what}"),
            Self::Adopting => f.write_str("about to be adopted"),
            Self::Conflict(holder) => write!(f, "the name is held by {holder}"),
            Self::Unwanted(reason) => write!(f, "to be removed: {reason}"),
            Self::BeingDeleted => f.write_str("being deleted"),
            Self::Frozen => f.write_str("stays as it is while its source is refused"),
            Self::NoNamespace => f.write_str("the namespace does not exist"),
            Self::NamespaceTerminating => f.write_str("the namespace is being deleted"),
            Self::Excluded => f.write_str("the namespace is never a target"),
            Self::NotAccepted => f.write_str("the namespace has not accepted the source"),
            Self::NotSeen => f.write_str("not seen: you may not read it"),
        }
    }
}

/// The targets of a source in one line, as `target-namespaces` has them.
pub fn describe_targets(targets: &Targets) -> String {
    let own = targets.own.then(|| ".".to_owned());
    let patterns = targets.patterns.iter().map(ToString::to_string);
    let excluded = targets.excluded.iter().map(|pattern| format!("!{pattern}"));
    let mut parts: Vec<String> =
        own.into_iter().chain(targets.names.iter().cloned()).chain(patterns).chain(excluded).collect();
    if let Some(selector) = &targets.selector {
        parts.push(format!("({selector})"));
    }
    parts.join(",")
}

/// The status of every source that exists or has companions, in the order of their keys.
pub fn statuses(snapshot: &Snapshot, held_until: Option<Timestamp>) -> Vec<SourceStatus> {
    snapshot.sources().into_iter().map(|key| source_status(snapshot, key, held_until)).collect()
}

/// The status of one source, which may be gone. `held_until`: until when deletes are held, if any are.
fn source_status(snapshot: &Snapshot, key: ObjectKey, held_until: Option<Timestamp>) -> SourceStatus {
    snapshot.world.read(|world| {
        let source = world.source(&key);
        let companions = companions(snapshot, world, &key, source);
        let count = |is_counted: fn(&PlaceState) -> bool| {
            companions.iter().filter(|one| is_counted(&one.state)).count()
        };
        let mut troubles = plan(world, &key, None).troubles;
        troubles.retain(|trouble| snapshot.view.can_tell(key.kind, trouble));
        let state = state(&snapshot.view, &key, source, &companions, held_until);
        let written = companions.iter().filter_map(|companion| companion.written);
        SourceStatus {
            targets: source
                .and_then(|source| source.desired.as_ref().ok())
                .map_or_else(String::new, |desired| describe_targets(&desired.policy.targets)),
            wanted: count(PlaceState::is_wanted),
            in_step: count(|state| *state == PlaceState::InStep),
            not_seen: count(|state| *state == PlaceState::NotSeen),
            changed: written.chain(snapshot.written(&key)).max(),
            healthy: state.is_healthy(),
            message: state.to_string(),
            troubles,
            state,
            companions,
            key,
        }
    })
}

fn state(
    view: &View,
    key: &ObjectKey,
    source: Option<&Source>,
    companions: &[CompanionStatus],
    held_until: Option<Timestamp>,
) -> SourceHealth {
    let count =
        |matches: fn(&PlaceState) -> bool| companions.iter().filter(|one| matches(&one.state)).count();
    let held = companions.iter().filter(|one| one.may_be_held(&key.namespace)).count();
    let held = held_until.filter(|_| held > 0).map(|until| SourceHealth::DeletesHeld { count: held, until });
    let Some(source) = source else {
        if !view.sees_sources(key.kind, &key.namespace) {
            return SourceHealth::SourceNotSeen;
        }
        return held.unwrap_or(SourceHealth::SourceGone { count: companions.len() });
    };
    let policy = match &source.desired {
        Err(fault) => return SourceHealth::Refused { reason: fault.to_string() },
        Ok(desired) => &desired.policy,
    };
    let behind = count(PlaceState::is_behind);
    let conflicts = count(|state| matches!(state, PlaceState::Conflict(_)));
    let missing = count(|state| {
        matches!(state, PlaceState::NoNamespace | PlaceState::Excluded | PlaceState::NotAccepted)
    });
    let not_seen = count(|state| matches!(state, PlaceState::NotSeen)) > 0
        || (policy.targets.has_patterns() && !view.sees_all_namespaces());
    if source.terminating {
        SourceHealth::BeingDeleted
    } else if let Some(held) = held {
        held
    } else if policy.paused {
        SourceHealth::Paused { count: behind + conflicts }
    } else if conflicts > 0 {
        SourceHealth::Conflicts { count: conflicts }
    } else if behind > 0 {
        SourceHealth::Behind { count: behind }
    } else if not_seen {
        SourceHealth::NotSeen
    } else if missing > 0 {
        SourceHealth::MissingTargets { count: missing }
    } else if companions.is_empty() && policy.targets.has_patterns() {
        SourceHealth::NoTarget { consent: policy.targets.needs_consent }
    } else {
        SourceHealth::InStep
    }
}

/// Every companion that a source wants or has.
fn companions(
    snapshot: &Snapshot,
    world: &World,
    key: &ObjectKey,
    source: Option<&Source>,
) -> Vec<CompanionStatus> {
    let status = |place: Place<'_>| {
        let state = place_state(snapshot, world, key, source, &place)?;
        let at = place.at.into_owned();
        let written = world.companion(&at).and_then(|_| snapshot.written(&at));
        Some(CompanionStatus { at, message: state.to_string(), state, written })
    };
    snapshot.places(world, key, source).filter_map(status).collect()
}

/// What people are told about a place: nothing where a companion was lost, where a pattern matches a namespace that
/// takes no companions, and where a companion would have the name of its source.
fn place_state(
    snapshot: &Snapshot,
    world: &World,
    key: &ObjectKey,
    source: Option<&Source>,
    place: &Place<'_>,
) -> Option<PlaceState> {
    let Place { at, target, found, decision } = place;
    let target = target.filter(|_| found.is_some() || **at != *key);
    if target.is_none() && found.is_none() {
        return None;
    }
    // Without the right to see namespaces, none exists for the world.
    if !snapshot.view.sees_companions(key.kind, &at.namespace) {
        return Some(PlaceState::NotSeen);
    }
    if let (Some(Eligibility::Eligible), Some(source)) = (target.map(|target| target.eligibility), source) {
        return Some(wanted_state(snapshot, world, source, place));
    }
    let Some(found) = found else {
        let target = target?;
        return match target.eligibility {
            Eligibility::Terminating => Some(PlaceState::NamespaceTerminating),
            _ if !target.explicit => None,
            Eligibility::Never => Some(PlaceState::Excluded),
            Eligibility::NotAccepted => Some(PlaceState::NotAccepted),
            Eligibility::Missing | Eligibility::Eligible => Some(PlaceState::NoNamespace),
        };
    };
    Some(match decision {
        _ if found.state.terminating => PlaceState::BeingDeleted,
        _ if world.namespaces().is_gone_or_terminating(&at.namespace) => PlaceState::NamespaceTerminating,
        _ if source.is_none() && !snapshot.view.sees_sources(key.kind, &key.namespace) => PlaceState::NotSeen,
        Decision::Change(Action::Delete { reason, .. } | Action::Release { reason, .. }) => {
            PlaceState::Unwanted(reason.as_str())
        }
        // Its source is malformed or being deleted.
        _ => PlaceState::Frozen,
    })
}

/// The state of a place where a source wants a companion and may have it.
pub(super) fn wanted_state(
    snapshot: &Snapshot,
    world: &World,
    source: &Source,
    Place { at, decision, .. }: &Place<'_>,
) -> PlaceState {
    let found = snapshot.object(world, at);
    match PlaceEffect::of(decision) {
        None if found.is_some_and(|found| found.state.terminating) => PlaceState::BeingDeleted,
        None => PlaceState::InStep,
        Some(PlaceEffect::Conflict(holder)) => PlaceState::Conflict(describe_holder(&holder)),
        Some(PlaceEffect::Change(Verb::Adopt, _)) => PlaceState::Adopting,
        Some(PlaceEffect::Change(..)) => {
            let difference = found.and_then(|found| first_difference(source, at, found));
            difference.map_or(PlaceState::Missing, |heal| PlaceState::Differs(heal.as_str()))
        }
    }
}

pub fn describe_holder(holder: &Holder) -> String {
    match holder {
        Holder::Foreign => "an object that is not managed by Lockstep".to_owned(),
        Holder::Companion { of } => format!("the companion of {of}"),
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests;
