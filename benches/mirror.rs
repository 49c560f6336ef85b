//! What the mirror costs, each figure beside a floor from the same run: machines are noisy, ratios less so.
//!
//! `make bench` runs all of it; `cargo bench -- fan-out` one part.

use std::{
    io::{Read, Write},
    net::TcpStream,
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use controlplane::ControlPlane;
use futures::{StreamExt, stream};
use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
};
use lockstep::ops::metrics::Metrics;
use serde_json::{Value, json};

const FAN: usize = 500;
const UNRELATED: usize = 5000;
const DEADLINE: Duration = Duration::from_secs(120);

#[tokio::main]
async fn main() {
    // `cargo bench` adds `--bench`; whatever else is given selects.
    let chosen: Vec<String> =
        std::env::args().skip(1).filter(|argument| !argument.starts_with("--")).collect();
    let wanted = |name: &str| chosen.is_empty() || chosen.iter().any(|chosen| name.contains(chosen.as_str()));
    drop(rustls::crypto::ring::default_provider().install_default());
    let stage = Stage::set().await;
    if wanted("fan-out") {
        fan_out(&stage).await;
    }
    if wanted("memory") {
        memory(&stage).await;
    }
    if wanted("large") {
        large(&stage).await;
    }
}

/// One source into 500 namespaces, beside 500 bare creates by the same client with as many writers.
async fn fan_out(stage: &Stage) {
    let namespaces: Vec<String> = (0..FAN).map(|n| format!("fan-{n}")).collect();
    stage
        .create_all(
            namespaces.iter().map(|name| ("/api/v1/namespaces".into(), json!({"metadata": {"name": name}}))),
        )
        .await;
    let lockstep = stage.lockstep();
    for round in 1..=3 {
        let name = format!("bare-{round}");
        let bodies = namespaces.iter().map(|namespace| (configmaps(namespace), companion_like(&name)));
        let bare = stage.create_all(bodies).await;

        let before = lockstep.metric("lockstep_companion_writes_total{action=\"created\"}");
        let start = Instant::now();
        let source = json!({
            "metadata": {
                "name": format!("fan-{round}"),
                "labels": {"workshop.io/managed": "true"},
                "annotations": {"workshop.io/target-namespaces": "fan-*"},
            },
            "data": {"sky": "blue"},
        });
        stage.post("/api/v1/namespaces/default/configmaps", &source).await;
        lockstep.wait("lockstep_companion_writes_total{action=\"created\"}", before + FAN as f64).await;
        let mirrored = start.elapsed();
        println!(
            "fan-out {round}: {FAN} companions in {mirrored:.0?}, {FAN} bare creates in {bare:.0?}: {:.2} times the floor",
            mirrored.as_secs_f64() / bare.as_secs_f64(),
        );
    }
}

/// What a large source and many targets do to it: what is under way at once is bounded, not what is to be done.
async fn large(stage: &Stage) {
    const TARGETS: usize = 150;
    let namespaces = (0..TARGETS).map(|n| json!({"metadata": {"name": format!("large-{n}")}}));
    stage.create_all(namespaces.map(|body| ("/api/v1/namespaces".into(), body))).await;
    let lockstep = stage.lockstep();
    let before = lockstep.resident();
    let source = json!({
        "metadata": {
            "name": "large",
            "labels": {"workshop.io/managed": "true"},
            "annotations": {"workshop.io/target-namespaces": "large-*"},
        },
        "data": {"text": "x".repeat(1_000_000)},
    });
    stage.post(&configmaps("default"), &source).await;
    lockstep.wait("lockstep_companion_writes_total{action=\"created\"}", TARGETS as f64).await;
    println!(
        "large: {before} KiB at rest, {} KiB at most while 1 MB went into {TARGETS} namespaces",
        lockstep.peak()
    );
}

/// What 5,000 ConfigMaps that are not ours do to the resident memory.
async fn memory(stage: &Stage) {
    let lockstep = stage.lockstep();
    let before = lockstep.resident();
    let unrelated = (0..UNRELATED).map(|n| {
        let body =
            json!({"metadata": {"name": format!("unrelated-{n}")}, "data": {"text": "x".repeat(1000)}});
        (configmaps("default"), body)
    });
    stage.create_all(unrelated).await;
    // A source made after them shows that all of them could have been seen.
    let source =
        json!({"metadata": {"name": "last", "labels": {"workshop.io/managed": "true"}}, "data": {"a": "b"}});
    stage.post(&configmaps("default"), &source).await;
    lockstep.wait("lockstep_companions", lockstep.metric("lockstep_companions").max(1.0)).await;
    let running = lockstep.resident();
    drop(lockstep);
    let restarted = stage.lockstep();
    println!(
        "memory: {before} KiB resident, {running} KiB with {UNRELATED} unrelated ConfigMaps, {} KiB when started among them",
        restarted.resident(),
    );
}

