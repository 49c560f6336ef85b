//! The namespaces, names, labels and users that histories are made of. There are few of them, so that steps collide.

use serde::{Deserialize, Serialize};

use crate::object::{Key, Kind};

/// The names of one history. With another prefix and domain, histories share a cluster and do not meet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Names {
    /// Lockstep's domain, for example `workshop.io`.
    pub domain: String,
    /// What all namespaces of the history start with (`kube-` comes before it), for example `h7-`; may be empty.
    pub prefix: String,
    /// Lockstep's own namespace.
    pub own_namespace: String,
}

impl Names {
    #[must_use]
    pub fn new(domain: &str, prefix: &str) -> Self {
        Self {
            domain: domain.to_owned(),
            prefix: prefix.to_owned(),
            own_namespace: "lockstep-system".to_owned(),
        }
    }

    /// A label or annotation of Lockstep.
    #[must_use]
    pub fn key(&self, name: &str) -> String {
        format!("{}/{name}", self.domain)
    }

    /// The field manager of Lockstep.
    #[must_use]
    pub fn manager(&self) -> String {
        format!("lockstep.{}", self.domain)
    }

    /// The full name of a namespace of the history.
    #[must_use]
    pub fn namespace(&self, short: &str) -> String {
        match short.strip_prefix("kube-") {
            Some(rest) => format!("kube-{}{rest}", self.prefix),
            None => format!("{}{short}", self.prefix),
        }
    }

    /// The namespaces that a history uses, in full.
    #[must_use]
    pub fn namespaces(&self) -> Vec<String> {
        NAMESPACES.iter().map(|short| self.namespace(short)).collect()
    }

    /// The namespaces that exist when a history begins.
    #[must_use]
    pub fn initial_namespaces(&self) -> Vec<String> {
        NAMESPACES[..4].iter().map(|short| self.namespace(short)).collect()
    }

    /// Whether an object belongs to the history.
    #[must_use]
    pub fn contains(&self, key: &Key) -> bool {
        let namespace = if key.kind == Kind::Namespace { &key.name } else { &key.namespace };
        self.namespaces().contains(namespace)
    }
}

/// Short names of namespaces. The last ones do not exist at first.
pub const NAMESPACES: [&str; 6] = ["home", "away", "team-a", "kube-x", "team-b", "late"];
/// Names of sources.
pub const SOURCES: [&str; 3] = ["a", "b", "c"];
/// Names that companions may have: by default, by annotation, and one that sources have, too.
pub const COMPANIONS: [&str; 5] = ["a-synced", "b-synced", "c-synced", "shared", "b"];
