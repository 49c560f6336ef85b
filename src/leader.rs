//! Leader election by a Lease: only the leader writes, for as long as its [`Claim`] is held.
//!
//! Clocks of different replicas are never compared. As in client-go, the Lease of another replica expires when it has
//! not changed for its duration, measured by our own clock from when we first observed it. Its metadata does not count.

mod annotations;
mod lease;

pub use annotations::LeaseAnnotations;
pub use lease::LeaseObject;

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::MicroTime,
    jiff::Timestamp,
};
use kube::{
    Api, Client,
    api::{ObjectMeta, PostParams},
};
use tokio::{sync::watch, task::JoinHandle};

use crate::{
    client::{Failure, with_timeout},
    clock,
    ops::{
        health::{Readiness, Warning},
        log::LogOnce,
        metrics::Metrics,
    },
    watch::Restores,
};

/// How long a standby waits at most before it reads the Lease again.
const RETRY_PERIOD: Duration = Duration::from_secs(1);
/// The pause after a failed request, at most.
const MAX_FAILURE_PAUSE: Duration = Duration::from_millis(500);
/// The pause after the second conflict in a row; it doubles with each further one.
const CONFLICT_PAUSE: Duration = Duration::from_millis(20);
/// The timeout of a request for the Lease, at most.
const MAX_REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// How often the Lease is given back if others keep changing it meanwhile. Otherwise the next leader waits until it expires.
const MAX_RELEASE_ATTEMPTS: u32 = 10;

#[derive(Debug, Clone)]
pub struct ElectionConfig {
    pub namespace: String,
    /// The name of the Lease.
    pub name: String,
    /// Unique to this process: no other replica has it, and no later one.
    pub identity: String,
    /// `leaseDurationSeconds`, so whole seconds.
    pub lease_duration: Duration,
    /// The annotation of the Lease in which the leader records for the others that etcd was restored.
    pub restore_annotation: String,
    /// Annotations that every write of the leader sets: what people's commands should know about this instance.
    pub published: BTreeMap<String, String>,
}

/// The right to write. It expires by itself; each renewal of the Lease extends it.
#[derive(Clone)]
pub struct Claim(watch::Receiver<Option<Instant>>);

impl Claim {
    /// A claim without an election: for `--no-leader-elect`.
    #[must_use]
    pub fn permanent() -> Self {
        // Thirty years, because an `Instant` cannot be infinite.
        let deadline = clock::now() + Duration::from_hours(24 * 365 * 30);
        // A receiver keeps the last value after its sender is dropped.
        Self(watch::channel(Some(deadline)).1)
    }

    /// A claim with the deadline that a test sends.
    #[cfg(test)]
    pub(crate) const fn from_receiver(receiver: watch::Receiver<Option<Instant>>) -> Self {
        Self(receiver)
    }

    /// Whether this replica may write now.
    #[must_use]
    pub fn is_held(&self) -> bool {
        self.0.borrow().is_some_and(|deadline| clock::now() < deadline)
    }

