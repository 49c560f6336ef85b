//! A companion written by someone other than the controller, for example from a backup, that equals what the controller
//! would write.
//!
//! Whether such a write is allowed says whether its content is that of the source. So nothing is compared before
//! it is known that the user may read the source: not even the time of an answer depends on it.

use crate::{
    keys::Keys,
    object::{Meta, Object, ObjectKey, OwnerReference},
    policy::{
        content::{Content, Digest},
        marks::{Marks, owners_digest},
    },
    world::World,
};

/// A companion that somebody writes, without its content. UIDs of the source are left out: a source that was restored
/// has another one than in the backup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Restored {
    at: ObjectKey,
    source: ObjectKey,
    content: Digest,
    marks: Digest,
    /// None without ownerReferences: many tools do not restore them.
    owners: Option<Digest>,
}

impl Restored {
    /// `None` for an object that the controller would never write.
    pub fn read(keys: &Keys, at: &ObjectKey, old: Option<&Object>, new: &Object) -> Option<Self> {
        let Meta { labels, annotations, owner_references: owners, finalizers, .. } = &new.metadata;
        if labels.get(&keys.companion)? != "true"
            || !finalizers.is_empty()
            || new.metadata.is_terminating()
            || old.is_some_and(|old| !is_restored_over(keys, old, new))
        {
            return None;
        }
        Some(Self {
            source: ObjectKey::parse(at.kind, annotations.get(&keys.source)?)
                .filter(|source| source != at)?,
            at: at.clone(),
            content: Content::digest_of(new),
            marks: Marks::found(keys, &new.metadata).digest_without_uid(keys),
            owners: (!owners.is_empty()).then(|| owners_digest(&without_uids(owners))),
        })
    }

    pub const fn source(&self) -> &ObjectKey {
        &self.source
    }

    /// Whether the controller writes a companion here, for the source that this one names, now.
    pub fn is_wanted(&self, world: &World) -> bool {
        world.is_written_for(&self.source, &self.at)
            && world.competing_source(&self.at, Some(&self.source)).is_none()
    }

    /// Whether this is what the controller writes.
    pub fn is_right(&self, world: &World) -> bool {
        let Some(source) = world.source(&self.source).filter(|_| self.is_wanted(world)) else { return false };
        let owners = || owners_digest(&without_uids(&source.expected_owners(&self.at.namespace)));
        source.desired.as_ref().is_ok_and(|desired| {
            self.content == desired.content
                && self.marks == desired.marks_without_uid
                && self.owners.is_none_or(|found| found == owners())
        })
    }
}

/// Whether an update changes nothing but what a restore changes on a companion that exists already. Any other edit is
/// denied at once, without asking for the user's rights.
fn is_restored_over(keys: &Keys, old: &Object, new: &Object) -> bool {
    let counts = |key: &str| key != keys.source_uid && !keys.is_left_by_restore(key);
    old.metadata.has_same_marks(&new.metadata, counts)
        && without_uids(&old.metadata.owner_references) == without_uids(&new.metadata.owner_references)
        && old.data == new.data
        && old.binary_data == new.binary_data
        && old.type_ == new.type_
        && old.immutable == new.immutable
}

fn without_uids(owners: &[OwnerReference]) -> Vec<OwnerReference> {
    owners.iter().cloned().map(|owner| OwnerReference { uid: String::new(), ..owner }).collect()
}
