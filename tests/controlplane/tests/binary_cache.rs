//! How the binaries are built and cached, with a fake `go`, because the real one takes minutes.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::thread;
use std::time::{Duration, Instant};

/// A cache directory, and a `PATH` that contains only the test's `go`.
struct Sandbox(PathBuf);

impl Sandbox {
    fn new(name: &str) -> Self {
        let dir = std::env::temp_dir().join(format!("builds-{name}-{}", std::process::id()));
        fs::create_dir_all(dir.join("path")).unwrap();
        Self(dir)
    }

    /// Installs a `go` that runs this script on `go build`, and has one package to compile.
    fn go(&self, build: &str) {
        fs::write(self.0.join("path/on-build"), build).unwrap();
        let go = self.0.join("path/go");
        // Not written here: a file that another test's fork still has open for writing cannot be executed.
        let _ = fs::remove_file(&go);
        symlink(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/go"), go).unwrap();
    }

    fn calls(&self) -> PathBuf {
        self.0.join("calls")
    }

    fn build(&self) -> Output {
        self.run(&["build"])
    }

    /// Runs `controlplane prepare` with a command of the shell.
    fn prepare(&self, purpose: &str, command: &str) -> Output {
        self.run(&["prepare", purpose, "/bin/sh", "-c", command])
    }

    fn run(&self, arguments: &[&str]) -> Output {
        self.run_with(arguments, &[])
    }

    /// As [`run`](Self::run), with these environment variables.
    fn run_with(&self, arguments: &[&str], variables: &[(&str, &str)]) -> Output {
        // A background job of a script ignores SIGINT, and its children inherit that.
        let mut command = Command::new("/usr/bin/env");
        command.args(["--default-signal=INT", env!("CARGO_BIN_EXE_controlplane")]).args(arguments);
        command.env("PATH", self.0.join("path")).env_remove("KUBEBUILDER_ASSETS");
        command.env_remove("LOCKSTEP_TEST_KUBERNETES").envs(variables.iter().copied());
        command.env("XDG_CACHE_HOME", &self.0).env("XDG_DATA_HOME", self.0.join("data"));
        command.output().unwrap()
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

#[test]
fn command_runs_while_go_builds() {
    let sandbox = Sandbox::new("beside");
    // Each waits for the other.
    let meeting = |mine: &str, other: &str| {
        format!(
            ": > '{dir}/{mine}'; until [ -e '{dir}/{other}' ]; do /bin/sleep 0.01; done",
            dir = sandbox.0.display()
        )
    };
    sandbox.go(&format!("echo fmt >&2; echo 'a warning of Go' >&2; {}; {BUILDS}", meeting("go", "command")));
    let output = sandbox.prepare("tests", &format!("echo compiling >&2; {}", meeting("command", "go")));
    let message = text(&output.stderr);
    assert!(output.status.success(), "{message}");
    for line in ["compiling", "a warning of Go"] {
        assert!(message.lines().any(|printed| printed == line), "{message}");
    }
    for hidden in ["fmt", "go: downloading"] {
        assert!(!message.lines().any(|line| line.starts_with(hidden)), "{message}");
    }
}

#[test]
fn failed_command_ends_the_build_and_is_named_in_the_last_line() {
    let sandbox = Sandbox::new("command-fails");
    sandbox.go(&format!(": > '{}/go'; exec /bin/sleep 600", sandbox.0.display()));
    let command = format!(
        "until [ -e '{}/go' ]; do /bin/sleep 0.01; done; echo 'no type' >&2; exit 7",
        sandbox.0.display()
    );
    let start = Instant::now();
    let failed = sandbox.prepare("tests", &command);
    assert!(start.elapsed() < Duration::from_secs(60), "Go was not ended");
    assert!(!failed.status.success());
    let message = text(&failed.stderr);
    assert!(message.lines().any(|line| line == "no type"), "{message}");
    let last = message.lines().last().unwrap();
    assert!(last.starts_with("controlplane: `/bin/sh -c ") && last.contains("exit status: 7"), "{message}");
}

#[test]
fn failed_build_ends_the_command_and_is_named_in_the_last_line() {
    let sandbox = Sandbox::new("go-fails");
    sandbox.go("echo 'no such module' >&2; exit 3");
    let start = Instant::now();
    let failed = sandbox.prepare("tests", "exec /bin/sleep 600");
    assert!(start.elapsed() < Duration::from_secs(60), "the command was not ended");
    assert!(!failed.status.success());
    let message = text(&failed.stderr);
    assert!(message.contains("no such module"), "{message}");
    assert!(message.lines().last().unwrap().contains("`go build` failed (exit status: 3)"), "{message}");
}

#[test]
fn nothing_is_built_for_the_demo_where_setup_envtest_has_installed_a_control_plane() {
    let sandbox = Sandbox::new("envtest");
    let architecture = if cfg!(target_arch = "x86_64") { "amd64" } else { "arm64" };
    let installed = sandbox.0.join(format!("data/kubebuilder-envtest/k8s/1.35.0-linux-{architecture}"));
    fs::create_dir_all(&installed).unwrap();
    for name in ["etcd", "kube-apiserver", "kubectl"] {
        fs::write(installed.join(name), "").unwrap();
    }
    let output = sandbox.prepare("demo", "echo compiling >&2");
    assert_eq!((output.status.success(), text(&output.stderr)), (true, "compiling"));
    let failed = sandbox.prepare("demo", "exit 7");
    assert!(!failed.status.success());

    let tests = sandbox.prepare("tests", "exec /bin/sleep 600");
    assert!(text(&tests.stderr).contains("`go` is not in PATH"), "tests use the pinned versions");
}

#[test]
fn another_minor_version_is_built_into_a_directory_of_its_own_with_the_same_etcd() {
    let sandbox = Sandbox::new("minor");
    sandbox.go(&format!("echo \"$*\" > bin/kube-apiserver; {BUILDS}").replace(": > bin/$name", ": >> bin/$name"));
    let oldest = sandbox.run(&["build", "1.30"]);
    assert!(oldest.status.success(), "{}", text(&oldest.stderr));
    let dir = Path::new(text(&oldest.stdout));
    for name in ["etcd", "kube-apiserver", "kube-controller-manager", "kubectl"] {
        assert!(dir.join(name).is_file(), "{name}");
    }
    assert!(fs::read_to_string(dir.join("kube-apiserver")).unwrap().contains("gitVersion=v1.30."));

    // The default was built for its etcd, and is there now.
    let default = sandbox.build();
    assert_eq!(text(&default.stderr), "");
    assert_ne!(text(&default.stdout), text(&oldest.stdout));
    let asked = sandbox.run_with(&["build"], &[("LOCKSTEP_TEST_KUBERNETES", "1.30")]);
    assert_eq!(text(&asked.stdout), text(&oldest.stdout));
    let calls = fs::read_to_string(sandbox.calls()).unwrap();
    assert_eq!(calls.lines().count(), 2, "{calls}");
    let empty = sandbox.run_with(&["build"], &[("LOCKSTEP_TEST_KUBERNETES", "")]);
    assert_eq!(text(&empty.stdout), text(&default.stdout));
}

#[test]
fn unknown_version_or_two_at_once_is_refused_in_one_line() {
    let sandbox = Sandbox::new("unknown");
    let message = |arguments: &[&str], variables: &[(&str, &str)]| {
        let output = sandbox.run_with(arguments, variables);
        assert!(!output.status.success());
        let message = text(&output.stderr).to_owned();
        assert_eq!(message.lines().count(), 1, "{message}");
        message
    };
    let known = format!("take {}", controlplane::versions().collect::<Vec<_>>().join(", "));
    let named = message(&["build", "1.29"], &[]);
    assert!(named.contains("Kubernetes \"1.29\" cannot be built") && named.ends_with(&known), "{named}");
    let asked = message(&["prepare", "tests", "/bin/true"], &[("LOCKSTEP_TEST_KUBERNETES", "v1.30.14")]);
    assert!(asked.contains("Kubernetes \"v1.30.14\" cannot be built") && asked.ends_with(&known), "{asked}");
    let both = [("LOCKSTEP_TEST_KUBERNETES", "1.30"), ("KUBEBUILDER_ASSETS", "/usr/bin")];
    let both = message(&["prepare", "tests", "/bin/true"], &both);
    assert!(both.contains("KUBEBUILDER_ASSETS=/usr/bin and LOCKSTEP_TEST_KUBERNETES=1.30"), "{both}");
}
