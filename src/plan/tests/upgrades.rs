//! Companions that an earlier version wrote, without the labels that name their source.

use super::*;

/// The companions of [`colors`] as an earlier version wrote them, and a process that has just started.
fn upgraded() -> (Cluster, ObjectKey) {
    let (mut cluster, key) = mirrored();
    for at in [home(), away()] {
        cluster.edit(&at, strip_source_labels);
    }
    cluster.restart();
    (cluster, key)
}

const LACKS_LABELS: Planned = Update(WriteReason::LacksLabels);

#[test]
fn companion_of_an_earlier_version_gets_its_labels_and_that_is_no_heal() {
    let (mut cluster, key) = upgraded();
    let both = [("away/colors-synced", LACKS_LABELS), ("home/colors-synced", LACKS_LABELS)];
    expect(&cluster, &key, &both);
    // Nor is it one once a reconcile has found nothing else to do.
    assert_eq!(cluster.apply(&key, Plan::default()), []);
    expect(&cluster, &key, &both);

    assert_eq!(cluster.reconcile(&key), []);
    let labels = cluster.object(&away()).unwrap().metadata.labels;
    assert_eq!((&*labels[&full("source-namespace")], &*labels[&full("source-name")]), ("home", "colors"));
    assert_nothing(&cluster, &key);
}

#[test]
fn companion_of_an_earlier_version_that_is_otherwise_wrong_is_written_for_that_reason() {
    let (mut cluster, key) = upgraded();
    cluster.edit(&home(), |object| object.metadata.owner_references.clear());
    cluster.edit(&away(), |object| drop(object.data.take()));
    expect(
        &cluster,
        &key,
        &[
            ("away/colors-synced", Update(WriteReason::Healed(Heal::Content))),
            ("home/colors-synced", Update(WriteReason::SourceChanged)),
        ],
    );

    let (mut cluster, key) = upgraded();
    cluster.put(colors().data("sky", "red"));
    let follow = Update(WriteReason::SourceChanged);
    expect(&cluster, &key, &[("away/colors-synced", follow), ("home/colors-synced", follow)]);
    cluster.reconcile(&key);
    assert_nothing(&cluster, &key);
}

#[test]
fn companion_that_has_one_of_the_labels_was_not_written_by_an_earlier_version() {
    let (mut cluster, key) = mirrored();
    cluster.edit(&away(), |object| drop(object.metadata.labels.remove(&full("source-name"))));
    cluster.restart();
    expect(&cluster, &key, &[("away/colors-synced", Update(WriteReason::SourceChanged))]);
}

#[test]
fn removal_of_labels_that_the_world_has_seen_is_a_heal_although_the_source_was_never_in_step() {
    let (mut cluster, key) = mirrored();
    cluster.restart();
    cluster.edit(&away(), strip_source_labels);
    expect(&cluster, &key, &[("away/colors-synced", Update(WriteReason::Healed(Heal::Marks)))]);
    // Another edit does not make it forget.
    cluster.edit(&away(), |object| drop(object.metadata.labels.insert("theirs".into(), "1".into())));
    expect(&cluster, &key, &[("away/colors-synced", Update(WriteReason::Healed(Heal::Marks)))]);
}

#[test]
fn paused_source_reports_no_changes_because_of_the_labels() {
    let (mut cluster, key) = mirrored();
    cluster.put(colors().annotate("paused", "true"));
    cluster.edit(&away(), strip_source_labels);
    cluster.restart();
    assert_nothing(&cluster, &key);
    cluster.put(colors());
    expect(&cluster, &key, &[("away/colors-synced", LACKS_LABELS)]);
}
