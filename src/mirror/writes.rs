//! Writes that wait for a worker: fair between sources, bounded for each namespace.
//!
//! A write can hang for as long as [`super::api::REQUEST_TIMEOUT`], for example in a slow admission webhook of one
//! namespace. So no namespace gets more than a part of the permits, and a source with a thousand companions
//! takes turns with a source that has one.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::Notify;

use crate::object::ObjectKey;

/// The most permits that the writes of one namespace may hold at a time: a quarter of all.
#[must_use]
pub const fn namespace_limit(permits: usize) -> usize {
    permits.div_ceil(4)
}

/// PURE. Items of sources, each for one namespace.
#[derive(Debug)]
pub struct FairQueue<T> {
    open: bool,
    namespace_limit: usize,
    /// Sources that have items, in the order of their turns.
    turns: VecDeque<ObjectKey>,
    items: HashMap<ObjectKey, VecDeque<Queued<T>>>,
    /// The permits that the running items of each namespace hold.
    running: HashMap<Arc<str>, usize>,
    /// Items whose namespace was at its limit when their turn came.
    blocked: HashMap<Arc<str>, VecDeque<Queued<T>>>,
    /// Namespaces with blocked items, in which an item has ended.
    freed: VecDeque<Arc<str>>,
}

/// An item that needs a request to the API server, for an object in this namespace.
#[derive(Debug)]
pub struct Queued<T> {
    pub namespace: Arc<str>,
    /// How many permits it takes: more for large content.
    pub permits: usize,
    pub item: T,
}

impl<T> FairQueue<T> {
    #[must_use]
    pub fn new(permits: usize) -> Self {
        Self {
            open: false,
            namespace_limit: namespace_limit(permits),
            turns: VecDeque::new(),
            items: HashMap::new(),
            running: HashMap::new(),
            blocked: HashMap::new(),
            freed: VecDeque::new(),
        }
    }

    pub const fn open(&mut self) {
        self.open = true;
    }

    /// Drops every item that is not running, and takes none.
    pub fn close(&mut self) {
        *self = Self {
            running: std::mem::take(&mut self.running),
            namespace_limit: self.namespace_limit,
            ..Self::new(0)
        };
    }

    pub fn push(&mut self, source: &ObjectKey, queued: Queued<T>) {
        if !self.open {
            return;
        }
        if let Some(items) = self.items.get_mut(source) {
            items.push_back(queued);
        } else {
            self.items.insert(source.clone(), [queued].into());
            self.turns.push_back(source.clone());
        }
    }

    /// The next item that may run. It counts for its namespace until [`Self::done`].
    pub fn pop(&mut self) -> Option<Queued<T>> {
        let queued = self.next_unblocked().or_else(|| {
            loop {
                let queued = self.next_in_turn()?;
                // None overtakes one that waits, or a large one would wait as long as small ones arrive.
                if !self.blocked.contains_key(&queued.namespace) && self.fits(&queued) {
                    return Some(queued);
                }
                self.blocked.entry(queued.namespace.clone()).or_default().push_back(queued);
            }
        })?;
        *self.running.entry(queued.namespace.clone()).or_default() += queued.permits;
        Some(queued)
    }

    /// One item always fits, or one that needs more permits than the limit would never run.
    fn fits(&self, queued: &Queued<T>) -> bool {
        let running = self.running.get(&queued.namespace);
        running.is_none_or(|running| running + queued.permits <= self.namespace_limit)
    }

    fn next_unblocked(&mut self) -> Option<Queued<T>> {
        while let Some(namespace) = self.freed.front() {
            let first = self.blocked.get(namespace).and_then(VecDeque::front);
            if first.is_some_and(|first| self.fits(first)) {
                let blocked = self.blocked.get_mut(namespace)?;
                let queued = blocked.pop_front();
                if blocked.is_empty() {
                    self.blocked.remove(namespace);
                }
                return queued;
            }
            self.freed.pop_front();
        }
        None
    }

    fn next_in_turn(&mut self) -> Option<Queued<T>> {
        let source = self.turns.pop_front()?;
        let items = self.items.get_mut(&source)?;
        let queued = items.pop_front();
        if items.is_empty() {
            self.items.remove(&source);
        } else {
            self.turns.push_back(source);
        }
        queued
    }

    /// An item of this namespace has ended.
    pub fn done(&mut self, namespace: &Arc<str>, permits: usize) {
        if let Some(running) = self.running.get_mut(namespace) {
            *running -= permits;
            if *running == 0 {
                self.running.remove(namespace);
            }
        }
        if self.blocked.contains_key(namespace) {
            self.freed.push_back(namespace.clone());
        }
    }

