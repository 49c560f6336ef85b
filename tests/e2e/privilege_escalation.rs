//! No user does through Lockstep what RBAC does not allow them to do themselves.

use serde_json::{Value, json};

use crate::{
    harness::{Cluster, InstalledManifests, Lockstep, configmap, eventually, secret},
    kubectl_commands::assert_refused,
    users::{User, manifest},
};

/// A webhook, two namespaces, and two users: Bob may write in `home` only, Alice in both.
struct Scene {
    cluster: Cluster,
    home: String,
    away: String,
    alice: User,
    bob: User,
    lockstep: Lockstep,
    _installed: InstalledManifests,
}

impl Scene {
    async fn set(test: &str) -> Self {
        Self::with(test, &[]).await
    }

    async fn with(test: &str, flags: &[&str]) -> Self {
        let cluster = Cluster::new(test).await;
        let home = cluster.namespace("home").await;
        let away = cluster.namespace_with("away", json!({"env": cluster.id}), json!({})).await;
        let alice = cluster.editor("alice", &[], &[&home, &away]).await;
        let bob = cluster.editor("bob", &[], &[&home]).await;
        let (installed, lockstep) = cluster.install_and_start(flags).await;
        Self { cluster, home, away, alice, bob, lockstep, _installed: installed }
    }

    /// The manifest of a source with these settings.
    fn source(&self, kind: &str, name: &str, asks: &[(&str, &str)]) -> String {
        let annotations: serde_json::Map<String, Value> =
            asks.iter().map(|(key, value)| (self.cluster.key(key), json!(value))).collect();
        let labels = json!({self.cluster.key("managed"): "true"});
        let metadata = json!({"name": name, "labels": labels, "annotations": annotations});
        manifest(kind, &metadata, &json!({"data": {"sky": "Ymx1ZQ=="}}))
    }

    /// The message to a user who may not do this to a companion in `away`.
    fn refusal(&self, person: &User, verb: &str, kind: &str, name: &str) -> String {
        let (away, accept) = (&self.away, self.cluster.key("accept-from"));
        format!(
            "{} may not {verb} {kind} {name} in namespace {away}, so Lockstep does not do it on their behalf. \
             Ask for that right, or for this: kubectl annotate namespace {away} {accept}={}\n",
            person.name, self.home
        )
    }

    /// The message to a user who asks for namespaces by a pattern; what follows depends on the source.
    fn refusal_everywhere(&self, person: &User, verb: &str, name: &str) -> String {
        format!(
            "{} may not {verb} configmaps {name} in all namespaces, which a pattern or a selector needs. \
             Ask for that right, or list the namespaces in {}",
            person.name,
            self.cluster.key("target-namespaces")
        )
    }

    /// The names of all ConfigMaps and Secrets in `away` that Lockstep may have created.
    async fn found_in_away(&self) -> Vec<String> {
        let mut names = Vec::new();
        for kind in ["configmaps", "secrets"] {
            let list = self.cluster.get(&format!("/api/v1/namespaces/{}/{kind}", self.away)).await.unwrap();
            let items = list["items"].as_array().unwrap().iter();
            names.extend(items.map(|item| item["metadata"]["name"].as_str().unwrap().to_owned()));
        }
        names.retain(|name| name != "kube-root-ca.crt");
        names
    }

    async fn wait_secret(&self, namespace: &str, name: &str) {
        let path = secret(namespace, name);
        eventually("the Secret's companion", || self.cluster.get(&path)).await;
    }

    /// Waits until the controller has reconciled a source that Bob creates now: it has reconciled earlier ones by
    /// then.
    async fn reconciled(&self) {
        self.bob.succeeds_with(
            &format!("create -f - -n {}", self.home),
            &self.source("ConfigMap", "last", &[("target-namespaces", ".")]),
        );
        self.cluster.wait(&self.home, "last-synced", "it is there", |_| true).await;
    }
}

