//! Requests of every kind, sent through the router.

mod flood;
mod fuzz;

use std::{convert::Infallible, future::pending};

use axum::body::to_bytes;
use futures::{FutureExt, future::join_all};
use kube::client::Body as KubeBody;
use serde_json::{Value, json};
use tower::{ServiceExt, service_fn};

use super::*;
use crate::{
    testing::{
        captured_logs::CapturedLogs,
        peer::{API_SERVER_TIMEOUT, TestServer, post, read as read_answer},
    },
    tls::ConnectionLimits,
};
use lockstep_cluster::client;
use lockstep_core::{
    admission::admission_request::Subjects,
    policy::{Protect, content::Content},
    testing::{cluster::Cluster, keys, source},
};

/// What the API server answers to SubjectAccessReviews.
#[derive(Clone, Copy)]
enum Access {
    Allowed,
    Denied,
    /// It never answers.
    Hangs,
}

fn api_server(access: Access) -> kube::Client {
    let service = service_fn(move |request: http::Request<KubeBody>| async move {
        let allowed = match access {
            Access::Allowed => true,
            Access::Denied => false,
            Access::Hangs => pending().await,
        };
        // For the plan of a dry run: whether an object has the companion's name.
        if request.method() == http::Method::GET {
            let missing = json!({"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404});
            return Ok(http::Response::builder().status(404).body(Body::from(missing.to_string())).unwrap());
        }
        assert_eq!(request.uri().path(), "/apis/authorization.k8s.io/v1/subjectaccessreviews");
        let review = json!({
            "apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview",
            "metadata": {}, "spec": {}, "status": {"allowed": allowed},
        });
        Ok::<_, Infallible>(http::Response::new(Body::from(review.to_string())))
    });
    kube::Client::new(service, "default")
}

/// A world with `colors` in `home`, mirrored there and to `away`.
pub(crate) fn world() -> SharedWorld {
    let mut cluster = Cluster::with(&["home", "away"]);
    let key = cluster
        .put(source("home", "colors").data("sky", "hush-blue").annotate("target-namespaces", ".,away"));
    cluster.reconcile(&key);
    cluster.world
}

pub(crate) fn rules() -> Rules {
    Rules {
        keys: keys(),
        own_namespace: lockstep_core::testing::OWN_NAMESPACE.to_owned(),
        exempt: Subjects { users: vec!["lockstep".to_owned()], groups: Vec::new() },
        deputies: Subjects::default(),
        default_targets: ".".to_owned(),
        default_protect: Protect::Edits,
    }
}

fn webhook_with(client: kube::Client) -> Arc<Webhook> {
    let metrics = Metrics::new();
    let access = AccessChecker::new(client, metrics.clone());
    Arc::new(Webhook::new(rules(), world(), access, metrics, Readiness::new([]), false))
}

fn webhook(access: Access) -> Arc<Webhook> {
    webhook_with(api_server(access))
}

fn object(name: &str, label: &str, annotations: &Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": "home", "uid": "u-1", "resourceVersion": "7",
            "labels": {format!("workshop.io/{label}"): "true"}, "annotations": annotations},
        "data": {"sky": "hush-blue"},
    })
}

pub(crate) fn review_of(operation: &str, old: &Value, new: &Value) -> Value {
    json!({
        "kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1",
        "request": {
            "uid": "u-i-d",
            "resource": {"group": "", "version": "v1", "resource": "configmaps"},
            "namespace": "home", "operation": operation,
            "userInfo": {"username": "alice", "groups": ["system:authenticated"], "extra": {"scopes": ["hush-scope"]}},
            "object": new, "oldObject": old,
        },
    })
}

/// Alice edits a companion: denied without a check of her access.
pub(crate) fn an_edit() -> Value {
    let old = object("colors-synced", "companion", &json!({"workshop.io/source": "home/colors"}));
    let mut new = old.clone();
    new["data"]["sky"] = "hush-red".into();
    review_of("UPDATE", &old, &new)
}

