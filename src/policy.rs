//! The policy of a source: its annotations, parsed and validated, or the [`Fault`] that keeps it from being mirrored.

pub mod list;
pub mod pattern;
pub mod selector;

use std::{
    collections::{BTreeMap, BTreeSet},
    str::FromStr,
};

use kube::core::{Selector, SelectorExt};

use crate::{
    content::KeySelection,
    keys::Keys,
    names,
    object::{Kind, Meta, Object, ObjectKey},
    text::shorten,
};
use list::{MAX_ITEMS, MAX_KEYS, items};
use pattern::{BadPattern, Pattern, Patterns};

/// The maximum length of the name of an object.
const MAX_NAME_BYTES: usize = 253;
/// How much of an annotation a message quotes.
const MAX_QUOTED_BYTES: usize = 60;
/// The maximum length of what a message says about an annotation.
const MAX_PROBLEM_BYTES: usize = 200;

/// What the annotations of a source ask for.
#[derive(Debug, Clone, PartialEq)]
pub struct Policy {
    pub targets: Targets,
    pub companion: String,
    pub keys: KeySelection,
    pub copy_labels: Patterns,
    pub copy_annotations: Patterns,
    pub protect: Protect,
    pub adopt: bool,
    pub paused: bool,
}

/// The namespaces in which a source wants companions. A namespace is wanted if any of the fields matches it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Targets {
    /// `.`: the source's own namespace.
    pub own: bool,
    pub names: BTreeSet<String>,
    pub prefixes: Vec<String>,
    pub selector: Option<Selector>,
}

/// Which requests for a companion the guard refuses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Protect {
    #[default]
    Edits,
    All,
    None,
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
    #[error("a Secret of type {type_} needs the key {missing}: add it to the annotation {key}")]
    KeysBreakType { type_: String, missing: &'static str, key: String },
    #[error("sources are not allowed in Lockstep's own namespace: move this one to another namespace")]
    OwnNamespace,
}

impl Fault {
    /// The value of the `reason` label in metrics.
    #[must_use]
    pub const fn label(&self) -> &'static str {
        match self {
            Self::Annotation { .. } | Self::OwnName { .. } => "malformed",
            Self::NameTooLong { .. } => "name_too_long",
            Self::IsCompanion { .. } => "is_companion",
            Self::ReservedName { .. }
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
        Ok(policy)
    }

