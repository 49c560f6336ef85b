//! The stage of one history: its namespaces, people and webhooks on a control plane, and two replicas of Lockstep.

use std::{
    collections::HashMap,
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::body::{Body, to_bytes};
use controlplane::ControlPlane;
use kube::{
    Client, Config,
    config::{KubeConfigOptions, Kubeconfig},
};
use model::{Actor, Edit, Key, Kind, Names, Object, Op, Step, Violation, Write};
use serde_json::{Value, json};

use crate::{
    harness::{Cluster, InstalledManifests},
    proxy::Proxy,
    recorder::{Feed, Recorder},
    replica::{Build, Replica},
    requests::{Answer, Requests, Reviewed, Sender},
    tcp_proxy::TcpProxy,
    traffic::Traffic,
    users::{User, all_verbs},
};

/// Short, so that a takeover is quick.
pub(crate) const LEASE_DURATION: Duration = Duration::from_secs(4);
/// How long a request of a person may take.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(15);
/// How long a read may take: it fails when etcd is down.
const READ_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a namespace may take to go before it is created again.
const NAMESPACE_TIMEOUT: Duration = Duration::from_secs(15);
/// How long after an outage a step may still be refused.
const OUTAGE_TIMEOUT: Duration = Duration::from_secs(10);
/// The time between two attempts of a step after an outage.
const RETRY_INTERVAL: Duration = Duration::from_millis(200);
/// The time between two samples of the memory of the replicas.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(1);
/// How long it may take until everything of a history is deleted.
const CLEAN_UP_TIMEOUT: Duration = Duration::from_secs(60);
/// The time between two looks at the cluster.
pub(crate) const LOOK_INTERVAL: Duration = Duration::from_millis(50);

pub(crate) struct Scene {
    pub plane: &'static ControlPlane,
    pub cluster: Cluster,
    pub names: Names,
    pub feed: Arc<Feed>,
    pub recorder: Arc<Recorder>,
    pub traffic: Arc<Traffic>,
    pub replicas: [Replica; 2],
    pub balancer: Arc<TcpProxy>,
    requests: Arc<Requests>,
    people: HashMap<&'static str, Client>,
    tenant: User,
    /// Whether the API server asks the webhook.
    pub reviewed: Reviewed,
    /// What the webhooks were installed with.
    manifest_flags: Vec<String>,
    _installed: InstalledManifests,
    /// Namespaces that are created again as soon as the old ones are gone.
    deferred: Vec<Deferred>,
    pub operations: u64,
    pub refused: u64,
    /// The resident memory of each replica in KiB, about once a second.
    pub memory: Vec<(Instant, [Option<u64>; 2])>,
}

/// What became of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Performed {
    /// It is about an object that is not there, for example.
    Nothing,
    Accepted,
    /// By the API server, by the webhook, or because of a fault.
    Refused,
}

struct Deferred {
    step: Step,
    write: Write,
    until: Instant,
}

