//! Which faults a history meets: its seed decides.

use fastrand::Rng;
use model::History;

use crate::{driver, faults::Fault};

/// Seeds below this have been run from the first day on: together they meet every fault alone.
pub(crate) const FIXED_SEEDS: u64 = 6;
/// One seed in so many needs a control plane of its own.
const OWN_PLANE_EVERY: u64 = 6;
const STEPS_A_ROUND: usize = 60;

/// A history, and the faults of each of its rounds.
#[derive(Debug, Clone)]
pub(crate) struct Plan {
    pub history: History,
    pub faults: Vec<Vec<Fault>>,
}

/// What a control plane is shared by.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Group {
    /// Several histories at a time.
    Shared,
    /// One history at a time, because it disturbs everybody.
    OwnPlane,
    /// Several histories with replicas of two versions.
    Versions,
}

/// Whether the history with this seed disturbs everybody on its control plane.
pub(crate) const fn needs_own_plane(seed: u64) -> bool {
    seed % OWN_PLANE_EVERY == OWN_PLANE_EVERY - 1
}

impl Plan {
    /// What a seed means.
    pub(crate) fn of(seed: u64) -> Self {
        Self::with_faults(seed, faults(seed))
    }

    /// What a seed means for replicas of two versions. It begins and ends with this one.
    pub(crate) fn across_versions(seed: u64) -> Self {
        let mut random = Rng::with_seed(seed);
        // None that ends replicas: that of another version shall go on.
        let quiet = Fault::ALL.into_iter().filter(|fault| !fault.needs_own_plane() && !fault.ends_replicas());
        let mut others = random.choose_multiple(quiet, 2);
        let mut beside = |fault| others.pop().into_iter().chain([fault]).collect();
        let faults = vec![
            vec![Fault::Rollback],
            vec![Fault::Update],
            vec![Fault::Swap],
            // One of each version, and the other takes over.
            vec![Fault::KillLeader],
            beside(Fault::Swap),
            beside(Fault::Rollback),
            vec![Fault::Update],
        ];
        Self::with_faults(seed, faults)
    }

    pub(crate) fn with_faults(seed: u64, faults: Vec<Vec<Fault>>) -> Self {
        Self { history: driver::history(seed, STEPS_A_ROUND, &faults), faults }
    }

    pub(crate) fn group(&self) -> Group {
        let has = |which: fn(Fault) -> bool| self.faults.iter().flatten().any(|fault| which(*fault));
        match (has(Fault::is_of_versions), has(Fault::needs_own_plane)) {
            (true, _) => Group::Versions,
            (false, true) => Group::OwnPlane,
            (false, false) => Group::Shared,
        }
    }

    /// Reads what [`Self::to_text`] wrote.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let (first, history) = text.split_once('\n').ok_or("an empty file")?;
        let faults = first.strip_prefix("faults:").ok_or("the first line does not begin with `faults:`")?;
        Ok(Self { history: History::parse(history)?, faults: parse_faults(faults)? })
    }

    /// `faults: A; B,C` and then the history.
    pub(crate) fn to_text(&self) -> String {
        let round =
            |faults: &Vec<Fault>| faults.iter().map(ToString::to_string).collect::<Vec<_>>().join(",");
        let rounds: Vec<String> = self.faults.iter().map(round).collect();
        format!("faults: {}\n{}", rounds.join(";"), self.history)
    }
}

/// Reads faults: those of one round are separated by commas, rounds by semicolons.
pub(crate) fn parse_faults(text: &str) -> Result<Vec<Vec<Fault>>, String> {
    let round = |round: &str| {
        let names = round.split(',').map(str::trim).filter(|name| !name.is_empty());
        names.map(str::parse).collect::<Result<Vec<Fault>, String>>()
    };
    text.split(';').map(round).collect()
}

fn faults(seed: u64) -> Vec<Vec<Fault>> {
    let mut random = Rng::with_seed(seed);
    let (own, shared): (Vec<Fault>, Vec<Fault>) =
        Fault::ALL.into_iter().partition(|fault| fault.needs_own_plane());
    let alone = |faults: &[Fault]| faults.iter().map(|fault| vec![*fault]).collect::<Vec<_>>();
    match (seed < FIXED_SEEDS, needs_own_plane(seed)) {
        (true, true) => alone(&own),
        (true, false) => {
            let each = shared.len().div_ceil(usize::try_from(FIXED_SEEDS).expect("few") - 1);
            let skipped = usize::try_from(seed).expect("few") * each;
            let mut faults = alone(&shared[skipped..(skipped + each).min(shared.len())]);
            faults.push(three(&shared, &mut random));
            faults
        }
        (false, true) => {
            // Two that restart the API server at once are one.
            let fault = own[random.usize(0..own.len())];
            vec![vec![fault], [vec![fault], random.choose_multiple(shared, 2)].concat()]
        }
        (false, false) => {
            let fault = shared[random.usize(0..shared.len())];
            vec![Vec::new(), vec![fault], three(&shared, &mut random), three(&shared, &mut random)]
        }
    }
}

/// Three different faults.
pub(crate) fn three(from: &[Fault], random: &mut Rng) -> Vec<Fault> {
    random.choose_multiple(from.iter().copied(), 3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fixed_seeds_meet_every_fault_alone() {
        let mut met: Vec<Fault> =
            (0..FIXED_SEEDS).flat_map(faults).filter(|round| round.len() == 1).flatten().collect();
        met.sort_unstable();
        met.dedup();
        assert_eq!(met, Fault::ALL);
    }

    #[test]
    fn plan_is_read_as_it_was_written() {
        for plan in [Plan::of(0), Plan::of(FIXED_SEEDS - 1), Plan::of(77), Plan::across_versions(3)] {
            let read = Plan::parse(&plan.to_text()).unwrap();
            assert_eq!((read.history, read.faults), (plan.history, plan.faults));
        }
        let error = Plan::parse(&format!("faults: Sunshine\n{}", Plan::of(0).history)).unwrap_err();
        assert!(error.starts_with("Sunshine is no fault"), "{error}");
    }
}
