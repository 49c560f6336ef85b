//! The simulated cluster: the API server with its delays and faults, the garbage collector and the namespace
//! controller. Nothing happens here at once: everything is on the agenda, and the driver carries it out when it is due.

use std::{
    collections::BTreeMap,
    hash::{DefaultHasher, Hash},
    sync::{Arc, Mutex, MutexGuard},
    time::{Duration, Instant},
};

use fastrand::Rng;
use futures::channel::oneshot;
use model::{Judge, Step, Write, Writer};

use super::{
    convert,
    scenario::{Fault, REPLICAS, Settings, WATCHES, names},
    watches::Connection,
};
use crate::{
    clock,
    testing::store::{Change, Place, Store},
};
use lockstep_core::{
    failure::Failure,
    lease::record::LeaseRecord,
    object::{Kind, Object, ObjectKey},
};

/// The field manager of people.
const PERSON: &str = "kubectl";

/// The cluster, shared by the driver and the replicas. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Cluster(Arc<Mutex<State>>);

pub(crate) struct State {
    pub start: Instant,
    pub settings: Settings,
    pub store: Store,
    pub judge: Judge,
    pub random: Rng,
    pub lease: Option<LeaseRecord>,
    /// Until when each replica may write, computed from the answers that it got.
    held_until: [Option<Instant>; REPLICAS],
    /// The version of the Lease that each replica has seen last.
    lease_seen: [Option<u64>; REPLICAS],
    pub connections: [[Connection; WATCHES]; REPLICAS],
    /// Every change, for watches that are resumed.
    pub past: Vec<Change>,
    /// Changes up to this version are forgotten.
    pub compacted: u64,
    /// The store before each step.
    backups: Vec<(Store, Option<LeaseRecord>)>,
    agenda: BTreeMap<(Instant, u64), Event>,
    tickets: u64,
    uids: u64,
    /// Nothing is lost or slow any more.
    calm: bool,
    flaky: Option<(Instant, u32)>,
    down_until: Option<Instant>,
    partitioned_until: [Option<Instant>; REPLICAS],
    collecting: bool,
    /// Requests that have not reached the API server yet.
    pub in_flight: usize,
    /// How many changes Lockstep has made.
    pub writes: usize,
    pub changes: usize,
    /// A digest of all changes and when they were made.
    pub digest: DefaultHasher,
    pub wrong: Vec<String>,
    /// What happened, for people; none unless somebody will read it.
    pub trace: Option<Vec<String>>,
}

/// Something that will happen.
pub(crate) enum Event {
    Step(Step),
    Fault(Fault),
    /// A request reaches the API server.
    Arrive {
        replica: usize,
        perform: Perform,
        fate: Fate,
    },
    /// An answer reaches the replica.
    Answer {
        replica: usize,
        send: Send,
        failure: Option<Failure>,
    },
    /// A watch, or the request for one: of this replica, this watch, and this connection of it.
    Watch(usize, usize, u32, WatchEvent),
    Namespace(Arc<str>),
    CollectGarbage,
    Start(usize),
    Resume(usize),
    /// The API server is back, with this backup if etcd was restored.
    Up(Option<(usize, bool)>),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum WatchEvent {
    Connect,
    Arrive,
    CheckPosition,
    Deliver,
}

/// Carries out a request, unless it fails before it takes effect.
type Perform = Box<dyn FnOnce(&mut State, Option<Failure>) -> Send + std::marker::Send>;
/// Answers a request, with a failure in place of the outcome.
type Send = Box<dyn FnOnce(Option<Failure>) + std::marker::Send>;

/// What becomes of a request.
#[derive(Debug, Clone)]
pub(crate) enum Fate {
    /// It takes effect and is answered after this time.
    Answered(Duration),
    /// It fails before it takes effect.
    Refused(Failure),
    /// It takes effect, and the answer is lost: the connection breaks after this time, or hangs.
    Unanswered(Option<Duration>),
    /// It has no effect and no answer.
    Lost,
}

impl Cluster {
    pub(crate) fn new(settings: &Settings, trace: bool) -> Self {
        let now = clock::now();
        let state = State {
            start: now,
            settings: settings.clone(),
            store: Store::default(),
            judge: Judge::new(names()),
            random: Rng::with_seed(settings.seed),
            lease: None,
            held_until: [None; REPLICAS],
            lease_seen: [None; REPLICAS],
            connections: Default::default(),
            past: Vec::new(),
            compacted: 0,
            backups: Vec::new(),
            agenda: BTreeMap::new(),
            tickets: 0,
            uids: 0,
            calm: false,
            flaky: None,
            down_until: None,
            partitioned_until: [None; REPLICAS],
            collecting: false,
            in_flight: 0,
            writes: 0,
            changes: 0,
            digest: DefaultHasher::new(),
            wrong: Vec::new(),
            trace: trace.then(Vec::new),
        };
        Self(Arc::new(Mutex::new(state)))
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().expect("nothing panicked while it held the lock")
    }

