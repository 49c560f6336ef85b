//! A real control plane, shared by all tests of this binary, and a separate Lockstep for each test.

use std::{
    fs::File,
    future::Future,
    io::{Read, Seek, SeekFrom, Write},
    path::Path,
    process::{Command, ExitStatus, Output, Stdio},
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use controlplane::{ControlPlane, LockstepProcess, Signal, poll, skip};
use kube::{Client, Config, config::KubeConfigOptions, config::Kubeconfig};
use serde_json::{Value, json};

/// How long a test waits for a condition, unless it says [`within`]. Lockstep acts within a second; the rest is for
/// machines that are busy. A wake-up that is lost must not pass: no resync comes to the rescue, see
/// [`Lockstep::spawn`].
pub(crate) const DEADLINE: Duration = Duration::from_secs(10);
/// For what controllers of Kubernetes do: they collect garbage, empty namespaces, count quotas and serve new kinds.
pub(crate) const CONTROLLERS: Duration = Duration::from_secs(60);
/// Until another replica leads, if the leader did not release its Lease of four seconds.
pub(crate) const TAKEOVER: Duration = Duration::from_secs(20);
/// For a write that is retried "at least once a minute", because no watch shows when it would succeed.
pub(crate) const RETRY: Duration = Duration::from_secs(90);
/// Until an API server that was away is back, and Lockstep's watches with it.
pub(crate) const OUTAGE: Duration = Duration::from_secs(60);
/// For a companion that was healed more than a few times: its heals back off. A delete with `--cascade` is two heals,
/// of the finalizer and of the deleted companion.
pub(crate) const MANY_HEALS: Duration = Duration::from_secs(60);
/// Until a process that was asked to stop has finished its writes and ended.
const SHUTDOWN: Duration = Duration::from_secs(30);
/// How long a hundred megabytes may take on a busy machine.
pub(crate) const LARGE_DEADLINE: Duration = Duration::from_secs(240);

/// A controller without leader election and webhook: it needs no permissions on objects named after a test's instance.
pub(crate) const MIRROR_ONLY: &[&str] = &["--no-webhook", "--no-leader-elect"];

/// The control plane for all tests that do not stop or reconfigure it.
pub(crate) fn shared() -> &'static ControlPlane {
    static PLANE: OnceLock<ControlPlane> = OnceLock::new();
    PLANE.get_or_init(|| boot(&[]))
}

/// Boots a control plane with Lockstep's RBAC. Webhooks and policy are cluster-wide, so each test that needs them
/// installs its own with [`Cluster::install`].
pub(crate) fn boot(apiserver_flags: &[&str]) -> ControlPlane {
    let plane = ControlPlane::start_with(apiserver_flags).unwrap_or_else(|error| panic!("{error}"));
    let deploy = Path::new(env!("CARGO_MANIFEST_DIR")).join("deploy");
    let mut apply = plane.kubectl();
    apply.arg("apply");
    for file in ["components/namespace/namespace.yaml", "base/rbac.yaml", "components/secrets/rbac.yaml"] {
        apply.arg("-f").arg(deploy.join(file));
    }
    run(&mut apply);
    plane
}

/// A control plane for one test, which may stop and start it; `None` on an existing cluster.
pub(crate) fn dedicated_control_plane(apiserver_flags: &[&str]) -> Option<&'static ControlPlane> {
    if shared().is_existing() {
        skip("it stops and starts a control plane, and LOCKSTEP_TEST_KUBECONFIG is set");
        return None;
    }
    Some(Box::leak(Box::new(boot(apiserver_flags))))
}

/// Runs a command that must succeed, and returns its output.
pub(crate) fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// As [`run`], with this standard input.
pub(crate) fn pipe(command: &mut Command, input: &str) -> String {
    let output = output(command, input);
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Runs a command with this standard input.
pub(crate) fn output(command: &mut Command, input: &str) -> Output {
    let piped = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = piped.spawn().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    child.stdin.take().unwrap().write_all(input.as_bytes()).expect("the command reads its input");
    child.wait_with_output().expect("the command ends")
}

/// What `lockstep manifests` prints.
pub(crate) fn manifests(flags: &[&str]) -> String {
    manifests_of(program(), flags)
}

/// This build of Lockstep.
fn program() -> &'static Path {
    Path::new(env!("CARGO_BIN_EXE_lockstep"))
}

