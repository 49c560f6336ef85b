//! Generates CAs and leaves, and parses a CA from its certificate and key. Time is an argument.

use std::{collections::BTreeSet, fmt, net::IpAddr, sync::Arc, time::Duration};

use k8s_openapi::{ByteString, jiff::Timestamp};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, PublicKeyData,
};
use ring::digest::{SHA256, digest};
use rustls::{
    RootCertStore,
    client::{WebPkiServerVerifier, danger::ServerCertVerifier},
    crypto::ring::default_provider,
    pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, UnixTime, pem::PemObject},
};
use x509_parser::{certificate::X509Certificate, time::ASN1Time};

use super::lifetimes::two_thirds;
use crate::{
    object::names::is_subdomain,
    object::time::{earlier, later},
    text,
};

/// CAs are valid from this long before they are issued, and their leaves with them: our clock may be ahead of those of
/// API servers and of other replicas.
pub(crate) const BACKDATE: Duration = Duration::from_hours(24);
/// How long the leaf is valid that is issued to try a CA.
const TRIAL_VALIDITY: Duration = Duration::from_mins(1);
/// A common name has at most 64 characters; a space and 16 random digits follow the instance.
const MAX_INSTANCE_BYTES: usize = 47;

/// The subject alternative names of a leaf: DNS names and IP addresses, as text.
pub type SubjectNames = BTreeSet<String>;

/// A parsed certificate.
#[derive(Clone, PartialEq, Eq)]
pub struct Certificate {
    der: CertificateDer<'static>,
    pub subject: String,
    pub not_before: Timestamp,
    pub not_after: Timestamp,
    /// Its extended key usage allows servers. For a CA: what it signs may be a server's.
    pub for_servers: bool,
}

/// A certificate that may sign others, with its key. `Debug` shows the subject only.
pub struct Ca {
    pub certificate: Certificate,
    key: KeyPair,
}

/// A serving certificate, its key and its issuer. It has no `Debug`: it holds a key.
pub struct Leaf {
    pub certificate: Certificate,
    pub issuer: Certificate,
    pub names: SubjectNames,
    /// When it should be replaced: after two thirds of its lifetime.
    pub renew_at: Timestamp,
    key: KeyPair,
}

/// Why a CA cannot be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum UnusableCa {
    #[error("it is missing")]
    Missing,
    #[error("its certificate cannot be read")]
    Certificate,
    #[error("its key cannot be read")]
    Key,
    #[error("its key belongs to another certificate")]
    Mismatch,
    #[error("its certificate may not sign others")]
    NotCa,
    #[error("it has expired")]
    Expired,
    #[error("it is not valid yet: check the clocks")]
    NotYetValid,
    #[error("a requested rotation has replaced it")]
    Revoked,
    #[error("its extended key usage does not allow servers")]
    NotForServers,
    #[error("API servers would not accept the webhook's certificate from it: check its name constraints")]
    Rejected,
}