    /// Waits until this replica may write.
    pub async fn acquired(&mut self) {
        while !self.is_held() {
            if self.0.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// Waits until this replica may no longer write.
    pub async fn lost(&mut self) {
        loop {
            let deadline = *self.0.borrow_and_update();
            let Some(deadline) = deadline.filter(|deadline| clock::now() < *deadline) else { return };
            tokio::select! {
                biased;
                () = tokio::time::sleep_until(deadline.into()) => {}
                changed = self.0.changed() => if changed.is_err() {
                    tokio::time::sleep_until(deadline.into()).await;
                },
            }
        }
    }
}

/// The fields of a Lease that the election uses: client-go's `LeaderElectionRecord`.
#[derive(Debug, Clone, PartialEq)]
pub struct LeaseRecord {
    /// Empty when the Lease was released.
    pub holder: String,
    /// How long the Lease is the holder's after each renewal.
    pub duration: Duration,
    pub transitions: i32,
    /// By the clock of the holder. For the others, any other time is a change.
    pub acquire_time: Option<MicroTime>,
    /// By the clock of the holder, which alone asks whether it is earlier or later. For the others, any other time is a
    /// renewal.
    pub renew_time: Option<MicroTime>,
    /// Each write sends it back, because an update removes what it leaves out: annotations and labels of others. Without
    /// a resourceVersion when the Lease was deleted.
    pub metadata: ObjectMeta,
}

impl LeaseRecord {
    const fn is_deleted(&self) -> bool {
        self.metadata.resource_version.is_none()
    }

    /// Whether neither the holder nor another replica has written it since `known`. Metadata is left out: a Lease that
    /// somebody annotates every second must expire when its holder is dead.
    fn is_unchanged_since(&self, known: &Self) -> bool {
        let ignore_metadata = |record: &Self| Self { metadata: ObjectMeta::default(), ..record.clone() };
        self.is_deleted() == known.is_deleted() && ignore_metadata(self) == ignore_metadata(known)
    }
}

/// The Lease as last observed.
#[derive(Debug, Clone, Default)]
pub struct ObservedLease {
    /// The record, and when it was first observed like this.
    record: Option<(LeaseRecord, Instant)>,
    /// When our last successful write was sent.
    renewed: Option<Instant>,
}

/// What to do next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaseAction {
    /// There is no Lease, and the holder of a deleted one has had time to notice.
    Create,
    /// The Lease was released, or has expired.
    Acquire,
    /// This replica holds the Lease, and a third of its duration is over.
    Renew,
    /// Decide again after this time.
    Wait(Duration),
}

impl ObservedLease {
    /// Records what a read returned: `None` when there is no Lease.
    pub fn observe(&mut self, found: Option<LeaseRecord>, now: Instant) {
        // The holder of a deleted Lease may not know and still write, so the deletion counts as a renewal.
        let deleted = || {
            let (known, _) = self.record.as_ref()?;
            Some(LeaseRecord { metadata: ObjectMeta::default(), ..known.clone() })
        };
        let found = found.or_else(deleted);
        match (&mut self.record, found) {
            (Some((known, _)), Some(found)) if found.is_unchanged_since(known) => *known = found,
            (_, found) => self.record = found.map(|record| (record, now)),
        }
    }

    /// Records that a write of ours, sent at `sent`, succeeded.
    pub fn written(&mut self, record: LeaseRecord, sent: Instant, now: Instant) {
        self.observe(Some(record), now);
        self.renewed = Some(sent);
    }
}

/// Decides what the replica called `identity` does next.
#[must_use]
pub fn decide(identity: &str, lease: &ObservedLease, lease_duration: Duration, now: Instant) -> LeaseAction {
    let Some((record, observed)) = &lease.record else { return LeaseAction::Create };
    let is_ours = record.holder == identity;
    if is_ours && !record.is_deleted() {
        let renewal = lease.renewed.map_or(now, |sent| sent + lease_duration / 3);
        return match renewal.saturating_duration_since(now) {
            Duration::ZERO => LeaseAction::Renew,
            wait => LeaseAction::Wait(wait),
        };
    }
    // Our deleted Lease, unless another replica may have held it since.
    let still_ours = is_ours && lease.renewed.is_some_and(|sent| now < sent + lease_duration);
    let expiry = *observed + record.duration;
    if still_ours || record.holder.is_empty() || expiry <= now {
        return if record.is_deleted() { LeaseAction::Create } else { LeaseAction::Acquire };
    }
    LeaseAction::Wait(RETRY_PERIOD.min(lease_duration / 5).min(expiry - now))
}

/// The sign that etcd was restored, if a Lease is older than it was `known` to be. Both were read consistently.
#[must_use]
pub fn sign_of_restore(identity: &str, known: &LeaseRecord, found: &LeaseRecord) -> Option<&'static str> {
    let version = |record: &LeaseRecord| record.metadata.resource_version.as_ref()?.parse::<u64>().ok();
    let ours = [known, found].iter().all(|record| record.holder == identity);
    let same_lease = known.metadata.uid == found.metadata.uid;
    let renewed = |record: &LeaseRecord| record.renew_time.as_ref().map(|time| time.0);
    if version(known).zip(version(found)).is_some_and(|(known, found)| found < known) {
        Some("the Lease has an older version than before")
    } else if ours && renewed(known).zip(renewed(found)).is_some_and(|(known, found)| found < known) {
        Some("the Lease has lost a renewal of this replica")
    } else if same_lease && found.transitions < known.transitions {
        Some("the Lease has lost a change of its holder")
    } else {
        None
    }
}

