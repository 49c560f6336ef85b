//! Metrics, alerts and dashboard, judged by a real Prometheus and promtool.

use std::{
    collections::{BTreeMap, BTreeSet},
    process::Command,
    time::Duration,
};

use controlplane::poll;
use serde_json::{Value, json};
use tokio::{io::AsyncWriteExt, net::TcpStream};

use crate::{
    harness::{Cluster, Lockstep, configmap, eventually, pipe, run},
    prometheus::{Dir, JOB, Prometheus, installed, rules},
    slow_webhook::SlowWebhook,
};

const DASHBOARD: &str = include_str!("../../deploy/components/monitoring/dashboard.json");
const UNIT_TESTS: &str = include_str!("../monitoring/alerts.yaml");
const README: &str = include_str!("../README.md");
/// How long the slowest fault may take until its alert fires, on a busy machine.
const ALERT_DEADLINE: Duration = Duration::from_secs(180);
/// More than the brake lets through at once.
const MANY_SOURCES: usize = 25;

/// The alerts of the rules, by name.
fn alerts(rules: &Value) -> BTreeMap<String, Value> {
    let rules = rules["groups"][0]["rules"].as_array().expect("rules");
    rules.iter().map(|rule| (rule["alert"].as_str().expect("an alert").to_owned(), rule.clone())).collect()
}

