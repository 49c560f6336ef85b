//! Every row of the table "What the webhook says", with kubectl, as users with RBAC rights of their own.

use serde_json::{Value, json};

use crate::{
    harness::{Cluster, InstalledManifests, Lockstep, MANY_HEALS, configmap, eventually, output, within},
    kubectl_commands::{Subject, assert_refused},
    users::{User, manifest},
};

/// A webhook, and companions of `colors` in two namespaces and of the Secret `key` in one. Alice may write in
/// both.
struct Scene {
    cluster: Cluster,
    home: String,
    away: String,
    alice: User,
    lockstep: Lockstep,
    _installed: InstalledManifests,
}

impl Scene {
    async fn set(test: &str) -> Self {
        Self::with(test, "edits", &[]).await
    }

    async fn with(test: &str, protect: &str, flags: &[&str]) -> Self {
        let cluster = Cluster::new(test).await;
        let (home, away, alice) = cluster.alice().await;
        let (_installed, lockstep) = cluster.install_and_start(flags).await;
        cluster.make_sources(&home, &away, &[("protect", protect)]).await;
        cluster.wait_companions(&home, &away).await;
        Self { cluster, home, away, alice, lockstep, _installed }
    }

    fn companions(&self) -> [(Subject<'_>, &'static str); 3] {
        let subject = |kind, namespace, source: &'static str| {
            let subject =
                Subject { cluster: &self.cluster, kind, namespace, name: format!("{source}-synced") };
            (subject, source)
        };
        [
            subject("configmap", &self.home, "colors"),
            subject("configmap", &self.away, "colors"),
            subject("secret", &self.home, "key"),
        ]
    }
}

#[tokio::test]
async fn edit_of_companion_is_refused_by_every_verb_with_the_command_to_use_instead() {
    let scene = Scene::set("edits").await;
    let (home, alice) = (&scene.home, &scene.alice);
    for (companion, source) in scene.companions() {
        let Subject { kind, namespace, name, .. } = &companion;
        let before = scene.cluster.get(&companion.path()).await.unwrap();
        let text = format!(
            "{kind} {namespace}/{name} is a companion, kept equal to {home}/{source} by Lockstep. \
             Change the source instead: kubectl edit {kind} {source} -n {home}\n"
        );
        for line in companion.edits() {
            assert_refused(&line, &alice.fails(&line), &text);
        }
        assert_refused("edit", &companion.edited_by(alice), &text);
        let changed = companion.file(|object| object["data"] = json!({"sky": "bWluZQ=="})).await;
        for line in companion.files() {
            assert_refused(&line, &alice.fails_with(&line, &changed), &text);
        }
        let text = format!("kubectl label {kind} {source} -n {home} {}-\n", scene.cluster.key("managed"));
        for line in companion.strips() {
            assert_refused(&line, &alice.fails(&line), &text);
        }
        let stripped = companion.file(|object| object["metadata"]["labels"] = json!({})).await;
        let line = format!("replace -f - -n {namespace}");
        assert_refused(&line, &alice.fails_with(&line, &stripped), &text);

        let after = scene.cluster.get(&companion.path()).await.unwrap();
        assert_eq!(after["metadata"]["resourceVersion"], before["metadata"]["resourceVersion"], "untouched");
    }
    // The cluster admin is not exempt.
    let line = format!("label cm colors-synced -n {home} team=mine");
    assert_refused(&line, &scene.cluster.admin().fails(&line), "is a companion");
    assert!(scene.lockstep.metric("lockstep_denials_total{reason=\"edit\"}") > 50.0);
}

