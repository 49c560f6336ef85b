//! The controller beside as many bare writes of the same objects, and beside a controller on controller-runtime.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use futures::{StreamExt, stream};
use serde_json::{Value, json};

use crate::{
    plane::{Api, Bench, COMPANIONS, DEADLINE, Mirror, WRITES, Watch, Who, configmaps, source, wait_metric},
    report::{Report, Row, millis, quantile},
};

const MANAGED: &str = "workshop.io/managed";
/// Each namespace has this many sources.
const SOURCES_A_NAMESPACE: usize = 100;

/// Puts what was measured where it belongs.
fn put(row: &mut Row, who: Who, value: f64) {
    match who {
        Who::Floor => row.floor.push(value),
        Who::Lockstep => row.lockstep.push(value),
        Who::Peer => row.peer.push(value),
    }
}

/// From the start of the process until thousands of sources that were there before all have their companion. The floor
/// creates the same companions.
pub(crate) async fn cold_start(bench: &Bench, report: &mut Report) {
    let count = bench.scaled(5000, 500);
    let namespaces = bench.namespaces("cold", count / SOURCES_A_NAMESPACE).await;
    create_sources(bench, &namespaces).await;
    let (_, mirror) = start_and_mirror(bench, Who::Lockstep, count).await;
    mirror.stop().await;
    let companions = bench.companions().await;
    assert_eq!(companions.len(), count);
    bench.delete_all(&namespaces, COMPANIONS).await;

    let mut row = Row::time(format!("cold start → {count} sources mirrored"), 1.15);
    for repetition in 0..bench.repetitions() {
        for who in bench.compared(repetition) {
            let took = if who == Who::Floor {
                // Lockstep has a watch on companions, too.
                let (mut seen, _other) = (bench.watch(COMPANIONS).await, bench.watch(COMPANIONS).await);
                let start = Instant::now();
                bench.create_all(&companions).await;
                seen.count("ADDED", count).await;
                start.elapsed()
            } else {
                let (took, mirror) = start_and_mirror(bench, who, count).await;
                mirror.stop().await;
                took
            };
            put(&mut row, who, millis(took));
            bench.delete_all(&namespaces, COMPANIONS).await;
        }
    }
    bench.delete_all(&namespaces, MANAGED).await;
    report.add(row);
}

async fn start_and_mirror(bench: &Bench, who: Who, count: usize) -> (Duration, Mirror) {
    let mut seen = bench.watch(COMPANIONS).await;
    let start = Instant::now();
    let mirror = bench.spawn(who);
    seen.count("ADDED", count).await;
    (start.elapsed(), mirror)
}

/// Fills namespaces with sources that have a companion beside them.
async fn create_sources(bench: &Bench, namespaces: &[String]) {
    let content = |n: usize| json!({"sky": "blue", "number": n.to_string()});
    let sources: Vec<_> = (namespaces.iter())
        .flat_map(|namespace| (0..SOURCES_A_NAMESPACE).map(move |n| (namespace, n)))
        .map(|(namespace, n)| (configmaps(namespace), source(&format!("config-{n}"), ".", &content(n))))
        .collect();
    bench.create_all(&sources).await;
}

/// One source into a thousand namespaces, and one change of it. The floor creates and patches the same companions.
pub(crate) async fn fan_out(bench: &Bench, report: &mut Report) {
    let count = bench.scaled(1000, 200);
    let namespaces = bench.namespaces("fan", count).await;
    let place = configmaps("default");
    let wide = source("wide", "fan-*", &json!({"sky": "blue"}));
    let mut creates = Row::time(format!("one source → {count} namespaces"), 1.15);
    let mut updates = Row::time(format!("one change of it → {count} namespaces"), 1.15);
    let mut companions: Vec<(String, Value)> = Vec::new();
    for repetition in 0..=bench.repetitions() {
        for who in bench.compared(repetition) {
            // The first run shows what the floor has to write.
            if (repetition == 0) != companions.is_empty() || (repetition == 0 && who != Who::Lockstep) {
                continue;
            }
            let (created, updated) = match who {
                Who::Floor => bare_fan_out(bench, &companions).await,
                _ => {
                    let mut mirror = bench.spawn(who);
                    let mut seen = bench.watch(COMPANIONS).await;
                    warm_up(bench, &mut seen).await;
                    let start = Instant::now();
                    bench.post(&place, &wide).await;
                    seen.count("ADDED", count).await;
                    let created = start.elapsed();
                    if repetition == 0 {
                        companions = bench.companions().await;
                        companions.retain(|(path, _)| path.contains("/fan-"));
                        assert_eq!(companions.len(), count);
                    }
                    let start = Instant::now();
                    bench.merge(&format!("{place}/wide"), &json!({"data": {"sky": "grey"}})).await;
                    seen.count("MODIFIED", count).await;
                    let updated = start.elapsed();
                    if let Mirror::Lockstep(process) = &mut mirror {
                        process.wait_ready(DEADLINE).await.expect("lockstep is ready");
                        let writes = |action: &str| {
                            process.metric(&format!("lockstep_companion_writes_total{{action=\"{action}\"}}"))
                        };
                        // A write counts when its answer is there, which may be later than its watch event.
                        wait_metric(
                            process,
                            "lockstep_companion_writes_total{action=\"updated\"}",
                            count as f64,
                        )
                        .await;
                        // One more for the source that shows that the controller works.
                        let counts = (writes("created") as usize, writes("updated") as usize);
                        assert_eq!(counts, (count + 1, count), "created and updated");
                    }
                    mirror.stop().await;
                    bench.delete_all(&["default".to_owned()], MANAGED).await;
                    (created, updated)
                }
            };
            bench.delete_all(&["default".to_owned()], COMPANIONS).await;
            bench.delete_all(&namespaces, COMPANIONS).await;
            if repetition > 0 {
                put(&mut creates, who, millis(created));
                put(&mut updates, who, millis(updated));
            }
        }
    }
    report.add(creates);
    report.add(updates);
}

