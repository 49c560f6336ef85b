//! What the controller remembers of a source between two reconciles: which writes failed or are in flight, and when
//! to try again.

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    time::{Duration, Instant},
};

use crate::{failure::backoff::Backoff, object::ObjectKey, plan::Trouble, policy::content::Digest};

/// So many heals of one companion happen without delay; further ones back off.
const FREE_HEALS: u32 = 5;
const HEAL_BACKOFF: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));
/// A companion that was not healed for so long starts over. Longer than the longest backoff.
const HEAL_RESET: Duration = Duration::from_secs(180);
/// The API server failed, or could not be reached.
const ERROR_BACKOFF: Backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(60));
/// Something in the cluster has to change first, and no watch of ours shows it.
const CONFLICT_BACKOFF: Backoff = Backoff::new(Duration::from_secs(1), Duration::from_secs(60));
/// Probably only a change of the source can help.
const PERMANENT_BACKOFF: Backoff = Backoff::new(Duration::from_secs(600), Duration::from_secs(600));
/// Added to a delay that the API server asked for, at random, so that clients do not all retry at once.
const MAX_RETRY_AFTER_JITTER: Duration = Duration::from_millis(500);

/// The retry state of one source.
#[derive(Debug, Default)]
pub struct RetryState {
    /// The source's digest when a reconcile last ended with nothing left to write, failures that are reported aside.
    pub in_step: Option<Digest>,
    // There are as many of these maps as sources, and most are empty: then these take less than hash maps.
    failed: BTreeMap<ObjectKey, FailedWrite>,
    heals: BTreeMap<ObjectKey, Heals>,
    /// Reconciles in a row that met a stale cache.
    stale: u32,
    in_flight: BTreeSet<ObjectKey>,
    /// The first failure, from which the times of retries are counted.
    first_failure: Option<Instant>,
}

/// A companion that could not be written.
#[derive(Debug)]
struct FailedWrite {
    trouble: Option<Trouble>,
    retry_at: Instant,
    failures: u32,
    /// The source at that time: a changed one is tried at once.
    source: Digest,
}

#[derive(Debug)]
struct Heals {
    count: u32,
    last: Instant,
    /// The field manager whose change was undone last.
    manager: String,
    /// The source that was last written there: a changed one does not wait for the next heal.
    source: Digest,
}

/// How soon a failed write is tried again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RetryPolicy {
    /// The API server failed, or could not be reached.
    Error,
    /// Something else has to change first: a foreign object, a quota.
    Conflict,
    /// Probably only a change of the source can help.
    Permanent,
    /// The API server said when.
    After(Duration),
}

/// Whether a companion may be written now.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Permission {
    Now,
    /// Its write failed, or it was healed too often: try again then.
    At(Instant),
    /// An earlier write is queued or not answered yet; when it ends, the source is reconciled again.
    InFlight,
}

impl RetryPolicy {
    /// The delay before the next attempt, after so many failures before this one.
    pub fn delay(self, failures: u32, jitter: f64) -> Duration {
        match self {
            Self::Error => ERROR_BACKOFF.jittered(failures, jitter),
            Self::Conflict => CONFLICT_BACKOFF.jittered(failures, jitter),
            Self::Permanent => PERMANENT_BACKOFF.jittered(failures, jitter),
            Self::After(delay) => delay + MAX_RETRY_AFTER_JITTER.mul_f64(jitter),
        }
    }
}

impl RetryState {
    /// Starts a change if it may start now. It is in flight until [`Self::finished`].
    pub fn start(&mut self, at: &ObjectKey, heals: bool, source: Digest, now: Instant) -> Permission {
        let permission = self.permission(at, heals, source, now);
        if permission == Permission::Now {
            self.in_flight.insert(at.clone());
        }
        permission
    }

    /// Whether a change may start now.
    pub fn permission(&self, at: &ObjectKey, heals: bool, source: Digest, now: Instant) -> Permission {
        if self.in_flight.contains(at) {
            return Permission::InFlight;
        }
        let failed =
            self.failed.get(at).filter(|failed| failed.source == source).map(|failed| failed.retry_at);
        let healed = self.heals.get(at).filter(|known| heals && known.source == source).and_then(Heals::next);
        failed.max(healed).filter(|when| *when > now).map_or(Permission::Now, Permission::At)
    }

    /// A write has ended.
    pub fn finished(&mut self, at: &ObjectKey) {
        self.in_flight.remove(at);
    }

