//! No request fails while certificates rotate and replicas restart.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use k8s_openapi::ByteString;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::{
    harness::{Cluster, InstalledManifests, Lockstep, configmap, eventually, secret, within},
    tcp_proxy::TcpProxy,
};
use lockstep_core::certs::issue::Certificate;

/// Certificates rotate by the clock, those of these tests within this.
const ROTATION: Duration = Duration::from_secs(90);

/// The phase of a rotation, by the keys of the CA Secret.
fn phase(secret: &Value) -> &'static str {
    let has = |key: &str| !secret["data"][key].is_null();
    match (has("next.crt"), has("old.crt")) {
        (true, _) => "next",
        (false, true) => "old",
        (false, false) => "stable",
    }
}

/// Two replicas behind a proxy, and a source with a companion.
struct Scene {
    cluster: Arc<Cluster>,
    replicas: [String; 2],
    flags: &'static [&'static str],
    service: Arc<TcpProxy>,
    running: [Lockstep; 2],
    requests: Requests,
    _installed: InstalledManifests,
}

impl Scene {
    /// Starts both together, so that they have to agree on one CA.
    async fn set(test: &str, flags: &'static [&'static str]) -> Self {
        let cluster = Arc::new(Cluster::new(test).await);
        let (ip, port) = cluster.address.split_once(':').expect("an address with a port");
        let port: u16 = port.parse().expect("a port");
        // On an existing cluster all tests share one address, with ports from 10,000 to 19,999.
        let replicas = [10_000, 20_000].map(|offset| format!("{ip}:{}", port + offset));
        let service = TcpProxy::start(&cluster.address, &replicas).await;
        let installed = cluster.install(&["--webhook-url", &cluster.url()]);
        let mut running = [0, 1].map(|n| spawn(&cluster, &replicas[n], flags));
        for (replica, lockstep) in running.iter_mut().enumerate() {
            lockstep.wait_ready().await;
            service.set_ready(replica, true);
        }
        cluster.wait_webhook().await;
        let home = cluster.namespace("home").await;
        cluster.source(&home, "colors").create().await;
        cluster.wait_data(&home, "colors-synced", json!({"sky": "blue"})).await;
        let requests = Requests::start(&cluster, &home);
        Self { cluster, replicas, flags, service, running, requests, _installed: installed }
    }

    /// Stops a replica as a rollout does, and starts another in its place.
    async fn restart(&mut self, replica: usize) {
        self.service.set_ready(replica, false);
        assert!(self.running[replica].stop().await.success());
        self.running[replica] = spawn(&self.cluster, &self.replicas[replica], self.flags);
        self.running[replica].wait_ready().await;
        self.service.set_ready(replica, true);
    }

    fn secret_path(&self) -> String {
        secret("lockstep-system", &format!("lockstep.{}", self.cluster.domain()))
    }

    /// The data of the CA Secret.
    async fn ca(&self) -> Value {
        self.cluster.get(&self.secret_path()).await.expect("the CA Secret")["data"].clone()
    }
}

fn spawn(cluster: &Cluster, address: &str, flags: &[&str]) -> Lockstep {
    let kubeconfig = cluster.plane.service_account("lockstep-system", "lockstep").expect("a kubeconfig");
    let all = [&["--webhook-bind", address, "--drain", "500ms"], flags].concat();
    Lockstep::spawn(&cluster.domain(), &kubeconfig, &all)
}

/// Requests that the webhook must answer, one after the other in several streams.
struct Requests {
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicU64>,
    streams: Vec<JoinHandle<()>>,
}

