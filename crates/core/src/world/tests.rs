//! What the world knows after events of watches and answers to our own writes.

mod properties;

use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::{
    object::{Meta, Object, ObjectKey},
    policy::{Targets, content::Content},
    testing::{
        self, ObjectBuilder, companion, configmap, namespace, object, read_companion, read_source, source,
        world,
    },
};

const COMPANIONS: WatchId = WatchId::Companions(Kind::ConfigMap);
const SOURCES: WatchId = WatchId::Sources(Kind::ConfigMap);

fn colors() -> ObjectBuilder {
    source("home", "colors").data("sky", "blue").annotate("target-namespaces", ".,away")
}

/// The companion of [`colors`] in `away`.
fn synced() -> ObjectBuilder {
    companion("away", "colors-synced").of("home/colors").data("sky", "blue")
}

fn colors_key() -> ObjectKey {
    colors().key()
}

/// The namespaces in which lost companions of the source are looked for.
fn looked_for(world: &World) -> Vec<&str> {
    let key = colors_key();
    let places = world.lost_of(&key).filter(|at| world.unwanted_lost_at(&key, at).is_some());
    places.map(|at| &*at.namespace).collect()
}

fn synced_key() -> ObjectKey {
    synced().key()
}

fn see_source(world: &mut World, draft: ObjectBuilder) -> Effect {
    world.apply_source(read_source(draft.kind, draft.object()))
}

fn see(world: &mut World, draft: ObjectBuilder) -> Effect {
    world.apply_companion(read_companion(draft.kind, draft.object()))
}

fn write(world: &mut World, draft: ObjectBuilder) -> Effect {
    world.companion_written(read_companion(draft.kind, draft.object()))
}

fn see_deleted(world: &mut World, draft: &ObjectBuilder) -> Effect {
    world.delete_companion(draft.kind, draft.meta())
}

fn see_namespace(world: &mut World, draft: &ObjectBuilder) -> BTreeSet<String> {
    let (effect, _) = world.apply_namespace(draft.meta());
    effect.requeue.iter().map(ToString::to_string).collect()
}

/// A world with both namespaces, the source and, at version 10, its companion in `away`.
fn known() -> World {
    let mut world = world();
    world.list_begins(WatchId::Namespaces);
    see_namespace(&mut world, &namespace("home"));
    see_namespace(&mut world, &namespace("away"));
    world.list_ends(WatchId::Namespaces, 8);
    see_source(&mut world, colors().version(9));
    see(&mut world, synced().version(10));
    world
}

fn version(world: &World, key: &ObjectKey) -> Option<String> {
    world.companion(key).map(|companion| companion.resource_version.to_string())
}

// --- companions

#[test]
fn older_event_never_replaces_a_newer_state() {
    let mut world = known();
    let newer = see(&mut world, synced().data("sky", "red").version(12));
    assert_eq!(newer.requeue, [colors_key()]);
    let content = world.companion(&synced_key()).unwrap().state.content;
    assert_eq!(see(&mut world, synced().version(11)), Effect::default());
    assert_eq!(version(&world, &synced_key()).as_deref(), Some("12"));
    assert_eq!(world.companion(&synced_key()).unwrap().state.content, content);
    // Nor does the end of an older state: the label was stripped, then we restored it.
    assert_eq!(see_deleted(&mut world, &synced().version(11)), Effect::default());
    assert_eq!(version(&world, &synced_key()).as_deref(), Some("12"));
}

#[test]
fn versions_compare_as_numbers() {
    let mut world = known();
    see(&mut world, synced().data("sky", "red").version(100));
    see(&mut world, synced().version(99));
    assert_eq!(version(&world, &synced_key()).as_deref(), Some("100"));
}

#[test]
fn watch_event_of_our_own_write_enqueues_nothing() {
    let mut world = known();
    write(&mut world, synced().data("sky", "red").version(11));
    assert_eq!(see(&mut world, synced().data("sky", "red").version(11)), Effect::default());
    // The same holds for what we deleted.
    world.companion_deleted(&synced_key(), &Uid::from(&*synced().meta().uid));
    assert_eq!(see_deleted(&mut world, &synced().version(12)), Effect::default());
}

#[test]
fn companion_without_marks_that_a_finalizer_keeps_after_our_delete_is_still_known() {
    let held = || companion("away", "colors-synced").finalizer("example.com/f").version(11);
    let source_of = |world: &World| {
        let found = read_companion(Kind::ConfigMap, held().terminating().version(12).object());
        world.identify(found).1.state.source.clone()
    };
    let mut world = known();
    see(&mut world, held());
    world.companion_deleted(&synced_key(), &Uid::from(&*synced().meta().uid));
    assert_eq!(source_of(&world), Some(colors_key()), "by the create that meets it");
    assert_eq!(see(&mut world, held().terminating().version(12)).requeue, [colors_key()], "by the watch");
    assert_eq!(source_of(&world), Some(colors_key()));

    let mut world = known();
    see(&mut world, held());
    world.companion_released(&synced_key(), &Uid::from(&*synced().meta().uid));
    assert_eq!(source_of(&world), None, "a released one is not ours any more");
}

#[test]
fn late_watch_event_does_not_undo_our_write() {
    let mut world = known();
    write(&mut world, synced().data("sky", "red").version(12));
    assert_eq!(see(&mut world, synced().version(11)), Effect::default());
    assert_eq!(version(&world, &synced_key()).as_deref(), Some("12"));
}

