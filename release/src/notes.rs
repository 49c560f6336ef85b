//! Release notes, from the changelog.

use anyhow::Context;

/// How to install and verify this version, and what has changed. A version that the changelog does not have yet is made
/// of what is unreleased.
pub fn release_notes(
    changelog: &str,
    version: &str,
    image: &str,
    repository: Option<&str>,
) -> anyhow::Result<String> {
    let changes = section(changelog, version)
        .or_else(|| section(changelog, "Unreleased"))
        .with_context(|| format!("CHANGELOG.md has a section neither for {version} nor `Unreleased`"))?;
    let download = repository.map(|url| format!("{url}/releases/download/v{version}/")).unwrap_or_default();
    Ok(format!(
        "\
# Lockstep {version}

```
kubectl create namespace lockstep-system
kubectl apply -f {download}install.yaml
kubectl -n lockstep-system rollout status deployment lockstep
```

With other settings: `docker run --rm {image} manifests --image {image} --secrets | kubectl apply -f -`. The command line \
for your own machine is in the archives `lockstep-{version}-*.tar.gz`. `docs/security.md` says how to verify all files.

## Changes

{changes}
"
    ))
}

/// The text below the heading that begins with these words, with each item in one line: where release notes are shown,
/// a new line is a line break.
fn section(changelog: &str, heading: &str) -> Option<String> {
    let is_heading = |line: &&str| {
        line.strip_prefix("## ").and_then(|title| title.split([' ', ',']).next()) == Some(heading)
    };
    let mut lines = changelog.lines();
    lines.by_ref().find(is_heading)?;
    let mut text = String::new();
    for line in lines.take_while(|line| !line.starts_with("## ")) {
        let (separator, line) = line.strip_prefix("  ").map_or(('\n', line), |rest| (' ', rest));
        text.push(separator);
        text.push_str(line);
    }
    Some(text.trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHANGELOG: &str = "\
# Changelog

## Unreleased

- New, and
  long.

## 0.2.0, 2026-12-01

- Second.

## 0.1.0

- First.
";

    #[test]
    fn notes_have_the_section_of_the_version_or_else_what_is_unreleased() {
        let changes = |version: &str| {
            let notes = release_notes(CHANGELOG, version, "lockstep:1", None).unwrap();
            notes.split_once("## Changes\n\n").unwrap().1.to_owned()
        };
        assert_eq!(changes("0.2.0"), "- Second.\n");
        assert_eq!(changes("0.1.0"), "- First.\n");
        assert_eq!(changes("0.3.0"), "- New, and long.\n");
        assert_eq!(changes("0.1"), "- New, and long.\n", "0.1 is not 0.1.0");
    }

    #[test]
    fn changelog_without_a_section_is_refused() {
        assert!(release_notes("# Changelog\n", "0.1.0", "lockstep:1", None).is_err());
    }
}
