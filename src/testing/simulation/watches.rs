//! The connections of the watches: what the API server shows on them, and when. In order on each, but not across them.
//!
//! They behave as `watch::run` on a real API server does: a broken watch is resumed from the last version that it has
//! shown, an expired version is listed again, and a list or a question about the position that is older than what was
//! seen before is the sign of a restore.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use super::{
    scenario::WATCHES,
    server::{Event, State, WatchEvent},
};
use crate::{
    clock,
    testing::store::{Change, Place},
};
use lockstep_cluster::watch;
use lockstep_core::{
    object::{Kind, Object},
    testing::full,
    world::WatchId,
};

pub(crate) const WATCH_IDS: [WatchId; WATCHES] = [
    WatchId::Namespaces,
    WatchId::Companions(Kind::ConfigMap),
    WatchId::Sources(Kind::ConfigMap),
    WatchId::Companions(Kind::Secret),
    WatchId::Sources(Kind::Secret),
];

#[derive(Default)]
pub(crate) struct Connection {
    /// Counts the connections: what is on the agenda for an earlier one is void.
    number: u32,
    /// The list was taken, or the watch was resumed: changes are shown.
    open: bool,
    /// The version to resume from; none before the list is complete.
    resume: Option<u64>,
    /// The newest version seen before this list.
    position: u64,
    pending: VecDeque<(Instant, Item)>,
    stalled_until: Option<Instant>,
    expired: bool,
}

/// What a connection shows.
#[derive(Clone)]
pub(crate) enum Item {
    Apply(Arc<Object>, u64),
    Delete(Arc<Object>, u64),
    ListEnds(u64),
    Bookmark,
}

/// What the driver hands to a replica.
#[expect(clippy::large_enum_variant, reason = "few exist at a time")]
pub(crate) enum Shown {
    Event(watch::Event<Object>),
    /// Versions have gone back.
    Restored,
}

impl Connection {
    /// The version to resume from has expired.
    pub(crate) fn expire(&mut self) {
        self.expired = true;
    }

    fn close(&mut self) {
        self.number += 1;
        self.open = false;
        self.pending.clear();
    }
}

impl State {
    fn connection(&mut self, replica: usize, watch: usize) -> &mut Connection {
        &mut self.connections[replica][watch]
    }

    fn on_watch(&mut self, replica: usize, watch: usize, delay: Duration, event: WatchEvent) {
        let number = self.connection(replica, watch).number;
        self.after(delay, Event::Watch(replica, watch, number, event));
    }

    /// A replica starts, or lists everything again after a restore.
    pub(crate) fn list_again(&mut self, replica: usize) {
        for watch in 0..WATCHES {
            let connection = self.connection(replica, watch);
            connection.close();
            (connection.resume, connection.position) = (None, 0);
            let delay = Duration::from_millis(self.random.u64(0..3));
            self.on_watch(replica, watch, delay, WatchEvent::Connect);
        }
    }

    /// A replica has ended.
    pub(crate) fn close_watches(&mut self, replica: usize) {
        for watch in 0..WATCHES {
            let connection = self.connection(replica, watch);
            connection.close();
            (connection.resume, connection.position) = (None, 0);
        }
    }

    pub(crate) fn break_watch(&mut self, replica: usize, watch: usize) {
        self.connection(replica, watch).close();
        let pause = Duration::from_millis(self.random.u64(0..1500));
        self.on_watch(replica, watch, pause, WatchEvent::Connect);
    }

    pub(crate) fn stall(&mut self, replica: usize, watch: usize, until: Instant) {
        self.connection(replica, watch).stalled_until = Some(until);
    }

    /// Shows a change on every open connection that selects it.
    pub(crate) fn show(&mut self, change: &Change) {
        for replica in 0..self.connections.len() {
            for (watch, id) in WATCH_IDS.into_iter().enumerate() {
                if self.connections[replica][watch].open
                    && let Some(item) = shown(id, change)
                {
                    self.push(replica, watch, item);
                }
            }
        }
    }

    fn push(&mut self, replica: usize, watch: usize, item: Item) {
        let mut due = clock::now() + self.latency();
        let connection = &mut self.connections[replica][watch];
        due = due.max(connection.stalled_until.unwrap_or(due));
        let last = connection.pending.back().map(|(due, _)| *due);
        due = due.max(last.unwrap_or(due));
        connection.pending.push_back((due, item));
        if last.is_none() {
            let number = connection.number;
            self.at(due, Event::Watch(replica, watch, number, WatchEvent::Deliver));
        }
    }

    /// Whether an event of the agenda belongs to the present connection.
    pub(crate) fn is_current(&self, replica: usize, watch: usize, number: u32) -> bool {
        self.connections[replica][watch].number == number
    }

    /// Something happens on a connection. Returns what the replica sees of it.
    pub(crate) fn on_connection(&mut self, replica: usize, watch: usize, event: WatchEvent) -> Vec<Shown> {
        match event {
            WatchEvent::Connect => self.connect(replica, watch),
            WatchEvent::Arrive => {
                self.open_watch(replica, watch);
                Vec::new()
            }
            WatchEvent::CheckPosition => self.check_position(replica, watch),
            WatchEvent::Deliver => self.deliver(replica, watch),
        }
    }

