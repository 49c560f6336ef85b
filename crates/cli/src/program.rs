//! What commands need of the rest of the program.

use axum::Router;
use futures::future::BoxFuture;
use tokio::net::TcpListener;

/// The parts of an installation that decide which roles it has.
pub struct Installation {
    pub domain: String,
    pub namespace: String,
    pub secrets: bool,
    /// cert-manager issues the certificate of the webhook.
    pub cert_manager: bool,
}

pub struct Program {
    /// The roles in the manifests of an installation, as YAML.
    pub roles: fn(Installation) -> String,
    /// Serves HTTP on loopback with at most so many connections, until the process ends.
    pub serve: fn(TcpListener, Router, usize) -> BoxFuture<'static, ()>,
}
