//! A certificate from files, reloaded when they change.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use k8s_openapi::jiff::Timestamp;
use ring::digest::{SHA256, digest};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject};

use super::{Error, issue::Certificate, resolver::Resolver};
use crate::ops::{
    health::{Condition, Readiness},
    metrics::{Metrics, Role},
};

/// Changes are found by content, not by modification time: Kubernetes swaps a symlink above the files.
const POLL_INTERVAL: Duration = Duration::from_secs(5);

/// A certificate chain and its key.
#[derive(Debug, Clone)]
pub struct Files {
    pub certificate: PathBuf,
    pub key: PathBuf,
}

impl Files {
    /// Reads the pair and serves it, without reloading it later.
    pub fn serve(&self, resolver: &Resolver) -> Result<(), Error> {
        read(self)?.1?.serve(self, resolver).map(drop)
    }
}

/// A parsed pair. No `Debug`: it holds a key.
struct Pair {
    chain: Vec<CertificateDer<'static>>,
    leaf: Certificate,
    key: PrivateKeyDer<'static>,
}

/// SHA-256 of the certificate file and of the key file.
type Digests = [Vec<u8>; 2];

pub(super) struct Reloader {
    files: Files,
    resolver: Arc<Resolver>,
    metrics: Metrics,
    readiness: Readiness,
    serving: Digests,
    leaf: Certificate,
    /// The last content that could not be used (none if it could not be read), and whether that has been logged.
    unusable: Option<(Option<Digests>, bool)>,
}

impl Reloader {
    /// Reads the files for the first time.
    pub(super) fn start(
        files: Files,
        resolver: Arc<Resolver>,
        metrics: Metrics,
        readiness: Readiness,
    ) -> Result<Self, Error> {
        let (serving, pair) = read(&files)?;
        let leaf = pair?.serve(&files, &resolver)?;
        let reloader = Self { files, resolver, metrics, readiness, serving, leaf, unusable: None };
        reloader.report(Timestamp::now());
        Ok(reloader)
    }

    /// Never returns.
    pub(super) async fn run(mut self) {
        loop {
            tokio::time::sleep(POLL_INTERVAL).await;
            self.reload(Timestamp::now());
        }
    }

    fn reload(&mut self, now: Timestamp) {
        match read(&self.files) {
            Ok((digests, _)) if digests == self.serving => self.unusable = None,
            Ok((digests, pair)) => match pair.and_then(|pair| pair.serve(&self.files, &self.resolver)) {
                Ok(leaf) => {
                    (self.serving, self.leaf, self.unusable) = (digests, leaf, None);
                    self.metrics.certificate_rotated(Role::Leaf);
                    tracing::info!(
                        file = %self.files.certificate.display(),
                        expires = %self.leaf.not_after,
                        "the guard serves a new certificate"
                    );
                }
                Err(error) => self.warn_once(Some(digests), &error),
            },
            Err(error) => self.warn_once(None, &error),
        }
        self.report(now);
    }

    /// Warns only if the next poll finds the same content: one file may be written before the other.
    fn warn_once(&mut self, digests: Option<Digests>, error: &Error) {
        match &mut self.unusable {
            Some((seen, logged)) if *seen == digests => {
                if !*logged {
                    tracing::warn!("{error}; the former certificate stays in use");
                    *logged = true;
                }
            }
            _ => self.unusable = Some((digests, false)),
        }
    }

    fn report(&self, now: Timestamp) {
        self.metrics.certificate_expiry(Role::Leaf, self.leaf.not_after.as_second());
        if self.leaf.is_valid(now) {
            self.readiness.mark_true(Condition::Certificate);
        } else {
            self.readiness.mark_false(Condition::Certificate);
        }
    }
}

