//! The rows of the table "What the controller does", as far as a plan decides them.

mod heals;
mod limits;
pub(crate) mod properties;
mod releases;

use Planned::{Create, Delete, DeleteLost, Recreate, Release, Update};

use super::*;
use crate::{
    object::Object,
    testing::{
        ObjectBuilder,
        cluster::{Cluster, Planned, planned},
        configmap, full,
        history::strip_source_labels,
        namespace, object, source,
    },
};

/// A source with companions in its own namespace and in `away`.
fn colors() -> ObjectBuilder {
    source("home", "colors").data("sky", "blue").annotate("target-namespaces", ".,away")
}

fn two_namespaces() -> Cluster {
    Cluster::with(&["home", "away"])
}

/// The companions of [`colors`] are right.
fn mirrored() -> (Cluster, ObjectKey) {
    let mut cluster = two_namespaces();
    let key = cluster.put(colors());
    assert_eq!(cluster.reconcile(&key), []);
    assert_nothing(&cluster, &key);
    (cluster, key)
}

fn home() -> ObjectKey {
    configmap("home", "colors-synced")
}

fn away() -> ObjectKey {
    configmap("away", "colors-synced")
}

fn expect(cluster: &Cluster, key: &ObjectKey, expected: &[(&str, Planned)]) {
    let expected: Vec<_> = expected.iter().map(|(at, step)| ((*at).to_owned(), *step)).collect();
    assert_eq!(planned(&cluster.plan(key)), expected);
}

fn assert_nothing(cluster: &Cluster, key: &ObjectKey) {
    let plan = cluster.plan(key);
    assert!(plan.is_empty(), "{:?} {:?}", planned(&plan), plan.troubles);
}

/// Nothing is written, and these are the labels of what is reported.
fn assert_only_troubles(cluster: &Cluster, key: &ObjectKey, labels: &[&str]) {
    let plan = cluster.plan(key);
    assert_eq!(planned(&plan), []);
    assert_eq!(plan.troubles.iter().map(Trouble::label).collect::<Vec<_>>(), labels);
}

fn data(cluster: &Cluster, at: &ObjectKey, key: &str) -> Option<String> {
    cluster.object(at)?.data?.remove(key)
}

// --- what a source asks for

#[test]
fn new_source_gets_a_companion_in_every_target() {
    let mut cluster = two_namespaces();
    let key = cluster.put(colors());
    let new = Create(WriteReason::New);
    expect(&cluster, &key, &[("away/colors-synced", new), ("home/colors-synced", new)]);
    cluster.reconcile(&key);
    assert_eq!(data(&cluster, &home(), "sky").as_deref(), Some("blue"));
    assert_eq!(data(&cluster, &away(), "sky").as_deref(), Some("blue"));
    assert_eq!(cluster.object(&home()).unwrap().metadata.owner_references.len(), 1);
    assert!(cluster.object(&away()).unwrap().metadata.owner_references.is_empty());
    assert_nothing(&cluster, &key);
}

#[test]
fn changed_content_reaches_each_companion_with_one_write() {
    let (mut cluster, key) = mirrored();
    cluster.put(colors().data("sky", "red"));
    let follow = Update(WriteReason::SourceChanged);
    expect(&cluster, &key, &[("away/colors-synced", follow), ("home/colors-synced", follow)]);
    cluster.reconcile(&key);
    assert_eq!(data(&cluster, &away(), "sky").as_deref(), Some("red"));
    assert_nothing(&cluster, &key);
}

#[test]
fn changed_policy_reaches_each_companion_with_one_write() {
    for draft in [
        colors().annotate("protect", "all"),
        colors().annotate("keys", "sky=heaven"),
        colors().label("example.com/team", "a").annotate("copy-labels", "example.com/team"),
        colors().annotate("example.com/team", "a").annotate("copy-annotations", "example.com/*"),
    ] {
        let (mut cluster, key) = mirrored();
        cluster.put(draft);
        let follow = Update(WriteReason::SourceChanged);
        expect(&cluster, &key, &[("away/colors-synced", follow), ("home/colors-synced", follow)]);
        cluster.reconcile(&key);
        assert_nothing(&cluster, &key);
    }
}

