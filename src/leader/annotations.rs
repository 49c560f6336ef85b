//! The annotations of the Lease, in which people and the leader write what every replica should know.

use std::collections::BTreeMap;

use tokio::sync::watch;

use lockstep_core::lease::record::LeaseRecord;

/// The annotations as this replica last observed them, and what the leader wants to write to them.
///
/// A standby observes them about every second, the leader when it renews the Lease or writes them.
#[derive(Clone, Default)]
pub struct LeaseAnnotations {
    observed: watch::Sender<BTreeMap<String, String>>,
    /// Changes for the leader's next write; `None` removes an annotation.
    wanted: watch::Sender<Changes>,
}

pub type Changes = BTreeMap<String, Option<String>>;

impl LeaseAnnotations {
    /// All annotations of the Lease; empty until it has been read.
    pub fn observed(&self) -> watch::Receiver<BTreeMap<String, String>> {
        self.observed.subscribe()
    }

    /// Sets an annotation, or removes it with `None`, in a write that the leader sends at once. A replica that is not
    /// the leader writes nothing, and forgets the change when it reads the Lease of another; only the announcement of a
    /// restore waits until it leads.
    pub fn set(&self, key: &str, value: Option<String>) {
        self.wanted.send_modify(|wanted| {
            wanted.insert(key.to_owned(), value);
        });
    }

    pub fn observe(&self, annotations: Option<&BTreeMap<String, String>>) {
        let found = annotations.cloned().unwrap_or_default();
        self.observed.send_if_modified(|known| {
            let changed = *known != found;
            *known = found;
            changed
        });
    }

    /// The changes to write.
    pub fn wanted(&self) -> Changes {
        self.wanted.borrow().clone()
    }

    /// Wakes up when there is something to write.
    pub(super) fn wakes(&self) -> watch::Receiver<Changes> {
        self.wanted.subscribe()
    }

    /// Forgets these changes, unless they were replaced by others meanwhile.
    pub(super) fn done(&self, changes: &Changes) {
        self.wanted.send_if_modified(|wanted| {
            wanted.retain(|key, value| changes.get(key) != Some(value));
            false
        });
    }
}

/// Applies changes to the annotations of a Lease.
pub(super) fn annotate(lease: &mut LeaseRecord, changes: impl IntoIterator<Item = (String, Option<String>)>) {
    let annotations = lease.metadata.annotations.get_or_insert_default();
    for (key, value) in changes {
        if let Some(value) = value {
            annotations.insert(key, value);
        } else {
            annotations.remove(&key);
        }
    }
}
