//! Watches one resource: a consistent list, then events, without end.
//!
//! kube-runtime's `watcher` does not fit, for three reasons (as of 5.0). It hides bookmarks, so that a stalled watch looks
//! like a quiet one, and the resourceVersion of a list, which our own writes and the signs of a restore of etcd
//! (`restores`) are compared with. A list that it streams may be older than what was already seen (`NotOlderThan` 0). It
//! requires `Debug` of what it watches, Secrets included.

mod decode;
mod list;
pub mod object;
mod restores;

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
use tokio::time::Instant;

use crate::client::{self, with_timeout};
use list::{List, ListSplitter};
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
/// A watch that ends sooner than this counts as a failure, so that a server that ends every watch at once is backed off.
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
/// After this many failures in a row to resume from a resourceVersion, the resource is listed again. Requests without an
/// answer do not count, so that not every outage ends with a list.
const MAX_FAILED_RESUMES: u32 = 5;
/// How many objects that cannot be decoded a watch logs.
const MAX_LOGGED_UNDECODABLE: usize = 100;
/// The timeout of the request whether a version was reached.
const POSITION_TIMEOUT: Duration = Duration::from_secs(10);

/// What to watch.
#[derive(Debug, Clone)]
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

impl<T> Event<T> {
    #[cfg(any(test, feature = "testing"))]
    pub fn map<U>(self, map: impl FnOnce(T) -> U) -> Event<U> {
        match self {
            Self::Init => Event::Init,
            Self::Apply(object) => Event::Apply(map(object)),
            Self::Delete(object) => Event::Delete(map(object)),
            Self::InitDone(version) => Event::InitDone(version),
            Self::Bookmark => Event::Bookmark,
            Self::Undecodable(object) => Event::Undecodable(object),
        }
    }
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
    /// There was no answer.
    #[error("{0}")]
    Unanswered(Failure),
    /// The answer is an error.
    #[error("{0}")]
    Refused(Failure),
    /// The answer broke off, or cannot be decoded.
    #[error("{0}")]
    Broken(Failure),
}

const EXPIRED: WatchError = WatchError::Relist("the resourceVersion has expired");

/// The resourceVersion to resume from; `None` before the list is complete.
type ResumeVersion = Option<String>;

/// Watches without end. A failure is retried, and logged once until it changes.
pub async fn run<T: Watched>(
    client: Client,
    spec: WatchSpec,
    restores: Restores,
    sink: impl FnMut(Event<T>),
) {
    run_with_stall_timeout(client, spec, restores, STALL_TIMEOUT, sink).await;
}

/// Lists once, from a consistent state, and hands each object to `sink`.
pub async fn list<T: Watched>(
    client: Client,
    spec: WatchSpec,
    mut sink: impl FnMut(Event<T>),
) -> Result<(), Failure> {
    let watcher = Watcher {
        page_size: LARGE_PAGE_SIZE,
        ..Watcher::new(client, spec, Restores::default(), STALL_TIMEOUT)
    };
    let (mut version, complete) = (None, tokio::sync::Notify::new());
    let mut stop_at_end = |event: Event<T>| {
        if matches!(event, Event::InitDone(_)) {
            complete.notify_one();
        }
        sink(event);
    };
    let streamed = tokio::select! {
        outcome = watcher.watch(&mut version, &mut stop_at_end) => outcome,
        () = complete.notified() => return Ok(()),
    };
    let outcome = match streamed {
        // A user may have the verb list and not watch.
        Err(WatchError::StreamingUnsupported | WatchError::Refused(Failure::Forbidden(_))) => {
            watcher.list(&mut None, &mut sink).await
        }
        outcome => outcome,
    };
    outcome.map_err(|error| match error {
        WatchError::Unanswered(failure) | WatchError::Refused(failure) | WatchError::Broken(failure) => {
            failure
        }
        other => Failure::Unavailable(other.to_string()),
    })
}

