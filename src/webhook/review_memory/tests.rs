//! Bodies that arrive slowly, or are too large.

use axum::body::Bytes;
use futures::{FutureExt, channel::mpsc, future::maybe_done, stream};

use super::*;

/// Memory for 100 KiB of bodies.
fn memory() -> ReviewMemory {
    ReviewMemory { bodies: FairSemaphore::new(100 << 10), ..ReviewMemory::default() }
}

/// A body that is sent in pieces.
fn slow() -> (mpsc::UnboundedSender<Result<Bytes, std::io::Error>>, Body) {
    let (sender, receiver) = mpsc::unbounded();
    (sender, Body::from_stream(receiver))
}

fn piece(size: usize) -> Result<Bytes, std::io::Error> {
    Ok(Bytes::from(vec![b' '; size]))
}

async fn receive(memory: &ReviewMemory, peer: u8, body: Body) -> Result<ReceivedBody, BodyError> {
    memory.receive(Caller::Peer([10, 0, 0, peer].into()), body).await
}

/// A body that has arrived as a whole.
async fn whole(memory: &ReviewMemory, peer: u8, size: usize) -> Result<usize, BodyError> {
    receive(memory, peer, Body::from(vec![b' '; size])).await.map(|body| body.bytes.len())
}

#[tokio::test]
async fn body_has_its_share_until_it_is_dropped() {
    let memory = memory();
    let mut body = receive(&memory, 1, Body::from(vec![b' '; 30 << 10])).await.ok().unwrap();
    assert_eq!((body.bytes.len(), memory.bodies.free()), (30 << 10, 70 << 10));
    assert_eq!(SMALL_REVIEWS_BYTES - memory.small.free(), 16 * (30 << 10));
    body.share.shrink_to(9 << 10);
    assert_eq!(memory.bodies.free(), 91 << 10);
    drop(body);
    assert_eq!((memory.bodies.free(), memory.small.free()), (100 << 10, SMALL_REVIEWS_BYTES));
}

#[tokio::test]
async fn slow_body_has_a_share_for_what_has_arrived() {
    let memory = memory();
    let (sender, body) = slow();
    let mut reading = Box::pin(receive(&memory, 1, body));
    assert!(reading.as_mut().now_or_never().is_none());
    assert_eq!(memory.bodies.free(), 96 << 10);
    sender.unbounded_send(piece(10 << 10)).unwrap();
    assert!(reading.as_mut().now_or_never().is_none());
    assert_eq!(memory.bodies.free(), 90 << 10);
    // The peer disconnects.
    drop(reading);
    assert_eq!(memory.bodies.free(), 100 << 10);
}

#[tokio::test]
async fn exhausted_memory_is_taken_from_the_largest_body_of_the_peer_that_holds_the_most() {
    let memory = memory();
    let (first, body) = slow();
    let mut large = Box::pin(receive(&memory, 66, body));
    let (_second, body) = slow();
    let mut largest = Box::pin(receive(&memory, 66, body));
    for (sender, reading, size) in [(&first, &mut large, 40 << 10), (&_second, &mut largest, 50 << 10)] {
        sender.unbounded_send(piece(size)).unwrap();
        assert!(reading.as_mut().now_or_never().is_none());
    }
    assert_eq!(memory.bodies.free(), 10 << 10);
    let mut small = Box::pin(receive(&memory, 1, Body::from(vec![b' '; 30 << 10])));
    assert!(small.as_mut().now_or_never().is_none());
    assert_eq!(largest.await.err(), Some(BodyError::Overloaded));
    assert_eq!(small.await.ok().unwrap().bytes.len(), 30 << 10);
    drop(first);
    assert_eq!(large.await.ok().unwrap().bytes.len(), 40 << 10);
    assert_eq!(memory.bodies.free(), 100 << 10);
}

#[tokio::test]
async fn smaller_body_of_the_same_peer_goes_first() {
    let memory = memory();
    let (sender, body) = slow();
    let mut large = Box::pin(receive(&memory, 1, body));
    sender.unbounded_send(piece(90 << 10)).unwrap();
    assert!(large.as_mut().now_or_never().is_none());
    let mut small = Box::pin(receive(&memory, 1, Body::from(vec![b' '; 20 << 10])));
    assert!(small.as_mut().now_or_never().is_none());
    assert_eq!(large.await.err(), Some(BodyError::Overloaded));
    assert_eq!(small.await.ok().unwrap().bytes.len(), 20 << 10);
}

