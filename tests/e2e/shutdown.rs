//! Starts, stops, rests, and what happens meanwhile.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use lockstep::{
    object::Object,
    watch::{self, Event, WatchSpec},
};
use serde_json::json;

use crate::harness::{Cluster, client_for, configmap, dedicated_control_plane, eventually};

#[tokio::test]
async fn the_process_was_down_meanwhile_and_converges_without_a_needless_write() {
    let cluster = Cluster::new("down").await;
    let mut lockstep = cluster.start_mirror().await;
    let (home, away) = (cluster.namespace("home").await, cluster.namespace("away").await);
    for name in ["right", "changed", "edited", "lost", "gone", "unlabelled"] {
        cluster.source(&home, name).annotate("target-namespaces", &away).create().await;
    }
    for name in ["right", "changed", "edited", "lost", "gone", "unlabelled"] {
        cluster.wait_data(&away, &format!("{name}-synced"), json!({"sky": "blue"})).await;
    }
    assert!(lockstep.stop().await.success());
    let right = cluster.configmap(&away, "right-synced").await.unwrap();
    cluster.merge(&configmap(&home, "changed"), &json!({"data": {"sky": "red"}})).await;
    cluster.merge(&configmap(&away, "edited-synced"), &json!({"data": {"sky": "mine"}})).await;
    cluster.delete(&configmap(&away, "lost-synced")).await;
    cluster.delete(&configmap(&home, "gone")).await;
    let unlabelled = json!({"metadata": {"labels": {cluster.key("managed"): null}}});
    cluster.merge(&configmap(&home, "unlabelled"), &unlabelled).await;
    cluster.source(&home, "new").annotate("target-namespaces", &away).create().await;

    let lockstep = cluster.start_mirror().await;
    cluster.wait_data(&away, "changed-synced", json!({"sky": "red"})).await;
    for name in ["edited", "lost", "new"] {
        cluster.wait_data(&away, &format!("{name}-synced"), json!({"sky": "blue"})).await;
    }
    for name in ["gone", "unlabelled"] {
        cluster.wait_gone(&configmap(&away, &format!("{name}-synced"))).await;
    }
    let now = cluster.configmap(&away, "right-synced").await.unwrap();
    assert_eq!(now["metadata"]["resourceVersion"], right["metadata"]["resourceVersion"]);
    // What it did to get there is what was missing, no more.
    let writes =
        |action: &str| lockstep.metric(&format!("lockstep_companion_writes_total{{action=\"{action}\"}}"));
    eventually("the counts", || async {
        let counts = ["created", "updated", "healed", "deleted"].map(writes);
        (counts == [2.0, 1.0, 1.0, 2.0]).then_some(())
    })
    .await;
}

#[tokio::test]
async fn at_rest_nothing_is_written_and_nothing_is_read() {
    let Some(cluster) = Cluster::audited("rest").await else { return };
    let lockstep = cluster.start_mirror_with(&["--resync", "500ms"]).await;
    let (home, away) = (cluster.namespace("home").await, cluster.namespace("away").await);
    for n in 0..200 {
        cluster
            .source(&home, &format!("s{n}"))
            .annotate("target-namespaces", &format!(".,{away}"))
            .create()
            .await;
    }
    for n in 0..200 {
        cluster.wait_data(&away, &format!("s{n}-synced"), json!({"sky": "blue"})).await;
    }
    // Two whole resyncs after everything came to rest.
    let looks = || lockstep.metric("lockstep_reconcile_duration_seconds_count");
    let events = || lockstep.metric("lockstep_api_calls_total{verb=\"create\",code=\"201\"}");
    eventually("all Events are written", || async { (events() >= 1.0 + 200.0 * 3.0).then_some(()) }).await;
    cluster.audit_of(&away, 200).await;
    cluster.audit_of(&home, 200).await;
    let (audited, calls, seen) = (count(&cluster, &home, &away), events(), looks());
    eventually("two resyncs", || async { (looks() >= seen + 400.0).then_some(()) }).await;
    assert_eq!(count(&cluster, &home, &away), audited, "the API server saw a read or a write");
    assert!((events() - calls).abs() < 0.5, "an Event was written");
    assert_eq!(audited, 400, "one create for each companion, and nothing else");
}

fn count(cluster: &Cluster, home: &str, away: &str) -> usize {
    [home, away].iter().map(|namespace| cluster.audit(namespace).len()).sum()
}

