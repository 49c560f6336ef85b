use proptest::prelude::*;

use super::*;
use lockstep_core::policy::pattern::any_matches;

fn convert(list: &str) -> Option<String> {
    let patterns = patterns("replicate-to", list).ok()?;
    Some(patterns.iter().map(ToString::to_string).collect::<Vec<_>>().join(","))
}

#[test]
fn names_with_any_characters_in_between_become_patterns() {
    for (list, expected) in [
        ("team-a", "team-a"),
        ("^team-a$", "team-a"),
        (" team-a , team-b,", "team-a,team-b"),
        ("", ""),
        (".*", "*"),
        (".+", "*"),
        ("^.+$", "*"),
        ("team-.*", "team-*"),
        ("^team-.*", "team-*"),
        (".*-qa$", "*-qa"),
        ("team-.*-prod", "team-*-prod"),
        // No name begins or ends with `-`, so at least one character is what any characters are.
        ("team-.+", "team-*"),
        (".+-qa", "*-qa"),
        (".+-.+", "*-*"),
    ] {
        assert_eq!(convert(list).as_deref(), Some(expected), "{list}");
    }
}

#[test]
fn every_other_expression_is_refused_with_what_to_write_instead() {
    for list in [
        "a|b",
        "(a)",
        "team-(a|b)",
        "(.*)",
        "ns-[0-2]",
        "team-[a-z0-9-]*",
        "[^.]*",
        r"a\d",
        r"team-\w+",
        "teams?",
        "team-.*?",
        "team-a{2}",
        "^(?!kube-).*$",
        "team.+",
        "team-.+-qa",
        "team-.+.+",
        "..*",
        "team.a",
        "team-*",
        "*",
        "a^b",
        "^^a",
        "a$$",
        "^$",
        r"team\-a",
        r"a\.b",
        "Team",
        "größe",
        "(a",
        "[a",
    ] {
        assert_eq!(convert(list), None, "{list}");
    }
    let error = patterns("replicate-to", "a,b-[0-9]+").unwrap_err().to_string();
    assert!(error.starts_with("replicate-to: the regular expression `b-[0-9]+` is not supported"), "{error}");
    assert!(error.contains("list the namespaces in that annotation"), "{error}");
}

/// What an expression of this small language means, by definition.
#[derive(Debug, Clone)]
enum Node {
    Text(&'static str),
    Any,
    Some,
}

fn render(nodes: &[Node]) -> String {
    let node = |node: &Node| match node {
        Node::Text(text) => text,
        Node::Any => ".*",
        Node::Some => ".+",
    };
    nodes.iter().map(node).collect()
}

/// All positions at which a match that begins at `start` can end, in the order of backtracking.
fn ends(nodes: &[Node], name: &str, start: usize) -> Vec<usize> {
    let Some((first, rest)) = nodes.split_first() else { return vec![start] };
    let firsts: Vec<usize> = match first {
        Node::Text(text) if name[start..].starts_with(text) => vec![start + text.len()],
        Node::Text(_) => Vec::new(),
        Node::Any => (start..=name.len()).rev().collect(),
        Node::Some => (start + 1..=name.len()).rev().collect(),
    };
    firsts.into_iter().flat_map(|at| ends(rest, name, at)).collect()
}

fn nodes() -> impl Strategy<Value = Vec<Node>> {
    let text = prop_oneof![Just("a"), Just("b"), Just("-"), Just("ab")].prop_map(Node::Text);
    prop::collection::vec(prop_oneof![3 => text, 1 => Just(Node::Any), 1 => Just(Node::Some)], 1..6)
}

proptest! {
    #[test]
    fn patterns_match_what_the_expression_matches(nodes in nodes(), name in "[ab]([ab-]{0,4}[ab])?") {
        let text = render(&nodes);
        if let Ok(converted) = patterns("replicate-to", &text) {
            let (found, is_matched) = (ends(&nodes, &name, 0), any_matches(&converted, &name));
            // kubernetes-replicator adds anchors around the expression.
            prop_assert_eq!(is_matched, found.contains(&name.len()), "{} {}", text, name);
            // Reflector takes the first match, which must be as long as the name.
            prop_assert_eq!(is_matched, found.first() == Some(&name.len()), "{} {}", text, name);
        }
    }
}
