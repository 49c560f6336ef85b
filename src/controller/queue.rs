//! Keys to reconcile: in order, each once, some of them later. No key is reconciled by two workers at a time.

use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    time::Instant,
};

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::clock;
use lockstep_core::object::ObjectKey;

/// For how many keys there is room while none is due. A new leader needs more, and gives it back.
const IDLE_CAPACITY: usize = 64;

/// PURE. A key is queued, running, running and wanted again, or waiting for its time.
#[derive(Default)]
struct Schedule {
    /// A closed queue takes no keys. A standby's is closed, because no worker would pop them.
    open: bool,
    ready: VecDeque<ObjectKey>,
    waiting: BTreeSet<(Instant, ObjectKey)>,
    states: HashMap<ObjectKey, KeyState>,
    /// When keys were pushed that no worker has taken up since.
    pushed: HashMap<ObjectKey, Instant>,
}

enum KeyState {
    Ready,
    Waiting(Instant),
    /// With the time at which it has to run again, if it has.
    Running(Option<Instant>),
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
        self.states.retain(|_, state| matches!(state, KeyState::Running(_)));
    }

    /// Enqueues a key at once.
    pub fn push(&mut self, key: ObjectKey, now: Instant) {
        if self.open {
            self.pushed.entry(key.clone()).or_insert(now);
        }
        self.push_at(key, now, now);
    }

    /// Enqueues a key for this time; the earlier of two counts. One that is running runs again when it is done.
    pub fn push_at(&mut self, key: ObjectKey, when: Instant, now: Instant) {
        if !self.open {
            return;
        }
        match self.states.get_mut(&key) {
            Some(KeyState::Ready) => return,
            Some(KeyState::Waiting(known)) if *known <= when => return,
            Some(KeyState::Waiting(known)) => {
                self.waiting.remove(&(*known, key.clone()));
            }
            Some(KeyState::Running(next)) => {
                *next = Some(next.map_or(when, |known| known.min(when)));
                return;
            }
            None => {}
        }
        if when <= now {
            self.enqueue(key);
        } else {
            self.states.insert(key.clone(), KeyState::Waiting(when));
            self.waiting.insert((when, key));
        }
    }

    fn enqueue(&mut self, key: ObjectKey) {
        self.states.insert(key.clone(), KeyState::Ready);
        self.ready.push_back(key);
    }

    /// The next key that is due; it is running until [`Self::done`].
    pub fn pop(&mut self, now: Instant) -> Option<ObjectKey> {
        while self.next_due().is_some_and(|due| due <= now)
            && let Some((_, key)) = self.waiting.pop_first()
        {
            self.enqueue(key);
        }
        let key = self.ready.pop_front()?;
        self.states.insert(key.clone(), KeyState::Running(None));
        Some(key)
    }

    pub fn take_pushed(&mut self, key: &ObjectKey) -> Option<Instant> {
        let when = self.pushed.remove(key);
        if self.pushed.is_empty() {
            self.pushed.shrink_to(IDLE_CAPACITY);
        }
        when
    }

    pub fn done(&mut self, key: &ObjectKey, now: Instant) {
        if let Some(KeyState::Running(Some(when))) = self.states.remove(key) {
            self.push_at(key.clone(), when, now);
        }
        if self.states.len() == self.waiting.len() {
            self.states.shrink_to(IDLE_CAPACITY);
            self.ready.shrink_to(IDLE_CAPACITY);
        }
    }

    pub fn next_due(&self) -> Option<Instant> {
        self.waiting.first().map(|(when, _)| *when)
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
        let mut schedule = self.schedule.lock();
        let now = clock::now();
        keys.into_iter().for_each(|key| schedule.push(key, now));
        drop(schedule);
        self.wake.notify_one();
    }

    /// When a key was first pushed since the last time that this was asked; none if only its time has come.
    pub fn take_pushed(&self, key: &ObjectKey) -> Option<Instant> {
        self.schedule.lock().take_pushed(key)
    }

    pub fn push_at(&self, key: ObjectKey, when: Instant) {
        self.schedule.lock().push_at(key, when, clock::now());
        self.wake.notify_one();
    }

    pub fn done(&self, key: &ObjectKey) {
        self.schedule.lock().done(key, clock::now());
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
            let woken = self.wake.notified();
            if let Some(when) = due {
                let _ = tokio::time::timeout_at(when.into(), woken).await;
            } else {
                woken.await;
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
        schedule.push_at(key("b"), now, now);
        assert_eq!((schedule.depth(), schedule.next_due()), (0, None), "never open");

        schedule.open();
        ["running", "queued"].into_iter().for_each(|name| schedule.push(key(name), now));
        schedule.push_at(key("waiting"), now + Duration::from_secs(1), now);
        assert_eq!(schedule.pop(now), Some(key("running")));
        schedule.close();
        assert_eq!((schedule.depth(), schedule.next_due()), (0, None));
        schedule.push(key("running"), now);
        schedule.open();
        schedule.push(key("running"), now);
        assert_eq!(schedule.pop(now), None, "one worker for a key, all the while");
        schedule.done(&key("running"), now);
        assert_eq!(schedule.pop(now), Some(key("running")));
        schedule.push(key("running"), now);
        schedule.close();
        schedule.done(&key("running"), now);
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
        schedule.done(&key("a"), now);
        assert_eq!(schedule.pop(now), Some(key("a")));
        schedule.done(&key("a"), now);
        assert_eq!(schedule.pop(now), None);
    }

    #[test]
    fn earlier_of_two_times_counts_and_push_means_now() {
        let now = Instant::now();
        let later = |seconds| now + Duration::from_secs(seconds);
        let mut schedule = open();
        schedule.push_at(key("a"), later(9), now);
        schedule.push_at(key("a"), later(3), now);
        schedule.push_at(key("a"), later(5), now);
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
        schedule.push_at(key("a"), now + Duration::from_secs(1), now);
        assert_eq!(schedule.next_due(), None);
        schedule.done(&key("a"), now);
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
