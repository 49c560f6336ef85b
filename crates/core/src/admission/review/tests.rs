//! The rows of the table "What the webhook says" in `docs/reference.md`.

mod restores;

use super::*;
use crate::{
    admission::admission_request::{KUBERNETES_CLEANUP_USERS, User},
    object::{Kind, OwnerReference},
    testing::{
        CREATED, DELETED, OWN_NAMESPACE, ObjectBuilder, cluster::Cluster, companion, configmap, keys,
        namespace, object, source,
    },
};

fn rules() -> Rules {
    Rules {
        keys: keys(),
        own_namespace: OWN_NAMESPACE.to_owned(),
        exempt: Subjects { users: vec!["lockstep".into(), "root".into()], groups: vec!["admins".into()] },
        deputies: Subjects { users: vec!["cert-manager".into()], groups: vec!["robots".into()] },
        default_targets: ".".to_owned(),
        default_protect: Protect::Edits,
    }
}

fn user(name: &str) -> User {
    User { name: name.to_owned(), groups: vec!["system:authenticated".to_owned()], ..User::default() }
}

/// A request of Alice about an object of a namespace.
fn by_alice(namespace: &str, operation: Operation) -> Request {
    Request {
        kind: Kind::ConfigMap,
        namespace: namespace.to_owned(),
        user: user("alice"),
        operation,
        dry_run: false,
    }
}

fn judge(cluster: &Cluster, request: &Request) -> Verdict {
    let rules = rules();
    Review::read(&rules, request)
        .map_or(Verdict::ALLOWED, |case| cluster.world.read(|world| case.judge(world)))
}

/// What becomes of the request of a user who has the required access.
fn outcome(cluster: &Cluster, verdict: &Verdict) -> Result<Vec<String>, Denial> {
    match verdict {
        Verdict::Deny(denial) => Err(denial.clone()),
        Verdict::CheckAccess { then, .. } => cluster.world.read(|world| then.clone().decide(world, true)),
        Verdict::CheckRestore { restored, otherwise } => {
            let right = cluster.world.read(|world| restored.is_right(world));
            if right { Ok(Vec::new()) } else { Err(otherwise.clone()) }
        }
        Verdict::Allow { warnings } => Ok(warnings.clone()),
    }
}

fn denied(cluster: &Cluster, verdict: &Verdict) -> &'static str {
    outcome(cluster, verdict).map_or_else(|denial| denial.label(), |_| "allowed")
}

fn warnings(cluster: &Cluster, verdict: &Verdict) -> Vec<String> {
    outcome(cluster, verdict).expect("an allowed request")
}

fn message(cluster: &Cluster, verdict: &Verdict) -> String {
    outcome(cluster, verdict).expect_err("a denial").message(&keys())
}

/// `colors` in `home`, with companions there and in `away`.
fn colors() -> ObjectBuilder {
    source("home", "colors").data("sky", "blue").annotate("target-namespaces", ".,away")
}

fn mirrored(draft: ObjectBuilder) -> Cluster {
    let mut cluster = Cluster::with(&["home", "away", "third"]);
    let key = cluster.put(draft);
    cluster.reconcile(&key);
    cluster
}

fn find(cluster: &Cluster, namespace: &str, name: &str) -> Object {
    cluster.object(&configmap(namespace, name)).expect("the object exists").clone()
}

fn update(old: Object, change: impl FnOnce(&mut Object)) -> Operation {
    let mut new = old.clone();
    change(&mut new);
    Operation::Update { old, new }
}

fn edit_companion(cluster: &Cluster, namespace: &str, change: impl FnOnce(&mut Object)) -> Verdict {
    let old = find(cluster, namespace, "colors-synced");
    judge(cluster, &by_alice(namespace, update(old, change)))
}

fn edit_source(cluster: &Cluster, change: impl FnOnce(&mut Object)) -> Verdict {
    let old = find(cluster, "home", "colors");
    judge(cluster, &by_alice("home", update(old, change)))
}

/// Gives an object the labels, annotations and data of this one.
fn replace(cluster: &Cluster, draft: ObjectBuilder) -> Verdict {
    let Meta { namespace, name, labels, annotations, .. } = draft.object.metadata;
    let change = |new: &mut Object| {
        (new.metadata.labels, new.metadata.annotations, new.data) = (labels, annotations, draft.object.data);
    };
    judge(cluster, &by_alice(&namespace, update(find(cluster, &namespace, &name), change)))
}

fn delete(cluster: &Cluster, namespace: &str, name: &str) -> Verdict {
    judge(cluster, &by_alice(namespace, Operation::Delete { old: find(cluster, namespace, name) }))
}

fn create(cluster: &Cluster, draft: ObjectBuilder) -> Verdict {
    let namespace = draft.object.metadata.namespace.clone();
    let kind = draft.kind;
    let request = by_alice(&namespace, Operation::Create { new: draft.object });
    judge(cluster, &Request { kind, ..request })
}

fn annotate(object: &mut Object, key: &str, value: &str) {
    object.metadata.annotations.insert(crate::testing::full(key), value.to_owned());
}

/// The access that a verdict requires, as `verbs namespace/name`; `*` stands for all namespaces.
fn required(verdict: &Verdict) -> Vec<String> {
    let Verdict::CheckAccess { required, .. } = verdict else { return Vec::new() };
    let shown = |(namespace, name, verbs): (Option<&str>, &str, Verbs)| {
        let verbs = if verbs == Verbs::All { "all" } else { "delete" };
        format!("{verbs} {}/{name}", namespace.unwrap_or("*"))
    };
    required.iter().map(shown).collect()
}

