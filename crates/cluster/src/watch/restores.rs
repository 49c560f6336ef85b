//! Restores of etcd from a backup, on which every watch lists again.
//!
//! A restore takes versions back, and answers of the API server do not tell one etcd from another. A watch from a
//! version that the restored etcd has not reached yet stays silent. When writes have overtaken that version, the watch
//! goes on, and what happened in between is never shown. There are three signs of a restore:
//!
//! - a consistent list as of a version below one that was seen of the same resource: the watch compares them when a
//!   resource is listed, and asks for one object before it resumes after a broken connection;
//! - a Lease that is older than it was, which shows even when versions have overtaken (`lease::election` in core);
//! - the annotation of the Lease by which the leader tells the other replicas (`leader::candidate` in the binary).

use std::fmt::Display;

use tokio::sync::watch;

/// Counts the restores that this process has noticed. All clones share the count.
#[derive(Clone, Debug, Default)]
pub struct Restores(watch::Sender<u64>);

impl Restores {
    /// The number of restores so far, for [`Self::report`].
    pub fn count(&self) -> u64 {
        *self.0.borrow()
    }

    /// Makes every watch list again, unless another sign was reported since there were `count` restores.
    pub fn report(&self, count: u64, sign: impl Display) {
        let new = self.0.send_if_modified(|noticed| {
            let new = *noticed == count;
            *noticed += u64::from(new);
            new
        });
        if new {
            tracing::warn!("etcd was restored from a backup ({sign}): everything is listed again");
        }
    }

    /// Changes with each restore.
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.0.subscribe()
    }
}
