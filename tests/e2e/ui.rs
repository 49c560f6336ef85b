//! `lockstep ui` in a real browser.

use std::{
    io::{BufRead, BufReader},
    net::{IpAddr, UdpSocket},
    path::Path,
    process::{Child, Stdio},
    sync::Arc,
};

use controlplane::skip;
use serde_json::{Value, json};

use crate::{
    browser::{Browser, DOWN, ENTER, ESCAPE, RIGHT},
    harness::{Cluster, Lockstep, configmap, dedicated_control_plane, eventually},
    tcp_proxy::TcpProxy,
    users::User,
};

/// A running `lockstep ui`. It is killed when dropped.
struct Ui {
    process: Child,
    url: String,
}

impl Ui {
    fn start(cluster: &Cluster, user: &User, flags: &[&str]) -> Self {
        let mut command = user.lockstep(&["ui", "--domain", &cluster.domain()]);
        let mut process = command.args(flags).stdout(Stdio::piped()).spawn().expect("lockstep ui starts");
        let mut url = String::new();
        let output = process.stdout.as_mut().expect("its output");
        BufReader::new(output).read_line(&mut url).expect("its output");
        assert!(url.starts_with("http://127.0.0.1:"), "{url}");
        Self { process, url: url.trim().to_owned() }
    }
}

impl Drop for Ui {
    fn drop(&mut self) {
        drop(self.process.kill());
        drop(self.process.wait());
    }
}

#[tokio::test]
async fn heal_of_an_edit_behind_the_webhook_appears_without_a_reload() {
    let Some(browser) = Browser::start(1280, 800) else { return };
    let cluster = Cluster::new("ui-heal").await;
    let (_installed, _lockstep) = cluster.install_and_start(&["--exempt-group", "system:masters"]).await;
    let (home, away, _alice) = cluster.alice().await;
    cluster.make_sources(&home, &away, &[]).await;
    cluster.wait_companions(&home, &away).await;

    let ui = Ui::start(&cluster, &cluster.admin(), &[]);
    browser.open(&ui.url);
    browser.wait_text("#health", "All 2 sources healthy").await;
    browser.wait_text("#health", "3 of 3 companions in step").await;
    browser.wait_true("document.getElementById('live').dataset.state === 'live'").await;
    browser.wait_text("#cluster", "valid for").await;
    browser.run("window.sameDocument = true");

    // The webhook lets an exempt user do that; the controller undoes it.
    cluster.merge(&configmap(&away, "colors-synced"), &json!({"data": {"sky": "hidden-value"}})).await;
    browser.wait_text("#entries", "Healed").await;
    browser.wait_text("#entries", &format!("{away}/colors-synced (content, by tester)")).await;
    cluster.wait_data(&away, "colors-synced", json!({"sky": "blue"})).await;
    browser.wait_text("#health", "3 of 3 companions in step").await;
    assert_eq!(browser.run("return window.sameDocument"), true, "the page was loaded again");

    // Everything that the page has ever shown or was told is names and states.
    let page = browser.run("return document.documentElement.outerHTML").to_string();
    assert!(!page.contains("hidden-value") && !page.contains("blue"), "a value is on the page");
    assert_eq!(browser.log(), json!([]), "errors of the page");

    drop(ui);
    browser.wait_text("#live", "Disconnected").await;
    browser.wait_text("#banner", "is `lockstep ui` still running?").await;
}

