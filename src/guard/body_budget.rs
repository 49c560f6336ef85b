//! Reads request bodies within a budget of bytes. When the budget is used up, the body that has been incomplete for
//! longest is given up, so peers that send slowly cannot keep others out.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use axum::body::{Body, HttpBody};
use futures::StreamExt;
use tokio::sync::Notify;

use super::fair_semaphore::{Caller, FairSemaphore, Permits};

/// The longest AdmissionReview of an API server: an old and a new object of 1.5 MiB, the limit of etcd, of which every
/// byte is escaped as six (`\u003c`), and the user.
pub const MAX_BODY_BYTES: usize = 20 << 20;
/// All bodies together.
const TOTAL_BUDGET_BYTES: usize = 32 << 20;
const BYTES_PER_PERMIT: usize = 1 << 10;

/// Why a body was not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BodyError {
    #[error("too many requests at a time: try again")]
    Overloaded,
    #[error("an AdmissionReview has at most {} MiB", MAX_BODY_BYTES >> 20)]
    TooLarge,
    #[error("the body is incomplete")]
    Incomplete,
}

/// A body, and its share of the budget.
pub struct ReservedBody {
    pub bytes: Vec<u8>,
    pub reservation: Reservation,
}

/// A share of a budget, until it is dropped.
pub struct Reservation(Permits);

pub struct BodyBudget {
    permits: FairSemaphore,
    /// Incomplete bodies, the oldest first. One that is removed from its slot is given up.
    incomplete: Mutex<BTreeMap<u64, Arc<Slot>>>,
    next_id: AtomicU64,
}

struct Slot {
    body: Mutex<Option<ReservedBody>>,
    given_up: Notify,
}

struct IncompleteBody<'a> {
    budget: &'a BodyBudget,
    caller: Caller,
    id: u64,
    slot: Arc<Slot>,
    bytes: usize,
    reserved_permits: usize,
}

impl Default for BodyBudget {
    fn default() -> Self {
        Self::new(TOTAL_BUDGET_BYTES)
    }
}

impl BodyBudget {
    fn new(bytes: usize) -> Self {
        Self {
            permits: FairSemaphore::new(bytes / BYTES_PER_PERMIT),
            incomplete: Mutex::default(),
            next_id: AtomicU64::default(),
        }
    }

    /// Reads a body into memory. Its share of the budget grows with what has arrived.
    pub async fn read(&self, caller: Caller, body: Body) -> Result<ReservedBody, BodyError> {
        if body.size_hint().lower() > MAX_BODY_BYTES as u64 {
            return Err(BodyError::TooLarge);
        }
        let mut incomplete = self.begin(caller).await;
        let mut chunks = body.into_data_stream();
        while let Some(chunk) = chunks.next().await {
            incomplete.add(&chunk.map_err(|_| BodyError::Incomplete)?).await?;
        }
        incomplete.slot.body().take().ok_or(BodyError::Overloaded)
    }

    #[cfg(test)]
    pub fn free_bytes(&self) -> usize {
        self.permits.free() * BYTES_PER_PERMIT
    }

    async fn begin(&self, caller: Caller) -> IncompleteBody<'_> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let reservation = Reservation(self.reserve(&caller, id, 1).await);
        let body = Mutex::new(Some(ReservedBody { bytes: Vec::new(), reservation }));
        let slot = Arc::new(Slot { body, given_up: Notify::new() });
        self.incomplete().insert(id, slot.clone());
        IncompleteBody { budget: self, caller, id, slot, bytes: 0, reserved_permits: 1 }
    }

    /// Reserves a share of the budget. If need be, incomplete bodies that began before this one are given up for it;
    /// complete ones are waited for. So the only incomplete body that waits is the oldest one: two never wait for each
    /// other.
    async fn reserve(&self, caller: &Caller, id: u64, permits: usize) -> Permits {
        loop {
            if let Some(permits) = self.permits.try_acquire(caller.clone(), permits) {
                return permits;
            }
            let older = {
                let mut incomplete = self.incomplete();
                let oldest = incomplete.first_entry().filter(|oldest| *oldest.key() < id);
                oldest.map(|oldest| oldest.remove())
            };
            match older {
                Some(slot) => {
                    drop(slot.body().take());
                    slot.given_up.notify_one();
                }
                None => return self.permits.acquire(caller.clone(), permits).await,
            }
        }
    }

    fn incomplete(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<Slot>>> {
        self.incomplete.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl IncompleteBody<'_> {
    async fn add(&mut self, chunk: &[u8]) -> Result<(), BodyError> {
        self.bytes += chunk.len();
        if self.bytes > MAX_BODY_BYTES {
            return Err(BodyError::TooLarge);
        }
        let missing = self.bytes.div_ceil(BYTES_PER_PERMIT).saturating_sub(self.reserved_permits);
        let permits = tokio::select! {
            biased;
            // If it still waited, it would hold up the body for which it was given up.
            () = self.slot.given_up.notified() => return Err(BodyError::Overloaded),
            permits = self.budget.reserve(&self.caller, self.id, missing) => permits,
        };
        self.reserved_permits += missing;
        let mut body = self.slot.body();
        let body = body.as_mut().ok_or(BodyError::Overloaded)?;
        body.reservation.0.merge(permits);
        // `Vec` would double its capacity, which no budget counts.
        if body.bytes.capacity() - body.bytes.len() < chunk.len() {
            body.bytes.reserve_exact(chunk.len().max(self.bytes / 8));
        }
        body.bytes.extend_from_slice(chunk);
        Ok(())
    }
}

impl Slot {
    fn body(&self) -> MutexGuard<'_, Option<ReservedBody>> {
        self.body.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for IncompleteBody<'_> {
    fn drop(&mut self) {
        self.budget.incomplete().remove(&self.id);
    }
}

impl Reservation {
    /// Gives back all but the share of so many bytes.
    pub fn shrink_to(&mut self, bytes: usize) {
        self.0.shrink_to(bytes.div_ceil(BYTES_PER_PERMIT));
    }
}

#[cfg(test)]
mod tests;
