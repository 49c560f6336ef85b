//! Tests that alert rules and dashboard use metrics and labels that exist, in well-formed expressions.

use std::collections::BTreeSet;

use serde_json::Value;

use super::metrics::{CertificateRole, Metrics, ReviewResult};

const RULES: &str = include_str!("../../deploy/components/monitoring/rules.yaml");
const DASHBOARD: &str = include_str!("../../deploy/components/monitoring/dashboard.json");
const OPERATIONS: &str = include_str!("../../docs/operations.md");

/// Labels that Prometheus adds.
const TARGET_LABELS: [&str; 5] = ["cluster", "instance", "job", "namespace", "pod"];

/// The response of `/metrics` with a series of every metric: a family without series is left out.
fn every_series() -> String {
    let metrics = Metrics::new();
    metrics.reconciles.of("changed");
    metrics.writes.of("created");
    metrics.heals.of("deleted");
    metrics.troubles.of("fight");
    metrics.fight("somebody");
    metrics.watch_age.of("source configmaps");
    metrics.undecodable_objects.of("namespaces");
    metrics.watch_restarts.of("namespaces");
    metrics.api_call("create", None);
    metrics.review(ReviewResult::Denied("edit"));
    for role in [CertificateRole::Ca, CertificateRole::Leaf] {
        metrics.certificate_expiry.of(role);
        metrics.certificate_rotations.of(role);
    }
    metrics.webhook_configuration_missing.of("ValidatingWebhookConfiguration");
    metrics.render()
}

/// An alert rule as text. All rules are formatted alike, so no YAML parser is needed.
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

    /// The value of a field, with its continuation lines.
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

/// The expressions of all alerts and panels.
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

/// The metrics in an expression, and the labels that it selects or groups by.
fn metrics_and_labels(expression: &str) -> (BTreeSet<String>, BTreeSet<String>) {
    let (mut metrics, mut labels) = (BTreeSet::new(), BTreeSet::new());
    let tokens = tokens(expression);
    let mut closing = None;
    for (at, token) in tokens.iter().enumerate() {
        let next = tokens.get(at + 1);
        match token {
            Token::Sign('{') => closing = Some('}'),
            Token::Sign(sign) if Some(*sign) == closing => closing = None,
            Token::Word(word) if word == "by" || word == "on" => closing = Some(')'),
            Token::Word(word) if closing.is_some() => {
                labels.insert(word.clone());
            }
            Token::Word(word)
                if word.starts_with(|c: char| c.is_ascii_alphabetic())
                    && next != Some(&Token::Sign('('))
                    && next != Some(&Token::Word("by".into()))
                    && !["and", "bool", "or", "unless"].contains(&word.as_str()) =>
            {
                metrics.insert(word.clone());
            }
            _ => {}
        }
    }
    (metrics, labels)
}

#[test]
fn metrics_and_labels_of_an_expression_are_found() {
    let (metrics, labels) = metrics_and_labels(
        "sum by (le, pod) (rate(a_b{job=\"x{\",code=~\"5..\"}[10m])) or c - time() > 14 * 8 and on (instance) d",
    );
    assert_eq!(metrics, ["a_b", "c", "d"].map(String::from).into());
    assert_eq!(labels, ["code", "instance", "job", "le", "pod"].map(String::from).into());
}

#[test]
fn rules_and_panels_use_every_metric_and_only_metrics_that_exist() {
    let served = every_series();
    let names: BTreeSet<&str> = served
        .lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.split(['{', ' ']).next())
        .collect();
    let expressions = expressions();
    assert!(expressions.len() > 40, "{expressions:#?}");
    let mut used: BTreeSet<String> = BTreeSet::new();
    for expression in &expressions {
        let (metrics, labels) = metrics_and_labels(expression);
        assert!(!metrics.is_empty(), "{expression}");
        for metric in &metrics {
            assert!(names.contains(metric.as_str()), "{metric} is not served: {expression}");
        }
        let has = |label: &String| {
            let series = |line: &&str| metrics.iter().any(|metric| line.starts_with(metric.as_str()));
            let label_is_there =
                |line: &str| ["{", ","].iter().any(|before| line.contains(&format!("{before}{label}=")));
            TARGET_LABELS.contains(&label.as_str()) || served.lines().filter(series).any(label_is_there)
        };
        for label in &labels {
            assert!(has(label), "none of its metrics has the label {label}: {expression}");
        }
        used.extend(metrics);
    }
    // A metric in no rule and no panel is superfluous, or a panel is missing.
    for name in names {
        let part_of_a_histogram = name.ends_with("_sum") || name.ends_with("_count");
        assert!(part_of_a_histogram || used.contains(name), "{name} is in no rule and no panel");
    }
}

