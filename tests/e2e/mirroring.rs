//! Companions are created for sources and follow their changes.

use serde_json::{Value, json};

use crate::harness::{Cluster, configmap, secret};

#[tokio::test]
async fn labelled_object_gets_a_companion_in_every_target() {
    let cluster = Cluster::new("becomes").await;
    let _lockstep = cluster.start_controller().await;
    let home = cluster.namespace("home").await;
    let named = cluster.namespace("named").await;
    let prefixed = cluster.namespace("team-a").await;
    let selected = cluster.namespace_with("selected", json!({"tier": cluster.id}), json!({})).await;
    let other = cluster.namespace("other").await;

    // Without the label nothing happens: the label makes it a source.
    let source = cluster.source(&home, "colors").with("/metadata/labels", json!({}));
    let targets = format!("., {named}, {}*", cluster.ns("team-"));
    source
        .annotate("target-namespaces", &targets)
        .annotate("target-selector", &format!("tier={}", cluster.id))
        .create()
        .await;
    cluster
        .merge(
            &configmap(&home, "colors"),
            &json!({"metadata": {"labels": {cluster.key("managed"): "true"}}}),
        )
        .await;

    for namespace in [&home, &named, &prefixed, &selected] {
        let companion = cluster.wait_data(namespace, "colors-synced", json!({"sky": "blue"})).await;
        let metadata = &companion["metadata"];
        assert_eq!(metadata["labels"][cluster.key("companion")], "true");
        assert_eq!(metadata["annotations"][cluster.key("source")], format!("{home}/colors"));
        assert_eq!(metadata["annotations"][cluster.key("protect")], "edits");
        assert_eq!(metadata["annotations"][cluster.key("source-checksum")].as_str().unwrap().len(), 12);
        // An owner in another namespace would make the garbage collector delete the companion.
        assert_eq!(metadata["ownerReferences"].is_array(), namespace == &home);
    }
    let owner = &cluster.configmap(&home, "colors-synced").await.unwrap()["metadata"]["ownerReferences"][0];
    assert_eq!((&owner["name"], &owner["controller"]), (&json!("colors"), &json!(true)));
    assert!(owner["blockOwnerDeletion"].is_null());
    assert!(cluster.configmap(&other, "colors-synced").await.is_none());

    let note = cluster.wait_event(&home, "colors", "Mirrored").await;
    assert!(note.starts_with("created 4: "), "{note}");
}

#[tokio::test]
async fn secret_is_mirrored_with_its_type_and_its_values_are_never_logged() {
    let cluster = Cluster::new("secret").await;
    let lockstep = cluster.start_controller().await;
    let home = cluster.namespace("home").await;
    let away = cluster.namespace("away").await;
    let data = json!({"username": "aHVzaC11c2Vy", "password": "aHVzaC1odXNo"});
    cluster
        .source(&home, "login")
        .secret("kubernetes.io/basic-auth", data.clone())
        .annotate("target-namespaces", &away)
        .create()
        .await;
    let path = secret(&away, "login-synced");
    let companion = crate::harness::eventually("the companion", || cluster.get(&path)).await;
    assert_eq!((&companion["data"], &companion["type"]), (&data, &json!("kubernetes.io/basic-auth")));

    // Neither logs, Events nor metrics about an edit and its heal contain a value in any encoding.
    cluster.merge(&path, &json!({"data": {"password": "ZWRpdGVk"}})).await;
    crate::harness::eventually("the heal", || async {
        cluster.get(&path).await.filter(|object| object["data"] == data)
    })
    .await;
    let note = cluster.wait_event(&home, "login", "Healed").await;
    let shown = [lockstep.log(), lockstep.metrics(), note].concat();
    assert!(shown.contains("password"), "names of keys are reported: {shown}");
    for value in ["aHVzaC", "hush", "ZWRpdGVk", "edited"] {
        assert!(!shown.contains(value), "{value} in {shown}");
    }
}

