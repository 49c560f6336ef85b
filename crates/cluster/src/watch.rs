//! Watches one resource: a consistent list, then events, without end.
//!
//! kube-runtime's `watcher` does not fit, for three reasons (as of 5.0). It hides bookmarks, so that a stalled watch
//! looks like a quiet one, and the resourceVersion of a list, which our own writes and the signs of a restore of etcd
//! (`restores`) are compared with. A list that it streams may be older than what was already seen (`NotOlderThan` 0).
//! It requires `Debug` of what it watches, Secrets included.

mod decode;
mod list_splitter;
mod restores;
pub mod single_object;

pub use decode::Undecodable;
pub use restores::Restores;

use std::{collections::HashSet, convert::Infallible, io, time::Duration};

use futures::{AsyncBufRead, AsyncBufReadExt};
use http::{HeaderValue, header::ACCEPT_ENCODING};
use kube::{
    Client,
    api::{ListParams, WatchEvent, WatchParams},
    core::{ListMeta, Request},
};
use tokio::{sync::watch as channel, time::Instant};

use crate::client::{self, with_timeout};
use list_splitter::{List, ListSplitter};
use lockstep_core::{
    failure::{
        Failure,
        backoff::{Backoff, LogOnce, Retry},
    },
    object::watched::Watched,
};

/// `timeoutSeconds` of a watch: the API server ends it then, and the next one resumes where it ended.
const WATCH_TIMEOUT: Duration = Duration::from_secs(60);
/// A watch without any event or bookmark for this long has stalled. Bookmarks come about once a minute, but a resource
/// without changes misses some.
const STALL_TIMEOUT: Duration = Duration::from_secs(180);
/// A watch that ends sooner than this counts as a failure, so that a server that ends every watch at once is backed
/// off.
const MIN_WATCH_TIME: Duration = Duration::from_secs(1);
/// `limit` of a list, on servers that cannot stream lists. They hold a whole page in memory, and so do we.
const PAGE_SIZE: u32 = 50;
/// The same for commands of people, which run once and must be quick.
const LARGE_PAGE_SIZE: u32 = 100;
/// The pauses after requests that were not answered or answered with an error, which cost the server little. They are
/// short, because an API server that was restarted answers like this until it is ready.
const REFUSED_BACKOFF: Backoff = Backoff::new(Duration::from_millis(200), Duration::from_millis(1500));
/// The pauses after lists and watches that began and broke off: to begin them again is expensive.
const BROKEN_BACKOFF: Backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(10));
/// After this many failures in a row to resume from a resourceVersion, the resource is listed again. Requests without
/// an answer do not count, so that not every outage ends with a list.
const MAX_FAILED_RESUMES: u32 = 5;
/// How many objects that cannot be decoded a watch logs.
const MAX_LOGGED_UNDECODABLE: usize = 100;
/// The timeout of the request whether a version was reached.
const POSITION_TIMEOUT: Duration = Duration::from_secs(10);

/// What to watch.
#[derive(Clone)]
pub struct WatchSpec {
    /// Its name in logs.
    pub name: String,
    /// The URL path of the collection.
    pub path: String,
    pub label_selector: Option<String>,
    pub field_selector: Option<String>,
}

/// Like `kube::runtime::watcher::Event`, with bookmarks. Objects of the list come as `Apply`, too.
pub enum Event<T> {
    /// A list is about to be requested.
    Init,
    Apply(T),
    Delete(T),
    /// The list is complete, as of this resourceVersion.
    InitDone(String),
    /// There is nothing new, but the watch is alive.
    Bookmark,
    /// An object is skipped.
    Undecodable(Undecodable),
}

/// Why a watch ended.
#[derive(Debug, thiserror::Error)]
enum WatchError {
    /// The server does not support `sendInitialEvents`: list in pages.
    #[error("the API server does not stream lists")]
    StreamingUnsupported,
    /// The resourceVersion to resume from has expired, or the watch stalled: list again.
    #[error("{0}")]
    Relist(&'static str),
    /// Everything is listed again.
    #[error("etcd was restored from a backup")]
    Restored,
    #[error("{1}")]
    Failed(Stage, Failure),
}

/// How far a request came that failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// There was no answer.
    Unanswered,
    /// The answer is an error.
    Refused,
    /// The answer broke off, or cannot be decoded.
    Broken,
}