/// Alice creates a source: her access is checked.
pub(crate) fn a_source() -> Value {
    review_of("CREATE", &Value::Null, &object("shapes", "managed", &json!({})))
}

fn post_to(path: &str, body: impl Into<Body>) -> HttpRequest<Body> {
    HttpRequest::post(path).header(header::CONTENT_TYPE, "application/json").body(body.into()).unwrap()
}

async fn send(webhook: &Arc<Webhook>, request: HttpRequest<Body>) -> (StatusCode, String) {
    let response = routes(webhook.clone()).oneshot(request).await.unwrap();
    let status = response.status();
    let body = to_bytes(response.into_body(), usize::MAX).await.unwrap();
    (status, String::from_utf8(body.to_vec()).unwrap())
}

/// The `response` of the answer to a review.
async fn answered(webhook: &Arc<Webhook>, review: &Value) -> Value {
    let (status, body) = send(webhook, post_to("/validate", review.to_string())).await;
    assert_eq!(status, StatusCode::OK, "{body}");
    let mut answer: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(answer["response"]["uid"], review["request"]["uid"]);
    answer["response"].take()
}

fn reason(response: &Value) -> &str {
    if response["allowed"].as_bool().unwrap() {
        "allowed"
    } else {
        assert_eq!(response["status"]["code"], 403);
        response["auditAnnotations"]["denied"].as_str().unwrap()
    }
}

fn counted(webhook: &Webhook, line: &str) -> bool {
    let text = webhook.metrics.render();
    text.lines().any(|found| found == line)
}

#[tokio::test]
async fn review_is_answered_and_counted() {
    let webhook = webhook(Access::Allowed);
    assert_eq!(reason(&answered(&webhook, &an_edit()).await), "edit");
    assert_eq!(reason(&answered(&webhook, &a_source()).await), "allowed");
    let stale = object("shapes", "managed", &json!({"workshop.io/defaults": ""}));
    let stale = review_of("CREATE", &Value::Null, &stale).to_string();
    let (status, body) = send(&webhook, post_to("/mutate", stale)).await;
    assert_eq!(status, StatusCode::OK);
    let answer: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(answer["response"]["patchType"], "JSONPatch");
    assert_eq!(send(&webhook, post_to("/validate", "hush")).await.0, StatusCode::BAD_REQUEST);
    for line in [
        "lockstep_reviews_total{verdict=\"denied\"} 1",
        "lockstep_reviews_total{verdict=\"allowed\"} 1",
        "lockstep_reviews_total{verdict=\"stamped\"} 1",
        "lockstep_reviews_total{verdict=\"rejected\"} 1",
        "lockstep_denials_total{reason=\"edit\"} 1",
        "lockstep_review_duration_seconds_count 4",
    ] {
        assert!(counted(&webhook, line), "{line} in\n{}", webhook.metrics.render());
    }
}

#[tokio::test]
async fn only_json_is_accepted() {
    let webhook = webhook(Access::Allowed);
    for (kind, expected) in [
        (None, StatusCode::UNSUPPORTED_MEDIA_TYPE),
        (Some("text/plain"), StatusCode::UNSUPPORTED_MEDIA_TYPE),
        (Some("application/yaml"), StatusCode::UNSUPPORTED_MEDIA_TYPE),
        (Some("application/json"), StatusCode::OK),
        (Some("application/json; charset=utf-8"), StatusCode::OK),
    ] {
        let mut request = post_to("/validate", an_edit().to_string());
        request.headers_mut().remove(header::CONTENT_TYPE);
        if let Some(kind) = kind {
            request.headers_mut().insert(header::CONTENT_TYPE, kind.parse().unwrap());
        }
        assert_eq!(send(&webhook, request).await.0, expected, "{kind:?}");
    }
}