#[tokio::test]
async fn empty_cell_says_why_by_keyboard_alone() {
    let Some(browser) = Browser::start(1280, 800) else { return };
    let cluster = Cluster::new("ui-why").await;
    let _lockstep = cluster.start_controller().await;
    let (away, home) = (cluster.namespace("away").await, cluster.namespace("home").await);
    cluster.source(&home, "both").annotate("target-namespaces", &format!(".,{away}")).create().await;
    cluster.source(&home, "single").create().await;
    cluster.wait_data(&away, "both-synced", json!({"sky": "blue"})).await;
    cluster.wait_data(&home, "single-synced", json!({"sky": "blue"})).await;

    let ui = Ui::start(&cluster, &cluster.admin(), &[]);
    browser.open(&ui.url);
    browser.wait_text("#health", "3 of 3 companions in step").await;
    // The first cell is both → away. Below it, single has no companion.
    browser.run("document.getElementById('picture').focus()");
    browser.wait_text("#announce", &format!("{home}/both → {away}: in step")).await;
    browser.press(&[DOWN]);
    browser.wait_text("#announce", &format!("{home}/single → {away}: no companion here")).await;
    browser.press(&[ENTER]);
    browser.wait_text("#details h3", "Why not here?").await;
    browser.wait_text("#details .steps [data-met=no]", &away).await;
    browser.wait_text("#details .command", "kubectl").await;
    browser.press(&[ESCAPE]);
    browser.wait_true("document.getElementById('details').hidden").await;
    browser.press(&[RIGHT, ENTER]);
    browser.wait_text("#details h3", "Why it is here").await;
    browser.wait_text("#details .title", &format!("{home}/single-synced")).await;

    // A new namespace is a new column, and a missing one can be asked for.
    let search = |text: &str| {
        let set = format!(
            "const e = document.getElementById('search'); e.value = {text:?}; e.dispatchEvent(new Event('input'))"
        );
        browser.run(&set);
    };
    search("nothing-of-that-name");
    browser.wait_text("#empty", "Nothing matches").await;
    search("single");
    browser.wait_true("!document.getElementById('picture').hidden").await;
    assert_eq!(browser.log(), json!([]), "errors of the page");
}

#[tokio::test]
async fn hostile_names_and_messages_are_text() {
    let Some(browser) = Browser::start(1280, 800) else { return };
    let cluster = Cluster::new("ui-hostile").await;
    let _lockstep = cluster.start_controller().await;
    let home = cluster.namespace("home").await;
    let hostile = "<img src=x onerror=window.pwned=1>";
    // Without the webhook, a malformed source can exist. Its Trouble quotes the annotation.
    cluster.source(&home, "evil").annotate("protect", hostile).create().await;
    let event = json!({
        "metadata": {"namespace": home, "name": "forged"},
        "eventTime": "2026-01-01T00:00:00.000000Z", "action": "Reconcile", "type": "Warning",
        "reason": "<b>Forged</b>", "note": format!("{hostile} </script><script>window.pwned=2</script>"),
        "regarding": {"kind": "ConfigMap", "namespace": home, "name": "evil"},
        "reportingController": format!("lockstep.{}", cluster.domain()), "reportingInstance": "me",
    });
    cluster.post(&format!("/apis/events.k8s.io/v1/namespaces/{home}/events"), &event).await;

    let ui = Ui::start(&cluster, &cluster.admin(), &[]);
    browser.open(&ui.url);
    browser.wait_text("#health", "0 of 1 source healthy").await;
    browser.wait_text("#entries", hostile).await;
    browser.wait_text("#entries", "<b>Forged</b>").await;
    browser.run("document.querySelector('[data-view=list]').click()");
    browser.wait_text("#list", "onerror").await;
    browser.run("document.querySelector('#list button').click()");
    browser.wait_text("#details", "onerror").await;
    assert_eq!(browser.run("return document.images.length"), 1, "only the page's own icon");
    assert_eq!(browser.run("return document.scripts.length"), 1);
    assert_eq!(browser.run("return window.pwned ?? null"), Value::Null);
    // Chromium refuses what would turn a text into HTML, whatever a later change does.
    let refused = "try { document.body.innerHTML = '<b>x</b>'; return false } catch { return true }";
    assert_eq!(browser.run(refused), true);
}

