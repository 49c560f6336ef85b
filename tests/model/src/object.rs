//! ConfigMaps, Secrets and Namespaces as the model sees them.

use std::{collections::BTreeMap, fmt};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

pub type Strings = BTreeMap<String, String>;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Kind {
    ConfigMap,
    Secret,
    Namespace,
}

/// The name of an object; of a Namespace, `namespace` is empty.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Key {
    pub kind: Kind,
    pub namespace: String,
    pub name: String,
}

/// An object, without what nobody decides by. Values are test data: they may be printed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Object {
    pub labels: Strings,
    pub annotations: Strings,
    pub owners: Vec<Owner>,
    pub finalizers: Vec<String>,
    /// As in JSON: a Secret's values are base64.
    pub data: Strings,
    pub binary_data: Strings,
    /// Of a Secret.
    pub type_: Option<String>,
    pub immutable: bool,

    // The API server sets these.
    pub uid: String,
    pub version: String,
    pub terminating: bool,
    /// The field managers that have an entry in `managedFields`.
    pub managers: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Owner {
    pub kind: String,
    pub name: String,
    pub uid: String,
    pub controller: bool,
}

/// All objects of a cluster at one moment.
pub type Snapshot = BTreeMap<Key, Object>;

impl Kind {
    /// The kinds that Lockstep mirrors.
    pub const MIRRORED: [Self; 2] = [Self::ConfigMap, Self::Secret];

    #[must_use]
    pub const fn plural(self) -> &'static str {
        match self {
            Self::ConfigMap => "configmaps",
            Self::Secret => "secrets",
            Self::Namespace => "namespaces",
        }
    }

    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::ConfigMap => "ConfigMap",
            Self::Secret => "Secret",
            Self::Namespace => "Namespace",
        }
    }
}

impl Key {
    #[must_use]
    pub fn new(kind: Kind, namespace: &str, name: &str) -> Self {
        Self { kind, namespace: namespace.to_owned(), name: name.to_owned() }
    }

    #[must_use]
    pub fn namespace(name: &str) -> Self {
        Self::new(Kind::Namespace, "", name)
    }

    /// The URL path of the collection that it is in.
    #[must_use]
    pub fn collection(&self) -> String {
        match self.kind {
            Kind::Namespace => "/api/v1/namespaces".to_owned(),
            kind => format!("/api/v1/namespaces/{}/{}", self.namespace, kind.plural()),
        }
    }

    /// Its URL path.
    #[must_use]
    pub fn path(&self) -> String {
        format!("{}/{}", self.collection(), self.name)
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ", self.kind.as_str())?;
        if !self.namespace.is_empty() {
            write!(f, "{}/", self.namespace)?;
        }
        f.write_str(&self.name)
    }
}

impl Object {
    /// Reads an object from the API server's JSON.
    #[must_use]
    pub fn from_json(value: &Value) -> Self {
        let meta = &value["metadata"];
        let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
        let owner = |value: &Value| Owner {
            kind: text(&value["kind"]),
            name: text(&value["name"]),
            uid: text(&value["uid"]),
            controller: value["controller"] == true,
        };
        Self {
            labels: strings(&meta["labels"]),
            annotations: strings(&meta["annotations"]),
            owners: list(&meta["ownerReferences"]).iter().map(owner).collect(),
            finalizers: list(&meta["finalizers"]).iter().map(text).collect(),
            data: strings(&value["data"]),
            binary_data: strings(&value["binaryData"]),
            type_: value["type"].as_str().map(ToOwned::to_owned),
            immutable: value["immutable"] == true,
            uid: text(&meta["uid"]),
            version: text(&meta["resourceVersion"]),
            terminating: !meta["deletionTimestamp"].is_null(),
            managers: list(&meta["managedFields"]).iter().map(|entry| text(&entry["manager"])).collect(),
        }
    }

    /// The JSON of a request that creates or replaces it. With `version`, the request fails if the object has changed.
    #[must_use]
    pub fn to_json(&self, key: &Key) -> Value {
        let owner = |owner: &Owner| {
            json!({
                "apiVersion": "v1", "kind": owner.kind, "name": owner.name, "uid": owner.uid,
                "controller": owner.controller,
            })
        };
        let mut value = json!({
            "apiVersion": "v1",
            "kind": key.kind.as_str(),
            "metadata": {
                "name": key.name,
                "labels": self.labels,
                "annotations": self.annotations,
                "finalizers": self.finalizers,
                "ownerReferences": self.owners.iter().map(owner).collect::<Vec<_>>(),
            },
        });
        if key.kind != Kind::Namespace {
            value["metadata"]["namespace"] = json!(key.namespace);
        }
        // The API server takes an empty map for a change of what is immutable, even where there was none.
        for (field, map) in [("data", &self.data), ("binaryData", &self.binary_data)] {
            if !map.is_empty() {
                value[field] = json!(map);
            }
        }
        if key.kind == Kind::Secret {
            value["type"] = json!(self.type_);
        }
        if self.immutable {
            value["immutable"] = json!(true);
        }
        if !self.version.is_empty() {
            value["metadata"]["resourceVersion"] = json!(self.version);
        }
        value
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn strings(value: &Value) -> Strings {
    let none = Map::new();
    let map = value.as_object().unwrap_or(&none);
    map.iter().map(|(key, value)| (key.clone(), text(value))).collect()
}
