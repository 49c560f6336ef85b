//! Lockstep as people run it: two replicas on a real kubelet. For `make test-node`, where the kubelet is ours, and
//! `make test-kind`, where it is kind's; elsewhere this is skipped.

#[allow(dead_code)]
#[path = "../e2e/harness.rs"]
mod harness;

mod e2e_suite;
mod failures;
mod installation;
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

use controlplane::{ControlPlane, Node};

use installation::Installation;

/// One test, because there is one installation: the scenes come in the order in which people live through them.
#[tokio::test(flavor = "multi_thread")]
async fn two_replicas_on_a_real_node() {
    let start = Instant::now();
    let Some((plane, node, image)) = cluster() else { return };
    say(&format!("the cluster is ready after {:.1?}", start.elapsed()));

    let (installed, took) = Installation::new(plane, image.as_deref()).await;
    say(&format!("from `kubectl apply` to both replicas ready: {took:.1?}"));
    walkthrough::run(&installed).await;
    rollout::restart(&installed).await;
    failures::of_a_pod(&installed).await;
    failures::of_the_ca(&installed).await;
    match node {
        None => e2e_suite::run(&installed, None),
        Some(node) => {
            failures::of_a_container(&installed, node).await;
            let tokens = failures::of_the_kubelet(&installed, node).await;
            e2e_suite::run(&installed, Some(node));
            tokens.were_renewed(&installed).await;
            installed.memory_is_bounded(node).await;
        }
    }
    uninstall::leaves_nothing_behind(&installed).await;
    say(&format!("all scenes took {:.0?}", start.elapsed()));
}

/// A cluster with nodes: an existing one that has the image `LOCKSTEP_TEST_IMAGE`, or one of our own with the image in
/// that archive. None where that is not asked for or cannot be, and then it is said why.
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
                // Kept to the end of the process, when the janitor clears it away.
                let node: &Node = Box::leak(Box::new(node));
                return Some((node.plane(), Some(node), None));
            }
            Some(reason) => reason,
        },
        (Err(_), _) => "there is no image to install: `make test-node` makes one".to_owned(),
    };
    say(&format!("skipped, nothing was tested on a real node: {reason}"));
    None
}

/// Tells what a scene has seen. The test harness swallows what `eprintln!` prints.
pub fn say(line: &str) {
    drop(writeln!(io::stderr(), "node: {line}"));
}
