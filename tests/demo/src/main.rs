//! `demo run LOCKSTEP` and `demo play LOCKSTEP`: a control plane, and a Lockstep that runs as its ServiceAccount. The first stays until Ctrl+C, the second plays the walk-through and checks every output.
#![forbid(unsafe_code)]

mod walkthrough;

use std::{
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Command as StdCommand, ExitCode, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use controlplane::ControlPlane;
use tokio::process::{Child, Command};

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let outcome = match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["run", lockstep] => run(lockstep).await,
        ["play", lockstep] => demonstrate(lockstep).await,
        _ => {
            eprintln!("usage: demo run|play PATH-OF-LOCKSTEP");
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

/// Lockstep in the foreground, on a control plane that goes with it.
async fn run(lockstep: &str) -> Result<()> {
    let stage = Stage::set(lockstep)?;
    let mut child = stage.lockstep(lockstep, Stdio::inherit()).await?;
    println!("\nA Kubernetes control plane is up. In another terminal:\n");
    println!("  export KUBECONFIG='{}'", stage.plane.admin().display());
    println!("  export PATH='{}':\"$PATH\"\n", stage.kubectl_dir().display());
    println!("and try:\n");
    for step in walkthrough::walk_through() {
        println!("  {}", step.command);
    }
    println!("\nCtrl+C stops everything.\n");

    // Ctrl+C reaches Lockstep too: it finishes what it holds while the control plane is still there.
    let status = loop {
        tokio::select! {
            status = child.wait() => break status?,
            signal = tokio::signal::ctrl_c() => signal?,
        }
    };
    stage.plane.stop();
    if status.success() { Ok(()) } else { bail!("lockstep ended with {status}") }
}

async fn demonstrate(lockstep: &str) -> Result<()> {
    let stage = Stage::set(lockstep)?;
    let log = stage.plane.data_dir().join("lockstep.log");
    let file = std::fs::File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
    let mut child = stage.lockstep(lockstep, file.into()).await?;
    let outcome = walkthrough::play(&stage).await;
    if outcome.is_err() {
        eprintln!("--- what lockstep logged\n{}", std::fs::read_to_string(&log).unwrap_or_default());
    }
    child.kill().await?;
    stage.plane.stop();
    outcome
}

/// Two addresses of this machine that nobody listens on.
fn free_addresses() -> Result<[SocketAddr; 2]> {
    // Held until both are known, or they could be the same.
    let listeners = [TcpListener::bind(("127.0.0.1", 0))?, TcpListener::bind(("127.0.0.1", 0))?];
    Ok([listeners[0].local_addr()?, listeners[1].local_addr()?])
}

/// A control plane with everything of Lockstep installed but the program itself.
pub struct Stage {
    plane: ControlPlane,
    identity: PathBuf,
    webhook: SocketAddr,
    ops: SocketAddr,
}

impl Stage {
    fn set(lockstep: &str) -> Result<Self> {
        eprintln!("demo: booting etcd, kube-apiserver and kube-controller-manager");
        let plane = ControlPlane::start()?;
        let [webhook, ops] = free_addresses()?;
        let manifests = StdCommand::new(lockstep)
            .args(["manifests", "--secrets", "--webhook-url", &format!("https://{webhook}")])
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {lockstep}"))?;
        let input = manifests.stdout.context("lockstep manifests prints nothing")?;
        let output = plane.kubectl().args(["apply", "-f", "-"]).stdin(input).output()?;
        if !output.status.success() {
            bail!("the manifests cannot be applied: {}", String::from_utf8_lossy(&output.stderr).trim());
        }
        let identity = plane.service_account("lockstep-system", "lockstep")?;
        Ok(Self { plane, identity, webhook, ops })
    }

    /// Starts Lockstep and waits until it is ready.
    async fn lockstep(&self, path: &str, log: Stdio) -> Result<Child> {
        let mut child = Command::new(path)
            .args(["run", "--kinds", "configmaps,secrets", "--ops-bind", &self.ops.to_string()])
            .args(["--webhook-bind", &self.webhook.to_string()])
            .env("KUBECONFIG", &self.identity)
            .stdin(Stdio::null())
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot start {path}"))?;
        let start = Instant::now();
        while !self.is_ready() {
            if let Some(status) = child.try_wait()? {
                bail!("lockstep ended with {status}");
            }
            if start.elapsed() > Duration::from_secs(30) {
                bail!("lockstep is not ready after 30 s");
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(child)
    }

    fn is_ready(&self) -> bool {
        let ask = || -> std::io::Result<String> {
            let mut stream = TcpStream::connect(self.ops)?;
            stream.write_all(b"GET /readyz HTTP/1.0\r\n\r\n")?;
            let mut answer = String::new();
            stream.read_to_string(&mut answer)?;
            Ok(answer)
        };
        ask().is_ok_and(|answer| answer.contains(" 200 "))
    }

    fn kubectl_dir(&self) -> PathBuf {
        self.plane.kubectl_path().parent().map(Path::to_owned).unwrap_or_default()
    }

    /// Runs a command line as the admin would type it, and returns what it printed.
    async fn shell(&self, line: &str) -> Result<String> {
        let path = std::env::var("PATH").unwrap_or_default();
        let output = Command::new("sh")
            .args(["-c", line])
            .env("KUBECONFIG", self.plane.admin())
            .env("KUBECACHEDIR", self.plane.data_dir().join("kubectl-cache"))
            .env("PATH", format!("{}:{path}", self.kubectl_dir().display()))
            .stdin(Stdio::null())
            .output();
        let output = tokio::time::timeout(Duration::from_secs(30), output).await.context("no answer")??;
        let text = [output.stdout, output.stderr].concat();
        Ok(String::from_utf8_lossy(&text).trim_end().to_owned())
    }
}
