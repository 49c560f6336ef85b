//! Namespaces that the controller protects by itself, without webhook or policy.

use serde_json::json;

use crate::harness::{Cluster, configmap, eventually};

#[tokio::test]
async fn locksteps_own_namespace_has_neither_sources_nor_targets() {
    let cluster = Cluster::new("own").await;
    let (own, home) = (cluster.namespace("system").await, cluster.namespace("home").await);
    let _lockstep = cluster.start_mirror_with(&["--namespace", &own]).await;
    cluster.source(&own, "inside").annotate("target-namespaces", &home).create().await;
    let note = cluster.wait_event(&own, "inside", "Refused").await;
    assert!(note.contains("own namespace"), "{note}");
    cluster
        .source(&home, "outside")
        .annotate("target-namespaces", &format!(".,{own},{}*", cluster.id))
        .create()
        .await;
    cluster.wait_data(&home, "outside-synced", json!({"sky": "blue"})).await;
    cluster.wait_event(&home, "outside", "NotAccepted").await;
    assert!(cluster.configmap(&own, "outside-synced").await.is_none());
    assert!(cluster.configmap(&home, "inside-synced").await.is_none());
}

#[tokio::test]
async fn kube_or_excluded_namespace_is_a_target_only_if_accept_from_allows_it() {
    let cluster = Cluster::new("shut").await;
    let excluded = cluster.ns("shut");
    let _lockstep = cluster.start_mirror_with(&["--exclude-namespaces", &excluded]).await;
    let home = cluster.namespace("home").await;
    let never = cluster.namespace_with("never", json!({cluster.key("exclude"): "true"}), json!({})).await;
    cluster.namespace("shut").await;
    // The prefix kube- is what is tested, so this name cannot start with the test's id.
    let kube = format!("kube-{}", cluster.id);
    let body = json!({"metadata": {"name": kube}});
    cluster.post("/api/v1/namespaces", &body).await;

    let targets = format!(".,{kube},{excluded},{never}");
    cluster.source(&home, "colors").annotate("target-namespaces", &targets).create().await;
    cluster.wait_data(&home, "colors-synced", json!({"sky": "blue"})).await;
    cluster.wait_event(&home, "colors", "NotAccepted").await;
    cluster.wait_event(&home, "colors", "Mirrored").await;
    for namespace in [&kube, &excluded, &never] {
        assert!(cluster.configmap(namespace, "colors-synced").await.is_none(), "{namespace}");
    }
    let accept =
        json!({"metadata": {"annotations": {cluster.key("accept-from"): format!("elsewhere,{home}")}}});
    // `never` is changed first: once the others have companions, its change has been seen.
    for namespace in [&never, &kube, &excluded] {
        cluster.merge(&format!("/api/v1/namespaces/{namespace}"), &accept).await;
    }
    for namespace in [&kube, &excluded] {
        cluster.wait_data(namespace, "colors-synced", json!({"sky": "blue"})).await;
    }
    assert!(cluster.configmap(&never, "colors-synced").await.is_none(), "exclude=true wins over accept-from");

    // Without accept-from the companion is deleted again.
    let shut = json!({"metadata": {"annotations": {cluster.key("accept-from"): null}}});
    cluster.merge(&format!("/api/v1/namespaces/{kube}"), &shut).await;
    cluster.wait_gone(&configmap(&kube, "colors-synced")).await;
}

