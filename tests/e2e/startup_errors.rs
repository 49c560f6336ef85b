//! An error at startup is one clear line and a non-zero exit code, or a retry where that can help.

use std::process::{Command, Output};

use serde_json::json;

use crate::harness::{Cluster, Lockstep, MIRROR_ONLY, eventually};

fn lockstep(arguments: &[&str], kubeconfig: &str) -> Output {
    Command::new(env!("CARGO_BIN_EXE_lockstep"))
        .args(arguments)
        .env("KUBECONFIG", kubeconfig)
        .env_remove("KUBERNETES_SERVICE_HOST")
        .output()
        .expect("lockstep runs")
}

/// The only line on standard error of a failed run.
fn complaint(output: &Output) -> String {
    assert!(!output.status.success());
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(text.trim_end().lines().count(), 1, "one line: {text}");
    text
}

#[test]
fn unreadable_kubeconfig_fails_with_one_line() {
    let missing = complaint(&lockstep(&["run"], "/nowhere/kubeconfig"));
    assert!(missing.contains("/nowhere/kubeconfig") && missing.contains("check KUBECONFIG"), "{missing}");

    let crooked = std::env::temp_dir().join(format!("crooked-{}", std::process::id()));
    std::fs::write(&crooked, "clusters: [{").unwrap();
    let malformed = complaint(&lockstep(&["run"], crooked.to_str().unwrap()));
    assert!(malformed.contains("the kubeconfig cannot be used"), "{malformed}");
    std::fs::remove_file(crooked).unwrap();
}

#[test]
fn invalid_flag_is_named_with_its_valid_values() {
    for (flag, value, hint) in [
        ("--resync", "soon", "such as `30s`"),
        ("--domain", "Not A Domain", "such as `workshop.io`"),
        ("--workers", "0", "1..=256"),
        ("--kinds", "pods", "configmaps, secrets"),
        ("--exclude-namespaces", "a*-", "neither a namespace nor a pattern"),
        ("--ops-bind", "nowhere", "--ops-bind"),
    ] {
        let output = lockstep(&["run", flag, value], "");
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains(flag) && text.contains(hint), "{text}");
    }
}

#[test]
fn invalid_webhook_url_fails_with_one_message() {
    let output = lockstep(&["manifests", "--webhook-url", "http://webhook:9443"], "");
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("--webhook-url") && text.contains("https, a host, no path"), "{text}");
    assert!(output.stdout.is_empty());
}

#[test]
fn namespaces_that_every_cluster_has_are_refused_for_lockstep() {
    for name in ["default", "kube-system"] {
        let output = lockstep(&["manifests", "--namespace", name], "");
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains("a namespace of its own, such as `lockstep-system`"), "{text}");
        assert!(output.stdout.is_empty());
    }
}

#[tokio::test]
async fn unreachable_api_server_is_logged_once_and_retried_until_stopped() {
    let kubeconfig = std::env::temp_dir().join(format!("unreachable-{}", std::process::id()));
    let text = json!({
        "clusters": [{"name": "c", "cluster": {"server": "https://127.0.0.1:1"}}],
        "users": [{"name": "u", "user": {}}],
        "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "c",
    });
    std::fs::write(&kubeconfig, text.to_string()).unwrap();
    let mut lockstep = Lockstep::spawn("unreachable.test", &kubeconfig, MIRROR_ONLY);
    lockstep.wait_log("the API server cannot be reached").await;
    assert!(lockstep.log().contains("check its address"), "{}", lockstep.log());
    assert!(lockstep.stop().await.success());
    assert_eq!(lockstep.log().matches("cannot be reached").count(), 1, "{}", lockstep.log());
    std::fs::remove_file(kubeconfig).unwrap();
}

#[tokio::test]
async fn missing_rbac_verb_is_named_and_work_continues_once_it_is_granted() {
    let cluster = Cluster::new("rbac").await;
    let home = cluster.namespace("home").await;
    let account = json!({"metadata": {"name": "poor"}});
    cluster.post(&format!("/api/v1/namespaces/{home}/serviceaccounts"), &account).await;
    let kubeconfig = cluster.plane.service_account(&home, "poor").unwrap();
    let mut lockstep = Lockstep::spawn(&cluster.domain(), &kubeconfig, MIRROR_ONLY);
    lockstep.wait_log("is forbidden").await;
    let log = lockstep.log();
    assert!(
        log.contains("cannot watch resource") && log.contains("apply the RBAC of `lockstep manifests`"),
        "{log}"
    );

    let binding = |role: &str| {
        json!({
            "metadata": {"name": format!("{}-{role}", cluster.id)},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
            "subjects": [{"kind": "ServiceAccount", "namespace": home, "name": "poor"}],
        })
    };
    let bindings = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings";
    for role in ["lockstep.workshop.io", "lockstep.workshop.io-secrets"] {
        cluster.post(bindings, &binding(role)).await;
    }
    lockstep.wait_ready().await;
    cluster.source(&home, "colors").create().await;
    cluster.wait_data(&home, "colors-synced", json!({"sky": "blue"})).await;

    // A right that is revoked later is reported on the source, and nothing is lost.
    cluster.delete(&format!("{bindings}/{}-lockstep.workshop.io", cluster.id)).await;
    let body = |colour: &str| json!({"data": {"sky": colour}});
    eventually("the loss is noticed", || async {
        cluster
            .merge(&crate::harness::configmap(&home, "colors"), &body(&fastrand::u32(..).to_string()))
            .await;
        (lockstep.metric("lockstep_troubles{reason=\"forbidden\"}") > 0.0).then_some(())
    })
    .await;
    cluster.merge(&crate::harness::configmap(&home, "colors"), &body("red")).await;
    cluster.post(bindings, &binding("lockstep.workshop.io")).await;
    cluster.wait_data(&home, "colors-synced", json!({"sky": "red"})).await;
    lockstep.wait_metric("lockstep_troubles{reason=\"forbidden\"}", 0.0).await;
}

#[tokio::test]
async fn running_as_a_user_instead_of_a_service_account_logs_a_warning() {
    let cluster = Cluster::new("person").await;
    let flags = ["--webhook-bind", &cluster.address];
    let lockstep = Lockstep::spawn(&cluster.domain(), &cluster.plane.admin(), &flags);
    lockstep.wait_log("run Lockstep with a ServiceAccount of its own").await;
    // The webhook configurations are not installed either.
    lockstep.wait_log("lockstep manifests | kubectl apply -f -").await;
}
