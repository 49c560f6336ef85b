//! The commands in denials, warnings and Events work as they are printed: for names with dots, and for Secrets.

use serde_json::json;

use crate::{
    harness::{Cluster, eventually, output},
    users::{User, manifest},
};

/// The commands in a text. A placeholder in capitals stands for what only the reader knows.
fn commands(text: &str) -> Vec<String> {
    let starts: Vec<usize> = text.match_indices("kubectl ").map(|(start, _)| start).collect();
    let command = |start: usize| {
        let rest = &text[start..];
        let end =
            ["; ", " (", "\n", ", or "].iter().filter_map(|end| rest.find(end)).min().unwrap_or(rest.len());
        rest[..end].to_owned()
    };
    starts.into_iter().map(command).collect()
}

struct Scene {
    cluster: Cluster,
    admin: User,
}

impl Scene {
    /// Runs each command of a text as the admin would.
    fn run(&self, text: &str, expected: usize) {
        let found = commands(text);
        assert_eq!(found.len(), expected, "{text}");
        for command in found {
            let command = command.replace(" NAME ", " spare ").replace("=NAME", "=other.name");
            let output = self.admin.shell(&command);
            let complaint = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "{command}: {complaint}");
        }
    }
}

/// What a command prints as errors or warnings.
fn complaint(user: &User, line: &str, file: &str) -> String {
    String::from_utf8_lossy(&output(&mut user.kubectl(line), file).stderr).into_owned()
}

#[tokio::test]
async fn every_command_about_a_companion_works_as_printed() {
    let cluster = Cluster::new("paste").await;
    let (home, away, alice) = cluster.alice().await;
    let (_installed, _lockstep) = cluster.install_and_start(&[]).await;
    let scene = Scene { admin: cluster.admin(), cluster };
    let (cluster, key) = (&scene.cluster, |name: &str| scene.cluster.key(name));
    for kind in ["configmap", "secret"] {
        let plain = |name: &str| match kind {
            "secret" => format!("create secret generic {name} -n {home} --from-literal=a=b"),
            _ => format!("create configmap {name} -n {home} --from-literal=a=b"),
        };
        // FORGED names the original as NAME, in the current namespace.
        scene.admin.succeeds(&plain("spare").replace(&home, "default"));
        alice.succeeds(&plain("ca.bundle.v1"));
        alice.succeeds(&format!("label {kind} ca.bundle.v1 -n {home} {}=true", key("managed")));
        alice.succeeds(&format!(
            "annotate --overwrite {kind} ca.bundle.v1 -n {home} {}=.,{away}",
            key("target-namespaces")
        ));
        let at = format!("/api/v1/namespaces/{away}/{kind}s/ca.bundle.v1-synced");
        eventually("the companion", || async { cluster.get(&at).await }).await;
        let companion = format!("{kind} ca.bundle.v1-synced -n {away}");

        scene.run(&complaint(&alice, &format!("annotate {companion} a=b"), ""), 1);
        // A new object in the place of a companion.
        let labels = json!({"name": "x", "namespace": home, "labels": {key("companion"): "true"}});
        let name = if kind == "secret" { "Secret" } else { "ConfigMap" };
        scene.run(&complaint(&alice, "create -f -", &manifest(name, &labels, &json!({}))), 1);
        scene.admin.succeeds(&format!("label --overwrite {kind} spare -n default {}-", key("managed")));
        // `protect: all` refuses deletes, and says how to stop mirroring and how to allow them.
        alice.succeeds(&format!("annotate --overwrite {kind} ca.bundle.v1 -n {home} {}=all", key("protect")));
        let refused = eventually("the delete is refused", || async {
            let text = complaint(&alice, &format!("delete {companion} --dry-run=server"), "");
            text.contains("denied the request").then_some(text)
        })
        .await;
        scene.run(&refused, 2);
        alice.succeeds(&format!("label {kind} ca.bundle.v1 -n {home} {}=true", key("managed")));
        eventually("the companion is back", || async { cluster.get(&at).await }).await;
        // Removing the label.
        scene.run(&complaint(&alice, &format!("label {companion} {}-", key("companion")), ""), 1);
        alice.succeeds(&format!("label {kind} ca.bundle.v1 -n {home} {}=true", key("managed")));
        // A companion under another name, whose delete is refused.
        alice.succeeds(&format!(
            "annotate {kind} ca.bundle.v1 -n {home} {}=trusted.ca",
            key("companion-name")
        ));
        let other = format!("/api/v1/namespaces/{away}/{kind}s/trusted.ca");
        eventually("the renamed companion", || async { cluster.get(&other).await }).await;
        let refused = complaint(&alice, &format!("delete {kind} trusted.ca -n {away}"), "");
        scene.run(&refused, 2);
        // A new object that takes the name of a companion.
        let paused = json!({key("paused"): "true"});
        let late = json!({
            "name": "late.one", "namespace": home, "labels": {key("managed"): "true"}, "annotations": paused,
        });
        alice.succeeds_with("create -f -", &manifest(name, &late, &json!({"data": {"a": "YQ=="}})));
        let refused = eventually("the name is kept free", || async {
            let text = complaint(&alice, &plain("late.one-synced --dry-run=server"), "");
            text.contains("denied the request").then_some(text)
        })
        .await;
        scene.run(&refused, 1);
        for leftover in ["late.one", "ca.bundle.v1", "spare"] {
            let namespace = if leftover == "spare" { "default" } else { home.as_str() };
            scene.admin.succeeds(&format!("delete {kind} {leftover} -n {namespace}"));
        }
    }
}

