//! Events may be repeated, late, or overtaken by our own writes: in the end the world shows what exists.

use proptest::{prelude::*, sample::select};

use super::*;
use crate::object::Object;

const PLACES: [(&str, &str); 3] = [("home", "a-synced"), ("away", "a-synced"), ("away", "b-synced")];

/// What happens to one companion.
#[derive(Debug, Clone, Copy)]
enum CompanionOperation {
    Write { place: usize, value: &'static str, of: &'static str },
    Delete { place: usize },
}

/// How the world learns of it.
#[derive(Debug, Clone, Copy)]
enum Delivery {
    /// The next event of the watch.
    Next,
    /// An earlier event of a companion that is known, once more.
    Again(prop::sample::Index),
    /// The state after one of the next events, as the answer to a write of ours.
    Early(prop::sample::Index),
    /// The state after one of the past events, as the answer to a write of ours that came late.
    Late(prop::sample::Index),
    /// The watch starts over with a list, so many events later; meanwhile a write of ours is answered.
    Relist(prop::sample::Index, prop::sample::Index),
}

#[derive(Clone)]
enum CompanionEvent {
    Applied(Object),
    Deleted(Meta),
}

impl CompanionEvent {
    fn meta(&self) -> &Meta {
        match self {
            Self::Applied(object) => &object.metadata,
            Self::Deleted(meta) => meta,
        }
    }
}

fn operation() -> impl Strategy<Value = CompanionOperation> {
    prop_oneof![
        3 => (0..PLACES.len(), select(vec!["1", "2"]), select(vec!["home/a", "home/b"]))
            .prop_map(|(place, value, of)| CompanionOperation::Write { place, value, of }),
        1 => (0..PLACES.len()).prop_map(|place| CompanionOperation::Delete { place }),
    ]
}

fn delivery() -> impl Strategy<Value = Delivery> {
    prop_oneof![
        6 => Just(Delivery::Next),
        3 => any::<prop::sample::Index>().prop_map(Delivery::Again),
        2 => any::<prop::sample::Index>().prop_map(Delivery::Early),
        2 => any::<prop::sample::Index>().prop_map(Delivery::Late),
        1 => any::<(prop::sample::Index, prop::sample::Index)>()
            .prop_map(|(to, write)| Delivery::Relist(to, write)),
    ]
}

/// What a watch would show, in order.
fn log(operations: &[CompanionOperation]) -> Vec<CompanionEvent> {
    let mut alive: BTreeMap<usize, Object> = BTreeMap::new();
    let mut log = Vec::new();
    for (operation, version) in operations.iter().zip(1..) {
        match *operation {
            CompanionOperation::Write { place, value, of } => {
                let (namespace, name) = PLACES[place];
                let uid =
                    alive.get(&place).map_or(format!("uid-{version}"), |known| known.metadata.uid.clone());
                let draft = companion(namespace, name).of(of).data("x", value).uid(&uid).version(version);
                alive.insert(place, draft.clone().object());
                log.push(CompanionEvent::Applied(draft.object()));
            }
            CompanionOperation::Delete { place } => {
                if let Some(gone) = alive.remove(&place) {
                    let meta = Meta { resource_version: version.to_string(), ..gone.metadata };
                    log.push(CompanionEvent::Deleted(meta));
                }
            }
        }
    }
    log
}

fn state_after(events: &[CompanionEvent]) -> BTreeMap<ObjectKey, Object> {
    let mut state = BTreeMap::new();
    for event in events {
        let key = ObjectKey::of(Kind::ConfigMap, event.meta());
        match event {
            CompanionEvent::Applied(object) => drop(state.insert(key, object.clone())),
            CompanionEvent::Deleted(_) => drop(state.remove(&key)),
        }
    }
    state
}

fn show(world: &mut World, event: &CompanionEvent) {
    match event {
        CompanionEvent::Applied(object) => {
            world.apply_companion(read_companion(Kind::ConfigMap, object.clone()))
        }
        CompanionEvent::Deleted(meta) => world.delete_companion(Kind::ConfigMap, meta),
    };
}

/// The event as the answer to a write of ours.
fn answer(world: &mut World, event: &CompanionEvent) {
    match event {
        CompanionEvent::Applied(object) => {
            world.companion_written(read_companion(Kind::ConfigMap, object.clone()))
        }
        CompanionEvent::Deleted(meta) => {
            world.companion_deleted(&ObjectKey::of(Kind::ConfigMap, meta), &meta.uid.as_str().into())
        }
    };
}

/// Delivers everything to the world. What it knows of a companion is never older than what the watch has shown.
fn deliver(world: &mut World, log: &[CompanionEvent], deliveries: &[Delivery]) {
    let mut next = 0;
    for delivery in deliveries {
        match delivery {
            Delivery::Next => {
                log.get(next).into_iter().for_each(|event| show(world, event));
                next = (next + 1).min(log.len());
            }
            Delivery::Again(index) if next > 0 => {
                let event = &log[index.index(next)];
                if world.companion(&ObjectKey::of(Kind::ConfigMap, event.meta())).is_some() {
                    show(world, event);
                }
            }
            Delivery::Early(index) if next < log.len() => {
                answer(world, &log[next + index.index(log.len() - next)]);
            }
            Delivery::Late(index) if next > 0 => answer(world, &log[index.index(next)]),
            Delivery::Relist(to, write) => {
                next += to.index(log.len() - next + 1);
                world.list_begins(COMPANIONS);
                let mut objects = state_after(&log[..next]).into_values();
                let first = objects.next();
                first
                    .into_iter()
                    .for_each(|object| drop(world.apply_companion(read_companion(Kind::ConfigMap, object))));
                answer(world, write.get(log));
                objects
                    .for_each(|object| drop(world.apply_companion(read_companion(Kind::ConfigMap, object))));
                world.list_ends(COMPANIONS, log[..next].last().map_or(0, |event| event.meta().version()));
            }
            Delivery::Again(_) | Delivery::Early(_) | Delivery::Late(_) => {}
        }
    }
    log[next..].iter().for_each(|event| show(world, event));
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn world_ends_up_with_what_exists(
        operations in prop::collection::vec(operation(), 1..25),
        deliveries in prop::collection::vec(delivery(), 0..50),
    ) {
        let mut world = world();
        let log = log(&operations);
        prop_assume!(!log.is_empty());
        deliver(&mut world, &log, &deliveries);

        let there = state_after(&log);
        prop_assert_eq!(world.companion_count(), there.len());
        let mut belonging = 0;
        for (key, object) in there {
            let found = world.companion(&key).unwrap();
            prop_assert_eq!(&found.uid.to_string(), &object.metadata.uid);
            prop_assert_eq!(&found.resource_version.to_string(), &object.metadata.resource_version);
            prop_assert_eq!(found.state.content, Content::split(object).1.digest());
            let source = found.state.source.as_ref().unwrap();
            prop_assert!(world.companions_of(source).any(|(indexed, _)| *indexed == key));
            belonging += 1;
        }
        let indexed: usize = world.all_sources().iter().map(|key| world.companions_of(key).count()).sum();
        prop_assert_eq!(indexed, belonging, "nothing else is indexed");
    }
}
