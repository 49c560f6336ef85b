//! Follows etcd from the beginning of a history, finds out who made each change, and tells the judge.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use model::{Change, Judge, Key, Kind, Names, Object, Snapshot, Violation, Writer};
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};

use crate::{
    etcd::{Etcd, Stored},
    requests::{Requests, Reviewed, Sender},
};

/// The pause before a broken connection to etcd is opened again.
const RECONNECT_PAUSE: Duration = Duration::from_millis(50);
/// So many of the last changes are kept for the report of a failure.
const MAX_KEPT_CHANGES: usize = 4000;
/// How long a change may take from etcd to the judge.
const CATCH_UP_TIMEOUT: Duration = Duration::from_secs(120);

/// One watch of etcd, for all histories on a control plane.
pub(crate) struct Feed {
    pub etcd: Etcd,
    subscribers: Mutex<Vec<mpsc::UnboundedSender<Message>>>,
    /// Where the watch begins; another value ends it and begins another. There is none during a restore.
    from: watch::Sender<Option<u64>>,
}

#[derive(Clone)]
enum Message {
    Stored(Arc<Stored>, Instant),
    /// What the backup contained, and as of which revision.
    Restored(Arc<Vec<Stored>>, u64),
    MemoryLost,
}

impl Feed {
    pub(crate) async fn start(etcd: Etcd) -> Arc<Self> {
        let revision = etcd.revision().await.expect("etcd answers");
        let feed = Arc::new(Self {
            etcd,
            subscribers: Mutex::default(),
            from: watch::Sender::new(Some(revision + 1)),
        });
        tokio::spawn(feed.clone().run());
        feed
    }

    async fn run(self: Arc<Self>) {
        let mut restarts = self.from.subscribe();
        let mut next = *restarts.borrow_and_update();
        loop {
            let Some(from) = next else {
                drop(restarts.changed().await);
                next = *restarts.borrow_and_update();
                continue;
            };
            let sink = |stored: Stored| {
                next = Some(stored.revision + 1);
                self.send(&Message::Stored(Arc::new(stored), Instant::now()));
            };
            tokio::select! {
                _ = restarts.changed() => next = *restarts.borrow_and_update(),
                ended = self.etcd.watch(from, sink) => {
                    if let Err(error) = &ended
                        && error.to_string().contains("cancelled")
                    {
                        // Changes are lost, so the judge would be wrong.
                        panic!("etcd: {error}");
                    }
                    tokio::time::sleep(RECONNECT_PAUSE).await;
                }
            }
        }
    }

    /// etcd is about to be restored from a backup.
    pub(crate) fn stop(&self) {
        self.from.send_replace(None);
    }

    /// etcd was restored and began with this revision.
    pub(crate) async fn restored(&self, now: u64) {
        let stored = self.etcd.read(now).await.expect("etcd answers");
        self.send(&Message::Restored(Arc::new(stored), now));
        self.from.send_replace(Some(now + 1));
    }

    fn send(&self, message: &Message) {
        let mut subscribers = self.subscribers.lock().expect("no panic");
        subscribers.retain(|subscriber| subscriber.send(message.clone()).is_ok());
    }
}

/// What has happened to the objects of one history.
pub(crate) struct Recorder {
    feed: Arc<Feed>,
    names: Names,
    requests: Arc<Requests>,
    judge: Mutex<Judge>,
    messages: mpsc::UnboundedSender<Message>,
    seen: watch::Sender<u64>,
    changes: Mutex<Vec<String>>,
    /// Violations that the judge does not look for.
    other: Mutex<Vec<Violation>>,
    /// Accepted writes of Lockstep and of people.
    pub lockstep_writes: AtomicU64,
    pub person_writes: AtomicU64,
    /// Companions that a person had changed or deleted, and that Lockstep put right.
    pub heals: AtomicU64,
    /// Who has written an object last.
    last_writers: Mutex<HashMap<Key, Writer>>,
}

