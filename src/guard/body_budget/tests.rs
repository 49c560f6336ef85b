//! Bodies that arrive slowly, or are too large.

use axum::body::Bytes;
use futures::{FutureExt, channel::mpsc, stream};

use super::*;

/// A body that is sent in pieces.
fn slow() -> (mpsc::UnboundedSender<Result<Bytes, std::io::Error>>, Body) {
    let (sender, receiver) = mpsc::unbounded();
    (sender, Body::from_stream(receiver))
}

fn piece(size: usize) -> Result<Bytes, std::io::Error> {
    Ok(Bytes::from(vec![b' '; size]))
}

async fn read(budget: &BodyBudget, body: Body) -> Result<ReservedBody, BodyError> {
    budget.read(Caller::Peer([10, 0, 0, 1].into()), body).await
}

#[tokio::test]
async fn body_reserves_its_share_until_it_is_dropped() {
    let budget = BodyBudget::new(100 << 10);
    let whole = read(&budget, Body::from(vec![b' '; 30 << 10])).await.ok().unwrap();
    assert_eq!((whole.bytes.len(), budget.free_bytes()), (30 << 10, 70 << 10));
    let mut reservation = whole.reservation;
    reservation.shrink_to(9 << 10);
    assert_eq!(budget.free_bytes(), 91 << 10);
    drop(reservation);
    assert_eq!(budget.free_bytes(), 100 << 10);
    assert!(budget.incomplete().is_empty());
}

#[tokio::test]
async fn slow_body_reserves_only_what_has_arrived() {
    let budget = BodyBudget::new(100 << 10);
    let (sender, body) = slow();
    let mut reading = Box::pin(read(&budget, body));
    assert!(reading.as_mut().now_or_never().is_none());
    assert_eq!(budget.free_bytes(), 99 << 10);
    sender.unbounded_send(piece(10 << 10)).unwrap();
    assert!(reading.as_mut().now_or_never().is_none());
    assert_eq!(budget.free_bytes(), 90 << 10);
    // The peer disconnects.
    drop(reading);
    assert_eq!(budget.free_bytes(), 100 << 10);
    assert!(budget.incomplete().is_empty());
}

#[tokio::test]
async fn exhausted_budget_gives_up_the_oldest_incomplete_body() {
    let budget = BodyBudget::new(100 << 10);
    let (first, body) = slow();
    let mut oldest = Box::pin(read(&budget, body));
    assert!(oldest.as_mut().now_or_never().is_none());
    let (second, body) = slow();
    let mut younger = Box::pin(read(&budget, body));
    for (sender, reading) in [(&first, &mut oldest), (&second, &mut younger)] {
        sender.unbounded_send(piece(45 << 10)).unwrap();
        assert!(reading.as_mut().now_or_never().is_none());
    }
    assert_eq!(budget.free_bytes(), 10 << 10);

    let whole = read(&budget, Body::from(vec![b' '; 40 << 10])).await.ok().unwrap();
    assert_eq!(budget.free_bytes(), 15 << 10);
    first.unbounded_send(piece(1)).unwrap();
    assert_eq!(oldest.await.err(), Some(BodyError::Overloaded));
    drop(second);
    assert_eq!(younger.await.ok().unwrap().bytes.len(), 45 << 10);
    drop(whole);
    assert_eq!(budget.free_bytes(), 100 << 10);
}

#[tokio::test]
async fn complete_body_is_never_given_up_but_waited_for() {
    let budget = BodyBudget::new(100 << 10);
    let whole = read(&budget, Body::from(vec![b' '; 80 << 10])).await.ok().unwrap();
    let mut waiting = Box::pin(read(&budget, Body::from(vec![b' '; 40 << 10])));
    assert!(waiting.as_mut().now_or_never().is_none());
    drop(whole);
    assert_eq!(waiting.await.ok().unwrap().bytes.len(), 40 << 10);
    assert_eq!(budget.free_bytes(), 100 << 10);
}

#[tokio::test]
async fn body_that_waits_is_given_up_for_a_younger_one() {
    let budget = BodyBudget::new(100 << 10);
    let (first, body) = slow();
    let mut oldest = Box::pin(read(&budget, body));
    let (second, body) = slow();
    let mut younger = Box::pin(read(&budget, body));
    for (sender, reading) in [(&first, &mut oldest), (&second, &mut younger)] {
        sender.unbounded_send(piece(45 << 10)).unwrap();
        assert!(reading.as_mut().now_or_never().is_none());
    }
    first.unbounded_send(piece(30 << 10)).unwrap();
    assert!(oldest.as_mut().now_or_never().is_none(), "it waits");
    // There is enough for this piece, but others do not overtake.
    second.unbounded_send(piece(5 << 10)).unwrap();
    assert!(younger.as_mut().now_or_never().is_none());
    assert_eq!(oldest.await.err(), Some(BodyError::Overloaded));
    drop(second);
    assert_eq!(younger.await.ok().unwrap().bytes.len(), 50 << 10);
    assert_eq!(budget.free_bytes(), 100 << 10);
    assert!(budget.incomplete().is_empty());
}

#[tokio::test]
async fn endless_body_is_read_no_further_than_the_limit() {
    let budget = BodyBudget::default();
    let mut sent = 0;
    let endless = stream::repeat_with(move || {
        sent += 1 << 20;
        assert!(sent <= MAX_BODY_BYTES + (2 << 20), "it is read beyond the limit");
        piece(1 << 20)
    });
    assert_eq!(read(&budget, Body::from_stream(endless)).await.err(), Some(BodyError::TooLarge));
    assert_eq!(budget.free_bytes(), TOTAL_BUDGET_BYTES);
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

    assert_eq!(read(&BodyBudget::default(), Body::new(Announced)).await.err(), Some(BodyError::TooLarge));
}

#[tokio::test]
async fn body_that_breaks_off_is_incomplete() {
    let budget = BodyBudget::default();
    let broken = stream::iter([piece(10), Err(std::io::ErrorKind::ConnectionReset.into())]);
    assert_eq!(read(&budget, Body::from_stream(broken)).await.err(), Some(BodyError::Incomplete));
    assert_eq!(budget.free_bytes(), TOTAL_BUDGET_BYTES);
}
