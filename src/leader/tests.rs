//! Who leads, by what each has seen and when.

use std::sync::{Arc, Mutex};

use http::Method;
use proptest::prelude::*;
use serde_json::{Value, json};
use tokio::sync::Notify;

use super::*;
use crate::testing::api::{Asked, api_server, refusal};

const LEASE: Duration = Duration::from_secs(15);

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn record(holder: &str, version: u64) -> Record {
    Record {
        holder: holder.to_owned(),
        duration: LEASE,
        version: version.to_string(),
        transitions: 0,
        acquired: None,
    }
}

fn step(seen: &Seen, now: Instant) -> Step {
    decide("me", seen, LEASE, now)
}

#[test]
fn where_there_is_no_lease_one_is_made() {
    assert_eq!(step(&Seen::default(), Instant::now()), Step::Create);
}

#[test]
fn a_released_lease_is_taken_at_once() {
    let now = Instant::now();
    let mut seen = Seen::default();
    seen.look(Some(record("", 1)), now);
    assert_eq!(step(&seen, now), Step::Take);
}

#[test]
fn anothers_lease_is_taken_when_it_has_stood_still_for_its_duration() {
    let start = Instant::now();
    let mut seen = Seen::default();
    seen.look(Some(record("other", 1)), start);
    assert_eq!(step(&seen, start), Step::Wait(seconds(1)));
    // Seeing it again unchanged does not start the clock anew.
    seen.look(Some(record("other", 1)), start + seconds(10));
    assert_eq!(step(&seen, start + Duration::from_millis(14_500)), Step::Wait(Duration::from_millis(500)));
    assert_eq!(step(&seen, start + seconds(15)), Step::Take);
    // A renewal does.
    seen.look(Some(record("other", 2)), start + seconds(15));
    assert_eq!(step(&seen, start + seconds(15)), Step::Wait(seconds(1)));
}

#[test]
fn it_is_the_holders_duration_that_counts() {
    let start = Instant::now();
    let mut seen = Seen::default();
    seen.look(Some(Record { duration: seconds(60), ..record("other", 1) }), start);
    assert_eq!(step(&seen, start + seconds(59)), Step::Wait(seconds(1)));
    assert_eq!(step(&seen, start + seconds(60)), Step::Take);
}

#[test]
fn our_own_lease_is_renewed_after_a_third_of_its_time() {
    let start = Instant::now();
    let mut seen = Seen::default();
    seen.won(record("me", 1), start, start + seconds(1));
    assert_eq!(step(&seen, start + seconds(1)), Step::Wait(seconds(4)));
    assert_eq!(step(&seen, start + seconds(5)), Step::Renew);
}

#[test]
fn a_lease_that_bears_our_name_but_that_we_do_not_remember_is_renewed() {
    let now = Instant::now();
    let mut seen = Seen::default();
    seen.look(Some(record("me", 1)), now);
    assert_eq!(step(&seen, now), Step::Renew);
}

#[tokio::test]
async fn a_claim_runs_out_by_itself() {
    let (sender, receiver) = watch::channel(None);
    let mut claim = Claim(receiver);
    assert!(!claim.holds());
    sender.send_replace(Some(Instant::now() + Duration::from_hours(1)));
    claim.held().await;
    assert!(claim.holds());
    sender.send_replace(Some(Instant::now() + Duration::from_millis(30)));
    claim.lost().await;
    assert!(!claim.holds());
    assert!(Claim::unrivalled().holds());
}

#[test]
fn a_lease_that_was_deleted_is_its_holders_for_as_long_as_if_it_had_been_renewed() {
    let start = Instant::now();
    let mut seen = Seen::default();
    seen.look(Some(record("other", 1)), start);
    seen.look(None, start + seconds(9));
    seen.look(None, start + seconds(20));
    assert_eq!(step(&seen, start + seconds(23)), Step::Wait(seconds(1)));
    assert_eq!(step(&seen, start + seconds(24)), Step::Create);
    // It is back, and renewed.
    seen.look(Some(record("other", 3)), start + seconds(23));
    assert_eq!(step(&seen, start + seconds(24)), Step::Wait(seconds(1)));
    // One that was released is nobody's.
    seen.look(Some(record("", 4)), start + seconds(25));
    seen.look(None, start + seconds(26));
    assert_eq!(step(&seen, start + seconds(26)), Step::Create);
}