impl Requests {
    fn start(cluster: &Arc<Cluster>, home: &str) -> Self {
        let (stop, answered) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let stream = |_| {
            let (cluster, stop, answered) = (cluster.clone(), stop.clone(), answered.clone());
            let path = format!("{}?dryRun=All", configmap(home, "colors-synced"));
            tokio::spawn(async move {
                let edit = json!({"data": {"sky": "mine"}});
                while !stop.load(Ordering::SeqCst) {
                    let body = Some(("application/merge-patch+json", &edit));
                    // The webhook refuses the edit; any other answer is a failed request.
                    assert_eq!(cluster.try_request("PATCH", &path, body).await, Err(403));
                    answered.fetch_add(1, Ordering::SeqCst);
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            })
        };
        let streams = (0..4).map(stream).collect();
        Self { stop, answered, streams }
    }

    /// Ends the streams. Every request must have been answered.
    async fn all_answered(&mut self) {
        let ended = self.streams.iter().any(JoinHandle::is_finished);
        assert!(!ended, "a stream has ended: its panic is above");
        self.stop.store(true, Ordering::SeqCst);
        for stream in self.streams.drain(..) {
            stream.await.expect("every request was answered");
        }
        println!("{} requests answered", self.answered.load(Ordering::SeqCst));
        assert!(self.answered.load(Ordering::SeqCst) > 100);
    }
}

#[tokio::test]
async fn no_request_fails_while_certificates_rotate_and_replicas_restart_in_every_phase() {
    let flags = &["--ca-validity", "36s", "--leaf-validity", "8s"];
    let mut scene = Scene::set("rotate", flags).await;
    let (cluster, ca) = (scene.cluster.clone(), scene.secret_path());
    let first = scene.ca().await["ca.crt"].clone();
    for wanted in ["stable", "next", "old"] {
        let what = format!("the rotation is in phase {wanted}");
        let in_phase =
            eventually(&what, || async { (phase(&cluster.get(&ca).await?) == wanted).then_some(()) });
        within(ROTATION, in_phase).await;
        scene.restart(1).await;
    }
    let ended = eventually("the rotation has ended", || async {
        let secret = cluster.get(&ca).await?;
        (phase(&secret) == "stable" && secret["data"]["ca.crt"] != first).then_some(())
    });
    within(ROTATION, ended).await;
    scene.requests.all_answered().await;
    let rotations = "lockstep_certificate_rotations_total{certificate=\"leaf\"}";
    assert!(scene.running[0].metric(rotations) >= 2.0, "{}", scene.running[0].metrics());
}

/// A leak: the person may do nothing but patch the Lease and get the webhook configurations, and the leader changes in
/// the middle.
#[tokio::test]
async fn requested_rotation_changes_the_key_and_makes_the_old_one_worthless_without_a_failed_request() {
    // Leaves would be valid for an hour: the old CA is not trusted for that long.
    let flags = &["--ca-validity", "48s", "--leaf-validity", "1h", "--lease-duration", "6s"];
    let mut scene = Scene::set("leak", flags).await;
    let cluster = scene.cluster.clone();
    let instance = format!("lockstep.{}", cluster.domain());
    let person = cluster.user("person", &[]);
    let rule = json!({
        "apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "resourceNames": [instance], "verbs": ["patch"],
    });
    cluster.grant(&person.name, &person.subject(), Some("lockstep-system"), json!([rule])).await;
    let rotate = ["certs", "rotate", "--domain", &cluster.domain()];
    let refused = person.lockstep(&rotate).output().expect("lockstep");
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && said.contains("ask for the verb get"), "{said}");
    let rule = json!({
        "apiGroups": ["admissionregistration.k8s.io"], "resourceNames": [instance], "verbs": ["get"],
        "resources": ["validatingwebhookconfigurations", "mutatingwebhookconfigurations"],
    });
    cluster.grant(&person.name, &person.subject(), None, json!([rule])).await;
    let leaked = scene.ca().await;

    let mut rotate = person.lockstep(&rotate);
    let rotate = tokio::task::spawn_blocking(move || rotate.output().expect("lockstep"));
    let path = scene.secret_path();
    let signs = eventually("another CA signs", || async {
        let data = cluster.get(&path).await?["data"].clone();
        (data["ca.crt"] != leaked["ca.crt"]).then_some(())
    });
    within(ROTATION, signs).await;
    let leader = if scene.running[0].metric("lockstep_leader") == 1.0 { 0 } else { 1 };
    scene.restart(leader).await;
    let output = rotate.await.expect("the command ends");
    let (said, error) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}{error}");
    assert!(said.lines().last().is_some_and(|line| line.contains("the old key is worthless")), "{said}");
    assert!(said.contains("published beside the old one"), "{said}");

    scene.requests.all_answered().await;
    let old = Certificate::parse_all(&decoded(&leaked["ca.crt"])).expect("the leaked CA").remove(0);
    for kind in ["validating", "mutating"] {
        let collection = format!("/apis/admissionregistration.k8s.io/v1/{kind}webhookconfigurations");
        let object = cluster.get(&format!("{collection}/{instance}")).await.expect("a configuration");
        for webhook in object["webhooks"].as_array().expect("webhooks") {
            let trusted = Certificate::parse_all(&decoded(&webhook["clientConfig"]["caBundle"])).unwrap();
            assert!(!trusted.is_empty() && !trusted.contains(&old), "{kind}: {trusted:?}");
        }
    }
    let after = scene.ca().await;
    for key in ["ca.key", "next.key"] {
        assert_ne!(after[key], leaked["ca.key"], "{key} is the leaked one");
    }
    // An accident brings back the new key, and a backup of the Secret does not bring back the leaked one.
    cluster.delete(&scene.secret_path()).await;
    eventually("the Secret is back", || async { cluster.get(&path).await }).await;
    cluster.merge(&path, &json!({"data": leaked})).await;
    eventually("the leaked key is gone", || async {
        let data = cluster.get(&path).await?["data"].clone();
        (data["ca.key"] != leaked["ca.key"]).then_some(())
    })
    .await;

    let missing = person.lockstep(&["certs", "rotate", "--domain", "nobody.example"]).output().unwrap();
    let said = String::from_utf8_lossy(&missing.stderr).into_owned();
    assert!(!missing.status.success() && said.contains("ask for the verb patch"), "{said}");
}

fn decoded(value: &Value) -> Vec<u8> {
    serde_json::from_value::<ByteString>(value.clone()).expect("base64").0
}
