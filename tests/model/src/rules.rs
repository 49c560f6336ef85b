//! What `docs/reference.md` says about one source, in the order of its tables: what it asks for, which namespaces it
//! reaches, and what its companions look like.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::{
    names::Names,
    object::{Key, Kind, Object, Owner, Snapshot, Strings},
};

const SUFFIX: &str = "-synced";

/// What an object asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Reading {
    /// It does not have the label `managed=true`.
    NoSource,
    /// It has the label, and is refused.
    Malformed(&'static str),
    Source(Box<Policy>),
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Policy {
    pub targets: Targets,
    pub companion: String,
    /// Which keys are copied, and under which name; `None` is all of them.
    pub keys: Option<BTreeMap<String, String>>,
    pub copy_labels: List,
    pub copy_annotations: List,
    pub set_labels: Strings,
    pub set_annotations: Strings,
    pub protect: String,
    pub adopt: bool,
    pub paused: bool,
    pub keep: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Targets {
    /// `.`, or its own name.
    pub own: bool,
    pub names: BTreeSet<String>,
    pub patterns: Vec<String>,
    pub excluded: Vec<String>,
    pub selector: Option<Vec<Requirement>>,
    pub consent: bool,
}

/// A list of patterns, some of them behind a `!`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct List {
    pub included: Vec<String>,
    pub excluded: Vec<String>,
}

/// One part of a label selector.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Requirement {
    key: String,
    /// Whether the label may be absent, must be, or must have one of these values.
    is: Is,
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Is {
    Present,
    Absent,
    In(Vec<String>),
    NotIn(Vec<String>),
}

/// What a namespace says to a source.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Welcome {
    Yes,
    /// It is excluded, or has not accepted the source although that is needed.
    Barred,
    /// It does not exist or is being deleted.
    Gone,
}

/// A companion as it must be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Companion {
    pub labels: Strings,
    pub annotations: Strings,
    pub owners: Vec<Owner>,
    pub data: Strings,
    pub binary_data: Strings,
    pub type_: Option<String>,
    pub immutable: bool,
}

impl Reading {
    #[must_use]
    pub fn of(names: &Names, key: &Key, object: &Object) -> Self {
        if object.labels.get(&names.key("managed")).is_none_or(|value| value != "true") {
            return Self::NoSource;
        }
        match Policy::of(names, key, object) {
            Ok(policy) => Self::Source(Box::new(policy)),
            Err(problem) => Self::Malformed(problem),
        }
    }
}

impl Policy {
    fn of(names: &Names, key: &Key, object: &Object) -> Result<Self, &'static str> {
        if key.namespace == names.own_namespace {
            return Err("it is in Lockstep's own namespace");
        }
        let marked = ["source", "source-uid"].map(|name| object.annotations.contains_key(&names.key(name)));
        if object.labels.contains_key(&names.key("companion")) || marked.contains(&true) {
            return Err("it is a companion itself");
        }
        let get = |name: &str| object.annotations.get(&names.key(name)).map(String::as_str);
        let flag = |name: &str| match get(name) {
            None | Some("false") => Ok(false),
            Some("true") => Ok(true),
            Some(_) => Err("neither true nor false"),
        };
        let defaults = match get("defaults") {
            None => Value::Null,
            Some(text) => match serde_json::from_str(text) {
                Ok(defaults @ Value::Object(_)) => defaults,
                _ => return Err("the defaults cannot be read"),
            },
        };
        let default = |name: &str| defaults[name].as_str();

        let by_person = get("target-namespaces").or(get("target-selector")).is_some();
        let target = |name: &str| if by_person { get(name) } else { default(name) };
        let consent = match get("consent") {
            None => false,
            Some("required") => true,
            Some(_) => return Err("consent is not `required`"),
        };
        let targets =
            Targets::of(target("target-namespaces"), target("target-selector"), &key.namespace, consent)?;