/// One Lease, and writes to it that are answered when told.
#[derive(Clone, Default)]
struct Server {
    lease: Arc<Mutex<Option<Lease>>>,
    arrived: Arc<Notify>,
    answered: Arc<Notify>,
}

impl Server {
    fn client(&self) -> Client {
        let server = self.clone();
        api_server(move |asked| server.clone().answer(asked))
    }

    async fn answer(self, asked: Asked) -> (u16, Value) {
        if asked.method == Method::GET {
            return match &*self.lease.lock().unwrap() {
                Some(lease) => (200, json!(lease)),
                None => refusal(404, "NotFound"),
            };
        }
        let mut lease: Lease = serde_json::from_value(asked.body).unwrap();
        let version = |lease: &Lease| lease.metadata.resource_version.clone();
        {
            let mut known = self.lease.lock().unwrap();
            if known.as_ref().and_then(version) != version(&lease) {
                return refusal(409, "Conflict");
            }
            let next = version(&lease).map_or(1, |version| version.parse::<u64>().unwrap() + 1);
            lease.metadata.resource_version = Some(next.to_string());
            *known = Some(lease.clone());
        }
        self.arrived.notify_one();
        self.answered.notified().await;
        (200, json!(lease))
    }

    fn holder(&self) -> String {
        self.lease.lock().unwrap().as_ref().map(|lease| Record::from(lease).holder).unwrap_or_default()
    }
}

#[tokio::test]
async fn what_was_being_written_when_we_were_told_to_leave_is_given_back() {
    let server = Server::default();
    let settings = Settings {
        namespace: "home".to_owned(),
        name: "lockstep".to_owned(),
        identity: "me".to_owned(),
        duration: LEASE,
    };
    let (_claim, election) = start(server.client(), settings, Metrics::new());
    server.arrived.notified().await;
    assert_eq!(server.holder(), "me");
    let answers = async {
        server.answered.notify_one();
        server.arrived.notified().await;
        server.answered.notify_one();
    };
    tokio::select! {
        biased;
        ((), ()) = async { tokio::join!(election.leave(), answers) } => {}
        () = tokio::time::sleep(seconds(10)) => {}
    }
    assert_eq!(server.holder(), "");
}

proptest! {
    /// Two candidates look at one Lease and write to it, in any order and with any delays; the API server lets only
    /// writes through that know the latest version. Now and then somebody deletes it. Never do both hold a claim.
    #[test]
    fn two_never_hold_a_claim_at_once(
        turns in proptest::collection::vec((0..2usize, 0..6000u64, 0..3000u64, proptest::bool::weighted(0.1)), 1..200),
    ) {
        let start = Instant::now();
        let mut now = start;
        let mut lease: Option<Record> = None;
        let mut seen = [Seen::default(), Seen::default()];
        let mut until = [start, start];
        let mut versions = 0;
        for (who, pause, delay, deleted) in turns {
            // Who had not seen it could not know that it was there.
            let known = |seen: &Seen| seen.record.as_ref().map(|(record, _)| record) == lease.as_ref();
            if deleted && seen.iter().all(known) {
                lease = None;
            }
            now += Duration::from_millis(pause);
            let name = ["a", "b"][who];
            let leads = seen[who].record.as_ref().is_some_and(|(record, _)| record.holder == name);
            if !leads {
                seen[who].look(lease.clone(), now);
            }
            let step = decide(name, &seen[who], LEASE, now);
            if !matches!(step, Step::Wait(_)) {
                // The write arrives after a delay, in which nobody else acts; its answer is seen at once.
                let (sent, known) = (now, seen[who].record.clone().map(|(record, _)| record));
                now += Duration::from_millis(delay);
                if step != Step::Create && known != lease {
                    seen[who].record = None;
                    seen[who].look(lease.clone(), now);
                    continue;
                }
                prop_assert!(step != Step::Create || lease.is_none());
                versions += 1;
                let written = record(name, versions);
                lease = Some(written.clone());
                seen[who].won(written, sent, now);
                until[who] = claimed_until(sent, LEASE);
                prop_assert!(until[1 - who] <= now, "{} writes while the other may", name);
            }
        }
    }
}
