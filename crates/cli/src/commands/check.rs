//! `lockstep check`: whether Lockstep can be installed, or works once it is.

use std::process::ExitCode;

use clap::Args;
use k8s_openapi::jiff::Timestamp;
use serde::Deserialize;

use super::{
    connection::{Connected, Connection},
    output::print,
};
use crate::{
    inspect::{
        check::{Check as Answer, Checked, Level},
        rights::Right,
    },
    program::{Installation, Program},
};
use lockstep_core::{
    keys,
    object::{Kind, Meta},
};

#[derive(Debug, Args)]
#[command(after_help = "\
Before an installation it says whether the cluster and your rights suffice; after one, whether everything works.
To see whether the webhook answers, it tries to create a malformed source, as a dry run: nothing is stored.
Exit codes: 0 all is well, warnings included; 1 something is not.")]
pub struct CheckArgs {
    /// Where the webhook is tried: you must be allowed to create ConfigMaps there [default: that of the kubeconfig]
    #[arg(short, long, value_parser = keys::namespace)]
    pub namespace: Option<String>,

    #[command(flatten)]
    pub connection: Connection,
}

pub async fn run(settings: &CheckArgs, program: Program) -> anyhow::Result<ExitCode> {
    let connected = settings.connection.open().await?;
    let namespace = settings.namespace.as_ref().unwrap_or(&connected.namespace);
    let permissions = permissions(&(program.roles)(installation(&connected)))?;
    let checked = Checked { instance: &connected.instance, namespace };
    let answers = checked.checks(&connected.client, &permissions, Timestamp::now()).await;
    print(&answers.iter().map(describe).collect::<String>())?;
    let is_bad = answers.iter().any(|answer| answer.level == Level::Bad);
    Ok(if is_bad { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}

fn describe(answer: &Answer) -> String {
    let remedy = answer.remedy.as_ref().map(|remedy| format!("    {remedy}\n")).unwrap_or_default();
    format!("{} {}\n{remedy}", answer.level.symbol(), answer.text)
}

fn installation(Connected { instance, .. }: &Connected) -> Installation {
    let secrets = instance.settings().kinds.iter().any(|kind| kind == Kind::Secret.plural());
    Installation {
        domain: instance.domain.clone(),
        namespace: instance.namespace.clone(),
        // Whether Secrets are mirrored is not known without the Lease.
        secrets: secrets && instance.lease.is_ok(),
        cert_manager: instance.is_injected_by_cert_manager(),
    }
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct RbacRole {
    kind: String,
    metadata: Meta,
    rules: Vec<PolicyRule>,
}

#[derive(Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct PolicyRule {
    api_groups: Vec<String>,
    resources: Vec<String>,
    resource_names: Vec<String>,
    verbs: Vec<String>,
}

/// What roles, as YAML, grant. Other objects grant nothing.
pub fn permissions(roles: &str) -> anyhow::Result<Vec<Right>> {
    let documents: Vec<RbacRole> = serde_saphyr::from_multiple(roles)?;
    // What people may do is another role.
    let is_ours =
        |role: &RbacRole| !role.metadata.labels.contains_key("rbac.authorization.k8s.io/aggregate-to-view");
    Ok(documents.into_iter().filter(is_ours).flat_map(granted).collect())
}

fn granted(role: RbacRole) -> Vec<Right> {
    let namespace = match role.kind.as_str() {
        "ClusterRole" => None,
        "Role" => Some(role.metadata.namespace),
        _ => return Vec::new(),
    };
    let mut granted = Vec::new();
    for PolicyRule { api_groups, resources, resource_names, verbs } in role.rules {
        let mut names: Vec<Option<String>> = resource_names.into_iter().map(Some).collect();
        if names.is_empty() {
            names.push(None);
        }
        for group in &api_groups {
            for resource in &resources {
                for verb in &verbs {
                    granted.extend(names.iter().map(|name| Right {
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