/// Waits until a controller works: a source of its own is mirrored.
async fn warm_up(bench: &Bench, seen: &mut Watch) {
    bench.post(&configmaps("default"), &source("first", ".", &json!({"sky": "blue"}))).await;
    seen.until("first-synced", |seen| seen.event == "ADDED").await;
}

async fn bare_fan_out(bench: &Bench, companions: &[(String, Value)]) -> (Duration, Duration) {
    let (mut seen, _other) = (bench.watch(COMPANIONS).await, bench.watch(COMPANIONS).await);
    let start = Instant::now();
    bench.create_all(companions).await;
    let mut versions = HashMap::new();
    while versions.len() < companions.len() {
        let meta = seen.next().await.object.metadata;
        versions.insert(format!("{}/{}", configmaps(&meta.namespace), meta.name), meta.resource_version);
    }
    let created = start.elapsed();
    let annotation = "/metadata/annotations/workshop.io~1source-checksum";
    let patches: Vec<(String, Value)> = (versions.into_iter())
        .map(|(path, version)| {
            let patch = json!([
                {"op": "test", "path": "/metadata/resourceVersion", "value": version},
                {"op": "add", "path": "/data", "value": {"sky": "grey"}},
                {"op": "add", "path": annotation, "value": "0123456789ab"},
            ]);
            (path, patch)
        })
        .collect();
    let start = Instant::now();
    stream::iter(&patches)
        .for_each_concurrent(WRITES, |(path, patch)| {
            bench.send("PATCH", path, "application/json-patch+json", patch)
        })
        .await;
    seen.count("MODIFIED", patches.len()).await;
    (created, start.elapsed())
}

/// A companion that is deleted or edited, until the watch shows it as it was. The floor is a task that watches and
/// writes what it is told to.
pub(crate) async fn heal(bench: &Bench, report: &mut Report) {
    let count = bench.scaled(50, 20);
    let namespaces = bench.namespaces("heal", 1).await;
    let place = configmaps(&namespaces[0]);
    // Heals of one companion back off, so each is healed a few times only.
    let total = count * (bench.repetitions() + 1);
    let sources: Vec<_> = (0..total)
        .map(|n| (place.clone(), source(&format!("config-{n}"), ".", &json!({"sky": "blue"}))))
        .collect();
    bench.create_all(&sources).await;
    let (_, mirror) = start_and_mirror(bench, Who::Lockstep, total).await;
    mirror.stop().await;
    let bodies: HashMap<String, Value> = (bench.companions().await.into_iter())
        .filter_map(|(_, body)| Some((body["metadata"]["name"].as_str()?.to_owned(), body)))
        .collect();
    let bodies = Arc::new(bodies);
    let mut rows = [
        Row::time("heal of a deleted companion, p50", 1.15),
        Row::time("heal of a deleted companion, p99", 1.5),
        Row::time("heal of an edited companion, p50", 1.15),
        Row::time("heal of an edited companion, p99", 1.5),
    ];
    for repetition in 0..bench.repetitions() {
        for who in bench.compared(repetition) {
            let mirror = (who != Who::Floor).then(|| bench.spawn(who));
            let floor = (who == Who::Floor)
                .then(|| tokio::spawn(bare_heals(bench.api(), place.clone(), bodies.clone())));
            let mut seen = bench.watch(COMPANIONS).await;
            // The first one shows that the controller works.
            let (mut deleted, mut edited) = (Vec::new(), Vec::new());
            for n in 0..=count {
                let name = format!("config-{}-synced", repetition * count + n);
                let path = format!("{place}/{name}");
                let start = Instant::now();
                bench.delete(&path).await;
                seen.until(&name, |seen| seen.event == "ADDED").await;
                deleted.push(millis(start.elapsed()));
                let start = Instant::now();
                bench.merge(&path, &json!({"data": {"sky": "mine"}})).await;
                let healed = |data: &std::collections::BTreeMap<String, String>| {
                    data.get("sky").is_some_and(|sky| sky == "blue")
                };
                seen.until(&name, |seen| seen.event == "MODIFIED" && healed(&seen.object.data)).await;
                edited.push(millis(start.elapsed()));
            }
            let quantiles = [(&deleted, 50), (&deleted, 99), (&edited, 50), (&edited, 99)];
            for (row, (times, per_cent)) in rows.iter_mut().zip(quantiles) {
                put(row, who, quantile(&times[1..], per_cent));
            }
            match (mirror, floor) {
                (Some(mirror), _) => mirror.stop().await,
                (_, Some(floor)) => floor.abort(),
                _ => {}
            }
        }
    }
    rows.into_iter().for_each(|row| report.add(row));
    bench.delete_all(&namespaces, COMPANIONS).await;
    bench.delete_all(&namespaces, MANAGED).await;
}

