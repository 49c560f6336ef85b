//! Runs a history with faults, and says what was wrong.

use std::{
    fmt::Write as _,
    sync::{Arc, atomic::Ordering},
    time::{Duration, Instant},
};

use controlplane::ControlPlane;
use fastrand::Rng;
use model::{Actor, History, Key, Kind, Names, Op, Step, generate, history::Draft};

use crate::{
    faults::{Active, Fault},
    recorder::Feed,
    replica::Build,
    scene::{LOOK_INTERVAL, Performed, Scene},
};

/// How long Lockstep may take to catch up after a fault: longer than its longest backoff of a minute.
pub(crate) const CONVERGENCE_TIMEOUT: Duration = Duration::from_secs(100);
/// The longest pause of people between two steps.
const MAX_PAUSE_MILLIS: u64 = 120;

/// Steps of people, and what goes wrong meanwhile.
#[derive(Debug, Clone)]
pub(crate) struct Round {
    pub faults: Vec<Fault>,
    pub steps: Vec<Step>,
}

/// How a round ended.
#[derive(Debug, Clone)]
pub(crate) struct RoundOutcome {
    pub faults: Vec<Fault>,
    /// From the end of the last fault, or from the last step if that was later, until everything was right. After an
    /// outage it includes the time until people can change a source again.
    pub convergence: Duration,
}

/// How a history ended.
pub(crate) struct Outcome {
    pub rounds: Vec<RoundOutcome>,
    pub operations: u64,
    pub refused: u64,
    pub lockstep_writes: u64,
    pub person_writes: u64,
    pub heals: u64,
    /// What was wrong, and what led there; `None` if nothing was.
    pub failure: Option<Failure>,
}

pub(crate) struct Failure {
    pub violations: Vec<String>,
    /// Everything that happened.
    pub events: Vec<String>,
    /// The logs of the replicas that run.
    pub logs: String,
}

/// The names of the history with this seed: no other history on the control plane has them.
pub(crate) fn names(seed: u64) -> Names {
    Names::new(&format!("h{seed}.test"), &format!("h{seed}-"))
}

/// Splits a history into one round for each list of faults.
pub(crate) fn rounds(history: &History, faults: &[Vec<Fault>]) -> Vec<Round> {
    let steps = history.steps.len().div_ceil(faults.len().max(1)).max(1);
    let mut chunks = history.steps.chunks(steps);
    let mut round = |faults: &Vec<Fault>| Round {
        faults: faults.clone(),
        steps: chunks.next().unwrap_or_default().to_vec(),
    };
    faults.iter().map(&mut round).collect()
}

/// The history with this seed: so many steps for each list of faults.
pub(crate) fn history(seed: u64, steps_a_round: usize, faults: &[Vec<Fault>]) -> History {
    let names = names(seed);
    let mut history = generate(seed, steps_a_round * faults.len(), &names);
    for (round, steps) in history.steps.chunks_mut(steps_a_round).enumerate() {
        prepare(&names, round, steps);
    }
    history
}

/// Whatever is random, there is something to catch up with: a source changes when a fault is about to begin and to end,
/// and the namespaces that it reaches are there.
pub(crate) fn prepare(names: &Names, round: usize, steps: &mut [Step]) {
    let (middle, last) = (steps.len() / 2 - 1, steps.len() - 1);
    for (index, short) in ["home", "away"].into_iter().enumerate() {
        let op = Op::Put(Draft::default());
        steps[index] = Step { by: Actor::Exempt, at: Key::namespace(&names.namespace(short)), op };
    }
    steps[middle] = probe(names, 2 * round);
    steps[last] = probe(names, 2 * round + 1);
}

/// A change of a source that nothing else changes.
fn probe(names: &Names, value: usize) -> Step {
    let draft = Draft {
        labels: [(names.key("managed"), "true".to_owned())].into(),
        annotations: [(names.key("target-namespaces"), format!(".,{}", names.namespace("away")))].into(),
        data: [("probe".to_owned(), format!("v4lue-{value}"))].into(),
        ..Draft::default()
    };
    let at = Key::new(Kind::ConfigMap, &names.namespace("home"), "probe");
    Step { by: Actor::Exempt, at, op: Op::Put(draft) }
}

/// Runs a history from the beginning to the end.
pub(crate) async fn run(
    plane: &'static ControlPlane,
    feed: &Arc<Feed>,
    history: &History,
    faults: &[Vec<Fault>],
) -> Outcome {
    let mut scene = Scene::set(plane, feed, &history.names, history.seed, &[]).await;
    let mut random = Rng::with_seed(history.seed);
    let mut outcomes = Vec::new();
    let mut stuck = Vec::new();
    for round in rounds(history, faults) {
        match play(&mut scene, &round, &mut random, CONVERGENCE_TIMEOUT).await {
            Ok(outcome) => outcomes.push(outcome),
            Err(wrong) => {
                stuck = wrong;
                break;
            }
        }
        if !scene.recorder.violations().is_empty() {
            break;
        }
    }
    if stuck.is_empty() && scene.recorder.violations().is_empty() {
        // What one version leaves, the other finds right.
        let both = faults.iter().flatten().any(|fault| fault.is_of_versions());
        let builds = [Build::Current, Build::Previous];
        stuck = end(&mut scene, &builds[..if both { 2 } else { 1 }]).await;
    }
    scene.replicas.iter().for_each(|replica| replica.check_output());
    stuck.extend(scene.recorder.violations().iter().map(ToString::to_string));
    let logs = scene.replicas.iter().map(|replica| replica.log()).collect::<Vec<_>>().join("\n---\n");
    let failure =
        (!stuck.is_empty()).then(|| Failure { violations: stuck, events: scene.recorder.changes(), logs });
    let outcome = Outcome {
        rounds: outcomes,
        operations: scene.operations,
        refused: scene.refused,
        lockstep_writes: scene.recorder.lockstep_writes.load(Ordering::Relaxed),
        person_writes: scene.recorder.person_writes.load(Ordering::Relaxed),
        heals: scene.recorder.heals.load(Ordering::Relaxed),
        failure,
    };
    scene.clean_up().await;
    outcome
}

