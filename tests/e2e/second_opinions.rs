//! Where Lockstep reads what Kubernetes also reads, the API server is asked for its opinion: random selectors and
//! names, and Leases that are odd but legal. `LOCKSTEP_FUZZ_SEED` repeats a run.

use std::collections::{BTreeMap, BTreeSet};

use fastrand::Rng;
use kube::core::SelectorExt;
use serde_json::{Value, json};

use crate::harness::{Cluster, eventually};
use lockstep_core::{object::names, policy::selector};

const SELECTORS: usize = 600;
const TEXTS: usize = 120;

/// A generator whose seed is printed when the test fails.
struct Seeded {
    seed: u64,
    rng: Rng,
}

impl Seeded {
    fn new() -> Self {
        let seed = std::env::var("LOCKSTEP_FUZZ_SEED").ok().and_then(|seed| seed.parse().ok());
        let seed = seed.unwrap_or_else(|| fastrand::u64(..));
        Self { seed, rng: Rng::with_seed(seed) }
    }

    fn one_of<'a>(&mut self, texts: &[&'a str]) -> &'a str {
        self.rng.choice(texts).copied().unwrap_or_default()
    }
}

impl Drop for Seeded {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("LOCKSTEP_FUZZ_SEED={}", self.seed);
        }
    }
}

/// A text as a part of a URL.
fn encoded(text: &str) -> String {
    text.bytes().map(|byte| format!("%{byte:02X}")).collect()
}

const KEYS: &[&str] = &[
    "team",
    "tier",
    "example.com/x",
    "in",
    "notin",
    "kubernetes.io/metadata.name",
    "none",
    "Team",
    "a/b/c",
    "",
];
const VALUES: &[&str] = &["a", "a", "b", "", "web", "A.b-c_d", "in", "a", "b", "-a", "ü"];
const SPACES: &[&str] = &["", "", "", "", "", " ", " ", "\t", "\r\n", "\u{a0}", "\u{b}", "\u{85}"];

fn requirement(random: &mut Seeded) -> String {
    let [key, value, other] = [KEYS, VALUES, VALUES].map(|texts| random.one_of(texts));
    let space = random.one_of(SPACES);
    match random.rng.u32(..14) {
        0 => key.to_owned(),
        1 => format!("!{space}{key}"),
        2 | 3 => format!("{key}{space}={space}{value}"),
        4 => format!("{key}=={space}{value}"),
        5 | 6 => format!("{key}{space}!={value}"),
        7 | 8 => format!("{key} in{space}({value},{space}{other})"),
        9 | 10 => format!("{key}{space} notin ({value}{space},{other})"),
        11 => format!("{key} in ({value}{space})"),
        12 => format!("{key}{}1", random.one_of(&["<", ">"])),
        _ => format!("{key} {} {value}", random.one_of(&["in", "notin", "=", "of", "!"])),
    }
}

/// A selector that is well-formed about every second time.
fn random_selector(random: &mut Seeded) -> String {
    let requirements: Vec<String> = (0..random.rng.usize(1..4)).map(|_| requirement(random)).collect();
    let mut text = requirements.join(random.one_of(&[",", ",", ",", ",", ",", " , ", ",,"]));
    for _ in 0..random.rng.usize(..6).saturating_sub(3) {
        let places: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
        let at = places[random.rng.usize(..places.len())];
        match random.rng.u32(..3) {
            0 => text.truncate(at),
            1 if at < text.len() => drop(text.remove(at)),
            _ => text.insert_str(at, random.one_of(&[",", "(", ")", "!", "=", " ", "in", "a", ",)", "(,"])),
        }
    }
    text
}

/// The test's own namespaces that a selector matches, if the API server takes it.
async fn selected(cluster: &Cluster, selector: &str) -> Option<BTreeMap<String, BTreeMap<String, String>>> {
    let path = format!("/api/v1/namespaces?labelSelector={}", encoded(selector));
    let list = match cluster.try_request("GET", &path, None).await {
        Ok(list) => list,
        Err(400) => return None,
        Err(code) => panic!("{selector:?}: {code}"),
    };
    let mine = cluster.ns("");
    let namespaces =
        list["items"].as_array().cloned().unwrap_or_default().into_iter().filter_map(|namespace| {
            let name = namespace["metadata"]["name"].as_str()?.to_owned();
            let labels = serde_json::from_value(namespace["metadata"]["labels"].clone()).ok()?;
            name.starts_with(&mine).then_some((name, labels))
        });
    Some(namespaces.collect())
}

