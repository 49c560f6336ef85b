//! The archive of a binary: with licenses, completions and man pages.

use std::{fs, path::Path};

use anyhow::Context;
use controlplane::{Tar, gzip};

use crate::shell;

pub fn of(
    binary: &Path,
    license: &[u8],
    third_party: &[u8],
    created: &str,
    date: u32,
) -> anyhow::Result<Vec<u8>> {
    let binary = fs::read(binary).with_context(|| binary.display().to_string())?;
    let mut tar = Tar::new(date.into());
    tar.file("lockstep", 0o755, &binary);
    tar.file("LICENSE", 0o644, license);
    tar.file("THIRD-PARTY-LICENSES.txt", 0o644, third_party);
    for (name, text) in shell::completions().into_iter().chain(shell::man_pages(created)?) {
        tar.file(&name, 0o644, &text);
    }
    Ok(gzip(&tar.end())?)
}