/// Until when this replica may write after a renewal that was sent at `sent`.
///
/// The others wait for the whole duration after they observe the renewal, and they observe it after it was sent. The
/// last third is left for writes under way; the preconditions of a write that takes even longer stop it.
#[must_use]
pub fn renew_deadline(sent: Instant, lease_duration: Duration) -> Instant {
    sent + lease_duration * 2 / 3
}

/// The pause after this many conflicts in a row. The first retry is immediate, because people and tools annotate the
/// Lease. Somebody may write it all the time: requests then become fewer, and still suffice to renew it in time.
#[must_use]
pub fn conflict_pause(conflicts: u32, lease_duration: Duration) -> Duration {
    let doublings = conflicts.saturating_sub(2).min(10);
    let pause = if conflicts < 2 { Duration::ZERO } else { CONFLICT_PAUSE * (1 << doublings) };
    pause.min(failure_pause(lease_duration))
}

fn failure_pause(lease_duration: Duration) -> Duration {
    MAX_FAILURE_PAUSE.min(lease_duration / 8)
}

/// The running election of this replica.
pub struct Election {
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

/// Starts to compete for the Lease.
#[must_use]
pub fn start(
    client: Client,
    config: ElectionConfig,
    annotations: LeaseAnnotations,
    restores: Restores,
    metrics: Metrics,
    readiness: Readiness,
) -> (Claim, Election) {
    let (stop, stopped) = watch::channel(false);
    let leases = Api::namespaced(client, &config.namespace);
    let (claim, candidate) = Candidate::new(leases, config, annotations, restores, metrics, readiness);
    (claim, Election { stop, task: tokio::spawn(candidate.run(stopped)) })
}

impl Election {
    /// Stops, and releases the Lease if this replica holds it, so that another does not wait for it to expire.
    pub async fn release(self) {
        self.stop.send_replace(true);
        drop(self.task.await);
    }
}

/// What the election needs of the API server; the simulation has one in memory. `Ok(None)`: there is no Lease.
pub(crate) trait LeaseApi: Send + Sync + 'static {
    fn get(
        &self,
        name: &str,
        timeout: Duration,
    ) -> impl Future<Output = Result<Option<LeaseObject>, Failure>> + Send;

    fn create(
        &self,
        lease: &LeaseObject,
        timeout: Duration,
    ) -> impl Future<Output = Result<LeaseObject, Failure>> + Send;

    fn replace(
        &self,
        name: &str,
        lease: &LeaseObject,
        timeout: Duration,
    ) -> impl Future<Output = Result<LeaseObject, Failure>> + Send;
}

impl LeaseApi for Api<LeaseObject> {
    async fn get(&self, name: &str, timeout: Duration) -> Result<Option<LeaseObject>, Failure> {
        with_timeout(timeout, self.get_opt(name)).await
    }

    async fn create(&self, lease: &LeaseObject, timeout: Duration) -> Result<LeaseObject, Failure> {
        with_timeout(timeout, Self::create(self, &PostParams::default(), lease)).await
    }

    async fn replace(
        &self,
        name: &str,
        lease: &LeaseObject,
        timeout: Duration,
    ) -> Result<LeaseObject, Failure> {
        with_timeout(timeout, Self::replace(self, name, &PostParams::default(), lease)).await
    }
}

pub(crate) struct Candidate<L> {
    leases: L,
    config: ElectionConfig,
    lease: ObservedLease,
    /// The Lease as it was last read or written, and how many restores were known then.
    last_seen: Option<(LeaseRecord, u64)>,
    annotations: LeaseAnnotations,
    restores: Restores,
    /// Changes with each restore that the Lease does not announce yet.
    restored: watch::Receiver<u64>,
    claim: watch::Sender<Option<Instant>>,
    metrics: Metrics,
    readiness: Readiness,
    /// Since the last success.
    conflicts: u32,
    log_once: LogOnce,
    /// The log says that the claim has expired.
    expiry_logged: bool,
}

