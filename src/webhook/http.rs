//! The webhook's HTTP endpoints: AdmissionReviews in, answers out, within bounds of memory, time and
//! concurrency.

use std::{sync::Arc, time::Duration};

use axum::{
    Router,
    body::Body,
    http::{Request as HttpRequest, StatusCode, header},
    response::{IntoResponse, Response},
    routing::post,
};
use parking_lot::Mutex;
use tokio::time::{Instant, timeout};

use super::{
    access::AccessChecker,
    fair_semaphore::{Caller, Permits},
    log_rate_limit::LogRateLimit,
    preview::{Lookups, Preview},
    review_memory::{BodyError, MIN_REVIEW_BYTES, ReceivedBody, ReviewMemory},
    wire,
};
use crate::{
    ops::{
        health::Readiness,
        metrics::{Metrics, ReviewResult},
    },
    tls::Peer,
};
use lockstep_core::{
    admission::{
        admission_request::{Request, User},
        defaulting::stamp_defaults,
        denial::Denial,
        required_access::AccessError,
        review::{Review, Rules, Verdict},
    },
    object::Kind,
    world::SharedWorld,
};

/// For all SubjectAccessReviews of a request together.
const ACCESS_CHECK_TIMEOUT: Duration = Duration::from_millis(2000);
/// How long to wait for the watch to show a namespace that was created just before its first source.
const NAMESPACE_TIMEOUT: Duration = Duration::from_millis(500);

/// What the handlers share.
pub struct Webhook {
    rules: Rules,
    world: SharedWorld,
    access: AccessChecker,
    metrics: Metrics,
    /// Tells when a watch has shown something.
    readiness: Readiness,
    lookups: Lookups,
    memory: ReviewMemory,
    /// Reviews are taken only from peers that have presented a valid certificate.
    verified_peers_only: bool,
    log_rate_limit: Mutex<LogRateLimit>,
}

/// A request that is no AdmissionReview, or that the webhook cannot handle now.
type HttpError = (StatusCode, String);

#[derive(Clone, Copy)]
enum Route {
    Validate,
    Mutate,
}

struct ParsedReview {
    uid: String,
    request: Request,
    peer: Peer,
    /// Of the memory: the user's, and that of everything else.
    share: Permits,
    parsed: Permits,
}

/// What is left of a review while SubjectAccessReviews are waited for, which may take seconds: only the user, and
/// digests of what is tried.
struct JudgedReview {
    uid: String,
    author: Author,
    verdict: Verdict,
    preview: Option<Preview>,
    _share: Permits,
}

/// Who writes an object, and where.
struct Author {
    user: User,
    peer: Peer,
    kind: Kind,
    namespace: String,
}

/// The routes of the webhook.
pub fn routes(webhook: Arc<Webhook>) -> Router {
    let handler = |route| {
        let webhook = webhook.clone();
        post(move |request| async move { webhook.respond(request, route).await })
    };
    Router::new().route("/validate", handler(Route::Validate)).route("/mutate", handler(Route::Mutate))
}