#[test]
fn change_that_no_companion_shows_writes_nothing() {
    let (mut cluster, key) = mirrored();
    cluster.put(colors().data("sea", "green").annotate("keys", "sky").label("example.com/team", "a"));
    assert_nothing(&cluster, &key);
}

#[test]
fn label_that_is_no_longer_copied_is_removed() {
    let (mut cluster, key) = mirrored();
    cluster.put(colors().label("example.com/team", "a").annotate("copy-labels", "example.com/team"));
    cluster.reconcile(&key);
    let labels = |cluster: &Cluster| cluster.object(&away()).unwrap().metadata.labels.clone();
    assert_eq!(labels(&cluster)["example.com/team"], "a");
    cluster.put(colors());
    cluster.reconcile(&key);
    assert!(!labels(&cluster).contains_key("example.com/team"));
    assert_nothing(&cluster, &key);
}

#[test]
fn new_companion_name_creates_one_and_deletes_the_other() {
    let (mut cluster, key) = mirrored();
    cluster.put(colors().annotate("companion-name", "paint"));
    let (new, gone) = (Create(WriteReason::New), Delete(DeleteReason::NotWanted));
    expect(
        &cluster,
        &key,
        &[
            ("away/colors-synced", gone),
            ("away/paint", new),
            ("home/colors-synced", gone),
            ("home/paint", new),
        ],
    );
}

#[test]
fn namespace_that_appears_or_starts_to_match_gets_a_companion() {
    let mut cluster = Cluster::with(&["home"]);
    let key = cluster.put(
        source("home", "colors")
            .annotate("target-namespaces", "team-*")
            .annotate("target-selector", "env=dev"),
    );
    assert_only_troubles(&cluster, &key, &["no_match", "no_match"]);
    cluster.namespace(namespace("team-a"));
    cluster.namespace(namespace("other").label("example.com/env", "dev"));
    expect(&cluster, &key, &[("team-a/colors-synced", Create(WriteReason::New))]);
    let mut dev = namespace("other");
    dev.object.metadata.labels.insert("env".to_owned(), "dev".to_owned());
    cluster.namespace(dev);
    let new = Create(WriteReason::New);
    expect(&cluster, &key, &[("other/colors-synced", new), ("team-a/colors-synced", new)]);
}

#[test]
fn missing_target_is_reported_and_keeps_no_other_waiting() {
    let mut cluster = Cluster::with(&["home"]);
    let key = cluster.put(colors());
    expect(&cluster, &key, &[("home/colors-synced", Create(WriteReason::New))]);
    assert_eq!(cluster.plan(&key).troubles, [Trouble::NoNamespace("away".to_owned())]);
}

#[test]
fn terminating_namespace_is_skipped() {
    let mut cluster = two_namespaces();
    let key = cluster.put(colors());
    cluster.namespace(namespace("away").terminating());
    expect(&cluster, &key, &[("home/colors-synced", Create(WriteReason::New))]);

    let (mut cluster, key) = mirrored();
    cluster.namespace(namespace("away").terminating());
    cluster.edit(&away(), |object| drop(object.data.take()));
    assert_nothing(&cluster, &key);
    cluster.put(colors().annotate("target-namespaces", "."));
    assert_nothing(&cluster, &key);
    cluster.delete(&key);
    expect(&cluster, &key, &[("home/colors-synced", Delete(DeleteReason::SourceGone))]);
}

// --- when companions are deleted

#[test]
fn companions_are_deleted_when_their_source_is_deleted_or_unlabelled() {
    let (mut cluster, key) = mirrored();
    cluster.delete(&key);
    let gone = Delete(DeleteReason::SourceGone);
    expect(&cluster, &key, &[("away/colors-synced", gone), ("home/colors-synced", gone)]);
    // The controller leaves these to the garbage collector.
    assert!(cluster.companion(&home()).unwrap().state.source_owner.is_some());
    assert!(cluster.companion(&away()).unwrap().state.source_owner.is_none());

    let (mut cluster, key) = mirrored();
    cluster.edit(&key, |object| object.metadata.labels.clear());
    expect(&cluster, &key, &[("away/colors-synced", gone), ("home/colors-synced", gone)]);
    cluster.reconcile(&key);
    assert!(cluster.object(&home()).is_none() && cluster.object(&away()).is_none());
    assert!(cluster.object(&key).is_some());
}

