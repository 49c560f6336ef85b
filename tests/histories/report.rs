//! What a soak has shown: a table of faults, and a plot of memory.

use std::{collections::BTreeMap, fmt::Write as _, time::Duration};

use crate::faults::Fault;

/// The size of the plot.
const WIDTH: f64 = 800.0;
const HEIGHT: f64 = 260.0;
/// Where the axes are.
const LEFT: f64 = 50.0;
const RIGHT: f64 = 790.0;
const TOP: f64 = 20.0;
const BOTTOM: f64 = 220.0;
/// The plot has at most so many points for each replica.
const MAX_POINTS: usize = 300;

/// How long it took to catch up, by what went wrong.
#[derive(Default)]
pub(crate) struct Convergence(BTreeMap<Situation, Vec<Duration>>);

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Situation {
    NoFault,
    Alone(Fault),
    Several,
}

/// Resident memory of both replicas: when, in seconds, and how much, in KiB.
pub(crate) type Memory = Vec<(f64, [Option<u64>; 2])>;

impl Convergence {
    pub(crate) fn add(&mut self, faults: &[Fault], took: Duration) {
        let situation = match faults {
            [] => Situation::NoFault,
            [fault] => Situation::Alone(*fault),
            _ => Situation::Several,
        };
        self.0.entry(situation).or_default().push(took);
    }

    /// As Markdown.
    pub(crate) fn table(&self) -> String {
        let mut text = "| fault | times | p50 | p99 | max |\n| --- | --- | --- | --- | --- |\n".to_owned();
        for (situation, times) in &self.0 {
            let mut times = times.clone();
            times.sort_unstable();
            let quantile =
                |percent: usize| times[(times.len() * percent).div_ceil(100).max(1) - 1].as_secs_f64();
            let what = match situation {
                Situation::NoFault => "none",
                Situation::Alone(fault) => fault.describe(),
                Situation::Several => "three of these at a time",
            };
            let (p50, p99, max) = (quantile(50), quantile(99), quantile(100));
            let _ = writeln!(text, "| {what} | {} | {p50:.2} s | {p99:.2} s | {max:.2} s |", times.len());
        }
        text
    }
}

/// A plot of memory over time, in colours that can be read on light and dark pages.
pub(crate) fn plot(memory: &Memory) -> String {
    let end = memory.last().map_or(1.0, |(seconds, _)| seconds.max(1.0));
    let most =
        memory.iter().flat_map(|(_, both)| both).flatten().max().map_or(1.0, |kib| *kib as f64 / 1024.0);
    let top = (most / 10.0).ceil() * 10.0;
    let x = |seconds: f64| LEFT + (RIGHT - LEFT) * seconds / end;
    let y = |mib: f64| BOTTOM - (BOTTOM - TOP) * mib / top;
    let mut svg = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" \
         font-size=\"12\" fill=\"#888\">\n"
    );
    for line in 0..=4 {
        let mib = top * f64::from(line) / 4.0;
        let (y, label) = (y(mib), y(mib) + 4.0);
        let _ = writeln!(svg, "<path d=\"M{LEFT} {y:.0}H{RIGHT}\" stroke=\"#888\" stroke-opacity=\".3\"/>");
        let _ =
            writeln!(svg, "<text x=\"{}\" y=\"{label:.0}\" text-anchor=\"end\">{mib:.0}</text>", LEFT - 6.0);
    }
    for tick in 0..=5 {
        let seconds = end * f64::from(tick) / 5.0;
        let _ = writeln!(
            svg,
            "<text x=\"{:.0}\" y=\"{}\" text-anchor=\"middle\">{:.0} min</text>",
            x(seconds),
            BOTTOM + 18.0,
            seconds / 60.0
        );
    }
    let step = memory.len().div_ceil(MAX_POINTS).max(1);
    for (replica, colour) in ["#3b82f6", "#f97316"].into_iter().enumerate() {
        let mut path = String::new();
        let mut draws = false;
        for (seconds, both) in memory.iter().step_by(step) {
            match both[replica] {
                // A replica that does not run leaves a gap.
                None => draws = false,
                Some(kib) => {
                    let command = if draws { 'L' } else { 'M' };
                    let _ = write!(path, "{command}{:.0} {:.1}", x(*seconds), y(kib as f64 / 1024.0));
                    draws = true;
                }
            }
        }
        let _ = writeln!(svg, "<path d=\"{path}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\"/>");
        let at = LEFT + 150.0 * replica as f64;
        let text = BOTTOM + 36.0;
        let _ = writeln!(svg, "<text x=\"{at}\" y=\"{text}\" fill=\"{colour}\">replica {replica}</text>");
    }
    let _ = writeln!(svg, "<text x=\"{LEFT}\" y=\"12\">resident memory, MiB</text>\n</svg>");
    svg
}
