//! The webhook's HTTP endpoints: AdmissionReviews in, answers out, within bounds of memory, time and
//! concurrency.

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
use tokio::time::Instant;

use super::{
    access::{AccessChecker, AccessError},
    body_budget::{BodyBudget, BodyError, Reservation, ReservedBody},
    defaulting::stamp_defaults,
    denial::Denial,
    fair_semaphore::{Caller, FairSemaphore, Permits},
    log_rate_limit::LogRateLimit,
    preview::{Lookups, Preview},
    request::{Request, User},
    required_access::RequiredAccess,
    review::{Case, Rules, Scope, Verdict},
    wire,
};
use crate::{
    object::{Kind, ObjectKey},
    ops::metrics::{Metrics, ReviewResult},
    tls::Peer,
    world::SharedWorld,
};

/// The most memory that a byte of JSON takes once it is parsed: a map entry such as `"a":"",` becomes two strings in a
/// node of a tree.
const PARSED_BYTES_PER_BYTE: usize = 16;
/// The memory of all parsed reviews, without those that wait for a SubjectAccessReview: these keep only the user. Large
/// ones have a budget of their own, so that no other review waits for them. It suffices for any one: [`wire::parse`]
/// refuses objects that take more.
const SMALL_REVIEWS_BYTES: usize = 12 << 20;
const LARGE_REVIEWS_BYTES: usize = 52 << 20;
/// The API server gives up after three seconds, so an answer to a slower body would be too late.
const BODY_TIMEOUT: Duration = Duration::from_secs(3);
/// For all SubjectAccessReviews of a request together.
const ACCESS_CHECK_TIMEOUT: Duration = Duration::from_millis(2000);
/// How long to wait for the watch to show a namespace that was created just before its first source.
const NAMESPACE_TIMEOUT: Duration = Duration::from_millis(500);
/// Reviews with larger bodies are parsed, judged and dropped on a thread of their own.
const MAX_INLINE_BYTES: usize = 256 << 10;

/// What the handlers share.
pub struct Guard {
    pub rules: Rules,
    pub world: SharedWorld,
    pub access: AccessChecker,
    pub metrics: Metrics,
    lookups: Lookups,
    body_budget: BodyBudget,
    small_reviews: FairSemaphore,
    large_reviews: FairSemaphore,
    /// Reviews are taken only from peers that have presented a valid certificate.
    verified_peers_only: bool,
    log_rate_limit: Mutex<LogRateLimit>,
}

impl Guard {
    #[must_use]
    pub fn new(
        rules: Rules,
        world: SharedWorld,
        access: AccessChecker,
        metrics: Metrics,
        verified_peers_only: bool,
    ) -> Self {
        Self {
            rules,
            world,
            lookups: Lookups::new(access.client()),
            access,
            metrics,
            body_budget: BodyBudget::default(),
            small_reviews: FairSemaphore::new(SMALL_REVIEWS_BYTES),
            large_reviews: FairSemaphore::new(LARGE_REVIEWS_BYTES),
            verified_peers_only,
            log_rate_limit: Mutex::default(),
        }
    }
}

/// The routes of the webhook.
pub fn routes(guard: Arc<Guard>) -> Router {
    Router::new().route("/validate", post(validate)).route("/mutate", post(mutate)).with_state(guard)
}

/// A request that is no AdmissionReview, or that the guard cannot handle now.
type HttpError = (StatusCode, String);

async fn validate(State(guard): State<Arc<Guard>>, request: HttpRequest<Body>) -> Response {
    guard.respond(request, Route::Validate).await
}