    /// Sends a request of a replica, and waits for its answer.
    pub(crate) async fn request<T: std::marker::Send + 'static>(
        &self,
        replica: usize,
        timeout: Duration,
        perform: impl FnOnce(&mut State) -> Result<T, Failure> + std::marker::Send + 'static,
    ) -> Result<T, Failure> {
        let (sender, answer) = oneshot::channel();
        let sent = {
            let mut state = self.lock();
            let perform: Perform = Box::new(move |state, failure| {
                let outcome = failure.map_or_else(|| perform(state), Err);
                Box::new(move |failure| drop(sender.send(failure.map_or(outcome, Err))))
            });
            state.send(replica, perform);
            clock::now()
        };
        match answer.await {
            Ok(answer) => answer,
            Err(oneshot::Canceled) => {
                tokio::time::sleep_until((sent + timeout).into()).await;
                Err(Failure::Unavailable("no answer".to_owned()))
            }
        }
    }
}

impl State {
    // --- the agenda

    pub(crate) fn at(&mut self, when: Instant, event: Event) {
        self.tickets += 1;
        self.agenda.insert((when, self.tickets), event);
    }

    pub(crate) fn after(&mut self, delay: Duration, event: Event) {
        self.at(clock::now() + delay, event);
    }

    pub(crate) fn next_due(&self) -> Option<Instant> {
        self.agenda.first_key_value().map(|((when, _), _)| *when)
    }

    pub(crate) fn pop_due(&mut self, now: Instant) -> Option<Event> {
        let entry = self.agenda.first_entry()?;
        (entry.key().0 <= now).then(|| entry.remove())
    }

    pub(crate) fn note(&mut self, text: impl FnOnce() -> String) {
        if self.trace.is_some() {
            let (text, time) = (text(), clock::elapsed(self.start).as_millis());
            self.trace.iter_mut().for_each(|trace| trace.push(format!("{time:>7} {text}")));
        }
    }

    // --- delays

    /// A delay of the network: short, and sometimes not.
    pub(crate) fn latency(&mut self) -> Duration {
        let millis = match self.random.u32(0..if self.calm { 8 } else { 20 }) {
            0..=7 => self.random.u64(0..4),
            8..=16 => self.random.u64(1..20),
            17..=18 => self.random.u64(10..300),
            _ => self.random.u64(100..3000),
        };
        Duration::from_millis(millis)
    }

