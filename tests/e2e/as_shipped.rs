//! The timeouts and the drain that users have. The other tests wait longer for a webhook, and drain nothing, so that
//! they do not fail because this machine is busy; these run by themselves.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    task::JoinHandle,
};

use crate::{
    harness::{Cluster, InstalledManifests, Lockstep, configmap},
    peer::{Peer, review_of},
    tcp_proxy::TcpProxy,
    users::manifest,
};

/// `--drain`, unless it is set.
const DRAIN: Duration = Duration::from_secs(5);
/// How long a Service goes on routing to a pod that terminates. The drain has to outlast it.
const ENDPOINTS_LAG: Duration = Duration::from_secs(3);
/// What a machine that is busy may add to a timeout. It is shorter than the pause until any retry.
const SLACK: Duration = Duration::from_secs(2);
/// These tests measure time, so they take turns.
static ONE_AT_A_TIME: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

impl Cluster {
    /// Applies the manifests with the timeouts that users have; dropping the result deletes them.
    fn install_as_shipped(&self) -> InstalledManifests {
        self.install_unchanged(&["--webhook-url", &self.url()])
    }
}

/// Replicas behind a proxy that stands for the Service.
struct Replicas {
    cluster: Arc<Cluster>,
    addresses: Vec<String>,
    service: Arc<TcpProxy>,
}

impl Replicas {
    async fn new(cluster: Arc<Cluster>, number: u16) -> Self {
        let (ip, port) = cluster.address.split_once(':').expect("an address with a port");
        let port: u16 = port.parse().expect("a port");
        let addresses: Vec<String> = (1..=number).map(|n| format!("{ip}:{}", port + n * 10_000)).collect();
        let service = TcpProxy::start(&cluster.address, &addresses).await;
        Self { cluster, addresses, service }
    }

    /// Starts a replica as users do, and lets the Service route to it once it is ready.
    async fn start(&self, replica: usize) -> Lockstep {
        let kubeconfig =
            self.cluster.plane.service_account("lockstep-system", "lockstep").expect("a kubeconfig");
        let flags = ["--webhook-bind", &self.addresses[replica]];
        let mut lockstep = Lockstep::spawn_with_defaults(&self.cluster.domain(), &kubeconfig, &flags);
        lockstep.wait_ready().await;
        self.service.set_ready(replica, true);
        lockstep
    }

    /// Replaces a replica as a rollout does: the Service hears of it only after a while.
    async fn terminate(&self, replica: usize, lockstep: &mut Lockstep) -> Duration {
        let start = Instant::now();
        let service = self.service.clone();
        let endpoints = tokio::spawn(async move {
            tokio::time::sleep(ENDPOINTS_LAG).await;
            service.set_ready(replica, false);
        });
        assert!(lockstep.stop().await.success());
        endpoints.await.expect("the endpoints follow");
        start.elapsed()
    }
}

/// Requests one after the other, each of which the webhook has to refuse.
struct Requests {
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicU64>,
    streams: Vec<JoinHandle<()>>,
}

impl Requests {
    fn new() -> Self {
        Self { stop: Arc::default(), answered: Arc::default(), streams: Vec::new() }
    }