    /// Parses the annotations of a source. The defaults of its namespace are not read here: they apply once the webhook
    /// has written them to the source, because only then are they reviewed.
    pub fn parse(keys: &Keys, meta: &Meta) -> Result<Self, Fault> {
        let parser = Parser { keys, meta };
        if keys.has_marks(meta) {
            let source_key = meta
                .annotations
                .get(&keys.source)
                .map_or_else(|| "another source".to_owned(), |text| shorten(text, MAX_PROBLEM_BYTES));
            return Err(Fault::IsCompanion { source_key });
        }
        let targets = parser.targets()?;
        Ok(Self {
            companion: parser.companion_name(&targets)?,
            targets,
            keys: parser.key_selection()?,
            copy_labels: parser.patterns(&keys.copy_labels)?,
            copy_annotations: parser.patterns(&keys.copy_annotations)?,
            protect: parser.protect()?,
            adopt: parser.flag(&keys.adopt)?,
            paused: parser.flag(&keys.paused)?,
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
        match required_keys(type_).find(|alternatives| !alternatives.iter().any(copied)) {
            Some(alternatives) => Err(Fault::KeysBreakType {
                type_: type_.to_owned(),
                missing: alternatives[0],
                key: keys.keys.clone(),
            }),
            None => Ok(()),
        }
    }

    /// Whether two sources with this policy have the same companions.
    #[must_use]
    pub fn same_companion(&self, keys: &Keys, a: &Object, b: &Object) -> bool {
        type Map = BTreeMap<String, String>;
        let same_data =
            |of: fn(&Object) -> Option<&Map>| self.keys.selected(of(a)).eq(self.keys.selected(of(b)));
        let same_meta = |patterns: &Patterns, of: fn(&Meta) -> &Map| {
            copied(keys, patterns, of(&a.metadata)).eq(copied(keys, patterns, of(&b.metadata)))
        };
        a.type_ == b.type_
            && a.immutable.unwrap_or_default() == b.immutable.unwrap_or_default()
            && same_meta(&self.copy_labels, |meta| &meta.labels)
            && same_meta(&self.copy_annotations, |meta| &meta.annotations)
            && same_data(|object| object.data.as_ref())
            && same_data(|object| object.binary_data.as_ref())
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
fn required_keys(type_: &str) -> impl Iterator<Item = &'static [&'static str]> {
    let required: &'static [&'static [&'static str]] = match type_ {
        "kubernetes.io/tls" => &[&["tls.crt"], &["tls.key"]],
        "kubernetes.io/dockerconfigjson" => &[&[".dockerconfigjson"]],
        "kubernetes.io/dockercfg" => &[&[".dockercfg"]],
        "kubernetes.io/ssh-auth" => &[&["ssh-privatekey"]],
        "kubernetes.io/basic-auth" => &[&["username", "password"]],
        _ => &[],
    };
    required.iter().copied()
}

impl Targets {
    /// Adds a comma-separated list of `.`, names and prefixes. The error says what is wrong with the list.
    ///
    /// ```
    /// use std::collections::BTreeMap;
    /// use lockstep::policy::Targets;
    ///
    /// let mut targets = Targets::default();
    /// targets.add("., team-*").unwrap();
    /// let labels = BTreeMap::new();
    /// assert!(targets.wants("home", "home", &labels));
    /// assert!(targets.wants("home", "team-a", &labels));
    /// assert!(!targets.wants("home", "other", &labels));
    /// assert!(targets.add("*-team").is_err());
    /// ```
    pub fn add(&mut self, text: &str) -> Result<(), String> {
        // Names and prefixes are counted each for themselves, so a list may have as many of both, and `.`.
        for item in items(text, 2 * MAX_ITEMS + 1).map_err(|error| error.to_string())? {
            match item.parse().map_err(|error: BadPattern| error.to_string())? {
                Pattern::Exact(name) if name == "." => self.own = true,
                Pattern::Exact(name) if names::is_label(&name) => {
                    self.names.insert(name);
                }
                Pattern::Prefix(prefix) if prefix.is_empty() || is_prefix(&prefix) => self.add_prefix(prefix),
                other => {
                    return Err(format!(
                        "`{other}` is neither `.`, a namespace nor a prefix such as `team-*`"
                    ));
                }
            }
        }
        if self.names.len() > MAX_ITEMS {
            return Err(format!(
                "{} names, {MAX_ITEMS} are allowed: use a prefix such as `team-*` or a selector",
                self.names.len()
            ));
        }
        if self.prefixes.len() > MAX_ITEMS {
            return Err(format!("{} prefixes, {MAX_ITEMS} are allowed: use a selector", self.prefixes.len()));
        }
        Ok(())
    }

    /// Keeps no prefix that another one covers: every prefix is a walk over namespaces.
    fn add_prefix(&mut self, prefix: String) {
        if !self.prefixes.iter().any(|known| prefix.starts_with(known.as_str())) {
            self.prefixes.retain(|known| !known.starts_with(prefix.as_str()));
            self.prefixes.push(prefix);
        }
    }

    /// Without prefixes and selector.
    #[must_use]
    pub fn listed_by_name(&self) -> Self {
        Self { own: self.own, names: self.names.clone(), ..Self::default() }
    }

    /// Whether a source in namespace `home` wants a companion in `namespace`, which has these labels.
    #[must_use]
    pub fn wants(&self, home: &str, namespace: &str, labels: &BTreeMap<String, String>) -> bool {
        (self.own && home == namespace)
            || self.names.contains(namespace)
            || self.prefixes.iter().any(|prefix| namespace.starts_with(prefix.as_str()))
            || self.selector.as_ref().is_some_and(|selector| selector.matches(labels))
    }

    /// Whether only the source's own namespace can match.
    #[must_use]
    pub fn only_own(&self) -> bool {
        self.names.is_empty() && self.prefixes.is_empty() && self.selector.is_none()
    }

    /// Whether a namespace is wanted by its name, not by a pattern: then it is worth a warning if it gets no companion.
    #[must_use]
    pub fn names_explicitly(&self, home: &str, namespace: &str) -> bool {
        self.names.contains(namespace) || (self.own && home == namespace)
    }
}

impl Protect {
    #[must_use]
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
        match text {
            "edits" => Ok(Self::Edits),
            "all" => Ok(Self::All),
            "none" => Ok(Self::None),
            other => Err(format!("`{}` is none of `edits`, `all`, `none`", shorten(other, MAX_QUOTED_BYTES))),
        }
    }
}

/// Parses one annotation at a time; an error names the annotation.
struct Parser<'a> {
    keys: &'a Keys,
    meta: &'a Meta,
}

impl<'a> Parser<'a> {
    fn get(&self, key: &str) -> Option<&'a str> {
        self.meta.annotations.get(key).map(String::as_str)
    }

    fn targets(&self) -> Result<Targets, Fault> {
        let mut targets = Targets::default();
        let key = &self.keys.target_selector;
        if let Some(text) = self.get(key) {
            targets.selector = Some(selector::parse(text).map_err(|error| fault(key, &error))?);
        }
        let key = &self.keys.target_namespaces;
        let Some(text) = self.get(key) else {
            targets.own = targets.selector.is_none();
            return Ok(targets);
        };
        targets.add(text).map_err(|problem| fault(key, &problem))?;
        Ok(targets)
    }

