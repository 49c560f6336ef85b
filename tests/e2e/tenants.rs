//! What one tenant does keeps no other tenant from working.

use std::path::Path;

use futures::future::join_all;
use k8s_openapi::jiff::{SignedDuration, Timestamp};
use serde_json::{Value, json};

use crate::{
    harness::{Cluster, Lockstep, client_for, configmap, eventually},
    users::{User, manifest},
};

/// A source as a manifest for kubectl.
fn source(cluster: &Cluster, namespace: &str, name: &str, targets: &str) -> String {
    let metadata = json!({
        "name": name, "namespace": namespace, "labels": {cluster.key("managed"): "true"},
        "annotations": {cluster.key("target-namespaces"): targets},
    });
    manifest("ConfigMap", &metadata, &json!({"data": {"from": namespace}}))
}

#[tokio::test]
async fn source_of_a_tenant_does_not_keep_a_pattern_from_other_namespaces() {
    let cluster = Cluster::new("veto").await;
    let (a, b, c) =
        (cluster.namespace("a").await, cluster.namespace("b").await, cluster.namespace("c").await);
    let tenant = cluster.editor("tenant", &[], &[&b]).await;
    let admin = cluster.cluster_editor("admin", &[]).await;
    let (_installed, _lockstep) = cluster.install_and_start(&[]).await;
    tenant.succeeds_with("apply -f -", &source(&cluster, &b, "ca", "."));
    cluster.wait_data(&b, "ca-synced", json!({"from": b})).await;

    let everywhere = source(&cluster, &a, "ca", &format!("{}-*", cluster.id));
    let output = crate::harness::output(&mut admin.kubectl("apply -f -"), &everywhere);
    let warnings = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{warnings}");
    assert!(warnings.contains(&format!("{b}/ca-synced of {b}/ca")), "{warnings}");
    for namespace in [&a, &c] {
        cluster.wait_data(namespace, "ca-synced", json!({"from": a})).await;
    }
    assert_eq!(cluster.configmap(&b, "ca-synced").await.unwrap()["data"]["from"], *b);
    // A namespace listed by name is refused. A user without rights there is not told which source has the name.
    let refused = admin.fails_with("apply -f -", &source(&cluster, &a, "ca", &format!("{a},{b}")));
    assert!(refused.contains(&format!("{b}/ca-synced is already the companion of {b}/ca")), "{refused}");
    let stranger = cluster.editor("stranger", &[], &[&c]).await;
    let refused =
        stranger.fails_with("apply -f -", &source(&cluster, &c, "ca", &format!("{}-*", cluster.id)));
    assert!(refused.contains("in all namespaces") && !refused.contains(&b), "{refused}");
}

