//! A certificate from files, reloaded when they change.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use k8s_openapi::jiff::Timestamp;
use rustls::{
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    sign::CertifiedKey,
};
use tokio::task::JoinSet;

use super::resolver::{Resolver, certified_key};
use crate::ops::{
    health::{Condition, Readiness},
    metrics::{CertificateRole, Metrics},
};
use lockstep_core::certs::issue::Certificate;

/// Changes are found by content, not by modification time: Kubernetes swaps a symlink above the files.
const POLL_INTERVAL: Duration = Duration::from_secs(5);

/// A certificate chain and its key.
pub struct Files {
    pub certificate: PathBuf,
    pub key: PathBuf,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{} cannot be read: {error}; check --tls-cert and --tls-key", path.display())]
    Unreadable { path: PathBuf, error: String },
    #[error("{} cannot be used: {why}; it must be PEM, the certificate first in its chain, with its own key", path.display())]
    Unusable { path: PathBuf, why: &'static str },
}

/// Serves a pair from files, and spawns the task that reads them again and again.
pub fn start(
    tasks: &mut JoinSet<()>,
    files: Files,
    metrics: &Metrics,
    readiness: &Readiness,
) -> Result<Arc<Resolver>, Error> {
    let mut reloader = Reloader::new(files, metrics.clone(), readiness.clone())?;
    // The tool that writes the files also sets the caBundle.
    readiness.mark_true(Condition::Bundle);
    let resolver = reloader.resolver.clone();
    tasks.spawn(async move {
        loop {
            tokio::time::sleep(POLL_INTERVAL).await;
            reloader.reload(Timestamp::now());
        }
    });
    Ok(resolver)
}

struct Reloader {
    files: Files,
    resolver: Arc<Resolver>,
    metrics: Metrics,
    readiness: Readiness,
    leaf: Certificate,
    /// Why the files could not be used at the last poll, and whether that has been logged.
    problem: Option<(String, bool)>,
}

impl Reloader {
    /// Reads the files for the first time.
    fn new(files: Files, metrics: Metrics, readiness: Readiness) -> Result<Self, Error> {
        let (pair, leaf) = files.load()?;
        let resolver = Arc::<Resolver>::default();
        resolver.serve(pair);
        let reloader = Self { files, resolver, metrics, readiness, leaf, problem: None };
        reloader.report(Timestamp::now());
        Ok(reloader)
    }

    fn reload(&mut self, now: Timestamp) {
        match self.files.load() {
            Ok((pair, leaf)) => {
                self.problem = None;
                if self.resolver.chain().as_ref() != Some(&pair.cert) {
                    self.resolver.serve(pair);
                    self.leaf = leaf;
                    self.metrics.certificate_rotations.of(CertificateRole::Leaf).inc();
                    tracing::info!(
                        file = %self.files.certificate.display(),
                        expires = %self.leaf.not_after,
                        "the webhook serves a new certificate"
                    );
                }
            }
            Err(error) => self.warn_once(error.to_string()),
        }
        self.report(now);
    }

    /// Warns only if two polls in a row find the same problem: one file may be written before the other.
    fn warn_once(&mut self, problem: String) {
        let known = self.problem.take_if(|(known, _)| *known == problem);
        if let Some((_, false)) = known {
            tracing::warn!("{problem}; the former certificate stays in use");
        }
        self.problem = Some((problem, known.is_some()));
    }

    fn report(&self, now: Timestamp) {
        self.metrics.certificate_expiry.of(CertificateRole::Leaf).set(self.leaf.not_after.as_second());
        if self.leaf.is_valid(now) {
            self.readiness.mark_true(Condition::Certificate);
        } else {
            self.readiness.mark_false(Condition::Certificate);
        }
    }
}

impl Files {
    /// The pair to serve, and the first certificate of its chain. Reads in the async task: the files are small and read
    /// seldom.
    fn load(&self) -> Result<(CertifiedKey, Certificate), Error> {
        let unusable = |path: &Path, why| Error::Unusable { path: path.to_owned(), why };
        let certificate = read(&self.certificate)?;
        let key = read(&self.key)?;
        let chain = CertificateDer::pem_slice_iter(&certificate)
            .collect::<Result<Vec<_>, _>>()
            .map_err(|_| unusable(&self.certificate, "its PEM cannot be read"))?;
        let Some(leaf) = chain.first() else {
            return Err(unusable(&self.certificate, "there is no certificate in it"));
        };
        let leaf = Certificate::parse(leaf.clone())
            .map_err(|_| unusable(&self.certificate, "its first certificate cannot be read"))?;
        if !leaf.for_servers {
            return Err(unusable(&self.certificate, "its extended key usage does not allow servers"));
        }
        let key = PrivateKeyDer::from_pem_slice(&key)
            .map_err(|_| unusable(&self.key, "there is no private key in it that can be read"))?;
        let pair = certified_key(chain, key).map_err(|error| match error {
            rustls::Error::InconsistentKeys(_) => unusable(&self.key, "it belongs to another certificate"),
            _ => unusable(&self.key, "its key cannot be used"),
        })?;
        Ok((pair, leaf))
    }
}

fn read(path: &Path) -> Result<Vec<u8>, Error> {
    let unreadable =
        |error: std::io::Error| Error::Unreadable { path: path.to_owned(), error: error.to_string() };
    std::fs::read(path).map_err(unreadable)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use lockstep_core::{
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
        metrics: Metrics,
        readiness: Readiness,
    }

    impl FilesFixture {
        fn new() -> Self {
            let readiness = Readiness::new([Condition::Certificate]);
            Self { dir: TempDir::new(), metrics: Metrics::new(), readiness }
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
            Reloader::new(self.files(), self.metrics.clone(), self.readiness.clone())
        }
    }

    fn serves(reloader: &Reloader, leaf: &Leaf) -> bool {
        reloader.resolver.chain().is_some_and(|chain| chain[0] == *leaf.certificate.der())
    }

    #[test]
    fn new_pair_is_served_and_an_unusable_one_is_not() {
        let fixture = FilesFixture::new();
        let (first, second) = (leaf(HOUR), leaf(HOUR));
        fixture.put(&first);
        let mut reloader = fixture.start().unwrap();
        assert!(serves(&reloader, &first) && fixture.readiness.unmet().is_empty());
        for (certificate, key) in [
            (second.certificate.pem(), first.key_pem()),
            ("nonsense".to_owned(), second.key_pem()),
            (second.certificate.pem(), "nonsense".to_owned()),
        ] {
            fixture.write(&certificate, &key);
            for logged in [false, true, true] {
                reloader.reload(now());
                assert!(serves(&reloader, &first));
                assert_eq!(
                    reloader.problem.as_ref().map(|(_, logged)| *logged),
                    Some(logged),
                    "logged at the second poll"
                );
            }
        }
        fs::remove_file(fixture.files().key).unwrap();
        reloader.reload(now());
        assert!(serves(&reloader, &first) && fixture.readiness.unmet().is_empty());
        fixture.put(&second);
        reloader.reload(now());
        assert!(serves(&reloader, &second) && reloader.problem.is_none());
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
        assert!(serves(&reloader, &first));
        link("two");
        reloader.reload(now());
        assert!(serves(&reloader, &second));
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
