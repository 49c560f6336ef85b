//! PURE. A circuit breaker for deletes: holds them when so many are due at once that it looks like an accident.
//!
//! The deletes that became due within a minute are an accident if they are more than half of what there is to delete, and
//! belong to more than 20 sources. Held deletes that became due earlier count on neither side. So an accident that goes on
//! is held to its end, a second one is held like the first, and the delete of a single source long after an accident is
//! not held with it.

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
    /// A hold of the leader before this one, and until when deletes that become due belong to it.
    inherited: Option<(Inherited, Instant)>,
}

/// What a leader left to the next. Which deletes it held is not recorded: all that the next leader finds belong to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Inherited {
    /// Deletes are held until this time.
    Held(Instant),
    /// A hold of so many companions was released, and not all of them may be deleted yet.
    Released(usize),
}

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

/// The deletes that are held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Holding {
    /// When the last of them happens.
    pub until: Instant,
    pub companions: usize,
    pub sources: usize,
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
            inherited: None,
        }
    }

    /// Starts anew as the brake of a new leader, which takes over what the one before it left.
    pub fn take_over(&mut self, now: Instant, inherited: Option<Inherited>) {
        let inherited =
            inherited.filter(|_| !self.grace.is_zero()).map(|inherited| (inherited, now + WINDOW));
        *self = Self { inherited, ..Self::new(self.grace) };
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
            deletes.values_mut().for_each(|state| state.release_if_over(now));
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
        self.apply_inherited(now, source);
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
            DeleteState::Held { until, .. } => {
                BrakeDecision::Hold { until, companions: self.count.held(), sources: self.count.held_sources }
            }
            DeleteState::Due(_) if waits => BrakeDecision::Wait(wait_until),
            DeleteState::Due(_) | DeleteState::Released | DeleteState::Gone(_) => BrakeDecision::Proceed,
        };
        states.into_iter().map(decide).collect()
    }

    /// Deletes of a source that became due soon after this leader took over belong to the hold that it took over.
    fn apply_inherited(&mut self, now: Instant, source: &ObjectKey) {
        let Some((mut inherited, joins_until)) = self.inherited.filter(|_| self.is_inheriting(now)) else {
            return;
        };
        let mut held_until = None;
        self.change(source, |deletes| {
            for state in deletes.values_mut() {
                let DeleteState::Due(due) = *state else { continue };
                match &mut inherited {
                    Inherited::Held(until) => {
                        *state = DeleteState::Held { until: *until, due: Some(due) };
                        held_until = Some(*until);
                    }
                    Inherited::Released(0) => {}
                    Inherited::Released(left) => {
                        *state = DeleteState::Released;
                        *left -= 1;
                    }
                }
            }
        });
        self.held_until = self.held_until.max(held_until);
        self.inherited = Some((inherited, joins_until));
    }

    /// Whether deletes that become due now belong to a hold of the leader before this one.
    #[must_use]
    pub fn is_inheriting(&self, now: Instant) -> bool {
        self.inherited.is_some_and(|(inherited, joins_until)| {
            let is_over = matches!(inherited, Inherited::Held(until) if until <= now);
            !is_over && now < joins_until
        })
    }

    /// Deletes of more than half of what is there now plus what went within the window, of enough sources.
    fn looks_like_an_accident(&self, totals: Totals) -> bool {
        let Count { long_held, released, gone, sources, .. } = self.count;
        let total = totals.companions.saturating_sub(long_held + released) + gone;
        self.count.counted() * 2 > total && sources > MAX_UNHELD_SOURCES
    }

    /// Starts to hold every delete that is due. While others have just been held, adds those of one source.
    fn hold(&mut self, now: Instant, source: &ObjectKey) {
        let until = now + self.grace;
        let mut any = false;
        let mut hold = |deletes: &mut HashMap<ObjectKey, DeleteState>| {
            for state in deletes.values_mut() {
                if let DeleteState::Due(due) = *state {
                    *state = DeleteState::Held { until, due: Some(due) };
                    any = true;
                }
            }
        };
        if self.count.newly_held == 0 {
            self.deletes.values_mut().for_each(hold);
            self.recount();
        } else {
            self.change(source, &mut hold);
            self.held_until = self.held_until.max(any.then_some(until));
        }
    }

    /// Lets all deletes happen that are held, and returns their sources. After a takeover, some of the companions of the
    /// hold may not have been found yet.
    pub fn release(&mut self, companions: usize) -> Vec<ObjectKey> {
        let left = companions.saturating_sub(self.count.held());
        if let Some((inherited @ Inherited::Held(_), _)) = &mut self.inherited {
            *inherited = Inherited::Released(left);
        }
        let mut sources = Vec::new();
        for (source, deletes) in &mut self.deletes {
            let mut any = false;
            for state in deletes.values_mut().filter(|state| matches!(state, DeleteState::Held { .. })) {
                *state = DeleteState::Released;
                any = true;
            }
            if any {
                sources.push(source.clone());
            }
        }
        self.recount();
        sources
    }

    /// Holds all deletes that are held until this time instead.
    pub fn extend(&mut self, end: Instant) {
        if let Some((Inherited::Held(until), _)) = &mut self.inherited {
            *until = end;
        }
        for state in self.deletes.values_mut().flat_map(HashMap::values_mut) {
            if let DeleteState::Held { until, .. } = state {
                *until = end;
            }
        }
        self.recount();
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
            // It was under way when the others began to be held.
            DeleteState::Held { .. } => {
                return self.change(source, |deletes| {
                    deletes.insert(companion.clone(), DeleteState::Gone(now));
                });
            }
            DeleteState::Released => {
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
        self.retain(source, due, |state| matches!(state, DeleteState::Gone(_)));
    }

    /// As [`Self::forget_all_but`] for a source that is gone: its companions were deleted by others. A delete without a
    /// hold may be under way, and counts.
    pub fn forget_held_but(&mut self, source: &ObjectKey, due: &[ObjectKey]) {
        self.retain(source, due, |state| matches!(state, DeleteState::Gone(_) | DeleteState::Due(_)));
    }

    fn retain(&mut self, source: &ObjectKey, due: &[ObjectKey], keeps: impl Fn(&DeleteState) -> bool) {
        if !self.deletes.contains_key(source) {
            return;
        }
        let due: HashSet<&ObjectKey> = due.iter().collect();
        self.change(source, |deletes| deletes.retain(|key, state| keeps(state) || due.contains(key)));
    }

    /// Whether deletes of a source are due, held or released, and have not been made yet.
    #[must_use]
    pub fn awaits_deletes_of(&self, source: &ObjectKey) -> bool {
        let is_made = |state: &DeleteState| matches!(state, DeleteState::Gone(_));
        self.deletes.get(source).is_some_and(|deletes| !deletes.values().all(is_made))
    }

    #[cfg(test)]
    pub fn pending_count(&self) -> usize {
        self.count.counted()
    }

    #[must_use]
    pub fn is_holding(&self, now: Instant) -> bool {
        self.holding(now).is_some()
    }

    /// What is held; none if nothing is.
    #[must_use]
    pub fn holding(&self, now: Instant) -> Option<Holding> {
        let until = self.held_until.filter(|until| now < *until && self.count.held() > 0)?;
        Some(Holding { until, companions: self.count.held(), sources: self.count.held_sources })
    }

    /// Whether deletes whose hold is over have yet to happen.
    #[must_use]
    pub fn is_releasing(&self, now: Instant) -> bool {
        self.count.released > 0 || self.is_inheriting(now)
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
        let until = |state: &DeleteState| match state {
            DeleteState::Held { until, .. } => Some(*until),
            _ => None,
        };
        self.held_until = self.deletes.values().flat_map(HashMap::values).filter_map(until).max();
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
    fn of(deletes: &HashMap<ObjectKey, DeleteState>) -> Self {
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

    fn hold_thirty_of(total: usize, now: Instant) -> Brake {
        let mut brake = Brake::new(GRACE);
        for n in 0..30 {
            ask(&mut brake, now, n, total);
        }
        assert!(brake.is_holding(now));
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
            ask(&mut brake, now + 30 * QUIET, n, 40);
        }
        assert_eq!(brake.holding(now + 30 * QUIET).map(|held| held.until), Some(now + GRACE));
    }

    #[test]
    fn delete_of_one_source_long_after_an_accident_began_is_not_held() {
        let now = Instant::now();
        let mut brake = hold_thirty_of(40, now);
        let late = now + WINDOW;
        assert_eq!(ask(&mut brake, late, 35, 40), BrakeDecision::Wait(late + QUIET));
        assert_eq!(ask(&mut brake, late + QUIET, 35, 40), BrakeDecision::Proceed);
        assert!(matches!(ask(&mut brake, late + QUIET, 0, 40), BrakeDecision::Hold { companions: 30, .. }));
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
            let decision = ask(&mut brake, now + QUIET, n, 59);
            let held = matches!(decision, BrakeDecision::Hold { until, .. } if until >= now + GRACE);
            assert!(held, "{n}: {decision:?}");
        }
        let holding = brake.holding(now + QUIET).unwrap();
        assert_eq!((holding.companions, holding.sources), (51, 51));
        assert!(holding.until >= now + GRACE);
    }

    #[test]
    fn slow_accident_is_held_to_its_end() {
        let (mut brake, mut now) = (Brake::new(GRACE), Instant::now());
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
    fn released_deletes_proceed_and_are_not_held_again_when_they_fail() {
        let now = Instant::now();
        let mut brake = hold_thirty_of(40, now);
        let mut sources = brake.release(30);
        sources.sort();
        let mut expected: Vec<ObjectKey> = (0..30).map(source).collect();
        expected.sort();
        assert_eq!(sources, expected);
        assert!(!brake.is_holding(now) && brake.is_releasing(now));
        for n in 0..30 {
            assert_eq!(ask(&mut brake, now + 2 * WINDOW, n, 40), BrakeDecision::Proceed, "{n}");
        }
        assert!(!brake.is_holding(now + 2 * WINDOW));
        for n in 0..30 {
            brake.deleted(now + 2 * WINDOW, &source(n), &companion(n));
        }
        assert!(!brake.is_releasing(now + 2 * WINDOW));
    }

    #[test]
    fn extended_hold_ends_later() {
        let now = Instant::now();
        let mut brake = hold_thirty_of(40, now);
        brake.extend(now + 2 * GRACE);
        let decision = ask(&mut brake, now + GRACE, 0, 40);
        assert!(
            matches!(decision, BrakeDecision::Hold { until, .. } if until == now + 2 * GRACE),
            "{decision:?}"
        );
        assert_eq!(ask(&mut brake, now + 2 * GRACE, 0, 40), BrakeDecision::Proceed);
        assert!(!brake.is_holding(now + 2 * GRACE));
    }

    #[test]
    fn new_leader_holds_what_it_finds_until_the_known_end_and_no_more() {
        let (mut brake, now) = (Brake::new(GRACE), Instant::now());
        let until = now + Duration::from_secs(200);
        brake.take_over(now, Some(Inherited::Held(until)));
        assert!(brake.is_inheriting(now) && !brake.is_holding(now), "it has found none yet");
        // Few are left, and of few sources: by themselves, they would not be held.
        for n in 0..5 {
            let decision = ask(&mut brake, now, n, 100);
            assert!(
                matches!(decision, BrakeDecision::Hold { until: held, .. } if held == until),
                "{decision:?}"
            );
        }
        let late = now + WINDOW;
        assert_eq!(
            ask(&mut brake, late, 50, 100),
            BrakeDecision::Wait(late + QUIET),
            "a later one is not held"
        );
        for n in 0..5 {
            assert!(matches!(ask(&mut brake, late, n, 100), BrakeDecision::Hold { .. }));
        }
        for n in 0..5 {
            assert_eq!(ask(&mut brake, until, n, 100), BrakeDecision::Proceed);
        }
    }

    #[test]
    fn new_leader_lets_released_deletes_happen_and_no_more() {
        let (mut brake, now) = (Brake::new(GRACE), Instant::now());
        brake.take_over(now, Some(Inherited::Released(25)));
        let decisions: Vec<BrakeDecision> = (0..60).map(|n| ask(&mut brake, now, n, 60)).collect();
        let proceed = |decision: &&BrakeDecision| **decision == BrakeDecision::Proceed;
        assert_eq!(decisions.iter().filter(proceed).count(), 25);
        assert!(brake.is_holding(now), "35 more became due");
    }

    #[test]
    fn release_right_after_a_takeover_lets_all_happen_that_is_found() {
        let (mut brake, now) = (Brake::new(GRACE), Instant::now());
        brake.take_over(now, Some(Inherited::Held(now + GRACE)));
        ask(&mut brake, now, 0, 30);
        assert_eq!(brake.release(30), [source(0)]);
        for n in 0..30 {
            assert_eq!(ask(&mut brake, now, n, 30), BrakeDecision::Proceed, "{n}");
        }
    }

    #[test]
    fn held_companion_of_a_gone_source_that_others_deleted_no_longer_counts() {
        let now = Instant::now();
        let mut brake = hold_thirty_of(40, now);
        ask(&mut brake, now, 35, 100);
        brake.forget_held_but(&source(0), &[]);
        brake.forget_held_but(&source(1), &[companion(1)]);
        assert_eq!(brake.holding(now).map(|held| held.companions), Some(29));
        assert_eq!(brake.count.due, 1, "the delete without a hold still counts");
    }

    #[test]
    fn zero_grace_turns_the_brake_off() {
        let (mut brake, now) = (Brake::new(Duration::ZERO), Instant::now());
        for n in 0..30 {
            assert_eq!(ask(&mut brake, now, n, 30), BrakeDecision::Proceed);
        }
    }
}
