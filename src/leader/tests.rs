//! The decision on fixed times, and the requests on an API server that answers when the test says.

mod fuzz;

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use http::Method;
use proptest::prelude::*;
use serde_json::{Value, json};
use tokio::sync::Notify;

use super::*;
use crate::testing::{
    CapturedLogs,
    api::{ApiRequest, api_server, refusal},
};

const LEASE: Duration = Duration::from_secs(15);

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// A record that was written last by its holder, as this version.
fn record(holder: &str, version: u64) -> LeaseRecord {
    LeaseRecord {
        holder: holder.to_owned(),
        duration: LEASE,
        transitions: 0,
        acquire_time: None,
        renew_time: Timestamp::from_second(i64::try_from(version).unwrap()).ok().map(MicroTime),
        metadata: ObjectMeta { resource_version: Some(version.to_string()), ..ObjectMeta::default() },
    }
}

fn action(lease: &ObservedLease, now: Instant) -> LeaseAction {
    decide("me", lease, LEASE, now)
}

#[test]
fn missing_lease_is_created() {
    assert_eq!(action(&ObservedLease::default(), Instant::now()), LeaseAction::Create);
}

#[test]
fn released_lease_is_acquired_at_once() {
    let now = Instant::now();
    let mut lease = ObservedLease::default();
    lease.observe(Some(record("", 1)), now);
    assert_eq!(action(&lease, now), LeaseAction::Acquire);
}

#[test]
fn lease_of_another_is_acquired_when_unchanged_for_its_duration() {
    let start = Instant::now();
    let mut lease = ObservedLease::default();
    lease.observe(Some(record("other", 1)), start);
    assert_eq!(action(&lease, start), LeaseAction::Wait(seconds(1)));
    // Observing it again unchanged does not restart the clock.
    lease.observe(Some(record("other", 1)), start + seconds(10));
    assert_eq!(
        action(&lease, start + Duration::from_millis(14_500)),
        LeaseAction::Wait(Duration::from_millis(500))
    );
    assert_eq!(action(&lease, start + seconds(15)), LeaseAction::Acquire);
    // A renewal restarts it.
    lease.observe(Some(record("other", 2)), start + seconds(15));
    assert_eq!(action(&lease, start + seconds(15)), LeaseAction::Wait(seconds(1)));
}

#[test]
fn lease_of_a_dead_leader_expires_although_somebody_annotates_it_every_second() {
    let start = Instant::now();
    let mut lease = ObservedLease::default();
    for second in 0..15 {
        assert!(second == 0 || matches!(action(&lease, start + seconds(second)), LeaseAction::Wait(_)));
        let annotated = record("other", 2 + second).metadata;
        lease.observe(
            Some(LeaseRecord { metadata: annotated, ..record("other", 1) }),
            start + seconds(second),
        );
    }
    assert_eq!(action(&lease, start + seconds(15)), LeaseAction::Acquire);
    let (known, _) = lease.record.unwrap();
    assert_eq!(known.metadata, record("other", 16).metadata, "otherwise the write would conflict");
}

#[test]
fn lease_expires_after_the_duration_that_its_holder_set() {
    let start = Instant::now();
    let mut lease = ObservedLease::default();
    lease.observe(Some(LeaseRecord { duration: seconds(60), ..record("other", 1) }), start);
    assert_eq!(action(&lease, start + seconds(59)), LeaseAction::Wait(seconds(1)));
    assert_eq!(action(&lease, start + seconds(60)), LeaseAction::Acquire);
}

#[test]
fn own_lease_is_renewed_after_a_third_of_its_duration() {
    let start = Instant::now();
    let mut lease = ObservedLease::default();
    lease.written(record("me", 1), start, start + seconds(1));
    assert_eq!(action(&lease, start + seconds(1)), LeaseAction::Wait(seconds(4)));
    assert_eq!(action(&lease, start + seconds(5)), LeaseAction::Renew);
}

#[test]
fn own_lease_without_a_known_renewal_is_renewed_at_once() {
    let now = Instant::now();
    let mut lease = ObservedLease::default();
    lease.observe(Some(record("me", 1)), now);
    assert_eq!(action(&lease, now), LeaseAction::Renew);
}

