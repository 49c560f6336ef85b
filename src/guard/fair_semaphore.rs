//! A semaphore that no caller can use up for others: free permits go to the waiting caller that holds the fewest.

use std::{
    collections::{HashMap, VecDeque},
    net::IpAddr,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::sync::oneshot;

/// The permits of all requests of one caller are counted together.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Caller {
    Peer(IpAddr),
    /// A user that a verified API server has authenticated. Anybody else may write any name into a review.
    User(String),
}

#[derive(Clone)]
pub struct FairSemaphore(Arc<Mutex<State>>);

struct State {
    free: usize,
    /// Callers that hold permits or wait for some.
    callers: HashMap<Caller, Share>,
    /// Counts the waiting requests, so that callers with equally many permits take turns.
    next_turn: u64,
}

#[derive(Default)]
struct Share {
    held: usize,
    waiting: VecDeque<Waiting>,
}

struct Waiting {
    turn: u64,
    permits: usize,
    granted: oneshot::Sender<Permits>,
}

/// Permits, until they are dropped.
pub struct Permits {
    semaphore: FairSemaphore,
    caller: Caller,
    number: usize,
}

impl FairSemaphore {
    #[must_use]
    pub fn new(permits: usize) -> Self {
        Self(Arc::new(Mutex::new(State { free: permits, callers: HashMap::new(), next_turn: 0 })))
    }

    /// Waits for permits. At most as many may be asked for as there are.
    pub async fn acquire(&self, caller: Caller, permits: usize) -> Permits {
        if let Some(permits) = self.try_acquire(caller.clone(), permits) {
            return permits;
        }
        // It outlives the receiver, so that it finds the request given up.
        let mut given_up = GrantOnDrop(Some(self));
        let (granted, receiver) = oneshot::channel();
        {
            let mut state = self.state();
            let turn = state.next_turn;
            state.next_turn += 1;
            let share = state.callers.entry(caller).or_default();
            share.waiting.push_back(Waiting { turn, permits, granted });
            self.grant(&mut state);
        }
        let permits = match receiver.await {
            Ok(permits) => permits,
            // The sender of a request that still waits is dropped only after it has sent.
            Err(_) => std::future::pending().await,
        };
        given_up.0 = None;
        permits
    }

    /// Takes permits that are free, unless a request waits.
    #[must_use]
    pub fn try_acquire(&self, caller: Caller, permits: usize) -> Option<Permits> {
        if permits > 0 {
            let mut state = self.state();
            state.remove_given_up();
            if state.callers.values().any(|share| !share.waiting.is_empty()) {
                return None;
            }
            state.free = state.free.checked_sub(permits)?;
            state.callers.entry(caller.clone()).or_default().held += permits;
        }
        Some(self.permits(caller, permits))
    }

    fn permits(&self, caller: Caller, number: usize) -> Permits {
        Permits { semaphore: self.clone(), caller, number }
    }

    #[cfg(test)]
    pub fn free(&self) -> usize {
        self.state().free
    }

    /// Gives free permits to waiting requests, for as long as there are enough for the next in turn. A request for more
    /// than are free holds up all others, except those of callers that hold fewer permits than its own.
    fn grant(&self, state: &mut State) {
        loop {
            state.remove_given_up();
            let waiting = state.callers.iter().filter_map(|(caller, share)| {
                share.waiting.front().map(|first| (share.held, first.turn, first.permits, caller))
            });
            let Some((_, _, permits, caller)) = waiting.min_by_key(|(held, turn, ..)| (*held, *turn)) else {
                return;
            };
            if permits > state.free {
                return;
            }
            let caller = caller.clone();
            let Some(share) = state.callers.get_mut(&caller) else { return };
            let Some(first) = share.waiting.pop_front() else { return };
            share.held += permits;
            state.free -= permits;
            // If the request is given up right now, dropping the permits would lock this state once more.
            let granted = self.permits(caller.clone(), permits);
            if let Err(granted) = first.granted.send(granted) {
                granted.forget();
                state.give_back(&caller, permits);
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn give_back(&mut self, caller: &Caller, permits: usize) {
        self.free += permits;
        if let Some(share) = self.callers.get_mut(caller) {
            share.held -= permits;
        }
    }

    /// Removes requests that nobody waits for any more, up to the first of each caller that still waits, and then callers
    /// without permits and requests.
    fn remove_given_up(&mut self) {
        self.callers.retain(|_, share| {
            while share.waiting.front().is_some_and(|first| first.granted.is_closed()) {
                share.waiting.pop_front();
            }
            share.held > 0 || !share.waiting.is_empty()
        });
    }
}

/// A request that is given up may have held up smaller ones.
struct GrantOnDrop<'a>(Option<&'a FairSemaphore>);

impl Drop for GrantOnDrop<'_> {
    fn drop(&mut self) {
        if let Some(semaphore) = self.0 {
            semaphore.grant(&mut semaphore.state());
        }
    }
}

impl Permits {
    /// Adds permits of the same caller.
    pub fn merge(&mut self, mut other: Self) {
        self.number += std::mem::take(&mut other.number);
    }

