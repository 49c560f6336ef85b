//! cert-manager's and the Prometheus operator's own custom resource definitions, out of their Go modules, so that the
//! API server judges our objects as it would in a cluster that has them.

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use serde_json::Value;

use crate::harness::{DEADLINE, run, shared};

const CRDS: [(&str, &str); 4] = [
    ("github.com/cert-manager/cert-manager", "deploy/crds/cert-manager.io_certificates.yaml"),
    ("github.com/cert-manager/cert-manager", "deploy/crds/cert-manager.io_issuers.yaml"),
    (
        "github.com/prometheus-operator/prometheus-operator",
        "example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml",
    ),
    (
        "github.com/prometheus-operator/prometheus-operator",
        "example/prometheus-operator-crd/monitoring.coreos.com_prometheusrules.yaml",
    ),
];

/// Whether the cluster has them. Ours gets them; into an existing one nothing is installed that would stay.
pub fn are_there(test: &str) -> bool {
    static THERE: OnceLock<bool> = OnceLock::new();
    let there = *THERE.get_or_init(|| if shared().is_existing() { found() } else { install() });
    if !there {
        eprintln!(
            "{test} is skipped in part: the existing cluster has no cert-manager or no Prometheus operator"
        );
    }
    there
}

fn found() -> bool {
    let names = ["certificates.cert-manager.io", "prometheusrules.monitoring.coreos.com"];
    shared().kubectl().args(["get", "crd"]).args(names).output().is_ok_and(|output| output.status.success())
}

fn install() -> bool {
    let mut apply = shared().kubectl();
    // Too large for the annotation of an ordinary apply.
    apply.args(["apply", "--server-side"]);
    for (module, file) in CRDS {
        apply.arg("-f").arg(module_dir(module).join(file));
    }
    run(&mut apply);
    let established = ["wait", "--for=condition=Established", "--timeout=30s", "crd", "--all"];
    run(shared().kubectl().args(established));
    // They can be used when kubectl finds them, which is a moment later.
    let kinds = "certificates.cert-manager.io,issuers.cert-manager.io,podmonitors.monitoring.coreos.com,\
                 prometheusrules.monitoring.coreos.com";
    let found =
        || shared().kubectl().args(["get", kinds]).output().is_ok_and(|output| output.status.success());
    assert!(controlplane::eventually(DEADLINE, found), "the API server does not serve {kinds}");
    true
}

/// Where the files of a module are, of the version in tests/crds/go.mod; fetched if need be.
fn module_dir(module: &str) -> PathBuf {
    let told = run(Command::new("go")
        .args(["mod", "download", "-json", module])
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/crds"))
        .envs([("GOWORK", "off"), ("GOFLAGS", "-mod=readonly")]));
    let told: Value = serde_json::from_str(&told).expect("JSON");
    PathBuf::from(told["Dir"].as_str().expect("a directory"))
}
