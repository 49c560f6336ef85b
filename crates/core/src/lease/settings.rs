//! What the leader writes about itself into the annotation `settings` of the Lease, so that people's commands judge by
//! the flags of the running replicas, and need none of their own.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::{
    admission::admission_request::Subjects,
    keys::{Keys, SUFFIX},
    object::Kind,
    policy,
    world::{NamespaceRules, Scope},
};

/// The flags of the leader that decide what it does for a source. A field that another build does not write has its
/// default.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct PublishedSettings {
    pub version: String,
    pub suffix: String,
    /// Plural names.
    pub kinds: Vec<String>,
    pub exclude_namespaces: String,
    pub exempt_users: Vec<String>,
    pub exempt_groups: Vec<String>,
    pub deputy_users: Vec<String>,
    pub deputy_groups: Vec<String>,
}

impl Default for PublishedSettings {
    /// The defaults of the flags, and both kinds: of one that is not mirrored, there is nothing to find.
    fn default() -> Self {
        Self {
            version: String::new(),
            suffix: SUFFIX.to_owned(),
            kinds: Kind::ALL.map(|kind| kind.plural().to_owned()).to_vec(),
            exclude_namespaces: String::new(),
            exempt_users: Vec::new(),
            exempt_groups: Vec::new(),
            deputy_users: Vec::new(),
            deputy_groups: Vec::new(),
        }
    }
}

impl PublishedSettings {
    pub fn to_annotation(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// What this instance watches, as its replicas see it.
    pub fn scope(&self, domain: &str, own_namespace: &str) -> Scope {
        let kinds = Kind::ALL.into_iter().filter(|kind| self.kinds.iter().any(|name| name == kind.plural()));
        let excluded = policy::namespace_patterns(&self.exclude_namespaces).unwrap_or_default();
        Scope {
            keys: Arc::new(Keys::new(domain, &self.suffix)),
            rules: NamespaceRules { own_namespace: own_namespace.to_owned(), excluded },
            kinds: kinds.collect(),
        }
    }

    /// Users to whom the webhook allows everything, besides the replicas.
    pub fn exempt(&self) -> Subjects {
        Subjects { users: self.exempt_users.clone(), groups: self.exempt_groups.clone() }
    }

    /// Who writes on behalf of others.
    pub fn deputies(&self) -> Subjects {
        Subjects { users: self.deputy_users.clone(), groups: self.deputy_groups.clone() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn annotation_of_another_build_is_read_as_far_as_it_is_known() {
        let read: PublishedSettings = serde_json::from_str(r#"{"suffix":"-x","future":[1]}"#).unwrap();
        assert_eq!((read.suffix.as_str(), read.kinds.len()), ("-x", 2));
        assert!(serde_json::from_str::<PublishedSettings>("\"-x\"").is_err());
    }
}
