//! The write of one companion: what is sent, and what each answer means for the world, the next request and the
//! outcome. Nothing is sent from here: [`CompanionWrite::request`] says what to send, [`CompanionWrite::answer`] takes
//! the answer.

use std::sync::Arc;

use super::{
    retry::RetryPolicy,
    write_request::{CompanionRequest, WriteContent},
};
use crate::{
    failure::Failure,
    keys::Keys,
    object::{Meta, Object, ObjectKey},
    plan::{
        Action, Decision, DeleteReason, Heal, Removal, Trouble, WriteReason, decide, first_difference,
        plan_companion,
    },
    policy::content::Digest,
    world::{
        Companion, Effect, LostCompanion, NamespaceRules, ObservedCompanion, ObservedSource, Payload, Source,
        WatchId, World,
    },
    writes::write_request,
};

/// A write holds one permit for so much content, a larger one more of them, up to the share of a namespace: the memory
/// of all requests is bounded, and large writes that hang leave permits for others.
///
/// A write holds up to six times its content: the payload, read live if it is not kept, the request, and the answer as
/// it was received and as it was parsed. With the default of `--writes`, four writes of 1.5 MiB run at a time: 36 MiB.
pub const BYTES_PER_PERMIT: usize = 64 * 1024;
/// A create may find an object, which has to be recreated, and the create after that may find another one.
const MAX_ATTEMPTS: usize = 4;

/// One companion that is to be written, deleted or released.
#[derive(Debug, Clone)]
pub struct PlannedWrite {
    pub source: ObjectKey,
    pub at: ObjectKey,
    /// The removal that a live read of the source has approved, and the brake if it is a delete. No other happens.
    pub removal: Option<Removal>,
    /// How many permits the write holds.
    pub permits: usize,
}

/// What the retry state knows about a target when its write starts.
#[derive(Debug, Clone, Copy)]
pub struct History {
    /// The source's digest when a reconcile last ended with nothing left to write.
    pub in_step: Option<Digest>,
    /// The last attempt failed.
    pub failed: bool,
}

/// How many permits a write of the content of a source takes, at most `max`.
pub fn permits_for(source: &Source, max: usize) -> usize {
    (1 + source.payload_bytes() / BYTES_PER_PERMIT).min(max)
}

/// A write that succeeded.
#[derive(Debug)]
pub struct Done {
    pub applied: Applied,
    /// The field manager whose change a heal undid.
    pub manager: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Applied {
    Created,
    Updated,
    Adopted,
    Healed(Heal),
    Deleted(DeleteReason),
    Released(DeleteReason),
}

/// A write that did not succeed.
#[derive(Debug)]
pub enum ApplyError {
    /// The object is not what the world knows: plan again when the watch has caught up.
    StaleCache,
    Retry {
        trouble: Option<Box<Trouble>>,
        policy: RetryPolicy,
        failure: Option<Failure>,
    },
}

/// How a write ends. `Ok(None)`: the companion is right already, or the plan has changed since the write was queued,
/// and the next reconcile handles it.
pub type WriteOutcome = Result<Option<Done>, ApplyError>;

/// Which list was current when a request was sent about what this watch shows.
#[derive(Debug, Clone, Copy)]
pub struct Sent {
    watch: WatchId,
    epoch: u32,
}

impl Sent {
    pub fn now(world: &World, watch: WatchId) -> Self {
        Self { watch, epoch: world.epoch(watch) }
    }

