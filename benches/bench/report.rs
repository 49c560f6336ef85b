//! Rows of the report: each figure beside its floor from the same run, as a table, as JSON and as a picture.

use std::{fmt::Write as _, fs, path::Path, time::Duration};

use serde_json::{Value, json};

/// A figure that was measured several times, in turn with its floor and with the peer.
#[derive(Default)]
pub(crate) struct Row {
    what: String,
    /// The most, in times the floor, that it may be; the least if more is better.
    goal: Option<f64>,
    unit: &'static str,
    more_is_better: bool,
    pub lockstep: Vec<f64>,
    pub floor: Vec<f64>,
    pub peer: Vec<f64>,
}

/// A figure without a floor.
pub(crate) struct Figure {
    what: String,
    goal: String,
    measured: String,
}

#[derive(Default)]
pub(crate) struct Report {
    pub rows: Vec<Row>,
    figures: Vec<Figure>,
}

impl Row {
    /// A time, in milliseconds: less is better.
    pub(crate) fn time(what: impl Into<String>, goal: impl Into<Option<f64>>) -> Self {
        Self { what: what.into(), goal: goal.into(), unit: "ms", ..Self::default() }
    }

    /// How many of something in a second: more is better.
    pub(crate) fn rate(what: impl Into<String>, goal: impl Into<Option<f64>>, unit: &'static str) -> Self {
        Self { what: what.into(), goal: goal.into(), unit, more_is_better: true, ..Self::default() }
    }

    /// Lockstep and the floor of the same repetition, divided.
    fn ratios(&self, of: &[f64]) -> Vec<f64> {
        of.iter().zip(&self.floor).map(|(one, floor)| one / floor).collect()
    }

    fn line(&self) -> String {
        let ratios = self.ratios(&self.lockstep);
        let peer = if self.peer.is_empty() {
            "–".to_owned()
        } else {
            format!("{} × ({})", two(median(&self.ratios(&self.peer))), short(median(&self.peer)))
        };
        let sign = if self.more_is_better { "≥" } else { "≤" };
        let goal = self.goal.map_or_else(|| "–".to_owned(), |goal| format!("{sign} {} ×", two(goal)));
        format!(
            "| {} | {goal} | **{} ×** | {} to {} | {} {} | {} {} | {peer} |",
            self.what,
            two(median(&ratios)),
            two(least(&ratios)),
            two(most(&ratios)),
            short(median(&self.lockstep)),
            self.unit,
            short(median(&self.floor)),
            self.unit,
        )
    }

    fn json(&self) -> Value {
        json!({
            "what": self.what, "goal": self.goal, "unit": self.unit, "moreIsBetter": self.more_is_better,
            "ratio": median(&self.ratios(&self.lockstep)), "lockstep": self.lockstep, "floor": self.floor,
            "peer": self.peer,
        })
    }
}

impl Report {
    /// Adds a row, and prints it: a run takes long.
    pub(crate) fn add(&mut self, row: Row) {
        println!("{}", row.line());
        self.rows.push(row);
    }

    pub(crate) fn figure(
        &mut self,
        what: impl Into<String>,
        goal: impl Into<String>,
        measured: impl Into<String>,
    ) {
        let figure = Figure { what: what.into(), goal: goal.into(), measured: measured.into() };
        println!("| {} | {} | {} |", figure.what, figure.goal, figure.measured);
        self.figures.push(figure);
    }

    /// Everything as two tables in Markdown.
    fn tables(&self) -> String {
        let mut text = String::new();
        if !self.rows.is_empty() {
            text.push_str(
                "| what | goal | median | spread | Lockstep | floor | peer |\n\
                 | --- | --- | --- | --- | --- | --- | --- |\n",
            );
            for row in &self.rows {
                let _ = writeln!(text, "{}", row.line());
            }
            text.push('\n');
        }
        if !self.figures.is_empty() {
            text.push_str("| what | goal | measured |\n| --- | --- | --- |\n");
            for Figure { what, goal, measured } in &self.figures {
                let _ = writeln!(text, "| {what} | {goal} | {measured} |");
            }
        }
        text
    }