    fn fate(&mut self, replica: usize) -> Fate {
        let unavailable = || Failure::Unavailable("connection reset".to_owned());
        let now = clock::now();
        if self.is_partitioned(replica) {
            return Fate::Lost;
        }
        if self.is_down() {
            return Fate::Refused(unavailable());
        }
        let flaky = self.flaky.filter(|(until, _)| now < *until).map(|(_, one_in)| one_in);
        let answered = Fate::Answered(self.latency());
        let Some(one_in) = flaky else { return answered };
        if self.random.u32(0..one_in) > 0 {
            return answered;
        }
        match self.random.u32(0..7) {
            0 => Fate::Refused(Failure::Throttled(Duration::from_secs(self.random.u64(1..3)))),
            1 => Fate::Refused(Failure::Unavailable("500".to_owned())),
            2 => Fate::Refused(Failure::Conflict),
            3 => Fate::Lost,
            4 => Fate::Unanswered(None),
            _ => Fate::Unanswered(Some(self.latency())),
        }
    }

    pub(crate) fn is_down(&self) -> bool {
        self.down_until.is_some()
    }

    pub(crate) fn is_partitioned(&self, replica: usize) -> bool {
        self.partitioned_until[replica].is_some_and(|until| clock::now() < until)
    }

    /// Whether a watch of this replica gets nothing for now.
    pub(crate) fn is_cut_off(&self, replica: usize) -> bool {
        self.is_down() || self.is_partitioned(replica)
    }

    // --- requests

    fn send(&mut self, replica: usize, perform: Perform) {
        let fate = self.fate(replica);
        let mut delay = self.latency();
        if !self.calm && self.flaky.is_some() && self.random.u32(0..30) == 0 {
            // It takes effect long after the client has given up.
            delay += Duration::from_millis(self.random.u64(0..40_000));
        }
        self.in_flight += 1;
        self.after(delay, Event::Arrive { replica, perform, fate });
    }

    pub(crate) fn arrive(&mut self, replica: usize, perform: Perform, fate: Fate) {
        self.in_flight -= 1;
        let down = self.is_down();
        let reset = || Failure::Unavailable("connection reset".to_owned());
        match fate {
            Fate::Lost => {}
            Fate::Refused(failure) => self.answer(replica, perform, Some(failure)),
            _ if down => self.answer(replica, perform, Some(reset())),
            Fate::Answered(delay) => {
                let send = perform(self, None);
                self.after(delay, Event::Answer { replica, send, failure: None });
            }
            Fate::Unanswered(None) => drop(perform(self, None)),
            Fate::Unanswered(Some(delay)) => {
                let send = perform(self, None);
                self.after(delay, Event::Answer { replica, send, failure: Some(reset()) });
            }
        }
    }

    fn answer(&mut self, replica: usize, perform: Perform, failure: Option<Failure>) {
        let (send, delay) = (perform(self, failure), self.latency());
        self.after(delay, Event::Answer { replica, send, failure: None });
    }

    /// The answer to a request, unless the API server has died since.
    pub(crate) fn deliver_answer(&mut self, replica: usize, send: Send, failure: Option<Failure>) {
        let reset = || Failure::Unavailable("connection reset".to_owned());
        // A partition keeps the answer back: the replica gives up.
        if !self.is_partitioned(replica) {
            send(if self.is_down() { Some(reset()) } else { failure });
        }
    }

    /// A replica was told that its Lease is renewed, by a request that it sent then.
    pub(crate) fn renewed(&mut self, replica: usize, sent: Instant) {
        let deadline = sent + Duration::from_secs(self.settings.lease_seconds) * 2 / 3;
        self.held_until[replica] = self.held_until[replica].max(Some(deadline));
    }

    /// A replica has got an answer about the Lease.
    pub(crate) fn saw_lease(&mut self, replica: usize, lease: &LeaseRecord) {
        self.lease_seen[replica] = Some(lease_version(lease));
    }

    /// A replica without memory holds nothing.
    pub(crate) fn forget_claim(&mut self, replica: usize) {
        (self.held_until[replica], self.lease_seen[replica]) = (None, None);
    }

    /// A replica sends a request about a companion.
    pub(crate) fn check_claim(&mut self, replica: usize, what: &str, at: &ObjectKey) {
        if self.held_until[replica].is_none_or(|until| until <= clock::now()) {
            self.wrong.push(format!("replica {replica} sends {what} of {at} without the Lease"));
        }
    }

