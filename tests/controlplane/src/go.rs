//! Runs the Go toolchain and follows what it prints.

use std::io::{self, Read};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};

use crate::{Error, files};

/// How long Go may print nothing before the caller is asked whether to go on.
const TICK: Duration = Duration::from_millis(200);

/// Whether there is a Go toolchain.
pub(crate) fn is_installed() -> Result<bool, Error> {
    match Command::new("go").arg("version").stdout(Stdio::null()).status() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        other => other.map(|_| true).map_err(Error::at(Path::new("go"))),
    }
}

/// Runs `go` with these arguments and returns what it printed on stdout.
///
/// `watch` gets each line of its stderr, and `None` several times a second while there is none. An error of `watch`
/// ends Go and is returned.
pub(crate) fn run(
    dir: &Path,
    arguments: &[&str],
    mut watch: impl FnMut(Option<&str>) -> Result<(), Error>,
) -> Result<String, Error> {
    let mut child = Command::new("go")
        .args(arguments)
        .current_dir(dir)
        // The user's Go workspace does not include these modules.
        .envs([("CGO_ENABLED", "0"), ("GOWORK", "off")])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .map_err(Error::at(Path::new("go")))?;
    let (stdout, stderr) = (child.stdout.take(), child.stderr.take());
    let stdout = thread::spawn(move || {
        let mut text = String::new();
        stdout.map_or(Ok(0), |mut stdout| stdout.read_to_string(&mut text)).map(|_| text)
    });
    let (sender, lines) = mpsc::channel();
    thread::spawn(move || stderr.into_iter().flat_map(files::lines).try_for_each(|line| sender.send(line)));

    let watched = loop {
        let watched = match lines.recv_timeout(TICK) {
            Ok(line) => watch(Some(&line)),
            Err(RecvTimeoutError::Timeout) => watch(None),
            Err(RecvTimeoutError::Disconnected) => break Ok(()),
        };
        if watched.is_err() {
            // As Ctrl+C does: Go removes its temporary files.
            let _ = kill_process(Pid::from_child(&child), Signal::INT);
            break watched;
        }
    };
    let status = child.wait()?;
    watched?;
    if !status.success() {
        let command = arguments.first().copied().unwrap_or_default().to_owned();
        return Err(Error::Build { command, status });
    }
    stdout.join().unwrap_or_else(|_| Ok(String::new())).map_err(Error::at(Path::new("go")))
}
