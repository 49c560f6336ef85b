//! Errors, and what to do about each.

use std::io;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::Duration;

use crate::versions::versions;

/// Why a control plane could not be built, booted or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no Go toolchain to build the binaries with.
    #[error(
        "`go` is not in PATH, and the control plane is built with it: install Go (https://go.dev/dl), or set \
         KUBEBUILDER_ASSETS to a directory with etcd, kube-apiserver, kube-controller-manager and kubectl, or \
         LOCKSTEP_TEST_KUBECONFIG to the kubeconfig of an existing cluster"
    )]
    NoGo,

    /// The Go build failed; its own output went to stderr.
    #[error("building the control plane with `go {command}` failed ({status}), see its output above")]
    Build {
        /// `list`, which downloads the modules, or `build`.
        command: String,
        /// How it ended.
        status: ExitStatus,
    },

    /// The command that ran beside the Go build failed; its own output went to stderr.
    #[error("`{command}` failed ({status}), see its output above")]
    Beside {
        /// The command line.
        command: String,
        /// How it ended.
        status: ExitStatus,
    },

    /// `etcdctl` or `etcdutl` failed.
    #[error("the backup or restore of etcd failed: {0}")]
    Tool(String),

    /// `go.mod` does not say which version of a module to build.
    #[error("the go.mod of the tests that should pin {0} does not")]
    NotPinned(&'static str),

    /// There is no module that pins this version of Kubernetes.
    #[error(
        "Kubernetes {name:?} cannot be built: LOCKSTEP_TEST_KUBERNETES and `controlplane build` take {}",
        versions().collect::<Vec<_>>().join(", ")
    )]
    UnknownVersion {
        /// What somebody asked for.
        name: String,
    },

    /// Two variables name different binaries.
    #[error(
        "KUBEBUILDER_ASSETS={} and LOCKSTEP_TEST_KUBERNETES={version} name different binaries: unset one of them",
        dir.display()
    )]
    TwoVersions {
        /// The directory in `KUBEBUILDER_ASSETS`.
        dir: PathBuf,
        /// The minor version.
        version: &'static str,
    },

    /// There is no place to cache the built binaries in.
    #[error("neither XDG_CACHE_HOME nor HOME says where to cache the control plane's binaries")]
    NoCacheDir,

    /// The directory in `KUBEBUILDER_ASSETS` lacks a binary.
    #[error(
        "KUBEBUILDER_ASSETS={} has no {name}, which is needed {purpose}: unset it to build the control plane",
        dir.display()
    )]
    MissingBinary {
        /// The directory as the variable names it.
        dir: PathBuf,
        /// The missing file.
        name: &'static str,
        /// What the control plane needs it for.
        purpose: &'static str,
    },

    /// A process of the control plane ended by itself.
    #[error("{name} ended by itself ({status}), see {}:\n{tail}", log.display())]
    Ended {
        /// The process.
        name: &'static str,
        /// How it ended.
        status: ExitStatus,
        /// Its log file.
        log: PathBuf,
        /// The last lines of that log.
        tail: String,
    },

    /// A process of the control plane runs but did not become ready in time.
    #[error("{name} was not ready after {} s, see {}:\n{tail}", after.as_secs(), log.display())]
    NotReady {
        /// The process.
        name: &'static str,
        /// How long it was given.
        after: Duration,
        /// Its log file.
        log: PathBuf,
        /// The last lines of that log.
        tail: String,
    },

    /// Lockstep ended by itself, or did not become ready or stop in time.
    #[error("lockstep {problem}; its log:\n{log}")]
    Lockstep {
        /// What is wrong.
        problem: String,
        /// What it logged.
        log: String,
    },

    /// The process to signal does not run.
    #[error("{0} does not run: restart it first")]
    NotRunning(&'static str),

    /// Processes and audit log of a cluster that this crate did not start cannot be reached.
    #[error("{0} cannot be reached: LOCKSTEP_TEST_KUBECONFIG names an existing cluster")]
    ExistingCluster(&'static str),

    /// The kubeconfig of the existing cluster has no usable current context.
    #[error("{} is no kubeconfig with a current context that has a cluster and a user", .0.display())]
    Kubeconfig(PathBuf),

    /// A kubectl command failed.
    #[error("`kubectl {command}` failed: {stderr}")]
    Kubectl {
        /// The arguments.
        command: String,
        /// Its error output.
        stderr: String,
    },

    /// This machine cannot run a node.
    #[error("no node can run on this machine: {0}")]
    NoNode(String),

    /// There is no such container.
    #[error("there is no container {0} on the node")]
    NoContainer(String),

    /// A command that sets up the node failed.
    #[error("`{command}` failed: {stderr}")]
    Command {
        /// Program and arguments.
        command: String,
        /// Its error output.
        stderr: String,
    },

    /// Flags and kubeconfigs cannot name files in this directory.
    #[error("the temporary directory {} is not valid UTF-8: set TMPDIR to another one", .0.display())]
    TempDir(PathBuf),

    /// The shells that clean up did not start, or the directory existed already.
    #[error("the data directory {} cannot be created", .0.display())]
    Cleanup(PathBuf),

    /// A key or certificate could not be created.
    #[error("cannot create a certificate: {0}")]
    Certificate(#[from] rcgen::Error),

    /// A file could not be read, written or run.
    #[error("{}: {source}", path.display())]
    File {
        /// The file or directory.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },

    /// The system refused a socket, a signal or a pipe.
    #[error(transparent)]
    Io(#[from] io::Error),
}

impl Error {
    /// For `map_err`: adds the path to an I/O error.
    pub(crate) fn at(path: &Path) -> impl FnOnce(io::Error) -> Self {
        move |source| Self::File { path: path.to_owned(), source }
    }
}
