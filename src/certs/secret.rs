//! PURE. The CA Secret: which CA signs, which is next, which are still trusted; to and from the Secret's data.

use std::{collections::BTreeMap, sync::Arc};

use json_patch::Patch;
use k8s_openapi::{ByteString, jiff::Timestamp};
use serde::Deserialize;
use serde_json::{Value, json};

use super::issue::{Ca, Certificate, UnusableCa};
use crate::{
    object::{Meta, optional_map},
    patch,
    watch::Watched,
};

/// The data of a Secret. No type that holds it implements `Debug`.
pub type SecretData = BTreeMap<String, ByteString>;

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
    #[serde(default, deserialize_with = "optional_map")]
    pub data: Option<SecretData>,
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
    /// When somebody asked for the last rotation that was taken up.
    pub rotation: Option<Timestamp>,
    /// The digests of CAs whose keys may have leaked: not to be trusted any longer than replicas need.
    pub revoked: Vec<String>,
}

/// The next CA, and since when the webhook configurations hold it.
#[derive(Debug, Clone)]
pub struct NextCa {
    pub ca: Arc<Ca>,
    pub published: Option<Timestamp>,
}

/// What the Secret holds, field by field, because any field may be malformed.
#[derive(Debug, Clone)]
pub struct ParsedSecret {
    pub current: Result<Arc<Ca>, UnusableCa>,
    pub next: Option<NextCa>,
    pub old: Vec<Certificate>,
    pub old_since: Option<Timestamp>,
    pub rotation: Option<Timestamp>,
    pub revoked: Vec<String>,
    /// A field other than the current CA cannot be parsed, holds too many, or is there without the field it belongs to.
    pub malformed: bool,
    /// The certificate of the current CA, even if its key is unusable: replicas may serve leaves that it signed.
    pub certificate: Option<Certificate>,
}

impl CaSet {
    #[must_use]
    pub const fn new(ca: Arc<Ca>) -> Self {
        Self {
            current: ca,
            next: None,
            old: Vec::new(),
            old_since: None,
            rotation: None,
            revoked: Vec::new(),
        }
    }

    /// What the webhook configurations should trust, in an order that a promotion does not change.
    #[must_use]
    pub fn trusted(&self) -> Vec<&Certificate> {
        let next = self.next.iter().map(|next| &next.ca.certificate);
        let mut all: Vec<&Certificate> =
            std::iter::once(&self.current.certificate).chain(next).chain(&self.old).collect();
        all.sort_by_key(|certificate| (certificate.not_before, certificate.der().as_ref()));
        all.dedup();
        all
    }

    /// The caBundle, as PEM.
    #[must_use]
    pub fn bundle(&self) -> String {
        self.trusted().into_iter().map(Certificate::pem).collect()
    }

    #[must_use]
    pub fn trusts(&self, certificate: &Certificate) -> bool {
        self.trusted().contains(&certificate)
    }

    #[must_use]
    pub fn with_next(&self, ca: Arc<Ca>) -> Self {
        Self { next: Some(NextCa { ca, published: None }), ..self.clone() }
    }

    /// Starts a rotation that somebody asked for. It revokes every CA that is here, and with it a next one: its key may
    /// have leaked, too.
    #[must_use]
    pub fn rotating(&self, ca: Arc<Ca>, request: Timestamp) -> Self {
        let trusted: Vec<String> = self.trusted().into_iter().map(Certificate::sha256).collect();
        let mut revoked = self.revoked.clone();
        // All trusted ones go last, even those that are revoked already: the bound never drops one of them.
        revoked.retain(|digest| !trusted.contains(digest));
        revoked.extend(trusted);
        revoked.drain(..revoked.len().saturating_sub(MAX_REVOKED));
        Self { rotation: Some(request), revoked, ..self.with_next(ca) }
    }

    #[must_use]
    pub fn revokes(&self, certificate: &Certificate) -> bool {
        !self.revoked.is_empty() && self.revoked.contains(&certificate.sha256())
    }