#[tokio::test]
async fn other_paths_and_methods_are_rejected() {
    let webhook = webhook(Access::Allowed);
    for (method, path, expected) in [
        ("GET", "/validate", StatusCode::METHOD_NOT_ALLOWED),
        ("PUT", "/validate", StatusCode::METHOD_NOT_ALLOWED),
        ("DELETE", "/mutate", StatusCode::METHOD_NOT_ALLOWED),
        ("POST", "/", StatusCode::NOT_FOUND),
        ("POST", "/validate/", StatusCode::NOT_FOUND),
        ("POST", "/metrics", StatusCode::NOT_FOUND),
        ("POST", "/../validate", StatusCode::NOT_FOUND),
    ] {
        let mut request = post_to(path, an_edit().to_string());
        *request.method_mut() = method.parse().unwrap();
        let (status, body) = send(&webhook, request).await;
        assert_eq!(status, expected, "{method} {path}");
        assert!(!body.contains("allowed"));
    }
}

#[tokio::test]
async fn malformed_body_is_never_allowed_and_never_quoted() {
    let webhook = webhook(Access::Allowed);
    let whole = an_edit().to_string();
    let deep = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
    let bodies: Vec<Vec<u8>> = vec![
        Vec::new(),
        b"hush".to_vec(),
        b"null".to_vec(),
        deep.clone().into_bytes(),
        whole[..whole.len() - 1].into(),
        [whole.as_bytes(), b"hush"].concat(),
        whole.replace("\"u-i-d\"", &deep).into_bytes(),
        whole.replace("\"u-i-d\"", "1e99999").into_bytes(),
        whole.replace("hush-red", "hush\u{0}").into_bytes(),
        whole.replace("\"hush-red\"", "\"hush\\ud800\"").into_bytes(),
        [&whole.as_bytes()[..whole.len() - 3], b"\xff\xfe}}}"].concat(),
        [&b"\xef\xbb\xbf"[..], whole.as_bytes()].concat(),
    ];
    for body in bodies {
        let shown = String::from_utf8_lossy(&body[..body.len().min(99)]).into_owned();
        let (status, text) = send(&webhook, post_to("/validate", body)).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{shown}");
        assert!(!text.contains("allowed") && !text.contains("hush") && text.len() < 200, "{text}");
    }
}

#[tokio::test]
async fn rejected_requests_are_logged_at_a_limited_rate() {
    let log = CapturedLogs::default();
    let _capture = log.start("info");
    let webhook = webhook(Access::Allowed);
    assert_eq!(send(&webhook, post_to("/validate", "hush")).await.0, StatusCode::BAD_REQUEST);
    let text = log.text();
    assert!(text.contains("rejected: the body is not an AdmissionReview"), "{text}");
    assert!(text.contains("status=400") && !text.contains("hush"), "{text}");
    let before = Instant::now();
    for _ in 0..1000 {
        send(&webhook, post_to("/validate", "hush")).await;
    }
    let (lines, seconds) = (log.text().lines().count(), before.elapsed().as_secs());
    assert!(lines as u64 <= 20 * (seconds + 2), "{lines} lines in {seconds} s");
}

#[tokio::test]
async fn body_that_is_too_large_is_a_413() {
    let webhook = webhook(Access::Allowed);
    let known = post_to("/validate", vec![b' '; (20 << 20) + 1]);
    let chunk = axum::body::Bytes::from(vec![b' '; 1 << 20]);
    let chunks = futures::stream::repeat_with(move || Ok::<_, Infallible>(chunk.clone()));
    for request in [known, post_to("/validate", Body::from_stream(chunks))] {
        assert_eq!(send(&webhook, request).await.0, StatusCode::PAYLOAD_TOO_LARGE);
    }
    // A body just below the limit is accepted.
    let body = format!("{}{}", " ".repeat((20 << 20) - 2000), an_edit());
    assert_eq!(send(&webhook, post_to("/validate", body)).await.0, StatusCode::OK);
}

