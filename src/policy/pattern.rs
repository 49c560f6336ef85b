//! Names and `prefix*` patterns in comma-separated lists of annotations and flags.

use std::{fmt, str::FromStr};

/// An exact name, or every name that starts with a prefix.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Pattern {
    Exact(String),
    Prefix(String),
}

/// A comma-separated list of patterns. It matches a name that any of them matches.
///
/// ```
/// use lockstep::policy::pattern::Patterns;
///
/// let patterns: Patterns = "default, team-*".parse().unwrap();
/// assert!(patterns.matches("default") && patterns.matches("team-a"));
/// assert!(!patterns.matches("default-2"));
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Patterns(pub Vec<Pattern>);

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum BadPattern {
    #[error("the list is empty: remove it or add an item")]
    Empty,
    #[error("`{0}`: `*` is allowed only at the end, as in `team-*`")]
    Star(String),
}

impl Pattern {
    #[must_use]
    pub fn matches(&self, name: &str) -> bool {
        match self {
            Self::Exact(exact) => exact == name,
            Self::Prefix(prefix) => name.starts_with(prefix.as_str()),
        }
    }
}

impl Patterns {
    #[must_use]
    pub fn matches(&self, name: &str) -> bool {
        self.0.iter().any(|pattern| pattern.matches(name))
    }
}

impl FromStr for Pattern {
    type Err = BadPattern;

    fn from_str(text: &str) -> Result<Self, BadPattern> {
        match text.split_once('*') {
            None if text.is_empty() => Err(BadPattern::Empty),
            None => Ok(Self::Exact(text.to_owned())),
            Some((prefix, "")) => Ok(Self::Prefix(prefix.to_owned())),
            Some(_) => Err(BadPattern::Star(text.to_owned())),
        }
    }
}

impl FromStr for Patterns {
    type Err = BadPattern;

    /// Spaces around commas and a trailing comma are ignored; a list without items is an error.
    fn from_str(text: &str) -> Result<Self, BadPattern> {
        let patterns: Vec<Pattern> = items(text).map(str::parse).collect::<Result<_, _>>()?;
        if patterns.is_empty() { Err(BadPattern::Empty) } else { Ok(Self(patterns)) }
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exact(name) => f.write_str(name),
            Self::Prefix(prefix) => write!(f, "{prefix}*"),
        }
    }
}

/// The items of a comma-separated list, trimmed, without empty ones.
pub fn items(text: &str) -> impl Iterator<Item = &str> {
    text.split(',').map(str::trim).filter(|item| !item.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_matches_names_and_prefixes() {
        let patterns: Patterns = "a, team-*,".parse().unwrap();
        for (name, expected) in
            [("a", true), ("ab", false), ("team-", true), ("team-x", true), ("tea", false)]
        {
            assert_eq!(patterns.matches(name), expected, "{name}");
        }
        assert!("*".parse::<Patterns>().unwrap().matches("anything"));
    }

    #[test]
    fn star_before_the_end_and_empty_list_are_errors() {
        assert_eq!("a*b".parse::<Patterns>(), Err(BadPattern::Star("a*b".into())));
        assert_eq!(" , ".parse::<Patterns>(), Err(BadPattern::Empty));
    }
}
