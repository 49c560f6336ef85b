//! Reconciles that overlap with writes of earlier ones, and with leadership that comes and goes.

use std::collections::BTreeSet;

use futures::{FutureExt, future::BoxFuture};
use tokio::sync::{Notify, watch};

use super::*;
use crate::controller::events::EventRecorder;
use lockstep_cluster::testing::api::api_server;
use lockstep_core::{
    lease::hold::{HeldDeletes, Release, to_annotation},
    object::Object,
    plan::Heal,
    testing::{
        self,
        cluster::{Cluster, Store},
        companion, configmap, source,
    },
    world::WatchId,
    writes::write_request::CompanionRequest,
};

/// A create of so many bytes takes [`LARGE_WRITE`].
const LARGE: usize = 256 * 1024;
const LARGE_WRITE: Duration = Duration::from_secs(2);

/// The API of a cluster, on which writes in some namespaces hang or fail.
#[derive(Clone)]
struct TestApi {
    store: Store,
    hanging: Arc<Mutex<BTreeSet<&'static str>>>,
    failing: Arc<Mutex<BTreeSet<&'static str>>>,
    released: Arc<Notify>,
}

impl TestApi {
    async fn pass(&self, at: &ObjectKey) -> Result<(), Failure> {
        loop {
            let released = self.released.notified();
            if !self.hanging.lock().contains(&*at.namespace) {
                break;
            }
            released.await;
        }
        if self.failing.lock().contains(&*at.namespace) { Err(Failure::Conflict) } else { Ok(()) }
    }
}

impl CompanionApi for TestApi {
    async fn send(&self, at: &ObjectKey, request: CompanionRequest) -> Result<Object, Failure> {
        if !request.is_read() {
            self.pass(at).await?;
        }
        if matches!(&request, CompanionRequest::Create(body) if body.len() > LARGE) {
            tokio::time::sleep(LARGE_WRITE).await;
        }
        self.store.send(at, request)
    }
}

/// A reconciler that leads. Its workers run only when a test polls them.
struct Fixture {
    cluster: Cluster,
    api: TestApi,
    reconciler: Arc<Reconciler<TestApi>>,
    lease: watch::Sender<Option<Instant>>,
    write_workers: Vec<BoxFuture<'static, Infallible>>,
    reconcile_worker: BoxFuture<'static, Infallible>,
}

impl Fixture {
    fn new(cluster: Cluster) -> Self {
        Self::with(cluster, 4)
    }

    fn with(cluster: Cluster, writes: usize) -> Self {
        let (lease, received) = watch::channel(Some(Instant::now() + Duration::from_hours(1)));
        let settings = Settings {
            keys: testing::keys(),
            workers: 1,
            writes,
            resync: Duration::from_hours(1),
            delete_grace: Duration::from_secs(300),
            instance_flags: String::new(),
        };
        let api = TestApi {
            store: cluster.api(),
            hanging: Arc::default(),
            failing: Arc::default(),
            released: Arc::default(),
        };
        let (metrics, claim) = (Metrics::new(), Claim::from_receiver(received));
        let no_events = api_server(|_| std::future::pending());
        let (recorder, _) = EventRecorder::new(no_events, &testing::keys(), metrics.clone());
        let reporter = Reporter::new(recorder, metrics.clone());
        let world = cluster.world.clone();
        let reconciler =
            Reconciler::new(&settings, api.clone(), world, Arc::default(), reporter, claim, metrics);
        let reconciler = Arc::new(reconciler);
        let write_workers = (0..settings.writes).map(|_| reconciler.clone().write_all().boxed()).collect();
        let reconcile_worker = reconciler.clone().reconcile_all().boxed();
        reconciler.open(&BTreeMap::new());
        Self { cluster, api, reconciler, lease, write_workers, reconcile_worker }
    }

    /// Lets the workers do all that they can do now.
    async fn settle(&mut self) {
        for _ in 0..200 {
            self.poll_workers().await;
        }
    }

    /// Polls each worker once.
    async fn poll_workers(&mut self) {
        self.write();
        assert_eq!(self.reconcile_worker.as_mut().now_or_never(), None);
        // A new budget of tokio's for each round.
        tokio::task::yield_now().await;
    }

    /// Lets the write workers alone do what they can do now.
    fn write(&mut self) {
        self.write_workers.iter_mut().for_each(|worker| assert_eq!(worker.now_or_never(), None));
    }

    fn enqueue(&self, key: &ObjectKey) {
        self.reconciler.queue.push_all([key.clone()]);
    }

