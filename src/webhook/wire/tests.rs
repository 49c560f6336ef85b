//! Reviews as the API server sends them, and malformed ones.

use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use lockstep_core::{
    admission::denial::Denial,
    testing::{configmap, keys},
};

fn configmap_named(name: &str) -> Value {
    json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {
            "name": name, "namespace": "home", "uid": "u-1", "resourceVersion": "7",
            "creationTimestamp": "2026-01-01T00:00:00Z",
            "labels": {"workshop.io/managed": "true"},
            "managedFields": [{"manager": "kubectl", "operation": "Update", "apiVersion": "v1",
                "time": "2026-01-01T00:00:00Z", "fieldsType": "FieldsV1", "fieldsV1": {"f:data": {".": {}, "f:sky": {}}}}],
        },
        "data": {"sky": "hush"},
    })
}

/// A review with every field that the API server sends.
fn review_of(operation: &str, old: &Value, new: &Value) -> Value {
    json!({
        "kind": "AdmissionReview", "apiVersion": "admission.k8s.io/v1",
        "request": {
            "uid": "11111111-2222-3333-4444-555555555555",
            "kind": {"group": "", "version": "v1", "kind": "ConfigMap"},
            "resource": {"group": "", "version": "v1", "resource": "configmaps"},
            "requestKind": {"group": "", "version": "v1", "kind": "ConfigMap"},
            "requestResource": {"group": "", "version": "v1", "resource": "configmaps"},
            "name": "colors", "namespace": "home", "operation": operation,
            "userInfo": {"username": "alice", "uid": "a-1", "groups": ["dev", "system:authenticated"],
                "extra": {"scopes": ["a", "b"]}},
            "object": new, "oldObject": old, "dryRun": false,
            "options": {"kind": "UpdateOptions", "apiVersion": "meta.k8s.io/v1"},
        },
    })
}

fn parse_value(review: &Value) -> Result<(String, Request), Malformed> {
    parse(&serde_json::to_vec(review).unwrap())
}

fn request(review: &Value) -> Request {
    match parse_value(review) {
        Ok((uid, request)) => {
            assert_eq!(uid, "11111111-2222-3333-4444-555555555555");
            request
        }
        Err(malformed) => panic!("{malformed}"),
    }
}

fn problem(review: &Value) -> Malformed {
    parse_value(review).err().expect("a malformed review")
}

fn edited(path: &str, value: Value) -> Value {
    let mut review = review_of("UPDATE", &configmap_named("colors"), &configmap_named("colors"));
    *review.pointer_mut(path).unwrap() = value;
    review
}

fn without(parent: &str, field: &str) -> Value {
    let mut review = review_of("UPDATE", &configmap_named("colors"), &configmap_named("colors"));
    review.pointer_mut(parent).unwrap().as_object_mut().unwrap().remove(field).unwrap();
    review
}

#[test]
fn create_has_the_new_object() {
    let mut review = review_of("CREATE", &Value::Null, &configmap_named("colors"));
    assert!(!request(&review).dry_run);
    review["request"]["dryRun"] = true.into();
    let Request { kind, namespace, user, operation, dry_run } = request(&review);
    assert!(dry_run);
    assert_eq!((kind, &*namespace), (Kind::ConfigMap, "home"));
    assert_eq!((&*user.name, &*user.uid), ("alice", "a-1"));
    assert_eq!(user.groups, ["dev", "system:authenticated"]);
    assert_eq!(user.extra["scopes"], ["a", "b"]);
    let Operation::Create { new } = operation else { panic!("no create") };
    assert_eq!(new.metadata.name, "colors");
    assert_eq!(new.data.unwrap()["sky"], "hush");
}

#[test]
fn update_has_both_objects() {
    let new = configmap_named("colors");
    let mut old = new.clone();
    old["data"]["sky"] = "grey".into();
    let Operation::Update { old, new } = request(&review_of("UPDATE", &old, &new)).operation else {
        panic!("no update")
    };
    assert_eq!((&*old.data.unwrap()["sky"], &*new.data.unwrap()["sky"]), ("grey", "hush"));
}