impl<L: LeaseApi> Candidate<L> {
    /// A replica that has not read the Lease yet, and its claim.
    pub(crate) fn new(
        leases: L,
        config: ElectionConfig,
        annotations: LeaseAnnotations,
        restores: Restores,
        metrics: Metrics,
        readiness: Readiness,
    ) -> (Claim, Self) {
        let (claim, receiver) = watch::channel(None);
        let candidate = Self {
            leases,
            config,
            lease: ObservedLease::default(),
            last_seen: None,
            annotations,
            restored: restores.subscribe(),
            restores,
            claim,
            metrics,
            readiness,
            conflicts: 0,
            log_once: LogOnce::default(),
            expiry_logged: false,
        };
        (Claim(receiver), candidate)
    }

    /// Competes for the Lease until `stop` turns true, then gives it back.
    pub(crate) async fn run(mut self, mut stop: watch::Receiver<bool>) {
        let mut annotated = self.annotations.wakes();
        loop {
            // Not cancelled by a stop: a write that succeeds unseen leaves a Lease that is never released.
            let pause = self.try_once().await;
            self.report();
            // After a conflict, the annotations that were read may want an answer at once: that must not end the pause.
            let may_hurry = self.conflicts == 0;
            tokio::select! {
                biased;
                _ = stop.wait_for(|stop| *stop) => break,
                _ = annotated.changed(), if may_hurry => {}
                _ = self.restored.changed(), if may_hurry => {
                    let now = clock::wall().to_string();
                    self.annotations.set(&self.config.restore_annotation, Some(now));
                }
                () = tokio::time::sleep(pause) => {}
            }
        }
        self.release().await;
    }

    /// Carries out one action, and returns how long to wait before the next.
    async fn try_once(&mut self) -> Duration {
        // The leader knows what it wrote; a standby reads the Lease before each decision. After a conflict, the leader reads
        // it after the pause: somebody who writes it all the time would change it again during the pause.
        if (!self.is_holder() || self.conflicts > 0)
            && let Err(failure) = self.read().await
        {
            return self.log_failure(&failure);
        }
        let ElectionConfig { identity, lease_duration, .. } = &self.config;
        let annotates = self.is_holder() && !self.annotations.wanted().is_empty();
        let outcome = match decide(identity, &self.lease, *lease_duration, clock::now()) {
            LeaseAction::Wait(wait) if !annotates => {
                self.resolved();
                return wait;
            }
            LeaseAction::Create => match self.write(None).await {
                // There is no namespace to create it in. To read it again would find out nothing.
                Err(failure @ Failure::NotFound) => return self.log_failure(&failure),
                outcome => outcome,
            },
            LeaseAction::Acquire | LeaseAction::Renew | LeaseAction::Wait(_) => {
                self.write(self.lease.record.clone().map(|(record, _)| record)).await
            }
        };
        match outcome {
            Ok(()) => {
                self.resolved();
                Duration::ZERO
            }
            // Another replica was faster, or the Lease was annotated or deleted.
            Err(Failure::Conflict | Failure::AlreadyExists | Failure::NotFound) => {
                self.conflicts = self.conflicts.saturating_add(1);
                conflict_pause(self.conflicts, self.config.lease_duration)
            }
            Err(failure) => self.log_failure(&failure),
        }
    }

    fn holder(&self) -> Option<&String> {
        self.lease.record.as_ref().map(|(record, _)| &record.holder)
    }

    fn is_holder(&self) -> bool {
        let record = self.lease.record.as_ref().map(|(record, _)| record);
        record.is_some_and(|record| record.holder == self.config.identity && !record.is_deleted())
    }

    fn another_leads(&self) -> bool {
        self.holder().is_some_and(|holder| *holder != self.config.identity)
    }

