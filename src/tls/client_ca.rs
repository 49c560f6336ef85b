//! Client certificates, verified against the CA of `--client-ca`. The file is read again when it changes.

use std::{
    fmt,
    path::{Path, PathBuf},
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use rustls::{
    DigitallySignedStruct, DistinguishedName, Error as TlsError, RootCertStore, SignatureScheme,
    client::danger::HandshakeSignatureValid,
    crypto::ring,
    pki_types::{CertificateDer, UnixTime, pem::PemObject},
    server::{
        WebPkiClientVerifier,
        danger::{ClientCertVerified, ClientCertVerifier},
    },
};

/// By content, not by modification time: Kubernetes swaps a symlink above the file.
const POLL_INTERVAL: Duration = Duration::from_secs(5);

#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{} cannot be used: {why}; --client-ca must be a PEM file with CA certificates", path.display())]
pub struct UnusableClientCa {
    path: PathBuf,
    why: String,
}

/// Verifies the certificates that clients present. A client may present none: the kubelet has none for its probes.
pub struct ClientCa {
    path: PathBuf,
    current: RwLock<Loaded>,
}

struct Loaded {
    content: Vec<u8>,
    verifier: Arc<dyn ClientCertVerifier>,
}

impl ClientCa {
    pub fn load(path: &Path) -> Result<Arc<Self>, UnusableClientCa> {
        let current = RwLock::new(load(path)?);
        Ok(Arc::new(Self { path: path.to_owned(), current }))
    }

    /// Reads the file again and again. Never returns.
    pub async fn keep_loaded(&self) {
        let mut logged = None;
        loop {
            tokio::time::sleep(POLL_INTERVAL).await;
            let problem = self.reload().err();
            if let Some(problem) = problem.as_ref().filter(|problem| logged.as_ref() != Some(*problem)) {
                tracing::warn!("{problem}; the former CA stays in use");
            }
            logged = problem;
        }
    }

    fn reload(&self) -> Result<(), UnusableClientCa> {
        let loaded = load(&self.path)?;
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        if current.content != loaded.content {
            *current = loaded;
            tracing::info!(file = %self.path.display(), "the CA of client certificates was read again");
        }
        Ok(())
    }

    fn verifier(&self) -> Arc<dyn ClientCertVerifier> {
        self.current.read().unwrap_or_else(PoisonError::into_inner).verifier.clone()
    }
}

fn load(path: &Path) -> Result<Loaded, UnusableClientCa> {
    let unusable = |why: String| UnusableClientCa { path: path.to_owned(), why };
    let content = std::fs::read(path).map_err(|error| unusable(error.to_string()))?;
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(&content) {
        let certificate = certificate.map_err(|_| unusable("its PEM cannot be read".to_owned()))?;
        roots.add(certificate).map_err(|error| unusable(error.to_string()))?;
    }
    let verifier =
        WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::new(ring::default_provider()));
    let verifier = verifier
        .allow_unauthenticated()
        .build()
        .map_err(|_| unusable("there is no certificate in it".to_owned()))?;
    Ok(Loaded { content, verifier })
}

impl ClientCertVerifier for ClientCa {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    /// Without hints, a client presents whatever certificate it has.
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, TlsError> {
        self.verifier().verify_client_cert(end_entity, intermediates, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        self.verifier().verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, TlsError> {
        self.verifier().verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.verifier().supported_verify_schemes()
    }
}

/// rustls requires `Debug`.
impl fmt::Debug for ClientCa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ClientCa").field("path", &self.path).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use rcgen::{
        BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    };

    use super::*;
    use crate::testing::TempDir;

    struct TestCa(CertifiedIssuer<'static, KeyPair>);

    impl TestCa {
        fn new() -> Self {
            let mut params = CertificateParams::new(Vec::new()).unwrap();
            params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
            Self(CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap())
        }

        fn issue(&self, purpose: ExtendedKeyUsagePurpose) -> CertificateDer<'static> {
            let mut params = CertificateParams::new(Vec::new()).unwrap();
            params.extended_key_usages = vec![purpose];
            params.signed_by(&KeyPair::generate().unwrap(), &self.0).unwrap().der().clone()
        }
    }

    #[test]
    fn client_certificates_of_the_current_ca_are_accepted_and_no_others() {
        let dir = TempDir::new();
        let file = dir.path().join("ca.crt");
        let (first, second) = (TestCa::new(), TestCa::new());
        std::fs::write(&file, first.0.pem()).unwrap();
        let ca = ClientCa::load(&file).unwrap();
        let accepts =
            |of: &TestCa, purpose| ca.verify_client_cert(&of.issue(purpose), &[], UnixTime::now()).is_ok();
        let client = || ExtendedKeyUsagePurpose::ClientAuth;
        assert!(accepts(&first, client()) && !accepts(&second, client()));
        assert!(!accepts(&first, ExtendedKeyUsagePurpose::ServerAuth));
        // An unusable file changes nothing.
        for content in ["", "nonsense", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"] {
            std::fs::write(&file, content).unwrap();
            assert!(ca.reload().is_err(), "{content}");
            assert!(accepts(&first, client()));
        }
        std::fs::write(&file, first.0.pem() + &second.0.pem()).unwrap();
        ca.reload().unwrap();
        assert!(accepts(&first, client()) && accepts(&second, client()));
        std::fs::write(&file, second.0.pem()).unwrap();
        ca.reload().unwrap();
        assert!(!accepts(&first, client()) && accepts(&second, client()));
    }

    #[test]
    fn missing_file_is_one_clear_line() {
        let error = ClientCa::load(Path::new("/no/such/ca.crt")).unwrap_err().to_string();
        assert!(error.starts_with("/no/such/ca.crt cannot be used: No such file"), "{error}");
        assert!(error.contains("--client-ca") && !error.contains('\n'), "{error}");
    }
}
