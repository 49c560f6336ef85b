//! The naming rules of Kubernetes, checked before a request reaches the API server.

use ring::digest::{SHA256, digest};

use crate::text::prefix;

/// How many bytes of a name that is too long for a label are kept in front of its hash.
const KEPT_BYTES: usize = 50;
/// How many bytes of the hash are shown, as two hex digits each.
const HASH_BYTES: usize = 6;

/// Whether a text is an RFC 1123 label, such as the name of a namespace.
///
/// ```
/// use lockstep_core::object::names::{is_label, is_subdomain};
///
/// assert!(is_label("team-a") && !is_label("team.a") && !is_label("Team"));
/// assert!(is_subdomain("team.a") && !is_subdomain("team_a"));
/// ```
pub fn is_label(text: &str) -> bool {
    text.len() <= 63 && is_dns(text) && !text.contains('.')
}

/// Whether a text is an RFC 1123 subdomain, such as the name of a ConfigMap or Secret.
pub fn is_subdomain(text: &str) -> bool {
    text.len() <= 253 && text.split('.').all(is_dns)
}

/// Whether a text is a label key: `name` or `prefix.example/name`.
pub fn is_label_key(text: &str) -> bool {
    match text.split_once('/') {
        Some((prefix, name)) => is_subdomain(prefix) && !name.is_empty() && is_label_value(name),
        None => !text.is_empty() && is_label_value(text),
    }
}

/// Whether a text is an annotation key: as a label key, but with a prefix in upper or lower case.
///
/// ```
/// use lockstep_core::object::names::{is_annotation_key, is_label_key};
///
/// assert!(is_annotation_key("Example.com/a") && !is_label_key("Example.com/a"));
/// ```
pub fn is_annotation_key(text: &str) -> bool {
    is_label_key(&text.to_lowercase())
}

/// Whether a text is the value of a label, which may be empty.
pub fn is_label_value(text: &str) -> bool {
    text.is_empty() || (text.len() <= 63 && is_made_of(text, |c| c.is_ascii_alphanumeric(), &['-', '_', '.']))
}

/// The name of an object as the value of a label. A name may have 253 characters and the value of a label 63: of a
/// longer one, the first 50 are kept, followed by `-` and the first 12 hex digits of its SHA-256.
pub(crate) fn label_value_of(name: &str) -> String {
    if is_label_value(name) {
        return name.to_owned();
    }
    let hash = digest(&SHA256, name.as_bytes());
    let hex: String = hash.as_ref().iter().take(HASH_BYTES).map(|byte| format!("{byte:02x}")).collect();
    format!("{}-{hex}", prefix(name, KEPT_BYTES))
}

/// Whether a text is a key in `data` of a ConfigMap or Secret.
pub fn is_data_key(text: &str) -> bool {
    !matches!(text, "" | "." | "..")
        && text.len() <= 253
        && !text.starts_with("..")
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
}

fn is_dns(text: &str) -> bool {
    is_made_of(text, |c| c.is_ascii_lowercase() || c.is_ascii_digit(), &['-', '.'])
}

/// Whether a text has only such letters, and these others between them.
fn is_made_of(text: &str, is_letter: fn(char) -> bool, others: &[char]) -> bool {
    text.starts_with(is_letter)
        && text.ends_with(is_letter)
        && text.chars().all(|c| is_letter(c) || others.contains(&c))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn long_name_becomes_its_first_fifty_characters_and_a_hash_that_sha256sum_prints() {
        assert_eq!(label_value_of(&"a".repeat(63)), "a".repeat(63));
        // printf %s "$name" | sha256sum | cut -c1-12
        assert_eq!(label_value_of(&"a".repeat(64)), format!("{}-ffe054fe7ae0", "a".repeat(50)));
        assert_eq!(label_value_of(&"a".repeat(253)), format!("{}-32859a3ab65a", "a".repeat(50)));
    }

    proptest! {
        #[test]
        fn every_name_of_an_object_becomes_a_label_value(
            name in "[a-z0-9]([-a-z0-9]{0,60}[a-z0-9])?([.][a-z0-9]([-a-z0-9]{0,60}[a-z0-9])?){0,3}",
        ) {
            prop_assume!(is_subdomain(&name));
            let value = label_value_of(&name);
            prop_assert!(is_label_value(&value), "{value}");
            prop_assert_eq!(value == name.as_str(), name.len() <= 63);
        }
    }
}
