//! Flags of `lockstep run` that no other test uses, and metrics of the running process.

use serde_json::json;

use crate::harness::{Cluster, configmap};

#[tokio::test]
async fn suffix_flag_changes_the_names_of_companions() {
    let cluster = Cluster::new("suffix").await;
    let home = cluster.namespace("home").await;
    let _lockstep = cluster.start_mirror_with(&["--suffix", "-copy"]).await;
    cluster.source(&home, "colors").create().await;
    cluster.wait_data(&home, "colors-copy", json!({"sky": "blue"})).await;
    assert!(cluster.configmap(&home, "colors-synced").await.is_none());
}

#[tokio::test]
async fn default_targets_flag_is_stamped_on_sources_without_targets() {
    let cluster = Cluster::new("defaults").await;
    let (home, away) = (cluster.namespace("home").await, cluster.namespace("away").await);
    let (_installed, _lockstep) = cluster.install_and_start(&["--default-targets", &away]).await;
    let source = cluster.source(&home, "colors").create().await;
    let defaults = format!(r#"{{"target-namespaces":"{away}"}}"#);
    assert_eq!(source["metadata"]["annotations"], json!({cluster.key("defaults"): defaults}));
    cluster.wait_data(&away, "colors-synced", json!({"sky": "blue"})).await;
    assert!(cluster.configmap(&home, "colors-synced").await.is_none());
}

#[tokio::test]
async fn no_controller_flag_runs_the_webhook_without_the_controller() {
    let cluster = Cluster::new("webhookonly").await;
    let home = cluster.namespace("home").await;
    let (_installed, lockstep) =
        cluster.install_and_start(&["--no-controller", "--default-protect", "all"]).await;
    let source = cluster.source(&home, "colors").create().await;
    assert_eq!(source["metadata"]["annotations"][cluster.key("defaults")], r#"{"protect":"all"}"#);
    let metrics = lockstep.metrics();
    assert!(!metrics.contains("lockstep_companion_writes_total{"), "{metrics}");

    // A controller creates the companion, which the webhook then protects.
    let _mirror = cluster.start_controller().await;
    cluster.wait_data(&home, "colors-synced", json!({"sky": "blue"})).await;
    let edit = json!({"data": {"sky": "mine"}});
    let body = Some(("application/merge-patch+json", &edit));
    assert_eq!(cluster.try_request("PATCH", &configmap(&home, "colors-synced"), body).await, Err(403));
}

#[tokio::test]
async fn metrics_count_sources_companions_and_watches() {
    let cluster = Cluster::new("metrics").await;
    let (home, away) = (cluster.namespace("home").await, cluster.namespace("away").await);
    let lockstep = cluster.start_controller().await;
    cluster.source(&home, "colors").annotate("target-namespaces", &format!(".,{away}")).create().await;
    lockstep.wait_metric("lockstep_sources", 1.0).await;
    lockstep.wait_metric("lockstep_companions", 2.0).await;
    lockstep.wait_metric("lockstep_queue_depth", 0.0).await;
    let metrics = lockstep.metrics();
    for metric in [
        "lockstep_watch_age_seconds{watch=",
        "lockstep_watch_restarts_total{watch=",
        "lockstep_reconcile_duration_seconds_count",
    ] {
        assert!(metrics.contains(metric), "{metric} in {metrics}");
    }
    cluster.delete(&configmap(&home, "colors")).await;
    lockstep.wait_metric("lockstep_sources", 0.0).await;
    lockstep.wait_metric("lockstep_companions", 0.0).await;
}
