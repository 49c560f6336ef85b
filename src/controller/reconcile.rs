//! Reconciles sources: plans what is missing, queues the writes, and records their outcomes.
//!
//! A reconcile never waits for a write. While one companion's write hangs, the source is reconciled again as usual and
//! its other companions are written; that one follows when its write has ended.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    convert::Infallible,
    pin::pin,
    sync::{Arc, LazyLock},
    time::{Duration, Instant},
};

use k8s_openapi::jiff::SignedDuration;
use parking_lot::Mutex;

use super::{
    Settings,
    api::CompanionApi,
    apply::Applier,
    queue::Queue,
    report::{About, REPEAT_AFTER, Reported, Reporter, Summary},
    write_queue::WriteQueue,
};
use crate::{
    clock,
    leader::{Claim, LeaseAnnotations},
    ops::metrics::{Metrics, SourceFigures},
};
use lockstep_core::{
    failure::{Failure, backoff::LogOnce},
    object::ObjectKey,
    object::time::Moment,
    plan::{Decision, Plan, Removal, Trouble, plan, plan_companion},
    policy::content::Digest,
    world::{SharedWorld, Source, World},
    writes::{
        brake::{Brake, BrakeDecision, HoldUpdate, Totals},
        companion_write::{
            Applied, ApplyError, Confirmed, Done, History, PlannedWrite, Unconfirmed, WriteOutcome,
        },
        fair_queue::QueuedRequest,
        retry::{Permission, RetryState},
    },
};

/// How long writes that are queued or in flight may take after a stop.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(20);
/// The result of a reconcile that found nothing to do, in metrics.
const UNCHANGED: &str = "unchanged";
/// So many sources are planned in one go at a resync.
const RESYNC_CHUNK: usize = 100;
/// A write that takes longer hangs in something like a webhook. Other fan-outs do not yield because of it.
const SLOW_WRITE: Duration = Duration::from_secs(1);

/// What all workers share.
pub struct Reconciler<A> {
    world: SharedWorld,
    queue: Arc<Queue>,
    writes: Arc<WriteQueue<Write>>,
    applier: Applier<A>,
    reporter: Reporter,
    claim: Claim,
    brake: Mutex<Brake>,
    /// The flags with which `lockstep deletes` finds this instance.
    instance_flags: String,
    sources: Mutex<HashMap<ObjectKey, Arc<Mutex<SourceState>>>>,
    metrics: Metrics,
}

/// What is remembered of one source while this replica leads.
#[derive(Default)]
struct SourceState {
    /// The last UID seen: a deleted source gets Events, too.
    uid: String,
    /// How many reconciles have begun.
    reconciles: u64,
    retry: RetryState,
    /// What the last plan found; other troubles come from failed writes.
    planned: Vec<Trouble>,
    reported: Reported,
    /// The failure without a trouble that was logged last.
    failing: LogOnce,
    /// When a change was seen that not all companions follow yet.
    changed: Option<Instant>,
    figures: SourceFigures,
    /// It was forgotten: the source was deleted, or this replica no longer leads. Writes that end now change nothing.
    closed: bool,
}

impl SourceState {
    /// Whether nothing is in flight, remembered for later, or reported.
    fn is_empty(&self) -> bool {
        !self.closed
            && self.retry.is_idle()
            && self.planned.is_empty()
            && self.reported.is_empty()
            && !self.failing.is_failing()
    }
}

/// A queued write, and the reconcile that it belongs to. There are as many as companions when all have to be written,
/// so it is small.
struct Write {
    reconcile: Arc<Reconcile>,
    job: Job,
}

enum Job {
    Apply {
        at: ObjectKey,
        removal: Option<Removal>,
    },
    /// Reads the source live before these companions are deleted or released.
    ConfirmRemovals(Vec<(ObjectKey, Removal)>),
}

impl QueuedRequest for Write {
    fn source(&self) -> &ObjectKey {
        &self.reconcile.source
    }

    fn namespace(&self) -> &Arc<str> {
        /// A read passes no webhook: it does not wait for writes in the source's namespace.
        static NONE: LazyLock<Arc<str>> = LazyLock::new(Arc::default);
        match &self.job {
            Job::Apply { at, .. } => &at.namespace,
            Job::ConfirmRemovals(_) => &NONE,
        }
    }

    /// A removal sends no content.
    fn permits(&self) -> usize {
        if matches!(self.job, Job::Apply { removal: None, .. }) { self.reconcile.permits } else { 1 }
    }
}

