//! Another admission plugin changes what Lockstep writes.

use controlplane::skip;
use serde_json::{Value, json};

use crate::harness::{Cluster, RETRY, configmap, eventually, within};

const API: &str = "/apis/admissionregistration.k8s.io/v1";

/// A MutatingAdmissionPolicy that removes this test's companion label from ConfigMaps of one namespace.
struct StrippingPolicy<'a> {
    cluster: &'a Cluster,
    name: String,
}

impl<'a> StrippingPolicy<'a> {
    async fn install(cluster: &'a Cluster, namespace: &str) -> Self {
        let (name, label) = (format!("strip-{}", cluster.id), cluster.key("companion"));
        let patch = format!(
            "[JSONPatch{{op: 'remove', path: '/metadata/labels/' + jsonpatch.escapeKey('{label}')}}]"
        );
        let policy = json!({"metadata": {"name": name}, "spec": {
            "failurePolicy": "Fail",
            "reinvocationPolicy": "Never",
            "matchConstraints": {"resourceRules": [{
                "apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE", "UPDATE"], "resources": ["configmaps"],
            }]},
            "matchConditions": [{
                "name": "companion",
                "expression": format!("has(object.metadata.labels) && '{label}' in object.metadata.labels"),
            }],
            "mutations": [{"patchType": "JSONPatch", "jsonPatch": {"expression": patch}}],
        }});
        cluster.post(&format!("{API}/mutatingadmissionpolicies"), &policy).await;
        let binding = json!({"metadata": {"name": name}, "spec": {
            "policyName": name,
            "matchResources": {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}},
        }});
        cluster.post(&format!("{API}/mutatingadmissionpolicybindings"), &binding).await;
        let probe = format!("/api/v1/namespaces/{namespace}/configmaps?dryRun=All");
        let object = json!({"metadata": {"name": "probe", "labels": {label.clone(): "true"}}});
        eventually("the policy removes the label", || async {
            cluster.post(&probe, &object).await["metadata"]["labels"][&label].is_null().then_some(())
        })
        .await;
        Self { cluster, name }
    }

    async fn remove(self) {
        for kind in ["mutatingadmissionpolicybindings", "mutatingadmissionpolicies"] {
            self.cluster.delete(&format!("{API}/{kind}/{}", self.name)).await;
        }
    }
}

#[tokio::test]
async fn companion_whose_label_a_plugin_removes_is_retried_with_a_backoff_and_reported() {
    let Some(cluster) = Cluster::audited("strip").await else { return };
    if cluster.get(&format!("{API}/mutatingadmissionpolicies")).await.is_none() {
        skip("Kubernetes before 1.36 has no MutatingAdmissionPolicy, or not by default");
        return;
    }
    let (home, away) = (cluster.namespace("home").await, cluster.namespace("away").await);
    let policy = StrippingPolicy::install(&cluster, &away).await;
    let lockstep = cluster.start_mirror_with(&["--resync", "50ms"]).await;
    cluster.source(&home, "colors").annotate("target-namespaces", &away).create().await;
    cluster.wait_data(&away, "colors-synced", json!({"sky": "blue"})).await;
    let reconciles = || {
        let results = ["retry", "trouble", "changed", "unchanged"];
        let count = |result| lockstep.metric(&format!("lockstep_reconciles_total{{result=\"{result}\"}}"));
        results.into_iter().map(count).sum::<f64>()
    };
    eventually("a hundred reconciles", || async { (reconciles() >= 100.0).then_some(()) }).await;
    // An attempt is a create, a get and a patch; the second begins after half a second at the earliest.
    let requests = cluster.complete_audit(&away).await;
    assert!(requests.len() <= 15, "{} requests for one companion: {requests:?}", requests.len());
    let note = cluster.wait_event(&home, "colors", "Rewritten").await;
    assert!(note.contains(&format!("{away}/colors-synced")) && note.contains("label"), "{note}");
    lockstep.wait_metric("lockstep_troubles{reason=\"rewritten\"}", 1.0).await;
    let lines = lockstep.log().lines().filter(|line| line.contains("colors-synced")).count();
    assert!(lines <= 2, "{}", lockstep.log());

    // A retry finds that the plugin is gone.
    policy.remove().await;
    let label = cluster.key("companion");
    let labelled = |object: &Value| object["metadata"]["labels"][&label] == "true";
    within(RETRY, cluster.wait(&away, "colors-synced", "labelled", labelled)).await;
    lockstep.wait_metric("lockstep_troubles{reason=\"rewritten\"}", 0.0).await;
    cluster.delete(&configmap(&home, "colors")).await;
    cluster.wait_gone(&configmap(&away, "colors-synced")).await;
}
