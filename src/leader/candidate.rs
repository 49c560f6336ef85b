//! The candidate: reads and writes the Lease as [`decide`] says, and extends the claim.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use kube::Client;
use tokio::{sync::watch, task::JoinHandle};

use super::{
    annotations::{Changes, LeaseAnnotations, annotate},
    claim::Claim,
};
use crate::{
    clock,
    ops::{health::Readiness, metrics::Metrics},
};
use lockstep_cluster::{
    lease_client::{LeaseApi, LeaseClient},
    watch::Restores,
};
use lockstep_core::{
    failure::{Failure, backoff::LogOnce},
    lease::{
        election::{
            LeaseAction, ObservedLease, conflict_pause, decide, failure_pause, next_record, renew_deadline,
            sign_of_restore,
        },
        record::LeaseRecord,
    },
};

/// The timeout of a request for the Lease, at most.
const MAX_REQUEST_TIMEOUT: Duration = Duration::from_secs(5);
/// How often the Lease is given back if others keep changing it meanwhile. Otherwise the next leader waits until it
/// expires.
const MAX_RELEASE_ATTEMPTS: u32 = 10;

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

/// The running election of this replica.
pub struct Election {
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

/// Starts to compete for the Lease.
pub fn start(
    client: Client,
    config: ElectionConfig,
    annotations: LeaseAnnotations,
    restores: Restores,
    metrics: Metrics,
    readiness: Readiness,
) -> (Claim, Election) {
    let (stop, stopped) = watch::channel(false);
    let leases = LeaseClient::new(client, &config.namespace, &config.name);
    let (claim, candidate) = Candidate::new(leases, config, annotations, restores, metrics, readiness);
    (claim, Election { stop, task: tokio::spawn(candidate.run(stopped)) })
}

impl Election {
    /// Stops, and releases the Lease if this replica holds it, so that another does not wait for it to expire.
    pub async fn release(self) {
        self.stop.send_replace(true);
        let _ = self.task.await;
    }
}

pub struct Candidate<L> {
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
    pub fn new(
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
        (Claim::from_receiver(receiver), candidate)
    }

    /// Competes for the Lease until `stop` turns true, then gives it back.
    pub async fn run(mut self, mut stop: watch::Receiver<bool>) {
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
        // The leader knows what it wrote; a standby reads the Lease before each decision. After a conflict, the leader
        // reads it after the pause: somebody who writes it all the time would change it again during the pause.
        if (!self.is_holder() || self.conflicts > 0)
            && let Err(failure) = self.read().await
        {
            return self.log_failure(&failure);
        }
        let ElectionConfig { identity, lease_duration, .. } = &self.config;
        let action = decide(identity, &self.lease, *lease_duration, clock::now());
        if let LeaseAction::Wait(wait) = action
            && (!self.is_holder() || self.annotations.wanted().is_empty())
        {
            self.resolved();
            return wait;
        }
        match self.write().await {
            Ok(()) => {
                self.resolved();
                Duration::ZERO
            }
            // There is no namespace to create it in. To read it again would find out nothing.
            Err(failure @ Failure::NotFound) if action == LeaseAction::Create => self.log_failure(&failure),
            // Another replica was faster, or the Lease was annotated or deleted.
            Err(Failure::Conflict | Failure::AlreadyExists | Failure::NotFound) => {
                self.conflicts = self.conflicts.saturating_add(1);
                conflict_pause(self.conflicts, self.config.lease_duration)
            }
            Err(failure) => self.log_failure(&failure),
        }
    }

    fn is_holder(&self) -> bool {
        self.lease.record().is_some_and(|one| one.holder == self.config.identity && !one.is_deleted())
    }

    fn another_leads(&self) -> bool {
        self.lease.record().is_some_and(|record| record.holder != self.config.identity)
    }

    async fn read(&mut self) -> Result<(), Failure> {
        let found = match self.leases.get(self.request_timeout()).await {
            Err(Failure::NotFound) => None,
            answer => Some(answer?),
        };
        self.lease.observe(found.clone(), clock::now());
        let mut outdated = if self.another_leads() { self.annotations.wanted() } else { BTreeMap::new() };
        // A standby that has noticed a restore announces it when it leads, unless the leader does so first. The Lease
        // of the backup may name a leader that is gone.
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

    /// Takes or renews the Lease.
    async fn write(&mut self) -> Result<(), Failure> {
        let sent = clock::now();
        let changes = self.annotations.wanted();
        let written = self.send(&self.config.identity, &changes).await?;
        self.annotations.done(&changes);
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
        let (before, now) =
            [known, found].map(|lease| lease.annotation(&self.config.restore_annotation)).into();
        self.another_leads() && now.is_some() && now != before
    }

    fn saw(&mut self, lease: LeaseRecord) {
        self.annotations.observe(lease.metadata.annotations.as_ref());
        self.last_seen = Some((lease, self.restores.count()));
    }

    /// Writes the Lease with this holder: in place of the one that is there, or a new one.
    async fn send(&self, holder: &str, changes: &Changes) -> Result<LeaseRecord, Failure> {
        let ElectionConfig { name, lease_duration, published, .. } = &self.config;
        let previous = self.lease.record().filter(|record| !record.is_deleted());
        let mut lease = next_record(name, *lease_duration, previous, holder, clock::wall());
        let published = published.iter().map(|(key, value)| (key.clone(), Some(value.clone())));
        annotate(&mut lease, published.chain(changes.clone()));
        self.leases.write(&lease, self.request_timeout()).await
    }

    async fn release(mut self) {
        self.claim.send_replace(None);
        self.metrics.leader.set(0);
        if !self.is_holder() {
            return;
        }
        let mut outcome = self.send("", &self.annotations.wanted()).await;
        for _ in 1..MAX_RELEASE_ATTEMPTS {
            // Somebody has annotated the Lease since it was last read.
            if !matches!(outcome, Err(Failure::Conflict)) || self.read().await.is_err() || !self.is_holder() {
                break;
            }
            outcome = self.send("", &self.annotations.wanted()).await;
        }
        match outcome {
            Ok(_) => tracing::info!("released the Lease"),
            Err(failure) => {
                tracing::warn!("the Lease could not be released ({failure}): it expires by itself")
            }
        }
    }

    /// Short enough that a request that hangs leaves time for another before the claim expires.
    fn request_timeout(&self) -> Duration {
        (self.config.lease_duration / 4).min(MAX_REQUEST_TIMEOUT)
    }

    fn resolved(&mut self) {
        self.conflicts = 0;
        self.log_once.resolved();
        self.readiness.set_lease_failing(false);
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
        self.readiness.set_lease_failing(true);
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

/// The hostname, which is the name of the pod, and a random number.
pub fn identity() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("{}_{:016x}", host.trim(), fastrand::u64(..))
}
