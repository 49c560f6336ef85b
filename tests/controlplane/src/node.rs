//! A cluster with one real node: kubelet, kube-proxy, scheduler, containerd and runc, without Docker.
//!
//! Everything runs in its own Linux namespaces and cgroups, below its own data directory, and is cleaned up when this
//! process ends: the machine is then as it was before. Images come from archives; the node reaches neither a registry
//! nor DNS.

mod cgroups;
mod preflight;
mod programs;
mod sandbox;

use std::fmt;
use std::fs;
use std::net::Ipv4Addr;
use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use serde_json::Value;

use self::sandbox::{MACHINE, NODE, Sandbox, run};
use crate::binaries::Binaries;
use crate::cleanup::Cleanup;
use crate::components::Site;
use crate::control_plane::{ControlPlane, new_data_dir};
use crate::image::Image;
use crate::pki::{Authority, Credentials};
use crate::process::{Probe, Process, Spec};
use crate::{Error, compile, files};

/// The name of the node.
const NAME: &str = "node";
/// The containerd namespace that the kubelet uses.
const CONTAINERD_NAMESPACE: &str = "k8s.io";
const API_SERVER_PORT: u16 = 6443;
/// The directory that is locked while a node runs: every user of the machine has it.
const MACHINE_LOCK: &str = "/run";

/// A control plane with one node. There is one at a time on a machine; others wait.
///
/// Dropping it stops everything, as the end of the process does.
pub struct Node {
    // Fields are dropped from top to bottom: the programs on the node, the node, the control plane.
    _scheduler: Process,
    _kube_proxy: Process,
    kubelet: Process,
    _containerd: Process,
    sandbox: Sandbox,
    plane: ControlPlane,
}

impl Node {
    /// Why this machine cannot run a node, if so; tests that need one are then skipped.
    #[must_use]
    pub fn unmet_requirement() -> Option<String> {
        preflight::unmet_requirement()
    }

    /// Boots a cluster whose node has the images of these archives. Returns when the node is ready for pods.
    ///
    /// # Errors
    /// [`Error::NoNode`] if there is an [unmet requirement](Self::unmet_requirement), and whatever prevents building or
    /// booting.
    pub fn start(images: &[&Path]) -> Result<Self, Error> {
        if let Some(reason) = Self::unmet_requirement() {
            return Err(Error::NoNode(reason));
        }
        // Not those of `KUBEBUILDER_ASSETS` or of another minor: a kubelet must not be newer than its API server.
        let (binaries, programs) = (Binaries::build_for_node()?, Binaries::build_node()?);
        let lock = compile::lock(Path::new(MACHINE_LOCK), "runs a node")?;
        let cleanup = Cleanup::start_locked(new_data_dir()?, lock)?;
        let dir = cleanup.dir().to_owned();
        let authority = Authority::new()?;
        write_files(&dir, &authority)?;

        let sandbox = Sandbox::start(&cleanup)?;
        let site = Site {
            address: NODE,
            port: API_SERVER_PORT,
            reservation: None,
            enter: Some(sandbox.network_wrapper()),
            flags: programs::apiserver_flags(&dir),
        };
        let plane = ControlPlane::boot_at(site, &binaries, cleanup, authority, &[])?;

        let containerd = plane.add(containerd(&sandbox, &dir)?)?;
        let pause = dir.join("pause.tar");
        Image::pause(&programs.program("pause"), programs::PAUSE)?.write(&pause)?;
        for image in [&[pause.as_path()], images].concat() {
            let image = std::path::absolute(image)?;
            run(ctr(&sandbox).args(["images", "import"]).arg(image))?;
        }
        let kubelet = plane.add(kubelet(&sandbox, &plane, &programs.program("kubelet"))?)?;
        let kube_proxy = plane.add(kube_proxy(&sandbox, &plane, &programs.program("kube-proxy"))?)?;
        let scheduler = plane.add(scheduler(&plane, &programs)?)?;
        let node = Self {
            _scheduler: scheduler,
            _kube_proxy: kube_proxy,
            kubelet,
            _containerd: containerd,
            sandbox,
            plane,
        };
        Ok(node)
    }

    /// The cluster.
    #[must_use]
    pub fn plane(&self) -> &ControlPlane {
        &self.plane
    }

    /// The kubelet. Containers keep running without it.
    #[must_use]
    pub fn kubelet(&self) -> &Process {
        &self.kubelet
    }

    /// The address at which programs on the node reach this machine.
    #[must_use]
    pub fn machine_address(&self) -> Ipv4Addr {
        MACHINE
    }

    /// `ctr` for the kubelet's containers, such as `tasks kill --signal SIGKILL ID`.
    #[must_use]
    pub fn ctr(&self) -> Command {
        ctr(&self.sandbox)
    }

