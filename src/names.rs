//! The naming rules of Kubernetes that we check before the API server does.

/// A namespace's name: an RFC 1123 label.
#[must_use]
pub fn is_label(text: &str) -> bool {
    text.len() <= 63 && is_dns(text) && !text.contains('.')
}

/// The name of a ConfigMap or Secret: an RFC 1123 subdomain.
#[must_use]
pub fn is_subdomain(text: &str) -> bool {
    text.len() <= 253 && text.split('.').all(is_dns)
}

/// A label or annotation key: `name` or `prefix.example/name`.
#[must_use]
pub fn is_label_key(text: &str) -> bool {
    match text.split_once('/') {
        Some((prefix, name)) => is_subdomain(prefix) && !name.is_empty() && is_label_value(name),
        None => !text.is_empty() && is_label_value(text),
    }
}

/// A label's value, which may be empty.
#[must_use]
pub fn is_label_value(text: &str) -> bool {
    let edge = |c: Option<char>| c.is_none_or(|c| c.is_ascii_alphanumeric());
    text.len() <= 63
        && text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
        && edge(text.chars().next())
        && edge(text.chars().last())
}

/// A key in `data` of a ConfigMap or Secret.
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
