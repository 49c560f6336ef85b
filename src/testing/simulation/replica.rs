//! A replica: the world, queue, controller and election of `lockstep run`, on the simulated API server.

use std::{
    cell::RefCell,
    collections::BTreeMap,
    convert::Infallible,
    sync::Arc,
    task::Context,
    time::{Duration, Instant},
};

use futures::{FutureExt, StreamExt, future::BoxFuture, stream::FuturesUnordered};
use model::Writer;
use tokio::sync::watch::channel;

use super::{
    scenario::Settings,
    server::{Cluster, State},
    watches::{Shown, WATCH_IDS},
};
use crate::{
    clock, controller,
    controller::{
        Tasks,
        api::{CompanionApi, REQUEST_TIMEOUT},
        events::EventRecorder,
        queue::Queue,
        reconcile::Reconciler,
        report::Reporter,
    },
    leader::{Claim, ElectionConfig, LeaseAnnotations, candidate::Candidate},
    ops::{
        health::{Condition, Readiness},
        metrics::Metrics,
        watches::WatchReport,
    },
    testing::store::Place,
};
use lockstep_cluster::{informer::Informers, lease_client::LeaseApi, watch::Restores};
use lockstep_core::{
    failure::Failure,
    lease::record::LeaseRecord,
    object::{Kind, Object, ObjectKey},
    testing::{keys, rules},
    world::{Scope, SharedWorld},
    writes::write_request::CompanionRequest,
};

pub(crate) struct Replica {
    number: usize,
    cluster: Cluster,
    settings: Settings,
    world: SharedWorld,
    queue: Arc<Queue>,
    informers: Informers,
    readiness: Readiness,
    restores: Restores,
    /// How many restores its watches have listed for.
    known_restores: u64,
    /// Empty until everything is listed.
    tasks: FuturesUnordered<BoxFuture<'static, Infallible>>,
    /// None until everything is listed.
    claim: Option<Claim>,
    identity: String,
    /// It does not run until then.
    pub paused_until: Option<Instant>,
}

thread_local! {
    /// Metrics are expensive to make, and nothing here looks at them.
    static METRICS: RefCell<Metrics> = RefCell::new(Metrics::new());
}

impl Replica {
    /// A process starts: its watches begin to list.
    pub(crate) fn start(number: usize, incarnation: usize, cluster: &Cluster) -> Self {
        let metrics = METRICS.with_borrow(Metrics::clone);
        let scope = Scope { keys: keys(), rules: rules(), kinds: Kind::ALL.to_vec() };
        let settings = cluster.lock().settings.clone();
        let world = SharedWorld::new(&scope, settings.source_cache);
        let queue: Arc<Queue> = Arc::default();
        let (requeue, restores) = (queue.clone(), Restores::default());
        let readiness = Readiness::new(WATCH_IDS.map(|watch| Condition::Listed(watch.as_str())));
        let informers = Informers {
            scope,
            world: world.clone(),
            requeue: Arc::new(move |keys| requeue.push_all(keys)),
            restores: restores.clone(),
            observer: Arc::new(WatchReport { world: world.clone(), readiness: readiness.clone(), metrics }),
        };
        cluster.lock().list_again(number);
        Self {
            number,
            cluster: cluster.clone(),
            settings,
            world,
            queue,
            informers,
            readiness,
            restores,
            known_restores: 0,
            tasks: FuturesUnordered::new(),
            claim: None,
            identity: format!("replica-{number}-{incarnation}"),
            paused_until: None,
        }
    }

    /// A watch shows something.
    pub(crate) fn see(&mut self, watch: usize, shown: Shown) {
        let companions = watch == 1 || watch == 3;
        let listed = matches!(&shown, Shown::Event(lockstep_cluster::watch::Event::InitDone(_)));
        match shown {
            Shown::Event(event) => self.informers.handle(WATCH_IDS[watch], event),
            Shown::Restored => self.restores.report(self.known_restores, "versions have gone back"),
        }
        if listed && companions {
            // It has not seen what happened to companions before.
            self.cluster.lock().judge.memory_lost();
        }
        if listed && self.tasks.is_empty() && self.readiness.unmet().is_empty() {
            self.start_controller();
        }
    }

    /// As `run::run` and `Controller::run` do.
    fn start_controller(&mut self) {
        let metrics = METRICS.with_borrow(Metrics::clone);
        let (annotations, number) = (LeaseAnnotations::default(), self.number);
        let election = ElectionConfig {
            namespace: "lockstep-system".to_owned(),
            name: "lockstep".to_owned(),
            identity: self.identity.clone(),
            lease_duration: Duration::from_secs(self.settings.lease_seconds),
            restore_annotation: "workshop.io/restore-noticed-at".to_owned(),
            published: BTreeMap::new(),
        };
        let leases = Leases { number, cluster: self.cluster.clone() };
        let (claim, candidate) = Candidate::new(
            leases,
            election,
            annotations.clone(),
            self.restores.clone(),
            metrics.clone(),
            self.readiness.clone(),
        );
        let settings = controller::Settings {
            keys: keys(),
            workers: self.settings.workers,
            writes: self.settings.writes,
            resync: Duration::from_secs(self.settings.resync_seconds),
            delete_grace: Duration::from_secs(self.settings.delete_grace_seconds),
            instance_flags: String::new(),
        };
        let api = Api { number, cluster: self.cluster.clone() };
        let reporter = Reporter::new(EventRecorder::discarding(metrics.clone()), metrics.clone());
        let (world, queue) = (self.world.clone(), self.queue.clone());
        self.claim = Some(claim.clone());
        let reconciler = Arc::new(Reconciler::new(&settings, api, world, queue, reporter, claim, metrics));
        let Tasks { workers, others } = Tasks::new(&settings, &annotations, &reconciler);
        self.tasks.extend(workers.into_iter().chain(others));
        let (stop, stopped) = channel(false);
        let election = candidate.run(stopped).map(move |()| {
            drop(stop);
            panic!("the election has ended")
        });
        self.tasks.push(election.boxed());
    }