    /// A write failed; returns when to try again.
    pub fn failed(
        &mut self,
        at: &ObjectKey,
        trouble: Option<Trouble>,
        policy: RetryPolicy,
        source: Digest,
        now: Instant,
    ) -> Instant {
        let failures = match self.failed.get(at) {
            Some(known) if known.source == source => known.failures + 1,
            _ => 0,
        };
        let retry_at = self.round_up(now, policy.delay(failures, fastrand::f64()));
        self.failed.insert(at.clone(), FailedWrite { trouble, retry_at, failures, source });
        retry_at
    }

    /// The end of a delay, a little later: a reconcile plans all companions, so many retries share one.
    fn round_up(&mut self, now: Instant, delay: Duration) -> Instant {
        let start = *self.first_failure.get_or_insert(now);
        // Powers of two: every step is a multiple of the smaller ones.
        let step = (delay / 16).as_millis().max(1).next_power_of_two();
        let millis = (now + delay).saturating_duration_since(start).as_millis().next_multiple_of(step);
        start + Duration::from_millis(millis.try_into().unwrap_or(u64::MAX))
    }

    /// A write of this source succeeded, or turned out to be unnecessary.
    pub fn succeeded(&mut self, at: &ObjectKey, source: Digest) {
        self.failed.remove(at);
        if let Some(heals) = self.heals.get_mut(at) {
            heals.source = source;
        }
    }

    /// Whether the last write of a companion failed.
    pub fn has_failed(&self, at: &ObjectKey) -> bool {
        self.failed.contains_key(at)
    }

    /// Whether the last write of any companion failed.
    pub fn has_failures(&self) -> bool {
        !self.failed.is_empty()
    }

    /// Forgets failures of companions that are right by now, or are not wanted any more.
    pub fn retain_failed(&mut self, still_planned: &HashSet<&ObjectKey>) {
        self.failed.retain(|at, _| still_planned.contains(at));
    }

    /// The write of a companion met a stale cache; returns when to reconcile again.
    pub fn met_stale_cache(&mut self, now: Instant) -> Instant {
        let delay = RetryPolicy::Error.delay(self.stale, fastrand::f64());
        self.stale = self.stale.saturating_add(1);
        now + delay
    }

    #[cfg(any(test, feature = "testing"))]
    pub const fn stale_count(&self) -> u32 {
        self.stale
    }

    pub const fn cache_was_fresh(&mut self) {
        self.stale = 0;
    }

    /// Remembers a heal; true if it is one too many, so that the next one backs off.
    pub fn healed(&mut self, at: &ObjectKey, manager: Option<&str>, source: Digest, now: Instant) -> bool {
        let first = Heals { count: 0, last: now, manager: String::new(), source };
        let heals = self.heals.entry(at.clone()).or_insert(first);
        heals.count += 1;
        heals.last = now;
        manager.unwrap_or("somebody").clone_into(&mut heals.manager);
        heals.count >= FREE_HEALS
    }

    /// What failed writes and repeated heals keep the source from having.
    pub fn troubles(&mut self, now: Instant) -> Vec<Trouble> {
        self.heals.retain(|_, heals| heals.last + HEAL_RESET > now);
        let failed = self.failed.values().filter_map(|failed| failed.trouble.clone());
        let fights = self.heals.iter().filter(|(_, heals)| heals.count >= FREE_HEALS);
        let fights = fights.map(|(at, heals)| Trouble::Fight {
            at: at.clone(),
            manager: heals.manager.clone(),
            times: heals.count,
        });
        failed.chain(fights).collect()
    }

    /// Whether nothing is in flight, no write has failed, and no heal is remembered. A heal is until it counts no
    /// longer.
    pub fn is_idle(&self) -> bool {
        self.in_flight.is_empty() && self.failed.is_empty() && self.heals.is_empty()
    }

    pub fn is_in_flight(&self) -> bool {
        !self.in_flight.is_empty()
    }
}

