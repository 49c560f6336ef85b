//! Bodies that come slowly, or weigh more than they look.

use axum::body::Bytes;
use futures::{FutureExt, channel::mpsc, stream};

use super::*;

/// A body that is sent piece by piece.
fn slow() -> (mpsc::UnboundedSender<Result<Bytes, std::io::Error>>, Body) {
    let (sender, receiver) = mpsc::unbounded();
    (sender, Body::from_stream(receiver))
}

fn piece(size: usize) -> Result<Bytes, std::io::Error> {
    Ok(Bytes::from(vec![b' '; size]))
}

#[tokio::test]
async fn a_body_is_paid_for_until_it_is_dropped() {
    let intake = Intake::new(100 << 10);
    let load = intake.read(Body::from(vec![b' '; 30 << 10])).await.ok().unwrap();
    assert_eq!((load.bytes.len(), intake.free()), (30 << 10, 70 << 10));
    let mut paid = load.paid;
    paid.keep(9 << 10);
    assert_eq!(intake.free(), 91 << 10);
    drop(paid);
    assert_eq!(intake.free(), 100 << 10);
    assert!(intake.coming().is_empty());
}

#[tokio::test]
async fn a_slow_body_costs_what_has_come_of_it() {
    let intake = Intake::new(100 << 10);
    let (sender, body) = slow();
    let mut reading = Box::pin(intake.read(body));
    assert!(reading.as_mut().now_or_never().is_none());
    assert_eq!(intake.free(), 99 << 10);
    sender.unbounded_send(piece(10 << 10)).unwrap();
    assert!(reading.as_mut().now_or_never().is_none());
    assert_eq!(intake.free(), 90 << 10);
    // Its peer is gone.
    drop(reading);
    assert_eq!(intake.free(), 100 << 10);
    assert!(intake.coming().is_empty());
}

#[tokio::test]
async fn when_the_budget_is_used_up_the_body_that_has_taken_longest_makes_room() {
    let intake = Intake::new(100 << 10);
    let (first, body) = slow();
    let mut oldest = Box::pin(intake.read(body));
    assert!(oldest.as_mut().now_or_never().is_none());
    let (second, body) = slow();
    let mut younger = Box::pin(intake.read(body));
    for (sender, reading) in [(&first, &mut oldest), (&second, &mut younger)] {
        sender.unbounded_send(piece(45 << 10)).unwrap();
        assert!(reading.as_mut().now_or_never().is_none());
    }
    assert_eq!(intake.free(), 10 << 10);

    let load = intake.read(Body::from(vec![b' '; 40 << 10])).await.ok().unwrap();
    assert_eq!(intake.free(), 15 << 10);
    first.unbounded_send(piece(1)).unwrap();
    assert_eq!(oldest.await.err(), Some(Unfit::Crowded));
    drop(second);
    assert_eq!(younger.await.ok().unwrap().bytes.len(), 45 << 10);
    drop(load);
    assert_eq!(intake.free(), 100 << 10);
}

#[tokio::test]
async fn a_body_that_has_come_keeps_its_place() {
    let intake = Intake::new(100 << 10);
    let load = intake.read(Body::from(vec![b' '; 80 << 10])).await.ok().unwrap();
    assert_eq!(intake.read(Body::from(vec![b' '; 40 << 10])).await.err(), Some(Unfit::Crowded));
    assert_eq!(intake.free(), 20 << 10);
    drop(load);
    assert!(intake.read(Body::from(vec![b' '; 40 << 10])).await.is_ok());
}

#[tokio::test]
async fn what_becomes_large_when_it_is_read_costs_as_much_before() {
    let intake = Intake::default();
    let owners = |many: usize| format!("[{}]", vec!["{}"; many].join(","));
    let load = intake.read(Body::from(owners(1001))).await.ok().unwrap();
    assert!(BUDGET - intake.free() >= 1000 * size_of::<crate::object::OwnerReference>());
    drop(load);
    // Two MiB that would become seventy.
    assert_eq!(intake.read(Body::from(owners(700_000))).await.err(), Some(Unfit::TooLarge));
    // Commas in a value are none.
    let text = format!("{{\"a\":\"{}\"}}", ",\\\",".repeat(700_000));
    let load = intake.read(Body::from(text.clone())).await.ok().unwrap();
    assert_eq!(BUDGET - intake.free(), text.len().div_ceil(UNIT) * UNIT);
    drop(load);
}

#[tokio::test]
async fn a_body_without_end_is_read_no_further_than_it_may_be() {
    let intake = Intake::default();
    let mut sent = 0;
    let endless = stream::repeat_with(move || {
        sent += 1 << 20;
        assert!(sent <= MOST_BYTES + (2 << 20), "it is read on");
        piece(1 << 20)
    });
    assert_eq!(intake.read(Body::from_stream(endless)).await.err(), Some(Unfit::TooLarge));
    assert_eq!(intake.free(), BUDGET);
}

#[tokio::test]
async fn a_body_that_says_it_is_too_large_is_not_read_at_all() {
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
            http_body::SizeHint::with_exact(MOST_BYTES as u64 + 1)
        }
    }

    assert_eq!(Intake::default().read(Body::new(Announced)).await.err(), Some(Unfit::TooLarge));
}

#[tokio::test]
async fn a_body_that_breaks_off_is_no_review() {
    let intake = Intake::default();
    let broken = stream::iter([piece(10), Err(std::io::ErrorKind::ConnectionReset.into())]);
    assert_eq!(intake.read(Body::from_stream(broken)).await.err(), Some(Unfit::BrokenOff));
    assert_eq!(intake.free(), BUDGET);
}