#[test]
fn alerts_fire_in_unit_tests_and_only_there() {
    let Some([_, promtool]) = installed() else { return };
    let dir = Dir::new("unit");
    let rules_file = dir.write("rules.yaml", &rules().to_string());
    run(Command::new(&promtool).args(["check", "rules", "--lint-fatal"]).arg(rules_file));
    let tests = dir.write("alerts.yaml", UNIT_TESTS);
    run(Command::new(&promtool).args(["test", "rules"]).arg(tests));
    // Each alert fires in one of them, and stays silent in one of them.
    let tests: Value = serde_saphyr::from_str(UNIT_TESTS).expect("YAML");
    let (mut fires, mut silent) = (BTreeSet::new(), BTreeSet::new());
    for test in tests["tests"].as_array().expect("tests") {
        for check in test["promql_expr_test"].as_array().expect("checks") {
            let name = check["expr"].as_str().expect("an expression").split('"').nth(1).expect("a name");
            let samples = check["exp_samples"].as_array().expect("samples");
            let seen = if samples.is_empty() { &mut silent } else { &mut fires };
            seen.insert(name.to_owned());
            // A label of another cluster, or of a healthy replica, in the input and not among the samples.
            if test["input_series"].to_string().contains("west")
                || test["input_series"].to_string().contains("pod=\\\"b\\\"")
            {
                silent.insert(name.to_owned());
            }
        }
    }
    let all: BTreeSet<String> = alerts(&rules()).into_keys().collect();
    assert_eq!(fires, all, "alerts that fire in a unit test");
    assert_eq!(silent, all, "alerts that stay silent in a unit test");
    let names: Vec<&str> =
        tests["tests"].as_array().expect("tests").iter().filter_map(|test| test["name"].as_str()).collect();
    for [alert, test, _] in documented() {
        let name = format!("{alert}: {test}");
        assert!(names.contains(&&*name), "tests/README.md names a unit test that does not exist: {name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn healthy_replica_has_data_for_every_panel_and_no_alert() {
    let Some([program, promtool]) = installed() else { return };
    let cluster = Cluster::new("healthy").await;
    let (home, away) = (cluster.namespace("home").await, cluster.namespace("away").await);
    let (_installed, lockstep) = cluster.install_and_start(&[]).await;
    lockstep.wait_log("this replica is now the leader").await;
    cluster.source(&home, "colors").annotate("target-namespaces", &format!(".,{away}")).create().await;
    cluster.source(&home, "still").annotate("paused", "true").create().await;
    for namespace in [&home, &away] {
        cluster.wait_data(namespace, "colors-synced", json!({"sky": "blue"})).await;
    }
    for (metric, value) in [
        ("lockstep_companions_wanted", 3.0),
        ("lockstep_companions_in_step", 2.0),
        ("lockstep_sources_paused", 1.0),
        ("lockstep_propagation_duration_seconds_count", 2.0),
    ] {
        lockstep.wait_metric(metric, value).await;
    }

    // What a tool without OpenMetrics gets: promtool reads the text format, and complains about missing help.
    let metrics = lockstep.metrics();
    let (head, body) = metrics.split_once("\r\n\r\n").expect("a body");
    assert!(head.to_lowercase().contains("content-type: text/plain; version=0.0.4"), "{head}");
    let lint = pipe(Command::new(&promtool).args(["check", "metrics"]), body);
    assert_eq!(lint, "", "promtool check metrics");

    let mut prometheus = Prometheus::start(&program, "healthy", &rules()).await;
    prometheus.add("well", &lockstep);
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    let targets =
        dashboard["panels"].as_array().unwrap().iter().filter_map(|panel| panel["targets"].as_array());
    let expressions: Vec<&str> = targets.flatten().map(|target| target["expr"].as_str().unwrap()).collect();
    assert!(expressions.len() > 40);
    for expression in expressions {
        let filled =
            expression.replace("$cluster", ".*").replace("$job", JOB).replace("$__rate_interval", "15s");
        eventually(&format!("data for {filled}"), || async {
            (!prometheus.query(&filled).is_empty()).then_some(())
        })
        .await;
    }
    // As the variables of the dashboard ask for them.
    assert_eq!(prometheus.api("label/cluster/values?match[]=lockstep_build_info"), json!(["well"]));
    assert_eq!(prometheus.api("label/job/values?match[]=lockstep_sources"), json!([JOB]));

    // Real Prometheus prefers OpenMetrics.
    let target = prometheus.api("targets")["activeTargets"][0].clone();
    assert_eq!((&target["health"], &target["lastError"]), (&json!("up"), &json!("")), "{target:#}");
    let evaluated = eventually("every alert is evaluated", || async {
        let groups = prometheus.api("rules")["groups"].clone();
        let rules = groups[0]["rules"].as_array()?.clone();
        rules.iter().all(|rule| rule["health"] != "unknown").then_some(rules)
    })
    .await;
    assert_eq!(evaluated.len(), alerts(&rules()).len());
    for rule in evaluated {
        assert_eq!((&rule["health"], rule["lastError"].as_str()), (&json!("ok"), None), "{rule:#}");
    }
    // Pending ones would fire later. Before the first scrape, there is no replica.
    eventually("no alert is pending", || async { prometheus.alerts().is_empty().then_some(()) }).await;
}

/// The rules with shorter times, so that a test need not wait for hours; thresholds are as they are shipped, but for
/// the five minutes that a watch may be silent.
fn hasty_rules() -> Value {
    let mut rules = rules();
    for rule in rules["groups"][0]["rules"].as_array_mut().expect("rules") {
        if rule["for"].is_string() {
            rule["for"] = json!("1s");
        }
        let expression = rule["expr"].as_str().expect("an expression");
        let hasty = expression
            .replace("[10m]", "[30s]")
            .replace("[30m]", "[30s]")
            .replace("[15m]", "[5s]")
            .replace(" > 300", " > 5");
        rule["expr"] = json!(hasty);
    }
    rules
}

/// The rows of tests/README.md: alert, its first unit test, and its cluster in the test below. Each cluster has one
/// replica and its faults.
fn documented() -> Vec<[String; 3]> {
    let (_, section) = README.split_once("\n### Alerts\n").expect("a section about alerts");
    let section = section.split("\n### ").next().unwrap_or_default();
    let rows = section.lines().filter_map(|line| line.strip_prefix("| `Lockstep"));
    rows.map(|row| {
        let cells: Vec<&str> = row.split('`').collect();
        [format!("Lockstep{}", cells[0]), cells[2].to_owned(), cells[4].to_owned()]
    })
    .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn every_alert_fires_at_a_real_fault() {
    let Some([program, _]) = installed() else { return };
    let mut prometheus = Prometheus::start(&program, "faults", &hasty_rules()).await;
    let expected: BTreeSet<(String, String)> =
        documented().into_iter().map(|[alert, _, cluster]| (alert, cluster)).collect();
    let named: BTreeSet<&str> = expected.iter().map(|(alert, _)| alert.as_str()).collect();
    let rules = alerts(&rules());
    assert_eq!(
        named,
        rules.keys().map(String::as_str).collect(),
        "tests/README.md names a fault for each alert"
    );

    let well = Cluster::new("well").await;
    let (_installed, healthy) = well.install_and_start(&[]).await;
    prometheus.add("well", &healthy);
    let stranger = stranger(&well).await;
    prometheus.add("stranger", &stranger);
    let orphaned = Cluster::new("orphan").await;
    let _orphan = orphan(&orphaned, &mut prometheus).await;
    let busy = Cluster::new("busy").await;
    let (_busy, webhook) = busy_mirror(&busy, &mut prometheus).await;
    let messy = Cluster::new("messy").await;
    let _messy = messy_mirror(&messy, &mut prometheus).await;
    let gone = Cluster::new("gone").await.start_controller().await;
    prometheus.add("gone", &gone);
    eventually("the replica that will be gone is scraped", || async {
        (!prometheus.query("lockstep_ready{cluster=\"gone\"} == 1").is_empty()).then_some(())
    })
    .await;
    gone.kill();
    let besieged = Cluster::new("besieged").await;
    let _besieged = besieged_webhook(&besieged, &mut prometheus).await;

    let mut fired: BTreeMap<(String, String), Value> = BTreeMap::new();
    let complete = poll(ALERT_DEADLINE, || {
        for alert in prometheus.alerts().into_iter().filter(|alert| alert["state"] == "firing") {
            let label = |name: &str| alert["labels"][name].as_str().unwrap_or_default().to_owned();
            fired.insert((label("alertname"), label("cluster")), alert["annotations"].clone());
        }
        let complete = expected.iter().all(|pair| fired.contains_key(pair));
        async move { complete.then_some(()) }
    })
    .await;
    let missing: Vec<_> = expected.iter().filter(|pair| !fired.contains_key(*pair)).collect();
    assert!(complete.is_some(), "did not fire: {missing:?}; fired: {:?}", fired.keys());
    for (pair, annotations) in &fired {
        let text = annotations.to_string();
        assert!(!text.contains("error expanding template") && !text.contains("no value"), "{pair:?}: {text}");
    }
    // The faults of others are not those of a healthy replica.
    eventually("no alert about the healthy replica", || async {
        // A healthy watch, too, hears nothing for longer than the five seconds of these rules.
        let is_wrong = |alert: &Value| {
            alert["labels"]["cluster"] == "well" && alert["labels"]["alertname"] != "LockstepWatchStalled"
        };
        (!prometheus.alerts().iter().any(is_wrong)).then_some(())
    })
    .await;
    webhook.release();
}

/// A replica without any rights: its watches never list.
async fn stranger(cluster: &Cluster) -> Lockstep {
    let namespace = cluster.namespace("stranger").await;
    let user = cluster.service_account(&namespace, "stranger").await;
    let flags = ["--namespace", &namespace, "--no-webhook"];
    Lockstep::spawn(&format!("stranger.{}", cluster.domain()), user.kubeconfig(), &flags)
}

/// A leader whose ServiceAccount is deleted, so that the API server does not accept its token any more.
async fn orphan(cluster: &Cluster, prometheus: &mut Prometheus) -> (Lockstep, impl Drop + use<>) {
    let own = cluster.ns("system");
    let installed =
        cluster.install(&["--webhook-url", &cluster.url(), "--namespace", &own, "--create-namespace"]);
    let kubeconfig = cluster.plane.service_account(&own, "lockstep").expect("a kubeconfig");
    let lockstep = Lockstep::spawn(&cluster.domain(), &kubeconfig, &["--no-webhook", "--namespace", &own]);
    prometheus.add("orphan", &lockstep);
    lockstep.wait_log("this replica is now the leader").await;
    cluster.delete(&format!("/api/v1/namespaces/{own}/serviceaccounts/lockstep")).await;
    (lockstep, installed)
}

/// A controller that writes one companion at a time, into a namespace where a webhook does not answer.
async fn busy_mirror(
    cluster: &Cluster,
    prometheus: &mut Prometheus,
) -> (Lockstep, std::sync::Arc<SlowWebhook>) {
    let (home, slow) = (cluster.namespace("home").await, cluster.namespace("slow").await);
    let host = cluster.address.rsplit_once(':').expect("a port").0.to_owned();
    let webhook = SlowWebhook::start(&host).await;
    let configurations = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations";
    cluster.post(configurations, &webhook.configuration(cluster, &slow)).await;
    let lockstep = cluster.start_mirror_with(&["--writes", "1"]).await;
    prometheus.add("busy", &lockstep);
    for n in 0..MANY_SOURCES {
        cluster.source(&home, &format!("s{n}")).annotate("target-namespaces", &slow).create().await;
    }
    (lockstep, webhook)
}

/// A controller with a conflict, a source that asks for too much, a rival, and an accident.
async fn messy_mirror(cluster: &Cluster, prometheus: &mut Prometheus) -> Lockstep {
    let (home, away) = (cluster.namespace("home").await, cluster.namespace("away").await);
    let lockstep = cluster.start_controller().await;
    prometheus.add("messy", &lockstep);
    let taken = json!({"metadata": {"name": "taken-synced"}});
    cluster.post(&format!("/api/v1/namespaces/{home}/configmaps"), &taken).await;
    cluster.source(&home, "taken").create().await;
    cluster.source(&home, "greedy").annotate("target-namespaces", "kube-system").create().await;
    for n in 0..MANY_SOURCES {
        cluster.source(&home, &format!("s{n}")).annotate("target-namespaces", &away).create().await;
    }
    for n in 0..MANY_SOURCES {
        cluster.wait_data(&away, &format!("s{n}-synced"), json!({"sky": "blue"})).await;
    }
    cluster.source(&home, "colors").create().await;
    for turn in 0..5 {
        cluster.wait_data(&home, "colors-synced", json!({"sky": "blue"})).await;
        let mine = json!({"data": {"sky": format!("mine{turn}")}});
        cluster.merge(&configmap(&home, "colors-synced"), &mine).await;
    }
    // They are deleted while Lockstep cannot see them go one by one.
    lockstep.pause();
    for n in 0..MANY_SOURCES {
        cluster.delete(&configmap(&home, &format!("s{n}"))).await;
    }
    lockstep.resume();
    lockstep
}

/// A webhook that peers disturb, whose certificate is short-lived, whose configuration is deleted, and that loses
/// rights.
async fn besieged_webhook(cluster: &Cluster, prometheus: &mut Prometheus) -> (Lockstep, impl Drop + use<>) {
    let home = cluster.namespace("home").await;
    // It has its own identity, so that the other tests keep their rights.
    let own = cluster.ns("system");
    let installed =
        cluster.install(&["--webhook-url", &cluster.url(), "--namespace", &own, "--create-namespace"]);
    let kubeconfig = cluster.plane.service_account(&own, "lockstep").expect("a kubeconfig");
    let flags = ["--webhook-bind", &cluster.address, "--namespace", &own, "--leaf-validity", "2h"];
    let mut lockstep = Lockstep::spawn(&cluster.domain(), &kubeconfig, &flags);
    lockstep.wait_ready().await;
    cluster.wait_webhook().await;
    prometheus.add("besieged", &lockstep);

    let peer = cluster.peer().await;
    for _ in 0..9 {
        let (status, _) = peer.review("not a review").await.expect("an answer");
        assert_eq!(status, 400);
        let mut stream = TcpStream::connect(&cluster.address).await.expect("a connection");
        stream.write_all(b"GET / HTTP/1.1\r\n\r\n").await.expect("it is sent");
        drop(stream);
    }
    for _ in 0..3 {
        peer.slow_review("{}", Duration::from_millis(1500)).await;
    }
    // Rights on access reviews and Events.
    let role = format!("/apis/rbac.authorization.k8s.io/v1/clusterroles/lockstep.{}", cluster.domain());
    let mut rules = cluster.get(&role).await.expect("the role")["rules"].take();
    let kept = |rule: &Value| {
        !rule.to_string().contains("subjectaccessreviews") && !rule.to_string().contains("events")
    };
    rules.as_array_mut().expect("rules").retain(kept);
    cluster.merge(&role, &json!({"rules": rules})).await;
    let alice = cluster.editor("alice", &[], &[&home]).await;
    let metadata = json!({"name": "a", "labels": {cluster.key("managed"): "true"}});
    let source = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata});
    eventually("access cannot be checked", || async {
        let mut create = alice.kubectl(&format!("create --dry-run=server -n {home} -f -"));
        let output = crate::harness::output(&mut create, &source.to_string());
        String::from_utf8_lossy(&output.stderr).contains("your rights could not be checked").then_some(())
    })
    .await;
    // Nobody reviews sources any more, so this one becomes a source, and its Event is lost.
    let path = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations";
    cluster.delete(&format!("{path}/lockstep.{}", cluster.domain())).await;
    eventually("a source is written without a review", || async {
        let path = format!("/api/v1/namespaces/{home}/configmaps");
        cluster.try_request("POST", &path, Some(("application/json", &source))).await.ok()
    })
    .await;
    (lockstep, installed)
}
