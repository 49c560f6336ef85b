//! One look at a source: plan, carry out, remember what stood in the way, tell.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use futures::{StreamExt, stream};
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::Client;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use super::{
    Settings,
    brake::{Brake, Verdict, Whole},
    carry::{Deed, Outcome, Setback},
    events::Teller,
    ledger::{Ledger, Pace},
    queue::Queue,
    tell::TELL_AGAIN,
    write::Writer,
};
use crate::{
    client::Failure,
    content::Digest,
    keys::Keys,
    leader::Claim,
    object::ObjectKey,
    ops::metrics::{Metrics, ResultLabel},
    plan::{self, Action, Change, Plan, Trouble, Why},
    world::{
        SharedWorld,
        state::{Source, World},
    },
};

/// How long what is under way may take after a stop.
const FINISH: Duration = Duration::from_secs(20);

/// Everything that a pass needs. Cheap to clone.
#[derive(Clone)]
pub struct Passes(Arc<Inner>);

pub(super) struct Inner {
    pub(super) keys: Arc<Keys>,
    pub(super) world: SharedWorld,
    pub(super) queue: Arc<Queue<ObjectKey>>,
    pub(super) writer: Writer,
    pub(super) teller: Teller,
    claim: Claim,
    brake: Mutex<Brake>,
    ledgers: Mutex<HashMap<ObjectKey, Ledger>>,
    pub(super) metrics: Metrics,
    /// Passes that write. Planning goes on while they wait for the API server.
    under_way: Arc<Semaphore>,
    writes: u32,
}

/// What a plan calls for, ready to be carried out.
pub(super) struct Pass {
    pub(super) key: ObjectKey,
    pub(super) source: Option<Arc<Source>>,
    plan: Plan,
    pub(super) settled: bool,
    pub(super) ledger: Ledger,
    started: Instant,
}

/// What a pass has found out so far.
#[derive(Default)]
struct Findings {
    troubles: Vec<Trouble>,
    /// What was done, and where.
    deeds: BTreeMap<Deed, Vec<String>>,
    /// When to look again.
    wake: Option<Instant>,
    /// The world was behind: it is planned again when that has caught up.
    behind: bool,
    failed: Option<Failure>,
}

impl Passes {
    #[must_use]
    pub fn new(
        client: Client,
        settings: &Settings,
        world: SharedWorld,
        queue: Arc<Queue<ObjectKey>>,
        teller: Teller,
        claim: Claim,
        metrics: Metrics,
    ) -> Self {
        let writes = settings.writes.max(1);
        Self(Arc::new(Inner {
            writer: Writer::new(client, settings.keys.clone(), claim.clone(), writes),
            claim,
            keys: settings.keys.clone(),
            world,
            queue,
            teller,
            brake: Mutex::new(Brake::new(settings.delete_grace)),
            ledgers: Mutex::default(),
            metrics,
            under_way: Arc::new(Semaphore::new(writes)),
            writes: u32::try_from(writes).unwrap_or(u32::MAX),
        }))
    }

    /// Takes keys and plans them until told to stop; what there is to write is written beside it.
    pub async fn work(&self, mut stop: watch::Receiver<bool>) {
        let mut claim = self.0.claim.clone();
        loop {
            let next = async {
                claim.acquired().await;
                let permit = self.0.under_way.clone().acquire_owned().await;
                (self.0.queue.next().await, permit)
            };
            let (key, permit) = tokio::select! {
                biased;
                _ = stop.wait_for(|stop| *stop) => return,
                next = next => next,
            };
            self.0.observe();
            let pass = self.0.plan(key);
            if pass.is_idle() {
                self.0.settle(pass);
            } else if let Ok(permit) = permit {
                tokio::spawn(self.clone().carry_out(pass, permit));
            }
        }
    }

    async fn carry_out(self, pass: Pass, _permit: OwnedSemaphorePermit) {
        self.0.carry_out(pass).await;
    }

    /// Another replica writes now: what we remember of our own work is out of date.
    pub fn forget(&self) {
        let mut ledgers = self.0.ledgers();
        ledgers.drain().for_each(|(_, ledger)| self.0.ungauge(&ledger));
        drop(ledgers);
        self.0.observe();
    }

