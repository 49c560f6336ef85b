//! Installs the CRDs of cert-manager and the Prometheus operator from their Go modules, so that the API server
//! validates our objects as it would in a cluster that has them.

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use controlplane::{ControlPlane, skip};
use serde_json::Value;

use crate::harness::{CONTROLLERS, run, shared};

/// Where a CRD comes from: the directory of ours whose go.mod pins the module, the module, and files in it.
type Origin = (&'static str, &'static str, &'static str);

const CERT_MANAGER: Origin = ("tests/cert-manager", "github.com/cert-manager/cert-manager", "deploy/crds");
const PROMETHEUS_OPERATOR: Origin =
    ("tests/crds", "github.com/prometheus-operator/prometheus-operator", "example/prometheus-operator-crd");

const CRDS: [(Origin, &str); 4] = [
    (CERT_MANAGER, "cert-manager.io_certificates.yaml"),
    (CERT_MANAGER, "cert-manager.io_issuers.yaml"),
    (PROMETHEUS_OPERATOR, "monitoring.coreos.com_podmonitors.yaml"),
    (PROMETHEUS_OPERATOR, "monitoring.coreos.com_prometheusrules.yaml"),
];

/// Whether the cluster has the CRDs. They are installed into a control plane of our own, never into an existing
/// cluster.
pub fn available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    let available = *AVAILABLE.get_or_init(|| if shared().is_existing() { found() } else { install_some() });
    if !available {
        skip("the existing cluster has no cert-manager or no Prometheus operator");
    }
    available
}

fn found() -> bool {
    let names = ["certificates.cert-manager.io", "prometheusrules.monitoring.coreos.com"];
    shared().kubectl().args(["get", "crd"]).args(names).output().is_ok_and(|output| output.status.success())
}

fn install_some() -> bool {
    let files = CRDS.map(|(origin, file)| dir(origin).join(file));
    let kinds = "certificates.cert-manager.io,issuers.cert-manager.io,podmonitors.monitoring.coreos.com,\
                 prometheusrules.monitoring.coreos.com";
    install(shared(), &files, kinds);
    true
}

/// Installs all CRDs of cert-manager, for a cert-manager that runs.
pub fn install_cert_manager(plane: &ControlPlane) {
    let kinds = "certificates.cert-manager.io,certificaterequests.cert-manager.io,issuers.cert-manager.io,\
                 clusterissuers.cert-manager.io";
    install(plane, &[dir(CERT_MANAGER)], kinds);
}

fn install(plane: &ControlPlane, files: &[PathBuf], kinds: &str) {
    let mut apply = plane.kubectl();
    // They are too large for the annotation of a client-side apply.
    apply.args(["apply", "--server-side"]);
    for file in files {
        apply.arg("-f").arg(file);
    }
    run(&mut apply);
    let established = ["wait", "--for=condition=Established", "--timeout=30s", "crd", "--all"];
    run(plane.kubectl().args(established));
    // The API server serves them a moment after they are established.
    let found = || plane.kubectl().args(["get", kinds]).output().is_ok_and(|output| output.status.success());
    assert!(controlplane::eventually(CONTROLLERS, found), "the API server does not serve {kinds}");
}

/// The directory of a module's CRDs in the version that is pinned, downloaded if necessary.
fn dir((pin, module, dir): Origin) -> PathBuf {
    let printed = run(Command::new("go")
        .args(["mod", "download", "-json", module])
        .current_dir(Path::new(env!("CARGO_MANIFEST_DIR")).join(pin))
        .envs([("GOWORK", "off"), ("GOFLAGS", "-mod=readonly")]));
    let module: Value = serde_json::from_str(&printed).expect("JSON");
    Path::new(module["Dir"].as_str().expect("a directory")).join(dir)
}