impl Recorder {
    pub(crate) fn start(feed: &Arc<Feed>, names: &Names, requests: Arc<Requests>) -> Arc<Self> {
        let (messages, received) = mpsc::unbounded_channel();
        feed.subscribers.lock().expect("no panic").push(messages.clone());
        let recorder = Arc::new(Self {
            feed: feed.clone(),
            names: names.clone(),
            requests,
            judge: Mutex::new(Judge::new(names.clone())),
            messages,
            seen: watch::Sender::new(0),
            changes: Mutex::default(),
            other: Mutex::default(),
            lockstep_writes: AtomicU64::new(0),
            person_writes: AtomicU64::new(0),
            heals: AtomicU64::new(0),
            last_writers: Mutex::default(),
        });
        tokio::spawn(recorder.clone().run(received));
        recorder
    }

    async fn run(self: Arc<Self>, mut messages: mpsc::UnboundedReceiver<Message>) {
        while let Some(message) = messages.recv().await {
            match message {
                Message::Stored(stored, arrived) => {
                    self.record(&stored, arrived).await;
                    self.seen.send_replace(stored.revision);
                }
                Message::Restored(stored, revision) => {
                    let objects = stored.iter().filter_map(|stored| {
                        let key = self.key(&stored.key)?;
                        Some((key, object(stored)?))
                    });
                    let snapshot: Snapshot = objects.collect();
                    self.note(format!("{revision} etcd was restored: {} objects", snapshot.len()));
                    self.judge().restored(snapshot);
                    self.seen.send_replace(revision);
                }
                Message::MemoryLost => {
                    self.note("a replica remembers nothing".to_owned());
                    self.judge().memory_lost();
                }
            }
        }
    }

    async fn record(&self, stored: &Stored, arrived: Instant) {
        if stored.key.starts_with("/registry/events/") {
            self.check_event(stored);
        }
        let Some(key) = self.key(&stored.key) else { return };
        let before = self.judge().now().get(&key).cloned();
        let after = object(stored);
        let deleted = before.as_ref().filter(|_| after.is_none()).map(|before| before.uid.as_str());
        let sender = self.requests.sender_of(&key.path(), stored.revision, deleted, arrived).await;
        let by = match sender {
            Some(Sender::Person(..)) => Writer::Person,
            Some(Sender::Replica(_)) => Writer::Lockstep,
            None => Writer::Kubernetes,
        };
        self.count(&key, by);
        self.note(format!(
            "{} {sender:?} {key}: {}",
            stored.revision,
            summary(before.as_ref(), after.as_ref())
        ));
        let mut judge = self.judge();
        if let Some(Sender::Person(actor, Reviewed::Yes)) = sender {
            judge.accepted(actor, &key, before.as_ref(), after.as_ref());
        }
        judge.record(Change { by, at: key, after });
    }