const EXPIRED: WatchError = WatchError::Relist("the resourceVersion has expired");

/// Watches without end. A failure is retried, and logged once until it changes.
pub async fn run<T: Watched>(
    client: Client,
    spec: WatchSpec,
    restores: Restores,
    sink: impl FnMut(Event<T>) + Send,
) {
    run_with_stall_timeout(client, spec, restores, STALL_TIMEOUT, sink).await;
}

/// Lists once, from a consistent state, and hands each object to `sink`.
pub async fn list<T: Watched>(
    client: Client,
    spec: WatchSpec,
    mut sink: impl FnMut(Event<T>) + Send,
) -> Result<(), Failure> {
    let watcher = Watcher { once: true, ..Watcher::new(client, spec, Restores::default(), STALL_TIMEOUT) };
    let mut seen = Seen::new(&mut sink);
    let outcome = match watcher.watch(&mut seen).await {
        // A user may have the verb list and not watch.
        Err(WatchError::StreamingUnsupported | WatchError::Failed(Stage::Refused, Failure::Forbidden(_))) => {
            watcher.list(&mut seen).await
        }
        outcome => outcome,
    };
    outcome.map_err(|error| match error {
        WatchError::Failed(_, failure) => failure,
        other => Failure::Unavailable(other.to_string()),
    })
}

/// As [`run`], for tests that cannot wait for the default stall timeout.
pub async fn run_with_stall_timeout<T: Watched>(
    client: Client,
    spec: WatchSpec,
    restores: Restores,
    stall_timeout: Duration,
    mut sink: impl FnMut(Event<T>) + Send,
) {
    let watch = Watch {
        restored: restores.subscribe(),
        watcher: Watcher::new(client, spec, restores, stall_timeout),
        seen: Seen::new(&mut sink),
        streaming: true,
        broke_off: false,
        refused: Retry::new(REFUSED_BACKOFF),
        broken: Retry::new(BROKEN_BACKOFF),
        failed_resumes: 0,
        log_once: LogOnce::default(),
    };
    watch.run().await;
}

/// A watch that never ends: one list or watch after the other.
struct Watch<'a, T> {
    watcher: Watcher,
    seen: Seen<'a, T>,
    /// Changes with each restore of etcd.
    restored: channel::Receiver<u64>,
    /// Whether lists are streamed.
    streaming: bool,
    /// The last watch ended before its time, so the next one may meet another etcd.
    broke_off: bool,
    refused: Retry,
    broken: Retry,
    failed_resumes: u32,
    log_once: LogOnce,
}

impl<T: Watched> Watch<'_, T> {
    async fn run(mut self) {
        loop {
            let outcome = self.attempt().await;
            let pause = self.pause_after(outcome);
            tokio::select! {
                () = tokio::time::sleep(pause) => {}
                Ok(()) = self.restored.changed() => self.seen.forget(),
            }
        }
    }

    /// One list or watch.
    async fn attempt(&mut self) -> Result<(), WatchError> {
        let Self { watcher, seen, restored, .. } = self;
        let resumed_from = seen.version.clone();
        let started = Instant::now();
        let lists = resumed_from.is_none() && !self.streaming;
        seen.restores = watcher.restores.count();
        let resumed_at = resumed_from.as_deref().and_then(number);
        let check = watcher.check_position(resumed_at.filter(|_| self.broke_off), seen.restores);
        let attempt = async { if lists { watcher.list(seen).await } else { watcher.watch(seen).await } };
        let outcome = tokio::select! {
            biased;
            Ok(()) = restored.changed() => Err(WatchError::Restored),
            outcome = attempt => outcome,
            never = check => match never {},
        };
        seen.position = seen.version.as_deref().and_then(number).unwrap_or(seen.position);
        self.broke_off = !lists && (outcome.is_err() || started.elapsed() + MIN_WATCH_TIME < WATCH_TIMEOUT);
        if seen.version != resumed_from {
            self.failed_resumes = 0;
        }
        // A list proves nothing about the watch that follows.
        if outcome.is_ok() && !lists {
            self.broken.reset();
            self.log_once.resolved();
        }
        outcome
    }

    /// Decides how to go on after an attempt, and returns how long to wait before that.
    fn pause_after(&mut self, outcome: Result<(), WatchError>) -> Duration {
        let name = &*self.watcher.spec.name;
        if !matches!(outcome, Err(WatchError::Failed(Stage::Unanswered | Stage::Refused, _))) {
            self.refused.reset();
        }
        let pause = match outcome {
            Ok(()) => Duration::ZERO,
            Err(WatchError::StreamingUnsupported) => {
                tracing::info!(watch = name, "the API server does not stream lists; listing in pages");
                self.streaming = false;
                Duration::ZERO
            }
            Err(WatchError::Restored) => {
                self.seen.forget();
                Duration::ZERO
            }
            Err(WatchError::Relist(reason)) => {
                tracing::info!(watch = name, reason, "listing again");
                self.seen.version = None;
                self.broken.next_delay()
            }
            Err(WatchError::Failed(stage, failure)) => {
                let text = failure.explain(&format!("the watch of {name}"));
                if self.log_once.is_new(&text) {
                    tracing::warn!(watch = name, "{text}; retrying");
                }
                self.failed_resumes += u32::from(stage != Stage::Unanswered);
                if stage == Stage::Broken { self.broken.next_delay() } else { self.refused.next_delay() }
            }
        };
        let stalled = self.seen.last_event.elapsed() > self.watcher.stall_timeout;
        if self.seen.version.is_none() || !(stalled || self.failed_resumes >= MAX_FAILED_RESUMES) {
            return pause;
        }
        let reason = if stalled { "the watch has stalled" } else { "the watch cannot be resumed" };
        tracing::info!(watch = name, reason, "listing again");
        self.seen.version = None;
        pause.max(self.broken.next_delay())
    }
}

