//! One change at one place: the write, what it finds there, and what becomes of it.

use super::{
    ledger::Pace,
    pass::{Inner, Pass},
};
use crate::{
    client::Failure,
    object::ObjectKey,
    plan::{Action, Change, Decision, Heal, Removal, Seen, Trouble, Why, decide},
    world::state::{Found, Source},
};

/// What became of one change.
pub(super) struct Outcome {
    pub(super) at: ObjectKey,
    pub(super) result: Result<Option<Done>, Setback>,
}

/// A write that succeeded.
pub(super) struct Done {
    pub(super) deed: Deed,
    /// Who had undone it, for heals.
    pub(super) manager: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Deed {
    Created,
    Updated,
    Adopted,
    Healed(Heal),
    Deleted(Removal),
}

/// A write that did not.
pub(super) enum Setback {
    /// The world was behind: plan again when it has caught up.
    Behind,
    /// Try this place again later.
    Obstacle { trouble: Option<Trouble>, pace: Pace, failure: Option<Failure> },
}

/// What the API server says about a source before its companions are deleted.
#[derive(PartialEq, Eq)]
enum Live {
    Gone,
    /// It is there and no longer asks for companions.
    Unmanaged,
    /// It is just as the world has it.
    AsKnown,
    /// The world is behind.
    Newer,
}

/// What an attempt leads to.
enum Step {
    Finished(Option<Deed>),
    Next(Action),
}

impl Inner {
    /// Reads the source live, once, and leaves of these deletes what may really go. `Err(None)`: the world is behind.
    pub(super) async fn confirmed(
        &self,
        pass: &Pass,
        deletes: Vec<Change>,
    ) -> Result<Vec<Change>, Option<Failure>> {
        if deletes.is_empty() {
            return Ok(deletes);
        }
        let live = match (self.writer.get(&pass.key).await, &pass.source) {
            (Err(Failure::NotFound), None) => Live::Gone,
            (Ok(object), None) => {
                let managed = self.keys.is_source(&object.metadata.labels);
                if managed { Live::Newer } else { Live::Unmanaged }
            }
            (Ok(object), Some(source)) if object.metadata.resource_version == source.resource_version => {
                Live::AsKnown
            }
            (Ok(_) | Err(Failure::NotFound), Some(_)) => Live::Newer,
            (Err(failure), _) => return Err(Some(failure)),
        };
        match live {
            Live::Newer => Err(None),
            Live::Unmanaged | Live::AsKnown => Ok(deletes),
            // What the source owns, the garbage collector takes.
            Live::Gone => Ok(deletes
                .into_iter()
                .filter(
                    |change| !matches!(&change.action, Action::Delete { known, .. } if known.owned_by_source),
                )
                .collect()),
        }
    }

    /// Carries out one change. A create that finds something there looks at it and decides again.
    pub(super) async fn write(&self, pass: &Pass, change: Change) -> Outcome {
        let Change { at, mut action } = change;
        let mut manager = None;
        // Create finds something; that must be replaced; the create after that may find something again.
        for _ in 0..4 {
            manager = action.other_manager().or(manager);
            match self.attempt(pass, &at, action).await {
                Ok(Step::Finished(deed)) => {
                    return Outcome { at, result: Ok(deed.map(|deed| Done { deed, manager })) };
                }
                Ok(Step::Next(next)) => action = next,
                Err(setback) => return Outcome { at, result: Err(setback) },
            }
        }
        Outcome { at, result: Err(Setback::Behind) }
    }

