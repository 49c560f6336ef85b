//! ConfigMaps, Secrets and Namespaces as the API server sends them: one type for both kinds, with the fields we use.

use std::{collections::BTreeMap, fmt, sync::Arc};

use serde::Deserialize;

use crate::names;

/// The kinds that can be mirrored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    ConfigMap,
    Secret,
}

/// Identifies an object: kind, namespace and name.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ObjectKey {
    pub kind: Kind,
    pub namespace: Arc<str>,
    pub name: Arc<str>,
}

/// A ConfigMap or a Secret. It has no `Debug`: content must not reach a log.
#[derive(Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Object {
    pub metadata: Meta,
    #[serde(default)]
    pub data: Option<BTreeMap<String, String>>,
    #[serde(default)]
    pub binary_data: Option<BTreeMap<String, String>>,
    #[serde(default, rename = "type")]
    pub type_: Option<String>,
    #[serde(default)]
    pub immutable: Option<bool>,
}

/// The fields of `metadata` that we use. Parsing `fieldsV1` would cost more than the rest of the object.
#[derive(Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Meta {
    pub name: String,
    pub namespace: String,
    pub uid: String,
    pub resource_version: String,
    pub labels: BTreeMap<String, String>,
    pub annotations: BTreeMap<String, String>,
    pub owner_references: Vec<OwnerReference>,
    pub finalizers: Vec<String>,
    pub deletion_timestamp: Option<String>,
    pub managed_fields: Vec<ManagedFields>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, serde::Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct OwnerReference {
    pub api_version: String,
    pub kind: String,
    pub name: String,
    pub uid: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub controller: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub block_owner_deletion: Option<bool>,
}

#[derive(Clone, Default, Deserialize)]
#[serde(default)]
pub struct ManagedFields {
    pub manager: String,
    pub time: String,
}

/// A Namespace, of which we use just the metadata.
#[derive(Clone, Deserialize)]
pub struct NamespaceObject {
    pub metadata: Meta,
}

impl Kind {
    pub const ALL: [Self; 2] = [Self::ConfigMap, Self::Secret];

    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::ConfigMap => "ConfigMap",
            Self::Secret => "Secret",
        }
    }

    /// The resource name in URLs, RBAC and on the command line.
    #[must_use]
    pub const fn plural(self) -> &'static str {
        match self {
            Self::ConfigMap => "configmaps",
            Self::Secret => "secrets",
        }
    }
}

impl ObjectKey {
    #[must_use]
    pub fn new(kind: Kind, namespace: &str, name: &str) -> Self {
        Self { kind, namespace: namespace.into(), name: name.into() }
    }

    #[must_use]
    pub fn of(kind: Kind, meta: &Meta) -> Self {
        Self::new(kind, &meta.namespace, &meta.name)
    }

    /// Parses `namespace/name`, as in the `source` annotation of a companion.
    ///
    /// ```
    /// use lockstep::object::{Kind, ObjectKey};
    ///
    /// let key = ObjectKey::parse(Kind::Secret, "team-a/db").unwrap();
    /// assert_eq!((&*key.namespace, &*key.name), ("team-a", "db"));
    /// assert_eq!(ObjectKey::parse(Kind::Secret, "../db"), None);
    /// ```
    #[must_use]
    pub fn parse(kind: Kind, text: &str) -> Option<Self> {
        let (namespace, name) = text.split_once('/')?;
        // Validated, because anybody can write the annotation, and the key is used in URLs and logs.
        (names::is_label(namespace) && names::is_subdomain(name)).then(|| Self::new(kind, namespace, name))
    }
}

/// `namespace/name` without the kind, as in the `source` annotation and in logs.
impl fmt::Display for ObjectKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl Meta {
    #[must_use]
    pub fn is_terminating(&self) -> bool {
        self.deletion_timestamp.is_some()
    }

    /// The resourceVersion as a number. Kubernetes guarantees since 1.35 that they compare as numbers; on a server with
    /// other versions every event counts as the newest.
    #[must_use]
    pub fn version(&self) -> u64 {
        self.resource_version.parse().unwrap_or(u64::MAX)
    }

    #[must_use]
    pub fn controller(&self) -> Option<&OwnerReference> {
        self.owner_references.iter().find(|owner| owner.controller == Some(true))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_source_annotations_are_rejected() {
        assert!(ObjectKey::parse(Kind::ConfigMap, "home/colors.v1").is_some());
        for text in [
            "",
            "home",
            "home/",
            "/colors",
            "home/a/b",
            "home/ü x",
            "default?x=/y",
            "home/a\nb",
            "../secrets",
        ] {
            assert!(ObjectKey::parse(Kind::ConfigMap, text).is_none(), "{text:?}");
        }
    }
}
