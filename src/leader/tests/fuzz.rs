//! The Lease, with its annotations: whatever the API server has stored there.

use k8s_openapi::jiff::Timestamp;
use lockstep_core::lease::record::LeaseRecord;

use super::*;
use lockstep_core::{
    keys::Keys,
    lease::{
        election::{LeaseAction, ObservedLease, RETRY_PERIOD, decide, next_record, sign_of_restore},
        hold::{HoldAnnotations, MAX_HOLD, to_annotation},
        lease_state::LeaseState,
        record::LeaseMetadata,
        settings::PublishedSettings,
    },
    object::time::{Moment, later},
    testing::{self, fuzz::Target},
    writes::brake::Brake,
};

const WORDS: &[&str] = &[
    "\"holderIdentity\":\"me\"",
    "\"holderIdentity\":\"\"",
    "\"leaseTransitions\":2147483647",
    "\"leaseDurationSeconds\":2147483647",
    "\"leaseDurationSeconds\":1",
    "\"renewTime\":\"10000-01-01T23:58:59.000000Z\"",
    "\"renewTime\":\"-0001-12-31T00:01:00.000000Z\"",
    "\"renewTime\":null",
    "\"resourceVersion\":\"0\"",
    "\"workshop.io/deletes-held\":\"{\\\"since\\\":\\\"2026-11-17T18:00:00Z\\\",\\\"until\\\":\\\"9999-12-30T00:00:00Z\\\",\\\"companions\\\":1,\\\"sources\\\":1}\",",
    "\"workshop.io/deletes-released\":\"\",",
    "\"workshop.io/deletes-extended\":\"{}\",",
    "\"workshop.io/rotate-ca\":\"2026-11-17T18:00:00Z\",",
    "\"workshop.io/settings\":\"{}\",",
    "\\\"until\\\":",
    "2026-11-17T18:30:00Z",
    "9999-12-30T22:00:00.999999999Z",
    "-009999-01-02T01:59:59Z",
    "18446744073709551615",
];
/// The longest line that the log has about an annotation.
const MAX_NOTE_CHARS: usize = 500;

fn wall() -> Timestamp {
    "2026-11-17T18:30:00Z".parse().unwrap()
}

/// The Lease is taken over when its holder is silent for its duration, and not before.
fn check_election(record: &LeaseRecord) {
    assert_eq!(sign_of_restore("me", record, record), None, "nothing has changed");
    let start = Instant::now();
    let mut lease = ObservedLease::default();
    lease.observe(Some(record.clone()), start);
    let free = if record.is_deleted() { LeaseAction::Create } else { LeaseAction::Acquire };
    let expected = if record.holder == "me" && !record.is_deleted() { LeaseAction::Renew } else { free };
    assert_eq!(decide("me", &lease, LEASE, start + record.duration), expected);
    match decide("me", &lease, LEASE, start) {
        LeaseAction::Wait(wait) => assert!(!wait.is_zero() && wait <= RETRY_PERIOD, "{wait:?}"),
        at_once => assert!(
            at_once == expected
                && (record.holder.is_empty() || record.duration.is_zero() || record.holder == "me"),
            "{at_once:?}"
        ),
    }
    let next = next_record("lockstep", LEASE, Some(record), "me", wall());
    let next: LeaseRecord = serde_json::from_value(serde_json::to_value(next).unwrap()).unwrap();
    let named = LeaseMetadata { name: next.metadata.name.clone(), ..record.metadata.clone() };
    assert_eq!(next.metadata, named, "what others wrote is sent back");
    assert_eq!((next.holder.as_str(), next.duration), ("me", LEASE));
    // The API server stores no negative number, and refuses one.
    if record.transitions >= 0 {
        assert!(next.transitions >= record.transitions, "{} after {}", next.transitions, record.transitions);
        assert_eq!(sign_of_restore("me", record, &LeaseRecord { renew_time: None, ..next }), None);
    }
}

