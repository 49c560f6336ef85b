//! The roles grant what Lockstep calls, and nothing else: read off the audit log.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::harness::{Cluster, configmap, dedicated_control_plane, eventually, secret};

/// Where a right holds: in all namespaces, or only for what is there once an instance.
type Right = (&'static str, String, String);

const OWN_NAMESPACE: &str = "lockstep-system";

#[tokio::test]
async fn the_roles_grant_what_is_called_and_nothing_else() {
    // A server that cannot stream lists: there, everything that is ever called is called.
    let Some(plane) = dedicated_control_plane("privileges", &["--feature-gates=WatchList=false"]) else {
        return;
    };
    let cluster = Cluster::on(plane, "privileges").await;
    let instance = format!("lockstep.{}", cluster.domain());
    let (_installed, mut lockstep) = cluster.install_and_start(&[]).await;
    let (home, away) = (cluster.namespace("home").await, cluster.namespace("away").await);

    for (kind, path) in [("configmaps", configmap as fn(&str, &str) -> String), ("secrets", secret)] {
        // A name that is held: read, and told.
        let held = json!({"metadata": {"name": "held"}});
        cluster.post(&format!("/api/v1/namespaces/{home}/{kind}"), &held).await;
        let source = |name: &str| match kind {
            "secrets" => cluster.source(&home, name).secret("Opaque", json!({"sky": "Ymx1ZQ=="})),
            _ => cluster.source(&home, name),
        };
        source(&format!("blocked-{kind}")).annotate("companion-name", "held").create().await;
        cluster.wait_event(&home, &format!("blocked-{kind}"), "Conflict").await;

        // Made, healed twice in the same way (one Event that counts), changed, deleted.
        source("colors").annotate("target-namespaces", &away).create().await;
        let companion = path(&away, "colors-synced");
        let mut uid = Value::Null;
        for _ in 0..3 {
            uid = eventually("a companion that is new", || async {
                let now = cluster.get(&companion).await?["metadata"]["uid"].clone();
                (now != uid).then_some(now)
            })
            .await;
            cluster.delete(&companion).await;
        }
        eventually("it is healed", || async { cluster.get(&companion).await }).await;
        cluster.merge(&path(&home, "colors"), &json!({"data": {"sky": "cmVk"}})).await;
        eventually("it follows", || async {
            (cluster.get(&companion).await?["data"]["sky"] == "cmVk").then_some(())
        })
        .await;
        cluster.delete(&path(&home, "colors")).await;
        cluster.wait_gone(&companion).await;
    }
    // Something that does not belong into the CA Secret is put right.
    cluster.merge(&secret(OWN_NAMESPACE, &instance), &json!({"data": {"old.crt": "eA=="}})).await;
    eventually("the CA Secret is mended", || async {
        cluster.get(&secret(OWN_NAMESPACE, &instance)).await?["data"]["old.crt"].is_null().then_some(())
    })
    .await;
    assert!(lockstep.stop().await.success());

    let granted = granted(&cluster, &instance).await;
    // The last call, which gives the Lease back, is in the log as well.
    let calls = || called(&cluster, &instance);
    eventually("the audit log is complete", || async { (calls().len() >= granted.len()).then_some(()) })
        .await;
    assert_eq!(calls(), granted);
}

/// What the roles of this instance say.
async fn granted(cluster: &Cluster, instance: &str) -> BTreeSet<Right> {
    let rbac = "/apis/rbac.authorization.k8s.io/v1";
    let mut rights = BTreeSet::new();
    for (scope, path) in [
        ("everywhere", format!("{rbac}/clusterroles/{instance}")),
        ("everywhere", format!("{rbac}/clusterroles/{instance}-secrets")),
        ("its own", format!("{rbac}/namespaces/{OWN_NAMESPACE}/roles/{instance}")),
    ] {
        let role = cluster.get(&path).await.expect("a role");
        let list =
            |value: &Value| -> Vec<String> { serde_json::from_value(value.clone()).unwrap_or_default() };
        for rule in role["rules"].as_array().expect("rules") {
            let names = list(&rule["resourceNames"]);
            assert!(names.is_empty() || names == [instance], "{names:?}");
            let scope = if names.is_empty() { scope } else { "its own" };
            for resource in list(&rule["resources"]) {
                let verbs = list(&rule["verbs"]);
                rights.extend(verbs.into_iter().map(|verb| (scope, resource.clone(), verb)));
            }
        }
    }
    assert!(rights.iter().all(|(_, resource, verb)| resource != "*" && verb != "*"), "{rights:?}");
    rights
}

/// What Lockstep's identity called. A denied call counts, too: it was meant.
fn called(cluster: &Cluster, instance: &str) -> BTreeSet<Right> {
    cluster
        .audit_log()
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter(|entry| {
            entry["user"]["username"] == format!("system:serviceaccount:{OWN_NAMESPACE}:lockstep")
        })
        .filter_map(|entry| {
            let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
            let (at, verb) = (&entry["objectRef"], text(&entry["verb"]));
            let resource = text(&at["resource"]);
            // Everybody may ask who they are.
            if resource == "selfsubjectreviews" {
                return None;
            }
            let one = at["name"] == instance || (at["namespace"] == OWN_NAMESPACE && verb == "create");
            let scope = if one && resource != "events" { "its own" } else { "everywhere" };
            Some((scope, resource, verb))
        })
        .collect()
}
