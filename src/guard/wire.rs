//! AdmissionReview v1, in and out.

use std::{borrow::Cow, collections::BTreeMap, fmt};

use k8s_openapi::ByteString;
use serde::{
    Deserialize, Deserializer, Serialize,
    de::{Error, MapAccess, Visitor},
};
use serde_json::value::RawValue;

use super::review::{Change, Request, User};
use crate::object::{Kind, Object};

/// What cannot be read as a review of ours. The message holds nothing of the body.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    #[error("the body is no AdmissionReview: {0} error at line {1} column {2}")]
    Json(&'static str, usize, usize),
    #[error("only AdmissionReview of admission.k8s.io/v1 is understood: set admissionReviewVersions to [v1]")]
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
    #[error("the groups and extra fields of the user are more than {} KiB", MOST_USER >> 10)]
    User,
}

/// What a user may weigh: every question about their rights holds all of it, and it is kept until they are answered.
/// A token of the API server's clients cannot hold more.
const MOST_USER: usize = 1 << 20;
/// How much of a text is shown, in characters: what people chose themselves may be of any length.
const MOST_TEXT: usize = 2000;

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Envelope<'a> {
    #[serde(default)]
    api_version: String,
    #[serde(default)]
    kind: String,
    #[serde(borrow, default)]
    request: Option<Body<'a>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Body<'a> {
    uid: String,
    resource: Resource,
    #[serde(default)]
    sub_resource: String,
    #[serde(default)]
    name: String,
    #[serde(default)]
    namespace: String,
    operation: String,
    #[serde(default)]
    user_info: UserInfo,
    #[serde(borrow, default)]
    object: Option<&'a RawValue>,
    #[serde(borrow, default)]
    old_object: Option<&'a RawValue>,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct Resource {
    group: String,
    version: String,
    resource: String,
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct UserInfo {
    username: String,
    uid: String,
    groups: Option<Vec<String>>,
    extra: Option<BTreeMap<String, Option<Vec<String>>>>,
}

/// Reads a review: the uid to answer with, and the request.
pub fn read(bytes: &[u8]) -> Result<(String, Request), Malformed> {
    let envelope: Envelope = serde_json::from_slice(bytes).map_err(|error| unreadable(&error))?;
    if envelope.api_version != "admission.k8s.io/v1" || envelope.kind != "AdmissionReview" {
        return Err(Malformed::Version);
    }
    let body = envelope.request.ok_or(Malformed::NoRequest)?;
    let Resource { group, version, resource } = &body.resource;
    let kind = Kind::ALL
        .into_iter()
        .find(|kind| kind.plural() == resource && group.is_empty() && version == "v1")
        .filter(|_| body.sub_resource.is_empty())
        .ok_or(Malformed::Resource)?;
    if body.uid.is_empty() {
        return Err(Malformed::Missing("review", "a uid"));
    }
    if body.user_info.username.is_empty() {
        return Err(Malformed::Missing("review", "a user"));
    }
    if body.namespace.is_empty() {
        return Err(Malformed::Missing("review", "a namespace"));
    }

    let object = |raw: Option<&RawValue>, what: &'static str| {
        let raw = raw.ok_or(Malformed::Missing("review of this operation", what))?;
        let mut object: Object = serde_json::from_str(raw.get()).map_err(|error| unreadable(&error))?;
        if object.metadata.name.is_empty() {
            object.metadata.name.clone_from(&body.name);
        }
        Ok(object)
    };
    let change = match &*body.operation {
        "CREATE" => Change::Create { new: object(body.object, "an object")? },
        "UPDATE" => {
            let (old, new) = (object(body.old_object, "an oldObject")?, object(body.object, "an object")?);
            // Where content differs, as it does in most large reviews, nothing else need be looked at.
            let idle = old.data == new.data
                && body.old_object.zip(body.object).is_some_and(|(old, new)| is_idle(old, new));
            Change::Update { old, new, idle }
        }
        // The object is null, and in a deletecollection the name is empty.
        "DELETE" => Change::Delete { old: object(body.old_object, "an oldObject")? },
        _ => return Err(Malformed::Operation),
    };
    let UserInfo { username: name, uid, groups, extra } = body.user_info;
    // Go writes an empty list as null.
    let extra = extra.unwrap_or_default().into_iter().map(|(key, values)| (key, values.unwrap_or_default()));
    let user = User { name, uid, groups: groups.unwrap_or_default(), extra: extra.collect() };
    if user.weight() > MOST_USER {
        return Err(Malformed::User);
    }
    Ok((body.uid, Request { kind, namespace: body.namespace, user, change }))
}

