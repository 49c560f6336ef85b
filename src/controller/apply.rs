//! Carries out one change of one companion, and returns the outcome: sends what [`CompanionWrite`] asks for.

use std::sync::Arc;

use tokio::sync::Semaphore;

use super::{api::CompanionApi, live_reads::LiveReads, queue::Queue};
use crate::leader::Claim;
use lockstep_core::{
    failure::Failure,
    keys::Keys,
    object::{Object, ObjectKey},
    plan::Removal,
    world::{NamespaceRules, ObservedCompanion, SharedWorld, Source, WatchId},
    writes::{
        companion_write::{
            Answered, ApplyError, CompanionWrite, Confirmed, History, LiveSource, PlannedWrite, Sent, Start,
            Unconfirmed, WriteOutcome, confirm_removals, permits_for, read_source,
        },
        fair_queue::namespace_limit,
        write_request::CompanionRequest,
    },
};

/// Tenants choose the size of what is read: the object that has the name of a companion, metadata of any length, a
/// source of which one key is copied. The permits of a write do not cover it. A read holds up to three times the
/// object, as it is received and as it is parsed, so four reads of 1.5 MiB hold 18 MiB.
const MAX_CONCURRENT_READS: usize = 4;

pub struct Applier<A> {
    api: A,
    claim: Claim,
    keys: Arc<Keys>,
    rules: NamespaceRules,
    live_reads: LiveReads,
    world: SharedWorld,
    queue: Arc<Queue>,
    /// Held while an object is read and reduced to what is kept of it. Nothing else is waited for meanwhile.
    reads: Semaphore,
    /// The most that one write takes.
    max_permits: usize,
}

impl<A: CompanionApi> Applier<A> {
    pub fn new(
        api: A,
        claim: Claim,
        keys: Arc<Keys>,
        world: SharedWorld,
        queue: Arc<Queue>,
        writes: usize,
    ) -> Self {
        let rules = world.read(|world| world.namespaces().rules().clone());
        Self {
            api,
            claim,
            keys,
            rules,
            live_reads: LiveReads::default(),
            world,
            queue,
            reads: Semaphore::new(MAX_CONCURRENT_READS),
            max_permits: namespace_limit(writes),
        }
    }

    /// Makes one companion right.
    pub async fn apply(&self, planned: &PlannedWrite, history: History) -> WriteOutcome {
        let start = |read| {
            let start = |world: &_| {
                CompanionWrite::start(&self.keys, world, planned, history, read, self.max_permits)
            };
            self.world.read(start)
        };
        let mut started = start(None)?;
        if let Start::ReadSource(source) = started {
            let Some(read) = self.read_live(&source).await? else { return Ok(None) };
            started = start(Some(read))?;
        }
        let Start::Write(mut write) = started else { return Ok(None) };
        loop {
            let request = self.world.read(|world| write.request(&self.keys, world))?;
            let answer = self.send(&planned.at, request).await;
            let Answered { requeue, outcome } = self.world.write(|world| write.answer(world, answer));
            self.queue.push_all(requeue);
            if let Some(outcome) = outcome {
                return outcome;
            }
        }
    }

    async fn send(&self, at: &ObjectKey, request: CompanionRequest) -> Result<ObservedCompanion, Failure> {
        let _read = if request.is_read() { self.reads.acquire().await.ok() } else { None };
        let object = self.send_while_leading(at, request).await?;
        Ok(ObservedCompanion::read(&self.keys, at.kind, object))
    }

    async fn send_while_leading(&self, at: &ObjectKey, request: CompanionRequest) -> Result<Object, Failure> {
        if !self.claim.is_held() {
            return Err(Failure::NotLeader);
        }
        self.api.send(at, request).await
    }

    /// Reads a source live, once before its companions are deleted or released, and returns those that may be.
    pub async fn confirm_removals(
        &self,
        key: &ObjectKey,
        removals: Vec<(ObjectKey, Removal)>,
    ) -> Result<Confirmed, Unconfirmed> {
        let _read = self.reads.acquire().await;
        let live =
            self.send_while_leading(key, CompanionRequest::GetMetadata).await.map(|object| object.metadata);
        self.world.read(|world| confirm_removals(&self.keys, world, key, removals, live))
    }

    /// Reads a source live. `None` if it has become malformed.
    async fn read_live(&self, source: &Source) -> Result<Option<LiveSource>, ApplyError> {
        let key = &source.key;
        let live_read = self.live_reads.of(key);
        let mut live_read = live_read.lock().await;
        if let Some(payload) = live_read.get(source.digest) {
            return Ok(Some(LiveSource { digest: source.digest, payload }));
        }
        let read = self.reads.acquire().await;
        let sent = self.world.read(|world| Sent::now(world, WatchId::Sources(key.kind)));
        let answer = self.send_while_leading(key, CompanionRequest::Get).await;
        let observed = read_source(&self.keys, &self.rules, source, answer)?;
        drop(read);
        let digest = observed.source.digest;
        let payload = observed.payload.clone();
        let effect = self.world.write(|world| sent.record(world, |world| world.source_read(observed)));
        self.queue.push_all(effect.requeue);
        Ok(payload.map(|payload| {
            live_read.set(digest, &payload);
            LiveSource { digest, payload }
        }))
    }

    /// How many permits a write of the content of a source takes.
    pub fn permits_for(&self, source: &Source) -> usize {
        permits_for(source, self.max_permits)
    }
}

#[cfg(test)]
mod tests;
