//! The loop on an API server that answers as each test says.

use std::sync::{Arc, Mutex};

use serde_json::{Value, json};
use tokio::time::Instant as Clock;

use super::*;
use crate::testing::api::{ApiRequest, api_server, api_server_of_texts, refusal};
use lockstep_core::object::Object;

#[tokio::test]
async fn lists_come_in_small_pages() {
    let asked = Arc::new(Mutex::new(Vec::new()));
    let pages = asked.clone();
    let client = api_server(move |asked: ApiRequest| {
        let pages = pages.clone();
        async move {
            if asked.uri.contains("sendInitialEvents") {
                return refusal(422, "Invalid");
            }
            if asked.uri.contains("watch=true") {
                return std::future::pending().await;
            }
            pages.lock().unwrap().push(asked.uri.clone());
            let (name, token) = if asked.uri.contains("continue=") { ("b", "") } else { ("a", "more") };
            let object = json!({"metadata": {"name": name}, "data": {"k": "v"}});
            (200, json!({"metadata": {"resourceVersion": "7", "continue": token}, "items": [object]}))
        }
    });
    let (sender, mut received) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(run(client, spec(), Restores::default(), move |event: Event<Object>| match event {
        Event::Apply(object) => sender.send(object.metadata.name).unwrap(),
        Event::InitDone(version) => sender.send(version).unwrap(),
        Event::Init | Event::Delete(_) | Event::Bookmark | Event::Undecodable(_) => {}
    }));
    for expected in ["a", "b", "7"] {
        let next = tokio::time::timeout(Duration::from_secs(10), received.recv()).await;
        assert_eq!(next.expect("in time").as_deref(), Some(expected));
    }
    let asked = asked.lock().unwrap();
    let is_small = |uri: &String| uri.split(['?', '&']).any(|parameter| parameter == "limit=50");
    assert!(asked.len() == 2 && asked.iter().all(is_small), "{asked:?}");
}

#[tokio::test(start_paused = true)]
async fn undecodable_object_is_skipped_in_lists_and_watches_and_the_position_advances() {
    let object = |name: &str, version: &str, labels: Value| json!({"metadata": {"name": name, "resourceVersion": version, "labels": labels}});
    let (good, bad) =
        (|name, version| object(name, version, json!({})), |version| object("odd", version, json!(1)));
    for streams in [true, false] {
        let (uris, mut asked) = tokio::sync::mpsc::unbounded_channel();
        let events = [("ADDED", good("a", "1")), ("ADDED", bad("2"))]
            .map(|(kind, object)| json!({"type": kind, "object": object}));
        let end = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata":
            {"resourceVersion": "7", "annotations": {"k8s.io/initial-events-end": "true"}}});
        let streamed =
            format!("{}\n{}\n{}\n", events[0], events[1], json!({"type": "BOOKMARK", "object": end}));
        let listed =
            json!({"metadata": {"resourceVersion": "7"}, "items": [good("a", "1"), bad("2")]}).to_string();
        let changed =
            ["8", "9"].map(|version| json!({"type": "MODIFIED", "object": bad(version)}).to_string());
        let client = api_server_of_texts(move |uri| {
            uris.send(uri.to_owned()).unwrap();
            if uri.contains("sendInitialEvents") {
                return if streams {
                    (200, streamed.clone())
                } else {
                    (422, refusal(422, "Invalid").1.to_string())
                };
            }
            let answer = if uri.contains("watch=true") { changed.join("\n") + "\n" } else { listed.clone() };
            (200, answer)
        });
        let (sender, mut received) = tokio::sync::mpsc::unbounded_channel();
        tokio::spawn(run(client, spec(), Restores::default(), move |event: Event<Object>| {
            let shown = match event {
                Event::Apply(object) => object.metadata.name,
                Event::InitDone(version) => format!("listed {version}"),
                Event::Undecodable(object) => format!("skipped {} {}", object.name, object.resource_version),
                Event::Init | Event::Delete(_) | Event::Bookmark => return,
            };
            drop(sender.send(shown));
        }));
        for expected in ["a", "skipped odd 2", "listed 7", "skipped odd 8", "skipped odd 9"] {
            let next = tokio::time::timeout(Duration::from_secs(10), received.recv()).await;
            assert_eq!(next.expect("in time").as_deref(), Some(expected), "{streams}");
        }
        let resumed = async {
            while let Some(uri) = asked.recv().await {
                if uri.contains("watch=true") && uri.contains("resourceVersion=9") {
                    break;
                }
            }
        };
        tokio::time::timeout(Duration::from_secs(10), resumed)
            .await
            .expect("it resumes after what it skipped");
    }
}

fn spec() -> WatchSpec {
    WatchSpec {
        name: "a test".to_owned(),
        path: "/api/v1/configmaps".to_owned(),
        label_selector: None,
        field_selector: None,
    }
}