#[tokio::test]
async fn update_of_nothing_but_managed_fields_is_allowed() {
    let scene = Scene::set("idle").await;
    let (home, alice) = (&scene.home, &scene.alice);
    let [(companion, _), ..] = scene.companions();
    let before = scene.cluster.get(&companion.path()).await.unwrap();
    alice.succeeds(&format!("patch cm colors-synced -n {home} --type merge -p {{}}"));
    alice.succeeds_with(&format!("replace -f - -n {home}"), &companion.file(|_| {}).await);
    let data = json!({
        "apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "colors-synced"}, "data": before["data"],
    });
    alice.succeeds_with(&format!("apply --server-side --force-conflicts -f - -n {home}"), &data.to_string());
    let after = scene.cluster.get(&companion.path()).await.unwrap();
    assert_ne!(after["metadata"]["managedFields"], before["metadata"]["managedFields"]);
}

#[tokio::test]
async fn delete_of_companion_is_allowed_with_a_warning_and_healed() {
    let scene = Scene::set("deletes").await;
    for (companion, source) in scene.companions() {
        for line in companion.deletes() {
            let before = scene.cluster.get(&companion.path()).await.unwrap();
            let output = scene.alice.kubectl(&line).output().expect("kubectl");
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(output.status.success(), "{line}: {said}");
            let warning = format!(
                "Warning: {}/{} is a companion: Lockstep creates it again for as long as {}/{source} wants it",
                companion.namespace, companion.name, scene.home
            );
            assert!(said.contains(&warning), "{line}: {said}");
            if !line.contains("dry-run") {
                let what = format!("{line}: it is healed");
                let healed = eventually(&what, || async {
                    let now = scene.cluster.get(&companion.path()).await?;
                    (now["metadata"]["uid"] != before["metadata"]["uid"] && now["data"] == before["data"])
                        .then_some(())
                });
                within(MANY_HEALS, healed).await;
            }
        }
    }
    // `replace --force` deletes, which is allowed; waits until the object is gone, which it may not see if
    // the companion is healed already; and creates, which is refused. It fails either way.
    let [(companion, _), ..] = scene.companions();
    let changed = companion.file(|object| object["data"] = json!({"sky": "mine"})).await;
    scene.alice.fails_with(&format!("replace --force --timeout=5s -f - -n {}", scene.home), &changed);
    within(MANY_HEALS, scene.cluster.wait_data(&scene.home, "colors-synced", json!({"sky": "blue"}))).await;
}

#[tokio::test]
async fn delete_of_companion_is_refused_with_protect_all() {
    let scene = Scene::with("protectall", "all", &[]).await;
    let (home, protect) = (&scene.home, scene.cluster.key("protect"));
    for (companion, source) in scene.companions() {
        let before = scene.cluster.get(&companion.path()).await.unwrap();
        let kind = companion.kind;
        let text = format!("kubectl annotate --overwrite {kind} {source} -n {home} {protect}=edits\n");
        for line in companion.deletes() {
            assert_refused(&line, &scene.alice.fails(&line), &text);
        }
        let line = format!("delete {kind} --all -n {}", companion.namespace);
        assert!(scene.alice.fails(&format!("{line} --dry-run=server")).contains(&text));
        let after = scene.cluster.get(&companion.path()).await.unwrap();
        assert_eq!(after["metadata"]["resourceVersion"], before["metadata"]["resourceVersion"], "untouched");
    }
    // The command in the message works.
    scene.alice.succeeds(&format!("annotate --overwrite configmap colors -n {home} {protect}=edits"));
    let line = format!("delete configmap colors-synced -n {home}");
    eventually("the delete is allowed", || async {
        scene.alice.kubectl(&line).output().expect("kubectl").status.success().then_some(())
    })
    .await;
}

