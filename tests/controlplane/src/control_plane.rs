//! A control plane to test against: one of our own, or an existing cluster.

use std::path::{self, Path, PathBuf};
use std::process::{self, Command};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};
use std::{env, fmt, fs};

use crate::binaries::{self, Binaries, Purpose};
use crate::cleanup::Cleanup;
use crate::components::Site;
use crate::kubectl::Kubectl;
use crate::pki::Authority;
use crate::port::Port;
use crate::process::{Probe, Process, Spec};
use crate::users::Users;
use crate::wait::eventually;
use crate::{Error, components, kubeconfig};

const GET_NAMESPACE: [&str; 3] = ["get", "namespace", "default"];
/// How long the API server may take to create this namespace.
const NAMESPACE_TIMEOUT: Duration = Duration::from_secs(30);

/// A running control plane, or an existing cluster used as one.
///
/// It can be shared between threads and kept in a `static`: it ends with the process at the latest. Dropping it stops
/// the controller manager, the API server and etcd, in this order (an API server without etcd takes minutes to stop),
/// and removes the data directory, kubeconfigs included.
pub struct ControlPlane {
    // Fields are dropped from top to bottom: the processes before the data directory.
    processes: Option<Processes>,
    access: Users,
    kubectl: Kubectl,
    admin: PathBuf,
    cleanup: Cleanup,
}

/// The processes of a control plane of our own. Fields are dropped from top to bottom.
struct Processes {
    /// `None` if its binary is not there: see [`ControlPlane::start_for_demo`].
    controller_manager: Option<Process>,
    apiserver: Process,
    etcd: Process,
    _port: Option<Port>,
}

// ---------------------------------------------------------------- start and stop

impl ControlPlane {
    /// Boots a control plane, or uses the cluster that `LOCKSTEP_TEST_KUBECONFIG` names.
    ///
    /// Returns after some seconds, when the API server and the controller manager are ready. The very first call may
    /// take minutes to build the binaries: see [`Binaries::find`].
    ///
    /// # Errors
    /// When there are no binaries, or a process does not become ready. The error quotes its log, which is kept in the
    /// system's temporary directory.
    pub fn start() -> Result<Self, Error> {
        Self::start_with(&[])
    }

    /// Like [`start`](Self::start), with more flags for the API server, such as
    /// `--max-requests-inflight=2000`. They override ours. An existing cluster ignores them.
    ///
    /// # Errors
    /// As for [`start`](Self::start).
    pub fn start_with(apiserver_flags: &[&str]) -> Result<Self, Error> {
        match binaries::from_env("LOCKSTEP_TEST_KUBECONFIG") {
            Some(kubeconfig) => Self::existing(&kubeconfig),
            None => Self::boot(&Binaries::find(Purpose::Tests)?, apiserver_flags),
        }
    }

    /// Like [`start`](Self::start), with any supported version whose binaries are there already, even without a
    /// controller manager: see [`Purpose::Demo`]. Prints which binaries these are.
    ///
    /// # Errors
    /// As for [`start`](Self::start).
    pub fn start_for_demo() -> Result<Self, Error> {
        if let Some(kubeconfig) = binaries::from_env("LOCKSTEP_TEST_KUBECONFIG") {
            return Self::existing(&kubeconfig);
        }
        let binaries = Binaries::find(Purpose::Demo)?;
        eprintln!("controlplane: {binaries}");
        Self::boot(&binaries, &[])
    }

    /// Uses the cluster of the current context of an administrator's kubeconfig. The file is read once: a later change
    /// of its context has no effect.
    ///
    /// # Errors
    /// When the kubeconfig has no usable context, or the cluster is not ready.
    pub fn existing(kubeconfig: &Path) -> Result<Self, Error> {
        let cleanup = Cleanup::start(new_data_dir()?)?;
        let dir = cleanup.dir();
        let kubectl = Kubectl::new(binaries::any_kubectl()?, dir);
        let (cluster, credentials) = kubeconfig::current(&kubectl, kubeconfig)?;
        let access = Users::existing(dir, cluster, credentials);
        let plane = Self { processes: None, admin: access.admin()?, access, kubectl, cleanup };
        plane.wait_ready()?;
        Ok(plane)
    }

    fn boot(binaries: &Binaries, apiserver_flags: &[&str]) -> Result<Self, Error> {
        let cleanup = Cleanup::start(new_data_dir()?)?;
        Self::boot_at(Site::machine()?, binaries, cleanup, Authority::new()?, apiserver_flags)
    }

