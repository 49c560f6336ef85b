//! Reads sources, companions and namespaces once, with the rights of the person who asks.
//!
//! A person who may list them in all namespaces sees everything. Otherwise those namespaces are read that the question
//! is about, and what cannot be seen is recorded in [`View`]: a command says so, and does not take it for missing.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use futures::{StreamExt, future::try_join_all, stream};
use k8s_openapi::jiff::Timestamp;
use kube::{Client, api::ListParams, core::Request};
use tokio::{sync::watch, task::JoinSet};

use super::pages::read_pages;
use lockstep_cluster::{
    client,
    informer::{Informers, WatchObserver},
    watch::Restores,
};
use lockstep_core::{
    failure::Failure,
    object::{Kind, Meta, NamespaceObject, Object, ObjectKey},
    plan::{Action, Decision, Place, Trouble, places},
    world::{Companion, ObservedCompanion, Scope, SharedWorld, Source, WatchId, World},
};

/// How many objects that may have the name of a missing companion are read: one source with many of them leaves the
/// others their share.
const MAX_LOOKUPS: usize = 1000;
const MIN_LOOKUPS_PER_SOURCE: usize = 10;
const CONCURRENT_LOOKUPS: usize = 32;

/// The cluster as one person sees it.
pub struct Snapshot {
    pub scope: Scope,
    pub world: SharedWorld,
    pub view: View,
    informers: Informers,
    recorder: Arc<Recorder>,
    /// What has the name of a companion that no list shows, as it was read; none if there is nothing.
    found: Found,
}

/// What reads have found under these names; none where there is nothing.
type Found = HashMap<ObjectKey, Option<Companion>>;

/// What the person may see.
#[derive(Default)]
pub struct View {
    sights: HashMap<WatchId, Sight>,
    /// What they may not see, and why, for people to read.
    pub gaps: Vec<String>,
}

#[derive(PartialEq)]
enum Sight {
    Everywhere,
    /// In these namespaces, or in none.
    In(BTreeSet<String>),
}

impl Snapshot {
    /// Reads everything, or what can be seen in these namespaces.
    pub async fn read(client: &Client, scope: Scope, namespaces: &BTreeSet<String>) -> Result<Self, Failure> {
        let recorder = Arc::default();
        let informers = informers(&scope, &recorder);
        let lists = scope.watches().into_iter().map(|watch| see(client, &informers, watch, namespaces));
        let seen = try_join_all(lists).await?;
        let mut view = View::default();
        for (watch, sight, gap) in seen {
            view.sights.insert(watch, sight);
            view.gaps.extend(gap);
        }
        let world = informers.world.clone();
        Ok(Self { scope, world, view, informers, recorder, found: Found::new() })
    }

    /// Other namespaces that the sources list by name, if not all can be seen: to read them, too.
    pub fn unseen_targets(&self) -> BTreeSet<String> {
        let sources = if self.view.gaps.is_empty() { Vec::new() } else { self.sources() };
        self.world.read(|world| {
            let sources = sources.iter().filter_map(|key| world.source(key)?.active_policy());
            sources.flat_map(|policy| policy.targets.names.iter().cloned()).collect()
        })
    }

    /// A world that is seen whole.
    #[cfg(test)]
    pub fn of(scope: Scope, world: SharedWorld) -> Self {
        let recorder = Arc::default();
        let informers = Informers { world: world.clone(), ..informers(&scope, &recorder) };
        let sights = scope.watches().into_iter().map(|watch| (watch, Sight::Everywhere)).collect();
        let view = View { sights, gaps: Vec::new() };
        Self { scope, world, view, informers, recorder, found: Found::new() }
    }

    /// Follows what is seen from now on. The receiver wakes up when something may have changed.
    pub fn follow(&self, client: &Client, tasks: &mut JoinSet<()>) -> watch::Receiver<u64> {
        let receiver = self.recorder.changes.subscribe();
        for (watch, sight) in &self.view.sights {
            let within = match sight {
                Sight::Everywhere => None,
                // One namespace can be read, but usually not watched. Several watches of the same objects would each
                // remove what only the others show.
                Sight::In(seen) if seen.len() == 1 && *watch != WatchId::Namespaces => seen.first(),
                Sight::In(_) => continue,
            };
            self.informers.start_watch(tasks, client, *watch, within.map(String::as_str));
        }
        receiver
    }

