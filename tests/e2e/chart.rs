//! The Helm chart renders what `lockstep manifests` prints.

mod templates;

use std::{
    collections::BTreeMap,
    env, fs,
    path::PathBuf,
    process::Command,
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
    },
};

use controlplane::{Binaries, Error};
use serde_json::{Value, json};

use crate::{
    crds,
    harness::{Cluster, eventually, manifests, output, run, shared},
    manifests::documents,
};

fn chart() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("deploy/chart")
}

/// A directory that is removed with the control plane, however the tests end.
fn scratch() -> PathBuf {
    shared().admin().parent().expect("a kubeconfig is in a directory").to_owned()
}

/// The pinned Helm without the user's configuration; `None` if it cannot be built.
fn helm(test: &str) -> Option<Command> {
    static HELM: OnceLock<Option<PathBuf>> = OnceLock::new();
    let build = || match Binaries::build_helm() {
        Ok(binaries) => Some(binaries.dir().join("helm")),
        Err(Error::NoGo) => None,
        Err(error) => panic!("{error}"),
    };
    let Some(helm) = HELM.get_or_init(build) else {
        eprintln!("{test} is skipped: Helm is built with Go, and there is no `go` in PATH");
        return None;
    };
    let home = scratch().join("helm");
    let mut command = Command::new(helm);
    command.env("KUBECONFIG", shared().admin());
    for variable in ["HELM_CACHE_HOME", "HELM_CONFIG_HOME", "HELM_DATA_HOME"] {
        command.env(variable, &home);
    }
    Some(command)
}

/// What the chart renders in a namespace with these values.
fn render(mut helm: Command, namespace: &str, values: &Value) -> BTreeMap<String, Value> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let file = scratch().join(format!("values-{}.json", NEXT.fetch_add(1, Ordering::Relaxed)));
    fs::write(&file, values.to_string()).unwrap();
    helm.args(["template", "lockstep", "--namespace", namespace, "--values"]).arg(&file).arg(chart());
    documents(&run(&mut helm))
}

/// What `lockstep manifests` prints, without the namespace, which Helm creates with `--create-namespace`.
fn printed(flags: &[&str]) -> BTreeMap<String, Value> {
    let mut documents = documents(&manifests(flags));
    documents.retain(|_, document| document["kind"] != "Namespace");
    documents
}

#[test]
fn templates_are_up_to_date_with_deploy() {
    for (path, content) in templates::generate() {
        let path = chart().join(path);
        if env::var_os("LOCKSTEP_WRITE_CHART").is_some() {
            fs::write(&path, &content).unwrap();
        }
        let there = fs::read_to_string(&path).unwrap_or_default();
        assert!(there == content, "{} is not up to date: run `make chart`", path.display());
    }
}

#[test]
fn chart_version_is_the_crates_version() {
    let version = env!("CARGO_PKG_VERSION");
    let text = fs::read_to_string(chart().join("Chart.yaml")).unwrap();
    for line in [format!("\nversion: {version}\n"), format!("\nappVersion: {version}\n")] {
        assert!(text.contains(&line), "{line} in {text}");
    }
}

#[test]
fn chart_renders_what_manifests_prints() {
    let test = "chart_renders_what_manifests_prints";
    if helm(test).is_none() || !crds::available(test) {
        return;
    }
    let everything = json!({"secrets": true, "policy": true, "certManager": true, "monitoring": true});
    let cases: [(Value, &[&str]); 10] = [
        (json!({}), &[]),
        (json!({"secrets": true}), &["--secrets"]),
        (json!({"policy": true}), &["--policy"]),
        (json!({"certManager": true}), &["--cert-manager"]),
        (json!({"monitoring": true}), &["--monitoring"]),
        (everything, &["--secrets", "--policy", "--cert-manager", "--monitoring"]),
        (
            json!({"domain": "a.example", "suffix": ".copy", "policy": true, "image": "example.com:5000/a/lockstep:1"}),
            &["--domain=a.example", "--suffix=.copy", "--policy", "--image=example.com:5000/a/lockstep:1"],
        ),
        (
            json!({"policy": true, "exemptUsers": ["o'brien \\ \"x\": #$(Y)", "bob"], "exemptGroups": ["ops"]}),
            &["--policy", "--exempt-user=o'brien \\ \"x\": #$(Y),bob", "--exempt-group=ops"],
        ),
        (json!({"priorityClassName": "important"}), &["--priority-class=important"]),
        (
            json!({"deputyUsers": ["argo", "cert"], "deputyGroups": ["robots"]}),
            &["--deputy-user=argo,cert", "--deputy-group=robots"],
        ),
    ];
    for (values, flags) in cases {
        for namespace in ["lockstep-system", "elsewhere"] {
            let rendered = render(helm(test).unwrap(), namespace, &values);
            let printed = printed(&[flags, &["--namespace", namespace]].concat());
            assert_eq!(rendered.keys().collect::<Vec<_>>(), printed.keys().collect::<Vec<_>>(), "{values}");
            for (name, document) in rendered {
                assert_eq!(document, printed[&name], "{name} with {values}");
            }
        }
    }
}