/// The first `count` lists and watches of a resource, and when they came. `answer` gets the number of earlier requests
/// and the URI; code 0 is no answer. When the position is checked, the server is at version `at`. Ends after 100 s at
/// the latest.
async fn requests_at(
    at: u64,
    restores: Restores,
    count: usize,
    answer: impl Fn(usize, &str) -> (u16, Value),
) -> Vec<(Clock, String)> {
    let (sender, mut receiver) = tokio::sync::mpsc::unbounded_channel();
    let client = api_server(move |request: ApiRequest| {
        let (reply, answered) = tokio::sync::oneshot::channel();
        sender.send((request.uri, reply)).unwrap();
        async move { answered.await.unwrap() }
    });
    let (mut requests, mut unanswered) = (Vec::new(), Vec::new());
    let serve = async {
        while requests.len() < count {
            let (uri, reply) = receiver.recv().await.unwrap();
            if uri.contains("limit=1") {
                drop(reply.send((200, json!({"metadata": {"resourceVersion": at.to_string()}}))));
                continue;
            }
            match answer(requests.len(), &uri) {
                (0, _) => unanswered.push(reply),
                answer => drop(reply.send(answer)),
            }
            requests.push((Clock::now(), uri));
        }
    };
    tokio::select! {
        biased;
        () = serve => {}
        () = run(client, spec(), restores, |_: Event<Object>| {}) => {}
        () = tokio::time::sleep(Duration::from_secs(100)) => {}
    }
    requests
}

async fn requests(count: usize, answer: impl Fn(usize, &str) -> (u16, Value)) -> Vec<(Clock, String)> {
    requests_at(7, Restores::default(), count, answer).await
}

fn is_list(uri: &str) -> bool {
    uri.contains("sendInitialEvents") || !uri.contains("watch=true")
}

/// A server without streaming lists, whose lists are empty.
fn pages(uri: &str, watch: (u16, Value)) -> (u16, Value) {
    if uri.contains("sendInitialEvents") {
        refusal(422, "Invalid")
    } else if is_list(uri) {
        (200, json!({"metadata": {"resourceVersion": "7"}, "items": []}))
    } else {
        watch
    }
}

#[tokio::test(start_paused = true)]
async fn watches_that_end_at_once_back_off() {
    let requests = requests(6, |_, uri| pages(uri, (200, Value::Null))).await;
    assert!(requests[5].0 - requests[2].0 >= BROKEN_BACKOFF.first * 7 / 2, "{requests:?}");
}

#[tokio::test(start_paused = true)]
async fn expired_versions_back_off_although_each_is_followed_by_a_list() {
    let requests = requests(10, |_, uri| pages(uri, refusal(410, "Expired"))).await;
    let lists: Vec<Clock> =
        requests.iter().skip(1).filter(|(_, uri)| is_list(uri)).map(|(at, _)| *at).collect();
    assert!(lists[3] - lists[0] >= BROKEN_BACKOFF.first * 7 / 2, "{requests:?}");
}

#[tokio::test(start_paused = true)]
async fn expired_version_after_an_outage_is_listed_again_at_once() {
    let requests = requests(13, |n, uri| {
        let watch = if n < 11 { refusal(503, "ServiceUnavailable") } else { refusal(410, "Expired") };
        pages(uri, if n > 1 { watch } else { refusal(422, "Invalid") })
    })
    .await;
    let waits: Vec<Duration> = requests.windows(2).map(|pair| pair[1].0 - pair[0].0).collect();
    assert!(waits.iter().all(|wait| *wait <= REFUSED_BACKOFF.max), "{waits:?}");
    let expired = requests.iter().rposition(|(_, uri)| !is_list(uri)).unwrap();
    assert!(is_list(&requests[expired + 1].1) && waits[expired] <= BROKEN_BACKOFF.first * 2, "{requests:?}");
}

#[tokio::test(start_paused = true)]
async fn watch_that_cannot_be_resumed_is_listed_again_in_the_end() {
    let incomplete = json!({"type": "ADDED", "object": {"metadata": "x"}});
    for answer in [refusal(500, "InternalError"), (200, incomplete)] {
        let requests = requests(20, |_, uri| pages(uri, answer.clone())).await;
        let lists = requests.iter().skip(2).filter(|(_, uri)| is_list(uri)).count();
        assert!((1..=3).contains(&lists), "{requests:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn resource_is_listed_again_when_the_server_is_behind_the_position_of_a_broken_watch() {
    for (at, restored) in [(6, true), (7, false), (8, false)] {
        let restores = Restores::default();
        let requests = requests_at(at, restores.clone(), 5, |n, uri| {
            // A watch from a version that the server has not reached is silent.
            pages(uri, if n == 2 { (200, Value::Null) } else { (0, Value::Null) })
        })
        .await;
        assert_eq!(restores.count(), u64::from(restored), "{at}");
        assert_eq!(requests.iter().skip(2).any(|(_, uri)| is_list(uri)), restored, "{at}: {requests:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn list_that_is_older_than_what_was_seen_is_a_restore() {
    for (second, restored) in [("6", true), ("7", false), ("8", false)] {
        let restores = Restores::default();
        requests_at(99, restores.clone(), 5, |n, uri| match n {
            // The first list as of version 7, an expired watch, and another list.
            3 => (200, json!({"metadata": {"resourceVersion": second}, "items": []})),
            _ => pages(uri, refusal(410, "Expired")),
        })
        .await;
        assert_eq!(restores.count(), u64::from(restored), "{second}");
    }
}

#[tokio::test(start_paused = true)]
async fn signs_of_the_same_restore_are_reported_once() {
    let restores = Restores::default();
    let count = restores.count();
    restores.report(count, "one watch");
    restores.report(count, "another watch");
    assert_eq!(restores.count(), 1);
}