        let companion = match get("companion-name") {
            None => format!("{}{SUFFIX}", key.name),
            Some("=") => key.name.clone(),
            Some(name) if is_name(name) => name.to_owned(),
            Some(_) => return Err("the companion's name is not a name"),
        };
        if companion.len() > 253 {
            return Err("the companion's name is too long");
        }
        if companion == "kube-root-ca.crt" {
            return Err("the companion's name is reserved");
        }
        if companion == key.name && targets.own {
            return Err("the companion would overwrite its source");
        }

        let protect = get("protect").or(default("protect")).unwrap_or("edits");
        if !["edits", "all", "none"].contains(&protect) {
            return Err("protect is none of its values");
        }
        let keep = match get("when-removed") {
            None | Some("delete") => false,
            Some("keep") => true,
            Some(_) => return Err("when-removed is none of its values"),
        };
        let policy = Self {
            targets,
            companion,
            keys: get("keys").map(key_selection).transpose()?,
            copy_labels: get("copy-labels").map(List::of).transpose()?.unwrap_or_default(),
            copy_annotations: get("copy-annotations").map(List::of).transpose()?.unwrap_or_default(),
            set_labels: get("set-labels").map(|text| pairs(names, text)).transpose()?.unwrap_or_default(),
            set_annotations: get("set-annotations")
                .map(|text| pairs(names, text))
                .transpose()?
                .unwrap_or_default(),
            protect: protect.to_owned(),
            adopt: flag("adopt")?,
            paused: flag("paused")?,
            keep,
        };
        if key.kind == Kind::Secret {
            policy.check_type(object)?;
        }
        let has_keys = !object.data.is_empty() || !object.binary_data.is_empty();
        let selected = policy.select(&object.data).len() + policy.select(&object.binary_data).len();
        if has_keys && selected == 0 {
            return Err("keys select nothing");
        }
        Ok(policy)
    }

    fn check_type(&self, object: &Object) -> Result<(), &'static str> {
        let type_ = object.type_.as_deref().unwrap_or_default();
        let required: &[&str] = match type_ {
            "kubernetes.io/service-account-token" | "bootstrap.kubernetes.io/token" => {
                return Err("Secrets of this type are never mirrored");
            }
            "kubernetes.io/tls" => &["tls.crt", "tls.key"],
            "kubernetes.io/dockerconfigjson" => &[".dockerconfigjson"],
            _ => &[],
        };
        let copied = self.select(&object.data);
        match required.iter().all(|key| copied.contains_key(*key)) {
            true => Ok(()),
            false => Err("keys leave out what the Secret's type requires"),
        }
    }

    /// The part of a map that is copied, under the names that it is copied to.
    fn select(&self, map: &Strings) -> Strings {
        let copied_as = |key: &String| match &self.keys {
            None => Some(key.clone()),
            Some(selected) => selected.get(key).cloned(),
        };
        map.iter().filter_map(|(key, value)| Some((copied_as(key)?, value.clone()))).collect()
    }

    /// The companion of a source in a namespace, apart from what only Lockstep can compute (`source-checksum`).
    #[must_use]
    pub fn companion_in(&self, names: &Names, key: &Key, source: &Object, namespace: &str) -> Companion {
        let copy = |from: &Strings, list: &List, set: &Strings| {
            let copied = from.iter().filter(|(key, _)| list.matches(key) && may_copy(names, key));
            let mut all: Strings = copied.map(|(key, value)| (key.clone(), value.clone())).collect();
            all.extend(set.clone());
            all
        };
        let mut labels = copy(&source.labels, &self.copy_labels, &self.set_labels);
        let mut annotations = copy(&source.annotations, &self.copy_annotations, &self.set_annotations);
        let copied = labels.keys().map(|key| format!("l:{key}"));
        let copied: Vec<String> = copied.chain(annotations.keys().map(|key| format!("a:{key}"))).collect();
        let mut mark = |name: &str, value: &str| drop(annotations.insert(names.key(name), value.to_owned()));
        mark("source", &format!("{}/{}", key.namespace, key.name));
        mark("source-uid", &source.uid);
        mark("protect", &self.protect);
        if self.keep {
            mark("when-removed", "keep");
        }
        if !copied.is_empty() {
            mark("copied", &copied.join(","));
        }
        labels.insert(names.key("companion"), "true".to_owned());
        labels.insert(names.key("source-namespace"), key.namespace.clone());
        labels.insert(names.key("source-name"), key.name.clone());
        let owner = Owner {
            kind: key.kind.as_str().to_owned(),
            name: key.name.clone(),
            uid: source.uid.clone(),
            controller: true,
        };
        Companion {
            labels,
            annotations,
            owners: if namespace == key.namespace && !self.keep { vec![owner] } else { Vec::new() },
            data: self.select(&source.data),
            binary_data: self.select(&source.binary_data),
            type_: source.type_.clone(),
            immutable: source.immutable,
        }
    }
}