#[tokio::test]
async fn claim_expires_by_itself() {
    let (sender, receiver) = watch::channel(None);
    let mut claim = Claim(receiver);
    assert!(!claim.is_held());
    sender.send_replace(Some(Instant::now() + Duration::from_hours(1)));
    claim.acquired().await;
    assert!(claim.is_held());
    sender.send_replace(Some(Instant::now() + Duration::from_millis(30)));
    claim.lost().await;
    assert!(!claim.is_held());
    assert!(Claim::permanent().is_held());
}

#[test]
fn deleted_lease_stays_with_its_holder_for_its_duration() {
    let start = Instant::now();
    let mut lease = ObservedLease::default();
    lease.observe(Some(record("other", 1)), start);
    lease.observe(None, start + seconds(9));
    lease.observe(None, start + seconds(20));
    assert_eq!(action(&lease, start + seconds(23)), LeaseAction::Wait(seconds(1)));
    assert_eq!(action(&lease, start + seconds(24)), LeaseAction::Create);
    // The holder has created it again.
    lease.observe(Some(record("other", 3)), start + seconds(23));
    assert_eq!(action(&lease, start + seconds(24)), LeaseAction::Wait(seconds(1)));
    // A released Lease has no holder to wait for.
    lease.observe(Some(record("", 4)), start + seconds(25));
    lease.observe(None, start + seconds(26));
    assert_eq!(action(&lease, start + seconds(26)), LeaseAction::Create);
}

#[test]
fn deleted_lease_is_created_again_by_its_holder_unless_another_may_have_held_it_since() {
    let start = Instant::now();
    let mut lease = ObservedLease::default();
    lease.written(record("me", 1), start, start);
    lease.observe(None, start + seconds(14));
    assert_eq!(action(&lease, start + seconds(14)), LeaseAction::Create);
    assert_eq!(action(&lease, start + seconds(15)), LeaseAction::Wait(seconds(1)));
    assert_eq!(action(&lease, start + seconds(29)), LeaseAction::Create);
}

#[test]
fn conflicts_are_retried_at_once_and_then_ever_later_but_often_enough_to_keep_the_claim() {
    for lease in [seconds(1), LEASE] {
        let pauses: Vec<Duration> = (1..1_000).map(|conflicts| conflict_pause(conflicts, lease)).collect();
        assert_eq!(pauses[0], Duration::ZERO);
        assert!(pauses.is_sorted() && pauses[998] >= Duration::from_millis(100));
        // From the time at which a renewal is due until the claim expires.
        assert!(pauses[..5].iter().sum::<Duration>() < lease / 3);
    }
}

#[tokio::test(start_paused = true)]
async fn lease_that_somebody_writes_all_the_time_is_not_asked_for_in_a_hot_loop() {
    let requests = Arc::new(Mutex::new(0));
    let client = api_server({
        let requests = requests.clone();
        move |asked: ApiRequest| {
            let mut count = requests.lock().unwrap();
            *count += 1;
            let (is_read, count) = (asked.method == Method::GET, *count);
            async move {
                // Without a pause, the clock of this test would stand still.
                if count > 1_000 {
                    std::future::pending::<()>().await;
                }
                let metadata = json!({
                    "name": "lockstep",
                    "resourceVersion": count.to_string(),
                    "annotations": {"theirs": count.to_string()},
                });
                match is_read {
                    true => (200, json!({"metadata": metadata, "spec": {"holderIdentity": ""}})),
                    false => refusal(409, "Conflict"),
                }
            }
        }
    });
    let annotations = LeaseAnnotations::default();
    let (_claim, _election) =
        start(client, config(), annotations.clone(), Restores::default(), Metrics::new(), Readiness::new([]));
    // Every change of the annotations is answered.
    let answers = tokio::spawn(async move {
        let mut observed = annotations.observed();
        while observed.changed().await.is_ok() {
            annotations.set("ours", observed.borrow_and_update().get("theirs").cloned());
        }
    });
    tokio::time::sleep(seconds(60)).await;
    answers.abort();
    let requests = *requests.lock().unwrap();
    assert!((100..=500).contains(&requests), "{requests} requests in a minute");
}

