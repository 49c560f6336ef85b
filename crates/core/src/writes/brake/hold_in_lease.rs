//! Keeps the hold in the annotations of the Lease, where the next leader and people find it, and does what people ask
//! for there.
//!
//! The leader's own knowledge decides: whatever else is in `deletes-held` is overwritten. A standby knows the hold from
//! there. A hold that vanished, because somebody removed the annotation or the Lease, counts until its known end,
//! unless a release of it is recorded.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    time::{Duration, Instant},
};

use k8s_openapi::jiff::Timestamp;

use super::{Brake, Count, DeleteState, Hold, WINDOW};
use crate::{
    lease::hold::{HeldDeletes, HoldAnnotations, MAX_HOLD, Release, seconds, time_left, to_annotation},
    object::ObjectKey,
    object::time::{Moment, later},
};

/// Who released a hold that ended before its time.
const BY_LOCKSTEP: &str = "lockstep: nothing was left to hold";

/// What follows for the Lease, the queue and the log.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct HoldUpdate {
    /// Annotations to set, or to remove with `None`.
    pub set: Vec<(String, Option<String>)>,
    /// Sources whose deletes may happen now.
    pub requeue: Vec<ObjectKey>,
    pub notes: Vec<Note>,
}

/// What the log says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Note {
    /// A standby knows the hold of the leader.
    Noticed(HeldDeletes),
    TakenOver(HeldDeletes),
    Released {
        by: String,
    },
    Extended {
        by: String,
        until: Timestamp,
    },
    Vanished(String),
    Malformed(String),
}

impl Brake {
    /// This replica becomes the leader: it goes on with the hold that the Lease shows, or that it knows.
    pub fn take_over(&mut self, annotations: &BTreeMap<String, String>, now: Moment) -> HoldUpdate {
        let mut update = self.follow(annotations, now);
        self.deletes.clear();
        self.count = Count::default();
        self.last_due = None;
        self.leads = true;
        let joined_until = (!self.grace.is_zero()).then(|| now.instant + WINDOW);
        if let Some(hold) = &mut self.hold {
            hold.joined_until = joined_until;
            hold.missing = hold.facts.companions;
            update.notes.push(Note::TakenOver(hold.facts));
        }
        update
    }

    /// This replica no longer leads.
    pub fn step_down(&mut self) {
        self.leads = false;
        self.deletes.clear();
        self.count = Count::default();
    }

    /// Compares the hold with the annotations as last observed. `leads` is whether this replica may write.
    pub fn sync(&mut self, leads: bool, annotations: &BTreeMap<String, String>, now: Moment) -> HoldUpdate {
        // Between the claim and the takeover, this replica does not go on with the hold yet.
        if leads && self.leads {
            return self.lead(annotations, now);
        }
        let before = self.hold.map(|hold| hold.facts.since);
        let mut update = self.follow(annotations, now);
        let new = self.hold.filter(|hold| Some(hold.facts.since) != before);
        update.notes.extend(new.map(|hold| Note::Noticed(hold.facts)));
        update
    }

    /// Remembers the hold that another leader shows.
    fn follow(&mut self, annotations: &BTreeMap<String, String>, now: Moment) -> HoldUpdate {
        let seen = HoldAnnotations::read(&self.keys, annotations);
        let shown = seen.held.filter(|facts| now.wall < facts.until);
        if let Some(mut facts) = shown {
            facts.until = facts.until.min(later(now.wall, MAX_HOLD));
            let released = seen.release_of(&facts).is_some();
            if self.hold.is_none_or(|known| known.facts != facts || known.released != released) {
                let until = now.instant + time_left(now.wall, facts.until);
                self.hold =
                    Some(Hold { facts, until, released, joined_until: None, missing: 0, shown: true });
            }
        }
        let ended = |hold: &Hold| {
            // There is one hold at a time: the release of a later one means that this one is over, too.
            let released = seen.released.as_ref().is_some_and(|release| release.hold >= hold.facts.since);
            hold.until <= now.instant || (shown.is_none() && released)
        };
        self.hold = self.hold.filter(|hold| !ended(hold));
        let mut update = HoldUpdate::default();
        self.extend(&seen, now, &mut update);
        self.report_malformed(&seen, &mut update);
        update
    }

