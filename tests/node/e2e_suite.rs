//! Runs the end-to-end tests on the cluster of the installation, each with an instance of its own.

use std::{env, fs, process::Command};

use controlplane::Node;

use crate::{installation::Installation, report};

/// For an existing cluster, the environment says how it reaches this machine.
pub(crate) fn run(installation: &Installation, node: Option<&Node>) {
    report("the end-to-end tests on this cluster:");
    let mut suite = Command::new(env!("CARGO"));
    suite.args(["test", "--locked", "--workspace", "--test", "e2e"]);
    // Which of them; all if it is empty or not set.
    let filters = env::var("LOCKSTEP_TEST_FILTER").unwrap_or_default();
    suite.arg("--").args(filters.split_whitespace());
    suite.env("LOCKSTEP_TEST_KUBECONFIG", installation.plane.admin());
    // What cargo tells a test about its package: a build script that reads it would run again, and everything that
    // depends on it would be compiled again.
    let about_the_package = |name: &str| {
        name == "OUT_DIR" || name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_")
    };
    for (name, _) in env::vars_os().filter(|(name, _)| name.to_str().is_some_and(about_the_package)) {
        suite.env_remove(name);
    }
    // Tests that need a control plane of their own run without a node: nothing is skipped altogether.
    let skipped = env::temp_dir().join(format!("skipped-on-a-node-{}", std::process::id()));
    suite.env("LOCKSTEP_TEST_SKIPPED", &skipped);
    if let Some(node) = node {
        suite.env("LOCKSTEP_TEST_HOST", node.machine_address().to_string());
    }
    let status = suite.status().expect("cargo starts");
    let lines = fs::read_to_string(&skipped).unwrap_or_default().lines().count();
    drop(fs::remove_file(&skipped));
    report(&format!(
        "{lines} of the end-to-end tests need a control plane of their own, and were skipped here"
    ));
    assert!(status.success(), "the end-to-end tests on a cluster with nodes: {status}");
}
