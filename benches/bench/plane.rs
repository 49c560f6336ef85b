//! The cluster of the benchmarks: a control plane, clients like Lockstep's own, and the programs that are compared.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use controlplane::{ControlPlane, LockstepProcess};
use futures::{AsyncBufReadExt, StreamExt, stream};
use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
};
use serde::{Deserialize, de::IgnoredAny};
use serde_json::{Value, json};
use tokio::sync::mpsc;

/// Longer than anything that is measured.
pub(crate) const DEADLINE: Duration = Duration::from_secs(300);
/// How many writes the floor, the peer and Lockstep have on the way at a time.
pub(crate) const WRITES: usize = 64;
pub(crate) const COMPANIONS: &str = "workshop.io/companion";
const SERVICE_ACCOUNT: (&str, &str) = ("lockstep-system", "lockstep");

pub(crate) struct Bench {
    plane: &'static ControlPlane,
    api: Api,
    peer: Option<PathBuf>,
    /// Fewer repetitions of smaller measurements.
    pub quick: bool,
}

/// Requests as Lockstep's ServiceAccount: the API server queues them as it does those of Lockstep.
#[derive(Clone)]
pub(crate) struct Api(Client);

impl std::ops::Deref for Bench {
    type Target = Api;

    fn deref(&self) -> &Api {
        &self.api
    }
}

/// What a measurement compares.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Who {
    Floor,
    Lockstep,
    Peer,
}

/// A running mirror.
pub(crate) enum Mirror {
    Lockstep(LockstepProcess),
    Peer(Program),
}

/// A process that ends when this is dropped.
pub(crate) struct Program(Child);

impl Program {
    pub(crate) fn start(command: &mut Command) -> Self {
        Self(command.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}")))
    }

    pub(crate) fn id(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// What a watch shows.
#[derive(Deserialize)]
pub(crate) struct Seen {
    #[serde(rename = "type")]
    pub event: String,
    pub object: SeenObject,
}

#[derive(Deserialize, Clone)]
pub(crate) struct SeenObject {
    pub metadata: SeenMeta,
    #[serde(default)]
    pub data: BTreeMap<String, String>,
}

#[derive(Deserialize, Clone)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SeenMeta {
    pub name: String,
    pub namespace: String,
    pub resource_version: String,
}

/// A watch that is read all the time.
pub(crate) struct Watch(mpsc::UnboundedReceiver<Seen>);

impl Watch {
    pub(crate) async fn next(&mut self) -> Seen {
        tokio::time::timeout(DEADLINE, self.0.recv())
            .await
            .expect("an event in time")
            .expect("the watch goes on")
    }

    /// Waits for so many events of this type.
    pub(crate) async fn count(&mut self, event: &str, count: usize) {
        for _ in 0..count {
            while self.next().await.event != event {}
        }
    }

    /// Waits for an event about this object that is as wanted.
    pub(crate) async fn until(&mut self, name: &str, wanted: impl Fn(&Seen) -> bool) -> Seen {
        loop {
            let seen = self.next().await;
            if seen.object.metadata.name == name && wanted(&seen) {
                return seen;
            }
        }
    }
}

impl Bench {
    pub(crate) async fn start(quick: bool) -> Self {
        let plane = crate::harness::shared();
        let (namespace, name) = SERVICE_ACCOUNT;
        // The peer updates where Lockstep patches, and the floor creates what either does.
        let mut bind = plane.kubectl();
        bind.args(["create", "clusterrolebinding", "bench", "--clusterrole=cluster-admin"]);
        bind.arg(format!("--serviceaccount={namespace}:{name}"));
        crate::harness::run(&mut bind);
        let kubeconfig = plane.service_account(namespace, name).expect("a kubeconfig");
        Self { plane, api: Api(client_for(&kubeconfig).await), peer: build_peer(), quick }
    }

    /// What can be compared here: the peer needs Go. Each repetition begins with another one, because the API server
    /// still works on what the one before has deleted.
    pub(crate) fn compared(&self, repetition: usize) -> Vec<Who> {
        let mut compared: Vec<Who> =
            [Who::Floor, Who::Lockstep].into_iter().chain(self.peer.as_ref().map(|_| Who::Peer)).collect();
        let first = repetition % compared.len();
        compared.rotate_left(first);
        compared
    }

