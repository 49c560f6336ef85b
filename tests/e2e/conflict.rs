//! The companion's name is taken: an object without Lockstep's marks is never overwritten without `adopt`.

use serde_json::{Value, json};

use crate::harness::{Cluster, RETRY, configmap, eventually, within};

/// Creates a ConfigMap without Lockstep's marks.
async fn foreign(cluster: &Cluster, namespace: &str, name: &str) -> Value {
    let object = json!({"metadata": {"name": name, "labels": {"theirs": "1"}}, "data": {"theirs": "1"}});
    cluster.post(&format!("/api/v1/namespaces/{namespace}/configmaps"), &object).await
}

#[tokio::test]
async fn foreign_object_at_the_companions_name_is_a_conflict_and_is_left_alone() {
    let cluster = Cluster::new("held").await;
    let lockstep = cluster.start_controller().await;
    let (home, away) = (cluster.namespace("home").await, cluster.namespace("away").await);
    let theirs = foreign(&cluster, &home, "colors-synced").await;
    cluster.source(&home, "colors").annotate("target-namespaces", &format!(".,{away}")).create().await;
    let note = cluster.wait_event(&home, "colors", "Conflict").await;
    assert!(note.contains(&format!("{home}/colors-synced: the name is held by")), "{note}");
    lockstep.wait_metric("lockstep_conflicts", 1.0).await;
    cluster.wait_data(&away, "colors-synced", json!({"sky": "blue"})).await;
    let now = cluster.configmap(&home, "colors-synced").await.unwrap();
    assert_eq!(now["metadata"]["resourceVersion"], theirs["metadata"]["resourceVersion"]);

    // No watch sees the foreign object go; a retry finds the name free.
    cluster.delete(&configmap(&home, "colors-synced")).await;
    within(RETRY, cluster.wait_data(&home, "colors-synced", json!({"sky": "blue"}))).await;
    lockstep.wait_metric("lockstep_conflicts", 0.0).await;
}

#[tokio::test]
async fn second_source_for_the_same_companion_is_a_conflict_until_the_first_is_deleted() {
    let cluster = Cluster::new("two").await;
    let lockstep = cluster.start_controller().await;
    let home = cluster.namespace("home").await;
    let source = |name: &str| {
        let source = cluster.source(&home, name).with("/data", json!({"from": name}));
        source.annotate("companion-name", "shared")
    };
    source("first").create().await;
    cluster.wait_data(&home, "shared", json!({"from": "first"})).await;
    source("second").create().await;
    let note = cluster.wait_event(&home, "second", "Conflict").await;
    assert!(note.contains(&format!("the companion of {home}/first")), "{note}");
    lockstep.wait_metric("lockstep_conflicts", 1.0).await;
    assert_eq!(cluster.configmap(&home, "shared").await.unwrap()["data"]["from"], "first");

    cluster.delete(&configmap(&home, "first")).await;
    cluster.wait_data(&home, "shared", json!({"from": "second"})).await;
    lockstep.wait_metric("lockstep_conflicts", 0.0).await;
}

#[tokio::test]
async fn adopt_takes_over_foreign_objects_only_where_the_namespace_accepts_and_no_controller_owns_them() {
    let cluster = Cluster::new("adopt").await;
    let _lockstep = cluster.start_controller().await;
    let home = cluster.namespace("home").await;
    let closed = cluster.namespace("closed").await;
    let open =
        cluster.namespace_with("open", json!({}), json!({cluster.key("accept-adopt-from"): home})).await;
    let owned =
        cluster.namespace_with("owned", json!({}), json!({cluster.key("accept-adopt-from"): home})).await;
    let mut theirs = Vec::new();
    for namespace in [&home, &open, &closed, &owned] {
        theirs.push(foreign(&cluster, namespace, "colors-synced").await);
    }
    let owner = foreign(&cluster, &owned, "owner").await;
    let controlled = json!({"metadata": {"ownerReferences": [{
        "apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner["metadata"]["uid"], "controller": true,
    }]}});
    cluster.merge(&configmap(&owned, "colors-synced"), &controlled).await;

    let targets = format!(".,{closed},{open},{owned}");
    cluster
        .source(&home, "colors")
        .annotate("adopt", "true")
        .annotate("target-namespaces", &targets)
        .create()
        .await;
    for (namespace, before) in [(&home, &theirs[0]), (&open, &theirs[1])] {
        let adopted = cluster.wait_data(namespace, "colors-synced", json!({"sky": "blue"})).await;
        assert_eq!(adopted["metadata"]["uid"], before["metadata"]["uid"]);
        assert_eq!(adopted["metadata"]["labels"]["theirs"], "1");
        assert_eq!(adopted["metadata"]["labels"][cluster.key("companion")], "true");
    }
    cluster.wait_event(&home, "colors", "Conflict").await;
    for namespace in [&closed, &owned] {
        assert_eq!(
            cluster.configmap(namespace, "colors-synced").await.unwrap()["data"],
            json!({"theirs": "1"})
        );
    }
}

