//! What a plan must not do: conflicts, adoption, refusals and the hard limits.

use super::*;
use crate::{
    object::ManagedFields,
    policy::Fault,
    testing::{OWN_NAMESPACE, companion, keys},
};

fn conflict(at: &ObjectKey, holder: Holder) -> Trouble {
    Trouble::Conflict { at: at.clone(), holder }
}

/// Whether nothing of an object has changed, its version included.
fn is_untouched(cluster: &Cluster, at: &ObjectKey, version: &str) -> bool {
    cluster.object(at).is_some_and(|object| object.metadata.resource_version == version)
}

fn version(cluster: &Cluster, at: &ObjectKey) -> String {
    cluster.object(at).unwrap().metadata.resource_version.clone()
}

// --- conflicts

#[test]
fn foreign_object_is_never_overwritten() {
    let mut cluster = two_namespaces();
    let at = cluster.put(object("away", "colors-synced").data("their", "own"));
    let before = version(&cluster, &at);
    let key = cluster.put(colors());
    let failures = cluster.reconcile(&key);
    assert_eq!(failures, [(at.clone(), Some(conflict(&at, Holder::Foreign)))]);
    assert!(is_untouched(&cluster, &at, &before));
    cluster.delete(&at);
    assert_eq!(cluster.reconcile(&key), []);
    assert_nothing(&cluster, &key);
}

#[test]
fn companion_label_alone_proves_nothing() {
    for forged in [
        companion("away", "colors-synced"),
        companion("away", "colors-synced").annotate("source-uid", "uid-of-colors"),
        companion("away", "colors-synced").of("not a key"),
    ] {
        let mut cluster = two_namespaces();
        let at = cluster.put(forged);
        let key = cluster.put(colors());
        let plan = cluster.plan(&key);
        assert_eq!(plan.troubles, [conflict(&at, Holder::Foreign)]);
        assert_eq!(planned(&plan), [("home/colors-synced".to_owned(), Create(WriteReason::New))]);
        cluster.delete(&key);
        cluster.reconcile(&key);
        assert_nothing(&cluster, &key);
        assert!(cluster.object(&at).is_some());
    }
}

#[test]
fn each_other_mark_alone_proves_ownership() {
    let mut cluster = two_namespaces();
    let key = cluster.put(colors().annotate("target-namespaces", "."));
    let uid = cluster.object(&key).unwrap().metadata.uid.clone();
    let manager = crate::testing::keys().instance.clone();
    for marked in [
        companion("home", "colors-synced").of("home/colors"),
        companion("home", "colors-synced").controlled_by("ConfigMap", &uid),
        companion("home", "colors-synced").written_by(&manager),
    ] {
        cluster.put_anew(marked);
        cluster.restart();
        let plan = cluster.plan(&key);
        assert!(plan.troubles.is_empty(), "{:?}", plan.troubles);
        let expected = Update(WriteReason::Healed(Heal::Content));
        assert_eq!(planned(&plan), [("home/colors-synced".to_owned(), expected)]);
    }
}

#[test]
fn owner_of_a_companion_keeps_it_until_it_is_deleted_then_the_other_source_takes_over() {
    let mut cluster = two_namespaces();
    let first = cluster.put(source("home", "colors").data("sky", "blue"));
    let second =
        cluster.put(source("home", "paint").data("sky", "red").annotate("companion-name", "colors-synced"));
    cluster.reconcile(&first);
    let plan = cluster.plan(&second);
    assert_eq!(planned(&plan), []);
    assert_eq!(plan.troubles, [conflict(&home(), Holder::Companion { of: first.clone() })]);
    // `adopt` does not take another source's companion.
    cluster.edit(&second, |object| drop(object.metadata.annotations.insert(full("adopt"), "true".into())));
    assert_eq!(cluster.plan(&second).troubles, plan.troubles);
    assert_nothing(&cluster, &first);

    cluster.delete(&first);
    cluster.reconcile(&first);
    cluster.reconcile(&second);
    assert_eq!(data(&cluster, &home(), "sky").as_deref(), Some("red"));
    assert_nothing(&cluster, &second);
}

