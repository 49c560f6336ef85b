use proptest::prelude::*;

use super::*;

fn convert(dialect: Dialect, list: &str) -> Option<String> {
    let patterns = patterns(dialect, list).ok()?;
    Some(patterns.iter().map(ToString::to_string).collect::<Vec<_>>().join(","))
}

#[test]
fn simple_expressions_become_patterns() {
    use Dialect::{DotNet, Go};
    for (list, go, dotnet) in [
        ("team-a", Some("team-a"), Some("team-a")),
        ("^team-a$", Some("team-a"), Some("team-a")),
        (" team-a , team-b,", Some("team-a,team-b"), Some("team-a,team-b")),
        ("team-a,team-a", Some("team-a"), Some("team-a")),
        ("", Some(""), Some("")),
        (".*", Some("*"), Some("*")),
        (".+", Some("*"), Some("*")),
        ("team-.*", Some("team-*"), Some("team-*")),
        ("^team-.*", Some("team-*"), Some("team-*")),
        (".*-qa$", Some("*-qa"), Some("*-qa")),
        ("team-.*-prod", Some("team-*-prod"), Some("team-*-prod")),
        ("(.*)", Some("*"), Some("*")),
        // No name begins or ends with `-`, so at least one character is what any characters are.
        ("team-.+", Some("team-*"), Some("team-*")),
        (".+-qa", Some("*-qa"), Some("*-qa")),
        ("team.+", None, None),
        ("team-.+-qa", None, None),
        ("team-.+.+", None, None),
        ("team-.*.+", Some("team-*"), Some("team-*")),
        // Sets of all characters that a name has.
        ("team-[a-z0-9-]*", Some("team-*"), Some("team-*")),
        ("team-[-a-z0-9]+", Some("team-*"), Some("team-*")),
        ("[^.]*", Some("*"), Some("*")),
        // Short sets, groups and options are written out.
        ("ns-[0-2]", Some("ns-0,ns-1,ns-2"), Some("ns-0,ns-1,ns-2")),
        (r"a\d", Some("a0,a1,a2,a3,a4,a5,a6,a7,a8,a9"), Some("a0,a1,a2,a3,a4,a5,a6,a7,a8,a9")),
        ("(dev|prod)", Some("dev,prod"), Some("dev,prod")),
        (
            "team-(a|b)-(x|y)",
            Some("team-a-x,team-a-y,team-b-x,team-b-y"),
            Some("team-a-x,team-a-y,team-b-x,team-b-y"),
        ),
        ("team-(?:a|b)", Some("team-a,team-b"), Some("team-a,team-b")),
        ("teams?", Some("teams,team"), Some("teams,team")),
        ("team(-.*)?", Some("team-*,team"), Some("team-*,team")),
        (r"team\-a", Some("team-a"), Some("team-a")),
        // Each alternative has its own anchors: Go searches between them, .NET compares the length.
        ("a|b", Some("a*,*b"), Some("a,b")),
        ("a|b|c", Some("a*,*b*,*c"), Some("a,b,c")),
        ("^a$|^b$", Some("a,b"), Some("a,b")),
        ("^a|b", Some("a*,*b"), Some("a,b")),
        ("dev.*|prod", Some("dev*,*prod"), Some("dev*,prod")),
        // In .NET an earlier alternative that matches a part wins, and then the length differs.
        ("a|ab", Some("a*,*ab"), None),
        ("ab|a", Some("ab*,*a"), Some("ab,a")),
        ("^a$|^ab$", Some("a,ab"), Some("a,ab")),
        ("(a|ab)", Some("a,ab"), None),
        ("team|team-.*", Some("team*,*team-*"), None),
        ("team-.*|team", Some("team-*,*team"), Some("team-*,team")),
        ("a.*x|a.*", Some("a*x*,*a*"), None),
        // What is left to people.
        ("app-[0-9]*", None, None),
        ("app-[0-9]+", None, None),
        ("team.a", None, None),
        ("team-[a-z]", None, None),
        ("^(?!kube-).*$", None, None),
        ("team-a{2}", None, None),
        ("team-.*?", None, None),
        (r"team-\w+", None, None),
        ("(a|b)*", None, None),
        ("(a", None, None),
        ("a)", None, None),
        ("[a", None, None),
        ("[]a]", None, None),
        ("[z-a]", None, None),
        ("a^b", None, None),
        ("*", None, None),
        ("Team", None, None),
        (r"a\.b", None, None),
        ("()", None, None),
        ("größe", None, None),
    ] {
        assert_eq!(convert(Go, list).as_deref(), go, "Go: {list}");
        assert_eq!(convert(DotNet, list).as_deref(), dotnet, ".NET: {list}");
    }
}

