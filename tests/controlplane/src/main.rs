//! `controlplane build` compiles the binaries; `controlplane up` runs a control plane by hand.

#![forbid(unsafe_code)]

use std::io::{self, Write};
use std::process::ExitCode;
use std::{env, thread};

use controlplane::{Binaries, ControlPlane, Error};

fn main() -> ExitCode {
    let done = match env::args().nth(1).as_deref() {
        Some("build") => build(),
        Some("up") => up(),
        _ => {
            eprintln!("usage: controlplane build|up");
            return ExitCode::from(2);
        }
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("controlplane: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Prints the directory of the binaries, built if necessary.
fn build() -> Result<(), Error> {
    writeln!(io::stdout(), "{}", Binaries::build()?.dir().display())?;
    Ok(())
}

/// Boots, says how to get at it, and stays. There is nothing to catch a signal for: whatever ends
/// this process, everything else goes with it.
fn up() -> Result<(), Error> {
    let plane = ControlPlane::start()?;
    let mut out = io::stdout();
    writeln!(out, "export KUBECONFIG='{}'", plane.admin().display())?;
    for (name, value) in plane.kubectl().get_envs() {
        writeln!(out, "export {}='{}'", name.display(), value.unwrap_or_default().display())?;
    }
    if let Some(dir) = plane.kubectl_path().parent() {
        writeln!(out, "export PATH='{}':\"$PATH\"", dir.display())?;
    }
    eprintln!("controlplane: {} is up; Ctrl+C ends it", plane.server_url());
    loop {
        thread::park();
    }
}
