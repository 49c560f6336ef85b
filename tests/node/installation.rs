//! Lockstep installed with `kubectl apply`, and its pods.

use std::time::{Duration, Instant};

use controlplane::{ControlPlane, Node};
use serde_json::{Value, json};

use crate::{
    harness::{CONTROLLERS, Cluster, TAKEOVER, configmap, eventually, manifests, pipe, run, within},
    report,
};

pub(crate) const NAMESPACE: &str = "lockstep-system";
const PODS: &str = "/api/v1/namespaces/lockstep-system/pods?labelSelector=app.kubernetes.io/name=lockstep";
const LEASE: &str = "/apis/coordination.k8s.io/v1/namespaces/lockstep-system/leases/lockstep.workshop.io";

/// The installation. A test that fails shows pods, Events and the replicas' logs.
pub(crate) struct Installation {
    pub plane: &'static ControlPlane,
    pub cluster: Cluster,
    /// The flags of `lockstep manifests`.
    pub flags: Vec<String>,
}

/// The pod of a replica.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Pod {
    pub name: String,
    pub container: String,
    pub restarts: u64,
}

impl Installation {
    /// Installs Lockstep, and returns how long it took until both replicas were ready.
    pub(crate) async fn new(plane: &'static ControlPlane, image: Option<&str>) -> (Self, Duration) {
        let image = image.map(|image| ["--image", image]);
        let flags = ["--secrets"].into_iter().chain(image.into_iter().flatten()).map(str::to_owned).collect();
        let installation = Self { plane, cluster: Cluster::on(plane, "node").await, flags };
        let start = Instant::now();
        pipe(plane.kubectl().args(["apply", "-f", "-"]), &installation.manifests(&["--create-namespace"]));
        installation.kubectl("rollout status deployment/lockstep -n lockstep-system --timeout=2m");
        let took = start.elapsed();
        assert_eq!(installation.pods().await.len(), 2);
        // kube-proxy may take another second.
        installation.wait_webhook("default").await;
        (installation, took)
    }

    /// The manifests with the flags of the installation, and more flags.
    pub(crate) fn manifests(&self, flags: &[&str]) -> String {
        manifests(&self.flags.iter().map(String::as_str).chain(flags.iter().copied()).collect::<Vec<_>>())
    }

    /// Waits until the API server calls the webhook, which refuses a forged companion.
    pub(crate) async fn wait_webhook(&self, namespace: &str) {
        let path = format!("/api/v1/namespaces/{namespace}/configmaps?dryRun=All");
        let forged = json!({"metadata": {"name": "x", "labels": {"workshop.io/companion": "true"}}});
        let refuses = eventually("the webhook refuses", || async {
            let answer = self.cluster.try_request("POST", &path, Some(("application/json", &forged))).await;
            (answer.expect_err("a forged companion was accepted") == 403).then_some(())
        });
        within(CONTROLLERS, refuses).await;
    }

    /// Runs a kubectl command as the admin, which must succeed; its arguments must not contain spaces.
    pub(crate) fn kubectl(&self, line: &str) -> String {
        run(self.plane.kubectl().args(line.split_whitespace()))
    }

    /// The pods, once there are exactly two and both are ready.
    pub(crate) async fn pods(&self) -> Vec<Pod> {
        let ready = eventually("two replicas are ready", || async {
            let list = self.cluster.get(PODS).await?;
            let pods: Vec<&Value> = list["items"].as_array()?.iter().collect();
            let ready = |pod: &&&Value| pod["status"]["containerStatuses"][0]["ready"] == true;
            let all = pods.len() == 2 && pods.iter().filter(ready).count() == 2;
            all.then(|| pods.into_iter().map(pod).collect())
        });
        within(CONTROLLERS, ready).await
    }

    /// The pods of the leader and of the standby.
    pub(crate) async fn leader_and_standby(&self) -> [Pod; 2] {
        let leads = eventually("one of the replicas leads", || async {
            let lease = self.cluster.get(LEASE).await?;
            let holder = lease["spec"]["holderIdentity"].as_str()?.split('_').next()?.to_owned();
            let pods = self.pods().await;
            let (leader, standby): (Vec<Pod>, Vec<Pod>) =
                pods.into_iter().partition(|pod| pod.name == holder);
            Some([leader.into_iter().next()?, standby.into_iter().next()?])
        });
        within(TAKEOVER, leads).await
    }

    /// Whether a pod still exists, terminating or not.
    pub(crate) async fn exists(&self, pod: &Pod) -> bool {
        self.cluster.get(&format!("/api/v1/namespaces/{NAMESPACE}/pods/{}", pod.name)).await.is_some()
    }

    /// Creates a source with its own namespace as the target.
    pub(crate) async fn source(&self, namespace: &str, name: &str, data: Value) {
        let source =
            json!({"metadata": {"name": name, "labels": {"workshop.io/managed": "true"}}, "data": data});
        self.cluster.post(&format!("/api/v1/namespaces/{namespace}/configmaps"), &source).await;
    }

    /// Creates a source and deletes its companion; returns how long it took to create and to recreate the companion.
    pub(crate) async fn time_create_and_heal(&self, namespace: &str, name: &str) -> [Duration; 2] {
        let companion = format!("{name}-synced");
        self.source(namespace, name, json!({"sky": "blue"})).await;
        let start = Instant::now();
        let first = self.cluster.wait_data(namespace, &companion, json!({"sky": "blue"})).await;
        let created = start.elapsed();
        self.cluster.delete(&configmap(namespace, &companion)).await;
        let start = Instant::now();
        let uid = &first["metadata"]["uid"];
        self.cluster.wait(namespace, &companion, "recreated", |now| now["metadata"]["uid"] != *uid).await;
        [created, start.elapsed()]
    }

    /// Asserts that no replica ever used half of its memory limit.
    pub(crate) async fn assert_memory_is_bounded(&self, node: &Node) {
        for pod in self.pods().await {
            let (peak, limit) = node.memory(&pod.container).unwrap_or_else(|error| panic!("{error}"));
            report(&format!("{} used at most {} KiB of {} KiB", pod.name, peak >> 10, limit >> 10));
            assert_eq!(limit, 256 << 20, "the memory limit of the Deployment");
            assert!(peak < limit / 2, "{peak} bytes");
        }
    }
}

fn pod(object: &Value) -> Pod {
    let status = &object["status"]["containerStatuses"][0];
    let id = status["containerID"].as_str().expect("a container");
    Pod {
        name: object["metadata"]["name"].as_str().expect("a name").to_owned(),
        container: id.trim_start_matches("containerd://").to_owned(),
        restarts: status["restartCount"].as_u64().expect("a count"),
    }
}

impl Drop for Installation {
    fn drop(&mut self) {
        if std::thread::panicking() {
            for line in [
                "get pods -A -o wide",
                "get events -A --sort-by=.lastTimestamp",
                "logs -n lockstep-system -l app.kubernetes.io/name=lockstep --prefix --tail=60",
            ] {
                let output = self.plane.kubectl().args(line.split_whitespace()).output();
                let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
                report(&format!("--- kubectl {line}\n{}", text.unwrap_or_default()));
            }
        }
    }
}
