use proptest::prelude::*;

use super::*;

const LEASE: Duration = Duration::from_secs(15);

fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// A record that was written last by its holder, as this version.
fn record(holder: &str, version: u64) -> LeaseRecord {
    LeaseRecord {
        holder: holder.to_owned(),
        duration: LEASE,
        transitions: 0,
        acquire_time: None,
        renew_time: Timestamp::from_second(i64::try_from(version).unwrap()).ok().map(MicroTime),
        metadata: LeaseMetadata { resource_version: Some(version.to_string()), ..LeaseMetadata::default() },
    }
}

fn action(lease: &ObservedLease, now: Instant) -> LeaseAction {
    decide("me", lease, LEASE, now)
}

#[test]
fn missing_lease_is_created() {
    assert_eq!(action(&ObservedLease::default(), Instant::now()), LeaseAction::Create);
}

#[test]
fn released_lease_is_acquired_at_once() {
    let now = Instant::now();
    let mut lease = ObservedLease::default();
    lease.observe(Some(record("", 1)), now);
    assert_eq!(action(&lease, now), LeaseAction::Acquire);
}

#[test]
fn lease_of_another_is_acquired_when_unchanged_for_its_duration() {
    let start = Instant::now();
    let mut lease = ObservedLease::default();
    lease.observe(Some(record("other", 1)), start);
    assert_eq!(action(&lease, start), LeaseAction::Wait(seconds(1)));
    // Observing it again unchanged does not restart the clock.
    lease.observe(Some(record("other", 1)), start + seconds(10));
    assert_eq!(
        action(&lease, start + Duration::from_millis(14_500)),
        LeaseAction::Wait(Duration::from_millis(500))
    );
    assert_eq!(action(&lease, start + seconds(15)), LeaseAction::Acquire);
    // A renewal restarts it.
    lease.observe(Some(record("other", 2)), start + seconds(15));
    assert_eq!(action(&lease, start + seconds(15)), LeaseAction::Wait(seconds(1)));
}

#[test]
fn lease_of_a_dead_leader_expires_although_somebody_annotates_it_every_second() {
    let start = Instant::now();
    let mut lease = ObservedLease::default();
    for second in 0..15 {
        assert!(second == 0 || matches!(action(&lease, start + seconds(second)), LeaseAction::Wait(_)));
        let annotated = record("other", 2 + second).metadata;
        lease.observe(
            Some(LeaseRecord { metadata: annotated, ..record("other", 1) }),
            start + seconds(second),
        );
    }
    assert_eq!(action(&lease, start + seconds(15)), LeaseAction::Acquire);
    let (known, _) = lease.record.unwrap();
    assert_eq!(known.metadata, record("other", 16).metadata, "otherwise the write would conflict");
}

#[test]
fn lease_expires_after_the_duration_that_its_holder_set() {
    let start = Instant::now();
    let mut lease = ObservedLease::default();
    lease.observe(Some(LeaseRecord { duration: seconds(60), ..record("other", 1) }), start);
    assert_eq!(action(&lease, start + seconds(59)), LeaseAction::Wait(seconds(1)));
    assert_eq!(action(&lease, start + seconds(60)), LeaseAction::Acquire);
}

#[test]
fn own_lease_is_renewed_after_a_third_of_its_duration() {
    let start = Instant::now();
    let mut lease = ObservedLease::default();
    lease.written(record("me", 1), start, start + seconds(1));
    assert_eq!(action(&lease, start + seconds(1)), LeaseAction::Wait(seconds(4)));
    assert_eq!(action(&lease, start + seconds(5)), LeaseAction::Renew);
}

#[test]
fn own_lease_without_a_known_renewal_is_renewed_at_once() {
    let now = Instant::now();
    let mut lease = ObservedLease::default();
    lease.observe(Some(record("me", 1)), now);
    assert_eq!(action(&lease, now), LeaseAction::Renew);
}

#[test]
fn deleted_lease_stays_with_its_holder_for_its_duration() {
    let start = Instant::now();
    let mut lease = ObservedLease::default();
    lease.observe(Some(record("other", 1)), start);
    lease.observe(None, start + seconds(9));
    lease.observe(None, start + seconds(20));
    assert_eq!(action(&lease, start + seconds(23)), LeaseAction::Wait(seconds(1)));
    assert_eq!(action(&lease, start + seconds(24)), LeaseAction::Create);
    // The holder has created it again.
    lease.observe(Some(record("other", 3)), start + seconds(23));
    assert_eq!(action(&lease, start + seconds(24)), LeaseAction::Wait(seconds(1)));
    // A released Lease has no holder to wait for.
    lease.observe(Some(record("", 4)), start + seconds(25));
    lease.observe(None, start + seconds(26));
    assert_eq!(action(&lease, start + seconds(26)), LeaseAction::Create);
}

