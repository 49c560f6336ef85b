//! A refused source gets a Warning Event and counts in a gauge; nothing is written for it.

use serde_json::json;

use crate::harness::{CONTROLLERS, Cluster, RETRY, configmap, eventually, secret, within};

#[tokio::test]
async fn long_names_companions_as_sources_and_malformed_annotations_are_refused() {
    let Some(cluster) = Cluster::audited("malformed").await else { return };
    let lockstep = cluster.start_controller().await;
    let home = cluster.namespace("home").await;
    let long = "x".repeat(250);
    let companion = cluster.key("companion");
    cluster.source(&home, &long).create().await;
    cluster
        .source(&home, "copy")
        .with("/metadata/labels", json!({cluster.key("managed"): "true", companion: "true"}))
        .create()
        .await;
    cluster.source(&home, "crooked").annotate("target-namespaces", "a*-").create().await;
    for (name, reason, text) in [
        (long.as_str(), "name_too_long", "253 are allowed"),
        ("copy", "is_companion", "itself a companion"),
        ("crooked", "malformed", "`a*-` is neither `.`, a namespace nor a pattern"),
    ] {
        let note = cluster.wait_event(&home, name, "Refused").await;
        assert!(note.contains(text), "{note}");
        lockstep.wait_metric(&format!("lockstep_troubles{{reason=\"{reason}\"}}"), 1.0).await;
    }
    let requests = cluster.complete_audit(&home).await;
    assert!(requests.iter().all(|(verb, ..)| verb == "get"), "something was written: {requests:?}");

    // A source that becomes faulty keeps its companion, which is updated again once the source is repaired.
    cluster.source(&home, "colors").create().await;
    cluster.wait_data(&home, "colors-synced", json!({"sky": "blue"})).await;
    let path = configmap(&home, "colors");
    let crooked =
        json!({"metadata": {"annotations": {cluster.key("keys"): "a=x,b=x"}}, "data": {"sky": "red"}});
    cluster.merge(&path, &crooked).await;
    cluster.wait_event(&home, "colors", "Refused").await;
    assert_eq!(cluster.configmap(&home, "colors-synced").await.unwrap()["data"]["sky"], "blue");
    cluster.merge(&path, &json!({"metadata": {"annotations": {cluster.key("keys"): null}}})).await;
    cluster.wait_data(&home, "colors-synced", json!({"sky": "red"})).await;
    lockstep.wait_metric("lockstep_troubles{reason=\"malformed\"}", 1.0).await;
}

#[tokio::test]
async fn annotations_over_the_limits_are_refused_in_one_short_line() {
    let cluster = Cluster::new("limits").await;
    let lockstep = cluster.start_controller().await;
    let home = cluster.namespace("home").await;
    // About as many items as the API server lets an annotation have.
    let list = (0..45_000).map(|n| format!("{n:x}")).collect::<Vec<_>>().join(",");
    let values = format!("team in ({list})");
    for (name, annotation, value) in [
        ("keys", "keys", &list),
        ("targets", "target-namespaces", &list),
        ("selector", "target-selector", &values),
        ("labels", "copy-labels", &list),
        ("name", "companion-name", &list),
    ] {
        cluster.source(&home, name).annotate(annotation, value).create().await;
        let note = cluster.wait_event(&home, name, "Refused").await;
        assert!(note.contains(&cluster.key(annotation)) && note.len() < 400, "{note}");
    }
    let open = cluster.namespace_with("open", json!({}), json!({cluster.key("accept-from"): list})).await;
    lockstep.wait_log(&format!("\"namespace\":\"{open}\"")).await;
    let log = lockstep.log();
    let longest = log.lines().map(str::len).max().unwrap_or_default();
    assert!(longest < 2000, "a line of {longest} bytes");
}

