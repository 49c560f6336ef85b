//! PURE. The tools that sources are taken over from, and what their annotations say.
//!
//! Read from kubernetes-replicator 2.12.4 and Reflector 10.0.63. Neither selects keys.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{expression, not_movable::NotMovable, reflector, replicator};
use lockstep_core::{
    object::{Kind, Meta, ObjectKey},
    policy::{Targets, pattern::Pattern, selector},
    world::namespaces::Namespaces,
};

#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Tool {
    /// kubernetes-replicator by mittwald
    Replicator,
    /// Reflector by emberstack
    Reflector,
}

/// What an object is to a tool.
pub enum ToolRole {
    /// The tool ignores it.
    Nothing,
    Source {
        /// Where the tool creates copies under the source's own name.
        push: Result<NamespaceSelection, NotMovable>,
        /// Pushed copies get the labels of the source.
        copies_labels: bool,
    },
    Copy {
        /// None if the annotations name no source.
        source: Option<ObjectKey>,
        /// A person created it to be filled. Otherwise the tool created it.
        pulled: bool,
    },
}

/// Namespaces: those that a pattern or the selector matches.
#[derive(Default)]
pub struct NamespaceSelection {
    pub patterns: Vec<Pattern>,
    pub selector: Option<String>,
}

impl Tool {
    /// As on the command line.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Replicator => "replicator",
            Self::Reflector => "reflector",
        }
    }

    /// What its users call it.
    pub const fn title(self) -> &'static str {
        match self {
            Self::Replicator => "kubernetes-replicator",
            Self::Reflector => "Reflector",
        }
    }

    /// The prefix of all its annotations.
    const fn prefix(self) -> &'static str {
        match self {
            Self::Replicator => "replicator.v1.mittwald.de/",
            Self::Reflector => "reflector.v1.k8s.emberstack.com/",
        }
    }

    /// The last part of its image's name, whatever the registry.
    pub const fn image(self) -> &'static str {
        match self {
            Self::Replicator => "kubernetes-replicator",
            Self::Reflector => "kubernetes-reflector",
        }
    }

    /// The annotations of the tool on an object.
    pub fn annotations(self, meta: &Meta) -> BTreeMap<String, String> {
        let theirs = meta.annotations.iter().filter(|(key, _)| key.starts_with(self.prefix()));
        theirs.map(|(key, value)| (key.clone(), value.clone())).collect()
    }

    pub fn role(self, kind: Kind, meta: &Meta) -> ToolRole {
        match self {
            Self::Replicator => replicator::role(kind, meta),
            Self::Reflector => reflector::role(kind, meta),
        }
    }

    /// The namespaces that may pull an object, whether or not it has annotations of the tool. `allow_all`:
    /// kubernetes-replicator ran with `--allow-all`.
    pub fn permitted(
        self,
        kind: Kind,
        meta: &Meta,
        allow_all: bool,
    ) -> Result<NamespaceSelection, NotMovable> {
        match self {
            Self::Replicator => replicator::permitted(kind, meta, allow_all),
            Self::Reflector => reflector::permitted(meta),
        }
    }

    /// The value of one of its annotations.
    pub(super) fn get<'a>(self, meta: &'a Meta, name: &str) -> Option<&'a str> {
        meta.annotations.get(&format!("{}{name}", self.prefix())).map(String::as_str)
    }
}

impl NamespaceSelection {
    pub(super) fn all() -> Self {
        Self { patterns: vec![Pattern::new("*")], selector: None }
    }

    /// What a list and a selector in two annotations say together; none if both are missing or empty.
    pub(super) fn read(
        tool: Tool,
        meta: &Meta,
        list: &'static str,
        selector: &'static str,
    ) -> Result<Option<Self>, NotMovable> {
        let get = |name| tool.get(meta, name).filter(|text| !text.is_empty());
        let (names, labels) = (get(list), get(selector).map(str::trim));
        if names.is_none() && labels.is_none() {
            return Ok(None);
        }
        let patterns = expression::patterns(list, names.unwrap_or_default())?;
        if let Some(text) = labels {
            selector::parse(text)
                .map_err(|problem| NotMovable::Selector { annotation: selector, problem })?;
        }
        Ok(Some(Self { patterns, selector: labels.map(str::to_owned) }))
    }

    pub const fn is_empty(&self) -> bool {
        self.patterns.is_empty() && self.selector.is_none()
    }

    pub fn matches(&self, namespaces: &Namespaces, namespace: &str) -> bool {
        let selector = self.selector.as_ref().and_then(|text| selector::parse(text).ok());
        let targets = Targets { patterns: self.patterns.clone(), selector, ..Targets::default() };
        namespaces.is_wanted("", &targets, namespace)
    }

    /// Whether it surely matches every namespace that the other one matches, whatever their labels.
    pub(super) fn covers(&self, other: &Self) -> bool {
        let covers = |narrow: &Pattern| self.patterns.iter().any(|wide| wide.covers(narrow));
        let selector = other.selector.is_none() || self.selector == other.selector;
        covers(&Pattern::new("*")) || (selector && other.patterns.iter().all(covers))
    }
}
