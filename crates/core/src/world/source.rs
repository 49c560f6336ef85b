//! A source, reduced to what is needed to plan its companions. Its payload is kept apart, in [`super::payloads`].

use std::sync::{Arc, LazyLock};

use super::{NamespaceRules, payloads::Payload};
use crate::{
    keys::Keys,
    object::{Kind, Meta, Object, ObjectKey, OwnerReference},
    policy::{
        Fault, Policy,
        content::{Content, Digest, Hasher},
        marks::{self, Copied, Marks},
        mistake::Mistake,
    },
};

#[derive(Debug)]
pub struct Source {
    pub key: ObjectKey,
    pub uid: String,
    pub resource_version: String,
    pub terminating: bool,
    /// What it asks for, or why it gets nothing.
    pub desired: Result<Desired, Fault>,
    /// Changes with everything that can change a companion, or what is reported about the source.
    pub digest: Digest,
    /// What has no effect although its author probably meant something by it.
    pub mistakes: Vec<Mistake>,
    pub(super) version: u64,
    /// The list, or the watch after it, that showed it last.
    pub(super) epoch: u32,
}

/// A source as it was read, with what is written to its companions. A malformed source has no payload.
#[derive(Debug)]
pub struct ObservedSource {
    pub source: Source,
    pub payload: Option<Arc<Payload>>,
}

/// What companions of a source must be, as digests.
#[derive(Debug, Clone)]
pub struct Desired {
    pub policy: Policy,
    pub content: Digest,
    pub type_: Digest,
    pub immutable: bool,
    pub marks: Digest,
    /// The marks that a backup of a companion has, too: see [`Marks::digest_without_uid`].
    pub marks_without_uid: Digest,
    pub payload_bytes: usize,
    /// The names of the keys, for logs.
    pub key_names: String,
}

impl ObservedSource {
    pub fn read(keys: &Keys, rules: &NamespaceRules, kind: Kind, object: Object) -> Self {
        let key = ObjectKey::of(kind, &object.metadata);
        let policy = Policy::of(keys, &rules.own_namespace, &key, &object);
        let (meta, content) = Content::split(object);
        let mistakes =
            policy.as_ref().map_or_else(|_| Vec::new(), |policy| Mistake::on_source(keys, &meta, policy));
        let (desired, payload) = match policy {
            Ok(policy) => {
                let (desired, payload) = Desired::new(keys, &key, &meta, policy, content);
                (Ok(desired), Some(Arc::new(payload)))
            }
            Err(fault) => (Err(fault), None),
        };
        let mut hasher = Hasher::default();
        hasher.text("uid", &meta.uid);
        match &desired {
            Ok(desired) => {
                hasher.digest("content", &desired.content);
                hasher.digest("marks", &desired.marks);
                // The policy is what these annotations say.
                hasher.map("policy", meta.annotations.iter().filter(|(key, _)| keys.is_ours(key)));
                mistakes.iter().for_each(|mistake| hasher.text("mistake", &mistake.to_string()));
            }
            Err(fault) => hasher.text("fault", &fault.to_string()),
        }
        let source = Source {
            key,
            terminating: meta.is_terminating(),
            desired,
            digest: hasher.finish(),
            mistakes,
            version: meta.version(),
            epoch: 0,
            uid: meta.uid,
            resource_version: meta.resource_version,
        };
        Self { source, payload }
    }
}

impl Source {
    /// What it asks for, unless it is malformed.
    pub fn policy(&self) -> Option<&Policy> {
        self.desired.as_ref().ok().map(|desired| &desired.policy)
    }

    /// What it asks for, unless nothing may be written for it now: it is malformed, being deleted, or paused.
    pub fn active_policy(&self) -> Option<&Policy> {
        self.policy().filter(|policy| !self.terminating && !policy.paused)
    }

    /// The marks that its companions must have. A malformed source has none.
    pub(crate) fn expected_marks(&self, keys: &Keys, copied: Copied) -> Option<Marks> {
        let Desired { policy, content, .. } = self.desired.as_ref().ok()?;
        Some(Marks::expected(keys, &self.key, &self.uid, policy, content.checksum(), copied))
    }

    /// The ownerReferences that its companion in a namespace must have.
    pub(crate) fn expected_owners(&self, namespace: &str) -> Vec<OwnerReference> {
        let when_removed = self.policy().map(|policy| policy.when_removed).unwrap_or_default();
        marks::expected_owners(&self.key, &self.uid, when_removed, namespace)
    }

    /// A digest of [`Self::expected_owners`].
    pub(crate) fn expected_owners_digest(&self, namespace: &str) -> Digest {
        /// That of no owners: most companions are in other namespaces than their source.
        static NONE: LazyLock<Digest> = LazyLock::new(|| marks::owners_digest(&[]));
        match &*self.expected_owners(namespace) {
            [] => *NONE,
            owners => marks::owners_digest(owners),
        }
    }

    /// The names of the keys that are copied, for logs.
    pub fn key_names(&self) -> Option<&String> {
        self.desired.as_ref().ok().map(|desired| &desired.key_names)
    }

    /// About how many bytes are written to each companion, without most marks.
    pub fn payload_bytes(&self) -> usize {
        self.desired.as_ref().map_or(0, |desired| desired.payload_bytes)
    }
}

impl Desired {
    fn new(keys: &Keys, key: &ObjectKey, meta: &Meta, policy: Policy, content: Content) -> (Self, Payload) {
        let content = content.select(&policy.keys);
        let digest = content.digest();
        let copied = Copied::of(keys, meta, &policy);
        let payload = Payload { content: content.pack(), copied };
        let marks = &payload.copied;
        let marks = Marks::expected(keys, key, &meta.uid, &policy, digest.checksum(), marks.clone());
        let desired = Self {
            policy,
            content: digest,
            type_: content.type_digest(),
            immutable: content.immutable,
            marks: marks.digest(),
            marks_without_uid: marks.digest_without_uid(keys),
            payload_bytes: payload.bytes(),
            key_names: content.key_names(),
        };
        (desired, payload)
    }
}
