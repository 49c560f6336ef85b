//! PURE. A circuit breaker for deletes: holds them when so many are due at once that it looks like an accident.

use std::{
    collections::{HashMap, HashSet},
    time::{Duration, Instant},
};

use crate::object::ObjectKey;

/// Deletes that become due within this time count together.
const WINDOW: Duration = Duration::from_secs(60);
/// Where there are enough sources for an accident, a delete waits until no other has become due for this long.
const QUIET: Duration = Duration::from_secs(1);
/// No delete waits for others longer than this.
const MAX_WAIT: Duration = Duration::from_secs(10);
/// Deletes of so many sources, or fewer, are never held.
const MAX_UNHELD_SOURCES: usize = 20;
/// How often expired entries are removed; each time scans all of them.
const EXPIRE_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub struct Brake {
    /// How long deletes are held; zero turns the brake off.
    grace: Duration,
    /// By source and companion.
    pending: HashMap<ObjectKey, HashMap<ObjectKey, PendingDelete>>,
    /// The sums over `pending`, kept up to date because every source asks for them.
    count: Count,
    /// How many companions there were before any of these was deleted.
    companions: usize,
    /// When the last of them became due.
    last_due: Option<Instant>,
    held_until: Option<Instant>,
    last_expired: Option<Instant>,
}

#[derive(Debug)]
struct PendingDelete {
    since: Instant,
    state: HoldState,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum HoldState {
    /// It is due, and counts.
    Due,
    /// It is part of what looks like an accident, and is held.
    Held,
    /// It was held for the whole grace: it may happen, and no longer counts.
    Released,
}

#[derive(Debug, Default, Clone, Copy)]
struct Count {
    companions: usize,
    sources: usize,
    held: usize,
}

/// Whether deletes may happen.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BrakeDecision {
    Proceed,
    /// Ask again then: other deletes may be about to follow.
    Wait(Instant),
    /// This looks like an accident.
    Hold {
        until: Instant,
        companions: usize,
        sources: usize,
    },
}

/// How much there is to delete from.
#[derive(Debug, Clone, Copy)]
pub struct Totals {
    pub companions: usize,
    /// Sources that have companions, whether they still exist or not.
    pub sources: usize,
}

impl Brake {
    #[must_use]
    pub fn new(grace: Duration) -> Self {
        Self {
            grace,
            pending: HashMap::new(),
            count: Count::default(),
            companions: 0,
            last_due: None,
            held_until: None,
            last_expired: None,
        }
    }

    /// Asks whether these companions of a source may be deleted.
    pub fn ask(
        &mut self,
        now: Instant,
        source: &ObjectKey,
        due: &[ObjectKey],
        totals: Totals,
    ) -> BrakeDecision {
        if self.grace.is_zero() {
            return BrakeDecision::Proceed;
        }
        self.expire(now);
        self.companions =
            if self.pending.is_empty() { totals.companions } else { self.companions.max(totals.companions) };
        let pending = self.pending.entry(source.clone()).or_default();
        let (before, counted) = (pending.len(), pending.values().any(PendingDelete::counts));
        for key in due {
            pending.entry(key.clone()).or_insert(PendingDelete { since: now, state: HoldState::Due });
        }
        let added = pending.len() - before;
        if added > 0 {
            self.last_due = Some(now);
            self.count.companions += added;
            self.count.sources += usize::from(!counted);
        }
        if self.count.companions * 2 > self.companions && self.count.sources > MAX_UNHELD_SOURCES {
            self.hold(now, source);
        }

        let asked: Vec<&PendingDelete> =
            due.iter().filter_map(|key| self.pending.get(source)?.get(key)).collect();
        let first = asked.iter().map(|pending| pending.since).min().unwrap_or(now);
        let wait_until = (self.last_due.unwrap_or(now) + QUIET).min(first + MAX_WAIT);
        if let Some(until) =
            self.held_until.filter(|_| asked.iter().any(|pending| pending.state == HoldState::Held))
        {
            let Count { companions, sources, .. } = self.count;
            BrakeDecision::Hold { until, companions, sources }
        } else if asked.iter().any(|pending| pending.counts())
            && totals.sources > MAX_UNHELD_SOURCES
            && now < wait_until
        {
            BrakeDecision::Wait(wait_until)
        } else {
            BrakeDecision::Proceed
        }
    }

