//! The rows of the table "What the guard does".

use super::*;
use crate::testing::{
    OWN_NAMESPACE, ObjectBuilder, cluster::Cluster, companion, configmap, keys, namespace, object, source,
};

fn rules() -> Rules {
    Rules {
        keys: keys(),
        own_namespace: OWN_NAMESPACE.to_owned(),
        exempt: People { users: vec!["lockstep".into(), "root".into()], groups: vec!["admins".into()] },
        deputies: People { users: vec!["cert-manager".into()], groups: vec!["robots".into()] },
        default_targets: ".".to_owned(),
        default_protect: Protect::Edits,
    }
}

fn user(name: &str) -> User {
    User { name: name.to_owned(), groups: vec!["system:authenticated".to_owned()], ..User::default() }
}

/// Alice does something to an object of a namespace.
fn by_alice(namespace: &str, change: Change) -> Request {
    Request { kind: Kind::ConfigMap, namespace: namespace.to_owned(), user: user("alice"), change }
}

fn judge(cluster: &Cluster, request: &Request) -> Verdict {
    let rules = rules();
    Case::read(&rules, request).map(|case| case.judge(&cluster.world)).unwrap_or_default()
}

fn denied(verdict: &Verdict) -> &'static str {
    verdict.denial.as_ref().map_or("allowed", Denial::label)
}

/// `colors` in `home`, with companions there and in `away`.
fn colors() -> ObjectBuilder {
    source("home", "colors").data("sky", "blue").annotate("target-namespaces", ".,away")
}

fn settled(draft: ObjectBuilder) -> Cluster {
    let mut cluster = Cluster::with(&["home", "away", "third"]);
    let key = cluster.put(draft);
    cluster.settle(&key);
    cluster
}

fn find(cluster: &Cluster, namespace: &str, name: &str) -> Object {
    cluster.object(&configmap(namespace, name)).expect("it is there").clone()
}

fn update(old: Object, change: impl FnOnce(&mut Object)) -> Change {
    let mut new = old.clone();
    change(&mut new);
    Change::Update { old, new, idle: false }
}

fn edit_companion(cluster: &Cluster, namespace: &str, change: impl FnOnce(&mut Object)) -> Verdict {
    let old = find(cluster, namespace, "colors-synced");
    judge(cluster, &by_alice(namespace, update(old, change)))
}

fn edit_source(cluster: &Cluster, change: impl FnOnce(&mut Object)) -> Verdict {
    let old = find(cluster, "home", "colors");
    judge(cluster, &by_alice("home", update(old, change)))
}

fn delete(cluster: &Cluster, namespace: &str, name: &str) -> Verdict {
    judge(cluster, &by_alice(namespace, Change::Delete { old: find(cluster, namespace, name) }))
}

fn create(cluster: &Cluster, draft: ObjectBuilder) -> Verdict {
    let namespace = draft.object.metadata.namespace.clone();
    let kind = draft.kind;
    let request = by_alice(&namespace, Change::Create { new: draft.object });
    judge(cluster, &Request { kind, ..request })
}

fn annotate(object: &mut Object, key: &str, value: &str) {
    object.metadata.annotations.insert(crate::testing::full(key), value.to_owned());
}

/// What a verdict asks, as `verbs namespace/name`; `*` stands for all namespaces.
fn asks(verdict: &Verdict) -> Vec<String> {
    let Some(reach) = &verdict.ask else { return Vec::new() };
    let verbs = |verbs: &Verbs| match verbs {
        Verbs::All => "all",
        Verbs::Delete => "delete",
    };
    let wide = reach.wide.iter().map(|(name, v)| format!("{} */{name}", verbs(v)));
    let places = reach.places.iter().map(|((ns, name), v)| format!("{} {ns}/{name}", verbs(v)));
    wide.chain(places).collect()
}

// --- who passes