fn manifests_of(program: &Path, flags: &[&str]) -> String {
    run(Command::new(program).arg("manifests").args(flags))
}

tokio::task_local! {
    static LIMIT: Duration;
}

/// Lets each wait in `work` last this long instead of [`DEADLINE`].
pub(crate) async fn within<T>(limit: Duration, work: impl Future<Output = T>) -> T {
    LIMIT.scope(limit, work).await
}

/// How long a wait may last here.
pub(crate) fn deadline() -> Duration {
    LIMIT.try_with(|limit| *limit).unwrap_or(DEADLINE)
}

/// Waits for a condition: `None` means not yet.
pub(crate) async fn eventually<T, F: Future<Output = Option<T>>>(
    what: &str,
    condition: impl FnMut() -> F,
) -> T {
    let limit = deadline();
    poll(limit, condition).await.unwrap_or_else(|| panic!("not within {limit:?}: {what}"))
}

/// A client for a kubeconfig.
pub(crate) async fn client_for(kubeconfig: &Path) -> Client {
    drop(rustls::crypto::ring::default_provider().install_default());
    let kubeconfig = Kubeconfig::read_from(kubeconfig).expect("a kubeconfig");
    let options = KubeConfigOptions::default();
    let config = Config::from_custom_kubeconfig(kubeconfig, &options).await.expect("a config");
    Client::try_from(config).expect("a client")
}

/// One test's share of the cluster: its own domain and namespaces, and an admin's client.
pub(crate) struct Cluster {
    pub plane: &'static ControlPlane,
    /// Unique to the test: the domain is `<id>.test` unless the test chooses another, namespaces start with `<id>-`.
    pub id: String,
    domain: String,
    /// Where the test's webhook listens: an address or a port that no other test uses.
    pub address: String,
    pub client: Client,
    /// The size of the audit log when the test started.
    audit_start: u64,
}

impl Cluster {
    pub(crate) async fn new(test: &str) -> Self {
        Self::on(shared(), test).await
    }

    pub(crate) async fn on(plane: &'static ControlPlane, test: &str) -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let unique = (std::process::id() * 1000 + NEXT.fetch_add(1, Ordering::Relaxed)) % 1_000_000;
        let id = format!("{test}-{unique}");
        let client = client_for(&plane.admin()).await;
        // An existing cluster may not share this machine's loopback interface.
        let address = match std::env::var("LOCKSTEP_TEST_HOST") {
            Ok(host) => format!("{host}:{}", 10_000 + unique % 10_000),
            Err(_) => {
                format!("127.{}.{}.{}:9443", 64 + unique / 65_536, unique / 256 % 256, unique % 256)
            }
        };
        let audit_log = plane.audit_log().ok().and_then(|log| std::fs::metadata(log).ok());
        let audit_start = audit_log.map_or(0, |log| log.len());
        Self { plane, domain: format!("{id}.test"), id, address, client, audit_start }
    }

    /// As [`Self::new`], for a test that reads the audit log; `None` on an existing cluster.
    pub(crate) async fn audited(test: &str) -> Option<Self> {
        if shared().is_existing() {
            skip("it reads the audit log, and LOCKSTEP_TEST_KUBECONFIG is set");
            return None;
        }
        Some(Self::new(test).await)
    }

    pub(crate) fn domain(&self) -> String {
        self.domain.clone()
    }

    /// With this domain, for a test that has the control plane to itself.
    #[must_use]
    pub(crate) fn with_domain(self, domain: &str) -> Self {
        Self { domain: domain.to_owned(), ..self }
    }

    /// The URL at which the API server reaches the test's webhook.
    pub(crate) fn url(&self) -> String {
        format!("https://{}", self.address)
    }

    pub(crate) fn key(&self, name: &str) -> String {
        format!("{}/{name}", self.domain())
    }

    /// The full name of one of the test's namespaces.
    pub(crate) fn ns(&self, name: &str) -> String {
        format!("{}-{name}", self.id)
    }

