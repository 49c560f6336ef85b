//! Nothing stays behind, whichever way the process that booted a control plane ends.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use controlplane::eventually;
use rustix::process::{Pid, Signal, kill_process, kill_process_group};

const DEADLINE: Duration = Duration::from_mins(1);

/// `controlplane up` in a process group of its own, like a job of an interactive shell.
fn up() -> Child {
    Command::new(env!("CARGO_BIN_EXE_controlplane"))
        .arg("up")
        .env_remove("LOCKSTEP_TEST_KUBECONFIG")
        .stdout(Stdio::piped())
        .process_group(0)
        .spawn()
        .unwrap()
}

/// Command lines of all processes that mention the data directory of `up`, its helpers included.
fn processes(up: &Child) -> Vec<String> {
    let mark = format!("/controlplane-{}-", up.id());
    let proc = fs::read_dir("/proc").unwrap().filter_map(Result::ok);
    proc.filter_map(|entry| fs::read(entry.path().join("cmdline")).ok())
        .map(|line| String::from_utf8_lossy(&line).replace('\0', " "))
        .filter(|line| line.contains(&mark))
        .collect()
}

fn data_dirs(up: &Child) -> usize {
    let mark = format!("controlplane-{}-", up.id());
    let entries = fs::read_dir(std::env::temp_dir()).unwrap().filter_map(Result::ok);
    entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(&mark)).count()
}

fn runs(up: &Child, program: &str) -> bool {
    processes(up).iter().any(|line| line.split(' ').next().unwrap().ends_with(program))
}

fn wait_until_up(up: &mut Child) {
    let lines = BufReader::new(up.stdout.as_mut().unwrap()).lines().map(Result::unwrap);
    let printed: Vec<String> = lines.take(4).collect();
    assert!(printed[0].starts_with("export KUBECONFIG="), "{printed:?}");
    assert!(printed[3].starts_with("export PATH="), "{printed:?}");
    for program in ["etcd", "kube-apiserver", "kube-controller-manager", "sh"] {
        assert!(runs(up, program), "{program}");
    }
    assert_eq!(data_dirs(up), 1);
}

/// Waits until `up` has died of the signal, and everything else with it.
fn assert_nothing_is_left_after(signal: Signal, mut up: Child) {
    assert_eq!(up.wait().unwrap().signal(), Some(signal.as_raw()));
    let clean = eventually(DEADLINE, || processes(&up).is_empty() && data_dirs(&up) == 0);
    assert!(clean, "{} directories, {:#?}", data_dirs(&up), processes(&up));
}

#[test]
fn killed_when_up() {
    let mut up = up();
    wait_until_up(&mut up);
    kill_process(Pid::from_child(&up), Signal::KILL).unwrap();
    assert_nothing_is_left_after(Signal::KILL, up);
}

#[test]
fn killed_while_booting() {
    let up = up();
    assert!(eventually(DEADLINE, || runs(&up, "kube-apiserver")));
    kill_process(Pid::from_child(&up), Signal::KILL).unwrap();
    assert_nothing_is_left_after(Signal::KILL, up);
}

/// The terminal sends the signal to the whole job.
#[test]
fn interrupted_in_a_terminal() {
    let mut up = up();
    wait_until_up(&mut up);
    kill_process_group(Pid::from_child(&up), Signal::INT).unwrap();
    assert_nothing_is_left_after(Signal::INT, up);
}