#[test]
fn delete_has_the_old_object_even_if_the_request_has_no_name() {
    for name in ["colors", ""] {
        let mut review = review_of("DELETE", &configmap_named("colors"), &Value::Null);
        review["request"]["name"] = name.into();
        let Operation::Delete { old } = request(&review).operation else { panic!("no delete") };
        assert_eq!(old.metadata.name, "colors");
    }
}

#[test]
fn object_without_a_name_gets_the_name_of_the_request() {
    let mut review = review_of("CREATE", &Value::Null, &configmap_named("colors"));
    review["request"]["object"]["metadata"].as_object_mut().unwrap().remove("name");
    let named = |review: &Value| match request(review).operation {
        Operation::Create { new } => new.metadata.name,
        _ => panic!("no create"),
    };
    assert_eq!(named(&review), "colors");
    // generateName, before the API server has chosen one.
    review["request"]["object"]["metadata"]["generateName"] = "colors-".into();
    review["request"].as_object_mut().unwrap().remove("name");
    assert_eq!(named(&review), "");
}

#[test]
fn secret_is_parsed_like_a_configmap() {
    let mut review = edited("/request/resource/resource", "secrets".into());
    review["request"]["object"]["type"] = "Opaque".into();
    let request = request(&review);
    assert_eq!(request.kind, Kind::Secret);
    let Operation::Update { new, .. } = request.operation else { panic!("no update") };
    assert_eq!(new.type_.as_deref(), Some("Opaque"));
}

#[test]
fn user_may_have_no_groups_and_no_extra_fields() {
    for review in [
        without("/request/userInfo", "groups"),
        edited("/request/userInfo/groups", Value::Null),
        edited("/request/userInfo/groups", json!([])),
    ] {
        assert!(request(&review).user.groups.is_empty());
    }
    for review in [
        without("/request/userInfo", "extra"),
        edited("/request/userInfo/extra", Value::Null),
        edited("/request/userInfo/extra", json!({})),
    ] {
        assert!(request(&review).user.extra.is_empty());
    }
    // Go's empty list.
    let user = request(&edited("/request/userInfo/extra", json!({"a": null}))).user;
    assert_eq!(user.extra["a"], Vec::<String>::new());
}

#[test]
fn user_larger_than_any_token_is_rejected() {
    let groups = |many: usize| edited("/request/userInfo/groups", json!(vec!["a".repeat(1000); many]));
    assert!(parse_value(&groups(1000)).is_ok());
    assert_eq!(problem(&groups(1100)), Malformed::User);
    assert_eq!(problem(&edited("/request/userInfo/groups", json!(vec![""; 50_000]))), Malformed::User);
    let extra = json!({"k".repeat(2 << 20): []});
    assert_eq!(problem(&edited("/request/userInfo/extra", extra)), Malformed::User);
}

#[test]
fn null_value_is_an_empty_text_as_the_api_server_stores_it() {
    let mut review = edited("/request/object/data/sky", Value::Null);
    review["request"]["object"]["binaryData"] = json!({"raw": null});
    review["request"]["object"]["metadata"]["creationTimestamp"] = Value::Null;
    for field in ["labels", "annotations", "finalizers", "ownerReferences", "managedFields"] {
        review["request"]["oldObject"]["metadata"][field] = Value::Null;
    }
    let Operation::Update { old, new } = request(&review).operation else { panic!("no update") };
    assert_eq!((&*new.data.unwrap()["sky"], &*new.binary_data.unwrap()["raw"]), ("", ""));
    assert!(old.metadata.labels.is_empty() && old.metadata.finalizers.is_empty());
    // Null where the stored object has an empty text changes nothing.
    let mut empty = configmap_named("colors");
    empty["data"]["sky"] = "".into();
    let mut null = empty.clone();
    null["data"]["sky"] = Value::Null;
    assert!(unchanged(&empty, &null));
}

