//! Where the node lives: namespaces and cgroups of its own, and one link to the machine.

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::cgroups::Cgroups;
use super::preflight::{PATH, find};
use crate::cleanup::{Cleanup, SCRIPT};
use crate::control_plane::keep_log;
use crate::process::{Probe, Process, Spec};
use crate::{Error, files};

/// The two ends of the link. They are fixed, as is its name, so there can be one node at a time.
pub(crate) const MACHINE: Ipv4Addr = Ipv4Addr::new(10, 250, 0, 1);
pub(crate) const NODE: Ipv4Addr = Ipv4Addr::new(10, 250, 0, 2);
const LINK: &str = "lockstep-node";

/// What the shell is called that enters the node; what follows is the program to run there.
const ENTERED: &str = "node";

/// `nsenter` waits outside for what it started inside: if the one is killed, so is the other.
const TIED: &str = "setpriv --pdeathsig KILL --";

/// The first process: its death is the end of every process on the node, of all mounts and of the network. Only then
/// is anything mounted, and without a note of it (`-n`), so that the machine sees nothing of it.
///
/// - `/run`, `/var/log` and `/var/lib/cni` are written by kubelet, containerd and CNI. Since the last may not exist, it
///   is made in a copy-on-write view of `/var/lib`.
/// - The kubelet sets kernel parameters that are not bound to a namespace: it gets files instead.
const INIT: &str = r#"
mount -n -t tmpfs -o mode=755 run /run
mkdir -p /run/netns /run/lock /run/lib/upper /run/lib/work /run/sys
mount -n -t tmpfs -o mode=755 log /var/log
mount -n -t overlay -o lowerdir=/var/lib,upperdir=/run/lib/upper,workdir=/run/lib/work lib /var/lib
for parameter in vm/overcommit_memory=1 vm/panic_on_oom=0 kernel/panic=10 kernel/panic_on_oops=1 \
        kernel/keys/root_maxkeys=1000000 kernel/keys/root_maxbytes=25000000; do
    name=${parameter%=*}
    file=/run/sys/$(echo "$name" | tr / .)
    echo "${parameter#*=}" > "$file"
    mount -n --bind "$file" "/proc/sys/$name"
done
mount -n --make-rshared /
echo node > /proc/sys/kernel/hostname
echo 1 > /proc/sys/net/ipv4/ip_forward
[ ! -e /proc/sys/net/bridge ] || echo 1 > /proc/sys/net/bridge/bridge-nf-call-iptables
ip link set lo up
: > "$1/sandbox"
sleep infinity &
while :; do wait || :; done
"#;

/// The namespaces, held open by their first process. Dropping it ends whatever runs in them.
pub(crate) struct Sandbox {
    _first: Process,
    /// The first process, as the machine knows it.
    pid: u32,
    cgroups: Cgroups,
}

impl Sandbox {
    pub(crate) fn start(cleanup: &Cleanup) -> Result<Self, Error> {
        let dir = cleanup.dir();
        let cgroups = Cgroups::find()?;
        // Before there is anything to sweep.
        let sweep = format!("PATH={PATH}\nip link del {LINK}\n{}", cgroups.sweep());
        files::write_private(&dir.join(SCRIPT), &sweep)?;
        cgroups.make()?;

        let up = dir.join("sandbox");
        // The namespace of cgroups begins where its first process is, which then goes where processes may stay.
        let begin =
            format!("PATH={PATH}; export PATH\n{}exec unshare --cgroup -- \"$@\"", cgroups.join_root());
        let unshare =
            "exec unshare --mount --net --pid --uts --ipc --fork --kill-child --mount-proc -- \"$@\"";
        let rest = format!("{}{unshare}", cgroups.join_leaf());
        let init = format!("set -e\n{}{INIT}", cgroups.mount());
        let own = dir.display().to_string();
        let args = ["-c", &begin, "node", "sh", "-c", &rest, "node", "sh", "-c", &init, "node-init", &own];
        let spec = Spec {
            name: "node",
            program: "/bin/sh".into(),
            args: args.map(str::to_owned).to_vec(),
            ready: Box::new(move || up.exists()),
        };
        let first = Process::start(spec, cleanup)?;
        first.wait_ready().map_err(keep_log)?;
        let parent = first.id().unwrap_or_default();
        let children = PathBuf::from(format!("/proc/{parent}/task/{parent}/children"));
        let child = fs::read_to_string(&children).map_err(Error::at(&children))?;
        let sandbox = Self {
            _first: first,
            pid: child.trim().parse().map_err(|_| Error::NoNode(format!("{} is odd", children.display())))?,
            cgroups,
        };
        sandbox.link()?;
        Ok(sandbox)
    }

    /// The one link: the machine can reach the node and its API server. Nothing else can be reached from there.
    fn link(&self) -> Result<(), Error> {
        let pid = self.pid.to_string();
        for line in [
            format!("ip link add {LINK} type veth peer name eth0 netns {pid}"),
            format!("ip addr add {MACHINE}/30 dev {LINK}"),
            format!("ip link set {LINK} up"),
        ] {
            run(Command::new("/bin/sh").args(["-c", &line]).env("PATH", PATH))?;
        }
        for line in [
            format!("ip addr add {NODE}/30 dev eth0"),
            "ip link set eth0 up".to_owned(),
            // Addresses of Services: without a route, nothing is sent that kube-proxy could redirect.
            "ip route add 10.0.0.0/24 dev eth0".to_owned(),
        ] {
            run(self.command("sh").args(["-c", &line]))?;
        }
        Ok(())
    }

    /// A program that runs on the node, with everything it starts.
    pub(crate) fn spec(&self, name: &'static str, program: &Path, args: &[String], ready: Probe) -> Spec {
        let mut all = self.enter();
        all.push(program.display().to_string());
        all.extend(args.iter().cloned());
        Spec { name, program: "/bin/sh".into(), args: all, ready }
    }

    /// A command that runs on the node.
    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = Command::new("/bin/sh");
        command.args(self.enter()).arg(program).env_clear();
        command
    }

    /// What brings a program into the network alone, so that it can be killed and paused like one of the machine.
    pub(crate) fn network_entrance(&self) -> (PathBuf, Vec<String>) {
        let nsenter = find("nsenter").unwrap_or_else(|| "nsenter".into());
        (nsenter, vec![format!("--net=/proc/{}/ns/net", self.pid), "--".to_owned()])
    }

    /// The most memory that a container ever had, and its limit, in bytes.
    pub(crate) fn memory(&self, container: &str) -> Result<(u64, u64), Error> {
        self.cgroups.memory(container)
    }

    fn enter(&self) -> Vec<String> {
        let pid = self.pid;
        let nsenter =
            format!("exec nsenter --target {pid} --mount --net --pid --uts --ipc --cgroup -- {TIED} \"$@\"");
        let script = format!("PATH={PATH}; export PATH\n{}{nsenter}", self.cgroups.join_leaf());
        ["-c", &script, ENTERED].map(str::to_owned).to_vec()
    }
}

/// Runs a command that must succeed.
pub(crate) fn run(command: &mut Command) -> Result<String, Error> {
    let output = command.output().map_err(Error::at(Path::new(command.get_program())))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    // What comes before is how it got onto the node.
    let args: Vec<_> = command.get_args().map(|arg| arg.to_string_lossy()).collect();
    let start = args.iter().rposition(|arg| arg == ENTERED || arg == "-c").map_or(0, |at| at + 1);
    Err(Error::Command {
        command: args[start..].join(" "),
        stderr: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    })
}
