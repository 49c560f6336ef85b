//! An admission request, reduced to what the webhook decides on.

use std::collections::BTreeMap;

use k8s_openapi::api::authentication::v1::UserInfo;
use serde::{Deserialize, Serialize};

use crate::object::{Kind, Meta, Object, ObjectKey, map, or_default};

/// The users under which Kubernetes itself deletes and updates objects: the garbage collector, the namespace
/// controller, and the identity of both where controllers do not use ServiceAccounts of their own. The match
/// conditions in `deploy/` list the same users.
pub const KUBERNETES_CLEANUP_USERS: [&str; 3] = [
    "system:serviceaccount:kube-system:generic-garbage-collector",
    "system:serviceaccount:kube-system:namespace-controller",
    "system:kube-controller-manager",
];

/// The user of a request, as the API server authenticated it. Go serializes an empty list as null.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize, Serialize)]
#[serde(default)]
pub struct User {
    #[serde(rename = "username")]
    pub name: String,
    pub uid: String,
    #[serde(deserialize_with = "or_default")]
    pub groups: Vec<String>,
    #[serde(deserialize_with = "map")]
    pub extra: BTreeMap<String, Vec<String>>,
}

impl From<UserInfo> for User {
    fn from(UserInfo { username, uid, groups, extra }: UserInfo) -> Self {
        Self {
            name: username.unwrap_or_default(),
            uid: uid.unwrap_or_default(),
            groups: groups.unwrap_or_default(),
            extra: extra.unwrap_or_default(),
        }
    }
}

/// A write of one ConfigMap or Secret.
pub struct Request {
    pub kind: Kind,
    pub namespace: String,
    pub user: User,
    pub operation: Operation,
    /// Nothing will be stored.
    pub dry_run: bool,
}

// A request is moved a few times at most, and is boxed nowhere.
#[allow(clippy::large_enum_variant)]
pub enum Operation {
    Create { new: Object },
    Update { old: Object, new: Object },
    Delete { old: Object },
}

/// Users and groups, by name.
#[derive(Debug, Clone, Default)]
pub struct Subjects {
    pub users: Vec<String>,
    pub groups: Vec<String>,
}

impl Request {
    pub(super) fn key(&self, object: &Object) -> ObjectKey {
        ObjectKey::new(self.kind, &self.namespace, &object.metadata.name)
    }

    /// The object before and after the request.
    pub const fn objects(&self) -> (Option<&Object>, Option<&Object>) {
        match &self.operation {
            Operation::Create { new } => (None, Some(new)),
            Operation::Update { old, new } => (Some(old), Some(new)),
            Operation::Delete { old } => (Some(old), None),
        }
    }

    /// Whether it is an update of nothing but managedFields and the resourceVersion, as storage migration and empty
    /// applies are. The API server lets users change the fields that are compared here, and no others.
    pub fn changes_nothing(&self) -> bool {
        fn compared(object: &Object) -> impl PartialEq {
            let Object { metadata, data, binary_data, type_, immutable } = object;
            let Meta { generate_name, self_link, labels, annotations, .. } = metadata;
            let Meta { owner_references, finalizers, deletion_timestamp, .. } = metadata;
            let content = (data, binary_data, type_, immutable);
            let lifetime = (owner_references, finalizers, deletion_timestamp);
            (content, lifetime, generate_name, self_link, labels, annotations)
        }

        let (old, new) = self.objects();
        old.map(compared) == new.map(compared)
    }
}

impl User {
    /// How much memory the user's texts take.
    pub fn size_bytes(&self) -> usize {
        let extra = self.extra.iter().flat_map(|(key, values)| std::iter::once(key).chain(values));
        let texts = [&self.name, &self.uid].into_iter().chain(&self.groups).chain(extra);
        texts.map(|text| size_of::<String>() + text.len()).sum()
    }

    /// Limits count the requests of one tenant together: of a user, or of all ServiceAccounts of a namespace, because a
    /// user who may write in a namespace can create any number of them.
    pub fn tenant(&self) -> &str {
        match self.name.strip_prefix("system:serviceaccount:").and_then(|account| account.find(':')) {
            Some(end) => &self.name[.."system:serviceaccount:".len() + end],
            None => &self.name,
        }
    }

    pub fn is_kubernetes_cleanup(&self) -> bool {
        KUBERNETES_CLEANUP_USERS.contains(&&*self.name)
    }
}

impl Subjects {
    pub fn contain(&self, user: &User) -> bool {
        self.users.contains(&user.name) || user.groups.iter().any(|group| self.groups.contains(group))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lists of user names in a manifest's CEL expressions, without Lockstep's own ServiceAccount.
    fn exempted_users(manifest: &str) -> Vec<Vec<&str>> {
        let lists = manifest.split("request.userInfo.username in [").skip(1);
        lists
            .map(|rest| rest.split(']').next().unwrap())
            .map(|list| list.split('\'').skip(1).step_by(2).collect::<Vec<_>>())
            .filter(|users| !users.is_empty())
            .map(|users| {
                assert!(users[0].ends_with(":lockstep"), "Lockstep's own ServiceAccount is first: {users:?}");
                users[1..].to_vec()
            })
            .collect()
    }

    #[test]
    fn match_conditions_in_deploy_exempt_the_same_cleanup_users() {
        for (manifest, lists) in [
            (include_str!("../../../../deploy/base/webhook.yaml"), 5),
            (include_str!("../../../../deploy/components/policy/policy.yaml"), 1),
        ] {
            let found = exempted_users(manifest);
            assert_eq!(found.len(), lists);
            for users in found {
                assert_eq!(users, KUBERNETES_CLEANUP_USERS);
            }
        }
    }
}
