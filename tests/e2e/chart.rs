//! The Helm chart renders what `lockstep manifests` prints.

mod templates;

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
    },
};

use controlplane::{Binaries, Error, skip};
use serde_json::{Value, json};

use crate::{
    crds,
    harness::{CONTROLLERS, Cluster, eventually, manifests, output, run, shared, within},
    manifests::documents,
};
use lockstep_cli::inspect::check::version::{MIN_MINOR, NEWEST_TESTED_MINOR};

fn chart() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("deploy/chart")
}

/// A directory that is removed with the control plane, however the tests end.
fn scratch() -> PathBuf {
    shared().admin().parent().expect("a kubeconfig is in a directory").to_owned()
}

/// The pinned Helm 4 without the user's configuration; `None` if it cannot be built.
fn helm() -> Option<Command> {
    helm_of_version(4)
}

/// As [`helm`], version 3 or 4.
fn helm_of_version(major: u32) -> Option<Command> {
    static HELM3: OnceLock<Option<PathBuf>> = OnceLock::new();
    static HELM4: OnceLock<Option<PathBuf>> = OnceLock::new();
    let found = |binaries: Result<Binaries, Error>| match binaries {
        Ok(binaries) => Some(binaries.dir().join("helm")),
        Err(Error::NoGo) => None,
        Err(error) => panic!("{error}"),
    };
    let helm = match major {
        3 => HELM3.get_or_init(|| found(Binaries::build_helm3())),
        _ => HELM4.get_or_init(|| found(Binaries::build_helm())),
    };
    let Some(helm) = helm else {
        skip("Helm is built with Go, and there is no `go` in PATH");
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
    let template = ["template", "lockstep", "--skip-tests", "--namespace", namespace, "--values"];
    helm.args(template).arg(&file).arg(chart());
    documents(&run(&mut helm))
}

/// Labels that the chart adds to those of `lockstep manifests`.
const RELEASE_LABELS: [&str; 4] = [
    "app.kubernetes.io/instance",
    "app.kubernetes.io/managed-by",
    "app.kubernetes.io/version",
    "helm.sh/chart",
];

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
fn every_value_is_described() {
    fn check(schema: &Value, values: &Value, path: &str, table: &str) {
        let properties = schema["properties"].as_object();
        for (name, property) in properties.into_iter().flatten().filter(|(name, _)| *name != "global") {
            let path = if path.is_empty() { name.clone() } else { format!("{path}.{name}") };
            assert!(property["description"].is_string(), "{path} has no description in values.schema.json");
            assert!(values.get(name).is_some(), "{path} is not in values.yaml");
            if property["properties"].is_null() {
                assert!(table.contains(&format!("`{path}`")), "{path} is not in docs/reference.md");
            }
            check(property, &values[name], &path, table);
        }
    }
    let [schema, values] =
        ["values.schema.json", "values.yaml"].map(|file| fs::read_to_string(chart().join(file)).unwrap());
    let reference = include_str!("../../docs/reference.md");
    let (_, rest) = reference.split_once("\n### Helm\n").expect("a section about Helm");
    let (table, _) = rest.split_once("\n### ").expect("another section");
    check(&serde_json::from_str(&schema).unwrap(), &serde_saphyr::from_str(&values).unwrap(), "", table);
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
fn chart_readme_and_check_name_the_versions_of_kubernetes_that_are_tested() {
    let minors: Vec<String> = (MIN_MINOR..=NEWEST_TESTED_MINOR).map(|minor| format!("1.{minor}")).collect();
    assert_eq!(controlplane::versions().collect::<Vec<_>>(), minors);
    let chart = fs::read_to_string(chart().join("Chart.yaml")).unwrap();
    assert!(chart.contains(&format!("\nkubeVersion: \">=1.{MIN_MINOR}.0-0\"\n")), "{chart}");
    let readme = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("README.md")).unwrap();
    for text in [
        format!("Kubernetes 1.{MIN_MINOR} or newer"),
        format!("from 1.{MIN_MINOR} to 1.{NEWEST_TESTED_MINOR} "),
    ] {
        assert!(readme.contains(&text), "{text}");
    }
}

#[test]
fn chart_takes_versions_of_clouds_and_refuses_older_ones() {
    for major in [3, 4] {
        let template = |version: &str| {
            let mut helm = helm_of_version(major)?;
            helm.args(["template", "lockstep", "--namespace", "platform", "--kube-version", version]);
            Some(helm.arg(chart()).output().unwrap())
        };
        for version in ["v1.30.0", "v1.30.0-rc.1", "v1.31.4-gke.100", "v1.32.9-eks-113cf36", "v1.33.1+k3s1"] {
            let Some(output) = template(version) else { return };
            let message = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "Helm {major}, {version}: {message}");
        }
        for version in ["v1.29.14", "v1.29.8-eks-a737599"] {
            let Some(output) = template(version) else { return };
            let message = String::from_utf8_lossy(&output.stderr);
            assert!(!output.status.success(), "Helm {major}, {version}");
            let expected =
                format!("chart requires kubeVersion: >=1.{MIN_MINOR}.0-0 which is incompatible with");
            assert!(message.lines().next().is_some_and(|line| line.contains(&expected)), "{message}");
        }
    }
}