    /// The peak of a container's memory, and its limit, in bytes.
    ///
    /// # Errors
    /// When there is no such container.
    pub fn memory(&self, container: &str) -> Result<(u64, u64), Error> {
        self.sandbox.memory(container)
    }
}

impl fmt::Debug for Node {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Node").field("plane", &self.plane).finish_non_exhaustive()
    }
}

/// Writes the files that configurations and flags refer to.
fn write_files(dir: &Path, authority: &Authority) -> Result<(), Error> {
    let pair = |name: &str, pair: Credentials| {
        files::write_private(&dir.join(format!("{name}.crt")), &pair.certificate)?;
        files::write_private(&dir.join(format!("{name}.key")), &pair.key)
    };
    pair("kubelet", authority.server(&[NAME, &NODE.to_string()])?)?;
    pair("kubelet-client", authority.client("kube-apiserver-kubelet-client", &["system:masters"])?)?;
    files::write_private(&dir.join("resolv.conf"), "")?;
    let cni = dir.join("cni");
    fs::create_dir(&cni).map_err(Error::at(&cni))?;
    files::write_private(&cni.join("pods.conflist"), &programs::network().to_string())
}

fn ctr(sandbox: &Sandbox) -> Command {
    let mut command = sandbox.command("ctr");
    command.args(["--address", programs::SOCKET, "--namespace", CONTAINERD_NAMESPACE]);
    command
}

fn containerd(sandbox: &Sandbox, dir: &Path) -> Result<Spec, Error> {
    let config = dir.join("containerd.toml");
    files::write_private(&config, &programs::containerd(dir))?;
    let mut version = ctr(sandbox);
    version.arg("version");
    let ready = output_probe(version, |_| true);
    let args = [format!("--config={}", config.display())];
    Ok(sandbox.spec("containerd", Path::new("containerd"), &args, ready))
}

/// A probe: whether a command succeeds and prints what is expected.
fn output_probe(command: Command, expected: fn(&str) -> bool) -> Probe {
    let command = Mutex::new(command);
    Box::new(move || {
        let mut command = command.lock().unwrap_or_else(PoisonError::into_inner);
        let succeeded = command.output().ok().filter(|output| output.status.success());
        succeeded.is_some_and(|output| expected(&String::from_utf8_lossy(&output.stdout)))
    })
}

/// Writes a configuration file and returns the flag that names it.
fn config(dir: &Path, name: &str, content: &Value) -> Result<String, Error> {
    let path = dir.join(name);
    files::write_private(&path, &content.to_string())?;
    Ok(format!("--config={}", path.display()))
}

fn kubelet(sandbox: &Sandbox, plane: &ControlPlane, program: &Path) -> Result<Spec, Error> {
    let dir = plane.data_dir();
    let kubeconfig = plane.user(&format!("system:node:{NAME}"), &["system:nodes"])?;
    let ready = plane.asks(&["wait", "node", NAME, "--for=condition=Ready", "--timeout=4s"]);
    let args = [
        config(dir, "kubelet.json", &programs::kubelet(dir))?,
        format!("--kubeconfig={}", kubeconfig.display()),
        format!("--root-dir={}", dir.join("kubelet").display()),
        format!("--cert-dir={}", dir.join("kubelet-pki").display()),
        format!("--hostname-override={NAME}"),
        format!("--node-ip={NODE}"),
    ];
    Ok(sandbox.spec("kubelet", program, &args, ready))
}

fn kube_proxy(sandbox: &Sandbox, plane: &ControlPlane, program: &Path) -> Result<Spec, Error> {
    let kubeconfig = plane.user("system:kube-proxy", &[])?;
    let args = [config(plane.data_dir(), "kube-proxy.json", &programs::kube_proxy(&kubeconfig))?];
    // It is ready when it has written rules for the first Service.
    let mut rules = sandbox.command("iptables-save");
    rules.args(["--table", "nat"]);
    let ready = output_probe(rules, |rules| rules.contains("default/kubernetes"));
    Ok(sandbox.spec("kube-proxy", program, &args, ready))
}

fn scheduler(plane: &ControlPlane, programs: &Binaries) -> Result<Spec, Error> {
    let kubeconfig = plane.user("system:kube-scheduler", &[])?;
    Ok(Spec {
        name: "kube-scheduler",
        program: programs.program("kube-scheduler"),
        args: vec![
            format!("--kubeconfig={}", kubeconfig.display()),
            "--leader-elect=false".into(),
            // It needs no port, because nothing calls it.
            "--secure-port=0".into(),
        ],
        ready: Box::new(|| true),
    })
}