/// A body of which only the beginning arrives.
fn stalled(beginning: &'static str) -> Body {
    let beginning = futures::stream::iter([Ok::<_, Infallible>(beginning)]);
    Body::from_stream(futures::StreamExt::chain(beginning, futures::stream::pending()))
}

#[tokio::test(start_paused = true)]
async fn stalled_body_is_a_408_and_delays_no_other_review() {
    let webhook = webhook(Access::Allowed);
    let start = Instant::now();
    let hostile: Vec<_> = (0..500)
        .map(|_| {
            let webhook = webhook.clone();
            tokio::spawn(async move { send(&webhook, post_to("/validate", stalled("{\"kind\":"))).await })
        })
        .collect();
    tokio::task::yield_now().await;
    assert_eq!(reason(&answered(&webhook, &an_edit()).await), "edit");
    assert_eq!(start.elapsed(), Duration::ZERO);
    for outcome in join_all(hostile).await {
        assert_eq!(outcome.unwrap().0, StatusCode::REQUEST_TIMEOUT);
    }
    assert!(
        start.elapsed() >= API_SERVER_TIMEOUT
            && start.elapsed() < API_SERVER_TIMEOUT + Duration::from_millis(100)
    );
}

#[tokio::test]
async fn source_is_denied_when_access_cannot_be_checked() {
    // Nothing listens on this port.
    let config = kube::Config::new("http://127.0.0.1:1".parse().unwrap());
    let webhook = webhook_with(client::build(config, |_, _| {}).unwrap());
    let response = answered(&webhook, &a_source()).await;
    assert_eq!(reason(&response), "unanswered");
    assert!(counted(&webhook, "lockstep_denials_total{reason=\"unanswered\"} 1"));
}

#[tokio::test]
async fn source_is_denied_to_a_user_without_access() {
    let webhook = webhook(Access::Denied);
    assert_eq!(reason(&answered(&webhook, &a_source()).await), "no_right");
}

#[tokio::test]
async fn user_without_access_who_tries_other_names_causes_no_more_access_reviews() {
    let webhook = webhook(Access::Denied);
    let calls = || {
        let text = webhook.metrics.render();
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix("lockstep_access_reviews_total{result=\"denied\"} "));
        line.map_or(0, |number| number.parse::<u64>().unwrap())
    };
    assert_eq!(reason(&answered(&webhook, &a_source()).await), "no_right");
    let first = calls();
    assert!(first > 0, "{}", webhook.metrics.render());
    for number in 0..20 {
        let other = object(&format!("other-{number}"), "managed", &json!({}));
        let response = answered(&webhook, &review_of("CREATE", &Value::Null, &other)).await;
        assert_eq!(reason(&response), "no_right");
        let message = response["status"]["message"].as_str().unwrap();
        assert!(message.contains(&format!("other-{number}-synced")), "{message}");
    }
    assert_eq!(calls(), first);
}

#[tokio::test(start_paused = true)]
async fn hanging_access_checks_time_out_and_delay_no_review_without_one() {
    let webhook = webhook(Access::Hangs);
    let start = Instant::now();
    let hostile: Vec<_> = (0..300)
        .map(|number| {
            let webhook = webhook.clone();
            let mut review = a_source();
            review["request"]["userInfo"]["username"] = format!("mallory-{number}").into();
            tokio::spawn(async move { answered(&webhook, &review).await })
        })
        .collect();
    tokio::task::yield_now().await;
    assert_eq!(reason(&answered(&webhook, &an_edit()).await), "edit");
    assert_eq!(start.elapsed(), Duration::ZERO);
    for response in join_all(hostile).await {
        assert_eq!(reason(&response.unwrap()), "unanswered");
    }
    assert!(start.elapsed() < Duration::from_secs(3), "the API server would have given up");
}