/// After the last round: everything is right, and then a new replica of each of these builds writes nothing. Returns
/// what is not right in the end.
pub(crate) async fn end(scene: &mut Scene, builds: &[Build]) -> Vec<String> {
    // A namespace that is still being deleted takes sources with it, and that is a reason to write.
    scene.finish_deletions().await;
    if let Err(wrong) = scene.converge(CONVERGENCE_TIMEOUT).await {
        return wrong.iter().map(|wrong| format!("in the end still: {wrong}")).collect();
    }
    for build in builds {
        scene.check_resync(*build).await;
    }
    Vec::new()
}

/// Plays one round; what is wrong if Lockstep does not catch up in time.
pub(crate) async fn play(
    scene: &mut Scene,
    round: &Round,
    random: &mut Rng,
    timeout: Duration,
) -> Result<RoundOutcome, Vec<String>> {
    scene.finish_deletions().await;
    let mut active: Vec<Active> = Vec::new();
    // There is work in flight when a fault begins, and when it ends.
    let (before, during) = round.steps.split_at(round.steps.len() / 2);
    let (during, last) = during.split_at(during.len().saturating_sub(1));
    perform(scene, before, &mut active, random).await;
    for fault in sorted(&round.faults) {
        let begun = scene.begin(fault, random).await;
        active.push(begun);
    }
    let outage = round.faults.iter().any(|fault| fault.is_outage());
    // During an outage, nobody can do anything.
    let (refused, rest) = during.split_at(if outage { during.len() / 6 } else { during.len() });
    perform(scene, refused, &mut active, random).await;
    while !active.iter().all(Active::is_over) {
        pause(scene, &mut active, LOOK_INTERVAL).await;
    }
    if !outage {
        while !scene.recreate_namespaces().await {
            pause(scene, &mut active, LOOK_INTERVAL).await;
        }
        perform(scene, last, &mut active, random).await;
    }
    while let Some(fault) = active.pop() {
        scene.end(fault).await;
    }
    let mut ended = Instant::now();
    // After an outage, what counts is the first change that people can make, and a restore would undo earlier ones.
    if outage {
        scene.wait_performed(last).await;
    }
    while !scene.recreate_namespaces().await {
        pause(scene, &mut [], LOOK_INTERVAL).await;
        ended = Instant::now();
    }
    let settled = scene.converge(timeout).await;
    if round.faults.contains(&Fault::RemoveWebhooks) {
        scene.wait_reviewed().await;
    }
    scene.recorder.note(format!("SETTLED after {:?}: {}", ended.elapsed(), settled.is_ok()));
    let mut outcome = settled.map(|settled| settled.saturating_duration_since(ended));
    if outcome.is_ok() && !rest.is_empty() {
        // What there was no time for.
        perform(scene, rest, &mut [], random).await;
        while !scene.recreate_namespaces().await {
            pause(scene, &mut [], LOOK_INTERVAL).await;
        }
        outcome = scene.converge(timeout).await.and(outcome);
    }
    match outcome {
        Ok(convergence) => Ok(RoundOutcome { faults: round.faults.clone(), convergence }),
        Err(wrong) => Err(wrong.iter().map(|wrong| format!("after {timeout:?} still: {wrong}")).collect()),
    }
}

/// Performs steps with pauses between them.
async fn perform(scene: &mut Scene, steps: &[Step], active: &mut [Active], random: &mut Rng) {
    let mut last = Performed::Nothing;
    for step in steps {
        if last != Performed::Nothing {
            pause(scene, active, Duration::from_millis(random.u64(0..MAX_PAUSE_MILLIS))).await;
        }
        last = scene.perform(step).await;
    }
}

/// In the order in which they can begin: without an API server, nothing else can. They end in the reverse order.
fn sorted(faults: &[Fault]) -> Vec<Fault> {
    let mut faults = faults.to_vec();
    faults.sort_by_key(|fault| fault.needs_own_plane());
    faults
}

async fn pause(scene: &mut Scene, active: &mut [Active], pause: Duration) {
    scene.tick().await;
    scene.recreate_namespaces().await;
    active.iter_mut().for_each(|fault| scene.go_on(fault));
    tokio::time::sleep(pause).await;
}

impl Failure {
    pub(crate) fn report(&self, history: &History, faults: &[Vec<Fault>]) -> String {
        let mut text = String::new();
        let _ = writeln!(
            text,
            "seed {}, faults {faults:?}\n\n# history\n{history}\n# what happened",
            history.seed
        );
        text.extend(self.events.iter().map(|event| format!("{event}\n")));
        let _ = writeln!(text, "\n# logs\n{}\n# violations", self.logs);
        text.extend(self.violations.iter().map(|violation| format!("{violation}\n")));
        text
    }
}
