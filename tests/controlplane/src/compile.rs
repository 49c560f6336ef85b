//! Compiles the binaries from the pinned Go modules, once per version and user.

use std::env;
use std::fs::{self, File, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::Error;

const GO_MOD: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/go.mod"));
const GO_SUM: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/go.sum"));

const KUBERNETES: &str = "k8s.io/kubernetes";
const ETCD: &str = "go.etcd.io/etcd/server/v3";

/// The directory with the compiled binaries: from the cache, or compiled now, which takes minutes.
///
/// A directory in the cache is complete, because it only gets its name when everything is in it.
/// Any number of processes may call this at once: one compiles, the others wait for it.
pub(crate) fn compiled() -> Result<PathBuf, Error> {
    let (kubernetes, etcd) = (pinned(KUBERNETES)?, pinned(ETCD)?);
    let cache = cache_dir()?.join("lockstep/controlplane");
    let name = format!("{kubernetes}-etcd{}", etcd.trim_start_matches('v'));
    let finished = cache.join(&name);
    if finished.is_dir() {
        return Ok(finished);
    }

    fs::create_dir_all(&cache).map_err(Error::at(&cache))?;
    let _lock = lock(&cache.join("lock"))?;
    if !finished.is_dir() {
        let scratch = cache.join(format!("{name}.unfinished"));
        let binaries = compile(kubernetes, etcd, &scratch)?;
        fs::rename(&binaries, &finished).map_err(Error::at(&finished))?;
        fs::remove_dir_all(&scratch).map_err(Error::at(&scratch))?;
        say(&format!("the control plane is built: {}", finished.display()));
    }
    Ok(finished)
}

/// Compiles everything below `scratch`, and returns the directory with the binaries.
fn compile(kubernetes: &str, etcd: &str, scratch: &Path) -> Result<PathBuf, Error> {
    match Command::new("go").arg("version").stdout(Stdio::null()).status() {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Err(Error::NoGo),
        other => other.map_err(Error::at(Path::new("go")))?,
    };
    say(&format!(
        "building Kubernetes {kubernetes} and etcd {etcd} with Go, once: about six minutes on two cores"
    ));

    // Left over from a build that was interrupted. Ours alone: we hold the lock.
    let _ = fs::remove_dir_all(scratch);
    let binaries = scratch.join("bin");
    fs::create_dir_all(&binaries).map_err(Error::at(&binaries))?;
    for (name, content) in [("go.mod", GO_MOD), ("go.sum", GO_SUM)] {
        let path = scratch.join(name);
        fs::write(&path, content).map_err(Error::at(&path))?;
    }

    let status = Command::new("go")
        .args(["build", "-mod=readonly", "-trimpath", "-ldflags", &linker_flags(kubernetes), "-o", "bin/"])
        .args(
            ["kube-apiserver", "kube-controller-manager", "kubectl"]
                .map(|name| format!("{KUBERNETES}/cmd/{name}")),
        )
        .arg(ETCD)
        .current_dir(scratch)
        // The user's Go workspace knows nothing of these modules.
        .envs([("CGO_ENABLED", "0"), ("GOWORK", "off")])
        .stdout(Stdio::null())
        .status()
        .map_err(Error::at(Path::new("go")))?;
    if !status.success() {
        return Err(Error::Build(status));
    }

    // Go names a program after its package.
    let server = binaries.join("server");
    fs::rename(&server, binaries.join("etcd")).map_err(Error::at(&server))?;
    Ok(binaries)
}

/// Strips the binaries, and gives them the version that a release build would have: without it, the
/// API server takes itself for v0.0.0 and offers other APIs.
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
    GO_MOD
        .lines()
        .filter_map(|line| line.trim_start().strip_prefix(module)?.split_whitespace().next())
        .find(|version| version.starts_with('v'))
        .ok_or(Error::NotPinned(module))
}

/// `$XDG_CACHE_HOME`, which counts only when it is absolute, or `~/.cache`.
fn cache_dir() -> Result<PathBuf, Error> {
    env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .filter(|dir| dir.is_absolute())
        .or_else(|| env::home_dir().map(|home| home.join(".cache")))
        .ok_or(Error::NoCacheDir)
}

/// Held until the returned file is dropped, or this process ends.
fn lock(path: &Path) -> Result<File, Error> {
    let file = File::create(path).map_err(Error::at(path))?;
    match file.try_lock() {
        Ok(()) => return Ok(file),
        Err(TryLockError::WouldBlock) => say("waiting for another process that builds the control plane"),
        Err(TryLockError::Error(error)) => return Err(Error::at(path)(error)),
    }
    file.lock().map_err(Error::at(path))?;
    Ok(file)
}

/// Writes to stderr itself: the test harness swallows what `eprintln!` prints, and a first test run
/// would seem to hang for minutes.
fn say(message: &str) {
    // Not being heard is no reason to fail.
    let _ = writeln!(io::stderr(), "controlplane: {message}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_come_from_go_mod() {
        for module in [KUBERNETES, ETCD] {
            let version = pinned(module).unwrap();
            assert_eq!(version.split('.').count(), 3, "{module} {version}");
        }
        assert!(matches!(pinned("example.com/unknown"), Err(Error::NotPinned(_))));
    }

    #[test]
    fn binaries_know_their_version() {
        let flags = linker_flags("v1.36.3");
        for flag in [".gitVersion=v1.36.3", ".gitMajor=1", ".gitMinor=36"] {
            assert!(flags.contains(flag), "{flags}");
        }
    }
}
