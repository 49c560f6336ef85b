//! Who leads, by what each has seen and when.

use proptest::prelude::*;

use super::*;

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
    sender.send_replace(Some(Instant::now() + Duration::from_millis(30)));
    claim.held().await;
    assert!(claim.holds());
    claim.lost().await;
    assert!(!claim.holds());
    assert!(Claim::unrivalled().holds());
}

proptest! {
    /// Two candidates look at one Lease and write to it, in any order and with any delays; the API server lets only
    /// writes through that know the latest version. Never do both hold a claim.
    #[test]
    fn two_never_hold_a_claim_at_once(turns in proptest::collection::vec((0..2usize, 0..6000u64, 0..3000u64), 1..200)) {
        let start = Instant::now();
        let mut now = start;
        let mut lease: Option<Record> = None;
        let mut seen = [Seen::default(), Seen::default()];
        let mut until = [start, start];
        for (who, pause, delay) in turns {
            now += Duration::from_millis(pause);
            let name = ["a", "b"][who];
            seen[who].look(lease.clone(), now);
            let step = decide(name, &seen[who], LEASE, now);
            if !matches!(step, Step::Wait(_)) {
                // The write arrives after a delay, in which nobody else acts; its answer is seen at once.
                let (sent, known) = (now, seen[who].record.clone().map(|(record, _)| record));
                now += Duration::from_millis(delay);
                prop_assert_eq!(&known, &lease);
                let version = known.map_or(0, |record| record.version.parse::<u64>().unwrap()) + 1;
                let written = record(name, version);
                lease = Some(written.clone());
                seen[who].won(written, sent, now);
                until[who] = claimed_until(sent, LEASE);
                prop_assert!(until[1 - who] <= now, "{} writes while the other may", name);
            }
        }
    }
}
