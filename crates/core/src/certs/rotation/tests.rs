use std::time::Duration;

use k8s_openapi::ByteString;

use super::{SecretChange as Change, *};
use crate::certs::{
    secret::SecretData,
    testing::{LIFETIMES, at, ca, ca_at, cas, client_ca, constrained_ca, data, published},
};

const DAY: u64 = 24 * 3600;
const DAYS: Lifetimes =
    Lifetimes { ca_validity: Duration::from_secs(365 * DAY), leaf_validity: Duration::from_secs(7 * DAY) };

/// The inputs of a change.
struct Scenario {
    data: Option<SecretData>,
    remembered: Option<CaSet>,
    published: Published,
    names: SubjectNames,
    request: Option<Timestamp>,
    serving: Option<Certificate>,
    lifetimes: Lifetimes,
}

impl Scenario {
    fn of(cas: &CaSet) -> Self {
        Self {
            data: Some(data(cas)),
            remembered: None,
            published: Published::Unknown,
            request: None,
            names: SubjectNames::from(["localhost".to_owned(), "lockstep.home.svc".to_owned()]),
            serving: None,
            lifetimes: LIFETIMES,
        }
    }

    fn published(mut self, published: Published) -> Self {
        self.published = published;
        self
    }

    fn remembering(mut self, cas: &CaSet) -> Self {
        self.remembered = Some(cas.clone());
        self
    }

    fn with(mut self, key: &str, value: &str) -> Self {
        self.data.get_or_insert_default().insert(key.to_owned(), ByteString(value.as_bytes().to_vec()));
        self
    }

    fn without(mut self, key: &str) -> Self {
        self.data.get_or_insert_default().remove(key);
        self
    }

    fn change(&self, now: i64) -> Due<Change> {
        self.evaluate(now).0
    }

    fn evaluate(&self, now: i64) -> (Due<Change>, Option<CaSet>) {
        let secret = self.data.as_ref().map(ParsedSecret::parse);
        let inputs = Inputs {
            secret: secret.as_ref(),
            remembered: self.remembered.as_ref(),
            published: &self.published,
            names: &self.names,
            request: self.request,
            serving: self.serving.as_ref(),
            now: at(now),
            lifetimes: &self.lifetimes,
        };
        let due = inputs.next_change();
        let contents = match due {
            Due::Now(change) => inputs.contents_after(change, "lockstep.workshop.io").unwrap(),
            Due::At(_) => None,
        };
        (due, contents)
    }

    /// What the Secret holds after the change.
    fn after(&self, now: i64) -> CaSet {
        self.evaluate(now).1.expect("a change")
    }
}

fn same(one: &CaSet, other: &CaSet) -> bool {
    one.data() == other.data()
}

// ---------------------------------------------------------------- each phase, from the Secret alone

#[test]
fn stable_ca_is_unchanged_for_two_thirds_of_its_lifetime() {
    let scenario = Scenario::of(&cas());
    assert_eq!(scenario.change(0), Due::At(at(16_000)));
    assert_eq!(scenario.change(15_999), Due::At(at(16_000)));
    assert_eq!(scenario.change(16_000), Due::Now(Change::AddNextCa));
    let ca = ca_at(at(0), &DAYS);
    let scenario = Scenario { lifetimes: DAYS, ..Scenario::of(&CaSet::new(ca.clone())) };
    let due = ca.certificate.renew_at().as_millisecond() - at(0).as_millisecond();
    assert_eq!(due, 365 * 24 * 3_600_000 * 2 / 3);
    assert_eq!(scenario.change(due - 1), Due::At(ca.certificate.renew_at()));
    assert_eq!(scenario.change(due), Due::Now(Change::AddNextCa));
}

#[test]
fn next_ca_is_added_beside_the_current_one_and_both_are_published() {
    let cas = cas();
    let after = Scenario::of(&cas).after(16_000);
    assert_eq!(after.current.certificate, cas.current.certificate);
    let next = after.next.as_ref().expect("a next CA");
    assert_eq!(next.published, None);
    assert_eq!(after.trusted(), [&after.current.certificate, &next.ca.certificate]);
    assert_eq!(Certificate::parse_all(after.bundle().as_bytes()).unwrap().len(), 2);
}

