//! Reads sources, companions and namespaces once, with the rights of the person who asks.
//!
//! A person who may list them in all namespaces sees everything. Otherwise those namespaces are read that the question is
//! about, and what cannot be seen is recorded in [`View`]: a command says so, and does not take it for missing.

use std::{
    collections::{BTreeSet, HashMap},
    sync::{Arc, Mutex, PoisonError},
};

use futures::{StreamExt, future::try_join_all, stream};
use k8s_openapi::jiff::Timestamp;
use kube::{
    Client,
    api::ListParams,
    core::{ListMeta, Request},
};
use serde::Deserialize;
use tokio::{sync::watch, task::JoinSet};

use lockstep_cluster::{
    client::{self, REQUEST_TIMEOUT, with_timeout},
    informer::{Informers, WatchObserver},
    watch::Restores,
};
use lockstep_core::{
    failure::Failure,
    object::{Kind, Meta, NamespaceObject, Object, ObjectKey},
    plan::{Trouble, targets},
    world::{Companion, Eligibility, ObservedCompanion, Scope, SharedWorld, WatchId, World},
};

/// How many objects that may have the name of a missing companion are read: one source with many of them leaves the
/// others their share.
const MAX_LOOKUPS: usize = 1000;
const MIN_LOOKUPS_PER_SOURCE: usize = 10;
const CONCURRENT_LOOKUPS: usize = 32;
/// `limit` of a list of metadata.
const PAGE_SIZE: u32 = 1000;

/// The cluster as one person sees it.
pub struct Snapshot {
    pub scope: Scope,
    pub world: SharedWorld,
    pub view: View,
    informers: Informers,
    /// How many objects lists and watches have shown.
    changes: watch::Sender<u64>,
    times: Times,
    /// What has the name of a companion that no list shows, as it was read; none if there is nothing.
    found: Found,
}

/// What reads have found under these names; none where there is nothing.
type Found = HashMap<ObjectKey, Option<Companion>>;

/// When each source and companion was last written.
type Times = Arc<Mutex<HashMap<ObjectKey, Timestamp>>>;

/// What the person may see.
#[derive(Debug, Clone, Default)]
pub struct View {
    sights: HashMap<WatchId, Sight>,
    /// What they may not see, and why, for people to read.
    pub gaps: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Sight {
    Everywhere,
    /// In these namespaces, or in none.
    In(BTreeSet<String>),
}

impl Snapshot {
    /// Reads everything, or what can be seen in these namespaces. `changes` counts objects while they are read.
    pub async fn read(
        client: &Client,
        scope: Scope,
        namespaces: &BTreeSet<String>,
        changes: watch::Sender<u64>,
    ) -> Result<Self, Failure> {
        let times = Times::default();
        let informers = informers(&scope, &times, &changes);
        let lists = scope.watches().into_iter().map(|watch| see(client, &informers, watch, namespaces));
        let seen = try_join_all(lists).await?;
        let mut view = View::default();
        for (watch, sight, why) in seen {
            view.gaps.extend(why.map(|why| match &sight {
                Sight::In(seen) if !seen.is_empty() => {
                    let names: Vec<&str> = seen.iter().map(String::as_str).collect();
                    format!("{} outside of {} ({why})", watch.as_str(), names.join(", "))
                }
                _ => format!("{} ({why})", watch.as_str()),
            }));
            view.sights.insert(watch, sight);
        }
        let world = informers.world.clone();
        Ok(Self { scope, world, view, informers, changes, times, found: Found::new() })
    }

    /// Other namespaces that the sources list by name, if not all can be seen: to read them, too.
    pub fn unseen_targets(&self) -> BTreeSet<String> {
        let mut names = BTreeSet::new();
        if self.view.gaps.is_empty() {
            return names;
        }
        self.world.read(|world| {
            for key in world.all_sources() {
                let policy = world.source(&key).and_then(|source| source.active_policy());
                names.extend(policy.into_iter().flat_map(|policy| policy.targets.names.iter().cloned()));
            }
        });
        names
    }

    /// A world that is seen whole.
    #[cfg(test)]
    pub fn of(scope: Scope, world: SharedWorld) -> Self {
        let (times, changes) = (Times::default(), watch::Sender::new(0));
        let informers = Informers { world: world.clone(), ..informers(&scope, &times, &changes) };
        let sights = scope.watches().into_iter().map(|watch| (watch, Sight::Everywhere)).collect();
        let view = View { sights, gaps: Vec::new() };
        Self { scope, world, view, informers, changes, times, found: Found::new() }
    }

