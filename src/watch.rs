//! One watch: a consistent list, then events, for ever. What it sees goes into the world.
//!
//! kube's own watcher hides bookmarks, so that a watch that went silent cannot be told from a quiet one; it lists
//! from any version, and resumes a watch that stalled: after an etcd restore that one is silent for ever.

use std::time::{Duration, Instant};

use futures::StreamExt;
use kube::{
    Client,
    api::{ListParams, WatchEvent, WatchParams},
    core::{ObjectList, Request},
};
use serde::de::DeserializeOwned;

use crate::{
    backoff::{Backoff, Retry},
    client::Failure,
    object::Meta,
    ops::log::LogOnce,
};

/// The API server ends a watch after this time; the next one resumes where it ended.
const WATCH: Duration = Duration::from_secs(60);
/// Bookmarks come about once a minute, but a quiet resource misses some. None for this long: the watch has stalled.
const STALL: Duration = Duration::from_secs(180);
/// For servers that cannot stream a list.
const PAGE: u32 = 5000;
const BACKOFF: Backoff = Backoff::new(Duration::from_millis(200), Duration::from_secs(10));

/// What to watch.
#[derive(Debug, Clone)]
pub struct Subject {
    /// What to call it in logs.
    pub name: String,
    /// The path of its collection.
    pub path: String,
    pub label_selector: Option<String>,
    pub field_selector: Option<String>,
}

/// What a watch saw.
pub enum Event<T> {
    /// A fresh list begins.
    Begin,
    Applied(T),
    Deleted(T),
    /// The list is complete, as of this version.
    End(String),
    /// Nothing new, but the watch lives.
    Bookmark,
}

/// What the watched objects have in common.
pub trait Watched: Clone + DeserializeOwned + Send + 'static {
    fn meta(&self) -> &Meta;
}

impl Watched for crate::object::Object {
    fn meta(&self) -> &Meta {
        &self.metadata
    }
}

impl Watched for crate::object::NamespaceObject {
    fn meta(&self) -> &Meta {
        &self.metadata
    }
}

/// Why a watch did not go on.
#[derive(Debug, thiserror::Error)]
enum Broken {
    /// The server has no streaming lists: list in pages.
    #[error("the API server does not stream lists")]
    NoStreaming,
    /// The version to resume from is gone, or the watch stalled: list anew.
    #[error("{0}")]
    Stale(&'static str),
    #[error("{0}")]
    Failed(Failure),
}

/// How far a watch has come: the version to resume from, none before the list is complete.
type Position = Option<String>;

/// Watches for ever. Failures are logged, once until they change, and retried.
pub async fn run<T: Watched>(client: Client, subject: Subject, sink: impl FnMut(Event<T>)) {
    run_for(client, subject, STALL, sink).await;
}

/// As [`run`], with another time after which a watch without life has stalled.
pub async fn run_for<T: Watched>(
    client: Client,
    subject: Subject,
    stall: Duration,
    mut sink: impl FnMut(Event<T>),
) {
    let request = Request::new(&*subject.path);
    let name = &*subject.name;
    let mut position: Position = None;
    let mut streaming = true;
    let mut alive = Instant::now();
    let mut retry = Retry::new(BACKOFF);
    let mut log_once = LogOnce::default();
    loop {
        let attempt = Attempt { client: &client, request: &request, subject: &subject, stall };
        let begun = Instant::now();
        let lists = position.is_none() && !streaming;
        let mut sink = |event: Event<T>| {
            alive = Instant::now();
            sink(event);
        };
        let outcome = match lists {
            true => attempt.list(&mut position, &mut sink).await,
            false => attempt.watch(&mut position, &mut sink).await,
        };
        match outcome {
            Ok(()) if alive.elapsed() > stall => {
                tracing::info!(watch = name, "the watch shows no life and begins anew with a fresh list");
                position = None;
                continue;
            }
            // A server that ends every watch at once must not be asked without end.
            Ok(()) if begun.elapsed() < Duration::from_secs(1) && !lists => {}
            Ok(()) => {
                retry.reset();
                log_once.resolved();
                continue;
            }
            Err(Broken::NoStreaming) => {
                tracing::info!(watch = name, "the API server does not stream lists, listing in pages");
                streaming = false;
                continue;
            }
            Err(Broken::Stale(why)) => {
                tracing::info!(watch = name, why, "watch begins anew with a fresh list");
                position = None;
            }
            Err(Broken::Failed(failure)) => {
                let text = explain(name, &failure);
                if log_once.is_new(&text) {
                    tracing::warn!(watch = name, "{text}; retrying");
                }
            }
        }
        tokio::time::sleep(retry.next_delay()).await;
    }
}

struct Attempt<'a> {
    client: &'a Client,
    request: &'a Request,
    subject: &'a Subject,
    stall: Duration,
}