#[test]
fn label_values_in_expressions_exist() {
    let served = every_series();
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
fn expressions_have_balanced_brackets_and_select_one_job() {
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
        let (metrics, _) = metrics_and_labels(&expression);
        let selected = expression.matches("{job=\"lockstep-system/lockstep\"").count()
            + expression.matches("{cluster=~\"$cluster\",job=\"$job\"").count();
        assert!(selected >= metrics.len(), "a metric without a job selector: {expression}");
    }
}

#[test]
fn every_alert_has_severity_summary_description_runbook_and_documentation() {
    let alerts = Alert::all();
    assert!(alerts.len() >= 12);
    for alert in &alerts {
        let name = &alert.name;
        assert!(name.starts_with("Lockstep"), "{name}");
        let severity = alert.field("severity").unwrap();
        assert!(["critical", "warning"].contains(&severity.as_str()), "{name}: {severity}");
        assert!(alert.field("summary").is_some_and(|text| text.len() > 20), "{name}");
        assert!(alert.field("description").is_some_and(|text| text.len() > 60), "{name}");
        let anchor = format!("docs/operations.md#{}", name.to_lowercase());
        assert_eq!(alert.field("runbook_url"), Some(anchor), "{name}");
        assert!(
            OPERATIONS.contains(&format!("\n### {name}\n")),
            "docs/operations.md has no section about {name}"
        );
        // Held deletes happen when the hold ends, so this alert does not wait.
        assert_eq!(alert.field("for").is_none(), name == "LockstepDeletesHeld", "{name}");
        let expression = alert.field("expr").unwrap();
        assert!(
            [" > ", " < ", " == "].iter().any(|sign| expression.contains(sign)),
            "{name} compares nothing"
        );
    }
    for name in OPERATIONS.lines().filter_map(|line| line.strip_prefix("### ")) {
        if !name.starts_with("Lockstep") {
            continue;
        }
        assert!(
            alerts.iter().any(|alert| alert.name == name),
            "docs/operations.md documents {name}, which is no alert"
        );
    }
}

/// A ruler may see many clusters: an aggregation without this label takes them for one.
#[test]
fn aggregations_keep_the_cluster() {
    for expression in expressions() {
        let tokens = tokens(&expression);
        for (at, token) in tokens.iter().enumerate() {
            let is_aggregation =
                matches!(token, Token::Word(word) if ["sum", "max", "min", "count"].contains(&word.as_str()));
            if is_aggregation {
                let next: Vec<&Token> = tokens[at + 1..].iter().take(3).collect();
                let kept = [&Token::Word("by".into()), &Token::Sign('('), &Token::Word("cluster".into())];
                assert_eq!(next, kept, "{expression}");
            }
        }
    }
}

#[test]
fn dashboard_has_unique_ids_descriptions_and_no_overlapping_panels() {
    let dashboard: Value = serde_json::from_str(DASHBOARD).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    let ids: BTreeSet<u64> = panels.iter().map(|panel| panel["id"].as_u64().unwrap()).collect();
    assert_eq!(ids.len(), panels.len(), "two panels have the same id");
    let mut taken = BTreeSet::new();
    for panel in panels {
        assert!(panel["title"].as_str().is_some_and(|title| !title.is_empty()));
        let description = panel["description"].as_str().unwrap_or_default();
        assert!(description.len() > 15, "{} has no description", panel["title"]);
        let at = |field: &str| panel["gridPos"][field].as_u64().unwrap();
        assert!(at("x") + at("w") <= 24, "{}", panel["title"]);
        for (x, y) in
            (at("x")..at("x") + at("w")).flat_map(|x| (at("y")..at("y") + at("h")).map(move |y| (x, y)))
        {
            assert!(taken.insert((x, y)), "{} overlaps another panel", panel["title"]);
        }
        for target in panel["targets"].as_array().into_iter().flatten() {
            assert_eq!(target["datasource"]["uid"], "${datasource}", "{}", panel["title"]);
        }
    }
}
