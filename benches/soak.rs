//! One long history with every fault, alone and in threes: how long Lockstep takes to catch up, how much it writes, and
//! how much memory it needs.
//!
//! `make soak MINUTES=20` runs it. It writes the table and a plot of memory to `target/soak`, or where `SOAK_OUTPUT`
//! says.

// Parts of the end-to-end tests and of the histories.
#![allow(dead_code, unused_imports)]

#[path = "../tests/e2e/harness.rs"]
mod harness;
#[path = "../tests/e2e/tcp_proxy.rs"]
mod tcp_proxy;
#[path = "../tests/e2e/users.rs"]
mod users;

#[path = "../tests/histories/driver.rs"]
mod driver;
#[path = "../tests/histories/etcd.rs"]
mod etcd;
#[path = "../tests/histories/faults.rs"]
mod faults;
#[path = "../tests/histories/proxy.rs"]
mod proxy;
#[path = "../tests/histories/recorder.rs"]
mod recorder;
#[path = "../tests/histories/replica.rs"]
mod replica;
#[path = "../tests/histories/report.rs"]
mod report;
#[path = "../tests/histories/requests.rs"]
mod requests;
#[path = "../tests/histories/scene.rs"]
mod scene;
#[path = "../tests/histories/schedule.rs"]
mod schedule;
#[path = "../tests/histories/traffic.rs"]
mod traffic;

