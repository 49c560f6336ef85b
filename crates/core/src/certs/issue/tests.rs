use x509_parser::extensions::GeneralName;

use super::*;

/// In seconds.
const DAY: i64 = 24 * 3600;
const HOUR: Duration = Duration::from_hours(1);

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_800_000_000 + second).unwrap()
}

fn ca(validity: Duration) -> Ca {
    Ca::generate("lockstep.workshop.io", validity, at(0)).unwrap()
}

fn names(names: &[&str]) -> SubjectNames {
    names.iter().map(|name| (*name).to_owned()).collect()
}

fn seconds(certificate: &Certificate) -> (i64, i64) {
    let from = |at: Timestamp| at.as_second() - 1_800_000_000;
    (from(certificate.not_before), from(certificate.not_after))
}

#[test]
fn generated_ca_may_sign_and_has_the_requested_validity() {
    let ca = ca(HOUR);
    assert_eq!(seconds(&ca.certificate), (-DAY, 3600));
    assert_eq!(ca.certificate.renew_at(), at(2400));
    assert_eq!(ca.check(&names(&["webhook.example", "10.0.0.1", "::1"]), at(0)), Ok(()));
    let x509 = parse(ca.certificate.der()).unwrap();
    assert!(x509.basic_constraints().unwrap().unwrap().value.ca);
    let usage = x509.key_usage().unwrap().unwrap().value;
    assert!(usage.key_cert_sign() && !usage.digital_signature());
    assert!(ca.certificate.subject.starts_with("CN=lockstep.workshop.io "), "{}", ca.certificate.subject);
    x509.verify_signature(None).unwrap();
}

#[test]
fn each_ca_has_a_unique_subject_of_at_most_64_characters() {
    let long = format!("lockstep.{}", "x".repeat(100));
    let subjects: BTreeSet<String> =
        (0..20).map(|_| Ca::generate(&long, HOUR, at(0)).unwrap().certificate.subject).collect();
    assert_eq!(subjects.len(), 20);
    assert!(subjects.iter().all(|subject| subject.len() == "CN=".len() + 64), "{subjects:?}");
}

#[test]
fn leaf_has_its_names_and_expires_with_its_ca_at_the_latest() {
    let ca = ca(HOUR);
    let wanted = names(&["webhook.example", "10.0.0.1", "::1"]);
    let leaf = ca.issue(&wanted, Duration::from_mins(10), at(60)).unwrap();
    assert_eq!(seconds(&leaf.certificate), (-DAY, 60 + 600));
    assert_eq!(leaf.renew_at, at(60 + 400));
    assert_eq!(leaf.issuer, ca.certificate);

    let x509 = parse(leaf.certificate.der()).unwrap();
    let san = &x509.subject_alternative_name().unwrap().unwrap().value.general_names;
    assert!(san.contains(&GeneralName::DNSName("webhook.example")));
    assert!(san.contains(&GeneralName::IPAddress(&[10, 0, 0, 1])));
    assert_eq!(san.len(), 3);
    let usage = x509.extended_key_usage().unwrap().unwrap().value;
    assert!(usage.server_auth && !usage.client_auth && !usage.any);
    assert!(!x509.basic_constraints().unwrap().unwrap().value.ca);

    let late = ca.issue(&wanted, Duration::from_mins(10), at(3500)).unwrap();
    assert_eq!(late.certificate.not_after, ca.certificate.not_after);
}

#[test]
fn ca_and_leaf_of_a_replica_whose_clock_is_hours_ahead_are_valid_at_once() {
    let ours = ca(48 * HOUR);
    let ahead = at(20 * 3600);
    let leaf = ours.issue(&names(&["webhook.example"]), HOUR, ahead).unwrap();
    assert!(leaf.certificate.is_valid(at(0)));
    let theirs = Ca::generate("lockstep.workshop.io", HOUR, ahead).unwrap();
    assert_eq!(theirs.check(&names(&["webhook.example"]), at(0)), Ok(()));
}

