//! When companions are deleted, and when they are not.

use serde_json::{Value, json};

use crate::harness::{CONTROLLERS, Cluster, DEADLINE, configmap, eventually, run, secret, within};

#[tokio::test]
async fn deleted_source_takes_its_companions_with_it() {
    let Some(cluster) = Cluster::audited("gone").await else { return };
    let _lockstep = cluster.start_controller().await;
    let (home, away) = (cluster.namespace("home").await, cluster.namespace("away").await);
    for propagation in ["Background", "Foreground", "Orphan"] {
        cluster.source(&home, "colors").annotate("target-namespaces", &format!(".,{away}")).create().await;
        for namespace in [&home, &away] {
            cluster.wait_data(namespace, "colors-synced", json!({"sky": "blue"})).await;
        }
        cluster.delete_with(&configmap(&home, "colors"), propagation).await;
        // The garbage collector decides when the source goes, unless it is deleted in the background.
        let limit = if propagation == "Background" { DEADLINE } else { CONTROLLERS };
        within(limit, cluster.wait_gone(&configmap(&away, "colors-synced"))).await;
        cluster.wait_collected(&configmap(&home, "colors-synced")).await;
        // In the source's own namespace the garbage collector deletes the companion. Lockstep deletes an orphan, unless
        // it restored the ownerReference before it saw the source go.
        let deletes =
            cluster.complete_audit(&home).await.iter().filter(|(verb, ..)| verb == "delete").count();
        assert!(deletes == 0 || propagation == "Orphan", "{propagation}");
    }
}

#[tokio::test]
async fn companion_is_deleted_when_its_source_is_unlabelled_or_its_target_no_longer_matches() {
    let cluster = Cluster::new("unlabelled").await;
    let _lockstep = cluster.start_controller().await;
    let (home, away) = (cluster.namespace("home").await, cluster.namespace("away").await);
    let selected = cluster.namespace_with("selected", json!({"tier": cluster.id}), json!({})).await;
    cluster
        .source(&home, "colors")
        .annotate("target-namespaces", &format!(".,{away}"))
        .annotate("target-selector", &format!("tier={}", cluster.id))
        .create()
        .await;
    for namespace in [&home, &away, &selected] {
        cluster.wait_data(namespace, "colors-synced", json!({"sky": "blue"})).await;
    }
    cluster
        .merge(&format!("/api/v1/namespaces/{selected}"), &json!({"metadata": {"labels": {"tier": null}}}))
        .await;
    cluster.wait_gone(&configmap(&selected, "colors-synced")).await;
    assert!(cluster.configmap(&away, "colors-synced").await.is_some());

    let targets = json!({"metadata": {"annotations": {cluster.key("target-namespaces"): "."}}});
    cluster.merge(&configmap(&home, "colors"), &targets).await;
    cluster.wait_gone(&configmap(&away, "colors-synced")).await;
    assert!(cluster.configmap(&home, "colors-synced").await.is_some());

    let unlabelled = json!({"metadata": {"labels": {cluster.key("managed"): null}}});
    cluster.merge(&configmap(&home, "colors"), &unlabelled).await;
    cluster.wait_gone(&configmap(&home, "colors-synced")).await;
    assert!(cluster.configmap(&home, "colors").await.is_some());
}

#[tokio::test]
async fn source_recreated_under_the_same_name_keeps_its_companions() {
    let cluster = Cluster::new("recreated").await;
    let _lockstep = cluster.start_controller().await;
    let (home, away) = (cluster.namespace("home").await, cluster.namespace("away").await);
    let source = |sky: &str| {
        let source = cluster.source(&home, "colors").annotate("target-namespaces", &format!(".,{away}"));
        source.with("/data", json!({"sky": sky}))
    };
    source("blue").create().await;
    for namespace in [&home, &away] {
        cluster.wait_data(namespace, "colors-synced", json!({"sky": "blue"})).await;
    }
    cluster.delete(&configmap(&home, "colors")).await;
    let new = source("red").create().await;
    for namespace in [&home, &away] {
        cluster
            .wait(namespace, "colors-synced", "belongs to the new one", |object| {
                object["data"]["sky"] == "red"
                    && object["metadata"]["annotations"][cluster.key("source-uid")] == new["metadata"]["uid"]
            })
            .await;
    }
}

