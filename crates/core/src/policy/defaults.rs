//! The annotation `<domain>/defaults`: the defaults that the webhook writes to a source, in a key of their own.
//!
//! The webhook recomputes the annotation on every write. If it wrote defaults into the keys that people write, nobody
//! could tell them from a person's choice, and a changed default would never reach the source.
//!
//! ```
//! use lockstep_core::policy::defaults::Defaults;
//!
//! let defaults = Defaults { protect: Some("all".to_owned()), ..Defaults::default() };
//! let text = defaults.to_annotation().unwrap();
//! assert_eq!(text, r#"{"protect":"all"}"#);
//! assert_eq!(Defaults::from_annotation(&text).unwrap(), defaults);
//! assert_eq!(Defaults::default().to_annotation(), None);
//! ```

use serde::{Deserialize, Serialize};

use super::list::MAX_LIST_BYTES;
use crate::{keys::Keys, object::Meta};

/// The maximum length of the annotation: two lists, of which JSON may write each byte as six (`\u000b`), and `protect`.
const MAX_BYTES: usize = 2 * 6 * MAX_LIST_BYTES + 256;

/// Default values of a source's annotations, as texts that [`super::Policy::parse`] checks like those of a person. The
/// order of the fields is their order in the annotation.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", default, deny_unknown_fields)]
pub struct Defaults {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_namespaces: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target_selector: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub protect: Option<String>,
}

/// Why the annotation cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum BadDefaults {
    #[error("it is longer than {MAX_BYTES} bytes; only the webhook writes it: remove it")]
    TooLong,
    #[error("only the webhook writes it, and this is not what it writes: remove it ({0})")]
    Json(#[from] serde_json::Error),
}

impl Defaults {
    pub fn from_annotation(text: &str) -> Result<Self, BadDefaults> {
        if text.len() > MAX_BYTES {
            return Err(BadDefaults::TooLong);
        }
        Ok(serde_json::from_str(text)?)
    }

    /// What is stamped on a source; nothing if it cannot be read.
    pub(crate) fn stamped(keys: &Keys, meta: &Meta) -> Self {
        let text = meta.annotations.get(&keys.defaults);
        text.and_then(|text| Self::from_annotation(text).ok()).unwrap_or_default()
    }

    /// None if there is nothing to write.
    pub fn to_annotation(&self) -> Option<String> {
        if *self == Self::default() { None } else { serde_json::to_string(self).ok() }
    }

    /// `target-namespaces` and `target-selector`. A source that sets one of them gets neither as a default.
    pub fn targets(&self) -> (Option<&str>, Option<&str>) {
        (self.target_namespaces.as_deref(), self.target_selector.as_deref())
    }

    pub(crate) fn has_targets(&self) -> bool {
        self.targets() != (None, None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn annotation_is_compact_and_in_a_fixed_order() {
        let all = Defaults {
            target_namespaces: Some(".,team-*".into()),
            target_selector: Some("env in (dev)".into()),
            protect: Some("none".into()),
        };
        let text = r#"{"target-namespaces":".,team-*","target-selector":"env in (dev)","protect":"none"}"#;
        assert_eq!(all.to_annotation().unwrap(), text);
        assert_eq!(Defaults::from_annotation(text).unwrap(), all);
    }

    #[test]
    fn text_that_the_webhook_does_not_write_is_an_error() {
        let long = format!(r#"{{"target-namespaces":"{}"}}"#, "x".repeat(250_000));
        for text in
            ["", "x", "1", r#"{"protect":1}"#, r#"{"adopt":"true"}"#, r#"{"protect":"all"} x"#, long.as_str()]
        {
            assert!(Defaults::from_annotation(text).is_err(), "{text:.40}");
        }
    }

    #[test]
    fn longest_valid_defaults_fit_in_the_annotation() {
        // A list is trimmed, so it may end in characters that JSON escapes.
        let list = Some(format!("a{}", "\u{b}".repeat(MAX_LIST_BYTES - 1)));
        let longest = Defaults {
            target_namespaces: list.clone(),
            target_selector: list,
            protect: Some("edits".into()),
        };
        let text = longest.to_annotation().unwrap();
        assert_eq!(Defaults::from_annotation(&text).unwrap(), longest);
    }
}
