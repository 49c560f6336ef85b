//! Writes an image of one static program as an OCI archive, reproducibly, without a container engine or a registry.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use ring::digest::{SHA256, digest};
use serde_json::{Value, json};

use crate::Error;
use crate::archive::{Tar, gzip};

/// Labels of the Lockstep image, as in the `Dockerfile`.
const LABELS: [(&str, &str); 3] = [
    ("org.opencontainers.image.title", "lockstep"),
    (
        "org.opencontainers.image.description",
        "Keeps read-only companions of ConfigMaps and Secrets in step with their sources",
    ),
    ("org.opencontainers.image.licenses", "Apache-2.0"),
];
const USER: &str = "65532:65532";

/// One program in an empty file system.
#[derive(Clone, Debug)]
pub struct Image {
    /// Such as `lockstep:0.1.0`.
    name: String,
    /// In OCI terms, such as `amd64`.
    architecture: String,
    /// The name of the program in `/`.
    program: &'static str,
    command: &'static [&'static str],
    labels: BTreeMap<String, String>,
    /// The files in `/`: name, mode and content.
    files: Vec<(String, u32, Vec<u8>)>,
    /// The Unix time of the files.
    modified: u64,
    /// As RFC 3339 writes it.
    created: Option<String>,
    is_compressed: bool,
}

/// What an image has only in a release.
#[derive(Clone, Debug)]
pub struct ReleasedImage<'a> {
    /// In OCI terms, such as `amd64`.
    pub architecture: &'a str,
    /// More labels.
    pub labels: &'a [(&'a str, &'a str)],
    /// More files in `/`.
    pub files: &'a [(&'a str, &'a [u8])],
    /// The Unix time of the files.
    pub modified: u64,
    /// The time of the image, as RFC 3339 writes it.
    pub created: &'a str,
}

impl Image {
    /// The image of Lockstep with this binary, which has to be static.
    ///
    /// # Errors
    /// When the binary cannot be read.
    pub fn lockstep(binary: &Path, name: &str) -> Result<Self, Error> {
        let mut image = Self::read(binary, name, "lockstep", &["run"])?;
        image.labels.extend(LABELS.map(|(key, value)| (key.to_owned(), value.to_owned())));
        Ok(image)
    }

