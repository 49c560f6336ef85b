//! The CA Secret: which CA signs, which is next, which are still trusted; to and from the Secret's data.

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::{ByteString, jiff::Timestamp};
use serde::Deserialize;
use serde_json::{Value, json};

use super::issue::{Ca, Certificate, UnusableCa};
use crate::object::{Meta, map, watched::Watched};

/// The data of a Secret. No type that holds it implements `Debug`.
pub(crate) type SecretData = BTreeMap<String, ByteString>;

const CA_CERTIFICATE: &str = "ca.crt";
const CA_KEY: &str = "ca.key";
const NEXT_CERTIFICATE: &str = "next.crt";
const NEXT_KEY: &str = "next.key";
/// When all webhook configurations that exist were first seen to hold the next CA.
const NEXT_PUBLISHED: &str = "next.published";
/// CAs that no longer sign but are still trusted.
const OLD_CERTIFICATES: &str = "old.crt";
/// When the last of them stopped signing.
const OLD_SINCE: &str = "old.since";

/// When somebody asked for the last rotation that was taken up.
const ROTATION: &str = "rotation.requested";
/// SHA-256, as hex digits, of the CAs whose keys that rotation made worthless, one a line.
const REVOKED: &str = "revoked";

/// Bounds the list of revoked CAs; the latest are kept. More than a Secret has CAs.
const MAX_REVOKED: usize = 32;
/// Bounds the caBundle; the latest old CAs are kept.
const MAX_OLD_CAS: usize = 8;

/// The Secret as the API server returns it, only the fields we use. No `Debug`: it holds keys.
#[derive(Clone, Deserialize)]
pub struct SecretObject {
    pub metadata: Meta,
    #[serde(default, deserialize_with = "map")]
    pub data: SecretData,
}

impl Watched for SecretObject {
    fn meta(&self) -> &Meta {
        &self.metadata
    }
}

/// The CA that signs, the one that replaces it next, and those that are still trusted.
#[derive(Debug, Clone)]
pub struct CaSet {
    pub current: Arc<Ca>,
    pub next: Option<NextCa>,
    pub old: Vec<Certificate>,
    pub old_since: Option<Timestamp>,
    pub revocation: Revocation,
}

/// The next CA, and since when the webhook configurations hold it.
#[derive(Debug, Clone)]
pub struct NextCa {
    pub ca: Arc<Ca>,
    pub published: Option<Timestamp>,
}

/// A rotation that somebody asked for: the CAs that the Secret had then are not to be trusted any longer than replicas
/// need, because their keys may have leaked.
#[derive(Debug, Clone, Default)]
pub struct Revocation {
    /// When somebody asked for the last rotation that was taken up.
    pub request: Option<Timestamp>,
    /// SHA-256 of the CAs that it and earlier ones revoked.
    pub digests: Vec<String>,
}

/// What the Secret holds. Any field may be malformed.
#[derive(Debug, Clone)]
pub(crate) struct ParsedSecret {
    /// Without malformed fields; the error is that of the current CA.
    pub cas: Result<CaSet, UnusableCa>,
    /// A field other than the current CA cannot be parsed, holds too many, or is there without the field it belongs to.
    pub malformed: bool,
    /// Every certificate that could be parsed, the current one even if its key is unusable: replicas may serve leaves
    /// that it signed.
    pub certificates: Vec<Certificate>,
    pub revocation: Revocation,
}

impl CaSet {
    pub fn new(ca: Arc<Ca>) -> Self {
        let revocation = Revocation::default();
        Self { current: ca, next: None, old: Vec::new(), old_since: None, revocation }
    }

    /// What the webhook configurations should trust, in an order that a promotion does not change.
    pub fn trusted(&self) -> Vec<&Certificate> {
        let next = self.next.iter().map(|next| &next.ca.certificate);
        let mut all: Vec<&Certificate> =
            std::iter::once(&self.current.certificate).chain(next).chain(&self.old).collect();
        all.sort_by_key(|certificate| (certificate.not_before, certificate.der().as_ref()));
        all.dedup();
        all
    }

    /// The caBundle, as PEM.
    pub fn bundle(&self) -> String {
        self.trusted().into_iter().map(Certificate::pem).collect()
    }

    pub fn trusts(&self, certificate: &Certificate) -> bool {
        self.trusted().contains(&certificate)
    }

    pub(crate) fn with_next(&self, ca: Arc<Ca>) -> Self {
        Self { next: Some(NextCa { ca, published: None }), ..self.clone() }
    }

