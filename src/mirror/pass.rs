//! One look at a source: plan, carry out, remember what stood in the way, tell.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use futures::future::join_all;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use kube::Client;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};

use super::{
    Settings, SharedWorld,
    brake::{Brake, Verdict, Whole},
    events::{Story, Teller},
    ledger::{Ledger, Pace},
    plan::{self, Action, Change, Decision, Heal, Plan, Removal, Seen, Trouble, Why, decide},
    queue::Queue,
    write::Writer,
};
use crate::{
    client::Failure,
    keys::Keys,
    object::ObjectKey,
    ops::metrics::{ActionLabel, ManagerLabel, Metrics, ReasonLabel, ResultLabel},
    world::state::Source,
};

/// How long what is under way may take after a stop.
const FINISH: Duration = Duration::from_secs(20);
/// A trouble that stays is told again before its Event is forgotten (an hour).
const TELL_AGAIN: Duration = Duration::from_secs(1800);

/// Everything that a pass needs. Cheap to clone.
#[derive(Clone)]
pub struct Passes(Arc<Inner>);

struct Inner {
    keys: Arc<Keys>,
    world: SharedWorld,
    queue: Arc<Queue<ObjectKey>>,
    writer: Writer,
    teller: Teller,
    brake: Mutex<Brake>,
    ledgers: Mutex<HashMap<ObjectKey, Ledger>>,
    metrics: Metrics,
    /// Passes that write. Planning goes on while they wait for the API server.
    under_way: Arc<Semaphore>,
    writes: u32,
}

/// What a plan calls for, ready to be carried out.
struct Pass {
    key: ObjectKey,
    source: Option<Arc<Source>>,
    plan: Plan,
    settled: bool,
    ledger: Ledger,
    started: Instant,
}

/// What became of one change.
struct Outcome {
    at: ObjectKey,
    result: Result<Option<Done>, Setback>,
}

