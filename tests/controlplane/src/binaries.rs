//! Finds the binaries: in `KUBEBUILDER_ASSETS`, in the cache, or where setup-envtest keeps its own; or compiles them.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fmt, fs};

use crate::Error;
use crate::beside::Beside;
use crate::compile::{self, BinarySet, compiled};
use crate::versions::{self, DEFAULT, Minor};

/// The oldest Kubernetes that Lockstep supports.
const OLDEST_SUPPORTED: [u32; 3] = [1, 30, 0];

const CONTROLLER_MANAGER: &str = "kube-controller-manager";

/// The binaries of a control plane, and what each is needed for.
const CONTROL_PLANE: [(&str, &str); 4] = [
    ("etcd", "to store the objects"),
    ("kube-apiserver", "to serve the API"),
    ("kubectl", "to talk to the API server"),
    (CONTROLLER_MANAGER, "for the garbage collector and the namespace controller"),
];

/// A directory with the binaries of a control plane or of a node, each under its usual name.
#[derive(Clone, Debug)]
pub struct Binaries {
    dir: PathBuf,
}

/// What a control plane is for.
#[derive(Clone, Copy, Debug)]
pub enum Purpose {
    /// Tests and benchmarks. They need all binaries, and for the same results everywhere those of the pinned versions,
    /// unless `KUBEBUILDER_ASSETS` names others or `LOCKSTEP_TEST_KUBERNETES` another minor version.
    Tests,
    /// Somebody wants to see Lockstep run. Any supported version that is there already will do, even without a
    /// controller manager, which setup-envtest does not install: it would take almost as long to compile as all of
    /// them.
    Demo,
}

impl Binaries {
    /// The binaries that are there already, otherwise [`build`](Self::build).
    ///
    /// # Errors
    /// [`Error::MissingBinary`] when `KUBEBUILDER_ASSETS` lacks one, otherwise as for [`build`](Self::build).
    pub fn find(purpose: Purpose) -> Result<Self, Error> {
        Self::present(purpose)?.map_or_else(Self::build, Ok)
    }

    /// As [`find`](Self::find), and runs a command at the same time. If either fails, the other is ended.
    ///
    /// # Errors
    /// As for [`find`](Self::find), and [`Error::Beside`] when the command fails.
    pub fn find_beside(purpose: Purpose, command: Command) -> Result<Self, Error> {
        if let Some(binaries) = Self::present(purpose)? {
            Beside::run_alone(command)?;
            return Ok(binaries);
        }
        let minor = versions::asked_for()?.unwrap_or(DEFAULT);
        compile::compiled_beside(BinarySet::ControlPlane(minor), command).map(|dir| Self { dir })
    }

    fn present(purpose: Purpose) -> Result<Option<Self>, Error> {
        let assets = from_env("KUBEBUILDER_ASSETS");
        let asked_for = versions::asked_for()?;
        if let (Some(assets), Some(minor)) = (&assets, asked_for) {
            return Err(Error::TwoVersions { dir: assets.clone(), version: minor.name });
        }
        let cached = compile::cached(BinarySet::ControlPlane(asked_for.unwrap_or(DEFAULT)))?;
        let envtest = envtest_store().filter(|_| asked_for.is_none());
        choose(purpose, assets, cached, envtest.as_deref())
    }

    /// The binaries of the minor version that `LOCKSTEP_TEST_KUBERNETES` names, or else of the default, from the cache
    /// or compiled now. Compiling takes minutes, is announced on stderr, and happens once per version and user.
    ///
    /// # Errors
    /// [`Error::UnknownVersion`] when it cannot be built, [`Error::NoGo`] without a Go toolchain, [`Error::Build`] when
    /// it fails.
    pub fn build() -> Result<Self, Error> {
        Self::of(versions::asked_for()?.unwrap_or(DEFAULT))
    }

    /// Those of a minor version, like `1.30`, in the same way.
    ///
    /// # Errors
    /// As for [`build`](Self::build).
    pub fn build_version(name: &str) -> Result<Self, Error> {
        Self::of(versions::named(name).ok_or_else(|| Error::UnknownVersion { name: name.to_owned() })?)
    }

    /// Those of the version that the node has, in the same way.
    pub(crate) fn build_for_node() -> Result<Self, Error> {
        Self::of(DEFAULT)
    }

