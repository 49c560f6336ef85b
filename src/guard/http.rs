//! HTTP: AdmissionReviews in, verdicts out, within limits.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use axum::{
    Router,
    body::Body,
    extract::State,
    http::{Request as HttpRequest, StatusCode, header},
    response::{IntoResponse, Response},
    routing::post,
};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::Instant,
};

use super::{
    access::{Access, Refusal},
    denial::Denial,
    intake::{Intake, Load, Paid, Unfit},
    pace::Pace,
    review::{Case, Reach, Request, Rules, User},
    stamp::stamp,
    wire,
};
use crate::{
    object::Kind,
    ops::metrics::{Metrics, ReviewResult},
    world::SharedWorld,
};

/// Reviews that are read at a time. Who waits for an answer of the API server holds no place.
const AT_A_TIME: usize = 16;
/// Reviews whose users' rights are asked for at a time.
const ASKING: usize = 64;
/// A body that takes longer has no reader any more: the API server gives up after three seconds.
const READ: Duration = Duration::from_secs(3);
/// All questions about rights together.
const ASK: Duration = Duration::from_millis(2000);
/// A namespace that was made just before its first source may not have reached us.
const NEW_NAMESPACE: Duration = Duration::from_millis(500);
/// Larger ones are dealt with apart from all others.
const LARGE: usize = 256 << 10;

/// What the handlers share.
pub struct Guard {
    pub rules: Rules,
    pub world: SharedWorld,
    pub access: Access,
    pub metrics: Metrics,
    intake: Intake,
    places: Arc<Semaphore>,
    asking: Semaphore,
    pace: Mutex<Pace>,
}

impl Guard {
    #[must_use]
    pub fn new(rules: Rules, world: SharedWorld, access: Access, metrics: Metrics) -> Self {
        Self {
            rules,
            world,
            access,
            metrics,
            intake: Intake::default(),
            places: Arc::new(Semaphore::new(AT_A_TIME)),
            asking: Semaphore::new(ASKING),
            pace: Mutex::default(),
        }
    }
}

/// The routes of the webhook.
pub fn routes(guard: Arc<Guard>) -> Router {
    Router::new().route("/validate", post(validate)).route("/mutate", post(mutate)).with_state(guard)
}

/// What a peer did wrong, or we cannot do now.
type Problem = (StatusCode, String);

async fn validate(State(guard): State<Arc<Guard>>, request: HttpRequest<Body>) -> Response {
    guard.answer(request, Route::Validate).await
}