#[test]
fn chart_renders_what_manifests_prints() {
    if helm().is_none() || !crds::available() {
        return;
    }
    let everything =
        json!({"secrets": true, "policy": true, "certManager": true, "metrics": {"enabled": true}});
    let image = json!({"repository": "example.com:5000/a/lockstep", "tag": "1"});
    let cases: [(Value, &[&str]); 11] = [
        (json!({}), &[]),
        (json!({"secrets": true}), &["--secrets"]),
        (json!({"policy": true}), &["--policy"]),
        (json!({"certManager": true}), &["--cert-manager"]),
        (json!({"metrics": {"enabled": true}}), &["--monitoring"]),
        (
            json!({"metrics": {"enabled": true, "runbookUrl": "https://git.example.com/operations.md"}}),
            &["--monitoring", "--runbook-url=https://git.example.com/operations.md"],
        ),
        (everything, &["--secrets", "--policy", "--cert-manager", "--monitoring"]),
        (
            json!({"domain": "a.example", "suffix": ".copy", "policy": true, "image": image}),
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
            let rendered = render(helm().unwrap(), namespace, &values);
            let printed = documents(&manifests(&[flags, &["--namespace", namespace]].concat()));
            assert_eq!(rendered.keys().collect::<Vec<_>>(), printed.keys().collect::<Vec<_>>(), "{values}");
            for (name, mut document) in rendered {
                let labels = document["metadata"]["labels"].as_object_mut().expect("labels");
                // Only Helm knows these.
                for label in RELEASE_LABELS {
                    assert!(labels.remove(label).is_some(), "{name} has no label {label}");
                }
                assert_eq!(document, printed[&name], "{name} with {values}");
            }
        }
    }
}