#[tokio::test]
async fn small_body_that_waits_is_not_given_up_for_one_of_a_peer_that_holds_more() {
    let memory = memory();
    let complete = receive(&memory, 66, Body::from(vec![b' '; 60 << 10])).await.ok().unwrap();
    let (modest, body) = slow();
    let mut small = Box::pin(receive(&memory, 1, body));
    assert!(small.as_mut().now_or_never().is_none());
    let (greedy, body) = slow();
    let mut large = Box::pin(receive(&memory, 66, body));
    greedy.unbounded_send(piece(35 << 10)).unwrap();
    assert!(large.as_mut().now_or_never().is_none());
    modest.unbounded_send(piece(10 << 10)).unwrap();
    assert!(small.as_mut().now_or_never().is_none());
    greedy.unbounded_send(piece(20 << 10)).unwrap();
    assert!(large.as_mut().now_or_never().is_none_or(|given_up| given_up.is_err()));
    drop(modest);
    drop(complete);
    assert_eq!(small.await.map(|body| body.bytes.len()), Ok(10 << 10));
}

#[tokio::test]
async fn body_that_is_being_parsed_is_never_given_up_but_waited_for() {
    let memory = memory();
    let parsed = receive(&memory, 66, Body::from(vec![b' '; 80 << 10])).await.ok().unwrap();
    let mut waiting = Box::pin(whole(&memory, 1, 40 << 10));
    assert!(waiting.as_mut().now_or_never().is_none());
    drop(parsed);
    assert_eq!(waiting.await, Ok(40 << 10));
    assert_eq!(memory.bodies.free(), 100 << 10);
}

#[tokio::test]
async fn body_that_waits_to_be_parsed_is_given_up_for_a_small_one() {
    let memory = ReviewMemory { small: FairSemaphore::new(1), ..memory() };
    let _parsing = memory.small.acquire(Caller::Peer([10, 0, 0, 66].into()), 1).await;
    let mut complete = Box::pin(receive(&memory, 66, Body::from(vec![b' '; 90 << 10])));
    assert!(complete.as_mut().now_or_never().is_none());
    let mut small = Box::pin(receive(&memory, 1, Body::from(vec![b' '; 20 << 10])));
    assert!(small.as_mut().now_or_never().is_none());
    assert_eq!(complete.await.err(), Some(BodyError::Overloaded));
    assert!(small.as_mut().now_or_never().is_none());
    assert_eq!(memory.bodies.free(), 80 << 10);
}

#[tokio::test]
async fn two_bodies_that_wait_for_each_other_are_not_both_late() {
    for peers in [[1, 1], [1, 2]] {
        let memory = memory();
        let [mut first, mut second] = peers.map(|peer| {
            let (sender, body) = slow();
            (sender, Box::pin(maybe_done(receive(&memory, peer, body))))
        });
        for size in [50 << 10, 1] {
            for (sender, body) in [&mut first, &mut second] {
                sender.unbounded_send(piece(size)).unwrap();
                let _ = body.as_mut().now_or_never();
            }
        }
        drop((first.0, second.0));
        futures::future::join(first.1.as_mut(), second.1.as_mut()).await;
        let received = [first.1, second.1].map(|mut body| body.as_mut().take_output().unwrap().is_ok());
        assert_ne!(received[0], received[1], "{peers:?}");
    }
}

#[tokio::test]
async fn endless_body_is_read_no_further_than_the_limit() {
    let memory = ReviewMemory::default();
    let mut sent = 0;
    let endless = stream::repeat_with(move || {
        sent += 1 << 20;
        assert!(sent <= MAX_BODY_BYTES + (2 << 20), "it is read beyond the limit");
        piece(1 << 20)
    });
    assert_eq!(receive(&memory, 1, Body::from_stream(endless)).await.err(), Some(BodyError::TooLarge));
    assert_eq!(memory.used(), [0; 3]);
}

#[tokio::test]
async fn body_with_too_large_a_content_length_is_not_read() {
    struct Announced;

    impl HttpBody for Announced {
        type Data = Bytes;
        type Error = std::io::Error;

        fn poll_frame(
            self: std::pin::Pin<&mut Self>,
            _: &mut std::task::Context<'_>,
        ) -> std::task::Poll<Option<Result<http_body::Frame<Bytes>, std::io::Error>>> {
            panic!("it is read")
        }

        fn size_hint(&self) -> http_body::SizeHint {
            http_body::SizeHint::with_exact(MAX_BODY_BYTES as u64 + 1)
        }
    }

    let memory = ReviewMemory::default();
    assert_eq!(receive(&memory, 1, Body::new(Announced)).await.err(), Some(BodyError::TooLarge));
}

#[tokio::test]
async fn body_that_breaks_off_is_incomplete() {
    let memory = ReviewMemory::default();
    let broken = stream::iter([piece(10), Err(std::io::ErrorKind::ConnectionReset.into())]);
    assert_eq!(receive(&memory, 1, Body::from_stream(broken)).await.err(), Some(BodyError::Incomplete));
    assert_eq!(memory.used(), [0; 3]);
}