    pub(crate) fn boot_at(
        site: Site,
        binaries: &Binaries,
        cleanup: Cleanup,
        authority: Authority,
        apiserver_flags: &[&str],
    ) -> Result<Self, Error> {
        let dir = cleanup.dir();
        components::write_files(dir, &authority, &site)?;
        let access = Users::own(dir, &format!("https://{}:{}", site.address, site.port), authority);
        let kubectl = Kubectl::new(binaries.program("kubectl"), dir);
        let admin = access.admin()?;

        // On an error, the processes started so far are dropped, the last one first.
        let start = |spec| Process::start(spec, &cleanup);
        let etcd = start(components::etcd(binaries, dir))?;
        etcd.wait_ready().map_err(keep_log)?;
        let ready = kubectl.succeeds(&admin, &["get", "--raw=/readyz"]);
        let apiserver = start(components::apiserver(binaries, dir, &site, apiserver_flags, ready))?;
        apiserver.wait_ready().map_err(keep_log)?;

        let controller_manager = if binaries.have_controller_manager() {
            // Only now: it gives up when the API server is not ready within ten seconds.
            let own = access.user("system:kube-controller-manager", &[])?;
            // It creates this account first. After a restart the account exists already.
            let ready =
                kubectl.succeeds(&admin, &["get", "serviceaccount", "default", "--namespace=default"]);
            let process = start(components::controller_manager(binaries, dir, &own, ready))?;
            process.wait_ready().map_err(keep_log)?;
            Some(process)
        } else {
            // The API server is ready before it has created its namespaces.
            eventually(NAMESPACE_TIMEOUT, kubectl.succeeds(&admin, &GET_NAMESPACE));
            kubectl.run(&admin, &GET_NAMESPACE)?;
            None
        };

        let processes = Some(Processes { controller_manager, apiserver, etcd, _port: site.reservation });
        Ok(Self { processes, access, kubectl, admin, cleanup })
    }

    /// Waits until the API server is ready, which includes its connection to etcd. For tests that have killed or paused
    /// one of the two.
    ///
    /// # Errors
    /// [`Error::NotRunning`] when the API server was killed, [`Error::NotReady`] when it takes too
    /// long, [`Error::Kubectl`] when an existing cluster, which is checked only once, is not ready.
    pub fn wait_ready(&self) -> Result<(), Error> {
        match &self.processes {
            Some(own) => own.apiserver.wait_ready(),
            None => {
                self.kubectl.run(&self.admin, &["get", "--raw=/readyz", "--request-timeout=1m"]).map(|_| ())
            }
        }
    }

    /// Stops everything and removes the data directory, as dropping does.
    pub fn stop(self) {
        drop(self);
    }
}

// ---------------------------------------------------------------- access

impl ControlPlane {
    /// The kubeconfig of an administrator.
    #[must_use]
    pub fn admin(&self) -> PathBuf {
        self.admin.clone()
    }

    /// Writes a kubeconfig for a user in these groups, with a client certificate. On an existing
    /// cluster, the administrator impersonates the user: the audit log shows both.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn user(&self, name: &str, groups: &[&str]) -> Result<PathBuf, Error> {
        self.access.user(name, groups)
    }

    /// Writes a kubeconfig for an existing `ServiceAccount`, with a token for twelve hours. The token becomes invalid
    /// when the `ServiceAccount` is deleted, even if it is recreated under the same name.
    ///
    /// # Errors
    /// [`Error::Kubectl`] when there is no such `ServiceAccount`.
    pub fn service_account(&self, namespace: &str, name: &str) -> Result<PathBuf, Error> {
        let args = ["create", "token", name, "--namespace", namespace, "--duration=12h"];
        let token = self.kubectl.run(&self.admin, &args)?;
        self.access.service_account(namespace, name, token.trim())
    }

    /// A kubectl command as the administrator.
    #[must_use]
    pub fn kubectl(&self) -> Command {
        self.kubectl_as(&self.admin)
    }

    /// A kubectl command with this kubeconfig.
    #[must_use]
    pub fn kubectl_as(&self, kubeconfig: &Path) -> Command {
        self.kubectl.with(kubeconfig)
    }

    /// The kubectl program. Prefer [`kubectl`](Self::kubectl): it does not use the user's discovery cache, which may
    /// describe an earlier server at the same address.
    #[must_use]
    pub fn kubectl_path(&self) -> PathBuf {
        self.kubectl.program().to_owned()
    }

    /// The address of the API server, like `https://127.0.0.1:34567`.
    #[must_use]
    pub fn server_url(&self) -> &str {
        self.access.server()
    }
}

// ---------------------------------------------------------------- processes and files

impl ControlPlane {
    /// Whether this is an existing cluster, whose processes and audit log cannot be reached. Tests that need them are
    /// skipped.
    #[must_use]
    pub fn is_existing(&self) -> bool {
        self.processes.is_none()
    }

    /// etcd. Without it the API server still answers some reads from its cache.
    ///
    /// # Errors
    /// [`Error::ExistingCluster`] when it is not ours.
    pub fn etcd(&self) -> Result<&Process, Error> {
        self.own("etcd").map(|own| &own.etcd)
    }

    /// Takes a backup of etcd, as `etcdctl snapshot save` does, and returns its file.
    ///
    /// # Errors
    /// [`Error::ExistingCluster`] when etcd is not ours, [`Error::Tool`] when it fails, otherwise as for
    /// [`Binaries::build`].
    pub fn back_up(&self) -> Result<PathBuf, Error> {
        self.own("etcd")?;
        let file = self.data_dir().join("backup.db");
        let endpoint = format!("--endpoints=unix://{}", components::etcd_socket(self.data_dir()).display());
        let mut save = Command::new(Binaries::build_etcd_tools()?.program("etcdctl"));
        run_tool(save.args([&endpoint, "snapshot", "save"]).arg(&file))?;
        Ok(file)
    }

