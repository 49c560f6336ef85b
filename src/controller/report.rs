//! What people see of the controller's work: log lines, counters, gauges and Events. Names of keys, never values.

use std::{
    collections::BTreeMap,
    hash::{DefaultHasher, Hash, Hasher},
    time::{Duration, Instant},
};

use super::events::{EventRecorder, NewEvent};
use crate::ops::metrics::Metrics;
use lockstep_core::{
    object::ObjectKey,
    plan::Trouble,
    text,
    writes::companion_write::{Applied, Done},
};

/// A trouble that lasts gets a new Event before the API server deletes the old one (after an hour).
pub const REPEAT_AFTER: Duration = Duration::from_secs(1800);
/// Troubles that affect other places than those reported get a new Event after this time.
const CHANGES_REPEAT_AFTER: Duration = Duration::from_secs(60);
/// A summary names so many companions of each kind.
const MAX_NAMED: usize = 5;
/// A report of troubles in several places names so many of them.
const MAX_NAMED_PLACES: usize = 3;
/// The maximum length of a text about troubles. Three names alone may have 950 characters.
const MAX_TEXT_CHARS: usize = 2000;
/// The label of conflicts, which have a gauge of their own.
const CONFLICT: &str = "conflict";

/// The source that a report is about.
#[derive(Clone, Copy)]
pub struct About<'a> {
    pub key: &'a ObjectKey,
    pub uid: &'a str,
}

/// The troubles of one source that were reported, by label.
#[derive(Default)]
pub struct Reported(BTreeMap<&'static str, ReportedTroubles>);

/// Troubles with the same label, which were reported together.
struct ReportedTroubles {
    count: i64,
    /// The sum of the hashes of their identities: it changes when other places are affected.
    identity: u64,
    when: Instant,
}

/// Troubles with the same label, to be reported together.
struct Group<'a>(Vec<&'a Trouble>);

/// What one reconcile has written so far: how many companions, and the first of them by name.
#[derive(Default)]
pub struct Summary(BTreeMap<Applied, (usize, Vec<String>)>);

pub struct Reporter {
    recorder: EventRecorder,
    metrics: Metrics,
}

impl Reporter {
    pub const fn new(recorder: EventRecorder, metrics: Metrics) -> Self {
        Self { recorder, metrics }
    }

    /// One log line and the counters for a write. `keys` are the names of the source's keys.
    pub fn applied(&self, source: &ObjectKey, keys: &str, companion: &ObjectKey, done: &Done) {
        let (keys, reason, by) = match done.applied {
            Applied::Created | Applied::Updated | Applied::Adopted => (Some(keys), None, None),
            Applied::Healed(heal) => {
                self.metrics.heals.of(heal.as_str()).inc();
                (Some(keys), Some(heal.as_str()), Some(done.manager.as_deref().unwrap_or_default()))
            }
            Applied::Deleted(reason) | Applied::Released(reason) => (None, Some(reason.as_str()), None),
        };
        let kind = companion.kind.as_str();
        let action = done.applied.as_str();
        tracing::info!(kind, %source, %companion, keys, reason, by, "companion {action}");
        self.metrics.writes.of(action).inc();
    }

    /// One Normal Event for all writes of a reconcile.
    pub fn summary(&self, about: About<'_>, summary: &Summary) {
        if !summary.is_empty() {
            self.recorder.record(about.event(false, summary.event_reason(), summary.to_string()));
        }
    }

    /// Reports the troubles of a source. Those with the same label get one Warning Event and one log line when they
    /// begin, when they have lasted, and when other places are affected, but that not too often. Those that no longer
    /// exist are removed from the gauges.
    pub fn troubles(&self, about: About<'_>, reported: &mut Reported, troubles: &[Trouble], now: Instant) {
        let mut before = std::mem::take(&mut reported.0);
        for (label, group) in Group::all(troubles) {
            let known = before.remove(label);
            let count = group.count();
            let identity = group.identity();
            self.count(label, count - known.as_ref().map_or(0, |known| known.count));
            let pause = match &known {
                None => Duration::ZERO,
                Some(known) if known.identity == identity => REPEAT_AFTER,
                Some(_) if group.is_about_places() => CHANGES_REPEAT_AFTER,
                Some(_) => Duration::ZERO,
            };
            let (identity, when) = match known {
                Some(known) if now.saturating_duration_since(known.when) < pause => {
                    (known.identity, known.when)
                }
                _ => {
                    self.report(about, label, &group);
                    (identity, now)
                }
            };
            reported.0.insert(label, ReportedTroubles { count, identity, when });
        }
        before.into_iter().for_each(|(label, gone)| self.count(label, -gone.count));
    }

    fn report(&self, about: About<'_>, label: &str, group: &Group<'_>) {
        let Some(first) = group.0.first() else { return };
        let text = group.text();
        tracing::warn!(kind = about.key.kind.as_str(), source = %about.key, reason = label, "{text}");
        self.recorder.record(about.event(true, first.event_reason(), text));
    }