#[test]
fn values_that_only_the_chart_has_are_rendered() {
    if helm().is_none() || !crds::available() {
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
        "metrics": {"enabled": true, "interval": "10s", "labels": {"release": "prometheus"}},
        "image": {"repository": "example.com/lockstep", "digest": format!("sha256:{}", "0a".repeat(32)), "pullPolicy": "Always"},
        "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        "topologySpreadConstraints": [{"maxSkew": 2, "topologyKey": "rack", "whenUnsatisfiable": "DoNotSchedule"}],
        "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn"}},
        "podLabels": {"team": "platform"},
        "commonLabels": {"cost-center": "42"},
        "networkPolicy": {
            "apiServerCIDRs": ["10.0.0.0/28"],
            "nodeCIDRs": ["10.1.0.0/16", "fd00::/64"],
            "metricsFrom": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
        },
    });
    let rendered = render(helm().unwrap(), "lockstep-system", &values);
    let spec = &rendered["\"Deployment\" \"lockstep\""]["spec"];
    assert_eq!(spec["replicas"], 3);
    assert_eq!(spec["template"]["metadata"]["annotations"], values["podAnnotations"]);
    let pod = &spec["template"]["spec"];
    let fields = [
        "imagePullSecrets",
        "priorityClassName",
        "nodeSelector",
        "tolerations",
        "affinity",
        "topologySpreadConstraints",
    ];
    for field in fields {
        assert_eq!(pod[field], values[field], "{field}");
    }
    assert_eq!(
        spec["template"]["metadata"]["labels"],
        json!({"app.kubernetes.io/name": "lockstep", "team": "platform", "cost-center": "42"})
    );
    let account = &rendered["\"ServiceAccount\" \"lockstep\""]["metadata"];
    assert_eq!(account["annotations"], values["serviceAccount"]["annotations"]);
    let mut with_tests = helm().unwrap();
    with_tests.args(["template", "lockstep", "--namespace", "lockstep-system", "--set-string"]);
    with_tests.arg("commonLabels.cost-center=42,podLabels.team=platform,podAnnotations.inject=false,podAnnotations.helm\\.sh/hook=x");
    let with_tests = documents(&run(with_tests.arg(chart())));
    let test = &with_tests["\"Pod\" \"lockstep-test\""]["metadata"];
    assert_eq!(
        (&test["labels"]["team"], &test["annotations"]["inject"]),
        (&json!("platform"), &json!("false"))
    );
    assert_eq!(test["annotations"]["helm.sh/hook"], "test");
    for (name, document) in rendered.iter().chain(&with_tests) {
        let labels = &document["metadata"]["labels"];
        assert_eq!(labels["cost-center"], "42", "{name}");
        // Pods have no labels of the release.
        let of_release = |value: &str| if name.starts_with("\"Pod\"") { Value::Null } else { json!(value) };
        let version = concat!("lockstep-", env!("CARGO_PKG_VERSION"));
        assert_eq!(labels["helm.sh/chart"], of_release(version), "{name}");
        assert_eq!(labels["app.kubernetes.io/instance"], of_release("lockstep"), "{name}");
    }
    // A label of the user replaces one of the release, and is there once. It may be empty.
    let own = json!({
        "commonLabels": {"app.kubernetes.io/instance": "", "tier": "a"}, "podLabels": {"tier": "b"},
        "metrics": {"enabled": true, "labels": {"tier": "c"}},
    });
    let own = render(helm().unwrap(), "lockstep-system", &own);
    let deployment = &own["\"Deployment\" \"lockstep\""];
    assert_eq!(deployment["metadata"]["labels"]["app.kubernetes.io/instance"], "");
    assert_eq!(deployment["spec"]["template"]["metadata"]["labels"]["tier"], "b");
    assert_eq!(own["\"PodMonitor\" \"lockstep\""]["metadata"]["labels"]["tier"], "c");
    let block = |cidr: &str| json!({"ipBlock": {"cidr": cidr}});
    let (api_server, nodes) = (block("10.0.0.0/28"), [block("10.1.0.0/16"), block("fd00::/64")]);
    let ingress = json!([
        {"ports": [{"port": 9443}], "from": [&api_server, &nodes[0], &nodes[1]]},
        {"ports": [{"port": 8080}], "from": [&nodes[0], &nodes[1], &values["networkPolicy"]["metricsFrom"][0]]},
    ]);
    assert_eq!(rendered["\"NetworkPolicy\" \"lockstep\""]["spec"]["ingress"], ingress);
    let endpoint = &rendered["\"PodMonitor\" \"lockstep\""]["spec"]["podMetricsEndpoints"][0];
    assert_eq!(endpoint["interval"], "10s");
    let quota = &rendered["\"ResourceQuota\" \"lockstep\""]["spec"];
    assert_eq!(quota["scopeSelector"]["matchExpressions"][0]["values"], json!(["important"]));
    let none = render(helm().unwrap(), "lockstep-system", &json!({"priorityClassName": ""}));
    assert!(none["\"Deployment\" \"lockstep\""]["spec"]["template"]["spec"]["priorityClassName"].is_null());
    assert!(!none.contains_key("\"ResourceQuota\" \"lockstep\""));
    let less = json!({"networkPolicy": {"enabled": false}, "metrics": {"enabled": true, "rules": false}});
    let less = render(helm().unwrap(), "lockstep-system", &less);
    for (name, kept) in [("NetworkPolicy", false), ("PrometheusRule", false), ("PodMonitor", true)] {
        assert_eq!(less.contains_key(&format!("\"{name}\" \"lockstep\"")), kept, "{name}");
    }
    let container = &pod["containers"][0];
    assert_eq!(container["image"], format!("example.com/lockstep@sha256:{}", "0a".repeat(32)));
    assert_eq!(container["imagePullPolicy"], "Always");
    assert_eq!(container["env"].as_array().unwrap().last(), Some(&values["extraEnv"][0]));
    assert_eq!(container["args"], json!(["run", "--delete-grace=10m", "--exclude-namespaces=a,b: \"c\""]));
    assert_eq!(container["resources"], json!({"limits": {"memory": "1Gi"}}));
    for cert_manager in [false, true] {
        let values = json!({"clientCAConfigMap": "webhook-clients", "certManager": cert_manager});
        let rendered = render(helm().unwrap(), "lockstep-system", &values);
        let pod = &rendered["\"Deployment\" \"lockstep\""]["spec"]["template"]["spec"];
        let volumes = pod["volumes"].as_array().unwrap();
        assert_eq!(volumes.len(), 1 + usize::from(cert_manager));
        assert_eq!(
            volumes.last(),
            Some(&json!({"name": "client-ca", "configMap": {"name": "webhook-clients"}}))
        );
        let container = &pod["containers"][0];
        let mount = json!({"name": "client-ca", "mountPath": "/etc/lockstep/client-ca", "readOnly": true});
        assert_eq!(container["volumeMounts"].as_array().unwrap().last(), Some(&mount));
        let variable = json!({"name": "LOCKSTEP_CLIENT_CA", "value": "/etc/lockstep/client-ca/ca.crt"});
        assert!(container["env"].as_array().unwrap().contains(&variable));
    }
    let labelled = |document: &&Value| document["metadata"]["labels"]["release"] == "prometheus";
    assert_eq!(rendered.values().filter(labelled).count(), 3);
}