#[test]
fn orphan_is_deleted_even_if_its_source_was_deleted_while_the_process_was_down() {
    let (mut cluster, key) = mirrored();
    cluster.edit(&home(), |object| object.metadata.owner_references.clear());
    cluster.delete(&key);
    cluster.restart();
    assert!(cluster.all_sources().contains(&key));
    assert!(cluster.companion(&home()).unwrap().state.source_owner.is_none());
    let gone = Delete(DeleteReason::SourceGone);
    expect(&cluster, &key, &[("away/colors-synced", gone), ("home/colors-synced", gone)]);
}

#[test]
fn companion_is_deleted_where_a_target_no_longer_matches() {
    let not_wanted = [("away/colors-synced", Delete(DeleteReason::NotWanted))];
    let (mut cluster, key) = mirrored();
    cluster.put(colors().annotate("target-namespaces", "."));
    expect(&cluster, &key, &not_wanted);

    let mut cluster = two_namespaces();
    let mut dev = namespace("away");
    dev.object.metadata.labels.insert("env".to_owned(), "dev".to_owned());
    cluster.namespace(dev);
    let key = cluster.put(source("home", "colors").annotate("target-selector", "env=dev"));
    cluster.reconcile(&key);
    cluster.namespace(namespace("away"));
    expect(&cluster, &key, &not_wanted);
    cluster.reconcile(&key);
    assert!(cluster.object(&away()).is_none());
    assert_only_troubles(&cluster, &key, &["no_match"]);
}

#[test]
fn recreated_source_takes_over_its_companions() {
    let (mut cluster, key) = mirrored();
    cluster.put_anew(colors());
    let uid = cluster.object(&key).unwrap().metadata.uid.clone();
    let follow = Update(WriteReason::SourceChanged);
    expect(&cluster, &key, &[("away/colors-synced", follow), ("home/colors-synced", follow)]);
    cluster.reconcile(&key);
    assert_eq!(cluster.object(&home()).unwrap().metadata.controller().unwrap().uid, uid);
    assert_eq!(cluster.object(&away()).unwrap().metadata.annotations[&full("source-uid")], uid);
    assert_nothing(&cluster, &key);

    // The garbage collector may be faster: then it is created again.
    cluster.put_anew(colors());
    cluster.collect_garbage();
    expect(
        &cluster,
        &key,
        &[("away/colors-synced", follow), ("home/colors-synced", Create(WriteReason::Healed(Heal::Deleted)))],
    );
}

#[test]
fn nothing_is_written_for_a_terminating_source() {
    let (mut cluster, key) = mirrored();
    cluster.put(colors().finalizer("example.com/wait"));
    cluster.delete(&key);
    cluster.delete(&away());
    cluster.edit(&home(), |object| drop(object.data.take()));
    assert_nothing(&cluster, &key);
}

#[test]
fn companions_of_a_paused_source_stay_until_it_is_deleted() {
    let (mut cluster, key) = mirrored();
    cluster.put(colors().data("sky", "red").annotate("paused", "true").annotate("target-namespaces", "."));
    cluster.delete(&home());
    assert_only_troubles(&cluster, &key, &["paused"]);
    cluster.delete(&key);
    let (gone, lost) = (Delete(DeleteReason::SourceGone), DeleteLost(DeleteReason::SourceGone));
    expect(&cluster, &key, &[("away/colors-synced", gone), ("home/colors-synced", lost)]);
    cluster.reconcile(&key);
    assert_nothing(&cluster, &key);
}

// --- companions that lost their marks while nobody could heal them

