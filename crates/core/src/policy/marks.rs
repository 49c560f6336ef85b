//! The marks of a companion: labels, annotations and ownerReferences that Lockstep writes beside the content.

use std::collections::{BTreeMap, HashSet};

use crate::{
    keys::Keys,
    object::{Meta, ObjectKey, OwnerReference, names},
    policy::{
        self, Policy, WhenRemoved,
        content::{Digest, Hasher},
        pattern::Patterns,
    },
};

/// How many keys of each map an update removes at most. An object may have thousands; the next update removes more.
const MAX_REMOVABLE_KEYS: usize = 200;

/// The labels and annotations that a companion must have. Other people may add their own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Marks {
    pub labels: BTreeMap<String, String>,
    pub annotations: BTreeMap<String, String>,
}

/// Labels and annotations of a source that its companions have, too.
#[derive(Clone, Default)]
pub struct Copied {
    labels: BTreeMap<String, String>,
    annotations: BTreeMap<String, String>,
}

/// Keys on a companion that an update may have to remove: copied labels and annotations, and any other key under
/// our domain. A JSON patch fails when it removes a key that is absent, so the keys found are remembered.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct RemovableKeys {
    pub labels: Vec<String>,
    pub annotations: Vec<String>,
}

impl Marks {
    /// The marks that companions of a source must have.
    pub(crate) fn expected(
        keys: &Keys,
        source: &ObjectKey,
        uid: &str,
        policy: &Policy,
        checksum: String,
        Copied { mut labels, mut annotations }: Copied,
    ) -> Self {
        labels.extend(policy.set_labels.clone());
        annotations.extend(policy.set_annotations.clone());
        let copied = copied_annotation(&labels, &annotations);

        labels.insert(keys.companion.clone(), "true".to_owned());
        labels.insert(keys.source_namespace.clone(), source.namespace.to_string());
        labels.insert(keys.source_name.clone(), names::label_value_of(&source.name));
        annotations.insert(keys.source.clone(), source.to_string());
        annotations.insert(keys.source_uid.clone(), uid.to_owned());
        annotations.insert(keys.source_checksum.clone(), checksum);
        annotations.insert(keys.protect.clone(), policy.protect.as_str().to_owned());
        if policy.when_removed == WhenRemoved::Keep {
            annotations.insert(keys.when_removed.clone(), policy.when_removed.as_str().to_owned());
        }
        if !copied.is_empty() {
            annotations.insert(keys.copied.clone(), copied);
        }
        Self { labels, annotations }
    }

    /// The marks that an object has: every key under our domain, and the keys that its `copied` annotation lists.
    pub(crate) fn found(keys: &Keys, meta: &Meta) -> Self {
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

    pub(crate) fn digest(&self) -> Digest {
        self.digest_with(|_| true)
    }

    /// The digest of the marks that a backup of a companion has, too: all but the UID of the source.
    pub(crate) fn digest_without_uid(&self, keys: &Keys) -> Digest {
        self.digest_with(|key| *key != keys.source_uid)
    }

    fn digest_with(&self, annotation: impl Fn(&str) -> bool) -> Digest {
        let mut hasher = Hasher::default();
        hasher.map("labels", self.labels.iter());
        hasher.map("annotations", self.annotations.iter().filter(|(key, _)| annotation(key)));
        hasher.finish()
    }

    pub(crate) fn removable_keys(&self, keys: &Keys) -> RemovableKeys {
        let first =
            |keys: &mut dyn Iterator<Item = &String>| keys.take(MAX_REMOVABLE_KEYS).cloned().collect();
        let always = [&keys.source, &keys.source_uid, &keys.source_checksum, &keys.protect];
        let labels = keys.companion_labels();
        RemovableKeys {
            labels: first(&mut self.labels.keys().filter(|key| !labels.contains(&key.as_str()))),
            annotations: first(&mut self.annotations.keys().filter(|key| !always.contains(key))),
        }
    }
}

impl Copied {
    /// What the policy of a source says about its labels and annotations.
    pub(crate) fn of(keys: &Keys, source: &Meta, policy: &Policy) -> Self {
        let copy = |from: &BTreeMap<String, String>, patterns: &Patterns| {
            let copied = policy::copied(keys, patterns, from);
            copied.map(|(key, value)| (key.clone(), value.clone())).collect()
        };
        Self {
            labels: copy(&source.labels, &policy.copy_labels),
            annotations: copy(&source.annotations, &policy.copy_annotations),
        }
    }

    /// About how much memory it takes, in bytes.
    pub(crate) fn bytes(&self) -> usize {
        /// What an entry takes besides its texts.
        const OVERHEAD: usize = 96;
        let entries = [&self.labels, &self.annotations].into_iter().flatten();
        entries.map(|(key, value)| OVERHEAD + key.len() + value.len()).sum()
    }
}

impl RemovableKeys {
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty() && self.annotations.is_empty()
    }
}

/// Whether the marks of a companion say that it is left to its namespace when its source is gone.
pub fn say_keep(keys: &Keys, meta: &Meta) -> bool {
    meta.annotations.get(&keys.when_removed).is_some_and(|value| value == WhenRemoved::Keep.as_str())
}

