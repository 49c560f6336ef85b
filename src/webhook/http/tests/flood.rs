//! One tenant floods the webhook with sources for every namespace; another tenant's reviews are answered in time.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use super::*;
use lockstep_core::testing::namespace;

const NAMESPACES: usize = 10_000;
const SOURCES: usize = 5_000;
const CONNECTIONS: usize = 40;
const REVIEWS: usize = 30;
/// The flood leaves the webhook idle most of the time, even on a slow machine, if its reviews are cheap. If each of
/// them walked over all namespaces, `CONNECTIONS` walks would always be in progress, pause or not.
const FLOOD_PAUSE: Duration = Duration::from_millis(500);
const TIMEOUT: Duration = API_SERVER_TIMEOUT.saturating_mul(3);

/// Grants everything to Alice and nothing to anybody else.
fn api_server_for_alice() -> kube::Client {
    let service = service_fn(|request: http::Request<KubeBody>| async {
        let body = request.into_body().collect_bytes().await.unwrap();
        let review: Value = serde_json::from_slice(&body).unwrap();
        let review = json!({
            "apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview",
            "metadata": {}, "spec": {}, "status": {"allowed": review["spec"]["user"] == "alice"},
        });
        Ok::<_, Infallible>(http::Response::new(Body::from(review.to_string())))
    });
    kube::Client::new(service, "default")
}

fn large_world() -> SharedWorld {
    let mut cluster = Cluster::with(&["home", "away"]);
    for number in 0..NAMESPACES {
        cluster.namespace(namespace(&format!("team-{number}")));
    }
    for number in 0..SOURCES {
        cluster.put(source(&format!("team-{number}"), "colors").annotate("target-namespaces", ".,away"));
    }
    cluster.world
}

/// A new source with these targets.
fn review_by(user: &str, name: &str, targets: &str) -> String {
    let annotations = json!({"workshop.io/target-namespaces": targets});
    let mut review = review_of("CREATE", &Value::Null, &object(name, "managed", &annotations));
    review["request"]["userInfo"]["username"] = user.into();
    review.to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn flood_of_sources_for_all_namespaces_delays_no_other_tenant() {
    let metrics = Metrics::new();
    let access = AccessChecker::new(api_server_for_alice(), metrics.clone());
    let webhook = Arc::new(Webhook::new(rules(), large_world(), access, metrics, Readiness::new([]), false));
    let served = TestServer::start(routes(webhook), ConnectionLimits::default()).await;
    let (stop, flooded) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let everywhere = vec!["*"; 50].join(",");
    let mut floods = Vec::new();
    for connection in 0..CONNECTIONS {
        let (mut client, task) = served.http2().await;
        let (stop, flooded, everywhere) = (stop.clone(), flooded.clone(), everywhere.clone());
        floods.push(tokio::spawn(async move {
            while !stop.load(Ordering::Relaxed) {
                let number = flooded.fetch_add(1, Ordering::Relaxed);
                let body = review_by("mallory", &format!("flood-{connection}-{number}"), &everywhere);
                let answer = client.send_request(post("/validate", body)).await.unwrap();
                assert!(read_answer(answer).await.1.contains("no_right"));
                tokio::time::sleep(FLOOD_PAUSE).await;
            }
            drop(task);
        }));
    }
    let (mut client, _task) = served.http2().await;
    let mut latencies = Vec::new();
    for number in 0..REVIEWS {
        let start = std::time::Instant::now();
        let request = post("/validate", review_by("alice", &format!("mine-{number}"), "."));
        let answer = tokio::time::timeout(TIMEOUT, client.send_request(request));
        let answer = answer.await.expect("an answer in time").unwrap();
        let answer: Value = serde_json::from_str(&read_answer(answer).await.1).unwrap();
        assert_eq!(reason(&answer["response"]), "allowed", "{answer}");
        latencies.push(start.elapsed());
    }
    stop.store(true, Ordering::Relaxed);
    for flood in floods {
        flood.await.unwrap();
    }
    latencies.sort();
    println!(
        "{} reviews next to {} of the flood: median {:?}, p99 {:?}",
        REVIEWS,
        flooded.load(Ordering::Relaxed),
        latencies[REVIEWS / 2],
        latencies[REVIEWS * 99 / 100]
    );
}