#[test]
fn the_mirror_exempt_people_and_the_clean_up_of_kubernetes_pass() {
    let cluster = settled(colors().annotate("protect", "all"));
    let old = find(&cluster, "away", "colors-synced");
    for (name, groups) in [
        ("lockstep", vec![]),
        ("root", vec![]),
        ("bob", vec!["admins".to_owned()]),
        ("system:serviceaccount:kube-system:generic-garbage-collector", vec![]),
        ("system:serviceaccount:kube-system:namespace-controller", vec![]),
        ("system:kube-controller-manager", vec![]),
    ] {
        let user = User { name: name.to_owned(), groups, ..User::default() };
        for change in [Change::Delete { old: old.clone() }, update(old.clone(), |new| new.data = None)] {
            let request = Request { user: user.clone(), ..by_alice("away", change) };
            assert_eq!(judge(&cluster, &request), Verdict::default(), "{name}");
        }
    }
}

#[test]
fn a_group_or_user_that_only_looks_like_an_exempt_one_does_not_pass() {
    let cluster = settled(colors());
    let old = find(&cluster, "away", "colors-synced");
    for (name, group) in [("admins", "root"), ("lockstep2", "admin"), ("Root", "Admins")] {
        let user = User { name: name.into(), groups: vec![group.into()], ..User::default() };
        let change = update(old.clone(), |new| new.data = None);
        assert_eq!(denied(&judge(&cluster, &Request { user, ..by_alice("away", change) })), "edit", "{name}");
    }
}

// --- companions

#[test]
fn an_update_of_a_companion_is_refused_and_the_message_names_the_source() {
    let cluster = settled(colors());
    let verdict = edit_companion(&cluster, "away", |new| {
        new.data = Some([("sky".to_owned(), "green".to_owned())].into());
    });
    assert_eq!(
        verdict.denial.expect("a denial").message(&keys()),
        "configmap away/colors-synced is a companion, kept equal to home/colors by Lockstep. \
         Change the source instead: kubectl edit configmap colors -n home"
    );
    type Edit = fn(&mut Object);
    let edits: [Edit; 6] = [
        |new| new.immutable = Some(true),
        |new| drop(new.metadata.labels.insert("team".into(), "a".into())),
        |new| annotate(new, "example.com/note", "x"),
        |new| new.metadata.finalizers.push("example.com/hold".into()),
        |new| new.metadata.owner_references.clear(),
        |new| annotate(new, "source", "away/other"),
    ];
    for edit in edits {
        for place in ["home", "away"] {
            assert_eq!(denied(&edit_companion(&cluster, place, edit)), "edit");
        }
    }
}

#[test]
fn an_update_that_changes_nothing_but_managed_fields_is_allowed() {
    let cluster = settled(colors());
    let old = find(&cluster, "away", "colors-synced");
    let change = Change::Update { new: old.clone(), old, idle: true };
    assert_eq!(judge(&cluster, &by_alice("away", change)), Verdict::default());
}

#[test]
fn an_update_that_strips_the_label_is_refused() {
    let cluster = settled(colors());
    let strip = |new: &mut Object| drop(new.metadata.labels.remove("workshop.io/companion"));
    let verdict = edit_companion(&cluster, "away", strip);
    assert_eq!(denied(&verdict), "strip");
    let text = verdict.denial.expect("a denial").message(&keys());
    assert!(text.contains("kubectl label configmap colors -n home workshop.io/managed-"), "{text}");
}

#[test]
fn a_companion_cannot_be_turned_into_a_source() {
    let cluster = settled(colors());
    let label =
        |new: &mut Object| drop(new.metadata.labels.insert("workshop.io/managed".into(), "true".into()));
    assert_eq!(denied(&edit_companion(&cluster, "away", label)), "edit");
}

#[test]
fn creating_an_object_that_bears_companion_marks_is_refused() {
    let cluster = settled(colors());
    for forged in [
        object("third", "x").label("companion", "true"),
        object("third", "x").annotate("source", "home/colors"),
        object("third", "x").annotate("source-uid", "uid-of-colors"),
        source("third", "x").label("companion", "true"),
    ] {
        assert_eq!(denied(&create(&cluster, forged)), "forged");
    }
}

#[test]
fn marks_cannot_be_put_on_an_object_that_is_there() {
    let mut cluster = settled(colors());
    let key = cluster.put(object("third", "x"));
    let old = cluster.object(&key).expect("it is there").clone();
    let change =
        update(old, |new| drop(new.metadata.labels.insert("workshop.io/companion".into(), "true".into())));
    assert_eq!(denied(&judge(&cluster, &by_alice("third", change))), "forged");
}

