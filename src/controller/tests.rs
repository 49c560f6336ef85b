//! The controller as a whole, on an API server that answers as a test says: leadership, shutdown, slow writes.

use std::{
    sync::Mutex,
    time::{Duration, Instant},
};

use prometheus_client::metrics::gauge::Gauge;
use serde_json::{Value, json};
use tokio::sync::Notify;

use super::*;
use crate::testing::captured_logs::CapturedLogs;
use lockstep_cluster::testing::api::{ApiRequest, api_server, refusal};
use lockstep_core::testing::{self, cluster::Cluster, companion, configmap, source};

fn settings() -> Settings {
    Settings {
        keys: testing::keys(),
        workers: 1,
        writes: 4,
        resync: Duration::from_hours(1),
        delete_grace: Duration::ZERO,
        instance_flags: String::new(),
    }
}

/// A reconciler with its queue, and the lease that makes it lead.
struct Fixture {
    world: SharedWorld,
    queue: Arc<Queue>,
    metrics: Metrics,
    reconciler: Arc<Reconciler<KubeApi>>,
    lease: watch::Sender<Option<Instant>>,
    claim: Claim,
}

impl Fixture {
    fn new(cluster: Cluster, client: Client) -> Self {
        Self::with(cluster, client, &settings())
    }

    /// No worker runs.
    fn with(cluster: Cluster, client: Client, settings: &Settings) -> Self {
        let (lease, received) = watch::channel(None);
        let (claim, metrics, queue) =
            (Claim::from_receiver(received), Metrics::new(), Arc::<Queue>::default());
        let (recorder, events) = EventRecorder::new(client.clone(), &testing::keys(), metrics.clone());
        let api = KubeApi { client, keys: testing::keys() };
        let reporter = Reporter::new(recorder, metrics.clone());
        let world = cluster.world;
        let (shared, keys, for_reconciler) = (world.clone(), queue.clone(), claim.clone());
        let reconciler =
            Reconciler::new(settings, api, shared, keys, reporter, for_reconciler, metrics.clone());
        let reconciler = Arc::new(reconciler);
        // Events do not wait.
        tokio::spawn(events.run(reconciler.writes(), watch::channel(true).1));
        tokio::spawn(reconciler.clone().follow_leadership(LeaseAnnotations::default()));
        Self { world, queue, metrics, reconciler, lease, claim }
    }

    fn start_workers(&self) {
        tokio::spawn(self.reconciler.clone().reconcile_all());
        for _ in 0..settings().writes {
            tokio::spawn(self.reconciler.clone().write_all());
        }
    }

    fn lead(&self) {
        self.lease.send_replace(Some(Instant::now() + Duration::from_hours(1)));
    }

    async fn lose(&mut self) {
        self.lease.send_replace(None);
        self.claim.lost().await;
    }

    fn troubles(&self, reason: &'static str) -> i64 {
        self.metrics.troubles.of(reason).get()
    }

    /// A person changes a source: the watch shows it.
    fn put_source(&self, builder: testing::ObjectBuilder) {
        let source = testing::read_source(builder.kind, builder.object());
        let effect = self.world.write(|world| world.apply_source(source));
        self.queue.push_all(effect.requeue);
    }
}

async fn until(condition: impl Fn() -> bool) {
    let wait = async {
        while !condition() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), wait).await.expect("in time");
}

#[tokio::test]
async fn standby_queues_nothing_and_a_new_leader_enqueues_every_source() {
    let mut cluster = Cluster::with(&["home", "away"]);
    cluster.put(source("home", "colors"));
    cluster.put(companion("away", "orphan-synced").of("home/orphan"));
    let mut fixture = Fixture::new(cluster, api_server(|_| async { refusal(500, "") }));
    let key = |n: u32| configmap("home", &n.to_string());
    fixture.queue.push_all((0..1000).map(key));
    assert_eq!(fixture.queue.depth(), 0);

    for _ in 0..2 {
        fixture.lead();
        until(|| fixture.queue.depth() == 2).await;
        fixture.queue.push_all((0..1000).map(key));
        fixture.lose().await;
        until(|| fixture.queue.depth() == 0).await;
        fixture.queue.push_all((0..1000).map(key));
        assert_eq!(fixture.queue.depth(), 0);
    }
}