    async fn read(&mut self) -> Result<(), Failure> {
        let found = self.leases.get(&self.config.name, self.request_timeout()).await?;
        let found = found.map(LeaseRecord::from);
        self.lease.observe(found.clone(), clock::now());
        let mut outdated = if self.another_leads() { self.annotations.wanted() } else { BTreeMap::new() };
        // A standby that has noticed a restore announces it when it leads, unless the leader does so first. The Lease of
        // the backup may name a leader that is gone.
        let own_announcement = outdated.remove_entry(&self.config.restore_annotation);
        if let Some(found) = found {
            if let Some((known, count)) = &self.last_seen {
                if let Some(sign) = sign_of_restore(&self.config.identity, known, &found) {
                    self.restores.report(*count, sign);
                } else if self.restore_announced(known, &found) {
                    self.restores.report(*count, "the leader noticed it");
                    self.restored.mark_unchanged();
                    outdated.extend(own_announcement);
                }
            }
            self.saw(found);
        }
        self.annotations.done(&outdated);
        Ok(())
    }

    /// Writes the Lease with this replica as its holder: in place of the `previous` record, or a new Lease.
    async fn write(&mut self, previous: Option<LeaseRecord>) -> Result<(), Failure> {
        let sent = clock::now();
        let changes = self.annotations.wanted();
        let mut lease = new_lease(&self.config, previous.as_ref(), &self.config.identity, clock::wall());
        let published = self.config.published.iter();
        annotate(
            &mut lease.metadata,
            &published.map(|(key, value)| (key.clone(), Some(value.clone()))).collect(),
        );
        annotate(&mut lease.metadata, &changes);
        let written = match previous {
            None => self.leases.create(&LeaseObject(lease), self.request_timeout()).await?,
            Some(_) => self.replace(lease).await?,
        };
        self.annotations.done(&changes);
        let written = LeaseRecord::from(written);
        self.lease.written(written.clone(), sent, clock::now());
        self.saw(written);
        let was_leader = self.claim.borrow().is_some_and(|deadline| sent < deadline);
        self.claim.send_replace(Some(renew_deadline(sent, self.config.lease_duration)));
        if !was_leader {
            tracing::info!(identity = self.config.identity, "this replica is now the leader and writes");
        }
        Ok(())
    }

    /// Whether another replica, as the leader, has announced since the last read that etcd was restored.
    fn restore_announced(&self, known: &LeaseRecord, found: &LeaseRecord) -> bool {
        let announced = |record: &LeaseRecord| {
            record.metadata.annotations.as_ref()?.get(&self.config.restore_annotation).cloned()
        };
        self.another_leads() && announced(found).is_some() && announced(found) != announced(known)
    }

    fn saw(&mut self, lease: LeaseRecord) {
        self.annotations.observe(lease.metadata.annotations.as_ref());
        self.last_seen = Some((lease, self.restores.count()));
    }

    async fn replace(&self, lease: Lease) -> Result<LeaseObject, Failure> {
        self.leases.replace(&self.config.name, &LeaseObject(lease), self.request_timeout()).await
    }

    async fn release(mut self) {
        self.claim.send_replace(None);
        self.metrics.leader.set(0);
        if !self.is_holder() {
            return;
        }
        let mut outcome = self.give_back().await;
        for _ in 1..MAX_RELEASE_ATTEMPTS {
            // Somebody has annotated the Lease since it was last read.
            if !matches!(outcome, Err(Failure::Conflict)) || self.read().await.is_err() || !self.is_holder() {
                break;
            }
            outcome = self.give_back().await;
        }
        match outcome {
            Ok(_) => tracing::info!("released the Lease"),
            Err(failure) => {
                tracing::warn!("the Lease could not be released ({failure}): it expires by itself")
            }
        }
    }

    /// Writes the Lease without a holder, and with what the others should know.
    async fn give_back(&self) -> Result<LeaseObject, Failure> {
        let record = self.lease.record.as_ref().map(|(record, _)| record);
        let mut lease = new_lease(&self.config, record, "", clock::wall());
        annotate(&mut lease.metadata, &self.annotations.wanted());
        self.replace(lease).await
    }

    /// Short enough that a request that hangs leaves time for another before the claim expires.
    fn request_timeout(&self) -> Duration {
        (self.config.lease_duration / 4).min(MAX_REQUEST_TIMEOUT)
    }

