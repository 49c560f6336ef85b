//! Replaces several words in a text at once: inserted values are not searched again.

/// Replaces every occurrence of each word by its value. Where two words match at the same place, the first given wins.
///
/// ```
/// use lockstep::substitute::substitute;
///
/// assert_eq!(substitute("x-y", &[("x", "y"), ("y", "z")]), "y-z");
/// ```
#[must_use]
pub fn substitute(text: &str, pairs: &[(&str, &str)]) -> String {
    let mut result = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((at, word, value)) = first_match(rest, pairs) {
        result.push_str(&rest[..at]);
        result.push_str(value);
        rest = &rest[at + word.len()..];
    }
    result + rest
}

fn first_match<'a>(text: &str, pairs: &[(&'a str, &'a str)]) -> Option<(usize, &'a str, &'a str)> {
    let matches = pairs.iter().filter_map(|(word, value)| Some((text.find(word)?, *word, *value)));
    matches.min_by_key(|(at, ..)| *at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn inserted_values_are_not_replaced_again() {
        assert_eq!(substitute("a-b-a-c", &[("a", "b"), ("b", "a")]), "b-a-b-c");
        assert_eq!(substitute("abc", &[("ab", "x"), ("a", "y")]), "xc");
        assert_eq!(substitute("none", &[("a", "b")]), "none");
    }
}
