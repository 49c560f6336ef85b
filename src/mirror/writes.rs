//! Writes that wait for a worker: fair between sources, bounded for each source and each namespace.
//!
//! A write can hang for as long as [`super::api::REQUEST_TIMEOUT`], for example in a slow admission webhook of one
//! namespace. So no namespace gets more than a part of the permits. And what comes while a source is written to a thousand
//! namespaces is written next, but the API server still has to finish what it was sent before: so a source leaves some
//! permits to others, and most of them while others make small changes.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    hash::Hash,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use tokio::sync::Notify;

use crate::{clock, object::ObjectKey};

/// For how many sources there is room while none has anything to write. A burst needs more, and gives it back.
const IDLE_CAPACITY: usize = 64;
/// For so long after a small change, no source holds many permits: another small change often follows.
const YIELD_TIME: Duration = Duration::from_millis(100);

/// The most permits that the writes of one namespace may hold at a time: a quarter of all.
#[must_use]
pub const fn namespace_limit(permits: usize) -> usize {
    permits.div_ceil(4)
}

/// A change whose writes fit into so many permits is small: an eighth of all, and two at least, because one write may hang.
fn small_change_permits(permits: usize) -> usize {
    permits.div_ceil(8).max(2)
}

/// A request to the API server that waits for a worker.
pub trait QueuedRequest {
    /// The source that it is for.
    fn source(&self) -> &ObjectKey;

    /// The namespace of the object that it is about.
    fn namespace(&self) -> &Arc<str>;

    /// How many permits it takes: more for large content.
    fn permits(&self) -> usize;
}

/// PURE. Items of sources, each for one namespace.
#[derive(Debug)]
pub struct FairQueue<T> {
    open: bool,
    permits: usize,
    /// When a source that had nothing to write got something small.
    last_small_change: Option<Instant>,
    /// Sources that have items and were below their limit when that was looked at, in the order of their turns.
    turns: VecDeque<ObjectKey>,
    /// Sources that have items and were at their limit. That is looked at again when one of their items has ended.
    at_limit: HashSet<ObjectKey>,
    items: HashMap<ObjectKey, VecDeque<T>>,
    sources: Shares<ObjectKey>,
    namespaces: Shares<Arc<str>>,
    /// Items whose namespace was at its limit when their turn came.
    blocked: HashMap<Arc<str>, VecDeque<T>>,
    /// Namespaces with blocked items, in which an item has ended.
    freed: VecDeque<Arc<str>>,
}

/// How many permits the running items of each source, or of each namespace, hold.
#[derive(Debug)]
struct Shares<K> {
    limit: usize,
    held: HashMap<K, usize>,
}

impl<K: Eq + Hash + Clone> Shares<K> {
    fn new(limit: usize) -> Self {
        Self { limit, held: HashMap::new() }
    }

    /// One item always fits, or one that needs more permits than the limit would never run.
    fn fits(&self, key: &K, permits: usize) -> bool {
        self.held.get(key).is_none_or(|held| held + permits <= self.limit)
    }

    fn take(&mut self, key: &K, permits: usize) {
        *self.held.entry(key.clone()).or_default() += permits;
    }

    fn give_back(&mut self, key: &K, permits: usize) {
        if let Some(held) = self.held.get_mut(key) {
            *held -= permits;
            if *held == 0 {
                self.held.remove(key);
            }
        }
    }
}

impl<T: QueuedRequest> FairQueue<T> {
    #[must_use]
    pub fn new(permits: usize) -> Self {
        Self {
            open: false,
            permits,
            last_small_change: None,
            turns: VecDeque::new(),
            at_limit: HashSet::new(),
            items: HashMap::new(),
            sources: Shares::new(permits),
            namespaces: Shares::new(namespace_limit(permits)),
            blocked: HashMap::new(),
            freed: VecDeque::new(),
        }
    }

    pub const fn open(&mut self) {
        self.open = true;
    }

    /// Drops every item that is not running, and takes none.
    pub fn close(&mut self) {
        self.open = false;
        self.turns.clear();
        self.at_limit.clear();
        self.items.clear();
        self.blocked.clear();
        self.freed.clear();
    }