// --- exempt users

#[test]
fn lockstep_exempt_users_and_kubernetes_cleanup_are_allowed_everything() {
    let cluster = mirrored(colors().annotate("protect", "all"));
    let old = find(&cluster, "away", "colors-synced");
    let exempt = [("lockstep", vec![]), ("root", vec![]), ("bob", vec!["admins".to_owned()])];
    let cleanup = KUBERNETES_CLEANUP_USERS.map(|name| (name, vec![]));
    for (name, groups) in exempt.into_iter().chain(cleanup) {
        let user = User { name: name.to_owned(), groups, ..User::default() };
        for operation in [Operation::Delete { old: old.clone() }, update(old.clone(), |new| new.data = None)]
        {
            let request = Request { user: user.clone(), ..by_alice("away", operation) };
            assert_eq!(judge(&cluster, &request), Verdict::ALLOWED, "{name}");
        }
    }
}

#[test]
fn user_or_group_with_a_similar_name_is_not_exempt() {
    let cluster = mirrored(colors());
    let old = find(&cluster, "away", "colors-synced");
    for (name, group) in [("admins", "root"), ("lockstep2", "admin"), ("Root", "Admins")] {
        let user = User { name: name.into(), groups: vec![group.into()], ..User::default() };
        let operation = update(old.clone(), |new| new.data = None);
        assert_eq!(
            denied(&cluster, &judge(&cluster, &Request { user, ..by_alice("away", operation) })),
            "edit",
            "{name}"
        );
    }
}

// --- companions

#[test]
fn edit_of_companion_is_denied_and_the_message_names_the_source() {
    let cluster = mirrored(colors());
    let verdict = edit_companion(&cluster, "away", |new| {
        new.data = Some([("sky".to_owned(), "green".to_owned())].into());
    });
    assert_eq!(
        message(&cluster, &verdict),
        "configmap away/colors-synced is a companion, kept equal to home/colors by Lockstep. \
         Change the source instead: kubectl edit configmap colors -n home"
    );
    let edits: [fn(&mut Object); 6] = [
        |new| new.immutable = Some(true),
        |new| drop(new.metadata.labels.insert("team".into(), "a".into())),
        |new| annotate(new, "example.com/note", "x"),
        |new| new.metadata.finalizers.push("example.com/hold".into()),
        |new| new.metadata.owner_references = vec![OwnerReference::default()],
        |new| annotate(new, "source", "away/other"),
    ];
    for edit in edits {
        for place in ["home", "away"] {
            assert_eq!(denied(&cluster, &edit_companion(&cluster, place, edit)), "edit");
        }
    }
}

#[test]
fn update_of_nothing_but_managed_fields_is_allowed() {
    let cluster = mirrored(colors());
    let old = find(&cluster, "away", "colors-synced");
    let operation = Operation::Update { new: old.clone(), old };
    assert_eq!(judge(&cluster, &by_alice("away", operation)), Verdict::ALLOWED);
}

#[test]
fn update_that_removes_the_companion_label_is_denied() {
    let cluster = mirrored(colors());
    let strip = |new: &mut Object| drop(new.metadata.labels.remove("workshop.io/companion"));
    let verdict = edit_companion(&cluster, "away", strip);
    assert_eq!(denied(&cluster, &verdict), "strip");
    let text = message(&cluster, &verdict);
    assert!(text.contains("kubectl label configmap colors -n home workshop.io/managed-"), "{text}");
}

#[test]
fn companion_cannot_be_turned_into_a_source() {
    let cluster = mirrored(colors());
    let label =
        |new: &mut Object| drop(new.metadata.labels.insert("workshop.io/managed".into(), "true".into()));
    assert_eq!(denied(&cluster, &edit_companion(&cluster, "away", label)), "edit");
}

#[test]
fn create_of_an_object_with_marks_is_denied() {
    let cluster = mirrored(colors());
    for forged in [
        object("third", "x").label("companion", "true"),
        object("third", "x").annotate("source", "home/colors"),
        object("third", "x").annotate("source-uid", "uid-of-colors"),
        source("third", "x").label("companion", "true"),
    ] {
        assert_eq!(denied(&cluster, &create(&cluster, forged)), "forged");
    }
}

#[test]
fn marks_cannot_be_added_to_an_existing_object() {
    let mut cluster = mirrored(colors());
    let key = cluster.put(object("third", "x"));
    let old = cluster.object(&key).expect("the object exists").clone();
    let operation =
        update(old, |new| drop(new.metadata.labels.insert("workshop.io/companion".into(), "true".into())));
    assert_eq!(denied(&cluster, &judge(&cluster, &by_alice("third", operation))), "forged");
}

#[test]
fn marks_cannot_be_added_one_by_one() {
    let mut cluster = mirrored(colors());
    // No webhook is called for annotations of an object without our label.
    let key = cluster.put(object("third", "x").annotate("source", "home/colors").annotate("source-uid", "1"));
    let old = cluster.object(&key).expect("the object exists").clone();
    let label =
        |new: &mut Object| drop(new.metadata.labels.insert("workshop.io/companion".into(), "true".into()));
    assert_eq!(denied(&cluster, &judge(&cluster, &by_alice("third", update(old, label)))), "forged");
    // Nor for a label that was set while the webhook was down.
    let key = cluster.put(object("third", "y").label("companion", "true"));
    let old = cluster.object(&key).expect("the object exists").clone();
    let point = |new: &mut Object| annotate(new, "source", "home/colors");
    assert_eq!(denied(&cluster, &judge(&cluster, &by_alice("third", update(old, point)))), "forged");
}

