//! Bodies on their way in: together they may weigh so much, and when that is used up, the one that has taken longest
//! makes room. So a peer that sends slowly keeps nobody else out.

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

/// A legal review holds an old and a new object, escaped: that can be far more than one object may be.
pub const MOST_BYTES: usize = 32 << 20;
/// What one body may weigh, and all together.
const MOST_WEIGHT: usize = 48 << 20;
const BUDGET: usize = 96 << 20;
/// What a part weighs once it is read, at most: `{}` becomes an owner reference with four strings.
const PART: usize = 128;
/// Permits are for so many bytes each.
const UNIT: usize = 1 << 10;

/// Why a body was not taken in.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    #[error("too much at a time: try again")]
    Crowded,
    #[error("a review has at most {} MiB, and fewer parts than this", MOST_BYTES >> 20)]
    TooLarge,
    #[error("the body broke off")]
    BrokenOff,
}

/// A body, and what is paid for it until it is dropped.
pub struct Load {
    pub bytes: Vec<u8>,
    pub paid: Paid,
}

/// A share of the budget.
pub struct Paid(OwnedSemaphorePermit);

pub struct Intake {
    budget: Arc<Semaphore>,
    /// What is coming in, by age. Taken out, a body is lost.
    coming: Mutex<BTreeMap<u64, Arc<Slot>>>,
    next: AtomicU64,
}

type Slot = Mutex<Option<Load>>;

/// A body on its way in.
struct Coming<'a> {
    intake: &'a Intake,
    id: u64,
    slot: Arc<Slot>,
    scale: Scale,
    paid: usize,
}

impl Default for Intake {
    fn default() -> Self {
        Self::new(BUDGET)
    }
}

impl Intake {
    fn new(budget: usize) -> Self {
        Self {
            budget: Arc::new(Semaphore::new(budget / UNIT)),
            coming: Mutex::default(),
            next: AtomicU64::default(),
        }
    }

    /// Reads a body into memory. It is paid for as it comes, so that who sends little holds little.
    pub async fn read(&self, body: Body) -> Result<Load, Unfit> {
        if body.size_hint().lower() > MOST_BYTES as u64 {
            return Err(Unfit::TooLarge);
        }
        let mut coming = self.open()?;
        let mut chunks = body.into_data_stream();
        while let Some(chunk) = chunks.next().await {
            coming.add(&chunk.map_err(|_| Unfit::BrokenOff)?)?;
        }
        coming.slot().take().ok_or(Unfit::Crowded)
    }

    /// How many bytes could still come in.
    #[cfg(test)]
    pub fn free(&self) -> usize {
        self.budget.available_permits() * UNIT
    }

    fn open(&self) -> Result<Coming<'_>, Unfit> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        let paid = Paid(self.pay(id, 1)?);
        let slot = Arc::new(Mutex::new(Some(Load { bytes: Vec::new(), paid })));
        self.coming().insert(id, slot.clone());
        Ok(Coming { intake: self, id, slot, scale: Scale::default(), paid: 1 })
    }

    /// Takes a share of the budget, if need be from bodies that began before this one.
    fn pay(&self, id: u64, units: usize) -> Result<OwnedSemaphorePermit, Unfit> {
        let units = u32::try_from(units).map_err(|_| Unfit::TooLarge)?;
        loop {
            if let Ok(permit) = self.budget.clone().try_acquire_many_owned(units) {
                return Ok(permit);
            }
            let mut coming = self.coming();
            let oldest = coming.first_entry().filter(|oldest| *oldest.key() < id).ok_or(Unfit::Crowded)?;
            let slot = oldest.remove();
            drop(coming);
            drop(slot.lock().unwrap_or_else(PoisonError::into_inner).take());
        }
    }

    fn coming(&self) -> MutexGuard<'_, BTreeMap<u64, Arc<Slot>>> {
        self.coming.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Coming<'_> {
    fn add(&mut self, chunk: &[u8]) -> Result<(), Unfit> {
        self.scale.add(chunk);
        if self.scale.bytes > MOST_BYTES || self.scale.weight() > MOST_WEIGHT {
            return Err(Unfit::TooLarge);
        }
        let due = self.scale.weight().div_ceil(UNIT).saturating_sub(self.paid);
        let permit = self.intake.pay(self.id, due)?;
        self.paid += due;
        let mut slot = self.slot();
        let load = slot.as_mut().ok_or(Unfit::Crowded)?;
        load.paid.0.merge(permit);
        load.bytes.extend_from_slice(chunk);
        Ok(())
    }

    fn slot(&self) -> MutexGuard<'_, Option<Load>> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Coming<'_> {
    fn drop(&mut self) {
        self.intake.coming().remove(&self.id);
    }
}

impl Paid {
    /// Gives back all but what so many bytes cost.
    pub fn keep(&mut self, bytes: usize) {
        let surplus = self.0.num_permits().saturating_sub(bytes.div_ceil(UNIT));
        drop(self.0.split(surplus));
    }
}

/// Weighs JSON while it comes.
#[derive(Default)]
struct Scale {
    bytes: usize,
    /// Commas outside of strings: lists and maps have one more entry than that.
    parts: usize,
    in_string: bool,
    escaped: bool,
}

impl Scale {
    fn add(&mut self, chunk: &[u8]) {
        self.bytes += chunk.len();
        for byte in chunk {
            match byte {
                _ if self.escaped => self.escaped = false,
                b'"' => self.in_string = !self.in_string,
                b'\\' if self.in_string => self.escaped = true,
                b',' if !self.in_string => self.parts += 1,
                _ => {}
            }
        }
    }

    fn weight(&self) -> usize {
        self.bytes + self.parts * PART
    }
}

#[cfg(test)]
mod tests;