    fn count(&self, key: &Key, by: Writer) {
        let counter = match by {
            Writer::Lockstep => &self.lockstep_writes,
            Writer::Person => &self.person_writes,
            Writer::Kubernetes => return,
        };
        counter.fetch_add(1, Ordering::Relaxed);
        let last = self.last_writers.lock().expect("no panic").insert(key.clone(), by);
        if (last, by) == (Some(Writer::Person), Writer::Lockstep) {
            self.heals.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// No value is in an Event.
    fn check_event(&self, stored: &Stored) {
        let Some(value) = &stored.value else { return };
        let text = value.to_string();
        if text.contains(&self.names.manager())
            && let Some(token) = model::generate::VALUE_TOKENS.iter().find(|token| text.contains(**token))
        {
            self.violation(format!("an Event contains {token}: {text}"));
        }
    }

    /// The object of the history that etcd stores under a key.
    fn key(&self, stored: &str) -> Option<Key> {
        let parts: Vec<&str> = stored.strip_prefix("/registry/")?.split('/').collect();
        let key = match *parts.as_slice() {
            ["configmaps", namespace, name] => Key::new(Kind::ConfigMap, namespace, name),
            ["secrets", namespace, name] => Key::new(Kind::Secret, namespace, name),
            ["namespaces", name] => Key::namespace(name),
            _ => return None,
        };
        // Kubernetes puts this into every namespace.
        (self.names.contains(&key) && key.name != "kube-root-ca.crt").then_some(key)
    }

    /// A replica has started, or lists everything again.
    pub(crate) fn memory_lost(&self) {
        drop(self.messages.send(Message::MemoryLost));
    }

    pub(crate) fn violation(&self, text: String) {
        self.note(format!("VIOLATION {text}"));
        self.other.lock().expect("no panic").push(Violation(text));
    }

    /// Notes what happened, for the report of a failure.
    pub(crate) fn note(&self, text: String) {
        let mut changes = self.changes.lock().expect("no panic");
        if changes.len() >= MAX_KEPT_CHANGES {
            changes.drain(..MAX_KEPT_CHANGES / 2);
        }
        let now = k8s_openapi::jiff::Timestamp::now();
        changes.push(format!("{now:.3} {text}"));
    }

    /// Waits until the judge knows everything that etcd has stored so far.
    pub(crate) async fn catch_up(&self) {
        let stored = loop {
            match self.feed.etcd.revision().await {
                Ok(revision) => break revision,
                Err(_) => tokio::time::sleep(RECONNECT_PAUSE).await,
            }
        };
        let mut seen = self.seen.subscribe();
        let seen = seen.wait_for(|seen| *seen >= stored);
        if tokio::time::timeout(CATCH_UP_TIMEOUT, seen).await.is_err() {
            panic!("the recorder has not seen revision {stored} within {CATCH_UP_TIMEOUT:?}");
        }
    }

    /// What would be wrong if the cluster stayed as it is.
    pub(crate) async fn unsettled(&self) -> Vec<Violation> {
        self.catch_up().await;
        self.judge().unsettled()
    }

    /// What was wrong at any moment so far.
    pub(crate) fn violations(&self) -> Vec<Violation> {
        let mut violations = self.judge().violations().to_vec();
        violations.extend(self.other.lock().expect("no panic").iter().cloned());
        violations
    }

    pub(crate) fn changes(&self) -> Vec<String> {
        self.changes.lock().expect("no panic").clone()
    }

    pub(crate) fn judge(&self) -> MutexGuard<'_, Judge> {
        self.judge.lock().expect("no panic")
    }
}

fn object(stored: &Stored) -> Option<Object> {
    let mut value = stored.value.clone()?;
    value["metadata"]["resourceVersion"] = json!(stored.revision.to_string());
    Some(Object::from_json(&value))
}

/// What of an object has changed, in one line.
fn summary(before: Option<&Object>, after: Option<&Object>) -> String {
    let fields = |object: &Object| {
        json!({
            "uid": object.uid, "labels": object.labels, "annotations": object.annotations, "data": object.data,
            "binaryData": object.binary_data, "immutable": object.immutable, "terminating": object.terminating,
            "finalizers": object.finalizers, "type": object.type_,
            "owners": object.owners.iter().map(|owner| &owner.name).collect::<Vec<_>>(),
        })
    };
    match (before, after) {
        (_, None) => "deleted".to_owned(),
        (None, Some(after)) => format!("created {}", fields(after)),
        (Some(before), Some(after)) => {
            let (before, after) = (fields(before), fields(after));
            let empty = serde_json::Map::new();
            let changed =
                after.as_object().unwrap_or(&empty).iter().filter(|(key, value)| before[*key] != **value);
            let changed: Vec<String> = changed
                .map(|(key, value): (&String, &Value)| format!("{key} {} -> {value}", before[key]))
                .collect();
            format!("changed {}", changed.join(", "))
        }
    }
}
