//! The policy of a source: its annotations, parsed and validated, or the [`Fault`] that keeps it from being mirrored.

pub mod content;
pub mod defaults;
pub mod list;
pub mod marks;
pub mod mistake;
pub mod pattern;
pub mod selector;

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Display,
    str::FromStr,
};

use kube_core::{Selector, SelectorExt};

use crate::{
    keys::Keys,
    object::{Kind, Meta, Object, ObjectKey, names},
    policy::content::KeySelection,
    text::shorten,
};
use defaults::Defaults;
use list::{BadList, MAX_ITEMS, MAX_KEYS, items};
use pattern::{Pattern, Patterns, any_matches};

/// The maximum length of the name of an object.
const MAX_NAME_BYTES: usize = 253;
/// How much of an annotation a message quotes: the API server may cut warnings to 256 characters.
pub(crate) const MAX_QUOTED_CHARS: usize = 60;
/// The maximum of characters that a message says about an annotation.
const MAX_PROBLEM_CHARS: usize = 200;

/// What the annotations of a source ask for.
#[derive(Debug, Clone, PartialEq)]
pub struct Policy {
    pub targets: Targets,
    pub companion: String,
    pub keys: KeySelection,
    pub copy_labels: Patterns,
    pub copy_annotations: Patterns,
    /// Labels and annotations that companions have and the source need not have.
    pub set_labels: BTreeMap<String, String>,
    pub set_annotations: BTreeMap<String, String>,
    pub protect: Protect,
    pub adopt: bool,
    pub paused: bool,
    pub when_removed: WhenRemoved,
}

/// The namespaces in which a source wants companions. A namespace is wanted if any of the fields matches it, and
/// `excluded` does not.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Targets {
    /// `.`: the source's own namespace.
    pub own: bool,
    /// Other namespaces that are listed by name, none of them excluded.
    pub names: BTreeSet<String>,
    pub patterns: Vec<Pattern>,
    pub selector: Option<Selector>,
    pub excluded: Vec<Pattern>,
    /// Companions exist only in namespaces whose `accept-from` names the source's, and where [`Self::own`] says so.
    pub needs_consent: bool,
}

/// Which requests for a companion the webhook refuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Protect {
    #[default]
    Edits,
    All,
    None,
}

/// What becomes of a companion when its source is deleted or unlabelled, or no longer wants it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WhenRemoved {
    #[default]
    Delete,
    /// Lockstep takes its marks off the companion, and the object stays.
    Keep,
}

/// Why a source is not mirrored. The message says what is wrong and what to do.
#[derive(Debug, Clone, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Fault {
    #[error("annotation {key}: {problem}")]
    Annotation { key: String, problem: String },
    #[error(
        "the companion's name `{name}` has {length} characters, {MAX_NAME_BYTES} are allowed: set {key} to a shorter one"
    )]
    NameTooLong { name: String, length: usize, key: String },
    #[error("the companion would overwrite its source: choose another {key}, or other target namespaces")]
    OwnName { key: String },
    #[error("the name kube-root-ca.crt belongs to Kubernetes in every namespace: choose another {key}")]
    ReservedName { key: String },
    #[error(
        "it is itself a companion of {source_key}: label that source, or remove Lockstep's labels and annotations from this copy"
    )]
    IsCompanion { source_key: String },
    #[error(
        "Secrets of type {0} are tied to one namespace and are never mirrored: remove the label that makes it a source"
    )]
    SecretType(String),
    #[error("the annotation {key} selects none of the keys that this object has: name at least one of them")]
    NothingSelected { key: String },
    #[error("a Secret of type {type_} needs the key {missing}: add it to the annotation {key}")]
    KeysBreakType { type_: String, missing: &'static str, key: String },
    #[error("sources are not allowed in Lockstep's own namespace: move this one to another namespace")]
    OwnNamespace,
}

impl Fault {
    /// The value of the `reason` label in metrics.
    pub const fn label(&self) -> &'static str {
        match self {
            Self::Annotation { .. } | Self::OwnName { .. } => "malformed",
            Self::NameTooLong { .. } => "name_too_long",
            Self::IsCompanion { .. } => "is_companion",
            Self::ReservedName { .. }
            | Self::NothingSelected { .. }
            | Self::SecretType(_)
            | Self::KeysBreakType { .. }
            | Self::OwnNamespace => "refused",
        }
    }
}

