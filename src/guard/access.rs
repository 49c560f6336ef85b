//! Asks the API server what a user may do: SubjectAccessReviews, few and remembered for a moment.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use futures::{StreamExt, stream};
use k8s_openapi::api::authorization::v1::{ResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use kube::{Api, Client, api::PostParams};
use tokio::sync::Semaphore;

use super::review::{Reach, User, Verbs};
use crate::{client::Failure, content::Digest, content::Hasher, object::Kind, ops::metrics::Metrics};

/// How long an answer is believed.
const REMEMBERED: Duration = Duration::from_secs(3);
/// How many answers are remembered; beyond that, all are forgotten.
const MOST: usize = 10_000;
/// Questions to the API server at a time, for all requests together, and for one: what comes after a no is not asked.
const AT_A_TIME: usize = 32;
const FOR_ONE: usize = 6;

/// What somebody would do to a companion.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Question {
    pub verb: &'static str,
    pub kind: Kind,
    /// None: in all of them.
    pub namespace: Option<String>,
    pub name: String,
}

/// Who is asked about, and what tells them from others: that is made out once, however many questions there are.
struct Asker<'a> {
    user: &'a User,
    fingerprint: Digest,
}

/// Why a user may not have what they ask for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Refusal {
    /// This is not allowed to them.
    No(Question),
    /// It could not be asked.
    Unanswered(String),
}

pub struct Access {
    reviews: Api<SubjectAccessReview>,
    at_a_time: Semaphore,
    /// By user and question.
    remembered: Mutex<HashMap<(Digest, Question), (bool, Instant)>>,
    metrics: Metrics,
}

impl Access {
    #[must_use]
    pub fn new(client: Client, metrics: Metrics) -> Self {
        Self {
            reviews: Api::all(client),
            at_a_time: Semaphore::new(AT_A_TIME),
            remembered: Mutex::default(),
            metrics,
        }
    }

    /// Whether a user may do all of it themselves. Rights in all namespaces are asked for first: they answer for
    /// every single one.
    pub async fn check(&self, user: &User, kind: Kind, reach: &Reach) -> Result<(), Refusal> {
        let asker = Asker { user, fingerprint: fingerprint(user) };
        for (name, verbs) in &reach.wide {
            self.all(&asker, questions(kind, None, name, *verbs)).await?;
        }
        let rest: Vec<_> = reach
            .places
            .iter()
            .filter(|((_, name), verbs)| reach.wide.get(name).is_none_or(|wide| wide < *verbs))
            .collect();
        let mut open = Vec::new();
        for ((namespace, name), verbs) in &rest {
            // For one namespace, asking there is quicker; for many, the answer is remembered.
            if rest.len() > 1 {
                match self.all(&asker, questions(kind, None, name, **verbs)).await {
                    Ok(()) => continue,
                    Err(Refusal::No(_)) => {}
                    Err(unanswered) => return Err(unanswered),
                }
            }
            open.extend(questions(kind, Some(namespace), name, **verbs));
        }
        self.all(&asker, open).await
    }

    /// The first that is not allowed, if any.
    async fn all(&self, asker: &Asker<'_>, questions: Vec<Question>) -> Result<(), Refusal> {
        let mut answers =
            stream::iter(questions).map(|question| self.answer(asker, question)).buffered(FOR_ONE);
        while let Some(answer) = answers.next().await {
            answer?;
        }
        Ok(())
    }

    async fn answer(&self, asker: &Asker<'_>, question: Question) -> Result<(), Refusal> {
        let key = (asker.fingerprint, question);
        let remembered = self.remembered().get(&key).copied();
        let allowed = match remembered {
            Some((allowed, when)) if when.elapsed() < REMEMBERED => allowed,
            _ => {
                let allowed = self.ask(asker.user, &key.1).await?;
                let mut remembered = self.remembered();
                if remembered.len() >= MOST {
                    remembered.clear();
                }
                remembered.insert(key.clone(), (allowed, Instant::now()));
                allowed
            }
        };
        if allowed { Ok(()) } else { Err(Refusal::No(key.1)) }
    }

