//! Crypto provider, parse, run, exit code.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;

#[tokio::main]
async fn main() -> ExitCode {
    // The only error is that one is installed already.
    drop(rustls::crypto::ring::default_provider().install_default());
    match lockstep::cli::Cli::parse().run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("lockstep: {error:#}");
            ExitCode::FAILURE
        }
    }
}
