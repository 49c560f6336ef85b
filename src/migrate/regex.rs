//! PURE. Regular expressions for names of namespaces, as patterns that match exactly the same names.
//!
//! A name has only `a-z`, `0-9` and `-`, and neither begins nor ends with `-`. So `team-.+` is `team-*`, and
//! `team-(a|b)` is two names. What no list of patterns says exactly is an error: a pattern that matches more would copy
//! content to places that its owner left out.

use crate::policy::{
    list::MAX_ITEMS,
    pattern::{Pattern, any_matches},
};

/// What a name of a namespace is made of.
const ALPHABET: &str = "abcdefghijklmnopqrstuvwxyz0123456789-";
/// A set such as `[0-9]` becomes one name for each of its characters. Longer lists are not what people want to read.
const MAX_SET: usize = 10;

/// How a tool applies a regular expression to a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// kubernetes-replicator: Go's syntax. `^` and `$` are added around the whole text, not around each alternative: `a|b`
    /// matches every name that begins with `a` or ends with `b`.
    Go,
    /// Reflector: .NET's syntax. The first match must be as long as the name, and an earlier alternative wins: `a|ab` does
    /// not match `ab`.
    DotNet,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "no pattern says exactly what the regular expression `{item}` says: write target-namespaces or target-selector \
     yourself"
)]
pub struct NotSimple {
    pub item: String,
}

/// The patterns that match the same names as a comma-separated list of regular expressions.
pub fn patterns(dialect: Dialect, list: &str) -> Result<Vec<Pattern>, NotSimple> {
    let mut patterns = Vec::new();
    for item in list.split(',').map(str::trim) {
        // Between `^` and `$` that Go adds, an empty text matches only an empty name. .NET's list has no empty items.
        if item.is_empty() {
            continue;
        }
        let found = item_patterns(dialect, item).ok_or_else(|| NotSimple { item: item.to_owned() })?;
        for pattern in found {
            if !patterns.contains(&pattern) {
                patterns.push(pattern);
            }
        }
    }
    Ok(patterns)
}

/// The patterns that match what both lists match; none if no patterns say that exactly.
#[must_use]
pub fn intersection(one: &[Pattern], other: &[Pattern]) -> Option<Vec<Pattern>> {
    let mut both: Vec<Pattern> = Vec::new();
    for (a, b) in one.iter().flat_map(|a| other.iter().map(move |b| (a, b))) {
        let common = if b.covers(a) {
            a
        } else if a.covers(b) {
            b
        } else if a.is_name() || b.is_name() || diverge(a.prefix(), b.prefix()) {
            continue;
        } else {
            return None;
        };
        if !both.contains(common) {
            both.push(common.clone());
        }
    }
    Some(both)
}

/// Whether every name that the patterns `inner` match is matched by one of `outer`. `false` may also mean that one of
/// them does not tell.
#[must_use]
pub fn cover(outer: &[Pattern], inner: &[Pattern]) -> bool {
    inner.iter().all(|pattern| outer.iter().any(|wide| wide.covers(pattern)))
}

/// Whether one of the patterns matches a name.
#[must_use]
pub fn matches(patterns: &[Pattern], name: &str) -> bool {
    any_matches(patterns, name)
}

fn diverge(one: &str, other: &str) -> bool {
    !one.starts_with(other) && !other.starts_with(one)
}

/// A part of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Piece {
    Char(char),
    /// Any characters, or none.
    Any,
    /// At least one character.
    Some,
    Start,
    End,
}

type Sequence = Vec<Piece>;

fn item_patterns(dialect: Dialect, item: &str) -> Option<Vec<Pattern>> {
    let anchored = match dialect {
        Dialect::Go => {
            let start = if item.starts_with('^') { "" } else { "^" };
            let end = if item.ends_with('$') { "" } else { "$" };
            format!("{start}{item}{end}")
        }
        Dialect::DotNet => item.to_owned(),
    };
    let mut parser = Parser { rest: &anchored };
    let sequences = parser.alternation()?;
    if !parser.rest.is_empty() {
        return None;
    }
    let alternatives =
        sequences.iter().map(|sequence| alternative(dialect, sequence)).collect::<Option<Vec<_>>>()?;
    if dialect == Dialect::DotNet && !is_first_match_whole(&alternatives) {
        return None;
    }
    Some(alternatives.into_iter().map(|alternative| Pattern::new(&alternative.pattern)).collect())
}