/// The value of the `copied` annotation: `l:` before the key of a label, `a:` before the key of an annotation.
fn copied_annotation(labels: &BTreeMap<String, String>, annotations: &BTreeMap<String, String>) -> String {
    let labels = labels.keys().map(|key| format!("l:{key}"));
    let annotations = annotations.keys().map(|key| format!("a:{key}"));
    labels.chain(annotations).collect::<Vec<_>>().join(",")
}

/// The ownerReferences that a companion in `namespace` must have: its source where both share the namespace, none
/// elsewhere, because an owner in another namespace makes the garbage collector delete the object. A companion that is
/// to stay when its source is deleted has none either, because the garbage collector would not ask us.
///
/// `blockOwnerDeletion` stays unset: setting it needs the `update` verb on the source's finalizers.
pub(crate) fn expected_owners(
    source: &ObjectKey,
    uid: &str,
    when_removed: WhenRemoved,
    namespace: &str,
) -> Vec<OwnerReference> {
    if *source.namespace != *namespace || when_removed == WhenRemoved::Keep {
        return Vec::new();
    }
    vec![OwnerReference {
        api_version: "v1".to_owned(),
        kind: source.kind.as_str().to_owned(),
        name: source.name.to_string(),
        uid: uid.to_owned(),
        controller: Some(true),
        block_owner_deletion: None,
    }]
}

/// A digest of all ownerReferences. An absent `blockOwnerDeletion` and a false one are the same.
pub(crate) fn owners_digest(owners: &[OwnerReference]) -> Digest {
    let mut hasher = Hasher::default();
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

    fn expected_of(keys: &Keys, meta: &Meta, policy: &Policy) -> Marks {
        let key = ObjectKey::of(Kind::ConfigMap, meta);
        let copied = Copied::of(keys, meta, policy);
        Marks::expected(keys, &key, &meta.uid, policy, "abc".to_owned(), copied)
    }

    fn expected() -> (Keys, Marks) {
        let keys = Keys::new("workshop.io", "-synced");
        let meta = source();
        let policy = Policy::parse(&keys, &meta).unwrap();
        let marks = expected_of(&keys, &meta, &policy);
        (keys, marks)
    }

    #[test]
    fn expected_marks_are_found_beside_foreign_keys() {
        let (keys, marks) = expected();
        let mut companion =
            Meta { labels: marks.labels.clone(), annotations: marks.annotations.clone(), ..Meta::default() };
        companion.labels.insert("foreign".into(), "yes".into());
        companion.annotations.insert("foreign.example/x".into(), "yes".into());
        assert_eq!(Marks::found(&keys, &companion), marks);
        assert_eq!(marks.annotations["workshop.io/copied"], "l:team,a:example.com/x");
        assert_eq!(
            (&*marks.labels["workshop.io/source-namespace"], &*marks.labels["workshop.io/source-name"]),
            ("home", "colors")
        );
    }

    #[test]
    fn set_labels_and_annotations_win_over_copied_ones_and_can_be_removed_again() {
        let keys = Keys::new("workshop.io", "-synced");
        let mut meta = source();
        meta.annotations.insert("workshop.io/copy-labels".into(), "*,!secret".into());
        meta.annotations.insert("workshop.io/set-labels".into(), "team=b, tier=web".into());
        meta.annotations.insert("workshop.io/set-annotations".into(), "note=a=b".into());
        meta.labels.insert("secret".into(), "x".into());
        let policy = Policy::parse(&keys, &meta).unwrap();
        let marks = expected_of(&keys, &meta, &policy);
        assert_eq!((&*marks.labels["team"], &*marks.labels["tier"]), ("b", "web"));
        assert_eq!(marks.annotations["note"], "a=b");
        assert!(!marks.labels.contains_key("secret") && !marks.labels.contains_key("workshop.io/managed"));
        assert_eq!(marks.annotations["workshop.io/copied"], "l:team,l:tier,a:example.com/x,a:note");
    }

    #[test]
    fn companion_is_owned_by_its_source_only_in_the_same_namespace_and_unless_it_is_kept() {
        let source = ObjectKey::new(Kind::Secret, "home", "colors");
        let owners = expected_owners(&source, "u1", WhenRemoved::Delete, "home");
        assert_eq!((&*owners[0].kind, &*owners[0].name, &*owners[0].uid), ("Secret", "colors", "u1"));
        assert_eq!((owners.len(), owners[0].controller), (1, Some(true)));
        assert!(expected_owners(&source, "u1", WhenRemoved::Delete, "away").is_empty());
        assert!(expected_owners(&source, "u1", WhenRemoved::Keep, "home").is_empty());
    }

    #[test]
    fn digest_covers_every_mark() {
        let (keys, marks) = expected();
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
    fn removable_keys_are_copied_keys_and_rare_marks() {
        let (keys, marks) = expected();
        let removable = marks.removable_keys(&keys);
        assert_eq!(removable.labels, ["team"]);
        assert_eq!(removable.annotations, ["example.com/x", "workshop.io/copied"]);
    }
}