#[test]
fn late_answer_to_a_write_does_not_undo_what_the_watch_has_shown() {
    let mut world = known();
    see(&mut world, synced().data("sky", "red").version(12));
    assert_eq!(write(&mut world, synced().version(11)), Effect::default());
    assert_eq!(version(&world, &synced_key()).as_deref(), Some("12"));
    // Nor does it bring back what was created and deleted meanwhile.
    see_deleted(&mut world, &synced().version(13));
    assert_eq!(write(&mut world, synced().version(12)).requeue, [colors_key()]);
    assert!(world.companion(&synced_key()).is_none());
    write(&mut world, synced().uid("second").version(14));
    assert_eq!(version(&world, &synced_key()).as_deref(), Some("14"));
}

#[test]
fn deletion_of_an_earlier_object_of_the_same_name_is_ignored() {
    let mut world = known();
    see(&mut world, synced().uid("second").version(12));
    assert_eq!(see_deleted(&mut world, &synced().version(13)), Effect::default());
    assert_eq!(world.companion_vanished(&synced_key(), &Uid::from(&*synced().meta().uid)), Effect::default());
    assert!(world.companion(&synced_key()).unwrap().uid == *"second");

    let effect = world.delete_source(Kind::ConfigMap, colors().uid("earlier").version(20).meta());
    assert_eq!(effect, Effect::default());
    assert!(world.source(&colors_key()).is_some());
}

/// Sources that want the companion of [`colors`] in `away`, and others.
fn see_waiting_sources(world: &mut World) {
    for (waiting, name) in [
        (source("away", "paint"), "colors-synced"),
        (source("third", "paint").annotate("target-namespaces", "*"), "colors-synced"),
        (source("fourth", "paint").annotate("target-namespaces", "away,third"), "colors-synced"),
        // These want another namespace, name or kind, or are not written for.
        (source("home", "paint"), "colors-synced"),
        (source("third", "dye").annotate("target-namespaces", "third"), "colors-synced"),
        (source("away", "dye"), "dyes"),
        (source("away", "paint").of_type("Opaque"), "colors-synced"),
        (source("away", "paused").annotate("paused", "true"), "colors-synced"),
        (source("away", "malformed").annotate("protect", "perhaps"), "colors-synced"),
    ] {
        see_source(world, waiting.annotate("companion-name", name));
    }
}

#[test]
fn sources_that_wait_for_a_name_are_not_enqueued_while_its_owner_wants_it() {
    let mut world = known();
    see_waiting_sources(&mut world);
    assert_eq!(see(&mut world, synced().data("sky", "red").version(11)).requeue, [colors_key()]);
    assert_eq!(see_deleted(&mut world, &synced().version(12)).requeue, [colors_key()]);
    assert_eq!(see(&mut world, synced().uid("second").version(13)).requeue, [colors_key()]);
}

#[test]
fn next_in_line_is_enqueued_when_the_owner_of_a_name_gives_it_up() {
    let next = configmap("away", "paint");
    for change in [None, Some(colors().annotate("target-namespaces", ".").version(11))] {
        let mut world = known();
        see_waiting_sources(&mut world);
        match change {
            Some(source) => see_source(&mut world, source),
            None => world.delete_source(Kind::ConfigMap, colors().version(11).meta()),
        };
        let effect = see_deleted(&mut world, &synced().version(12));
        assert_eq!(effect.requeue, [colors_key(), next.clone()]);
    }
    // The two watches may show it in the other order.
    let mut world = known();
    see_waiting_sources(&mut world);
    see_deleted(&mut world, &synced().version(11));
    world.delete_source(Kind::ConfigMap, colors().version(12).meta());
    assert_eq!(looked_for(&world).len(), 2, "both places are looked at");
    let lost = world.unwanted_lost_at(&colors_key(), &synced_key()).unwrap().clone();
    assert_eq!(world.lost_gone(&synced_key(), &lost).requeue, [next]);
}

#[test]
fn every_source_that_wants_an_object_without_an_owner_is_enqueued_when_it_can_be_adopted() {
    let mut world = known();
    see_waiting_sources(&mut world);
    let all = [
        configmap("away", "paint"),
        configmap("away", "paused"),
        configmap("fourth", "paint"),
        colors_key(),
        configmap("third", "paint"),
    ];
    let foreign = || companion("away", "colors-synced").uid("foreign").finalizer("example.com/f");
    assert_eq!(see(&mut world, foreign().version(11)).requeue, all);
    assert_eq!(see(&mut world, foreign().data("sky", "red").version(12)).requeue, []);
    let free = companion("away", "colors-synced").uid("foreign").data("sky", "red").version(13);
    assert_eq!(see(&mut world, free).requeue, all);
}

#[test]
fn edited_annotation_does_not_move_a_known_companion_to_another_source() {
    let mut world = known();
    let effect = see(&mut world, synced().of("away/other").version(11));
    assert_eq!(effect.requeue, [colors_key()]);
    assert_eq!(world.companions_of(&colors_key()).count(), 1);
    assert_eq!(world.companions_of(&configmap("away", "other")).count(), 0);
    // A new object of that name belongs to the source that its annotation names.
    see(&mut world, synced().of("away/other").uid("second").version(12));
    assert_eq!(world.companions_of(&colors_key()).count(), 0);
    assert_eq!(world.companions_of(&configmap("away", "other")).count(), 1);
}

