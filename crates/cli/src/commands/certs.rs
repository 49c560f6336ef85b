//! `lockstep certs`: writes a CA and a leaf to files, for development; `rotate` replaces the CA of running replicas.

pub mod rotate;

use std::{
    fs::{self, OpenOptions},
    io::Write,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, bail};
use clap::{Args, Subcommand};
use k8s_openapi::jiff::Timestamp;

use crate::commands::flags;
use lockstep_core::certs::issue::{Ca, SubjectNames, subject_name};

#[derive(Subcommand)]
pub enum CertsCommand {
    /// Replace the webhook's CA and its key after a leak; no request fails meanwhile
    Rotate(rotate::Rotate),
}

#[derive(Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct CertsArgs {
    #[command(subcommand)]
    pub command: Option<CertsCommand>,

    /// The directory to write the files to
    #[arg(long, default_value = "certs")]
    pub dir: PathBuf,

    /// The DNS names or IP addresses under which the API server calls the webhook
    #[arg(long, value_name = "NAME_OR_IP", default_values = ["localhost", "127.0.0.1"], value_parser = host)]
    pub host: Vec<String>,

    /// How long the CA is valid
    #[arg(long, default_value = "365d", value_parser = flags::validity)]
    pub ca_validity: Duration,

    /// How long the certificate is valid
    #[arg(long, default_value = "7d", value_parser = flags::validity)]
    pub leaf_validity: Duration,

    /// Overwrite existing files
    #[arg(long)]
    pub force: bool,
}

pub async fn run(settings: &CertsArgs) -> anyhow::Result<()> {
    if let Some(CertsCommand::Rotate(settings)) = &settings.command {
        return rotate::run(settings).await;
    }
    print!("{}", generate(settings, Timestamp::now())?);
    Ok(())
}

/// Writes the files and returns the text to print.
fn generate(settings: &CertsArgs, now: Timestamp) -> anyhow::Result<String> {
    let names: SubjectNames = settings.host.iter().cloned().collect();
    let ca = Ca::generate("lockstep certs", settings.ca_validity, now)?;
    let leaf = ca.issue(&names, settings.leaf_validity, now)?;
    // The CA's key is not written: the next run generates another CA, and nobody can sign with this one.
    let files = [
        ("ca.crt", ca.certificate.pem(), 0o644),
        ("tls.crt", leaf.certificate.pem(), 0o644),
        ("tls.key", leaf.key_pem(), 0o600),
    ]
    .map(|(name, text, mode)| (settings.dir.join(name), text, mode));
    // Checked before any file is written: a refusal in between would leave files that do not belong together.
    if let Some((path, ..)) = files.iter().find(|(path, ..)| !settings.force && path.exists()) {
        bail!("{} exists already: choose another --dir, or overwrite it with --force", path.display());
    }
    fs::create_dir_all(&settings.dir)
        .with_context(|| format!("{} cannot be created: choose another --dir", settings.dir.display()))?;
    for (path, text, mode) in &files {
        write(path, text, *mode)
            .with_context(|| format!("{} cannot be written: choose another --dir", path.display()))?;
    }
    let [ca_file, certificate, key] = files.map(|(path, ..)| path.display().to_string());
    Ok(format!(
        "{ca_file}: the CA, for caBundle in the webhook configurations, until {}\n\
         {certificate}, {key}: a certificate for {}, until {}\n\
         \n\
         lockstep run --tls-cert {certificate} --tls-key {key}\n",
        ca.certificate.not_after,
        leaf.names.iter().map(String::as_str).collect::<Vec<_>>().join(", "),
        leaf.certificate.not_after,
    ))
}

/// Always creates the file: an existing one may be readable by others, or a symlink.
fn write(path: &Path, text: &str, mode: u32) -> std::io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let mut file = OpenOptions::new().write(true).create_new(true).mode(mode).open(path)?;
    file.write_all(text.as_bytes())
}

fn host(text: &str) -> Result<String, String> {
    subject_name(text).ok_or_else(|| "a DNS name or an IP address is needed".to_owned())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use rustls::{
        crypto::ring::default_provider,
        pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
        sign::CertifiedKey,
    };

    use super::*;
    use lockstep_core::{certs::issue::Certificate, testing::TempDir};

    fn settings(dir: &Path) -> CertsArgs {
        CertsArgs {
            command: None,
            dir: dir.join("new/certs"),
            host: vec!["localhost".to_owned(), "127.0.0.1".to_owned()],
            ca_validity: Duration::from_hours(24),
            leaf_validity: Duration::from_hours(1),
            force: false,
        }
    }

    #[test]
    fn written_files_can_be_served_and_only_the_owner_reads_the_key() {
        let scratch = TempDir::new();
        let settings = settings(scratch.path());
        let printed = generate(&settings, Timestamp::now()).unwrap();
        let file = |name: &str| settings.dir.join(name);
        let chain = CertificateDer::pem_file_iter(file("tls.crt")).unwrap().map(Result::unwrap).collect();
        let key = PrivateKeyDer::from_pem_file(file("tls.key")).unwrap();
        CertifiedKey::from_der(chain, key, &default_provider()).unwrap();
        assert_eq!(fs::metadata(file("tls.key")).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(!file("ca.key").exists());
        assert_eq!(Certificate::parse_all(&fs::read(file("ca.crt")).unwrap()).unwrap().len(), 1);
        for name in ["ca.crt", "tls.crt", "tls.key"] {
            assert!(printed.contains(&file(name).display().to_string()), "{printed}");
        }
        assert!(!printed.contains("PRIVATE") && printed.contains("lockstep run --tls-cert"), "{printed}");
    }

    #[test]
    fn existing_files_are_overwritten_only_with_force() {
        let scratch = TempDir::new();
        let mut settings = settings(scratch.path());
        fs::create_dir_all(&settings.dir).unwrap();
        let key = settings.dir.join("tls.key");
        fs::write(&key, "mine").unwrap();
        let error = generate(&settings, Timestamp::now()).unwrap_err().to_string();
        assert!(error.contains("tls.key exists already") && error.contains("--force"), "{error}");
        assert_eq!(fs::read_to_string(&key).unwrap(), "mine");
        assert!(!settings.dir.join("ca.crt").exists(), "no file is written if one exists");

        settings.force = true;
        generate(&settings, Timestamp::now()).unwrap();
        assert!(fs::read_to_string(&key).unwrap().contains("PRIVATE KEY"));
        assert_eq!(fs::metadata(&key).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn host_must_be_a_dns_name_or_an_ip_address() {
        assert_eq!(host("Webhook.Example"), Ok("webhook.example".to_owned()));
        assert_eq!(host("[::1]"), Ok("::1".to_owned()));
        assert!(host("a host").is_err() && host("").is_err() && host("https://x").is_err());
    }
}
