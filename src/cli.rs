//! The command line: one file per subcommand.

pub mod certs;
mod connection;
pub mod explain;
pub mod manifests;
mod output;
pub mod run;
mod source_name;
pub mod status;
pub mod ui;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Mirrors ConfigMaps and Secrets to other namespaces as read-only companions
#[derive(Debug, Parser)]
#[command(name = "lockstep", version, propagate_version = true)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show whether companions are in step with their sources, and why not
    Status(status::Status),
    /// Say why a namespace has or lacks the companion of a source
    Explain(explain::Explain),
    /// Serve a live page about sources and companions on this machine
    Ui(ui::Ui),
    /// Run the controller and the admission webhook
    Run(Box<crate::config::Run>),
    /// Write a CA and a serving certificate to files, for development; or replace the CA of running replicas
    Certs(certs::Certs),
    /// Print the manifests to install, for `kubectl apply -f -`
    Manifests(manifests::Manifests),
}

impl Cli {
    pub async fn run(self) -> anyhow::Result<ExitCode> {
        match self.command {
            Command::Status(settings) => status::run(&settings).await?,
            Command::Explain(settings) => explain::run(&settings).await?,
            Command::Ui(settings) => ui::run(&settings).await?,
            Command::Run(settings) => run::run(*settings).await?,
            Command::Certs(settings) => certs::run(&settings).await?,
            Command::Manifests(wanted) => manifests::run(&wanted)?,
        }
        Ok(ExitCode::SUCCESS)
    }
}
