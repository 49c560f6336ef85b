//! A steady stream of admission requests and of changes, of which none may be lost.

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use kube::Client;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::{
    harness::{configmap, eventually},
    installation::Installation,
};

const SOURCES: u32 = 10;
/// Rests between two requests, so that others on this machine get their turn.
const PACE: Duration = Duration::from_millis(20);

/// Runs until [`Traffic::end`].
pub struct Traffic {
    namespace: String,
    stop: Arc<AtomicBool>,
    edits: Arc<AtomicU32>,
    refusals: JoinHandle<Tally>,
    changes: JoinHandle<Tally>,
}

/// How many requests there were, and those that did not end as they must.
#[derive(Debug, Default)]
pub struct Tally {
    pub requests: u32,
    pub failures: Vec<String>,
}

impl Traffic {
    /// Edits a companion, which must be refused every time, and changes sources, which must be allowed every time.
    pub async fn start(installed: &Installation, name: &str) -> Self {
        let namespace = installed.cluster.namespace(name).await;
        for n in 0..SOURCES {
            installed.source(&namespace, &format!("s{n}"), json!({"turn": "none"})).await;
        }
        for n in 0..SOURCES {
            installed.cluster.wait_data(&namespace, &format!("s{n}-synced"), json!({"turn": "none"})).await;
        }
        let stop = Arc::new(AtomicBool::new(false));
        let client = installed.cluster.client.clone();
        let edit = configmap(&namespace, "s0-synced") + "?dryRun=All";
        let edits = Arc::new(AtomicU32::new(0));
        let refusals = spawn(&stop, {
            let (client, edits) = (client.clone(), edits.clone());
            move |n| {
                let (client, path, edits) = (client.clone(), edit.clone(), edits.clone());
                async move {
                    // Never what the source happens to say: an edit that changes nothing is allowed.
                    let edit = json!({"data": {"turn": format!("edit {n}")}});
                    let answer = patch(client, &path, &edit).await;
                    edits.fetch_add(1, Ordering::Relaxed);
                    match answer {
                        Err(kube::Error::Api(status)) if status.code == 403 => None,
                        other => Some(format!("edit {n}: {}", outcome(other))),
                    }
                }
            }
        });
        let sources = namespace.clone();
        let changes = spawn(&stop, move |n| {
            let (client, path) = (client.clone(), configmap(&sources, &format!("s{}", n % SOURCES)));
            async move {
                match patch(client, &path, &json!({"data": {"turn": n.to_string()}})).await {
                    Ok(_) => None,
                    other => Some(format!("change {n}: {}", outcome(other))),
                }
            }
        });
        Self { namespace, stop, edits, refusals, changes }
    }

    /// Goes on for so many edits.
    pub async fn go_on(&self, edits: u32) {
        let end = self.edits.load(Ordering::Relaxed) + edits;
        eventually("the stream goes on", || async {
            (self.edits.load(Ordering::Relaxed) >= end).then_some(())
        })
        .await;
    }

    /// Stops, waits until every companion holds the last change of its source, and returns what became of the edits and
    /// of the changes.
    pub async fn end(self, installed: &Installation) -> [Tally; 2] {
        self.stop.store(true, Ordering::Relaxed);
        let tallies = [self.refusals.await.expect("edits"), self.changes.await.expect("changes")];
        for n in 0..SOURCES {
            let source =
                installed.cluster.configmap(&self.namespace, &format!("s{n}")).await.expect("a source");
            installed
                .cluster
                .wait_data(&self.namespace, &format!("s{n}-synced"), source["data"].clone())
                .await;
        }
        tallies
    }
}

/// Makes one request after the other until it is told to stop.
fn spawn<F, R>(stop: &Arc<AtomicBool>, request: F) -> JoinHandle<Tally>
where
    F: Fn(u32) -> R + Send + 'static,
    R: Future<Output = Option<String>> + Send,
{
    let stop = stop.clone();
    tokio::spawn(async move {
        let mut tally = Tally::default();
        while !stop.load(Ordering::Relaxed) {
            tally.failures.extend(request(tally.requests).await);
            tally.requests += 1;
            tokio::time::sleep(PACE).await;
        }
        tally
    })
}

async fn patch(client: Client, path: &str, body: &Value) -> kube::Result<Value> {
    let request = http::Request::builder()
        .method("PATCH")
        .uri(path)
        .header("content-type", "application/merge-patch+json")
        .body(body.to_string().into_bytes())
        .expect("a request");
    client.request(request).await
}

fn outcome(result: kube::Result<Value>) -> String {
    match result {
        Ok(_) => "allowed".to_owned(),
        Err(kube::Error::Api(status)) => format!("{} {}", status.code, status.message),
        Err(error) => error.to_string(),
    }
}