#[tokio::test]
async fn change_of_source_content_or_policy_reaches_each_companion_in_one_write() {
    let Some(cluster) = Cluster::audited("changes").await else { return };
    let _lockstep = cluster.start_controller().await;
    let home = cluster.namespace("home").await;
    let (a, b) = (cluster.namespace("a").await, cluster.namespace("b").await);
    cluster.source(&home, "colors").annotate("target-namespaces", &format!("{a},{b}")).create().await;
    for namespace in [&a, &b] {
        cluster.wait_data(namespace, "colors-synced", json!({"sky": "blue"})).await;
    }
    let path = configmap(&home, "colors");
    cluster
        .merge(&path, &json!({"data": {"sky": null, "sea": "green"}, "binaryData": {"bin": "AAEC"}}))
        .await;
    for namespace in [&a, &b] {
        let companion = cluster.wait_data(namespace, "colors-synced", json!({"sea": "green"})).await;
        assert_eq!(companion["binaryData"], json!({"bin": "AAEC"}));
    }
    cluster.merge(&path, &json!({"metadata": {"annotations": {cluster.key("protect"): "all"}}})).await;
    for namespace in [&a, &b] {
        cluster
            .wait(namespace, "colors-synced", "protect", |object| {
                object["metadata"]["annotations"][cluster.key("protect")] == "all"
            })
            .await;
        let audit = cluster.audit_of(namespace, 3).await;
        let verbs: Vec<&str> = audit.iter().map(|(verb, ..)| verb.as_str()).collect();
        assert_eq!(verbs, ["create", "patch", "patch"], "{namespace}");
    }
    // A change that does not affect companions causes no write.
    cluster.merge(&path, &json!({"metadata": {"annotations": {"unrelated": "1"}}})).await;
    cluster.merge(&path, &json!({"data": {"sea": "grey"}})).await;
    cluster.wait_data(&a, "colors-synced", json!({"sea": "grey"})).await;
    cluster.audit_of(&a, 4).await;
    assert_eq!(cluster.complete_audit(&a).await.len(), 4);
}

#[tokio::test]
async fn keys_companion_name_copy_labels_and_copy_annotations_take_effect() {
    let cluster = Cluster::new("keys").await;
    let _lockstep = cluster.start_controller().await;
    let home = cluster.namespace("home").await;
    cluster
        .source(&home, "colors")
        .with("/data", json!({"a": "1", "b": "2", "c": "3"}))
        .with("/metadata/labels/team", json!("red"))
        .with("/metadata/labels/app.kubernetes.io~1instance", json!("argo"))
        .with("/metadata/annotations/example.com~1x", json!("x"))
        .with("/metadata/annotations/example.com~1y", json!("y"))
        .annotate("companion-name", "palette")
        .annotate("keys", "a, c=d, absent")
        .annotate("copy-labels", "team, app.kubernetes.io/*")
        .annotate("copy-annotations", "example.com/*")
        .create()
        .await;
    let companion = cluster.wait_data(&home, "palette", json!({"a": "1", "d": "3"})).await;
    let (labels, annotations) = (&companion["metadata"]["labels"], &companion["metadata"]["annotations"]);
    assert_eq!(labels["team"], "red");
    assert!(
        labels["app.kubernetes.io/instance"].is_null(),
        "Argo CD would treat the companion as its own object"
    );
    assert_eq!((&annotations["example.com/x"], &annotations["example.com/y"]), (&json!("x"), &json!("y")));
    assert!(cluster.configmap(&home, "colors-synced").await.is_none());

    // Labels that are no longer copied are removed; labels that others set stay.
    cluster.merge(&configmap(&home, "palette"), &json!({"metadata": {"labels": {"theirs": "1"}}})).await;
    let patch = json!({"metadata": {
        "labels": {"team": null},
        "annotations": {cluster.key("copy-annotations"): "example.com/y", cluster.key("companion-name"): "palette"},
    }});
    cluster.merge(&configmap(&home, "colors"), &patch).await;
    let companion = cluster
        .wait(&home, "palette", "carried no more", |object| {
            object["metadata"]["labels"]["team"].is_null()
                && object["metadata"]["annotations"]["example.com/x"].is_null()
        })
        .await;
    assert_eq!(companion["metadata"]["annotations"]["example.com/y"], "y");
    assert_eq!(companion["metadata"]["labels"]["theirs"], "1");

    // After a change of companion-name the old companion is deleted.
    let patch = json!({"metadata": {"annotations": {cluster.key("companion-name"): null}}});
    cluster.merge(&configmap(&home, "colors"), &patch).await;
    cluster.wait_data(&home, "colors-synced", json!({"a": "1", "d": "3"})).await;
    cluster.wait_gone(&configmap(&home, "palette")).await;
}

#[tokio::test]
async fn new_or_newly_matching_namespace_gets_its_companions() {
    let cluster = Cluster::new("appears").await;
    let _lockstep = cluster.start_controller().await;
    let home = cluster.namespace("home").await;
    let late = cluster.ns("late");
    cluster
        .source(&home, "colors")
        .annotate("target-namespaces", &format!("{late},{}*", cluster.ns("team-")))
        .annotate("target-selector", &format!("tier={}", cluster.id))
        .create()
        .await;
    for name in ["late", "team-a"] {
        let namespace = cluster.namespace(name).await;
        cluster.wait_data(&namespace, "colors-synced", json!({"sky": "blue"})).await;
    }
    let matching = cluster.namespace("matching").await;
    let label = json!({"metadata": {"labels": {"tier": cluster.id}}});
    cluster.merge(&format!("/api/v1/namespaces/{matching}"), &label).await;
    cluster.wait_data(&matching, "colors-synced", json!({"sky": "blue"})).await;
}

