//! Why a request to the API server failed. The texts never quote content of objects.

pub mod backoff;

use std::time::Duration;

use kube_core::Status;

use crate::text::shorten;

/// The maximum length of the reason of a refusal. Others choose it: webhooks, and quotas by their number.
const MAX_REASON_CHARS: usize = 500;

/// Why a request failed. The texts leave out what the API server quotes from objects.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    #[error("not found")]
    NotFound,
    #[error("already exists")]
    AlreadyExists,
    #[error("conflict: the object has changed")]
    Conflict,
    #[error("the namespace is terminating")]
    NamespaceTerminating,
    #[error("this replica is not the leader")]
    NotLeader,
    #[error("invalid: {0}")]
    Invalid(String),
    #[error("forbidden: {0}")]
    Forbidden(String),
    /// The credentials are not valid, or not any more.
    #[error("the API server does not accept the credentials")]
    Unauthorized,
    #[error("the API server asks to retry after {} s", .0.as_secs())]
    Throttled(Duration),
    #[error("{0}")]
    Unavailable(String),
}

/// How the message begins when a JSON patch does not apply to the object. Our patches apply to the state they were
/// computed from, so the object has changed since. Nothing else in the response distinguishes this from a 422 for an
/// invalid object.
const PATCH_DOES_NOT_FIT: &str = "the server rejected our request due to an error in our request";

impl Failure {
    /// Its text without a number that changes from one answer to the next: equal kinds are logged once.
    pub fn kind(&self) -> String {
        match self {
            Self::Throttled(_) => "throttled".to_owned(),
            other => other.to_string(),
        }
    }

    /// One sentence for the log: what failed, why, and what to do about it.
    pub fn explain(&self, what: &str) -> String {
        match self {
            Self::Forbidden(detail) => {
                format!(
                    "{what} is forbidden ({detail}): apply the RBAC of `lockstep manifests` for this identity"
                )
            }
            Self::Unavailable(detail) => {
                format!(
                    "{what} failed ({detail}): check that the API server is up, its address and the network"
                )
            }
            other => format!("{what} failed: {other}"),
        }
    }
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        let details = status.details.as_ref();
        let cause =
            |reason: &str| details.is_some_and(|d| d.causes.iter().any(|cause| cause.reason == reason));
        let retry_after = details.map_or(0, |details| details.retry_after_seconds);
        if status.is_already_exists() {
            Self::AlreadyExists
        } else if status.code == 422 && status.message.starts_with(PATCH_DOES_NOT_FIT) {
            Self::Conflict
        } else if cause("NamespaceTerminating") {
            Self::NamespaceTerminating
        } else if status.code == 429 || retry_after > 0 {
            Self::Throttled(Duration::from_secs(retry_after.max(1).into()))
        } else {
            match status.code {
                404 => Self::NotFound,
                409 => Self::Conflict,
                400 | 413 | 422 => Self::Invalid(shorten(&without_content(&status), MAX_REASON_CHARS)),
                401 => Self::Unauthorized,
                403 => Self::Forbidden(shorten(&without_content(&status), MAX_REASON_CHARS)),
                code => Self::Unavailable(format!("the API server answered {code} {}", status.reason)),
            }
        }
    }
}

/// The reason of a refusal without quoted values: the invalid fields, or the webhook that denied the request.
fn without_content(status: &Status) -> String {
    let causes = status.details.iter().flat_map(|details| &details.causes);
    let fields: Vec<String> = causes
        .filter(|cause| !cause.field.is_empty())
        .map(|cause| format!("{}: {}", cause.field, cause.reason))
        .collect();
    if !fields.is_empty() {
        return fields.join(", ");
    }
    for end in ["denied the request", "denied request"] {
        if let Some(at) = status.message.find(end) {
            return status.message[..at + end.len()].to_owned();
        }
    }
    match status.code {
        // RBAC and quota messages name objects and users, never values.
        403 => status.message.clone(),
        _ => status.reason.clone(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(value: serde_json::Value) -> Failure {
        serde_json::from_value::<Status>(value).unwrap().into()
    }

    #[test]
    fn status_codes_and_reasons_map_to_failures() {
        use serde_json::json;
        for (value, expected) in [
            (json!({"code": 404, "reason": "NotFound"}), Failure::NotFound),
            (json!({"code": 409, "reason": "AlreadyExists"}), Failure::AlreadyExists),
            (json!({"code": 409, "reason": "Conflict"}), Failure::Conflict),
            (
                json!({"code": 422, "reason": "Invalid", "message": PATCH_DOES_NOT_FIT, "details": {}}),
                Failure::Conflict,
            ),
            (
                json!({"code": 403, "reason": "Forbidden", "details": {"causes": [{"reason": "NamespaceTerminating"}]}}),
                Failure::NamespaceTerminating,
            ),
            (
                json!({"code": 429, "reason": "TooManyRequests", "details": {"retryAfterSeconds": 7}}),
                Failure::Throttled(Duration::from_secs(7)),
            ),
        ] {
            assert_eq!(status(value.clone()), expected, "{value}");
        }
    }

    #[test]
    fn explanation_names_what_failed_why_and_what_to_do() {
        for (failure, why, remedy) in [
            (Failure::Forbidden("no list".to_owned()), "no list", "RBAC"),
            (Failure::Unavailable("no route".to_owned()), "no route", "network"),
            (Failure::Conflict, "has changed", ""),
        ] {
            let text = failure.explain("the watch of pods");
            assert!(text.starts_with("the watch of pods ") && text.contains(why), "{text}");
            assert!(text.contains(remedy) && text.lines().count() == 1, "{text}");
        }
    }

    #[test]
    fn refusals_never_quote_values() {
        use serde_json::json;
        for value in [
            json!({"code": 422, "reason": "Invalid", "message": "ConfigMap \"x\" is invalid: data[a]: Invalid value: \"hush\"",
                   "details": {"causes": [{"reason": "FieldValueInvalid", "message": "Invalid value: \"hush\"", "field": "data[a]"}]}}),
            json!({"code": 403, "reason": "Forbidden", "message": "admission webhook \"w\" denied the request: saw hush"}),
            json!({"code": 422, "reason": "Invalid", "message": "something about hush"}),
        ] {
            let text = status(value).to_string();
            assert!(!text.contains("hush"), "{text}");
        }
    }
}
