//! The commands for people: status, plan, explain, audit, check. Each reads the cluster with the person's own rights.

use std::{
    io::{BufRead, BufReader},
    process::Stdio,
};

use serde_json::{Value, json};

use crate::{
    harness::{Cluster, configmap, eventually, output},
    users::{User, manifest},
};

/// What a command printed.
struct Printed {
    code: i32,
    out: String,
    err: String,
}

impl Cluster {
    /// Runs a command of `lockstep` about this test's instance.
    fn command(&self, user: &User, arguments: &str) -> Printed {
        self.command_with(user, arguments, "")
    }

    fn command_with(&self, user: &User, arguments: &str, input: &str) -> Printed {
        let domain = self.domain();
        let mut arguments: Vec<&str> = arguments.split_whitespace().collect();
        arguments.extend(["--domain", &domain]);
        let output = output(&mut user.lockstep(&arguments), input);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Printed {
            code: output.status.code().unwrap_or(-1),
            out: text(&output.stdout),
            err: text(&output.stderr),
        }
    }

    fn json(&self, user: &User, arguments: &str) -> Value {
        let printed = self.command(user, &format!("{arguments} -o json"));
        serde_json::from_str(&printed.out)
            .unwrap_or_else(|error| panic!("{arguments}: {error}: {}{}", printed.out, printed.err))
    }

    /// A user who may read everything and write nothing: bound to Kubernetes' own role `view`, and to Secrets.
    async fn reader(&self, name: &str) -> User {
        let user = self.user(name, &[]);
        let bind = |role: &str| {
            json!({
                "metadata": {"name": format!("{}-{role}", user.name)},
                "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
                "subjects": [user.subject()],
            })
        };
        let bindings = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings";
        self.post(bindings, &bind("view")).await;
        let rules = json!([{"apiGroups": [""], "resources": ["secrets"], "verbs": ["get", "list", "watch"]}]);
        self.grant(&user.name, &user.subject(), None, rules).await;
        // What is aggregated to `view` arrives a moment after the installation.
        eventually("the role view has Lockstep's part", || async {
            let printed = self.command(&user, "status -A");
            (printed.code == 0 && !printed.err.contains("cannot be read")).then_some(())
        })
        .await;
        user
    }
}

/// Sources in every state that `status` knows, with companions in `team-a` and `team-b`.
async fn scene(cluster: &Cluster) -> (String, String, String) {
    let (home, a, b) = (
        cluster.namespace("home").await,
        cluster.namespace("team-a").await,
        cluster.namespace("team-b").await,
    );
    let teams = format!("{}-team-*", cluster.id);
    let source = |name: &str| cluster.source(&home, name).annotate("target-namespaces", &teams);
    source("right").create().await;
    source("taken").create().await;
    cluster.source(&home, "nowhere").annotate("target-namespaces", "no-such-*").create().await;
    cluster.source(&home, "key").secret("Opaque", json!({"key": "YmFzZTY0"})).create().await;
    (home, a, b)
}

