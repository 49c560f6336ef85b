//! Whatever the API server accepts, the webhook can read: random objects that are odd, but legal.

use fastrand::Rng;
use serde_json::{Map, Value, json};

use crate::harness::{Cluster, configmap, eventually, secret};

const OBJECTS: usize = 150;
/// The API server stores this time as none, and sends it as null.
const ZERO_TIME: &str = "0001-01-01T00:00:00Z";
/// The API server sends it with the year 10000.
const LATE_TIME: &str = "9999-12-31T23:59:59-23:59";

/// Values that the API server accepts where it expects a text, and some that it does not.
fn text(rng: &mut Rng) -> Value {
    let texts = ["", "plain", "\u{1}<>&\u{2028}\"\\", "ünï\u{10ffff}", "a\nb", "null", " "];
    match rng.u32(..6) {
        0 => Value::Null,
        1 => json!("x".repeat(rng.usize(..2000))),
        _ => json!(rng.choice(texts)),
    }
}

fn base64(rng: &mut Rng) -> Value {
    match rng.u32(..5) {
        0 => Value::Null,
        1 => json!(""),
        2 => json!("//79"),
        3 => json!("AAE\nCAw=="),
        _ => json!("aGk="),
    }
}

/// A map with these values; or null, or empty.
fn map(rng: &mut Rng, keys: &[String], value: fn(&mut Rng) -> Value) -> Value {
    if rng.u32(..6) == 0 {
        return Value::Null;
    }
    let mut map = Map::new();
    for key in keys {
        if rng.bool() {
            map.insert(key.clone(), value(rng));
        }
    }
    Value::Object(map)
}

fn one_of(rng: &mut Rng, values: &[Value]) -> Value {
    rng.choice(values).cloned().unwrap_or_default()
}

/// A source, of either kind.
fn odd_object(cluster: &Cluster, rng: &mut Rng, name: &str, is_secret: bool) -> Value {
    let texts = |names: &[&str]| -> Vec<String> { names.iter().map(|name| (*name).to_owned()).collect() };
    let label_value: fn(&mut Rng) -> Value =
        |rng| one_of(rng, &[Value::Null, json!(""), json!("a"), json!("A.b-c_d")]);
    let mut labels = map(rng, &texts(&["team", "example.com/x", "a"]), label_value);
    if labels.is_null() {
        labels = json!({});
    }
    labels[cluster.key("managed")] = "true".into();
    let owner = json!([{"apiVersion": "v1", "kind": "ConfigMap", "name": "x", "uid": "no-such-uid", "controller": null}]);
    let managed = |time: &str, fields: Value| {
        json!([{"manager": null, "operation": "Update", "apiVersion": "v1",
        "time": time, "fieldsType": "FieldsV1", "fieldsV1": {"f:metadata": fields}}])
    };
    let deep = (0..300).fold(json!({}), |inner, _| json!({"f:a": inner}));
    let managed = [managed(ZERO_TIME, json!({"f:labels": {}})), managed(LATE_TIME, deep)];
    let mut metadata = json!({"name": name, "labels": labels});
    let optional = [
        (
            "annotations",
            map(
                rng,
                &texts(&["note", "example.com/y", "kubectl.kubernetes.io/last-applied-configuration"]),
                text,
            ),
        ),
        ("finalizers", one_of(rng, &[Value::Null, json!([])])),
        ("ownerReferences", one_of(rng, &[Value::Null, json!([]), owner])),
        ("managedFields", one_of(rng, &[Value::Null, json!([]), managed[0].clone(), managed[1].clone()])),
        ("creationTimestamp", one_of(rng, &[Value::Null, json!("2020-01-01T00:00:00Z")])),
        ("deletionTimestamp", one_of(rng, &[Value::Null])),
        ("uid", one_of(rng, &[Value::Null, json!("")])),
        ("resourceVersion", one_of(rng, &[Value::Null, json!("")])),
        ("generateName", one_of(rng, &[Value::Null, json!("gen-")])),
        ("selfLink", one_of(rng, &[Value::Null, json!("/x")])),
        ("generation", one_of(rng, &[Value::Null, json!(3)])),
    ];
    for (field, value) in optional {
        if rng.bool() {
            metadata[field] = value;
        }
    }
    let mut object = json!({"metadata": metadata});
    let keys = texts(&["a", "b.c", "_D-e", "password", "username"]);
    let optional = if is_secret {
        vec![
            ("data", map(rng, &keys, base64)),
            ("stringData", map(rng, &keys, text)),
            (
                "type",
                one_of(
                    rng,
                    &[
                        Value::Null,
                        json!(""),
                        json!("Opaque"),
                        json!("example.com/own"),
                        json!("kubernetes.io/basic-auth"),
                    ],
                ),
            ),
        ]
    } else {
        vec![("data", map(rng, &keys, text)), ("binaryData", map(rng, &texts(&["bin", "raw.x"]), base64))]
    };
    for (field, value) in
        optional.into_iter().chain([("immutable", one_of(rng, &[Value::Null, json!(false)]))])
    {
        if rng.u32(..4) > 0 {
            object[field] = value;
        }
    }
    object
}

