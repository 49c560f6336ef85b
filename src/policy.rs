//! What a source asks for: its annotations, parsed once, with defaults and every reason to say no.

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
use pattern::{Pattern, Patterns, items};

/// More names than this in `target-namespaces` belong in a prefix or a selector. Nor are there more of anything else
/// that is compared with every namespace or every label: an annotation has room for a hundred thousand.
pub const MAX_NAMES: usize = 50;

/// What a source asks for.
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

/// The namespaces in which a source wants a companion. One matches if any of the fields matches it.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Targets {
    pub own: bool,
    pub names: BTreeSet<String>,
    pub prefixes: Vec<String>,
    pub selector: Option<Selector>,
}

/// What the guard keeps people from doing to a companion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum Protect {
    #[default]
    Edits,
    All,
    None,
}

/// Why a source gets no companion. The message says what is wrong and what to do.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    #[error("annotation {key}: {problem}")]
    Annotation { key: String, problem: String },
    #[error("the companion's name `{name}` is {} characters long, 253 are allowed: set {key} to a shorter one", name.len())]
    NameTooLong { name: String, key: String },
    #[error("the companion would have its source's own name and place: choose another {key}")]
    OwnName { key: String },
    #[error("the name kube-root-ca.crt belongs to Kubernetes in every namespace: choose another {key}")]
    ReservedName { key: String },
    #[error(
        "it is itself a companion of {source_key}: label that one, or remove our annotations from this copy"
    )]
    IsCompanion { source_key: String },
    #[error("Secrets of type {0} are bound to one place and are never mirrored")]
    SecretType(String),
    #[error("a Secret of type {type_} needs the key {missing}: leave it in the annotation {key}")]
    KeysBreakType { type_: String, missing: &'static str, key: String },
    #[error("Lockstep's own namespace holds no sources: move it to another namespace")]
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
    /// What an object asks for as a source, or why it gets nothing. Of its content, only the names of keys are read.
    pub fn of(keys: &Keys, own_namespace: &str, key: &ObjectKey, object: &Object) -> Result<Self, Fault> {
        if *key.namespace == *own_namespace {
            return Err(Fault::OwnNamespace);
        }
        let policy = Self::parse(keys, &object.metadata)?;
        policy.refusal(keys, key.kind, object)?;
        Ok(policy)
    }

    /// Reads the annotations of a source. Defaults are the built-in ones: those of a namespace count only once
    /// they are stamped on the source, for only then were they reviewed.
    pub fn parse(keys: &Keys, meta: &Meta) -> Result<Self, Fault> {
        let read = Reader { keys, meta };
        if keys.has_marks(meta) {
            let source_key = meta
                .annotations
                .get(&keys.source)
                .map_or_else(|| "another source".to_owned(), |text| shorten(text, 200));
            return Err(Fault::IsCompanion { source_key });
        }
        let targets = read.targets()?;
        Ok(Self {
            companion: read.companion_name(&targets)?,
            targets,
            keys: read.key_selection()?,
            copy_labels: read.patterns(&keys.copy_labels)?,
            copy_annotations: read.patterns(&keys.copy_annotations)?,
            protect: read.protect()?,
            adopt: read.flag(&keys.adopt)?,
            paused: read.flag(&keys.paused)?,
        })
    }

    /// What may not be mirrored, whatever the annotations say.
    fn refusal(&self, keys: &Keys, kind: Kind, object: &Object) -> Result<(), Fault> {
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

    /// Whether companions of two objects that both ask for this are the same.
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

/// The keys that the API server demands of a Secret's type; of each group, one.
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
    /// Adds what a comma list of `.`, names and prefixes stands for. An error says what is wrong with the list.
    pub fn add(&mut self, text: &str) -> Result<(), String> {
        for pattern in text.parse::<Patterns>().map_err(|error| error.to_string())?.0 {
            match pattern {
                Pattern::Exact(name) if name == "." => self.own = true,
                Pattern::Exact(name) if names::is_label(&name) => {
                    self.names.insert(name);
                }
                Pattern::Prefix(prefix) if prefix.is_empty() || is_prefix(&prefix) => {
                    self.prefixes.push(prefix);
                }
                other => {
                    return Err(format!(
                        "`{other}` is neither `.`, a namespace nor a prefix such as `team-*`"
                    ));
                }
            }
        }
        if self.names.len() > MAX_NAMES {
            return Err(format!(
                "{} names, {MAX_NAMES} are allowed: use a prefix such as `team-*` or a selector",
                self.names.len()
            ));
        }
        if self.prefixes.len() > MAX_NAMES {
            return Err(format!("{} prefixes, {MAX_NAMES} are allowed: use a selector", self.prefixes.len()));
        }
        Ok(())
    }

    /// Whether a namespace is wanted, by a source that lives in `home`.
    #[must_use]
    pub fn wants(&self, home: &str, namespace: &str, labels: &BTreeMap<String, String>) -> bool {
        (self.own && home == namespace)
            || self.names.contains(namespace)
            || self.prefixes.iter().any(|prefix| namespace.starts_with(prefix.as_str()))
            || self.selector.as_ref().is_some_and(|selector| selector.matches(labels))
    }

    /// Whether nothing but the source's own namespace can ever match.
    #[must_use]
    pub fn only_own(&self) -> bool {
        self.names.is_empty() && self.prefixes.is_empty() && self.selector.is_none()
    }

    /// Whether a namespace was asked for by its name, not by a pattern.
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
            other => Err(format!("`{}` is none of `edits`, `all`, `none`", shorten(other, 60))),
        }
    }
}

