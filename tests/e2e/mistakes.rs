//! Probable mistakes are warnings when an object is written, and Events afterwards.

use serde_json::json;

use crate::{
    harness::{Cluster, Lockstep, configmap},
    users::User,
};

/// What kubectl printed as warnings for a command that succeeded.
fn warned(user: &User, line: &str) -> String {
    let output = user.kubectl(line).output().expect("kubectl");
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{line}: {text}");
    text
}

struct Scene {
    cluster: Cluster,
    home: String,
    admin: User,
    lockstep: Lockstep,
    _installed: crate::harness::InstalledManifests,
}

impl Scene {
    async fn set(test: &str) -> Self {
        let cluster = Cluster::new(test).await;
        let home = cluster.namespace("home").await;
        let (installed, lockstep) = cluster.install_and_start(&[]).await;
        let admin = cluster.admin();
        cluster.source(&home, "colors").create().await;
        cluster.wait_data(&home, "colors-synced", json!({"sky": "blue"})).await;
        Self { cluster, home, admin, lockstep, _installed: installed }
    }

    fn annotate(&self, key: &str, value: &str) -> String {
        warned(
            &self.admin,
            &format!("annotate --overwrite cm colors -n {} {}={value}", self.home, self.cluster.key(key)),
        )
    }

    /// The author is warned, and the source has an Event and a metric that say the same.
    async fn expect(&self, warnings: &str, text: &str, event: &str, reason: &str) {
        assert!(warnings.contains(&format!("Warning: {text}")), "{warnings}");
        let note = self.cluster.wait_event(&self.home, "colors", event).await;
        assert!(note.contains(text), "{event}: {note}");
        self.lockstep.wait_metric(&format!("lockstep_troubles{{reason=\"{reason}\"}}"), 1.0).await;
    }
}

#[tokio::test]
async fn unknown_annotation_is_named_with_the_one_that_was_probably_meant() {
    let scene = Scene::set("typos").await;
    let key = |name: &str| scene.cluster.key(name);
    let warnings = scene.annotate("tagret-namespaces", "away");
    let text = format!(
        "the annotation {} is unknown and has no effect: did you mean {}?",
        key("tagret-namespaces"),
        key("target-namespaces")
    );
    scene.expect(&warnings, &text, "Mistake", "mistake").await;
    // It ends with the mistake.
    scene.admin.succeeds(&format!("annotate cm colors -n {} {}-", scene.home, key("tagret-namespaces")));
    scene.lockstep.wait_metric("lockstep_troubles{reason=\"mistake\"}", 0.0).await;

    let warnings = scene.annotate("copy-labels", "team,app.kubernetes.io/managed-by");
    let text =
        format!("{}: `app.kubernetes.io/managed-by` is never copied to companions", key("copy-labels"));
    assert!(warnings.contains(&text), "{warnings}");
    // On a Namespace, for which there is no webhook, the log says it.
    let line = format!("annotate namespace {} {}=x", scene.home, key("acept-from"));
    scene.admin.succeeds(&line);
    scene.lockstep.wait_log(&format!("did you mean {}?", key("accept-from"))).await;
}

#[tokio::test]
async fn pattern_selector_or_name_without_a_namespace_is_reported_until_there_is_one() {
    let scene = Scene::set("nowhere").await;
    let (cluster, id) = (&scene.cluster, &scene.cluster.id);
    let warnings = scene.annotate("target-namespaces", &format!("{id}-late-*"));
    scene.expect(&warnings, &format!("`{id}-late-*` matches no namespace"), "NoMatch", "no_match").await;
    let late = cluster.namespace("late-1").await;
    cluster.wait_data(&late, "colors-synced", json!({"sky": "blue"})).await;
    scene.lockstep.wait_metric("lockstep_troubles{reason=\"no_match\"}", 0.0).await;

    let missing = cluster.ns("missing");
    let warnings = scene.annotate("target-namespaces", &missing);
    let text = format!("namespace {missing} does not exist; it gets a companion once it exists");
    scene.expect(&warnings, &text, "NoNamespace", "no_namespace").await;
    cluster.namespace("missing").await;
    cluster.wait_data(&missing, "colors-synced", json!({"sky": "blue"})).await;
    scene.lockstep.wait_metric("lockstep_troubles{reason=\"no_namespace\"}", 0.0).await;
}

