//! `lockstep check`: whether Lockstep can be installed, or works once it is.

use std::process::ExitCode;

use clap::Args;
use k8s_openapi::jiff::Timestamp;
use serde_json::Value;

use super::{
    connection::{Connected, Connection},
    output::print,
};
use crate::{
    inspect::{
        check::{Check as Answer, Level, facts::Facts},
        rights::Permission,
    },
    program::{Installation, Program},
};
use lockstep_core::{keys, object::Kind};

#[derive(Debug, Args)]
#[command(after_help = "\
Before an installation it says whether the cluster and your rights suffice; after one, whether everything works.
To see whether the webhook answers, it tries to create a malformed source, as a dry run: nothing is stored.
Exit codes: 0 all is well, warnings included; 1 something is not.")]
pub struct Check {
    /// Where the webhook is tried: you must be allowed to create ConfigMaps there [default: that of the kubeconfig]
    #[arg(short, long, value_parser = keys::namespace)]
    pub namespace: Option<String>,

    #[command(flatten)]
    pub connection: Connection,
}

pub async fn run(settings: &Check, program: Program) -> anyhow::Result<ExitCode> {
    let connected = settings.connection.open().await?;
    let namespace = settings.namespace.as_ref().unwrap_or(&connected.namespace);
    let permissions = permissions(&(program.roles)(installation(&connected)))?;
    let facts = Facts::read(&connected.client, &connected.instance, namespace, &permissions).await;
    let answers = facts.checks(Timestamp::now());
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

/// What roles, as YAML, grant.
pub fn permissions(roles: &str) -> anyhow::Result<Vec<Permission>> {
    let documents: Vec<Value> = serde_saphyr::from_multiple(roles)?;
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
