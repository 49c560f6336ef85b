//! What etcd stores, in the order in which it was stored.
//!
//! Watches of the API server say nothing about the order of changes of different kinds. etcd numbers all changes, so
//! one watch of etcd shows a cluster's history as it was: what was there when a companion was written, and who held the
//! Lease. It survives restarts of the API server. It needs an API server that stores JSON ([`STORES_JSON`]).

use std::{io, path::PathBuf, pin::Pin, time::Duration};

use axum::body::{Body, to_bytes};
use hyper::body::Incoming;
use hyper_util::rt::TokioIo;
use k8s_openapi::ByteString;
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::net::UnixStream;

/// The flag of the API server that makes what it stores readable.
pub(crate) const STORES_JSON: &str = "--storage-media-type=application/json";
/// How long a request may take that is no watch.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// The first key, which as the end of a range stands for all keys.
const ALL_KEYS: &str = "AA==";

/// etcd's JSON API, on its socket.
#[derive(Clone)]
pub(crate) struct Etcd {
    socket: PathBuf,
}

/// A change of one key.
#[derive(Debug, Clone)]
pub(crate) struct Stored {
    pub key: String,
    pub revision: u64,
    /// `None` if the key was deleted.
    pub value: Option<Value>,
}

#[derive(Deserialize)]
struct KeyValue {
    key: ByteString,
    mod_revision: String,
    #[serde(default)]
    value: Option<ByteString>,
}

#[derive(Deserialize)]
struct WatchEvent {
    kv: KeyValue,
}

impl KeyValue {
    fn stored(self) -> io::Result<Stored> {
        let value = self.value.map(|value| serde_json::from_slice(&value.0).unwrap_or(Value::Null));
        let revision = self.mod_revision.parse().map_err(io::Error::other)?;
        Ok(Stored { key: String::from_utf8_lossy(&self.key.0).into_owned(), revision, value })
    }
}

impl Etcd {
    pub(crate) fn at(socket: PathBuf) -> Self {
        Self { socket }
    }

    /// The number of the last change.
    pub(crate) async fn revision(&self) -> io::Result<u64> {
        let answer =
            self.call("/v3/kv/range", &json!({"key": ALL_KEYS, "limit": 1, "keys_only": true})).await?;
        number(&answer["header"]["revision"])
    }

    /// Everything that was stored as of a revision.
    pub(crate) async fn read(&self, revision: u64) -> io::Result<Vec<Stored>> {
        let range = json!({"key": ALL_KEYS, "range_end": ALL_KEYS, "revision": revision.to_string()});
        let mut answer = self.call("/v3/kv/range", &range).await?;
        let stored =
            serde_json::from_value::<Vec<KeyValue>>(answer["kvs"].take()).map_err(io::Error::other)?;
        stored.into_iter().map(KeyValue::stored).collect()
    }

    /// Forgets everything that was replaced or deleted before this revision.
    pub(crate) async fn compact(&self, revision: u64) -> io::Result<()> {
        let request = json!({"revision": revision.to_string(), "physical": true});
        self.call("/v3/kv/compaction", &request).await.map(drop)
    }

    /// Hands on every change from a revision on, until the connection breaks.
    pub(crate) async fn watch(&self, from: u64, mut sink: impl FnMut(Stored)) -> io::Result<()> {
        let request = json!({"create_request": {
            "key": ALL_KEYS, "range_end": ALL_KEYS, "start_revision": from.to_string(),
        }});
        let mut body = self.post("/v3/watch", &request).await?;
        let mut received = Vec::new();
        while let Some(frame) = next_frame(&mut body).await {
            let Ok(data) = frame.map_err(io::Error::other)?.into_data() else { continue };
            received.extend_from_slice(&data);
            while let Some(end) = received.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = received.drain(..=end).collect();
                let mut message: Value = serde_json::from_slice(&line).map_err(io::Error::other)?;
                let result = &mut message["result"];
                if result["canceled"] == true {
                    return Err(io::Error::other(format!("the watch was cancelled: {result}")));
                }
                let events = result["events"].take();
                if events.is_null() {
                    continue;
                }
                for event in serde_json::from_value::<Vec<WatchEvent>>(events).map_err(io::Error::other)? {
                    sink(event.kv.stored()?);
                }
            }
        }
        Err(io::ErrorKind::UnexpectedEof.into())
    }

    async fn call(&self, path: &str, body: &Value) -> io::Result<Value> {
        let call = async {
            let answer = to_bytes(Body::new(self.post(path, body).await?), usize::MAX).await;
            serde_json::from_slice(&answer.map_err(io::Error::other)?).map_err(io::Error::other)
        };
        tokio::time::timeout(REQUEST_TIMEOUT, call).await.map_err(io::Error::other)?
    }

    async fn post(&self, path: &str, body: &Value) -> io::Result<Incoming> {
        let stream = UnixStream::connect(&self.socket).await?;
        let (mut sender, connection) = hyper::client::conn::http1::handshake::<_, Body>(TokioIo::new(stream))
            .await
            .map_err(io::Error::other)?;
        tokio::spawn(connection);
        let request = http::Request::post(path).header("host", "etcd");
        let request = request.body(Body::from(body.to_string())).expect("a request");
        let response = sender.send_request(request).await.map_err(io::Error::other)?;
        if response.status() != 200 {
            return Err(io::Error::other(format!("{path}: {}", response.status())));
        }
        Ok(response.into_body())
    }
}

/// The next frame of a body.
pub(crate) async fn next_frame<B: http_body::Body + Unpin>(
    body: &mut B,
) -> Option<Result<http_body::Frame<B::Data>, B::Error>> {
    std::future::poll_fn(|context| Pin::new(&mut *body).poll_frame(context)).await
}

fn number(value: &Value) -> io::Result<u64> {
    let number = value.as_str().and_then(|text| text.parse().ok());
    number.ok_or_else(|| io::Error::other(format!("{value} is no revision")))
}
