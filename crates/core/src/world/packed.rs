//! Small forms of what there is for each companion: its UID, its resourceVersion, and what it shares with others.
//!
//! A cluster may have a hundred thousand companions. As text, a UID takes 72 bytes and a resourceVersion 56; packed,
//! they take 24 and 16. All companions of a source usually have the same content, marks and name, so each of these is
//! kept once.

use std::{collections::HashSet, fmt, hash::Hash, sync::Arc};

use crate::object::version_number;

/// How many values an [`Interner`] may have before it looks for those that nobody uses any more.
const MIN_VALUES: usize = 64;

/// A UID. The API server makes random UUIDs, but promises only some text.
///
/// ```
/// use lockstep_core::world::Uid;
///
/// let uid = Uid::from("0f8fad5b-d9cb-469f-a165-70867728950e");
/// assert_eq!(uid.to_string(), "0f8fad5b-d9cb-469f-a165-70867728950e");
/// assert_eq!(Uid::from("any other text").to_string(), "any other text");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Uid {
    /// A UUID in lower case with four hyphens.
    Uuid([u8; 16]),
    Text(Box<str>),
}

/// A resourceVersion. The API server writes numbers, and clients send back what they got, letter by letter.
///
/// ```
/// use lockstep_core::world::Version;
///
/// assert_eq!(Version::from("4711").to_string(), "4711");
/// assert_eq!(Version::from("04711").to_string(), "04711");
/// ```
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Version {
    /// A number as `to_string` writes it: without a sign or leading zeros.
    Number(u64),
    Text(Box<str>),
}

/// Keeps one copy of equal values. Those that nobody uses any more are dropped from time to time.
#[derive(Debug)]
pub struct Interner<T: ?Sized> {
    values: HashSet<Arc<T>>,
    /// With so many values, it looks for those that nobody uses any more.
    limit: usize,
}

/// The bytes of a UUID, if this is just the text that [`Uid`] writes for them.
fn parse_uuid(text: &str) -> Option<[u8; 16]> {
    let is_canonical = |(position, letter): (usize, u8)| match position {
        8 | 13 | 18 | 23 => letter == b'-',
        _ => matches!(letter, b'0'..=b'9' | b'a'..=b'f'),
    };
    if text.len() != 36 || !text.bytes().enumerate().all(is_canonical) {
        return None;
    }
    let digits =
        |number: u128, group: &str| Some(number << (4 * group.len()) | u128::from_str_radix(group, 16).ok()?);
    text.split('-').try_fold(0, digits).map(u128::to_be_bytes)
}

impl From<&str> for Uid {
    fn from(text: &str) -> Self {
        parse_uuid(text).map_or_else(|| Self::Text(text.into()), Self::Uuid)
    }
}

impl PartialEq<str> for Uid {
    fn eq(&self, text: &str) -> bool {
        match self {
            Self::Uuid(bytes) => parse_uuid(text).is_some_and(|other| other == *bytes),
            Self::Text(known) => **known == *text,
        }
    }
}

impl fmt::Display for Uid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let hex = match self {
            Self::Uuid(bytes) => format!("{:032x}", u128::from_be_bytes(*bytes)),
            Self::Text(text) => return f.write_str(text),
        };
        write!(f, "{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
    }
}

impl Version {
    /// Which of two versions is the newer one: see [`crate::object::Meta::version`].
    pub fn number(&self) -> u64 {
        match self {
            Self::Number(number) => *number,
            Self::Text(text) => version_number(text),
        }
    }
}

impl From<&str> for Version {
    fn from(text: &str) -> Self {
        // Without a sign and leading zeros, it has as many letters as the number has digits.
        let is_canonical = |number: &u64| number.checked_ilog10().unwrap_or(0) as usize + 1 == text.len();
        let number = text.parse().ok().filter(is_canonical);
        number.map_or_else(|| Self::Text(text.into()), Self::Number)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => write!(f, "{number}"),
            Self::Text(text) => f.write_str(text),
        }
    }
}