#[tokio::test]
async fn source_is_refused_where_its_author_may_not_write_the_companion() {
    let scene = Scene::set("appears").await;
    let (cluster, bob, home, away) = (&scene.cluster, &scene.bob, &scene.home, &scene.away);
    let (prefix, labelled) = (format!("{}-a*", cluster.id), format!("env={}", cluster.id));
    let named = scene.refusal(bob, "create", "configmaps", "x-synced");
    let everywhere = scene.refusal_everywhere(bob, "create", "x-synced");
    for (key, value, text) in [
        ("target-namespaces", away.as_str(), &named),
        ("target-namespaces", &format!(".,{away}"), &named),
        ("target-namespaces", &prefix, &everywhere),
        ("target-namespaces", "*", &everywhere),
        ("target-selector", &labelled, &everywhere),
    ] {
        let source = scene.source("ConfigMap", "x", &[(key, value)]);
        for line in ["create -f -", "create --dry-run=server -f -", "apply -f -", "apply --server-side -f -"]
        {
            let line = format!("{line} -n {home}");
            assert_refused(&line, &bob.fails_with(&line, &source), text);
        }
        // In two steps, each of which is harmless by itself: the last one is refused.
        let (label, annotation) = (cluster.key("managed"), cluster.key(key));
        for (first, last) in [
            (
                format!("label cm x -n {home} {label}=true"),
                format!("annotate --overwrite cm x -n {home} {annotation}={value}"),
            ),
            (
                format!("annotate cm x -n {home} {annotation}={value}"),
                format!("label cm x -n {home} {label}=true"),
            ),
        ] {
            bob.succeeds(&format!("create cm x -n {home}"));
            bob.succeeds(&first);
            assert_refused(&last, &bob.fails(&last), text);
            bob.succeeds(&format!("delete cm x -n {home}"));
        }
    }
    // A source that works, redirected by every kind of update.
    // With an annotation, so that a JSON patch can add another one.
    let plain = scene.source("ConfigMap", "x", &[("protect", "edits")]);
    bob.succeeds_with(&format!("create -f - -n {home}"), &plain);
    let change = json!({"metadata": {"annotations": {cluster.key("target-namespaces"): away}}});
    let pointer = format!("/metadata/annotations/{}", cluster.key("target-namespaces").replace('/', "~1"));
    for line in [
        format!("patch cm x -n {home} --type merge -p {change}"),
        format!("patch cm x -n {home} --type strategic -p {change}"),
        format!(
            r#"patch cm x -n {home} --type json -p [{{"op":"add","path":"{pointer}","value":"{away}"}}]"#
        ),
    ] {
        assert_refused(&line, &bob.fails(&line), &named);
    }
    let turned = scene.source("ConfigMap", "x", &[("target-namespaces", away)]);
    for line in ["replace -f -", "apply -f -", "apply --server-side --force-conflicts -f -"] {
        let line = format!("{line} -n {home}");
        assert_refused(&line, &bob.fails_with(&line, &turned), &named);
    }
    // The same goes for a Secret, and for a paused source.
    let line = format!("create -f - -n {home}");
    let source = scene.source("Secret", "x", &[("target-namespaces", away), ("paused", "true")]);
    let text = scene.refusal(bob, "create", "secrets", "x-synced");
    assert_refused(&line, &bob.fails_with(&line, &source), &text);

    scene.reconciled().await;
    assert!(scene.found_in_away().await.is_empty(), "{:?}", scene.found_in_away().await);

    // Alice has the rights in `away`.
    scene.alice.succeeds_with(&format!("replace -f - -n {home}"), &turned);
    scene.alice.succeeds_with(&line, &scene.source("Secret", "x", &[("target-namespaces", away)]));
    cluster.wait(away, "x-synced", "it is there", |_| true).await;
    scene.wait_secret(away, "x-synced").await;
    // She does not have them in all namespaces.
    let wide = scene.source("ConfigMap", "y", &[("target-namespaces", &prefix)]);
    let text = scene.refusal_everywhere(&scene.alice, "create", "y-synced");
    assert_refused(&line, &scene.alice.fails_with(&line, &wide), &text);
    let ranger = cluster.cluster_editor("ranger", &[]).await;
    eventually("the right is known", || async {
        let output = crate::harness::output(&mut ranger.kubectl(&line), &wide);
        output.status.success().then_some(())
    })
    .await;
    cluster.wait(away, "y-synced", "it is there", |_| true).await;
}

