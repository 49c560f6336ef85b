//! PURE. A source, reduced to what is needed to plan and to write its companions.

use crate::{
    content::{Content, Digest, Hasher, Payload},
    keys::Keys,
    marks::Marks,
    object::{Kind, Meta, Object, ObjectKey},
    policy::{Fault, Policy},
};

use super::NamespaceRules;

#[derive(Debug)]
pub struct Source {
    pub key: ObjectKey,
    pub uid: String,
    pub resource_version: String,
    pub terminating: bool,
    /// What it asks for, or why it gets nothing.
    pub desired: Result<Desired, Fault>,
    /// Changes with everything that can change a companion.
    pub digest: Digest,
    pub(super) version: u64,
    /// The list, or the watch after it, that showed it last.
    pub(super) epoch: u32,
}

/// What companions of a source must be.
#[derive(Debug)]
pub struct Desired {
    pub policy: Policy,
    pub payload: Payload,
    pub content: Digest,
    pub marks: Marks,
    pub marks_digest: Digest,
    /// The names of the keys, for logs.
    pub key_names: String,
}

impl Source {
    #[must_use]
    pub fn read(keys: &Keys, rules: &NamespaceRules, kind: Kind, object: Object) -> Self {
        let key = ObjectKey::of(kind, &object.metadata);
        let policy = Policy::of(keys, &rules.own_namespace, &key, &object);
        let (meta, content) = Content::split(object);
        let desired = policy.map(|policy| Desired::new(keys, &key, &meta, policy, content));
        let mut hasher = Hasher::new();
        hasher.text("uid", &meta.uid);
        match &desired {
            Ok(desired) => {
                hasher.digest("content", &desired.content);
                hasher.digest("marks", &desired.marks_digest);
                // The policy is what these annotations say.
                hasher.map("policy", meta.annotations.iter().filter(|(key, _)| keys.is_ours(key)));
            }
            Err(fault) => hasher.text("fault", &fault.to_string()),
        }
        Self {
            key,
            terminating: meta.is_terminating(),
            desired,
            digest: hasher.finish(),
            version: meta.version(),
            epoch: 0,
            uid: meta.uid,
            resource_version: meta.resource_version,
        }
    }
}

impl Source {
    /// What it asks for, unless nothing may be written for it now: it is malformed, being deleted, or paused.
    #[must_use]
    pub fn active_policy(&self) -> Option<&Policy> {
        let policy = &self.desired.as_ref().ok()?.policy;
        (!self.terminating && !policy.paused).then_some(policy)
    }

    /// The names of the keys that are copied, for logs.
    #[must_use]
    pub fn key_names(&self) -> Option<&String> {
        self.desired.as_ref().ok().map(|desired| &desired.key_names)
    }

    /// How many bytes of content each companion gets.
    #[must_use]
    pub fn payload_len(&self) -> usize {
        self.desired.as_ref().map_or(0, |desired| desired.payload.len())
    }
}

impl Desired {
    fn new(keys: &Keys, key: &ObjectKey, meta: &Meta, policy: Policy, content: Content) -> Self {
        let content = content.select(&policy.keys);
        let digest = content.digest();
        let marks = Marks::expected(keys, key, meta, &policy, digest.checksum());
        Self {
            policy,
            payload: content.to_payload(),
            content: digest,
            marks_digest: marks.digest(),
            marks,
            key_names: content.key_names(),
        }
    }
}
