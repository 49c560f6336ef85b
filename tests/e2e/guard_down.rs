//! The guard is down: what it guards cannot be written by people, and nobody else notices.

use lockstep::guard::request::KUBERNETES_CLEANUP_USERS;
use serde_json::{Value, json};

use crate::{
    harness::{Cluster, InstalledManifests, configmap, eventually},
    users::User,
};

/// Webhooks that nobody answers, and somebody to whom that happens.
struct Scene {
    cluster: Cluster,
    home: String,
    alice: User,
}

impl Scene {
    /// Sources with their companions, made by a mirror that is gone again.
    async fn set(test: &str, sources: &[&str]) -> Option<Self> {
        let cluster = Cluster::audited(test).await?;
        let home = cluster.namespace("home").await;
        let alice = cluster.editor("alice", &[], &[&home]).await;
        for name in sources {
            cluster.source(&home, name).annotate("protect", "all").create().await;
        }
        let mut lockstep = cluster.start_mirror().await;
        for name in sources {
            cluster.wait_data(&home, &format!("{name}-synced"), json!({"sky": "blue"})).await;
        }
        assert!(lockstep.stop().await.success());
        Some(Self { cluster, home, alice })
    }

    /// Installs the webhooks, at a port where nobody listens, and waits until each is called.
    async fn unplug(&self) -> InstalledManifests {
        let installed = self.cluster.install(&["--webhook-url", "https://127.0.0.1:1"]);
        let managed = self.cluster.key("managed");
        for label in [&self.cluster.key("companion"), &format!("{managed}=true")] {
            let probe = json!({"metadata": {"generateName": "probe-", "labels": {label.trim_end_matches("=true"): "true"}}});
            eventually(&format!("webhooks of {label} are called"), || async {
                let path = format!("/api/v1/namespaces/{}/configmaps?dryRun=All", self.home);
                let body = Some(("application/json", &probe));
                self.cluster.try_request("POST", &path, body).await.is_err().then_some(())
            })
            .await;
        }
        installed
    }

    /// The audit log's last entry for a write of this object, once there is one.
    async fn audited(&self, verb: &str, name: &str) -> Value {
        eventually(&format!("{verb} {name} in the audit log"), || async {
            let log = self.cluster.audit_log();
            let entry = |line: &str| serde_json::from_str::<Value>(line).ok();
            log.lines().rev().filter(|line| line.contains(&self.home)).filter_map(entry).find(|entry| {
                let object = &entry["objectRef"];
                entry["verb"] == verb && object["name"] == name && object["namespace"] == *self.home
            })
        })
        .await
    }

    /// Which of this test's webhooks were called in vain for the last such write, and passed over.
    async fn passed_over(&self, verb: &str, name: &str) -> Vec<String> {
        let entry = self.audited(verb, name).await;
        let annotations = entry["annotations"].as_object().cloned().unwrap_or_default();
        let failed = annotations.into_iter().filter(|(key, _)| key.starts_with("failed-open."));
        let instance = format!(".lockstep.{}", self.cluster.domain());
        failed.filter_map(|(_, entry)| Some(entry.as_str()?.strip_suffix(&instance)?.to_owned())).collect()
    }
}

