//! What `lockstep check` asks the API server.

use futures::future::try_join_all;
use kube::{
    Client,
    api::{ListParams, PostParams},
    core::{Request, Status},
};
use serde_json::json;

use crate::inspect::{pages::read_pages, refusal::try_write, rights::Right};
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

/// A tool that writes on behalf of others, and its user.
pub struct Tool {
    pub name: &'static str,
    pub user: User,
}

/// What whoever installs Lockstep must be allowed to create.
pub fn to_install(namespace_is_missing: bool) -> Vec<Right> {
    let namespaces = namespace_is_missing.then_some(("", "namespaces"));
    let needed = namespaces.into_iter().chain(TO_INSTALL);
    needed.map(|(group, resource)| Right::create(group, resource)).collect()
}

/// Why the API server refuses a source that the webhook must refuse; none if it does not. Nothing is stored.
pub async fn try_malformed_source(
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
pub async fn tools(client: &Client) -> Result<Vec<Tool>, Failure> {
    let accounts = Request::new("/api/v1/serviceaccounts");
    let found = try_join_all(DEPUTIES.map(async |(account, name)| {
        let named = ListParams::default().fields(&format!("metadata.name={account}"));
        let tool = |NamespaceObject { metadata }| {
            Some(Tool { name, user: service_account(&metadata.namespace, account) })
        };
        read_pages(client, named, |params| accounts.list_metadata(params), tool).await
    }));
    Ok(found.await?.into_iter().flatten().collect())
}

pub fn service_account(namespace: &str, name: &str) -> User {
    User {
        name: format!("system:serviceaccount:{namespace}:{name}"),
        groups: vec!["system:serviceaccounts".to_owned(), format!("system:serviceaccounts:{namespace}")],
        ..User::default()
    }
}
