//! The ConfigMap with the dashboard for Grafana's sidecar, as kustomize generates it.

use std::fmt::Write as _;

const DASHBOARD_FILE: &str = include_str!("../../deploy/components/monitoring/dashboard.json");
const HEADER: &str = "apiVersion: v1
kind: ConfigMap
metadata:
  name: lockstep-dashboard
  namespace: lockstep-system
  labels:
    app.kubernetes.io/name: lockstep
    grafana_dashboard: \"1\"
data:
  lockstep.json: |
";

pub(super) fn configmap() -> String {
    let mut text = HEADER.to_owned();
    for line in DASHBOARD_FILE.lines() {
        // Writing to a string cannot fail.
        let _ = writeln!(text, "    {line}");
    }
    text
}
