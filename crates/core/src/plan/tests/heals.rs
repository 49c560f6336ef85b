//! Changes of companions by others are undone.

use super::*;
use crate::testing;

/// Somebody edits a companion: it is healed with one write, and nothing else happens.
fn heals(
    draft: ObjectBuilder,
    at: &ObjectKey,
    edit: impl FnOnce(&mut Object),
    step: fn(WriteReason) -> Planned,
    heal: Heal,
) {
    let mut cluster = two_namespaces();
    let key = cluster.put(draft);
    cluster.reconcile(&key);
    let right = cluster.object(at).unwrap().clone();
    cluster.edit(at, edit);
    expect(&cluster, &key, &[(&at.to_string(), step(WriteReason::Healed(heal)))]);
    assert_eq!(cluster.reconcile(&key), []);
    let healed = cluster.object(at).unwrap();
    assert!(healed.data == right.data && healed.binary_data == right.binary_data);
    assert!(healed.immutable == right.immutable && healed.type_ == right.type_);
    assert!(healed.metadata.labels == right.metadata.labels);
    assert!(healed.metadata.annotations == right.metadata.annotations);
    assert_eq!(healed.metadata.owner_references, right.metadata.owner_references);
    assert!(healed.metadata.finalizers.is_empty());
    assert_nothing(&cluster, &key);
}

fn heal_data(heal: Heal, edit: impl FnOnce(&mut Object)) {
    heals(colors().binary("logo", "AAEC"), &away(), edit, Update, heal);
}

#[test]
fn edit_of_data_is_undone() {
    let change = |object: &mut Object| {
        object.data.get_or_insert_default().insert("sky".to_owned(), "red".to_owned());
    };
    heal_data(Heal::Content, change);
    heal_data(Heal::Content, |object| {
        object.data.get_or_insert_default().insert("sea".to_owned(), "green".to_owned());
    });
    heal_data(Heal::Content, |object| drop(object.data.take()));
}

#[test]
fn edit_of_binary_data_is_undone() {
    heal_data(Heal::Content, |object| drop(object.binary_data.take()));
    heal_data(Heal::Content, |object| {
        object.binary_data.get_or_insert_default().insert("logo".to_owned(), "AAEA".to_owned());
    });
}

#[test]
fn companion_made_immutable_is_recreated() {
    heals(colors(), &away(), |object| object.immutable = Some(true), Recreate, Heal::Immutable);
}

#[test]
fn companion_of_another_type_is_recreated() {
    let mut cluster = two_namespaces();
    let key = cluster.put(colors().of_type("Opaque"));
    cluster.reconcile(&key);
    let at = ObjectKey::new(key.kind, "away", "colors-synced");
    let mut forged = cluster.object(&at).unwrap().clone();
    forged.type_ = Some("example.com/other".to_owned());
    cluster.put_anew(ObjectBuilder { kind: at.kind, object: forged });
    expect(&cluster, &key, &[("away/colors-synced", Recreate(WriteReason::Healed(Heal::Type)))]);
    cluster.reconcile(&key);
    assert_eq!(cluster.object(&at).unwrap().type_.as_deref(), Some("Opaque"));
    assert_nothing(&cluster, &key);
}

#[test]
fn edit_of_any_mark_is_undone() {
    let draft = || colors().label("example.com/team", "a").annotate("copy-labels", "example.com/team");
    for mark in ["source", "source-uid", "source-checksum", "protect", "copied"] {
        let strip = |object: &mut Object| drop(object.metadata.annotations.remove(&full(mark)));
        heals(draft(), &away(), strip, Update, Heal::Marks);
        let change = |object: &mut Object| {
            object.metadata.annotations.insert(full(mark), "elsewhere/thing".to_owned());
        };
        heals(draft(), &away(), change, Update, Heal::Marks);
    }
    let copied = |object: &mut Object| drop(object.metadata.labels.remove("example.com/team"));
    heals(draft(), &away(), copied, Update, Heal::Marks);
    for label in ["source-namespace", "source-name"] {
        let strip = |object: &mut Object| drop(object.metadata.labels.remove(&full(label)));
        heals(draft(), &away(), strip, Update, Heal::Marks);
        let change =
            |object: &mut Object| drop(object.metadata.labels.insert(full(label), "other".to_owned()));
        heals(draft(), &away(), change, Update, Heal::Marks);
    }
    heals(draft(), &away(), strip_source_labels, Update, Heal::Marks);
    let added = |object: &mut Object| drop(object.metadata.labels.insert(full("managed"), "true".to_owned()));
    heals(draft(), &away(), added, Update, Heal::Marks);
    let added = |object: &mut Object| {
        drop(object.metadata.annotations.insert(full("paused"), "true".to_owned()));
    };
    heals(draft(), &away(), added, Update, Heal::Marks);
}

