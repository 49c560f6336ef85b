//! Parses AdmissionReviews (admission.k8s.io/v1) and writes the answers.

use k8s_openapi::ByteString;
use serde::Deserialize;
use serde_json::{json, value::RawValue};

use lockstep_core::{
    admission::admission_request::{Operation, Request, User},
    object::{Kind, Object, names},
};

/// Why a body is no AdmissionReview that the webhook handles. The message repeats nothing of the body: it may
/// hold a Secret.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    #[error("the body is not an AdmissionReview: {0} error at line {1} column {2}")]
    Json(&'static str, usize, usize),
    #[error("only AdmissionReview of admission.k8s.io/v1 is supported: set admissionReviewVersions to [v1]")]
    Version,
    #[error("the review has no request")]
    NoRequest,
    #[error(
        "only ConfigMaps and Secrets of v1 are reviewed here, without subresources: check the webhook's rules"
    )]
    Resource,
    #[error("only CREATE, UPDATE and DELETE are reviewed here: check the webhook's rules")]
    Operation,
    #[error("a {0} needs {1}")]
    Missing(&'static str, &'static str),
    #[error("the user, with groups and extra fields, has more than {} KiB", MAX_USER_BYTES >> 10)]
    User,
    #[error("an object of the review is larger than the API server stores")]
    ObjectTooLarge,
    #[error("the annotations of an object have more than {} KiB", MAX_ANNOTATIONS_BYTES >> 10)]
    Annotations,
}

/// The JSON of an object, with every escape counted as one byte. etcd takes 1.5 MiB, and base64 is a third longer.
const MAX_OBJECT_BYTES: usize = 2 << 20;
/// The API server's own limit (`TotalAnnotationSizeLimitB`), for keys and values together.
const MAX_ANNOTATIONS_BYTES: usize = 256 << 10;
/// Every SubjectAccessReview repeats the groups and extra fields of the user, which stay in memory until the
/// last answer. No token that an API server accepts has more.
const MAX_USER_BYTES: usize = 1 << 20;
/// A message may repeat names and annotations of any length.
const MAX_MESSAGE_CHARS: usize = 2000;
/// Once all warnings of a request exceed 4096 characters, the API server shows 256 of each and drops those
/// beyond 4096. With this many, none is dropped.
const MAX_WARNINGS: usize = 10;

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct AdmissionReview<'a> {
    api_version: String,
    kind: String,
    #[serde(borrow)]
    request: Option<AdmissionRequest<'a>>,
}

#[derive(Deserialize, Default)]
#[serde(rename_all = "camelCase", default)]
struct AdmissionRequest<'a> {
    uid: String,
    resource: Resource,
    sub_resource: String,
    name: String,
    namespace: String,
    operation: String,
    dry_run: Option<bool>,
    #[serde(borrow)]
    user_info: Option<&'a RawValue>,
    #[serde(borrow)]
    object: Option<&'a RawValue>,
    #[serde(borrow)]
    old_object: Option<&'a RawValue>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Resource {
    group: String,
    version: String,
    resource: String,
}

/// The uid to answer with, and the request.
pub fn parse(bytes: &[u8]) -> Result<(String, Request), Malformed> {
    let review: AdmissionReview = serde_json::from_slice(bytes).map_err(|error| json_error(&error))?;
    if review.api_version != "admission.k8s.io/v1" || review.kind != "AdmissionReview" {
        return Err(Malformed::Version);
    }
    let body = review.request.ok_or(Malformed::NoRequest)?;
    let Resource { group, version, resource } = &body.resource;
    let kind = Kind::ALL
        .into_iter()
        .find(|kind| kind.plural() == *resource && group.is_empty() && version == "v1")
        .filter(|_| body.sub_resource.is_empty())
        .ok_or(Malformed::Resource)?;
    if body.uid.is_empty() {
        return Err(Malformed::Missing("review", "a uid"));
    }
    let user = parse_user(body.user_info)?;
    // Messages repeat it in commands.
    if !names::is_label(&body.namespace) {
        return Err(Malformed::Missing("review", "a namespace"));
    }

    let object = |raw: Option<&RawValue>, name: &'static str| {
        let raw = raw.ok_or(Malformed::Missing("review of this operation", name))?;
        let mut object = parse_object(raw)?;
        if object.metadata.name.is_empty() {
            object.metadata.name.clone_from(&body.name);
        }
        Ok(object)
    };
    let operation = match body.operation.as_str() {
        "CREATE" => Operation::Create { new: object(body.object, "an object")? },
        "UPDATE" => Operation::Update {
            old: object(body.old_object, "an oldObject")?,
            new: object(body.object, "an object")?,
        },
        // The object is null, and in a deletecollection the name of the request is empty.
        "DELETE" => Operation::Delete { old: object(body.old_object, "an oldObject")? },
        _ => return Err(Malformed::Operation),
    };
    let dry_run = body.dry_run.unwrap_or_default();
    Ok((body.uid, Request { kind, namespace: body.namespace, user, operation, dry_run }))
}