    /// Every source that exists or has companions, in order. Others are remembered only because they had some.
    pub fn sources(&self) -> Vec<ObjectKey> {
        let mut sources = self.world.read(|world| {
            let mut sources = world.all_sources();
            sources.retain(|key| world.source(key).is_some() || world.companions_of(key).next().is_some());
            sources
        });
        sources.sort_unstable();
        sources
    }

    /// When a source or a companion was last written.
    pub fn written(&self, key: &ObjectKey) -> Option<Timestamp> {
        self.recorder.times().get(key).copied()
    }

    /// Reads objects that lists do not show.
    pub async fn look_up(&mut self, client: &Client, objects: Vec<ObjectKey>) {
        let found = self.read_objects(client, objects).await;
        self.remember(found);
    }

    /// Every place of a source, and what the controller does there given what lists and reads have shown.
    pub fn places<'a>(
        &'a self,
        world: &'a World,
        key: &'a ObjectKey,
        source: Option<&'a Source>,
    ) -> impl Iterator<Item = Place<'a>> {
        places(world, key, source, None, |at| self.object(world, at))
    }

    /// The places where companions of these sources are missing, as far as lists show: of each source, its share.
    pub fn missing(&self, sources: &[ObjectKey]) -> Vec<ObjectKey> {
        let share = (MAX_LOOKUPS / sources.len().max(1)).max(MIN_LOOKUPS_PER_SOURCE);
        self.world.read(|world| {
            let missing = sources.iter().flat_map(|key| {
                let source = world.source(key);
                let places = places(world, key, source, None, |at| world.companion(at));
                let missing =
                    places.filter(|place| matches!(place.decision, Decision::Change(Action::Create { .. })));
                missing.map(|place| place.at.into_owned()).take(share)
            });
            missing.filter(|at| self.view.sees_companions(at.kind, &at.namespace)).collect()
        })
    }

    /// Reads objects without remembering them, so that the snapshot can be used meanwhile.
    pub async fn read_objects(&self, client: &Client, objects: Vec<ObjectKey>) -> Found {
        let read = |at: ObjectKey| async move { (read_object(client, &at).await, at) };
        let mut reads = stream::iter(objects).map(read).buffer_unordered(CONCURRENT_LOOKUPS);
        let mut all = Found::new();
        while let Some((outcome, at)) = reads.next().await {
            let found = match outcome {
                Ok(object) => {
                    let observed = ObservedCompanion::read(&self.scope.keys, at.kind, object);
                    Some(self.world.read(|world| world.identify(observed)).1)
                }
                Err(Failure::NotFound) => None,
                // What cannot be read stays unknown.
                Err(_) => continue,
            };
            all.insert(at, found);
        }
        all
    }

    pub fn remember(&mut self, found: Found) {
        self.found.extend(found);
    }

    /// What a read has found under this name: nothing, or an object. None if it was not read.
    pub fn read_of(&self, at: &ObjectKey) -> Option<Option<&Companion>> {
        self.found.get(at).map(Option::as_ref)
    }

    /// The object of this name, as a list or a read has shown it.
    pub fn object<'a>(&'a self, world: &'a World, at: &ObjectKey) -> Option<&'a Companion> {
        world.companion(at).or_else(|| self.found.get(at)?.as_ref())
    }
}

impl View {
    /// What may make an answer incomplete.
    pub fn caveats(&self) -> Vec<String> {
        self.gaps.iter().map(|gap| format!("you may not see {gap}")).collect()
    }

    /// Whether companions of a kind in a namespace, and the namespace itself, can be seen.
    pub fn sees_companions(&self, kind: Kind, namespace: &str) -> bool {
        [WatchId::Namespaces, WatchId::Companions(kind)].into_iter().all(|watch| self.sees(watch, namespace))
    }

    /// Whether it is known which namespaces exist.
    pub fn sees_all_namespaces(&self) -> bool {
        self.sights.get(&WatchId::Namespaces) == Some(&Sight::Everywhere)
    }

    /// Whether a trouble of a source is one: without the right to see namespaces, none of them exists for the plan.
    pub fn can_tell(&self, kind: Kind, trouble: &Trouble) -> bool {
        match trouble {
            Trouble::NoNamespace(name) => self.sees_companions(kind, name),
            Trouble::NoMatch { .. } => self.sees_all_namespaces(),
            _ => true,
        }
    }

