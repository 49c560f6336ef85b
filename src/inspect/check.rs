//! Whether Lockstep can be installed, or works once it is: each answer with what to do about it.

mod probe;
pub mod version;

use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::{
    api::{
        admissionregistration::v1::ValidatingAdmissionPolicy,
        authorization::v1::{
            ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec, SubjectAccessReview,
            SubjectAccessReviewSpec, SubjectAccessReviewStatus,
        },
        core::v1::{ConfigMap, Namespace, ServiceAccount},
    },
    jiff::Timestamp,
};
use kube::{
    Api, Client, Resource,
    api::{ListParams, ObjectMeta, PostParams},
};
use serde::{Serialize, de::DeserializeOwned};

use self::probe::{Probe, untried};
use super::instance::{Instance, InstanceName, age, read_configuration};
use crate::{
    certs::webhooks::{self, WebhookConfiguration, WebhookKind},
    client::{self, Failure, REQUEST_TIMEOUT, user_info, with_timeout},
    guard::admission_request::User,
    keys::Keys,
};

/// Fewer days than this until the CA expires are worth a warning: it is replaced long before.
const MIN_CA_DAYS: i64 = 30;
/// What `lockstep manifests --cert-manager` adds to the webhook configurations: cert-manager writes their caBundle.
const CERT_MANAGER_ANNOTATION: &str = "cert-manager.io/inject-ca-from";
const CONCURRENT_REVIEWS: usize = 8;

/// ServiceAccounts of tools that write what tenants ask for, by name.
const DEPUTIES: [(&str, &str); 5] = [
    ("argocd-application-controller", "Argo CD"),
    ("kustomize-controller", "Flux"),
    ("helm-controller", "Flux"),
    ("cert-manager", "cert-manager"),
    ("fleet-agent", "Fleet"),
];

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Check {
    pub outcome: Outcome,
    pub text: String,
    pub remedy: Option<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    Good,
    /// Cannot be judged: the object does not exist, or the user may not read it.
    Unknown,
    Warning,
    Bad,
}

impl Outcome {
    #[must_use]
    pub const fn symbol(self) -> &'static str {
        match self {
            Self::Good => "✓",
            Self::Unknown => "?",
            Self::Warning => "!",
            Self::Bad => "✗",
        }
    }
}

impl Check {
    fn good(text: impl Into<String>) -> Self {
        Self { outcome: Outcome::Good, text: text.into(), remedy: None }
    }

    fn unknown(text: impl Into<String>) -> Self {
        Self { outcome: Outcome::Unknown, text: text.into(), remedy: None }
    }

    fn warning(text: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { outcome: Outcome::Warning, text: text.into(), remedy: Some(remedy.into()) }
    }

    fn bad(text: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { outcome: Outcome::Bad, text: text.into(), remedy: Some(remedy.into()) }
    }
}

/// One verb that a role grants.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Permission {
    pub group: String,
    pub resource: String,
    pub verb: String,
    /// None: any name.
    pub name: Option<String>,
    /// None: in all namespaces, or of the cluster.
    pub namespace: Option<String>,
}

impl Permission {
    /// Creating objects of the cluster, or in any namespace.
    #[must_use]
    pub fn create(group: &str, resource: &str) -> Self {
        Self {
            group: group.to_owned(),
            resource: resource.to_owned(),
            verb: "create".to_owned(),
            name: None,
            namespace: None,
        }
    }

    fn attributes(&self) -> ResourceAttributes {
        ResourceAttributes {
            group: Some(self.group.clone()),
            resource: Some(self.resource.clone()),
            verb: Some(self.verb.clone()),
            name: self.name.clone(),
            namespace: self.namespace.clone(),
            ..ResourceAttributes::default()
        }
    }
}

impl std::fmt::Display for Permission {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {}", self.verb, self.resource)?;
        if let Some(name) = &self.name {
            write!(f, " {name}")?;
        }
        match &self.namespace {
            Some(namespace) => write!(f, " in {namespace}"),
            None => Ok(()),
        }
    }
}

/// The webhook configurations, as far as the user may read them.
pub struct Configurations {
    pub validating: Result<WebhookConfiguration, Failure>,
    pub mutating: Result<WebhookConfiguration, Failure>,
}

