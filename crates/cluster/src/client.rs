//! Builds the Kubernetes client, and turns its errors into [`Failure`].

use std::{path::Path, time::Duration};

use http::{Method, Request, Response, StatusCode};
use hyper_util::{client::legacy::connect::HttpConnector, rt::TokioExecutor};
use k8s_openapi::api::authentication::v1::{SelfSubjectReview, UserInfo};
use kube::{
    Api, Client, Config,
    api::{GetParams, PostParams},
    client::{Body, ConfigExt},
    config::{KubeConfigOptions, Kubeconfig},
    core,
};
use serde::de::DeserializeOwned;
use tower::{BoxError, ServiceBuilder};

pub use lockstep_core::failure::Failure;

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

/// Builds the client: HTTP/1.1, TCP_NODELAY, keepalive, no automatic retries. `count` is told the verb of each call,
/// and the status code of its answer, if there was one.
pub fn build(
    mut config: Config,
    count: impl Fn(&'static str, Option<StatusCode>) + Clone + Send + Sync + 'static,
) -> Result<Client, Error> {
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
    let counted = tower::service_fn(move |request: Request<Body>| {
        let verb = verb(&request);
        let count = count.clone();
        let answer = http.request(request);
        async move {
            let answer = answer.await;
            count(verb, answer.as_ref().ok().map(Response::status));
            answer
        }
    });
    let service = ServiceBuilder::new()
        .layer(config.base_uri_layer())
        .option_layer(config.auth_layer().map_err(build_error)?)
        .layer(config.extra_headers_layer().map_err(build_error)?)
        .map_err(BoxError::from)
        .service(counted);
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
    let reviews = Api::<SelfSubjectReview>::all(client.clone());
    let review =
        with_timeout(REQUEST_TIMEOUT, reviews.create(&PostParams::default(), &SelfSubjectReview::default()))
            .await?;
    Ok(review.status.and_then(|status| status.user_info).unwrap_or_default())
}

/// Runs an API call with a timeout, because kube's client has no read timeout of its own.
pub async fn with_timeout<T>(
    timeout: Duration,
    call: impl Future<Output = Result<T, kube::Error>>,
) -> Result<T, Failure> {
    match tokio::time::timeout(timeout, call).await {
        Ok(answer) => answer.map_err(failure),
        Err(_) => Err(Failure::Unavailable(format!("no answer within {timeout:?}"))),
    }
}

/// Reads one object of the collection at a path.
pub async fn get<T: DeserializeOwned>(client: &Client, path: &str, name: &str) -> Result<T, Failure> {
    send(client, REQUEST_TIMEOUT, core::Request::new(path).get(name, &GetParams::default())).await
}

/// Sends a request, if it could be built.
pub async fn send<T: DeserializeOwned>(
    client: &Client,
    timeout: Duration,
    request: Result<Request<Vec<u8>>, core::request::Error>,
) -> Result<T, Failure> {
    let request = request.map_err(|error| Failure::Unavailable(error.to_string()))?;
    with_timeout(timeout, client.request(request)).await
}

/// What a failed call means.
pub fn failure(error: kube::Error) -> Failure {
    match error {
        kube::Error::Api(status) => Failure::from(*status),
        // The text of the error would quote the content.
        kube::Error::SerdeError(error) => {
            Failure::Unavailable(format!("the response could not be decoded ({:?} error)", error.classify()))
        }
        other => Failure::Unavailable(chain(&other)),
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

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn sockets_detect_a_dead_peer_by_keepalive_and_user_timeout() {
        use tower::Service;

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
}