    /// Starts a rotation that somebody asked for. It revokes every CA that is here, and with it a next one: its key may
    /// have leaked, too.
    pub(crate) fn rotating(&self, ca: Arc<Ca>, request: Timestamp) -> Self {
        let trusted: Vec<String> = self.trusted().into_iter().map(Certificate::sha256).collect();
        let mut digests = self.revocation.digests.clone();
        // All trusted ones go last, even those that are revoked already: the bound never drops one of them.
        digests.retain(|digest| !trusted.contains(digest));
        digests.extend(trusted);
        digests.drain(..digests.len().saturating_sub(MAX_REVOKED));
        Self { revocation: Revocation { request: Some(request), digests }, ..self.with_next(ca) }
    }

    pub(crate) fn revokes(&self, certificate: &Certificate) -> bool {
        let digests = &self.revocation.digests;
        !digests.is_empty() && digests.contains(&certificate.sha256())
    }

    /// Whether a requested rotation is under way: a CA that it revoked is still trusted.
    pub(crate) fn trusts_revoked(&self) -> bool {
        self.trusted().into_iter().any(|certificate| self.revokes(certificate))
    }

    pub(crate) fn with_published(&self, published: Option<Timestamp>) -> Self {
        let next = self.next.clone().map(|next| NextCa { published, ..next });
        Self { next, ..self.clone() }
    }

    /// The next CA becomes the current one. The former CA's key is dropped.
    pub(crate) fn promoted(&self, now: Timestamp) -> Self {
        match &self.next {
            Some(next) => Self { current: next.ca.clone(), next: None, ..self.clone() }
                .with_old(self.current.certificate.clone(), now),
            None => self.clone(),
        }
    }

    /// Adds a CA that no longer signs but whose leaves may still be served.
    pub(crate) fn with_old(mut self, certificate: Certificate, now: Timestamp) -> Self {
        if !certificate.has_expired(now) && !self.trusts(&certificate) {
            self.old.push(certificate);
            self.old = latest(self.old);
            self.old_since = Some(now);
        }
        self
    }

    pub(crate) fn without_expired(&self, now: Timestamp) -> Self {
        let mut cas = self.clone();
        cas.old.retain(|certificate| !certificate.has_expired(now));
        cas.next = cas.next.filter(|next| !next.ca.certificate.has_expired(now));
        cas.old_since = cas.old_since.filter(|_| !cas.old.is_empty());
        cas
    }

    /// Our part of the Secret's data; none for a key that must be absent.
    pub fn data(&self) -> BTreeMap<&'static str, Option<ByteString>> {
        let next = self.next.as_ref();
        let old: String = self.old.iter().map(Certificate::pem).collect();
        let revoked = self.revocation.digests.join("\n");
        let time = |at: Timestamp| at.to_string();
        [
            (CA_CERTIFICATE, Some(self.current.certificate.pem())),
            (CA_KEY, Some(self.current.key_pem())),
            (NEXT_CERTIFICATE, next.map(|next| next.ca.certificate.pem())),
            (NEXT_KEY, next.map(|next| next.ca.key_pem())),
            (NEXT_PUBLISHED, next.and_then(|next| next.published).map(time)),
            (OLD_CERTIFICATES, (!old.is_empty()).then_some(old)),
            (OLD_SINCE, self.old_since.map(time)),
            (ROTATION, self.revocation.request.map(time)),
            (REVOKED, (!revoked.is_empty()).then_some(revoked)),
        ]
        .into_iter()
        .map(|(key, text)| (key, text.map(|text| ByteString(text.into_bytes()))))
        .collect()
    }

    /// The Secret to create.
    pub fn body(&self, name: &str, namespace: &str) -> Value {
        let data: BTreeMap<&str, ByteString> =
            self.data().into_iter().filter_map(|(key, value)| Some((key, value?))).collect();
        json!({
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {
                "namespace": namespace,
                "name": name,
                "labels": {"app.kubernetes.io/name": "lockstep"},
            },
            "type": "Opaque",
            "data": data,
        })
    }

    /// Sets our keys in this version of the Secret (409 for any other version). Other keys are left alone.
    pub fn merge_patch(&self, resource_version: &str) -> Value {
        json!({"metadata": {"resourceVersion": resource_version}, "data": self.data()})
    }
}

/// As many of the old CAs as are published. A Secret has room for thousands.
fn latest(mut old: Vec<Certificate>) -> Vec<Certificate> {
    old.drain(..old.len().saturating_sub(MAX_OLD_CAS));
    old
}

/// Reads fields of the Secret, and remembers whether one is malformed.
struct Fields<'a> {
    data: &'a SecretData,
    malformed: bool,
}

