//! How the binaries are built and cached, with a fake `go`, because the real one takes minutes.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::thread;

/// A cache directory, and a `PATH` that contains only the test's `go`.
struct Sandbox(PathBuf);

impl Sandbox {
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("builds-{name}-{}", std::process::id()));
        fs::create_dir_all(dir.join("path")).unwrap();
        Self(dir)
    }

    /// Installs a `go` that runs this script on `go build`.
    fn go(&self, build: &str) {
        let script = format!(
            "#!/bin/sh\n[ \"$1\" = build ] || exit 0\necho \"$*\" >> '{}'\n{build}\n",
            self.calls().display()
        );
        let go = self.0.join("path/go");
        fs::write(&go, script).unwrap();
        fs::set_permissions(go, fs::Permissions::from_mode(0o755)).unwrap();
    }

    fn calls(&self) -> PathBuf {
        self.0.join("calls")
    }

    fn build(&self) -> Output {
        Command::new(env!("CARGO_BIN_EXE_controlplane"))
            .arg("build")
            .env("PATH", self.0.join("path"))
            .env("XDG_CACHE_HOME", &self.0)
            .output()
            .unwrap()
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        fs::remove_dir_all(&self.0).unwrap();
    }
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap().trim_end()
}

/// Writes what `go build` writes, with shell builtins only. It takes long enough for others to wait for it.
const BUILDS: &str = "
    for name in kube-apiserver kube-controller-manager kubectl server; do : > bin/$name; done
    /bin/sleep 0.3";

#[test]
fn concurrent_processes_build_once_and_later_calls_print_nothing() {
    let sandbox = Sandbox::new("once");
    sandbox.go(BUILDS);
    let outputs: Vec<Output> = thread::scope(|scope| {
        let builds: Vec<_> = (0..4).map(|_| scope.spawn(|| sandbox.build())).collect();
        builds.into_iter().map(|build| build.join().unwrap()).collect()
    });
    let calls = fs::read_to_string(sandbox.calls()).unwrap();
    assert_eq!(calls.lines().count(), 1, "{calls}");
    assert!(outputs.iter().any(|output| text(&output.stderr).contains("about six minutes")));

    let again = sandbox.build();
    let dir = Path::new(text(&again.stdout));
    assert!(dir.starts_with(sandbox.0.join("lockstep/controlplane")), "{dir:?}");
    assert_eq!(text(&again.stderr), "");
    for output in outputs {
        assert_eq!(output.stdout, again.stdout);
    }
    for name in ["etcd", "kube-apiserver", "kube-controller-manager", "kubectl"] {
        assert!(dir.join(name).is_file(), "{name}");
    }
    assert_eq!(fs::read_dir(dir.parent().unwrap()).unwrap().count(), 2, "the binaries and the lock");
}

#[test]
fn failed_build_is_repeated_by_the_next_call() {
    let sandbox = Sandbox::new("fails");
    sandbox.go(&format!("{BUILDS}\necho 'no sandbox left' >&2; exit 3"));
    let failed = sandbox.build();
    assert!(!failed.status.success());
    let message = text(&failed.stderr);
    assert!(message.contains("no sandbox left"), "{message}");
    assert!(message.contains("`go build` failed"), "{message}");

    sandbox.go(BUILDS);
    assert!(sandbox.build().status.success());
}

#[test]
fn missing_go_is_reported_in_one_line_with_the_alternatives() {
    let sandbox = Sandbox::new("no-go");
    let failed = sandbox.build();
    assert!(!failed.status.success());
    let message = text(&failed.stderr);
    assert_eq!(message.lines().count(), 1, "{message}");
    for part in ["`go` is not in PATH", "KUBEBUILDER_ASSETS", "LOCKSTEP_TEST_KUBECONFIG"] {
        assert!(message.contains(part), "{message}");
    }
}