#[tokio::test]
async fn person_with_few_rights_is_told_what_they_do_not_see() {
    let Some(browser) = Browser::start(1280, 800) else { return };
    let cluster = Cluster::new("ui-rights").await;
    let _lockstep = cluster.start_controller().await;
    let (home, away) = (cluster.namespace("home").await, cluster.namespace("away").await);
    let alice = cluster.editor("alice", &[], &[&home]).await;
    let events =
        json!([{"apiGroups": ["events.k8s.io"], "resources": ["events"], "verbs": ["list", "watch"]}]);
    cluster.grant(&format!("{}-events", alice.name), &alice.subject(), Some(&home), events).await;
    cluster.source(&home, "colors").annotate("target-namespaces", &format!(".,{away}")).create().await;
    cluster.source(&away, "secret-plans").create().await;
    cluster.wait_data(&away, "colors-synced", json!({"sky": "blue"})).await;
    cluster.wait_data(&away, "secret-plans-synced", json!({"sky": "blue"})).await;

    let ui = Ui::start(&cluster, &alice, &["--namespace", &home]);
    browser.open(&ui.url);
    browser.wait_text("#health", "1 source").await;
    for gap in ["Events outside of namespace", "replicas", "namespaces"] {
        browser.wait_text("#cluster .notes", &format!("you may not see {gap}")).await;
    }
    browser.wait_text("#entries", "Mirrored").await;
    let page = browser.run("return document.documentElement.outerHTML").to_string();
    assert!(!page.contains("secret-plans"), "the source of another namespace");
}

/// An address of this machine that is not loopback: the API server's pod proxy refuses those.
fn own_address() -> Option<IpAddr> {
    let socket = UdpSocket::bind("0.0.0.0:0").ok()?;
    // Nothing is sent: that only chooses a route.
    socket.connect("192.0.2.1:9").ok()?;
    socket.local_addr().ok().map(|address| address.ip()).filter(|ip| !ip.is_loopback())
}

impl Cluster {
    /// A pod that the API server reaches at this address, as if Lockstep ran in it: there is no kubelet here.
    async fn replica(&self, namespace: &str, name: &str, lockstep: &Lockstep) -> Option<Arc<TcpProxy>> {
        let host = own_address()?;
        let log = lockstep.log();
        let mut lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let ops = lines.find_map(|line| Some(line.get("ops")?.as_str()?.to_owned())).expect("its address");
        let free = tokio::net::TcpListener::bind((host, 0)).await.ok()?;
        let port = free.local_addr().ok()?.port();
        drop(free);
        let proxy = TcpProxy::start(&format!("{host}:{port}"), &[ops]).await;
        proxy.set_ready(0, true);
        let pod = json!({
            "metadata": {"name": name, "labels": {"app.kubernetes.io/name": "lockstep"}},
            "spec": {
                "automountServiceAccountToken": false,
                "securityContext": {"runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"}},
                "containers": [{
                    "name": "lockstep", "image": "lockstep:0.1.0",
                    "ports": [{"name": "ops", "containerPort": port}],
                    "securityContext": {"allowPrivilegeEscalation": false, "capabilities": {"drop": ["ALL"]}},
                }],
            },
        });
        let pods = format!("/api/v1/namespaces/{namespace}/pods");
        eventually("the namespace has its ServiceAccount", || async {
            self.try_request("POST", &pods, Some(("application/json", &pod))).await.ok()
        })
        .await;
        let status = json!({"status": {
            "phase": "Running", "podIP": host, "podIPs": [{"ip": host}],
            "conditions": [{"type": "Ready", "status": "True"}],
        }});
        self.merge(&format!("{pods}/{name}/status"), &status).await;
        Some(proxy)
    }
}

#[tokio::test]
async fn denial_appears_with_its_reason() {
    let Some(browser) = Browser::start(1280, 800) else { return };
    let cluster = Cluster::new("ui-denial").await;
    let (_installed, lockstep) = cluster.install_and_start(&[]).await;
    let (home, away, alice) = cluster.alice().await;
    cluster.make_sources(&home, &away, &[]).await;
    cluster.wait_companions(&home, &away).await;
    let own = cluster.namespace("own").await;
    let Some(_proxy) = cluster.replica(&own, "lockstep-0", &lockstep).await else {
        return skip("this machine has no address but loopback");
    };

    let ui = Ui::start(&cluster, &cluster.admin(), &["--lockstep-namespace", &own]);
    browser.open(&ui.url);
    browser.wait_text("#cluster", "lockstep-0").await;
    browser.wait_text("#cluster", "Denials").await;
    alice
        .fails(&format!("annotate cm colors-synced -n {home} a=b {}/source=x --overwrite", cluster.domain()));
    browser.wait_text("#entries", "Denied: ").await;
    browser.wait_text("#entries", "lockstep-0 refused a write").await;
    assert_eq!(browser.log(), json!([]), "errors of the page");
}

