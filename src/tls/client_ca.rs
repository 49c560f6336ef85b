//! The TLS configuration of the webhook. Client certificates are verified against the CA of `--client-ca`; when that
//! file changes, new connections get another configuration.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use rustls::{
    RootCertStore, ServerConfig,
    crypto::ring::default_provider,
    pki_types::{CertificateDer, pem::PemObject},
    server::{NoServerSessionStorage, ResolvesServerCert, WebPkiClientVerifier, danger::ClientCertVerifier},
};
use tokio::{sync::watch, task::JoinSet};

use lockstep_core::failure::backoff::LogOnce;

/// By content, not by modification time: Kubernetes swaps a symlink above the file.
const POLL_INTERVAL: Duration = Duration::from_secs(5);

#[derive(Debug, thiserror::Error)]
#[error("{} cannot be used: {why}; --client-ca must be a PEM file with CA certificates", path.display())]
pub struct UnusableClientCa {
    path: PathBuf,
    why: String,
}

/// The CA whose certificates clients may present. A client may present none: the kubelet has none for its probes.
pub struct ClientCa {
    path: PathBuf,
    content: Vec<u8>,
    verifier: Arc<dyn ClientCertVerifier>,
}

impl ClientCa {
    pub fn load(path: &Path) -> Result<Self, UnusableClientCa> {
        let unusable = |why: String| UnusableClientCa { path: path.to_owned(), why };
        let content = std::fs::read(path).map_err(|error| unusable(error.to_string()))?;
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(&content) {
            let certificate = certificate.map_err(|_| unusable("its PEM cannot be read".to_owned()))?;
            roots.add(certificate).map_err(|error| unusable(error.to_string()))?;
        }
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::new(default_provider()))
                .allow_unauthenticated()
                // Without hints, a client presents whatever certificate it has.
                .clear_root_hint_subjects()
                .build()
                .map_err(|_| unusable("there is no certificate in it".to_owned()))?;
        Ok(Self { path: path.to_owned(), content, verifier })
    }

    /// Waits until the file has another content that can be used.
    async fn changed(&mut self) {
        let mut log_once = LogOnce::default();
        loop {
            tokio::time::sleep(POLL_INTERVAL).await;
            match Self::load(&self.path) {
                Ok(loaded) if loaded.content == self.content => log_once.resolved(),
                Ok(loaded) => {
                    *self = loaded;
                    tracing::info!(file = %self.path.display(), "the CA of client certificates was read again");
                    return;
                }
                Err(problem) if log_once.is_new(&problem.to_string()) => {
                    tracing::warn!("{problem}; the former CA stays in use");
                }
                Err(_) => {}
            }
        }
    }
}

/// The configuration for new connections. It changes with the CA of clients, if there is one.
pub fn server_configs(
    tasks: &mut JoinSet<()>,
    resolver: Arc<dyn ResolvesServerCert>,
    clients: Option<ClientCa>,
) -> Result<watch::Receiver<Arc<ServerConfig>>, rustls::Error> {
    let first = server_config(resolver.clone(), clients.as_ref())?;
    let (sender, configs) = watch::channel(first);
    if let Some(mut clients) = clients {
        tasks.spawn(async move {
            loop {
                clients.changed().await;
                // Nothing that it could fail for has changed.
                if let Ok(config) = server_config(resolver.clone(), Some(&clients)) {
                    sender.send_replace(config);
                }
            }
        });
    }
    Ok(configs)
}

/// TLS 1.2 and 1.3, HTTP/2 and HTTP/1.1.
pub fn server_config(
    resolver: Arc<dyn ResolvesServerCert>,
    clients: Option<&ClientCa>,
) -> Result<Arc<ServerConfig>, rustls::Error> {
    // Not the process default, which would have to be installed before the first use.
    let builder = ServerConfig::builder_with_provider(Arc::new(default_provider()))
        .with_safe_default_protocol_versions()?;
    let mut config = match clients {
        None => builder.with_no_client_auth().with_cert_resolver(resolver),
        Some(ClientCa { verifier, .. }) => {
            let mut config = builder.with_client_cert_verifier(verifier.clone()).with_cert_resolver(resolver);
            // A resumed session would be trusted after its certificate has expired.
            config.session_storage = Arc::new(NoServerSessionStorage {});
            config.send_tls13_tickets = 0;
            config
        }
    };
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

#[cfg(test)]
mod tests {
    use rcgen::{
        BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    };
    use rustls::pki_types::UnixTime;

    use super::*;
    use lockstep_core::testing::TempDir;

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

    #[tokio::test(start_paused = true)]
    async fn client_certificates_of_the_current_ca_are_accepted_and_no_others() {
        let dir = TempDir::new();
        let file = dir.path().join("ca.crt");
        let (first, second) = (TestCa::new(), TestCa::new());
        std::fs::write(&file, first.0.pem()).unwrap();
        let mut ca = ClientCa::load(&file).unwrap();
        let accepts = |ca: &ClientCa, of: &TestCa, purpose| {
            ca.verifier.verify_client_cert(&of.issue(purpose), &[], UnixTime::now()).is_ok()
        };
        let client = || ExtendedKeyUsagePurpose::ClientAuth;
        assert!(accepts(&ca, &first, client()) && !accepts(&ca, &second, client()));
        assert!(!accepts(&ca, &first, ExtendedKeyUsagePurpose::ServerAuth));
        assert!(ca.verifier.root_hint_subjects().is_empty() && !ca.verifier.client_auth_mandatory());
        // An unusable file changes nothing.
        for content in ["", "nonsense", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"] {
            std::fs::write(&file, content).unwrap();
            assert!(tokio::time::timeout(3 * POLL_INTERVAL, ca.changed()).await.is_err(), "{content}");
            assert!(accepts(&ca, &first, client()));
        }
        std::fs::write(&file, first.0.pem() + &second.0.pem()).unwrap();
        ca.changed().await;
        assert!(accepts(&ca, &first, client()) && accepts(&ca, &second, client()));
        std::fs::write(&file, second.0.pem()).unwrap();
        ca.changed().await;
        assert!(!accepts(&ca, &first, client()) && accepts(&ca, &second, client()));
    }

    #[test]
    fn missing_file_is_one_clear_line() {
        let error = ClientCa::load(Path::new("/no/such/ca.crt")).err().unwrap().to_string();
        assert!(error.starts_with("/no/such/ca.crt cannot be used: No such file"), "{error}");
        assert!(error.contains("--client-ca") && !error.contains('\n'), "{error}");
    }
}