struct Alternative {
    pattern: String,
    /// It ends with `$`.
    is_end_anchored: bool,
}

/// The alternatives are tried in order, and the first match counts, however short. So no alternative may match just the
/// beginning of a name that a later one matches as a whole.
fn is_first_match_whole(alternatives: &[Alternative]) -> bool {
    let hides = |first: &Alternative, later: &Alternative| {
        let (first, later) = (Pattern::new(&first.pattern), Pattern::new(&later.pattern));
        match first.is_name() && later.is_name() {
            true => first != later && later.as_str().starts_with(first.as_str()),
            false => !diverge(first.prefix(), later.prefix()),
        }
    };
    alternatives.iter().enumerate().all(|(n, first)| {
        first.is_end_anchored
            || first.pattern.ends_with('*')
            || !alternatives[n + 1..].iter().any(|later| hides(first, later))
    })
}

/// A sequence as a pattern.
fn alternative(dialect: Dialect, sequence: &[Piece]) -> Option<Alternative> {
    let (is_start_anchored, sequence) = match sequence.split_first() {
        Some((Piece::Start, rest)) => (true, rest),
        _ => (false, sequence),
    };
    let (is_end_anchored, sequence) = match sequence.split_last() {
        Some((Piece::End, rest)) => (true, rest),
        _ => (false, sequence),
    };
    // An expression that matches only the empty text matches no name.
    if sequence.is_empty() && (dialect == Dialect::DotNet || (is_start_anchored && is_end_anchored)) {
        return None;
    }
    let open = |is_anchored: bool| (dialect == Dialect::Go && !is_anchored).then_some(Piece::Any);
    let pieces =
        open(is_start_anchored).into_iter().chain(sequence.iter().copied()).chain(open(is_end_anchored));
    let mut merged: Vec<Piece> = Vec::new();
    for piece in pieces {
        match (merged.last_mut(), piece) {
            (_, Piece::Start | Piece::End) => return None,
            (Some(Piece::Some), Piece::Some) => return None,
            (Some(Piece::Any | Piece::Some), Piece::Any) => {}
            (Some(last @ Piece::Any), Piece::Some) => *last = Piece::Some,
            _ => merged.push(piece),
        }
    }
    let hyphen = |at: Option<usize>| at.and_then(|at| merged.get(at)) == Some(&Piece::Char('-'));
    let mut pattern = String::new();
    for (n, piece) in merged.iter().enumerate() {
        match piece {
            Piece::Char(c) => pattern.push(*c),
            Piece::Any => pattern.push('*'),
            // No name is empty, begins with `-` or ends with it.
            Piece::Some
                if merged.len() == 1
                    || (n == 0 && hyphen(Some(1)))
                    || (n + 1 == merged.len() && hyphen(n.checked_sub(1))) =>
            {
                pattern.push('*');
            }
            Piece::Some | Piece::Start | Piece::End => return None,
        }
    }
    Some(Alternative { pattern, is_end_anchored })
}

/// What one atom of an expression stands for.
enum Atom {
    /// The sequences of a group, in the order in which they are tried.
    Group(Vec<Sequence>),
    /// One of these characters.
    Set(Vec<char>),
    Anchor(Piece),
}

/// A parser for the part of the syntax that patterns can say; `None` for everything else.
struct Parser<'a> {
    rest: &'a str,
}

