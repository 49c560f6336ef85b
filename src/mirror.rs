//! The controller: watch → world → queue → plan → write.

pub mod brake;
mod carry;
pub mod events;
pub mod ledger;
pub mod pass;
pub mod queue;
mod tell;
pub mod write;

use std::{sync::Arc, time::Duration};

use kube::Client;
use tokio::{sync::watch, task::JoinSet};

use crate::{
    keys::Keys,
    leader::Claim,
    object::ObjectKey,
    ops::metrics::{Metrics, ReasonLabel},
    plan::Heal,
    world::{SharedWorld, state::World},
};
use pass::Passes;
use queue::Queue;

/// What the mirror needs to know.
#[derive(Debug, Clone)]
pub struct Settings {
    pub keys: Arc<Keys>,
    pub workers: usize,
    pub writes: usize,
    pub resync: Duration,
    pub delete_grace: Duration,
}

/// Runs until `stop` turns true, then finishes what is under way and leaves the election. Returns early, with its name,
/// when a task ends that never should. Everything must have been listed once.
#[allow(clippy::too_many_arguments)]
pub async fn run(
    client: Client,
    settings: Settings,
    world: SharedWorld,
    queue: Arc<Queue<ObjectKey>>,
    claim: Claim,
    leave: impl Future<Output = ()>,
    metrics: Metrics,
    stop: watch::Receiver<bool>,
) -> Result<(), &'static str> {
    let (teller, scribe) = events::Teller::start(client.clone(), &settings.keys, metrics.clone());
    let passes =
        Passes::new(client, &settings, world.clone(), queue.clone(), teller, claim.clone(), metrics.clone());
    // The series begin at zero, so that the first heal shows as an increase.
    for heal in Heal::ALL {
        drop(metrics.heals.get_or_create(&ReasonLabel { reason: heal.as_str() }));
    }
    let mut tasks = JoinSet::new();
    tasks.spawn(take_turns(claim, passes.clone(), world.clone(), queue.clone()));
    tasks.spawn(resync(world, queue, settings.resync));
    for _ in 0..settings.workers {
        let (passes, stop) = (passes.clone(), stop.clone());
        tasks.spawn(async move {
            passes.work(stop).await;
            "worker"
        });
    }

    let mut stopped = stop.clone();
    let outcome = tokio::select! {
        biased;
        _ = stopped.wait_for(|stop| *stop) => Ok(()),
        // A worker may see the stop before we do.
        ended = tasks.join_next() => match ended.and_then(Result::ok) {
            _ if *stop.borrow() => Ok(()),
            ended => Err(ended.unwrap_or("task")),
        },
    };
    passes.finish().await;
    drop(passes);
    tasks.shutdown().await;
    // Nothing is written any more: now another may.
    leave.await;
    // What was told is written before we go; Events are no reason to stay for long.
    drop(tokio::time::timeout(Duration::from_secs(5), scribe).await);
    outcome
}

/// Looks at every source when it is our turn to write, and forgets what it did when it no longer is. Who stands by keeps
/// no list of what to look at: sources come and go, and it will look at all there are.
async fn take_turns(
    mut claim: Claim,
    passes: Passes,
    world: SharedWorld,
    queue: Arc<Queue<ObjectKey>>,
) -> &'static str {
    loop {
        claim.acquired().await;
        queue.open();
        queue.push_all(world.read(World::all_sources));
        claim.lost().await;
        queue.close();
        passes.forget();
    }
}

/// Looks at every source now and then. A plan that finds nothing to do calls nobody, so this is free.
async fn resync(world: SharedWorld, queue: Arc<Queue<ObjectKey>>, every: Duration) -> &'static str {
    let mut ticks = tokio::time::interval(every);
    loop {
        ticks.tick().await;
        queue.push_all(world.read(World::all_sources));
    }
}

#[cfg(test)]
mod tests;