/// Answers after a second, so that a flood takes all calls.
fn slow_api_server() -> kube::Client {
    let service = service_fn(|_: http::Request<KubeBody>| async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        let review = json!({
            "apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview",
            "metadata": {}, "spec": {}, "status": {"allowed": true},
        });
        Ok::<_, Infallible>(http::Response::new(Body::from(review.to_string())))
    });
    kube::Client::new(service, "default")
}

/// A review of a new source by this user, from this peer.
fn review_from(peer: Peer, user: &str) -> HttpRequest<Body> {
    let mut review = a_source();
    review["request"]["userInfo"]["username"] = user.into();
    let mut request = post_to("/validate", review.to_string());
    request.extensions_mut().insert(peer);
    request
}

/// What Alice gets after 300 requests of others are waiting.
async fn answer_after_flood(flood: impl Fn(usize) -> HttpRequest<Body>, alice: HttpRequest<Body>) -> String {
    let webhook = webhook_with(slow_api_server());
    let spawn = |request: HttpRequest<Body>| {
        let webhook = webhook.clone();
        tokio::spawn(async move { send(&webhook, request).await.1 })
    };
    let hostile: Vec<_> = (0..300).map(|number| spawn(flood(number))).collect();
    tokio::task::yield_now().await;
    let answer: Value = serde_json::from_str(&spawn(alice).await.unwrap()).unwrap();
    join_all(hostile).await;
    reason(&answer["response"]).to_owned()
}

#[tokio::test(start_paused = true)]
async fn peer_with_many_access_checks_delays_none_of_another_peer() {
    let peer = |last: u8| Peer { address: [10, 0, 0, last].into(), verified: false };
    // Names are whatever the peer writes: they give it no larger share.
    let flood = |number| review_from(peer(66), &format!("mallory-{number}"));
    assert_eq!(answer_after_flood(flood, review_from(peer(1), "alice")).await, "allowed");
    assert_eq!(answer_after_flood(flood, review_from(peer(66), "alice")).await, "unanswered");
}

#[tokio::test(start_paused = true)]
async fn tenant_with_many_access_checks_through_a_verified_api_server_delays_no_other_tenant() {
    let api_server = Peer { address: [10, 0, 0, 1].into(), verified: true };
    let flood =
        |number: usize| review_from(api_server, &format!("system:serviceaccount:mallory:robot-{number}"));
    assert_eq!(answer_after_flood(flood, review_from(api_server, "alice")).await, "allowed");
    let accounts = |name: &str| review_from(api_server, &format!("system:serviceaccount:mallory:{name}"));
    assert_eq!(answer_after_flood(flood, accounts("last")).await, "unanswered");
}

#[tokio::test]
async fn review_without_a_client_certificate_is_a_401_if_one_is_required() {
    let metrics = Metrics::new();
    let access = AccessChecker::new(api_server(Access::Allowed), metrics.clone());
    let webhook = Arc::new(Webhook::new(rules(), world(), access, metrics, Readiness::new([]), true));
    let peer = |verified| Peer { verified, ..Peer::default() };
    for (peer, expected) in [(peer(false), StatusCode::UNAUTHORIZED), (peer(true), StatusCode::OK)] {
        let (status, body) = send(&webhook, review_from(peer, "alice")).await;
        assert_eq!(status, expected, "{body}");
        assert_eq!(body.contains("allowed"), peer.verified, "{body}");
    }
}

/// A companion of `colors` in `home` with this data, as the controller writes it, but with the UID of an earlier
/// source.
fn a_restored_companion(sky: &str) -> Value {
    let data = json!({"sky": sky});
    let checksum = Content { data: serde_json::from_value(data.clone()).unwrap(), ..Content::default() };
    let annotations = json!({
        "workshop.io/source": "home/colors",
        "workshop.io/source-uid": "uid-before-the-disaster",
        "workshop.io/source-checksum": checksum.digest().checksum(),
        "workshop.io/protect": "edits",
    });
    let mut companion = object("colors-synced", "companion", &annotations);
    companion["metadata"]["labels"]["workshop.io/source-namespace"] = "home".into();
    companion["metadata"]["labels"]["workshop.io/source-name"] = "colors".into();
    companion["data"] = data;
    review_of("CREATE", &Value::Null, &companion)
}