    fn of(minor: Minor) -> Result<Self, Error> {
        compiled(BinarySet::ControlPlane(minor)).map(|dir| Self { dir })
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

    /// `helm` in version 3, in the same way.
    ///
    /// # Errors
    /// As for [`build`](Self::build).
    pub fn build_helm3() -> Result<Self, Error> {
        compiled(BinarySet::Helm3).map(|dir| Self { dir })
    }

    /// `flux`, which applies and prunes as Flux does, in the same way.
    ///
    /// # Errors
    /// As for [`build`](Self::build).
    pub fn build_flux() -> Result<Self, Error> {
        compiled(BinarySet::Flux).map(|dir| Self { dir })
    }

    /// `argocd`, which syncs, compares and prunes as Argo CD does, in the same way.
    ///
    /// # Errors
    /// As for [`build`](Self::build).
    pub fn build_argocd() -> Result<Self, Error> {
        compiled(BinarySet::ArgoCd).map(|dir| Self { dir })
    }

    /// `cert-manager`, which runs cert-manager's controllers or its cainjector, in the same way.
    ///
    /// # Errors
    /// As for [`build`](Self::build).
    pub fn build_cert_manager() -> Result<Self, Error> {
        compiled(BinarySet::CertManager).map(|dir| Self { dir })
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

    /// Whether there is a controller manager.
    pub(crate) fn have_controller_manager(&self) -> bool {
        self.program(CONTROLLER_MANAGER).is_file()
    }
}

/// Which binaries they are, in one line.
impl fmt::Display for Binaries {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let dir = self.dir.display();
        if self.have_controller_manager() {
            return write!(f, "etcd, kube-apiserver, {CONTROLLER_MANAGER} and kubectl from {dir}");
        }
        write!(
            f,
            "etcd, kube-apiserver and kubectl from {dir}, which has no {CONTROLLER_MANAGER}: deleted namespaces stay \
             Terminating (`make controlplane` builds a complete one)"
        )
    }
}

/// Chooses between the directory that the user names, the compiled binaries, and those of setup-envtest. The compiled
/// ones come before those of setup-envtest: they are complete, and Lockstep is tested on them.
fn choose(
    purpose: Purpose,
    assets: Option<PathBuf>,
    cached: Option<PathBuf>,
    envtest: Option<&Path>,
) -> Result<Option<Binaries>, Error> {
    if let Some(dir) = assets {
        return match missing(&dir, purpose) {
            Some((name, needed)) => Err(Error::MissingBinary { dir, name, purpose: needed }),
            None => Ok(Some(Binaries { dir })),
        };
    }
    let found = match purpose {
        Purpose::Tests => cached,
        Purpose::Demo => cached.or_else(|| newest(envtest?)),
    };
    Ok(found.map(|dir| Binaries { dir }))
}

/// The first binary that a directory lacks.
fn missing(dir: &Path, purpose: Purpose) -> Option<(&'static str, &'static str)> {
    let needed = |name| matches!(purpose, Purpose::Tests) || name != CONTROLLER_MANAGER;
    CONTROL_PLANE.into_iter().find(|(name, _)| needed(*name) && !dir.join(name).is_file())
}

/// The newest supported version in the store of setup-envtest that has all it should have.
fn newest(store: &Path) -> Option<PathBuf> {
    let entries = fs::read_dir(store.join("k8s")).ok()?.filter_map(Result::ok);
    let versions = entries.filter_map(|entry| Some((version(entry.file_name().to_str()?)?, entry.path())));
    let usable = versions
        .filter(|(version, dir)| *version >= OLDEST_SUPPORTED && missing(dir, Purpose::Demo).is_none());
    usable.max().map(|(_, dir)| dir)
}

/// The version of a directory for this machine in the store of setup-envtest, like `1.36.0-linux-amd64`.
fn version(name: &str) -> Option<[u32; 3]> {
    // Go's names of the architectures.
    let architecture = match env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    let version = name.strip_suffix(architecture)?.strip_suffix("-linux-")?;
    let numbers: Option<Vec<u32>> = version.split('.').map(|number| number.parse().ok()).collect();
    numbers?.try_into().ok()
}

/// Where setup-envtest keeps its binaries, unless it is told otherwise: see `DefaultStoreDir` in its
/// `store/helpers.go`.
fn envtest_store() -> Option<PathBuf> {
    let data = from_env("XDG_DATA_HOME").or_else(|| env::home_dir().map(|home| home.join(".local/share")))?;
    Some(data.join("kubebuilder-envtest"))
}

/// The kubectl for an existing cluster: the one in PATH, or else ours.
pub(crate) fn any_kubectl() -> Result<PathBuf, Error> {
    let path = env::var_os("PATH").unwrap_or_default();
    match env::split_paths(&path).map(|dir| dir.join("kubectl")).find(|file| file.is_file()) {
        Some(kubectl) => Ok(kubectl),
        None => Binaries::find(Purpose::Demo).map(|binaries| binaries.program("kubectl")),
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

    const ENVTEST: [&str; 3] = ["etcd", "kube-apiserver", "kubectl"];

    /// A directory that is removed in the end.
    struct Sandbox(PathBuf);

    impl Sandbox {
        fn new(name: &str) -> Self {
            let dir = env::temp_dir().join(format!("binaries-{name}-{}", std::process::id()));
            fs::create_dir(&dir).unwrap();
            Self(dir)
        }

        /// A directory with these binaries.
        fn add(&self, name: &str, binaries: &[&str]) -> PathBuf {
            let dir = self.0.join(name);
            fs::create_dir_all(&dir).unwrap();
            for binary in binaries {
                fs::write(dir.join(binary), "").unwrap();
            }
            dir
        }

        /// A version in the store of setup-envtest, for this machine.
        fn installed(&self, version: &str, binaries: &[&str]) -> PathBuf {
            let architecture = if cfg!(target_arch = "x86_64") { "amd64" } else { "arm64" };
            self.add(&format!("k8s/{version}-linux-{architecture}"), binaries)
        }
    }

    impl Drop for Sandbox {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    /// The chosen directory.
    fn chosen(found: Result<Option<Binaries>, Error>) -> Option<PathBuf> {
        found.unwrap().map(|binaries| binaries.dir)
    }

    #[test]
    fn missing_controller_manager_is_reported_in_one_line_with_its_purpose() {
        let sandbox = Sandbox::new("missing");
        let dir = sandbox.add("assets", &ENVTEST);
        let message = choose(Purpose::Tests, Some(dir), None, None).unwrap_err().to_string();
        for part in ["KUBEBUILDER_ASSETS", CONTROLLER_MANAGER, "garbage collector", "namespace controller"] {
            assert!(message.contains(part), "{message}");
        }
        assert_eq!(message.lines().count(), 1);
    }

    #[test]
    fn directory_that_the_user_names_comes_first_and_must_be_able_to_serve() {
        let sandbox = Sandbox::new("assets");
        let (assets, cached) = (sandbox.add("assets", &ENVTEST), sandbox.add("cached", &[]));
        sandbox.installed("1.36.0", &ENVTEST);
        let with = |assets: &Path| {
            choose(Purpose::Demo, Some(assets.to_owned()), Some(cached.clone()), Some(&sandbox.0))
        };
        assert_eq!(chosen(with(&assets)), Some(assets));
        let message = with(&cached).unwrap_err().to_string();
        assert!(message.contains("has no etcd"), "{message}");
    }

    #[test]
    fn compiled_binaries_come_before_those_of_setup_envtest() {
        let sandbox = Sandbox::new("cached");
        let cached = sandbox.add("cached", &[]);
        let installed = sandbox.installed("1.36.0", &ENVTEST);
        let demo = |cached| chosen(choose(Purpose::Demo, None, cached, Some(&sandbox.0)));
        assert_eq!(demo(Some(cached.clone())), Some(cached));
        assert_eq!(demo(None), Some(installed));
    }

    #[test]
    fn tests_never_use_binaries_of_setup_envtest_unasked() {
        let sandbox = Sandbox::new("tests");
        sandbox.installed("1.36.0", &ENVTEST);
        assert_eq!(chosen(choose(Purpose::Tests, None, None, Some(&sandbox.0))), None);
    }

    #[test]
    fn newest_complete_and_supported_version_of_setup_envtest_is_chosen() {
        let sandbox = Sandbox::new("envtest");
        let newest = || newest(&sandbox.0);
        assert_eq!(newest(), None, "there is no store");
        sandbox.installed("1.29.5", &ENVTEST);
        assert_eq!(newest(), None, "older than Lockstep supports");
        let oldest = sandbox.installed("1.30.0", &ENVTEST);
        assert_eq!(newest(), Some(oldest));
        // As text, 1.9.0 and 1.33.9 would come last.
        sandbox.installed("1.9.0", &ENVTEST);
        sandbox.installed("1.33.9", &ENVTEST);
        let good = sandbox.installed("1.33.10", &ENVTEST);
        sandbox.installed("1.34.0", &["etcd", "kubectl"]);
        for name in ["1.35.0-linux-riscv64", "1.35.0-darwin-amd64", "1.35-linux-amd64", "latest"] {
            sandbox.add(&format!("k8s/{name}"), &ENVTEST);
        }
        assert_eq!(newest(), Some(good));
    }

    #[test]
    fn binaries_are_named_in_one_line_with_what_is_missing() {
        let sandbox = Sandbox::new("line");
        let binaries = Binaries { dir: sandbox.add("bin", &ENVTEST) };
        let line = binaries.to_string();
        assert!(
            line.contains("bin, which has no kube-controller-manager: deleted namespaces stay"),
            "{line}"
        );
        sandbox.add("bin", &[CONTROLLER_MANAGER]);
        let line = binaries.to_string();
        assert!(line.contains(CONTROLLER_MANAGER) && !line.contains("Terminating"), "{line}");
    }
}