#[tokio::test]
async fn terminating_namespace_is_skipped_without_retries() {
    let Some(cluster) = Cluster::audited("terminating").await else { return };
    let lockstep = cluster.start_controller().await;
    let home = cluster.namespace("home").await;
    let going = cluster.namespace("going").await;
    // A finalizer keeps the namespace terminating for as long as the test lasts.
    let held = json!({"metadata": {"name": "held", "finalizers": ["example.com/held"]}});
    cluster.post(&format!("/api/v1/namespaces/{going}/configmaps"), &held).await;
    cluster.source(&home, "early").annotate("target-namespaces", &format!(".,{going}")).create().await;
    cluster.wait_data(&going, "early-synced", json!({"sky": "blue"})).await;

    cluster.delete(&format!("/api/v1/namespaces/{going}")).await;
    cluster.wait_collected(&configmap(&going, "early-synced")).await;
    let before = cluster.complete_audit(&going).await.len();
    cluster.source(&home, "late").annotate("target-namespaces", &format!(".,{going}")).create().await;
    // The Event is written after all writes of the reconcile.
    cluster.wait_event(&home, "late", "Mirrored").await;
    let requests = cluster.complete_audit(&going).await;
    assert_eq!(requests.len(), before, "no request to the terminating namespace: {requests:?}");
    assert_eq!(lockstep.metric("lockstep_troubles{reason=\"forbidden\"}"), 0.0);

    cluster.merge(&configmap(&going, "held"), &json!({"metadata": {"finalizers": null}})).await;
    cluster.wait_collected(&format!("/api/v1/namespaces/{going}")).await;
    let again = cluster.namespace("going").await;
    cluster.wait_data(&again, "late-synced", json!({"sky": "blue"})).await;
}

#[tokio::test]
async fn companions_of_a_paused_source_are_left_alone_until_it_is_deleted() {
    let cluster = Cluster::new("paused").await;
    let _lockstep = cluster.start_controller().await;
    let (home, away) = (cluster.namespace("home").await, cluster.namespace("away").await);
    cluster.source(&home, "colors").annotate("target-namespaces", &away).create().await;
    cluster.source(&home, "beacon").create().await;
    cluster.wait_data(&away, "colors-synced", json!({"sky": "blue"})).await;
    cluster.wait_data(&home, "beacon-synced", json!({"sky": "blue"})).await;

    let path = configmap(&home, "colors");
    cluster.merge(&path, &json!({"metadata": {"annotations": {cluster.key("paused"): "true"}}})).await;
    cluster.merge(&path, &json!({"data": {"sky": "grey"}})).await;
    cluster.merge(&configmap(&home, "beacon"), &json!({"data": {"sky": "red"}})).await;
    cluster.wait_data(&home, "beacon-synced", json!({"sky": "red"})).await;
    cluster.merge(&configmap(&away, "colors-synced"), &json!({"data": {"sky": "mine"}})).await;
    cluster.merge(&configmap(&home, "beacon-synced"), &json!({"data": {"sky": "mine"}})).await;
    cluster.wait_data(&home, "beacon-synced", json!({"sky": "red"})).await;
    assert_eq!(cluster.configmap(&away, "colors-synced").await.unwrap()["data"]["sky"], "mine");

    cluster.delete(&path).await;
    cluster.wait_gone(&configmap(&away, "colors-synced")).await;
}

#[tokio::test]
async fn source_without_annotations_uses_built_in_defaults_and_is_never_written() {
    let cluster = Cluster::new("defaults").await;
    let _lockstep = cluster.start_controller().await;
    let away = cluster.namespace("away").await;
    let defaults = json!({cluster.key("default-target-namespaces"): away});
    let home = cluster.namespace_with("home", json!({}), defaults).await;
    let created = cluster.source(&home, "colors").create().await;
    cluster.wait_data(&home, "colors-synced", json!({"sky": "blue"})).await;
    cluster.source(&home, "beacon").annotate("target-namespaces", &away).create().await;
    cluster.wait_data(&away, "beacon-synced", json!({"sky": "blue"})).await;
    // The Event is written after all writes of the reconcile.
    let note = cluster.wait_event(&home, "colors", "Mirrored").await;
    assert!(note.starts_with("created 1: "), "{note}");
    assert!(cluster.configmap(&away, "colors-synced").await.is_none());
    let now = cluster.configmap(&home, "colors").await.unwrap();
    assert_eq!(now["metadata"]["resourceVersion"], created["metadata"]["resourceVersion"]);
}