impl Policy {
    /// The policy of a source, or why it is not mirrored. Reads the names of keys, not their values.
    pub fn of(keys: &Keys, own_namespace: &str, key: &ObjectKey, object: &Object) -> Result<Self, Fault> {
        if *key.namespace == *own_namespace {
            return Err(Fault::OwnNamespace);
        }
        let policy = Self::parse(keys, &object.metadata)?;
        policy.check_secret(keys, key.kind, object)?;
        policy.check_selection(keys, object)?;
        Ok(policy)
    }

    /// Parses the annotations of a source: what a person wrote, else what the webhook stamped, else the built-in
    /// default. The defaults of its namespace are not read here: they apply once the webhook has stamped them on the
    /// source, because only then are they reviewed.
    pub fn parse(keys: &Keys, meta: &Meta) -> Result<Self, Fault> {
        if keys.has_marks(meta) {
            let source_key = meta
                .annotations
                .get(&keys.source)
                .map_or_else(|| "another source".to_owned(), |text| shorten(text, MAX_PROBLEM_CHARS));
            return Err(Fault::IsCompanion { source_key });
        }
        let mut parser = PolicyParser { keys, meta, defaults: Defaults::default() };
        parser.defaults = parser.parse(&keys.defaults, Defaults::from_annotation)?;
        let key_patterns = |key: &str, is_key: fn(&str) -> bool| {
            let expected = "a key nor a pattern such as `example.com/*`";
            parser.parse(key, |text| patterns(text, is_key, expected))
        };
        let targets = parser.targets()?;
        Ok(Self {
            companion: parser.companion_name(&targets)?,
            targets,
            keys: parser.parse(&keys.keys, key_selection)?,
            copy_labels: key_patterns(&keys.copy_labels, names::is_label_key)?,
            copy_annotations: key_patterns(&keys.copy_annotations, names::is_annotation_key)?,
            set_labels: parser.parse(&keys.set_labels, |text| {
                pairs(keys, text, |key, value| names::is_label_key(key) && names::is_label_value(value))
            })?,
            set_annotations: parser.parse(&keys.set_annotations, |text| {
                pairs(keys, text, |key, _| names::is_annotation_key(key))
            })?,
            protect: parser.protect()?,
            adopt: parser.parse(&keys.adopt, flag)?,
            paused: parser.parse(&keys.paused, flag)?,
            when_removed: parser.parse(&keys.when_removed, str::parse)?,
        })
    }

    /// Fails for Secrets that must not be mirrored, whatever the annotations say.
    fn check_secret(&self, keys: &Keys, kind: Kind, object: &Object) -> Result<(), Fault> {
        if kind != Kind::Secret {
            return Ok(());
        }
        let type_ = object.type_.as_deref().unwrap_or_default();
        if matches!(type_, "kubernetes.io/service-account-token" | "bootstrap.kubernetes.io/token") {
            return Err(Fault::SecretType(type_.to_owned()));
        }
        let copied = |key: &&str| self.keys.selected(object.data.as_ref()).any(|(to, _)| to == *key);
        match required_keys(type_).iter().find(|alternatives| !alternatives.iter().any(copied)) {
            Some(alternatives) => Err(Fault::KeysBreakType {
                type_: type_.to_owned(),
                missing: alternatives[0],
                key: keys.keys.clone(),
            }),
            None => Ok(()),
        }
    }

    /// Fails if companions would be empty although the source is not.
    fn check_selection(&self, keys: &Keys, object: &Object) -> Result<(), Fault> {
        let maps = [object.data.as_ref(), object.binary_data.as_ref()];
        let is_empty = maps.iter().flatten().all(|map| map.is_empty());
        let selects = || maps.iter().any(|map| self.keys.selected(*map).next().is_some());
        if is_empty || selects() { Ok(()) } else { Err(Fault::NothingSelected { key: keys.keys.clone() }) }
    }

