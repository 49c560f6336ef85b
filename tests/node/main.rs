//! Lockstep as people run it: two replicas on a real kubelet. For `make test-node`; elsewhere this is skipped.

#[allow(dead_code)]
#[path = "../e2e/harness.rs"]
mod harness;

mod installed;
mod leave;
mod loss;
mod roll;
mod stream;
mod walk;

use std::{
    env,
    io::{self, Write},
    path::PathBuf,
    time::Instant,
};

use controlplane::Node;

use installed::Installed;

/// One test, because there is one installation: the scenes come in the order in which people live through them.
#[tokio::test(flavor = "multi_thread")]
async fn two_replicas_on_a_real_node() {
    let Some(image) = image() else { return };
    let start = Instant::now();
    let node = Node::start(&[&image]).unwrap_or_else(|error| panic!("{error}"));
    // Kept to the end of the process, when the janitor clears it away.
    let node: &Node = Box::leak(Box::new(node));
    say(&format!("a node is ready after {:.1?}", start.elapsed()));

    let (installed, took) = Installed::new(node).await;
    say(&format!("from `kubectl apply` to both replicas ready: {took:.1?}"));
    walk::through(&installed).await;
    roll::out(&installed).await;
    loss::of_a_pod(&installed).await;
    loss::of_a_container(&installed).await;
    loss::of_the_ca(&installed).await;
    installed.memory_is_bounded().await;
    leave::nothing_behind(&installed).await;
    say(&format!("all scenes took {:.0?}", start.elapsed()));
}

/// The image to install; none where there can be no node, and then it is said why.
fn image() -> Option<PathBuf> {
    let image = env::var_os("LOCKSTEP_TEST_IMAGE").map(PathBuf::from);
    let obstacle = match image {
        None => Some("there is no image to install: `make test-node` makes one".to_owned()),
        Some(_) => Node::obstacle(),
    };
    if let Some(obstacle) = obstacle {
        say(&format!("skipped, nothing was tested on a real node: {obstacle}"));
        return None;
    }
    image
}

/// Tells what a scene has seen. The test harness swallows what `eprintln!` prints.
pub fn say(line: &str) {
    drop(writeln!(io::stderr(), "node: {line}"));
}
