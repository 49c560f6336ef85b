//! `/metrics`, `/healthz` and `/readyz`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use axum::{Router, http::StatusCode, response::IntoResponse, routing::get};

use super::metrics::Metrics;
use crate::world::state::Stream;

/// What has to be reached before we are ready.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Milestone {
    /// A watch has listed once.
    Listed(Stream),
    /// There is a certificate to serve with, and it is valid.
    Certificate,
    /// The webhook configurations hold the CA that signed it.
    Bundle,
    /// The webhook's port answers.
    Serving,
    /// Nobody has asked us to stop.
    Staying,
}

/// What we wait for, what has been reached, and when each watch last showed life.
#[derive(Clone)]
pub struct Pulse(Arc<Mutex<State>>);

struct State {
    missing: BTreeSet<Milestone>,
    beats: BTreeMap<Stream, Instant>,
}

impl Pulse {
    #[must_use]
    pub fn new(milestones: impl IntoIterator<Item = Milestone>) -> Self {
        let missing: BTreeSet<Milestone> = milestones.into_iter().collect();
        let watch = |milestone: &Milestone| match milestone {
            Milestone::Listed(stream) => Some((*stream, Instant::now())),
            _ => None,
        };
        let beats = missing.iter().filter_map(watch).collect();
        Self(Arc::new(Mutex::new(State { missing, beats })))
    }

    fn with<T>(&self, f: impl FnOnce(&mut State) -> T) -> T {
        f(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }

    pub fn alive(&self, stream: Stream) {
        self.with(|state| state.beats.insert(stream, Instant::now()));
    }

    pub fn reached(&self, milestone: Milestone) {
        self.with(|state| state.missing.remove(&milestone));
    }

    /// What was reached holds no more.
    pub fn lost(&self, milestone: Milestone) {
        self.with(|state| state.missing.insert(milestone));
    }

    /// What has not been reached yet.
    #[must_use]
    pub fn missing(&self) -> Vec<Milestone> {
        self.with(|state| state.missing.iter().copied().collect())
    }

    #[must_use]
    pub fn lacks(&self, milestone: Milestone) -> bool {
        self.with(|state| state.missing.contains(&milestone))
    }

    /// Waits until every watch has listed once.
    pub async fn all_listed(&self) {
        while self.missing().iter().any(|milestone| matches!(milestone, Milestone::Listed(_))) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    #[must_use]
    pub fn ages(&self) -> Vec<(Stream, Duration)> {
        self.with(|state| state.beats.iter().map(|(stream, last)| (*stream, last.elapsed())).collect())
    }
}

impl fmt::Display for Milestone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Listed(stream) => write!(f, "not yet listed: {stream}"),
            Self::Certificate => f.write_str("no valid certificate"),
            Self::Bundle => f.write_str("our CA is not in the webhook configurations"),
            Self::Staying => f.write_str("stopping"),
            Self::Serving => f.write_str("the webhook's port does not answer"),
        }
    }
}

/// `/readyz`, for every port that is asked whether we are: who answers on the guard's port serves there, too.
pub fn readyz(pulse: Pulse) -> Router {
    Router::new().route("/readyz", get(|| async move { readiness(&pulse) }))
}

/// The routes. Liveness says only that the process answers: a task that ends, ends the process.
pub fn routes(metrics: Metrics, pulse: Pulse) -> Router {
    readyz(pulse.clone()).route("/healthz", get(|| async { "ok\n" })).route(
        "/metrics",
        get(|| async move {
            for (stream, age) in pulse.ages() {
                metrics.watch_age(stream, age);
            }
            metrics.ready.set(pulse.missing().is_empty().into());
            let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            ([(axum::http::header::CONTENT_TYPE, kind)], metrics.render())
        }),
    )
}

fn readiness(pulse: &Pulse) -> impl IntoResponse + use<> {
    let missing: Vec<String> = pulse.missing().iter().map(ToString::to_string).collect();
    if missing.is_empty() {
        (StatusCode::OK, "ok\n".to_owned())
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, format!("{}\n", missing.join("\n")))
    }
}

#[cfg(test)]
mod tests {
    use axum::{
        body::{Body, to_bytes},
        http::Request,
    };
    use tower::ServiceExt;

    use super::*;

    async fn asked(router: &Router, path: &str) -> (StatusCode, String) {
        let request = Request::get(path).body(Body::empty()).unwrap();
        let answer = router.clone().oneshot(request).await.unwrap();
        let status = answer.status();
        let body = to_bytes(answer.into_body(), usize::MAX).await.unwrap();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    #[tokio::test]
    async fn the_metric_says_what_readyz_says() {
        let pulse = Pulse::new([Milestone::Serving]);
        let router = routes(Metrics::new(), pulse.clone());
        let ready = async |status: StatusCode, line: &str| {
            assert_eq!(asked(&router, "/readyz").await.0, status);
            let (_, text) = asked(&router, "/metrics").await;
            assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
        };
        ready(StatusCode::SERVICE_UNAVAILABLE, "lockstep_ready 0").await;
        pulse.reached(Milestone::Serving);
        ready(StatusCode::OK, "lockstep_ready 1").await;
        pulse.lost(Milestone::Staying);
        ready(StatusCode::SERVICE_UNAVAILABLE, "lockstep_ready 0").await;
    }
}