impl Heals {
    /// When the next heal may happen; `None` while heals are free.
    fn next(&self) -> Option<Instant> {
        let over = self.count.checked_sub(FREE_HEALS)?;
        Some(self.last + HEAL_BACKOFF.delay(over))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{policy::content::Hasher, testing::configmap};

    fn companion() -> ObjectKey {
        configmap("away", "colors-synced")
    }

    fn digest(text: &str) -> Digest {
        let mut hasher = Hasher::default();
        hasher.text("", text);
        hasher.finish()
    }

    /// Asks for a change and ends it at once if it may start.
    fn ask(state: &mut RetryState, heals: bool, source: &str, now: Instant) -> Permission {
        let permission = state.start(&companion(), heals, digest(source), now);
        state.finished(&companion());
        permission
    }

    #[test]
    fn retry_after_is_honoured_and_other_policies_back_off() {
        assert!(RetryPolicy::After(Duration::from_secs(3)).delay(9, 0.0) >= Duration::from_secs(3));
        for policy in [RetryPolicy::Error, RetryPolicy::Conflict] {
            assert!(policy.delay(1, 1.0) > policy.delay(0, 1.0), "{policy:?}");
            assert_eq!(policy.delay(40, 1.0), Duration::from_secs(60), "{policy:?}");
        }
    }

    #[test]
    fn failed_write_is_retried_after_its_delay_or_when_the_source_changes() {
        let (mut state, now) = (RetryState::default(), Instant::now());
        let retry_at = state.failed(&companion(), None, RetryPolicy::Permanent, digest("a"), now);
        assert_eq!(ask(&mut state, false, "a", now), Permission::At(retry_at));
        assert_eq!(ask(&mut state, false, "b", now), Permission::Now);
        assert!(retry_at <= now + Duration::from_secs(700));
        assert_eq!(ask(&mut state, false, "a", retry_at), Permission::Now);
        state.succeeded(&companion(), digest("a"));
        assert_eq!(ask(&mut state, false, "a", now), Permission::Now);
    }

    #[test]
    fn retries_of_many_companions_share_few_points_in_time() {
        let (mut state, now) = (RetryState::default(), Instant::now());
        let mut times = HashSet::new();
        for n in 0..1000 {
            let at = configmap(&format!("n{n}"), "colors-synced");
            for _ in 0..10 {
                state.failed(&at, None, RetryPolicy::Conflict, digest("a"), now);
            }
            times.insert(state.failed(&at, None, RetryPolicy::Conflict, digest("a"), now));
        }
        assert!((2..20).contains(&times.len()), "{}", times.len());
        assert!(times.iter().all(|time| *time > now + Duration::from_secs(29)));
    }

    #[test]
    fn companion_in_flight_is_not_written_twice() {
        let (mut state, now) = (RetryState::default(), Instant::now());
        assert_eq!(state.start(&companion(), false, digest("a"), now), Permission::Now);
        assert_eq!(state.start(&companion(), false, digest("b"), now), Permission::InFlight);
        state.finished(&companion());
        assert_eq!(ask(&mut state, false, "b", now), Permission::Now);
    }

    #[test]
    fn few_heals_are_free_then_each_waits_longer_and_a_quiet_time_resets_them() {
        let (mut state, mut now) = (RetryState::default(), Instant::now());
        for _ in 0..FREE_HEALS {
            assert_eq!(ask(&mut state, true, "a", now), Permission::Now);
            state.healed(&companion(), Some("kubectl-edit"), digest("a"), now);
        }
        let mut waits = Vec::new();
        for _ in 0..8 {
            let Permission::At(when) = ask(&mut state, true, "a", now) else { panic!("healed at once") };
            assert_eq!(ask(&mut state, false, "a", now), Permission::Now, "only heals back off");
            waits.push((when - now).as_secs());
            now = when;
            assert_eq!(ask(&mut state, true, "a", now), Permission::Now);
            state.healed(&companion(), Some("kubectl-edit"), digest("a"), now);
        }
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 60, 60]);
        let troubles = state.troubles(now);
        assert!(matches!(&troubles[..], [Trouble::Fight { manager, .. }] if manager == "kubectl-edit"));

        now += HEAL_RESET;
        assert_eq!(state.troubles(now), []);
        assert_eq!(ask(&mut state, true, "a", now), Permission::Now);
    }

    #[test]
    fn changed_source_does_not_wait_for_the_next_heal_and_gives_no_heal_for_free() {
        let (mut state, now) = (RetryState::default(), Instant::now());
        for _ in 0..=FREE_HEALS {
            state.healed(&companion(), Some("kubectl-edit"), digest("a"), now);
        }
        assert!(matches!(ask(&mut state, true, "a", now), Permission::At(_)), "heals back off");
        assert_eq!(ask(&mut state, true, "b", now), Permission::Now, "somebody waits for the change");
        state.succeeded(&companion(), digest("b"));
        assert!(matches!(ask(&mut state, true, "b", now), Permission::At(_)), "heals back off as before");
    }
}