#[tokio::test]
async fn keys_that_select_nothing_are_refused_unless_the_source_is_empty() {
    let scene = Scene::set("nothing").await;
    let (cluster, home) = (&scene.cluster, &scene.home);
    let key = cluster.key("keys");
    let refused = scene.admin.fails(&format!("annotate cm colors -n {home} {key}=sea"));
    let text = format!(
        "the annotation {key} selects none of the keys that this object has: name at least one of them"
    );
    assert!(refused.contains(&text), "{refused}");
    // A key that goes away later leaves the companion as it is, and is reported.
    scene.admin.succeeds(&format!("annotate cm colors -n {home} {key}=sky"));
    let line =
        format!(r#"patch cm colors -n {home} --type merge -p {{"data":{{"sky":null,"sea":"green"}}}}"#);
    let warnings = warned(&scene.admin, &line);
    assert!(warnings.contains(&text), "{warnings}");
    assert!(cluster.wait_event(home, "colors", "Refused").await.contains(&text));
    cluster.wait_data(home, "colors-synced", json!({"sky": "blue"})).await;
    // An empty source has an empty companion.
    cluster.source(home, "empty").with("/data", json!({})).annotate("keys", "a").create().await;
    cluster.wait(home, "empty-synced", "exists", |_| true).await;
}

#[tokio::test]
async fn managed_label_with_another_value_than_true_is_a_warning() {
    let scene = Scene::set("labels").await;
    let (cluster, home, managed) = (&scene.cluster, &scene.home, scene.cluster.key("managed"));
    scene.admin.succeeds(&format!("create cm plain -n {home}"));
    let warnings = warned(&scene.admin, &format!("label cm plain -n {home} {managed}=yes"));
    let text = format!("the label {managed} is `yes`, and only `true` makes {home}/plain a source");
    assert!(warnings.contains(&text), "{warnings}");
    let warnings = warned(&scene.admin, &format!("label --overwrite cm colors -n {home} {managed}=True"));
    let text = format!("is `True`, and only `true` makes {home}/colors a source: its companions are deleted");
    assert_eq!(warnings.matches(&text).count(), 1, "{warnings}");
    cluster.wait_gone(&configmap(home, "colors-synced")).await;
    // The log and the Event do not call the source gone.
    let note = cluster.wait_event(home, "colors", "Removed").await;
    assert_eq!(note, format!("deleted 1: {home}/colors-synced (no longer labelled)"));
}

#[tokio::test]
async fn paused_source_warns_of_changes_that_wait() {
    let scene = Scene::set("waiting").await;
    let (cluster, home) = (&scene.cluster, &scene.home);
    scene.annotate("paused", "true");
    let line = format!(r#"patch cm colors -n {home} --type merge -p {{"data":{{"sky":"red"}}}}"#);
    let warnings = warned(&scene.admin, &line);
    let text = format!(
        "{home}/colors is paused: its companions do not follow until the annotation {} is removed",
        cluster.key("paused")
    );
    assert!(warnings.contains(&text), "{warnings}");
    let note = cluster.wait_event(home, "colors", "Paused").await;
    assert_eq!(
        note,
        "it is paused; companions that do not follow it until the annotation paused is removed: 1"
    );
    scene.admin.succeeds(&format!("annotate cm colors -n {home} {}-", cluster.key("paused")));
    cluster.wait_data(home, "colors-synced", json!({"sky": "red"})).await;
    scene.lockstep.wait_metric("lockstep_troubles{reason=\"paused\"}", 0.0).await;
}
