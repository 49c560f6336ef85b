//! What replicas send to the API server, and what they must never send: a write without the Lease, a write without the
//! version that it was decided on.

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use http::Method;
use model::Names;
use serde_json::Value;

use crate::{
    recorder::Recorder,
    requests::{Answer, Requests, Sender},
};

/// How long a request may take from the moment at which a replica decides to send it until the proxy reads it, on a
/// machine that is busy. It is less than the last third of the Lease, in which nobody may write.
const READING_ERROR: Duration = Duration::from_secs(1);
/// After a pause (SIGSTOP), the requests that were about to be sent are sent.
const AFTER_PAUSE: Duration = Duration::from_millis(300);

/// The traffic of all replicas of one history.
pub(crate) struct Traffic {
    pub requests: Arc<Requests>,
    pub recorder: Arc<Recorder>,
    names: Names,
    lease_duration: Duration,
    election: Mutex<Election>,
    /// Writes of companions that the API server has accepted.
    pub accepted: AtomicU64,
}

/// What the replicas have written into the Lease.
#[derive(Default)]
struct Election {
    /// The replica that wrote it last, unless that released it.
    holder: Option<usize>,
    /// When each replica sent its last renewal that was stored.
    renewed: [Option<Instant>; 2],
    /// When each replica went on after a pause.
    resumed: [Option<Instant>; 2],
}

/// A request of a replica that is no read.
pub(crate) struct Write<'a> {
    traffic: &'a Traffic,
    by: usize,
    sent: Instant,
    kind: Kind<'a>,
    path: String,
}

enum Kind<'a> {
    Companion(crate::requests::Ticket<'a>, Option<String>),
    Lease { holds: bool },
    Other,
}

impl Traffic {
    pub(crate) fn new(
        requests: Arc<Requests>,
        recorder: Arc<Recorder>,
        names: Names,
        lease_duration: Duration,
    ) -> Arc<Self> {
        Arc::new(Self {
            requests,
            recorder,
            names,
            lease_duration,
            election: Mutex::default(),
            accepted: AtomicU64::new(0),
        })
    }

    /// The replica that holds the Lease, as far as anybody knows.
    pub(crate) fn leader(&self) -> Option<usize> {
        let election = self.election.lock().expect("no panic");
        let holder = election.holder?;
        election.renewed[holder].filter(|renewed| renewed.elapsed() < self.lease_duration)?;
        Some(holder)
    }

    pub(crate) fn resumed(&self, replica: usize) {
        self.election.lock().expect("no panic").resumed[replica] = Some(Instant::now());
    }

    /// A new process has another identity: it does not hold the Lease of its predecessor.
    pub(crate) fn started(&self, replica: usize) {
        let mut election = self.election.lock().expect("no panic");
        election.renewed[replica] = None;
        if election.holder == Some(replica) {
            election.holder = None;
        }
    }

    /// A replica sends a request that is no read.
    pub(crate) fn write(&self, by: usize, method: &Method, path: &str, body: &[u8]) -> Write<'_> {
        let sent = Instant::now();
        let json: Value = serde_json::from_slice(body).unwrap_or_default();
        let lease = format!("/leases/{}", self.names.manager());
        let is_lease = path.ends_with(&lease) || (path.ends_with("/leases") && *method == Method::POST);
        let parts: Vec<&str> = path.trim_start_matches('/').split('/').collect();
        let object = match *parts.as_slice() {
            ["api", "v1", "namespaces", namespace, "configmaps" | "secrets", ..]
                if namespace != self.names.own_namespace =>
            {
                match json["metadata"]["name"].as_str().filter(|_| *method == Method::POST) {
                    Some(name) => Some(format!("{path}/{name}")),
                    None => Some(path.to_owned()),
                }
            }
            _ => None,
        };
        let kind = match object {
            Some(object) => {
                let complaint = self.complaint(by, sent);
                self.check_preconditions(by, method, &object, &json);
                Kind::Companion(self.requests.begin(&object, Sender::Replica(by)), complaint)
            }
            None if is_lease => Kind::Lease {
                holds: json["spec"]["holderIdentity"].as_str().is_some_and(|holder| !holder.is_empty()),
            },
            None => Kind::Other,
        };
        Write { traffic: self, by, sent, kind, path: format!("{method} {path}") }
    }

    /// Why a replica may not write companions now.
    fn complaint(&self, by: usize, sent: Instant) -> Option<String> {
        let election = self.election.lock().expect("no panic");
        let Some(renewed) = election.renewed[by] else { return Some("has never held the Lease".to_owned()) };
        let age = sent.saturating_duration_since(renewed);
        if age > self.lease_duration * 2 / 3 + READING_ERROR {
            return Some(format!("has renewed the Lease {age:?} ago"));
        }
        let holder = election.holder?;
        (holder != by).then(|| format!("does not hold the Lease: replica {holder} does"))
    }

    fn check_preconditions(&self, by: usize, method: &Method, path: &str, body: &Value) {
        let has = |value: &Value| value.as_str().is_some_and(|value| !value.is_empty());
        let fine = match *method {
            Method::PATCH => body.as_array().is_some_and(|operations| {
                let names_version =
                    |op: &Value| op["path"] == "/metadata/resourceVersion" && has(&op["value"]);
                operations.iter().any(names_version)
            }),
            Method::DELETE => {
                let preconditions = &body["preconditions"];
                has(&preconditions["uid"]) && has(&preconditions["resourceVersion"])
            }
            Method::POST => true,
            _ => false,
        };
        if !fine {
            self.recorder.violation(format!("replica {by} sends {method} {path} without preconditions"));
        }
    }
}

impl Write<'_> {
    /// The API server has answered, or never will.
    pub(crate) fn end(self, status: Option<u16>, body: &[u8]) {
        let Self { traffic, by, sent, kind, path } = self;
        let accepted = status.is_some_and(|status| status < 300);
        match kind {
            Kind::Companion(ticket, complaint) => {
                let json: Value = serde_json::from_slice(body).unwrap_or_default();
                ticket.end(Answer::read(status, &json));
                traffic.accepted.fetch_add(u64::from(accepted), Ordering::Relaxed);
                traffic.recorder.note(format!("replica {by}: {path}: {status:?}"));
                let Some(complaint) = complaint else { return };
                // A pause between decision and request: preconditions have to stop it.
                let resumed = traffic.election.lock().expect("no panic").resumed[by];
                let was_paused =
                    resumed.is_some_and(|resumed| sent.saturating_duration_since(resumed) < AFTER_PAUSE);
                if accepted || !was_paused {
                    traffic.recorder.violation(format!("replica {by} sends {path} and {complaint}"));
                }
            }
            Kind::Lease { holds } if accepted => {
                let mut election = traffic.election.lock().expect("no panic");
                let before = election.holder;
                election.renewed[by] = holds.then_some(sent);
                election.holder = holds.then_some(by);
                if before != election.holder {
                    traffic.recorder.note(format!("replica {by} leads: {holds}"));
                }
            }
            Kind::Lease { .. } | Kind::Other => {}
        }
    }
}
