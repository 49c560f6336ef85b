//! What a replica does next about the Lease, given what it has observed and the time.
//!
//! Clocks of different replicas are never compared. As in client-go, the Lease of another replica expires when it has
//! not changed for its duration, measured by our own clock from when we first observed it. Its metadata does not count.

use std::time::{Duration, Instant};

use k8s_openapi::{apimachinery::pkg::apis::meta::v1::MicroTime, jiff::Timestamp};

use super::record::{LeaseMetadata, LeaseRecord};

/// How long a standby waits at most before it reads the Lease again.
pub const RETRY_PERIOD: Duration = Duration::from_secs(1);
/// The pause after a failed request, at most.
const MAX_FAILURE_PAUSE: Duration = Duration::from_millis(500);
/// The pause after the second conflict in a row; it doubles with each further one.
const CONFLICT_PAUSE: Duration = Duration::from_millis(20);

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
    pub fn record(&self) -> Option<&LeaseRecord> {
        self.record.as_ref().map(|(record, _)| record)
    }

    /// Records what a read returned: `None` when there is no Lease.
    pub fn observe(&mut self, found: Option<LeaseRecord>, now: Instant) {
        // The holder of a deleted Lease may not know and still write, so the deletion counts as a renewal.
        let deleted = || {
            let (known, _) = self.record.as_ref()?;
            Some(LeaseRecord { metadata: LeaseMetadata::default(), ..known.clone() })
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
pub fn renew_deadline(sent: Instant, lease_duration: Duration) -> Instant {
    sent + lease_duration * 2 / 3
}

/// The pause after this many conflicts in a row. The first retry is immediate, because people and tools annotate the
/// Lease. Somebody may write it all the time: requests then become fewer, and still suffice to renew it in time.
pub fn conflict_pause(conflicts: u32, lease_duration: Duration) -> Duration {
    let doublings = conflicts.saturating_sub(2).min(10);
    let pause = if conflicts < 2 { Duration::ZERO } else { CONFLICT_PAUSE * (1 << doublings) };
    pause.min(failure_pause(lease_duration))
}

/// The pause after a failed request.
pub fn failure_pause(lease_duration: Duration) -> Duration {
    MAX_FAILURE_PAUSE.min(lease_duration / 8)
}

/// The Lease to write for this holder, in place of the `previous` record.
pub fn next_record(
    name: &str,
    duration: Duration,
    previous: Option<&LeaseRecord>,
    holder: &str,
    now: Timestamp,
) -> LeaseRecord {
    let now = Some(MicroTime(now));
    let same_term = previous.is_some_and(|record| record.holder == holder || holder.is_empty());
    // Somebody may have written the largest number. The API server refuses the one that follows it.
    let transitions = previous.map_or(0, |record| record.transitions.saturating_add(i32::from(!same_term)));
    let LeaseRecord { acquire_time, metadata, .. } = previous.cloned().unwrap_or_default();
    LeaseRecord {
        holder: holder.to_owned(),
        duration,
        transitions,
        acquire_time: acquire_time.filter(|_| same_term).or_else(|| now.clone()),
        renew_time: now,
        metadata: LeaseMetadata { name: Some(name.to_owned()), ..metadata },
    }
}

#[cfg(test)]
mod tests;