#[test]
fn marks_cannot_be_put_on_one_by_one() {
    let mut cluster = settled(colors());
    // Nobody is asked about annotations of an object that bears no label of ours.
    let key = cluster.put(object("third", "x").annotate("source", "home/colors").annotate("source-uid", "1"));
    let old = cluster.object(&key).expect("it is there").clone();
    let label =
        |new: &mut Object| drop(new.metadata.labels.insert("workshop.io/companion".into(), "true".into()));
    assert_eq!(denied(&judge(&cluster, &by_alice("third", update(old, label)))), "forged");
    // Nor was anybody while the guard was away.
    let key = cluster.put(object("third", "y").label("companion", "true"));
    let old = cluster.object(&key).expect("it is there").clone();
    let point = |new: &mut Object| annotate(new, "source", "home/colors");
    assert_eq!(denied(&judge(&cluster, &by_alice("third", update(old, point)))), "forged");
}

#[test]
fn what_names_a_source_cannot_be_made_one() {
    for mark in ["source", "source-uid"] {
        let mut cluster = settled(colors());
        // Nobody was asked about this annotation either.
        let key = cluster.put(object("third", "x").annotate(mark, "third/planter"));
        let old = cluster.object(&key).expect("it is there").clone();
        let label = |new: &mut Object| {
            new.metadata.labels.insert("workshop.io/managed".into(), "true".into());
            annotate(new, "target-namespaces", "away");
        };
        assert_eq!(denied(&judge(&cluster, &by_alice("third", update(old, label)))), "is_companion");
    }
}

#[test]
fn where_nothing_is_protected_marks_are() {
    let cluster = settled(colors().annotate("protect", "none"));
    let point = |new: &mut Object| annotate(new, "source", "third/other");
    assert_eq!(denied(&edit_companion(&cluster, "away", point)), "edit");
}

#[test]
fn a_companion_that_is_turned_into_a_source_where_edits_pass_needs_the_rights_of_one() {
    let turn = |new: &mut Object| {
        new.metadata.labels = [("workshop.io/managed".to_owned(), "true".to_owned())].into();
        new.metadata.annotations.clear();
        annotate(new, "target-namespaces", "third");
    };
    let mut cluster = settled(colors().annotate("protect", "none"));
    let verdict = edit_companion(&cluster, "away", turn);
    assert_eq!(
        (asks(&verdict), verdict.warnings.len()),
        (vec!["all third/colors-synced-synced".to_owned()], 1)
    );
    cluster.namespace(namespace("away").terminating());
    assert_eq!(asks(&edit_companion(&cluster, "away", turn)), ["all third/colors-synced-synced"]);
}

#[test]
fn what_bears_our_label_and_no_source_is_nobodys_companion() {
    let mut cluster = settled(colors());
    let key = cluster.put(object("third", "x").label("companion", "true"));
    let old = cluster.object(&key).expect("it is there").clone();
    let change = update(old.clone(), |new| drop(new.metadata.labels.remove("workshop.io/companion")));
    assert_eq!(judge(&cluster, &by_alice("third", change)), Verdict::default());
    assert_eq!(judge(&cluster, &by_alice("third", Change::Delete { old })), Verdict::default());
}

#[test]
fn squatting_on_the_name_that_a_companion_needs_is_refused() {
    let mut cluster = Cluster::with(&["home", "away", "third"]);
    cluster.put(colors());
    assert_eq!(denied(&create(&cluster, object("away", "colors-synced"))), "squatting");
    assert_eq!(denied(&create(&cluster, source("away", "colors-synced"))), "squatting");
    assert_eq!(create(&cluster, object("third", "colors-synced")), Verdict::default());
    assert_eq!(create(&cluster, object("away", "flavors-synced")), Verdict::default());
    let secret = ObjectBuilder { kind: Kind::Secret, ..object("away", "colors-synced") };
    assert_eq!(create(&cluster, secret), Verdict::default());
}