    /// Follows what is seen from now on. The receiver wakes up when something may have changed.
    pub fn follow(&self, client: &Client, tasks: &mut JoinSet<&'static str>) -> watch::Receiver<u64> {
        let receiver = self.changes.subscribe();
        for (watch, sight) in &self.view.sights {
            match sight {
                Sight::Everywhere => self.informers.start_watch(tasks, client, *watch, None),
                // One namespace can be read, but usually not watched. Several watches of the same objects would each
                // remove what only the others show.
                Sight::In(seen) => {
                    if let (Some(namespace), 1) = (seen.first(), seen.len())
                        && *watch != WatchId::Namespaces
                    {
                        self.informers.start_watch(tasks, client, *watch, Some(namespace));
                    }
                }
            }
        }
        receiver
    }

    /// When a source or a companion was last written.
    pub fn written(&self, key: &ObjectKey) -> Option<Timestamp> {
        self.times.lock().unwrap_or_else(PoisonError::into_inner).get(key).copied()
    }

    /// Reads objects that lists do not show.
    pub async fn look_up(&mut self, client: &Client, objects: Vec<ObjectKey>) {
        let found = self.read_objects(client, objects).await;
        self.remember(found);
    }

    /// The places where companions of these sources are missing, as far as lists show: of each source, its share.
    pub fn missing(&self, sources: &[ObjectKey]) -> Vec<ObjectKey> {
        let share = (MAX_LOOKUPS / sources.len().max(1)).max(MIN_LOOKUPS_PER_SOURCE);
        self.world.read(|world| {
            let missing = sources.iter().flat_map(|source| missing(world, source).take(share));
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

/// Where a source wants companions and no list shows one, whether or not it is paused.
fn missing<'a>(world: &'a World, key: &'a ObjectKey) -> impl Iterator<Item = ObjectKey> + 'a {
    let policy = world.policy(key);
    policy.into_iter().flat_map(move |policy| {
        targets(world, &key.namespace, &policy.targets)
            .filter(|target| target.eligibility == Eligibility::Eligible)
            .map(|target| ObjectKey::new(key.kind, target.namespace, &policy.companion))
            .filter(move |at| at != key && world.companion(at).is_none())
    })
}

/// Lists what a watch selects. Returns where, and why not everywhere.
async fn see(
    client: &Client,
    informers: &Informers,
    watch: WatchId,
    namespaces: &BTreeSet<String>,
) -> Result<(WatchId, Sight, Option<String>), Failure> {
    match informers.list(client, watch).await {
        Ok(()) => Ok((watch, Sight::Everywhere, None)),
        Err(Failure::Forbidden(why)) => {
            let seen = informers.list_in(client, watch, namespaces).await?;
            Ok((watch, Sight::In(seen), Some(why)))
        }
        Err(failure) => Err(failure),
    }
}

/// They feed a world that keeps no content, and record when each object was written.
fn informers(scope: &Scope, times: &Times, changes: &watch::Sender<u64>) -> Informers {
    let affected = changes.clone();
    Informers {
        scope: scope.clone(),
        world: SharedWorld::new(scope, 0),
        requeue: Arc::new(move |_| affected.send_modify(|count| *count += 1)),
        restores: Restores::default(),
        observer: Arc::new(Recorder { times: times.clone(), changes: changes.clone() }),
    }
}

/// Counts what is shown, and remembers when it was written.
struct Recorder {
    times: Times,
    changes: watch::Sender<u64>,
}

impl WatchObserver for Recorder {
    fn shown(&self, watch: WatchId, meta: &Meta) {
        self.changes.send_modify(|count| *count += 1);
        let kind = match watch {
            WatchId::Namespaces => return,
            WatchId::Companions(kind) | WatchId::Sources(kind) => kind,
        };
        if let Some(time) = last_written(meta) {
            self.times.lock().unwrap_or_else(PoisonError::into_inner).insert(ObjectKey::of(kind, meta), time);
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
    let params = ListParams::default().labels(&format!("!{}", keys.companion)).limit(PAGE_SIZE);
    let (request, mut params) = (Request::new(format!("/api/v1/{}", kind.plural())), params);
    let mut strays = Vec::new();
    loop {
        let page = request.list_metadata(&params).map_err(|error| Failure::Unavailable(error.to_string()))?;
        let page: MetadataList = with_timeout(REQUEST_TIMEOUT, client.request(page)).await?;
        let all = page.items.into_iter().flatten().map(|item| item.metadata);
        strays.extend(all.filter(|meta| keys.has_marks(meta)));
        params.continue_token = page.metadata.continue_.filter(|token| !token.is_empty());
        if params.continue_token.is_none() {
            return Ok(strays);
        }
    }
}

#[derive(Deserialize)]
struct MetadataList {
    metadata: ListMeta,
    /// An empty list of metadata is null.
    items: Option<Vec<NamespaceObject>>,
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
