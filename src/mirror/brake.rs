//! PURE. Notices when so much would be deleted at once that it looks like an accident, and holds it.

use std::{
    collections::{HashMap, HashSet},
    time::{Duration, Instant},
};

use crate::object::ObjectKey;

/// What would go within this time counts together.
const WINDOW: Duration = Duration::from_secs(60);
/// Where an accident is possible at all, deletes wait until no other has joined them for this long,
const GATHER: Duration = Duration::from_secs(1);
/// but not longer than this.
const MAX_GATHER: Duration = Duration::from_secs(10);
/// An accident hits more sources than this.
const SOURCES: usize = 20;

#[derive(Debug)]
pub struct Brake {
    /// How long companions stay; zero turns the brake off.
    grace: Duration,
    doomed: HashMap<ObjectKey, HashMap<ObjectKey, Doomed>>,
    /// What of these counts, kept at hand: sources may be many, and each asks.
    count: Count,
    /// How many companions there were before any of these went.
    companions: usize,
    /// When the last of them joined.
    joined: Option<Instant>,
    held_until: Option<Instant>,
    aged: Option<Instant>,
}

#[derive(Debug)]
struct Doomed {
    since: Instant,
    fate: Fate,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// It would go, and counts.
    Open,
    /// It is part of what looks like an accident, and stays.
    Held,
    /// It was held for the whole grace: it may go and counts no more.
    Released,
}

#[derive(Debug, Default, Clone, Copy)]
struct Count {
    companions: usize,
    sources: usize,
    held: usize,
}

/// Whether deletes may go ahead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    Go,
    /// Ask again then: others may be about to follow.
    Gather(Instant),
    /// This looks like an accident.
    Held {
        until: Instant,
        companions: usize,
        sources: usize,
    },
}

/// How large the world is that something would be deleted from.
#[derive(Debug, Clone, Copy)]
pub struct Whole {
    pub companions: usize,
    /// Sources that have companions, whether they still exist or not.
    pub sources: usize,
}

impl Brake {
    #[must_use]
    pub fn new(grace: Duration) -> Self {
        Self {
            grace,
            doomed: HashMap::new(),
            count: Count::default(),
            companions: 0,
            joined: None,
            held_until: None,
            aged: None,
        }
    }

    /// A source would lose these companions; the others that it was said to lose, it keeps.
    pub fn ask(&mut self, now: Instant, source: &ObjectKey, going: &[ObjectKey], whole: Whole) -> Verdict {
        if self.grace.is_zero() {
            return Verdict::Go;
        }
        self.age(now);
        self.companions =
            if self.doomed.is_empty() { whole.companions } else { self.companions.max(whole.companions) };
        let doomed = self.doomed.entry(source.clone()).or_default();
        let (before, counted) = (doomed.len(), doomed.values().any(Doomed::counts));
        for key in going {
            doomed.entry(key.clone()).or_insert(Doomed { since: now, fate: Fate::Open });
        }
        let joined = doomed.len() - before;
        if joined > 0 {
            self.joined = Some(now);
            self.count.companions += joined;
            self.count.sources += usize::from(!counted);
        }
        if self.count.companions * 2 > self.companions && self.count.sources > SOURCES {
            self.hold(now, source);
        }

        let asked: Vec<&Doomed> = going.iter().filter_map(|key| self.doomed.get(source)?.get(key)).collect();
        let first = asked.iter().map(|doomed| doomed.since).min().unwrap_or(now);
        let gathered = (self.joined.unwrap_or(now) + GATHER).min(first + MAX_GATHER);
        if let Some(until) = self.held_until.filter(|_| asked.iter().any(|doomed| doomed.fate == Fate::Held))
        {
            let Count { companions, sources, .. } = self.count;
            Verdict::Held { until, companions, sources }
        } else if asked.iter().any(|doomed| doomed.counts()) && whole.sources > SOURCES && now < gathered {
            Verdict::Gather(gathered)
        } else {
            Verdict::Go
        }
    }

