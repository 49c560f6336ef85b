//! A server under test, with TLS or without, and clients for it.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use axum::{
    Router,
    body::{Body, to_bytes},
};
use http::{Request, StatusCode, header};
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::{
    ClientConfig, RootCertStore, ServerConfig, crypto::ring::default_provider, pki_types::PrivateKeyDer,
};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinHandle,
    time::timeout,
};
use tokio_rustls::{TlsConnector, client::TlsStream};

use crate::{
    ops::{health::Readiness, metrics::Metrics},
    tls::{ConnectionLimits, Server, Tls},
};

/// The timeout of the webhook configurations in `deploy/`.
pub const API_SERVER_TIMEOUT: Duration = Duration::from_secs(3);

pub struct TestServer {
    pub address: SocketAddr,
    pub metrics: Metrics,
    pub readiness: Readiness,
    pub stop: watch::Sender<bool>,
    pub task: JoinHandle<()>,
    roots: RootCertStore,
}

impl TestServer {
    pub async fn start(router: Router, limits: ConnectionLimits) -> Self {
        let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
        let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap();
        let mut config = ServerConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![made.cert.der().clone()], key)
            .unwrap();
        config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
        let mut roots = RootCertStore::empty();
        roots.add(made.cert.der().clone()).unwrap();
        Self::serve(router, limits, Some(Arc::new(config)), roots).await
    }

    /// Without TLS.
    pub async fn plain(router: Router, limits: ConnectionLimits) -> Self {
        Self::serve(router, limits, None, RootCertStore::empty()).await
    }

    async fn serve(
        router: Router,
        limits: ConnectionLimits,
        config: Option<Arc<ServerConfig>>,
        roots: RootCertStore,
    ) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (metrics, readiness, (stop, stopping)) =
            (Metrics::new(), Readiness::new([]), watch::channel(false));
        let tls = config.map(|config| Tls { config: watch::channel(config).1, metrics: metrics.clone() });
        let server = Server { tls, router, readiness: readiness.clone(), limits };
        let task = tokio::spawn(server.serve(listener, stopping));
        Self { address, metrics, readiness, stop, task, roots }
    }

    pub async fn tcp(&self) -> TcpStream {
        let stream = TcpStream::connect(self.address).await.unwrap();
        // As an API server does it: otherwise a request may wait 40 ms for an acknowledgement.
        stream.set_nodelay(true).unwrap();
        stream
    }

    pub async fn tls(&self, protocol: &str) -> TlsStream<TcpStream> {
        let mut config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(self.roots.clone())
            .with_no_client_auth();
        config.alpn_protocols = vec![protocol.as_bytes().to_vec()];
        let name = "localhost".try_into().unwrap();
        TlsConnector::from(Arc::new(config)).connect(name, self.tcp().await).await.unwrap()
    }

    /// A client over HTTP/2, and the task of its connection.
    pub async fn http2(&self) -> (http2::SendRequest<Body>, JoinHandle<hyper::Result<()>>) {
        let io = TokioIo::new(self.tls("h2").await);
        let (client, connection) = http2::handshake(TokioExecutor::new(), io).await.unwrap();
        (client, tokio::spawn(connection))
    }

    /// A client over HTTP/1.1, and the task of its connection.
    pub async fn http1(&self) -> (http1::SendRequest<Body>, JoinHandle<hyper::Result<()>>) {
        let io = TokioIo::new(self.tls("http/1.1").await);
        let (client, connection) = http1::handshake(io).await.unwrap();
        (client, tokio::spawn(connection))
    }

    /// The answer to a request on a new connection, which must arrive before the API server would give up.
    pub async fn send(&self, request: Request<Body>) -> (StatusCode, String) {
        let answered = async {
            let (mut client, _connection) = self.http2().await;
            read(client.send_request(request).await.unwrap()).await
        };
        timeout(API_SERVER_TIMEOUT, answered).await.expect("an answer in time")
    }
}

pub async fn read(response: http::Response<hyper::body::Incoming>) -> (StatusCode, String) {
    let status = response.status();
    let body = to_bytes(Body::new(response.into_body()), usize::MAX).await.unwrap();
    (status, String::from_utf8(body.to_vec()).unwrap())
}

pub fn get(path: &str) -> Request<Body> {
    Request::get(format!("https://localhost{path}")).body(Body::empty()).unwrap()
}

pub fn post(path: &str, body: impl Into<Body>) -> Request<Body> {
    let request = Request::post(format!("https://localhost{path}"));
    request.header(header::CONTENT_TYPE, "application/json").body(body.into()).unwrap()
}