#[tokio::test]
async fn companions_and_sources_cannot_be_written() {
    let Some(scene) = Scene::set("shut-out", &["colors"]).await else { return };
    let _installed = scene.unplug().await;
    let (alice, home, key) = (&scene.alice, &scene.home, |name| scene.cluster.key(name));
    let (managed, companion) = (key("managed"), key("companion"));
    alice.succeeds(&format!("create cm plain -n {home}"));
    let labelled = |label: &str| {
        let metadata = json!({"name": "new", "labels": {label: "true"}});
        json!({"apiVersion": "v1", "kind": "Secret", "metadata": metadata}).to_string()
    };
    for (entry, line, file) in [
        ("companions", format!("label cm colors-synced -n {home} team=mine"), String::new()),
        ("companions", format!("label cm colors-synced -n {home} {companion}-"), String::new()),
        ("companions", format!("delete cm colors-synced -n {home}"), String::new()),
        ("companions", format!("label cm plain -n {home} {companion}=x"), String::new()),
        ("companions", format!("create -f - -n {home}"), labelled(&companion)),
        ("sources", format!("label cm colors -n {home} team=mine"), String::new()),
        ("sources", format!("label cm colors -n {home} {managed}-"), String::new()),
        ("sources", format!("label cm plain -n {home} {managed}=true"), String::new()),
        ("sources", format!("delete cm colors -n {home}"), String::new()),
        ("sources", format!("create -f - -n {home}"), labelled(&managed)),
    ] {
        let complaint = alice.fails_with(&line, &file);
        let text = format!(r#"failed calling webhook "{entry}.lockstep.{}""#, scene.cluster.domain());
        assert!(complaint.contains(&text), "{line}: {complaint}");
    }
    // Stamping is passed over, checking is not.
    for (verb, name) in [("patch", "colors"), ("create", "new")] {
        assert_eq!(scene.passed_over(verb, name).await, ["defaults"], "{verb} {name}");
    }
    // Nothing but `true` makes a source.
    alice.succeeds(&format!("label cm plain -n {home} {managed}=no"));
}

#[tokio::test]
async fn what_is_not_ours_can_be_written() {
    let Some(scene) = Scene::set("bystanders", &[]).await else { return };
    let _installed = scene.unplug().await;
    let (cluster, alice, home) = (&scene.cluster, &scene.alice, &scene.home);
    for kind in ["cm", "secret generic"] {
        let bare = kind.trim_end_matches(" generic");
        for name in ["plain", "plain-synced"] {
            alice.succeeds(&format!("create {kind} {name}-{bare} -n {home}"));
            alice.succeeds(&format!("create {kind} {bare}-{name} -n {home} --from-literal=a=b"));
            alice.succeeds(&format!("label {bare} {bare}-{name} -n {home} team=mine"));
            alice.succeeds(&format!("delete {bare} {bare}-{name} -n {home}"));
        }
        // The entry against squatters is asked about names and marks of companions only, and when they are made.
        assert_eq!(scene.passed_over("create", &format!("{bare}-plain-synced")).await, ["newcomers"]);
        for (verb, name) in [
            ("create", format!("{bare}-plain")),
            ("create", format!("plain-synced-{bare}")),
            ("patch", format!("{bare}-plain-synced")),
            ("delete", format!("{bare}-plain-synced")),
        ] {
            assert!(scene.passed_over(verb, &name).await.is_empty(), "{verb} {name}");
        }
    }
    for (name, annotation) in
        [("bears-source", "source"), ("bears-uid", "source-uid"), ("bears-protect", "protect")]
    {
        let object = json!({"metadata": {"name": name, "annotations": {cluster.key(annotation): "x"}}});
        cluster.post(&format!("/api/v1/namespaces/{home}/configmaps"), &object).await;
        let asked = scene.passed_over("create", name).await.len();
        assert_eq!(asked, usize::from(name != "bears-protect"), "{name}");
    }
    // No name yet, and no annotations.
    let nameless = json!({"metadata": {"generateName": "x-synced"}});
    cluster.post(&format!("/api/v1/namespaces/{home}/configmaps"), &nameless).await;

    let kube = "/api/v1/namespaces/kube-system/configmaps";
    let lease = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases";
    let object = json!({"metadata": {"name": cluster.id}});
    for collection in [kube, lease] {
        cluster.post(collection, &object).await;
        let path = format!("{collection}/{}", cluster.id);
        cluster.merge(&path, &json!({"metadata": {"labels": {"a": "b"}}})).await;
        cluster.delete(&path).await;
    }
}

#[tokio::test]
async fn the_mirror_works_on() {
    let Some(scene) = Scene::set("works-on", &["colors", "gone"]).await else { return };
    let (cluster, home) = (&scene.cluster, &scene.home);
    cluster.merge(&configmap(home, "colors-synced"), &json!({"data": {"sky": "mine"}})).await;
    cluster.delete(&configmap(home, "gone-synced")).await;
    cluster.source(home, "new").create().await;
    let _installed = scene.unplug().await;
    let _lockstep = cluster.start_mirror().await;
    for name in ["colors-synced", "gone-synced", "new-synced"] {
        cluster.wait_data(home, name, json!({"sky": "blue"})).await;
    }
    for name in ["gone-synced", "new-synced"] {
        assert!(scene.passed_over("create", name).await.is_empty(), "{name}: the guard is not even asked");
    }
}

#[tokio::test]
async fn kubernetes_cleans_up_as_ever() {
    let Some(scene) = Scene::set("swept", &["background", "foreground", "orphan", "rest"]).await else {
        return;
    };
    let (cluster, alice, home) = (&scene.cluster, &scene.alice, &scene.home);
    // Nobody may delete a source now, but what owns it may go.
    for name in ["background", "foreground", "orphan"] {
        let parent = json!({"metadata": {"name": format!("{name}-parent")}});
        let parent = cluster.post(&format!("/api/v1/namespaces/{home}/configmaps"), &parent).await;
        let owner = json!({
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "name": parent["metadata"]["name"],
            "uid": parent["metadata"]["uid"],
            "blockOwnerDeletion": true,
        });
        cluster.merge(&configmap(home, name), &json!({"metadata": {"ownerReferences": [owner]}})).await;
    }
    let _installed = scene.unplug().await;
    for name in ["background", "foreground", "orphan"] {
        alice.succeeds(&format!("delete cm {name}-parent -n {home} --cascade={name} --wait=false"));
        cluster.wait_gone(&configmap(home, &format!("{name}-parent"))).await;
    }
    for name in ["background", "background-synced", "foreground", "foreground-synced"] {
        cluster.wait_gone(&configmap(home, name)).await;
    }
    let orphan = cluster.configmap(home, "orphan").await.expect("the orphan stays");
    assert!(orphan["metadata"]["ownerReferences"].is_null(), "{orphan}");
    assert!(scene.passed_over("patch", "orphan").await.is_empty(), "the guard is not even asked");

    for (n, identity) in KUBERNETES_CLEANUP_USERS.iter().enumerate() {
        let line = format!("--as={identity} --as-group=system:masters -n {home}");
        cluster.admin().succeeds(&format!("create cm x{n}-synced {line}"));
        assert!(
            scene.passed_over("create", &format!("x{n}-synced")).await.is_empty(),
            "{identity}: not asked"
        );
        for name in ["orphan-synced", "orphan"] {
            cluster.admin().succeeds(&format!("label cm {name} a=x{n} --overwrite {line}"));
            assert!(scene.passed_over("patch", name).await.is_empty(), "{identity}: not asked about {name}");
            cluster.admin().succeeds(&format!("delete cm {name} --dry-run=server {line}"));
        }
    }

    cluster.admin().succeeds(&format!("delete namespace {home} --wait=false"));
    cluster.wait_gone(&format!("/api/v1/namespaces/{home}")).await;
}
