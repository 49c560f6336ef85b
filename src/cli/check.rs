//! `lockstep check`: whether Lockstep can be installed, or works once it is.

use std::process::ExitCode;

use clap::Args;
use k8s_openapi::jiff::Timestamp;
use serde_json::Value;

use super::{
    connection::{Connected, Connection},
    manifests::Manifests,
    output::print,
};
use crate::{
    config,
    inspect::{
        check::{Check as Answer, Level, facts::Facts},
        rights::Permission,
    },
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
    let namespace = settings.namespace.as_ref().unwrap_or(&connected.namespace);
    let permissions = permissions(&connected)?;
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

/// What the roles in the manifests of this installation grant.
fn permissions(Connected { instance, .. }: &Connected) -> anyhow::Result<Vec<Permission>> {
    let name = &instance.name;
    let secrets = instance.settings().kinds.iter().any(|kind| kind == Kind::Secret.plural());
    // Whether Secrets are mirrored is not known without the Lease.
    let secrets = secrets && instance.lease.is_ok();
    let manifests = Manifests {
        domain: name.domain.clone(),
        namespace: name.namespace.clone(),
        secrets,
        cert_manager: instance.is_injected_by_cert_manager(),
        ..Manifests::default()
    };
    let documents: Vec<Value> = serde_saphyr::from_multiple(&manifests.rbac())?;
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        certs::webhooks::WebhookKind,
        client::Failure,
        inspect::instance::{Instance, InstanceName},
    };

    fn manifests() -> Manifests {
        Manifests {
            domain: "d.test".to_owned(),
            namespace: "own".to_owned(),
            secrets: true,
            ..Manifests::default()
        }
    }

    fn rights(yaml: &str) -> Vec<String> {
        let documents: Vec<Value> = serde_saphyr::from_multiple(yaml).unwrap();
        documents.iter().flat_map(granted).map(|one| one.to_string()).collect()
    }

    #[test]
    fn rights_of_the_service_account_are_those_of_the_manifests_without_those_of_people() {
        let granted = rights(&manifests().rbac());
        for expected in [
            "create configmaps",
            "delete secrets",
            "get leases lockstep.d.test in own",
            "create secrets in own",
            "patch secrets lockstep.d.test in own",
            "patch mutatingwebhookconfigurations lockstep.d.test",
        ] {
            assert!(granted.iter().any(|one| one == expected), "{expected}: {granted:?}");
        }
        assert!(
            !granted.contains(&"get validatingwebhookconfigurations lockstep.d.test".to_owned()),
            "{granted:?}"
        );
    }

    #[test]
    fn with_cert_manager_no_rights_on_the_ca_secret_and_the_webhook_configurations_are_expected() {
        let manifests = Manifests { cert_manager: true, ..manifests() };
        let granted = rights(&manifests.rbac());
        assert!(granted.contains(&"get leases lockstep.d.test in own".to_owned()), "{granted:?}");
        assert!(granted.contains(&"delete secrets".to_owned()), "{granted:?}");
        let is_of_own_certificates =
            |right: &&String| right.contains("webhookconfigurations") || right.contains("secrets in own");
        let named_secret = |right: &&String| right.contains("secrets lockstep.d.test");
        assert_eq!(granted.iter().find(is_of_own_certificates), None);
        assert_eq!(granted.iter().find(named_secret), None);
    }

    #[test]
    fn expected_rights_are_those_of_all_the_manifests() {
        for (secrets, cert_manager) in [(false, false), (true, false), (false, true), (true, true)] {
            let manifests = Manifests { secrets, cert_manager, ..manifests() };
            assert_eq!(rights(&manifests.rbac()), rights(&manifests.render()), "{secrets} {cert_manager}");
        }
    }

    #[test]
    fn webhook_configurations_of_the_manifests_tell_whether_cert_manager_injects_the_ca() {
        for cert_manager in [false, true] {
            let text = Manifests { cert_manager, ..manifests() }.render();
            let documents: Vec<Value> = serde_saphyr::from_multiple(&text).unwrap();
            let read = |kind: WebhookKind| {
                let found = documents.iter().find(|document| document["kind"] == kind.as_str()).unwrap();
                (kind, Ok(serde_json::from_value(found.clone()).unwrap()))
            };
            let name = InstanceName { domain: "d.test".to_owned(), namespace: "own".to_owned() };
            let webhooks = WebhookKind::ALL.map(read).to_vec();
            let instance =
                Instance { name, lease: Err(Failure::NotFound), webhooks, replicas: Ok(Vec::new()) };
            assert_eq!(instance.is_injected_by_cert_manager(), cert_manager);
        }
    }
}
