//! Which connections are closed, and which are kept.

use std::time::Duration;

use axum::body::Bytes;

use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn limiter(max_connections: usize, max_closing: usize) -> ConnectionLimiter {
    ConnectionLimiter::new(ConnectionLimits { max_connections, max_closing, ..ConnectionLimits::default() })
}

fn peer(number: u8) -> IpAddr {
    [10, 0, 0, number].into()
}

/// A connection whose task ends only when it is aborted.
struct Opened {
    connection: Arc<PeerConnection>,
    task: tokio::task::JoinHandle<()>,
}

#[derive(Debug, PartialEq)]
enum ConnectionState {
    Open,
    /// It is being closed gracefully.
    Closing,
    Aborted,
}
use ConnectionState::{Aborted, Closing, Open};

impl Opened {
    async fn state(&self, limiter: &ConnectionLimiter) -> ConnectionState {
        // An aborted task ends when it is next scheduled.
        tokio::task::yield_now().await;
        let open = limiter.open.get(&self.task.id());
        assert_eq!(open.is_none(), self.task.is_finished());
        open.map_or(Aborted, |open| if open.closing { Closing } else { Open })
    }

    fn use_once(&self) {
        drop(self.connection.begin_request());
    }

    /// A request whose body has arrived.
    fn answering(&self) -> InProgress {
        self.connection.begin_request().0
    }
}

async fn try_open(limiter: &mut ConnectionLimiter, number: u8) -> Option<Opened> {
    tokio::time::advance(SECOND).await;
    limiter.admit(peer(number)).then(|| {
        let connection = Arc::new(PeerConnection::new(peer(number)));
        let task = tokio::spawn(std::future::pending());
        limiter.add(connection.clone(), task.abort_handle());
        Opened { connection, task }
    })
}

async fn open(limiter: &mut ConnectionLimiter, number: u8) -> Opened {
    try_open(limiter, number).await.expect("the connection is admitted")
}

async fn open_many<const N: usize>(limiter: &mut ConnectionLimiter, numbers: [u8; N]) -> Vec<Opened> {
    let mut opened = Vec::new();
    for number in numbers {
        opened.push(open(limiter, number).await);
    }
    opened
}

async fn states(limiter: &ConnectionLimiter, opened: &[Opened]) -> Vec<ConnectionState> {
    let mut states = Vec::new();
    for opened in opened {
        states.push(opened.state(limiter).await);
    }
    states
}

#[tokio::test(start_paused = true)]
async fn newcomer_replaces_unused_connections_before_idle_ones() {
    let mut limiter = limiter(3, 10);
    let mut opened = open_many(&mut limiter, [1, 1, 1]).await;
    opened[0].use_once();
    opened.push(open(&mut limiter, 1).await);
    // The one that has been unused for longest.
    assert_eq!(states(&limiter, &opened).await, [Open, Aborted, Open, Open]);
    opened.push(open(&mut limiter, 1).await);
    assert_eq!(states(&limiter, &opened).await, [Open, Aborted, Aborted, Open, Open]);
    opened[4].use_once();
    opened[3].use_once();
    open(&mut limiter, 1).await;
    assert_eq!(states(&limiter, &opened).await, [Closing, Aborted, Aborted, Open, Open]);
    opened[0].connection.close_requested().await;
}

#[tokio::test(start_paused = true)]
async fn connection_that_waits_for_an_answer_is_kept_while_any_other_does_not() {
    let mut limiter = limiter(3, 10);
    let mut opened = open_many(&mut limiter, [1, 1, 1]).await;
    let _answering = opened[0].answering();
    let (_request, body) = opened[1].connection.begin_request();
    opened[2].use_once();
    opened.push(open(&mut limiter, 1).await);
    assert_eq!(states(&limiter, &opened).await, [Open, Open, Closing, Open]);
    let _answering = opened[3].answering();
    // A stalled body keeps no newcomer out.
    opened.push(open(&mut limiter, 1).await);
    assert_eq!(states(&limiter, &opened).await, [Open, Aborted, Closing, Open, Open]);
    let _answering = opened[4].answering();
    assert!(try_open(&mut limiter, 1).await.is_none(), "all wait for answers for the same peer");
    assert_eq!(states(&limiter, &opened).await, [Open, Aborted, Closing, Open, Open]);
    drop(body);
    assert_eq!(opened[1].connection.phase(), Phase::Answering);
}

