//! Bodies of reviews, intact and broken.

use super::*;
use lockstep_core::{
    admission::{
        admission_request::Operation,
        review::{Review, Verdict},
    },
    object::Object,
    testing::fuzz::Target,
};

const WORDS: &[&str] = &[
    "\"CREATE\"",
    "\"UPDATE\"",
    "\"DELETE\"",
    "\"CONNECT\"",
    "\"secrets\"",
    "\"lockstep\"",
    "\"workshop.io/companion\"",
    "\"workshop.io/managed\"",
    "\"workshop.io/keys\"",
    "\"workshop.io/target-selector\"",
    "\"a=b=c,,=\"",
    "\"metadata\"",
    "\"labels\"",
    "\"object\"",
    "\"request\"",
    "\"status\"",
    "\"subResource\"",
    "\"deletionTimestamp\"",
    "\"generateName\"",
    "\"name\"",
    "\"nowhere\"",
    "\"dryRun\":true,",
    "\"system:kube-controller-manager\"",
];

/// Reviews of every operation, by source, companion and others.
fn reviews() -> Vec<(&'static str, Vec<u8>)> {
    let edit = an_edit();
    let companion = edit["request"]["oldObject"].clone();
    let colors = object("colors", "managed", &json!({"workshop.io/target-namespaces": ".,away"}));
    let mut recolored = colors.clone();
    recolored["data"]["sky"] = "hush-red".into();
    let mut touched = companion.clone();
    touched["metadata"]["resourceVersion"] = "8".into();
    touched["metadata"]["managedFields"] =
        json!([{"manager": "kubectl", "time": "", "fieldsV1": {"f:data": {}}}]);
    let mut plain = object("plain", "other", &json!({"a": "b"}));
    plain["binaryData"] = json!({"b": "aHVzaA=="});
    let mut secret = review_of("CREATE", &Value::Null, &colors);
    secret["request"]["resource"]["resource"] = "secrets".into();
    secret["request"]["object"]["type"] = "Opaque".into();
    let mut exempt = edit.clone();
    exempt["request"]["userInfo"]["username"] = "lockstep".into();
    let reviews = [
        ("accepted-edit", edit),
        ("accepted-new-source", a_source()),
        ("accepted-new-secret", secret),
        ("accepted-edit-by-the-exempt", exempt),
        ("accepted-touched-companion", review_of("UPDATE", &companion, &touched)),
        ("accepted-changed-source", review_of("UPDATE", &colors, &recolored)),
        ("accepted-unlabelled-source", review_of("UPDATE", &colors, &plain)),
        ("accepted-new-object", review_of("CREATE", &Value::Null, &plain)),
        ("accepted-forged-companion", review_of("CREATE", &Value::Null, &companion)),
        ("accepted-deleted-companion", review_of("DELETE", &companion, &Value::Null)),
        ("accepted-deleted-source", review_of("DELETE", &colors, &Value::Null)),
    ];
    reviews.into_iter().map(|(name, review)| (name, review.to_string().into_bytes())).collect()
}

