//! Edits and deletes of companions are healed.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::harness::{Cluster, configmap, eventually, secret};

#[tokio::test]
async fn edited_companion_is_healed_and_labels_of_others_stay() {
    let cluster = Cluster::new("edited").await;
    let lockstep = cluster.start_controller().await;
    let home = cluster.namespace("home").await;
    let source = cluster.key("source");
    let edits = [
        ("content", json!({"data": {"sky": "mine"}})),
        ("content", json!({"data": {"more": "mine"}})),
        ("content", json!({"data": null})),
        ("content", json!({"binaryData": {"bin": "AAAA"}})),
        ("immutable", json!({"immutable": true})),
        ("marks", json!({"metadata": {"annotations": {source.clone(): "nowhere/else"}}})),
        ("marks", json!({"metadata": {"annotations": {source: null, cluster.key("source-uid"): null}}})),
        ("marks", json!({"metadata": {"annotations": {cluster.key("stray"): "1"}}})),
        ("marks", json!({"metadata": {"labels": {cluster.key("stray"): "1"}}})),
        ("marks", json!({"metadata": {"labels": {cluster.key("source-name"): "other"}}})),
        (
            "marks",
            json!({"metadata": {"labels": {
                cluster.key("source-namespace"): null, cluster.key("source-name"): null,
            }}}),
        ),
        ("owner", json!({"metadata": {"ownerReferences": null}})),
        ("finalizer", json!({"metadata": {"finalizers": ["example.com/held"]}})),
    ];
    for (n, (reason, edit)) in edits.into_iter().enumerate() {
        let (name, companion) = (format!("colors{n}"), format!("colors{n}-synced"));
        cluster.source(&home, &name).with("/binaryData", json!({"bin": "AAEC"})).create().await;
        cluster.wait_data(&home, &companion, json!({"sky": "blue"})).await;
        let path = configmap(&home, &companion);
        let theirs =
            json!({"metadata": {"labels": {"theirs": "1"}, "annotations": {"example.com/theirs": "1"}}});
        // An immutable object can only be replaced, which drops the labels of others.
        if reason != "immutable" {
            cluster.merge(&path, &theirs).await;
        }
        let right = cluster.configmap(&home, &companion).await.unwrap();
        let same = |object: &Value| {
            let meta = ["labels", "annotations", "ownerReferences", "finalizers"];
            ["data", "binaryData", "immutable"].iter().all(|field| object[field] == right[field])
                && meta.iter().all(|field| object["metadata"][field] == right["metadata"][field])
        };
        let metric = format!("lockstep_heals_total{{reason=\"{reason}\"}}");
        let healed = lockstep.metric(&metric);
        cluster.merge(&path, &edit).await;
        lockstep.wait_metric(&metric, healed + 1.0).await;
        cluster.wait(&home, &companion, &format!("healed of {edit}"), same).await;
        let note = cluster.wait_event(&home, &name, "Healed").await;
        assert!(note.contains(&format!("{companion} ({reason}, by tester)")), "{note}");
    }
}

#[tokio::test]
async fn deleted_companion_is_recreated_even_with_a_finalizer() {
    let cluster = Cluster::new("deleted").await;
    let lockstep = cluster.start_controller().await;
    let (home, away) = (cluster.namespace("home").await, cluster.namespace("away").await);
    cluster.source(&home, "colors").annotate("target-namespaces", &format!(".,{away}")).create().await;
    for namespace in [&home, &away] {
        let before = cluster.wait_data(namespace, "colors-synced", json!({"sky": "blue"})).await;
        cluster.delete(&configmap(namespace, "colors-synced")).await;
        cluster
            .wait(namespace, "colors-synced", "made again", |object| {
                object["metadata"]["uid"] != before["metadata"]["uid"] && object["data"] == before["data"]
            })
            .await;
    }
    lockstep.wait_metric("lockstep_heals_total{reason=\"deleted\"}", 2.0).await;
    // A foreign finalizer delays the delete; the companion is recreated afterwards.
    let before = cluster.configmap(&away, "colors-synced").await.unwrap();
    lockstep.pause();
    let finalizer = json!({"metadata": {"finalizers": ["example.com/held"]}});
    cluster.merge(&configmap(&away, "colors-synced"), &finalizer).await;
    cluster.delete(&configmap(&away, "colors-synced")).await;
    lockstep.resume();
    cluster
        .wait(&away, "colors-synced", "gone and made again", |object| {
            object["metadata"]["uid"] != before["metadata"]["uid"]
        })
        .await;
}

#[tokio::test]
async fn stripped_companion_label_is_restored_from_the_other_marks() {
    let cluster = Cluster::new("stripped").await;
    let lockstep = cluster.start_controller().await;
    let (home, away) = (cluster.namespace("home").await, cluster.namespace("away").await);
    cluster.source(&home, "colors").annotate("target-namespaces", &format!(".,{away}")).create().await;
    let label = cluster.key("companion");
    for namespace in [&home, &away] {
        let before = cluster.wait_data(namespace, "colors-synced", json!({"sky": "blue"})).await;
        let path = configmap(namespace, "colors-synced");
        for strip in [
            json!({"metadata": {"labels": {label.clone(): null}}}),
            json!({"metadata": {"labels": null, "annotations": null}, "data": {"sky": "mine"}}),
            json!({"metadata": {
                "labels": {label.clone(): "false"},
                "annotations": {cluster.key("source"): format!("{home}/other")},
                "managedFields": [{}],
            }, "data": {"sky": "mine"}}),
        ] {
            cluster.merge(&path, &strip).await;
            let after = cluster
                .wait(namespace, "colors-synced", "restored", |object| {
                    object["metadata"]["labels"][&label] == "true" && object["data"] == before["data"]
                })
                .await;
            assert_eq!(
                after["metadata"]["uid"], before["metadata"]["uid"],
                "it was restored, not made again"
            );
            assert_eq!(after["metadata"]["annotations"], before["metadata"]["annotations"]);
        }
    }
    assert!(lockstep.metric("lockstep_heals_total{reason=\"label\"}") >= 2.0);
}

