//! The annotations of a source: any text in any of them.

use std::collections::BTreeMap;

use kube_core::SelectorExt;

use super::{
    Target, fields,
    selector::render as render_selector,
    texts::{MAX_MESSAGE_CHARS, annotations, glob},
};
use crate::{
    keys::Keys,
    object::{Meta, names},
    policy::{
        Policy, Targets,
        content::KeySelection,
        defaults::Defaults,
        list::{MAX_ITEMS, MAX_KEYS, MAX_LIST_BYTES},
        mistake::Mistake,
        pattern::Patterns,
    },
    testing::{full, keys},
};

const HOME: &str = "home";
const WORDS: &[&str] = &[
    ".",
    "*",
    "!",
    "!.",
    "!team-*",
    "team-*",
    "*-qa",
    "a*b",
    "**",
    "home",
    "!home",
    "away",
    "kube-system",
    "\ntarget-namespaces: ",
    "\ntarget-selector: ",
    "\nkeys: ",
    "\ncopy-labels: ",
    "\nset-labels: ",
    "\nset-annotations: ",
    "\ndefaults: ",
    "\ncompanion-name: =",
    "\nprotect: all",
    "\nwhen-removed: keep",
    "\nconsent: required",
    "\npaused: true",
    "\nsource: a/b",
    "{\"target-namespaces\":\"*\"}",
    "{\"protect\":\"all\"}",
    "example.com/*",
    "app.kubernetes.io/managed-by",
    "workshop.io/managed",
    " in (a,b)",
    "=",
    "a=b",
    "\\n",
];

fn source(fields: Vec<(String, String)>) -> Meta {
    let annotations = annotations(fields);
    let labels = [(full("managed"), "true".to_owned())].into();
    Meta { name: "colors".into(), namespace: HOME.into(), labels, annotations, ..Meta::default() }
}

/// The annotations that say what a policy says.
fn render(keys: &Keys, policy: &Policy) -> BTreeMap<String, String> {
    let Targets { own, names, patterns, selector, excluded, needs_consent } = &policy.targets;
    let mut list: Vec<String> =
        own.then(|| ".".to_owned()).into_iter().chain(names.iter().cloned()).collect();
    list.extend(patterns.iter().map(ToString::to_string));
    list.extend(excluded.iter().map(|pattern| format!("!{pattern}")));
    let pairs = |map: &BTreeMap<String, String>| {
        map.iter().map(|(key, value)| format!("{key}={value}")).collect::<Vec<_>>().join(",")
    };
    let flag = |is_set: bool| is_set.then(|| "true".to_owned());
    let list_of = |patterns: &Patterns| (!patterns.is_empty()).then(|| patterns.to_string());
    [
        (&keys.target_namespaces, (!list.is_empty()).then(|| list.join(","))),
        (&keys.target_selector, selector.clone().map(render_selector)),
        (&keys.consent, needs_consent.then(|| "required".to_owned())),
        (&keys.companion_name, Some(policy.companion.clone())),
        (&keys.keys, policy.keys.0.as_ref().map(pairs)),
        (&keys.copy_labels, list_of(&policy.copy_labels)),
        (&keys.copy_annotations, list_of(&policy.copy_annotations)),
        (&keys.set_labels, Some(pairs(&policy.set_labels)).filter(|text| !text.is_empty())),
        (&keys.set_annotations, Some(pairs(&policy.set_annotations)).filter(|text| !text.is_empty())),
        (&keys.protect, Some(policy.protect.as_str().to_owned())),
        (&keys.adopt, flag(policy.adopt)),
        (&keys.paused, flag(policy.paused)),
        (&keys.when_removed, Some(policy.when_removed.as_str().to_owned())),
    ]
    .into_iter()
    .filter_map(|(key, value)| Some((key.clone(), value?)))
    .collect()
}

/// Whether a list of targets wants a namespace, by the words of docs/reference.md. With consent, patterns and selectors
/// do not reach the source's own namespace.
fn wants(list: &str, namespace: &str, selected: bool, consent: bool) -> bool {
    let items: Vec<&str> = list.split(',').map(str::trim).filter(|item| !item.is_empty()).collect();
    let matches = |item: &str| glob(if item == "." { HOME } else { item }, namespace);
    let (excluded, included): (Vec<&str>, Vec<&str>) = items.iter().partition(|item| item.starts_with('!'));
    let by_name = included.contains(&namespace) || (included.contains(&".") && namespace == HOME);
    let by_pattern = selected || included.into_iter().any(matches);
    (by_name || (by_pattern && !(consent && namespace == HOME)))
        && !excluded.into_iter().any(|item| matches(item[1..].trim()))
}

