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
    /// By source and companion. The garbage collector deletes companions beside their source: they are not in here.
    deletes: HashMap<ObjectKey, HashMap<ObjectKey, DeleteState>>,
    /// The sums over `deletes`, kept up to date because every source asks for them.
    count: Count,
    /// When the last of them became due.
    last_due: Option<Instant>,
    /// When the last of the holds ends.
    held_until: Option<Instant>,
    last_expired: Option<Instant>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DeleteState {
    /// It became due at this time.
    Due(Instant),
    /// It is part of what looks like an accident, and is held until this time.
    Held(Instant),
    /// It was held for the whole grace, until this time: it may happen, and no longer counts.
    Released(Instant),
    /// It happened at this time, without a hold.
    Gone(Instant),
}

/// How many deletes are in each state, and how many sources have any that count.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Count {
    due: usize,
    held: usize,
    released: usize,
    gone: usize,
    sources: usize,
}

/// Whether a companion may be deleted.
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

/// How much there is to delete from: companions in other namespaces than their source.
#[derive(Debug, Clone, Copy)]
pub struct Totals {
    pub companions: usize,
    /// The sources of these companions, whether they still exist or not.
    pub sources: usize,
}

impl Brake {
    #[must_use]
    pub fn new(grace: Duration) -> Self {
        Self {
            grace,
            deletes: HashMap::new(),
            count: Count::default(),
            last_due: None,
            held_until: None,
            last_expired: None,
        }
    }

    /// Asks whether these companions of a source, all in other namespaces than the source, may be deleted. Answers
    /// for each of them, in order.
    pub fn ask(
        &mut self,
        now: Instant,
        source: &ObjectKey,
        due: &[ObjectKey],
        totals: Totals,
    ) -> Vec<BrakeDecision> {
        if self.grace.is_zero() {
            return vec![BrakeDecision::Proceed; due.len()];
        }
        self.expire(now);
        let mut added = false;
        self.change(source, |deletes| {
            deletes.values_mut().for_each(|state| state.release(now));
            for key in due {
                let state = deletes.entry(key.clone()).or_insert(DeleteState::Due(now));
                // It was wanted again in between, and there is a new one.
                if matches!(state, DeleteState::Gone(_)) {
                    *state = DeleteState::Due(now);
                }
                added |= *state == DeleteState::Due(now);
            }
        });
        if added {
            self.last_due = Some(now);
        }
        if self.looks_like_an_accident(totals) {
            self.hold(now, source);
        }
        let states = self.deletes.get(source);
        let states: Vec<DeleteState> =
            due.iter().filter_map(|key| states.and_then(|states| states.get(key)).copied()).collect();
        let since = |state: &DeleteState| match state {
            DeleteState::Due(since) => Some(*since),
            _ => None,
        };
        let first = states.iter().filter_map(since).min().unwrap_or(now);
        let wait_until = (self.last_due.unwrap_or(now) + QUIET).min(first + MAX_WAIT);
        let waits = totals.sources > MAX_UNHELD_SOURCES && now < wait_until;
        let decide = |state: DeleteState| match state {
            DeleteState::Held(until) => {
                BrakeDecision::Hold { until, companions: self.count.counted(), sources: self.count.sources }
            }
            DeleteState::Due(_) if waits => BrakeDecision::Wait(wait_until),
            DeleteState::Due(_) | DeleteState::Released(_) | DeleteState::Gone(_) => BrakeDecision::Proceed,
        };
        states.into_iter().map(decide).collect()
    }

    /// Deletes of more than half of what is there now plus what went within the window, of enough sources.
    fn looks_like_an_accident(&self, totals: Totals) -> bool {
        let Count { released, gone, sources, .. } = self.count;
        let total = totals.companions.saturating_sub(released) + gone;
        self.count.counted() * 2 > total && sources > MAX_UNHELD_SOURCES
    }

    /// Starts to hold every delete that is due. While others are held already, adds those of one source.
    fn hold(&mut self, now: Instant, source: &ObjectKey) {
        let until = now + self.grace;
        self.held_until = Some(until);
        let hold = |deletes: &mut HashMap<ObjectKey, DeleteState>| {
            for state in deletes.values_mut().filter(|state| matches!(state, DeleteState::Due(_))) {
                *state = DeleteState::Held(until);
            }
        };
        if self.count.held == 0 {
            self.deletes.values_mut().for_each(hold);
            self.recount();
        } else {
            self.change(source, hold);
        }
    }

    /// A companion in another namespace than its source was deleted.
    pub fn deleted(&mut self, now: Instant, source: &ObjectKey, companion: &ObjectKey) {
        if self.grace.is_zero() {
            return;
        }
        let Some(deletes) = self.deletes.get_mut(source) else { return };
        let Some(state) = deletes.get_mut(companion) else { return };
        match state {
            DeleteState::Due(_) => self.count.due -= 1,
            DeleteState::Held(_) => self.count.held -= 1,
            DeleteState::Released(_) => {
                self.count.released -= 1;
                deletes.remove(companion);
                if deletes.is_empty() {
                    self.deletes.remove(source);
                }
                return;
            }
            DeleteState::Gone(_) => self.count.gone -= 1,
        }
        *state = DeleteState::Gone(now);
        self.count.gone += 1;
    }

    /// Forgets deletes of a source that are neither among these nor done: those companions are wanted again. The hold
    /// ends when that is true of every held companion.
    pub fn forget_all_but(&mut self, source: &ObjectKey, due: &[ObjectKey]) {
        if !self.deletes.contains_key(source) {
            return;
        }
        let due: HashSet<&ObjectKey> = due.iter().collect();
        self.change(source, |deletes| {
            deletes.retain(|key, state| matches!(state, DeleteState::Gone(_)) || due.contains(key));
        });
    }