/// No webhook sees the new object, because its name does not end with the suffix.
#[tokio::test]
async fn delete_and_create_does_not_replace_a_companion_whose_name_lacks_the_suffix() {
    let cluster = Cluster::new("replace").await;
    let (home, away, alice) = cluster.alice().await;
    let (_installed, _lockstep) = cluster.install_and_start(&[]).await;
    let source = cluster.source(&home, "colors").annotate("companion-name", "palette");
    source.annotate("target-namespaces", &format!("{away},.")).annotate("protect", "edits").create().await;
    let companion = cluster.wait_data(&away, "palette", json!({"sky": "blue"})).await;
    let theirs = manifest("ConfigMap", &json!({"name": "palette"}), &json!({"data": {"sky": "theirs"}}));
    for _ in 0..20 {
        let deleted = alice.kubectl(&format!("delete cm palette -n {away} --wait=false")).output().unwrap();
        let created = output(&mut alice.kubectl(&format!("create -f - -n {away}")), &theirs);
        assert!(!created.status.success(), "the companion was replaced: {deleted:?}");
    }
    let text = format!(
        "configmap {away}/palette is a companion, kept by Lockstep for as long as {home}/colors wants it. \
         To remove it, delete the source or stop mirroring it: kubectl label configmap colors -n {home} {}-; \
         to allow deletes, let its name end with -synced, because nothing keeps other names free until Lockstep \
         creates it again: kubectl annotate configmap colors -n {home} {}-\n",
        cluster.key("managed"),
        cluster.key("companion-name"),
    );
    for line in ["delete cm palette", "delete cm --field-selector metadata.name=palette"] {
        assert_refused(line, &alice.fails(&format!("{line} -n {away}")), &text);
    }
    let line = format!("replace --force -f - -n {away}");
    assert_refused(&line, &alice.fails_with(&line, &theirs), "is a companion");
    let after = cluster.configmap(&away, "palette").await.unwrap();
    assert_eq!(after["metadata"]["uid"], companion["metadata"]["uid"], "untouched");

    // Its own default name is protected, so the command of the message allows deletes.
    alice.succeeds(&format!("annotate configmap colors -n {home} {}-", cluster.key("companion-name")));
    cluster.wait_data(&away, "colors-synced", json!({"sky": "blue"})).await;
    let theirs = theirs.replace("palette", "colors-synced");
    for _ in 0..20 {
        alice.kubectl(&format!("delete cm colors-synced -n {away} --wait=false")).output().unwrap();
        let created = output(&mut alice.kubectl(&format!("create -f - -n {away}")), &theirs);
        assert!(!created.status.success(), "the companion was replaced");
    }
    // So many heals back off for up to a minute; a change of the source is written at once.
    alice.succeeds(&format!("patch cm colors -n {home} -p {{\"data\":{{\"sky\":\"grey\"}}}}"));
    cluster.wait_data(&away, "colors-synced", json!({"sky": "grey"})).await;
}

#[tokio::test]
async fn edit_of_companion_is_allowed_with_a_warning_and_healed_with_protect_none() {
    let scene = Scene::with("protectnone", "none", &[]).await;
    let line =
        format!(r#"patch cm colors-synced -n {} --type merge -p {{"data":{{"sky":"mine"}}}}"#, scene.away);
    let output = scene.alice.kubectl(&line).output().expect("kubectl");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("Warning: "), "{said}");
    scene.cluster.wait_data(&scene.away, "colors-synced", json!({"sky": "blue"})).await;
}