#[test]
fn object_that_names_a_source_cannot_become_a_source() {
    for mark in ["source", "source-uid"] {
        let mut cluster = mirrored(colors());
        // No webhook was called for this annotation.
        let key = cluster.put(object("third", "x").annotate(mark, "third/planter"));
        let old = cluster.object(&key).expect("the object exists").clone();
        let label = |new: &mut Object| {
            new.metadata.labels.insert("workshop.io/managed".into(), "true".into());
            annotate(new, "target-namespaces", "away");
        };
        assert_eq!(
            denied(&cluster, &judge(&cluster, &by_alice("third", update(old, label)))),
            "is_companion"
        );
    }
}

#[test]
fn marks_are_protected_even_with_protect_none() {
    let cluster = mirrored(colors().annotate("protect", "none"));
    let point = |new: &mut Object| annotate(new, "source", "third/other");
    assert_eq!(denied(&cluster, &edit_companion(&cluster, "away", point)), "edit");
}

#[test]
fn companion_turned_into_a_source_where_edits_are_allowed_requires_access() {
    let turn = |new: &mut Object| {
        new.metadata.labels = [("workshop.io/managed".to_owned(), "true".to_owned())].into();
        new.metadata.annotations.clear();
        annotate(new, "target-namespaces", "third");
    };
    let mut cluster = mirrored(colors().annotate("protect", "none"));
    let verdict = edit_companion(&cluster, "away", turn);
    assert_eq!(
        (required(&verdict), warnings(&cluster, &verdict).len()),
        (vec!["all third/colors-synced-synced".to_owned()], 1)
    );
    cluster.namespace(namespace("away").terminating());
    assert_eq!(required(&edit_companion(&cluster, "away", turn)), ["all third/colors-synced-synced"]);
}

#[test]
fn object_with_the_label_but_no_source_is_not_protected() {
    let mut cluster = mirrored(colors());
    let key = cluster.put(object("third", "x").label("companion", "true"));
    let old = cluster.object(&key).expect("the object exists").clone();
    let operation = update(old.clone(), |new| drop(new.metadata.labels.remove("workshop.io/companion")));
    assert_eq!(judge(&cluster, &by_alice("third", operation)), Verdict::ALLOWED);
    assert_eq!(judge(&cluster, &by_alice("third", Operation::Delete { old })), Verdict::ALLOWED);
}

#[test]
fn create_with_the_name_of_a_wanted_companion_is_denied() {
    let mut cluster = Cluster::with(&["home", "away", "third"]);
    cluster.put(colors());
    assert_eq!(denied(&cluster, &create(&cluster, object("away", "colors-synced"))), "squatting");
    assert_eq!(denied(&cluster, &create(&cluster, source("away", "colors-synced"))), "squatting");
    assert_eq!(create(&cluster, object("third", "colors-synced")), Verdict::ALLOWED);
    assert_eq!(create(&cluster, object("away", "flavors-synced")), Verdict::ALLOWED);
    let secret = ObjectBuilder { kind: Kind::Secret, ..object("away", "colors-synced") };
    assert_eq!(create(&cluster, secret), Verdict::ALLOWED);
}

#[test]
fn name_is_free_in_a_namespace_that_gets_no_companion() {
    let mut cluster = Cluster::with(&["home"]);
    cluster.namespace(namespace("away").label("exclude", "true"));
    cluster.put(colors());
    assert_eq!(create(&cluster, object("away", "colors-synced")), Verdict::ALLOWED);
}

#[test]
fn delete_of_companion_is_allowed_with_a_warning_that_it_is_created_again() {
    for protect in ["edits", "none"] {
        let cluster = mirrored(colors().annotate("protect", protect));
        let verdict = delete(&cluster, "away", "colors-synced");
        assert_eq!(denied(&cluster, &verdict), "allowed");
        assert_eq!(
            warnings(&cluster, &verdict),
            [
                "away/colors-synced is a companion: Lockstep creates it again for as long as home/colors wants it"
            ]
        );
    }
}

#[test]
fn delete_of_companion_is_denied_with_protect_all() {
    let cluster = mirrored(colors().annotate("protect", "all"));
    let verdict = delete(&cluster, "away", "colors-synced");
    assert_eq!(denied(&cluster, &verdict), "delete");
    let text = message(&cluster, &verdict);
    assert!(
        text.contains("kubectl annotate --overwrite configmap colors -n home workshop.io/protect=edits"),
        "{text}"
    );
}

/// The webhook for new objects is not called for such a name, so a new object could take it.
#[test]
fn delete_of_companion_whose_name_lacks_the_suffix_is_denied_unless_protect_is_none() {
    for (protect, expected) in [("edits", "delete"), ("all", "delete"), ("none", "allowed")] {
        let named = colors().annotate("companion-name", "palette").annotate("protect", protect);
        let mut cluster = mirrored(named);
        let verdict = delete(&cluster, "away", "palette");
        assert_eq!(denied(&cluster, &verdict), expected, "{protect}");
        if expected == "delete" {
            let text = message(&cluster, &verdict);
            assert!(
                text.ends_with("kubectl annotate configmap colors -n home workshop.io/companion-name-"),
                "{text}"
            );
        }
        // Without its source it is not created again.
        let old = find(&cluster, "away", "palette");
        cluster.delete(&configmap("home", "colors"));
        let orphan = judge(&cluster, &by_alice("away", Operation::Delete { old }));
        assert_eq!(
            denied(&cluster, &orphan),
            if protect == "all" { "delete" } else { "allowed" },
            "{protect}"
        );
    }
}

