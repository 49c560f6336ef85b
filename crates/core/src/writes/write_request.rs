//! The requests that read and write companions. Every update names the version that it was decided on, every delete
//! the UID and version.
//!
//! A companion is sent as JSON: whole, for a create, and as a JSON patch, for an update or a release.
//! A JSON patch costs the API server as much as a PUT and needs nothing of the old object but what [`Companion`]
//! keeps of it. Server-side apply costs one and a half times as much and would leave foreign keys in the data.

use std::{collections::BTreeMap, sync::Arc};

use json_patch::{Patch as Operations, PatchOperation};
use serde::Serialize;
use serde_json::{Value, json, value::RawValue};

use crate::{
    keys::Keys,
    object::{Kind, ObjectKey, OwnerReference, patch},
    policy::{
        WhenRemoved,
        marks::{Marks, RemovableKeys},
    },
    world::{Companion, Payload, Source},
};

/// What is asked of the API server about one object.
#[derive(Debug)]
pub enum CompanionRequest {
    Get,
    /// Reads an object without its content.
    GetMetadata,
    /// Creates an object from its JSON.
    Create(Vec<u8>),
    Patch(Operations),
    /// Deletes just this object in just this version.
    Delete {
        uid: String,
        resource_version: String,
    },
}

impl CompanionRequest {
    pub fn delete(known: &Companion) -> Self {
        Self::Delete { uid: known.uid.to_string(), resource_version: known.resource_version.to_string() }
    }

    pub const fn is_read(&self) -> bool {
        matches!(self, Self::Get | Self::GetMetadata)
    }
}

/// What a companion is written with.
pub struct WriteContent {
    pub source: Arc<Source>,
    payload: Arc<Payload>,
    marks: Marks,
}

impl WriteContent {
    /// `None` if the source is malformed: then no plan writes its companions.
    pub fn new(keys: &Keys, source: Arc<Source>, payload: Arc<Payload>) -> Option<Self> {
        let marks = source.expected_marks(keys, payload.copied.clone())?;
        Some(Self { source, payload, marks })
    }
}

/// Content is spliced in as it was packed, not parsed again.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Body<'a> {
    api_version: &'static str,
    kind: &'static str,
    metadata: BodyMeta<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    data: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    binary_data: Option<&'a RawValue>,
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    type_: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    immutable: Option<bool>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct BodyMeta<'a> {
    namespace: &'a str,
    name: &'a str,
    labels: &'a BTreeMap<String, String>,
    annotations: &'a BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    owner_references: Vec<OwnerReference>,
}

/// The companion of a source, for a create.
pub fn create(WriteContent { source, payload, marks }: &WriteContent, at: &ObjectKey) -> Vec<u8> {
    let content = &payload.content;
    let Marks { labels, annotations } = marks;
    serde_json::to_vec(&Body {
        api_version: "v1",
        kind: at.kind.as_str(),
        metadata: BodyMeta {
            namespace: &at.namespace,
            name: &at.name,
            labels,
            annotations,
            owner_references: source.expected_owners(&at.namespace),
        },
        data: content.data.as_deref(),
        binary_data: content.binary.as_deref(),
        type_: content.type_.as_deref(),
        immutable: content.immutable.then_some(true),
    })
    .unwrap_or_else(|_| unreachable!("it is JSON"))
}

/// Replaces content and marks of a companion in a known state; what others added stays.
///
/// `add` replaces what is there; a null value removes a field.
pub fn update(
    WriteContent { source, payload, marks }: &WriteContent,
    at: &ObjectKey,
    known: &Companion,
) -> Operations {
    let content = &payload.content;
    let mut ops = vec![patch::only_if_version(&known.resource_version.to_string())];
    if known.state.finalizers {
        ops.push(patch::add(&["metadata", "finalizers"], json!([])));
    }
    if known.state.terminating {
        return Operations(ops);
    }
    let raw = |raw: Option<&RawValue>| json!(raw);
    ops.push(patch::add(&["data"], raw(content.data.as_deref())));
    if at.kind == Kind::ConfigMap {
        ops.push(patch::add(&["binaryData"], raw(content.binary.as_deref())));
    }
    let immutable = if content.immutable { json!(true) } else { Value::Null };
    ops.push(patch::add(&["immutable"], immutable));
    let owners = source.expected_owners(&at.namespace);
    ops.push(patch::add(&["metadata", "ownerReferences"], json!(owners)));

    let none = RemovableKeys::default();
    let extras = known.state.extras.as_deref().unwrap_or(&none);
    set_map(&mut ops, "labels", &marks.labels, known.state.has_labels, &extras.labels);
    set_map(&mut ops, "annotations", &marks.annotations, known.state.has_annotations, &extras.annotations);
    Operations(ops)
}