/// A review of a new source, with this text in place of its data.
fn with_data(data: &str) -> Vec<u8> {
    a_source().to_string().replace(r#"{"sky":"hush-blue"}"#, data).into_bytes()
}

/// The request of a body, parsed independently of the webhook's parser; none where this parser fails.
fn model(body: &[u8]) -> Option<(Request, Value)> {
    let review: Value = serde_json::from_slice(body).ok()?;
    let request = &review["request"];
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let object = |side: &str| {
        let mut object: Object = serde_json::from_value(request[side].clone()).ok()?;
        if object.metadata.name.is_empty() {
            object.metadata.name = text(&request["name"]);
        }
        Some(object)
    };
    let operation = match request["operation"].as_str()? {
        "CREATE" => Operation::Create { new: object("object")? },
        "UPDATE" => Operation::Update { old: object("oldObject")?, new: object("object")? },
        "DELETE" => Operation::Delete { old: object("oldObject")? },
        _ => return None,
    };
    let kind = match request["resource"]["resource"].as_str()? {
        "configmaps" => Kind::ConfigMap,
        "secrets" => Kind::Secret,
        _ => return None,
    };
    let user = &request["userInfo"];
    let groups = user["groups"].as_array().into_iter().flatten().map(text).collect();
    let user = User { name: text(&user["username"]), groups, ..User::default() };
    let supported = review["apiVersion"] == "admission.k8s.io/v1" && review["kind"] == "AdmissionReview";
    let request = Request { kind, namespace: text(&request["namespace"]), user, operation, dry_run: false };
    supported.then_some((request, review))
}

/// Whether a secret value is anywhere but in the content.
fn misplaced(review: &Value) -> bool {
    let mut review = review.clone();
    for side in ["object", "oldObject"] {
        for field in ["data", "binaryData"] {
            if let Some(content) = review["request"][side].get_mut(field).and_then(Value::as_object_mut) {
                content.values_mut().for_each(|value| drop(value.take()));
            }
        }
    }
    review["request"]["userInfo"]["extra"] = Value::Null;
    review.to_string().contains("hush")
}

async fn try_input(webhook: &Arc<Webhook>, has_access: bool, body: &[u8], log: &CapturedLogs) -> bool {
    let mut answered = false;
    for path in ["/validate", "/mutate"] {
        log.clear();
        let (status, text) = send(webhook, post_to(path, body.to_vec())).await;
        let shown = || format!("{path} {status}: {text}");
        if status != StatusCode::OK {
            assert!(status.is_client_error() || status == StatusCode::SERVICE_UNAVAILABLE, "{}", shown());
            assert!(!text.contains("hush") && !log.text().contains("hush"), "{}\n{}", log.text(), shown());
            assert!(serde_json::from_str::<Value>(&text).is_err(), "{}", shown());
            continue;
        }
        answered = true;
        let answer: Value = serde_json::from_str(&text).unwrap();
        let response = &answer["response"];
        let allowed = response["allowed"].as_bool().unwrap();
        assert!(
            answer["kind"] == "AdmissionReview" && answer["apiVersion"] == "admission.k8s.io/v1",
            "{}",
            shown()
        );
        assert_eq!(allowed, response.get("status").is_none(), "{}", shown());
        let warnings = response["warnings"].as_array().cloned().unwrap_or_default();
        let messages = warnings.iter().chain([&response["status"]["message"]]).filter_map(Value::as_str);
        let is_short = |text: &str| text.chars().count() <= 2001 && !text.contains(char::is_control);
        assert!(warnings.len() <= 11 && messages.into_iter().all(is_short), "{}", shown());
        // serde_json has no value for some bodies, such as one with a huge number in a field that the webhook
        // skips.
        let Some((request, review_value)) = model(body) else {
            assert!(serde_json::from_slice::<Value>(body).is_err(), "{}", shown());
            continue;
        };
        assert_eq!(response["uid"], review_value["request"]["uid"], "{}", shown());
        if !misplaced(&review_value) {
            assert!(!text.contains("hush") && !log.text().contains("hush"), "{}\n{}", log.text(), shown());
        }
        if path == "/validate" {
            let case = Review::read(&webhook.rules, &request);
            let expected = match case.map(|case| webhook.world.read(|world| case.judge(world))) {
                None | Some(Verdict::Allow { .. }) => true,
                // The peer has no certificate.
                Some(Verdict::Deny(_) | Verdict::CheckRestore { .. }) => false,
                Some(Verdict::CheckAccess { then, .. }) => {
                    let decided = webhook.world.read(|world| then.decide_after(world, &request.user, Ok(())));
                    has_access && decided.is_ok()
                }
            };
            assert_eq!(allowed, expected, "{}", shown());
        } else if let Some(patch) = response.get("patch") {
            let patch: k8s_openapi::ByteString = serde_json::from_value(patch.clone()).unwrap();
            let patch: json_patch::Patch = serde_json::from_slice(&patch.0).unwrap();
            let mut object = review_value["request"]["object"].clone();
            json_patch::patch(&mut object, &patch).unwrap();
        }
    }
    answered
}

#[test]
fn any_body_is_refused_or_answered_with_its_uid_and_never_allowed_by_mistake() {
    let deep =
        |open: &str, close: &str| with_data(&format!("{}1{}", open.repeat(50_000), close.repeat(50_000)));
    let keys: Vec<String> = (0..20_000).map(|n| format!("\"{n:x}\":\"\"")).collect();
    let mut made = reviews();
    made.extend([
        ("accepted-many-keys", with_data(&format!("{{{}}}", keys.join(",")))),
        ("accepted-long-value", with_data(&format!(r#"{{"a":"{}"}}"#, "hush".repeat(200_000)))),
        ("refused-value-of-deep-lists", deep("[", "]")),
        ("refused-value-of-deep-objects", deep(r#"{"a":"#, "}")),
        ("refused-value-larger-than-stored", with_data(&format!(r#"{{"a":"{}"}}"#, "x".repeat(2 << 20)))),
        (
            "accepted-deep-field-that-is-skipped",
            with_data(&format!("{{}},\"x\":{}1{}", "[".repeat(5000), "]".repeat(5000))),
        ),
    ]);
    // The clock is paused: a review in a namespace that is not known waits for it.
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    let _entered = runtime.enter();
    let webhooks = [(webhook(Access::Allowed), true), (webhook(Access::Denied), false)];
    let log = CapturedLogs::default();
    let _capturing = log.start("trace");
    Target { name: "review", words: WORDS, made }.run(|body| {
        let mut answered = false;
        for (webhook, has_access) in &webhooks {
            answered = runtime.block_on(try_input(webhook, *has_access, body, &log));
        }
        answered
    });
}
