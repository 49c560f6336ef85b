//! Whether Lockstep can be installed, or works once it is: sentences with what to do about them. [`facts`] asks the API
//! server; what its answers mean is decided by pure functions.

mod facts;
pub mod version;

use k8s_openapi::jiff::Timestamp;
use kube::{Client, core::Status};
use serde::de::IgnoredAny;
use serde_json::json;

use self::facts::Tool;
use super::{
    instance::{APP_LABEL, Instance, age},
    refusal::RefusingWebhook,
    rights::{Right, missing},
};
use lockstep_cluster::client::{self, REQUEST_TIMEOUT, user_info, with_timeout};
use lockstep_core::{
    admission::admission_request::User,
    certs::webhooks::{self, WebhookConfiguration, WebhookKind},
    failure::Failure,
    lease::lease_state::LeaseState,
    text::shorten,
};

/// Fewer days than this until the CA expires are worth a warning: it is replaced long before.
const MIN_CA_DAYS: i64 = 30;
/// How much of the API server's message is quoted.
const MAX_QUOTED_CHARS: usize = 300;
const APPLY: &str = "lockstep manifests | kubectl apply -f - (with the flags of your installation)";

#[derive(Debug, PartialEq)]
pub(crate) struct Check {
    pub level: Level,
    pub text: String,
    pub remedy: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Level {
    Good,
    /// Cannot be judged: the object does not exist, or the user may not read it.
    Unknown,
    Warning,
    Bad,
}

impl Level {
    pub(crate) const fn symbol(self) -> &'static str {
        match self {
            Self::Good => "✓",
            Self::Unknown => "?",
            Self::Warning => "!",
            Self::Bad => "✗",
        }
    }
}

fn good(text: impl Into<String>) -> Check {
    Check { level: Level::Good, text: text.into(), remedy: None }
}

fn unknown(text: impl Into<String>) -> Check {
    Check { level: Level::Unknown, text: text.into(), remedy: None }
}

fn warning(text: impl Into<String>, remedy: impl Into<String>) -> Check {
    Check { level: Level::Warning, text: text.into(), remedy: Some(remedy.into()) }
}

fn bad(text: impl Into<String>, remedy: impl Into<String>) -> Check {
    Check { level: Level::Bad, text: text.into(), remedy: Some(remedy.into()) }
}

/// The Lockstep that is checked, and the namespace in which its webhook is tried.
pub(crate) struct Checked<'a> {
    pub instance: &'a Instance,
    pub namespace: &'a str,
}

