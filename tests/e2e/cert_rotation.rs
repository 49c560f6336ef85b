//! No request fails while certificates rotate and replicas restart.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicU64, Ordering},
};

use crate::{
    harness::{Cluster, Lockstep, configmap, eventually, secret},
    tcp_proxy::TcpProxy,
};
use serde_json::{Value, json};

/// The phase of a rotation, by the keys of the CA Secret.
fn phase(secret: &Value) -> &'static str {
    let has = |key: &str| !secret["data"][key].is_null();
    match (has("next.crt"), has("old.crt")) {
        (true, _) => "next",
        (false, true) => "old",
        (false, false) => "stable",
    }
}

#[tokio::test]
async fn no_request_fails_while_certificates_rotate_and_replicas_restart_in_every_phase() {
    let cluster = Arc::new(Cluster::new("rotate").await);
    let ip = cluster.address.split(':').next().unwrap();
    let replicas = [format!("{ip}:9444"), format!("{ip}:9445")];
    let service = TcpProxy::start(&cluster.address, &replicas).await;
    let _installed = cluster.install(&["--webhook-url", &cluster.url()]);
    let kubeconfig = cluster.plane.service_account("lockstep-system", "lockstep").expect("a kubeconfig");
    let spawn = |replica: usize| {
        let flags = ["--webhook-bind", &replicas[replica], "--ca-validity", "36s", "--leaf-validity", "8s"];
        Lockstep::spawn(&cluster.domain(), &kubeconfig, &[&flags[..], &["--drain", "500ms"]].concat())
    };

    // Started together, both use one CA.
    let mut running = [spawn(0), spawn(1)];
    for (replica, lockstep) in running.iter_mut().enumerate() {
        lockstep.wait_ready().await;
        service.set_ready(replica, true);
    }
    cluster.wait_webhook().await;
    let home = cluster.namespace("home").await;
    cluster.source(&home, "colors").create().await;
    cluster.wait_data(&home, "colors-synced", json!({"sky": "blue"})).await;

    let (stop, answered) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let streams: Vec<_> = (0..4)
        .map(|_| {
            let (cluster, stop, answered) = (cluster.clone(), stop.clone(), answered.clone());
            let path = format!("{}?dryRun=All", configmap(&home, "colors-synced"));
            tokio::spawn(async move {
                let edit = json!({"data": {"sky": "mine"}});
                while !stop.load(Ordering::SeqCst) {
                    let body = Some(("application/merge-patch+json", &edit));
                    // The guard refuses the edit; any other answer is a failed request.
                    assert_eq!(cluster.try_request("PATCH", &path, body).await, Err(403));
                    answered.fetch_add(1, Ordering::SeqCst);
                    tokio::time::sleep(std::time::Duration::from_millis(10)).await;
                }
            })
        })
        .collect();

    let ca = secret("lockstep-system", &format!("lockstep.{}", cluster.domain()));
    let first = cluster.get(&ca).await.expect("the CA Secret")["data"]["ca.crt"].clone();
    for wanted in ["stable", "next", "old"] {
        eventually(&format!("the rotation is in phase {wanted}"), || async {
            (phase(&cluster.get(&ca).await?) == wanted).then_some(())
        })
        .await;
        service.set_ready(1, false);
        assert!(running[1].stop().await.success());
        running[1] = spawn(1);
        running[1].wait_ready().await;
        service.set_ready(1, true);
    }
    eventually("the rotation has ended", || async {
        let secret = cluster.get(&ca).await?;
        (phase(&secret) == "stable" && secret["data"]["ca.crt"] != first).then_some(())
    })
    .await;
    assert!(streams.iter().all(|stream| !stream.is_finished()), "a stream has ended: its panic is above");
    stop.store(true, Ordering::SeqCst);
    for stream in streams {
        stream.await.expect("every request was answered");
    }
    println!("{} requests answered", answered.load(Ordering::SeqCst));
    assert!(answered.load(Ordering::SeqCst) > 100);
    let rotations = "lockstep_certificate_rotations_total{certificate=\"leaf\"}";
    assert!(running[0].metric(rotations) >= 2.0, "{}", running[0].metrics());
}
