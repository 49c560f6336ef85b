//! Lockstep as people run it: two replicas on a real kubelet. For `make test-node`, where the kubelet is ours, and
//! `make test-kind`, where it is kind's; elsewhere this is skipped.

#[allow(dead_code)]
#[path = "../e2e/harness.rs"]
mod harness;

mod installed;
mod leave;
mod loss;
mod roll;
mod stream;
mod suite;
mod walk;

use std::{
    env,
    io::{self, Write},
    path::Path,
    time::Instant,
};

use controlplane::{ControlPlane, Node};

use installed::Installed;

/// One test, because there is one installation: the scenes come in the order in which people live through them.
#[tokio::test(flavor = "multi_thread")]
async fn two_replicas_on_a_real_node() {
    let start = Instant::now();
    let Some((plane, node, image)) = cluster() else { return };
    say(&format!("the cluster is ready after {:.1?}", start.elapsed()));

    let (installed, took) = Installed::new(plane, image.as_deref()).await;
    say(&format!("from `kubectl apply` to both replicas ready: {took:.1?}"));
    walk::through(&installed).await;
    roll::out(&installed).await;
    loss::of_a_pod(&installed).await;
    loss::of_the_ca(&installed).await;
    match node {
        None => suite::beside(&installed, None),
        Some(node) => {
            loss::of_a_container(&installed, node).await;
            let tokens = loss::of_the_kubelet(&installed, node).await;
            suite::beside(&installed, Some(node));
            tokens.were_renewed(&installed).await;
            installed.memory_is_bounded(node).await;
        }
    }
    leave::nothing_behind(&installed).await;
    say(&format!("all scenes took {:.0?}", start.elapsed()));
}

/// A cluster with nodes: an existing one that has the image `LOCKSTEP_TEST_IMAGE`, or one of our own with the image in
/// that archive. None where that is not asked for or cannot be, and then it is said why.
fn cluster() -> Option<(&'static ControlPlane, Option<&'static Node>, Option<String>)> {
    let obstacle = match (env::var("LOCKSTEP_TEST_IMAGE"), env::var_os("LOCKSTEP_TEST_KUBECONFIG")) {
        (Ok(image), Some(kubeconfig)) => {
            let plane =
                ControlPlane::existing(Path::new(&kubeconfig)).unwrap_or_else(|error| panic!("{error}"));
            return Some((Box::leak(Box::new(plane)), None, Some(image)));
        }
        (Ok(archive), None) => match Node::obstacle() {
            None => {
                let node = Node::start(&[Path::new(&archive)]).unwrap_or_else(|error| panic!("{error}"));
                // Kept to the end of the process, when the janitor clears it away.
                let node: &Node = Box::leak(Box::new(node));
                return Some((node.plane(), Some(node), None));
            }
            Some(obstacle) => obstacle,
        },
        (Err(_), _) => "there is no image to install: `make test-node` makes one".to_owned(),
    };
    say(&format!("skipped, nothing was tested on a real node: {obstacle}"));
    None
}

/// Tells what a scene has seen. The test harness swallows what `eprintln!` prints.
pub fn say(line: &str) {
    drop(writeln!(io::stderr(), "node: {line}"));
}
