//! The connections there are, and who has to go when there are too many.

use std::{
    cmp::Reverse,
    collections::HashMap,
    net::IpAddr,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use http_body::{Body, Frame, SizeHint};
use tokio::{sync::Notify, time::Instant};

use super::Limits;

pub struct Crowd {
    limits: Limits,
    members: Mutex<HashMap<u64, Arc<Member>>>,
    next: AtomicU64,
}

/// One connection.
pub struct Member {
    peer: IpAddr,
    since: Instant,
    /// Milliseconds after `since` at which it last began a request, was heard out, or got its answer.
    active: AtomicU64,
    requests: AtomicU64,
    under_way: AtomicU32,
    /// Of these, requests whose bodies have not come yet.
    listening: AtomicU32,
    leaving: AtomicBool,
    dismissed: Notify,
    cut: Notify,
}

/// A place in the crowd, until it is dropped.
pub struct Guest {
    pub member: Arc<Member>,
    crowd: Arc<Crowd>,
    id: u64,
}

/// A request under way.
pub struct Task(Arc<Member>);

/// A request whose body has not come yet.
pub struct Listening(Arc<Member>);

/// How much is lost when a connection goes; who has least to lose goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Loss {
    /// It has been told to go.
    Leaving,
    /// It never asked for anything.
    Unused,
    Idle,
    /// It has yet to say what it wants: anybody can stay there for seconds.
    Listening,
    /// Somebody waits for an answer.
    AtWork,
}

impl Crowd {
    pub fn new(limits: Limits) -> Self {
        Self { limits, members: Mutex::default(), next: AtomicU64::default() }
    }

    /// Takes one more in. When there are too many, who has least to lose goes, and of these who has been so longest.
    /// Where all are at work, a peer that holds more connections than anybody else gives one up; none is taken in when
    /// the newcomer would be that peer.
    pub fn admit(self: &Arc<Self>, peer: IpAddr) -> Option<Guest> {
        let mut members = self.members();
        let staying = members.values().filter(|member| !member.is_leaving()).count();
        if staying >= self.limits.connections {
            self.make_room(&members, peer)?;
        }
        if members.len() >= self.limits.connections + self.limits.leaving {
            // Told to go, and still there: it goes now.
            let slowest = members
                .iter()
                .filter(|(_, member)| member.is_leaving())
                .max_by_key(|(_, member)| (!member.is_at_work(), member.quiet_for()))
                .map(|(id, _)| *id)?;
            if let Some(member) = members.remove(&slowest) {
                member.cut.notify_one();
            }
        }
        let member = Arc::new(Member {
            peer,
            since: Instant::now(),
            active: AtomicU64::default(),
            requests: AtomicU64::default(),
            under_way: AtomicU32::default(),
            listening: AtomicU32::default(),
            leaving: AtomicBool::default(),
            dismissed: Notify::new(),
            cut: Notify::new(),
        });
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        members.insert(id, member.clone());
        Some(Guest { member, crowd: self.clone(), id })
    }

    fn make_room(&self, members: &HashMap<u64, Arc<Member>>, newcomer: IpAddr) -> Option<()> {
        let staying = || members.values().filter(|member| !member.is_leaving());
        let least = staying().min_by_key(|member| (member.loss(), Reverse(member.quiet_for())))?;
        if least.loss() < Loss::AtWork {
            least.dismiss();
            return Some(());
        }
        let mut held: HashMap<IpAddr, usize> = HashMap::new();
        staying().for_each(|member| *held.entry(member.peer).or_default() += 1);
        let of = |peer: IpAddr| held.get(&peer).copied().unwrap_or_default();
        let largest = staying().max_by_key(|member| (of(member.peer), member.quiet_for()))?;
        if of(largest.peer) <= of(newcomer) + 1 {
            return None;
        }
        largest.dismiss();
        largest.cut.notify_one();
        Some(())
    }

    /// Sends away who has been idle for too long.
    pub fn sweep(&self) {
        let Limits { unused, idle, .. } = self.limits;
        for member in self.members().values() {
            let most = match member.loss() {
                Loss::Unused => unused,
                Loss::Idle => idle,
                Loss::Leaving | Loss::Listening | Loss::AtWork => continue,
            };
            if member.quiet_for() >= most {
                member.dismiss();
            }
        }
    }

    /// Sends everybody away, once they have their answers.
    pub fn dismiss(&self) {
        self.members().values().for_each(|member| member.dismiss());
    }

    fn members(&self) -> MutexGuard<'_, HashMap<u64, Arc<Member>>> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Member {
    pub fn begin(self: &Arc<Self>) -> Task {
        self.requests.fetch_add(1, Ordering::Relaxed);
        self.under_way.fetch_add(1, Ordering::Relaxed);
        self.touch();
        Task(self.clone())
    }

    /// Waits until it is told to go. It need not be waiting at that moment: `Notify` remembers.
    pub async fn dismissed(&self) {
        self.dismissed.notified().await;
    }

    /// Waits until it has to go at once.
    pub async fn cut(&self) {
        self.cut.notified().await;
    }

    pub fn has_asked(&self) -> bool {
        self.requests.load(Ordering::Relaxed) > 0
    }

    fn dismiss(&self) {
        self.leaving.store(true, Ordering::Relaxed);
        self.dismissed.notify_one();
    }

    fn is_leaving(&self) -> bool {
        self.leaving.load(Ordering::Relaxed)
    }

    fn is_at_work(&self) -> bool {
        self.under_way.load(Ordering::Relaxed) > self.listening.load(Ordering::Relaxed)
    }

    fn loss(&self) -> Loss {
        if self.is_leaving() {
            Loss::Leaving
        } else if self.is_at_work() {
            Loss::AtWork
        } else if self.under_way.load(Ordering::Relaxed) > 0 {
            Loss::Listening
        } else if self.has_asked() {
            Loss::Idle
        } else {
            Loss::Unused
        }
    }

    fn touch(&self) {
        let now = u64::try_from(self.since.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.active.store(now, Ordering::Relaxed);
    }

    fn quiet_for(&self) -> Duration {
        self.since.elapsed().saturating_sub(Duration::from_millis(self.active.load(Ordering::Relaxed)))
    }
}

impl Task {
    pub fn listening(&self) -> Listening {
        self.0.listening.fetch_add(1, Ordering::Relaxed);
        Listening(self.0.clone())
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.0.touch();
        self.0.under_way.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.0.touch();
        self.0.listening.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.crowd.members().remove(&self.id);
    }
}

/// A body that says when it has come.
pub struct Heard<B> {
    body: B,
    listening: Option<Listening>,
}

impl<B: Body> Heard<B> {
    pub fn new(body: B, listening: Listening) -> Self {
        let listening = (!body.is_end_stream()).then_some(listening);
        Self { body, listening }
    }
}

impl<B: Body + Unpin> Body for Heard<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        if frame.is_none() || self.body.is_end_stream() {
            self.listening = None;
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests;
