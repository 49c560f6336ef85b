//! Checks whether this machine can run a node.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::cgroups;

/// The required programs, and the Debian packages that contain them.
const PROGRAMS: [(&str, &str); 9] = [
    ("containerd", "containerd"),
    ("ctr", "containerd"),
    ("runc", "runc"),
    ("iptables", "iptables"),
    ("ip", "iproute2"),
    ("mount", "mount"),
    ("unshare", "util-linux"),
    ("nsenter", "util-linux"),
    ("setpriv", "util-linux"),
];

/// The search path for programs, here and on the node, independent of the user's environment.
pub(crate) const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// Why this machine cannot run a node and what to do about it, in one line.
pub(crate) fn unmet_requirement() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("it needs root, for namespaces and cgroups".to_owned());
    }
    for (program, package) in PROGRAMS {
        if find(program).is_none() {
            return Some(format!("{program} is not installed (Debian: apt-get install {package})"));
        }
    }
    if plugins().is_none() {
        return Some(
            "there are no CNI plugins (Debian: apt-get install containernetworking-plugins)".to_owned(),
        );
    }
    if let Some(reason) = cgroups::unmet_requirement() {
        return Some(reason);
    }
    let mut namespaces = Command::new("unshare");
    namespaces
        .args(["--mount", "--net", "--pid", "--cgroup", "--fork", "mount", "-n", "-t", "tmpfs", "x", "/mnt"]);
    let made = namespaces.stdout(Stdio::null()).stderr(Stdio::null()).status();
    if made.is_ok_and(|status| status.success()) {
        None
    } else {
        Some("root may neither create namespaces nor mount: is this an unprivileged container?".to_owned())
    }
}

/// The path of an installed program.
pub(crate) fn find(program: &str) -> Option<PathBuf> {
    PATH.split(':').map(|dir| Path::new(dir).join(program)).find(|file| file.is_file())
}

/// The directory of the CNI plugins; Debian has its own.
pub(crate) fn plugins() -> Option<&'static Path> {
    ["/usr/lib/cni", "/opt/cni/bin"].map(Path::new).into_iter().find(|dir| dir.join("bridge").is_file())
}