    /// Records what a request has shown or changed, unless a list has begun since it was sent. The list and the watch
    /// after it show what is true. The answer may be from before a restore of etcd, and then nothing would ever replace
    /// it.
    pub fn record(self, world: &mut World, change: impl FnOnce(&mut World) -> Effect) -> Effect {
        if world.epoch(self.watch) == self.epoch { change(world) } else { Effect::default() }
    }
}

/// How a planned write starts.
pub enum Start {
    /// There is nothing to write any more.
    Nothing,
    /// The world does not keep the payload: it is read live, and the write starts again with what was read.
    ReadSource(Arc<Source>),
    Write(Box<CompanionWrite>),
}

/// A source that was read live because the world does not keep its payload.
#[derive(Clone)]
pub struct LiveSource {
    pub digest: Digest,
    pub payload: Arc<Payload>,
}

/// What a live read of a source shows. It enters the world, so that the next plan is about it.
pub fn read_source(
    keys: &Keys,
    rules: &NamespaceRules,
    source: &Source,
    answer: Result<Object, Failure>,
) -> Result<ObservedSource, ApplyError> {
    match answer {
        Ok(object) if object.metadata.uid == source.uid && keys.is_source(&object.metadata.labels) => {
            Ok(ObservedSource::read(keys, rules, source.key.kind, object))
        }
        // The watch will show that it is gone, or no source any more.
        Ok(_) | Err(Failure::NotFound) => Err(ApplyError::StaleCache),
        Err(failure) => Err(error(&source.key, failure)),
    }
}

/// The companions that may be deleted or released.
#[derive(Debug, PartialEq, Eq)]
pub struct Confirmed {
    pub removals: Vec<(ObjectKey, Removal)>,
    /// The source exists and has lost its label.
    pub unlabelled: bool,
}

/// Why no companion may be deleted or released now.
#[derive(Debug)]
pub enum Unconfirmed {
    StaleCache,
    Unread(Failure),
}

/// Which companions may be removed, after a live read of their source.
pub fn confirm_removals(
    keys: &Keys,
    world: &World,
    key: &ObjectKey,
    removals: Vec<(ObjectKey, Removal)>,
    answer: Result<Meta, Failure>,
) -> Result<Confirmed, Unconfirmed> {
    match (answer, world.source(key)) {
        // The garbage collector deletes what the source owned.
        (Err(Failure::NotFound), None) => {
            let ours = |(at, removal): &(ObjectKey, Removal)| {
                let owned = world.companion(at).is_some_and(|known| known.state.source_owner.is_some());
                !owned || *removal == Removal::Release
            };
            Ok(Confirmed { removals: removals.into_iter().filter(ours).collect(), unlabelled: false })
        }
        // It exists and is no source any more.
        (Ok(meta), None) if !keys.is_source(&meta.labels) => Ok(Confirmed { removals, unlabelled: true }),
        (Ok(meta), Some(source)) if meta.resource_version == source.resource_version => {
            Ok(Confirmed { removals, unlabelled: false })
        }
        (Ok(_) | Err(Failure::NotFound), _) => Err(Unconfirmed::StaleCache),
        (Err(failure), _) => Err(Unconfirmed::Unread(failure)),
    }
}

/// What follows from an answer.
#[derive(Default)]
pub struct Answered {
    /// Sources that have to be reconciled because of it.
    pub requeue: Vec<ObjectKey>,
    /// `None`: there is another request to send.
    pub outcome: Option<WriteOutcome>,
}

/// A write between its plan and its outcome.
pub struct CompanionWrite {
    source: ObjectKey,
    at: ObjectKey,
    in_step: Option<Digest>,
    /// A removal has none.
    content: Option<WriteContent>,
    step: WriteStep,
    attempts: usize,
    manager: Option<String>,
    sent: Sent,
}

/// What is sent next.
enum WriteStep {
    Act(Action),
    /// A create met an object that no watch has shown: it is read.
    Inspect,
    /// An earlier read has found a lost companion: only then has the brake been asked, and the source been read.
    DeleteLost {
        reason: DeleteReason,
        lost: Box<LostCompanion>,
        found: Box<Companion>,
    },
}

impl CompanionWrite {
    /// Decides now, not when the write was queued: content that was superseded meanwhile is never written. After a live
    /// read, the companion is planned once more, with what was read. A source that has grown beyond the permits since
    /// it was queued is enqueued because it has changed.
    pub fn start(
        keys: &Keys,
        world: &World,
        write: &PlannedWrite,
        history: History,
        read: Option<LiveSource>,
        max_permits: usize,
    ) -> Result<Start, ApplyError> {
        let PlannedWrite { source: key, at, removal, permits } = write;
        if world.is_unconfirmed(key) {
            return Ok(Start::Nothing);
        }
        let Decision::Change(action) = plan_companion(world, key, at, history.in_step) else {
            return Ok(Start::Nothing);
        };
        let action = if history.failed { action.without_heal() } else { action };
        if action.removal() != *removal {
            return Ok(Start::Nothing);
        }
        let mut content = None;
        if action.write_reason().is_some() {
            let Some(source) = world.shared_source(key) else { return Ok(Start::Nothing) };
            if read.as_ref().is_some_and(|read| read.digest != source.digest) {
                return Err(ApplyError::StaleCache);
            }
            if permits_for(&source, max_permits) > *permits {
                return Ok(Start::Nothing);
            }
            let Some(payload) = read.map(|read| read.payload).or_else(|| world.payload(&source)) else {
                return Ok(Start::ReadSource(source));
            };
            content = WriteContent::new(keys, source, payload);
        }
        Ok(Start::Write(Box::new(Self {
            source: key.clone(),
            at: at.clone(),
            in_step: history.in_step,
            content,
            attempts: 1,
            manager: action.other_manager().map(str::to_owned),
            step: WriteStep::Act(action),
            sent: Sent::now(world, WatchId::Companions(at.kind)),
        })))
    }

