//! `/metrics`, `/healthz` and `/readyz`.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    time::{Duration, Instant},
};

use axum::{
    Router,
    http::{
        HeaderMap, StatusCode,
        header::{ACCEPT, CONTENT_TYPE},
    },
    routing::get,
};
use tokio::sync::watch;

use super::{exposition::ExpositionFormat, metrics::Metrics};
use crate::clock;

const LEASE_WARNING: &str =
    "warning: this replica cannot read or write its Lease, so it cannot become the leader: see its log\n";

/// What must be true for `/readyz` to answer 200.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Condition {
    /// The watch of this name has listed once.
    Listed(&'static str),
    /// The webhook has a certificate, and it is valid.
    Certificate,
    /// The webhook configurations hold the CA that signed it.
    Bundle,
    /// The webhook's port serves requests.
    Serving,
    /// The process has not received SIGTERM or Ctrl+C.
    NotStopping,
}

/// The conditions that are not true yet, and when each watch last received anything.
#[derive(Clone)]
pub struct Readiness(watch::Sender<ReadinessState>);

struct ReadinessState {
    unmet: BTreeSet<Condition>,
    /// The last attempt to read or write the Lease failed. That has no effect on the status of `/readyz`: the webhook
    /// must not stop because the controller does.
    lease_failing: bool,
    last_received: BTreeMap<&'static str, Instant>,
}

impl Readiness {
    /// All of these are false at first; a condition that is not among them is true.
    pub fn new(conditions: impl IntoIterator<Item = Condition>) -> Self {
        let unmet: BTreeSet<Condition> = conditions.into_iter().collect();
        let watch = |condition: &Condition| match condition {
            Condition::Listed(watch) => Some((*watch, clock::now())),
            _ => None,
        };
        let last_received = unmet.iter().filter_map(watch).collect();
        Self(watch::Sender::new(ReadinessState { unmet, lease_failing: false, last_received }))
    }

    /// A watch received something from the API server.
    pub(crate) fn watch_received(&self, watch: &'static str) {
        self.0.send_modify(|state| {
            state.last_received.insert(watch, clock::now());
        });
    }

    pub(crate) fn mark_true(&self, condition: Condition) {
        self.0.send_if_modified(|state| state.unmet.remove(&condition));
    }

    pub(crate) fn mark_false(&self, condition: Condition) {
        self.0.send_if_modified(|state| state.unmet.insert(condition));
    }

    pub(crate) fn is_false(&self, condition: Condition) -> bool {
        self.0.borrow().unmet.contains(&condition)
    }

    /// The conditions that are false.
    pub fn unmet(&self) -> Vec<Condition> {
        self.0.borrow().unmet.iter().copied().collect()
    }

    pub(crate) fn set_lease_failing(&self, failing: bool) {
        self.0.send_if_modified(|state| std::mem::replace(&mut state.lease_failing, failing) != failing);
    }

    pub(crate) fn is_lease_failing(&self) -> bool {
        self.0.borrow().lease_failing
    }

    /// Waits until this holds, which changes only with what watches show.
    pub(crate) async fn watches_show(&self, holds: impl Fn() -> bool) {
        // It fails only if the sender is gone, and this is one.
        let _ = self.0.subscribe().wait_for(|_| holds()).await;
    }

    /// Waits until every watch has listed once.
    pub(crate) async fn all_listed(&self) {
        let is_listed = |condition: &Condition| !matches!(condition, Condition::Listed(_));
        let mut state = self.0.subscribe();
        // It fails only if the sender is gone, and this is one.
        let _ = state.wait_for(|state| state.unmet.iter().all(is_listed)).await;
    }

    /// How long ago each watch received anything.
    pub(crate) fn watch_ages(&self) -> Vec<(&'static str, Duration)> {
        let state = self.0.borrow();
        state.last_received.iter().map(|(watch, at)| (*watch, clock::elapsed(*at))).collect()
    }
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Listed(watch) => write!(f, "not yet listed: {watch}"),
            Self::Certificate => f.write_str("no valid certificate"),
            Self::Bundle => f.write_str("the CA is not in the webhook configurations"),
            Self::NotStopping => f.write_str("stopping"),
            Self::Serving => f.write_str("the webhook does not serve yet"),
        }
    }
}

/// `/readyz`. The webhook serves it on its own port, too: an answer there proves that the port serves.
pub fn readyz(readiness: Readiness) -> Router {
    Router::new().route("/readyz", get(|| async move { readyz_response(&readiness) }))
}

/// All routes. `/healthz` always answers 200: the process ends when one of its tasks does, so an answer is enough.
pub fn routes(metrics: Metrics, readiness: Readiness) -> Router {
    readyz(readiness.clone()).route("/healthz", get(|| async { "ok\n" })).route(
        "/metrics",
        get(|headers: HeaderMap| async move {
            for (watch, age) in readiness.watch_ages() {
                metrics.watch_age.of(watch).set(age.as_secs_f64());
            }
            metrics.ready.set(readiness.unmet().is_empty().into());
            metrics.lease_failing.set(readiness.is_lease_failing().into());
            let accept = headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok());
            let format = ExpositionFormat::accepted(accept);
            ([(CONTENT_TYPE, format.content_type())], metrics.render_as(format))
        }),
    )
}

fn readyz_response(readiness: &Readiness) -> (StatusCode, String) {
    let unmet = readiness.unmet();
    let (status, mut text) = if unmet.is_empty() {
        (StatusCode::OK, "ok\n".to_owned())
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, String::new())
    };
    for condition in unmet {
        text += &format!("{condition}\n");
    }
    if readiness.is_lease_failing() {
        text += LEASE_WARNING;
    }
    (status, text)
}

#[cfg(test)]
mod tests {
    use axum::{
        body::{Body, to_bytes},
        http::Request,
    };
    use tower::ServiceExt;

    use super::*;

    async fn get_text(router: &Router, path: &str) -> (StatusCode, String) {
        let request = Request::get(path).body(Body::empty()).unwrap();
        let answer = router.clone().oneshot(request).await.unwrap();
        let status = answer.status();
        let body = to_bytes(answer.into_body(), usize::MAX).await.unwrap();
        (status, String::from_utf8(body.to_vec()).unwrap())
    }

    #[tokio::test]
    async fn ready_metric_agrees_with_readyz() {
        let readiness = Readiness::new([Condition::Serving]);
        let router = routes(Metrics::new(), readiness.clone());
        let ready = async |status: StatusCode, line: &str| {
            assert_eq!(get_text(&router, "/readyz").await.0, status);
            let (_, text) = get_text(&router, "/metrics").await;
            assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
        };
        ready(StatusCode::SERVICE_UNAVAILABLE, "lockstep_ready 0").await;
        readiness.mark_true(Condition::Serving);
        ready(StatusCode::OK, "lockstep_ready 1").await;
        readiness.mark_false(Condition::NotStopping);
        ready(StatusCode::SERVICE_UNAVAILABLE, "lockstep_ready 0").await;
    }
}
