//! A node leaves the machine as it was, even if its owner is killed. Run by `make test-node`, otherwise skipped.

mod common;

use std::collections::BTreeSet;
use std::fs;
use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use controlplane::{Node, eventually, skip};
use rustix::process::{Pid, Signal, kill_process};

use common::Up;

const DEADLINE: Duration = Duration::from_mins(1);

/// A pod with the image that every node has.
const POD: &str = r#"{"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "idle"}, "spec": {"containers": [
    {"name": "idle", "image": "localhost/pause:1", "imagePullPolicy": "Never"}]}}"#;

/// What a node could leave behind: links, addresses, routes, firewall rules, mounts, cgroups, kernel parameters,
/// and directories that its programs use.
fn machine() -> BTreeSet<String> {
    let mut seen = BTreeSet::new();
    for line in ["ip -brief link", "ip -brief addr", "ip route", "iptables-save", "sysctl -a"] {
        let mut words = line.split(' ');
        let output = Command::new(words.next().unwrap()).args(words).stderr(Stdio::null()).output();
        let text =
            output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
        let names = ["net.ipv4", "net.bridge", "vm.overcommit", "vm.panic", "kernel.panic", "kernel.keys"];
        let lasting = text.lines().filter(|entry| {
            !entry.starts_with('#')
                && (line != "sysctl -a" || names.iter().any(|name| entry.starts_with(name)))
        });
        // Packet counters are in brackets.
        let lasting = lasting.map(|entry| entry.split(" [").next().unwrap_or_default());
        seen.extend(lasting.map(|entry| format!("{line}: {entry}")));
    }
    seen.extend(fs::read_to_string("/proc/self/mounts").unwrap().lines().map(str::to_owned));
    cgroups(Path::new("/sys/fs/cgroup"), &mut seen);
    seen.extend(unused_delegated_controllers());
    for dir in ["/var/lib", "/var/log", "/run", "/etc/cni", "/opt"] {
        let entries = fs::read_dir(dir).into_iter().flatten().filter_map(Result::ok);
        seen.extend(entries.map(|entry| entry.path().display().to_string()));
    }
    seen
}

/// Cgroups of a node.
fn cgroups(dir: &Path, seen: &mut BTreeSet<String>) {
    for entry in fs::read_dir(dir).into_iter().flatten().filter_map(Result::ok) {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            if entry.path().display().to_string().contains("lockstep-node") {
                seen.insert(entry.path().display().to_string());
            }
            cgroups(&entry.path(), seen);
        }
    }
}

/// In cgroups version 2: controllers that the root delegates and no other cgroup uses. systemd may change the others.
fn unused_delegated_controllers() -> BTreeSet<String> {
    let root = Path::new("/sys/fs/cgroup");
    let controllers = |dir: &Path| -> BTreeSet<String> {
        let list = fs::read_to_string(dir.join("cgroup.subtree_control")).unwrap_or_default();
        list.split_whitespace().map(|one| format!("controller {one}")).collect()
    };
    let others = fs::read_dir(root).into_iter().flatten().filter_map(Result::ok).map(|entry| entry.path());
    let used: BTreeSet<_> = others.flat_map(|dir| controllers(&dir)).collect();
    controllers(root).difference(&used).cloned().collect()
}

/// Command lines of the processes in the node's cgroups.
fn inside() -> Vec<String> {
    common::processes(|_, dir| {
        fs::read_to_string(dir.join("cgroup")).is_ok_and(|cgroups| cgroups.contains("lockstep-node"))
    })
}

/// Starts a pod with the kubectl and the kubeconfig that `up` prints.
fn start_pod(up: &mut Up) {
    let exports = up.exports().join("\n");
    let mut shell = Command::new("sh")
        .args([
            "-c",
            &format!(
                "{exports}\nuntil kubectl get serviceaccount default; do sleep 0.1; done\n\
             kubectl apply -f - && kubectl wait --for=condition=Ready pod/idle --timeout=1m"
            ),
        ])
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    shell.stdin.take().unwrap().write_all(POD.as_bytes()).unwrap();
    assert!(shell.wait().unwrap().success(), "no pod on the node");
}

#[test]
fn machine_is_unchanged_after_the_owner_of_a_node_is_killed() {
    let reason = match std::env::var_os("LOCKSTEP_TEST_IMAGE") {
        None => Some("only `make test-node` runs it".to_owned()),
        Some(_) => Node::unmet_requirement(),
    };
    if let Some(reason) = reason {
        return skip(&reason);
    }

    // Wait for a node of another process.
    let others = || machine().iter().any(|line| line.contains("lockstep-node"));
    assert!(eventually(10 * DEADLINE, || !others()), "another process runs a node");
    let before = machine();
    for with_a_pod in [true, false] {
        let mut up = Up::start(&["node"]);
        if with_a_pod {
            start_pod(&mut up);
            assert!(machine().iter().any(|line| line.contains("lockstep-node")), "no trace of the node");
        } else {
            // Kill it during its boot.
            let boots = || up.processes().iter().any(|line| line.contains("kube-apiserver"));
            assert!(eventually(DEADLINE, boots));
        }
        kill_process(Pid::from_child(&up.0), Signal::KILL).unwrap();
        up.0.wait().unwrap();
        let left = || [up.processes(), inside()].concat();
        assert!(eventually(DEADLINE, || left().is_empty()), "{:#?}", left());
        assert!(eventually(DEADLINE, || up.data_dirs() == 0), "the data directory is left");
        // Other processes on this machine may cause temporary changes.
        let changed = || machine().symmetric_difference(&before).cloned().collect::<Vec<_>>();
        assert!(eventually(DEADLINE, || changed().is_empty()), "{:#?}", changed());
    }
}
