//! Runs the command line.
#![forbid(unsafe_code)]

use std::process::ExitCode;

#[tokio::main]
async fn main() -> ExitCode {
    lockstep::cli::main().await
}
