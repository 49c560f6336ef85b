//! A semaphore that no caller can use up for others: free permits go to the waiting caller that holds the fewest. If
//! there are too few, permits that may be revoked are taken from the caller that holds the most.

use std::{
    collections::{BTreeMap, HashMap},
    net::IpAddr,
    sync::Arc,
};

use futures::future::AbortHandle;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::oneshot;

/// The permits of all requests of one caller are counted together.
#[derive(Clone, PartialEq, Eq, Hash)]
pub enum Caller {
    Peer(IpAddr),
    /// A user that a verified API server has authenticated. Anybody else may write any name into a review.
    User(String),
}

#[derive(Clone)]
pub struct FairSemaphore(Arc<Mutex<SemaphoreState>>);

struct SemaphoreState {
    free: usize,
    next_id: u64,
    /// Callers that hold permits or wait for some.
    callers: HashMap<Caller, CallerShare>,
    /// The request whose permits were revoked and are not given back yet. There is one at a time, so no more are
    /// revoked than needed.
    revoked: Option<u64>,
}

/// The order of the requests of one caller: by the permits that they hold, then by age.
type Rank = (usize, u64);

#[derive(Default)]
struct CallerShare {
    held: usize,
    waiting: BTreeMap<Rank, Waiting>,
    revocable: BTreeMap<Rank, AbortHandle>,
}

struct Waiting {
    permits: usize,
    granted: oneshot::Sender<()>,
}

/// The permits of one request, until they are dropped.
pub struct Permits {
    semaphore: FairSemaphore,
    caller: Caller,
    id: u64,
    held: usize,
    /// What it waits for, or has been granted without having noticed.
    wanted: usize,
}

impl FairSemaphore {
    pub fn new(permits: usize) -> Self {
        let state = SemaphoreState { free: permits, next_id: 0, callers: HashMap::new(), revoked: None };
        Self(Arc::new(Mutex::new(state)))
    }

    /// Waits for permits. At most as many may be asked for as there are.
    pub async fn acquire(&self, caller: Caller, permits: usize) -> Permits {
        let mut acquired = self.none(caller);
        acquired.grow_to(permits).await;
        acquired
    }

    /// No permits yet. Those that it grows to may be revoked until [`Permits::keep`]: `revoke` must end the task that
    /// holds them, so that they are dropped.
    pub fn revocable(&self, caller: Caller, revoke: AbortHandle) -> Permits {
        let permits = self.none(caller);
        self.state().share(&permits.caller).revocable.insert(permits.rank(), revoke);
        permits
    }

    fn none(&self, caller: Caller) -> Permits {
        let mut state = self.state();
        state.next_id += 1;
        Permits { semaphore: self.clone(), caller, id: state.next_id, held: 0, wanted: 0 }
    }

    #[cfg(test)]
    pub fn free(&self) -> usize {
        self.state().free
    }

    fn state(&self) -> MutexGuard<'_, SemaphoreState> {
        self.0.lock()
    }
}

impl SemaphoreState {
    fn share(&mut self, caller: &Caller) -> &mut CallerShare {
        self.callers.entry(caller.clone()).or_default()
    }

    /// Gives free permits to waiting requests, for as long as there are enough for the next in line. A request for more
    /// than are free holds up all behind it.
    fn grant(&mut self) {
        loop {
            let shares = self.callers.values_mut().filter(|share| !share.waiting.is_empty());
            let fewest = shares.min_by_key(|share| (share.held, share.waiting.keys().next().copied()));
            let Some(share) = fewest else { return };
            let Some(first) = share.waiting.first_entry() else { return };
            if first.get().permits > self.free {
                let (_, id) = *first.key();
                return self.revoke_for(id);
            }
            let Waiting { permits, granted } = first.remove();
            self.free -= permits;
            share.held += permits;
            let _ = granted.send(());
        }
    }

    /// Revokes the permits of the largest request of the caller that holds the most, unless it is the one that waits.
    fn revoke_for(&mut self, waiting: u64) {
        if self.revoked.is_some() {
            return;
        }
        let shares = self.callers.values_mut().filter(|share| !share.revocable.is_empty());
        let most = shares.max_by_key(|share| (share.held, share.revocable.keys().next_back().copied()));
        let Some(largest) = most.and_then(|share| share.revocable.last_entry()) else { return };
        let id = largest.key().1;
        if id != waiting {
            largest.remove().abort();
            self.revoked = Some(id);
        }
    }
}

impl Permits {
    fn rank(&self) -> Rank {
        (self.held, self.id)
    }

