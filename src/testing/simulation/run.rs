//! Runs a scenario: carries out what is on the agenda, lets the replicas run, and asks the judge.

use std::{
    future::poll_fn,
    hash::Hasher,
    pin::Pin,
    task::{Context, Poll},
    time::{Duration, Instant},
};

use tokio::time::Sleep;

use super::{
    replica::Replica,
    scenario::{Fault, REPLICAS, Scenario, What},
    server::{Cluster, Event, WatchEvent},
};
use crate::clock;

/// How long Lockstep may take, after the last step and the last fault, until everything is right. Backoffs are a minute
/// long at most.
const SETTLING_TIME: Duration = Duration::from_secs(180);
/// How often the judge is asked meanwhile.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// For how long nothing is written after that, although every source is enqueued as by a resync.
const REST: Duration = Duration::from_secs(5);
/// The judge does not insist on what Lockstep cannot know for sure, so something may follow. It ends within so many
/// times of rest.
const MAX_RESTS: usize = 3;

/// How a run ended.
#[derive(Debug, Default)]
pub(crate) struct Outcome {
    /// What was wrong; empty if nothing was.
    pub wrong: Vec<String>,
    /// A digest of all changes, and when they were made.
    pub digest: u64,
    pub changes: usize,
    pub writes: usize,
    /// How long Lockstep took after the last entry and the last fault.
    pub settled_after: Duration,
    pub trace: Vec<String>,
}

/// Runs a scenario on a clock of its own. With `trace`, the outcome tells what happened.
pub(crate) fn run(scenario: &Scenario, trace: bool) -> Outcome {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    fastrand::seed(scenario.settings.seed);
    runtime.expect("a runtime").block_on(async { Simulation::new(scenario, trace).run(scenario).await })
}

struct Simulation {
    cluster: Cluster,
    replicas: [Option<Replica>; REPLICAS],
    incarnations: usize,
    sleep: Pin<Box<Sleep>>,
}

impl Simulation {
    fn new(scenario: &Scenario, trace: bool) -> Self {
        let cluster = Cluster::new(&scenario.settings, trace);
        let sleep = Box::pin(tokio::time::sleep(Duration::ZERO));
        Self { cluster, replicas: [const { None }; REPLICAS], incarnations: 0, sleep }
    }

    async fn run(mut self, scenario: &Scenario) -> Outcome {
        let start = clock::now();
        {
            let mut state = self.cluster.lock();
            state.create_namespaces();
            for entry in &scenario.timeline {
                let event = match &entry.what {
                    What::Step(step) => Event::Step(step.clone()),
                    What::Fault(fault) => Event::Fault(*fault),
                };
                state.at(start + Duration::from_millis(entry.at), event);
            }
        }
        (0..REPLICAS).for_each(|replica| self.start_replica(replica));
        self.drive_until(start + scenario.length()).await;
        self.cluster.lock().calm_down();
        let mut outcome = Outcome::default();
        let end = clock::now();
        self.settle(&mut outcome).await;
        outcome.settled_after = clock::elapsed(end);
        for rest in 1..=MAX_RESTS {
            if !outcome.wrong.is_empty() {
                break;
            }
            let before = self.cluster.lock().writes;
            let has_leader = self.rest().await;
            outcome.wrong = self.wrong();
            if !has_leader {
                outcome.wrong.push("no replica leads".to_owned());
            }
            let (writes, unsettled) = {
                let state = self.cluster.lock();
                (state.writes - before, state.judge.unsettled())
            };
            if writes == 0 || rest == MAX_RESTS {
                let at_rest = |wrong: &model::Violation| format!("at rest: {wrong}");
                outcome.wrong.extend(unsettled.iter().map(at_rest));
            }
            if writes == 0 {
                break;
            }
            if rest == MAX_RESTS {
                outcome.wrong.push(format!("{writes} writes at rest"));
            }
            // What was written may leave a name to a source that still backs off.
            self.settle(&mut outcome).await;
        }
        let mut state = self.cluster.lock();
        outcome.digest = state.digest.finish();
        (outcome.changes, outcome.writes) = (state.changes, state.writes);
        outcome.trace = state.trace.take().unwrap_or_default();
        outcome
    }

    /// Waits until everything is right.
    async fn settle(&mut self, outcome: &mut Outcome) {
        let start = clock::now();
        let (mut unsettled, mut checked) = (Vec::new(), usize::MAX);
        while clock::elapsed(start) < SETTLING_TIME && outcome.wrong.is_empty() {
            self.drive_until(clock::now() + CHECK_INTERVAL).await;
            outcome.wrong = self.wrong();
            let state = self.cluster.lock();
            if state.changes != checked {
                checked = state.changes;
                unsettled = state.judge.unsettled();
            }
            if unsettled.is_empty() && state.in_flight == 0 && self.replicas.iter().all(Option::is_some) {
                break;
            }
        }
        outcome.wrong.extend(unsettled.iter().map(|violation| format!("not settled: {violation}")));
    }