    /// Whether two sources with this policy have the same companions.
    pub(crate) fn same_companion(&self, keys: &Keys, a: &Object, b: &Object) -> bool {
        let [a, b] = [a, b].map(|Object { metadata, data, binary_data, type_, immutable }| {
            let selected = |map| Vec::from_iter(self.keys.selected(map));
            (
                type_,
                immutable.unwrap_or_default(),
                Vec::from_iter(copied(keys, &self.copy_labels, &metadata.labels)),
                Vec::from_iter(copied(keys, &self.copy_annotations, &metadata.annotations)),
                selected(data.as_ref()),
                selected(binary_data.as_ref()),
            )
        });
        a == b
    }
}

/// The labels or annotations that are copied to a companion.
pub fn copied<'a>(
    keys: &Keys,
    patterns: &Patterns,
    from: &'a BTreeMap<String, String>,
) -> impl Iterator<Item = (&'a String, &'a String)> {
    from.iter().filter(|(key, _)| patterns.matches(key) && keys.may_copy(key))
}

/// The keys that the API server requires for a type of Secret: at least one of each group.
fn required_keys(type_: &str) -> &'static [&'static [&'static str]] {
    match type_ {
        "kubernetes.io/tls" => &[&["tls.crt"], &["tls.key"]],
        "kubernetes.io/dockerconfigjson" => &[&[".dockerconfigjson"]],
        "kubernetes.io/dockercfg" => &[&[".dockercfg"]],
        "kubernetes.io/ssh-auth" => &[&["ssh-privatekey"]],
        "kubernetes.io/basic-auth" => &[&["username", "password"]],
        _ => &[],
    }
}

impl Targets {
    /// The targets that a comma-separated list of `.`, names and patterns asks for, for a source in namespace `home`.
    /// An item behind a `!` is excluded. The error says what is wrong with the list.
    ///
    /// ```
    /// use std::collections::BTreeMap;
    /// use lockstep_core::policy::Targets;
    ///
    /// let targets = Targets::list("., team-*, !team-x", "home").unwrap();
    /// let labels = BTreeMap::new();
    /// assert!(targets.wants("home", "home", &labels));
    /// assert!(targets.wants("home", "team-a", &labels));
    /// assert!(!targets.wants("home", "team-x", &labels));
    /// assert!(!targets.wants("home", "other", &labels));
    /// assert!(Targets::list("Team", "home").is_err());
    /// ```
    pub fn list(text: &str, home: &str) -> Result<Self, String> {
        let mut targets = Self::default();
        // Names, patterns and exclusions are counted each for themselves, so a list may have as many of each, and `.`.
        for item in items(text, 3 * MAX_ITEMS + 1)? {
            let (excluded, item) = match item.strip_prefix('!') {
                Some(item) => (true, item.trim()),
                None => (false, item),
            };
            let pattern = Pattern::new(if item == "." { home } else { item });
            if item != "." && !names::is_label(&pattern.example()) {
                let item = quote(item);
                return Err(format!("{item} is neither `.`, a namespace nor a pattern such as `team-*`"));
            }
            if excluded {
                targets.excluded.push(pattern);
            } else if item == "." || item == home {
                targets.own = true;
            } else if pattern.is_name() {
                targets.names.insert(item.to_owned());
            } else {
                targets.add_pattern(pattern);
            }
        }
        // There are as many as sources, and a list that grows has room for four.
        targets.patterns.shrink_to_fit();
        targets.excluded.shrink_to_fit();
        let count = |found: usize, what: &str, instead: &str| match found {
            0..=MAX_ITEMS => Ok(()),
            _ => Err(format!("{found} {what}, {MAX_ITEMS} are allowed: use {instead}")),
        };
        count(targets.names.len(), "names", "a pattern such as `team-*` or a selector")?;
        count(targets.patterns.len(), "patterns", "a selector")?;
        count(targets.excluded.len(), "exclusions", "a pattern such as `!team-*`")?;
        targets.own &= !any_matches(&targets.excluded, home);
        targets.names.retain(|name| !any_matches(&targets.excluded, name));
        Ok(targets)
    }