    /// The next request about the companion.
    pub fn request(&mut self, keys: &Keys, world: &World) -> Result<CompanionRequest, ApplyError> {
        self.sent = Sent::now(world, WatchId::Companions(self.at.kind));
        let action = match &self.step {
            WriteStep::Inspect => return Ok(CompanionRequest::Get),
            WriteStep::DeleteLost { found, .. } => return Ok(CompanionRequest::delete(found)),
            WriteStep::Act(action) => action,
        };
        Ok(match (action, &self.content) {
            (Action::DeleteLost { .. }, _) => CompanionRequest::GetMetadata,
            (Action::Delete { known, .. } | Action::Recreate { known, .. }, _) => {
                CompanionRequest::delete(known)
            }
            (Action::Release { known, .. }, _) if known.state.keep => {
                CompanionRequest::Patch(write_request::release(keys, known))
            }
            (Action::Release { known, .. }, _) => {
                CompanionRequest::Patch(write_request::mark_to_stay(keys, known))
            }
            (Action::Create { .. }, Some(content)) => {
                CompanionRequest::Create(write_request::create(content, &self.at))
            }
            (Action::Update { known, .. }, Some(content)) => {
                CompanionRequest::Patch(write_request::update(content, &self.at, known))
            }
            (Action::Create { .. } | Action::Update { .. }, None) => return Err(ApplyError::StaleCache),
        })
    }

    /// Takes the answer to the last request: the object as it is stored, unless it was deleted.
    pub fn answer(&mut self, world: &mut World, answer: Result<ObservedCompanion, Failure>) -> Answered {
        let mut requeue = Vec::new();
        let outcome = match self.follow(world, answer, &mut requeue) {
            Ok(Next::Done(applied)) => {
                let manager = self.manager.take();
                Some(Ok(applied.map(|applied| Done { applied, manager })))
            }
            Ok(Next::WriteStep(WriteStep::Act(_))) if self.attempts == MAX_ATTEMPTS => {
                Some(Err(ApplyError::StaleCache))
            }
            Ok(Next::WriteStep(step)) => {
                if let WriteStep::Act(action) = &step {
                    self.attempts += 1;
                    self.manager = action.other_manager().map(str::to_owned).or(self.manager.take());
                }
                self.step = step;
                None
            }
            Err(error) => Some(Err(error)),
        };
        Answered { requeue, outcome }
    }