    pub(crate) fn new_uid(&mut self) -> String {
        self.uids += 1;
        format!("uid-{}", self.uids)
    }

    // --- changes

    /// Hands the changes that somebody has just made to the watches, the controllers and the judge.
    pub(crate) fn publish(&mut self, by: Writer) {
        for change in self.store.take_changes() {
            self.changes += 1;
            // The API server removes an object when its last finalizer goes.
            let finalized = change.before.as_ref().is_some_and(|before| before.metadata.is_terminating());
            let by = if change.after.is_none() && finalized { Writer::Kubernetes } else { by };
            if by == Writer::Lockstep {
                self.writes += 1;
            }
            let time = clock::elapsed(self.start).as_millis();
            (time, by as u8, change.at.to_string(), change.version).hash(&mut self.digest);
            self.note(|| describe(by, &change));
            let after = change.after.as_deref().map(convert::to_model);
            let at = convert::to_model_key(&change.at);
            self.judge.record(model::Change { by, at, after });
            self.wake_controllers(&change);
            self.show(&change);
            self.past.push(change);
        }
        if self.random.u32(0..3) == 0 {
            self.store.skip_versions(1);
        }
    }

    fn wake_controllers(&mut self, change: &Change) {
        let terminating = |object: &Arc<Object>| object.metadata.is_terminating();
        let namespace = change.at.namespace();
        if change.after.as_ref().is_some_and(terminating) && matches!(change.at, Place::Namespace(_)) {
            let delay = Duration::from_millis(self.random.u64(0..400));
            self.after(delay, Event::Namespace(namespace.into()));
        } else if change.after.is_none() && self.store.namespace(namespace).is_some_and(terminating) {
            self.after(Duration::from_millis(20), Event::Namespace(namespace.into()));
        }
        let owned = |object: &Arc<Object>| !object.metadata.owner_references.is_empty();
        let may_be_garbage = change.after.is_none() || change.after.as_ref().is_some_and(owned);
        if may_be_garbage && !self.collecting && self.store.objects().any(|(_, object)| owned(object)) {
            self.collecting = true;
            let delay = Duration::from_millis(self.random.u64(0..1500));
            self.after(delay, Event::CollectGarbage);
        }
    }

    /// What the namespace controller does: one object after the other, then the namespace.
    pub(crate) fn empty_namespace(&mut self, name: &Arc<str>) {
        let at = Place::Namespace(name.clone());
        if !self.store.get(&at).is_some_and(|found| found.metadata.is_terminating()) {
            return;
        }
        let inside =
            |(at, _): &(&Place, &Arc<Object>)| matches!(at, Place::Object(key) if *key.namespace == **name);
        let inside: Vec<(Place, bool)> = self
            .store
            .objects()
            .filter(inside)
            .map(|(at, object)| (at.clone(), object.metadata.is_terminating()))
            .collect();
        if inside.is_empty() {
            self.store.remove(&at);
        } else if let Some((at, _)) = inside.iter().find(|(_, terminating)| !terminating) {
            drop(self.store.delete(at, None));
            let delay = Duration::from_millis(self.random.u64(0..60));
            self.after(delay, Event::Namespace(name.clone()));
        }
        self.publish(Writer::Kubernetes);
    }

