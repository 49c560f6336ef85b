//! Reads request bodies within a memory budget. When the budget is used up, the body that has been incomplete
//! for longest is given up, so peers that send slowly cannot keep others out.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use axum::body::{Body, HttpBody};
use futures::StreamExt;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// A legal AdmissionReview has an old and a new object with escaped strings: it can be far larger than one
/// object.
pub const MAX_BODY_BYTES: usize = 32 << 20;
/// Estimated memory of one body, parsed.
const MAX_BODY_COST_BYTES: usize = 48 << 20;
/// Estimated memory of all bodies together.
const TOTAL_BUDGET_BYTES: usize = 96 << 20;
/// The most memory that one element of a list or map takes once parsed: `{}` becomes an owner reference of
/// four strings.
const BYTES_PER_ELEMENT: usize = 128;
/// The memory that one permit of the semaphore represents.
const BYTES_PER_PERMIT: usize = 1 << 10;

/// Why a body was not read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum BodyError {
    #[error("too many requests at a time: try again")]
    Overloaded,
    #[error("an AdmissionReview has at most {} MiB, and fewer elements than this one", MAX_BODY_BYTES >> 20)]
    TooLarge,
    #[error("the body is incomplete")]
    Incomplete,
}

/// A body, and its share of the budget.
pub struct ReservedBody {
    pub bytes: Vec<u8>,
    pub reservation: Reservation,
}

/// A share of the budget, until it is dropped.
pub struct Reservation(OwnedSemaphorePermit);

pub struct BodyBudget {
    permits: Arc<Semaphore>,
    /// Incomplete bodies, the oldest first. One that is removed from its slot is given up.
    incomplete: Mutex<BTreeMap<u64, Arc<Slot>>>,
    next_id: AtomicU64,
}

type Slot = Mutex<Option<ReservedBody>>;

struct IncompleteBody<'a> {
    budget: &'a BodyBudget,
    id: u64,
    slot: Arc<Slot>,
    cost: CostEstimate,
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
            permits: Arc::new(Semaphore::new(bytes / BYTES_PER_PERMIT)),
            incomplete: Mutex::default(),
            next_id: AtomicU64::default(),
        }
    }

    /// Reads a body into memory. Its share of the budget grows with what has arrived.
    pub async fn read(&self, body: Body) -> Result<ReservedBody, BodyError> {
        if body.size_hint().lower() > MAX_BODY_BYTES as u64 {
            return Err(BodyError::TooLarge);
        }
        let mut incomplete = self.begin()?;
        let mut chunks = body.into_data_stream();
        while let Some(chunk) = chunks.next().await {
            incomplete.add(&chunk.map_err(|_| BodyError::Incomplete)?)?;
        }
        incomplete.slot().take().ok_or(BodyError::Overloaded)
    }

    #[cfg(test)]
    pub fn free_bytes(&self) -> usize {
        self.permits.available_permits() * BYTES_PER_PERMIT
    }

    fn begin(&self) -> Result<IncompleteBody<'_>, BodyError> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let reservation = Reservation(self.reserve(id, 1)?);
        let slot = Arc::new(Mutex::new(Some(ReservedBody { bytes: Vec::new(), reservation })));
        self.incomplete().insert(id, slot.clone());
        Ok(IncompleteBody { budget: self, id, slot, cost: CostEstimate::default(), reserved_permits: 1 })
    }

    /// Reserves a share of the budget. If need be, incomplete bodies that began before this one are given up
    /// for it.
    fn reserve(&self, id: u64, permits: usize) -> Result<OwnedSemaphorePermit, BodyError> {
        let permits = u32::try_from(permits).map_err(|_| BodyError::TooLarge)?;
        loop {
            if let Ok(permit) = self.permits.clone().try_acquire_many_owned(permits) {
                return Ok(permit);
            }
            let mut incomplete = self.incomplete();
            let oldest = incomplete.first_entry().filter(|oldest| *oldest.key() < id);
            let slot = oldest.ok_or(BodyError::Overloaded)?.remove();
            drop(incomplete);
            drop(slot.lock().unwrap_or_else(PoisonError::into_inner).take());
        }
    }

    fn incomplete(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<Slot>>> {
        self.incomplete.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl IncompleteBody<'_> {
    fn add(&mut self, chunk: &[u8]) -> Result<(), BodyError> {
        self.cost.add(chunk);
        if self.cost.bytes > MAX_BODY_BYTES || self.cost.total_bytes() > MAX_BODY_COST_BYTES {
            return Err(BodyError::TooLarge);
        }
        let needed = self.cost.total_bytes().div_ceil(BYTES_PER_PERMIT);
        let missing = needed.saturating_sub(self.reserved_permits);
        let permit = self.budget.reserve(self.id, missing)?;
        self.reserved_permits += missing;
        let mut slot = self.slot();
        let body = slot.as_mut().ok_or(BodyError::Overloaded)?;
        body.reservation.0.merge(permit);
        body.bytes.extend_from_slice(chunk);
        Ok(())
    }

    fn slot(&self) -> MutexGuard<'_, Option<ReservedBody>> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
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
        let surplus = self.0.num_permits().saturating_sub(bytes.div_ceil(BYTES_PER_PERMIT));
        drop(self.0.split(surplus));
    }
}

/// Estimates the memory that JSON takes once it is parsed.
#[derive(Default)]
struct CostEstimate {
    bytes: usize,
    /// Commas outside of strings: one fewer than a list or map has elements.
    commas: usize,
    in_string: bool,
    escaped: bool,
}

impl CostEstimate {
    fn add(&mut self, chunk: &[u8]) {
        self.bytes += chunk.len();
        for byte in chunk {
            match byte {
                _ if self.escaped => self.escaped = false,
                b'"' => self.in_string = !self.in_string,
                b'\\' if self.in_string => self.escaped = true,
                b',' if !self.in_string => self.commas += 1,
                _ => {}
            }
        }
    }

    fn total_bytes(&self) -> usize {
        self.bytes + self.commas * BYTES_PER_ELEMENT
    }
}

#[cfg(test)]
mod tests;
