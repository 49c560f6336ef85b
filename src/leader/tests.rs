//! The requests for the Lease, on an API server that answers when the test says.

mod fuzz;

use lockstep_core::lease::record::LeaseRecord;
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use http::Method;
use kube::Client;
use serde_json::{Value, json};
use tokio::sync::Notify;

use super::*;
use crate::{
    clock,
    ops::{health::Readiness, metrics::Metrics},
    testing::captured_logs::CapturedLogs,
};
use lockstep_cluster::{
    testing::api::{ApiRequest, api_server, refusal},
    watch::Restores,
};

const LEASE: Duration = Duration::from_secs(15);

const fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
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
                if is_read {
                    (200, json!({"metadata": metadata, "spec": {"holderIdentity": ""}}))
                } else {
                    refusal(409, "Conflict")
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
    lease: Arc<Mutex<Option<LeaseRecord>>>,
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
        let mut lease: LeaseRecord = serde_json::from_value(asked.body).unwrap();
        let version = |lease: &LeaseRecord| lease.metadata.resource_version.clone();
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
    fn edit(&self, edit: impl FnOnce(&mut LeaseRecord)) {
        let mut known = self.lease.lock().unwrap();
        let lease = known.as_mut().unwrap();
        edit(lease);
        let version = lease.metadata.resource_version.as_ref().unwrap().parse::<u64>().unwrap();
        lease.metadata.resource_version = Some((version + 1).to_string());
    }

    fn holder(&self) -> String {
        self.lease.lock().unwrap().clone().map(|lease| lease.holder).unwrap_or_default()
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
    assert_eq!(lease.holder, "");
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
        start(client, config(), LeaseAnnotations::default(), Restores::default(), metrics, readiness.clone());
    tokio::time::sleep(seconds(60)).await;
    drop(capturing);
    let writes = *writes.lock().unwrap();
    assert!((10..=121).contains(&writes), "{writes} creates in a minute");
    let log = captured.text();
    assert_eq!(log.matches("the namespace home does not exist").count(), 1, "{log}");
    assert!(readiness.is_lease_failing());
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
