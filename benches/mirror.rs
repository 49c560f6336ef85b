//! Benchmarks of the mirror. Each figure is printed with a baseline from the same run, because ratios vary less between
//! machines than durations do.
//!
//! `make bench` runs all of them; `cargo bench -- fan-out` runs one.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use controlplane::{ControlPlane, LockstepProcess};
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
    // `cargo bench` adds `--bench`; every other argument selects benchmarks by name.
    let chosen: Vec<String> =
        std::env::args().skip(1).filter(|argument| !argument.starts_with("--")).collect();
    let wanted = |name: &str| chosen.is_empty() || chosen.iter().any(|chosen| name.contains(chosen.as_str()));
    drop(rustls::crypto::ring::default_provider().install_default());
    let bench = Bench::start().await;
    if wanted("fan-out") {
        fan_out(&bench).await;
    }
    if wanted("memory") {
        memory(&bench).await;
    }
    if wanted("large") {
        large(&bench).await;
    }
}

/// One source into 500 namespaces, beside 500 bare creates by the same client with as many writers.
async fn fan_out(bench: &Bench) {
    let namespaces: Vec<String> = (0..FAN).map(|n| format!("fan-{n}")).collect();
    bench
        .create_all(
            namespaces.iter().map(|name| ("/api/v1/namespaces".into(), json!({"metadata": {"name": name}}))),
        )
        .await;
    let lockstep = bench.start_mirror().await;
    for round in 1..=3 {
        let name = format!("bare-{round}");
        let bodies = namespaces.iter().map(|namespace| (configmaps(namespace), companion_like(&name)));
        let bare = bench.create_all(bodies).await;

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
        bench.post("/api/v1/namespaces/default/configmaps", &source).await;
        wait_metric(&lockstep, "lockstep_companion_writes_total{action=\"created\"}", before + FAN as f64)
            .await;
        let mirrored = start.elapsed();
        println!(
            "fan-out {round}: {FAN} companions in {mirrored:.0?}, {FAN} bare creates in {bare:.0?}: {:.2} times the baseline",
            mirrored.as_secs_f64() / bare.as_secs_f64(),
        );
    }
}

/// The peak memory while a large source is mirrored into many namespaces: only the writes in flight hold a copy.
async fn large(bench: &Bench) {
    const TARGETS: usize = 150;
    let namespaces = (0..TARGETS).map(|n| json!({"metadata": {"name": format!("large-{n}")}}));
    bench.create_all(namespaces.map(|body| ("/api/v1/namespaces".into(), body))).await;
    let lockstep = bench.start_mirror().await;
    let before = resident(&lockstep);
    let source = json!({
        "metadata": {
            "name": "large",
            "labels": {"workshop.io/managed": "true"},
            "annotations": {"workshop.io/target-namespaces": "large-*"},
        },
        "data": {"text": "x".repeat(1_000_000)},
    });
    bench.post(&configmaps("default"), &source).await;
    wait_metric(&lockstep, "lockstep_companion_writes_total{action=\"created\"}", TARGETS as f64).await;
    println!(
        "large: {before} KiB at rest, {} KiB at the peak while 1 MB was mirrored into {TARGETS} namespaces",
        peak(&lockstep)
    );
}

/// The resident memory with 5,000 ConfigMaps that are neither sources nor companions.
async fn memory(bench: &Bench) {
    let lockstep = bench.start_mirror().await;
    let before = resident(&lockstep);
    let unrelated = (0..UNRELATED).map(|n| {
        let body =
            json!({"metadata": {"name": format!("unrelated-{n}")}, "data": {"text": "x".repeat(1000)}});
        (configmaps("default"), body)
    });
    bench.create_all(unrelated).await;
    // Once a source created after them is mirrored, the watch has passed all of them.
    let source =
        json!({"metadata": {"name": "last", "labels": {"workshop.io/managed": "true"}}, "data": {"a": "b"}});
    bench.post(&configmaps("default"), &source).await;
    wait_metric(&lockstep, "lockstep_companions", lockstep.metric("lockstep_companions").max(1.0)).await;
    let running = resident(&lockstep);
    drop(lockstep);
    let restarted = bench.start_mirror().await;
    println!(
        "memory: {before} KiB resident, {running} KiB with {UNRELATED} unrelated ConfigMaps, {} KiB when started among them",
        resident(&restarted),
    );
}

fn configmaps(namespace: &str) -> String {
    format!("/api/v1/namespaces/{namespace}/configmaps")
}

/// As large as a companion, without Lockstep's marks.
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

struct Bench {
    plane: ControlPlane,
    client: Client,
}

impl Bench {
    async fn start() -> Self {
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

    /// Starts a mirror and waits until it is ready.
    async fn start_mirror(&self) -> LockstepProcess {
        let kubeconfig = self.plane.service_account("lockstep-system", "lockstep").expect("a kubeconfig");
        let program = Path::new(env!("CARGO_BIN_EXE_lockstep"));
        let mut lockstep =
            LockstepProcess::start(program, &kubeconfig, &["--no-webhook"]).expect("lockstep starts");
        lockstep.wait_ready(DEADLINE).await.expect("lockstep becomes ready");
        lockstep
    }
}

/// Waits until a metric reaches a value. Polls often, because the caller measures the time.
async fn wait_metric(lockstep: &LockstepProcess, metric: &str, value: f64) {
    let start = Instant::now();
    while lockstep.metric(metric) < value {
        assert!(start.elapsed() < DEADLINE, "{metric} does not reach {value}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// The resident memory of a process, in KiB.
fn resident(lockstep: &LockstepProcess) -> u64 {
    lockstep.memory_kib("VmRSS")
}

/// The peak of the resident memory of a process, in KiB.
fn peak(lockstep: &LockstepProcess) -> u64 {
    lockstep.memory_kib("VmHWM")
}