    fn resolved(&mut self) {
        self.conflicts = 0;
        self.log_once.resolved();
        self.metrics.lease_failing.set(0);
        self.readiness.warn(Warning::Lease, false);
    }

    /// Logs a failure once until it changes, and returns the pause before the next attempt.
    fn log_failure(&mut self, failure: &Failure) -> Duration {
        let ElectionConfig { namespace, name, .. } = &self.config;
        let text = match failure {
            Failure::Forbidden(detail) => {
                format!("no access to the Lease ({detail}): apply the RBAC of `lockstep manifests`")
            }
            Failure::NotFound => format!(
                "the Lease {name} cannot be created, because the namespace {namespace} does not exist: apply \
                 `lockstep manifests --create-namespace`, or choose another --namespace"
            ),
            other => format!("the Lease cannot be read or written ({other})"),
        };
        if self.log_once.is_new(&text) {
            tracing::warn!("{text}; nothing is mirrored by this replica; retrying");
        }
        self.metrics.lease_failing.set(1);
        self.readiness.warn(Warning::Lease, true);
        failure_pause(self.config.lease_duration)
    }

    /// Logs when the claim is lost, and sets the metric.
    fn report(&mut self) {
        let deadline = *self.claim.borrow();
        let expired = deadline.is_some_and(|deadline| deadline <= clock::now());
        let another_leads = self.another_leads();
        if another_leads && deadline.is_some() {
            tracing::warn!("another replica is now the leader: this one stops writing");
            self.claim.send_replace(None);
        } else if expired && !self.expiry_logged {
            tracing::warn!("the Lease was not renewed in time: this replica does not write until it is");
        }
        self.expiry_logged = expired;
        self.metrics.leader.set(i64::from(deadline.is_some() && !expired && !another_leads));
    }
}

/// The Lease with this holder, in place of the `previous` record.
fn new_lease(config: &ElectionConfig, previous: Option<&LeaseRecord>, holder: &str, now: Timestamp) -> Lease {
    let now = MicroTime(now);
    let same_term = previous.is_some_and(|record| record.holder == holder || holder.is_empty());
    let seconds = i32::try_from(config.lease_duration.as_secs()).unwrap_or(i32::MAX);
    let metadata = previous.map(|record| record.metadata.clone()).unwrap_or_default();
    // Somebody may have written the largest number. The API server refuses the one that follows it.
    let transitions = previous.map_or(0, |record| record.transitions.saturating_add(i32::from(!same_term)));
    Lease {
        metadata: ObjectMeta { name: Some(config.name.clone()), ..metadata },
        spec: Some(LeaseSpec {
            holder_identity: Some(holder.to_owned()),
            lease_duration_seconds: Some(seconds),
            lease_transitions: Some(transitions),
            acquire_time: previous
                .filter(|_| same_term)
                .and_then(|record| record.acquire_time.clone())
                .or(Some(now.clone())),
            renew_time: Some(now),
            ..LeaseSpec::default()
        }),
    }
}

fn annotate(metadata: &mut ObjectMeta, changes: &annotations::Changes) {
    let annotations = metadata.annotations.get_or_insert_default();
    for (key, value) in changes {
        match value {
            Some(value) => drop(annotations.insert(key.clone(), value.clone())),
            None => drop(annotations.remove(key)),
        }
    }
}

impl From<LeaseObject> for LeaseRecord {
    fn from(LeaseObject(lease): LeaseObject) -> Self {
        let spec = lease.spec.unwrap_or_default();
        let seconds = spec.lease_duration_seconds.unwrap_or_default();
        Self {
            holder: spec.holder_identity.unwrap_or_default(),
            duration: Duration::from_secs(u64::try_from(seconds).unwrap_or_default()),
            transitions: spec.lease_transitions.unwrap_or_default(),
            acquire_time: spec.acquire_time,
            renew_time: spec.renew_time,
            metadata: lease.metadata,
        }
    }
}

/// The hostname, which is the name of the pod, and a random number.
#[must_use]
pub fn identity() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("{}_{:016x}", host.trim(), fastrand::u64(..))
}

#[cfg(test)]
mod tests;