async fn mutate(State(guard): State<Arc<Guard>>, request: HttpRequest<Body>) -> Response {
    guard.respond(request, Route::Mutate).await
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Route {
    Validate,
    Mutate,
}

struct ParsedReview {
    uid: String,
    request: Request,
    /// Of the user.
    reservation: Reservation,
    /// Of everything else.
    parsed: Permits,
    peer: Peer,
    /// Its body is longer than [`MAX_INLINE_BYTES`].
    large: bool,
}

impl Guard {
    async fn respond(self: &Arc<Self>, request: HttpRequest<Body>, route: Route) -> Response {
        let started = Instant::now();
        let answer = self.answer(request, route).await;
        self.metrics.review_seconds.observe(started.elapsed().as_secs_f64());
        match answer {
            Ok(json) => ([(header::CONTENT_TYPE, "application/json")], json).into_response(),
            Err((status, message)) => {
                self.metrics.review(ReviewResult::Rejected);
                if let Some(suppressed) = self.may_log() {
                    tracing::info!(status = status.as_u16(), suppressed, "rejected: {message}");
                }
                (status, format!("{message}\n")).into_response()
            }
        }
    }

    async fn answer(
        self: &Arc<Self>,
        request: HttpRequest<Body>,
        route: Route,
    ) -> Result<Vec<u8>, HttpError> {
        let peer = request.extensions().get::<Peer>().copied().unwrap_or_default();
        if self.verified_peers_only && !peer.verified {
            return Err((StatusCode::UNAUTHORIZED, "a client certificate is required".to_owned()));
        }
        let content_type = request.headers().get(header::CONTENT_TYPE).map(|value| value.as_bytes());
        if !content_type.is_some_and(|value| value.starts_with(b"application/json")) {
            return Err((StatusCode::UNSUPPORTED_MEDIA_TYPE, "send application/json".to_owned()));
        }
        let caller = Caller::Peer(peer.address);
        let deadline = Instant::now() + BODY_TIMEOUT;
        let body = self.body_budget.read(caller.clone(), request.into_body());
        let body = tokio::time::timeout_at(deadline, body)
            .await
            .map_err(|_| (StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time".to_owned()))??;
        let (budget, most) = match body.bytes.len() > MAX_INLINE_BYTES {
            true => (&self.large_reviews, LARGE_REVIEWS_BYTES),
            false => (&self.small_reviews, SMALL_REVIEWS_BYTES),
        };
        let needed = (body.bytes.len() * PARSED_BYTES_PER_BYTE).min(most);
        let permits = tokio::time::timeout_at(deadline, budget.acquire(caller, needed));
        let permits = permits.await.map_err(|_| BodyError::Overloaded)?;
        let review = parse(peer, body, permits).await?;
        // A large one would keep others from being parsed for as long.
        if !review.large {
            self.wait_for_namespace(&review.request.namespace).await;
        }
        match route {
            Route::Validate => self.validate(review).await,
            Route::Mutate => {
                let guard = self.clone();
                off_worker(review.large, move || guard.mutate(&review)).await
            }
        }
    }

    async fn wait_for_namespace(&self, namespace: &str) {
        let start = Instant::now();
        let unknown = || self.world.read(|world| world.namespaces().defaults(namespace).is_none());
        while unknown() && start.elapsed() < NAMESPACE_TIMEOUT {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    async fn validate(self: &Arc<Self>, review: ParsedReview) -> Result<Vec<u8>, HttpError> {
        let ParsedReview { uid, request, reservation: _user, parsed, peer, large } = review;
        let guard = self.clone();
        let judge = move || {
            let case = Case::read(&guard.rules, &request);
            let is_source = case.as_ref().is_some_and(Case::is_about_a_source);
            let verdict = case.map_or(Verdict::ALLOWED, |case| guard.world.read(|world| case.judge(world)));
            let Request { kind, namespace, user, operation, dry_run } = request;
            // SubjectAccessReviews may take seconds: meanwhile only the user, and digests of what is tried, are kept in
            // memory.
            let preview = if dry_run && is_source && !matches!(verdict, Verdict::Deny(_)) {
                let rules = guard.world.read(|world| world.namespaces().rules().clone());
                Some(Preview::of(&guard.rules.keys, &rules, kind, &namespace, operation))
            } else {
                drop(operation);
                None
            };
            drop(parsed);
            (verdict, preview, kind, namespace, user)
        };
        let (verdict, preview, kind, namespace, user) = off_worker(large, judge).await?;
        let (outcome, has_rights) = match verdict {
            Verdict::Deny(denial) => (Err(denial), false),
            Verdict::Allow { warnings } => (Ok(warnings), false),
            Verdict::CheckRestore { restored, otherwise } => {
                // Without a certificate, anybody may have sent this in the name of somebody who may read the source.
                let may_know = peer.verified && self.may_read(peer, &user, restored.source()).await;
                let right = may_know && self.world.read(|world| restored.is_right(world));
                (if right { Ok(Vec::new()) } else { Err(otherwise) }, false)
            }
            Verdict::CheckAccess { required, then } => {
                match self.check_access(peer, &user, kind, &required).await {
                    Ok(()) => (self.world.read(|world| then.decide(world, Scope::All)), true),
                    Err(AccessError::Unavailable(why)) => (Err(Denial::Unanswered(why)), false),
                    Err(AccessError::Forbidden(access)) => {
                        let denial = Denial::NoRight {
                            user: user.name.clone(),
                            verb: access.verb,
                            reach: self.world.read(|world| then.reach(world, access.namespace.as_deref())),
                            name: access.name,
                            source: then.key().clone(),
                        };
                        (Err(denial), false)
                    }
                }
            }
        };
        let outcome = match (outcome, preview) {
            (Ok(warnings), Some(preview)) => {
                Ok(self.preview(peer, &user, &preview, has_rights, warnings).await)
            }
            (outcome, _) => outcome,
        };
        let outcome = outcome.map_err(|denial| (denial.label(), denial.message(&self.rules.keys)));
        match &outcome {
            Ok(_) => self.metrics.review(ReviewResult::Allowed),
            Err((reason, message)) => {
                self.metrics.review(ReviewResult::Denied(reason));
                self.log_denial(kind, &namespace, &user, reason, message);
            }
        }
        Ok(wire::answer(&uid, outcome, None))
    }

    async fn may_read(&self, peer: Peer, user: &User, at: &ObjectKey) -> bool {
        let check = self.access.check_get(caller(peer, user), user, at);
        tokio::time::timeout(ACCESS_CHECK_TIMEOUT, check).await.is_ok_and(|answer| answer.is_ok())
    }

    /// Adds what the mirror would do. Nothing is expanded for users who have not shown the right to ask for it.
    async fn preview(
        &self,
        peer: Peer,
        user: &User,
        preview: &Preview,
        has_rights: bool,
        warnings: Vec<String>,
    ) -> Vec<String> {
        if preview.has_patterns() && (preview.needs_consent() || !has_rights) {
            return warnings;
        }
        let mut outcome = self.world.read(|world| preview.plan(world));
        self.lookups.complete(caller(peer, user), &mut outcome).await;
        std::iter::once(outcome.to_string()).chain(warnings).collect()
    }

    async fn check_access(
        &self,
        peer: Peer,
        user: &User,
        kind: Kind,
        required: &RequiredAccess,
    ) -> Result<(), AccessError> {
        let check = self.access.check(caller(peer, user), user, kind, required);
        let checked = tokio::time::timeout(ACCESS_CHECK_TIMEOUT, check).await;
        checked.unwrap_or_else(|_| Err(AccessError::Unavailable("no answer in time".to_owned())))
    }

    fn log_denial(&self, kind: Kind, namespace: &str, user: &User, reason: &str, message: &str) {
        let Some(suppressed) = self.may_log() else { return };
        tracing::info!(
            kind = kind.as_str(),
            namespace = wire::single_line(namespace),
            user = wire::single_line(&user.name),
            reason,
            suppressed,
            "denied: {}",
            wire::single_line(message)
        );
    }

    /// None if the line must be suppressed; otherwise, how many lines were suppressed before it, if any.
    fn may_log(&self) -> Option<Option<u64>> {
        let now = Instant::now().into_std();
        let suppressed = self.log_rate_limit.lock().unwrap_or_else(PoisonError::into_inner).admit(now)?;
        Some((suppressed > 0).then_some(suppressed))
    }

    fn mutate(&self, review: &ParsedReview) -> Vec<u8> {
        let (patch, warnings) = self.world.read(|world| stamp_defaults(&self.rules, world, &review.request));
        self.metrics.review(if patch.0.is_empty() { ReviewResult::Allowed } else { ReviewResult::Stamped });
        let patch = (!patch.0.is_empty()).then(|| serde_json::to_vec(&patch).unwrap_or_default());
        wire::answer(&review.uid, Ok(warnings), patch)
    }
}

/// Who counts for the limits on calls. Without a certificate, a user is whatever the peer writes.
fn caller(peer: Peer, user: &User) -> Caller {
    match peer.verified {
        true => Caller::User(user.tenant().to_owned()),
        false => Caller::Peer(peer.address),
    }
}

/// Parses a review. The thread that parses a large one holds its shares of both budgets until it is done, even when the
/// peer disconnects meanwhile.
async fn parse(peer: Peer, body: ReservedBody, parsed: Permits) -> Result<ParsedReview, HttpError> {
    let large = body.bytes.len() > MAX_INLINE_BYTES;
    let parse = move || {
        let ReservedBody { bytes, mut reservation } = body;
        let (uid, request) = wire::parse(&bytes)?;
        drop(bytes);
        reservation.shrink_to(request.user.size_bytes());
        Ok(ParsedReview { uid, request, reservation, parsed, peer, large })
    };
    let review = off_worker(large, parse).await?;
    review.map_err(|malformed: wire::Malformed| (StatusCode::BAD_REQUEST, malformed.to_string()))
}

/// Does work about a large review on a thread of its own: other requests wait for the worker threads.
async fn off_worker<T: Send + 'static>(
    large: bool,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, HttpError> {
    match large {
        true => Ok(tokio::task::spawn_blocking(work).await.map_err(|_| BodyError::Overloaded)?),
        false => Ok(work()),
    }
}

impl From<BodyError> for HttpError {
    fn from(error: BodyError) -> Self {
        let status = match error {
            BodyError::Overloaded => StatusCode::SERVICE_UNAVAILABLE,
            BodyError::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            BodyError::Incomplete => StatusCode::BAD_REQUEST,
        };
        (status, error.to_string())
    }
}

#[cfg(test)]
mod tests;