#[tokio::test(start_paused = true)]
async fn leader_keeps_its_claim_although_somebody_annotates_the_lease_during_every_pause() {
    let state = Arc::new(Mutex::new((0, None)));
    let client = api_server(move |asked: ApiRequest| {
        let (requests, read) = &mut *state.lock().unwrap();
        *requests += 1;
        let lease = |mut lease: Value| {
            lease["metadata"]["resourceVersion"] = json!(requests.to_string());
            (200, lease)
        };
        let answer = match asked.method {
            Method::GET if *requests == 1 => refusal(404, "NotFound"),
            Method::GET => {
                *read = Some(clock::now());
                lease(json!({"metadata": {"name": "lockstep"}, "spec": {"holderIdentity": "me"}}))
            }
            // The first renewal has bad luck several times.
            Method::PUT if *requests < 14 => refusal(409, "Conflict"),
            Method::PUT if read.is_none_or(|read| read < clock::now()) => refusal(409, "Conflict"),
            _ => lease(asked.body),
        };
        async { answer }
    });
    let (annotations, metrics) = (LeaseAnnotations::default(), Metrics::new());
    let (mut claim, _election) =
        start(client, config(), annotations, Restores::default(), metrics, Readiness::new([]));
    claim.acquired().await;
    let lost = tokio::time::timeout(seconds(60), claim.lost()).await;
    assert!(lost.is_err(), "the claim was lost");
}

#[tokio::test]
async fn lease_deleted_while_another_replica_acquires_it_is_not_created_at_once() {
    let (sender, mut created) = tokio::sync::mpsc::unbounded_channel();
    let deleted = Arc::new(Mutex::new(None));
    let client = api_server(move |asked: ApiRequest| {
        let mut deleted = deleted.lock().unwrap();
        let answer = match (asked.method, *deleted) {
            (Method::GET, None) => (
                200,
                json!({
                    "metadata": {"name": "lockstep", "resourceVersion": "7"},
                    "spec": {"holderIdentity": "another", "leaseDurationSeconds": 1},
                }),
            ),
            (Method::PUT, _) => {
                *deleted = Some(Instant::now());
                refusal(409, "Conflict")
            }
            (Method::POST, Some(deleted)) => {
                sender.send(deleted.elapsed()).unwrap();
                refusal(403, "Forbidden")
            }
            _ => refusal(404, "NotFound"),
        };
        async { answer }
    });
    let (metrics, readiness) = (Metrics::new(), Readiness::new([]));
    let (_claim, _election) =
        start(client, config(), LeaseAnnotations::default(), Restores::default(), metrics, readiness);
    let waited = tokio::time::timeout(seconds(30), created.recv()).await.expect("a Lease").unwrap();
    assert!(waited >= seconds(1), "created {waited:?} after the deletion");
}

/// An API server with one Lease, which answers a write when the test says.
#[derive(Clone, Default)]
struct LeaseServer {
    lease: Arc<Mutex<Option<Lease>>>,
    arrived: Arc<Notify>,
    answered: Arc<Notify>,
}

impl LeaseServer {
    fn client(&self) -> Client {
        let server = self.clone();
        api_server(move |asked| server.clone().answer(asked))
    }

    async fn answer(self, asked: ApiRequest) -> (u16, Value) {
        if asked.method == Method::GET {
            return match &*self.lease.lock().unwrap() {
                Some(lease) => (200, json!(lease)),
                None => refusal(404, "NotFound"),
            };
        }
        let mut lease: Lease = serde_json::from_value(asked.body).unwrap();
        let version = |lease: &Lease| lease.metadata.resource_version.clone();
        {
            let mut known = self.lease.lock().unwrap();
            if known.as_ref().and_then(version) != version(&lease) {
                return refusal(409, "Conflict");
            }
            let next = version(&lease).map_or(1, |version| version.parse::<u64>().unwrap() + 1);
            lease.metadata.resource_version = Some(next.to_string());
            *known = Some(lease.clone());
        }
        self.arrived.notify_one();
        self.answered.notified().await;
        (200, json!(lease))
    }

    /// Somebody else changes the Lease.
    fn edit(&self, edit: impl FnOnce(&mut Lease)) {
        let mut known = self.lease.lock().unwrap();
        let lease = known.as_mut().unwrap();
        edit(lease);
        let version = lease.metadata.resource_version.as_ref().unwrap().parse::<u64>().unwrap();
        lease.metadata.resource_version = Some((version + 1).to_string());
    }