#[tokio::test]
async fn object_with_marks_or_with_the_name_of_a_companion_is_refused() {
    let scene = Scene::set("posers2").await;
    let (alice, home, key) = (&scene.alice, &scene.home, |name: &str| scene.cluster.key(name));
    let object =
        |metadata: Value| json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}).to_string();
    for forged in [
        object(json!({"name": "x", "labels": {key("companion"): "true"}})),
        object(json!({"generateName": "x-", "labels": {key("companion"): ""}})),
        object(json!({"name": "x", "annotations": {key("source"): format!("{home}/colors")}})),
        object(json!({"name": "x", "annotations": {key("source-uid"): "1"}})),
        object(json!({"name": "x", "labels": {key("companion"): "true", key("managed"): "true"}})),
    ] {
        for line in ["create -f -", "apply --server-side -f -", "create --dry-run=server -f -"] {
            let line = format!("{line} -n {home}");
            // An object with generateName cannot be applied.
            if !(line.starts_with("apply") && forged.contains("generateName")) {
                assert_refused(
                    &line,
                    &alice.fails_with(&line, &forged),
                    "carries the companion label or annotations",
                );
            }
        }
    }
    alice.succeeds(&format!("create cm plain -n {home}"));
    let line = format!("label cm plain -n {home} {}=true", key("companion"));
    assert_refused(&line, &alice.fails(&line), "carries the companion label or annotations");

    // A paused source whose target namespace is created later: its companion does not exist yet.
    let late = scene.cluster.ns("late");
    scene
        .cluster
        .source(home, "flavors")
        .annotate("target-namespaces", &late)
        .annotate("paused", "true")
        .create()
        .await;
    scene.cluster.namespace("late").await;
    let bob = scene.cluster.editor("bob", &[], &[&late]).await;
    let line = format!("create cm flavors-synced -n {late}");
    eventually("the webhook knows the namespace", || async {
        let output = bob.kubectl(&format!("{line} --dry-run=server")).output().expect("kubectl");
        String::from_utf8_lossy(&output.stderr).contains("needed for the companion of").then_some(())
    })
    .await;
    assert_refused(&line, &bob.fails(&line), &format!("needed for the companion of {home}/flavors"));
    bob.succeeds(&format!("create cm other-synced -n {late}"));
    bob.succeeds(&format!("create secret generic flavors-synced -n {late}"));
}