// --- adoption

#[test]
fn adopt_takes_over_a_foreign_object_in_the_own_namespace() {
    let mut cluster = two_namespaces();
    let at = cluster.put(object("home", "colors-synced").data("their", "own").label("example.com/mine", "1"));
    let key = cluster.put(source("home", "colors").data("sky", "blue").annotate("adopt", "true"));
    assert_eq!(cluster.reconcile(&key), []);
    assert_eq!((data(&cluster, &at, "sky"), data(&cluster, &at, "their")), (Some("blue".to_owned()), None));
    assert_eq!(cluster.object(&at).unwrap().metadata.labels["example.com/mine"], "1");
    assert_nothing(&cluster, &key);

    // With our label, the watch shows it, and the plan reports the conflict without a write.
    cluster.put_anew(companion("home", "colors-synced"));
    expect(&cluster, &key, &[("home/colors-synced", Update(WriteReason::Adopted))]);
}

#[test]
fn adopt_recreates_what_an_update_cannot_change() {
    let mut cluster = two_namespaces();
    cluster.put(companion("home", "colors-synced").data("their", "own").immutable());
    let key = cluster.put(source("home", "colors").data("sky", "blue").annotate("adopt", "true"));
    expect(&cluster, &key, &[("home/colors-synced", Recreate(WriteReason::Adopted))]);
    cluster.reconcile(&key);
    assert_nothing(&cluster, &key);
}

#[test]
fn adopt_in_another_namespace_needs_its_accept_adopt_from() {
    let mut cluster = two_namespaces();
    let at = cluster.put(companion("away", "colors-synced").data("their", "own"));
    let key =
        cluster.put(source("home", "colors").annotate("target-namespaces", "away").annotate("adopt", "true"));
    let plan = cluster.plan(&key);
    assert_eq!((planned(&plan), plan.troubles), (vec![], vec![conflict(&at, Holder::NotAccepting)]));
    cluster
        .namespace(namespace("away").annotate("accept-from", "*").annotate("accept-adopt-from", "elsewhere"));
    assert_eq!(cluster.plan(&key).troubles, [conflict(&at, Holder::NotAccepting)]);
    cluster.namespace(namespace("away").annotate("accept-adopt-from", "elsewhere,ho*"));
    expect(&cluster, &key, &[("away/colors-synced", Update(WriteReason::Adopted))]);
}

#[test]
fn adopt_never_takes_an_object_with_a_controller_or_a_source() {
    for bound in [
        companion("home", "colors-synced").controlled_by("Deployment", "another"),
        companion("home", "colors-synced").label("managed", "true"),
        source("home", "colors-synced"),
    ] {
        let mut cluster = two_namespaces();
        let at = cluster.put(bound);
        let before = version(&cluster, &at);
        let key = cluster.put(source("home", "colors").annotate("adopt", "true"));
        let mut troubles = cluster.plan(&key).troubles;
        troubles.extend(cluster.reconcile(&key).into_iter().filter_map(|(_, trouble)| trouble));
        assert_eq!(troubles, [conflict(&at, Holder::Bound)]);
        assert!(is_untouched(&cluster, &at, &before));
    }
}

#[test]
fn source_with_an_owner_reference_is_no_companion() {
    let mut cluster = two_namespaces();
    let planter = cluster.put(source("home", "planter").annotate("companion-name", "colors"));
    let uid = cluster.object(&planter).unwrap().metadata.uid.clone();
    let at = cluster.put(colors().controlled_by("ConfigMap", &uid));
    let before = version(&cluster, &at);
    assert_eq!(cluster.reconcile(&planter), [(at.clone(), Some(conflict(&at, Holder::Foreign)))]);
    assert!(is_untouched(&cluster, &at, &before));
}