    /// Does what people ask for, and shows the hold in the Lease.
    fn lead(&mut self, annotations: &BTreeMap<String, String>, now: Moment) -> HoldUpdate {
        let seen = HoldAnnotations::read(&self.keys, annotations);
        let mut update = HoldUpdate::default();
        self.expire(now.instant);
        self.release(&seen, &mut update);
        self.extend(&seen, now, &mut update);
        self.show_what_is_held(now, &mut update);
        let wanted = self.hold.map(|hold| to_annotation(&hold.facts));
        let shown = annotations.get(&self.keys.deletes_held);
        if let Some(hold) = &mut self.hold {
            if hold.shown && shown.is_none() {
                update.notes.push(Note::Vanished(self.keys.deletes_held.clone()));
            }
            hold.shown = shown == wanted.as_ref();
        }
        if shown != wanted.as_ref() {
            update.set.push((self.keys.deletes_held.clone(), wanted));
        }
        self.report_malformed(&seen, &mut update);
        update
    }

    /// Makes the hold that of the deletes which are held.
    fn show_what_is_held(&mut self, now: Moment, update: &mut HoldUpdate) {
        let until = self.held_until();
        let companions = self.count.held();
        let sources = self.count.held_sources;
        let known = self.hold.take();
        // A takeover finds the deletes one by one: until then, their count is that of the leader before.
        let is_joined = known.is_some_and(|hold| hold.is_joined(now.instant));
        self.hold = match (until, known) {
            (_, Some(hold)) if is_joined && (until.is_none() || !hold.released) => Some(hold),
            (Some(until), known) => {
                // Others than those that were released are another hold.
                let mut hold = known.filter(|hold| !hold.released).unwrap_or_else(|| {
                    let since = seconds(now.wall);
                    let facts = HeldDeletes { since, until: wall_time(until, now), companions, sources };
                    Hold { facts, until, released: false, joined_until: None, missing: 0, shown: false }
                });
                if hold.until != until {
                    hold.until = until;
                    hold.facts.until = wall_time(until, now);
                }
                hold.facts.companions = companions;
                hold.facts.sources = sources;
                Some(hold)
            }
            (None, Some(hold)) if hold.released => Some(hold).filter(|_| self.count.released > 0),
            (None, Some(hold)) => {
                // Standbys must not take it over.
                if now.instant < hold.until {
                    let release = to_annotation(&Release::new(&hold.facts, now.wall, BY_LOCKSTEP));
                    update.set.push((self.keys.deletes_released.clone(), Some(release)));
                }
                None
            }
            (None, None) => None,
        };
    }

    /// Lets all deletes happen that are held, if somebody asked for that. After a takeover, some of them may not have
    /// been found yet.
    fn release(&mut self, seen: &HoldAnnotations, update: &mut HoldUpdate) {
        let Some(hold) = self.hold.as_mut().filter(|hold| !hold.released) else { return };
        let Some(release) = seen.release_of(&hold.facts) else { return };
        hold.released = true;
        hold.missing = hold.facts.companions.saturating_sub(self.count.held());
        update.notes.push(Note::Released { by: release.by.clone() });
        for (source, deletes) in &mut self.deletes {
            let held = deletes.values_mut().filter(|state| matches!(state, DeleteState::Held { .. }));
            if held.map(|state| *state = DeleteState::Released).count() > 0 {
                update.requeue.push(source.clone());
            }
        }
        self.recount();
    }

