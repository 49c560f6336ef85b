//! Compiles the binaries from the pinned Go modules, once per version and user.

use std::env;
use std::fs::{self, File, TryLockError};
use std::hash::{DefaultHasher, Hasher};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use crate::beside::Beside;
use crate::display::Display;
use crate::progress::{self, Progress};
use crate::versions::{DEFAULT, Minor};
use crate::{Error, display, go};

const HELM_GO_MOD: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../helm/go.mod"));
const HELM_GO_SUM: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../helm/go.sum"));

const HELM3_GO_MOD: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../helm3/go.mod"));
const HELM3_GO_SUM: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../helm3/go.sum"));

const FLUX_GO_MOD: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../flux/go.mod"));
const FLUX_GO_SUM: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../flux/go.sum"));
const FLUX_MAIN: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../flux/main.go"));

const ARGOCD_GO_MOD: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../argocd/go.mod"));
const ARGOCD_GO_SUM: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../argocd/go.sum"));
const ARGOCD_MAIN: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../argocd/main.go"));

const CERT_MANAGER_GO_MOD: &str =
    include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../cert-manager/go.mod"));
const CERT_MANAGER_GO_SUM: &str =
    include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../cert-manager/go.sum"));
const CERT_MANAGER_MAIN: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../cert-manager/main.go"));

const PAUSE: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/pause/main.go"));

const KUBERNETES: &str = "k8s.io/kubernetes";
const ETCD: &str = "go.etcd.io/etcd/server/v3";
const HELM: &str = "helm.sh/helm/v4";
const HELM3: &str = "helm.sh/helm/v3";
const FLUX: &str = "github.com/fluxcd/pkg/ssa";
const ARGOCD: &str = "github.com/argoproj/argo-cd/gitops-engine";
const CERT_MANAGER: &str = "github.com/cert-manager/cert-manager";

/// Binaries that are compiled together and share a directory of the cache.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum BinarySet {
    /// kube-apiserver, kube-controller-manager and kubectl of a minor version, and etcd.
    ControlPlane(Minor),
    /// kubelet, kube-scheduler, kube-proxy, and the program of pause containers.
    Node,
    /// etcdctl and etcdutl.
    EtcdTools,
    /// helm, from a separate Go module, so that it does not change the control plane's dependencies.
    Helm,
    /// Helm 3, from a Go module of its own.
    Helm3,
    /// A program with Flux's code for applying and pruning, from a Go module of its own.
    Flux,
    /// A program with the engine by which Argo CD syncs, compares and prunes, from a Go module of its own.
    ArgoCd,
    /// A program with cert-manager's controllers and cainjector, from a Go module of its own.
    CertManager,
}

impl BinarySet {
    /// The name of its directory in the cache.
    fn name(self) -> Result<String, Error> {
        Ok(match self {
            Self::ControlPlane(_) => {
                format!("{}-etcd{}", self.pinned(KUBERNETES)?, etcd_version()?.trim_start_matches('v'))
            }
            Self::Node => format!("{}-node", self.pinned(KUBERNETES)?),
            Self::EtcdTools => format!("etcd-tools-{}", etcd_version()?),
            Self::Helm => format!("helm-{}", self.pinned(HELM)?),
            Self::Helm3 => format!("helm-{}", self.pinned(HELM3)?),
            Self::Flux => format!("flux-ssa-{}-{}", self.pinned(FLUX)?, fingerprint(FLUX_MAIN)),
            Self::ArgoCd => format!("argocd-{}-{}", self.pinned(ARGOCD)?, fingerprint(ARGOCD_MAIN)),
            Self::CertManager => {
                format!("cert-manager-{}-{}", self.pinned(CERT_MANAGER)?, fingerprint(CERT_MANAGER_MAIN))
            }
        })
    }

    /// `go.mod` and `go.sum` of the Go module.
    fn module(self) -> (&'static str, &'static str) {
        match self {
            Self::ControlPlane(minor) => (minor.go_mod, minor.go_sum),
            Self::Node | Self::EtcdTools => (DEFAULT.go_mod, DEFAULT.go_sum),
            Self::Helm => (HELM_GO_MOD, HELM_GO_SUM),
            Self::Helm3 => (HELM3_GO_MOD, HELM3_GO_SUM),
            Self::Flux => (FLUX_GO_MOD, FLUX_GO_SUM),
            Self::ArgoCd => (ARGOCD_GO_MOD, ARGOCD_GO_SUM),
            Self::CertManager => (CERT_MANAGER_GO_MOD, CERT_MANAGER_GO_SUM),
        }
    }