#[test]
fn next_ca_is_recorded_as_published_only_after_it_was_read_back() {
    let cas = cas().with_next(ca());
    let next = &cas.next.as_ref().unwrap().ca.certificate;
    let current = &cas.current.certificate;
    let expiry = Due::At(current.not_after);
    assert_eq!(Scenario::of(&cas).change(17_000), expiry, "the configurations have not been observed yet");
    assert_eq!(
        Scenario::of(&cas).published(published(&[current], at(0))).change(17_000),
        expiry,
        "it is not there yet"
    );
    let scenario = Scenario::of(&cas).published(published(&[current, next], at(17_000)));
    assert_eq!(scenario.change(17_000), Due::Now(Change::RecordPublished));
    assert_eq!(scenario.after(17_000).next.unwrap().published, Some(at(17_000)));
    // No webhook calls us, so there is nothing to wait for but the delay.
    assert_eq!(
        Scenario::of(&cas).published(Published::NoWebhooks).change(17_000),
        Due::Now(Change::RecordPublished)
    );
}

#[test]
fn next_ca_is_promoted_only_after_the_propagation_delay() {
    let cas = cas().with_next(ca()).with_published(Some(at(17_000)));
    let next = cas.next.as_ref().unwrap().ca.certificate.clone();
    let scenario = Scenario::of(&cas).published(published(&[&next], at(18_500)));
    assert_eq!(scenario.change(17_000), Due::At(at(19_000)));
    assert_eq!(scenario.change(18_999), Due::At(at(19_000)));
    assert_eq!(scenario.change(19_000), Due::Now(Change::PromoteNextCa));
    // A replica that has not observed the configurations yet does not promote.
    assert_eq!(Scenario::of(&cas).change(19_000), Due::At(cas.current.certificate.not_after));

    let after = scenario.after(19_000);
    assert_eq!(after.current.certificate, next);
    assert!(after.next.is_none());
    assert_eq!((&after.old[..], after.old_since), (&[cas.current.certificate.clone()][..], Some(at(19_000))));
    let former = cas.current.key_pem();
    assert!(data(&after).values().all(|value| value.0 != former.as_bytes()), "the former key is dropped");
    assert_eq!(after.bundle(), cas.bundle(), "a promotion does not change the bundle");
}

#[test]
fn next_ca_that_is_no_longer_published_starts_over() {
    let cas = cas().with_next(ca()).with_published(Some(at(17_000)));
    let scenario = Scenario::of(&cas).published(published(&[&cas.current.certificate], at(0)));
    assert_eq!(scenario.change(23_000), Due::Now(Change::ClearPublished));
    assert_eq!(scenario.after(23_000).next.unwrap().published, None);
}

#[test]
fn old_ca_is_trusted_until_no_leaf_of_it_can_be_valid() {
    let young = ca_at(at(17_000), &LIFETIMES);
    let cas = cas().with_next(young).promoted(at(15_000));
    let scenario = Scenario::of(&cas);
    assert_eq!(scenario.change(15_000), Due::At(at(23_000)));
    assert_eq!(scenario.change(22_999), Due::At(at(23_000)));
    assert_eq!(scenario.change(23_000), Due::Now(Change::DropOldCas));
    let after = scenario.after(23_000);
    assert!(after.old.is_empty() && after.old_since.is_none());
    assert_eq!(after.trusted(), [&cas.current.certificate]);
    // Or until it expires itself.
    let late = Scenario::of(&CaSet { old_since: Some(at(20_000)), ..cas.clone() });
    assert_eq!(late.change(23_999), Due::At(at(24_000)));
    assert_eq!(late.change(24_000), Due::Now(Change::DropOldCas));
    assert!(late.after(24_000).old.is_empty());
}

// ---------------------------------------------------------------- what can go wrong

#[test]
fn deleted_secret_is_created_from_memory_or_with_a_new_ca() {
    let none = || Scenario { data: None, ..Scenario::of(&cas()) };
    let cas = cas().with_next(ca()).with_published(Some(at(17_000)));
    let scenario = none().remembering(&cas);
    assert_eq!(scenario.change(18_000), Due::Now(Change::Create));
    assert!(same(&scenario.after(18_000), &cas));
    let late = scenario.after(25_000);
    assert!(late.current.certificate != cas.current.certificate, "the remembered CA has expired");
    assert!(none().after(0).old.is_empty());
    // The CA of the leaf being served stays trusted.
    let serving = ca().certificate.clone();
    let scenario = Scenario { serving: Some(serving.clone()), ..none() };
    assert_eq!(scenario.after(10_000).old, [serving]);
}

