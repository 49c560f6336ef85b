//! The second lock: the policy protects companions with nothing of Lockstep running.

use lockstep::guard::request::KUBERNETES_CLEANUP_USERS;
use serde_json::{Value, json};

use crate::{
    harness::{Cluster, InstalledManifests, configmap, eventually},
    kubectl_commands::{Subject, assert_refused},
    users::User,
};

/// Companions of `colors` in two namespaces and of the Secret `key`, made by a mirror that is gone again.
struct Scene {
    cluster: Cluster,
    home: String,
    away: String,
    alice: User,
}

impl Scene {
    async fn set(test: &str) -> Self {
        let cluster = Cluster::new(test).await;
        let (home, away, alice) = cluster.alice().await;
        cluster.make_sources(&home, &away, &[]).await;
        let scene = Self { cluster, home, away, alice };
        scene.mirror().await;
        scene
    }

    /// Runs a mirror until every source has its companions.
    async fn mirror(&self) {
        let mut lockstep = self.cluster.start_mirror().await;
        self.cluster.wait_companions(&self.home, &self.away).await;
        assert!(lockstep.stop().await.success());
    }

    /// Installs the policy and waits until it holds for alice.
    async fn lock(&self, flags: &[&str]) -> InstalledManifests {
        // Of a cluster that exists, nothing of an installation is to be changed but what is this test's own.
        let url = self.cluster.url();
        let installed = self.cluster.install(&[&["--policy", "--webhook-url", &url], flags].concat());
        // The webhooks would refuse things too.
        for kind in ["validating", "mutating"] {
            let name = format!("lockstep.{}", self.cluster.domain());
            self.cluster.admin().succeeds(&format!("delete {kind}webhookconfiguration {name}"));
        }
        let writes = |name: &str| {
            let line = format!("annotate cm {name} -n {} probe=1 --dry-run=server", self.home);
            self.alice.kubectl(&line).output().expect("kubectl")
        };
        eventually("the policy holds", || async {
            let text = String::from_utf8_lossy(&writes("colors-synced").stderr).into_owned();
            text.contains("denied request").then_some(())
        })
        .await;
        eventually("the webhooks are gone", || async { writes("colors").status.success().then_some(()) })
            .await;
        installed
    }

    fn edit_text(&self, kind: &str, namespace: &str, source: &str) -> String {
        let home = &self.home;
        format!(
            "{kind} {namespace}/{source}-synced is a companion, kept equal to {home}/{source} by Lockstep. \
             Change the source instead: kubectl edit {kind} {source} -n {home}\n"
        )
    }

    fn delete_text(&self, kind: &str, namespace: &str, source: &str) -> String {
        let (home, managed) = (&self.home, self.cluster.key("managed"));
        format!(
            "{kind} {namespace}/{source}-synced is a companion, kept by Lockstep for as long as {home}/{source} \
             wants it. To remove it, delete the source or stop mirroring it: \
             kubectl label {kind} {source} -n {home} {managed}-\n"
        )
    }

    fn forged_text(&self, kind: &str, name: &str) -> String {
        let (home, companion, managed) =
            (&self.home, self.cluster.key("companion"), self.cluster.key("managed"));
        format!(
            "{kind} {home}/{name} carries the companion label or annotations of Lockstep; only Lockstep may set these. \
             Leave out {companion}; to mirror an object, label the original: \
             kubectl label {kind} NAME {managed}=true\n"
        )
    }
}

