//! PURE. What the CA Secret holds: the CA that signs, the one to come, those that were; to and from its data.

use std::{collections::BTreeMap, sync::Arc};

use k8s_openapi::{ByteString, jiff::Timestamp};

use super::issue::{Ca, Certificate, Unusable};

/// The data of a Secret. Nothing that holds it has a `Debug`.
pub type Data = BTreeMap<String, ByteString>;

const CA_CERTIFICATE: &str = "ca.crt";
const CA_KEY: &str = "ca.key";
const NEXT_CERTIFICATE: &str = "next.crt";
const NEXT_KEY: &str = "next.key";
/// When both webhook configurations were first seen to hold the next CA.
const NEXT_PUBLISHED: &str = "next.published";
/// CAs that sign no more but are still trusted.
const OLD_CERTIFICATES: &str = "old.crt";
/// When the last of them stopped signing.
const OLD_SINCE: &str = "old.since";

/// More old CAs than this are a mistake; the latest count.
const OLD_KEPT: usize = 8;

/// Which CA signs, which will, and which are still trusted.
#[derive(Debug, Clone)]
pub struct State {
    pub current: Arc<Ca>,
    pub next: Option<Next>,
    pub old: Vec<Certificate>,
    pub since: Option<Timestamp>,
}

/// The CA to come, and since when the webhook configurations hold it.
#[derive(Debug, Clone)]
pub struct Next {
    pub ca: Arc<Ca>,
    pub published: Option<Timestamp>,
}

/// What was read from the Secret, part by part: any of them may be broken.
#[derive(Debug, Clone)]
pub struct Reading {
    pub current: Result<Arc<Ca>, Unusable>,
    /// The next CA, if there is one that can be read.
    pub next: Option<Next>,
    pub old: Vec<Certificate>,
    pub since: Option<Timestamp>,
    /// Something beside the current CA cannot be read or does not belong there.
    pub flawed: bool,
    /// The current CA's certificate, if at least that can be read: there may be leaves of it.
    pub certificate: Option<Certificate>,
}

impl State {
    #[must_use]
    pub const fn new(ca: Arc<Ca>) -> Self {
        Self { current: ca, next: None, old: Vec::new(), since: None }
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

    #[must_use]
    pub fn bundle(&self) -> String {
        self.trusted().into_iter().map(Certificate::pem).collect()
    }

    #[must_use]
    pub fn trusts(&self, certificate: &Certificate) -> bool {
        self.trusted().contains(&certificate)
    }

    // --- what becomes of it

    #[must_use]
    pub fn prepared(&self, ca: Arc<Ca>) -> Self {
        Self { next: Some(Next { ca, published: None }), ..self.clone() }
    }

    #[must_use]
    pub fn noted(&self, published: Option<Timestamp>) -> Self {
        let next = self.next.clone().map(|next| Next { published, ..next });
        Self { next, ..self.clone() }
    }

    /// The next CA signs from now on. The former one's key is forgotten.
    #[must_use]
    pub fn promoted(&self, now: Timestamp) -> Self {
        match &self.next {
            Some(next) => Self { current: next.ca.clone(), next: None, ..self.clone() }
                .kept(self.current.certificate.clone(), now),
            None => self.clone(),
        }
    }

    /// Trusts a CA on that does not sign any more, as long as there may be leaves of it.
    #[must_use]
    pub fn kept(mut self, certificate: Certificate, now: Timestamp) -> Self {
        if !certificate.has_ended(now) && !self.trusts(&certificate) {
            self.old.push(certificate);
            self.old.drain(..self.old.len().saturating_sub(OLD_KEPT));
            self.since = Some(now);
        }
        self
    }

    /// Without what has ended; without any old CA if no leaf of one can be alive.
    #[must_use]
    pub fn retired(&self, now: Timestamp, all: bool) -> Self {
        let mut state = self.clone();
        state.old.retain(|certificate| !all && !certificate.has_ended(now));
        state.next = state.next.filter(|next| !next.ca.certificate.has_ended(now));
        state.since = state.since.filter(|_| !state.old.is_empty());
        state
    }

    /// Our part of the Secret's data: what is none must not be there.
    #[must_use]
    pub fn data(&self) -> BTreeMap<&'static str, Option<ByteString>> {
        let next = self.next.as_ref();
        let old: String = self.old.iter().map(Certificate::pem).collect();
        let instant = |at: Timestamp| at.to_string();
        [
            (CA_CERTIFICATE, Some(self.current.certificate.pem())),
            (CA_KEY, Some(self.current.key_pem())),
            (NEXT_CERTIFICATE, next.map(|next| next.ca.certificate.pem())),
            (NEXT_KEY, next.map(|next| next.ca.key_pem())),
            (NEXT_PUBLISHED, next.and_then(|next| next.published).map(instant)),
            (OLD_CERTIFICATES, (!old.is_empty()).then_some(old)),
            (OLD_SINCE, self.since.map(instant)),
        ]
        .into_iter()
        .map(|(key, text)| (key, text.map(|text| ByteString(text.into_bytes()))))
        .collect()
    }
}

impl Reading {
    /// Reads a Secret's data. Keys that are not ours are not looked at.
    #[must_use]
    pub fn of(data: &Data) -> Self {
        let field = |key: &str| data.get(key).map(|value| value.0.as_slice());
        let mut flawed = false;
        let mut flaw = |found: bool| flawed |= found;
        let instant = |key: &str| {
            let text = field(key).map(|bytes| std::str::from_utf8(bytes).unwrap_or_default());
            text.map(|text| text.trim().parse::<Timestamp>().ok())
        };

        let next = match (field(NEXT_CERTIFICATE), field(NEXT_KEY)) {
            (None, None) => None,
            (certificate, key) => Some(Ca::parse(certificate, key)),
        };
        let published = instant(NEXT_PUBLISHED);
        flaw(matches!(&next, Some(Err(_))) || matches!(published, Some(None)));
        flaw(next.is_none() && published.is_some());

        let old = field(OLD_CERTIFICATES).map(Certificate::parse_all);
        let since = instant(OLD_SINCE);
        flaw(matches!(&old, Some(Err(_))) || matches!(&old, Some(Ok(old)) if old.is_empty()));
        flaw(matches!(since, Some(None)) || old.is_some() != since.is_some());

        let certificate = field(CA_CERTIFICATE).and_then(|pem| Certificate::parse_all(pem).ok()?.pop());
        Self {
            current: Ca::parse(field(CA_CERTIFICATE), field(CA_KEY)).map(Arc::new),
            next: next
                .and_then(Result::ok)
                .map(|ca| Next { ca: Arc::new(ca), published: published.flatten() }),
            old: old.and_then(Result::ok).unwrap_or_default(),
            since: since.flatten(),
            flawed,
            certificate,
        }
    }

    /// What was read with this CA as the current one, without what is broken.
    #[must_use]
    pub fn state(&self, current: Arc<Ca>) -> State {
        State { current, next: self.next.clone(), old: self.old.clone(), since: self.since }
    }
}
