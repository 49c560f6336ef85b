//! PURE. What the answer to a write that the guard must refuse says about the guard.

use kube::core::Status;

use super::Check;
use crate::{client::Failure, text::shorten};

/// The maximum length of the name of another webhook or policy in a message.
const MAX_NAME_CHARS: usize = 100;

/// A dry-run create of a malformed source.
pub struct Probe<'a> {
    /// The name of the instance, with which the names of its webhooks end.
    pub instance: &'a str,
    /// Where it was tried.
    pub namespace: &'a str,
    /// The user, as far as it is known.
    pub user: &'a str,
    /// Whether the guard lets this user write anything.
    pub is_exempt: bool,
    /// The command that prints the guard's log.
    pub logs: &'a str,
}

impl Probe<'_> {
    /// Judges the answer: a refusal, or none. Only our own webhooks say something about the guard: any other refusal
    /// came before the guard was asked, or from somebody else.
    #[must_use]
    pub fn judge(&self, refusal: Option<&Status>) -> Check {
        let Self { namespace, user, .. } = self;
        let Some(status) = refusal else {
            return match self.is_exempt {
                true => Check::unknown(format!(
                    "you ({user}) are exempt, so the guard cannot be tried as you: try as another user"
                )),
                false => Check::bad(
                    format!("the guard let {user} write a malformed source"),
                    "check the webhook configurations above; an exempt user is not restricted: try as another",
                ),
            };
        };
        let message = status.message.as_str();
        if let Some(webhook) = quoted(message, "failed calling webhook \"") {
            return match self.is_ours(webhook) {
                true => Check::bad(
                    format!("the API server cannot reach the guard: {}", Failure::from(status.clone())),
                    self.logs,
                ),
                false => untried(&format!("the API server cannot call another webhook, {}", short(webhook))),
            };
        }
        if let Some(webhook) = quoted(message, "admission webhook \"") {
            return match self.is_ours(webhook) {
                true if message.contains("cannot be a source") => Check::good(
                    "the guard answers: it refused a malformed source, as it must (nothing was stored)",
                ),
                true => Check::warning(
                    "the guard answers, but it refused a malformed source for another reason",
                    self.logs,
                ),
                false => untried(&format!("another webhook, {}, refused the write", short(webhook))),
            };
        }
        if message.contains("ValidatingAdmissionPolicy '") {
            let policy = message.split('\'').nth(1).unwrap_or_default();
            return untried(&format!("the ValidatingAdmissionPolicy {} refused the write", short(policy)));
        }
        if status.code == 401 {
            return untried("the API server does not accept your credentials: log in again");
        }
        if status.code == 403 && message.contains("exceeded quota") {
            return untried(&format!(
                "a ResourceQuota of namespace {namespace} refuses new ConfigMaps: choose another with -n"
            ));
        }
        match Failure::from(status.clone()) {
            Failure::NotFound => {
                untried(&format!("namespace {namespace} does not exist: choose another with -n"))
            }
            Failure::NamespaceTerminating => {
                untried(&format!("namespace {namespace} is terminating: choose another with -n"))
            }
            Failure::Forbidden(_) if message.contains(" cannot create resource ") => untried(&format!(
                "you may not create ConfigMaps in namespace {namespace}: choose another with -n"
            )),
            failure => untried(&failure.to_string()),
        }
    }

    fn is_ours(&self, webhook: &str) -> bool {
        webhook.strip_suffix(self.instance).is_some_and(|prefix| prefix.ends_with('.'))
    }
}

pub fn untried(why: &str) -> Check {
    Check::unknown(format!("the guard cannot be tried: {why}"))
}

/// The text between this start, which ends with a quote, and the next quote.
fn quoted<'a>(message: &'a str, start: &str) -> Option<&'a str> {
    Some(message.split_once(start)?.1.split_once('"')?.0)
}

