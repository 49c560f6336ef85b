//! The controller: queue → reconcile → plan → writes → apply → report. What it decides is in [`lockstep_core::plan`]
//! and [`lockstep_core::writes`].
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

use futures::{FutureExt, future::BoxFuture};
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
    plan::{Heal, Trouble},
    world::SharedWorld,
};
use queue::Queue;
use reconcile::Reconciler;
use report::Reporter;

/// Events that wait to be written delay a stop by this much at most.
const EVENTS_TIMEOUT: Duration = Duration::from_secs(5);

/// How often the hold of deletes is compared with the annotations of the Lease.
const HOLD_SYNC_INTERVAL: Duration = Duration::from_secs(1);

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
    pub queue: Arc<Queue>,
    pub claim: Claim,
    pub annotations: LeaseAnnotations,
    pub metrics: Metrics,
}

impl Controller {
    /// Runs until `stop` turns true, then finishes its writes and gives the Lease back with `release`.
    pub async fn run(self, release: impl Future<Output = ()>, mut stop: watch::Receiver<bool>) {
        let Self { client, settings, world, queue, claim, annotations, metrics } = self;
        // The series begin at zero, so that the first heal shows as an increase, and no trouble as zero.
        for heal in Heal::ALL {
            metrics.heals.of(heal.as_str());
        }
        for label in Trouble::LABELS {
            metrics.troubles.of(label);
        }
        let (recorder, events) = EventRecorder::new(client.clone(), &settings.keys, metrics.clone());
        let api = KubeApi { client, keys: settings.keys.clone() };
        let reporter = Reporter::new(recorder, metrics.clone());
        let reconciler = Arc::new(Reconciler::new(&settings, api, world, queue, reporter, claim, metrics));
        let events = tokio::spawn(events.run(reconciler.writes(), stop.clone()));
        let Tasks { workers, others } = Tasks::new(&settings, &annotations, &reconciler);
        let mut workers: JoinSet<_> = workers.into_iter().collect();
        let mut others: JoinSet<_> = others.into_iter().collect();

        // It fails only if the sender is gone.
        let _ = stop.wait_for(|stop| *stop).await;
        // A reconcile that still ran could start a write after the last one has ended.
        workers.shutdown().await;
        reconciler.finish().await;
        // The Lease goes to another replica with what is held now.
        reconciler.sync_hold(&annotations);
        // Events end when nothing can report any more.
        drop(reconciler);
        others.shutdown().await;
        // Only now that nothing is written any more may another replica write.
        release.await;
        let _ = tokio::time::timeout(EVENTS_TIMEOUT, events).await;
    }
}

/// What runs in a controller, without end.
#[derive(Default)]
pub struct Tasks {
    /// They start writes, and may be aborted at any time.
    pub workers: Vec<BoxFuture<'static, Infallible>>,
    pub others: Vec<BoxFuture<'static, Infallible>>,
}

impl Tasks {
    pub fn new<A: CompanionApi>(
        settings: &Settings,
        annotations: &LeaseAnnotations,
        reconciler: &Arc<Reconciler<A>>,
    ) -> Self {
        let mut tasks = Self::default();
        tasks.others.push(resync(reconciler.clone(), settings.resync).boxed());
        tasks.others.push(reconciler.clone().follow_leadership(annotations.clone()).boxed());
        tasks.others.push(keep_hold(reconciler.clone(), annotations.clone()).boxed());
        for _ in 0..settings.writes.max(1) {
            tasks.others.push(reconciler.clone().write_all().boxed());
        }
        for _ in 0..settings.workers {
            tasks.workers.push(reconciler.clone().reconcile_all().boxed());
        }
        tasks
    }
}

/// Keeps the hold of deletes in the Lease; on a standby, keeps in mind what the Lease shows.
async fn keep_hold<A: CompanionApi>(
    reconciler: Arc<Reconciler<A>>,
    annotations: LeaseAnnotations,
) -> Infallible {
    let mut ticks = tokio::time::interval(HOLD_SYNC_INTERVAL);
    // Two holds never begin in the same second, which identifies them.
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        reconciler.sync_hold(&annotations);
    }
}

/// Plans every source at each resync. A plan that finds nothing to do makes no API call.
async fn resync<A: CompanionApi>(reconciler: Arc<Reconciler<A>>, every: Duration) -> Infallible {
    let mut ticks = tokio::time::interval(every);
    loop {
        ticks.tick().await;
        reconciler.resync().await;
    }
}

#[cfg(test)]
mod tests;
