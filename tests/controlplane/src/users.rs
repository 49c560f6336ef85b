//! Who may call the API server: a kubeconfig for each, in the data directory.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Value, json};

use crate::pki::Authority;
use crate::{Error, files, kubeconfig};

/// Writes kubeconfigs for one cluster.
pub(crate) struct Users {
    dir: PathBuf,
    cluster: Value,
    proof: Proof,
    issued: AtomicU64,
}

/// How a user proves who they are.
enum Proof {
    /// By a client certificate, where the authority is ours.
    Certificate(Box<Authority>),
    /// As somebody whom the administrator with these credentials impersonates.
    Impersonation(Value),
}

impl Users {
    /// To a cluster whose certificate authority is ours.
    pub(crate) fn own(dir: &Path, server: &str, authority: Authority) -> Self {
        let cluster = json!({ "server": server, "certificate-authority": dir.join("ca.crt") });
        Self::new(dir, cluster, Proof::Certificate(Box::new(authority)))
    }

    /// To a cluster of which we have the credentials of an administrator.
    pub(crate) fn existing(dir: &Path, cluster: Value, credentials: Value) -> Self {
        Self::new(dir, cluster, Proof::Impersonation(credentials))
    }

    fn new(dir: &Path, cluster: Value, proof: Proof) -> Self {
        Self { dir: dir.to_owned(), cluster, proof, issued: AtomicU64::new(0) }
    }

    /// The address of the API server.
    pub(crate) fn server(&self) -> &str {
        self.cluster["server"].as_str().unwrap_or_default()
    }

    pub(crate) fn admin(&self) -> Result<PathBuf, Error> {
        match &self.proof {
            Proof::Certificate(_) => self.user("admin", &["system:masters"]),
            Proof::Impersonation(credentials) => self.write(&self.unique("admin"), credentials, "default"),
        }
    }

    pub(crate) fn user(&self, name: &str, groups: &[&str]) -> Result<PathBuf, Error> {
        let file = self.unique(name);
        let credentials = match &self.proof {
            Proof::Certificate(authority) => {
                let client = authority.client(name, groups)?;
                let (certificate, key) =
                    (self.dir.join(format!("{file}.crt")), self.dir.join(format!("{file}.key")));
                files::write_private(&certificate, &client.certificate)?;
                files::write_private(&key, &client.key)?;
                json!({ "client-certificate": certificate, "client-key": key })
            }
            Proof::Impersonation(credentials) => {
                let mut credentials = credentials.clone();
                credentials["as"] = name.into();
                credentials["as-groups"] = groups.into();
                credentials
            }
        };
        self.write(&file, &credentials, "default")
    }

    pub(crate) fn service_account(&self, namespace: &str, name: &str, token: &str) -> Result<PathBuf, Error> {
        self.write(&self.unique(name), &json!({ "token": token }), namespace)
    }

    fn write(&self, file: &str, credentials: &Value, namespace: &str) -> Result<PathBuf, Error> {
        let path = self.dir.join(format!("{file}.kubeconfig"));
        let document = kubeconfig::document(&self.cluster, credentials, namespace);
        kubeconfig::write(&path, &document)?;
        Ok(path)
    }

    /// A file name that says whom it is for, and is new each time: names may differ in nothing but
    /// characters that a file name cannot have.
    fn unique(&self, name: &str) -> String {
        let name = name.replace(|c: char| !c.is_ascii_alphanumeric(), "-");
        format!("{}-{name:.60}", self.issued.fetch_add(1, Ordering::Relaxed))
    }
}
