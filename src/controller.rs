//! The controller: queue → reconcile → plan → writes → apply → report. What it decides is in [`lockstep_core::plan`] and
//! [`lockstep_core::writes`].
//!
//! | file | job |
//! | --- | --- |
//! | [`queue`] | sources to reconcile: in order, each once, some later |
//! | [`reconcile`] | plans a source, starts the writes that may happen now, and records their outcomes |
//! | [`write_queue`] | writes that wait for a worker |
//! | [`apply`] | carries out one write: sends what it asks for through [`api`] |
//! | [`live_reads`] | payloads that the world does not keep, shared by the writes in flight |
//! | [`report`], [`events`] | logs, metrics and Events |

pub mod api;
pub mod apply;
pub mod events;
mod live_reads;
pub mod queue;
pub mod reconcile;
pub mod report;
mod write_queue;

use std::{convert::Infallible, sync::Arc, time::Duration};

use futures::future::BoxFuture;
use kube::Client;
use tokio::{sync::watch, task::JoinSet, time::MissedTickBehavior};

use crate::{
    leader::{Claim, LeaseAnnotations},
    ops::metrics::Metrics,
};
use api::{CompanionApi, KubeApi};
use events::EventRecorder;
use lockstep_core::{
    keys::Keys,
    object::ObjectKey,
    plan::{Heal, Trouble},
    world::{SharedWorld, World},
};
use queue::Queue;
use reconcile::Reconciler;
use report::Reporter;

/// Events that wait to be written delay a stop by this much at most.
const EVENTS_TIMEOUT: Duration = Duration::from_secs(5);

/// How often the hold of deletes is compared with the annotations of the Lease.
const HOLD_SYNC_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug, Clone)]
pub struct Settings {
    pub keys: Arc<Keys>,
    /// Sources reconciled at a time.
    pub workers: usize,
    /// Requests to the API server at a time.
    pub writes: usize,
    pub resync: Duration,
    pub delete_grace: Duration,
    /// The flags with which commands find this instance, as in [`lockstep_core::keys::instance_flags`].
    pub instance_flags: String,
}

/// The controller and what it works on. Run it only after every watch has listed.
pub struct Controller {
    pub client: Client,
    pub settings: Settings,
    pub world: SharedWorld,
    pub queue: Arc<Queue<ObjectKey>>,
    pub claim: Claim,
    pub annotations: LeaseAnnotations,
    pub metrics: Metrics,
}

impl Controller {
    /// Runs until `stop` turns true, then finishes its writes and gives the Lease back with `release`. Returns early, with
    /// the name of the task, when a task ends that never should.
    pub async fn run(
        self,
        release: impl Future<Output = ()>,
        mut stop: watch::Receiver<bool>,
    ) -> Result<(), &'static str> {
        let Self { client, settings, world, queue, claim, annotations, metrics } = self;
        // The series begin at zero, so that the first heal shows as an increase, and no trouble as zero.
        for heal in Heal::ALL {
            metrics.heals.of(heal.as_str());
        }
        for label in Trouble::LABELS {
            metrics.troubles.of(label);
        }
        let (recorder, events) = EventRecorder::new(client.clone(), &settings.keys, metrics.clone());
        let api = KubeApi::new(client, settings.keys.clone(), claim.clone());
        let reporter = Reporter::new(recorder, metrics.clone());
        let reconciler =
            Reconciler::new(&settings, api, world.clone(), queue, reporter, claim.clone(), metrics);
        let events = tokio::spawn(events.run(reconciler.writes(), stop.clone()));
        let Tasks { workers, others } = Tasks::new(&settings, world, claim, &annotations, &reconciler);
        let (mut workers, mut tasks): (JoinSet<_>, JoinSet<_>) =
            (workers.into_iter().collect(), others.into_iter().collect());