#[tokio::test]
async fn namespace_defaults_need_the_access_of_the_user_who_writes_the_source() {
    let scene = Scene::set("defaults").await;
    let (cluster, away) = (&scene.cluster, &scene.away);
    let selector = json!({cluster.key("default-target-selector"): format!("env={}", cluster.id)});
    let wide = cluster.namespace_with("wide", json!({}), selector).await;
    let named = json!({cluster.key("default-target-namespaces"): away});
    let named = cluster.namespace_with("named", json!({}), named).await;
    let carl = cluster.editor("carl", &[], &[&wide, &named]).await;
    let plain = scene.source("ConfigMap", "x", &[]);
    let line = format!("create -f - -n {wide}");
    let text = format!(
        "the source names no targets, so those of a default apply (to choose others, set {} on it): {}",
        cluster.key("target-namespaces"),
        scene.refusal_everywhere(&carl, "create", "x-synced")
    );
    assert_refused(&line, &carl.fails_with(&line, &plain), &text);
    let line = format!("create -f - -n {named}");
    let text = format!("{} may not create configmaps x-synced in namespace {away}", carl.name);
    assert_refused(&line, &carl.fails_with(&line, &plain), &text);
    // In his own namespace, Carl has the rights.
    carl.succeeds_with(&line, &scene.source("ConfigMap", "x", &[("target-namespaces", ".")]));
    cluster.wait(&named, "x-synced", "it is there", |_| true).await;
    assert!(scene.found_in_away().await.is_empty());
}

