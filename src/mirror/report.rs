//! What people see of the mirror's work: log lines, counters, gauges and Events. Names of keys, never values.

use std::{
    collections::{BTreeMap, HashMap},
    time::{Duration, Instant},
};

use super::{
    apply::{Applied, Done},
    events::{EventRecorder, NewEvent},
};
use crate::{
    object::ObjectKey,
    ops::metrics::{ActionLabel, Metrics, ReasonLabel},
    plan::Trouble,
};

/// A trouble that lasts gets a new Event before the API server deletes the old one (after an hour).
pub const REPEAT_AFTER: Duration = Duration::from_secs(1800);
/// A summary names so many companions of each kind.
const MAX_NAMED: usize = 5;

/// The source that a report is about.
#[derive(Debug, Clone, Copy)]
pub struct About<'a> {
    pub key: &'a ObjectKey,
    pub uid: &'a str,
}

/// The troubles of one source that were reported, by identity, and when.
#[derive(Debug, Default)]
pub struct Reported(HashMap<Trouble, Instant>);

/// What one reconcile has written so far: how many companions, and the first of them by name.
#[derive(Debug, Default)]
pub struct Summary(BTreeMap<Applied, (usize, Vec<String>)>);

pub struct Reporter {
    recorder: EventRecorder,
    metrics: Metrics,
}

impl Reporter {
    #[must_use]
    pub const fn new(recorder: EventRecorder, metrics: Metrics) -> Self {
        Self { recorder, metrics }
    }

    /// One log line and the counters for a write. `keys` are the names of the source's keys.
    pub fn applied(&self, source: &ObjectKey, keys: &str, companion: &ObjectKey, done: &Done) {
        let kind = companion.kind.as_str();
        match done.applied {
            Applied::Created => tracing::info!(kind, %source, %companion, keys, "companion created"),
            Applied::Updated => tracing::info!(kind, %source, %companion, keys, "companion updated"),
            Applied::Adopted => tracing::info!(kind, %source, %companion, keys, "companion adopted"),
            Applied::Healed(heal) => {
                let reason = heal.as_str();
                let by = done.manager.as_deref().unwrap_or_default();
                tracing::info!(kind, %source, %companion, keys, reason, by, "companion healed");
                self.metrics.heals.get_or_create(&ReasonLabel { reason }).inc();
            }
            Applied::Deleted(reason) => {
                tracing::info!(kind, %source, %companion, reason = reason.as_str(), "companion deleted");
            }
        }
        self.metrics.writes.get_or_create(&ActionLabel { action: done.applied.as_str() }).inc();
    }

    /// Another tool keeps undoing a companion.
    pub fn fight(&self, manager: Option<&str>) {
        self.metrics.fight(manager.unwrap_or_default());
    }

    /// One Normal Event for all writes of a reconcile.
    pub fn summary(&self, about: About<'_>, summary: &Summary) {
        if summary.is_empty() {
            return;
        }
        let (reason, note) = (summary.event_reason(), summary.to_string());
        self.recorder.record(about.event(false, reason, note));
    }

    /// Reports the troubles of a source: those that are new or have lasted get a Warning Event and a log line, and those
    /// that no longer exist are removed from the gauges.
    pub fn troubles(
        &self,
        about: About<'_>,
        reported: &mut Reported,
        troubles: impl IntoIterator<Item = Trouble>,
        now: Instant,
    ) {
        let mut before = std::mem::take(&mut reported.0);
        for trouble in troubles {
            let identity = trouble.identity();
            if let Some(when) = before.remove(&identity) {
                reported.0.insert(identity, when);
            }
            self.trouble(about, reported, &trouble, now);
        }
        before.into_keys().for_each(|trouble| self.count(&trouble, -1));
    }

    /// Reports one more trouble of a source.
    pub fn trouble(&self, about: About<'_>, reported: &mut Reported, trouble: &Trouble, now: Instant) {
        let identity = trouble.identity();
        let before = reported.0.get(&identity).copied();
        if before.is_some_and(|when| now.saturating_duration_since(when) < REPEAT_AFTER) {
            return;
        }
        if before.is_none() {
            self.count(&identity, 1);
        }
        reported.0.insert(identity, now);
        let (kind, source, reason) = (about.key.kind.as_str(), about.key, trouble.label());
        tracing::warn!(kind, %source, reason, "{trouble}");
        self.recorder.record(about.event(true, trouble.event_reason(), trouble.to_string()));
    }

    /// Takes the troubles of a source out of the gauges: this replica no longer reports them.
    pub fn withdraw(&self, reported: &mut Reported) {
        reported.0.drain().for_each(|(trouble, _)| self.count(&trouble, -1));
    }

    fn count(&self, trouble: &Trouble, by: i64) {
        let reason = trouble.label();
        self.metrics.troubles.get_or_create(&ReasonLabel { reason }).inc_by(by);
        if matches!(trouble, Trouble::Conflict { .. }) {
            self.metrics.conflicts.inc_by(by);
        }
    }
}

impl About<'_> {
    fn event(&self, warning: bool, reason: &'static str, note: String) -> NewEvent {
        NewEvent { source: self.key.clone(), uid: self.uid.to_owned(), warning, reason, note }
    }
}

impl Reported {
    #[must_use]
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
            (Applied::Deleted(reason), _) => format!("{at} ({})", reason.as_str()),
            _ => at.to_string(),
        });
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn event_reason(&self) -> &'static str {
        match self.0.keys().next_back() {
            Some(Applied::Deleted(_)) if self.0.len() == 1 => "Removed",
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
