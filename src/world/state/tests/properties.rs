//! However events are repeated, come late or are overtaken by our own writes: the last word is the cluster's.

use proptest::{prelude::*, sample::select};

use super::*;
use crate::object::Object;

const PLACES: [(&str, &str); 3] = [("home", "a-synced"), ("away", "a-synced"), ("away", "b-synced")];

/// What happens to the object at one place.
#[derive(Debug, Clone, Copy)]
enum Deed {
    Write { place: usize, value: &'static str, of: &'static str },
    Delete { place: usize },
}

/// How the world hears of it.
#[derive(Debug, Clone, Copy)]
enum Hearing {
    /// The next event of the watch.
    Next,
    /// An earlier event of a place that is known, once more.
    Again(prop::sample::Index),
    /// The state after one of the next events, as the answer to a write of ours.
    Early(prop::sample::Index),
    /// The state after one of the past events, as the answer to a write of ours that came late.
    Late(prop::sample::Index),
    /// The watch begins anew with a list, so many events later; while it runs, a write of ours is answered.
    Relist(prop::sample::Index, prop::sample::Index),
}

#[derive(Clone)]
enum Event {
    Applied(Object),
    Deleted(Meta),
}

impl Event {
    fn meta(&self) -> &Meta {
        match self {
            Self::Applied(object) => &object.metadata,
            Self::Deleted(meta) => meta,
        }
    }
}

fn deed() -> impl Strategy<Value = Deed> {
    prop_oneof![
        3 => (0..PLACES.len(), select(vec!["1", "2"]), select(vec!["home/a", "home/b"]))
            .prop_map(|(place, value, of)| Deed::Write { place, value, of }),
        1 => (0..PLACES.len()).prop_map(|place| Deed::Delete { place }),
    ]
}

fn hearing() -> impl Strategy<Value = Hearing> {
    prop_oneof![
        6 => Just(Hearing::Next),
        3 => any::<prop::sample::Index>().prop_map(Hearing::Again),
        2 => any::<prop::sample::Index>().prop_map(Hearing::Early),
        2 => any::<prop::sample::Index>().prop_map(Hearing::Late),
        1 => any::<(prop::sample::Index, prop::sample::Index)>()
            .prop_map(|(to, write)| Hearing::Relist(to, write)),
    ]
}

/// What a watch would show, in order.
fn log(deeds: &[Deed]) -> Vec<Event> {
    let mut alive: BTreeMap<usize, Object> = BTreeMap::new();
    let mut log = Vec::new();
    for (deed, version) in deeds.iter().zip(1..) {
        match *deed {
            Deed::Write { place, value, of } => {
                let (namespace, name) = PLACES[place];
                let uid =
                    alive.get(&place).map_or(format!("uid-{version}"), |known| known.metadata.uid.clone());
                let draft = companion(namespace, name).of(of).data("x", value).uid(&uid).version(version);
                alive.insert(place, draft.clone().object());
                log.push(Event::Applied(draft.object()));
            }
            Deed::Delete { place } => {
                if let Some(gone) = alive.remove(&place) {
                    let meta = Meta { resource_version: version.to_string(), ..gone.metadata };
                    log.push(Event::Deleted(meta));
                }
            }
        }
    }
    log
}

fn state_after(events: &[Event]) -> BTreeMap<ObjectKey, Object> {
    let mut state = BTreeMap::new();
    for event in events {
        let key = ObjectKey::of(Kind::ConfigMap, event.meta());
        match event {
            Event::Applied(object) => drop(state.insert(key, object.clone())),
            Event::Deleted(_) => drop(state.remove(&key)),
        }
    }
    state
}

fn hear(world: &mut World, event: &Event) {
    match event {
        Event::Applied(object) => world.apply_companion(read_companion(Kind::ConfigMap, object.clone())),
        Event::Deleted(meta) => world.delete_companion(Kind::ConfigMap, meta),
    };
}

/// It was a write of ours, and this is its answer.
fn answer(world: &mut World, event: &Event) {
    match event {
        Event::Applied(object) => world.companion_written(read_companion(Kind::ConfigMap, object.clone())),
        Event::Deleted(meta) => world.companion_deleted(&ObjectKey::of(Kind::ConfigMap, meta), &meta.uid),
    };
}

/// Tells the world of all that happened. What it knows of a place is never older than what the watch has shown.
fn deliver(world: &mut World, log: &[Event], hearings: &[Hearing]) {
    let mut next = 0;
    for hearing in hearings {
        match hearing {
            Hearing::Next => {
                log.get(next).into_iter().for_each(|event| hear(world, event));
                next = (next + 1).min(log.len());
            }
            Hearing::Again(index) if next > 0 => {
                let event = &log[index.index(next)];
                if world.companion(&ObjectKey::of(Kind::ConfigMap, event.meta())).is_some() {
                    hear(world, event);
                }
            }
            Hearing::Early(index) if next < log.len() => {
                answer(world, &log[next + index.index(log.len() - next)]);
            }
            Hearing::Late(index) if next > 0 => answer(world, &log[index.index(next)]),
            Hearing::Relist(to, write) => {
                next += to.index(log.len() - next + 1);
                world.begin(COMPANIONS);
                let mut objects = state_after(&log[..next]).into_values();
                let first = objects.next();
                first
                    .into_iter()
                    .for_each(|object| drop(world.apply_companion(read_companion(Kind::ConfigMap, object))));
                answer(world, write.get(log));
                objects
                    .for_each(|object| drop(world.apply_companion(read_companion(Kind::ConfigMap, object))));
                world.end(COMPANIONS, log[..next].last().map_or(0, |event| event.meta().version()));
            }
            Hearing::Again(_) | Hearing::Early(_) | Hearing::Late(_) => {}
        }
    }
    log[next..].iter().for_each(|event| hear(world, event));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_world_ends_up_with_what_is_there(
        deeds in prop::collection::vec(deed(), 1..25),
        hearings in prop::collection::vec(hearing(), 0..50),
    ) {
        let mut world = world();
        let log = log(&deeds);
        prop_assume!(!log.is_empty());
        deliver(&mut world, &log, &hearings);

        let there = state_after(&log);
        prop_assert_eq!(world.companion_count(), there.len());
        let mut belonging = 0;
        for (key, object) in there {
            let found = world.companion(&key).unwrap();
            prop_assert_eq!(&found.uid, &object.metadata.uid);
            prop_assert_eq!(&found.resource_version, &object.metadata.resource_version);
            prop_assert_eq!(found.content, Content::split(object).1.digest());
            let source = found.source.as_ref().unwrap();
            prop_assert!(world.companions_of(source).any(|(indexed, _)| *indexed == key));
            belonging += 1;
        }
        let indexed: usize = world.all_sources().iter().map(|key| world.companions_of(key).count()).sum();
        prop_assert_eq!(indexed, belonging, "nothing else is indexed");
    }
}
