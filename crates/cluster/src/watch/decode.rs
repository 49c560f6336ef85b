//! PURE. Decodes what a list or a watch shows, one object at a time. One that cannot be decoded is skipped: otherwise,
//! a user who may write a single object could stop the watch of all.

use kube::api::WatchEvent;
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Value, json};

/// An object that cannot be decoded. The fields are empty if they cannot be decoded either.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Undecodable {
    pub namespace: String,
    pub name: String,
    pub resource_version: String,
}

#[derive(Deserialize)]
struct Identified {
    #[serde(default)]
    metadata: Identity,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Identity {
    namespace: Value,
    name: Value,
    uid: Value,
    resource_version: Value,
}

/// Decodes an object of a list.
pub fn object<T: DeserializeOwned>(json: &[u8]) -> Result<T, Undecodable> {
    serde_json::from_slice(json).map_err(|_| {
        serde_json::from_slice::<Identified>(json).map(|object| object.undecodable()).unwrap_or_default()
    })
}

/// Decodes a line of a watch.
pub fn event<T: DeserializeOwned>(line: &[u8]) -> Result<WatchEvent<T>, Undecodable> {
    serde_json::from_slice(line).or_else(|_| match serde_json::from_slice::<WatchEvent<Identified>>(line) {
        // Which object was deleted is all that matters of it.
        Ok(WatchEvent::Deleted(object)) => {
            object.bare().map(WatchEvent::Deleted).ok_or_else(|| object.undecodable())
        }
        Ok(WatchEvent::Added(object) | WatchEvent::Modified(object)) => Err(object.undecodable()),
        Ok(WatchEvent::Bookmark(_) | WatchEvent::Error(_)) | Err(_) => Err(Undecodable::default()),
    })
}

impl Identified {
    fn undecodable(&self) -> Undecodable {
        let Identity { namespace, name, resource_version, .. } = &self.metadata;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        Undecodable { namespace: text(namespace), name: text(name), resource_version: text(resource_version) }
    }

    /// The object without anything else.
    fn bare<T: DeserializeOwned>(&self) -> Option<T> {
        let Identity { namespace, name, uid, resource_version } = &self.metadata;
        let metadata =
            json!({"namespace": namespace, "name": name, "uid": uid, "resourceVersion": resource_version});
        serde_json::from_value(json!({"metadata": metadata})).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_core::object::Object;

    #[test]
    fn undecodable_object_is_named_and_its_deletion_is_understood() {
        let metadata =
            json!({"namespace": "home", "name": "odd", "uid": "u", "resourceVersion": "9", "labels": 1});
        let line = |kind: &str| json!({"type": kind, "object": {"metadata": metadata}}).to_string();
        let expected = Undecodable {
            namespace: "home".to_owned(),
            name: "odd".to_owned(),
            resource_version: "9".to_owned(),
        };
        for kind in ["ADDED", "MODIFIED"] {
            assert_eq!(event::<Object>(line(kind).as_bytes()).err().as_ref(), Some(&expected));
        }
        let listed = json!({"metadata": metadata}).to_string();
        assert_eq!(object::<Object>(listed.as_bytes()).err(), Some(expected));
        let Ok(WatchEvent::Deleted(deleted)) = event::<Object>(line("DELETED").as_bytes()) else {
            panic!("not a deletion")
        };
        assert_eq!((&*deleted.metadata.name, &*deleted.metadata.uid), ("odd", "u"));
        for text in ["", "x", "[]", r#"{"type": "ADDED", "object": {"metadata": "x"}}"#] {
            assert_eq!(event::<Object>(text.as_bytes()).err(), Some(Undecodable::default()), "{text}");
        }
    }
}
