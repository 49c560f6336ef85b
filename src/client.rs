//! Builds the Kubernetes client, and turns its errors into [`Failure`], whose texts never quote content of objects.

use std::{
    future::Future,
    path::Path,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use http::{Method, Request, Response};
use hyper_util::{client::legacy::connect::HttpConnector, rt::TokioExecutor};
use k8s_openapi::api::authentication::v1::{SelfSubjectReview, UserInfo};
use kube::{
    Client, Config,
    client::{Body, ConfigExt},
    config::{KubeConfigOptions, Kubeconfig},
    core::Status,
};
use serde::de::DeserializeOwned;
use tower::{BoxError, Layer, Service, ServiceBuilder};

use crate::{ops::metrics::Metrics, text::shorten};

/// Timeout of short requests that nothing else bounds.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
const POOL_IDLE_TIMEOUT: Duration = Duration::from_secs(60);
const KEEPALIVE_IDLE: Duration = Duration::from_secs(10);
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(5);
const KEEPALIVE_RETRIES: u32 = 3;
/// How long sent bytes may stay unacknowledged.
#[cfg(target_os = "linux")]
const TCP_USER_TIMEOUT: Duration = Duration::from_secs(10);

/// The maximum length of the reason of a refusal. Others choose it: webhooks, and quotas by their number.
const MAX_REASON_CHARS: usize = 500;

/// Why no client could be built.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "the kubeconfig cannot be used: {0}; check KUBECONFIG, or unset it to use ~/.kube/config or the pod's ServiceAccount"
    )]
    Kubeconfig(String),
    #[error(
        "no cluster is configured: set KUBECONFIG to a kubeconfig file, or run in a pod with a ServiceAccount ({0})"
    )]
    NoCluster(String),
    #[error(
        "the kubeconfig sets proxy-url to {0}, which Lockstep does not support: remove it, or run Lockstep in the cluster"
    )]
    ProxyUnsupported(http::Uri),
    #[error(
        "the Kubernetes client cannot be built: {0}; check certificates and credentials in the kubeconfig"
    )]
    Build(String),
}

/// Why a request failed. The texts leave out what the API server quotes from objects.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    #[error("not found")]
    NotFound,
    #[error("already exists")]
    AlreadyExists,
    #[error("conflict: the object has changed")]
    Conflict,
    #[error("the namespace is terminating")]
    NamespaceTerminating,
    #[error("this replica is not the leader")]
    NotLeader,
    #[error("invalid: {0}")]
    Invalid(String),
    #[error("forbidden: {0}")]
    Forbidden(String),
    /// The credentials are not valid, or not any more.
    #[error("the API server does not accept the credentials")]
    Unauthorized,
    #[error("the API server asks to retry after {} s", .0.as_secs())]
    Throttled(Duration),
    #[error("{0}")]
    Unavailable(String),
}

/// How the message begins when a JSON patch does not apply to the object. Our patches apply to the state they were
/// computed from, so the object has changed since. Nothing else in the response distinguishes this from a 422 for an
/// invalid object.
const PATCH_DOES_NOT_FIT: &str = "the server rejected our request due to an error in our request";

/// Finds the cluster as kubectl does: `KUBECONFIG`, then `~/.kube/config`, then the pod's ServiceAccount.
///
/// Unlike [`Config::infer`], an unusable `KUBECONFIG` is an error and does not fall back to the ServiceAccount.
pub async fn config() -> Result<Config, Error> {
    let named = std::env::var_os("KUBECONFIG").is_some_and(|value| !value.is_empty());
    if named || Kubeconfig::read().is_ok() {
        config_of(None, None).await
    } else {
        Config::incluster().map_err(|error| Error::NoCluster(chain(&error)))
    }
}

/// The cluster of a person: this file, or the one that kubectl finds, and this context of it, or its current one.
pub async fn config_of(kubeconfig: Option<&Path>, context: Option<&str>) -> Result<Config, Error> {
    let unusable = |error: &dyn std::error::Error| Error::Kubeconfig(chain(error));
    let options = KubeConfigOptions { context: context.map(str::to_owned), ..KubeConfigOptions::default() };
    let config = match kubeconfig {
        None => Config::from_kubeconfig(&options).await,
        Some(file) => {
            let kubeconfig = Kubeconfig::read_from(file).map_err(|error| unusable(&error))?;
            Config::from_custom_kubeconfig(kubeconfig, &options).await
        }
    };
    config.map_err(|error| unusable(&error))
}