    fn holder(&self) -> String {
        self.lease
            .lock()
            .unwrap()
            .clone()
            .map(|lease| LeaseRecord::from(LeaseObject(lease)).holder)
            .unwrap_or_default()
    }
}

fn config() -> ElectionConfig {
    ElectionConfig {
        namespace: "home".to_owned(),
        name: "lockstep".to_owned(),
        identity: "me".to_owned(),
        lease_duration: LEASE,
        restore_annotation: "restored".to_owned(),
        published: BTreeMap::new(),
    }
}

#[tokio::test]
async fn leader_writes_annotations_at_once_and_observes_those_of_others_with_its_next_renewal() {
    let server = LeaseServer::default();
    let annotations = LeaseAnnotations::default();
    let config = ElectionConfig { lease_duration: seconds(1), ..config() };
    let (_claim, _election) = start(
        server.client(),
        config,
        annotations.clone(),
        Restores::default(),
        Metrics::new(),
        Readiness::new([]),
    );
    let answers = tokio::spawn({
        let server = server.clone();
        async move {
            loop {
                server.arrived.notified().await;
                server.answered.notify_one();
            }
        }
    });
    let mut observed = annotations.observed();
    annotations.set("ours", Some("1".to_owned()));
    let pairs = |pairs: &[(&str, &str)]| pairs.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
    observed.wait_for(|found| *found == pairs(&[("ours", "1")])).await.unwrap();
    annotations.set("ours", Some("2".to_owned()));
    observed.wait_for(|found| *found == pairs(&[("ours", "2")])).await.unwrap();

    // Somebody else annotates the Lease: the next renewal conflicts, and the claim is kept.
    server.edit(|lease| {
        lease.metadata.annotations.get_or_insert_default().insert("theirs".to_owned(), "x".to_owned());
    });
    observed.wait_for(|found| *found == pairs(&[("ours", "2"), ("theirs", "x")])).await.unwrap();
    annotations.set("ours", None);
    observed.wait_for(|found| *found == pairs(&[("theirs", "x")])).await.unwrap();
    assert_eq!(server.holder(), "me");
    answers.abort();
}

#[tokio::test]
async fn lease_that_somebody_annotated_is_released_with_their_annotation_and_ours() {
    let server = LeaseServer::default();
    let annotations = LeaseAnnotations::default();
    let (mut claim, election) = start(
        server.client(),
        config(),
        annotations.clone(),
        Restores::default(),
        Metrics::new(),
        Readiness::new([]),
    );
    let answers = tokio::spawn({
        let server = server.clone();
        async move {
            loop {
                server.arrived.notified().await;
                server.answered.notify_one();
            }
        }
    });
    claim.acquired().await;
    server.edit(|lease| {
        lease.metadata.annotations.get_or_insert_default().insert("theirs".to_owned(), "x".to_owned());
    });
    annotations.set("ours", Some("1".to_owned()));
    tokio::time::timeout(seconds(10), election.release()).await.expect("in time");
    answers.abort();
    let lease = server.lease.lock().unwrap().clone().unwrap();
    let kept: Vec<String> = lease.metadata.annotations.clone().unwrap_or_default().into_keys().collect();
    assert_eq!(kept, ["ours", "theirs"]);
    assert_eq!(LeaseRecord::from(LeaseObject(lease)).holder, "");
}

#[tokio::test(start_paused = true)]
async fn standby_observes_annotations_and_writes_none() {
    let server = LeaseServer::default();
    let held = json!({
        "metadata": {"name": "lockstep", "resourceVersion": "7", "annotations": {"theirs": "x"}},
        "spec": {"holderIdentity": "another", "leaseDurationSeconds": 600},
    });
    *server.lease.lock().unwrap() = Some(serde_json::from_value(held).unwrap());
    let annotations = LeaseAnnotations::default();
    annotations.set("ours", Some("1".to_owned()));
    let (_claim, _election) = start(
        server.client(),
        config(),
        annotations.clone(),
        Restores::default(),
        Metrics::new(),
        Readiness::new([]),
    );
    let mut observed = annotations.observed();
    observed.wait_for(|found| found.contains_key("theirs")).await.unwrap();
    server.edit(|lease| lease.metadata.annotations = None);
    observed.wait_for(|found| found.is_empty()).await.unwrap();
    assert!(annotations.wanted().is_empty());
}