#[tokio::test(flavor = "multi_thread")]
async fn status_tells_for_each_source_whether_its_companions_are_in_step() {
    let cluster = Cluster::new("status").await;
    let taken = cluster.ns("team-b");
    let (_installed, lockstep) = cluster.install_and_start(&["--delete-grace", "0s"]).await;
    let namespace = json!({"metadata": {"name": taken}});
    cluster.post("/api/v1/namespaces", &namespace).await;
    cluster
        .post(
            &format!("/api/v1/namespaces/{taken}/configmaps"),
            &json!({"metadata": {"name": "taken-synced"}}),
        )
        .await;
    let (home, a) = (cluster.namespace("home").await, cluster.namespace("team-a").await);
    let teams = format!("{}-team-*", cluster.id);
    let source = |name: &str| cluster.source(&home, name).annotate("target-namespaces", &teams);
    source("right").create().await;
    source("taken").create().await;
    source("waits").annotate("paused", "true").create().await;
    cluster.source(&home, "nowhere").annotate("target-namespaces", "no-such-*").create().await;
    cluster.source(&home, "listed").annotate("target-namespaces", "no-such").create().await;
    cluster.source(&home, "key").secret("Opaque", json!({"key": "YmFzZTY0"})).create().await;
    let reader = cluster.reader("reader").await;
    for (namespace, name) in [(&a, "right-synced"), (&taken, "right-synced"), (&a, "taken-synced")] {
        cluster.wait_data(namespace, name, json!({"sky": "blue"})).await;
    }
    let expected = [
        ("key", "in-step", 1, 1),
        ("listed", "missing-targets", 0, 0),
        ("nowhere", "no-target", 0, 0),
        ("right", "in-step", 2, 2),
        ("taken", "conflicts", 1, 2),
        ("waits", "paused", 0, 2),
    ];
    let report = eventually("the states of all sources", || async {
        let report = cluster.json(&reader, "status -A");
        let sources = report["sources"].as_array().expect("sources").clone();
        let found: Vec<(String, String, u64, u64)> = sources
            .iter()
            .map(|one| {
                let text = |key: &str| one[key].as_str().unwrap_or_default().to_owned();
                let number = |key: &str| one[key].as_u64().unwrap_or_default();
                (text("name"), text("state"), number("inStep"), number("wanted"))
            })
            .collect();
        let matches = found
            .iter()
            .map(|(name, state, in_step, wanted)| (name.as_str(), state.as_str(), *in_step, *wanted));
        matches.eq(expected).then_some(report)
    })
    .await;
    assert_eq!(report["summary"]["healthy"], 2);
    assert!(report["instance"]["leader"].is_string(), "{report}");
    assert!(report["instance"]["caExpires"].is_string(), "{report}");
    assert_eq!(report["caveats"], json!([]), "{report}");

    let table = cluster.command(&reader, &format!("status -n {home}"));
    assert_eq!(table.code, 0, "{}", table.err);
    assert!(table.out.contains("SOURCE") && table.out.contains("1 conflict"), "{}", table.out);
    assert!(table.out.contains("paused, 2 changes behind"), "{}", table.out);
    assert!(table.out.contains("2 of 6 sources healthy · leader "), "{}", table.out);
    assert!(table.out.contains(&format!("version {}", env!("CARGO_PKG_VERSION"))), "{}", table.out);
    // One source, with each of its companions.
    let one = cluster.command(&reader, &format!("status {home}/taken")).out;
    assert!(one.contains("1 of 2 in step"), "{one}");
    let line = one.lines().find(|line| line.starts_with(&taken)).unwrap_or_else(|| panic!("{one}"));
    assert!(line.contains("not managed by Lockstep"), "{one}");
    let secret = cluster.command(&reader, &format!("status secret/{home}/key -o yaml")).out;
    assert!(secret.contains("state: in-step"), "{secret}");
    assert!(!secret.contains("YmFzZTY0"), "no value is printed: {secret}");
    let unknown = cluster.command(&reader, &format!("status {home}/nope"));
    assert!(unknown.code == 1 && unknown.err.contains("is no source"), "{}", unknown.err);
    drop(lockstep);
}

