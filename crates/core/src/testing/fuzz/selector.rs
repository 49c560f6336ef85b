//! Label selectors. An end-to-end test compares them with those of the API server.

use std::collections::{BTreeMap, BTreeSet};

use kube_core::{Expression, Selector, SelectorExt};

use super::{Target, texts::MAX_MESSAGE_CHARS};
use crate::{
    object::names,
    policy::{
        list::{MAX_ITEMS, MAX_LIST_BYTES},
        selector::parse,
    },
};

const WORDS: &[&str] = &[
    "team",
    "a",
    "in",
    "notin",
    " in (a,b)",
    " notin (a)",
    "(",
    ")",
    "()",
    "(,)",
    ",,",
    "!",
    "!=",
    "==",
    "=",
    "<",
    ">",
    " ",
    "\t",
    "\r\n",
    "\u{c}",
    "example.com/x",
    "/",
    "team=a",
    "!team",
    "tier",
];

/// A selector as text.
pub(crate) fn render(selector: Selector) -> String {
    let set = |values: BTreeSet<String>| values.into_iter().collect::<Vec<_>>().join(",");
    let requirement = |expression| match expression {
        Expression::In(key, values) => format!("{key} in ({})", set(values)),
        Expression::NotIn(key, values) => format!("{key} notin ({})", set(values)),
        Expression::Equal(key, value) => format!("{key}={value}"),
        Expression::NotEqual(key, value) => format!("{key}!={value}"),
        Expression::Exists(key) => key,
        Expression::DoesNotExist(key) => format!("!{key}"),
    };
    selector.into_iter().map(requirement).collect::<Vec<_>>().join(",")
}

/// Whether an object with these labels fulfils a requirement, by the words of the Kubernetes documentation.
fn fulfils(labels: &BTreeMap<String, String>, requirement: &Expression) -> bool {
    match requirement {
        Expression::In(key, values) => labels.get(key).is_some_and(|value| values.contains(value)),
        Expression::NotIn(key, values) => labels.get(key).is_none_or(|value| !values.contains(value)),
        Expression::Equal(key, value) => labels.get(key) == Some(value),
        Expression::NotEqual(key, value) => labels.get(key) != Some(value),
        Expression::Exists(key) => labels.contains_key(key),
        Expression::DoesNotExist(key) => !labels.contains_key(key),
    }
}

fn check(input: &[u8]) -> bool {
    let Ok(text) = std::str::from_utf8(input) else { return false };
    let selector = match parse(text) {
        Ok(selector) => selector,
        Err(error) => {
            let message = error.to_string();
            assert!(message.chars().count() <= MAX_MESSAGE_CHARS, "{message}");
            return false;
        }
    };
    let requirements: Vec<Expression> = selector.clone().into_iter().collect();
    assert!((1..=MAX_ITEMS).contains(&requirements.len()) && text.len() <= MAX_LIST_BYTES);
    let mut in_sets = 0;
    for requirement in &requirements {
        let (key, values) = match requirement {
            Expression::In(key, values) | Expression::NotIn(key, values) => {
                in_sets += values.len();
                (key, values.iter().collect::<Vec<_>>())
            }
            Expression::Equal(key, value) | Expression::NotEqual(key, value) => (key, vec![value]),
            Expression::Exists(key) | Expression::DoesNotExist(key) => (key, Vec::new()),
        };
        assert!(names::is_label_key(key) && values.iter().all(|value| names::is_label_value(value)));
    }
    assert!(in_sets <= MAX_ITEMS);
    let rendered = render(selector.clone());
    assert_eq!(parse(&rendered).as_ref(), Ok(&selector), "{rendered}");
    for labels in [&[][..], &[("team", "a")], &[("team", ""), ("tier", "web")], &[("a", "b"), ("in", "in")]] {
        let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        let expected = requirements.iter().all(|requirement| fulfils(&labels, requirement));
        assert_eq!(selector.matches(&labels), expected, "{labels:?}");
    }
    true
}

#[test]
fn selectors_are_refused_in_few_words_or_read_back_the_same() {
    let list = |many: usize| (0..many).map(|n| format!("v{n}")).collect::<Vec<_>>().join(",");
    let made = vec![
        ("accepted-fifty-requirements", list(50).into_bytes()),
        ("refused-thousand-requirements", list(1000).into_bytes()),
        ("accepted-fifty-values", format!("a in ({})", list(50)).into_bytes()),
        ("refused-thousand-values", format!("a in ({})", list(1000)).into_bytes()),
        ("refused-long-key", "x".repeat(8000).into_bytes()),
        ("refused-long-value", format!("a={}", "ü".repeat(4000)).into_bytes()),
        ("refused-deep-parentheses", format!("a in {}", "(".repeat(8000)).into_bytes()),
        ("refused-long", " ".repeat(100_000).into_bytes()),
    ];
    Target { name: "selector", words: WORDS, made }.run(check);
}