    /// Holds all deletes that are held for longer, if somebody asked for that.
    fn extend(&mut self, seen: &HoldAnnotations, now: Moment, update: &mut HoldUpdate) {
        let Some(hold) = self.hold.as_mut().filter(|hold| !hold.released) else { return };
        // Cutting an extension short would move the end with the clock.
        let possible = |until: Timestamp| until <= later(now.wall, MAX_HOLD);
        let Some(extension) = seen.extension_of(&hold.facts).filter(|wanted| possible(wanted.until)) else {
            return;
        };
        let end = now.instant + time_left(now.wall, extension.until);
        hold.until = end;
        hold.facts.until = extension.until;
        for state in self.deletes.values_mut().flat_map(HashMap::values_mut) {
            if let DeleteState::Held { until, .. } = state {
                *until = end;
            }
        }
        if self.leads {
            update.notes.push(Note::Extended { by: extension.by.clone(), until: extension.until });
        }
    }

    fn report_malformed(&mut self, seen: &HoldAnnotations, update: &mut HoldUpdate) {
        let new = seen.malformed.iter().filter(|key| !self.malformed.contains(key));
        update.notes.extend(new.cloned().map(Note::Malformed));
        self.malformed.clone_from(&seen.malformed);
    }
}

fn wall_time(at: Instant, now: Moment) -> Timestamp {
    // To the nearest second.
    let left = at.saturating_duration_since(now.instant) + Duration::from_millis(500);
    seconds(later(now.wall, left))
}

impl Note {
    pub const fn is_warning(&self) -> bool {
        matches!(self, Self::Vanished(_) | Self::Malformed(_))
    }
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Noticed(HeldDeletes { companions, sources, until, .. }) => write!(
                f,
                "the leader holds deletes of {companions} companions of {sources} sources until {until}; if this \
                 replica takes over, it goes on"
            ),
            Self::TakenOver(HeldDeletes { companions, sources, until, .. }) => write!(
                f,
                "the leader before this one held deletes of {companions} companions of {sources} sources: this one \
                 goes on until {until}"
            ),
            Self::Released { by } => write!(f, "{by} released the deletes that were held: they happen now"),
            Self::Extended { by, until } => write!(f, "{by} extended the hold of deletes until {until}"),
            Self::Vanished(key) => write!(
                f,
                "somebody removed the annotation {key} or the Lease: deletes are still held, and the annotation is \
                 written again (`lockstep deletes release` ends the hold)"
            ),
            Self::Malformed(key) => {
                write!(f, "the annotation {key} of the Lease cannot be read and is ignored")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        object::{Kind, ObjectKey},
        testing,
        writes::brake::{BrakeDecision, Totals},
    };

    const GRACE: Duration = Duration::from_hours(1);

    /// A replica, and a Lease that takes its changes at once.
    struct Replica {
        brake: Brake,
        leads: bool,
    }

    struct Scene {
        annotations: BTreeMap<String, String>,
        now: Moment,
    }

    impl Scene {
        fn new() -> Self {
            let wall = "2026-11-17T18:00:00Z".parse().unwrap();
            Self { annotations: BTreeMap::new(), now: Moment { instant: Instant::now(), wall } }
        }

        fn pass(&mut self, time: Duration) {
            self.now.instant += time;
            self.now.wall = later(self.now.wall, time);
        }

        fn seen(&self) -> HoldAnnotations {
            HoldAnnotations::read(&testing::keys(), &self.annotations)
        }

        fn held(&self) -> HeldDeletes {
            self.seen().held.expect("a hold")
        }

        fn set(&mut self, key: &str, value: String) {
            self.annotations.insert(key.to_owned(), value);
        }

        fn release(&mut self) {
            let release = Release::new(&self.held(), self.now.wall, "alice");
            self.set(&testing::keys().deletes_released, to_annotation(&release));
        }
    }

    impl Replica {
        fn standby() -> Self {
            Self { brake: Brake::new(testing::keys(), GRACE), leads: false }
        }

        fn leader(scene: &mut Scene) -> Self {
            let mut replica = Self::standby();
            replica.lead(scene);
            replica
        }