/// Marks a companion in a known state as one that stays when its source is gone.
pub(crate) fn mark_to_stay(keys: &Keys, known: &Companion) -> Operations {
    let mut ops = vec![patch::only_if_version(&known.resource_version.to_string())];
    if !known.state.has_annotations {
        ops.push(patch::add(&["metadata", "annotations"], json!({})));
    }
    let keep = json!(WhenRemoved::Keep.as_str());
    ops.push(patch::add(&["metadata", "annotations", &keys.when_removed], keep));
    Operations(ops)
}

/// Takes every label and annotation under our domain off a companion in a known state, and its source off its owners.
/// Content, copied labels and annotations, and what others added stay.
///
/// `managed` goes, too, or an object that somebody labelled as a source would become one without a review.
pub fn release(keys: &Keys, known: &Companion) -> Operations {
    let mut ops = vec![patch::only_if_version(&known.resource_version.to_string())];
    if let Some(position) = known.state.source_owner {
        ops.push(patch::remove(&["metadata", "ownerReferences", &position.to_string()]));
    }
    let none = RemovableKeys::default();
    let extras = known.state.extras.as_deref().unwrap_or(&none);
    if known.state.has_labels {
        let [companion, source_namespace, source_name] = keys.companion_labels();
        let labels = [companion, source_namespace, source_name, &keys.managed];
        clear_map(&mut ops, keys, "labels", &labels, &extras.labels);
    }
    if known.state.has_annotations {
        clear_map(&mut ops, keys, "annotations", &keys.companion_annotations(), &extras.annotations);
    }
    Operations(ops)
}

/// Removes the marks, and those of `extras` that are under our domain. Whether a mark is there is not remembered, and a
/// patch fails if it removes an absent key: so each one is set first.
fn clear_map(ops: &mut Vec<PatchOperation>, keys: &Keys, map: &str, marks: &[&str], extras: &[String]) {
    let extras = extras.iter().map(String::as_str).filter(|key| keys.is_ours(key) && !marks.contains(key));
    for key in marks.iter().copied().chain(extras) {
        ops.push(patch::add(&["metadata", map, key], json!("")));
        ops.push(patch::remove(&["metadata", map, key]));
    }
}

/// Sets the wanted entries of a map, removes those of `extras` that are not wanted, and leaves all others alone.
fn set_map(
    ops: &mut Vec<PatchOperation>,
    map: &str,
    wanted: &BTreeMap<String, String>,
    exists: bool,
    extras: &[String],
) {
    if !exists {
        ops.push(patch::add(&["metadata", map], json!(wanted)));
        return;
    }
    let surplus = extras.iter().filter(|key| !wanted.contains_key(*key));
    ops.extend(surplus.map(|key| patch::remove(&["metadata", map, key])));
    ops.extend(wanted.iter().map(|(key, value)| patch::add(&["metadata", map, key], json!(value))));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{self, companion, read_companion, read_source};

    #[test]
    fn update_and_release_name_the_version_that_they_were_decided_on() {
        let source = testing::source("home", "colors").data("sky", "blue").object();
        let observed = read_source(Kind::ConfigMap, source);
        let draft = companion("away", "colors-synced").of("home/colors").version(7);
        let (at, known) = (draft.key(), read_companion(Kind::ConfigMap, draft.object()));
        let (known, keys) = (known.companion(), testing::keys());
        let content = WriteContent::new(&keys, observed.source.into(), observed.payload.unwrap());
        let update = update(&content.expect("a well-formed source"), &at, known);
        let only_this_version = json!({"op": "replace", "path": "/metadata/resourceVersion", "value": "7"});
        for operations in [update, release(&keys, known)] {
            assert_eq!(json!(operations)[0], only_this_version);
        }
    }
}