#[test]
fn deleted_lease_is_created_again_by_its_holder_unless_another_may_have_held_it_since() {
    let start = Instant::now();
    let mut lease = ObservedLease::default();
    lease.written(record("me", 1), start, start);
    lease.observe(None, start + seconds(14));
    assert_eq!(action(&lease, start + seconds(14)), LeaseAction::Create);
    assert_eq!(action(&lease, start + seconds(15)), LeaseAction::Wait(seconds(1)));
    assert_eq!(action(&lease, start + seconds(29)), LeaseAction::Create);
}

#[test]
fn conflicts_are_retried_at_once_and_then_ever_later_but_often_enough_to_keep_the_claim() {
    for lease in [seconds(1), LEASE] {
        let pauses: Vec<Duration> = (1..1_000).map(|conflicts| conflict_pause(conflicts, lease)).collect();
        assert_eq!(pauses[0], Duration::ZERO);
        assert!(pauses.is_sorted() && pauses[998] >= Duration::from_millis(100));
        // From the time at which a renewal is due until the claim expires.
        assert!(pauses[..5].iter().sum::<Duration>() < lease / 3);
    }
}

#[test]
fn older_lease_is_the_sign_of_a_restore() {
    let lease = |version: u64, transitions, holder: &str, renewed: i64| LeaseRecord {
        transitions,
        renew_time: Some(MicroTime(Timestamp::from_second(renewed).unwrap())),
        ..record(holder, version)
    };
    let known = lease(50, 3, "me", 100);
    for (found, restored) in [
        (known.clone(), false),
        // Annotated by somebody else, or taken by another replica whose clock is behind.
        (lease(51, 3, "me", 100), false),
        (lease(51, 4, "other", 10), false),
        // A write of ours that got no answer.
        (lease(51, 3, "me", 105), false),
        (lease(40, 3, "me", 90), true),
        // Versions have overtaken.
        (lease(60, 3, "me", 90), true),
        (lease(60, 2, "other", 200), true),
    ] {
        assert_eq!(sign_of_restore("me", &known, &found).is_some(), restored, "{found:?}");
    }
    // A Lease that was deleted and created again begins at zero.
    let recreated = LeaseRecord {
        metadata: LeaseMetadata { uid: Some("new".to_owned()), ..record("other", 60).metadata },
        ..lease(60, 0, "other", 200)
    };
    assert_eq!(sign_of_restore("me", &known, &recreated), None);
}

proptest! {
    /// Two candidates read and write one Lease in any order and with any delays, and the Lease is deleted or annotated
    /// now and then. As on an API server, a write succeeds only with the latest resourceVersion.
    #[test]
    fn two_replicas_never_hold_a_claim_at_once(
        turns in proptest::collection::vec((0..2usize, 0..6000u64, 0..3000u64, 0..10u8), 1..200),
    ) {
        let start = Instant::now();
        let mut now = start;
        let mut stored: Option<LeaseRecord> = None;
        let mut observed = [ObservedLease::default(), ObservedLease::default()];
        let mut deadline = [start, start];
        let mut versions = 0;
        for (index, pause, delay, incident) in turns {
            // A candidate that has never observed the Lease cannot wait for its holder.
            let known = |lease: &ObservedLease| lease.record.as_ref().map(|(record, _)| record) == stored.as_ref();
            if incident == 0 && observed.iter().all(known) {
                stored = None;
            }
            if let Some(stored) = stored.as_mut().filter(|_| incident == 1) {
                versions += 1;
                stored.metadata = record("", versions).metadata;
            }
            now += Duration::from_millis(pause);
            let name = ["a", "b"][index];
            let leads = observed[index].record.as_ref().is_some_and(|(record, _)| record.holder == name && !record.is_deleted());
            if !leads {
                observed[index].observe(stored.clone(), now);
            }
            let action = decide(name, &observed[index], LEASE, now);
            if !matches!(action, LeaseAction::Wait(_)) {
                // The write arrives after a delay, in which nobody else acts.
                let (sent, known) = (now, observed[index].record.clone().map(|(record, _)| record));
                now += Duration::from_millis(delay);
                if action != LeaseAction::Create && known != stored {
                    observed[index].observe(stored.clone(), now);
                    continue;
                }
                prop_assert!(action != LeaseAction::Create || stored.is_none());
                versions += 1;
                let written = record(name, versions);
                stored = Some(written.clone());
                observed[index].written(written, sent, now);
                deadline[index] = renew_deadline(sent, LEASE);
                prop_assert!(deadline[1 - index] <= now, "{} writes while the other may", name);
            }
        }
    }
}
