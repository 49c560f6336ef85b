//! The command line of people: one file per command.

mod audit;
pub mod certs;
pub mod check;
mod connection;
mod deletes;
mod explain;
pub mod flags;
mod lease_handle;
pub mod migrate;
pub mod output;
mod plan;
mod status;
mod ui;

use std::process::ExitCode;

use clap::Subcommand;

use crate::program::Program;

#[derive(Subcommand)]
pub enum Command {
    /// Show whether companions are in step with their sources, and why not
    Status(status::StatusArgs),
    /// Show what Lockstep would do before a source is applied; exit code 0: nothing, 1: changes, 2: refused
    Plan(plan::PlanArgs),
    /// Say why a namespace has or lacks the companion of a source
    Explain(explain::ExplainArgs),
    /// Find drift in the whole cluster, for pipelines; exit code 0: in step, 1: drift, 2: cannot tell
    Audit(audit::AuditArgs),
    /// Check whether Lockstep can be installed, or works once it is
    Check(check::CheckArgs),
    /// Serve a live page about sources and companions on this machine
    Ui(ui::UiArgs),
    /// Write a CA and a serving certificate to files, for development; or replace the CA of running replicas
    Certs(certs::CertsArgs),
    /// Show deletes that are held because they look like an accident; release them, or hold them longer
    Deletes(deletes::DeletesArgs),
    /// Take sources and copies over from kubernetes-replicator or Reflector, in place, or give them back
    Migrate(Box<migrate::MigrateArgs>),
}

impl Command {
    pub async fn run(self, program: Program) -> anyhow::Result<ExitCode> {
        match self {
            Self::Status(settings) => status::run(&settings).await?,
            Self::Plan(settings) => return plan::run(&settings).await,
            Self::Explain(settings) => explain::run(&settings).await?,
            Self::Audit(settings) => return audit::run(&settings).await,
            Self::Check(settings) => return check::run(&settings, program).await,
            Self::Ui(settings) => ui::run(&settings, program).await?,
            Self::Certs(settings) => certs::run(&settings).await?,
            Self::Deletes(settings) => deletes::run(&settings).await?,
            Self::Migrate(settings) => migrate::run(&settings).await?,
        }
        Ok(ExitCode::SUCCESS)
    }
}
