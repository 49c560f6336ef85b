//! Kubeconfig documents, written as JSON, which is valid YAML.

use std::fs;
use std::path::Path;

use serde_json::{Value, json};

use crate::kubectl::Kubectl;
use crate::{Error, files};

/// A document with one cluster, one user and one context, which is the current one.
pub(crate) fn document(cluster: &Value, user: &Value, namespace: &str) -> Value {
    json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{ "name": "test", "cluster": cluster }],
        "users": [{ "name": "test", "user": user }],
        "contexts": [{ "name": "test", "context": { "cluster": "test", "user": "test", "namespace": namespace } }],
        "current-context": "test",
    })
}

/// Writes the document to a file that only its owner can read.
pub(crate) fn write(path: &Path, document: &Value) -> Result<(), Error> {
    files::write_private(path, &format!("{document:#}\n"))
}

/// The cluster and the user of the current context, with certificates and keys inlined.
pub(crate) fn current(kubectl: &Kubectl, kubeconfig: &Path) -> Result<(Value, Value), Error> {
    fs::metadata(kubeconfig).map_err(Error::at(kubeconfig))?;
    let view =
        kubectl.run(kubeconfig, &["config", "view", "--raw", "--minify", "--flatten", "--output=json"]);
    // Without a current context, kubectl fails or prints a document without these parts.
    let view: Value = view.ok().and_then(|view| serde_json::from_str(&view).ok()).unwrap_or_default();
    let part = |path| view.pointer(path).filter(|part| part.is_object()).cloned();
    part("/clusters/0/cluster")
        .zip(part("/users/0/user"))
        .ok_or_else(|| Error::Kubeconfig(kubeconfig.to_owned()))
}
