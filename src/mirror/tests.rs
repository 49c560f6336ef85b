//! Who writes, who stands by, and what is left when that changes.

use std::{
    sync::Mutex,
    time::{Duration, Instant},
};

use tokio::sync::Notify;

use super::*;
use crate::{
    object::Kind,
    ops::metrics::ReasonLabel,
    policy::pattern::Patterns,
    testing::{
        self,
        api::{api_server, refusal},
        cluster::Cluster,
        companion, source,
    },
    world::{Scope, state::Limits},
};

fn shared(cluster: Cluster) -> SharedWorld {
    let limits = Limits { own_namespace: testing::OWN_NAMESPACE.to_owned(), excluded: Patterns::default() };
    let shared = SharedWorld::new(&Scope { keys: testing::keys(), limits, kinds: vec![Kind::ConfigMap] });
    shared.write(|world| *world = cluster.world);
    shared
}

fn settings() -> Settings {
    Settings {
        keys: testing::keys(),
        workers: 1,
        writes: 4,
        resync: Duration::from_hours(1),
        delete_grace: Duration::ZERO,
    }
}

/// Everything that takes turns, and who says whose turn it is.
struct Stage {
    queue: Arc<Queue<ObjectKey>>,
    metrics: Metrics,
    passes: Passes,
    turn: watch::Sender<Option<Instant>>,
    claim: Claim,
}

impl Stage {
    fn new(cluster: Cluster, client: Client) -> Self {
        let (turn, told) = watch::channel(None);
        let (claim, metrics, queue) =
            (Claim::from_receiver(told), Metrics::new(), Arc::<Queue<ObjectKey>>::default());
        let world = shared(cluster);
        let (teller, _scribe) = events::Teller::start(client.clone(), &testing::keys(), metrics.clone());
        let passes = Passes::new(
            client,
            &settings(),
            world.clone(),
            queue.clone(),
            teller,
            claim.clone(),
            metrics.clone(),
        );
        tokio::spawn(take_turns(claim.clone(), passes.clone(), world, queue.clone()));
        Self { queue, metrics, passes, turn, claim }
    }

    fn ours(&self) {
        self.turn.send_replace(Some(Instant::now() + Duration::from_hours(1)));
    }

    async fn lose(&mut self) {
        self.turn.send_replace(None);
        self.claim.lost().await;
    }

    fn troubles(&self, reason: &'static str) -> i64 {
        self.metrics.troubles.get_or_create(&ReasonLabel { reason }).get()
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
async fn who_stands_by_keeps_no_list_and_looks_at_everything_when_its_turn_comes() {
    let mut cluster = Cluster::with(&["home", "away"]);
    cluster.put(source("home", "colors"));
    cluster.put(companion("away", "orphan-synced").of("home/orphan"));
    let mut stage = Stage::new(cluster, api_server(|_| async { refusal(500, "") }));
    let key = |n: u32| testing::configmap("home", &n.to_string());
    stage.queue.push_all((0..1000).map(key));
    assert_eq!(stage.queue.depth(), 0);

    for _ in 0..2 {
        stage.ours();
        until(|| stage.queue.depth() == 2).await;
        stage.queue.push_all((0..1000).map(key));
        stage.lose().await;
        until(|| stage.queue.depth() == 0).await;
        stage.queue.push_all((0..1000).map(key));
        assert_eq!(stage.queue.depth(), 0);
    }
}

#[tokio::test]
async fn who_no_longer_leads_says_nothing_of_what_stood_in_the_way() {
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
    let mut stage = Stage::new(cluster, client);
    let (_stop, stopped) = watch::channel(false);
    let passes = stage.passes.clone();
    tokio::spawn(async move { passes.work(stopped).await });
    stage.ours();
    asked.notified().await;
    until(|| stage.troubles("malformed") == 1).await;
    stage.metrics.deletes_held.set(1);

    stage.lose().await;
    until(|| stage.troubles("malformed") == 0).await;
    // What was under way when another took over ends badly.
    answered.notify_one();
    stage.passes.finish().await;
    assert_eq!(stage.troubles("invalid"), 0);
    assert_eq!((stage.metrics.deletes_held.get(), stage.metrics.queue_depth.get()), (0, 0));

    // Should it lead again, it begins anew.
    answered.notify_one();
    stage.ours();
    until(|| stage.troubles("malformed") == 1 && stage.troubles("invalid") == 1).await;
}

#[tokio::test(start_paused = true)]
async fn the_election_is_left_before_events_are_written() {
    let mut cluster = Cluster::with(&["home"]);
    cluster.put(source("home", "faulty").annotate("paused", "perhaps"));
    let told = Arc::new(Notify::new());
    let telling = told.clone();
    let client = api_server(move |asked| {
        assert!(asked.uri.contains("/events"), "{}", asked.uri);
        telling.notify_one();
        std::future::pending()
    });
    let ((stop, stopped), left) = (watch::channel(false), Mutex::new(None));
    let leave = async { *left.lock().unwrap() = Some(tokio::time::Instant::now()) };
    let queue = Arc::default();
    let mirror =
        run(client, settings(), shared(cluster), queue, Claim::permanent(), leave, Metrics::new(), stopped);
    let stopping = async {
        told.notified().await;
        stop.send_replace(true);
        tokio::time::Instant::now()
    };
    let (outcome, begun) = tokio::join!(mirror, stopping);
    assert_eq!(outcome, Ok(()));
    assert!(begun.elapsed() >= Duration::from_secs(5), "an Event kept it");
    assert_eq!(left.lock().unwrap().expect("left"), begun);
}
