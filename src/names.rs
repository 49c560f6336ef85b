//! The naming rules of Kubernetes, checked before a request reaches the API server.

/// Whether a text is an RFC 1123 label, such as the name of a namespace.
///
/// ```
/// use lockstep::names::{is_label, is_subdomain};
///
/// assert!(is_label("team-a") && !is_label("team.a") && !is_label("Team"));
/// assert!(is_subdomain("team.a") && !is_subdomain("team_a"));
/// ```
#[must_use]
pub fn is_label(text: &str) -> bool {
    text.len() <= 63 && is_dns(text) && !text.contains('.')
}

/// Whether a text is an RFC 1123 subdomain, such as the name of a ConfigMap or Secret.
#[must_use]
pub fn is_subdomain(text: &str) -> bool {
    text.len() <= 253 && text.split('.').all(is_dns)
}

/// Whether a text is a label or annotation key: `name` or `prefix.example/name`.
#[must_use]
pub fn is_label_key(text: &str) -> bool {
    match text.split_once('/') {
        Some((prefix, name)) => is_subdomain(prefix) && !name.is_empty() && is_label_value(name),
        None => !text.is_empty() && is_label_value(text),
    }
}

/// Whether a text is the value of a label, which may be empty.
#[must_use]
pub fn is_label_value(text: &str) -> bool {
    let edge = |c: Option<char>| c.is_none_or(|c| c.is_ascii_alphanumeric());
    text.len() <= 63
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
        && edge(text.chars().next())
        && edge(text.chars().last())
}

/// Whether a text is a key in `data` of a ConfigMap or Secret.
#[must_use]
pub fn is_data_key(text: &str) -> bool {
    !matches!(text, "" | "." | "..")
        && text.len() <= 253
        && !text.starts_with("..")
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
}

fn is_dns(text: &str) -> bool {
    let edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
    text.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || matches!(c, '-' | '.'))
        && edge(text.chars().next())
        && edge(text.chars().last())
}
