//! What happens in one run: the settings, what people do and which faults occur, and when. From a seed, or from a text.

use std::{fmt, time::Duration};

use fastrand::Rng;
use model::{Names, Step};
use serde::{Deserialize, Serialize};
use serde_json::json;

/// How many replicas run.
pub(crate) const REPLICAS: usize = 2;
/// How many watches a replica has.
pub(crate) const WATCHES: usize = 5;

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Scenario {
    pub settings: Settings,
    pub timeline: Vec<Entry>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Settings {
    /// The seed of everything that the timeline does not say: delays, losses, the order of deliveries.
    pub seed: u64,
    pub lease_seconds: u64,
    pub resync_seconds: u64,
    pub delete_grace_seconds: u64,
    pub source_cache: usize,
    pub workers: usize,
    pub writes: usize,
}

/// Something that happens so many milliseconds after the start.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Entry {
    pub at: u64,
    pub what: What,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum What {
    Step(Step),
    Fault(Fault),
}

/// Times are in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Fault {
    /// A replica ends without warning; another one starts in its place after a while.
    Crash { replica: usize, down: u64 },
    /// A replica does not run for a while, as after SIGSTOP, and knows nothing of it.
    Pause { replica: usize, time: u64 },
    /// A replica does not reach the API server for a while. Its connections hang.
    Partition { replica: usize, time: u64 },
    /// The connection of a watch breaks.
    Break { replica: usize, watch: usize },
    /// A watch shows nothing for a while.
    Stall { replica: usize, watch: usize, time: u64 },
    /// The version from which a watch would be resumed has expired, and its connection breaks.
    Expire { replica: usize, watch: usize },
    /// The API server forgets earlier versions: a watch that is resumed from one of them has to list.
    Compact,
    /// Requests fail for a while, before or after they take effect; one in so many.
    Flaky { time: u64, one_in: u32 },
    /// The API server is down for a while.
    Outage { time: u64 },
    /// etcd is restored from a backup taken before so many of the last steps. With `bump`, versions go on from a higher
    /// one.
    Restore { steps: usize, down: u64, bump: bool },
}

pub(crate) fn names() -> Names {
    Names::new("workshop.io", "")
}

impl Scenario {
    /// A random scenario. The same seed gives the same one.
    pub(crate) fn generate(seed: u64) -> Self {
        let mut random = Rng::with_seed(seed ^ 0x005e_ed0f_5cea_4a10);
        let pick = |random: &mut Rng, from: &[u64]| from[random.usize(0..from.len())];
        let settings = Settings {
            seed: random.u64(..),
            lease_seconds: pick(&mut random, &[3, 6, 15]),
            // Seldom, so that a lost wake-up is seen.
            resync_seconds: pick(&mut random, &[30, 3600, 3600, 3600]),
            delete_grace_seconds: pick(&mut random, &[0, 0, 2, 3600]),
            source_cache: pick(&mut random, &[0, 1500, 64 << 20, 64 << 20]) as usize,
            workers: random.usize(1..=2),
            writes: random.usize(1..=6),
        };
        let length = random.usize(3..=30);
        let history = model::generate(random.u64(..), length, &names());
        // Some histories are a burst, some take minutes.
        let pace = pick(&mut random, &[3, 30, 300, 2000]);
        let faults = pick(&mut random, &[0, 1, 1, 2, 3, 6]);
        let (mut at, mut timeline) = (random.u64(0..2000), Vec::new());
        for step in history.steps {
            timeline.push(Entry { at, what: What::Step(step) });
            at += random.u64(0..=2 * pace);
        }
        for _ in 0..faults {
            let fault = Fault::generate(&mut random);
            timeline.push(Entry { at: random.u64(0..=at), what: What::Fault(fault) });
        }
        timeline.sort_by_key(|entry| entry.at);
        Self { settings, timeline }
    }

    /// Reads what `Display` prints.
    pub(crate) fn parse(text: &str) -> Result<Self, serde_json::Error> {
        let mut lines = text.lines().filter(|line| !line.trim().is_empty() && !line.starts_with('#'));
        let settings = serde_json::from_str(lines.next().unwrap_or_default())?;
        let timeline = lines.map(serde_json::from_str).collect::<Result<_, _>>()?;
        Ok(Self { settings, timeline })
    }

    /// When the last entry has happened and no fault lasts any more.
    pub(crate) fn length(&self) -> Duration {
        let end = |entry: &Entry| match &entry.what {
            What::Step(_) => entry.at,
            What::Fault(fault) => entry.at + fault.time(),
        };
        Duration::from_millis(self.timeline.iter().map(end).max().unwrap_or_default())
    }
}

impl Fault {
    /// How long it lasts, in milliseconds.
    const fn time(&self) -> u64 {
        match self {
            Self::Crash { down: time, .. }
            | Self::Pause { time, .. }
            | Self::Partition { time, .. }
            | Self::Stall { time, .. }
            | Self::Flaky { time, .. }
            | Self::Outage { time }
            | Self::Restore { down: time, .. } => *time,
            Self::Break { .. } | Self::Expire { .. } | Self::Compact => 0,
        }
    }

    fn generate(random: &mut Rng) -> Self {
        let (replica, watch) = (random.usize(0..REPLICAS), random.usize(0..WATCHES));
        let time = match random.u32(0..3) {
            0 => random.u64(1..200),
            1 => random.u64(200..3000),
            _ => random.u64(3000..30_000),
        };
        match random.u32(0..14) {
            0..=1 => Self::Crash { replica, down: time },
            2..=3 => Self::Pause { replica, time },
            4 => Self::Partition { replica, time },
            5 => Self::Break { replica, watch },
            6..=7 => Self::Stall { replica, watch, time },
            8 => Self::Expire { replica, watch },
            9 => Self::Compact,
            10..=11 => Self::Flaky { time, one_in: random.u32(2..8) },
            12 => Self::Outage { time },
            _ => Self::Restore { steps: random.usize(0..12), down: time, bump: random.bool() },
        }
    }
}

impl fmt::Display for Scenario {
    /// One line of JSON with the settings, then one for each entry.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}", json!(self.settings))?;
        self.timeline.iter().try_for_each(|entry| writeln!(f, "{}", json!(entry)))
    }
}