#[test]
fn adopt_never_takes_an_object_with_a_finalizer_or_one_being_deleted() {
    for draft in [
        companion("home", "colors-synced").finalizer("example.com/wait").terminating(),
        companion("home", "colors-synced").finalizer("example.com/wait"),
    ] {
        let mut cluster = two_namespaces();
        cluster.put(draft);
        let key = cluster.put(source("home", "colors").annotate("adopt", "true"));
        let plan = cluster.plan(&key);
        assert_eq!(planned(&plan), []);
        assert!(
            matches!(plan.troubles[..], [Trouble::Conflict { holder: Holder::Bound, .. }]),
            "{:?}",
            plan.troubles
        );
    }
}

#[test]
fn managed_fields_entry_without_our_label_proves_nothing() {
    for made_a_source in [false, true] {
        let (mut cluster, first) = mirrored();
        // Somebody stripped our marks and uses it for something else.
        cluster.edit(&away(), |object| {
            object.metadata.annotations.clear();
            object.metadata.labels.clear();
            if made_a_source {
                object.metadata.labels.insert(full("managed"), "true".to_owned());
                object.metadata.labels.insert(full("companion"), "true".to_owned());
            }
            object.metadata.managed_fields =
                vec![ManagedFields { manager: keys().instance.clone(), ..Default::default() }];
        });
        cluster.delete(&first);
        cluster.restart();
        let second = cluster.put(
            source("home", "paint")
                .annotate("target-namespaces", "away")
                .annotate("companion-name", "colors-synced"),
        );
        let before = cluster.object(&away()).unwrap().metadata.resource_version.clone();
        cluster.reconcile(&second);
        assert_eq!(cluster.object(&away()).unwrap().metadata.resource_version, before, "{made_a_source}");
    }
}

// --- refusals

#[test]
fn refused_or_malformed_source_is_trouble_and_keeps_its_companions() {
    for (draft, reason) in [
        (colors().annotate("protect", "everything"), "malformed"),
        (colors().annotate("target-namespaces", ""), "malformed"),
        (colors().annotate("target-selector", "a in b"), "malformed"),
        (colors().annotate("companion-name", "colors"), "malformed"),
        (colors().annotate("companion-name", "kube-root-ca.crt"), "refused"),
        (colors().annotate("companion-name", &"x".repeat(254)), "name_too_long"),
        (colors().annotate("source-uid", "another"), "is_companion"),
        (colors().of("home/another"), "is_companion"),
    ] {
        let (mut cluster, key) = mirrored();
        cluster.put(draft);
        cluster.edit(&away(), |object| drop(object.data.take()));
        cluster.delete(&home());
        let plan = cluster.plan(&key);
        assert_eq!(planned(&plan), [], "{reason}");
        assert!(matches!(&*plan.troubles, [trouble @ Trouble::Fault(_)] if trouble.label() == reason));
    }
}

#[test]
fn secret_with_a_bound_type_or_a_missing_key_is_refused() {
    let tls = || colors().of_type("kubernetes.io/tls").data("tls.crt", "YQ==").data("tls.key", "Yg==");
    for draft in [
        colors().of_type("kubernetes.io/service-account-token"),
        colors().of_type("bootstrap.kubernetes.io/token"),
        tls().annotate("keys", "tls.crt"),
    ] {
        let mut cluster = two_namespaces();
        let key = cluster.put(draft);
        let plan = cluster.plan(&key);
        assert_eq!(planned(&plan), []);
        assert!(matches!(&*plan.troubles, [trouble] if trouble.label() == "refused"));
    }
    let mut cluster = two_namespaces();
    let key = cluster.put(tls());
    assert_eq!(cluster.plan(&key).changes.len(), 2);
}

// --- hard limits

#[test]
fn own_namespace_holds_no_sources() {
    let mut cluster = Cluster::with(&["away", OWN_NAMESPACE]);
    let key = cluster.put(source(OWN_NAMESPACE, "colors").annotate("target-namespaces", "*"));
    let plan = cluster.plan(&key);
    assert_eq!((planned(&plan), plan.troubles), (vec![], vec![Trouble::Fault(Fault::OwnNamespace)]));
}

