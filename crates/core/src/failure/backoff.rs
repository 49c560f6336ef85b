//! Exponential backoff for everything that is tried again, and its log lines.

use std::time::Duration;

/// A delay of `first` before the second attempt, doubled before each further one, `max` at most.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backoff {
    pub first: Duration,
    pub max: Duration,
}

impl Backoff {
    pub const fn new(first: Duration, max: Duration) -> Self {
        Self { first, max }
    }

    /// The delay after an attempt has failed, given the number of failures before it.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use lockstep_core::failure::backoff::Backoff;
    /// let backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(1));
    /// let delays: Vec<u128> = (0..5).map(|failures| backoff.delay(failures).as_millis()).collect();
    /// assert_eq!(delays, [200, 400, 800, 1000, 1000]);
    /// ```
    pub fn delay(self, failures: u32) -> Duration {
        self.first.saturating_mul(1 << failures.min(16)).min(self.max)
    }

    /// As [`Self::delay`], scaled down by a jitter between 0 and 1: to half of it at least, so that many clients
    /// that failed at once do not all retry at once.
    pub(crate) fn jittered(self, failures: u32, jitter: f64) -> Duration {
        self.delay(failures).mul_f64(f64::midpoint(1.0, jitter))
    }
}

/// A loop that tries again: counts failures until one attempt succeeds.
#[derive(Debug)]
pub struct Retry {
    backoff: Backoff,
    failures: u32,
}

impl Retry {
    pub const fn new(backoff: Backoff) -> Self {
        Self { backoff, failures: 0 }
    }

    /// The delay after one more failure, with jitter.
    pub fn next_delay(&mut self) -> Duration {
        let delay = self.backoff.jittered(self.failures, fastrand::f64());
        self.failures = self.failures.saturating_add(1);
        delay
    }

    /// An attempt succeeded: the next failure is the first again.
    pub const fn reset(&mut self) {
        self.failures = 0;
    }
}

/// A failure that is retried: logged once, and again only when its text changes.
#[derive(Debug, Default)]
pub struct LogOnce(String);

impl LogOnce {
    /// Whether this failure differs from the last one, and so belongs in the log.
    pub fn is_new(&mut self, text: &str) -> bool {
        let new = self.0 != text;
        text.clone_into(&mut self.0);
        new
    }

    /// The next failure is logged, whatever it is.
    pub fn resolved(&mut self) {
        self.0.clear();
    }

    /// Whether the last attempt failed.
    pub const fn is_failing(&self) -> bool {
        !self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAX: Duration = Duration::from_secs(60);

    #[test]
    fn delays_double_up_to_the_maximum_and_jitter_never_halves_them_more_than_once() {
        for first in [Duration::from_millis(200), Duration::from_secs(1)] {
            let backoff = Backoff::new(first, MAX);
            for failures in 0..40 {
                let full = first.saturating_mul(2_u32.saturating_pow(failures)).min(MAX);
                assert_eq!(backoff.delay(failures), full);
                for jitter in [0.0, 0.5, 1.0] {
                    let delay = backoff.jittered(failures, jitter);
                    assert!(full / 2 <= delay && delay <= full, "{failures} {jitter}: {delay:?}");
                }
            }
        }
    }

    #[test]
    fn success_makes_the_next_failure_the_first() {
        let first = Duration::from_secs(1);
        let mut retry = Retry::new(Backoff::new(first, MAX));
        assert!(retry.next_delay() <= first);
        assert!(retry.next_delay() >= first);
        retry.reset();
        assert!(retry.next_delay() <= first);
    }

    #[test]
    fn failure_is_logged_once_until_its_text_changes_or_it_is_resolved() {
        let mut log_once = LogOnce::default();
        assert!(log_once.is_new("a") && !log_once.is_new("a") && log_once.is_new("b"));
        assert!(log_once.is_failing());
        log_once.resolved();
        assert!(!log_once.is_failing() && log_once.is_new("b"));
    }
}