    fn connect(&mut self, replica: usize, watch: usize) -> Vec<Shown> {
        let lists = self.connection(replica, watch).resume.is_none();
        let delay = self.latency();
        self.on_watch(replica, watch, delay, WatchEvent::Arrive);
        if lists {
            // Before the request, because the list may miss what is written from here on.
            return vec![Shown::Event(watch::Event::Init)];
        }
        let delay = self.latency();
        self.on_watch(replica, watch, delay, WatchEvent::CheckPosition);
        Vec::new()
    }

    /// The request for a list or a watch reaches the API server.
    fn open_watch(&mut self, replica: usize, watch: usize) {
        let pause = Duration::from_millis(self.random.u64(100..1500));
        if self.is_cut_off(replica) {
            self.connection(replica, watch).close();
            return self.on_watch(replica, watch, pause, WatchEvent::Connect);
        }
        let id = WATCH_IDS[watch];
        let Connection { resume, expired, .. } = self.connections[replica][watch];
        match resume {
            Some(version) if version < self.compacted || expired => {
                let connection = self.connection(replica, watch);
                connection.close();
                connection.expired = false;
                connection.position = connection.position.max(version);
                connection.resume = None;
                self.on_watch(replica, watch, pause, WatchEvent::Connect);
            }
            Some(version) => {
                let missed = self.past.iter().filter(|change| change.version > version);
                let missed: Vec<Item> = missed.filter_map(|change| shown(id, change)).collect();
                self.connection(replica, watch).open = true;
                missed.into_iter().for_each(|item| self.push(replica, watch, item));
            }
            None => {
                let matching = self.store.objects().filter(|(at, object)| selects(id, at, object));
                let objects: Vec<Arc<Object>> = matching.map(|(_, object)| object.clone()).collect();
                let version = self.store.version();
                self.connection(replica, watch).open = true;
                for object in objects {
                    let of_object = object.metadata.version();
                    self.push(replica, watch, Item::Apply(object, of_object));
                }
                self.push(replica, watch, Item::ListEnds(version));
                self.push(replica, watch, Item::Bookmark);
            }
        }
    }

    fn check_position(&mut self, replica: usize, watch: usize) -> Vec<Shown> {
        if self.is_cut_off(replica) {
            let pause = Duration::from_millis(self.random.u64(100..1500));
            self.on_watch(replica, watch, pause, WatchEvent::CheckPosition);
            return Vec::new();
        }
        let version = self.store.version();
        let resume = self.connection(replica, watch).resume;
        if resume.is_some_and(|resume| version < resume) { vec![Shown::Restored] } else { Vec::new() }
    }

    fn deliver(&mut self, replica: usize, watch: usize) -> Vec<Shown> {
        let now = clock::now();
        let mut shown = Vec::new();
        let connection = &mut self.connections[replica][watch];
        while let Some((due, _)) = connection.pending.front() {
            if *due > now {
                break;
            }
            let Some((_, item)) = connection.pending.pop_front() else { break };
            let mut advance = |version| {
                if let Some(resume) = &mut connection.resume {
                    *resume = version;
                }
            };
            shown.push(match item {
                Item::Apply(object, version) => {
                    advance(version);
                    Shown::Event(watch::Event::Apply(Object::clone(&object)))
                }
                Item::Delete(object, version) => {
                    advance(version);
                    let mut object = Object::clone(&object);
                    object.metadata.resource_version = version.to_string();
                    Shown::Event(watch::Event::Delete(object))
                }
                // Not complete before the other watches have begun to list, too.
                Item::ListEnds(version) if version < connection.position => Shown::Restored,
                Item::ListEnds(version) => {
                    (connection.resume, connection.position) = (Some(version), version);
                    Shown::Event(watch::Event::InitDone(version.to_string()))
                }
                Item::Bookmark => Shown::Event(watch::Event::Bookmark),
            });
        }
        if let Some((due, _)) = connection.pending.front() {
            let (due, number) = (*due, connection.number);
            self.at(due, Event::Watch(replica, watch, number, WatchEvent::Deliver));
        }
        shown
    }
}

/// Whether a watch shows an object.
fn selects(watch: WatchId, at: &Place, object: &Object) -> bool {
    let (kind, label) = match (watch, at) {
        (WatchId::Namespaces, at) => return matches!(at, Place::Namespace(_)),
        (_, Place::Namespace(_)) => return false,
        (WatchId::Companions(kind), _) => (kind, "companion"),
        (WatchId::Sources(kind), _) => (kind, "managed"),
    };
    let has_label = || object.metadata.labels.get(&full(label)).is_some_and(|value| value == "true");
    matches!(at, Place::Object(key) if key.kind == kind) && has_label()
}

/// What a watch shows of a change. An object that loses its label looks deleted.
fn shown(watch: WatchId, Change { at, before, after, version }: &Change) -> Option<Item> {
    let selected =
        |object: &Option<Arc<Object>>| object.as_ref().filter(|object| selects(watch, at, object)).cloned();
    match (selected(before), selected(after)) {
        (_, Some(object)) => Some(Item::Apply(object, *version)),
        (Some(object), None) => Some(Item::Delete(object, *version)),
        (None, None) => None,
    }
}