#[test]
fn protection_comes_from_the_source_not_from_the_companion() {
    let cluster = mirrored(colors().annotate("protect", "all"));
    let mut old = find(&cluster, "away", "colors-synced");
    annotate(&mut old, "protect", "none");
    assert_eq!(denied(&cluster, &judge(&cluster, &by_alice("away", Operation::Delete { old }))), "delete");
}

#[test]
fn edit_of_companion_is_allowed_with_a_warning_with_protect_none() {
    let cluster = mirrored(colors().annotate("protect", "none"));
    let verdict = edit_companion(&cluster, "away", |new| new.data = None);
    assert_eq!(denied(&cluster, &verdict), "allowed");
    assert_eq!(warnings(&cluster, &verdict).len(), 1);
}

#[test]
fn companion_in_a_terminating_namespace_is_not_protected() {
    let mut cluster = mirrored(colors().annotate("protect", "all"));
    cluster.namespace(namespace("away").terminating());
    assert_eq!(delete(&cluster, "away", "colors-synced"), Verdict::ALLOWED);
    assert_eq!(edit_companion(&cluster, "away", |new| new.data = None), Verdict::ALLOWED);
    assert_eq!(denied(&cluster, &edit_companion(&cluster, "home", |new| new.data = None)), "edit");
}

#[test]
fn companion_that_is_younger_than_the_deletion_of_its_namespace_is_protected() {
    let mut cluster = mirrored(colors().annotate("protect", "all"));
    // The watch has not shown yet that the namespace was made anew.
    cluster.namespace(namespace("away").terminating());
    for (created, terminating) in
        [(CREATED, true), (DELETED, true), ("2026-01-01T00:00:11Z", false), ("2026-10-01T00:00:00Z", false)]
    {
        let mut old = find(&cluster, "away", "colors-synced");
        old.metadata.creation_timestamp = Some(created.to_owned());
        let edit = judge(&cluster, &by_alice("away", update(old.clone(), |new| new.data = None)));
        let delete = judge(&cluster, &by_alice("away", Operation::Delete { old }));
        let expected = if terminating { ["allowed", "allowed"] } else { ["edit", "delete"] };
        assert_eq!([denied(&cluster, &edit), denied(&cluster, &delete)], expected, "{created}");
    }
}

#[test]
fn delete_of_companion_without_source_is_allowed_without_warning() {
    let mut cluster = mirrored(colors());
    let old = find(&cluster, "away", "colors-synced");
    cluster.delete(&configmap("home", "colors"));
    assert_eq!(judge(&cluster, &by_alice("away", Operation::Delete { old })), Verdict::ALLOWED);
}

// --- settings of sources

#[test]
fn faulty_source_is_denied_with_a_message_of_one_line() {
    let cluster = Cluster::with(&["home"]);
    let fifty_one = (0..51).map(|n| format!("n{n}")).collect::<Vec<_>>().join(",");
    let long = "x".repeat(250);
    for (draft, reason, says) in [
        (source("home", "c").annotate("target-namespaces", "a*-"), "malformed", "target-namespaces"),
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
        assert_eq!(denied(&cluster, &verdict), reason);
        let text = message(&cluster, &verdict);
        assert!(text.contains(says) && !text.contains('\n'), "{text}");
    }
}

#[test]
fn update_of_a_faulty_source_that_keeps_its_settings_is_allowed() {
    let mut cluster = Cluster::with(&["home"]);
    cluster.put(source("home", "colors").annotate("protect", "everything"));
    let verdict = edit_source(&cluster, |new| new.data = Some([("sky".into(), "green".into())].into()));
    let warned = warnings(&cluster, &verdict);
    assert!(
        warned.len() == 1
            && warned[0].starts_with("home/colors cannot be a source: annotation workshop.io/protect"),
        "{warned:?}"
    );
    let verdict = edit_source(&cluster, |new| annotate(new, "paused", "true"));
    assert_eq!(denied(&cluster, &verdict), "malformed");
}

#[test]
fn name_of_another_sources_companion_is_denied_or_handed_over() {
    let mut cluster = mirrored(colors());
    // From another namespace: denied.
    let other = source("third", "colors").annotate("target-namespaces", "away");
    assert_eq!(denied(&cluster, &create(&cluster, other)), "taken");
    // From the same namespace: handed over later, as kustomize's hashed names need it.
    let sibling = source("home", "colors-7f2").annotate("companion-name", "colors-synced");
    let verdict = create(&cluster, sibling);
    assert_eq!(denied(&cluster, &verdict), "allowed");
    assert_eq!(
        warnings(&cluster, &verdict),
        [
            "home/colors-synced is the companion of home/colors; it is handed over once home/colors no longer wants it"
        ]
    );
    // A terminating source has no claim to the name any more.
    cluster.put(colors().terminating());
    let other = source("third", "colors").annotate("target-namespaces", "away");
    assert_eq!(denied(&cluster, &create(&cluster, other)), "allowed");
}

