//! The command line: one file per subcommand.

pub mod certs;
pub mod manifests;
pub mod run;

use clap::{Parser, Subcommand};

/// Keeps read-only companions of ConfigMaps and Secrets in step with their sources
#[derive(Debug, Parser)]
#[command(name = "lockstep", version, propagate_version = true)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run mirror and guard until Ctrl+C or SIGTERM
    Run(Box<crate::config::Run>),
    /// Make a CA and a certificate as files, for development
    Certs(certs::Certs),
    /// Print what has to be installed in the cluster, for `kubectl apply -f -`
    Manifests(manifests::Manifests),
}

impl Cli {
    pub async fn run(self) -> anyhow::Result<()> {
        match self.command {
            Command::Run(settings) => run::run(*settings).await,
            Command::Certs(settings) => certs::run(&settings),
            Command::Manifests(wanted) => manifests::run(&wanted),
        }
    }
}
