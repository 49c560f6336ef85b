//! The kubectl commands that change an object.

use serde_json::{Value, json};

use crate::{harness::Cluster, users::User};

/// The companion that the commands change.
pub struct Subject<'a> {
    pub cluster: &'a Cluster,
    pub kind: &'static str,
    pub namespace: &'a str,
    pub name: String,
}

impl Subject<'_> {
    pub fn path(&self) -> String {
        format!("/api/v1/namespaces/{}/{}s/{}", self.namespace, self.kind, self.name)
    }

    fn at(&self) -> String {
        format!("{} {} -n {}", self.kind, self.name, self.namespace)
    }

    /// Commands that change the object and keep the companion label.
    pub fn edits(&self) -> Vec<String> {
        let (at, domain) = (self.at(), self.cluster.domain());
        let mut lines = vec![
            format!(r#"patch {at} --type merge -p {{"data":{{"sky":"bWluZQ=="}}}}"#),
            format!(r#"patch {at} --type strategic -p {{"data":{{"sky":"bWluZQ=="}}}}"#),
            format!(r#"patch {at} --type json -p [{{"op":"remove","path":"/data"}}]"#),
            format!(r#"patch {at} --type merge -p {{"immutable":true}}"#),
            format!(r#"patch {at} --type merge -p {{"metadata":{{"finalizers":["example.com/held"]}}}}"#),
            format!(
                r#"patch {at} --type merge -p {{"metadata":{{"ownerReferences":[{{"apiVersion":"v1","kind":"Pod","name":"x","uid":"x"}}]}}}}"#
            ),
            format!("label {at} team=mine"),
            format!("label {at} {domain}/managed=true"),
            format!("annotate {at} team=mine"),
            format!("annotate {at} --overwrite {domain}/protect=none"),
            format!("annotate {at} --overwrite {domain}/source=x/y"),
            format!("label {at} --overwrite {domain}/companion=false"),
            format!("label {at} team=mine --dry-run=server"),
        ];
        if self.kind == "configmap" {
            lines.push(format!(r#"patch {at} --type merge -p {{"binaryData":{{"x":"bWluZQ=="}}}}"#));
        }
        lines
    }

    /// Commands that remove the companion label.
    pub fn strips(&self) -> Vec<String> {
        let (at, label) = (self.at(), self.cluster.key("companion"));
        vec![
            format!("label {at} {label}-"),
            format!(r#"patch {at} --type merge -p {{"metadata":{{"labels":null,"annotations":null}}}}"#),
        ]
    }

    /// Commands that delete the object. They do not wait: Lockstep may recreate the object before kubectl sees it gone.
    pub fn deletes(&self) -> Vec<String> {
        let (at, kind, namespace) = (self.at(), self.kind, self.namespace);
        vec![
            format!("delete {at} --dry-run=server"),
            format!("delete {at} --wait=false"),
            format!("delete {at} --wait=false --cascade=orphan"),
            format!("delete {at} --wait=false --cascade=foreground"),
            format!("delete {at} --wait=false --grace-period=0 --force"),
            format!("delete {kind} --wait=false -n {namespace} -l {}", self.cluster.key("companion")),
        ]
    }

    /// Commands that read a manifest from standard input.
    pub fn files(&self) -> Vec<String> {
        let namespace = self.namespace;
        vec![
            format!("apply -f - -n {namespace}"),
            format!("apply -f - -n {namespace} --dry-run=server"),
            format!("apply --server-side --force-conflicts -f - -n {namespace}"),
            format!("apply --server-side --force-conflicts -f - -n {namespace} --dry-run=server"),
            format!("replace -f - -n {namespace}"),
            format!("replace -f - -n {namespace} --dry-run=server"),
        ]
    }

    /// Runs `kubectl edit` with an editor that changes an annotation, which must fail, and returns its error output.
    pub fn edited_by(&self, user: &User) -> String {
        let editor = "sed -i s/source-checksum:.*/source-checksum:\\ mine/";
        let mut edit = user.kubectl(&format!("edit {}", self.at()));
        let output = edit.env("KUBE_EDITOR", editor).output().expect("kubectl");
        assert!(!output.status.success(), "kubectl edit succeeded");
        String::from_utf8_lossy(&output.stderr).into_owned()
    }

    /// The object as a manifest, without the fields that the API server sets.
    pub async fn file(&self, change: impl FnOnce(&mut Value)) -> String {
        let mut object = self.cluster.get(&self.path()).await.expect("the object exists");
        for field in ["managedFields", "resourceVersion", "uid", "creationTimestamp"] {
            object["metadata"].as_object_mut().unwrap().remove(field);
        }
        object["apiVersion"] = json!("v1");
        object["kind"] = json!(if self.kind == "secret" { "Secret" } else { "ConfigMap" });
        change(&mut object);
        object.to_string()
    }
}

/// Asserts that kubectl printed this text and a 403 with reason Forbidden; `create` and `edit` do not print the reason.
pub fn assert_refused(line: &str, complaint: &str, text: &str) {
    let silent = line.starts_with("edit") || line.starts_with("create cm");
    let forbidden = silent || complaint.contains("(Forbidden)") || complaint.contains(" is forbidden: ");
    assert!(forbidden && complaint.contains(text), "{line}: {complaint}\nexpected: {text}");
}
