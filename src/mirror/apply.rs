//! Carries out one change of one companion, and returns the outcome.

use std::sync::Arc;

use tokio::sync::Semaphore;

use super::{
    api::CompanionApi, live_reads::LiveReads, queue::Queue, retry::RetryPolicy, write_queue::namespace_limit,
    write_request,
};
use crate::{
    client::Failure,
    content::Digest,
    keys::Keys,
    object::{Object, ObjectKey},
    plan::{
        Action, Decision, DeleteReason, Heal, Removal, TargetContext, Trouble, WriteReason, decide,
        first_difference, plan_companion,
    },
    world::{
        Companion, Effect, LostCompanion, NamespaceRules, ObservedCompanion, ObservedSource, Payload,
        SharedWorld, Source, WatchId, World,
    },
};

/// A write holds one permit for so much content, a larger one more of them, up to the share of a namespace: the memory
/// of all requests is bounded, and large writes that hang leave permits for others.
///
/// A write holds up to six times its content: the payload, read live if it is not kept, the request, and the answer as it
/// was received and as it was parsed. With the default of `--writes`, four writes of 1.5 MiB run at a time: 36 MiB. What
/// is read, and may be larger than what is written, is bounded by [`MAX_CONCURRENT_READS`].
const BYTES_PER_PERMIT: usize = 64 * 1024;
/// Tenants choose the size of what is read: the object that has the name of a companion, metadata of any length, a source
/// of which one key is copied. The permits of a write do not cover it. A read holds up to three times the object, as it is
/// received and as it is parsed, so four reads of 1.5 MiB hold 18 MiB.
const MAX_CONCURRENT_READS: usize = 4;
/// A create may find an object, which has to be recreated, and the create after that may find another one.
const MAX_ATTEMPTS: usize = 4;

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
        trouble: Option<Trouble>,
        policy: RetryPolicy,
        failure: Option<Failure>,
    },
}

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

/// The companions that may be deleted or released.
#[derive(Debug, PartialEq, Eq)]
pub struct Confirmed {
    pub removals: Vec<(ObjectKey, Removal)>,
    /// The source exists and has lost its label.
    pub unlabelled: bool,
}

/// What the retry state knows about a target when its write starts.
#[derive(Debug, Clone, Copy)]
pub struct History {
    /// The source's digest when a reconcile last ended with nothing left to write.
    pub in_step: Option<Digest>,
    /// The last attempt failed.
    pub failed: bool,
}

/// Which list was current when a request was sent about what this watch shows.
#[derive(Debug, Clone, Copy)]
struct Sent {
    watch: WatchId,
    epoch: u32,
}

/// What an attempt leads to.
enum Next {
    Done(Option<Applied>),
    Try(Action),
}

/// What is written, and for which state of its source.
struct Content {
    source: Arc<Source>,
    payload: Arc<Payload>,
}

/// What an attempt starts with. A removal has no content.
struct Planned {
    action: Action,
    content: Option<Content>,
}

pub struct Applier<A> {
    api: A,
    keys: Arc<Keys>,
    rules: NamespaceRules,
    live_reads: LiveReads,
    world: SharedWorld,
    queue: Arc<Queue<ObjectKey>>,
    /// Held while an object is read and reduced to what is kept of it. Nothing else is waited for meanwhile.
    reads: Semaphore,
    /// The most that one write takes.
    max_permits: usize,
}

impl<A: CompanionApi> Applier<A> {
    #[must_use]
    pub fn new(
        api: A,
        keys: Arc<Keys>,
        world: SharedWorld,
        queue: Arc<Queue<ObjectKey>>,
        writes: usize,
    ) -> Self {
        let rules = world.read(|world| world.namespaces().rules().clone());
        Self {
            api,
            keys,
            rules,
            live_reads: LiveReads::default(),
            world,
            queue,
            reads: Semaphore::new(MAX_CONCURRENT_READS),
            max_permits: namespace_limit(writes),
        }
    }

