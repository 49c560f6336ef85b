//! A certificate from files, read again when they change.

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

/// How often the files are read. By content, not by time: Kubernetes swaps a symlink above them.
const POLL: Duration = Duration::from_secs(5);

/// A certificate chain and its key.
#[derive(Debug, Clone)]
pub struct Files {
    pub certificate: PathBuf,
    pub key: PathBuf,
}

impl Files {
    /// Reads the pair and serves with it, once.
    pub fn serve(&self, resolver: &Resolver) -> Result<(), Error> {
        read(self)?.1?.serve(self, resolver).map(drop)
    }
}

/// A pair that has been read. It has no `Debug`: it holds a key.
struct Pair {
    chain: Vec<CertificateDer<'static>>,
    leaf: Certificate,
    key: PrivateKeyDer<'static>,
}

/// Tells one content of the files from another.
type Print = [Vec<u8>; 2];

/// What the files held at the last look.
pub(super) struct Reloader {
    files: Files,
    resolver: Arc<Resolver>,
    metrics: Metrics,
    readiness: Readiness,
    /// What is served.
    serving: Print,
    leaf: Certificate,
    /// The last content that could not be used, and whether that has been told.
    broken: Option<(Option<Print>, bool)>,
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
        let reloader = Self { files, resolver, metrics, readiness, serving, leaf, broken: None };
        reloader.tell(Timestamp::now());
        Ok(reloader)
    }

    /// Reads them again and again, for ever.
    pub(super) async fn run(mut self) {
        loop {
            tokio::time::sleep(POLL).await;
            self.look(Timestamp::now());
        }
    }

    fn look(&mut self, now: Timestamp) {
        match read(&self.files) {
            Ok((print, _)) if print == self.serving => self.broken = None,
            Ok((print, pair)) => match pair.and_then(|pair| pair.serve(&self.files, &self.resolver)) {
                Ok(leaf) => {
                    (self.serving, self.leaf, self.broken) = (print, leaf, None);
                    self.metrics.certificate_rotated(Role::Leaf);
                    tracing::info!(
                        file = %self.files.certificate.display(),
                        expires = %self.leaf.not_after,
                        "the guard serves with a new certificate"
                    );
                }
                Err(error) => self.complain(Some(print), &error),
            },
            Err(error) => self.complain(None, &error),
        }
        self.tell(now);
    }

    /// Tells what is wrong once, and only if it is the same at the next look: one file may be written before the other.
    fn complain(&mut self, print: Option<Print>, error: &Error) {
        match &mut self.broken {
            Some((seen, told)) if *seen == print => {
                if !*told {
                    tracing::warn!("{error}; the former certificate stays in use");
                    *told = true;
                }
            }
            _ => self.broken = Some((print, false)),
        }
    }

    fn tell(&self, now: Timestamp) {
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
        let broken = |path: &Path, why: &'static str| Error::Broken { path: path.to_owned(), why };
        let chain = CertificateDer::pem_slice_iter(certificate)
            .collect::<Result<Vec<_>, _>>()
            .map_err(|_| broken(&files.certificate, "its PEM cannot be read"))?;
        let Some(leaf) = chain.first() else {
            return Err(broken(&files.certificate, "there is no certificate in it"));
        };
        let leaf = Certificate::parse(leaf.clone())
            .map_err(|_| broken(&files.certificate, "its first certificate cannot be read"))?;
        let key = PrivateKeyDer::from_pem_slice(key)
            .map_err(|_| broken(&files.key, "there is no private key in it that can be read"))?;
        Ok(Self { chain, leaf, key })
    }

    fn serve(self, files: &Files, resolver: &Resolver) -> Result<Certificate, Error> {
        resolver.serve(self.chain, self.key).map_err(|error| match error {
            Error::Tls(rustls::Error::InconsistentKeys(_)) => {
                Error::Broken { path: files.key.clone(), why: "it belongs to another certificate" }
            }
            _ => Error::Broken { path: files.key.clone(), why: "its key cannot be used" },
        })?;
        Ok(self.leaf)
    }
}