    /// What the garbage collector does: an object is deleted when none of its owners exists, and an owner that does not
    /// exist is removed from the others. An owner of an unknown kind keeps it from both.
    pub(crate) fn collect_garbage(&mut self) {
        self.collecting = false;
        let mut garbage = Vec::new();
        for (at, object) in self.store.objects() {
            let Place::Object(key) = at else { continue };
            let owners = &object.metadata.owner_references;
            let is_known = |kind: &str| kind == "ConfigMap" || kind == "Secret";
            let known = owners.iter().all(|owner| is_known(&owner.kind));
            if owners.is_empty() || object.metadata.is_terminating() || !known {
                continue;
            }
            let exists = |owner: &lockstep_core::object::OwnerReference| {
                let kind = if owner.kind == "Secret" { Kind::Secret } else { Kind::ConfigMap };
                let owner_key = ObjectKey::new(kind, &key.namespace, &owner.name);
                self.store.get(&Place::Object(owner_key)).is_some_and(|found| found.metadata.uid == owner.uid)
            };
            let existing: Vec<_> = owners.iter().filter(|owner| exists(owner)).cloned().collect();
            if existing.len() < owners.len() {
                garbage.push((at.clone(), existing));
            }
        }
        for (at, existing) in garbage {
            if existing.is_empty() {
                drop(self.store.delete(&at, None));
            } else if let Some(object) = self.store.get(&at) {
                let mut object = Object::clone(object);
                object.metadata.owner_references = existing;
                drop(self.store.replace(&at, object, "kube-controller-manager"));
            }
        }
        self.publish(Writer::Kubernetes);
    }

    /// Somebody does something. What the API server refuses has no effect.
    pub(crate) fn step(&mut self, step: &Step) {
        self.backups.push((self.store.clone(), self.lease.clone()));
        if self.is_down() {
            return;
        }
        self.note(|| format!("people: {}", serde_json::json!(step)));
        let at = convert::from_model_key(&step.at);
        let now = self.store.get(&at).map(|object| convert::to_model(object));
        for write in step.writes(now.as_ref()) {
            let outcome = match write {
                Write::Create(object) => {
                    let uid = self.new_uid();
                    let object = convert::from_model(&object);
                    self.store.create(&at, object, uid, PERSON).map(drop)
                }
                Write::Replace(object) => {
                    let mut after = convert::from_model(&object);
                    // The model does not know all fields of an owner.
                    if let Some(before) = self.store.get(&at)
                        && now.as_ref().is_some_and(|now| now.owners == object.owners)
                    {
                        after.metadata.owner_references.clone_from(&before.metadata.owner_references);
                    }
                    self.store.replace(&at, after, PERSON).map(drop)
                }
                Write::Delete => self.store.delete(&at, None),
            };
            if let Err(failure) = outcome {
                self.note(|| format!("people: {failure}"));
            }
            self.publish(Writer::Person);
        }
    }

    /// Creates the namespaces that a history begins with.
    pub(crate) fn create_namespaces(&mut self) {
        for name in names().initial_namespaces() {
            let uid = self.new_uid();
            let at = Place::Namespace(name.as_str().into());
            self.store.create(&at, Object::default(), uid, PERSON).expect("a namespace");
            self.publish(Writer::Person);
        }
    }

    // --- faults

    pub(crate) fn fault(&mut self, fault: Fault) {
        self.note(|| format!("fault: {fault:?}"));
        let millis = Duration::from_millis;
        let now = clock::now();
        match fault {
            Fault::Partition { replica, time } => {
                self.partitioned_until[replica] = Some(now + millis(time));
                for watch in 0..WATCHES {
                    self.stall(replica, watch, now + millis(time));
                }
            }
            Fault::Break { replica, watch } => self.break_watch(replica, watch),
            Fault::Stall { replica, watch, time } => self.stall(replica, watch, now + millis(time)),
            Fault::Expire { replica, watch } => {
                self.connections[replica][watch].expire();
                self.break_watch(replica, watch);
            }
            Fault::Compact => self.compacted = self.store.version(),
            Fault::Flaky { time, one_in } => self.flaky = Some((now + millis(time), one_in)),
            Fault::Outage { time } => self.go_down(millis(time), None),
            Fault::Restore { steps, down, bump } => {
                // Nobody restores a backup that is a second old. Where versions have overtaken, a restore is noticed
                // only by those who have seen a newer Lease; and where the Lease is gone, a replica that starts just
                // then does not know that another one still writes. A replica that has seen none comes first, and then
                // no backup is older.
                let seen = self.lease_seen.iter().min().copied().flatten().unwrap_or_default();
                let is_older = |lease: &Option<LeaseRecord>| {
                    lease.as_ref().is_some_and(|lease| lease_version(lease) < seen)
                };
                let older = self.backups.iter().enumerate().filter(|(_, (_, lease))| is_older(lease));
                let older: Vec<usize> = older.map(|(backup, _)| backup).collect();
                let backup = older.iter().rev().nth(steps).or(older.first()).map(|backup| (*backup, bump));
                self.go_down(millis(down), backup);
            }
            Fault::Crash { .. } | Fault::Pause { .. } => {}
        }
    }

