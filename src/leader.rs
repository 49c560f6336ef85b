//! One replica writes at a time: a Lease, and the claim that goes with it.
//!
//! Time is always our own: how long another's Lease has stood still is measured from when we first saw it so, and no
//! clock is compared with another's.

use std::time::{Duration, Instant};

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
    client::{Failure, within},
    ops::{log::LogOnce, metrics::Metrics},
};

/// How often who does not lead looks whether the Lease is free, at least.
const LOOK: Duration = Duration::from_secs(1);
/// A pause before trying again what failed.
const RETRY: Duration = Duration::from_millis(500);

/// What an election needs to know.
#[derive(Debug, Clone)]
pub struct Settings {
    pub namespace: String,
    /// The Lease's name.
    pub name: String,
    /// Who we are; no other replica is called like that, and no later one.
    pub identity: String,
    /// In whole seconds, as a Lease knows nothing less.
    pub duration: Duration,
}

/// Proof that this replica may write, until an instant that moves on for as long as the Lease is renewed.
#[derive(Clone)]
pub struct Claim(watch::Receiver<Option<Instant>>);

impl Claim {
    /// For who has no rivals.
    #[must_use]
    pub fn unrivalled() -> Self {
        // Some decades: an instant cannot be infinite.
        let ever = Instant::now() + Duration::from_hours(24 * 365 * 30);
        let (sender, receiver) = watch::channel(Some(ever));
        // The last value stays readable when the sender is gone.
        drop(sender);
        Self(receiver)
    }

    /// For tests, which say until when.
    #[cfg(test)]
    pub(crate) const fn told_by(receiver: watch::Receiver<Option<Instant>>) -> Self {
        Self(receiver)
    }

    /// Whether we may write now. It runs out by itself, should the API server fall silent.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.0.borrow().is_some_and(|until| Instant::now() < until)
    }

    /// Waits until we may write.
    pub async fn held(&mut self) {
        while !self.holds() {
            if self.0.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        }
    }

    /// Waits until we may not write any more.
    pub async fn lost(&mut self) {
        loop {
            let until = *self.0.borrow_and_update();
            let Some(until) = until.filter(|until| Instant::now() < *until) else { return };
            tokio::select! {
                () = tokio::time::sleep_until(until.into()) => {}
                changed = self.0.changed() => if changed.is_err() {
                    tokio::time::sleep_until(until.into()).await;
                },
            }
        }
    }
}

/// A Lease, as it was last seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Empty when it was released.
    pub holder: String,
    /// How long it is the holder's after each renewal.
    pub duration: Duration,
    /// Empty when it was deleted.
    pub version: String,
    pub transitions: i32,
    /// When the holder became it, by its own clock: for people to read.
    pub acquired: Option<MicroTime>,
}

/// What we know about the Lease.
#[derive(Debug, Clone, Default)]
pub struct Seen {
    /// The last record, and when we first saw it like that.
    record: Option<(Record, Instant)>,
    /// When we sent the last renewal that succeeded.
    renewed: Option<Instant>,
}

/// What to do about the Lease.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// There is none, and nobody holds one that was deleted.
    Create,
    /// It is free, or has run out.
    Take,
    /// It is ours, and a third of its time is over.
    Renew,
    /// Look again after this time.
    Wait(Duration),
}

impl Seen {
    /// What a look at the Lease showed: none when there is none.
    pub fn look(&mut self, found: Option<Record>, now: Instant) {
        // Who holds a Lease that was deleted may not know yet, and write on: it counts as renewed when we missed it.
        let deleted =
            || self.record.as_ref().map(|(known, _)| Record { version: String::new(), ..known.clone() });
        let found = found.or_else(deleted);
        match (&self.record, found) {
            (Some((known, _)), Some(found)) if *known == found => {}
            (_, found) => self.record = found.map(|record| (record, now)),
        }
    }

    /// A write of ours, sent at this instant, went through.
    pub fn won(&mut self, record: Record, sent: Instant, now: Instant) {
        self.look(Some(record), now);
        self.renewed = Some(sent);
    }
}

