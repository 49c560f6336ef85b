//! Defaults, with kubectl as people use it: the companions of a source depend on its manifest and on the defaults of
//! now, not on how it got there.

use serde_json::{Value, json};

use crate::{
    harness::{Cluster, InstalledManifests, Lockstep, configmap, eventually, output},
    kubectl_commands::assert_refused,
    users::{User, manifest},
};

/// A webhook, and three namespaces: sources in `home` are mirrored to `a` by default, and `b` is what the selector
/// `env=<id>` matches. Alice may write everywhere.
struct Scene {
    cluster: Cluster,
    home: String,
    a: String,
    b: String,
    alice: User,
    _lockstep: Lockstep,
    _installed: InstalledManifests,
}

impl Scene {
    async fn set(test: &str) -> Self {
        let cluster = Cluster::new(test).await;
        let a = cluster.namespace("a").await;
        let b = cluster.namespace_with("b", json!({"env": cluster.id}), json!({})).await;
        let default = json!({cluster.key("default-target-namespaces"): a});
        let home = cluster.namespace_with("home", json!({}), default).await;
        let alice = cluster.cluster_editor("alice", &[]).await;
        let (_installed, _lockstep) = cluster.install_and_start(&[]).await;
        Self { cluster, home, a, b, alice, _lockstep, _installed }
    }

    /// The manifest of the source `colors` with these annotations of Lockstep.
    fn colors(&self, annotations: &[(&str, &str)]) -> String {
        let annotations: Value =
            annotations.iter().map(|(key, value)| (self.cluster.key(key), json!(value))).collect();
        let labels = json!({self.cluster.key("managed"): "true"});
        let metadata =
            json!({"name": "colors", "namespace": self.home, "labels": labels, "annotations": annotations});
        manifest("ConfigMap", &metadata, &json!({"data": {"sky": "blue"}}))
    }

    fn selector(&self) -> String {
        format!("env={}", self.cluster.id)
    }

    async fn source(&self) -> Value {
        self.cluster.configmap(&self.home, "colors").await.expect("the source exists")
    }

    /// The annotation that the webhook writes.
    async fn stamp(&self) -> Value {
        self.source().await["metadata"]["annotations"][self.cluster.key("defaults")].clone()
    }

    async fn version(&self) -> Value {
        self.source().await["metadata"]["resourceVersion"].clone()
    }