#[tokio::test]
async fn command_that_lets_a_namespace_accept_keeps_what_it_accepts_already() {
    let cluster = Cluster::new("keeps").await;
    let home = cluster.namespace("home").await;
    let accept = json!({cluster.key("accept-from"): "first, team-*, !team-x"});
    let away = cluster.namespace_with("away", json!({}), accept).await;
    let (_installed, _lockstep) = cluster.install_and_start(&[]).await;
    let bob = cluster.editor("bob", &[], &[&home]).await;
    let scene = Scene { admin: cluster.admin(), cluster };
    let cluster = &scene.cluster;
    let metadata = json!({
        "name": "ca.v1", "namespace": home, "labels": {cluster.key("managed"): "true"},
        "annotations": {cluster.key("target-namespaces"): away},
    });
    // Where no list could be added to, the command opens the namespace.
    let excludes = json!({cluster.key("accept-from"): format!("team-*,!{home}")});
    let shut = cluster.namespace_with("shut", json!({}), excludes).await;
    let source = manifest("ConfigMap", &metadata, &json!({"data": {"a": "b"}})).replace(&away, &shut);
    let refused = bob.fails_with("create -f -", &source);
    assert!(refused.ends_with(&format!(" match {home}, with kubectl edit namespace {shut}\n")), "{refused}");
    scene.run(&refused, 1);
    for kind in ["ConfigMap", "Secret"] {
        let source = manifest(kind, &metadata, &json!({"data": {"a": "YQ=="}}));
        let refused = bob.fails_with("create -f -", &source);
        scene.run(&refused, 1);
        let namespace = cluster.get(&format!("/api/v1/namespaces/{away}")).await.expect("the namespace");
        assert_eq!(
            namespace["metadata"]["annotations"][cluster.key("accept-from")],
            format!("first,team-*,!team-x,{home}")
        );
        eventually("Bob may", || async {
            output(&mut bob.kubectl("create -f -"), &source).status.success().then_some(())
        })
        .await;
        let companion = format!("/api/v1/namespaces/{away}/{}s/ca.v1-synced", kind.to_lowercase());
        eventually("the companion", || async { cluster.get(&companion).await }).await;
        let shut =
            json!({"metadata": {"annotations": {cluster.key("accept-from"): "first, team-*, !team-x"}}});
        cluster.merge(&format!("/api/v1/namespaces/{away}"), &shut).await;
        eventually("the webhook has seen it", || async {
            let line = "create -f - --dry-run=server";
            let other = source.replace("ca.v1", "ca.v2");
            (!output(&mut bob.kubectl(line), &other).status.success()).then_some(())
        })
        .await;
    }
}