#[tokio::test]
async fn unmirrorable_secret_types_reserved_names_and_missing_type_keys_are_refused() {
    let Some(cluster) = Cluster::audited("bound").await else { return };
    let lockstep = cluster.start_controller().await;
    let home = cluster.namespace("home").await;
    let account = json!({"metadata": {"name": "robot"}});
    cluster.post(&format!("/api/v1/namespaces/{home}/serviceaccounts"), &account).await;
    cluster
        .source(&home, "token")
        .secret("kubernetes.io/service-account-token", json!({}))
        .with("/metadata/annotations/kubernetes.io~1service-account.name", json!("robot"))
        .create()
        .await;
    let bootstrap = json!({"token-id": "YWJjZGVm"});
    cluster.source(&home, "bootstrap").secret("bootstrap.kubernetes.io/token", bootstrap).create().await;
    cluster.source(&home, "root").annotate("companion-name", "kube-root-ca.crt").create().await;
    let tls = json!({"tls.crt": "", "tls.key": ""});
    cluster.source(&home, "tls").secret("kubernetes.io/tls", tls).annotate("keys", "tls.crt").create().await;
    for (name, text) in [
        ("token", "kubernetes.io/service-account-token"),
        ("bootstrap", "bootstrap.kubernetes.io/token"),
        ("root", "kube-root-ca.crt"),
        ("tls", "needs the key tls.key"),
    ] {
        let note = cluster.wait_event(&home, name, "Refused").await;
        assert!(note.contains(text), "{note}");
    }
    lockstep.wait_metric("lockstep_troubles{reason=\"refused\"}", 4.0).await;
    for name in ["token-synced", "bootstrap-synced", "tls-synced"] {
        assert!(cluster.get(&secret(&home, name)).await.is_none(), "{name}");
    }
    assert_eq!(cluster.complete_audit(&home).await, [], "there is nothing to ask or to write");
}

#[tokio::test]
async fn invalid_companion_is_not_retried_until_the_source_changes() {
    let Some(cluster) = Cluster::audited("invalid").await else { return };
    let lockstep = cluster.start_mirror_with(&["--resync", "100ms"]).await;
    let home = cluster.namespace("home").await;
    // As many annotations as the API server accepts; with those of Lockstep, the companion has too many.
    let large = "x".repeat(262_000);
    cluster
        .source(&home, "colors")
        .with("/metadata/annotations/example.com~1large", json!(large))
        .annotate("copy-annotations", "example.com/large")
        .create()
        .await;
    let note = cluster.wait_event(&home, "colors", "Invalid").await;
    assert!(note.contains("metadata.annotations"), "{note}");
    assert!(!note.contains("xxxx"), "{note}");
    lockstep.wait_metric("lockstep_troubles{reason=\"invalid\"}", 1.0).await;
    // Many reconciles later, there was still only one attempt.
    let looks = lockstep.metric("lockstep_reconciles_total{result=\"trouble\"}");
    eventually("ten more looks", || async {
        (lockstep.metric("lockstep_reconciles_total{result=\"trouble\"}") >= looks + 10.0).then_some(())
    })
    .await;
    assert_eq!(cluster.complete_audit(&home).await, [("create".to_owned(), "colors-synced".to_owned(), 422)]);

    let smaller = json!({"metadata": {"annotations": {"example.com/large": "small"}}});
    cluster.merge(&configmap(&home, "colors"), &smaller).await;
    cluster.wait_data(&home, "colors-synced", json!({"sky": "blue"})).await;
    lockstep.wait_metric("lockstep_troubles{reason=\"invalid\"}", 0.0).await;
}

#[tokio::test]
async fn exceeded_quota_is_reported_and_retried() {
    let cluster = Cluster::new("quota").await;
    let lockstep = cluster.start_controller().await;
    let (home, away) = (cluster.namespace("home").await, cluster.namespace("away").await);
    let quota = json!({"metadata": {"name": "none"}, "spec": {"hard": {"count/configmaps": "0"}}});
    let quotas = format!("/api/v1/namespaces/{away}/resourcequotas");
    cluster.post(&quotas, &quota).await;
    let probe = format!("/api/v1/namespaces/{away}/configmaps?dryRun=All");
    let object = json!({"metadata": {"name": "probe"}});
    let counts = eventually("the quota counts", || async {
        let answer = cluster.try_request("POST", &probe, Some(("application/json", &object))).await;
        let counted = cluster.get(&format!("{quotas}/none")).await?["status"]["used"].is_object();
        (counted && answer == Err(403)).then_some(())
    });
    within(CONTROLLERS, counts).await;
    cluster.source(&home, "colors").annotate("target-namespaces", &away).create().await;
    let note = cluster.wait_event(&home, "colors", "Forbidden").await;
    assert!(note.contains("exceeded quota: none"), "{note}");
    // It is warned about once, with the target, however often the write is retried.
    let refused = || lockstep.metric("lockstep_api_calls_total{verb=\"create\",code=\"403\"}");
    within(RETRY, eventually("retries", || async { (refused() >= 3.0).then_some(()) })).await;
    let log = lockstep.log();
    let warnings: Vec<&str> = log.lines().filter(|line| line.contains("WARN")).collect();
    assert!(warnings.len() == 1 && warnings[0].contains(&format!("{away}/colors-synced")), "{warnings:#?}");
    cluster.delete(&format!("{quotas}/none")).await;
    within(RETRY, cluster.wait_data(&away, "colors-synced", json!({"sky": "blue"}))).await;
}