/// Creates an object and changes it in several ways. None of these requests may fail because of the webhook.
async fn write(cluster: &Cluster, rng: &mut Rng, home: &str, seed: u64, number: usize) {
    let is_secret = rng.bool();
    let name = format!("odd-{number}");
    let collection =
        format!("/api/v1/namespaces/{home}/{}", if is_secret { "secrets" } else { "configmaps" });
    let path = format!("{collection}/{name}");
    let object = odd_object(cluster, rng, &name, is_secret);
    let next = odd_object(cluster, rng, &name, is_secret);
    let mut applied = next.clone();
    applied["apiVersion"] = "v1".into();
    applied["kind"] = if is_secret { "Secret".into() } else { "ConfigMap".into() };
    let apply = format!("{path}?fieldManager=odd&force=true");
    let requests = [
        ("POST", &collection, Some(("application/json", &object))),
        ("PUT", &path, Some(("application/json", &next))),
        ("PATCH", &path, Some(("application/merge-patch+json", &object))),
        ("PATCH", &path, Some(("application/strategic-merge-patch+json", &next))),
        ("PATCH", &apply, Some(("application/apply-patch+yaml", &applied))),
        ("DELETE", &path, None),
    ];
    for (method, path, body) in requests {
        let (kind, bytes) = body
            .map_or(("application/json", Vec::new()), |(kind, body)| (kind, body.to_string().into_bytes()));
        let outcome = cluster.try_text(method, path, kind, bytes).await;
        let shown =
            || format!("seed {seed}: {method} {path} {}", body.map_or(&Value::Null, |(_, body)| body));
        assert_no_webhook_failed(&outcome, shown);
    }
}

/// The API server answers 500 if a webhook fails, and also for some objects that it has stored itself and cannot read.
fn assert_no_webhook_failed(outcome: &Result<String, (u16, String)>, shown: impl Fn() -> String) {
    if let Err((code, message)) = outcome {
        assert!(*code != 500 || !message.contains("webhook"), "{message}\n{}", shown());
    }
}

