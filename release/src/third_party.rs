//! The licenses of the crates in the binary: most of them ask to be distributed with it.

use std::{collections::BTreeMap, fmt::Write as _, fs, path::PathBuf};

use anyhow::Context;

use crate::crates::{Crate, ROOT};

/// How files with a license or a copyright begin.
const NAMES: [&str; 5] = ["license", "licence", "copying", "notice", "unlicense"];

/// The text of every license, each once, with the crates that have it.
pub fn licenses(crates: &[Crate]) -> anyhow::Result<Vec<u8>> {
    let others = || crates.iter().filter(|linked| linked.name != ROOT);
    let mut text = "Lockstep contains these crates, whose licenses follow:\n\n".to_owned();
    let mut by_license: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for linked in others() {
        let name = format!("{} {}", linked.name, linked.version);
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{name}: {}", linked.license.as_deref().unwrap_or("see below"));
        for file in files(linked)? {
            let license = fs::read(&file).with_context(|| file.display().to_string())?;
            let license = String::from_utf8_lossy(&license).trim().replace('\r', "");
            let crates = by_license.entry(license).or_default();
            if crates.last() != Some(&name) {
                crates.push(name.clone());
            }
        }
    }
    for (license, crates) in by_license {
        let _ = write!(text, "\n{}\n{}\n\n{license}\n", "-".repeat(80), crates.join(", "));
    }
    Ok(text.into_bytes())
}

/// The files of a crate with a license, sorted.
fn files(linked: &Crate) -> anyhow::Result<Vec<PathBuf>> {
    let directory =
        fs::read_dir(&linked.directory).with_context(|| linked.directory.display().to_string())?;
    let paths = directory.map(|entry| Ok(entry?.path())).collect::<anyhow::Result<Vec<_>>>()?;
    let is_license = |path: &PathBuf| {
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
        path.is_file() && NAMES.iter().any(|begin| name.starts_with(begin))
    };
    let mut files: Vec<PathBuf> = paths.into_iter().filter(is_license).collect();
    files.sort();
    Ok(files)
}