    /// Keeps no pattern that another one covers: every pattern is a walk over namespaces.
    fn add_pattern(&mut self, pattern: Pattern) {
        if !self.patterns.iter().any(|known| known.covers(&pattern)) {
            self.patterns.retain(|known| !pattern.covers(known));
            self.patterns.push(pattern);
        }
    }

    /// Without patterns and selector.
    pub(crate) fn listed_by_name(&self) -> Self {
        Self { patterns: Vec::new(), selector: None, ..self.clone() }
    }

    /// Whether a source in namespace `home` wants a companion in `namespace`, which has these labels. At home the
    /// author needs the right, which no `accept-from` replaces, so patterns that need only consent do not reach it.
    pub fn wants(&self, home: &str, namespace: &str, labels: &BTreeMap<String, String>) -> bool {
        let matches = || {
            any_matches(&self.patterns, namespace)
                || self.selector.as_ref().is_some_and(|selector| selector.matches(labels))
        };
        let within_reach = || !(self.needs_consent && home == namespace);
        self.names_explicitly(home, namespace)
            || (within_reach() && matches() && !any_matches(&self.excluded, namespace))
    }

    /// Whether a pattern or a selector may match any namespace.
    pub const fn has_patterns(&self) -> bool {
        !self.patterns.is_empty() || self.selector.is_some()
    }

    /// Whether only the source's own namespace can match.
    pub(crate) fn only_own(&self) -> bool {
        self.names.is_empty() && !self.has_patterns()
    }

    /// Whether it matches no namespace: everything is excluded.
    pub fn is_empty(&self) -> bool {
        self.only_own() && !self.own
    }

    /// Whether a namespace is wanted by its name, not by a pattern: then it is worth a warning if it gets no companion.
    pub fn names_explicitly(&self, home: &str, namespace: &str) -> bool {
        self.names.contains(namespace) || (self.own && home == namespace)
    }
}

impl Protect {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Edits => "edits",
            Self::All => "all",
            Self::None => "none",
        }
    }
}

impl FromStr for Protect {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        one_of(text, &[Self::Edits, Self::All, Self::None].map(|protect| (protect.as_str(), protect)))
    }
}

impl WhenRemoved {
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Delete => "delete",
            Self::Keep => "keep",
        }
    }
}

impl FromStr for WhenRemoved {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        one_of(text, &[Self::Delete, Self::Keep].map(|choice| (choice.as_str(), choice)))
    }
}

/// Parses one annotation at a time; an error names the annotation.
struct PolicyParser<'a> {
    keys: &'a Keys,
    meta: &'a Meta,
    /// Those that the webhook stamped on the source.
    defaults: Defaults,
}