    /// Holds all that would go; while it lasts, what a source adds to it.
    fn hold(&mut self, now: Instant, source: &ObjectKey) {
        let hold = |doomed: &mut Doomed| {
            let held = doomed.fate == Fate::Open;
            if held {
                doomed.fate = Fate::Held;
            }
            held
        };
        let held = if self.held_until.is_none() {
            self.held_until = Some(now + self.grace);
            self.doomed.values_mut().flat_map(HashMap::values_mut).map(hold).filter(|held| *held).count()
        } else {
            let doomed = self.doomed.get_mut(source).into_iter().flat_map(HashMap::values_mut);
            doomed.map(hold).filter(|held| *held).count()
        };
        self.count.held += held;
    }

    /// A source that stands keeps all its companions but these: what came back no longer counts, and when all that
    /// was held is back, the accident is over.
    pub fn keeps_all_but(&mut self, source: &ObjectKey, going: &[ObjectKey]) {
        let Some(doomed) = self.doomed.get_mut(source) else { return };
        let before = Count::of(doomed);
        let going: HashSet<&ObjectKey> = going.iter().collect();
        doomed.retain(|key, _| going.contains(key));
        let after = Count::of(doomed);
        self.count.companions -= before.companions - after.companions;
        self.count.sources -= before.sources - after.sources;
        self.count.held -= before.held - after.held;
        if doomed.is_empty() {
            self.doomed.remove(source);
        }
        if self.count.held == 0 {
            self.held_until = None;
        }
    }

    #[must_use]
    pub fn is_holding(&self, now: Instant) -> bool {
        self.held_until.is_some_and(|until| now < until)
    }

    /// Forgets what is past. Once a second is enough: it goes through everything.
    fn age(&mut self, now: Instant) {
        let over = self.held_until.is_some_and(|until| until <= now);
        let recent = self.aged.is_some_and(|aged| aged + Duration::from_secs(1) > now);
        if !over && (recent || self.held_until.is_some()) {
            return;
        }
        self.aged = Some(now);
        if over {
            self.held_until = None;
            for doomed in self.doomed.values_mut().flat_map(HashMap::values_mut) {
                *doomed = Doomed { since: now, fate: Fate::Released };
            }
        }
        for doomed in self.doomed.values_mut() {
            doomed.retain(|_, doomed| doomed.since + WINDOW > now);
        }
        self.doomed.retain(|_, doomed| !doomed.is_empty());
        self.count = self.doomed.values().map(Count::of).fold(Count::default(), |all, one| Count {
            companions: all.companions + one.companions,
            sources: all.sources + one.sources,
            held: all.held + one.held,
        });
    }
}

impl Doomed {
    fn counts(&self) -> bool {
        self.fate != Fate::Released
    }
}

