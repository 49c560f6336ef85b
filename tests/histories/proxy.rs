//! An HTTP proxy between one replica and the API server. It sees every request, and it can be a bad network, or an API
//! server with trouble of its own.

use std::{
    convert::Infallible,
    io,
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use axum::body::{Body, to_bytes};
use http::{HeaderName, HeaderValue, Method, Request, Response, StatusCode, header};
use hyper::body::Incoming;
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
};
use serde_json::json;
use tokio::{
    net::{TcpListener, TcpStream},
    sync::{mpsc, watch},
    time::Instant,
};

use crate::{etcd::next_frame, traffic::Traffic};

/// The largest body of a request or of an answer to a write.
const MAX_BODY_BYTES: usize = 16 << 20;
/// Headers that belong to one connection, or to the client's own credentials.
const NOT_FORWARDED: [HeaderName; 5] = [
    header::HOST,
    header::AUTHORIZATION,
    header::CONNECTION,
    header::TRANSFER_ENCODING,
    header::CONTENT_LENGTH,
];
/// What the last event of a streamed list contains.
const LIST_ENDS: &[u8] = b"k8s.io/initial-events-end";

/// What the proxy does to requests and answers.
#[derive(Debug, Clone, Default)]
pub(crate) struct Disturbance {
    /// Nothing passes. Connections stay open, and are closed in the end: what was sent meanwhile is lost.
    pub partition: bool,
    /// What watches have to say waits until this ends.
    pub stall_watches: bool,
    /// What watches have to say comes this much later.
    pub delay_watches: Duration,
    /// Every request takes this much longer.
    pub latency: Duration,
    /// The percentage of writes that the API server carries out, and whose answer is lost with the connection.
    pub lose_answers: u8,
    /// Writes of the Lease are answered with 503.
    pub refuse_lease: bool,
    /// The status with which this percentage of requests is answered; the API server does not see them.
    pub refuse: Option<(u16, u8)>,
}

pub(crate) struct Proxy {
    replica: usize,
    address: SocketAddr,
    upstream: kube::Client,
    traffic: Arc<Traffic>,
    disturbance: watch::Sender<Disturbance>,
    cuts: watch::Sender<u64>,
    random: Mutex<fastrand::Rng>,
}