impl Configurations {
    pub async fn read(client: &Client, name: &InstanceName) -> Self {
        let instance = Keys::new(&name.domain, "").instance;
        let (validating, mutating) = tokio::join!(
            read_configuration(client, WebhookKind::Validating, &instance),
            read_configuration(client, WebhookKind::Mutating, &instance)
        );
        Self { validating, mutating }
    }

    fn each(&self) -> [(WebhookKind, &Result<WebhookConfiguration, Failure>); 2] {
        [(WebhookKind::Validating, &self.validating), (WebhookKind::Mutating, &self.mutating)]
    }

    /// Whether cert-manager manages the guard's certificate: Lockstep then has no rights on its CA.
    #[must_use]
    pub fn are_injected_by_cert_manager(&self) -> bool {
        self.each().iter().any(|(_, found)| {
            found.as_ref().is_ok_and(|one| one.metadata.annotations.contains_key(CERT_MANAGER_ANNOTATION))
        })
    }
}

/// What is checked, and with what.
pub struct Checker<'a> {
    pub client: &'a Client,
    pub instance: &'a Instance,
    pub configurations: Configurations,
    /// What the ServiceAccount needs.
    pub permissions: Vec<Permission>,
    /// What a person who installs Lockstep into an existing namespace must be allowed to do.
    pub to_install: Vec<Permission>,
    /// Where the guard is tried: somewhere the person may create ConfigMaps.
    pub namespace: &'a str,
    pub now: Timestamp,
}