/// Reconciles a source that is gone, twice: a lost companion is looked for, and then deleted.
fn reconcile_twice(cluster: &mut Cluster, key: &ObjectKey) {
    (0..2).for_each(|_| assert_eq!(cluster.reconcile(key), []));
    assert_nothing(cluster, key);
}

#[test]
fn companion_that_lost_its_marks_while_paused_goes_with_its_source() {
    for strip_annotations in [false, true] {
        for gone in [true, false] {
            let (mut cluster, key) = mirrored();
            cluster.put(colors().annotate("paused", "true"));
            cluster.edit(&away(), |object| {
                object.metadata.labels.clear();
                if strip_annotations {
                    object.metadata.annotations.clear();
                }
            });
            assert_only_troubles(&cluster, &key, &["paused"]);
            if gone {
                cluster.delete(&key);
            } else {
                // It is resumed, and no longer wants this place.
                cluster.put(colors().annotate("target-namespaces", "."));
            }
            reconcile_twice(&mut cluster, &key);
            assert!(cluster.object(&away()).is_none());
        }
    }
}

#[test]
fn lost_companion_is_known_after_a_restart_only_by_the_uid_of_its_source_and_our_entry() {
    let no_edit = |_: &mut Object| {};
    let no_entry = |object: &mut Object| object.metadata.managed_fields.clear();
    let no_uid = |object: &mut Object| drop(object.metadata.annotations.remove(&full("source-uid")));
    let a_source = |object: &mut Object| {
        object.metadata.annotations.remove(&full("source"));
        object.metadata.labels.insert(full("managed"), "true".to_owned());
    };
    for (edit, deleted) in
        [(&no_edit as &dyn Fn(&mut Object), true), (&no_entry, false), (&no_uid, false), (&a_source, false)]
    {
        let (mut cluster, key) = mirrored();
        cluster.put(colors().annotate("paused", "true"));
        cluster.edit(&away(), |object| {
            object.metadata.labels.clear();
            edit(object);
        });
        cluster.restart();
        cluster.delete(&key);
        reconcile_twice(&mut cluster, &key);
        assert_eq!(cluster.object(&away()).is_none(), deleted);
    }
}

#[test]
fn exported_copy_in_the_place_of_a_lost_companion_is_left_alone() {
    let (mut cluster, key) = mirrored();
    cluster.put(colors().annotate("paused", "true"));
    let mut copy = cluster.object(&away()).unwrap();
    copy.metadata.labels.clear();
    copy.metadata.managed_fields.clear();
    cluster.put_anew(ObjectBuilder { kind: key.kind, object: copy });
    cluster.delete(&key);
    reconcile_twice(&mut cluster, &key);
    assert!(cluster.object(&away()).is_some());
}

#[test]
fn companion_that_loses_its_label_after_its_source_is_gone_is_deleted() {
    let (mut cluster, key) = mirrored();
    cluster.delete(&key);
    cluster.edit(&away(), |object| object.metadata.labels.clear());
    reconcile_twice(&mut cluster, &key);
    assert!(cluster.object(&away()).is_none());
}

#[test]
fn companions_of_a_source_recreated_with_a_malformed_policy_are_deleted() {
    let malformed = || colors().annotate("protect", "everything");
    for (strip, restart) in [(false, false), (true, false), (false, true)] {
        let (mut cluster, key) = mirrored();
        if strip {
            cluster.put(colors().annotate("paused", "true"));
            cluster.edit(&away(), |object| object.metadata.labels.clear());
        }
        cluster.put_anew(malformed());
        if restart {
            cluster.restart();
        }
        cluster.reconcile(&key);
        cluster.reconcile(&key);
        assert!(cluster.object(&away()).is_none() && cluster.object(&home()).is_none());
        let plan = cluster.plan(&key);
        assert!(planned(&plan).is_empty() && plan.troubles.len() == 1);
    }
    // The same source that becomes malformed keeps them, a lost one included.
    let (mut cluster, key) = mirrored();
    cluster.put(malformed());
    cluster.edit(&away(), |object| object.metadata.labels.clear());
    assert_eq!(planned(&cluster.plan(&key)), []);
    cluster.put(colors());
    cluster.reconcile(&key);
    assert_nothing(&cluster, &key);
    assert!(cluster.companion(&away()).is_some());
}