#[test]
fn values_that_only_the_chart_has_are_rendered() {
    let test = "values_that_only_the_chart_has_are_rendered";
    if helm(test).is_none() || !crds::available(test) {
        return;
    }
    let values = json!({
        "replicas": 3,
        "imagePullSecrets": [{"name": "registry"}],
        "priorityClassName": "important",
        "nodeSelector": {"kubernetes.io/os": "linux"},
        "tolerations": [{"key": "dedicated", "operator": "Exists"}],
        "podAnnotations": {"sidecar.istio.io/inject": "false"},
        "extraArgs": ["--delete-grace=10m", "--exclude-namespaces=a,b: \"c\""],
        "extraEnv": [{"name": "RUST_LOG", "value": "debug"}],
        "resources": {"limits": {"memory": "1Gi"}, "requests": null},
        "monitoring": true,
        "monitoringLabels": {"release": "prometheus"},
    });
    let rendered = render(helm(test).unwrap(), "lockstep-system", &values);
    let spec = &rendered["\"Deployment\" \"lockstep\""]["spec"];
    assert_eq!(spec["replicas"], 3);
    assert_eq!(spec["template"]["metadata"]["annotations"], values["podAnnotations"]);
    let pod = &spec["template"]["spec"];
    for field in ["imagePullSecrets", "priorityClassName", "nodeSelector", "tolerations"] {
        assert_eq!(pod[field], values[field], "{field}");
    }
    let quota = &rendered["\"ResourceQuota\" \"lockstep\""]["spec"];
    assert_eq!(quota["scopeSelector"]["matchExpressions"][0]["values"], json!(["important"]));
    let none = render(helm(test).unwrap(), "lockstep-system", &json!({"priorityClassName": ""}));
    assert!(none["\"Deployment\" \"lockstep\""]["spec"]["template"]["spec"]["priorityClassName"].is_null());
    assert!(!none.contains_key("\"ResourceQuota\" \"lockstep\""));
    let container = &pod["containers"][0];
    assert_eq!(container["env"].as_array().unwrap().last(), Some(&values["extraEnv"][0]));
    assert_eq!(container["args"], json!(["run", "--delete-grace=10m", "--exclude-namespaces=a,b: \"c\""]));
    assert_eq!(container["resources"], json!({"limits": {"memory": "1Gi"}}));
    let labelled = |document: &&Value| document["metadata"]["labels"]["release"] == "prometheus";
    assert_eq!(rendered.values().filter(labelled).count(), 3);
}

