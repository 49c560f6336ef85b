//! What `lockstep check` asks the API server.

use futures::future::try_join_all;
use k8s_openapi::apimachinery::pkg::version::Info;
use kube::{
    Client,
    api::{ListParams, PostParams},
    core::{Request, Status},
};
use serde::de::IgnoredAny;
use serde_json::json;

use crate::inspect::{
    instance::Instance,
    pages::read_pages,
    refusal::try_write,
    rights::{Permission, missing},
};
use lockstep_cluster::client::{self, REQUEST_TIMEOUT, user_info, with_timeout};
use lockstep_core::{
    admission::admission_request::User, failure::Failure, keys::Keys, object::NamespaceObject,
};

/// ServiceAccounts of tools that write what tenants ask for, by name.
const DEPUTIES: [(&str, &str); 5] = [
    ("argocd-application-controller", "Argo CD"),
    ("kustomize-controller", "Flux"),
    ("helm-controller", "Flux"),
    ("cert-manager", "cert-manager"),
    ("fleet-agent", "Fleet"),
];

/// The rare ones among the objects that `kubectl apply` of the manifests creates, except for the Namespace.
const TO_INSTALL: [(&str, &str); 5] = [
    ("apps", "deployments"),
    ("rbac.authorization.k8s.io", "clusterroles"),
    ("rbac.authorization.k8s.io", "clusterrolebindings"),
    ("admissionregistration.k8s.io", "validatingwebhookconfigurations"),
    ("admissionregistration.k8s.io", "mutatingwebhookconfigurations"),
];

pub struct Facts<'a> {
    pub instance: &'a Instance,
    /// Where the webhook is tried.
    pub namespace: &'a str,
    pub version: Result<Info, Failure>,
    /// Whether the ValidatingAdmissionPolicy can be read.
    pub policy: Result<(), Failure>,
    /// The known tools that there are.
    pub tools: Result<Vec<Tool>, Failure>,
    pub installed: Installed,
}

pub enum Installed {
    No {
        namespace_is_missing: bool,
        /// The rights that the person lacks who would install it.
        lacks: Result<Vec<String>, Failure>,
    },
    Yes {
        account: String,
        /// The rights that the ServiceAccount lacks.
        lacks: Result<Vec<String>, Failure>,
        /// The person who asks, as far as it is known.
        user: User,
        /// Why a source that the webhook must refuse is refused; none if it is not.
        probe: Result<Option<Status>, Failure>,
    },
}

/// A tool that writes on behalf of others, and its user.
pub struct Tool {
    pub name: &'static str,
    pub user: User,
}

impl<'a> Facts<'a> {
    /// `permissions`: what the ServiceAccount needs.
    pub async fn read(
        client: &Client,
        instance: &'a Instance,
        namespace: &'a str,
        permissions: &[Permission],
    ) -> Self {
        let name = &instance.keys.instance;
        let version = async { client.apiserver_version().await };
        let policies = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies";
        let (version, policy, tools, installed) = tokio::join!(
            with_timeout(REQUEST_TIMEOUT, version),
            client::get::<IgnoredAny>(client, policies, name),
            tools(client),
            Installed::read(client, instance, namespace, permissions),
        );
        Self { instance, namespace, version, policy: policy.map(|_| ()), tools, installed }
    }
}

impl Installed {
    async fn read(client: &Client, instance: &Instance, namespace: &str, permissions: &[Permission]) -> Self {
        let own_namespace = &instance.namespace;
        if instance.is_absent() {
            let found = client::get::<IgnoredAny>(client, "/api/v1/namespaces", own_namespace).await;
            // Otherwise it exists, or the person may not see whether it does: a new one could be labelled by mistake.
            let namespace_is_missing = matches!(found, Err(Failure::NotFound));
            let namespaces = namespace_is_missing.then_some(("", "namespaces"));
            let needed = namespaces.into_iter().chain(TO_INSTALL);
            let needed: Vec<_> =
                needed.map(|(group, resource)| Permission::create(group, resource)).collect();
            return Self::No { namespace_is_missing, lacks: missing(client, None, &needed).await };
        }
        let User { name: account, mut groups, .. } = service_account(own_namespace, "lockstep");
        groups.push("system:authenticated".to_owned());
        let of_account = json!({"user": account, "groups": groups});
        let (lacks, user, probe) = tokio::join!(
            missing(client, Some(of_account), permissions),
            user_info(client),
            try_malformed_source(client, &instance.domain, namespace),
        );
        let user = user.unwrap_or_default();
        let (name, groups) = (user.username.unwrap_or_default(), user.groups.unwrap_or_default());
        Self::Yes { account, lacks, user: User { name, groups, ..User::default() }, probe }
    }
}

/// Why the API server refuses a source that the webhook must refuse. Nothing is stored.
async fn try_malformed_source(
    client: &Client,
    domain: &str,
    namespace: &str,
) -> Result<Option<Status>, Failure> {
    let keys = Keys::new(domain, "");
    let source = json!({"metadata": {
        "generateName": "lockstep-check-",
        "labels": {keys.managed: "true"},
        "annotations": {keys.protect: "check"},
    }});
    let params = PostParams { dry_run: true, ..PostParams::default() };
    let objects = Request::new(format!("/api/v1/namespaces/{namespace}/configmaps"));
    let answer = try_write(client, objects.create(&params, source.to_string().into_bytes())).await?;
    Ok(answer.err())
}

/// The ServiceAccounts of known tools.
async fn tools(client: &Client) -> Result<Vec<Tool>, Failure> {
    let accounts = Request::new("/api/v1/serviceaccounts");
    let found = try_join_all(DEPUTIES.map(async |(account, name)| {
        let named = ListParams::default().fields(&format!("metadata.name={account}"));
        let mut tools = Vec::new();
        let tool =
            |NamespaceObject { metadata }| Tool { name, user: service_account(&metadata.namespace, account) };
        read_pages(client, named, |params| accounts.list_metadata(params), |found| tools.push(tool(found)))
            .await?;
        Ok::<_, Failure>(tools)
    }));
    Ok(found.await?.into_iter().flatten().collect())
}

fn service_account(namespace: &str, name: &str) -> User {
    User {
        name: format!("system:serviceaccount:{namespace}:{name}"),
        groups: vec!["system:serviceaccounts".to_owned(), format!("system:serviceaccounts:{namespace}")],
        ..User::default()
    }
}
