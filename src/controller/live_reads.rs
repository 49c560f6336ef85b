//! Payloads that were read from the API server because the world does not keep them.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};

use parking_lot::Mutex;

use lockstep_core::{object::ObjectKey, policy::content::Digest, world::Payload};

/// The payload of one source in the state of this digest, for as long as a write uses it. It is locked while it is
/// read, so that one write reads it for all: a source with a thousand targets is not read a thousand times.
#[derive(Default)]
pub struct LiveRead(Digest, Weak<Payload>);

#[derive(Default)]
pub struct LiveReads(Mutex<HashMap<ObjectKey, Arc<tokio::sync::Mutex<LiveRead>>>>);

impl LiveRead {
    pub fn get(&self, digest: Digest) -> Option<Arc<Payload>> {
        if self.0 == digest { self.1.upgrade() } else { None }
    }

    pub fn set(&mut self, digest: Digest, payload: &Arc<Payload>) {
        *self = Self(digest, Arc::downgrade(payload));
    }

    fn is_used(&self) -> bool {
        self.1.strong_count() > 0
    }
}

impl LiveReads {
    /// What was read of a source. There are no more of these than writes in flight.
    pub fn of(&self, source: &ObjectKey) -> Arc<tokio::sync::Mutex<LiveRead>> {
        let mut reads = self.0.lock();
        reads.retain(|_, read| {
            Arc::strong_count(read) > 1 || read.try_lock().is_ok_and(|read| read.is_used())
        });
        reads.entry(source.clone()).or_default().clone()
    }

    #[cfg(test)]
    pub fn count(&self) -> usize {
        self.0.lock().len()
    }
}
