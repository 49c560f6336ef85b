//! PURE. The access that a user must have: to everything that the mirror would do on their behalf.

use std::collections::BTreeMap;

use crate::object::ObjectKey;

/// Verbs on companions, which [`super::access`] checks with SubjectAccessReviews.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RequiredAccess {
    /// By the companion's name, in every namespace: a pattern or a selector may later match any of them.
    pub cluster_wide: BTreeMap<String, Verbs>,
    /// By namespace and name.
    pub namespaced: BTreeMap<(String, String), Verbs>,
}

/// What is done to a companion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verbs {
    Delete,
    /// Create, update and delete.
    All,
}

impl RequiredAccess {
    pub(super) fn add_cluster_wide(&mut self, name: &str, verbs: Verbs) {
        let entry = self.cluster_wide.entry(name.to_owned()).or_insert(verbs);
        *entry = verbs.max(*entry);
    }

    pub(super) fn add_namespaced(&mut self, namespace: String, name: &str, verbs: Verbs) {
        let entry = self.namespaced.entry((namespace, name.to_owned())).or_insert(verbs);
        *entry = verbs.max(*entry);
    }

    pub(super) fn covers(&self, at: &ObjectKey) -> bool {
        self.cluster_wide.contains_key(&*at.name)
            || self.namespaced.contains_key(&(at.namespace.to_string(), at.name.to_string()))
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.cluster_wide.is_empty() && self.namespaced.is_empty()
    }

    /// The first namespace in which access is required; none where it is required in every namespace.
    #[must_use]
    pub fn first_namespace(&self) -> Option<&str> {
        let mut namespaces = self.namespaced.keys().map(|(namespace, _)| namespace.as_str());
        namespaces.next().filter(|_| self.cluster_wide.is_empty())
    }
}

impl Verbs {
    #[must_use]
    pub const fn as_rbac(self) -> &'static [&'static str] {
        match self {
            Self::Delete => &["delete"],
            Self::All => &["create", "update", "delete"],
        }
    }
}