    #[cfg(test)]
    pub fn pending_count(&self) -> usize {
        self.count.counted()
    }

    #[must_use]
    pub fn is_holding(&self, now: Instant) -> bool {
        self.count.held > 0 && self.held_until.is_some_and(|until| now < until)
    }

    /// Releases deletes that were held for the whole grace, and forgets what happened before the window.
    fn expire(&mut self, now: Instant) {
        if self.last_expired.is_some_and(|last| last + EXPIRE_INTERVAL > now) {
            return;
        }
        self.last_expired = Some(now);
        for deletes in self.deletes.values_mut() {
            deletes.retain(|_, state| {
                state.release(now);
                match *state {
                    DeleteState::Held(_) => true,
                    DeleteState::Due(at) | DeleteState::Released(at) | DeleteState::Gone(at) => {
                        at + WINDOW > now
                    }
                }
            });
        }
        self.deletes.retain(|_, deletes| !deletes.is_empty());
        self.recount();
    }

    /// Changes the deletes of one source, and the sums with them.
    fn change(&mut self, source: &ObjectKey, change: impl FnOnce(&mut HashMap<ObjectKey, DeleteState>)) {
        let deletes = self.deletes.entry(source.clone()).or_default();
        let before = Count::of(deletes);
        change(deletes);
        let after = Count::of(deletes);
        if deletes.is_empty() {
            self.deletes.remove(source);
        }
        self.count =
            self.count.map(before, usize::saturating_sub).map(after, |sum, of_source| sum + of_source);
    }

    fn recount(&mut self) {
        let counts = self.deletes.values().map(Count::of);
        self.count = counts.fold(Count::default(), |all, one| all.map(one, |all, one| all + one));
    }
}

impl DeleteState {
    fn release(&mut self, now: Instant) {
        if let Self::Held(until) = *self
            && until <= now
        {
            *self = Self::Released(until);
        }
    }
}

impl Count {
    fn of(deletes: &HashMap<ObjectKey, DeleteState>) -> Self {
        let mut count = Self::default();
        for state in deletes.values() {
            *match state {
                DeleteState::Due(_) => &mut count.due,
                DeleteState::Held(_) => &mut count.held,
                DeleteState::Released(_) => &mut count.released,
                DeleteState::Gone(_) => &mut count.gone,
            } += 1;
        }
        count.sources = usize::from(count.counted() > 0);
        count
    }

    /// Deletes that are due or happened within the window.
    const fn counted(&self) -> usize {
        self.due + self.held + self.gone
    }

    fn map(self, other: Self, f: impl Fn(usize, usize) -> usize) -> Self {
        Self {
            due: f(self.due, other.due),
            held: f(self.held, other.held),
            released: f(self.released, other.released),
            gone: f(self.gone, other.gone),
            sources: f(self.sources, other.sources),
        }
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
        brake.ask(now, &source(n), &[companion(n)], Totals { companions: total, sources: total })[0]
    }

    /// A delete that nothing holds up: it happens as soon as it may.
    fn delete(brake: &mut Brake, now: Instant, n: usize, total: usize) {
        ask(brake, now, n, total);
        assert_eq!(ask(brake, now + QUIET, n, total), BrakeDecision::Proceed, "{n}");
        brake.deleted(now + QUIET, &source(n), &companion(n));
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
        for n in 0..20 {
            // As they are deleted, fewer are left.
            delete(&mut brake, now, n, 40 - n);
        }
        assert!(!brake.is_holding(now + QUIET));
        ask(&mut brake, now + QUIET, 20, 20);
        assert!(brake.is_holding(now + QUIET), "21 of 40");
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
        for n in 0..60 {
            delete(&mut brake, now, n, 60 - n);
            now += Duration::from_secs(5);
        }
        assert!(!brake.is_holding(now));
    }

    #[test]
    fn all_that_is_left_after_a_slow_decline_is_held_when_it_goes_at_once() {
        let (mut brake, mut now) = (Brake::new(GRACE), Instant::now());
        for n in 0..600 {
            delete(&mut brake, now, n, 1000 - n);
            now += Duration::from_secs(30);
        }
        for n in 600..1000 {
            ask(&mut brake, now, n, 400);
        }
        for n in 600..1000 {
            let decision = ask(&mut brake, now + QUIET, n, 400);
            assert!(matches!(decision, BrakeDecision::Hold { companions: 400.., .. }), "{n}: {decision:?}");
        }
    }

    #[test]
    fn delete_that_joins_a_hold_is_held_for_a_whole_grace() {
        let (mut brake, now) = (Brake::new(GRACE), Instant::now());
        for n in 0..30 {
            ask(&mut brake, now, n, 40);
        }
        let late = now + GRACE - Duration::from_secs(1);
        let decision = ask(&mut brake, late, 30, 40);
        assert!(
            matches!(decision, BrakeDecision::Hold { until, .. } if until == late + GRACE),
            "{decision:?}"
        );
        // The others are not held any longer because of it, and happen.
        for n in 0..30 {
            assert_eq!(ask(&mut brake, now + GRACE, n, 40), BrakeDecision::Proceed);
            brake.deleted(now + GRACE, &source(n), &companion(n));
        }
        assert!(matches!(ask(&mut brake, now + GRACE, 30, 10), BrakeDecision::Hold { .. }));
        assert_eq!(ask(&mut brake, late + GRACE, 30, 10), BrakeDecision::Proceed);
    }

    #[test]
    fn zero_grace_turns_the_brake_off() {
        let (mut brake, now) = (Brake::new(Duration::ZERO), Instant::now());
        for n in 0..30 {
            assert_eq!(ask(&mut brake, now, n, 30), BrakeDecision::Proceed);
        }
    }
}
