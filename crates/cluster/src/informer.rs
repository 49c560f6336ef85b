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
    keys::Keys,
    object::{Kind, Meta, NamespaceObject, Object, ObjectKey, watched::Watched},
    world::{Effect, ObservedCompanion, ObservedSource, Scope, SharedWorld, SourceEvent, WatchId, World},
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

/// Takes no note of anything.
impl WatchObserver for () {}

/// Applies the events of one watch to the world.
pub struct Informer {
    watch: WatchId,
    shared: Informers,
}

impl Informers {
    /// Starts the watches. None of the tasks ever ends.
    pub fn start(&self, tasks: &mut JoinSet<&'static str>, client: &Client) {
        for watch in self.scope.watches() {
            self.start_watch(tasks, client, watch, None);
        }
    }

    /// Starts one watch, in one namespace or in all.
    pub fn start_watch(
        &self,
        tasks: &mut JoinSet<&'static str>,
        client: &Client,
        watch: WatchId,
        namespace: Option<&str>,
    ) {
        let informer = Informer { watch, shared: self.clone() };
        let spec = spec(watch, &self.scope.keys, namespace);
        let (client, restores) = (client.clone(), self.restores.clone());
        tasks.spawn(async move {
            match watch {
                WatchId::Namespaces => {
                    watch::run(client, spec, restores, |event| informer.namespace(event)).await
                }
                WatchId::Companions(kind) => {
                    watch::run(client, spec, restores, |event| informer.companion(kind, event)).await
                }
                WatchId::Sources(kind) => {
                    watch::run(client, spec, restores, |event| informer.source(kind, event)).await
                }
            }
            "watch"
        });
    }

    /// Takes the events of a watch that a test has in place of [`watch::run`].
    #[cfg(any(test, feature = "testing"))]
    pub fn informer(&self, watch: WatchId) -> Informer {
        Informer { watch, shared: self.clone() }
    }

    /// Lists once what a watch would show, in all namespaces.
    pub async fn list(&self, client: &Client, watch: WatchId) -> Result<(), Failure> {
        let informer = Informer { watch, shared: self.clone() };
        let (client, spec) = (client.clone(), spec(watch, &self.scope.keys, None));
        match watch {
            WatchId::Namespaces => watch::list(client, spec, |event| informer.namespace(event)).await,
            WatchId::Companions(kind) => {
                watch::list(client, spec, |event| informer.companion(kind, event)).await
            }
            WatchId::Sources(kind) => watch::list(client, spec, |event| informer.source(kind, event)).await,
        }
    }

    /// Lists once what a watch would show in these namespaces. Returns those in which that is allowed.
    pub async fn list_in(
        &self,
        client: &Client,
        watch: WatchId,
        namespaces: &BTreeSet<String>,
    ) -> Result<BTreeSet<String>, Failure> {
        let informer = Informer { watch, shared: self.clone() };
        let mut seen = BTreeSet::new();
        match watch {
            WatchId::Namespaces => {
                informer.namespace(Event::Init);
                for name in namespaces {
                    // A user with `get` on one namespace usually has no `list`.
                    match client::get(client, "/api/v1/namespaces", name).await {
                        Ok(found) => informer.namespace(Event::Apply(found)),
                        // It does not exist.
                        Err(Failure::NotFound) => {}
                        Err(Failure::Forbidden(_)) => continue,
                        Err(failure) => return Err(failure),
                    }
                    seen.insert(name.clone());
                }
                informer.namespace(Event::InitDone(String::new()));
            }
            WatchId::Companions(kind) | WatchId::Sources(kind) => {
                let handle = |event: Event<Object>| match watch {
                    WatchId::Companions(_) => informer.companion(kind, event),
                    _ => informer.source(kind, event),
                };
                handle(Event::Init);
                for name in namespaces {
                    // Several lists are one for the world: it removes what a list has not shown when it ends.
                    let listed =
                        watch::list(client.clone(), spec(watch, &self.scope.keys, Some(name)), |event| {
                            if !matches!(event, Event::Init | Event::InitDone(_)) {
                                handle(event);
                            }
                        });
                    match listed.await {
                        Ok(()) => drop(seen.insert(name.clone())),
                        Err(Failure::Forbidden(_) | Failure::NotFound) => {}
                        Err(failure) => return Err(failure),
                    }
                }
                handle(Event::InitDone(String::new()));
            }
        }
        Ok(seen)
    }
}