    /// Waits until nothing is under way.
    pub async fn finish(&self) {
        let all = self.0.under_way.acquire_many(self.0.writes);
        if tokio::time::timeout(FINISH, all).await.is_err() {
            tracing::warn!("writes did not finish within {} s, leaving them", FINISH.as_secs());
        }
    }
}

impl Inner {
    fn ledgers(&self) -> MutexGuard<'_, HashMap<ObjectKey, Ledger>> {
        self.ledgers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn brake(&self) -> MutexGuard<'_, Brake> {
        self.brake.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Figures of the replica that writes. Of the others they would be those of their last turn: zero.
    fn observe(&self) {
        let leads = self.claim.is_held();
        let figure = |count: usize| if leads { count.try_into().unwrap_or(i64::MAX) } else { 0 };
        self.metrics.queue_depth.set(figure(self.queue.depth()));
        let (sources, companions) = self.world.read(|world| (world.source_count(), world.companion_count()));
        self.metrics.sources.set(figure(sources));
        self.metrics.companions.set(figure(companions));
        let holding = self.brake().is_holding(Instant::now());
        self.metrics.deletes_held.set((leads && holding).into());
    }

    fn plan(&self, key: ObjectKey) -> Pass {
        let started = Instant::now();
        let mut ledger = self.ledgers().remove(&key).unwrap_or_default();
        let pass = self.world.read(|world| {
            let source = world.source(&key).cloned();
            let settled = source.as_ref().is_some_and(|source| ledger.settled == Some(source.digest));
            if let Some(source) = &source {
                ledger.uid.clone_from(&source.uid);
            }
            Pass { plan: plan_for(world, &key, settled, &ledger), settled, source, key, ledger, started }
        });
        if pass.source.is_some() {
            self.brake().keeps_all_but(&pass.key, &going(&pass.plan));
        }
        pass
    }

    /// The companions are right.
    fn settle(&self, mut pass: Pass) {
        pass.ledger.settled = pass.source.as_ref().map(|source| source.digest);
        pass.ledger.failures = 0;
        self.close(pass, "unchanged");
    }

    fn close(&self, pass: Pass, result: &'static str) {
        self.remember(&pass.key, pass.ledger, pass.source.is_some() || !pass.plan.changes.is_empty());
        self.metrics.reconciles.get_or_create(&ResultLabel { result }).inc();
        self.metrics.reconcile_seconds.observe(pass.started.elapsed().as_secs_f64());
        self.queue.done(&pass.key);
    }

    /// Keeps a ledger for the next pass, unless another replica writes now: then it is out of date.
    fn remember(&self, key: &ObjectKey, ledger: Ledger, open: bool) {
        // Asked under the lock: what is kept just before the claim is lost, `forget` finds.
        let mut ledgers = self.ledgers();
        if !self.claim.is_held() {
            self.ungauge(&ledger);
            return;
        }
        // Of a source that is gone, only what is still to be done or told is kept.
        if open || !ledger.troubles.is_empty() {
            ledgers.insert(key.clone(), ledger);
        }
    }

    async fn carry_out(&self, mut pass: Pass) {
        let mut result = Findings::default();
        result.troubles.append(&mut pass.plan.troubles);
        let (mut changes, doomed) = self.due(&pass, &mut result);
        changes.extend(self.released(&pass, doomed, &mut result).await);

        // Side by side, but no more of them in line than can be under way: a small source need not wait for a large one.
        let writes = changes.into_iter().map(|change| self.write(&pass, change));
        let outcomes: Vec<Outcome> =
            stream::iter(writes).buffer_unordered(self.writes as usize).collect().await;
        for outcome in outcomes {
            self.take_in(&mut pass, outcome, &mut result);
        }
        self.conclude(pass, result);
    }

    /// What can be done now: writes, and deletes. What cannot, will be when its time has come.
    fn due(&self, pass: &Pass, result: &mut Findings) -> (Vec<Change>, Vec<Change>) {
        let now = Instant::now();
        let mut due = Vec::new();
        for change in &pass.plan.changes {
            if let Some(obstacle) = pass.ledger.obstacle(&change.at, pass.digest(), now) {
                result.troubles.extend(obstacle.trouble.clone());
            } else if let Some(when) =
                is_heal(&change.action).then(|| pass.ledger.may_heal(&change.at, now)).flatten()
            {
                result.wake_at(when);
            } else {
                due.push(change.clone());
            }
        }
        due.into_iter().partition(|change| !matches!(change.action, Action::Delete { .. }))
    }