    /// Makes one companion right. `None`: it is right already, or the plan has changed since the write was queued, and the
    /// next reconcile handles it.
    pub async fn apply(&self, write: &PlannedWrite, history: History) -> Result<Option<Done>, ApplyError> {
        let Some(Planned { mut action, content }) = self.plan(write, history).await? else {
            return Ok(None);
        };
        let mut manager = None;
        for _ in 0..MAX_ATTEMPTS {
            manager = action.other_manager().map(str::to_owned).or(manager);
            match self.attempt(content.as_ref(), write, action, history.in_step).await? {
                Next::Done(applied) => return Ok(applied.map(|applied| Done { applied, manager })),
                Next::Try(next) => action = next,
            }
        }
        Err(ApplyError::StaleCache)
    }

    /// Reads a source live, once before its companions are deleted or released, and returns those that may be.
    /// `Err(None)`: the cache is stale.
    pub async fn confirm_removals(
        &self,
        key: &ObjectKey,
        removals: Vec<(ObjectKey, Removal)>,
    ) -> Result<Confirmed, Option<Failure>> {
        let confirmed = |removals, unlabelled| Ok(Confirmed { removals, unlabelled });
        let _read = self.reads.acquire().await;
        let live = self.api.get_metadata(key).await;
        self.world.read(|world| match (live, world.source(key)) {
            // The garbage collector deletes what the source owned.
            (Err(Failure::NotFound), None) => {
                let ours = |(at, removal): &(ObjectKey, Removal)| {
                    let owned = world.companion(at).is_some_and(|known| known.source_owner.is_some());
                    !owned || *removal == Removal::Release
                };
                confirmed(removals.into_iter().filter(ours).collect(), false)
            }
            // It exists and is no source any more.
            (Ok(meta), None) if !self.keys.is_source(&meta.labels) => confirmed(removals, true),
            (Ok(meta), Some(source)) if meta.resource_version == source.resource_version => {
                confirmed(removals, false)
            }
            (Ok(_) | Err(Failure::NotFound), _) => Err(None),
            (Err(failure), _) => Err(Some(failure)),
        })
    }

    /// Decides now, not when the write was queued: content that was superseded meanwhile is never written. A payload that the
    /// world does not keep is read live, and then the companion is planned once more, with what was read.
    async fn plan(&self, write: &PlannedWrite, history: History) -> Result<Option<Planned>, ApplyError> {
        let PlannedWrite { source: key, at, removal, permits } = write;
        // If it has grown since it was queued, it is enqueued because it has changed.
        let fits = |source: &Source| self.permits_for(source) <= *permits;
        let plan = || {
            let (decision, source, kept) = self.world.read(|world| {
                let source = world.source(key);
                let kept = source.and_then(|source| world.payload(source));
                let decision = match world.is_unconfirmed(key) {
                    true => Decision::Nothing,
                    false => plan_companion(world, key, at, history.in_step),
                };
                (decision, source.cloned(), kept)
            });
            let Decision::Change(action) = decision else { return None };
            let action = if history.failed { action.without_heal() } else { action };
            (action.removal() == *removal).then_some((action, source, kept))
        };
        let Some((action, source, kept)) = plan() else { return Ok(None) };
        let Some(source) = source.filter(|_| action.has_content()) else {
            return Ok(Some(Planned { action, content: None }));
        };
        if !fits(&source) {
            return Ok(None);
        }
        if let Some(payload) = kept {
            return Ok(Some(Planned { action, content: Some(Content { source, payload }) }));
        }
        let Some((digest, payload)) = self.read_live(&source).await? else { return Ok(None) };
        match plan() {
            Some((action, Some(source), _)) if source.digest == digest => {
                Ok(fits(&source).then_some(Planned { action, content: Some(Content { source, payload }) }))
            }
            // The world knows another state than the one that was read.
            Some(_) => Err(ApplyError::StaleCache),
            None => Ok(None),
        }
    }