#[test]
fn pattern_that_meets_companions_of_other_sources_is_a_warning_and_a_name_is_denied() {
    let mut cluster = mirrored(colors());
    let everywhere = |name: &str| source("third", name).annotate("target-namespaces", "*");
    let verdict = create(&cluster, everywhere("colors"));
    assert_eq!(denied(&cluster, &verdict), "allowed");
    assert_eq!(
        warnings(&cluster, &verdict),
        [
            "2 namespaces that a pattern matches have a companion of this name from another source and keep it: \
          away/colors-synced of home/colors, home/colors-synced of home/colors; all others get one of this source"
        ]
    );
    // Only the first are named.
    (0..60).for_each(|n| cluster.namespace(namespace(&format!("team-{n}"))));
    let key = cluster.put(source("home", "colors").annotate("target-namespaces", "team-*"));
    cluster.reconcile(&key);
    let verdict = create(&cluster, everywhere("colors"));
    let [warning] = &*warnings(&cluster, &verdict) else { panic!("{verdict:?}") };
    assert!(warning.starts_with("60 namespaces") && warning.contains(" and 57 more;"), "{warning}");
    // A name that is written outright is denied, even if a pattern matches it too.
    let both = source("third", "colors").annotate("target-namespaces", "*,team-7");
    assert_eq!(denied(&cluster, &create(&cluster, both)), "taken");
    // Without a conflict there is no warning.
    assert!(warnings(&cluster, &create(&cluster, everywhere("shapes"))).is_empty());
}

#[test]
fn update_that_needs_no_access_looks_only_at_namespaces_listed_by_name() {
    let mut cluster = Cluster::with(&["home", "away", "third"]);
    for namespace in ["away", "third"] {
        cluster.put(companion(namespace, "colors-synced").of("other/colors"));
    }
    cluster.put(source("home", "colors").annotate("target-namespaces", "*,away"));
    let trouble = |verdict: Verdict| warnings(&cluster, &verdict);
    let unaffected = trouble(edit_source(&cluster, |new| annotate(new, "example.com/note", "x")));
    assert!(unaffected.iter().all(|warning| warning.starts_with("away/")), "{unaffected:?}");
    let content = trouble(edit_source(&cluster, |new| new.data = Some([("a".into(), "b".into())].into())));
    assert_eq!(content.len(), 2, "{content:?}");
}

#[test]
fn user_without_access_does_not_learn_that_the_name_is_taken() {
    let cluster = mirrored(colors());
    let other = source("third", "colors").annotate("target-namespaces", "away");
    let verdict = create(&cluster, other);
    // The denial is behind the check of their access.
    assert!(matches!(verdict, Verdict::CheckAccess { .. }), "{verdict:?}");
    assert_eq!(denied(&cluster, &verdict), "taken");
    assert_eq!(required(&verdict), ["all away/colors-synced"]);
}

#[test]
fn standby_warns_about_the_troubles_of_a_source() {
    // Only watches feed this world, as on a standby.
    let mut cluster = Cluster::with(&["home"]);
    cluster.namespace(namespace("away").label("exclude", "true"));
    cluster.put(companion("home", "colors-synced").of("third/colors"));
    cluster.put(colors());
    let troubles = [
        "namespace away is excluded and never a target: choose other target-namespaces",
        "home/colors-synced: the name is held by the companion of third/colors; nothing was overwritten",
    ];
    let verdict = edit_source(&cluster, |new| new.data = None);
    assert_eq!(denied(&cluster, &verdict), "allowed");
    assert_eq!(warnings(&cluster, &verdict), troubles);
    // The troubles end once the source no longer asks for these namespaces.
    let moved = edit_source(&cluster, |new| annotate(new, "target-namespaces", "third"));
    assert!(!warnings(&cluster, &moved).iter().any(|text| troubles.contains(&&**text)));
}

#[test]
fn targets_that_get_no_companion_are_a_warning() {
    let mut cluster = Cluster::with(&["home", "kube-system"]);
    cluster.namespace(namespace("closed").label("exclude", "true"));
    let verdict =
        create(&cluster, source("home", "c").annotate("target-namespaces", "closed,kube-system,nowhere"));
    assert_eq!(denied(&cluster, &verdict), "allowed");
    assert_eq!(warnings(&cluster, &verdict).len(), 3, "{:?}", warnings(&cluster, &verdict));
}

// --- required access

#[test]
fn create_of_a_source_requires_access_to_all_companions() {
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
        assert_eq!(required(&create(&cluster, draft)), expected);
    }
}

#[test]
fn labelling_an_object_as_source_requires_access() {
    let mut cluster = Cluster::with(&["home", "away"]);
    cluster.put(object("home", "colors").annotate("target-namespaces", "away"));
    let label =
        |new: &mut Object| drop(new.metadata.labels.insert("workshop.io/managed".into(), "true".into()));
    assert_eq!(required(&edit_source(&cluster, label)), ["all away/colors-synced"]);
}

#[test]
fn unlabelling_or_deleting_a_source_requires_delete_of_its_companions() {
    let cluster = mirrored(colors());
    let expected = ["delete away/colors-synced", "delete home/colors-synced"];
    assert_eq!(required(&delete(&cluster, "home", "colors")), expected);
    let unlabel = |new: &mut Object| drop(new.metadata.labels.remove("workshop.io/managed"));
    assert_eq!(required(&edit_source(&cluster, unlabel)), expected);
    let off =
        |new: &mut Object| drop(new.metadata.labels.insert("workshop.io/managed".into(), "false".into()));
    assert_eq!(required(&edit_source(&cluster, off)), expected);
}

#[test]
fn companions_that_no_watch_has_shown_yet_require_access_too() {
    for (targets, expected) in [
        (".,away", vec!["delete away/colors-synced", "delete home/colors-synced"]),
        ("aw*", vec!["delete */colors-synced"]),
    ] {
        let mut cluster = Cluster::with(&["home", "away"]);
        cluster.put(colors().annotate("target-namespaces", targets));
        assert_eq!(required(&delete(&cluster, "home", "colors")), expected);
        let unlabel = |new: &mut Object| drop(new.metadata.labels.remove("workshop.io/managed"));
        assert_eq!(required(&edit_source(&cluster, unlabel)), expected);
    }
}

