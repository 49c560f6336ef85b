//! Keys to reconcile: in order, each once, some of them later. No key is reconciled by two workers at a time.

use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    time::Instant,
};

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::clock;
use lockstep_core::object::ObjectKey;

/// For how many keys there is room while none is due. A new leader needs more, and gives it back.
const IDLE_CAPACITY: usize = 64;

/// PURE. A key is queued, running, running and wanted again, or waiting for its time.
#[derive(Debug, Default)]
struct Schedule {
    /// A closed queue takes no keys. A standby's is closed, because no worker would pop them.
    open: bool,
    ready: VecDeque<ObjectKey>,
    states: HashMap<ObjectKey, KeyState>,
    waiting: BTreeMap<(Instant, u64), ObjectKey>,
    /// Distinguishes keys that wait for the same instant.
    ticket: u64,
    /// When keys were pushed that no worker has taken up since.
    pushed: HashMap<ObjectKey, Instant>,
}

#[derive(Debug, Clone, Copy)]
enum KeyState {
    Queued,
    Running { again: bool, later: Option<Instant> },
    Waiting(Instant, u64),
}

impl Schedule {
    pub const fn open(&mut self) {
        self.open = true;
    }

    /// Drops every key that is not running, and takes none.
    pub fn close(&mut self) {
        self.open = false;
        self.pushed.clear();
        self.ready.clear();
        self.waiting.clear();
        self.states.retain(|_, state| matches!(state, KeyState::Running { .. }));
    }

    /// Enqueues a key. One that is running runs again when it is done.
    pub fn push(&mut self, key: ObjectKey, now: Instant) {
        if !self.open {
            return;
        }
        self.pushed.entry(key.clone()).or_insert(now);
        match self.states.get_mut(&key) {
            Some(KeyState::Queued) => return,
            Some(KeyState::Running { again, .. }) => {
                *again = true;
                return;
            }
            Some(KeyState::Waiting(at, ticket)) => {
                self.waiting.remove(&(*at, *ticket));
            }
            None => {}
        }
        self.enqueue(key);
    }

    fn enqueue(&mut self, key: ObjectKey) {
        self.states.insert(key.clone(), KeyState::Queued);
        self.ready.push_back(key);
    }

    /// Enqueues a key for later; the earlier of two times counts.
    pub fn push_at(&mut self, key: ObjectKey, when: Instant) {
        if !self.open {
            return;
        }
        match self.states.get_mut(&key) {
            Some(KeyState::Queued) => return,
            Some(KeyState::Running { later, .. }) => {
                *later = Some(later.map_or(when, |at| at.min(when)));
                return;
            }
            Some(KeyState::Waiting(at, ticket)) => {
                if *at <= when {
                    return;
                }
                self.waiting.remove(&(*at, *ticket));
            }
            None => {}
        }
        self.ticket += 1;
        self.states.insert(key.clone(), KeyState::Waiting(when, self.ticket));
        self.waiting.insert((when, self.ticket), key);
    }

    /// The next key that is due; it is running until [`Self::done`].
    pub fn pop(&mut self, now: Instant) -> Option<ObjectKey> {
        while let Some(entry) = self.waiting.first_entry() {
            if entry.key().0 > now {
                break;
            }
            let key = entry.remove();
            self.enqueue(key);
        }
        let key = self.ready.pop_front()?;
        self.states.insert(key.clone(), KeyState::Running { again: false, later: None });
        Some(key)
    }

    pub fn take_pushed(&mut self, key: &ObjectKey) -> Option<Instant> {
        let when = self.pushed.remove(key);
        if self.pushed.is_empty() {
            self.pushed.shrink_to(IDLE_CAPACITY);
        }
        when
    }

    pub fn done(&mut self, key: &ObjectKey) {
        match self.states.remove(key) {
            Some(KeyState::Running { again: true, .. }) if self.open => self.enqueue(key.clone()),
            Some(KeyState::Running { later: Some(when), .. }) => self.push_at(key.clone(), when),
            _ => {}
        }
        if self.states.len() == self.waiting.len() {
            self.states.shrink_to(IDLE_CAPACITY);
            self.ready.shrink_to(IDLE_CAPACITY);
        }
    }

    pub fn next_due(&self) -> Option<Instant> {
        self.waiting.first_key_value().map(|((when, _), _)| *when)
    }

    /// How many keys are due and not yet running.
    pub fn depth(&self) -> usize {
        self.ready.len()
    }
}

/// A [`Schedule`] that workers can wait on.
#[derive(Default)]
pub struct Queue {
    schedule: Mutex<Schedule>,
    wake: Notify,
}

impl Queue {
    pub fn open(&self) {
        self.schedule.lock().open();
    }

    pub fn close(&self) {
        self.schedule.lock().close();
    }

    pub fn push_all(&self, keys: impl IntoIterator<Item = ObjectKey>) {
        let (mut schedule, now) = (self.schedule.lock(), clock::now());
        keys.into_iter().for_each(|key| schedule.push(key, now));
        drop(schedule);
        self.wake.notify_one();
    }