impl Companion {
    /// What is wrong with an object that must be this companion; empty if nothing is. People have put the labels and
    /// annotations `theirs` there.
    #[must_use]
    pub fn differences(&self, names: &Names, found: &Object, theirs: &BTreeSet<String>) -> Vec<String> {
        let mut wrong = Vec::new();
        // Labels and annotations of others stay. Those under the domain are Lockstep's, and so are those that come from
        // the source.
        let is_governed = |key: &str| {
            key.starts_with(&names.key("")) || (key.starts_with(COPYABLE) && !theirs.contains(key))
        };
        let checksum = names.key("source-checksum");
        for (what, expected, found) in
            [("label", &self.labels, &found.labels), ("annotation", &self.annotations, &found.annotations)]
        {
            for (key, value) in expected {
                if found.get(key) != Some(value) {
                    wrong.push(format!("{what} {key} is {:?} instead of {value:?}", found.get(key)));
                }
            }
            for key in found.keys().filter(|key| is_governed(key) && !expected.contains_key(*key)) {
                if *key != checksum {
                    wrong.push(format!("{what} {key} should not be there"));
                }
            }
        }
        let digits = found.annotations.get(&checksum).is_some_and(|sum| {
            sum.len() == 12 && sum.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
        });
        for (right, what) in [
            (digits, "source-checksum"),
            (self.owners == found.owners, "ownerReferences"),
            (found.finalizers.is_empty(), "finalizers"),
            (self.data == found.data, "data"),
            (self.binary_data == found.binary_data, "binaryData"),
            (self.type_ == found.type_, "type"),
            (self.immutable == found.immutable, "immutable"),
        ] {
            if !right {
                wrong.push(format!("{what} differs"));
            }
        }
        wrong
    }
}

/// Labels and annotations with this prefix come to companions from their source, unless people have put them there.
pub const COPYABLE: &str = "example.com/";

/// Whether a label or annotation may be copied.
#[must_use]
pub fn may_copy(names: &Names, key: &str) -> bool {
    let never = [
        "kubectl.kubernetes.io/last-applied-configuration",
        "app.kubernetes.io/instance",
        "app.kubernetes.io/managed-by",
    ];
    !key.starts_with(&names.key(""))
        && !never.contains(&key)
        && !key.starts_with("kubernetes.io/service-account.")
        && !key.ends_with("/managed")
        && !key.ends_with("/companion")
}

