//! The certificates of one control plane, signed by a CA that is kept in memory only.

use std::time::{Duration, SystemTime};

use rcgen::{
    BasicConstraints, CertificateParams, CertifiedIssuer, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose, SigningKey,
};
use yasna::models::ObjectIdentifier;

use crate::Error;

const HOUR: Duration = Duration::from_hours(1);
const YEAR: Duration = Duration::from_hours(365 * 24);

/// Signs the serving certificate and the client certificates.
pub(crate) struct Authority {
    issuer: CertifiedIssuer<'static, KeyPair>,
}

/// A certificate and its key, both PEM.
pub(crate) struct Credentials {
    pub(crate) certificate: String,
    pub(crate) key: String,
}

impl Authority {
    pub(crate) fn new() -> Result<Self, Error> {
        let mut params = valid_params(&[])?;
        params.distinguished_name.push(DnType::CommonName, "lockstep test control plane");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        Ok(Self { issuer: CertifiedIssuer::self_signed(params, KeyPair::generate()?)? })
    }

    /// The certificate to trust, PEM.
    pub(crate) fn certificate(&self) -> String {
        self.issuer.pem()
    }

    /// A certificate for a server with these DNS names and addresses.
    pub(crate) fn server(&self, names: &[&str]) -> Result<Credentials, Error> {
        let mut params = valid_params(names)?;
        params.distinguished_name.push(DnType::CommonName, "kube-apiserver");
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.issuer)?;
        Ok(Credentials { certificate: certificate.pem(), key: key.serialize_pem() })
    }

    /// A certificate for a client with this user name and these groups.
    pub(crate) fn client(&self, name: &str, groups: &[&str]) -> Result<Credentials, Error> {
        let mut params = valid_params(&[])?;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate()?;
        let certificate = params.signed_by(&key, &self.issuer)?;
        let certificate = with_subject(certificate.der(), &subject(name, groups), self.issuer.key())?;
        Ok(Credentials {
            certificate: pem::encode(&pem::Pem::new("CERTIFICATE", certificate)),
            key: key.serialize_pem(),
        })
    }
}

/// Valid from an hour ago, because clocks differ, and for a year; rcgen's default is 1975–4096.
fn valid_params(names: &[&str]) -> Result<CertificateParams, Error> {
    let names: Vec<String> = names.iter().map(ToString::to_string).collect();
    let mut params = CertificateParams::new(names)?;
    let now = SystemTime::now();
    params.not_before = (now - HOUR).into();
    params.not_after = (now + YEAR).into();
    Ok(params)
}

/// The subject of a client certificate, DER: a group is an organization, the user the common name.
fn subject(name: &str, groups: &[&str]) -> Vec<u8> {
    const ORGANIZATION: [u64; 4] = [2, 5, 4, 10];
    const COMMON_NAME: [u64; 4] = [2, 5, 4, 3];
    let attributes = groups.iter().map(|group| (ORGANIZATION, *group)).chain([(COMMON_NAME, name)]);
    yasna::construct_der(|writer| {
        writer.write_sequence(|writer| {
            for (kind, value) in attributes {
                writer.next().write_set(|writer| {
                    writer.next().write_sequence(|writer| {
                        writer.next().write_oid(&ObjectIdentifier::from_slice(&kind));
                        writer.next().write_utf8_string(value);
                    });
                });
            }
        });
    })
}

/// The same certificate with another subject, signed again.
///
/// rcgen keeps one value per attribute type, so it can express only a single group.
fn with_subject(certificate: &[u8], subject: &[u8], signer: &impl SigningKey) -> Result<Vec<u8>, Error> {
    /// After version, serial number, algorithm, issuer and validity.
    const SUBJECT: usize = 5;

    let (mut fields, algorithm) = yasna::parse_der(certificate, |reader| {
        reader.read_sequence(|reader| {
            let mut fields = Vec::new();
            reader.next().read_sequence_of(|field| {
                fields.push(field.read_der()?);
                Ok(())
            })?;
            let algorithm = reader.next().read_der()?;
            reader.next().read_der()?;
            Ok((fields, algorithm))
        })
    })
    .map_err(|_| rcgen::Error::CouldNotParseCertificate)?;
    let field = fields.get_mut(SUBJECT).ok_or(rcgen::Error::CouldNotParseCertificate)?;
    *field = subject.to_vec();

    let content = yasna::construct_der(|writer| {
        writer.write_sequence(|writer| fields.iter().for_each(|field| writer.next().write_der(field)));
    });
    let signature = signer.sign(&content)?;
    Ok(yasna::construct_der(|writer| {
        writer.write_sequence(|writer| {
            writer.next().write_der(&content);
            writer.next().write_der(&algorithm);
            writer.next().write_bitvec_bytes(&signature, signature.len() * 8);
        });
    }))
}
