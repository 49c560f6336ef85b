//! PURE. How soon to do again what had to be done before.

use std::time::{Duration, Instant};

const FIRST: Duration = Duration::from_millis(100);
const LAST: Duration = Duration::from_secs(30);
/// After this long without need, the next time is the first again. Longer than the longest wait.
const QUIET: Duration = Duration::from_mins(1);

/// At once the first time; then ever later, until it has not been needed for a while.
#[derive(Debug, Default)]
pub struct Backoff {
    last: Option<Instant>,
    wait: Duration,
}

impl Backoff {
    /// How long to wait before doing it.
    #[must_use]
    pub fn wait(&self, now: Instant) -> Duration {
        let passed = self.last.map_or(QUIET, |last| now.saturating_duration_since(last));
        if passed >= QUIET { Duration::ZERO } else { self.wait.saturating_sub(passed) }
    }

    /// It is being done.
    pub fn done(&mut self, now: Instant) {
        let passed = self.last.map_or(QUIET, |last| now.saturating_duration_since(last));
        self.wait = if passed >= QUIET { FIRST } else { (self.wait * 2).clamp(FIRST, LAST) };
        self.last = Some(now);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_time_is_at_once_and_every_further_one_later() {
        let (mut now, mut backoff) = (Instant::now(), Backoff::default());
        let mut waits = Vec::new();
        for _ in 0..10 {
            waits.push(backoff.wait(now).as_millis());
            now += backoff.wait(now);
            backoff.done(now);
        }
        assert_eq!(waits, [0, 100, 200, 400, 800, 1600, 3200, 6400, 12800, 25600]);
        // Never longer than this, and in time.
        assert_eq!(backoff.wait(now + Duration::from_secs(29)), Duration::from_secs(1));
        assert_eq!(backoff.wait(now + Duration::from_secs(45)), Duration::ZERO);
    }

    #[test]
    fn after_a_quiet_minute_it_is_the_first_time_again() {
        let (now, mut backoff) = (Instant::now(), Backoff::default());
        for _ in 0..5 {
            backoff.done(now);
        }
        let later = now + QUIET;
        assert_eq!(backoff.wait(later), Duration::ZERO);
        backoff.done(later);
        assert_eq!(backoff.wait(later), FIRST);
    }
}
