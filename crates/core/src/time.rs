//! Arithmetic with times that cannot fail.

use std::time::Duration;

use k8s_openapi::jiff::Timestamp;

pub fn later(at: Timestamp, by: Duration) -> Timestamp {
    at.saturating_add(by).unwrap_or(Timestamp::MAX)
}

pub(crate) fn earlier(at: Timestamp, by: Duration) -> Timestamp {
    at.saturating_sub(by).unwrap_or(Timestamp::MIN)
}

/// The time from one timestamp to a later one; zero if it is not later.
pub(crate) fn between(from: Timestamp, to: Timestamp) -> Duration {
    Duration::try_from(to.duration_since(from)).unwrap_or_default()
}
