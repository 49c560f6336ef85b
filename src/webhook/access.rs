//! Checks with SubjectAccessReviews what a user may do. Answers are cached for a few seconds.

use std::{
    collections::{BTreeMap, HashMap},
    time::{Duration, Instant},
};

use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use kube::{Api, Client, api::PostParams};
use parking_lot::Mutex;

use super::fair_semaphore::{Caller, FairSemaphore};
use crate::ops::metrics::Metrics;
use lockstep_cluster::client;
use lockstep_core::{
    admission::{
        admission_request::User,
        required_access::{Access, AccessError, RequiredAccess, Verbs},
    },
    object::{Kind, ObjectKey},
    policy::content::{Digest, Hasher},
};

const CACHE_TTL: Duration = Duration::from_secs(3);
/// When the cache is full, all of it is dropped.
const MAX_CACHE_ENTRIES: usize = 10_000;
/// SubjectAccessReviews in flight, for all requests together.
const MAX_CONCURRENT_CALLS: usize = 32;
/// SubjectAccessReviews in flight for one admission request; after the first that is not allowed, no more are
/// sent.
const MAX_CONCURRENT_CALLS_PER_REQUEST: usize = 6;

pub struct AccessChecker {
    client: Client,
    calls: FairSemaphore,
    /// Whether it is allowed, and when the API server said so; by user and access.
    cache: Mutex<Cache>,
    metrics: Metrics,
}

type Cache = HashMap<(Digest, Access), (bool, Instant)>;

impl AccessChecker {
    pub fn new(client: Client, metrics: Metrics) -> Self {
        Self { client, calls: FairSemaphore::new(MAX_CONCURRENT_CALLS), cache: Mutex::default(), metrics }
    }

    pub fn client(&self) -> Client {
        self.client.clone()
    }

    /// Whether a user has all of the required access. Access in all namespaces is checked first: it
    /// implies access in each of them.
    pub async fn check(
        &self,
        caller: Caller,
        user: &User,
        kind: Kind,
        required: &RequiredAccess,
    ) -> Result<(), AccessError> {
        let check = UserCheck { checker: self, caller, user, fingerprint: fingerprint(user) };
        let mut everywhere = BTreeMap::new();
        let mut rest = Vec::new();
        for (namespace, name, verbs) in required.iter() {
            if namespace.is_none() {
                check.all(accesses(kind, None, name, verbs)).await?;
                everywhere.insert(name, verbs);
            } else if everywhere.get(name).is_none_or(|wide| *wide < verbs) {
                rest.push((namespace, name, verbs));
            }
        }
        // For a single namespace, a check in that namespace alone takes one round trip less. For several,
        // one check in all namespaces may answer for the rest, and is cached.
        let several = rest.len() > 1;
        let mut unchecked = Vec::new();
        for (namespace, name, verbs) in rest {
            if several {
                match check.all(accesses(kind, None, name, verbs)).await {
                    Ok(()) => continue,
                    Err(AccessError::Forbidden(_)) => {}
                    Err(unavailable) => return Err(unavailable),
                }
            }
            unchecked.extend(accesses(kind, namespace, name, verbs));
        }
        check.all(unchecked).await
    }

    /// Whether a user may read an object.
    pub(crate) async fn check_get(
        &self,
        caller: Caller,
        user: &User,
        at: &ObjectKey,
    ) -> Result<(), AccessError> {
        let check = UserCheck { checker: self, caller, user, fingerprint: fingerprint(user) };
        let access = Access {
            verb: "get",
            kind: at.kind,
            namespace: Some(at.namespace.to_string()),
            name: at.name.to_string(),
        };
        check.check(access).await
    }
}

/// The checks for one user, whose fingerprint is computed once.
struct UserCheck<'a> {
    checker: &'a AccessChecker,
    caller: Caller,
    user: &'a User,
    fingerprint: Digest,
}

impl UserCheck<'_> {
    /// Fails with the first access that the user does not have. If that is known, nothing is asked: a user without
    /// rights who tries again and again causes no more calls.
    async fn all(&self, accesses: Vec<Access>) -> Result<(), AccessError> {
        let mut accesses =
            accesses.into_iter().skip_while(|access| self.cached(access) == Some(true)).peekable();
        if let Some(first) = accesses.next_if(|first| self.cached(first) == Some(false)) {
            return Err(AccessError::Forbidden(first));
        }
        let checks = stream::iter(accesses).map(|access| self.check(access));
        checks.buffered(MAX_CONCURRENT_CALLS_PER_REQUEST).try_collect().await
    }

    fn cached(&self, access: &Access) -> Option<bool> {
        let cached = self.checker.cache.lock().get(&self.cache_key(access)).copied();
        cached.filter(|(_, when)| when.elapsed() < CACHE_TTL).map(|(allowed, _)| allowed)
    }

    async fn check(&self, access: Access) -> Result<(), AccessError> {
        let allowed = if let Some(allowed) = self.cached(&access) {
            allowed
        } else {
            let allowed = self.call(&access).await?;
            let mut cache = self.checker.cache.lock();
            if cache.len() >= MAX_CACHE_ENTRIES {
                cache.clear();
            }
            cache.insert(self.cache_key(&access), (allowed, Instant::now()));
            allowed
        };
        if allowed { Ok(()) } else { Err(AccessError::Forbidden(access)) }
    }

    /// The same for every access that is checked with the same SubjectAccessReview.
    fn cache_key(&self, access: &Access) -> (Digest, Access) {
        let name = reviewed_name(access).map(str::to_owned).unwrap_or_default();
        (self.fingerprint, Access { name, ..access.clone() })
    }

    async fn call(&self, access: &Access) -> Result<bool, AccessError> {
        let _permit = self.checker.calls.acquire(self.caller.clone(), 1).await;
        let reviews = Api::<SubjectAccessReview>::all(self.checker.client());
        let review = SubjectAccessReview { spec: spec(self.user, access), ..SubjectAccessReview::default() };
        let answer = reviews.create(&PostParams::default(), &review).await;
        let answer = answer.map_err(|error| AccessError::Unavailable(client::failure(error).to_string()))?;
        let status = answer.status.unwrap_or_default();
        self.checker.metrics.access_review(status.allowed);
        Ok(status.allowed && status.denied != Some(true))
    }
}