#[tokio::test]
async fn odd_but_legal_objects_never_fail_the_webhook() {
    let cluster = Cluster::new("odd").await;
    let home = cluster.namespace("home").await;
    let (_installed, _lockstep) = cluster.install_and_start(&[]).await;
    let seed = std::env::var("LOCKSTEP_FUZZ_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| fastrand::u64(..));
    let mut rng = Rng::with_seed(seed);
    for number in 0..OBJECTS {
        write(&cluster, &mut rng, &home, seed, number).await;
    }
}

/// What JSON allows, and what it does not: the API server takes some of these texts and refuses others.
const ODD_JSON: &[&str] = &[
    "null",
    "1e999",
    "-0",
    "18446744073709551616",
    "\"\\ud800\"",
    "\"\\u0000\"",
    "\"\\udc00\\ud800\"",
    "\"\u{202e}\u{feff}\u{10ffff}\"",
    "\u{feff}",
    "\"immutable\":false,",
    "\"data\":null,",
    "\"data\":{},\"data\":",
    "\"metadata\":{},",
    "\"unknown\":[[[[1.5e300]]]],",
    "{}",
    "[]",
    "\"a\":null,",
];

/// A JSON text with a few odd tokens, and a field that is nested deeply.
fn odd_text(object: &Value, rng: &mut Rng) -> String {
    let mut text = object.to_string();
    for _ in 0..rng.usize(..4) {
        let places: Vec<usize> =
            text.char_indices().filter(|(_, c)| "{}[]:,\"".contains(*c)).map(|(at, _)| at).collect();
        let at = places[rng.usize(..places.len())] + usize::from(rng.bool());
        text.insert_str(at, rng.choice(ODD_JSON).copied().unwrap_or_default());
    }
    if rng.u32(..10) == 0 {
        let depth = rng.usize(..5000);
        text = text.replacen('{', &format!("{{\"deep\":{}1{},", "[".repeat(depth), "]".repeat(depth)), 1);
    }
    text
}

#[tokio::test]
async fn odd_json_that_the_api_server_takes_never_fails_the_webhook() {
    let cluster = Cluster::new("odd-json").await;
    let home = cluster.namespace("home").await;
    let (_installed, _lockstep) = cluster.install_and_start(&[]).await;
    let seed = std::env::var("LOCKSTEP_FUZZ_SEED").ok().and_then(|seed| seed.parse().ok());
    let seed = seed.unwrap_or_else(|| fastrand::u64(..));
    let mut rng = Rng::with_seed(seed);
    let mut taken = 0;
    for number in 0..2 * OBJECTS {
        let is_secret = rng.bool();
        let kind = if is_secret { "secrets" } else { "configmaps" };
        let object = odd_object(&cluster, &mut rng, &format!("text-{number}"), is_secret);
        let text = odd_text(&object, &mut rng);
        let path = format!("/api/v1/namespaces/{home}/{kind}");
        let outcome = cluster.try_text("POST", &path, "application/json", text.clone().into_bytes()).await;
        assert_no_webhook_failed(&outcome, || format!("seed {seed}: {text:.4000}"));
        taken += usize::from(outcome.is_ok());
    }
    assert!((1..2 * OBJECTS).contains(&taken), "seed {seed}: {taken} are taken");
}

#[tokio::test]
async fn zero_time_in_managed_fields_ends_no_watch_and_no_review() {
    let cluster = Cluster::new("zero").await;
    let home = cluster.namespace("home").await;
    let managed = json!([{"manager": "odd", "operation": "Update", "apiVersion": "v1", "time": ZERO_TIME,
        "fieldsType": "FieldsV1", "fieldsV1": {"f:metadata": {"f:annotations": {"f:odd": {}}}}}]);
    // In this order: the manager that changes a field becomes its only owner.
    let patches = [
        json!({"metadata": {"annotations": {"odd": "yes"}}}),
        json!({"metadata": {"managedFields": managed}}),
    ];
    let sources = [
        cluster.source(&home, "colors").with("/data", json!({"sky": "blue"})),
        cluster.source(&home, "login").secret("Opaque", json!({"user": "YWxpY2U="})),
    ];
    let paths = [format!("/api/v1/namespaces/{home}"), configmap(&home, "colors"), secret(&home, "login")];
    for source in sources {
        source.create().await;
    }
    let patch = async |path: &String| {
        for patch in &patches {
            let outcome =
                cluster.try_request("PATCH", path, Some(("application/merge-patch+json", patch))).await;
            assert!(outcome.is_ok(), "{path}: {outcome:?}");
        }
        let stored = cluster.get(path).await.expect("the object");
        let times =
            stored["metadata"]["managedFields"].as_array().unwrap().iter().map(|entry| &entry["time"]);
        assert!(times.into_iter().any(Value::is_null), "{path}: {stored}");
    };
    for path in &paths {
        patch(path).await;
    }
    let (_installed, _lockstep) = cluster.install_and_start(&[]).await;
    cluster.wait_data(&home, "colors-synced", json!({"sky": "blue"})).await;
    let companion = secret(&home, "login-synced");
    eventually("the companion", || async { cluster.get(&companion).await }).await;
    // The watches and the webhook see it, too.
    for path in &paths {
        patch(path).await;
    }
    let change = json!({"data": {"sky": "grey"}});
    let outcome =
        cluster.try_request("PATCH", &paths[1], Some(("application/merge-patch+json", &change))).await;
    assert!(outcome.is_ok(), "{outcome:?}");
    cluster.wait_data(&home, "colors-synced", json!({"sky": "grey"})).await;
}

#[tokio::test]
async fn null_value_in_a_secret_is_mirrored_as_the_api_server_stores_it() {
    let cluster = Cluster::new("null").await;
    let home = cluster.namespace("home").await;
    let (_installed, _lockstep) = cluster.install_and_start(&[]).await;
    let source =
        cluster.source(&home, "login").secret("Opaque", json!({"user": "YWxpY2U=", "password": null}));
    let stored = source.create().await;
    assert_eq!(stored["data"]["user"], "YWxpY2U=");
    let copy =
        eventually("the companion", || async { cluster.get(&secret(&home, "login-synced")).await }).await;
    let read = cluster.get(&secret(&home, "login")).await.expect("the source");
    assert_eq!(copy["data"], read["data"]);
    // A null in a patch removes a key; in an update it is a value.
    let mut update = read.clone();
    update["data"]["user"] = Value::Null;
    let path = secret(&home, "login");
    let outcome = cluster.try_request("PUT", &path, Some(("application/json", &update))).await;
    assert!(outcome.is_ok(), "{outcome:?}");
    eventually("the companion follows", || async {
        let (source, copy) = (cluster.get(&path).await?, cluster.get(&secret(&home, "login-synced")).await?);
        (source["data"] == copy["data"] && copy["data"]["user"] == "").then_some(())
    })
    .await;
}

#[tokio::test]
async fn largest_objects_that_the_api_server_takes_pass_the_webhook() {
    let cluster = Cluster::new("largest").await;
    let home = cluster.namespace("home").await;
    let (_installed, _lockstep) = cluster.install_and_start(&[]).await;
    // A review of these escapes every byte as six.
    let escaped = |many: usize| json!("<".repeat(many));
    let note = json!({"note": escaped((256 << 10) - 1000)});
    let keys: Map<String, Value> = (0..60_000).map(|number| (format!("{number:x}"), json!(""))).collect();
    let sources = [
        cluster
            .source(&home, "escaped")
            .with("/data", json!({"a": escaped(1 << 20)}))
            .with("/metadata/annotations", note),
        cluster.source(&home, "keys").with("/data", Value::Object(keys)),
        cluster.source(&home, "secret").secret("Opaque", json!({"a": "QUFB".repeat((1 << 20) / 3)})),
    ];
    for source in sources {
        // Both objects of the update's review are as large.
        let mut object = source.create().await;
        object["data"]["b"] = "".into();
        object["metadata"].as_object_mut().unwrap().remove("managedFields");
        let kind = if object.get("type").is_some() { "secrets" } else { "configmaps" };
        let path =
            format!("/api/v1/namespaces/{home}/{kind}/{}", object["metadata"]["name"].as_str().unwrap());
        let outcome = cluster.try_request("PUT", &path, Some(("application/json", &object))).await;
        assert!(outcome.is_ok(), "{path}: {:?}", outcome.err());
        assert_eq!(cluster.try_request("DELETE", &path, None).await.err(), None, "{path}");
    }
}
