//! PURE. What is remembered of a source between two looks at it: what stood in the way, and when to try again.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use crate::{content::Digest, object::ObjectKey, plan::Trouble};

/// Heals of one companion that cost nothing, within [`QUIET`].
const FREE_HEALS: u32 = 5;
/// A companion that was left alone for this long has made peace.
const QUIET: Duration = Duration::from_secs(120);
/// The longest that a heal is put off.
const MAX_PUT_OFF: Duration = Duration::from_secs(60);

/// The ledger of one source.
#[derive(Debug, Default)]
pub struct Ledger {
    /// The last UID seen, for Events on a source that is gone.
    pub uid: String,
    /// The digest of the source for which all companions were right at the end of a pass.
    pub settled: Option<Digest>,
    /// What was told, and when.
    pub troubles: Vec<(Trouble, Instant)>,
    obstacles: HashMap<ObjectKey, Obstacle>,
    heals: HashMap<ObjectKey, Heals>,
    /// Failed attempts that concern the source as a whole.
    pub failures: u32,
}

/// What keeps one companion from being written.
#[derive(Debug)]
pub struct Obstacle {
    pub trouble: Option<Trouble>,
    pub until: Instant,
    attempts: u32,
    /// The source as it was: a changed one is worth another try at once.
    source: Digest,
}

#[derive(Debug)]
struct Heals {
    count: u32,
    last: Instant,
    manager: String,
}

/// How soon to try again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pace {
    /// The API server failed us, or was not there.
    Error,
    /// Somebody else must make room.
    Conflict,
    /// Nothing will change until the source does.
    Permanent,
    /// The API server said when.
    At(Duration),
}

impl Pace {
    /// The delay before the next attempt, doubled each time, with jitter: between half of it and all of it.
    #[must_use]
    pub fn delay(self, attempts: u32, jitter: f64) -> Duration {
        let (first, longest) = match self {
            Self::Error => (Duration::from_millis(200), Duration::from_secs(60)),
            Self::Conflict => (Duration::from_secs(1), Duration::from_secs(60)),
            Self::Permanent => (Duration::from_secs(600), Duration::from_secs(600)),
            Self::At(after) => return after + Duration::from_millis(500).mul_f64(jitter),
        };
        let doubled = first.saturating_mul(1 << attempts.min(16));
        doubled.min(longest).mul_f64(f64::midpoint(1.0, jitter))
    }
}

impl Ledger {
    /// The obstacle at a place, unless it is time to try again or the source has changed.
    #[must_use]
    pub fn obstacle(&self, at: &ObjectKey, source: Digest, now: Instant) -> Option<&Obstacle> {
        self.obstacles.get(at).filter(|obstacle| obstacle.until > now && obstacle.source == source)
    }

    pub fn obstructed(
        &mut self,
        at: ObjectKey,
        trouble: Option<Trouble>,
        pace: Pace,
        source: Digest,
        now: Instant,
    ) {
        let attempts = match self.obstacles.get(&at) {
            Some(known) if known.source == source => known.attempts + 1,
            _ => 0,
        };
        let until = now + pace.delay(attempts, fastrand::f64());
        self.obstacles.insert(at, Obstacle { trouble, until, attempts, source });
    }

    pub fn cleared(&mut self, at: &ObjectKey) {
        self.obstacles.remove(at);
    }

    /// Forgets what stood in the way of places that are no longer wanted or are right by now.
    pub fn keep_obstacles(&mut self, open: impl Fn(&ObjectKey) -> bool) {
        self.obstacles.retain(|at, _| open(at));
    }

    /// When the first obstacle is worth another try. One whose time has come waits for something else.
    #[must_use]
    pub fn next_attempt(&self, now: Instant) -> Option<Instant> {
        self.obstacles.values().map(|obstacle| obstacle.until).filter(|until| *until > now).min()
    }

    /// Whether the last attempt at a place failed.
    #[must_use]
    pub fn is_obstructed(&self, at: &ObjectKey) -> bool {
        self.obstacles.contains_key(at)
    }

    /// Whether a companion may be healed now; otherwise when. Each of many heals in a row waits twice as long.
    #[must_use]
    pub fn may_heal(&self, at: &ObjectKey, now: Instant) -> Option<Instant> {
        let heals = self.heals.get(at)?;
        let over = heals.count.checked_sub(FREE_HEALS)?;
        let put_off = Duration::from_secs(1).saturating_mul(1 << over.min(16)).min(MAX_PUT_OFF);
        let when = heals.last + put_off;
        (when > now).then_some(when)
    }