    fn follow(
        &mut self,
        world: &mut World,
        answer: Result<ObservedCompanion, Failure>,
        requeue: &mut Vec<ObjectKey>,
    ) -> Result<Next, ApplyError> {
        let step = std::mem::replace(&mut self.step, WriteStep::Inspect);
        let own = &self.source;
        let at = &self.at;
        let sent = self.sent;
        let creates = matches!(step, WriteStep::Act(Action::Create { .. }));
        let found = match answer {
            Ok(found) => Some(found),
            Err(Failure::NotFound) => None,
            // As if it did not exist (404): its watch shows when it exists again.
            Err(Failure::NamespaceTerminating) if creates => None,
            Err(Failure::AlreadyExists) if creates => return Ok(Next::WriteStep(WriteStep::Inspect)),
            Err(failure) => return Err(error(at, failure)),
        };
        // The writer's own source is reconciled again only if need be.
        let mut requeue_others = |effect: Effect| {
            requeue.extend(effect.requeue.into_iter().filter(|key| key != own));
        };
        let action = match step {
            WriteStep::Act(action) => action,
            WriteStep::Inspect => return self.decide_on_found(world, found.ok_or(ApplyError::StaleCache)?),
            WriteStep::DeleteLost { reason, lost, .. } => {
                requeue_others(world.lost_gone(at, &lost));
                return Ok(Next::Done(Some(Applied::Deleted(reason))));
            }
        };
        let (written, reason) = match (action, found) {
            (Action::Create { reason } | Action::Update { reason, .. }, Some(written)) => (written, reason),
            (Action::Create { .. }, None) => return Ok(Next::Done(None)),
            (Action::Update { known, .. }, None) => {
                requeue_others(sent.record(world, |world| world.companion_vanished(at, &known.uid)));
                return Ok(Next::act(Action::Create { reason: WriteReason::Healed(Heal::Deleted) }));
            }
            (Action::Recreate { reason, known }, _) => {
                requeue_others(sent.record(world, |world| world.companion_deleted(at, &known.uid)));
                return Ok(Next::act(Action::Create { reason }));
            }
            (Action::Delete { reason, known }, _) => {
                requeue_others(sent.record(world, |world| world.companion_deleted(at, &known.uid)));
                return Ok(Next::Done(Some(Applied::Deleted(reason))));
            }
            (Action::DeleteLost { reason, lost }, found) => {
                match found.map(|found| found.companion().clone()).filter(|found| lost.is(found)) {
                    Some(_) if !lost.is_found() => {
                        world.lost_found(at, &lost);
                        requeue.push(own.clone());
                    }
                    Some(found) => {
                        return Ok(Next::WriteStep(WriteStep::DeleteLost {
                            reason,
                            lost,
                            found: Box::new(found),
                        }));
                    }
                    None => requeue_others(world.lost_gone(at, &lost)),
                }
                return Ok(Next::Done(None));
            }
            (Action::Release { known, .. }, None) => {
                requeue_others(sent.record(world, |world| world.companion_vanished(at, &known.uid)));
                return Ok(Next::Done(None));
            }
            // Its marks say that it stays before they are taken off, so that other replicas see this: otherwise they
            // would take it for a companion that somebody else took the marks off, and delete it when they lead.
            (Action::Release { reason, known }, Some(marked)) if !known.state.keep => {
                let stays = marked.companion().state.keep;
                requeue_others(sent.record(world, |world| world.companion_written(marked)));
                return match world.companion(at).cloned() {
                    _ if !stays => Err(rewritten(at, Heal::Marks)),
                    Some(found) => Ok(Next::act(Action::Release { reason, known: Box::new(found) })),
                    None => Err(ApplyError::StaleCache),
                };
            }
            // An admission plugin has put our label back. The companion is known by its UID until it is gone.
            (Action::Release { .. }, Some(released)) if released.companion().state.labelled => {
                sent.record(world, |world| world.companion_written(released));
                return Err(rewritten(at, Heal::Label));
            }
            // From now on it is a foreign object.
            (Action::Release { reason, known }, Some(_)) => {
                requeue_others(sent.record(world, |world| world.companion_released(at, &known.uid)));
                return Ok(Next::Done(Some(Applied::Released(reason))));
            }
        };
        let stored = written.companion();
        let source = self.content.as_ref().map(|content| &content.source);
        let difference = source
            .and_then(|source| first_difference(source, at, stored))
            .filter(|_| !stored.state.terminating);
        requeue_others(sent.record(world, |world| world.companion_written(written)));
        match difference {
            None => Ok(Next::Done(Some(Applied::from(reason)))),
            Some(what) => Err(rewritten(at, what)),
        }
    }