/// Checks the length before it parses, because many short groups take much more memory than their JSON.
fn parse_user(raw: Option<&RawValue>) -> Result<User, Malformed> {
    let raw = raw.ok_or(Malformed::Missing("review", "a user"))?;
    if raw.get().len() > MAX_USER_BYTES {
        return Err(Malformed::User);
    }
    let user: User = serde_json::from_str(raw.get()).map_err(|error| json_error(&error))?;
    if user.name.is_empty() {
        return Err(Malformed::Missing("review", "a user"));
    }
    if user.size_bytes() > MAX_USER_BYTES { Err(Malformed::User) } else { Ok(user) }
}

/// Refuses, before it parses, an object that no API server can have stored.
fn parse_object(raw: &RawValue) -> Result<Object, Malformed> {
    if raw.get().len() > MAX_OBJECT_BYTES && unescaped_len(raw.get()) > MAX_OBJECT_BYTES {
        return Err(Malformed::ObjectTooLarge);
    }
    let object: Object = serde_json::from_str(raw.get()).map_err(|error| json_error(&error))?;
    let annotations = object.metadata.annotations.iter().map(|(key, value)| key.len() + value.len());
    if annotations.sum::<usize>() > MAX_ANNOTATIONS_BYTES { Err(Malformed::Annotations) } else { Ok(object) }
}

/// The length of a valid JSON text, with every escape such as `\u003c` counted as one byte.
fn unescaped_len(json: &str) -> usize {
    let mut bytes = json.bytes();
    let mut length = 0;
    while let Some(byte) = bytes.next() {
        length += 1;
        // A backslash is always in a string, and the escape complete.
        if byte == b'\\' && bytes.next() == Some(b'u') {
            bytes.nth(3);
        }
    }
    length
}

/// Leaves out serde's own message, which quotes the body.
fn json_error(error: &serde_json::Error) -> Malformed {
    let category = match error.classify() {
        serde_json::error::Category::Io | serde_json::error::Category::Syntax => "syntax",
        serde_json::error::Category::Data => "data",
        serde_json::error::Category::Eof => "end of input",
    };
    Malformed::Json(category, error.line(), error.column())
}

/// The answer to a review: allowed with warnings, or denied, with a label and a message. `patch` is a serialized JSON
/// patch.
pub fn answer(uid: &str, outcome: Result<Vec<String>, (&str, String)>, patch: Option<Vec<u8>>) -> Vec<u8> {
    let mut response = json!({"uid": uid, "allowed": outcome.is_ok()});
    match outcome {
        Ok(warnings) if warnings.is_empty() => {}
        Ok(warnings) => response["warnings"] = shorten_warnings(warnings).into(),
        Err((reason, message)) => {
            let message = single_line(&message);
            response["status"] =
                json!({"status": "Failure", "code": 403, "reason": "Forbidden", "message": message});
            response["auditAnnotations"] = json!({"denied": reason});
        }
    }
    if let Some(patch) = patch {
        response["patchType"] = "JSONPatch".into();
        response["patch"] = json!(ByteString(patch));
    }
    let answer =
        json!({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response});
    answer.to_string().into_bytes()
}

fn shorten_warnings(mut warnings: Vec<String>) -> Vec<String> {
    let more = warnings.len().saturating_sub(MAX_WARNINGS);
    warnings.truncate(MAX_WARNINGS);
    // The API server drops a warning with a control character in it.
    warnings.iter_mut().for_each(|warning| *warning = single_line(warning));
    if more > 0 {
        warnings.push(format!("and {more} more"));
    }
    warnings
}

/// A text that users may have chosen, as one line without control characters and of bounded length.
pub(crate) fn single_line(text: &str) -> String {
    let line = lockstep_core::text::shorten(text, MAX_MESSAGE_CHARS);
    line.chars().map(|char| if char.is_control() { ' ' } else { char }).collect()
}

#[cfg(test)]
mod tests;