    /// Reads a source live, and returns the digest and payload of what was read. `None` if it has become malformed. What
    /// was read enters the world, so that the next plan is about it.
    async fn read_live(&self, source: &Source) -> Result<Option<(Digest, Arc<Payload>)>, ApplyError> {
        let key = &source.key;
        let live_read = self.live_reads.of(key);
        let mut live_read = live_read.lock().await;
        if let Some(payload) = live_read.get(source.digest) {
            return Ok(Some((source.digest, payload)));
        }
        let read = self.reads.acquire().await;
        let sent = self.sending(WatchId::Sources(key.kind));
        let object = match self.api.get(key).await {
            Ok(object)
                if object.metadata.uid == source.uid && self.keys.is_source(&object.metadata.labels) =>
            {
                object
            }
            // The watch will show that it is gone, or no source any more.
            Ok(_) | Err(Failure::NotFound) => return Err(ApplyError::StaleCache),
            Err(failure) => return Err(error(key, failure)),
        };
        let observed = ObservedSource::read(&self.keys, &self.rules, key.kind, object);
        drop(read);
        let (digest, payload) = (observed.source.digest, observed.payload.clone());
        let effect = self.record(sent, |world| world.source_read(observed));
        self.queue.push_all(effect.requeue);
        Ok(payload.map(|payload| {
            live_read.set(digest, &payload);
            (digest, payload)
        }))
    }

    /// How many permits a write of the content of a source takes.
    #[must_use]
    pub fn permits_for(&self, source: &Source) -> usize {
        (1 + source.payload_bytes() / BYTES_PER_PERMIT).min(self.max_permits)
    }

    fn sending(&self, watch: WatchId) -> Sent {
        Sent { watch, epoch: self.world.read(|world| world.epoch(watch)) }
    }

    /// Records what a request has shown or changed, unless a list has begun since it was `sent`. The list and the watch
    /// after it show what is true. The answer may be from before a restore of etcd, and then nothing would ever replace it.
    fn record(&self, sent: Sent, change: impl FnOnce(&mut World) -> Effect) -> Effect {
        let is_current = |world: &World| world.epoch(sent.watch) == sent.epoch;
        self.world.write(|world| if is_current(world) { change(world) } else { Effect::default() })
    }

    async fn attempt(
        &self,
        content: Option<&Content>,
        PlannedWrite { source: key, at, .. }: &PlannedWrite,
        action: Action,
        in_step: Option<Digest>,
    ) -> Result<Next, ApplyError> {
        let sent = self.sending(WatchId::Companions(at.kind));
        if let Action::Delete { reason, known } = action {
            self.api.delete(at, &known).await.map_err(|failure| error(at, failure))?;
            let effect = self.record(sent, |world| world.companion_deleted(at, &known.uid));
            self.requeue_others(key, effect);
            return Ok(Next::Done(Some(Applied::Deleted(reason))));
        }
        if let Action::Release { reason, known } = action {
            return self.release(key, at, reason, &known).await;
        }
        if let Action::DeleteLost { reason, lost } = action {
            return self.delete_lost(key, at, reason, &lost).await;
        }
        let Some(Content { source, payload }) = content else { return Ok(Next::Done(None)) };
        let (written, reason) = match action {
            Action::Create { reason } => {
                let body = write_request::body(&self.keys, source, payload, at)
                    .map_err(|failure| error(at, failure))?;
                match self.api.create(at, body).await {
                    Ok(object) => (object, reason),
                    Err(Failure::AlreadyExists) => return self.inspect(source, at, in_step).await,
                    // The namespace does not exist or is terminating. Its watch shows when it exists again.
                    Err(Failure::NotFound | Failure::NamespaceTerminating) => return Ok(Next::Done(None)),
                    Err(failure) => return Err(error(at, failure)),
                }
            }
            Action::Update { reason, known } => {
                let operations = write_request::update(&self.keys, source, payload, at, &known)
                    .map_err(|failure| error(at, failure))?;
                match self.api.patch(at, operations).await {
                    Ok(object) => (object, reason),
                    Err(Failure::NotFound) => {
                        self.record(sent, |world| world.companion_vanished(at, &known.uid));
                        return Ok(Next::Try(Action::Create { reason: WriteReason::Healed(Heal::Deleted) }));
                    }
                    Err(failure) => return Err(error(at, failure)),
                }
            }
            Action::Recreate { reason, known } => {
                self.api.delete(at, &known).await.map_err(|failure| error(at, failure))?;
                self.record(sent, |world| world.companion_deleted(at, &known.uid));
                return Ok(Next::Try(Action::Create { reason }));
            }
            // Handled above.
            Action::Delete { .. } | Action::Release { .. } | Action::DeleteLost { .. } => {
                return Ok(Next::Done(None));
            }
        };
        let written = ObservedCompanion::read(&self.keys, at.kind, written);
        let stored = written.companion();
        let difference = first_difference(source, at, stored).filter(|_| !stored.terminating);
        let effect = self.record(sent, |world| world.companion_written(written));
        self.requeue_others(key, effect);
        match difference {
            None => Ok(Next::Done(Some(Applied::from(reason)))),
            Some(what) => Err(rewritten(at, what)),
        }
    }