    /// Enqueues every source, and lets a time of rest pass in which a replica leads from the beginning to the end.
    /// After a restore of etcd, the Lease may have to expire first. Returns whether there was such a time.
    async fn rest(&mut self) -> bool {
        let start = clock::now();
        while clock::elapsed(start) < SETTLING_TIME {
            if !self.has_leader() {
                self.drive_until(clock::now() + CHECK_INTERVAL).await;
                continue;
            }
            self.replicas.iter().flatten().for_each(Replica::resync);
            self.drive_until(clock::now() + REST).await;
            if self.has_leader() {
                return true;
            }
        }
        false
    }

    fn has_leader(&self) -> bool {
        self.replicas.iter().flatten().any(Replica::leads)
    }

    /// What the judge has found so far.
    fn wrong(&self) -> Vec<String> {
        let mut state = self.cluster.lock();
        let mut wrong = std::mem::take(&mut state.wrong);
        wrong.extend(state.judge.violations().iter().map(ToString::to_string));
        wrong
    }

    async fn drive_until(&mut self, deadline: Instant) {
        poll_fn(|context| self.poll(context, deadline)).await;
    }

    fn poll(&mut self, context: &mut Context<'_>, deadline: Instant) -> Poll<()> {
        loop {
            let now = clock::now();
            while let Some(event) = self.pop_due(now) {
                self.happen(event);
            }
            for replica in self.replicas.iter_mut().flatten() {
                if replica.paused_until.is_none() {
                    replica.poll(context);
                }
            }
            let next = self.cluster.lock().next_due();
            if next.is_some_and(|next| next <= now) {
                continue;
            }
            if now >= deadline {
                return Poll::Ready(());
            }
            let next = next.map_or(deadline, |next| next.min(deadline));
            self.sleep.as_mut().reset(next.into());
            if self.sleep.as_mut().poll(context).is_pending() {
                return Poll::Pending;
            }
        }
    }

    fn pop_due(&self, now: Instant) -> Option<Event> {
        self.cluster.lock().pop_due(now)
    }

    fn happen(&mut self, event: Event) {
        let mut state = self.cluster.lock();
        match event {
            Event::Step(step) => state.step(&step),
            Event::Fault(fault) => {
                state.fault(fault);
                drop(state);
                self.fault(fault);
            }
            Event::Arrive { replica, perform, fate } => state.arrive(replica, perform, fate),
            Event::Answer { replica, send, failure } => state.deliver_answer(replica, send, failure),
            Event::Namespace(name) => state.empty_namespace(&name),
            Event::CollectGarbage => state.collect_garbage(),
            Event::Up(backup) => state.come_up(backup),
            Event::Start(replica) => {
                drop(state);
                self.start_replica(replica);
            }
            Event::Resume(replica) => {
                if let Some(replica) = &mut self.replicas[replica]
                    && replica.paused_until.is_some_and(|until| until <= clock::now())
                {
                    replica.paused_until = None;
                }
            }
            Event::Watch(replica, watch, number, event) => {
                let Some(process) = &mut self.replicas[replica] else { return };
                if !state.is_current(replica, watch, number) {
                    return;
                }
                if let Some(until) = process.paused_until.filter(|_| event != WatchEvent::Arrive) {
                    return state.at(until, Event::Watch(replica, watch, number, event));
                }
                let shown = state.on_connection(replica, watch, event);
                drop(state);
                shown.into_iter().for_each(|shown| process.see(watch, shown));
            }
        }
    }

    fn fault(&mut self, fault: Fault) {
        let mut state = self.cluster.lock();
        match fault {
            Fault::Crash { replica, down } if self.replicas[replica].is_some() => {
                state.close_watches(replica);
                state.forget_claim(replica);
                state.judge.memory_lost();
                state.after(Duration::from_millis(down), Event::Start(replica));
                drop(state);
                self.replicas[replica] = None;
            }
            Fault::Pause { replica, time } => {
                let until = clock::now() + Duration::from_millis(time);
                if let Some(process) = &mut self.replicas[replica] {
                    process.paused_until = process.paused_until.max(Some(until));
                    state.at(until, Event::Resume(replica));
                }
            }
            _ => {}
        }
    }

    fn start_replica(&mut self, replica: usize) {
        self.incarnations += 1;
        self.replicas[replica] = Some(Replica::start(replica, self.incarnations, &self.cluster));
    }
}