/// Decides what to do.
#[must_use]
pub fn decide(identity: &str, seen: &Seen, duration: Duration, now: Instant) -> Step {
    let look = LOOK.min(duration / 5);
    let Some((record, since)) = &seen.record else { return Step::Create };
    if record.holder == identity {
        let next = seen.renewed.map_or(now, |sent| sent + duration / 3);
        return match next.saturating_duration_since(now) {
            Duration::ZERO => Step::Renew,
            wait => Step::Wait(wait),
        };
    }
    let expires = *since + record.duration;
    if record.holder.is_empty() || expires <= now {
        return if record.version.is_empty() { Step::Create } else { Step::Take };
    }
    Step::Wait(look.min(expires - now))
}

/// Until when we may write after a renewal that was sent at this instant. Others wait for the whole duration after they
/// see it, and they see it later than we sent it: a third is left for writes under way. One that takes longer is fenced
/// by its preconditions.
#[must_use]
pub fn claimed_until(sent: Instant, duration: Duration) -> Instant {
    sent + duration * 2 / 3
}

/// Our part in an election, until it is given back.
pub struct Election {
    stop: watch::Sender<bool>,
    task: JoinHandle<()>,
}

/// Takes part in the election.
#[must_use]
pub fn start(client: Client, settings: Settings, metrics: Metrics) -> (Claim, Election) {
    let (claim, receiver) = watch::channel(None);
    let (stop, stopped) = watch::channel(false);
    let leases = Api::namespaced(client, &settings.namespace);
    let candidate = Candidate {
        leases,
        settings,
        seen: Seen::default(),
        claim,
        metrics,
        log_once: LogOnce::default(),
        lapsed: false,
    };
    (Claim(receiver), Election { stop, task: tokio::spawn(candidate.run(stopped)) })
}

impl Election {
    /// Gives the Lease back, if we hold it, so that another need not wait for it to run out.
    pub async fn leave(self) {
        self.stop.send_replace(true);
        drop(self.task.await);
    }
}

struct Candidate {
    leases: Api<Lease>,
    settings: Settings,
    seen: Seen,
    claim: watch::Sender<Option<Instant>>,
    metrics: Metrics,
    log_once: LogOnce,
    /// The claim has run out, and that was told.
    lapsed: bool,
}

impl Candidate {
    async fn run(mut self, mut stop: watch::Receiver<bool>) {
        loop {
            // Never cut short: a write that went through unseen could not be given back.
            let pause = self.turn().await;
            self.report();
            tokio::select! {
                biased;
                _ = stop.wait_for(|stop| *stop) => break,
                () = tokio::time::sleep(pause) => {}
            }
        }
        self.release().await;
    }

    /// Takes one step, and returns how long to rest.
    async fn turn(&mut self) -> Duration {
        // Who does not lead looks before each decision; who leads knows what it wrote.
        let leads =
            self.seen.record.as_ref().is_some_and(|(record, _)| record.holder == self.settings.identity);
        if !leads && let Err(failure) = self.look().await {
            return self.complain(&failure);
        }
        let Settings { identity, duration, .. } = &self.settings;
        let outcome = match decide(identity, &self.seen, *duration, Instant::now()) {
            Step::Wait(wait) => {
                self.log_once.resolved();
                return wait;
            }
            Step::Create => self.write(None).await,
            Step::Take | Step::Renew => self.write(self.seen.record.clone().map(|(record, _)| record)).await,
        };
        match outcome {
            Ok(()) => {
                self.log_once.resolved();
                Duration::ZERO
            }
            // Somebody was quicker, or it is gone.
            Err(Failure::Conflict | Failure::AlreadyExists | Failure::NotFound) => {
                self.seen.record = None;
                match self.look().await {
                    Ok(()) => Duration::ZERO,
                    Err(failure) => self.complain(&failure),
                }
            }
            Err(failure) => self.complain(&failure),
        }
    }
}

impl Candidate {
    async fn look(&mut self) -> Result<(), Failure> {
        let found = within(self.limit(), self.leases.get_opt(&self.settings.name)).await?;
        self.seen.look(found.as_ref().map(Record::from), Instant::now());
        Ok(())
    }