    /// Starts to hold every pending delete. While a hold lasts, adds the pending deletes of one source to it.
    fn hold(&mut self, now: Instant, source: &ObjectKey) {
        let hold = |pending: &mut PendingDelete| {
            let held = pending.state == HoldState::Due;
            if held {
                pending.state = HoldState::Held;
            }
            held
        };
        let held = if self.held_until.is_none() {
            self.held_until = Some(now + self.grace);
            self.pending.values_mut().flat_map(HashMap::values_mut).map(hold).filter(|held| *held).count()
        } else {
            let pending = self.pending.get_mut(source).into_iter().flat_map(HashMap::values_mut);
            pending.map(hold).filter(|held| *held).count()
        };
        self.count.held += held;
    }

    /// Forgets pending deletes of a source other than these: those companions are wanted again. The hold ends when that
    /// is true of every held companion.
    pub fn forget_all_but(&mut self, source: &ObjectKey, due: &[ObjectKey]) {
        let Some(pending) = self.pending.get_mut(source) else { return };
        let before = Count::of(pending);
        let due: HashSet<&ObjectKey> = due.iter().collect();
        pending.retain(|key, _| due.contains(key));
        let after = Count::of(pending);
        self.count.companions -= before.companions - after.companions;
        self.count.sources -= before.sources - after.sources;
        self.count.held -= before.held - after.held;
        if pending.is_empty() {
            self.pending.remove(source);
        }
        if self.count.held == 0 {
            self.held_until = None;
        }
    }

    #[cfg(test)]
    pub fn pending_count(&self) -> usize {
        self.count.companions
    }

    #[must_use]
    pub fn is_holding(&self, now: Instant) -> bool {
        self.held_until.is_some_and(|until| now < until)
    }

    /// Forgets deletes that were due before the window, and releases held ones after the grace.
    fn expire(&mut self, now: Instant) {
        let over = self.held_until.is_some_and(|until| until <= now);
        let recent = self.last_expired.is_some_and(|last| last + EXPIRE_INTERVAL > now);
        if !over && (recent || self.held_until.is_some()) {
            return;
        }
        self.last_expired = Some(now);
        if over {
            self.held_until = None;
            for pending in self.pending.values_mut().flat_map(HashMap::values_mut) {
                *pending = PendingDelete { since: now, state: HoldState::Released };
            }
        }
        for pending in self.pending.values_mut() {
            pending.retain(|_, pending| pending.since + WINDOW > now);
        }
        self.pending.retain(|_, pending| !pending.is_empty());
        self.count = self.pending.values().map(Count::of).fold(Count::default(), |all, one| Count {
            companions: all.companions + one.companions,
            sources: all.sources + one.sources,
            held: all.held + one.held,
        });
    }
}

impl PendingDelete {
    fn counts(&self) -> bool {
        self.state != HoldState::Released
    }
}