#[test]
fn unusable_ca_is_restored_from_memory_or_replaced() {
    let cas = cas();
    let other = ca();
    let good = || Scenario::of(&cas);
    for (scenario, why) in [
        (good().without("ca.crt"), UnusableCa::Missing),
        (good().without("ca.key"), UnusableCa::Missing),
        (good().with("ca.crt", "nonsense"), UnusableCa::Certificate),
        (good().with("ca.key", "nonsense"), UnusableCa::Key),
        (good().with("ca.key", &other.key_pem()), UnusableCa::Mismatch),
        (Scenario { data: Some(SecretData::new()), ..good() }, UnusableCa::Missing),
    ] {
        assert_eq!(scenario.change(1_000), Due::Now(Change::ReplaceCa(why)));
        let replaced = scenario.after(1_000);
        assert!(replaced.current.certificate != cas.current.certificate);
        // Replicas may serve its leaves, so it stays trusted if its certificate can be parsed.
        let known = scenario.data.as_ref().unwrap().get("ca.crt").is_some_and(|pem| pem.0 != b"nonsense");
        assert_eq!(replaced.old.len(), usize::from(known), "{why:?}");
        let scenario = scenario.remembering(&cas);
        assert_eq!(scenario.change(1_000), Due::Now(Change::RestoreCa(why)));
        assert!(same(&scenario.after(1_000), &cas));
        assert_eq!(
            scenario.change(24_000),
            Due::Now(Change::ReplaceCa(why)),
            "the remembered CA has expired"
        );
    }
}

#[test]
fn expired_ca_is_replaced_and_so_is_one_that_is_not_valid_yet() {
    let cas = cas();
    let scenario = Scenario::of(&cas).remembering(&cas);
    assert_eq!(scenario.change(24_000), Due::Now(Change::ReplaceCa(UnusableCa::Expired)));
    assert!(scenario.after(24_000).old.is_empty(), "no leaf of it can be valid");
    assert_eq!(scenario.change(-86_401_000), Due::Now(Change::ReplaceCa(UnusableCa::NotYetValid)));
    // Our clock may be wrong: other replicas serve its leaves.
    assert_eq!(scenario.after(-86_401_000).old, std::slice::from_ref(&cas.current.certificate));
    let serving = Some(cas.current.certificate.clone());
    assert_eq!(
        Scenario { serving, ..Scenario::of(&CaSet::new(ca_at(at(-86_410_000), &DAYS))) }.change(-86_401_000),
        Due::Now(Change::KeepFormerCas)
    );
    let next = cas.with_next(ca_at(at(310_000), &LIFETIMES));
    assert!(matches!(Scenario::of(&next).change(0), Due::At(_)), "nor is the next one replaced");
    assert!(matches!(scenario.change(-299_000), Due::At(_)), "clocks differ by this much");
}

#[test]
fn ca_that_api_servers_would_not_accept_is_restored_or_replaced() {
    for (ca, why) in
        [(client_ca(), UnusableCa::NotForServers), (constrained_ca("example.com"), UnusableCa::Rejected)]
    {
        let scenario = Scenario::of(&CaSet::new(ca));
        assert_eq!(scenario.change(0), Due::Now(Change::ReplaceCa(why)));
        let ours = cas();
        let scenario = scenario.remembering(&ours);
        assert_eq!(scenario.change(0), Due::Now(Change::RestoreCa(why)));
        assert!(same(&scenario.after(0), &ours));
    }
    // It depends on the names that the webhooks call. What is remembered must be usable, too, or it is restored for
    // ever.
    let svc = CaSet::new(constrained_ca("svc"));
    let mut scenario = Scenario::of(&svc).remembering(&svc);
    scenario.names = SubjectNames::from(["lockstep.home.svc".to_owned()]);
    assert!(matches!(scenario.change(0), Due::At(_)));
    scenario.names.insert("webhook.example".to_owned());
    assert_eq!(scenario.change(0), Due::Now(Change::ReplaceCa(UnusableCa::Rejected)));
}