    /// Pushes the items of one change.
    pub fn push_all(&mut self, items: Vec<T>, now: Instant) {
        let Some(source) = items.first().map(|item| item.source().clone()).filter(|_| self.open) else {
            return;
        };
        // What follows from a large change, such as a retry, is no small one.
        let is_new = !self.items.contains_key(&source) && !self.sources.held.contains_key(&source);
        let permits: usize = items.iter().map(QueuedRequest::permits).sum();
        if is_new && permits <= small_change_permits(self.permits) {
            self.last_small_change = Some(now);
        }
        match self.items.get_mut(&source) {
            Some(waiting) => waiting.extend(items),
            None => {
                self.turns.push_back(source.clone());
                self.items.insert(source, items.into());
            }
        }
    }

    /// The next item that may run. It counts for its source until [`Self::give_back_source_share`] and for its namespace
    /// until [`Self::done`].
    pub fn pop(&mut self, now: Instant) -> Option<T> {
        self.sources.limit = self.source_limit(now);
        let item = self.next_unblocked().or_else(|| {
            loop {
                let item = self.next_in_turn()?;
                // None overtakes one that waits, or a large one would wait as long as small ones arrive.
                if !self.blocked.contains_key(item.namespace()) && self.fits_namespace(&item) {
                    return Some(item);
                }
                self.blocked.entry(item.namespace().clone()).or_default().push_back(item);
            }
        })?;
        self.sources.take(item.source(), item.permits());
        self.namespaces.take(item.namespace(), item.permits());
        Some(item)
    }

    /// The most permits that the writes of one source may hold at a time: usually all but those of one small change, and for
    /// [`YIELD_TIME`] after a small change only as many as that needs. The more writes are on the way, the sooner a fan-out
    /// ends, and the longer a small change waits in the API server.
    fn source_limit(&self, now: Instant) -> usize {
        let small = small_change_permits(self.permits);
        let is_recent = |pushed: Instant| now.saturating_duration_since(pushed) < YIELD_TIME;
        if self.last_small_change.is_some_and(is_recent) {
            small
        } else {
            self.permits.saturating_sub(small).max(small)
        }
    }

    fn fits_namespace(&self, item: &T) -> bool {
        self.namespaces.fits(item.namespace(), item.permits())
    }

    /// It has had its turn, so the limit of its source does not hold it up again.
    fn next_unblocked(&mut self) -> Option<T> {
        while let Some(namespace) = self.freed.front() {
            let first = self.blocked.get(namespace).and_then(VecDeque::front);
            if first.is_some_and(|first| self.fits_namespace(first)) {
                let blocked = self.blocked.get_mut(namespace)?;
                let item = blocked.pop_front();
                if blocked.is_empty() {
                    self.blocked.remove(namespace);
                }
                return item;
            }
            self.freed.pop_front();
        }
        None
    }

    fn next_in_turn(&mut self) -> Option<T> {
        loop {
            let source = self.turns.pop_front()?;
            let items = self.items.get_mut(&source)?;
            if !self.sources.fits(&source, items.front()?.permits()) {
                self.at_limit.insert(source);
                continue;
            }
            let item = items.pop_front();
            if items.is_empty() {
                self.items.remove(&source);
            } else {
                self.turns.push_back(source);
            }
            return item;
        }
    }

    /// An item of this source has ended, or takes so long that it no longer counts.
    pub fn give_back_source_share(&mut self, source: &ObjectKey, permits: usize) {
        self.sources.give_back(source, permits);
        if self.at_limit.remove(source) {
            self.turns.push_back(source.clone());
        }
    }

    /// An item of this namespace has ended.
    pub fn done(&mut self, namespace: &Arc<str>, permits: usize) {
        self.namespaces.give_back(namespace, permits);
        if self.blocked.contains_key(namespace) {
            self.freed.push_back(namespace.clone());
        }
        if self.is_idle() {
            self.items.shrink_to(IDLE_CAPACITY);
            self.turns.shrink_to(IDLE_CAPACITY);
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
        self.items.len() + self.blocked.values().map(VecDeque::len).sum::<usize>()
    }

    /// Whether nothing runs and nothing waits.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.namespaces.held.is_empty() && self.blocked.is_empty() && self.items.is_empty()
    }
}

/// A [`FairQueue`] that workers can wait on.
pub struct WriteQueue<T> {
    queue: Mutex<FairQueue<T>>,
    pushed: Notify,
    idle: Notify,
}

impl<T: QueuedRequest> WriteQueue<T> {
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