impl Targets {
    fn of(
        list: Option<&str>,
        selector: Option<&str>,
        home: &str,
        consent: bool,
    ) -> Result<Self, &'static str> {
        let selector = selector.map(selector_of).transpose()?;
        let Some(list) = list else {
            return Ok(Self { own: selector.is_none(), selector, consent, ..Self::default() });
        };
        let mut targets = Self { selector, consent, ..Self::default() };
        for item in items(list)? {
            let (excluded, item) = item.strip_prefix('!').map_or((false, item), |item| (true, item.trim()));
            let name = if item == "." { home } else { item };
            if !is_namespace(&name.replace('*', "x")) {
                return Err("not a namespace, `.` or a pattern");
            }
            if excluded {
                targets.excluded.push(name.to_owned());
            } else if name == home {
                targets.own = true;
            } else if name.contains('*') {
                targets.patterns.push(name.to_owned());
            } else {
                targets.names.insert(name.to_owned());
            }
        }
        let excluded = |name: &str| targets.excluded.iter().any(|pattern| matches(pattern, name));
        let own = targets.own && !excluded(home);
        let names: BTreeSet<String> = targets.names.iter().filter(|name| !excluded(name)).cloned().collect();
        let targets = Self { own, names, ..targets };
        let nothing = !targets.own && targets.names.is_empty() && targets.patterns.is_empty();
        if nothing && targets.selector.is_none() {
            return Err("only exclusions, or they cover all names");
        }
        Ok(targets)
    }

    /// Whether a namespace that has these labels is a target, whatever it says itself.
    #[must_use]
    pub fn want(&self, home: &str, namespace: &str, labels: &Strings) -> bool {
        let listed = self.names.contains(namespace) || (self.own && namespace == home);
        let matched = self.patterns.iter().any(|pattern| matches(pattern, namespace))
            || self.selector.as_ref().is_some_and(|all| all.iter().all(|one| one.matches(labels)));
        let excluded = self.excluded.iter().any(|pattern| matches(pattern, namespace));
        // With consent, patterns and selectors do not reach the source's own namespace.
        listed || (matched && !excluded && !(self.consent && namespace == home))
    }

    /// Whether patterns or a selector may match any namespace.
    #[must_use]
    pub fn reach_all(&self) -> bool {
        !self.patterns.is_empty() || self.selector.is_some()
    }
}

/// What a namespace says to a source of `home` with these targets; a malformed source has none.
#[must_use]
pub fn welcome(names: &Names, now: &Snapshot, home: &str, to: &str, targets: Option<&Targets>) -> Welcome {
    match now.get(&Key::namespace(to)) {
        None => Welcome::Gone,
        Some(namespace) => welcome_of(names, namespace, home, to, targets),
    }
}

/// As [`welcome`], for a namespace in this state.
#[must_use]
pub fn welcome_of(
    names: &Names,
    namespace: &Object,
    home: &str,
    to: &str,
    targets: Option<&Targets>,
) -> Welcome {
    let excluded = namespace.labels.get(&names.key("exclude")).is_some_and(|value| value == "true");
    let needs_consent = targets.is_some_and(|targets| targets.consent) && home != to;
    let needs_acceptance = to.starts_with("kube-") || needs_consent;
    if namespace.terminating {
        Welcome::Gone
    } else if excluded
        || to == names.own_namespace
        || (needs_acceptance && !accepts(names, namespace, "accept-from", home))
    {
        Welcome::Barred
    } else {
        Welcome::Yes
    }
}

/// Whether an annotation of a namespace (`accept-from`, `accept-adopt-from`) names another one.
#[must_use]
pub fn accepts(names: &Names, namespace: &Object, annotation: &str, home: &str) -> bool {
    let text = namespace.annotations.get(&names.key(annotation));
    text.and_then(|text| List::of(text).ok()).is_some_and(|list| list.matches(home))
}

impl List {
    fn of(text: &str) -> Result<Self, &'static str> {
        let mut list = Self::default();
        for item in items(text)? {
            match item.strip_prefix('!') {
                Some(item) => list.excluded.push(item.trim().to_owned()),
                None => list.included.push(item.to_owned()),
            }
        }
        let valid = |item: &String| is_qualified_name(&item.replace('*', "x"));
        if !list.included.iter().chain(&list.excluded).all(valid) {
            return Err("not a key or a pattern");
        }
        if list.included.is_empty() { Err("only exclusions") } else { Ok(list) }
    }

    fn matches(&self, name: &str) -> bool {
        let any = |patterns: &[String]| patterns.iter().any(|pattern| matches(pattern, name));
        any(&self.included) && !any(&self.excluded)
    }
}

/// Each `*` stands for any characters, or none.
fn matches(pattern: &str, name: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == name,
        Some((start, rest)) => name.strip_prefix(start).is_some_and(|name| {
            (0..=name.len()).filter(|at| name.is_char_boundary(*at)).any(|at| matches(rest, &name[at..]))
        }),
    }
}

