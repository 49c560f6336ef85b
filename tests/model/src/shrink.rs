//! Makes a failing history shorter.

use crate::history::History;

/// Leaves out steps as long as the history still fails, at first many at once. `fails` runs a history, at most `tries`
/// times.
pub fn shrink(history: &History, tries: usize, mut fails: impl FnMut(&History) -> bool) -> History {
    let mut shortest = history.clone();
    let mut tries = tries;
    let mut chunk = shortest.steps.len().div_ceil(2).max(1);
    loop {
        let mut start = 0;
        let mut shorter = false;
        while start < shortest.steps.len() {
            if tries == 0 {
                return shortest;
            }
            tries -= 1;
            let end = (start + chunk).min(shortest.steps.len());
            let mut candidate = shortest.clone();
            candidate.steps.drain(start..end);
            if fails(&candidate) {
                shortest = candidate;
                shorter = true;
            } else {
                start = end;
            }
        }
        if chunk == 1 && !shorter {
            return shortest;
        }
        chunk = chunk.div_ceil(2).max(1);
    }
}