    /// The program of ours in that module, as a path and its text.
    fn program(self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::Node => Some(("pause/main.go", PAUSE)),
            Self::Flux => Some(("main.go", FLUX_MAIN)),
            Self::ArgoCd => Some(("main.go", ARGOCD_MAIN)),
            Self::CertManager => Some(("main.go", CERT_MANAGER_MAIN)),
            Self::ControlPlane(_) | Self::EtcdTools | Self::Helm | Self::Helm3 => None,
        }
    }

    /// The version of a module in its `go.mod`, like `v1.37.1`.
    fn pinned(self, module: &'static str) -> Result<&'static str, Error> {
        let lines = self.module().0.lines().map(|line| line.trim_start().trim_start_matches("require "));
        let mut versions = lines.filter_map(|line| line.strip_prefix(module)?.split_whitespace().next());
        versions.find(|version| version.starts_with('v')).ok_or(Error::NotPinned(module))
    }

    /// Whether etcd is compiled with it. Other control planes get the same etcd.
    fn has_etcd(self) -> bool {
        self == Self::ControlPlane(DEFAULT)
    }

    /// The Go packages.
    fn packages(self) -> Vec<String> {
        let (programs, other): (&[&str], &[&str]) = match self {
            Self::ControlPlane(_) => (
                &["kube-apiserver", "kube-controller-manager", "kubectl"],
                if self.has_etcd() { &[ETCD] } else { &[] },
            ),
            Self::Node => (&["kubelet", "kube-proxy", "kube-scheduler"], &["./pause"]),
            Self::EtcdTools => (&[], &["go.etcd.io/etcd/etcdctl/v3", "go.etcd.io/etcd/etcdutl/v3"]),
            Self::Helm => (&[], &["helm.sh/helm/v4/cmd/helm"]),
            Self::Helm3 => (&[], &["helm.sh/helm/v3/cmd/helm"]),
            Self::Flux => (&[], &["lockstep.test/flux"]),
            Self::ArgoCd => (&[], &["lockstep.test/argocd"]),
            Self::CertManager => (&[], &["lockstep.test/cert-manager"]),
        };
        let programs = programs.iter().map(|name| format!("{KUBERNETES}/cmd/{name}"));
        programs.chain(other.iter().map(ToString::to_string)).collect()
    }

    /// What the progress bar is called.
    fn title(self) -> &'static str {
        match self {
            Self::ControlPlane(_) => "control plane",
            Self::Node => "node",
            Self::EtcdTools => "etcd tools",
            Self::Helm => "helm",
            Self::Helm3 => "helm 3",
            Self::Flux => "flux",
            Self::ArgoCd => "argocd",
            Self::CertManager => "cert-manager",
        }
    }

    fn announce(self) -> Result<String, Error> {
        let (what, time) = match self {
            Self::ControlPlane(_) => {
                let etcd =
                    if self.has_etcd() { format!(" and etcd {}", etcd_version()?) } else { String::new() };
                (format!("Kubernetes {}{etcd}", self.pinned(KUBERNETES)?), "six minutes on two cores")
            }
            Self::Node => (
                format!("the kubelet of Kubernetes {}", self.pinned(KUBERNETES)?),
                "three minutes on two cores",
            ),
            Self::EtcdTools => (format!("etcdctl and etcdutl {}", etcd_version()?), "one minute"),
            Self::Helm => (format!("Helm {}", self.pinned(HELM)?), "three minutes on two cores"),
            Self::Helm3 => (format!("Helm {}", self.pinned(HELM3)?), "three minutes on two cores"),
            Self::Flux => (format!("Flux's ssa {}", self.pinned(FLUX)?), "three minutes on two cores"),
            Self::ArgoCd => {
                (format!("Argo CD's engine {}", self.pinned(ARGOCD)?), "three minutes on two cores")
            }
            Self::CertManager => {
                (format!("cert-manager {}", self.pinned(CERT_MANAGER)?), "four minutes on two cores")
            }
        };
        Ok(format!("building {what} with Go, once: about {time}"))
    }
}

/// Changes with a program of ours. Another version of Rust may compute another one, and then it is compiled again.
fn fingerprint(program: &str) -> String {
    let mut hasher = DefaultHasher::new();
    hasher.write(program.as_bytes());
    format!("{:016x}", hasher.finish())
}

