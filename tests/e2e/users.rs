//! Somebody with rights of their own, who uses kubectl.

use std::{
    path::PathBuf,
    process::{Command, Output},
};

use controlplane::ControlPlane;
use serde_json::{Value, json};

use crate::harness::{Cluster, eventually, output, run};

pub struct User {
    plane: &'static ControlPlane,
    kubeconfig: PathBuf,
    /// As the API server knows them.
    pub name: String,
}

impl Cluster {
    /// Somebody who may do anything to ConfigMaps and Secrets in these namespaces, and nothing else.
    pub async fn editor(&self, name: &str, groups: &[&str], namespaces: &[&str]) -> User {
        let person = self.user(name, groups);
        for namespace in namespaces {
            self.grant(&person.name, &person.subject(), Some(namespace), json!([all_verbs()])).await;
        }
        person
    }

    /// Somebody who may do anything to ConfigMaps and Secrets everywhere, and nothing else.
    pub async fn cluster_editor(&self, name: &str, groups: &[&str]) -> User {
        let person = self.user(name, groups);
        self.grant(&person.name, &person.subject(), None, json!([all_verbs()])).await;
        person
    }

    /// Somebody who may make ConfigMaps in a namespace, and do anything to those of these names.
    pub async fn named_object_editor(&self, name: &str, namespace: &str, objects: &[&str]) -> User {
        let person = self.user(name, &[]);
        let mut named = all_verbs();
        named["resourceNames"] = json!(objects);
        let create = json!({"apiGroups": [""], "resources": ["configmaps"], "verbs": ["create"]});
        self.grant(&person.name, &person.subject(), Some(namespace), json!([named, create])).await;
        person
    }

    /// Somebody without any rights.
    pub fn user(&self, name: &str, groups: &[&str]) -> User {
        let name = format!("{name}-{}", self.id);
        let kubeconfig = self.plane.user(&name, groups).expect("a kubeconfig");
        User { plane: self.plane, kubeconfig, name }
    }

    /// A ServiceAccount without any rights.
    pub async fn service_account(&self, namespace: &str, name: &str) -> User {
        let accounts = format!("/api/v1/namespaces/{namespace}/serviceaccounts");
        self.post(&accounts, &json!({"metadata": {"name": name}})).await;
        let kubeconfig = self.plane.service_account(namespace, name).expect("a kubeconfig");
        let name = format!("system:serviceaccount:{namespace}:{name}");
        User { plane: self.plane, kubeconfig, name }
    }

    /// A role of this name and its binding: in one namespace, or in all.
    pub async fn grant(&self, name: &str, subject: &Value, namespace: Option<&str>, rules: Value) {
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
        // The API server goes by it a moment later.
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
            eventually("a right is known", || async {
                let reviews = "/apis/authorization.k8s.io/v1/subjectaccessreviews";
                (self.post(reviews, &review).await["status"]["allowed"] == true).then_some(())
            })
            .await;
        }
    }

    /// The admin of the cluster.
    pub fn admin(&self) -> User {
        User { plane: self.plane, kubeconfig: self.plane.admin(), name: "admin".to_owned() }
    }
}

/// A rule for every verb on what can be mirrored.
pub fn all_verbs() -> Value {
    json!({"apiGroups": [""], "resources": ["configmaps", "secrets"], "verbs": ["*"]})
}

impl User {
    /// How a binding names them.
    pub fn subject(&self) -> Value {
        json!({"kind": "User", "name": self.name})
    }

    /// A kubectl command; its arguments hold no spaces.
    pub fn kubectl(&self, line: &str) -> Command {
        let mut command = self.plane.kubectl_as(&self.kubeconfig);
        // What `kubectl edit` could not save is kept in a file.
        command.args(line.split_whitespace()).env("TMPDIR", self.plane.data_dir());
        command
    }

    /// Runs a command that must succeed, and returns what it printed.
    pub fn succeeds(&self, line: &str) -> String {
        run(&mut self.kubectl(line))
    }

    /// As [`Self::succeeds`], with a file for `-f -`.
    pub fn succeeds_with(&self, line: &str, file: &str) -> String {
        crate::harness::pipe(&mut self.kubectl(line), file)
    }

    /// Runs a command that must fail, and returns the complaint.
    pub fn fails(&self, line: &str) -> String {
        complaint(line, &self.kubectl(line).output().expect("kubectl"))
    }

    /// As [`Self::fails`], with a file for `-f -`.
    pub fn fails_with(&self, line: &str, file: &str) -> String {
        complaint(line, &output(&mut self.kubectl(line), file))
    }
}

/// A file for `-f -`.
pub fn manifest(kind: &str, metadata: &Value, rest: &Value) -> String {
    let mut object = json!({"apiVersion": "v1", "kind": kind, "metadata": metadata});
    object.as_object_mut().unwrap().extend(rest.as_object().unwrap().clone());
    object.to_string()
}

fn complaint(line: &str, output: &Output) -> String {
    assert!(!output.status.success(), "{line} went through: {}", String::from_utf8_lossy(&output.stdout));
    String::from_utf8_lossy(&output.stderr).into_owned()
}
