//! Handshakes with leaves that were issued.

use std::time::Duration;

use k8s_openapi::jiff::Timestamp;
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{ServerName, UnixTime},
};

use super::*;
use crate::tls::client_ca::server_config;
use lockstep_core::certs::issue::{Ca, Certificate, Leaf, SubjectNames};

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

/// A client's clock that always shows the same time.
#[derive(Debug)]
struct FixedClock(Timestamp);

impl rustls::time_provider::TimeProvider for FixedClock {
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
    let mut config = ClientConfig::builder_with_details(provider, Arc::new(FixedClock(now)))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(roots)
        .with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let host = ServerName::try_from(host.to_owned()).unwrap();
    let mut client = rustls::ClientConnection::new(Arc::new(config), host).unwrap();
    let mut server = rustls::ServerConnection::new(server_config(resolver.clone(), None).unwrap()).unwrap();
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
    resolver.serve(certified_key(vec![leaf.certificate.der().clone()], leaf.key_der()).unwrap());
    resolver
}

#[test]
fn client_that_trusts_the_ca_accepts_its_leaf_for_its_names_while_it_is_valid() {
    let (ca, other) = (ca(HOUR), ca(HOUR));
    let leaf = ca.issue(&names(&["webhook.example", "127.0.0.1"]), Duration::from_mins(10), at(0)).unwrap();
    let resolver = serving(&leaf);
    let handshake_with = |root: &Ca, host, now| handshake(&resolver, &root.certificate, host, at(now));
    assert_eq!(handshake_with(&ca, "webhook.example", 0), Ok(()));
    assert_eq!(handshake_with(&ca, "127.0.0.1", 0), Ok(()));
    assert_eq!(handshake_with(&ca, "webhook.example", 1 - DAY), Ok(()), "the client's clock is behind");
    assert_eq!(handshake_with(&ca, "webhook.example", 599), Ok(()));
    assert!(handshake_with(&ca, "webhook.example", 601).unwrap_err().contains("xpired"));
    assert!(handshake_with(&ca, "webhook.example", -DAY - 1).unwrap_err().contains("not valid yet"));
    assert!(handshake_with(&ca, "elsewhere.example", 0).unwrap_err().contains("not valid for name"));
    assert!(handshake_with(&other, "webhook.example", 0).unwrap_err().contains("UnknownIssuer"));
}

#[test]
fn new_leaf_is_used_from_the_next_handshake_on() {
    let (first, second) = (ca(HOUR), ca(HOUR));
    let names = names(&["webhook.example"]);
    let resolver: Arc<Resolver> = Arc::default();
    assert!(
        handshake(&resolver, &first.certificate, "webhook.example", at(0)).is_err(),
        "no certificate yet"
    );
    for ca in [&first, &second] {
        let leaf = ca.issue(&names, HOUR, at(0)).unwrap();
        resolver.serve(certified_key(vec![leaf.certificate.der().clone()], leaf.key_der()).unwrap());
        assert_eq!(handshake(&resolver, &ca.certificate, "webhook.example", at(0)), Ok(()));
    }
    assert!(handshake(&resolver, &first.certificate, "webhook.example", at(0)).is_err());
    // A key that does not match the certificate changes nothing.
    let (one, other) = (first.issue(&names, HOUR, at(0)).unwrap(), first.issue(&names, HOUR, at(0)).unwrap());
    assert!(certified_key(vec![one.certificate.der().clone()], other.key_der()).is_err());
    assert_eq!(handshake(&resolver, &second.certificate, "webhook.example", at(0)), Ok(()));
    assert_eq!(format!("{resolver:?}"), "Resolver { .. }");
}