#[tokio::test]
async fn patterns_and_adopt_do_not_reach_kube_namespaces_or_locksteps_own() {
    let cluster = Cluster::new("patterns").await;
    let home = cluster.namespace("home").await;
    let labels = json!({"env": cluster.id});
    let accept = json!({cluster.key("accept-from"): home, cluster.key("accept-adopt-from"): home});
    let own = cluster.namespace_with("system", labels.clone(), accept).await;
    let kube = format!("kube-{}", cluster.id);
    cluster.post("/api/v1/namespaces", &json!({"metadata": {"name": kube, "labels": labels}})).await;
    let theirs = json!({"metadata": {"name": "vital"}, "data": {"theirs": "1"}});
    for namespace in [&own, &kube] {
        cluster.post(&format!("/api/v1/namespaces/{namespace}/configmaps"), &theirs).await;
    }
    let _lockstep = cluster.start_mirror_with(&["--namespace", &own]).await;
    let source = |name: &str| cluster.source(&home, name).annotate("adopt", "true");
    let prefixes = format!(".,{kube}*,{own}*");
    source("one").annotate("target-namespaces", &prefixes).annotate("companion-name", "vital").create().await;
    let selector = format!("env={}", cluster.id);
    let both = source("two").annotate("target-namespaces", ".").annotate("target-selector", &selector);
    both.create().await;
    for (source, name) in [("one", "vital"), ("two", "two-synced")] {
        cluster.wait_data(&home, name, json!({"sky": "blue"})).await;
        cluster.wait_event(&home, source, "Mirrored").await;
    }
    for namespace in [&own, &kube] {
        assert_eq!(cluster.configmap(namespace, "vital").await.unwrap()["data"], theirs["data"]);
        assert!(cluster.configmap(namespace, "two-synced").await.is_none(), "{namespace}");
    }
    // With accept-from, the same sources reach the namespace.
    let accepts = json!({cluster.key("accept-from"): home, cluster.key("accept-adopt-from"): home});
    let accept = json!({"metadata": {"annotations": accepts}});
    cluster.merge(&format!("/api/v1/namespaces/{kube}"), &accept).await;
    for name in ["vital", "two-synced"] {
        cluster.wait_data(&kube, name, json!({"sky": "blue"})).await;
    }
    assert_eq!(cluster.configmap(&own, "vital").await.unwrap()["data"], theirs["data"]);
}

/// The rights of a source's author are not checked again, so the owner of a new namespace decides.
#[tokio::test]
async fn namespace_made_anew_with_exclude_or_without_accept_from_gets_no_companion() {
    let Some(cluster) = Cluster::audited("anew").await else { return };
    let (home, excluded) = (cluster.namespace("home").await, cluster.ns("excluded"));
    let accept = json!({cluster.key("accept-from"): home});
    let _lockstep = cluster.start_mirror_with(&["--exclude-namespaces", &excluded]).await;
    cluster.namespace("plain").await;
    cluster.namespace("open").await;
    cluster.namespace_with("excluded", json!({}), accept).await;
    let names = ["plain", "open", "excluded"];
    let targets = names.map(|name| cluster.ns(name)).join(",");
    cluster.source(&home, "colors").annotate("target-namespaces", &targets).create().await;
    for name in names {
        cluster.wait_data(&cluster.ns(name), "colors-synced", json!({"sky": "blue"})).await;
        let path = format!("/api/v1/namespaces/{}", cluster.ns(name));
        cluster.delete(&path).await;
        cluster.wait_collected(&path).await;
    }
    // `open` is made last: once it has its companion, the others have been seen.
    cluster.namespace_with("plain", json!({cluster.key("exclude"): "true"}), json!({})).await;
    let elsewhere = json!({cluster.key("accept-from"): "elsewhere"});
    cluster.namespace_with("excluded", json!({}), elsewhere).await;
    cluster.namespace("open").await;
    cluster.wait_data(&cluster.ns("open"), "colors-synced", json!({"sky": "blue"})).await;
    let creates = |audit: Vec<(String, String, u64)>| {
        audit.iter().filter(|(verb, _, code)| verb == "create" && *code == 201).count()
    };
    let created = async |name: &str| creates(cluster.complete_audit(&cluster.ns(name)).await);
    eventually("the second create is audited", || async {
        (creates(cluster.audit(&cluster.ns("open"))) >= 2).then_some(())
    })
    .await;
    assert_eq!(created("open").await, 2);
    for name in ["plain", "excluded"] {
        assert!(cluster.configmap(&cluster.ns(name), "colors-synced").await.is_none(), "{name}");
        assert_eq!(created(name).await, 1, "not even for a moment: {name}");
    }
}

#[tokio::test]
async fn default_targets_of_a_namespace_have_no_effect_until_the_webhook_stamps_them() {
    let cluster = Cluster::new("unstamped").await;
    let away = cluster.namespace_with("away", json!({"env": cluster.id}), json!({})).await;
    let defaults = json!({
        cluster.key("default-target-namespaces"): away,
        cluster.key("default-target-selector"): format!("env={}", cluster.id),
    });
    let home = cluster.namespace_with("home", json!({}), defaults).await;
    let _lockstep = cluster.start_controller().await;
    cluster.source(&home, "colors").create().await;
    cluster.wait_data(&home, "colors-synced", json!({"sky": "blue"})).await;
    // The Event is written after all writes of the reconcile.
    let note = cluster.wait_event(&home, "colors", "Mirrored").await;
    assert!(note.starts_with("created 1: "), "{note}");
    assert!(cluster.configmap(&away, "colors-synced").await.is_none());
}