#[test]
fn next_ca_is_promoted_when_the_current_one_expires_even_if_not_published() {
    let next = ca_at(at(16_000), &LIFETIMES);
    let cas = cas().with_next(next.clone());
    let scenario = Scenario::of(&cas);
    assert!(matches!(scenario.change(23_999), Due::At(_)));
    assert_eq!(scenario.change(24_000), Due::Now(Change::PromoteNextCa));
    let after = scenario.after(24_000);
    assert_eq!(after.current.certificate, next.certificate);
    assert!(after.old.is_empty());
    // Both expired while no replica was running.
    assert_eq!(scenario.change(40_000), Due::Now(Change::ReplaceCa(UnusableCa::Expired)));
}

#[test]
fn malformed_fields_are_repaired_and_the_current_ca_is_kept() {
    let (next, old) = (ca(), ca());
    let stable = cas();
    let mut rich = stable
        .with_next(next.clone())
        .with_published(Some(at(9_000)))
        .with_old(old.certificate.clone(), at(8_000));
    for (key, value) in [
        ("next.crt", "nonsense"),
        ("next.key", "nonsense"),
        ("next.key", &*old.key_pem()),
        ("next.published", "soon"),
        ("old.crt", "nonsense"),
        ("old.crt", ""),
        ("old.since", "yesterday"),
        ("rotation.requested", "soon"),
        ("revoked", "nonsense"),
    ] {
        for cas in [&stable, &rich] {
            let scenario = Scenario::of(cas).with(key, value);
            assert_eq!(scenario.change(10_000), Due::Now(Change::RepairFields), "{key}: {value}");
            let repaired = scenario.after(10_000);
            assert_eq!(repaired.current.certificate, stable.current.certificate);
            assert!(!ParsedSecret::parse(&data(&repaired)).malformed);
            assert!(same(&scenario.remembering(cas).after(10_000), cas), "memory has every field");
        }
    }
    for key in ["next.crt", "next.key", "old.crt", "old.since"] {
        assert_eq!(Scenario::of(&rich).without(key).change(10_000), Due::Now(Change::RepairFields), "{key}");
    }
    // Without `old.since` an old CA is trusted for the full time again.
    assert_eq!(Scenario::of(&rich).without("old.since").after(10_000).old_since, Some(at(10_000)));
    // Without `next.published` the next CA counts as not published yet.
    assert!(matches!(Scenario::of(&rich).without("next.published").change(10_000), Due::At(_)));
    // A next CA that cannot be used is removed.
    for (ca, why) in [
        (ca_at(at(-20_000), &LIFETIMES), UnusableCa::Expired),
        (ca_at(at(2 * 24 * 3_600_000), &LIFETIMES), UnusableCa::NotYetValid),
        (client_ca(), UnusableCa::NotForServers),
        (constrained_ca("example.com"), UnusableCa::Rejected),
    ] {
        rich.next.as_mut().unwrap().ca = ca;
        assert_eq!(Scenario::of(&rich).change(10_000), Due::Now(Change::DropNextCa(why)));
        assert!(Scenario::of(&rich).after(10_000).next.is_none());
    }
    assert!(Change::DropNextCa(UnusableCa::Rejected).blocks_use(), "otherwise it would be published");
    // Foreign keys are ignored.
    assert!(matches!(Scenario::of(&stable).with("notes", "nonsense").change(0), Due::At(_)));
}

#[test]
fn foreign_ca_is_accepted_and_the_one_being_served_stays_trusted() {
    let (ours, theirs) = (cas(), cas());
    let mut scenario = Scenario::of(&theirs);
    assert!(matches!(scenario.change(1_000), Due::At(_)), "there is no other CA to keep");
    scenario.serving = Some(ours.current.certificate.clone());
    assert_eq!(scenario.change(1_000), Due::Now(Change::KeepFormerCas));
    assert!(Change::KeepFormerCas.blocks_use(), "otherwise it would be published without ours");
    let kept = scenario.after(1_000);
    assert_eq!(kept.current.certificate, theirs.current.certificate);
    assert_eq!(kept.old, std::slice::from_ref(&ours.current.certificate));
    let accepted = Scenario { serving: scenario.serving, ..Scenario::of(&kept) };
    assert!(matches!(accepted.change(1_000), Due::At(_)), "ours is kept already");
    // Other replicas may serve leaves of any CA that was trusted.
    let rich = ours.with_next(ca()).with_old(ca().certificate.clone(), at(0));
    let scenario = Scenario::of(&theirs).remembering(&rich);
    assert_eq!(scenario.change(1_000), Due::Now(Change::KeepFormerCas));
    assert_eq!(scenario.after(1_000).old.len(), 3);
    // A backup from before the promotion has ours as the next CA.
    let before = theirs.with_next(ours.current);
    let change = Scenario { serving: accepted.serving, ..Scenario::of(&before) }.change(1_000);
    assert!(!matches!(change, Due::Now(change) if change.blocks_use()), "{change:?}");
}

