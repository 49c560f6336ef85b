//! The node's Linux namespaces and cgroups, and its network link to the machine.

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

/// The addresses of the link. They are fixed, as is its name, so there can be only one node at a time.
pub(crate) const MACHINE: Ipv4Addr = Ipv4Addr::new(10, 250, 0, 1);
pub(crate) const NODE: Ipv4Addr = Ipv4Addr::new(10, 250, 0, 2);
const LINK: &str = "lockstep-node";

/// The name (`$0`) of the shell that enters the node; the program to run there follows it.
const ENTERED: &str = "node";

/// `nsenter` waits outside for the program that it started inside: when it is killed, the program is killed, too.
const DIE_WITH_PARENT: &str = "setpriv --pdeathsig KILL --";

/// The first process of the node: when it ends, all processes, mounts and the network of the node end. It mounts with
/// `-n`, which leaves no entry in the machine's mount table.
///
/// - kubelet, containerd and CNI write to `/run`, `/var/log` and `/var/lib/cni`. The last may not exist, so `/var/lib`
///   is an overlay.
/// - The kubelet sets kernel parameters that do not belong to a namespace: files are mounted in their place.
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

/// The namespaces, kept open by their first process. Dropping it ends everything that runs in them.
pub(crate) struct Sandbox {
    _first: Process,
    /// The first process's id on the machine.
    pid: u32,
    cgroups: Cgroups,
}

impl Sandbox {
    pub(crate) fn start(cleanup: &Cleanup) -> Result<Self, Error> {
        let dir = cleanup.dir();
        let cgroups = Cgroups::find()?;
        // The script is written before there is anything to clean up.
        let script = format!("PATH={PATH}\nip link del {LINK}\n{}", cgroups.removal_script());
        files::write_private(&dir.join(SCRIPT), &script)?;
        cgroups.create()?;

        let up = dir.join("sandbox");
        // The cgroup namespace starts at the cgroup of its first process, which then moves to the leaf.
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
            pid: child.trim().parse().map_err(|_| {
                Error::NoNode(format!("cannot read a process id from {}", children.display()))
            })?,
            cgroups,
        };
        sandbox.link()?;
        Ok(sandbox)
    }

    /// Links the node to the machine. The node reaches nothing else.
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
            // Without a route to Service addresses, no packet is sent that kube-proxy could redirect.
            "ip route add 10.0.0.0/24 dev eth0".to_owned(),
        ] {
            run(self.command("sh").args(["-c", &line]))?;
        }
        Ok(())
    }

    /// A program that runs on the node.
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

    /// A wrapper that runs a program only in the node's network, so that it can be killed and paused from the machine.
    pub(crate) fn network_wrapper(&self) -> (PathBuf, Vec<String>) {
        let nsenter = find("nsenter").unwrap_or_else(|| "nsenter".into());
        (nsenter, vec![format!("--net=/proc/{}/ns/net", self.pid), "--".to_owned()])
    }

    /// The peak of a container's memory, and its limit, in bytes.
    pub(crate) fn memory(&self, container: &str) -> Result<(u64, u64), Error> {
        self.cgroups.memory(container)
    }

    fn enter(&self) -> Vec<String> {
        let pid = self.pid;
        let nsenter = format!(
            "exec nsenter --target {pid} --mount --net --pid --uts --ipc --cgroup -- {DIE_WITH_PARENT} \"$@\""
        );
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
    // The arguments before that enter the node.
    let args: Vec<_> = command.get_args().map(|arg| arg.to_string_lossy()).collect();
    let start = args.iter().rposition(|arg| arg == ENTERED || arg == "-c").map_or(0, |at| at + 1);
    Err(Error::Command {
        command: args[start..].join(" "),
        stderr: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    })
}
