//! The labels by which kubectl selects the companions of a source.

use std::collections::BTreeSet;

use serde_json::json;

use crate::harness::{Cluster, eventually, run};

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

#[tokio::test]
async fn kubectl_selects_the_companions_of_a_source_by_its_namespace_and_name() {
    let cluster = Cluster::new("select").await;
    let _lockstep = cluster.start_controller().await;
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
