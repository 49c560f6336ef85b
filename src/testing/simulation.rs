//! A simulation of the controller: the real world, queue, plan, apply, brake, retry and election of two replicas on a
//! simulated API server, under a virtual clock. From a seed come what people do, what goes wrong and how long
//! everything takes; the `model` crate says what Lockstep has to make of it.
//!
//! | file | job |
//! | --- | --- |
//! | `scenario` | what happens, and when: from a seed or from a text |
//! | `server` | the API server with its delays and faults, the controllers of Kubernetes, the agenda |
//! | `watches` | what each watch shows, and when |
//! | `replica` | the code under test |
//! | `run` | carries out a scenario and says what was wrong |
//! | `shrink` | makes a failing scenario shorter |
//!
//! Left out: HTTP and `watch::run` (the end-to-end tests have both), the webhook, certificates and Events.

mod convert;
mod replica;
mod run;
mod scenario;
mod server;
mod shrink;
mod watches;

use std::{
    collections::BTreeMap,
    fmt::Write,
    path::Path,
    sync::Mutex,
    thread,
    time::{Duration, Instant},
};

use run::run;
use scenario::Scenario;

/// The seed to run alone, with everything that happens printed.
const SEED: &str = "LOCKSTEP_SIM_SEED";
/// For how long fresh seeds are tried.
const SECONDS: &str = "LOCKSTEP_SIM_SECONDS";
const DEFAULT_TIME: Duration = Duration::from_secs(5);
/// So many kinds of failures are looked at in one run.
const MAX_KINDS: usize = 5;
/// These seeds are always run, so that a defect which they show is shown every time.
const FIXED_SEEDS: std::ops::Range<u64> = 0..150;
/// With so many different delays each scenario of a past defect is run.
const DELAYS: u64 = 40;

/// What was simulated, by all threads.
#[derive(Default)]
struct Total {
    histories: usize,
    failed: usize,
    writes: usize,
    /// The longest time that Lockstep took after the last entry.
    settled_after: Duration,
    /// The first failure of each kind: its seed and what was wrong.
    failures: BTreeMap<String, (u64, Vec<String>)>,
}

fn number(variable: &str) -> Option<u64> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable} is no number")))
}

/// What is wrong without the names of objects: failures of one kind have one cause, probably.
fn kind_of(wrong: &[String]) -> String {
    let first = wrong.first().map_or("", String::as_str);
    let is_name = |word: &&str| word.contains('/') || word.contains(|c: char| c.is_ascii_digit());
    first.split(' ').filter(|word| !is_name(word)).collect::<Vec<_>>().join(" ")
}

/// The shortest scenario that fails, and what happens in it.
fn explain(scenario: &Scenario) -> String {
    let shortest = shrink::shrink(scenario);
    let outcome = run(&shortest, true);
    let (entries, of) = (shortest.timeline.len(), scenario.timeline.len());
    format!(
        "shortest scenario ({entries} of {of} entries):\n{shortest}\nwhat happens in it:\n{}\n\nwrong: {}\n",
        outcome.trace.join("\n"),
        outcome.wrong.join("\n")
    )
}

#[test]
fn random_histories_with_faults_end_as_the_model_says() {
    if let Some(seed) = number(SEED) {
        let scenario = Scenario::generate(seed);
        let outcome = run(&scenario, true);
        println!("{scenario}\n{}", outcome.trace.join("\n"));
        assert_eq!(outcome.wrong, Vec::<String>::new());
        return;
    }
    let time = number(SECONDS).map_or(DEFAULT_TIME, Duration::from_secs);
    let (first, begun) = (fastrand::u64(0..1 << 48), Instant::now());
    let threads = thread::available_parallelism().map_or(1, usize::from);
    let total = Mutex::<Total>::default();
    thread::scope(|scope| {
        for begin in (first..).take(threads) {
            let total = &total;
            scope.spawn(move || {
                for seed in (begin..).step_by(threads) {
                    let outcome = run(&Scenario::generate(seed), false);
                    let mut total = total.lock().unwrap();
                    total.histories += 1;
                    total.writes += outcome.writes;
                    total.settled_after = total.settled_after.max(outcome.settled_after);
                    if !outcome.wrong.is_empty() {
                        total.failed += 1;
                        total.failures.entry(kind_of(&outcome.wrong)).or_insert((seed, outcome.wrong));
                    }
                    if begun.elapsed() >= time || total.failures.len() >= MAX_KINDS {
                        break;
                    }
                }
            });
        }
    });
    let Total { histories, failed, writes, settled_after, failures } = total.into_inner().unwrap();
    println!(
        "{histories} histories from seed {first} in {:.1?}: {writes} writes, settled within {settled_after:?}",
        begun.elapsed()
    );
    let mut report = String::new();
    for (seed, wrong) in failures.values() {
        let explained = explain(&Scenario::generate(*seed));
        let wrong = wrong.join("\n");
        writeln!(
            report,
            "{wrong}\n\n{explained}\nreplay: {SEED}={seed} cargo test --lib simulation -- --nocapture\n"
        )
        .unwrap();
    }
    assert!(failures.is_empty(), "{failed} of {histories} histories failed\n\n{report}");
    assert!(histories > 0 && writes > histories, "nothing was simulated");
}

#[test]
fn fixed_histories_with_faults_end_as_the_model_says() {
    for seed in FIXED_SEEDS {
        let scenario = Scenario::generate(seed);
        let wrong = run(&scenario, false).wrong;
        assert!(wrong.is_empty(), "seed {seed}: {}\n\n{}", wrong.join("\n"), explain(&scenario));
    }
}

#[test]
fn scenarios_of_past_defects_end_as_the_model_says() {
    let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/testing/simulation/scenarios");
    let mut count = 0;
    for entry in directory.read_dir().unwrap() {
        let path = entry.unwrap().path();
        let text = std::fs::read_to_string(&path).unwrap();
        let scenario = Scenario::parse(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        for delays in 0..DELAYS {
            let mut scenario = scenario.clone();
            scenario.settings.seed = scenario.settings.seed.wrapping_add(delays);
            let wrong = run(&scenario, false).wrong;
            assert!(wrong.is_empty(), "{}: {}\n{}", path.display(), wrong.join("\n"), explain(&scenario));
        }
        count += 1;
    }
    assert!(count > 0, "no scenarios in {}", directory.display());
}

#[test]
fn seed_determines_every_write() {
    for seed in 0..40 {
        let scenario = Scenario::generate(seed);
        let again = Scenario::parse(&scenario.to_string()).unwrap();
        let [one, other] = [&scenario, &again].map(|scenario| run(scenario, false));
        assert_eq!((one.digest, one.changes), (other.digest, other.changes), "seed {seed}");
    }
}