/// Such as `a in (b,,)`. Kubernetes before 1.35 refuses it although it takes `a in (b,)` and `a in (b,,,)`.
fn ends_a_list_with_an_even_number_of_commas(text: &str) -> bool {
    let is_even = |list: &str| {
        let end = list.trim_end_matches([',', ' ', '\t', '\r', '\n']);
        let commas = list[end.len()..].matches(',').count();
        commas > 0 && commas.is_multiple_of(2)
    };
    text.match_indices(')').any(|(end, _)| is_even(&text[..end]))
}

#[tokio::test]
async fn selector_means_what_it_means_to_the_api_server() {
    let cluster = Cluster::new("selector").await;
    let labels = [
        json!({}),
        json!({"team": "a"}),
        json!({"team": "a", "tier": "web"}),
        json!({"team": "b", "in": "in"}),
        json!({"team": "", "notin": "a"}),
        json!({"tier": "b", "example.com/x": "A.b-c_d"}),
        json!({"Team": "a", "example.com/x": ""}),
    ];
    for (number, labels) in labels.into_iter().enumerate() {
        cluster.namespace_with(&number.to_string(), labels, json!({})).await;
    }
    let all = selected(&cluster, "kubernetes.io/metadata.name").await.expect("all namespaces");
    assert_eq!(all.len(), 7);
    let before_1_35 = selected(&cluster, "a in (b,,)").await.is_none();
    let mut random = Seeded::new();
    let past = [
        "a,",
        ",a",
        "a,,b",
        "a in (b,,)",
        "a in (,)",
        "a in (b,,c)",
        "team\u{a0}in (a)",
        "in in (in)",
        "!a=b",
        "",
        "team=a",
        "team in (a,b),tier",
        "!team",
        "tier!=web",
        "example.com/x notin (,)",
    ];
    let (mut taken, mut refused, mut matching) = (0, 0, 0);
    for number in 0..SELECTORS {
        let text = past.get(number).map_or_else(|| random_selector(&mut random), |text| (*text).to_owned());
        let ours = selector::parse(&text);
        let theirs = selected(&cluster, &text).await;
        // The differences that docs/reference.md names.
        if text.contains(['<', '>']) || text.trim_matches([' ', '\t', '\r', '\n']).is_empty() {
            assert!(ours.is_err(), "{text:?}");
            continue;
        }
        if before_1_35 && ends_a_list_with_an_even_number_of_commas(&text) {
            // The rest may be wrong for both.
            assert!(theirs.is_none(), "{text:?}");
            refused += 1;
            continue;
        }
        assert_eq!(ours.is_ok(), theirs.is_some(), "{text:?}: {ours:?}, the API server: {theirs:?}");
        let (Ok(ours), Some(theirs)) = (ours, theirs) else {
            refused += 1;
            continue;
        };
        let matched = all.iter().filter(|(_, labels)| ours.matches(*labels)).map(|(name, _)| name);
        assert_eq!(matched.collect::<BTreeSet<_>>(), theirs.keys().collect::<BTreeSet<_>>(), "{text:?}");
        taken += 1;
        matching += usize::from(!theirs.is_empty() && theirs.len() < all.len());
    }
    assert!(
        taken > 50 && refused > 50 && matching > 20,
        "{taken} taken, {refused} refused, {matching} match some"
    );
}

fn random_text(random: &mut Seeded) -> String {
    let edges = ["", "a", "A", "-", ".", "_", "0", "ü", "/", "example.com/", "Example.com/", "\u{212a}"];
    let middles = ["", "a", "a-b", "a.b", "a..b", "a_b", "A", "a/b", " ", "-", "x*y"];
    let long = ["", "", "", "", "x"];
    let [first, last] = [0, 1].map(|_| random.one_of(&edges));
    let long = random.one_of(&long).repeat(random.rng.usize(55..260));
    format!("{first}{long}{}{last}", random.one_of(&middles))
}