#[test]
fn change_of_targets_requires_access_to_old_and_new_ones() {
    let cluster = mirrored(colors());
    let verdict = edit_source(&cluster, |new| annotate(new, "target-namespaces", "third"));
    assert_eq!(
        required(&verdict),
        ["delete away/colors-synced", "delete home/colors-synced", "all third/colors-synced"]
    );
    let verdict = edit_source(&cluster, |new| annotate(new, "companion-name", "other"));
    assert_eq!(
        required(&verdict),
        ["delete away/colors-synced", "all away/other", "delete home/colors-synced", "all home/other"]
    );
}

#[test]
fn only_changes_that_affect_companions_require_access() {
    let cluster = mirrored(
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
    type EditCase = (&'static str, fn(&mut Object), bool);
    let edits: [EditCase; 16] = [
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
        ("copied label", |new| drop(new.metadata.labels.insert("example.com/team".into(), "b".into())), true),
        ("copied annotation", |new| annotate(new, "example.com/who", "b"), true),
        ("a keys annotation that copies the same", |new| annotate(new, "keys", "sand,sea=water,sky,"), false),
        (
            "other label",
            |new| drop(new.metadata.labels.insert("example.com/other".into(), "b".into())),
            false,
        ),
        ("other annotation", |new| annotate(new, "example.com/note", "x"), false),
        ("version", |new| new.metadata.resource_version = "77".into(), false),
    ];
    for (what, edit, affects) in edits {
        assert_eq!(!required(&edit_source(&cluster, edit)).is_empty(), affects, "{what}");
    }
}

#[test]
fn owner_reference_on_a_faulty_source_requires_delete_of_its_companions() {
    let mut cluster = mirrored(colors());
    cluster.put(colors().annotate("protect", "everything"));
    let own = |new: &mut Object| new.metadata.owner_references.push(crate::object::OwnerReference::default());
    let expected = ["delete away/colors-synced", "delete home/colors-synced"];
    assert_eq!(required(&edit_source(&cluster, own)), expected);
    assert_eq!(required(&delete(&cluster, "home", "colors")), expected);
}

#[test]
fn accept_from_replaces_access_only_for_namespaces_listed_by_name() {
    let mut cluster = Cluster::with(&["home", "third"]);
    cluster.namespace(namespace("away").annotate("accept-from", "ho*"));
    let access = |targets: &str| {
        required(&create(&cluster, source("home", "c").annotate("target-namespaces", targets)))
    };
    assert_eq!(access("away"), Vec::<String>::new());
    assert_eq!(access("away,third"), ["all third/c-synced"]);
    assert_eq!(access("aw*"), ["all */c-synced"]);
    // Within its own namespace, a source needs access, whatever accept-from says.
    cluster.namespace(namespace("own").annotate("accept-from", "*"));
    assert_eq!(required(&create(&cluster, source("own", "c"))), ["all own/c-synced"]);
    let from_third = source("third", "c").annotate("target-namespaces", "away");
    assert_eq!(required(&create(&cluster, from_third)), ["all away/c-synced"]);
}

#[test]
fn terminating_source_requires_no_further_access() {
    let cluster = mirrored(colors().finalizer("x/y").terminating());
    assert_eq!(edit_source(&cluster, |new| new.metadata.finalizers.clear()), Verdict::ALLOWED);
}

#[test]
fn terminating_companions_require_no_access() {
    let mut cluster = mirrored(colors());
    cluster.put(companion("third", "x").of("home/colors").finalizer("x/y").terminating());
    cluster.put(companion("fourth", "x").of("home/colors"));
    cluster.namespace(namespace("fourth").terminating());
    let expected = ["delete away/colors-synced", "delete home/colors-synced"];
    assert_eq!(required(&delete(&cluster, "home", "colors")), expected);
}

#[test]
fn leftover_companion_that_has_lost_its_label_requires_access() {
    let mut cluster = mirrored(colors());
    cluster.put(colors().annotate("paused", "true"));
    cluster.edit(&configmap("away", "colors-synced"), |object| object.metadata.labels.clear());
    cluster.put(colors().annotate("paused", "true").annotate("target-namespaces", "."));
    let expected = ["delete away/colors-synced", "delete home/colors-synced"];
    assert_eq!(required(&delete(&cluster, "home", "colors")), expected);
}

#[test]
fn many_leftover_companions_require_access_in_all_namespaces() {
    let mut cluster = Cluster::with(&["home"]);
    (0..60).for_each(|n| cluster.namespace(namespace(&format!("team-{n}"))));
    let key = cluster.put(source("home", "colors").annotate("target-namespaces", "team-*"));
    cluster.reconcile(&key);
    cluster.put(source("home", "colors").annotate("target-namespaces", "!"));
    assert_eq!(required(&delete(&cluster, "home", "colors")), ["delete */colors-synced"]);
}

#[test]
fn source_that_needs_consent_requires_access_only_in_its_own_namespace() {
    let mut cluster = Cluster::with(&["home", "third"]);
    cluster.namespace(namespace("away").annotate("accept-from", "home"));
    let draft = |targets: &str| {
        source("home", "c").annotate("consent", "required").annotate("target-namespaces", targets)
    };
    assert_eq!(required(&create(&cluster, draft("*, third"))), Vec::<String>::new());
    assert_eq!(required(&create(&cluster, draft("., *"))), ["all home/c-synced"]);
    // Companions that exist by consent are the source's to take away.
    let key = cluster.put(draft("*"));
    cluster.reconcile(&key);
    assert!(cluster.object(&configmap("away", "c-synced")).is_some());
    assert_eq!(required(&delete(&cluster, "home", "c")), Vec::<String>::new());
    // No `accept-from` replaces the right at home, so patterns that need only consent do not reach it.
    cluster.namespace(namespace("home").annotate("accept-from", "*"));
    assert_eq!(required(&create(&cluster, draft("h*"))), Vec::<String>::new());
    let key =
        cluster.put(source("home", "d").annotate("consent", "required").annotate("target-namespaces", "h*"));
    assert!(cluster.plan(&key).changes.is_empty());
    // Where consent begins or ends, the rights for the other policy are needed.
    let new = source("home", "c").annotate("target-namespaces", "*");
    assert_eq!(required(&replace(&cluster, new)), ["all */c-synced"]);
    cluster.put(source("home", "c").annotate("target-namespaces", "*"));
    assert_eq!(required(&replace(&cluster, draft("*"))), ["delete */c-synced"]);
}

#[test]
fn companions_that_exist_by_consent_require_no_access_even_if_the_source_is_malformed() {
    let mut cluster = Cluster::with(&["home"]);
    (0..60).for_each(|n| cluster.namespace(namespace(&format!("team-{n}")).annotate("accept-from", "home")));
    let draft = || {
        let draft = source("home", "colors").annotate("target-namespaces", "team-*").annotate("keys", "sky");
        draft.annotate("consent", "required")
    };
    let key = cluster.put(draft().data("sky", "blue"));
    cluster.reconcile(&key);
    // Its data makes the source malformed.
    cluster.put(draft().data("sea", "green"));
    assert_eq!(required(&delete(&cluster, "home", "colors")), Vec::<String>::new());
    assert_eq!(required(&replace(&cluster, draft().data("sky", "red"))), Vec::<String>::new());
}

#[test]
fn leftovers_in_namespaces_that_have_not_agreed_require_access_even_if_the_source_needs_consent() {
    let mut cluster = mirrored(colors());
    let paused = || colors().annotate("consent", "required").annotate("paused", "true");
    cluster.put(paused());
    let resumed = replace(&cluster, colors().annotate("consent", "required"));
    assert_eq!(required(&resumed), ["delete away/colors-synced", "all home/colors-synced"]);
}

#[test]
fn companion_may_be_deleted_where_the_namespace_takes_none() {
    for settings in [("paused", "true"), ("keys", "a/b"), ("protect", "all")] {
        let mut cluster = mirrored(colors().annotate("protect", "all"));
        cluster.put(colors().annotate("protect", "all").annotate(settings.0, settings.1));
        assert_eq!(denied(&cluster, &delete(&cluster, "away", "colors-synced")), "delete");
        cluster.namespace(namespace("away").label("exclude", "true"));
        assert_eq!(denied(&cluster, &delete(&cluster, "away", "colors-synced")), "allowed");
    }
}

#[test]
fn deputy_may_reach_namespaces_by_consent() {
    let cluster = Cluster::with(&["home"]);
    let deputy = User { name: "cert-manager".into(), ..User::default() };
    let new = source("home", "c").annotate("target-namespaces", "*").annotate("consent", "required").object;
    let request = Request { user: deputy, ..by_alice("home", Operation::Create { new }) };
    assert_eq!(denied(&cluster, &judge(&cluster, &request)), "allowed");
}

#[test]
fn refused_pattern_names_consent_as_the_way_out_where_it_is_one() {
    let mut cluster = Cluster::with(&["home"]);
    let everywhere = |name: &str| source("home", name).annotate("target-namespaces", "*");
    let hint = |cluster: &Cluster, verdict: &Verdict| match verdict {
        Verdict::CheckAccess { then, .. } => {
            let place = cluster.world.read(|world| then.denied_place(world, None));
            let (user, source) = ("alice".to_owned(), then.key.clone());
            let denial =
                Denial::NoRight { user, verb: "create", name: "c-synced".to_owned(), source, denied: place };
            denial.message(&crate::testing::keys())
        }
        other => panic!("{other:?}"),
    };
    let verdict = create(&cluster, everywhere("c"));
    assert_eq!(
        hint(&cluster, &verdict),
        "alice may not create configmaps c-synced in all namespaces, which a pattern or a selector needs. \
         Ask for that right, or list the namespaces in workshop.io/target-namespaces, \
         or reach only namespaces whose workshop.io/accept-from names home: \
         add the annotation workshop.io/consent=required"
    );
    cluster.put(source("home", "c"));
    let text = hint(&cluster, &replace(&cluster, everywhere("c")));
    assert!(
        text.ends_with("home: kubectl annotate configmap c -n home workshop.io/consent=required"),
        "{text}"
    );
    // The command would delete a companion that exists without consent.
    cluster.put(source("home", "c").annotate("target-namespaces", "third"));
    let text = hint(&cluster, &replace(&cluster, everywhere("c")));
    assert!(text.ends_with("workshop.io/target-namespaces"), "{text}");
    cluster.put(everywhere("c"));
    let text = hint(&cluster, &delete(&cluster, "home", "c"));
    assert!(text.ends_with("workshop.io/target-namespaces"), "{text}");
}

#[test]
fn probable_mistakes_are_warnings() {
    let mut cluster = Cluster::with(&["home"]);
    let created = |cluster: &Cluster, draft: ObjectBuilder| warnings(cluster, &create(cluster, draft));
    for (key, value, warning) in [
        ("tagret-namespaces", "away", "did you mean workshop.io/target-namespaces?"),
        (
            "target-namespaces",
            "nowhere",
            "namespace nowhere does not exist; it gets a companion once it exists",
        ),
        ("target-namespaces", "*-qa", "`*-qa` matches no namespace"),
        ("paused", "true", "home/colors is paused: its companions do not follow until"),
        ("copy-labels", "helm.sh/chart", "workshop.io/copy-labels: `helm.sh/chart` is never copied"),
    ] {
        let warned = created(&cluster, source("home", "colors").annotate(key, value));
        assert!(warned.len() == 1 && warned[0].contains(warning), "{key}: {warned:?}");
    }
    let warned = created(&cluster, object("home", "colors").label("managed", "yes"));
    assert_eq!(
        warned,
        ["the label workshop.io/managed is `yes`, and only `true` makes home/colors a source"]
    );

    // A change of something else repeats no warning about settings.
    cluster.put(source("home", "colors").annotate("tagret-namespaces", "away"));
    assert_eq!(
        warnings(&cluster, &edit_source(&cluster, |new| annotate(new, "example.com/x", "y"))),
        [""; 0]
    );
    let unlabelled = edit_source(&cluster, |new| {
        new.metadata.labels.insert("workshop.io/managed".into(), "false".into());
    });
    assert!(warnings(&cluster, &unlabelled)[0].ends_with("a source: its companions are deleted"));
}

#[test]
fn deputy_needs_accept_from_in_every_target_namespace() {
    let mut cluster = Cluster::with(&["home", "away"]);
    cluster.namespace(namespace("open").annotate("accept-from", "home"));
    for (name, group) in [("cert-manager", "x"), ("argocd", "robots")] {
        let deputy = User { name: name.into(), groups: vec![group.into()], ..User::default() };
        let verdict = |targets: &str| {
            let new = source("home", "c").annotate("target-namespaces", targets).object;
            judge(&cluster, &Request { user: deputy.clone(), ..by_alice("home", Operation::Create { new }) })
        };
        for (targets, expected) in [
            ("open", "allowed"),
            ("away", "deputy"),
            (".", "deputy"),
            ("open,away", "deputy"),
            ("op*", "deputy"),
        ] {
            let verdict = verdict(targets);
            assert_eq!((denied(&cluster, &verdict), required(&verdict)), (expected, vec![]), "{targets}");
        }
    }
}

// --- stamped defaults

fn stamp(targets: &str) -> String {
    format!(r#"{{"target-namespaces":"{targets}"}}"#)
}

/// The webhook that stamps fails open, so anybody may have written what the review sees.
#[test]
fn stamped_targets_require_access_like_those_of_a_person() {
    let plain = || source("home", "colors").data("sky", "blue");
    let cluster = mirrored(plain());
    let new = source("home", "shapes").annotate("defaults", &stamp("away"));
    assert_eq!(required(&create(&cluster, new)), ["all away/shapes-synced"]);
    let verdict = edit_source(&cluster, |new| annotate(new, "defaults", &stamp("away")));
    assert_eq!(required(&verdict), ["all away/colors-synced", "delete home/colors-synced"]);
    let verdict = edit_source(&cluster, |new| annotate(new, "defaults", "x"));
    assert_eq!(denied(&cluster, &verdict), "malformed");
    // A default that arrives or goes with somebody's write is a change of targets.
    let cluster = mirrored(plain().annotate("defaults", &stamp("away")));
    let verdict = edit_source(&cluster, |new| new.metadata.annotations.clear());
    assert_eq!(required(&verdict), ["delete away/colors-synced", "all home/colors-synced"]);
    // Writing the value of a default by hand changes nothing.
    let verdict = edit_source(&cluster, |new| {
        new.metadata.annotations.clear();
        annotate(new, "target-namespaces", "away");
    });
    assert!(required(&verdict).is_empty());
}

#[test]
fn denial_about_default_targets_says_how_to_choose_others() {
    let plain = || source("home", "colors").data("sky", "blue");
    let by_default = |verdict: &Verdict| match verdict {
        Verdict::CheckAccess { then, .. } => then.default_targets,
        other => panic!("{other:?}"),
    };
    let cluster = mirrored(plain().annotate("defaults", &stamp("away")));
    assert!(by_default(&create(&cluster, plain().annotate("defaults", &stamp("away")))));
    assert!(by_default(&edit_source(&cluster, |new| new.metadata.annotations.clear())), "default removed");
    assert!(!by_default(&edit_source(&cluster, |new| annotate(new, "target-namespaces", "third"))));
    assert!(!by_default(&delete(&cluster, "home", "colors")));
    let operation = Operation::Create { new: plain().annotate("defaults", &stamp("away")).object };
    let request = Request { user: user("cert-manager"), ..by_alice("home", operation) };
    let said = message(&cluster, &judge(&cluster, &request));
    assert!(
        said.starts_with(
            "the source names no targets, so those of a default apply \
             (to choose others, set workshop.io/target-namespaces on it): cert-manager writes on behalf"
        ),
        "{said}"
    );
}

/// The author of the update did not choose what is stamped on the source.
#[test]
fn changed_default_does_not_deny_an_update_of_a_faulty_source() {
    let cluster = mirrored(colors().annotate("keys", "a/b"));
    let verdict = edit_source(&cluster, |new| annotate(new, "defaults", r#"{"protect":"all"}"#));
    assert_eq!(denied(&cluster, &verdict), "allowed");
    let verdict = edit_source(&cluster, |new| annotate(new, "keys", "b/c"));
    assert_eq!(denied(&cluster, &verdict), "malformed");
}