    pub(crate) fn repetitions(&self) -> usize {
        if self.quick { 2 } else { 7 }
    }

    /// This many, or fewer if there is little time.
    pub(crate) fn scaled(&self, full: usize, quick: usize) -> usize {
        if self.quick { quick } else { full }
    }

    pub(crate) fn kubeconfig(&self) -> PathBuf {
        let (namespace, name) = SERVICE_ACCOUNT;
        self.plane.service_account(namespace, name).expect("a kubeconfig")
    }

    /// The requests alone, for a task of its own.
    pub(crate) fn api(&self) -> Api {
        self.api.clone()
    }

    /// Starts the peer; none without Go.
    pub(crate) fn spawn_peer(&self, flags: &[&OsStr]) -> Option<Program> {
        let mut command = Command::new(self.peer.as_ref()?);
        command.args(["-writes", &WRITES.to_string()]).args(flags).env("KUBECONFIG", self.kubeconfig());
        Some(Program::start(command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null())))
    }

    /// Starts a controller, and does not wait until it is ready.
    pub(crate) fn spawn(&self, who: Who) -> Mirror {
        match who {
            Who::Floor => unreachable!("the floor is this process"),
            Who::Lockstep => Mirror::Lockstep(self.spawn_lockstep(&["--no-webhook"])),
            Who::Peer => Mirror::Peer(self.spawn_peer(&[]).expect("the peer")),
        }
    }

    pub(crate) fn spawn_lockstep(&self, flags: &[&str]) -> LockstepProcess {
        let program = Path::new(env!("CARGO_BIN_EXE_lockstep"));
        LockstepProcess::start(program, &self.kubeconfig(), flags).expect("lockstep starts")
    }

    /// Starts Lockstep without the webhook, and waits until it is ready.
    pub(crate) async fn lockstep(&self, flags: &[&str]) -> LockstepProcess {
        let mut lockstep = self.spawn_lockstep(&[&["--no-webhook"], flags].concat());
        lockstep.wait_ready(DEADLINE).await.expect("lockstep becomes ready");
        lockstep
    }
}

impl Api {
    pub(crate) async fn send(&self, method: &str, path: &str, kind: &str, body: &Value) {
        let bytes = serde_json::to_vec(body).expect("JSON");
        let request = http::Request::builder().method(method).uri(path).header("content-type", kind);
        let request = request.body(bytes).expect("a request");
        let answer = self.0.request::<IgnoredAny>(request).await;
        answer.unwrap_or_else(|error| panic!("{method} {path}: {error}"));
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) {
        self.send("POST", path, "application/json", body).await;
    }

    pub(crate) async fn merge(&self, path: &str, body: &Value) {
        self.send("PATCH", path, "application/merge-patch+json", body).await;
    }

    pub(crate) async fn delete(&self, path: &str) {
        self.send("DELETE", path, "application/json", &json!({})).await;
    }

    pub(crate) async fn get(&self, path: &str) -> Value {
        let request = http::Request::get(path).body(Vec::new()).expect("a request");
        self.0.request(request).await.unwrap_or_else(|error| panic!("GET {path}: {error}"))
    }

    /// Creates everything, and returns how long that took.
    pub(crate) async fn create_all(&self, objects: &[(String, Value)]) -> Duration {
        let start = Instant::now();
        stream::iter(objects).for_each_concurrent(WRITES, |(path, body)| self.post(path, body)).await;
        start.elapsed()
    }

    pub(crate) async fn namespaces(&self, prefix: &str, count: usize) -> Vec<String> {
        let names: Vec<String> = (0..count).map(|n| format!("{prefix}-{n}")).collect();
        let bodies: Vec<_> = names
            .iter()
            .map(|name| ("/api/v1/namespaces".to_owned(), json!({"metadata": {"name": name}})))
            .collect();
        self.create_all(&bodies).await;
        names
    }