/// Writes every companion that is deleted or changed as it was.
async fn bare_heals(bench: Api, place: String, bodies: Arc<HashMap<String, Value>>) {
    let mut seen = bench.watch(COMPANIONS).await;
    loop {
        let found = seen.next().await;
        let meta = &found.object.metadata;
        let Some(body) = bodies.get(&meta.name) else { continue };
        if found.event == "DELETED" {
            bench.post(&place, body).await;
        } else if json!(found.object.data) != body["data"] {
            let patch = json!([
                {"op": "test", "path": "/metadata/resourceVersion", "value": meta.resource_version},
                {"op": "add", "path": "/data", "value": body["data"]},
            ]);
            let path = format!("{place}/{}", meta.name);
            bench.send("PATCH", &path, "application/json-patch+json", &patch).await;
        }
    }
}

/// One change of a source among many, alone and while another source is written to a thousand namespaces again and
/// again. The floor is the same without the other one.
pub(crate) async fn beside_fan_out(bench: &Bench, report: &mut Report) {
    let (count, fan) = (bench.scaled(10_000, 1000), bench.scaled(1000, 200));
    let changes = bench.scaled(60, 20);
    let homes = bench.namespaces("many", count / SOURCES_A_NAMESPACE).await;
    let wide = bench.namespaces("beside", fan).await;
    create_sources(bench, &homes).await;
    let mut seen = bench.watch(COMPANIONS).await;
    let mirror = bench.spawn(Who::Lockstep);
    seen.count("ADDED", count).await;
    let busy = configmaps("default");
    bench.post(&busy, &source("busy", "beside-*", &json!({"turn": "0"}))).await;
    seen.count("ADDED", fan).await;
    drop(seen);
    let mut row =
        Row::time(format!("p99 of one change of {count} sources beside a fan-out to {fan} namespaces"), 3.0);
    for repetition in 0..bench.repetitions() {
        row.floor.push(quantile(&small_changes(bench, &homes, repetition * 2, changes).await, 99));
        let over = AtomicBool::new(false);
        let fan_out = async {
            let mut seen = bench.watch(COMPANIONS).await;
            for turn in 0_usize.. {
                if over.load(Ordering::Relaxed) {
                    break;
                }
                let turn = format!("{repetition}-{turn}");
                bench.merge(&format!("{busy}/busy"), &json!({"data": {"turn": turn}})).await;
                for _ in 0..fan {
                    seen.until("busy-synced", |seen| seen.object.data.get("turn") == Some(&turn)).await;
                }
            }
        };
        let measured = async {
            let times = small_changes(bench, &homes, repetition * 2 + 1, changes).await;
            over.store(true, Ordering::Relaxed);
            times
        };
        let (times, ()) = tokio::join!(measured, fan_out);
        row.lockstep.push(quantile(&times, 99));
    }
    mirror.stop().await;
    report.add(row);
    for namespaces in [&homes, &wide, &vec!["default".to_owned()]] {
        bench.delete_all(namespaces, COMPANIONS).await;
        bench.delete_all(namespaces, MANAGED).await;
    }
}

/// Changes one source after the other; how long each took to be mirrored, in milliseconds.
async fn small_changes(bench: &Bench, homes: &[String], turn: usize, count: usize) -> Vec<f64> {
    let mut seen = bench.watch(COMPANIONS).await;
    let mut times = Vec::new();
    for n in 0..count {
        let home = &homes[(turn * count + n) % homes.len()];
        let value = format!("{turn}-{n}");
        let start = Instant::now();
        let path = format!("{}/config-{}", configmaps(home), n % SOURCES_A_NAMESPACE);
        bench.merge(&path, &json!({"data": {"number": value}})).await;
        let name = format!("config-{}-synced", n % SOURCES_A_NAMESPACE);
        seen.until(&name, |seen| {
            seen.object.metadata.namespace == *home && seen.object.data.get("number") == Some(&value)
        })
        .await;
        times.push(millis(start.elapsed()));
    }
    times
}
