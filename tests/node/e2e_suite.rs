//! Runs the end-to-end tests on the cluster of the installation, each with an instance of its own.

use std::process::Command;

use controlplane::Node;

use crate::{installation::Installation, report};

/// For an existing cluster, the environment says how it reaches this machine.
pub fn run(installation: &Installation, node: Option<&Node>) {
    report("the end-to-end tests on this cluster:");
    let mut suite = Command::new(env!("CARGO"));
    suite.args(["test", "--locked", "--workspace", "--test", "e2e"]);
    // Which of them; all if it is empty or not set.
    let filters = std::env::var("LOCKSTEP_TEST_FILTER").unwrap_or_default();
    suite.arg("--").args(filters.split_whitespace());
    suite.env("LOCKSTEP_TEST_KUBECONFIG", installation.plane.admin());
    if let Some(node) = node {
        suite.env("LOCKSTEP_TEST_HOST", node.machine_address().to_string());
    }
    let status = suite.status().expect("cargo starts");
    assert!(status.success(), "the end-to-end tests on a cluster with nodes: {status}");
}