fn configmaps(namespace: &str) -> String {
    format!("/api/v1/namespaces/{namespace}/configmaps")
}

/// As large as a companion, but nobody's.
fn companion_like(name: &str) -> Value {
    json!({
        "metadata": {
            "name": name,
            "labels": {"example.com/companion": "true"},
            "annotations": {
                "example.com/source": "default/colors",
                "example.com/source-uid": "00000000-0000-0000-0000-000000000000",
                "example.com/source-checksum": "000000000000",
                "example.com/protect": "edits",
            },
        },
        "data": {"sky": "blue"},
    })
}

struct Stage {
    plane: ControlPlane,
    client: Client,
}

impl Stage {
    async fn set() -> Self {
        let plane = ControlPlane::start().expect("a control plane");
        let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy/base");
        let mut apply = plane.kubectl();
        apply
            .arg("apply")
            .arg("-f")
            .arg(deploy.join("namespace.yaml"))
            .arg("-f")
            .arg(deploy.join("rbac.yaml"));
        let applied = apply.output().expect("kubectl");
        assert!(applied.status.success(), "{}", String::from_utf8_lossy(&applied.stderr));
        let kubeconfig = Kubeconfig::read_from(plane.admin()).expect("a kubeconfig");
        let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default())
            .await
            .expect("a config");
        let client = lockstep::client::build(config, &Metrics::new()).expect("a client");
        Self { plane, client }
    }

    async fn post(&self, path: &str, body: &Value) {
        let bytes = serde_json::to_vec(body).expect("JSON");
        let request = http::Request::post(path)
            .header("content-type", "application/json")
            .body(bytes)
            .expect("a request");
        self.client.request::<serde::de::IgnoredAny>(request).await.expect(path);
    }

    /// Creates everything, 64 at a time, and returns how long that took.
    async fn create_all(&self, objects: impl Iterator<Item = (String, Value)>) -> Duration {
        let objects: Vec<_> = objects.collect();
        let start = Instant::now();
        stream::iter(&objects).for_each_concurrent(64, |(path, body)| self.post(path, body)).await;
        start.elapsed()
    }

    fn lockstep(&self) -> Lockstep {
        let identity = self.plane.service_account("lockstep-system", "lockstep").expect("an identity");
        let port = std::net::TcpListener::bind("127.0.0.1:0")
            .and_then(|socket| socket.local_addr())
            .expect("a port");
        let child = Command::new(env!("CARGO_BIN_EXE_lockstep"))
            .args(["run", "--no-webhook", "--ops-bind", &port.to_string()])
            .env("KUBECONFIG", identity)
            .stderr(Stdio::null())
            .spawn()
            .expect("lockstep");
        let lockstep = Lockstep { child, ops: port.to_string() };
        let start = Instant::now();
        while !lockstep.http("/readyz").starts_with("HTTP/1.1 200") {
            assert!(start.elapsed() < DEADLINE, "lockstep is not ready");
            std::thread::sleep(Duration::from_millis(20));
        }
        lockstep
    }
}

struct Lockstep {
    child: Child,
    ops: String,
}

impl Lockstep {
    fn http(&self, path: &str) -> String {
        let mut answer = String::new();
        if let Ok(mut stream) = TcpStream::connect(&self.ops) {
            let request = format!("GET {path} HTTP/1.1\r\nhost: lockstep\r\nconnection: close\r\n\r\n");
            if stream.write_all(request.as_bytes()).is_ok() {
                drop(stream.read_to_string(&mut answer));
            }
        }
        answer
    }

    fn metric(&self, name: &str) -> f64 {
        let metrics = self.http("/metrics");
        let value = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok());
        value.unwrap_or_default()
    }

    async fn wait(&self, metric: &str, value: f64) {
        let start = Instant::now();
        while self.metric(metric) < value {
            assert!(start.elapsed() < DEADLINE, "{metric} does not reach {value}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// The resident memory, in KiB.
    fn resident(&self) -> u64 {
        self.status("VmRSS:")
    }

    /// The most that was ever resident, in KiB.
    fn peak(&self) -> u64 {
        self.status("VmHWM:")
    }

    fn status(&self, field: &str) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).expect("a status");
        let line = status.lines().find_map(|line| line.strip_prefix(field)).expect(field);
        line.trim().trim_end_matches(" kB").parse().expect("a number")
    }
}

impl Drop for Lockstep {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}