    /// The deletes that may go ahead, once the brake and the source itself, read live, have been asked.
    async fn released(&self, pass: &Pass, doomed: Vec<Change>, result: &mut Findings) -> Vec<Change> {
        if doomed.is_empty() {
            return doomed;
        }
        let allowed = self.brake_on(pass, doomed, result);
        match self.confirmed(pass, allowed).await {
            Ok(deletes) => deletes,
            Err(failure) => {
                result.behind = true;
                if let Some(failure) = failure {
                    tracing::warn!(source = %pass.key, "the source cannot be read before its companions go: {failure}");
                }
                Vec::new()
            }
        }
    }

    /// Takes in what became of one change.
    fn take_in(&self, pass: &mut Pass, outcome: Outcome, result: &mut Findings) {
        let Outcome { at, result: outcome } = outcome;
        let now = Instant::now();
        match outcome {
            Ok(done) => {
                pass.ledger.cleared(&at);
                let Some(done) = done else { return };
                self.record(&pass.key, pass.source.as_deref(), &at, &done);
                if matches!(done.deed, Deed::Healed(_))
                    && pass.ledger.healed(&at, done.manager.as_deref(), now)
                {
                    self.metrics.fight(done.manager.as_deref().unwrap_or_default());
                }
                result.deeds.entry(done.deed).or_default().push(done.place(&at));
            }
            Err(Setback::Behind) => result.behind = true,
            Err(Setback::Obstacle { trouble, pace, failure }) => {
                result.failed = failure.or(result.failed.take());
                result.troubles.extend(trouble.clone());
                pass.ledger.obstructed(at, trouble, pace, pass.digest(), now);
            }
        }
    }

    /// Remembers, tells, and sees to it that the source is looked at again in time.
    fn conclude(&self, mut pass: Pass, mut result: Findings) {
        let now = Instant::now();
        if let Some(failure) = &result.failed {
            tracing::warn!(source = %pass.key, "a companion could not be written: {failure}; retrying");
        }
        let open: HashSet<&ObjectKey> = pass.plan.changes.iter().map(|change| &change.at).collect();
        pass.ledger.keep_obstacles(|at| open.contains(at));
        if let Some(when) = pass.ledger.next_attempt(now) {
            result.wake_at(when);
        }
        if result.behind {
            result.wake_at(now + Pace::Error.delay(pass.ledger.failures, fastrand::f64()));
            pass.ledger.failures += 1;
        } else {
            pass.ledger.failures = 0;
            if result.failed.is_none() {
                pass.ledger.settled = pass.source.as_ref().map(|source| source.digest);
            }
        }
        result.troubles.extend(pass.ledger.fights(now));
        if !result.troubles.is_empty() {
            result.wake_at(now + TELL_AGAIN);
        }
        let label = result.label();
        self.tell_deeds(&pass, &result.deeds);
        self.tell_troubles(&mut pass, result.troubles, now);
        if let Some(when) = result.wake {
            self.queue.push_at(pass.key.clone(), when);
        }
        self.close(pass, label);
    }

    /// Which deletes the brake lets through. Only companions in other namespaces are ever held.
    fn brake_on(&self, pass: &Pass, doomed: Vec<Change>, result: &mut Findings) -> Vec<Change> {
        let now = Instant::now();
        let whole = self
            .world
            .read(|world| Whole { companions: world.companion_count(), sources: world.mirrored_count() });
        let mut brake = self.brake();
        let verdict = brake.ask(now, &pass.key, &going(&pass.plan), whole);
        drop(brake);
        if verdict == Verdict::Go {
            return doomed;
        }
        let (own, away): (Vec<Change>, Vec<Change>) =
            doomed.into_iter().partition(|change| change.at.namespace == pass.key.namespace);
        match verdict {
            Verdict::Gather(when) if !away.is_empty() => result.wake_at(when),
            Verdict::Held { until, companions, sources } if !away.is_empty() => {
                let left = SignedDuration::try_from(until.saturating_duration_since(now)).unwrap_or_default();
                let text = format!("{:.0}", Timestamp::now() + left);
                result.troubles.push(Trouble::Accident { companions, sources, until: text });
                result.wake_at(until);
            }
            _ => {}
        }
        own
    }
}

