//! Sources in Git, with the code by which Flux applies, diffs and prunes, and by which it and others judge status.

use controlplane::Binaries;
use serde_json::{Value, json};

use crate::{
    gitops::{Program, Repository, committed},
    harness::{Cluster, eventually, run},
};

#[tokio::test]
async fn flux_applies_and_prunes_sources_finds_no_drift_and_leaves_companions_alone() {
    let cluster = Cluster::new("flux").await;
    let git = Repository::new(&cluster).await;
    let (_installed, _lockstep) = cluster.install_and_start(&[]).await;
    let flux = Program::new(&cluster, Binaries::build_flux(), "flux");

    assert_eq!(flux.does(&["apply"], &git.manifests), git.each("created"));
    let mut live = Vec::new();
    for path in &git.companions {
        live.push(eventually(&format!("{path} exists"), || async { cluster.get(path).await }).await);
    }

    // Labels are copied, but not those by which Flux would take a companion for its own.
    let labels = live[0]["metadata"]["labels"].as_object().expect("labels").clone();
    assert_eq!(labels["team"], "platform");
    assert!(!labels.keys().any(|key| key.contains("fluxcd.io")), "{labels:?}");
    let source = cluster.configmap(&git.home, "flags").await.expect("a source");
    assert_eq!(source["metadata"]["labels"]["kustomize.toolkit.fluxcd.io/name"], "platform");
    let proxy = cluster.configmap(&git.home, "proxy").await.expect("a source");
    assert!(proxy["metadata"]["annotations"][cluster.key("defaults")].is_string(), "{proxy}");

    // Nothing drifts, although the webhook has written an annotation.
    for _ in 0..2 {
        assert_eq!(flux.does(&["diff"], &git.manifests), git.each("unchanged"));
        assert_eq!(flux.does(&["apply"], &git.manifests), git.each("unchanged"));
    }

    // Companions do not belong into Git: Flux can neither write nor prune them.
    for (companion, kind) in live.iter().zip(["ConfigMap", "ConfigMap", "Secret"]) {
        let manifest = committed(companion, kind);
        let name = manifest["metadata"]["name"].as_str().expect("a name").to_owned();
        assert_eq!(
            flux.does(&["prune"], std::slice::from_ref(&manifest)),
            [format!("{kind}/away/{name} skipped")]
        );
        let refused = flux.try_to(&["apply"], &[manifest]);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && said.contains("is a companion, kept equal to"), "{said}");
    }
    for (path, before) in git.companions.iter().zip(&live) {
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
    let statuses = flux.does(&["status"], &objects);
    assert_eq!(statuses.len(), 5);
    assert!(statuses.iter().all(|line| line.ends_with(" Current")), "{statuses:?}");

    // What leaves Git is pruned, and its companions go with it.
    assert_eq!(flux.does(&["prune"], &git.manifests), git.each("deleted"));
    for path in &git.companions {
        cluster.wait_gone(path).await;
    }
}
