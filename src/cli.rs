//! The command line: one file per subcommand.

mod audit;
pub mod certs;
mod check;
mod connection;
mod deletes;
mod explain;
pub mod flags;
mod lease;
pub mod manifests;
pub mod migrate;
mod output;
mod plan;
pub mod program;
pub mod run;
mod source_name;
mod status;
mod ui;

pub use output::complain;

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use clap_complete::Shell;

/// Mirrors ConfigMaps and Secrets to other namespaces as read-only companions
#[derive(Debug, Parser)]
#[command(
    name = "lockstep",
    version = env!("LOCKSTEP_VERSION"),
    propagate_version = true,
    after_help = "\
Installed as kubectl-lockstep on the PATH, every command is also `kubectl lockstep …`.

Examples:
  lockstep status -A                             is everything in step?
  lockstep plan -f ca-bundle.yaml                what would this source do?
  lockstep explain -n team-b security/ca-bundle  why has team-b no copy?
  lockstep audit                                 drift, for pipelines
  lockstep ui                                    all of it on a live page
  lockstep manifests | kubectl apply -f -        install; --create-namespace: into a new namespace"
)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Show whether companions are in step with their sources, and why not
    Status(status::Status),
    /// Show what Lockstep would do before a source is applied; exit code 0: nothing, 1: changes, 2: refused
    Plan(plan::Plan),
    /// Say why a namespace has or lacks the companion of a source
    Explain(explain::Explain),
    /// Find drift in the whole cluster, for pipelines; exit code 0: in step, 1: drift, 2: cannot tell
    Audit(audit::Audit),
    /// Check whether Lockstep can be installed, or works once it is
    Check(check::Check),
    /// Serve a live page about sources and companions on this machine
    Ui(ui::Ui),
    /// Run the controller and the admission webhook
    Run(Box<crate::config::Run>),
    /// Print the completion script of a shell
    #[command(after_help = "\
Examples:
  source <(lockstep completion bash)                                            bash, this session
  lockstep completion zsh > \"${fpath[1]}/_lockstep\"                            zsh
  lockstep completion fish > ~/.config/fish/completions/lockstep.fish           fish")]
    Completion { shell: Shell },
    /// Write a CA and a serving certificate to files, for development; or replace the CA of running replicas
    Certs(certs::Certs),
    /// Show deletes that are held because they look like an accident; release them, or hold them longer
    Deletes(deletes::Deletes),
    /// Print the manifests to install, for `kubectl apply -f -`
    Manifests(manifests::Manifests),
    /// Take sources and copies over from kubernetes-replicator or Reflector, in place, or give them back
    Migrate(Box<migrate::Migrate>),
}

/// The parts of the program that commands cannot reach themselves.
const PROGRAM: program::Program = program::Program {
    roles: |installation| manifests::Manifests::from(installation).rbac(),
    serve: |listener, router, max_connections| Box::pin(run::serve_page(listener, router, max_connections)),
};

/// The name under which kubectl finds this binary as its plugin `lockstep`.
const PLUGIN: &str = "kubectl-lockstep";

fn completion(shell: Shell) -> anyhow::Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "lockstep", &mut script);
    output::print(&String::from_utf8_lossy(&script))
}

/// Runs the command line of this process, and turns an error into one line and exit code 1.
pub async fn main() -> ExitCode {
    abort_on_panic();
    // It fails only if a provider is already installed.
    let _ = rustls::crypto::ring::default_provider().install_default();
    match Cli::from_args().run().await {
        Ok(code) => code,
        Err(error) => {
            complain(&error);
            ExitCode::FAILURE
        }
    }
}

/// A panic ends the process: a task that died alone would leave its source unattended. Release builds abort anyway.
fn abort_on_panic() {
    let report = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        report(panic);
        std::process::abort();
    }));
}

impl Cli {
    /// Parses the arguments of this process; ends it with a message if they are wrong.
    #[must_use]
    pub fn from_args() -> Self {
        let mut command = Self::command();
        let program = std::env::args_os().next().map(std::path::PathBuf::from);
        if program.is_some_and(|program| program.file_stem().is_some_and(|stem| stem == PLUGIN)) {
            command = command.bin_name("kubectl lockstep");
        }
        let parsed = Self::from_arg_matches_mut(&mut command.get_matches());
        parsed.unwrap_or_else(|error| error.exit())
    }

    pub async fn run(self) -> anyhow::Result<ExitCode> {
        match self.command {
            Command::Status(settings) => status::run(&settings).await?,
            Command::Plan(settings) => return plan::run(&settings).await,
            Command::Explain(settings) => explain::run(&settings).await?,
            Command::Audit(settings) => return audit::run(&settings).await,
            Command::Check(settings) => return check::run(&settings, PROGRAM).await,
            Command::Ui(settings) => ui::run(&settings, PROGRAM).await?,
            Command::Run(settings) => run::run(*settings).await?,
            Command::Completion { shell } => completion(shell)?,
            Command::Certs(settings) => certs::run(&settings).await?,
            Command::Deletes(settings) => deletes::run(&settings).await?,
            Command::Manifests(wanted) => manifests::run(&wanted)?,
            Command::Migrate(settings) => migrate::run(&settings).await?,
        }
        Ok(ExitCode::SUCCESS)
    }
}

#[cfg(test)]
mod tests {
    use std::{env, os::unix::process::ExitStatusExt, process};

    use super::*;

    /// The test runs itself in another process, which has this variable.
    const PANICS: &str = "LOCKSTEP_TEST_PANICS";

    #[tokio::test]
    async fn panic_of_a_task_ends_the_process() {
        if env::var_os(PANICS).is_some() {
            abort_on_panic();
            drop(tokio::spawn(async { panic!("a task dies") }).await);
            process::exit(0);
        }
        let mut other = process::Command::new(env::current_exe().expect("this program"));
        other.args(["--exact", "--nocapture", "cli::tests::panic_of_a_task_ends_the_process"]);
        let output = other.env(PANICS, "1").output().expect("this program runs");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.signal(), Some(6), "SIGABRT: {said}");
        assert!(said.contains("a task dies"), "{said}");
    }
}