impl Checked<'_> {
    /// `permissions`: what the ServiceAccount needs.
    pub(crate) async fn checks(&self, client: &Client, permissions: &[Right], now: Timestamp) -> Vec<Check> {
        let version = async { client.apiserver_version().await };
        let policies = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies";
        let name = &self.instance.keys.instance;
        let (version, policy, tools, rights) = tokio::join!(
            with_timeout(REQUEST_TIMEOUT, version),
            client::get::<IgnoredAny>(client, policies, name),
            facts::tools(client),
            self.rights(client, permissions),
        );
        let mut checks = vec![match &version {
            Ok(version) => version::judge(version),
            Err(failure) => unknown(format!("the version of Kubernetes cannot be read: {failure}")),
        }];
        let is_absent = self.instance.is_absent();
        if is_absent {
            let namespace = &self.instance.namespace;
            checks.push(unknown(format!(
                "Lockstep is not installed: there is no Lease, no webhook configuration and no pod in {namespace}"
            )));
        }
        checks.extend(self.leftovers(policy));
        if !is_absent {
            checks.push(self.leader(now));
            checks.extend(self.replicas());
            for (kind, found) in &self.instance.webhooks {
                checks.extend(self.webhooks(*kind, found, now));
            }
        }
        checks.extend(rights);
        match tools {
            Ok(tools) => checks.extend(tools.iter().map(|tool| self.deputy(tool))),
            Err(failure) => {
                checks.push(unknown(format!("ServiceAccounts of known tools cannot be listed: {failure}")));
            }
        }
        checks
    }

    /// The rights of the person to install it, or those of its ServiceAccount and what they let the webhook do.
    async fn rights(&self, client: &Client, permissions: &[Right]) -> Vec<Check> {
        let own_namespace = &self.instance.namespace;
        if self.instance.is_absent() {
            let found = client::get::<IgnoredAny>(client, "/api/v1/namespaces", own_namespace).await;
            // Otherwise it exists, or the person may not see whether it does: a new one could be labelled by mistake.
            let namespace_is_missing = matches!(found, Err(Failure::NotFound));
            let needed = facts::to_install(namespace_is_missing);
            return vec![self.may_install(namespace_is_missing, missing(client, None, &needed).await)];
        }
        let User { name: account, mut groups, .. } = facts::service_account(own_namespace, "lockstep");
        groups.push("system:authenticated".to_owned());
        let of_account = json!({"user": account, "groups": groups});
        let (lacks, user, probe) = tokio::join!(
            missing(client, Some(of_account), permissions),
            user_info(client),
            facts::try_malformed_source(client, &self.instance.domain, self.namespace),
        );
        let user = user.unwrap_or_default();
        let (name, groups) = (user.username.unwrap_or_default(), user.groups.unwrap_or_default());
        vec![
            service_account(&account, lacks),
            self.webhook(&User { name, groups, ..User::default() }, &probe),
        ]
    }

    /// The command that ends when every replica is ready.
    fn wait(&self) -> String {
        format!("kubectl -n {} rollout status deployment lockstep", self.instance.namespace)
    }

    fn logs(&self) -> String {
        format!("kubectl -n {} logs -l {APP_LABEL}", self.instance.namespace)
    }

    /// Parts that are left when no replica runs.
    fn leftovers(&self, policy: Result<IgnoredAny, Failure>) -> Vec<Check> {
        let is_led =
            !matches!(&self.instance.lease, Ok(LeaseState { leader: None, .. }) | Err(Failure::NotFound));
        if is_led || !self.instance.replicas.as_ref().is_ok_and(Vec::is_empty) {
            return Vec::new();
        }
        let (name, wait) = (&self.instance.keys.instance, self.wait());
        let webhooks = self.instance.webhooks.iter().any(|(_, found)| found.is_ok()).then(|| {
            bad(
                "webhook configurations are left, and no replica answers: nobody can write sources and companions",
                format!(
                    "start Lockstep, if you have just installed it wait ({wait}), or remove the rest: kubectl delete \
                     validatingwebhookconfiguration,mutatingwebhookconfiguration {name}"
                ),
            )
        });
        let policy = match policy {
            Ok(_) => Some(bad(
                format!(
                    "ValidatingAdmissionPolicy {name} is left, and no replica runs: it refuses edits and deletes of \
                     companions"
                ),
                format!(
                    "start Lockstep, or remove the policy: kubectl delete \
                     validatingadmissionpolicybinding,validatingadmissionpolicy {name}"
                ),
            )),
            Err(Failure::NotFound) => None,
            Err(failure) => {
                Some(unknown(format!("ValidatingAdmissionPolicy {name} cannot be read: {failure}")))
            }
        };
        webhooks.into_iter().chain(policy).collect()
    }

    fn leader(&self, now: Timestamp) -> Check {
        let (namespace, ours) = (&self.instance.namespace, env!("CARGO_PKG_VERSION"));
        match &self.instance.lease {
            Ok(LeaseState { leader: Some(leader), settings, .. }) => {
                let version = settings.as_ref().map_or("unknown", |settings| &settings.version);
                let text = format!("leader {leader}, version {version}");
                if version == ours {
                    return good(text);
                }
                warning(
                    format!("{text}; this binary is version {ours}"),
                    format!("use the same version: this binary applies the rules of version {ours}"),
                )
            }
            Ok(lease) => {
                let since = lease.renewed.map(|renewed| format!(" for {}", age(renewed, now)));
                let text = format!("no replica has led{}: nothing is mirrored", since.unwrap_or_default());
                bad(text, self.logs())
            }
            Err(Failure::NotFound) => bad(
                format!("there is no Lease in {namespace}: no replica has ever led"),
                format!(
                    "if you have just installed it, wait: {}; otherwise check --lockstep-namespace and --domain",
                    self.wait()
                ),
            ),
            Err(failure) => unknown(format!("the Lease cannot be read: {failure}")),
        }
    }

    fn replicas(&self) -> Vec<Check> {
        let namespace = &self.instance.namespace;
        let replicas = match &self.instance.replicas {
            Err(failure) => {
                return vec![unknown(format!("the pods in {namespace} cannot be listed: {failure}"))];
            }
            Ok(replicas) => replicas,
        };
        let ready = replicas.iter().filter(|replica| replica.ready).count();
        let text = format!("{ready} of {} replicas are ready", replicas.len());
        let logs = format!("kubectl -n {namespace} describe pods; {}", self.logs());
        let mut checks = vec![match (ready, replicas.len()) {
            (_, 0) => {
                unknown(format!("there are no pods in {namespace}: Lockstep runs elsewhere, or not at all"))
            }
            (0, _) => bad(
                format!("{text}: nobody can write sources and companions until one is"),
                format!("{}; if it does not end: {logs}", self.wait()),
            ),
            (1, 1) => warning(text, "run two, so that writes go on while one is replaced"),
            (ready, all) if ready < all => warning(text, logs),
            _ => good(text),
        }];
        let mut images: Vec<&str> = replicas.iter().map(|replica| replica.image.as_str()).collect();
        images.sort_unstable();
        images.dedup();
        if images.len() > 1 {
            checks
                .push(warning(format!("replicas run different images: {}", images.join(", ")), self.wait()));
        }
        checks
    }

    fn webhooks(
        &self,
        kind: WebhookKind,
        found: &Result<WebhookConfiguration, Failure>,
        now: Timestamp,
    ) -> Vec<Check> {
        let (name, kind_name) = (&self.instance.keys.instance, kind.as_str());
        let what = format!("{kind_name} {name}");
        let configuration = match found {
            Ok(configuration) => configuration,
            Err(Failure::NotFound) => {
                return vec![bad(
                    format!("{what} does not exist: the API server {}", kind.without_it()),
                    APPLY,
                )];
            }
            Err(failure) => return vec![unknown(format!("{what} cannot be read: {failure}"))],
        };
        let remove = format!("remove it: kubectl edit {} {name}", kind_name.to_lowercase());
        let foreign =
            |entry| warning(format!("{what} has the entry {entry}, which is not Lockstep's"), &*remove);
        let mut checks: Vec<Check> = configuration.unknown().map(foreign).collect();
        let writer = if self.instance.is_injected_by_cert_manager() {
            "look at the logs of cert-manager, which"
        } else {
            "look at the log of a ready replica, which"
        };
        checks.push(match webhooks::ca_expiry(std::iter::once(configuration)) {
            None => bad(
                format!("a webhook of {what} trusts no CA: the API server cannot call it"),
                format!("{writer} writes it within seconds"),
            ),
            Some(expiry) if expiry <= now => {
                bad(format!("the CA of {what} has expired"), format!("{writer} replaces it"))
            }
            Some(expiry) if expiry.duration_since(now).as_hours() < MIN_CA_DAYS * 24 => warning(
                format!("the CA of {what} expires in {}", age(now, expiry)),
                format!("{writer} replaces it after two thirds of its life"),
            ),
            Some(expiry) => good(format!("{what} trusts a CA for another {}", age(now, expiry))),
        });
        checks
    }

    fn may_install(&self, namespace_is_missing: bool, lacks: Result<Vec<String>, Failure>) -> Check {
        let flag = if namespace_is_missing { " --create-namespace" } else { "" };
        match lacks {
            Err(failure) => unknown(format!("your rights cannot be asked for: {failure}")),
            Ok(lacks) if lacks.is_empty() => good(format!(
                "you may install it: lockstep manifests{flag} | kubectl apply -f -\n    until a replica is ready, nobody \
                 can write sources; wait for it: {}",
                self.wait()
            )),
            Ok(lacks) => bad(format!("you may not install it: {}", lacks.join(", ")), "ask a cluster admin"),
        }
    }

    /// What the answer to a malformed source says about the webhook. Only our own webhooks prove something: any other
    /// refusal came before the webhook was asked, or from somebody else.
    fn webhook(&self, user: &User, probe: &Result<Option<Status>, Failure>) -> Check {
        let untried = |why: &str| {
            unknown(format!(
                "the webhook cannot be tried in namespace {}: {why}; -n chooses another",
                self.namespace
            ))
        };
        let status = match probe {
            Ok(Some(status)) => status,
            Ok(None) if self.is_exempt(user) => {
                return unknown(format!(
                    "you ({}) are exempt, so the webhook cannot be tried as you: try as another user",
                    user.name
                ));
            }
            Ok(None) => {
                return bad(
                    format!("the webhook let {} write a malformed source", user.name),
                    "check the webhook configurations above; an exempt user is not restricted: try as another",
                );
            }
            Err(failure) => return untried(&failure.to_string()),
        };
        match RefusingWebhook::of(status).filter(|webhook| webhook.is_of(&self.instance.keys.instance)) {
            Some(RefusingWebhook { denial: Some(_), .. }) => {
                good("the webhook answers: it refused a malformed source, as it must (nothing was stored)")
            }
            Some(RefusingWebhook { denial: None, .. }) => bad(
                format!("the API server cannot reach the webhook: {}", Failure::from(status.clone())),
                format!("{}; {}", self.wait(), self.logs()),
            ),
            None => untried(&shorten(status.message.lines().next().unwrap_or_default(), MAX_QUOTED_CHARS)),
        }
    }

    fn is_exempt(&self, user: &User) -> bool {
        let account = format!("system:serviceaccount:{}:lockstep", self.instance.namespace);
        self.instance.settings().exempt().contain(user)
            || user.is_kubernetes_cleanup()
            || user.name == account
    }

    /// Tools that write what tenants ask for, and that the webhook takes for users like any other.
    fn deputy(&self, Tool { name, user }: &Tool) -> Check {
        if self.instance.settings().deputies().contain(user) {
            return good(format!("{name} ({}) is a deputy", user.name));
        }
        let when = if self.instance.is_absent() { " when you install it" } else { "" };
        let user = &user.name;
        warning(
            format!("{name} writes on behalf of others, and its own rights count: {user} is no deputy"),
            format!("if tenants choose what it writes, add --deputy-user={user}{when}"),
        )
    }
}