    fn go_down(&mut self, time: Duration, backup: Option<(usize, bool)>) {
        if self.is_down() {
            return;
        }
        self.down_until = Some(clock::now() + time);
        for replica in 0..REPLICAS {
            (0..WATCHES).for_each(|watch| self.break_watch(replica, watch));
        }
        self.after(time, Event::Up(backup));
    }

    /// The API server answers again.
    pub(crate) fn come_up(&mut self, backup: Option<(usize, bool)>) {
        self.down_until = None;
        // Its caches begin now; a watch from before may have to list.
        if self.random.bool() {
            self.compacted = self.store.version();
        }
        let Some((backup, bump)) = backup else { return };
        let Some((store, lease)) = self.backups.get(backup).cloned() else { return };
        self.backups.truncate(backup);
        let former = self.store.version();
        self.store = store;
        self.lease = lease;
        if bump {
            self.store.skip_versions(former + 1000);
            self.compacted = self.store.version();
        } else {
            self.compacted = self.compacted.min(self.store.version());
        }
        let version = self.store.version();
        self.past.retain(|change| change.version <= version);
        self.note(|| format!("etcd is restored, at version {version} after {former}"));
        let snapshot =
            self.store.objects().map(|(at, object)| (convert::to_model_key(at), convert::to_model(object)));
        self.judge.restored(snapshot.collect());
        self.changes += 1;
        // The controllers look at everything again.
        let terminating = |(at, object): (&Place, &Arc<Object>)| match at {
            Place::Namespace(name) if object.metadata.is_terminating() => Some(name.clone()),
            _ => None,
        };
        for name in self.store.objects().filter_map(terminating).collect::<Vec<_>>() {
            self.after(Duration::from_millis(300), Event::Namespace(name));
        }
        self.collecting = true;
        self.after(Duration::from_millis(500), Event::CollectGarbage);
    }

    /// From now on nothing goes wrong any more.
    pub(crate) fn calm_down(&mut self) {
        self.note(|| "calm".to_owned());
        self.calm = true;
        self.flaky = None;
    }
}

fn lease_version(lease: &LeaseRecord) -> u64 {
    lease.metadata.resource_version.as_ref().and_then(|version| version.parse().ok()).unwrap_or_default()
}

fn describe(by: Writer, change: &Change) -> String {
    let verb = match (&change.before, &change.after) {
        (None, _) => "creates",
        (_, None) => "removes",
        (Some(before), Some(after))
            if after.metadata.is_terminating() && !before.metadata.is_terminating() =>
        {
            "deletes"
        }
        _ => "changes",
    };
    let object = change.after.as_ref().or(change.before.as_ref());
    let text = object.map(|object| {
        let meta = &object.metadata;
        format!(
            "{} labels={:?} annotations={:?} data={:?} owners={} finalizers={:?}",
            meta.uid,
            meta.labels,
            meta.annotations,
            object.data,
            meta.owner_references.len(),
            meta.finalizers
        )
    });
    format!("{by:?} {verb} {} @{} {}", change.at, change.version, text.unwrap_or_default())
}
