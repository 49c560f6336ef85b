//! When companions are deleted, and when they are not.

use serde_json::{Value, json};

use crate::harness::{Cluster, configmap, eventually, secret};

#[tokio::test]
async fn deleted_source_takes_its_companions_with_it() {
    let Some(cluster) = Cluster::audited("gone").await else { return };
    let _lockstep = cluster.start_mirror().await;
    let (home, away) = (cluster.namespace("home").await, cluster.namespace("away").await);
    for propagation in ["Background", "Foreground", "Orphan"] {
        cluster.source(&home, "colors").annotate("target-namespaces", &format!(".,{away}")).create().await;
        for namespace in [&home, &away] {
            cluster.wait_data(namespace, "colors-synced", json!({"sky": "blue"})).await;
        }
        cluster.delete_with(&configmap(&home, "colors"), propagation).await;
        for namespace in [&home, &away] {
            cluster.wait_gone(&configmap(namespace, "colors-synced")).await;
        }
        // In the source's own namespace the garbage collector deletes the companion. Lockstep deletes an orphan, unless it
        // restored the ownerReference before it saw the source go.
        let deletes = cluster.audit(&home).iter().filter(|(verb, ..)| verb == "delete").count();
        assert!(deletes == 0 || propagation == "Orphan", "{propagation}");
    }
}

#[tokio::test]
async fn companion_is_deleted_when_its_source_is_unlabelled_or_its_target_no_longer_matches() {
    let cluster = Cluster::new("unlabelled").await;
    let _lockstep = cluster.start_mirror().await;
    let (home, away) = (cluster.namespace("home").await, cluster.namespace("away").await);
    let selected = cluster.namespace_with("selected", json!({"tier": cluster.id}), json!({})).await;
    cluster
        .source(&home, "colors")
        .annotate("target-namespaces", &format!(".,{away}"))
        .annotate("target-selector", &format!("tier={}", cluster.id))
        .create()
        .await;
    for namespace in [&home, &away, &selected] {
        cluster.wait_data(namespace, "colors-synced", json!({"sky": "blue"})).await;
    }
    cluster
        .merge(&format!("/api/v1/namespaces/{selected}"), &json!({"metadata": {"labels": {"tier": null}}}))
        .await;
    cluster.wait_gone(&configmap(&selected, "colors-synced")).await;
    assert!(cluster.configmap(&away, "colors-synced").await.is_some());

    let targets = json!({"metadata": {"annotations": {cluster.key("target-namespaces"): "."}}});
    cluster.merge(&configmap(&home, "colors"), &targets).await;
    cluster.wait_gone(&configmap(&away, "colors-synced")).await;
    assert!(cluster.configmap(&home, "colors-synced").await.is_some());

    let unlabelled = json!({"metadata": {"labels": {cluster.key("managed"): null}}});
    cluster.merge(&configmap(&home, "colors"), &unlabelled).await;
    cluster.wait_gone(&configmap(&home, "colors-synced")).await;
    assert!(cluster.configmap(&home, "colors").await.is_some());
}

#[tokio::test]
async fn source_recreated_under_the_same_name_keeps_its_companions() {
    let cluster = Cluster::new("recreated").await;
    let _lockstep = cluster.start_mirror().await;
    let (home, away) = (cluster.namespace("home").await, cluster.namespace("away").await);
    let source = |sky: &str| {
        let source = cluster.source(&home, "colors").annotate("target-namespaces", &format!(".,{away}"));
        source.with("/data", json!({"sky": sky}))
    };
    source("blue").create().await;
    for namespace in [&home, &away] {
        cluster.wait_data(namespace, "colors-synced", json!({"sky": "blue"})).await;
    }
    cluster.delete(&configmap(&home, "colors")).await;
    let new = source("red").create().await;
    for namespace in [&home, &away] {
        cluster
            .wait(namespace, "colors-synced", "belongs to the new one", |object| {
                object["data"]["sky"] == "red"
                    && object["metadata"]["annotations"][cluster.key("source-uid")] == new["metadata"]["uid"]
            })
            .await;
    }
}

#[tokio::test]
async fn companions_of_a_terminating_source_are_not_written() {
    let cluster = Cluster::new("dying").await;
    let _lockstep = cluster.start_mirror().await;
    let home = cluster.namespace("home").await;
    cluster.source(&home, "colors").with("/metadata/finalizers", json!(["example.com/held"])).create().await;
    cluster.source(&home, "beacon").create().await;
    for name in ["colors-synced", "beacon-synced"] {
        cluster.wait_data(&home, name, json!({"sky": "blue"})).await;
    }
    cluster.delete(&configmap(&home, "colors")).await;
    // The edit of the beacon is later on the same watch: once it is healed, the edit of colors has been seen.
    cluster.merge(&configmap(&home, "beacon"), &json!({"data": {"sky": "red"}})).await;
    cluster.wait_data(&home, "beacon-synced", json!({"sky": "red"})).await;
    for name in ["colors-synced", "beacon-synced"] {
        cluster.merge(&configmap(&home, name), &json!({"data": {"sky": "mine"}})).await;
    }
    cluster.wait_data(&home, "beacon-synced", json!({"sky": "red"})).await;
    assert_eq!(cluster.configmap(&home, "colors-synced").await.unwrap()["data"]["sky"], "mine");
    cluster.merge(&configmap(&home, "colors"), &json!({"metadata": {"finalizers": null}})).await;
    cluster.wait_gone(&configmap(&home, "colors-synced")).await;
}

