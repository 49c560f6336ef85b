//! PURE. Regular expressions for names of namespaces, as patterns that match exactly the same names.
//!
//! Supported are names, `.*`, `.+` beside a `-` at either end, and the anchors `^` and `$`: both tools read these
//! alike. Everything else is left to the person. A pattern that matches more than the expression would copy content to
//! namespaces that its owner left out.

use super::not_movable::NotMovable;
use lockstep_core::policy::pattern::Pattern;

/// The patterns for a comma-separated list of expressions in an annotation.
pub fn patterns(annotation: &'static str, list: &str) -> Result<Vec<Pattern>, NotMovable> {
    let items = list.split(',').map(str::trim).filter(|item| !item.is_empty());
    let unsupported = |item: &str| NotMovable::Expression { annotation, item: item.to_owned() };
    items.map(|item| pattern(item).ok_or_else(|| unsupported(item))).collect()
}

fn pattern(item: &str) -> Option<Pattern> {
    let item = item.strip_prefix('^').unwrap_or(item);
    let item = item.strip_suffix('$').unwrap_or(item);
    // No name is empty, or begins or ends with `-`, so in these places `.+` matches the same names as `.*`.
    let mut text = if item == ".+" { ".*".to_owned() } else { item.to_owned() };
    if let Some(rest) = text.strip_prefix(".+-") {
        text = format!(".*-{rest}");
    }
    if let Some(rest) = text.strip_suffix("-.+") {
        text = format!("{rest}-.*");
    }
    let literal = text.replace(".*", "");
    let is_literal = literal.chars().all(|c| matches!(c, 'a'..='z' | '0'..='9' | '-'));
    (is_literal && !text.is_empty()).then(|| Pattern::new(&text.replace(".*", "*")))
}

#[cfg(test)]
mod tests;
