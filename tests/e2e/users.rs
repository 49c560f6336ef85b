//! Users with permissions of their own, and kubectl commands that they run.

use std::{
    path::PathBuf,
    process::{Command, Output},
};

use controlplane::ControlPlane;
use serde_json::{Value, json};

use crate::harness::{Cluster, eventually, output, run};

pub(crate) struct User {
    plane: &'static ControlPlane,
    kubeconfig: PathBuf,
    /// The user name in the API server.
    pub name: String,
}

impl Cluster {
    /// A user with all verbs on ConfigMaps and Secrets in these namespaces, and no other permission.
    pub(crate) async fn editor(&self, name: &str, groups: &[&str], namespaces: &[&str]) -> User {
        let user = self.user(name, groups);
        for namespace in namespaces {
            self.grant(&user.name, &user.subject(), Some(namespace), json!([all_verbs()])).await;
        }
        user
    }

    /// A user with all verbs on ConfigMaps and Secrets in all namespaces, and no other permission.
    pub(crate) async fn cluster_editor(&self, name: &str, groups: &[&str]) -> User {
        let user = self.user(name, groups);
        self.grant(&user.name, &user.subject(), None, json!([all_verbs()])).await;
        user
    }

    /// A user who may create ConfigMaps in a namespace, and has all verbs on those with these names.
    pub(crate) async fn named_object_editor(&self, name: &str, namespace: &str, objects: &[&str]) -> User {
        let user = self.user(name, &[]);
        let mut named = all_verbs();
        named["resourceNames"] = json!(objects);
        let create = json!({"apiGroups": [""], "resources": ["configmaps"], "verbs": ["create"]});
        self.grant(&user.name, &user.subject(), Some(namespace), json!([named, create])).await;
        user
    }

    /// A user without permissions.
    pub(crate) fn user(&self, name: &str, groups: &[&str]) -> User {
        let name = format!("{name}-{}", self.id);
        let kubeconfig = self.plane.user(&name, groups).expect("a kubeconfig");
        User { plane: self.plane, kubeconfig, name }
    }

    /// A ServiceAccount without permissions.
    pub(crate) async fn service_account(&self, namespace: &str, name: &str) -> User {
        let accounts = format!("/api/v1/namespaces/{namespace}/serviceaccounts");
        self.post(&accounts, &json!({"metadata": {"name": name}})).await;
        let kubeconfig = self.plane.service_account(namespace, name).expect("a kubeconfig");
        let name = format!("system:serviceaccount:{namespace}:{name}");
        User { plane: self.plane, kubeconfig, name }
    }

    /// Creates a role of this name and binds it, in one namespace or cluster-wide.
    pub(crate) async fn grant(&self, name: &str, subject: &Value, namespace: Option<&str>, rules: Value) {
        let rbac = "/apis/rbac.authorization.k8s.io/v1";
        let (path, kind) = match namespace {
            Some(namespace) => (format!("{rbac}/namespaces/{namespace}/"), "Role"),
            None => (format!("{rbac}/cluster"), "ClusterRole"),
        };
        self.post(&format!("{path}roles"), &json!({"metadata": {"name": name}, "rules": &rules})).await;
        let binding = json!({
            "metadata": {"name": name},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name},
            "subjects": [subject],
        });
        self.post(&format!("{path}rolebindings"), &binding).await;
        // The API server's authorizer sees the binding a moment later.
        let text = |field: &str| subject[field].as_str().expect("text");
        let who = match text("kind") {
            "Group" => json!({"user": "anybody", "groups": [text("name")]}),
            "ServiceAccount" => {
                json!({"user": format!("system:serviceaccount:{}:{}", text("namespace"), text("name"))})
            }
            _ => json!({"user": text("name")}),
        };
        for rule in rules.as_array().expect("rules") {
            let resource = json!({
                "namespace": namespace, "group": rule["apiGroups"][0], "resource": rule["resources"][0],
                "verb": rule["verbs"][0], "name": rule["resourceNames"][0],
            });
            let mut review = json!({"spec": who});
            review["spec"]["resourceAttributes"] = resource;
            eventually("the binding takes effect", || async {
                let reviews = "/apis/authorization.k8s.io/v1/subjectaccessreviews";
                (self.post(reviews, &review).await["status"]["allowed"] == true).then_some(())
            })
            .await;
        }
    }

    /// The admin of the cluster.
    pub(crate) fn admin(&self) -> User {
        User { plane: self.plane, kubeconfig: self.plane.admin(), name: "admin".to_owned() }
    }
}

/// A rule for every verb on the kinds that can be mirrored.
pub(crate) fn all_verbs() -> Value {
    json!({"apiGroups": [""], "resources": ["configmaps", "secrets"], "verbs": ["*"]})
}

impl User {
    pub(crate) fn kubeconfig(&self) -> &std::path::Path {
        &self.kubeconfig
    }

    /// The subject for a role binding.
    pub(crate) fn subject(&self) -> Value {
        json!({"kind": "User", "name": self.name})
    }

    /// A kubectl command; its arguments must not contain spaces.
    pub(crate) fn kubectl(&self, line: &str) -> Command {
        let mut command = self.plane.kubectl_as(&self.kubeconfig);
        // `kubectl edit` keeps the file that it could not save.
        command.args(line.split_whitespace()).env("TMPDIR", self.plane.data_dir());
        command
    }

    /// Runs a command line of kubectl or lockstep that somebody pasted into a shell. An editor saves what it was given.
    pub(crate) fn shell(&self, line: &str) -> Output {
        let kubectl = self.plane.kubectl();
        let bin = std::path::Path::new(kubectl.get_program()).parent().expect("a directory");
        let lockstep = std::path::Path::new(env!("CARGO_BIN_EXE_lockstep")).parent().expect("a directory");
        let path = std::env::var("PATH").unwrap_or_default();
        let path = format!("{}:{}:{path}", bin.display(), lockstep.display());
        let mut shell = Command::new("sh");
        let shell = shell.args(["-c", line]).env("PATH", path).env("KUBECONFIG", &self.kubeconfig);
        shell.env("EDITOR", "true").output().expect("a shell")
    }

    /// A command of `lockstep` that uses the user's kubeconfig.
    pub(crate) fn lockstep(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_lockstep"));
        command.args(arguments).env("KUBECONFIG", &self.kubeconfig);
        command
    }

    /// Runs a command that must succeed, and returns its output.
    pub(crate) fn succeeds(&self, line: &str) -> String {
        run(&mut self.kubectl(line))
    }

    /// As [`Self::succeeds`], with a manifest for `-f -`.
    pub(crate) fn succeeds_with(&self, line: &str, file: &str) -> String {
        crate::harness::pipe(&mut self.kubectl(line), file)
    }

    /// Runs a command that must fail, and returns its error output.
    pub(crate) fn fails(&self, line: &str) -> String {
        error_output(line, &self.kubectl(line).output().expect("kubectl"))
    }

    /// As [`Self::fails`], with a manifest for `-f -`.
    pub(crate) fn fails_with(&self, line: &str, file: &str) -> String {
        error_output(line, &output(&mut self.kubectl(line), file))
    }
}

/// A manifest for `-f -`.
pub(crate) fn manifest(kind: &str, metadata: &Value, rest: &Value) -> String {
    let mut object = json!({"apiVersion": "v1", "kind": kind, "metadata": metadata});
    object.as_object_mut().unwrap().extend(rest.as_object().unwrap().clone());
    object.to_string()
}

fn error_output(line: &str, output: &Output) -> String {
    assert!(!output.status.success(), "{line} succeeded: {}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8_lossy(&output.stderr).into_owned()
}
