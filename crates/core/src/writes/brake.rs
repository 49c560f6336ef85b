//! A circuit breaker for deletes: holds them when so many are due at once that it looks like an accident.
//!
//! The deletes that became due within a minute are an accident if they are more than half of what there is to delete,
//! and belong to more than 20 sources. Held deletes that became due earlier count on neither side. So an accident that
//! goes on is held to its end, a second one is held like the first, and the delete of a single source long after an
//! accident is not held with it.
//!
//! There is at most one [`Hold`] at a time, which ends when the last of its deletes has been held for the whole grace.
//! [`hold_in_lease`] keeps it in the annotations of the Lease.

mod hold_in_lease;

pub use hold_in_lease::HoldUpdate;

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{keys::Keys, lease::hold::HeldDeletes, object::ObjectKey};

/// Deletes that become due within this time count together.
const WINDOW: Duration = Duration::from_secs(60);
/// Where there are enough sources for an accident, a delete waits until no other has become due for this long.
const SETTLE_TIME: Duration = Duration::from_secs(1);
/// No delete waits for others longer than this.
const MAX_WAIT: Duration = Duration::from_secs(10);
/// Deletes of so many sources, or fewer, are never held.
const MAX_UNHELD_SOURCES: usize = 20;
/// How often expired entries are removed; each time scans all of them.
const EXPIRE_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub struct Brake {
    keys: Arc<Keys>,
    /// How long deletes are held; zero turns the brake off.
    grace: Duration,
    /// By source and companion, while this replica leads: those that the brake covers.
    deletes: HashMap<ObjectKey, RecentDeletes>,
    /// The sums over `deletes`, kept up to date because every source asks for them.
    count: Count,
    /// When the last of them became due.
    last_due: Option<Instant>,
    last_expired: Option<Instant>,
    /// Whether this replica leads and goes on with what the leader before it left.
    leads: bool,
    /// The hold of this leader, or on a standby that of another.
    hold: Option<Hold>,
    /// Annotations that could not be read: each is reported once.
    malformed: Vec<String>,
}

/// Deletes that are held, as the Lease shows them.
#[derive(Debug, Clone, Copy)]
struct Hold {
    facts: HeldDeletes,
    /// [`HeldDeletes::until`] by our own clock.
    until: Instant,
    /// Somebody released it, and not all of its deletes have happened.
    released: bool,
    /// After a takeover: deletes that become due until then belong to it. Which ones the leader before this one held is
    /// not recorded.
    joined_until: Option<Instant>,
    /// If it is released: so many companions of it have not been found since the takeover.
    missing: usize,
    /// The annotation has shown it.
    shown: bool,
}

/// Those of one source, by companion.
type RecentDeletes = HashMap<ObjectKey, DeleteState>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DeleteState {
    /// It became due at this time.
    Due(Instant),
    /// It is part of what looks like an accident, and is held until this time.
    Held {
        until: Instant,
        /// When it became due; none once the window is over, and it no longer counts.
        due: Option<Instant>,
    },
    /// Its hold is over: it may happen, and no longer counts.
    Released,
    /// It happened at this time, without a hold.
    Gone(Instant),
}

/// How many deletes are in each state, and how many sources have any that count.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
struct Count {
    due: usize,
    /// Held, and became due within the window.
    newly_held: usize,
    /// Held, and became due before the window.
    long_held: usize,
    released: usize,
    gone: usize,
    sources: usize,
    /// Sources with deletes that are held.
    held_sources: usize,
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

/// How much there is to delete from: the companions that the brake covers.
#[derive(Debug, Clone, Copy)]
pub struct Totals {
    pub companions: usize,
    /// The sources of these companions, whether they still exist or not.
    pub sources: usize,
}

/// Whether deletes of this companion may be held. The garbage collector deletes companions beside their source.
fn covers(source: &ObjectKey, companion: &ObjectKey) -> bool {
    companion.namespace != source.namespace
}

impl Brake {
    pub fn new(keys: Arc<Keys>, grace: Duration) -> Self {
        Self {
            keys,
            grace,
            deletes: HashMap::new(),
            count: Count::default(),
            last_due: None,
            last_expired: None,
            leads: false,
            hold: None,
            malformed: Vec::new(),
        }
    }