use std::{
    env,
    fmt::Write as _,
    fs,
    path::PathBuf,
    process::ExitCode,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use controlplane::ControlPlane;
use fastrand::Rng;

use driver::{CONVERGENCE_TIMEOUT, Round};
use etcd::{Etcd, STORES_JSON};
use faults::Fault;
use recorder::Feed;
use replica::Build;
use report::{Convergence, Memory};
use scene::Scene;

const DEFAULT_MINUTES: u64 = 20;
const STEPS_A_ROUND: usize = 60;

#[tokio::main]
async fn main() -> ExitCode {
    let minutes =
        env::var("MINUTES").ok().map_or(DEFAULT_MINUTES, |text| text.parse().expect("MINUTES is a number"));
    let seed = env::var("LOCKSTEP_MODEL_SEED").ok().map_or_else(
        || fastrand::u64(0..1_000_000),
        |text| text.parse().expect("LOCKSTEP_MODEL_SEED is a number"),
    );
    let output = env::var_os("SOAK_OUTPUT").map_or_else(|| PathBuf::from("target/soak"), PathBuf::from);
    fs::create_dir_all(&output).expect("a directory");
    println!("seed {seed}, {minutes} minutes");

    let plane: &'static ControlPlane = Box::leak(Box::new(harness::boot(&[STORES_JSON])));
    let feed = Feed::start(Etcd::at(plane.data_dir().join("etcd.sock"))).await;
    let names = driver::names(seed);
    let mut scene = Scene::set(plane, &feed, &names, seed, &[]).await;
    let (begun, length) = (Instant::now(), Duration::from_secs(minutes * 60));
    let mut random = Rng::with_seed(seed);
    let (mut convergence, mut stuck) = (Convergence::default(), Vec::new());
    let (mut rounds, mut early_rounds) = (0, 0);
    while begun.elapsed() < length && stuck.is_empty() && scene.recorder.violations().is_empty() {
        // At first, no fault ends a replica, so that the memory of one process can be seen over time. Then those that
        // do come first.
        let all = Fault::ALL.into_iter().filter(|fault| fault.missing().is_none());
        let early = begun.elapsed() < length * 6 / 10;
        let mut pool: Vec<Fault> = all.filter(|fault| !early || !fault.ends_replicas()).collect();
        pool.sort_by_key(|fault| !fault.ends_replicas());
        if early {
            early_rounds = rounds;
        }
        let turn = if early { rounds } else { rounds - early_rounds };
        let turn = usize::try_from(turn).expect("few") % (pool.len() + pool.len() / 2 + 1);
        let faults = match turn {
            0 => Vec::new(),
            turn if turn <= pool.len() => vec![pool[turn - 1]],
            _ => loop {
                let three = schedule::three(&pool, &mut random);
                // Two that restart the API server at once are one.
                if three.iter().filter(|fault| fault.needs_own_plane()).count() < 2 {
                    break three;
                }
            },
        };
        let mut history = model::generate(seed.wrapping_add(rounds), STEPS_A_ROUND, &names);
        driver::prepare(&names, usize::try_from(rounds).expect("few"), &mut history.steps);
        rounds += 1;
        let round = Round { faults, steps: history.steps };
        match driver::play(&mut scene, &round, &mut random, CONVERGENCE_TIMEOUT).await {
            Ok(outcome) => {
                println!(
                    "{:>5.0} s: {:?}: {:.2?}",
                    begun.elapsed().as_secs_f64(),
                    round.faults,
                    outcome.convergence
                );
                convergence.add(&outcome.faults, outcome.convergence);
            }
            Err(wrong) => stuck = wrong,
        }
        scene.replicas.iter().for_each(|replica| replica.check_output());
    }
    if stuck.is_empty() {
        stuck = driver::end(&mut scene, &[Build::Current]).await;
    }
    let mut violations = stuck;
    violations.extend(scene.recorder.violations().iter().map(ToString::to_string));
    let memory: Memory =
        scene.memory.iter().map(|(when, both)| (when.duration_since(begun).as_secs_f64(), *both)).collect();
    let text = summary(&scene, seed, rounds, begun.elapsed(), &convergence, &memory, &violations);
    println!("\n{text}");
    fs::write(output.join("soak.md"), &text).expect("a file");
    fs::write(output.join("soak-memory.svg"), report::plot(&memory)).expect("a file");
    if violations.is_empty() {
        println!("written to {}", output.display());
        return ExitCode::SUCCESS;
    }
    fs::write(output.join("soak-events.txt"), scene.recorder.changes().join("\n")).expect("a file");
    println!(
        "FAILED:\n{}\nwhat happened is in {}",
        violations.join("\n"),
        output.join("soak-events.txt").display()
    );
    ExitCode::FAILURE
}

fn summary(
    scene: &Scene,
    seed: u64,
    rounds: u64,
    took: Duration,
    convergence: &Convergence,
    memory: &Memory,
    violations: &[String],
) -> String {
    let count = |what: &str| violations.iter().filter(|violation| violation.contains(what)).count();
    let (foreign, leaked) = (count("touches a foreign object"), count("still there, but"));
    let lost = count(" still: ") - leaked;
    let other = violations.len() - foreign - leaked - lost;
    let recorder = &scene.recorder;
    let (people, own) =
        (recorder.person_writes.load(Ordering::Relaxed), recorder.lockstep_writes.load(Ordering::Relaxed));
    let mut text = format!(
        "Seed {seed}, {:.0} minutes, {rounds} rounds.\n\n{}\n| what | how many |\n| --- | --- |\n",
        took.as_secs_f64() / 60.0,
        convergence.table(),
    );
    let most = |from: f64, to: f64| {
        let end = memory.last().map_or(0.0, |(seconds, _)| *seconds);
        let within = memory.iter().filter(|(seconds, _)| (end * from..=end * to).contains(seconds));
        within.flat_map(|(_, both)| both).flatten().max().copied().unwrap_or_default() as f64 / 1024.0
    };
    for (what, value) in [
        ("operations", scene.operations.to_string()),
        ("accepted writes of people", people.to_string()),
        ("accepted writes of Lockstep", own.to_string()),
        ("writes of Lockstep for each write of people", format!("{:.2}", own as f64 / people.max(1) as f64)),
        ("companions healed", recorder.heals.load(Ordering::Relaxed).to_string()),
        ("lost", lost.to_string()),
        ("leaked", leaked.to_string()),
        ("foreign touched", foreign.to_string()),
        ("other violations", other.to_string()),
        ("most memory in the first fifth, MiB", format!("{:.1}", most(0.0, 0.2))),
        (
            "most memory from there to three fifths (the same processes), MiB",
            format!("{:.1}", most(0.2, 0.6)),
        ),
        ("most memory in the rest (with restarts), MiB", format!("{:.1}", most(0.6, 1.0))),
    ] {
        let _ = writeln!(text, "| {what} | {value} |");
    }
    text
}