impl Webhook {
    pub fn new(
        rules: Rules,
        world: SharedWorld,
        access: AccessChecker,
        metrics: Metrics,
        readiness: Readiness,
        verified_peers_only: bool,
    ) -> Self {
        Self {
            rules,
            world,
            lookups: Lookups::new(access.client()),
            access,
            metrics,
            readiness,
            memory: ReviewMemory::default(),
            verified_peers_only,
            log_rate_limit: Mutex::default(),
        }
    }

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
        let body = self.memory.receive(Caller::Peer(peer.address), request.into_body()).await?;
        let large = body.is_large();
        // The thread that parses a large one holds its shares of the memory until it is done, even when the peer
        // disconnects meanwhile.
        let review = off_worker(large, move || ParsedReview::parse(peer, body)).await??;
        // A large one would keep others from being parsed for as long.
        if !large {
            self.wait_for_namespace(&review.request.namespace).await;
        }
        let webhook = self.clone();
        match route {
            Route::Validate => {
                let judged = off_worker(large, move || webhook.judge(review)).await?;
                Ok(self.finish(judged).await)
            }
            Route::Mutate => off_worker(large, move || webhook.mutate(&review)).await,
        }
    }

    async fn wait_for_namespace(&self, namespace: &str) {
        let is_known = || self.world.read(|world| world.namespaces().defaults(namespace).is_some());
        let _ = timeout(NAMESPACE_TIMEOUT, self.readiness.watches_show(is_known)).await;
    }

    fn judge(&self, review: ParsedReview) -> JudgedReview {
        let ParsedReview { uid, request, peer, share, parsed: _until_judged } = review;
        let review = Review::read(&self.rules, &request);
        let is_source = review.as_ref().is_some_and(Review::is_about_a_source);
        let verdict = review.map_or(Verdict::ALLOWED, |review| self.world.read(|world| review.judge(world)));
        let Request { kind, namespace, user, operation, dry_run } = request;
        let is_tried = dry_run && is_source && !matches!(verdict, Verdict::Deny(_));
        let preview = is_tried.then(|| {
            let rules = self.world.read(|world| world.namespaces().rules().clone());
            Preview::of(&self.rules.keys, &rules, kind, &namespace, operation)
        });
        JudgedReview { uid, author: Author { user, peer, kind, namespace }, verdict, preview, _share: share }
    }

    async fn finish(&self, JudgedReview { uid, author, verdict, preview, _share }: JudgedReview) -> Vec<u8> {
        let outcome = self.decide(&author, verdict, preview).await;
        let outcome = outcome.map_err(|denial| (denial.label(), denial.message(&self.rules.keys)));
        match &outcome {
            Ok(_) => self.metrics.review(ReviewResult::Allowed),
            Err((reason, message)) => {
                self.metrics.review(ReviewResult::Denied(reason));
                self.log_denial(&author, reason, message);
            }
        }
        wire::answer(&uid, outcome, None)
    }

    /// Warnings, or a denial.
    async fn decide(
        &self,
        author: &Author,
        verdict: Verdict,
        preview: Option<Preview>,
    ) -> Result<Vec<String>, Denial> {
        let caller = author.caller();
        let user = &author.user;
        let (mut warnings, has_rights) = match verdict {
            Verdict::Deny(denial) => return Err(denial),
            Verdict::Allow { warnings } => (warnings, false),
            Verdict::CheckRestore { restored, otherwise } => {
                let may_read = self.access.check_get(caller.clone(), user, restored.source());
                // Without a certificate, anybody may have sent this in the name of somebody who may read the source.
                let may_know = author.peer.verified && in_time(may_read).await.is_ok();
                if !(may_know && self.world.read(|world| restored.is_right(world))) {
                    return Err(otherwise);
                }
                (Vec::new(), false)
            }
            Verdict::CheckAccess { required, then } => {
                let checked = in_time(self.access.check(caller.clone(), user, author.kind, &required)).await;
                (self.world.read(|world| then.decide_after(world, user, checked))?, true)
            }
        };
        // Nothing is expanded for users who have not shown the right to ask for it.
        if let Some(preview) = preview
            && preview.is_bounded(has_rights)
        {
            let outcome = self.world.read(|world| preview.plan(world));
            let found = self.lookups.find(caller, &outcome).await;
            warnings.insert(0, self.world.read(|world| preview.warning(world, outcome, &found)));
        }
        Ok(warnings)
    }

    fn log_denial(&self, author: &Author, reason: &str, message: &str) {
        let Some(suppressed) = self.may_log() else { return };
        tracing::info!(
            kind = author.kind.as_str(),
            namespace = author.namespace,
            user = wire::single_line(&author.user.name),
            reason,
            suppressed,
            "denied: {}",
            wire::single_line(message)
        );
    }

    /// None if the line must be suppressed; otherwise, how many lines were suppressed before it, if any.
    fn may_log(&self) -> Option<Option<u64>> {
        let now = Instant::now().into_std();
        let suppressed = self.log_rate_limit.lock().admit(now)?;
        Some((suppressed > 0).then_some(suppressed))
    }

    fn mutate(&self, review: &ParsedReview) -> Vec<u8> {
        let (patch, warnings) = self.world.read(|world| stamp_defaults(&self.rules, world, &review.request));
        self.metrics.review(if patch.0.is_empty() { ReviewResult::Allowed } else { ReviewResult::Stamped });
        let patch = (!patch.0.is_empty()).then(|| serde_json::to_vec(&patch).unwrap_or_default());
        wire::answer(&review.uid, Ok(warnings), patch)
    }
}

impl ParsedReview {
    fn parse(peer: Peer, body: ReceivedBody) -> Result<Self, HttpError> {
        let ReceivedBody { bytes, mut share, parsed } = body;
        let malformed = |malformed: wire::Malformed| (StatusCode::BAD_REQUEST, malformed.to_string());
        let (uid, request) = wire::parse(&bytes).map_err(malformed)?;
        drop(bytes);
        share.shrink_to(request.user.size_bytes().max(MIN_REVIEW_BYTES));
        Ok(Self { uid, request, peer, share, parsed })
    }
}

impl Author {
    /// Who counts for the limits on calls. Without a certificate, a user is whatever the peer writes.
    fn caller(&self) -> Caller {
        if self.peer.verified {
            Caller::User(self.user.tenant().to_owned())
        } else {
            Caller::Peer(self.peer.address)
        }
    }
}

async fn in_time(check: impl Future<Output = Result<(), AccessError>>) -> Result<(), AccessError> {
    let checked = timeout(ACCESS_CHECK_TIMEOUT, check).await;
    checked.unwrap_or_else(|_| Err(AccessError::Unavailable("no answer in time".to_owned())))
}

/// Does work about a large review on a thread of its own: other requests wait for the worker threads.
async fn off_worker<T: Send + 'static>(
    large: bool,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, HttpError> {
    if large {
        Ok(tokio::task::spawn_blocking(work).await.map_err(|_| BodyError::Overloaded)?)
    } else {
        Ok(work())
    }
}

impl From<BodyError> for HttpError {
    fn from(error: BodyError) -> Self {
        let status = match error {
            BodyError::Overloaded => StatusCode::SERVICE_UNAVAILABLE,
            BodyError::TooLarge => StatusCode::PAYLOAD_TOO_LARGE,
            BodyError::Incomplete => StatusCode::BAD_REQUEST,
            BodyError::Late => StatusCode::REQUEST_TIMEOUT,
        };
        (status, error.to_string())
    }
}

#[cfg(test)]
mod tests;
