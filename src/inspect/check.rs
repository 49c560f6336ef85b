//! Whether Lockstep can be installed, or works once it is: each answer with what to do about it.

use futures::{StreamExt, stream};
use k8s_openapi::{
    api::{
        authorization::v1::{
            ResourceAttributes, SelfSubjectAccessReview, SelfSubjectAccessReviewSpec, SubjectAccessReview,
            SubjectAccessReviewSpec,
        },
        core::v1::{ConfigMap, ServiceAccount},
    },
    jiff::Timestamp,
};
use kube::{
    Api, Client,
    api::{ListParams, ObjectMeta, PostParams},
};

use super::instance::{Instance, age, read_configuration};
use crate::{
    certs::webhooks::{WebhookConfiguration, WebhookKind},
    client::{Failure, REQUEST_TIMEOUT, user_info, with_timeout},
    keys::Keys,
};

/// The oldest version of Kubernetes that is supported: `MINOR` of 1.MINOR.
pub const MIN_MINOR: u32 = 30;
/// Fewer days than this until the CA expires are worth a warning: it is replaced long before.
const MIN_CA_DAYS: i64 = 30;
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
    /// Nothing to be told about: what it is about is not there, or this person may not see it.
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

/// What is checked, and with what.
pub struct Checker<'a> {
    pub client: &'a Client,
    pub instance: &'a Instance,
    /// What the ServiceAccount needs.
    pub permissions: Vec<Permission>,
    /// What a person who installs Lockstep must be allowed to do.
    pub to_install: Vec<Permission>,
    /// Where the guard is tried: somewhere the person may create ConfigMaps.
    pub namespace: &'a str,
    pub now: Timestamp,
}

