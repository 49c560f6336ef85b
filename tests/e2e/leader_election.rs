//! One of several replicas writes. Another takes over when it stops, crashes, is paused or loses the API server.

use std::{path::PathBuf, time::Instant};

use controlplane::skip;
use serde_json::{Value, json};

use crate::harness::{Cluster, InstalledManifests, Lockstep, TAKEOVER, configmap, eventually, within};

/// Shorter than the default of 15, so that a takeover after a crash is quick.
const LEASE_SECONDS: u64 = 4;
/// Longer than a test waits: only a Lease that was released is taken over in time.
const LONG_LEASE_SECONDS: u64 = 60;

/// Replicas without a webhook, and a source `colors` in `home`.
struct Setup {
    cluster: Cluster,
    home: String,
    lease_seconds: u64,
    replicas: Vec<Lockstep>,
    _installed: InstalledManifests,
}

impl Setup {
    async fn with_replicas(test: &str, replicas: usize) -> Self {
        Self::with_lease(test, replicas, LEASE_SECONDS).await
    }

    async fn with_lease(test: &str, replicas: usize, lease_seconds: u64) -> Self {
        let cluster = Cluster::new(test).await;
        // Only the RBAC for this instance's Lease is needed; without a webhook the webhooks have to go.
        let _installed = cluster.install(&["--webhook-url", &cluster.url()]);
        for kind in ["validating", "mutating"] {
            cluster
                .admin()
                .succeeds(&format!("delete {kind}webhookconfiguration lockstep.{}", cluster.domain()));
        }
        let home = cluster.namespace("home").await;
        let mut setup = Self { cluster, home, lease_seconds, replicas: Vec::new(), _installed };
        for _ in 0..replicas {
            let kubeconfig = setup.kubeconfig();
            setup.add_replica(&kubeconfig).await;
        }
        setup
    }

    fn kubeconfig(&self) -> PathBuf {
        self.cluster.plane.service_account("lockstep-system", "lockstep").expect("a kubeconfig")
    }

    async fn add_replica(&mut self, kubeconfig: &std::path::Path) {
        let lease = format!("{}s", self.lease_seconds);
        let flags = ["--no-webhook", "--lease-duration", &lease];
        let mut replica = Lockstep::spawn(&self.cluster.domain(), kubeconfig, &flags);
        replica.wait_ready().await;
        self.replicas.push(replica);
    }

    /// Waits until one of these replicas leads, and returns which.
    async fn wait_leader(&self, among: &[usize]) -> usize {
        eventually("one of the replicas leads", || async {
            among.iter().copied().find(|replica| self.replicas[*replica].metric("lockstep_leader") == 1.0)
        })
        .await
    }

    async fn create_source(&self) {
        self.cluster.source(&self.home, "colors").create().await;
        self.wait_companion("blue").await;
    }

    async fn change_source(&self, colour: &str) {
        self.cluster.merge(&configmap(&self.home, "colors"), &json!({"data": {"sky": colour}})).await;
    }

    async fn wait_companion(&self, colour: &str) -> Value {
        self.cluster.wait_data(&self.home, "colors-synced", json!({"sky": colour})).await
    }

    /// Asserts that the companion got a create and one patch for each change, whichever replica wrote it.
    async fn assert_one_write_per_change(&self, changes: usize) {
        if self.cluster.plane.is_existing() {
            return skip("in part: it reads the audit log, and LOCKSTEP_TEST_KUBECONFIG is set");
        }
        // A late write for an earlier change happens before this one, or fails on its resourceVersion.
        self.change_source("last").await;
        self.wait_companion("last").await;
        let written = |(verb, _, code): &(String, String, u64)| {
            matches!(verb.as_str(), "create" | "patch" | "delete") && *code < 300
        };
        let expected = 1 + changes + 1;
        eventually("the last write is audited", || async {
            let audited = self.cluster.audit(&self.home).into_iter().filter(written).count();
            (audited >= expected).then_some(())
        })
        .await;
        let audit = self.cluster.complete_audit(&self.home).await.into_iter();
        let done: Vec<String> = audit.filter(written).map(|(verb, ..)| verb).collect();
        assert_eq!(done[0], "create");
        assert_eq!(done[1..], vec!["patch"; expected - 1], "{done:?}");
    }

    fn lease_path(&self) -> String {
        let name = format!("lockstep.{}", self.cluster.domain());
        format!("/apis/coordination.k8s.io/v1/namespaces/lockstep-system/leases/{name}")
    }

    async fn lease(&self) -> Value {
        self.cluster.get(&self.lease_path()).await.expect("the Lease")
    }

    async fn wait_lease(&self, what: &str, matches: impl Fn(&Value) -> bool) -> Value {
        eventually(&format!("the Lease: {what}"), || async { Some(self.lease().await).filter(&matches) })
            .await
    }
}

