//! How far a Go build is, and how long it will still take.
//!
//! `go list` names the packages that are not in Go's build cache yet, and `go build -v` prints each one when it begins
//! to compile it. Packages differ by a factor of hundreds in the time they take. It is about proportional to the number
//! of files and imports: in a build of the control plane, the part that was done by this measure never differed by more
//! than four percent of the whole from the part of the processor time that was used.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use indicatif::HumanCount;

/// For `go list -f`: a line for each package that has to be compiled, with the number of its files and imports.
pub(crate) const LIST_FORMAT: &str = "{{if .Stale}}{{.ImportPath}} {{len .GoFiles}} {{len .Imports}}{{end}}";

/// What linking a program takes, in files and imports to compile.
const LINK_WEIGHT: u64 = 250;

/// The estimate follows the speed of this time: it changes when cargo, which compiles beside Go, has finished.
const WINDOW: Duration = Duration::from_secs(90);
/// Nothing is estimated before: the first packages say little about the others.
const FIRST_ESTIMATE: Duration = Duration::from_secs(10);

/// What Go has done, of what it has to do.
pub(crate) struct Progress {
    /// The packages that Go has not begun to compile.
    waiting: HashMap<String, u64>,
    packages: usize,
    programs: usize,
    linked: usize,
    /// The weight of everything, and of what is done.
    total: u64,
    done: u64,
    /// When how much was done, oldest first, about as far back as [`WINDOW`].
    history: VecDeque<(Duration, u64)>,
}

impl Progress {
    /// Reads what `go list` printed with [`LIST_FORMAT`].
    pub(crate) fn new(list: &str, programs: usize) -> Self {
        let waiting: HashMap<String, u64> = list
            .lines()
            .filter_map(|line| {
                let mut fields = line.split(' ');
                let package = fields.next().filter(|package| !package.is_empty())?;
                Some((package.to_owned(), fields.filter_map(|field| field.parse::<u64>().ok()).sum()))
            })
            .collect();
        let total = waiting.values().sum::<u64>() + programs as u64 * LINK_WEIGHT;
        let history = VecDeque::from([(Duration::ZERO, 0)]);
        Self { packages: waiting.len(), waiting, programs, linked: 0, total, done: 0, history }
    }

    /// Takes a line of `go build -v`, and returns whether it is the name of a package. Any other line is for people.
    pub(crate) fn read(&mut self, line: &str) -> bool {
        let package = self.waiting.remove(line);
        self.done += package.unwrap_or_default();
        package.is_some()
    }

    /// Notes how many programs are linked, after this time.
    pub(crate) fn update(&mut self, linked: usize, elapsed: Duration) {
        let linked = linked.clamp(self.linked, self.programs);
        self.done += (linked - self.linked) as u64 * LINK_WEIGHT;
        self.linked = linked;
        self.history.push_back((elapsed, self.done));
        while self.history.get(1).is_some_and(|(then, _)| elapsed.saturating_sub(*then) >= WINDOW) {
            self.history.pop_front();
        }
    }

    /// The part that is done, from 0 to 1.
    pub(crate) fn fraction(&self) -> f64 {
        self.done as f64 / self.total.max(1) as f64
    }

    /// How long the rest takes at the speed of the last [`WINDOW`].
    fn left(&self) -> Option<Duration> {
        let ((then, before), (now, done)) = (*self.history.front()?, *self.history.back()?);
        let speed = (done - before) as f64 / (now - then).as_secs_f64();
        let left = Duration::try_from_secs_f64((self.total - done) as f64 / speed).ok()?;
        (now >= FIRST_ESTIMATE).then_some(left)
    }
}

impl std::fmt::Display for Progress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let packages = HumanCount(self.packages as u64);
        if self.waiting.is_empty() {
            write!(f, "linking: {} of {} programs", self.linked, self.programs)?;
        } else {
            write!(f, "{} of {packages} packages", HumanCount((self.packages - self.waiting.len()) as u64))?;
        }
        match self.left().map(|left| left.as_secs()) {
            None => Ok(()),
            Some(seconds @ 0..90) => write!(f, ", about {} s left", (seconds / 10 + 1) * 10),
            Some(seconds) => write!(f, ", about {} min left", (seconds + 30) / 60),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn progress() -> Progress {
        Progress::new("fmt 4 16\n\nk8s.io/api/core/v1 10 490\nmain 1 0\n", 2)
    }

    fn after(progress: &mut Progress, seconds: u64, linked: usize) -> String {
        progress.update(linked, Duration::from_secs(seconds));
        progress.to_string()
    }

    #[test]
    fn packages_are_counted_and_every_other_line_is_for_people() {
        let mut progress = progress();
        assert_eq!(progress.to_string(), "0 of 3 packages");
        assert!(progress.read("fmt"));
        assert!(!progress.read("# k8s.io/api/core/v1"), "the heading of an error");
        assert!(!progress.read("go: downloading k8s.io/api v0.36.3"));
        assert!(!progress.read("fmt"), "each package counts once");
        assert_eq!(progress.to_string(), "1 of 3 packages");
    }

    #[test]
    fn package_counts_by_its_files_and_imports() {
        let mut progress = progress();
        progress.read("fmt");
        let small = progress.fraction();
        progress.read("k8s.io/api/core/v1");
        assert!(progress.fraction() > 10.0 * small, "{small} {}", progress.fraction());
        assert!(progress.fraction() < 1.0, "the programs are not linked");
        progress.read("main");
        progress.update(2, Duration::from_secs(1));
        assert!((progress.fraction() - 1.0).abs() < f64::EPSILON, "{}", progress.fraction());
    }

    #[test]
    fn estimate_begins_late_follows_the_recent_speed_and_includes_linking() {
        let list: String = (0..1180).map(|number| format!("p{number} 5 15\n")).collect();
        let mut progress = Progress::new(&list, 4);
        let read = |progress: &mut Progress, from: usize, to: usize| {
            for number in from..to {
                assert!(progress.read(&format!("p{number}")));
            }
        };
        read(&mut progress, 0, 20);
        assert_eq!(after(&mut progress, 5, 0), "20 of 1,180 packages");
        read(&mut progress, 20, 120);
        assert_eq!(after(&mut progress, 60, 0), "120 of 1,180 packages, about 9 min left");
        read(&mut progress, 120, 420);
        assert_eq!(after(&mut progress, 150, 0), "420 of 1,180 packages, about 4 min left");
        read(&mut progress, 420, 1180);
        assert_eq!(after(&mut progress, 240, 0), "linking: 0 of 4 programs, about 10 s left");
        assert_eq!(after(&mut progress, 245, 3), "linking: 3 of 4 programs, about 10 s left");
    }

    #[test]
    fn build_with_everything_compiled_only_links() {
        let mut progress = Progress::new("\n\n", 4);
        assert_eq!(after(&mut progress, 3, 1), "linking: 1 of 4 programs");
        assert_eq!(after(&mut progress, 4, 9), "linking: 4 of 4 programs", "never more than there are");
    }

    #[test]
    fn stalled_build_has_no_estimate() {
        let mut progress = progress();
        assert_eq!(after(&mut progress, 30, 0), "0 of 3 packages");
    }
}
