//! Watches → world: one task for each watch, which enqueues every source that has to be reconciled.

use std::{collections::BTreeSet, sync::Arc};

use kube::Client;
use tokio::task::JoinSet;

use crate::{
    client,
    watch::{self, Event, Restores, WatchSpec},
};
use lockstep_core::{
    failure::Failure,
    object::{Meta, Object, ObjectKey},
    world::{Effect, ObservedCompanion, ObservedSource, Scope, SharedWorld, SourceEvent, WatchId},
};

/// What all watches share.
#[derive(Clone)]
pub struct Informers {
    pub scope: Scope,
    pub world: SharedWorld,
    /// Enqueues the sources to reconcile.
    pub requeue: Arc<dyn Fn(Vec<ObjectKey>) + Send + Sync>,
    pub restores: Restores,
    pub observer: Arc<dyn WatchObserver>,
}

/// Is told what the watches do, once the world shows it: for metrics, probes and pages.
pub trait WatchObserver: Send + Sync {
    /// A list is about to be requested.
    fn list_begins(&self, _: WatchId) {}
    /// The API server has sent something.
    fn received(&self, _: WatchId) {}
    /// A list or a watch has shown an object, which the world does not have yet.
    fn shown(&self, _: WatchId, _: &Meta) {}
    /// A list is complete.
    fn listed(&self, _: WatchId) {}
    /// An object cannot be decoded, and is skipped.
    fn undecodable(&self, _: WatchId) {}
}

impl Informers {
    /// Starts the watches. None of the tasks ever ends.
    pub fn start(&self, tasks: &mut JoinSet<()>, client: &Client) {
        for watch in self.scope.watches() {
            self.start_watch(tasks, client, watch, None);
        }
    }

    /// Starts one watch, in one namespace or in all.
    pub fn start_watch(
        &self,
        tasks: &mut JoinSet<()>,
        client: &Client,
        watch: WatchId,
        namespace: Option<&str>,
    ) {
        let shared = self.clone();
        let client = client.clone();
        let spec = self.spec(watch, namespace);
        tasks.spawn(async move {
            watch::run(client, spec, shared.restores.clone(), |event| shared.handle(watch, event)).await;
        });
    }

    /// Lists once what a watch would show, in all namespaces.
    pub async fn list(&self, client: &Client, watch: WatchId) -> Result<(), Failure> {
        watch::list(client.clone(), self.spec(watch, None), |event| self.handle(watch, event)).await
    }

    /// Lists once what a watch would show in these namespaces. Returns those in which that is allowed.
    pub async fn list_in(
        &self,
        client: &Client,
        watch: WatchId,
        namespaces: &BTreeSet<String>,
    ) -> Result<BTreeSet<String>, Failure> {
        let mut seen = BTreeSet::new();
        // Several lists are one for the world: it removes what a list has not shown when it ends.
        self.handle(watch, Event::Init);
        for name in namespaces {
            let listed = if watch == WatchId::Namespaces {
                self.read_namespace(client, name).await
            } else {
                let objects = |event| {
                    if !matches!(event, Event::Init | Event::InitDone(_)) {
                        self.handle(watch, event);
                    }
                };
                watch::list(client.clone(), self.spec(watch, Some(name)), objects).await
            };
            match listed {
                Ok(()) => {
                    seen.insert(name.clone());
                }
                Err(Failure::Forbidden(_) | Failure::NotFound) => {}
                Err(failure) => return Err(failure),
            }
        }
        self.handle(watch, Event::InitDone(String::new()));
        Ok(seen)
    }

    /// A user with `get` on one namespace usually has no `list`.
    async fn read_namespace(&self, client: &Client, name: &str) -> Result<(), Failure> {
        match client::get(client, "/api/v1/namespaces", name).await {
            Ok(found) => self.handle(WatchId::Namespaces, Event::Apply(found)),
            // That it does not exist is seen, too.
            Err(Failure::NotFound) => {}
            Err(failure) => return Err(failure),
        }
        Ok(())
    }

