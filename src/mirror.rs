//! The controller: watch → world → queue → plan → write.

pub mod brake;
mod carry;
pub mod events;
pub mod ledger;
pub mod pass;
pub mod plan;
pub mod queue;
mod tell;
pub mod write;

use std::{
    sync::{Arc, PoisonError, RwLock},
    time::Duration,
};

use kube::Client;
use tokio::{sync::watch, task::JoinSet};

use crate::{
    keys::Keys,
    object::{Kind, NamespaceObject, Object, ObjectKey},
    ops::{health::Pulse, metrics::Metrics},
    world::{
        state::{Effect, Limits, News, Stream, World},
        watch::{Event, run as follow},
    },
};
use pass::Passes;
use queue::Queue;

/// What the mirror needs to know.
#[derive(Debug, Clone)]
pub struct Settings {
    pub keys: Arc<Keys>,
    pub limits: Limits,
    pub kinds: Vec<Kind>,
    pub workers: usize,
    pub writes: usize,
    pub resync: Duration,
    pub delete_grace: Duration,
}

impl Settings {
    /// The watches that feed the world.
    #[must_use]
    pub fn streams(&self) -> Vec<Stream> {
        let of_kind = |kind: &Kind| [Stream::Companions(*kind), Stream::Sources(*kind)];
        std::iter::once(Stream::Namespaces).chain(self.kinds.iter().flat_map(of_kind)).collect()
    }
}

/// The world, shared by watches, workers and writes.
#[derive(Clone)]
pub struct SharedWorld(Arc<RwLock<World>>);

impl SharedWorld {
    #[must_use]
    pub fn new(world: World) -> Self {
        Self(Arc::new(RwLock::new(world)))
    }

    pub fn read<T>(&self, f: impl FnOnce(&World) -> T) -> T {
        f(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub fn write<T>(&self, f: impl FnOnce(&mut World) -> T) -> T {
        f(&mut self.0.write().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Runs until `stop` turns true, then finishes what is under way. Returns early, with its name, when a task ends
/// that never should.
pub async fn run(
    client: Client,
    settings: Settings,
    metrics: Metrics,
    pulse: Pulse,
    stop: watch::Receiver<bool>,
) -> Result<(), &'static str> {
    let world = SharedWorld::new(World::new(settings.keys.clone(), settings.limits.clone()));
    let queue: Arc<Queue<ObjectKey>> = Arc::default();
    let (teller, scribe) = events::Teller::start(client.clone(), &settings.keys, metrics.clone());
    let passes =
        Passes::new(client.clone(), &settings, world.clone(), queue.clone(), teller, metrics.clone());

    let mut tasks = JoinSet::new();
    for stream in settings.streams() {
        let feed = Feed {
            stream,
            world: world.clone(),
            queue: queue.clone(),
            pulse: pulse.clone(),
            metrics: metrics.clone(),
        };
        let (client, keys) = (client.clone(), settings.keys.clone());
        tasks.spawn(async move {
            match stream {
                Stream::Namespaces => follow(client, stream, &keys, |event| feed.namespace(event)).await,
                Stream::Companions(kind) => {
                    follow(client, stream, &keys, |event| feed.companion(kind, event)).await
                }
                Stream::Sources(kind) => {
                    follow(client, stream, &keys, |event| feed.source(kind, event)).await
                }
            }
            "watch"
        });
    }

    let mut stopped = stop.clone();
    tokio::select! {
        biased;
        _ = stopped.wait_for(|stop| *stop) => return Ok(()),
        () = all_listed(&pulse) => {}
    }
    tracing::info!(
        sources = world.read(World::source_count),
        companions = world.read(World::companion_count),
        "everything is listed, the mirror begins"
    );
    tasks.spawn(resync(world, queue, settings.resync));
    for _ in 0..settings.workers {
        let (passes, stop) = (passes.clone(), stop.clone());
        tasks.spawn(async move {
            passes.work(stop).await;
            "worker"
        });
    }

    let outcome = tokio::select! {
        biased;
        _ = stopped.wait_for(|stop| *stop) => Ok(()),
        // A worker may see the stop before we do.
        ended = tasks.join_next() => match ended.and_then(Result::ok) {
            _ if *stop.borrow() => Ok(()),
            ended => Err(ended.unwrap_or("task")),
        },
    };
    passes.finish().await;
    drop(passes);
    tasks.shutdown().await;
    // What was told is written before we go; Events are no reason to stay for long.
    drop(tokio::time::timeout(Duration::from_secs(5), scribe).await);
    outcome
}

async fn all_listed(pulse: &Pulse) {
    while !pulse.missing().is_empty() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Looks at every source now and then. A plan that finds nothing to do calls nobody, so this is free.
async fn resync(world: SharedWorld, queue: Arc<Queue<ObjectKey>>, every: Duration) -> &'static str {
    let mut ticks = tokio::time::interval(every);
    loop {
        ticks.tick().await;
        queue.push_all(world.read(World::all_sources));
    }
}

/// Brings what a watch sees into the world, and what follows from it into the queue.
struct Feed {
    stream: Stream,
    world: SharedWorld,
    queue: Arc<Queue<ObjectKey>>,
    pulse: Pulse,
    metrics: Metrics,
}

impl Feed {
    fn source(&self, kind: Kind, event: Event<Object>) {
        self.take(
            event,
            |world, object| world.apply_source(kind, object),
            |world, object| world.delete_source(kind, &object.metadata),
        );
    }

    fn companion(&self, kind: Kind, event: Event<Object>) {
        self.take(
            event,
            |world, object| world.apply_companion(kind, object),
            |world, object| world.delete_companion(kind, &object.metadata),
        );
    }

    fn namespace(&self, event: Event<NamespaceObject>) {
        let apply = |world: &mut World, object: NamespaceObject| {
            let (effect, fault) = world.apply_namespace(&object.metadata);
            if let Some(fault) = fault {
                tracing::warn!(
                    namespace = object.metadata.name,
                    "{fault}; it accepts from nowhere until mended"
                );
            }
            effect
        };
        let delete = |world: &mut World, object: NamespaceObject| {
            world.delete_namespace(&object.metadata.name);
            Effect::default()
        };
        self.take(event, apply, delete);
    }

    fn take<T>(
        &self,
        event: Event<T>,
        apply: impl FnOnce(&mut World, T) -> Effect,
        delete: impl FnOnce(&mut World, T) -> Effect,
    ) {
        self.pulse.alive(self.stream);
        let effect = self.world.write(|world| match event {
            Event::Begin => {
                world.begin(self.stream);
                self.metrics.watch_restarted(self.stream);
                Effect::default()
            }
            Event::Applied(object) => apply(world, object),
            Event::Deleted(object) => delete(world, object),
            Event::End(version) => {
                let effect = world.end(self.stream, version.parse().unwrap_or(u64::MAX));
                self.pulse.synced(self.stream);
                effect
            }
            Event::Bookmark => Effect::default(),
        });
        for (source, news) in &effect.news {
            self.report(source, *news);
        }
        if !effect.look_at.is_empty() {
            self.queue.push_all(effect.look_at);
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
