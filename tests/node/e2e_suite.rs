//! The end-to-end tests, each with an instance of its own, beside the installation.

use std::process::Command;

use controlplane::Node;

use crate::{installation::Installation, say};

/// Of an existing cluster, the environment says how it reaches this machine.
pub fn run(installed: &Installation, node: Option<&Node>) {
    say("the end-to-end tests on this cluster:");
    let mut suite = Command::new(env!("CARGO"));
    suite.args(["test", "--locked", "--workspace", "--test", "e2e"]);
    suite.env("LOCKSTEP_TEST_KUBECONFIG", installed.plane.admin());
    if let Some(node) = node {
        suite.env("LOCKSTEP_TEST_HOST", node.machine_address().to_string());
    }
    let status = suite.status().expect("cargo runs");
    assert!(status.success(), "the end-to-end tests on a cluster with nodes: {status}");
}