/// Builds the client: HTTP/1.1, TCP_NODELAY, keepalive, no automatic retries, every call counted in the metrics.
pub fn build(mut config: Config, metrics: &Metrics) -> Result<Client, Error> {
    if let Some(proxy) = config.proxy_url {
        return Err(Error::ProxyUnsupported(proxy));
    }
    config.headers.push((
        http::header::USER_AGENT,
        http::HeaderValue::from_static(concat!("lockstep/", env!("CARGO_PKG_VERSION"))),
    ));
    let connector = config.rustls_https_connector_with_connector(connector()).map_err(build_error)?;
    let http: hyper_util::client::legacy::Client<_, Body> =
        hyper_util::client::legacy::Builder::new(TokioExecutor::new())
            .pool_idle_timeout(POOL_IDLE_TIMEOUT)
            .build(connector);
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer().map_err(build_error)?)
        .layer(config.extra_headers_layer().map_err(build_error)?)
        .layer(CountCalls(metrics.clone()))
        .map_err(BoxError::from)
        .service(http);
    Ok(Client::new(service, config.default_namespace))
}

/// Connections to an API server that vanished without closing them fail within half a minute, idle or not.
fn connector() -> HttpConnector {
    let mut connector = HttpConnector::new();
    connector.enforce_http(false);
    connector.set_nodelay(true);
    connector.set_connect_timeout(Some(CONNECT_TIMEOUT));
    connector.set_keepalive(Some(KEEPALIVE_IDLE));
    connector.set_keepalive_interval(Some(KEEPALIVE_INTERVAL));
    connector.set_keepalive_retries(Some(KEEPALIVE_RETRIES));
    // Linux sends no keepalive probes while sent bytes are unacknowledged.
    #[cfg(target_os = "linux")]
    connector.set_tcp_user_timeout(Some(TCP_USER_TIMEOUT));
    connector
}

#[allow(clippy::needless_pass_by_value)]
fn build_error(error: kube::Error) -> Error {
    Error::Build(chain(&error))
}

/// The name of the user that the API server authenticates this process as.
pub async fn who_am_i(client: &Client) -> Result<String, Failure> {
    Ok(user_info(client).await?.username.unwrap_or_default())
}

/// The user that the API server authenticates this process as, by a SelfSubjectReview.
pub async fn user_info(client: &Client) -> Result<UserInfo, Failure> {
    let reviews = kube::Api::<SelfSubjectReview>::all(client.clone());
    let (params, request) = (kube::api::PostParams::default(), SelfSubjectReview::default());
    let review = with_timeout(REQUEST_TIMEOUT, reviews.create(&params, &request)).await?;
    Ok(review.status.and_then(|status| status.user_info).unwrap_or_default())
}