#[test]
fn own_and_excluded_namespaces_are_never_targets() {
    let mut cluster = Cluster::with(&["home"]);
    cluster.namespace(namespace(OWN_NAMESPACE).annotate("accept-from", "*"));
    cluster.namespace(namespace("away").label("exclude", "true").annotate("accept-from", "*"));
    let key = cluster.put(source("home", "colors").annotate("target-namespaces", "*"));
    expect(&cluster, &key, &[("home/colors-synced", Create(WriteReason::New))]);
    assert!(cluster.plan(&key).troubles.is_empty());
    // A source that names them has a trouble.
    for named in [OWN_NAMESPACE, "away"] {
        cluster.put(source("home", "colors").annotate("target-namespaces", named));
        cluster.reconcile(&key);
        let plan = cluster.plan(&key);
        assert_eq!((planned(&plan), plan.troubles), (vec![], vec![Trouble::Excluded(named.to_owned())]));
    }
}

#[test]
fn namespace_that_becomes_excluded_loses_its_companions() {
    let (mut cluster, key) = mirrored();
    cluster.namespace(namespace("away").label("exclude", "true"));
    expect(&cluster, &key, &[("away/colors-synced", Delete(DeleteReason::NotWanted))]);
}

#[test]
fn kube_namespace_is_a_target_only_with_accept_from() {
    let mut cluster = Cluster::with(&["home", "kube-public"]);
    let key = cluster.put(source("home", "colors").annotate("target-namespaces", "kube-*"));
    assert_nothing(&cluster, &key);
    cluster.put(source("home", "colors").annotate("target-namespaces", "kube-public"));
    let plan = cluster.plan(&key);
    let refused = |command: &str| Trouble::NotAccepted {
        namespace: "kube-public".to_owned(),
        home: "home".to_owned(),
        command: command.to_owned(),
    };
    let command = "kubectl annotate namespace kube-public workshop.io/accept-from=home";
    assert_eq!((planned(&plan), plan.troubles), (vec![], vec![refused(command)]));
    // The command keeps what is there.
    cluster.namespace(namespace("kube-public").annotate("accept-from", "away, team-*,!x"));
    let plan = cluster.plan(&key);
    let command =
        "kubectl annotate --overwrite namespace kube-public 'workshop.io/accept-from=away,team-*,!x,home'";
    assert_eq!((planned(&plan), plan.troubles), (vec![], vec![refused(command)]));

    cluster.namespace(namespace("kube-public").annotate("accept-from", "home"));
    expect(&cluster, &key, &[("kube-public/colors-synced", Create(WriteReason::New))]);
    cluster.reconcile(&key);
    assert_nothing(&cluster, &key);
    cluster.namespace(namespace("kube-public"));
    expect(&cluster, &key, &[("kube-public/colors-synced", Delete(DeleteReason::NotWanted))]);
}

#[test]
fn pattern_that_matches_the_source_itself_changes_nothing() {
    let mut cluster = two_namespaces();
    let key = cluster.put(
        source("home", "colors").annotate("companion-name", "colors").annotate("target-namespaces", "*"),
    );
    let before = version(&cluster, &key);
    expect(&cluster, &key, &[("away/colors", Create(WriteReason::New))]);
    assert_eq!(cluster.reconcile(&key), []);
    assert!(is_untouched(&cluster, &key, &before));
    assert_nothing(&cluster, &key);
}

