//! Several replicas, of which one writes: by release, by crash, by pause, and cut off from the API server.

use std::{path::PathBuf, time::Instant};

use serde_json::{Value, json};

use crate::harness::{Cluster, InstalledManifests, Lockstep, configmap, eventually};

/// In seconds. Short, so that a crash is over soon; the default is 15.
const LEASE: u64 = 4;

/// Replicas without a guard, and a source `colors` in `home`.
struct Scene {
    cluster: Cluster,
    home: String,
    replicas: Vec<Lockstep>,
    _installed: InstalledManifests,
}

impl Scene {
    async fn with(test: &str, replicas: usize) -> Self {
        let cluster = Cluster::new(test).await;
        // Only for the rights by this instance's name: without a guard, nobody may be asked.
        let _installed = cluster.install(&["--webhook-url", &cluster.url()]);
        for kind in ["validating", "mutating"] {
            cluster
                .admin()
                .succeeds(&format!("delete {kind}webhookconfiguration lockstep.{}", cluster.domain()));
        }
        let home = cluster.namespace("home").await;
        let mut scene = Self { cluster, home, replicas: Vec::new(), _installed };
        for _ in 0..replicas {
            let kubeconfig = scene.identity();
            scene.add(&kubeconfig).await;
        }
        scene
    }

    fn identity(&self) -> PathBuf {
        self.cluster.plane.service_account("lockstep-system", "lockstep").expect("a kubeconfig")
    }

    async fn add(&mut self, kubeconfig: &std::path::Path) {
        let lease = format!("{LEASE}s");
        let flags = ["--no-webhook", "--lease-duration", &lease];
        let mut replica = Lockstep::spawn(&self.cluster.domain(), kubeconfig, &flags);
        replica.wait_ready().await;
        self.replicas.push(replica);
    }

    /// Waits until one of the replicas leads, and says which.
    async fn leader(&self, among: &[usize]) -> usize {
        eventually("one of the replicas leads", || async {
            among.iter().copied().find(|replica| self.replicas[*replica].metric("lockstep_leader") == 1.0)
        })
        .await
    }

    async fn source(&self) {
        self.cluster.source(&self.home, "colors").create().await;
        self.follows("blue").await;
    }

    async fn change(&self, colour: &str) {
        self.cluster.merge(&configmap(&self.home, "colors"), &json!({"data": {"sky": colour}})).await;
    }

    async fn follows(&self, colour: &str) -> Value {
        self.cluster.wait_data(&self.home, "colors-synced", json!({"sky": colour})).await
    }

    /// The companion's writes that went through: a create, and one patch for each of these changes.
    async fn wrote_once_for_each(&self, changes: usize) {
        let Some(_) = self.cluster.plane.audit_log().ok() else { return };
        // Whatever else was about to be written for an earlier change was written before this one, or can be no more.
        self.change("last").await;
        self.follows("last").await;
        let writes = || {
            let audit = self.cluster.audit(&self.home).into_iter().map(|(verb, _, code)| (verb, code));
            let written = |(verb, code): &(String, u64)| {
                matches!(verb.as_str(), "create" | "patch" | "delete") && *code < 300
            };
            audit.filter(written).map(|(verb, _)| verb).collect::<Vec<_>>()
        };
        let done = eventually("the last write is in the audit log", || async {
            Some(writes()).filter(|done| done.len() >= changes + 2)
        })
        .await;
        assert_eq!(done[0], "create");
        assert_eq!(done[1..], vec!["patch"; changes + 1], "{done:?}");
    }

    fn lease_path(&self) -> String {
        let name = format!("lockstep.{}", self.cluster.domain());
        format!("/apis/coordination.k8s.io/v1/namespaces/lockstep-system/leases/{name}")
    }

    async fn lease(&self) -> Value {
        self.cluster.get(&self.lease_path()).await.expect("the Lease")
    }
}

#[tokio::test]
async fn one_of_three_replicas_writes_and_another_takes_over_at_once_when_it_stops() {
    let mut scene = Scene::with("three", 3).await;
    scene.source().await;
    let mut left: Vec<usize> = (0..3).collect();
    for colour in ["red", "green"] {
        let leader = scene.leader(&left).await;
        assert_eq!(left.iter().filter(|at| scene.replicas[**at].metric("lockstep_leader") == 1.0).count(), 1);
        assert!(scene.replicas[leader].stop().await.success());
        let released = Instant::now();
        left.retain(|replica| *replica != leader);
        scene.leader(&left).await;
        scene.change(colour).await;
        scene.follows(colour).await;
        println!("a released Lease was taken over, and a change followed, after {:?}", released.elapsed());
    }
    scene.wrote_once_for_each(2).await;
    let leader = scene.leader(&left).await;
    assert!(scene.replicas[leader].stop().await.success());
    assert!(scene.replicas[leader].log().contains("released the Lease"), "it was too slow");
    assert_eq!(scene.lease().await["spec"]["holderIdentity"], "");
}