#[tokio::test]
async fn faulty_source_is_refused_when_it_is_written() {
    let scene = Scene::set("checked").await;
    let (alice, home, key) = (&scene.alice, &scene.home, |name: &str| scene.cluster.key(name));
    let names = (0..51).map(|n| format!("n{n}")).collect::<Vec<_>>().join(",");
    for (annotation, value, says) in [
        ("target-namespaces", "a*-", "`a*-` is neither `.`, a namespace nor a pattern such as `team-*`"),
        ("target-namespaces", &names, "51 names, 50 are allowed"),
        ("target-selector", "", "an empty selector would match every namespace"),
        ("protect", "everything", "none of `edits`, `all`, `none`"),
        ("keys", "a=x,b=x", "two keys would be copied to `x`"),
        ("companion-name", "kube-root-ca.crt", "belongs to Kubernetes"),
        ("adopt", "yes", "neither `true` nor `false`"),
    ] {
        let annotation = key(annotation);
        let line = format!("annotate --overwrite cm colors -n {home} {annotation}={value}");
        let complaint = alice.fails(&line);
        assert_refused(&line, &complaint, &format!("configmap {home}/colors cannot be a source: "));
        assert!(complaint.contains(says), "{complaint}");
    }
    let managed = key("managed");
    let file = |kind: &str, name: &str, rest: Value| {
        let mut object = json!({"apiVersion": "v1", "kind": kind, "metadata": {"name": name, "labels": {&managed: "true"}}});
        object.as_object_mut().unwrap().extend(rest.as_object().unwrap().clone());
        object.to_string()
    };
    let line = format!("create -f - -n {home}");
    let long = file("ConfigMap", &"x".repeat(250), json!({}));
    assert_refused(&line, &alice.fails_with(&line, &long), "253 are allowed");
    let token = file("Secret", "token", json!({"type": "bootstrap.kubernetes.io/token"}));
    assert_refused(&line, &alice.fails_with(&line, &token), "are never mirrored");
    // An update that leaves the settings of a faulty source alone is allowed.
    let exempt = json!({"metadata": {"annotations": {key("protect"): "everything"}}});
    let admin = scene.cluster.admin();
    let own = "--as=system:serviceaccount:lockstep-system:lockstep";
    admin.succeeds(&format!("patch cm colors -n {home} --type merge -p {exempt} {own}"));
    alice.succeeds(&format!(r#"patch cm colors -n {home} --type merge -p {{"data":{{"sky":"red"}}}}"#));
}

#[tokio::test]
async fn defaults_are_stamped_and_present_values_kept() {
    let scene = Scene::with("stamped", "edits", &["--default-protect", "all"]).await;
    let (cluster, alice, away, home) = (&scene.cluster, &scene.alice, &scene.away, &scene.home);
    let annotations = |object: Value| object["metadata"]["annotations"].clone();
    // The flags' defaults, on an object without annotations.
    alice.succeeds(&format!("create cm plain -n {home}"));
    alice.succeeds(&format!("label cm plain -n {home} {}=true", cluster.key("managed")));
    assert_eq!(
        annotations(cluster.configmap(home, "plain").await.unwrap()),
        json!({cluster.key("defaults"): r#"{"protect":"all"}"#})
    );
    // Defaults of a namespace override the flags. Users of that namespace need access to the targets all the
    // same.
    let kept = cluster.namespace_with(
        "kept",
        json!({}),
        json!({cluster.key("default-target-namespaces"): away, cluster.key("default-protect"): "none"}),
    );
    let kept = kept.await;
    cluster.source(&kept, "flavors").create().await;
    assert_eq!(
        annotations(cluster.configmap(&kept, "flavors").await.unwrap()),
        json!({cluster.key("defaults"): format!(r#"{{"target-namespaces":"{away}","protect":"none"}}"#)})
    );
    cluster.wait_data(away, "flavors-synced", json!({"sky": "blue"})).await;
    let bob = cluster.editor("bob", &[], &[&kept]).await;
    bob.succeeds(&format!("create cm mine -n {kept}"));
    let line = format!("label cm mine -n {kept} {}=true", cluster.key("managed"));
    let refused = bob.fails(&line);
    assert_refused(&line, &refused, &format!("may not create configmaps mine-synced in namespace {away}"));
    let choice = format!("to choose others, set {} on it", cluster.key("target-namespaces"));
    assert!(refused.contains(&choice), "{refused}");
    bob.succeeds(&format!("annotate cm mine -n {kept} {}=.", cluster.key("target-namespaces")));
    bob.succeeds(&line);
    cluster.wait_data(&kept, "mine-synced", Value::Null).await;
    // Only the key that the person left out has a default now.
    let mine = annotations(cluster.configmap(&kept, "mine").await.unwrap());
    assert_eq!(
        mine,
        json!({cluster.key("target-namespaces"): ".", cluster.key("defaults"): r#"{"protect":"none"}"#})
    );
}

#[tokio::test]
async fn name_of_another_sources_companion_is_refused_or_handed_over() {
    let scene = Scene::set("taken").await;
    let (alice, home, away, key) =
        (&scene.alice, &scene.home, &scene.away, |name: &str| scene.cluster.key(name));
    // From another namespace: refused.
    alice.succeeds(&format!("create cm colors -n {away}"));
    let line = format!("label cm colors -n {away} {}=true", key("managed"));
    assert_refused(
        &line,
        &alice.fails(&line),
        &format!("{away}/colors-synced is already the companion of {home}/colors"),
    );
    // From the same namespace: handed over when the other source is deleted.
    let new = json!({
        "apiVersion": "v1", "kind": "ConfigMap", "data": {"sky": "red"},
        "metadata": {
            "name": "colors-7f2",
            "labels": {key("managed"): "true"},
            "annotations": {key("companion-name"): "colors-synced", key("target-namespaces"): format!(".,{away}")},
        },
    });
    let mut create = alice.kubectl(&format!("create -f - -n {home}"));
    let output = crate::harness::output(&mut create, &new.to_string());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && said.contains("it is handed over once"), "{said}");
    alice.succeeds(&format!("delete cm colors -n {home}"));
    for namespace in [home, away] {
        scene.cluster.wait_data(namespace, "colors-synced", json!({"sky": "red"})).await;
    }
}

#[tokio::test]
async fn change_of_a_source_in_trouble_is_allowed_with_a_warning() {
    let scene = Scene::set("known").await;
    let (alice, home) = (&scene.alice, &scene.home);
    scene.cluster.source(home, "flavors").annotate("companion-name", "colors-synced").create().await;
    scene.cluster.wait_event(home, "flavors", "Conflict").await;
    let line = format!(r#"patch cm flavors -n {home} --type merge -p {{"data":{{"sky":"red"}}}}"#);
    let output = alice.kubectl(&line).output().expect("kubectl");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{said}");
    let warning =
        format!("Warning: {home}/colors-synced: the name is held by the companion of {home}/colors");
    assert!(said.contains(&warning), "{said}");
}

#[tokio::test]
async fn exempt_users_are_allowed_and_users_with_similar_names_are_not() {
    let scene = Scene::with("passes", "all", &["--exempt-user", "root", "--exempt-group", "ops"]).await;
    let (admin, away) = (scene.cluster.admin(), &scene.away);
    for who in ["--as=root --as-group=system:masters", "--as=carol --as-group=ops --as-group=system:masters"]
    {
        admin.succeeds(&format!(
            "label --overwrite cm colors-synced -n {away} team=mine {who} --dry-run=server"
        ));
        admin.succeeds(&format!("delete cm colors-synced -n {away} {who} --dry-run=server"));
    }
    for who in ["--as=ops --as-group=system:masters", "--as=carol --as-group=root --as-group=system:masters"]
    {
        let line = format!("label cm colors-synced -n {away} team=mine {who}");
        assert_refused(&line, &admin.fails(&line), "is a companion");
    }
    // Impersonation takes a right of its own.
    if scene.cluster.plane.is_existing() {
        return controlplane::skip("in part: in an existing cluster, all users are the admin");
    }
    let line = format!("label cm colors-synced -n {away} team=mine --as=root");
    assert!(scene.alice.fails(&line).contains("cannot impersonate"));
}

#[tokio::test]
async fn garbage_collection_and_namespace_deletion_work_with_the_webhook_running() {
    let scene = Scene::with("cleanup", "all", &[]).await;
    let (cluster, alice, home, away) = (&scene.cluster, &scene.alice, &scene.home, &scene.away);
    for (name, mode) in [("one", "background"), ("two", "foreground"), ("three", "orphan")] {
        let source = cluster
            .source(home, name)
            .annotate("target-namespaces", &format!(".,{away}"))
            .annotate("protect", "all");
        source.create().await;
        for namespace in [home, away] {
            cluster.wait_data(namespace, &format!("{name}-synced"), json!({"sky": "blue"})).await;
        }
        alice.succeeds(&format!("delete cm {name} -n {home} --cascade={mode}"));
        for namespace in [home, away] {
            cluster.wait_collected(&configmap(namespace, &format!("{name}-synced"))).await;
        }
    }
    // Namespaces with sources, and with companions of `protect: all`.
    for namespace in [away, home] {
        cluster.admin().succeeds(&format!("delete namespace {namespace} --wait=false"));
        cluster.wait_collected(&format!("/api/v1/namespaces/{namespace}")).await;
    }
}

#[tokio::test]
async fn edit_without_webhook_configurations_is_healed() {
    let scene = Scene::set("slips").await;
    let (cluster, alice, home) = (&scene.cluster, &scene.alice, &scene.home);
    let line = format!(r#"patch cm colors-synced -n {home} --type merge -p {{"data":{{"sky":"mine"}}}}"#);
    assert_refused(&line, &alice.fails(&line), "is a companion");

    // Without the configurations, edits are allowed and healed.
    let name = format!("lockstep.{}", cluster.domain());
    for kind in ["validating", "mutating"] {
        cluster.admin().succeeds(&format!("delete {kind}webhookconfiguration {name}"));
    }
    eventually("an edit is allowed", || async {
        alice.kubectl(&line).output().expect("kubectl").status.success().then_some(())
    })
    .await;
    scene.lockstep.wait_metric("lockstep_heals_total{reason=\"content\"}", 1.0).await;
    cluster.wait_data(home, "colors-synced", json!({"sky": "blue"})).await;

    // Once they are applied again, Lockstep adds its CA within seconds, and edits are refused.
    cluster.apply(&["--webhook-url", &cluster.url()]);
    eventually("an edit is refused", || async {
        let output = alice.kubectl(&line).output().expect("kubectl");
        String::from_utf8_lossy(&output.stderr).contains("is a companion").then_some(())
    })
    .await;
}

#[tokio::test]
async fn denial_is_in_the_audit_log_and_counted() {
    let scene = Scene::set("audited").await;
    if scene.cluster.plane.is_existing() {
        return controlplane::skip("it reads the audit log, and LOCKSTEP_TEST_KUBECONFIG is set");
    }
    let edit = json!({"data": {"sky": "hush"}});
    let path = configmap(&scene.home, "colors-synced");
    let refused =
        scene.cluster.try_request("PATCH", &path, Some(("application/merge-patch+json", &edit))).await;
    assert_eq!(refused, Err(403));
    let annotation = format!("\"companions.lockstep.{}/denied\":\"edit\"", scene.cluster.domain());
    eventually("the audit annotation", || async {
        scene.cluster.audit_log().contains(&annotation).then_some(())
    })
    .await;
    assert_eq!(scene.lockstep.metric("lockstep_denials_total{reason=\"edit\"}"), 1.0);
    assert!(!scene.lockstep.log().contains("hush"));
}

#[tokio::test]
async fn dry_run_of_a_source_shows_the_plan() {
    let cluster = Cluster::new("dry-run").await;
    let (_installed, _lockstep) = cluster.install_and_start(&[]).await;
    let home = cluster.namespace("home").await;
    for name in ["team-a", "team-b", "team-c"] {
        cluster.namespace(name).await;
    }
    let chief = cluster.cluster_editor("chief", &[]).await;
    let bob = cluster.editor("bob", &[], &[&home]).await;
    let source = |targets: &str, sky: &str| {
        let metadata = json!({
            "name": "colors", "namespace": home, "labels": {cluster.key("managed"): "true"},
            "annotations": {cluster.key("target-namespaces"): targets},
        });
        manifest("ConfigMap", &metadata, &json!({"data": {"sky": sky}}))
    };
    let planned = |user: &User, line: &str, file: &str| {
        let output = crate::harness::output(&mut user.kubectl(line), file);
        String::from_utf8_lossy(&output.stderr).into_owned()
    };
    let (id, taken) = (&cluster.id, cluster.ns("team-c"));
    let all = source(&format!(".,{id}-team-*"), "blue");
    let line = "apply --dry-run=server -f -";
    // An object that is not ours has the name.
    chief.succeeds(&format!("create cm colors-synced -n {taken}"));
    let text = format!("Warning: lockstep plan: create 3, conflict 1 ({taken}/colors-synced, not ours)\n");
    assert_eq!(planned(&chief, line, &all), text);
    // Without the rights there is a denial, and no plan.
    let refused = planned(&bob, line, &all);
    assert!(refused.contains("in all namespaces") && !refused.contains("lockstep plan"), "{refused}");

    chief.succeeds_with("apply -f -", &all);
    cluster.wait_data(&cluster.ns("team-b"), "colors-synced", json!({"sky": "blue"})).await;
    cluster.wait_data(&cluster.ns("team-a"), "colors-synced", json!({"sky": "blue"})).await;
    cluster.wait_data(&home, "colors-synced", json!({"sky": "blue"})).await;
    let fewer = source(&format!(".,{id}-team-a"), "red");
    let text = format!("Warning: lockstep plan: update 2, delete 1 ({})\n", cluster.ns("team-b"));
    assert_eq!(planned(&chief, line, &fewer), text);
    let deleted = planned(&chief, &format!("delete cm colors -n {home} --dry-run=server"), "");
    assert!(deleted.starts_with("Warning: lockstep plan: delete 3 ("), "{deleted}");
    // A write that is no dry run shows no plan.
    assert!(!planned(&chief, "apply -f -", &fewer).contains("lockstep plan"));
    cluster.wait_data(&home, "colors-synced", json!({"sky": "red"})).await;
}
