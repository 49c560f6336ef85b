//! `lockstep manifests` prints what kustomize builds from deploy/, and the API server accepts it.

use std::{collections::BTreeMap, fs, path::Path};

use serde_json::{Value, json};

use crate::{
    crds,
    harness::{
        Cluster, Lockstep, configmap, dedicated_control_plane, eventually, manifests, output, pipe, run,
        secret, shared,
    },
};

/// The documents of a YAML text by kind and name, as kubectl parses them.
pub fn documents(yaml: &str) -> BTreeMap<String, Value> {
    let mut read = shared().kubectl();
    let json =
        pipe(read.args(["create", "--dry-run=client", "--validate=false", "-o", "json", "-f", "-"]), yaml);
    let stream = serde_json::Deserializer::from_str(&json).into_iter::<Value>();
    let mut documents = BTreeMap::new();
    for document in stream.map(|document| document.expect("JSON")) {
        let name = format!("{} {}", document["kind"], document["metadata"]["name"]);
        assert!(documents.insert(name.clone(), document).is_none(), "{name} occurs twice");
    }
    assert!(documents.len() >= 11, "{yaml}");
    documents
}

/// What kustomize builds from the base and these components, in this order.
fn kustomize(components: &[&str]) -> String {
    let dir = std::env::temp_dir().join(format!("kustomize-{}-{}", std::process::id(), components.join("-")));
    fs::create_dir_all(&dir).unwrap();
    // kustomize accepts only relative paths.
    let up = "../".repeat(dir.canonicalize().unwrap().components().count() - 1);
    let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy");
    let deploy = format!("{up}.{}", deploy.display());
    let components: Vec<String> =
        components.iter().map(|name| format!("{deploy}/components/{name}")).collect();
    let text = format!("resources: ['{deploy}/base']\ncomponents: {components:?}\n");
    fs::write(dir.join("kustomization.yaml"), text).unwrap();
    let built = run(shared().kubectl().arg("kustomize").arg(&dir));
    fs::remove_dir_all(dir).unwrap();
    built
}

const EVERYTHING: &[&str] =
    &["--create-namespace", "--secrets", "--policy", "--cert-manager", "--monitoring"];

#[test]
fn manifests_print_what_kustomize_builds() {
    let cases: [(&[&str], &[&str]); 6] = [
        (&[], &[]),
        (&["--create-namespace"], &["namespace"]),
        (&["--secrets"], &["secrets"]),
        (&["--policy"], &["policy"]),
        (&["--secrets", "--policy"], &["secrets", "policy"]),
        (&["--secrets", "--policy"], &["policy", "secrets"]),
    ];
    let with_crds: [(&[&str], &[&str]); 4] = [
        (&["--cert-manager"], &["cert-manager"]),
        (&["--monitoring"], &["monitoring"]),
        (EVERYTHING, &["namespace", "secrets", "policy", "cert-manager", "monitoring"]),
        (EVERYTHING, &["monitoring", "cert-manager", "policy", "secrets", "namespace"]),
    ];
    let with_crds = with_crds.into_iter().filter(|_| crds::available());
    for (flags, components) in cases.into_iter().chain(with_crds) {
        let (printed, built) = (documents(&manifests(flags)), documents(&kustomize(components)));
        assert_eq!(printed, built, "{flags:?}");
        // `kubectl delete` of the output deletes what it contains.
        let has_namespace = printed.values().any(|document| document["kind"] == "Namespace");
        assert_eq!(has_namespace, flags.contains(&"--create-namespace"), "{flags:?}");
    }
}