    /// Creates one of the test's namespaces and returns its full name.
    pub(crate) async fn namespace(&self, name: &str) -> String {
        self.namespace_with(name, json!({}), json!({})).await
    }

    pub(crate) async fn namespace_with(&self, name: &str, labels: Value, annotations: Value) -> String {
        let name = self.ns(name);
        self.post(
            "/api/v1/namespaces",
            &json!({"metadata": {"name": name, "labels": labels, "annotations": annotations}}),
        )
        .await;
        name
    }

    // --- raw API access, as the admin

    pub(crate) async fn try_request(
        &self,
        method: &str,
        path: &str,
        body: Option<(&str, &Value)>,
    ) -> Result<Value, u16> {
        let (kind, bytes) = match body {
            Some((kind, body)) => (kind, serde_json::to_vec(body).unwrap()),
            None => ("application/json", Vec::new()),
        };
        let answer = self.try_text(method, path, kind, bytes).await.map_err(|(code, _)| code)?;
        Ok(serde_json::from_str(&answer).unwrap_or_else(|error| panic!("{method} {path}: {error}")))
    }

    /// As [`Self::try_request`], but with any body, with the message of a refusal, and with the answer as it is: an
    /// object may be nested more deeply than a [`Value`] can be.
    pub(crate) async fn try_text(
        &self,
        method: &str,
        path: &str,
        kind: &str,
        body: Vec<u8>,
    ) -> Result<String, (u16, String)> {
        let request = http::Request::builder().method(method).uri(path).header("content-type", kind);
        match self.client.request_text(request.body(body).unwrap()).await {
            Ok(text) => Ok(text),
            Err(kube::Error::Api(status)) => Err((status.code, status.message)),
            Err(error) => panic!("{method} {path}: {error}"),
        }
    }

    async fn request(&self, method: &str, path: &str, body: Option<(&str, &Value)>) -> Value {
        self.try_request(method, path, body)
            .await
            .unwrap_or_else(|code| panic!("{method} {path}: {code} for {body:?}"))
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Value {
        self.request("POST", path, Some(("application/json", body))).await
    }

    pub(crate) async fn get(&self, path: &str) -> Option<Value> {
        match self.try_request("GET", path, None).await {
            Ok(value) => Some(value),
            Err(404) => None,
            Err(code) => panic!("GET {path}: {code}"),
        }
    }

    /// A merge patch, under the field manager `tester`.
    pub(crate) async fn merge(&self, path: &str, patch: &Value) -> Value {
        let path = format!("{path}?fieldManager=tester");
        self.request("PATCH", &path, Some(("application/merge-patch+json", patch))).await
    }

    pub(crate) async fn delete(&self, path: &str) {
        self.delete_with(path, "Background").await;
    }

    pub(crate) async fn delete_with(&self, path: &str, propagation: &str) {
        let options = json!({"propagationPolicy": propagation});
        self.request("DELETE", path, Some(("application/json", &options))).await;
    }

    // --- sources and companions

    /// A source of this test's domain, not yet created.
    pub(crate) fn source(&self, namespace: &str, name: &str) -> Source<'_> {
        Source {
            cluster: self,
            secret: false,
            object: json!({
                "metadata": {
                    "namespace": namespace,
                    "name": name,
                    "labels": {self.key("managed"): "true"},
                    "annotations": {},
                },
                "data": {"sky": "blue"},
            }),
        }
    }

    pub(crate) async fn configmap(&self, namespace: &str, name: &str) -> Option<Value> {
        self.get(&configmap(namespace, name)).await
    }

    /// Waits until a ConfigMap exists and matches.
    pub(crate) async fn wait(
        &self,
        namespace: &str,
        name: &str,
        what: &str,
        matches: impl Fn(&Value) -> bool,
    ) -> Value {
        eventually(&format!("{namespace}/{name}: {what}"), || async {
            self.configmap(namespace, name).await.filter(|object| matches(object))
        })
        .await
    }

    /// Waits until a ConfigMap has exactly this data.
    pub(crate) async fn wait_data(&self, namespace: &str, name: &str, data: Value) -> Value {
        self.wait(namespace, name, &data.to_string(), |object| object["data"] == data).await
    }

