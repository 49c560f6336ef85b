//! Uninstalled, it leaves what it made, and nothing of itself.

use std::time::Instant;

use serde_json::json;

use crate::{
    harness::{configmap, pipe},
    installation::Installation,
    say,
};

pub async fn leaves_nothing_behind(installed: &Installation) {
    let cluster = &installed.cluster;
    let (home, away) = (cluster.namespace("home").await, cluster.namespace("away").await);
    let source = json!({
        "metadata": {
            "name": "kept",
            "labels": {"workshop.io/managed": "true"},
            "annotations": {"workshop.io/target-namespaces": format!(".,{away}")},
        },
        "data": {"sky": "blue"},
    });
    cluster.post(&format!("/api/v1/namespaces/{home}/configmaps"), &source).await;
    let mut before = vec![];
    for namespace in [&home, &away] {
        before.push(cluster.wait_data(namespace, "kept-synced", json!({"sky": "blue"})).await);
    }
    before.push(cluster.configmap(&home, "kept").await.expect("the source"));

    let start = Instant::now();
    let mut delete = installed.plane.kubectl();
    pipe(delete.args(["delete", "--timeout=90s", "-f", "-"]), &installed.manifests());
    say(&format!("uninstalled in {:.1?}", start.elapsed()));

    // Nothing of it is left, nothing is stuck.
    for kind in [
        "namespaces",
        "clusterroles",
        "clusterrolebindings",
        "validatingwebhookconfigurations",
        "mutatingwebhookconfigurations",
    ] {
        let left = installed.kubectl(&format!("get {kind} -l app.kubernetes.io/name=lockstep -o name"));
        assert_eq!(left, "", "{kind}");
    }
    // What it made stays as it was.
    for object in &before {
        let text = |field: &str| object["metadata"][field].as_str().expect("text").to_owned();
        assert_eq!(cluster.configmap(&text("namespace"), &text("name")).await.as_ref(), Some(object));
    }
    // And is free to be changed. The source goes last: the garbage collector takes the companion beside it along.
    for (namespace, name) in [(&away, "kept-synced"), (&home, "kept-synced"), (&home, "kept")] {
        cluster.merge(&configmap(namespace, name), &json!({"data": {"sky": "green"}})).await;
        cluster.delete(&configmap(namespace, name)).await;
    }
    for namespace in [&home, &away] {
        cluster.delete(&format!("/api/v1/namespaces/{namespace}")).await;
    }
    for namespace in [&home, &away] {
        cluster.wait_gone(&format!("/api/v1/namespaces/{namespace}")).await;
    }
}