#[tokio::test(start_paused = true)]
async fn lease_without_its_namespace_is_asked_for_at_a_pace_and_named_in_the_log() {
    let writes = Arc::new(Mutex::new(0));
    let client = api_server({
        let writes = writes.clone();
        move |asked: ApiRequest| {
            *writes.lock().unwrap() += i32::from(asked.method == Method::POST);
            async { refusal(404, "NotFound") }
        }
    });
    let (metrics, readiness) = (Metrics::new(), Readiness::new([]));
    let captured = CapturedLogs::default();
    let capturing = captured.start("info");
    let (_claim, _election) =
        start(client, config(), LeaseAnnotations::default(), Restores::default(), metrics.clone(), readiness);
    tokio::time::sleep(seconds(60)).await;
    drop(capturing);
    let writes = *writes.lock().unwrap();
    assert!((10..=121).contains(&writes), "{writes} creates in a minute");
    let log = captured.text();
    assert_eq!(log.matches("the namespace home does not exist").count(), 1, "{log}");
    assert_eq!(metrics.lease_failing.get(), 1);
}

#[test]
fn older_lease_is_the_sign_of_a_restore() {
    let lease = |version: u64, transitions, holder: &str, renewed: i64| LeaseRecord {
        transitions,
        renew_time: Some(MicroTime(Timestamp::from_second(renewed).unwrap())),
        ..record(holder, version)
    };
    let known = lease(50, 3, "me", 100);
    for (found, restored) in [
        (known.clone(), false),
        // Annotated by somebody else, or taken by another replica whose clock is behind.
        (lease(51, 3, "me", 100), false),
        (lease(51, 4, "other", 10), false),
        // A write of ours that got no answer.
        (lease(51, 3, "me", 105), false),
        (lease(40, 3, "me", 90), true),
        // Versions have overtaken.
        (lease(60, 3, "me", 90), true),
        (lease(60, 2, "other", 200), true),
    ] {
        assert_eq!(sign_of_restore("me", &known, &found).is_some(), restored, "{found:?}");
    }
    // A Lease that was deleted and created again begins at zero.
    let recreated = LeaseRecord {
        metadata: ObjectMeta { uid: Some("new".to_owned()), ..record("other", 60).metadata },
        ..lease(60, 0, "other", 200)
    };
    assert_eq!(sign_of_restore("me", &known, &recreated), None);
}

#[tokio::test]
async fn restore_is_announced_by_the_leader_and_noticed_once_by_a_standby() {
    let server = LeaseServer::default();
    let replica = |identity: &str, annotations: LeaseAnnotations| {
        let config = ElectionConfig { identity: identity.to_owned(), lease_duration: seconds(5), ..config() };
        let restores = Restores::default();
        let running =
            start(server.client(), config, annotations, restores.clone(), Metrics::new(), Readiness::new([]));
        (restores, running)
    };
    let answers = tokio::spawn({
        let server = server.clone();
        async move {
            loop {
                server.arrived.notified().await;
                server.answered.notify_one();
            }
        }
    });
    let (written, seen) = (LeaseAnnotations::default(), LeaseAnnotations::default());
    let (leader, mut running) = replica("me", written.clone());
    running.0.acquired().await;
    let (standby, _running) = replica("another", seen.clone());
    let standby_reads = async |key: &str| {
        written.set(key, Some(String::new()));
        seen.observed().wait_for(|found| found.contains_key(key)).await.unwrap();
    };
    standby_reads("before").await;
    leader.report(0, "a test");
    standby.subscribe().wait_for(|count| *count == 1).await.unwrap();
    standby_reads("after").await;
    assert_eq!((leader.count(), standby.count()), (1, 1));
    answers.abort();
}

