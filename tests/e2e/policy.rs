//! The ValidatingAdmissionPolicy protects companions while no Lockstep is running.

use serde_json::{Value, json};

use crate::{
    harness::{Cluster, InstalledManifests, configmap, eventually},
    kubectl_commands::{Subject, assert_refused},
    users::User,
};
use lockstep_core::admission::admission_request::KUBERNETES_CLEANUP_USERS;

/// Companions of `colors` in two namespaces and of the Secret `key`, made by a controller that is stopped again.
struct Setup {
    cluster: Cluster,
    home: String,
    away: String,
    alice: User,
}

impl Setup {
    async fn new(test: &str) -> Self {
        let cluster = Cluster::new(test).await;
        let (home, away, alice) = cluster.alice().await;
        cluster.make_sources(&home, &away, &[]).await;
        let setup = Self { cluster, home, away, alice };
        setup.mirror().await;
        setup
    }

    /// Runs a controller until every source has its companions.
    async fn mirror(&self) {
        let mut lockstep = self.cluster.start_controller().await;
        self.cluster.wait_companions(&self.home, &self.away).await;
        assert!(lockstep.stop().await.success());
    }

    /// Installs the policy and waits until it applies to Alice.
    async fn install_policy(&self, flags: &[&str]) -> InstalledManifests {
        // With a URL there is no Deployment and no Service, whose names tests would share.
        let url = self.cluster.url();
        let installed = self.cluster.install(&[&["--policy", "--webhook-url", &url], flags].concat());
        // The webhooks would refuse the same requests.
        for kind in ["validating", "mutating"] {
            let name = format!("lockstep.{}", self.cluster.domain());
            self.cluster.admin().succeeds(&format!("delete {kind}webhookconfiguration {name}"));
        }
        let writes = |name: &str| {
            let line = format!("annotate cm {name} -n {} probe=1 --dry-run=server", self.home);
            self.alice.kubectl(&line).output().expect("kubectl")
        };
        eventually("the policy applies", || async {
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

    fn strip_text(&self, kind: &str, namespace: &str, source: &str) -> String {
        let (home, companion, managed) =
            (&self.home, self.cluster.key("companion"), self.cluster.key("managed"));
        format!(
            "{kind} {namespace}/{source}-synced is a companion of {home}/{source}; \
             only Lockstep may remove its label {companion}. \
             To stop mirroring, unlabel the source: kubectl label {kind} {source} -n {home} {managed}-\n"
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
async fn edit_and_delete_of_companion_are_refused_for_every_verb() {
    let setup = Setup::new("verbs").await;
    let _installed = setup.install_policy(&[]).await;
    let (cluster, alice, label) = (&setup.cluster, &setup.alice, setup.cluster.key("companion"));
    for (kind, namespace, source) in [
        ("configmap", &setup.home, "colors"),
        ("configmap", &setup.away, "colors"),
        ("secret", &setup.home, "key"),
    ] {
        let companion = Subject { cluster, kind, namespace, name: format!("{source}-synced") };
        let before = cluster.get(&companion.path()).await.unwrap();
        let text = setup.edit_text(kind, namespace, source);
        for line in companion.edits() {
            assert_refused(&line, &alice.fails(&line), &text);
        }
        assert_refused("edit", &companion.edited_by(alice), &text);
        let changed = companion.file(|object| object["data"] = json!({"sky": "bWluZQ=="})).await;
        for line in companion.files() {
            assert_refused(&line, &alice.fails_with(&line, &changed), &text);
        }
        let text = setup.strip_text(kind, namespace, source);
        for line in companion.strips() {
            assert_refused(&line, &alice.fails(&line), &text);
        }
        let stripped = companion.file(|object| object["metadata"]["labels"] = json!({})).await;
        let line = format!("replace -f - -n {namespace}");
        assert_refused(&line, &alice.fails_with(&line, &stripped), &text);

        let text = setup.delete_text(kind, namespace, source);
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
        assert_eq!(
            after["metadata"]["resourceVersion"], before["metadata"]["resourceVersion"],
            "the companion was written"
        );
        assert!(after["metadata"]["deletionTimestamp"].is_null(), "{after}");
    }
}

#[tokio::test]
async fn forged_companion_is_refused() {
    let setup = Setup::new("posers").await;
    let _installed = setup.install_policy(&[]).await;
    let (alice, home, label) = (&setup.alice, &setup.home, setup.cluster.key("companion"));
    for (kind, type_) in [("configmap", "ConfigMap"), ("secret", "Secret")] {
        let metadata = json!({
            "name": "forged",
            "labels": {&label: "true"},
            "annotations": {setup.cluster.key("protect"): "none"},
        });
        let forged = json!({"apiVersion": "v1", "kind": type_, "metadata": metadata}).to_string();
        let text = setup.forged_text(kind, "forged");
        for line in [
            format!("create -f - -n {home}"),
            format!("create -f - -n {home} --dry-run=server"),
            format!("apply --server-side -f - -n {home}"),
        ] {
            assert_refused(&line, &alice.fails_with(&line, &forged), &text);
        }
        // generateName does not avoid the check.
        let nameless = forged.replace(r#""name":"forged""#, r#""generateName":"forged-""#);
        let complaint = alice.fails_with(&format!("create -f - -n {home}"), &nameless);
        assert!(complaint.contains("carries the companion label or annotations"), "{complaint}");

        alice.succeeds(&format!(
            "create {kind} {} plain -n {home}",
            if kind == "secret" { "generic" } else { "" }
        ));
        let line = format!("label {kind} plain -n {home} {label}=");
        assert_refused(&line, &alice.fails(&line), &setup.forged_text(kind, "plain"));
    }
}

#[tokio::test]
async fn write_that_changes_only_managed_fields_is_allowed_even_for_a_large_companion() {
    let setup = Setup::new("noop").await;
    let (cluster, alice, home) = (&setup.cluster, &setup.alice, &setup.home);
    // Nearly 1 MiB: the CEL expressions must stay within the API server's cost limit.
    let many: Value = (0..3000)
        .map(|n| (format!("key-{n}"), json!("x".repeat(300))))
        .collect::<serde_json::Map<_, _>>()
        .into();
    cluster.source(home, "large").with("/data", many.clone()).create().await;
    let mut lockstep = cluster.start_controller().await;
    cluster.wait_data(home, "large-synced", many).await;
    lockstep.stop().await;

    let _installed = setup.install_policy(&[]).await;
    for name in ["colors-synced", "large-synced"] {
        let before = cluster.configmap(home, name).await.unwrap();
        alice.succeeds(&format!("patch cm {name} -n {home} --type merge -p {{}}"));
        let companion = Subject { cluster, kind: "configmap", namespace: home, name: name.to_owned() };
        let same = companion.file(|_| {}).await;
        alice.succeeds_with(&format!("replace -f - -n {home}"), &same);
        // Only managedFields change: Alice now owns the fields that she applied.
        let data = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": before["data"]});
        alice.succeeds_with(
            &format!("apply --server-side --force-conflicts -f - -n {home}"),
            &data.to_string(),
        );
        let after = cluster.configmap(home, name).await.unwrap();
        assert_ne!(after["metadata"]["managedFields"], before["metadata"]["managedFields"]);

        let line = format!("label cm {name} -n {home} team=mine");
        let source = name.strip_suffix("-synced").unwrap();
        assert_refused(&line, &alice.fails(&line), &setup.edit_text("configmap", home, source));
    }
}

#[tokio::test]
async fn companions_with_protect_none_and_other_objects_are_not_protected() {
    let setup = Setup::new("open").await;
    let (cluster, alice, home) = (&setup.cluster, &setup.alice, &setup.home);
    for name in ["one", "two"] {
        cluster.source(home, name).annotate("protect", "none").create().await;
    }
    let mut lockstep = cluster.start_controller().await;
    for name in ["one-synced", "two-synced"] {
        cluster.wait_data(home, name, json!({"sky": "blue"})).await;
    }
    lockstep.stop().await;
    let _installed = setup.install_policy(&[]).await;
    alice.succeeds(&format!("label cm one-synced -n {home} team=mine"));
    // Only Lockstep says whose companion an object is.
    let line = format!("annotate --overwrite cm one-synced -n {home} {}=x/y", cluster.key("source"));
    assert_refused(&line, &alice.fails(&line), &setup.edit_text("configmap", home, "one"));
    alice.succeeds(&format!("label cm one-synced -n {home} {}-", cluster.key("companion")));
    alice.succeeds(&format!("delete cm two-synced -n {home}"));

    // The policy does not concern sources and objects without Lockstep's marks.
    alice.succeeds(&format!("create cm plain-synced -n {home} --from-literal=a=b"));
    alice.succeeds(&format!("label cm plain-synced -n {home} team=mine"));
    alice.succeeds(&format!("delete cm plain-synced -n {home}"));
    alice.succeeds(&format!("label cm colors -n {home} team=mine"));
}

#[tokio::test]
async fn object_without_a_valid_source_annotation_may_be_edited_and_deleted_but_not_marked() {
    let setup = Setup::new("nameless").await;
    let (cluster, alice, home) = (&setup.cluster, &setup.alice, &setup.home);
    let source = cluster.key("source");
    let objects = [("one", json!({})), ("two", json!({&source: "a b/c; rm -rf"}))];
    for (name, annotations) in &objects {
        let labels = json!({cluster.key("companion"): "true"});
        let metadata = json!({"name": name, "labels": labels, "annotations": annotations});
        let path = format!("/api/v1/namespaces/{home}/configmaps");
        cluster.post(&path, &json!({"metadata": metadata})).await;
    }
    let _installed = setup.install_policy(&[]).await;
    for (name, _) in objects {
        alice.succeeds(&format!("label cm {name} -n {home} team=mine"));
        let line = format!("annotate --overwrite cm {name} -n {home} {source}={home}/colors");
        assert_refused(&line, &alice.fails(&line), "only Lockstep may set these");
        alice.succeeds(&format!("delete cm {name} -n {home}"));
    }
}

#[tokio::test]
async fn exempt_users_and_the_controller_are_allowed() {
    let setup = Setup::new("exempt").await;
    let (cluster, home, away) = (&setup.cluster, &setup.home, &setup.away);
    let group = format!("o'ps {}", cluster.id);
    let bob = cluster.editor("bob", &[], &[home]).await;
    let carol = cluster.editor("carol", &["developers", &group], &[home]).await;
    let _installed = setup.install_policy(&["--exempt-user", &bob.name, "--exempt-group", &group]).await;
    bob.succeeds(&format!("label cm colors-synced -n {home} team=mine"));
    carol.succeeds(&format!("delete cm colors-synced -n {home}"));
    let forged = json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "forged", "labels": {cluster.key("companion"): "true"}},
    });
    bob.succeeds_with(&format!("create -f - -n {home}"), &forged.to_string());

    // The controller creates, updates and deletes companions.
    let _lockstep = cluster.start_controller().await;
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
async fn garbage_collector_and_namespace_controller_are_allowed() {
    let setup = Setup::new("cleanup").await;
    let (cluster, alice, home) = (&setup.cluster, &setup.alice, &setup.home);
    for name in ["background", "foreground", "orphan"] {
        cluster.source(home, name).annotate("protect", "all").create().await;
    }
    let mut lockstep = cluster.start_controller().await;
    for name in ["background", "foreground", "orphan"] {
        cluster.wait_data(home, &format!("{name}-synced"), json!({"sky": "blue"})).await;
    }
    lockstep.stop().await;
    let _installed = setup.install_policy(&[]).await;
    for name in ["background", "foreground", "orphan"] {
        alice.succeeds(&format!("delete cm {name} -n {home} --cascade={name} --wait=false"));
        cluster.wait_collected(&configmap(home, name)).await;
    }
    for name in ["background-synced", "foreground-synced"] {
        cluster.wait_collected(&configmap(home, name)).await;
    }
    let orphan = cluster.configmap(home, "orphan-synced").await.expect("the orphan stays");
    assert!(orphan["metadata"]["ownerReferences"].is_null(), "{orphan}");
    for identity in KUBERNETES_CLEANUP_USERS {
        let line = format!("--as={identity} --as-group=system:masters -n {home}");
        cluster.admin().succeeds(&format!("label cm orphan-synced a={} --overwrite {line}", identity.len()));
        cluster.admin().succeeds(&format!("delete cm orphan-synced --dry-run=server {line}"));
    }

    cluster.admin().succeeds(&format!("delete namespace {home} --wait=false"));
    cluster.wait_collected(&format!("/api/v1/namespaces/{home}")).await;
}

#[tokio::test]
async fn terminating_namespace_is_not_protected() {
    let setup = Setup::new("ending").await;
    let (cluster, alice, home) = (&setup.cluster, &setup.alice, &setup.home);
    let held = json!({"metadata": {"finalizers": ["example.com/held"]}});
    cluster.merge(&configmap(home, "colors-synced"), &held).await;
    let _installed = setup.install_policy(&[]).await;
    let free =
        format!(r#"patch cm colors-synced -n {home} --type merge -p {{"metadata":{{"finalizers":null}}}}"#);
    assert_refused(&free, &alice.fails(&free), &setup.edit_text("configmap", home, "colors"));
    cluster.admin().succeeds(&format!("delete namespace {home} --wait=false"));
    // Alice's RoleBinding is deleted with the namespace, so another user removes the finalizer.
    eventually("the finalizer can be removed", || async {
        let line = free.replace("patch", "patch --as-group=system:masters --as=mallory");
        cluster.admin().kubectl(&line).output().expect("kubectl").status.success().then_some(())
    })
    .await;
    cluster.wait_collected(&format!("/api/v1/namespaces/{home}")).await;
}

#[tokio::test]
async fn api_server_reports_no_type_errors_in_the_policy() {
    let setup = Setup::new("checked").await;
    let _installed = setup.install_policy(&[]).await;
    let name = format!("lockstep.{}", setup.cluster.domain());
    let path = format!("/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies/{name}");
    let status = eventually("the policy is type-checked", || async {
        let policy = setup.cluster.get(&path).await.expect("the policy");
        policy["status"]["typeChecking"].is_object().then(|| policy["status"].clone())
    })
    .await;
    assert!(status["typeChecking"]["expressionWarnings"].is_null(), "{status:#}");
}
