//! What the targets about annotations share.

use std::collections::BTreeMap;

use crate::{object::names, testing::full};

/// The longest message about one annotation: what it quotes is cut.
pub(crate) const MAX_MESSAGE_CHARS: usize = 400;

/// The fields as annotations. The API server lets no other keys in.
pub(crate) fn annotations(fields: Vec<(String, String)>) -> BTreeMap<String, String> {
    let fields = fields.into_iter().map(|(key, value)| (full(&key), value));
    fields.filter(|(key, _)| names::is_annotation_key(key)).collect()
}

/// Whether a pattern with `*` matches: which prefixes of the name each part of the pattern can match.
pub(crate) fn glob(pattern: &str, name: &str) -> bool {
    let name: Vec<char> = name.chars().collect();
    let mut reached = vec![false; name.len() + 1];
    reached[0] = true;
    for c in pattern.chars() {
        let mut next = vec![false; name.len() + 1];
        for at in 0..=name.len() {
            let passes = if c == '*' {
                at > 0 && next[at - 1]
            } else {
                at > 0 && reached[at - 1] && name[at - 1] == c
            };
            next[at] = passes || (c == '*' && reached[at]);
        }
        reached = next;
    }
    reached[name.len()]
}
