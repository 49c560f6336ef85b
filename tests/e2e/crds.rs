//! Installs the CRDs of cert-manager and the Prometheus operator from their Go modules, so that the API server validates
//! our objects as it would in a cluster that has them.

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use controlplane::skip;
use serde_json::Value;

use crate::harness::{CONTROLLERS, run, shared};

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

/// Whether the cluster has the CRDs. They are installed into a control plane of our own, never into an existing cluster.
pub fn available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    let available = *AVAILABLE.get_or_init(|| if shared().is_existing() { found() } else { install() });
    if !available {
        skip("the existing cluster has no cert-manager or no Prometheus operator");
    }
    available
}

fn found() -> bool {
    let names = ["certificates.cert-manager.io", "prometheusrules.monitoring.coreos.com"];
    shared().kubectl().args(["get", "crd"]).args(names).output().is_ok_and(|output| output.status.success())
}

fn install() -> bool {
    let mut apply = shared().kubectl();
    // They are too large for the annotation of a client-side apply.
    apply.args(["apply", "--server-side"]);
    for (module, file) in CRDS {
        apply.arg("-f").arg(module_dir(module).join(file));
    }
    run(&mut apply);
    let established = ["wait", "--for=condition=Established", "--timeout=30s", "crd", "--all"];
    run(shared().kubectl().args(established));
    // The API server serves them a moment after they are established.
    let kinds = "certificates.cert-manager.io,issuers.cert-manager.io,podmonitors.monitoring.coreos.com,\
                 prometheusrules.monitoring.coreos.com";
    let found =
        || shared().kubectl().args(["get", kinds]).output().is_ok_and(|output| output.status.success());
    assert!(controlplane::eventually(CONTROLLERS, found), "the API server does not serve {kinds}");
    true
}

/// The directory of a module in the version of tests/crds/go.mod, downloaded if necessary.
fn module_dir(module: &str) -> PathBuf {
    let printed = run(Command::new("go")
        .args(["mod", "download", "-json", module])
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/crds"))
        .envs([("GOWORK", "off"), ("GOFLAGS", "-mod=readonly")]));
    let module: Value = serde_json::from_str(&printed).expect("JSON");
    PathBuf::from(module["Dir"].as_str().expect("a directory"))
}