/// The teams of an imaginary shop, each with four namespaces.
const TEAMS: [&str; 12] = [
    "ads", "catalog", "checkout", "identity", "mobile", "payments", "pricing", "returns", "reviews",
    "search", "shipping", "web",
];
const EVERYWHERE: &str = "*-dev,*-staging,*-prod,*-load,sandbox-*";

/// 23 sources and 50 namespaces. `LOCKSTEP_SCREENSHOTS` is a directory for pictures of it (`make screenshots`).
#[tokio::test]
async fn thousand_companions_are_one_picture_that_follows_one_change() {
    let Some(browser) = Browser::start(1440, 900) else { return };
    let Some(plane) = dedicated_control_plane(&[]) else { return };
    let cluster = Cluster::on(plane, "ui-shop").await.with_domain("workshop.io");
    let (_installed, lockstep) = cluster.install_and_start(&["--exempt-group", "system:masters"]).await;
    fill_shop(&cluster).await;
    let account = plane.service_account("lockstep-system", "lockstep").expect("a kubeconfig");
    let mut standby = Lockstep::spawn(&cluster.domain(), &account, &["--no-webhook"]);
    standby.wait_ready().await;
    let mut proxies = Vec::new();
    for (name, replica) in [("lockstep-6f7d9c5b84-m4zkq", &lockstep), ("lockstep-6f7d9c5b84-x8w2p", &standby)]
    {
        proxies.push(cluster.replica("lockstep-system", name, replica).await);
    }

    let ui = Ui::start(&cluster, &cluster.admin(), &[]);
    browser.open(&ui.url);
    browser.wait_text("#health", "All 23 sources healthy").await;
    browser.wait_text("#health", "1,072 of 1,072 companions in step").await;
    // One heal is a message about one cell, and not about a thousand.
    browser.run(
        "window.told = []; const stream = new EventSource('api/stream'); \
         for (const name of ['everything', 'sources']) stream.addEventListener(name, (m) => window.told.push([name, m.data.length]))",
    );
    browser.wait_true("window.told.some(([name]) => name === 'everything')").await;
    let companion = configmap("payments-prod", "otel-collector-synced");
    cluster.merge(&companion, &json!({"data": {"endpoint": "elsewhere"}})).await;
    browser.wait_text("#entries", "payments-prod/otel-collector-synced (content, by tester)").await;
    browser
        .wait_true("window.told.filter(([name]) => name === 'sources').every(([, size]) => size < 4000)")
        .await;

    let Some(directory) = std::env::var_os("LOCKSTEP_SCREENSHOTS") else { return };
    screenshots(&cluster, &browser, &ui, Path::new(&directory)).await;
}

async fn fill_shop(cluster: &Cluster) {
    let mut all = Vec::new();
    let namespace = |name: &str| json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}});
    let environments = ["dev", "load", "prod", "staging"];
    let of_teams =
        TEAMS.iter().flat_map(|team| environments.map(|environment| format!("{team}-{environment}")));
    let others = ["sandbox-ada", "sandbox-bo", "security", "platform", "observability", "networking"];
    all.extend(of_teams.map(|name| namespace(&name)));
    all.extend(others.map(namespace));
    let sources = [
        ("networking", "dns-search", "*-dev,*-staging,*-prod"),
        ("networking", "egress-proxy", EVERYWHERE),
        ("networking", "mesh-defaults", EVERYWHERE),
        ("networking", "wildcard-tls", EVERYWHERE),
        ("observability", "alert-routes", EVERYWHERE),
        ("observability", "dashboards", EVERYWHERE),
        ("observability", "log-format", EVERYWHERE),
        ("observability", "otel-collector", EVERYWHERE),
        ("observability", "sampling", EVERYWHERE),
        ("platform", "artifact-mirror", EVERYWHERE),
        ("platform", "build-defaults", EVERYWHERE),
        ("platform", "feature-flags", EVERYWHERE),
        ("platform", "java-options", EVERYWHERE),
        ("platform", "locale-data", EVERYWHERE),
        ("platform", "node-options", EVERYWHERE),
        ("platform", "resource-defaults", EVERYWHERE),
        ("platform", "rollout-windows", "*-prod"),
        ("security", "ca-bundle", EVERYWHERE),
        ("security", "cors-policy", EVERYWHERE),
        ("security", "pod-baseline", EVERYWHERE),
        ("security", "registry-pull", EVERYWHERE),
        ("security", "signing-keys", "*-prod,*-staging"),
        ("security", "tls-policy", EVERYWHERE),
    ];
    for (namespace, name, targets) in sources {
        let secret = ["wildcard-tls", "artifact-mirror", "registry-pull", "signing-keys"].contains(&name);
        let metadata = json!({
            "namespace": namespace, "name": name, "labels": {cluster.key("managed"): "true"},
            "annotations": {cluster.key("target-namespaces"): targets},
        });
        let (kind, data) = if secret { ("Secret", "dGVzdA==") } else { ("ConfigMap", "test") };
        all.push(json!({"apiVersion": "v1", "kind": kind, "metadata": metadata, "data": {"key": data}}));
    }
    let list = json!({"apiVersion": "v1", "kind": "List", "items": all});
    cluster.admin().succeeds_with("apply -f -", &list.to_string());
}

