//! An API server that answers as a test says, for situations into which a real one cannot be brought. How a real API
//! server answers is the subject of the end-to-end tests.

use std::convert::Infallible;

use axum::body::{Body, to_bytes};
use http::{Method, Request, Response};
use kube::Client;
use serde_json::{Value, json};

/// A request to the API server.
pub struct ApiRequest {
    pub method: Method,
    /// Path and query.
    pub uri: String,
    pub body: Value,
}

/// A client of an API server that answers requests with the status code and body that `answer` returns.
pub fn api_server<F>(answer: impl Fn(ApiRequest) -> F + Clone + Send + 'static) -> Client
where
    F: Future<Output = (u16, Value)> + Send + 'static,
{
    let service = tower::service_fn(move |request: Request<kube::client::Body>| {
        let answer = answer.clone();
        async move {
            let (parts, body) = request.into_parts();
            let body = to_bytes(Body::new(body), usize::MAX).await.unwrap();
            let body = serde_json::from_slice(&body).unwrap_or_default();
            let (code, body) =
                answer(ApiRequest { method: parts.method, uri: parts.uri.to_string(), body }).await;
            let text = if body.is_null() { String::new() } else { body.to_string() };
            Ok::<_, Infallible>(Response::builder().status(code).body(Body::from(text)).unwrap())
        }
    });
    Client::new(service, "default")
}

/// As [`api_server`], with texts as bodies, such as the lines of a watch. `answer` gets path and query.
pub fn api_server_of_texts(answer: impl Fn(&str) -> (u16, String) + Clone + Send + 'static) -> Client {
    let service = tower::service_fn(move |request: Request<kube::client::Body>| {
        let (code, text) = answer(&request.uri().to_string());
        let response = Response::builder().status(code).body(Body::from(text)).unwrap();
        std::future::ready(Ok::<_, Infallible>(response))
    });
    Client::new(service, "default")
}

/// The response that refuses a request.
pub fn refusal(code: u16, reason: &str) -> (u16, Value) {
    let status = json!({
        "apiVersion": "v1", "kind": "Status", "metadata": {}, "status": "Failure",
        "code": code, "reason": reason, "message": reason,
    });
    (code, status)
}
