//! Puts values in the place of words of a text, all in one pass: what was put in is not looked at again.

/// Replaces every occurrence of each word by its value. Where two words begin at one place, the first given wins.
#[must_use]
pub fn substitute(text: &str, pairs: &[(&str, &str)]) -> String {
    let mut result = String::with_capacity(text.len());
    let mut rest = text;
    while let Some((at, word, value)) = first(rest, pairs) {
        result.push_str(&rest[..at]);
        result.push_str(value);
        rest = &rest[at + word.len()..];
    }
    result + rest
}

fn first<'a>(text: &str, pairs: &[(&'a str, &'a str)]) -> Option<(usize, &'a str, &'a str)> {
    let places = pairs.iter().filter_map(|(word, value)| Some((text.find(word)?, *word, *value)));
    places.min_by_key(|(at, ..)| *at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_that_holds_another_word_is_left_alone() {
        assert_eq!(substitute("a-b-a-c", &[("a", "b"), ("b", "a")]), "b-a-b-c");
        assert_eq!(substitute("abc", &[("ab", "x"), ("a", "y")]), "xc");
        assert_eq!(substitute("none", &[("a", "b")]), "none");
    }
}