    /// Takes the troubles of a source out of the gauges: this replica no longer reports them.
    pub fn withdraw(&self, reported: &mut Reported) {
        std::mem::take(&mut reported.0)
            .into_iter()
            .for_each(|(label, known)| self.count(label, -known.count));
    }

    fn count(&self, label: &'static str, by: i64) {
        self.metrics.troubles.of(label).inc_by(by);
        if label == CONFLICT {
            self.metrics.conflicts.inc_by(by);
        }
    }
}

impl<'a> Group<'a> {
    fn all(troubles: &'a [Trouble]) -> BTreeMap<&'static str, Self> {
        let mut groups = BTreeMap::new();
        for trouble in troubles {
            groups.entry(trouble.label()).or_insert_with(|| Self(Vec::new())).0.push(trouble);
        }
        groups
    }

    fn count(&self) -> i64 {
        self.0.len().try_into().unwrap_or(i64::MAX)
    }

    fn identity(&self) -> u64 {
        let hash = |trouble: &&Trouble| {
            let mut hasher = DefaultHasher::new();
            trouble.identity().hash(&mut hasher);
            hasher.finish()
        };
        self.0.iter().map(hash).fold(0, u64::wrapping_add)
    }

    fn is_about_places(&self) -> bool {
        self.0.first().is_some_and(|first| first.place().is_some())
    }

    /// `12 places: a/x, b/x, c/x and 9 more. a/x: the name is held by …`
    fn text(&self) -> String {
        let mut troubles = self.0.clone();
        troubles.sort_by_cached_key(|trouble| trouble.place());
        let places: Vec<String> = troubles.iter().filter_map(|trouble| trouble.place()).collect();
        let text = match (&*troubles, places.len()) {
            ([first, ..], count @ 2..) => {
                format!("{count} places: {}. {first}", text::some_of(&places, MAX_NAMED_PLACES, ", "))
            }
            (all, _) => all.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "),
        };
        text::shorten(&text, MAX_TEXT_CHARS)
    }
}

impl About<'_> {
    fn event(&self, warning: bool, reason: &'static str, note: String) -> NewEvent {
        NewEvent { source: self.key.clone(), uid: self.uid.to_owned(), warning, reason, note }
    }
}