/// An API server that admits critical pods only where a quota names their priority, as on GKE.
#[tokio::test]
async fn pods_are_critical_even_where_such_pods_need_a_quota() {
    let limited = json!({"resource": "pods", "matchScopes": [
        {"scopeName": "PriorityClass", "operator": "In", "values": ["system-cluster-critical"]},
    ]});
    let quota = json!({
        "apiVersion": "apiserver.config.k8s.io/v1", "kind": "ResourceQuotaConfiguration",
        "limitedResources": [limited],
    });
    let admission = json!({
        "apiVersion": "apiserver.config.k8s.io/v1", "kind": "AdmissionConfiguration",
        "plugins": [{"name": "ResourceQuota", "configuration": quota}],
    });
    let file = std::env::temp_dir().join(format!("admission-{}.json", std::process::id()));
    fs::write(&file, admission.to_string()).unwrap();
    let flag = format!("--admission-control-config-file={}", file.display());
    let Some(plane) = dedicated_control_plane(&[&flag]) else { return };
    let cluster = Cluster::on(plane, "critical").await;
    let pod = json!({
        "apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"},
        "spec": {"priorityClassName": "system-cluster-critical", "containers": [{"name": "x", "image": "x"}]},
    });
    // Until the namespace has its ServiceAccount, the pod is refused for that.
    eventually("the quota refuses a critical pod", || async {
        let refused = output(plane.kubectl().args(["create", "-n", "default", "-f", "-"]), &pod.to_string());
        String::from_utf8_lossy(&refused.stderr).contains("insufficient quota").then_some(())
    })
    .await;
    pipe(plane.kubectl().args(["apply", "-f", "-"]), &manifests(&[]));
    eventually("both pods are admitted, with the priority", || async {
        let pods = cluster.get("/api/v1/namespaces/lockstep-system/pods").await?;
        let pods = pods["items"].as_array()?.clone();
        let critical = |pod: &&Value| pod["spec"]["priority"] == 2_000_000_000;
        (pods.len() == 2 && pods.iter().filter(critical).count() == 2).then_some(())
    })
    .await;
    fs::remove_file(file).unwrap();
}

#[tokio::test]
async fn api_server_accepts_every_combination_of_flags() {
    let cluster = Cluster::new("flags").await;
    let namespace = cluster.namespace("own").await;
    let odd = "--exempt-user=o'brien \\ ü: #x,alice";
    for flags in [
        &[][..],
        &["--secrets"],
        &["--policy"],
        &["--secrets", "--policy"],
        &["--secrets", "--policy", odd, "--exempt-group=ops", "--webhook-url=https://127.0.0.1:1"],
        &[
            "--secrets",
            "--policy",
            "--domain=a.example",
            "--suffix=.copy",
            "--webhook-url=https://[::1]:9443",
        ],
        &["--policy", "--domain=x", &format!("--namespace={namespace}")],
        &[odd, "--exempt-group=ops", "--image=registry.example.com:5000/a/lockstep:1@sha256:0"],
    ] {
        pipe(shared().kubectl().args(["apply", "--dry-run=server", "-f", "-"]), &manifests(flags));
    }
    if crds::available() {
        for flags in [
            &["--cert-manager"][..],
            &["--monitoring"],
            &[EVERYTHING, &[&format!("--namespace={namespace}"), "--domain=x"]].concat(),
        ] {
            let apply = ["apply", "--dry-run=server", "--validate=strict", "-f", "-"];
            pipe(shared().kubectl().args(apply), &manifests(flags));
        }
    }
}