    /// Asks whether these companions of a source may be deleted. Answers for each of them, in order.
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
            deletes.values_mut().for_each(|state| state.release_if_over(now));
            for key in due.iter().filter(|key| covers(source, key)) {
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
        self.join_taken_over_hold(now, source);
        if self.looks_like_an_accident(totals) {
            self.hold_due(now, source);
        }
        let states = self.deletes.get(source);
        let states: Vec<Option<DeleteState>> =
            due.iter().map(|key| states.and_then(|states| states.get(key)).copied()).collect();
        let since = |state: &Option<DeleteState>| match state {
            Some(DeleteState::Due(since)) => Some(*since),
            _ => None,
        };
        let first = states.iter().filter_map(since).min().unwrap_or(now);
        let wait_until = (self.last_due.unwrap_or(now) + SETTLE_TIME).min(first + MAX_WAIT);
        let waits = totals.sources > MAX_UNHELD_SOURCES && now < wait_until;
        let decide = |state| match state {
            Some(DeleteState::Held { until, .. }) => {
                BrakeDecision::Hold { until, companions: self.count.held(), sources: self.count.held_sources }
            }
            Some(DeleteState::Due(_)) if waits => BrakeDecision::Wait(wait_until),
            _ => BrakeDecision::Proceed,
        };
        states.into_iter().map(decide).collect()
    }

    /// Deletes of a source that became due soon after this leader took over belong to the hold that it took over.
    fn join_taken_over_hold(&mut self, now: Instant, source: &ObjectKey) {
        let Some(mut hold) = self.hold.filter(|hold| hold.is_joined(now)) else { return };
        self.change(source, |deletes| {
            for state in deletes.values_mut() {
                let DeleteState::Due(due) = *state else { continue };
                if !hold.released {
                    *state = DeleteState::Held { until: hold.until, due: Some(due) };
                } else if hold.missing > 0 {
                    *state = DeleteState::Released;
                    hold.missing -= 1;
                }
            }
        });
        self.hold = Some(hold);
    }

    /// Deletes of more than half of what is there now plus what went within the window, of enough sources.
    fn looks_like_an_accident(&self, totals: Totals) -> bool {
        let Count { long_held, released, gone, sources, .. } = self.count;
        let total = totals.companions.saturating_sub(long_held + released) + gone;
        self.count.counted() * 2 > total && sources > MAX_UNHELD_SOURCES
    }

    /// Starts to hold every delete that is due. While others have just been held, adds those of one source.
    fn hold_due(&mut self, now: Instant, source: &ObjectKey) {
        let until = now + self.grace;
        let hold = |deletes: &mut RecentDeletes| {
            for state in deletes.values_mut() {
                if let DeleteState::Due(due) = *state {
                    *state = DeleteState::Held { until, due: Some(due) };
                }
            }
        };
        if self.count.newly_held == 0 {
            self.deletes.values_mut().for_each(hold);
            self.recount();
        } else {
            self.change(source, hold);
        }
    }

    /// A companion was deleted.
    pub fn deleted(&mut self, now: Instant, source: &ObjectKey, companion: &ObjectKey) {
        self.change(source, |deletes| match deletes.get_mut(companion) {
            None => {}
            Some(DeleteState::Released) => {
                deletes.remove(companion);
            }
            // Perhaps it was under way when the others began to be held.
            Some(state) => *state = DeleteState::Gone(now),
        });
    }

    /// Forgets deletes of a source that are neither among these nor done: those companions are wanted again, or the
    /// source is gone and others deleted them. Then a delete without a hold may be under way, and counts. The hold ends
    /// when that is true of every held companion.
    pub fn forget_all_but(&mut self, source: &ObjectKey, due: &[ObjectKey], source_is_gone: bool) {
        if !self.deletes.contains_key(source) {
            return;
        }
        let due: HashSet<&ObjectKey> = due.iter().collect();
        self.change(source, |deletes| {
            deletes.retain(|key, state| match state {
                DeleteState::Gone(_) => true,
                DeleteState::Due(_) if source_is_gone => true,
                _ => due.contains(key),
            });
        });
    }

    /// Whether deletes of a source are due, held or released, and have not been made yet.
    pub fn awaits_deletes_of(&self, source: &ObjectKey) -> bool {
        let is_made = |state: &DeleteState| matches!(state, DeleteState::Gone(_));
        self.deletes.get(source).is_some_and(|deletes| !deletes.values().all(is_made))
    }