#[test]
fn resync_includes_the_missing_source_of_a_companion() {
    let mut world = world();
    world.list_begins(WatchId::Namespaces);
    world.list_ends(WatchId::Namespaces, 8);
    see(&mut world, synced());
    assert_eq!(world.all_sources(), [colors_key()]);
    assert_eq!((world.cross_namespace_counts(), world.source_count()), ((1, 1), 0));
    see(&mut world, companion("home", "colors-synced").of("home/colors"));
    assert_eq!(world.cross_namespace_counts(), (1, 1), "the other one is beside its source");
    see_deleted(&mut world, &companion("home", "colors-synced").of("home/colors"));
    see_deleted(&mut world, &synced());
    assert_eq!(world.all_sources(), []);
}

// --- relists

#[test]
fn relist_removes_what_is_missing_but_not_what_was_written_meanwhile() {
    let mut world = known();
    let kept = || companion("home", "colors-synced").of("home/colors");
    let written = || companion("third", "colors-synced").of("home/colors");
    let deleted_again = || companion("fourth", "colors-synced").of("home/colors");
    see(&mut world, kept().version(10));
    world.list_begins(COMPANIONS);
    write(&mut world, deleted_again().version(12));
    write(&mut world, written().version(20));
    see(&mut world, kept().version(10));
    let effect = world.list_ends(COMPANIONS, 15);
    assert_eq!(effect.requeue, [colors_key(), colors_key()]);
    assert!(world.companion(&synced_key()).is_none());
    assert!(world.companion(&deleted_again().key()).is_none(), "the list is newer than this write");
    assert!(world.companion(&kept().key()).is_some() && world.companion(&written().key()).is_some());
    assert!(world.was_lost(&synced_key()));
    // The next list removes what this one spared.
    world.list_begins(COMPANIONS);
    see(&mut world, kept().version(10));
    world.list_ends(COMPANIONS, 30);
    assert!(world.companion(&written().key()).is_none());
}

#[test]
fn relist_older_than_our_write_does_not_undo_it() {
    let mut world = known();
    world.list_begins(COMPANIONS);
    write(&mut world, synced().data("sky", "red").version(12));
    assert_eq!(see(&mut world, synced().version(10)), Effect::default());
    world.list_ends(COMPANIONS, 11);
    assert_eq!(version(&world, &synced_key()).as_deref(), Some("12"));
}

#[test]
fn relist_of_one_kind_leaves_the_others_alone() {
    let mut world = known();
    for stream in [WatchId::Companions(Kind::Secret), WatchId::Sources(Kind::Secret), WatchId::Namespaces] {
        world.list_begins(stream);
        assert_eq!(world.list_ends(stream, 20), Effect::default());
    }
    assert!(world.companion(&synced_key()).is_some() && world.source(&colors_key()).is_some());
    assert!(
        world.namespaces().is_gone_or_terminating("away"),
        "a namespace that a list does not show is gone"
    );
}

#[test]
fn relist_without_a_source_removes_it() {
    let mut world = known();
    world.list_begins(SOURCES);
    see_source(&mut world, source("home", "other"));
    let effect = world.list_ends(SOURCES, 20);
    assert_eq!(
        effect,
        Effect { requeue: vec![colors_key()], events: vec![(colors_key(), SourceEvent::Removed)] }
    );
    assert_eq!(world.all_sources().len(), 2, "its companions are still there");
}

#[test]
fn relist_after_an_etcd_restore_replaces_newer_states() {
    let mut world = known();
    see(&mut world, synced().data("sky", "red").version(1000));
    see_source(&mut world, colors().data("sky", "red").version(999));
    world.list_begins(COMPANIONS);
    world.list_begins(SOURCES);
    assert_eq!(see(&mut world, synced().version(10)).requeue, [colors_key()]);
    assert_eq!(see_source(&mut world, colors().version(9)).requeue, [colors_key()]);
    world.list_ends(COMPANIONS, 10);
    world.list_ends(SOURCES, 10);
    assert_eq!(version(&world, &synced_key()).as_deref(), Some("10"));
    assert_eq!(world.source(&colors_key()).unwrap().resource_version, "9");
    // From here on versions count again, those of our own writes included.
    write(&mut world, companion("home", "colors-synced").of("home/colors").version(11));
    assert!(world.companion(&configmap("home", "colors-synced")).is_some());
    see(&mut world, synced().data("sky", "red").version(12));
    assert_eq!(see(&mut world, synced().version(11)), Effect::default());
    assert_eq!(version(&world, &synced_key()).as_deref(), Some("12"));
}

#[test]
fn source_is_unconfirmed_from_the_start_of_a_list_until_the_list_shows_it() {
    let mut world = known();
    assert!(!world.is_unconfirmed(&colors_key()));
    world.list_begins(COMPANIONS);
    assert!(!world.is_unconfirmed(&colors_key()), "sources are not listed");
    world.list_begins(SOURCES);
    assert!(world.is_unconfirmed(&colors_key()));
    assert_eq!(see_source(&mut world, colors().version(9)).requeue, [colors_key()]);
    assert!(!world.is_unconfirmed(&colors_key()));
    assert_eq!(see_source(&mut world, colors().version(10)), Effect::default());
    world.list_ends(SOURCES, 10);
    assert!(!world.is_unconfirmed(&colors_key()) && world.source(&colors_key()).is_some());
}

// --- lost companions

#[test]
fn companion_that_vanished_while_its_source_exists_is_lost_until_it_is_back() {
    let mut world = known();
    assert!(!world.was_lost(&synced_key()));
    see_deleted(&mut world, &synced().version(11));
    assert!(world.was_lost(&synced_key()));
    see(&mut world, synced().uid("second").version(12));
    assert!(!world.was_lost(&synced_key()));
    world.companion_vanished(&synced_key(), &"second".into());
    assert!(world.was_lost(&synced_key()));
}