#[tokio::test]
async fn one_of_three_replicas_writes_and_another_takes_over_at_once_when_it_stops() {
    let mut setup = Setup::with_lease("three", 3, LONG_LEASE_SECONDS).await;
    setup.create_source().await;
    let mut left: Vec<usize> = (0..3).collect();
    for colour in ["red", "green"] {
        let leader = setup.wait_leader(&left).await;
        assert_eq!(left.iter().filter(|at| setup.replicas[**at].metric("lockstep_leader") == 1.0).count(), 1);
        assert!(setup.replicas[leader].stop().await.success());
        let released = Instant::now();
        left.retain(|replica| *replica != leader);
        setup.wait_leader(&left).await;
        setup.change_source(colour).await;
        setup.wait_companion(colour).await;
        println!("a released Lease was taken over, and a change followed, after {:?}", released.elapsed());
    }
    setup.assert_one_write_per_change(2).await;
    let leader = setup.wait_leader(&left).await;
    assert!(setup.replicas[leader].stop().await.success());
    assert!(setup.replicas[leader].log().contains("released the Lease"), "the Lease was not released");
    assert_eq!(setup.lease().await["spec"]["holderIdentity"], "");
}

#[tokio::test]
async fn standby_takes_over_from_a_killed_leader_after_the_lease_expires() {
    let setup = Setup::with_replicas("killed", 2).await;
    setup.create_source().await;
    let leader = setup.wait_leader(&[0, 1]).await;
    setup.replicas[leader].kill();
    let killed = Instant::now();
    setup.change_source("red").await;
    within(TAKEOVER, setup.wait_companion("red")).await;
    println!(
        "a Lease of {LEASE_SECONDS} s was taken over {:?} after its holder was killed",
        killed.elapsed()
    );
    assert_eq!(setup.wait_leader(&[1 - leader]).await, 1 - leader);
    setup.assert_one_write_per_change(1).await;
}

#[tokio::test]
async fn leader_paused_past_its_lease_does_not_write_when_resumed() {
    let setup = Setup::with_replicas("paused", 2).await;
    setup.create_source().await;
    let leader = setup.wait_leader(&[0, 1]).await;
    let taken = setup.cluster.namespace("taken").await;
    let foreign = json!({"metadata": {"name": "colors-synced"}});
    setup.cluster.post(&format!("/api/v1/namespaces/{taken}/configmaps"), &foreign).await;
    setup.cluster.source(&taken, "colors").create().await;
    setup.replicas[leader].wait_metric("lockstep_conflicts", 1.0).await;
    // The leader has received the change and may be about to write.
    setup.change_source("red").await;
    setup.replicas[leader].pause();
    within(TAKEOVER, setup.wait_leader(&[1 - leader])).await;
    setup.wait_companion("red").await;
    setup.change_source("green").await;
    setup.wait_companion("green").await;
    setup.replicas[leader].resume();
    setup.replicas[leader].wait_metric("lockstep_leader", 0.0).await;
    // Only the new leader reports conflicts.
    setup.replicas[leader].wait_metric("lockstep_conflicts", 0.0).await;
    setup.replicas[1 - leader].wait_metric("lockstep_conflicts", 1.0).await;
    assert_eq!(setup.wait_leader(&[0, 1]).await, 1 - leader);
    setup.assert_one_write_per_change(2).await;
}

#[tokio::test]
async fn leader_cut_off_from_the_api_server_stops_leading() {
    let mut setup = Setup::with_replicas("cutoff", 0).await;
    let Some((proxy, through)) = setup.cluster.api_server_proxy().await else { return };
    setup.add_replica(&through).await;
    setup.create_source().await;
    assert_eq!(setup.wait_leader(&[0]).await, 0);
    let direct = setup.kubeconfig();
    setup.add_replica(&direct).await;
    proxy.stall();
    setup.change_source("red").await;
    within(TAKEOVER, setup.replicas[0].wait_metric("lockstep_leader", 0.0)).await;
    setup.replicas[0].wait_log("the Lease was not renewed in time").await;
    assert_eq!(within(TAKEOVER, setup.wait_leader(&[1])).await, 1);
    setup.wait_companion("red").await;
    // Once reconnected, it is a standby.
    proxy.resume();
    setup.change_source("green").await;
    setup.wait_companion("green").await;
    setup.replicas[0].wait_log("another replica is now the leader").await;
    setup.assert_one_write_per_change(2).await;
}

#[tokio::test]
async fn deleted_lease_is_recreated_by_its_holder() {
    let setup = Setup::with_replicas("deleted", 2).await;
    setup.create_source().await;
    let leader = setup.wait_leader(&[0, 1]).await;
    let holder = |lease: &Value| lease["spec"]["holderIdentity"].clone();
    let before = setup.lease().await;
    let path = setup.lease_path();
    setup.cluster.delete(&path).await;
    let after = eventually("the Lease is back", || setup.cluster.get(&path)).await;
    assert_eq!(holder(&after), holder(&before));
    setup.change_source("red").await;
    setup.wait_companion("red").await;
    assert_eq!(setup.replicas[leader].metric("lockstep_leader"), 1.0);
    assert_eq!(setup.replicas[1 - leader].metric("lockstep_leader"), 0.0);
}

