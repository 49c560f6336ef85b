//! Lockstep, installed with one command, and what can be asked about it.

use std::time::{Duration, Instant};

use controlplane::{ControlPlane, Node};
use serde_json::{Value, json};

use crate::{
    harness::{Cluster, configmap, eventually, manifests, pipe, run},
    say,
};

pub const NAMESPACE: &str = "lockstep-system";
const PODS: &str = "/api/v1/namespaces/lockstep-system/pods?labelSelector=app.kubernetes.io/name=lockstep";
const LEASE: &str = "/apis/coordination.k8s.io/v1/namespaces/lockstep-system/leases/lockstep.workshop.io";

/// A test that fails shows what the replicas said.
pub struct Installation {
    pub plane: &'static ControlPlane,
    pub cluster: Cluster,
    /// What `lockstep manifests` is told.
    pub flags: Vec<String>,
}

/// One replica.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pod {
    pub name: String,
    pub container: String,
    pub restarts: u64,
}

impl Installation {
    /// Installs it, and says how long that took until both replicas were ready.
    pub async fn new(plane: &'static ControlPlane, image: Option<&str>) -> (Self, Duration) {
        let image = image.map(|image| ["--image", image]);
        let flags = ["--secrets"].into_iter().chain(image.into_iter().flatten()).map(str::to_owned).collect();
        let installed = Self { plane, cluster: Cluster::on(plane, "node").await, flags };
        let start = Instant::now();
        pipe(plane.kubectl().args(["apply", "-f", "-"]), &installed.manifests());
        installed.kubectl("rollout status deployment/lockstep -n lockstep-system --timeout=2m");
        let took = start.elapsed();
        assert_eq!(installed.pods().await.len(), 2);
        // kube-proxy may be a second behind.
        installed.guarded("default").await;
        (installed, took)
    }

    /// What was installed.
    pub fn manifests(&self) -> String {
        manifests(&self.flags.iter().map(String::as_str).collect::<Vec<_>>())
    }

    /// Waits until the guard is asked, and refuses.
    pub async fn guarded(&self, namespace: &str) {
        let path = format!("/api/v1/namespaces/{namespace}/configmaps?dryRun=All");
        let forged = json!({"metadata": {"name": "x", "labels": {"workshop.io/companion": "true"}}});
        eventually("the guard refuses", || async {
            let answer = self.cluster.try_request("POST", &path, Some(("application/json", &forged))).await;
            (answer.expect_err("nobody may forge a companion") == 403).then_some(())
        })
        .await;
    }

    /// Runs a kubectl command of the admin, which must succeed; its arguments hold no blanks.
    pub fn kubectl(&self, line: &str) -> String {
        run(self.plane.kubectl().args(line.split_whitespace()))
    }

    /// The replicas that are not on their way out, once there are two of them and both are ready.
    pub async fn pods(&self) -> Vec<Pod> {
        eventually("two replicas are ready", || async {
            let list = self.cluster.get(PODS).await?;
            let pods: Vec<&Value> = list["items"].as_array()?.iter().collect();
            let ready = |pod: &&&Value| pod["status"]["containerStatuses"][0]["ready"] == true;
            let all = pods.len() == 2 && pods.iter().filter(ready).count() == 2;
            all.then(|| pods.into_iter().map(pod).collect())
        })
        .await
    }

    /// The replica that writes, and the other.
    pub async fn leader_and_standby(&self) -> [Pod; 2] {
        eventually("one of the replicas leads", || async {
            let lease = self.cluster.get(LEASE).await?;
            let holder = lease["spec"]["holderIdentity"].as_str()?.split('_').next()?.to_owned();
            let pods = self.pods().await;
            let (leader, standby): (Vec<Pod>, Vec<Pod>) =
                pods.into_iter().partition(|pod| pod.name == holder);
            Some([leader.into_iter().next()?, standby.into_iter().next()?])
        })
        .await
    }

    /// Whether a pod is still there, if only to end.
    pub async fn exists(&self, pod: &Pod) -> bool {
        self.cluster.get(&format!("/api/v1/namespaces/{NAMESPACE}/pods/{}", pod.name)).await.is_some()
    }

    /// Creates a ConfigMap to be mirrored beside itself.
    pub async fn source(&self, namespace: &str, name: &str, data: Value) {
        let source =
            json!({"metadata": {"name": name, "labels": {"workshop.io/managed": "true"}}, "data": data});
        self.cluster.post(&format!("/api/v1/namespaces/{namespace}/configmaps"), &source).await;
    }

    /// Creates a source, has its companion deleted, and says how long each took to come about.
    pub async fn made_and_healed(&self, namespace: &str, name: &str) -> [Duration; 2] {
        let companion = format!("{name}-synced");
        self.source(namespace, name, json!({"sky": "blue"})).await;
        let start = Instant::now();
        let first = self.cluster.wait_data(namespace, &companion, json!({"sky": "blue"})).await;
        let made = start.elapsed();
        self.cluster.delete(&configmap(namespace, &companion)).await;
        let start = Instant::now();
        let uid = &first["metadata"]["uid"];
        self.cluster.wait(namespace, &companion, "made anew", |now| now["metadata"]["uid"] != *uid).await;
        [made, start.elapsed()]
    }

    pub async fn memory_is_bounded(&self, node: &Node) {
        for pod in self.pods().await {
            let (most, limit) = node.memory(&pod.container).unwrap_or_else(|error| panic!("{error}"));
            say(&format!("{} had {} KiB at most, of {} KiB", pod.name, most >> 10, limit >> 10));
            assert_eq!(limit, 256 << 20, "the limit of the Deployment");
            assert!(most < limit / 2, "{most} bytes");
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
                say(&format!("--- kubectl {line}\n{}", text.unwrap_or_default()));
            }
        }
    }
}