/// Small files, read seldom: not worth a thread of their own.
fn read(files: &Files) -> Result<(Print, Result<Pair, Error>), Error> {
    let open = |path: &Path| {
        std::fs::read(path)
            .map_err(|error| Error::Unreadable { path: path.to_owned(), error: error.to_string() })
    };
    let (certificate, key) = (open(&files.certificate)?, open(&files.key)?);
    let print = |bytes: &[u8]| digest(&SHA256, bytes).as_ref().to_vec();
    Ok(([print(&certificate), print(&key)], Pair::parse(files, &certificate, &key)))
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::{
        certs::issue::{Ca, Leaf, Names},
        testing::TempDir,
    };

    const HOUR: Duration = Duration::from_hours(1);

    fn now() -> Timestamp {
        Timestamp::now()
    }

    fn leaf(validity: Duration) -> Leaf {
        let ca = Ca::generate("files", 2 * HOUR, now()).unwrap();
        ca.issue(&Names::from(["localhost".to_owned()]), validity, now()).unwrap()
    }

    struct Room {
        scratch: TempDir,
        resolver: Arc<Resolver>,
        metrics: Metrics,
        readiness: Readiness,
    }

    impl Room {
        fn new() -> Self {
            let readiness = Readiness::new([Condition::Certificate]);
            Self { scratch: TempDir::new(), resolver: Arc::default(), metrics: Metrics::new(), readiness }
        }

        fn files(&self) -> Files {
            let file = |name: &str| self.scratch.path().join(name);
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
    fn a_new_pair_is_taken_up_and_a_broken_one_is_not() {
        let room = Room::new();
        let (first, second) = (leaf(HOUR), leaf(HOUR));
        room.put(&first);
        let mut reloader = room.start().unwrap();
        assert!(room.serves(&first) && room.readiness.unmet().is_empty());
        for (certificate, key) in [
            (second.certificate.pem(), first.key_pem()),
            ("nonsense".to_owned(), second.key_pem()),
            (second.certificate.pem(), "nonsense".to_owned()),
        ] {
            room.write(&certificate, &key);
            for told in [false, true, true] {
                reloader.look(now());
                assert!(room.serves(&first));
                assert_eq!(
                    reloader.broken.as_ref().map(|(_, told)| *told),
                    Some(told),
                    "told once, and late"
                );
            }
        }
        fs::remove_file(room.files().key).unwrap();
        reloader.look(now());
        assert!(room.serves(&first) && room.readiness.unmet().is_empty());
        room.put(&second);
        reloader.look(now());
        assert!(room.serves(&second) && reloader.broken.is_none());
        let metrics = room.metrics.render();
        assert!(
            metrics.contains("lockstep_certificate_rotations_total{certificate=\"leaf\"} 1"),
            "{metrics}"
        );
    }

    #[test]
    fn a_symlink_that_is_swapped_as_kubernetes_does_is_a_change() {
        let room = Room::new();
        let (first, second) = (leaf(HOUR), leaf(HOUR));
        let dir = |name: &str| room.scratch.path().join(name);
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
        let mut reloader = room.start().unwrap();
        assert!(room.serves(&first));
        link("two");
        reloader.look(now());
        assert!(room.serves(&second));
    }

    #[test]
    fn a_pair_that_expires_is_told_by_readiness() {
        let room = Room::new();
        room.put(&leaf(HOUR));
        let mut reloader = room.start().unwrap();
        let later = now() + 2 * HOUR;
        reloader.look(later);
        assert_eq!(room.readiness.unmet(), [Condition::Certificate]);
        room.put(&leaf(2 * HOUR - Duration::from_secs(1)));
        reloader.look(now());
        assert!(room.readiness.unmet().is_empty());
    }

    #[test]
    fn a_broken_pair_at_start_names_the_file() {
        let room = Room::new();
        let (one, other) = (leaf(HOUR), leaf(HOUR));
        let complaint = |room: &Room| room.start().err().expect("an error").to_string();
        assert!(complaint(&room).contains("tls.crt cannot be read"), "{}", complaint(&room));
        for (certificate, key, file, why) in [
            ("", &*one.key_pem(), "tls.crt", "no certificate"),
            (
                "-----BEGIN CERTIFICATE-----\n%\n-----END CERTIFICATE-----\n",
                &*one.key_pem(),
                "tls.crt",
                "PEM",
            ),
            (&*one.certificate.pem(), "", "tls.key", "no private key"),
            (&*one.certificate.pem(), &*other.key_pem(), "tls.key", "another certificate"),
        ] {
            room.write(certificate, key);
            let text = complaint(&room);
            assert!(text.contains(file) && text.contains(why) && text.lines().count() == 1, "{text}");
            assert!(!text.contains("PRIVATE"), "{text}");
        }
    }
}
