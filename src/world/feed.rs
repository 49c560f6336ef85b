//! Watches → world: one task a watch, and word of every source that should be looked at again.

use std::sync::Arc;

use kube::Client;
use tokio::task::JoinSet;

use super::{
    Scope, SharedWorld,
    state::{Effect, Found, News, Source, Stream, World},
};
use crate::{
    keys::Keys,
    object::{Kind, Meta, NamespaceObject, Object, ObjectKey},
    ops::{
        health::{Condition, Readiness},
        metrics::Metrics,
    },
    watch::{self, Event, WatchSpec},
};

/// Starts the watches. None of the tasks ever ends.
pub fn start(
    tasks: &mut JoinSet<&'static str>,
    client: &Client,
    scope: &Scope,
    world: &SharedWorld,
    readiness: &Readiness,
    metrics: &Metrics,
    requeue: impl Fn(Vec<ObjectKey>) + Send + Sync + 'static,
) {
    let requeue: Arc<LookAt> = Arc::new(requeue);
    for stream in scope.streams() {
        let feed = Feed {
            stream,
            scope: scope.clone(),
            world: world.clone(),
            requeue: requeue.clone(),
            readiness: readiness.clone(),
            metrics: metrics.clone(),
        };
        let (client, subject) = (client.clone(), subject(stream, &scope.keys));
        tasks.spawn(async move {
            match stream {
                Stream::Namespaces => watch::run(client, subject, |event| feed.namespace(event)).await,
                Stream::Companions(kind) => {
                    watch::run(client, subject, |event| feed.companion(kind, event)).await
                }
                Stream::Sources(kind) => watch::run(client, subject, |event| feed.source(kind, event)).await,
            }
            "watch"
        });
    }
}

fn subject(stream: Stream, keys: &Keys) -> WatchSpec {
    let (resource, label_selector) = match stream {
        Stream::Namespaces => ("namespaces", None),
        Stream::Companions(kind) => (kind.plural(), Some(format!("{}=true", keys.companion))),
        Stream::Sources(kind) => (kind.plural(), Some(format!("{}=true", keys.managed))),
    };
    WatchSpec {
        name: stream.as_str().to_owned(),
        path: format!("/api/v1/{resource}"),
        label_selector,
        field_selector: None,
    }
}

type LookAt = dyn Fn(Vec<ObjectKey>) + Send + Sync;

/// Brings what a watch sees into the world, and what follows from it into the queue.
struct Feed {
    stream: Stream,
    scope: Scope,
    world: SharedWorld,
    requeue: Arc<LookAt>,
    readiness: Readiness,
    metrics: Metrics,
}

impl Feed {
    fn source(&self, kind: Kind, event: Event<Object>) {
        self.take(
            event,
            |object| Source::read(&self.scope.keys, &self.scope.limits, kind, object),
            World::apply_source,
            |world, object| world.delete_source(kind, &object.metadata),
        );
    }

    fn companion(&self, kind: Kind, event: Event<Object>) {
        self.take(
            event,
            |object| Found::read(&self.scope.keys, kind, object),
            World::apply_companion,
            |world, object| world.delete_companion(kind, &object.metadata),
        );
    }

    fn namespace(&self, event: Event<NamespaceObject>) {
        let mut complaint = None;
        let apply = |world: &mut World, meta: Meta| {
            let (effect, fault) = world.apply_namespace(&meta);
            complaint = fault.map(|fault| (meta.name, fault));
            effect
        };
        let delete = |world: &mut World, object: NamespaceObject| {
            world.delete_namespace(&object.metadata.name);
            Effect::default()
        };
        self.take(event, |object| object.metadata, apply, delete);
        // The world is free again: a log may be slow.
        if let Some((namespace, fault)) = complaint {
            tracing::warn!(namespace, "{fault}; it accepts from nowhere until mended");
        }
    }

    /// What takes time is done by `read`, while others have the world.
    fn take<T, R>(
        &self,
        event: Event<T>,
        read: impl FnOnce(T) -> R,
        apply: impl FnOnce(&mut World, R) -> Effect,
        delete: impl FnOnce(&mut World, T) -> Effect,
    ) {
        // A list that is yet to be asked for says nothing: it may be refused, or never answered, again and again.
        if !matches!(event, Event::Init) {
            self.readiness.watch_received(self.stream.as_str());
        }
        let effect = match event {
            Event::Init => {
                self.world.write(|world| world.begin(self.stream));
                self.metrics.watch_restarted(self.stream.as_str());
                Effect::default()
            }
            Event::Apply(object) => {
                let read = read(object);
                self.world.write(|world| apply(world, read))
            }
            Event::Delete(object) => self.world.write(|world| delete(world, object)),
            Event::InitDone(version) => {
                let version = version.parse().unwrap_or(u64::MAX);
                let effect = self.world.write(|world| world.end(self.stream, version));
                self.readiness.mark_true(Condition::Listed(self.stream.as_str()));
                effect
            }
            Event::Bookmark => Effect::default(),
        };
        for (source, news) in &effect.news {
            self.report(source, *news);
        }
        if !effect.requeue.is_empty() {
            (self.requeue)(effect.requeue);
        }
    }

    fn report(&self, source: &ObjectKey, news: News) {
        let kind = source.kind.as_str();
        let keys = self.world.read(|world| {
            world.source(source).and_then(|source| Some(source.wish.as_ref().ok()?.key_names.clone()))
        });
        let keys = keys.as_deref().unwrap_or_default();
        match news {
            News::Seen => tracing::info!(kind, %source, keys, "source seen"),
            News::Changed => tracing::info!(kind, %source, keys, "source changed"),
            News::Gone => tracing::info!(kind, %source, "source gone"),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::*;
    use crate::{policy::pattern::Patterns, testing, world::state::Limits};

    #[test]
    fn an_attempt_to_list_is_no_sign_of_life() {
        let stream = Stream::Namespaces;
        let limits =
            Limits { own_namespace: testing::OWN_NAMESPACE.to_owned(), excluded: Patterns::default() };
        let scope = Scope { keys: testing::keys(), limits, kinds: Kind::ALL.to_vec() };
        let feed = Feed {
            stream,
            world: SharedWorld::new(&scope),
            scope,
            requeue: Arc::new(|_| {}),
            readiness: Readiness::new([Condition::Listed(stream.as_str())]),
            metrics: Metrics::new(),
        };
        let age = || feed.readiness.watch_ages()[0].1;
        let a_while = Duration::from_millis(5);
        while age() < a_while {
            std::thread::yield_now();
        }
        feed.namespace(Event::Init);
        assert!(age() >= a_while, "{:?}", age());
        let before = Instant::now();
        feed.namespace(Event::InitDone("1".to_owned()));
        let age = age();
        assert!(age <= before.elapsed(), "{age:?}");
    }
}