    /// Enqueues the other sources that want the place. The writer's own is reconciled again only if need be.
    fn requeue_others(&self, own: &ObjectKey, effect: Effect) {
        self.queue.push_all(effect.requeue.into_iter().filter(|key| key != own));
    }

    /// Takes our marks off a companion: from then on it is a foreign object. If its marks do not say that it stays, they
    /// do first, so that other replicas see this: otherwise they would take it for a companion that somebody else took
    /// the marks off, and delete it when they lead.
    async fn release(
        &self,
        key: &ObjectKey,
        at: &ObjectKey,
        reason: DeleteReason,
        known: &Companion,
    ) -> Result<Next, ApplyError> {
        let sent = self.sending(WatchId::Companions(at.kind));
        if !known.keep {
            let marked = self.api.patch(at, write_request::mark_to_stay(&self.keys, known)).await;
            let marked =
                ObservedCompanion::read(&self.keys, at.kind, marked.map_err(|failure| error(at, failure))?);
            let stays = marked.companion().keep;
            let effect = self.record(sent, |world| world.companion_written(marked));
            self.requeue_others(key, effect);
            let found = self.world.read(|world| world.companion(at).cloned());
            return match found {
                _ if !stays => Err(rewritten(at, Heal::Marks)),
                Some(found) => Ok(Next::Try(Action::Release { reason, known: Box::new(found) })),
                None => Err(ApplyError::StaleCache),
            };
        }
        let (effect, applied) = match self.api.patch(at, write_request::release(&self.keys, known)).await {
            Ok(object) => {
                let released = ObservedCompanion::read(&self.keys, at.kind, object);
                if released.companion().labelled {
                    // An admission plugin has put our label back. The companion is known by its UID until it is gone.
                    self.record(sent, |world| world.companion_written(released));
                    return Err(rewritten(at, Heal::Label));
                }
                let effect = self.record(sent, |world| world.companion_released(at, &known.uid));
                (effect, Some(Applied::Released(reason)))
            }
            Err(Failure::NotFound) => {
                (self.record(sent, |world| world.companion_vanished(at, &known.uid)), None)
            }
            Err(failure) => return Err(error(at, failure)),
        };
        self.requeue_others(key, effect);
        Ok(Next::Done(applied))
    }

