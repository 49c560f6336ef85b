//! Who has written what: the requests of people and of replicas, and which change of etcd came of each.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard},
    time::{Duration, Instant},
};

use model::Actor;
use serde_json::Value;
use tokio::sync::watch;

/// So many requests for one object are remembered.
const MAX_REMEMBERED: usize = 100;
/// How much later than its failure a request without an answer may still be carried out.
const MAX_LATENESS: Duration = Duration::from_secs(2);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sender {
    /// With the webhook in force, or without it.
    Person(Actor, Reviewed),
    Replica(usize),
}

/// Whether the API server asks the webhook about a request that concerns it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reviewed {
    Yes,
    No,
}

/// Requests that write ConfigMaps, Secrets and Namespaces, by the URL path of the object.
#[derive(Default)]
pub(crate) struct Requests {
    sent: Mutex<HashMap<String, Vec<Sent>>>,
    /// Changes with every answer.
    answered: watch::Sender<u64>,
}

struct Sent {
    id: u64,
    by: Sender,
    began: Instant,
    answer: Option<Answer>,
    ended: Option<Instant>,
}

/// What became of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Answer {
    /// It has changed nothing.
    Refused,
    /// It has stored the object as of this revision.
    Stored(u64),
    /// It has deleted the object with this UID.
    Deleted(String),
    /// Nobody knows: the API server has not answered, or not with what it did.
    Unknown,
}

impl Answer {
    /// Reads the answer of the API server; `None` if there is none.
    pub(crate) fn read(status: Option<u16>, body: &Value) -> Self {
        let version = body["metadata"]["resourceVersion"].as_str().and_then(|version| version.parse().ok());
        match (status, version, body["details"]["uid"].as_str()) {
            (Some(200..300), Some(version), _) => Self::Stored(version),
            (Some(200..300), None, Some(uid)) => Self::Deleted(uid.to_owned()),
            (Some(400..500), ..) => Self::Refused,
            (Some(500), ..) if body["message"].as_str().is_some_and(|text| text.contains("webhook")) => {
                Self::Refused
            }
            _ => Self::Unknown,
        }
    }
}

/// A request that has no answer yet. If it is dropped, its outcome is unknown.
pub(crate) struct Ticket<'a> {
    requests: &'a Requests,
    path: String,
    id: u64,
}

impl Requests {
    /// Notes a request that is about to be sent.
    pub(crate) fn begin(&self, path: &str, by: Sender) -> Ticket<'_> {
        static NEXT: std::sync::atomic::AtomicU64 = std::sync::atomic::AtomicU64::new(0);
        let id = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let mut sent = self.sent();
        let sent = sent.entry(path.to_owned()).or_default();
        if sent.len() >= MAX_REMEMBERED {
            sent.remove(0);
        }
        sent.push(Sent { id, by, began: Instant::now(), answer: None, ended: None });
        Ticket { requests: self, path: path.to_owned(), id }
    }

    /// Who has stored this object as of this revision, or has deleted the object that had this UID; `None` if it was
    /// neither a person nor a replica. Waits for the answers to requests that began before this change `arrived`.
    pub(crate) async fn sender_of(
        &self,
        path: &str,
        revision: u64,
        deleted: Option<&str>,
        arrived: Instant,
    ) -> Option<Sender> {
        let mut answered = self.answered.subscribe();
        loop {
            answered.mark_unchanged();
            if let Ok(sender) = self.known_sender_of(path, revision, deleted, arrived) {
                return sender;
            }
            drop(answered.changed().await);
        }
    }

    /// An error if an answer may still come.
    fn known_sender_of(
        &self,
        path: &str,
        revision: u64,
        deleted: Option<&str>,
        arrived: Instant,
    ) -> Result<Option<Sender>, ()> {
        let mut all = self.sent();
        let Some(sent) = all.get_mut(path) else { return Ok(None) };
        let did = |answer: &Option<Answer>| match answer {
            Some(Answer::Stored(stored)) => *stored == revision,
            Some(Answer::Deleted(uid)) => deleted == Some(uid),
            _ => false,
        };
        // An update that changes nothing is answered with the revision of the change before: the first one made it.
        if let Some(found) = sent.iter().find(|sent| did(&sent.answer)) {
            return Ok(Some(found.by));
        }
        if sent.iter().any(|sent| sent.answer.is_none() && sent.began <= arrived) {
            return Err(());
        }
        let is_likely = |sent: &&mut Sent| {
            let late =
                sent.ended.is_some_and(|ended| arrived.saturating_duration_since(ended) > MAX_LATENESS);
            sent.answer == Some(Answer::Unknown) && sent.began <= arrived && !late
        };
        Ok(sent.iter_mut().find(is_likely).map(|unknown| {
            unknown.answer = Some(Answer::Refused);
            match unknown.by {
                Sender::Person(actor, _) => Sender::Person(actor, Reviewed::No),
                replica @ Sender::Replica(_) => replica,
            }
        }))
    }

    /// Forgets all answers: after a restore, etcd counts the same revisions again.
    pub(crate) fn forget(&self) {
        self.sent().values_mut().for_each(|sent| sent.retain(|sent| sent.answer.is_none()));
    }

    fn sent(&self) -> MutexGuard<'_, HashMap<String, Vec<Sent>>> {
        self.sent.lock().expect("no panic")
    }
}

impl Ticket<'_> {
    pub(crate) fn end(self, answer: Answer) {
        self.settle(answer);
    }

    fn settle(&self, answer: Answer) {
        let mut sent = self.requests.sent();
        let found = sent.get_mut(&self.path).and_then(|sent| sent.iter_mut().find(|sent| sent.id == self.id));
        if let Some(sent) = found.filter(|sent| sent.answer.is_none()) {
            sent.answer = Some(answer);
            sent.ended = Some(Instant::now());
        }
        drop(sent);
        self.requests.answered.send_modify(|answers| *answers += 1);
    }
}

impl Drop for Ticket<'_> {
    fn drop(&mut self) {
        self.settle(Answer::Unknown);
    }
}
