//! `/metrics`, `/healthz` and `/readyz`.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use axum::{Router, http::StatusCode, response::IntoResponse, routing::get};

use super::metrics::Metrics;
use crate::world::state::Stream;

/// The state of every watch: whether it has listed once, and when it last showed life.
#[derive(Clone)]
pub struct Pulse(Arc<Mutex<BTreeMap<Stream, Beat>>>);

#[derive(Clone, Copy)]
struct Beat {
    synced: bool,
    last: Instant,
}

impl Pulse {
    #[must_use]
    pub fn new(streams: impl IntoIterator<Item = Stream>) -> Self {
        let beat = Beat { synced: false, last: Instant::now() };
        Self(Arc::new(Mutex::new(streams.into_iter().map(|stream| (stream, beat)).collect())))
    }

    fn with<T>(&self, f: impl FnOnce(&mut BTreeMap<Stream, Beat>) -> T) -> T {
        f(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub fn alive(&self, stream: Stream) {
        self.with(|beats| {
            if let Some(beat) = beats.get_mut(&stream) {
                beat.last = Instant::now();
            }
        });
    }

    pub fn synced(&self, stream: Stream) {
        self.with(|beats| {
            if let Some(beat) = beats.get_mut(&stream) {
                beat.synced = true;
            }
        });
    }

    /// The watches that have not listed yet.
    #[must_use]
    pub fn missing(&self) -> Vec<Stream> {
        self.with(|beats| beats.iter().filter(|(_, beat)| !beat.synced).map(|(stream, _)| *stream).collect())
    }

    #[must_use]
    pub fn ages(&self) -> Vec<(Stream, Duration)> {
        self.with(|beats| beats.iter().map(|(stream, beat)| (*stream, beat.last.elapsed())).collect())
    }
}

/// The routes. Liveness says only that the process answers: a task that ends, ends the process.
pub fn routes(metrics: Metrics, pulse: Pulse) -> Router {
    let ready = pulse.clone();
    Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(|| async move { readiness(&ready) }))
        .route(
            "/metrics",
            get(|| async move {
                for (stream, age) in pulse.ages() {
                    metrics.watch_age(stream, age);
                }
                let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
                ([(axum::http::header::CONTENT_TYPE, kind)], metrics.render())
            }),
        )
}

fn readiness(pulse: &Pulse) -> impl IntoResponse + use<> {
    let missing = pulse.missing();
    if missing.is_empty() {
        (StatusCode::OK, "ok\n".to_owned())
    } else {
        let names: Vec<String> = missing.iter().map(ToString::to_string).collect();
        (StatusCode::SERVICE_UNAVAILABLE, format!("not yet listed: {}\n", names.join(", ")))
    }
}