    /// Waits until Lockstep has deleted an object.
    pub(crate) async fn wait_gone(&self, path: &str) {
        eventually(&format!("{path} is gone"), || async { self.get(path).await.is_none().then_some(()) })
            .await;
    }

    /// Waits until Kubernetes has deleted an object: the garbage collector with its owner, or the namespace controller.
    pub(crate) async fn wait_collected(&self, path: &str) {
        within(CONTROLLERS, self.wait_gone(path)).await;
    }

    /// Waits for an Event with this reason on a source, and returns its note.
    pub(crate) async fn wait_event(&self, namespace: &str, source: &str, reason: &str) -> String {
        eventually(&format!("an Event {reason} on {namespace}/{source}"), || async {
            self.events(namespace, source)
                .await
                .into_iter()
                .find(|(found, _)| found == reason)
                .map(|(_, note)| note)
        })
        .await
    }

    /// Reason and note of all Events on an object.
    pub(crate) async fn events(&self, namespace: &str, name: &str) -> Vec<(String, String)> {
        let path = format!("/apis/events.k8s.io/v1/namespaces/{namespace}/events");
        let list = self.get(&path).await.expect("events");
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let items = list["items"].as_array().cloned().unwrap_or_default();
        items
            .iter()
            .filter(|event| event["regarding"]["name"] == name)
            .map(|event| (text(&event["reason"]), text(&event["note"])))
            .collect()
    }

    /// The audit log since the test started; the last line may be incomplete.
    pub(crate) fn audit_log(&self) -> String {
        let mut log = File::open(self.plane.audit_log().expect("an audit log")).expect("the audit log");
        log.seek(SeekFrom::Start(self.audit_start)).expect("the audit log");
        let mut bytes = Vec::new();
        log.read_to_end(&mut bytes).expect("the audit log");
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// The requests of Lockstep's ServiceAccount in one of the test's namespaces: verb, name, code.
    pub(crate) fn audit(&self, namespace: &str) -> Vec<(String, String, u64)> {
        self.audit_log()
            .lines()
            .filter(|line| {
                line.contains(namespace) && line.contains("serviceaccount:lockstep-system:lockstep")
            })
            .filter_map(|line| serde_json::from_str::<Value>(line).ok())
            .filter(|entry| {
                entry["objectRef"]["namespace"] == namespace && entry["objectRef"]["resource"] != "events"
            })
            .filter(|entry| entry["user"]["username"] == "system:serviceaccount:lockstep-system:lockstep")
            .map(|entry| {
                let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
                let name = match &entry["objectRef"]["name"] {
                    Value::String(name) => name.clone(),
                    _ => String::new(),
                };
                (text(&entry["verb"]), name, entry["responseStatus"]["code"].as_u64().unwrap_or_default())
            })
            .collect()
    }

    /// As [`Self::audit`], with every request that was answered before this call. The log is written a moment after the
    /// response, so a test that looks for what must not be there has to wait. A companion can be seen before the write
    /// of it is answered: a test that counts this write waits first until it is in [`Self::audit`].
    pub(crate) async fn complete_audit(&self, namespace: &str) -> Vec<(String, String, u64)> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let marker = format!("{}-marker-{}", self.id, NEXT.fetch_add(1, Ordering::Relaxed));
        assert_eq!(self.get(&format!("/api/v1/namespaces/{marker}")).await, None);
        eventually("a later request is in the audit log", || async {
            self.audit_log().contains(&marker).then_some(())
        })
        .await;
        self.audit(namespace)
    }

    /// As [`Self::audit`], once there are this many entries: the log is written shortly after the response.
    pub(crate) async fn audit_of(&self, namespace: &str, entries: usize) -> Vec<(String, String, u64)> {
        eventually(&format!("{entries} entries for {namespace} in the audit log"), || async {
            Some(self.audit(namespace)).filter(|audit| audit.len() >= entries)
        })
        .await
    }

    /// Applies what `lockstep manifests` prints for this test's domain; dropping the result deletes it.
    pub(crate) fn install(&self, flags: &[&str]) -> InstalledManifests {
        let installed =
            InstalledManifests { plane: self.plane, instance: format!("lockstep.{}", self.domain()) };
        self.apply(flags);
        installed
    }

