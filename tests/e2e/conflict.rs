//! The companion's name is taken: an object without Lockstep's marks is never overwritten without `adopt`.

use serde_json::{Value, json};

use crate::harness::{Cluster, configmap};

/// Creates a ConfigMap without Lockstep's marks.
async fn foreign(cluster: &Cluster, namespace: &str, name: &str) -> Value {
    let object = json!({"metadata": {"name": name, "labels": {"theirs": "1"}}, "data": {"theirs": "1"}});
    cluster.post(&format!("/api/v1/namespaces/{namespace}/configmaps"), &object).await
}

#[tokio::test]
async fn foreign_object_at_the_companions_name_is_a_conflict_and_is_left_alone() {
    let cluster = Cluster::new("held").await;
    let lockstep = cluster.start_mirror().await;
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
    cluster.wait_data(&home, "colors-synced", json!({"sky": "blue"})).await;
    lockstep.wait_metric("lockstep_conflicts", 0.0).await;
}

#[tokio::test]
async fn second_source_for_the_same_companion_is_a_conflict_until_the_first_is_deleted() {
    let cluster = Cluster::new("two").await;
    let lockstep = cluster.start_mirror().await;
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
    let _lockstep = cluster.start_mirror().await;
    let home = cluster.namespace("home").await;
    let closed = cluster.namespace("closed").await;
    let open = cluster.namespace_with("open", json!({}), json!({cluster.key("accept-from"): home})).await;
    let owned = cluster.namespace_with("owned", json!({}), json!({cluster.key("accept-from"): home})).await;
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
