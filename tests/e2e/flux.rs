//! Sources in Git, with the code by which Flux applies, diffs and prunes, and by which it and others judge status.
//! `make test-interop` runs this: Go builds that code for minutes.

use std::process::{Command, Output};

use controlplane::Binaries;
use serde_json::{Value, json};

use crate::harness::{Cluster, configmap, eventually, output, run, secret};

/// What Flux does with manifests, as the admin.
struct Flux<'a> {
    cluster: &'a Cluster,
    binaries: Binaries,
}

impl Flux<'_> {
    fn try_to(&self, command: &str, manifests: &[Value]) -> Output {
        let text: Vec<String> = manifests.iter().map(Value::to_string).collect();
        let mut flux = Command::new(self.binaries.dir().join("flux"));
        output(flux.arg(command).env("KUBECONFIG", self.cluster.plane.admin()), &text.join("\n---\n"))
    }

    /// What it printed; it must succeed. Names of namespaces are cut to those that the test chose.
    fn does(&self, command: &str, manifests: &[Value]) -> Vec<String> {
        let output = self.try_to(command, manifests);
        assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8_lossy(&output.stdout).replace(&format!("{}-", self.cluster.id), "");
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    }
}

fn manifest(
    cluster: &Cluster,
    kind: &str,
    namespace: &str,
    name: &str,
    annotations: Value,
    data: Value,
) -> Value {
    json!({
        "apiVersion": "v1", "kind": kind,
        "metadata": {
            "name": name, "namespace": namespace, "annotations": annotations,
            "labels": {cluster.key("managed"): "true", "team": "platform"},
        },
        "data": data,
    })
}

#[tokio::test]
async fn flux_applies_and_prunes_sources_finds_no_drift_and_leaves_companions_alone() {
    let cluster = Cluster::new("flux").await;
    let away = cluster.namespace("away").await;
    let defaults = json!({cluster.key("default-target-namespaces"): away});
    let home = cluster.namespace_with("home", json!({}), defaults).await;
    let (_installed, _lockstep) = cluster.install_and_start(&[]).await;
    let binaries = Binaries::build_flux().unwrap_or_else(|error| panic!("{error}"));
    let flux = Flux { cluster: &cluster, binaries };

    let copied = json!({
        cluster.key("target-namespaces"): away, cluster.key("copy-labels"): "*", cluster.key("copy-annotations"): "*",
    });
    let git = [
        manifest(&cluster, "ConfigMap", &home, "flags", copied, json!({"search": "on"})),
        // The guard writes the defaults of the namespace into this one.
        manifest(&cluster, "ConfigMap", &home, "proxy", json!({}), json!({"url": "proxy.example.com"})),
        manifest(&cluster, "Secret", &home, "token", json!({}), json!({"token": "aHVzaA=="})),
    ];
    let each = |action: &str| {
        ["ConfigMap/home/flags", "ConfigMap/home/proxy", "Secret/home/token"]
            .map(|object| format!("{object} {action}"))
            .to_vec()
    };
    assert_eq!(flux.does("apply", &git), each("created"));
    let companions =
        [configmap(&away, "flags-synced"), configmap(&away, "proxy-synced"), secret(&away, "token-synced")];
    let mut live = Vec::new();
    for path in &companions {
        live.push(eventually(&format!("{path} exists"), || async { cluster.get(path).await }).await);
    }

    // Labels are copied, but not those by which Flux would take a companion for its own.
    let labels = live[0]["metadata"]["labels"].as_object().expect("labels").clone();
    assert_eq!(labels["team"], "platform");
    assert!(!labels.keys().any(|key| key.contains("fluxcd.io")), "{labels:?}");
    let source = cluster.configmap(&home, "flags").await.expect("a source");
    assert_eq!(source["metadata"]["labels"]["kustomize.toolkit.fluxcd.io/name"], "platform");
    let proxy = cluster.configmap(&home, "proxy").await.expect("a source");
    assert!(proxy["metadata"]["annotations"][cluster.key("defaults")].is_string(), "{proxy}");

    // Nothing drifts, although the guard has written an annotation.
    for _ in 0..2 {
        assert_eq!(flux.does("diff", &git), each("unchanged"));
        assert_eq!(flux.does("apply", &git), each("unchanged"));
    }

    // Companions do not belong into Git: Flux can neither write nor prune them.
    for (companion, kind) in live.iter().zip(["ConfigMap", "ConfigMap", "Secret"]) {
        let mut committed = companion.clone();
        (committed["apiVersion"], committed["kind"]) = (json!("v1"), json!(kind));
        for field in ["managedFields", "resourceVersion", "uid", "creationTimestamp"] {
            committed["metadata"].as_object_mut().expect("metadata").remove(field);
        }
        let name = committed["metadata"]["name"].as_str().expect("a name").to_owned();
        assert_eq!(flux.does("prune", &[committed.clone()]), [format!("{kind}/away/{name} skipped")]);
        let refused = flux.try_to("apply", &[committed]);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && said.contains("is a companion, kept equal to"), "{said}");
    }
    for (path, before) in companions.iter().zip(&live) {
        let now = cluster.get(path).await.expect("a companion");
        assert_eq!(now["metadata"]["resourceVersion"], before["metadata"]["resourceVersion"], "{path}");
    }

    // Sources and companions are ready as soon as they exist, and so are the webhook configurations.
    let instance = format!("lockstep.{}", cluster.domain());
    let mut get = cluster.plane.kubectl();
    get.args(["get", "validatingwebhookconfiguration,mutatingwebhookconfiguration", &instance, "-o", "json"]);
    let webhooks: Value = serde_json::from_str(&run(&mut get)).expect("JSON");
    let mut objects = webhooks["items"].as_array().expect("a list").clone();
    for (object, kind) in [(&source, "ConfigMap"), (&live[0], "ConfigMap"), (&live[2], "Secret")] {
        let mut object = object.clone();
        (object["apiVersion"], object["kind"]) = (json!("v1"), json!(kind));
        objects.push(object);
    }
    let statuses = flux.does("status", &objects);
    assert_eq!(statuses.len(), 5);
    assert!(statuses.iter().all(|line| line.ends_with(" Current")), "{statuses:?}");

    // What leaves Git is pruned, and its companions go with it.
    assert_eq!(flux.does("prune", &git), each("deleted"));
    for path in &companions {
        cluster.wait_gone(path).await;
    }
}
