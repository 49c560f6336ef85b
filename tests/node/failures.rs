//! What is lost when a replica goes, by request or by accident, or its CA, or its kubelet: nothing that does not come
//! back.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use controlplane::Node;
use serde_json::{Value, json};

use crate::{
    harness::{eventually, run, secret},
    installation::{Installation, NAMESPACE, Pod},
    say,
    traffic::Traffic,
};

/// A Lease that nobody gave up runs out after this.
const LEASE: Duration = Duration::from_secs(15);
/// A Lease that was given up is taken over within this.
const TAKE_OVER: Duration = Duration::from_secs(2);

/// Deletes either pod. Companions are healed all the while, and no request fails.
pub async fn of_a_pod(installed: &Installation) {
    let namespace = installed.cluster.namespace("pods").await;
    let stream = Traffic::start(installed, "deleted").await;
    for (role, name) in [(0, "leader"), (1, "standby")] {
        let pod = installed.leader_and_standby().await[role].clone();
        installed.kubectl(&format!("delete pod {} -n {NAMESPACE} --wait=false", pod.name));
        let (mut rounds, mut slowest) = (0, Duration::ZERO);
        // Every moment counts: it serves on for a while, then finishes, then gives up the Lease.
        while rounds == 0 || installed.exists(&pod).await {
            let took = installed.made_and_healed(&namespace, &format!("{name}-{rounds}")).await;
            slowest = slowest.max(took[0]).max(took[1]);
            rounds += 1;
        }
        installed.pods().await;
        say(&format!(
            "{name}'s pod deleted: {rounds} companions made and healed, the slowest took {slowest:.1?}"
        ));
        assert!(slowest <= TAKE_OVER, "{slowest:?} without the {name}");
    }
    let [edits, changes] = stream.end(installed).await;
    say(&format!("meanwhile {} edits were refused, {} changes arrived", edits.requests, changes.requests));
    assert!(edits.failures.is_empty() && changes.failures.is_empty(), "{edits:#?} {changes:#?}");
}

/// Kills either container without warning. The kubelet starts it again; the other replica does its work meanwhile.
pub async fn of_a_container(installed: &Installation, node: &Node) {
    let namespace = installed.cluster.namespace("killed").await;
    for (role, name) in [(0, "leader"), (1, "standby")] {
        let pod = installed.leader_and_standby().await[role].clone();
        let mut kill = node.ctr();
        run(kill.args(["tasks", "kill", "--signal", "SIGKILL", &pod.container]));
        let start = Instant::now();
        // Until the API server has learnt that an address is dead, a request may fail: that is what replicas cannot
        // change. It must be over soon.
        installed.guarded(&namespace).await;
        let guarded = start.elapsed();
        mirrored_sooner_or_later(installed, &namespace, name).await;
        let mirrored = start.elapsed();
        eventually("it runs again", || async {
            let pods = installed.pods().await;
            pods.iter().any(|now| now.name == pod.name && now.restarts == pod.restarts + 1).then_some(())
        })
        .await;
        say(&format!(
            "{name}'s container killed: refused again after {guarded:.1?}, mirrored after {mirrored:.1?}"
        ));
        assert!(mirrored <= LEASE + TAKE_OVER, "{mirrored:?} without the {name}");
    }
}

/// Creates a source, as somebody would who is told to try again, and waits for its companion.
async fn mirrored_sooner_or_later(installed: &Installation, namespace: &str, name: &str) {
    let source = json!({
        "metadata": {"name": name, "labels": {"workshop.io/managed": "true"}},
        "data": {"sky": "blue"},
    });
    let path = format!("/api/v1/namespaces/{namespace}/configmaps");
    eventually("a source is taken", || async {
        installed.cluster.try_request("POST", &path, Some(("application/json", &source))).await.ok()
    })
    .await;
    installed.cluster.wait_data(namespace, &format!("{name}-synced"), json!({"sky": "blue"})).await;
}

/// Deletes the Secret with the CA: it is put back, and the guard is trusted all along.
pub async fn of_the_ca(installed: &Installation) {
    let path = secret(NAMESPACE, "lockstep.workshop.io");
    let before = installed.cluster.get(&path).await.expect("the CA");
    let stream = Traffic::start(installed, "ca").await;
    installed.cluster.delete(&path).await;
    let start = Instant::now();
    let uid = &before["metadata"]["uid"];
    eventually("the CA is put back", || async {
        installed.cluster.get(&path).await.filter(|now| now["metadata"]["uid"] != *uid)
    })
    .await;
    let back = start.elapsed();
    stream.go_on(100).await;
    let [edits, changes] = stream.end(installed).await;
    say(&format!("CA deleted: put back after {back:.1?}, {} edits refused meanwhile", edits.requests));
    assert!(edits.failures.is_empty() && changes.failures.is_empty(), "{edits:#?} {changes:#?}");
}

/// Kills the kubelet. The replicas do not notice; the kubelet that comes after it renews their tokens.
pub async fn of_the_kubelet(installed: &Installation, node: &Node) -> Tokens {
    let pods = installed.pods().await;
    let stream = Traffic::start(installed, "kubelet").await;
    let tokens = Tokens { seen: used(installed, &pods), pods };
    assert_eq!(tokens.seen.len(), tokens.pods.len(), "one token each: {:?}", tokens.seen);
    node.kubelet().restart().unwrap_or_else(|error| panic!("{error}"));
    stream.go_on(100).await;
    let [edits, changes] = stream.end(installed).await;
    assert!(edits.failures.is_empty() && changes.failures.is_empty(), "{edits:#?} {changes:#?}");
    say(&format!("kubelet killed and started again: {} edits refused meanwhile", edits.requests));
    tokens
}

/// The tokens that the replicas showed the API server before their renewal.
pub struct Tokens {
    pods: Vec<Pod>,
    seen: BTreeSet<[String; 2]>,
}

impl Tokens {
    /// A replica reads its token again once a minute.
    pub async fn were_renewed(&self, installed: &Installation) {
        eventually("every replica shows a new token", || async {
            let used = used(installed, &self.pods);
            let renewed = |pod: &Pod| used.difference(&self.seen).any(|[name, _]| *name == pod.name);
            self.pods.iter().all(renewed).then_some(())
        })
        .await;
        assert_eq!(installed.pods().await, self.pods, "without a restart");
        say("every replica shows the API server its new token");
    }
}

/// Pods and the ids of the tokens that they showed the API server, from the audit log.
fn used(installed: &Installation, pods: &[Pod]) -> BTreeSet<[String; 2]> {
    let log = installed.cluster.audit_log();
    let of_pods = log.lines().filter(|line| pods.iter().any(|pod| line.contains(&pod.name)));
    let entries = of_pods.filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let shown = entries.filter_map(|entry| {
        let extra = |key: &str| {
            Some(
                entry["user"]["extra"][format!("authentication.kubernetes.io/{key}")][0].as_str()?.to_owned(),
            )
        };
        Some([extra("pod-name")?, extra("credential-id")?])
    });
    shown.filter(|[name, _]| pods.iter().any(|pod| pod.name == *name)).collect()
}