/// What a watch has seen, and who is told.
struct Seen<'a, T> {
    sink: &'a mut (dyn FnMut(Event<T>) + Send),
    /// The resourceVersion to resume from; `None` before the list is complete.
    version: Option<String>,
    /// The newest version seen of this resource.
    position: u64,
    /// How many restores of etcd were known when the attempt began.
    restores: u64,
    last_event: Instant,
    logged_undecodable: HashSet<(String, String)>,
}

impl<'a, T> Seen<'a, T> {
    fn new(sink: &'a mut (dyn FnMut(Event<T>) + Send)) -> Self {
        let last_event = Instant::now();
        Self { sink, version: None, position: 0, restores: 0, last_event, logged_undecodable: HashSet::new() }
    }

    /// What was seen before a restore says nothing about the list that follows.
    fn forget(&mut self) {
        (self.version, self.position) = (None, 0);
    }

    /// Events advance the version only once the list is complete, because an incomplete list cannot be resumed.
    fn advance(&mut self, to: &str) {
        if let Some(version) = self.version.as_mut().filter(|_| !to.is_empty()) {
            to.clone_into(version);
        }
    }

    fn show(&mut self, event: Event<T>) {
        self.last_event = Instant::now();
        (self.sink)(event);
    }
}

struct Watcher {
    client: Client,
    request: Request,
    spec: WatchSpec,
    restores: Restores,
    stall_timeout: Duration,
    /// Lists, and does not watch.
    once: bool,
}

impl Watcher {
    fn new(client: Client, spec: WatchSpec, restores: Restores, stall_timeout: Duration) -> Self {
        Self { client, request: Request::new(&*spec.path), spec, restores, stall_timeout, once: false }
    }

    /// Watches from a resourceVersion, or streams the list first. `Ok` when the server ends the watch, but not at once.
    async fn watch<T: Watched>(&self, seen: &mut Seen<'_, T>) -> Result<(), WatchError> {
        let listing = seen.version.is_none();
        let started = Instant::now();
        let params = WatchParams {
            label_selector: self.spec.label_selector.clone(),
            field_selector: self.spec.field_selector.clone(),
            timeout: Some(u32::try_from(WATCH_TIMEOUT.as_secs()).unwrap_or(u32::MAX)),
            bookmarks: true,
            send_initial_events: listing,
        };
        if listing {
            // Before the request, because the list may miss what is written from here on.
            seen.show(Event::Init);
        }
        // An empty resourceVersion asks for a consistent list.
        let version = seen.version.as_deref().unwrap_or_default();
        let mut request = self.request.watch(&params, version).map_err(invalid_request)?;
        // A compressed watch is one gzip member an event since Kubernetes 1.37; kube's client decodes only the first.
        request.headers_mut().insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        let lines = self.answer(self.client.request_stream(request)).await?;
        let lines = lines.map_err(|error| refused(error, listing))?;
        self.follow(lines, seen).await?;
        if !self.once && started.elapsed() < MIN_WATCH_TIME {
            let failure = Failure::Unavailable("the watch ended at once".to_owned());
            return Err(WatchError::Failed(Stage::Broken, failure));
        }
        Ok(())
    }

