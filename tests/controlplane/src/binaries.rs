//! Finds the binaries: in `KUBEBUILDER_ASSETS`, or in the cache, compiled if necessary.

use std::env;
use std::path::{Path, PathBuf};

use crate::Error;
use crate::compile::{BinarySet, compiled};

/// A directory with the binaries of a control plane or of a node, each under its usual name.
#[derive(Clone, Debug)]
pub struct Binaries {
    dir: PathBuf,
}

impl Binaries {
    /// The binaries in `KUBEBUILDER_ASSETS` if that is set, otherwise [`build`](Self::build).
    ///
    /// # Errors
    /// [`Error::MissingBinary`] when the directory lacks one, otherwise as for [`build`](Self::build).
    pub fn find() -> Result<Self, Error> {
        match from_env("KUBEBUILDER_ASSETS") {
            Some(dir) => Self::in_dir(dir),
            None => Self::build(),
        }
    }

    /// The binaries of the pinned versions, from the cache or compiled now. Compiling takes minutes, is announced on
    /// stderr, and happens once per version and user.
    ///
    /// # Errors
    /// [`Error::NoGo`] without a Go toolchain, [`Error::Build`] when it fails.
    pub fn build() -> Result<Self, Error> {
        compiled(BinarySet::ControlPlane).map(|dir| Self { dir })
    }

    /// kubelet, kube-scheduler, kube-proxy and `pause`, in the same way.
    ///
    /// # Errors
    /// As for [`build`](Self::build).
    pub fn build_node() -> Result<Self, Error> {
        compiled(BinarySet::Node).map(|dir| Self { dir })
    }

    /// `etcdctl` and `etcdutl`, in the same way.
    ///
    /// # Errors
    /// As for [`build`](Self::build).
    pub fn build_etcd_tools() -> Result<Self, Error> {
        compiled(BinarySet::EtcdTools).map(|dir| Self { dir })
    }

    /// `helm`, in the same way.
    ///
    /// # Errors
    /// As for [`build`](Self::build).
    pub fn build_helm() -> Result<Self, Error> {
        compiled(BinarySet::Helm).map(|dir| Self { dir })
    }

    /// Checks that all four binaries exist.
    fn in_dir(dir: PathBuf) -> Result<Self, Error> {
        for (name, purpose) in [
            ("etcd", "to store the objects"),
            ("kube-apiserver", "to serve the API"),
            ("kube-controller-manager", "for the garbage collector and the namespace controller"),
            ("kubectl", "to talk to the API server"),
        ] {
            if !dir.join(name).is_file() {
                return Err(Error::MissingBinary { dir, name, purpose });
            }
        }
        Ok(Self { dir })
    }

    /// The directory.
    #[must_use]
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Path of a program, like `etcd`.
    pub(crate) fn program(&self, name: &str) -> PathBuf {
        self.dir.join(name)
    }
}

/// The kubectl for an existing cluster: the one in PATH, or else ours.
pub(crate) fn any_kubectl() -> Result<PathBuf, Error> {
    let path = env::var_os("PATH").unwrap_or_default();
    match env::split_paths(&path).map(|dir| dir.join("kubectl")).find(|file| file.is_file()) {
        Some(kubectl) => Ok(kubectl),
        None => Binaries::find().map(|binaries| binaries.program("kubectl")),
    }
}

/// The absolute path in a variable; an empty variable counts as unset.
pub(crate) fn from_env(variable: &str) -> Option<PathBuf> {
    let value = env::var_os(variable).filter(|value| !value.is_empty())?;
    std::path::absolute(value).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_controller_manager_is_reported_in_one_line_with_its_purpose() {
        let dir = env::temp_dir().join(format!("assets-{}", std::process::id()));
        std::fs::create_dir(&dir).unwrap();
        for name in ["etcd", "kube-apiserver", "kubectl"] {
            std::fs::write(dir.join(name), "").unwrap();
        }
        let message = Binaries::in_dir(dir.clone()).unwrap_err().to_string();
        std::fs::remove_dir_all(dir).unwrap();
        for part in
            ["KUBEBUILDER_ASSETS", "kube-controller-manager", "garbage collector", "namespace controller"]
        {
            assert!(message.contains(part), "{message}");
        }
        assert_eq!(message.lines().count(), 1);
    }
}