#[tokio::test]
async fn change_of_a_source_is_refused_to_users_without_access_to_its_targets() {
    let scene = Scene::set("changed").await;
    let (cluster, bob, home, away) = (&scene.cluster, &scene.bob, &scene.home, &scene.away);
    let owner = json!({"metadata": {"name": "owner"}});
    let owner = cluster.post(&format!("/api/v1/namespaces/{home}/configmaps"), &owner).await;
    let both = format!(".,{away}");
    let source =
        cluster.source(home, "colors").annotate("target-namespaces", &both).annotate("copy-labels", "team");
    source.with("/metadata/labels/team", json!("a")).create().await;
    let sky = json!({"sky": "Ymx1ZQ=="});
    cluster
        .source(home, "key")
        .secret("Opaque", sky.clone())
        .annotate("target-namespaces", away)
        .create()
        .await;
    let before = cluster.wait_data(away, "colors-synced", json!({"sky": "blue"})).await;
    scene.wait_secret(away, "key-synced").await;

    let key = |name: &str| cluster.key(name);
    let owned = |name: &str, uid: &Value| json!({"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "ConfigMap", "name": name, "uid": uid}]}});
    let collection = format!("/api/v1/namespaces/{home}/configmaps?labelSelector={}%3Dtrue", key("managed"));
    let at = format!("cm colors -n {home}");
    // A change of companions takes all three verbs, their removal takes `delete`.
    let changes = [
        (format!(r#"patch {at} --type merge -p {{"data":{{"sky":"mine"}}}}"#), "create"),
        (format!(r#"patch {at} --type merge -p {{"immutable":true}}"#), "create"),
        (format!("annotate {at} {}=sky", key("keys")), "create"),
        (format!("annotate {at} --overwrite {}=none", key("protect")), "create"),
        (format!("annotate {at} {}=true", key("paused")), "create"),
        (format!("annotate {at} {}=true", key("adopt")), "create"),
        (format!("annotate {at} {}=example.com/*", key("copy-annotations")), "create"),
        (format!("label {at} --overwrite team=b"), "create"),
        (format!("label {at} team-"), "create"),
        (
            format!(r#"patch {at} --type merge -p {{"metadata":{{"finalizers":["example.com/held"]}}}}"#),
            "create",
        ),
        (format!("patch {at} --type merge -p {}", owned("owner", &owner["metadata"]["uid"])), "create"),
        (format!("patch {at} --type merge -p {}", owned("gone", &json!("11111111-2222"))), "create"),
        (format!("annotate {at} --overwrite {}=.", key("target-namespaces")), "delete"),
        (format!("annotate {at} {}-", key("target-namespaces")), "delete"),
        (format!("label {at} {}-", key("managed")), "delete"),
        (format!("label {at} --overwrite {}=false", key("managed")), "delete"),
        (format!("delete {at}"), "delete"),
        (format!("delete {at} --dry-run=server"), "delete"),
        (format!("delete {at} --cascade=orphan"), "delete"),
        (format!("delete {at} --cascade=foreground"), "delete"),
        (format!("delete --raw {collection}"), "delete"),
    ];
    for (line, verb) in &changes {
        assert_refused(line, &bob.fails(line), &scene.refusal(bob, verb, "configmaps", "colors-synced"));
    }
    let line = format!("annotate {at} {}=other", key("companion-name"));
    let complaint = bob.fails(&line);
    assert!(complaint.contains("may not delete configmaps colors-synced"), "{complaint}");
    let emptied = scene.source("ConfigMap", "colors", &[("target-namespaces", &both)]);
    for line in ["replace -f -", "apply -f -", "apply --server-side --force-conflicts -f -"] {
        let line = format!("{line} -n {home}");
        assert_refused(
            &line,
            &bob.fails_with(&line, &emptied),
            &scene.refusal(bob, "create", "configmaps", "colors-synced"),
        );
    }
    let line = format!("replace --force -f - -n {home}");
    assert_refused(
        &line,
        &bob.fails_with(&line, &emptied),
        &scene.refusal(bob, "delete", "configmaps", "colors-synced"),
    );
    for (line, verb) in [
        (format!(r#"patch secret key -n {home} --type merge -p {{"data":{{"sky":"bWluZQ=="}}}}"#), "create"),
        (format!("delete secret key -n {home}"), "delete"),
    ] {
        assert_refused(&line, &bob.fails(&line), &scene.refusal(bob, verb, "secrets", "key-synced"));
    }
    // A change that does not affect companions takes no rights elsewhere.
    bob.succeeds(&format!("label {at} mood=good"));
    bob.succeeds(&format!("annotate {at} example.com/note=x"));

    scene.reconciled().await;
    let after = cluster.configmap(away, "colors-synced").await.unwrap();
    assert_eq!(after["metadata"]["resourceVersion"], before["metadata"]["resourceVersion"], "untouched");

    // Alice may do all of that. A dry run is reviewed like any request.
    for (line, _) in changes.iter().filter(|(line, _)| !line.contains("--raw") && !line.contains("dry-run")) {
        scene.alice.succeeds(&format!("{line} --dry-run=server"));
    }
    scene.alice.succeeds(&changes[0].0);
    cluster.wait_data(away, "colors-synced", json!({"sky": "mine"})).await;
    scene.alice.succeeds(&format!("delete {at}"));
    cluster.wait_gone(&configmap(away, "colors-synced")).await;
}

#[tokio::test]
async fn faulty_source_does_not_bypass_the_access_check() {
    let scene = Scene::set("nonsense").await;
    let (cluster, bob, home, away) = (&scene.cluster, &scene.bob, &scene.home, &scene.away);
    cluster.source(home, "colors").annotate("target-namespaces", away).create().await;
    cluster.wait_data(away, "colors-synced", json!({"sky": "blue"})).await;
    let at = format!("cm colors -n {home}");
    // Bob cannot make the source faulty; an exempt user does.
    let line = format!("annotate {at} {}=everything --overwrite", cluster.key("protect"));
    assert_refused(&line, &bob.fails(&line), "cannot be a source");
    let own = "--as=system:serviceaccount:lockstep-system:lockstep";
    cluster.admin().succeeds(&format!("{line} {own}"));
    cluster.wait_event(home, "colors", "Refused").await;

    let gone = json!({"metadata": {"ownerReferences": [{"apiVersion": "v1", "kind": "Pod", "name": "x", "uid": "x-y-z"}]}});
    for line in [
        format!("delete {at}"),
        format!("label {at} {}-", cluster.key("managed")),
        format!("patch {at} --type merge -p {gone}"),
    ] {
        assert_refused(
            &line,
            &bob.fails(&line),
            &scene.refusal(bob, "delete", "configmaps", "colors-synced"),
        );
    }
    // The content of a faulty source is not mirrored.
    bob.succeeds(&format!(r#"patch {at} --type merge -p {{"data":{{"sky":"mine"}}}}"#));
    scene.reconciled().await;
    assert_eq!(cluster.configmap(away, "colors-synced").await.unwrap()["data"], json!({"sky": "blue"}));
    // Nor may Bob repair it.
    let line = format!("annotate {at} {}-", cluster.key("protect"));
    assert_refused(&line, &bob.fails(&line), &scene.refusal(bob, "create", "configmaps", "colors-synced"));
    scene.alice.succeeds(&line);
    cluster.wait_data(away, "colors-synced", json!({"sky": "mine"})).await;
}

#[tokio::test]
async fn leftover_companions_do_not_bypass_the_access_check() {
    let scene = Scene::set("leftover").await;
    let (cluster, bob, home, away) = (&scene.cluster, &scene.bob, &scene.home, &scene.away);
    // The brake holds so many deletes at once: the companions stay for a while.
    let names: Vec<String> = (0..25).map(|n| format!("s{n}")).collect();
    for name in &names {
        cluster.source(home, name).annotate("target-namespaces", away).create().await;
    }
    for name in &names {
        cluster.wait_data(away, &format!("{name}-synced"), json!({"sky": "blue"})).await;
    }
    scene.alice.succeeds(&format!("delete cm -n {home} {}", names.join(" ")));
    scene.lockstep.wait_metric("lockstep_deletes_held", 1.0).await;
    let kept = "s24-synced";
    assert!(cluster.configmap(away, kept).await.is_some(), "it is held");

    let line = format!("create -f - -n {home}");
    for asks in [&[("target-namespaces", ".")][..], &[("target-namespaces", "."), ("paused", "true")][..]] {
        let source = scene.source("ConfigMap", "s24", asks);
        let text = scene.refusal(bob, "delete", "configmaps", kept);
        assert_refused(&line, &bob.fails_with(&line, &source), &text);
    }
    scene.alice.succeeds_with(&line, &scene.source("ConfigMap", "s24", &[("target-namespaces", away)]));
    cluster.wait_data(away, kept, json!({"sky": "Ymx1ZQ=="})).await;
}

#[tokio::test]
async fn rights_on_one_resource_name_give_access_to_no_other() {
    let scene = Scene::set("byname").await;
    let (cluster, home) = (&scene.cluster, &scene.home);
    let dora = cluster.named_object_editor("dora", home, &["paint", "paint-synced", "paint-too"]).await;
    for name in ["vital", "paint"] {
        let object = json!({"metadata": {"name": name}, "data": {"theirs": "1"}});
        cluster.post(&format!("/api/v1/namespaces/{home}/configmaps"), &object).await;
    }
    let before = cluster.configmap(home, "vital").await.unwrap();
    let refusal = |verb: &str, name: &str| {
        format!(
            "{} may not {verb} configmaps {name} in namespace {home}, so Lockstep does not keep it there on their \
             behalf. Ask for that right, or choose another {}\n",
            dora.name,
            cluster.key("companion-name")
        )
    };
    let key = |name: &str| cluster.key(name);
    // With the default name, a free one, one that is taken, and by adopting it.
    let line = format!("create -f - -n {home}");
    for (source, name) in [
        (scene.source("ConfigMap", "other", &[]), "other-synced"),
        (scene.source("ConfigMap", "other", &[("companion-name", "free")]), "free"),
        (scene.source("ConfigMap", "other", &[("companion-name", "vital"), ("adopt", "true")]), "vital"),
    ] {
        assert_refused(&line, &dora.fails_with(&line, &source), &refusal("update", name));
    }
    dora.succeeds(&format!("label cm paint -n {home} {}=true", key("managed")));
    cluster.wait_data(home, "paint-synced", json!({"theirs": "1"})).await;
    for line in [
        format!("annotate cm paint -n {home} {}=vital", key("companion-name")),
        format!("annotate cm paint -n {home} {}=vital {}=true", key("companion-name"), key("adopt")),
    ] {
        assert_refused(&line, &dora.fails(&line), &refusal("update", "vital"));
    }
    dora.succeeds(&format!("annotate cm paint -n {home} {}=true", key("adopt")));
    dora.succeeds(&format!("annotate cm paint -n {home} {}=paint-too", key("companion-name")));
    cluster.wait_data(home, "paint-too", json!({"theirs": "1"})).await;
    cluster.wait_gone(&configmap(home, "paint-synced")).await;
    assert_eq!(cluster.configmap(home, "vital").await.unwrap(), before);
}

#[tokio::test]
async fn accept_from_replaces_access_for_namespaces_listed_by_name_but_not_for_patterns() {
    let scene = Scene::set("invited").await;
    let (cluster, bob, home) = (&scene.cluster, &scene.bob, &scene.home);
    let accept = json!({cluster.key("accept-from"): format!("elsewhere,{home}")});
    let open = cluster.namespace_with("open", json!({"door": cluster.id}), accept).await;
    let line = format!("create -f - -n {home}");
    let prefix = format!("{}-op*", cluster.id);
    for (key, value) in
        [("target-namespaces", prefix.as_str()), ("target-selector", &format!("door={}", cluster.id))]
    {
        let source = scene.source("ConfigMap", "x", &[(key, value)]);
        assert_refused(
            &line,
            &bob.fails_with(&line, &source),
            &scene.refusal_everywhere(bob, "create", "x-synced"),
        );
    }
    // Only one of two namespaces accepts from `home`.
    let source = scene.source("ConfigMap", "x", &[("target-namespaces", &format!("{open},{}", scene.away))]);
    assert_refused(
        &line,
        &bob.fails_with(&line, &source),
        &scene.refusal(bob, "create", "configmaps", "x-synced"),
    );
    let other = cluster.namespace("other").await;
    let carl = cluster.editor("carl", &[], &[&other]).await;
    let source = |kind| scene.source(kind, "x", &[("target-namespaces", &open)]);
    let from_other = format!("create -f - -n {other}");
    let text = format!("{} may not create configmaps x-synced in namespace {open}", carl.name);
    assert_refused(&from_other, &carl.fails_with(&from_other, &source("ConfigMap")), &text);

    bob.succeeds_with(&line, &source("ConfigMap"));
    bob.succeeds_with(&line, &source("Secret"));
    cluster.wait_data(&open, "x-synced", json!({"sky": "Ymx1ZQ=="})).await;
    scene.wait_secret(&open, "x-synced").await;
    bob.succeeds(&format!(r#"patch cm x -n {home} --type merge -p {{"data":{{"sky":"red"}}}}"#));
    cluster.wait_data(&open, "x-synced", json!({"sky": "red"})).await;
    bob.succeeds(&format!("delete secret x -n {home}"));
    cluster.wait_gone(&secret(&open, "x-synced")).await;

    // Without accept-from, existing companions stay, and Bob may no longer change them.
    cluster.admin().succeeds(&format!("annotate namespace {open} {}-", cluster.key("accept-from")));
    let line = format!(r#"patch cm x -n {home} --type merge -p {{"data":{{"sky":"green"}}}}"#);
    eventually("Bob is refused", || async {
        let output = bob.kubectl(&format!("{line} --dry-run=server")).output().expect("kubectl");
        String::from_utf8_lossy(&output.stderr).contains("may not create configmaps x-synced").then_some(())
    })
    .await;
    let text = format!("{} may not create configmaps x-synced in namespace {open}", bob.name);
    assert_refused(&line, &bob.fails(&line), &text);
}

#[tokio::test]
async fn kube_and_excluded_namespaces_and_locksteps_own_are_no_targets_even_for_the_admin() {
    let cluster = Cluster::new("shut-doors").await;
    let home = cluster.namespace("home").await;
    let shut = cluster.namespace("shut").await;
    let kube = format!("kube-{}", cluster.id);
    cluster.post("/api/v1/namespaces", &json!({"metadata": {"name": kube}})).await;
    let never = cluster.namespace_with("never", json!({cluster.key("exclude"): "true"}), json!({})).await;
    let (_installed, _lockstep) = cluster.install_and_start(&["--exclude-namespaces", &shut]).await;
    let bob = cluster.editor("bob", &[], &[&home]).await;
    let source = |name: &str, targets: &str| {
        let metadata = json!({
            "name": name,
            "labels": {cluster.key("managed"): "true"},
            "annotations": {cluster.key("target-namespaces"): targets},
        });
        manifest("ConfigMap", &metadata, &json!({"data": {"sky": "blue"}}))
    };
    let line = format!("create -f - -n {home}");
    for namespace in [&kube, &shut, &never, &"lockstep-system".to_owned()] {
        let text = format!("{} may not create configmaps x-synced in namespace {namespace}", bob.name);
        assert_refused(&line, &bob.fails_with(&line, &source("x", namespace)), &text);
    }
    // The admin may write there, but Lockstep does not, and warns.
    let output = crate::harness::output(
        &mut cluster.admin().kubectl(&line),
        &source("x", &format!(".,{kube},{shut},{never},lockstep-system")),
    );
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    for namespace in [&kube, &shut] {
        let warning = format!("Warning: namespace {namespace} takes no companions from {home} until its ");
        assert!(said.contains(&warning), "{said}");
    }
    for namespace in [&never, "lockstep-system"] {
        let warning = format!("Warning: namespace {namespace} is excluded and never a target");
        assert!(said.contains(&warning), "{said}");
    }
    // Not `*`, because other tests share the cluster.
    cluster.admin().succeeds_with(&line, &source("y", &format!("kube-*,lockstep-*,{}-*", cluster.id)));
    cluster.wait_data(&home, "y-synced", json!({"sky": "blue"})).await;
    for namespace in [kube.as_str(), &shut, &never, "lockstep-system", "kube-system"] {
        for name in ["x-synced", "y-synced"] {
            assert!(cluster.configmap(namespace, name).await.is_none(), "{namespace}/{name}");
        }
    }
    // Lockstep's own namespace holds no sources either.
    let line = "create -f - -n lockstep-system";
    let complaint = cluster.admin().fails_with(line, &source(&cluster.id, &home));
    assert_refused(
        line,
        &complaint,
        "sources are not allowed in Lockstep's own namespace: move this one to another namespace",
    );
}

#[tokio::test]
async fn editable_companion_does_not_become_a_source_without_access() {
    let scene = Scene::set("turncoat").await;
    let (cluster, bob, home, away) = (&scene.cluster, &scene.bob, &scene.home, &scene.away);
    let line = format!("create -f - -n {home}");
    bob.succeeds_with(&line, &scene.source("ConfigMap", "y", &[("protect", "none")]));
    cluster.wait(home, "y-synced", "it is there", |_| true).await;
    let turned = json!({
        "metadata": {
            "labels": {cluster.key("companion"): null, cluster.key("managed"): "true"},
            "annotations": {
                cluster.key("source"): null,
                cluster.key("source-uid"): null,
                cluster.key("target-namespaces"): away,
            },
        },
    });
    let line = format!("patch cm y-synced -n {home} --type merge -p {turned}");
    assert_refused(&line, &bob.fails(&line), &scene.refusal(bob, "create", "configmaps", "y-synced-synced"));
    let line = format!("annotate --overwrite cm y-synced -n {home} {}={away}/colors", cluster.key("source"));
    assert_refused(&line, &bob.fails(&line), "is a companion");
    scene.reconciled().await;
    assert!(scene.found_in_away().await.is_empty());
}

#[tokio::test]
async fn marks_added_step_by_step_do_not_block_a_source() {
    let scene = Scene::set("poser-steps").await;
    let (cluster, bob, home, away) = (&scene.cluster, &scene.bob, &scene.home, &scene.away);
    let carl = cluster.editor("carl", &[], &[away]).await;
    carl.succeeds_with(&format!("create -f - -n {away}"), &scene.source("ConfigMap", "colors", &[]));
    cluster.wait(away, "colors-synced", "it is there", |_| true).await;
    bob.succeeds(&format!("create cm x -n {home}"));
    bob.succeeds(&format!(
        r#"patch cm x -n {home} --type merge -p {{"metadata":{{"finalizers":["example.com/held"]}}}}"#
    ));
    bob.succeeds(&format!(
        "annotate cm x -n {home} {}={away}/colors {}=1",
        cluster.key("source"),
        cluster.key("source-uid")
    ));
    let line = format!("label cm x -n {home} {}=true", cluster.key("companion"));
    assert_refused(&line, &bob.fails(&line), "carries the companion label or annotations");
    scene.reconciled().await;
    carl.succeeds(&format!(r#"patch cm colors -n {away} --type merge -p {{"data":{{"sky":"red"}}}}"#));
    carl.succeeds(&format!("delete cm colors -n {away}"));
}

#[tokio::test]
async fn forged_mark_on_a_future_source_deletes_no_companion() {
    let scene = Scene::set("planted").await;
    let (cluster, alice, bob) = (&scene.cluster, &scene.alice, &scene.bob);
    let (home, away) = (&scene.home, &scene.away);
    let apply = format!("apply -f - -n {home}");
    let elsewhere = [("target-namespaces", away.as_str())];
    for name in ["named", "owned", "planter"] {
        bob.succeeds(&format!("create cm {name} -n {home}"));
    }
    // No webhook is called for an object without our label.
    bob.succeeds(&format!("annotate cm named -n {home} {}={home}/planter", cluster.key("source")));
    let uid =
        cluster.configmap(home, "planter").await.unwrap()["metadata"]["uid"].as_str().unwrap().to_owned();
    let owner =
        json!({"apiVersion": "v1", "kind": "ConfigMap", "name": "planter", "uid": uid, "controller": true});
    let patch = json!({"metadata": {"ownerReferences": [owner]}});
    bob.succeeds(&format!("patch cm owned -n {home} --type merge -p {patch}"));

    // An object that names a source counts as its copy.
    let named = alice.fails_with(&apply, &scene.source("ConfigMap", "named", &elsewhere));
    assert!(named.contains(&format!("it is itself a companion of {home}/planter")), "{named}");
    // An ownerReference does not make an object a copy.
    alice.succeeds_with(&apply, &scene.source("ConfigMap", "owned", &elsewhere));
    cluster.wait(away, "owned-synced", "it is there", |_| true).await;
    let asks = [("companion-name", "owned"), ("target-namespaces", ".")];
    bob.succeeds_with(&apply, &scene.source("ConfigMap", "planter", &asks));
    scene.reconciled().await;
    let source = cluster.configmap(home, "owned").await.unwrap();
    assert_eq!(source["metadata"]["labels"], json!({cluster.key("managed"): "true"}));
    assert_eq!(scene.found_in_away().await, ["owned-synced"]);
}
