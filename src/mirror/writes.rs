//! Writes that wait for a worker: fair between sources, bounded for each namespace.
//!
//! A write can hang for as long as [`super::api::REQUEST_TIMEOUT`], for example in a slow admission webhook of one
//! namespace. So no namespace gets more than a part of the workers, and a source with a thousand companions
//! takes turns with a source that has one.

use std::{
    collections::{HashMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::Notify;

use crate::object::ObjectKey;

/// One namespace may use a quarter of the workers.
const NAMESPACE_SHARE: usize = 4;

/// PURE. Tasks of sources, each for one namespace.
#[derive(Debug)]
pub struct FairQueue<T> {
    open: bool,
    /// The most tasks of one namespace that run at a time.
    namespace_limit: usize,
    /// Sources that have tasks, in the order of their turns.
    turns: VecDeque<ObjectKey>,
    tasks: HashMap<ObjectKey, VecDeque<Queued<T>>>,
    running: HashMap<Arc<str>, usize>,
    /// Tasks whose namespace was at its limit when their turn came.
    blocked: HashMap<Arc<str>, VecDeque<Queued<T>>>,
    /// Tasks that were blocked and may run now.
    unblocked: VecDeque<Queued<T>>,
}

/// An item that needs a request to the API server, for an object in this namespace.
#[derive(Debug)]
pub struct Queued<T> {
    pub namespace: Arc<str>,
    pub item: T,
}

impl<T> FairQueue<T> {
    #[must_use]
    pub fn new(workers: usize) -> Self {
        Self {
            open: false,
            namespace_limit: workers.div_ceil(NAMESPACE_SHARE),
            turns: VecDeque::new(),
            tasks: HashMap::new(),
            running: HashMap::new(),
            blocked: HashMap::new(),
            unblocked: VecDeque::new(),
        }
    }

    pub const fn open(&mut self) {
        self.open = true;
    }

    /// Drops every task that is not running, and takes none.
    pub fn close(&mut self) {
        *self = Self {
            running: std::mem::take(&mut self.running),
            namespace_limit: self.namespace_limit,
            ..Self::new(0)
        };
    }

    pub fn push(&mut self, source: &ObjectKey, task: Queued<T>) {
        if !self.open {
            return;
        }
        if let Some(tasks) = self.tasks.get_mut(source) {
            tasks.push_back(task);
        } else {
            self.tasks.insert(source.clone(), [task].into());
            self.turns.push_back(source.clone());
        }
    }

    /// The next task that may run. It counts for its namespace until [`Self::done`].
    pub fn pop(&mut self) -> Option<Queued<T>> {
        let task = self.unblocked.pop_front().or_else(|| {
            loop {
                let task = self.next_in_turn()?;
                let running = self.running.get(&task.namespace).copied().unwrap_or_default();
                if running < self.namespace_limit {
                    return Some(task);
                }
                self.blocked.entry(task.namespace.clone()).or_default().push_back(task);
            }
        })?;
        *self.running.entry(task.namespace.clone()).or_default() += 1;
        Some(task)
    }

    fn next_in_turn(&mut self) -> Option<Queued<T>> {
        let source = self.turns.pop_front()?;
        let tasks = self.tasks.get_mut(&source)?;
        let task = tasks.pop_front();
        if tasks.is_empty() {
            self.tasks.remove(&source);
        } else {
            self.turns.push_back(source);
        }
        task
    }

    /// A task of this namespace has ended.
    pub fn done(&mut self, namespace: &Arc<str>) {
        if let Some(running) = self.running.get_mut(namespace) {
            *running -= 1;
            if *running == 0 {
                self.running.remove(namespace);
            }
        }
        if let Some(blocked) = self.blocked.get_mut(namespace) {
            self.unblocked.extend(blocked.pop_front());
            if blocked.is_empty() {
                self.blocked.remove(namespace);
            }
        }
    }

    /// Whether a task waits for its turn, blocked ones aside.
    #[must_use]
    pub fn has_more(&self) -> bool {
        !self.turns.is_empty() || !self.unblocked.is_empty()
    }

    /// How many sources wait for a turn, and how many items for their namespace.
    #[must_use]
    pub fn depth(&self) -> usize {
        self.turns.len() + self.unblocked.len() + self.blocked.values().map(VecDeque::len).sum::<usize>()
    }

    /// Whether nothing runs and nothing waits.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.running.is_empty() && self.blocked.is_empty() && !self.has_more()
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
    pub fn new(workers: usize) -> Self {
        Self { queue: Mutex::new(FairQueue::new(workers)), pushed: Notify::new(), idle: Notify::new() }
    }

    fn lock(&self) -> MutexGuard<'_, FairQueue<T>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn open(&self) {
        self.lock().open();
    }

    pub fn close(&self) {
        self.lock().close();
    }

    pub fn push_all(&self, source: &ObjectKey, tasks: impl IntoIterator<Item = Queued<T>>) {
        let mut queue = self.lock();
        tasks.into_iter().for_each(|task| queue.push(source, task));
        drop(queue);
        self.pushed.notify_one();
    }

    pub fn done(&self, namespace: &Arc<str>) {
        let mut queue = self.lock();
        queue.done(namespace);
        if queue.is_idle() {
            self.idle.notify_waiters();
        }
        drop(queue);
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
        queue.push(&configmap("home", source), Queued { namespace: namespace.into(), item });
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
        queue.done(&"fast".into());
        assert_eq!(pop(&mut queue), None, "the slow namespace is still at its limit");
        queue.done(&"slow".into());
        assert_eq!((pop(&mut queue), pop(&mut queue)), (Some("slow-3"), None));
        queue.done(&"slow".into());
        assert_eq!((pop(&mut queue), pop(&mut queue)), (Some("slow-4"), None));
        queue.done(&"slow".into());
        queue.done(&"slow".into());
        assert!(queue.is_idle() && queue.blocked.is_empty() && queue.tasks.is_empty());
    }

    #[test]
    fn closed_queue_drops_its_tasks_and_still_counts_the_running_ones() {
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
        queue.done(&"n".into());
        assert_eq!(pop(&mut queue), Some("later"));
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
        let task = |n: u32| Queued { namespace: format!("n{n}").into(), item: n };
        queue.push_all(&configmap("home", "a"), (0..3).map(task));
        let done = futures::future::join_all(workers);
        let done = tokio::time::timeout(std::time::Duration::from_secs(10), done).await.expect("in time");
        assert_eq!(done.into_iter().map(Result::unwrap).collect::<HashSet<_>>(), HashSet::from([0, 1, 2]));
    }
}
