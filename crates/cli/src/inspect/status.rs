//! PURE. A source and each of its companions: what is right, what is not, and why. Asks the same plan as the controller.

use std::{collections::BTreeMap, fmt};

use k8s_openapi::jiff::Timestamp;
use serde::{Serialize, Serializer};

use super::snapshot::{Snapshot, View};
use lockstep_core::{
    object::ObjectKey,
    plan::{
        Action, Decision, Holder, Place, Trouble, decide, first_difference,
        outcome::{Effect, Verb},
        places, plan,
    },
    policy::Targets,
    text::shorten,
    world::{Eligibility, Source, World},
};

/// How much of a message a state quotes.
const MAX_QUOTED_CHARS: usize = 200;

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SourceStatus {
    pub kind: &'static str,
    pub namespace: String,
    pub name: String,
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
    pub state: State,
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

/// The most important thing to know about a source. The variants are in the order in which they are looked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "kebab-case", rename_all_fields = "camelCase")]
pub enum State {
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

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct CompanionStatus {
    pub namespace: String,
    pub name: String,
    #[serde(flatten)]
    pub state: CompanionState,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub written: Option<Timestamp>,
}

/// What is known of one companion that a source wants or has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "state", content = "detail", rename_all = "kebab-case")]
pub enum CompanionState {
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

impl CompanionState {
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
        self.namespace != home && matches!(self.state, CompanionState::Unwanted(_))
    }

    /// `namespace/name`.
    pub fn place(&self) -> String {
        format!("{}/{}", self.namespace, self.name)
    }
}

impl State {
    /// Whether everything is as its author asked for.
    pub const fn is_healthy(&self) -> bool {
        matches!(self, Self::InStep | Self::BeingDeleted | Self::Paused { count: 0 })
    }
}

impl fmt::Display for State {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plural = |count: usize, one: &str, many: &str| match count {
            1 => format!("1 {one}"),
            _ => format!("{count} {many}"),
        };
        match self {
            Self::Refused { reason } => write!(f, "refused: {}", shorten(reason, MAX_QUOTED_CHARS)),
            Self::BeingDeleted => f.write_str("being deleted"),
            Self::SourceNotSeen => f.write_str("you may not see the source"),
            Self::DeletesHeld { count, until } => {
                write!(f, "{} held until {until:.0}", plural(*count, "delete", "deletes"))
            }
            Self::SourceGone { count } => {
                write!(f, "source gone, {} left", plural(*count, "companion", "companions"))
            }
            Self::Paused { count: 0 } => f.write_str("paused"),
            Self::Paused { count } => write!(f, "paused, {} behind", plural(*count, "change", "changes")),
            Self::Conflicts { count } => f.write_str(&plural(*count, "conflict", "conflicts")),
            Self::Behind { count } => write!(f, "{count} to write"),
            Self::NotSeen => f.write_str("not all seen"),
            Self::NoTarget { consent: false } => f.write_str("matches no namespace"),
            Self::NoTarget { consent: true } => f.write_str("no matching namespace has accepted it"),
            Self::MissingTargets { count } => {
                write!(f, "{} without a companion", plural(*count, "namespace", "namespaces"))
            }
            Self::InStep => f.write_str("in step"),
        }
    }
}

impl fmt::Display for CompanionState {
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

/// The status of one source, which may be gone. `held_until`: until when deletes are held, if any are.
pub fn source_status(snapshot: &Snapshot, key: &ObjectKey, held_until: Option<Timestamp>) -> SourceStatus {
    snapshot.world.read(|world| {
        let source = world.source(key);
        let plan = plan(world, key, None);
        let companions = companions(snapshot, world, key, source);
        let is_known = |trouble: &&Trouble| snapshot.view.can_tell(key.kind, trouble);
        let state = state(&snapshot.view, key, source, &companions, held_until);
        let written = companions.iter().filter_map(|companion| companion.written);
        SourceStatus {
            kind: key.kind.as_str(),
            namespace: key.namespace.to_string(),
            name: key.name.to_string(),
            targets: match source.map(|source| &source.desired) {
                Some(Ok(desired)) => describe_targets(&desired.policy.targets),
                _ => String::new(),
            },
            wanted: companions.iter().filter(|one| one.state.is_wanted()).count(),
            in_step: companions.iter().filter(|one| one.state == CompanionState::InStep).count(),
            not_seen: companions.iter().filter(|one| one.state == CompanionState::NotSeen).count(),
            changed: written.chain(snapshot.written(key)).max(),
            message: state.to_string(),
            troubles: plan.troubles.iter().filter(is_known).cloned().collect(),
            state,
            companions,
        }
    })
}

fn state(
    view: &View,
    key: &ObjectKey,
    source: Option<&Source>,
    companions: &[CompanionStatus],
    held_until: Option<Timestamp>,
) -> State {
    let count =
        |matches: fn(&CompanionState) -> bool| companions.iter().filter(|one| matches(&one.state)).count();
    let held = companions.iter().filter(|one| one.may_be_held(&key.namespace)).count();
    let held = held_until.filter(|_| held > 0).map(|until| State::DeletesHeld { count: held, until });
    let Some(source) = source else {
        if !view.sees_sources(key.kind, &key.namespace) {
            return State::SourceNotSeen;
        }
        return held.unwrap_or(State::SourceGone { count: companions.len() });
    };
    let policy = match &source.desired {
        Err(fault) => return State::Refused { reason: fault.to_string() },
        Ok(desired) => &desired.policy,
    };
    let behind = count(CompanionState::is_behind);
    let conflicts = count(|state| matches!(state, CompanionState::Conflict(_)));
    let missing = count(|state| {
        matches!(state, CompanionState::NoNamespace | CompanionState::Excluded | CompanionState::NotAccepted)
    });
    let not_seen = count(|state| matches!(state, CompanionState::NotSeen)) > 0
        || (policy.targets.has_patterns() && !view.sees_all_namespaces());
    if source.terminating {
        State::BeingDeleted
    } else if let Some(held) = held {
        held
    } else if policy.paused {
        State::Paused { count: behind + conflicts }
    } else if conflicts > 0 {
        State::Conflicts { count: conflicts }
    } else if behind > 0 {
        State::Behind { count: behind }
    } else if not_seen {
        State::NotSeen
    } else if missing > 0 {
        State::MissingTargets { count: missing }
    } else if companions.is_empty() && policy.targets.has_patterns() {
        State::NoTarget { consent: policy.targets.needs_consent }
    } else {
        State::InStep
    }
}

/// Every companion that a source wants or has.
fn companions(
    snapshot: &Snapshot,
    world: &World,
    key: &ObjectKey,
    source: Option<&Source>,
) -> Vec<CompanionStatus> {
    let status = |place: Place| {
        let state = place_state(snapshot, world, key, source, &place)?;
        let written = world.companion(&place.at).and_then(|_| snapshot.written(&place.at));
        let (namespace, name) = (place.at.namespace.to_string(), place.at.name.to_string());
        Some(CompanionStatus { namespace, name, state, written })
    };
    places(world, key, source, None, |at| snapshot.object(world, at)).filter_map(status).collect()
}

/// What people are told about a place: nothing where a companion was lost, where a pattern matches a namespace that takes
/// no companions, and where a companion would have the name of its source.
fn place_state(
    snapshot: &Snapshot,
    world: &World,
    key: &ObjectKey,
    source: Option<&Source>,
    Place { at, target, found, decision }: &Place,
) -> Option<CompanionState> {
    let is_seen = snapshot.view.sees_companions(key.kind, &at.namespace);
    let Some(found) = found else {
        let target = target.filter(|_| **at != *key)?;
        return match (target.eligibility, source) {
            _ if !is_seen => Some(CompanionState::NotSeen),
            (Eligibility::Eligible, Some(source)) => {
                Some(wanted_state(snapshot, world, source, at, decision))
            }
            (Eligibility::Terminating, _) => Some(CompanionState::NamespaceTerminating),
            _ if !target.explicit => None,
            (Eligibility::Never, _) => Some(CompanionState::Excluded),
            (Eligibility::NotAccepted, _) => Some(CompanionState::NotAccepted),
            (Eligibility::Missing | Eligibility::Eligible, _) => Some(CompanionState::NoNamespace),
        };
    };
    let sees_source = source.is_some() || snapshot.view.sees_sources(key.kind, &key.namespace);
    Some(match (target.map(|target| target.eligibility), source) {
        // Without the right to see namespaces, none exists for the world.
        _ if !is_seen => CompanionState::NotSeen,
        (Some(Eligibility::Eligible), Some(source)) => wanted_state(snapshot, world, source, at, decision),
        _ if found.terminating => CompanionState::BeingDeleted,
        _ if world.namespaces().is_gone_or_terminating(&at.namespace) => CompanionState::NamespaceTerminating,
        _ if !sees_source => CompanionState::NotSeen,
        _ => match decision {
            Decision::Change(Action::Delete { reason, .. } | Action::Release { reason, .. }) => {
                CompanionState::Unwanted(reason.as_str())
            }
            // Its source is malformed or being deleted.
            _ => CompanionState::Frozen,
        },
    })
}

/// The state of a place where a source wants a companion and may have it.
fn wanted_state(
    snapshot: &Snapshot,
    world: &World,
    source: &Source,
    at: &ObjectKey,
    decision: &Decision,
) -> CompanionState {
    let found = snapshot.object(world, at);
    match Effect::of(decision) {
        None if found.is_some_and(|found| found.terminating) => CompanionState::BeingDeleted,
        None => CompanionState::InStep,
        Some(Effect::Conflict(holder)) => CompanionState::Conflict(describe_holder(&holder)),
        Some(Effect::Change(Verb::Adopt, _)) => CompanionState::Adopting,
        Some(Effect::Change(..)) => {
            let difference = found.and_then(|found| first_difference(source, at, found));
            difference.map_or(CompanionState::Missing, |heal| CompanionState::Differs(heal.as_str()))
        }
    }
}

/// The state of one place where a source wants a companion and may have it.
pub fn companion_state(
    snapshot: &Snapshot,
    world: &World,
    source: &Source,
    at: &ObjectKey,
) -> CompanionState {
    let found = snapshot.object(world, at);
    let decision = decide(world, source, at, found, false);
    wanted_state(snapshot, world, source, at, &decision)
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