#[tokio::test(start_paused = true)]
async fn companion_is_restored_only_by_a_user_who_is_known_to_read_its_source() {
    let peer = |verified| Peer { verified, ..Peer::default() };
    for (access, peer, sky, expected) in [
        (Access::Allowed, peer(true), "hush-blue", "allowed"),
        (Access::Allowed, peer(true), "hush-bluf", "forged"),
        (Access::Denied, peer(true), "hush-blue", "forged"),
        (Access::Hangs, peer(true), "hush-blue", "forged"),
        // Anybody can claim to be Alice.
        (Access::Allowed, peer(false), "hush-blue", "forged"),
    ] {
        for dry_run in [false, true] {
            let webhook = webhook(access);
            let mut review = a_restored_companion(sky);
            review["request"]["dryRun"] = dry_run.into();
            let mut request = post_to("/validate", review.to_string());
            request.extensions_mut().insert(peer);
            let answer: Value = serde_json::from_str(&send(&webhook, request).await.1).unwrap();
            assert_eq!(reason(&answer["response"]), expected, "{sky} {}", peer.verified);
        }
    }
}

#[tokio::test]
async fn right_and_wrong_guess_of_a_user_who_may_not_read_the_source_cause_the_same_answer_and_calls() {
    let guess = |sky: &'static str| async move {
        let webhook = webhook(Access::Denied);
        let mut request = post_to("/validate", a_restored_companion(sky).to_string());
        request.extensions_mut().insert(Peer { verified: true, ..Peer::default() });
        let answer = send(&webhook, request).await;
        assert!(counted(&webhook, "lockstep_access_reviews_total{result=\"denied\"} 1"), "{sky}");
        answer
    };
    assert_eq!(guess("hush-blue").await, guess("hush-bluf").await);
}

#[tokio::test(start_paused = true)]
async fn unknown_namespace_delays_only_its_own_reviews() {
    let webhook = webhook(Access::Allowed);
    let start = Instant::now();
    let mut review = a_source();
    review["request"]["namespace"] = "nowhere".into();
    let hostile: Vec<_> = (0..300)
        .map(|_| {
            let (webhook, review) = (webhook.clone(), review.clone());
            tokio::spawn(async move { answered(&webhook, &review).await })
        })
        .collect();
    tokio::task::yield_now().await;
    assert_eq!(reason(&answered(&webhook, &an_edit()).await), "edit");
    assert_eq!(start.elapsed(), Duration::ZERO);
    join_all(hostile).await;
    assert!(start.elapsed() >= NAMESPACE_TIMEOUT && start.elapsed() < NAMESPACE_TIMEOUT * 2);
}