#[test]
fn parsed_ca_equals_the_generated_one_and_signs() {
    let ca = ca(HOUR);
    let read = Ca::parse(Some(ca.certificate.pem().as_bytes()), Some(ca.key_pem().as_bytes())).unwrap();
    assert_eq!(read.certificate, ca.certificate);
    assert_eq!(read.certificate.pem(), ca.certificate.pem());
    let leaf = read.issue(&names(&["x.example"]), HOUR, at(0)).unwrap();
    parse(leaf.certificate.der())
        .unwrap()
        .verify_signature(Some(parse(ca.certificate.der()).unwrap().public_key()))
        .unwrap();
}

#[test]
fn unusable_pairs_are_refused_with_the_reason() {
    let (one, other) = (ca(HOUR), ca(HOUR));
    let (certificate, key) = (one.certificate.pem(), one.key_pem());
    let leaf = one.issue(&names(&["x.example"]), HOUR, at(0)).unwrap();
    let both = format!("{certificate}{}", other.certificate.pem());
    let truncated = &certificate[..certificate.len() / 2];
    for (certificate, key, expected) in [
        (None, Some(&*key), UnusableCa::Missing),
        (Some(&*certificate), None, UnusableCa::Missing),
        (Some("nonsense"), Some(&*key), UnusableCa::Certificate),
        (Some(""), Some(&*key), UnusableCa::Certificate),
        (Some(truncated), Some(&*key), UnusableCa::Certificate),
        (Some(&*both), Some(&*key), UnusableCa::Certificate),
        (Some(&*certificate), Some("nonsense"), UnusableCa::Key),
        (Some(&*certificate), Some(&*certificate), UnusableCa::Key),
        (Some(&*certificate), Some(&*other.key_pem()), UnusableCa::Mismatch),
        (Some(&*leaf.certificate.pem()), Some(&*leaf.key_pem()), UnusableCa::NotCa),
    ] {
        let found = Ca::parse(certificate.map(str::as_bytes), key.map(str::as_bytes)).err();
        assert_eq!(found, Some(expected));
    }
    assert_eq!(one.certificate.check(at(-DAY - 1)), Err(UnusableCa::NotYetValid));
    assert_eq!(one.certificate.check(at(-DAY)), Ok(()));
    assert_eq!(one.certificate.check(at(3599)), Ok(()));
    assert_eq!(one.certificate.check(at(3600)), Err(UnusableCa::Expired));
}

#[test]
fn key_in_the_certificate_field_is_not_published() {
    let ca = ca(HOUR);
    let mixed = format!("{}{}", ca.key_pem(), ca.certificate.pem());
    let read = Ca::parse(Some(mixed.as_bytes()), Some(ca.key_pem().as_bytes())).unwrap();
    assert_eq!(read.certificate.pem(), ca.certificate.pem());
    for shown in [format!("{ca:?}"), format!("{:?}", ca.certificate)] {
        assert!(shown.starts_with("CN=") && shown.len() < 150, "{shown}");
    }
}

#[test]
fn foreign_certificate_shorter_than_the_backdating_is_renewed_before_it_expires() {
    let short = Certificate { not_before: at(0), not_after: at(60), ..ca(HOUR).certificate };
    assert_eq!(short.renew_at(), at(40));
    let seconds = ca(Duration::from_secs(24)).certificate;
    assert_eq!(seconds.renew_at(), at(16));
}

#[test]
fn subject_name_is_a_dns_name_or_an_ip_address() {
    for (host, expected) in [
        ("webhook.example", Some("webhook.example")),
        ("Webhook.Example.", Some("webhook.example")),
        ("10.0.0.1", Some("10.0.0.1")),
        ("[2001:DB8::1]", Some("2001:db8::1")),
        ("", None),
        (".", None),
        ("*.example", None),
        ("a b", None),
        ("ü.example", None),
    ] {
        assert_eq!(subject_name(host).as_deref(), expected, "{host}");
    }
}