#[tokio::test]
async fn names_and_keys_are_valid_where_the_api_server_takes_them() {
    let cluster = Cluster::new("names").await;
    let home = cluster.namespace("home").await;
    let mut random = Seeded::new();
    let configmaps = format!("/api/v1/namespaces/{home}/configmaps?dryRun=All");
    let takes = async |path: &str, object: &Value| {
        match cluster.try_request("POST", path, Some(("application/json", object))).await {
            Ok(_) => true,
            // The object is not read, or not valid.
            Err(400 | 422) => false,
            Err(code) => panic!("{code} for {object}"),
        }
    };
    let is_namespace = |text: &str| names::is_label(text) && text != "default";
    let mut taken = [0; 6];
    for number in 0..TEXTS {
        // One that is good everywhere, and one that is good nowhere.
        let text = ["a", "ü"].get(number).map_or_else(|| random_text(&mut random), |text| (*text).to_owned());
        let object = |field: &str, key: &str, value: &str| {
            let mut object = json!({"metadata": {"name": "x"}});
            object.pointer_mut("/metadata").unwrap()[field] = json!({key: value});
            object
        };
        let named = json!({"metadata": {"name": text}});
        let cases = [
            (names::is_subdomain(&text), configmaps.as_str(), named.clone()),
            (is_namespace(&text), "/api/v1/namespaces?dryRun=All", named),
            (names::is_label_key(&text), &configmaps, object("labels", &text, "")),
            (names::is_annotation_key(&text), &configmaps, object("annotations", &text, "")),
            (names::is_label_value(&text), &configmaps, object("labels", "a", &text)),
            (names::is_data_key(&text), &configmaps, json!({"metadata": {"name": "x"}, "data": {&text: ""}})),
        ];
        for (count, (ours, path, object)) in taken.iter_mut().zip(cases) {
            assert_eq!(ours, takes(path, &object).await, "{object}");
            *count += usize::from(ours);
        }
    }
    assert!(taken.iter().all(|count| (1..TEXTS).contains(count)), "{taken:?}");
}

#[tokio::test]
async fn lease_that_the_api_server_stores_is_taken_over_whatever_it_says() {
    let cluster = Cluster::new("odd-lease").await;
    let home = cluster.namespace("home").await;
    let deep = (0..300).fold(json!({}), |inner, _| json!({"f:a": inner}));
    // The API server shows these times with a year of five digits, and with a negative one.
    let (late, early) = ("9999-12-31T23:59:59.000000-23:59", "0000-01-01T00:00:00.000000+23:59");
    let lease = json!({
        "metadata": {
            "name": format!("lockstep.{}", cluster.domain()),
            "annotations": {"theirs": "kept", cluster.key("deletes-held"): "{}", cluster.key("settings"): "\u{1}"},
            "managedFields": [{"manager": "odd", "operation": "Update", "apiVersion": "coordination.k8s.io/v1",
                "time": "9999-12-31T23:59:59-23:59", "fieldsType": "FieldsV1", "fieldsV1": {"f:metadata": deep}}],
        },
        "spec": {"holderIdentity": "nobody", "leaseDurationSeconds": 1, "leaseTransitions": i32::MAX,
            "renewTime": late, "acquireTime": early},
    });
    let leases = "/apis/coordination.k8s.io/v1/namespaces/lockstep-system/leases";
    let stored = cluster.try_text("POST", leases, "application/json", lease.to_string().into_bytes()).await;
    let stored = stored.expect("a Lease");
    assert!(
        stored.contains("\"renewTime\":\"10000-01-01T23:58:59.000000Z\""),
        "this would show nothing: {stored}"
    );
    let (_installed, _lockstep) = cluster.install_and_start(&[]).await;
    cluster.source(&home, "colors").create().await;
    cluster.wait_data(&home, "colors-synced", json!({"sky": "blue"})).await;
    let path = format!("{leases}/lockstep.{}", cluster.domain());
    eventually("the Lease is the leader's", || async {
        let lease = cluster.try_text("GET", &path, "application/json", Vec::new()).await.ok()?;
        (!lease.contains("\"nobody\"") && lease.contains("\"theirs\":\"kept\"")).then_some(())
    })
    .await;
}