    /// Repeats a request until the end. It returns what went wrong.
    fn repeat<F: Future<Output = Result<(), String>> + Send>(
        &mut self,
        request: impl Fn() -> F + Send + 'static,
    ) {
        let (stop, answered) = (self.stop.clone(), self.answered.clone());
        self.streams.push(tokio::spawn(async move {
            while !stop.load(Ordering::SeqCst) {
                if let Err(lost) = request().await {
                    panic!("after {} requests: {lost}", answered.load(Ordering::SeqCst));
                }
                answered.fetch_add(1, Ordering::SeqCst);
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }));
    }

    async fn all_answered(self) -> u64 {
        self.stop.store(true, Ordering::SeqCst);
        for stream in self.streams {
            stream.await.expect("no request was lost");
        }
        self.answered.load(Ordering::SeqCst)
    }
}

fn reviews(lockstep: &Lockstep) -> f64 {
    lockstep.metric("lockstep_review_duration_seconds_count")
}

#[tokio::test(flavor = "multi_thread")]
async fn rolling_replacement_with_the_default_drain_and_timeouts_loses_no_request() {
    let _turn = ONE_AT_A_TIME.lock().await;
    let cluster = Arc::new(Cluster::new("rolling").await);
    let home = cluster.namespace("home").await;
    let replicas = Replicas::new(cluster.clone(), 4).await;
    let _installed = cluster.install_as_shipped();
    let mut running = vec![replicas.start(0).await, replicas.start(1).await];
    cluster.wait_webhook().await;
    cluster.source(&home, "colors").create().await;
    let companion = cluster.wait_data(&home, "colors-synced", json!({"sky": "blue"})).await;

    let mut requests = Requests::new();
    // Through the API server, which keeps its connections: a webhook that fails closed, and one that fails open.
    let edit = (configmap(&home, "colors-synced"), "PATCH", json!({"data": {"sky": "mine"}}));
    let forged = json!({"metadata": {"name": "new-synced", "annotations": {cluster.key("source"): "a/b"}}});
    let create = (format!("/api/v1/namespaces/{home}/configmaps"), "POST", forged);
    for (path, method, body) in [edit, create] {
        let cluster = cluster.clone();
        requests.repeat(move || {
            let (cluster, path, body) = (cluster.clone(), format!("{path}?dryRun=All"), body.clone());
            async move {
                let kind =
                    if method == "PATCH" { "application/merge-patch+json" } else { "application/json" };
                match cluster.try_request(method, &path, Some((kind, &body))).await {
                    Err(403) => Ok(()),
                    other => Err(format!("{method} {path}: {:?}", other.map(|_| "allowed"))),
                }
            }
        });
    }
    // On a new connection each.
    let peer = Arc::new(cluster.peer().await);
    let mut edited = companion.clone();
    edited["data"] = json!({"sky": "mine"});
    let review = review_of("UPDATE", &home, "mallory", &companion, &edited).to_string();
    requests.repeat(move || {
        let (peer, review) = (peer.clone(), review.clone());
        async move {
            match peer.review(&review).await {
                Ok((200, answer)) if answer.contains("\"allowed\":false") => Ok(()),
                other => Err(format!("a review on a new connection: {other:?}")),
            }
        }
    });

    for replica in 0..2 {
        running.push(replicas.start(replica + 2).await);
        let before = reviews(&running[replica]);
        let took = replicas.terminate(replica, &mut running[replica]).await;
        assert!(took >= DRAIN, "{took:?}: it did not drain");
        let log = running[replica].log();
        assert!(log.contains("serving until the endpoints no longer list this replica"), "{log}");
        println!("replica {replica} had answered {before} reviews, and terminated within {took:?}");
    }
    let served = requests.all_answered().await;
    println!("{served} requests, none lost");
    assert!(served > 300, "too little traffic: {served}");
    for replica in &running[2..] {
        assert!(reviews(replica) > 20.0, "a new replica answered hardly anything");
    }
}

/// How often each change is made. The median is compared with the promise: one try may meet a machine that is busy.
const TRIES: usize = 9;
/// README: "within about a second".
const PROMISED: Duration = Duration::from_secs(1);

/// How long it took, several times.
#[derive(Default)]
struct Times(Vec<Duration>);

impl Times {
    async fn measure(&mut self, change: impl Future<Output = ()>, followed: impl Future) {
        change.await;
        let start = Instant::now();
        followed.await;
        self.0.push(start.elapsed());
    }