impl Requirement {
    fn matches(&self, labels: &Strings) -> bool {
        let value = labels.get(&self.key);
        match &self.is {
            Is::Present => value.is_some(),
            Is::Absent => value.is_none(),
            Is::In(values) => value.is_some_and(|value| values.contains(value)),
            Is::NotIn(values) => value.is_none_or(|value| !values.contains(value)),
        }
    }
}

fn selector_of(text: &str) -> Result<Vec<Requirement>, &'static str> {
    let bad = "not a selector";
    let mut requirements = Vec::new();
    // Commas inside parentheses separate values.
    let (mut depth, mut parts) = (0, vec![String::new()]);
    for character in text.chars() {
        match character {
            '(' => depth += 1,
            ')' => depth -= 1,
            ',' if depth == 0 => {
                parts.push(String::new());
                continue;
            }
            _ => {}
        }
        parts.last_mut().ok_or(bad)?.push(character);
    }
    for part in parts.iter().map(|part| part.trim()) {
        let values = |text: &str| -> Result<Vec<String>, &'static str> {
            let inner = text.trim().strip_prefix('(').and_then(|text| text.strip_suffix(')')).ok_or(bad)?;
            Ok(inner.split(',').map(|value| value.trim().to_owned()).collect())
        };
        let (key, is) = if let Some((key, rest)) = part.split_once(" notin ") {
            (key, Is::NotIn(values(rest)?))
        } else if let Some((key, rest)) = part.split_once(" in ") {
            (key, Is::In(values(rest)?))
        } else if let Some((key, value)) = part.split_once("!=") {
            (key, Is::NotIn(vec![value.trim().to_owned()]))
        } else if let Some((key, value)) = part.split_once('=') {
            (key, Is::In(vec![value.trim_start_matches('=').trim().to_owned()]))
        } else if let Some(key) = part.strip_prefix('!') {
            (key, Is::Absent)
        } else {
            (part, Is::Present)
        };
        if !is_qualified_name(key.trim()) {
            return Err(bad);
        }
        requirements.push(Requirement { key: key.trim().to_owned(), is });
    }
    Ok(requirements)
}

fn items(text: &str) -> Result<Vec<&str>, &'static str> {
    let items: Vec<&str> = text.split(',').map(str::trim).filter(|item| !item.is_empty()).collect();
    if items.is_empty() { Err("an empty list") } else { Ok(items) }
}

fn key_selection(text: &str) -> Result<BTreeMap<String, String>, &'static str> {
    let mut selected = BTreeMap::new();
    for item in items(text)? {
        let (from, to) = item.split_once('=').unwrap_or((item, item));
        let valid = |key: &str| {
            !key.is_empty() && key.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        };
        if !valid(from) || !valid(to) || selected.values().any(|taken| taken == to) {
            return Err("not a list of keys");
        }
        if selected.insert(from.to_owned(), to.to_owned()).is_some() {
            return Err("a key is named twice");
        }
    }
    Ok(selected)
}

fn pairs(names: &Names, text: &str) -> Result<Strings, &'static str> {
    let mut pairs = Strings::new();
    for item in items(text)? {
        let (key, value) = item.split_once('=').ok_or("no value")?;
        if !is_qualified_name(key) || !may_copy(names, key) {
            return Err("a key that companions must not have");
        }
        if pairs.insert(key.to_owned(), value.to_owned()).is_some() {
            return Err("a key is set twice");
        }
    }
    Ok(pairs)
}

fn is_namespace(name: &str) -> bool {
    name.len() <= 63 && !name.contains('.') && is_name(name)
}

fn is_name(name: &str) -> bool {
    let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    let part = |part: &str| {
        !part.is_empty() && part.chars().all(inner) && !part.starts_with('-') && !part.ends_with('-')
    };
    name.split('.').all(part)
}

fn is_qualified_name(key: &str) -> bool {
    let name = key.split_once('/').map_or(key, |(_, name)| name);
    let ends = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    name.chars().all(|c| c.is_ascii_alphanumeric() || "-_.".contains(c))
        && ends(name.chars().next())
        && ends(name.chars().last())
}
