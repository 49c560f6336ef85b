//! What the roles in the manifests grant, as `lockstep check` reads it.

use serde_json::Value;

use super::Manifests;
use lockstep_cli::{commands::check::permissions, inspect::instance::Instance};
use lockstep_core::{certs::webhooks::WebhookKind, failure::Failure, keys::Keys};

fn manifests() -> Manifests {
    Manifests {
        domain: "d.test".to_owned(),
        namespace: "own".to_owned(),
        secrets: true,
        ..Manifests::default()
    }
}

fn rights(roles: &str) -> Vec<String> {
    permissions(roles).unwrap().iter().map(ToString::to_string).collect()
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
        let instance = Instance {
            domain: "d.test".to_owned(),
            namespace: "own".to_owned(),
            keys: Keys::new("d.test", ""),
            lease: Err(Failure::NotFound),
            webhooks: WebhookKind::ALL.map(read).to_vec(),
            replicas: Ok(Vec::new()),
        };
        assert_eq!(instance.is_injected_by_cert_manager(), cert_manager);
    }
}