#[test]
fn companion_that_we_deleted_or_whose_source_is_gone_is_not_lost() {
    let mut world = known();
    world.companion_deleted(&synced_key(), &Uid::from(&*synced().meta().uid));
    assert!(!world.was_lost(&synced_key()));

    let mut world = known();
    world.delete_source(Kind::ConfigMap, colors().version(11).meta());
    see_deleted(&mut world, &synced().version(12));
    assert!(!world.was_lost(&synced_key()));
}

#[test]
fn companion_deleted_by_another_replica_is_not_lost() {
    let elsewhere = || colors().annotate("target-namespaces", ".").version(11);
    let renamed = || colors().annotate("companion-name", "other").version(11);
    for change in [elsewhere, renamed] {
        // The two watches may show it in either order.
        let mut world = known();
        see_source(&mut world, change());
        see_deleted(&mut world, &synced().version(12));
        assert!(!world.was_lost(&synced_key()));
        let mut world = known();
        see_deleted(&mut world, &synced().version(12));
        assert!(world.was_lost(&synced_key()));
        see_source(&mut world, change());
        assert!(!world.was_lost(&synced_key()));
    }
}

#[test]
fn companion_released_by_another_replica_is_not_lost_even_if_its_source_is_created_again() {
    let kept = || colors().annotate("when-removed", "keep").uid("first");
    let synced = || synced().annotate("source-uid", "first").annotate("when-removed", "keep");
    let known = || {
        let mut world = known();
        see_source(&mut world, kept().version(11));
        see(&mut world, synced().version(12));
        world
    };
    let elsewhere =
        |world: &mut World| drop(see_source(world, kept().annotate("target-namespaces", ".").version(13)));
    let gone = |world: &mut World| drop(world.delete_source(Kind::ConfigMap, kept().version(13).meta()));
    // A list shows only the new source.
    let anew = |world: &mut World| drop(see_source(world, kept().uid("second").version(13)));
    for change in [&elsewhere as &dyn Fn(&mut World), &gone, &anew] {
        // The two watches may show it in either order.
        for source_first in [true, false] {
            let mut world = known();
            if source_first {
                change(&mut world);
            }
            see_deleted(&mut world, &synced().version(14));
            if !source_first {
                change(&mut world);
            }
            assert!(!world.has_companions(&colors_key()), "nothing is left to look for");
            see_source(&mut world, kept().uid("third").version(15));
            assert!(!world.was_lost(&synced_key()));
            let (_, found) = world.identify(read_companion(
                Kind::ConfigMap,
                object("away", "colors-synced").uid(&synced().meta().uid).object(),
            ));
            assert_eq!(found.state.source, None, "it is a foreign object");
        }
    }
}

/// Another replica has released it, and the namespace withdrew its consent before this replica saw that.
#[test]
fn object_without_marks_is_not_a_lost_companion_if_it_may_have_been_released() {
    let bare = || {
        read_companion(Kind::ConfigMap, object("away", "colors-synced").uid(&synced().meta().uid).object())
    };
    let found = |world: &World| {
        let lost = world.unwanted_lost_at(&colors_key(), &synced_key()).expect("a lost companion");
        let marked = read_companion(Kind::ConfigMap, synced().object());
        assert!(lost.is(marked.companion()), "one with marks was not released");
        lost.is(bare().companion())
    };
    let mut world = known();
    see_source(&mut world, colors().annotate("when-removed", "keep").version(11));
    see(&mut world, synced().annotate("when-removed", "keep").version(12));
    see_namespace(&mut world, &namespace("away").label("exclude", "true"));
    see_deleted(&mut world, &synced().version(13));
    assert!(!found(&world), "its marks said that it stays");

    // A list does not show what happened in between.
    let mut world = known();
    world.delete_source(Kind::ConfigMap, colors().version(11).meta());
    world.list_begins(COMPANIONS);
    world.list_ends(COMPANIONS, 20);
    assert!(!found(&world), "it may have been told to stay meanwhile");

    let mut world = known();
    see_deleted(&mut world, &synced().version(11));
    world.delete_source(Kind::ConfigMap, colors().version(12).meta());
    assert!(found(&world), "it was to be deleted, and somebody took its marks off");
}

/// Another replica has released it, and the watch of sources has not shown this replica why.
#[test]
fn companion_that_was_to_stay_is_not_taken_back_once_all_its_marks_are_gone() {
    let kept = || synced().annotate("when-removed", "keep");
    let bare = || object("away", "colors-synced").uid(&synced().meta().uid).version(13);
    let source_of = |world: &World, found: Object| {
        world.identify(read_companion(Kind::ConfigMap, found)).1.state.source.clone()
    };
    let mut world = known();
    see_source(&mut world, colors().annotate("when-removed", "keep").version(11));
    see(&mut world, kept().version(12));
    assert_eq!(
        source_of(&world, bare().object()),
        None,
        "the watch does not show yet that its label is gone"
    );
    see_deleted(&mut world, &kept().version(13));
    assert_eq!(source_of(&world, bare().object()), None);
    let marked = bare().annotate("source-uid", &colors().meta().uid).object();
    assert_eq!(source_of(&world, marked), Some(colors_key()), "a mark is left, so it was not released");

    let mut world = known();
    see_deleted(&mut world, &synced().version(13));
    assert_eq!(source_of(&world, bare().object()), Some(colors_key()), "it was not to stay");
}

