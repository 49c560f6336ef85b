//! The annotations of a Namespace: `accept-from`, and the defaults that the webhook stamps on sources.

use super::{
    Target, fields,
    texts::{MAX_MESSAGE_CHARS, annotations, glob},
};
use crate::{
    admission::{
        admission_request::{Operation, Request, Subjects, User},
        defaulting::stamp_defaults,
        review::Rules,
    },
    object::{Kind, Meta},
    policy::{Policy, Protect, namespace_patterns},
    testing::{self, OWN_NAMESPACE, keys, source},
};

const WORDS: &[&str] = &[
    "*",
    "!",
    "team-*",
    "!team-a",
    "home",
    ".",
    "a*b",
    "kube-system",
    "all",
    "none",
    "edits",
    "team=a",
    " in (a,b)",
    "\naccept-from: ",
    "\naccept-adopt-from: ",
    "\ndefault-target-namespaces: ",
    "\ndefault-target-selector: ",
    "\ndefault-protect: ",
    "\nacept-from: ",
    "\\n",
];

/// Whether a list of patterns matches, by the words of docs/reference.md.
fn matches(list: &str, name: &str) -> bool {
    let items = || list.split(',').map(str::trim).filter(|item| !item.is_empty());
    items().any(|item| glob(item, name))
        && !items().filter_map(|item| item.strip_prefix('!')).any(|item| glob(item.trim(), name))
}

fn check(input: &[u8]) -> bool {
    let Some(fields) = fields(input) else { return false };
    let keys = keys();
    let annotations = annotations(fields);
    let meta = Meta { name: "away".into(), annotations, ..Meta::default() };
    let mut world = testing::world();
    let (_, complaint) = world.apply_namespace(&meta);

    if let Some(complaint) = &complaint {
        assert!(complaint.chars().count() <= MAX_MESSAGE_CHARS, "{complaint}");
    }
    let namespaces = world.namespaces();
    for home in ["home", "team-a", "kube-system", "x"] {
        for (key, accepted) in [
            (&keys.accept_from, namespaces.accept_from_matches(home, "away")),
            (&keys.accept_adopt_from, namespaces.accepts_adoption(home, "away")),
        ] {
            let list = meta.annotations.get(key).map(|text| (text, namespace_patterns(text)));
            let expected = list.as_ref().is_some_and(|(text, parsed)| parsed.is_ok() && matches(text, home));
            assert_eq!(accepted, expected, "{key} {list:?} {home}");
            if let Some((_, Ok(patterns))) = list {
                assert_eq!(namespace_patterns(&patterns.to_string()).as_ref(), Ok(&patterns));
            }
        }
        let commands =
            [namespaces.how_to_accept(home, "away"), namespaces.how_to_accept_adoption(home, "away")];
        assert!(
            commands.iter().all(|command| command.len() < 500 && !command.contains('\n')),
            "{commands:?}"
        );
    }

    // Whatever the defaults are, what the webhook stamps is well-formed.
    let rules = Rules {
        keys: keys.clone(),
        own_namespace: OWN_NAMESPACE.to_owned(),
        exempt: Subjects::default(),
        deputies: Subjects::default(),
        default_targets: ".".to_owned(),
        default_protect: Protect::Edits,
    };
    let new = source("away", "colors").object();
    let mut stamped = new.metadata.clone();
    let request = Request {
        kind: Kind::ConfigMap,
        namespace: "away".to_owned(),
        user: User { name: "alice".to_owned(), ..User::default() },
        operation: Operation::Create { new },
        dry_run: false,
    };
    let (patch, warnings) = stamp_defaults(&rules, &world, &request);
    assert!(warnings.len() <= 4 && warnings.iter().all(|text| text.chars().count() <= 2 * MAX_MESSAGE_CHARS));
    let mut object = serde_json::json!({"metadata": {"annotations": stamped.annotations}});
    json_patch::patch(&mut object, &patch).expect("a patch that applies");
    stamped.annotations = serde_json::from_value(object["metadata"]["annotations"].take()).unwrap();
    let policy = Policy::parse(&keys, &stamped);
    assert!(policy.is_ok(), "{policy:?}");
    complaint.is_none()
}

#[test]
fn namespace_accepts_what_its_list_says_and_its_defaults_break_no_source() {
    let long = |key: &str, text: &str| format!("{key}: {text}").into_bytes();
    let made = vec![
        ("refused-thousand-items", long("accept-from", &vec!["a"; 1000].join(","))),
        ("refused-long-item", long("accept-from", &"x".repeat(8000))),
        ("accepted-long-default", long("default-target-namespaces", &"x".repeat(250_000))),
        ("accepted-long-default-protect", long("default-protect", &"ü".repeat(100_000))),
    ];
    Target { name: "namespace", words: WORDS, made }.run(check);
}