/// The clock of the client is a minute ahead.
const REQUEST: i64 = 60_000;

#[test]
fn requested_rotation_revokes_all_cas_and_drops_them_soon_after_the_promotion() {
    // A rotation by age is under way: the key of its next CA is in the Secret, too.
    let ca = || ca_at(at(0), &DAYS);
    let before = CaSet::new(ca()).with_next(ca()).with_old(ca().certificate.clone(), at(0));
    let mut scenario = Scenario { request: Some(at(REQUEST)), lifetimes: DAYS, ..Scenario::of(&before) };
    assert_eq!(scenario.change(1_000), Due::Now(Change::Rotate(at(REQUEST))));
    let rotating = scenario.after(1_000);
    let next = rotating.next.clone().unwrap();
    assert!(!before.trusts(&next.ca.certificate), "it is a new CA");
    assert!(before.trusted().iter().all(|former| rotating.revokes(former)));
    assert!(!rotating.revokes(&next.ca.certificate));
    assert_eq!(ParsedSecret::parse(&data(&rotating)).revocation.request, Some(at(REQUEST)));
    let again = |request| Scenario { request, lifetimes: DAYS, ..Scenario::of(&rotating) }.change(1_000);
    for request in [None, Some(at(REQUEST)), Some(at(REQUEST - 1_000))] {
        assert!(!matches!(again(request), Due::Now(Change::Rotate(_))), "taken up already: {request:?}");
    }

    let promoted = rotating.with_published(Some(at(2_000))).promoted(at(62_000));
    scenario = Scenario { request: Some(at(REQUEST)), lifetimes: DAYS, ..Scenario::of(&promoted) };
    assert_eq!(scenario.change(62_000), Due::At(at(62_000 + 240_000)), "long before their leaves expire");
    assert_eq!(scenario.change(62_000 + 240_000), Due::Now(Change::DropOldCas));
    let done = scenario.after(62_000 + 240_000);
    assert!(done.trusted().into_iter().eq([&next.ca.certificate]));
}

#[test]
fn request_during_a_rotation_waits_until_the_revoked_cas_are_gone() {
    let ca = || ca_at(at(0), &DAYS);
    let second = Some(at(REQUEST + 1_000));
    let change = |cas: &CaSet, now| {
        Scenario { request: second, lifetimes: DAYS, ..Scenario::of(cas) }
            .published(published(&cas.trusted(), at(2_000)))
            .change(now)
    };
    let rotating = CaSet::new(ca()).rotating(ca(), at(REQUEST));
    assert_eq!(change(&rotating, 2_000), Due::Now(Change::RecordPublished));
    let spreading = rotating.with_published(Some(at(2_000)));
    assert_eq!(change(&spreading, 3_000), Due::At(at(62_000)));
    assert_eq!(change(&spreading, 62_000), Due::Now(Change::PromoteNextCa));
    let promoted = spreading.promoted(at(62_000));
    assert_eq!(change(&promoted, 62_000), Due::At(at(62_000 + 240_000)));
    assert_eq!(change(&promoted, 62_000 + 240_000), Due::Now(Change::DropOldCas));
    // The key of the new CA may have leaked between the two requests.
    let done = CaSet { old: Vec::new(), old_since: None, ..promoted };
    assert_eq!(change(&done, 62_000 + 240_000), Due::Now(Change::Rotate(at(REQUEST + 1_000))));
}

#[test]
fn current_ca_stays_revoked_after_any_number_of_requests() {
    let mut cas = cas();
    for n in 0..40 {
        cas = cas.rotating(ca(), at(n));
        assert!(cas.revokes(&cas.current.certificate), "after {n} requests");
    }
    assert!(!ParsedSecret::parse(&data(&cas)).malformed);
}

