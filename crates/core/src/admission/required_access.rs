//! The access that a user must have: to everything that the controller would do on their behalf.

use std::collections::BTreeMap;

use crate::object::{Kind, ObjectKey};

/// Verbs on companions, by namespace and name. No namespace stands for every one: a pattern or a selector may later
/// match any of them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RequiredAccess(BTreeMap<(Option<String>, String), Verbs>);

/// What is done to a companion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verbs {
    Delete,
    /// Create, update and delete.
    All,
}

/// One verb on one companion, or `get` on its source.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Access {
    pub verb: &'static str,
    pub kind: Kind,
    /// None: in all namespaces.
    pub namespace: Option<String>,
    pub name: String,
}

/// Why a user does not have the required access.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AccessError {
    Forbidden(Access),
    /// The API server gave no answer.
    Unavailable(String),
}

impl RequiredAccess {
    pub(super) fn add(&mut self, namespace: Option<&str>, name: &str, verbs: Verbs) {
        let entry = self.0.entry((namespace.map(str::to_owned), name.to_owned())).or_insert(verbs);
        *entry = verbs.max(*entry);
    }

    pub(super) fn covers(&self, at: &ObjectKey) -> bool {
        let name = at.name.to_string();
        [None, Some(at.namespace.to_string())]
            .into_iter()
            .any(|namespace| self.0.contains_key(&(namespace, name.clone())))
    }

    pub(super) fn remove_namespaces(&mut self, removed: impl Fn(&str) -> bool) {
        self.0.retain(|(namespace, _), _| !namespace.as_deref().is_some_and(&removed));
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The first namespace in which access is required; none where it is required in every namespace.
    pub(crate) fn first_namespace(&self) -> Option<&str> {
        self.0.keys().next()?.0.as_deref()
    }

    /// What is required in all namespaces comes first.
    pub fn iter(&self) -> impl Iterator<Item = (Option<&str>, &str, Verbs)> {
        self.0.iter().map(|((namespace, name), verbs)| (namespace.as_deref(), &**name, *verbs))
    }
}

impl Verbs {
    pub const fn as_rbac(self) -> &'static [&'static str] {
        match self {
            Self::Delete => &["delete"],
            Self::All => &["create", "update", "delete"],
        }
    }
}