    async fn follow<T: Watched>(
        &self,
        lines: impl AsyncBufRead,
        seen: &mut Seen<'_, T>,
    ) -> Result<(), WatchError> {
        let mut lines = std::pin::pin!(lines);
        loop {
            let mut line = Vec::new();
            let read = tokio::time::timeout(self.stall_timeout, lines.read_until(b'\n', &mut line))
                .await
                .map_err(|_| WatchError::Relist("the watch has stalled"))?;
            match read {
                Err(error) if !is_cut_off(&error) => return Err(broken(kube::Error::ReadEvents(error))),
                Ok(1..) => {}
                Ok(0) | Err(_) => {
                    return if seen.version.is_some() {
                        Ok(())
                    } else {
                        Err(WatchError::Relist("the watch ended before the list was complete"))
                    };
                }
            }
            let event = match decode::event::<T>(&line) {
                Ok(event) => event,
                Err(_) if !line.ends_with(b"\n") || line.trim_ascii().is_empty() => continue,
                Err(object) => {
                    seen.advance(&object.resource_version);
                    self.skip(object, seen);
                    continue;
                }
            };
            match event {
                WatchEvent::Added(object) | WatchEvent::Modified(object) => {
                    seen.advance(&object.meta().resource_version);
                    seen.show(Event::Apply(object));
                }
                WatchEvent::Deleted(object) => {
                    seen.advance(&object.meta().resource_version);
                    seen.show(Event::Delete(object));
                }
                WatchEvent::Bookmark(bookmark) => {
                    let meta = bookmark.metadata;
                    if meta.annotations.contains_key("k8s.io/initial-events-end") {
                        self.list_ends(meta.resource_version, seen);
                        if self.once {
                            return Ok(());
                        }
                    } else {
                        seen.advance(&meta.resource_version);
                        seen.show(Event::Bookmark);
                    }
                }
                WatchEvent::Error(status) => return Err(broken(kube::Error::Api(status))),
            }
        }
    }

    /// An object that cannot be decoded.
    fn skip<T>(&self, object: Undecodable, seen: &mut Seen<'_, T>) {
        let Undecodable { namespace, name, resource_version } = &object;
        if seen.logged_undecodable.len() < MAX_LOGGED_UNDECODABLE
            && seen.logged_undecodable.insert((namespace.clone(), name.clone()))
        {
            tracing::warn!(
                watch = self.spec.name,
                namespace,
                object = name,
                resource_version,
                "an object cannot be decoded: it is ignored"
            );
        }
        seen.show(Event::Undecodable(object));
    }

    fn list_ends<T>(&self, version: String, seen: &mut Seen<'_, T>) {
        let listed = number(&version);
        seen.last_event = Instant::now();
        seen.version = Some(version.clone());
        if self.report_restore(listed, seen.position, seen.restores) {
            // Not complete before the other watches have begun to list, too: companions that the restore erased would
            // be created again for sources that it erased as well.
            return;
        }
        seen.position = listed.unwrap_or_default();
        seen.show(Event::InitDone(version));
    }

    async fn answer<T>(&self, response: impl Future<Output = T>) -> Result<T, WatchError> {
        tokio::time::timeout(self.stall_timeout, response).await.map_err(|_| WatchError::Relist("no answer"))
    }

    /// Hands on the objects of a page while it is received.
    async fn page<T: Watched>(
        &self,
        request: http::Request<Vec<u8>>,
        seen: &mut Seen<'_, T>,
    ) -> kube::Result<ListMeta> {
        let mut list = ListSplitter::default();
        let mut answer = std::pin::pin!(self.client.request_stream(request).await?);
        loop {
            let received = answer.fill_buf().await.map_err(kube::Error::ReadEvents)?;
            if received.is_empty() {
                return list.finish().map_err(kube::Error::SerdeError);
            }
            list.push(received, |object| match object {
                Ok(object) => seen.show(Event::Apply(object)),
                Err(object) => self.skip(object, seen),
            });
            let length = received.len();
            answer.consume_unpin(length);
        }
    }

