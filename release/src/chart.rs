//! The Helm chart as a package, as `helm package` makes it, but always of the same bytes: that command stores the times
//! of the files.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, bail};
use controlplane::{Tar, gzip};

/// The lines of `values.yaml` that a release changes.
const REPOSITORY: &str = "\n  repository: lockstep\n";
const TAG: &str = "\n  tag: \"\"\n";
const RUNBOOKS: &str = "\n  runbookUrl: docs/operations.md\n";

/// The chart of this checkout, whose default image is this one. It names its home, and alerts link to the operations of
/// this version, if it is known where the repository is published.
pub fn package(
    root: &Path,
    image: &str,
    version: &str,
    repository: Option<&str>,
    date: u32,
) -> anyhow::Result<Vec<u8>> {
    let chart = root.join("deploy/chart");
    let read = |path: PathBuf| fs::read(&path).with_context(|| path.display().to_string());
    let mut tar = Tar::new(date.into());
    tar.file("lockstep/LICENSE", 0o644, &read(root.join("LICENSE"))?);
    for file in files(&chart)? {
        let mut content = read(chart.join(&file))?;
        if file == Path::new("values.yaml") {
            content = values(&String::from_utf8(content)?, image, version, repository)?.into_bytes();
        }
        if let Some(url) = repository.filter(|_| file == Path::new("Chart.yaml")) {
            content.extend(format!("home: {url}\nsources: [{url}]\n").into_bytes());
        }
        tar.file(&format!("lockstep/{}", file.display()), 0o644, &content);
    }
    Ok(gzip(&tar.end())?)
}

/// The files below a directory, sorted, without its name.
fn files(dir: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut dirs = vec![dir.to_owned()];
    while let Some(next) = dirs.pop() {
        for entry in fs::read_dir(&next).with_context(|| next.display().to_string())? {
            let path = entry?.path();
            match path.is_dir() {
                true => dirs.push(path),
                false => files.push(path.strip_prefix(dir)?.to_owned()),
            }
        }
    }
    files.sort();
    Ok(files)
}

/// The values of a release. The tag stays empty if it is the chart's version anyway.
fn values(values: &str, image: &str, version: &str, published: Option<&str>) -> anyhow::Result<String> {
    let has_tag = |(repository, tag): &(&str, &str)| !tag.contains('/') && !repository.contains('@');
    let Some((repository, tag)) = image.rsplit_once(':').filter(has_tag) else {
        bail!("the image {image} has no tag: expected one such as registry.example.com/lockstep:{version}");
    };
    let tag = if tag == version { "" } else { tag };
    let runbooks = published.map(|url| format!("{url}/blob/v{version}/docs/operations.md"));
    let mut changed = values.to_owned();
    for (line, now) in [
        (REPOSITORY, format!("\n  repository: {repository}\n")),
        (TAG, format!("\n  tag: \"{tag}\"\n")),
        (RUNBOOKS, runbooks.map_or_else(|| RUNBOOKS.to_owned(), |url| format!("\n  runbookUrl: {url}\n"))),
    ] {
        if values.matches(line).count() != 1 {
            bail!("values.yaml of the chart does not have the line `{}` once", line.trim());
        }
        changed = changed.replacen(line, &now, 1);
    }
    Ok(changed)
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALUES: &str = "image:\n  repository: lockstep\n  # The version.\n  tag: \"\"\n\
                          metrics:\n  runbookUrl: docs/operations.md\n";

    #[test]
    fn values_name_the_image_and_its_tag_only_if_it_is_not_the_version() {
        let with = |image| values(VALUES, image, "1.0.0", None);
        assert_eq!(with("lockstep:1.0.0").unwrap(), VALUES);
        let other = with("localhost:5000/lockstep:1.0.0").unwrap();
        assert_eq!(other, VALUES.replace("y: lockstep", "y: localhost:5000/lockstep"));
        assert_eq!(with("lockstep:rc").unwrap(), VALUES.replace("\"\"", "\"rc\""));
    }

    #[test]
    fn alerts_link_to_the_operations_of_the_version() {
        let published = values(VALUES, "lockstep:1.0.0", "1.0.0", Some("https://example.com/o/lockstep"));
        let url = "https://example.com/o/lockstep/blob/v1.0.0/docs/operations.md";
        assert_eq!(published.unwrap(), VALUES.replace("docs/operations.md", url));
    }

    #[test]
    fn image_without_a_tag_and_values_without_an_image_are_refused() {
        for image in ["lockstep", "localhost:5000/lockstep", "lockstep@sha256:0"] {
            assert!(values(VALUES, image, "1.0.0", None).is_err(), "{image}");
        }
        assert!(values("image: {}\n", "lockstep:1", "1", None).is_err());
    }
}
