//! Names and `prefix*` patterns in comma-separated lists of annotations and flags.

use std::{fmt, str::FromStr};

use super::list::{BadList, MAX_ITEMS, items};

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
    #[error(transparent)]
    List(#[from] BadList),
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
            None if text.is_empty() => Err(BadList::Empty.into()),
            None => Ok(Self::Exact(text.to_owned())),
            Some((prefix, "")) => Ok(Self::Prefix(prefix.to_owned())),
            Some(_) => Err(BadPattern::Star(text.to_owned())),
        }
    }
}

impl FromStr for Patterns {
    type Err = BadPattern;

    fn from_str(text: &str) -> Result<Self, BadPattern> {
        items(text, MAX_ITEMS)?.map(str::parse).collect::<Result<_, _>>().map(Self)
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
        assert_eq!(" , ".parse::<Patterns>(), Err(BadPattern::List(BadList::Empty)));
    }
}
