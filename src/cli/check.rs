//! `lockstep check`: whether Lockstep can be installed, or works once it is.

use std::process::ExitCode;

use clap::Args;
use k8s_openapi::jiff::Timestamp;
use serde_json::Value;

use super::{
    connection::{Connected, Connection},
    manifests,
    output::print,
};
use crate::{
    config,
    inspect::check::{Check as Answer, Checker, Outcome, Permission},
    object::Kind,
};

#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Before an installation it says whether the cluster and your rights suffice; after one, whether everything works.
To see whether the guard answers, it tries to create a malformed source, as a dry run: nothing is stored.
Exit codes: 0 all is well, warnings included; 1 something is not.")]
pub struct Check {
    /// Where the guard is tried: you must be allowed to create ConfigMaps there [default: that of the kubeconfig]
    #[arg(short, long, value_parser = config::namespace)]
    pub namespace: Option<String>,

    #[command(flatten)]
    pub connection: Connection,
}

pub async fn run(settings: &Check) -> anyhow::Result<ExitCode> {
    let connected = settings.connection.open().await?;
    let checker = Checker {
        client: &connected.client,
        instance: &connected.instance,
        permissions: permissions(&connected)?,
        to_install: to_install(),
        namespace: settings.namespace.as_ref().unwrap_or(&connected.namespace),
        now: Timestamp::now(),
    };
    let answers = checker.run().await;
    print(&answers.iter().map(describe).collect::<String>())?;
    let worst = answers.iter().map(|answer| answer.outcome).max();
    Ok(if worst == Some(Outcome::Bad) { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn describe(answer: &Answer) -> String {
    let remedy = answer.remedy.as_ref().map(|remedy| format!("    {remedy}\n")).unwrap_or_default();
    format!("{} {}\n{remedy}", answer.outcome.symbol(), answer.text)
}

/// What the roles in the manifests of this installation grant.
fn permissions(connected: &Connected) -> anyhow::Result<Vec<Permission>> {
    let name = &connected.instance.name;
    let secrets = connected.instance.settings().kinds.iter().any(|kind| kind == Kind::Secret.plural());
    // Whether Secrets are mirrored is not known without the Lease.
    let secrets = secrets && connected.instance.lease.is_ok();
    let documents: Vec<Value> =
        serde_saphyr::from_multiple(&manifests::rbac(&name.domain, &name.namespace, secrets))?;
    Ok(documents.iter().flat_map(granted).collect())
}

fn granted(role: &Value) -> Vec<Permission> {
    let namespace = match role["kind"].as_str() {
        Some("ClusterRole") => None,
        Some("Role") => role["metadata"]["namespace"].as_str().map(str::to_owned),
        _ => return Vec::new(),
    };
    // What people may do is another role.
    if role["metadata"]["labels"]["rbac.authorization.k8s.io/aggregate-to-view"].is_string() {
        return Vec::new();
    }
    let texts = |value: &Value| -> Vec<String> {
        let list = value.as_array().into_iter().flatten();
        list.filter_map(Value::as_str).map(str::to_owned).collect()
    };
    let mut granted = Vec::new();
    for rule in role["rules"].as_array().into_iter().flatten() {
        let mut names: Vec<Option<String>> = texts(&rule["resourceNames"]).into_iter().map(Some).collect();
        if names.is_empty() {
            names.push(None);
        }
        for group in texts(&rule["apiGroups"]) {
            for resource in texts(&rule["resources"]) {
                for verb in texts(&rule["verbs"]) {
                    granted.extend(names.iter().map(|name| Permission {
                        group: group.clone(),
                        resource: resource.clone(),
                        verb: verb.clone(),
                        name: name.clone(),
                        namespace: namespace.clone(),
                    }));
                }
            }
        }
    }
    granted
}

/// The rights that are rare among those that `kubectl apply` of the manifests needs.
fn to_install() -> Vec<Permission> {
    let create = |group: &str, resource: &str| Permission {
        group: group.to_owned(),
        resource: resource.to_owned(),
        verb: "create".to_owned(),
        name: None,
        namespace: None,
    };
    vec![
        create("", "namespaces"),
        create("apps", "deployments"),
        create("rbac.authorization.k8s.io", "clusterroles"),
        create("rbac.authorization.k8s.io", "clusterrolebindings"),
        create("admissionregistration.k8s.io", "validatingwebhookconfigurations"),
        create("admissionregistration.k8s.io", "mutatingwebhookconfigurations"),
    ]
}
