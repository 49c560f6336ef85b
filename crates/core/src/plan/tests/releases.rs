//! `when-removed: keep`: a companion that is no longer wanted stays, without our marks.

use super::*;
use crate::object::OwnerReference;

fn kept() -> ObjectBuilder {
    colors().annotate("when-removed", "keep")
}

/// The companions of [`kept`] are right.
fn mirrored_to_stay() -> (Cluster, ObjectKey) {
    let mut cluster = two_namespaces();
    let key = cluster.put(kept());
    assert_eq!(cluster.reconcile(&key), []);
    assert_nothing(&cluster, &key);
    (cluster, key)
}

const GONE: Planned = Release(DeleteReason::SourceGone);

/// A companion was released: it has its content, and nothing of ours.
fn assert_released(cluster: &Cluster, at: &ObjectKey) {
    let object = cluster.object(at).expect("it stays");
    assert_eq!(object.data.unwrap()["sky"], "blue");
    let meta = object.metadata;
    let ours = |key: &&String| crate::testing::keys().is_ours(key);
    assert_eq!(meta.labels.keys().chain(meta.annotations.keys()).find(ours), None, "{at}");
    assert_eq!(meta.owner_references, [], "{at}");
    assert!(cluster.companion(at).is_none() && !cluster.world.read(|world| world.was_lost(at)), "{at}");
}

#[test]
fn companions_are_released_when_their_source_is_deleted_or_unlabelled() {
    for unlabel in [true, false] {
        for restart in [true, false] {
            let (mut cluster, key) = mirrored_to_stay();
            if unlabel {
                cluster.edit(&key, |object| object.metadata.labels.clear());
            } else {
                cluster.delete(&key);
            }
            if restart {
                cluster.restart();
            }
            expect(&cluster, &key, &[("away/colors-synced", GONE), ("home/colors-synced", GONE)]);
            let uid = cluster.object(&away()).unwrap().metadata.uid;
            assert_eq!(cluster.reconcile(&key), []);
            cluster.collect_garbage();
            for at in [home(), away()] {
                assert_released(&cluster, &at);
            }
            assert_eq!(cluster.object(&away()).unwrap().metadata.uid, uid);
            assert_nothing(&cluster, &key);
            assert!(cluster.all_sources().is_empty());
        }
    }
}

#[test]
fn companion_is_released_where_a_target_no_longer_matches() {
    // In the second case the companion still has an ownerReference and no mark: the source says what happens to it.
    // In the third, patterns that need consent do not reach the source's own namespace.
    let patterns = kept().annotate("target-namespaces", "*").annotate("consent", "required");
    for (before, after, at) in [
        (kept(), kept().annotate("target-namespaces", "."), away()),
        (colors(), kept().annotate("target-namespaces", "away"), home()),
        (kept(), patterns, home()),
    ] {
        let mut cluster = two_namespaces();
        cluster.namespace(namespace("away").annotate("accept-from", "home"));
        let key = cluster.put(before);
        cluster.reconcile(&key);
        cluster.put(after);
        let planned = cluster.plan_companion(&key, &at);
        assert_eq!(planned, Some(Release(DeleteReason::NotWanted)));
        cluster.reconcile(&key);
        assert_released(&cluster, &at);
        assert_nothing(&cluster, &key);
        cluster.delete(&key);
        cluster.collect_garbage();
        assert_released(&cluster, &at);
    }
}

#[test]
fn switching_keep_on_and_off_takes_one_write_each_and_changes_the_owner() {
    let (mut cluster, key) = mirrored();
    let follow = Update(WriteReason::SourceChanged);
    for (draft, owners) in [(kept(), 0), (colors().annotate("when-removed", "delete"), 1)] {
        cluster.put(draft);
        expect(&cluster, &key, &[("away/colors-synced", follow), ("home/colors-synced", follow)]);
        cluster.reconcile(&key);
        assert_nothing(&cluster, &key);
        assert_eq!(cluster.object(&home()).unwrap().metadata.owner_references.len(), owners);
        let marked =
            cluster.object(&away()).unwrap().metadata.annotations.contains_key(&full("when-removed"));
        assert_eq!(marked, owners == 0);
    }
    cluster.delete(&key);
    assert_eq!(cluster.plan_companion(&key, &away()), Some(Delete(DeleteReason::SourceGone)));
}

#[test]
fn companions_that_do_not_show_the_mark_yet_are_deleted_with_their_source() {
    let (mut cluster, key) = mirrored();
    cluster.put(kept());
    cluster.delete(&key);
    assert_eq!(cluster.plan_companion(&key, &away()), Some(Delete(DeleteReason::SourceGone)));
}

#[test]
fn companions_of_a_paused_source_are_released_when_it_is_deleted() {
    let (mut cluster, key) = mirrored_to_stay();
    cluster.put(kept().annotate("paused", "true").annotate("target-namespaces", "."));
    assert_only_troubles(&cluster, &key, &["paused"]);
    cluster.delete(&key);
    expect(&cluster, &key, &[("away/colors-synced", GONE), ("home/colors-synced", GONE)]);
}