    /// Pushes the items of one change. False if the queue is closed and took none of them.
    pub fn push_all(&self, items: Vec<T>) -> bool {
        let mut queue = self.lock();
        queue.push_all(items, clock::now());
        let open = queue.open;
        drop(queue);
        self.pushed.notify_one();
        open
    }

    /// See [`FairQueue::give_back_source_share`].
    pub fn give_back_source_share(&self, source: &ObjectKey, permits: usize) {
        self.lock().give_back_source_share(source, permits);
        self.pushed.notify_one();
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
    pub async fn next(&self) -> T {
        loop {
            match self.pop() {
                Some(item) => return item,
                None => self.pushed.notified().await,
            }
        }
    }

    fn pop(&self) -> Option<T> {
        let mut queue = self.lock();
        let item = queue.pop(clock::now());
        if queue.has_more() {
            // Several pushes may have caused a single wake-up: wake the next worker.
            self.pushed.notify_one();
        }
        item
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
pub(super) mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::testing::configmap;

    fn queue(workers: usize) -> TestQueue {
        let mut queue = FairQueue::new(workers);
        queue.open();
        queue
    }

    /// An item with a name or a number.
    #[derive(Debug)]
    pub struct Named<T> {
        source: ObjectKey,
        namespace: Arc<str>,
        permits: usize,
        name: T,
    }

    impl<T> QueuedRequest for Named<T> {
        fn source(&self) -> &ObjectKey {
            &self.source
        }

        fn namespace(&self) -> &Arc<str> {
            &self.namespace
        }

        fn permits(&self) -> usize {
            self.permits
        }
    }

    type TestQueue = FairQueue<Named<&'static str>>;

    pub fn item<T>(source: &str, namespace: &str, permits: usize, name: T) -> Named<T> {
        Named { source: configmap("home", source), namespace: namespace.into(), permits, name }
    }

    fn push_item(queue: &mut TestQueue, item: Named<&'static str>) {
        queue.push_all(vec![item], Instant::now());
    }

    fn push(queue: &mut TestQueue, source: &str, namespace: &str, name: &'static str) {
        push_item(queue, item(source, namespace, 1, name));
    }

    /// An item has ended.
    fn done(queue: &mut TestQueue, source: &str, namespace: &str, permits: usize) {
        queue.give_back_source_share(&configmap("home", source), permits);
        queue.done(&namespace.into(), permits);
    }

    fn pop(queue: &mut TestQueue) -> Option<&'static str> {
        pop_at(queue, Instant::now())
    }

    fn pop_at(queue: &mut TestQueue, now: Instant) -> Option<&'static str> {
        queue.pop(now).map(|item| item.name)
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
    fn source_at_its_limit_leaves_permits_to_a_small_change() {
        let (mut queue, now) = (queue(8), Instant::now());
        let wide = |namespace: &str| item("wide", namespace, 1, "wide");
        queue.push_all((0..20).map(|n| wide(&format!("n{n}"))).collect(), now);
        let running = std::iter::from_fn(|| pop_at(&mut queue, now)).count();
        assert_eq!(
            (running, queue.has_more(), queue.depth()),
            (6, false, 1),
            "an eighth, two at least, stays free"
        );
        queue.push_all(vec![item("small", "n1", 1, "small")], now);
        assert_eq!((pop_at(&mut queue, now), pop_at(&mut queue, now)), (Some("small"), None));
        // While there are small changes, it holds no more than one of them does.
        for n in 0..4 {
            done(&mut queue, "wide", &format!("n{n}"), 1);
            assert_eq!(pop_at(&mut queue, now), None, "{n}");
        }
        done(&mut queue, "wide", "n4", 1);
        assert_eq!((pop_at(&mut queue, now), pop_at(&mut queue, now)), (Some("wide"), None));
        // What follows of its own, such as a retry, is no small change.
        queue.push_all(vec![wide("n20")], now + YIELD_TIME);
        // And then it takes them again.
        let later = now + YIELD_TIME;
        assert_eq!(pop_at(&mut queue, later), None, "it is looked at when one of its writes has ended");
        done(&mut queue, "wide", "n5", 1);
        assert_eq!(std::iter::from_fn(|| pop_at(&mut queue, later)).count(), 5);
    }

    #[test]
    fn write_that_takes_long_counts_for_its_namespace_only() {
        let (mut queue, now) = (queue(2), Instant::now());
        queue.push_all(["n1", "n2", "n3"].map(|namespace| item("wide", namespace, 1, "wide")).into(), now);
        assert_eq!(std::iter::from_fn(|| pop_at(&mut queue, now)).count(), 2);
        queue.give_back_source_share(&configmap("home", "wide"), 1);
        assert_eq!((pop_at(&mut queue, now), pop_at(&mut queue, now)), (Some("wide"), None));
        for namespace in ["n2", "n3"] {
            done(&mut queue, "wide", namespace, 1);
        }
        assert!(!queue.is_idle(), "that in n1 takes long");
        queue.done(&"n1".into(), 1);
        assert!(queue.is_idle() && queue.sources.held.is_empty() && queue.at_limit.is_empty());
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
        done(&mut queue, "other", "fast", 1);
        assert_eq!(pop(&mut queue), None, "the slow namespace is still at its limit");
        done(&mut queue, "slow-1", "slow", 1);
        assert_eq!((pop(&mut queue), pop(&mut queue)), (Some("slow-3"), None));
        done(&mut queue, "slow-2", "slow", 1);
        assert_eq!((pop(&mut queue), pop(&mut queue)), (Some("slow-4"), None));
        done(&mut queue, "slow-3", "slow", 1);
        done(&mut queue, "slow-4", "slow", 1);
        assert!(queue.is_idle() && queue.blocked.is_empty() && queue.items.is_empty());
    }

    #[test]
    fn large_items_of_a_namespace_hold_no_more_permits_than_its_limit() {
        let mut queue = queue(16);
        for (permits, name) in [(3, "large-1"), (3, "large-2"), (1, "small-1"), (1, "small-2")] {
            push_item(&mut queue, item(name, "slow", permits, name));
        }
        // The limit is 4. Order within a namespace that is blocked is kept.
        assert_eq!((pop(&mut queue), pop(&mut queue)), (Some("large-1"), None));
        done(&mut queue, "large-1", "slow", 3);
        assert_eq!((pop(&mut queue), pop(&mut queue)), (Some("large-2"), Some("small-1")));
        assert_eq!(pop(&mut queue), None);
        done(&mut queue, "small-1", "slow", 1);
        assert_eq!((pop(&mut queue), pop(&mut queue)), (Some("small-2"), None));
        done(&mut queue, "small-2", "slow", 1);
        done(&mut queue, "large-2", "slow", 3);
        push_item(&mut queue, item("huge", "slow", 9, "huge"));
        assert_eq!(pop(&mut queue), Some("huge"), "alone, it runs though it exceeds the limit");
        done(&mut queue, "huge", "slow", 9);
        assert!(queue.is_idle() && queue.freed.is_empty());
    }

    #[test]
    fn large_item_runs_although_small_ones_keep_arriving() {
        let mut queue = queue(16);
        push(&mut queue, "first", "n", "small");
        assert_eq!(pop(&mut queue), Some("small"));
        push_item(&mut queue, item("large", "n", 4, "large"));
        for other in ["second", "third"] {
            push(&mut queue, other, "n", "small");
            assert_eq!(pop(&mut queue), None, "it would overtake the large one");
        }
        done(&mut queue, "first", "n", 1);
        assert_eq!((pop(&mut queue), pop(&mut queue)), (Some("large"), None));
        done(&mut queue, "large", "n", 4);
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
        push(&mut queue, "b", "n", "later");
        assert_eq!(pop(&mut queue), None, "one of four workers is the limit of a namespace");
        done(&mut queue, "a", "n", 1);
        assert_eq!(pop(&mut queue), Some("later"));
    }

    #[tokio::test]
    async fn queue_that_is_closed_is_idle() {
        let queue = WriteQueue::new(1);
        queue.open();
        queue.push_all(vec![item("a", "n", 1, 1)]);
        let (idle, ()) =
            tokio::join!(tokio::time::timeout(std::time::Duration::from_secs(10), queue.idle()), async {
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
                tokio::spawn(async move { queue.next().await.name })
            })
            .collect();
        queue.push_all((0..3).map(|n| item("a", &format!("n{n}"), 1, n)).collect());
        let done = futures::future::join_all(workers);
        let done = tokio::time::timeout(std::time::Duration::from_secs(10), done).await.expect("in time");
        assert_eq!(done.into_iter().map(Result::unwrap).collect::<HashSet<_>>(), HashSet::from([0, 1, 2]));
    }
}
