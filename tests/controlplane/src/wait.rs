//! Waiting for a condition instead of for time to pass.

use std::future::Future;
use std::thread;
use std::time::{Duration, Instant};

/// The time between two checks of a condition.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Checks `condition` until it holds, for at most `timeout`, and returns whether it did.
///
/// The condition is checked once more after the deadline, in case the machine froze in between.
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
        thread::sleep(POLL_INTERVAL);
    }
}

/// As [`eventually`], for async code: polls `condition` until it returns a value; `None` after `timeout`.
pub async fn poll<T, F: Future<Output = Option<T>>>(
    timeout: Duration,
    mut condition: impl FnMut() -> F,
) -> Option<T> {
    // `None` if the timeout is too long to matter.
    let deadline = Instant::now().checked_add(timeout);
    loop {
        let last = deadline.is_some_and(|deadline| Instant::now() >= deadline);
        let value = condition().await;
        if value.is_some() || last {
            return value;
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}