        fn lead(&mut self, scene: &mut Scene) {
            self.leads = true;
            self.brake.take_over(&scene.annotations, scene.now);
        }

        fn sync(&mut self, scene: &mut Scene) -> HoldUpdate {
            let update = self.brake.sync(self.leads, &scene.annotations, scene.now);
            for (key, value) in &update.set {
                match value {
                    Some(value) => drop(scene.annotations.insert(key.clone(), value.clone())),
                    None => drop(scene.annotations.remove(key)),
                }
            }
            update
        }

        /// How many of the deletes of these sources are held.
        fn ask(&mut self, scene: &Scene, sources: std::ops::Range<usize>) -> usize {
            let ask = |n: usize| {
                let key = |namespace, name: &str| ObjectKey::new(Kind::ConfigMap, namespace, name);
                let (source, at) = (key("home", &format!("s{n}")), key("away", &format!("s{n}-synced")));
                let totals = Totals { companions: 40, sources: 40 };
                self.brake.ask(scene.now.instant, &source, &[at], totals)[0]
            };
            let decisions: Vec<_> = sources.map(ask).collect();
            let is_held = |decision: &&_| matches!(decision, BrakeDecision::Hold { .. });
            decisions.iter().filter(is_held).count()
        }

        fn restore(&mut self, sources: std::ops::Range<usize>) {
            for n in sources {
                let source = ObjectKey::new(Kind::ConfigMap, "home", &format!("s{n}"));
                self.brake.forget_all_but(&source, &[], false);
            }
        }
    }

    /// A leader that holds deletes of thirty sources, and shows it.
    fn accident() -> (Scene, Replica) {
        let mut scene = Scene::new();
        let mut leader = Replica::leader(&mut scene);
        leader.ask(&scene, 0..30);
        leader.sync(&mut scene);
        (scene, leader)
    }

    #[test]
    fn leader_shows_a_hold_and_at_rest_writes_nothing() {
        let (mut scene, mut leader) = accident();
        let text = scene.annotations.values().next().unwrap();
        assert_eq!(
            text,
            r#"{"since":"2026-11-17T18:00:00Z","until":"2026-11-17T19:00:00Z","companions":30,"sources":30}"#
        );
        scene.pass(Duration::from_millis(1100));
        assert_eq!(leader.sync(&mut scene), HoldUpdate::default());
        leader.restore(0..10);
        leader.sync(&mut scene);
        assert_eq!((scene.held().companions, scene.held().sources), (20, 20));
    }

    #[test]
    fn hold_that_is_over_is_removed_without_a_release() {
        let (mut scene, mut leader) = accident();
        scene.pass(GRACE);
        leader.sync(&mut scene);
        assert!(scene.annotations.is_empty());
    }

    #[test]
    fn next_leader_holds_until_the_same_end() {
        let (mut scene, _) = accident();
        scene.pass(Duration::from_mins(50));
        let mut next = Replica::leader(&mut scene);
        assert_eq!(next.ask(&scene, 0..3), 3, "too few for an accident of their own");
        next.sync(&mut scene);
        assert_eq!(scene.held().companions, 30, "it has not found all of them yet");
        scene.pass(Duration::from_mins(1));
        assert_eq!(next.ask(&scene, 0..3), 3);
        next.sync(&mut scene);
        let held = scene.held();
        assert_eq!((held.companions, held.until), (3, "2026-11-17T19:00:00Z".parse().unwrap()));
        assert_eq!(next.ask(&scene, 5..6), 0, "a later delete does not belong to it");
        scene.pass(Duration::from_mins(9));
        assert_eq!(next.ask(&scene, 0..3), 0);
    }