    /// All companions, as they can be created again.
    pub(crate) async fn companions(&self) -> Vec<(String, Value)> {
        let mut found = Vec::new();
        let mut next = String::new();
        loop {
            let path = format!("/api/v1/configmaps?limit=500&labelSelector={COMPANIONS}&continue={next}");
            let page = self.get(&path).await;
            for item in page["items"].as_array().into_iter().flatten() {
                let meta = &item["metadata"];
                let namespace = meta["namespace"].as_str().expect("a namespace");
                let kept = json!({
                    "name": meta["name"], "labels": meta["labels"], "annotations": meta["annotations"],
                    "ownerReferences": meta["ownerReferences"],
                });
                found.push((configmaps(namespace), json!({"metadata": kept, "data": item["data"]})));
            }
            match page["metadata"]["continue"].as_str() {
                Some(more) if !more.is_empty() => next = more.to_owned(),
                _ => return found,
            }
        }
    }

    /// Deletes what has this label in these namespaces, and waits until it is gone.
    pub(crate) async fn delete_all(&self, namespaces: &[String], label: &str) {
        let delete = async |namespace: &String| {
            self.delete(&format!("{}?labelSelector={label}", configmaps(namespace))).await;
        };
        stream::iter(namespaces).for_each_concurrent(8, delete).await;
    }

    /// Watches ConfigMaps with a label, from now on.
    pub(crate) async fn watch(&self, label: &str) -> Watch {
        let path = format!("/api/v1/configmaps?labelSelector={label}");
        let list = self.get(&format!("{path}&limit=1")).await;
        let version = list["metadata"]["resourceVersion"].as_str().expect("a version");
        let path = format!("{path}&watch=1&resourceVersion={version}");
        let request = http::Request::get(path).body(Vec::new()).expect("a request");
        let mut lines = self.0.request_stream(request).await.expect("a watch").lines();
        let (sender, receiver) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            while let Some(Ok(line)) = lines.next().await {
                let seen = serde_json::from_str(&line).expect("an event");
                if sender.send(seen).is_err() {
                    return;
                }
            }
        });
        Watch(receiver)
    }
}

impl Mirror {
    /// SIGTERM, so that Lockstep gives its Lease back.
    pub(crate) async fn stop(self) {
        match self {
            Self::Lockstep(mut process) => drop(process.stop(DEADLINE).await.expect("lockstep ends")),
            // The peer has nothing to give back.
            Self::Peer(peer) => drop(peer),
        }
    }
}

async fn client_for(kubeconfig: &Path) -> Client {
    let kubeconfig = Kubeconfig::read_from(kubeconfig).expect("a kubeconfig");
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await;
    lockstep_cluster::client::build(config.expect("a config"), |_, _| {}).expect("a client")
}

/// Builds benches/peer; none if there is no Go.
fn build_peer() -> Option<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches/peer");
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("peer");
    let mut build = Command::new("go");
    build.args(["build", "-trimpath", "-ldflags=-s -w", "-o"]).arg(&program).arg(".").current_dir(source);
    match build.status() {
        Ok(status) if status.success() => Some(program),
        Ok(status) => panic!("go build of the peer: {status}"),
        Err(error) => {
            println!("go cannot be run ({error}): Lockstep is not compared with the peer");
            None
        }
    }
}

pub(crate) fn configmaps(namespace: &str) -> String {
    format!("/api/v1/namespaces/{namespace}/configmaps")
}

pub(crate) fn source(name: &str, targets: &str, data: &Value) -> Value {
    json!({
        "metadata": {
            "name": name,
            "labels": {"workshop.io/managed": "true"},
            "annotations": {"workshop.io/target-namespaces": targets},
        },
        "data": data,
    })
}

/// The CPU time that a process has used.
pub(crate) fn cpu(pid: u32) -> Duration {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("a running process");
    // The second field may have spaces, in parentheses.
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    let ticks = |field: usize| fields.get(field).and_then(|text| text.parse::<u64>().ok()).expect("ticks");
    // Linux counts in hundredths of a second here, whatever the kernel's own clock is.
    Duration::from_millis((ticks(11) + ticks(12)) * 10)
}

/// Waits until a metric has reached a value.
pub(crate) async fn wait_metric(lockstep: &LockstepProcess, name: &str, value: f64) {
    let start = Instant::now();
    while lockstep.metric(name) < value {
        assert!(start.elapsed() < DEADLINE, "{name} is {} instead of {value}", lockstep.metric(name));
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
