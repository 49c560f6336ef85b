//! A steady stream of admission requests and of source changes.

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
/// The time between two requests, so that other processes on this machine get CPU time.
const REQUEST_INTERVAL: Duration = Duration::from_millis(20);

/// Runs until [`Traffic::stop`].
pub(crate) struct Traffic {
    namespace: String,
    stop: Arc<AtomicBool>,
    edits: Arc<AtomicU32>,
    refusals: JoinHandle<Tally>,
    changes: JoinHandle<Tally>,
}

/// The number of requests, and descriptions of those with an unexpected outcome.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub requests: u32,
    pub failures: Vec<String>,
}

impl Traffic {
    /// Starts to edit a companion, which must be refused, and to change sources, which must be allowed.
    pub(crate) async fn start(installation: &Installation, name: &str) -> Self {
        let namespace = installation.cluster.namespace(name).await;
        for n in 0..SOURCES {
            installation.source(&namespace, &format!("s{n}"), json!({"turn": "none"})).await;
        }
        for n in 0..SOURCES {
            installation
                .cluster
                .wait_data(&namespace, &format!("s{n}-synced"), json!({"turn": "none"}))
                .await;
        }
        let stop = Arc::new(AtomicBool::new(false));
        let client = installation.cluster.client.clone();
        let edit = configmap(&namespace, "s0-synced") + "?dryRun=All";
        let edits = Arc::new(AtomicU32::new(0));
        let refusals = spawn(&stop, {
            let (client, edits) = (client.clone(), edits.clone());
            move |n| {
                let (client, path, edits) = (client.clone(), edit.clone(), edits.clone());
                async move {
                    // The text differs from the source's: an edit that changes nothing is allowed.
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

    /// Waits for this many more edits.
    pub(crate) async fn wait_edits(&self, edits: u32) {
        let end = self.edits.load(Ordering::Relaxed) + edits;
        eventually("more edits", || async { (self.edits.load(Ordering::Relaxed) >= end).then_some(()) })
            .await;
    }

    /// Stops, waits until every companion equals its source, and returns the tallies of the edits and of the changes.
    pub(crate) async fn stop(self, installation: &Installation) -> [Tally; 2] {
        self.stop.store(true, Ordering::Relaxed);
        let tallies = [self.refusals.await.expect("edits"), self.changes.await.expect("changes")];
        for n in 0..SOURCES {
            let source =
                installation.cluster.configmap(&self.namespace, &format!("s{n}")).await.expect("a source");
            installation
                .cluster
                .wait_data(&self.namespace, &format!("s{n}-synced"), source["data"].clone())
                .await;
        }
        tallies
    }
}

/// Makes one request after the other until `stop` is set.
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
            tokio::time::sleep(REQUEST_INTERVAL).await;
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