#[tokio::test]
async fn companions_of_a_terminating_source_are_not_written() {
    let cluster = Cluster::new("dying").await;
    let _lockstep = cluster.start_controller().await;
    let home = cluster.namespace("home").await;
    cluster.source(&home, "colors").with("/metadata/finalizers", json!(["example.com/held"])).create().await;
    cluster.source(&home, "beacon").create().await;
    for name in ["colors-synced", "beacon-synced"] {
        cluster.wait_data(&home, name, json!({"sky": "blue"})).await;
    }
    cluster.delete(&configmap(&home, "colors")).await;
    // The edit of the beacon is later on the same watch: once it is healed, the edit of colors has been seen.
    cluster.merge(&configmap(&home, "beacon"), &json!({"data": {"sky": "red"}})).await;
    cluster.wait_data(&home, "beacon-synced", json!({"sky": "red"})).await;
    for name in ["colors-synced", "beacon-synced"] {
        cluster.merge(&configmap(&home, name), &json!({"data": {"sky": "mine"}})).await;
    }
    cluster.wait_data(&home, "beacon-synced", json!({"sky": "red"})).await;
    assert_eq!(cluster.configmap(&home, "colors-synced").await.unwrap()["data"]["sky"], "mine");
    cluster.merge(&configmap(&home, "colors"), &json!({"metadata": {"finalizers": null}})).await;
    cluster.wait_collected(&configmap(&home, "colors-synced")).await;
}