/// Whether an update changes nothing but managedFields: storage migration and empty applies do that. The API server
/// writes equal values alike, so texts are compared, and nothing is built of objects that may be anything.
fn is_idle(old: &RawValue, new: &RawValue) -> bool {
    fn essence(raw: &RawValue) -> Option<Vec<(bool, Cow<'_, str>, &str)>> {
        let mut essence = Vec::new();
        for (key, value) in Fields::of(raw)? {
            if key == "metadata" {
                let fields = Fields::of(value)?.into_iter();
                let lasting = fields.filter(|(key, _)| key != "managedFields" && key != "resourceVersion");
                essence.extend(lasting.map(|(key, value)| (true, key, value.get())));
            } else {
                essence.push((false, key, value.get()));
            }
        }
        Some(essence)
    }
    old.get() == new.get() || essence(old).is_some_and(|old| Some(old) == essence(new))
}

/// The fields of an object, unread.
struct Fields<'a>(Vec<(Cow<'a, str>, &'a RawValue)>);

impl<'a> Fields<'a> {
    /// More than Kubernetes has for metadata, or for a ConfigMap or a Secret.
    const MOST: usize = 64;

    fn of(raw: &'a RawValue) -> Option<Vec<(Cow<'a, str>, &'a RawValue)>> {
        serde_json::from_str::<Self>(raw.get()).ok().map(|fields| fields.0)
    }
}

impl<'de> Deserialize<'de> for Fields<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Each;

        impl<'de> Visitor<'de> for Each {
            type Value = Fields<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields<'de>, A::Error> {
                let mut fields = Vec::new();
                while let Some(field) = map.next_entry()? {
                    if fields.len() == Fields::MOST {
                        return Err(A::Error::custom("too many fields"));
                    }
                    fields.push(field);
                }
                Ok(Fields(fields))
            }
        }

        deserializer.deserialize_map(Each)
    }
}

/// serde's own text would quote the body.
fn unreadable(error: &serde_json::Error) -> Malformed {
    let what = match error.classify() {
        serde_json::error::Category::Io | serde_json::error::Category::Syntax => "syntax",
        serde_json::error::Category::Data => "data",
        serde_json::error::Category::Eof => "end of input",
    };
    Malformed::Json(what, error.line(), error.column())
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Answer<'a> {
    api_version: &'static str,
    kind: &'static str,
    response: Response<'a>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Response<'a> {
    uid: &'a str,
    allowed: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<Status>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    warnings: Vec<String>,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    audit_annotations: BTreeMap<&'static str, &'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    patch_type: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    patch: Option<ByteString>,
}

#[derive(Serialize)]
struct Status {
    status: &'static str,
    code: u16,
    reason: &'static str,
    message: String,
}

/// Why a request is refused, in a word and in sentences.
pub type Refused = (&'static str, String);

/// The answer to a review: `patch` is a JSON patch, in bytes.
#[must_use]
pub fn answer(uid: &str, refusal: Option<Refused>, warnings: Vec<String>, patch: Option<Vec<u8>>) -> Vec<u8> {
    let (reason, message) = refusal.unzip();
    let status = message.map(|message| Status {
        status: "Failure",
        code: 403,
        reason: "Forbidden",
        message: line(&message),
    });
    let response = Response {
        uid,
        allowed: status.is_none(),
        status,
        warnings: shortened(warnings),
        audit_annotations: reason.map(|reason| ("denied", reason)).into_iter().collect(),
        patch_type: patch.as_ref().map(|_| "JSONPatch"),
        patch: patch.map(ByteString),
    };
    let answer = Answer { api_version: "admission.k8s.io/v1", kind: "AdmissionReview", response };
    serde_json::to_vec(&answer).unwrap_or_default()
}

/// Once all warnings of a request have more than 4096 characters, the API server shows 256 of each and forgets what
/// is beyond 4096; so many always show. It drops one with a control character in it.
fn shortened(mut warnings: Vec<String>) -> Vec<String> {
    const SHOWN: usize = 10;
    let more = warnings.len().saturating_sub(SHOWN);
    warnings.truncate(SHOWN);
    warnings.iter_mut().for_each(|warning| *warning = line(warning));
    if more > 0 {
        warnings.push(format!("and {more} more"));
    }
    warnings
}

/// A text that may hold what anybody wrote, as one line that is not too long.
#[must_use]
pub fn line(text: &str) -> String {
    let line = crate::text::shorten(text, MOST_TEXT);
    line.chars().map(|char| if char.is_control() { ' ' } else { char }).collect()
}

#[cfg(test)]
mod tests;