fn accesses(kind: Kind, namespace: Option<&str>, name: &str, verbs: Verbs) -> Vec<Access> {
    let access = |verb: &&'static str| Access {
        verb,
        kind,
        namespace: namespace.map(str::to_owned),
        name: name.to_owned(),
    };
    verbs.as_rbac().iter().map(access).collect()
}

/// A create request has no resource name for RBAC to match.
fn reviewed_name(access: &Access) -> Option<&str> {
    (access.verb != "create").then_some(&*access.name)
}

fn spec(user: &User, access: &Access) -> SubjectAccessReviewSpec {
    let name = reviewed_name(access).map(str::to_owned);
    SubjectAccessReviewSpec {
        user: Some(user.name.clone()),
        uid: Some(user.uid.clone()).filter(|uid| !uid.is_empty()),
        groups: Some(user.groups.clone()),
        extra: (!user.extra.is_empty()).then(|| user.extra.clone()),
        resource_attributes: Some(ResourceAttributes {
            verb: Some(access.verb.to_owned()),
            version: Some("v1".to_owned()),
            resource: Some(access.kind.plural().to_owned()),
            namespace: access.namespace.clone(),
            name,
            ..ResourceAttributes::default()
        }),
        non_resource_attributes: None,
    }
}

/// Covers everything that an authorizer may decide on.
fn fingerprint(user: &User) -> Digest {
    let user = serde_json::to_string(user).unwrap_or_else(|_| unreachable!("texts are always JSON"));
    let mut hasher = Hasher::default();
    hasher.text("user", &user);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn user() -> User {
        User {
            name: "alice".to_owned(),
            uid: "u1".to_owned(),
            groups: vec!["painters".to_owned(), "system:authenticated".to_owned()],
            extra: [("scopes".to_owned(), vec!["a".to_owned(), "b".to_owned()])].into(),
        }
    }

    #[test]
    fn access_review_has_everything_that_an_authorizer_may_decide_on() {
        let required = |verbs| accesses(Kind::Secret, Some("away"), "x-synced", verbs);
        let specs: Vec<_> = required(Verbs::All).iter().map(|access| spec(&user(), access)).collect();
        for spec in &specs {
            assert_eq!(spec.user.as_deref(), Some("alice"));
            assert_eq!(spec.uid.as_deref(), Some("u1"));
            assert_eq!(spec.groups, Some(user().groups));
            assert_eq!(spec.extra, Some(user().extra));
        }
        let summary = |spec: &SubjectAccessReviewSpec| {
            let resource = spec.resource_attributes.clone().expect("resource attributes");
            [resource.verb, resource.resource, resource.namespace, resource.name]
                .map(|text| text.unwrap_or_else(|| "-".to_owned()))
                .join(" ")
        };
        assert_eq!(
            specs.iter().map(summary).collect::<Vec<_>>(),
            ["create secrets away -", "update secrets away x-synced", "delete secrets away x-synced"]
        );
        assert_eq!(required(Verbs::Delete).len(), 1);
    }

    #[test]
    fn users_that_differ_anywhere_have_different_fingerprints() {
        let user = |name: &str, groups: &[&str], extra: &[(&str, &[&str])]| {
            let texts = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
            let extra = extra.iter().map(|(key, values)| ((*key).to_owned(), texts(values))).collect();
            fingerprint(&User { name: name.to_owned(), groups: texts(groups), extra, ..User::default() })
        };
        let users = [
            user("alice", &[], &[]),
            user("alic", &["e"], &[]),
            user("alice", &["a", "b"], &[]),
            user("alice", &["ab"], &[]),
            user("alice", &[], &[("a", &[])]),
            user("alice", &[], &[("b", &[])]),
            user("alice", &[], &[("a", &["b"])]),
            user("alice", &[], &[("a", &["b", "c"])]),
            user("alice", &[], &[("a", &["b"]), ("c", &[])]),
        ];
        for (index, one) in users.iter().enumerate() {
            assert!(users[index + 1..].iter().all(|other| one != other), "{index}");
        }
    }
}
