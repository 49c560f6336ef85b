//! Compiles the binaries from the pinned Go modules, once per version and user.

use std::env;
use std::fs::{self, File, TryLockError};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use crate::beside::Beside;
use crate::display::Display;
use crate::progress::{self, Progress};
use crate::{Error, display, go};

const GO_MOD: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/go.mod"));
const GO_SUM: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/go.sum"));

const HELM_GO_MOD: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../helm/go.mod"));
const HELM_GO_SUM: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../helm/go.sum"));

const PAUSE: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/pause/main.go"));

const KUBERNETES: &str = "k8s.io/kubernetes";
const ETCD: &str = "go.etcd.io/etcd/server/v3";
const HELM: &str = "helm.sh/helm/v4";

/// Binaries that are compiled together and share a directory of the cache.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum BinarySet {
    /// etcd, kube-apiserver, kube-controller-manager and kubectl.
    ControlPlane,
    /// kubelet, kube-scheduler, kube-proxy, and the program of pause containers.
    Node,
    /// etcdctl and etcdutl.
    EtcdTools,
    /// helm, from a separate Go module, so that it does not change the control plane's dependencies.
    Helm,
}

impl BinarySet {
    /// The name of its directory in the cache.
    fn name(self) -> Result<String, Error> {
        let kubernetes = pinned(KUBERNETES)?;
        match self {
            Self::ControlPlane => Ok(format!("{kubernetes}-etcd{}", pinned(ETCD)?.trim_start_matches('v'))),
            Self::Node => Ok(format!("{kubernetes}-node")),
            Self::EtcdTools => Ok(format!("etcd-tools-{}", pinned(ETCD)?)),
            Self::Helm => Ok(format!("helm-{}", pinned(HELM)?)),
        }
    }

    /// The files of the Go module.
    fn files(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::ControlPlane | Self::Node | Self::EtcdTools => {
                &[("go.mod", GO_MOD), ("go.sum", GO_SUM), ("pause/main.go", PAUSE)]
            }
            Self::Helm => &[("go.mod", HELM_GO_MOD), ("go.sum", HELM_GO_SUM)],
        }
    }

    /// The Go packages.
    fn packages(self) -> Vec<String> {
        let (programs, other): (&[&str], &[&str]) = match self {
            Self::ControlPlane => (&["kube-apiserver", "kube-controller-manager", "kubectl"], &[ETCD]),
            Self::Node => (&["kubelet", "kube-proxy", "kube-scheduler"], &["./pause"]),
            Self::EtcdTools => (&[], &["go.etcd.io/etcd/etcdctl/v3", "go.etcd.io/etcd/etcdutl/v3"]),
            Self::Helm => (&[], &["helm.sh/helm/v4/cmd/helm"]),
        };
        let programs = programs.iter().map(|name| format!("{KUBERNETES}/cmd/{name}"));
        programs.chain(other.iter().map(ToString::to_string)).collect()
    }

    /// What the progress bar is called.
    fn title(self) -> &'static str {
        match self {
            Self::ControlPlane => "control plane",
            Self::Node => "node",
            Self::EtcdTools => "etcd tools",
            Self::Helm => "helm",
        }
    }

    fn announce(self) -> Result<String, Error> {
        let (kubernetes, etcd) = (pinned(KUBERNETES)?, pinned(ETCD)?);
        Ok(match self {
            Self::ControlPlane => format!(
                "building Kubernetes {kubernetes} and etcd {etcd} with Go, once: about six minutes on two cores"
            ),
            Self::Node => format!(
                "building the kubelet of Kubernetes {kubernetes} with Go, once: about three minutes on two cores"
            ),
            Self::EtcdTools => format!("building etcdctl and etcdutl {etcd} with Go, once: about one minute"),
            Self::Helm => {
                format!("building Helm {} with Go, once: about three minutes on two cores", pinned(HELM)?)
            }
        })
    }
}

/// The directory with the compiled binaries: from the cache, or compiled now, which takes minutes.
///
/// A directory in the cache is complete, because it is renamed into place. Any number of processes may call this at once:
/// one compiles, the others wait for it.
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
    let cache = cache_dir()?;
    let name = set.name()?;
    let finished = cache.join(&name);
    fs::create_dir_all(&cache).map_err(Error::at(&cache))?;
    let _lock = lock(&cache.join("lock"), "builds the control plane")?;
    if !finished.is_dir() {
        let scratch = cache.join(format!("{name}.unfinished"));
        let binaries = compile(set, &scratch, &mut display, go_on);
        display.end();
        fs::rename(binaries?, &finished).map_err(Error::at(&finished))?;
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
    for (name, content) in set.files() {
        let path = scratch.join(name);
        fs::write(&path, content).map_err(Error::at(&path))?;
    }

    let linker_flags = match set {
        BinarySet::ControlPlane | BinarySet::Node => linker_flags(pinned(KUBERNETES)?),
        BinarySet::Helm | BinarySet::EtcdTools => "-s -w".to_owned(),
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

    if set == BinarySet::ControlPlane {
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

/// The version of a module in `go.mod`, like `v1.36.3`.
fn pinned(module: &'static str) -> Result<&'static str, Error> {
    let go_mod = if module == HELM { HELM_GO_MOD } else { GO_MOD };
    go_mod
        .lines()
        .filter_map(|line| line.trim_start().strip_prefix(module)?.split_whitespace().next())
        .find(|version| version.starts_with('v'))
        .ok_or(Error::NotPinned(module))
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
        for module in [KUBERNETES, ETCD, HELM] {
            let version = pinned(module).unwrap();
            assert_eq!(version.split('.').count(), 3, "{module} {version}");
        }
        assert!(matches!(pinned("example.com/unknown"), Err(Error::NotPinned(_))));
    }

    #[test]
    fn linker_flags_set_the_version() {
        let flags = linker_flags("v1.36.3");
        for flag in [".gitVersion=v1.36.3", ".gitMajor=1", ".gitMinor=36"] {
            assert!(flags.contains(flag), "{flags}");
        }
    }
}
