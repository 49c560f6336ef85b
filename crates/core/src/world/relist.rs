//! The progress of each watch: which list is current, and which of two states is the newer one.

use std::collections::{HashMap, HashSet};

use super::{WatchId, packed::Uid};
use crate::object::{Kind, ObjectKey};

#[derive(Debug, Default)]
pub struct WatchProgress {
    /// Counts the lists of each watch. What the current list and the watch after it did not show is out of date.
    epochs: HashMap<WatchId, u32>,
    /// Lists that have begun and not ended.
    listing: HashSet<WatchId>,
    /// The newest version that the watch of companions has shown. When one of our writes returns an object that is
    /// older and unknown, it was created and deleted already.
    last_seen_version: HashMap<Kind, u64>,
    /// Companions that we deleted or released, until the watch has shown that: its earlier events are out of date.
    tombstones: HashMap<ObjectKey, Tombstone>,
}

/// A companion that we deleted or released.
#[derive(Debug)]
pub struct Tombstone {
    pub uid: Uid,
    /// Whose it was, if we deleted it: a finalizer may keep it, and somebody may have taken its marks.
    pub source: Option<ObjectKey>,
    /// Its marks said that it stays when its source is gone.
    pub keep: bool,
}

impl WatchProgress {
    pub fn epoch(&self, watch: WatchId) -> u32 {
        self.epochs.get(&watch).copied().unwrap_or_default()
    }

    pub fn list_begins(&mut self, watch: WatchId) {
        *self.epochs.entry(watch).or_default() += 1;
        self.listing.insert(watch);
        if let WatchId::Companions(kind) = watch {
            self.last_seen_version.remove(&kind);
            // This list shows every earlier delete, unless etcd was restored: then the object is back.
            self.tombstones.retain(|key, _| key.kind != kind);
        }
    }

    /// A list as of `version` has ended.
    pub fn list_ends(&mut self, watch: WatchId, version: u64) {
        self.listing.remove(&watch);
        if let WatchId::Companions(kind) = watch {
            self.last_seen_version.insert(kind, version);
            self.tombstones.retain(|key, _| key.kind != kind);
        }
    }

    pub fn is_listing(&self, watch: WatchId) -> bool {
        self.listing.contains(&watch)
    }

    pub fn saw_version(&mut self, kind: Kind, version: u64) {
        let last = self.last_seen_version.entry(kind).or_default();
        *last = version.max(*last);
    }

    pub fn has_passed(&self, kind: Kind, version: u64) -> bool {
        self.last_seen_version.get(&kind).is_some_and(|last| version <= *last)
    }

    pub fn add_tombstone(&mut self, key: &ObjectKey, tombstone: Tombstone) {
        self.tombstones.insert(key.clone(), tombstone);
    }

    pub fn tombstone(&self, key: &ObjectKey, uid: &Uid) -> Option<&Tombstone> {
        self.tombstones.get(key).filter(|tombstone| tombstone.uid == *uid)
    }

    pub fn remove_tombstone(&mut self, key: &ObjectKey) {
        self.tombstones.remove(key);
    }
}