/// The codes of a user's requests, without kubectl, and the messages of those that were refused.
async fn create_all(user: &User, home: &str, sources: Vec<Value>) -> Vec<(u16, String)> {
    let client = client_for(user.kubeconfig()).await;
    let path = format!("/api/v1/namespaces/{home}/configmaps");
    join_all(sources.into_iter().map(|source| {
        let request = http::Request::post(&path).header("content-type", "application/json");
        let request = request.body(serde_json::to_vec(&source).unwrap()).unwrap();
        let client = client.clone();
        async move {
            match client.request::<Value>(request).await {
                Ok(_) => (201, String::new()),
                Err(kube::Error::Api(status)) => (status.code, status.message),
                Err(error) => panic!("{error}"),
            }
        }
    }))
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn flood_of_refused_patterns_gets_no_write_of_another_tenant_refused() {
    let cluster = Cluster::new("flood").await;
    let (home, other) = (cluster.namespace("home").await, cluster.namespace("other").await);
    let (alice, mallory) =
        (cluster.editor("alice", &[], &[&home]).await, cluster.editor("mallory", &[], &[&other]).await);
    let (_installed, _lockstep) = cluster.install_and_start(&[]).await;
    let sources = |name: &str, number: usize, targets: &str| -> Vec<Value> {
        let annotations = json!({cluster.key("target-namespaces"): targets});
        let labels = json!({cluster.key("managed"): "true"});
        let metadata =
            |n| json!({"name": format!("{name}-{n}"), "labels": labels, "annotations": annotations});
        (0..number).map(|n| json!({"metadata": metadata(n)})).collect()
    };
    let everywhere = vec!["*"; 50].join(",");
    let flood = async {
        let mut codes = Vec::new();
        for n in 0..10 {
            codes.extend(create_all(&mallory, &other, sources(&format!("flood-{n}"), 40, &everywhere)).await);
        }
        codes
    };
    let own = async {
        let mut codes = Vec::new();
        for n in 0..10 {
            codes.extend(create_all(&alice, &home, sources(&format!("mine-{n}"), 4, ".")).await);
        }
        codes
    };
    let (refused, accepted) = tokio::join!(flood, own);
    assert!(refused.into_iter().all(|(code, _)| code == 403));
    assert!(accepted.iter().all(|(code, _)| *code == 201), "{accepted:?}");
}

#[tokio::test]
async fn default_targets_beyond_the_own_namespace_are_shown_to_the_author() {
    let cluster = Cluster::new("stamped").await;
    let away = cluster.namespace("away").await;
    let annotations = json!({cluster.key("default-target-namespaces"): format!(".,{away}")});
    let home = cluster.namespace_with("home", json!({}), annotations).await;
    let alice = cluster.editor("alice", &[], &[&home, &away]).await;
    let (_installed, _lockstep) = cluster.install_and_start(&[]).await;
    let labels = json!({cluster.key("managed"): "true"});
    let plain =
        manifest("ConfigMap", &json!({"name": "plain", "namespace": home, "labels": labels}), &json!({}));
    let output = crate::harness::output(&mut alice.kubectl("create -f -"), &plain);
    let warnings = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{warnings}");
    assert!(
        warnings.contains("Warning:") && warnings.contains(&format!("`.,{away}`, a default")),
        "{warnings}"
    );
}

async fn spawn(cluster: &Cluster, kubeconfig: &Path, flags: &[&str]) -> Lockstep {
    let mut lockstep = Lockstep::spawn(&cluster.domain(), kubeconfig, flags);
    lockstep.wait_ready().await;
    lockstep
}

// kubectl blocks a thread, and the proxy needs another.
#[tokio::test(flavor = "multi_thread")]
async fn replica_cut_off_while_a_namespace_was_made_anew_still_protects_companions_there() {
    let cluster = Cluster::new("stale").await;
    let Some((proxy, through)) = cluster.api_server_proxy().await else { return };
    let (home, away, alice) = cluster.alice().await;
    let _installed = cluster.install(&["--webhook-url", &cluster.url()]);
    let flags = ["--webhook-bind", &cluster.address, "--no-controller"];
    let webhook = spawn(&cluster, &through, &flags).await;
    cluster.wait_webhook().await;
    let _mirror = cluster.start_controller().await;
    cluster.make_sources(&home, &away, &[]).await;
    cluster.wait_companions(&home, &away).await;

    // A finalizer keeps the namespace until the webhook has seen that it is terminating.
    let held = json!({"metadata": {"name": "held", "finalizers": ["example.com/held"]}});
    cluster.post(&format!("/api/v1/namespaces/{away}/configmaps"), &held).await;
    let path = format!("/api/v1/namespaces/{away}");
    cluster.delete(&path).await;
    let deleted = cluster.get(&path).await.expect("it is held")["metadata"]["deletionTimestamp"].clone();
    let deleted: Timestamp = deleted.as_str().expect("a time").parse().expect("a time");
    cluster.wait_collected(&configmap(&away, "colors-synced")).await;
    let (admin, key) = (cluster.admin(), cluster.key("copy-labels"));
    let probe = format!("annotate --overwrite --dry-run=server configmap colors -n {home} {key}=a");
    eventually("the webhook knows that the namespace is terminating", || async {
        let output = admin.kubectl(&probe).output().expect("kubectl");
        String::from_utf8_lossy(&output.stderr).contains("is terminating").then_some(())
    })
    .await;
    proxy.stall();
    // Times have whole seconds.
    eventually("the next second", || async {
        (Timestamp::now() > deleted + SignedDuration::from_secs(1)).then_some(())
    })
    .await;
    cluster.merge(&configmap(&away, "held"), &json!({"metadata": {"finalizers": null}})).await;
    cluster.wait_collected(&path).await;
    cluster.namespace("away").await;
    let editor = json!([crate::users::all_verbs()]);
    cluster.grant(&alice.name, &alice.subject(), Some(&away), editor).await;
    cluster.wait_data(&away, "colors-synced", json!({"sky": "blue"})).await;

    let refused =
        alice.fails(&format!("patch configmap colors-synced -n {away} -p {{\"data\":{{\"sky\":\"red\"}}}}"));
    assert!(refused.contains("is a companion, kept equal to"), "{refused}");
    assert!(webhook.log().contains("denied"), "the replica that was cut off decided");
}
