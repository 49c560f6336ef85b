//! Defaults: the namespace's, else the flag's; present values are never changed.

use serde_json::{Value, json};

use super::*;
use crate::{
    guard::request::{Subjects, User},
    object::Kind,
    testing::{OWN_NAMESPACE, ObjectBuilder, keys, namespace, object, source, world},
};

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

/// The annotations of a new object once defaults are added, and the warnings.
fn with_defaults(rules: &Rules, home: ObjectBuilder, draft: ObjectBuilder) -> (Value, Vec<String>) {
    let mut world = world();
    world.apply_namespace(home.meta());
    let annotations = &draft.meta().annotations;
    let mut document = json!({"metadata": {"name": "colors"}});
    if !annotations.is_empty() {
        document["metadata"]["annotations"] = json!(annotations);
    }
    let operation = Operation::Create { new: draft.object };
    let request =
        Request { kind: Kind::ConfigMap, namespace: "home".into(), user: User::default(), operation };
    let (patch, warnings) = add_defaults(rules, &world, &request);
    json_patch::patch(&mut document, &patch).expect("the patch applies");
    (document["metadata"]["annotations"].take(), warnings)
}

#[test]
fn without_namespace_defaults_the_flags_are_added() {
    let rules = Rules { default_targets: "team-*".into(), default_protect: Protect::All, ..rules() };
    let (annotations, _) = with_defaults(&rules, namespace("home"), source("home", "colors"));
    assert_eq!(annotations, json!({"workshop.io/target-namespaces": "team-*", "workshop.io/protect": "all"}));
}

#[test]
fn namespace_defaults_override_the_flags() {
    let home = namespace("home")
        .annotate("default-target-namespaces", "a,b")
        .annotate("default-target-selector", "env=dev")
        .annotate("default-protect", "none");
    let (annotations, warnings) =
        with_defaults(&rules(), home, source("home", "colors").annotate("example.com/x", "1"));
    assert_eq!(
        annotations,
        json!({
            "example.com/x": "1",
            "workshop.io/target-namespaces": "a,b",
            "workshop.io/target-selector": "env=dev",
            "workshop.io/protect": "none",
        })
    );
    assert_eq!(warnings.len(), 2, "{warnings:?}");
}

#[test]
fn default_targets_beyond_the_own_namespace_are_a_warning() {
    let warnings = |key: &str, value: &str| {
        with_defaults(&rules(), namespace("home").annotate(key, value), source("home", "colors")).1
    };
    for own in [".", "home", " ., home,"] {
        assert_eq!(warnings("default-target-namespaces", own), Vec::<String>::new(), "{own}");
    }
    for (key, value) in [("namespaces", "away"), ("namespaces", ".,*"), ("selector", "home")] {
        assert_eq!(
            warnings(&format!("default-target-{key}"), value),
            [format!(
                "workshop.io/target-{key} is set to `{value}`, a default: this source is mirrored to other \
                 namespaces than home"
            )]
        );
    }
    let flag = Rules { default_targets: "*".into(), ..rules() };
    assert_eq!(with_defaults(&flag, namespace("home"), source("home", "colors")).1.len(), 1);
}

#[test]
fn present_values_are_never_changed() {
    let home =
        namespace("home").annotate("default-target-selector", "env=dev").annotate("default-protect", "none");
    for (key, value) in [("target-namespaces", "x"), ("target-selector", "a=b")] {
        let draft = source("home", "colors").annotate(key, value).annotate("protect", "all");
        let before = json!(draft.meta().annotations);
        assert_eq!(with_defaults(&rules(), home.clone(), draft).0, before);
    }
}

#[test]
fn adding_defaults_twice_changes_nothing() {
    let home = namespace("home").annotate("default-target-selector", "env=dev");
    let (once, _) = with_defaults(&rules(), home.clone(), source("home", "colors"));
    let mut again = source("home", "colors");
    again.object.metadata.annotations = serde_json::from_value(once.clone()).expect("annotations");
    assert_eq!(with_defaults(&rules(), home, again).0, once);
}

#[test]
fn invalid_default_is_ignored_with_a_warning() {
    let home =
        namespace("home").annotate("default-target-namespaces", "a*-").annotate("default-protect", "??");
    let (annotations, warnings) = with_defaults(&rules(), home, source("home", "colors"));
    assert_eq!(annotations, json!({"workshop.io/target-namespaces": ".", "workshop.io/protect": "edits"}));
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    assert!(warnings[0].contains("workshop.io/default-target-namespaces"), "{warnings:?}");
}

#[test]
fn nothing_is_added_in_a_namespace_that_is_not_known_yet() {
    let (annotations, warnings) = with_defaults(&rules(), namespace("another"), source("home", "colors"));
    assert_eq!(annotations, Value::Null);
    assert!(matches!(&*warnings, [text] if text.contains("home is not known yet")), "{warnings:?}");
    let complete = source("home", "colors").annotate("target-namespaces", "x").annotate("protect", "all");
    assert!(with_defaults(&rules(), namespace("another"), complete).1.is_empty());
}

#[test]
fn non_sources_and_terminating_sources_get_no_defaults() {
    for draft in [
        object("home", "colors"),
        source("home", "colors").terminating(),
        source("home", "colors").label("companion", "true"),
        source("home", "colors").of("home/other"),
        object("home", "colors").label("managed", "false"),
    ] {
        let before = draft.meta().annotations.clone();
        let (after, _) = with_defaults(&rules(), namespace("home"), draft);
        assert_eq!(after, if before.is_empty() { Value::Null } else { json!(before) });
    }
}
