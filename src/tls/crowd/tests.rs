//! Who goes, and who stays.

use axum::body::Bytes;

use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn crowd(connections: usize, leaving: usize) -> Arc<Crowd> {
    Arc::new(Crowd::new(Limits { connections, leaving, ..Limits::default() }))
}

fn peer(number: u8) -> IpAddr {
    [10, 0, 0, number].into()
}

async fn admit(crowd: &Arc<Crowd>, number: u8) -> Guest {
    tokio::time::advance(SECOND).await;
    crowd.admit(peer(number)).expect("there is room")
}

#[tokio::test(start_paused = true)]
async fn who_never_asked_goes_before_who_did() {
    let crowd = crowd(3, 10);
    let asked = admit(&crowd, 1).await;
    drop(asked.member.begin());
    let (first, second) = (admit(&crowd, 1).await, admit(&crowd, 1).await);
    let fourth = admit(&crowd, 1).await;
    let gone = || [&asked, &first, &second, &fourth].map(|guest| guest.member.is_leaving());
    assert_eq!(gone(), [false, true, false, false], "the one that has been idle longest");
    let fifth = admit(&crowd, 1).await;
    assert_eq!(gone(), [false, true, true, false]);
    drop(fifth.member.begin());
    drop(fourth.member.begin());
    admit(&crowd, 1).await;
    assert_eq!(gone(), [true, true, true, false]);
}

#[tokio::test(start_paused = true)]
async fn who_is_at_work_is_not_sent_away_while_anybody_is_not() {
    let crowd = crowd(3, 10);
    let (working, stalled, idle) = (admit(&crowd, 1).await, admit(&crowd, 1).await, admit(&crowd, 1).await);
    let _task = working.member.begin();
    let slow = stalled.member.begin();
    let body = slow.listening();
    drop(idle.member.begin());
    let gone = || [&working, &stalled, &idle].map(|guest| guest.member.is_leaving());
    let next = admit(&crowd, 1).await;
    assert_eq!(gone(), [false, false, true]);
    let _next = next.member.begin();
    // Whose body has yet to come has nothing to lose but time.
    let last = admit(&crowd, 1).await;
    assert_eq!(gone(), [false, true, true]);
    let _last = last.member.begin();
    assert!(crowd.admit(peer(1)).is_none(), "all are at work for the same peer");
    assert_eq!(gone(), [false, true, true]);
    drop(body);
    assert!(stalled.member.is_at_work());
}

#[tokio::test(start_paused = true)]
async fn where_all_are_at_work_the_peer_with_most_connections_gives_one_up() {
    let crowd = crowd(4, 10);
    let guests =
        [admit(&crowd, 9).await, admit(&crowd, 1).await, admit(&crowd, 1).await, admit(&crowd, 1).await];
    let mut tasks = Vec::new();
    for guest in &guests {
        tasks.push(guest.member.begin());
        tokio::time::advance(SECOND).await;
    }
    let newcomer = admit(&crowd, 7).await;
    assert_eq!(guests.each_ref().map(|guest| guest.member.is_leaving()), [false, true, false, false]);
    // It is gone at once, whatever it does.
    guests[1].member.cut().await;
    let _task = newcomer.member.begin();
    assert!(crowd.admit(peer(1)).is_none());
    // Nobody holds more than the newcomer would.
    assert!(crowd.admit(peer(9)).is_none());
}

#[tokio::test(start_paused = true)]
async fn who_was_told_to_go_and_stays_is_counted_and_cut() {
    let crowd = crowd(2, 3);
    let mut guests = Vec::new();
    for number in 0..50 {
        guests.push(admit(&crowd, 1).await);
        assert_eq!(crowd.members().len(), (number + 1).min(5));
    }
    for guest in &guests[..45] {
        guest.member.cut().await;
    }
    assert!(guests[45..48].iter().all(|guest| guest.member.is_leaving()));
    assert!(guests[48..].iter().all(|guest| !guest.member.is_leaving()));
    guests.clear();
    assert!(crowd.members().is_empty());
}

#[tokio::test(start_paused = true)]
async fn who_is_unused_or_idle_for_too_long_is_sent_away() {
    let crowd = crowd(9, 9);
    let Limits { unused, idle, .. } = Limits::default();
    let guests =
        [admit(&crowd, 1).await, admit(&crowd, 1).await, admit(&crowd, 1).await, admit(&crowd, 1).await];
    let [_, asked, working, stalled] = &guests;
    drop(asked.member.begin());
    let _task = working.member.begin();
    let slow = stalled.member.begin();
    let _body = slow.listening();
    let gone = || {
        crowd.sweep();
        guests.each_ref().map(|guest| guest.member.is_leaving())
    };
    assert_eq!(gone(), [false; 4]);
    tokio::time::advance(unused).await;
    assert_eq!(gone(), [true, false, false, false]);
    tokio::time::advance(idle).await;
    assert_eq!(gone(), [true, true, false, false]);
}

#[tokio::test(start_paused = true)]
async fn a_dismissal_waits_for_who_does_not_listen_yet() {
    let crowd = crowd(9, 9);
    let guest = admit(&crowd, 1).await;
    crowd.dismiss();
    guest.member.dismissed().await;
}

#[tokio::test(start_paused = true)]
async fn a_body_is_heard_when_its_last_byte_has_come() {
    let crowd = crowd(9, 9);
    let guest = admit(&crowd, 1).await;
    let task = guest.member.begin();
    let chunks = futures::stream::iter(["a", "b"].map(|text| Ok::<_, std::io::Error>(Bytes::from(text))));
    let mut body = Heard::new(axum::body::Body::from_stream(chunks), task.listening());
    for expected in [Loss::Listening, Loss::Listening, Loss::AtWork] {
        let frame = std::future::poll_fn(|context| Pin::new(&mut body).poll_frame(context)).await;
        assert_eq!((guest.member.loss(), frame.is_none()), (expected, expected == Loss::AtWork));
    }
    // One that has none is heard at once, one that nobody reads when it is dropped.
    let empty = Heard::new(axum::body::Body::empty(), task.listening());
    assert_eq!(guest.member.loss(), Loss::AtWork);
    let unread = Heard::new(axum::body::Body::from("a"), task.listening());
    assert_eq!(guest.member.loss(), Loss::Listening);
    drop((unread, empty, body));
    assert_eq!(guest.member.loss(), Loss::AtWork);
    drop(task);
    assert_eq!(guest.member.loss(), Loss::Idle);
}