#[test]
fn request_in_the_far_future_neither_counts_nor_keeps_later_ones_from_being_taken_up() {
    let far: Timestamp = "9999-12-30T22:00:00Z".parse().unwrap();
    let with = |cas: &CaSet, request| Scenario { request: Some(request), ..Scenario::of(cas) }.change(1_000);
    assert!(matches!(with(&cas(), far), Due::At(_)));
    let mut recorded = cas();
    recorded.revocation.request = Some(far);
    assert_eq!(with(&recorded, at(1_000)), Due::Now(Change::Rotate(at(1_000))));
    assert!(matches!(with(&recorded, far), Due::At(_)));
}

#[test]
fn revoked_ca_is_not_trusted_again() {
    let before = cas();
    let after = before.rotating(ca(), at(REQUEST)).promoted(at(1_000));
    let after = CaSet { old: Vec::new(), old_since: None, ..after };
    // A replica that was cut off still serves a leaf of the old CA.
    let mut scenario = Scenario::of(&after).remembering(&before);
    scenario.serving = Some(before.current.certificate.clone());
    assert!(matches!(scenario.change(2_000), Due::At(_)));
    // Somebody restores a backup of the Secret.
    let scenario = Scenario::of(&before).remembering(&after);
    assert_eq!(scenario.change(2_000), Due::Now(Change::RestoreCa(UnusableCa::Revoked)));
    assert!(same(&scenario.after(2_000), &after));
    // Somebody breaks the Secret during a rotation, or deletes it, and nobody remembers a CA that is still valid.
    let rotating = before.rotating(ca(), at(REQUEST));
    for scenario in [
        Scenario::of(&rotating).with("ca.key", "nonsense"),
        Scenario { data: None, ..Scenario::of(&rotating) }.remembering(&rotating),
    ] {
        let now = if scenario.data.is_some() { 2_000 } else { 24_000 };
        let replaced = scenario.after(now);
        assert!(
            replaced.revokes(&before.current.certificate) && !replaced.trusts(&before.current.certificate)
        );
        assert_eq!(replaced.revocation.request, Some(at(REQUEST)));
    }
}

#[test]
fn requested_rotation_continues_if_its_next_ca_is_lost() {
    let lost = CaSet { next: None, ..cas().rotating(ca(), at(REQUEST)) };
    assert_eq!(Scenario::of(&lost).change(1_000), Due::Now(Change::AddNextCa));
}

#[test]
fn times_written_by_a_clock_that_was_ahead_do_not_delay_a_rotation() {
    let cas = cas().with_next(ca()).with_published(Some(at(3_600_000)));
    let next = cas.next.as_ref().unwrap().ca.certificate.clone();
    let scenario = Scenario::of(&cas).published(published(&[&next], at(17_000)));
    assert_eq!(scenario.change(17_000), Due::Now(Change::RecordPublished));
    assert_eq!(scenario.after(17_000).next.unwrap().published, Some(at(17_000)));
    // Clocks always differ a little.
    let near = Scenario { data: Some(data(&cas.with_published(Some(at(17_500))))), ..scenario };
    assert_eq!(near.change(17_000), Due::At(at(19_500)));

    let cas = CaSet::new(ca()).with_old(ca().certificate.clone(), at(0));
    let scenario = Scenario::of(&CaSet { old_since: Some(at(3_600_000)), ..cas });
    assert_eq!(scenario.change(1_000), Due::Now(Change::DropOldCas));
    let after = scenario.after(1_000);
    assert_eq!((after.old.len(), after.old_since), (1, Some(at(1_000))), "still trusted, for the usual time");
}

#[test]
fn only_the_latest_eight_old_cas_are_kept() {
    let mut cas = cas();
    for _ in 0..20 {
        cas = cas.with_old(ca().certificate.clone(), at(0));
    }
    let latest = ca().certificate.clone();
    let cas = cas.with_old(latest.clone(), at(0)).with_old(latest.clone(), at(1));
    assert_eq!((cas.old.len(), cas.old.last(), cas.old_since), (8, Some(&latest), Some(at(0))));
}

#[test]
fn debug_output_shows_no_key() {
    let cas = cas().with_next(ca());
    let shown = format!("{cas:?} {:?}", ParsedSecret::parse(&data(&cas)));
    assert!(
        shown.contains("CN=lockstep") && !shown.contains("PRIVATE") && !shown.contains("BEGIN"),
        "{shown}"
    );
}
