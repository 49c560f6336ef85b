//! The payloads of sources that are kept in memory, within a budget.
//!
//! When they exceed it, the namespace that holds most gives up its largest payload first. So the megabytes of one
//! tenant never displace the few kilobytes of another.

use std::{
    collections::{BTreeSet, HashMap},
    fmt,
    sync::Arc,
};

use crate::{
    object::ObjectKey,
    policy::{
        content::{Digest, PackedContent},
        marks::Copied,
    },
};

/// What is written to every companion of a source, and is not known from [`super::Source`].
pub struct Payload {
    pub content: PackedContent,
    pub copied: Copied,
}

pub struct Payloads {
    budget: usize,
    bytes: usize,
    kept: HashMap<ObjectKey, Kept>,
    shares: HashMap<Arc<str>, NamespaceShare>,
}

struct Kept {
    /// The digest of the source that the payload is of.
    digest: Digest,
    payload: Arc<Payload>,
    bytes: usize,
}

/// What the sources of one namespace hold.
#[derive(Default)]
struct NamespaceShare {
    bytes: usize,
    by_bytes: BTreeSet<(usize, ObjectKey)>,
}

impl Payload {
    /// About how much memory it takes, in bytes.
    pub fn bytes(&self) -> usize {
        /// What a payload takes besides its texts.
        const OVERHEAD: usize = 256;
        OVERHEAD + self.content.text_bytes() + self.copied.bytes()
    }
}

impl fmt::Debug for Payload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Payload(…)")
    }
}

impl Payloads {
    /// Keeps at most `budget` bytes.
    pub fn new(budget: usize) -> Self {
        Self { budget, bytes: 0, kept: HashMap::new(), shares: HashMap::new() }
    }

    /// How many bytes are kept.
    pub const fn bytes(&self) -> usize {
        self.bytes
    }

    /// The payload of a source in the state that has this digest, if it is kept.
    pub fn get(&self, source: &ObjectKey, digest: Digest) -> Option<Arc<Payload>> {
        self.kept.get(source).filter(|kept| kept.digest == digest).map(|kept| kept.payload.clone())
    }

    /// Replaces the payload of a source, if the budget allows it.
    pub fn put(&mut self, source: &ObjectKey, digest: Digest, payload: Arc<Payload>) {
        self.remove(source);
        let bytes = payload.bytes();
        if bytes > self.budget {
            return;
        }
        self.kept.insert(source.clone(), Kept { digest, payload, bytes });
        self.bytes += bytes;
        let share = self.shares.entry(source.namespace.clone()).or_default();
        share.bytes += bytes;
        share.by_bytes.insert((bytes, source.clone()));
        while self.bytes > self.budget
            && let Some(largest) = self.largest().cloned()
        {
            self.remove(&largest);
        }
    }

    pub fn remove(&mut self, source: &ObjectKey) {
        let Some(Kept { bytes, .. }) = self.kept.remove(source) else { return };
        self.bytes -= bytes;
        let Some(share) = self.shares.get_mut(&source.namespace) else { return };
        share.bytes -= bytes;
        share.by_bytes.remove(&(bytes, source.clone()));
        if share.by_bytes.is_empty() {
            self.shares.remove(&source.namespace);
        }
    }

    /// The largest payload of the namespace that holds most.
    fn largest(&self) -> Option<&ObjectKey> {
        let (_, share) = self.shares.iter().max_by_key(|(namespace, share)| (share.bytes, *namespace))?;
        share.by_bytes.last().map(|(_, source)| source)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::{policy::content::Content, testing::configmap};

    const BUDGET: usize = 10_000;

    fn payload(bytes: usize) -> Arc<Payload> {
        let content = Content { data: [("k".to_owned(), "x".repeat(bytes))].into(), ..Content::default() };
        Arc::new(Payload { content: content.pack(), copied: Copied::default() })
    }

    fn put(payloads: &mut Payloads, namespace: &str, name: &str, bytes: usize) {
        payloads.put(&configmap(namespace, name), Digest::default(), payload(bytes));
    }

    fn keeps(payloads: &Payloads, namespace: &str, name: &str) -> bool {
        payloads.get(&configmap(namespace, name), Digest::default()).is_some()
    }

    #[test]
    fn largest_payload_of_the_largest_namespace_is_given_up_first() {
        let mut payloads = Payloads::new(BUDGET);
        put(&mut payloads, "small", "a", 1500);
        for (name, bytes) in [("a", 1000), ("b", 4000), ("c", 1000), ("d", 1000)] {
            put(&mut payloads, "large", name, bytes);
        }
        assert!(keeps(&payloads, "large", "b"));
        put(&mut payloads, "large", "e", 1200);
        assert!(!keeps(&payloads, "large", "b"));
        for name in ["a", "c", "d", "e"] {
            assert!(keeps(&payloads, "large", name), "{name}");
        }
        assert!(keeps(&payloads, "small", "a"));
    }

    #[test]
    fn payload_beyond_the_budget_is_not_kept_and_displaces_none() {
        let mut payloads = Payloads::new(BUDGET);
        put(&mut payloads, "small", "a", 1000);
        put(&mut payloads, "large", "a", BUDGET);
        assert!(keeps(&payloads, "small", "a") && !keeps(&payloads, "large", "a"));
        let mut none = Payloads::new(0);
        put(&mut none, "small", "a", 0);
        assert_eq!(none.bytes(), 0);
    }

    #[test]
    fn payload_of_another_state_of_the_source_is_not_returned() {
        let mut payloads = Payloads::new(BUDGET);
        let (key, other) =
            (configmap("home", "a"), Content { immutable: true, ..Content::default() }.digest());
        payloads.put(&key, Digest::default(), payload(1));
        assert!(payloads.get(&key, other).is_none());
        payloads.put(&key, other, payload(1));
        assert!(payloads.get(&key, other).is_some() && payloads.get(&key, Digest::default()).is_none());
    }

    proptest! {
        #[test]
        fn budget_is_kept_and_a_namespace_within_an_equal_share_loses_nothing(
            steps in proptest::collection::vec((0_usize..4, 0_usize..6, 0_usize..3000, any::<bool>()), 0..60)
        ) {
            let mut payloads = Payloads::new(BUDGET);
            // What each namespace would hold if nothing were ever given up, and the most of that.
            let mut all: BTreeMap<String, BTreeMap<String, usize>> = BTreeMap::new();
            let mut most: BTreeMap<String, usize> = BTreeMap::new();
            for (namespace, name, bytes, remove) in steps {
                let (namespace, name) = (namespace.to_string(), name.to_string());
                let held = all.entry(namespace.clone()).or_default();
                if remove {
                    payloads.remove(&configmap(&namespace, &name));
                    held.remove(&name);
                } else {
                    put(&mut payloads, &namespace, &name, bytes);
                    held.insert(name, payload(bytes).bytes());
                }
                let most = most.entry(namespace).or_default();
                *most = held.values().sum::<usize>().max(*most);
                prop_assert!(payloads.bytes() <= BUDGET);
                prop_assert_eq!(payloads.bytes(), payloads.kept.values().map(|kept| kept.bytes).sum::<usize>());
                prop_assert_eq!(payloads.bytes(), payloads.shares.values().map(|share| share.bytes).sum::<usize>());
            }
            for (namespace, held) in all.iter().filter(|(namespace, _)| most[*namespace] <= BUDGET / 4) {
                for name in held.keys() {
                    prop_assert!(keeps(&payloads, namespace, name), "{namespace}/{name}");
                }
            }
        }
    }
}
