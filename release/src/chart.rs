//! The Helm chart as a package, as `helm package` makes it, but always of the same bytes: that command stores the times of
//! the files.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, bail};
use controlplane::{Tar, gzip};

/// The lines of `values.yaml` that name the image.
const REPOSITORY: &str = "\n  repository: lockstep\n";
const TAG: &str = "\n  tag: \"\"\n";

/// The chart in this directory, whose default image is this one.
pub fn package(chart: &Path, image: &str, version: &str, date: u32) -> anyhow::Result<Vec<u8>> {
    let mut tar = Tar::new(date.into());
    for file in files(chart)? {
        let path = chart.join(&file);
        let mut content = fs::read(&path).with_context(|| path.display().to_string())?;
        if file == Path::new("values.yaml") {
            content = with_image(&String::from_utf8(content)?, image, version)?.into_bytes();
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

/// The values with another image. The tag stays empty if it is the chart's version anyway.
fn with_image(values: &str, image: &str, version: &str) -> anyhow::Result<String> {
    let has_tag = |(repository, tag): &(&str, &str)| !tag.contains('/') && !repository.contains('@');
    let Some((repository, tag)) = image.rsplit_once(':').filter(has_tag) else {
        bail!("the image {image} has no tag: expected one such as registry.example.com/lockstep:{version}");
    };
    let tag = if tag == version { "" } else { tag };
    let replaced = values.replacen(REPOSITORY, &format!("\n  repository: {repository}\n"), 1).replacen(
        TAG,
        &format!("\n  tag: \"{tag}\"\n"),
        1,
    );
    match values.matches(REPOSITORY).count() == 1 && values.matches(TAG).count() == 1 {
        true => Ok(replaced),
        false => bail!(
            "values.yaml of the chart does not name the image as `repository: lockstep` and `tag: \"\"`"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const VALUES: &str = "image:\n  repository: lockstep\n  # The version.\n  tag: \"\"\n";

    #[test]
    fn values_name_the_image_and_its_tag_only_if_it_is_not_the_version() {
        let with = |image| with_image(VALUES, image, "1.0.0");
        assert_eq!(with("lockstep:1.0.0").unwrap(), VALUES);
        let other = with("localhost:5000/lockstep:1.0.0").unwrap();
        assert_eq!(other, VALUES.replace("y: lockstep", "y: localhost:5000/lockstep"));
        assert_eq!(with("lockstep:rc").unwrap(), VALUES.replace("\"\"", "\"rc\""));
    }

    #[test]
    fn image_without_a_tag_and_values_without_an_image_are_refused() {
        for image in ["lockstep", "localhost:5000/lockstep", "lockstep@sha256:0"] {
            assert!(with_image(VALUES, image, "1.0.0").is_err(), "{image}");
        }
        assert!(with_image("image: {}\n", "lockstep:1", "1").is_err());
    }
}
