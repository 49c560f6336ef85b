//! The hard limits that the mirror holds by itself.

use serde_json::json;

use crate::harness::{Cluster, configmap};

#[tokio::test]
async fn locksteps_own_namespace_holds_neither_sources_nor_targets() {
    let cluster = Cluster::new("own").await;
    let (own, home) = (cluster.namespace("system").await, cluster.namespace("home").await);
    let _lockstep = cluster.lockstep_with(&["--namespace", &own]).await;
    cluster.source(&own, "inside").ask("target-namespaces", &home).create().await;
    let note = cluster.wait_event(&own, "inside", "Refused").await;
    assert!(note.contains("own namespace"), "{note}");
    cluster
        .source(&home, "outside")
        .ask("target-namespaces", &format!(".,{own},{}*", cluster.id))
        .create()
        .await;
    cluster.wait_data(&home, "outside-synced", json!({"sky": "blue"})).await;
    cluster.wait_event(&home, "outside", "NotAccepted").await;
    assert!(cluster.configmap(&own, "outside-synced").await.is_none());
    assert!(cluster.configmap(&home, "inside-synced").await.is_none());
}

#[tokio::test]
async fn a_kube_or_excluded_namespace_is_a_target_only_where_its_accept_from_allows() {
    let cluster = Cluster::new("shut").await;
    let excluded = cluster.ns("shut");
    let _lockstep = cluster.lockstep_with(&["--exclude-namespaces", &excluded]).await;
    let home = cluster.namespace("home").await;
    let never = cluster.namespace_with("never", json!({cluster.key("exclude"): "true"}), json!({})).await;
    cluster.namespace("shut").await;
    // Their names must start with kube-: tests share them by making them unique.
    let kube = format!("kube-{}", cluster.id);
    let body = json!({"metadata": {"name": kube}});
    cluster.post("/api/v1/namespaces", &body).await;

    let targets = format!(".,{kube},{excluded},{never}");
    cluster.source(&home, "colors").ask("target-namespaces", &targets).create().await;
    cluster.wait_data(&home, "colors-synced", json!({"sky": "blue"})).await;
    cluster.wait_event(&home, "colors", "NotAccepted").await;
    for namespace in [&kube, &excluded, &never] {
        assert!(cluster.configmap(namespace, "colors-synced").await.is_none(), "{namespace}");
    }
    let accept =
        json!({"metadata": {"annotations": {cluster.key("accept-from"): format!("elsewhere,{home}")}}});
    for namespace in [&kube, &excluded, &never] {
        cluster.merge(&format!("/api/v1/namespaces/{namespace}"), &accept).await;
    }
    for namespace in [&kube, &excluded] {
        cluster.wait_data(namespace, "colors-synced", json!({"sky": "blue"})).await;
    }
    assert!(cluster.configmap(&never, "colors-synced").await.is_none(), "exclude=true means never");

    // It takes its word back: the companion goes.
    let shut = json!({"metadata": {"annotations": {cluster.key("accept-from"): null}}});
    cluster.merge(&format!("/api/v1/namespaces/{kube}"), &shut).await;
    cluster.wait_gone(&configmap(&kube, "colors-synced")).await;
}