    /// Whether a requested rotation is under way: a CA that it revoked is still trusted.
    #[must_use]
    pub fn trusts_revoked(&self) -> bool {
        self.trusted().into_iter().any(|certificate| self.revokes(certificate))
    }

    #[must_use]
    pub fn with_published(&self, published: Option<Timestamp>) -> Self {
        let next = self.next.clone().map(|next| NextCa { published, ..next });
        Self { next, ..self.clone() }
    }

    /// The next CA becomes the current one. The former CA's key is dropped.
    #[must_use]
    pub fn promoted(&self, now: Timestamp) -> Self {
        match &self.next {
            Some(next) => Self { current: next.ca.clone(), next: None, ..self.clone() }
                .with_old(self.current.certificate.clone(), now),
            None => self.clone(),
        }
    }

    /// Adds a CA that no longer signs but whose leaves may still be served.
    #[must_use]
    pub fn with_old(mut self, certificate: Certificate, now: Timestamp) -> Self {
        if !certificate.has_expired(now) && !self.trusts(&certificate) {
            self.old.push(certificate);
            self.old = latest(self.old);
            self.old_since = Some(now);
        }
        self
    }

    #[must_use]
    pub fn without_expired(&self, now: Timestamp) -> Self {
        let mut cas = self.clone();
        cas.old.retain(|certificate| !certificate.has_expired(now));
        cas.next = cas.next.filter(|next| !next.ca.certificate.has_expired(now));
        cas.old_since = cas.old_since.filter(|_| !cas.old.is_empty());
        cas
    }

    /// Our part of the Secret's data; none for a key that must be absent.
    #[must_use]
    pub fn data(&self) -> BTreeMap<&'static str, Option<ByteString>> {
        let next = self.next.as_ref();
        let old: String = self.old.iter().map(Certificate::pem).collect();
        let time = |at: Timestamp| at.to_string();
        [
            (CA_CERTIFICATE, Some(self.current.certificate.pem())),
            (CA_KEY, Some(self.current.key_pem())),
            (NEXT_CERTIFICATE, next.map(|next| next.ca.certificate.pem())),
            (NEXT_KEY, next.map(|next| next.ca.key_pem())),
            (NEXT_PUBLISHED, next.and_then(|next| next.published).map(time)),
            (OLD_CERTIFICATES, (!old.is_empty()).then_some(old)),
            (OLD_SINCE, self.old_since.map(time)),
            (ROTATION, self.rotation.map(time)),
            (REVOKED, (!self.revoked.is_empty()).then(|| self.revoked.join("\n"))),
        ]
        .into_iter()
        .map(|(key, text)| (key, text.map(|text| ByteString(text.into_bytes()))))
        .collect()
    }

    /// The Secret to create.
    #[must_use]
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
    #[must_use]
    pub fn patch(&self, object: &SecretObject) -> Patch {
        let mut ops = vec![patch::only_if_version(&object.metadata.resource_version)];
        if object.data.is_none() {
            ops.push(patch::add(&["data"], json!({})));
        }
        for (key, value) in self.data() {
            let present = object.data.as_ref().and_then(|data| data.get(key));
            match value {
                Some(value) if present == Some(&value) => {}
                Some(value) => ops.push(patch::add(&["data", key], json!(value))),
                None if present.is_some() => ops.push(patch::remove(&["data", key])),
                None => {}
            }
        }
        Patch(ops)
    }
}

/// As many of the old CAs as are published. A Secret has room for thousands.
fn latest(mut old: Vec<Certificate>) -> Vec<Certificate> {
    old.drain(..old.len().saturating_sub(MAX_OLD_CAS));
    old
}