/// A write that succeeded.
struct Done {
    deed: Deed,
    /// Who had undone it, for heals.
    manager: Option<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Deed {
    Created,
    Updated,
    Adopted,
    Healed(Heal),
    Deleted(Removal),
}

/// A write that did not.
enum Setback {
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

impl Passes {
    #[must_use]
    pub fn new(
        client: Client,
        settings: &Settings,
        world: SharedWorld,
        queue: Arc<Queue<ObjectKey>>,
        teller: Teller,
        metrics: Metrics,
    ) -> Self {
        let writes = settings.writes.max(1);
        Self(Arc::new(Inner {
            writer: Writer::new(client, settings.keys.clone(), writes),
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
        loop {
            let next = async {
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

    /// Waits until nothing is under way.
    pub async fn finish(&self) {
        let all = self.0.under_way.acquire_many(self.0.writes);
        if tokio::time::timeout(FINISH, all).await.is_err() {
            tracing::warn!("writes did not finish within {} s, leaving them", FINISH.as_secs());
        }
    }
}

impl Pass {
    /// Nothing to write, nothing to tell, nothing remembered.
    fn is_idle(&self) -> bool {
        self.plan.is_empty() && self.ledger.is_empty()
    }
}

impl Inner {
    fn ledgers(&self) -> MutexGuard<'_, HashMap<ObjectKey, Ledger>> {
        self.ledgers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn brake(&self) -> MutexGuard<'_, Brake> {
        self.brake.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn observe(&self) {
        self.metrics.queue_depth.set(self.queue.depth().try_into().unwrap_or(i64::MAX));
        let (sources, companions) = self.world.read(|world| (world.source_count(), world.companion_count()));
        self.metrics.sources.set(sources.try_into().unwrap_or(i64::MAX));
        self.metrics.companions.set(companions.try_into().unwrap_or(i64::MAX));
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
            Pass { plan: plan::plan(world, &key, settled), settled, source, key, ledger, started }
        });
        if pass.source.is_some() {
            let going: Vec<ObjectKey> = deletes(&pass.plan).map(|(change, _)| change.at.clone()).collect();
            self.brake().keeps_all_but(&pass.key, &going);
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
        if pass.source.is_some() || !pass.ledger.is_empty() || !pass.plan.changes.is_empty() {
            self.ledgers().insert(pass.key.clone(), pass.ledger);
        }
        self.metrics.reconciles.get_or_create(&ResultLabel { result }).inc();
        self.metrics.reconcile_seconds.observe(pass.started.elapsed().as_secs_f64());
        self.queue.done(&pass.key);
    }

    async fn carry_out(&self, mut pass: Pass) {
        let now = Instant::now();
        let digest = pass.source.as_ref().map(|source| source.digest).unwrap_or_default();
        let mut troubles = std::mem::take(&mut pass.plan.troubles);
        let mut wake: Option<Instant> = None;
        let mut later = |when: Instant| wake = Some(wake.map_or(when, |at| at.min(when)));

        let mut writes = Vec::new();
        let mut doomed = Vec::new();
        for change in &pass.plan.changes {
            if let Some(obstacle) = pass.ledger.obstacle(&change.at, digest, now) {
                troubles.extend(obstacle.trouble.clone());
                continue;
            }
            if is_heal(&change.action)
                && let Some(when) = pass.ledger.may_heal(&change.at, now)
            {
                later(when);
                continue;
            }
            if matches!(change.action, Action::Delete { .. }) {
                doomed.push(change.clone());
            } else {
                writes.push(change.clone());
            }
        }

        let mut behind = false;
        if !doomed.is_empty() {
            let (allowed, held) = self.brake_on(&pass, doomed, now);
            match held {
                Some(Hold::Gather(when)) => later(when),
                Some(Hold::Accident(trouble, when)) => {
                    troubles.push(trouble);
                    later(when);
                }
                None => {}
            }
            match self.confirmed(&pass, allowed).await {
                Ok(deletes) => writes.extend(deletes),
                Err(failure) => {
                    behind = true;
                    if let Some(failure) = failure {
                        tracing::warn!(source = %pass.key, "the source cannot be read before its companions go: {failure}");
                    }
                }
            }
        }

        let outcomes = join_all(writes.into_iter().map(|change| self.write(&pass, change))).await;

        let now = Instant::now();
        let mut deeds: BTreeMap<Deed, Vec<String>> = BTreeMap::new();
        let mut failed = None;
        for Outcome { at, result } in outcomes {
            match result {
                Ok(done) => {
                    pass.ledger.cleared(&at);
                    if let Some(done) = done {
                        self.record(&pass.key, pass.source.as_deref(), &at, &done);
                        if let Deed::Healed(_) = done.deed
                            && pass.ledger.healed(&at, done.manager.as_deref(), now)
                        {
                            let manager = done.manager.clone().unwrap_or_default();
                            self.metrics.fights.get_or_create(&ManagerLabel { manager }).inc();
                        }
                        deeds.entry(done.deed).or_default().push(done.place(&at));
                    }
                }
                Err(Setback::Behind) => behind = true,
                Err(Setback::Obstacle { trouble, pace, failure }) => {
                    if failure.is_some() {
                        failed = failure;
                    }
                    troubles.extend(trouble.clone());
                    pass.ledger.obstructed(at, trouble, pace, digest, now);
                }
            }
        }
        if let Some(failure) = &failed {
            tracing::warn!(source = %pass.key, "a companion could not be written: {failure}; retrying");
        }

        let open: HashSet<&ObjectKey> = pass.plan.changes.iter().map(|change| &change.at).collect();
        pass.ledger.keep_obstacles(|at| open.contains(at));
        pass.ledger.next_attempt().into_iter().for_each(&mut later);
        if behind {
            later(now + Pace::Error.delay(pass.ledger.failures, fastrand::f64()));
            pass.ledger.failures += 1;
        } else {
            pass.ledger.failures = 0;
            if failed.is_none() {
                pass.ledger.settled = pass.source.as_ref().map(|source| source.digest);
            }
        }
        troubles.extend(pass.ledger.fights(now));
        if !troubles.is_empty() {
            later(now + TELL_AGAIN);
        }

        let result = match () {
            () if behind || failed.is_some() => "retry",
            () if !troubles.is_empty() => "trouble",
            () if !deeds.is_empty() => "changed",
            () => "unchanged",
        };
        self.tell_deeds(&pass, &deeds);
        self.tell_troubles(&mut pass, troubles, now);
        if let Some(when) = wake {
            self.queue.push_at(pass.key.clone(), when);
        }
        self.close(pass, result);
    }

    /// Which deletes may go ahead, and what holds the others. Only companions in other namespaces are held.
    fn brake_on(&self, pass: &Pass, doomed: Vec<Change>, now: Instant) -> (Vec<Change>, Option<Hold>) {
        let going: Vec<ObjectKey> = deletes(&pass.plan).map(|(change, _)| change.at.clone()).collect();
        let whole = self
            .world
            .read(|world| Whole { companions: world.companion_count(), sources: world.source_total() });
        let mut brake = self.brake();
        let verdict = brake.ask(now, &pass.key, &going, whole);
        self.metrics.deletes_held.set(brake.is_holding(now).into());
        drop(brake);
        let hold = match verdict {
            Verdict::Go => return (doomed, None),
            Verdict::Gather(when) => Hold::Gather(when),
            Verdict::Held { until, companions, sources } => {
                let left = SignedDuration::try_from(until.saturating_duration_since(now)).unwrap_or_default();
                let until_text = format!("{:.0}", Timestamp::now() + left);
                Hold::Accident(Trouble::Accident { companions, sources, until: until_text }, until)
            }
        };
        let (own, away): (Vec<Change>, Vec<Change>) =
            doomed.into_iter().partition(|change| change.at.namespace == pass.key.namespace);
        (own, (!away.is_empty()).then_some(hold))
    }

    /// Reads the source live, once, and leaves of these deletes what may really go. `Err(None)`: the world is behind.
    async fn confirmed(&self, pass: &Pass, deletes: Vec<Change>) -> Result<Vec<Change>, Option<Failure>> {
        if deletes.is_empty() {
            return Ok(deletes);
        }
        let live = match (self.writer.get(&pass.key).await, &pass.source) {
            (Err(Failure::NotFound), None) => Live::Gone,
            (Ok(object), None) => {
                let managed =
                    object.metadata.labels.get(&self.keys.managed).is_some_and(|value| value == "true");
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
    async fn write(&self, pass: &Pass, change: Change) -> Outcome {
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
                Err(Failure::NotFound | Failure::Terminating) => return Ok(Step::Finished(None)),
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
        let effect = self.world.write(|world| world.companion_written(at.kind, object));
        self.queue.push_all(effect.look_at);
        Ok(Step::Finished(Some(Deed::from(why))))
    }

    /// Something stands where a companion should be, and no watch of ours had shown it.
    async fn look(&self, pass: &Pass, source: &Source, at: &ObjectKey) -> Result<Step, Setback> {
        let object = match self.writer.get(at).await {
            Ok(object) => object,
            Err(Failure::NotFound) => return Err(Setback::Behind),
            Err(failure) => return Err(setback(at, failure)),
        };
        let (found, seen) = self.world.read(|world| {
            let (_, found) = world.read_companion(at.kind, object.clone());
            let lost = world.was_lost(at);
            let seen = Seen {
                settled: pass.settled || lost,
                lost,
                accepts: world.accepts(&source.key.namespace, &at.namespace),
            };
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
                self.world.write(|world| world.companion_written(at.kind, object));
                Ok(Step::Finished(None))
            }
        }
    }

    /// One log line and the counters for a write.
    fn record(&self, key: &ObjectKey, source: Option<&Source>, companion: &ObjectKey, done: &Done) {
        let kind = companion.kind.as_str();
        let keys = source.and_then(|source| source.wish.as_ref().ok()).map_or("", |wish| &wish.key_names);
        let source = key;
        match done.deed {
            Deed::Created => tracing::info!(kind, %source, %companion, keys, "companion created"),
            Deed::Updated => tracing::info!(kind, %source, %companion, keys, "companion updated"),
            Deed::Adopted => tracing::info!(kind, %source, %companion, keys, "companion adopted"),
            Deed::Healed(heal) => {
                let reason = heal.as_str();
                let by = done.manager.as_deref().unwrap_or_default();
                tracing::info!(kind, %source, %companion, keys, reason, by, "companion healed");
                self.metrics.heal(heal);
            }
            Deed::Deleted(why) => {
                tracing::info!(kind, %source, %companion, reason = why.as_str(), "companion deleted")
            }
        }
        self.metrics.writes.get_or_create(&ActionLabel { action: done.deed.as_str() }).inc();
    }

    /// One Normal Event for all that a pass did.
    fn tell_deeds(&self, pass: &Pass, deeds: &BTreeMap<Deed, Vec<String>>) {
        if deeds.is_empty() {
            return;
        }
        let parts = deeds.iter().map(|(deed, places)| {
            const SHOWN: usize = 5;
            let shown = places.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
            let more = places.len().saturating_sub(SHOWN);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            format!("{} {}: {shown}{more}", deed.as_str(), places.len())
        });
        let reason = match deeds.keys().next_back() {
            Some(Deed::Deleted(_)) if deeds.len() == 1 => "Removed",
            Some(Deed::Healed(_)) => "Healed",
            _ => "Mirrored",
        };
        self.teller.tell(Story {
            source: pass.key.clone(),
            uid: pass.ledger.uid.clone(),
            warning: false,
            reason,
            note: parts.collect::<Vec<_>>().join("; "),
        });
    }

    /// A Warning Event and a log line for each trouble that is new, or has lasted; gauges for all.
    fn tell_troubles(&self, pass: &mut Pass, troubles: Vec<Trouble>, now: Instant) {
        let told = std::mem::take(&mut pass.ledger.troubles);
        for (trouble, _) in &told {
            self.gauge(trouble, -1);
        }
        for trouble in troubles {
            self.gauge(&trouble, 1);
            let before = told.iter().find(|(known, _)| known.is_same_as(&trouble)).map(|(_, when)| *when);
            let when = match before {
                Some(when) if now.saturating_duration_since(when) < TELL_AGAIN => when,
                _ => {
                    let reason = trouble.label();
                    tracing::warn!(kind = pass.key.kind.as_str(), source = %pass.key, reason, "{trouble}");
                    self.teller.tell(Story {
                        source: pass.key.clone(),
                        uid: pass.ledger.uid.clone(),
                        warning: true,
                        reason: trouble.event_reason(),
                        note: trouble.to_string(),
                    });
                    now
                }
            };
            pass.ledger.troubles.push((trouble, when));
        }
    }

    fn gauge(&self, trouble: &Trouble, by: i64) {
        let reason = trouble.label();
        self.metrics.troubles.get_or_create(&ReasonLabel { reason }).inc_by(by);
        if matches!(trouble, Trouble::Conflict { .. }) {
            self.metrics.conflicts.inc_by(by);
        }
    }
}

/// What an attempt leads to.
enum Step {
    Finished(Option<Deed>),
    Next(Action),
}

/// Why deletes wait.
enum Hold {
    Gather(Instant),
    Accident(Trouble, Instant),
}

fn deletes(plan: &Plan) -> impl Iterator<Item = (&Change, Removal)> {
    plan.changes.iter().filter_map(|change| match &change.action {
        Action::Delete { why, .. } => Some((change, *why)),
        _ => None,
    })
}

fn is_heal(action: &Action) -> bool {
    matches!(
        action,
        Action::Create { why: Why::Healed(_) }
            | Action::Update { why: Why::Healed(_), .. }
            | Action::Replace { why: Why::Healed(_), .. }
    )
}

fn setback(at: &ObjectKey, failure: Failure) -> Setback {
    let (trouble, pace) = match &failure {
        Failure::Conflict => return Setback::Behind,
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
    fn place(&self, at: &ObjectKey) -> String {
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
    const fn as_str(self) -> &'static str {
        match self {
            Self::Created => "created",
            Self::Updated => "updated",
            Self::Adopted => "adopted",
            Self::Healed(_) => "healed",
            Self::Deleted(_) => "deleted",
        }
    }
}
