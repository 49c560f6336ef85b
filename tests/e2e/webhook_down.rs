//! While the webhook is down, users cannot write sources and companions, and everything else is unaffected.

use serde_json::{Value, json};

use crate::{
    harness::{Cluster, InstalledManifests, configmap, eventually},
    users::User,
};
use lockstep_core::admission::admission_request::KUBERNETES_CLEANUP_USERS;

/// Sources with companions, and Alice, who may write in their namespace.
struct Setup {
    cluster: Cluster,
    home: String,
    alice: User,
}

impl Setup {
    /// Creates the sources, and the companions with a controller that is stopped again.
    async fn new(test: &str, sources: &[&str]) -> Option<Self> {
        let cluster = Cluster::audited(test).await?;
        let home = cluster.namespace("home").await;
        let alice = cluster.editor("alice", &[], &[&home]).await;
        for name in sources {
            cluster.source(&home, name).annotate("protect", "all").create().await;
        }
        let mut lockstep = cluster.start_controller().await;
        for name in sources {
            cluster.wait_data(&home, &format!("{name}-synced"), json!({"sky": "blue"})).await;
        }
        assert!(lockstep.stop().await.success());
        Some(Self { cluster, home, alice })
    }

    /// Installs the webhooks with a URL at which nothing listens, and waits until the API server calls each of them.
    async fn install_unreachable_webhooks(&self) -> InstalledManifests {
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

    /// The webhooks of this test that failed open for the last such write.
    async fn failed_open(&self, verb: &str, name: &str) -> Vec<String> {
        let entry = self.audited(verb, name).await;
        let annotations = entry["annotations"].as_object().cloned().unwrap_or_default();
        let failed = annotations.into_iter().filter(|(key, _)| key.starts_with("failed-open."));
        let instance = format!(".lockstep.{}", self.cluster.domain());
        failed.filter_map(|(_, entry)| Some(entry.as_str()?.strip_suffix(&instance)?.to_owned())).collect()
    }
}

#[tokio::test]
async fn writes_of_companions_and_sources_are_refused() {
    let Some(setup) = Setup::new("shut-out", &["colors"]).await else { return };
    let _installed = setup.install_unreachable_webhooks().await;
    let (alice, home, key) = (&setup.alice, &setup.home, |name| setup.cluster.key(name));
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
        let text = format!(r#"failed calling webhook "{entry}.lockstep.{}""#, setup.cluster.domain());
        assert!(complaint.contains(&text), "{line}: {complaint}");
    }
    // The webhook that stamps defaults fails open, the ones that check fail closed.
    for (verb, name) in [("patch", "colors"), ("create", "new")] {
        assert_eq!(setup.failed_open(verb, name).await, ["defaults"], "{verb} {name}");
    }
    // Only the value `true` makes a source.
    alice.succeeds(&format!("label cm plain -n {home} {managed}=no"));
}

#[tokio::test]
async fn writes_of_other_objects_succeed() {
    let Some(setup) = Setup::new("others", &[]).await else { return };
    let _installed = setup.install_unreachable_webhooks().await;
    let (cluster, alice, home) = (&setup.cluster, &setup.alice, &setup.home);
    for kind in ["cm", "secret generic"] {
        let bare = kind.trim_end_matches(" generic");
        for name in ["plain", "plain-synced"] {
            alice.succeeds(&format!("create {kind} {name}-{bare} -n {home}"));
            alice.succeeds(&format!("create {kind} {bare}-{name} -n {home} --from-literal=a=b"));
            alice.succeeds(&format!("label {bare} {bare}-{name} -n {home} team=mine"));
            alice.succeeds(&format!("delete {bare} {bare}-{name} -n {home}"));
        }
        // The webhook for new objects is called only on create, and only for names and marks of companions.
        assert_eq!(setup.failed_open("create", &format!("{bare}-plain-synced")).await, ["newcomers"]);
        for (verb, name) in [
            ("create", format!("{bare}-plain")),
            ("create", format!("plain-synced-{bare}")),
            ("patch", format!("{bare}-plain-synced")),
            ("delete", format!("{bare}-plain-synced")),
        ] {
            assert!(setup.failed_open(verb, &name).await.is_empty(), "{verb} {name}");
        }
    }
    for (name, annotation) in
        [("has-source", "source"), ("has-uid", "source-uid"), ("has-protect", "protect")]
    {
        let object = json!({"metadata": {"name": name, "annotations": {cluster.key(annotation): "x"}}});
        cluster.post(&format!("/api/v1/namespaces/{home}/configmaps"), &object).await;
        let asked = setup.failed_open("create", name).await.len();
        assert_eq!(asked, usize::from(name != "has-protect"), "{name}");
    }
    // generateName: the object has no name yet, and no annotations.
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
async fn controller_keeps_working() {
    let Some(setup) = Setup::new("works-on", &["colors", "gone"]).await else { return };
    let (cluster, home) = (&setup.cluster, &setup.home);
    cluster.merge(&configmap(home, "colors-synced"), &json!({"data": {"sky": "mine"}})).await;
    cluster.delete(&configmap(home, "gone-synced")).await;
    cluster.source(home, "new").create().await;
    let _installed = setup.install_unreachable_webhooks().await;
    let _lockstep = cluster.start_controller().await;
    for name in ["colors-synced", "gone-synced", "new-synced"] {
        cluster.wait_data(home, name, json!({"sky": "blue"})).await;
    }
    for name in ["gone-synced", "new-synced"] {
        assert!(setup.failed_open("create", name).await.is_empty(), "{name}: the webhook was called");
    }
}

#[tokio::test]
async fn garbage_collector_and_namespace_controller_are_not_blocked() {
    let Some(setup) = Setup::new("collected", &["background", "foreground", "orphan", "rest"]).await else {
        return;
    };
    let (cluster, alice, home) = (&setup.cluster, &setup.alice, &setup.home);
    // A source cannot be deleted while the webhook is down, but its owner can.
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
    let _installed = setup.install_unreachable_webhooks().await;
    for name in ["background", "foreground", "orphan"] {
        alice.succeeds(&format!("delete cm {name}-parent -n {home} --cascade={name} --wait=false"));
        cluster.wait_collected(&configmap(home, &format!("{name}-parent"))).await;
    }
    for name in ["background", "background-synced", "foreground", "foreground-synced"] {
        cluster.wait_collected(&configmap(home, name)).await;
    }
    let orphan = cluster.configmap(home, "orphan").await.expect("the orphan stays");
    assert!(orphan["metadata"]["ownerReferences"].is_null(), "{orphan}");
    assert!(setup.failed_open("patch", "orphan").await.is_empty(), "the webhook was called");

    for (n, identity) in KUBERNETES_CLEANUP_USERS.iter().enumerate() {
        let line = format!("--as={identity} --as-group=system:masters -n {home}");
        cluster.admin().succeeds(&format!("create cm x{n}-synced {line}"));
        assert!(
            setup.failed_open("create", &format!("x{n}-synced")).await.is_empty(),
            "{identity}: the webhook was called"
        );
        for name in ["orphan-synced", "orphan"] {
            cluster.admin().succeeds(&format!("label cm {name} a=x{n} --overwrite {line}"));
            assert!(
                setup.failed_open("patch", name).await.is_empty(),
                "{identity}: the webhook was called for {name}"
            );
            cluster.admin().succeeds(&format!("delete cm {name} --dry-run=server {line}"));
        }
    }

    cluster.admin().succeeds(&format!("delete namespace {home} --wait=false"));
    cluster.wait_collected(&format!("/api/v1/namespaces/{home}")).await;
}
