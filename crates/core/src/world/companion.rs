//! A companion, reduced to its identity and digests: memory does not grow with content.

use std::sync::Arc;

use super::packed::{Uid, Version};
use crate::{
    keys::Keys,
    object::{Kind, Object, ObjectKey, OwnerReference},
    policy::{
        content::{Content, Digest, Hasher},
        marks::{self, Marks, RemovableKeys},
    },
};

/// What is kept of a companion: its identity and digests of its content and marks, never the content.
#[derive(Debug, Clone)]
pub struct Companion {
    pub uid: Uid,
    pub resource_version: Version,
    /// Shared with the companions that are in the same state: usually all of the same source.
    pub state: Arc<CompanionState>,
    /// The list, or the watch that followed it, that showed it last; zero when none has.
    pub(super) epoch: u32,
    /// The list during or after which we wrote it; zero when we did not.
    pub(super) written_epoch: u32,
}

/// What companions of one source have in common while they are in step.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct CompanionState {
    /// The source it belongs to, known by its UID or else named by its annotation.
    pub source: Option<ObjectKey>,
    /// The UID in its `source-uid` annotation, as a digest.
    pub source_uid: Option<Digest>,
    /// Its `source-checksum` annotation is that of its content: it was not edited since it was written.
    pub intact: bool,
    pub content: Digest,
    pub marks: Digest,
    pub owners: Digest,
    pub controller_uid: Option<Box<str>>,
    /// The position of its source among its owners. The garbage collector deletes it after the source.
    pub source_owner: Option<u32>,
    /// Its marks say that it stays when its source is gone.
    pub keep: bool,
    pub extras: Option<Box<RemovableKeys>>,
    pub type_: Digest,
    pub immutable: bool,
    pub finalizers: bool,
    pub terminating: bool,
    pub has_labels: bool,
    pub has_annotations: bool,
    /// It has our label.
    pub labelled: bool,
    /// We have an entry in its managedFields.
    pub written_by_us: bool,
    /// It is itself a source.
    pub is_source: bool,
    /// The field manager, other than ours, that wrote it last.
    pub other_manager: Option<Box<str>>,
}

/// An object that has the name of a companion, as it was read. [`super::World::identify`] finds its source.
#[derive(Debug, Clone)]
pub struct ObservedCompanion {
    pub(super) key: ObjectKey,
    pub(super) companion: Companion,
    /// The owner that has the UID of the source: its position and its name.
    pub(super) owner: Option<(u32, String)>,
}

/// UIDs are compared as digests: there are as many as companions.
pub(crate) fn uid_digest(uid: &str) -> Digest {
    let mut hasher = Hasher::default();
    hasher.text("uid", uid);
    hasher.finish()
}

impl Companion {
    /// Which of two states of it is the newer one.
    pub(super) fn version(&self) -> u64 {
        self.resource_version.number()
    }

    /// Whether it has our label, names a source, or names the UID of one.
    pub(super) fn has_marks(&self) -> bool {
        self.state.labelled || self.state.source.is_some() || self.state.source_uid.is_some()
    }

    /// What decides whether a source that it does not name may have it.
    pub(super) fn availability(&self) -> (Option<&str>, [bool; 5]) {
        let flags = [
            self.state.labelled,
            self.state.written_by_us,
            self.state.is_source,
            self.state.finalizers,
            self.state.terminating,
        ];
        (self.state.controller_uid.as_deref(), flags)
    }
}

impl ObservedCompanion {
    /// The object, not yet attributed to a source by its UID.
    pub const fn companion(&self) -> &Companion {
        &self.companion
    }

    pub fn read(keys: &Keys, kind: Kind, object: Object) -> Self {
        let (meta, content) = Content::split(object);
        let digest = content.digest();
        let marks = Marks::found(keys, &meta);
        let extras = marks.removable_keys(keys);
        let uid = meta.annotations.get(&keys.source_uid);
        let ours = |owner: &OwnerReference| owner.kind == kind.as_str() && Some(&owner.uid) == uid;
        let owner = (0..).zip(&meta.owner_references).find(|(_, owner)| ours(owner));
        let owner = owner.map(|(position, owner)| (position, owner.name.clone()));
        let foreign = meta.managed_fields.iter().filter(|entry| entry.manager != keys.instance);
        let state = CompanionState {
            source: meta.annotations.get(&keys.source).and_then(|text| ObjectKey::parse(kind, text)),
            source_uid: uid.map(|uid| uid_digest(uid)),
            intact: meta.annotations.get(&keys.source_checksum) == Some(&digest.checksum()),
            content: digest,
            marks: marks.digest(),
            owners: marks::owners_digest(&meta.owner_references),
            source_owner: None,
            keep: marks::say_keep(keys, &meta),
            controller_uid: meta.controller().map(|owner| owner.uid.as_str().into()),
            extras: (!extras.is_empty()).then(|| Box::new(extras)),
            type_: content.type_digest(),
            immutable: content.immutable,
            finalizers: !meta.finalizers.is_empty(),
            terminating: meta.is_terminating(),
            has_labels: !meta.labels.is_empty(),
            has_annotations: !meta.annotations.is_empty(),
            labelled: meta.labels.get(&keys.companion).is_some_and(|value| value == "true"),
            written_by_us: meta.managed_fields.iter().any(|entry| entry.manager == keys.instance),
            is_source: keys.is_source(&meta.labels),
            other_manager: foreign
                .max_by(|a, b| a.time.cmp(&b.time))
                .map(|entry| entry.manager.as_str().into()),
        };
        let companion = Companion {
            uid: meta.uid.as_str().into(),
            resource_version: meta.resource_version.as_str().into(),
            state: Arc::new(state),
            epoch: 0,
            written_epoch: 0,
        };
        Self { key: ObjectKey::of(kind, &meta), companion, owner }
    }
}
