//! Writes that wait for a worker: small changes first, fan-outs in turns, bounded in all and for each namespace.
//!
//! Every write that runs holds permits, more of them for large content, so the permits bound the memory that requests
//! take. A write can hang for 30 s, for example in a slow admission webhook of one namespace, so no namespace gets more
//! than a part of the permits. Fan-outs always leave some permits to small changes, and most of them while there are
//! small changes: the API server still has to finish what it was sent before.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
    time::{Duration, Instant},
};

use crate::object::ObjectKey;

/// For how many sources there is room while none has anything to write. A burst needs more, and gives it back.
const IDLE_CAPACITY: usize = 64;
/// For so long after a small change, fan-outs hold few permits: another small change often follows.
const YIELD_TIME: Duration = Duration::from_millis(100);

/// The most permits that the writes of one namespace may hold at a time: a quarter of all.
pub const fn namespace_limit(permits: usize) -> usize {
    permits.div_ceil(4)
}

/// A change whose writes fit into so many permits is small: an eighth of all, and two at least, because one write may
/// hang.
fn small_change_permits(permits: usize) -> usize {
    permits.div_ceil(8).max(2)
}

/// One item always fits, or one that needs more permits than the limit would never run.
const fn fits(held: usize, permits: usize, limit: usize) -> bool {
    held == 0 || held + permits <= limit
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

/// Items of sources, each for one namespace.
#[derive(Debug)]
pub struct FairQueue<T> {
    open: bool,
    permits: usize,
    /// The permits that running items hold.
    held: usize,
    held_by_fan_outs: usize,
    /// Those of fan-outs whose items take long.
    slow: usize,
    /// Sources with items that wait or run.
    sources: HashMap<ObjectKey, SourceItems<T>>,
    namespaces: HashMap<Arc<str>, NamespaceItems<T>>,
    /// Of small changes, and of fan-outs.
    turns: [Turns<T>; 2],
    last_small_change: Option<Instant>,
}

#[derive(Debug)]
struct SourceItems<T> {
    /// Those that have not had their turn.
    waiting: VecDeque<T>,
    /// The permits of all that wait or run, and of those that run.
    permits: usize,
    held: usize,
    /// At some time these were more permits than a small change has. What follows, such as a retry, is no small change.
    is_fan_out: bool,
}

#[derive(Debug)]
struct NamespaceItems<T> {
    /// The permits of items that run, or that have had their turn and wait for nothing but permits.
    held: usize,
    /// Items that had their turn while the namespace was at its limit.
    blocked: VecDeque<T>,
}

/// What may run next.
#[derive(Debug)]
struct Turns<T> {
    /// Items whose namespace was at its limit when they had their turn, and is no more.
    unblocked: VecDeque<T>,
    /// Sources that have items waiting, each once.
    sources: VecDeque<ObjectKey>,
}

/// What a running item holds, until it is given back with [`FairQueue::done`].
#[derive(Debug)]
#[must_use]
pub struct Running {
    source: ObjectKey,
    namespace: Arc<str>,
    pub permits: usize,
    is_fan_out: bool,
    is_slow: bool,
}

impl<T> Default for SourceItems<T> {
    fn default() -> Self {
        Self { waiting: VecDeque::new(), permits: 0, held: 0, is_fan_out: false }
    }
}

impl<T> Default for NamespaceItems<T> {
    fn default() -> Self {
        Self { held: 0, blocked: VecDeque::new() }
    }
}

impl<T> Default for Turns<T> {
    fn default() -> Self {
        Self { unblocked: VecDeque::new(), sources: VecDeque::new() }
    }
}

impl<T: QueuedRequest> FairQueue<T> {
    pub fn new(permits: usize) -> Self {
        Self {
            open: false,
            permits,
            held: 0,
            held_by_fan_outs: 0,
            slow: 0,
            sources: HashMap::new(),
            namespaces: HashMap::new(),
            turns: Default::default(),
            last_small_change: None,
        }
    }

    pub const fn open(&mut self) {
        self.open = true;
    }

    pub const fn is_open(&self) -> bool {
        self.open
    }

    /// Drops every item that is not running, and takes none.
    pub fn close(&mut self) {
        self.open = false;
        for turns in &mut self.turns {
            turns.sources.clear();
            for item in turns.unblocked.drain(..) {
                if let Some(namespace) = self.namespaces.get_mut(item.namespace()) {
                    namespace.held -= item.permits();
                }
            }
        }
        self.namespaces.retain(|_, namespace| {
            namespace.blocked.clear();
            namespace.held > 0
        });
        self.sources.retain(|_, source| {
            source.waiting.clear();
            source.permits = source.held;
            source.held > 0
        });
    }

    /// Pushes the items of one change.
    pub fn push_all(&mut self, items: Vec<T>, now: Instant) {
        let Some(key) = items.first().map(|item| item.source().clone()).filter(|_| self.open) else {
            return;
        };
        let source = self.sources.entry(key.clone()).or_default();
        let is_new = source.permits == 0;
        let is_waiting = !source.waiting.is_empty();
        source.permits += items.iter().map(QueuedRequest::permits).sum::<usize>();
        source.waiting.extend(items);
        let grows = !source.is_fan_out && source.permits > small_change_permits(self.permits);
        source.is_fan_out |= grows;
        if is_new && !source.is_fan_out {
            self.last_small_change = Some(now);
        }
        if is_waiting && grows {
            self.turns[0].sources.retain(|small| *small != key);
        }
        if !is_waiting || grows {
            self.turns[usize::from(source.is_fan_out)].sources.push_back(key);
        }
    }

    /// The next item that may run.
    pub fn pop(&mut self, now: Instant) -> Option<(T, Running)> {
        loop {
            // A constant flow of small changes would have to hold nearly all permits before a fan-out waited for it.
            let is_fan_out = [false, true].into_iter().find(|is_fan_out| self.has_room(*is_fan_out, now))?;
            if let Some(item) = self.take_turn(is_fan_out) {
                return Some(self.start(item, is_fan_out));
            }
        }
    }

    /// Whether there are permits for the next item of a small change, or of a fan-out.
    fn has_room(&self, is_fan_out: bool, now: Instant) -> bool {
        let turns = &self.turns[usize::from(is_fan_out)];
        let waiting = || self.sources.get(turns.sources.front()?)?.waiting.front();
        let Some(permits) = turns.unblocked.front().or_else(waiting).map(QueuedRequest::permits) else {
            return false;
        };
        let small = small_change_permits(self.permits);
        let is_recent = |pushed: Instant| now.saturating_duration_since(pushed) < YIELD_TIME;
        let yields = self.last_small_change.is_some_and(is_recent);
        fits(self.held, permits, self.permits)
            && (!is_fan_out || fits(self.held_by_fan_outs, permits, self.permits.saturating_sub(small)))
            && (!is_fan_out || !yields || fits(self.held_by_fan_outs - self.slow, permits, small))
    }

    /// Takes the item whose turn it is, with a share of its namespace; none if it has to wait for that.
    fn take_turn(&mut self, is_fan_out: bool) -> Option<T> {
        let turns = &mut self.turns[usize::from(is_fan_out)];
        if let Some(item) = turns.unblocked.pop_front() {
            return Some(item);
        }
        let key = turns.sources.pop_front()?;
        let waiting = &mut self.sources.get_mut(&key)?.waiting;
        let item = waiting.pop_front()?;
        if !waiting.is_empty() {
            turns.sources.push_back(key);
        }
        let namespace = self.namespaces.entry(item.namespace().clone()).or_default();
        // None overtakes one that waits, or a large one would wait as long as small ones arrive.
        let fits = fits(namespace.held, item.permits(), namespace_limit(self.permits));
        if !namespace.blocked.is_empty() || !fits {
            namespace.blocked.push_back(item);
            return None;
        }
        namespace.held += item.permits();
        Some(item)
    }

    fn start(&mut self, item: T, is_fan_out: bool) -> (T, Running) {
        let source = item.source().clone();
        let namespace = item.namespace().clone();
        let permits = item.permits();
        self.held += permits;
        if is_fan_out {
            self.held_by_fan_outs += permits;
        }
        if let Some(source) = self.sources.get_mut(&source) {
            source.held += permits;
        }
        (item, Running { source, namespace, permits, is_fan_out, is_slow: false })
    }

    /// An item takes long: it hangs in something like a webhook, and fan-outs no longer yield because of it.
    pub const fn takes_long(&mut self, running: &mut Running) {
        if running.is_fan_out && !running.is_slow {
            running.is_slow = true;
            self.slow += running.permits;
        }
    }

    /// An item has ended.
    pub fn done(&mut self, running: Running) {
        let Running { source: key, namespace, permits, is_fan_out, is_slow } = running;
        self.held -= permits;
        if is_fan_out {
            self.held_by_fan_outs -= permits;
        }
        if is_slow {
            self.slow -= permits;
        }
        if let Some(source) = self.sources.get_mut(&key) {
            source.held -= permits;
            source.permits -= permits;
            if source.permits == 0 {
                self.sources.remove(&key);
            }
        }
        self.unblock(&namespace, permits);
        if self.is_idle() {
            self.sources.shrink_to(IDLE_CAPACITY);
            for turns in &mut self.turns {
                turns.sources.shrink_to(IDLE_CAPACITY);
            }
        }
    }

    /// A namespace gets permits back: items that were blocked may run.
    fn unblock(&mut self, key: &Arc<str>, permits: usize) {
        let Some(namespace) = self.namespaces.get_mut(key) else { return };
        namespace.held -= permits;
        while let Some(first) = namespace.blocked.front()
            && fits(namespace.held, first.permits(), namespace_limit(self.permits))
            && let Some(item) = namespace.blocked.pop_front()
        {
            namespace.held += item.permits();
            let is_fan_out = self.sources.get(item.source()).is_some_and(|source| source.is_fan_out);
            self.turns[usize::from(is_fan_out)].unblocked.push_back(item);
        }
        if namespace.held == 0 {
            self.namespaces.remove(key);
        }
    }

    /// How many sources wait for a turn, and how many items for their namespace.
    pub fn depth(&self) -> usize {
        self.turns.iter().map(|turns| turns.sources.len() + turns.unblocked.len()).sum::<usize>()
            + self.namespaces.values().map(|namespace| namespace.blocked.len()).sum::<usize>()
    }

    /// Whether nothing runs and nothing waits.
    pub fn is_idle(&self) -> bool {
        self.sources.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::queue_items::{Named, item};

    /// A queue, and what its running items hold.
    struct TestQueue {
        queue: FairQueue<Named<&'static str>>,
        running: Vec<(&'static str, Running)>,
        now: Instant,
    }

    impl TestQueue {
        fn new(permits: usize) -> Self {
            let mut queue = FairQueue::new(permits);
            queue.open();
            Self { queue, running: Vec::new(), now: Instant::now() }
        }

        fn push(&mut self, source: &str, namespace: &str, name: &'static str) {
            self.push_item(item(source, namespace, 1, name));
        }

        fn push_item(&mut self, item: Named<&'static str>) {
            self.queue.push_all(vec![item], self.now);
        }

        /// A change of a source in so many namespaces.
        fn push_wide(&mut self, source: &'static str, namespaces: usize, permits: usize) {
            let item = |n| item(source, &format!("{source}-{n}"), permits, source);
            self.queue.push_all((0..namespaces).map(item).collect(), self.now);
        }

        fn pop(&mut self) -> Option<&'static str> {
            let (item, running) = self.queue.pop(self.now)?;
            let held: usize = self.running.iter().map(|(_, running)| running.permits).sum();
            assert!(held + running.permits <= self.queue.permits, "more permits than there are");
            self.running.push((item.name, running));
            Some(item.name)
        }

        fn pop_all(&mut self) -> Vec<&'static str> {
            std::iter::from_fn(|| self.pop()).collect()
        }

        /// The first running item of this name has ended.
        fn done(&mut self, name: &str) {
            let position = self.running.iter().position(|(running, _)| *running == name).expect("it runs");
            self.queue.done(self.running.remove(position).1);
        }

        fn takes_long(&mut self) {
            self.running.iter_mut().for_each(|(_, running)| self.queue.takes_long(running));
        }

        fn assert_empty(&self) {
            let FairQueue { held, held_by_fan_outs, slow, namespaces, .. } = &self.queue;
            assert!(self.queue.is_idle() && namespaces.is_empty() && self.queue.depth() == 0);
            assert_eq!((*held, *held_by_fan_outs, *slow), (0, 0, 0));
        }
    }

    #[test]
    fn sources_take_turns() {
        let mut queue = TestQueue::new(64);
        for (namespace, task) in [("n1", "large-1"), ("n2", "large-2"), ("n3", "large-3")] {
            queue.push("large", namespace, task);
        }
        queue.push("small", "n1", "small-1");
        assert_eq!(queue.pop_all(), ["large-1", "small-1", "large-2", "large-3"]);
    }

    #[test]
    fn fan_outs_leave_permits_to_small_changes_and_yield_for_a_while() {
        let mut queue = TestQueue::new(8);
        queue.push_wide("wide", 20, 1);
        queue.push_wide("other", 20, 1);
        assert_eq!(queue.pop_all(), ["wide", "other", "wide", "other", "wide", "other"]);
        assert_eq!(queue.queue.depth(), 2, "an eighth, two at least, stays free");
        queue.push("small", "n1", "small");
        assert_eq!(queue.pop_all(), ["small"]);
        // While there are small changes, fan-outs hold no more than one of them does.
        for name in ["wide", "other", "wide", "other"] {
            queue.done(name);
            assert_eq!(queue.pop(), None);
        }
        queue.done("wide");
        assert_eq!(queue.pop_all(), ["wide"]);
        // Unless they hang, but then they leave the same permits free as ever.
        queue.takes_long();
        assert_eq!(queue.pop_all().len(), 2);
        queue.takes_long();
        assert_eq!(queue.pop_all().len(), 2);
        queue.takes_long();
        assert_eq!(queue.pop(), None);
        // What follows of its own, such as a retry, is no small change.
        queue.now += YIELD_TIME;
        queue.push("wide", "n20", "wide");
        queue.done("other");
        assert_eq!(queue.pop_all().len(), 1);
    }

    #[test]
    fn running_items_hold_no_more_permits_than_there_are() {
        let mut queue = TestQueue::new(16);
        for source in ["a", "b", "c", "d"] {
            queue.push_wide(source, 3, 4);
        }
        assert_eq!(queue.pop_all(), ["a", "b", "c"]);
        for n in 0..20 {
            queue.push(&format!("small-{n}"), "n", "small");
        }
        assert_eq!(queue.pop_all(), ["small"; 4], "all that are left, and the limit of the namespace");
        for name in ["a", "b", "c", "d", "a", "b", "c", "d", "a", "b", "c", "d"] {
            queue.done(name);
            queue.pop_all();
        }
        for _ in 0..20 {
            queue.done("small");
            queue.pop_all();
        }
        queue.assert_empty();
    }

    #[test]
    fn small_change_that_grows_takes_turns_with_fan_outs() {
        let mut queue = TestQueue::new(8);
        queue.push_wide("wide", 8, 1);
        queue.push_wide("grown", 2, 1);
        queue.push_wide("grown", 2, 1);
        queue.now += YIELD_TIME;
        assert_eq!(queue.pop_all(), ["wide", "grown", "wide", "grown", "wide", "grown"]);
    }

    #[test]
    fn namespace_at_its_limit_holds_up_no_other() {
        let mut queue = TestQueue::new(8);
        for task in ["slow-1", "slow-2", "slow-3", "slow-4"] {
            queue.push(task, "slow", task);
        }
        queue.push("other", "fast", "fast-1");
        assert_eq!(queue.pop_all(), ["slow-1", "slow-2", "fast-1"]);
        queue.done("fast-1");
        assert_eq!(queue.pop(), None, "the slow namespace is still at its limit");
        queue.done("slow-1");
        assert_eq!(queue.pop_all(), ["slow-3"]);
        queue.done("slow-2");
        assert_eq!(queue.pop_all(), ["slow-4"]);
        queue.done("slow-3");
        queue.done("slow-4");
        queue.assert_empty();
    }

    #[test]
    fn large_items_of_a_namespace_hold_no_more_permits_than_its_limit() {
        let mut queue = TestQueue::new(16);
        for (permits, name) in [(3, "large-1"), (3, "large-2"), (1, "small-1"), (1, "small-2")] {
            queue.push_item(item("wide", "slow", permits, name));
        }
        // The limit is 4. Order within a namespace that is blocked is kept.
        assert_eq!(queue.pop_all(), ["large-1"]);
        queue.done("large-1");
        assert_eq!(queue.pop_all(), ["large-2", "small-1"]);
        queue.done("small-1");
        assert_eq!(queue.pop_all(), ["small-2"]);
        queue.done("small-2");
        queue.done("large-2");
        queue.push_item(item("huge", "slow", 9, "huge"));
        assert_eq!(queue.pop(), Some("huge"), "alone, it runs though it exceeds the limit");
        queue.done("huge");
        queue.assert_empty();
    }

    #[test]
    fn large_item_runs_although_small_ones_keep_arriving() {
        let mut queue = TestQueue::new(16);
        queue.push("first", "n", "small");
        assert_eq!(queue.pop(), Some("small"));
        queue.push_item(item("large", "n", 4, "large"));
        assert_eq!(queue.pop(), None);
        for other in ["second", "third"] {
            queue.push(other, "n", "small");
            assert_eq!(queue.pop(), None, "it would overtake the large one");
        }
        queue.done("small");
        assert_eq!(queue.pop_all(), ["large"]);
        queue.done("large");
        assert_eq!(queue.pop_all(), ["small", "small"]);
    }

    #[test]
    fn closed_queue_drops_its_items_and_still_counts_the_running_ones() {
        let mut queue = TestQueue::new(4);
        for name in ["running", "blocked", "blocked"] {
            queue.push("a", "n", name);
        }
        queue.push("b", "other", "running");
        assert_eq!(queue.pop_all(), ["running", "running"]);
        queue.push("b", "n2", "waiting");
        queue.queue.close();
        queue.push("a", "n", "refused");
        queue.queue.open();
        assert_eq!(queue.pop(), None);
        queue.push("c", "n", "later");
        assert_eq!(queue.pop(), None, "one of four workers is the limit of a namespace");
        queue.done("running");
        // It may run now, and never does.
        queue.queue.close();
        queue.done("running");
        queue.assert_empty();
    }
}