    fn assert_promised(mut self, what: &str) {
        self.0.sort();
        let (median, slowest) = (self.0[self.0.len() / 2], self.0[self.0.len() - 1]);
        println!("{what}: {median:?}, the slowest {slowest:?}");
        assert!(self.0.len() == TRIES && median < PROMISED, "{what}: {:?}", self.0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn companions_follow_within_a_second() {
    let _turn = ONE_AT_A_TIME.lock().await;
    let cluster = Arc::new(Cluster::new("second").await);
    let replicas = Replicas::new(cluster.clone(), 1).await;
    let _installed = cluster.install_as_shipped();
    let _lockstep = replicas.start(0).await;
    cluster.wait_webhook().await;
    let home = cluster.namespace("home").await;
    let mut all: [Times; 7] = Default::default();
    for n in 0..TRIES {
        let [created, changed, edited, deleted, namespaces, labelled, removed] = &mut all;
        let (name, companion) = (format!("colors{n}"), format!("colors{n}-synced"));
        let (late, matching) = (format!("late{n}"), cluster.namespace(&format!("matching{n}")).await);
        let is = |namespace: &str, sky: &str| {
            let (cluster, namespace, companion) = (&cluster, namespace.to_owned(), &companion);
            let data = json!({"sky": sky});
            async move { cluster.wait_data(&namespace, companion, data).await }
        };
        let source = cluster
            .source(&home, &name)
            .annotate("target-namespaces", &format!(".,{}", cluster.ns(&late)))
            .annotate("target-selector", &format!("team={}-{n}", cluster.id))
            .annotate("protect", "none");
        created.measure(async { drop(source.create().await) }, is(&home, "blue")).await;
        let path = configmap(&home, &name);
        let red = json!({"data": {"sky": "red"}});
        changed.measure(async { drop(cluster.merge(&path, &red).await) }, is(&home, "red")).await;
        let (copy, mine) = (configmap(&home, &companion), json!({"data": {"sky": "mine"}}));
        edited.measure(async { drop(cluster.merge(&copy, &mine).await) }, is(&home, "red")).await;
        deleted.measure(cluster.delete(&copy), is(&home, "red")).await;
        let new = async { drop(cluster.namespace(&late).await) };
        namespaces.measure(new, is(&cluster.ns(&late), "red")).await;
        let team = json!({"metadata": {"labels": {"team": format!("{}-{n}", cluster.id)}}});
        let label = async { drop(cluster.merge(&format!("/api/v1/namespaces/{matching}"), &team).await) };
        labelled.measure(label, is(&matching, "red")).await;
        removed.measure(cluster.delete(&path), cluster.wait_gone(&configmap(&matching, &companion))).await;
    }
    let promises = [
        "a source is created",
        "its content changes",
        "a companion is edited",
        "a companion is deleted",
        "a target namespace is created",
        "a namespace gets the label of the selector",
        "a source is deleted",
    ];
    for (times, what) in all.into_iter().zip(promises) {
        times.assert_promised(what);
    }
}

/// How long a request takes, and its outcome.
async fn timed(cluster: &Cluster, method: &str, path: &str, body: &Value) -> (Duration, Result<Value, u16>) {
    let kind = if method == "PATCH" { "application/merge-patch+json" } else { "application/json" };
    let start = Instant::now();
    let answer = cluster.try_request(method, path, Some((kind, body))).await;
    (start.elapsed(), answer)
}

#[tokio::test(flavor = "multi_thread")]
async fn webhook_that_hangs_delays_writes_by_the_timeouts_of_the_manifests() {
    let _turn = ONE_AT_A_TIME.lock().await;
    let cluster = Arc::new(Cluster::new("hangs").await);
    let home = cluster.namespace("home").await;
    let replicas = Replicas::new(cluster.clone(), 1).await;
    let _installed = cluster.install_as_shipped();
    let _lockstep = replicas.start(0).await;
    cluster.wait_webhook().await;
    cluster.source(&home, "colors").create().await;
    cluster.wait_data(&home, "colors-synced", json!({"sky": "blue"})).await;
    replicas.service.stall();

    let edit = json!({"data": {"sky": "mine"}});
    let objects = format!("/api/v1/namespaces/{home}/configmaps");
    let plain = |name: &str, labels: Value| json!({"metadata": {"name": name, "labels": labels}});
    let mislabelled = plain("no-source", json!({cluster.key("managed"): "yes"}));
    for (what, method, path, body, seconds, refused) in [
        ("companions", "PATCH", configmap(&home, "colors-synced"), &edit, 3, true),
        // The webhook that stamps defaults is asked first, for two seconds.
        ("sources", "PATCH", configmap(&home, "colors"), &edit, 2 + 3, true),
        ("newcomers", "POST", objects.clone(), &plain("new-synced", json!({})), 1, false),
        ("mislabelled", "POST", objects.clone(), &mislabelled, 1, false),
        ("none", "POST", objects.clone(), &plain("unrelated", json!({})), 0, false),
    ] {
        let (took, answer) = timed(&cluster, method, &path, body).await;
        let limit = Duration::from_secs(seconds);
        assert!(took >= limit && took < limit + SLACK, "{what}: {took:?} instead of {limit:?}");
        assert_eq!(answer.err(), refused.then_some(500), "{what}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn webhook_that_cannot_check_rights_refuses_before_the_api_server_gives_up() {
    let _turn = ONE_AT_A_TIME.lock().await;
    let cluster = Cluster::new("unchecked").await;
    let Some((proxy, through)) = cluster.api_server_proxy().await else { return };
    let home = cluster.namespace("home").await;
    let _installed = cluster.install_as_shipped();
    let flags = ["--webhook-bind", &cluster.address, "--no-controller"];
    let mut webhook = Lockstep::spawn_with_defaults(&cluster.domain(), &through, &flags);
    webhook.wait_ready().await;
    cluster.wait_webhook().await;
    let late = cluster.ns("late");
    proxy.stall();
    // A namespace that the webhook does not know yet: it waits for that, too.
    cluster.namespace("late").await;
    let alice = cluster.editor("alice", &[], &[&home, &late]).await;
    for namespace in [&home, &late] {
        let metadata =
            json!({"name": "colors", "namespace": namespace, "labels": {cluster.key("managed"): "true"}});
        let start = Instant::now();
        let complaint = alice.fails_with("create -f -", &manifest("ConfigMap", &metadata, &json!({})));
        println!("{namespace}: {:?}: {complaint}", start.elapsed());
        assert!(complaint.contains("your rights could not be checked"), "{complaint}");
    }
}

/// Reads until the webhook closes the connection; returns how long that took, and what it said.
async fn until_closed(mut stream: impl AsyncReadExt + Unpin, start: Instant) -> (Duration, String) {
    let mut said = Vec::new();
    drop(stream.read_to_end(&mut said).await);
    (start.elapsed(), String::from_utf8_lossy(&said).into_owned())
}

/// Sends half a request on a new connection.
async fn begin_request(peer: &Peer, text: &str) -> (Duration, String) {
    let start = Instant::now();
    let mut stream = peer.connect().await.expect("a connection");
    stream.write_all(text.as_bytes()).await.expect("the webhook reads");
    until_closed(stream, start).await
}

#[tokio::test(flavor = "multi_thread")]
async fn peers_that_say_nothing_or_half_of_it_are_dropped_in_time() {
    let _turn = ONE_AT_A_TIME.lock().await;
    let cluster = Cluster::new("silent-peers").await;
    let (_installed, _lockstep) = cluster.install_and_start(&[]).await;
    let peer = cluster.peer().await;
    let body = "POST /validate HTTP/1.1\r\nhost: webhook\r\ncontent-type: application/json\r\n\
                content-length: 100\r\nconnection: close\r\n\r\n{\"kind\":";
    let no_handshake = async {
        let start = Instant::now();
        until_closed(TcpStream::connect(&cluster.address).await.expect("a connection"), start).await
    };
    let (no_handshake, no_request, half_a_body) =
        tokio::join!(no_handshake, begin_request(&peer, ""), begin_request(&peer, body));
    assert!(half_a_body.1.starts_with("HTTP/1.1 408 "), "{half_a_body:?}");
    // New connections without a request are looked for every two seconds.
    for (what, seconds, took) in [
        ("no handshake", 5, no_handshake.0),
        ("half a body", 3, half_a_body.0),
        ("no request", 10, no_request.0),
    ] {
        let limit = Duration::from_secs(seconds);
        assert!(took >= limit && took < limit + 2 * SLACK, "{what}: {took:?} instead of {limit:?}");
    }
}
