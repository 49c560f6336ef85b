//! Bounds the memory of all reviews together: their bodies, and what these are parsed into.

use std::time::Duration;

use axum::body::{Body, HttpBody};
use futures::{
    StreamExt,
    future::{AbortHandle, Abortable},
};
use tokio::time::{Instant, timeout_at};

use super::fair_semaphore::{Caller, FairSemaphore, Permits};

/// The longest AdmissionReview of an API server: an old and a new object of 1.5 MiB, the limit of etcd, of which every
/// byte is escaped as six (`\u003c`), and the user.
const MAX_BODY_BYTES: usize = 20 << 20;
/// All bodies together.
const BODIES_BYTES: usize = 32 << 20;
/// What a review takes at least, for as long as it has no answer.
pub const MIN_REVIEW_BYTES: usize = 4 << 10;
/// The most memory that a byte of JSON takes once it is parsed: a map entry such as `"a":"",` becomes two strings in a
/// node of a tree.
const PARSED_BYTES_PER_BYTE: usize = 16;
/// The memory of all parsed reviews, without those that wait for a SubjectAccessReview: these keep only the user. Large
/// ones have a budget of their own, so that no other review waits for them. It suffices for any one:
/// [`parse`](super::wire::parse) refuses objects that take more.
const SMALL_REVIEWS_BYTES: usize = 12 << 20;
const LARGE_REVIEWS_BYTES: usize = 52 << 20;
/// Reviews with longer bodies are large: they are parsed, judged and dropped on a thread of their own.
const MAX_SMALL_BODY_BYTES: usize = 256 << 10;
/// The API server gives up after three seconds, so an answer to a slower body would be too late.
const BODY_TIMEOUT: Duration = Duration::from_secs(3);

/// Why a body was not read.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum BodyError {
    #[error("too many requests at a time: try again")]
    Overloaded,
    #[error("an AdmissionReview has at most {} MiB", MAX_BODY_BYTES >> 20)]
    TooLarge,
    #[error("the body is incomplete")]
    Incomplete,
    #[error("the body did not arrive in time")]
    Late,
}

pub struct ReviewMemory {
    bodies: FairSemaphore,
    small: FairSemaphore,
    large: FairSemaphore,
}

/// A body, and its shares of the memory.
pub struct ReceivedBody {
    pub bytes: Vec<u8>,
    /// Of the body. What is left of it after parsing is that of the user.
    pub share: Permits,
    /// Of what the body is parsed into, without the user.
    pub parsed: Permits,
}

impl Default for ReviewMemory {
    fn default() -> Self {
        Self {
            bodies: FairSemaphore::new(BODIES_BYTES),
            small: FairSemaphore::new(SMALL_REVIEWS_BYTES),
            large: FairSemaphore::new(LARGE_REVIEWS_BYTES),
        }
    }
}

impl ReviewMemory {
    /// For bodies, small reviews and large ones.
    #[cfg(test)]
    pub fn used(&self) -> [usize; 3] {
        [
            BODIES_BYTES - self.bodies.free(),
            SMALL_REVIEWS_BYTES - self.small.free(),
            LARGE_REVIEWS_BYTES - self.large.free(),
        ]
    }

    /// Receives a body, and waits until there is memory to parse it. Until then, it may be given up for bodies of
    /// callers that hold less, and for smaller ones of the same caller: a peer that sends slowly cannot keep others
    /// out.
    pub async fn receive(&self, caller: Caller, body: Body) -> Result<ReceivedBody, BodyError> {
        if body.size_hint().lower() > MAX_BODY_BYTES as u64 {
            return Err(BodyError::TooLarge);
        }
        let deadline = Instant::now() + BODY_TIMEOUT;
        let (give_up, registration) = AbortHandle::new_pair();
        let mut share = self.bodies.revocable(caller.clone(), give_up);
        let receive = async {
            let bytes = timeout_at(deadline, read(body, &mut share)).await.map_err(|_| BodyError::Late)??;
            let (reviews, most) = if is_large(&bytes) {
                (&self.large, LARGE_REVIEWS_BYTES)
            } else {
                (&self.small, SMALL_REVIEWS_BYTES)
            };
            let needed = (bytes.len() * PARSED_BYTES_PER_BYTE).min(most);
            let parsed = timeout_at(deadline, reviews.acquire(caller, needed)).await;
            Ok((bytes, parsed.map_err(|_| BodyError::Overloaded)?))
        };
        match Abortable::new(receive, registration).await {
            Ok(Ok((bytes, parsed))) if share.keep() => Ok(ReceivedBody { bytes, share, parsed }),
            Ok(Err(error)) => Err(error),
            _ => Err(BodyError::Overloaded),
        }
    }
}

/// Reads a body into memory. Its share grows with what has arrived.
async fn read(body: Body, share: &mut Permits) -> Result<Vec<u8>, BodyError> {
    let mut bytes = Vec::new();
    share.grow_to(MIN_REVIEW_BYTES).await;
    let mut chunks = body.into_data_stream();
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(|_| BodyError::Incomplete)?;
        let length = bytes.len() + chunk.len();
        if length > MAX_BODY_BYTES {
            return Err(BodyError::TooLarge);
        }
        share.grow_to(length).await;
        // `Vec` would double its capacity, which no budget counts.
        if bytes.capacity() < length {
            bytes.reserve_exact(chunk.len().max(length / 8));
        }
        bytes.extend_from_slice(&chunk);
    }
    Ok(bytes)
}

impl ReceivedBody {
    /// Whether handling it would keep others waiting.
    pub fn is_large(&self) -> bool {
        is_large(&self.bytes)
    }
}

fn is_large(body: &[u8]) -> bool {
    body.len() > MAX_SMALL_BODY_BYTES
}

#[cfg(test)]
mod tests;