#[tokio::test]
async fn a_companion_cannot_be_changed_or_deleted_by_any_verb() {
    let scene = Scene::set("verbs").await;
    let _installed = scene.lock(&[]).await;
    let (cluster, alice, label) = (&scene.cluster, &scene.alice, scene.cluster.key("companion"));
    for (kind, namespace, source) in [
        ("configmap", &scene.home, "colors"),
        ("configmap", &scene.away, "colors"),
        ("secret", &scene.home, "key"),
    ] {
        let companion = Subject { cluster, kind, namespace, name: format!("{source}-synced") };
        let before = cluster.get(&companion.path()).await.unwrap();
        let text = scene.edit_text(kind, namespace, source);
        for line in companion.edits().into_iter().chain(companion.strips()) {
            assert_refused(&line, &alice.fails(&line), &text);
        }
        assert_refused("edit", &companion.edited_by(alice), &text);
        let changed = companion.file(|object| object["data"] = json!({"sky": "bWluZQ=="})).await;
        for line in companion.files() {
            assert_refused(&line, &alice.fails_with(&line, &changed), &text);
        }
        let stripped = companion.file(|object| object["metadata"]["labels"] = json!({})).await;
        let line = format!("replace -f - -n {namespace}");
        assert_refused(&line, &alice.fails_with(&line, &stripped), &text);

        let text = scene.delete_text(kind, namespace, source);
        for line in companion.deletes() {
            assert_refused(&line, &alice.fails(&line), &text);
        }
        let collection = cluster
            .admin()
            .fails(&format!("delete --raw /api/v1/namespaces/{namespace}/{kind}s?labelSelector={label}"));
        assert!(collection.contains(text.trim_end()), "{collection}");
        let line = format!("replace --force -f - -n {namespace}");
        assert_refused(&line, &alice.fails_with(&line, &changed), &text);

        let after = cluster.get(&companion.path()).await.unwrap();
        assert_eq!(after["metadata"]["resourceVersion"], before["metadata"]["resourceVersion"], "untouched");
        assert!(after["metadata"]["deletionTimestamp"].is_null(), "{after}");
    }
}

