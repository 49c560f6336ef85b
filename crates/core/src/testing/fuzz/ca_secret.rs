//! The CA Secret: whatever is in it, a few changes make it usable again, and no key shows.

use std::collections::BTreeMap;

use k8s_openapi::{ByteString, jiff::Timestamp};
use serde_json::{Value, json};

use super::{Target, fields};
use crate::certs::{
    issue::{Certificate, SubjectNames},
    lifetimes::Due,
    rotation::{Inputs, SecretChange},
    secret::{CaSet, ParsedSecret, SecretData},
    testing::{LIFETIMES, at, ca, ca_pem, cas, published},
    webhooks::Published,
};

/// No damage takes more changes than this.
const MAX_CHANGES: usize = 8;
const WORDS: &[&str] = &[
    "@ca",
    "@ca.key",
    "@other",
    "@other.key",
    "@client",
    "@client.key",
    "@leaf",
    "@leaf.key",
    "@constrained",
    "@constrained.key",
    "@ancient",
    "@ancient.key",
    "@eternal",
    "@eternal.key",
    "@nameless",
    "@nameless.key",
    "\nca.crt: ",
    "\nca.key: ",
    "\nnext.crt: @other",
    "\nnext.key: @other.key",
    "\nnext.published: 2027-01-15T08:00:00Z",
    "\nold.crt: ",
    "\nold.since: 2027-01-15T08:00:00Z",
    "\nrotation.requested: 2027-01-15T08:00:00Z",
    "\nrevoked: ",
    "\nca.crt@100: ",
    "\nca.key@100: ",
    "\nnotes: hush",
    "-----BEGIN CERTIFICATE-----\\n",
    "-----END CERTIFICATE-----\\n",
    "-----BEGIN PRIVATE KEY-----\\n",
];

/// What stands for `@name` in an input: certificates and keys are made anew for each run, so none is stored.
fn certificates() -> BTreeMap<String, String> {
    let date = rcgen::date_time_ymd;
    let mut all = BTreeMap::new();
    let mut add = |name: &str, (certificate, key): (String, String)| {
        all.insert(format!("@{name}"), certificate);
        all.insert(format!("@{name}.key"), key);
    };
    for name in ["ca", "other"] {
        let ca = ca();
        add(name, (ca.certificate.pem(), ca.key_pem()));
    }
    add(
        "client",
        ca_pem(|params| params.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ClientAuth]),
    );
    add("leaf", ca_pem(|params| params.is_ca = rcgen::IsCa::NoCa));
    let constraints = rcgen::NameConstraints {
        permitted_subtrees: vec![rcgen::GeneralSubtree::DnsName("elsewhere".to_owned())],
        excluded_subtrees: Vec::new(),
    };
    add("constrained", ca_pem(|params| params.name_constraints = Some(constraints)));
    add("ancient", ca_pem(|params| params.not_before = date(1, 1, 1)));
    add("eternal", ca_pem(|params| params.not_after = date(9999, 12, 31)));
    add("nameless", ca_pem(|params| params.distinguished_name = rcgen::DistinguishedName::new()));
    all
}

/// `ca.crt: @ca` sets a field, `ca.crt@100: x` one byte of it, and `old.crt: 300 @ca` a text so many times.
fn read(input: &[u8], certificates: &BTreeMap<String, String>) -> Option<SecretData> {
    let mut data = SecretData::new();
    for (field, value) in fields(input)? {
        if let Some((field, position)) = field.split_once('@') {
            let (Some(bytes), Ok(position)) = (data.get_mut(field), position.parse::<usize>()) else {
                continue;
            };
            let length = bytes.0.len();
            if let (Some(byte), true) = (value.bytes().next(), length > 0) {
                bytes.0[position % length] = byte;
            }
            continue;
        }
        // The API server takes no other keys.
        if !crate::object::names::is_data_key(&field) {
            continue;
        }
        // The longest names first: `@ca` is the beginning of others.
        let mut names: Vec<&String> = certificates.keys().collect();
        names.sort_by_key(|name| std::cmp::Reverse(name.len()));
        let (times, value) = match value.split_once(' ') {
            Some((times, rest)) if times.parse::<usize>().is_ok() => (times.parse().unwrap_or(1), rest),
            _ => (1, value.as_str()),
        };
        let value =
            names.into_iter().fold(value.to_owned(), |text, name| text.replace(name, &certificates[name]));
        // The API server stores a megabyte.
        let times = times.min((1 << 20) / value.len().max(1)).max(1);
        data.insert(field, ByteString(value.repeat(times).into_bytes()));
    }
    Some(data)
}

