//! The command line of the whole program.

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use clap_complete::Shell;

use crate::{manifests, run};
use lockstep_cli::{
    commands::{
        self,
        output::{self, complain},
    },
    program::Program,
};

/// Mirrors ConfigMaps and Secrets to other namespaces as read-only companions
#[derive(Parser)]
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

#[derive(Subcommand)]
pub enum Command {
    #[command(flatten)]
    Person(commands::Command),
    /// Run the controller and the admission webhook
    Run(Box<crate::config::Run>),
    /// Print the manifests to install, for `kubectl apply -f -`
    Manifests(manifests::Manifests),
    /// Print the completion script of a shell
    #[command(after_help = "\
Examples:
  source <(lockstep completion bash)                                            bash, this session
  lockstep completion zsh > \"${fpath[1]}/_lockstep\"                            zsh
  lockstep completion fish > ~/.config/fish/completions/lockstep.fish           fish")]
    Completion { shell: Shell },
}

/// The parts of the program that commands cannot reach themselves.
const PROGRAM: Program = Program {
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
    fn from_args() -> Self {
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
            Command::Person(command) => return command.run(PROGRAM).await,
            Command::Run(settings) => run::run(*settings).await?,
            Command::Manifests(wanted) => manifests::run(&wanted)?,
            Command::Completion { shell } => completion(shell)?,
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
