//! A command that runs while Go builds: cargo, which compiles Lockstep at the same time.

use std::ffi::OsStr;
use std::io::{self, IsTerminal};
use std::iter;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::display::Display;
use crate::wait::eventually;
use crate::{Error, files};

/// How long the output of a command that has ended may take to appear.
const OUTPUT_TIMEOUT: Duration = Duration::from_secs(2);

/// A running command. Dropping it ends the command.
pub(crate) struct Beside {
    line: String,
    child: Child,
    output: JoinHandle<()>,
}

impl Beside {
    /// Runs a command alone, with the terminal to itself.
    pub(crate) fn run_alone(mut command: Command) -> Result<(), Error> {
        let status = command.status().map_err(Error::at(Path::new(command.get_program())))?;
        outcome(&line(&command), status)
    }

    /// Starts a command. What it prints on stderr appears above the bar.
    pub(crate) fn start(mut command: Command, display: &Display) -> Result<Self, Error> {
        if io::stderr().is_terminal() {
            // Cargo writes into a pipe, where it would use no colours.
            command.env("CARGO_TERM_COLOR", "always");
        }
        let child = command.stdin(Stdio::null()).stderr(Stdio::piped()).spawn();
        let mut child = child.map_err(Error::at(Path::new(command.get_program())))?;
        let (stderr, display) = (child.stderr.take(), display.clone());
        let output = thread::spawn(move || {
            stderr.into_iter().flat_map(files::lines).for_each(|line| display.line(&line));
        });
        Ok(Self { line: line(&command), child, output })
    }

    /// Fails if the command has failed. It may still run.
    pub(crate) fn check(&mut self) -> Result<(), Error> {
        match self.child.try_wait()? {
            Some(status) if !status.success() => self.ended(status),
            _ => Ok(()),
        }
    }

    /// Waits until the command has ended, and fails if it has failed.
    pub(crate) fn wait(mut self) -> Result<(), Error> {
        let status = self.child.wait()?;
        self.ended(status)
    }

    /// Returns when all that it printed is shown: an error that refers to it comes last. A process that it has left
    /// behind may keep its stderr open.
    fn ended(&self, status: ExitStatus) -> Result<(), Error> {
        eventually(OUTPUT_TIMEOUT, || self.output.is_finished());
        outcome(&self.line, status)
    }
}

impl Drop for Beside {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            // Cargo ends with it, the compilers that it has started end by themselves.
            let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
            drop(self.child.wait());
        }
    }
}

/// The command line, for messages.
fn line(command: &Command) -> String {
    let words = iter::once(command.get_program()).chain(command.get_args());
    words.map(OsStr::to_string_lossy).collect::<Vec<_>>().join(" ")
}

fn outcome(line: &str, status: ExitStatus) -> Result<(), Error> {
    match status.success() {
        true => Ok(()),
        false => Err(Error::Beside { command: line.to_owned(), status }),
    }
}