#[test]
fn next_in_line_is_enqueued_when_a_lost_companion_is_left_alone() {
    let mut world = known();
    see_source(&mut world, colors().annotate("when-removed", "keep").version(11));
    see(&mut world, synced().annotate("when-removed", "keep").version(12));
    let other = source("home", "paint")
        .annotate("target-namespaces", "away")
        .annotate("companion-name", "colors-synced");
    see_source(&mut world, other.version(13));
    see_deleted(&mut world, &synced().version(14));
    let effect = world.delete_source(Kind::ConfigMap, colors().version(15).meta());
    assert_eq!(effect.requeue, [colors_key(), configmap("home", "paint")]);
    assert!(!world.has_companions(&colors_key()));
}

#[test]
fn companion_deleted_before_a_restore_is_known_again_when_the_restore_brings_it_back() {
    let mut world = known();
    world.companion_deleted(&synced_key(), &Uid::from(&*synced().meta().uid));
    world.list_begins(COMPANIONS);
    see(&mut world, synced().version(5));
    world.list_ends(COMPANIONS, 7);
    assert_eq!(version(&world, &synced_key()).as_deref(), Some("5"));
}

#[test]
fn deleted_source_has_no_lost_companions() {
    let mut world = known();
    see_deleted(&mut world, &synced().version(11));
    world.delete_source(Kind::ConfigMap, colors().version(12).meta());
    assert!(!world.was_lost(&synced_key()));
}

#[test]
fn lost_companion_that_nobody_wants_is_forgotten_where_nobody_looks_for_it() {
    let lost = |world: &World| world.all_sources().contains(&colors_key());
    let mut world = known();
    see_deleted(&mut world, &synced().version(11));
    (0..3).for_each(|_| world.forget_unwanted_lost());
    assert!(world.was_lost(&synced_key()), "its source wants it");
    world.delete_source(Kind::ConfigMap, colors().version(12).meta());
    assert!(lost(&world));
    let mut later = known();
    later.delete_source(Kind::ConfigMap, colors().version(11).meta());
    see_deleted(&mut later, &synced().version(12));
    later.forget_unwanted_lost();
    assert!(lost(&later), "for a while, in case the leader ends");
    for world in [&mut world, &mut later] {
        (0..2).for_each(|_| world.forget_unwanted_lost());
        assert!(!lost(world));
    }
}

/// The companion of [`colors`] in `away` vanishes, and its source does not want it any more.
fn lose_unwanted(world: &mut World) -> LostCompanion {
    see_deleted(world, &synced().version(11));
    see_source(world, colors().annotate("target-namespaces", ".").version(12));
    world.unwanted_lost_at(&colors_key(), &synced_key()).unwrap().clone()
}

#[test]
fn read_of_a_lost_companion_changes_nothing_about_a_newer_one_of_another_source() {
    let mut world = known();
    let read = lose_unwanted(&mut world);
    let newer = || synced().of("home/other").uid("second");
    see(&mut world, newer().version(13));
    see_deleted(&mut world, &newer().version(14));
    world.lost_found(&synced_key(), &read);
    world.lost_gone(&synced_key(), &read);
    let kept = world.unwanted_lost_at(&configmap("home", "other"), &synced_key());
    assert!(!kept.expect("the newer one").is_found());
}

#[test]
fn lost_companion_counts_among_all_companions_once_it_is_found() {
    let mut world = known();
    let lost = lose_unwanted(&mut world);
    assert_eq!(world.cross_namespace_counts(), (0, 0));
    (0..2).for_each(|_| world.lost_found(&synced_key(), &lost));
    assert_eq!(world.cross_namespace_counts(), (1, 1));
    see(&mut world, companion("third", "colors-synced").of("home/colors").version(12));
    assert_eq!(world.cross_namespace_counts(), (2, 1));
    world.lost_gone(&synced_key(), &lost);
    assert_eq!(world.cross_namespace_counts(), (1, 1));
}

/// A world with 200 namespaces.
fn large() -> World {
    let mut world = known();
    (0..200).for_each(|n| drop(see_namespace(&mut world, &namespace(&format!("team-{n}")))));
    world
}

/// As [`colors`], with companions of another name in every namespace.
fn everywhere(n: u64) -> ObjectBuilder {
    colors().annotate("target-namespaces", "*").annotate("companion-name", &format!("x{n}")).version(20 + n)
}

#[test]
fn source_that_is_edited_while_it_terminates_leaves_the_places_of_its_last_state_before() {
    let mut world = large();
    for n in 0..1000 {
        see_source(&mut world, everywhere(n).finalizer("x/y").terminating());
    }
    let deleted = everywhere(1000);
    world.delete_source(Kind::ConfigMap, deleted.meta());
    assert_eq!(looked_for(&world), ["home"]);
}

#[test]
fn source_leaves_a_limited_number_of_places_however_often_it_is_renamed_and_whatever_it_matches() {
    let places = |world: &World| looked_for(world).len();
    let mut world = large();
    (0..1000).for_each(|n| drop(see_source(&mut world, everywhere(n).annotate("paused", "true"))));
    see_source(&mut world, everywhere(1000));
    assert_eq!(places(&world), lost::MAX_PLACES);

    let mut world = large();
    see_source(&mut world, everywhere(0));
    (0..3).for_each(|_| world.forget_unwanted_lost());
    assert_eq!(places(&world), 0);
    world.delete_source(Kind::ConfigMap, everywhere(1).meta());
    assert_eq!(places(&world), lost::MAX_PLACES);
}

