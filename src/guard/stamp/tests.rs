//! Defaults: the namespace's, else the flag's; present values are never touched.

use serde_json::{Value, json};

use super::*;
use crate::{
    guard::review::{People, User},
    object::Kind,
    testing::{OWN_NAMESPACE, ObjectBuilder, keys, namespace, object, source, world},
};

fn rules() -> Rules {
    Rules {
        keys: keys(),
        own_namespace: OWN_NAMESPACE.to_owned(),
        exempt: People::default(),
        deputies: People::default(),
        default_targets: ".".to_owned(),
        default_protect: Protect::Edits,
    }
}

/// Stamps an object as it would be created in a namespace, and returns its annotations afterwards.
fn stamped(rules: &Rules, home: ObjectBuilder, draft: ObjectBuilder) -> (Value, Vec<String>) {
    let mut world = world();
    world.apply_namespace(home.meta());
    let annotations = &draft.meta().annotations;
    let mut document = json!({"metadata": {"name": "colors"}});
    if !annotations.is_empty() {
        document["metadata"]["annotations"] = json!(annotations);
    }
    let change = Change::Create { new: draft.object };
    let request = Request { kind: Kind::ConfigMap, namespace: "home".into(), user: User::default(), change };
    let (patch, warnings) = stamp(rules, &world, &request);
    json_patch::patch(&mut document, &patch).expect("it fits");
    (document["metadata"]["annotations"].take(), warnings)
}

#[test]
fn without_any_default_the_flags_are_stamped() {
    let rules = Rules { default_targets: "team-*".into(), default_protect: Protect::All, ..rules() };
    let (annotations, _) = stamped(&rules, namespace("home"), source("home", "colors"));
    assert_eq!(annotations, json!({"workshop.io/target-namespaces": "team-*", "workshop.io/protect": "all"}));
}

#[test]
fn a_namespaces_defaults_come_before_the_flags() {
    let home = namespace("home")
        .annotate("default-target-namespaces", "a,b")
        .annotate("default-target-selector", "env=dev")
        .annotate("default-protect", "none");
    let (annotations, warnings) =
        stamped(&rules(), home, source("home", "colors").annotate("example.com/x", "1"));
    assert_eq!(
        annotations,
        json!({
            "example.com/x": "1",
            "workshop.io/target-namespaces": "a,b",
            "workshop.io/target-selector": "env=dev",
            "workshop.io/protect": "none",
        })
    );
    assert!(warnings.is_empty());
}

#[test]
fn present_values_are_never_touched() {
    let home =
        namespace("home").annotate("default-target-selector", "env=dev").annotate("default-protect", "none");
    for (key, value) in [("target-namespaces", "x"), ("target-selector", "a=b")] {
        let draft = source("home", "colors").annotate(key, value).annotate("protect", "all");
        let before = json!(draft.meta().annotations);
        assert_eq!(stamped(&rules(), home.clone(), draft).0, before);
    }
}

#[test]
fn stamping_twice_is_stamping_once() {
    let home = namespace("home").annotate("default-target-selector", "env=dev");
    let (once, _) = stamped(&rules(), home.clone(), source("home", "colors"));
    let mut again = source("home", "colors");
    again.object.metadata.annotations = serde_json::from_value(once.clone()).expect("annotations");
    assert_eq!(stamped(&rules(), home, again).0, once);
}

#[test]
fn a_default_that_cannot_be_used_is_passed_over_with_a_warning() {
    let home =
        namespace("home").annotate("default-target-namespaces", "a*b").annotate("default-protect", "??");
    let (annotations, warnings) = stamped(&rules(), home, source("home", "colors"));
    assert_eq!(annotations, json!({"workshop.io/target-namespaces": ".", "workshop.io/protect": "edits"}));
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    assert!(warnings[0].contains("workshop.io/default-target-namespaces"), "{warnings:?}");
}

#[test]
fn nothing_is_stamped_in_a_namespace_that_is_not_known_yet() {
    let (annotations, warnings) = stamped(&rules(), namespace("another"), source("home", "colors"));
    assert_eq!(annotations, Value::Null);
    assert!(matches!(&*warnings, [text] if text.contains("home is not known yet")), "{warnings:?}");
    let complete = source("home", "colors").annotate("target-namespaces", "x").annotate("protect", "all");
    assert!(stamped(&rules(), namespace("another"), complete).1.is_empty());
}

#[test]
fn what_is_no_source_or_goes_is_left_alone() {
    for draft in [
        object("home", "colors"),
        source("home", "colors").terminating(),
        source("home", "colors").label("companion", "true"),
        source("home", "colors").of("home/other"),
        object("home", "colors").label("managed", "false"),
    ] {
        let before = draft.meta().annotations.clone();
        let (after, _) = stamped(&rules(), namespace("home"), draft);
        assert_eq!(after, if before.is_empty() { Value::Null } else { json!(before) });
    }
}