#[test]
fn stripped_label_is_restored_because_other_marks_identify_the_companion() {
    // The watch shows it as deleted. The create finds it and recognises it by its UID.
    for strip_more in [false, true] {
        let (mut cluster, key) = mirrored();
        let uid = cluster.object(&away()).unwrap().metadata.uid.clone();
        cluster.edit(&away(), |object| {
            object.metadata.labels.clear();
            if strip_more {
                object.metadata.annotations.clear();
            }
        });
        assert!(cluster.companion(&away()).is_none());
        let stripped = testing::read_companion(key.kind, cluster.object(&away()).unwrap());
        let decision = cluster.world.read(|world| {
            let (_, found) = world.identify(stripped);
            decide(world, world.source(&key).unwrap(), &away(), Some(&found), true)
        });
        let Decision::Change(Action::Update { reason, .. }) = decision else { panic!("{decision:?}") };
        assert_eq!(reason, WriteReason::Healed(Heal::Label));
        assert_eq!(cluster.reconcile(&key), []);
        let restored = &cluster.object(&away()).unwrap().metadata;
        assert_eq!((&restored.uid, &restored.labels[&full("companion")]), (&uid, &"true".to_owned()));
        assert_nothing(&cluster, &key);
    }
}

#[test]
fn edit_of_owner_references_is_undone() {
    let strip = |object: &mut Object| object.metadata.owner_references.clear();
    heals(colors(), &home(), strip, Update, Heal::Owner);
    let add = |object: &mut Object| {
        let other = crate::testing::object("", "").controlled_by("ConfigMap", "another");
        object.metadata.owner_references.extend(other.object.metadata.owner_references);
    };
    heals(colors(), &away(), add, Update, Heal::Owner);
}

#[test]
fn added_finalizer_is_removed() {
    let add = |object: &mut Object| object.metadata.finalizers.push("example.com/stay".to_owned());
    heals(colors(), &away(), add, Update, Heal::Finalizer);
}

#[test]
fn added_finalizer_does_not_keep_a_deleted_companion_from_being_recreated() {
    let (mut cluster, key) = mirrored();
    cluster.edit(&away(), |object| object.metadata.finalizers.push("example.com/stay".to_owned()));
    cluster.delete(&away());
    expect(&cluster, &key, &[("away/colors-synced", Update(WriteReason::Healed(Heal::Finalizer)))]);
    cluster.reconcile(&key);
    expect(&cluster, &key, &[("away/colors-synced", Create(WriteReason::Healed(Heal::Deleted)))]);
    cluster.reconcile(&key);
    assert_nothing(&cluster, &key);
}

#[test]
fn deleted_companion_is_recreated() {
    let (mut cluster, key) = mirrored();
    cluster.delete(&away());
    expect(&cluster, &key, &[("away/colors-synced", Create(WriteReason::Healed(Heal::Deleted)))]);
    cluster.reconcile(&key);
    assert_eq!(data(&cluster, &away(), "sky").as_deref(), Some("blue"));
    assert_nothing(&cluster, &key);
}

#[test]
fn labels_and_annotations_of_others_are_kept() {
    let (mut cluster, key) = mirrored();
    cluster.edit(&away(), |object| {
        object.metadata.labels.insert("example.com/mine".to_owned(), "1".to_owned());
        object.metadata.annotations.insert("example.com/mine".to_owned(), "2".to_owned());
    });
    assert_nothing(&cluster, &key);
    cluster.put(colors().data("sky", "red"));
    cluster.reconcile(&key);
    let meta = &cluster.object(&away()).unwrap().metadata;
    assert_eq!((&*meta.labels["example.com/mine"], &*meta.annotations["example.com/mine"]), ("1", "2"));
    assert_nothing(&cluster, &key);
}

#[test]
fn most_serious_difference_names_the_heal() {
    let (mut cluster, key) = mirrored();
    cluster.edit(&away(), |object| {
        object.data = None;
        object.metadata.annotations.remove(&full("protect"));
        object.metadata.finalizers.push("example.com/stay".to_owned());
    });
    expect(&cluster, &key, &[("away/colors-synced", Update(WriteReason::Healed(Heal::Content)))]);
}

#[test]
fn edit_made_while_the_process_was_down_counts_as_a_heal_and_a_changed_source_does_not() {
    let (mut cluster, key) = mirrored();
    cluster.edit(&away(), |object| drop(object.data.take()));
    cluster.restart();
    expect(&cluster, &key, &[("away/colors-synced", Update(WriteReason::Healed(Heal::Content)))]);

    let (mut cluster, key) = mirrored();
    cluster.put(colors().data("sky", "red"));
    cluster.restart();
    let follow = Update(WriteReason::SourceChanged);
    expect(&cluster, &key, &[("away/colors-synced", follow), ("home/colors-synced", follow)]);
}

#[test]
fn restart_writes_nothing_that_is_right_already() {
    let (mut cluster, key) = mirrored();
    cluster.restart();
    assert_nothing(&cluster, &key);
}