#[test]
fn object_larger_than_the_api_server_stores_is_rejected_before_it_is_parsed() {
    let with_data = |value: &str| edited("/request/object/data/sky", value.into());
    assert!(parse_value(&with_data(&"x".repeat(MAX_OBJECT_BYTES - 1000))).is_ok());
    assert_eq!(problem(&with_data(&"x".repeat(MAX_OBJECT_BYTES))), Malformed::ObjectTooLarge);
    // Escapes count as what they stand for.
    assert!(parse_value(&with_data(&"\u{1}".repeat(1 << 20))).is_ok());
    assert!(parse_value(&with_data(&"\n".repeat(1 << 20))).is_ok());
    assert_eq!(problem(&with_data(&"\u{1}".repeat(MAX_OBJECT_BYTES))), Malformed::ObjectTooLarge);
    for (json, length) in [(r#""a""#, 3), (r#""\u003c""#, 3), (r#""\\u""#, 4), (r#""\"\u0001\\""#, 5)] {
        assert_eq!(unescaped_len(json), length, "{json}");
    }
}

#[test]
fn annotations_beyond_the_limit_of_the_api_server_are_rejected() {
    let annotated = |bytes: usize| {
        edited("/request/object/metadata/labels", Value::Null).to_string().replacen(
            "\"labels\":null",
            &format!("\"annotations\":{{\"a\":\"{}\"}}", ",".repeat(bytes)),
            1,
        )
    };
    assert!(parse(annotated(MAX_ANNOTATIONS_BYTES - 1).as_bytes()).is_ok());
    assert_eq!(parse(annotated(MAX_ANNOTATIONS_BYTES).as_bytes()).err(), Some(Malformed::Annotations));
}

#[test]
fn lists_have_no_more_elements_than_etcd_can_hold() {
    let listed = |field: &str, element: &str, many: usize| {
        let list = format!("[{}]", vec![element; many].join(","));
        let whole = edited("/request/uid", "u".into()).to_string();
        let field = format!("\"{field}\":{list},\"creationTimestamp\"");
        parse(
            whole
                .replacen("\"creationTimestamp\"", &field, 1)
                .replacen("managedFields\":[{", "x\":[{", 1)
                .as_bytes(),
        )
    };
    for (field, element, most) in [("ownerReferences", "{}", 104_857), ("finalizers", "\"\"", 314_572)] {
        assert!(listed(field, element, most).is_ok(), "{field}");
        assert!(matches!(listed(field, element, most + 1), Err(Malformed::Json("data", _, _))), "{field}");
    }
}

#[test]
fn unsupported_reviews_are_rejected_with_their_reason() {
    let missing = Malformed::Missing;
    for (review, expected) in [
        (edited("/apiVersion", "admission.k8s.io/v1beta1".into()), Malformed::Version),
        (edited("/kind", "ConversionReview".into()), Malformed::Version),
        (without("", "kind"), Malformed::Version),
        (json!({}), Malformed::Version),
        (without("", "request"), Malformed::NoRequest),
        (edited("/request", Value::Null), Malformed::NoRequest),
        (edited("/request/resource/resource", "pods".into()), Malformed::Resource),
        (edited("/request/resource/resource", "ConfigMaps".into()), Malformed::Resource),
        (edited("/request/resource/group", "apps".into()), Malformed::Resource),
        (edited("/request/resource/version", "v2".into()), Malformed::Resource),
        (edited("/request/resource", json!({})), Malformed::Resource),
        (edited("/request/operation", "CONNECT".into()), Malformed::Operation),
        (edited("/request/operation", "create".into()), Malformed::Operation),
        (edited("/request/uid", "".into()), missing("review", "a uid")),
        (edited("/request/userInfo/username", "".into()), missing("review", "a user")),
        (without("/request", "userInfo"), missing("review", "a user")),
        (without("/request", "namespace"), missing("review", "a namespace")),
        (edited("/request/namespace", "x$(id)".into()), missing("review", "a namespace")),
        (edited("/request/object", Value::Null), missing("review of this operation", "an object")),
        (without("/request", "oldObject"), missing("review of this operation", "an oldObject")),
        (
            review_of("CREATE", &configmap_named("a"), &Value::Null),
            missing("review of this operation", "an object"),
        ),
        (
            review_of("DELETE", &Value::Null, &configmap_named("a")),
            missing("review of this operation", "an oldObject"),
        ),
    ] {
        assert_eq!(problem(&review), expected, "{review}");
    }
    let mut review = edited("/request/uid", "u".into());
    review["request"]["subResource"] = "status".into();
    assert_eq!(problem(&review), Malformed::Resource);
}

#[test]
fn malformed_body_is_never_quoted() {
    let whole = serde_json::to_string(&edited("/request/uid", "u".into())).unwrap();
    let replaced = |from: &str, to: &str| {
        assert!(whole.contains(from), "{from}");
        whole.replace(from, to).into_bytes()
    };
    let mut bodies = vec![
        b"hush".to_vec(),
        b"\"hush\"".to_vec(),
        b"[\"hush\"]".to_vec(),
        b"{\"hush\": 1, \"hush\"".to_vec(),
        replaced(r#""uid":"u""#, r#""uid":{"hush":"hush"}"#),
        replaced(r#""operation":"UPDATE""#, r#""operation":["hush"]"#),
        replaced(r#""sky":"hush""#, r#""sky":["hush"]"#),
        replaced(r#""sky":"hush""#, r#""sky":"hush\u12""#),
        replaced(r#""data":{"#, r#""immutable":"hush","data":{"#),
        replaced(r#""labels":{"#, r#""labels":"hush","labels":{"#),
        replaced(r#""metadata":{"#, r#""metadata":"hush","hush":{"#),
        replaced(r#""sky":"hush""#, "\"sky\":\"hush\u{0}\""),
        [b"{\"kind\":\"hush\xff\xfe\"}".as_slice(), whole.as_bytes()].concat(),
    ];
    bodies.extend((0..whole.len()).step_by(7).map(|at| whole.as_bytes()[..at].to_vec()));
    for body in bodies {
        let Err(malformed) = parse(&body) else { panic!("{} was parsed", String::from_utf8_lossy(&body)) };
        let (shown, debug) = (malformed.to_string(), format!("{malformed:?}"));
        assert!(!shown.contains("hush") && !debug.contains("hush"), "{shown}");
    }
}

/// serde rejects a duplicate field, so the API server cannot see one value and the webhook the other. Of
/// duplicate keys that users choose (data, labels), the last one counts, as in Go.
#[test]
fn duplicate_field_is_rejected() {
    let review = review_of("CREATE", &Value::Null, &configmap_named("colors"));
    let whole = review.to_string();
    for path in [
        "/kind",
        "/request",
        "/request/uid",
        "/request/operation",
        "/request/namespace",
        "/request/resource",
        "/request/resource/resource",
        "/request/userInfo",
        "/request/userInfo/username",
        "/request/object",
        "/request/object/metadata",
        "/request/object/metadata/name",
        "/request/object/metadata/labels",
        "/request/object/data",
    ] {
        let name = path.rsplit('/').next().unwrap();
        let field = format!("\"{name}\":{}", review.pointer(path).unwrap());
        let twice = whole.replace(&field, &format!("{field},{field}"));
        assert_ne!(twice, whole, "{path}");
        assert!(matches!(parse(twice.as_bytes()), Err(Malformed::Json("data", _, _))), "{path}");
    }
    let twice = whole.replacen(r#""sky":"hush""#, r#""sky":"first","sky":"last""#, 1);
    let (_, Request { operation: Operation::Create { new }, .. }) = parse(twice.as_bytes()).ok().unwrap()
    else {
        panic!("no create")
    };
    assert_eq!(new.data.unwrap()["sky"], "last");
}

#[test]
fn deep_nesting_and_huge_numbers_do_no_harm() {
    const DEPTH: usize = 1 << 17;
    let whole = serde_json::to_string(&edited("/request/uid", "u".into())).unwrap();
    let hidden = format!("{}{}", "[".repeat(DEPTH), "]".repeat(DEPTH));
    for value in [hidden.as_str(), &"9".repeat(DEPTH), "1e999999999", "-0.0e-400"] {
        // In fields that are skipped, and in fields that are compared.
        let bodies = [
            whole.replacen("\"dryRun\":false", &format!("\"dryRun\":false,\"other\":{value}"), 1),
            whole.replacen("\"fieldsV1\":{", &format!("\"fieldsV0\":{value},\"fieldsV1\":{{"), 1),
            whole.replacen("\"data\":{", &format!("\"other\":{value},\"data\":{{"), 1),
        ];
        for body in bodies {
            assert!(body.len() > whole.len() - 10 && parse(body.as_bytes()).is_ok(), "{}", &value[..9]);
        }
        let typed = whole.replacen("\"sky\":\"hush\"", &format!("\"sky\":{value}"), 1);
        assert!(parse(typed.as_bytes()).is_err());
    }
    assert!(parse("[".repeat(DEPTH).as_bytes()).is_err());
    assert!(parse("{\"request\":".repeat(DEPTH).as_bytes()).is_err());
}

fn unchanged(old: &Value, new: &Value) -> bool {
    request(&review_of("UPDATE", old, new)).changes_nothing()
}

fn text() -> impl Strategy<Value = String> {
    prop_oneof!["[a-c]{0,3}", "\\PC{0,6}", Just("\u{0}\"\\</&>\n".to_owned())]
}

fn texts() -> impl Strategy<Value = BTreeMap<String, String>> {
    prop::collection::btree_map(text(), text(), 0..4)
}

fn any_object() -> impl Strategy<Value = Value> {
    (texts(), texts(), texts(), prop::option::of(any::<bool>())).prop_map(
        |(labels, annotations, data, immutable)| {
            let mut object = configmap_named("colors");
            object["metadata"]["labels"] = json!(labels);
            object["metadata"]["annotations"] = json!(annotations);
            object["data"] = json!(data);
            if let Some(immutable) = immutable {
                object["immutable"] = immutable.into();
            }
            object
        },
    )
}

/// Changes one of the fields that the API server lets users change.
fn change_field(object: &mut Value, at: usize, key: &str, value: &str) {
    let meta = &mut object["metadata"];
    match at {
        0 => meta["labels"][key] = value.into(),
        1 => meta["annotations"][key] = value.into(),
        2 => meta["finalizers"] = json!([value]),
        3 => {
            meta["ownerReferences"] = json!([{"apiVersion": "v1", "kind": "Pod", "name": key, "uid": value}])
        }
        4 => meta["deletionTimestamp"] = value.into(),
        5 => meta["generateName"] = format!("{value}-").into(),
        6 => meta["selfLink"] = format!("/{value}").into(),
        7 => object["data"][key] = value.into(),
        8 => object["binaryData"] = json!({key: value}),
        9 => object["type"] = value.into(),
        10 => object["immutable"] = (object["immutable"] != true).into(),
        _ => drop(object.as_object_mut().unwrap().remove("data")),
    }
}

proptest! {
    #[test]
    fn update_is_unchanged_if_and_only_if_nothing_but_managed_fields_differs(
        old in any_object(), manager in text(), version in text(), at in 0_usize..12, key in text(), value in text(),
    ) {
        let mut new = old.clone();
        new["metadata"]["resourceVersion"] = version.into();
        new["metadata"]["managedFields"] = json!([{"manager": manager, "fieldsV1": {"f:data": {&key: {}}}}]);
        prop_assert!(unchanged(&old, &old) && unchanged(&old, &new));
        new["metadata"].as_object_mut().unwrap().remove("managedFields");
        prop_assert!(unchanged(&old, &new) && unchanged(&new, &old));

        let compared = |object: &Value| {
            let mut object = object.clone();
            let meta = object["metadata"].as_object_mut().unwrap();
            drop((meta.remove("managedFields"), meta.remove("resourceVersion")));
            object
        };
        change_field(&mut new, at, &key, &value);
        let same = compared(&old) == compared(&new);
        prop_assert_eq!(unchanged(&old, &new), same);
        prop_assert_eq!(unchanged(&new, &old), same);
    }
}

fn answered(outcome: Result<Vec<String>, (&str, String)>, patch: Option<Vec<u8>>) -> Value {
    serde_json::from_slice(&answer("u-1", outcome, patch)).unwrap()
}

#[test]
fn denial_is_a_403_with_message_and_audit_annotation() {
    let denial = Denial::Edit { at: configmap("home", "colors-synced"), of: configmap("home", "colors") };
    let denial = (denial.label(), denial.message(&keys()));
    assert_eq!(
        answered(Err(denial.clone()), None),
        json!({
            "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
            "response": {
                "uid": "u-1", "allowed": false,
                "status": {"status": "Failure", "code": 403, "reason": "Forbidden", "message": denial.1},
                "auditAnnotations": {"denied": "edit"},
            },
        })
    );
}

#[test]
fn allowed_answer_without_warnings_has_no_other_fields() {
    assert_eq!(
        answered(Ok(Vec::new()), None),
        json!({
            "apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview",
            "response": {"uid": "u-1", "allowed": true},
        })
    );
}

#[test]
fn patch_is_base64_with_its_type() {
    let response = &answered(Ok(Vec::new()), Some(br#"[{"op":"add"}]"#.to_vec()))["response"];
    assert_eq!(response["patchType"], "JSONPatch");
    assert_eq!(response["patch"], "W3sib3AiOiJhZGQifV0=");
}

/// What a user sees of these warnings, as `WithWarningRecorder` of the API server decides it.
fn shown(warnings: &[Value]) -> Vec<String> {
    let texts = || warnings.iter().map(|text| text.as_str().unwrap());
    let total: usize = texts().map(|text| text.chars().count()).sum();
    let each = if total > 4096 { 256 } else { usize::MAX };
    let mut written = 0;
    texts()
        .filter(|text| !text.is_empty() && !text.contains(char::is_control))
        .map(|text| text.chars().take(each).collect::<String>())
        .take_while(|text| {
            let fits = written < 4096;
            written += text.chars().count();
            fits
        })
        .collect()
}

#[test]
fn every_warning_is_shown_or_counted() {
    for (number, length) in [(1, 300), (10, 5), (11, 400), (60, 5000)] {
        let warnings: Vec<String> =
            (0..number).map(|number| format!("{number}\n{}", "ü".repeat(length))).collect();
        let response = answered(Ok(warnings), None);
        let shown = shown(response["response"]["warnings"].as_array().unwrap());
        assert_eq!(shown.len(), number.min(11), "{shown:?}");
        for (number, warning) in shown.iter().take(10).enumerate() {
            assert!(warning.starts_with(&format!("{number} ü")), "{warning}");
        }
        if number > 10 {
            assert_eq!(shown[10], format!("and {} more", number - 10));
        }
    }
}

#[test]
fn message_is_a_single_line_of_bounded_length() {
    let text = format!("colors-synced is {}", "x\u{1b}\r\n".repeat(10_000));
    let response = answered(Err(("edit", text)), None);
    let message = response["response"]["status"]["message"].as_str().unwrap();
    assert!(message.starts_with("colors-synced is x") && message.ends_with('…'));
    assert_eq!(message.chars().count(), MAX_MESSAGE_CHARS + 1);
    assert!(!message.contains(char::is_control));
    assert_eq!(single_line("just this"), "just this");
}