impl<T: ?Sized> Default for Interner<T> {
    fn default() -> Self {
        Self { values: HashSet::new(), limit: MIN_VALUES }
    }
}

impl<T: ?Sized + Eq + Hash> Interner<T> {
    /// The copy that is kept of a value, if there is one.
    pub fn get(&self, value: &T) -> Option<Arc<T>> {
        self.values.get(value).cloned()
    }

    /// The copy that is kept of a value: this one if there is none.
    pub fn intern(&mut self, value: Arc<T>) -> Arc<T> {
        if let Some(known) = self.values.get(&value) {
            return known.clone();
        }
        if self.values.len() >= self.limit {
            self.values.retain(|value| Arc::strong_count(value) > 1);
            // Each value is looked at a few times only, and at most a quarter are not in use.
            self.limit = MIN_VALUES + self.values.len() + self.values.len() / 4;
            self.values.shrink_to(self.limit);
        }
        self.values.insert(value.clone());
        value
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn packed_identity_is_small() {
        assert_eq!((size_of::<Uid>(), size_of::<Version>()), (24, 16));
    }

    #[test]
    fn canonical_texts_are_packed_and_others_are_not() {
        let uuid = "0f8fad5b-d9cb-469f-a165-70867728950e";
        assert!(matches!(Uid::from(uuid), Uid::Uuid(_)));
        for text in ["", &uuid.to_uppercase(), &uuid[1..], &format!("{uuid}0"), &uuid.replace('-', "0")] {
            assert!(matches!(Uid::from(text), Uid::Text(_)), "{text}");
        }
        for text in ["0", "1", "18446744073709551615"] {
            assert!(matches!(Version::from(text), Version::Number(_)), "{text}");
        }
        for text in ["", "+1", "01", "00", "-1", "1 ", "18446744073709551616", "v1"] {
            assert!(matches!(Version::from(text), Version::Text(_)), "{text}");
        }
    }

    #[test]
    fn values_are_kept_once_and_dropped_when_nobody_uses_them() {
        let mut interner = Interner::<str>::default();
        let kept = interner.intern("kept".into());
        assert!(Arc::ptr_eq(&kept, &interner.intern("kept".into())));
        for n in 0..10_000 {
            interner.intern(n.to_string().into());
        }
        assert!(interner.values.len() <= 2 * MIN_VALUES, "{}", interner.values.len());
        assert!(Arc::ptr_eq(&kept, &interner.intern("kept".into())));
    }

    /// UUIDs, texts that are nearly one, and any others.
    fn uid() -> impl Strategy<Value = String> {
        prop_oneof![
            "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}",
            "[0-9a-fA-F-]{34,38}",
            "[0-9a-f]{8}(-[0-9a-g]{4}){3}-[0-9a-fü]{12}",
            ".*",
        ]
    }

    fn version() -> impl Strategy<Value = String> {
        prop_oneof![any::<u64>().prop_map(|number| number.to_string()), "[-+]?0{0,2}[0-9]{0,22}", ".*"]
    }

    proptest! {
        #[test]
        fn packed_texts_come_back_letter_by_letter(uid in uid(), version in version()) {
            prop_assert_eq!(Uid::from(&*uid).to_string(), uid);
            prop_assert_eq!(Version::from(&*version).number(), version_number(&version));
            prop_assert_eq!(Version::from(&*version).to_string(), version);
        }

        #[test]
        fn packed_texts_are_equal_exactly_when_the_texts_are(a in uid(), b in uid(), c in version(), d in version()) {
            let (left, right) = (Uid::from(&*a), Uid::from(&*b));
            prop_assert_eq!(left == right, a == b);
            prop_assert_eq!(left == *b, a == b);
            prop_assert!(left == *a && right == *b);
            prop_assert_eq!(Version::from(&*c) == Version::from(&*d), c == d);
        }
    }
}