    /// Whether an item may be able to run.
    #[must_use]
    pub fn has_more(&self) -> bool {
        !self.turns.is_empty() || !self.freed.is_empty()
    }

    /// How many sources wait for a turn, and how many items for their namespace.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.turns.len() + self.blocked.values().map(VecDeque::len).sum::<usize>()
    }

    /// Whether nothing runs and nothing waits.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.blocked.is_empty() && self.turns.is_empty()
    }
}

/// A [`FairQueue`] that workers can wait on.
pub struct WriteQueue<T> {
    queue: Mutex<FairQueue<T>>,
    pushed: Notify,
    idle: Notify,
}

impl<T> WriteQueue<T> {
    #[must_use]
    pub fn new(permits: usize) -> Self {
        Self { queue: Mutex::new(FairQueue::new(permits)), pushed: Notify::new(), idle: Notify::new() }
    }

    fn lock(&self) -> MutexGuard<'_, FairQueue<T>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn open(&self) {
        self.lock().open();
    }

    pub fn close(&self) {
        self.lock().close();
        self.idle.notify_waiters();
    }

    /// False if the queue is closed and took none of them.
    pub fn push_all(&self, source: &ObjectKey, items: impl IntoIterator<Item = Queued<T>>) -> bool {
        let mut queue = self.lock();
        items.into_iter().for_each(|queued| queue.push(source, queued));
        let open = queue.open;
        drop(queue);
        self.pushed.notify_one();
        open
    }

    pub fn done(&self, namespace: &Arc<str>, permits: usize) {
        self.lock().done(namespace, permits);
        self.idle.notify_waiters();
        self.pushed.notify_one();
    }

    #[must_use]
    pub fn depth(&self) -> usize {
        self.lock().depth()
    }

    /// Waits for the next item. Safe to drop at any time: no item is lost.
    pub async fn next(&self) -> Queued<T> {
        loop {
            match self.pop() {
                Some(queued) => return queued,
                None => self.pushed.notified().await,
            }
        }
    }

    /// Whether an item waits for a worker.
    #[must_use]
    pub fn has_more(&self) -> bool {
        self.lock().has_more()
    }

    fn pop(&self) -> Option<Queued<T>> {
        let mut queue = self.lock();
        let queued = queue.pop();
        if queue.has_more() {
            // Several pushes may have caused a single wake-up: wake the next worker.
            self.pushed.notify_one();
        }
        queued
    }

    /// Waits until nothing runs and nothing waits.
    pub async fn idle(&self) {
        loop {
            let idle = self.idle.notified();
            if self.lock().is_idle() {
                return;
            }
            idle.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::testing::configmap;

    fn queue(workers: usize) -> FairQueue<&'static str> {
        let mut queue = FairQueue::new(workers);
        queue.open();
        queue
    }

    fn push(queue: &mut FairQueue<&'static str>, source: &str, namespace: &str, item: &'static str) {
        queue.push(&configmap("home", source), Queued { namespace: namespace.into(), permits: 1, item });
    }

    fn pop(queue: &mut FairQueue<&'static str>) -> Option<&'static str> {
        queue.pop().map(|queued| queued.item)
    }

    #[test]
    fn sources_take_turns() {
        let mut queue = queue(64);
        for (namespace, task) in [("n1", "large-1"), ("n2", "large-2"), ("n3", "large-3")] {
            push(&mut queue, "large", namespace, task);
        }
        push(&mut queue, "small", "n1", "small-1");
        let order: Vec<_> = std::iter::from_fn(|| pop(&mut queue)).collect();
        assert_eq!(order, ["large-1", "small-1", "large-2", "large-3"]);
    }

    #[test]
    fn namespace_at_its_limit_holds_up_no_other() {
        let mut queue = queue(8);
        for task in ["slow-1", "slow-2", "slow-3", "slow-4"] {
            push(&mut queue, task, "slow", task);
        }
        push(&mut queue, "other", "fast", "fast-1");
        assert_eq!(
            std::iter::from_fn(|| pop(&mut queue)).collect::<Vec<_>>(),
            ["slow-1", "slow-2", "fast-1"]
        );
        queue.done(&"fast".into(), 1);
        assert_eq!(pop(&mut queue), None, "the slow namespace is still at its limit");
        queue.done(&"slow".into(), 1);
        assert_eq!((pop(&mut queue), pop(&mut queue)), (Some("slow-3"), None));
        queue.done(&"slow".into(), 1);
        assert_eq!((pop(&mut queue), pop(&mut queue)), (Some("slow-4"), None));
        queue.done(&"slow".into(), 1);
        queue.done(&"slow".into(), 1);
        assert!(queue.is_idle() && queue.blocked.is_empty() && queue.items.is_empty());
    }

    #[test]
    fn large_items_of_a_namespace_hold_no_more_permits_than_its_limit() {
        let mut queue = queue(16);
        let item = |permits, item| Queued { namespace: "slow".into(), permits, item };
        for (permits, name) in [(3, "large-1"), (3, "large-2"), (1, "small-1"), (1, "small-2")] {
            queue.push(&configmap("home", name), item(permits, name));
        }
        // The limit is 4. Order within a namespace that is blocked is kept.
        assert_eq!((pop(&mut queue), pop(&mut queue)), (Some("large-1"), None));
        queue.done(&"slow".into(), 3);
        assert_eq!((pop(&mut queue), pop(&mut queue)), (Some("large-2"), Some("small-1")));
        assert_eq!(pop(&mut queue), None);
        queue.done(&"slow".into(), 1);
        assert_eq!((pop(&mut queue), pop(&mut queue)), (Some("small-2"), None));
        queue.done(&"slow".into(), 1);
        queue.done(&"slow".into(), 3);
        queue.push(&configmap("home", "huge"), item(9, "huge"));
        assert_eq!(pop(&mut queue), Some("huge"), "alone, it runs though it exceeds the limit");
        queue.done(&"slow".into(), 9);
        assert!(queue.is_idle() && queue.freed.is_empty());
    }

    #[test]
    fn large_item_runs_although_small_ones_keep_arriving() {
        let mut queue = queue(16);
        push(&mut queue, "first", "n", "small");
        assert_eq!(pop(&mut queue), Some("small"));
        queue.push(&configmap("home", "large"), Queued { namespace: "n".into(), permits: 4, item: "large" });
        for _ in 0..2 {
            push(&mut queue, "other", "n", "small");
            assert_eq!(pop(&mut queue), None, "it would overtake the large one");
        }
        queue.done(&"n".into(), 1);
        assert_eq!((pop(&mut queue), pop(&mut queue)), (Some("large"), None));
        queue.done(&"n".into(), 4);
        assert_eq!((pop(&mut queue), pop(&mut queue)), (Some("small"), Some("small")));
    }

    #[test]
    fn closed_queue_drops_its_items_and_still_counts_the_running_ones() {
        let mut queue = queue(4);
        push(&mut queue, "a", "n", "running");
        push(&mut queue, "a", "n", "waiting");
        assert_eq!(pop(&mut queue), Some("running"));
        queue.close();
        push(&mut queue, "a", "n", "refused");
        queue.open();
        assert_eq!(pop(&mut queue), None);
        push(&mut queue, "a", "n", "later");
        assert_eq!(pop(&mut queue), None, "one of four workers is the limit of a namespace");
        queue.done(&"n".into(), 1);
        assert_eq!(pop(&mut queue), Some("later"));
    }

    #[tokio::test]
    async fn queue_that_is_closed_is_idle() {
        let queue = WriteQueue::new(1);
        queue.open();
        queue.push_all(&configmap("home", "a"), [Queued { namespace: "n".into(), permits: 1, item: 1 }]);
        let (idle, ()) =
            tokio::join!(tokio::time::timeout(std::time::Duration::from_secs(10), queue.idle()), async {
                queue.close()
            });
        idle.expect("in time");
    }

    #[tokio::test]
    async fn one_wake_up_reaches_every_worker() {
        let queue = Arc::new(WriteQueue::new(8));
        queue.open();
        let workers: Vec<_> = (0..3)
            .map(|_| {
                let queue = queue.clone();
                tokio::spawn(async move { queue.next().await.item })
            })
            .collect();
        let task = |n: u32| Queued { namespace: format!("n{n}").into(), permits: 1, item: n };
        queue.push_all(&configmap("home", "a"), (0..3).map(task));
        let done = futures::future::join_all(workers);
        let done = tokio::time::timeout(std::time::Duration::from_secs(10), done).await.expect("in time");
        assert_eq!(done.into_iter().map(Result::unwrap).collect::<HashSet<_>>(), HashSet::from([0, 1, 2]));
    }
}
