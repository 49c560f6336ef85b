//! Makes a failing scenario shorter.

use super::{run::run, scenario::Scenario};

/// How many runs the search may take.
const MAX_RUNS: usize = 3000;
/// A shorter scenario may need other delays to fail: so many seeds are tried.
const SEEDS: u64 = 8;

/// Leaves out entries as long as the scenario still fails, at first many at once.
pub(crate) fn shrink(scenario: &Scenario) -> Scenario {
    let mut shortest = scenario.clone();
    let mut runs = MAX_RUNS;
    let mut chunk = shortest.timeline.len().div_ceil(2).max(1);
    loop {
        let (mut start, mut shorter) = (0, false);
        while start < shortest.timeline.len() && runs > 0 {
            let end = (start + chunk).min(shortest.timeline.len());
            let mut candidate = shortest.clone();
            candidate.timeline.drain(start..end);
            match failing(&candidate, &mut runs) {
                Some(failing) => (shortest, shorter) = (failing, true),
                None => start = end,
            }
        }
        if (chunk == 1 && !shorter) || runs == 0 {
            return shortest;
        }
        chunk = chunk.div_ceil(2).max(1);
    }
}

/// The scenario with a seed with which it fails, if there is one.
fn failing(scenario: &Scenario, runs: &mut usize) -> Option<Scenario> {
    let mut candidate = scenario.clone();
    for more in 0..SEEDS {
        *runs = runs.checked_sub(1)?;
        candidate.settings.seed = scenario.settings.seed.wrapping_add(more);
        if !run(&candidate, false).wrong.is_empty() {
            return Some(candidate);
        }
    }
    None
}
