//! Writes an image of one static program as an OCI archive, reproducibly, without a container engine or a registry.

use std::fs;
use std::path::Path;

use ring::digest::{SHA256, digest};
use serde_json::{Value, json};

use crate::Error;

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
    /// The name of the program in `/`.
    program: &'static str,
    command: &'static [&'static str],
    labels: &'static [(&'static str, &'static str)],
    content: Vec<u8>,
}

impl Image {
    /// The image of Lockstep with this binary, which has to be static.
    ///
    /// # Errors
    /// When the binary cannot be read.
    pub fn lockstep(binary: &Path, name: &str) -> Result<Self, Error> {
        Self::read(binary, name, "lockstep", &["run"], &LABELS)
    }

    /// The image of the pause container, which keeps the namespaces of a pod open.
    pub(crate) fn pause(binary: &Path, name: &str) -> Result<Self, Error> {
        Self::read(binary, name, "pause", &[], &[])
    }

    fn read(
        binary: &Path,
        name: &str,
        program: &'static str,
        command: &'static [&'static str],
        labels: &'static [(&'static str, &'static str)],
    ) -> Result<Self, Error> {
        let content = fs::read(binary).map_err(Error::at(binary))?;
        // A colon before the last slash belongs to a port.
        let tagged = name.rsplit('/').next().is_some_and(|last| last.contains(':'));
        let name = if tagged { name.to_owned() } else { format!("{name}:latest") };
        Ok(Self { name, program, command, labels, content })
    }

    /// Writes the archive, for `ctr images import` and `docker load`.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write(&self, archive: &Path) -> Result<(), Error> {
        fs::write(archive, self.archive()).map_err(Error::at(archive))
    }

    fn archive(&self) -> Vec<u8> {
        let mut layer = Tar::default();
        layer.file(self.program, 0o755, &self.content);
        let layer = layer.end();
        let config = json!({
            "architecture": architecture(),
            "os": "linux",
            "config": {
                "User": USER,
                "Entrypoint": [format!("/{}", self.program)],
                "Cmd": self.command,
                "Labels": self.labels.iter().copied().collect::<std::collections::BTreeMap<_, _>>(),
            },
            "rootfs": { "type": "layers", "diff_ids": [sha256(&layer)] },
            "history": [{ "created_by": "controlplane image" }],
        });
        let config = config.to_string().into_bytes();
        let manifest = json!({
            "schemaVersion": 2,
            "mediaType": "application/vnd.oci.image.manifest.v1+json",
            "config": descriptor("application/vnd.oci.image.config.v1+json", &config),
            "layers": [descriptor("application/vnd.oci.image.layer.v1.tar", &layer)],
        });
        let manifest = manifest.to_string().into_bytes();
        let mut entry = descriptor("application/vnd.oci.image.manifest.v1+json", &manifest);
        entry["platform"] = json!({ "architecture": architecture(), "os": "linux" });
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

        let mut archive = Tar::default();
        archive.file("oci-layout", 0o644, br#"{"imageLayoutVersion":"1.0.0"}"#);
        archive.file("index.json", 0o644, index.to_string().as_bytes());
        archive.file("manifest.json", 0o644, docker.to_string().as_bytes());
        for content in [&config, &manifest, &layer] {
            archive.file(&blob(content), 0o644, content);
        }
        archive.end()
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

// ---------------------------------------------------------------- tar

const BLOCK: usize = 512;

/// Builds a tar file of regular files with short names, owned by root, dated 1970.
#[derive(Default)]
struct Tar(Vec<u8>);

impl Tar {
    fn file(&mut self, name: &str, mode: u32, content: &[u8]) {
        let mut header = [0; BLOCK];
        let mut put = |at: usize, text: &str| header[at..at + text.len()].copy_from_slice(text.as_bytes());
        put(0, name);
        put(100, &format!("{mode:07o}"));
        put(108, "0000000");
        put(116, "0000000");
        put(124, &format!("{:011o}", content.len()));
        put(136, "00000000000");
        // The checksum field counts as blanks.
        put(148, "        ");
        put(156, "0");
        put(257, "ustar\x0000");
        let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
        header[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        self.0.extend(header);
        self.0.extend(content);
        self.0.resize(self.0.len().next_multiple_of(BLOCK), 0);
    }

    fn end(mut self) -> Vec<u8> {
        self.0.resize(self.0.len() + 2 * BLOCK, 0);
        self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    const DOCKERFILE: &str = include_str!(concat!(env!("CARGO_MANIFEST_DIR"), "/../../Dockerfile"));

    fn image() -> Image {
        Image {
            name: "lockstep:1".to_owned(),
            program: "lockstep",
            command: &["run"],
            labels: &LABELS,
            content: b"binary".repeat(100),
        }
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
        let dir = std::env::temp_dir().join(format!("image-{}", std::process::id()));
        fs::create_dir(&dir).unwrap();
        let archive = dir.join("image.tar");
        image().write(&archive).unwrap();
        assert_eq!(fs::read(&archive).unwrap(), image().archive(), "the archive is not reproducible");
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
        assert_eq!(json(&config)["rootfs"]["diff_ids"][0], manifest["layers"][0]["digest"]);
        tar(&["-xf"], &dir.join(layer));
        assert_eq!(fs::read(dir.join("lockstep")).unwrap(), image().content);
        fs::remove_dir_all(dir).unwrap();
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
