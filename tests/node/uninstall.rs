//! Uninstalling keeps the companions and the namespace, and removes everything else of Lockstep.

use std::time::Instant;

use serde_json::json;

use crate::{
    harness::{configmap, pipe},
    installation::{Installation, NAMESPACE},
    report,
};

pub(crate) async fn run(installation: &Installation) {
    let cluster = &installation.cluster;
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
    let mut delete = installation.plane.kubectl();
    pipe(delete.args(["delete", "--timeout=90s", "-f", "-"]), &installation.manifests(&[]));
    report(&format!("uninstalled in {:.1?}", start.elapsed()));

    // Only the namespace is left, which was not in the output, with what Lockstep itself has written there.
    let left = ["lease.coordination.k8s.io/lockstep.workshop.io", "secret/lockstep.workshop.io"];
    let get = format!("get {} -n {NAMESPACE} -o name", left.join(" "));
    assert_eq!(installation.kubectl(&get).lines().collect::<Vec<_>>(), left);
    installation.kubectl(&format!("delete namespace {NAMESPACE} --timeout=90s"));
    // Nothing of Lockstep is left or terminating.
    for kind in [
        "namespaces",
        "clusterroles",
        "clusterrolebindings",
        "validatingwebhookconfigurations",
        "mutatingwebhookconfigurations",
    ] {
        let left = installation.kubectl(&format!("get {kind} -l app.kubernetes.io/name=lockstep -o name"));
        assert_eq!(left, "", "{kind}");
    }
    // Sources and companions are unchanged.
    for object in &before {
        let text = |field: &str| object["metadata"][field].as_str().expect("text").to_owned();
        assert_eq!(cluster.configmap(&text("namespace"), &text("name")).await.as_ref(), Some(object));
    }
    // They can be changed. The source is deleted last, because the garbage collector deletes the companion beside it.
    for (namespace, name) in [(&away, "kept-synced"), (&home, "kept-synced"), (&home, "kept")] {
        cluster.merge(&configmap(namespace, name), &json!({"data": {"sky": "green"}})).await;
        cluster.delete(&configmap(namespace, name)).await;
    }
    for namespace in [&home, &away] {
        cluster.delete(&format!("/api/v1/namespaces/{namespace}")).await;
    }
    for namespace in [&home, &away] {
        cluster.wait_collected(&format!("/api/v1/namespaces/{namespace}")).await;
    }
}
