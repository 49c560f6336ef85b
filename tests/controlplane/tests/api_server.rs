//! What a control plane offers. The tests share one in a `static`, which is never dropped.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::sync::LazyLock;
use std::time::Duration;

use controlplane::{ControlPlane, Error, eventually};
use serde_json::Value;

static PLANE: LazyLock<ControlPlane> = LazyLock::new(|| ControlPlane::start().unwrap());

/// Far more than needed.
const DEADLINE: Duration = Duration::from_mins(1);

fn run(command: &mut Command, args: &[&str]) -> Result<String, String> {
    let output = command.args(args).output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) }
}

fn admin(args: &[&str]) -> String {
    run(&mut PLANE.kubectl(), args).unwrap()
}

fn whoami(kubeconfig: &std::path::Path) -> (String, Vec<String>) {
    let answer = run(&mut PLANE.kubectl_as(kubeconfig), &["auth", "whoami", "--output=json"]).unwrap();
    let answer: Value = serde_json::from_str(&answer).unwrap();
    let info = &answer["status"]["userInfo"];
    let groups = info["groups"].as_array().unwrap().iter().map(|group| group.as_str().unwrap().to_owned());
    (info["username"].as_str().unwrap().to_owned(), groups.collect())
}

/// The matching lines of the audit log; the last one may be incomplete.
fn audited(matches: impl FnMut(&Value) -> bool) -> Vec<Value> {
    let log = fs::read_to_string(PLANE.audit_log().unwrap()).unwrap();
    log.lines().filter_map(|line| serde_json::from_str(line).ok()).filter(matches).collect()
}

#[test]
fn api_server_reports_the_pinned_version() {
    let version: Value = serde_json::from_str(&admin(&["version", "--output=json"])).unwrap();
    let (client, server) = (&version["clientVersion"]["gitVersion"], &version["serverVersion"]["gitVersion"]);
    assert!(server.as_str().unwrap().starts_with("v1."), "{version}");
    if !PLANE.is_existing() {
        assert_eq!(client, server);
    }
}

#[test]
fn anonymous_requests_are_rejected() {
    if PLANE.is_existing() {
        return;
    }
    let nameless = PLANE.user("", &[]).unwrap();
    let refused = run(&mut PLANE.kubectl_as(&nameless), &["get", "--raw=/version"]).unwrap_err();
    assert!(refused.contains("Unauthorized") || refused.contains("logged in"), "{refused}");
}

#[test]
fn dependents_of_a_deleted_owner_are_garbage_collected() {
    admin(&["create", "configmap", "owner"]);
    admin(&["create", "configmap", "owned"]);
    let uid = admin(&["get", "configmap", "owner", "--output=jsonpath={.metadata.uid}"]);
    let patch = format!(
        r#"{{"metadata":{{"ownerReferences":[{{"apiVersion":"v1","kind":"ConfigMap","name":"owner","uid":"{uid}"}}]}}}}"#
    );
    admin(&["patch", "configmap", "owned", "--patch", &patch]);
    admin(&["delete", "configmap", "owner"]);
    let gone =
        || run(&mut PLANE.kubectl(), &["get", "configmap", "owned"]).is_err_and(|e| e.contains("NotFound"));
    assert!(eventually(DEADLINE, gone));
}

#[test]
fn deleted_namespace_is_removed() {
    admin(&["create", "namespace", "short-lived"]);
    admin(&["delete", "namespace", "short-lived", "--timeout=60s"]);
}

#[test]
fn new_user_has_name_and_groups_and_no_permissions() {
    let alice = PLANE.user("alice", &["team:a", "team:b", "Größe"]).unwrap();
    let (name, groups) = whoami(&alice);
    assert_eq!(name, "alice");
    assert_eq!(groups, ["team:a", "team:b", "Größe", "system:authenticated"]);
    let refused = run(&mut PLANE.kubectl_as(&alice), &["get", "secrets"]).unwrap_err();
    assert!(refused.contains("Forbidden"), "{refused}");
}

#[test]
fn service_account_authenticates_with_its_token() {
    admin(&["create", "serviceaccount", "robot"]);
    let robot = PLANE.service_account("default", "robot").unwrap();
    assert_eq!(whoami(&robot).0, "system:serviceaccount:default:robot");
    let unknown = PLANE.service_account("default", "nobody").unwrap_err();
    assert!(unknown.to_string().contains("not found"), "{unknown}");
}

#[test]
fn kubeconfigs_are_private() {
    for kubeconfig in [PLANE.admin(), PLANE.user("bob", &[]).unwrap()] {
        assert_eq!(fs::metadata(kubeconfig).unwrap().permissions().mode() & 0o777, 0o600);
    }
    assert_eq!(fs::metadata(PLANE.data_dir()).unwrap().permissions().mode() & 0o777, 0o700);
}

#[test]
fn audit_log_has_writes_and_reads_at_once() {
    if PLANE.is_existing() {
        return;
    }
    let carol = PLANE.user("carol", &["system:masters"]).unwrap();
    run(&mut PLANE.kubectl_as(&carol), &["create", "configmap", "audited"]).unwrap();
    run(&mut PLANE.kubectl_as(&carol), &["get", "configmap", "audited"]).unwrap();
    let events = audited(|event| {
        event["user"]["username"] == "carol" && event["objectRef"]["resource"] == "configmaps"
    });
    let verbs: Vec<&str> = events.iter().map(|event| event["verb"].as_str().unwrap()).collect();
    assert_eq!(verbs, ["create", "get"]);
}

#[test]
fn existing_cluster_needs_a_kubeconfig_with_a_context() {
    let file = PLANE.data_dir().join("no-context");
    let error = ControlPlane::existing(&file).unwrap_err();
    assert!(error.to_string().contains("no-context: No such file"), "{error}");
    fs::write(&file, "apiVersion: v1\nkind: Config\n").unwrap();
    let error = ControlPlane::existing(&file).unwrap_err();
    assert!(matches!(error, Error::Kubeconfig(path) if path == file));
}

#[test]
fn existing_cluster_is_used_and_left_running() {
    let existing = ControlPlane::existing(&PLANE.admin()).unwrap();
    assert_eq!(existing.server_url(), PLANE.server_url());
    assert!(existing.is_existing());
    assert!(matches!(existing.etcd(), Err(Error::ExistingCluster("etcd"))));

    let (name, groups) = whoami(&existing.user("dora", &["team:d", "team:e"]).unwrap());
    assert_eq!(name, "dora");
    assert_eq!(groups, ["team:d", "team:e", "system:authenticated"]);
    let default = existing.service_account("default", "default").unwrap();
    assert_eq!(whoami(&default).0, "system:serviceaccount:default:default");

    let dir = existing.data_dir().to_owned();
    existing.stop();
    assert!(!dir.exists());
    assert!(admin(&["get", "--raw=/readyz"]).contains("ok"), "the cluster was stopped");
}
