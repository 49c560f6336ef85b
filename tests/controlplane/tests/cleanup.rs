//! No process and no file is left, whichever way the process that booted a control plane ends.

mod common;

use std::os::unix::fs::symlink;
use std::os::unix::process::ExitStatusExt;
use std::process::Command;
use std::time::Duration;
use std::{env, fs};

use controlplane::{Binaries, eventually};
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

use common::Up;

const DEADLINE: Duration = Duration::from_mins(1);

fn runs(up: &Up, program: &str) -> bool {
    up.processes().iter().any(|line| line.split(' ').next().unwrap().ends_with(program))
}

fn wait_until_up(up: &mut Up) {
    let printed = up.exports();
    assert!(printed[0].starts_with("export KUBECONFIG="), "{printed:?}");
    assert!(printed[3].starts_with("export PATH="), "{printed:?}");
    for program in ["etcd", "kube-apiserver", "kube-controller-manager", "sh"] {
        assert!(runs(up, program), "{program}");
    }
    assert_eq!(up.data_dirs(), 1);
}

/// Waits until `up` was ended by the signal, and its processes and files are gone.
fn assert_nothing_is_left_after(signal: Signal, mut up: Up) {
    assert_eq!(up.0.wait().unwrap().signal(), Some(signal.as_raw()));
    let clean = eventually(DEADLINE, || up.processes().is_empty() && up.data_dirs() == 0);
    assert!(clean, "{} directories, {:#?}", up.data_dirs(), up.processes());
}

#[test]
fn nothing_is_left_when_killed_after_boot() {
    let mut up = Up::start(&[]);
    wait_until_up(&mut up);
    kill_process(Pid::from_child(&up.0), Signal::KILL).unwrap();
    assert_nothing_is_left_after(Signal::KILL, up);
}

#[test]
fn nothing_is_left_when_killed_during_boot() {
    let up = Up::start(&[]);
    assert!(eventually(DEADLINE, || runs(&up, "kube-apiserver")));
    kill_process(Pid::from_child(&up.0), Signal::KILL).unwrap();
    assert_nothing_is_left_after(Signal::KILL, up);
}

/// A terminal sends SIGINT to the whole process group.
#[test]
fn nothing_is_left_after_ctrl_c_in_a_terminal() {
    let mut up = Up::start(&[]);
    wait_until_up(&mut up);
    kill_process_group(Pid::from_child(&up.0), Signal::INT).unwrap();
    assert_nothing_is_left_after(Signal::INT, up);
}

#[test]
fn control_plane_for_the_demo_runs_without_a_controller_manager_and_leaves_nothing() {
    let built = Binaries::build().unwrap();
    let assets = env::temp_dir().join(format!("assets-{}", std::process::id()));
    fs::create_dir(&assets).unwrap();
    for name in ["etcd", "kube-apiserver", "kubectl"] {
        symlink(built.dir().join(name), assets.join(name)).unwrap();
    }
    let variables =
        [format!("KUBEBUILDER_ASSETS={}", assets.display()), "LOCKSTEP_TEST_KUBERNETES=".to_owned()];
    let mut up = Up::start(&[&variables[0], &variables[1], "demo"]);
    let exports = up.exports().join("\n");
    let create = format!("{exports}\nkubectl create configmap colors");
    assert!(Command::new("sh").args(["-c", &create]).status().unwrap().success());
    assert!(runs(&up, "kube-apiserver") && !runs(&up, "kube-controller-manager"));
    fs::remove_dir_all(assets).unwrap();
    kill_process(Pid::from_child(&up.0), Signal::KILL).unwrap();
    assert_nothing_is_left_after(Signal::KILL, up);
}
