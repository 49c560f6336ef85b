//! Bodies that arrive slowly, or take more memory than their length suggests.

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

#[tokio::test]
async fn body_reserves_its_share_until_it_is_dropped() {
    let budget = BodyBudget::new(100 << 10);
    let whole = budget.read(Body::from(vec![b' '; 30 << 10])).await.ok().unwrap();
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
    let mut reading = Box::pin(budget.read(body));
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
    let mut oldest = Box::pin(budget.read(body));
    assert!(oldest.as_mut().now_or_never().is_none());
    let (second, body) = slow();
    let mut younger = Box::pin(budget.read(body));
    for (sender, reading) in [(&first, &mut oldest), (&second, &mut younger)] {
        sender.unbounded_send(piece(45 << 10)).unwrap();
        assert!(reading.as_mut().now_or_never().is_none());
    }
    assert_eq!(budget.free_bytes(), 10 << 10);

    let whole = budget.read(Body::from(vec![b' '; 40 << 10])).await.ok().unwrap();
    assert_eq!(budget.free_bytes(), 15 << 10);
    first.unbounded_send(piece(1)).unwrap();
    assert_eq!(oldest.await.err(), Some(BodyError::Overloaded));
    drop(second);
    assert_eq!(younger.await.ok().unwrap().bytes.len(), 45 << 10);
    drop(whole);
    assert_eq!(budget.free_bytes(), 100 << 10);
}

#[tokio::test]
async fn complete_body_is_never_given_up() {
    let budget = BodyBudget::new(100 << 10);
    let whole = budget.read(Body::from(vec![b' '; 80 << 10])).await.ok().unwrap();
    assert_eq!(budget.read(Body::from(vec![b' '; 40 << 10])).await.err(), Some(BodyError::Overloaded));
    assert_eq!(budget.free_bytes(), 20 << 10);
    drop(whole);
    assert!(budget.read(Body::from(vec![b' '; 40 << 10])).await.is_ok());
}

#[tokio::test]
async fn body_that_grows_when_parsed_reserves_its_parsed_size() {
    let budget = BodyBudget::default();
    let owners = |many: usize| format!("[{}]", vec!["{}"; many].join(","));
    let whole = budget.read(Body::from(owners(1001))).await.ok().unwrap();
    assert!(TOTAL_BUDGET_BYTES - budget.free_bytes() >= 1000 * size_of::<crate::object::OwnerReference>());
    drop(whole);
    // Two MiB that would take seventy once parsed.
    assert_eq!(budget.read(Body::from(owners(700_000))).await.err(), Some(BodyError::TooLarge));
    // Commas within strings do not count.
    let text = format!("{{\"a\":\"{}\"}}", ",\\\",".repeat(700_000));
    let whole = budget.read(Body::from(text.clone())).await.ok().unwrap();
    assert_eq!(
        TOTAL_BUDGET_BYTES - budget.free_bytes(),
        text.len().div_ceil(BYTES_PER_PERMIT) * BYTES_PER_PERMIT
    );
    drop(whole);
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
    assert_eq!(budget.read(Body::from_stream(endless)).await.err(), Some(BodyError::TooLarge));
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

    assert_eq!(BodyBudget::default().read(Body::new(Announced)).await.err(), Some(BodyError::TooLarge));
}

#[tokio::test]
async fn body_that_breaks_off_is_incomplete() {
    let budget = BodyBudget::default();
    let broken = stream::iter([piece(10), Err(std::io::ErrorKind::ConnectionReset.into())]);
    assert_eq!(budget.read(Body::from_stream(broken)).await.err(), Some(BodyError::Incomplete));
    assert_eq!(budget.free_bytes(), TOTAL_BUDGET_BYTES);
}