    /// Waits until there are so many.
    pub async fn grow_to(&mut self, permits: usize) {
        if permits <= self.held {
            return;
        }
        let (granted, receiver) = oneshot::channel();
        self.wanted = permits - self.held;
        let rank = self.rank();
        {
            let mut state = self.semaphore.state();
            state.share(&self.caller).waiting.insert(rank, Waiting { permits: self.wanted, granted });
            state.grant();
        }
        // The sender is dropped only after it has sent.
        let _ = receiver.await;
        self.held += std::mem::take(&mut self.wanted);
        let mut state = self.semaphore.state();
        let revocable = &mut state.share(&self.caller).revocable;
        if let Some(revoke) = revocable.remove(&rank) {
            revocable.insert(self.rank(), revoke);
        }
    }

    /// Gives back all but so many.
    pub fn shrink_to(&mut self, permits: usize) {
        let surplus = self.held.saturating_sub(permits);
        self.held -= surplus;
        let mut state = self.semaphore.state();
        state.free += surplus;
        state.share(&self.caller).held -= surplus;
        state.grant();
    }

    /// From now on, they are not revoked. False if they have been.
    pub fn keep(&self) -> bool {
        self.semaphore.state().share(&self.caller).revocable.remove(&self.rank()).is_some()
    }
}

impl Drop for Permits {
    fn drop(&mut self) {
        let rank = self.rank();
        let mut state = self.semaphore.state();
        let share = state.share(&self.caller);
        share.revocable.remove(&rank);
        let still_waits = share.waiting.remove(&rank).is_some();
        let held = if still_waits { self.held } else { self.held + self.wanted };
        share.held -= held;
        if share.held == 0 && share.waiting.is_empty() && share.revocable.is_empty() {
            state.callers.remove(&self.caller);
        }
        state.free += held;
        state.revoked.take_if(|id| *id == self.id);
        state.grant();
    }
}

#[cfg(test)]
mod tests {
    use futures::{FutureExt, future::Abortable};

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
        first.shrink_to(1);
        assert!(large.as_mut().now_or_never().is_none());
        // The small one fits as soon as the large one is given up, before anything is released.
        drop(large);
        assert!(small.now_or_never().is_some());
        drop(first);
        assert_eq!(semaphore.free(), 4);
        assert!(semaphore.state().callers.is_empty());
    }

    #[test]
    fn permits_that_were_granted_to_a_request_that_is_given_up_are_free_again() {
        let semaphore = FairSemaphore::new(4);
        let held = semaphore.acquire(peer(1), 4).now_or_never().unwrap();
        let mut waiting = Box::pin(semaphore.acquire(peer(2), 3));
        assert!(waiting.as_mut().now_or_never().is_none());
        drop(held);
        assert_eq!(semaphore.free(), 1);
        drop(waiting);
        assert_eq!(semaphore.free(), 4);
        assert!(semaphore.state().callers.is_empty());
    }

    /// A task that holds so many permits until they are revoked.
    fn revocable(
        semaphore: &FairSemaphore,
        caller: Caller,
        permits: usize,
    ) -> impl Future<Output = bool> + Unpin + use<> {
        let (revoke, registration) = AbortHandle::new_pair();
        let mut held = semaphore.revocable(caller, revoke);
        let holding = async move {
            held.grow_to(permits).await;
            std::future::pending::<()>().await;
        };
        let mut task = Box::pin(Abortable::new(holding, registration).map(|ended| ended.is_err()));
        assert!((&mut task).now_or_never().is_none());
        task
    }

    #[test]
    fn permits_are_revoked_from_the_largest_request_of_the_caller_that_holds_the_most() {
        let semaphore = FairSemaphore::new(10);
        let mut alone = revocable(&semaphore, peer(1), 4);
        let mut small = revocable(&semaphore, peer(2), 1);
        let large = revocable(&semaphore, peer(2), 2);
        let largest = revocable(&semaphore, peer(2), 3);
        let mut waiting = Box::pin(semaphore.acquire(peer(3), 5));
        assert!(waiting.as_mut().now_or_never().is_none());
        assert_eq!(semaphore.free(), 0);
        assert_eq!(largest.now_or_never(), Some(true));
        // Now the other caller holds more.
        assert!(waiting.as_mut().now_or_never().is_none());
        assert_eq!((&mut alone).now_or_never(), Some(true));
        drop(alone);
        let held = waiting.now_or_never().expect("there are enough");
        assert_eq!(semaphore.free(), 2);
        assert!((&mut small).now_or_never().is_none() && large.now_or_never().is_none());
        drop((held, small));
    }

    #[test]
    fn permits_that_are_kept_are_not_revoked() {
        let semaphore = FairSemaphore::new(4);
        let (revoke, _registration) = AbortHandle::new_pair();
        let mut kept = semaphore.revocable(peer(1), revoke.clone());
        kept.grow_to(4).now_or_never().unwrap();
        assert!(kept.keep());
        let mut waiting = Box::pin(semaphore.acquire(peer(2), 1));
        assert!(waiting.as_mut().now_or_never().is_none());
        assert!(!revoke.is_aborted());
        drop(kept);
        assert!(waiting.now_or_never().is_some());
        assert!(semaphore.state().callers.is_empty());
    }
}
