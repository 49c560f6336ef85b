//! What the page shows now, and its changes for everybody who looks.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use k8s_openapi::jiff::Timestamp;
use serde::Serialize;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, broadcast};

use super::{
    activity::{Activity, Entry},
    replicas::Counts,
    rows::{self, Changes, Rows},
};
use crate::inspect::instance::InstanceSummary;
use lockstep_core::lease::hold::HeldDeletes;

/// How many changes wait for a page that is slow. One that misses some is told everything anew.
const MAX_WAITING: usize = 256;
/// How many pages may be open.
const MAX_VIEWERS: usize = 16;

/// The cluster and the replicas.
#[derive(Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClusterView {
    /// As in `kubectl --context prod`.
    pub kubectl: String,
    pub domain: String,
    pub namespace: String,
    #[serde(flatten)]
    pub instance: InstanceSummary,
    /// The replica whose metrics say that it leads.
    pub leading_replica: Option<String>,
    /// Deletes that look like an accident.
    pub held: Option<HeldDeletes>,
    /// The first of the certificates that replicas serve with to expire.
    pub leaf_expires: Option<Timestamp>,
    /// Since the replicas were started; none if their metrics cannot be read.
    pub denials: Option<Counts>,
    pub heals: Option<u64>,
    /// What this person may not see, and what else they should know.
    pub notes: Vec<String>,
    /// Why the API server does not answer.
    pub unreachable: Option<String>,
}

/// One message of the stream.
#[derive(Clone)]
pub struct Update {
    pub name: &'static str,
    pub data: Arc<str>,
}

pub struct Feed {
    state: Mutex<FeedState>,
    updates: broadcast::Sender<Update>,
    viewers: Arc<Semaphore>,
}

#[derive(Default, Serialize)]
struct FeedState {
    #[serde(skip)]
    rows: Rows,
    namespaces: Vec<String>,
    cluster: ClusterView,
    activity: Activity,
}

/// Everything that there is to show.
#[derive(Serialize)]
struct Everything<'a> {
    sources: Changes<'a>,
    #[serde(flatten)]
    state: &'a FeedState,
}

/// Somebody who looks.
pub struct Viewer {
    pub updates: broadcast::Receiver<Update>,
    _permit: OwnedSemaphorePermit,
}

impl Default for Feed {
    fn default() -> Self {
        Self {
            state: Mutex::default(),
            updates: broadcast::Sender::new(MAX_WAITING),
            viewers: Arc::new(Semaphore::new(MAX_VIEWERS)),
        }
    }
}

impl Feed {
    /// Begins to follow the changes; none if too many do so already.
    pub fn view(&self) -> Option<Viewer> {
        let permit = self.viewers.clone().try_acquire_owned().ok()?;
        Some(Viewer { updates: self.updates.subscribe(), _permit: permit })
    }

    /// Everything. A change that a viewer is told before it may be told again: that does no harm.
    pub fn everything(&self) -> Update {
        let (state, nothing) = (self.lock(), Rows::new());
        let sources = rows::change(&nothing, &state.rows);
        Update::new("everything", &Everything { sources, state: &state })
    }

    pub fn set_rows(&self, now: Rows) {
        let mut state = self.lock();
        let change = rows::change(&state.rows, &now);
        if !change.is_empty() {
            self.send("sources", &change);
            state.rows = now;
        }
    }

    pub fn set_namespaces(&self, now: Vec<String>) {
        self.set("namespaces", |state| &mut state.namespaces, now);
    }

    pub fn set_cluster(&self, now: ClusterView) {
        self.set("cluster", |state| &mut state.cluster, now);
    }

    fn set<T: PartialEq + Serialize>(&self, name: &'static str, field: fn(&mut FeedState) -> &mut T, now: T) {
        let mut state = self.lock();
        let known = field(&mut state);
        if *known != now {
            self.send(name, &now);
            *known = now;
        }
    }

    pub fn add(&self, entry: Entry) {
        let mut state = self.lock();
        if state.activity.add(entry.clone()) {
            self.send("activity", &entry);
        }
    }

    fn send(&self, name: &'static str, value: &impl Serialize) {
        // Nobody may be looking.
        if self.updates.receiver_count() > 0 {
            let _ = self.updates.send(Update::new(name, value));
        }
    }

    fn lock(&self) -> MutexGuard<'_, FeedState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Update {
    fn new(name: &'static str, value: &impl Serialize) -> Self {
        // JSON escapes line breaks, which would end a message.
        Self { name, data: serde_json::to_string(value).unwrap_or_default().into() }
    }
}

impl Viewer {
    /// The next change, or everything if some were missed. None at the end of the process.
    pub async fn next(&mut self, feed: &Feed) -> Option<Update> {
        match self.updates.recv().await {
            Ok(update) => Some(update),
            Err(broadcast::error::RecvError::Lagged(_)) => {
                self.updates = self.updates.resubscribe();
                Some(feed.everything())
            }
            Err(broadcast::error::RecvError::Closed) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn viewer_who_misses_changes_is_told_everything() {
        let feed = Feed::default();
        let mut viewer = feed.view().unwrap();
        feed.set_namespaces(vec!["a".to_owned()]);
        assert_eq!(viewer.next(&feed).await.unwrap().name, "namespaces");
        for n in 0..=MAX_WAITING {
            feed.set_namespaces(vec![n.to_string()]);
        }
        let update = viewer.next(&feed).await.unwrap();
        assert_eq!(update.name, "everything");
        assert!(update.data.contains(r#""namespaces":["256"]"#), "{}", update.data);
        feed.set_namespaces(vec!["b".to_owned()]);
        assert_eq!(viewer.next(&feed).await.unwrap().data.as_ref(), r#"["b"]"#);
    }

    #[test]
    fn number_of_viewers_is_bounded() {
        let feed = Feed::default();
        let mut viewers: Vec<Viewer> = (0..MAX_VIEWERS).filter_map(|_| feed.view()).collect();
        assert_eq!(viewers.len(), MAX_VIEWERS);
        assert!(feed.view().is_none());
        viewers.pop();
        assert!(feed.view().is_some());
    }
}
