//! The roles grant exactly what Lockstep calls, according to the audit log.

use std::collections::BTreeSet;

use serde_json::{Value, json};

use crate::harness::{Cluster, configmap, dedicated_control_plane, eventually, secret};

/// Scope (all namespaces, or only the objects of this instance), resource and verb.
type Permission = (&'static str, String, String);

const OWN_NAMESPACE: &str = "lockstep-system";

#[tokio::test]
async fn roles_grant_exactly_the_verbs_that_are_called() {
    // Without streaming lists Lockstep calls every verb that it ever uses.
    let Some(plane) = dedicated_control_plane(&["--feature-gates=WatchList=false"]) else {
        return;
    };
    let cluster = Cluster::on(plane, "privilege").await;
    let instance = format!("lockstep.{}", cluster.domain());
    let (_installed, mut lockstep) = cluster.install_and_start(&[]).await;
    let (home, away) = (cluster.namespace("home").await, cluster.namespace("away").await);

    for (kind, path) in [("configmaps", configmap as fn(&str, &str) -> String), ("secrets", secret)] {
        // A conflict: the foreign object is read, and an Event is written.
        let held = json!({"metadata": {"name": "held"}});
        cluster.post(&format!("/api/v1/namespaces/{home}/{kind}"), &held).await;
        let source = |name: &str| match kind {
            "secrets" => cluster.source(&home, name).secret("Opaque", json!({"sky": "Ymx1ZQ=="})),
            _ => cluster.source(&home, name),
        };
        source(&format!("blocked-{kind}")).annotate("companion-name", "held").create().await;
        cluster.wait_event(&home, &format!("blocked-{kind}"), "Conflict").await;

        // The companion is created, healed twice (which updates one Event), updated and deleted.
        source("colors").annotate("target-namespaces", &away).create().await;
        let companion = path(&away, "colors-synced");
        let mut uid = Value::Null;
        for _ in 0..3 {
            uid = eventually("a new companion", || async {
                let now = cluster.get(&companion).await?["metadata"]["uid"].clone();
                (now != uid).then_some(now)
            })
            .await;
            cluster.delete(&companion).await;
        }
        eventually("the companion is recreated", || async { cluster.get(&companion).await }).await;
        cluster.merge(&path(&home, "colors"), &json!({"data": {"sky": "cmVk"}})).await;
        eventually("the companion is updated", || async {
            (cluster.get(&companion).await?["data"]["sky"] == "cmVk").then_some(())
        })
        .await;
        cluster.delete(&path(&home, "colors")).await;
        cluster.wait_gone(&companion).await;
    }
    // A key that does not belong into the CA Secret is removed.
    cluster.merge(&secret(OWN_NAMESPACE, &instance), &json!({"data": {"old.crt": "eA=="}})).await;
    eventually("the CA Secret is repaired", || async {
        cluster.get(&secret(OWN_NAMESPACE, &instance)).await?["data"]["old.crt"].is_null().then_some(())
    })
    .await;
    assert!(lockstep.stop().await.success());

    let granted = granted(&cluster, &instance).await;
    // The last call, which releases the Lease, is in the audit log, too.
    let calls = || called(&cluster, &instance);
    eventually("the audit log is complete", || async { (calls().len() >= granted.len()).then_some(()) })
        .await;
    assert_eq!(calls(), granted);
}

/// What the roles of this instance grant.
async fn granted(cluster: &Cluster, instance: &str) -> BTreeSet<Permission> {
    let rbac = "/apis/rbac.authorization.k8s.io/v1";
    let mut permissions = BTreeSet::new();
    for (scope, path) in [
        ("all namespaces", format!("{rbac}/clusterroles/{instance}")),
        ("all namespaces", format!("{rbac}/clusterroles/{instance}-secrets")),
        ("this instance", format!("{rbac}/namespaces/{OWN_NAMESPACE}/roles/{instance}")),
    ] {
        let role = cluster.get(&path).await.expect("a role");
        let list =
            |value: &Value| -> Vec<String> { serde_json::from_value(value.clone()).unwrap_or_default() };
        for rule in role["rules"].as_array().expect("rules") {
            let names = list(&rule["resourceNames"]);
            assert!(names.is_empty() || names == [instance], "{names:?}");
            let scope = if names.is_empty() { scope } else { "this instance" };
            for resource in list(&rule["resources"]) {
                let verbs = list(&rule["verbs"]);
                permissions.extend(verbs.into_iter().map(|verb| (scope, resource.clone(), verb)));
            }
        }
    }
    assert!(permissions.iter().all(|(_, resource, verb)| resource != "*" && verb != "*"), "{permissions:?}");
    permissions
}

/// What Lockstep's ServiceAccount called, denied calls included.
fn called(cluster: &Cluster, instance: &str) -> BTreeSet<Permission> {
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
            // Every authenticated user has this permission.
            if resource == "selfsubjectreviews" {
                return None;
            }
            let one = at["name"] == instance || (at["namespace"] == OWN_NAMESPACE && verb == "create");
            let scope = if one && resource != "events" { "this instance" } else { "all namespaces" };
            Some((scope, resource, verb))
        })
        .collect()
}