async fn mutate(State(guard): State<Arc<Guard>>, request: HttpRequest<Body>) -> Response {
    guard.answer(request, Route::Mutate).await
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Route {
    Validate,
    Mutate,
}

/// A review that has been read.
struct Read {
    uid: String,
    request: Request,
    paid: Paid,
}

impl Guard {
    async fn answer(&self, request: HttpRequest<Body>, route: Route) -> Response {
        let started = Instant::now();
        let outcome = self.decide(request, route).await;
        self.metrics.review_seconds.observe(started.elapsed().as_secs_f64());
        match outcome {
            Ok(json) => ([(header::CONTENT_TYPE, "application/json")], json).into_response(),
            Err((status, problem)) => {
                self.metrics.review(ReviewResult::Rejected);
                if let Some(left_out) = self.may_log() {
                    tracing::info!(status = status.as_u16(), left_out, "turned away: {problem}");
                }
                (status, format!("{problem}\n")).into_response()
            }
        }
    }

    async fn decide(&self, request: HttpRequest<Body>, route: Route) -> Result<Vec<u8>, Problem> {
        let kind = request.headers().get(header::CONTENT_TYPE).map(|kind| kind.as_bytes());
        if !kind.is_some_and(|kind| kind.starts_with(b"application/json")) {
            return Err((StatusCode::UNSUPPORTED_MEDIA_TYPE, "send application/json".to_owned()));
        }
        let deadline = Instant::now() + READ;
        let load = tokio::time::timeout_at(deadline, self.intake.read(request.into_body()))
            .await
            .map_err(|_| (StatusCode::REQUEST_TIMEOUT, "the body did not come in time".to_owned()))??;
        let place = tokio::time::timeout_at(deadline, self.places.clone().acquire_owned());
        let place = place.await.ok().and_then(Result::ok).ok_or(Unfit::Crowded)?;
        let read = read(load, place).await?;
        self.wait_for_namespace(&read.request.namespace).await;
        Ok(match route {
            Route::Validate => self.validate(read).await,
            Route::Mutate => self.mutate(&read),
        })
    }

    async fn wait_for_namespace(&self, namespace: &str) {
        let start = Instant::now();
        let unknown = || self.world.read(|world| world.defaults(namespace).is_none());
        while unknown() && start.elapsed() < NEW_NAMESPACE {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    async fn validate(&self, read: Read) -> Vec<u8> {
        let Read { uid, request, mut paid } = read;
        let case = Case::read(&self.rules, &request);
        let judged = case.map(|case| self.world.read(|world| case.judge(world)));
        let mut verdict = judged.unwrap_or_default();
        // An answer may take its time: all that is kept for it is who asks.
        let Request { kind, namespace, user, change } = request;
        drop(change);
        paid.keep(user.weight());
        if let Some(reach) = verdict.ask.take()
            && let Err(refusal) = self.ask(&user, kind, &reach).await
        {
            verdict.denial = Some(self.denial(&namespace, &user, refusal));
        }
        let refusal = verdict.denial.map(|denial| (denial.label(), denial.message(&self.rules.keys)));
        if let Some((reason, message)) = &refusal {
            self.metrics.review(ReviewResult::Denied(reason));
            self.log(kind, &namespace, &user, reason, message);
            // Warnings about what did not happen only confuse.
            verdict.warnings.clear();
        } else {
            self.metrics.review(ReviewResult::Allowed);
        }
        wire::answer(&uid, refusal, verdict.warnings, None)
    }

    async fn ask(&self, user: &User, kind: Kind, reach: &Reach) -> Result<(), Refusal> {
        let unanswered = |why: &str| Refusal::Unanswered(why.to_owned());
        let asked = async {
            let _permit = self.asking.acquire().await.map_err(|_| unanswered("shutting down"))?;
            self.access.check(user, kind, reach).await
        };
        tokio::time::timeout(ASK, asked).await.unwrap_or_else(|_| Err(unanswered("no answer in time")))
    }

    fn log(&self, kind: Kind, namespace: &str, user: &User, reason: &str, message: &str) {
        let Some(left_out) = self.may_log() else { return };
        tracing::info!(
            kind = kind.as_str(),
            namespace = wire::line(namespace),
            user = wire::line(&user.name),
            reason,
            left_out,
            "denied: {}",
            wire::line(message)
        );
    }

    /// Whether to write a line now, and how many were left out before it, if any.
    fn may_log(&self) -> Option<Option<u64>> {
        let now = Instant::now().into_std();
        let left_out = self.pace.lock().unwrap_or_else(PoisonError::into_inner).next(now)?;
        Some((left_out > 0).then_some(left_out))
    }

    fn denial(&self, home: &str, user: &User, refusal: Refusal) -> Denial {
        match refusal {
            Refusal::Unanswered(why) => Denial::Unanswered(why),
            Refusal::No(question) => Denial::NoRight {
                user: user.name.clone(),
                verb: question.verb,
                kind: question.kind,
                namespace: question.namespace,
                name: question.name,
                home: home.to_owned(),
            },
        }
    }

    fn mutate(&self, read: &Read) -> Vec<u8> {
        let (patch, warnings) = self.world.read(|world| stamp(&self.rules, world, &read.request));
        self.metrics.review(if patch.0.is_empty() { ReviewResult::Allowed } else { ReviewResult::Stamped });
        let patch = (!patch.0.is_empty()).then(|| serde_json::to_vec(&patch).unwrap_or_default());
        wire::answer(&read.uid, None, warnings, patch)
    }
}

/// Reads a review; a large one apart, so that it holds up no other. Its place and what was paid for it go with it: a
/// peer that is gone before the end frees neither.
async fn read(load: Load, place: OwnedSemaphorePermit) -> Result<Read, Problem> {
    let large = load.bytes.len() > LARGE;
    let read = move || {
        let Load { bytes, paid } = load;
        let outcome = wire::read(&bytes);
        drop(place);
        outcome.map(|(uid, request)| Read { uid, request, paid })
    };
    let outcome =
        if large { tokio::task::spawn_blocking(read).await.map_err(|_| Unfit::Crowded)? } else { read() };
    outcome.map_err(|malformed| (StatusCode::BAD_REQUEST, malformed.to_string()))
}

impl From<Unfit> for Problem {
    fn from(unfit: Unfit) -> Self {
        let status = match unfit {
            Unfit::Crowded => StatusCode::SERVICE_UNAVAILABLE,
            Unfit::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            Unfit::BrokenOff => StatusCode::BAD_REQUEST,
        };
        (status, unfit.to_string())
    }
}

#[cfg(test)]
mod tests;