    #[test]
    fn hold_of_which_nothing_is_left_is_recorded_as_released() {
        let (mut scene, mut leader) = accident();
        let (mut standby, hold) = (Replica::standby(), scene.held());
        standby.sync(&mut scene);
        leader.restore(0..30);
        leader.sync(&mut scene);
        let seen = scene.seen();
        assert!(seen.held.is_none() && seen.release_of(&hold).is_some());
        standby.sync(&mut scene);
        standby.lead(&mut scene);
        assert_eq!(standby.ask(&scene, 0..3), 0);
    }

    #[test]
    fn leader_without_deletes_to_hold_gives_an_inherited_hold_up_after_a_minute() {
        let (mut scene, _) = accident();
        let mut next = Replica::leader(&mut scene);
        scene.pass(Duration::from_secs(59));
        next.sync(&mut scene);
        assert_eq!(scene.held().companions, 30);
        scene.pass(Duration::from_secs(1));
        next.sync(&mut scene);
        assert!(scene.seen().held.is_none());
    }

    #[test]
    fn vanished_or_malformed_hold_goes_on_and_is_written_back() {
        let (mut scene, mut leader) = accident();
        leader.sync(&mut scene);
        let (hold, key) = (scene.held(), testing::keys().deletes_held.clone());
        scene.annotations.clear();
        assert_eq!(leader.sync(&mut scene).notes, [Note::Vanished(key.clone())]);
        assert_eq!(scene.held(), hold);
        for text in ["", "{", "[]", r#"{"since":"yesterday"}"#, &"x".repeat(100_000)] {
            scene.set(&key, text.to_owned());
            assert_eq!(leader.sync(&mut scene).notes, [Note::Malformed(key.clone())], "{text:.20}");
            assert_eq!(scene.held(), hold);
            leader.sync(&mut scene);
        }
        // Nor does somebody else's value count.
        scene.set(&key, to_annotation(&HeldDeletes { until: scene.now.wall, ..hold }));
        leader.sync(&mut scene);
        assert_eq!(scene.held(), hold);
        assert_eq!(leader.ask(&scene, 0..30), 30);
    }

    #[test]
    fn standby_that_saw_a_hold_takes_it_over_although_the_annotation_vanished() {
        for (lost, held) in [(true, 3), (false, 0)] {
            let (mut scene, _) = accident();
            let mut standby = Replica::standby();
            if lost {
                standby.sync(&mut scene);
            }
            scene.annotations.clear();
            standby.sync(&mut scene);
            standby.lead(&mut scene);
            assert_eq!(standby.ask(&scene, 0..3), held, "it {}", if lost { "knew" } else { "never saw it" });
        }
    }

    #[test]
    fn known_end_of_a_vanished_hold_is_its_end() {
        let (mut scene, _) = accident();
        let mut standby = Replica::standby();
        standby.sync(&mut scene);
        scene.annotations.clear();
        scene.pass(GRACE);
        standby.sync(&mut scene);
        standby.lead(&mut scene);
        assert_eq!(standby.ask(&scene, 0..3), 0);
    }

    #[test]
    fn release_requeues_the_sources_and_the_hold_is_removed_when_all_are_deleted() {
        let (mut scene, mut leader) = accident();
        scene.release();
        let update = leader.sync(&mut scene);
        assert_eq!(update.requeue.len(), 30);
        assert_eq!(update.notes, [Note::Released { by: "alice".to_owned() }]);
        // They are not held again when they fail.
        for _ in 0..2 {
            assert_eq!(leader.ask(&scene, 0..30), 0);
            scene.pass(2 * WINDOW);
        }
        assert!(scene.seen().held.is_some(), "a leader that takes over now has to know");
        assert_eq!(leader.sync(&mut scene), HoldUpdate::default());
        leader.restore(0..30);
        leader.sync(&mut scene);
        assert!(scene.seen().held.is_none());
        // The release is of no use for the next accident.
        scene.pass(Duration::from_mins(5));
        leader.ask(&scene, 0..30);
        leader.sync(&mut scene);
        assert_eq!((scene.held().companions, leader.ask(&scene, 0..30)), (30, 30));
    }