/// Pictures of the page for the documentation.
async fn screenshots(cluster: &Cluster, browser: &Browser, ui: &Ui, directory: &Path) {
    let picture = |name: &str| browser.screenshot(&directory.join(format!("ui-{name}.png")));
    // What goes wrong in a shop: a name is taken in two namespaces, a source is malformed, somebody edits copies.
    for namespace in ["ads-dev", "returns-prod"] {
        let object = json!({"metadata": {"name": "feature-toggles-synced"}, "data": {"ours": "1"}});
        cluster.post(&format!("/api/v1/namespaces/{namespace}/configmaps"), &object).await;
    }
    cluster.source("platform", "feature-toggles").annotate("target-namespaces", EVERYWHERE).create().await;
    cluster.source("platform", "quota-notes").annotate("target-namespaces", "web-*,partners").create().await;
    let paused =
        cluster.source("observability", "trace-rules").annotate("target-namespaces", "*-prod,*-staging");
    paused.create().await;
    browser.wait_text("#health", "24 of 26 sources healthy").await;
    let pause =
        json!({"metadata": {"annotations": {cluster.key("paused"): "true"}}, "data": {"sky": "grey"}});
    cluster.merge(&configmap("observability", "trace-rules"), &pause).await;
    let edit = json!({"data": {"key": "edited"}});
    for (namespace, name) in
        [("search-staging", "ca-bundle"), ("web-prod", "log-format"), ("ads-load", "tls-policy")]
    {
        cluster.merge(&configmap(namespace, &format!("{name}-synced")), &edit).await;
        browser.wait_text("#entries", &format!("{namespace}/{name}-synced (content, by tester)")).await;
    }
    let alice = cluster.editor("alice", &[], &["web-dev"]).await;
    alice.fails("patch cm ca-bundle-synced -n web-dev --type=merge -p {\"data\":{\"key\":\"mine\"}}");
    browser.wait_text("#entries", "Denied: ").await;
    browser.wait_text("#health", "23 of 26 sources healthy").await;

    browser.open(&format!("{}#/ConfigMap/platform/feature-toggles/returns-prod", ui.url));
    browser.wait_text("#details .command", "kubectl").await;
    picture("desktop");
    browser.dark(true);
    picture("dark");
    browser.dark(false);
    browser.open(&format!("{}#/", ui.url));
    browser.run("document.getElementById('tip').hidden = true");
    browser.wait_true("document.getElementById('details').hidden").await;
    cluster.merge(&configmap("mobile-prod", "sampling-synced"), &edit).await;
    browser.wait_text("#entries", "mobile-prod/sampling-synced (content, by tester)").await;
    picture("thousand-companions");
    browser.resize(390, 844, 2.0, true);
    browser.wait_true("!document.getElementById('list').hidden").await;
    picture("phone");
    browser.open(&format!("{}#/ConfigMap/platform/feature-toggles/returns-prod", ui.url));
    browser.wait_text("#details .command", "kubectl").await;
    picture("phone-details");
}