    /// Gives back all but so many.
    pub fn shrink_to(&mut self, number: usize) {
        let surplus = self.number.saturating_sub(number);
        self.number -= surplus;
        self.give_back(surplus);
    }

    fn forget(mut self) {
        self.number = 0;
    }

    fn give_back(&self, number: usize) {
        if number > 0 {
            let mut state = self.semaphore.state();
            state.give_back(&self.caller, number);
            self.semaphore.grant(&mut state);
        }
    }
}

impl Drop for Permits {
    fn drop(&mut self) {
        self.give_back(self.number);
    }
}

#[cfg(test)]
mod tests {
    use futures::FutureExt;

    use super::*;

    fn peer(last: u8) -> Caller {
        Caller::Peer([10, 0, 0, last].into())
    }

    #[test]
    fn lone_caller_gets_all_permits() {
        let semaphore = FairSemaphore::new(4);
        let all: Vec<_> = (0..4).map(|_| semaphore.acquire(peer(1), 1).now_or_never().unwrap()).collect();
        assert!(semaphore.acquire(peer(1), 1).now_or_never().is_none());
        drop(all);
        assert_eq!(semaphore.free(), 4);
        assert!(semaphore.state().callers.is_empty());
    }

    #[test]
    fn next_free_permit_goes_to_the_caller_that_holds_fewest() {
        let semaphore = FairSemaphore::new(4);
        let mut held: Vec<_> =
            (0..4).map(|_| semaphore.acquire(peer(1), 1).now_or_never().unwrap()).collect();
        let mut flood: Vec<_> = (0..100).map(|_| Box::pin(semaphore.acquire(peer(1), 1))).collect();
        assert!(flood.iter_mut().all(|waiting| waiting.now_or_never().is_none()));
        let mut other = Box::pin(semaphore.acquire(peer(2), 1));
        assert!(other.as_mut().now_or_never().is_none());
        held.pop();
        let _other = other.now_or_never().expect("the first free permit");
        assert!(flood[0].as_mut().now_or_never().is_none());
        held.pop();
        assert!(flood[0].as_mut().now_or_never().is_some());
    }

    #[test]
    fn request_for_many_permits_is_not_overtaken_and_one_given_up_takes_none() {
        let semaphore = FairSemaphore::new(4);
        let mut first = semaphore.acquire(peer(1), 3).now_or_never().unwrap();
        let mut large = Box::pin(semaphore.acquire(peer(2), 4));
        assert!(large.as_mut().now_or_never().is_none());
        let mut small = Box::pin(semaphore.acquire(peer(3), 1));
        assert!(small.as_mut().now_or_never().is_none());
        assert!(semaphore.try_acquire(peer(4), 1).is_none());
        first.shrink_to(1);
        assert!(large.as_mut().now_or_never().is_none());
        // The small one fits as soon as the large one is given up, before anything is released.
        drop(large);
        assert!(small.now_or_never().is_some());
        drop(semaphore.try_acquire(peer(4), 1).expect("nobody waits"));
        drop(first);
        assert_eq!(semaphore.free(), 4);
        assert!(semaphore.state().callers.is_empty());
    }

    #[test]
    fn request_given_up_at_the_front_of_its_caller_holds_up_nobody() {
        let semaphore = FairSemaphore::new(4);
        let held = semaphore.acquire(peer(1), 3).now_or_never().unwrap();
        let (granted, receiver) = oneshot::channel();
        let given_up = Waiting { turn: 0, permits: 4, granted };
        semaphore.state().callers.entry(peer(2)).or_default().waiting.push_back(given_up);
        drop(receiver);
        assert!(semaphore.acquire(peer(2), 1).now_or_never().is_some());
        assert!(semaphore.try_acquire(peer(3), 1).is_some());
        drop(held);
        assert!(semaphore.state().callers.is_empty());
    }

    #[test]
    fn no_permits_are_had_at_once_and_leave_nothing_behind() {
        let semaphore = FairSemaphore::new(1);
        let held = semaphore.try_acquire(peer(1), 1).unwrap();
        assert!(semaphore.try_acquire(peer(2), 0).is_some());
        assert!(semaphore.acquire(peer(3), 0).now_or_never().is_some());
        assert_eq!(semaphore.state().callers.len(), 1);
        drop(held);
        assert!(semaphore.state().callers.is_empty());
    }

    #[test]
    fn merged_permits_are_given_back_once() {
        let semaphore = FairSemaphore::new(4);
        let mut permits = semaphore.try_acquire(peer(1), 1).unwrap();
        permits.merge(semaphore.try_acquire(peer(1), 2).unwrap());
        assert_eq!(semaphore.free(), 1);
        drop(permits);
        assert_eq!(semaphore.free(), 4);
        assert!(semaphore.try_acquire(peer(1), 5).is_none());
    }
}