    async fn attempt(&self, pass: &Pass, at: &ObjectKey, action: Action) -> Result<Step, Setback> {
        if let Action::Delete { why, known } = action {
            self.writer.delete(at, &known).await.map_err(|failure| setback(at, failure))?;
            let effect = self.world.write(|world| world.companion_deleted(at, &known.uid));
            self.queue.push_all(effect.look_at);
            return Ok(Step::Finished(Some(Deed::Deleted(why))));
        }
        let Some((source, wish)) =
            pass.source.as_deref().and_then(|source| Some((source, source.wish.as_ref().ok()?)))
        else {
            return Ok(Step::Finished(None));
        };
        let (object, why) = match action {
            Action::Create { why } => match self.writer.create(source, wish, at).await {
                Ok(object) => (object, why),
                Err(Failure::AlreadyExists) => return self.look(pass, source, at).await,
                // The namespace went: its own watch says so, and says when it is back.
                Err(Failure::NotFound | Failure::NamespaceTerminating) => return Ok(Step::Finished(None)),
                Err(failure) => return Err(setback(at, failure)),
            },
            Action::Update { why, known } => match self.writer.update(source, wish, at, &known).await {
                Ok(object) => (object, why),
                Err(Failure::NotFound) => {
                    self.world.write(|world| world.companion_vanished(at, &known.uid));
                    return Ok(Step::Next(Action::Create { why: Why::Healed(Heal::Deleted) }));
                }
                Err(failure) => return Err(setback(at, failure)),
            },
            Action::Replace { why, known } => {
                self.writer.delete(at, &known).await.map_err(|failure| setback(at, failure))?;
                self.world.write(|world| world.companion_deleted(at, &known.uid));
                return Ok(Step::Next(Action::Create { why }));
            }
            Action::Delete { .. } => return Ok(Step::Finished(None)),
        };
        let written = Found::read(&self.keys, at.kind, object);
        let effect = self.world.write(|world| world.companion_written(written));
        self.queue.push_all(effect.look_at);
        Ok(Step::Finished(Some(Deed::from(why))))
    }

    /// Something stands where a companion should be, and no watch of ours had shown it.
    async fn look(&self, pass: &Pass, source: &Source, at: &ObjectKey) -> Result<Step, Setback> {
        let there = match self.writer.get(at).await {
            Ok(object) => Found::read(&self.keys, at.kind, object),
            Err(Failure::NotFound) => return Err(Setback::Behind),
            Err(failure) => return Err(setback(at, failure)),
        };
        let (found, seen) = self.world.read(|world| {
            let (_, found) = world.identify(there.clone());
            let mut seen = Seen::by(world, source, at, Some(&found), pass.settled);
            seen.settled |= seen.lost;
            (found, seen)
        });
        match decide(source, at, Some(&found), seen) {
            Decision::Change(change) => Ok(Step::Next(change.action)),
            Decision::Trouble(trouble) => {
                Err(Setback::Obstacle { trouble: Some(trouble), pace: Pace::Conflict, failure: None })
            }
            Decision::Nothing if found.terminating => {
                Err(Setback::Obstacle { trouble: None, pace: Pace::Error, failure: None })
            }
            Decision::Nothing => {
                // It is right: our own watch is merely late.
                self.world.write(|world| world.companion_written(there));
                Ok(Step::Finished(None))
            }
        }
    }
}

fn setback(at: &ObjectKey, failure: Failure) -> Setback {
    let (trouble, pace) = match &failure {
        Failure::Conflict | Failure::NotLeader => return Setback::Behind,
        Failure::Invalid(detail) => {
            let trouble = Trouble::Invalid { at: at.clone(), detail: detail.clone() };
            return Setback::Obstacle { trouble: Some(trouble), pace: Pace::Permanent, failure: None };
        }
        Failure::Forbidden(detail) => {
            (Some(Trouble::Forbidden { at: at.clone(), detail: detail.clone() }), Pace::Conflict)
        }
        Failure::Throttled(after) => (None, Pace::At(*after)),
        _ => (None, Pace::Error),
    };
    Setback::Obstacle { trouble, pace, failure: Some(failure) }
}

impl Done {
    /// How an Event names the place, with who was at work there.
    pub(super) fn place(&self, at: &ObjectKey) -> String {
        match (self.deed, &self.manager) {
            (Deed::Healed(heal), Some(manager)) => format!("{at} ({}, by {manager})", heal.as_str()),
            (Deed::Healed(heal), None) => format!("{at} ({})", heal.as_str()),
            (Deed::Deleted(why), _) => format!("{at} ({})", why.as_str()),
            _ => at.to_string(),
        }
    }
}

impl From<Why> for Deed {
    fn from(why: Why) -> Self {
        match why {
            Why::New => Self::Created,
            Why::SourceChanged => Self::Updated,
            Why::Adopted => Self::Adopted,
            Why::Healed(heal) => Self::Healed(heal),
        }
    }
}

impl Deed {
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Updated => "updated",
            Self::Adopted => "adopted",
            Self::Healed(_) => "healed",
            Self::Deleted(_) => "deleted",
        }
    }
}
