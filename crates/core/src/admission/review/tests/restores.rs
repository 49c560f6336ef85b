//! Companions that somebody writes back from a backup.

use super::*;

/// `colors` with all that a companion may have, its companions, and backups of these in `home` and `away`.
fn scene() -> (Cluster, [Object; 2]) {
    let cluster = mirrored(
        colors()
            .binary("logo", "AAE=")
            .label("example.com/team", "painters")
            .annotate("copy-labels", "example.com/*")
            .annotate("set-annotations", "example.com/note=copied"),
    );
    let backups = ["home", "away"].map(|namespace| {
        let mut backup = find(&cluster, namespace, "colors-synced");
        let meta = &mut backup.metadata;
        meta.annotations.insert(keys().source_uid.clone(), "uid-before-the-disaster".to_owned());
        meta.owner_references.iter_mut().for_each(|owner| owner.uid = "uid-before-the-disaster".to_owned());
        (meta.uid, meta.resource_version) = Default::default();
        meta.managed_fields.clear();
        backup
    });
    (cluster, backups)
}

fn without_companions(mut cluster: Cluster) -> Cluster {
    for namespace in ["home", "away"] {
        cluster.delete(&configmap(namespace, "colors-synced"));
    }
    cluster
}

fn restore(cluster: &Cluster, backup: Object) -> Verdict {
    let namespace = backup.metadata.namespace.clone();
    judge(cluster, &by_alice(&namespace, Operation::Create { new: backup }))
}

/// What makes a companion differ from what the controller would write.
fn differences() -> [fn(&mut Object); 13] {
    fn data(new: &mut Object) -> &mut BTreeMap<String, String> {
        new.data.get_or_insert_default()
    }
    [
        |new| drop(data(new).insert("sky".into(), "bluf".into())),
        |new| drop(data(new).insert("sea".into(), String::new())),
        |new| data(new).clear(),
        |new| drop(new.binary_data.take()),
        |new| new.immutable = Some(true),
        |new| drop(new.metadata.labels.remove("example.com/team")),
        |new| drop(new.metadata.labels.remove(&keys().source_name)),
        |new| drop(new.metadata.labels.insert(keys().managed.clone(), "true".into())),
        |new| annotate(new, "protect", "none"),
        |new| annotate(new, "source-checksum", "000000000000"),
        |new| annotate(new, "example.com/note", "forged"),
        |new| new.metadata.finalizers.push("example.com/hold".into()),
        |new| {
            let owner = crate::testing::object("x", "y").controlled_by("Pod", "u");
            new.metadata.owner_references.extend(owner.object.metadata.owner_references);
        },
    ]
}

#[test]
fn restored_companion_is_allowed_if_it_is_right_but_for_uids() {
    let (cluster, backups) = scene();
    let cluster = without_companions(cluster);
    let additions: [fn(&mut Object); 4] = [
        |_| {},
        |new| new.metadata.owner_references.clear(),
        |new| drop(new.metadata.annotations.remove(&keys().source_uid)),
        |new| drop(new.metadata.labels.insert("velero.io/restore-name".into(), "monday".into())),
    ];
    for backup in &backups {
        for add in additions {
            let mut new = backup.clone();
            add(&mut new);
            let verdict = restore(&cluster, new);
            assert!(matches!(verdict, Verdict::CheckRestore { .. }), "the right is checked");
            assert_eq!(outcome(&cluster, &verdict), Ok(Vec::new()), "{}", backup.metadata.namespace);
        }
    }
}

#[test]
fn restored_companion_that_differs_in_anything_is_denied() {
    let (cluster, backups) = scene();
    let cluster = without_companions(cluster);
    for backup in &backups {
        for (number, differ) in differences().into_iter().enumerate() {
            let mut new = backup.clone();
            differ(&mut new);
            assert_eq!(denied(&cluster, &restore(&cluster, new)), "forged", "difference {number}");
        }
    }
}

/// Otherwise the time that an answer takes would say whether a guess is right.
#[test]
fn content_is_not_looked_at_before_it_is_known_that_the_user_may_read_the_source() {
    let (cluster, [_, backup]) = scene();
    let cluster = without_companions(cluster);
    let mut guess = backup;
    guess.data = Some([("sky".to_owned(), "a guess".to_owned())].into());
    let verdict = restore(&cluster, guess);
    assert!(matches!(verdict, Verdict::CheckRestore { .. }), "{verdict:?}");
    assert_eq!(denied(&cluster, &verdict), "forged");
}

