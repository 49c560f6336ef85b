//! Every metric, in one place. Labels come from closed sets, never from content.

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use http::StatusCode;
use prometheus_client::{
    encoding::{EncodeLabelSet, text::encode},
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::Registry,
};

use crate::{mirror::plan::Heal, world::state::Stream};

/// Cheap to clone; all clones count into the same registry.
#[derive(Clone)]
pub struct Metrics {
    registry: Arc<Registry>,
    pub queue_depth: Gauge,
    pub reconcile_seconds: Histogram,
    pub reconciles: Family<ResultLabel, Counter>,
    pub writes: Family<ActionLabel, Counter>,
    heals: Family<ReasonLabel, Counter>,
    pub conflicts: Gauge,
    pub troubles: Family<ReasonLabel, Gauge>,
    fights: Family<ManagerLabel, Counter>,
    managers: Arc<Mutex<HashSet<String>>>,
    pub sources: Gauge,
    pub companions: Gauge,
    pub deletes_held: Gauge,
    watch_age: Family<WatchLabel, Gauge<f64, std::sync::atomic::AtomicU64>>,
    watch_restarts: Family<WatchLabel, Counter>,
    api_calls: Family<CallLabel, Counter>,
    pub events_dropped: Counter,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ResultLabel {
    pub result: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ActionLabel {
    pub action: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ReasonLabel {
    pub reason: &'static str,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct ManagerLabel {
    manager: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct WatchLabel {
    watch: String,
}

#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
struct CallLabel {
    verb: &'static str,
    code: String,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    #[must_use]
    pub fn new() -> Self {
        let mut registry = Registry::with_prefix("lockstep");
        let buckets = [0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0];
        let mut metrics = Self {
            registry: Arc::default(),
            queue_depth: Gauge::default(),
            reconcile_seconds: Histogram::new(buckets),
            reconciles: Family::default(),
            writes: Family::default(),
            heals: Family::default(),
            conflicts: Gauge::default(),
            troubles: Family::default(),
            fights: Family::default(),
            managers: Arc::default(),
            sources: Gauge::default(),
            companions: Gauge::default(),
            deletes_held: Gauge::default(),
            watch_age: Family::default(),
            watch_restarts: Family::default(),
            api_calls: Family::default(),
            events_dropped: Counter::default(),
        };
        let m = &metrics;
        registry.register("queue_depth", "Sources that wait for a worker", m.queue_depth.clone());
        registry.register(
            "reconcile_duration_seconds",
            "Time from taking a source to having carried out its plan",
            m.reconcile_seconds.clone(),
        );
        registry.register("reconciles", "Looks at a source, by result", m.reconciles.clone());
        registry.register("companion_writes", "Companions written, by action", m.writes.clone());
        registry.register("heals", "Companions put right, by what had been done to them", m.heals.clone());
        registry.register(
            "conflicts",
            "Companion names held by something that is not ours",
            m.conflicts.clone(),
        );
        registry.register("troubles", "What keeps sources from having their companions", m.troubles.clone());
        registry.register("fights", "Heals put off because somebody undoes them", m.fights.clone());
        registry.register("sources", "Sources known", m.sources.clone());
        registry.register("companions", "Companions known", m.companions.clone());
        registry.register(
            "deletes_held",
            "1 while deletes are held because they look like an accident",
            m.deletes_held.clone(),
        );
        registry.register("watch_age_seconds", "Time since a watch last showed life", m.watch_age.clone());
        registry.register("watch_restarts", "Watches begun anew with a fresh list", m.watch_restarts.clone());
        registry.register("api_calls", "Calls to the API server, by verb and code", m.api_calls.clone());
        registry.register("events_dropped", "Events that could not be written", m.events_dropped.clone());
        for heal in Heal::ALL {
            drop(m.heals.get_or_create(&ReasonLabel { reason: heal.as_str() }));
        }
        metrics.registry = Arc::new(registry);
        metrics
    }

    pub fn heal(&self, heal: Heal) {
        self.heals.get_or_create(&ReasonLabel { reason: heal.as_str() }).inc();
    }

    /// Anybody can choose the name of a field manager: so many are told apart, the rest are `other`.
    pub fn fight(&self, manager: &str) {
        const TOLD_APART: usize = 50;
        let mut managers = self.managers.lock().unwrap_or_else(PoisonError::into_inner);
        let known = managers.contains(manager) || managers.len() < TOLD_APART;
        let manager = if known { manager } else { "other" }.to_owned();
        managers.insert(manager.clone());
        self.fights.get_or_create(&ManagerLabel { manager }).inc();
    }

    pub fn api_call(&self, verb: &'static str, status: Option<StatusCode>) {
        let code = status.map_or_else(|| "error".to_owned(), |status| status.as_str().to_owned());
        self.api_calls.get_or_create(&CallLabel { verb, code }).inc();
    }

    pub fn watch_age(&self, stream: Stream, age: Duration) {
        self.watch_age.get_or_create(&WatchLabel { watch: stream.to_string() }).set(age.as_secs_f64());
    }

    pub fn watch_restarted(&self, stream: Stream) {
        self.watch_restarts.get_or_create(&WatchLabel { watch: stream.to_string() }).inc();
    }

    /// The text that `/metrics` serves.
    #[must_use]
    pub fn render(&self) -> String {
        let mut text = String::new();
        match encode(&mut text, &self.registry) {
            Ok(()) => text,
            Err(std::fmt::Error) => String::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn everything_is_rendered_under_its_name() {
        let metrics = Metrics::new();
        metrics.api_call("create", Some(StatusCode::CREATED));
        metrics.heal(Heal::Deleted);
        let text = metrics.render();
        for line in [
            "lockstep_api_calls_total{verb=\"create\",code=\"201\"} 1",
            "lockstep_heals_total{reason=\"deleted\"} 1",
            "lockstep_queue_depth 0",
        ] {
            assert!(text.contains(line), "{line} in\n{text}");
        }
    }
}