#[tokio::test(flavor = "multi_thread")]
async fn status_follows_changes_and_knows_the_flags_of_the_leader() {
    let cluster = Cluster::new("follow").await;
    let home = cluster.namespace("home").await;
    let _installed = cluster.install(&["--webhook-url", &cluster.url(), "--suffix=-copy"]);
    let _lockstep = cluster.start_webhook(&["--suffix=-copy"]).await;
    cluster.source(&home, "colors").create().await;
    cluster.wait_data(&home, "colors-copy", json!({"sky": "blue"})).await;
    let admin = cluster.admin();
    // Without the suffix of the leader, the companion would be missing.
    let status = cluster.command(&admin, &format!("status {home}/colors")).out;
    assert!(status.contains("colors-copy") && status.contains("1 of 1 in step"), "{status}");

    let domain = cluster.domain();
    let mut watch = admin.lockstep(&["status", "-n", &home, "--watch", "--domain", &domain]);
    let mut watch = watch.stdout(Stdio::piped()).spawn().expect("lockstep starts");
    let lines = BufReader::new(watch.stdout.take().expect("its output")).lines();
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || lines.map_while(Result::ok).try_for_each(|line| sender.send(line)));
    let mut seen: Vec<String> = Vec::new();
    let wait_line = |text: &str, seen: &mut Vec<String>| loop {
        let line =
            receiver.recv_timeout(crate::harness::DEADLINE).unwrap_or_else(|_| panic!("{text}: {seen:?}"));
        seen.push(line);
        if seen.last().is_some_and(|line| line.contains(text)) {
            return;
        }
    };
    wait_line("sources healthy", &mut seen);
    let paused = json!({"metadata": {"annotations": {cluster.key("paused"): "true"}}});
    cluster.merge(&configmap(&home, "colors"), &paused).await;
    wait_line("paused", &mut seen);
    cluster.merge(&configmap(&home, "colors"), &json!({"data": {"sky": "red"}})).await;
    wait_line("paused, 1 change behind", &mut seen);
    watch.kill().expect("it runs");
    watch.wait().expect("it ends");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_person_may_not_see_is_said_and_not_taken_for_missing() {
    let cluster = Cluster::new("sight").await;
    let (_installed, _lockstep) = cluster.install_and_start(&[]).await;
    let (home, a, _) = scene(&cluster).await;
    cluster.wait_data(&a, "right-synced", json!({"sky": "blue"})).await;
    // They see their own namespace, and no other.
    let tenant = cluster.editor("tenant", &[], &[&home]).await;
    let status = cluster.command(&tenant, &format!("status -n {home}"));
    assert_eq!(status.code, 0, "{}", status.err);
    assert!(status.err.contains("you may not see namespaces"), "{}", status.err);
    assert!(status.err.contains("you may not see companion configmaps outside of"), "{}", status.err);
    assert!(status.err.contains("the default flags are assumed"), "{}", status.err);
    assert!(!status.out.contains("does not exist") && !status.out.contains("to write"), "{}", status.out);
    let audit = cluster.command(&tenant, "audit");
    assert_eq!(audit.code, 2, "{}{}", audit.out, audit.err);
    assert!(audit.out.contains("CANNOT TELL"), "{}", audit.out);
    let explain = cluster.command(&tenant, &format!("explain -n {a} {home}/right")).out;
    assert!(explain.contains("? you may not see"), "{explain}");
    // A listed target that they may see is read, too; the source is named with its namespace.
    let both = cluster.editor("both", &[], &[&home, &a]).await;
    let rules = json!([{"apiGroups": [""], "resources": ["namespaces"], "verbs": ["get"]}]);
    for namespace in [&home, &a] {
        let name = format!("{}-namespace", both.name);
        cluster.grant(&name, &both.subject(), Some(namespace), rules.clone()).await;
    }
    let listed = json!({"metadata": {"annotations": {cluster.key("target-namespaces"): a}}});
    cluster.merge(&configmap(&home, "right"), &listed).await;
    let status = eventually("the companion in a listed namespace is in step", || async {
        let printed = cluster.command(&both, &format!("status {home}/right"));
        printed.out.contains("1 of 1 in step").then_some(printed)
    })
    .await;
    assert_eq!(status.code, 0, "{}", status.err);
    // In the target namespace alone, the source is not seen, and not gone.
    let target = cluster.editor("target", &[], &[&a]).await;
    let status = cluster.command(&target, &format!("status -A -n {a}").replace(" -A", "")).out;
    assert!(!status.contains("gone"), "{status}");
    let seen = cluster.json(&target, "status -A");
    assert!(!seen.to_string().contains("source-gone"), "{seen}");
    let audit = cluster.command(&target, "audit");
    assert!(audit.code == 2 && !audit.out.contains("source-gone"), "{}", audit.out);
    // A plan with patterns cannot be told; one for listed namespaces can.
    let source = |targets: &str| {
        let metadata = json!({
            "name": "tried", "namespace": home, "labels": {cluster.key("managed"): "true"},
            "annotations": {cluster.key("target-namespaces"): targets},
        });
        manifest("ConfigMap", &metadata, &json!({"data": {"a": "b"}}))
    };
    let planned = cluster.command_with(&both, "plan -f -", &source(&a));
    assert!(planned.code == 1 && planned.out.contains("create 1 (new)"), "{}{}", planned.out, planned.err);
    let unseen = cluster.ns("team-b");
    let accept = json!({"metadata": {"annotations": {cluster.key("accept-from"): home}}});
    cluster.merge(&format!("/api/v1/namespaces/{unseen}"), &accept).await;
    let planned = cluster.command_with(&both, "plan -f -", &source(&unseen));
    assert_eq!(planned.code, 2, "{}{}", planned.out, planned.err);
    assert!(!planned.out.contains("does not exist"), "{}", planned.out);
    // Nobody at all.
    let nobody = cluster.user("nobody", &[]);
    let audit = cluster.command(&nobody, "audit");
    assert_eq!(audit.code, 2, "{}{}", audit.out, audit.err);
}

