//! Parses a label selector in the syntax of `kubectl -l`. kube matches selectors but has no parser.

use std::collections::BTreeSet;

use kube_core::{Expression, Selector};

use super::{
    MAX_QUOTED_CHARS,
    list::{BadList, MAX_ITEMS, check_length},
};
use crate::{object::names, text::shorten};

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum BadSelector {
    #[error("an empty selector would match every namespace: if you want that, set target-namespaces to `*`")]
    Empty,
    #[error(
        "`{0}` is not a requirement such as `team=a`, `team!=a`, `team in (a,b)`, `team notin (a)`, `team`, `!team`"
    )]
    Requirement(String),
    #[error("there is nothing in front of a comma or behind the last one: remove the comma")]
    Nothing,
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
/// The grammar is that of `labels.Parse` in apimachinery, oddities included, except for `<` and `>`: an end-to-end test
/// compares the two. A selector that means something else here than for `kubectl -l` would copy to other namespaces
/// than its author saw.
///
/// ```
/// use std::collections::BTreeMap;
/// use kube_core::SelectorExt;
/// use lockstep_core::policy::selector::parse;
///
/// let selector = parse("env in (dev, test), !archived").unwrap();
/// let dev = BTreeMap::from([("env".to_owned(), "dev".to_owned())]);
/// assert!(selector.matches(&dev));
/// assert!(parse("env in dev").is_err());
/// ```
pub fn parse(text: &str) -> Result<Selector, BadSelector> {
    check_length(text)?;
    let mut parser = SelectorParser { rest: text, values_left: MAX_ITEMS };
    if parser.peek().is_none() {
        return Err(BadSelector::Empty);
    }
    let mut requirements = Vec::new();
    let mut found = 0;
    loop {
        let requirement = parser.requirement()?;
        found += 1;
        if found <= MAX_ITEMS {
            requirements.push(requirement);
        }
        if parser.next().is_none() {
            break;
        }
    }
    if found > MAX_ITEMS { Err(BadSelector::TooMany(found)) } else { Ok(requirements.into_iter().collect()) }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SelectorToken<'a> {
    Word(&'a str),
    /// `,`, `(`, `)`, `!`, `=`, `==`, `!=`, `<` or `>`.
    Symbol(&'a str),
}

const COMMA: SelectorToken<'static> = SelectorToken::Symbol(",");
const OPEN: SelectorToken<'static> = SelectorToken::Symbol("(");
const CLOSE: SelectorToken<'static> = SelectorToken::Symbol(")");

struct SelectorParser<'a> {
    /// What is not read yet.
    rest: &'a str,
    /// How many values may yet come in parentheses.
    values_left: usize,
}

impl<'a> SelectorParser<'a> {
    /// The next token, and what follows it.
    fn split(&self) -> Option<(SelectorToken<'a>, &'a str)> {
        // Not every white space of Unicode, which would be a part of a word for the API server.
        let rest = self.rest.trim_start_matches([' ', '\t', '\r', '\n']);
        let is_symbol = |c: char| matches!(c, '=' | '!' | '(' | ')' | ',' | '<' | '>');
        let symbol = match rest.chars().next()? {
            _ if rest.starts_with("==") || rest.starts_with("!=") => 2,
            first if is_symbol(first) => 1,
            _ => 0,
        };
        if symbol > 0 {
            let (symbol, rest) = rest.split_at(symbol);
            return Some((SelectorToken::Symbol(symbol), rest));
        }
        let end = rest.find(|c| is_symbol(c) || matches!(c, ' ' | '\t' | '\r' | '\n')).unwrap_or(rest.len());
        let (word, rest) = rest.split_at(end);
        Some((SelectorToken::Word(word), rest))
    }

    fn peek(&self) -> Option<SelectorToken<'a>> {
        self.split().map(|(token, _)| token)
    }

    fn next(&mut self) -> Option<SelectorToken<'a>> {
        let (token, rest) = self.split()?;
        self.rest = rest;
        Some(token)
    }

    /// The next token, if it is a word; otherwise an empty one.
    fn word(&mut self) -> &'a str {
        match self.split() {
            Some((SelectorToken::Word(word), rest)) => {
                self.rest = rest;
                word
            }
            _ => "",
        }
    }

    /// One requirement, which a comma or the end must follow.
    fn requirement(&mut self) -> Result<Expression, BadSelector> {
        let start = self.rest;
        let bad = || BadSelector::Requirement(shorten(up_to_comma(start).trim(), MAX_QUOTED_CHARS));
        let excluded = self.peek() == Some(SelectorToken::Symbol("!"));
        if excluded {
            self.next();
        }
        let key = match self.next() {
            Some(SelectorToken::Word(key)) => valid(key, names::is_label_key, BadSelector::Key)?,
            None | Some(COMMA) if !excluded => return Err(BadSelector::Nothing),
            _ => return Err(bad()),
        };
        let ends = |token: Option<SelectorToken>| token.is_none_or(|token| token == COMMA);
        let expression = match self.peek() {
            _ if excluded => Expression::DoesNotExist(key),
            token if ends(token) => Expression::Exists(key),
            Some(SelectorToken::Symbol(operator @ ("=" | "==" | "!="))) => {
                self.next();
                let value = valid(self.word(), names::is_label_value, BadSelector::Value)?;
                match operator {
                    "!=" => Expression::NotEqual(key, value),
                    _ => Expression::Equal(key, value),
                }
            }
            Some(SelectorToken::Word(operator @ ("in" | "notin"))) => {
                self.next();
                let values = self.values()?.ok_or_else(bad)?;
                match operator {
                    "in" => Expression::In(key, values),
                    _ => Expression::NotIn(key, values),
                }
            }
            _ => return Err(bad()),
        };
        if ends(self.peek()) { Ok(expression) } else { Err(bad()) }
    }

    /// `(a,b)`, of which each may be empty, so that `()` is the empty value. None if that is malformed.
    fn values(&mut self) -> Result<Option<BTreeSet<String>>, BadSelector> {
        let mut values = BTreeSet::new();
        if self.next() != Some(OPEN) {
            return Ok(None);
        }
        loop {
            let value = self.word();
            self.values_left = self.values_left.checked_sub(1).ok_or(BadSelector::TooManyValues)?;
            values.insert(valid(value, names::is_label_value, BadSelector::Value)?);
            match self.next() {
                Some(COMMA) => {}
                Some(CLOSE) => return Ok(Some(values)),
                _ => return Ok(None),
            }
        }
    }
}