/// What an exempt user removes from a companion.
fn stripped(cluster: &Cluster) -> [(&'static str, Value); 3] {
    let (label, source) = (cluster.key("companion"), cluster.key("source"));
    [
        ("label", json!({"metadata": {"labels": {label: null}}})),
        ("source", json!({"metadata": {"annotations": {source: null}}})),
        ("marks", json!({"metadata": {"labels": null, "annotations": null}})),
    ]
}

#[tokio::test]
async fn companion_that_lost_its_marks_while_its_source_was_paused_goes_with_the_source() {
    let cluster = Cluster::new("outlives").await;
    let _lockstep = cluster.start_mirror().await;
    let home = cluster.namespace("home").await;
    let mut targets = Vec::new();
    for (name, _) in stripped(&cluster) {
        targets.push(cluster.namespace(name).await);
    }
    let exported = cluster.namespace("exported").await;
    let all = format!("{},{exported}", targets.join(","));
    let password = json!({"password": "aHVzaA=="});
    cluster.source(&home, "db").secret("Opaque", password).annotate("target-namespaces", &all).create().await;
    for namespace in targets.iter().chain([&exported]) {
        let path = secret(namespace, "db-synced");
        eventually("mirrored", || cluster.get(&path)).await;
    }
    let paused = json!({"metadata": {"annotations": {cluster.key("paused"): "true"}}});
    cluster.merge(&secret(&home, "db"), &paused).await;
    for (namespace, (_, strip)) in targets.iter().zip(stripped(&cluster)) {
        cluster.merge(&secret(namespace, "db-synced"), &strip).await;
    }
    // A copy that was exported and applied again bears the annotations, and is not ours.
    let path = secret(&exported, "db-synced");
    let mut copy = cluster.get(&path).await.unwrap();
    copy["metadata"]["labels"] = json!({});
    for field in ["uid", "resourceVersion", "creationTimestamp", "managedFields"] {
        copy["metadata"].as_object_mut().unwrap().remove(field);
    }
    cluster.delete(&path).await;
    for name in ["db-synced", "db-backup"] {
        copy["metadata"]["name"] = json!(name);
        cluster.post(&format!("/api/v1/namespaces/{exported}/secrets"), &copy).await;
    }
    // Another source waits for one of the names.
    let waiting = cluster.source(&home, "waiting").secret("Opaque", json!({"password": "bmV3"}));
    waiting.annotate("target-namespaces", &targets[0]).annotate("companion-name", "db-synced").create().await;
    cluster.wait_event(&home, "waiting", "Conflict").await;

    cluster.delete(&secret(&home, "db")).await;
    for namespace in &targets[1..] {
        cluster.wait_gone(&secret(namespace, "db-synced")).await;
    }
    eventually("the other source has the name", || async {
        cluster
            .get(&secret(&targets[0], "db-synced"))
            .await
            .filter(|object| object["data"]["password"] == "bmV3")
    })
    .await;
    for name in ["db-synced", "db-backup"] {
        assert!(cluster.get(&secret(&exported, name)).await.is_some(), "{name} was deleted");
    }
}

#[tokio::test]
async fn companion_that_lost_its_label_before_a_restart_goes_with_its_source() {
    let cluster = Cluster::new("restarted").await;
    let mut lockstep = cluster.start_mirror().await;
    let home = cluster.namespace("home").await;
    let mut targets = Vec::new();
    // Without the annotation `source-uid`, nothing proves that it is ours.
    for (name, _) in &stripped(&cluster)[..2] {
        targets.push(cluster.namespace(name).await);
    }
    cluster.source(&home, "colors").annotate("target-namespaces", &targets.join(",")).create().await;
    for namespace in &targets {
        cluster.wait_data(namespace, "colors-synced", json!({"sky": "blue"})).await;
    }
    let paused = json!({"metadata": {"annotations": {cluster.key("paused"): "true"}}});
    cluster.merge(&configmap(&home, "colors"), &paused).await;
    for (namespace, (_, strip)) in targets.iter().zip(stripped(&cluster)) {
        cluster.merge(&configmap(namespace, "colors-synced"), &strip).await;
    }
    assert!(lockstep.stop().await.success());
    let _lockstep = cluster.start_mirror().await;
    cluster.delete(&configmap(&home, "colors")).await;
    for namespace in &targets {
        cluster.wait_gone(&configmap(namespace, "colors-synced")).await;
    }
}

#[tokio::test]
async fn companions_of_a_source_recreated_with_a_malformed_policy_are_deleted() {
    let cluster = Cluster::new("anew").await;
    let lockstep = cluster.start_mirror().await;
    let (home, away) = (cluster.namespace("home").await, cluster.namespace("away").await);
    let source = || cluster.source(&home, "colors").annotate("target-namespaces", &format!(".,{away}"));
    source().create().await;
    for namespace in [&home, &away] {
        cluster.wait_data(namespace, "colors-synced", json!({"sky": "blue"})).await;
    }
    // While the same source is malformed, its companions stay.
    let protect = |value: Value| json!({"metadata": {"annotations": {cluster.key("protect"): value}}});
    cluster.merge(&configmap(&home, "colors"), &protect(json!("perhaps"))).await;
    cluster.wait_event(&home, "colors", "Refused").await;
    assert!(cluster.configmap(&away, "colors-synced").await.is_some());
    cluster.merge(&configmap(&home, "colors"), &protect(Value::Null)).await;
    lockstep.wait_metric("lockstep_troubles{reason=\"malformed\"}", 0.0).await;

    // Lockstep does not see the two states in between.
    lockstep.pause();
    cluster.delete(&configmap(&home, "colors")).await;
    source().annotate("protect", "perhaps").create().await;
    lockstep.resume();
    for namespace in [&home, &away] {
        cluster.wait_gone(&configmap(namespace, "colors-synced")).await;
    }
    lockstep.wait_metric("lockstep_troubles{reason=\"malformed\"}", 1.0).await;
}

/// Enough sources that deleting all of them at once triggers the brake.
const MANY: usize = 24;

#[tokio::test]
async fn deletes_of_more_than_half_are_held_and_sources_recreated_in_time_keep_their_companions() {
    let cluster = Cluster::new("accident").await;
    let lockstep = cluster.start_mirror().await;
    let (home, away) = (cluster.namespace("home").await, cluster.namespace("away").await);
    let mut uids = Vec::new();
    for n in 0..MANY {
        cluster.source(&home, &format!("s{n}")).annotate("target-namespaces", &away).create().await;
    }
    for n in 0..MANY {
        let companion = cluster.wait_data(&away, &format!("s{n}-synced"), json!({"sky": "blue"})).await;
        uids.push(companion["metadata"]["uid"].clone());
    }
    // All sources are deleted while Lockstep cannot see them go one by one, and then recreated.
    lockstep.pause();
    for n in 0..MANY {
        cluster.delete(&configmap(&home, &format!("s{n}"))).await;
    }
    lockstep.resume();
    lockstep.wait_metric("lockstep_deletes_held", 1.0).await;
    let note = cluster.wait_event(&home, &format!("s{}", MANY - 1), "DeletesHeld").await;
    assert!(note.contains("more than half of all"), "{note}");
    for n in 0..MANY {
        cluster.source(&home, &format!("s{n}")).annotate("target-namespaces", &away).create().await;
    }
    let held =
        |lockstep: &crate::harness::Lockstep| lockstep.metric("lockstep_troubles{reason=\"accident\"}");
    eventually("no delete is held", || async { (held(&lockstep) == 0.0).then_some(()) }).await;
    for (n, uid) in uids.iter().enumerate() {
        let companion = cluster.wait_data(&away, &format!("s{n}-synced"), json!({"sky": "blue"})).await;
        assert_eq!(companion["metadata"]["uid"], *uid, "s{n}-synced was recreated");
    }
}

#[tokio::test]
async fn companions_of_more_than_half_the_sources_missing_at_start_are_deleted_after_the_grace() {
    let cluster = Cluster::new("missing").await;
    let mut lockstep = cluster.start_mirror().await;
    let (home, away) = (cluster.namespace("home").await, cluster.namespace("away").await);
    for n in 0..MANY {
        cluster.source(&home, &format!("s{n}")).annotate("target-namespaces", &away).create().await;
    }
    for n in 0..MANY {
        cluster.wait_data(&away, &format!("s{n}-synced"), json!({"sky": "blue"})).await;
    }
    assert!(lockstep.stop().await.success());
    for n in 0..MANY {
        cluster.delete(&configmap(&home, &format!("s{n}"))).await;
    }
    let lockstep = cluster.start_mirror_with(&["--delete-grace", "3s"]).await;
    // One response shows both: while deletes are held, nothing has been deleted.
    eventually("all deletes are held", || async {
        let metrics = lockstep.metrics();
        let held = metrics.contains("lockstep_deletes_held 1\n");
        assert!(
            !held || !metrics.contains("lockstep_companion_writes_total{action=\"deleted\"}"),
            "{metrics}"
        );
        held.then_some(())
    })
    .await;
    for n in 0..MANY {
        cluster.wait_gone(&configmap(&away, &format!("s{n}-synced"))).await;
    }
    lockstep.wait_metric("lockstep_deletes_held", 0.0).await;
}