#[test]
fn companion_that_the_controller_would_not_write_now_is_denied_whatever_its_content() {
    let (cluster, [_, backup]) = scene();
    let denied_at_once = |cluster: &Cluster, backup: &Object, why: &str| {
        let verdict = restore(cluster, backup.clone());
        assert!(matches!(verdict, Verdict::Deny(Denial::Forged { .. })), "{why}: {verdict:?}");
    };
    let mut elsewhere = backup.clone();
    elsewhere.metadata.namespace = "third".to_owned();
    denied_at_once(&cluster, &elsewhere, "not a target");
    let mut renamed = backup.clone();
    renamed.metadata.name = "shapes-synced".to_owned();
    denied_at_once(&cluster, &renamed, "another name");
    let mut other = backup.clone();
    annotate(&mut other, "source", "home/shapes");
    denied_at_once(&cluster, &other, "no such source");
    let mut itself = find(&cluster, "home", "colors-synced");
    annotate(&mut itself, "source", "home/colors-synced");
    denied_at_once(&cluster, &itself, "its own source");

    let mut cluster = without_companions(cluster);
    let source = configmap("home", "colors");
    cluster.edit(&source, |source| annotate(source, "paused", "true"));
    denied_at_once(&cluster, &backup, "paused");
    cluster.edit(&source, |source| annotate(source, "paused", "perhaps"));
    denied_at_once(&cluster, &backup, "malformed");
    cluster.edit(&source, |source| annotate(source, "paused", "false"));
    assert_eq!(denied(&cluster, &restore(&cluster, backup.clone())), "allowed");
    let competitor = source_with_the_name(&mut cluster);
    denied_at_once(&cluster, &backup, "another source wants the name, too");
    cluster.delete(&competitor);
    cluster.namespace(namespace("away").label("exclude", "true"));
    denied_at_once(&cluster, &backup, "the namespace is excluded");
    cluster.delete(&source);
    denied_at_once(&cluster, &backup, "no source yet");
}

fn source_with_the_name(cluster: &mut Cluster) -> ObjectKey {
    cluster.put(
        crate::testing::source("third", "shapes")
            .annotate("target-namespaces", "away")
            .annotate("companion-name", "colors-synced"),
    )
}

#[test]
fn deputy_restores_no_companion() {
    let (cluster, [_, backup]) = scene();
    let cluster = without_companions(cluster);
    let request = by_alice("away", Operation::Create { new: backup });
    let verdict = judge(&cluster, &Request { user: user("cert-manager"), ..request });
    assert!(matches!(verdict, Verdict::Deny(Denial::Forged { .. })), "{verdict:?}");
}

#[test]
fn restore_over_a_companion_that_exists_may_change_uids_and_add_its_tools_keys() {
    let (cluster, backups) = scene();
    for backup in &backups {
        let namespace = &*backup.metadata.namespace;
        let over = |change: fn(&mut Object)| {
            let mut new = backup.clone();
            change(&mut new);
            let old = find(&cluster, namespace, "colors-synced");
            judge(&cluster, &by_alice(namespace, Operation::Update { old, new }))
        };
        let allowed: [fn(&mut Object); 3] = [
            |_| {},
            |new| annotate(new, "kubectl.kubernetes.io/last-applied-configuration", "{}"),
            |new| drop(new.metadata.labels.insert("velero.io/backup-name".into(), "sunday".into())),
        ];
        for change in allowed {
            let verdict = over(change);
            assert!(matches!(verdict, Verdict::CheckRestore { .. }), "{verdict:?}");
            assert_eq!(denied(&cluster, &verdict), "allowed", "{namespace}");
        }
        for (number, differ) in differences().into_iter().enumerate() {
            assert_eq!(denied(&cluster, &over(differ)), "edit", "difference {number}");
        }
        let foreign: [fn(&mut Object); 2] = [
            |new| drop(new.metadata.labels.insert("app.kubernetes.io/instance".into(), "mine".into())),
            |new| annotate(new, "example.com/other", "x"),
        ];
        for change in foreign {
            let verdict = over(change);
            assert!(matches!(verdict, Verdict::Deny(Denial::Edit { .. })), "{verdict:?}");
        }
    }
}

#[test]
fn ordinary_edit_of_a_companion_is_denied_without_asking_for_rights() {
    let (cluster, _) = scene();
    let edits: [fn(&mut Object); 2] = [
        |new| drop(new.data.get_or_insert_default().insert("sky".into(), "green".into())),
        |new| drop(new.metadata.labels.insert("team".into(), "mine".into())),
    ];
    let is_denied = |place: &str, edit: fn(&mut Object)| {
        let verdict = edit_companion(&cluster, place, edit);
        assert!(matches!(verdict, Verdict::Deny(Denial::Edit { .. })), "{place}: {verdict:?}");
    };
    for edit in edits {
        is_denied("away", edit);
    }
    is_denied("home", |new| new.metadata.owner_references.clear());
}

#[test]
fn companion_of_one_source_is_not_restored_as_that_of_another() {
    let (mut cluster, [_, backup]) = scene();
    let other = source_with_the_name(&mut cluster);
    cluster.delete(&configmap("away", "colors-synced"));
    cluster.delete(&configmap("home", "colors"));
    cluster.reconcile(&other);
    let old = find(&cluster, "away", "colors-synced");
    cluster.put(colors());
    let mut new = backup;
    (new.data, new.binary_data) = (old.data.clone(), old.binary_data.clone());
    let verdict = judge(&cluster, &by_alice("away", Operation::Update { old, new }));
    assert!(matches!(verdict, Verdict::Deny(Denial::Edit { .. })), "{verdict:?}");
}