/// As [`run`], for tests that cannot wait for the default stall timeout.
pub async fn run_with_stall_timeout<T: Watched>(
    client: Client,
    spec: WatchSpec,
    restores: Restores,
    stall_timeout: Duration,
    mut sink: impl FnMut(Event<T>),
) {
    let mut restored = restores.subscribe();
    let watcher = Watcher::new(client, spec, restores, stall_timeout);
    let name = &*watcher.spec.name;
    let mut version: ResumeVersion = None;
    let mut streaming = true;
    let mut last_event = Instant::now();
    let (mut refused, mut broken) = (Retry::new(REFUSED_BACKOFF), Retry::new(BROKEN_BACKOFF));
    let mut failed_resumes = 0;
    let mut log_once = LogOnce::default();
    let mut logged_undecodable = HashSet::new();
    // The newest version seen of this resource.
    let mut position = 0;
    let mut broke_off = false;
    loop {
        let (resumed_from, started, count) = (version.clone(), Instant::now(), watcher.restores.count());
        let mut sink = |event: Event<T>| {
            last_event = Instant::now();
            if let Event::InitDone(listed) = &event {
                if watcher.report_restore(number(listed), position, count) {
                    // Not complete before the other watches have begun to list, too: companions that the restore
                    // erased would be created again for sources that it erased as well.
                    return;
                }
                position = number(listed).unwrap_or_default();
            }
            if let Event::Undecodable(object) = &event
                && logged_undecodable.len() < MAX_LOGGED_UNDECODABLE
                && logged_undecodable.insert((object.namespace.clone(), object.name.clone()))
            {
                let Undecodable { namespace, name: object, resource_version } = object;
                tracing::warn!(
                    watch = name,
                    namespace,
                    object,
                    resource_version,
                    "an object cannot be decoded: it is ignored"
                );
            }
            sink(event);
        };
        let lists = version.is_none() && !streaming;
        let check = (broke_off && !lists).then(|| resumed_from.as_deref().and_then(number)).flatten();
        let attempt = async {
            match lists {
                true => watcher.list(&mut version, &mut sink).await,
                false => watcher.watch(&mut version, &mut sink).await,
            }
        };
        let outcome = tokio::select! {
            biased;
            Ok(()) = restored.changed() => Err(WatchError::Restored),
            outcome = attempt => outcome,
            never = watcher.check_position(check, count) => match never {},
        };
        position = version.as_deref().and_then(number).unwrap_or(position);
        broke_off = !lists && (outcome.is_err() || started.elapsed() + MIN_WATCH_TIME < WATCH_TIMEOUT);
        if version != resumed_from {
            failed_resumes = 0;
        }
        if !matches!(outcome, Err(WatchError::Unanswered(_) | WatchError::Refused(_))) {
            refused.reset();
        }
        let mut pause = match outcome {
            Ok(()) => {
                // A list proves nothing about the watch that follows.
                if !lists {
                    broken.reset();
                    log_once.resolved();
                }
                Duration::ZERO
            }
            Err(WatchError::StreamingUnsupported) => {
                tracing::info!(watch = name, "the API server does not stream lists; listing in pages");
                streaming = false;
                Duration::ZERO
            }
            Err(WatchError::Restored) => {
                // What was seen before the restore says nothing about the list that follows.
                (version, position) = (None, 0);
                Duration::ZERO
            }
            Err(WatchError::Relist(reason)) => {
                tracing::info!(watch = name, reason, "listing again");
                version = None;
                broken.next_delay()
            }
            Err(
                ref error @ (WatchError::Unanswered(ref failure)
                | WatchError::Refused(ref failure)
                | WatchError::Broken(ref failure)),
            ) => {
                let text = failure.explain(&format!("the watch of {name}"));
                if log_once.is_new(&text) {
                    tracing::warn!(watch = name, "{text}; retrying");
                }
                failed_resumes += u32::from(!matches!(error, WatchError::Unanswered(_)));
                match error {
                    WatchError::Broken(_) => broken.next_delay(),
                    _ => refused.next_delay(),
                }
            }
        };
        let stalled = last_event.elapsed() > stall_timeout;
        if version.is_some() && (stalled || failed_resumes >= MAX_FAILED_RESUMES) {
            let reason = if stalled { "the watch has stalled" } else { "the watch cannot be resumed" };
            tracing::info!(watch = name, reason, "listing again");
            version = None;
            pause = pause.max(broken.next_delay());
        }
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            Ok(()) = restored.changed() => (version, position) = (None, 0),
        }
    }
}

struct Watcher {
    client: Client,
    request: Request,
    spec: WatchSpec,
    restores: Restores,
    stall_timeout: Duration,
    page_size: u32,
}

impl Watcher {
    fn new(client: Client, spec: WatchSpec, restores: Restores, stall_timeout: Duration) -> Self {
        Self {
            client,
            request: Request::new(&*spec.path),
            spec,
            restores,
            stall_timeout,
            page_size: PAGE_SIZE,
        }
    }

    /// Watches from a resourceVersion, or streams the list first. `Ok` when the server ends the watch, but not at once.
    async fn watch<T: Watched>(
        &self,
        version: &mut ResumeVersion,
        sink: &mut impl FnMut(Event<T>),
    ) -> Result<(), WatchError> {
        let (listing, started) = (version.is_none(), Instant::now());
        let params = WatchParams {
            label_selector: self.spec.label_selector.clone(),
            field_selector: self.spec.field_selector.clone(),
            timeout: Some(u32::try_from(WATCH_TIMEOUT.as_secs()).unwrap_or(u32::MAX)),
            bookmarks: true,
            send_initial_events: listing,
        };
        if listing {
            // Before the request, because the list may miss what is written from here on.
            sink(Event::Init);
        }
        // An empty resourceVersion asks for a consistent list.
        let mut request =
            self.request.watch(&params, version.as_deref().unwrap_or_default()).map_err(invalid_request)?;
        // A compressed watch is one gzip member an event since Kubernetes 1.37; kube's client decodes only the first.
        request.headers_mut().insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
        let lines = self.answer(self.client.request_stream(request)).await?;
        let lines = lines.map_err(|error| refused(error, listing))?;
        self.follow(lines, version, sink).await?;
        match started.elapsed() < MIN_WATCH_TIME {
            true => Err(WatchError::Broken(Failure::Unavailable("the watch ended at once".to_owned()))),
            false => Ok(()),
        }
    }

