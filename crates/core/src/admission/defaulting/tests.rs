//! Defaults: the namespace's, else the flag's, in one annotation that says nothing else.

use serde_json::{Value, json};

use super::*;
use crate::{
    admission::admission_request::{Operation, Subjects, User},
    object::Kind,
    testing::{OWN_NAMESPACE, ObjectBuilder, keys, namespace, object, source, world},
};

const DEFAULTS: &str = "workshop.io/defaults";

fn rules() -> Rules {
    Rules {
        keys: keys(),
        own_namespace: OWN_NAMESPACE.to_owned(),
        exempt: Subjects::default(),
        deputies: Subjects::default(),
        default_targets: ".".to_owned(),
        default_protect: Protect::Edits,
    }
}

/// The annotations of an object once it is stamped, and the warnings.
fn stamped(rules: &Rules, home: ObjectBuilder, user: &str, operation: Operation) -> (Value, Vec<String>) {
    let mut world = world();
    world.apply_namespace(home.meta());
    let (Operation::Create { new } | Operation::Update { new, .. }) = &operation else { unreachable!() };
    let annotations = &new.metadata.annotations;
    let mut document = json!({"metadata": {"name": "colors"}});
    if !annotations.is_empty() {
        document["metadata"]["annotations"] = json!(annotations);
    }
    let user = User { name: user.to_owned(), ..User::default() };
    let request =
        Request { kind: Kind::ConfigMap, namespace: "home".into(), user, operation, dry_run: false };
    let (patch, warnings) = stamp_defaults(rules, &world, &request);
    json_patch::patch(&mut document, &patch).expect("the patch applies");
    (document["metadata"]["annotations"].take(), warnings)
}

fn created(rules: &Rules, home: ObjectBuilder, draft: ObjectBuilder) -> (Value, Vec<String>) {
    stamped(rules, home, "alice", Operation::Create { new: draft.object })
}

fn updated(home: &ObjectBuilder, old: ObjectBuilder, new: ObjectBuilder) -> (Value, Vec<String>) {
    let operation = Operation::Update { old: old.object, new: new.object };
    stamped(&rules(), home.clone(), "alice", operation)
}

fn colors() -> ObjectBuilder {
    source("home", "colors")
}