    fn companion_name(&self, targets: &Targets) -> Result<String, Fault> {
        let key = &self.keys.companion_name;
        let name = match self.get(key) {
            Some(name) if names::is_subdomain(name) => name.to_owned(),
            Some(name) if name.len() > MAX_NAME_BYTES => return Err(name_too_long(key, name)),
            Some(name) => {
                return Err(fault(
                    key,
                    &format!("`{}` is not a valid name of an object", shorten(name, MAX_QUOTED_BYTES)),
                ));
            }
            None => format!("{}{}", self.meta.name, self.keys.suffix),
        };
        if name.len() > MAX_NAME_BYTES {
            return Err(name_too_long(key, &name));
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

    fn key_selection(&self) -> Result<KeySelection, Fault> {
        let key = &self.keys.keys;
        let Some(text) = self.get(key) else { return Ok(KeySelection(None)) };
        let mut selected = BTreeMap::new();
        let mut taken = BTreeSet::new();
        for item in items(text, MAX_KEYS).map_err(|error| fault(key, &error))? {
            let (from, to) = item.split_once('=').map_or((item, item), |(from, to)| (from.trim(), to.trim()));
            if let Some(bad) = [from, to].into_iter().find(|name| !names::is_data_key(name)) {
                return Err(fault(key, &format!("`{}` is not a valid key", shorten(bad, MAX_QUOTED_BYTES))));
            }
            if !taken.insert(to) {
                return Err(fault(
                    key,
                    &format!("two keys would be copied to `{to}`: give one another name"),
                ));
            }
            if selected.insert(from.to_owned(), to.to_owned()).is_some() {
                return Err(fault(key, &format!("`{from}` is named twice")));
            }
        }
        Ok(KeySelection(Some(selected)))
    }

    fn patterns(&self, key: &str) -> Result<Patterns, Fault> {
        let Some(text) = self.get(key) else { return Ok(Patterns::default()) };
        let patterns: Patterns = text.parse().map_err(|error| fault(key, &error))?;
        let bad = |pattern: &&Pattern| match pattern {
            Pattern::Exact(name) => !names::is_label_key(name),
            Pattern::Prefix(prefix) => !prefix.strip_suffix('/').is_some_and(names::is_subdomain),
        };
        match patterns.0.iter().find(bad) {
            Some(pattern) => {
                Err(fault(key, &format!("`{pattern}` is neither a key nor a prefix such as `example.com/*`")))
            }
            None => Ok(patterns),
        }
    }

    fn protect(&self) -> Result<Protect, Fault> {
        let key = &self.keys.protect;
        self.get(key)
            .map_or(Ok(Protect::default()), |text| text.parse().map_err(|problem| fault(key, &problem)))
    }

    fn flag(&self, key: &str) -> Result<bool, Fault> {
        match self.get(key) {
            None | Some("false") => Ok(false),
            Some("true") => Ok(true),
            Some(other) => Err(fault(
                key,
                &format!("`{}` is neither `true` nor `false`", shorten(other, MAX_QUOTED_BYTES)),
            )),
        }
    }
}

/// Whether the name of a namespace can start with this.
fn is_prefix(prefix: &str) -> bool {
    names::is_label(&format!("{prefix}x"))
}

fn name_too_long(key: &str, name: &str) -> Fault {
    Fault::NameTooLong { name: shorten(name, MAX_QUOTED_BYTES), length: name.len(), key: key.to_owned() }
}

/// What is wrong with an annotation, in a text of bounded length.
#[must_use]
pub fn fault(key: &str, problem: &dyn std::fmt::Display) -> Fault {
    Fault::Annotation { key: key.to_owned(), problem: shorten(&problem.to_string(), MAX_PROBLEM_BYTES) }
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
    }

    #[test]
    fn targets_match_own_namespace_names_prefixes_and_selector() {
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
    fn prefixes_that_another_one_covers_are_merged() {
        let prefixes = |text: &str| parse(&[("target-namespaces", text)]).unwrap().targets.prefixes;
        assert_eq!(prefixes("team-a*,b*,team-*,team-b*,b*"), ["b", "team-"]);
        assert_eq!(prefixes(&["*"; 50].join(",")), [""]);
        assert_eq!(prefixes("a*,*,b*"), [""]);
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
            ("target-namespaces", "a*b"),
            ("target-namespaces", "Not-A-Namespace"),
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
            ("copy-annotations", "*"),
            ("protect", "everything"),
            ("adopt", "yes"),
            ("paused", "1"),
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
        assert!(matches!(parse(&[("companion-name", "colors")]), Err(Fault::OwnName { .. })));
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
