//! Names with `*` in comma-separated lists of annotations and flags, and exclusions with `!`.

use std::{fmt, str::FromStr};

use super::list::{BadList, MAX_ITEMS, items};

/// A name in which each `*` stands for any characters, or none.
///
/// ```
/// use lockstep_core::policy::pattern::Pattern;
///
/// let pattern = Pattern::new("team-*-prod");
/// assert!(pattern.matches("team-a-prod") && !pattern.matches("team-prod"));
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pattern(String);

/// A comma-separated list of patterns. It matches a name that any of them matches, unless the name also matches one
/// behind a `!`. The order of the items does not matter.
///
/// ```
/// use lockstep_core::policy::pattern::Patterns;
///
/// let patterns: Patterns = "!team-x, default, team-*".parse().unwrap();
/// assert!(patterns.matches("default") && patterns.matches("team-a"));
/// assert!(!patterns.matches("default-2") && !patterns.matches("team-x"));
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Patterns {
    pub included: Vec<Pattern>,
    pub excluded: Vec<Pattern>,
}

impl Pattern {
    pub fn new(text: &str) -> Self {
        Self(text.to_owned())
    }

    /// Takes time proportional to the length of the name.
    pub fn matches(&self, name: &str) -> bool {
        let Some((first, rest)) = self.0.split_once('*') else { return self.0 == name };
        let (middle, last) = rest.rsplit_once('*').unwrap_or(("", rest));
        let Some(mut name) = name.strip_prefix(first).and_then(|name| name.strip_suffix(last)) else {
            return false;
        };
        // The first occurrence of each part leaves most of the name for the others, so no other has to be tried.
        middle.split('*').all(|part| {
            let found = name.find(part);
            name = found.map_or("", |start| &name[start + part.len()..]);
            found.is_some()
        })
    }

    /// Whether it matches everything that the other one matches: its own `*` must stand for each `*` of the other.
    pub fn covers(&self, other: &Self) -> bool {
        self.matches(&other.0)
    }

    /// It has no `*`.
    pub fn is_name(&self) -> bool {
        !self.0.contains('*')
    }

    /// The characters with which every match starts.
    pub fn prefix(&self) -> &str {
        self.0.split('*').next().unwrap_or_default()
    }

    /// A name that it matches, to check which characters the pattern has.
    pub fn example(&self) -> String {
        self.0.replace('*', "x")
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Patterns {
    pub fn matches(&self, name: &str) -> bool {
        any_matches(&self.included, name) && !any_matches(&self.excluded, name)
    }

    pub fn is_empty(&self) -> bool {
        self.included.is_empty()
    }

    pub fn iter(&self) -> impl Iterator<Item = &Pattern> {
        self.included.iter().chain(&self.excluded)
    }
}

/// Whether one of the patterns matches a name.
pub fn any_matches(patterns: &[Pattern], name: &str) -> bool {
    patterns.iter().any(|pattern| pattern.matches(name))
}

impl FromStr for Patterns {
    type Err = BadList;

    fn from_str(text: &str) -> Result<Self, BadList> {
        let mut patterns = Self::default();
        for item in items(text, MAX_ITEMS)? {
            match item.strip_prefix('!') {
                Some(excluded) => patterns.excluded.push(Pattern::new(excluded.trim())),
                None => patterns.included.push(Pattern::new(item)),
            }
        }
        if patterns.is_empty() { Err(BadList::OnlyExclusions) } else { Ok(patterns) }
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The list as it can be parsed again.
impl fmt::Display for Patterns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let included = self.included.iter().map(ToString::to_string);
        let excluded = self.excluded.iter().map(|pattern| format!("!{pattern}"));
        f.write_str(&included.chain(excluded).collect::<Vec<_>>().join(","))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn star_stands_for_any_characters_anywhere() {
        for (pattern, matching, others) in [
            ("a", &["a"][..], &["ab", "", "b"][..]),
            ("team-*", &["team-", "team-x"], &["tea", "steam-x"]),
            ("*-qa", &["-qa", "a-qa", "a-qa-qa"], &["qa", "a-qa-b"]),
            ("team-*-prod", &["team-a-prod", "team--prod", "team-a-b-prod"], &["team-prod", "team-a-prod-b"]),
            ("a*b*c", &["abc", "a-b-c", "abbcbc"], &["acb", "ab", "bc"]),
            ("*b*", &["b", "abc"], &["", "ac"]),
            ("aba*aba", &["abaaba", "aba-aba"], &["aba", "ababa"]),
            ("*", &["", "anything"], &[]),
            ("a**b", &["ab", "axb"], &["a"]),
        ] {
            let parsed = Pattern::new(pattern);
            assert!(matching.iter().all(|name| parsed.matches(name)), "{pattern}");
            assert!(!others.iter().any(|name| parsed.matches(name)), "{pattern}");
        }
    }

    #[test]
    fn exclusion_wins_whatever_the_order() {
        for text in ["*, !kube-*, !b", "!b,!kube-*,*", "! b, !kube-* , *"] {
            let patterns: Patterns = text.parse().unwrap();
            for (name, expected) in [("a", true), ("b", false), ("kube-system", false), ("bb", true)] {
                assert_eq!(patterns.matches(name), expected, "{text}: {name}");
            }
        }
    }

    #[test]
    fn list_without_items_or_with_exclusions_alone_is_an_error() {
        assert_eq!(" , ".parse::<Patterns>(), Err(BadList::Empty));
        assert_eq!("!a,!b".parse::<Patterns>(), Err(BadList::OnlyExclusions));
    }

    #[test]
    fn pattern_covers_what_it_matches_with_every_star() {
        for (wide, narrow) in
            [("*", "a*b"), ("team-*", "team-a*"), ("a*", "a*"), ("*-qa", "x-*-qa"), ("a*", "a")]
        {
            assert!(Pattern::new(wide).covers(&Pattern::new(narrow)), "{wide} {narrow}");
        }
        for (one, other) in [("a*", "*"), ("a*b", "a*"), ("a", "a*"), ("*a*", "*b*")] {
            assert!(!Pattern::new(one).covers(&Pattern::new(other)), "{one} {other}");
        }
    }

    /// Tries every number of characters for each star.
    fn matches_by_definition(pattern: &[u8], name: &[u8]) -> bool {
        match pattern.split_first() {
            None => name.is_empty(),
            Some((b'*', rest)) => (0..=name.len()).any(|n| matches_by_definition(rest, &name[n..])),
            Some((first, rest)) => name.first() == Some(first) && matches_by_definition(rest, &name[1..]),
        }
    }

    proptest! {
        #[test]
        fn match_is_what_the_definition_says(pattern in "[ab*]{0,8}", name in "[ab]{0,8}") {
            let expected = matches_by_definition(pattern.as_bytes(), name.as_bytes());
            prop_assert_eq!(Pattern::new(&pattern).matches(&name), expected);
        }

        #[test]
        fn what_covers_another_matches_all_of_its_names(wide in "[ab*]{0,5}", narrow in "[ab*]{0,5}", name in "[ab]{0,6}") {
            let (wide, narrow) = (Pattern::new(&wide), Pattern::new(&narrow));
            prop_assert!(!wide.covers(&narrow) || !narrow.matches(&name) || wide.matches(&name));
        }
    }
}