#[test]
fn a_name_is_free_where_its_source_may_have_no_companion() {
    let mut cluster = Cluster::with(&["home"]);
    cluster.namespace(namespace("away").label("exclude", "true"));
    cluster.put(colors());
    assert_eq!(create(&cluster, object("away", "colors-synced")), Verdict::default());
}

#[test]
fn a_delete_is_allowed_with_a_warning_that_it_comes_back() {
    for protect in ["edits", "none"] {
        let cluster = settled(colors().annotate("protect", protect));
        let verdict = delete(&cluster, "away", "colors-synced");
        assert_eq!(denied(&verdict), "allowed");
        assert_eq!(
            verdict.warnings,
            [
                "away/colors-synced is a companion: Lockstep creates it again for as long as home/colors wants it"
            ]
        );
    }
}

#[test]
fn a_delete_is_refused_where_the_source_protects_all() {
    let cluster = settled(colors().annotate("protect", "all"));
    let verdict = delete(&cluster, "away", "colors-synced");
    assert_eq!(denied(&verdict), "delete");
    let text = verdict.denial.expect("a denial").message(&keys());
    assert!(
        text.contains("kubectl annotate --overwrite configmap colors -n home workshop.io/protect=edits"),
        "{text}"
    );
}

#[test]
fn the_source_says_how_a_companion_is_protected_not_what_stands_on_it() {
    let cluster = settled(colors().annotate("protect", "all"));
    let mut old = find(&cluster, "away", "colors-synced");
    annotate(&mut old, "protect", "none");
    assert_eq!(denied(&judge(&cluster, &by_alice("away", Change::Delete { old }))), "delete");
}

#[test]
fn where_nothing_is_protected_edits_pass_with_a_warning() {
    let cluster = settled(colors().annotate("protect", "none"));
    let verdict = edit_companion(&cluster, "away", |new| new.data = None);
    assert_eq!(denied(&verdict), "allowed");
    assert_eq!(verdict.warnings.len(), 1);
}

#[test]
fn anything_may_be_done_to_a_companion_whose_namespace_is_terminating() {
    let mut cluster = settled(colors().annotate("protect", "all"));
    cluster.namespace(namespace("away").terminating());
    assert_eq!(delete(&cluster, "away", "colors-synced"), Verdict::default());
    assert_eq!(edit_companion(&cluster, "away", |new| new.data = None), Verdict::default());
    assert_eq!(denied(&edit_companion(&cluster, "home", |new| new.data = None)), "edit");
}

#[test]
fn the_companion_of_a_source_that_is_gone_may_be_deleted_without_a_warning() {
    let mut cluster = settled(colors());
    let old = find(&cluster, "away", "colors-synced");
    cluster.delete(&configmap("home", "colors"));
    assert_eq!(judge(&cluster, &by_alice("away", Change::Delete { old })), Verdict::default());
}

// --- what a source may say

#[test]
fn a_source_that_makes_no_sense_is_refused_in_one_line() {
    let cluster = Cluster::with(&["home"]);
    let fifty_one = (0..51).map(|n| format!("n{n}")).collect::<Vec<_>>().join(",");
    let long = "x".repeat(250);
    for (draft, reason, says) in [
        (source("home", "c").annotate("target-namespaces", "a*b"), "malformed", "target-namespaces"),
        (
            source("home", "c").annotate("target-namespaces", &fifty_one),
            "malformed",
            "51 names, 50 are allowed",
        ),
        (source("home", "c").annotate("target-selector", ""), "malformed", "empty selector"),
        (source("home", "c").annotate("protect", "everything"), "malformed", "`edits`, `all`, `none`"),
        (source("home", "c").annotate("keys", "a=x,b=x"), "malformed", "two keys would be copied to `x`"),
        (source("home", &long), "name_too_long", "253 are allowed"),
        (
            source("home", "c").annotate("companion-name", "kube-root-ca.crt"),
            "refused",
            "belongs to Kubernetes",
        ),
        (source("home", "c").of_type("kubernetes.io/service-account-token"), "refused", "never mirrored"),
        (source("lockstep-system", "c"), "refused", "own namespace"),
    ] {
        let verdict = create(&cluster, draft);
        assert_eq!(denied(&verdict), reason);
        let text = verdict.denial.expect("a denial").message(&keys());
        assert!(text.contains(says) && !text.contains('\n'), "{text}");
    }
}

