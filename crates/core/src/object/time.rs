//! Times on two clocks, and arithmetic that cannot fail.

use std::time::{Duration, Instant};

use k8s_openapi::jiff::Timestamp;

/// The same moment on both clocks. Delays of this process are measured by the monotonic one; what others write, and
/// certificates, are known by the wall clock.
#[derive(Debug, Clone, Copy)]
pub struct Moment {
    pub instant: Instant,
    pub wall: Timestamp,
}

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