    fn hang(&self, namespaces: &[&'static str]) {
        *self.api.hanging.lock() = namespaces.iter().copied().collect();
        self.api.released.notify_waiters();
    }

    fn state(&self, key: &ObjectKey) -> Option<Arc<Mutex<SourceState>>> {
        self.reconciler.sources.lock().get(key).cloned()
    }

    fn sky(&self, namespace: &str) -> Option<String> {
        let object = self.cluster.object(&configmap(namespace, "colors-synced"))?;
        Some(object.data?.get("sky")?.to_string())
    }

    fn written(&self, action: &'static str) -> u64 {
        self.reconciler.metrics.writes.of(action).get()
    }

    fn heals(&self) -> u64 {
        let heals = &self.reconciler.metrics.heals;
        let count = |heal: Heal| heals.of(heal.as_str()).get();
        Heal::ALL.into_iter().map(count).sum()
    }

    fn reconciles(&self) -> u64 {
        let count = |result| self.reconciler.metrics.reconciles.of(result).get();
        ["retry", "trouble", "changed", "unchanged"].into_iter().map(count).sum()
    }
}

fn colors(sky: &str, targets: &str) -> testing::ObjectBuilder {
    source("home", "colors").data("sky", sky).annotate("target-namespaces", targets)
}

#[tokio::test]
async fn writes_of_a_source_do_not_reconcile_it_once_each() {
    let names: Vec<String> = (0..100).map(|n| format!("n{n}")).collect();
    let mut cluster =
        Cluster::with(&names.iter().map(String::as_str).chain(["home", "slow"]).collect::<Vec<_>>());
    let key = cluster.put(colors("blue", "n*,slow"));
    let mut fixture = Fixture::new(cluster);
    fixture.hang(&["slow"]);
    fixture.settle().await;
    assert_eq!(fixture.reconciles(), 0, "one write hangs");
    // While writes of a source are queued, it is reconciled for another reason.
    fixture.hang(&["slow", "n0", "n1", "n2", "n3"]);
    fixture.cluster.put(colors("red", "n*,slow"));
    fixture.enqueue(&key);
    fixture.settle().await;
    fixture.enqueue(&key);
    fixture.settle().await;
    fixture.hang(&[]);
    fixture.settle().await;
    for name in names.iter().map(String::as_str).chain(["slow"]) {
        assert_eq!(fixture.sky(name).as_deref(), Some("red"), "{name}");
    }
    assert!(fixture.reconciles() < 10, "{}", fixture.reconciles());
    assert_eq!(fixture.heals(), 0);
}

#[tokio::test]
async fn source_that_changes_back_while_a_write_hangs_counts_no_heals() {
    let mut cluster = Cluster::with(&["home", "slow", "quick"]);
    let key = cluster.put(colors("blue", "slow,quick"));
    let mut fixture = Fixture::new(cluster);
    fixture.settle().await;
    fixture.hang(&["slow"]);
    for sky in ["red", "blue", "green", "blue"] {
        fixture.cluster.put(colors(sky, "slow,quick"));
        fixture.enqueue(&key);
        fixture.settle().await;
        assert_eq!(fixture.sky("quick").as_deref(), Some(sky));
    }
    fixture.hang(&[]);
    fixture.settle().await;
    assert_eq!(fixture.sky("slow").as_deref(), Some("blue"));
    assert_eq!(fixture.heals(), 0);

    // All is right again: a label that somebody removes is a heal.
    let companion = configmap("quick", "colors-synced");
    fixture.cluster.edit(&companion, |object| object.metadata.labels.clear());
    fixture.enqueue(&key);
    fixture.settle().await;
    assert_eq!(fixture.heals(), 1);
}

#[tokio::test]
async fn write_of_an_earlier_reconcile_does_not_say_that_all_is_right() {
    let mut cluster = Cluster::with(&["home", "slow", "quick"]);
    let key = cluster.put(colors("blue", "slow,quick"));
    let mut fixture = Fixture::new(cluster);
    fixture.hang(&["slow"]);
    fixture.settle().await;
    fixture.cluster.put(colors("red", "slow,quick"));
    fixture.enqueue(&key);
    fixture.settle().await;
    // The write for "blue" ends when the companions are in part "red", and the source is "blue" again.
    fixture.hang(&["quick"]);
    fixture.write();
    fixture.cluster.put(colors("blue", "slow,quick"));
    fixture.enqueue(&key);
    fixture.settle().await;
    fixture.hang(&[]);
    fixture.settle().await;
    assert_eq!(
        (fixture.sky("slow").as_deref(), fixture.sky("quick").as_deref()),
        (Some("blue"), Some("blue"))
    );
    assert_eq!(fixture.heals(), 0);
}

#[tokio::test]
async fn source_is_not_lost_when_the_claim_expires_and_is_renewed_at_once() {
    let mut cluster = Cluster::with(&["home", "away"]);
    let key = cluster.put(colors("blue", "away"));
    let mut fixture = Fixture::new(cluster);
    fixture.settle().await;
    fixture.cluster.put(colors("red", "away"));
    fixture.lease.send_replace(None);
    fixture.enqueue(&key);
    fixture.settle().await;
    assert_eq!(fixture.sky("away").as_deref(), Some("blue"));
    fixture.lease.send_replace(Some(Instant::now() + Duration::from_hours(1)));
    fixture.settle().await;
    assert_eq!(fixture.sky("away").as_deref(), Some("red"));
}

#[tokio::test]
async fn companion_is_not_stuck_in_flight_when_the_write_queue_was_closed() {
    let mut cluster = Cluster::with(&["home", "away"]);
    let key = cluster.put(colors("blue", "away"));
    let mut fixture = Fixture::new(cluster);
    // The lead is lost and regained while a worker is between a key and its writes.
    fixture.reconciler.close();
    fixture.reconciler.reconcile(&key);
    fixture.reconciler.open(&BTreeMap::new());
    fixture.settle().await;
    assert_eq!(fixture.sky("away").as_deref(), Some("blue"));
}

#[tokio::test]
async fn source_that_is_gone_is_forgotten_even_if_it_was_healed_lately() {
    let mut cluster = Cluster::with(&["home", "away"]);
    let key = cluster.put(colors("blue", "away"));
    let mut fixture = Fixture::new(cluster);
    fixture.settle().await;
    fixture.cluster.edit(&configmap("away", "colors-synced"), |object| object.metadata.labels.clear());
    fixture.enqueue(&key);
    fixture.settle().await;
    assert_eq!(fixture.heals(), 1);
    fixture.cluster.delete(&key);
    fixture.enqueue(&key);
    fixture.settle().await;
    assert_eq!(fixture.sky("away"), None);
    assert!(fixture.state(&key).is_none());
}

#[tokio::test]
async fn source_that_is_gone_keeps_its_uid_while_its_deletes_wait() {
    let mut cluster = Cluster::with(&["home", "away"]);
    for n in 0..30 {
        cluster.put(companion("away", &format!("s{n}-synced")).of(&format!("home/s{n}")));
        cluster.put(source("home", &format!("s{n}")).annotate("target-namespaces", "away"));
    }
    let key = configmap("home", "s0");
    let mut fixture = Fixture::new(cluster);
    fixture.settle().await;
    let uid = fixture.state(&key).expect("a state").lock().uid.clone();
    fixture.cluster.delete(&key);
    fixture.enqueue(&key);
    fixture.settle().await;
    assert!(fixture.cluster.object(&configmap("away", "s0-synced")).is_some(), "the brake waits for others");
    assert_eq!(fixture.state(&key).expect("a state").lock().uid, uid);
}

#[tokio::test]
async fn hanging_write_in_the_namespace_of_a_source_delays_no_delete_elsewhere() {
    let mut cluster = Cluster::with(&["home", "away"]);
    let key = cluster.put(colors("blue", "home,away"));
    let mut fixture = Fixture::new(cluster);
    fixture.settle().await;
    fixture.hang(&["home"]);
    fixture.cluster.put(colors("red", "home"));
    fixture.enqueue(&key);
    fixture.settle().await;
    assert_eq!(fixture.sky("home").as_deref(), Some("blue"), "its write hangs");
    assert_eq!(fixture.sky("away"), None);
}

#[tokio::test]
async fn stale_cache_backs_off_although_reconciles_meanwhile_meet_none() {
    let mut cluster = Cluster::with(&["home", "slow"]);
    let key = cluster.put(colors("blue", "slow"));
    let mut fixture = Fixture::new(cluster);
    fixture.api.failing.lock().insert("slow");
    let mut last = 0;
    for _ in 0..5 {
        fixture.hang(&["slow"]);
        fixture.enqueue(&key);
        fixture.settle().await;
        fixture.enqueue(&key);
        fixture.settle().await;
        fixture.hang(&[]);
        fixture.write();
        let stale = fixture.state(&key).expect("a state").lock().retry.stale_count();
        assert!(stale > last, "{stale} {last}");
        last = stale;
    }
}

#[tokio::test]
async fn deletes_in_flight_do_not_count_again_for_the_brake() {
    let mut cluster = Cluster::with(&["home", "slow"]);
    let key = cluster.put(colors("blue", "slow"));
    let mut fixture = Fixture::new(cluster);
    fixture.settle().await;
    fixture.hang(&["slow"]);
    fixture.cluster.delete(&key);
    fixture.enqueue(&key);
    fixture.settle().await;
    let pending = |fixture: &Fixture| fixture.reconciler.brake.lock().pending_count();
    assert_eq!(pending(&fixture), 1);
    // The window is over: what was due before is forgotten.
    *fixture.reconciler.brake.lock() = Brake::new(testing::keys(), Duration::from_secs(300));
    fixture.enqueue(&key);
    fixture.settle().await;
    assert_eq!(pending(&fixture), 0);
    fixture.hang(&[]);
    fixture.settle().await;
    assert_eq!(fixture.sky("slow"), None);
}

#[tokio::test]
async fn write_of_an_earlier_term_that_ends_late_is_corrected() {
    let mut cluster = Cluster::with(&["home", "slow"]);
    let key = cluster.put(colors("blue", "slow"));
    let mut fixture = Fixture::new(cluster);
    fixture.settle().await;
    fixture.hang(&["slow"]);
    fixture.cluster.put(colors("red", "slow"));
    fixture.enqueue(&key);
    fixture.settle().await;
    fixture.reconciler.close();
    fixture.cluster.put(colors("blue", "slow"));
    fixture.reconciler.open(&BTreeMap::new());
    fixture.settle().await;
    fixture.hang(&[]);
    fixture.settle().await;
    assert_eq!(fixture.sky("slow").as_deref(), Some("blue"));
}

#[tokio::test]
async fn releases_are_not_held() {
    let mut cluster = Cluster::with(&["home", "away"]);
    for n in 0..30 {
        let companion = companion("away", &format!("s{n}-synced")).of(&format!("home/s{n}"));
        cluster.put(companion.annotate("when-removed", "keep"));
    }
    let mut fixture = Fixture::new(cluster);
    fixture.settle().await;
    for n in 0..30 {
        let object = fixture.cluster.object(&configmap("away", &format!("s{n}-synced"))).expect("it stays");
        assert!(object.metadata.labels.is_empty() && object.metadata.annotations.is_empty());
    }
    assert_eq!(fixture.reconciler.brake.lock().pending_count(), 0);
    assert_eq!(fixture.written("released"), 30);
    assert!(fixture.reconciler.sources.lock().is_empty(), "their sources are forgotten");
}

#[tokio::test]
async fn companions_beside_their_source_do_not_hide_an_accident_in_other_namespaces() {
    let mut cluster = Cluster::with(&["home", "away"]);
    for n in 0..30 {
        cluster.put(companion("away", &format!("a{n}-synced")).of(&format!("home/a{n}")));
        cluster.put(companion("home", &format!("h{n}-synced")).of(&format!("home/h{n}")));
        cluster.put(companion("home", &format!("i{n}-synced")).of(&format!("home/i{n}")));
    }
    for n in 0..30 {
        cluster.put(source("home", &format!("h{n}")));
        cluster.put(source("home", &format!("i{n}")));
    }
    let mut fixture = Fixture::new(cluster);
    fixture.settle().await;
    let held = fixture.reconciler.brake.lock().is_holding();
    assert!(held, "all companions in other namespaces would be deleted");
}

/// A reconciler that holds the deletes of thirty companions, whose sources are gone.
async fn holding() -> Fixture {
    let mut cluster = Cluster::with(&["home", "away"]);
    for n in 0..30 {
        cluster.put(companion("away", &format!("s{n}-synced")).of(&format!("home/s{n}")));
    }
    let mut fixture = Fixture::new(cluster);
    fixture.settle().await;
    assert!(fixture.reconciler.brake.lock().is_holding());
    fixture
}

#[tokio::test]
async fn hold_ends_when_others_delete_the_held_companions() {
    let mut fixture = holding().await;
    for n in 0..30 {
        fixture.cluster.delete(&configmap("away", &format!("s{n}-synced")));
        fixture.enqueue(&configmap("home", &format!("s{n}")));
    }
    fixture.settle().await;
    assert!(!fixture.reconciler.brake.lock().is_holding());
}

#[tokio::test]
async fn held_deletes_happen_as_soon_as_the_lease_shows_a_release() {
    let mut fixture = holding().await;
    let (keys, annotations) = (testing::keys(), LeaseAnnotations::default());
    // As the leader election does.
    let carry_out = |annotations: &LeaseAnnotations| {
        let mut found = annotations.observed().borrow().clone();
        for (key, value) in annotations.wanted() {
            match value {
                Some(value) => drop(found.insert(key, value)),
                None => drop(found.remove(&key)),
            }
        }
        annotations.observe(Some(&found));
        found
    };
    fixture.reconciler.sync_hold(&annotations);
    let mut found = carry_out(&annotations);
    let hold: HeldDeletes = serde_json::from_str(&found[&keys.deletes_held]).unwrap();
    assert_eq!((hold.companions, hold.sources), (30, 30));
    let release = to_annotation(&Release::new(&hold, hold.since, "alice"));
    found.insert(keys.deletes_released.clone(), release);
    annotations.observe(Some(&found));
    fixture.reconciler.sync_hold(&annotations);
    fixture.settle().await;
    for n in 0..30 {
        assert!(fixture.cluster.object(&configmap("away", &format!("s{n}-synced"))).is_none(), "{n}");
    }
    fixture.reconciler.sync_hold(&annotations);
    assert_eq!(carry_out(&annotations).get(&keys.deletes_held), None);
}

#[tokio::test(start_paused = true)]
async fn resync_enqueues_what_no_event_has_enqueued_and_leaves_settled_sources_alone() {
    let mut cluster = Cluster::with(&["home", "away", "n0"]);
    let (key, at) = (cluster.put(colors("blue", "away,n*")), configmap("away", "colors-synced"));
    let mut fixture = Fixture::new(cluster);
    fixture.settle().await;
    type Change<'a> = (&'a str, &'a dyn Fn(&mut Cluster));
    let changes: [Change<'_>; 6] = [
        ("a companion is edited", &|cluster| {
            cluster.edit(&at, |object| drop(object.data.take()));
        }),
        ("a companion is deleted", &|cluster| cluster.delete(&at)),
        ("the source changes", &|cluster| drop(cluster.put(colors("red", "away,n*")))),
        ("a namespace appears", &|cluster| cluster.namespace(testing::namespace("n1"))),
        ("the source gets a problem", &|cluster| drop(cluster.put(colors("red", "away,missing")))),
        ("the source is deleted", &|cluster| cluster.delete(&key)),
    ];
    for (change, make) in changes {
        // Heals are remembered for a while.
        tokio::time::advance(Duration::from_secs(200)).await;
        fixture.reconciler.resync().await;
        fixture.settle().await;
        let before = fixture.reconciles();
        fixture.reconciler.resync().await;
        assert_eq!(
            (fixture.reconciler.queue.depth(), fixture.reconciles()),
            (0, before + 1),
            "before {change}"
        );
        make(&mut fixture.cluster);
        fixture.reconciler.resync().await;
        assert_eq!(fixture.reconciler.queue.depth(), 1, "{change}");
        fixture.settle().await;
        assert!(fixture.cluster.plan(&key).changes.is_empty(), "{change}");
        if change == "the source gets a problem" {
            // It is reported again before its Event expires, and reconciles find out when it ends.
            fixture.reconciler.resync().await;
            assert_eq!(fixture.reconciler.queue.depth(), 1, "{change}");
            fixture.cluster.put(colors("red", "away"));
            fixture.settle().await;
        }
    }
    fixture.reconciler.resync().await;
    assert_eq!((fixture.reconciler.queue.depth(), fixture.sky("away")), (0, None));
}

#[tokio::test(start_paused = true)]
async fn heals_that_are_far_apart_are_no_fight_although_nothing_else_happens_to_the_source() {
    let mut cluster = Cluster::with(&["home", "away"]);
    let (key, at) = (cluster.put(colors("blue", "away")), configmap("away", "colors-synced"));
    let mut fixture = Fixture::new(cluster);
    for _ in 0..10 {
        fixture.settle().await;
        fixture.cluster.edit(&at, |object| drop(object.data.take()));
        fixture.enqueue(&key);
        fixture.settle().await;
        assert_eq!(fixture.sky("away").as_deref(), Some("blue"));
        assert!(fixture.state(&key).unwrap().lock().reported.is_empty(), "a fight");
        for _ in 0..7 {
            tokio::time::advance(Duration::from_secs(30)).await;
            fixture.reconciler.resync().await;
            fixture.settle().await;
        }
    }
    assert_eq!(fixture.heals(), 10);
}

#[tokio::test]
async fn resync_ends_what_is_shown_and_remembered_of_deletes_that_are_not_due_any_more() {
    let mut fixture = holding().await;
    assert_eq!(fixture.reconciler.metrics.deletes_held.get(), 1);
    let keys: Vec<ObjectKey> = (0..30)
        .map(|n| {
            let name = format!("s{n}");
            fixture.cluster.put(source("home", &name).annotate("target-namespaces", "away"))
        })
        .collect();
    keys.iter().for_each(|key| fixture.enqueue(key));
    fixture.settle().await;
    // As if the last of them had shown it just before it ended the hold.
    fixture.reconciler.metrics.deletes_held.set(1);
    fixture.reconciler.resync().await;
    assert_eq!(fixture.reconciler.metrics.deletes_held.get(), 0);

    let due = [configmap("away", "s0-synced")];
    let totals = Totals { companions: 100, sources: 100 };
    fixture.reconciler.brake.lock().ask(Instant::now(), &keys[0], &due, totals);
    fixture.reconciler.resync().await;
    fixture.settle().await;
    assert!(!fixture.reconciler.brake.lock().awaits_deletes_of(&keys[0]));
}

#[tokio::test]
async fn create_that_turns_out_to_be_a_heal_backs_off() {
    let mut cluster = Cluster::with(&["home", "away"]);
    let key = cluster.put(colors("blue", "away"));
    let mut fixture = Fixture::new(cluster);
    fixture.settle().await;
    let at = configmap("away", "colors-synced");
    let mut healed = 0;
    for _ in 0..10 {
        // The world does not know that there was a companion: the plan is to create a new one.
        fixture.cluster.edit(&at, |object| object.metadata.labels.clear());
        fixture.cluster.restart();
        fixture.enqueue(&key);
        fixture.settle().await;
        healed += usize::from(fixture.cluster.companion(&at).is_some());
    }
    assert!((1..10).contains(&healed), "{healed} heals without a delay");
}

#[tokio::test]
async fn nothing_is_written_for_a_source_that_a_new_list_has_not_shown_yet() {
    let mut fixture = Fixture::new(Cluster::with(&["home", "slow"]));
    let draft = || source("home", "colors").annotate("target-namespaces", "slow").data("sky", "blue");
    let colors = fixture.cluster.put(draft());
    let list = WatchId::Sources(colors.kind);
    fixture.reconciler.world.write(|world| world.list_begins(list));
    fixture.enqueue(&colors);
    fixture.settle().await;
    assert_eq!(fixture.sky("slow"), None);

    fixture.cluster.put(draft());
    fixture.enqueue(&colors);
    fixture.settle().await;
    assert_eq!(fixture.sky("slow").as_deref(), Some("blue"));
}

/// Lets the workers run until a companion exists, and returns how long that took.
async fn time_until_written(fixture: &mut Fixture, namespace: &str) -> Duration {
    let start = clock::now();
    while fixture.sky(namespace).is_none() {
        fixture.settle().await;
        tokio::time::advance(Duration::from_millis(5)).await;
    }
    clock::elapsed(start)
}

#[tokio::test(start_paused = true)]
async fn small_change_does_not_wait_for_large_fan_outs() {
    let namespaces = ["n0", "n1", "n2", "n3", "n4", "n5", "n6", "n7"];
    for fan_outs in [1, 10] {
        let mut cluster = Cluster::with(&[&["home", "small"], &namespaces[..]].concat());
        for n in 0..fan_outs {
            let large = source("home", &format!("large-{n}")).data("text", &"x".repeat(LARGE));
            cluster.put(large.annotate("target-namespaces", "n*"));
        }
        let mut fixture = Fixture::with(cluster, 16);
        fixture.settle().await;
        // Writes that take so long are no reason to take more of them up.
        tokio::time::advance(LARGE_WRITE / 2 + Duration::from_millis(1)).await;
        fixture.settle().await;
        let small = fixture.cluster.put(colors("blue", "small"));
        fixture.enqueue(&small);
        let time = time_until_written(&mut fixture, "small").await;
        assert!(time < Duration::from_millis(10), "{fan_outs} fan-outs: {time:?}");
        // The fan-outs end, too.
        for _ in 0..namespaces.len() * fan_outs {
            tokio::time::advance(LARGE_WRITE).await;
            fixture.settle().await;
        }
        assert_eq!(fixture.written("created"), 1 + (namespaces.len() * fan_outs) as u64);
    }
}