#[test]
fn release_keeps_copied_and_foreign_keys_immutable_content_and_foreign_owners() {
    let mut cluster = two_namespaces();
    let draft = kept()
        .label("example.com/team", "a")
        .annotate("copy-labels", "example.com/*")
        .annotate("set-annotations", "note=x")
        .immutable();
    let key = cluster.put(draft.clone());
    cluster.reconcile(&key);
    cluster.put(draft.annotate("paused", "true"));
    let other = OwnerReference { controller: None, ..foreign_owner() };
    cluster.edit(&away(), |object| {
        object.metadata.labels.insert("theirs".into(), "1".into());
        object.metadata.labels.insert(full("managed"), "true".into());
        object.metadata.annotations.insert(full("unknown"), "1".into());
        // Some of the marks are missing: a patch must not fail for that.
        object.metadata.annotations.remove(&full("protect"));
        object.metadata.owner_references = vec![other.clone()];
        object.metadata.finalizers.push("example.com/theirs".into());
    });
    cluster.delete(&key);
    assert_eq!(cluster.reconcile(&key), []);
    let Object { metadata: meta, immutable, .. } = cluster.object(&away()).unwrap();
    assert_eq!(meta.labels.keys().collect::<Vec<_>>(), ["example.com/team", "theirs"]);
    assert_eq!(meta.annotations.keys().collect::<Vec<_>>(), ["note"]);
    assert_eq!((meta.owner_references, meta.finalizers.len(), immutable), (vec![other], 1, Some(true)));
    assert!(cluster.all_sources().is_empty(), "it has not become a source");
}

#[test]
fn companion_labelled_as_a_source_does_not_become_one_however_many_labels_it_has() {
    let mut cluster = two_namespaces();
    // More than are remembered of each companion.
    let many = |draft: ObjectBuilder| {
        (0..300).fold(draft, |draft, n| draft.label(&format!("example.com/l{n}"), "1"))
    };
    let draft = || many(kept().annotate("copy-labels", "*"));
    let key = cluster.put(draft());
    cluster.reconcile(&key);
    cluster.put(draft().annotate("paused", "true"));
    cluster.edit(&away(), |object| drop(object.metadata.labels.insert(full("managed"), "true".into())));
    cluster.delete(&key);
    assert_eq!(cluster.reconcile(&key), []);
    assert_released(&cluster, &away());
    assert_eq!(cluster.object(&away()).unwrap().metadata.labels.len(), 300);
}

fn foreign_owner() -> OwnerReference {
    object("", "").controlled_by("Deployment", "another").object.metadata.owner_references.remove(0)
}

#[test]
fn only_the_source_is_removed_from_the_owners() {
    let (mut cluster, key) = mirrored();
    cluster.put(kept().annotate("paused", "true").annotate("target-namespaces", "away"));
    let other = OwnerReference { controller: None, ..foreign_owner() };
    cluster.edit(&home(), |object| object.metadata.owner_references.insert(0, other.clone()));
    cluster.put(kept().annotate("target-namespaces", "away"));
    cluster.reconcile(&key);
    assert_eq!(cluster.object(&home()).unwrap().metadata.owner_references, [other]);
}

#[test]
fn lost_companion_that_is_to_stay_is_left_alone_when_its_source_goes() {
    for strip_annotations in [false, true] {
        for gone in [true, false] {
            let (mut cluster, key) = mirrored_to_stay();
            cluster.put(kept().annotate("paused", "true"));
            cluster.edit(&away(), |object| {
                object.metadata.labels.clear();
                if strip_annotations {
                    object.metadata.annotations.clear();
                }
            });
            let before = cluster.object(&away()).unwrap().metadata.resource_version;
            if gone {
                cluster.delete(&key);
            } else {
                cluster.put(kept().annotate("target-namespaces", "."));
            }
            assert_eq!(cluster.plan_companion(&key, &away()), None);
            cluster.reconcile(&key);
            assert_nothing(&cluster, &key);
            assert_eq!(cluster.object(&away()).unwrap().metadata.resource_version, before);
            assert_eq!(cluster.all_sources().is_empty(), gone, "it is forgotten");
        }
    }
}

#[test]
fn companion_whose_annotations_were_removed_is_still_released() {
    let (mut cluster, key) = mirrored_to_stay();
    cluster.put(kept().annotate("paused", "true"));
    cluster.edit(&away(), |object| object.metadata.annotations.clear());
    cluster.delete(&key);
    assert_eq!(cluster.plan_companion(&key, &away()), Some(GONE));
    cluster.reconcile(&key);
    assert_released(&cluster, &away());
}

#[test]
fn companions_of_a_source_recreated_with_a_malformed_policy_are_released() {
    let (mut cluster, key) = mirrored_to_stay();
    cluster.put_anew(colors().annotate("protect", "everything"));
    assert_eq!(planned(&cluster.plan(&key)).len(), 2);
    cluster.reconcile(&key);
    for at in [home(), away()] {
        assert_released(&cluster, &at);
    }
}

#[test]
fn released_companion_is_a_foreign_object_for_every_source() {
    let (mut cluster, key) = mirrored_to_stay();
    let waiting = || {
        let waiting = source("home", "paint").data("sky", "red").annotate("target-namespaces", "away");
        waiting.annotate("companion-name", "colors-synced")
    };
    let other = cluster.put(waiting());
    cluster.delete(&key);
    cluster.reconcile(&key);
    assert_released(&cluster, &away());
    let holder = |failed: Vec<(ObjectKey, Option<Trouble>)>| match failed.into_iter().next() {
        Some((_, Some(Trouble::Conflict { holder, .. }))) => Some(holder),
        _ => None,
    };
    assert_eq!(holder(cluster.reconcile(&other)), Some(Holder::Foreign));
    // Its own source is no exception when it is created again.
    cluster.put(kept());
    assert_eq!(holder(cluster.reconcile(&key)), Some(Holder::Foreign));
    assert_released(&cluster, &away());
    // Whoever wants it says so.
    cluster.namespace(namespace("away").annotate("accept-adopt-from", "home"));
    cluster.put(waiting().annotate("adopt", "true"));
    assert_eq!(cluster.reconcile(&other), []);
    assert_eq!(data(&cluster, &away(), "sky").as_deref(), Some("red"));
}