#[tokio::test]
async fn what_poses_as_a_companion_is_refused() {
    let scene = Scene::set("posers").await;
    let _installed = scene.lock(&[]).await;
    let (alice, home, label) = (&scene.alice, &scene.home, scene.cluster.key("companion"));
    for (kind, type_) in [("configmap", "ConfigMap"), ("secret", "Secret")] {
        let metadata = json!({
            "name": "forged",
            "labels": {&label: "true"},
            "annotations": {scene.cluster.key("protect"): "none"},
        });
        let forged = json!({"apiVersion": "v1", "kind": type_, "metadata": metadata}).to_string();
        let text = scene.forged_text(kind, "forged");
        for line in [
            format!("create -f - -n {home}"),
            format!("create -f - -n {home} --dry-run=server"),
            format!("apply --server-side -f - -n {home}"),
        ] {
            assert_refused(&line, &alice.fails_with(&line, &forged), &text);
        }
        // A name that is yet to be made up is no way around.
        let nameless = forged.replace(r#""name":"forged""#, r#""generateName":"forged-""#);
        let complaint = alice.fails_with(&format!("create -f - -n {home}"), &nameless);
        assert!(complaint.contains("carries the companion label or annotations"), "{complaint}");

        alice.succeeds(&format!(
            "create {kind} {} plain -n {home}",
            if kind == "secret" { "generic" } else { "" }
        ));
        let line = format!("label {kind} plain -n {home} {label}=");
        assert_refused(&line, &alice.fails(&line), &scene.forged_text(kind, "plain"));
    }
}

#[tokio::test]
async fn what_changes_nothing_passes() {
    let scene = Scene::set("noop").await;
    let (cluster, alice, home) = (&scene.cluster, &scene.alice, &scene.home);
    // As much as fits: deciding must not cost more than the API server allows.
    let many: Value = (0..3000)
        .map(|n| (format!("key-{n}"), json!("x".repeat(300))))
        .collect::<serde_json::Map<_, _>>()
        .into();
    cluster.source(home, "large").with("/data", many.clone()).create().await;
    let mut lockstep = cluster.start_mirror().await;
    cluster.wait_data(home, "large-synced", many).await;
    lockstep.stop().await;

    let _installed = scene.lock(&[]).await;
    for name in ["colors-synced", "large-synced"] {
        let before = cluster.configmap(home, name).await.unwrap();
        alice.succeeds(&format!("patch cm {name} -n {home} --type merge -p {{}}"));
        let companion = Subject { cluster, kind: "configmap", namespace: home, name: name.to_owned() };
        let same = companion.file(|_| {}).await;
        alice.succeeds_with(&format!("replace -f - -n {home}"), &same);
        // Nothing but managedFields: alice now owns what she applied, too.
        let data = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": before["data"]});
        alice.succeeds_with(
            &format!("apply --server-side --force-conflicts -f - -n {home}"),
            &data.to_string(),
        );
        let after = cluster.configmap(home, name).await.unwrap();
        assert_ne!(after["metadata"]["managedFields"], before["metadata"]["managedFields"]);

        let line = format!("label cm {name} -n {home} team=mine");
        let source = name.strip_suffix("-synced").unwrap();
        assert_refused(&line, &alice.fails(&line), &scene.edit_text("configmap", home, source));
    }
}

#[tokio::test]
async fn what_is_not_protected_passes() {
    let scene = Scene::set("open").await;
    let (cluster, alice, home) = (&scene.cluster, &scene.alice, &scene.home);
    for name in ["one", "two"] {
        cluster.source(home, name).annotate("protect", "none").create().await;
    }
    let mut lockstep = cluster.start_mirror().await;
    for name in ["one-synced", "two-synced"] {
        cluster.wait_data(home, name, json!({"sky": "blue"})).await;
    }
    lockstep.stop().await;
    let _installed = scene.lock(&[]).await;
    alice.succeeds(&format!("label cm one-synced -n {home} team=mine"));
    alice.succeeds(&format!("label cm one-synced -n {home} {}-", cluster.key("companion")));
    alice.succeeds(&format!("delete cm two-synced -n {home}"));

    // Others' objects and sources are none of its business.
    alice.succeeds(&format!("create cm plain-synced -n {home} --from-literal=a=b"));
    alice.succeeds(&format!("label cm plain-synced -n {home} team=mine"));
    alice.succeeds(&format!("delete cm plain-synced -n {home}"));
    alice.succeeds(&format!("label cm colors -n {home} team=mine"));
}

#[tokio::test]
async fn a_companion_that_names_no_source_cannot_be_changed_but_deleted() {
    let scene = Scene::set("nameless").await;
    let (cluster, alice, home, away) = (&scene.cluster, &scene.alice, &scene.home, &scene.away);
    let source = cluster.key("source");
    for (namespace, value) in [(home, json!(null)), (away, json!("a b/c; rm -rf"))] {
        let patch = json!({"metadata": {"annotations": {&source: value}}});
        cluster.merge(&configmap(namespace, "colors-synced"), &patch).await;
    }
    let _installed = scene.lock(&[]).await;
    for namespace in [home, away] {
        let line = format!("label cm colors-synced -n {namespace} team=mine");
        let text = format!(
            "configmap {namespace}/colors-synced is a companion, kept equal to its source by Lockstep. \
             Change the source instead: kubectl edit configmap NAME -n NAMESPACE\n"
        );
        assert_refused(&line, &alice.fails(&line), &text);
        // It is nobody's, and no source could be deleted instead.
        alice.succeeds(&format!("delete cm colors-synced -n {namespace}"));
    }
}

#[tokio::test]
async fn exempt_people_and_the_mirror_pass() {
    let scene = Scene::set("exempt").await;
    let (cluster, home, away) = (&scene.cluster, &scene.home, &scene.away);
    let group = format!("o'ps {}", cluster.id);
    let bob = cluster.editor("bob", &[], &[home]).await;
    let carol = cluster.editor("carol", &["developers", &group], &[home]).await;
    let _installed = scene.lock(&["--exempt-user", &bob.name, "--exempt-group", &group]).await;
    bob.succeeds(&format!("label cm colors-synced -n {home} team=mine"));
    carol.succeeds(&format!("delete cm colors-synced -n {home}"));
    let forged = json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "forged", "labels": {cluster.key("companion"): "true"}},
    });
    bob.succeeds_with(&format!("create -f - -n {home}"), &forged.to_string());

    // Made, changed and deleted by the mirror.
    let _lockstep = cluster.start_mirror().await;
    cluster.wait_data(home, "colors-synced", json!({"sky": "blue"})).await;
    cluster.merge(&configmap(home, "colors"), &json!({"data": {"sky": "red"}})).await;
    for namespace in [home, away] {
        cluster.wait_data(namespace, "colors-synced", json!({"sky": "red"})).await;
    }
    cluster.merge(&configmap(home, "colors"), &json!({"metadata": {"labels": null}})).await;
    for namespace in [home, away] {
        cluster.wait_gone(&configmap(namespace, "colors-synced")).await;
    }
}

