//! What is probably a mistake on a source or a Namespace, although nothing is malformed.

use super::{MAX_QUOTED_CHARS, Policy, pattern::Pattern};
use crate::{keys::Keys, object::Meta, text::shorten};

/// How many mistakes of one object are kept and reported.
const MAX_MISTAKES: usize = 5;
/// A key that differs from a known one by so many letters is probably meant to be that one.
const MAX_TYPOS: usize = 2;
/// The maximum length of a key behind its domain. The API server allows no longer one, but peers may send it.
const MAX_KEY_NAME_BYTES: usize = 63;

/// The message says what has no effect, and what was probably meant.
#[derive(Debug, Clone, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Mistake {
    #[error("the {place} {key} is unknown and has no effect: did you mean {known}?")]
    Typo { place: &'static str, key: String, known: String },
    #[error("the {place} {key} is unknown and has no effect")]
    Unknown { place: &'static str, key: String },
    #[error("the {place} {key} has no effect here: it is {belongs}")]
    Misplaced { place: &'static str, key: String, belongs: &'static str },
    #[error("{key}: `{item}` is never copied to companions")]
    NeverCopied { key: String, item: String },
}

impl Mistake {
    /// The key that the mistake is about.
    pub fn key(&self) -> &str {
        match self {
            Self::Typo { key, .. }
            | Self::Unknown { key, .. }
            | Self::Misplaced { key, .. }
            | Self::NeverCopied { key, .. } => key,
        }
    }

    /// The first mistakes on a source.
    pub(crate) fn on_source(keys: &Keys, meta: &Meta, policy: &Policy) -> Vec<Self> {
        let known = Known {
            labels: &[&keys.managed],
            annotations: &keys.on_source(),
            others: &keys.left_on_source(),
        };
        let elsewhere = |key: &str| keys.on_namespace().contains(&key).then_some("for Namespaces");
        let lists =
            [(&keys.copy_labels, &policy.copy_labels), (&keys.copy_annotations, &policy.copy_annotations)];
        let never_copied = lists.into_iter().flat_map(|(key, patterns)| {
            let is_never_copied = |item: &&Pattern| item.is_name() && !keys.may_copy(item.as_str());
            let items = patterns.included.iter().filter(is_never_copied);
            items.map(|item| Self::NeverCopied {
                key: key.clone(),
                item: shorten(item.as_str(), MAX_QUOTED_CHARS),
            })
        });
        known.mistakes(keys, meta, elsewhere).chain(never_copied).take(MAX_MISTAKES).collect()
    }

    /// The first mistake on a Namespace.
    pub(crate) fn on_namespace(keys: &Keys, meta: &Meta) -> Option<Self> {
        let known = Known { labels: &[&keys.exclude], annotations: &keys.on_namespace(), others: &[] };
        let elsewhere = |key: &str| {
            (key == keys.managed || keys.on_source().contains(&key)).then_some("for ConfigMaps and Secrets")
        };
        known.mistakes(keys, meta, elsewhere).next()
    }
}

/// The keys that have a meaning on an object.
struct Known<'a> {
    labels: &'a [&'a str],
    annotations: &'a [&'a str],
    /// Labels and annotations that are no mistakes, and that nobody should write.
    others: &'a [&'a str],
}

impl Known<'_> {
    fn mistakes(
        &self,
        keys: &Keys,
        meta: &Meta,
        elsewhere: impl Fn(&str) -> Option<&'static str>,
    ) -> impl Iterator<Item = Mistake> {
        let mut mistakes = Vec::new();
        for (place, found, here, there, swapped) in [
            ("label", &meta.labels, self.labels, self.annotations, "an annotation"),
            ("annotation", &meta.annotations, self.annotations, self.labels, "a label"),
        ] {
            let is_known = |key: &&str| here.contains(key) || self.others.contains(key);
            let ours = found.keys().map(String::as_str).filter(|key| keys.is_ours(key) && !is_known(key));
            mistakes.extend(ours.take(MAX_MISTAKES).map(|key| {
                let belongs = there.contains(&key).then_some(swapped).or_else(|| elsewhere(key));
                let key = key.to_owned();
                match (belongs, nearest(&key, here)) {
                    (Some(belongs), _) => Mistake::Misplaced { place, key, belongs },
                    (None, Some(known)) => Mistake::Typo { place, key, known },
                    (None, None) => Mistake::Unknown { place, key },
                }
            }));
        }
        mistakes.into_iter()
    }
}