#[tokio::test]
async fn annotations_and_labels_of_others_on_the_lease_survive_renewals_takeover_and_release() {
    let mut setup = Setup::with_replicas("annotated", 2).await;
    let leader = setup.wait_leader(&[0, 1]).await;
    let theirs = json!({"metadata": {"annotations": {"a.test/note": "x"}, "labels": {"team": "y"}}});
    let annotated = setup.cluster.merge(&setup.lease_path(), &theirs).await;
    let settings = setup.cluster.key("settings");
    let assert_kept = |lease: &Value| {
        let mut metadata = lease["metadata"].clone();
        // The leader's own.
        let published = metadata["annotations"].as_object_mut().and_then(|all| all.remove(&settings));
        assert!(published.is_some(), "{lease}");
        for field in ["annotations", "labels"] {
            assert_eq!(metadata[field], theirs["metadata"][field], "{lease}");
        }
    };
    let mut lease = annotated.clone();
    for _ in 0..2 {
        let before = lease["spec"]["renewTime"].clone();
        lease = setup.wait_lease("it is renewed", |lease| lease["spec"]["renewTime"] != before).await;
        assert_kept(&lease);
    }
    for field in ["holderIdentity", "leaseTransitions", "acquireTime"] {
        assert_eq!(lease["spec"][field], annotated["spec"][field]);
    }
    let log = setup.replicas[leader].log();
    assert!(!log.contains("stops writing") && !log.contains("not renewed in time"), "{log}");

    setup.replicas[leader].kill();
    let held = |lease: &Value| lease["spec"]["holderIdentity"] == annotated["spec"]["holderIdentity"];
    let next = within(TAKEOVER, setup.wait_lease("the standby takes over", |lease| !held(lease))).await;
    assert_kept(&next);
    assert!(setup.replicas[1 - leader].stop().await.success());
    let released = setup.lease().await;
    assert_eq!(released["spec"]["holderIdentity"], "");
    assert_kept(&released);
}

#[tokio::test]
async fn replica_that_cannot_write_its_lease_is_ready_and_says_why_it_does_not_lead() {
    let setup = Setup::with_replicas("homeless", 0).await;
    let nowhere = setup.cluster.ns("nowhere");
    setup.cluster.source(&setup.home, "colors").create().await;
    for (kubeconfig, remedy) in [
        (setup.cluster.plane.admin(), format!("the namespace {nowhere} does not exist")),
        (setup.kubeconfig(), "no access to the Lease".to_owned()),
    ] {
        let flags = ["--no-webhook", "--namespace", &nowhere];
        let mut replica = Lockstep::spawn(&setup.cluster.domain(), &kubeconfig, &flags);
        replica.wait_ready().await;
        replica.wait_metric("lockstep_lease_failing", 1.0).await;
        replica.wait_log(&remedy).await;
        let readyz = replica.readyz();
        assert!(
            readyz.starts_with("HTTP/1.1 200") && readyz.contains("cannot become the leader"),
            "{readyz}"
        );
        assert_eq!(replica.metric("lockstep_leader"), 0.0);
        // It becomes the leader as soon as it can.
        if kubeconfig == setup.cluster.plane.admin() {
            setup.cluster.namespace("nowhere").await;
            replica.wait_metric("lockstep_leader", 1.0).await;
            assert_eq!(replica.metric("lockstep_lease_failing"), 0.0);
            assert!(replica.readyz().ends_with("\r\n\r\nok\n"), "{}", replica.readyz());
            setup.wait_companion("blue").await;
        }
    }
}

#[tokio::test]
async fn lease_is_not_taken_over_early_when_clocks_differ_by_minutes() {
    for (test, minutes) in [("ahead", 10), ("behind", -10)] {
        let mut setup = Setup::with_replicas(test, 0).await;
        let name = format!("lockstep.{}", setup.cluster.domain());
        let leases = "/apis/coordination.k8s.io/v1/namespaces/lockstep-system/leases";
        let renew = |n: i64| {
            let now =
                k8s_openapi::jiff::Timestamp::now() + k8s_openapi::jiff::SignedDuration::from_mins(minutes);
            json!({
                "holderIdentity": "another", "leaseDurationSeconds": LEASE_SECONDS, "leaseTransitions": n,
                "renewTime": format!("{:.6}", now),
            })
        };
        setup.cluster.post(leases, &json!({"metadata": {"name": name}, "spec": renew(0)})).await;
        let kubeconfig = setup.kubeconfig();
        setup.add_replica(&kubeconfig).await;
        // While the other holder renews the Lease, it keeps it, whatever its clock says.
        let mut renewed = Instant::now();
        for n in 1..=6 {
            setup.cluster.merge(&format!("{leases}/{name}"), &json!({"spec": renew(n)})).await;
            tokio::time::sleep(std::time::Duration::from_secs(1)).await;
            let leads = setup.replicas[0].metric("lockstep_leader") == 1.0;
            // If this machine froze between two renewals, the Lease has really expired.
            assert!(!leads || renewed.elapsed().as_secs() >= LEASE_SECONDS, "after {:?}", renewed.elapsed());
            renewed = Instant::now();
        }
        within(TAKEOVER, setup.wait_leader(&[0])).await;
    }
}