    /// Writes `table.md`, `results.json` and `ratios.svg`, and prints the tables once more.
    pub(crate) fn write(&self, to: &Path) -> std::io::Result<()> {
        fs::create_dir_all(to)?;
        let tables = self.tables();
        println!("\n{tables}");
        fs::write(to.join("table.md"), &tables)?;
        let figures: Vec<Value> = (self.figures.iter())
            .map(|figure| json!({"what": figure.what, "goal": figure.goal, "measured": figure.measured}))
            .collect();
        let rows: Vec<Value> = self.rows.iter().map(Row::json).collect();
        let results = json!({"rows": rows, "figures": figures});
        fs::write(to.join("results.json"), serde_json::to_string_pretty(&results)?)?;
        fs::write(to.join("ratios.svg"), self.picture())
    }

    /// A bar for each row, from the smallest to the largest ratio, with the median, the goal and the peer.
    fn picture(&self) -> String {
        const LEFT: usize = 430;
        const WIDTH: f64 = 480.0;
        const LINE: usize = 34;
        let all =
            self.rows.iter().flat_map(|row| [row.ratios(&row.lockstep), row.ratios(&row.peer)]).flatten();
        let end = all.fold(2.0_f64, f64::max).min(8.0).ceil();
        let x = |ratio: f64| LEFT as f64 + WIDTH * ratio.min(end) / end;
        let height = LINE * (self.rows.len() + 1) + 20;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 960 {height}\" font-family=\"sans-serif\" font-size=\"13\">\n\
             <rect width=\"960\" height=\"{height}\" fill=\"#ffffff\"/>\n"
        );
        for tick in 0..=end as usize {
            let at = x(tick as f64);
            let strong = if tick == 1 { "#444444" } else { "#dddddd" };
            let _ = writeln!(
                svg,
                "<line x1=\"{at:.0}\" x2=\"{at:.0}\" y1=\"8\" y2=\"{}\" stroke=\"{strong}\"/><text x=\"{at:.0}\" y=\"{}\" text-anchor=\"middle\" fill=\"#444444\">{tick} ×</text>",
                height - 30,
                height - 12
            );
        }
        for (number, row) in self.rows.iter().enumerate() {
            let y = LINE * number + 24;
            let ratios = row.ratios(&row.lockstep);
            let (from, to, middle) = (x(least(&ratios)), x(most(&ratios)), x(median(&ratios)));
            let what = row.what.replace('&', "&amp;").replace('<', "&lt;");
            let _ = writeln!(
                svg,
                "<text x=\"{}\" y=\"{}\" text-anchor=\"end\" fill=\"#222222\">{what}</text>",
                LEFT - 12,
                y + 4
            );
            let _ = writeln!(
                svg,
                "<line x1=\"{from:.1}\" x2=\"{to:.1}\" y1=\"{y}\" y2=\"{y}\" stroke=\"#2563eb\" stroke-width=\"6\" stroke-linecap=\"round\" opacity=\"0.35\"/>"
            );
            let _ = writeln!(svg, "<circle cx=\"{middle:.1}\" cy=\"{y}\" r=\"6\" fill=\"#2563eb\"/>");
            if let Some(goal) = row.goal {
                let at = x(goal);
                let _ = writeln!(
                    svg,
                    "<line x1=\"{at:.1}\" x2=\"{at:.1}\" y1=\"{}\" y2=\"{}\" stroke=\"#16a34a\" stroke-width=\"2\"/>",
                    y - 11,
                    y + 11
                );
            }
            if !row.peer.is_empty() {
                let at = x(median(&row.ratios(&row.peer)));
                let _ = writeln!(
                    svg,
                    "<circle cx=\"{at:.1}\" cy=\"{y}\" r=\"5\" fill=\"none\" stroke=\"#ea580c\" stroke-width=\"2\"/>"
                );
            }
        }
        svg + "</svg>\n"
    }
}

pub(crate) fn millis(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

pub(crate) fn median(values: &[f64]) -> f64 {
    quantile(values, 50)
}

/// The value below which so many per cent of the others are.
pub(crate) fn quantile(values: &[f64], per_cent: usize) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len().saturating_sub(1) * per_cent / 100).copied().unwrap_or(f64::NAN)
}

fn least(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::INFINITY, f64::min)
}

fn most(values: &[f64]) -> f64 {
    values.iter().copied().fold(f64::NEG_INFINITY, f64::max)
}

fn two(value: f64) -> String {
    format!("{value:.2}")
}

/// Three significant digits, without an exponent.
fn short(value: f64) -> String {
    match value.abs() {
        large if large >= 100.0 => format!("{value:.0}"),
        middle if middle >= 10.0 => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}