impl<'a> PolicyParser<'a> {
    fn get(&self, key: &str) -> Option<&'a str> {
        self.meta.annotations.get(key).map(String::as_str)
    }

    /// What an annotation says; the default of its type if it is absent.
    fn parse<T: Default, E: Display>(
        &self,
        key: &str,
        parse: impl FnOnce(&str) -> Result<T, E>,
    ) -> Result<T, Fault> {
        let Some(text) = self.get(key) else { return Ok(T::default()) };
        parse(text).map_err(|problem| fault(key, &problem))
    }

    fn targets(&self) -> Result<Targets, Fault> {
        let keys = self.keys;
        // Default targets apply together or not at all: people who write one of the keys choose all targets.
        let by_person = keys.sets_targets(self.meta);
        let (names, selector) = if by_person {
            (self.get(&keys.target_namespaces), self.get(&keys.target_selector))
        } else {
            self.defaults.targets()
        };
        let bad = |key: &str, problem: &dyn Display| {
            if by_person { fault(key, problem) } else { self.fault_of_default(key, problem) }
        };
        let selector = selector.map(selector::parse).transpose();
        let selector = selector.map_err(|error| bad(&keys.target_selector, &error))?;
        let listed = match names {
            None => Targets { own: selector.is_none(), ..Targets::default() },
            Some(text) => Targets::list(text, &self.meta.namespace)
                .map_err(|problem| bad(&keys.target_namespaces, &problem))?,
        };
        let needs_consent = self.parse(&keys.consent, |text| one_of(text, &[("required", true)]))?;
        let targets = Targets { selector, needs_consent, ..listed };
        if targets.is_empty() {
            return Err(bad(&keys.target_namespaces, &BadList::OnlyExclusions));
        }
        Ok(targets)
    }

    /// What is wrong with a default, which stands in an annotation that the source's author did not write.
    fn fault_of_default(&self, key: &str, problem: &dyn Display) -> Fault {
        fault(&self.keys.defaults, &format!("{key}: {problem}"))
    }

    fn companion_name(&self, targets: &Targets) -> Result<String, Fault> {
        let key = &self.keys.companion_name;
        let name = match self.get(key) {
            None => format!("{}{}", self.meta.name, self.keys.suffix),
            Some("=") => self.meta.name.clone(),
            Some(name) if name.len() > MAX_NAME_BYTES || names::is_subdomain(name) => name.to_owned(),
            Some(name) => {
                return Err(fault(key, &format!("{} is not a valid name of an object", quote(name))));
            }
        };
        if name.len() > MAX_NAME_BYTES {
            let length = name.len();
            let name = shorten(&name, MAX_QUOTED_CHARS);
            return Err(Fault::NameTooLong { name, length, key: key.clone() });
        }
        if name == "kube-root-ca.crt" {
            return Err(Fault::ReservedName { key: key.clone() });
        }
        // In other namespaces, companions with the name of their source are common.
        let home = &self.meta.namespace;
        if name == self.meta.name && targets.names_explicitly(home, home) {
            return Err(Fault::OwnName { key: key.clone() });
        }
        Ok(name)
    }

    fn protect(&self) -> Result<Protect, Fault> {
        let key = &self.keys.protect;
        match &self.defaults.protect {
            Some(text) if self.get(key).is_none() => {
                text.parse().map_err(|problem: String| self.fault_of_default(key, &problem))
            }
            _ => self.parse(key, str::parse),
        }
    }
}

/// `a,b=c`: which keys are copied, and under which names.
fn key_selection(text: &str) -> Result<KeySelection, String> {
    let mut selected = BTreeMap::new();
    let mut taken = BTreeSet::new();
    for item in items(text, MAX_KEYS)? {
        let (from, to) = item.split_once('=').map_or((item, item), |(from, to)| (from.trim(), to.trim()));
        if let Some(bad) = [from, to].into_iter().find(|name| !names::is_data_key(name)) {
            return Err(format!("{} is not a valid key", quote(bad)));
        }
        if !taken.insert(to) {
            return Err(format!("two keys would be copied to `{to}`: give one another name"));
        }
        if selected.insert(from.to_owned(), to.to_owned()).is_some() {
            return Err(format!("`{from}` is named twice"));
        }
    }
    Ok(KeySelection(Some(selected)))
}

/// `a=b,c=d`: labels or annotations for companions.
fn pairs(
    keys: &Keys,
    text: &str,
    is_valid: impl Fn(&str, &str) -> bool,
) -> Result<BTreeMap<String, String>, String> {
    let mut pairs = BTreeMap::new();
    for item in items(text, MAX_ITEMS)? {
        let bad = |problem: &str| format!("{} {problem}", quote(item));
        let (name, value) = item.split_once('=').ok_or_else(|| bad("has no value: write `key=value`"))?;
        let name = name.trim();
        let value = value.trim();
        if !is_valid(name, value) {
            return Err(bad("is not a valid key and value"));
        }
        if !keys.may_copy(name) {
            return Err(bad("has a key that companions must not have"));
        }
        if pairs.insert(name.to_owned(), value.to_owned()).is_some() {
            return Err(bad("sets a key that was set before"));
        }
    }
    Ok(pairs)
}

fn flag(text: &str) -> Result<bool, String> {
    one_of(text, &[("true", true), ("false", false)])
}

/// The value of one of a few words. The error names them.
fn one_of<T: Copy>(text: &str, words: &[(&str, T)]) -> Result<T, String> {
    if let Some((_, value)) = words.iter().find(|(word, _)| *word == text) {
        return Ok(*value);
    }
    let expected: Vec<String> = words.iter().map(|(word, _)| format!("`{word}`")).collect();
    let text = quote(text);
    Err(match &*expected {
        [one] => format!("{text} is not {one}"),
        [one, other] => format!("{text} is neither {one} nor {other}"),
        all => format!("{text} is none of {}", all.join(", ")),
    })
}

