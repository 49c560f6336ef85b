//! Tests can kill, pause and restart the processes of a control plane.

use std::process::Command;
use std::time::{Duration, Instant};

use controlplane::{ControlPlane, Error, eventually};

const DEADLINE: Duration = Duration::from_mins(1);

/// `None` on an existing cluster, whose processes cannot be reached.
fn boot() -> Option<ControlPlane> {
    Some(ControlPlane::start().unwrap()).filter(|plane| !plane.is_existing())
}

fn succeeds(mut command: Command, args: &[&str]) -> bool {
    command.args(args).output().unwrap().status.success()
}

/// Whether the API server answers a read that needs etcd. The timeout is long, for a machine that is busy.
fn answers(plane: &ControlPlane) -> bool {
    succeeds(plane.kubectl(), &["get", "configmap", "kept", "--request-timeout=30s"])
}

fn is_silent(plane: &ControlPlane) -> bool {
    !succeeds(plane.kubectl(), &["get", "configmap", "kept", "--request-timeout=2s"])
}

#[test]
fn data_survive_a_kill_of_etcd_or_the_api_server() {
    let Some(plane) = boot() else { return };
    let (etcd, apiserver) = (plane.etcd().unwrap(), plane.apiserver().unwrap());
    let address = plane.server_url().to_owned();
    assert!(succeeds(plane.kubectl(), &["create", "configmap", "kept"]));

    let first = etcd.id();
    etcd.kill().unwrap();
    assert_eq!(etcd.id(), None);
    assert!(is_silent(&plane));
    etcd.restart().unwrap();
    assert_ne!(etcd.id(), first);
    plane.wait_ready().unwrap();
    assert!(answers(&plane));

    apiserver.kill().unwrap();
    assert!(is_silent(&plane));
    assert!(matches!(plane.wait_ready(), Err(Error::NotRunning("kube-apiserver"))));
    apiserver.restart().unwrap();
    assert!(answers(&plane));
    assert_eq!(plane.server_url(), address);

    // `restart` kills a running process first.
    etcd.restart().unwrap();
    apiserver.restart().unwrap();
    assert!(answers(&plane));
}

#[test]
fn paused_process_does_not_answer_until_resumed() {
    let Some(plane) = boot() else { return };
    assert!(succeeds(plane.kubectl(), &["create", "configmap", "kept"]));
    for process in [plane.etcd().unwrap(), plane.apiserver().unwrap()] {
        process.pause().unwrap();
        process.pause().unwrap();
        assert!(is_silent(&plane));
        process.resume().unwrap();
        assert!(eventually(DEADLINE, || answers(&plane)));
    }

    let apiserver = plane.apiserver().unwrap();
    apiserver.pause().unwrap();
    apiserver.kill().unwrap();
    assert!(matches!(apiserver.pause(), Err(Error::NotRunning(_))));
    assert!(matches!(apiserver.resume(), Err(Error::NotRunning(_))));

    // `stop` is quick although one process is dead and another is paused.
    plane.etcd().unwrap().pause().unwrap();
    let (dir, begin) = (plane.data_dir().to_owned(), Instant::now());
    plane.stop();
    assert!(!dir.exists());
    assert!(begin.elapsed() < Duration::from_secs(10));
}

#[test]
fn deleted_namespace_stays_while_the_controller_manager_is_dead() {
    let Some(plane) = boot() else { return };
    plane.controller_manager().unwrap().kill().unwrap();
    assert!(succeeds(plane.kubectl(), &["create", "namespace", "stuck"]));
    assert!(succeeds(plane.kubectl(), &["delete", "namespace", "stuck", "--wait=false"]));
    let exists = || succeeds(plane.kubectl(), &["get", "namespace", "stuck"]);
    assert!(exists());
    plane.controller_manager().unwrap().restart().unwrap();
    assert!(eventually(DEADLINE, || !exists()));
}

#[test]
fn process_that_does_not_start_is_reported_with_its_log() {
    let error = match ControlPlane::start_with(&["--no-such-flag"]) {
        Ok(plane) => return assert!(plane.is_existing()),
        Err(error) => error,
    };
    let message = error.to_string();
    let Error::Ended { name: "kube-apiserver", log, .. } = error else { panic!("{message}") };
    assert!(message.contains("unknown flag: --no-such-flag"), "{message}");
    assert!(message.contains(&log.display().to_string()), "{message}");
    let content = std::fs::read_to_string(&log).unwrap();
    assert!(content.contains("--no-such-flag"), "the log was removed");
    std::fs::remove_file(log).unwrap();
}
