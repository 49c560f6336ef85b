//! For tests: a builder of objects, and a cluster in memory to try plans on.

pub mod cluster;
pub mod fuzz;
pub mod history;
pub mod queue_items;
mod temp_dir;

use std::sync::Arc;

pub use temp_dir::TempDir;

use crate::{
    keys::Keys,
    object::{Kind, ManagedFields, Meta, Object, ObjectKey, OwnerReference},
    policy::pattern::Patterns,
    world::{NamespaceRules, ObservedCompanion, ObservedSource, World},
};

/// How many bytes of payloads the world of a test keeps: all.
pub const SOURCE_CACHE: usize = 64 << 20;
pub const OWN_NAMESPACE: &str = "lockstep-system";

pub fn keys() -> Arc<Keys> {
    Arc::new(Keys::new("workshop.io", "-synced"))
}

pub fn world() -> World {
    world_with_source_cache(SOURCE_CACHE)
}

/// A world that keeps so many bytes of payloads.
pub fn world_with_source_cache(bytes: usize) -> World {
    World::new(keys(), rules(), bytes)
}

pub fn rules() -> NamespaceRules {
    NamespaceRules { own_namespace: OWN_NAMESPACE.to_owned(), excluded: Patterns::default() }
}

/// Reads an object as the watch of sources does.
pub fn read_source(kind: Kind, object: Object) -> ObservedSource {
    ObservedSource::read(&keys(), &rules(), kind, object)
}

/// Reads an object as the watch of companions does.
pub fn read_companion(kind: Kind, object: Object) -> ObservedCompanion {
    ObservedCompanion::read(&keys(), kind, object)
}

/// Builds an object. A label or annotation key without a slash is put under the domain of the tests.
#[derive(Clone)]
pub struct ObjectBuilder {
    pub kind: Kind,
    pub object: Object,
}

/// A ConfigMap that is neither source nor companion.
/// When test objects are created, and when terminating ones are deleted.
pub const CREATED: &str = "2026-01-01T00:00:00Z";
pub const DELETED: &str = "2026-01-01T00:00:10Z";

pub fn object(namespace: &str, name: &str) -> ObjectBuilder {
    let metadata = Meta {
        name: name.to_owned(),
        namespace: namespace.to_owned(),
        uid: format!("uid-of-{name}"),
        resource_version: "1".to_owned(),
        creation_timestamp: Some(CREATED.to_owned()),
        ..Meta::default()
    };
    let object = Object { metadata, data: None, binary_data: None, type_: None, immutable: None };
    ObjectBuilder { kind: Kind::ConfigMap, object }
}

pub fn source(namespace: &str, name: &str) -> ObjectBuilder {
    object(namespace, name).label("managed", "true")
}

/// An object with the companion label, and nothing else that a companion has.
pub fn companion(namespace: &str, name: &str) -> ObjectBuilder {
    object(namespace, name).label("companion", "true")
}

pub fn namespace(name: &str) -> ObjectBuilder {
    object("", name)
}

pub fn configmap(namespace: &str, name: &str) -> ObjectKey {
    ObjectKey::new(Kind::ConfigMap, namespace, name)
}

impl ObjectBuilder {
    pub fn data(mut self, key: &str, value: &str) -> Self {
        self.object.data.get_or_insert_default().insert(key.to_owned(), value.to_owned());
        self
    }

    pub fn binary(mut self, key: &str, value: &str) -> Self {
        self.object.binary_data.get_or_insert_default().insert(key.to_owned(), value.to_owned());
        self
    }

    pub fn label(mut self, key: &str, value: &str) -> Self {
        self.object.metadata.labels.insert(full(key), value.to_owned());
        self
    }

    pub fn annotate(mut self, key: &str, value: &str) -> Self {
        self.object.metadata.annotations.insert(full(key), value.to_owned());
        self
    }

    /// Names its source (`namespace/name`) in the annotation.
    pub fn of(self, source: &str) -> Self {
        self.annotate("source", source)
    }

    /// Makes it a Secret of this type.
    pub fn of_type(mut self, type_: &str) -> Self {
        self.kind = Kind::Secret;
        self.object.type_ = Some(type_.to_owned());
        self
    }

    pub fn immutable(mut self) -> Self {
        self.object.immutable = Some(true);
        self
    }

    pub fn finalizer(mut self, name: &str) -> Self {
        self.object.metadata.finalizers.push(name.to_owned());
        self
    }

    pub fn terminating(mut self) -> Self {
        self.object.metadata.deletion_timestamp = Some(DELETED.to_owned());
        self
    }

    pub fn controlled_by(mut self, kind: &str, uid: &str) -> Self {
        self.object.metadata.owner_references.push(OwnerReference {
            api_version: "v1".to_owned(),
            kind: kind.to_owned(),
            name: "owner".to_owned(),
            uid: uid.to_owned(),
            controller: Some(true),
            block_owner_deletion: None,
        });
        self
    }

    pub fn written_by(mut self, manager: &str) -> Self {
        let entry = ManagedFields { manager: manager.to_owned(), ..ManagedFields::default() };
        self.object.metadata.managed_fields.push(entry);
        self
    }

    pub fn uid(mut self, uid: &str) -> Self {
        self.object.metadata.uid = uid.to_owned();
        self
    }

    pub fn version(mut self, version: u64) -> Self {
        self.object.metadata.resource_version = version.to_string();
        self
    }

    pub fn key(&self) -> ObjectKey {
        ObjectKey::of(self.kind, &self.object.metadata)
    }

    pub fn object(self) -> Object {
        self.object
    }

    pub fn meta(&self) -> &Meta {
        &self.object.metadata
    }
}

/// The key with its domain: that of the tests unless it has one.
pub fn full(key: &str) -> String {
    if key.contains('/') { key.to_owned() } else { format!("workshop.io/{key}") }
}