// --- what an update cannot do

#[test]
fn companion_with_immutable_content_is_recreated_when_it_must_change() {
    let mut cluster = two_namespaces();
    let key = cluster.put(colors().immutable());
    cluster.reconcile(&key);
    cluster.put_anew(colors().data("sky", "red").immutable());
    let replace = Recreate(WriteReason::SourceChanged);
    expect(&cluster, &key, &[("away/colors-synced", replace), ("home/colors-synced", replace)]);
    cluster.reconcile(&key);
    assert_eq!(data(&cluster, &away(), "sky").as_deref(), Some("red"));
    assert_nothing(&cluster, &key);
}

#[test]
fn marks_of_an_immutable_companion_are_updated_in_place() {
    let mut cluster = two_namespaces();
    let key = cluster.put(colors().immutable());
    cluster.reconcile(&key);
    cluster.put(colors().immutable().annotate("protect", "all"));
    let follow = Update(WriteReason::SourceChanged);
    expect(&cluster, &key, &[("away/colors-synced", follow), ("home/colors-synced", follow)]);
    cluster.reconcile(&key);
    assert_nothing(&cluster, &key);
}

#[test]
fn companions_become_immutable_with_an_update() {
    let (mut cluster, key) = mirrored();
    cluster.put(colors().immutable());
    let follow = Update(WriteReason::SourceChanged);
    expect(&cluster, &key, &[("away/colors-synced", follow), ("home/colors-synced", follow)]);
    cluster.reconcile(&key);
    assert_eq!(cluster.object(&away()).unwrap().immutable, Some(true));
    assert_nothing(&cluster, &key);
}

#[test]
fn companions_of_a_secret_are_recreated_when_its_type_changes() {
    let mut cluster = two_namespaces();
    let key = cluster.put(colors().of_type("Opaque"));
    cluster.reconcile(&key);
    cluster.put_anew(colors().of_type("example.com/other"));
    let replace = Recreate(WriteReason::SourceChanged);
    expect(&cluster, &key, &[("away/colors-synced", replace), ("home/colors-synced", replace)]);
    cluster.reconcile(&key);
    assert_nothing(&cluster, &key);
}

#[test]
fn unlabelled_companion_with_a_finalizer_is_restored() {
    let (mut cluster, key) = mirrored();
    cluster.edit(&away(), |object| {
        object.metadata.labels.clear();
        object.metadata.finalizers.push("example.com/stay".to_owned());
    });
    cluster.delete(&away());
    for _ in 0..3 {
        cluster.reconcile(&key);
    }
    assert!(cluster.object(&away()).is_some(), "it was not created again");
}

#[test]
fn managed_fields_entry_does_not_give_a_source_what_another_source_owns() {
    let mut cluster = two_namespaces();
    let first = cluster.put(source("home", "colors").data("sky", "blue"));
    cluster.reconcile(&first);
    let second =
        cluster.put(source("home", "paint").data("sky", "red").annotate("companion-name", "colors-synced"));
    cluster.edit(&home(), |object| object.metadata.annotations.clear());
    cluster.restart();
    // The controller ownerReference still names the first.
    let plan = cluster.plan(&second);
    assert_eq!(planned(&plan), [], "{:?}", plan.troubles);
}

#[test]
fn managed_fields_entry_does_not_make_two_sources_write_one_object() {
    let mut cluster = two_namespaces();
    let first = cluster.put(colors().annotate("target-namespaces", "away"));
    cluster.reconcile(&first);
    let second = cluster.put(
        source("home", "paint")
            .annotate("target-namespaces", "away")
            .annotate("companion-name", "colors-synced"),
    );
    cluster.edit(&away(), |object| object.metadata.annotations.clear());
    cluster.restart();
    assert!(cluster.plan(&first).changes.is_empty() || cluster.plan(&second).changes.is_empty());
}
