//! Between the model's objects and ours.

use std::collections::BTreeMap;

use model::Key;

use crate::testing::store::Place;
use lockstep_core::object::{Kind, Meta, Object, ObjectKey, OwnerReference};

pub(crate) fn to_model_key(at: &Place) -> Key {
    match at {
        Place::Namespace(name) => Key::namespace(name),
        Place::Object(key) => {
            let kind = match key.kind {
                Kind::ConfigMap => model::Kind::ConfigMap,
                Kind::Secret => model::Kind::Secret,
            };
            Key::new(kind, &key.namespace, &key.name)
        }
    }
}

pub(crate) fn from_model_key(key: &Key) -> Place {
    let kind = match key.kind {
        model::Kind::Namespace => return Place::Namespace(key.name.as_str().into()),
        model::Kind::ConfigMap => Kind::ConfigMap,
        model::Kind::Secret => Kind::Secret,
    };
    Place::Object(ObjectKey::new(kind, &key.namespace, &key.name))
}

pub(crate) fn to_model(object: &Object) -> model::Object {
    let meta = &object.metadata;
    let owner = |owner: &OwnerReference| model::Owner {
        kind: owner.kind.clone(),
        name: owner.name.clone(),
        uid: owner.uid.clone(),
        controller: owner.controller == Some(true),
    };
    model::Object {
        labels: meta.labels.clone(),
        annotations: meta.annotations.clone(),
        owners: meta.owner_references.iter().map(owner).collect(),
        finalizers: meta.finalizers.clone(),
        data: object.data.clone().unwrap_or_default(),
        binary_data: object.binary_data.clone().unwrap_or_default(),
        type_: object.type_.clone(),
        immutable: object.immutable == Some(true),
        uid: meta.uid.clone(),
        version: meta.resource_version.clone(),
        terminating: meta.is_terminating(),
        managers: meta.managed_fields.iter().map(|entry| entry.manager.clone()).collect(),
    }
}

/// The API server sets what is left out here: names, timestamps and managers.
pub(crate) fn from_model(object: &model::Object) -> Object {
    let owner = |owner: &model::Owner| OwnerReference {
        api_version: "v1".to_owned(),
        kind: owner.kind.clone(),
        name: owner.name.clone(),
        uid: owner.uid.clone(),
        controller: Some(owner.controller),
        block_owner_deletion: None,
    };
    let some = |map: &BTreeMap<String, String>| (!map.is_empty()).then(|| map.clone());
    Object {
        metadata: Meta {
            labels: object.labels.clone(),
            annotations: object.annotations.clone(),
            owner_references: object.owners.iter().map(owner).collect(),
            finalizers: object.finalizers.clone(),
            resource_version: object.version.clone(),
            ..Meta::default()
        },
        data: some(&object.data),
        binary_data: some(&object.binary_data),
        type_: object.type_.clone(),
        immutable: object.immutable.then_some(true),
    }
}
