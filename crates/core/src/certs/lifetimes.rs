//! How long certificates are valid, and the delays that follow from that.

use std::time::Duration;

use k8s_openapi::jiff::Timestamp;

use crate::object::time::{between, later};

/// Certificates are checked at least this often: timers of a machine that was suspended fire late.
pub const MAX_SLEEP: Duration = Duration::from_mins(1);

/// How long certificates are valid, and the delays of a rotation that follow from that.
#[derive(Debug, Clone, Copy)]
pub struct Lifetimes {
    pub ca_validity: Duration,
    pub leaf_validity: Duration,
}

impl Lifetimes {
    /// How long a change of the webhook configurations takes to reach every API server.
    pub(crate) fn propagation_delay(&self) -> Duration {
        (self.ca_validity / 12).clamp(Duration::from_secs(1), Duration::from_mins(1))
    }

    /// How long an extra CA stays in the webhook configurations. Longer than a watch may stall: the Secret may have a
    /// next CA that our watch has not shown yet.
    pub(crate) fn removal_delay(&self) -> Duration {
        self.propagation_delay() * 4
    }

    /// How long after a revoked CA was replaced it stays trusted. Longer than a watch may stall: by then every replica
    /// that reaches the API server serves a leaf of the new one.
    pub(crate) fn revoke_after(&self) -> Duration {
        self.removal_delay().min(self.retire_after())
    }

    /// How long after a CA was replaced its leaves may be served.
    pub(crate) fn retire_after(&self) -> Duration {
        self.leaf_validity + self.propagation_delay()
    }
}

/// Something to do now, or the time to check again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Due<T> {
    Now(T),
    At(Timestamp),
}

pub(crate) fn two_thirds(from: Timestamp, to: Timestamp) -> Timestamp {
    later(from, between(from, to) * 2 / 3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn propagation_delay_is_a_twelfth_of_the_ca_validity_between_a_second_and_a_minute() {
        let delay = |ca_validity| {
            Lifetimes { ca_validity, leaf_validity: Duration::from_secs(6) }.propagation_delay()
        };
        assert_eq!(delay(Duration::from_secs(24)), Duration::from_secs(2));
        assert_eq!(delay(Duration::from_hours(365 * 24)), Duration::from_mins(1));
        assert_eq!(delay(Duration::from_secs(3)), Duration::from_secs(1));
    }
}