    /// As [`Self::install`], with the timeouts that users have.
    pub(crate) fn install_unchanged(&self, flags: &[&str]) -> InstalledManifests {
        let installed =
            InstalledManifests { plane: self.plane, instance: format!("lockstep.{}", self.domain()) };
        pipe(self.plane.kubectl().args(["apply", "-f", "-"]), &self.manifests_of(program(), flags));
        installed
    }

    /// Applies the manifests again with other flags.
    pub(crate) fn apply(&self, flags: &[&str]) {
        self.apply_those_of(program(), flags);
    }

    /// As [`Self::apply`], with the manifests that another build of Lockstep prints.
    pub(crate) fn apply_those_of(&self, program: &Path, flags: &[&str]) {
        self.apply_text(&self.manifests_of(program, flags));
    }

    /// As [`Self::apply`], after the test has edited the manifests.
    pub(crate) fn apply_edited(&self, flags: &[&str], edit: impl FnOnce(String) -> String) {
        self.apply_text(&edit(self.manifests_of(program(), flags)));
    }

    fn apply_text(&self, text: &str) {
        // Ten seconds more: a webhook that fails open on a timeout must not do so because this machine is busy.
        let text = text.replace("timeoutSeconds: ", "timeoutSeconds: 1");
        pipe(self.plane.kubectl().args(["apply", "-f", "-"]), &text);
    }

    fn manifests_of(&self, program: &Path, flags: &[&str]) -> String {
        manifests_of(program, &[&["--domain", &self.domain(), "--secrets"], flags].concat())
    }

    /// Starts a controller for this test and waits until it is ready.
    pub(crate) async fn start_controller(&self) -> Lockstep {
        self.start_mirror_with(&[]).await
    }

    /// As [`Self::start_controller`], with more flags.
    pub(crate) async fn start_mirror_with(&self, flags: &[&str]) -> Lockstep {
        self.start(&[MIRROR_ONLY, flags].concat()).await
    }

    /// Installs the webhook configurations for this test, and starts controller and webhook with these flags.
    pub(crate) async fn install_and_start(&self, flags: &[&str]) -> (InstalledManifests, Lockstep) {
        let installed = self.install(&["--webhook-url", &self.url()]);
        (installed, self.start_webhook(flags).await)
    }

    /// As [`Self::install_and_start`], in a process that can allocate no more than this many bytes.
    pub(crate) async fn install_and_start_within(&self, bytes: u64) -> (InstalledManifests, Lockstep) {
        let installed = self.install(&["--webhook-url", &self.url()]);
        let mut lockstep = self.spawn(&["--webhook-bind", &self.address]);
        lockstep.0.limit_memory(bytes).expect("lockstep runs");
        lockstep.wait_ready().await;
        self.wait_webhook().await;
        (installed, lockstep)
    }

    /// Starts controller and webhook, where the webhook configurations are installed.
    pub(crate) async fn start_webhook(&self, flags: &[&str]) -> Lockstep {
        let lockstep = self.start(&[&["--webhook-bind", &self.address], flags].concat()).await;
        self.wait_webhook().await;
        lockstep
    }

    /// Waits until the API server calls the webhook: it sees the CA bundle a moment after it is published.
    pub(crate) async fn wait_webhook(&self) {
        let path = "/api/v1/namespaces/default/configmaps?dryRun=All";
        let object = |key: &str| json!({"metadata": {"name": "x", "labels": {self.key(key): "true"}}});
        let (forged, mut source) = (object("companion"), object("managed"));
        // The webhook recomputes what somebody writes there.
        source["metadata"]["annotations"] = json!({self.key("defaults"): ""});
        let reached =
            format!("the API server calls the webhook at {}; is a firewall in the way?", self.address);
        eventually(&reached, || async {
            let answer = self.try_request("POST", path, Some(("application/json", &forged))).await;
            let stamped = self.try_request("POST", path, Some(("application/json", &source))).await.ok()?;
            let defaults = &stamped["metadata"]["annotations"][self.key("defaults")];
            (answer != Err(500) && defaults != "").then_some(())
        })
        .await;
    }