    #[cfg(any(test, feature = "testing"))]
    pub fn pending_count(&self) -> usize {
        self.count.counted()
    }

    pub const fn is_holding(&self) -> bool {
        self.count.held() > 0
    }

    /// When the last of the held deletes happens; none if none is held.
    fn held_until(&self) -> Option<Instant> {
        let until = |state: &DeleteState| match state {
            DeleteState::Held { until, .. } => Some(*until),
            _ => None,
        };
        self.deletes.values().flat_map(HashMap::values).filter_map(until).max()
    }

    /// Releases deletes that were held for the whole grace, and forgets what happened before the window.
    fn expire(&mut self, now: Instant) {
        if self.last_expired.is_some_and(|last| last + EXPIRE_INTERVAL > now) {
            return;
        }
        self.last_expired = Some(now);
        for deletes in self.deletes.values_mut() {
            deletes.retain(|_, state| {
                state.release_if_over(now);
                match state {
                    DeleteState::Held { due, .. } => {
                        *due = due.filter(|due| *due + WINDOW > now);
                        true
                    }
                    // A delete that fails again and again is not held a second time.
                    DeleteState::Released => true,
                    DeleteState::Due(at) | DeleteState::Gone(at) => *at + WINDOW > now,
                }
            });
        }
        self.deletes.retain(|_, deletes| !deletes.is_empty());
        self.recount();
    }