/// The text up to the next comma outside of parentheses.
fn up_to_comma(text: &str) -> &str {
    let mut depth = 0_u32;
    let end = text.find(|c| {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ => {}
        }
        c == ',' && depth == 0
    });
    &text[..end.unwrap_or(text.len())]
}

fn valid(
    text: &str,
    is_valid: fn(&str) -> bool,
    bad: fn(String) -> BadSelector,
) -> Result<String, BadSelector> {
    if is_valid(text) { Ok(text.to_owned()) } else { Err(bad(shorten(text, MAX_QUOTED_CHARS))) }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use kube_core::SelectorExt;

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
        for selector in ["", " , ", "a b", "a in b", "a in (b", "=b", "a/b/c=d", "a=-b", "team of (a)", "!"] {
            assert!(parse(selector).is_err(), "{selector:?}");
        }
    }

    #[test]
    fn what_kubectl_refuses_is_refused_and_what_it_takes_is_taken() {
        for selector in ["a,", "a,,b", ",a", "a in (b) c", "a\u{a0}in (b)", "a\u{b}", "!a=b", "a<1", "in (a)"]
        {
            assert!(parse(selector).is_err(), "{selector:?}");
        }
        for selector in [
            "in in (in)",
            "notin",
            "a in (,)",
            "a in (b,,c)",
            "a in (b,,)",
            "a=,b!=",
            "! a",
            "a\tin\n(b)",
            "a in(b)",
        ] {
            assert!(parse(selector).is_ok(), "{selector:?}");
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