    async fn start(&self, flags: &[&str]) -> Lockstep {
        let mut lockstep = self.spawn(flags);
        lockstep.wait_ready().await;
        lockstep
    }

    fn spawn(&self, flags: &[&str]) -> Lockstep {
        let kubeconfig = self.plane.service_account("lockstep-system", "lockstep").expect("a kubeconfig");
        Lockstep::spawn(&self.domain(), &kubeconfig, flags)
    }
}

/// The manifests that a test has applied. Dropping it deletes all but what tests share: namespace and ServiceAccount.
pub(crate) struct InstalledManifests {
    plane: &'static ControlPlane,
    instance: String,
}

impl Drop for InstalledManifests {
    fn drop(&mut self) {
        let name = &self.instance;
        let mut delete = self.plane.kubectl();
        delete.args(["delete", "--ignore-not-found", "--namespace", "lockstep-system"]);
        for kind in [
            "validatingwebhookconfiguration",
            "mutatingwebhookconfiguration",
            "validatingadmissionpolicybinding",
            "validatingadmissionpolicy",
            "clusterrolebinding",
            "clusterrole",
            "rolebinding",
            "role",
            "secret",
            "lease.coordination.k8s.io",
        ] {
            delete.arg(format!("{kind}/{name}"));
        }
        delete.args([format!("clusterrolebinding/{name}-secrets"), format!("clusterrole/{name}-secrets")]);
        delete.arg(format!("clusterrole/{name}-view"));
        // A second panic would hide the reason of a failing test.
        if !delete.output().is_ok_and(|output| output.status.success()) && !std::thread::panicking() {
            panic!("{delete:?} failed");
        }
    }
}

/// A metric that docs/reference.md does not know would be zero forever, and nobody would notice that a test asks for
/// it.
fn assert_documented(series: &str) {
    let reference = include_str!("../../docs/reference.md");
    let (_, rest) = reference.split_once("\n## Metrics\n").expect("a section about metrics");
    let (section, _) = rest.split_once("\n## ").expect("another section");
    let (family, labels) = series.split_once('{').unwrap_or((series, ""));
    let family = family.trim_end_matches("_count");
    let labels: Vec<(&str, &str)> =
        labels.trim_end_matches('}').split(',').filter_map(|label| label.split_once('=')).collect();
    let names: Vec<&str> = labels.iter().map(|(name, _)| *name).collect();
    let heading =
        if names.is_empty() { family.to_owned() } else { format!("{family}{{{}}}", names.join(",")) };
    assert!(section.contains(&format!("`{heading}`")), "{heading} is not documented");
    for (name, value) in labels {
        let listed = !["code", "manager", "watch"].contains(&name);
        let value = value.trim_matches('"');
        assert!(!listed || section.contains(&format!("`{value}`")), "{name}={value} is not documented");
    }
}

/// The path of a ConfigMap.
pub(crate) fn configmap(namespace: &str, name: &str) -> String {
    format!("/api/v1/namespaces/{namespace}/configmaps/{name}")
}

pub(crate) fn secret(namespace: &str, name: &str) -> String {
    format!("/api/v1/namespaces/{namespace}/secrets/{name}")
}

/// Builds a source.
pub(crate) struct Source<'a> {
    cluster: &'a Cluster,
    secret: bool,
    object: Value,
}

impl Source<'_> {
    /// Sets one of Lockstep's annotations.
    pub(crate) fn annotate(mut self, key: &str, value: &str) -> Self {
        self.object["metadata"]["annotations"][self.cluster.key(key)] = json!(value);
        self
    }

    /// Sets any field, by JSON pointer, as in `/metadata/labels/team`.
    pub(crate) fn with(mut self, pointer: &str, value: Value) -> Self {
        let (parent, field) = pointer.rsplit_once('/').unwrap();
        let field = field.replace("~1", "/");
        self.object.pointer_mut(parent).unwrap()[field] = value;
        self
    }

    pub(crate) fn secret(mut self, type_: &str, data: Value) -> Self {
        self.secret = true;
        self.object["type"] = json!(type_);
        self.object["data"] = data;
        self
    }

    pub(crate) async fn create(self) -> Value {
        let kind = if self.secret { "secrets" } else { "configmaps" };
        let namespace = self.object["metadata"]["namespace"].as_str().unwrap();
        self.cluster.post(&format!("/api/v1/namespaces/{namespace}/{kind}"), &self.object).await
    }
}