    /// Changes the deletes of one source, and the sums with them.
    fn change(&mut self, source: &ObjectKey, change: impl FnOnce(&mut RecentDeletes)) {
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

impl Hold {
    /// Whether deletes that become due now belong to it.
    fn is_joined(&self, now: Instant) -> bool {
        self.joined_until.is_some_and(|until| now < until) && (self.released || now < self.until)
    }
}

impl DeleteState {
    fn release_if_over(&mut self, now: Instant) {
        if matches!(self, Self::Held { until, .. } if *until <= now) {
            *self = Self::Released;
        }
    }
}

impl Count {
    fn of(deletes: &RecentDeletes) -> Self {
        let mut count = Self::default();
        for state in deletes.values() {
            *match state {
                DeleteState::Due(_) => &mut count.due,
                DeleteState::Held { due: Some(_), .. } => &mut count.newly_held,
                DeleteState::Held { due: None, .. } => &mut count.long_held,
                DeleteState::Released => &mut count.released,
                DeleteState::Gone(_) => &mut count.gone,
            } += 1;
        }
        count.sources = usize::from(count.counted() > 0);
        count.held_sources = usize::from(count.held() > 0);
        count
    }

    /// Deletes that became due or happened within the window.
    const fn counted(&self) -> usize {
        self.due + self.newly_held + self.gone
    }

    const fn held(&self) -> usize {
        self.newly_held + self.long_held
    }

    fn map(self, other: Self, f: impl Fn(usize, usize) -> usize) -> Self {
        Self {
            due: f(self.due, other.due),
            newly_held: f(self.newly_held, other.newly_held),
            long_held: f(self.long_held, other.long_held),
            released: f(self.released, other.released),
            gone: f(self.gone, other.gone),
            sources: f(self.sources, other.sources),
            held_sources: f(self.held_sources, other.held_sources),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{object::Kind, testing};

    const GRACE: Duration = Duration::from_secs(300);

    fn brake() -> Brake {
        Brake::new(testing::keys(), GRACE)
    }

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
        assert_eq!(ask(brake, now + SETTLE_TIME, n, total), BrakeDecision::Proceed, "{n}");
        brake.deleted(now + SETTLE_TIME, &source(n), &companion(n));
    }

    #[test]
    fn deletes_of_few_sources_are_never_held() {
        let (mut brake, now) = (brake(), Instant::now());
        for n in 0..20 {
            assert_eq!(ask(&mut brake, now, n, 20), BrakeDecision::Proceed);
        }
    }

    #[test]
    fn with_many_sources_a_delete_waits_a_moment_for_others_to_follow() {
        let (mut brake, now) = (brake(), Instant::now());
        assert_eq!(ask(&mut brake, now, 0, 100), BrakeDecision::Wait(now + SETTLE_TIME));
        assert_eq!(ask(&mut brake, now + SETTLE_TIME, 0, 100), BrakeDecision::Proceed);
    }

    #[test]
    fn delete_waits_while_others_follow_up_to_a_maximum() {
        let (mut brake, start) = (brake(), Instant::now());
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
        let (mut brake, now) = (brake(), Instant::now());
        for n in 0..30 {
            ask(&mut brake, now, n, 40);
        }
        let until = now + GRACE;
        assert!(
            matches!(ask(&mut brake, now + SETTLE_TIME, 0, 40), BrakeDecision::Hold { until: held, .. } if held == until)
        );
        assert!(brake.is_holding());
        for n in 0..30 {
            assert_eq!(ask(&mut brake, until, n, 40), BrakeDecision::Proceed);
        }
        // The next one starts from scratch.
        assert_eq!(ask(&mut brake, until, 31, 40), BrakeDecision::Wait(until + SETTLE_TIME));
    }

    #[test]
    fn deletes_of_exactly_half_are_not_held() {
        let (mut brake, now) = (brake(), Instant::now());
        for n in 0..30 {
            ask(&mut brake, now, n, 60);
        }
        assert_eq!(ask(&mut brake, now + SETTLE_TIME, 0, 60), BrakeDecision::Proceed);
    }

    #[test]
    fn deletes_that_happened_count_within_the_window() {
        let (mut brake, now) = (brake(), Instant::now());
        for n in 0..20 {
            // As they are deleted, fewer are left.
            delete(&mut brake, now, n, 40 - n);
        }
        assert!(!brake.is_holding());
        ask(&mut brake, now + SETTLE_TIME, 20, 20);
        assert!(brake.is_holding(), "21 of 40");
    }

    #[test]
    fn companion_that_is_wanted_again_no_longer_counts() {
        let (mut brake, now) = (brake(), Instant::now());
        for n in 0..20 {
            ask(&mut brake, now, n, 30);
        }
        brake.forget_all_but(&source(0), &[], false);
        ask(&mut brake, now, 20, 30);
        assert!(!brake.is_holding());
        ask(&mut brake, now, 21, 30);
        assert!(brake.is_holding());
    }

    #[test]
    fn hold_ends_when_every_held_companion_is_wanted_again() {
        let (mut brake, now) = (brake(), Instant::now());
        for n in 0..30 {
            ask(&mut brake, now, n, 30);
        }
        assert!(brake.is_holding());
        for n in 0..29 {
            brake.forget_all_but(&source(n), &[], false);
            assert!(brake.is_holding(), "one of them is still missing");
        }
        brake.forget_all_but(&source(29), &[], false);
        assert!(!brake.is_holding());
        ask(&mut brake, now, 0, 30);
        assert_eq!(ask(&mut brake, now + SETTLE_TIME, 0, 30), BrakeDecision::Proceed);
    }

    #[test]
    fn new_delete_is_not_held_once_most_held_companions_are_wanted_again() {
        let (mut brake, now) = (brake(), Instant::now());
        for n in 0..30 {
            ask(&mut brake, now, n, 40);
        }
        for n in 5..30 {
            brake.forget_all_but(&source(n), &[], false);
        }
        ask(&mut brake, now, 35, 40);
        assert_eq!(ask(&mut brake, now + SETTLE_TIME, 35, 40), BrakeDecision::Proceed);
        assert!(matches!(ask(&mut brake, now + SETTLE_TIME, 0, 40), BrakeDecision::Hold { .. }));
    }

    #[test]
    fn slow_deletes_are_not_held() {
        let (mut brake, mut now) = (brake(), Instant::now());
        for n in 0..60 {
            delete(&mut brake, now, n, 60 - n);
            now += Duration::from_secs(5);
        }
        assert!(!brake.is_holding());
    }

    #[test]
    fn all_that_is_left_after_a_slow_decline_is_held_when_it_goes_at_once() {
        let (mut brake, mut now) = (brake(), Instant::now());
        for n in 0..600 {
            delete(&mut brake, now, n, 1000 - n);
            now += Duration::from_secs(30);
        }
        for n in 600..1000 {
            ask(&mut brake, now, n, 400);
        }
        for n in 600..1000 {
            let decision = ask(&mut brake, now + SETTLE_TIME, n, 400);
            assert!(matches!(decision, BrakeDecision::Hold { companions: 400.., .. }), "{n}: {decision:?}");
        }
    }

    fn hold_thirty_of(total: usize, now: Instant) -> Brake {
        let mut brake = brake();
        for n in 0..30 {
            ask(&mut brake, now, n, total);
        }
        assert!(brake.is_holding());
        brake
    }

    #[test]
    fn delete_that_joins_an_accident_that_goes_on_is_held_for_a_whole_grace() {
        let now = Instant::now();
        let mut brake = hold_thirty_of(40, now);
        let late = now + WINDOW - Duration::from_secs(1);
        let decision = ask(&mut brake, late, 30, 40);
        assert!(
            matches!(decision, BrakeDecision::Hold { until, companions: 31, sources: 31 } if until == late + GRACE),
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
    fn end_of_a_hold_stays_while_its_deletes_are_asked_about_again() {
        let now = Instant::now();
        let mut brake = hold_thirty_of(40, now);
        for n in 0..30 {
            ask(&mut brake, now + 30 * SETTLE_TIME, n, 40);
        }
        assert_eq!(brake.held_until(), Some(now + GRACE));
    }

    #[test]
    fn delete_of_one_source_long_after_an_accident_began_is_not_held() {
        let now = Instant::now();
        let mut brake = hold_thirty_of(40, now);
        let late = now + WINDOW;
        assert_eq!(ask(&mut brake, late, 35, 40), BrakeDecision::Wait(late + SETTLE_TIME));
        assert_eq!(ask(&mut brake, late + SETTLE_TIME, 35, 40), BrakeDecision::Proceed);
        assert!(matches!(
            ask(&mut brake, late + SETTLE_TIME, 0, 40),
            BrakeDecision::Hold { companions: 30, .. }
        ));
    }

    #[test]
    fn second_accident_during_a_hold_is_held_for_a_grace_of_its_own() {
        let now = Instant::now();
        let mut brake = hold_thirty_of(59, now - WINDOW);
        // 21 of the 29 companions that the first accident left.
        for n in 30..51 {
            ask(&mut brake, now, n, 59);
        }
        for n in 30..51 {
            let decision = ask(&mut brake, now + SETTLE_TIME, n, 59);
            let held = matches!(decision, BrakeDecision::Hold { until, .. } if until >= now + GRACE);
            assert!(held, "{n}: {decision:?}");
        }
        assert_eq!((brake.count.held(), brake.count.held_sources), (51, 51));
        assert!(brake.held_until() >= Some(now + GRACE));
    }

    #[test]
    fn slow_accident_is_held_to_its_end() {
        let (mut brake, mut now) = (brake(), Instant::now());
        // One a second: half of them are due just before the window is over.
        for n in 0..118 {
            ask(&mut brake, now, n, 118);
            now += Duration::from_secs(1);
        }
        for n in 0..118 {
            let decision = ask(&mut brake, now, n, 118);
            assert!(n < 60 || matches!(decision, BrakeDecision::Hold { .. }), "{n}: {decision:?}");
        }
    }

    #[test]
    fn held_companion_of_a_gone_source_that_others_deleted_no_longer_counts() {
        let now = Instant::now();
        let mut brake = hold_thirty_of(40, now);
        ask(&mut brake, now, 35, 100);
        brake.forget_all_but(&source(0), &[], true);
        brake.forget_all_but(&source(1), &[companion(1)], true);
        assert_eq!(brake.count.held(), 29);
        assert_eq!(brake.count.due, 1, "the delete without a hold still counts");
    }

    #[test]
    fn companions_beside_their_source_are_not_covered() {
        let (mut brake, now) = (brake(), Instant::now());
        for n in 0..30 {
            let beside = [ObjectKey::new(Kind::ConfigMap, "home", &format!("s{n}-synced"))];
            let totals = Totals { companions: 30, sources: 30 };
            assert_eq!(brake.ask(now, &source(n), &beside, totals), [BrakeDecision::Proceed]);
            brake.deleted(now, &source(n), &beside[0]);
        }
        assert!(!brake.is_holding() && brake.pending_count() == 0);
    }

    #[test]
    fn zero_grace_turns_the_brake_off() {
        let (mut brake, now) = (Brake::new(testing::keys(), Duration::ZERO), Instant::now());
        for n in 0..30 {
            assert_eq!(ask(&mut brake, now, n, 30), BrakeDecision::Proceed);
        }
    }
}
