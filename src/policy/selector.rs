//! Parses a label selector in the syntax of `kubectl -l`. kube matches selectors but has no parser.

use std::collections::BTreeSet;

use kube::core::{Expression, Selector};

use super::list::{BadList, MAX_ITEMS, check_length};
use crate::names;

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum BadSelector {
    #[error("an empty selector would match every namespace: if you want that, set target-namespaces to `*`")]
    Empty,
    #[error(
        "`{0}` is not a requirement such as `team=a`, `team!=a`, `team in (a,b)`, `team notin (a)`, `team`, `!team`"
    )]
    Requirement(String),
    #[error("`{0}` is not a label key")]
    Key(String),
    #[error("`{0}` is not a label value")]
    Value(String),
    #[error("{0} requirements, {MAX_ITEMS} are allowed: label the namespaces with what they have in common")]
    TooMany(usize),
    #[error(
        "more than {MAX_ITEMS} values in parentheses: label the namespaces with what they have in common"
    )]
    TooManyValues,
    #[error(transparent)]
    TooLong(#[from] BadList),
}

/// Parses `a=b,c!=d,e in (f,g),h notin (i),j,!k`.
///
/// ```
/// use std::collections::BTreeMap;
/// use kube::core::SelectorExt;
/// use lockstep::policy::selector::parse;
///
/// let selector = parse("env in (dev, test), !archived").unwrap();
/// let dev = BTreeMap::from([("env".to_owned(), "dev".to_owned())]);
/// assert!(selector.matches(&dev));
/// assert!(parse("env in dev").is_err());
/// ```
pub fn parse(text: &str) -> Result<Selector, BadSelector> {
    check_length(text)?;
    match requirements(text).count() {
        0 => return Err(BadSelector::Empty),
        1..=MAX_ITEMS => {}
        more => return Err(BadSelector::TooMany(more)),
    }
    let mut values_left = MAX_ITEMS;
    requirements(text).map(|requirement| expression(requirement, &mut values_left)).collect()
}

/// Splits at commas outside of parentheses.
fn requirements(text: &str) -> impl Iterator<Item = &str> {
    let mut depth = 0_u32;
    text.split(move |c| {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ => {}
        }
        c == ',' && depth == 0
    })
    .map(str::trim)
    .filter(|requirement| !requirement.is_empty())
}

/// `values_left` is how many values may yet come in parentheses.
fn expression(text: &str, values_left: &mut usize) -> Result<Expression, BadSelector> {
    if let Some(key) = text.strip_prefix('!') {
        return Ok(Expression::DoesNotExist(label_key(key)?));
    }
    if let Some((key, value)) = text.split_once("!=") {
        return Ok(Expression::NotEqual(label_key(key)?, label_value(value)?));
    }
    if let Some((key, value)) = text.split_once("==").or_else(|| text.split_once('=')) {
        return Ok(Expression::Equal(label_key(key)?, label_value(value)?));
    }
    let bad = || BadSelector::Requirement(text.to_owned());
    let Some((head, list)) = text.split_once('(') else {
        return if text.contains(char::is_whitespace) {
            Err(bad())
        } else {
            Ok(Expression::Exists(label_key(text)?))
        };
    };
    let (key, operator) = head.trim().split_once(char::is_whitespace).ok_or_else(bad)?;
    let list = list.strip_suffix(')').filter(|list| !list.trim().is_empty()).ok_or_else(bad)?;
    *values_left = values_left.checked_sub(list.split(',').count()).ok_or(BadSelector::TooManyValues)?;
    let values = list.split(',').map(label_value).collect::<Result<BTreeSet<_>, _>>()?;
    match operator.trim() {
        "in" => Ok(Expression::In(label_key(key)?, values)),
        "notin" => Ok(Expression::NotIn(label_key(key)?, values)),
        _ => Err(bad()),
    }
}

fn label_key(text: &str) -> Result<String, BadSelector> {
    let text = text.trim();
    if names::is_label_key(text) { Ok(text.to_owned()) } else { Err(BadSelector::Key(text.to_owned())) }
}

fn label_value(text: &str) -> Result<String, BadSelector> {
    let text = text.trim();
    if names::is_label_value(text) { Ok(text.to_owned()) } else { Err(BadSelector::Value(text.to_owned())) }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use kube::core::SelectorExt;

    use super::*;

    fn matches(selector: &str, labels: &[(&str, &str)]) -> bool {
        let labels: BTreeMap<String, String> =
            labels.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
        parse(selector).unwrap().matches(&labels)
    }

    #[test]
    fn every_operator_matches_as_kubectl_does() {
        let team_a = &[("team", "a"), ("tier", "web")];
        for (selector, expected) in [
            ("team=a", true),
            ("team==a", true),
            ("team = b", false),
            ("team!=a", false),
            ("team!=b", true),
            ("other!=b", true),
            ("team in (a, b),tier=web", true),
            ("team in(b)", false),
            ("team notin (a)", false),
            ("other notin (a)", true),
            ("team", true),
            ("other", false),
            ("!other", true),
            ("!team", false),
            ("team,!other,tier in (web,db)", true),
        ] {
            assert_eq!(matches(selector, team_a), expected, "{selector}");
        }
    }

    #[test]
    fn malformed_selectors_are_errors() {
        for selector in
            ["", " , ", "a b", "a in b", "a in (b", "=b", "a/b/c=d", "a=-b", "team of (a)", "a in ()", "!"]
        {
            assert!(parse(selector).is_err(), "{selector:?}");
        }
    }

    #[test]
    fn selector_over_a_limit_is_an_error() {
        let list = |count: usize| (0..count).map(|n| format!("v{n}")).collect::<Vec<_>>().join(",");
        assert!(parse(&list(50)).is_ok());
        assert_eq!(parse(&list(51)).unwrap_err(), BadSelector::TooMany(51));
        assert!(parse(&format!("a in ({}),b notin ({})", list(25), list(25))).is_ok());
        let values = format!("a in ({}),b notin ({})", list(25), list(26));
        assert_eq!(parse(&values).unwrap_err(), BadSelector::TooManyValues);
        assert_eq!(parse(&"a".repeat(9000)).unwrap_err(), BadSelector::TooLong(BadList::TooLong));
    }
}
