//! Memory, CPU time and latency as a function of how much there is.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use controlplane::LockstepProcess;
use serde_json::json;

use tokio::io::BufStream;

use crate::{
    exchange::{exchange, reviews},
    harness::Cluster,
    plane::{Bench, COMPANIONS, configmaps, cpu, source, wait_metric},
    report::{Report, median, millis},
};

/// From the start of the process until it is ready, on a cluster without sources; and the size of the binary.
pub(crate) async fn start_and_binary(bench: &Bench, report: &mut Report) {
    let mut times = Vec::new();
    for _ in 0..bench.repetitions() {
        let start = Instant::now();
        let mut lockstep = bench.lockstep(&[]).await;
        times.push(millis(start.elapsed()));
        lockstep.stop(Duration::from_secs(30)).await.expect("lockstep ends");
    }
    report.figure("start → ready on an empty cluster", "≤ 100 ms", format!("{:.0} ms", median(&times)));
    let binary = std::fs::metadata(Path::new(env!("CARGO_BIN_EXE_lockstep"))).expect("the binary").len();
    report.figure("binary", "≤ 14 MB", format!("{:.1} MB", binary as f64 / 1e6));
}

/// What Lockstep needs with more and more companions: ten of each source, of 1 KiB each.
pub(crate) async fn sizes(bench: &Bench, report: &mut Report) {
    let steps: &[usize] = if bench.quick { &[200] } else { &[1000, 3000, 10_000] };
    let groups = bench.namespaces("size", 10).await;
    let text = "x".repeat(1000);
    let mut lockstep = bench.lockstep(&[]).await;
    let empty = lockstep.memory_kib("VmRSS");
    let mut known = 0;
    for &count in steps {
        let mut seen = bench.watch(COMPANIONS).await;
        let sources: Vec<_> = (known..count)
            .map(|n| {
                (
                    configmaps("default"),
                    source(&format!("size-{n}"), "size-*", &json!({"text": text, "n": n.to_string()})),
                )
            })
            .collect();
        let start = Instant::now();
        bench.create_all(&sources).await;
        seen.count("ADDED", (count - known) * groups.len()).await;
        let took = start.elapsed();
        let companions = count * groups.len();
        let written = (count - known) * groups.len();
        known = count;
        let burst = lockstep.memory_kib("VmRSS");
        lockstep.stop(Duration::from_secs(60)).await.expect("lockstep ends");
        let start = Instant::now();
        lockstep = bench.lockstep(&[]).await;
        let ready = start.elapsed();
        // Only then does it know everything about each source.
        wait_metric(&lockstep, "lockstep_companions_in_step", companions as f64).await;
        let restarted = lockstep.memory_kib("VmRSS");
        let size = format!("{count} sources of 1 KiB, {companions} companions");
        let goal = if count == 10_000 { "≤ 48 MiB" } else { "–" };
        report.figure(format!("memory after the burst that wrote them: {size}"), goal, mib(burst));
        report.figure(format!("memory after a restart: {size}"), goal, mib(restarted));
        let each = (restarted - empty) as f64 * 1024.0 / companions as f64;
        report.figure(
            format!("memory for each companion, its share of the source included: {size}"),
            "–",
            format!("{each:.0} bytes"),
        );
        report.figure(format!("list and start: {size}"), "–", format!("{:.0} ms", millis(ready)));
        report.figure(
            format!("writes a second: {written} companions of new sources"),
            "–",
            format!("{:.0}", written as f64 / took.as_secs_f64()),
        );
    }
    at_rest(bench, report, &lockstep, known, known * groups.len()).await;
    new_namespace(bench, report, known).await;
    lockstep.stop(Duration::from_secs(60)).await.expect("lockstep ends");
}

fn mib(kib: u64) -> String {
    format!("{:.1} MiB", kib as f64 / 1024.0)
}

