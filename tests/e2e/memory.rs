//! The memory of a replica is bounded by its flags, whatever tenants write.

use controlplane::ControlPlane;
use futures::{StreamExt, stream};
use serde_json::{Value, json};

use crate::harness::{Cluster, Lockstep, configmap, dedicated_control_plane};

/// The 120 MiB that docs/operations.md allows a replica without the guard, and what the allocator keeps besides.
const MIRROR_BOUND: u64 = 160 << 20;

#[tokio::test]
async fn sources_of_200_mb_stay_within_the_bound_with_streaming_lists() {
    let Some(plane) = dedicated_control_plane("hoard", &[]) else { return };
    sources_stay_within_the_bound(plane, 200).await;
}

#[tokio::test]
async fn sources_of_100_mb_stay_within_the_bound_with_lists_in_pages() {
    let Some(plane) = dedicated_control_plane("hoard", &["--feature-gates=WatchList=false"]) else { return };
    sources_stay_within_the_bound(plane, 100).await;
}

/// A replica starts among sources of one tenant that have more content than the cache holds. It stays within its bound,
/// mirrors another tenant's source from the cache, and the large ones after a live read.
async fn sources_stay_within_the_bound(plane: &'static ControlPlane, megabytes: usize) {
    let cluster = &Cluster::on(plane, "hoard").await;
    let (hoard, modest) = (&cluster.namespace("hoard").await, &cluster.namespace("modest").await);
    let large = |n: usize| format!("large-{n}");
    stream::iter(0..megabytes)
        .for_each_concurrent(4, |n| async move {
            let source = cluster.source(hoard, &large(n)).with("/data/text", json!("x".repeat(1_000_000)));
            source.annotate("target-namespaces", "absent").create().await;
        })
        .await;
    let lockstep = cluster.start_mirror().await;
    lockstep.wait_metric("lockstep_sources", megabytes as f64).await;
    stays_within_the_bound(&lockstep, "after the start");
    assert!(lockstep.metric("lockstep_source_cache_bytes") <= (64 << 20) as f64);

    let reads = || lockstep.metric("lockstep_api_calls_total{verb=\"get\",code=\"200\"}");
    cluster.source(modest, "small").create().await;
    cluster.wait_data(modest, "small-synced", json!({"sky": "blue"})).await;
    assert_eq!(reads(), 0.0, "nothing was read for what is in the cache");
    let targets = json!({"metadata": {"annotations": {cluster.key("target-namespaces"): "."}}});
    for n in 90..100 {
        cluster.merge(&configmap(hoard, &large(n)), &targets).await;
    }
    for n in 90..100 {
        let copied = |object: &Value| object["data"]["text"].as_str().map(str::len) == Some(1_000_000);
        cluster.wait(hoard, &format!("{}-synced", large(n)), "a megabyte", copied).await;
    }
    assert!(reads() > 0.0, "the cache does not hold all of them");
    stays_within_the_bound(&lockstep, "after ten writes");
}

fn stays_within_the_bound(lockstep: &Lockstep, when: &str) {
    let peak = lockstep.peak_memory();
    println!("{} MiB {when}", peak >> 20);
    assert!(peak < MIRROR_BOUND, "{} MiB {when}", peak >> 20);
}
