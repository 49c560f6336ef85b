//! How people name a source on the command line: `namespace/name`, with `secret/` in front for a Secret.

use std::str::FromStr;

use lockstep_core::object::{Kind, ObjectKey, names};

/// A source; the namespace is that of the command if it has none.
#[derive(Clone)]
pub struct SourceName {
    kind: Kind,
    namespace: Option<String>,
    name: String,
}

impl SourceName {
    pub fn key(&self, default_namespace: &str) -> ObjectKey {
        ObjectKey::new(self.kind, self.namespace.as_deref().unwrap_or(default_namespace), &self.name)
    }
}

impl FromStr for SourceName {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let kind = |word: &str| match word.to_ascii_lowercase().as_str() {
            "configmap" | "configmaps" | "cm" => Some(Kind::ConfigMap),
            "secret" | "secrets" => Some(Kind::Secret),
            _ => None,
        };
        let split = text.split_once('/').and_then(|(word, rest)| Some((kind(word)?, rest)));
        let (kind, rest) = split.unwrap_or((Kind::ConfigMap, text));
        let (namespace, name) =
            rest.split_once('/').map_or((None, rest), |(namespace, name)| (Some(namespace), name));
        if namespace.is_some_and(|namespace| !names::is_label(namespace)) || !names::is_subdomain(name) {
            return Err("expected NAME, NAMESPACE/NAME or secret/NAMESPACE/NAME".to_owned());
        }
        Ok(Self { kind, namespace: namespace.map(str::to_owned), name: name.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn source_is_named_with_or_without_kind_and_namespace() {
        for (text, kind, namespace, name) in [
            ("c", Kind::ConfigMap, "here", "c"),
            ("home/c", Kind::ConfigMap, "home", "c"),
            ("secret/c", Kind::Secret, "here", "c"),
            ("cm/c", Kind::ConfigMap, "here", "c"),
            ("secret/home/c", Kind::Secret, "home", "c"),
            ("configmap/secret/c", Kind::ConfigMap, "secret", "c"),
        ] {
            let parsed: SourceName = text.parse().unwrap();
            assert_eq!(parsed.key("here"), ObjectKey::new(kind, namespace, name), "{text}");
        }
        for text in ["", "a/", "/a", "pod/home/c", "a/b/c/d", "Home/c", "home/C d"] {
            assert!(text.parse::<SourceName>().is_err(), "{text}");
        }
    }
}
