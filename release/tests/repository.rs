//! What several files of the repository say about versions is the same everywhere.

use std::{fs, path::Path, process::Command};

fn read(name: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The words that follow a prefix, as far as they are versions.
fn versions_after(text: &str, prefix: &str) -> Vec<String> {
    let is_version = |c: char| c.is_ascii_digit() || c == '.';
    let rest = text.split(prefix).skip(1);
    rest.map(|rest| rest.chars().take_while(|c| is_version(*c)).collect::<String>())
        .map(|version| version.trim_end_matches('.').to_owned())
        .collect()
}

/// So every run of CI checks the oldest supported Rust.
#[test]
fn rust_version_of_the_package_is_that_of_image_workflows_and_documents() {
    let oldest = env!("CARGO_PKG_RUST_VERSION");
    for (file, prefix) in [
        ("Dockerfile", "FROM rust:"),
        (".github/workflows/ci.yaml", "rustup toolchain install "),
        (".github/workflows/ci.yaml", "rustup default "),
        (".github/workflows/release.yaml", "rustup toolchain install "),
        (".github/workflows/release.yaml", "rustup default "),
        (".github/workflows/release.yaml", "\"rust:"),
        ("docs/releasing.md", "rust:"),
        ("docs/security.md", "rust:"),
        ("README.md", "Rust "),
        ("CONTRIBUTING.md", "Rust "),
    ] {
        let versions = versions_after(&read(file), prefix);
        let numbers: Vec<&String> = versions.iter().filter(|version| !version.is_empty()).collect();
        assert!(!numbers.is_empty(), "{file} has no version after {prefix:?}");
        for version in numbers {
            let same =
                version == oldest || version.strip_prefix(oldest).is_some_and(|rest| rest.starts_with('.'));
            assert!(same, "{file}: {prefix}{version}, and Cargo.toml has rust-version {oldest}");
        }
    }
}

/// A tag can be moved to another commit by whoever owns the action.
#[test]
fn actions_are_pinned_by_commit_with_their_version_beside_it() {
    let mut actions = 0;
    for file in [".github/workflows/ci.yaml", ".github/workflows/release.yaml"] {
        for line in read(file).lines() {
            let Some(action) = line.trim().trim_start_matches("- ").strip_prefix("uses: ") else { continue };
            if action.starts_with("./") {
                continue;
            }
            actions += 1;
            let (_, pin) = action.split_once('@').expect(line);
            let (commit, version) = pin.split_once(" # ").unwrap_or_else(|| panic!("{file}: {line}"));
            let is_commit = commit.len() == 40 && commit.chars().all(|c| c.is_ascii_hexdigit());
            assert!(is_commit && version.starts_with('v'), "{file}: {line}");
        }
    }
    assert!(actions >= 8, "only {actions} actions are found");
}

#[test]
fn every_go_module_gets_updates() {
    let config = read(".github/dependabot.yml");
    let list = ["ls-files", "--cached", "--others", "--exclude-standard", "*/go.mod"];
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let output = Command::new("git").args(list).current_dir(root).output().expect("git runs");
    let modules = String::from_utf8(output.stdout).expect("text");
    assert!(modules.lines().count() >= 6, "{modules}");
    for module in modules.lines() {
        let directory = module.trim_end_matches("/go.mod");
        let (parent, _) = directory.rsplit_once('/').expect("a directory in another one");
        let lists = |directory: &str| config.contains(&format!("\n      - /{directory}\n"));
        let listed = lists(directory) || lists(&format!("{parent}/*"));
        assert!(listed, "{directory} is not in dependabot.yml");
    }
}