impl Scene {
    /// Creates the namespaces that exist at first, and starts both replicas with these flags.
    pub(crate) async fn set(
        plane: &'static ControlPlane,
        feed: &Arc<Feed>,
        names: &Names,
        seed: u64,
        flags: &[&str],
    ) -> Self {
        let id = names.prefix.trim_end_matches('-');
        let cluster = Cluster::on(plane, id).await.with_domain(&names.domain);
        let requests = Arc::new(Requests::default());
        let recorder = Recorder::start(feed, names, requests.clone());
        let traffic = Traffic::new(requests.clone(), recorder.clone(), names.clone(), LEASE_DURATION);
        for namespace in names.initial_namespaces() {
            cluster.post("/api/v1/namespaces", &json!({"metadata": {"name": namespace}})).await;
        }
        let exempt = cluster.user("exempt", &["system:masters"]);
        let (tenant, deputy) = (cluster.user("tenant", &[]), cluster.cluster_editor("deputy", &[]).await);
        let mut people = HashMap::new();
        let admin = cluster.admin();
        for (role, user) in [("exempt", &exempt), ("admin", &admin), ("tenant", &tenant), ("deputy", &deputy)]
        {
            people.insert(role, client_without_retries(user.kubeconfig()).await);
        }
        let manifest_flags =
            ["--webhook-url", &cluster.url(), "--exempt-user", &exempt.name].map(ToOwned::to_owned).to_vec();
        let texts: Vec<&str> = manifest_flags.iter().map(String::as_str).collect();
        let installed = cluster.install(&texts);

        let (ip, _) = cluster.address.split_once(':').expect("an address with a port");
        let addresses = [19_443, 29_443].map(|port| format!("{ip}:{port}"));
        let balancer = TcpProxy::start(&cluster.address, &addresses).await;
        let account = plane.service_account("lockstep-system", "lockstep").expect("a kubeconfig");
        let mut replicas = Vec::new();
        for (index, address) in addresses.iter().enumerate() {
            let upstream = client_without_retries(&account).await;
            let proxy = Proxy::start(index, upstream, traffic.clone(), seed + index as u64).await;
            let kubeconfig = plane.data_dir().join(format!("{}-{index}.kubeconfig", cluster.id));
            std::fs::write(&kubeconfig, proxy.kubeconfig().to_string()).expect("a kubeconfig");
            let lease = format!("{}s", LEASE_DURATION.as_secs());
            let own = ["--domain", &names.domain, "--kinds", "configmaps,secrets", "--webhook-bind", address];
            let users = ["--exempt-user", &exempt.name, "--deputy-user", &deputy.name];
            let flags = [&own[..], &users, &["--lease-duration", &lease], flags]
                .concat()
                .into_iter()
                .map(ToOwned::to_owned)
                .collect();
            replicas.push(Replica::new(index, proxy, traffic.clone(), kubeconfig, flags));
        }
        let replicas = replicas.try_into().ok().expect("two replicas");
        let mut scene = Self {
            plane,
            cluster,
            names: names.clone(),
            feed: feed.clone(),
            recorder,
            traffic,
            replicas,
            balancer,
            requests,
            people,
            tenant,
            reviewed: Reviewed::Yes,
            manifest_flags,
            _installed: installed,
            deferred: Vec::new(),
            operations: 0,
            refused: 0,
            memory: Vec::new(),
        };
        scene.grant_tenant().await;
        scene.start_all().await;
        scene.cluster.wait_webhook().await;
        scene
    }

    /// Starts the replicas that do not run, and waits until both are ready.
    pub(crate) async fn start_all(&mut self) {
        self.replicas.iter_mut().for_each(Replica::start);
        let deadline = Instant::now() + Duration::from_secs(60);
        while !self.replicas.iter().all(Replica::is_ready) {
            self.tick().await;
            tokio::time::sleep(LOOK_INTERVAL).await;
            assert!(
                Instant::now() < deadline,
                "not ready:\n{}\n{}",
                self.replicas[0].log(),
                self.replicas[1].log()
            );
        }
    }

    /// Looks after the replicas, as a kubelet does.
    pub(crate) async fn tick(&mut self) {
        for (index, replica) in self.replicas.iter_mut().enumerate() {
            let was_ready = replica.is_ready();
            replica.tick().await;
            match (was_ready, replica.is_ready()) {
                (false, true) => self.balancer.set_ready(index, true),
                (true, false) => self.balancer.remove(index),
                _ => {}
            }
        }
        if self.memory.last().is_none_or(|(when, _)| when.elapsed() >= SAMPLE_INTERVAL) {
            self.memory.push((Instant::now(), [0, 1].map(|replica| self.replicas[replica].memory_kib())));
        }
    }

    // --- what people do

    /// Performs a step, if there is anything to do.
    pub(crate) async fn perform(&mut self, step: &Step) -> Performed {
        let (status, now) = self.send("admin", "GET", &step.at.path(), None).await;
        let now = match status {
            Some(200) => Some(Object::from_json(&now)),
            Some(404) => None,
            // The API server is down.
            _ => {
                self.refused += 1;
                return Performed::Refused;
            }
        };
        let writes = step.writes(now.as_ref());
        if writes.is_empty() {
            return Performed::Nothing;
        }
        self.operations += 1;
        let (mut deletes_namespace, mut all_accepted) = (false, true);
        for write in writes {
            if deletes_namespace {
                // It can only be created again when it is gone, and other people do not wait for that.
                let until = Instant::now() + NAMESPACE_TIMEOUT;
                self.deferred.push(Deferred { step: step.clone(), write, until });
                break;
            }
            deletes_namespace = step.at.kind == Kind::Namespace && write == Write::Delete;
            let accepted = self.write(step, &write).await;
            self.refused += u64::from(!accepted);
            all_accepted &= accepted;
        }
        if all_accepted { Performed::Accepted } else { Performed::Refused }
    }

