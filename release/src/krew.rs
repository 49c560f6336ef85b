//! The manifest from which krew installs `kubectl lockstep`.

use std::fmt::Write as _;

use crate::Platform;

/// An archive with the binary.
pub struct Plugin {
    pub platform: Platform,
    pub archive: String,
    pub sha256: String,
}

/// Where the archives are if nobody says where the repository is published.
const NOWHERE: &str = "https://example.com/lockstep";

/// The manifest, as YAML.
pub fn manifest(plugins: &[Plugin], version: &str, repository: Option<&str>) -> String {
    let repository = repository.unwrap_or(NOWHERE);
    let mut manifest = format!(
        "\
apiVersion: krew.googlecontainertools.github.com/v1alpha2
kind: Plugin
metadata:
  name: lockstep
spec:
  version: v{version}
  homepage: {repository}
  shortDescription: Explain and check mirrored ConfigMaps and Secrets
  description: |
    Lockstep mirrors labelled ConfigMaps and Secrets to other namespaces. With
    this plugin, `kubectl lockstep status` shows whether the copies are in step,
    `plan` what a manifest would do, `explain` why a namespace has no copy, and
    `audit` finds drift. It reads the cluster with your own rights, and shows no
    values.
  platforms:
"
    );
    for Plugin { platform: Platform { os, architecture, .. }, archive, sha256 } in plugins {
        // Writing to a string cannot fail.
        let _ = write!(
            manifest,
            "  \
  - selector:
      matchLabels:
        os: {os}
        arch: {architecture}
    uri: {repository}/releases/download/v{version}/{archive}
    sha256: {sha256}
    bin: lockstep
    files:
      - from: lockstep
        to: .
      - from: \"*LICENSE*\"
        to: .
"
        );
    }
    manifest
}