impl Checker<'_> {
    pub async fn run(&self) -> Vec<Check> {
        let mut checks = vec![self.server_version().await];
        if self.is_absent() {
            checks.push(Check::unknown(format!(
                "Lockstep is not installed: there is no Lease, no webhook configuration and no pod in {}",
                self.instance.name.namespace
            )));
            checks.extend(self.leftovers().await);
            checks.push(self.may_install().await);
            checks.extend(self.deputies(false).await);
            return checks;
        }
        checks.extend(self.leftovers().await);
        checks.push(self.leader());
        checks.extend(self.replicas());
        for (kind, found) in self.configurations.each() {
            checks.extend(self.webhooks(kind, found));
        }
        checks.push(self.service_account().await);
        checks.push(self.guard().await);
        checks.extend(self.deputies(true).await);
        checks
    }

    fn instance_name(&self) -> String {
        Keys::new(&self.instance.name.domain, "").instance
    }

    /// The command that ends when every replica is ready.
    fn wait_command(&self) -> String {
        format!("kubectl -n {} rollout status deployment lockstep", self.instance.name.namespace)
    }

    fn service_account_name(&self) -> String {
        format!("system:serviceaccount:{}:lockstep", self.instance.name.namespace)
    }

    async fn server_version(&self) -> Check {
        match tokio::time::timeout(REQUEST_TIMEOUT, self.client.apiserver_version()).await {
            Ok(Ok(found)) => version::judge(&found),
            Ok(Err(error)) => Check::unknown(format!(
                "the version of Kubernetes cannot be read: {}",
                client::failure(error)
            )),
            Err(_) => Check::unknown("the API server does not say its version"),
        }
    }

    fn is_absent(&self) -> bool {
        let no_pods = self.instance.replicas.as_ref().is_ok_and(Vec::is_empty);
        matches!(self.instance.lease, Err(Failure::NotFound))
            && no_pods
            && self.configurations.each().iter().all(|(_, found)| matches!(found, Err(Failure::NotFound)))
    }

    /// Parts that are left when no replica runs.
    async fn leftovers(&self) -> Vec<Check> {
        let is_leaderless = match &self.instance.lease {
            Ok(lease) => lease.leader.is_none(),
            Err(failure) => *failure == Failure::NotFound,
        };
        if !is_leaderless || !self.instance.replicas.as_ref().is_ok_and(Vec::is_empty) {
            return Vec::new();
        }
        let name = self.instance_name();
        let mut checks = Vec::new();
        if self.configurations.each().iter().any(|(_, found)| found.is_ok()) {
            checks.push(Check::bad(
                "webhook configurations are left, and no replica answers: nobody can write sources and companions",
                format!(
                    "start Lockstep, if you have just installed it wait ({}), or remove the rest: kubectl delete \
                     validatingwebhookconfiguration,mutatingwebhookconfiguration {name}",
                    self.wait_command()
                ),
            ));
        }
        let policies = Api::<ValidatingAdmissionPolicy>::all(self.client.clone());
        match with_timeout(REQUEST_TIMEOUT, policies.get_metadata(&name)).await {
            Ok(_) => checks.push(Check::bad(
                format!(
                    "ValidatingAdmissionPolicy {name} is left, and no replica runs: it refuses edits and deletes of \
                     companions"
                ),
                format!(
                    "start Lockstep, or remove the policy: kubectl delete \
                     validatingadmissionpolicybinding,validatingadmissionpolicy {name}"
                ),
            )),
            Err(Failure::NotFound) => {}
            Err(failure) => checks
                .push(Check::unknown(format!("ValidatingAdmissionPolicy {name} cannot be read: {failure}"))),
        }
        checks
    }

    fn leader(&self) -> Check {
        let name = &self.instance.name;
        match &self.instance.lease {
            Ok(lease) => match (&lease.leader, lease.renewed) {
                (Some(leader), _) => {
                    let version = lease.settings.as_ref().map(|settings| settings.version.as_str());
                    let ours = env!("CARGO_PKG_VERSION");
                    match version {
                        Some(version) if version != ours => Check::warning(
                            format!("leader {leader}, version {version}; this binary is version {ours}"),
                            format!("use the same version: this binary applies the rules of version {ours}"),
                        ),
                        Some(version) => Check::good(format!("leader {leader}, version {version}")),
                        None => Check::warning(
                            format!("leader {leader}, of an earlier version"),
                            "upgrade Lockstep: it does not publish its settings",
                        ),
                    }
                }
                (None, renewed) => {
                    let since = renewed.map(|renewed| format!(" for {}", age(renewed, self.now)));
                    Check::bad(
                        format!("no replica has led{}: nothing is mirrored", since.unwrap_or_default()),
                        format!("kubectl -n {} logs -l app.kubernetes.io/name=lockstep", name.namespace),
                    )
                }
            },
            Err(Failure::NotFound) => Check::bad(
                format!("there is no Lease in {}: no replica has ever led", name.namespace),
                format!(
                    "if you have just installed it, wait: {}; otherwise check --lockstep-namespace and --domain",
                    self.wait_command()
                ),
            ),
            Err(failure) => Check::unknown(format!("the Lease cannot be read: {failure}")),
        }
    }

    fn replicas(&self) -> Vec<Check> {
        let namespace = &self.instance.name.namespace;
        let replicas = match &self.instance.replicas {
            Err(failure) => {
                return vec![Check::unknown(format!("the pods in {namespace} cannot be listed: {failure}"))];
            }
            Ok(replicas) if replicas.is_empty() => {
                return vec![Check::unknown(format!(
                    "there are no pods in {namespace}: Lockstep runs elsewhere, or not at all"
                ))];
            }
            Ok(replicas) => replicas,
        };
        let ready = replicas.iter().filter(|replica| replica.ready).count();
        let text = format!("{ready} of {} replicas are ready", replicas.len());
        let logs = format!(
            "kubectl -n {namespace} describe pods; kubectl -n {namespace} logs -l app.kubernetes.io/name=lockstep"
        );
        let mut checks = vec![match (ready, replicas.len()) {
            (0, _) => Check::bad(
                format!("{text}: nobody can write sources and companions until one is"),
                format!("{}; if it does not end: {logs}", self.wait_command()),
            ),
            (1, 1) => Check::warning(text, "run two, so that writes go on while one is replaced"),
            (ready, all) if ready < all => Check::warning(text, logs),
            _ => Check::good(text),
        }];
        let mut images: Vec<&str> = replicas.iter().map(|replica| replica.image.as_str()).collect();
        images.sort_unstable();
        images.dedup();
        if images.len() > 1 {
            checks.push(Check::warning(
                format!("replicas run different images: {}", images.join(", ")),
                self.wait_command(),
            ));
        }
        checks
    }

    fn webhooks(&self, kind: WebhookKind, found: &Result<WebhookConfiguration, Failure>) -> Vec<Check> {
        let name = self.instance_name();
        let what = format!("{} {name}", kind.as_str());
        let configuration = match found {
            Ok(configuration) => configuration,
            Err(Failure::NotFound) => {
                return vec![Check::bad(
                    format!("{what} does not exist: the API server {}", kind.without_it()),
                    "lockstep manifests | kubectl apply -f - (with the flags of your installation)",
                )];
            }
            Err(failure) => return vec![Check::unknown(format!("{what} cannot be read: {failure}"))],
        };
        let mut checks: Vec<Check> = configuration
            .unknown()
            .map(|entry| {
                Check::warning(
                    format!("{what} has the entry {entry}, which is not Lockstep's"),
                    format!("remove it: kubectl edit {} {name}", kind.as_str().to_lowercase()),
                )
            })
            .collect();
        let writer = match self.configurations.are_injected_by_cert_manager() {
            true => "look at the logs of cert-manager, which",
            false => "look at the log of a ready replica, which",
        };
        checks.push(match webhooks::ca_expiry(std::iter::once(configuration)) {
            None => Check::bad(
                format!("a webhook of {what} trusts no CA: the API server cannot call it"),
                format!("{writer} writes it within seconds"),
            ),
            Some(expiry) if expiry <= self.now => {
                Check::bad(format!("the CA of {what} has expired"), format!("{writer} replaces it"))
            }
            Some(expiry) if expiry.duration_since(self.now).as_hours() < MIN_CA_DAYS * 24 => Check::warning(
                format!("the CA of {what} expires in {}", age(self.now, expiry)),
                format!("{writer} replaces it after two thirds of its life"),
            ),
            Some(expiry) => Check::good(format!("{what} trusts a CA for another {}", age(self.now, expiry))),
        });
        checks
    }

    /// Whether the ServiceAccount has the rights that the manifests give it.
    async fn service_account(&self) -> Check {
        let namespace = &self.instance.name.namespace;
        let account = self.service_account_name();
        let groups = [
            "system:serviceaccounts".to_owned(),
            format!("system:serviceaccounts:{namespace}"),
            "system:authenticated".to_owned(),
        ];
        let review = |attributes| SubjectAccessReview {
            spec: SubjectAccessReviewSpec {
                user: Some(account.clone()),
                groups: Some(groups.to_vec()),
                resource_attributes: Some(attributes),
                ..SubjectAccessReviewSpec::default()
            },
            ..SubjectAccessReview::default()
        };
        match missing(self.client, &self.permissions, review, |review| review.status).await {
            Err(Failure::Forbidden(_)) => Check::unknown(
                "you may not ask for the rights of the ServiceAccount (create subjectaccessreviews)",
            ),
            Err(failure) => {
                Check::unknown(format!("the rights of the ServiceAccount cannot be asked for: {failure}"))
            }
            Ok(missing) if missing.is_empty() => Check::good(format!("{account} has all its rights")),
            Ok(missing) => Check::bad(
                format!("{account} lacks rights: {}", missing.join(", ")),
                "lockstep manifests | kubectl apply -f - (with the flags of your installation)",
            ),
        }
    }

    async fn may_install(&self) -> Check {
        let review = |attributes| SelfSubjectAccessReview {
            spec: SelfSubjectAccessReviewSpec {
                resource_attributes: Some(attributes),
                non_resource_attributes: None,
            },
            ..SelfSubjectAccessReview::default()
        };
        let namespaces = Api::<Namespace>::all(self.client.clone());
        let found =
            with_timeout(REQUEST_TIMEOUT, namespaces.get_metadata(&self.instance.name.namespace)).await;
        let mut to_install = self.to_install.clone();
        let flag = match found {
            Err(Failure::NotFound) => {
                to_install.insert(0, Permission::create("", "namespaces"));
                " --create-namespace"
            }
            // It exists, or the person may not see whether it does: then the flag could label somebody's namespace.
            _ => "",
        };
        match missing(self.client, &to_install, review, |review| review.status).await {
            Err(failure) => Check::unknown(format!("your rights cannot be asked for: {failure}")),
            Ok(missing) if missing.is_empty() => Check::good(format!(
                "you may install it: lockstep manifests{flag} | kubectl apply -f -\n    until a replica is ready, nobody \
                 can write sources; wait for it: {}",
                self.wait_command()
            )),
            Ok(missing) => {
                Check::bad(format!("you may not install it: {}", missing.join(", ")), "ask a cluster admin")
            }
        }
    }

    /// Tries a source that the guard must refuse, without storing it.
    async fn guard(&self) -> Check {
        let keys = Keys::new(&self.instance.name.domain, "");
        let probe = ConfigMap {
            metadata: ObjectMeta {
                generate_name: Some("lockstep-check-".to_owned()),
                labels: Some([(keys.managed.clone(), "true".to_owned())].into()),
                annotations: Some([(keys.protect.clone(), "check".to_owned())].into()),
                ..ObjectMeta::default()
            },
            ..ConfigMap::default()
        };
        let configmaps = Api::<ConfigMap>::namespaced(self.client.clone(), self.namespace);
        let params = PostParams { dry_run: true, ..PostParams::default() };
        let logs = format!(
            "{}; kubectl -n {} logs -l app.kubernetes.io/name=lockstep",
            self.wait_command(),
            self.instance.name.namespace
        );
        let (answer, user) = tokio::join!(
            tokio::time::timeout(REQUEST_TIMEOUT, configmaps.create(&params, &probe)),
            user_info(self.client)
        );
        let refusal = match answer {
            Err(_) => return untried(&format!("the API server did not answer within {REQUEST_TIMEOUT:?}")),
            Ok(Ok(_)) => None,
            Ok(Err(kube::Error::Api(status))) => Some(status),
            Ok(Err(error)) => return untried(&client::failure(error).to_string()),
        };
        let user = user.unwrap_or_default();
        let user = User {
            name: user.username.unwrap_or_default(),
            groups: user.groups.unwrap_or_default(),
            ..User::default()
        };
        let rules = self.instance.settings().rules(&self.instance.scope());
        let probe = Probe {
            instance: &keys.instance,
            namespace: self.namespace,
            user: &user.name,
            is_exempt: rules.exempt.contain(&user)
                || user.is_kubernetes_cleanup()
                || user.name == self.service_account_name(),
            logs: &logs,
        };
        probe.judge(refusal.as_deref())
    }

    /// Tools that write what tenants ask for, and that the guard takes for users like any other.
    async fn deputies(&self, installed: bool) -> Vec<Check> {
        let accounts = Api::<ServiceAccount>::all(self.client.clone());
        let settings = self.instance.settings();
        let mut checks = Vec::new();
        for (name, tool) in DEPUTIES {
            let params = ListParams::default().fields(&format!("metadata.name={name}"));
            let found = match with_timeout(REQUEST_TIMEOUT, accounts.list(&params)).await {
                Ok(found) => found.items,
                Err(failure) => {
                    checks.push(Check::unknown(format!(
                        "ServiceAccounts of known tools cannot be listed: {failure}"
                    )));
                    break;
                }
            };
            for account in found {
                let namespace = account.metadata.namespace.unwrap_or_default();
                let user = format!("system:serviceaccount:{namespace}:{name}");
                let groups =
                    [format!("system:serviceaccounts:{namespace}"), "system:serviceaccounts".to_owned()];
                let listed = settings.deputy_users.contains(&user)
                    || groups.iter().any(|group| settings.deputy_groups.contains(group));
                checks.push(if listed {
                    Check::good(format!("{tool} ({user}) is a deputy"))
                } else {
                    let when = if installed { "" } else { " when you install it" };
                    Check::warning(
                        format!(
                            "{tool} writes on behalf of others, and its own rights count: {user} is no deputy"
                        ),
                        format!("if tenants choose what it writes, add --deputy-user={user}{when}"),
                    )
                });
            }
        }
        checks
    }
}

/// The permissions that the API server does not allow: `review` asks for one, `status` is the answer.
async fn missing<R>(
    client: &Client,
    permissions: &[Permission],
    review: impl Fn(ResourceAttributes) -> R,
    status: impl Fn(R) -> Option<SubjectAccessReviewStatus>,
) -> Result<Vec<String>, Failure>
where
    R: Resource<DynamicType = ()> + Clone + std::fmt::Debug + Serialize + DeserializeOwned,
{
    let (reviews, params) = (Api::<R>::all(client.clone()), PostParams::default());
    let ask = async |permission: &Permission| {
        let review = review(permission.attributes());
        let answer = with_timeout(REQUEST_TIMEOUT, reviews.create(&params, &review)).await?;
        let allowed = status(answer).is_some_and(|status| status.allowed);
        Ok::<_, Failure>((!allowed).then(|| permission.to_string()))
    };
    let answers = stream::iter(permissions).map(ask).buffered(CONCURRENT_REVIEWS);
    let denied: Vec<Option<String>> = answers.try_collect().await?;
    Ok(denied.into_iter().flatten().collect())
}
