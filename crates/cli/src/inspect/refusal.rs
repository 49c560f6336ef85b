//! Writes that are tried as a dry run, and what a refusal says about webhooks: the API server names them in its message
//! only.

use http::HeaderMap;
use kube::{Client, client::Body, core::Status};

use super::pages::Request;
use lockstep_cluster::client::{self, REQUEST_TIMEOUT, with_timeout};
use lockstep_core::failure::Failure;

/// The headers and the body of the answer to a dry run, or why it is refused.
pub async fn try_write(
    client: &Client,
    request: Request,
) -> Result<Result<(HeaderMap, Vec<u8>), Status>, Failure> {
    let request = request.map_err(|error| Failure::Unavailable(error.to_string()))?;
    let answer = async {
        let (parts, body) = client.send(request.map(Body::from)).await?.into_parts();
        Ok((parts, body.collect_bytes().await?))
    };
    let (parts, body) = with_timeout(REQUEST_TIMEOUT, answer).await?;
    if parts.status.is_success() {
        return Ok(Ok((parts.headers, body.into())));
    }
    let status = serde_json::from_slice(&body);
    Ok(Err(status.map_err(|error| client::failure(kube::Error::SerdeError(error)))?))
}

/// A webhook that has refused a write, or could not be called.
pub struct RefusingWebhook<'a> {
    pub name: &'a str,
    /// What it said; none if it could not be called.
    pub denial: Option<&'a str>,
}

/// What a webhook of an instance said when it refused a write, if one did. It never quotes content.
pub fn denial<'a>(status: &'a Status, instance: &str) -> Option<&'a str> {
    RefusingWebhook::of(status).filter(|webhook| webhook.is_of(instance))?.denial
}

impl<'a> RefusingWebhook<'a> {
    pub fn of(status: &'a Status) -> Option<Self> {
        let (called, rest) = status.message.split_once(" webhook \"")?;
        let (name, rest) = rest.split_once('"')?;
        match called {
            "admission" => {
                let denial = rest.strip_prefix(" denied the request")?;
                Some(Self { name, denial: Some(denial.trim_start_matches(": ")) })
            }
            _ => called.ends_with("failed calling").then_some(Self { name, denial: None }),
        }
    }

    /// Whether it is one of an instance: the names of its webhooks end with its own.
    pub fn is_of(&self, instance: &str) -> bool {
        self.name.strip_suffix(instance).is_some_and(|prefix| prefix.ends_with('.'))
    }
}
