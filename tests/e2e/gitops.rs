//! Shared by the tests with Argo CD and Flux: sources in Git, and a program built from each tool's code. `make
//! test-interop` runs them, because Go needs minutes to build the programs.

use std::{
    path::PathBuf,
    process::{Command, Output},
};

use controlplane::{Binaries, Error};
use serde_json::{Value, json};

use crate::harness::{Cluster, configmap, output, secret};

/// Two namespaces, and the manifests of three sources in one of them that have companions in the other.
pub struct Repository {
    pub home: String,
    pub away: String,
    /// `flags` has all its labels and annotations copied, `proxy` has the default targets of its namespace, and `token`
    /// is a Secret.
    pub manifests: [Value; 3],
    /// The paths of the companions, in the same order.
    pub companions: [String; 3],
}

impl Repository {
    pub async fn new(cluster: &Cluster) -> Self {
        let away = cluster.namespace("away").await;
        let defaults = json!({cluster.key("default-target-namespaces"): away});
        let home = cluster.namespace_with("home", json!({}), defaults).await;
        let source = |kind: &str, name: &str, annotations: Value, data: Value| {
            let labels = json!({cluster.key("managed"): "true", "team": "platform"});
            json!({
                "apiVersion": "v1", "kind": kind, "data": data,
                "metadata": {"name": name, "namespace": home, "annotations": annotations, "labels": labels},
            })
        };
        let copied = json!({
            cluster.key("target-namespaces"): away,
            cluster.key("copy-labels"): "*",
            cluster.key("copy-annotations"): "*",
            "example.com/owner": "platform",
        });
        let manifests = [
            source("ConfigMap", "flags", copied, json!({"search": "on"})),
            source("ConfigMap", "proxy", json!({}), json!({"url": "proxy.example.com"})),
            source("Secret", "token", json!({}), json!({"token": "aHVzaA=="})),
        ];
        let companions = [
            configmap(&away, "flags-synced"),
            configmap(&away, "proxy-synced"),
            secret(&away, "token-synced"),
        ];
        Self { home, away, manifests, companions }
    }

    /// What a program prints of all sources, sorted.
    pub fn each(&self, action: &str) -> [String; 3] {
        let objects = ["ConfigMap/home/flags", "ConfigMap/home/proxy", "Secret/home/token"];
        objects.map(|object| format!("{object} {action}"))
    }
}

/// A live object as somebody would commit it.
pub fn committed(live: &Value, kind: &str) -> Value {
    let mut manifest = live.clone();
    (manifest["apiVersion"], manifest["kind"]) = (json!("v1"), json!(kind));
    for field in ["managedFields", "resourceVersion", "uid", "creationTimestamp"] {
        manifest["metadata"].as_object_mut().expect("metadata").remove(field);
    }
    manifest
}

/// A program that works on manifests from its standard input, as the admin.
pub struct Program<'a> {
    cluster: &'a Cluster,
    path: PathBuf,
}

impl<'a> Program<'a> {
    pub fn new(cluster: &'a Cluster, binaries: Result<Binaries, Error>, name: &str) -> Self {
        let binaries = binaries.unwrap_or_else(|error| panic!("{error}"));
        Self { cluster, path: binaries.dir().join(name) }
    }

    pub fn try_to(&self, args: &[&str], manifests: &[Value]) -> Output {
        let text: Vec<String> = manifests.iter().map(Value::to_string).collect();
        let mut program = Command::new(&self.path);
        output(program.args(args).env("KUBECONFIG", self.cluster.plane.admin()), &text.join("\n---\n"))
    }

    /// The lines that it printed, sorted; it must succeed. Names of namespaces are cut to those that the test chose.
    pub fn does(&self, args: &[&str], manifests: &[Value]) -> Vec<String> {
        let output = self.try_to(args, manifests);
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        let text = String::from_utf8_lossy(&output.stdout).replace(&format!("{}-", self.cluster.id), "");
        let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
        lines.sort();
        lines
    }
}
