//! PURE. So many log lines a second, whoever makes us write them; what was left out is counted.

use std::time::{Duration, Instant};

/// Lines in any one second.
const MOST: u32 = 20;

#[derive(Debug, Default)]
pub struct Pace {
    since: Option<Instant>,
    lines: u32,
    left_out: u64,
}

impl Pace {
    /// Whether to write a line now, and how many were left out since the last.
    pub fn next(&mut self, now: Instant) -> Option<u64> {
        if self.since.is_none_or(|since| now.duration_since(since) >= Duration::from_secs(1)) {
            (self.since, self.lines) = (Some(now), 0);
        }
        if self.lines == MOST {
            self.left_out += 1;
            return None;
        }
        self.lines += 1;
        Some(std::mem::take(&mut self.left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flood_is_counted_instead_of_written() {
        let (mut pace, start) = (Pace::default(), Instant::now());
        let written = (0..1000).filter_map(|ms| pace.next(start + Duration::from_millis(ms / 2))).count();
        assert_eq!(written, 20);
        assert_eq!(pace.next(start + Duration::from_secs(1)), Some(980));
        assert_eq!(pace.next(start + Duration::from_secs(1)), Some(0));
    }
}