impl<'a> Fields<'a> {
    fn get(&self, key: &str) -> Option<&'a [u8]> {
        self.data.get(key).map(|value| value.0.as_slice())
    }

    /// None if it is absent or malformed.
    fn parse<T>(&mut self, key: &str, parse: impl FnOnce(&[u8]) -> Option<T>) -> Option<T> {
        let parsed = parse(self.get(key)?);
        self.malformed |= parsed.is_none();
        parsed
    }

    fn time(&mut self, key: &str) -> Option<Timestamp> {
        self.parse(key, |bytes| std::str::from_utf8(bytes).ok()?.trim().parse().ok())
    }

    fn next(&mut self) -> Option<NextCa> {
        let published = self.time(NEXT_PUBLISHED);
        let certificate = self.get(NEXT_CERTIFICATE);
        let key = self.get(NEXT_KEY);
        if certificate.is_none() && key.is_none() {
            self.malformed |= self.get(NEXT_PUBLISHED).is_some();
            return None;
        }
        let ca = Ca::parse(certificate, key).ok();
        self.malformed |= ca.is_none();
        Some(NextCa { ca: Arc::new(ca?), published })
    }

    fn old(&mut self) -> Vec<Certificate> {
        let all = |pem: &[u8]| Certificate::parse_all(pem).ok().filter(|old| !old.is_empty());
        let old = self.parse(OLD_CERTIFICATES, all).unwrap_or_default();
        let without_time = self.get(OLD_CERTIFICATES).is_some() != self.get(OLD_SINCE).is_some();
        self.malformed |= old.len() > MAX_OLD_CAS || without_time;
        latest(old)
    }
}

/// The digests in a list with one a line.
fn digests(list: &[u8]) -> Option<Vec<String>> {
    let all: Vec<String> = std::str::from_utf8(list).ok()?.lines().map(str::to_owned).collect();
    let is_digest = |line: &String| line.len() == 64 && line.bytes().all(|b| b.is_ascii_hexdigit());
    (all.len() <= MAX_REVOKED && all.iter().all(is_digest)).then_some(all)
}

impl ParsedSecret {
    /// Ignores keys that are not ours.
    pub(crate) fn parse(data: &SecretData) -> Self {
        let mut fields = Fields { data, malformed: false };
        let next = fields.next();
        let old = fields.old();
        let old_since = fields.time(OLD_SINCE);
        let revocation = Revocation {
            request: fields.time(ROTATION),
            digests: fields.parse(REVOKED, digests).unwrap_or_default(),
        };
        let current = fields.get(CA_CERTIFICATE).and_then(|pem| Certificate::parse_all(pem).ok()?.pop());
        let next_certificate = next.as_ref().map(|next| next.ca.certificate.clone());
        let certificates = current.into_iter().chain(next_certificate).chain(old.clone()).collect();
        let cas = Ca::parse(fields.get(CA_CERTIFICATE), fields.get(CA_KEY)).map(|current| CaSet {
            current: Arc::new(current),
            next,
            old,
            old_since,
            revocation: revocation.clone(),
        });
        Self { cas, malformed: fields.malformed, certificates, revocation }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::certs::testing::{cas, data};

    #[test]
    fn patch_applies_to_one_version_and_leaves_foreign_keys_alone() {
        let cas = cas();
        let mut object = json!({"data": data(&cas)});
        let right = object["data"].clone();
        for key in ["notes", "old.crt", "ca.key"] {
            object["data"][key] = json!(ByteString(b"nonsense".to_vec()));
        }
        json_patch::merge(&mut object, &cas.merge_patch("7"));
        assert_eq!(object["metadata"]["resourceVersion"], "7");
        assert_eq!(object["data"].as_object_mut().unwrap().remove("notes").unwrap(), "bm9uc2Vuc2U=");
        assert_eq!(object["data"], right);
    }

    #[test]
    fn new_secret_is_labelled_and_opaque() {
        let body = cas().body("lockstep.workshop.io", "home");
        assert_eq!(body["metadata"]["labels"]["app.kubernetes.io/name"], "lockstep");
        assert_eq!((&body["type"], &body["metadata"]["namespace"]), (&json!("Opaque"), &json!("home")));
        assert_eq!(body["data"].as_object().unwrap().keys().collect::<Vec<_>>(), ["ca.crt", "ca.key"]);
    }

    #[test]
    fn null_in_the_data_is_an_empty_value() {
        let text = r#"{"metadata": {"name": "lockstep"}, "data": {"note": null, "ca.crt": "aGk="}}"#;
        let secret: SecretObject =
            serde_json::from_str(text).map_err(|error| error.to_string()).ok().unwrap();
        let data = secret.data;
        assert_eq!((&data["note"].0[..], &data["ca.crt"].0[..]), (&b""[..], &b"hi"[..]));
    }
}
