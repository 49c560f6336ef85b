//! Runs the command line, and turns an error into one line and exit code 1.
#![forbid(unsafe_code)]

use std::process::ExitCode;

#[tokio::main]
async fn main() -> ExitCode {
    // It fails only if a provider is already installed.
    drop(rustls::crypto::ring::default_provider().install_default());
    match lockstep::cli::Cli::from_args().run().await {
        Ok(code) => code,
        Err(error) => {
            eprintln!("lockstep: {error:#}");
            ExitCode::FAILURE
        }
    }
}