    /// Removes the finalizers that keep namespaces from being deleted, and waits until these are gone: otherwise, ever
    /// fewer steps of a long history would have an effect.
    pub(crate) async fn finish_deletions(&mut self) {
        self.recorder.catch_up().await;
        let (held, ending) = {
            let judge = self.recorder.judge();
            let ends =
                |name: &str| judge.now().get(&Key::namespace(name)).is_some_and(|found| found.terminating);
            let held = judge
                .now()
                .iter()
                .filter(|(key, object)| ends(&key.namespace) && !object.finalizers.is_empty());
            let ending = judge.now().keys().filter(|key| key.kind == Kind::Namespace && ends(&key.name));
            (held.map(|(key, _)| key.clone()).collect::<Vec<_>>(), ending.cloned().collect::<Vec<_>>())
        };
        for at in held {
            self.perform(&Step { by: Actor::Exempt, at, op: Op::Edit(vec![Edit::ClearFinalizers]) }).await;
        }
        let deadline = Instant::now() + NAMESPACE_TIMEOUT;
        let mut left = ending;
        while !left.is_empty() && Instant::now() < deadline {
            self.tick().await;
            tokio::time::sleep(LOOK_INTERVAL).await;
            let judge = self.recorder.judge();
            left.retain(|key| judge.now().get(key).is_some_and(|found| found.terminating));
        }
    }

    /// Repeats the last step until the API server accepts it, after an outage.
    pub(crate) async fn wait_performed(&mut self, steps: &[Step]) {
        let deadline = Instant::now() + OUTAGE_TIMEOUT;
        while let Some(step) = steps.last()
            && self.perform(step).await == Performed::Refused
            && Instant::now() < deadline
        {
            self.tick().await;
            tokio::time::sleep(RETRY_INTERVAL).await;
        }
    }

    /// Sends a request of a step, and returns whether the API server has accepted it.
    async fn write(&self, step: &Step, write: &Write) -> bool {
        let (method, path, body) = match write {
            Write::Create(object) => ("POST", step.at.collection(), object.to_json(&step.at)),
            Write::Replace(object) => ("PUT", step.at.path(), object.to_json(&step.at)),
            Write::Delete => ("DELETE", step.at.path(), json!({"propagationPolicy": "Background"})),
        };
        let person = match step.by {
            Actor::Exempt => "exempt",
            Actor::Admin => "admin",
            Actor::Tenant => "tenant",
            Actor::Deputy => "deputy",
        };
        let ticket = self.requests.begin(&step.at.path(), Sender::Person(step.by, self.reviewed));
        let (status, answer) = self.send(person, method, &path, Some(&body)).await;
        ticket.end(Answer::read(status, &answer));
        let accepted = status.is_some_and(|status| status < 300);
        let message = answer["message"].as_str().unwrap_or_default();
        self.recorder.note(format!("{:?} {method} {}: {status:?} {message}", step.by, step.at));
        if step.at == Key::namespace(&self.names.namespace("home")) && method == "POST" && accepted {
            self.grant_tenant().await;
        }
        accepted
    }

    /// Creates the namespaces that are gone now and were to be created again. Returns whether none is left.
    pub(crate) async fn recreate_namespaces(&mut self) -> bool {
        for deferred in std::mem::take(&mut self.deferred) {
            let gone = self.send("admin", "GET", &deferred.step.at.path(), None).await.0 == Some(404);
            if gone {
                self.write(&deferred.step, &deferred.write).await;
            } else if Instant::now() < deferred.until {
                self.deferred.push(deferred);
            }
        }
        self.deferred.is_empty()
    }

    async fn grant_tenant(&self) {
        let home = self.names.namespace("home");
        self.cluster
            .grant(&self.tenant.name, &self.tenant.subject(), Some(&home), json!([all_verbs()]))
            .await;
    }

    /// Sends a request; the status is `None` if there is no answer.
    async fn send(
        &self,
        person: &str,
        method: &str,
        path: &str,
        body: Option<&Value>,
    ) -> (Option<u16>, Value) {
        let client = &self.people[person];
        let bytes = body.map(|body| body.to_string().into_bytes()).unwrap_or_default();
        let request =
            http::Request::builder().method(method).uri(path).header("content-type", "application/json");
        let request = request.body(kube::client::Body::from(bytes)).expect("a request");
        let exchange = async {
            let response = client.send(request).await.ok()?;
            let (parts, body) = response.into_parts();
            let body = to_bytes(Body::new(body), usize::MAX).await.ok()?;
            Some((parts.status.as_u16(), serde_json::from_slice(&body).unwrap_or_default()))
        };
        let timeout = if method == "GET" { READ_TIMEOUT } else { REQUEST_TIMEOUT };
        match tokio::time::timeout(timeout, exchange).await {
            Ok(Some((status, answer))) => (Some(status), answer),
            Ok(None) | Err(_) => (None, Value::Null),
        }
    }

    // --- the webhooks

