//! Deletes or kills each replica, the CA Secret and the kubelet. Everything recovers, and no request fails that need
//! not.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use controlplane::Node;
use serde_json::{Value, json};

use crate::{
    harness::{CONTROLLERS, RETRY, TAKEOVER, eventually, run, secret, within},
    installation::{Installation, NAMESPACE, Pod},
    report,
    traffic::Traffic,
};

/// A Lease that was not released expires after this.
const LEASE_DURATION: Duration = Duration::from_secs(15);
/// A released Lease is taken over within this.
const MAX_TAKEOVER: Duration = Duration::from_secs(2);

/// Deletes the leader's pod and the standby's. Meanwhile companions are healed, and no request fails.
pub(crate) async fn delete_each_pod(installation: &Installation) {
    let namespace = installation.cluster.namespace("pods").await;
    let traffic = Traffic::start(installation, "deleted").await;
    for (role, name) in [(0, "leader"), (1, "standby")] {
        let pod = installation.leader_and_standby().await[role].clone();
        installation.kubectl(&format!("delete pod {} -n {NAMESPACE} --wait=false", pod.name));
        let (mut rounds, mut slowest) = (0, Duration::ZERO);
        // Measured until the pod is gone: it keeps serving, then finishes its writes, then releases the Lease.
        while rounds == 0 || installation.exists(&pod).await {
            let took = installation.time_create_and_heal(&namespace, &format!("{name}-{rounds}")).await;
            slowest = slowest.max(took[0]).max(took[1]);
            rounds += 1;
        }
        installation.pods().await;
        report(&format!(
            "{name}'s pod deleted: {rounds} companions created and healed, the slowest in {slowest:.1?}"
        ));
        assert!(slowest <= MAX_TAKEOVER, "{slowest:?} without the {name}");
    }
    let [edits, changes] = traffic.stop(installation).await;
    report(&format!(
        "meanwhile {} edits were refused and {} changes mirrored",
        edits.requests, changes.requests
    ));
    assert!(edits.failures.is_empty() && changes.failures.is_empty(), "{edits:#?} {changes:#?}");
}

/// Kills the leader's container and the standby's with SIGKILL. The kubelet restarts it; meanwhile the other replica
/// works.
pub(crate) async fn kill_each_container(installation: &Installation, node: &Node) {
    let namespace = installation.cluster.namespace("killed").await;
    for (role, name) in [(0, "leader"), (1, "standby")] {
        let pod = installation.leader_and_standby().await[role].clone();
        let mut kill = node.ctr();
        run(kill.args(["tasks", "kill", "--signal", "SIGKILL", &pod.container]));
        let start = Instant::now();
        // Until the Service drops the dead endpoint, a request may fail, which replicas cannot prevent. It must be over
        // soon.
        installation.wait_webhook(&namespace).await;
        let protected = start.elapsed();
        wait_mirrored(installation, &namespace, name).await;
        let mirrored = start.elapsed();
        let runs = eventually("the container runs again", || async {
            let pods = installation.pods().await;
            pods.iter().any(|now| now.name == pod.name && now.restarts == pod.restarts + 1).then_some(())
        });
        within(CONTROLLERS, runs).await;
        report(&format!(
            "{name}'s container killed: the webhook refuses again after {protected:.1?}, a source is mirrored after {mirrored:.1?}"
        ));
        assert!(mirrored <= LEASE_DURATION + MAX_TAKEOVER, "{mirrored:?} without the {name}");
    }
}

/// Creates a source, with retries, and waits for its companion.
async fn wait_mirrored(installation: &Installation, namespace: &str, name: &str) {
    let source = json!({
        "metadata": {"name": name, "labels": {"workshop.io/managed": "true"}},
        "data": {"sky": "blue"},
    });
    let path = format!("/api/v1/namespaces/{namespace}/configmaps");
    eventually("a source is accepted", || async {
        installation.cluster.try_request("POST", &path, Some(("application/json", &source))).await.ok()
    })
    .await;
    let companion = format!("{name}-synced");
    within(TAKEOVER, installation.cluster.wait_data(namespace, &companion, json!({"sky": "blue"}))).await;
}

/// Deletes the Secret with the CA: it is restored, and the API server trusts the webhook all the time.
pub(crate) async fn delete_the_ca(installation: &Installation) {
    let path = secret(NAMESPACE, "lockstep.workshop.io");
    let before = installation.cluster.get(&path).await.expect("the CA");
    let traffic = Traffic::start(installation, "ca").await;
    installation.cluster.delete(&path).await;
    let start = Instant::now();
    let uid = &before["metadata"]["uid"];
    eventually("the CA Secret is restored", || async {
        installation.cluster.get(&path).await.filter(|now| now["metadata"]["uid"] != *uid)
    })
    .await;
    let back = start.elapsed();
    traffic.wait_edits(100).await;
    let [edits, changes] = traffic.stop(installation).await;
    report(&format!(
        "CA Secret deleted: restored after {back:.1?}, {} edits refused meanwhile",
        edits.requests
    ));
    assert!(edits.failures.is_empty() && changes.failures.is_empty(), "{edits:#?} {changes:#?}");
}

/// Kills the kubelet. The replicas are unaffected; the restarted kubelet renews their tokens.
pub(crate) async fn kill_the_kubelet(installation: &Installation, node: &Node) -> Tokens {
    let pods = installation.pods().await;
    let traffic = Traffic::start(installation, "kubelet").await;
    let tokens = Tokens { seen: used_tokens(installation, &pods), pods };
    assert_eq!(tokens.seen.len(), tokens.pods.len(), "one token each: {:?}", tokens.seen);
    node.kubelet().restart().unwrap_or_else(|error| panic!("{error}"));
    traffic.wait_edits(100).await;
    let [edits, changes] = traffic.stop(installation).await;
    assert!(edits.failures.is_empty() && changes.failures.is_empty(), "{edits:#?} {changes:#?}");
    report(&format!("kubelet killed and restarted: {} edits refused meanwhile", edits.requests));
    tokens
}

/// The tokens that the replicas used before their renewal.
pub(crate) struct Tokens {
    pods: Vec<Pod>,
    seen: BTreeSet<[String; 2]>,
}

impl Tokens {
    /// Waits until every replica uses a new token; it reads the file once a minute.
    pub(crate) async fn wait_renewed(&self, installation: &Installation) {
        let renewed = eventually("every replica uses a new token", || async {
            let used = used_tokens(installation, &self.pods);
            let renewed = |pod: &Pod| used.difference(&self.seen).any(|[name, _]| *name == pod.name);
            self.pods.iter().all(renewed).then_some(())
        });
        within(RETRY, renewed).await;
        assert_eq!(installation.pods().await, self.pods, "a replica was restarted");
        report("every replica uses its new token");
    }
}

/// Pods and the ids of the tokens that they used, from the audit log.
fn used_tokens(installation: &Installation, pods: &[Pod]) -> BTreeSet<[String; 2]> {
    let log = installation.cluster.audit_log();
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
