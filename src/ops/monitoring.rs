//! Alert rules and dashboard ask for metrics that exist, in expressions that can be right.

use std::collections::BTreeSet;

use serde_json::Value;

use super::metrics::{ActionLabel, Metrics, ReasonLabel, ResultLabel, ReviewResult, Role};

const RULES: &str = include_str!("../../deploy/components/monitoring/rules.yaml");
const DASHBOARD: &str = include_str!("../../deploy/components/monitoring/dashboard.json");
const OPERATIONS: &str = include_str!("../../docs/operations.md");

/// Labels that Prometheus adds.
const FROM_OUTSIDE: [&str; 2] = ["job", "pod"];

/// What `/metrics` serves once everything has happened: a family without series does not show.
fn everything_happened() -> String {
    let metrics = Metrics::new();
    drop(metrics.reconciles.get_or_create(&ResultLabel { result: "changed" }));
    drop(metrics.writes.get_or_create(&ActionLabel { action: "created" }));
    drop(metrics.heals.get_or_create(&ReasonLabel { reason: "deleted" }));
    drop(metrics.troubles.get_or_create(&ReasonLabel { reason: "conflict" }));
    metrics.fight("somebody");
    metrics.watch_age("source configmaps", std::time::Duration::ZERO);
    metrics.watch_restarted("namespaces");
    metrics.api_call("create", None);
    metrics.review(ReviewResult::Denied("edit"));
    for role in [Role::Ca, Role::Leaf] {
        metrics.certificate_expiry(role, 1);
        metrics.certificate_rotated(role);
    }
    metrics.render()
}

/// An alert, as far as it matters here. Each is written the same way, so lines are all there is to read.
struct Alert {
    name: String,
    text: String,
}

impl Alert {
    fn all() -> Vec<Self> {
        let alerts = RULES.split("- alert: ").skip(1);
        alerts
            .map(|text| Self { name: text.lines().next().unwrap().to_owned(), text: text.to_owned() })
            .collect()
    }

    /// A field, with what follows on lines that are indented further.
    fn field(&self, name: &str) -> Option<String> {
        let mut lines = self.text.lines().skip_while(|line| !line.trim_start().starts_with(name));
        let first = lines.next()?;
        let indent = |line: &str| line.len() - line.trim_start().len();
        let rest = lines.take_while(|line| indent(line) > indent(first));
        let value = first.trim_start().strip_prefix(name)?.strip_prefix(':')?.trim();
        let parts = [value.trim_start_matches(">-").trim_matches('"')].into_iter().chain(rest.map(str::trim));
        Some(parts.collect::<Vec<_>>().join(" ").trim().to_owned())
    }
}

/// Every expression: the alerts' and the dashboard's.
fn expressions() -> Vec<String> {
    let alerts = Alert::all();
    let mut found: Vec<String> = alerts.iter().map(|alert| alert.field("expr").unwrap()).collect();
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    let targets =
        dashboard["panels"].as_array().unwrap().iter().filter_map(|panel| panel["targets"].as_array());
    found.extend(targets.flatten().map(|target| target["expr"].as_str().unwrap().to_owned()));
    found
}

#[derive(Debug, Clone, PartialEq)]
enum Token {
    Word(String),
    Text(String),
    Sign(char),
}

fn tokens(expression: &str) -> Vec<Token> {
    let part_of_word = |c: char| c.is_ascii_alphanumeric() || "_:.$".contains(c);
    let mut tokens = Vec::new();
    let mut chars = expression.chars().peekable();
    while let Some(c) = chars.next() {
        if c == '"' {
            let text: String = chars.by_ref().take_while(|c| *c != '"').collect();
            tokens.push(Token::Text(text));
        } else if part_of_word(c) {
            let mut word = String::from(c);
            while let Some(c) = chars.next_if(|c| part_of_word(*c)) {
                word.push(c);
            }
            tokens.push(Token::Word(word));
        } else if !c.is_whitespace() {
            tokens.push(Token::Sign(c));
        }
    }
    tokens
}

/// The metrics in an expression, with the labels they are selected by and are grouped by.
fn asked_for(expression: &str) -> (BTreeSet<String>, BTreeSet<String>) {
    let (mut metrics, mut labels) = (BTreeSet::new(), BTreeSet::new());
    let tokens = tokens(expression);
    let mut closing = None;
    for (at, token) in tokens.iter().enumerate() {
        let next = tokens.get(at + 1);
        match token {
            Token::Sign('{') => closing = Some('}'),
            Token::Sign(sign) if Some(*sign) == closing => closing = None,
            Token::Word(word) if word == "by" => closing = Some(')'),
            Token::Word(word) if closing.is_some() => {
                labels.insert(word.clone());
            }
            Token::Word(word)
                if word.starts_with(|c: char| c.is_ascii_alphabetic())
                    && next != Some(&Token::Sign('('))
                    && next != Some(&Token::Word("by".into()))
                    && word != "or" =>
            {
                metrics.insert(word.clone());
            }
            _ => {}
        }
    }
    (metrics, labels)
}

#[test]
fn an_expression_is_taken_apart() {
    let (metrics, labels) =
        asked_for("sum by (le, pod) (rate(a_b{job=\"x{\",code=~\"5..\"}[10m])) or c - time() > 14 * 8");
    assert_eq!(metrics, ["a_b", "c"].map(String::from).into());
    assert_eq!(labels, ["code", "job", "le", "pod"].map(String::from).into());
}