// --- sources

#[test]
fn source_is_added_changed_and_removed() {
    let mut world = world();
    let events = |effect: Effect| {
        assert_eq!(effect.requeue, [colors_key()]);
        effect.events.into_iter().map(|(_, event)| event).collect::<Vec<_>>()
    };
    assert_eq!(events(see_source(&mut world, colors())), [SourceEvent::Added]);
    assert_eq!(
        events(see_source(&mut world, colors().data("sky", "red").version(2))),
        [SourceEvent::Changed]
    );
    assert_eq!(events(see_source(&mut world, colors().uid("second").version(3))), [SourceEvent::Changed]);
    let terminating = colors().uid("second").terminating().version(4);
    assert_eq!(events(see_source(&mut world, terminating.clone())), [SourceEvent::Changed]);
    assert_eq!(events(world.delete_source(terminating.kind, terminating.meta())), [SourceEvent::Removed]);
}

#[test]
fn change_that_can_change_a_companion_enqueues_the_source() {
    for draft in [
        colors().data("sky", "red"),
        colors().binary("logo", "AAEC"),
        colors().immutable(),
        colors().annotate("target-namespaces", "away"),
        colors().annotate("target-selector", "env=dev"),
        colors().annotate("companion-name", "paint"),
        colors().annotate("keys", "sky"),
        colors().annotate("copy-labels", "example.com/team"),
        colors().annotate("protect", "all"),
        colors().annotate("protect", "nonsense"),
        colors().annotate("adopt", "true"),
        colors().annotate("paused", "true"),
        colors().uid("second"),
    ] {
        let mut world = known();
        assert_eq!(see_source(&mut world, draft.version(11)).requeue, [colors_key()]);
    }
}

#[test]
fn change_of_metadata_that_no_companion_shows_enqueues_nothing() {
    let copying = || colors().annotate("copy-labels", "example.com/team");
    let mut world = known();
    see_source(&mut world, copying().version(11));
    for (version, draft) in [
        (12, copying().label("example.com/other", "a")),
        (13, copying().annotate("kubectl.kubernetes.io/last-applied-configuration", "{}")),
        (14, copying().finalizer("example.com/wait")),
        (15, copying().written_by("kubectl")),
        (16, copying().controlled_by("Deployment", "another")),
        (17, copying()),
    ] {
        assert_eq!(see_source(&mut world, draft.version(version)), Effect::default());
        // The live read before deletes compares it.
        assert_eq!(world.source(&colors_key()).unwrap().resource_version, version.to_string());
    }
    let copied = copying().label("example.com/team", "a").version(18);
    assert_eq!(see_source(&mut world, copied).requeue, [colors_key()]);
}

#[test]
fn older_state_of_a_source_is_ignored() {
    let mut world = known();
    see_source(&mut world, colors().data("sky", "red").version(12));
    assert_eq!(see_source(&mut world, colors().version(11)), Effect::default());
    assert_eq!(world.source(&colors_key()).unwrap().resource_version, "12");
}

// --- namespaces

#[test]
fn changed_namespace_enqueues_every_source_that_has_a_companion_there_even_if_it_wants_none() {
    let mut world = world();
    see_source(&mut world, source("home", "malformed").annotate("target-namespaces", ""));
    see_source(&mut world, source("home", "moved").annotate("target-namespaces", "away"));
    for (name, of) in [("m", "home/malformed"), ("v", "home/moved"), ("g", "home/gone")] {
        see(&mut world, companion("team-a", name).of(of));
    }
    see(&mut world, companion("team-b", "o").of("home/other"));
    world.list_begins(WatchId::Namespaces);
    world.list_ends(WatchId::Namespaces, 8);
    let all: BTreeSet<String> = ["gone", "malformed", "moved"].map(|name| format!("home/{name}")).into();
    // Before it was known, nothing could be deleted there.
    assert_eq!(see_namespace(&mut world, &namespace("team-a")), all);
    assert_eq!(see_namespace(&mut world, &namespace("team-a").label("exclude", "true")), all);
}

#[test]
fn changed_namespace_enqueues_the_sources_that_match_before_or_after() {
    let mut world = world();
    for (name, key, value) in [
        ("own", "target-namespaces", "."),
        ("named", "target-namespaces", "team-a"),
        ("prefix", "target-namespaces", "team-*"),
        ("everywhere", "target-namespaces", "*"),
        ("dev", "target-selector", "example.com/env=dev"),
        ("test", "target-selector", "example.com/env=test"),
        ("elsewhere", "target-namespaces", "team-b"),
        ("malformed", "target-namespaces", ""),
    ] {
        see_source(&mut world, source("home", name).annotate(key, value));
    }
    world.list_begins(WatchId::Namespaces);
    world.list_ends(WatchId::Namespaces, 8);
    let reached = |world: &mut World, draft: ObjectBuilder| {
        let names = see_namespace(world, &draft);
        names.into_iter().map(|key| key.replace("home/", "")).collect::<Vec<_>>().join(" ")
    };
    let team = || namespace("team-a");
    let env = |value| team().label("example.com/env", value);
    assert_eq!(reached(&mut world, team()), "everywhere named prefix");
    assert_eq!(reached(&mut world, env("dev")), "dev everywhere named prefix");
    assert_eq!(reached(&mut world, env("dev")), "", "nothing changed");
    assert_eq!(reached(&mut world, env("dev").annotate("example.com/note", "1")), "", "nothing that counts");
    assert_eq!(reached(&mut world, env("test")), "dev everywhere named prefix test");
    assert_eq!(reached(&mut world, team()), "everywhere named prefix test");
    assert_eq!(reached(&mut world, team().terminating()), "everywhere named prefix");
    assert_eq!(reached(&mut world, team().annotate("accept-from", "home")), "everywhere named prefix");
    assert_eq!(reached(&mut world, namespace("home")), "everywhere own");
    world.delete_namespace("team-a");
    assert_eq!(reached(&mut world, team()), "everywhere named prefix", "it was created again");
}

