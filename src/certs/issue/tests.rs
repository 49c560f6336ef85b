use std::sync::Arc;

use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{ServerName, UnixTime},
};
use x509_parser::extensions::GeneralName;

use super::*;
use crate::certs::resolver::{Resolver, server_config};

const HOUR: Duration = Duration::from_hours(1);

fn at(second: i64) -> Timestamp {
    Timestamp::from_second(1_800_000_000 + second).unwrap()
}

fn ca(validity: Duration) -> Ca {
    Ca::generate("lockstep.workshop.io", validity, at(0)).unwrap()
}

fn names(names: &[&str]) -> Names {
    names.iter().map(|name| (*name).to_owned()).collect()
}

fn seconds(certificate: &Certificate) -> (i64, i64) {
    let from = |at: Timestamp| at.as_second() - 1_800_000_000;
    (from(certificate.not_before), from(certificate.not_after))
}

#[test]
fn a_ca_is_one_for_as_long_as_it_was_asked_for() {
    let ca = ca(HOUR);
    assert_eq!(seconds(&ca.certificate), (-300, 3600));
    assert_eq!((ca.certificate.issued(), ca.certificate.due()), (at(0), at(2400)));
    let x509 = parse(ca.certificate.der()).unwrap();
    assert!(x509.basic_constraints().unwrap().unwrap().value.ca);
    let usage = x509.key_usage().unwrap().unwrap().value;
    assert!(usage.key_cert_sign() && !usage.digital_signature());
    assert!(ca.certificate.subject.starts_with("CN=lockstep.workshop.io "), "{}", ca.certificate.subject);
    x509.verify_signature(None).unwrap();
}

#[test]
fn each_generation_has_a_subject_of_its_own_that_fits() {
    let long = format!("lockstep.{}", "x".repeat(100));
    let subjects: BTreeSet<String> =
        (0..20).map(|_| Ca::generate(&long, HOUR, at(0)).unwrap().certificate.subject).collect();
    assert_eq!(subjects.len(), 20);
    assert!(subjects.iter().all(|subject| subject.len() == "CN=".len() + 64), "{subjects:?}");
}

#[test]
fn a_leaf_has_its_names_and_never_outlives_its_ca() {
    let ca = ca(HOUR);
    let wanted = names(&["guard.example", "10.0.0.1", "::1"]);
    let leaf = ca.issue(&wanted, Duration::from_mins(10), at(60)).unwrap();
    assert_eq!(seconds(&leaf.certificate), (60 - 300, 60 + 600));
    assert_eq!((leaf.certificate.issued(), leaf.certificate.due()), (at(60), at(60 + 400)));
    assert_eq!(leaf.issuer, ca.certificate);

    let x509 = parse(leaf.certificate.der()).unwrap();
    let san = &x509.subject_alternative_name().unwrap().unwrap().value.general_names;
    assert!(san.contains(&GeneralName::DNSName("guard.example")));
    assert!(san.contains(&GeneralName::IPAddress(&[10, 0, 0, 1])));
    assert_eq!(san.len(), 3);
    let usage = x509.extended_key_usage().unwrap().unwrap().value;
    assert!(usage.server_auth && !usage.client_auth && !usage.any);
    assert!(!x509.basic_constraints().unwrap().unwrap().value.ca);

    let late = ca.issue(&wanted, Duration::from_mins(10), at(3500)).unwrap();
    assert_eq!(late.certificate.not_after, ca.certificate.not_after);
}