/// Why no certificate could be issued, or served.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("a certificate could not be generated: {0}")]
    Generate(#[from] rcgen::Error),
    #[error("a generated certificate is unusable: {0}")]
    Generated(#[from] UnusableCa),
    #[error("TLS does not accept the certificate: {0}")]
    Tls(#[from] rustls::Error),
}

impl Certificate {
    pub fn parse(der: CertificateDer<'static>) -> Result<Self, UnusableCa> {
        let x509 = parse(&der)?;
        // `99991231235959Z`, by which a certificate has no end, is later than any Timestamp.
        let time = |time: ASN1Time| {
            let seconds = time.timestamp();
            let bound = if seconds > 0 { Timestamp::MAX } else { Timestamp::MIN };
            Timestamp::from_second(seconds).unwrap_or(bound)
        };
        let subject = x509.subject().to_string();
        let validity = x509.validity();
        let not_before = time(validity.not_before);
        let not_after = time(validity.not_after);
        let usage = x509.extended_key_usage().map_err(|_| UnusableCa::Certificate)?;
        let for_servers = usage.is_none_or(|usage| usage.value.any || usage.value.server_auth);
        Ok(Self { der, subject, not_before, not_after, for_servers })
    }

    /// Every certificate in a PEM text; other PEM sections are skipped.
    pub fn parse_all(pem: &[u8]) -> Result<Vec<Self>, UnusableCa> {
        CertificateDer::pem_slice_iter(pem)
            .map(|der| der.map_err(|_| UnusableCa::Certificate).and_then(Self::parse))
            .collect()
    }

    pub const fn der(&self) -> &CertificateDer<'static> {
        &self.der
    }

    /// Encoded anew instead of kept as it was read: this text is published, and the field it was read from may hold a
    /// key as well.
    pub fn pem(&self) -> String {
        const LINE_CHARS: usize = 64;
        let encoded = serde_json::to_value(ByteString(self.der.to_vec())).unwrap_or_default();
        let text = encoded.as_str().unwrap_or_default();
        let line = |start: usize| &text[start..text.len().min(start + LINE_CHARS)];
        let lines: Vec<&str> = (0..text.len()).step_by(LINE_CHARS).map(line).collect();
        format!("-----BEGIN CERTIFICATE-----\n{}\n-----END CERTIFICATE-----\n", lines.join("\n"))
    }

    /// The SHA-256 of its DER, as hex digits.
    pub fn sha256(&self) -> String {
        digest(&SHA256, &self.der).as_ref().iter().fold(String::new(), |hex, byte| format!("{hex}{byte:02x}"))
    }

    /// When a CA should be replaced: after two thirds of its lifetime, which begins [`BACKDATE`] after `not_before`.
    pub(crate) fn renew_at(&self) -> Timestamp {
        let issued = later(self.not_before, BACKDATE);
        // A foreign certificate may be valid for less time than we backdate ours.
        let issued = if issued < self.not_after { issued } else { self.not_before };
        two_thirds(issued, self.not_after)
    }

    /// Unlike `!is_valid`: a certificate that is not valid yet by our clock may already be served by another replica.
    pub(crate) fn has_expired(&self, now: Timestamp) -> bool {
        now >= self.not_after
    }

    pub fn check(&self, now: Timestamp) -> Result<(), UnusableCa> {
        if self.has_expired(now) {
            Err(UnusableCa::Expired)
        } else if now < self.not_before {
            Err(UnusableCa::NotYetValid)
        } else {
            Ok(())
        }
    }

    pub fn is_valid(&self, now: Timestamp) -> bool {
        self.check(now).is_ok()
    }
}

impl Ca {
    /// Generates a CA with a subject of its own: clients look an issuer up by its subject.
    pub fn generate(instance: &str, validity: Duration, now: Timestamp) -> Result<Self, Error> {
        let instance = text::prefix(instance, MAX_INSTANCE_BYTES);
        let mut params = params(earlier(now, BACKDATE), later(now, validity))?;
        params.distinguished_name.push(DnType::CommonName, format!("{instance} {:016x}", fastrand::u64(..)));
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
        let key = KeyPair::generate()?;
        let certificate = Certificate::parse(params.self_signed(&key)?.into())?;
        Ok(Self { certificate, key })
    }

    /// Parses a pair. [`Self::check`] says whether it can be used at a given time.
    pub fn parse(certificate: Option<&[u8]>, key: Option<&[u8]>) -> Result<Self, UnusableCa> {
        let (Some(certificate), Some(key)) = (certificate, key) else { return Err(UnusableCa::Missing) };
        let mut certificates = Certificate::parse_all(certificate)?;
        let (Some(certificate), true) = (certificates.pop(), certificates.is_empty()) else {
            return Err(UnusableCa::Certificate);
        };
        let key = std::str::from_utf8(key).map_err(|_| UnusableCa::Key)?;
        let key = KeyPair::from_pem(key).map_err(|_| UnusableCa::Key)?;
        let x509 = parse(&certificate.der)?;
        if key.subject_public_key_info() != x509.public_key().raw {
            return Err(UnusableCa::Mismatch);
        }
        let is_ca = matches!(x509.basic_constraints(), Ok(Some(constraints)) if constraints.value.ca);
        let may_sign =
            x509.key_usage().is_ok_and(|usage| usage.is_none_or(|usage| usage.value.key_cert_sign()));
        if !is_ca || !may_sign {
            return Err(UnusableCa::NotCa);
        }
        // Otherwise a subject that rcgen cannot encode would only fail when a leaf is issued.
        Issuer::from_ca_cert_der(&certificate.der, &key).map_err(|_| UnusableCa::Certificate)?;
        Ok(Self { certificate, key })
    }

    pub fn key_pem(&self) -> String {
        self.key.serialize_pem()
    }

    /// Whether API servers accept the webhook's certificate from this CA now: issues one for these names and verifies
    /// it.
    pub fn check(&self, names: &SubjectNames, now: Timestamp) -> Result<(), UnusableCa> {
        self.certificate.check(now)?;
        // rustls takes a trusted CA for good for any use; Go, and so the API server, does not.
        if !self.certificate.for_servers {
            return Err(UnusableCa::NotForServers);
        }
        self.issue(names, TRIAL_VALIDITY, now)
            .ok()
            .and_then(|leaf| leaf.verify(now))
            .ok_or(UnusableCa::Rejected)
    }

    /// Issues a leaf for these names. It is valid from when its CA is, and expires with it at the latest.
    pub fn issue(&self, names: &SubjectNames, validity: Duration, now: Timestamp) -> Result<Leaf, Error> {
        let end = later(now, validity).min(self.certificate.not_after);
        let mut params = params(self.certificate.not_before, end)?;
        params.subject_alt_names =
            CertificateParams::new(names.iter().cloned().collect::<Vec<_>>())?.subject_alt_names;
        params.distinguished_name.push(DnType::CommonName, "lockstep");
        params.is_ca = IsCa::ExplicitNoCa;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        let key = KeyPair::generate()?;
        let issuer = Issuer::from_ca_cert_der(&self.certificate.der, &self.key)?;
        let certificate = Certificate::parse(params.signed_by(&key, &issuer)?.into())?;
        let renew_at = two_thirds(now, certificate.not_after);
        Ok(Leaf { certificate, issuer: self.certificate.clone(), names: names.clone(), renew_at, key })
    }
}

impl Leaf {
    /// Verifies it as a client does that trusts its issuer.
    fn verify(&self, now: Timestamp) -> Option<()> {
        let mut roots = RootCertStore::empty();
        roots.add(self.issuer.der.clone()).ok()?;
        let provider = Arc::new(default_provider());
        let verifier = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider).build().ok()?;
        let name = ServerName::try_from(self.names.first()?.as_str()).ok()?;
        let now = UnixTime::since_unix_epoch(Duration::from_secs(now.as_second().try_into().ok()?));
        verifier.verify_server_cert(&self.certificate.der, &[], &name, &[], now).ok()?;
        Some(())
    }

    pub fn key_pem(&self) -> String {
        self.key.serialize_pem()
    }

    pub fn key_der(&self) -> PrivateKeyDer<'static> {
        PrivatePkcs8KeyDer::from(self.key.serialize_der()).into()
    }
}