/// Whether the ServiceAccount has the rights that the manifests give it.
fn service_account(account: &str, lacks: Result<Vec<String>, Failure>) -> Check {
    match lacks {
        Err(Failure::Forbidden(_)) => {
            unknown("you may not ask for the rights of the ServiceAccount (create subjectaccessreviews)")
        }
        Err(failure) => unknown(format!("the rights of the ServiceAccount cannot be asked for: {failure}")),
        Ok(lacks) if lacks.is_empty() => good(format!("{account} has all its rights")),
        Ok(lacks) => bad(format!("{account} lacks rights: {}", lacks.join(", ")), APPLY),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use lockstep_core::keys::Keys;

    /// What is said about the webhook, given the answer to a malformed source by a user who is exempt or not.
    fn judge(probe: Option<(u16, &str)>, is_exempt: bool) -> Check {
        let absent = || Failure::NotFound;
        let instance = Instance {
            domain: "d.test".to_owned(),
            namespace: "own".to_owned(),
            keys: Keys::new("d.test", ""),
            lease: Err(absent()),
            webhooks: Vec::new(),
            replicas: Err(absent()),
        };
        let account = "system:serviceaccount:own:lockstep".to_owned();
        let name = if is_exempt { account.clone() } else { "ann".to_owned() };
        let user = User { name, ..User::default() };
        let status =
            |(code, message)| serde_json::from_value(json!({"code": code, "message": message})).unwrap();
        let probe = Ok(probe.map(status));
        Checked { instance: &instance, namespace: "home" }.webhook(&user, &probe)
    }

    #[test]
    fn only_refusals_by_webhooks_of_this_instance_say_something_about_the_webhook() {
        use Level::{Bad, Good, Unknown};
        let denied = |webhook: &str| format!("admission webhook \"{webhook}\" denied the request: no");
        let unreachable = |webhook: &str| {
            format!(
                "Internal error occurred: failed calling webhook \"{webhook}\": failed to call webhook: Post \
                 \"https://x\": dial tcp: connect: connection refused"
            )
        };
        let policy =
            "configmaps \"x\" is forbidden: ValidatingAdmissionPolicy 'team-label' denied request: no";
        for (code, message, level, text) in [
            (403, denied("sources.lockstep.d.test"), Good, "the webhook answers"),
            (500, unreachable("sources.lockstep.d.test"), Bad, "cannot reach the webhook"),
            // Another instance, and other tools.
            (500, unreachable("sources.lockstep.other"), Unknown, "\"sources.lockstep.other\""),
            (500, unreachable("sources.my-lockstep.d.test"), Unknown, "cannot be tried in namespace home"),
            (403, denied("sources.lockstep.other"), Unknown, "\"sources.lockstep.other\" denied"),
            (400, denied("validate.kyverno.svc-fail"), Unknown, "\"validate.kyverno.svc-fail\" denied"),
            (422, policy.to_owned(), Unknown, "'team-label' denied"),
            (404, "namespaces \"home\" not found".to_owned(), Unknown, "not found; -n chooses another"),
        ] {
            let check = judge(Some((code, &message)), false);
            assert_eq!(check.level, level, "{message}: {}", check.text);
            assert!(check.text.contains(text), "{message}: {}", check.text);
            assert_eq!(judge(Some((code, &message)), true), check, "a refusal is one for exempt users, too");
        }
    }

    #[test]
    fn write_that_is_let_through_is_bad_unless_the_user_is_exempt() {
        assert_eq!(judge(None, false).level, Level::Bad);
        let exempt = judge(None, true);
        assert_eq!(exempt.level, Level::Unknown);
        assert!(exempt.text.contains(":lockstep) are exempt"), "{}", exempt.text);
    }
}