#[test]
fn without_namespace_defaults_the_flags_are_stamped() {
    let rules = Rules { default_targets: "team-*".into(), default_protect: Protect::All, ..rules() };
    let (annotations, _) = created(&rules, namespace("home"), colors());
    assert_eq!(annotations, json!({DEFAULTS: r#"{"target-namespaces":"team-*","protect":"all"}"#}));
}

#[test]
fn namespace_defaults_override_the_flags() {
    let home = namespace("home")
        .annotate("default-target-namespaces", "a,b")
        .annotate("default-target-selector", "env=dev")
        .annotate("default-protect", "none");
    let (annotations, warnings) = created(&rules(), home, colors().annotate("example.com/x", "1"));
    let defaults = r#"{"target-namespaces":"a,b","target-selector":"env=dev","protect":"none"}"#;
    assert_eq!(annotations, json!({"example.com/x": "1", DEFAULTS: defaults}));
    assert_eq!(warnings.len(), 2, "{warnings:?}");

    let flags = Rules { default_targets: "*".into(), default_protect: Protect::All, ..rules() };
    let built_in =
        namespace("home").annotate("default-target-namespaces", ".").annotate("default-protect", "edits");
    assert_eq!(created(&flags, built_in, colors()).0, Value::Null);
}

#[test]
fn built_in_defaults_need_no_annotation() {
    assert_eq!(created(&rules(), namespace("home"), colors()), (Value::Null, Vec::new()));
    for own in [".", "home", " ., home,"] {
        let home = namespace("home").annotate("default-target-namespaces", own);
        assert_eq!(created(&rules(), home, colors()), (Value::Null, Vec::new()), "{own}");
    }
    // With a selector, `.` is not what is built in.
    let home =
        namespace("home").annotate("default-target-namespaces", ".").annotate("default-target-selector", "a");
    let (annotations, _) = created(&rules(), home, colors());
    assert_eq!(annotations, json!({DEFAULTS: r#"{"target-namespaces":".","target-selector":"a"}"#}));
}

#[test]
fn default_targets_beyond_the_own_namespace_are_a_warning() {
    let warnings =
        |key: &str, value: &str| created(&rules(), namespace("home").annotate(key, value), colors()).1;
    for (key, value) in [("namespaces", "away"), ("namespaces", ".,*"), ("selector", "home")] {
        assert_eq!(
            warnings(&format!("default-target-{key}"), value),
            [format!(
                "workshop.io/target-{key} is `{value}`, a default: this source is mirrored to other namespaces than \
                 home"
            )]
        );
    }
    let flag = Rules { default_targets: "*".into(), ..rules() };
    assert_eq!(created(&flag, namespace("home"), colors()).1.len(), 1);
}

#[test]
fn warning_about_default_targets_is_given_when_they_change() {
    let home = namespace("home").annotate("default-target-namespaces", "away");
    let targets = |text: &str| colors().annotate("defaults", text);
    let (same, other) = (r#"{"target-namespaces":"away"}"#, r#"{"target-namespaces":"third"}"#);
    for (old, warnings) in [
        (targets(same), 0),
        (targets(r#"{"target-namespaces":"away","protect":"all"}"#), 0),
        (targets(other), 1),
        (targets("x"), 1),
        (colors().annotate("target-namespaces", "away"), 1),
        (colors().label("managed", "false").annotate("defaults", same), 1),
    ] {
        let before = format!("{:?}", old.meta().annotations);
        assert_eq!(updated(&home, old, targets(other)).1.len(), warnings, "{before}");
    }
    assert!(updated(&namespace("home"), targets(same), targets(same)).1.is_empty(), "default removed");
}

#[test]
fn what_a_person_sets_is_never_changed_and_gets_no_default() {
    let home =
        namespace("home").annotate("default-target-selector", "env=dev").annotate("default-protect", "none");
    for (key, value) in [("target-namespaces", "x"), ("target-selector", "a=b")] {
        let draft = colors().annotate(key, value).annotate("protect", "all");
        let before = json!(draft.meta().annotations);
        assert_eq!(created(&rules(), home.clone(), draft.clone()).0, before);
        let stale = draft.annotate("defaults", r#"{"target-selector":"env=dev","protect":"none"}"#);
        assert_eq!(created(&rules(), home.clone(), stale).0, before, "removed");
    }
    let (annotations, warnings) =
        created(&rules(), home.clone(), colors().annotate("target-namespaces", "x"));
    assert_eq!(annotations[DEFAULTS], r#"{"protect":"none"}"#);
    assert!(warnings.is_empty(), "{warnings:?}");
    let (annotations, _) = created(&rules(), home, colors().annotate("protect", "edits"));
    assert_eq!(annotations[DEFAULTS], r#"{"target-selector":"env=dev"}"#);
}

#[test]
fn stamped_defaults_follow_the_namespace_on_every_write() {
    let old = r#"{"target-namespaces":"old","protect":"all"}"#;
    let before = || colors().annotate("defaults", old);
    let home = namespace("home").annotate("default-target-namespaces", "new");
    let (annotations, _) = updated(&home, before(), before());
    assert_eq!(annotations, json!({DEFAULTS: r#"{"target-namespaces":"new"}"#}));
    let (annotations, _) = updated(&namespace("home"), before(), before());
    assert_eq!(annotations, json!({}), "no default is left");
    // A manifest without the annotation, as `kubectl replace` sends it.
    let (annotations, warnings) = updated(&home, colors().annotate("defaults", old), colors());
    assert_eq!(annotations, json!({DEFAULTS: r#"{"target-namespaces":"new"}"#}));
    assert_eq!(warnings.len(), 1);
}

#[test]
fn what_somebody_writes_there_is_recomputed_away() {
    let home = namespace("home").annotate("default-protect", "all");
    for text in ["", "x", r#"{"target-namespaces":"*"}"#, r#"{ "protect": "all" }"#] {
        let draft = || colors().annotate("defaults", text);
        assert_eq!(created(&rules(), home.clone(), draft()).0, json!({DEFAULTS: r#"{"protect":"all"}"#}));
        assert_eq!(updated(&home, colors(), draft()).0, json!({DEFAULTS: r#"{"protect":"all"}"#}));
        assert_eq!(created(&rules(), namespace("home"), draft()).0, json!({}));
    }
}

#[test]
fn stamping_twice_changes_nothing() {
    let home = namespace("home").annotate("default-target-selector", "env=dev");
    let (once, _) = created(&rules(), home.clone(), colors());
    let again = || {
        let mut again = colors();
        again.object.metadata.annotations = serde_json::from_value(once.clone()).expect("annotations");
        again
    };
    assert_eq!(updated(&home, again(), again()), (once.clone(), Vec::new()));
    let mut world = world();
    world.apply_namespace(home.meta());
    let operation = Operation::Update { old: again().object, new: again().object };
    let user = User::default();
    let request =
        Request { kind: Kind::ConfigMap, namespace: "home".into(), user, operation, dry_run: false };
    assert!(stamp_defaults(&rules(), &world, &request).0.0.is_empty(), "no patch");
}

/// It has no rights on companions, so the review would refuse the changed default, and the migration would never end.
#[test]
fn storage_migration_does_not_bring_a_changed_default() {
    let home = namespace("home").annotate("default-target-namespaces", "away");
    let write = |user: &str, new: ObjectBuilder| {
        let operation = Operation::Update { old: colors().object, new: new.object };
        stamped(&rules(), home.clone(), user, operation).0
    };
    let brought = json!({DEFAULTS: r#"{"target-namespaces":"away"}"#});
    assert_eq!(write(STORAGE_MIGRATOR, colors()), Value::Null);
    assert_eq!(write(STORAGE_MIGRATOR, colors().data("sky", "red")), brought);
    assert_eq!(write("alice", colors()), brought, "server-side apply of an unchanged manifest");
}

#[test]
fn invalid_default_is_ignored_with_a_warning() {
    let home =
        namespace("home").annotate("default-target-namespaces", "a*-").annotate("default-protect", "??");
    let flags = Rules { default_targets: "b".into(), default_protect: Protect::All, ..rules() };
    let (annotations, warnings) = created(&flags, home, colors());
    assert_eq!(annotations, json!({DEFAULTS: r#"{"target-namespaces":"b","protect":"all"}"#}));
    assert_eq!(warnings.len(), 3, "{warnings:?}");
    assert!(warnings[0].contains("workshop.io/default-target-namespaces"), "{warnings:?}");
    // Only exclusions: valid with a selector, and not without.
    let home = namespace("home").annotate("default-target-namespaces", "!away");
    let (annotations, warnings) = created(&rules(), home.clone(), colors());
    assert_eq!(annotations, Value::Null);
    assert!(matches!(&*warnings, [text] if text.contains("only exclusions")), "{warnings:?}");
    let (annotations, _) = created(&rules(), home.annotate("default-target-selector", "env"), colors());
    assert_eq!(annotations[DEFAULTS], r#"{"target-namespaces":"!away","target-selector":"env"}"#);
}

#[test]
fn stamp_is_left_alone_in_a_namespace_that_is_not_known_yet() {
    for draft in [colors(), colors().annotate("defaults", r#"{"protect":"all"}"#)] {
        let before = draft.meta().annotations.clone();
        let (annotations, warnings) = created(&rules(), namespace("another"), draft);
        assert_eq!(annotations, if before.is_empty() { Value::Null } else { json!(before) });
        assert!(matches!(&*warnings, [text] if text.contains("home is not known yet")), "{warnings:?}");
    }
    let complete = colors().annotate("target-namespaces", "x").annotate("protect", "all");
    assert!(created(&rules(), namespace("another"), complete).1.is_empty());
}

#[test]
fn non_sources_and_terminating_sources_are_not_stamped() {
    let home = namespace("home").annotate("default-protect", "all");
    for draft in [
        object("home", "colors"),
        colors().terminating(),
        colors().label("companion", "true"),
        colors().of("home/other"),
        object("home", "colors").label("managed", "false"),
    ] {
        let before = draft.meta().annotations.clone();
        let (after, _) = created(&rules(), home.clone(), draft);
        assert_eq!(after, if before.is_empty() { Value::Null } else { json!(before) });
    }
}
