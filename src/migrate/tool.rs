//! PURE. The tools that sources are taken over from, and what their annotations say.
//!
//! Read from kubernetes-replicator 2.12.4 and Reflector 10.0.63. Neither selects keys.

use std::collections::BTreeMap;

use kube::core::Selector;
use serde::{Deserialize, Serialize};

use super::{reason::Reason, reflector, regex::NotSimple, replicator};
use crate::{
    object::{Kind, Meta, ObjectKey},
    policy::{Targets, pattern::Pattern},
    world::namespaces::Namespaces,
};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Tool {
    /// kubernetes-replicator by mittwald
    Replicator,
    /// Reflector by emberstack
    Reflector,
}

/// What an object is to a tool.
#[derive(Debug, PartialEq)]
pub enum Role {
    /// The tool ignores it.
    Nothing,
    Source(Wish),
    Copy(CopyOf),
}

/// What the annotations of a source ask for.
#[derive(Debug, PartialEq)]
pub struct Wish {
    /// Where the tool creates copies under the source's own name, or why that cannot be said with our annotations.
    pub push: Result<Option<Push>, Reason>,
    /// Pushed copies get the labels of the source.
    pub copies_labels: bool,
}

/// Namespaces: those that a pattern or the selector matches.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Push {
    pub patterns: Vec<Pattern>,
    pub selector: Option<String>,
}

/// Which namespaces may have copies that name their source themselves.
#[derive(Debug, PartialEq)]
pub enum Pull {
    Nobody,
    Everybody,
    From { patterns: Result<Vec<Pattern>, NotSimple>, selector: Option<Selector> },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyOf {
    /// Its source, if the annotations name one.
    pub source: Option<ObjectKey>,
    /// A person created it to be filled. Otherwise the tool created it.
    pub pulled: bool,
    /// The tool has written it at least once.
    pub filled: bool,
}

impl Tool {
    /// As on the command line.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Replicator => "replicator",
            Self::Reflector => "reflector",
        }
    }

    /// What its users call it.
    #[must_use]
    pub const fn title(self) -> &'static str {
        match self {
            Self::Replicator => "kubernetes-replicator",
            Self::Reflector => "Reflector",
        }
    }

    /// The prefix of all its annotations.
    #[must_use]
    pub const fn prefix(self) -> &'static str {
        match self {
            Self::Replicator => "replicator.v1.mittwald.de/",
            Self::Reflector => "reflector.v1.k8s.emberstack.com/",
        }
    }

    /// The last part of its image's name, whatever the registry.
    #[must_use]
    pub const fn image(self) -> &'static str {
        match self {
            Self::Replicator => "kubernetes-replicator",
            Self::Reflector => "kubernetes-reflector",
        }
    }

    /// The annotations of the tool on an object.
    #[must_use]
    pub fn annotations(self, meta: &Meta) -> BTreeMap<String, String> {
        let theirs = meta.annotations.iter().filter(|(key, _)| key.starts_with(self.prefix()));
        theirs.map(|(key, value)| (key.clone(), value.clone())).collect()
    }

    #[must_use]
    pub fn role(self, kind: Kind, meta: &Meta) -> Role {
        match self {
            Self::Replicator => replicator::role(kind, meta),
            Self::Reflector => reflector::role(kind, meta),
        }
    }

    /// Who may pull an object, whether or not it has annotations of the tool. `allow_all`: kubernetes-replicator ran with
    /// `--allow-all`.
    #[must_use]
    pub fn pull(self, kind: Kind, meta: &Meta, allow_all: bool) -> Pull {
        match self {
            Self::Replicator => replicator::pull(kind, meta, allow_all),
            Self::Reflector => reflector::pull(meta),
        }
    }

    /// The value of one of its annotations.
    pub(super) fn get<'a>(self, meta: &'a Meta, name: &str) -> Option<&'a str> {
        meta.annotations.get(&format!("{}{name}", self.prefix())).map(String::as_str)
    }
}

impl Pull {
    /// Whether a namespace may pull. If the list cannot be read exactly, a copy that the tool has filled is proof enough.
    #[must_use]
    pub fn permits(&self, namespaces: &Namespaces, namespace: &str, filled: bool) -> bool {
        match self {
            Self::Nobody => false,
            Self::Everybody => true,
            Self::From { patterns, selector } => {
                let known = patterns.as_ref().ok().cloned().unwrap_or_default();
                let targets = Targets { patterns: known, selector: selector.clone(), ..Targets::default() };
                namespaces.is_wanted("", &targets, namespace) || (patterns.is_err() && filled)
            }
        }
    }
}