impl Count {
    fn of(doomed: &HashMap<ObjectKey, Doomed>) -> Self {
        let companions = doomed.values().filter(|doomed| doomed.counts()).count();
        let held = doomed.values().filter(|doomed| doomed.fate == Fate::Held).count();
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

    fn ask(brake: &mut Brake, now: Instant, n: usize, total: usize) -> Verdict {
        brake.ask(now, &source(n), &[companion(n)], Whole { companions: total, sources: total })
    }

    #[test]
    fn few_sources_are_never_held_up() {
        let (mut brake, now) = (Brake::new(GRACE), Instant::now());
        for n in 0..20 {
            assert_eq!(ask(&mut brake, now, n, 20), Verdict::Go);
        }
    }

    #[test]
    fn among_many_a_delete_waits_a_moment_for_others_to_join_it() {
        let (mut brake, now) = (Brake::new(GRACE), Instant::now());
        assert_eq!(ask(&mut brake, now, 0, 100), Verdict::Gather(now + GATHER));
        assert_eq!(ask(&mut brake, now + GATHER, 0, 100), Verdict::Go);
    }

    #[test]
    fn while_others_join_it_waits_on_but_not_for_ever() {
        let (mut brake, start) = (Brake::new(GRACE), Instant::now());
        let mut now = start;
        for n in 0..15 {
            ask(&mut brake, now, n, 100);
            now += Duration::from_millis(900);
        }
        assert_eq!(ask(&mut brake, now, 0, 100), Verdict::Go);
        assert!(matches!(ask(&mut brake, now, 14, 100), Verdict::Gather(_)));
    }

    #[test]
    fn more_than_half_of_all_is_held_for_the_grace_and_then_goes() {
        let (mut brake, now) = (Brake::new(GRACE), Instant::now());
        for n in 0..30 {
            ask(&mut brake, now, n, 40);
        }
        let until = now + GRACE;
        assert!(
            matches!(ask(&mut brake, now + GATHER, 0, 40), Verdict::Held { until: held, .. } if held == until)
        );
        assert!(brake.is_holding(now + GATHER));
        for n in 0..30 {
            assert_eq!(ask(&mut brake, until, n, 40), Verdict::Go);
        }
        // The next one starts from scratch.
        assert_eq!(ask(&mut brake, until, 31, 40), Verdict::Gather(until + GATHER));
    }

    #[test]
    fn half_of_all_is_not_more_than_half() {
        let (mut brake, now) = (Brake::new(GRACE), Instant::now());
        for n in 0..30 {
            ask(&mut brake, now, n, 60);
        }
        assert_eq!(ask(&mut brake, now + GATHER, 0, 60), Verdict::Go);
    }

    #[test]
    fn what_went_already_still_counts_within_the_minute() {
        let (mut brake, now) = (Brake::new(GRACE), Instant::now());
        for n in 0..25 {
            // As they are deleted, fewer are left.
            ask(&mut brake, now, n, 40 - n);
        }
        assert!(brake.is_holding(now + GATHER));
    }

    #[test]
    fn what_comes_back_counts_no_more() {
        let (mut brake, now) = (Brake::new(GRACE), Instant::now());
        for n in 0..20 {
            ask(&mut brake, now, n, 30);
        }
        brake.keeps_all_but(&source(0), &[]);
        ask(&mut brake, now, 20, 30);
        assert!(!brake.is_holding(now));
        ask(&mut brake, now, 21, 30);
        assert!(brake.is_holding(now));
    }

    #[test]
    fn when_all_is_back_the_accident_is_over_and_a_later_delete_is_free() {
        let (mut brake, now) = (Brake::new(GRACE), Instant::now());
        for n in 0..30 {
            ask(&mut brake, now, n, 30);
        }
        assert!(brake.is_holding(now));
        for n in 0..29 {
            brake.keeps_all_but(&source(n), &[]);
            assert!(brake.is_holding(now), "one of them is still missing");
        }
        brake.keeps_all_but(&source(29), &[]);
        assert!(!brake.is_holding(now));
        ask(&mut brake, now, 0, 30);
        assert_eq!(ask(&mut brake, now + GATHER, 0, 30), Verdict::Go);
    }

    #[test]
    fn a_delete_beside_an_accident_that_is_nearly_undone_is_not_held() {
        let (mut brake, now) = (Brake::new(GRACE), Instant::now());
        for n in 0..30 {
            ask(&mut brake, now, n, 40);
        }
        for n in 5..30 {
            brake.keeps_all_but(&source(n), &[]);
        }
        ask(&mut brake, now, 35, 40);
        assert_eq!(ask(&mut brake, now + GATHER, 35, 40), Verdict::Go);
        assert!(matches!(ask(&mut brake, now + GATHER, 0, 40), Verdict::Held { .. }));
    }

    #[test]
    fn what_goes_slowly_is_no_accident() {
        let (mut brake, mut now) = (Brake::new(GRACE), Instant::now());
        for n in 0..30 {
            ask(&mut brake, now, n, 30);
            now += Duration::from_secs(5);
        }
        assert!(!brake.is_holding(now));
    }

    #[test]
    fn no_grace_turns_it_off() {
        let (mut brake, now) = (Brake::new(Duration::ZERO), Instant::now());
        for n in 0..30 {
            assert_eq!(ask(&mut brake, now, n, 30), Verdict::Go);
        }
    }
}
