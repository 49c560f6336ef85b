//! PURE. Bounds how many lines requests can make us log, and counts the suppressed ones.

use std::time::{Duration, Instant};

const MAX_LINES_PER_SECOND: u32 = 20;

#[derive(Default)]
pub struct LogRateLimit {
    window_start: Option<Instant>,
    lines: u32,
    suppressed: u64,
}

impl LogRateLimit {
    /// None if the line must be suppressed; otherwise, how many lines were suppressed since the last one.
    pub fn admit(&mut self, now: Instant) -> Option<u64> {
        if self.window_start.is_none_or(|start| now.duration_since(start) >= Duration::from_secs(1)) {
            (self.window_start, self.lines) = (Some(now), 0);
        }
        if self.lines == MAX_LINES_PER_SECOND {
            self.suppressed += 1;
            return None;
        }
        self.lines += 1;
        Some(std::mem::take(&mut self.suppressed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_beyond_the_limit_are_suppressed_and_counted() {
        let (mut limit, start) = (LogRateLimit::default(), Instant::now());
        let logged = (0..1000).filter_map(|ms| limit.admit(start + Duration::from_millis(ms / 2))).count();
        assert_eq!(logged, 20);
        assert_eq!(limit.admit(start + Duration::from_secs(1)), Some(980));
        assert_eq!(limit.admit(start + Duration::from_secs(1)), Some(0));
    }
}
