//! A listener, with TLS or without, that no peer can hold up: handshakes run beside the accept loop, everything has a
//! limit, and when there are too many connections the one that has been idle longest makes room.

use std::{sync::Arc, time::Duration};

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
use crowd::{Crowd, Heard, Member};

mod crowd;

/// How much a peer may take.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Connections at a time. An API server needs one or two.
    pub connections: usize,
    /// Connections more that have been told to go and are not gone.
    pub leaving: usize,
    pub handshake: Duration,
    /// A request's headers must be complete within this time; over HTTP/1.1, the next request must have begun, too. So
    /// it is longer than the 90 s after which an API server closes an idle connection itself: closed by us, that could
    /// cross a review, which is not sent again.
    pub headers: Duration,
    /// A connection that has never made a request is closed after this time, one that has after the other.
    pub unused: Duration,
    pub idle: Duration,
    pub sweep: Duration,
    /// How long answers under way may take after a stop.
    pub finish: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            connections: 256,
            leaving: 64,
            handshake: Duration::from_secs(5),
            headers: Duration::from_secs(120),
            unused: Duration::from_secs(10),
            idle: Duration::from_secs(300),
            sweep: Duration::from_secs(2),
            finish: Duration::from_secs(5),
        }
    }
}

/// What every connection needs.
pub struct Server {
    /// Without it, plain HTTP/1.1 is spoken.
    pub tls: Option<Tls>,
    pub router: Router,
    /// Tells when we are about to go.
    pub readiness: Readiness,
    pub limits: Limits,
}

/// The guard's side of TLS, and where its connections are counted.
pub struct Tls {
    pub config: Arc<ServerConfig>,
    pub metrics: Metrics,
}

impl Server {
    /// Serves until `stop` turns true, then finishes what is under way.
    pub async fn serve(self, listener: TcpListener, mut stop: watch::Receiver<bool>) {
        let server = Arc::new(self);
        let crowd = Arc::new(Crowd::new(server.limits.clone()));
        let mut tasks = JoinSet::new();
        let mut sweep = tokio::time::interval(server.limits.sweep);
        loop {
            if let Some(tls) = &server.tls {
                tls.metrics.connections.set(i64::try_from(tasks.len()).unwrap_or(i64::MAX));
            }
            tokio::select! {
                biased;
                // Its answer is a lock: held over the sleep below, it would keep this from being spawned.
                () = async { drop(stop.wait_for(|stop| *stop).await) } => break,
                _ = sweep.tick() => crowd.sweep(),
                Some(_) = tasks.join_next() => {}
                accepted = listener.accept() => match accepted {
                    Ok((stream, peer)) => {
                        let Some(guest) = crowd.admit(peer.ip().to_canonical()) else { continue };
                        let server = server.clone();
                        tasks.spawn(async move {
                            tokio::select! {
                                () = guest.member.cut() => {}
                                () = server.connection(stream, &guest.member) => {}
                            }
                        });
                    }
                    // No file descriptor is free, or the peer is gone already.
                    Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
                },
            }
        }
        drop(listener);
        crowd.dismiss();
        let all = async { while tasks.join_next().await.is_some() {} };
        if timeout(server.limits.finish, all).await.is_err() {
            tasks.shutdown().await;
        }
    }

    async fn connection(&self, stream: TcpStream, member: &Arc<Member>) {
        drop(stream.set_nodelay(true));
        let Some(tls) = &self.tls else { return self.talk(stream, false, member).await };
        let handshake = timeout(self.limits.handshake, TlsAcceptor::from(tls.config.clone()).accept(stream));
        let shaken = tokio::select! {
            () = member.dismissed() => return,
            outcome = handshake => outcome.ok().and_then(Result::ok),
        };
        tls.metrics.handshake(shaken.is_some());
        let Some(stream) = shaken else { return };
        let http2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
        self.talk(stream, http2, member).await;
    }

    async fn talk<S>(&self, stream: S, http2: bool, member: &Arc<Member>)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let mut builder = Builder::new(TokioExecutor::new());
        builder
            .http1()
            .timer(TokioTimer::new())
            .header_read_timeout(self.limits.headers)
            .max_buf_size(64 << 10);
        builder
            .http2()
            .timer(TokioTimer::new())
            .keep_alive_interval(Duration::from_secs(30))
            .keep_alive_timeout(Duration::from_secs(10))
            .max_concurrent_streams(64)
            .max_header_list_size(16 << 10);
        // Guessing the protocol from the first bytes would wait for them without a limit.
        let builder = if http2 { builder.http2_only() } else { builder.http1_only() };

        let (router, requests, readiness) = (self.router.clone(), member.clone(), self.readiness.clone());
        let service = tower::service_fn(move |request: http::Request<_>| {
            let task = requests.begin();
            let request = request.map(|body| axum::body::Body::new(Heard::new(body, task.listening())));
            let (answer, readiness) = (router.clone().oneshot(request), readiness.clone());
            async move {
                let mut answer = answer.await;
                // Once we go, every answer over HTTP/1.1 is the last on its connection, so that the API server looks
                // for another replica. Closed while idle, a connection could cross a request, which would fail: it is
                // not sent again.
                if let Ok(answer) = &mut answer
                    && !http2
                    && readiness.is_false(Condition::NotStopping)
                {
                    answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
                }
                drop(task);
                answer
            }
        });
        let mut served = std::pin::pin!(
            builder.serve_connection(TokioIo::new(stream), TowerToHyperService::new(service)).into_owned()
        );
        tokio::select! {
            _ = served.as_mut() => return,
            () = member.dismissed() => {}
        }
        // Who never asked for anything is waiting for no answer.
        if member.has_asked() {
            served.as_mut().graceful_shutdown();
            drop(timeout(self.limits.finish, served).await);
        }
    }
}

#[cfg(test)]
mod tests;
