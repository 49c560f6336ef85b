//! ConfigMaps, Secrets and Namespaces as the API server sends them: one type for both kinds, with the fields we use.

use std::{collections::BTreeMap, fmt, marker::PhantomData, sync::Arc};

use serde::{
    Deserialize, Deserializer,
    de::{Error, MapAccess, SeqAccess, Visitor},
};

pub mod names;
pub mod patch;
pub mod time;
pub mod watched;

/// The most that etcd stores for one object.
const MAX_STORED_BYTES: usize = 3 << 19;
/// The smallest owner reference, entry of managedFields and finalizer that the API server accepts take this many bytes
/// in etcd. Lists are bounded by what fits: `{}` in JSON is much shorter than it is in memory.
const MIN_OWNER_BYTES: usize = 15;
const MIN_MANAGED_FIELDS_BYTES: usize = 18;
const MIN_FINALIZER_BYTES: usize = 5;

/// The kinds that can be mirrored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Deserialize, serde::Serialize)]
pub enum Kind {
    ConfigMap,
    Secret,
}

/// Identifies an object: kind, namespace and name.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Deserialize, serde::Serialize)]
pub struct ObjectKey {
    pub kind: Kind,
    pub namespace: Arc<str>,
    pub name: Arc<str>,
}

/// A ConfigMap or a Secret. It has no `Debug`: content must not reach a log.
#[derive(Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Object {
    pub metadata: Meta,
    #[serde(default, deserialize_with = "optional_map")]
    pub data: Option<BTreeMap<String, String>>,
    #[serde(default, deserialize_with = "optional_map")]
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
    #[serde(deserialize_with = "or_default")]
    pub name: String,
    #[serde(deserialize_with = "or_default")]
    pub generate_name: String,
    #[serde(deserialize_with = "or_default")]
    pub namespace: String,
    #[serde(deserialize_with = "or_default")]
    pub self_link: String,
    #[serde(deserialize_with = "or_default")]
    pub uid: String,
    #[serde(deserialize_with = "or_default")]
    pub resource_version: String,
    #[serde(deserialize_with = "map")]
    pub labels: BTreeMap<String, String>,
    #[serde(deserialize_with = "map")]
    pub annotations: BTreeMap<String, String>,
    #[serde(deserialize_with = "list::<_, _, MIN_OWNER_BYTES>")]
    pub owner_references: Vec<OwnerReference>,
    #[serde(deserialize_with = "list::<_, _, MIN_FINALIZER_BYTES>")]
    pub finalizers: Vec<String>,
    pub creation_timestamp: Option<String>,
    pub deletion_timestamp: Option<String>,
    #[serde(deserialize_with = "list::<_, _, MIN_MANAGED_FIELDS_BYTES>")]
    pub managed_fields: Vec<ManagedFields>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, serde::Serialize)]
#[serde(rename_all = "camelCase", default)]
pub struct OwnerReference {
    #[serde(deserialize_with = "or_default")]
    pub api_version: String,
    #[serde(deserialize_with = "or_default")]
    pub kind: String,
    #[serde(deserialize_with = "or_default")]
    pub name: String,
    #[serde(deserialize_with = "or_default")]
    pub uid: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub controller: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub block_owner_deletion: Option<bool>,
}

#[derive(Clone, Default, Deserialize)]
#[serde(default)]
pub struct ManagedFields {
    #[serde(deserialize_with = "or_default")]
    pub manager: String,
    #[serde(deserialize_with = "or_default")]
    pub time: String,
}

/// A Namespace, of which we use just the metadata.
#[derive(Clone, Deserialize)]
pub struct NamespaceObject {
    pub metadata: Meta,
}

/// Null is an empty text or list. Go writes an empty list and a time without a value as null, so the API server sends
/// null for a `time` in managedFields that somebody has written as `0001-01-01T00:00:00Z`.
pub(crate) fn or_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

/// A map, of texts for example. The API server sends null for a value of a Secret or of `binaryData` that was written
/// as null, and stores it as an empty one.
fn optional_map<'de, D, V>(deserializer: D) -> Result<Option<BTreeMap<String, V>>, D::Error>
where
    D: Deserializer<'de>,
    V: Deserialize<'de> + Default,
{
    struct MapVisitor<V>(PhantomData<V>);

    impl<'de, V: Deserialize<'de> + Default> Visitor<'de> for MapVisitor<V> {
        type Value = Option<BTreeMap<String, V>>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("an object")
        }

        fn visit_unit<E>(self) -> Result<Self::Value, E> {
            Ok(None)
        }

        fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Self::Value, A::Error> {
            let mut map = BTreeMap::new();
            while let Some((key, value)) = entries.next_entry::<_, Option<V>>()? {
                map.insert(key, value.unwrap_or_default());
            }
            Ok(Some(map))
        }
    }

    deserializer.deserialize_any(MapVisitor(PhantomData))
}

