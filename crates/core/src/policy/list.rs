//! Comma-separated lists in annotations, and their limits.
//!
//! Tenants choose these texts, and an annotation may have 256 KiB: 65,000 names, each an allocation of its own. So a
//! list is measured before anything of it is kept.

/// The maximum length of an annotation with a list or a selector.
pub(crate) const MAX_LIST_BYTES: usize = 8 * 1024;
/// The maximum of items in each list. Every item is compared with every namespace or label.
pub(crate) const MAX_ITEMS: usize = 50;
/// The maximum of items in the `keys` annotation. There is no pattern that would replace a long list of keys.
pub(crate) const MAX_KEYS: usize = 100;

#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum BadList {
    #[error("the list is empty: remove it or add an item")]
    Empty,
    #[error("it is longer than {MAX_LIST_BYTES} bytes")]
    TooLong,
    #[error("{found} items, {max} are allowed")]
    TooMany { found: usize, max: usize },
    #[error("it has only exclusions: add what they are excluded from, `*` for example")]
    OnlyExclusions,
}

impl From<BadList> for String {
    fn from(error: BadList) -> Self {
        error.to_string()
    }
}

/// Fails for a text that is too long to be parsed.
pub(crate) const fn check_length(text: &str) -> Result<(), BadList> {
    if text.len() > MAX_LIST_BYTES { Err(BadList::TooLong) } else { Ok(()) }
}

/// The items of a comma-separated list, trimmed, without empty ones. A list without items is an error.
pub fn items(text: &str, max: usize) -> Result<impl Iterator<Item = &str>, BadList> {
    check_length(text)?;
    let items = || text.split(',').map(str::trim).filter(|item| !item.is_empty());
    match items().count() {
        0 => Err(BadList::Empty),
        found if found > max => Err(BadList::TooMany { found, max }),
        _ => Ok(items()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str, max: usize) -> Result<Vec<&str>, BadList> {
        items(text, max).map(Iterator::collect)
    }

    #[test]
    fn spaces_and_empty_items_are_ignored() {
        assert_eq!(parse(" a, b,,c ,", 3), Ok(vec!["a", "b", "c"]));
        assert_eq!(parse(" , ", 3), Err(BadList::Empty));
    }

    #[test]
    fn list_over_a_limit_is_an_error() {
        assert_eq!(parse("a,b,c", 2), Err(BadList::TooMany { found: 3, max: 2 }));
        assert!(parse(&"x".repeat(MAX_LIST_BYTES), 1).is_ok());
        assert_eq!(parse(&"x".repeat(MAX_LIST_BYTES + 1), 1), Err(BadList::TooLong));
    }
}
