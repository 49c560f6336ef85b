//! The clocks. Whatever waits for a time reads it here, so that a test with tokio's paused clock drives all of it.

use std::time::{Duration, Instant};

use k8s_openapi::jiff::Timestamp;

/// The monotonic clock. It is tokio's, which is the system's unless a test has paused it.
pub fn now() -> Instant {
    tokio::time::Instant::now().into_std()
}

/// How long ago an instant was.
pub fn elapsed(since: Instant) -> Duration {
    now().saturating_duration_since(since)
}

/// The time of day.
#[cfg(not(test))]
pub fn wall() -> Timestamp {
    Timestamp::now()
}

/// The time of day. It goes as [`now`] does.
#[cfg(test)]
pub fn wall() -> Timestamp {
    static START: std::sync::LazyLock<(Instant, Timestamp)> =
        std::sync::LazyLock::new(|| (Instant::now(), Timestamp::now()));
    let (start, wall) = *START;
    let now = now();
    match now.checked_duration_since(start) {
        Some(passed) => wall + passed,
        None => wall - start.saturating_duration_since(now),
    }
}