/// Runs an API call with a timeout, because kube's client has no read timeout of its own.
pub async fn with_timeout<T>(
    timeout: Duration,
    call: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, Failure> {
    match tokio::time::timeout(timeout, call).await {
        Ok(answer) => answer.map_err(Failure::from),
        Err(_) => Err(Failure::Unavailable(format!("no answer within {timeout:?}"))),
    }
}

/// Reads one object of the collection at a path.
pub async fn get<T: DeserializeOwned>(client: &Client, path: &str, name: &str) -> Result<T, Failure> {
    let request = kube::core::Request::new(path).get(name, &kube::api::GetParams::default());
    let request = request.map_err(|error| Failure::Unavailable(error.to_string()))?;
    with_timeout(REQUEST_TIMEOUT, client.request(request)).await
}

impl Failure {
    /// Its text without a number that changes from one answer to the next: equal kinds are logged once.
    #[must_use]
    pub fn kind(&self) -> String {
        match self {
            Self::Throttled(_) => "throttled".to_owned(),
            other => other.to_string(),
        }
    }

    /// One sentence for the log: what failed, why, and what to do about it.
    #[must_use]
    pub fn explain(&self, what: &str) -> String {
        match self {
            Self::Forbidden(detail) => {
                format!(
                    "{what} is forbidden ({detail}): apply the RBAC of `lockstep manifests` for this identity"
                )
            }
            Self::Unavailable(detail) => {
                format!(
                    "{what} failed ({detail}): check that the API server is up, its address and the network"
                )
            }
            other => format!("{what} failed: {other}"),
        }
    }
}

impl From<kube::Error> for Failure {
    fn from(error: kube::Error) -> Self {
        match error {
            kube::Error::Api(status) => Self::from(*status),
            // The text of the error would quote the content.
            kube::Error::SerdeError(error) => {
                Self::Unavailable(format!("the response could not be decoded ({:?} error)", error.classify()))
            }
            other => Self::Unavailable(chain(&other)),
        }
    }
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        let details = status.details.as_ref();
        let cause =
            |reason: &str| details.is_some_and(|d| d.causes.iter().any(|cause| cause.reason == reason));
        let retry_after = details.map_or(0, |details| details.retry_after_seconds);
        if status.is_already_exists() {
            Self::AlreadyExists
        } else if status.code == 422 && status.message.starts_with(PATCH_DOES_NOT_FIT) {
            Self::Conflict
        } else if cause("NamespaceTerminating") {
            Self::NamespaceTerminating
        } else if status.code == 429 || retry_after > 0 {
            Self::Throttled(Duration::from_secs(retry_after.max(1).into()))
        } else {
            match status.code {
                404 => Self::NotFound,
                409 => Self::Conflict,
                400 | 413 | 422 => Self::Invalid(shorten(&without_content(&status), MAX_REASON_CHARS)),
                401 => Self::Unauthorized,
                403 => Self::Forbidden(shorten(&without_content(&status), MAX_REASON_CHARS)),
                code => Self::Unavailable(format!("the API server answered {code} {}", status.reason)),
            }
        }
    }
}

/// The reason of a refusal without quoted values: the invalid fields, or the webhook that denied the request.
fn without_content(status: &Status) -> String {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    let fields: Vec<String> = causes
        .filter(|cause| !cause.field.is_empty())
        .map(|cause| format!("{}: {}", cause.field, cause.reason))
        .collect();
    if !fields.is_empty() {
        return fields.join(", ");
    }
    for end in ["denied the request", "denied request"] {
        if let Some(at) = status.message.find(end) {
            return status.message[..at + end.len()].to_owned();
        }
    }
    match status.code {
        // RBAC and quota messages name objects and users, never values.
        403 => status.message.clone(),
        _ => status.reason.clone(),
    }
}

/// An error with its causes in one line: the outermost error alone often says just "error trying to connect".
fn chain(error: &dyn std::error::Error) -> String {
    let first_line =
        |error: &dyn std::error::Error| error.to_string().lines().next().unwrap_or_default().to_owned();
    let mut text = first_line(error);
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = first_line(cause);
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}

/// A tower layer that counts API calls by verb and status code.
#[derive(Clone)]
struct CountCalls(Metrics);

#[derive(Clone)]
struct Counted<S> {
    inner: S,
    metrics: Metrics,
}

impl<S> Layer<S> for CountCalls {
    type Service = Counted<S>;

    fn layer(&self, inner: S) -> Counted<S> {
        Counted { inner, metrics: self.0.clone() }
    }
}

impl<S, B, R> Service<Request<B>> for Counted<S>
where
    S: Service<Request<B>, Response = Response<R>>,
    S::Future: Send + 'static,
    S::Error: 'static,
    R: 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let verb = verb(&request);
        let metrics = self.metrics.clone();
        let answer = self.inner.call(request);
        Box::pin(async move {
            let answer = answer.await;
            metrics.api_call(verb, answer.as_ref().ok().map(Response::status));
            answer
        })
    }
}