#[tokio::test]
async fn write_planned_on_a_stale_cache_is_planned_again() {
    let cluster = Cluster::new("stale").await;
    let lockstep = cluster.start_controller().await;
    let home = cluster.namespace("home").await;
    for n in 0..5 {
        cluster
            .source(&home, &format!("s{n}"))
            .with("/metadata/labels/team", json!("red"))
            .annotate("copy-labels", "team")
            .create()
            .await;
    }
    for n in 0..5 {
        cluster.wait_data(&home, &format!("s{n}-synced"), json!({"sky": "blue"})).await;
    }
    // Source and companion change at once: the patch planned after the first event is for an outdated companion.
    lockstep.pause();
    for n in 0..5 {
        let strip = json!({"metadata": {"labels": {"team": null}}});
        cluster.merge(&configmap(&home, &format!("s{n}-synced")), &strip).await;
        cluster.merge(&configmap(&home, &format!("s{n}")), &strip).await;
        cluster.merge(&configmap(&home, &format!("s{n}")), &json!({"data": {"sky": "red"}})).await;
    }
    lockstep.resume();
    for n in 0..5 {
        cluster.wait_data(&home, &format!("s{n}-synced"), json!({"sky": "red"})).await;
    }
    for n in 0..5 {
        let events = cluster.events(&home, &format!("s{n}")).await;
        assert!(events.iter().all(|(reason, _)| reason != "Invalid"), "{events:?}");
    }
}

#[tokio::test]
async fn companion_has_the_name_of_its_source_and_labels_of_its_own_if_the_source_says_so() {
    let cluster = Cluster::new("names").await;
    let (_installed, _lockstep) = cluster.install_and_start(&[]).await;
    let (home, away) = (cluster.namespace("home").await, cluster.namespace("away").await);
    let (admin, key) = (cluster.admin(), |name: &str| cluster.key(name));
    let source = cluster.source(&home, "ca.bundle").annotate("target-namespaces", &format!(".,{away}"));
    source
        .with("/metadata/labels/team", json!("a"))
        .with("/metadata/labels/tier", json!("web"))
        .create()
        .await;
    cluster.wait_data(&away, "ca.bundle-synced", json!({"sky": "blue"})).await;
    // Beside itself, a source cannot have a companion of its own name.
    let refused = admin.fails(&format!("annotate cm ca.bundle -n {home} {}==", key("companion-name")));
    assert!(refused.contains("the companion would overwrite its source"), "{refused}");
    let line = format!("annotate --overwrite cm ca.bundle -n {home}");
    admin.succeeds(&format!("{line} {}={away} {}==", key("target-namespaces"), key("companion-name")));
    cluster.wait_data(&away, "ca.bundle", json!({"sky": "blue"})).await;
    cluster.wait_gone(&configmap(&away, "ca.bundle-synced")).await;

    let labels = |expected: Value| {
        let cluster = &cluster;
        let away = &away;
        async move {
            cluster
                .wait(away, "ca.bundle", &expected.to_string(), |object| {
                    let mut found = object["metadata"]["labels"].clone();
                    let ours = ["companion", "source-namespace", "source-name"].map(|name| cluster.key(name));
                    let mut labels = found.as_object_mut();
                    ours.iter().all(|key| labels.as_mut().is_some_and(|labels| labels.remove(key).is_some()))
                        && found == expected
                })
                .await
        }
    };
    admin.succeeds(&format!("{line} {}=*", key("copy-labels")));
    labels(json!({"team": "a", "tier": "web"})).await;
    admin.succeeds(&format!(
        "{line} {}=*,!t*r {}=team=b,mirrored=yes",
        key("copy-labels"),
        key("set-labels")
    ));
    labels(json!({"team": "b", "mirrored": "yes"})).await;
    admin.succeeds(&format!("{line} {}=example.com/note=from-home", key("set-annotations")));
    let noted = |object: &Value| object["metadata"]["annotations"]["example.com/note"] == "from-home";
    cluster.wait(&away, "ca.bundle", "the note", noted).await;
    admin.succeeds(&format!(
        "{line} {}- {}- {}-",
        key("copy-labels"),
        key("set-labels"),
        key("set-annotations")
    ));
    let companion = labels(json!({})).await;
    assert!(companion["metadata"]["annotations"].get("example.com/note").is_none(), "{companion}");
    let source = cluster.configmap(&home, "ca.bundle").await.unwrap();
    assert!(source["metadata"]["labels"].get("mirrored").is_none(), "the source itself is never written");
}