#[test]
fn helm_lint_passes_and_bad_values_are_rejected() {
    let test = "helm_lint_passes_and_bad_values_are_rejected";
    let Some(mut lint) = helm(test) else { return };
    run(lint.args(["lint", "--strict", "--namespace", "lockstep-system"]).arg(chart()));
    let template = |namespace: &str, value: &str| {
        let mut template = helm(test).unwrap();
        template.args(["template", "lockstep", "--namespace", namespace, "--set", value]);
        output(template.arg(chart()), "")
    };
    for bad in [
        "domain=Not-A-Domain",
        "suffix=-",
        "image=a b",
        "replicas=two",
        "replicas=0",
        "unknown=1",
        "exemptUsers[0]=a\\,b",
        "extraArgs[0]=--domain=a.example",
        "extraArgs[0]=--kinds",
        "extraArgs[0]=--no-webhook",
        "extraEnv[0].name=LOCKSTEP_DOMAIN",
    ] {
        assert!(!template("lockstep-system", bad).status.success(), "{bad} is accepted");
    }
    for good in
        ["extraArgs[0]=--drain=10s", "extraArgs[0]=--webhook-bind=[::]:9443", "extraEnv[0].name=RUST_LOG"]
    {
        let taken = template("lockstep-system", good);
        assert!(taken.status.success(), "{good}: {}", String::from_utf8_lossy(&taken.stderr));
    }
    // Lockstep's namespace has neither sources nor targets, so it must not be one that people use.
    let refused = template("default", "replicas=2");
    let text = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && text.contains("--create-namespace"), "{text}");
}

/// Installs or upgrades the chart. The image does not exist: on a cluster with nodes, no pod may start and write a CA
/// bundle of its own.
fn upgrade(test: &str, cluster: &Cluster, namespace: &str, value: &str) {
    let values = format!("domain={},image=localhost/none:none,{value}", cluster.domain());
    let mut helm = helm(test).unwrap();
    helm.args(["upgrade", "--install", "lockstep", "--namespace", namespace, "--set", &values]);
    run(helm.arg(chart()));
}

#[tokio::test]
async fn disruption_budget_allows_one_replica_at_a_time_even_if_there_is_only_one() {
    let test = "disruption_budget_allows_one_replica_at_a_time_even_if_there_is_only_one";
    if helm(test).is_none() {
        return;
    }
    let cluster = Cluster::new("budget").await;
    let namespace = cluster.namespace("own").await;
    for (replicas, kept) in [(1, 0), (2, 1), (3, 2)] {
        upgrade(test, &cluster, &namespace, &format!("replicas={replicas}"));
        let path = format!("/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets/lockstep");
        let status = eventually("the PodDisruptionBudget counts the pods", || async {
            let status = cluster.get(&path).await?["status"].clone();
            (status["expectedPods"] == replicas).then_some(status)
        })
        .await;
        assert_eq!(status["desiredHealthy"], kept, "{status:#}");
    }
    run(helm(test).unwrap().args(["uninstall", "lockstep", "--namespace", &namespace]));
    cluster.delete(&format!("/api/v1/namespaces/{namespace}")).await;
}

#[tokio::test]
async fn upgrade_keeps_the_ca_bundle_and_uninstall_removes_everything() {
    let test = "upgrade_keeps_the_ca_bundle_and_uninstall_removes_everything";
    if helm(test).is_none() {
        return;
    }
    let cluster = Cluster::new("helm").await;
    let namespace = cluster.namespace("own").await;
    upgrade(test, &cluster, &namespace, "secrets=false");
    let paths = ["validating", "mutating"].map(|kind| {
        let group = "/apis/admissionregistration.k8s.io/v1";
        format!("{group}/{kind}webhookconfigurations/lockstep.{}", cluster.domain())
    });
    for path in &paths {
        let bundle = json!([{"op": "add", "path": "/webhooks/0/clientConfig/caBundle", "value": "Y2E="}]);
        let patch = format!("{path}?fieldManager=lockstep");
        cluster.try_request("PATCH", &patch, Some(("application/json-patch+json", &bundle))).await.unwrap();
    }
    upgrade(test, &cluster, &namespace, "secrets=true");
    for path in &paths {
        let webhook = cluster.get(path).await.unwrap()["webhooks"][0].clone();
        assert_eq!(webhook["clientConfig"]["caBundle"], "Y2E=", "{webhook:#}");
        assert_eq!(webhook["rules"][0]["resources"], json!(["configmaps", "secrets"]), "{webhook:#}");
    }
    run(helm(test).unwrap().args(["uninstall", "lockstep", "--namespace", &namespace]));
    for path in &paths {
        cluster.wait_gone(path).await;
    }
    cluster.delete(&format!("/api/v1/namespaces/{namespace}")).await;
}
