//! Randomly broken reviews. `LOCKSTEP_FUZZ_SECONDS` sets for how long, `LOCKSTEP_FUZZ_SEED` repeats one
//! input.

use std::{fmt, time};

use fastrand::Rng;

use super::*;
use crate::{
    guard::{
        request::Operation,
        review::{Case, Scope, Verdict},
    },
    object::Object,
};

const DEFAULT_SECONDS: u64 = 4;

fn corpus() -> Vec<Vec<u8>> {
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
        edit,
        a_source(),
        secret,
        exempt,
        review_of("UPDATE", &companion, &touched),
        review_of("UPDATE", &colors, &recolored),
        review_of("UPDATE", &colors, &plain),
        review_of("CREATE", &Value::Null, &plain),
        review_of("CREATE", &Value::Null, &companion),
        review_of("DELETE", &companion, &Value::Null),
        review_of("DELETE", &colors, &Value::Null),
    ];
    reviews.iter().map(|review| review.to_string().into_bytes()).collect()
}

/// One input, which is printed when the test fails.
struct Input {
    seed: u64,
    body: Vec<u8>,
}

impl Input {
    fn new(seed: u64, corpus: &[Vec<u8>]) -> Self {
        let mut rng = Rng::with_seed(seed);
        let mut body = rng.choice(corpus).cloned().unwrap_or_default();
        for _ in 0..rng.usize(0..4) {
            mutate(&mut body, corpus, &mut rng);
        }
        Self { seed, body }
    }
}

impl fmt::Display for Input {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = self.body[..self.body.len().min(4000)].escape_ascii();
        write!(f, "LOCKSTEP_FUZZ_SEED={}, {} bytes: {shown}", self.seed, self.body.len())
    }
}

impl Drop for Input {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{self}");
        }
    }
}

/// Where tokens of JSON begin and end.
fn tokens(body: &[u8]) -> Vec<(usize, usize)> {
    let mut tokens = Vec::new();
    let mut at = 0;
    while at < body.len() {
        let start = at;
        at += match body[at] {
            b'"' => {
                let mut end = at + 1;
                while end < body.len() && body[end] != b'"' {
                    end += if body[end] == b'\\' { 2 } else { 1 };
                }
                end.min(body.len() - 1) + 1 - at
            }
            _ => 1,
        };
        tokens.push((start, at));
    }
    tokens
}

const ODDITIES: &[&str] = &[
    "null",
    "true",
    "[]",
    "{}",
    "\"\"",
    "0",
    "-1",
    "-0",
    "1e999",
    "1e-999",
    "18446744073709551616",
    "9999999999999999999999",
    "\"\\u0000\"",
    "\"\\ud800\"",
    "\"\\udc00\\ud800\"",
    "\"\u{202e}\u{feff}\"",
    "\"\\n\\r\\t\"",
    "\"é\u{10ffff}\"",
    "NaN",
    "'a'",
    "/*hush*/",
    "\u{0}",
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
    "\"system:kube-controller-manager\"",
];

fn mutate(body: &mut Vec<u8>, corpus: &[Vec<u8>], rng: &mut Rng) {
    if body.is_empty() {
        return;
    }
    let at = rng.usize(..body.len());
    let tokens = tokens(body);
    // Prefer strings: most other tokens are punctuation.
    let texts: Vec<_> = tokens.iter().filter(|(start, _)| body[*start] == b'"').copied().collect();
    let from = if texts.is_empty() || rng.bool() { &tokens } else { &texts };
    let (start, end) = from[rng.usize(..from.len())];
    match rng.u32(..13) {
        0 => body[at] ^= 1 << rng.u32(..8),
        1 => body[at] = rng.u8(..),
        2 => body.truncate(at),
        3 => body.insert(at, rng.u8(..)),
        4 => drop(body.drain(start..end)),
        5 => {
            let token = body[start..end].to_vec();
            drop(body.splice(end..end, token));
        }
        6 | 7 => drop(body.splice(start..end, rng.choice(ODDITIES).unwrap_or(&"").bytes())),
        8 => {
            // The rest of another review.
            let other = rng.choice(corpus).cloned().unwrap_or_default();
            let from = rng.usize(..other.len());
            body.truncate(at);
            body.extend_from_slice(&other[from..]);
        }
        9 => {
            // One token in place of another.
            let (from, to) = tokens[rng.usize(..tokens.len())];
            let token = body[from..to].to_vec();
            drop(body.splice(start..end, token));
        }
        10 => {
            // A duplicate field.
            let field = format!(
                "{},",
                rng.choice(["\"metadata\":{}", "\"object\":null", "\"uid\":\"x\"", "\"hush\":1"])
                    .unwrap_or("")
            );
            if let Some(open) = body[..=at].iter().rposition(|byte| *byte == b'{') {
                drop(body.splice(open + 1..open + 1, field.bytes()));
            }
        }
        11 => {
            let depth = rng.usize(..2000);
            let (open, close) = *rng.choice(&[("[", "]"), ("{\"a\":", "}")]).unwrap_or(&("[", "]"));
            let nested = format!("{}1{}", open.repeat(depth), close.repeat(depth));
            drop(body.splice(start..end, nested.bytes()));
        }
        _ => {
            let filler =
                rng.choice([" ", "\n", "hush", "\\u0041", "ü", ","]).unwrap_or(" ").repeat(rng.usize(..300));
            drop(body.splice(at..at, filler.bytes()));
        }
    }
}

