//! All metrics. Label values come from closed sets, never from content. Only `manager` is chosen by others, and the
//! number of its values is limited.

use std::{
    borrow::Cow,
    collections::HashSet,
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

use http::StatusCode;
use parking_lot::Mutex;
use prometheus_client::{
    encoding::text::encode,
    metrics::{counter::Counter, family::Family, gauge::Gauge, histogram::Histogram},
    registry::{Metric, Registry},
};

use super::{exposition::ExpositionFormat, process::ProcessMetrics};
use crate::ops::exposition;

/// The field managers of fights beyond a maximum.
const OTHER_MANAGERS: &str = "other";

/// Cheap to clone; all clones count into the same registry.
#[derive(Clone)]
pub struct Metrics {
    registry: Arc<Registry>,
    pub queue_depth: Gauge,
    pub reconcile_seconds: Histogram,
    pub reconciles: ByLabel<Counter>,
    pub writes: ByLabel<Counter>,
    pub heals: ByLabel<Counter>,
    pub conflicts: Gauge,
    pub troubles: ByLabel<Gauge>,
    fights: ByLabel<Counter>,
    managers: Arc<Mutex<HashSet<String>>>,
    pub sources: Gauge,
    pub source_cache: Gauge,
    pub companions: Gauge,
    sources_paused: Gauge,
    companions_wanted: Gauge,
    companions_in_step: Gauge,
    pub propagation_seconds: Histogram,
    pub deletes_held: Gauge,
    pub watch_age: ByLabel<Gauge<f64, AtomicU64>>,
    pub watch_restarts: ByLabel<Counter>,
    pub undecodable_objects: ByLabel<Counter>,
    api_calls: Family<[(&'static str, String); 2], Counter>,
    pub events_dropped: Counter,
    pub events_suppressed: Counter,
    pub ready: Gauge,
    pub leader: Gauge,
    pub lease_failing: Gauge,
    pub review_seconds: Histogram,
    reviews: ByLabel<Counter>,
    denials: ByLabel<Counter>,
    access_reviews: ByLabel<Counter>,
    pub connections: Gauge,
    handshakes: ByLabel<Counter>,
    /// When the certificates in use expire, as Unix times.
    pub certificate_expiry: ByLabel<Gauge>,
    pub certificate_rotations: ByLabel<Counter>,
    pub bundle_writes: Counter,
    pub webhook_configuration_missing: ByLabel<Gauge>,
}

/// The name of a label and its value.
type Label = [(&'static str, Cow<'static, str>); 1];

/// A metric with a series for each value of one label.
#[derive(Clone)]
pub struct ByLabel<M> {
    label: &'static str,
    family: Family<Label, M>,
}

impl<M: Clone + Default> ByLabel<M> {
    /// The series of this value. It begins at zero when this is called first.
    pub fn of(&self, value: impl Into<Cow<'static, str>>) -> M {
        self.family.get_or_create_owned(&[(self.label, value.into())])
    }
}

/// What one source adds to the gauges.
#[derive(Clone, Copy, Default)]
pub(crate) struct SourceFigures {
    pub wanted: usize,
    pub in_step: usize,
    pub paused: bool,
}

/// How an admission review ended.
pub enum ReviewResult {
    Allowed,
    /// The stamped defaults of a source were changed.
    Stamped,
    Denied(&'static str),
    /// The request was not an admission review, or there were too many at a time.
    Rejected,
}

/// What a certificate is for.
#[derive(Clone, Copy)]
pub enum CertificateRole {
    Ca,
    Leaf,
}

impl From<CertificateRole> for Cow<'static, str> {
    fn from(role: CertificateRole) -> Self {
        match role {
            CertificateRole::Ca => "ca",
            CertificateRole::Leaf => "leaf",
        }
        .into()
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    pub fn new() -> Self {
        let mut registry = Registry::default();
        // The names of these are the same for every program.
        registry.register_collector(Box::new(ProcessMetrics));
        let r = registry.sub_registry_with_prefix("lockstep");
        let build: ByLabel<Gauge> = by(r, "version", "build_info", "1, with the version as a label");
        build.of(env!("LOCKSTEP_VERSION")).set(1);
        let metrics = Self {
            queue_depth: add(r, "queue_depth", "Sources that wait for a worker"),
            reconcile_seconds: duration(
                r,
                "reconcile_duration_seconds",
                "Time from taking a source from the queue until its plan is carried out",
            ),
            reconciles: by(r, "result", "reconciles", "Reconciles of a source, by result"),
            writes: by(r, "action", "companion_writes", "Companions written, by action"),
            heals: by(r, "reason", "heals", "Companions healed, by what had been changed"),
            conflicts: add(
                r,
                "conflicts",
                "Companions that cannot be written because another object or another source has their name",
            ),
            troubles: by(r, "reason", "troubles", "Reasons for which sources do not have their companions"),
            fights: by(
                r,
                "manager",
                "fights",
                "Heals that were delayed because another field manager overwrites them",
            ),
            managers: Arc::default(),
            sources: add(r, "sources", "Sources"),
            source_cache: add(r, "source_cache_bytes", "Content of sources that is kept in memory"),
            companions: add(r, "companions", "Companions"),
            sources_paused: add(r, "sources_paused", "Sources with the annotation paused"),
            companions_wanted: add(
                r,
                "companions_wanted",
                "Companions that sources ask for, in namespaces that take them",
            ),
            companions_in_step: add(
                r,
                "companions_in_step",
                "Companions that sources ask for and that have what the source has",
            ),
            propagation_seconds: histogram(
                r,
                "propagation_duration_seconds",
                "Time from seeing a change until a companion that follows it was written",
                [0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0],
            ),
            deletes_held: add(
                r,
                "deletes_held",
                "1 while deletes are held because they look like an accident",
            ),
            watch_age: by(r, "watch", "watch_age_seconds", "Time since a watch last received anything"),
            watch_restarts: by(r, "watch", "watch_restarts", "Watches started or restarted with a list"),
            undecodable_objects: by(
                r,
                "watch",
                "undecodable_objects",
                "Objects that a watch showed and that were ignored because they cannot be decoded",
            ),
            api_calls: add(r, "api_calls", "Calls to the API server, by verb and code"),
            events_dropped: add(r, "events_dropped", "Events that could not be written"),
            events_suppressed: add(
                r,
                "events_suppressed",
                "Events that were not written because their namespace had too many",
            ),
            ready: add(r, "ready", "1 while /readyz answers 200"),
            leader: add(r, "leader", "1 while this replica is the leader"),
            lease_failing: add(r, "lease_failing", "1 while this replica cannot read or write the Lease"),
            review_seconds: duration(
                r,
                "review_duration_seconds",
                "Time from the first byte of a review to its response",
            ),
            reviews: by(r, "verdict", "reviews", "Admission reviews, by verdict"),
            denials: by(r, "reason", "denials", "Requests refused by the webhook, by reason"),
            access_reviews: by(r, "result", "access_reviews", "SubjectAccessReviews, by result"),
            connections: add(r, "webhook_connections", "Open connections to the webhook"),
            handshakes: by(r, "result", "webhook_handshakes", "TLS handshakes of the webhook, by result"),
            certificate_expiry: by(
                r,
                "certificate",
                "certificate_expiry_timestamp_seconds",
                "When a certificate expires",
            ),
            certificate_rotations: by(
                r,
                "certificate",
                "certificate_rotations",
                "Certificates replaced by this replica",
            ),
            bundle_writes: add(r, "bundle_writes", "Writes of the CA to webhook configurations"),
            webhook_configuration_missing: by(
                r,
                "kind",
                "webhook_configuration_missing",
                "1 while a webhook configuration does not exist",
            ),
            registry: Arc::new(registry),
        };
        // Series with known labels start at zero, so that `increase()` sees the first count.
        for verdict in ["allowed", "stamped", "denied", "rejected"] {
            metrics.reviews.of(verdict);
        }
        metrics.denials.of("unanswered");
        metrics.fights.of(OTHER_MANAGERS);
        for result in ["allowed", "denied"] {
            metrics.access_reviews.of(result);
        }
        for role in [CertificateRole::Ca, CertificateRole::Leaf] {
            metrics.certificate_rotations.of(role);
        }
        for result in ["done", "failed"] {
            metrics.handshakes.of(result);
        }
        metrics
    }

    /// Anybody can choose the name of a field manager, so all beyond a maximum count as `other`.
    pub fn fight(&self, manager: &str) {
        const MAX_MANAGERS: usize = 50;
        let mut managers = self.managers.lock();
        let known = managers.contains(manager) || managers.len() < MAX_MANAGERS;
        let manager = if known { manager } else { OTHER_MANAGERS }.to_owned();
        managers.insert(manager.clone());
        self.fights.of(manager).inc();
    }

    /// A reconcile has ended with this result.
    pub fn reconciled(&self, result: &'static str, took: Duration) {
        self.reconciles.of(result).inc();
        self.reconcile_seconds.observe(took.as_secs_f64());
    }

    /// A source adds other figures than before.
    pub(crate) fn source_figures(&self, before: SourceFigures, now: SourceFigures) {
        let change = |gauge: &Gauge, before: usize, now: usize| {
            let signed = |count: usize| i64::try_from(count).unwrap_or(i64::MAX);
            gauge.inc_by(signed(now) - signed(before));
        };
        change(&self.companions_wanted, before.wanted, now.wanted);
        change(&self.companions_in_step, before.in_step, now.in_step);
        change(&self.sources_paused, before.paused.into(), now.paused.into());
    }

    pub fn review(&self, result: ReviewResult) {
        let (verdict, denial) = match result {
            ReviewResult::Allowed => ("allowed", None),
            ReviewResult::Stamped => ("stamped", None),
            ReviewResult::Denied(reason) => ("denied", Some(reason)),
            ReviewResult::Rejected => ("rejected", None),
        };
        self.reviews.of(verdict).inc();
        if let Some(reason) = denial {
            self.denials.of(reason).inc();
        }
    }

    pub(crate) fn access_review(&self, allowed: bool) {
        self.access_reviews.of(if allowed { "allowed" } else { "denied" }).inc();
    }

    pub fn handshake(&self, done: bool) {
        self.handshakes.of(if done { "done" } else { "failed" }).inc();
    }

    pub(crate) fn api_call(&self, verb: &'static str, status: Option<StatusCode>) {
        let code = status.map_or_else(|| "error".to_owned(), |status| status.as_str().to_owned());
        self.api_calls.get_or_create(&[("verb", verb.to_owned()), ("code", code)]).inc();
    }

    /// The response body of `/metrics` for clients that ask for no other format.
    pub fn render(&self) -> String {
        self.render_as(ExpositionFormat::Text)
    }

    /// The response body of `/metrics` in this format.
    pub(crate) fn render_as(&self, format: ExpositionFormat) -> String {
        let mut text = String::new();
        // Writing to a string cannot fail.
        let _ = encode(&mut text, &self.registry);
        match format {
            ExpositionFormat::OpenMetrics => text,
            ExpositionFormat::Text => exposition::as_plain_text(&text),
        }
    }
}

/// Creates and registers a metric.
fn add<M: Metric + Clone + Default>(registry: &mut Registry, name: &str, help: &str) -> M {
    let metric = M::default();
    registry.register(name, help, metric.clone());
    metric
}

/// As [`add`], with a label.
fn by<M>(registry: &mut Registry, label: &'static str, name: &str, help: &str) -> ByLabel<M>
where
    Family<Label, M>: Metric + Default,
{
    ByLabel { label, family: add(registry, name, help) }
}

/// As [`add`], for durations in seconds.
fn duration(registry: &mut Registry, name: &str, help: &str) -> Histogram {
    histogram(registry, name, help, [0.0001, 0.0005, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0])
}

fn histogram<const N: usize>(registry: &mut Registry, name: &str, help: &str, bounds: [f64; N]) -> Histogram {
    let metric = Histogram::new(bounds);
    registry.register(name, help, metric.clone());
    metric
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn page_of_the_cli_reads_metrics_as_they_are_rendered() {
        let metrics = Metrics::new();
        metrics.review(ReviewResult::Denied("edit"));
        metrics.leader.set(1);
        metrics.certificate_expiry.of(CertificateRole::Leaf).set(1_900_000_000);
        let text = metrics.render();
        for line in include_str!("../../crates/cli/src/ui/testing/replica_metrics.txt").lines() {
            assert!(text.lines().any(|rendered| rendered == line), "{line}: {text}");
        }
    }

    #[test]
    fn metrics_are_rendered_with_their_prefix_and_labels() {
        let metrics = Metrics::new();
        metrics.api_call("create", Some(StatusCode::CREATED));
        metrics.heals.of("deleted").inc();
        metrics.certificate_expiry.of(CertificateRole::Ca).set(1_700_000_000);
        metrics.certificate_rotations.of(CertificateRole::Leaf).inc();
        metrics.bundle_writes.inc();
        metrics
            .source_figures(SourceFigures::default(), SourceFigures { wanted: 3, in_step: 2, paused: true });
        let text = metrics.render();
        for line in [
            concat!("lockstep_build_info{version=\"", env!("LOCKSTEP_VERSION"), "\"} 1"),
            "lockstep_companions_wanted 3",
            "lockstep_companions_in_step 2",
            "lockstep_sources_paused 1",
            "lockstep_fights_total{manager=\"other\"} 0",
            "lockstep_api_calls_total{verb=\"create\",code=\"201\"} 1",
            "lockstep_heals_total{reason=\"deleted\"} 1",
            "lockstep_queue_depth 0",
            "lockstep_certificate_expiry_timestamp_seconds{certificate=\"ca\"} 1700000000",
            "lockstep_certificate_rotations_total{certificate=\"leaf\"} 1",
            "lockstep_bundle_writes_total 1",
        ] {
            assert!(text.contains(line), "{line} in\n{text}");
        }
    }
}
