//! `lockstep migrate`: copies as kubernetes-replicator and Reflector make them become companions in place, and come
//! back.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::{Arc, Mutex},
};

use futures::StreamExt;
use kube::core::WatchEvent;
use serde_json::{Value, json};

use crate::{
    harness::{Cluster, LARGE_DEADLINE, dedicated_control_plane, eventually, secret},
    recipes::{Step, printed, steps},
    users::{User, all_verbs},
};

/// How many sources move in the tests of a whole migration; 300 were moved with `LOCKSTEP_TEST_MIGRATE=300`.
fn sources() -> usize {
    std::env::var("LOCKSTEP_TEST_MIGRATE").ok().and_then(|text| text.parse().ok()).unwrap_or(30)
}

const REPLICATOR: &str = "replicator.v1.mittwald.de";
const REFLECTOR: &str = "reflector.v1.k8s.emberstack.com";
/// `secret` in base64.
const VALUE: &str = "c2VjcmV0";

/// Creates a Secret with one key.
async fn create(cluster: &Cluster, place: (&str, &str), labels: Value, annotations: Value) -> Value {
    let (namespace, name) = place;
    let metadata = json!({"name": name, "labels": labels, "annotations": annotations});
    let object = json!({"metadata": metadata, "type": "Opaque", "data": {"key": VALUE}});
    cluster.post(&format!("/api/v1/namespaces/{namespace}/secrets"), &object).await
}

fn version(object: &Value) -> &Value {
    &object["metadata"]["resourceVersion"]
}

/// A source and its copies as kubernetes-replicator 2.12.4 leaves them: pushed to these namespaces, with the labels of
/// the source.
async fn replicator_push(cluster: &Cluster, source: (&str, &str), to: &str, namespaces: &[String]) {
    let labels = json!({"team": "a"});
    let annotations = json!({format!("{REPLICATOR}/replicate-to"): to});
    let original = create(cluster, source, labels.clone(), annotations).await;
    for namespace in namespaces {
        let annotations = json!({
            format!("{REPLICATOR}/replicated-at"): "2026-01-02T03:04:05Z",
            format!("{REPLICATOR}/replicated-from-version"): version(&original),
            format!("{REPLICATOR}/replicated-keys"): "key",
        });
        create(cluster, (namespace, source.1), labels.clone(), annotations).await;
    }
}

/// A source that permits copies, and copies that name it.
async fn replicator_pull(cluster: &Cluster, source: (&str, &str), permitted: &str, copies: &[String]) {
    let annotations = json!({
        format!("{REPLICATOR}/replication-allowed"): "true",
        format!("{REPLICATOR}/replication-allowed-namespaces"): permitted,
    });
    let original = create(cluster, source, json!({}), annotations).await;
    for namespace in copies {
        let annotations = json!({
            format!("{REPLICATOR}/replicate-from"): format!("{}/{}", source.0, source.1),
            format!("{REPLICATOR}/replicated-at"): "2026-01-02T03:04:05Z",
            format!("{REPLICATOR}/replicated-from-version"): version(&original),
            format!("{REPLICATOR}/replicated-keys"): "key",
            "mine": "1",
        });
        create(cluster, (namespace, source.1), json!({"mine": "1"}), annotations).await;
    }
}

/// As Reflector 10.0.63 leaves them. `pushed`: it has created the copies.
async fn reflector(
    cluster: &Cluster,
    source: (&str, &str),
    namespaces: &str,
    copies: &[String],
    pushed: bool,
) {
    let mut annotations = json!({
        format!("{REFLECTOR}/reflection-allowed"): "true",
        format!("{REFLECTOR}/reflection-allowed-namespaces"): namespaces,
    });
    if pushed {
        annotations[format!("{REFLECTOR}/reflection-auto-enabled")] = json!("true");
    }
    let original = create(cluster, source, json!({"team": "a"}), annotations).await;
    for namespace in copies {
        let annotations = json!({
            format!("{REFLECTOR}/auto-reflects"): if pushed { "True" } else { "False" },
            format!("{REFLECTOR}/reflects"): format!("{}/{}", source.0, source.1),
            format!("{REFLECTOR}/reflected-version"): version(&original),
            format!("{REFLECTOR}/reflected-at"): "2026-01-02T03:04:05.0000000+00:00",
        });
        create(cluster, (namespace, source.1), json!({}), annotations).await;
    }
}