#[test]
fn expression_that_stands_for_too_many_names_is_left_to_people() {
    assert!(convert(Dialect::Go, "a[0-4][0-9]").is_some());
    assert_eq!(convert(Dialect::Go, "a[0-9][0-9]"), None);
    assert_eq!(convert(Dialect::Go, &vec!["(a|b)"; 100].concat()), None);
    assert_eq!(convert(Dialect::Go, &vec!["a"; 51].join("|")), None);
    let error = patterns(Dialect::Go, "a,b-[0-9]+").unwrap_err().to_string();
    assert!(error.contains("the regular expression `b-[0-9]+` says"), "{error}");
}

#[test]
fn intersection_is_exact_or_left_to_people() {
    let list =
        |text: &str| text.split(',').filter(|item| !item.is_empty()).map(Pattern::new).collect::<Vec<_>>();
    for (one, other, expected) in [
        ("*", "team-*", Some("team-*")),
        ("a,b", "b,c", Some("b")),
        ("team-*", "team-a,other", Some("team-a")),
        ("team-*", "team-a-*,x-*", Some("team-a-*")),
        ("a-*", "b-*", Some("")),
        ("a*", "*b", None),
        ("a*,x", "*", Some("a*,x")),
    ] {
        assert_eq!(intersection(&list(one), &list(other)), expected.map(list), "{one} and {other}");
        let mut swapped = intersection(&list(other), &list(one)).map(|both| both.len());
        assert_eq!(swapped.take(), expected.map(|text| list(text).len()), "{other} and {one}");
    }
}

/// What an expression of this small language means, by definition: `.*`, `.+`, letters, groups of alternatives.
#[derive(Debug, Clone)]
enum Node {
    Text(String),
    Any,
    Some,
    Group(Vec<Vec<Node>>),
}

fn render(nodes: &[Node]) -> String {
    let node = |node: &Node| match node {
        Node::Text(text) => text.clone(),
        Node::Any => ".*".to_owned(),
        Node::Some => ".+".to_owned(),
        Node::Group(options) => {
            format!("({})", options.iter().map(|nodes| render(nodes)).collect::<Vec<_>>().join("|"))
        }
    };
    nodes.iter().map(node).collect()
}

/// All positions at which a match that begins at `start` can end, in the order of backtracking.
fn ends(nodes: &[Node], name: &str, start: usize) -> Vec<usize> {
    let Some((first, rest)) = nodes.split_first() else { return vec![start] };
    let firsts: Vec<usize> = match first {
        Node::Text(text) if name[start..].starts_with(text.as_str()) => vec![start + text.len()],
        Node::Text(_) => Vec::new(),
        Node::Any => (start..=name.len()).rev().collect(),
        Node::Some => (start + 1..=name.len()).rev().collect(),
        Node::Group(options) => options.iter().flat_map(|nodes| ends(nodes, name, start)).collect(),
    };
    firsts.into_iter().flat_map(|at| ends(rest, name, at)).collect()
}

fn nodes() -> impl Strategy<Value = Vec<Node>> {
    let text =
        prop_oneof![Just("a"), Just("b"), Just("-"), Just("ab")].prop_map(|text| Node::Text(text.to_owned()));
    let leaf = prop_oneof![3 => text, 1 => Just(Node::Any), 1 => Just(Node::Some)];
    let sequence = prop::collection::vec(leaf.clone(), 1..3);
    let group = prop::collection::vec(sequence, 1..3).prop_map(Node::Group);
    prop::collection::vec(prop_oneof![3 => leaf, 1 => group], 1..4)
}

proptest! {
    #[test]
    fn patterns_match_what_the_expression_matches(nodes in nodes(), name in "[ab]([ab-]{0,4}[ab])?") {
        let text = render(&nodes);
        let found = ends(&nodes, &name, 0);
        if let Ok(converted) = patterns(Dialect::Go, &text) {
            prop_assert_eq!(matches(&converted, &name), found.contains(&name.len()), "Go: {} {}", text, name);
        }
        // The leftmost match counts, and there the first one.
        if let Ok(converted) = patterns(Dialect::DotNet, &text) {
            prop_assert_eq!(matches(&converted, &name), found.first() == Some(&name.len()), ".NET: {} {}", text, name);
        }
    }

    #[test]
    fn any_text_is_converted_or_left_without_a_panic(text in r"[ab.*+?()\[\]|^$\\{}, -]{0,20}") {
        drop(patterns(Dialect::Go, &text));
        drop(patterns(Dialect::DotNet, &text));
    }

    #[test]
    fn intersection_matches_what_both_match(one in "[ab*]{1,4}", other in "[ab*]{1,4}", name in "[ab]{1,5}") {
        let (one, other) = (Pattern::new(&one), Pattern::new(&other));
        if let Some(both) = intersection(std::slice::from_ref(&one), std::slice::from_ref(&other)) {
            prop_assert_eq!(matches(&both, &name), one.matches(&name) && other.matches(&name));
        }
    }
}
