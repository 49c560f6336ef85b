//! When one object may be written again: not while a write is in flight, not before the watch has shown the last
//! write, and later each time when somebody keeps undoing our writes.

use std::time::{Duration, Instant};

use crate::failure::backoff::Backoff;

/// How long to wait for the watch to show our write before deciding again.
pub const WATCH_LAG: Duration = Duration::from_secs(5);

const BACKOFF: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(30));
/// After this time without a counted attempt the next one is the first again. Longer than the longest delay.
const RESET_AFTER: Duration = Duration::from_mins(1);

/// The writes to one object, as far as they decide when the next one may be sent.
#[derive(Debug, Clone, Default)]
pub struct WriteHistory {
    in_flight: bool,
    failing: bool,
    /// What the last write said. Attempts to write something else do not count.
    content: String,
    /// The resourceVersion the last answered write was based on, and when the answer came.
    answered: Option<(String, Instant)>,
    attempts: u32,
    last_attempt: Option<Instant>,
}

impl WriteHistory {
    /// How long to wait before this content may be written to this version of the object; none while a write is in
    /// flight. A write that cannot recur backs off only after a failure.
    pub fn wait(&self, content: &str, version: &str, may_recur: bool, now: Instant) -> Option<Duration> {
        if self.in_flight {
            return None;
        }
        if content != self.content {
            return Some(Duration::ZERO);
        }
        let watch_lag = match &self.answered {
            Some((answered, at)) if answered == version => WATCH_LAG.saturating_sub(since(*at, now)),
            _ => Duration::ZERO,
        };
        let backoff = match self.last_attempt {
            Some(last) if may_recur || self.failing => self.delay(since(last, now)),
            _ => Duration::ZERO,
        };
        Some(watch_lag.max(backoff))
    }

    pub fn started(&mut self, content: &str, may_recur: bool, now: Instant) {
        if content != self.content {
            *self = Self { content: content.to_owned(), ..Self::default() };
        }
        self.in_flight = true;
        if may_recur {
            self.count(now);
        }
    }

    /// The write succeeded, or was refused because the object has changed: the watch shows its new state.
    pub fn answered(&mut self, version: &str, now: Instant) {
        self.in_flight = false;
        self.failing = false;
        self.answered = Some((version.to_owned(), now));
    }

    /// The watch shows this version. If it is another than our last write was based on, that write is no longer waited
    /// for: an object that is deleted again has the same version as before it was created, none.
    pub fn seen(&mut self, version: &str) {
        self.answered.take_if(|(answered, _)| answered != version);
    }

    pub fn failed(&mut self, may_recur: bool, now: Instant) {
        self.in_flight = false;
        self.failing = true;
        self.answered = None;
        // A write that may recur was counted when it started.
        if !may_recur {
            self.count(now);
        }
    }

    fn delay(&self, passed: Duration) -> Duration {
        match self.attempts {
            0 => Duration::ZERO,
            _ if passed >= RESET_AFTER => Duration::ZERO,
            attempts => BACKOFF.delay(attempts - 1).saturating_sub(passed),
        }
    }

    fn count(&mut self, now: Instant) {
        let starts_over = self.last_attempt.is_none_or(|last| since(last, now) >= RESET_AFTER);
        self.attempts = if starts_over { 1 } else { self.attempts.saturating_add(1) };
        self.last_attempt = Some(now);
    }
}

fn since(at: Instant, now: Instant) -> Duration {
    now.saturating_duration_since(at)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn recurring_writes_back_off_until_a_quiet_minute_has_passed() {
        let (mut now, mut writes) = (Instant::now(), WriteHistory::default());
        let mut waits = Vec::new();
        for version in 0..10 {
            let wait = writes.wait("", &version.to_string(), true, now).unwrap();
            waits.push(wait.as_millis());
            now += wait;
            writes.started("", true, now);
            writes.answered(&version.to_string(), now);
        }
        assert_eq!(waits, [0, 100, 200, 400, 800, 1600, 3200, 6400, 12800, 25600]);
        let wait = |writes: &WriteHistory, seconds| writes.wait("", "10", true, now + SECOND * seconds);
        assert_eq!(wait(&writes, 29), Some(SECOND), "never longer than 30 s");
        assert_eq!(wait(&writes, 45), Some(Duration::ZERO));
        let later = now + RESET_AFTER;
        writes.started("", true, later);
        writes.answered("10", later);
        assert_eq!(writes.wait("", "11", true, later), Some(BACKOFF.first), "the first attempt again");
    }

    #[test]
    fn object_that_is_deleted_after_the_watch_has_shown_our_write_is_written_again_without_a_lag() {
        let (now, mut writes) = (Instant::now(), WriteHistory::default());
        writes.started("", false, now);
        writes.answered("", now);
        writes.seen("");
        assert_eq!(writes.wait("", "", false, now), Some(WATCH_LAG), "the watch has not shown our write");
        writes.seen("7");
        writes.seen("");
        assert_eq!(writes.wait("", "", false, now), Some(Duration::ZERO));
    }

    #[test]
    fn other_content_is_written_at_once_unless_a_write_is_in_flight() {
        let (now, mut writes) = (Instant::now(), WriteHistory::default());
        writes.started("a", true, now);
        assert_eq!(writes.wait("b", "1", true, now), None);
        writes.answered("1", now);
        assert_eq!(writes.wait("a", "1", true, now), Some(WATCH_LAG), "the watch has not shown our write");
        assert_eq!(writes.wait("a", "2", true, now), Some(BACKOFF.first), "somebody undid it");
        assert_eq!(writes.wait("b", "1", true, now), Some(Duration::ZERO));
    }

    #[test]
    fn each_failure_counts_once_and_an_answer_ends_the_failure() {
        for may_recur in [false, true] {
            let (now, mut writes) = (Instant::now(), WriteHistory::default());
            for delay in [100, 200, 400] {
                writes.started("", may_recur, now);
                writes.failed(may_recur, now);
                assert_eq!(writes.wait("", "1", false, now), Some(Duration::from_millis(delay)));
            }
            writes.started("", false, now);
            writes.answered("1", now);
            assert_eq!(writes.wait("", "2", false, now), Some(Duration::ZERO));
        }
    }
}