    pub(crate) fn leads(&self) -> bool {
        self.claim.as_ref().is_some_and(Claim::is_held)
    }

    /// Enqueues every source. The queue of a standby stays empty.
    pub(crate) fn resync(&self) {
        self.queue.push_all(self.world.all_sources());
    }

    /// Runs what can run now.
    pub(crate) fn poll(&mut self, context: &mut Context<'_>) {
        let _ = self.tasks.poll_next_unpin(context);
        if self.restores.count() > self.known_restores {
            self.known_restores = self.restores.count();
            let mut cluster = self.cluster.lock();
            cluster.note(|| format!("replica {} notices a restore", self.number));
            cluster.list_again(self.number);
        }
    }
}

/// The requests of a replica about companions.
struct Api {
    number: usize,
    cluster: Cluster,
}

impl Api {
    async fn request<T: Send + 'static>(
        &self,
        what: &'static str,
        at: &ObjectKey,
        perform: impl FnOnce(&mut State, &Place) -> Result<T, Failure> + Send + 'static,
    ) -> Result<T, Failure> {
        self.cluster.lock().check_claim(self.number, what, at);
        let (place, number) = (Place::Object(at.clone()), self.number);
        let outcome = self.cluster.request(self.number, REQUEST_TIMEOUT, move |state| {
            let outcome = perform(state, &place);
            if let Err(failure) = &outcome {
                state.note(|| format!("replica {number}: {what} of {place}: {failure}"));
            }
            state.publish(Writer::Lockstep);
            outcome
        });
        outcome.await
    }
}

impl CompanionApi for Api {
    async fn send(&self, at: &ObjectKey, request: CompanionRequest) -> Result<Object, Failure> {
        match request {
            CompanionRequest::Get | CompanionRequest::GetMetadata => {
                let has_content = matches!(request, CompanionRequest::Get);
                let read = move |state: &mut State, at: &Place| {
                    let object = Object::clone(state.store.get(at).ok_or(Failure::NotFound)?);
                    if has_content {
                        return Ok(object);
                    }
                    Ok(Object { metadata: object.metadata, ..Object::default() })
                };
                self.request("a read", at, read).await
            }
            CompanionRequest::Create(body) => {
                let object: Object = serde_json::from_slice(&body).expect("an object");
                let create = |state: &mut State, at: &Place| {
                    let uid = state.new_uid();
                    let created = state.store.create(at, object, uid, &keys().instance)?;
                    Ok(Object::clone(&created))
                };
                self.request("a create", at, create).await
            }
            CompanionRequest::Patch(operations) => {
                let names_version = serde_json::json!(operations)[0]["path"] == "/metadata/resourceVersion";
                if !names_version {
                    self.cluster.lock().wrong.push(format!("a patch of {at} names no version"));
                }
                let patch = |state: &mut State, at: &Place| {
                    let patched = state.store.patch(at, operations, &keys().instance)?;
                    Ok(Object::clone(&patched))
                };
                self.request("a patch", at, patch).await
            }
            CompanionRequest::Delete { uid, resource_version } => {
                if uid.is_empty() || resource_version.is_empty() {
                    self.cluster.lock().wrong.push(format!("a delete of {at} names no UID or version"));
                }
                let delete = move |state: &mut State, at: &Place| {
                    state.store.delete(at, Some((&uid, &resource_version))).map(|()| Object::default())
                };
                self.request("a delete", at, delete).await
            }
        }
    }
}

/// The requests of a replica about the Lease.
struct Leases {
    number: usize,
    cluster: Cluster,
}

impl LeaseApi for Leases {
    async fn get(&self, timeout: Duration) -> Result<LeaseRecord, Failure> {
        let read = |state: &mut State| state.lease.clone().ok_or(Failure::NotFound);
        let found = self.cluster.request(self.number, timeout, read).await?;
        self.cluster.lock().saw_lease(self.number, &found);
        Ok(found)
    }

    async fn write(&self, lease: &LeaseRecord, timeout: Duration) -> Result<LeaseRecord, Failure> {
        let (lease, sent) = (lease.clone(), clock::now());
        let write = move |state: &mut State| write_lease(state, lease);
        let written = self.cluster.request(self.number, timeout, write).await?;
        let mut cluster = self.cluster.lock();
        cluster.renewed(self.number, sent);
        cluster.saw_lease(self.number, &written);
        drop(cluster);
        Ok(written)
    }
}

fn write_lease(state: &mut State, mut lease: LeaseRecord) -> Result<LeaseRecord, Failure> {
    let sent = &lease.metadata.resource_version;
    match (&state.lease, sent) {
        (Some(_), None) => return Err(Failure::AlreadyExists),
        (None, Some(_)) => return Err(Failure::NotFound),
        (Some(known), Some(_)) if known.metadata.resource_version != *sent => {
            return Err(Failure::Conflict);
        }
        (Some(_), Some(_)) => {}
        (None, None) => lease.metadata.uid = Some(state.new_uid()),
    }
    state.store.skip_versions(1);
    lease.metadata.resource_version = Some(state.store.version().to_string());
    state.lease = Some(lease.clone());
    Ok(lease)
}