    /// Asks whether the API server has reached a position, if any, until there is an answer. Runs beside the watch that
    /// is resumed from there, and does not hold it up.
    ///
    /// `resourceVersionMatch=NotOlderThan` would ask the same, but a server whose cache lags behind takes seconds and
    /// then gives the answer of one that was restored. A consistent list answers at once, with a version to compare.
    async fn check_position(&self, position: Option<u64>, count: u64) -> Infallible {
        // Without the label selector, with which a server may read the whole collection to find one object.
        let params = ListParams { field_selector: self.spec.field_selector.clone(), ..ListParams::default() };
        let mut retry = Retry::new(REFUSED_BACKOFF);
        while let Some(position) = position
            && let Ok(request) = self.request.list_metadata(&params.clone().limit(1))
        {
            match with_timeout(POSITION_TIMEOUT, self.client.request::<List>(request)).await {
                Ok(List { metadata }) => {
                    let listed = metadata.resource_version.as_deref().and_then(number);
                    self.report_restore(listed, position, count);
                    break;
                }
                Err(_) => tokio::time::sleep(retry.next_delay()).await,
            }
        }
        std::future::pending().await
    }

    /// Reports a restore if a consistent list is older than what was seen before, and returns whether it is.
    fn report_restore(&self, listed: Option<u64>, position: u64, count: u64) -> bool {
        let Some(listed) = listed.filter(|listed| *listed < position) else { return false };
        let name = &self.spec.name;
        self.restores.report(count, format_args!("{name} are at version {listed}, after {position}"));
        true
    }

    /// Lists in pages; the next watch resumes from there.
    async fn list<T: Watched>(&self, seen: &mut Seen<'_, T>) -> Result<(), WatchError> {
        seen.show(Event::Init);
        let mut params = ListParams {
            label_selector: self.spec.label_selector.clone(),
            field_selector: self.spec.field_selector.clone(),
            ..ListParams::default()
        }
        .limit(if self.once { LARGE_PAGE_SIZE } else { PAGE_SIZE });
        loop {
            let request = self.request.list(&params).map_err(invalid_request)?;
            let page = self.answer(self.page(request, seen)).await?;
            let metadata = page.map_err(|error| refused(error, false))?;
            params.continue_token = metadata.continue_.filter(|token| !token.is_empty());
            if params.continue_token.is_none() {
                self.list_ends(metadata.resource_version.unwrap_or_default(), seen);
                return Ok(());
            }
        }
    }
}

/// A resourceVersion as a number, which it is on every server with etcd.
fn number(version: &str) -> Option<u64> {
    version.parse().ok()
}

/// Whether the connection was closed within a chunk, as when an API server stops. That ends a watch like any other.
fn is_cut_off(error: &io::Error) -> bool {
    let mut cause = error.get_ref().map(|error| error as &(dyn std::error::Error + 'static));
    let mut cut_off = error.kind() == io::ErrorKind::UnexpectedEof;
    while let Some(error) = cause.filter(|_| !cut_off) {
        // `source` of an `io::Error` leaves out the error in it.
        cut_off = error.downcast_ref().is_some_and(is_cut_off);
        cause = error.source();
    }
    cut_off
}

/// A request that failed.
fn refused(error: kube::Error, listing: bool) -> WatchError {
    match &error {
        kube::Error::Api(status) if status.code == 410 => EXPIRED,
        // "sendInitialEvents is forbidden" where the feature is off.
        kube::Error::Api(status) if listing && matches!(status.code, 400 | 422) => {
            WatchError::StreamingUnsupported
        }
        kube::Error::Api(_) => failed(Stage::Refused, error),
        kube::Error::SerdeError(_) | kube::Error::ReadEvents(_) => failed(Stage::Broken, error),
        _ => failed(Stage::Unanswered, error),
    }
}

/// An answer that failed after it had begun.
fn broken(error: kube::Error) -> WatchError {
    match &error {
        kube::Error::Api(status) if status.code == 410 => EXPIRED,
        _ => failed(Stage::Broken, error),
    }
}

fn failed(stage: Stage, error: kube::Error) -> WatchError {
    WatchError::Failed(stage, client::failure(error))
}

fn invalid_request(error: kube::core::request::Error) -> WatchError {
    WatchError::Failed(Stage::Refused, Failure::Unavailable(error.to_string()))
}

#[cfg(test)]
mod tests;