impl Reported {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Summary {
    pub fn add(&mut self, at: &ObjectKey, done: &Done) {
        let (count, names) = self.0.entry(done.applied).or_default();
        *count += 1;
        if names.len() == MAX_NAMED {
            return;
        }
        names.push(match (done.applied, &done.manager) {
            (Applied::Healed(heal), Some(manager)) => format!("{at} ({}, by {manager})", heal.as_str()),
            (Applied::Healed(heal), None) => format!("{at} ({})", heal.as_str()),
            (Applied::Deleted(reason) | Applied::Released(reason), _) => {
                format!("{at} ({})", reason.as_str())
            }
            _ => at.to_string(),
        });
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn event_reason(&self) -> &'static str {
        let is_removal = |applied: &Applied| matches!(applied, Applied::Deleted(_) | Applied::Released(_));
        match self.0.keys().next_back() {
            _ if self.0.keys().all(is_removal) => "Removed",
            Some(Applied::Healed(_)) => "Healed",
            _ => "Mirrored",
        }
    }
}

/// `created 7: a/x, b/x, c/x, d/x, e/x and 2 more; updated 1: f/x`
impl std::fmt::Display for Summary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (n, (applied, (count, names))) in self.0.iter().enumerate() {
            let separator = if n == 0 { "" } else { "; " };
            write!(f, "{separator}{} {count}: {}", applied.as_str(), names.join(", "))?;
            if *count > names.len() {
                write!(f, " and {} more", count - names.len())?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::captured_logs::CapturedLogs;
    use lockstep_cluster::testing::api::api_server;
    use lockstep_core::{
        object::Kind,
        plan::{DeleteReason, Heal, Holder},
        policy::Fault,
        testing::{self, configmap},
    };

    fn reporter() -> (Reporter, Metrics) {
        let (metrics, silent) = (Metrics::new(), api_server(|_| std::future::pending()));
        let (recorder, _) = EventRecorder::new(silent, &testing::keys(), metrics.clone());
        (Reporter::new(recorder, metrics.clone()), metrics)
    }

    fn conflicts(places: std::ops::Range<usize>) -> Vec<Trouble> {
        let conflict =
            |n| Trouble::Conflict { at: configmap(&format!("n{n:03}"), "x"), holder: Holder::Foreign };
        places.map(conflict).collect()
    }

    /// The log lines that a report causes.
    fn reported_lines(
        reported: &mut Reported,
        reporter: &Reporter,
        troubles: &[Trouble],
        now: Instant,
    ) -> Vec<String> {
        let (captured, key) = (CapturedLogs::default(), ObjectKey::new(Kind::ConfigMap, "home", "colors"));
        let capturing = captured.start("info");
        reporter.troubles(About { key: &key, uid: "u" }, reported, troubles, now);
        drop(capturing);
        captured.text().lines().map(str::to_owned).collect()
    }

    #[tokio::test]
    async fn troubles_with_the_same_label_are_reported_together_once_and_counted_by_place() {
        let ((reporter, metrics), mut reported, now) = (reporter(), Reported::default(), Instant::now());
        let lines = reported_lines(&mut reported, &reporter, &conflicts(0..12), now);
        assert_eq!(lines.len(), 1, "{lines:?}");
        assert!(
            lines[0].contains("12 places: n000/x, n001/x, n002/x and 9 more. n000/x: the name"),
            "{lines:?}"
        );
        assert_eq!(metrics.conflicts.get(), 12);

        // Other places are affected: that is reported, but not at once.
        assert!(reported_lines(&mut reported, &reporter, &conflicts(0..20), now).is_empty());
        assert_eq!(metrics.conflicts.get(), 20);
        let later = now + CHANGES_REPEAT_AFTER;
        assert!(
            reported_lines(&mut reported, &reporter, &conflicts(0..20), later)[0].contains("20 places: ")
        );
        assert!(
            reported_lines(&mut reported, &reporter, &conflicts(0..20), later + CHANGES_REPEAT_AFTER)
                .is_empty()
        );
        assert_eq!(
            reported_lines(&mut reported, &reporter, &conflicts(0..20), later + REPEAT_AFTER).len(),
            1
        );

        assert!(reported_lines(&mut reported, &reporter, &[], later).is_empty());
        assert_eq!((metrics.conflicts.get(), reported.is_empty()), (0, true));
    }

    #[test]
    fn event_of_a_reconcile_that_only_removes_is_removed() {
        let gone = DeleteReason::SourceGone;
        let summary = |all: &[Applied]| {
            let mut summary = Summary::default();
            for (applied, n) in all.iter().zip(0..) {
                let done = Done { applied: *applied, manager: None };
                summary.add(&configmap(&format!("n{n}"), "x"), &done);
            }
            (summary.event_reason(), summary.to_string())
        };
        let (released, deleted) = (Applied::Released(gone), Applied::Deleted(gone));
        let text = "released 2: n0/x (source gone), n1/x (source gone)".to_owned();
        assert_eq!(summary(&[released, released]), ("Removed", text));
        assert_eq!(summary(&[released, deleted]).0, "Removed");
        assert_eq!(summary(&[Applied::Created, released]).0, "Mirrored");
        assert_eq!(summary(&[Applied::Created, Applied::Healed(Heal::Label)]).0, "Healed");
    }

    #[tokio::test]
    async fn another_fault_is_reported_at_once() {
        let ((reporter, _), mut reported, now) = (reporter(), Reported::default(), Instant::now());
        let fault = |key: &str| [Trouble::Fault(Fault::OwnName { key: key.to_owned() })];
        for key in ["a", "b"] {
            assert_eq!(reported_lines(&mut reported, &reporter, &fault(key), now).len(), 1);
            assert!(reported_lines(&mut reported, &reporter, &fault(key), now).is_empty());
        }
    }

    #[tokio::test]
    async fn troubles_without_a_place_are_all_named() {
        let ((reporter, _), mut reported, now) = (reporter(), Reported::default(), Instant::now());
        let no_match = |pattern: &str| Trouble::NoMatch { pattern: pattern.to_owned(), consent: false };
        let lines = reported_lines(&mut reported, &reporter, &[no_match("x-*"), no_match("y-*")], now);
        assert!(lines[0].contains("`x-*` matches no namespace; `y-*` matches no namespace"), "{lines:?}");
    }

    #[test]
    fn text_about_many_troubles_without_a_place_is_short() {
        let no_match = |n| Trouble::NoMatch { pattern: format!("{n}{}*", "x".repeat(50)), consent: false };
        let troubles: Vec<Trouble> = (100..200).map(no_match).collect();
        for group in Group::all(&troubles).into_values() {
            assert_eq!(group.text().chars().count(), MAX_TEXT_CHARS + 1, "cut, with an ellipsis");
        }
    }

    #[tokio::test]
    async fn quota_whose_numbers_change_is_reported_once() {
        let ((reporter, _), mut reported, now) = (reporter(), Reported::default(), Instant::now());
        let at = configmap("away", "x");
        let refused = |used: u32| [Trouble::Forbidden { at: at.clone(), detail: format!("used: {used}") }];
        assert_eq!(reported_lines(&mut reported, &reporter, &refused(0), now).len(), 1);
        assert!(reported_lines(&mut reported, &reporter, &refused(1), now + CHANGES_REPEAT_AFTER).is_empty());
    }
}
