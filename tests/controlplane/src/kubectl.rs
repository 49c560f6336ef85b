//! kubectl, independent of the user's configuration.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::Error;
use crate::process::Probe;

/// A kubectl with a discovery cache of its own.
///
/// kubectl caches discovery by server address for hours, and addresses of test servers repeat: with the user's cache, a
/// new server would seem to have the types of an old one.
#[derive(Clone)]
pub(crate) struct Kubectl {
    program: PathBuf,
    cache: PathBuf,
}

impl Kubectl {
    /// The cache is inside `dir`.
    pub(crate) fn new(program: PathBuf, dir: &Path) -> Self {
        Self { program, cache: dir.join("kubectl-cache") }
    }

    pub(crate) fn program(&self) -> &Path {
        &self.program
    }

    /// A command without arguments yet.
    pub(crate) fn with(&self, kubeconfig: &Path) -> Command {
        let mut command = Command::new(&self.program);
        command
            .arg("--kubeconfig")
            .arg(kubeconfig)
            .env("KUBECACHEDIR", &self.cache)
            // Disables the user's aliases and defaults.
            .env("KUBECTL_KUBERC", "false");
        command
    }

    /// Runs a command and returns its output.
    pub(crate) fn run(&self, kubeconfig: &Path, args: &[&str]) -> Result<String, Error> {
        let output = self.with(kubeconfig).args(args).output().map_err(Error::at(&self.program))?;
        if output.status.success() {
            Ok(String::from_utf8_lossy(&output.stdout).into_owned())
        } else {
            Err(Error::Kubectl {
                command: args.join(" "),
                stderr: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
            })
        }
    }

    /// A probe that runs a command and returns whether it succeeds. A server that hangs counts as a failure.
    pub(crate) fn succeeds(&self, kubeconfig: &Path, args: &'static [&'static str]) -> Probe {
        let (kubectl, kubeconfig) = (self.clone(), kubeconfig.to_owned());
        Box::new(move || {
            let output = kubectl.with(&kubeconfig).args(args).arg("--request-timeout=5s").output();
            output.is_ok_and(|output| output.status.success())
        })
    }
}
