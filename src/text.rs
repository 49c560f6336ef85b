//! Bounds for texts whose length other people choose.

/// The first `max` characters of a text, with an ellipsis where something was cut off.
#[must_use]
pub fn shorten(text: &str, max: usize) -> String {
    match text.char_indices().nth(max) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// The longest prefix of whole characters that has at most `max` bytes.
#[must_use]
pub fn prefix(text: &str, max: usize) -> &str {
    &text[..text.floor_char_boundary(max)]
}

/// The first of these names, and how many more there are: `a, b and 3 more`.
#[must_use]
pub fn some_of(names: &[String], max: usize, separator: &str) -> String {
    let first = names[..names.len().min(max)].join(separator);
    if names.len() > max { format!("{first} and {} more", names.len() - max) } else { first }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_cut_between_characters() {
        assert_eq!((shorten("größe", 3), shorten("größe", 5)), ("grö…".to_owned(), "größe".to_owned()));
        assert_eq!((prefix("größe", 3), prefix("größe", 4), prefix("größe", 99)), ("gr", "grö", "größe"));
    }
}
