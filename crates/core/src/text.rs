//! Texts: bounds where other people choose the length, and words replaced by values.

use std::borrow::Borrow;

/// The first `max` characters of a text, with an ellipsis where something was cut off.
pub fn shorten(text: &str, max: usize) -> String {
    match text.char_indices().nth(max) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// The longest prefix of whole characters that has at most `max` bytes.
pub fn prefix(text: &str, max: usize) -> &str {
    &text[..text.floor_char_boundary(max)]
}

/// The first of these names, and how many more there are: `a, b and 3 more`.
pub fn some_of<S: Borrow<str>>(names: &[S], max: usize, separator: &str) -> String {
    let first = names[..names.len().min(max)].join(separator);
    if names.len() > max { format!("{first} and {} more", names.len() - max) } else { first }
}

/// `1 source`, `2 sources`.
pub fn counted(number: usize, what: &str) -> String {
    format!("{number} {what}{}", if number == 1 { "" } else { "s" })
}

/// Replaces every occurrence of each word by its value. Where two words match at the same place, the first given wins.
///
/// ```
/// use lockstep_core::text::substitute;
///
/// assert_eq!(substitute("x-y", &[("x", "y"), ("y", "z")]), "y-z");
/// ```
pub fn substitute(mut text: &str, pairs: &[(&str, &str)]) -> String {
    let mut result = String::with_capacity(text.len());
    while let Some(first) = text.chars().next() {
        let (first, _) = text.split_at(first.len_utf8());
        let found = pairs.iter().copied().find(|(word, _)| text.starts_with(word));
        let (word, value) = found.unwrap_or((first, first));
        result.push_str(value);
        text = &text[word.len()..];
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_cut_between_characters() {
        assert_eq!((shorten("größe", 3), shorten("größe", 5)), ("grö…".to_owned(), "größe".to_owned()));
        assert_eq!((prefix("größe", 3), prefix("größe", 4), prefix("größe", 99)), ("gr", "grö", "größe"));
    }

    #[test]
    fn inserted_values_are_not_replaced_again() {
        assert_eq!(substitute("a-b-a-c", &[("a", "b"), ("b", "a")]), "b-a-b-c");
        assert_eq!(substitute("abc", &[("ab", "x"), ("a", "y")]), "xc");
        assert_eq!(substitute("none", &[("a", "b")]), "none");
    }
}