/// A running Lockstep. It is killed when dropped; a test that fails shows its log.
pub(crate) struct Lockstep(pub(crate) LockstepProcess);

impl Lockstep {
    /// Starts it without resyncs, which would hide that an event enqueues nothing, unless a flag asks for them.
    pub(crate) fn spawn(domain: &str, kubeconfig: &Path, flags: &[&str]) -> Self {
        let resync: &[&str] = if flags.contains(&"--resync") { &[] } else { &["--resync", "1h"] };
        let all = [&["--domain", domain, "--kinds", "configmaps,secrets"], resync, flags].concat();
        let process = LockstepProcess::start(program(), kubeconfig, &all);
        Self(process.expect("lockstep starts"))
    }

    /// As users start it: with resyncs, and with a drain when it is asked to stop.
    pub(crate) fn spawn_with_defaults(domain: &str, kubeconfig: &Path, flags: &[&str]) -> Self {
        let all = [&["--domain", domain, "--kinds", "configmaps,secrets"], flags].concat();
        let process = LockstepProcess::start_behind_a_service(program(), kubeconfig, &all);
        Self(process.expect("lockstep starts"))
    }

    pub(crate) fn log(&self) -> String {
        self.0.log()
    }

    pub(crate) async fn wait_log(&self, text: &str) {
        self.wait_log_after(0, text).await;
    }

    /// Waits for a text after this many bytes of the log.
    pub(crate) async fn wait_log_after(&self, bytes: usize, text: &str) {
        eventually(&format!("`{text}` in the log"), || async {
            self.log()[bytes..].contains(text).then_some(())
        })
        .await;
    }

    pub(crate) async fn wait_ready(&mut self) {
        // Everything is listed first.
        self.0.wait_ready(LARGE_DEADLINE).await.unwrap_or_else(|error| panic!("{error}"));
    }

    /// Where it serves health and metrics, whether or not it is ready.
    pub(crate) fn ops_address(&self) -> String {
        let find = || {
            let log = self.log();
            let mut lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
            lines.find_map(|line| Some(line.get("ops")?.as_str()?.to_owned()))
        };
        let mut address = None;
        controlplane::eventually(DEADLINE, || {
            address = find();
            address.is_some()
        });
        address.unwrap_or_else(|| panic!("lockstep does not say where it serves metrics:\n{}", self.log()))
    }

    pub(crate) fn readyz(&self) -> String {
        self.0.http_get("/readyz")
    }

    pub(crate) fn metrics(&self) -> String {
        self.0.http_get("/metrics")
    }

    /// The value of a metric, with its labels as they are printed; zero if there is no such series.
    pub(crate) fn metric(&self, name: &str) -> f64 {
        assert_documented(name);
        self.0.metric(name)
    }

    pub(crate) async fn wait_metric(&self, name: &str, value: f64) {
        eventually(&format!("{name} is {value}"), || async { (self.metric(name) == value).then_some(()) })
            .await;
    }

    /// The most memory that it has had resident so far, in bytes.
    pub(crate) fn peak_memory(&self) -> u64 {
        self.0.memory_kib("VmHWM") << 10
    }

    /// SIGKILL: it neither finishes its work nor releases the Lease.
    pub(crate) fn kill(&self) {
        self.0.signal(Signal::KILL).expect("lockstep runs");
    }

    /// SIGSTOP: its connections stay open, and it answers nobody.
    pub(crate) fn pause(&self) {
        self.0.signal(Signal::STOP).expect("lockstep runs");
    }

    /// SIGCONT.
    pub(crate) fn resume(&self) {
        self.0.signal(Signal::CONT).expect("lockstep runs");
    }

    /// SIGTERM; returns its exit status.
    pub(crate) async fn stop(&mut self) -> ExitStatus {
        self.0.stop(SHUTDOWN).await.unwrap_or_else(|error| panic!("{error}"))
    }
}

impl Drop for Lockstep {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("--- log of lockstep\n{}", self.log());
        }
    }
}