#[tokio::test]
async fn when_the_leader_is_killed_another_takes_over_when_the_lease_has_run_out() {
    let scene = Scene::with("killed", 2).await;
    scene.source().await;
    let leader = scene.leader(&[0, 1]).await;
    scene.replicas[leader].kill();
    let killed = Instant::now();
    scene.change("red").await;
    scene.follows("red").await;
    println!("a Lease of {LEASE} s was taken over {:?} after its holder was killed", killed.elapsed());
    assert_eq!(scene.leader(&[1 - leader]).await, 1 - leader);
    scene.wrote_once_for_each(1).await;
}

#[tokio::test]
async fn a_leader_that_was_paused_past_its_lease_writes_no_more_when_it_wakes() {
    let scene = Scene::with("paused", 2).await;
    scene.source().await;
    let leader = scene.leader(&[0, 1]).await;
    let taken = scene.cluster.namespace("taken").await;
    let squatter = json!({"metadata": {"name": "colors-synced"}});
    scene.cluster.post(&format!("/api/v1/namespaces/{taken}/configmaps"), &squatter).await;
    scene.cluster.source(&taken, "colors").create().await;
    scene.replicas[leader].wait_metric("lockstep_conflicts", 1.0).await;
    // In the middle of its work: it has been told of the change, and may be about to write.
    scene.change("red").await;
    scene.replicas[leader].pause();
    scene.leader(&[1 - leader]).await;
    scene.follows("red").await;
    scene.change("green").await;
    scene.follows("green").await;
    scene.replicas[leader].resume();
    scene.replicas[leader].wait_metric("lockstep_leader", 0.0).await;
    // What stands in the way is the other's to say now.
    scene.replicas[leader].wait_metric("lockstep_conflicts", 0.0).await;
    scene.replicas[1 - leader].wait_metric("lockstep_conflicts", 1.0).await;
    assert_eq!(scene.leader(&[0, 1]).await, 1 - leader);
    scene.wrote_once_for_each(2).await;
}

#[tokio::test]
async fn a_leader_that_is_cut_off_from_the_api_server_gives_up_by_itself() {
    let mut scene = Scene::with("cutoff", 0).await;
    let Some((proxy, through)) = scene.cluster.api_server_proxy().await else { return };
    scene.add(&through).await;
    scene.source().await;
    assert_eq!(scene.leader(&[0]).await, 0);
    let direct = scene.identity();
    scene.add(&direct).await;
    proxy.stall();
    scene.change("red").await;
    scene.replicas[0].wait_metric("lockstep_leader", 0.0).await;
    scene.replicas[0].wait_log("the Lease was not renewed in time").await;
    assert_eq!(scene.leader(&[1]).await, 1);
    scene.follows("red").await;
    // The line is back: it stands by.
    proxy.resume();
    scene.change("green").await;
    scene.follows("green").await;
    scene.replicas[0].wait_log("another replica leads now").await;
    scene.wrote_once_for_each(2).await;
}

#[tokio::test]
async fn a_lease_that_is_deleted_stays_its_holders() {
    let scene = Scene::with("deleted", 2).await;
    scene.source().await;
    let leader = scene.leader(&[0, 1]).await;
    let holder = |lease: &Value| lease["spec"]["holderIdentity"].clone();
    let before = scene.lease().await;
    let path = scene.lease_path();
    scene.cluster.delete(&path).await;
    let after = eventually("the Lease is back", || scene.cluster.get(&path)).await;
    assert_eq!(holder(&after), holder(&before));
    scene.change("red").await;
    scene.follows("red").await;
    assert_eq!(scene.replicas[leader].metric("lockstep_leader"), 1.0);
    assert_eq!(scene.replicas[1 - leader].metric("lockstep_leader"), 0.0);
}

#[tokio::test]
async fn clocks_that_differ_by_minutes_do_not_matter() {
    for (test, minutes) in [("ahead", 10), ("behind", -10)] {
        let mut scene = Scene::with(test, 0).await;
        let name = format!("lockstep.{}", scene.cluster.domain());
        let leases = "/apis/coordination.k8s.io/v1/namespaces/lockstep-system/leases";
        let renew = |n: i64| {
            let now =
                k8s_openapi::jiff::Timestamp::now() + k8s_openapi::jiff::SignedDuration::from_mins(minutes);
            json!({
                "holderIdentity": "another", "leaseDurationSeconds": LEASE, "leaseTransitions": n,
                "renewTime": format!("{:.6}", now),
            })
        };
        scene.cluster.post(leases, &json!({"metadata": {"name": name}, "spec": renew(0)})).await;
        let kubeconfig = scene.identity();
        scene.add(&kubeconfig).await;
        // For as long as it is renewed, it is the other's, whatever its clock says.
        let mut renewed = Instant::now();
        for n in 1..=6 {
            scene.cluster.merge(&format!("{leases}/{name}"), &json!({"spec": renew(n)})).await;
            tokio::time::sleep(std::time::Duration::from_secs(1)).await;
            let leads = scene.replicas[0].metric("lockstep_leader") == 1.0;
            // A machine that stood still for so long let it run out.
            assert!(!leads || renewed.elapsed().as_secs() >= LEASE, "after {:?}", renewed.elapsed());
            renewed = Instant::now();
        }
        scene.leader(&[0]).await;
    }
}