    /// What is stamped for these default targets.
    fn targets(namespaces: &str) -> Value {
        json!(format!(r#"{{"target-namespaces":"{namespaces}"}}"#))
    }

    /// Waits until exactly these namespaces have a companion.
    async fn wait_only_in(&self, what: &str, namespaces: &[&String]) {
        let mut expected: Vec<&String> = namespaces.to_vec();
        expected.sort();
        eventually(&format!("{what}: companions in {expected:?}"), || async {
            let mut found = Vec::new();
            for namespace in [&self.a, &self.b, &self.home] {
                let companion = self.cluster.configmap(namespace, "colors-synced").await;
                found.extend(companion.filter(|object| object["data"]["sky"] == "blue").map(|_| namespace));
            }
            (found == expected).then_some(())
        })
        .await;
    }

    /// Changes a default of the namespace, and waits until the webhook has seen that.
    async fn set_default(&self, key: &str, value: Option<&str>, expected: &Value) {
        let patch = json!({"metadata": {"annotations": {self.cluster.key(key): value}}});
        self.cluster.merge(&format!("/api/v1/namespaces/{}", self.home), &patch).await;
        let probe = json!({"metadata": {"name": "probe", "labels": {self.cluster.key("managed"): "true"}}});
        let path = format!("/api/v1/namespaces/{}/configmaps?dryRun=All", self.home);
        eventually("the webhook knows the default", || async {
            let answer = self.cluster.post(&path, &probe).await;
            (answer["metadata"]["annotations"][self.cluster.key("defaults")] == *expected).then_some(())
        })
        .await;
    }

    fn apply(&self, file: &str) -> String {
        self.alice.succeeds_with("apply -f -", file)
    }

    /// Runs a command that must succeed, and returns what it says besides its output: the warnings.
    fn warnings(&self, line: &str, file: &str) -> String {
        let output = output(&mut self.alice.kubectl(line), file);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{line}: {said}");
        said
    }
}

#[tokio::test]
async fn same_manifest_gives_the_same_companions_whatever_was_there_before() {
    let scene = Scene::set("samefile").await;
    let (a, b, home) = (&scene.a, &scene.b, &scene.home);
    let plain = scene.colors(&[]);
    let selecting = scene.colors(&[("target-selector", &scene.selector())]);
    for default in [Some(a), None] {
        let (targets, stamp) = match default {
            Some(a) => (a, Scene::targets(a)),
            None => (home, Value::Null),
        };
        scene.set_default("default-target-namespaces", default.map(|a| a.as_str()), &stamp).await;
        for (what, line, file, expected) in [
            ("create", "apply -f -", &plain, targets),
            ("add a selector", "apply -f -", &selecting, b),
            ("remove it", "apply -f -", &plain, targets),
            ("replace it with a selector", "replace -f -", &selecting, b),
            ("replace that", "replace -f -", &plain, targets),
            ("a selector again", "apply -f -", &selecting, b),
            ("delete", "delete -f -", &selecting, b),
            ("create with a selector", "apply -f -", &selecting, b),
            ("delete", "delete -f -", &selecting, b),
            ("create with server-side apply", "apply --server-side -f -", &plain, targets),
            ("add a selector to that", "apply --server-side -f -", &selecting, b),
            ("remove that", "apply --server-side -f -", &plain, targets),
            ("delete", "delete -f -", &selecting, b),
        ] {
            let what = format!("{what} with default {default:?}");
            scene.alice.succeeds_with(line, file);
            if line.starts_with("delete") {
                scene.wait_only_in(&what, &[]).await;
                continue;
            }
            scene.wait_only_in(&what, &[expected]).await;
            let stamped = if expected == b { Value::Null } else { stamp.clone() };
            assert_eq!(scene.stamp().await, stamped, "{what}");
        }
    }
}

#[tokio::test]
async fn repeated_apply_and_diff_find_nothing_to_change() {
    let scene = Scene::set("reapply").await;
    let file = scene.colors(&[]);
    scene.apply(&file);
    scene.wait_only_in("create", &[&scene.a]).await;
    let version = scene.version().await;
    assert!(scene.apply(&file).contains("configmap/colors unchanged"));
    assert_eq!(scene.version().await, version);
    scene.alice.succeeds_with("diff -f -", &file);
    scene.alice.succeeds_with(&format!("replace -f - -n {}", scene.home), &file);
    scene.apply(&file);
    scene.alice.succeeds_with("diff -f -", &file);

    // The first server-side apply takes over from client-side apply, and writes managedFields.
    scene.alice.succeeds_with("apply --server-side -f -", &file);
    let version = scene.version().await;
    scene.alice.succeeds_with("apply --server-side -f -", &file);
    scene.alice.succeeds_with("diff --server-side -f -", &file);
    assert_eq!(scene.version().await, version);
    // Another manager does not conflict with the stamp, nor does the first one afterwards.
    for manager in ["another", "kubectl"] {
        let line = format!("apply --server-side -f - --field-manager={manager}");
        scene.alice.succeeds_with(&line, &file);
    }
    scene.alice.succeeds_with("diff --server-side -f -", &file);
    assert_eq!(scene.stamp().await, Scene::targets(&scene.a));

    // A diff of a change shows that change, and not the stamp.
    let changed = scene.colors(&[("protect", "all")]);
    let shown = output(&mut scene.alice.kubectl("diff --server-side -f -"), &changed);
    assert_eq!(shown.status.code(), Some(1), "{shown:?}");
    let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
    let differs = |text: &str| {
        let text = format!("{}: ", scene.cluster.key(text));
        shown.lines().any(|line| line.starts_with(['+', '-']) && line.contains(&text))
    };
    assert!(differs("protect") && !differs("defaults"), "{shown}");
}

#[tokio::test]
async fn changed_default_arrives_with_the_next_write() {
    let scene = Scene::set("newdefault").await;
    let (cluster, a, b, home) = (&scene.cluster, &scene.a, &scene.b, &scene.home);
    let file = scene.colors(&[]);
    let warning = |namespace: &str| {
        format!("{} is `{namespace}`, a default: this source is mirrored", cluster.key("target-namespaces"))
    };
    let said = scene.warnings("apply -f -", &file);
    assert!(said.contains(&warning(a)), "{said}");
    scene.wait_only_in("create", &[a]).await;

    let refresh = format!("annotate --overwrite configmap colors -n {home} {}=", cluster.key("defaults"));
    let patch = format!(r#"patch configmap colors -n {home} --type merge -p {{"data":{{"sea":"green"}}}}"#);
    let empty = format!("patch configmap colors -n {home} --type merge -p {{}}");
    for (line, default) in [
        (refresh.as_str(), Some(b)),
        (refresh.as_str(), None),
        (patch.as_str(), Some(a)),
        (empty.as_str(), Some(b)),
        ("apply --server-side --force-conflicts -f -", Some(a)),
        ("replace -f -", None),
    ] {
        let stamp = default.map_or(Value::Null, |name| Scene::targets(name));
        let (before, version) = (scene.stamp().await, scene.version().await);
        scene.set_default("default-target-namespaces", default.map(|name| name.as_str()), &stamp).await;
        assert_eq!((scene.stamp().await, scene.version().await), (before, version), "not before a write");
        let said = scene.warnings(line, &file);
        assert_eq!(scene.stamp().await, stamp, "{line}");
        scene.wait_only_in(line, &[default.unwrap_or(home)]).await;
        let shown = default.is_some_and(|name| said.contains(&warning(name)));
        assert_eq!(shown, default.is_some(), "{line}: {said}");
        let again = scene.warnings(line, &file);
        assert!(!again.contains("a default"), "shown once: {again}");
    }
    // Client-side apply of an unchanged manifest sends nothing.
    scene.apply(&file);
    scene.set_default("default-target-namespaces", Some(a), &Scene::targets(a)).await;
    let version = scene.version().await;
    assert!(scene.apply(&file).contains("configmap/colors unchanged"));
    scene.alice.succeeds_with("diff -f -", &file);
    assert_eq!(scene.version().await, version);
    scene.alice.succeeds(&refresh);
    scene.wait_only_in("refresh", &[a]).await;

    // The same for protect.
    let both = json!(format!(r#"{{"target-namespaces":"{a}","protect":"all"}}"#));
    scene.set_default("default-protect", Some("all"), &both).await;
    scene.alice.succeeds(&refresh);
    assert_eq!(scene.stamp().await, both);
    cluster
        .wait(a, "colors-synced", "protect", |object| {
            object["metadata"]["annotations"][cluster.key("protect")] == "all"
        })
        .await;
    let line = format!("delete configmap colors-synced -n {a}");
    assert_refused(&line, &scene.alice.fails(&line), "is a companion");
}

#[tokio::test]
async fn changed_default_needs_the_rights_of_the_user_whose_write_brings_it() {
    let scene = Scene::set("bringer").await;
    let (cluster, a, b, home) = (&scene.cluster, &scene.a, &scene.b, &scene.home);
    let bob = cluster.editor("bob", &[], &[home, a]).await;
    bob.succeeds_with("apply -f -", &scene.colors(&[]));
    scene.wait_only_in("create", &[a]).await;
    scene.set_default("default-target-namespaces", Some(b), &Scene::targets(b)).await;
    let line = format!("annotate configmap colors -n {home} team=mine");
    let refused = bob.fails(&line);
    assert_refused(&line, &refused, &format!("may not create configmaps colors-synced in namespace {b}"));
    let key = cluster.key("target-namespaces");
    assert!(refused.contains(&format!("to choose others, set {key} on it")), "{refused}");
    // As the message says: he keeps the companions that there are.
    bob.succeeds(&format!("annotate configmap colors -n {home} {key}={a}"));
    bob.succeeds(&line);
    assert_eq!(scene.stamp().await, Value::Null);
    scene.wait_only_in("chosen", &[a]).await;
}

#[tokio::test]
async fn defaults_written_by_hand_are_recomputed_away() {
    let scene = Scene::set("byhand").await;
    let (a, b, home) = (&scene.a, &scene.b, &scene.home);
    let by_hand = format!(r#"{{"target-namespaces":"{b}","protect":"none"}}"#);
    let right = Scene::targets(a);
    scene.apply(&scene.colors(&[("defaults", &by_hand)]));
    assert_eq!(scene.stamp().await, right);
    scene.wait_only_in("create", &[a]).await;
    let key = scene.cluster.key("defaults");
    for text in [by_hand.as_str(), "", "x", "{}"] {
        let line = format!("annotate --overwrite configmap colors -n {home} {key}={text}");
        scene.alice.succeeds(&line);
        assert_eq!(scene.stamp().await, right, "{line}");
        scene.alice.succeeds_with("replace -f -", &scene.colors(&[("defaults", text)]));
        assert_eq!(scene.stamp().await, right, "{text}");
        scene.alice.succeeds_with(
            "apply --server-side --force-conflicts -f -",
            &scene.colors(&[("defaults", text)]),
        );
        assert_eq!(scene.stamp().await, right, "{text}");
    }
    scene.alice.succeeds(&format!("annotate configmap colors -n {home} {key}-"));
    assert_eq!(scene.stamp().await, right);
    scene.wait_only_in("after all of these", &[a]).await;
}

/// The webhook that stamps fails open. The one that reviews does not.
#[tokio::test]
async fn defaults_written_by_hand_are_reviewed_while_stamping_is_down() {
    let scene = Scene::set("unstamped2").await;
    let (cluster, a, b, home) = (&scene.cluster, &scene.a, &scene.b, &scene.home);
    let bob = cluster.editor("bob", &[], &[home]).await;
    bob.succeeds_with("apply -f -", &scene.colors(&[("target-namespaces", ".")]));
    scene.wait_only_in("create", &[home]).await;
    let name = format!("lockstep.{}", cluster.domain());
    cluster.admin().succeeds(&format!("delete mutatingwebhookconfiguration {name}"));
    // A source without defaults, once nothing is stamped any more.
    scene.set_default("default-target-namespaces", Some(a), &Value::Null).await;

    let (key, by_hand) = (cluster.key("defaults"), format!(r#"{{"target-namespaces":"{b}"}}"#));
    let text = format!("may not create configmaps colors-synced in namespace {b}");
    let line = "apply -f -";
    assert_refused(line, &bob.fails_with(line, &scene.colors(&[("defaults", &by_hand)])), &text);
    // What the person chose counts, whatever stands there; without that choice it is reviewed.
    bob.succeeds(&format!("annotate configmap colors -n {home} {key}={by_hand}"));
    let line = format!("annotate configmap colors -n {home} {}-", cluster.key("target-namespaces"));
    assert_refused(&line, &bob.fails(&line), &text);
    let everywhere = r#"{"target-namespaces":"*"}"#;
    let line = format!(
        "annotate --overwrite configmap colors -n {home} {key}={everywhere} {}-",
        cluster.key("target-namespaces")
    );
    assert_refused(&line, &bob.fails(&line), "in all namespaces");
    for malformed in ["", "x", r#"{"adopt":"true"}"#, r#"{"protect":"everything"}"#] {
        let line = format!("annotate --overwrite configmap colors -n {home} {key}={malformed}");
        assert_refused(&line, &bob.fails(&line), &format!("cannot be a source: annotation {key}: "));
    }
    scene.wait_only_in("refused", &[home]).await;

    // With the rights it is a policy like any other, until the webhook stamps again.
    scene.apply(&scene.colors(&[("defaults", &by_hand)]));
    scene.wait_only_in("reviewed", &[b]).await;
    cluster.apply(&["--webhook-url", &cluster.url()]);
    cluster.wait_webhook().await;
    scene.alice.succeeds(&format!("annotate configmap colors -n {home} team=mine"));
    assert_eq!(scene.stamp().await, Scene::targets(a));
    scene.wait_only_in("stamped again", &[a]).await;
}

/// An earlier build wrote `target-namespaces` and `protect` into the source. Nobody can tell these from a choice.
#[tokio::test]
async fn source_stamped_by_an_earlier_build_keeps_its_companions() {
    let scene = Scene::set("earlier").await;
    let (cluster, a, home) = (&scene.cluster, &scene.a, &scene.home);
    let file = scene.colors(&[]);
    // As the earlier build left it: the keys are not in the manifest that kubectl remembers.
    scene.apply(&scene.colors(&[("target-namespaces", "."), ("protect", "edits")]));
    scene.alice.succeeds_with("apply set-last-applied -f -", &file);
    let annotations = || async {
        let mut annotations = scene.source().await["metadata"]["annotations"].clone();
        annotations.as_object_mut().unwrap().remove("kubectl.kubernetes.io/last-applied-configuration");
        annotations
    };
    let before = json!({cluster.key("target-namespaces"): ".", cluster.key("protect"): "edits"});
    scene
        .set_default(
            "default-protect",
            Some("all"),
            &json!(format!(r#"{{"target-namespaces":"{a}","protect":"all"}}"#)),
        )
        .await;
    assert!(scene.apply(&file).contains("configmap/colors unchanged"));
    scene.alice.succeeds_with("diff -f -", &file);
    scene.alice.succeeds(&format!("label configmap colors -n {home} team=mine"));
    assert_eq!(annotations().await, before);
    scene.wait_only_in("still", &[home]).await;
    let companion = cluster.configmap(home, "colors-synced").await.unwrap();
    assert_eq!(companion["metadata"]["annotations"][cluster.key("protect")], "edits");

    // Without the old keys, the defaults of now apply.
    let (targets, protect) = (cluster.key("target-namespaces"), cluster.key("protect"));
    scene.alice.succeeds(&format!("annotate configmap colors -n {home} {targets}- {protect}-"));
    assert_eq!(
        annotations().await,
        json!({cluster.key("defaults"): format!(r#"{{"target-namespaces":"{a}","protect":"all"}}"#)})
    );
    scene.wait_only_in("by default", &[a]).await;
    cluster.wait_gone(&configmap(home, "colors-synced")).await;
}