#[test]
fn every_metric_asked_for_is_served() {
    let served = everything_happened();
    let names: BTreeSet<&str> = served
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.split(['{', ' ']).next())
        .collect();
    let expressions = expressions();
    assert!(expressions.len() > 40, "{expressions:#?}");
    let mut asked: BTreeSet<String> = BTreeSet::new();
    for expression in &expressions {
        let (metrics, labels) = asked_for(expression);
        assert!(!metrics.is_empty(), "{expression}");
        for metric in &metrics {
            assert!(names.contains(metric.as_str()), "{metric} is not served: {expression}");
        }
        let has = |label: &String| {
            let series = |line: &&str| metrics.iter().any(|metric| line.starts_with(metric.as_str()));
            let label_is_there =
                |line: &str| ["{", ","].iter().any(|before| line.contains(&format!("{before}{label}=")));
            FROM_OUTSIDE.contains(&label.as_str()) || served.lines().filter(series).any(label_is_there)
        };
        for label in &labels {
            assert!(has(label), "no metric of it has the label {label}: {expression}");
        }
        asked.extend(metrics);
    }
    // A metric that nobody looks at is one too many, or a panel is missing.
    for name in names {
        let part_of_a_histogram = name.ends_with("_sum") || name.ends_with("_count");
        assert!(part_of_a_histogram || asked.contains(name), "{name} is in no rule and no panel");
    }
}

#[test]
fn values_that_rules_select_by_exist() {
    let served = everything_happened();
    for expression in expressions() {
        let tokens = tokens(&expression);
        for window in tokens.windows(3) {
            if let [Token::Word(label), Token::Sign('='), Token::Text(value)] = window
                && label != "job"
            {
                let pair = format!("{label}=\"{value}\"");
                assert!(served.contains(&pair), "{pair} is on no metric: {expression}");
            }
        }
    }
}

#[test]
fn expressions_are_balanced_and_tied_to_one_instance() {
    for expression in expressions() {
        let mut open = Vec::new();
        let tokens = tokens(&expression);
        for token in &tokens {
            match token {
                Token::Sign(sign @ ('(' | '[' | '{')) => open.push(*sign),
                Token::Sign(sign @ (')' | ']' | '}')) => {
                    let expected = match sign {
                        ')' => '(',
                        ']' => '[',
                        _ => '{',
                    };
                    assert_eq!(open.pop(), Some(expected), "{expression}");
                }
                _ => {}
            }
        }
        assert!(open.is_empty(), "{expression}");
        let (metrics, _) = asked_for(&expression);
        let selected = expression.matches("{job=\"lockstep-system/lockstep\"").count()
            + expression.matches("{job=\"$job\"").count();
        assert!(selected >= metrics.len(), "instances are mixed up: {expression}");
    }
}

#[test]
fn every_alert_says_what_is_wrong_and_what_to_do() {
    let alerts = Alert::all();
    assert!(alerts.len() >= 12);
    for alert in &alerts {
        let name = &alert.name;
        assert!(name.starts_with("Lockstep"), "{name}");
        let severity = alert.field("severity").unwrap();
        assert!(["critical", "warning"].contains(&severity.as_str()), "{name}: {severity}");
        assert!(alert.field("summary").is_some_and(|text| text.len() > 20), "{name}");
        assert!(alert.field("runbook").is_some_and(|text| text.len() > 60), "{name}");
        assert!(OPERATIONS.contains(&format!("`{name}`")), "docs/operations.md does not tell of {name}");
        // Only what is over in minutes is told at once.
        assert_eq!(alert.field("for").is_none(), name == "LockstepDeletesHeld", "{name}");
        let expression = alert.field("expr").unwrap();
        assert!([" > ", " < ", " == "].iter().any(|sign| expression.contains(sign)), "{name} is always on");
    }
    for line in OPERATIONS.lines().filter(|line| line.starts_with("| `Lockstep")) {
        let name = line.split('`').nth(1).unwrap();
        assert!(alerts.iter().any(|alert| alert.name == name), "docs/operations.md tells of {name}");
    }
}

#[test]
fn the_dashboard_is_one_that_grafana_takes() {
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let ids: BTreeSet<u64> = panels.iter().map(|panel| panel["id"].as_u64().unwrap()).collect();
    assert_eq!(ids.len(), panels.len(), "an id is there twice");
    let mut taken = BTreeSet::new();
    for panel in panels {
        assert!(panel["title"].as_str().is_some_and(|title| !title.is_empty()));
        let at = |field: &str| panel["gridPos"][field].as_u64().unwrap();
        assert!(at("x") + at("w") <= 24, "{}", panel["title"]);
        for (x, y) in
            (at("x")..at("x") + at("w")).flat_map(|x| (at("y")..at("y") + at("h")).map(move |y| (x, y)))
        {
            assert!(taken.insert((x, y)), "{} lies on another panel", panel["title"]);
        }
        for target in panel["targets"].as_array().into_iter().flatten() {
            assert_eq!(target["datasource"]["uid"], "${datasource}", "{}", panel["title"]);
        }
    }
}
