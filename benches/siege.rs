//! What well-behaved clients see of the webhook, first alone and then under siege, for less than two minutes:
//!
//! - a tenant's writes through the API server, while another tenant and a peer that reaches the webhook's port do what
//!   they can;
//! - reviews that are sent straight to the webhook, far more than a cluster has, while broken and hostile clients
//!   connect and sources change.
//!
//! Prints requests, errors, latencies and the peak memory of the replica, and fails if an error is the webhook's fault
//! or the memory exceeds the pod's limit. `make siege` runs it.

// Parts of the end-to-end tests, without the tests in them.
#![allow(dead_code, unused_imports)]

#[path = "siege/exchange.rs"]
mod exchange;
#[path = "../tests/e2e/fixture.rs"]
mod fixture;
#[path = "../tests/e2e/harness.rs"]
mod harness;
#[path = "../tests/e2e/hostile_reviews.rs"]
mod hostile_reviews;
#[path = "../tests/e2e/peer.rs"]
mod peer;
#[path = "siege/reviews.rs"]
mod reviews;
#[path = "../tests/e2e/users.rs"]
mod users;

use std::{
    net::Ipv4Addr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use futures::{StreamExt, stream};
use kube::Client;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use harness::{Cluster, client_for, configmap, manifests, pipe};

/// How long each measurement of a tenant's writes takes.
const MEASURED: Duration = Duration::from_secs(20);
/// The memory limit of the pod.
const MAX_MEMORY_BYTES: u64 = 256 << 20;
/// The pause between two writes of the well-behaved tenant.
const PAUSE: Duration = Duration::from_millis(20);
const NAMESPACES: usize = 500;
const LARGE_SOURCES: usize = 100;
/// Connections of the tenant, and of the peer with small reviews.
const CONNECTIONS: usize = 20;
/// The pause of a connection between two attacks. Attackers, API server and webhook share this machine: without a
/// pause, it would show just that.
const ATTACK_PAUSE: Duration = Duration::from_millis(50);

#[tokio::main]
async fn main() {
    drop(rustls::crypto::ring::default_provider().install_default());
    let cluster = Arc::new(Cluster::new("siege").await);
    let (home, _, alice) = cluster.alice().await;
    let greedy = cluster.namespace("greedy").await;
    let mallory = cluster.editor("mallory", &[], &[&greedy]).await;
    stream::iter(0..NAMESPACES)
        .for_each_concurrent(16, |n| {
            let cluster = cluster.clone();
            async move { drop(cluster.namespace(&format!("many-{n}")).await) }
        })
        .await;
    let (_installed, lockstep) = cluster.install_and_start(&[]).await;
    // With the timeouts that are shipped: tests have longer ones.
    let flags = ["--domain", &cluster.domain(), "--secrets", "--webhook-url", &cluster.url()];
    pipe(cluster.plane.kubectl().args(["apply", "-f", "-"]), &manifests(&flags));
    cluster.source(&home, "colors").create().await;
    cluster.wait_data(&home, "colors-synced", json!({"sky": "blue"})).await;
    let alice = client_for(alice.kubeconfig()).await;
    let path = configmap(&home, "colors");

    println!(
        "| | requests | a second | errors | p50 | p99 | longest |\n| --- | --- | --- | --- | --- | --- | --- |"
    );
    let mut errors = measure(&alice, &path).await.print("a tenant's writes, alone");
    let over = Arc::new(AtomicBool::new(false));
    let mut siege = JoinSet::new();
    let mallory = client_for(mallory.kubeconfig()).await;
    large_sources(&mut siege, &over, &cluster, &mallory, &greedy);
    sources_for_all_namespaces(&mut siege, &over, &cluster, &mallory, &greedy);
    hostile_peer(&mut siege, &over, &cluster, &greedy).await;
    errors += measure(&alice, &path).await.print("a tenant's writes, beside a hostile tenant and peer");
    over.store(true, Ordering::Relaxed);
    while let Some(ended) = siege.join_next().await {
        ended.expect("an attack ends");
    }
    errors += reviews::run(&cluster, &home, &alice).await;
    let peak = lockstep.peak_memory();
    println!("\npeak memory of the replica: {} MiB of {} MiB", peak >> 20, MAX_MEMORY_BYTES >> 20);
    assert_eq!(errors, 0, "errors by the webhook's fault");
    assert!(peak < MAX_MEMORY_BYTES, "more memory than the pod has");
}

/// What well-behaved clients have measured.
#[derive(Default)]
pub struct Measurement {
    latencies: Vec<Duration>,
    errors: usize,
    took: Duration,
}

/// Changes a source again and again, as its owner.
async fn measure(owner: &Client, source: &str) -> Measurement {
    let mut measurement = Measurement::default();
    let start = Instant::now();
    while start.elapsed() < MEASURED {
        let patch = json!({"data": {"turn": start.elapsed().as_nanos().to_string()}});
        let begun = Instant::now();
        let refused = send(owner, "PATCH", source, "application/merge-patch+json", &patch).await.err();
        measurement.latencies.push(begun.elapsed());
        if let Some((status, message)) = refused {
            measurement.errors += 1;
            println!("refused with {status} after {:.1?}: {message}", begun.elapsed());
        }
        tokio::time::sleep(PAUSE).await;
    }
    measurement.took = start.elapsed();
    measurement
}

impl Measurement {
    fn add(&mut self, other: Self) {
        self.latencies.extend(other.latencies);
        self.errors += other.errors;
        self.took = self.took.max(other.took);
    }

    /// Prints a row of the table, and returns the errors.
    fn print(mut self, situation: &str) -> usize {
        self.latencies.sort_unstable();
        let count = self.latencies.len();
        assert!(count > 0, "{situation}: nothing was measured");
        let quantile = |per_cent: usize| self.latencies[(count - 1) * per_cent / 100];
        println!(
            "| {situation} | {count} | {:.0} | {} | {:.1?} | {:.1?} | {:.1?} |",
            count as f64 / self.took.as_secs_f64(),
            self.errors,
            quantile(50),
            quantile(99),
            quantile(100),
        );
        self.errors
    }
}

/// Sends a request. Returns the status and the message of a refusal; the status is zero if there was no answer.
async fn send(
    client: &Client,
    method: &str,
    path: &str,
    content_type: &str,
    body: &Value,
) -> Result<(), (u16, String)> {
    let request = http::Request::builder().method(method).uri(path).header("content-type", content_type);
    let request = request.body(serde_json::to_vec(body).expect("JSON")).expect("a request");
    match client.request::<serde::de::IgnoredAny>(request).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) => Err((status.code, status.message)),
        Err(error) => Err((0, error.to_string())),
    }
}

