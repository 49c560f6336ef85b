//! Bounds the connections of a listener. When there are too many, a newcomer replaces the connection that is
//! least worth keeping, so that no flood of idle, slow or half-open connections keeps the API server out.

use std::{
    cmp::Reverse,
    collections::HashMap,
    net::IpAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use http_body::{Body, Frame, SizeHint};
use parking_lot::Mutex;
use tokio::{
    sync::Notify,
    task::{AbortHandle, Id},
    time::Instant,
};

use super::ConnectionLimits;

/// The open connections of a listener. Only its accept loop uses it.
pub struct ConnectionLimiter {
    limits: ConnectionLimits,
    open: HashMap<Id, OpenConnection>,
}

struct OpenConnection {
    connection: Arc<PeerConnection>,
    task: AbortHandle,
    /// It no longer counts as one of `max_connections`.
    closing: bool,
}

/// What a connection is doing.
pub struct PeerConnection {
    peer: IpAddr,
    accepted: Instant,
    last_request: Mutex<Option<Instant>>,
    /// Clones of these are held by requests without an answer, and by bodies that are not complete: their
    /// strong counts are one more than there are of either.
    requests: Arc<()>,
    bodies: Arc<()>,
    close: Notify,
}

/// A request without an answer, or a body that is not complete, until it is dropped.
type InProgress = Arc<()>;

/// In the order in which connections are closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Phase {
    /// There was no request yet.
    Unused,
    Idle,
    /// A body is incomplete: a peer can stay in this phase for seconds without any effort.
    Receiving,
    /// The peer waits for an answer.
    Answering,
}

impl ConnectionLimiter {
    pub fn new(limits: ConnectionLimits) -> Self {
        Self { limits, open: HashMap::new() }
    }

    /// Makes room for a new connection. At the limit, another connection is closed. One that waits for an answer is
    /// closed only if its peer has more connections than any other, and at least two more than the newcomer's peer.
    /// False: there is no such connection, so the newcomer is refused.
    pub fn admit(&mut self, newcomer: IpAddr) -> bool {
        let counted = || self.open.iter().filter(|(_, open)| !open.closing);
        if counted().count() < self.limits.max_connections {
            return true;
        }
        let mut per_peer: HashMap<IpAddr, usize> = HashMap::new();
        counted().for_each(|(_, open)| *per_peer.entry(open.connection.peer).or_default() += 1);
        let connections_of = |peer| per_peer.get(&peer).copied().unwrap_or_default();
        let candidates = counted().map(|(id, open)| {
            let phase = open.connection.phase();
            let of_same_peer =
                if phase == Phase::Answering { connections_of(open.connection.peer) } else { 0 };
            (*id, (phase, Reverse(of_same_peer), open.connection.last_active()))
        });
        let Some((id, (phase, Reverse(of_same_peer), _))) = candidates.min_by_key(|(_, key)| *key) else {
            return false;
        };
        if phase == Phase::Answering && of_same_peer <= connections_of(newcomer) + 1 {
            return false;
        }
        self.close(id);
        true
    }

    pub fn add(&mut self, connection: Arc<PeerConnection>, task: AbortHandle) {
        self.open.insert(task.id(), OpenConnection { connection, task, closing: false });
    }

    /// The task of a connection has ended.
    pub fn remove(&mut self, id: Id) {
        self.open.remove(&id);
    }

    pub fn len(&self) -> usize {
        self.open.len()
    }

    /// Closes connections that were unused or idle for too long.
    pub fn close_expired(&mut self) {
        let expired = |connection: &PeerConnection| match connection.phase() {
            Phase::Unused => connection.last_active().elapsed() >= self.limits.first_request_timeout,
            Phase::Idle => connection.last_active().elapsed() >= self.limits.idle_timeout,
            Phase::Receiving | Phase::Answering => false,
        };
        let open = self.open.iter().filter(|(_, open)| !open.closing && expired(&open.connection));
        let ids: Vec<Id> = open.map(|(id, _)| *id).collect();
        ids.into_iter().for_each(|id| self.close(id));
    }

    /// Closes all connections, once their requests are answered.
    pub fn close_all_gracefully(&mut self) {
        for open in self.open.values_mut() {
            open.closing = true;
            if open.connection.phase() == Phase::Unused {
                open.task.abort();
            } else {
                open.connection.close.notify_one();
            }
        }
    }

    /// Closes a connection: gracefully if it is idle, since its next request may be on the way. A peer that
    /// ignores a graceful close keeps its connection open, so only a few are closed gracefully at a time.
    fn close(&mut self, id: Id) {
        let closing = self.open.values().filter(|open| open.closing).count();
        let Some(open) = self.open.get_mut(&id) else { return };
        if open.connection.phase() == Phase::Idle && closing < self.limits.max_closing {
            open.closing = true;
            open.connection.close.notify_one();
        } else {
            open.task.abort();
            self.open.remove(&id);
        }
    }
}

impl PeerConnection {
    pub fn new(peer: IpAddr) -> Self {
        Self {
            peer,
            accepted: Instant::now(),
            last_request: Mutex::default(),
            requests: Arc::default(),
            bodies: Arc::default(),
            close: Notify::new(),
        }
    }

    pub const fn peer(&self) -> IpAddr {
        self.peer
    }

    /// A new request, and its body.
    pub fn begin_request(&self) -> (InProgress, InProgress) {
        *self.last_request.lock() = Some(Instant::now());
        (self.requests.clone(), self.bodies.clone())
    }

    /// Waits until the connection has to be closed gracefully. A request to close it that comes
    /// earlier is not lost: `Notify` stores it.
    pub async fn close_requested(&self) {
        self.close.notified().await;
    }

    fn phase(&self) -> Phase {
        let in_progress = |counter: &Arc<()>| Arc::strong_count(counter) - 1;
        // A body may outlive its request.
        if in_progress(&self.requests) > in_progress(&self.bodies) {
            Phase::Answering
        } else if in_progress(&self.requests) > 0 {
            Phase::Receiving
        } else if self.last_request.lock().is_some() {
            Phase::Idle
        } else {
            Phase::Unused
        }
    }

    fn last_active(&self) -> Instant {
        self.last_request.lock().unwrap_or(self.accepted)
    }
}

/// A request body that is in progress until it was read to its end.
pub struct TrackedBody<B> {
    body: B,
    in_progress: Option<InProgress>,
}

impl<B: Body> TrackedBody<B> {
    pub fn new(body: B, in_progress: InProgress) -> Self {
        let in_progress = (!body.is_end_stream()).then_some(in_progress);
        Self { body, in_progress }
    }
}

impl<B: Body + Unpin> Body for TrackedBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(context));
        if frame.is_none() {
            self.in_progress = None;
        }
        Poll::Ready(frame)
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

#[cfg(test)]
mod tests;
