//! Waiting for a condition instead of for time to pass.

use std::thread;
use std::time::{Duration, Instant};

/// How long to rest between two looks at a condition.
const PAUSE: Duration = Duration::from_millis(25);

/// Looks at `condition` until it holds, for at most `timeout`, and says whether it did.
///
/// The condition is looked at once more after the time is up, so that a machine that froze in
/// between does not make a condition fail that holds.
pub fn eventually(timeout: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + timeout;
    loop {
        let last = Instant::now() >= deadline;
        if condition() {
            return true;
        }
        if last {
            return false;
        }
        thread::sleep(PAUSE);
    }
}
