//! PURE. Keeps the brake's hold in the annotations of the Lease, where the next leader and people find it, and does what
//! people ask for there.
//!
//! The leader's own knowledge decides: whatever else is in `deletes-held` is overwritten. A standby knows the hold from
//! there. A hold that vanished, because somebody removed the annotation or the Lease, counts until its known end, unless a
//! release of it is recorded.

use std::{
    collections::BTreeMap,
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use k8s_openapi::jiff::Timestamp;

use super::brake::{Brake, Inherited};
use crate::{
    hold::{HeldDeletes, HoldAnnotations, MAX_HOLD, Release, later, seconds, time_left, to_annotation},
    keys::Keys,
    object::ObjectKey,
};

/// Who released a hold that ended before its time.
const BY_LOCKSTEP: &str = "lockstep: nothing was left to hold";

/// The same moment on both clocks: holds of this process are measured, those of others are known by their time.
#[derive(Debug, Clone, Copy)]
pub struct Now {
    pub instant: Instant,
    pub wall: Timestamp,
}

#[derive(Debug)]
pub struct HoldKeeper {
    keys: Arc<Keys>,
    /// Whether this replica leads and the brake has what the leader before it left.
    leads: bool,
    known: Option<KnownHold>,
    /// Annotations that could not be read: each is reported once.
    malformed: Vec<String>,
}

#[derive(Debug, Clone, Copy)]
struct KnownHold {
    hold: HeldDeletes,
    /// [`HeldDeletes::until`] by our own clock.
    until: Instant,
    /// Somebody released it, and not all of its deletes have happened.
    released: bool,
    /// The annotation has shown it.
    shown: bool,
}

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

impl HoldKeeper {
    #[must_use]
    pub const fn new(keys: Arc<Keys>) -> Self {
        Self { keys, leads: false, known: None, malformed: Vec::new() }
    }

    /// This replica becomes the leader: its brake takes over the hold that the Lease shows, or that this replica knows.
    pub fn take_over(
        &mut self,
        brake: &mut Brake,
        annotations: &BTreeMap<String, String>,
        now: Now,
    ) -> HoldUpdate {
        let mut update = self.follow(annotations, now);
        self.leads = true;
        let inherited = self.known.map(|known| match known.released {
            true => Inherited::Released(known.hold.companions),
            false => Inherited::Held(known.until),
        });
        brake.take_over(now.instant, inherited);
        update.notes.extend(self.known.map(|known| Note::TakenOver(known.hold)));
        update
    }

    /// This replica no longer leads.
    pub const fn step_down(&mut self) {
        self.leads = false;
    }

    /// Compares the brake with the annotations as last observed. `leads` is whether this replica may write.
    pub fn sync(
        &mut self,
        brake: &mut Brake,
        leads: bool,
        annotations: &BTreeMap<String, String>,
        now: Now,
    ) -> HoldUpdate {
        // Between the claim and the takeover, the brake does not have the hold yet.
        if leads && self.leads {
            return self.lead(brake, annotations, now);
        }
        let before = self.known.map(|known| known.hold.since);
        let mut update = self.follow(annotations, now);
        let new = self.known.filter(|known| Some(known.hold.since) != before);
        update.notes.extend(new.map(|known| Note::Noticed(known.hold)));
        update
    }

    /// Remembers the hold that another leader shows.
    fn follow(&mut self, annotations: &BTreeMap<String, String>, now: Now) -> HoldUpdate {
        let seen = HoldAnnotations::read(&self.keys, annotations);
        let shown = seen.held.filter(|hold| now.wall < hold.until);
        if let Some(mut hold) = shown {
            hold.until = hold.until.min(later(now.wall, MAX_HOLD));
            let released = seen.release_of(&hold).is_some();
            if self.known.is_none_or(|known| known.hold != hold || known.released != released) {
                let until = now.instant + time_left(now.wall, hold.until);
                self.known = Some(KnownHold { hold, until, released, shown: true });
            }
        }
        let ended = |known: &KnownHold| {
            // There is one hold at a time: the release of a later one means that this one is over, too.
            let released = seen.released.as_ref().is_some_and(|release| release.hold >= known.hold.since);
            known.until <= now.instant || (shown.is_none() && released)
        };
        self.known = self.known.filter(|known| !ended(known));
        let mut update = HoldUpdate::default();
        let _ = self.extended(&seen, now, &mut update);
        self.report_malformed(&seen, &mut update);
        update
    }

    /// Does what people ask for, and shows the hold in the Lease.
    fn lead(&mut self, brake: &mut Brake, annotations: &BTreeMap<String, String>, now: Now) -> HoldUpdate {
        let seen = HoldAnnotations::read(&self.keys, annotations);
        let mut update = HoldUpdate::default();
        if let Some(known) = self.known.as_mut().filter(|known| !known.released)
            && let Some(release) = seen.release_of(&known.hold)
        {
            known.released = true;
            update.requeue = brake.release(known.hold.companions);
            update.notes.push(Note::Released { by: release.by.clone() });
        }
        if let Some(until) = self.extended(&seen, now, &mut update) {
            brake.extend(until);
        }
        self.compare_with(brake, now, &mut update);
        let wanted = self.known.map(|known| to_annotation(&known.hold));
        let shown = annotations.get(&self.keys.deletes_held);
        if let Some(known) = &mut self.known {
            if known.shown && shown.is_none() {
                update.notes.push(Note::Vanished(self.keys.deletes_held.clone()));
            }
            known.shown = shown == wanted.as_ref();
        }
        if shown != wanted.as_ref() {
            update.set.push((self.keys.deletes_held.clone(), wanted));
        }
        self.report_malformed(&seen, &mut update);
        update
    }

    /// Makes the known hold that of the brake.
    fn compare_with(&mut self, brake: &Brake, now: Now, update: &mut HoldUpdate) {
        let holding = brake.holding(now.instant);
        // A takeover finds the deletes one by one: until then, their count is that of the leader before.
        let finds = brake.is_inheriting(now.instant);
        match (holding, &mut self.known) {
            (Some(holding), Some(known)) if !known.released => {
                if known.until != holding.until && !finds {
                    known.until = holding.until;
                    known.hold.until = wall_time(holding.until, now);
                }
                if !finds {
                    (known.hold.companions, known.hold.sources) = (holding.companions, holding.sources);
                }
            }
            // Others than those that were released.
            (Some(holding), known) => {
                *known = Some(KnownHold {
                    hold: HeldDeletes {
                        since: seconds(now.wall),
                        until: wall_time(holding.until, now),
                        companions: holding.companions,
                        sources: holding.sources,
                    },
                    until: holding.until,
                    released: false,
                    shown: false,
                });
            }
            (None, Some(known)) if finds || (known.released && brake.is_releasing(now.instant)) => {}
            (None, Some(known)) => {
                // Its standbys must not take it over.
                if !known.released && now.instant < known.until {
                    let release = to_annotation(&Release::new(&known.hold, now.wall, BY_LOCKSTEP));
                    update.set.push((self.keys.deletes_released.clone(), Some(release)));
                }
                self.known = None;
            }
            (None, None) => {}
        }
    }

    /// Extends the known hold if somebody asked for that, and returns its new end.
    fn extended(&mut self, seen: &HoldAnnotations, now: Now, update: &mut HoldUpdate) -> Option<Instant> {
        let known = self.known.as_mut().filter(|known| !known.released)?;
        let extension = seen.extension_of(&known.hold)?;
        // Cutting it short would move the end with the clock.
        if extension.until > later(now.wall, MAX_HOLD) {
            return None;
        }
        known.until = now.instant + time_left(now.wall, extension.until);
        known.hold.until = extension.until;
        if self.leads {
            update.notes.push(Note::Extended { by: extension.by.clone(), until: extension.until });
        }
        Some(known.until)
    }

    fn report_malformed(&mut self, seen: &HoldAnnotations, update: &mut HoldUpdate) {
        let new = seen.malformed.iter().filter(|key| !self.malformed.contains(key));
        update.notes.extend(new.cloned().map(Note::Malformed));
        self.malformed.clone_from(&seen.malformed);
    }
}

fn wall_time(at: Instant, now: Now) -> Timestamp {
    // To the nearest second.
    let left = at.saturating_duration_since(now.instant) + Duration::from_millis(500);
    seconds(later(now.wall, left))
}

impl Note {
    #[must_use]
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
        mirror::brake::Totals,
        object::{Kind, ObjectKey},
        testing,
    };

    const GRACE: Duration = Duration::from_hours(1);

    /// A replica, and a Lease that takes its changes at once.
    struct Replica {
        keeper: HoldKeeper,
        brake: Brake,
        leads: bool,
    }

    struct Scene {
        annotations: BTreeMap<String, String>,
        now: Now,
    }

    impl Scene {
        fn new() -> Self {
            let wall = "2026-11-17T18:00:00Z".parse().unwrap();
            Self { annotations: BTreeMap::new(), now: Now { instant: Instant::now(), wall } }
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
            let keeper = HoldKeeper::new(testing::keys());
            Self { keeper, brake: Brake::new(GRACE), leads: false }
        }

        fn leader(scene: &mut Scene) -> Self {
            let mut replica = Self::standby();
            replica.lead(scene);
            replica
        }

        fn lead(&mut self, scene: &mut Scene) {
            self.leads = true;
            self.keeper.take_over(&mut self.brake, &scene.annotations, scene.now);
        }

        fn sync(&mut self, scene: &mut Scene) -> HoldUpdate {
            let update = self.keeper.sync(&mut self.brake, self.leads, &scene.annotations, scene.now);
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
            let is_held = |decision: &&_| matches!(decision, super::super::brake::BrakeDecision::Hold { .. });
            decisions.iter().filter(is_held).count()
        }

        fn restore(&mut self, sources: std::ops::Range<usize>) {
            for n in sources {
                let source = ObjectKey::new(Kind::ConfigMap, "home", &format!("s{n}"));
                self.brake.forget_all_but(&source, &[]);
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
        assert_eq!(leader.ask(&scene, 0..30), 0);
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
        let key = |n: usize| ObjectKey::new(Kind::ConfigMap, "home", &format!("t{n}"));
        for n in 0..30 {
            let totals = Totals { companions: 60, sources: 60 };
            leader.brake.ask(scene.now.instant, &key(n), &[key(n)], totals);
        }
        leader.sync(&mut scene);
        assert!(scene.held().since > first.since);
        leader.sync(&mut scene);
        assert!(leader.brake.is_holding(scene.now.instant));
    }

    #[test]
    fn release_that_a_dead_leader_did_not_carry_out_is_carried_out_by_the_next() {
        let (mut scene, _) = accident();
        scene.release();
        let mut next = Replica::leader(&mut scene);
        assert_eq!(next.ask(&scene, 0..30), 0);
        // Until the hold would have been over anyway: long after, a new accident is a new accident.
        scene.pass(GRACE);
        let mut later = Replica::leader(&mut scene);
        later.ask(&scene, 0..30);
        assert!(later.brake.is_holding(scene.now.instant));
    }

    #[test]
    fn extension_moves_the_end_for_this_leader_and_the_next() {
        let (mut scene, mut leader) = accident();
        let extension =
            crate::hold::Extension::new(&scene.held(), Duration::from_hours(2), scene.now.wall, "alice");
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
            let extension = crate::hold::Extension::new(&of, time, scene.now.wall, "alice");
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
