//! ConfigMaps, Secrets and Namespaces as they come over the wire: one type for both kinds, only the fields we use.

use std::{collections::BTreeMap, fmt, sync::Arc};

use serde::Deserialize;

use crate::names;

/// The kinds that can be mirrored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Kind {
    ConfigMap,
    Secret,
}

/// Where an object lives: kind, namespace and name.
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

/// The part of `metadata` that matters here. Parsing `fieldsV1` would cost more than all the rest.
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

/// A Namespace: its metadata says all we need.
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

    /// Reads `namespace/name`, as in the `source` annotation of a companion.
    #[must_use]
    pub fn parse(kind: Kind, text: &str) -> Option<Self> {
        let (namespace, name) = text.split_once('/')?;
        // Anybody may have written it, and it ends up in URLs and logs.
        (names::is_label(namespace) && names::is_subdomain(name)).then(|| Self::new(kind, namespace, name))
    }
}

/// `namespace/name`, without the kind: what the `source` annotation holds and logs show.
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

    /// The resourceVersion as a number. Kubernetes guarantees that they compare as numbers since 1.35; a server
    /// whose versions are no numbers makes every event the newest.
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
    fn a_source_annotation_that_names_no_object_is_not_believed() {
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
