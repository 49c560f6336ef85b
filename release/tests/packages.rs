//! What `make dist` writes is the same for the same files, and the programs for which it is made accept it. By default
//! a small script stands for the binary; `make test-dist` sets `LOCKSTEP_TEST_DIST` to the directory of a real release.

use std::{
    collections::{BTreeMap, BTreeSet},
    env, fs,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use controlplane::{Binaries, ControlPlane, Error, skip};
use serde_json::Value;

const SCRIPT: &str = "#!/bin/sh\necho \"$0 $*\"\n";
const DATE: &str = "1000000000";
const IMAGE: &str = "registry.example.com/lockstep:1.2.3";
const REPOSITORY: &str = "https://example.com/somebody/lockstep";

/// A directory that is removed in the end.
struct Sandbox(PathBuf);

impl Sandbox {
    fn new(name: &str) -> Self {
        let dir = env::temp_dir().join(format!("release-{name}-{}", std::process::id()));
        fs::create_dir_all(&dir).expect("a directory");
        Self(dir)
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        drop(fs::remove_dir_all(&self.0));
    }
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the workspace")
}

/// Runs a command, which must succeed, and returns what it printed.
fn run(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Packs a release from a checkout for two platforms.
fn pack(checkout: &Path, dir: &Path) -> PathBuf {
    let out = dir.join("dist");
    for target in ["x86_64-unknown-linux-gnu", "aarch64-apple-darwin"] {
        let binaries = dir.join("binaries").join(target);
        fs::create_dir_all(&binaries).expect("a directory");
        fs::write(binaries.join("lockstep"), format!("{SCRIPT}# {target}\n")).expect("a script");
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_release"));
    command.current_dir(checkout).env("CARGO", env!("CARGO")).env("SOURCE_DATE_EPOCH", DATE);
    command.arg("--binaries").arg(dir.join("binaries")).arg("--out").arg(&out);
    command.args(["--image", IMAGE, "--repository", REPOSITORY]);
    run(command.args(["--commit", "0123456789abcdef0123456789abcdef01234567"]));
    out
}

/// The release that the tests look at.
fn dist() -> &'static Path {
    static DIST: OnceLock<PathBuf> = OnceLock::new();
    DIST.get_or_init(|| match env::var_os("LOCKSTEP_TEST_DIST") {
        Some(dir) => root().join(dir),
        None => {
            let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("release");
            // Of an earlier run.
            drop(fs::remove_dir_all(&dir));
            pack(root(), &dir)
        }
    })
}

/// Name and content of each file.
fn files(dir: &Path) -> BTreeMap<String, Vec<u8>> {
    let entries = fs::read_dir(dir).expect("a directory").map(|entry| entry.expect("an entry"));
    entries
        .map(|entry| {
            let name = entry.file_name().to_str().expect("a name").to_owned();
            (name, fs::read(entry.path()).expect("a file"))
        })
        .collect()
}

/// The only file whose name has this part.
fn file(part: &str) -> PathBuf {
    let found: Vec<String> = files(dist()).into_keys().filter(|name| name.contains(part)).collect();
    assert_eq!(found.len(), 1, "{part}: {found:?}");
    dist().join(&found[0])
}

/// The archive for this machine.
fn archive() -> PathBuf {
    file(if cfg!(target_arch = "x86_64") { "linux-amd64.tar.gz" } else { "linux-arm64.tar.gz" })
}

/// `helm`; `None` without Go, which builds it.
fn helm() -> Option<PathBuf> {
    match Binaries::build_helm() {
        Ok(binaries) => Some(binaries.dir().join("helm")),
        Err(Error::NoGo) => {
            skip("Helm is built with Go, and there is no `go` in PATH");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
fn checkout_at_another_place_and_time_gives_the_same_bytes() {
    let (here, there) = (Sandbox::new("here"), Sandbox::new("there"));
    // The files of the checkout, with new times, and one that others may not read.
    let copy = there.0.join("a copy of the checkout");
    let list = ["ls-files", "--cached", "--others", "--exclude-standard"];
    for name in run(Command::new("git").args(list).current_dir(root())).lines() {
        let (from, to) = (root().join(name), copy.join(name));
        fs::create_dir_all(to.parent().expect("a directory")).expect("a directory");
        fs::copy(from, to).expect("a copy");
    }
    run(Command::new("chmod").arg("600").arg(copy.join("deploy/chart/Chart.yaml")));
    let (here, there) = (files(&pack(root(), &here.0)), files(&pack(&copy, &there.0)));
    assert!(here.len() >= 9, "{:?}", here.keys());
    assert_eq!(here.keys().collect::<Vec<_>>(), there.keys().collect::<Vec<_>>());
    for (name, content) in &here {
        assert!(there[name] == *content, "{name} differs");
    }
}

#[test]
fn checksums_are_those_of_all_files() {
    let sums = run(Command::new("sha256sum").args(["--check", "--strict", "SHA256SUMS"]).current_dir(dist()));
    let checked: BTreeSet<&str> = sums.lines().filter_map(|line| line.strip_suffix(": OK")).collect();
    let all = files(dist());
    assert_eq!(checked, all.keys().map(String::as_str).filter(|name| *name != "SHA256SUMS").collect());
}

#[test]
fn archive_has_the_program_completions_man_pages_and_licenses() {
    let sandbox = Sandbox::new("archive");
    let listed = run(Command::new("tar").args(["--utc", "--full-time", "-tvzf"]).arg(archive()));
    let times: BTreeSet<Vec<&str>> =
        listed.lines().map(|line| line.split_whitespace().skip(3).take(2).collect()).collect();
    assert_eq!(times.len(), 1, "{listed}");
    run(Command::new("tar").arg("-xzf").arg(archive()).current_dir(&sandbox.0));
    let read = |name: &str| fs::read_to_string(sandbox.0.join(name)).expect(name);
    let version = run(Command::new(sandbox.0.join("lockstep")).arg("--version"));
    assert!(version.contains("--version") || version.starts_with("lockstep "), "{version}");
    run(Command::new("bash").arg("-n").arg(sandbox.0.join("completions/lockstep.bash")));
    assert!(read("completions/_lockstep").starts_with("#compdef lockstep"));
    assert!(read("completions/lockstep.fish").contains("complete -c lockstep"));
    assert!(read("man/lockstep.1").contains(".TH lockstep 1"));
    assert!(read("man/lockstep-certs-rotate.1").contains("rotate"));
    assert_eq!(read("LICENSE"), fs::read_to_string(root().join("LICENSE")).expect("the license"));
    let third_party = read("THIRD-PARTY-LICENSES.txt");
    // A crate with each way to name the file.
    for text in ["\ntokio 1.", "Copyright (c) Tokio Contributors", "\nring 0.17", "Brian Smith"] {
        assert!(third_party.contains(text), "{text}");
    }
}

#[test]
fn bill_of_materials_names_every_crate_once_and_no_path() {
    let text = fs::read_to_string(file(".cdx.json")).expect("the SBOM");
    assert!(!text.contains("path+file") && !text.contains(root().to_str().expect("a path")), "a path");
    let bom: Value = serde_json::from_str(&text).expect("JSON");
    let components = bom["components"].as_array().expect("a list");
    let own = &bom["metadata"]["component"];
    assert_eq!(own["name"], "lockstep");
    let references: BTreeSet<&str> = components
        .iter()
        .chain([own])
        .map(|component| component["bom-ref"].as_str().expect("text"))
        .collect();
    assert_eq!(references.len(), components.len() + 1, "one is there twice");
    assert!(references.iter().any(|name| name.starts_with("pkg:cargo/rustls@")), "{references:?}");
    let edges = bom["dependencies"].as_array().expect("a list");
    assert_eq!(edges.len(), references.len());
    for edge in edges {
        for used in edge["dependsOn"].as_array().expect("a list").iter().chain([&edge["ref"]]) {
            assert!(references.contains(used.as_str().expect("text")), "{used} in {edge}");
        }
    }
}

#[test]
fn image_has_the_bill_of_materials_and_labels() {
    let sandbox = Sandbox::new("image");
    let image =
        file(if cfg!(target_arch = "x86_64") { "image-linux-amd64.tar" } else { "image-linux-arm64.tar" });
    run(Command::new("tar").arg("-xf").arg(image).current_dir(&sandbox.0));
    let json = |name: &str| -> Value {
        serde_json::from_slice(&fs::read(sandbox.0.join(name)).expect(name)).expect("JSON")
    };
    let image = json("manifest.json")[0].clone();
    let config = json(image["Config"].as_str().expect("a path"));
    assert_eq!(config["config"]["Entrypoint"], serde_json::json!(["/lockstep"]));
    for label in ["title", "description", "licenses", "version", "revision", "created"] {
        let label = format!("org.opencontainers.image.{label}");
        assert!(config["config"]["Labels"][&label].is_string(), "{label}: {config}");
    }
    let layer = sandbox.0.join(image["Layers"][0].as_str().expect("a path"));
    let sbom = run(Command::new("tar").arg("-xzOf").arg(layer).arg("lockstep.cdx.json"));
    assert_eq!(sbom, fs::read_to_string(file(".cdx.json")).expect("the SBOM"));
}

#[test]
fn helm_renders_the_package_as_the_chart_of_the_checkout() {
    let Some(helm) = helm() else { return };
    let install = fs::read_to_string(file("install.yaml")).expect("the manifests");
    let image = install.lines().find_map(|line| line.trim().strip_prefix("image: ")).expect("an image");
    let (repository, tag) = image.rsplit_once(':').expect("a tag");
    let template = |chart: &Path, set: &[&str]| {
        let mut command = Command::new(&helm);
        run(command.args(["template", "lockstep", "--namespace", "lockstep-system"]).arg(chart).args(set))
    };
    let (repository, tag) = (format!("image.repository={repository}"), format!("image.tag={tag}"));
    let expected = template(&root().join("deploy/chart"), &["--set", &repository, "--set", &tag]);
    assert_eq!(template(&file(".tgz"), &[]), expected);
    assert!(expected.contains(image), "{image}");
    run(Command::new(&helm).arg("lint").arg("--strict").arg(file(".tgz")));
}

/// A release says where it is published.
#[test]
fn packages_name_the_repository() {
    let sandbox = Sandbox::new("repository");
    let out = pack(root(), &sandbox.0);
    let package = fs::read_to_string(root().join("Cargo.toml")).expect("Cargo.toml");
    let version =
        package.split("\nversion = \"").nth(1).and_then(|rest| rest.split('"').next()).expect("a version");
    let krew = fs::read_to_string(out.join("lockstep.yaml")).expect("the krew manifest");
    let archive = format!("/releases/download/v{version}/lockstep-{version}-linux-amd64.tar.gz\n");
    assert!(krew.contains(&format!("homepage: {REPOSITORY}\n")), "{krew}");
    assert!(krew.contains(&format!("uri: {REPOSITORY}{archive}")), "{krew}");

    let of_chart = |name: &str| {
        let mut tar = Command::new("tar");
        run(tar.arg("-xzOf").arg(out.join(format!("lockstep-{version}.tgz"))).arg(format!("lockstep/{name}")))
    };
    let chart = of_chart("Chart.yaml");
    assert!(chart.ends_with(&format!("home: {REPOSITORY}\nsources: [{REPOSITORY}]\n")), "{chart}");
    let runbooks = format!("runbookUrl: {REPOSITORY}/blob/v{version}/docs/operations.md\n");
    assert!(of_chart("values.yaml").contains(&runbooks));
    assert!(of_chart("README.md").contains("helm install lockstep"));
    assert_eq!(of_chart("LICENSE"), fs::read_to_string(root().join("LICENSE")).expect("the license"));

    let notes = fs::read_to_string(out.join("release-notes.md")).expect("the notes");
    assert!(
        notes.contains(&format!("-f {REPOSITORY}/releases/download/v{version}/install.yaml\n")),
        "{notes}"
    );
    run(Command::new("tar")
        .arg("-xf")
        .arg(out.join(format!("lockstep-{version}-image-linux-amd64.tar")))
        .current_dir(&sandbox.0));
    let manifest = fs::read(sandbox.0.join("manifest.json")).expect("a manifest");
    let manifest: Value = serde_json::from_slice(&manifest).expect("JSON");
    let config = manifest[0]["Config"].as_str().expect("a path");
    let config: Value = serde_json::from_slice(&fs::read(sandbox.0.join(config)).expect("it")).expect("JSON");
    assert_eq!(config["config"]["Labels"]["org.opencontainers.image.source"], REPOSITORY);
}

#[test]
fn krew_installs_the_plugin_from_manifest_and_archive() {
    if Command::new("go").arg("version").output().is_err() {
        return skip("krew is built with Go, and there is no `go` in PATH");
    }
    let sandbox = Sandbox::new("krew");
    let mut krew = Command::new("go");
    krew.arg("-C").arg(root().join("tests/krew")).args(["tool", "krew", "install"]);
    krew.arg("--manifest").arg(file("lockstep.yaml")).arg("--archive").arg(archive());
    run(krew.env("GOWORK", "off").env("KREW_ROOT", &sandbox.0));
    // As kubectl calls it: by the name of a plugin.
    let plugin = sandbox.0.join("bin/kubectl-lockstep");
    let said = run(Command::new(&plugin).args(["status", "--help"]));
    assert!(
        said.contains("kubectl-lockstep status") || said.contains("Usage: kubectl lockstep status"),
        "{said}"
    );
}

/// The commands in a comment of `install.yaml`.
fn instructions() -> Vec<String> {
    let text = fs::read_to_string(file("install.yaml")).expect("the manifests");
    text.lines().filter_map(|line| line.strip_prefix("#   kubectl ")).map(str::to_owned).collect()
}

#[test]
fn install_yaml_is_applied_and_deleted_as_it_says() {
    let plane = match ControlPlane::start() {
        Err(Error::NoGo) => return skip("the control plane is built with Go, and there is no `go` in PATH"),
        plane => plane.unwrap_or_else(|error| panic!("{error}")),
    };
    let kubectl = |line: &str| run(plane.kubectl().args(line.split(' ')).current_dir(dist()));
    let instructions = instructions();
    let [create, apply, wait, delete] = &instructions[..] else { panic!("{instructions:?}") };
    kubectl(create);
    kubectl("create configmap precious -n lockstep-system --from-literal=a=b");
    kubectl(apply);
    // No pod runs here; `make test-dist` waits for them on a node.
    assert!(wait.contains("rollout status deployment lockstep"), "{wait}");
    let deployed = kubectl("get deployment lockstep -n lockstep-system -o jsonpath={..image}");
    assert!(fs::read_to_string(file("install.yaml")).expect("it").contains(&deployed), "{deployed}");
    kubectl(delete);
    kubectl("get configmap precious -n lockstep-system");
    let left = kubectl(
        "get clusterroles,validatingwebhookconfigurations -l app.kubernetes.io/name=lockstep -o name",
    );
    assert_eq!(left, "");
}

#[test]
fn release_without_a_binary_is_refused_with_what_to_do() {
    let sandbox = Sandbox::new("empty");
    let mut command = Command::new(env!("CARGO_BIN_EXE_release"));
    command.arg("--binaries").arg(&sandbox.0).arg("--out").arg(sandbox.0.join("dist"));
    let output = command.args(["--image", IMAGE, "--commit", "0", "--date", DATE]).output().expect("it runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && said.contains("make dist-binary") && said.lines().count() == 1,
        "{said}"
    );
}