/// Runs `lockstep migrate` without blocking the watches of the test.
async fn migrate(user: &User, arguments: &[&str]) -> Output {
    let mut command: Command = user.lockstep(&[&["migrate"], arguments].concat());
    tokio::task::spawn_blocking(move || command.output().expect("lockstep")).await.expect("it ends")
}

async fn migrated(user: &User, arguments: &[&str]) -> String {
    let output = migrate(user, arguments).await;
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{arguments:?}: {stderr}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

async fn refused(user: &User, arguments: &[&str]) -> String {
    let output = migrate(user, arguments).await;
    assert!(!output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// A directory for undo files.
fn scratch(cluster: &Cluster) -> PathBuf {
    let path = cluster.plane.data_dir().join(format!("migrate-{}", cluster.id));
    std::fs::create_dir_all(&path).expect("a directory");
    path
}

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// What a watch has shown: type, namespace/name, uid, data.
type Seen = Arc<Mutex<Vec<(&'static str, String, Value, Value)>>>;

/// Watches all Secrets of a namespace from now on.
async fn watch(cluster: &Cluster, namespace: &str, seen: &Seen) -> tokio::task::JoinHandle<()> {
    let path = format!("/api/v1/namespaces/{namespace}/secrets");
    let list = cluster.get(&path).await.expect("a list");
    let from = list["metadata"]["resourceVersion"].as_str().expect("a version");
    let uri = format!("{path}?watch=true&timeoutSeconds=3600&resourceVersion={from}");
    let request = http::Request::get(uri).body(Vec::new()).expect("a request");
    let events = cluster.client.request_events::<Value>(request).await.expect("a watch");
    let (seen, namespace) = (seen.clone(), namespace.to_owned());
    tokio::spawn(async move {
        let mut events = Box::pin(events);
        while let Some(event) = events.next().await {
            let (type_, object) = match event.expect("an event") {
                WatchEvent::Added(object) => ("ADDED", object),
                WatchEvent::Modified(object) => ("MODIFIED", object),
                WatchEvent::Deleted(object) => ("DELETED", object),
                WatchEvent::Bookmark(_) => continue,
                WatchEvent::Error(error) => panic!("{error:?}"),
            };
            let name = format!("{namespace}/{}", object["metadata"]["name"].as_str().unwrap_or_default());
            let entry = (type_, name, object["metadata"]["uid"].clone(), object["data"].clone());
            seen.lock().expect("no panic").push(entry);
        }
        panic!("the watch of {namespace} has ended: it proves nothing");
    })
}

/// Labels and annotations of all Secrets in these namespaces, by place, and their UIDs.
async fn metadata(cluster: &Cluster, namespaces: &[String]) -> BTreeMap<String, (Value, Value, Value)> {
    let mut all = BTreeMap::new();
    for namespace in namespaces {
        let list = cluster.get(&format!("/api/v1/namespaces/{namespace}/secrets")).await.expect("a list");
        for item in list["items"].as_array().expect("items") {
            let meta = &item["metadata"];
            let place = format!("{namespace}/{}", meta["name"].as_str().expect("a name"));
            all.insert(place, (meta["labels"].clone(), meta["annotations"].clone(), meta["uid"].clone()));
        }
    }
    all
}

/// A whole migration there and back, while a watch looks at every copy.
async fn there_and_back(cluster: &Cluster, tool: &str, home: &str, targets: &[String]) {
    let prefix = if tool == "replicator" { REPLICATOR } else { REFLECTOR };
    let admin = cluster.admin();
    let all = [&[home.to_owned()], targets].concat();
    let before = metadata(cluster, &all).await;
    let copies = before.keys().filter(|place| !place.starts_with(&format!("{home}/"))).count();
    let sources = before.len() - copies;
    let seen = Seen::default();
    let mut watches = Vec::new();
    for namespace in targets {
        watches.push(watch(cluster, namespace, &seen).await);
    }
    let undo = scratch(cluster).join("undo.json");
    let (domain, only) = (cluster.domain(), format!("{home}/*"));
    let common = ["--from", tool, "--domain", &domain, "--only", &only];
    let apply = [&common[..], &["--apply", "--undo-file", text(&undo)]].concat();

    let plan = migrated(&admin, &common).await;
    let summary = format!("{sources} sources with {copies} copies can move, 0 left to you.");
    assert!(plan.contains(&summary) && plan.contains("Nothing was written."), "{plan}");
    assert!(metadata(cluster, &all).await == before && !undo.exists(), "a plan writes nothing");

    let started = std::time::Instant::now();
    let done = migrated(&admin, &apply).await;
    eprintln!("{tool}: {sources} sources and {copies} copies there in {:?}", started.elapsed());
    assert!(
        done.contains(&format!("{sources} sources and {copies} copies belong to Lockstep now")),
        "{done}"
    );
    let after = metadata(cluster, &all).await;
    for (place, (labels, annotations, uid)) in &after {
        assert_eq!(uid, &before[place].2, "{place}");
        let is_theirs = |key: &String| key.starts_with(prefix);
        let annotations = annotations.as_object().expect("annotations");
        assert!(!annotations.keys().any(is_theirs), "{place}: {annotations:?}");
        let (key, gone) = if place.starts_with(&format!("{home}/")) {
            (cluster.key("managed"), cluster.key("adopt"))
        } else {
            (cluster.key("companion"), cluster.key("x"))
        };
        assert!(
            labels[&key] == "true" && !annotations.contains_key(&gone),
            "{place}: {labels} {annotations:?}"
        );
    }
    for namespace in targets {
        let live = cluster.get(&format!("/api/v1/namespaces/{namespace}")).await.expect("a namespace");
        assert_eq!(live["metadata"]["annotations"][cluster.key("accept-adopt-from")], Value::Null);
    }
    let file = std::fs::read_to_string(&undo).expect("the undo file");
    assert!(!file.contains(VALUE) && file.contains("\"finished\": true"), "{file}");
    let error = refused(&admin, &apply).await;
    assert!(error.contains("exists already"), "{error}");

    // A change of a source reaches its copies: they are companions.
    let (source, copy) = (before.keys().next().expect("a source"), targets[0].as_str());
    let name = source.split_once('/').expect("a name").1;
    cluster.merge(&secret(home, name), &json!({"data": {"key": "bmV3"}})).await;
    eventually("the change in the copy", || async {
        let live = cluster.get(&secret(copy, name)).await?;
        (live["data"]["key"] == "bmV3").then_some(())
    })
    .await;

    let started = std::time::Instant::now();
    let undone = migrated(&admin, &["--undo", text(&undo)]).await;
    eprintln!("{tool}: back in {:?}", started.elapsed());
    assert!(undone.contains("belong to") && !undone.contains("note:"), "{undone}");
    let back = metadata(cluster, &all).await;
    for (place, then) in &before {
        assert_eq!(&back[place], then, "{place}");
    }
    assert_eq!(back.len(), before.len());
    // Once more does nothing.
    migrated(&admin, &["--undo", text(&undo)]).await;
    assert!(metadata(cluster, &all).await == before);

    // The watch has seen all of it: in each namespace, it has seen an object that was created afterwards.
    for namespace in targets {
        create(cluster, (namespace, "end-of-the-watch"), json!({}), json!({})).await;
        let end = format!("{namespace}/end-of-the-watch");
        let what = format!("the watch shows {end}");
        eventually(&what, || async {
            let seen = seen.lock().expect("no panic");
            seen.iter().any(|(_, name, ..)| *name == end).then_some(())
        })
        .await;
    }
    let seen = seen.lock().expect("no panic");
    let events: Vec<_> = seen.iter().filter(|(_, name, ..)| !name.ends_with("/end-of-the-watch")).collect();
    for (type_, name, uid, data) in &events {
        assert_eq!(*type_, "MODIFIED", "{name}");
        assert_eq!(uid, &before[name].2, "{name}");
        assert!(data["key"] == VALUE || data["key"] == "bmV3", "{name}: its content is gone");
    }
    // Cleaned, adopted, released, annotated again. Most say `keep` in between.
    assert!(events.len() >= 4 * copies, "{} events for {copies} copies", events.len());
    eprintln!("{tool}: {} events of {copies} copies, none of them DELETED or ADDED", events.len());
    assert!(watches.iter().all(|watch| !watch.is_finished()), "a watch has ended");
    watches.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test]
async fn replicators_secrets_move_and_come_back_and_no_copy_is_ever_missing() {
    let cluster = Cluster::new("replicator").await;
    let (_installed, _lockstep) = cluster.install_and_start(&[]).await;
    let home = cluster.namespace("home").await;
    let targets = vec![cluster.namespace("t0").await, cluster.namespace("t1").await];
    for n in 0..sources() {
        let name = format!("s{n:03}");
        match n % 2 {
            0 => replicator_push(&cluster, (&home, &name), &cluster.ns("t.*"), &targets).await,
            _ => replicator_pull(&cluster, (&home, &name), &cluster.ns("t.*"), &targets[..1]).await,
        }
    }
    there_and_back(&cluster, "replicator", &home, &targets).await;
}

#[tokio::test]
async fn reflectors_secrets_move_and_come_back_and_no_copy_is_ever_missing() {
    let cluster = Cluster::new("reflector").await;
    let (_installed, _lockstep) = cluster.install_and_start(&[]).await;
    let home = cluster.namespace("home").await;
    let targets = vec![cluster.namespace("t0").await, cluster.namespace("t1").await];
    for n in 0..sources() {
        let (name, is_pushed) = (format!("s{n:03}"), n % 2 == 0);
        let copies = if is_pushed { &targets[..] } else { &targets[..1] };
        reflector(&cluster, (&home, &name), &cluster.ns("t.*"), copies, is_pushed).await;
    }
    there_and_back(&cluster, "reflector", &home, &targets).await;
}

#[tokio::test]
async fn source_whose_copies_are_not_adopted_is_put_back_and_the_same_command_continues() {
    let cluster = Cluster::new("interrupted").await;
    // The webhook alone: nobody adopts.
    let (_installed, _webhook) = cluster.install_and_start(&["--no-controller"]).await;
    let home = cluster.namespace("home").await;
    let targets = vec![cluster.namespace("t0").await];
    replicator_push(&cluster, (&home, "first"), &targets[0], &targets).await;
    replicator_push(&cluster, (&home, "second"), &targets[0], &targets).await;
    let all = [std::slice::from_ref(&home), &targets[..]].concat();
    let before = metadata(&cluster, &all).await;
    let namespace = || async { cluster.get(&format!("/api/v1/namespaces/{}", targets[0])).await.unwrap() };
    let accepted =
        || async { namespace().await["metadata"]["annotations"][cluster.key("accept-adopt-from")].clone() };

    let (admin, undo) = (cluster.admin(), scratch(&cluster).join("undo.json"));
    let (domain, only) = (cluster.domain(), format!("{home}/*"));
    let apply =
        ["--from", "replicator", "--domain", &domain, "--only", &only, "--apply", "--undo-file", text(&undo)];
    let error = refused(&admin, &[&apply[..], &["--timeout", "1s"]].concat()).await;
    assert!(
        error.contains("Lockstep has not adopted within 1s") && error.contains("continue with the same"),
        "{error}"
    );
    assert!(error.contains(&format!("secret/{}/first, of {home}/first", targets[0])), "{error}");
    assert!(metadata(&cluster, &all).await == before, "the first source and its copy are as they were");
    assert_eq!(accepted().await, Value::Null);

    // As if it had been interrupted when the copy of the second source was clean.
    let theirs = before[&format!("{}/second", targets[0])].1.as_object().unwrap().keys();
    let clean: serde_json::Map<String, Value> = theirs.map(|key| (key.clone(), Value::Null)).collect();
    cluster.merge(&secret(&targets[0], "second"), &json!({"metadata": {"annotations": clean}})).await;

    let _mirror = cluster.start_controller().await;
    let done = migrated(&admin, &apply).await;
    assert!(done.contains("was begun before: going on with it"), "{done}");
    assert!(done.contains("2 sources and 2 copies belong to Lockstep now"), "{done}");
    for (place, (labels, _, uid)) in metadata(&cluster, &all).await {
        assert_eq!(uid, before[&place].2);
        let key = if place.starts_with(&home) { "managed" } else { "companion" };
        assert_eq!(labels[cluster.key(key)], "true", "{place}");
    }
    assert_eq!(accepted().await, Value::Null);

    // A copy that Lockstep creates afterwards stays, too, and is named.
    cluster.merge(&secret(&home, "first"), &json!({"metadata": {"annotations": {
        cluster.key("target-namespaces"): format!("{},{}", targets[0], cluster.namespace("later").await),
    }}})).await;
    let later = secret(&cluster.ns("later"), "first");
    let created = eventually("a copy in another namespace", || async { cluster.get(&later).await }).await;
    let undone = migrated(&admin, &["--undo", text(&undo)]).await;
    assert!(
        undone.contains(&format!("note: secret/{}/first was created by Lockstep", cluster.ns("later"))),
        "{undone}"
    );
    assert!(metadata(&cluster, &all).await == before);
    let left = cluster.get(&later).await.expect("the copy");
    assert_eq!(
        (&left["metadata"]["uid"], &left["data"]["key"]),
        (&created["metadata"]["uid"], &json!(VALUE))
    );
    assert_eq!(left["metadata"]["labels"][cluster.key("companion")], Value::Null);
}

#[tokio::test]
async fn what_the_person_may_not_do_is_said_before_anything_is_written() {
    let cluster = Cluster::new("norights").await;
    let (_installed, _lockstep) = cluster.install_and_start(&[]).await;
    let home = cluster.namespace("home").await;
    let targets = vec![cluster.namespace("t0").await];
    replicator_push(&cluster, (&home, "first"), &targets[0], &targets).await;
    let all = [std::slice::from_ref(&home), &targets[..]].concat();
    let before = metadata(&cluster, &all).await;
    let (domain, only) = (cluster.domain(), format!("{home}/*"));
    let undo = scratch(&cluster).join("undo.json");
    let plan = ["--from", "replicator", "--domain", &domain, "--only", &only];
    let apply = [&plan[..], &["--apply", "--undo-file", text(&undo)]].concat();

    let blind = cluster.editor("blind", &[], &[&home]).await;
    let error = refused(&blind, &plan).await;
    assert!(
        error.contains("namespaces cannot be listed in all namespaces") && error.contains("the verb list"),
        "{error}"
    );

    let reader = cluster.editor("reader", &[], &[&home]).await;
    let read = |groups: Value, resources: Value| json!({"apiGroups": groups, "resources": resources, "verbs": ["get", "list"]});
    let rules = json!([
        read(json!([""]), json!(["namespaces", "secrets", "configmaps", "pods"])),
        read(json!(["apps"]), json!(["deployments"])),
        read(json!(["batch"]), json!(["cronjobs"])),
    ]);
    cluster.grant(&format!("{}-all", reader.name), &reader.subject(), None, rules).await;
    let shown = migrated(&reader, &plan).await;
    assert!(shown.contains("--apply would be refused:"), "{shown}");
    let error = refused(&reader, &apply).await;
    for part in [
        "nothing was written".to_owned(),
        format!("namespace {} cannot be patched", targets[0]),
        format!("secret/{}/first cannot be patched", targets[0]),
        format!("secret/{home}/first cannot be patched"),
    ] {
        assert!(error.contains(&part), "{part}: {error}");
    }
    assert!(metadata(&cluster, &all).await == before && !undo.exists());

    // With rights on the Secrets and on the Namespace, and no others, it works.
    let patch = json!({"apiGroups": [""], "resources": ["namespaces"], "verbs": ["patch"], "resourceNames": [targets[0]]});
    cluster.grant(&format!("{}-ns", reader.name), &reader.subject(), None, json!([patch])).await;
    cluster.grant(&reader.name, &reader.subject(), Some(&targets[0]), json!([all_verbs()])).await;
    // The webhook remembers for seconds that somebody lacks a right.
    eventually("the rights count", || async {
        (!migrated(&reader, &plan).await.contains("--apply would be refused")).then_some(())
    })
    .await;
    migrated(&reader, &apply).await;
    assert_eq!(
        metadata(&cluster, &all).await[&format!("{}/first", targets[0])].2,
        before[&format!("{}/first", targets[0])].2
    );
}

#[tokio::test]
async fn every_command_of_the_page_prints_what_it_says_and_a_running_tool_is_refused() {
    let Some(plane) = dedicated_control_plane(&[]) else { return };
    let cluster = Cluster::on(plane, "migrating").await.with_domain("workshop.io");
    let (_installed, _lockstep) = cluster.install_and_start(&[]).await;
    for name in ["platform", "team-a", "team-b"] {
        cluster.post("/api/v1/namespaces", &json!({"metadata": {"name": name}})).await;
    }
    let teams = ["team-a".to_owned(), "team-b".to_owned()];
    replicator_push(&cluster, ("platform", "registry"), "team-.*", &teams).await;
    replicator_pull(&cluster, ("platform", "database"), "team-.*", &teams[..1]).await;
    replicator_push(&cluster, ("platform", "license"), "app-[0-9]+", &[]).await;
    let admin = cluster.admin();
    admin.succeeds(
        "create deployment kubernetes-replicator -n kube-system --image=quay.io/mittwald/kubernetes-replicator:v2.12.4",
    );
    let uids = metadata(&cluster, &teams).await;
    let error = refused(&admin, &["--from", "replicator", "--apply"]).await;
    assert!(error.contains("kubernetes-replicator runs") && error.contains("--replicas=0"), "{error}");

    let dir = scratch(&cluster);
    let bin = Path::new(env!("CARGO_BIN_EXE_lockstep")).parent().expect("a directory");
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("docs/migrating.md");
    let steps = steps(&std::fs::read_to_string(page).expect("the page"));
    assert!(steps.len() >= 5, "{} commands: has the format of the page changed?", steps.len());
    for Step { command, output } in steps {
        let line = format!("cd {} && PATH={}:$PATH && {command}", dir.display(), bin.display());
        assert_eq!(printed(&admin, &line).trim_end(), output.trim_end(), "{command}");
        if command.contains("scale deployment") {
            controlplane::poll(LARGE_DEADLINE, || async {
                let pods = cluster.get("/api/v1/namespaces/kube-system/pods").await?;
                pods["items"].as_array().is_some_and(Vec::is_empty).then_some(())
            })
            .await
            .expect("the pods of the tool end");
        }
    }
    for (place, (_, _, uid)) in metadata(&cluster, &teams).await {
        assert_eq!(uid, uids[&place].2, "{place}");
    }
}