    /// The revision of etcd at which a backup was taken.
    ///
    /// # Errors
    /// As for [`back_up`](Self::back_up).
    pub fn backup_revision(&self, backup: &Path) -> Result<u64, Error> {
        let mut status = Command::new(Binaries::build_etcd_tools()?.program("etcdutl"));
        let status =
            status.args(["snapshot", "status", "--write-out=json"]).arg(backup).env_clear().output()?;
        let text = String::from_utf8_lossy(&status.stdout).into_owned();
        let status: serde_json::Value = serde_json::from_str(&text).unwrap_or_default();
        status["revision"].as_u64().ok_or(Error::Tool(text))
    }

    /// Stops everything, restores etcd from a backup with these flags of `etcdutl snapshot restore`, and starts
    /// everything again.
    ///
    /// # Errors
    /// As for [`back_up`](Self::back_up), and when a process does not become ready.
    pub fn restore(&self, backup: &Path, flags: &[&str]) -> Result<(), Error> {
        let own = self.own("etcd")?;
        let mut restore = Command::new(Binaries::build_etcd_tools()?.program("etcdutl"));
        let controller_manager = self.controller_manager()?;
        for process in [controller_manager, &own.apiserver, &own.etcd] {
            process.kill()?;
        }
        let data = components::etcd_data(self.data_dir());
        fs::remove_dir_all(&data).map_err(Error::at(&data))?;
        run_tool(restore.args(["snapshot", "restore"]).arg(backup).arg("--data-dir").arg(&data).args(flags))?;
        for process in [&own.etcd, &own.apiserver, controller_manager] {
            process.restart()?;
        }
        self.wait_ready()
    }

    /// The API server.
    ///
    /// # Errors
    /// [`Error::ExistingCluster`] when it is not ours.
    pub fn apiserver(&self) -> Result<&Process, Error> {
        self.own("kube-apiserver").map(|own| &own.apiserver)
    }

    /// The controller manager, with garbage collector and namespace controller.
    ///
    /// # Errors
    /// [`Error::ExistingCluster`] when it is not ours, [`Error::NotRunning`] when there is none.
    pub fn controller_manager(&self) -> Result<&Process, Error> {
        let name = "kube-controller-manager";
        self.own(name)?.controller_manager.as_ref().ok_or(Error::NotRunning(name))
    }

    /// The audit log: one JSON document per line for each request, reads included, with its metadata. The line is
    /// written before the response is complete. A watch has a line when it starts and one when it ends.
    ///
    /// # Errors
    /// [`Error::ExistingCluster`] when it is not ours.
    pub fn audit_log(&self) -> Result<PathBuf, Error> {
        self.own("the audit log").map(|_| self.cleanup.dir().join(components::AUDIT_LOG))
    }

    /// The private directory with logs, data and kubeconfigs. It is removed in the end.
    #[must_use]
    pub fn data_dir(&self) -> &Path {
        self.cleanup.dir()
    }

    /// Starts another process, which ends with the control plane at the latest, and waits until it is ready.
    pub(crate) fn add(&self, spec: Spec) -> Result<Process, Error> {
        let process = Process::start(spec, &self.cleanup)?;
        process.wait_ready().map_err(keep_log)?;
        Ok(process)
    }

    /// See [`Kubectl::succeeds`].
    pub(crate) fn asks(&self, args: &'static [&'static str]) -> Probe {
        self.kubectl.succeeds(&self.admin, args)
    }

    fn own(&self, what: &'static str) -> Result<&Processes, Error> {
        self.processes.as_ref().ok_or(Error::ExistingCluster(what))
    }
}

impl fmt::Debug for ControlPlane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("ControlPlane");
        debug
            .field("server_url", &self.server_url())
            .field("data_dir", &self.data_dir())
            .finish_non_exhaustive()
    }
}

fn run_tool(command: &mut Command) -> Result<(), Error> {
    let output = command.env_clear().output().map_err(Error::at(Path::new(command.get_program())))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(Error::Tool(String::from_utf8_lossy(&output.stderr).into_owned())),
    }
}

/// A path that no other control plane uses.
pub(crate) fn new_data_dir() -> Result<PathBuf, Error> {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    let count = COUNT.fetch_add(1, Ordering::Relaxed);
    let now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default().as_micros();
    let temp = path::absolute(env::temp_dir())?;
    match temp.to_str() {
        Some(_) => Ok(temp.join(format!("controlplane-{}-{count}-{now:x}", process::id()))),
        None => Err(Error::TempDir(temp)),
    }
}

/// Moves the log that an error names out of the data directory, which is about to be removed.
pub(crate) fn keep_log(mut error: Error) -> Error {
    if let Error::Ended { log, .. } | Error::NotReady { log, .. } = &mut error
        && let Some((dir, name)) = log.parent().zip(log.file_name())
    {
        let kept = dir.with_added_extension(name);
        if fs::rename(&*log, &kept).is_ok() {
            *log = kept;
        }
    }
    error
}