    /// Writes the Lease as ours: over this record, or anew.
    async fn write(&mut self, over: Option<Record>) -> Result<(), Failure> {
        let sent = Instant::now();
        let lease = self.lease(over.as_ref(), &self.settings.identity);
        let params = PostParams::default();
        let written = match over {
            None => within(self.limit(), self.leases.create(&params, &lease)).await?,
            Some(_) => {
                within(self.limit(), self.leases.replace(&self.settings.name, &params, &lease)).await?
            }
        };
        self.seen.won(Record::from(&written), sent, Instant::now());
        let first = !self.claim.borrow().is_some_and(|until| sent < until);
        self.claim.send_replace(Some(claimed_until(sent, self.settings.duration)));
        if first {
            tracing::info!(identity = self.settings.identity, "leading: this replica writes from now on");
        }
        Ok(())
    }

    async fn release(mut self) {
        self.claim.send_replace(None);
        self.metrics.leader.set(0);
        let Some((record, _)) = self.seen.record.take() else { return };
        if record.holder != self.settings.identity {
            return;
        }
        let lease = self.lease(Some(&record), "");
        let params = PostParams::default();
        let released = within(self.limit(), self.leases.replace(&self.settings.name, &params, &lease)).await;
        match released {
            Ok(_) => tracing::info!("the Lease is given back"),
            Err(failure) => {
                tracing::warn!("the Lease could not be given back ({failure}): it runs out by itself")
            }
        }
    }

    fn lease(&self, over: Option<&Record>, holder: &str) -> Lease {
        let now = MicroTime(Timestamp::now());
        let same = over.is_some_and(|record| record.holder == holder || holder.is_empty());
        let transitions = over.map_or(0, |record| record.transitions + i32::from(!same));
        let seconds = i32::try_from(self.settings.duration.as_secs()).unwrap_or(i32::MAX);
        Lease {
            metadata: ObjectMeta {
                name: Some(self.settings.name.clone()),
                resource_version: over.map(|record| record.version.clone()),
                ..ObjectMeta::default()
            },
            spec: Some(LeaseSpec {
                holder_identity: Some(holder.to_owned()),
                lease_duration_seconds: Some(seconds),
                lease_transitions: Some(transitions),
                acquire_time: over
                    .filter(|_| same)
                    .and_then(|record| record.acquired.clone())
                    .or(Some(now.clone())),
                renew_time: Some(now),
                ..LeaseSpec::default()
            }),
        }
    }

    /// No call may take so long that the claim runs out meanwhile.
    fn limit(&self) -> Duration {
        (self.settings.duration / 4).min(Duration::from_secs(5))
    }

    /// Once until it changes.
    fn complain(&mut self, failure: &Failure) -> Duration {
        let text = match failure {
            Failure::Forbidden(detail) => {
                format!("the Lease is not ours to use ({detail}): apply the RBAC of `lockstep manifests`")
            }
            other => format!("the Lease cannot be used ({other})"),
        };
        if self.log_once.is_new(&text) {
            tracing::warn!("{text}; retrying");
        }
        RETRY.min(self.settings.duration / 8)
    }

    fn report(&mut self) {
        let until = *self.claim.borrow();
        let lapsed = until.is_some_and(|until| until <= Instant::now());
        let another =
            self.seen.record.as_ref().is_some_and(|(record, _)| record.holder != self.settings.identity);
        if another && until.is_some() {
            tracing::warn!("another replica leads now: this one writes no more");
            self.claim.send_replace(None);
        } else if lapsed && !self.lapsed {
            tracing::warn!("the Lease was not renewed in time: this replica writes no more until it is");
        }
        self.lapsed = lapsed;
        self.metrics.leader.set(i64::from(until.is_some() && !lapsed && !another));
    }
}

impl From<&Lease> for Record {
    fn from(lease: &Lease) -> Self {
        let spec = lease.spec.clone().unwrap_or_default();
        let seconds = spec.lease_duration_seconds.unwrap_or_default();
        Self {
            holder: spec.holder_identity.unwrap_or_default(),
            duration: Duration::from_secs(u64::try_from(seconds).unwrap_or_default()),
            version: lease.metadata.resource_version.clone().unwrap_or_default(),
            transitions: spec.lease_transitions.unwrap_or_default(),
            acquired: spec.acquire_time,
        }
    }
}

/// The host's name, which is the pod's, and something that no other process has.
#[must_use]
pub fn identity() -> String {
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    format!("{}_{:016x}", host.trim(), fastrand::u64(..))
}

#[cfg(test)]
mod tests;