#[tokio::test]
async fn companion_is_replaced_when_immutable_content_or_the_secret_type_changes() {
    let cluster = Cluster::new("immutable").await;
    let lockstep = cluster.start_controller().await;
    let (home, away) = (cluster.namespace("home").await, cluster.namespace("away").await);
    let source = |sky: &str| {
        cluster
            .source(&home, "colors")
            .with("/immutable", json!(true))
            .with("/data", json!({"sky": sky}))
            .annotate("target-namespaces", &away)
    };
    source("blue").create().await;
    let before = cluster.wait_data(&away, "colors-synced", json!({"sky": "blue"})).await;
    assert_eq!(before["immutable"], true);
    // Immutable content changes only when the source is recreated.
    cluster.delete(&configmap(&home, "colors")).await;
    source("red").create().await;
    let after = cluster.wait_data(&away, "colors-synced", json!({"sky": "red"})).await;
    assert_ne!(after["metadata"]["uid"], before["metadata"]["uid"]);

    let token = json!({"token": "aHVzaA=="});
    let typed = |type_: &str| {
        cluster.source(&home, "typed").secret(type_, token.clone()).annotate("target-namespaces", &away)
    };
    typed("example.com/a").create().await;
    let path = secret(&away, "typed-synced");
    eventually("the first type", || cluster.get(&path)).await;
    cluster.delete(&secret(&home, "typed")).await;
    typed("example.com/b").create().await;
    let find = |type_: &'static str| {
        let (cluster, path) = (&cluster, &path);
        eventually("the type", move || async move {
            cluster.get(path).await.filter(|object| object["type"] == type_)
        })
    };
    let good = find("example.com/b").await;

    // While Lockstep is paused, somebody replaces the companion with one of another type.
    lockstep.pause();
    cluster.delete(&path).await;
    let mut forged = good.clone();
    forged["type"] = json!("example.com/forged");
    for field in ["uid", "resourceVersion", "creationTimestamp", "managedFields"] {
        forged["metadata"].as_object_mut().unwrap().remove(field);
    }
    cluster.post(&format!("/api/v1/namespaces/{away}/secrets"), &forged).await;
    lockstep.resume();
    find("example.com/b").await;
}

#[tokio::test]
async fn heals_back_off_when_another_manager_keeps_overwriting_a_companion() {
    let cluster = Cluster::new("fight").await;
    let lockstep = cluster.start_controller().await;
    let home = cluster.namespace("home").await;
    for name in ["colors", "beacon"] {
        cluster.source(&home, name).create().await;
        cluster.wait_data(&home, &format!("{name}-synced"), json!({"sky": "blue"})).await;
    }
    // After five heals each further one waits twice as long, and an Event names the other manager.
    let start = Instant::now();
    for _ in 0..8 {
        cluster.merge(&configmap(&home, "colors-synced"), &json!({"data": {"sky": "mine"}})).await;
        cluster.wait_data(&home, "colors-synced", json!({"sky": "blue"})).await;
    }
    // The sixth waits for one second after the fifth, the seventh for two, the eighth for four.
    assert!(start.elapsed() >= Duration::from_secs(7), "eight heals in {:?}", start.elapsed());
    let healed = Instant::now();
    let note = cluster.wait_event(&home, "colors", "Fight").await;
    assert!(note.contains("tester overwrote"), "{note}");
    assert!(lockstep.metric("lockstep_fights_total{manager=\"tester\"}") >= 1.0);
    assert_eq!(lockstep.metric("lockstep_troubles{reason=\"fight\"}"), 1.0);
    // The next heal is delayed by eight seconds: a later edit of another companion is healed before it.
    for name in ["colors-synced", "beacon-synced"] {
        cluster.merge(&configmap(&home, name), &json!({"data": {"sky": "mine"}})).await;
    }
    let beacon = cluster.wait_data(&home, "beacon-synced", json!({"sky": "blue"})).await;
    let colors = cluster.configmap(&home, "colors-synced").await.unwrap();
    let version =
        |object: &Value| object["metadata"]["resourceVersion"].as_str().unwrap().parse::<u64>().unwrap();
    assert!(
        colors["data"]["sky"] == "mine" || version(&colors) > version(&beacon),
        "healed without backing off: {colors}"
    );
    // A change of the source is written at once, although the edit would not be healed yet.
    cluster.merge(&configmap(&home, "colors"), &json!({"data": {"sky": "red"}})).await;
    cluster.wait_data(&home, "colors-synced", json!({"sky": "red"})).await;
    assert!(healed.elapsed() < Duration::from_secs(8), "it waited for the next heal: {:?}", healed.elapsed());
}
