//! The certificate that TLS serves, replaced without a restart.

use std::{
    fmt,
    sync::{Arc, PoisonError, RwLock},
};

use rustls::{
    ServerConfig,
    crypto::{CryptoProvider, ring},
    pki_types::{CertificateDer, PrivateKeyDer},
    server::{ClientHello, NoServerSessionStorage, ResolvesServerCert, danger::ClientCertVerifier},
    sign::CertifiedKey,
};

use super::Error;

/// Answers every handshake with the latest certificate; without one the handshake fails.
#[derive(Default)]
pub struct Resolver(RwLock<Option<Arc<CertifiedKey>>>);

impl Resolver {
    /// Serves this chain and key from now on. Fails if the key does not belong to the certificate.
    pub fn serve(
        &self,
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
    ) -> Result<(), Error> {
        let pair = CertifiedKey::from_der(chain, key, &provider())?;
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(pair));
        Ok(())
    }

    /// The chain that is being served.
    #[must_use]
    pub fn chain(&self) -> Option<Vec<CertificateDer<'static>>> {
        self.get().map(|pair| pair.cert.clone())
    }

    fn get(&self) -> Option<Arc<CertifiedKey>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl ResolvesServerCert for Resolver {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.get()
    }
}

/// rustls requires `Debug`; the key must not show.
impl fmt::Debug for Resolver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Resolver").finish_non_exhaustive()
    }
}

/// TLS 1.2 and 1.3, HTTP/2 and HTTP/1.1. Clients may present a certificate if there is a verifier for it.
pub fn server_config(
    resolver: Arc<Resolver>,
    clients: Option<Arc<dyn ClientCertVerifier>>,
) -> Result<Arc<ServerConfig>, Error> {
    let builder = ServerConfig::builder_with_provider(Arc::new(provider()))
        .with_protocol_versions(&[&rustls::version::TLS13, &rustls::version::TLS12])?;
    let mut config = match clients {
        None => builder.with_no_client_auth().with_cert_resolver(resolver),
        Some(verifier) => {
            let mut config = builder.with_client_cert_verifier(verifier).with_cert_resolver(resolver);
            // A resumed session would be trusted after its CA was removed.
            config.session_storage = Arc::new(NoServerSessionStorage {});
            config.send_tls13_tickets = 0;
            config
        }
    };
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}

/// Not the process default, which would have to be installed before the first use.
fn provider() -> CryptoProvider {
    ring::default_provider()
}