    async fn follow<T: Watched>(
        &self,
        lines: impl AsyncBufRead,
        version: &mut ResumeVersion,
        sink: &mut impl FnMut(Event<T>),
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
                    return match version {
                        Some(_) => Ok(()),
                        None => Err(WatchError::Relist("the watch ended before the list was complete")),
                    };
                }
            }
            let event = match decode::event::<T>(&line) {
                Ok(event) => event,
                Err(_) if !line.ends_with(b"\n") || line.trim_ascii().is_empty() => continue,
                Err(object) => {
                    advance(version, &object.resource_version);
                    sink(Event::Undecodable(object));
                    continue;
                }
            };
            match event {
                WatchEvent::Added(object) | WatchEvent::Modified(object) => {
                    advance(version, &object.meta().resource_version);
                    sink(Event::Apply(object));
                }
                WatchEvent::Deleted(object) => {
                    advance(version, &object.meta().resource_version);
                    sink(Event::Delete(object));
                }
                WatchEvent::Bookmark(bookmark) => {
                    if bookmark.metadata.annotations.contains_key("k8s.io/initial-events-end") {
                        sink(Event::InitDone(bookmark.metadata.resource_version.clone()));
                        *version = Some(bookmark.metadata.resource_version);
                    } else {
                        if version.is_some() {
                            *version = Some(bookmark.metadata.resource_version);
                        }
                        sink(Event::Bookmark);
                    }
                }
                WatchEvent::Error(status) => return Err(broken(kube::Error::Api(status))),
            }
        }
    }

    async fn answer<T>(&self, response: impl Future<Output = T>) -> Result<T, WatchError> {
        tokio::time::timeout(self.stall_timeout, response).await.map_err(|_| WatchError::Relist("no answer"))
    }

    /// Hands on the objects of a page while it is received.
    async fn page<T: Watched>(
        &self,
        request: http::Request<Vec<u8>>,
        sink: &mut impl FnMut(Event<T>),
    ) -> kube::Result<ListMeta> {
        let mut list = ListSplitter::default();
        let mut answer = std::pin::pin!(self.client.request_stream(request).await?);
        loop {
            let received = answer.fill_buf().await.map_err(kube::Error::ReadEvents)?;
            if received.is_empty() {
                return list.finish().map_err(kube::Error::SerdeError);
            }
            list.push(received, |object| sink(object.map_or_else(Event::Undecodable, Event::Apply)));
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
    async fn list<T: Watched>(
        &self,
        version: &mut ResumeVersion,
        sink: &mut impl FnMut(Event<T>),
    ) -> Result<(), WatchError> {
        sink(Event::Init);
        let mut params = ListParams {
            label_selector: self.spec.label_selector.clone(),
            field_selector: self.spec.field_selector.clone(),
            ..ListParams::default()
        }
        .limit(self.page_size);
        loop {
            let request = self.request.list(&params).map_err(invalid_request)?;
            let page = self.answer(self.page(request, sink)).await?;
            let metadata = page.map_err(|error| refused(error, false))?;
            params.continue_token = metadata.continue_.filter(|token| !token.is_empty());
            if params.continue_token.is_none() {
                let listed = metadata.resource_version.unwrap_or_default();
                sink(Event::InitDone(listed.clone()));
                *version = Some(listed);
                return Ok(());
            }
        }
    }
}

/// A resourceVersion as a number, which it is on every server with etcd.
fn number(version: &str) -> Option<u64> {
    version.parse().ok()
}

/// Events advance the version only once the list is complete, because an incomplete list cannot be resumed.
fn advance(version: &mut ResumeVersion, to: &str) {
    if let Some(version) = version.as_mut().filter(|_| !to.is_empty()) {
        to.clone_into(version);
    }
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
        kube::Error::Api(_) => WatchError::Refused(client::failure(error)),
        kube::Error::SerdeError(_) | kube::Error::ReadEvents(_) => WatchError::Broken(client::failure(error)),
        _ => WatchError::Unanswered(client::failure(error)),
    }
}

/// An answer that failed after it had begun.
fn broken(error: kube::Error) -> WatchError {
    match &error {
        kube::Error::Api(status) if status.code == 410 => EXPIRED,
        _ => WatchError::Broken(client::failure(error)),
    }
}

fn invalid_request(error: kube::core::request::Error) -> WatchError {
    WatchError::Refused(Failure::Unavailable(error.to_string()))
}

#[cfg(test)]
mod tests;