    /// Decides again, now that the object is known that a create has met.
    fn decide_on_found(&self, world: &mut World, found: ObservedCompanion) -> Result<Next, ApplyError> {
        let at = &self.at;
        let Some(WriteContent { source, .. }) = &self.content else { return Err(ApplyError::StaleCache) };
        let (_, companion) = world.identify(found.clone());
        // A lost companion that still exists was changed by somebody else: its label was removed.
        let in_step = self.in_step == Some(source.digest) || world.was_lost(at);
        match decide(world, source, at, Some(&companion), in_step) {
            Decision::Change(action) => Ok(Next::act(action)),
            Decision::Trouble(trouble) => Err(conflict(trouble)),
            Decision::Nothing if companion.state.terminating => {
                Err(ApplyError::Retry { trouble: None, policy: RetryPolicy::Error, failure: None })
            }
            Decision::Nothing => {
                // It is right, and our own watch is merely late.
                self.sent.record(world, |world| world.companion_written(found));
                Ok(Next::Done(None))
            }
        }
    }
}

/// What an answer leads to.
enum Next {
    Done(Option<Applied>),
    WriteStep(WriteStep),
}

impl Next {
    const fn act(action: Action) -> Self {
        Self::WriteStep(WriteStep::Act(action))
    }
}

/// The API server stored something else than it was sent. Without a pace this would never end.
fn rewritten(at: &ObjectKey, what: Heal) -> ApplyError {
    conflict(Trouble::Rewritten { at: at.clone(), what })
}

fn conflict(trouble: Trouble) -> ApplyError {
    ApplyError::Retry { trouble: Some(Box::new(trouble)), policy: RetryPolicy::Conflict, failure: None }
}

/// What a failed call means for the retry.
fn error(at: &ObjectKey, failure: Failure) -> ApplyError {
    let at = || at.clone();
    let (trouble, policy) = match &failure {
        Failure::Conflict | Failure::NotLeader => return ApplyError::StaleCache,
        Failure::Invalid(detail) => {
            (Some(Trouble::Invalid { at: at(), detail: detail.clone() }), RetryPolicy::Permanent)
        }
        Failure::Forbidden(detail) => {
            (Some(Trouble::Forbidden { at: at(), detail: detail.clone() }), RetryPolicy::Conflict)
        }
        Failure::Throttled(after) => (None, RetryPolicy::After(*after)),
        _ => (None, RetryPolicy::Error),
    };
    // A trouble is reported as such.
    let failure = trouble.is_none().then_some(failure);
    ApplyError::Retry { trouble: trouble.map(Box::new), policy, failure }
}

impl From<WriteReason> for Applied {
    fn from(reason: WriteReason) -> Self {
        match reason {
            WriteReason::New => Self::Created,
            WriteReason::SourceChanged => Self::Updated,
            WriteReason::Adopted => Self::Adopted,
            WriteReason::Healed(heal) => Self::Healed(heal),
        }
    }
}

impl Applied {
    /// The same for a source that has lost its label.
    pub const fn unlabelled(self) -> Self {
        match self {
            Self::Deleted(DeleteReason::SourceGone) => Self::Deleted(DeleteReason::Unlabelled),
            Self::Released(DeleteReason::SourceGone) => Self::Released(DeleteReason::Unlabelled),
            other => other,
        }
    }

    pub const fn is_heal(self) -> bool {
        matches!(self, Self::Healed(_))
    }

    /// Whether the companion has the content of its source since this write.
    pub const fn has_content(self) -> bool {
        matches!(self, Self::Created | Self::Updated | Self::Adopted | Self::Healed(_))
    }

    /// Its name in logs, Events and metrics.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Updated => "updated",
            Self::Adopted => "adopted",
            Self::Healed(_) => "healed",
            Self::Deleted(_) => "deleted",
            Self::Released(_) => "released",
        }
    }
}