#[test]
fn excluded_namespace_enqueues_sources_that_have_a_companion_there_without_asking_for_it() {
    let mut world = world();
    world.list_begins(WatchId::Namespaces);
    world.list_ends(WatchId::Namespaces, 8);
    see_namespace(&mut world, &namespace("away"));
    for (name, key, value) in [
        ("malformed", "paused", "perhaps"),
        ("paused", "paused", "true"),
        ("stripped", "paused", "true"),
        ("elsewhere", "target-namespaces", "team-b"),
    ] {
        see_source(&mut world, source("home", name).annotate(key, value));
    }
    let companion_of = |name: &str| {
        companion("away", &format!("{name}-synced")).annotate("source", &format!("home/{name}")).uid(name)
    };
    for name in ["malformed", "paused", "stripped"] {
        see(&mut world, companion_of(name));
    }
    see_deleted(&mut world, &companion_of("stripped"));
    let enqueued = see_namespace(&mut world, &namespace("away").label("exclude", "true"));
    assert_eq!(enqueued, ["malformed", "paused", "stripped"].map(|name| format!("home/{name}")).into());
}

#[test]
fn first_list_of_namespaces_enqueues_nothing() {
    let mut world = world();
    see_source(&mut world, colors());
    world.list_begins(WatchId::Namespaces);
    assert!(see_namespace(&mut world, &namespace("away")).is_empty());
    world.list_ends(WatchId::Namespaces, 8);
    world.list_begins(WatchId::Namespaces);
    assert_eq!(see_namespace(&mut world, &namespace("home")).len(), 1, "later lists enqueue sources");
}

#[test]
fn malformed_accept_from_is_reported_and_accepts_nothing() {
    let mut world = world();
    for malformed in ["a,Team A", "!b"] {
        let (_, fault) = world.apply_namespace(namespace("away").annotate("accept-from", malformed).meta());
        assert!(fault.is_some_and(|fault| fault.to_string().contains("workshop.io/accept-from")));
        assert!(!world.namespaces().accept_from_matches("a", "away"));
    }
    let (_, fault) = world.apply_namespace(namespace("away").annotate("accept-from", "a*").meta());
    assert!(
        fault.is_none()
            && world.namespaces().accept_from_matches("a", "away")
            && !world.namespaces().accept_from_matches("b", "away")
    );
}

#[test]
fn long_annotations_and_many_labels_of_a_namespace_are_not_kept() {
    let mut world = testing::world();
    let long = format!("a,{}", "b".repeat(200_000));
    let mut huge = namespace("away");
    for key in [
        "accept-from",
        "accept-adopt-from",
        "default-target-namespaces",
        "default-target-selector",
        "default-protect",
    ] {
        huge = huge.annotate(key, &long);
    }
    for n in 0..10_000 {
        huge = huge.label(&format!("example.com/{n}"), "");
    }
    let (_, fault) = world.apply_namespace(huge.meta());
    let text = fault.expect("a fault").to_string();
    assert!(text.contains("longer than 8192 bytes"), "{text}");
    assert!(format!("{:?}", world.namespaces().get("away")).len() < 50_000);
}

#[test]
fn message_about_a_malformed_accept_from_is_short_however_long_that_is() {
    for value in ["a*b", "\u{1}*b", "ö*b,", "x"].map(|text| text.repeat(256 * 1024 / text.len())) {
        let (_, fault) = world().apply_namespace(namespace("away").annotate("accept-from", &value).meta());
        let text = fault.expect("a fault").to_string();
        assert!(text.len() < 1024, "{} bytes", text.len());
    }
}

#[test]
fn namespace_excluded_by_flag_is_a_target_only_with_accept_from() {
    let rules = NamespaceRules { own_namespace: "own".to_owned(), excluded: "infra-*".parse().unwrap() };
    let mut world = World::new(crate::testing::keys(), rules, 0);
    see_namespace(&mut world, &namespace("infra-a"));
    see_namespace(&mut world, &namespace("infra-b").annotate("accept-from", "home"));
    let eligibility = |home, name| world.namespaces().eligibility(home, name, &Targets::default());
    assert_eq!(eligibility("home", "infra-a"), Eligibility::NotAccepted);
    assert_eq!(eligibility("home", "infra-b"), Eligibility::Eligible);
    assert_eq!(eligibility("other", "infra-b"), Eligibility::NotAccepted);
    assert_eq!(eligibility("home", "nowhere"), Eligibility::Missing);
}

