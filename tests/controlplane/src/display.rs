//! Shows on stderr how far a build is: a bar on a terminal, otherwise a line now and then.

use std::io::{self, IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// The time between two lines where stderr is not a terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(15);
/// The bar's steps: a length in thousandths.
const STEPS: u64 = 1000;

/// A bar, or the time of the next line. Clones share the bar.
#[derive(Clone)]
pub(crate) struct Display {
    title: &'static str,
    bar: Option<ProgressBar>,
    next_line: Instant,
}

impl Display {
    /// Shows nothing yet.
    pub(crate) fn new(title: &'static str) -> Self {
        let bar = io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::with_draw_target(Some(STEPS), ProgressDrawTarget::stderr());
            let style = ProgressStyle::with_template(&format!("{title} [{{bar:20}}] {{wide_msg}}"));
            // The default is a bar, too.
            bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()).progress_chars("=> "))
        });
        Self { title, bar, next_line: Instant::now() + LINE_INTERVAL }
    }

    /// Shows how far the task is, from 0 to 1.
    pub(crate) fn show(&mut self, fraction: f64, text: &str) {
        match &self.bar {
            Some(bar) => {
                bar.set_message(text.to_owned());
                bar.set_position((fraction * STEPS as f64) as u64);
            }
            None if Instant::now() < self.next_line => {}
            None => {
                self.next_line = Instant::now() + LINE_INTERVAL;
                self.line(&format!("{}: {text}", self.title));
            }
        }
    }

    /// Prints a line of text, above the bar if there is one.
    pub(crate) fn line(&self, text: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| line(text)),
            None => line(text),
        }
    }

    /// Removes the bar.
    pub(crate) fn end(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Prints a line of text.
///
/// It writes to stderr directly: the test harness captures `eprintln!`, and a first test run would seem to hang for
/// minutes. A closed stderr is no reason to fail.
pub(crate) fn line(text: &str) {
    drop(writeln!(io::stderr(), "{text}"));
}