impl Pair {
    fn parse(files: &Files, certificate: &[u8], key: &[u8]) -> Result<Self, Error> {
        let unusable = |path: &Path, why: &'static str| Error::UnusableFile { path: path.to_owned(), why };
        let chain = CertificateDer::pem_slice_iter(certificate)
            .collect::<Result<Vec<_>, _>>()
            .map_err(|_| unusable(&files.certificate, "its PEM cannot be read"))?;
        let Some(leaf) = chain.first() else {
            return Err(unusable(&files.certificate, "there is no certificate in it"));
        };
        let leaf = Certificate::parse(leaf.clone())
            .map_err(|_| unusable(&files.certificate, "its first certificate cannot be read"))?;
        if !leaf.for_servers {
            return Err(unusable(&files.certificate, "its extended key usage does not allow servers"));
        }
        let key = PrivateKeyDer::from_pem_slice(key)
            .map_err(|_| unusable(&files.key, "there is no private key in it that can be read"))?;
        Ok(Self { chain, leaf, key })
    }

    fn serve(self, files: &Files, resolver: &Resolver) -> Result<Certificate, Error> {
        resolver.serve(self.chain, self.key).map_err(|error| match error {
            Error::Tls(rustls::Error::InconsistentKeys(_)) => {
                Error::UnusableFile { path: files.key.clone(), why: "it belongs to another certificate" }
            }
            _ => Error::UnusableFile { path: files.key.clone(), why: "its key cannot be used" },
        })?;
        Ok(self.leaf)
    }
}