fn short(name: &str) -> String {
    shorten(name, MAX_NAME_CHARS)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::inspect::check::Outcome;

    fn judge(refusal: Option<&Status>, is_exempt: bool) -> Check {
        let probe = Probe {
            instance: "lockstep.d.test",
            namespace: "home",
            user: "ann",
            is_exempt,
            logs: "kubectl logs",
        };
        probe.judge(refusal)
    }

    #[test]
    fn only_webhooks_of_this_instance_say_something_about_the_guard() {
        use Outcome::{Bad, Good, Unknown, Warning};
        let forbidden = |why: &str| format!("configmaps \"lockstep-check-x\" is forbidden: {why}");
        let denied =
            |webhook: &str, why: &str| format!("admission webhook \"{webhook}\" denied the request: {why}");
        let unreachable = |webhook: &str| {
            format!(
                "Internal error occurred: failed calling webhook \"{webhook}\": failed to call webhook: Post \
                 \"https://x\": dial tcp: connect: connection refused"
            )
        };
        for (code, message, outcome, text) in [
            (403, denied("sources.lockstep.d.test", "configmap a/b cannot be a source: x"), Good, "the guard answers"),
            (403, denied("sources.lockstep.d.test", "other"), Warning, "for another reason"),
            (500, unreachable("sources.lockstep.d.test"), Bad, "cannot reach the guard"),
            // Another instance, and other tools.
            (500, unreachable("sources.lockstep.other"), Unknown, "cannot call another webhook, sources.lockstep.other"),
            (500, unreachable("sources.my-lockstep.d.test"), Unknown, "another webhook"),
            (500, unreachable("validate.kyverno.svc-fail"), Unknown, "another webhook, validate.kyverno.svc-fail"),
            (
                403,
                denied("sources.lockstep.other", "configmap a/b cannot be a source: x"),
                Unknown,
                "another webhook, sources.lockstep.other, refused",
            ),
            (400, denied("validate.kyverno.svc-fail", "no"), Unknown, "another webhook, validate.kyverno.svc-fail, refused"),
            (
                422,
                forbidden("ValidatingAdmissionPolicy 'team-label' with binding 'b' denied request: no"),
                Unknown,
                "the ValidatingAdmissionPolicy team-label refused",
            ),
            (404, "namespaces \"home\" not found".to_owned(), Unknown, "namespace home does not exist"),
            (401, "Unauthorized".to_owned(), Unknown, "does not accept your credentials"),
            (403, forbidden("exceeded quota: q, requested: count/configmaps=1"), Unknown, "a ResourceQuota of namespace home"),
            (
                403,
                "configmaps is forbidden: User \"ann\" cannot create resource \"configmaps\" in API group \"\" in the \
                 namespace \"home\""
                    .to_owned(),
                Unknown,
                "you may not create ConfigMaps in namespace home",
            ),
            (403, forbidden("some plugin says no"), Unknown, "some plugin says no"),
            (500, "etcdserver: request timed out".to_owned(), Unknown, "the API server answered 500"),
        ] {
            let status: Status = serde_json::from_value(json!({"code": code, "message": message})).unwrap();
            let check = judge(Some(&status), false);
            assert_eq!(check.outcome, outcome, "{message}: {}", check.text);
            assert!(check.text.contains(text), "{message}: {}", check.text);
            assert_eq!(judge(Some(&status), true), check, "a refusal is one for exempt users, too");
        }
    }

    #[test]
    fn terminating_namespace_is_not_a_lack_of_rights() {
        let status = json!({
            "code": 403,
            "message": "configmaps \"x\" is forbidden: unable to create new content in namespace home because it is \
                        being terminated",
            "details": {"causes": [{"reason": "NamespaceTerminating", "message": "", "field": "metadata.namespace"}]},
        });
        let check = judge(Some(&serde_json::from_value(status).unwrap()), false);
        assert_eq!(check.outcome, Outcome::Unknown);
        assert!(check.text.contains("namespace home is terminating"), "{}", check.text);
    }

    #[test]
    fn write_that_is_let_through_is_bad_unless_the_user_is_exempt() {
        assert_eq!(judge(None, false).outcome, Outcome::Bad);
        let exempt = judge(None, true);
        assert_eq!(exempt.outcome, Outcome::Unknown);
        assert!(exempt.text.contains("(ann) are exempt"), "{}", exempt.text);
    }
}