    /// Remembers a heal, and says whether it is one too many.
    pub fn healed(&mut self, at: &ObjectKey, manager: Option<&str>, now: Instant) -> bool {
        let heals =
            self.heals.entry(at.clone()).or_insert(Heals { count: 0, last: now, manager: String::new() });
        heals.count += 1;
        heals.last = now;
        manager.unwrap_or("somebody").clone_into(&mut heals.manager);
        heals.count >= FREE_HEALS
    }

    /// The companions that somebody keeps undoing.
    pub fn fights(&mut self, now: Instant) -> impl Iterator<Item = Trouble> {
        self.heals.retain(|_, heals| heals.last + MAX_PUT_OFF + QUIET > now);
        self.heals.iter().filter(|(_, heals)| heals.count >= FREE_HEALS).map(|(at, heals)| Trouble::Fight {
            at: at.clone(),
            manager: heals.manager.clone(),
            times: heals.count,
        })
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.obstacles.is_empty() && self.heals.is_empty() && self.troubles.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{content::Hasher, object::Kind};

    fn place() -> ObjectKey {
        ObjectKey::new(Kind::ConfigMap, "away", "colors-synced")
    }

    fn digest(text: &str) -> Digest {
        let mut hasher = Hasher::new();
        hasher.text("", text);
        hasher.finish()
    }

    #[test]
    fn delays_double_up_to_a_minute_and_never_fall_below_half() {
        for (pace, first) in [(Pace::Error, 0.2), (Pace::Conflict, 1.0)] {
            for attempts in 0..40 {
                let full = (first * f64::from(2_u32.saturating_pow(attempts))).min(60.0);
                for jitter in [0.0, 0.5, 1.0] {
                    let delay = pace.delay(attempts, jitter).as_secs_f64();
                    assert!(
                        delay <= full + 1e-6 && delay >= full / 2.0 - 1e-6,
                        "{pace:?} {attempts} {delay}"
                    );
                }
            }
        }
        assert!(Pace::At(Duration::from_secs(3)).delay(9, 0.0) >= Duration::from_secs(3));
    }

    #[test]
    fn an_obstacle_stands_until_its_time_or_until_the_source_changes() {
        let (mut ledger, now) = (Ledger::default(), Instant::now());
        ledger.obstructed(place(), None, Pace::Permanent, digest("a"), now);
        assert!(ledger.obstacle(&place(), digest("a"), now).is_some());
        assert!(ledger.obstacle(&place(), digest("b"), now).is_none());
        assert!(ledger.obstacle(&place(), digest("a"), now + Duration::from_secs(601)).is_none());
        ledger.cleared(&place());
        assert!(ledger.obstacle(&place(), digest("a"), now).is_none());
    }

    #[test]
    fn an_obstacle_whose_time_has_come_calls_nobody_again() {
        let (mut ledger, now) = (Ledger::default(), Instant::now());
        ledger.obstructed(place(), None, Pace::Conflict, digest("a"), now);
        let due = ledger.next_attempt(now).expect("an attempt");
        assert!(due > now);
        assert_eq!(
            ledger.next_attempt(due),
            None,
            "or a heal that is put off would be looked at without end"
        );
    }

    #[test]
    fn a_few_heals_are_free_then_each_waits_longer_and_peace_resets_them() {
        let (mut ledger, mut now) = (Ledger::default(), Instant::now());
        for _ in 0..FREE_HEALS {
            assert_eq!(ledger.may_heal(&place(), now), None);
            ledger.healed(&place(), Some("kubectl-edit"), now);
        }
        let mut waits = Vec::new();
        for _ in 0..8 {
            let when = ledger.may_heal(&place(), now).expect("put off");
            waits.push((when - now).as_secs());
            now = when;
            assert_eq!(ledger.may_heal(&place(), now), None);
            ledger.healed(&place(), Some("kubectl-edit"), now);
        }
        assert_eq!(waits, [1, 2, 4, 8, 16, 32, 60, 60]);
        assert!(
            matches!(ledger.fights(now).next(), Some(Trouble::Fight { manager, .. }) if manager == "kubectl-edit")
        );

        now += MAX_PUT_OFF + QUIET;
        assert_eq!(ledger.fights(now).count(), 0);
        assert_eq!(ledger.may_heal(&place(), now), None);
    }
}