/// Other teams use the namespace, and it was there before Lockstep.
#[tokio::test]
async fn existing_namespace_and_its_content_survive_install_and_uninstall() {
    let cluster = Cluster::new("precious").await;
    let labels = json!({"team": "platform", "pod-security.kubernetes.io/enforce": "privileged"});
    let namespace = cluster.namespace_with("platform", labels, json!({"contact": "ann"})).await;
    let precious = [configmap(&namespace, "precious"), secret(&namespace, "precious")];
    for path in &precious {
        let (collection, name) = path.rsplit_once('/').unwrap();
        cluster.post(collection, &json!({"metadata": {"name": name}})).await;
    }
    let path = format!("/api/v1/namespaces/{namespace}");
    let state = async || {
        let mut objects = vec![];
        for path in [&path, &precious[0], &precious[1]] {
            objects.push(cluster.get(path).await);
        }
        objects
    };
    let before = state().await;
    let flags = ["--domain", &cluster.domain(), "--namespace", &namespace, "--secrets", "--policy"];
    // The image does not exist: on a cluster with nodes, no pod may start.
    let text = manifests(&[&flags[..], &["--image", "localhost/none:none"]].concat());
    let created = pipe(cluster.plane.kubectl().args(["apply", "-o", "name", "-f", "-"]), &text);
    let created: Vec<&str> = created.lines().collect();
    assert!(created.len() >= 15 && created.contains(&"deployment.apps/lockstep"), "{created:?}");
    assert_eq!(state().await, before, "installing changed something that was there");

    pipe(cluster.plane.kubectl().args(["delete", "--wait", "-f", "-"]), &text);
    assert_eq!(state().await, before, "uninstalling changed something that was there");
    for name in created {
        let get = ["get", name, "--namespace", &namespace, "--ignore-not-found", "-o", "name"];
        assert_eq!(run(cluster.plane.kubectl().args(get)), "", "left behind");
    }
    cluster.delete(&path).await;
}

/// The alerts name kubectl commands; the API server must support their field selectors.
#[test]
fn field_selectors_in_alert_descriptions_are_supported() {
    let rules = include_str!("../../deploy/components/monitoring/rules.yaml");
    let words: Vec<&str> = rules.split_whitespace().collect();
    let selectors: Vec<&str> = words
        .windows(2)
        .filter(|pair| pair[0] == "--field-selector")
        .map(|pair| pair[1].trim_end_matches(['.', ';']))
        .collect();
    assert!(selectors.len() >= 3, "{selectors:?}");
    for selector in selectors {
        run(shared().kubectl().args(["get", "events", "-A", "--field-selector", selector]));
    }
}

#[tokio::test]
async fn lockstep_with_certificate_files_needs_no_permission_to_write_certificates() {
    if !crds::available() {
        return;
    }
    let cluster = Cluster::new("files").await;
    let namespace = cluster.ns("own");
    let _installed = cluster.install(&["--namespace", &namespace, "--create-namespace", "--cert-manager"]);
    let dir = std::env::temp_dir().join(&cluster.id);
    run(std::process::Command::new(env!("CARGO_BIN_EXE_lockstep")).arg("certs").arg("--dir").arg(&dir));
    let kubeconfig = cluster.plane.service_account(&namespace, "lockstep").expect("a kubeconfig");
    let (certificate, key) = (dir.join("tls.crt"), dir.join("tls.key"));
    let flags = ["--namespace", &namespace, "--webhook-bind", &cluster.address];
    let files = ["--tls-cert", certificate.to_str().unwrap(), "--tls-key", key.to_str().unwrap()];
    let mut lockstep = Lockstep::spawn(&cluster.domain(), &kubeconfig, &[&flags[..], &files[..]].concat());
    lockstep.wait_ready().await;
    lockstep.wait_log("this replica is now the leader").await;
    let arguments = ["certs", "rotate", "--lockstep-namespace", &namespace, "--domain", &cluster.domain()];
    let mut rotate = cluster.admin().lockstep(&arguments);
    let refused = tokio::task::spawn_blocking(move || rotate.output().expect("lockstep")).await.unwrap();
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(
        !refused.status.success() && said.contains("cert-manager issues the webhook's certificate"),
        "{said}"
    );
    assert!(!lockstep.log().contains("forbidden"), "{}", lockstep.log());
    fs::remove_dir_all(dir).unwrap();
    cluster.delete(&format!("/api/v1/namespaces/{namespace}")).await;
}

