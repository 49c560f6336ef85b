//! The content of a ConfigMap or Secret that is copied, and the digest by which two contents are compared.

use std::{collections::BTreeMap, fmt};

use ring::digest::{Context, SHA256};
use serde_json::value::RawValue;

use crate::{
    object::{Meta, Object},
    text::some_of,
};

/// The fields that a companion shares with its source. It has no `Debug`: values must not reach a log.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Content {
    pub data: BTreeMap<String, String>,
    /// `binaryData` in base64, as the API server sends it. A Secret has its base64 in `data` and nothing here.
    pub binary: BTreeMap<String, String>,
    /// A Secret's type.
    pub type_: Option<String>,
    pub immutable: bool,
}

/// 128 bits of a SHA-256 over a canonical form: equal digests mean equal content.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Digest([u8; 16]);

/// Computes a digest of tagged, length-prefixed parts: different inputs never become the same bytes.
pub struct Hasher(Context);

/// Content serialised once, to be sent to any number of targets.
#[derive(Clone)]
pub struct PackedContent {
    pub data: Option<Box<RawValue>>,
    pub binary: Option<Box<RawValue>>,
    pub type_: Option<Box<str>>,
    pub immutable: bool,
}

/// Which keys are copied, and under which names: the `keys` annotation. `None` copies all of them.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct KeySelection(pub Option<BTreeMap<String, String>>);

impl Content {
    /// Splits an object into its metadata and its content.
    pub fn split(object: Object) -> (Meta, Self) {
        let content = Self {
            data: object.data.unwrap_or_default(),
            binary: object.binary_data.unwrap_or_default(),
            type_: object.type_,
            immutable: object.immutable.unwrap_or_default(),
        };
        (object.metadata, content)
    }

    /// The content of a companion: the selected keys, under the names they are copied to.
    pub fn select(self, selection: &KeySelection) -> Self {
        let select = |map: BTreeMap<String, String>| {
            map.into_iter()
                .filter_map(|(key, value)| Some((selection.copied_as(&key)?.to_owned(), value)))
                .collect()
        };
        Self { data: select(self.data), binary: select(self.binary), ..self }
    }

    /// A digest that is the same for the same content, whatever the order of keys.
    ///
    /// ```
    /// use lockstep_core::policy::content::Content;
    ///
    /// let content = |value: &str| Content {
    ///     data: [("color".to_owned(), value.to_owned())].into(),
    ///     ..Content::default()
    /// };
    /// assert_eq!(content("blue").digest(), content("blue").digest());
    /// assert_ne!(content("blue").digest(), content("red").digest());
    /// ```
    pub fn digest(&self) -> Digest {
        digest(&self.data, &self.binary, self.type_.as_deref(), self.immutable)
    }

    /// The digest of an object's content, without a copy of it.
    pub(crate) fn digest_of(object: &Object) -> Digest {
        let none = BTreeMap::new();
        let [data, binary] = [&object.data, &object.binary_data].map(|map| map.as_ref().unwrap_or(&none));
        digest(data, binary, object.type_.as_deref(), object.immutable.unwrap_or_default())
    }

    /// A digest of the type alone. Kubernetes does not limit the length of a Secret's type.
    pub(crate) fn type_digest(&self) -> Digest {
        let mut hasher = Hasher::default();
        hasher.text("type", self.type_.as_deref().unwrap_or_default());
        hasher.finish()
    }

    /// The names of the first ten keys, for logs.
    pub fn key_names(&self) -> String {
        const MAX_KEY_NAMES: usize = 10;
        let names: Vec<&str> = self.data.keys().chain(self.binary.keys()).map(String::as_str).collect();
        some_of(&names, MAX_KEY_NAMES, ",")
    }

    pub fn pack(&self) -> PackedContent {
        let json = |map: &BTreeMap<String, String>| {
            serde_json::value::to_raw_value(map)
                .unwrap_or_else(|_| unreachable!("a map of strings is always JSON"))
        };
        let raw = |map: &BTreeMap<String, String>| (!map.is_empty()).then(|| json(map));
        PackedContent {
            data: raw(&self.data),
            binary: raw(&self.binary),
            type_: self.type_.as_deref().map(Into::into),
            immutable: self.immutable,
        }
    }
}

fn digest(
    data: &BTreeMap<String, String>,
    binary: &BTreeMap<String, String>,
    type_: Option<&str>,
    immutable: bool,
) -> Digest {
    let mut hasher = Hasher::default();
    hasher.map("data", data);
    hasher.map("binaryData", binary);
    hasher.text("type", type_.unwrap_or_default());
    hasher.text("immutable", if immutable { "true" } else { "" });
    hasher.finish()
}

impl KeySelection {
    /// The name under which a key is copied; `None` when it is not copied.
    ///
    /// ```
    /// use lockstep_core::policy::content::KeySelection;
    ///
    /// // keys: ca.crt=ca.pem
    /// let selection = KeySelection(Some([("ca.crt".to_owned(), "ca.pem".to_owned())].into()));
    /// assert_eq!(selection.copied_as("ca.crt"), Some("ca.pem"));
    /// assert_eq!(selection.copied_as("tls.key"), None);
    /// assert_eq!(KeySelection::default().copied_as("tls.key"), Some("tls.key"));
    /// ```
    pub fn copied_as<'a>(&'a self, key: &'a str) -> Option<&'a str> {
        match &self.0 {
            None => Some(key),
            Some(selected) => selected.get(key).map(String::as_str),
        }
    }

    /// The entries of a map that are copied, under the names they are copied to.
    pub fn selected<'a>(
        &'a self,
        map: Option<&'a BTreeMap<String, String>>,
    ) -> impl Iterator<Item = (&'a str, &'a String)> {
        map.into_iter().flatten().filter_map(|(key, value)| Some((self.copied_as(key)?, value)))
    }
}

