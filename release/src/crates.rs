//! The crates that are linked into the binary, as cargo resolves them.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, bail};
use serde_json::Value;

/// A crate in the binary of at least one platform.
#[derive(Debug)]
pub struct Crate {
    pub name: String,
    pub version: String,
    /// An SPDX expression.
    pub license: Option<String>,
    /// SHA-256 of the package in the registry.
    pub checksum: Option<String>,
    /// Name and version of the crates that it uses itself.
    pub depends_on: BTreeSet<(String, String)>,
    /// Where its files are on this machine.
    pub directory: PathBuf,
}

/// The crate that the binary is built from.
pub const ROOT: &str = "lockstep";

/// All crates in the binaries for these targets, Lockstep itself included, sorted.
pub fn linked(root: &Path, targets: &[&str]) -> anyhow::Result<Vec<Crate>> {
    // The tree knows the features without which tests are built; the metadata have licenses and edges.
    let mut linked = BTreeSet::new();
    for target in targets {
        let flags =
            ["--package", ROOT, "--edges", "normal", "--prefix", "none", "--no-dedupe", "--target", target];
        let tree = cargo(root, "tree", &flags)?;
        linked.extend(tree.lines().filter_map(name_and_version));
    }
    let metadata: Value = serde_json::from_str(&cargo(root, "metadata", &["--format-version", "1"])?)?;
    let lock = fs::read_to_string(root.join("Cargo.lock")).context("Cargo.lock")?;
    let checksums = checksums(&lock);

    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let list = |value: &Value| value.as_array().cloned().unwrap_or_default();
    let packages = list(&metadata["packages"]);
    let key = |package: &Value| (text(&package["name"]), text(&package["version"]));
    let keys: BTreeMap<String, _> =
        packages.iter().map(|package| (text(&package["id"]), key(package))).collect();
    let mut edges: BTreeMap<String, BTreeSet<_>> = BTreeMap::new();
    for node in list(&metadata["resolve"]["nodes"]) {
        let is_normal =
            |dependency: &Value| list(&dependency["dep_kinds"]).iter().any(|kind| kind["kind"].is_null());
        let normal = list(&node["deps"]).into_iter().filter(is_normal);
        let used = normal.filter_map(|dependency| keys.get(&text(&dependency["pkg"])).cloned());
        edges.insert(text(&node["id"]), used.filter(|used| linked.contains(used)).collect());
    }
    let mut crates = Vec::new();
    for package in packages.iter().filter(|package| linked.contains(&key(package))) {
        let (name, version) = key(package);
        let manifest = PathBuf::from(text(&package["manifest_path"]));
        crates.push(Crate {
            checksum: checksums.get(&(name.clone(), version.clone())).cloned(),
            license: package["license"].as_str().map(expression),
            depends_on: edges.remove(&text(&package["id"])).unwrap_or_default(),
            directory: manifest.parent().unwrap_or(&manifest).to_owned(),
            name,
            version,
        });
    }
    crates.sort_by(|one, other| (&one.name, &one.version).cmp(&(&other.name, &other.version)));
    if crates.len() != linked.len() {
        bail!("cargo tree names {} crates, and cargo metadata has {} of them", linked.len(), crates.len());
    }
    Ok(crates)
}

fn cargo(root: &Path, command: &str, flags: &[&str]) -> anyhow::Result<String> {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut cargo = Command::new(program);
    let output =
        cargo.arg(command).arg("--locked").args(flags).current_dir(root).output().context("cargo")?;
    if !output.status.success() {
        bail!("cargo {command} failed: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    Ok(String::from_utf8(output.stdout)?)
}

/// Of a line of `cargo tree`, such as `clap v4.6.1 (*)`.
fn name_and_version(line: &str) -> Option<(String, String)> {
    let mut words = line.split(' ');
    Some((words.next()?.to_owned(), words.next()?.strip_prefix('v')?.to_owned()))
}

/// The SPDX expression of a license. Older crates separate alternatives with a slash.
fn expression(license: &str) -> String {
    license.split('/').map(str::trim).collect::<Vec<_>>().join(" OR ")
}

/// The checksums in `Cargo.lock`, by name and version.
fn checksums(lock: &str) -> BTreeMap<(String, String), String> {
    let package = |text: &str| {
        let field = |name: &str| {
            let value = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(" = "))?;
            Some(value.trim_matches('"').to_owned())
        };
        Some(((field("name")?, field("version")?), field("checksum")?))
    };
    lock.split("[[package]]").filter_map(package).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn binary_has_the_crates_of_its_features_and_not_those_of_tests() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let crates = linked(&root, &["x86_64-unknown-linux-gnu"]).unwrap();
        let find = |name: &str| crates.iter().find(|linked| linked.name == name);
        for name in ["proptest", "controlplane", "model", "indicatif", "aws-lc-rs", "windows-sys"] {
            assert!(find(name).is_none(), "{name}");
        }
        let own = find(ROOT).unwrap();
        assert!(own.checksum.is_none() && own.depends_on.iter().any(|(name, _)| name == "rustls"), "{own:?}");
        for other in crates.iter().filter(|other| !other.name.starts_with(ROOT)) {
            assert_eq!(other.checksum.as_ref().map(String::len), Some(64), "{other:?}");
            assert!(other.license.is_some() && other.directory.is_dir(), "{other:?}");
        }
    }
}