#[tokio::test]
async fn kubernetes_cleans_up_as_ever() {
    let scene = Scene::set("cleanup").await;
    let (cluster, alice, home) = (&scene.cluster, &scene.alice, &scene.home);
    for name in ["background", "foreground", "orphan"] {
        cluster.source(home, name).annotate("protect", "all").create().await;
    }
    let mut lockstep = cluster.start_mirror().await;
    for name in ["background", "foreground", "orphan"] {
        cluster.wait_data(home, &format!("{name}-synced"), json!({"sky": "blue"})).await;
    }
    lockstep.stop().await;
    let _installed = scene.lock(&[]).await;
    for name in ["background", "foreground", "orphan"] {
        alice.succeeds(&format!("delete cm {name} -n {home} --cascade={name} --wait=false"));
        cluster.wait_gone(&configmap(home, name)).await;
    }
    for name in ["background-synced", "foreground-synced"] {
        cluster.wait_gone(&configmap(home, name)).await;
    }
    let orphan = cluster.configmap(home, "orphan-synced").await.expect("the orphan stays");
    assert!(orphan["metadata"]["ownerReferences"].is_null(), "{orphan}");
    for identity in KUBERNETES_CLEANUP_USERS {
        let line = format!("--as={identity} --as-group=system:masters -n {home}");
        cluster.admin().succeeds(&format!("label cm orphan-synced a={} --overwrite {line}", identity.len()));
        cluster.admin().succeeds(&format!("delete cm orphan-synced --dry-run=server {line}"));
    }

    cluster.admin().succeeds(&format!("delete namespace {home} --wait=false"));
    cluster.wait_gone(&format!("/api/v1/namespaces/{home}")).await;
}

#[tokio::test]
async fn anything_goes_in_a_namespace_that_is_ending() {
    let scene = Scene::set("ending").await;
    let (cluster, alice, home) = (&scene.cluster, &scene.alice, &scene.home);
    let held = json!({"metadata": {"finalizers": ["example.com/held"]}});
    cluster.merge(&configmap(home, "colors-synced"), &held).await;
    let _installed = scene.lock(&[]).await;
    let free =
        format!(r#"patch cm colors-synced -n {home} --type merge -p {{"metadata":{{"finalizers":null}}}}"#);
    assert_refused(&free, &alice.fails(&free), &scene.edit_text("configmap", home, "colors"));
    cluster.admin().succeeds(&format!("delete namespace {home} --wait=false"));
    // alice's rights go with the namespace, so somebody else does it.
    eventually("the finalizer can be taken away", || async {
        let line = free.replace("patch", "patch --as-group=system:masters --as=mallory");
        cluster.admin().kubectl(&line).output().expect("kubectl").status.success().then_some(())
    })
    .await;
    cluster.wait_gone(&format!("/api/v1/namespaces/{home}")).await;
}

#[tokio::test]
async fn the_api_server_finds_no_fault_with_the_expressions() {
    let scene = Scene::set("checked").await;
    let _installed = scene.lock(&[]).await;
    let name = format!("lockstep.{}", scene.cluster.domain());
    let path = format!("/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/{name}");
    let status = eventually("the policy is checked", || async {
        let policy = scene.cluster.get(&path).await.expect("the policy");
        policy["status"]["typeChecking"].is_object().then(|| policy["status"].clone())
    })
    .await;
    assert!(status["typeChecking"]["expressionWarnings"].is_null(), "{status:#}");
}