/// As where the lines below a key are commented out.
#[test]
fn empty_values_are_rendered_and_names_of_releases_may_look_like_numbers() {
    if !crds::available() {
        return;
    }
    for major in [3, 4] {
        let Some(mut helm) = helm_of_version(major) else { return };
        helm.args(["template", "1e3", "--namespace", "platform", "--kube-version", "v1.30.0", "--set"]);
        helm.arg(
            "podAnnotations=null,podLabels=null,commonLabels=null,metrics.labels=null,metrics.enabled=true",
        );
        let rendered = documents(&run(helm.arg(chart())));
        for (name, document) in rendered.iter().filter(|(name, _)| !name.starts_with("\"Pod\"")) {
            assert_eq!(document["metadata"]["labels"]["app.kubernetes.io/instance"], "1e3", "{name}");
        }
    }
}

#[test]
fn helm_lint_passes_and_bad_values_are_rejected() {
    let Some(mut lint) = helm() else { return };
    run(lint.args(["lint", "--strict", "--namespace", "lockstep-system"]).arg(chart()));
    let template = |namespace: &str, value: &str| {
        let mut template = helm().unwrap();
        template.args(["template", "lockstep", "--namespace", namespace, "--set", value]);
        output(template.arg(chart()), "")
    };
    for bad in [
        "domain=Not-A-Domain",
        "suffix=-",
        "image.repository=a b",
        "image.pullPolicy=Sometimes",
        "image=lockstep:1",
        "replicas=two",
        "metrics.runbookUrl=x y",
        "metrics.unknown=1",
        "commonLabels.app\\.kubernetes\\.io/name=other",
        "networkPolicy.apiServerCIDRs[0]=10.0.0.1",
        "replicas=0",
        "unknown=1",
        "exemptUsers[0]=a\\,b",
        "extraArgs[0]=--domain=a.example",
        "extraArgs[0]=--kinds",
        "extraArgs[0]=--no-webhook",
        "extraArgs[0]=--client-ca=/ca.crt",
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
    for namespace in ["default", "kube-system"] {
        let refused = template(namespace, "replicas=2");
        let text = String::from_utf8_lossy(&refused.stderr);
        assert!(!refused.status.success() && text.contains("--create-namespace"), "{text}");
    }
}

/// Installs or upgrades the chart. The image does not exist: on a cluster with nodes, no pod may start and write a CA
/// bundle of its own.
fn upgrade(cluster: &Cluster, namespace: &str, value: &str) {
    let values =
        format!("domain={},image.repository=localhost/none,image.tag=none,{value}", cluster.domain());
    let mut helm = helm().unwrap();
    helm.args(["upgrade", "--install", "lockstep", "--namespace", namespace, "--set", &values]);
    run(helm.arg(chart()));
}

#[tokio::test]
async fn disruption_budget_allows_one_replica_at_a_time_even_if_there_is_only_one() {
    if helm().is_none() {
        return;
    }
    let cluster = Cluster::new("budget").await;
    let namespace = cluster.namespace("own").await;
    for (replicas, kept) in [(1, 0), (2, 1), (3, 2)] {
        upgrade(&cluster, &namespace, &format!("replicas={replicas}"));
        let path = format!("/apis/policy/v1/namespaces/{namespace}/poddisruptionbudgets/lockstep");
        let counted = eventually("the PodDisruptionBudget counts the pods", || async {
            let status = cluster.get(&path).await?["status"].clone();
            (status["expectedPods"] == replicas).then_some(status)
        });
        let status = within(CONTROLLERS, counted).await;
        assert_eq!(status["desiredHealthy"], kept, "{status:#}");
    }
    run(helm().unwrap().args(["uninstall", "lockstep", "--namespace", &namespace]));
    cluster.delete(&format!("/api/v1/namespaces/{namespace}")).await;
}

/// Runs `helm test` and plays the kubelet: the pod ends in this phase. Returns whether Helm says that the test passed.
async fn helm_test(mut helm: Command, cluster: &Cluster, namespace: &str, phase: &str) -> bool {
    helm.args(["test", "lockstep", "--timeout", "60s", "--namespace", namespace]);
    let test = tokio::task::spawn_blocking(move || output(&mut helm, ""));
    let path = format!("/api/v1/namespaces/{namespace}/pods/lockstep-test");
    eventually("the pod of the test", || async { cluster.get(&path).await }).await;
    // Its ServiceAccount sees what it needs. No replica runs, so the check itself fails.
    let kubeconfig = cluster.plane.service_account(namespace, "lockstep-test").expect("a kubeconfig");
    let mut check = Command::new(env!("CARGO_BIN_EXE_lockstep"));
    check.args(["check", "--lockstep-namespace", namespace, "--domain", &cluster.domain(), "-n", namespace]);
    let printed = output(check.env("KUBECONFIG", kubeconfig), "");
    let printed = String::from_utf8_lossy(&printed.stdout).into_owned();
    assert!(printed.contains("✗ the API server cannot reach the webhook"), "{printed}");
    assert!(!printed.contains("cannot be read") && !printed.contains("the pods in"), "{printed}");
    cluster.merge(&format!("{path}/status"), &json!({"status": {"phase": phase}})).await;
    test.await.expect("helm ends").status.success()
}

#[tokio::test(flavor = "multi_thread")]
async fn helm_3_and_4_install_upgrade_roll_back_test_and_uninstall_and_touch_nothing_else() {
    for major in [3, 4] {
        if helm_of_version(major).is_none() {
            return;
        }
        let cluster = Cluster::new(&format!("helm{major}")).await;
        let namespace = cluster.namespace_with("own", json!({"team": "platform"}), json!({})).await;
        let own = format!("/api/v1/namespaces/{namespace}");
        cluster.post(&format!("{own}/configmaps"), &json!({"metadata": {"name": "precious"}})).await;
        let before = (cluster.get(&own).await, cluster.configmap(&namespace, "precious").await);
        let chart = chart().display().to_string();
        let helm = || helm_of_version(major).unwrap();
        let helm_in_namespace =
            |arguments: &[&str]| run(helm().args(arguments).args(["--namespace", &namespace]));
        let values = format!("domain={},image.repository=localhost/none,image.tag=none", cluster.domain());

        let notes = helm_in_namespace(&["install", "lockstep", &chart, "--set", &values]);
        let wait = format!("kubectl -n {namespace} rollout status deployment lockstep");
        assert!(notes.contains(&wait) && notes.contains("failed calling webhook"), "Helm {major}: {notes}");
        let deployment = format!("/apis/apps/v1/namespaces/{namespace}/deployments/lockstep");
        let policy = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies";
        let policy = format!("{policy}/lockstep.{}", cluster.domain());
        let state = async || {
            let replicas = cluster.get(&deployment).await.expect("the Deployment")["spec"]["replicas"].take();
            (replicas, cluster.get(&policy).await.is_some())
        };
        assert_eq!(state().await, (json!(2), false), "Helm {major}: installed");
        let more = format!("{values},replicas=3,policy=true");
        helm_in_namespace(&["upgrade", "lockstep", &chart, "--set", &more]);
        assert_eq!(state().await, (json!(3), true), "Helm {major}: upgraded");
        helm_in_namespace(&["rollback", "lockstep", "1"]);
        assert_eq!(state().await, (json!(2), false), "Helm {major}: rolled back");

        assert!(helm_test(helm(), &cluster, &namespace, "Succeeded").await, "Helm {major}");
        let binding = format!("lockstep.{}-test", cluster.domain());
        let bindings = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings";
        cluster.wait_gone(&format!("{bindings}/{binding}")).await;
        assert!(!helm_test(helm(), &cluster, &namespace, "Failed").await, "Helm {major}");
        // Of a test that failed, the pod stays with its log.
        cluster.wait_gone(&format!("{bindings}/{binding}")).await;
        let pod = format!("/api/v1/namespaces/{namespace}/pods/lockstep-test");
        assert!(cluster.get(&pod).await.is_some(), "Helm {major}");

        helm_in_namespace(&["uninstall", "lockstep"]);
        let configurations = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations";
        let configuration = format!("{configurations}/lockstep.{}", cluster.domain());
        for path in [&deployment, &configuration] {
            cluster.wait_gone(path).await;
        }
        let after = (cluster.get(&own).await, cluster.configmap(&namespace, "precious").await);
        assert_eq!(after, before, "Helm {major} changed something that was there");
        cluster.delete(&own).await;
    }
}

#[tokio::test]
async fn upgrade_keeps_the_ca_bundle_and_uninstall_removes_everything() {
    if helm().is_none() {
        return;
    }
    let cluster = Cluster::new("helm").await;
    let namespace = cluster.namespace("own").await;
    upgrade(&cluster, &namespace, "secrets=false");
    let paths = ["validating", "mutating"].map(|kind| {
        let group = "/apis/admissionregistration.k8s.io/v1";
        format!("{group}/{kind}webhookconfigurations/lockstep.{}", cluster.domain())
    });
    for path in &paths {
        let bundle = json!([{"op": "add", "path": "/webhooks/0/clientConfig/caBundle", "value": "Y2E="}]);
        let patch = format!("{path}?fieldManager=lockstep");
        cluster.try_request("PATCH", &patch, Some(("application/json-patch+json", &bundle))).await.unwrap();
    }
    upgrade(&cluster, &namespace, "secrets=true");
    for path in &paths {
        let webhook = cluster.get(path).await.unwrap()["webhooks"][0].clone();
        assert_eq!(webhook["clientConfig"]["caBundle"], "Y2E=", "{webhook:#}");
        assert_eq!(webhook["rules"][0]["resources"], json!(["configmaps", "secrets"]), "{webhook:#}");
    }
    run(helm().unwrap().args(["uninstall", "lockstep", "--namespace", &namespace]));
    for path in &paths {
        cluster.wait_gone(path).await;
    }
    cluster.delete(&format!("/api/v1/namespaces/{namespace}")).await;
}