/// The directory with the compiled binaries: from the cache, or compiled now, which takes minutes.
///
/// A directory in the cache is complete, because it is renamed into place. Any number of processes may call this at
/// once: one compiles, the others wait for it.
pub(crate) fn compiled(set: BinarySet) -> Result<PathBuf, Error> {
    compiled_while(set, Display::new(set.title()), || Ok(()))
}

/// As [`compiled`], and runs a command at the same time. If either fails, the other is ended.
pub(crate) fn compiled_beside(set: BinarySet, command: Command) -> Result<PathBuf, Error> {
    if cached(set)?.is_some() || is_locked(&cache_dir()?.join("lock")) {
        // Nothing is compiled here. Another process may do it: its result is needed only after the command.
        Beside::run_alone(command)?;
        return compiled(set);
    }
    let display = Display::new(set.title());
    let mut beside = Beside::start(command, &display)?;
    let binaries = compiled_while(set, display, || beside.check())?;
    beside.wait()?;
    Ok(binaries)
}

/// The directory with the compiled binaries, if it is in the cache.
pub(crate) fn cached(set: BinarySet) -> Result<Option<PathBuf>, Error> {
    let finished = cache_dir()?.join(set.name()?);
    Ok(finished.is_dir().then_some(finished))
}

/// Compiles until `go_on` returns an error.
fn compiled_while(
    set: BinarySet,
    mut display: Display,
    go_on: impl FnMut() -> Result<(), Error>,
) -> Result<PathBuf, Error> {
    if let Some(finished) = cached(set)? {
        return Ok(finished);
    }
    let etcd = match set {
        // Before the lock, which the other build takes, too.
        BinarySet::ControlPlane(_) if !set.has_etcd() => {
            Some(compiled(BinarySet::ControlPlane(DEFAULT))?.join("etcd"))
        }
        _ => None,
    };
    let cache = cache_dir()?;
    let name = set.name()?;
    let finished = cache.join(&name);
    fs::create_dir_all(&cache).map_err(Error::at(&cache))?;
    let _lock = lock(&cache.join("lock"), "builds the control plane")?;
    if !finished.is_dir() {
        let scratch = cache.join(format!("{name}.unfinished"));
        let binaries = compile(set, &scratch, &mut display, go_on);
        display.end();
        let binaries = binaries?;
        if let Some(etcd) = etcd {
            fs::hard_link(&etcd, binaries.join("etcd")).map_err(Error::at(&etcd))?;
        }
        fs::rename(binaries, &finished).map_err(Error::at(&finished))?;
        fs::remove_dir_all(&scratch).map_err(Error::at(&scratch))?;
        display.line(&format!("controlplane: built: {}", finished.display()));
    }
    Ok(finished)
}

/// Compiles everything below `scratch`, and returns the directory with the binaries.
fn compile(
    set: BinarySet,
    scratch: &Path,
    display: &mut Display,
    mut go_on: impl FnMut() -> Result<(), Error>,
) -> Result<PathBuf, Error> {
    if !go::is_installed()? {
        return Err(Error::NoGo);
    }
    display.line(&format!("controlplane: {}", set.announce()?));

    // A leftover of an interrupted build; nobody else uses it, because we hold the lock.
    let _ = fs::remove_dir_all(scratch);
    let binaries = scratch.join("bin");
    for dir in [&binaries, &scratch.join("pause")] {
        fs::create_dir_all(dir).map_err(Error::at(dir))?;
    }
    let (go_mod, go_sum) = set.module();
    for (name, content) in [("go.mod", go_mod), ("go.sum", go_sum)].into_iter().chain(set.program()) {
        let path = scratch.join(name);
        fs::write(&path, content).map_err(Error::at(&path))?;
    }

    let linker_flags = match set {
        BinarySet::ControlPlane(_) | BinarySet::Node => linker_flags(set.pinned(KUBERNETES)?),
        BinarySet::Helm
        | BinarySet::Helm3
        | BinarySet::EtcdTools
        | BinarySet::Flux
        | BinarySet::ArgoCd
        | BinarySet::CertManager => "-s -w".to_owned(),
    };
    let packages = set.packages();
    let flags = ["-mod=readonly", "-trimpath", "-ldflags", &linker_flags];
    let arguments = |command: &[&'static str], more: &[&'static str]| -> Vec<&str> {
        let packages = packages.iter().map(String::as_str);
        command.iter().copied().chain(flags).chain(more.iter().copied()).chain(packages).collect()
    };

    let mut modules = 0;
    let list = go::run(scratch, &arguments(&["list", "-deps"], &["-f", progress::LIST_FORMAT]), |line| {
        match line {
            Some(line) if line.starts_with("go: downloading ") => modules += 1,
            Some(line) => display.line(line),
            None => {}
        }
        let text = match modules {
            0 => "reading the packages to compile".to_owned(),
            _ => format!("downloading their source: {modules} Go modules so far"),
        };
        display.show(0.0, &text);
        go_on()
    })?;

    let mut progress = Progress::new(&list, packages.len());
    let start = Instant::now();
    go::run(scratch, &arguments(&["build", "-v"], &["-o", "bin/"]), |line| {
        if let Some(line) = line
            && !progress.read(line)
        {
            display.line(line);
        }
        let linked = fs::read_dir(&binaries).map_or(0, Iterator::count);
        progress.update(linked, start.elapsed());
        display.show(progress.fraction(), &progress.to_string());
        go_on()
    })?;

    if set.has_etcd() {
        // Go names a program after its package.
        let server = binaries.join("server");
        fs::rename(&server, binaries.join("etcd")).map_err(Error::at(&server))?;
    }
    Ok(binaries)
}