        let outcome = tokio::select! {
            biased;
            _ = stop.wait_for(|stop| *stop) => Ok(()),
            Some(ended) = tasks.join_next() => Err(ended.unwrap_or("task")),
            Some(ended) = workers.join_next() => Err(ended.unwrap_or("task")),
        };
        // A reconcile that still ran could start a write after the last one has ended.
        workers.shutdown().await;
        reconciler.finish().await;
        // The Lease goes to another replica with what is held now.
        reconciler.sync_hold(&annotations);
        drop(reconciler);
        tasks.shutdown().await;
        // Only now that nothing is written any more may another replica write.
        release.await;
        drop(tokio::time::timeout(EVENTS_TIMEOUT, events).await);
        outcome
    }
}

/// What runs in a controller, without end. Each task returns its name if it ends nevertheless.
pub struct Tasks {
    /// They start writes, and may be aborted at any time.
    pub workers: Vec<BoxFuture<'static, &'static str>>,
    pub others: Vec<BoxFuture<'static, &'static str>>,
}

impl Tasks {
    pub fn new<A: CompanionApi>(
        settings: &Settings,
        world: SharedWorld,
        claim: Claim,
        annotations: &LeaseAnnotations,
        reconciler: &Reconciler<A>,
    ) -> Self {
        let mut others: Vec<BoxFuture<'static, &'static str>> = vec![
            Box::pin(resync(world, claim.clone(), settings.resync, reconciler.clone())),
            Box::pin(follow_leadership(claim, annotations.clone(), reconciler.clone())),
            Box::pin(keep_hold(annotations.clone(), reconciler.clone())),
        ];
        for _ in 0..settings.writes.max(1) {
            let reconciler = reconciler.clone();
            others.push(Box::pin(async move {
                reconciler.write_all().await;
                "write worker"
            }));
        }
        let mut workers: Vec<BoxFuture<'static, &'static str>> = Vec::new();
        for _ in 0..settings.workers {
            let reconciler = reconciler.clone();
            workers.push(Box::pin(async move {
                reconciler.reconcile_all().await;
                "reconcile worker"
            }));
        }
        Self { workers, others }
    }
}

/// Opens the queues when this replica becomes the leader, and closes them when it no longer is. A standby's queues stay
/// closed; on becoming leader every source is enqueued.
async fn follow_leadership<A: CompanionApi>(
    mut claim: Claim,
    annotations: LeaseAnnotations,
    reconciler: Reconciler<A>,
) -> &'static str {
    loop {
        // The annotations are observed before the claim is.
        claim.acquired().await;
        reconciler.open(&annotations.observed().borrow());
        claim.lost().await;
        reconciler.close();
    }
}

/// Keeps the hold of deletes in the Lease; on a standby, keeps in mind what the Lease shows.
async fn keep_hold<A: CompanionApi>(
    annotations: LeaseAnnotations,
    reconciler: Reconciler<A>,
) -> &'static str {
    let mut ticks = tokio::time::interval(HOLD_SYNC_INTERVAL);
    // Two holds never begin in the same second, which identifies them.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        reconciler.sync_hold(&annotations);
    }
}

/// Plans every source at each resync. A plan that finds nothing to do makes no API call.
async fn resync<A: CompanionApi>(
    world: SharedWorld,
    claim: Claim,
    every: Duration,
    reconciler: Reconciler<A>,
) -> &'static str {
    let mut ticks = tokio::time::interval(every);
    loop {
        ticks.tick().await;
        if claim.is_held() {
            reconciler.resync().await;
        } else {
            world.write(World::forget_unwanted_lost);
        }
    }
}

/// What a replica without the controller does, for ever: it looks for no lost companions, so it forgets them, or they would
/// fill its memory.
pub async fn without_controller(world: SharedWorld, resync: Duration) -> Infallible {
    let mut ticks = tokio::time::interval(resync);
    loop {
        ticks.tick().await;
        world.write(World::forget_unwanted_lost);
    }
}

#[cfg(test)]
mod tests;
