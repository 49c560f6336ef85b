//! Watches survive an outage of the API server or etcd, a server without streaming lists, and a silent connection.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use serde_json::json;

use crate::harness::{Cluster, OUTAGE, client_for, configmap, dedicated_control_plane, eventually, within};
use lockstep_cluster::watch::{self, Event, Restores, WatchSpec};
use lockstep_core::object::Object;

#[tokio::test]
async fn changes_during_an_outage_of_the_api_server_or_etcd_are_mirrored_afterwards() {
    let Some(plane) = dedicated_control_plane(&[]) else { return };
    let cluster = Cluster::on(plane, "outage").await;
    let lockstep = cluster.start_controller().await;
    let (home, away) = (cluster.namespace("home").await, cluster.namespace("away").await);
    cluster.source(&home, "colors").annotate("target-namespaces", &away).create().await;
    cluster.wait_data(&away, "colors-synced", json!({"sky": "blue"})).await;

    for etcd in [false, true] {
        let logged = lockstep.log().len();
        plane.apiserver().unwrap().kill().unwrap();
        if etcd {
            plane.etcd().unwrap().kill().unwrap();
            plane.etcd().unwrap().restart().unwrap();
        }
        lockstep.wait_log_after(logged, "check that the API server is up").await;
        lockstep.pause();
        plane.apiserver().unwrap().restart().unwrap();
        plane.wait_ready().unwrap();
        // Lockstep is paused, so these changes happen before it reconnects.
        let color = if etcd { "green" } else { "red" };
        cluster.merge(&configmap(&home, "colors"), &json!({"data": {"sky": color}})).await;
        cluster.delete(&configmap(&away, "colors-synced")).await;
        lockstep.resume();
        cluster.wait_data(&away, "colors-synced", json!({"sky": color})).await;
    }
}

#[tokio::test]
async fn source_created_as_soon_as_a_restarted_api_server_is_ready_is_mirrored_at_once() {
    let Some(plane) = dedicated_control_plane(&[]) else { return };
    let cluster = Cluster::on(plane, "restart").await;
    let lockstep = cluster.start_controller().await;
    let home = cluster.namespace("home").await;
    cluster.source(&home, "before").create().await;
    cluster.wait_data(&home, "before-synced", json!({"sky": "blue"})).await;
    let logged = lockstep.log().len();
    plane.apiserver().unwrap().kill().unwrap();
    // Long enough for a backoff that grows to ten seconds.
    let lasts = eventually("the outage lasts", || async {
        (lockstep.metric("lockstep_watch_age_seconds{watch=\"namespaces\"}") > 15.0).then_some(())
    });
    within(OUTAGE, lasts).await;
    plane.apiserver().unwrap().restart().unwrap();
    plane.wait_ready().unwrap();
    let ready = Instant::now();
    cluster.source(&home, "after").create().await;
    cluster.wait_data(&home, "after-synced", json!({"sky": "blue"})).await;
    let mirrored = ready.elapsed();
    println!("mirrored {mirrored:?} after the API server was ready");
    // The restarted server remembers no event of before, so every watch is listed again.
    assert!(lockstep.log()[logged..].contains("the resourceVersion has expired"));
    assert!(mirrored < Duration::from_secs(5), "{mirrored:?}");
}

#[tokio::test]
async fn server_without_streaming_lists_is_listed_in_pages() {
    let Some(plane) = dedicated_control_plane(&["--feature-gates=WatchList=false"]) else { return };
    let cluster = Cluster::on(plane, "pages").await;
    let home = cluster.namespace("home").await;
    cluster.source(&home, "early").create().await;
    let lockstep = cluster.start_controller().await;
    lockstep.wait_log("listing in pages").await;
    cluster.wait_data(&home, "early-synced", json!({"sky": "blue"})).await;
    cluster.source(&home, "late").create().await;
    cluster.wait_data(&home, "late-synced", json!({"sky": "blue"})).await;
}

#[tokio::test]
async fn silent_watch_is_detected_and_restarted() {
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
        watch::run_with_stall_timeout(client, subject, Restores::default(), Duration::from_secs(2), sink)
            .await
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
    eventually("the watch restarts", || async { (lists.load(Ordering::SeqCst) > before).then_some(()) })
        .await;
    assert!(!names.lock().unwrap().iter().any(|name| name == "meanwhile"));
    proxy.resume();
    sees("meanwhile").await;
}
