//! What Lockstep writes on a companion besides content, and how it knows such marks when it sees them.

use std::collections::{BTreeMap, HashSet};

use crate::{
    content::{Digest, Hasher},
    keys::Keys,
    object::{Meta, ObjectKey, OwnerReference},
    policy::{self, Policy, pattern::Patterns},
};

/// The labels and annotations that a companion must bear. Others may stand beside them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Marks {
    pub labels: BTreeMap<String, String>,
    pub annotations: BTreeMap<String, String>,
}

/// Keys on a companion that are ours to take away but that not every companion has: what was carried over, and
/// whatever else stands there under our domain. A patch can only remove what is there, so they are remembered.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Extras {
    pub labels: Vec<String>,
    pub annotations: Vec<String>,
}

impl Marks {
    /// The marks for companions of a source.
    #[must_use]
    pub fn wanted(keys: &Keys, source: &ObjectKey, meta: &Meta, policy: &Policy, checksum: String) -> Self {
        let carry = |from: &BTreeMap<String, String>, patterns: &Patterns| {
            policy::carried(keys, patterns, from)
                .map(|(key, value)| (key.clone(), value.clone()))
                .collect::<BTreeMap<_, _>>()
        };
        let mut labels = carry(&meta.labels, &policy.copy_labels);
        let mut annotations = carry(&meta.annotations, &policy.copy_annotations);
        let copied = copied(&labels, &annotations);

        labels.insert(keys.companion.clone(), "true".to_owned());
        annotations.insert(keys.source.clone(), source.to_string());
        annotations.insert(keys.source_uid.clone(), meta.uid.clone());
        annotations.insert(keys.source_checksum.clone(), checksum);
        annotations.insert(keys.protect.clone(), policy.protect.as_str().to_owned());
        if !copied.is_empty() {
            annotations.insert(keys.copied.clone(), copied);
        }
        Self { labels, annotations }
    }

    /// The marks that an object bears: all under our domain, and what its `copied` annotation lists.
    #[must_use]
    pub fn found(keys: &Keys, meta: &Meta) -> Self {
        let copied = meta.annotations.get(&keys.copied).map(String::as_str).unwrap_or_default();
        let copied: HashSet<&str> = copied.split(',').collect();
        let ours = |from: &BTreeMap<String, String>, tag: char| {
            from.iter()
                .filter(|(key, _)| keys.is_ours(key) || copied.contains(format!("{tag}:{key}").as_str()))
                .map(|(key, value)| (key.clone(), value.clone()))
                .collect()
        };
        Self { labels: ours(&meta.labels, 'l'), annotations: ours(&meta.annotations, 'a') }
    }

    #[must_use]
    pub fn digest(&self) -> Digest {
        let mut hasher = Hasher::new();
        hasher.map("labels", &self.labels);
        hasher.map("annotations", &self.annotations);
        hasher.finish()
    }

    #[must_use]
    pub fn extras(&self, keys: &Keys) -> Extras {
        let always = [&keys.source, &keys.source_uid, &keys.source_checksum, &keys.protect];
        Extras {
            labels: self.labels.keys().filter(|key| **key != keys.companion).cloned().collect(),
            annotations: self.annotations.keys().filter(|key| !always.contains(key)).cloned().collect(),
        }
    }
}

impl Extras {
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty() && self.annotations.is_empty()
    }
}

/// The `copied` annotation: `l:` before a label's key, `a:` before an annotation's.
fn copied(labels: &BTreeMap<String, String>, annotations: &BTreeMap<String, String>) -> String {
    let labels = labels.keys().map(|key| format!("l:{key}"));
    let annotations = annotations.keys().map(|key| format!("a:{key}"));
    labels.chain(annotations).collect::<Vec<_>>().join(",")
}

/// The ownerReference of a companion that shares its source's namespace. It does not block the owner's deletion:
/// that would need a right on the source's finalizers.
#[must_use]
pub fn owner(source: &ObjectKey, uid: &str) -> OwnerReference {
    OwnerReference {
        api_version: "v1".to_owned(),
        kind: source.kind.as_str().to_owned(),
        name: source.name.to_string(),
        uid: uid.to_owned(),
        controller: Some(true),
        block_owner_deletion: None,
    }
}

/// A digest of all ownerReferences. An absent `blockOwnerDeletion` and a false one are the same.
#[must_use]
pub fn owners_digest(owners: &[OwnerReference]) -> Digest {
    let mut hasher = Hasher::new();
    for owner in owners {
        hasher.text(&owner.kind, &owner.name);
        hasher.text(&owner.api_version, &owner.uid);
        let flag = |set: Option<bool>| if set == Some(true) { "true" } else { "" };
        hasher.text(flag(owner.controller), flag(owner.block_owner_deletion));
    }
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::object::Kind;

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect()
    }

    fn source() -> Meta {
        Meta {
            name: "colors".into(),
            namespace: "home".into(),
            uid: "u1".into(),
            labels: map(&[("team", "a"), ("workshop.io/managed", "true")]),
            annotations: map(&[
                ("example.com/x", "1"),
                ("workshop.io/copy-labels", "team,absent"),
                ("workshop.io/copy-annotations", "example.com/*"),
            ]),
            ..Meta::default()
        }
    }

    fn wanted() -> (Keys, Marks) {
        let keys = Keys::new("workshop.io", "-synced");
        let meta = source();
        let policy = Policy::parse(&keys, &meta).unwrap();
        let marks =
            Marks::wanted(&keys, &ObjectKey::of(Kind::ConfigMap, &meta), &meta, &policy, "abc".to_owned());
        (keys, marks)
    }

    #[test]
    fn what_was_written_is_found_again_beside_what_others_wrote() {
        let (keys, marks) = wanted();
        let mut companion =
            Meta { labels: marks.labels.clone(), annotations: marks.annotations.clone(), ..Meta::default() };
        companion.labels.insert("foreign".into(), "yes".into());
        companion.annotations.insert("foreign.example/x".into(), "yes".into());
        assert_eq!(Marks::found(&keys, &companion), marks);
        assert_eq!(marks.annotations["workshop.io/copied"], "l:team,a:example.com/x");
    }

    #[test]
    fn every_mark_counts_in_the_digest() {
        let (keys, marks) = wanted();
        let companion = || Meta {
            labels: marks.labels.clone(),
            annotations: marks.annotations.clone(),
            ..Meta::default()
        };
        for key in marks.annotations.keys() {
            let mut edited = companion();
            edited.annotations.insert(key.clone(), "edited".into());
            assert_ne!(Marks::found(&keys, &edited).digest(), marks.digest(), "{key}");
        }
        for key in marks.labels.keys() {
            let mut stripped = companion();
            stripped.labels.remove(key);
            assert_ne!(Marks::found(&keys, &stripped).digest(), marks.digest(), "{key}");
        }
    }

    #[test]
    fn extras_are_what_an_update_may_have_to_remove() {
        let (keys, marks) = wanted();
        let extras = marks.extras(&keys);
        assert_eq!(extras.labels, ["team"]);
        assert_eq!(extras.annotations, ["example.com/x", "workshop.io/copied"]);
    }
}