#[test]
fn an_update_that_leaves_our_keys_alone_is_never_refused_for_what_was_wrong_before() {
    let mut cluster = Cluster::with(&["home"]);
    cluster.put(source("home", "colors").annotate("protect", "everything"));
    let verdict = edit_source(&cluster, |new| new.data = Some([("sky".into(), "green".into())].into()));
    assert_eq!(verdict, Verdict::default());
    let verdict = edit_source(&cluster, |new| annotate(new, "paused", "true"));
    assert_eq!(denied(&verdict), "malformed");
}

#[test]
fn a_name_that_belongs_to_another_source() {
    let mut cluster = settled(colors());
    // From another namespace: refused.
    let other = source("third", "colors").annotate("target-namespaces", "away");
    assert_eq!(denied(&create(&cluster, other)), "taken");
    // From the same: handed over later, as with kustomize's hashed names.
    let sibling = source("home", "colors-7f2").annotate("companion-name", "colors-synced");
    let verdict = create(&cluster, sibling);
    assert_eq!(denied(&verdict), "allowed");
    assert_eq!(
        verdict.warnings,
        ["home/colors-synced belongs to home/colors: it is handed over when that one lets go of it"]
    );
    // Its owner is on its way out: no longer in the way.
    cluster.put(colors().terminating());
    let other = source("third", "colors").annotate("target-namespaces", "away");
    assert_eq!(denied(&create(&cluster, other)), "allowed");
}

#[test]
fn change_of_a_source_in_trouble_is_allowed_with_a_warning_on_a_replica_without_a_mirror() {
    // Nothing but watches feeds this world: that is what a replica knows that does not lead.
    let mut cluster = Cluster::with(&["home"]);
    cluster.namespace(namespace("away").label("exclude", "true"));
    cluster.put(companion("home", "colors-synced").of("third/colors"));
    cluster.put(colors());
    let troubles = [
        "namespace away is excluded and never a target",
        "home/colors-synced: the name is held by the companion of third/colors; nothing was overwritten",
    ];
    let verdict = edit_source(&cluster, |new| new.data = None);
    assert_eq!(denied(&verdict), "allowed");
    assert_eq!(verdict.warnings, troubles);
    // Once the source no longer asks for these places, nothing is wrong with it.
    let away = |new: &mut Object| annotate(new, "target-namespaces", "third");
    assert!(!edit_source(&cluster, away).warnings.iter().any(|text| troubles.contains(&&**text)));
}

#[test]
fn targets_that_can_never_be_are_a_warning() {
    let mut cluster = Cluster::with(&["home", "kube-system"]);
    cluster.namespace(namespace("closed").label("exclude", "true"));
    let verdict =
        create(&cluster, source("home", "c").annotate("target-namespaces", "closed,kube-system,nowhere"));
    assert_eq!(denied(&verdict), "allowed");
    assert_eq!(verdict.warnings.len(), 3, "{:?}", verdict.warnings);
}

// --- who may mirror where

#[test]
fn making_a_source_asks_for_everything_that_the_mirror_would_do() {
    let cluster = Cluster::with(&["home", "away"]);
    for (draft, expected) in [
        (source("home", "c"), vec!["all home/c-synced"]),
        (
            source("home", "c").annotate("target-namespaces", ".,away"),
            vec!["all away/c-synced", "all home/c-synced"],
        ),
        (source("home", "c").annotate("companion-name", "other"), vec!["all home/other"]),
        (source("home", "c").annotate("target-namespaces", "team-*"), vec!["all */c-synced"]),
        (source("home", "c").annotate("target-selector", "env=dev"), vec!["all */c-synced"]),
        (
            source("home", "c").annotate("target-namespaces", "*,."),
            vec!["all */c-synced", "all home/c-synced"],
        ),
        (source("home", "c").annotate("target-namespaces", "not-there"), vec!["all not-there/c-synced"]),
        (source("home", "c").annotate("paused", "true"), vec!["all home/c-synced"]),
        (object("home", "c"), vec![]),
    ] {
        assert_eq!(asks(&create(&cluster, draft)), expected);
    }
}

