//! Kubeconfigs for users of the API server, in the data directory.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use serde_json::{Value, json};

use crate::pki::Authority;
use crate::{Error, files, kubeconfig};

/// Writes kubeconfigs for one cluster.
pub(crate) struct Users {
    dir: PathBuf,
    cluster: Value,
    authentication: Authentication,
    issued: AtomicU64,
}

/// How users authenticate.
enum Authentication {
    /// By a client certificate, if the CA is ours.
    Certificate(Box<Authority>),
    /// By impersonation, with these credentials of an administrator.
    Impersonation(Value),
}

impl Users {
    /// For a cluster whose CA is ours.
    pub(crate) fn own(dir: &Path, server: &str, authority: Authority) -> Self {
        let cluster = json!({ "server": server, "certificate-authority": dir.join("ca.crt") });
        Self::new(dir, cluster, Authentication::Certificate(Box::new(authority)))
    }

    /// For a cluster of which we have an administrator's credentials.
    pub(crate) fn existing(dir: &Path, cluster: Value, credentials: Value) -> Self {
        Self::new(dir, cluster, Authentication::Impersonation(credentials))
    }

    fn new(dir: &Path, cluster: Value, authentication: Authentication) -> Self {
        Self { dir: dir.to_owned(), cluster, authentication, issued: AtomicU64::new(0) }
    }

    /// The address of the API server.
    pub(crate) fn server(&self) -> &str {
        self.cluster["server"].as_str().unwrap_or_default()
    }

    pub(crate) fn admin(&self) -> Result<PathBuf, Error> {
        match &self.authentication {
            Authentication::Certificate(_) => self.user("admin", &["system:masters"]),
            Authentication::Impersonation(credentials) => {
                self.write(&self.unique("admin"), credentials, "default")
            }
        }
    }

    pub(crate) fn user(&self, name: &str, groups: &[&str]) -> Result<PathBuf, Error> {
        let file = self.unique(name);
        let credentials = match &self.authentication {
            Authentication::Certificate(authority) => {
                let client = authority.client(name, groups)?;
                let (certificate, key) =
                    (self.dir.join(format!("{file}.crt")), self.dir.join(format!("{file}.key")));
                files::write_private(&certificate, &client.certificate)?;
                files::write_private(&key, &client.key)?;
                json!({ "client-certificate": certificate, "client-key": key })
            }
            Authentication::Impersonation(credentials) => {
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

    /// A unique file name that contains the user's name. The number makes it unique: names may differ only in
    /// characters that are replaced.
    fn unique(&self, name: &str) -> String {
        let name = name.replace(|c: char| !c.is_ascii_alphanumeric(), "-");
        format!("{}-{name:.60}", self.issued.fetch_add(1, Ordering::Relaxed))
    }
}