    /// Whether sources of a kind in a namespace can be seen.
    pub fn sees_sources(&self, kind: Kind, namespace: &str) -> bool {
        self.sees(WatchId::Sources(kind), namespace)
    }

    fn sees(&self, watch: WatchId, namespace: &str) -> bool {
        match self.sights.get(&watch) {
            Some(Sight::Everywhere) => true,
            Some(Sight::In(seen)) => seen.contains(namespace),
            None => false,
        }
    }
}

/// Lists what a watch selects. Returns where, and what of it cannot be seen.
async fn see(
    client: &Client,
    informers: &Informers,
    watch: WatchId,
    namespaces: &BTreeSet<String>,
) -> Result<(WatchId, Sight, Option<String>), Failure> {
    let why = match informers.list(client, watch).await {
        Ok(()) => return Ok((watch, Sight::Everywhere, None)),
        Err(Failure::Forbidden(why)) => why,
        Err(failure) => return Err(failure),
    };
    let seen = informers.list_in(client, watch, namespaces).await?;
    let names: Vec<&str> = seen.iter().map(String::as_str).collect();
    let outside = if names.is_empty() { String::new() } else { format!(" outside of {}", names.join(", ")) };
    let gap = format!("{}{outside} ({why})", watch.as_str());
    Ok((watch, Sight::In(seen), Some(gap)))
}

/// They feed a world that keeps no content.
fn informers(scope: &Scope, recorder: &Arc<Recorder>) -> Informers {
    let affected = recorder.clone();
    Informers {
        scope: scope.clone(),
        world: SharedWorld::new(scope, 0),
        requeue: Arc::new(move |_| affected.changes.send_modify(|count| *count += 1)),
        restores: Restores::default(),
        observer: recorder.clone(),
    }
}

/// What happens while objects are read and watched.
#[derive(Default)]
struct Recorder {
    /// How often something was shown, or has changed for a source.
    changes: watch::Sender<u64>,
    /// When each source and companion was last written.
    times: Mutex<HashMap<ObjectKey, Timestamp>>,
}

impl Recorder {
    fn times(&self) -> MutexGuard<'_, HashMap<ObjectKey, Timestamp>> {
        self.times.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WatchObserver for Recorder {
    fn shown(&self, watch: WatchId, meta: &Meta) {
        self.changes.send_modify(|count| *count += 1);
        let kind = match watch {
            WatchId::Namespaces => return,
            WatchId::Companions(kind) | WatchId::Sources(kind) => kind,
        };
        if let Some(time) = last_written(meta) {
            self.times().insert(ObjectKey::of(kind, meta), time);
        }
    }
}

/// The API server writes every time in UTC with whole seconds, so the texts compare like the times.
fn last_written(meta: &Meta) -> Option<Timestamp> {
    let managed = meta.managed_fields.iter().map(|entry| &entry.time);
    managed.chain(&meta.creation_timestamp).max()?.parse().ok()
}

/// The metadata of objects of a kind that have our annotations and lack our label: no watch shows them.
pub async fn read_strays(client: &Client, scope: &Scope, kind: Kind) -> Result<Vec<Meta>, Failure> {
    let keys = &scope.keys;
    let params = ListParams::default().labels(&format!("!{}", keys.companion));
    let objects = Request::new(format!("/api/v1/{}", kind.plural()));
    let keep = |object: NamespaceObject| Some(object.metadata).filter(|meta| keys.has_marks(meta));
    read_pages(client, params, |params| objects.list_metadata(params), keep).await
}

/// Reads one ConfigMap or Secret.
pub async fn read_object(client: &Client, at: &ObjectKey) -> Result<Object, Failure> {
    let path = format!("/api/v1/namespaces/{}/{}", at.namespace, at.kind.plural());
    client::get(client, &path, &at.name).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_cluster::testing::api::api_server;
    use lockstep_core::testing::{keys, rules};

    #[tokio::test]
    async fn list_of_metadata_without_items_is_an_empty_one() {
        let client = api_server(|_| async { (200, serde_json::json!({"metadata": {}, "items": null})) });
        let scope = Scope { keys: keys(), rules: rules(), kinds: Kind::ALL.to_vec() };
        assert_eq!(read_strays(&client, &scope, Kind::Secret).await.map(|strays| strays.len()), Ok(0));
    }
}