impl Count {
    fn of(pending: &HashMap<ObjectKey, PendingDelete>) -> Self {
        let companions = pending.values().filter(|pending| pending.counts()).count();
        let held = pending.values().filter(|pending| pending.state == HoldState::Held).count();
        Self { companions, sources: usize::from(companions > 0), held }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::Kind;

    const GRACE: Duration = Duration::from_secs(300);

    fn source(n: usize) -> ObjectKey {
        ObjectKey::new(Kind::ConfigMap, "home", &format!("s{n}"))
    }

    fn companion(n: usize) -> ObjectKey {
        ObjectKey::new(Kind::ConfigMap, "away", &format!("s{n}-synced"))
    }

    fn ask(brake: &mut Brake, now: Instant, n: usize, total: usize) -> BrakeDecision {
        brake.ask(now, &source(n), &[companion(n)], Totals { companions: total, sources: total })
    }

    #[test]
    fn deletes_of_few_sources_are_never_held() {
        let (mut brake, now) = (Brake::new(GRACE), Instant::now());
        for n in 0..20 {
            assert_eq!(ask(&mut brake, now, n, 20), BrakeDecision::Proceed);
        }
    }

    #[test]
    fn with_many_sources_a_delete_waits_a_moment_for_others_to_follow() {
        let (mut brake, now) = (Brake::new(GRACE), Instant::now());
        assert_eq!(ask(&mut brake, now, 0, 100), BrakeDecision::Wait(now + QUIET));
        assert_eq!(ask(&mut brake, now + QUIET, 0, 100), BrakeDecision::Proceed);
    }

    #[test]
    fn delete_waits_while_others_follow_up_to_a_maximum() {
        let (mut brake, start) = (Brake::new(GRACE), Instant::now());
        let mut now = start;
        for n in 0..15 {
            ask(&mut brake, now, n, 100);
            now += Duration::from_millis(900);
        }
        assert_eq!(ask(&mut brake, now, 0, 100), BrakeDecision::Proceed);
        assert!(matches!(ask(&mut brake, now, 14, 100), BrakeDecision::Wait(_)));
    }

    #[test]
    fn deletes_of_more_than_half_are_held_for_the_grace_and_then_proceed() {
        let (mut brake, now) = (Brake::new(GRACE), Instant::now());
        for n in 0..30 {
            ask(&mut brake, now, n, 40);
        }
        let until = now + GRACE;
        assert!(
            matches!(ask(&mut brake, now + QUIET, 0, 40), BrakeDecision::Hold { until: held, .. } if held == until)
        );
        assert!(brake.is_holding(now + QUIET));
        for n in 0..30 {
            assert_eq!(ask(&mut brake, until, n, 40), BrakeDecision::Proceed);
        }
        // The next one starts from scratch.
        assert_eq!(ask(&mut brake, until, 31, 40), BrakeDecision::Wait(until + QUIET));
    }

    #[test]
    fn deletes_of_exactly_half_are_not_held() {
        let (mut brake, now) = (Brake::new(GRACE), Instant::now());
        for n in 0..30 {
            ask(&mut brake, now, n, 60);
        }
        assert_eq!(ask(&mut brake, now + QUIET, 0, 60), BrakeDecision::Proceed);
    }

    #[test]
    fn deletes_that_happened_count_within_the_window() {
        let (mut brake, now) = (Brake::new(GRACE), Instant::now());
        for n in 0..25 {
            // As they are deleted, fewer are left.
            ask(&mut brake, now, n, 40 - n);
        }
        assert!(brake.is_holding(now + QUIET));
    }

    #[test]
    fn companion_that_is_wanted_again_no_longer_counts() {
        let (mut brake, now) = (Brake::new(GRACE), Instant::now());
        for n in 0..20 {
            ask(&mut brake, now, n, 30);
        }
        brake.forget_all_but(&source(0), &[]);
        ask(&mut brake, now, 20, 30);
        assert!(!brake.is_holding(now));
        ask(&mut brake, now, 21, 30);
        assert!(brake.is_holding(now));
    }

    #[test]
    fn hold_ends_when_every_held_companion_is_wanted_again() {
        let (mut brake, now) = (Brake::new(GRACE), Instant::now());
        for n in 0..30 {
            ask(&mut brake, now, n, 30);
        }
        assert!(brake.is_holding(now));
        for n in 0..29 {
            brake.forget_all_but(&source(n), &[]);
            assert!(brake.is_holding(now), "one of them is still missing");
        }
        brake.forget_all_but(&source(29), &[]);
        assert!(!brake.is_holding(now));
        ask(&mut brake, now, 0, 30);
        assert_eq!(ask(&mut brake, now + QUIET, 0, 30), BrakeDecision::Proceed);
    }

    #[test]
    fn new_delete_is_not_held_once_most_held_companions_are_wanted_again() {
        let (mut brake, now) = (Brake::new(GRACE), Instant::now());
        for n in 0..30 {
            ask(&mut brake, now, n, 40);
        }
        for n in 5..30 {
            brake.forget_all_but(&source(n), &[]);
        }
        ask(&mut brake, now, 35, 40);
        assert_eq!(ask(&mut brake, now + QUIET, 35, 40), BrakeDecision::Proceed);
        assert!(matches!(ask(&mut brake, now + QUIET, 0, 40), BrakeDecision::Hold { .. }));
    }

    #[test]
    fn slow_deletes_are_not_held() {
        let (mut brake, mut now) = (Brake::new(GRACE), Instant::now());
        for n in 0..30 {
            ask(&mut brake, now, n, 30);
            now += Duration::from_secs(5);
        }
        assert!(!brake.is_holding(now));
    }

    #[test]
    fn zero_grace_turns_the_brake_off() {
        let (mut brake, now) = (Brake::new(Duration::ZERO), Instant::now());
        for n in 0..30 {
            assert_eq!(ask(&mut brake, now, n, 30), BrakeDecision::Proceed);
        }
    }
}