#[tokio::test(start_paused = true)]
async fn peer_with_most_connections_loses_one_when_all_wait_for_answers() {
    let mut limiter = limiter(4, 10);
    let opened = open_many(&mut limiter, [9, 1, 1, 1]).await;
    let mut answering = Vec::new();
    for opened in &opened {
        answering.push(opened.answering());
        tokio::time::advance(SECOND).await;
    }
    let newcomer = open(&mut limiter, 7).await;
    assert_eq!(states(&limiter, &opened).await, [Open, Aborted, Open, Open]);
    let _answering = newcomer.answering();
    assert!(try_open(&mut limiter, 1).await.is_none());
    // No peer has at least two connections more than the newcomer's.
    assert!(try_open(&mut limiter, 9).await.is_none());
}

#[tokio::test(start_paused = true)]
async fn connections_that_do_not_close_are_bounded() {
    let mut limiter = limiter(2, 3);
    let mut opened = Vec::new();
    for number in 0..50 {
        opened.push(open(&mut limiter, 1).await);
        opened[number].use_once();
        assert_eq!(limiter.len(), (number + 1).min(5));
    }
    let states = states(&limiter, &opened).await;
    assert!(states[..3].iter().all(|state| *state == Closing));
    assert!(states[3..48].iter().all(|state| *state == Aborted));
    assert!(states[48..].iter().all(|state| *state == Open));
    opened.iter().for_each(|opened| limiter.remove(opened.task.id()));
    assert_eq!(limiter.len(), 0);
}

#[tokio::test(start_paused = true)]
async fn connection_that_is_unused_or_idle_for_too_long_is_closed() {
    let mut limiter = limiter(9, 9);
    let ConnectionLimits { first_request_timeout, idle_timeout, .. } = ConnectionLimits::default();
    let opened = open_many(&mut limiter, [1, 1, 1, 1]).await;
    opened[1].use_once();
    let _answering = opened[2].answering();
    let _receiving = opened[3].connection.begin_request();
    limiter.close_expired();
    assert_eq!(states(&limiter, &opened).await, [Open, Open, Open, Open]);
    tokio::time::advance(first_request_timeout).await;
    limiter.close_expired();
    assert_eq!(states(&limiter, &opened).await, [Aborted, Open, Open, Open]);
    tokio::time::advance(idle_timeout).await;
    limiter.close_expired();
    assert_eq!(states(&limiter, &opened).await, [Aborted, Closing, Open, Open]);
}

#[tokio::test]
async fn idle_connections_outlive_the_idle_timeout_of_the_api_server() {
    // http.Transport of the API server's webhook client: IdleConnTimeout.
    let api_server = Duration::from_secs(90);
    let ConnectionLimits { header_timeout, idle_timeout, .. } = ConnectionLimits::default();
    assert!(header_timeout > api_server && idle_timeout > api_server);
}

#[tokio::test(start_paused = true)]
async fn close_that_is_requested_early_is_not_lost() {
    let mut limiter = limiter(9, 9);
    let opened = open(&mut limiter, 1).await;
    opened.use_once();
    limiter.close_all_gracefully();
    opened.connection.close_requested().await;
}

#[tokio::test(start_paused = true)]
async fn body_is_in_progress_until_it_was_read_to_its_end() {
    let connection = PeerConnection::new(peer(1));
    let (request, pending) = connection.begin_request();
    let chunks = futures::stream::iter(["a", "b"].map(|text| Ok::<_, std::io::Error>(Bytes::from(text))));
    let mut body = TrackedBody::new(axum::body::Body::from_stream(chunks), pending);
    for expected in [Phase::Receiving, Phase::Receiving, Phase::Answering] {
        let frame = std::future::poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await;
        assert_eq!((connection.phase(), frame.is_none()), (expected, expected == Phase::Answering));
    }
    // An empty body is complete from the start, an unread one when it is dropped.
    let empty = TrackedBody::new(axum::body::Body::empty(), connection.bodies.clone());
    assert_eq!(connection.phase(), Phase::Answering);
    let unread = TrackedBody::new(axum::body::Body::from("a"), connection.bodies.clone());
    assert_eq!(connection.phase(), Phase::Receiving);
    drop((unread, empty, body));
    assert_eq!(connection.phase(), Phase::Answering);
    drop(request);
    assert_eq!(connection.phase(), Phase::Idle);
}
