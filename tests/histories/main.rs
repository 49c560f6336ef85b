//! Random histories with faults on a real control plane, judged by the model. `make model` runs them; tests/README.md
//! says how one is replayed.

#[allow(dead_code)]
#[path = "../e2e/harness.rs"]
mod harness;
#[allow(dead_code)]
#[path = "../e2e/tcp_proxy.rs"]
mod tcp_proxy;
#[allow(dead_code)]
#[path = "../e2e/users.rs"]
mod users;

mod driver;
mod etcd;
// The soak uses the rest.
#[allow(dead_code)]
mod faults;
mod proxy;
mod recorder;
mod replica;
mod requests;
mod scene;
mod schedule;
mod traffic;

use std::{
    env, fs,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use controlplane::ControlPlane;
use futures::{StreamExt, stream};

use crate::{
    driver::Outcome,
    etcd::{Etcd, STORES_JSON},
    recorder::Feed,
    schedule::{FIXED_SEEDS, Group, Plan},
};

/// So many histories run at a time on one control plane.
const CONCURRENT: usize = 4;
/// So many histories have seeds that nobody has seen before.
const FRESH_SEEDS: usize = 3;
/// So many histories with replicas of two versions are always the same.
const FIXED_SEEDS_OF_VERSIONS: u64 = 3;
/// How often a history that fails is run again to make it shorter, and for how long.
const SHRINK_TRIES: usize = 12;
const SHRINK_TIMEOUT: Duration = Duration::from_secs(240);

#[tokio::test(flavor = "multi_thread")]
async fn histories_with_faults_of_replicas_and_network_end_as_the_model_says() {
    run_all(Group::Shared).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn histories_with_faults_of_the_control_plane_end_as_the_model_says() {
    run_all(Group::OwnPlane).await;
}

/// `make test-skew` builds the other version.
#[tokio::test(flavor = "multi_thread")]
async fn histories_across_versions_end_as_the_model_says() {
    if replica::previous().is_none() {
        controlplane::skip("there is no previous build (make test-skew)");
        return;
    }
    run_all(Group::Versions).await;
}

/// Runs the fixed and the fresh seeds and the histories that once failed; or the one that the environment names.
async fn run_all(group: Group) {
    let plans = plans(group);
    if plans.is_empty() {
        return;
    }
    if env::var_os("LOCKSTEP_TEST_KUBECONFIG").is_some() {
        controlplane::skip("it reads etcd, and LOCKSTEP_TEST_KUBECONFIG is set");
        return;
    }
    let plane: &'static ControlPlane = Box::leak(Box::new(harness::boot(&[STORES_JSON])));
    let feed = Feed::start(Etcd::at(plane.data_dir().join("etcd.sock"))).await;
    let concurrent = if group == Group::OwnPlane { 1 } else { CONCURRENT };
    let run = async |plan: Plan| {
        let feed = feed.clone();
        tokio::spawn(async move {
            let begun = Instant::now();
            let outcome = driver::run(plane, &feed, &plan.history, &plan.faults).await;
            println!("{}", describe(&plan, &outcome, begun.elapsed()));
            // Shrinking takes minutes, and somebody may not wait for it.
            outcome
                .failure
                .iter()
                .flat_map(|failure| &failure.violations)
                .for_each(|wrong| println!("  {wrong}"));
            (plan, outcome)
        })
        .await
        .expect("a history ends")
    };
    let ended: Vec<(Plan, Outcome)> =
        stream::iter(plans).map(run).buffer_unordered(concurrent).collect().await;
    let failed = ended.into_iter().filter_map(|(plan, outcome)| Some((plan, outcome.failure?)));
    let mut reports = Vec::new();
    for (plan, failure) in failed {
        // The first failure is enough to work on.
        let shortest = if reports.is_empty() { shrink(plane, &feed, &plan).await } else { plan.clone() };
        reports.push(report(&plan, &shortest, &failure));
    }
    assert!(reports.is_empty(), "{}", reports.join("\n"));
}

fn plans(group: Group) -> Vec<Plan> {
    let file = |path: &Path| {
        let text = fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        Plan::parse(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
    };
    let of = |seed| match group {
        Group::Versions => Plan::across_versions(seed),
        Group::Shared | Group::OwnPlane => Plan::of(seed),
    };
    let mut plans = match (env::var("LOCKSTEP_MODEL_SEED"), env::var_os("LOCKSTEP_MODEL_HISTORY")) {
        (_, Some(path)) => vec![file(Path::new(&path))],
        (Ok(seeds), None) => {
            let seeds =
                seeds.split(',').map(|seed| seed.trim().parse().expect("LOCKSTEP_MODEL_SEED is a number"));
            let faults = env::var("LOCKSTEP_MODEL_FAULTS").ok();
            let faults =
                faults.map(|text| schedule::parse_faults(&text).unwrap_or_else(|error| panic!("{error}")));
            let plan = |seed| match &faults {
                Some(faults) => Plan::with_faults(seed, faults.clone()),
                None => of(seed),
            };
            seeds.map(plan).collect()
        }
        (Err(_), None) => {
            let (fixed, wanted) = match group {
                Group::Shared => (FIXED_SEEDS, FRESH_SEEDS),
                Group::OwnPlane => (FIXED_SEEDS, 1),
                Group::Versions => (FIXED_SEEDS_OF_VERSIONS, 1),
            };
            let mut plans: Vec<Plan> = (0..fixed).map(of).collect();
            let fresh = std::iter::repeat_with(|| of(fastrand::u64(FIXED_SEEDS..1_000_000)));
            plans.extend(fresh.filter(|plan| plan.group() == group).take(wanted));
            let kept = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/histories/regressions");
            let mut kept: Vec<_> =
                fs::read_dir(kept).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
            kept.sort();
            plans.extend(kept.iter().map(|path| file(path)));
            plans
        }
    };
    plans.retain(|plan| plan.group() == group);
    for plan in &mut plans {
        for faults in &mut plan.faults {
            faults.retain(|fault| match fault.missing() {
                None => true,
                Some(why) => {
                    controlplane::skip(&format!("in part: no {fault}: {why}"));
                    false
                }
            });
        }
    }
    plans
}

fn describe(plan: &Plan, outcome: &Outcome, took: Duration) -> String {
    let round =
        |round: &driver::RoundOutcome| format!("{:?} {:.2} s", round.faults, round.convergence.as_secs_f64());
    let rounds: Vec<String> = outcome.rounds.iter().map(round).collect();
    let Outcome { operations, refused, lockstep_writes, person_writes, heals, .. } = outcome;
    format!(
        "seed {}: {} in {:.0} s; {operations} operations, {refused} refused, {person_writes} writes of people, \
         {lockstep_writes} of Lockstep, {heals} heals; caught up: {}",
        plan.history.seed,
        if outcome.failure.is_some() { "FAILED" } else { "passed" },
        took.as_secs_f64(),
        rounds.join(", "),
    )
}

/// Leaves out steps as long as the history still fails.
async fn shrink(plane: &'static ControlPlane, feed: &Arc<Feed>, plan: &Plan) -> Plan {
    let deadline = Instant::now() + SHRINK_TIMEOUT;
    let runtime = tokio::runtime::Handle::current();
    let history = tokio::task::block_in_place(|| {
        model::shrink(&plan.history, SHRINK_TRIES, |candidate| {
            Instant::now() < deadline
                && runtime.block_on(driver::run(plane, feed, candidate, &plan.faults)).failure.is_some()
        })
    });
    Plan { history, faults: plan.faults.clone() }
}

/// Writes what happened into files, and says where they are.
fn report(plan: &Plan, shortest: &Plan, failure: &driver::Failure) -> String {
    let directory = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let seed = plan.history.seed;
    let (events, history) =
        (directory.join(format!("{seed}.events.txt")), directory.join(format!("{seed}.history.txt")));
    fs::write(&events, failure.report(&plan.history, &plan.faults)).expect("a file");
    fs::write(&history, shortest.to_text()).expect("a file");
    let make = if plan.group() == Group::Versions { "test-skew" } else { "model" };
    format!(
        "seed {seed}, {} steps, {} after shrinking, faults {:?}:\n  {}\nWhat happened is in {}. To replay it:\n  \
         LOCKSTEP_MODEL_SEED={seed} make {make}\n  LOCKSTEP_MODEL_HISTORY={} make {make}\n{}",
        plan.history.steps.len(),
        shortest.history.steps.len(),
        plan.faults,
        failure.violations.join("\n  "),
        events.display(),
        history.display(),
        shortest.to_text(),
    )
}
