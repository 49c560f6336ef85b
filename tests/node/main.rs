//! Two replicas of Lockstep in pods on a real kubelet. Run by `make test-node` on a node of our own and by
//! `make test-kind` on a kind cluster, otherwise skipped.

#[allow(dead_code)]
#[path = "../e2e/harness.rs"]
mod harness;

mod e2e_suite;
mod failures;
mod installation;
mod release;
mod rollout;
mod traffic;
mod uninstall;
mod walkthrough;

use std::{
    env,
    io::{self, Write},
    path::Path,
    time::Instant,
};

use controlplane::{ControlPlane, Node, skip};

use installation::Installation;

/// One test, because there is one installation; its parts run in this order.
#[tokio::test(flavor = "multi_thread")]
async fn two_replicas_on_a_real_node_survive_rollout_failures_and_uninstall() {
    let start = Instant::now();
    let Some((plane, node, image)) = cluster() else { return };
    report(&format!("the cluster is ready after {:.1?}", start.elapsed()));

    let (installation, took) = Installation::new(plane, image.as_deref()).await;
    report(&format!("from `kubectl apply` to both replicas ready: {took:.1?}"));
    walkthrough::run(&installation).await;
    rollout::restart(&installation).await;
    failures::delete_each_pod(&installation).await;
    failures::delete_the_ca(&installation).await;
    match node {
        None => e2e_suite::run(&installation, None),
        Some(node) => {
            failures::kill_each_container(&installation, node).await;
            let tokens = failures::kill_the_kubelet(&installation, node).await;
            e2e_suite::run(&installation, Some(node));
            tokens.wait_renewed(&installation).await;
            installation.assert_memory_is_bounded(node).await;
        }
    }
    uninstall::run(&installation).await;
    report(&format!("everything took {:.0?}", start.elapsed()));
}

/// A cluster with nodes: an existing one that has the image `LOCKSTEP_TEST_IMAGE`, or one of our own with the image in
/// that archive. `None` if the variable is not set or this machine cannot run a node; the reason is printed.
fn cluster() -> Option<(&'static ControlPlane, Option<&'static Node>, Option<String>)> {
    let reason = match (env::var("LOCKSTEP_TEST_IMAGE"), env::var_os("LOCKSTEP_TEST_KUBECONFIG")) {
        (Ok(image), Some(kubeconfig)) => {
            let plane =
                ControlPlane::existing(Path::new(&kubeconfig)).unwrap_or_else(|error| panic!("{error}"));
            return Some((Box::leak(Box::new(plane)), None, Some(image)));
        }
        (Ok(archive), None) => match Node::unmet_requirement() {
            None => {
                let node = Node::start(&[Path::new(&archive)]).unwrap_or_else(|error| panic!("{error}"));
                // Leaked: it is cleaned up at the end of the process.
                let node: &Node = Box::leak(Box::new(node));
                return Some((node.plane(), Some(node), None));
            }
            Some(reason) => reason,
        },
        (Err(_), _) => "LOCKSTEP_TEST_IMAGE is not set: run `make test-node`".to_owned(),
    };
    skip(&reason);
    None
}

/// Prints what happened. The test harness captures `eprintln!`.
pub fn report(line: &str) {
    drop(writeln!(io::stderr(), "node: {line}"));
}
