//! Tells `lockstep --version` of a release build the commit and its date. Without git, as in a source archive or an
//! image build, the environment says them: `LOCKSTEP_COMMIT` and `LOCKSTEP_COMMIT_DATE`.

use std::{env, path::Path, process::Command};

fn main() {
    println!("cargo:rerun-if-env-changed=LOCKSTEP_COMMIT");
    println!("cargo:rerun-if-env-changed=LOCKSTEP_COMMIT_DATE");
    println!("cargo:rerun-if-changed=build.rs");
    // A development build is not compiled anew after each commit.
    let is_release = env::var("PROFILE").is_ok_and(|profile| profile == "release");
    // A commit appends to the log of HEAD. A worktree has its own git directory.
    let log = is_release.then(|| git(&["rev-parse", "--git-path", "logs/HEAD"])).flatten();
    if let Some(log) = log.filter(|log| Path::new(log).exists()) {
        println!("cargo:rerun-if-changed={log}");
    }
    let from = |variable: &str, format: &str| {
        // Without a length, that of an abbreviated commit depends on how much of the history this clone has.
        let show = ["show", "--no-patch", "--abbrev=12", "--date=short", format];
        let from_git = || is_release.then(|| git(&show)).flatten();
        env::var(variable).ok().or_else(from_git).unwrap_or_default()
    };
    let commit = from("LOCKSTEP_COMMIT", "--format=%h");
    let date = from("LOCKSTEP_COMMIT_DATE", "--format=%cd");
    let version = env::var("CARGO_PKG_VERSION").unwrap_or_default();
    let version = match (commit.is_empty(), date.is_empty()) {
        (true, _) => version,
        (false, true) => format!("{version} ({commit})"),
        (false, false) => format!("{version} ({commit} {date})"),
    };
    println!("cargo:rustc-env=LOCKSTEP_VERSION={version}");
}

fn git(arguments: &[&str]) -> Option<String> {
    let output =
        Command::new("git").args(arguments).output().ok().filter(|output| output.status.success())?;
    Some(String::from_utf8(output.stdout).ok()?.trim().to_owned()).filter(|text| !text.is_empty())
}