/// The webhook's names, as an API server calls it.
fn subject_names() -> SubjectNames {
    ["webhook.home.svc".to_owned()].into()
}

/// Applies a change as the API server does.
fn patched(data: &SecretData, cas: &CaSet) -> SecretData {
    let mut object = json!({"metadata": {"name": "x", "resourceVersion": "7"}, "data": data});
    json_patch::merge(&mut object, &cas.merge_patch("7"));
    let patched: SecretData = serde_json::from_value(object["data"].take()).unwrap();
    let foreign = |data: &SecretData| -> Vec<(String, Vec<u8>)> {
        let ours = cas.data();
        data.iter()
            .filter(|(key, _)| !ours.contains_key(key.as_str()))
            .map(|(key, value)| (key.clone(), value.0.clone()))
            .collect()
    };
    assert_eq!(foreign(&patched), foreign(data), "fields of others stay");
    patched
}

/// A replica meets the Secret, and changes it until it is usable. Returns the CAs, and the changes that it took.
fn repaired(data: &SecretData, known: Option<&CaSet>, now: Timestamp) -> (CaSet, Vec<SecretChange>) {
    let names = subject_names();
    let (mut data, mut remembered, mut changes) = (data.clone(), known.cloned(), Vec::new());
    let mut bundle = Published::NoWebhooks;
    loop {
        let parsed = ParsedSecret::parse(&data);
        let shown = format!("{parsed:?}");
        assert!(!shown.contains("PRIVATE"), "{shown}");
        let inputs = Inputs {
            secret: Some(&parsed),
            remembered: remembered.as_ref(),
            published: &bundle,
            names: &names,
            serving: None,
            request: None,
            now,
            lifetimes: &LIFETIMES,
        };
        let due = inputs.next_change();
        let usable = inputs.usable_cas(due);
        let next = match due {
            Due::Now(change) => {
                changes.push(change);
                assert!(changes.len() <= MAX_CHANGES, "{changes:?}");
                inputs.contents_after(change, "lockstep.workshop.io").unwrap().expect("it fits")
            }
            Due::At(time) => {
                assert!(time > now, "{time} is over: it would be checked again at once");
                return (usable.expect("a Secret that needs no change is usable"), changes);
            }
        };
        data = patched(&data, &next);
        if let Some(cas) = usable {
            let all: Vec<&Certificate> = cas.trusted();
            bundle = published(&all, now);
            remembered = Some(cas);
        }
    }
}

fn check(input: &[u8], certificates: &BTreeMap<String, String>, known: &CaSet) -> bool {
    let Some(data) = read(input, certificates) else { return false };
    let now = at(1_000);
    let mut intact = true;
    for former in [None, Some(known)] {
        let (cas, changes) = repaired(&data, former, now);
        let bundle = cas.bundle();
        assert!(cas.current.check(&subject_names(), now).is_ok() && bundle.contains("BEGIN CERTIFICATE"));
        assert!(!bundle.contains("PRIVATE"), "only certificates are published");
        assert!(cas.trusted().len() <= 10, "the bundle is bounded: {}", cas.trusted().len());
        assert!(cas.revocation.digests.len() <= 32);
        let body: Value = cas.body("x", "home");
        assert!(body.to_string().len() < 1 << 20, "the API server stores it");
        if changes.iter().any(|change| matches!(change, SecretChange::RestoreCa(_))) {
            assert_eq!(Some(&cas.current.certificate), former.map(|cas| &cas.current.certificate));
        }
        intact &= former.is_some() || !changes.iter().any(|change| change.is_repair());
    }
    intact
}

#[test]
fn broken_ca_secret_is_repaired_in_a_few_changes_and_no_key_shows() {
    let (certificates, known) = (certificates(), cas());
    let made = vec![
        ("refused-long-nonsense", format!("ca.crt: {}", "hush".repeat(200_000)).into_bytes()),
        (
            "refused-many-revoked",
            format!("ca.crt: @ca\nca.key: @ca.key\nrevoked: {}", "ab\\n".repeat(10_000)).into_bytes(),
        ),
    ];
    Target { name: "ca-secret", words: WORDS, made }.run(|input| check(input, &certificates, &known));
}