    /// Reads a companion that no watch shows, and deletes it if an earlier read has found it: only then has the brake
    /// been asked, and the source been read.
    async fn delete_lost(
        &self,
        key: &ObjectKey,
        at: &ObjectKey,
        reason: DeleteReason,
        lost: &LostCompanion,
    ) -> Result<Next, ApplyError> {
        let read = self.reads.acquire().await;
        let found = match self.api.get_metadata(at).await {
            Ok(metadata) => {
                let without_content = Object { metadata, ..Object::default() };
                Some(ObservedCompanion::read(&self.keys, at.kind, without_content))
            }
            Err(Failure::NotFound) => None,
            Err(failure) => return Err(error(at, failure)),
        };
        drop(read);
        let found = found.as_ref().map(ObservedCompanion::companion).filter(|found| lost.is(found));
        let applied = match found {
            Some(_) if !lost.is_found() => {
                self.world.write(|world| world.lost_found(at, lost));
                self.queue.push_all([key.clone()]);
                return Ok(Next::Done(None));
            }
            Some(found) => {
                self.api.delete(at, found).await.map_err(|failure| error(at, failure))?;
                Some(Applied::Deleted(reason))
            }
            None => None,
        };
        let effect = self.world.write(|world| world.lost_gone(at, lost));
        self.requeue_others(key, effect);
        Ok(Next::Done(applied))
    }

    /// A create met an object that no watch of ours had shown: reads it and decides again.
    async fn inspect(
        &self,
        source: &Source,
        at: &ObjectKey,
        in_step: Option<Digest>,
    ) -> Result<Next, ApplyError> {
        let read = self.reads.acquire().await;
        let sent = self.sending(WatchId::Companions(at.kind));
        let found = match self.api.get(at).await {
            Ok(object) => ObservedCompanion::read(&self.keys, at.kind, object),
            Err(Failure::NotFound) => return Err(ApplyError::StaleCache),
            Err(failure) => return Err(error(at, failure)),
        };
        drop(read);
        let (companion, context) = self.world.read(|world| {
            let (_, companion) = world.identify(found.clone());
            let mut context = TargetContext::of(world, source, at, Some(&companion), in_step);
            // A lost companion that still exists was changed by somebody else: its label was removed.
            context.in_step |= context.lost;
            (companion, context)
        });
        match decide(source, at, Some(&companion), context) {
            Decision::Change(action) => Ok(Next::Try(action)),
            Decision::Trouble(trouble) => Err(ApplyError::Retry {
                trouble: Some(trouble),
                policy: RetryPolicy::Conflict,
                failure: None,
            }),
            Decision::Nothing if companion.terminating => {
                Err(ApplyError::Retry { trouble: None, policy: RetryPolicy::Error, failure: None })
            }
            Decision::Nothing => {
                // It is right, and our own watch is merely late.
                self.record(sent, |world| world.companion_written(found));
                Ok(Next::Done(None))
            }
        }
    }
}

/// The API server stored something else than it was sent. Without a pace this would never end.
fn rewritten(at: &ObjectKey, what: Heal) -> ApplyError {
    let trouble = Some(Trouble::Rewritten { at: at.clone(), what });
    ApplyError::Retry { trouble, policy: RetryPolicy::Conflict, failure: None }
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
    ApplyError::Retry { trouble, policy, failure }
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
    #[must_use]
    pub const fn unlabelled(self) -> Self {
        match self {
            Self::Deleted(DeleteReason::SourceGone) => Self::Deleted(DeleteReason::Unlabelled),
            Self::Released(DeleteReason::SourceGone) => Self::Released(DeleteReason::Unlabelled),
            other => other,
        }
    }

    #[must_use]
    pub const fn is_heal(self) -> bool {
        matches!(self, Self::Healed(_))
    }

    /// Whether the companion has the content of its source since this write.
    #[must_use]
    pub const fn has_content(self) -> bool {
        matches!(self, Self::Created | Self::Updated | Self::Adopted | Self::Healed(_))
    }

    /// Its name in logs, Events and metrics.
    #[must_use]
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

#[cfg(test)]
mod tests;