impl Digest {
    /// The first twelve hex digits: what the `source-checksum` annotation shows.
    pub fn checksum(&self) -> String {
        self.0.iter().take(6).map(|byte| format!("{byte:02x}")).collect()
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Digest({})", self.checksum())
    }
}

impl PackedContent {
    /// How many bytes of text it has.
    pub fn text_bytes(&self) -> usize {
        let maps = [&self.data, &self.binary].into_iter().flatten();
        maps.map(|raw| raw.get().len()).sum::<usize>() + self.type_.as_deref().map_or(0, str::len)
    }
}

impl fmt::Debug for PackedContent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PackedContent(…)")
    }
}

impl Default for Hasher {
    fn default() -> Self {
        Self(Context::new(&SHA256))
    }
}

impl Hasher {
    fn part(&mut self, bytes: &[u8]) {
        self.0.update(&(bytes.len() as u64).to_be_bytes());
        self.0.update(bytes);
    }

    pub fn text(&mut self, tag: &str, value: &str) {
        self.part(tag.as_bytes());
        self.part(value.as_bytes());
    }

    pub fn digest(&mut self, tag: &str, digest: &Digest) {
        self.part(tag.as_bytes());
        self.part(&digest.0);
    }

    pub fn map<'a, K, V>(&mut self, tag: &str, map: impl IntoIterator<Item = (&'a K, &'a V)>)
    where
        K: AsRef<str> + 'a,
        V: AsRef<str> + 'a,
    {
        self.part(tag.as_bytes());
        let mut count: u64 = 0;
        for (key, value) in map {
            self.text(key.as_ref(), value.as_ref());
            count += 1;
        }
        // The count closes the section: a tag that follows cannot be mistaken for another entry.
        self.0.update(&count.to_be_bytes());
    }

    pub fn finish(self) -> Digest {
        let mut digest = [0; 16];
        digest.copy_from_slice(&self.0.finish().as_ref()[..16]);
        Digest(digest)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn content(data: &[(&str, &str)]) -> Content {
        Content {
            data: data.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect(),
            ..Content::default()
        }
    }

    #[test]
    fn digest_separates_keys_from_values() {
        assert_ne!(content(&[("ab", "c")]).digest(), content(&[("a", "bc")]).digest());
        assert_ne!(content(&[("a", "b"), ("c", "d")]).digest(), content(&[("a", "bcd")]).digest());
        assert_ne!(content(&[("a", "")]).digest(), content(&[]).digest());
    }

    #[test]
    fn digest_covers_type_and_immutable() {
        let plain = content(&[("a", "b")]);
        let typed = Content { type_: Some("Opaque".into()), ..plain.clone() };
        let immutable = Content { immutable: true, ..plain.clone() };
        assert_ne!(plain.digest(), typed.digest());
        assert_ne!(plain.digest(), immutable.digest());
    }

    #[test]
    fn digest_of_an_object_is_that_of_its_content() {
        let map = |key: &str| Some([(key.to_owned(), "YQ==".to_owned())].into());
        let full = Object {
            data: map("a"),
            binary_data: map("b"),
            type_: Some("Opaque".into()),
            immutable: Some(true),
            ..Object::default()
        };
        for object in [full, Object::default()] {
            assert_eq!(Content::digest_of(&object), Content::split(object).1.digest());
        }
    }

    #[test]
    fn checksum_is_twelve_hex_digits_and_never_changes_between_versions() {
        // A change of the canonical form would rewrite every companion of every cluster on upgrade.
        assert_eq!(content(&[("sky", "blue")]).digest().checksum(), "5da0181232e6");
    }

    #[test]
    fn selection_copies_only_its_keys_under_their_new_names() {
        let selection =
            KeySelection(Some([("a", "a"), ("c", "d")].map(|(k, v)| (k.into(), v.into())).into()));
        let selected = content(&[("a", "1"), ("b", "2"), ("c", "3")]).select(&selection);
        assert!(selected == content(&[("a", "1"), ("d", "3")]));
    }

    #[test]
    fn debug_output_of_packed_content_shows_none_of_it() {
        let packed = content(&[("key", "hush")]).pack();
        assert!(!format!("{packed:?}").contains("hush"));
    }

    fn map() -> impl Strategy<Value = BTreeMap<String, String>> {
        proptest::collection::btree_map("[ab=,:]{0,3}", "[ab=,:]{0,3}", 0..4)
    }

    proptest! {
        #[test]
        fn digests_differ_exactly_when_content_differs(a in map(), b in map(), c in map(), d in map()) {
            let left = Content { data: a, binary: b, ..Content::default() };
            let right = Content { data: c, binary: d, ..Content::default() };
            prop_assert_eq!(left == right, left.digest() == right.digest());
        }

        #[test]
        fn digests_of_data_and_binary_data_never_collide(a in map()) {
            let text = Content { data: a.clone(), ..Content::default() };
            let binary = Content { binary: a.clone(), ..Content::default() };
            prop_assert_eq!(a.is_empty(), text.digest() == binary.digest());
        }

        #[test]
        fn digest_does_not_depend_on_the_order_of_keys(a in map()) {
            let forward = serde_json::to_string(&a).unwrap();
            let backward = format!("{{{}}}", a.iter().rev()
                .map(|(k, v)| format!("{}:{}", serde_json::json!(k), serde_json::json!(v)))
                .collect::<Vec<_>>().join(","));
            let digest = |text: &str| Content { data: serde_json::from_str(text).unwrap(), ..Content::default() }.digest();
            prop_assert_eq!(digest(&forward), digest(&backward));
        }
    }
}