    #[test]
    fn accident_after_a_release_is_a_hold_of_its_own() {
        let (mut scene, mut leader) = accident();
        let first = scene.held();
        scene.release();
        scene.pass(Duration::from_secs(1));
        leader.sync(&mut scene);
        let key = |namespace, n: usize| ObjectKey::new(Kind::ConfigMap, namespace, &format!("t{n}"));
        for n in 0..30 {
            let totals = Totals { companions: 60, sources: 60 };
            leader.brake.ask(scene.now.instant, &key("home", n), &[key("away", n)], totals);
        }
        leader.sync(&mut scene);
        assert!(scene.held().since > first.since);
        leader.sync(&mut scene);
        assert!(leader.brake.is_holding());
    }

    #[test]
    fn release_that_a_dead_leader_did_not_carry_out_is_carried_out_by_the_next() {
        let (mut scene, _) = accident();
        scene.release();
        let mut next = Replica::leader(&mut scene);
        assert_eq!(next.ask(&scene, 0..30), 0);
        assert_eq!(next.ask(&scene, 30..60), 10, "more than were released");
        // Until the hold would have been over anyway: long after, a new accident is a new accident.
        scene.pass(GRACE);
        let mut later = Replica::leader(&mut scene);
        later.ask(&scene, 0..30);
        assert!(later.brake.is_holding());
    }

    #[test]
    fn release_right_after_a_takeover_lets_all_happen_that_is_found() {
        let (mut scene, _) = accident();
        let mut next = Replica::leader(&mut scene);
        assert_eq!(next.ask(&scene, 0..1), 1);
        scene.release();
        assert_eq!(next.sync(&mut scene).requeue.len(), 1);
        assert_eq!(next.ask(&scene, 0..30), 0);
    }

    #[test]
    fn extension_moves_the_end_for_this_leader_and_the_next() {
        let (mut scene, mut leader) = accident();
        let extension = crate::lease::hold::Extension::new(
            &scene.held(),
            Duration::from_hours(2),
            scene.now.wall,
            "alice",
        );
        scene.set(&testing::keys().deletes_extended, to_annotation(&extension));
        let end: Timestamp = "2026-11-17T21:00:00Z".parse().unwrap();
        assert_eq!(leader.sync(&mut scene).notes, [Note::Extended { by: "alice".to_owned(), until: end }]);
        assert_eq!(scene.held().until, end);
        scene.pass(GRACE + Duration::from_mins(59));
        assert_eq!(leader.ask(&scene, 0..30), 30);
        leader.sync(&mut scene);
        assert_eq!(scene.held().until, end);
        let mut next = Replica::leader(&mut scene);
        assert_eq!(next.ask(&scene, 0..30), 30);
        scene.pass(GRACE + Duration::from_mins(1));
        assert_eq!((leader.ask(&scene, 0..30), next.ask(&scene, 0..30)), (0, 0));
    }

    #[test]
    fn extension_for_years_or_of_another_hold_is_ignored() {
        let (mut scene, mut leader) = accident();
        let hold = scene.held();
        let other = HeldDeletes { since: later(hold.since, Duration::from_secs(1)), ..hold };
        for (of, time) in [(hold, MAX_HOLD + GRACE), (other, GRACE)] {
            let extension = crate::lease::hold::Extension::new(&of, time, scene.now.wall, "alice");
            scene.set(&testing::keys().deletes_extended, to_annotation(&extension));
            assert_eq!(leader.sync(&mut scene), HoldUpdate::default());
        }
    }

    #[test]
    fn hold_is_not_given_up_between_the_claim_and_the_takeover() {
        let (mut scene, _) = accident();
        let mut standby = Replica::standby();
        standby.leads = true;
        assert_eq!(standby.sync(&mut scene).notes, [Note::Noticed(scene.held())]);
        assert_eq!(standby.sync(&mut scene), HoldUpdate::default());
        standby.lead(&mut scene);
        assert_eq!(standby.ask(&scene, 0..3), 3);
    }
}