/// Two resyncs without a change: the CPU time, and what was asked of the API server.
async fn at_rest(
    bench: &Bench,
    report: &mut Report,
    lockstep: &LockstepProcess,
    sources: usize,
    companions: usize,
) {
    let time = Duration::from_secs(if bench.quick { 10 } else { 61 });
    let calls = || {
        let metrics = lockstep.http_get("/metrics");
        let lines = metrics.lines().filter(|line| line.starts_with("lockstep_api_calls_total{"));
        let counts = lines.filter(|line| !line.contains("verb=\"watch\""));
        counts.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum::<f64>()
    };
    let (before, calls_before, start) = (cpu(lockstep.id()), calls(), Instant::now());
    tokio::time::sleep(time).await;
    let share = (cpu(lockstep.id()) - before).as_secs_f64() / start.elapsed().as_secs_f64() * 100.0;
    // The Lease is renewed every few seconds.
    let others = calls() - calls_before;
    report.figure(
        format!("at rest: {sources} sources, {companions} companions, a resync every 30 s"),
        "≤ 0.3 % of a core, no call but watches and the Lease",
        format!("{share:.2} %; {others:.0} calls in {} s, the Lease's included", start.elapsed().as_secs()),
    );
}

/// A namespace that appears, and gets a companion of every source.
async fn new_namespace(bench: &Bench, report: &mut Report, sources: usize) {
    let mut times = Vec::new();
    for n in 0..bench.repetitions() {
        let mut seen = bench.watch(COMPANIONS).await;
        let start = Instant::now();
        bench.namespaces(&format!("size-new-{n}"), 1).await;
        seen.count("ADDED", sources).await;
        times.push(millis(start.elapsed()) / sources as f64);
        if sources > 1000 && n == 0 {
            // Each is ten thousand writes.
            break;
        }
    }
    report.figure(
        format!("a namespace that appears gets {sources} companions, a companion"),
        "–",
        format!("{:.2} ms", median(&times)),
    );
}

/// What a review and a reconcile cost with more and more namespaces that match nothing.
pub(crate) async fn namespaces(bench: &Bench, report: &mut Report) {
    let steps = if bench.quick { [50, 500] } else { [100, 10_000] };
    let cluster = Cluster::new("names").await;
    let home = cluster.namespace("home").await;
    let (_installed, lockstep) = cluster.install_and_start(&["--resync", "1s"]).await;
    let sources = bench.scaled(1000, 200);
    let pattern = cluster.ns("h*");
    for n in 0..sources {
        cluster.source(&home, &format!("config-{n}")).annotate("target-namespaces", &pattern).create().await;
    }
    lockstep.wait_metric("lockstep_companions", sources as f64).await;
    let webhook = cluster.peer().await;
    let expected = reviews(&cluster, &home);
    let mut known = 0;
    for count in steps {
        bench.namespaces(&format!("idle-{known}"), count - known).await;
        known = count;
        let reconciles = || lockstep.metric("lockstep_reconciles_total{result=\"unchanged\"}");
        // The first resyncs after the namespaces were made still see them for the first time.
        let seen = reconciles();
        while reconciles() < seen + 2.0 * sources as f64 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        let (before, start) = (reconciles(), cpu(lockstep.0.id()));
        tokio::time::sleep(Duration::from_secs(if bench.quick { 3 } else { 20 })).await;
        let each = (cpu(lockstep.0.id()) - start).as_secs_f64() * 1e6 / (reconciles() - before);
        let mut connection = BufStream::new(webhook.connect().await.expect("a connection"));
        let mut times = Vec::new();
        for _ in 0..bench.scaled(500, 100) {
            let start = Instant::now();
            exchange(&mut connection, &expected[1].body).await.expect("an answer");
            times.push(millis(start.elapsed()) * 1000.0);
        }
        report.figure(
            format!("with {count} namespaces that do not match: CPU time of a resync, a source"),
            "does not grow",
            format!("{each:.1} µs"),
        );
        report.figure(
            format!("with {count} namespaces that do not match: one review, p50"),
            "does not grow",
            format!("{:.0} µs", median(&times)),
        );
    }
}
