//! A peer that posts to the webhook's port without being the API server.

use std::{
    net::{Ipv4Addr, SocketAddr},
    sync::Arc,
};

use k8s_openapi::ByteString;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpSocket, TcpStream},
};
use tokio_rustls::{
    TlsConnector,
    client::TlsStream,
    rustls::{
        ClientConfig, RootCertStore,
        pki_types::{CertificateDer, PrivateKeyDer, ServerName, pem::PemObject},
    },
};

use crate::harness::Cluster;

pub(crate) struct Peer {
    address: String,
    config: Arc<ClientConfig>,
    /// Whom the server's certificate must be for; none for the host of the address.
    server: Option<String>,
    /// Its own address; none for that of the API server.
    from: Option<Ipv4Addr>,
}

impl Cluster {
    /// A peer that trusts the webhook as the API server does: by the `caBundle` of the webhook configuration.
    pub(crate) async fn peer(&self) -> Peer {
        self.peer_with(None).await
    }

    /// As [`Self::peer`], with a client certificate and its key, both PEM.
    pub(crate) async fn peer_with(&self, identity: Option<(&str, &str)>) -> Peer {
        let path = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations";
        let path = format!("{path}/lockstep.{}", self.domain());
        let configuration = self.get(&path).await.expect("the webhook configuration");
        let bundle = configuration["webhooks"][0]["clientConfig"]["caBundle"].clone();
        let bundle: ByteString = serde_json::from_value(bundle).expect("a caBundle");
        Peer::trusting(&bundle.0, &self.address, identity)
    }
}

impl Peer {
    /// A peer that trusts these certificates, which are PEM, of a server at this address. It may have a client
    /// certificate and its key.
    pub(crate) fn trusting(bundle: &[u8], address: &str, identity: Option<(&str, &str)>) -> Self {
        let mut roots = RootCertStore::empty();
        for root in CertificateDer::pem_slice_iter(bundle) {
            roots.add(root.expect("a certificate")).expect("a certificate");
        }
        let config = ClientConfig::builder().with_root_certificates(roots);
        let config = match identity {
            None => config.with_no_client_auth(),
            Some((certificate, key)) => {
                let certificate =
                    CertificateDer::from_pem_slice(certificate.as_bytes()).expect("a certificate");
                let key = PrivateKeyDer::from_pem_slice(key.as_bytes()).expect("a key");
                config.with_client_auth_cert(vec![certificate], key).expect("a client certificate")
            }
        };
        Self { address: address.to_owned(), config: Arc::new(config), server: None, from: None }
    }

    /// Expects a certificate for this name, as the API server does of a Service.
    pub(crate) fn expecting(self, server: &str) -> Self {
        Self { server: Some(server.to_owned()), ..self }
    }

    /// As another host, which has this address.
    pub(crate) fn at(self, address: Ipv4Addr) -> Self {
        Self { from: Some(address), ..self }
    }

    /// Connects without TLS.
    pub(crate) async fn connect_plain(&self) -> std::io::Result<TcpStream> {
        match self.from {
            None => TcpStream::connect(&self.address).await,
            Some(from) => {
                let socket = TcpSocket::new_v4()?;
                socket.bind(SocketAddr::from((from, 0)))?;
                socket.connect(self.address.parse().expect("an address")).await
            }
        }
    }

    pub(crate) async fn connect(&self) -> std::io::Result<TlsStream<TcpStream>> {
        let host = || self.address.rsplit_once(':').expect("a port").0.to_owned();
        let name = ServerName::try_from(self.server.clone().unwrap_or_else(host)).expect("a host");
        let stream = self.connect_plain().await?;
        stream.set_nodelay(true)?;
        TlsConnector::from(self.config.clone()).connect(name, stream).await
    }

    /// Sends one request on a new connection; the status and the body of the answer.
    pub(crate) async fn request(
        &self,
        method: &str,
        path: &str,
        body: &str,
    ) -> std::io::Result<(u16, String)> {
        let mut stream = self.connect().await?;
        let head = format!(
            "{method} {path} HTTP/1.1\r\nhost: webhook\r\ncontent-type: application/json\r\n\
             content-length: {}\r\nconnection: close\r\n\r\n",
            body.len()
        );
        // The webhook may answer and close before it has read everything.
        drop(stream.write_all((head + body).as_bytes()).await);
        let mut answer = Vec::new();
        let read = stream.read_to_end(&mut answer).await;
        let answer = String::from_utf8_lossy(&answer).into_owned();
        let status = answer.split(' ').nth(1).and_then(|code| code.parse().ok());
        match (status, read) {
            (Some(status), _) => {
                Ok((status, answer.split_once("\r\n\r\n").map_or("", |(_, body)| body).to_owned()))
            }
            (None, Err(error)) => Err(error),
            (None, Ok(_)) => Err(std::io::ErrorKind::UnexpectedEof.into()),
        }
    }

    /// Sends a review whose second half follows later, and waits for the answer.
    pub(crate) async fn slow_review(&self, body: &str, pause: std::time::Duration) {
        let mut stream = self.connect().await.expect("a connection");
        let (first, second) = body.split_at(body.len() / 2);
        let head = format!(
            "POST /validate HTTP/1.1\r\nhost: webhook\r\ncontent-type: application/json\r\n\
             content-length: {}\r\nconnection: close\r\n\r\n",
            body.len()
        );
        stream.write_all((head + first).as_bytes()).await.expect("it is sent");
        stream.flush().await.expect("it is sent");
        tokio::time::sleep(pause).await;
        stream.write_all(second.as_bytes()).await.expect("it is sent");
        drop(stream.read_to_end(&mut Vec::new()).await);
    }

    pub(crate) async fn review(&self, review: &str) -> std::io::Result<(u16, String)> {
        self.request("POST", "/validate", review).await
    }
}

/// A review of this operation, as any peer can write it.
pub(crate) fn review_of(operation: &str, namespace: &str, user: &str, old: &Value, new: &Value) -> Value {
    json!({
        "kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1",
        "request": {
            "uid": "u-i-d",
            "resource": {"group": "", "version": "v1", "resource": "configmaps"},
            "namespace": namespace, "operation": operation, "userInfo": {"username": user},
            "object": new, "oldObject": old,
        },
    })
}