impl Parser<'_> {
    fn next(&mut self) -> Option<char> {
        let c = self.rest.chars().next()?;
        self.rest = &self.rest[c.len_utf8()..];
        Some(c)
    }

    fn take(&mut self, text: &str) -> bool {
        self.rest.strip_prefix(text).map(|rest| self.rest = rest).is_some()
    }

    /// Sequences in the order in which they are tried.
    fn alternation(&mut self) -> Option<Vec<Sequence>> {
        let mut sequences = self.sequence()?;
        while self.take("|") {
            sequences.extend(self.sequence()?);
        }
        (sequences.len() <= MAX_ITEMS).then_some(sequences)
    }

    fn sequence(&mut self) -> Option<Vec<Sequence>> {
        let mut sequences: Vec<Sequence> = vec![Vec::new()];
        while !self.rest.is_empty() && !self.rest.starts_with(['|', ')']) {
            let options = self.quantified()?;
            if sequences.len() * options.len() > MAX_ITEMS {
                return None;
            }
            let longer = |head: &Sequence| {
                let head = head.clone();
                options.iter().map(move |tail| [head.as_slice(), tail].concat()).collect::<Vec<_>>()
            };
            sequences = sequences.iter().flat_map(longer).collect();
        }
        Some(sequences)
    }

    /// An atom with its quantifier.
    fn quantified(&mut self) -> Option<Vec<Sequence>> {
        let atom = self.atom()?;
        let is_full = matches!(&atom, Atom::Set(set) if ALPHABET.chars().all(|c| set.contains(&c)));
        let quantifier = self.rest.chars().next().filter(|c| matches!(c, '*' | '+' | '?' | '{'));
        if quantifier.is_some() {
            self.next();
        }
        // A second one makes the first lazy or possessive.
        if self.rest.starts_with(['*', '+', '?', '{']) {
            return None;
        }
        let once = |atom: Atom| match atom {
            Atom::Group(sequences) => Some(sequences),
            Atom::Set(set) if set.len() <= MAX_SET => {
                Some(set.into_iter().map(|c| vec![Piece::Char(c)]).collect())
            }
            Atom::Set(_) => None,
            Atom::Anchor(piece) => Some(vec![vec![piece]]),
        };
        match quantifier {
            None => once(atom),
            Some('*') if is_full => Some(vec![vec![Piece::Any]]),
            Some('+') if is_full => Some(vec![vec![Piece::Some]]),
            Some('?') if !matches!(atom, Atom::Anchor(_)) => {
                let mut options = once(atom)?;
                options.push(Vec::new());
                Some(options)
            }
            Some(_) => None,
        }
    }

    fn atom(&mut self) -> Option<Atom> {
        let set = |c: char| Atom::Set(vec![c]);
        match self.next()? {
            '(' => {
                if self.rest.starts_with('?') && !self.take("?:") {
                    return None;
                }
                let sequences = self.alternation()?;
                self.take(")").then_some(Atom::Group(sequences))
            }
            '[' => self.set().map(Atom::Set),
            '.' => Some(Atom::Set(ALPHABET.chars().collect())),
            '\\' => match self.next()? {
                'd' => Some(Atom::Set(('0'..='9').collect())),
                c if c.is_ascii_punctuation() => literal(c).map(set),
                _ => None,
            },
            '^' => Some(Atom::Anchor(Piece::Start)),
            '$' => Some(Atom::Anchor(Piece::End)),
            c => literal(c).map(set),
        }
    }

    /// The rest of `[a-z0-9-]`, behind its first bracket.
    fn set(&mut self) -> Option<Vec<char>> {
        let is_negated = self.take("^");
        let mut listed: Vec<char> = Vec::new();
        loop {
            match self.next()? {
                ']' if listed.is_empty() => return None,
                ']' => break,
                '[' => return None,
                '\\' => match self.next()? {
                    'd' => listed.extend('0'..='9'),
                    '-' => listed.push('-'),
                    '.' => listed.push('.'),
                    _ => return None,
                },
                from => match self.rest.strip_prefix('-').and_then(|rest| rest.chars().next()) {
                    Some(to) if to != ']' => {
                        if !(from.is_ascii_alphanumeric() && to.is_ascii_alphanumeric() && from <= to) {
                            return None;
                        }
                        self.take("-");
                        self.next();
                        listed.extend(from..=to);
                    }
                    _ => listed.push(from),
                },
            }
        }
        let set: Vec<char> = ALPHABET.chars().filter(|c| listed.contains(c) != is_negated).collect();
        (!set.is_empty()).then_some(set)
    }
}

/// A character that stands for itself and that a name can have. One that no name can have (`_`, `A`) is left to a
/// person: the expression is hardly what its author meant.
fn literal(c: char) -> Option<char> {
    ALPHABET.contains(c).then_some(c)
}

#[cfg(test)]
mod tests;