#[tokio::test(flavor = "multi_thread")]
async fn plan_says_what_the_dry_run_says_and_what_the_webhook_refuses() {
    let cluster = Cluster::new("planned").await;
    let (home, away, alice) = cluster.alice().await;
    let third = cluster.namespace("third").await;
    let (_installed, _lockstep) = cluster.install_and_start(&[]).await;
    // The plan needs the settings of the leader, and to see what exists.
    let rules = json!([
        {"apiGroups": [""], "resources": ["namespaces"], "verbs": ["list", "get", "watch"]},
        {"apiGroups": [""], "resources": ["configmaps", "secrets"], "verbs": ["list", "get", "watch"]},
    ]);
    cluster.grant(&format!("{}-reads", alice.name), &alice.subject(), None, rules).await;
    let source = |targets: &str, data: Value| {
        let metadata = json!({
            "name": "colors", "namespace": home, "labels": {cluster.key("managed"): "true"},
            "annotations": {cluster.key("target-namespaces"): targets},
        });
        manifest("ConfigMap", &metadata, &json!({"data": data}))
    };
    let both = format!(".,{away}");
    let first = source(&both, json!({"sky": "blue", "sea": "green"}));
    let planned = cluster.command_with(&alice, "plan -f -", &first);
    assert_eq!(planned.code, 1, "{}{}", planned.out, planned.err);
    assert!(planned.out.contains("create 2 (new)"), "{}", planned.out);
    assert!(cluster.configmap(&home, "colors").await.is_none(), "a plan writes nothing");

    alice.succeeds_with("apply -f -", &first);
    for namespace in [&home, &away] {
        cluster.wait_data(namespace, "colors-synced", json!({"sky": "blue", "sea": "green"})).await;
    }
    let again = cluster.command_with(&alice, "plan -f -", &first);
    assert!(again.code == 0 && again.out.contains("nothing to do"), "{}{}", again.out, again.err);
    assert_eq!(cluster.command(&alice, &format!("plan {home}/colors")).code, 0);

    // Another target less, a key changed, one added, one removed. Values are not shown.
    let second = source(".", json!({"sky": "hush-hush", "sun": "yellow"}));
    let planned = cluster.command_with(&alice, "plan -f -", &second);
    assert_eq!(planned.code, 1, "{}", planned.err);
    assert!(
        planned.out.contains(&format!("update 1 (source changed): {home}/colors-synced")),
        "{}",
        planned.out
    );
    assert!(planned.out.contains("keys: +sun ~sky -sea"), "{}", planned.out);
    assert!(
        planned.out.contains(&format!("delete 1 (no longer a target): {away}/colors-synced")),
        "{}",
        planned.out
    );
    assert!(!planned.out.contains("hush-hush"), "{}", planned.out);
    let dry_run = output(&mut alice.kubectl("apply --dry-run=server -f -"), &second);
    let dry_run = String::from_utf8_lossy(&dry_run.stderr).into_owned();
    assert!(dry_run.contains(&format!("lockstep plan: update 1, delete 1 ({away})")), "{dry_run}");

    // No right in a namespace, a malformed annotation, a foreign object: as the webhook and the controller say it.
    let refused = source(&third, json!({}));
    let planned = cluster.command_with(&alice, "plan -f -", &refused);
    let denial = alice.fails_with("apply -f -", &refused);
    assert_eq!(planned.code, 2, "{}", planned.out);
    let told = planned.out.lines().find_map(|line| line.trim().strip_prefix("refused: ")).expect("a denial");
    assert!(denial.contains(told), "{denial}\n{told}");
    let malformed = source("NOT A NAME", json!({}));
    assert_eq!(cluster.command_with(&alice, "plan -f -", &malformed).code, 2);
    cluster
        .post(
            &format!("/api/v1/namespaces/{third}/configmaps"),
            &json!({"metadata": {"name": "colors-synced"}}),
        )
        .await;
    let admin = cluster.admin();
    let conflict = cluster.command_with(&admin, "plan -f -", &refused).out;
    assert!(
        conflict.contains(&format!(
            "conflict 1 (held by an object that is not managed by Lockstep): {third}/colors-synced"
        )),
        "{conflict}"
    );
    // A plan for a file is a dry run. Another tool's keys stay, as with kubectl apply.
    let reader = cluster.reader("reader").await;
    let planned = cluster.command_with(&reader, "plan -f -", &first);
    assert!(planned.code == 2 && planned.out.contains("it needs the right to write"), "{}", planned.out);
    cluster.merge(&configmap(&home, "colors"), &json!({"metadata": {"labels": {"theirs": "1"}}})).await;
    let planned = cluster.command_with(&alice, "plan -f -", &source(&both, json!({"sky": "blue"})));
    assert!(planned.out.contains("keys: -sea") && !planned.out.contains("warning"), "{}", planned.out);
    // Bad input is one line, and quotes nothing.
    let broken = cluster.command_with(&alice, "plan -f -", "data: {a: hush\n  b: [");
    assert_eq!(broken.code, 2);
    assert!(broken.err.lines().count() == 1 && !broken.err.contains("hush"), "{}", broken.err);
    let others =
        cluster.command_with(&alice, "plan -f -", "apiVersion: v1\nkind: Pod\nmetadata: {name: x}\n");
    assert!(others.code == 0 && others.err.contains("1 objects of other kinds"), "{}", others.err);
}