fn spec(watch: WatchId, keys: &Keys, namespace: Option<&str>) -> WatchSpec {
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

impl Informer {
    /// Handles an event as the watch does.
    #[cfg(any(test, feature = "testing"))]
    pub fn handle_event(&self, event: Event<Object>) {
        match self.watch {
            WatchId::Namespaces => {
                self.namespace(event.map(|Object { metadata, .. }| NamespaceObject { metadata }));
            }
            WatchId::Companions(kind) => self.companion(kind, event),
            WatchId::Sources(kind) => self.source(kind, event),
        }
    }

    fn source(&self, kind: Kind, event: Event<Object>) {
        let scope = &self.shared.scope;
        self.handle(
            event,
            |object| ObservedSource::read(&scope.keys, &scope.rules, kind, object),
            World::apply_source,
            |world, object| world.delete_source(kind, &object.metadata),
        );
    }

    fn companion(&self, kind: Kind, event: Event<Object>) {
        self.handle(
            event,
            |object| ObservedCompanion::read(&self.shared.scope.keys, kind, object),
            World::apply_companion,
            |world, object| world.delete_companion(kind, &object.metadata),
        );
    }

    fn namespace(&self, event: Event<NamespaceObject>) {
        let mut complaint = None;
        let apply = |world: &mut World, meta: Meta| {
            let (effect, text) = world.apply_namespace(&meta);
            complaint = text.map(|text| (meta.name, text));
            effect
        };
        let delete = |world: &mut World, object: NamespaceObject| {
            world.delete_namespace(&object.metadata.name);
            Effect::default()
        };
        self.handle(event, |object| object.metadata, apply, delete);
        // Logged after the world's lock is released: a log may be slow.
        if let Some((namespace, text)) = complaint {
            tracing::warn!(namespace, "{text}");
        }
    }

    /// `read` is the slow part, so it runs before the world is locked.
    fn handle<T: Watched, R>(
        &self,
        event: Event<T>,
        read: impl FnOnce(T) -> R,
        apply: impl FnOnce(&mut World, R) -> Effect,
        delete: impl FnOnce(&mut World, T) -> Effect,
    ) {
        let Informers { world, requeue, observer, .. } = &self.shared;
        // `Init` comes before the request for a list, so it does not show that the API server answers.
        let received = !matches!(event, Event::Init);
        let mut effect = match event {
            Event::Init => {
                world.write(|world| world.list_begins(self.watch));
                observer.list_begins(self.watch);
                Effect::default()
            }
            Event::Apply(object) => {
                observer.shown(self.watch, object.meta());
                let read = read(object);
                world.write(|world| apply(world, read))
            }
            Event::Delete(object) => world.write(|world| delete(world, object)),
            Event::InitDone(version) => {
                let version = version.parse().unwrap_or(u64::MAX);
                let effect = world.write(|world| world.list_ends(self.watch, version));
                observer.listed(self.watch);
                effect
            }
            Event::Bookmark => Effect::default(),
            Event::Undecodable(_) => {
                observer.undecodable(self.watch);
                Effect::default()
            }
        };
        if received {
            observer.received(self.watch);
        }
        for (source, event) in &effect.events {
            self.log(source, *event);
        }
        if !effect.requeue.is_empty() {
            // The same events lead to the same writes, in the same order.
            effect.requeue.sort_unstable();
            requeue(effect.requeue);
        }
    }

    fn log(&self, source: &ObjectKey, event: SourceEvent) {
        let kind = source.kind.as_str();
        let names = self
            .shared
            .world
            .read(|world| world.source(source).and_then(|source| source.key_names()).cloned());
        let keys = names.as_deref().unwrap_or_default();
        match event {
            SourceEvent::Added => tracing::info!(kind, %source, keys, "source added"),
            SourceEvent::Changed => tracing::info!(kind, %source, keys, "source changed"),
            SourceEvent::Removed => tracing::info!(kind, %source, "source removed"),
        }
    }
}