pub(crate) fn map<'de, D, V>(deserializer: D) -> Result<BTreeMap<String, V>, D::Error>
where
    D: Deserializer<'de>,
    V: Deserialize<'de> + Default,
{
    Ok(optional_map(deserializer)?.unwrap_or_default())
}

/// A list with no more elements than an object in etcd can have; null is an empty list, or an empty
/// element.
fn list<'de, D, T, const MIN_BYTES: usize>(deserializer: D) -> Result<Vec<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    struct ListVisitor<T, const MIN_BYTES: usize>(PhantomData<T>);

    impl<'de, T: Deserialize<'de> + Default, const MIN_BYTES: usize> Visitor<'de> for ListVisitor<T, MIN_BYTES> {
        type Value = Vec<T>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a list")
        }

        fn visit_unit<E>(self) -> Result<Self::Value, E> {
            Ok(Vec::new())
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Self::Value, A::Error> {
            let mut list = Vec::new();
            while let Some(element) = seq.next_element::<Option<T>>()? {
                if list.len() == MAX_STORED_BYTES / MIN_BYTES {
                    return Err(A::Error::custom("too many elements"));
                }
                list.push(element.unwrap_or_default());
            }
            Ok(list)
        }
    }

    deserializer.deserialize_any(ListVisitor::<T, MIN_BYTES>(PhantomData))
}

impl Kind {
    pub const ALL: [Self; 2] = [Self::ConfigMap, Self::Secret];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::ConfigMap => "ConfigMap",
            Self::Secret => "Secret",
        }
    }

    /// The resource name in URLs, RBAC and on the command line.
    pub const fn plural(self) -> &'static str {
        match self {
            Self::ConfigMap => "configmaps",
            Self::Secret => "secrets",
        }
    }
}

impl ObjectKey {
    pub fn new(kind: Kind, namespace: &str, name: &str) -> Self {
        Self { kind, namespace: namespace.into(), name: name.into() }
    }

    pub fn of(kind: Kind, meta: &Meta) -> Self {
        Self::new(kind, &meta.namespace, &meta.name)
    }

    /// Parses `namespace/name`, as in the `source` annotation of a companion.
    ///
    /// ```
    /// use lockstep_core::object::{Kind, ObjectKey};
    ///
    /// let key = ObjectKey::parse(Kind::Secret, "team-a/db").unwrap();
    /// assert_eq!((&*key.namespace, &*key.name), ("team-a", "db"));
    /// assert_eq!(ObjectKey::parse(Kind::Secret, "../db"), None);
    /// ```
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

/// A resourceVersion as a number: see [`Meta::version`]. One that is not a number counts as the newest.
pub(crate) fn version_number(resource_version: &str) -> u64 {
    resource_version.parse().unwrap_or(u64::MAX)
}

impl Meta {
    pub fn is_terminating(&self) -> bool {
        self.deletion_timestamp.is_some()
    }

    /// The resourceVersion as a number. Those of one resource compare as numbers: Kubernetes guarantees that since
    /// 1.35, and before it was so as well, because the API server writes the revision of etcd in decimal digits
    /// (`APIObjectVersioner` in k8s.io/apiserver, the same code from 1.30 on) and compares them in its own watch cache.
    /// Those of two resources are never compared: each may have an etcd of its own (`--etcd-servers-overrides`).
    ///
    /// On a server with other versions, every event counts as the newest. Lockstep may then plan with a state that one
    /// of its own writes has replaced, and that write fails on its precondition; none is wrong.
    pub fn version(&self) -> u64 {
        version_number(&self.resource_version)
    }

    /// Whether another object has the same labels and annotations, as far as their keys count.
    pub(crate) fn has_same_marks(&self, other: &Self, counts: impl Fn(&str) -> bool) -> bool {
        let same = |these: &BTreeMap<String, String>, those: &BTreeMap<String, String>| {
            let counts = |(key, _): &(&String, &String)| counts(key);
            these.iter().filter(counts).eq(those.iter().filter(counts))
        };
        same(&self.labels, &other.labels) && same(&self.annotations, &other.annotations)
    }

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

    #[test]
    fn every_field_may_be_null() {
        let owner = r#"{"apiVersion": null, "kind": null, "name": null, "uid": null, "controller": null}"#;
        let metadata = format!(
            r#"{{"name": null, "namespace": null, "uid": null, "resourceVersion": null, "labels": {{"a": null}},
            "annotations": null, "ownerReferences": [{owner}, null], "finalizers": [null], "creationTimestamp": null,
            "deletionTimestamp": null, "managedFields": [{{"manager": null, "time": null}}, null]}}"#
        );
        let object = format!(
            r#"{{"metadata": {metadata}, "data": {{"a": null}}, "binaryData": null, "type": null, "immutable": null}}"#
        );
        let object: Object = serde_json::from_str(&object).map_err(|error| error.to_string()).ok().unwrap();
        assert_eq!(object.metadata.managed_fields[0].time, "");
        assert_eq!(object.metadata.owner_references, [OwnerReference::default(), OwnerReference::default()]);
        assert_eq!(object.data.unwrap()["a"], "");
    }
}