fn verb<B>(request: &Request<B>) -> &'static str {
    let query = request.uri().query().unwrap_or_default();
    match *request.method() {
        Method::POST => "create",
        Method::PUT => "update",
        Method::PATCH => "patch",
        Method::DELETE => "delete",
        Method::GET if query.contains("watch=true") => "watch",
        Method::GET if query.contains("limit=") => "list",
        _ => "get",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(value: serde_json::Value) -> Failure {
        serde_json::from_value::<Status>(value).unwrap().into()
    }

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn sockets_detect_a_dead_peer_by_keepalive_and_user_timeout() {
        use rustix::net::sockopt::{tcp_keepcnt, tcp_keepidle, tcp_keepintvl, tcp_user_timeout};
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let connection = connector().call(address.parse().unwrap()).await.unwrap();
        let socket = connection.inner();
        let seconds = Duration::from_secs;
        assert_eq!(tcp_keepidle(socket), Ok(seconds(10)));
        assert_eq!(tcp_keepintvl(socket), Ok(seconds(5)));
        assert_eq!((tcp_keepcnt(socket), tcp_user_timeout(socket)), (Ok(3), Ok(10_000)));
    }

    #[tokio::test(start_paused = true)]
    async fn request_without_an_answer_times_out() {
        let client = crate::testing::api::api_server(|_| std::future::pending());
        let answer = tokio::time::timeout(Duration::from_mins(1), who_am_i(&client))
            .await
            .expect("the request has a timeout");
        assert_eq!(answer, Err(Failure::Unavailable("no answer within 10s".to_owned())));
    }

    #[test]
    fn status_codes_and_reasons_map_to_failures() {
        use serde_json::json;
        for (value, expected) in [
            (json!({"code": 404, "reason": "NotFound"}), Failure::NotFound),
            (json!({"code": 409, "reason": "AlreadyExists"}), Failure::AlreadyExists),
            (json!({"code": 409, "reason": "Conflict"}), Failure::Conflict),
            (
                json!({"code": 422, "reason": "Invalid", "message": PATCH_DOES_NOT_FIT, "details": {}}),
                Failure::Conflict,
            ),
            (
                json!({"code": 403, "reason": "Forbidden", "details": {"causes": [{"reason": "NamespaceTerminating"}]}}),
                Failure::NamespaceTerminating,
            ),
            (
                json!({"code": 429, "reason": "TooManyRequests", "details": {"retryAfterSeconds": 7}}),
                Failure::Throttled(Duration::from_secs(7)),
            ),
        ] {
            assert_eq!(status(value.clone()), expected, "{value}");
        }
    }

    #[test]
    fn calls_are_counted_by_their_verb() {
        for (method, query, expected) in [
            (Method::GET, "", "get"),
            (Method::GET, "?limit=5000", "list"),
            (Method::GET, "?watch=true&limit=1", "watch"),
            (Method::POST, "", "create"),
            (Method::PUT, "", "update"),
            (Method::PATCH, "", "patch"),
            (Method::DELETE, "", "delete"),
        ] {
            let uri = format!("/api/v1/configmaps{query}");
            let request = Request::builder().method(&method).uri(uri).body(()).unwrap();
            assert_eq!(verb(&request), expected, "{method}");
        }
    }

    #[test]
    fn explanation_names_what_failed_why_and_what_to_do() {
        for (failure, why, remedy) in [
            (Failure::Forbidden("no list".to_owned()), "no list", "RBAC"),
            (Failure::Unavailable("no route".to_owned()), "no route", "network"),
            (Failure::Conflict, "has changed", ""),
        ] {
            let text = failure.explain("the watch of pods");
            assert!(text.starts_with("the watch of pods ") && text.contains(why), "{text}");
            assert!(text.contains(remedy) && text.lines().count() == 1, "{text}");
        }
    }

    #[test]
    fn refusals_never_quote_values() {
        use serde_json::json;
        for value in [
            json!({"code": 422, "reason": "Invalid", "message": "ConfigMap \"x\" is invalid: data[a]: Invalid value: \"hush\"",
                   "details": {"causes": [{"reason": "FieldValueInvalid", "message": "Invalid value: \"hush\"", "field": "data[a]"}]}}),
            json!({"code": 403, "reason": "Forbidden", "message": "admission webhook \"w\" denied the request: saw hush"}),
            json!({"code": 422, "reason": "Invalid", "message": "something about hush"}),
        ] {
            let text = status(value).to_string();
            assert!(!text.contains("hush"), "{text}");
        }
    }
}