/// A DNS name or an IP address as a leaf has it; none if the host is neither.
pub fn subject_name(host: &str) -> Option<String> {
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    if let Ok(address) = bare.parse::<IpAddr>() {
        return Some(address.to_string());
    }
    let host = host.strip_suffix('.').unwrap_or(host).to_ascii_lowercase();
    is_subdomain(&host).then_some(host)
}

/// Sets the validity, which is 1975–4096 by default.
fn params(start: Timestamp, end: Timestamp) -> Result<CertificateParams, Error> {
    let time = |at: Timestamp| ASN1Time::from_timestamp(at.as_second()).map_err(|_| UnusableCa::Certificate);
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.not_before = time(start)?.to_datetime();
    params.not_after = time(end)?.to_datetime();
    Ok(params)
}

fn parse<'a>(der: &'a CertificateDer<'_>) -> Result<X509Certificate<'a>, UnusableCa> {
    match x509_parser::parse_x509_certificate(der) {
        Ok(([], x509)) => Ok(x509),
        _ => Err(UnusableCa::Certificate),
    }
}

impl fmt::Debug for Certificate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({} – {})", self.subject, self.not_before, self.not_after)
    }
}

impl fmt::Debug for Ca {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.certificate.fmt(f)
    }
}

#[cfg(test)]
mod tests;