impl Pass {
    /// Nothing to write, nothing to tell, nothing remembered.
    fn is_idle(&self) -> bool {
        self.plan.is_empty() && self.ledger.is_empty()
    }

    fn digest(&self) -> Digest {
        self.source.as_ref().map(|source| source.digest).unwrap_or_default()
    }
}

impl Findings {
    fn wake_at(&mut self, when: Instant) {
        self.wake = Some(self.wake.map_or(when, |at| at.min(when)));
    }

    /// The `result` label of metrics.
    fn label(&self) -> &'static str {
        if self.behind || self.failed.is_some() {
            "retry"
        } else if !self.troubles.is_empty() {
            "trouble"
        } else if !self.deeds.is_empty() {
            "changed"
        } else {
            "unchanged"
        }
    }
}

/// Plans, and does not take for a heal what was tried before and failed.
fn plan_for(world: &World, key: &ObjectKey, settled: bool, ledger: &Ledger) -> Plan {
    let mut plan = plan::plan(world, key, settled);
    let failed = plan.changes.iter_mut().filter(|change| ledger.is_obstructed(&change.at));
    failed.for_each(|change| change.action.count_as_no_heal());
    plan
}

/// The places that a plan would clear.
fn going(plan: &Plan) -> Vec<ObjectKey> {
    let deletes = plan.changes.iter().filter(|change| matches!(change.action, Action::Delete { .. }));
    deletes.map(|change| change.at.clone()).collect()
}

fn is_heal(action: &Action) -> bool {
    matches!(
        action,
        Action::Create { why: Why::Healed(_) }
            | Action::Update { why: Why::Healed(_), .. }
            | Action::Replace { why: Why::Healed(_), .. }
    )
}

#[cfg(test)]
mod tests {
    use prometheus_client::metrics::gauge::Gauge;

    use super::*;
    use crate::{
        object::Kind,
        policy::pattern::Patterns,
        testing::{self, api::api_server},
        world::{Scope, state::Limits},
    };

    /// A mirror that nothing answers.
    fn passes(claim: Claim, metrics: &Metrics) -> Passes {
        let client = api_server(|_| std::future::pending());
        let limits =
            Limits { own_namespace: testing::OWN_NAMESPACE.to_owned(), excluded: Patterns::default() };
        let settings = Settings {
            keys: testing::keys(),
            workers: 1,
            writes: 1,
            resync: Duration::from_secs(30),
            delete_grace: Duration::from_secs(300),
        };
        let scope = Scope { keys: testing::keys(), limits, kinds: Kind::ALL.to_vec() };
        let world = SharedWorld::new(&scope);
        let (teller, _scribe) = Teller::start(client.clone(), &settings.keys, metrics.clone());
        Passes::new(client, &settings, world, Arc::default(), teller, claim, metrics.clone())
    }

    #[tokio::test]
    async fn who_leads_no_more_tells_nothing_of_its_last_turn() {
        let (until, claim) = watch::channel(Some(Instant::now() + Duration::from_secs(3600)));
        let metrics = Metrics::new();
        let passes = passes(Claim::from_receiver(claim), &metrics);
        let away = |n: usize| testing::configmap("away", &format!("s{n}-synced"));
        passes.0.queue.open();
        for n in 0..21 {
            let source = testing::configmap("home", &format!("s{n}"));
            let whole = Whole { companions: 21, sources: 21 };
            passes.0.brake().ask(Instant::now(), &source, &[away(n)], whole);
            passes.0.queue.push_all([source]);
        }
        let object = testing::source("home", "s0").object();
        passes.0.world.write(|world| world.apply_source(testing::read_source(Kind::ConfigMap, object)));
        let object = testing::companion("away", "s0-synced").of("home/s0").object();
        passes.0.world.write(|world| world.apply_companion(testing::read_companion(Kind::ConfigMap, object)));
        let told = || {
            [&metrics.queue_depth, &metrics.deletes_held, &metrics.sources, &metrics.companions]
                .map(Gauge::get)
        };
        passes.0.observe();
        assert_eq!(told(), [21, 1, 1, 1]);
        until.send_replace(None);
        passes.forget();
        assert_eq!(told(), [0; 4]);
        // A worker may have been waiting for a key when the turn ended.
        passes.0.observe();
        assert_eq!(told(), [0; 4]);
    }
}