    pub(crate) fn remove_webhooks(&mut self) {
        self.reviewed = Reviewed::No;
        for kind in ["validating", "mutating"] {
            let name = format!("lockstep.{}", self.cluster.domain());
            let command = format!("delete --ignore-not-found {kind}webhookconfiguration {name}");
            self.cluster.admin().succeeds(&command);
        }
    }

    pub(crate) fn restore_webhooks(&mut self) {
        self.apply_manifests(self.replicas[0].build);
    }

    /// Applies the manifests that a build prints.
    pub(crate) fn apply_manifests(&self, build: Build) {
        let flags: Vec<&str> = self.manifest_flags.iter().map(String::as_str).collect();
        self.cluster.apply_those_of(&build.program(), &flags);
    }

    /// Whether the API server asks the webhook again.
    pub(crate) async fn wait_reviewed(&mut self) {
        self.cluster.wait_webhook().await;
        self.reviewed = Reviewed::Yes;
    }

    // --- the end

    /// Waits until Lockstep has caught up, and returns when it had; what is wrong if it has not after `timeout`.
    pub(crate) async fn converge(&mut self, timeout: Duration) -> Result<Instant, Vec<Violation>> {
        let deadline = Instant::now() + timeout;
        loop {
            self.tick().await;
            let looked = Instant::now();
            let unsettled = self.recorder.unsettled().await;
            if unsettled.is_empty() {
                return Ok(looked);
            }
            if Instant::now() > deadline {
                return Err(unsettled);
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
        }
    }

    /// A replica of this build that starts anew and looks at every source again and again writes nothing: everything is
    /// right.
    pub(crate) async fn check_resync(&mut self, build: Build) {
        for replica in &mut self.replicas {
            replica.stop().await;
        }
        self.tick().await;
        let before = self.traffic.accepted.load(std::sync::atomic::Ordering::SeqCst);
        self.replicas[0].resync = "1s";
        self.replicas[0].build = build;
        self.replicas[0].start();
        let deadline = Instant::now() + Duration::from_secs(60);
        // Every source is reconciled when the replica begins to lead, and in each resync.
        let reconciled = |replica: &Replica| {
            let of =
                |result: &str| replica.metric(&format!("lockstep_reconciles_total{{result=\"{result}\"}}"));
            Some((of("unchanged")? + of("trouble")? + of("retry")?, replica.metric("lockstep_sources")?))
        };
        loop {
            self.tick().await;
            let leads = self.traffic.leader() == Some(0);
            if leads && reconciled(&self.replicas[0]).is_some_and(|(done, sources)| done >= 3.0 * sources) {
                break;
            }
            tokio::time::sleep(LOOK_INTERVAL).await;
            if Instant::now() > deadline {
                let log = self.replicas[0].log();
                return self.recorder.violation(format!("no resync within a minute: {log}"));
            }
        }
        let after = self.traffic.accepted.load(std::sync::atomic::Ordering::SeqCst);
        if after != before {
            let writes = after - before;
            self.recorder.violation(format!("{writes} writes of {build:?} although everything was right"));
        }
        for wrong in self.recorder.unsettled().await {
            self.recorder.violation(format!("after a restart: {wrong}"));
        }
    }

    /// Deletes everything that the history has left.
    pub(crate) async fn clean_up(mut self) {
        for replica in &mut self.replicas {
            replica.stop().await;
        }
        self.remove_webhooks();
        let admin = self.people["admin"].clone();
        let merge = |path: String| {
            let request = http::Request::patch(path).header("content-type", "application/merge-patch+json");
            let body = json!({"metadata": {"finalizers": null}}).to_string().into_bytes();
            admin.request::<Value>(request.body(body).expect("a request"))
        };
        let deadline = Instant::now() + CLEAN_UP_TIMEOUT;
        loop {
            self.recorder.catch_up().await;
            let left: Vec<(Key, bool)> = {
                let judge = self.recorder.judge();
                judge.now().iter().map(|(key, object)| (key.clone(), !object.finalizers.is_empty())).collect()
            };
            if left.is_empty() {
                return;
            }
            assert!(Instant::now() < deadline, "these are left: {left:?}");
            for (key, held) in left {
                if held {
                    drop(merge(key.path()).await);
                }
                if key.kind == Kind::Namespace {
                    self.send("admin", "DELETE", &key.path(), None).await;
                }
            }
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
    }
}

/// A client that sends each request once.
async fn client_without_retries(kubeconfig: &Path) -> Client {
    drop(rustls::crypto::ring::default_provider().install_default());
    let kubeconfig = Kubeconfig::read_from(kubeconfig).expect("a kubeconfig");
    let config = Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default()).await;
    lockstep_cluster::client::build(config.expect("a config"), |_, _| {}).expect("a client")
}
