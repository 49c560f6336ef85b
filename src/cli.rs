//! The command line: one file per subcommand.

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
    /// Run the mirror until Ctrl+C or SIGTERM
    Run(Box<crate::config::Run>),
}

impl Cli {
    pub async fn run(self) -> anyhow::Result<()> {
        match self.command {
            Command::Run(settings) => run::run(*settings).await,
        }
    }
}