/// Reads one annotation after the other; an error names the annotation.
struct Reader<'a> {
    keys: &'a Keys,
    meta: &'a Meta,
}

impl<'a> Reader<'a> {
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
            Some(name) if name.len() > 253 => {
                return Err(Fault::NameTooLong { name: name.to_owned(), key: key.clone() });
            }
            Some(name) => {
                return Err(fault(key, &format!("`{}` is not a name for an object", shorten(name, 60))));
            }
            None => format!("{}{}", self.meta.name, self.keys.suffix),
        };
        if name.len() > 253 {
            return Err(Fault::NameTooLong { name, key: key.clone() });
        }
        if name == "kube-root-ca.crt" {
            return Err(Fault::ReservedName { key: key.clone() });
        }
        // Only here: elsewhere, the same name in another place is what many people want.
        let home = &self.meta.namespace;
        if name == self.meta.name && targets.names_explicitly(home, home) {
            return Err(Fault::OwnName { key: key.clone() });
        }
        Ok(name)
    }

    fn key_selection(&self) -> Result<KeySelection, Fault> {
        let key = &self.keys.keys;
        let Some(text) = self.get(key) else { return Ok(KeySelection(None)) };
        let mut chosen = BTreeMap::new();
        let mut taken = BTreeSet::new();
        for item in items(text) {
            let (from, to) = item.split_once('=').map_or((item, item), |(from, to)| (from.trim(), to.trim()));
            if let Some(bad) = [from, to].into_iter().find(|name| !names::is_data_key(name)) {
                return Err(fault(key, &format!("`{}` is not a key", shorten(bad, 60))));
            }
            if !taken.insert(to) {
                return Err(fault(
                    key,
                    &format!("two keys would be copied to `{to}`: give one another name"),
                ));
            }
            if chosen.insert(from.to_owned(), to.to_owned()).is_some() {
                return Err(fault(key, &format!("`{from}` is named twice")));
            }
        }
        if chosen.is_empty() {
            return Err(fault(key, &pattern::BadPattern::Empty));
        }
        Ok(KeySelection(Some(chosen)))
    }

    fn patterns(&self, key: &str) -> Result<Patterns, Fault> {
        let Some(text) = self.get(key) else { return Ok(Patterns::default()) };
        let patterns: Patterns = text.parse().map_err(|error| fault(key, &error))?;
        if patterns.0.len() > MAX_NAMES {
            let problem = format!(
                "{} items, {MAX_NAMES} are allowed: use a prefix such as `example.com/*`",
                patterns.0.len()
            );
            return Err(fault(key, &problem));
        }
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
            Some(other) => {
                Err(fault(key, &format!("`{}` is neither `true` nor `false`", shorten(other, 60))))
            }
        }
    }
}

/// Whether some namespace's name can start like this.
fn is_prefix(prefix: &str) -> bool {
    names::is_label(&format!("{prefix}x"))
}

fn fault(key: &str, problem: &dyn std::fmt::Display) -> Fault {
    Fault::Annotation { key: key.to_owned(), problem: shorten(&problem.to_string(), 200) }
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
    fn without_annotations_the_built_in_defaults_apply() {
        let policy = parse(&[]).unwrap();
        assert!(policy.targets.own && policy.targets.only_own());
        assert_eq!(policy.companion, "colors-synced");
        assert_eq!(policy.protect, Protect::Edits);
        assert!(!policy.adopt && !policy.paused);
    }

    #[test]
    fn targets_are_own_names_prefixes_and_a_selector() {
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
    fn a_selector_alone_does_not_mean_the_own_namespace() {
        assert!(!parse(&[("target-selector", "env=dev")]).unwrap().targets.own);
    }

    #[test]
    fn malformed_annotations_name_the_annotation() {
        let fifty_one = (0..51).map(|n| format!("n{n}")).collect::<Vec<_>>().join(",");
        let prefixes = fifty_one.replace(',', "*,") + "*";
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
            ("keys", ""),
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
        }
    }

    #[test]
    fn names_that_cannot_be_are_faults() {
        assert!(matches!(parse(&[("companion-name", "kube-root-ca.crt")]), Err(Fault::ReservedName { .. })));
        assert!(matches!(parse(&[("companion-name", "colors")]), Err(Fault::OwnName { .. })));
        assert!(parse(&[("companion-name", "colors"), ("target-namespaces", "other")]).is_ok());
        let long = Meta { name: "x".repeat(250), ..source(&[]) };
        assert!(matches!(Policy::parse(&keys(), &long), Err(Fault::NameTooLong { .. })));
    }

    #[test]
    fn a_companion_is_no_source() {
        let mut meta = source(&[("source", "a/b")]);
        meta.labels.insert("workshop.io/companion".into(), "true".into());
        assert!(matches!(Policy::parse(&keys(), &meta), Err(Fault::IsCompanion { .. })));
    }

    #[test]
    fn secrets_that_are_bound_to_one_place_or_lose_a_needed_key_are_refused() {
        let policy = parse(&[]).unwrap();
        let secret = |type_: &str, held: &[&str]| Object {
            metadata: source(&[]),
            type_: Some(type_.into()),
            data: Some(held.iter().map(|key| ((*key).to_owned(), String::new())).collect()),
            binary_data: None,
            immutable: None,
        };
        let check = |object: &Object| policy.refusal(&keys(), Kind::Secret, object);
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
