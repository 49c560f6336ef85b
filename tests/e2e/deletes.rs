//! Deletes that look like an accident are held in the Lease: across leaders, until somebody releases or extends them.

use std::{path::PathBuf, process::Output, time::Duration};

use controlplane::poll;
use k8s_openapi::jiff::Timestamp;
use serde_json::{Value, json};
use tokio::time::MissedTickBehavior;

use crate::{
    harness::{Cluster, InstalledManifests, LARGE_DEADLINE, Lockstep, TAKEOVER, eventually, within},
    users::User,
};
use lockstep_core::lease::hold::{HeldDeletes, Release};

/// Enough sources that deleting all of them at once triggers the brake.
const MANY: usize = 24;

/// Two replicas, and companions in `away` of many sources in `home`, one of which no accident touches.
struct Scene {
    cluster: Cluster,
    home: String,
    away: String,
    replicas: Vec<Lockstep>,
    /// May get and patch the Lease, and nothing else.
    person: User,
    _installed: InstalledManifests,
}

impl Scene {
    async fn set(test: &str, flags: &[&str]) -> Self {
        Self::with_lease(test, "4s", flags).await
    }

    async fn with_lease(test: &str, duration: &str, flags: &[&str]) -> Self {
        let cluster = Cluster::new(test).await;
        // Only the RBAC for this instance's Lease is needed; without a webhook the webhooks have to go.
        let _installed = cluster.install(&["--webhook-url", &cluster.url()]);
        for kind in ["validating", "mutating"] {
            cluster
                .admin()
                .succeeds(&format!("delete {kind}webhookconfiguration lockstep.{}", cluster.domain()));
        }
        let person = cluster.user("person", &[]);
        let rule = json!({
            "apiGroups": ["coordination.k8s.io"], "resources": ["leases"], "verbs": ["get", "patch"],
            "resourceNames": [format!("lockstep.{}", cluster.domain())],
        });
        cluster.grant(&person.name, &person.subject(), Some("lockstep-system"), json!([rule])).await;
        let (home, away) = (cluster.namespace("home").await, cluster.namespace("away").await);
        let mut scene = Self { cluster, home, away, replicas: Vec::new(), person, _installed };
        for _ in 0..2 {
            scene.add_replica(duration, flags).await;
        }
        for n in 0..MANY {
            scene.create(n).await;
        }
        scene.create_named("other", "b").await;
        scene
    }

    fn kubeconfig(&self) -> PathBuf {
        self.cluster.plane.service_account("lockstep-system", "lockstep").expect("a kubeconfig")
    }

    async fn add_replica(&mut self, lease: &str, flags: &[&str]) {
        let flags = [&["--no-webhook", "--lease-duration", lease], flags].concat();
        let mut replica = Lockstep::spawn(&self.cluster.domain(), &self.kubeconfig(), &flags);
        replica.wait_ready().await;
        self.replicas.push(replica);
    }

    async fn wait_leader(&self, among: &[usize]) -> usize {
        eventually("one of the replicas leads", || async {
            among.iter().copied().find(|replica| self.replicas[*replica].metric("lockstep_leader") == 1.0)
        })
        .await
    }

    /// A source that the accident deletes.
    async fn create(&self, n: usize) {
        self.create_named(&format!("s{n}"), "a").await;
    }

    async fn create_named(&self, name: &str, team: &str) {
        let source = self.cluster.source(&self.home, name).annotate("target-namespaces", &self.away);
        source.with("/metadata/labels/team", json!(team)).create().await;
        self.cluster.wait_data(&self.away, &format!("{name}-synced"), json!({"sky": "blue"})).await;
    }

    /// Deletes all sources but one with one request, and waits until the Lease shows that all companions are held.
    async fn have_an_accident(&self) -> HeldDeletes {
        self.wait_leader(&[0, 1]).await;
        let path = format!("/api/v1/namespaces/{}/configmaps?labelSelector=team%3Da", self.home);
        self.cluster.delete(&path).await;
        self.wait_hold("all are held", |hold| hold.companions == MANY).await
    }

