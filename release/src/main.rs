//! Packs everything of a release into a directory. The bytes depend on the arguments, the checkout's files and the
//! binaries alone, not on the time, on the machine or on where the checkout is.

#![forbid(unsafe_code)]

mod archive;
mod chart;
mod crates;
mod install;
mod krew;
mod notes;
mod sbom;
mod shell;
mod third_party;

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, bail};
use clap::Parser;
use controlplane::{Image, ReleasedImage};
use jiff::Timestamp;
use ring::digest::{SHA256, digest};

/// What a release is made of
#[derive(Debug, Parser)]
struct Release {
    /// A directory with a binary for each platform: TARGET/lockstep
    #[arg(long)]
    binaries: PathBuf,

    /// Where everything is written
    #[arg(long)]
    out: PathBuf,

    /// The name under which the image is published, with its tag
    #[arg(long)]
    image: String,

    /// The commit of the checkout
    #[arg(long)]
    commit: String,

    /// The time of all files, as a Unix time
    #[arg(long, env = "SOURCE_DATE_EPOCH", value_parser = clap::value_parser!(u32))]
    date: u32,

    /// Where the repository is published, such as `https://github.com/OWNER/lockstep`
    #[arg(long, value_parser = repository)]
    repository: Option<String>,
}

/// A system on which Lockstep runs, or its command line alone.
#[derive(Clone, Copy, Debug)]
struct Platform {
    /// As Rust calls it.
    target: &'static str,
    /// As Go, OCI and krew call them.
    os: &'static str,
    architecture: &'static str,
}

/// All platforms of a release.
const PLATFORMS: [Platform; 4] = [
    Platform { target: "x86_64-unknown-linux-gnu", os: "linux", architecture: "amd64" },
    Platform { target: "aarch64-unknown-linux-gnu", os: "linux", architecture: "arm64" },
    Platform { target: "x86_64-apple-darwin", os: "darwin", architecture: "amd64" },
    Platform { target: "aarch64-apple-darwin", os: "darwin", architecture: "arm64" },
];

fn main() -> ExitCode {
    match Release::parse().pack() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("make dist: {error:#}");
            ExitCode::FAILURE
        }
    }
}

impl Release {
    fn pack(&self) -> anyhow::Result<()> {
        // The checkout, in which `make` runs this.
        let root = Path::new(".");
        let created = Timestamp::from_second(self.date.into())?.to_string();
        let version = version();
        let binaries = self.binaries()?;
        fs::create_dir_all(&self.out).with_context(|| self.out.display().to_string())?;

        let crates = crates::linked(root, &PLATFORMS.map(|platform| platform.target))?;
        let sbom = sbom::cyclone_dx(&crates, &created)?;
        let third_party = third_party::licenses(&crates)?;
        self.write(&format!("lockstep-{version}.cdx.json"), &sbom)?;
        self.write("install.yaml", install::manifests(&version, &self.image).as_bytes())?;
        let repository = self.repository.as_deref();
        let chart = chart::package(root, &self.image, &version, repository, self.date)?;
        self.write(&format!("lockstep-{version}.tgz"), &chart)?;
        let changelog = root.join("CHANGELOG.md");
        let changelog = fs::read_to_string(&changelog).with_context(|| changelog.display().to_string())?;
        let notes = notes::release_notes(&changelog, &version, &self.image, repository)?;
        self.write("release-notes.md", notes.as_bytes())?;

        let license = fs::read(root.join("LICENSE")).context("LICENSE")?;
        let mut plugins = Vec::new();
        for (platform, binary) in &binaries {
            let name = format!("lockstep-{version}-{}-{}.tar.gz", platform.os, platform.architecture);
            let archive = archive::of(binary, &license, &third_party, &created, self.date)?;
            self.write(&name, &archive)?;
            plugins.push(krew::Plugin { platform: *platform, archive: name, sha256: sha256(&archive) });
            if platform.os == "linux" {
                self.write_image(*platform, binary, &version, &created, &sbom, &third_party)?;
            }
        }
        self.write("lockstep.yaml", krew::manifest(&plugins, &version, repository).as_bytes())?;
        self.write("SHA256SUMS", self.checksums()?.as_bytes())
    }

    /// The binaries that are there, in the order of the platforms.
    fn binaries(&self) -> anyhow::Result<Vec<(Platform, PathBuf)>> {
        let dir = self.binaries.display();
        for entry in fs::read_dir(&self.binaries).with_context(|| dir.to_string())? {
            let name = entry?.file_name();
            if !PLATFORMS.iter().any(|platform| name == platform.target) {
                bail!("{dir} has binaries for {}, which is no platform of a release", name.display());
            }
        }
        let paths =
            PLATFORMS.map(|platform| (platform, self.binaries.join(platform.target).join("lockstep")));
        let found: Vec<_> = paths.into_iter().filter(|(_, binary)| binary.is_file()).collect();
        match found.is_empty() {
            true => bail!("{dir} has no binary: run `make dist-binary` first"),
            false => Ok(found),
        }
    }

    fn write_image(
        &self,
        platform: Platform,
        binary: &Path,
        version: &str,
        created: &str,
        sbom: &[u8],
        third_party: &[u8],
    ) -> anyhow::Result<()> {
        let mut labels = vec![
            ("org.opencontainers.image.version", version),
            ("org.opencontainers.image.revision", &self.commit),
            ("org.opencontainers.image.created", created),
        ];
        labels.extend(self.repository.as_deref().map(|url| ("org.opencontainers.image.source", url)));
        let image = Image::lockstep(binary, &self.image)?.released(&ReleasedImage {
            architecture: platform.architecture,
            labels: &labels,
            files: &[("lockstep.cdx.json", sbom), ("THIRD-PARTY-LICENSES.txt", third_party)],
            modified: self.date.into(),
            created,
        });
        let name = format!("lockstep-{version}-image-{}-{}.tar", platform.os, platform.architecture);
        Ok(image.write(&self.out.join(name))?)
    }

    fn write(&self, name: &str, content: &[u8]) -> anyhow::Result<()> {
        let path = self.out.join(name);
        fs::write(&path, content).with_context(|| path.display().to_string())
    }

    /// What `sha256sum --check` reads, about all files.
    fn checksums(&self) -> anyhow::Result<String> {
        let entries = fs::read_dir(&self.out)?.collect::<Result<Vec<_>, _>>()?;
        let mut files: Vec<PathBuf> = entries.into_iter().map(|entry| entry.path()).collect();
        files.sort();
        let mut sums = String::new();
        for file in files {
            let content = fs::read(&file).with_context(|| file.display().to_string())?;
            let name = file.file_name().unwrap_or_default().display();
            // Writing to a string cannot fail.
            let _ = writeln!(sums, "{}  {name}", sha256(&content));
        }
        Ok(sums)
    }
}

/// The version of Lockstep in this checkout.
fn version() -> String {
    let command = shell::command();
    // The commit may follow.
    command.get_version().and_then(|version| version.split(' ').next()).unwrap_or_default().to_owned()
}

fn sha256(content: &[u8]) -> String {
    digest(&SHA256, content).as_ref().iter().fold(String::new(), |text, byte| format!("{text}{byte:02x}"))
}

/// Parses `--repository`: files are below it.
fn repository(text: &str) -> Result<String, String> {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || "._-/:".contains(c);
    let url = text.trim_end_matches('/');
    match url.strip_prefix("https://").is_some_and(|rest| rest.contains('/')) && url.chars().all(is_allowed) {
        true => Ok(url.to_owned()),
        false => Err("expected a URL such as https://github.com/OWNER/lockstep".to_owned()),
    }
}