#[test]
fn labelling_an_object_is_making_a_source() {
    let mut cluster = Cluster::with(&["home", "away"]);
    cluster.put(object("home", "colors").annotate("target-namespaces", "away"));
    let label =
        |new: &mut Object| drop(new.metadata.labels.insert("workshop.io/managed".into(), "true".into()));
    assert_eq!(asks(&edit_source(&cluster, label)), ["all away/colors-synced"]);
}

#[test]
fn unlabelling_or_deleting_a_source_asks_for_what_goes_with_it() {
    let cluster = settled(colors());
    let expected = ["delete away/colors-synced", "delete home/colors-synced"];
    assert_eq!(asks(&delete(&cluster, "home", "colors")), expected);
    let unlabel = |new: &mut Object| drop(new.metadata.labels.remove("workshop.io/managed"));
    assert_eq!(asks(&edit_source(&cluster, unlabel)), expected);
    let off =
        |new: &mut Object| drop(new.metadata.labels.insert("workshop.io/managed".into(), "false".into()));
    assert_eq!(asks(&edit_source(&cluster, off)), expected);
}

#[test]
fn companions_that_no_watch_has_shown_yet_are_asked_about_just_the_same() {
    for (targets, expected) in [
        (".,away", vec!["delete away/colors-synced", "delete home/colors-synced"]),
        ("aw*", vec!["delete */colors-synced"]),
    ] {
        let mut cluster = Cluster::with(&["home", "away"]);
        cluster.put(colors().annotate("target-namespaces", targets));
        assert_eq!(asks(&delete(&cluster, "home", "colors")), expected);
        let unlabel = |new: &mut Object| drop(new.metadata.labels.remove("workshop.io/managed"));
        assert_eq!(asks(&edit_source(&cluster, unlabel)), expected);
    }
}

#[test]
fn a_change_of_targets_asks_for_those_that_were_and_those_that_are() {
    let cluster = settled(colors());
    let verdict = edit_source(&cluster, |new| annotate(new, "target-namespaces", "third"));
    assert_eq!(
        asks(&verdict),
        ["delete away/colors-synced", "delete home/colors-synced", "all third/colors-synced"]
    );
    let verdict = edit_source(&cluster, |new| annotate(new, "companion-name", "other"));
    assert_eq!(
        asks(&verdict),
        ["delete away/colors-synced", "all away/other", "delete home/colors-synced", "all home/other"]
    );
}