#[test]
fn webhooks_have_short_timeouts_and_cover_every_namespace() {
    let documents = documents(&manifests(&["--secrets"]));
    let webhooks: Vec<&Value> =
        documents.values().filter_map(|document| document["webhooks"].as_array()).flatten().collect();
    assert_eq!(webhooks.len(), 5);
    for webhook in webhooks {
        assert!(webhook["timeoutSeconds"].as_u64().is_some_and(|seconds| seconds <= 3), "{webhook:#}");
        assert_eq!(webhook["sideEffects"], "None", "{webhook:#}");
        assert!(webhook["clientConfig"]["caBundle"].is_null(), "the webhook writes caBundle: {webhook:#}");
        assert!(webhook["namespaceSelector"].is_null(), "a namespace is left out: {webhook:#}");
        // The API server accepts namespaceObject in matchConditions, and then fails every request.
        assert!(!webhook["matchConditions"].to_string().contains("namespaceObject"), "{webhook:#}");
    }
}

#[tokio::test]
async fn applying_again_keeps_the_ca_bundle_even_if_the_address_changes() {
    let cluster = Cluster::new("again").await;
    // A separate namespace: without --webhook-url there is a Deployment, whose name tests would share.
    let namespace = cluster.namespace("own").await;
    let _installed = cluster.install(&["--namespace", &namespace, "--webhook-url", "https://127.0.0.1:1"]);
    let paths = ["validating", "mutating"].map(|kind| {
        let group = "/apis/admissionregistration.k8s.io/v1";
        format!("{group}/{kind}webhookconfigurations/lockstep.{}", cluster.domain())
    });
    for path in &paths {
        let bundle = json!([{"op": "add", "path": "/webhooks/0/clientConfig/caBundle", "value": "Y2E="}]);
        cluster.try_request("PATCH", path, Some(("application/json-patch+json", &bundle))).await.unwrap();
    }
    // The image does not exist: on a cluster with nodes, no pod may start and write a CA bundle of its own.
    for flags in [
        ["--webhook-url", "https://127.0.0.1:1"],
        ["--webhook-url", "https://127.0.0.1:2"],
        ["--image", "localhost/none:none"],
    ] {
        let outside = flags[0] == "--webhook-url";
        cluster.apply(&[["--namespace", &namespace], flags].concat());
        for path in &paths {
            let client = cluster.get(path).await.unwrap()["webhooks"][0]["clientConfig"].clone();
            assert_eq!(client["caBundle"], "Y2E=", "{flags:?}");
            assert_eq!(client["service"].is_null(), outside, "{client}");
            assert_eq!(client["url"].is_null(), !outside, "{client}");
        }
    }
    cluster.delete(&format!("/api/v1/namespaces/{namespace}")).await;
}

#[tokio::test]
async fn permissions_are_limited_to_the_instances_own_objects() {
    let cluster = Cluster::new("rights").await;
    let _installed = cluster.install(&["--webhook-url", &cluster.url()]);
    let own = format!("lockstep.{}", cluster.domain());
    let may = |line: &str| {
        let line = format!("auth can-i {line} --as=system:serviceaccount:lockstep-system:lockstep");
        let output = cluster.admin().kubectl(&line).output().expect("kubectl");
        String::from_utf8_lossy(&output.stdout).trim() == "yes"
    };
    assert!(may("create subjectaccessreviews.authorization.k8s.io"));
    assert!(may("create secrets -n lockstep-system"));
    for (name, expected) in [(own.as_str(), true), ("lockstep.of-somebody-else", false)] {
        for kind in ["validatingwebhookconfigurations", "mutatingwebhookconfigurations"] {
            for verb in ["list", "watch", "patch"] {
                assert_eq!(may(&format!("{verb} {kind}/{name}")), expected, "{verb} {kind}/{name}");
            }
        }
        for verb in ["get", "update"] {
            let lease = format!("{verb} leases.coordination.k8s.io/{name} -n lockstep-system");
            assert_eq!(may(&lease), expected, "{lease}");
        }
    }
    assert!(!may(&format!("update leases.coordination.k8s.io/{own} -n default")));
    assert!(!may(&format!("delete validatingwebhookconfigurations/{own}")));
}