    /// The same image as it is released: with more labels and files, and compressed, so that registries store it as it
    /// is in the archive.
    #[must_use]
    pub fn released(mut self, release: &ReleasedImage<'_>) -> Self {
        self.architecture = release.architecture.to_owned();
        let labels = release.labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned()));
        self.labels.extend(labels);
        let files = release.files.iter().map(|(name, content)| ((*name).to_owned(), 0o644, content.to_vec()));
        self.files.extend(files);
        self.modified = release.modified;
        self.created = Some(release.created.to_owned());
        self.is_compressed = true;
        self
    }

    /// The image of the pause container, which keeps the namespaces of a pod open.
    pub(crate) fn pause(binary: &Path, name: &str) -> Result<Self, Error> {
        Self::read(binary, name, "pause", &[])
    }

    fn read(
        binary: &Path,
        name: &str,
        program: &'static str,
        command: &'static [&'static str],
    ) -> Result<Self, Error> {
        let content = fs::read(binary).map_err(Error::at(binary))?;
        // A colon before the last slash belongs to a port.
        let tagged = name.rsplit('/').next().is_some_and(|last| last.contains(':'));
        let name = if tagged { name.to_owned() } else { format!("{name}:latest") };
        Ok(Self {
            name,
            architecture: architecture().to_owned(),
            program,
            command,
            labels: BTreeMap::new(),
            files: vec![(program.to_owned(), 0o755, content)],
            modified: 0,
            created: None,
            is_compressed: false,
        })
    }

    /// Writes the archive, for `ctr images import` and `docker load`.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self, archive: &Path) -> Result<(), Error> {
        fs::write(archive, self.archive()?).map_err(Error::at(archive))
    }

    fn archive(&self) -> Result<Vec<u8>, Error> {
        let mut layer = Tar::new(self.modified);
        for (name, mode, content) in &self.files {
            layer.file(name, *mode, content);
        }
        let layer = layer.end();
        let mut config = json!({
            "architecture": self.architecture,
            "os": "linux",
            "config": {
                "User": USER,
                "Entrypoint": [format!("/{}", self.program)],
                "Cmd": self.command,
                "Labels": self.labels,
            },
            // Of the layer before it is compressed.
            "rootfs": { "type": "layers", "diff_ids": [sha256(&layer)] },
            "history": [{ "created_by": "controlplane image" }],
        });
        if let Some(created) = &self.created {
            config["created"] = json!(created);
        }
        let (layer, layer_type) = match self.is_compressed {
            true => (gzip(&layer)?, "application/vnd.oci.image.layer.v1.tar+gzip"),
            false => (layer, "application/vnd.oci.image.layer.v1.tar"),
        };
        let config = config.to_string().into_bytes();
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": descriptor("application/vnd.oci.image.config.v1+json", &config),
            "layers": [descriptor(layer_type, &layer)],
        });
        let manifest = manifest.to_string().into_bytes();
        let mut entry = descriptor("application/vnd.oci.image.manifest.v1+json", &manifest);
        entry["platform"] = json!({ "architecture": self.architecture, "os": "linux" });
        entry["annotations"] = json!({
            "io.containerd.image.name": full_name(&self.name),
            "org.opencontainers.image.ref.name": self.name.rsplit_once(':').map(|(_, tag)| tag),
        });
        let index = json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.index.v1+json",
            "manifests": [entry],
        });
        // For engines that do not support OCI archives.
        let docker = json!([{ "Config": blob(&config), "RepoTags": [self.name], "Layers": [blob(&layer)] }]);

        let mut archive = Tar::new(0);
        archive.file("oci-layout", 0o644, br#"{"imageLayoutVersion":"1.0.0"}"#);
        archive.file("index.json", 0o644, index.to_string().as_bytes());
        archive.file("manifest.json", 0o644, docker.to_string().as_bytes());
        for content in [&config, &manifest, &layer] {
            archive.file(&blob(content), 0o644, content);
        }
        Ok(archive.end())
    }
}

fn descriptor(media_type: &str, content: &[u8]) -> Value {
    json!({ "mediaType": media_type, "digest": sha256(content), "size": content.len() })
}

fn sha256(content: &[u8]) -> String {
    let bytes = digest(&SHA256, content);
    bytes.as_ref().iter().fold("sha256:".to_owned(), |text, byte| format!("{text}{byte:02x}"))
}

/// The path of a blob in the archive.
fn blob(content: &[u8]) -> String {
    format!("blobs/{}", sha256(content).replace(':', "/"))
}