/// The request of a body, parsed independently of the guard's parser; none where this parser fails.
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
    let compared = |side: &str| {
        let mut object = request[side].clone();
        let meta = object["metadata"].as_object_mut()?;
        drop((meta.remove("managedFields"), meta.remove("resourceVersion")));
        Some(object)
    };
    let operation = match request["operation"].as_str()? {
        "CREATE" => Operation::Create { new: object("object")? },
        "UPDATE" => Operation::Update {
            old: object("oldObject")?,
            new: object("object")?,
            unchanged: compared("oldObject") == compared("object"),
        },
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

async fn try_input(guard: &Arc<Guard>, has_access: bool, input: &Input, log: &CapturedLogs) -> bool {
    let mut answered = false;
    for path in ["/validate", "/mutate"] {
        log.clear();
        let (status, text) = send(guard, post_to(path, input.body.clone())).await;
        let shown = || format!("{path} {status}: {text}\n{input}");
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
        // serde_json has no value for some bodies, such as one with a huge number in a field that the guard
        // skips.
        let Some((request, review_value)) = model(&input.body) else {
            assert!(serde_json::from_slice::<Value>(&input.body).is_err(), "{}", shown());
            continue;
        };
        assert_eq!(response["uid"], review_value["request"]["uid"], "{}", shown());
        if !misplaced(&review_value) {
            assert!(!text.contains("hush") && !log.text().contains("hush"), "{}\n{}", log.text(), shown());
        }
        if path == "/validate" {
            let case = Case::read(&guard.rules, &request);
            let expected = match case.map(|case| guard.world.read(|world| case.judge(world))) {
                None | Some(Verdict::Allow { .. }) => true,
                Some(Verdict::Deny(_)) => false,
                Some(Verdict::CheckAccess { then, .. }) => {
                    has_access && guard.world.read(|world| then.decide(world, Scope::All)).is_ok()
                }
            };
            // The guard compares objects as JSON texts: equal values may be written differently.
            let equal_values = matches!(request.operation, Operation::Update { unchanged: true, .. });
            assert!(allowed == expected || (!allowed && equal_values), "{}", shown());
        } else if let Some(patch) = response.get("patch") {
            let patch: k8s_openapi::ByteString = serde_json::from_value(patch.clone()).unwrap();
            let patch: json_patch::Patch = serde_json::from_slice(&patch.0).unwrap();
            let mut object = review_value["request"]["object"].clone();
            json_patch::patch(&mut object, &patch).unwrap();
        }
    }
    answered
}

#[tokio::test(start_paused = true)]
async fn random_bodies_cause_no_panic_and_are_never_allowed_by_mistake() {
    let number = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let only = number("LOCKSTEP_FUZZ_SEED");
    let seconds = number("LOCKSTEP_FUZZ_SECONDS").unwrap_or(DEFAULT_SECONDS);
    let corpus = corpus();
    let guards = [(guard(Access::Allowed), true), (guard(Access::Denied), false)];
    let log = CapturedLogs::default();
    let _capturing = log.start("trace");
    let first = only.unwrap_or_else(|| fastrand::u64(..));
    let start = time::Instant::now();
    let (mut tried, mut answered) = (0, 0);
    while tried == 0 || (only.is_none() && start.elapsed().as_secs() < seconds) {
        let input = Input::new(first.wrapping_add(tried), &corpus);
        let (guard, has_access) = &guards[usize::from(input.seed.is_multiple_of(2))];
        answered += u64::from(try_input(guard, *has_access, &input, &log).await);
        tried += 1;
    }
    println!("{tried} inputs from seed {first}, {answered} of them answered");
    assert!(only.is_some() || answered > 0, "some inputs are still valid reviews");
}