/// Strips the binaries and sets the version of a release build: without it, the API server considers itself v0.0.0 and
/// serves other APIs.
fn linker_flags(version: &str) -> String {
    let mut numbers = version.trim_start_matches('v').split('.');
    let (major, minor) = (numbers.next().unwrap_or_default(), numbers.next().unwrap_or_default());
    let package = "k8s.io/component-base/version";
    format!(
        "-s -w -X {package}.gitVersion={version} -X {package}.gitMajor={major} -X {package}.gitMinor={minor}"
    )
}

/// The version of etcd, which every control plane shares.
fn etcd_version() -> Result<&'static str, Error> {
    BinarySet::ControlPlane(DEFAULT).pinned(ETCD)
}

/// Our directory in `$XDG_CACHE_HOME`, if that is absolute, or in `~/.cache`.
pub(crate) fn cache_dir() -> Result<PathBuf, Error> {
    env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .filter(|dir| dir.is_absolute())
        .or_else(|| env::home_dir().map(|home| home.join(".cache")))
        .map(|cache| cache.join("lockstep/controlplane"))
        .ok_or(Error::NoCacheDir)
}

/// Whether another process holds a lock.
fn is_locked(path: &Path) -> bool {
    File::open(path).is_ok_and(|file| matches!(file.try_lock(), Err(TryLockError::WouldBlock)))
}

/// Takes a lock, held until the returned file is dropped or this process ends. While waiting, prints `what` its holder
/// does.
pub(crate) fn lock(path: &Path, what: &str) -> Result<File, Error> {
    // A directory can be locked, too, which leaves no lock file behind.
    let open = if path.is_dir() { File::open(path) } else { File::create(path) };
    let file = open.map_err(Error::at(path))?;
    match file.try_lock() {
        Ok(()) => return Ok(file),
        Err(TryLockError::WouldBlock) => {
            display::line(&format!("controlplane: waiting for another process that {what}"));
        }
        Err(TryLockError::Error(error)) => return Err(Error::at(path)(error)),
    }
    file.lock().map_err(Error::at(path))?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_from_go_mod() {
        let plane = BinarySet::ControlPlane(DEFAULT);
        let modules = [
            (plane, KUBERNETES),
            (plane, ETCD),
            (BinarySet::Helm, HELM),
            (BinarySet::Helm3, HELM3),
            (BinarySet::Flux, FLUX),
            (BinarySet::ArgoCd, ARGOCD),
            (BinarySet::CertManager, CERT_MANAGER),
        ];
        for (set, module) in modules {
            let version = set.pinned(module).unwrap();
            assert_eq!(version.split('.').count(), 3, "{module} {version}");
        }
        assert!(matches!(plane.pinned("example.com/unknown"), Err(Error::NotPinned(_))));
    }

    #[test]
    fn control_planes_of_two_minors_have_directories_of_their_own() {
        let oldest = BinarySet::ControlPlane(crate::versions::named("1.30").unwrap());
        let name = oldest.name().unwrap();
        assert!(name.starts_with("v1.30.") && name.contains("-etcd3."), "{name}");
        assert_ne!(name, BinarySet::ControlPlane(DEFAULT).name().unwrap());
    }

    #[test]
    fn linker_flags_set_the_version() {
        let flags = linker_flags("v1.37.1");
        for flag in [".gitVersion=v1.37.1", ".gitMajor=1", ".gitMinor=37"] {
            assert!(flags.contains(flag), "{flags}");
        }
    }
}