#[tokio::test]
async fn a_stop_finishes_what_is_under_way() {
    let cluster = Cluster::new("stop").await;
    let mut lockstep = cluster.start_mirror_with(&["--writes", "1"]).await;
    let home = cluster.namespace("home").await;
    let mut targets = Vec::new();
    for n in 0..50 {
        targets.push(cluster.namespace(&format!("t{n:02}")).await);
    }
    // When the last namespace is known, all are.
    cluster.source(&home, "beacon").annotate("target-namespaces", &targets[49]).create().await;
    cluster.wait_data(&targets[49], "beacon-synced", json!({"sky": "blue"})).await;
    cluster.source(&home, "colors").annotate("target-namespaces", &targets.join(",")).create().await;
    // One after the other, in order: when the first is there, most are still to come.
    while cluster.configmap(&targets[0], "colors-synced").await.is_none() {
        tokio::task::yield_now().await;
    }
    assert!(lockstep.stop().await.success(), "{}", lockstep.log());
    assert!(lockstep.log().contains("lockstep stops"));
    for namespace in &targets {
        assert!(cluster.configmap(namespace, "colors-synced").await.is_some(), "{namespace}");
    }
    let note = cluster.wait_event(&home, "colors", "Mirrored").await;
    assert!(note.starts_with("created 50: "), "{note}");
}

#[tokio::test]
async fn the_api_server_and_etcd_go_and_come_back() {
    let Some(plane) = dedicated_control_plane("outage", &[]) else { return };
    let cluster = Cluster::on(plane, "outage").await;
    let lockstep = cluster.start_mirror().await;
    let (home, away) = (cluster.namespace("home").await, cluster.namespace("away").await);
    cluster.source(&home, "colors").annotate("target-namespaces", &away).create().await;
    cluster.wait_data(&away, "colors-synced", json!({"sky": "blue"})).await;

    for etcd in [false, true] {
        let told = lockstep.log().len();
        plane.apiserver().unwrap().kill().unwrap();
        if etcd {
            plane.etcd().unwrap().kill().unwrap();
            plane.etcd().unwrap().restart().unwrap();
        }
        lockstep.wait_log_after(told, "the API server cannot be reached").await;
        lockstep.pause();
        plane.apiserver().unwrap().restart().unwrap();
        plane.wait_ready().unwrap();
        // What happens before it is back is seen all the same.
        let color = if etcd { "green" } else { "red" };
        cluster.merge(&configmap(&home, "colors"), &json!({"data": {"sky": color}})).await;
        cluster.delete(&configmap(&away, "colors-synced")).await;
        lockstep.resume();
        cluster.wait_data(&away, "colors-synced", json!({"sky": color})).await;
    }
}

#[tokio::test]
async fn a_server_that_cannot_stream_lists_is_listed_in_pages() {
    let Some(plane) = dedicated_control_plane("pages", &["--feature-gates=WatchList=false"]) else { return };
    let cluster = Cluster::on(plane, "pages").await;
    let home = cluster.namespace("home").await;
    cluster.source(&home, "early").create().await;
    let lockstep = cluster.start_mirror().await;
    lockstep.wait_log("listing in pages").await;
    cluster.wait_data(&home, "early-synced", json!({"sky": "blue"})).await;
    cluster.source(&home, "late").create().await;
    cluster.wait_data(&home, "late-synced", json!({"sky": "blue"})).await;
}

#[tokio::test]
async fn a_watch_that_goes_silent_is_noticed_and_begins_anew() {
    let cluster = Cluster::new("silent").await;
    let Some((proxy, kubeconfig)) = cluster.api_server_proxy().await else { return };
    let home = cluster.namespace("home").await;
    let subject = WatchSpec {
        name: "a test".to_owned(),
        path: format!("/api/v1/namespaces/{home}/configmaps"),
        label_selector: Some(format!("{}=true", cluster.key("managed"))),
        field_selector: None,
    };
    let (lists, names) = (Arc::new(AtomicUsize::new(0)), Arc::new(Mutex::new(Vec::new())));
    let (began, seen) = (lists.clone(), names.clone());
    let sink = move |event: Event<Object>| match event {
        Event::Init => drop(began.fetch_add(1, Ordering::SeqCst)),
        Event::Apply(object) => seen.lock().unwrap().push(object.metadata.name),
        _ => {}
    };
    let client = client_for(&kubeconfig).await;
    tokio::spawn(async move {
        watch::run_with_stall_timeout(client, subject, Duration::from_secs(2), sink).await
    });
    let sees = |name: &'static str| {
        let names = names.clone();
        eventually(name, move || {
            let found = names.lock().unwrap().iter().any(|seen| seen == name).then_some(());
            async move { found }
        })
    };
    cluster.source(&home, "before").create().await;
    sees("before").await;

    let before = lists.load(Ordering::SeqCst);
    proxy.stall();
    cluster.source(&home, "meanwhile").create().await;
    eventually("it begins anew", || async { (lists.load(Ordering::SeqCst) > before).then_some(()) }).await;
    assert!(!names.lock().unwrap().iter().any(|name| name == "meanwhile"));
    proxy.resume();
    sees("meanwhile").await;
}
