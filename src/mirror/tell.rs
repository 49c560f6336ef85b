//! What people see of a pass: log lines, counters, gauges and Events. Names of keys, never values.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use super::{
    carry::{Deed, Done},
    events::Story,
    ledger::Ledger,
    pass::{Inner, Pass},
};
use crate::{
    object::ObjectKey,
    ops::metrics::{ActionLabel, ReasonLabel},
    plan::Trouble,
    world::state::Source,
};

/// A trouble that stays is told again before its Event is forgotten (an hour).
pub const TELL_AGAIN: Duration = Duration::from_secs(1800);

impl Inner {
    /// One log line and the counters for a write.
    pub(super) fn record(
        &self,
        key: &ObjectKey,
        source: Option<&Source>,
        companion: &ObjectKey,
        done: &Done,
    ) {
        let kind = companion.kind.as_str();
        let keys = source.and_then(|source| source.wish.as_ref().ok()).map_or("", |wish| &wish.key_names);
        let source = key;
        match done.deed {
            Deed::Created => tracing::info!(kind, %source, %companion, keys, "companion created"),
            Deed::Updated => tracing::info!(kind, %source, %companion, keys, "companion updated"),
            Deed::Adopted => tracing::info!(kind, %source, %companion, keys, "companion adopted"),
            Deed::Healed(heal) => {
                let reason = heal.as_str();
                let by = done.manager.as_deref().unwrap_or_default();
                tracing::info!(kind, %source, %companion, keys, reason, by, "companion healed");
                self.metrics.heals.get_or_create(&ReasonLabel { reason: heal.as_str() }).inc();
            }
            Deed::Deleted(why) => {
                tracing::info!(kind, %source, %companion, reason = why.as_str(), "companion deleted")
            }
        }
        self.metrics.writes.get_or_create(&ActionLabel { action: done.deed.as_str() }).inc();
    }

    /// One Normal Event for all that a pass did.
    pub(super) fn tell_deeds(&self, pass: &Pass, deeds: &BTreeMap<Deed, Vec<String>>) {
        if deeds.is_empty() {
            return;
        }
        let parts = deeds.iter().map(|(deed, places)| {
            const SHOWN: usize = 5;
            let shown = places.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
            let more = places.len().saturating_sub(SHOWN);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            format!("{} {}: {shown}{more}", deed.as_str(), places.len())
        });
        let reason = match deeds.keys().next_back() {
            Some(Deed::Deleted(_)) if deeds.len() == 1 => "Removed",
            Some(Deed::Healed(_)) => "Healed",
            _ => "Mirrored",
        };
        self.teller.tell(Story {
            source: pass.key.clone(),
            uid: pass.ledger.uid.clone(),
            warning: false,
            reason,
            note: parts.collect::<Vec<_>>().join("; "),
        });
    }

    /// A Warning Event and a log line for each trouble that is new, or has lasted; gauges for all.
    pub(super) fn tell_troubles(&self, pass: &mut Pass, troubles: Vec<Trouble>, now: Instant) {
        self.ungauge(&pass.ledger);
        let told = std::mem::take(&mut pass.ledger.troubles);
        for trouble in troubles {
            self.gauge(&trouble, 1);
            let before = told.iter().find(|(known, _)| known.is_same_as(&trouble)).map(|(_, when)| *when);
            let when = match before {
                Some(when) if now.saturating_duration_since(when) < TELL_AGAIN => when,
                _ => {
                    let reason = trouble.label();
                    tracing::warn!(kind = pass.key.kind.as_str(), source = %pass.key, reason, "{trouble}");
                    self.teller.tell(Story {
                        source: pass.key.clone(),
                        uid: pass.ledger.uid.clone(),
                        warning: true,
                        reason: trouble.event_reason(),
                        note: trouble.to_string(),
                    });
                    now
                }
            };
            pass.ledger.troubles.push((trouble, when));
        }
    }

    /// What a ledger tells counts no more.
    pub(super) fn ungauge(&self, ledger: &Ledger) {
        ledger.troubles.iter().for_each(|(trouble, _)| self.gauge(trouble, -1));
    }

    pub(super) fn gauge(&self, trouble: &Trouble, by: i64) {
        let reason = trouble.label();
        self.metrics.troubles.get_or_create(&ReasonLabel { reason }).inc_by(by);
        if matches!(trouble, Trouble::Conflict { .. }) {
            self.metrics.conflicts.inc_by(by);
        }
    }
}