    fn lease_path(&self) -> String {
        let name = format!("lockstep.{}", self.cluster.domain());
        format!("/apis/coordination.k8s.io/v1/namespaces/lockstep-system/leases/{name}")
    }

    /// An annotation of the Lease; none if there is none, or no Lease.
    async fn annotation(&self, name: &str) -> Option<String> {
        let lease = self.cluster.get(&self.lease_path()).await?;
        lease["metadata"]["annotations"][self.cluster.key(name)].as_str().map(str::to_owned)
    }

    async fn hold(&self) -> Option<HeldDeletes> {
        serde_json::from_str(&self.annotation("deletes-held").await?).ok()
    }

    async fn wait_hold(&self, what: &str, matches: impl Fn(&HeldDeletes) -> bool) -> HeldDeletes {
        eventually(&format!("the hold: {what}"), || async { self.hold().await.filter(&matches) }).await
    }

    async fn wait_no_hold(&self) {
        eventually("no deletes are held", || async {
            self.annotation("deletes-held").await.is_none().then_some(())
        })
        .await;
    }

    async fn annotate(&self, annotations: Value) {
        self.cluster.merge(&self.lease_path(), &json!({"metadata": {"annotations": annotations}})).await;
    }

    /// Runs `lockstep deletes` as the person.
    async fn deletes(&self, arguments: &[&str]) -> Output {
        let domain = self.cluster.domain();
        let mut command = self.person.lockstep(&[&["deletes"], arguments, &["--domain", &domain]].concat());
        tokio::task::spawn_blocking(move || command.output().expect("lockstep")).await.expect("it ends")
    }

    async fn says(&self, arguments: &[&str]) -> String {
        let output = self.deletes(arguments).await;
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{arguments:?}: {said}{}", String::from_utf8_lossy(&output.stderr));
        said
    }