impl ParsedSecret {
    /// Ignores keys that are not ours.
    #[must_use]
    pub fn parse(data: &SecretData) -> Self {
        let field = |key: &str| data.get(key).map(|value| value.0.as_slice());
        let time = |key: &str| {
            let text = field(key).map(|bytes| std::str::from_utf8(bytes).unwrap_or_default());
            text.map(|text| text.trim().parse::<Timestamp>().ok())
        };

        let next = match (field(NEXT_CERTIFICATE), field(NEXT_KEY)) {
            (None, None) => None,
            (certificate, key) => Some(Ca::parse(certificate, key)),
        };
        let published = time(NEXT_PUBLISHED);
        let bad_next = matches!(next, Some(Err(_)))
            || matches!(published, Some(None))
            || (next.is_none() && published.is_some());

        let old = field(OLD_CERTIFICATES).map(Certificate::parse_all);
        let old_since = time(OLD_SINCE);
        let bad_list = |old: &Vec<Certificate>| old.is_empty() || old.len() > MAX_OLD_CAS;
        let bad_old = old.as_ref().is_some_and(|old| old.as_ref().map_or(true, bad_list))
            || matches!(old_since, Some(None))
            || old.is_some() != old_since.is_some();

        let rotation = time(ROTATION);
        let revoked = field(REVOKED).map(|bytes| std::str::from_utf8(bytes).unwrap_or("unreadable"));
        let revoked: Vec<String> = revoked.into_iter().flat_map(str::lines).map(str::to_owned).collect();
        let is_digest = |line: &String| line.len() == 64 && line.bytes().all(|b| b.is_ascii_hexdigit());
        let bad_rotation =
            matches!(rotation, Some(None)) || revoked.len() > MAX_REVOKED || !revoked.iter().all(is_digest);

        let certificate = field(CA_CERTIFICATE).and_then(|pem| Certificate::parse_all(pem).ok()?.pop());
        Self {
            current: Ca::parse(field(CA_CERTIFICATE), field(CA_KEY)).map(Arc::new),
            next: next
                .and_then(Result::ok)
                .map(|ca| NextCa { ca: Arc::new(ca), published: published.flatten() }),
            old: old.and_then(Result::ok).map(latest).unwrap_or_default(),
            old_since: old_since.flatten(),
            rotation: rotation.flatten(),
            revoked: if bad_rotation { Vec::new() } else { revoked },
            malformed: bad_next || bad_old || bad_rotation,
            certificate,
        }
    }

    /// What was parsed, with this CA as the current one and without malformed fields.
    #[must_use]
    pub fn with_current(&self, current: Arc<Ca>) -> CaSet {
        CaSet {
            current,
            next: self.next.clone(),
            old: self.old.clone(),
            old_since: self.old_since,
            rotation: self.rotation,
            revoked: self.revoked.clone(),
        }
    }

    /// Every certificate that could be parsed.
    pub fn certificates(&self) -> impl Iterator<Item = &Certificate> {
        let next = self.next.iter().map(|next| &next.ca.certificate);
        self.certificate.iter().chain(next).chain(&self.old)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::certs::testing::{cas, data, secret};

    fn paths(operations: &Patch) -> Vec<(String, String)> {
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let all = json!(operations);
        all.as_array().unwrap().iter().map(|op| (text(&op["op"]), text(&op["path"]))).collect()
    }

    #[test]
    fn patch_applies_to_one_version_and_leaves_foreign_keys_alone() {
        let cas = cas();
        let mut data = data(&cas);
        for key in ["notes", "old.crt", "ca.key"] {
            data.insert(key.to_owned(), ByteString(b"nonsense".to_vec()));
        }
        let operations = cas.patch(&secret("7", Some(data)));
        let expected =
            [("replace", "/metadata/resourceVersion"), ("add", "/data/ca.key"), ("remove", "/data/old.crt")]
                .map(|(op, path)| (op.to_owned(), path.to_owned()));
        assert_eq!(paths(&operations), expected);
        assert_eq!(json!(operations)[0]["value"], "7");
    }

    #[test]
    fn patch_of_a_secret_without_data_adds_data_first() {
        let paths: Vec<String> =
            paths(&cas().patch(&secret("7", None))).into_iter().map(|(_, path)| path).collect();
        assert_eq!(paths, ["/metadata/resourceVersion", "/data", "/data/ca.crt", "/data/ca.key"]);
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
        let data = secret.data.unwrap();
        assert_eq!((&data["note"].0[..], &data["ca.crt"].0[..]), (&b""[..], &b"hi"[..]));
    }
}