/// One reconcile of a source, until the last of its writes has ended.
struct Reconcile {
    source: ObjectKey,
    state: Arc<Mutex<SourceState>>,
    /// Which of the source's reconciles this is.
    number: u64,
    /// The digest of the source that was planned for; none if the source was deleted.
    digest: Option<Digest>,
    started: Instant,
    /// How many permits a write of the source's content takes.
    permits: usize,
    /// What the plan said.
    figures: SourceFigures,
    progress: Mutex<WriteProgress>,
}

#[derive(Default)]
struct WriteProgress {
    /// Companions that it writes.
    writes: usize,
    /// Companions whose writes have not ended.
    unfinished: usize,
    /// Companions that have what the source has since then.
    in_step: usize,
    summary: Summary,
    /// The source exists and has lost its label.
    unlabelled: bool,
    stale_cache: bool,
    /// A write that failed for a reason that is no trouble of the source.
    failure: Option<(ObjectKey, Failure)>,
}

impl<A: CompanionApi> Reconciler<A> {
    pub fn new(
        settings: &Settings,
        api: A,
        world: SharedWorld,
        queue: Arc<Queue>,
        reporter: Reporter,
        claim: Claim,
        metrics: Metrics,
    ) -> Self {
        let keys = settings.keys.clone();
        let writes = settings.writes.max(1);
        Self {
            applier: Applier::new(api, claim.clone(), keys.clone(), world.clone(), queue.clone(), writes),
            writes: Arc::new(WriteQueue::new(writes)),
            claim,
            world,
            queue,
            reporter,
            brake: Mutex::new(Brake::new(keys, settings.delete_grace)),
            instance_flags: settings.instance_flags.clone(),
            sources: Mutex::default(),
            metrics,
        }
    }

    /// Reconciles one source after the other, for ever. Safe to abort: it waits for nothing but the next source.
    pub async fn reconcile_all(self: Arc<Self>) -> Infallible {
        let mut claim = self.claim.clone();
        loop {
            claim.acquired().await;
            let key = self.queue.next().await;
            self.update_gauges();
            self.reconcile(&key);
            self.queue.done(&key);
        }
    }

    /// Enqueues every source, except those for which a reconcile would do nothing: these would only pass through the
    /// queue. A standby looks for no lost companions, so it forgets them, or they would fill its memory.
    pub async fn resync(&self) {
        if !self.claim.is_held() {
            return self.world.write(World::forget_unwanted_lost);
        }
        for sources in self.world.all_sources().chunks(RESYNC_CHUNK) {
            let due = sources.iter().filter(|key| !self.is_up_to_date(key));
            self.queue.push_all(due.cloned().collect::<Vec<_>>());
            // Whatever else has to be done does not wait for all sources.
            tokio::task::yield_now().await;
        }
        self.update_gauges();
    }

    /// Carries out one queued write after the other, for ever.
    pub async fn write_all(self: Arc<Self>) -> Infallible {
        loop {
            let (write, mut running) = self.writes.next().await;
            let mut write = pin!(self.write(write));
            if tokio::time::timeout(SLOW_WRITE, &mut write).await.is_err() {
                self.writes.takes_long(&mut running);
                write.await;
            }
            self.writes.done(running);
            self.update_gauges();
        }
    }

    /// Opens the queues when this replica becomes the leader, and closes them when it no longer is, for ever. A
    /// standby's queues stay closed; on becoming leader every source is enqueued.
    pub async fn follow_leadership(self: Arc<Self>, annotations: LeaseAnnotations) -> Infallible {
        let mut claim = self.claim.clone();
        loop {
            // The annotations are observed before the claim is.
            claim.acquired().await;
            self.open(&annotations.observed().borrow());
            claim.lost().await;
            self.close();
        }
    }

    /// This replica leads: it goes on with the hold that the Lease shows, and every source is reconciled.
    pub fn open(&self, annotations: &BTreeMap<String, String>) {
        log_notes(&self.brake.lock().take_over(annotations, read_clocks()));
        self.writes.open();
        self.queue.open();
        self.queue.push_all(self.world.all_sources());
    }

    /// This replica no longer leads: its queues are closed, and what it remembers is out of date.
    pub fn close(&self) {
        self.brake.lock().step_down();
        self.queue.close();
        self.writes.close();
        let sources: Vec<_> = self.sources.lock().drain().collect();
        for (_, state) in sources {
            self.close_state(&mut state.lock());
        }
        self.update_gauges();
    }