    async fn ask(&self, user: &User, question: &Question) -> Result<bool, Refusal> {
        let unanswered = |failure: Failure| Refusal::Unanswered(failure.to_string());
        let _permit = self
            .at_a_time
            .acquire()
            .await
            .map_err(|_| unanswered(Failure::Unavailable("shutting down".to_owned())))?;
        let review = SubjectAccessReview { spec: spec(user, question), ..SubjectAccessReview::default() };
        let outcome = self.reviews.create(&PostParams::default(), &review).await;
        let status = outcome.map_err(|error| unanswered(error.into()))?.status.unwrap_or_default();
        self.metrics.access_review(status.allowed);
        Ok(status.allowed && status.denied != Some(true))
    }

    fn remembered(&self) -> MutexGuard<'_, HashMap<(Digest, Question), (bool, Instant)>> {
        self.remembered.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn questions(kind: Kind, namespace: Option<&str>, name: &str, verbs: Verbs) -> Vec<Question> {
    let verbs: &[&'static str] = match verbs {
        Verbs::Delete => &["delete"],
        Verbs::All => &["create", "update", "delete"],
    };
    verbs
        .iter()
        .map(|verb| Question { verb, kind, namespace: namespace.map(str::to_owned), name: name.to_owned() })
        .collect()
}

fn spec(user: &User, question: &Question) -> SubjectAccessReviewSpec {
    // RBAC cannot tell objects apart that are not there yet.
    let name = (question.verb != "create").then(|| question.name.clone());
    SubjectAccessReviewSpec {
        user: Some(user.name.clone()),
        uid: Some(user.uid.clone()).filter(|uid| !uid.is_empty()),
        groups: Some(user.groups.clone()),
        extra: (!user.extra.is_empty()).then(|| user.extra.clone()),
        resource_attributes: Some(ResourceAttributes {
            verb: Some(question.verb.to_owned()),
            version: Some("v1".to_owned()),
            resource: Some(question.kind.plural().to_owned()),
            namespace: question.namespace.clone(),
            name,
            ..ResourceAttributes::default()
        }),
        non_resource_attributes: None,
    }
}

/// Everything that an authorizer may look at.
fn fingerprint(user: &User) -> Digest {
    let mut hasher = Hasher::new();
    hasher.text("name", &user.name);
    hasher.text("uid", &user.uid);
    for group in &user.groups {
        hasher.text("group", group);
    }
    for (key, values) in &user.extra {
        // It may be there without a value.
        hasher.text("extra", key);
        for value in values {
            hasher.text(&format!("extra {key}"), value);
        }
    }
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
    fn a_question_tells_everything_that_an_authorizer_may_look_at() {
        let asked = |verbs| questions(Kind::Secret, Some("away"), "x-synced", verbs);
        let specs: Vec<_> = asked(Verbs::All).iter().map(|question| spec(&user(), question)).collect();
        for spec in &specs {
            assert_eq!(spec.user.as_deref(), Some("alice"));
            assert_eq!(spec.uid.as_deref(), Some("u1"));
            assert_eq!(spec.groups, Some(user().groups));
            assert_eq!(spec.extra, Some(user().extra));
        }
        let about = |spec: &SubjectAccessReviewSpec| {
            let asked = spec.resource_attributes.clone().expect("a resource");
            [asked.verb, asked.resource, asked.namespace, asked.name]
                .map(|text| text.unwrap_or_else(|| "-".to_owned()))
                .join(" ")
        };
        assert_eq!(
            specs.iter().map(about).collect::<Vec<_>>(),
            ["create secrets away -", "update secrets away x-synced", "delete secrets away x-synced"]
        );
        assert_eq!(asked(Verbs::Delete).len(), 1);
    }

    #[test]
    fn no_two_users_are_taken_for_one() {
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