/// A comma-separated list of names and patterns, with exclusions, that can match what is valid. The error says what is
/// wrong with it.
fn patterns(text: &str, is_valid: fn(&str) -> bool, expected: &str) -> Result<Patterns, String> {
    let patterns: Patterns = text.parse()?;
    if let Some(bad) = patterns.iter().find(|pattern| !is_valid(&pattern.example())) {
        return Err(format!("{} is neither {expected}", quote(bad.as_str())));
    }
    Ok(patterns)
}

/// As [`patterns`], of namespaces.
pub fn namespace_patterns(text: &str) -> Result<Patterns, String> {
    patterns(text, names::is_label, "a namespace nor a pattern such as `team-*`")
}

/// The beginning of what somebody wrote, for a message.
fn quote(text: &str) -> String {
    format!("`{}`", shorten(text, MAX_QUOTED_CHARS))
}

/// What is wrong with an annotation, in a text of bounded length.
pub fn fault(key: &str, problem: &dyn Display) -> Fault {
    Fault::Annotation { key: key.to_owned(), problem: shorten(&problem.to_string(), MAX_PROBLEM_CHARS) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys() -> Keys {
        Keys::new("workshop.io", "-synced")
    }

    fn source(annotations: &[(&str, &str)]) -> Meta {
        Meta {
            name: "colors".into(),
            namespace: "home".into(),
            annotations: annotations
                .iter()
                .map(|(key, value)| (format!("workshop.io/{key}"), (*value).to_owned()))
                .collect(),
            ..Meta::default()
        }
    }

    fn parse(annotations: &[(&str, &str)]) -> Result<Policy, Fault> {
        Policy::parse(&keys(), &source(annotations))
    }

    #[test]
    fn source_without_annotations_has_the_built_in_defaults() {
        let policy = parse(&[]).unwrap();
        assert!(policy.targets.own && policy.targets.only_own());
        assert_eq!(policy.companion, "colors-synced");
        assert_eq!(policy.protect, Protect::Edits);
        assert!(!policy.adopt && !policy.paused);
        assert_eq!(policy.when_removed, WhenRemoved::Delete);
    }

    #[test]
    fn stamped_defaults_apply_where_a_person_set_nothing() {
        let stamped =
            ("defaults", r#"{"target-namespaces":"a","target-selector":"env=dev","protect":"all"}"#);
        let (a, dev) = ("a", BTreeMap::from([("env".to_owned(), "dev".to_owned())]));
        let wants = |policy: &Policy| {
            let none = BTreeMap::new();
            [
                policy.targets.own,
                policy.targets.wants("home", a, &none),
                policy.targets.wants("home", "b", &dev),
            ]
        };
        let policy = parse(&[stamped]).unwrap();
        assert_eq!((wants(&policy), policy.protect), ([false, true, true], Protect::All));
        // Targets are one group: the stamp may be older than what the person wrote.
        for (key, value, wanted) in [
            ("target-namespaces", ".", [true, false, false]),
            ("target-namespaces", "a", [false, true, false]),
            ("target-selector", "env", [false, false, true]),
        ] {
            let policy = parse(&[stamped, (key, value)]).unwrap();
            assert_eq!((wants(&policy), policy.protect), (wanted, Protect::All), "{key}={value}");
        }
        let policy = parse(&[stamped, ("protect", "none")]).unwrap();
        assert_eq!((wants(&policy), policy.protect), ([false, true, true], Protect::None));
        let policy = parse(&[("defaults", r#"{"protect":"none"}"#)]).unwrap();
        assert_eq!((wants(&policy), policy.protect), ([true, false, false], Protect::None));
    }

    /// An earlier build wrote defaults into the keys of people.
    #[test]
    fn source_stamped_by_an_earlier_build_keeps_its_policy() {
        let stamped = [("target-namespaces", "."), ("protect", "edits")];
        assert_eq!(parse(&stamped), parse(&[]));
        let newer = ("defaults", r#"{"target-namespaces":"*","protect":"none"}"#);
        assert_eq!(parse(&[stamped[0], stamped[1], newer]), parse(&[]));
    }

    #[test]
    fn malformed_default_that_nothing_replaces_is_a_fault() {
        for value in [r#"{"target-namespaces":"!a"}"#, r#"{"target-selector":""}"#] {
            let fault = parse(&[("defaults", value)]).expect_err(value).to_string();
            assert!(fault.starts_with("annotation workshop.io/defaults: workshop.io/target-"), "{fault}");
            assert!(parse(&[("defaults", value), ("target-namespaces", ".")]).is_ok());
        }
        let value = ("defaults", r#"{"protect":"everything"}"#);
        let fault = parse(&[value]).unwrap_err().to_string();
        assert!(
            fault.starts_with("annotation workshop.io/defaults: workshop.io/protect: `everything`"),
            "{fault}"
        );
        assert!(parse(&[value, ("protect", "all")]).is_ok());
    }

    #[test]
    fn targets_match_own_namespace_names_patterns_and_selector() {
        let policy =
            parse(&[("target-namespaces", "., other, team-*"), ("target-selector", "env in (dev)")]).unwrap();
        let dev = BTreeMap::from([("env".to_owned(), "dev".to_owned())]);
        let none = BTreeMap::new();
        for (namespace, labels, expected) in [
            ("home", &none, true),
            ("other", &none, true),
            ("team-x", &none, true),
            ("third", &none, false),
            ("third", &dev, true),
        ] {
            assert_eq!(policy.targets.wants("home", namespace, labels), expected, "{namespace}");
        }
    }

    #[test]
    fn patterns_that_another_one_covers_are_merged() {
        let patterns = |text: &str| {
            let targets = parse(&[("target-namespaces", text)]).unwrap().targets;
            targets.patterns.iter().map(ToString::to_string).collect::<Vec<_>>()
        };
        assert_eq!(patterns("team-a*,b*,team-*,team-b*-qa,b*"), ["b*", "team-*"]);
        assert_eq!(patterns(&["*"; 50].join(",")), ["*"]);
        assert_eq!(patterns("a*,*,*-b"), ["*"]);
    }

    #[test]
    fn exclusion_wins_over_names_patterns_selector_and_own_namespace() {
        let dev = BTreeMap::from([("env".to_owned(), "dev".to_owned())]);
        let selector = ("target-selector", "env=dev");
        for (annotations, wanted, unwanted) in [
            (&[("target-namespaces", "!team-x,*")][..], &["home", "team-a"][..], &["team-x"][..]),
            (&[("target-namespaces", "*,!.,!*-qa")], &["team-a"], &["home", "a-qa"]),
            (&[("target-namespaces", "., a, b, !home, !a")], &["b"], &["home", "a"]),
            (&[("target-namespaces", "!team-*"), selector], &["a", "home"], &["team-a"]),
        ] {
            let targets = parse(annotations).unwrap().targets;
            assert!(wanted.iter().all(|name| targets.wants("home", name, &dev)), "{annotations:?}");
            assert!(!unwanted.iter().any(|name| targets.wants("home", name, &dev)), "{annotations:?}");
        }
        let one = parse(&[("target-namespaces", "a, !a, b")]).unwrap().targets;
        assert!(!one.names.contains("a"), "no right is needed where nothing is wanted");
    }

    #[test]
    fn selector_alone_does_not_match_the_own_namespace() {
        assert!(!parse(&[("target-selector", "env=dev")]).unwrap().targets.own);
    }

    #[test]
    fn fault_of_a_malformed_annotation_names_it() {
        let fifty_one = (0..51).map(|n| format!("n{n}")).collect::<Vec<_>>().join(",");
        let prefixes = (10..61).map(|n| format!("n{n}*")).collect::<Vec<_>>().join(",");
        let hundred_one = (0..101).map(|n| format!("k{n}")).collect::<Vec<_>>().join(",");
        let long = "x".repeat(250_000);
        for (key, value) in [
            ("target-namespaces", prefixes.as_str()),
            ("target-selector", fifty_one.as_str()),
            ("copy-labels", fifty_one.as_str()),
            ("copy-annotations", fifty_one.as_str()),
            ("target-namespaces", ""),
            ("target-namespaces", "a*-"),
            ("target-namespaces", "!team-*"),
            ("target-namespaces", "a,!a"),
            ("target-namespaces", "Not-A-Namespace"),
            ("consent", "true"),
            ("set-labels", "a"),
            ("set-labels", "a=b c"),
            ("set-labels", "a=b,a=c"),
            ("set-labels", "workshop.io/companion=true"),
            ("set-annotations", "argocd.argoproj.io/tracking-id=x"),
            ("set-annotations", fifty_one.as_str()),
            ("target-namespaces", fifty_one.as_str()),
            ("target-selector", ""),
            ("target-selector", "a in b"),
            ("companion-name", "Upper"),
            ("target-selector", long.as_str()),
            ("keys", ""),
            ("keys", hundred_one.as_str()),
            ("keys", long.as_str()),
            ("copy-labels", long.as_str()),
            ("target-namespaces", long.as_str()),
            ("keys", "a=x,b=x"),
            ("keys", "a,a=b"),
            ("keys", "a/b"),
            ("copy-labels", "a b"),
            ("copy-annotations", "!a"),
            ("protect", "everything"),
            ("adopt", "yes"),
            ("paused", "1"),
            ("when-removed", "true"),
            ("defaults", ""),
            ("defaults", "{"),
            ("defaults", r#"{"protect":"all","paused":"true"}"#),
            ("defaults", long.as_str()),
        ] {
            let fault = parse(&[(key, value)]).expect_err(&format!("{key}={value}"));
            assert!(fault.to_string().contains(&format!("workshop.io/{key}")), "{fault}");
            assert_eq!(fault.label(), "malformed", "{fault}");
            assert!(fault.to_string().len() < 300, "{key}");
        }
    }

    #[test]
    fn impossible_companion_names_are_faults() {
        assert!(matches!(parse(&[("companion-name", "kube-root-ca.crt")]), Err(Fault::ReservedName { .. })));
        for own in ["colors", "="] {
            assert!(matches!(parse(&[("companion-name", own)]), Err(Fault::OwnName { .. })));
        }
        let elsewhere = parse(&[("companion-name", "="), ("target-namespaces", "*")]).unwrap();
        assert_eq!(elsewhere.companion, "colors");
        assert!(parse(&[("companion-name", "colors"), ("target-namespaces", "other")]).is_ok());
        let long = Meta { name: "x".repeat(250), ..source(&[]) };
        assert!(matches!(Policy::parse(&keys(), &long), Err(Fault::NameTooLong { .. })));
    }

    #[test]
    fn companion_as_a_source_is_a_fault() {
        let mut meta = source(&[("source", "a/b")]);
        meta.labels.insert("workshop.io/companion".into(), "true".into());
        assert!(matches!(Policy::parse(&keys(), &meta), Err(Fault::IsCompanion { .. })));
    }

    #[test]
    fn token_secrets_and_secrets_without_a_required_key_are_faults() {
        let policy = parse(&[]).unwrap();
        let secret = |type_: &str, held: &[&str]| Object {
            metadata: source(&[]),
            type_: Some(type_.into()),
            data: Some(held.iter().map(|key| ((*key).to_owned(), String::new())).collect()),
            binary_data: None,
            immutable: None,
        };
        let check = |object: &Object| policy.check_secret(&keys(), Kind::Secret, object);
        for type_ in ["kubernetes.io/service-account-token", "bootstrap.kubernetes.io/token"] {
            assert!(matches!(check(&secret(type_, &["token"])), Err(Fault::SecretType(_))));
        }
        assert!(matches!(
            check(&secret("kubernetes.io/tls", &["tls.crt"])),
            Err(Fault::KeysBreakType { .. })
        ));
        assert!(check(&secret("kubernetes.io/tls", &["tls.crt", "tls.key"])).is_ok());
        assert!(check(&secret("kubernetes.io/basic-auth", &["password"])).is_ok());
        assert!(check(&secret("Opaque", &[])).is_ok());
    }
}