#[test]
fn pattern_or_selector_that_matches_nothing_and_missing_namespace_are_troubles() {
    let mut cluster = Cluster::with(&["home", "team-a"]);
    let troubles = |cluster: &mut Cluster, annotations: &[(&str, &str)]| {
        let draft = source("home", "colors");
        let key =
            cluster.put(annotations.iter().fold(draft, |draft, (key, value)| draft.annotate(key, value)));
        cluster.plan(&key).troubles.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    let targets = ("target-namespaces", "team-*, *-qa, home, nowhere, !nothing");
    let found = troubles(&mut cluster, &[targets, ("target-selector", "env in (dev)")]);
    assert_eq!(
        found,
        [
            "`*-qa` matches no namespace",
            "`env in (dev)` matches no namespace",
            "namespace nowhere does not exist; it gets a companion once it exists"
        ]
    );
    let found = troubles(&mut cluster, &[("target-namespaces", "team-*"), ("consent", "required")]);
    assert_eq!(found, ["`team-*` matches no namespace that accepts this source"]);
    cluster.namespace(namespace("team-a").annotate("accept-from", "home"));
    let found = troubles(&mut cluster, &[("target-namespaces", "team-*"), ("consent", "required")]);
    assert_eq!(found, [""; 0]);
}

#[test]
fn paused_source_says_how_many_companions_do_not_follow() {
    let mut cluster = two_namespaces();
    let paused =
        |value: &str| source("home", "colors").data("sky", value).annotate("target-namespaces", ".,away");
    let key = cluster.put(paused("blue"));
    cluster.reconcile(&key);
    cluster.put(paused("blue").annotate("paused", "true"));
    assert_nothing(&cluster, &key);
    cluster.put(paused("green").annotate("paused", "true"));
    let plan = cluster.plan(&key);
    assert_eq!((planned(&plan), plan.troubles), (vec![], vec![Trouble::Paused(2)]));
}

#[test]
fn source_without_consent_of_a_namespace_has_no_companion_there() {
    let mut cluster = Cluster::with(&["home", "team-a"]);
    cluster.namespace(namespace("team-b").annotate("accept-from", "home"));
    let draft = source("home", "colors").annotate("consent", "required");
    let key = cluster.put(draft.annotate("target-namespaces", "., team-*, team-a"));
    let both = [
        ("home/colors-synced", Create(WriteReason::New)),
        ("team-b/colors-synced", Create(WriteReason::New)),
    ];
    let plan = cluster.plan(&key);
    assert_eq!(planned(&plan), both.map(|(at, action)| (at.to_owned(), action)));
    assert_eq!(plan.troubles.iter().map(Trouble::label).collect::<Vec<_>>(), ["not_accepted"]);
    cluster.reconcile(&key);
    // A namespace that withdraws its consent loses the companion.
    cluster.namespace(namespace("team-b").annotate("accept-from", "elsewhere"));
    assert_eq!(
        planned(&cluster.plan(&key)),
        [("team-b/colors-synced".to_owned(), Delete(DeleteReason::NotWanted))]
    );
}

#[test]
fn keys_that_select_nothing_are_refused_unless_the_source_is_empty() {
    let mut cluster = two_namespaces();
    let draft = source("home", "colors").annotate("keys", "sea");
    let key = cluster.put(draft.clone());
    expect(&cluster, &key, &[("home/colors-synced", Create(WriteReason::New))]);
    cluster.put(draft.data("sky", "blue"));
    let plan = cluster.plan(&key);
    assert!(plan.changes.is_empty() && plan.troubles[0].label() == "refused", "{plan:?}");
}

#[test]
fn namespace_that_takes_no_companions_loses_those_of_paused_malformed_and_kept_sources() {
    for settings in [("paused", "true"), ("keys", "a/b"), ("when-removed", "keep")] {
        let (mut cluster, key) = mirrored();
        cluster.put(colors().annotate(settings.0, settings.1));
        cluster.reconcile(&key);
        cluster.namespace(namespace("away").label("exclude", "true"));
        expect(&cluster, &key, &[("away/colors-synced", Delete(DeleteReason::NotWanted))]);
        let decision = cluster.world.read(|world| plan_companion(world, &key, &away(), None));
        assert!(matches!(decision, Decision::Change(Action::Delete { .. })), "{settings:?}");
        cluster.reconcile(&key);
        assert!(cluster.object(&away()).is_none() && cluster.object(&home()).is_some(), "{settings:?}");
    }
}

#[test]
fn source_that_may_have_no_companion_keeps_no_other_from_healing_one_without_annotations() {
    let (mut cluster, key) = mirrored();
    let rival = source("aaa", "x").annotate("companion-name", "colors-synced");
    cluster.put(rival.annotate("target-namespaces", "*").annotate("consent", "required"));
    cluster.edit(&away(), |object| object.metadata.annotations.clear());
    cluster.restart();
    expect(&cluster, &key, &[("away/colors-synced", Update(WriteReason::SourceChanged))]);
}