    fn spec(&self, watch: WatchId, namespace: Option<&str>) -> WatchSpec {
        let keys = &self.scope.keys;
        let (resource, label_selector) = match watch {
            WatchId::Namespaces => ("namespaces", None),
            WatchId::Companions(kind) => (kind.plural(), Some(format!("{}=true", keys.companion))),
            WatchId::Sources(kind) => (kind.plural(), Some(format!("{}=true", keys.managed))),
        };
        let path = match namespace {
            Some(namespace) if watch != WatchId::Namespaces => {
                format!("/api/v1/namespaces/{namespace}/{resource}")
            }
            _ => format!("/api/v1/{resource}"),
        };
        WatchSpec { name: watch.as_str().to_owned(), path, label_selector, field_selector: None }
    }

    /// Applies an event of a watch to the world.
    pub fn handle(&self, watch: WatchId, event: Event<Object>) {
        // `Init` comes before the request for a list, so it does not show that the API server answers.
        let received = !matches!(event, Event::Init);
        let mut effect = Effect::default();
        match event {
            Event::Init => {
                self.world.write(|world| world.list_begins(watch));
                self.observer.list_begins(watch);
            }
            Event::Apply(object) => {
                self.observer.shown(watch, &object.metadata);
                effect = self.apply(watch, object);
            }
            Event::Delete(object) => effect = self.delete(watch, &object.metadata),
            Event::InitDone(version) => {
                let version = version.parse().unwrap_or(u64::MAX);
                effect = self.world.write(|world| world.list_ends(watch, version));
                self.observer.listed(watch);
            }
            Event::Bookmark => {}
            Event::Undecodable(_) => self.observer.undecodable(watch),
        }
        if received {
            self.observer.received(watch);
        }
        for (source, event) in &effect.events {
            self.log(source, *event);
        }
        if !effect.requeue.is_empty() {
            // The same events lead to the same writes, in the same order.
            effect.requeue.sort_unstable();
            (self.requeue)(effect.requeue);
        }
    }

    /// An object is reduced to what is kept of it before the world is locked, because that takes long.
    fn apply(&self, watch: WatchId, object: Object) -> Effect {
        let Scope { keys, rules, .. } = &self.scope;
        match watch {
            WatchId::Sources(kind) => {
                let source = ObservedSource::read(keys, rules, kind, object);
                self.world.write(|world| world.apply_source(source))
            }
            WatchId::Companions(kind) => {
                let companion = ObservedCompanion::read(keys, kind, object);
                self.world.write(|world| world.apply_companion(companion))
            }
            WatchId::Namespaces => {
                let meta = object.metadata;
                let (effect, complaint) = self.world.write(|world| world.apply_namespace(&meta));
                // Not while the world is locked: a log may be slow.
                if let Some(text) = complaint {
                    tracing::warn!(namespace = meta.name, "{text}");
                }
                effect
            }
        }
    }

    fn delete(&self, watch: WatchId, meta: &Meta) -> Effect {
        self.world.write(|world| match watch {
            WatchId::Sources(kind) => world.delete_source(kind, meta),
            WatchId::Companions(kind) => world.delete_companion(kind, meta),
            WatchId::Namespaces => {
                world.delete_namespace(&meta.name);
                Effect::default()
            }
        })
    }

    fn log(&self, source: &ObjectKey, event: SourceEvent) {
        let kind = source.kind.as_str();
        let names =
            self.world.read(|world| world.source(source).and_then(|source| source.key_names()).cloned());
        let keys = names.as_deref().unwrap_or_default();
        let (keys, what) = match event {
            SourceEvent::Added => (Some(keys), "added"),
            SourceEvent::Changed => (Some(keys), "changed"),
            SourceEvent::Removed => (None, "removed"),
        };
        tracing::info!(kind, %source, keys, "source {what}");
    }
}