/// What is there about held deletes is read back as it is written, and holds nothing for ever.
fn check_hold(keys: &Arc<Keys>, annotations: &BTreeMap<String, String>) {
    let seen = HoldAnnotations::read(keys, annotations);
    let rendered = [
        (&keys.deletes_held, seen.held.as_ref().map(to_annotation)),
        (&keys.deletes_released, seen.released.as_ref().map(to_annotation)),
        (&keys.deletes_extended, seen.extended.as_ref().map(to_annotation)),
    ];
    let rendered = rendered.into_iter().filter_map(|(key, text)| Some((key.clone(), text?))).collect();
    let again = HoldAnnotations::read(keys, &rendered);
    assert_eq!(again, HoldAnnotations { malformed: Vec::new(), ..seen.clone() }, "{rendered:?}");

    let mut now = Moment { instant: Instant::now(), wall: wall() };
    let mut notes = Vec::new();
    let mut brake = Brake::new(keys.clone(), Duration::from_hours(1));
    notes.extend(brake.sync(false, annotations, now).notes);
    let mut lease = annotations.clone();
    lease.retain(|key, _| *key != keys.deletes_released && *key != keys.deletes_extended);
    notes.extend(brake.take_over(&lease, now).notes);
    // What people ask for comes while it leads. It shows its own hold, which ends.
    lease.extend(annotations.clone());
    for pass in [Duration::from_secs(1), Duration::from_mins(2), MAX_HOLD] {
        let update = brake.sync(true, &lease, now);
        for (key, value) in update.set {
            match value {
                Some(value) => drop(lease.insert(key, value)),
                None => drop(lease.remove(&key)),
            }
        }
        notes.extend(update.notes);
        now = Moment { instant: now.instant + pass, wall: later(now.wall, pass) };
    }
    brake.sync(true, &lease, now).set.iter().for_each(|(key, value)| {
        assert!(*key != keys.deletes_held || value.is_none(), "a hold that never ends: {value:?}");
    });
    for note in notes {
        let text = note.to_string();
        assert!(text.chars().count() <= MAX_NOTE_CHARS && !text.contains(char::is_control), "{text:?}");
    }
}

fn check(input: &[u8]) -> bool {
    let Ok(record) = serde_json::from_slice::<LeaseRecord>(input) else { return false };
    let again: LeaseRecord = serde_json::from_value(serde_json::to_value(&record).unwrap()).unwrap();
    assert_eq!(again, record);
    let keys = testing::keys();
    check_election(&record);
    let annotations = record.metadata.annotations.clone().unwrap_or_default();
    check_hold(&keys, &annotations);
    let state = LeaseState::of(record, &keys, wall());
    if let Some(settings) = state.settings {
        let text = settings.to_annotation();
        assert_eq!(serde_json::from_str::<PublishedSettings>(&text).ok(), Some(settings.clone()));
        let scope = settings.scope("workshop.io", "lockstep-system");
        assert!(scope.kinds.len() <= 2 && settings.deputies().users == settings.deputy_users);
    }
    true
}

#[test]
fn lease_of_any_content_is_taken_over_in_time_and_what_others_wrote_stays() {
    let deep = format!("{}{{}}{}", "{\"f:a\":".repeat(5000), "}".repeat(5000));
    let deep = format!(r#"{{"metadata":{{"resourceVersion":"7","managedFields":[{{"fieldsV1":{deep}}}]}}}}"#);
    let long = format!(
        r#"{{"metadata":{{"resourceVersion":"7","annotations":{{"workshop.io/deletes-held":"{}"}}}}}}"#,
        "x".repeat(200_000)
    );
    let made = vec![
        ("accepted-deep-managed-fields", deep.into_bytes()),
        ("accepted-long-annotation", long.into_bytes()),
    ];
    Target { name: "lease", words: WORDS, made }.run(check);
}