impl Proxy {
    /// `upstream` has the credentials that the replica's requests get.
    pub(crate) async fn start(
        replica: usize,
        upstream: kube::Client,
        traffic: Arc<Traffic>,
        seed: u64,
    ) -> Arc<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let proxy = Arc::new(Self {
            replica,
            address: listener.local_addr().expect("an address"),
            upstream,
            traffic,
            disturbance: watch::Sender::new(Disturbance::default()),
            cuts: watch::Sender::new(0),
            random: Mutex::new(fastrand::Rng::with_seed(seed)),
        });
        let this = Arc::downgrade(&proxy);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let Some(this) = this.upgrade() else { return };
                tokio::spawn(this.serve(stream));
            }
        });
        proxy
    }

    /// The kubeconfig of the replica.
    pub(crate) fn kubeconfig(&self) -> serde_json::Value {
        let named = |kind: &str, content: serde_json::Value| json!([{"name": "proxy", kind: content}]);
        json!({
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "proxy",
            "contexts": named("context", json!({"cluster": "proxy", "user": "proxy"})),
            "clusters": named("cluster", json!({"server": format!("http://{}", self.address)})),
            "users": named("user", json!({})),
        })
    }

    pub(crate) fn disturb(&self, change: impl FnOnce(&mut Disturbance)) {
        self.disturbance.send_modify(change);
    }

    /// Closes all connections.
    pub(crate) fn cut(&self) {
        self.cuts.send_modify(|cuts| *cuts += 1);
    }

    async fn serve(self: Arc<Self>, stream: TcpStream) {
        drop(stream.set_nodelay(true));
        let (mut cuts, mut disturbance) = (self.cuts.subscribe(), self.disturbance.subscribe());
        let service = hyper::service::service_fn(move |request| self.clone().answer(request));
        let server = auto::Builder::new(TokioExecutor::new());
        let connection = server.serve_connection(TokioIo::new(stream), service);
        tokio::pin!(connection);
        tokio::select! {
            biased;
            _ = cuts.changed() => return,
            _ = disturbance.wait_for(|disturbance| disturbance.partition) => {}
            _ = &mut connection => return,
        }
        drop(disturbance.wait_for(|disturbance| !disturbance.partition).await);
    }

    /// An error closes the connection.
    async fn answer(self: Arc<Self>, request: Request<Incoming>) -> io::Result<Response<Body>> {
        let disturbance = self.disturbance.borrow().clone();
        let (parts, body) = request.into_parts();
        let is_read = matches!(parts.method, Method::GET | Method::HEAD);
        let query = parts.uri.query().unwrap_or_default();
        let watches = query.contains("watch=");
        let lists = query.contains("sendInitialEvents=true") || (is_read && query.contains("limit=50"));
        let body = to_bytes(Body::new(body), MAX_BODY_BYTES).await.map_err(io::Error::other)?;
        if let Some((status, percentage)) = disturbance.refuse
            && (status != 409 || !is_read)
            && self.chance(percentage)
        {
            return Ok(refusal(status));
        }
        let path = parts.uri.path().to_owned();
        if disturbance.refuse_lease && !is_read && path.contains("/leases") {
            return Ok(refusal(503));
        }
        let mut request = Request::from_parts(parts, kube::client::Body::from(body.to_vec()));
        NOT_FORWARDED.iter().for_each(|name| drop(request.headers_mut().remove(name)));
        if lists {
            self.traffic.recorder.memory_lost();
        }
        let this = self.clone();
        let method = request.method().clone();
        // What has been sent is carried out, even if the connection breaks meanwhile.
        let forwarded = tokio::spawn(async move {
            let write = (!is_read).then(|| this.traffic.write(this.replica, &method, &path, &body));
            tokio::time::sleep(disturbance.latency).await;
            let response = this.upstream.send(request).await.map_err(io::Error::other);
            let Some(write) = write else { return response.map(|response| response.map(Body::new)) };
            let (parts, body) = match response {
                Ok(response) => response.into_parts(),
                Err(error) => {
                    write.end(None, &[]);
                    return Err(error);
                }
            };
            let body = to_bytes(Body::new(body), MAX_BODY_BYTES).await;
            write.end(body.is_ok().then(|| parts.status.as_u16()), body.as_deref().unwrap_or_default());
            Ok(Response::from_parts(parts, Body::from(body.map_err(io::Error::other)?)))
        });
        let response = forwarded.await.map_err(io::Error::other)??;
        if !is_read && self.chance(disturbance.lose_answers) {
            return Err(io::Error::other("the answer is lost"));
        }
        Ok(if watches && response.status() == StatusCode::OK { self.delayed(response) } else { response })
    }

    /// A watch whose events may stall or come later.
    fn delayed(self: &Arc<Self>, response: Response<Body>) -> Response<Body> {
        let (parts, mut body) = response.into_parts();
        let (received, events) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            loop {
                tokio::select! {
                    frame = next_frame(&mut body) => {
                        let Some(Ok(frame)) = frame else { return };
                        drop(received.send((Instant::now(), frame.into_data())));
                    }
                    () = received.closed() => return,
                }
            }
        });
        let state = (events, self.clone(), self.disturbance.subscribe());
        let delivered = futures::stream::unfold(state, async |(mut events, this, mut disturbance)| {
            let (arrived, data) = events.recv().await?;
            drop(disturbance.wait_for(|disturbance| !disturbance.stall_watches).await);
            let delay = disturbance.borrow().delay_watches;
            tokio::time::sleep_until(arrived + delay).await;
            let data = data.unwrap_or_default();
            if data.windows(LIST_ENDS.len()).any(|bytes| bytes == LIST_ENDS) {
                this.traffic.recorder.memory_lost();
            }
            Some((Ok::<_, Infallible>(data), (events, this, disturbance)))
        });
        Response::from_parts(parts, Body::from_stream(delivered))
    }

    fn chance(&self, percentage: u8) -> bool {
        percentage > 0 && self.random.lock().expect("no panic").u8(0..100) < percentage
    }
}

/// An error of the API server.
fn refusal(status: u16) -> Response<Body> {
    let reason = match status {
        409 => "Conflict",
        429 => "TooManyRequests",
        500 => "InternalError",
        _ => "ServiceUnavailable",
    };
    let mut body = json!({
        "kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status, "reason": reason,
        "message": "a fault of the tests",
    });
    if status == 429 {
        body["details"] = json!({"retryAfterSeconds": 1});
    }
    let mut response = Response::new(Body::from(body.to_string()));
    *response.status_mut() = StatusCode::from_u16(status).expect("a status");
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
