//! The certificate that TLS serves, replaced without a restart.

use std::{fmt, sync::Arc};

use parking_lot::RwLock;
use rustls::{
    crypto::ring::default_provider,
    pki_types::{CertificateDer, PrivateKeyDer},
    server::{ClientHello, ResolvesServerCert},
    sign::CertifiedKey,
};

/// Answers every handshake with the latest certificate; without one the handshake fails.
#[derive(Default)]
pub struct Resolver(RwLock<Option<Arc<CertifiedKey>>>);

impl Resolver {
    pub fn serve(&self, pair: CertifiedKey) {
        *self.0.write() = Some(Arc::new(pair));
    }

    /// The chain that is being served.
    pub fn chain(&self) -> Option<Vec<CertificateDer<'static>>> {
        self.0.read().as_ref().map(|pair| pair.cert.clone())
    }
}

impl ResolvesServerCert for Resolver {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.0.read().clone()
    }
}

/// rustls requires `Debug`; the key must not show.
impl fmt::Debug for Resolver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Resolver").finish_non_exhaustive()
    }
}

/// A pair to serve. Fails if the key does not belong to the certificate.
pub(crate) fn certified_key(
    chain: Vec<CertificateDer<'static>>,
    key: PrivateKeyDer<'static>,
) -> Result<CertifiedKey, rustls::Error> {
    CertifiedKey::from_der(chain, key, &default_provider())
}

#[cfg(test)]
mod tests;