/// The architecture in OCI terms.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// The name as runtimes store it: without a host, it belongs to docker.io.
fn full_name(name: &str) -> String {
    match name.split_once('/') {
        None => format!("docker.io/library/{name}"),
        Some((host, _)) if host == "localhost" || host.contains(['.', ':']) => name.to_owned(),
        Some(_) => format!("docker.io/{name}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;
    use std::process::Command;

    const DOCKERFILE: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../Dockerfile"));

    /// An image whose program is any file.
    fn image() -> Image {
        Image::lockstep(Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/go.sum")), "lockstep:1").unwrap()
    }

    #[test]
    fn name_without_a_tag_gets_latest() {
        let file = std::env::current_exe().unwrap();
        for (name, whole) in [
            ("lockstep", "lockstep:latest"),
            ("localhost:5000/lockstep", "localhost:5000/lockstep:latest"),
            ("localhost:5000/lockstep:1", "localhost:5000/lockstep:1"),
        ] {
            assert_eq!(Image::pause(&file, name).unwrap().name, whole);
        }
    }

    #[test]
    fn labels_and_user_match_the_dockerfile() {
        for (key, value) in LABELS {
            assert!(DOCKERFILE.contains(&format!("{key}=\"{value}\"")), "{key}");
        }
        assert_eq!(DOCKERFILE.matches("org.opencontainers").count(), LABELS.len());
        for line in [&format!("\nUSER {USER}\n"), "\nENTRYPOINT [\"/lockstep\"]\n", "\nCMD [\"run\"]\n"] {
            assert!(DOCKERFILE.contains(line), "{line}");
        }
    }

    #[test]
    fn archive_unpacks_and_every_digest_is_right() {
        assert_unpacks(&image(), "plain");
        let released = image().released(&ReleasedImage {
            architecture: "arm64",
            labels: &[("org.opencontainers.image.version", "1")],
            files: &[("lockstep.cdx.json", b"{}")],
            modified: 1_000_000_000,
            created: "2001-09-09T01:46:40Z",
        });
        let config = assert_unpacks(&released, "released");
        assert_eq!(config["architecture"], "arm64");
        assert_eq!(config["created"], "2001-09-09T01:46:40Z");
        assert_eq!(config["config"]["Labels"]["org.opencontainers.image.version"], "1");
        assert_eq!(config["config"]["Labels"].as_object().unwrap().len(), LABELS.len() + 1);
    }

    /// Writes the archive twice, unpacks it with tar, follows every digest, and returns the configuration.
    fn assert_unpacks(image: &Image, name: &str) -> Value {
        let dir = std::env::temp_dir().join(format!("image-{name}-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        let archive = dir.join("image.tar");
        image.write(&archive).unwrap();
        assert!(fs::read(&archive).unwrap() == image.archive().unwrap(), "the archive is not reproducible");
        let tar = |args: &[&str], file: &Path| {
            assert!(Command::new("tar").args(args).arg(file).current_dir(&dir).status().unwrap().success());
        };
        tar(&["-xf"], &archive);

        let json =
            |path: &str| -> Value { serde_json::from_slice(&fs::read(dir.join(path)).unwrap()).unwrap() };
        let follow = |descriptor: &Value| {
            let path = format!("blobs/{}", descriptor["digest"].as_str().unwrap().replace(':', "/"));
            let content = fs::read(dir.join(&path)).unwrap();
            assert_eq!(descriptor["digest"], sha256(&content));
            assert_eq!(descriptor["size"], content.len());
            path
        };
        let entry = json("index.json")["manifests"][0].clone();
        assert_eq!(entry["annotations"]["io.containerd.image.name"], "docker.io/library/lockstep:1");
        let manifest = json(&follow(&entry));
        let (config, layer) = (follow(&manifest["config"]), follow(&manifest["layers"][0]));
        assert_eq!(
            json("manifest.json")[0],
            json!({
                "Config": config, "RepoTags": ["lockstep:1"], "Layers": [layer],
            })
        );
        let layer = dir.join(layer);
        if image.is_compressed {
            let unpacked = Command::new("gzip").arg("-dc").arg(&layer).output().unwrap().stdout;
            fs::write(&layer, unpacked).unwrap();
        }
        assert_eq!(json(&config)["rootfs"]["diff_ids"][0], sha256(&fs::read(&layer).unwrap()));
        tar(&["-xf"], &layer);
        for (name, mode, content) in &image.files {
            let file = dir.join(name);
            assert!(fs::read(&file).unwrap() == *content, "{name}");
            assert_eq!(fs::metadata(file).unwrap().permissions().mode() & 0o777, *mode, "{name}");
        }
        let config = json(&config);
        fs::remove_dir_all(dir).unwrap();
        config
    }

    #[test]
    fn short_names_are_completed_as_runtimes_do() {
        for (name, full) in [
            ("lockstep:1", "docker.io/library/lockstep:1"),
            ("team/lockstep:1", "docker.io/team/lockstep:1"),
            ("localhost/pause:1", "localhost/pause:1"),
            ("registry.example.com:5000/lockstep", "registry.example.com:5000/lockstep"),
        ] {
            assert_eq!(full_name(name), full);
        }
    }
}
