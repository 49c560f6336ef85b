//! What happens on restart, at rest and on shutdown.

use serde_json::json;

use crate::harness::{Cluster, configmap, eventually};

#[tokio::test]
async fn restart_converges_on_changes_made_while_down_without_needless_writes() {
    let cluster = Cluster::new("down").await;
    let mut lockstep = cluster.start_controller().await;
    let (home, away) = (cluster.namespace("home").await, cluster.namespace("away").await);
    for name in ["right", "changed", "edited", "lost", "gone", "unlabelled"] {
        cluster.source(&home, name).annotate("target-namespaces", &away).create().await;
    }
    for name in ["right", "changed", "edited", "lost", "gone", "unlabelled"] {
        cluster.wait_data(&away, &format!("{name}-synced"), json!({"sky": "blue"})).await;
    }
    assert!(lockstep.stop().await.success());
    let right = cluster.configmap(&away, "right-synced").await.unwrap();
    cluster.merge(&configmap(&home, "changed"), &json!({"data": {"sky": "red"}})).await;
    cluster.merge(&configmap(&away, "edited-synced"), &json!({"data": {"sky": "mine"}})).await;
    cluster.delete(&configmap(&away, "lost-synced")).await;
    cluster.delete(&configmap(&home, "gone")).await;
    let unlabelled = json!({"metadata": {"labels": {cluster.key("managed"): null}}});
    cluster.merge(&configmap(&home, "unlabelled"), &unlabelled).await;
    cluster.source(&home, "new").annotate("target-namespaces", &away).create().await;

    let lockstep = cluster.start_controller().await;
    cluster.wait_data(&away, "changed-synced", json!({"sky": "red"})).await;
    for name in ["edited", "lost", "new"] {
        cluster.wait_data(&away, &format!("{name}-synced"), json!({"sky": "blue"})).await;
    }
    for name in ["gone", "unlabelled"] {
        cluster.wait_gone(&configmap(&away, &format!("{name}-synced"))).await;
    }
    let now = cluster.configmap(&away, "right-synced").await.unwrap();
    assert_eq!(now["metadata"]["resourceVersion"], right["metadata"]["resourceVersion"]);
    // It wrote only what was needed.
    let writes =
        |action: &str| lockstep.metric(&format!("lockstep_companion_writes_total{{action=\"{action}\"}}"));
    eventually("the expected numbers of writes", || async {
        let counts = ["created", "updated", "healed", "deleted"].map(writes);
        (counts == [2.0, 1.0, 1.0, 2.0]).then_some(())
    })
    .await;
}

#[tokio::test]
async fn resync_at_rest_neither_writes_nor_reads() {
    let Some(cluster) = Cluster::audited("rest").await else { return };
    let lockstep = cluster.start_mirror_with(&["--resync", "500ms"]).await;
    let (home, away) = (cluster.namespace("home").await, cluster.namespace("away").await);
    for n in 0..200 {
        cluster
            .source(&home, &format!("s{n}"))
            .annotate("target-namespaces", &format!(".,{away}"))
            .create()
            .await;
    }
    for n in 0..200 {
        for namespace in [&home, &away] {
            cluster.wait_data(namespace, &format!("s{n}-synced"), json!({"sky": "blue"})).await;
        }
    }
    // Two full resyncs after the last write.
    let reconciles = || lockstep.metric("lockstep_reconcile_duration_seconds_count");
    let events = || lockstep.metric("lockstep_api_calls_total{verb=\"create\",code=\"201\"}");
    eventually("all Events are written", || async { (events() >= 1.0 + 200.0 * 3.0).then_some(()) }).await;
    let (audited, calls, seen) = (count(&cluster, &home, &away).await, events(), reconciles());
    eventually("two resyncs", || async { (reconciles() >= seen + 400.0).then_some(()) }).await;
    assert_eq!(count(&cluster, &home, &away).await, audited, "the API server saw a read or a write");
    assert!((events() - calls).abs() < 0.5, "an Event was written");
    assert_eq!(audited, 400, "one create for each companion, and nothing else");
}

async fn count(cluster: &Cluster, home: &str, away: &str) -> usize {
    cluster.complete_audit(home).await.len() + cluster.complete_audit(away).await.len()
}

#[tokio::test]
async fn shutdown_finishes_the_writes_of_the_current_reconcile() {
    let cluster = Cluster::new("stop").await;
    let mut lockstep = cluster.start_mirror_with(&["--writes", "1"]).await;
    let home = cluster.namespace("home").await;
    let mut targets = Vec::new();
    for n in 0..50 {
        targets.push(cluster.namespace(&format!("t{n:02}")).await);
    }
    // Once the watch has delivered the last namespace, it has delivered all.
    cluster.source(&home, "beacon").annotate("target-namespaces", &targets[49]).create().await;
    cluster.wait_data(&targets[49], "beacon-synced", json!({"sky": "blue"})).await;
    cluster.source(&home, "colors").annotate("target-namespaces", &targets.join(",")).create().await;
    // With one writer the companions are created in order: after the first, most are still missing.
    while cluster.configmap(&targets[0], "colors-synced").await.is_none() {
        tokio::task::yield_now().await;
    }
    assert!(lockstep.stop().await.success(), "{}", lockstep.log());
    assert!(lockstep.log().contains("lockstep stops"));
    for namespace in &targets {
        assert!(cluster.configmap(namespace, "colors-synced").await.is_some(), "{namespace}");
    }
    let note = cluster.wait_event(&home, "colors", "Mirrored").await;
    assert!(note.starts_with("created 50: "), "{note}");
}