#[tokio::test(start_paused = true)]
async fn restore_noticed_by_a_standby_is_announced_when_it_leads_unless_the_leader_was_first() {
    for announced_by_leader in [false, true] {
        let server = LeaseServer::default();
        let held = json!({
            "metadata": {"name": "lockstep", "resourceVersion": "7"},
            "spec": {"holderIdentity": "gone", "leaseDurationSeconds": 5},
        });
        *server.lease.lock().unwrap() = Some(serde_json::from_value(held).unwrap());
        server.answered.notify_one();
        let (annotations, restores) = (LeaseAnnotations::default(), Restores::default());
        let (metrics, readiness) = (Metrics::new(), Readiness::new([]));
        let (mut claim, _election) =
            start(server.client(), config(), annotations.clone(), restores.clone(), metrics, readiness);
        let read = async |key: &str| {
            let theirs = BTreeMap::from([(key.to_owned(), "theirs".to_owned())]);
            server.edit(|lease| lease.metadata.annotations = Some(theirs));
            annotations.observed().wait_for(|found| found.contains_key(key)).await.unwrap();
        };
        read("before").await;
        restores.report(0, "a test");
        if announced_by_leader {
            read("restored").await;
        }
        claim.acquired().await;
        let announced = server.lease.lock().unwrap().clone().unwrap().metadata.annotations.unwrap();
        let announced = announced.get("restored").map(String::as_str);
        assert_eq!((announced == Some("theirs"), announced.is_some()), (announced_by_leader, true));
    }
}

#[tokio::test]
async fn lease_written_while_stopping_is_released() {
    let server = LeaseServer::default();
    let (_claim, election) = start(
        server.client(),
        config(),
        LeaseAnnotations::default(),
        Restores::default(),
        Metrics::new(),
        Readiness::new([]),
    );
    server.arrived.notified().await;
    assert_eq!(server.holder(), "me");
    let answers = async {
        server.answered.notify_one();
        server.arrived.notified().await;
        server.answered.notify_one();
    };
    tokio::select! {
        biased;
        ((), ()) = async { tokio::join!(election.release(), answers) } => {}
        () = tokio::time::sleep(seconds(10)) => {}
    }
    assert_eq!(server.holder(), "");
}

proptest! {
    /// Two candidates read and write one Lease in any order and with any delays, and the Lease is deleted or annotated
    /// now and then. As on an API server, a write succeeds only with the latest resourceVersion.
    #[test]
    fn two_replicas_never_hold_a_claim_at_once(
        turns in proptest::collection::vec((0..2usize, 0..6000u64, 0..3000u64, 0..10u8), 1..200),
    ) {
        let start = Instant::now();
        let mut now = start;
        let mut stored: Option<LeaseRecord> = None;
        let mut observed = [ObservedLease::default(), ObservedLease::default()];
        let mut deadline = [start, start];
        let mut versions = 0;
        for (index, pause, delay, incident) in turns {
            // A candidate that has never observed the Lease cannot wait for its holder.
            let known = |lease: &ObservedLease| lease.record.as_ref().map(|(record, _)| record) == stored.as_ref();
            if incident == 0 && observed.iter().all(known) {
                stored = None;
            }
            if let Some(stored) = stored.as_mut().filter(|_| incident == 1) {
                versions += 1;
                stored.metadata = record("", versions).metadata;
            }
            now += Duration::from_millis(pause);
            let name = ["a", "b"][index];
            let leads = observed[index].record.as_ref().is_some_and(|(record, _)| record.holder == name && !record.is_deleted());
            if !leads {
                observed[index].observe(stored.clone(), now);
            }
            let action = decide(name, &observed[index], LEASE, now);
            if !matches!(action, LeaseAction::Wait(_)) {
                // The write arrives after a delay, in which nobody else acts.
                let (sent, known) = (now, observed[index].record.clone().map(|(record, _)| record));
                now += Duration::from_millis(delay);
                if action != LeaseAction::Create && known != stored {
                    observed[index].observe(stored.clone(), now);
                    continue;
                }
                prop_assert!(action != LeaseAction::Create || stored.is_none());
                versions += 1;
                let written = record(name, versions);
                stored = Some(written.clone());
                observed[index].written(written, sent, now);
                deadline[index] = renew_deadline(sent, LEASE);
                prop_assert!(deadline[1 - index] <= now, "{} writes while the other may", name);
            }
        }
    }
}