#[test]
fn patterns_that_need_consent_reach_exactly_the_matching_namespaces_that_accept() {
    let mut world = world();
    for draft in [
        namespace("home"),
        namespace("team-a").annotate("accept-from", "home"),
        namespace("team-b").annotate("accept-from", "*,!home"),
        namespace("team-c").label("workshop.io/env", "dev"),
        namespace("dev").label("workshop.io/env", "dev").annotate("accept-from", "h*"),
        namespace("other").annotate("accept-from", "home"),
    ] {
        see_namespace(&mut world, &draft);
    }
    let targets = Targets {
        needs_consent: true,
        selector: Some(crate::policy::selector::parse("workshop.io/env=dev").unwrap()),
        ..Targets::list("., team-*", "home").unwrap()
    };
    let reached = |world: &World| {
        let wanted = world.namespaces().wanted("home", &targets).into_iter();
        let eligible =
            |name: &&str| world.namespaces().eligibility("home", name, &targets) == Eligibility::Eligible;
        wanted.filter(eligible).map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(reached(&world), ["dev", "home", "team-a"]);
    see_namespace(&mut world, &namespace("team-a"));
    see_namespace(&mut world, &namespace("team-c").annotate("accept-from", "home"));
    assert_eq!(reached(&world), ["dev", "home", "team-c"]);
    world.delete_namespace("team-c");
    assert_eq!(reached(&world), ["dev", "home"]);
}

#[test]
fn only_accept_adopt_from_allows_adoption() {
    let mut world = world();
    see_namespace(&mut world, &namespace("one").annotate("accept-from", "home"));
    see_namespace(&mut world, &namespace("two").annotate("accept-adopt-from", "home"));
    let accepts = |name| world.namespaces().accepts_adoption("home", name);
    assert_eq!([accepts("one"), accepts("two"), accepts("home")], [false, true, true]);
}

#[test]
fn companion_keeps_its_other_manager_and_its_controller() {
    let world = known();
    let manager = &crate::testing::keys().instance;
    let draft = object("away", "x").written_by(manager).written_by("kubectl-edit");
    let (_, found) =
        world.identify(testing::read_companion(draft.kind, draft.controlled_by("Deployment", "d1").object()));
    assert!(found.state.written_by_us && !found.state.labelled && found.state.source.is_none());
    assert_eq!(found.state.other_manager.as_deref(), Some("kubectl-edit"));
    assert_eq!(found.state.controller_uid.as_deref(), Some("d1"));
}

#[test]
fn deleted_namespace_has_no_lost_companions() {
    let mut world = known();
    see_namespace(&mut world, &namespace("away").terminating());
    see_deleted(&mut world, &synced().version(11));
    world.delete_namespace("away");
    assert!(!world.was_lost(&synced_key()));
}

#[test]
fn accept_from_that_becomes_malformed_is_reported() {
    let mut world = world();
    world.apply_namespace(namespace("away").meta());
    let (_, fault) = world.apply_namespace(namespace("away").annotate("accept-from", "A*b").meta());
    assert!(fault.is_some());
}

#[test]
fn companion_that_we_deleted_is_not_lost_when_the_watch_is_late() {
    let mut world = known();
    write(&mut world, synced().data("sky", "red").version(11));
    world.companion_deleted(&synced_key(), &Uid::from(&*synced().meta().uid));
    // The watch now brings the update, then the delete.
    let effect = see(&mut world, synced().data("sky", "red").version(11));
    see_deleted(&mut world, &synced().version(12));
    assert!(!world.was_lost(&synced_key()), "and it was looked at: {effect:?}");
}

#[test]
fn version_reused_after_an_etcd_restore_is_not_taken_for_our_own_write() {
    let mut world = known();
    world.list_begins(COMPANIONS);
    let effect = see(&mut world, synced().data("sky", "red").version(10));
    world.list_ends(COMPANIONS, 10);
    assert_eq!(effect.requeue, [colors_key()]);
}

#[test]
fn live_read_replaces_an_older_state_of_the_same_source_and_nothing_else() {
    let text = |world: &World| {
        let source = world.source(&configmap("home", "colors"))?;
        Some((source.resource_version.clone(), world.payload(source).is_some()))
    };
    let read = |draft: ObjectBuilder| read_source(draft.kind, draft.object());
    let draft = |version| source("home", "colors").version(version).data("sky", &version.to_string());
    let mut world = testing::world();
    assert_eq!(world.source_read(read(draft(5))), Effect::default(), "it was deleted after the read");
    assert_eq!(text(&world), None);

    world.apply_source(read(draft(5)));
    world.source_read(read(draft(4)));
    assert_eq!(text(&world), Some(("5".to_owned(), true)));
    world.source_read(read(draft(6).uid("another")));
    assert_eq!(text(&world), Some(("5".to_owned(), true)));
    let effect = world.source_read(read(draft(6)));
    assert_eq!(effect.requeue, [configmap("home", "colors")]);
    assert_eq!(text(&world), Some(("6".to_owned(), true)));

    // Whether it exists is for the list to say, although it was read while that was under way.
    world.list_begins(WatchId::Sources(Kind::ConfigMap));
    world.source_read(read(draft(7)));
    world.list_ends(WatchId::Sources(Kind::ConfigMap), 8);
    assert_eq!(text(&world), None);
    assert_eq!(world.payload_bytes(), 0);
}

#[test]
fn payload_is_kept_only_while_it_may_be_written() {
    let mut world = testing::world();
    let mut keeps = |draft: ObjectBuilder| {
        world.apply_source(read_source(draft.kind, draft.data("sky", "blue").object()));
        world.payload_bytes() > 0
    };
    assert!(keeps(source("home", "colors").version(1)));
    assert!(!keeps(source("home", "colors").version(2).annotate("paused", "true")));
    assert!(keeps(source("home", "colors").version(3)));
    assert!(!keeps(source("home", "colors").version(4).annotate("protect", "everything")));
    assert!(keeps(source("home", "colors").version(5)));
    assert!(!keeps(source("home", "colors").version(6).terminating()));
}