#[tokio::test]
async fn conflicts_of_a_source_in_many_places_are_one_event_and_one_log_line() {
    let cluster = Cluster::new("places").await;
    let home = cluster.namespace("home").await;
    for n in 0..12 {
        let namespace = cluster.namespace(&format!("t{n:02}")).await;
        foreign(&cluster, &namespace, "colors-synced").await;
    }
    let lockstep = cluster.start_mirror_with(&["--resync", "200ms"]).await;
    cluster.source(&home, "colors").annotate("target-namespaces", &cluster.ns("t*")).create().await;
    lockstep.wait_metric("lockstep_conflicts", 12.0).await;
    let note = cluster.wait_event(&home, "colors", "Conflict").await;
    let first = (0..3).map(|n| format!("{}/colors-synced", cluster.ns(&format!("t{n:02}"))));
    let names = first.collect::<Vec<_>>().join(", ");
    assert!(note.starts_with(&format!("12 places: {names} and 9 more. ")), "{note}");
    // Retries do not tell it again.
    let gets = || lockstep.metric("lockstep_api_calls_total{verb=\"get\",code=\"200\"}");
    within(RETRY, eventually("retries", || async { (gets() >= 24.0).then_some(()) })).await;
    let events = cluster.events(&home, "colors").await;
    assert_eq!(events.iter().filter(|(reason, _)| reason == "Conflict").count(), 1, "{events:?}");
    let log = lockstep.log();
    assert_eq!(log.lines().filter(|line| line.contains("the name is held by")).count(), 1, "{log}");
}

/// How many sources want the same companion in the next test.
const MANY: usize = 150;

#[tokio::test]
async fn sources_that_wait_for_a_name_are_not_reconciled_when_its_holder_changes() {
    let cluster = Cluster::new("waiting").await;
    let home = cluster.namespace("home").await;
    let source = |n: usize| cluster.source(&home, &format!("s{n:03}")).annotate("companion-name", "shared");
    source(0).with("/data", json!({"turn": "0"})).create().await;
    let lockstep = cluster.start_mirror_with(&["--resync", "10m"]).await;
    cluster.wait_data(&home, "shared", json!({"turn": "0"})).await;
    for n in 1..MANY {
        source(n).create().await;
    }
    lockstep.wait_metric("lockstep_conflicts", (MANY - 1) as f64).await;
    let reconciles = || {
        let results = ["retry", "trouble", "changed", "unchanged"];
        let count = |result| lockstep.metric(&format!("lockstep_reconciles_total{{result=\"{result}\"}}"));
        results.into_iter().map(count).sum::<f64>()
    };
    let before = reconciles();
    for turn in 1..=20 {
        let turn = turn.to_string();
        cluster.merge(&configmap(&home, "s000"), &json!({"data": {"turn": turn}})).await;
        cluster.wait_data(&home, "shared", json!({"turn": turn})).await;
    }
    let more = reconciles() - before;
    assert!(more < 100.0, "{more} reconciles for 20 changes of one source");

    // The holder goes: the next in line takes over, the others go on waiting.
    let before = reconciles();
    cluster.delete(&configmap(&home, "s000")).await;
    cluster.wait_data(&home, "shared", json!({"sky": "blue"})).await;
    lockstep.wait_metric("lockstep_conflicts", (MANY - 2) as f64).await;
    let more = reconciles() - before;
    assert!(more < 50.0, "{more} reconciles when the holder goes");
}