#[test]
fn a_pair_is_the_same_when_it_is_read_again() {
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
fn what_cannot_be_used_is_told_apart() {
    let (one, other) = (ca(HOUR), ca(HOUR));
    let (certificate, key) = (one.certificate.pem(), one.key_pem());
    let leaf = one.issue(&names(&["x.example"]), HOUR, at(0)).unwrap();
    let both = format!("{certificate}{}", other.certificate.pem());
    let truncated = &certificate[..certificate.len() / 2];
    for (certificate, key, expected) in [
        (None, Some(&*key), Unusable::Missing),
        (Some(&*certificate), None, Unusable::Missing),
        (Some("nonsense"), Some(&*key), Unusable::Certificate),
        (Some(""), Some(&*key), Unusable::Certificate),
        (Some(truncated), Some(&*key), Unusable::Certificate),
        (Some(&*both), Some(&*key), Unusable::Certificate),
        (Some(&*certificate), Some("nonsense"), Unusable::Key),
        (Some(&*certificate), Some(&*certificate), Unusable::Key),
        (Some(&*certificate), Some(&*other.key_pem()), Unusable::Mismatch),
        (Some(&*leaf.certificate.pem()), Some(&*leaf.key_pem()), Unusable::NotCa),
    ] {
        let found = Ca::parse(certificate.map(str::as_bytes), key.map(str::as_bytes)).err();
        assert_eq!(found, Some(expected));
    }
    assert_eq!(one.certificate.check(at(-301)), Err(Unusable::NotYet));
    assert_eq!(one.certificate.check(at(-300)), Ok(()));
    assert_eq!(one.certificate.check(at(3599)), Ok(()));
    assert_eq!(one.certificate.check(at(3600)), Err(Unusable::Expired));
}

#[test]
fn a_key_beside_a_certificate_is_never_published() {
    let ca = ca(HOUR);
    let mixed = format!("{}{}", ca.key_pem(), ca.certificate.pem());
    let read = Ca::parse(Some(mixed.as_bytes()), Some(ca.key_pem().as_bytes())).unwrap();
    assert_eq!(read.certificate.pem(), ca.certificate.pem());
    let leaf = ca.issue(&names(&["x.example"]), HOUR, at(0)).unwrap();
    for shown in [format!("{ca:?}"), format!("{leaf:?}"), format!("{:?}", ca.certificate)] {
        assert!(shown.starts_with("CN=") && shown.len() < 150, "{shown}");
    }
}

#[test]
fn a_certificate_shorter_than_our_backdating_is_due_within_its_life() {
    let short = Certificate { not_before: at(0), not_after: at(60), ..ca(HOUR).certificate };
    assert_eq!((short.issued(), short.due()), (at(0), at(40)));
    let seconds = ca(Duration::from_secs(24)).certificate;
    assert_eq!((seconds.issued(), seconds.due()), (at(0), at(16)));
}

#[test]
fn a_host_is_a_dns_name_or_an_address() {
    for (host, expected) in [
        ("guard.example", Some("guard.example")),
        ("Guard.Example.", Some("guard.example")),
        ("10.0.0.1", Some("10.0.0.1")),
        ("[2001:DB8::1]", Some("2001:db8::1")),
        ("", None),
        (".", None),
        ("*.example", None),
        ("a b", None),
        ("ü.example", None),
    ] {
        assert_eq!(name(host).as_deref(), expected, "{host}");
    }
}

// ---------------------------------------------------------------- as a client sees it

/// A clock that stands still.
#[derive(Debug)]
struct Still(Timestamp);

impl rustls::time_provider::TimeProvider for Still {
    fn current_time(&self) -> Option<UnixTime> {
        let seconds = u64::try_from(self.0.as_second()).ok()?;
        Some(UnixTime::since_unix_epoch(Duration::from_secs(seconds)))
    }
}

/// A handshake with a client that trusts this CA.
fn handshake(resolver: &Arc<Resolver>, root: &Certificate, host: &str, now: Timestamp) -> Result<(), String> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let mut roots = RootCertStore::empty();
    roots.add(root.der().clone()).unwrap();
    let mut config = ClientConfig::builder_with_details(provider, Arc::new(Still(now)))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let host = ServerName::try_from(host.to_owned()).unwrap();
    let mut client = rustls::ClientConnection::new(Arc::new(config), host).unwrap();
    let mut server = rustls::ServerConnection::new(server_config(resolver.clone()).unwrap()).unwrap();
    while client.is_handshaking() {
        let mut wire = Vec::new();
        client.write_tls(&mut wire).unwrap();
        server.read_tls(&mut &*wire).unwrap();
        server.process_new_packets().map_err(|error| format!("server: {error}"))?;
        let mut wire = Vec::new();
        server.write_tls(&mut wire).unwrap();
        client.read_tls(&mut &*wire).unwrap();
        client.process_new_packets().map_err(|error| error.to_string())?;
    }
    assert_eq!(client.alpn_protocol(), Some(&b"h2"[..]));
    Ok(())
}

fn serving(leaf: &Leaf) -> Arc<Resolver> {
    let resolver: Arc<Resolver> = Arc::default();
    resolver.serve(vec![leaf.certificate.der().clone()], leaf.key_der()).unwrap();
    resolver
}

#[test]
fn a_client_that_trusts_the_ca_trusts_its_leaf_for_its_names_and_its_time() {
    let (ca, other) = (ca(HOUR), ca(HOUR));
    let leaf = ca.issue(&names(&["guard.example", "127.0.0.1"]), Duration::from_mins(10), at(0)).unwrap();
    let resolver = serving(&leaf);
    let try_with = |root: &Ca, host, now| handshake(&resolver, &root.certificate, host, at(now));
    assert_eq!(try_with(&ca, "guard.example", 0), Ok(()));
    assert_eq!(try_with(&ca, "127.0.0.1", 0), Ok(()));
    assert_eq!(try_with(&ca, "guard.example", -299), Ok(()), "a clock that is behind");
    assert_eq!(try_with(&ca, "guard.example", 599), Ok(()));
    assert!(try_with(&ca, "guard.example", 601).unwrap_err().contains("xpired"));
    assert!(try_with(&ca, "guard.example", -301).unwrap_err().contains("not valid yet"));
    assert!(try_with(&ca, "elsewhere.example", 0).unwrap_err().contains("not valid for name"));
    assert!(try_with(&other, "guard.example", 0).unwrap_err().contains("UnknownIssuer"));
}

#[test]
fn the_certificate_is_swapped_between_two_handshakes() {
    let (first, second) = (ca(HOUR), ca(HOUR));
    let names = names(&["guard.example"]);
    let resolver: Arc<Resolver> = Arc::default();
    assert!(
        handshake(&resolver, &first.certificate, "guard.example", at(0)).is_err(),
        "nothing to serve yet"
    );
    for ca in [&first, &second] {
        let leaf = ca.issue(&names, HOUR, at(0)).unwrap();
        resolver.serve(vec![leaf.certificate.der().clone()], leaf.key_der()).unwrap();
        assert_eq!(handshake(&resolver, &ca.certificate, "guard.example", at(0)), Ok(()));
    }
    assert!(handshake(&resolver, &first.certificate, "guard.example", at(0)).is_err());
    // A pair that does not match changes nothing.
    let (one, other) = (first.issue(&names, HOUR, at(0)).unwrap(), first.issue(&names, HOUR, at(0)).unwrap());
    assert!(resolver.serve(vec![one.certificate.der().clone()], other.key_der()).is_err());
    assert_eq!(handshake(&resolver, &second.certificate, "guard.example", at(0)), Ok(()));
    assert_eq!(format!("{resolver:?}"), "Resolver { .. }");
}