#[test]
fn whatever_reaches_companions_is_asked_about_and_nothing_else() {
    let cluster = settled(
        colors()
            .data("sea", "green")
            .data("grass", "green")
            .binary("sand", "AA==")
            .annotate("keys", "sky,sea=water,sand")
            .label("example.com/team", "a")
            .annotate("copy-labels", "example.com/team")
            .annotate("example.com/who", "a")
            .annotate("copy-annotations", "example.com/who"),
    );
    fn put(new: &mut Object, key: &str, value: &str) {
        new.data.get_or_insert_default().insert(key.to_owned(), value.to_owned());
    }
    type Edit = (&'static str, fn(&mut Object), bool);
    let edits: [Edit; 16] = [
        ("content", |new| new.data = None, true),
        ("a value", |new| put(new, "sky", "red"), true),
        ("a value that gets another name", |new| put(new, "sea", "red"), true),
        ("binary content", |new| new.binary_data = None, true),
        ("a value that is not copied", |new| put(new, "grass", "red"), false),
        ("a key that is not copied", |new| put(new, "water", "red"), false),
        ("immutable", |new| new.immutable = Some(true), true),
        ("policy", |new| annotate(new, "protect", "none"), true),
        ("finalizers", |new| new.metadata.finalizers.push("x/y".into()), true),
        ("owners", |new| new.metadata.owner_references.push(crate::object::OwnerReference::default()), true),
        (
            "carried label",
            |new| drop(new.metadata.labels.insert("example.com/team".into(), "b".into())),
            true,
        ),
        ("carried annotation", |new| annotate(new, "example.com/who", "b"), true),
        ("a keys annotation that copies the same", |new| annotate(new, "keys", "sand,sea=water,sky,"), false),
        (
            "other label",
            |new| drop(new.metadata.labels.insert("example.com/other".into(), "b".into())),
            false,
        ),
        ("other annotation", |new| annotate(new, "example.com/note", "x"), false),
        ("version", |new| new.metadata.resource_version = "77".into(), false),
    ];
    for (what, edit, asked) in edits {
        assert_eq!(edit_source(&cluster, edit).ask.is_some(), asked, "{what}");
    }
}

#[test]
fn the_garbage_collector_is_no_way_around_the_review_of_a_source_that_makes_no_sense() {
    let mut cluster = settled(colors());
    cluster.put(colors().annotate("protect", "everything"));
    let own = |new: &mut Object| new.metadata.owner_references.push(crate::object::OwnerReference::default());
    let expected = ["delete away/colors-synced", "delete home/colors-synced"];
    assert_eq!(asks(&edit_source(&cluster, own)), expected);
    assert_eq!(asks(&delete(&cluster, "home", "colors")), expected);
}

#[test]
fn accept_from_stands_in_for_names_written_outright_and_for_nothing_else() {
    let mut cluster = Cluster::with(&["home", "third"]);
    cluster.namespace(namespace("away").annotate("accept-from", "ho*"));
    let ask =
        |targets: &str| asks(&create(&cluster, source("home", "c").annotate("target-namespaces", targets)));
    assert_eq!(ask("away"), Vec::<String>::new());
    assert_eq!(ask("away,third"), ["all third/c-synced"]);
    assert_eq!(ask("aw*"), ["all */c-synced"]);
    // To its own people, a namespace gives rights by name.
    cluster.namespace(namespace("own").annotate("accept-from", "*"));
    assert_eq!(asks(&create(&cluster, source("own", "c"))), ["all own/c-synced"]);
    let from_third = source("third", "c").annotate("target-namespaces", "away");
    assert_eq!(asks(&create(&cluster, from_third)), ["all away/c-synced"]);
}

#[test]
fn a_source_that_is_on_its_way_out_has_been_reviewed() {
    let cluster = settled(colors().finalizer("x/y").terminating());
    assert_eq!(edit_source(&cluster, |new| new.metadata.finalizers.clear()), Verdict::default());
}

#[test]
fn what_is_going_anyway_keeps_nobody_from_changing_a_source() {
    let mut cluster = settled(colors());
    cluster.put(companion("third", "x").of("home/colors").finalizer("x/y").terminating());
    cluster.put(companion("fourth", "x").of("home/colors"));
    cluster.namespace(namespace("fourth").terminating());
    let expected = ["delete away/colors-synced", "delete home/colors-synced"];
    assert_eq!(asks(&delete(&cluster, "home", "colors")), expected);
}

#[test]
fn more_strays_than_names_are_allowed_ask_for_all_namespaces() {
    let mut cluster = Cluster::with(&["home"]);
    (0..60).for_each(|n| cluster.namespace(namespace(&format!("team-{n}"))));
    let key = cluster.put(source("home", "colors").annotate("target-namespaces", "team-*"));
    cluster.settle(&key);
    cluster.put(source("home", "colors").annotate("target-namespaces", "!"));
    assert_eq!(asks(&delete(&cluster, "home", "colors")), ["delete */colors-synced"]);
}

#[test]
fn a_deputys_rights_count_for_nothing() {
    let mut cluster = Cluster::with(&["home", "away"]);
    cluster.namespace(namespace("open").annotate("accept-from", "home"));
    for (name, group) in [("cert-manager", "x"), ("argocd", "robots")] {
        let deputy = User { name: name.into(), groups: vec![group.into()], ..User::default() };
        let verdict = |targets: &str| {
            let new = source("home", "c").annotate("target-namespaces", targets).object;
            judge(&cluster, &Request { user: deputy.clone(), ..by_alice("home", Change::Create { new }) })
        };
        for (targets, expected) in [
            ("open", "allowed"),
            ("away", "deputy"),
            (".", "deputy"),
            ("open,away", "deputy"),
            ("op*", "deputy"),
        ] {
            let verdict = verdict(targets);
            assert_eq!((denied(&verdict), &verdict.ask), (expected, &None), "{targets}");
        }
    }
}