/// The known key that this one was probably meant to be.
fn nearest(key: &str, known: &[&str]) -> Option<String> {
    let name = |key: &str| key.split_once('/').map_or(String::new(), |(_, name)| name.to_lowercase());
    let typed = name(key);
    if typed.len() > MAX_KEY_NAME_BYTES {
        return None;
    }
    let distance = |known: &&str| strsim::damerau_levenshtein(&typed, &name(known));
    let nearest = known.iter().copied().min_by_key(distance)?;
    let typos = distance(&nearest);
    (typos <= MAX_TYPOS && typos < typed.len() / 2).then(|| nearest.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{keys, namespace, source};

    fn on_source(draft: &crate::testing::ObjectBuilder) -> Vec<String> {
        let policy = Policy::parse(&keys(), draft.meta()).unwrap();
        Mistake::on_source(&keys(), draft.meta(), &policy).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn unknown_key_is_a_mistake_and_a_near_miss_is_named() {
        for (key, message) in [
            ("tagret-namespaces", "did you mean workshop.io/target-namespaces?"),
            ("Protect", "did you mean workshop.io/protect?"),
            ("target-selecter", "did you mean workshop.io/target-selector?"),
            ("companion-names", "did you mean workshop.io/companion-name?"),
            ("frequency", "the annotation workshop.io/frequency is unknown and has no effect"),
            (
                "accept-from",
                "the annotation workshop.io/accept-from has no effect here: it is for Namespaces",
            ),
            ("managed", "the annotation workshop.io/managed has no effect here: it is a label"),
        ] {
            let mistakes = on_source(&source("home", "colors").annotate(key, "x"));
            assert!(mistakes.len() == 1 && mistakes[0].ends_with(message), "{key}: {mistakes:?}");
        }
        let mistakes = on_source(&source("home", "colors").label("paused", "true"));
        assert_eq!(mistakes, ["the label workshop.io/paused has no effect here: it is an annotation"]);
    }

    #[test]
    fn known_and_foreign_keys_are_no_mistakes() {
        let draft =
            source("home", "colors").annotate("example.com/tagret-namespaces", "x").label("a.b/c", "d");
        // What is left of a companion that somebody copied.
        let draft = draft.label("source-namespace", "x").label("source-name", "x").annotate("copied", "l:x");
        let draft = keys().on_source().iter().fold(draft, |draft, key| match *key {
            "workshop.io/target-namespaces" | "workshop.io/keys" => draft.annotate(key, "a"),
            _ => draft,
        });
        assert_eq!(on_source(&draft), [""; 0]);
    }

    #[test]
    fn key_that_is_never_copied_is_a_mistake_unless_a_pattern_matches_it() {
        let draft = source("home", "colors").annotate("copy-labels", "team,app.kubernetes.io/managed-by");
        assert_eq!(
            on_source(&draft),
            ["workshop.io/copy-labels: `app.kubernetes.io/managed-by` is never copied to companions"]
        );
        assert_eq!(on_source(&source("home", "colors").annotate("copy-labels", "*")), [""; 0]);
    }

    #[test]
    fn number_and_length_of_mistakes_are_bounded() {
        let mut draft = source("home", "colors");
        for n in 0..10_000 {
            draft = draft.annotate(&format!("{n:060}"), "x");
        }
        let mistakes = on_source(&draft);
        assert!(mistakes.len() == MAX_MISTAKES && mistakes.iter().all(|text| text.len() < 300));
    }

    #[test]
    fn mistake_on_a_namespace_is_found() {
        let found = |draft: &crate::testing::ObjectBuilder| {
            Mistake::on_namespace(&keys(), draft.meta()).map(|mistake| mistake.to_string())
        };
        assert_eq!(
            found(&namespace("away").annotate("acept-from", "a")).unwrap(),
            "the annotation workshop.io/acept-from is unknown and has no effect: did you mean workshop.io/accept-from?"
        );
        assert_eq!(
            found(&namespace("away").label("managed", "true")).unwrap(),
            "the label workshop.io/managed has no effect here: it is for ConfigMaps and Secrets"
        );
        assert_eq!(found(&namespace("away").annotate("accept-from", "a").label("exclude", "true")), None);
    }
}
