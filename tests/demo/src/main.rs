//! `demo run LOCKSTEP` and `demo play LOCKSTEP`: a control plane, its RBAC, and a Lockstep that runs as its
//! ServiceAccount. The first stays until Ctrl+C, the second plays the walk-through and checks every output.
#![forbid(unsafe_code)]

mod play;

use std::{
    path::{Path, PathBuf},
    process::{ExitCode, Stdio},
    time::Duration,
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
    let stage = Stage::set()?;
    println!("\nA Kubernetes control plane is up. In another terminal:\n");
    println!("  export KUBECONFIG={}", stage.plane.admin().display());
    println!("  export PATH={}:$PATH\n", stage.kubectl_dir().display());
    println!("and try:\n");
    for step in play::walk_through() {
        println!("  {}", step.command);
    }
    println!("\nCtrl+C stops everything.\n");

    let mut child = stage.lockstep(lockstep, Stdio::inherit())?;
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
    let stage = Stage::set()?;
    let log = stage.plane.data_dir().join("lockstep.log");
    let file = std::fs::File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
    let mut child = stage.lockstep(lockstep, file.into())?;
    let outcome = play::play(&stage).await;
    if outcome.is_err() {
        eprintln!("--- what lockstep logged\n{}", std::fs::read_to_string(&log).unwrap_or_default());
    }
    child.kill().await?;
    stage.plane.stop();
    outcome
}

/// A control plane with Lockstep's RBAC, and the kubeconfig of its ServiceAccount.
pub struct Stage {
    plane: ControlPlane,
    identity: PathBuf,
}

impl Stage {
    fn set() -> Result<Self> {
        eprintln!("demo: booting etcd, kube-apiserver and kube-controller-manager");
        let plane = ControlPlane::start()?;
        let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy");
        for (flag, path) in [("-k", "base"), ("-f", "components/secrets/rbac.yaml")] {
            let output = plane.kubectl().arg("apply").arg(flag).arg(deploy.join(path)).output()?;
            if !output.status.success() {
                bail!("the RBAC cannot be applied: {}", String::from_utf8_lossy(&output.stderr).trim());
            }
        }
        let identity = plane.service_account("lockstep-system", "lockstep")?;
        Ok(Self { plane, identity })
    }

    fn lockstep(&self, path: &str, log: Stdio) -> Result<Child> {
        Command::new(path)
            .args(["run", "--kinds", "configmaps,secrets", "--ops-bind", "127.0.0.1:0"])
            .env("KUBECONFIG", &self.identity)
            .stdin(Stdio::null())
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot start {path}"))
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