/// A tenant fills its namespace with sources of a megabyte, and changes them.
fn large_sources(
    siege: &mut JoinSet<()>,
    over: &Arc<AtomicBool>,
    cluster: &Arc<Cluster>,
    tenant: &Client,
    namespace: &str,
) {
    let (over, tenant, label) = (over.clone(), tenant.clone(), cluster.key("managed"));
    let path = format!("/api/v1/namespaces/{namespace}/configmaps");
    siege.spawn(async move {
        for turn in 0_usize.. {
            let n = turn % LARGE_SOURCES;
            let patch = json!({
                "apiVersion": "v1", "kind": "ConfigMap",
                "metadata": {"name": format!("large-{n}"), "labels": {&label: "true"}},
                "data": {"text": "x".repeat(1_000_000), "turn": turn.to_string()},
            });
            let apply = format!("{path}/large-{n}?fieldManager=mallory&force=true");
            drop(send(&tenant, "PATCH", &apply, "application/apply-patch+yaml", &patch).await);
            tokio::time::sleep(ATTACK_PAUSE).await;
            if over.load(Ordering::Relaxed) {
                return;
            }
        }
    });
}

/// The same tenant writes sources for all namespaces, on which it has no rights, and with lists beyond their limits.
fn sources_for_all_namespaces(
    siege: &mut JoinSet<()>,
    over: &Arc<AtomicBool>,
    cluster: &Arc<Cluster>,
    tenant: &Client,
    namespace: &str,
) {
    let path = format!("/api/v1/namespaces/{namespace}/configmaps");
    let items = (0..45_000).map(|n| format!("{n:x}")).collect::<Vec<_>>().join(",");
    let source = |annotation: &str, value: &str| {
        json!({"metadata": {
            "generateName": "wide-",
            "labels": {cluster.key("managed"): "true"},
            "annotations": {cluster.key(annotation): value},
        }})
    };
    let wide = ["*"; 50].join(",");
    let sources = Arc::new([
        source("target-namespaces", &wide),
        source("target-selector", "!a"),
        source("keys", &items),
    ]);
    for n in 0..CONNECTIONS {
        let (over, tenant, path, sources) = (over.clone(), tenant.clone(), path.clone(), sources.clone());
        siege.spawn(async move {
            for source in sources.iter().cycle().skip(n) {
                let answer = send(&tenant, "POST", &path, "application/json", source).await;
                assert!(answer.is_err(), "a source without rights, or over a limit, is never accepted");
                tokio::time::sleep(ATTACK_PAUSE).await;
                if over.load(Ordering::Relaxed) {
                    return;
                }
            }
        });
    }
}

/// A peer posts reviews to the webhook's port: a few of many megabytes, many small ones.
async fn hostile_peer(
    siege: &mut JoinSet<()>,
    over: &Arc<AtomicBool>,
    cluster: &Arc<Cluster>,
    namespace: &str,
) {
    // From another address than the API server's, as in a cluster: limits are per address.
    let peer = Arc::new(cluster.peer().await.at(Ipv4Addr::new(127, 0, 0, 2)));
    let hostile = hostile_reviews::hostile(cluster, namespace).into_iter().map(|(_, review)| review);
    let hostile: Arc<Vec<String>> = Arc::new(hostile.collect());
    let source = json!({"metadata": {
        "name": "wide", "namespace": namespace,
        "labels": {cluster.key("managed"): "true"},
        "annotations": {cluster.key("target-namespaces"): "*"},
    }});
    let small = peer::review_of("CREATE", namespace, "mallory", &Value::Null, &source).to_string();
    let small = Arc::new(vec![small]);
    for (connections, reviews) in [(4, hostile), (CONNECTIONS, small)] {
        for n in 0..connections {
            let (over, peer, reviews) = (over.clone(), peer.clone(), reviews.clone());
            siege.spawn(async move {
                for review in reviews.iter().cycle().skip(n) {
                    drop(peer.review(review).await);
                    tokio::time::sleep(ATTACK_PAUSE).await;
                    if over.load(Ordering::Relaxed) {
                        return;
                    }
                }
            });
        }
    }
}