fn check_policy(keys: &Keys, meta: &Meta, policy: &Policy) {
    let Targets { names, patterns, excluded, selector, .. } = &policy.targets;
    assert!([names.len(), patterns.len(), excluded.len()].iter().all(|count| *count <= MAX_ITEMS));
    assert!(names.iter().all(|name| names::is_label(name)));
    let KeySelection(selected) = &policy.keys;
    assert!(selected.as_ref().is_none_or(|keys| (1..=MAX_KEYS).contains(&keys.len())));
    for set in [&policy.set_labels, &policy.set_annotations] {
        assert!(set.len() <= MAX_ITEMS);
        assert!(set.keys().all(|key| names::is_annotation_key(key) && keys.may_copy(key)));
    }
    assert!(policy.set_labels.keys().all(|key| names::is_label_key(key)));
    assert!(policy.set_labels.values().all(|value| names::is_label_value(value)));
    assert!(names::is_subdomain(&policy.companion), "{}", policy.companion);

    let rendered = Meta { annotations: render(keys, policy), ..source(Vec::new()) };
    if rendered.annotations.values().all(|text| text.len() <= MAX_LIST_BYTES) {
        assert_eq!(Policy::parse(keys, &rendered).as_ref(), Ok(policy), "{:?}", rendered.annotations);
    }

    let stamped = meta.annotations.get(&keys.defaults).map(|text| Defaults::from_annotation(text).unwrap());
    let list = match (keys.sets_targets(meta), stamped.unwrap_or_default()) {
        (true, _) => meta.annotations.get(&keys.target_namespaces).cloned(),
        (false, defaults) => defaults.target_namespaces,
    };
    let list = list.unwrap_or_else(|| if selector.is_none() { ".".to_owned() } else { String::new() });
    let labels = BTreeMap::from([("team".to_owned(), "a".to_owned())]);
    let selected = selector.as_ref().is_some_and(|selector| selector.matches(&labels));
    let consent = meta.annotations.get(&keys.consent).is_some_and(|value| value == "required");
    let known = [HOME, "away", "team-a", "team-b", "a-qa", "kube-system", "x"];
    for namespace in known.into_iter().chain(names.iter().map(String::as_str)) {
        let expected = wants(&list, namespace, selected, consent);
        assert_eq!(policy.targets.wants(HOME, namespace, &labels), expected, "{namespace} in {list:?}");
    }
    let mistakes = Mistake::on_source(keys, meta, policy);
    assert!(mistakes.len() <= 5);
}

fn check(input: &[u8]) -> bool {
    let Some(fields) = fields(input) else { return false };
    let (keys, meta) = (keys(), source(fields));
    if let Some(defaults) = meta.annotations.get(&keys.defaults)
        && let Ok(defaults) = Defaults::from_annotation(defaults)
        && let Some(text) = defaults.to_annotation()
    {
        assert_eq!(Defaults::from_annotation(&text).ok(), Some(defaults), "{text}");
    }
    match Policy::parse(&keys, &meta) {
        Ok(policy) => check_policy(&keys, &meta, &policy),
        Err(fault) => {
            let message = fault.to_string();
            assert!(message.chars().count() <= MAX_MESSAGE_CHARS, "{message}");
            return false;
        }
    }
    true
}

#[test]
fn annotations_are_refused_in_few_words_or_mean_what_the_reference_says() {
    let list = |many: usize, item: &str| vec![item; many].join(",");
    let made = vec![
        ("refused-thousand-names", format!("target-namespaces: {}", list(1000, "a")).into_bytes()),
        ("refused-item-of-8000-characters", format!("target-namespaces: {}", "x".repeat(8000)).into_bytes()),
        ("refused-key-of-8000-characters", format!("keys: {}", "ü".repeat(4000)).into_bytes()),
        ("refused-long-companion-name", format!("companion-name: {}", "x".repeat(250_000)).into_bytes()),
        ("refused-deep-defaults", format!("defaults: {}", "[".repeat(50_000)).into_bytes()),
        (
            "refused-long-defaults",
            format!("defaults: {{\"protect\":\"{}\"}}", "x".repeat(50_000)).into_bytes(),
        ),
        ("refused-long-source", format!("source: {}", "x".repeat(50_000)).into_bytes()),
        ("accepted-fifty-stars", format!("target-namespaces: {}", list(50, "*")).into_bytes()),
        ("accepted-pattern-of-stars", format!("target-namespaces: {}", "*".repeat(60)).into_bytes()),
    ];
    Target { name: "annotations", words: WORDS, made }.run(check);
}
