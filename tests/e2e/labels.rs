//! The labels by which kubectl selects the companions of a source.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::harness::{Cluster, configmap, eventually, run};

impl Cluster {
    /// What `kubectl get -A -l …` prints for a source, as `namespace/name`.
    fn select(&self, kind: &str, namespace: &str, name: &str) -> BTreeSet<String> {
        let selector =
            format!("{}={namespace},{}={name}", self.key("source-namespace"), self.key("source-name"));
        let columns = "custom-columns=:.metadata.namespace,:.metadata.name";
        let mut get = self.plane.kubectl();
        get.args(["get", kind, "-A", "-l", &selector, "--no-headers", "-o", columns]);
        run(&mut get).lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join("/")).collect()
    }
}

fn version(object: &Value) -> u64 {
    object["metadata"]["resourceVersion"].as_str().expect("a version").parse().expect("a number")
}

#[tokio::test]
async fn kubectl_selects_the_companions_of_a_source_by_its_namespace_and_name() {
    let cluster = Cluster::new("select").await;
    let _lockstep = cluster.start_mirror().await;
    let (home, away) = (cluster.namespace("home").await, cluster.namespace("away").await);
    let targets = format!(".,{away}");
    let long = "long.".repeat(20) + "name";
    for name in ["colors", &long] {
        cluster.source(&home, name).annotate("target-namespaces", &targets).create().await;
    }
    // Sources of other namespaces and of other kinds may have the same name.
    cluster.source(&away, "colors").annotate("companion-name", "own").create().await;
    let secret = cluster.source(&home, "colors").secret("Opaque", json!({"sky": "Ymx1ZQ=="}));
    secret.annotate("target-namespaces", &away).create().await;

    let hashed = format!("{}-651632d0d8bc", &long[..50]);
    for (kind, namespace, label, companions) in [
        (
            "configmap",
            &home,
            "colors",
            vec![format!("{home}/colors-synced"), format!("{away}/colors-synced")],
        ),
        ("configmap", &away, "colors", vec![format!("{away}/own")]),
        ("secret", &home, "colors", vec![format!("{away}/colors-synced")]),
        ("configmap", &home, &hashed, vec![format!("{home}/{long}-synced"), format!("{away}/{long}-synced")]),
    ] {
        let companions = companions.into_iter().collect();
        eventually(&format!("{companions:?} of {label}"), || async {
            (cluster.select(kind, namespace, label) == companions).then_some(())
        })
        .await;
    }
}

#[tokio::test]
async fn companions_of_an_earlier_version_get_the_labels_after_all_other_work_and_without_an_event() {
    let cluster = Cluster::new("upgrade").await;
    let mut lockstep = cluster.start_mirror().await;
    let home = cluster.namespace("home").await;
    let mut namespaces = Vec::new();
    for n in 0..8 {
        namespaces.push(cluster.namespace(&format!("team-{n}")).await);
    }
    let targets = format!("{}*", cluster.ns("team-"));
    // The names say nothing about the order in which sources are reconciled.
    let (old, changed) = (["a-old", "m-old", "z-old"], ["b-changed", "y-changed"]);
    for name in old.iter().chain(&changed) {
        cluster.source(&home, name).annotate("target-namespaces", &targets).create().await;
        for namespace in &namespaces {
            cluster.wait_data(namespace, &format!("{name}-synced"), json!({"sky": "blue"})).await;
        }
        cluster.wait_event(&home, name, "Mirrored").await;
    }
    assert!(lockstep.stop().await.success());

    let labels = [cluster.key("source-namespace"), cluster.key("source-name")];
    let strip = json!({"metadata": {"labels": {&labels[0]: null, &labels[1]: null}}});
    for namespace in &namespaces {
        for name in old.iter().chain(&changed) {
            cluster.merge(&configmap(namespace, &format!("{name}-synced")), &strip).await;
        }
    }
    for name in changed {
        cluster.merge(&configmap(&home, name), &json!({"data": {"sky": "red"}})).await;
    }
    let events = cluster.events(&home, "a-old").await;

    let lockstep = cluster.start_mirror_with(&["--writes", "4"]).await;
    lockstep.wait_metric("lockstep_companion_writes_total{action=\"labelled\"}", 24.0).await;
    let (mut labelled, mut updated) = (Vec::new(), Vec::new());
    for namespace in &namespaces {
        for name in old.iter().chain(&changed) {
            let companion = cluster.configmap(namespace, &format!("{name}-synced")).await.expect("it stays");
            let found = &companion["metadata"]["labels"];
            assert_eq!((&found[&labels[0]], &found[&labels[1]]), (&json!(home), &json!(name)));
            let follows = changed.contains(name);
            assert_eq!(companion["data"]["sky"], if follows { "red" } else { "blue" });
            if follows { &mut updated } else { &mut labelled }.push(version(&companion));
        }
    }
    assert!(updated.iter().max() < labelled.iter().min(), "{updated:?} {labelled:?}");
    assert_eq!(lockstep.metric("lockstep_companion_writes_total{action=\"updated\"}"), 16.0);
    assert_eq!(lockstep.metric("lockstep_companion_writes_total{action=\"healed\"}"), 0.0);
    let metrics = lockstep.metrics();
    let fights: Vec<&str> =
        metrics.lines().filter(|line| line.starts_with("lockstep_fights_total{")).collect();
    assert_eq!(fights, ["lockstep_fights_total{manager=\"other\"} 0"]);
    // The Event of a source that is written now comes after any that would be about the labels.
    cluster.merge(&configmap(&home, "z-old"), &json!({"data": {"sky": "red"}})).await;
    eventually("an Event about the change", || async {
        let events = cluster.events(&home, "z-old").await;
        events.iter().any(|(_, note)| note.starts_with("updated 8: ")).then_some(())
    })
    .await;
    assert_eq!(cluster.events(&home, "a-old").await, events);
    assert!(!lockstep.log().contains("companion healed"));
}
