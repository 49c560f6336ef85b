//! The command line: one file per subcommand.

pub mod certs;
pub mod manifests;
pub mod migrate;
pub mod run;

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
    /// Run the controller and the admission webhook
    Run(Box<crate::config::Run>),
    /// Write a CA and a serving certificate to files, for development; or replace the CA of running replicas
    Certs(certs::Certs),
    /// Print the manifests to install, for `kubectl apply -f -`
    Manifests(manifests::Manifests),
    /// Take sources and copies over from kubernetes-replicator or Reflector, in place, or give them back
    Migrate(Box<migrate::Migrate>),
}

impl Cli {
    pub async fn run(self) -> anyhow::Result<()> {
        match self.command {
            Command::Run(settings) => run::run(*settings).await,
            Command::Certs(settings) => certs::run(&settings).await,
            Command::Manifests(wanted) => manifests::run(&wanted),
            Command::Migrate(settings) => migrate::run(&settings).await,
        }
    }
}
