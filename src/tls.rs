//! An HTTP server, with TLS or without, that no peer can block: handshakes do not hold up the accept loop,
//! everything has a timeout, and `limiter` bounds the connections.

use std::{
    net::{IpAddr, Ipv4Addr},
    sync::Arc,
    time::Duration,
};

use axum::Router;
use http::{HeaderValue, header::CONNECTION};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::conn::auto::Builder,
    service::TowerToHyperService,
};
use rustls::ServerConfig;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinSet,
    time::timeout,
};
use tokio_rustls::TlsAcceptor;
use tower::ServiceExt;

use crate::ops::{
    health::{Condition, Readiness},
    metrics::Metrics,
};
use limiter::{ConnectionLimiter, PeerConnection, TrackedBody};

pub mod client_ca;
mod limiter;

#[derive(Clone)]
pub struct ConnectionLimits {
    /// An API server needs one or two.
    pub max_connections: usize,
    /// Connections beyond `max_connections` that are being closed gracefully.
    pub max_closing: usize,
    pub handshake_timeout: Duration,
    /// For the headers of a request, and over HTTP/1.1 also for the time between two requests. It is longer
    /// than the 90 s after which an API server closes an idle connection: if we closed it, that could cross a
    /// review, which is not sent again.
    pub header_timeout: Duration,
    /// For a new connection, from accept until the headers of its first request are complete.
    pub first_request_timeout: Duration,
    pub idle_timeout: Duration,
    /// How often `first_request_timeout` and `idle_timeout` are enforced.
    pub sweep_interval: Duration,
    /// For the requests in progress when a connection is closed gracefully, and at shutdown.
    pub close_timeout: Duration,
}

impl Default for ConnectionLimits {
    fn default() -> Self {
        Self {
            max_connections: 256,
            max_closing: 64,
            handshake_timeout: Duration::from_secs(5),
            header_timeout: Duration::from_secs(120),
            first_request_timeout: Duration::from_secs(10),
            idle_timeout: Duration::from_secs(300),
            sweep_interval: Duration::from_secs(2),
            close_timeout: Duration::from_secs(5),
        }
    }
}

/// The peer of a connection, as an extension of each of its requests.
#[derive(Clone, Copy)]
pub struct Peer {
    pub address: IpAddr,
    /// It has presented a certificate of the CA of `--client-ca`.
    pub verified: bool,
}

impl Default for Peer {
    fn default() -> Self {
        Self { address: Ipv4Addr::UNSPECIFIED.into(), verified: false }
    }
}

pub struct Server {
    /// None: plain HTTP/1.1.
    pub tls: Option<Tls>,
    pub router: Router,
    /// Shows whether the process is about to stop.
    pub readiness: Readiness,
    pub limits: ConnectionLimits,
}

/// TLS of the webhook, and the metrics of its connections.
pub struct Tls {
    /// For new connections.
    pub config: watch::Receiver<Arc<ServerConfig>>,
    pub metrics: Metrics,
}

impl Server {
    /// Serves until `stop` turns true, then finishes the requests in progress.
    pub async fn serve(self, listener: TcpListener, mut stop: watch::Receiver<bool>) {
        let server = Arc::new(self);
        let mut limiter = ConnectionLimiter::new(server.limits.clone());
        let mut tasks = JoinSet::new();
        let mut sweep = tokio::time::interval(server.limits.sweep_interval);
        loop {
            if let Some(tls) = &server.tls {
                tls.metrics.connections.set(i64::try_from(limiter.len()).unwrap_or(i64::MAX));
            }
            tokio::select! {
                biased;
                // `wait_for` returns a lock guard, which is not Send: held over the sleep below, it would
                // keep this future from being spawned.
                () = async { let _ = stop.wait_for(|stop| *stop).await; } => break,
                _ = sweep.tick() => limiter.close_expired(),
                Some(ended) = tasks.join_next_with_id() => {
                    limiter.remove(ended.map_or_else(|error| error.id(), |(id, ())| id));
                }
                accepted = listener.accept() => match accepted {
                    Ok((stream, peer)) => {
                        let peer = peer.ip().to_canonical();
                        if limiter.admit(peer) {
                            let connection = Arc::new(PeerConnection::new(peer));
                            let serve = server.clone().serve_connection(stream, connection.clone());
                            limiter.add(connection, tasks.spawn(serve));
                        }
                    }
                    // There is no free file descriptor, or the peer has disconnected already.
                    Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
                },
            }
        }
        drop(listener);
        limiter.close_all_gracefully();
        let all = async { while tasks.join_next().await.is_some() {} };
        if timeout(server.limits.close_timeout, all).await.is_err() {
            tasks.shutdown().await;
        }
    }

    async fn serve_connection(self: Arc<Self>, stream: TcpStream, connection: Arc<PeerConnection>) {
        let _ = stream.set_nodelay(true);
        let mut peer = Peer { address: connection.peer(), verified: false };
        let Some(tls) = &self.tls else { return self.serve_http(stream, false, peer, connection).await };
        let config = tls.config.borrow().clone();
        let handshake = TlsAcceptor::from(config).accept(stream);
        let stream = timeout(self.limits.handshake_timeout, handshake).await.ok().and_then(Result::ok);
        tls.metrics.handshake(stream.is_some());
        let Some(stream) = stream else { return };
        let session = stream.get_ref().1;
        let http2 = session.alpn_protocol() == Some(b"h2");
        // The handshake fails if a certificate is presented that cannot be verified.
        peer.verified = session.peer_certificates().is_some();
        self.serve_http(stream, http2, peer, connection).await;
    }

    async fn serve_http<S>(&self, stream: S, http2: bool, peer: Peer, connection: Arc<PeerConnection>)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let mut builder = Builder::new(TokioExecutor::new());
        builder
            .http1()
            .timer(TokioTimer::new())
            .header_read_timeout(self.limits.header_timeout)
            .max_buf_size(64 << 10);
        builder
            .http2()
            .timer(TokioTimer::new())
            .keep_alive_interval(Duration::from_secs(30))
            .keep_alive_timeout(Duration::from_secs(10))
            .max_concurrent_streams(64)
            .max_header_list_size(16 << 10);
        // Detecting the protocol from the first bytes would wait for them without a timeout.
        let builder = if http2 { builder.http2_only() } else { builder.http1_only() };

        let router = self.router.clone();
        let readiness = self.readiness.clone();
        let tracked = connection.clone();
        let service = tower::service_fn(move |request: http::Request<_>| {
            let (in_progress, body_in_progress) = tracked.begin_request();
            let mut request =
                request.map(|body| axum::body::Body::new(TrackedBody::new(body, body_in_progress)));
            request.extensions_mut().insert(peer);
            let answer = router.clone().oneshot(request);
            let readiness = readiness.clone();
            async move {
                let mut answer = answer.await;
                // Before we stop, every answer over HTTP/1.1 is the last on its connection, so that the API
                // server connects to another replica. If we closed the connection while it is idle, that
                // could cross a request, which would fail: it is not sent again.
                if let Ok(answer) = &mut answer
                    && !http2
                    && readiness.is_false(Condition::NotStopping)
                {
                    answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
                }
                drop(in_progress);
                answer
            }
        });
        let mut served = std::pin::pin!(
            builder.serve_connection(TokioIo::new(stream), TowerToHyperService::new(service)).into_owned()
        );
        tokio::select! {
            _ = served.as_mut() => return,
            () = connection.close_requested() => {}
        }
        served.as_mut().graceful_shutdown();
        let _ = timeout(self.limits.close_timeout, served).await;
    }
}

#[cfg(test)]
mod tests;