#[tokio::test(flavor = "multi_thread")]
async fn explanation_ends_with_the_command_that_changes_it() {
    let cluster = Cluster::new("explain").await;
    let (home, away) = (cluster.namespace("home").await, cluster.namespace("away").await);
    let (_installed, _lockstep) = cluster.install_and_start(&[]).await;
    let admin = cluster.admin();
    let foreign = json!({"metadata": {"name": "colors-synced"}});
    cluster.post(&format!("/api/v1/namespaces/{away}/configmaps"), &foreign).await;
    let exclude = json!({"metadata": {"labels": {cluster.key("exclude"): "true"}}});
    cluster.merge(&format!("/api/v1/namespaces/{away}"), &exclude).await;
    admin.succeeds(&format!("create configmap colors -n {home} --from-literal=sky=blue"));
    admin.succeeds(&format!(
        "annotate configmap colors -n {home} {}=required {}=true",
        cluster.key("consent"),
        cluster.key("paused")
    ));

    // One obstacle after the other is taken out of the way with the command that is printed.
    let obstacles = [
        "lacks the label",
        "none of its targets",
        "keeps all companions out of",
        "does not name",
        "is held by an object that is not managed by Lockstep",
        "the source is paused",
    ];
    for obstacle in obstacles {
        let printed = eventually(obstacle, || async {
            let printed = cluster.command(&admin, &format!("explain -n {away} {home}/colors"));
            assert_eq!(printed.code, 0, "{}", printed.err);
            printed
                .out
                .lines()
                .any(|line| line.starts_with('✗') && line.contains(obstacle))
                .then_some(printed.out)
        })
        .await;
        let commands: Vec<&str> =
            printed.lines().filter_map(|line| line.strip_prefix("  kubectl ")).collect();
        assert!(!commands.is_empty(), "{printed}");
        for command in commands {
            let output = admin.shell(&format!("kubectl {command}"));
            assert!(output.status.success(), "{command}: {}", String::from_utf8_lossy(&output.stderr));
        }
    }
    cluster.wait_data(&away, "colors-synced", json!({"sky": "blue"})).await;
    eventually("no step is missing", || async {
        let printed = cluster.command(&admin, &format!("explain -n {away} {home}/colors")).out;
        printed.lines().all(|line| line.starts_with('✓')).then_some(())
    })
    .await;
    let gone = cluster.command(&admin, &format!("explain -n {away} {home}/nope")).out;
    assert!(gone.contains("does not exist"), "{gone}");
}