    async fn fails(&self, arguments: &[&str]) -> String {
        let output = self.deletes(arguments).await;
        assert!(!output.status.success(), "{arguments:?}");
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    async fn companions(&self) -> usize {
        let path = format!("/api/v1/namespaces/{}/configmaps", self.away);
        let label = format!("{}%3Dtrue", self.cluster.key("companion"));
        let list = self.cluster.get(&format!("{path}?labelSelector={label}")).await.expect("a list");
        list["items"].as_array().map_or(0, Vec::len)
    }

    /// Waits until only this many companions are left. A hold may last longer than a test usually waits.
    async fn wait_companions(&self, left: usize) {
        let reached = || async { (self.companions().await == left).then_some(()) };
        assert!(poll(LARGE_DEADLINE, reached).await.is_some(), "{} are left", self.companions().await);
    }
}

fn seconds_until(at: Timestamp) -> f64 {
    at.duration_since(Timestamp::now()).as_secs_f64()
}

#[tokio::test]
async fn hold_survives_the_kill_of_the_leader_and_ends_when_it_was_to_end() {
    let scene = Scene::set("heir", &["--delete-grace", "40s"]).await;
    let hold = scene.have_an_accident().await;
    assert_eq!((hold.companions, hold.sources), (MANY, MANY));
    // Most sources come back: what is left would be too little for a hold of its own.
    for n in 0..MANY - 3 {
        scene.create(n).await;
    }
    scene.wait_hold("three are left", |hold| hold.companions == 3).await;
    let leader = scene.wait_leader(&[0, 1]).await;
    scene.replicas[leader].kill();
    // Each delete is held for as long as the others, so the end is that of the last one that is left.
    let left = scene.hold().await.expect("a hold");
    assert!(left.since == hold.since && left.until <= hold.until, "{left:?} after {hold:?}");
    let hold = left;
    let next = within(TAKEOVER, scene.wait_leader(&[1 - leader])).await;
    scene.replicas[next].wait_log("this one goes on until").await;
    scene.replicas[next].wait_metric("lockstep_deletes_held", 1.0).await;
    let taken_over = scene.hold().await.expect("a hold");
    assert_eq!((taken_over.since, taken_over.until), (hold.since, hold.until));
    assert!(seconds_until(hold.until) > 0.0, "this machine is too slow for this test");
    assert_eq!(scene.companions().await, MANY + 1, "they are held");
    scene.wait_companions(MANY - 2).await;
    assert!(seconds_until(hold.until) < 1.0, "deleted {} s too early", seconds_until(hold.until));
    scene.wait_no_hold().await;
    assert_eq!(scene.annotation("deletes-released").await, None, "nobody released it");
}

#[tokio::test]
async fn release_deletes_at_once_and_says_so_and_errors_are_clear() {
    let scene = Scene::set("release", &[]).await;
    let nothing = scene.fails(&["release"]).await;
    assert_eq!(nothing, "lockstep: no deletes are held: there is nothing to release\n");
    let nothing = scene.fails(&["extend", "2h"]).await;
    assert_eq!(nothing, "lockstep: no deletes are held: there is nothing to extend\n");
    assert_eq!(scene.says(&["list"]).await, "no deletes are held\n");

    let hold = scene.have_an_accident().await;
    let hour = hold.until.duration_since(hold.since).as_secs();
    assert!((3595..=3605).contains(&hour), "{hold:?}");
    let flags = format!("--domain {}", scene.cluster.domain());
    let note = scene.cluster.wait_event(&scene.home, "s0", "DeletesHeld").await;
    let listed = scene.says(&["list"]).await;
    assert!(listed.contains(&format!("deletes of {MANY} companions of {MANY} sources are held")), "{listed}");
    assert!(listed.contains(&hold.until.to_string()), "{listed}");
    for command in [format!("deletes release {flags}"), format!("deletes extend 2h {flags}")] {
        assert!(note.contains(&command) && listed.contains(&command), "{note}\n{listed}");
    }
    assert_eq!(scene.companions().await, MANY + 1);

    let said = scene.says(&["release"]).await;
    assert!(said.contains(&format!("done: deletes of {MANY} companions of {MANY} sources")), "{said}");
    scene.wait_companions(1).await;
    scene.wait_no_hold().await;
    let released = scene.annotation("deletes-released").await.expect("a record");
    let released: Release = serde_json::from_str(&released).expect("a release");
    assert_eq!((released.hold, released.by), (hold.since, scene.person.name.clone()));
    let listed = scene.says(&["list"]).await;
    assert!(listed.contains(&scene.person.name), "{listed}");

    // The Lease of another instance: the person has no right on it. Nor is there one, for an admin.
    let other = scene.person.lockstep(&["deletes", "list", "--domain", "nobody.example"]).output().unwrap();
    let said = String::from_utf8_lossy(&other.stderr).into_owned();
    assert!(!other.status.success() && said.contains("ask for the verb get"), "{said}");
    let missing =
        scene.cluster.admin().lockstep(&["deletes", "release", "--domain", "nobody.example"]).output();
    let said = String::from_utf8_lossy(&missing.unwrap().stderr).into_owned();
    assert!(
        said.starts_with("lockstep: there is no Lease lockstep-system/lockstep.nobody.example"),
        "{said}"
    );
}

#[tokio::test]
async fn extended_hold_lasts_longer_and_more_than_a_month_is_refused() {
    let scene = Scene::set("extend", &["--delete-grace", "30s"]).await;
    let hold = scene.have_an_accident().await;
    let said = scene.says(&["extend", "10s"]).await;
    let end = hold.until + Duration::from_secs(10);
    assert!(said.contains(&format!("done: deletes are held until {end}")), "{said}");
    assert_eq!(scene.hold().await.map(|hold| hold.until), Some(end));
    let refused = scene.fails(&["extend", "365d"]).await;
    assert!(refused.contains("at most 30 days"), "{refused}");
    scene.wait_companions(1).await;
    assert!(seconds_until(end) < 1.0, "deleted {} s before the extended end", seconds_until(end));
}

#[tokio::test]
async fn removed_or_broken_annotation_or_lease_does_not_release_and_is_written_back() {
    let scene = Scene::set("vanish", &[]).await;
    let hold = scene.have_an_accident().await;
    let leader = scene.wait_leader(&[0, 1]).await;
    let key = scene.cluster.key("deletes-held");
    let again = |held: &HeldDeletes| *held == hold;

    scene.annotate(json!({&key: null})).await;
    scene.wait_hold("it is back", again).await;
    scene.replicas[leader].wait_log("deletes are still held").await;
    scene.annotate(json!({&key: "{"})).await;
    scene.wait_hold("it is readable", again).await;
    scene.replicas[leader].wait_log("cannot be read and is ignored").await;
    scene.cluster.delete(&scene.lease_path()).await;
    scene.wait_hold("it is on the new Lease", again).await;

    // The annotation is removed when no replica writes it back, and the standby, which has seen it, takes over.
    scene.replicas[1 - leader].wait_log("the leader holds deletes of").await;
    scene.replicas[leader].kill();
    scene.annotate(json!({&key: null})).await;
    let next = within(TAKEOVER, scene.wait_leader(&[1 - leader])).await;
    scene.wait_hold("the next leader knows it", again).await;
    scene.replicas[next].wait_metric("lockstep_deletes_held", 1.0).await;
    assert_eq!(scene.companions().await, MANY + 1);
}

#[tokio::test]
async fn sources_that_come_back_end_the_hold_and_it_is_recorded() {
    let scene = Scene::set("back", &[]).await;
    let hold = scene.have_an_accident().await;
    for n in 0..MANY {
        scene.create(n).await;
    }
    scene.wait_no_hold().await;
    let released = scene.annotation("deletes-released").await.expect("a record");
    let released: Release = serde_json::from_str(&released).expect("a release");
    assert_eq!((released.hold, released.by.starts_with("lockstep: ")), (hold.since, true));
    assert_eq!(scene.companions().await, MANY + 1);
}

#[tokio::test]
async fn lease_that_is_annotated_ten_times_a_second_loses_neither_annotation_nor_leader() {
    // The default duration of a Lease: of a shorter one, a busy machine leaves too little time for conflicts.
    let mut scene = Scene::with_lease("busy", "15s", &[]).await;
    let leader = scene.wait_leader(&[0, 1]).await;
    let spec = |lease: &Value, field: &str| lease["spec"][field].clone();
    let before = scene.cluster.get(&scene.lease_path()).await.expect("the Lease");
    let mut ticks = tokio::time::interval(Duration::from_millis(100));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    // A hold is written in between.
    let hold = scene.have_an_accident().await;
    let mut renewals = std::collections::BTreeSet::new();
    for n in 0..300 {
        ticks.tick().await;
        scene.annotate(json!({format!("a.test/n{n}"): n.to_string()})).await;
        let lease = scene.cluster.get(&scene.lease_path()).await.expect("the Lease");
        let annotations = lease["metadata"]["annotations"].as_object().expect("annotations");
        for m in 0..=n {
            assert_eq!(
                annotations.get(&format!("a.test/n{m}")),
                Some(&json!(m.to_string())),
                "{annotations:?}"
            );
        }
        assert_eq!(scene.replicas[leader].metric("lockstep_leader"), 1.0);
        renewals.insert(spec(&lease, "renewTime").to_string());
    }
    let after = scene.cluster.get(&scene.lease_path()).await.expect("the Lease");
    for field in ["holderIdentity", "leaseTransitions", "acquireTime"] {
        assert_eq!(spec(&after, field), spec(&before, field));
    }
    assert!(renewals.len() >= 5, "{renewals:?}");
    assert_eq!(scene.hold().await, Some(hold));
    let log = scene.replicas[leader].log();
    assert!(!log.contains("not renewed in time") && !log.contains("stops writing"), "{log}");
    // The leader gives the Lease back in the midst of it.
    let mut former = scene.replicas.remove(leader);
    let annotating = async {
        loop {
            ticks.tick().await;
            scene.annotate(json!({"a.test/last": Timestamp::now().to_string()})).await;
        }
    };
    tokio::select! {
        status = former.stop() => assert!(status.success()),
        () = annotating => {}
    }
    assert!(former.log().contains("released the Lease"), "{}", former.log());
    scene.wait_leader(&[0]).await;
    assert_eq!(scene.hold().await, Some(hold));
}
