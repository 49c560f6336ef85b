//! Texts: bounds where other people choose the length, and words replaced by values.

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
pub fn some_of(names: &[String], max: usize, separator: &str) -> String {
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
pub fn substitute(text: &str, pairs: &[(&str, &str)]) -> String {
    let find = |word: &str, from: usize| text[from..].find(word).map(|at| from + at);
    // Where each word comes next.
    let mut next: Vec<Option<usize>> = pairs.iter().map(|(word, _)| find(word, 0)).collect();
    let (mut result, mut done) = (String::with_capacity(text.len()), 0);
    let first = |next: &[Option<usize>]| {
        let found = pairs.iter().zip(next).filter_map(|((word, value), at)| Some((word, value, (*at)?)));
        found.min_by_key(|(_, _, at)| *at)
    };
    while let Some((word, value, at)) = first(&next) {
        result.push_str(&text[done..at]);
        result.push_str(value);
        done = at + word.len();
        for (next, (word, _)) in next.iter_mut().zip(pairs) {
            if next.is_some_and(|at| at < done) {
                *next = find(word, done);
            }
        }
    }
    result + &text[done..]
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