#[tokio::test]
async fn former_leader_reports_no_troubles_even_when_a_write_fails_later() {
    let mut cluster = Cluster::with(&["home"]);
    cluster.put(source("home", "faulty").annotate("paused", "perhaps"));
    cluster.put(source("home", "slow"));
    let (asked, answered) = (Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (arrived, gate) = (asked.clone(), answered.clone());
    let client = api_server(move |asked| {
        let (arrived, gate) = (arrived.clone(), gate.clone());
        async move {
            if asked.uri.contains("/configmaps") {
                arrived.notify_one();
                gate.notified().await;
            }
            refusal(422, "Invalid")
        }
    });
    let mut fixture = Fixture::new(cluster, client);
    fixture.start_workers();
    fixture.lead();
    asked.notified().await;
    until(|| fixture.troubles("malformed") == 1).await;
    fixture.metrics.deletes_held.set(1);

    fixture.lose().await;
    until(|| fixture.troubles("malformed") == 0).await;
    // The write that was in flight when another replica took over fails.
    answered.notify_one();
    fixture.reconciler.finish().await;
    assert_eq!(fixture.troubles("invalid"), 0);
    assert_eq!((fixture.metrics.deletes_held.get(), fixture.metrics.queue_depth.get()), (0, 0));

    // It leads again and reports anew.
    answered.notify_one();
    fixture.lead();
    until(|| fixture.troubles("malformed") == 1 && fixture.troubles("invalid") == 1).await;
}

#[tokio::test]
async fn former_leader_shows_zero_in_the_leaders_gauges() {
    let mut cluster = Cluster::with(&["home", "away"]);
    for n in 0..21 {
        cluster.put(companion("away", &format!("s{n}-synced")).of(&format!("home/s{n}")));
    }
    cluster.put(source("home", "s99"));
    let hanging = api_server(|_| std::future::pending());
    let settings = Settings { delete_grace: Duration::from_secs(300), ..settings() };
    let mut fixture = Fixture::with(cluster, hanging, &settings);
    let shown =
        |metrics: &Metrics| [&metrics.deletes_held, &metrics.sources, &metrics.companions].map(Gauge::get);
    fixture.start_workers();
    fixture.lead();
    until(|| shown(&fixture.metrics) == [1, 1, 21]).await;
    fixture.lose().await;
    until(|| shown(&fixture.metrics) == [0; 3]).await;
    assert_eq!(fixture.metrics.queue_depth.get(), 0);
}

#[tokio::test(start_paused = true)]
async fn lease_is_released_before_pending_events_are_written() {
    let mut cluster = Cluster::with(&["home"]);
    cluster.put(source("home", "faulty").annotate("paused", "perhaps"));
    let reported = Arc::new(Notify::new());
    let reporting = reported.clone();
    let client = api_server(move |asked| {
        assert!(asked.uri.contains("/events"), "{}", asked.uri);
        reporting.notify_one();
        std::future::pending()
    });
    let ((stop, stopped), released) = (watch::channel(false), Mutex::new(None));
    let release = async { *released.lock().unwrap() = Some(tokio::time::Instant::now()) };
    let controller = Controller {
        client,
        settings: settings(),
        world: cluster.world,
        queue: Arc::default(),
        claim: Claim::permanent(),
        annotations: LeaseAnnotations::default(),
        metrics: Metrics::new(),
    };
    let stopping = async {
        reported.notified().await;
        stop.send_replace(true);
        tokio::time::Instant::now()
    };
    let ((), begun) = tokio::join!(controller.run(release, stopped), stopping);
    assert!(begun.elapsed() >= EVENTS_TIMEOUT, "an Event delayed the stop");
    assert_eq!(released.lock().unwrap().expect("released"), begun);
}

/// An API server on which writes in one namespace hang until they are let go. It keeps what it was sent.
#[derive(Clone, Default)]
struct SlowApi {
    gate: Arc<Notify>,
    writes: Arc<Mutex<Vec<(String, Value)>>>,
    version: Arc<std::sync::atomic::AtomicU64>,
}

impl SlowApi {
    fn client(&self) -> Client {
        let api = self.clone();
        api_server(move |asked: ApiRequest| {
            let api = api.clone();
            async move { api.answer(asked).await }
        })
    }

    async fn answer(&self, asked: ApiRequest) -> (u16, Value) {
        if !asked.uri.contains("/configmaps") {
            return (201, json!({"metadata": {}}));
        }
        let namespace = asked.uri.split('/').nth(4).unwrap_or_default().to_owned();
        self.writes.lock().unwrap().push((namespace.clone(), asked.body.clone()));
        if namespace == "slow" {
            self.gate.notified().await;
        }
        let mut object = asked.body;
        // For this test, the values that a patch sets are the whole object.
        if let Some(operations) = object.as_array() {
            let value = |path: &str| {
                operations.iter().find(|op| op["path"] == path).map_or(Value::Null, |op| op["value"].clone())
            };
            let annotation = |name: &str| value(&format!("/metadata/annotations/workshop.io~1{name}"));
            object = json!({
                "metadata": {
                    "name": "colors-synced", "namespace": namespace,
                    "labels": {"workshop.io/companion": "true"},
                    "annotations": {
                        "workshop.io/source": annotation("source"),
                        "workshop.io/source-uid": annotation("source-uid"),
                        "workshop.io/source-checksum": annotation("source-checksum"),
                        "workshop.io/protect": annotation("protect"),
                    },
                },
                "data": value("/data"),
            });
        }
        let version = 1000 + self.version.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        object["metadata"]["resourceVersion"] = json!(version.to_string());
        object["metadata"]["uid"] = json!(format!("uid-in-{namespace}"));
        (200, object)
    }

    /// The values of `sky` that were sent to a namespace.
    fn sent(&self, namespace: &str) -> Vec<String> {
        let writes = self.writes.lock().unwrap();
        let sky = |body: &Value| {
            let data = match body.as_array() {
                Some(ops) => ops.iter().find(|op| op["path"] == "/data").map(|op| &op["value"]),
                None => body.get("data"),
            };
            data.and_then(|data| data["sky"].as_str()).unwrap_or_default().to_owned()
        };
        writes.iter().filter(|(at, _)| at == namespace).map(|(_, body)| sky(body)).collect()
    }
}

fn colors(sky: &str, version: u64) -> testing::ObjectBuilder {
    source("home", "colors")
        .data("sky", sky)
        .annotate("target-namespaces", "slow,quick")
        .version(version)
        .uid("uid-100")
}

#[tokio::test]
async fn hanging_write_delays_no_other_target_and_superseded_content_is_never_written() {
    let mut cluster = Cluster::with(&["home", "slow", "quick"]);
    cluster.put(colors("blue", 1));
    let api = SlowApi::default();
    let fixture = Fixture::new(cluster, api.client());
    fixture.start_workers();
    fixture.lead();
    until(|| api.sent("slow") == ["blue"] && api.sent("quick") == ["blue"]).await;
    for (n, sky) in (0..).zip(["red", "green", "yellow"]) {
        fixture.put_source(colors(sky, 200 + n));
        until(|| api.sent("quick").last().is_some_and(|sent| sent == sky)).await;
    }
    assert_eq!(api.sent("slow"), ["blue"], "its first write still hangs");
    api.gate.notify_one();
    until(|| api.sent("slow").len() == 2).await;
    assert_eq!(api.sent("slow"), ["blue", "yellow"]);
    api.gate.notify_one();
    fixture.reconciler.finish().await;
    assert_eq!(api.sent("quick"), ["blue", "red", "green", "yellow"]);
    assert_eq!(api.sent("slow"), ["blue", "yellow"]);
}

#[tokio::test]
async fn queued_write_whose_content_was_superseded_sends_the_newest() {
    let mut cluster = Cluster::with(&["home", "slow", "quick"]);
    // One worker, which the slow namespace of another source occupies.
    cluster.put(source("home", "other").data("sky", "grey").annotate("target-namespaces", "slow"));
    let api = SlowApi::default();
    let fixture = Fixture::with(cluster, api.client(), &Settings { writes: 1, ..settings() });
    tokio::spawn(fixture.reconciler.clone().reconcile_all());
    tokio::spawn(fixture.reconciler.clone().write_all());
    fixture.lead();
    until(|| api.sent("slow") == ["grey"]).await;
    for (n, sky) in (0..).zip(["blue", "red"]) {
        fixture.put_source(colors(sky, 300 + n).annotate("target-namespaces", "quick"));
        until(|| fixture.queue.depth() == 0).await;
    }
    api.gate.notify_one();
    until(|| !api.sent("quick").is_empty()).await;
    fixture.reconciler.finish().await;
    assert_eq!(api.sent("quick"), ["red"]);
}

#[tokio::test]
async fn hanging_write_of_large_content_delays_no_other_source() {
    let mut cluster = Cluster::with(&["home", "slow", "quick"]);
    let large = "x".repeat(1 << 20);
    cluster.put(source("home", "large").data("sky", &large).annotate("target-namespaces", "slow"));
    let api = SlowApi::default();
    let fixture = Fixture::new(cluster, api.client());
    fixture.start_workers();
    fixture.lead();
    until(|| api.sent("slow").len() == 1).await;
    fixture.put_source(colors("blue", 200).annotate("target-namespaces", "quick"));
    until(|| api.sent("quick") == ["blue"]).await;
    api.gate.notify_one();
    fixture.reconciler.finish().await;
}

/// Source annotations and what a text can be made of to be long: plain, escaped in JSON, several bytes a character.
const ANNOTATIONS: [&str; 9] = [
    "target-namespaces",
    "target-selector",
    "companion-name",
    "keys",
    "copy-labels",
    "copy-annotations",
    "protect",
    "paused",
    "source",
];

#[tokio::test]
async fn log_lines_and_events_are_bounded_whatever_tenants_write() {
    let huge = |text: &str| text.repeat(200_000 / text.len());
    let values = ["x", "\u{1}", "ö", "a*b,", "x=y=z,", "(", "Long Name "].map(huge);
    let mut cluster = Cluster::with(&["home", "away"]);
    for (n, value) in values.iter().enumerate() {
        for annotation in ANNOTATIONS {
            cluster.put(source("home", &format!("{annotation}{n}")).annotate(annotation, value));
        }
        cluster.put(source("home", &format!("data{n}")).data(&value[..200], value));
        cluster.put(source("home", &format!("type{n}")).of_type(value));
    }
    cluster.put(source("home", &"n".repeat(253)));
    let notes = Arc::new(Mutex::new(Vec::new()));
    let (written, message) = (notes.clone(), huge("quota "));
    let client = api_server(move |asked: ApiRequest| {
        let (written, message) = (written.clone(), message.clone());
        async move {
            if let Some(note) = asked.body["note"].as_str() {
                written.lock().unwrap().push(note.to_owned());
                return (201, asked.body);
            }
            let (code, mut status) = refusal(403, "Forbidden");
            status["message"] = json!(message);
            (code, status)
        }
    });
    let (captured, sources) = (CapturedLogs::default(), cluster.all_sources().len());
    let capturing = captured.start("trace");
    let fixture = Fixture::new(cluster, client);
    fixture.start_workers();
    fixture.lead();
    until(|| notes.lock().unwrap().len() >= sources).await;
    drop(capturing);
    let longest = |texts: &mut dyn Iterator<Item = &str>| texts.map(str::len).max().unwrap_or_default();
    assert!(longest(&mut notes.lock().unwrap().iter().map(String::as_str)) <= 1024);
    let longest = longest(&mut captured.text().lines());
    assert!((100..=8192).contains(&longest), "a log line of {longest} bytes");
}