    /// When a key was first pushed since the last time that this was asked; none if only its time has come.
    pub fn take_pushed(&self, key: &ObjectKey) -> Option<Instant> {
        self.schedule.lock().take_pushed(key)
    }

    pub fn push_at(&self, key: ObjectKey, when: Instant) {
        self.schedule.lock().push_at(key, when);
        self.wake.notify_one();
    }

    pub fn done(&self, key: &ObjectKey) {
        self.schedule.lock().done(key);
        self.wake.notify_one();
    }

    pub fn depth(&self) -> usize {
        self.schedule.lock().depth()
    }

    /// Waits for the next key that is due. Safe to drop at any time: no key is lost.
    pub async fn next(&self) -> ObjectKey {
        loop {
            let due = {
                let mut schedule = self.schedule.lock();
                if let Some(key) = schedule.pop(clock::now()) {
                    if schedule.depth() > 0 {
                        // Several pushes may have caused a single wake-up: wake the next worker.
                        self.wake.notify_one();
                    }
                    return key;
                }
                schedule.next_due()
            };
            match due {
                Some(when) => {
                    tokio::select! {
                        biased;
                        () = self.wake.notified() => {}
                        () = tokio::time::sleep_until(when.into()) => {}
                    }
                }
                None => self.wake.notified().await,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use lockstep_core::testing::configmap;

    fn key(name: &str) -> ObjectKey {
        configmap("home", name)
    }

    fn open() -> Schedule {
        let mut schedule = Schedule::default();
        schedule.open();
        schedule
    }

    #[test]
    fn closed_queue_takes_no_keys() {
        let now = Instant::now();
        let mut schedule = Schedule::default();
        schedule.push(key("a"), now);
        schedule.push_at(key("b"), now);
        assert_eq!((schedule.depth(), schedule.next_due()), (0, None), "never open");

        schedule.open();
        ["running", "queued"].into_iter().for_each(|name| schedule.push(key(name), now));
        schedule.push_at(key("waiting"), now + Duration::from_secs(1));
        assert_eq!(schedule.pop(now), Some(key("running")));
        schedule.close();
        assert_eq!((schedule.depth(), schedule.next_due()), (0, None));
        schedule.push(key("running"), now);
        schedule.open();
        schedule.push(key("running"), now);
        assert_eq!(schedule.pop(now), None, "one worker for a key, all the while");
        schedule.done(&key("running"));
        assert_eq!(schedule.pop(now), Some(key("running")));
        schedule.push(key("running"), now);
        schedule.close();
        schedule.done(&key("running"));
        assert_eq!((schedule.depth(), schedule.states.len()), (0, 0));
    }

    #[test]
    fn keys_are_popped_in_order_and_once() {
        let now = Instant::now();
        let mut schedule = open();
        for name in ["a", "b", "a"] {
            schedule.push(key(name), now);
        }
        assert_eq!(schedule.depth(), 2);
        assert_eq!(schedule.pop(now), Some(key("a")));
        assert_eq!(schedule.pop(now), Some(key("b")));
        assert_eq!(schedule.pop(now), None);
    }

    #[test]
    fn running_key_is_not_popped_again_until_it_is_done() {
        let now = Instant::now();
        let mut schedule = open();
        schedule.push(key("a"), now);
        schedule.pop(now);
        schedule.push(key("a"), now);
        assert_eq!(schedule.pop(now), None);
        schedule.done(&key("a"));
        assert_eq!(schedule.pop(now), Some(key("a")));
        schedule.done(&key("a"));
        assert_eq!(schedule.pop(now), None);
    }

    #[test]
    fn earlier_of_two_times_counts_and_push_means_now() {
        let now = Instant::now();
        let later = |seconds| now + Duration::from_secs(seconds);
        let mut schedule = open();
        schedule.push_at(key("a"), later(9));
        schedule.push_at(key("a"), later(3));
        schedule.push_at(key("a"), later(5));
        assert_eq!(schedule.next_due(), Some(later(3)));
        assert_eq!(schedule.pop(later(2)), None);
        schedule.push(key("a"), now);
        assert_eq!(schedule.pop(now), Some(key("a")));
        assert_eq!(schedule.next_due(), None);
    }

    #[test]
    fn time_given_while_a_key_runs_counts_when_it_is_done() {
        let now = Instant::now();
        let mut schedule = open();
        schedule.push(key("a"), now);
        schedule.pop(now);
        schedule.push_at(key("a"), now + Duration::from_secs(1));
        assert_eq!(schedule.next_due(), None);
        schedule.done(&key("a"));
        assert_eq!(schedule.pop(now), None);
        assert_eq!(schedule.pop(now + Duration::from_secs(1)), Some(key("a")));
    }

    #[tokio::test]
    async fn dropped_wait_loses_no_key() {
        let queue = Queue::default();
        queue.open();
        assert!(tokio::time::timeout(Duration::from_millis(1), queue.next()).await.is_err());
        queue.push_all([key("a")]);
        assert_eq!(queue.next().await, key("a"));
    }
}
