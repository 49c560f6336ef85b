//! `lockstep ui`: a page about the controller, served on loopback with the rights of the person who runs it.
//!
//! | file | job |
//! | --- | --- |
//! | [`page_access`] | who may ask: the token, Host, Origin, methods, and the headers of every answer; pure |
//! | [`rows`] | sources and companions as the page shows them, and what has changed since; pure |
//! | [`activity`] | heals, other Events and denials, newest first, bounded; pure |
//! | [`replicas`] | what replicas say in their metrics: denials, heals, certificates |
//! | [`feed`] | what the page shows now, and its changes for everybody who looks |
//! | [`follow`] | watches → feed |
//! | [`routes`] | the page, its stream of changes, and "why not here?" |
//!
//! Values of ConfigMaps and Secrets are not in here: the snapshot's world keeps digests only.

mod activity;
pub mod feed;
mod follow;
pub mod page_access;
mod replicas;
mod routes;
mod rows;

use std::sync::Arc;

use k8s_openapi::jiff::Timestamp;
use kube::Client;
use tokio::{
    net::TcpListener,
    sync::{RwLock, watch},
};

use crate::{
    inspect::{instance::Instance, snapshot::Snapshot},
    program::Program,
};
use feed::Feed;
use page_access::PageAccess;

/// A browser opens six for a page; other users of the machine can open as many as they like.
const MAX_CONNECTIONS: usize = 64;

/// What all parts of the page share.
pub struct Page {
    pub client: Client,
    pub snapshot: RwLock<Snapshot>,
    /// What is shown where not everything may be seen.
    pub namespace: String,
    pub feed: Feed,
    /// Until when deletes are held, if any are.
    pub held_until: watch::Sender<Option<Timestamp>>,
    /// How a person asks this cluster, as in `kubectl --context prod`.
    pub kubectl: String,
}

impl Page {
    /// Serves the page on this listener until the process ends.
    pub async fn serve(
        self,
        program: Program,
        listener: TcpListener,
        access: PageAccess,
        instance: Instance,
    ) {
        let ui = Arc::new(self);
        let mut tasks = follow::start(&ui, instance).await;
        let served = (program.serve)(listener, routes::routes(ui, access), MAX_CONNECTIONS);
        tokio::select! {
            () = served => {}
            // None of them ever ends.
            _ = tasks.join_next() => {}
        }
    }
}
