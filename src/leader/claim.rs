//! The claim: what everything that writes asks before it writes.

use std::time::{Duration, Instant};

use tokio::sync::watch;

use crate::clock;

/// The right to write. It expires by itself; each renewal of the Lease extends it.
#[derive(Clone)]
pub struct Claim(watch::Receiver<Option<Instant>>);

impl Claim {
    /// A claim without an election: for `--no-leader-elect`.
    pub fn permanent() -> Self {
        // Thirty years, because an `Instant` cannot be infinite.
        let deadline = clock::now() + Duration::from_hours(24 * 365 * 30);
        // A receiver keeps the last value after its sender is dropped.
        Self(watch::channel(Some(deadline)).1)
    }

    /// A claim that is never held: for `--no-controller`.
    pub fn never() -> Self {
        Self(watch::channel(None).1)
    }

    /// A claim until the deadline that was sent last.
    pub const fn from_receiver(receiver: watch::Receiver<Option<Instant>>) -> Self {
        Self(receiver)
    }

    /// Whether this replica may write now.
    pub fn is_held(&self) -> bool {
        self.0.borrow().is_some_and(|deadline| clock::now() < deadline)
    }

    /// Waits until this replica may write.
    pub async fn acquired(&mut self) {
        while !self.is_held() {
            self.changed().await;
        }
    }

    /// Waits until this replica may no longer write.
    pub async fn lost(&mut self) {
        loop {
            let deadline = *self.0.borrow_and_update();
            let Some(deadline) = deadline.filter(|deadline| clock::now() < *deadline) else { return };
            let _ = tokio::time::timeout_at(deadline.into(), self.changed()).await;
        }
    }

    /// Waits for another deadline: for ever, if there will be none.
    async fn changed(&mut self) {
        if self.0.changed().await.is_err() {
            std::future::pending().await
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn claim_expires_by_itself() {
        let (sender, receiver) = watch::channel(None);
        let mut claim = Claim(receiver);
        assert!(!claim.is_held());
        sender.send_replace(Some(Instant::now() + Duration::from_hours(1)));
        claim.acquired().await;
        assert!(claim.is_held());
        sender.send_replace(Some(Instant::now() + Duration::from_millis(30)));
        claim.lost().await;
        assert!(!claim.is_held());
        assert!(Claim::permanent().is_held());
    }
}
