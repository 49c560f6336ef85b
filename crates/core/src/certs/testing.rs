//! For tests of this module: short lifetimes, a clock in milliseconds, objects as the API server returns them.

use std::{sync::Arc, time::Duration};

use k8s_openapi::{ByteString, jiff::Timestamp};
use serde_json::{Value, json};

use super::{
    decide::CertSettings,
    issue::{Ca, Certificate},
    lifetimes::Lifetimes,
    secret::{CaSet, SecretData, SecretObject},
    webhooks::{Published, WebhookConfiguration},
};

/// A propagation delay of 2 s follows, a removal delay of 8 s, and old CAs are dropped after 8 s.
pub const LIFETIMES: Lifetimes =
    Lifetimes { ca_validity: Duration::from_secs(24), leaf_validity: Duration::from_secs(6) };

pub fn settings() -> CertSettings {
    CertSettings { keys: crate::testing::keys(), namespace: "home".to_owned(), lifetimes: LIFETIMES }
}

/// Milliseconds since the test began.
pub fn at(ms: i64) -> Timestamp {
    Timestamp::from_millisecond(1_800_000_000_000 + ms).unwrap()
}

pub fn ca_at(now: Timestamp, lifetimes: &Lifetimes) -> Arc<Ca> {
    Arc::new(Ca::generate("lockstep.workshop.io", lifetimes.ca_validity, now).unwrap())
}

/// A CA that signs for clients only.
pub fn client_ca() -> Arc<Ca> {
    restricted_ca(|params| params.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ClientAuth])
}

/// A CA that signs only for names under this one.
pub fn constrained_ca(name: &str) -> Arc<Ca> {
    let permitted_subtrees = vec![rcgen::GeneralSubtree::DnsName(name.to_owned())];
    let constraints = rcgen::NameConstraints { permitted_subtrees, excluded_subtrees: Vec::new() };
    restricted_ca(|params| params.name_constraints = Some(constraints))
}

fn restricted_ca(restrict: impl FnOnce(&mut rcgen::CertificateParams)) -> Arc<Ca> {
    let (certificate, key) = ca_pem(restrict);
    Arc::new(Ca::parse(Some(certificate.as_bytes()), Some(key.as_bytes())).unwrap())
}

/// A CA and its key, as PEM.
pub fn ca_pem(change: impl FnOnce(&mut rcgen::CertificateParams)) -> (String, String) {
    let mut params = rcgen::CertificateParams::default();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    change(&mut params);
    let key = rcgen::KeyPair::generate().unwrap();
    (params.self_signed(&key).unwrap().pem(), key.serialize_pem())
}

pub fn ca() -> Arc<Ca> {
    ca_at(at(0), &LIFETIMES)
}

pub fn cas() -> CaSet {
    CaSet::new(ca())
}

/// The data of a Secret with these CAs.
pub fn data(cas: &CaSet) -> SecretData {
    cas.data().into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))).collect()
}

pub fn secret(version: &str, data: SecretData) -> SecretObject {
    serde_json::from_value(json!({"metadata": {"name": "x", "resourceVersion": version}, "data": data}))
        .unwrap()
}

/// A configuration whose webhooks, all of them ours, call a host and have a caBundle.
pub fn configuration(version: &str, webhooks: &[(Value, Option<&str>)]) -> WebhookConfiguration {
    let webhook = |(client, bundle): &(Value, Option<&str>)| {
        let mut client = client.clone();
        if let Some(bundle) = bundle {
            client["caBundle"] = json!(ByteString(bundle.as_bytes().to_vec()));
        }
        json!({"name": "sources.x", "clientConfig": client, "sideEffects": "None"})
    };
    let webhooks: Vec<Value> = webhooks.iter().map(webhook).collect();
    let metadata = json!({"name": "x", "uid": "u1", "resourceVersion": version});
    serde_json::from_value(json!({"metadata": metadata, "webhooks": webhooks})).unwrap()
}

pub fn service() -> Value {
    json!({"service": {"name": "webhook", "namespace": "home"}})
}

pub fn published(certificates: &[&Certificate], since: Timestamp) -> Published {
    Published::Since(certificates.iter().map(|one| (one.der().to_vec(), since)).collect())
}
