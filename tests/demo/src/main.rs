//! `demo run LOCKSTEP` runs Lockstep on a control plane of its own until Ctrl+C. `demo play LOCKSTEP` runs the
//! walk-through of the README on it and checks every output. `demo picture LOCKSTEP FILE` also draws it.
#![forbid(unsafe_code)]

mod guide;
mod picture;
mod walkthrough;

use std::{
    net::{SocketAddr, TcpListener},
    path::{Path, PathBuf},
    process::{Command, ExitCode, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use controlplane::{ControlPlane, LockstepProcess};
use picture::Entry;

/// How long Lockstep may take to become ready or to stop.
const LOCKSTEP_TIMEOUT: Duration = Duration::from_secs(30);
/// How long one command of the walk-through may take.
const COMMAND_TIMEOUT: Duration = Duration::from_secs(30);

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let outcome = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["run", lockstep] => run(Path::new(lockstep)).await,
        ["play", lockstep] => play(Path::new(lockstep)).await.map(drop),
        ["picture", lockstep, file] => draw(Path::new(lockstep), Path::new(file)).await,
        _ => {
            eprintln!("usage: demo run|play PATH-OF-LOCKSTEP | demo picture PATH-OF-LOCKSTEP FILE");
            return ExitCode::from(2);
        }
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("demo: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Runs Lockstep in the foreground until Ctrl+C.
async fn run(program: &Path) -> Result<()> {
    let demo = Demo::install(program)?;
    let ops = demo.ops.to_string();
    let mut lockstep = LockstepProcess::start_in_foreground(program, &demo.kubeconfig, &ops, &demo.flags())?;
    lockstep.wait_ready(LOCKSTEP_TIMEOUT).await?;
    println!("{}", guide::text(&demo.plane.admin(), &[&program_dir(program)?, &demo.kubectl_dir()]));

    // The terminal sends Ctrl+C to Lockstep, too: it finishes its writes while the control plane still runs.
    let status = tokio::select! {
        status = lockstep.wait_exit(Duration::MAX) => status?,
        signal = tokio::signal::ctrl_c() => {
            signal?;
            lockstep.wait_exit(LOCKSTEP_TIMEOUT).await?
        }
    };
    demo.plane.stop();
    if status.success() { Ok(()) } else { bail!("lockstep ended with {status}") }
}

/// Runs the walk-through and draws it.
async fn draw(program: &Path, file: &Path) -> Result<()> {
    let picture = picture::render(&play(program).await?);
    std::fs::write(file, picture).with_context(|| format!("cannot write {}", file.display()))
}

/// Runs the walk-through, and returns what the picture shows.
async fn play(program: &Path) -> Result<Vec<Entry>> {
    let demo = Demo::install(program)?;
    let mut lockstep = LockstepProcess::start(program, &demo.kubeconfig, &demo.flags())?;
    lockstep.wait_ready(LOCKSTEP_TIMEOUT).await?;
    let outcome = match walkthrough::play(&demo).await {
        Ok(session) => commands_exist(program).map(|()| session),
        failed => failed,
    };
    if outcome.is_err() {
        eprintln!("--- what lockstep logged\n{}", lockstep.log());
    }
    drop(lockstep);
    demo.plane.stop();
    outcome
}

/// Checks that Lockstep has the commands that `make run` names.
fn commands_exist(program: &Path) -> Result<()> {
    for (command, _) in guide::LOOK {
        let output = Command::new(program).args(command.split(' ').skip(1)).arg("--help").output()?;
        if !output.status.success() {
            bail!("`make run` names `{command}`: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
    }
    Ok(())
}

/// The directory of a program, as people in other directories need it.
fn program_dir(program: &Path) -> Result<PathBuf> {
    let program = std::path::absolute(program)?;
    Ok(program.parent().context("lockstep is in no directory")?.to_owned())
}

/// Two free ports of this machine.
fn free_addresses() -> Result<[SocketAddr; 2]> {
    // Both sockets stay open until both ports are known, so that they differ.
    let listeners = [TcpListener::bind(("127.0.0.1", 0))?, TcpListener::bind(("127.0.0.1", 0))?];
    Ok([listeners[0].local_addr()?, listeners[1].local_addr()?])
}

/// A control plane with Lockstep's manifests applied; Lockstep itself is started outside the cluster.
pub struct Demo {
    plane: ControlPlane,
    kubeconfig: PathBuf,
    webhook: String,
    ops: SocketAddr,
}

impl Demo {
    fn install(program: &Path) -> Result<Self> {
        let plane = ControlPlane::start_for_demo()?;
        let [webhook, ops] = free_addresses()?;
        let manifests = Command::new(program)
            .args([
                "manifests",
                "--create-namespace",
                "--secrets",
                "--webhook-url",
                &format!("https://{webhook}"),
            ])
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        let input = manifests.stdout.context("lockstep manifests prints nothing")?;
        let output = plane.kubectl().args(["apply", "-f", "-"]).stdin(input).output()?;
        if !output.status.success() {
            bail!("the manifests cannot be applied: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        let kubeconfig = plane.service_account("lockstep-system", "lockstep")?;
        Ok(Self { plane, kubeconfig, webhook: webhook.to_string(), ops })
    }

    /// Flags of `lockstep run`.
    fn flags(&self) -> [&str; 4] {
        ["--kinds", "configmaps,secrets", "--webhook-bind", &self.webhook]
    }

    fn kubectl_dir(&self) -> PathBuf {
        self.plane.kubectl_path().parent().map(Path::to_owned).unwrap_or_default()
    }

    /// Runs a command line as the admin, and returns its output.
    async fn shell(&self, line: &str) -> Result<String> {
        let path = std::env::var("PATH").unwrap_or_default();
        let output = tokio::process::Command::new("sh")
            .args(["-c", line])
            .env("KUBECONFIG", self.plane.admin())
            .env("KUBECACHEDIR", self.plane.data_dir().join("kubectl-cache"))
            .env("PATH", format!("{}:{path}", self.kubectl_dir().display()))
            .stdin(Stdio::null())
            .output();
        let output = tokio::time::timeout(COMMAND_TIMEOUT, output)
            .await
            .with_context(|| format!("`{line}` takes longer than {COMMAND_TIMEOUT:?}"))??;
        let text = [output.stdout, output.stderr].concat();
        Ok(String::from_utf8_lossy(&text).trim_end().to_owned())
    }
}