/// Reads in the async task: the files are small and read seldom.
fn read(files: &Files) -> Result<(Digests, Result<Pair, Error>), Error> {
    let open = |path: &Path| {
        std::fs::read(path)
            .map_err(|error| Error::UnreadableFile { path: path.to_owned(), error: error.to_string() })
    };
    let (certificate, key) = (open(&files.certificate)?, open(&files.key)?);
    let sha256 = |bytes: &[u8]| digest(&SHA256, bytes).as_ref().to_vec();
    Ok(([sha256(&certificate), sha256(&key)], Pair::parse(files, &certificate, &key)))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::{
        certs::{
            issue::{Ca, Leaf, SubjectNames},
            testing::client_ca,
        },
        testing::TempDir,
    };

    const HOUR: Duration = Duration::from_hours(1);

    fn now() -> Timestamp {
        Timestamp::now()
    }

    fn leaf(validity: Duration) -> Leaf {
        let ca = Ca::generate("files", 2 * HOUR, now()).unwrap();
        ca.issue(&SubjectNames::from(["localhost".to_owned()]), validity, now()).unwrap()
    }

    struct FilesFixture {
        dir: TempDir,
        resolver: Arc<Resolver>,
        metrics: Metrics,
        readiness: Readiness,
    }

    impl FilesFixture {
        fn new() -> Self {
            let readiness = Readiness::new([Condition::Certificate]);
            Self { dir: TempDir::new(), resolver: Arc::default(), metrics: Metrics::new(), readiness }
        }

        fn files(&self) -> Files {
            let file = |name: &str| self.dir.path().join(name);
            Files { certificate: file("tls.crt"), key: file("tls.key") }
        }

        fn write(&self, certificate: &str, key: &str) {
            fs::write(self.files().certificate, certificate).unwrap();
            fs::write(self.files().key, key).unwrap();
        }

        fn put(&self, leaf: &Leaf) {
            self.write(&leaf.certificate.pem(), &leaf.key_pem());
        }

        fn start(&self) -> Result<Reloader, Error> {
            Reloader::start(self.files(), self.resolver.clone(), self.metrics.clone(), self.readiness.clone())
        }

        fn serves(&self, leaf: &Leaf) -> bool {
            self.resolver.chain().is_some_and(|chain| chain[0] == *leaf.certificate.der())
        }
    }

    #[test]
    fn new_pair_is_served_and_an_unusable_one_is_not() {
        let fixture = FilesFixture::new();
        let (first, second) = (leaf(HOUR), leaf(HOUR));
        fixture.put(&first);
        let mut reloader = fixture.start().unwrap();
        assert!(fixture.serves(&first) && fixture.readiness.unmet().is_empty());
        for (certificate, key) in [
            (second.certificate.pem(), first.key_pem()),
            ("nonsense".to_owned(), second.key_pem()),
            (second.certificate.pem(), "nonsense".to_owned()),
        ] {
            fixture.write(&certificate, &key);
            for logged in [false, true, true] {
                reloader.reload(now());
                assert!(fixture.serves(&first));
                assert_eq!(
                    reloader.unusable.as_ref().map(|(_, logged)| *logged),
                    Some(logged),
                    "logged at the second poll"
                );
            }
        }
        fs::remove_file(fixture.files().key).unwrap();
        reloader.reload(now());
        assert!(fixture.serves(&first) && fixture.readiness.unmet().is_empty());
        fixture.put(&second);
        reloader.reload(now());
        assert!(fixture.serves(&second) && reloader.unusable.is_none());
        let metrics = fixture.metrics.render();
        assert!(
            metrics.contains("lockstep_certificate_rotations_total{certificate=\"leaf\"} 1"),
            "{metrics}"
        );
    }

    #[test]
    fn pair_behind_a_swapped_symlink_is_reloaded() {
        let fixture = FilesFixture::new();
        let (first, second) = (leaf(HOUR), leaf(HOUR));
        let dir = |name: &str| fixture.dir.path().join(name);
        for (name, leaf) in [("one", &first), ("two", &second)] {
            fs::create_dir(dir(name)).unwrap();
            fs::write(dir(name).join("tls.crt"), leaf.certificate.pem()).unwrap();
            fs::write(dir(name).join("tls.key"), leaf.key_pem()).unwrap();
        }
        let link = |to: &str| {
            std::os::unix::fs::symlink(to, dir("..tmp")).unwrap();
            fs::rename(dir("..tmp"), dir("..data")).unwrap();
        };
        link("one");
        for name in ["tls.crt", "tls.key"] {
            std::os::unix::fs::symlink(format!("..data/{name}"), dir(name)).unwrap();
        }
        let mut reloader = fixture.start().unwrap();
        assert!(fixture.serves(&first));
        link("two");
        reloader.reload(now());
        assert!(fixture.serves(&second));
    }

    #[test]
    fn expired_pair_makes_the_replica_unready() {
        let fixture = FilesFixture::new();
        fixture.put(&leaf(HOUR));
        let mut reloader = fixture.start().unwrap();
        let later = now() + 2 * HOUR;
        reloader.reload(later);
        assert_eq!(fixture.readiness.unmet(), [Condition::Certificate]);
        fixture.put(&leaf(2 * HOUR - Duration::from_secs(1)));
        reloader.reload(now());
        assert!(fixture.readiness.unmet().is_empty());
    }

    #[test]
    fn unusable_pair_at_start_is_an_error_that_names_the_file() {
        let fixture = FilesFixture::new();
        let (one, other, client) = (leaf(HOUR), leaf(HOUR), client_ca());
        let error_of = |fixture: &FilesFixture| fixture.start().err().expect("an error").to_string();
        assert!(error_of(&fixture).contains("tls.crt cannot be read"), "{}", error_of(&fixture));
        for (certificate, key, file, why) in [
            ("", &*one.key_pem(), "tls.crt", "no certificate"),
            (
                "-----BEGIN CERTIFICATE-----\n%\n-----END CERTIFICATE-----\n",
                &*one.key_pem(),
                "tls.crt",
                "PEM",
            ),
            (&*client.certificate.pem(), &*client.key_pem(), "tls.crt", "does not allow servers"),
            (&*one.certificate.pem(), "", "tls.key", "no private key"),
            (&*one.certificate.pem(), &*other.key_pem(), "tls.key", "another certificate"),
        ] {
            fixture.write(certificate, key);
            let text = error_of(&fixture);
            assert!(text.contains(file) && text.contains(why) && text.lines().count() == 1, "{text}");
            assert!(!text.contains("PRIVATE"), "{text}");
        }
    }
}
