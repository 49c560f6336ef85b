//! Which rights somebody lacks, as the API server says.

use std::fmt;

use futures::{StreamExt, TryStreamExt, stream};
use kube::{Client, api::PostParams, core::Request};
use serde::Serialize;
use serde_json::{Value, json};

use lockstep_cluster::client;
use lockstep_core::failure::Failure;

const CONCURRENT_REVIEWS: usize = 8;

/// One verb that a role grants.
#[derive(Serialize)]
pub struct Right {
    pub group: String,
    pub resource: String,
    pub verb: String,
    /// None: any name.
    pub name: Option<String>,
    /// None: in all namespaces, or of the cluster.
    pub namespace: Option<String>,
}

impl Right {
    /// Creating objects of the cluster, or in any namespace.
    pub fn create(group: &str, resource: &str) -> Self {
        let (group, resource, verb) = (group.to_owned(), resource.to_owned(), "create".to_owned());
        Self { group, resource, verb, name: None, namespace: None }
    }
}

impl fmt::Display for Right {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.verb, self.resource)?;
        if let Some(name) = &self.name {
            write!(f, " {name}")?;
        }
        self.namespace.iter().try_for_each(|namespace| write!(f, " in {namespace}"))
    }
}

/// The permissions that this user (`user` and `groups` of a SubjectAccessReview) lacks, or the person who asks.
pub async fn missing(
    client: &Client,
    user: Option<Value>,
    permissions: &[Right],
) -> Result<Vec<String>, Failure> {
    let kind = if user.is_some() { "subjectaccessreviews" } else { "selfsubjectaccessreviews" };
    let reviews = Request::new(format!("/apis/authorization.k8s.io/v1/{kind}"));
    let spec = user.unwrap_or_else(|| json!({}));
    let lacks = async |permission: &Right| {
        let mut review = json!({"spec": spec});
        review["spec"]["resourceAttributes"] = json!(permission);
        let review = reviews.create(&PostParams::default(), review.to_string().into_bytes());
        let answer: Value = client::send(client, client::REQUEST_TIMEOUT, review).await?;
        Ok::<_, Failure>((answer["status"]["allowed"] != true).then(|| permission.to_string()))
    };
    let answers = stream::iter(permissions).map(lacks).buffered(CONCURRENT_REVIEWS);
    let missing: Vec<Option<String>> = answers.try_collect().await?;
    Ok(missing.into_iter().flatten().collect())
}