/// What an exempt user removes from a companion.
fn stripped(cluster: &Cluster) -> [(&'static str, Value); 3] {
    let (label, source) = (cluster.key("companion"), cluster.key("source"));
    [
        ("label", json!({"metadata": {"labels": {label: null}}})),
        ("source", json!({"metadata": {"annotations": {source: null}}})),
        ("marks", json!({"metadata": {"labels": null, "annotations": null}})),
    ]
}

#[tokio::test]
async fn companion_that_lost_its_marks_while_its_source_was_paused_goes_with_the_source() {
    let cluster = Cluster::new("outlives").await;
    let _lockstep = cluster.start_controller().await;
    let home = cluster.namespace("home").await;
    let mut targets = Vec::new();
    for (name, _) in stripped(&cluster) {
        targets.push(cluster.namespace(name).await);
    }
    let exported = cluster.namespace("exported").await;
    let all = format!("{},{exported}", targets.join(","));
    let password = json!({"password": "aHVzaA=="});
    cluster.source(&home, "db").secret("Opaque", password).annotate("target-namespaces", &all).create().await;
    for namespace in targets.iter().chain([&exported]) {
        let path = secret(namespace, "db-synced");
        eventually("mirrored", || cluster.get(&path)).await;
    }
    let paused = json!({"metadata": {"annotations": {cluster.key("paused"): "true"}}});
    cluster.merge(&secret(&home, "db"), &paused).await;
    for (namespace, (_, strip)) in targets.iter().zip(stripped(&cluster)) {
        cluster.merge(&secret(namespace, "db-synced"), &strip).await;
    }
    // A copy that was exported and applied again bears the annotations, and is not ours.
    let path = secret(&exported, "db-synced");
    let mut copy = cluster.get(&path).await.unwrap();
    copy["metadata"]["labels"] = json!({});
    for field in ["uid", "resourceVersion", "creationTimestamp", "managedFields"] {
        copy["metadata"].as_object_mut().unwrap().remove(field);
    }
    cluster.delete(&path).await;
    for name in ["db-synced", "db-backup"] {
        copy["metadata"]["name"] = json!(name);
        cluster.post(&format!("/api/v1/namespaces/{exported}/secrets"), &copy).await;
    }
    // Another source waits for one of the names.
    let waiting = cluster.source(&home, "waiting").secret("Opaque", json!({"password": "bmV3"}));
    waiting.annotate("target-namespaces", &targets[0]).annotate("companion-name", "db-synced").create().await;
    cluster.wait_event(&home, "waiting", "Conflict").await;

    cluster.delete(&secret(&home, "db")).await;
    for namespace in &targets[1..] {
        cluster.wait_gone(&secret(namespace, "db-synced")).await;
    }
    eventually("the other source has the name", || async {
        cluster
            .get(&secret(&targets[0], "db-synced"))
            .await
            .filter(|object| object["data"]["password"] == "bmV3")
    })
    .await;
    for name in ["db-synced", "db-backup"] {
        assert!(cluster.get(&secret(&exported, name)).await.is_some(), "{name} was deleted");
    }
}

#[tokio::test]
async fn companion_that_lost_its_label_before_a_restart_goes_with_its_source() {
    let cluster = Cluster::new("restarted").await;
    let mut lockstep = cluster.start_controller().await;
    let home = cluster.namespace("home").await;
    let mut targets = Vec::new();
    // Without the annotation `source-uid`, nothing proves that it is ours.
    for (name, _) in &stripped(&cluster)[..2] {
        targets.push(cluster.namespace(name).await);
    }
    cluster.source(&home, "colors").annotate("target-namespaces", &targets.join(",")).create().await;
    for namespace in &targets {
        cluster.wait_data(namespace, "colors-synced", json!({"sky": "blue"})).await;
    }
    let paused = json!({"metadata": {"annotations": {cluster.key("paused"): "true"}}});
    cluster.merge(&configmap(&home, "colors"), &paused).await;
    for (namespace, (_, strip)) in targets.iter().zip(stripped(&cluster)) {
        cluster.merge(&configmap(namespace, "colors-synced"), &strip).await;
    }
    assert!(lockstep.stop().await.success());
    let _lockstep = cluster.start_controller().await;
    cluster.delete(&configmap(&home, "colors")).await;
    for namespace in &targets {
        cluster.wait_gone(&configmap(namespace, "colors-synced")).await;
    }
}

#[tokio::test]
async fn companions_of_a_source_recreated_with_a_malformed_policy_are_deleted() {
    let cluster = Cluster::new("anew").await;
    let lockstep = cluster.start_controller().await;
    let (home, away) = (cluster.namespace("home").await, cluster.namespace("away").await);
    let source = || cluster.source(&home, "colors").annotate("target-namespaces", &format!(".,{away}"));
    source().create().await;
    for namespace in [&home, &away] {
        cluster.wait_data(namespace, "colors-synced", json!({"sky": "blue"})).await;
    }
    // While the same source is malformed, its companions stay.
    let protect = |value: Value| json!({"metadata": {"annotations": {cluster.key("protect"): value}}});
    cluster.merge(&configmap(&home, "colors"), &protect(json!("perhaps"))).await;
    cluster.wait_event(&home, "colors", "Refused").await;
    assert!(cluster.configmap(&away, "colors-synced").await.is_some());
    cluster.merge(&configmap(&home, "colors"), &protect(Value::Null)).await;
    lockstep.wait_metric("lockstep_troubles{reason=\"malformed\"}", 0.0).await;

    // Lockstep does not see the two states in between.
    lockstep.pause();
    cluster.delete(&configmap(&home, "colors")).await;
    source().annotate("protect", "perhaps").create().await;
    lockstep.resume();
    cluster.wait_gone(&configmap(&away, "colors-synced")).await;
    cluster.wait_collected(&configmap(&home, "colors-synced")).await;
    lockstep.wait_metric("lockstep_troubles{reason=\"malformed\"}", 1.0).await;
}

/// Waits until an object has neither a label nor an annotation of the test's domain.
async fn wait_released(cluster: &Cluster, path: &str) -> Value {
    let domain = format!("{}/", cluster.domain());
    eventually(&format!("{path} is released"), || async {
        let object = cluster.get(path).await.unwrap_or_else(|| panic!("{path} was deleted"));
        let ours = |map: &str| {
            let keys = object["metadata"][map].as_object().into_iter().flat_map(|map| map.keys());
            keys.filter(|key| key.starts_with(&domain)).count()
        };
        (ours("labels") + ours("annotations") == 0).then_some(object.clone())
    })
    .await
}

/// Runs kubectl as the admin.
fn kubectl(cluster: &Cluster, line: &str) -> String {
    run(cluster.plane.kubectl().args(line.split_whitespace()))
}

#[tokio::test]
async fn deleted_source_that_says_keep_leaves_its_companions_behind_with_one_write_each() {
    let Some(cluster) = Cluster::audited("keep").await else { return };
    let mut lockstep = cluster.start_controller().await;
    let (home, away) = (cluster.namespace("home").await, cluster.namespace("away").await);
    let kept = |name: &str| {
        let source = cluster.source(&home, name).annotate("when-removed", "keep");
        let source = source.annotate("target-namespaces", &format!(".,{away}"));
        source.annotate("copy-labels", "team").with("/metadata/labels/team", json!("a"))
    };
    kept("colors").create().await;
    kept("frozen").with("/immutable", json!(true)).create().await;
    kept("login").secret("kubernetes.io/basic-auth", json!({"password": "aHVzaA=="})).create().await;
    let paths = |namespace: &str| {
        let [colors, frozen] = ["colors-synced", "frozen-synced"].map(|name| configmap(namespace, name));
        [colors, frozen, secret(namespace, "login-synced")]
    };
    let mut before = Vec::new();
    for path in paths(&home).into_iter().chain(paths(&away)) {
        let companion = eventually("mirrored", || cluster.get(&path)).await;
        assert_eq!(companion["metadata"]["annotations"][cluster.key("when-removed")], "keep");
        assert!(companion["metadata"]["ownerReferences"].is_null(), "{path}");
        before.push((path, companion));
    }
    for delete in ["cm colors", "cm frozen --cascade=foreground", "secret login --cascade=orphan"] {
        kubectl(&cluster, &format!("-n {home} delete {delete}"));
    }
    let mut versions = Vec::new();
    for (path, before) in &before {
        let after = wait_released(&cluster, path).await;
        for field in ["data", "type", "immutable"] {
            assert_eq!(after[field], before[field], "{path}");
        }
        assert_eq!(after["metadata"]["uid"], before["metadata"]["uid"], "{path}");
        assert_eq!(after["metadata"]["labels"], json!({"team": "a"}), "{path}");
        assert!(after["metadata"]["ownerReferences"].is_null(), "{path}");
        versions.push((path, after["metadata"]["resourceVersion"].clone()));
    }
    let note = cluster.wait_event(&home, "colors", "Removed").await;
    assert!(note.starts_with("released 2: ") && note.contains("source gone"), "{note}");
    lockstep.wait_metric("lockstep_companion_writes_total{action=\"released\"}", 6.0).await;

    // The garbage collector has its chance: it deletes the companion of a source that is deleted later. A new process
    // has its chance, too, and mirrors that source.
    assert!(lockstep.stop().await.success());
    let lockstep = cluster.start_controller().await;
    cluster.source(&home, "beacon").annotate("target-namespaces", &format!(".,{away}")).create().await;
    for namespace in [&home, &away] {
        cluster.wait_data(namespace, "beacon-synced", json!({"sky": "blue"})).await;
    }
    kubectl(&cluster, &format!("-n {home} delete cm beacon"));
    cluster.wait_gone(&configmap(&away, "beacon-synced")).await;
    cluster.wait_collected(&configmap(&home, "beacon-synced")).await;
    for (path, version) in versions {
        let now = cluster.get(path).await.unwrap_or_else(|| panic!("{path} was deleted"));
        assert_eq!(now["metadata"]["resourceVersion"], version, "{path} was written again");
    }
    assert_eq!(lockstep.metric("lockstep_companion_writes_total{action=\"released\"}"), 0.0);
    for namespace in [&home, &away] {
        for name in ["colors-synced", "frozen-synced", "login-synced"] {
            let audit = cluster.complete_audit(namespace).await;
            let audit = audit.into_iter().filter(|(.., of, _)| of == name);
            let writes: Vec<String> = audit.map(|(verb, ..)| verb).filter(|verb| verb != "get").collect();
            assert_eq!(writes, ["create", "patch"], "{namespace}/{name}");
        }
    }
}

#[tokio::test]
async fn companion_stays_when_its_source_that_says_keep_is_unlabelled_or_its_target_no_longer_matches() {
    let Some(cluster) = Cluster::audited("handover").await else { return };
    let lockstep = cluster.start_controller().await;
    let (home, away) = (cluster.namespace("home").await, cluster.namespace("away").await);
    let selected = cluster.namespace_with("selected", json!({"tier": cluster.id}), json!({})).await;
    cluster
        .source(&home, "colors")
        .annotate("target-namespaces", &format!(".,{away}"))
        .annotate("target-selector", &format!("tier={}", cluster.id))
        .create()
        .await;
    for namespace in [&home, &away, &selected] {
        cluster.wait_data(namespace, "colors-synced", json!({"sky": "blue"})).await;
    }
    // Another source waits for one of the names.
    let waiting = cluster.source(&home, "paint").with("/data", json!({"sky": "red"}));
    waiting.annotate("companion-name", "colors-synced").create().await;
    cluster.wait_event(&home, "paint", "Conflict").await;

    annotate_source(&cluster, &home, "colors", "when-removed=keep");
    for namespace in [&home, &away, &selected] {
        cluster
            .wait(namespace, "colors-synced", "is marked, and has no owner", |object| {
                let metadata = &object["metadata"];
                metadata["annotations"][cluster.key("when-removed")] == "keep"
                    && metadata["ownerReferences"].is_null()
            })
            .await;
    }
    kubectl(&cluster, &format!("label namespace {selected} tier-"));
    wait_released(&cluster, &configmap(&selected, "colors-synced")).await;
    annotate_source(&cluster, &home, "colors", "target-namespaces=.");
    wait_released(&cluster, &configmap(&away, "colors-synced")).await;
    kubectl(&cluster, &format!("-n {home} label cm colors {}-", cluster.key("managed")));
    wait_released(&cluster, &configmap(&home, "colors-synced")).await;
    for namespace in [&home, &away, &selected] {
        cluster.wait_data(namespace, "colors-synced", json!({"sky": "blue"})).await;
    }
    assert_eq!(lockstep.metric("lockstep_companion_writes_total{action=\"deleted\"}"), 0.0);

    // It belongs to nobody: the source that waits for the name finds it, and takes it over only if it says so.
    let found = ("create".to_owned(), "colors-synced".to_owned(), 409);
    eventually("the other source has tried", || async {
        cluster.audit(&home).contains(&found).then_some(())
    })
    .await;
    wait_released(&cluster, &configmap(&home, "colors-synced")).await;
    annotate_source(&cluster, &home, "paint", "adopt=true");
    cluster.wait_data(&home, "colors-synced", json!({"sky": "red"})).await;
}

/// Sets one of Lockstep's annotations with kubectl.
fn annotate_source(cluster: &Cluster, namespace: &str, name: &str, annotation: &str) {
    kubectl(cluster, &format!("-n {namespace} annotate --overwrite cm {name} {}", cluster.key(annotation)));
}

#[tokio::test]
async fn all_companions_stay_when_every_source_is_unlabelled_before_an_uninstall() {
    let cluster = Cluster::new("leaving").await;
    let (_installed, lockstep) = cluster.install_and_start(&[]).await;
    let (home, away) = (cluster.namespace("home").await, cluster.namespace("away").await);
    for n in 0..MANY {
        let source = cluster.source(&home, &format!("s{n}"));
        source.annotate("target-namespaces", &format!(".,{away}")).create().await;
    }
    let created = "lockstep_companion_writes_total{action=\"created\"}";
    lockstep.wait_metric(created, 2.0 * MANY as f64).await;

    // The commands of docs/operations.md.
    let domain = cluster.domain();
    kubectl(
        &cluster,
        &format!(
            "annotate --overwrite configmap,secret -A -l {domain}/managed=true {domain}/when-removed=keep"
        ),
    );
    let column = format!("KEEP:.metadata.annotations.{}/when-removed", domain.replace('.', "\\."));
    let list = format!(
        "get configmap,secret -A -l {domain}/companion=true -o custom-columns=NAME:.metadata.name,{column}"
    );
    eventually("every companion shows it", || async {
        let shown = kubectl(&cluster, &list);
        (shown.lines().filter(|line| line.ends_with(" keep")).count() == 2 * MANY).then_some(())
    })
    .await;
    kubectl(&cluster, &format!("label configmap,secret -A -l {domain}/managed=true {domain}/managed-"));
    eventually("no companion is left", || async {
        kubectl(&cluster, &format!("get configmap,secret -A -l {domain}/companion=true -o name"))
            .is_empty()
            .then_some(())
    })
    .await;
    assert_eq!(lockstep.metric("lockstep_troubles{reason=\"accident\"}"), 0.0);
    for namespace in [&home, &away] {
        for n in 0..MANY {
            let copy = wait_released(&cluster, &configmap(namespace, &format!("s{n}-synced"))).await;
            assert_eq!(copy["data"], json!({"sky": "blue"}));
        }
    }
    // They can be edited like any other object.
    kubectl(&cluster, &format!("-n {away} label cm s0-synced team=mine"));
}

/// Enough sources that deleting all of them at once triggers the brake.
const MANY: usize = 24;

#[tokio::test]
async fn deletes_of_more_than_half_are_held_and_sources_recreated_in_time_keep_their_companions() {
    let cluster = Cluster::new("accident").await;
    let lockstep = cluster.start_controller().await;
    let (home, away) = (cluster.namespace("home").await, cluster.namespace("away").await);
    let mut uids = Vec::new();
    for n in 0..MANY {
        cluster.source(&home, &format!("s{n}")).annotate("target-namespaces", &away).create().await;
    }
    for n in 0..MANY {
        let companion = cluster.wait_data(&away, &format!("s{n}-synced"), json!({"sky": "blue"})).await;
        uids.push(companion["metadata"]["uid"].clone());
    }
    // All sources are deleted while Lockstep cannot see them go one by one, and then recreated.
    lockstep.pause();
    for n in 0..MANY {
        cluster.delete(&configmap(&home, &format!("s{n}"))).await;
    }
    lockstep.resume();
    lockstep.wait_metric("lockstep_deletes_held", 1.0).await;
    let note = cluster.wait_event(&home, &format!("s{}", MANY - 1), "DeletesHeld").await;
    assert!(note.contains("more than half of all"), "{note}");
    for n in 0..MANY {
        cluster.source(&home, &format!("s{n}")).annotate("target-namespaces", &away).create().await;
    }
    let held =
        |lockstep: &crate::harness::Lockstep| lockstep.metric("lockstep_troubles{reason=\"accident\"}");
    eventually("no delete is held", || async { (held(&lockstep) == 0.0).then_some(()) }).await;
    for (n, uid) in uids.iter().enumerate() {
        let companion = cluster.wait_data(&away, &format!("s{n}-synced"), json!({"sky": "blue"})).await;
        assert_eq!(companion["metadata"]["uid"], *uid, "s{n}-synced was recreated");
    }
}

#[tokio::test]
async fn companions_of_more_than_half_the_sources_missing_at_start_are_deleted_after_the_grace() {
    let cluster = Cluster::new("missing").await;
    let mut lockstep = cluster.start_controller().await;
    let (home, away) = (cluster.namespace("home").await, cluster.namespace("away").await);
    for n in 0..MANY {
        cluster.source(&home, &format!("s{n}")).annotate("target-namespaces", &away).create().await;
    }
    for n in 0..MANY {
        cluster.wait_data(&away, &format!("s{n}-synced"), json!({"sky": "blue"})).await;
    }
    assert!(lockstep.stop().await.success());
    for n in 0..MANY {
        cluster.delete(&configmap(&home, &format!("s{n}"))).await;
    }
    let lockstep = cluster.start_mirror_with(&["--delete-grace", "3s"]).await;
    // One response shows both: while deletes are held, nothing has been deleted.
    eventually("all deletes are held", || async {
        let metrics = lockstep.metrics();
        let held = metrics.contains("lockstep_deletes_held 1\n");
        assert!(
            !held || !metrics.contains("lockstep_companion_writes_total{action=\"deleted\"}"),
            "{metrics}"
        );
        held.then_some(())
    })
    .await;
    for n in 0..MANY {
        cluster.wait_gone(&configmap(&away, &format!("s{n}-synced"))).await;
    }
    lockstep.wait_metric("lockstep_deletes_held", 0.0).await;
}