#[tokio::test(start_paused = true)]
async fn namespace_that_appears_in_time_is_used() {
    let webhook = webhook(Access::Allowed);
    let mut review = a_source();
    review["request"]["namespace"] = "fresh".into();
    let (world, readiness) = (webhook.world.clone(), webhook.readiness.clone());
    let late = async {
        tokio::time::sleep(NAMESPACE_TIMEOUT / 2).await;
        let mut meta = lockstep_core::testing::namespace("fresh").object.metadata;
        meta.annotations.insert("workshop.io/default-protect".to_owned(), "all".to_owned());
        world.write(|world| world.apply_namespace(&meta));
        readiness.watch_received("namespaces");
    };
    let request = post_to("/mutate", review.to_string());
    let ((status, body), ()) = futures::future::join(send(&webhook, request), late).await;
    assert_eq!(status, StatusCode::OK);
    let answer: Value = serde_json::from_str(&body).unwrap();
    let patch: k8s_openapi::ByteString = serde_json::from_value(answer["response"]["patch"].clone()).unwrap();
    assert!(String::from_utf8(patch.0).unwrap().contains(r#""value":"{\"protect\":\"all\"}""#));
}

#[test]
fn review_does_not_wait_for_large_ones_of_the_same_peer() {
    let runtime = tokio::runtime::Builder::new_current_thread().max_blocking_threads(1).enable_all().build();
    runtime.unwrap().block_on(async {
        let webhook = webhook(Access::Allowed);
        let (release, blocked) = std::sync::mpsc::channel::<()>();
        let blocker = tokio::task::spawn_blocking(move || blocked.recv().is_ok());
        let body = || format!("{}{}", " ".repeat(4 << 20), an_edit());
        let mut large: Vec<_> =
            (0..3).map(|_| Box::pin(send(&webhook, post_to("/validate", body())))).collect();
        assert!(large.iter_mut().all(|waiting| waiting.now_or_never().is_none()));
        assert_eq!(webhook.memory.used()[2], 52 << 20);
        assert_eq!(reason(&answered(&webhook, &an_edit()).await), "edit");
        release.send(()).unwrap();
        assert!(blocker.await.unwrap());
        for (status, body) in join_all(large).await {
            assert_eq!(status, StatusCode::OK, "{body}");
        }
    });
}

#[test]
fn disconnected_peer_frees_neither_budget_before_parsing_ends() {
    let runtime = tokio::runtime::Builder::new_current_thread().max_blocking_threads(1).enable_all().build();
    runtime.unwrap().block_on(async {
        let webhook = webhook(Access::Allowed);
        let (release, blocked) = std::sync::mpsc::channel::<()>();
        let blocker = tokio::task::spawn_blocking(move || blocked.recv().is_ok());
        let size = 2 << 20;
        let body = format!("{}{}", " ".repeat(size), an_edit());
        // The body is complete and waits for a thread.
        assert!(send(&webhook, post_to("/validate", body)).now_or_never().is_none());
        let [body, _, parsed] = webhook.memory.used();
        assert!(body >= size && parsed >= size * 16, "{body} {parsed}");
        release.send(()).unwrap();
        assert!(blocker.await.unwrap());
        while webhook.memory.used() != [0; 3] {
            tokio::task::yield_now().await;
        }
    });
}

#[tokio::test(start_paused = true)]
async fn review_that_waits_for_an_access_check_holds_little_memory() {
    let webhook = webhook(Access::Hangs);
    let mut review = a_source();
    review["request"]["object"]["data"]["sky"] = "x".repeat(200 << 10).into();
    let mut waiting = Box::pin(answered(&webhook, &review));
    assert!(waiting.as_mut().now_or_never().is_none());
    assert_eq!(webhook.memory.used(), [MIN_REVIEW_BYTES, 0, 0]);
    assert_eq!(reason(&waiting.await), "unanswered");
    assert_eq!(webhook.memory.used(), [0; 3]);
}

/// The CPU time of threads, from `/proc`: unlike elapsed time, it does not depend on what else the machine
/// does.
#[derive(Clone, Default)]
struct Threads(Arc<Mutex<Vec<std::path::PathBuf>>>);

impl Threads {
    fn add_this(&self) {
        let thread = std::fs::canonicalize("/proc/thread-self");
        self.0.lock().extend(thread.map(|path| path.join("schedstat")));
    }

    /// None where `/proc` does not show it.
    fn cpu_time(&self) -> Option<Duration> {
        let each = |path: &std::path::PathBuf| {
            // A thread that has ended is gone from `/proc`.
            let text = std::fs::read_to_string(path).unwrap_or_default();
            text.split(' ').next().and_then(|nanoseconds| nanoseconds.parse().ok()).unwrap_or(0_u64)
        };
        let all = self.0.lock().iter().map(each).sum();
        (all > 0).then(|| Duration::from_nanos(all))
    }
}

/// Every character is escaped as six, and each object is as large as the API server allows.
fn two_large_secrets() -> String {
    let mut old = object("large", "managed", &json!({}));
    old["type"] = "Opaque".into();
    let mut new = old.clone();
    old["data"] = json!({"a": "\u{1}<".repeat(512 << 10)});
    new["data"] = json!({"a": "<\u{1}".repeat(512 << 10)});
    let mut review = review_of("UPDATE", &old, &new);
    review["request"]["resource"]["resource"] = "secrets".into();
    // Go escapes this character, serde does not.
    review.to_string().replace('<', "\\u003c")
}

#[test]
fn review_of_two_large_secrets_takes_little_more_cpu_time_than_parsing_them() {
    let threads = Threads::default();
    let starting = threads.clone();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .on_thread_start(move || starting.add_this())
        .build()
        .unwrap();
    let body = two_large_secrets();
    assert!(body.len() > 12 << 20);
    let test = async move {
        let work = |before: Option<Duration>, passed: Duration| {
            threads.cpu_time().zip(before).map_or(passed, |(after, before)| after - before)
        };
        // What the webhook's own parsing takes in this build, on this machine.
        let (before, start) = (threads.cpu_time(), std::time::Instant::now());
        drop(wire::parse(body.as_bytes()).unwrap());
        let floor = work(before, start.elapsed());
        let served = TestServer::start(routes(webhook(Access::Allowed)), ConnectionLimits::default()).await;
        for protocol in ["HTTP/2", "HTTP/1.1"] {
            let (before, start) = (threads.cpu_time(), std::time::Instant::now());
            let request = post("/validate", body.clone());
            let (status, answer) = if protocol == "HTTP/2" {
                let (mut client, _connection) = served.http2().await;
                read_answer(client.send_request(request).await.unwrap()).await
            } else {
                let (mut client, _connection) = served.http1().await;
                read_answer(client.send_request(request).await.unwrap()).await
            };
            let passed = start.elapsed();
            let worked = work(before, passed);
            println!(
                "{} MiB over {protocol}: {worked:?} of CPU time in {passed:?}; parsing alone takes {floor:?}",
                body.len() >> 20
            );
            assert!(worked < floor * 5, "{worked:?}, parsing alone takes {floor:?}");
            // On a busy machine the body may not arrive in time; then only the CPU time is checked.
            if passed < API_SERVER_TIMEOUT {
                assert_eq!(status, StatusCode::OK, "{answer}");
                let answer: Value = serde_json::from_str(&answer).unwrap();
                assert_eq!(reason(&answer["response"]), "allowed");
            }
        }
    };
    runtime.block_on(async { tokio::spawn(test).await.unwrap() });
}

#[tokio::test(start_paused = true)]
async fn denials_are_logged_at_a_limited_rate_and_forge_no_lines() {
    let webhook = webhook(Access::Denied);
    let log = CapturedLogs::default();
    let capturing = log.start("trace");
    let mut review = a_source();
    let user = format!("alice\n2026 INFO forged\u{1b}[31m{}", "x".repeat(100_000));
    review["request"]["userInfo"]["username"] = user.into();
    for _ in 0..200 {
        assert_eq!(reason(&answered(&webhook, &review).await), "no_right");
    }
    drop(capturing);
    let text = log.text();
    let lines: Vec<&str> = text.lines().filter(|line| line.contains("INFO")).collect();
    assert_eq!(lines.len(), 20);
    for line in lines {
        assert!(
            line.contains("INFO lockstep::webhook::http") && line.contains("denied: alice 2026"),
            "{line}"
        );
        assert!(line.len() < 6000 && !line.contains('\u{1b}'), "{}", line.len());
    }
    assert!(!text.contains("hush"));
}
