//! The memory of a replica is bounded by its flags, whatever users write and peers send.

use std::{
    net::Ipv4Addr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use controlplane::poll;
use futures::{StreamExt, stream};
use serde_json::{Value, json};

use crate::{
    harness::{Cluster, LARGE_DEADLINE, configmap, dedicated_control_plane},
    hostile_reviews::hostile,
    users::manifest,
};

/// The 120 MiB that docs/operations.md allows a replica without the webhook, and what the allocator keeps besides.
const MIRROR_BOUND: u64 = 160 << 20;
/// The memory limit of deploy/base/deployment.yaml.
const SHIPPED_LIMIT: u64 = 256 << 20;
/// Each of these tests keeps a machine busy, so they take turns.
static ONE_AT_A_TIME: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// Waits for a condition that involves much data: these tests are about memory, not about time.
async fn patiently<T, F: Future<Output = Option<T>>>(what: &str, condition: impl FnMut() -> F) -> T {
    poll(LARGE_DEADLINE, condition).await.unwrap_or_else(|| panic!("not within {LARGE_DEADLINE:?}: {what}"))
}

/// Creates sources of one megabyte each, for a namespace that does not exist.
async fn hoard(cluster: &Cluster, namespace: &str, sources: usize) {
    stream::iter(0..sources)
        .for_each_concurrent(4, |n| async move {
            let source =
                cluster.source(namespace, &large(n)).with("/data/text", json!("x".repeat(1_000_000)));
            source.annotate("target-namespaces", "absent").create().await;
        })
        .await;
}

fn large(n: usize) -> String {
    format!("large-{n}")
}

/// Asks for companions of these sources, and waits for them. The cache gives up the last ones by name first.
async fn mirror_large_sources(cluster: &Cluster, namespace: &str, sources: std::ops::Range<usize>) {
    let targets = json!({"metadata": {"annotations": {cluster.key("target-namespaces"): "."}}});
    for n in sources.clone() {
        let path = configmap(namespace, &large(n));
        // Among hostile reviews, one of megabytes may be refused.
        patiently("the source is written", || async {
            let patch = Some(("application/merge-patch+json", &targets));
            cluster.try_request("PATCH", &path, patch).await.ok()
        })
        .await;
    }
    for n in sources {
        let name = format!("{}-synced", large(n));
        let copied = |object: &Value| object["data"]["text"].as_str().map(str::len) == Some(1_000_000);
        patiently(&format!("{name} has a megabyte"), || async {
            cluster.configmap(namespace, &name).await.filter(copied)
        })
        .await;
    }
}

#[tokio::test]
async fn sources_of_100_mb_stay_within_the_bound_with_lists_in_pages() {
    let _turn = ONE_AT_A_TIME.lock().await;
    let Some(plane) = dedicated_control_plane(&["--feature-gates=WatchList=false"]) else { return };
    let cluster = Cluster::on(plane, "hoard").await;
    let (greedy, modest) = (cluster.namespace("greedy").await, cluster.namespace("modest").await);
    hoard(&cluster, &greedy, 100).await;
    let lockstep = cluster.start_controller().await;
    patiently("all sources are listed", || async {
        (lockstep.metric("lockstep_sources") == 100.0).then_some(())
    })
    .await;
    assert!(lockstep.metric("lockstep_source_cache_bytes") <= (64 << 20) as f64);

    let reads = || lockstep.metric("lockstep_api_calls_total{verb=\"get\",code=\"200\"}");
    cluster.source(&modest, "small").create().await;
    cluster.wait_data(&modest, "small-synced", json!({"sky": "blue"})).await;
    assert_eq!(reads(), 0.0, "nothing is read for what is in the cache");
    mirror_large_sources(&cluster, &greedy, 90..100).await;
    assert!(reads() > 0.0, "the cache does not hold all of them");
    let peak = lockstep.peak_memory();
    assert!(peak < MIRROR_BOUND, "{} MiB", peak >> 20);
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_inputs_side_by_side_fit_into_the_shipped_limit_while_others_are_served() {
    assert!(include_str!("../../deploy/base/deployment.yaml").contains("memory: 256Mi"));
    let _turn = ONE_AT_A_TIME.lock().await;
    let Some(plane) = dedicated_control_plane(&[]) else { return };
    let cluster = Arc::new(Cluster::on(plane, "siege").await);
    let greedy = cluster.namespace("greedy").await;
    let (home, away, alice) = cluster.alice().await;
    // Written before the webhook runs, which would refuse what is malformed.
    hoard(&cluster, &greedy, 120).await;
    let items = (0..45_000).map(|n| format!("{n:x}")).collect::<Vec<_>>().join(",");
    for n in 0..40 {
        cluster.source(&greedy, &format!("keys-{n}")).annotate("keys", &items).create().await;
        let annotations = json!({cluster.key("accept-from"): items});
        cluster.namespace_with(&format!("open-{n}"), json!({}), annotations).await;
    }
    let (_installed, lockstep) = cluster.install_and_start_within(SHIPPED_LIMIT).await;

    let over = Arc::new(AtomicBool::new(false));
    let peer = Arc::new(cluster.peer().await.at(Ipv4Addr::new(127, 0, 0, 2)));
    let reviews: Arc<Vec<String>> =
        Arc::new(hostile(&cluster, &greedy).into_iter().map(|(_, review)| review).collect());
    let floods: Vec<_> = (0..4)
        .map(|n| {
            let (over, peer, reviews) = (over.clone(), peer.clone(), reviews.clone());
            tokio::spawn(async move {
                for review in reviews.iter().cycle().skip(n) {
                    if over.load(Ordering::Relaxed) {
                        return;
                    }
                    drop(peer.review(review).await);
                }
            })
        })
        .collect();
    let writes = tokio::spawn({
        let (cluster, greedy) = (cluster.clone(), greedy.clone());
        async move { mirror_large_sources(&cluster, &greedy, 90..100).await }
    });
    // A user of other namespaces notices nothing.
    for n in 0..5 {
        let name = format!("colors-{n}");
        let metadata = json!({
            "name": name, "namespace": home, "labels": {cluster.key("managed"): "true"},
            "annotations": {cluster.key("target-namespaces"): away},
        });
        let source = manifest("ConfigMap", &metadata, &json!({"data": {"sky": "blue"}}));
        alice.succeeds_with("create -f -", &source);
        cluster.wait_data(&away, &format!("{name}-synced"), json!({"sky": "blue"})).await;
    }
    writes.await.expect("large sources are mirrored");
    over.store(true, Ordering::Relaxed);
    for flood in floods {
        flood.await.expect("a flood");
    }
    let peak = lockstep.peak_memory();
    println!("{} MiB at the peak", peak >> 20);
    assert!(peak < SHIPPED_LIMIT, "{} MiB", peak >> 20);
    assert_eq!(lockstep.metric("lockstep_ready"), 1.0);
}