impl Checker<'_> {
    pub async fn run(&self) -> Vec<Check> {
        let (validating, mutating) = tokio::join!(
            self.configuration(WebhookKind::Validating),
            self.configuration(WebhookKind::Mutating)
        );
        let mut checks = vec![self.server_version().await];
        if self.is_absent(&validating, &mutating) {
            checks.push(Check::unknown(format!(
                "Lockstep is not installed: there is no Lease, no webhook configuration and no pod in {}",
                self.instance.name.namespace
            )));
            checks.push(self.may_install().await);
            checks.extend(self.deputies(false).await);
            return checks;
        }
        checks.extend(self.leftovers(&validating, &mutating));
        checks.push(self.leader());
        checks.extend(self.replicas());
        checks.extend(self.webhooks(WebhookKind::Validating, &validating));
        checks.extend(self.webhooks(WebhookKind::Mutating, &mutating));
        checks.push(self.service_account().await);
        checks.push(self.guard().await);
        checks.extend(self.deputies(true).await);
        checks
    }

    fn instance_name(&self) -> String {
        Keys::new(&self.instance.name.domain, "").instance
    }

    async fn configuration(&self, kind: WebhookKind) -> Result<WebhookConfiguration, Failure> {
        read_configuration(self.client, kind, &self.instance_name()).await
    }

    async fn server_version(&self) -> Check {
        let version = match tokio::time::timeout(REQUEST_TIMEOUT, self.client.apiserver_version()).await {
            Ok(Ok(version)) => version,
            Ok(Err(error)) => {
                return Check::unknown(format!(
                    "the version of Kubernetes cannot be read: {}",
                    Failure::from(error)
                ));
            }
            Err(_) => return Check::unknown("the API server does not say its version"),
        };
        let minor: u32 =
            version.minor.trim_end_matches(|char: char| !char.is_ascii_digit()).parse().unwrap_or_default();
        let text = format!("Kubernetes {}", version.git_version);
        match version.major.as_str() == "1" && minor < MIN_MINOR {
            true => Check::bad(text, format!("Lockstep needs Kubernetes 1.{MIN_MINOR} or newer")),
            false => Check::good(text),
        }
    }

    fn is_absent(
        &self,
        validating: &Result<WebhookConfiguration, Failure>,
        mutating: &Result<WebhookConfiguration, Failure>,
    ) -> bool {
        let no_pods = self.instance.replicas.as_ref().is_ok_and(Vec::is_empty);
        matches!(self.instance.lease, Err(Failure::NotFound))
            && no_pods
            && [validating, mutating].iter().all(|one| matches!(one, Err(Failure::NotFound)))
    }

    /// Parts that are left when others are gone.
    fn leftovers(
        &self,
        validating: &Result<WebhookConfiguration, Failure>,
        mutating: &Result<WebhookConfiguration, Failure>,
    ) -> Option<Check> {
        let nobody = self.instance.replicas.as_ref().is_ok_and(Vec::is_empty)
            && !self.instance.lease.as_ref().is_ok_and(|lease| lease.leader.is_some());
        let configured = [validating, mutating].iter().any(|one| one.is_ok());
        (nobody && configured).then(|| {
            let name = self.instance_name();
            Check::bad(
                "webhook configurations are left, and no replica answers: nobody can write sources and companions",
                format!(
                    "start Lockstep, or remove the rest: kubectl delete \
                     validatingwebhookconfiguration,mutatingwebhookconfiguration {name}"
                ),
            )
        })
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
                            format!(
                                "{leader} leads, of version {version}; this command is of version {ours}"
                            ),
                            "use the command of the same version: it judges by the rules of its own",
                        ),
                        Some(version) => Check::good(format!("{leader} leads, of version {version}")),
                        None => Check::warning(
                            format!("{leader} leads, of an earlier version"),
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
                format!("kubectl -n {} get pods; or check --lockstep-namespace and --domain", name.namespace),
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
            (0, _) => Check::bad(text, logs),
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
                format!("kubectl -n {namespace} rollout status deployment lockstep"),
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
        checks.push(match configuration.ca_expiry() {
            None => Check::bad(
                format!("{what} trusts no CA: every write of a source or companion fails"),
                "a ready replica writes it within seconds: look at its log",
            ),
            Some(expiry) if expiry <= self.now => Check::bad(
                format!("the CA of {what} has expired"),
                "a ready replica replaces it: look at its log",
            ),
            Some(expiry) if expiry.duration_since(self.now).as_hours() < MIN_CA_DAYS * 24 => Check::warning(
                format!("the CA of {what} expires in {}", age(self.now, expiry)),
                "it is replaced after two thirds of its life: look at the log of the replicas",
            ),
            Some(expiry) => Check::good(format!("{what} trusts a CA for another {}", age(self.now, expiry))),
        });
        checks
    }

    /// Whether the ServiceAccount has the rights that the manifests give it.
    async fn service_account(&self) -> Check {
        let namespace = &self.instance.name.namespace;
        let account = format!("system:serviceaccount:{namespace}:lockstep");
        let groups = [
            "system:serviceaccounts".to_owned(),
            format!("system:serviceaccounts:{namespace}"),
            "system:authenticated".to_owned(),
        ];
        let reviews = Api::<SubjectAccessReview>::all(self.client.clone());
        let ask = |permission: &Permission| {
            let spec = SubjectAccessReviewSpec {
                user: Some(account.clone()),
                groups: Some(groups.to_vec()),
                resource_attributes: Some(permission.attributes()),
                ..SubjectAccessReviewSpec::default()
            };
            let review = SubjectAccessReview { spec, ..SubjectAccessReview::default() };
            let (reviews, text) = (reviews.clone(), permission.to_string());
            async move {
                let answer =
                    with_timeout(REQUEST_TIMEOUT, reviews.create(&PostParams::default(), &review)).await?;
                Ok((text, answer.status.is_some_and(|status| status.allowed)))
            }
        };
        match missing(self.permissions.iter().map(ask)).await {
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
        let reviews = Api::<SelfSubjectAccessReview>::all(self.client.clone());
        let ask = |permission: &Permission| {
            let resource_attributes = Some(permission.attributes());
            let spec = SelfSubjectAccessReviewSpec { resource_attributes, non_resource_attributes: None };
            let review = SelfSubjectAccessReview { spec, ..SelfSubjectAccessReview::default() };
            let (reviews, text) = (reviews.clone(), permission.to_string());
            async move {
                let answer =
                    with_timeout(REQUEST_TIMEOUT, reviews.create(&PostParams::default(), &review)).await?;
                Ok((text, answer.status.is_some_and(|status| status.allowed)))
            }
        };
        match missing(self.to_install.iter().map(ask)).await {
            Err(failure) => Check::unknown(format!("your rights cannot be asked for: {failure}")),
            Ok(missing) if missing.is_empty() => {
                Check::good("you may install it: lockstep manifests | kubectl apply -f -")
            }
            Ok(missing) => {
                Check::bad(format!("you may not install it: {}", missing.join(", ")), "ask a cluster admin")
            }
        }
    }

    /// Tries a source that the guard must refuse, without storing it. A guard that is down refuses it, too, but with
    /// another code and message.
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
        let logs =
            format!("kubectl -n {} logs -l app.kubernetes.io/name=lockstep", self.instance.name.namespace);
        let answer = tokio::time::timeout(REQUEST_TIMEOUT, configmaps.create(&params, &probe)).await;
        let webhook = format!("admission webhook \"sources.{}\" denied the request", keys.instance);
        match answer {
            Err(_) => Check::bad("a write that the guard must refuse was not answered", logs),
            Ok(Ok(_)) => {
                let who =
                    user_info(self.client).await.ok().and_then(|user| user.username).unwrap_or_default();
                Check::bad(
                    format!("the guard let {who} write a malformed source"),
                    "check the webhook configurations above; an exempt user is not restricted: try as another",
                )
            }
            Ok(Err(kube::Error::Api(status))) => {
                let by_guard = status.code == 403
                    && status.message.contains(&webhook)
                    && status.message.contains("cannot be a source");
                if by_guard {
                    Check::good(
                        "the guard answers: it refused a malformed source, as it must (nothing was stored)",
                    )
                } else if status.code == 403 && !status.message.contains("webhook") {
                    let namespace = self.namespace;
                    Check::unknown(format!(
                        "you may not create ConfigMaps in namespace {namespace}, so the guard cannot be tried: choose another with -n"
                    ))
                } else {
                    let failure = Failure::from(*status);
                    Check::bad(format!("the API server cannot reach the guard: {failure}"), logs)
                }
            }
            Ok(Err(error)) => Check::unknown(format!("the guard cannot be tried: {}", Failure::from(error))),
        }
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

/// Those that are not allowed.
async fn missing<F>(asked: impl Iterator<Item = F>) -> Result<Vec<String>, Failure>
where
    F: Future<Output = Result<(String, bool), Failure>>,
{
    let mut missing = Vec::new();
    let mut answers = stream::iter(asked).buffered(CONCURRENT_REVIEWS);
    while let Some(answer) = answers.next().await {
        let (text, allowed) = answer?;
        missing.extend((!allowed).then_some(text));
    }
    Ok(missing)
}
