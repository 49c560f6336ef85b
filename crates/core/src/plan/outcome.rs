//! What would become of the companions of a source in some state: the webhook tells it in the warning of a dry
//! run, `lockstep plan` as text or JSON.

use serde::Serialize;

use super::{Action, Change, Decision, Holder, Trouble, WriteReason, plan_as};
use crate::{
    object::ObjectKey,
    world::{Source, World},
};

/// How the webhook's warning begins.
pub const WARNING: &str = "lockstep plan: ";

#[derive(Debug, Default)]
pub struct Outcome {
    pub effects: Vec<(ObjectKey, PlaceEffect)>,
    /// All but conflicts, which are effects.
    pub troubles: Vec<Trouble>,
    /// How many creates may meet an object that nobody has looked for.
    pub not_checked: usize,
}

/// What becomes of one companion.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PlaceEffect {
    Change(Verb, &'static str),
    Conflict(Holder),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verb {
    Create,
    Update,
    Recreate,
    Adopt,
    Delete,
    Release,
    Conflict,
}

impl Outcome {
    /// For a source as it is or would be; none if it is gone.
    pub fn of(world: &World, key: &ObjectKey, source: Option<&Source>) -> Self {
        let plan = plan_as(world, key, source, None);
        let mut outcome = Self::default();
        for Change { at, action } in plan.changes {
            outcome.effects.extend(PlaceEffect::of_action(&action).map(|effect| (at, effect)));
        }
        for trouble in plan.troubles {
            match trouble {
                Trouble::Conflict { at, holder } => outcome.effects.push((at, PlaceEffect::Conflict(holder))),
                other => outcome.troubles.push(other),
            }
        }
        outcome
    }

    /// The companions that are created unless an object that the world does not know has their name.
    pub fn creates(&self) -> impl Iterator<Item = &ObjectKey> {
        self.effects.iter().filter(|(_, effect)| effect.verb() == Verb::Create).map(|(at, _)| at)
    }

    /// Replaces each create by what happens, if anything, given what has its name: `look` returns that, or none if
    /// nobody has looked.
    pub fn complete(&mut self, look: impl Fn(&ObjectKey) -> Option<Option<PlaceEffect>>) {
        self.effects.retain_mut(|(at, effect)| {
            let found = if effect.verb() == Verb::Create { look(at) } else { return true };
            self.not_checked += usize::from(found.is_none());
            let now = found.unwrap_or_else(|| Some(effect.clone()));
            now.map(|now| *effect = now).is_some()
        });
    }
}

impl Verb {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Create => "create",
            Self::Update => "update",
            Self::Recreate => "recreate",
            Self::Adopt => "adopt",
            Self::Delete => "delete",
            Self::Release => "release",
            Self::Conflict => "conflict",
        }
    }
}

impl PlaceEffect {
    pub const CREATED: Self = Self::Change(Verb::Create, "new");
    pub const ADOPTED: Self = Self::Change(Verb::Adopt, "an object of that name is taken over");

    /// None if nothing happens that anybody asks about.
    pub fn of(decision: &Decision) -> Option<Self> {
        match decision {
            Decision::Change(action) => Self::of_action(action),
            Decision::Trouble(Trouble::Conflict { holder, .. }) => Some(Self::Conflict(holder.clone())),
            Decision::Trouble(_) | Decision::Nothing => None,
        }
    }

    fn of_action(action: &Action) -> Option<Self> {
        let (verb, reason) = match action {
            Action::Create { reason } => (Verb::Create, *reason),
            Action::Update { reason, .. } => (Verb::Update, *reason),
            Action::Recreate { reason, .. } => (Verb::Recreate, *reason),
            Action::Delete { reason, .. } => return Some(Self::Change(Verb::Delete, reason.as_str())),
            Action::Release { reason, .. } => return Some(Self::Change(Verb::Release, reason.as_str())),
            Action::DeleteLost { .. } => return None,
        };
        match reason {
            WriteReason::New => Some(Self::Change(verb, "new")),
            WriteReason::SourceChanged => Some(Self::Change(verb, "source changed")),
            WriteReason::Adopted => Some(Self::ADOPTED),
            WriteReason::Healed(_) => Some(Self::Change(verb, "changed by somebody else")),
        }
    }

    pub const fn verb(&self) -> Verb {
        match self {
            Self::Change(verb, _) => *verb,
            Self::Conflict(_) => Verb::Conflict,
        }
    }
}