#[tokio::test(flavor = "multi_thread")]
async fn audit_finds_every_kind_of_drift_and_tells_it_with_its_exit_code() {
    let cluster = Cluster::new("audit").await;
    let _installed = cluster.install(&["--webhook-url", &cluster.url()]);
    let mut lockstep = cluster.start_webhook(&[]).await;
    let (home, a, b) = scene(&cluster).await;
    for namespace in [&a, &b] {
        for name in ["right-synced", "taken-synced"] {
            cluster.wait_data(namespace, name, json!({"sky": "blue"})).await;
        }
    }
    let secret = crate::harness::secret(&home, "key-synced");
    eventually("the Secret's companion", || async { cluster.get(&secret).await }).await;
    let admin = cluster.admin();
    let clean = cluster.command(&admin, "audit");
    assert_eq!(clean.code, 0, "{}{}", clean.out, clean.err);
    assert!(clean.out.contains("everything is in step"), "{}", clean.out);
    // A typo in the domain must not pass for ever.
    let mistyped = output(&mut admin.lockstep(&["audit", "--domain", "wrong.example"]), "");
    assert_eq!(mistyped.status.code(), Some(2));
    // A pattern that matches nothing is worth knowing, and no drift.
    assert!(clean.out.contains("ineffective"), "{}", clean.out);

    // Nobody repairs and nobody webhooks from here on.
    lockstep.stop().await;
    cluster.apply(&["--webhook-url", &cluster.url()]);
    let instance = format!("lockstep.{}", cluster.domain());
    admin.succeeds(&format!("delete validatingwebhookconfiguration,mutatingwebhookconfiguration {instance}"));
    cluster.merge(&configmap(&a, "right-synced"), &json!({"data": {"sky": "red"}})).await;
    cluster.delete(&configmap(&b, "right-synced")).await;
    cluster.delete_with(&configmap(&home, "taken"), "Orphan").await;
    // Stripped of its label while nobody looked, and its source is gone: no watch shows it.
    let strip = json!({"metadata": {"labels": {cluster.key("companion"): null}}});
    cluster.merge(&configmap(&b, "taken-synced"), &strip).await;
    cluster
        .merge(
            &configmap(&home, "nowhere"),
            &json!({"metadata": {"annotations": {cluster.key("protect"): "?"}}}),
        )
        .await;
    let drift = cluster.command(&admin, "audit -o json");
    assert_eq!(drift.code, 1, "{}{}", drift.out, drift.err);
    let report: Value = serde_json::from_str(&drift.out).expect("JSON");
    let mut found: Vec<(String, String)> = report["findings"]
        .as_array()
        .expect("findings")
        .iter()
        .map(|one| {
            let text = |key: &str| one[key].as_str().unwrap_or_default().to_owned();
            (text("rule"), text("object"))
        })
        .collect();
    found.sort();
    let mut expected = [
        ("differs", format!("{a}/right-synced")),
        ("missing", format!("{b}/right-synced")),
        ("refused", format!("{home}/nowhere")),
        ("source-gone", format!("{a}/taken-synced")),
        ("stray", format!("{b}/taken-synced")),
    ]
    .map(|(rule, object)| (rule.to_owned(), object));
    expected.sort();
    assert_eq!(found, expected);
    assert_eq!(report["verdict"], "drift");
    // A reader that has seen enough does not turn drift into success.
    let binary = env!("CARGO_BIN_EXE_lockstep");
    let piped = admin
        .shell(&format!("{{ {binary} audit -o json --domain {}; echo $? >&2; }} | true", cluster.domain()));
    assert_eq!(String::from_utf8_lossy(&piped.stderr).trim(), "1");
    let junit = cluster.command(&admin, "audit -o junit").out;
    assert!(junit.contains("failures=\"3\""), "{junit}");
    let sarif: Value = serde_json::from_str(&cluster.command(&admin, "audit -o sarif").out).expect("SARIF");
    assert_eq!(sarif["runs"][0]["results"].as_array().map(Vec::len), Some(5));
    // Once a controller runs again, `--wait` gives it the time to repair.
    let _mirror = cluster.start_controller().await;
    cluster
        .merge(
            &configmap(&home, "nowhere"),
            &json!({"metadata": {"annotations": {cluster.key("protect"): null}}}),
        )
        .await;
    cluster.delete(&configmap(&b, "taken-synced")).await;
    let waited = cluster.command(&admin, "audit --wait 60s");
    assert_eq!(waited.code, 0, "{}{}", waited.out, waited.err);
}

