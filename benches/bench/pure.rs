//! What the pure parts cost: a plan, a review, and what is read of an object.

use std::sync::Arc;

use divan::{Bencher, black_box};
use serde_json::{Value, json};

use lockstep::webhook::wire;
use lockstep_core::{
    admission::{
        admission_request::Subjects,
        review::{Review, Rules},
    },
    keys::Keys,
    object::{Kind, Meta, Object, ObjectKey},
    plan::plan,
    policy::{Protect, pattern::Patterns, selector},
    world::{NamespaceRules, ObservedCompanion, ObservedSource, World},
    writes::write_request::{self, WriteContent},
};

pub(crate) fn run() {
    divan::Divan::default().run_benches();
}

fn keys() -> Arc<Keys> {
    Arc::new(Keys::new("workshop.io", "-synced"))
}

fn namespace_rules() -> NamespaceRules {
    NamespaceRules { own_namespace: "lockstep-system".to_owned(), excluded: Patterns::default() }
}

/// A source of 1 KiB that wants a companion in all namespaces of its team.
fn source(sky: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "namespace": "home", "name": "colors", "resourceVersion": "1",
            "uid": "0f8fad5b-d9cb-469f-a165-70867728950e",
            "labels": {"workshop.io/managed": "true"},
            "annotations": {"workshop.io/target-namespaces": "team-*"},
        },
        "data": {"sky": sky, "text": "x".repeat(1000)},
    })
}

fn read(object: Value) -> Object {
    serde_json::from_value(object).expect("an object")
}

/// A world in which a source has so many companions, and all are right.
fn world(companions: usize) -> (World, ObjectKey) {
    let (keys, rules) = (keys(), namespace_rules());
    let mut world = World::new(keys.clone(), rules.clone(), 1 << 20);
    let namespaces = (0..companions).map(|n| format!("team-{n}")).chain(["home".to_owned()]);
    for (n, name) in namespaces.enumerate() {
        let meta: Meta =
            serde_json::from_value(json!({"name": name, "uid": format!("n-{n}")})).expect("metadata");
        world.apply_namespace(&meta);
    }
    world.apply_source(ObservedSource::read(&keys, &rules, Kind::ConfigMap, read(source("blue"))));
    let key = ObjectKey::new(Kind::ConfigMap, "home", "colors");
    let known = world.shared_source(&key).expect("the source");
    let payload = world.payload(&known).expect("its content");
    let content = WriteContent::new(&keys, known, payload).expect("a well-formed source");
    for (n, change) in plan(&world, &key, None).changes.into_iter().enumerate() {
        let body = write_request::create(&content, &change.at);
        let mut body: Value = serde_json::from_slice(&body).expect("JSON");
        body["metadata"]["uid"] = format!("c-{n}").into();
        body["metadata"]["resourceVersion"] = (n + 2).to_string().into();
        world.apply_companion(ObservedCompanion::read(&keys, Kind::ConfigMap, read(body)));
    }
    assert!(plan(&world, &key, None).changes.is_empty(), "all companions are right");
    (world, key)
}

fn review(old: &Value, new: &Value) -> Vec<u8> {
    let review = json!({
        "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
        "request": {
            "uid": "705ab4f5-6393-11e8-b7cc-42010a800002",
            "resource": {"group": "", "version": "v1", "resource": "configmaps"},
            "namespace": "home", "name": "colors", "operation": "UPDATE",
            "userInfo": {"username": "alice", "groups": ["system:authenticated"]},
            "object": new, "oldObject": old,
        },
    });
    serde_json::to_vec(&review).expect("JSON")
}

/// A resync: nothing is to be done.
#[divan::bench(args = [1, 10, 100, 1000])]
fn plan_of_companions_that_are_right(bencher: Bencher<'_, '_>, companions: usize) {
    let (world, key) = world(companions);
    bencher.bench_local(|| plan(black_box(&world), &key, None));
}

#[divan::bench]
fn read_a_source(bencher: Bencher<'_, '_>) {
    let (keys, rules) = (keys(), namespace_rules());
    let text = serde_json::to_vec(&source("blue")).expect("JSON");
    bencher.bench_local(|| {
        let object = serde_json::from_slice(black_box(&text)).expect("an object");
        ObservedSource::read(&keys, &rules, Kind::ConfigMap, object)
    });
}

/// A change of the content of a source: its body, and the body with the verdict and the answer.
#[divan::bench]
fn parse_a_review(bencher: Bencher<'_, '_>) {
    let body = review(&source("blue"), &source("red"));
    bencher.bench_local(|| wire::parse(black_box(&body)).is_ok());
}

#[divan::bench]
fn answer_a_review(bencher: Bencher<'_, '_>) {
    let body = review(&source("blue"), &source("red"));
    let (world, _) = world(10);
    let rules = Rules {
        keys: keys(),
        own_namespace: "lockstep-system".to_owned(),
        exempt: Subjects::default(),
        deputies: Subjects::default(),
        default_targets: ".".to_owned(),
        default_protect: Protect::default(),
    };
    bencher.bench_local(|| {
        let (uid, request) = wire::parse(black_box(&body)).expect("a review");
        let verdict = Review::read(&rules, &request).map(|review| review.judge(&world));
        (verdict, wire::answer(&uid, Ok(Vec::new()), None))
    });
}

#[divan::bench]
fn parse_a_selector() -> bool {
    selector::parse(black_box("team in (a, b), tier!=test, !hidden")).is_ok()
}
