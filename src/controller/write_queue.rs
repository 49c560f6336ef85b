//! Writes that wait for a worker, and workers that wait for them.

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::clock;
use lockstep_core::writes::fair_queue::{FairQueue, QueuedRequest, Running};

/// A [`FairQueue`] that workers can wait on.
pub struct WriteQueue<T> {
    queue: Mutex<FairQueue<T>>,
    pushed: Notify,
    idle: Notify,
}

impl<T: QueuedRequest> WriteQueue<T> {
    pub fn new(permits: usize) -> Self {
        Self { queue: Mutex::new(FairQueue::new(permits)), pushed: Notify::new(), idle: Notify::new() }
    }

    pub fn open(&self) {
        self.queue.lock().open();
    }

    pub fn close(&self) {
        self.queue.lock().close();
        self.idle.notify_waiters();
    }

    /// Pushes the items of one change. False if the queue is closed and took none of them.
    pub fn push_all(&self, items: Vec<T>) -> bool {
        let mut queue = self.queue.lock();
        queue.push_all(items, clock::now());
        let open = queue.is_open();
        drop(queue);
        self.pushed.notify_one();
        open
    }

    /// See [`FairQueue::takes_long`].
    pub fn takes_long(&self, running: &mut Running) {
        self.queue.lock().takes_long(running);
        self.pushed.notify_one();
    }

    pub fn done(&self, running: Running) {
        self.queue.lock().done(running);
        self.idle.notify_waiters();
        self.pushed.notify_one();
    }

    pub fn depth(&self) -> usize {
        self.queue.lock().depth()
    }

    /// Waits for the next item. Safe to drop at any time: no item is lost.
    pub async fn next(&self) -> (T, Running) {
        loop {
            let next = self.queue.lock().pop(clock::now());
            if let Some(next) = next {
                // Several pushes may have caused a single wake-up: wake the next worker.
                self.pushed.notify_one();
                return next;
            }
            self.pushed.notified().await;
        }
    }

    /// Waits until nothing runs and nothing waits.
    pub async fn idle(&self) {
        loop {
            let idle = self.idle.notified();
            if self.queue.lock().is_idle() {
                return;
            }
            idle.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::HashSet, sync::Arc, time::Duration};

    use super::*;
    use lockstep_core::testing::queue_items::{Named, item};

    #[tokio::test]
    async fn queue_that_is_closed_is_idle() {
        let queue = WriteQueue::new(1);
        queue.open();
        queue.push_all(vec![item("a", "n", 1, 1)]);
        let (idle, ()) = tokio::join!(tokio::time::timeout(Duration::from_secs(10), queue.idle()), async {
            queue.close()
        });
        idle.expect("in time");
    }

    #[tokio::test]
    async fn one_wake_up_reaches_every_worker() {
        let queue = Arc::new(WriteQueue::<Named<i32>>::new(12));
        queue.open();
        let workers: Vec<_> = (0..3)
            .map(|_| {
                let queue = queue.clone();
                tokio::spawn(async move { queue.next().await.0.name })
            })
            .collect();
        queue.push_all((0..3).map(|n| item("a", &format!("n{n}"), 1, n)).collect());
        let done = futures::future::join_all(workers);
        let done = tokio::time::timeout(Duration::from_secs(10), done).await.expect("in time");
        assert_eq!(done.into_iter().map(Result::unwrap).collect::<HashSet<_>>(), HashSet::from([0, 1, 2]));
    }
}