#[tokio::test(flavor = "multi_thread")]
async fn check_tells_a_webhook_that_answers_from_one_that_is_dead_or_missing() {
    let cluster = Cluster::new("check").await;
    let admin = cluster.admin();
    let absent = cluster.command(&admin, "check");
    // Lockstep's namespace is shared by all tests, so other instances' pods could be there on a real node.
    assert!(absent.out.contains("Kubernetes v1."), "{}", absent.out);
    let _installed = cluster.install(&["--webhook-url", &cluster.url()]);
    // Until the first replica is ready, the webhook refuses by failurePolicy: that is no reason to uninstall it.
    let starting = cluster.command(&admin, "check");
    let (_, remedy) =
        starting.out.split_once("✗ the API server cannot reach the webhook").expect(&starting.out);
    let wait = "kubectl -n lockstep-system rollout status deployment lockstep";
    assert!(starting.code == 1 && remedy.contains(wait), "{}", starting.out);
    let mut lockstep = cluster.start_webhook(&[]).await;
    let good = cluster.command(&admin, "check");
    assert_eq!(good.code, 0, "{}{}", good.out, good.err);
    let version = format!(", version {}", env!("CARGO_PKG_VERSION"));
    for text in
        ["✓ the webhook answers", &version, "✓ leader ", "has all its rights", "trusts a CA for another"]
    {
        assert!(good.out.contains(text), "{text}: {}", good.out);
    }
    // Errors that are not the webhook's.
    let elsewhere = cluster.command(&admin, "check -n no-such-namespace");
    assert_eq!(elsewhere.code, 0, "{}{}", elsewhere.out, elsewhere.err);
    assert!(
        elsewhere.out.contains(
            "? the webhook cannot be tried in namespace no-such-namespace: namespaces \"no-such-namespace\" not found"
        ),
        "{}",
        elsewhere.out
    );
    // A known deputy that is not listed.
    let flux = cluster.namespace("flux").await;
    cluster.service_account(&flux, "kustomize-controller").await;
    let warned = cluster.command(&admin, "check");
    assert!(
        warned.code == 0
            && warned
                .out
                .contains(&format!("--deputy-user=system:serviceaccount:{flux}:kustomize-controller")),
        "{}",
        warned.out
    );
    // A dead webhook refuses, too: by failurePolicy.
    lockstep.stop().await;
    let dead = cluster.command(&admin, "check");
    assert_eq!(dead.code, 1, "{}", dead.out);
    assert!(dead.out.contains("✗ the API server cannot reach the webhook"), "{}", dead.out);
    let instance = format!("lockstep.{}", cluster.domain());
    admin.succeeds(&format!("delete validatingwebhookconfiguration {instance}"));
    let missing = cluster.command(&admin, "check");
    assert_eq!(missing.code, 1, "{}", missing.out);
    assert!(
        missing.out.contains("does not exist: the API server lets everybody write companions"),
        "{}",
        missing.out
    );
    assert!(missing.out.contains("✗ the webhook let"), "{}", missing.out);
    admin.succeeds(&format!("delete clusterrole {instance}"));
    let rights = eventually("the rights are missing", || async {
        let printed = cluster.command(&admin, "check").out;
        printed.contains("lacks rights").then_some(printed)
    })
    .await;
    // The rights on ConfigMaps are those of all tests' instances, which share the ServiceAccount.
    assert!(rights.contains("patch validatingwebhookconfigurations"), "{rights}");
}

#[tokio::test]
async fn version_completions_and_plugin_name_are_printed() {
    let binary = env!("CARGO_BIN_EXE_lockstep");
    let text = |command: &mut std::process::Command| crate::harness::run(command);
    let version = text(std::process::Command::new(binary).arg("--version"));
    assert!(version.starts_with(&format!("lockstep {}", env!("CARGO_PKG_VERSION"))), "{version}");
    for (shell, mark) in
        [("bash", "complete -F"), ("zsh", "#compdef lockstep"), ("fish", "complete -c lockstep")]
    {
        let script = text(std::process::Command::new(binary).args(["completion", shell]));
        assert!(script.contains(mark) && script.contains("explain"), "{shell}");
    }
    let directory = std::env::temp_dir().join(format!("kubectl-lockstep-{}", std::process::id()));
    std::fs::create_dir_all(&directory).expect("a directory");
    let plugin = directory.join("kubectl-lockstep");
    // Not a copy: a file that another test's fork still has open for writing cannot be executed.
    std::os::unix::fs::symlink(binary, &plugin).expect("a link");
    let help = text(std::process::Command::new(&plugin).args(["status", "--help"]));
    std::fs::remove_dir_all(&directory).expect("it can be removed");
    assert!(help.contains("Usage: kubectl lockstep status"), "{help}");
    assert!(help.contains("Examples:"), "{help}");
}