    /// Shows the hold of the brake in the annotations of the Lease, and does what people ask for there. On a standby,
    /// it remembers the hold of the leader.
    pub fn sync_hold(&self, annotations: &LeaseAnnotations) {
        let leads = self.claim.is_held();
        let observed = annotations.observed().borrow().clone();
        let update = self.brake.lock().sync(leads, &observed, read_clocks());
        log_notes(&update);
        for (key, value) in update.set {
            annotations.set(&key, value);
        }
        self.queue.push_all(update.requeue);
    }

    /// The writes that run or wait.
    pub fn writes(&self) -> Arc<WriteQueue<impl QueuedRequest + Send + 'static>> {
        self.writes.clone()
    }

    /// Waits until every write has ended.
    pub async fn finish(&self) {
        if tokio::time::timeout(SHUTDOWN_TIMEOUT, self.writes.idle()).await.is_err() {
            tracing::warn!(
                "writes did not finish within {} s; stopping without them",
                SHUTDOWN_TIMEOUT.as_secs()
            );
        }
    }

    /// The state of a source; none if this replica does not lead.
    fn state(&self, key: &ObjectKey) -> Option<Arc<Mutex<SourceState>>> {
        // The claim is checked under the lock: `close` finds a state that is added just before the claim is lost.
        let mut sources = self.sources.lock();
        self.claim.is_held().then(|| sources.entry(key.clone()).or_default().clone())
    }

    /// The leader's figures. A standby shows zero, not what it last knew as the leader.
    fn update_gauges(&self) {
        let leads = self.claim.is_held();
        let figure = |count: usize| if leads { count.try_into().unwrap_or(i64::MAX) } else { 0 };
        let (sources, companions) = self.world.read(|world| (world.source_count(), world.companion_count()));
        self.metrics.queue_depth.set(figure(self.queue.depth() + self.writes.depth()));
        self.metrics.sources.set(figure(sources));
        self.metrics.companions.set(figure(companions));
        self.metrics.deletes_held.set((leads && self.brake.lock().is_holding()).into());
    }

    /// The lock on the source's state keeps two reconciles of the same source apart.
    fn reconcile(&self, key: &ObjectKey) {
        if self.world.read(|world| world.is_unconfirmed(key)) {
            return;
        }
        let started = clock::now();
        // If the claim is regained before `follow_leadership` notices, nobody fills the queue again: put the key back.
        let Some(shared) = self.state(key) else { return self.queue.push_all([key.clone()]) };
        let mut state = shared.lock();
        if state.closed {
            // The state was forgotten between the two locks.
            return self.queue.push_all([key.clone()]);
        }
        let in_step = state.retry.in_step;
        let (plan, source) = self.world.read(|world| (plan(world, key, in_step), world.shared_source(key)));
        let digest = source.as_ref().map(|source| source.digest);
        // If the source changes back, companions that got the content in between were not edited by anybody.
        state.retry.in_step = in_step.filter(|in_step| Some(*in_step) == digest);
        state.reconciles += 1;
        state.changed = state.changed.or(self.queue.take_pushed(key));
        let due: Vec<ObjectKey> = plan.deletes().cloned().collect();
        if let Some(source) = &source {
            state.uid.clone_from(&source.uid);
        }
        self.brake.lock().forget_all_but(key, &due, source.is_none());
        let is_paused =
            |source: &Arc<Source>| source.desired.as_ref().is_ok_and(|desired| desired.policy.paused);
        let reconcile = Reconcile {
            source: key.clone(),
            state: shared.clone(),
            number: state.reconciles,
            digest,
            started,
            permits: source.as_deref().map_or(1, |source| self.applier.permits_for(source)),
            figures: SourceFigures {
                wanted: plan.wanted,
                in_step: plan.wanted - plan.out_of_step,
                paused: source.as_ref().is_some_and(is_paused),
            },
            progress: Mutex::default(),
        };
        state.planned.clear();
        let deletable = self.allowed_deletes(&reconcile, &due, &mut state);
        let (jobs, progress) = self.select_writes(&reconcile, &mut state, plan, deletable);
        if progress.unfinished == 0 {
            self.reconcile_ended(&reconcile, &mut state, progress);
            return;
        }
        *reconcile.progress.lock() = progress;
        let reconcile = Arc::new(reconcile);
        let write = |job| Write { reconcile: reconcile.clone(), job };
        if !self.writes.push_all(jobs.into_iter().map(write).collect()) {
            // This replica lost the lead meanwhile, and nobody ends these writes.
            self.close_state(&mut state);
            self.forget(key, &shared);
        }
    }

    /// Whether a reconcile of this source would write, report, remember and forget nothing. Then it counts as one.
    fn is_up_to_date(&self, key: &ObjectKey) -> bool {
        let started = clock::now();
        let Some(state) = self.sources.lock().get(key).cloned() else { return false };
        let state = state.lock();
        let Some(in_step) = state.retry.in_step.filter(|_| state.is_empty()) else { return false };
        // A reconcile forgets deletes that are not due any more.
        if self.brake.lock().awaits_deletes_of(key) {
            return false;
        }
        let up_to_date = self.world.read(|world| {
            let plan = plan(world, key, Some(in_step));
            plan.changes.is_empty()
                && plan.troubles.is_empty()
                && (plan.wanted, plan.wanted) == (state.figures.wanted, state.figures.in_step)
                && world.source(key).is_some_and(|source| source.digest == in_step)
        });
        if up_to_date {
            self.metrics.reconciled(UNCHANGED, clock::elapsed(started));
        }
        up_to_date
    }

    /// The deletes that the brake lets through.
    fn allowed_deletes(
        &self,
        reconcile: &Reconcile,
        due: &[ObjectKey],
        state: &mut SourceState,
    ) -> HashSet<ObjectKey> {
        let key = &reconcile.source;
        let now = reconcile.started;
        let digest = reconcile.digest.unwrap_or_default();
        // Deletes in flight were approved already; asking again would count them twice.
        if !due.iter().any(|at| state.retry.permission(at, false, digest, now) == Permission::Now) {
            return due.iter().cloned().collect();
        }
        let (companions, sources) = self.world.read(|world| world.cross_namespace_counts());
        let decisions = self.brake.lock().ask(now, key, due, Totals { companions, sources });
        let mut allowed = HashSet::new();
        let mut hold = None;
        for (at, decision) in due.iter().zip(decisions) {
            match decision {
                BrakeDecision::Proceed => {
                    allowed.insert(at.clone());
                }
                BrakeDecision::Wait(until) => self.queue.push_at(key.clone(), until),
                BrakeDecision::Hold { until, companions, sources } => {
                    self.queue.push_at(key.clone(), until);
                    hold = hold.max(Some((until, companions, sources)));
                }
            }
        }
        if let Some((until, companions, sources)) = hold {
            let left = SignedDuration::try_from(until.saturating_duration_since(now)).unwrap_or_default();
            let until = format!("{:.0}", clock::wall() + left);
            let flags = self.instance_flags.clone();
            state.planned.push(Trouble::DeletesHeld { companions, sources, until, flags });
        }
        allowed
    }

    /// Chooses the changes that may happen now, and marks them as in flight.
    fn select_writes(
        &self,
        reconcile: &Reconcile,
        state: &mut SourceState,
        plan: Plan,
        deletable: HashSet<ObjectKey>,
    ) -> (Vec<Job>, WriteProgress) {
        let key = &reconcile.source;
        let now = reconcile.started;
        let digest = reconcile.digest.unwrap_or_default();
        state.planned.extend(plan.troubles);
        state.retry.retain_failed(&plan.changes.iter().map(|change| &change.at).collect());
        let mut jobs = Vec::new();
        let mut removals = Vec::new();
        for change in plan.changes {
            let at = change.at;
            let removal = change.action.removal();
            if removal == Some(Removal::Delete) && !deletable.contains(&at) {
                continue;
            }
            let heals = change.action.may_heal() && !state.retry.has_failed(&at);
            match state.retry.start(&at, heals, digest, now) {
                Permission::Now => match removal {
                    Some(removal) => removals.push((at, removal)),
                    None => jobs.push(Job::Apply { at, removal }),
                },
                Permission::At(when) => self.queue.push_at(key.clone(), when),
                Permission::InFlight => {}
            }
        }
        let writes = jobs.len() + removals.len();
        let progress = WriteProgress { writes, unfinished: writes, ..WriteProgress::default() };
        if !removals.is_empty() {
            jobs.push(Job::ConfirmRemovals(removals));
        }
        (jobs, progress)
    }

    async fn confirm_removals(&self, reconcile: &Arc<Reconcile>, removals: Vec<(ObjectKey, Removal)>) {
        let key = &reconcile.source;
        let companions: Vec<ObjectKey> = removals.iter().map(|(at, _)| at.clone()).collect();
        let confirmed = match self.applier.confirm_removals(key, removals).await {
            Ok(Confirmed { removals, unlabelled }) => {
                reconcile.progress.lock().unlabelled = unlabelled;
                removals
            }
            Err(error) => {
                if let Unconfirmed::Unread(failure) = error {
                    tracing::warn!(source = %key, "the source cannot be read before its companions are removed: {failure}");
                }
                let stale = |at| self.write_ended(reconcile, at, Err(ApplyError::StaleCache));
                companions.iter().for_each(stale);
                return;
            }
        };
        let confirmed_set: HashSet<&ObjectKey> = confirmed.iter().map(|(at, _)| at).collect();
        let skipped = companions.iter().filter(|at| !confirmed_set.contains(at));
        skipped.for_each(|at| self.write_ended(reconcile, at, Ok(None)));
        let write = |(at, removal)| {
            let job = Job::Apply { at, removal: Some(removal) };
            Write { reconcile: reconcile.clone(), job }
        };
        self.writes.push_all(confirmed.into_iter().map(write).collect());
    }

    async fn write(&self, write: Write) {
        let permits = write.permits();
        let Write { reconcile, job } = write;
        match job {
            Job::Apply { at, removal } => {
                let history = {
                    let state = reconcile.state.lock();
                    History { in_step: state.retry.in_step, failed: state.retry.has_failed(&at) }
                };
                let write = PlannedWrite { source: reconcile.source.clone(), at, removal, permits };
                let outcome = self.applier.apply(&write, history).await;
                self.write_ended(&reconcile, &write.at, outcome);
            }
            Job::ConfirmRemovals(removals) => self.confirm_removals(&reconcile, removals).await,
        }
    }

    /// Records the outcome of one write, and enqueues the source again if it has to be.
    fn write_ended(&self, reconcile: &Reconcile, at: &ObjectKey, outcome: WriteOutcome) {
        let key = &reconcile.source;
        let now = clock::now();
        let mut state = reconcile.state.lock();
        let mut progress = reconcile.progress.lock();
        let digest = reconcile.digest.unwrap_or_default();
        state.retry.finished(at);
        progress.unfinished -= 1;
        let follows = self.must_follow(reconcile, at, &outcome, &state, &progress);
        let retry_at = match outcome {
            Ok(None) => {
                let is_wanted = self.world.read(|world| world.wants_at(key, at));
                progress.in_step += usize::from(is_wanted && self.is_right(key, at));
                state.retry.succeeded(at, digest);
                None
            }
            Ok(Some(done)) => {
                self.written(reconcile, at, done, &mut state, &mut progress);
                None
            }
            // The first of a reconcile speaks for all of them.
            Err(ApplyError::StaleCache) if progress.stale_cache => None,
            Err(ApplyError::StaleCache) => {
                progress.stale_cache = true;
                Some(state.retry.met_stale_cache(now))
            }
            Err(ApplyError::Retry { trouble, policy, failure }) => {
                progress.failure = failure.map(|failure| (at.clone(), failure)).or(progress.failure.take());
                Some(state.retry.failed(at, trouble.map(|trouble| *trouble), policy, digest, now))
            }
        };
        if let Some(when) = follows.then_some(now).or(retry_at) {
            self.queue.push_at(key.clone(), when);
        }
        if progress.unfinished == 0 {
            let progress = std::mem::take(&mut *progress);
            self.reconcile_ended(reconcile, &mut state, progress);
        }
    }

    /// A companion was written.
    fn written(
        &self,
        reconcile: &Reconcile,
        at: &ObjectKey,
        mut done: Done,
        state: &mut SourceState,
        progress: &mut WriteProgress,
    ) {
        let key = &reconcile.source;
        let now = clock::now();
        let digest = reconcile.digest.unwrap_or_default();
        state.retry.succeeded(at, digest);
        if done.applied.has_content() {
            progress.in_step += 1;
            if let Some(changed) = state.changed {
                self.metrics.propagation_seconds.observe((now - changed).as_secs_f64());
            }
        }
        if progress.unlabelled {
            done.applied = done.applied.unlabelled();
        }
        if matches!(done.applied, Applied::Deleted(_)) {
            self.brake.lock().deleted(now, key, at);
        }
        let manager = done.manager.as_deref();
        if done.applied.is_heal() && state.retry.healed(at, manager, digest, now) {
            self.metrics.fight(manager.unwrap_or_default());
        }
        let names = self.world.read(|world| world.source(key).and_then(|source| source.key_names()).cloned());
        self.reporter.applied(key, names.as_deref().unwrap_or_default(), at, &done);
        progress.summary.add(at, &done);
    }

    /// Whether the source has to be reconciled again at once because of a write that has ended, whatever its outcome.
    fn must_follow(
        &self,
        reconcile: &Reconcile,
        at: &ObjectKey,
        outcome: &WriteOutcome,
        state: &SourceState,
        progress: &WriteProgress,
    ) -> bool {
        if reconcile.number == state.reconciles && !state.closed {
            // The watch may have shown already that the companion is gone again.
            let is_written = matches!(outcome, Ok(Some(done)) if done.applied.has_content());
            return is_written && self.world.read(|world| world.companion(at).is_none());
        }
        // A later reconcile found writes of this one in flight, and could not say whether all is right. Before the last
        // of them, only what is wrong counts: after each of a thousand writes, all thousand companions would be planned
        // again.
        progress.unfinished == 0 || !self.is_right(&reconcile.source, at)
    }

    fn is_right(&self, key: &ObjectKey, at: &ObjectKey) -> bool {
        self.world.read(|world| matches!(plan_companion(world, key, at, None), Decision::Nothing))
    }

    /// All writes of a reconcile have ended: remembers and reports the outcome.
    fn reconcile_ended(&self, reconcile: &Reconcile, state: &mut SourceState, progress: WriteProgress) {
        let key = &reconcile.source;
        let now = clock::now();
        let WriteProgress { writes, in_step, summary, stale_cache, failure, .. } = progress;
        if let Some((at, failure)) = &failure {
            if state.failing.is_new(&failure.kind()) {
                tracing::warn!(source = %key, companion = %at, "the companion could not be written: {failure}; retrying");
            }
        } else if !state.retry.has_failures() {
            state.failing.resolved();
        }
        let latest = reconcile.number == state.reconciles;
        // A write of an earlier reconcile that is in flight may yet put a companion out of step.
        if latest && !stale_cache && !state.retry.is_in_flight() {
            state.retry.cache_was_fresh();
            if failure.is_none() {
                state.retry.in_step = reconcile.digest;
                state.changed = None;
            }
        }
        if latest && !state.closed {
            let mut figures = reconcile.figures;
            figures.in_step += in_step;
            self.metrics.source_figures(std::mem::replace(&mut state.figures, figures), figures);
        }
        if !state.closed {
            let SourceState { uid, retry, planned, reported, .. } = &mut *state;
            let about = About { key, uid };
            // A reconcile that found every write in flight leaves the report to the one that started them: troubles
            // that are found one after the other are reported together.
            if writes > 0 || !retry.is_in_flight() {
                let troubles: Vec<Trouble> = planned.iter().cloned().chain(retry.troubles(now)).collect();
                self.reporter.troubles(about, reported, &troubles, now);
            }
            self.reporter.summary(about, &summary);
            if !reported.is_empty() {
                self.queue.push_at(key.clone(), now + REPEAT_AFTER);
            }
        }
        let result = if stale_cache || failure.is_some() {
            "retry"
        } else if !state.reported.is_empty() {
            "trouble"
        } else if !summary.is_empty() {
            "changed"
        } else {
            UNCHANGED
        };
        self.metrics.reconciled(result, clock::elapsed(reconcile.started));
        let idle = latest && !state.retry.is_in_flight() && state.reported.is_empty();
        let has_companions = || self.world.read(|world| world.has_companions(key));
        if idle && reconcile.digest.is_none() && !has_companions() {
            self.close_state(state);
            self.forget(key, &reconcile.state);
        }
    }

    /// Writes that end from now on change nothing.
    fn close_state(&self, state: &mut SourceState) {
        state.closed = true;
        self.metrics.source_figures(std::mem::take(&mut state.figures), SourceFigures::default());
        self.reporter.withdraw(&mut state.reported);
    }

    fn forget(&self, key: &ObjectKey, state: &Arc<Mutex<SourceState>>) {
        let mut sources = self.sources.lock();
        if sources.get(key).is_some_and(|known| Arc::ptr_eq(known, state)) {
            sources.remove(key);
        }
    }
}

fn read_clocks() -> Moment {
    Moment { instant: clock::now(), wall: clock::wall() }
}

fn log_notes(update: &HoldUpdate) {
    for note in &update.notes {
        if note.is_warning() {
            tracing::warn!("{note}");
        } else {
            tracing::info!("{note}");
        }
    }
}

#[cfg(test)]
mod tests;