impl Attempt<'_> {
    /// Watches from a position, or streams the list first. Ends well when the server ends the watch in time.
    async fn watch<T: Watched>(
        &self,
        position: &mut Position,
        sink: &mut impl FnMut(Event<T>),
    ) -> Result<(), Broken> {
        let listing = position.is_none();
        let params = WatchParams {
            label_selector: self.subject.label_selector.clone(),
            field_selector: self.subject.field_selector.clone(),
            timeout: Some(u32::try_from(WATCH.as_secs()).unwrap_or(u32::MAX)),
            bookmarks: true,
            send_initial_events: listing,
        };
        if listing {
            // Before the request: what we write from now on, the list may not show yet.
            sink(Event::Begin);
        }
        // An empty version asks for a consistent list; kube's own watcher would take any.
        let request =
            self.request.watch(&params, position.as_deref().unwrap_or_default()).map_err(bad_request)?;
        let events = tokio::time::timeout(self.stall, self.client.request_events::<T>(request))
            .await
            .map_err(|_| Broken::Stale("no answer"))?
            .map_err(|error| refused(error, listing))?;
        self.follow(events, position, sink).await
    }

    async fn follow<T: Watched>(
        &self,
        events: impl futures::Stream<Item = kube::Result<WatchEvent<T>>>,
        position: &mut Position,
        sink: &mut impl FnMut(Event<T>),
    ) -> Result<(), Broken> {
        let mut events = std::pin::pin!(events);
        loop {
            let event = tokio::time::timeout(self.stall, events.next())
                .await
                .map_err(|_| Broken::Stale("the watch is silent"))?;
            let Some(event) = event else {
                return match position {
                    Some(_) => Ok(()),
                    None => Err(Broken::Stale("the list broke off")),
                };
            };
            match event.map_err(|error| refused(error, false))? {
                WatchEvent::Added(object) | WatchEvent::Modified(object) => {
                    advance(position, object.meta());
                    sink(Event::Applied(object));
                }
                WatchEvent::Deleted(object) => {
                    advance(position, object.meta());
                    sink(Event::Deleted(object));
                }
                WatchEvent::Bookmark(bookmark) => {
                    if bookmark.metadata.annotations.contains_key("k8s.io/initial-events-end") {
                        sink(Event::End(bookmark.metadata.resource_version.clone()));
                        *position = Some(bookmark.metadata.resource_version);
                    } else {
                        if position.is_some() {
                            *position = Some(bookmark.metadata.resource_version);
                        }
                        sink(Event::Bookmark);
                    }
                }
                WatchEvent::Error(status) => return Err(refused(kube::Error::Api(status), false)),
            }
        }
    }

    /// Lists in pages; the watch goes on from there.
    async fn list<T: Watched>(
        &self,
        position: &mut Position,
        sink: &mut impl FnMut(Event<T>),
    ) -> Result<(), Broken> {
        sink(Event::Begin);
        let mut params = ListParams {
            label_selector: self.subject.label_selector.clone(),
            field_selector: self.subject.field_selector.clone(),
            ..ListParams::default()
        }
        .limit(PAGE);
        loop {
            let request = self.request.list(&params).map_err(bad_request)?;
            let page: ObjectList<T> = tokio::time::timeout(self.stall, self.client.request(request))
                .await
                .map_err(|_| Broken::Stale("no answer"))?
                .map_err(|error| refused(error, false))?;
            page.items.into_iter().for_each(|object| sink(Event::Applied(object)));
            params.continue_token = page.metadata.continue_.filter(|token| !token.is_empty());
            if params.continue_token.is_none() {
                let version = page.metadata.resource_version.unwrap_or_default();
                sink(Event::End(version.clone()));
                *position = Some(version);
                return Ok(());
            }
        }
    }
}

/// Events move the position only once the list is complete: a list that broke off cannot be resumed.
fn advance(position: &mut Position, meta: &Meta) {
    if let Some(version) = position {
        version.clone_from(&meta.resource_version);
    }
}

fn refused(error: kube::Error, listing: bool) -> Broken {
    match &error {
        kube::Error::Api(status) if status.code == 410 => Broken::Stale("the version to resume from is gone"),
        // "sendInitialEvents is forbidden" where the feature is off; ignored by servers that do not know it.
        kube::Error::Api(status) if listing && matches!(status.code, 400 | 422) => Broken::NoStreaming,
        _ => Broken::Failed(error.into()),
    }
}

fn bad_request(error: kube::core::request::Error) -> Broken {
    Broken::Failed(Failure::Unavailable(error.to_string()))
}

/// What is wrong, and what to do about it.
fn explain(name: &str, failure: &Failure) -> String {
    match failure {
        Failure::Forbidden(detail) => {
            format!(
                "the watch of {name} is not allowed ({detail}): apply the RBAC of deploy/ for this identity"
            )
        }
        Failure::Unavailable(detail) => {
            format!(
                "the API server cannot be reached for {name} ({detail}): check the address and the network"
            )
        }
        other => format!("the watch of {name} failed: {other}"),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use serde_json::{Value, json};
    use tokio::{sync::Notify, time::Instant as Clock};

    use super::*;
    use crate::{
        object::Object,
        testing::api::{Asked, api_server, refusal},
    };

    #[tokio::test(start_paused = true)]
    async fn a_server_that_ends_every_watch_at_once_is_asked_ever_later_though_it_cannot_stream_lists() {
        let (watches, enough) = (Arc::new(Mutex::new(Vec::new())), Arc::new(Notify::new()));
        let (asked_at, full) = (watches.clone(), enough.clone());
        let client = api_server(move |asked: Asked| {
            let answer = if asked.uri.contains("sendInitialEvents") {
                refusal(422, "Invalid")
            } else if asked.uri.contains("watch=true") {
                let mut watches = asked_at.lock().unwrap();
                watches.push(Clock::now());
                if watches.len() == 4 {
                    full.notify_one();
                }
                (200, Value::Null)
            } else {
                (200, json!({"metadata": {"resourceVersion": "7"}, "items": []}))
            };
            async move { answer }
        });
        let subject = Subject {
            name: "a test".to_owned(),
            path: "/api/v1/configmaps".to_owned(),
            label_selector: None,
            field_selector: None,
        };
        tokio::select! {
            () = run(client, subject, |_: Event<Object>| {}) => {}
            () = enough.notified() => {}
        }
        let watches = watches.lock().unwrap();
        assert!(watches[3] - watches[0] >= (BACKOFF.first * 7) / 2, "{watches:?}");
    }
}
