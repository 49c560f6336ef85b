//! No request fails while cert-manager renews the webhook's certificate and its CA. cert-manager's controllers and its
//! cainjector are real. `make test-interop` runs this: Go builds them for minutes.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::symlink,
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Instant,
};

use controlplane::CertManager;
use k8s_openapi::ByteString;
use serde_json::{Value, json};
use tokio::task::{JoinHandle, JoinSet};

use crate::{
    crds,
    harness::{
        CONTROLLERS, Cluster, Lockstep, configmap, dedicated_control_plane, eventually, secret, within,
    },
    peer::Peer,
    tcp_proxy::TcpProxy,
};
use lockstep_core::certs::issue::Certificate;

const NAMESPACE: &str = "lockstep-system";
/// Whom the webhook's certificate is for.
const SERVICE: &str = "lockstep.lockstep-system.svc";
/// The addresses of all tests ([`Cluster::address`]) as those of Services, which need no kube-proxy then.
const SERVICE_ADDRESSES: &str = "--service-cluster-ip-range=127.64.0.0/12";
const OPERATIONS: &str = include_str!("../../docs/operations.md");
/// What Lockstep logs when it has read its files again.
const RELOADED: &str = "the webhook serves a new certificate";

/// Edits of companions that are sent at once. As many connections to the webhook are needed.
const EDITS: usize = 40;
/// Sources that change at the same time.
const SOURCES: usize = 4;
/// How many whole rounds must pass after a change: two on new connections, two on those.
const ROUNDS: u64 = 4;

/// Two replicas behind a Service, with a certificate of cert-manager, under load.
struct Scene {
    cluster: Arc<Cluster>,
    cert_manager: CertManager,
    service: Arc<TcpProxy>,
    replicas: [Replica; 2],
    load: Load,
}

impl Scene {
    async fn set(test: &str) -> Option<Self> {
        let plane = dedicated_control_plane(&[SERVICE_ADDRESSES])?;
        crds::install_cert_manager(plane);
        let cert_manager = CertManager::start(plane).unwrap_or_else(|error| panic!("{error}"));
        // The domain of the commands in docs/operations.md.
        let cluster = Arc::new(Cluster::on(plane, test).await.with_domain("workshop.io"));

        // As users do, but for the port, which only root could listen at, and the Service's address.
        let (ip, port) = cluster.address.split_once(':').expect("an address with a port");
        let ports = json!([{"name": "https", "port": port.parse::<u16>().expect("a port")}]);
        let service = json!({"metadata": {"name": "lockstep"}, "spec": {"clusterIP": ip, "ports": ports}});
        cluster.post(&format!("/api/v1/namespaces/{NAMESPACE}/services"), &service).await;
        cluster.apply_edited(&["--cert-manager"], |text| {
            let text = text.replace("port: 443\n", &format!("port: {port}\n"));
            ["/validate", "/mutate"].iter().fold(text, |text, path| {
                let path = format!("        path: {path}\n");
                text.replace(&path, &format!("{path}        port: {port}\n"))
            })
        });

        let addresses = [10_000, 20_000]
            .map(|offset: u16| format!("{ip}:{}", port.parse::<u16>().expect("a port") + offset));
        let service = TcpProxy::start(&cluster.address, &addresses).await;
        within(
            CONTROLLERS,
            eventually("cert-manager has issued the certificate", || async {
                cluster.get(&secret(NAMESPACE, "lockstep-tls")).await
            }),
        )
        .await;
        let mut replicas = [0, 1].map(|replica| Replica::new(&cluster, &addresses[replica]));
        for (index, replica) in replicas.iter_mut().enumerate() {
            replica.start(&cluster).await;
            service.set_ready(index, true);
        }
        within(CONTROLLERS, cluster.wait_webhook()).await;
        let load = Load::start(&cluster, &service).await;
        Some(Self { cluster, cert_manager, service, replicas, load })
    }

    /// What `cmctl renew` does.
    async fn renew(&self, certificate: &str) {
        let path = format!("/apis/cert-manager.io/v1/namespaces/{NAMESPACE}/certificates/{certificate}");
        let mut object = self.cluster.get(&path).await.expect("a Certificate");
        let conditions = object["status"]["conditions"].as_array_mut().expect("conditions");
        assert!(conditions.iter().all(|condition| condition["type"] != "Issuing"), "{conditions:?}");
        conditions.push(json!({
            "type": "Issuing", "status": "True", "reason": "ManuallyTriggered",
            "message": "Certificate re-issuance manually triggered",
            "lastTransitionTime": k8s_openapi::jiff::Timestamp::now().to_string(),
        }));
        let body = Some(("application/json", &object));
        self.cluster.try_request("PUT", &format!("{path}/status"), body).await.expect("it is renewed");
    }

    /// A file of a Secret.
    async fn file(&self, name: &str, file: &str) -> Option<String> {
        let object = self.cluster.get(&secret(NAMESPACE, name)).await?;
        Some(object["data"][file].as_str()?.to_owned())
    }

    /// The certificate in a Secret, once it is another one and its Certificate is ready.
    async fn issued(&self, name: &str, before: &str) -> String {
        let path = format!("/apis/cert-manager.io/v1/namespaces/{NAMESPACE}/certificates/{name}");
        let what = format!("cert-manager has issued {name}");
        let issued = eventually(&what, || async {
            let conditions = self.cluster.get(&path).await?["status"]["conditions"].clone();
            let conditions = conditions.as_array()?;
            let is = |kind: &str| conditions.iter().any(|one| one["type"] == kind && one["status"] == "True");
            let certificate = self.file(name, "tls.crt").await?;
            (certificate != before && is("Ready") && !is("Issuing")).then_some(certificate)
        });
        within(CONTROLLERS, issued).await
    }

    /// Renews a certificate, and returns the new one.
    async fn renewed(&self, name: &str) -> String {
        let before = self.file(name, "tls.crt").await.expect("a certificate");
        self.renew(name).await;
        self.issued(name, &before).await
    }

    /// Runs commands as the admin, while the load goes on, and returns what they print.
    async fn shell(&self, commands: &str) -> String {
        let (admin, commands) = (self.cluster.admin(), format!("set -e\n{commands}"));
        let output = tokio::task::spawn_blocking(move || admin.shell(&commands)).await.expect("a shell");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    }

    /// The CA bundles of all webhooks.
    async fn bundles(&self) -> BTreeSet<String> {
        let mut bundles = BTreeSet::new();
        for kind in ["validating", "mutating"] {
            let collection = format!("/apis/admissionregistration.k8s.io/v1/{kind}webhookconfigurations");
            let path = format!("{collection}/lockstep.{}", self.cluster.domain());
            let object = self.cluster.get(&path).await.expect("a configuration");
            for webhook in object["webhooks"].as_array().expect("webhooks") {
                bundles.insert(webhook["clientConfig"]["caBundle"].as_str().unwrap_or("").to_owned());
            }
        }
        bundles
    }

    /// Waits until all webhooks trust exactly these certificates.
    async fn wait_trusted(&self, certificates: &[&String]) {
        let expected: Vec<u8> = certificates.iter().flat_map(|one| decoded(one)).collect();
        let expected = Certificate::parse_all(&expected).expect("certificates");
        let what = format!("the webhooks trust {expected:?}");
        let trusted = eventually(&what, || async {
            let bundles = self.bundles().await;
            let all = bundles.iter().map(|bundle| Certificate::parse_all(&decoded(bundle)).ok());
            all.collect::<Option<Vec<_>>>()?.iter().all(|trusted| *trusted == expected).then_some(())
        });
        within(CONTROLLERS, trusted).await;
    }

    /// Waits until the API server has verified the webhook's certificate often enough, with no failure.
    async fn withstands(&self, what: &str) {
        let (rounds, connections) = (self.load.rounds(), self.service.accepted());
        let enough = format!("{ROUNDS} rounds after: {what}");
        let passed = eventually(&enough, || async {
            // One is being sent now.
            (self.load.rounds() > rounds + ROUNDS).then_some(())
        });
        within(CONTROLLERS, passed).await;
        let opened = self.service.accepted() - connections;
        assert!(opened > EDITS, "{opened} new connections after: {what}");
        println!(
            "{what}: {:.1?}, {} requests, {} connections so far",
            self.load.start.elapsed(),
            self.load.requests(),
            self.service.accepted()
        );
        self.load.assert_no_failure(what);
    }

    /// One replica after the other gets the files that are in the Secret by now.
    async fn kubelets_catch_up(&self) {
        for (index, replica) in self.replicas.iter().enumerate() {
            let before = replica.reloads();
            replica.kubelet_syncs(&self.cluster).await;
            within(
                CONTROLLERS,
                eventually("the replica serves the new files", || async {
                    (replica.reloads() > before).then_some(())
                }),
            )
            .await;
            self.withstands(&format!("replica {index} has reloaded")).await;
        }
        let (bundle, secret) = (self.bundles().await, self.file("lockstep-tls", "tls.crt").await);
        let expected = Certificate::parse_all(&decoded(&secret.expect("a certificate"))).unwrap().remove(0);
        for replica in &self.replicas {
            let served = replica.served(bundle.first().expect("a bundle")).await;
            assert!(served == expected, "{served:?}");
        }
    }

    /// All that was written last has reached the companions, and no request has failed.
    async fn ends_well(mut self) {
        self.load.end(&self.cluster).await;
        println!("{} requests, {} connections", self.load.requests(), self.service.accepted());
        assert!(self.load.requests() > self.service.accepted() as u64, "no connection was used twice");
        for replica in &mut self.replicas {
            assert!(replica.lockstep.as_mut().expect("it runs").stop().await.success());
        }
    }
}

/// A replica, and the volume from which it reads its certificate.
struct Replica {
    address: String,
    volume: PathBuf,
    lockstep: Option<Lockstep>,
}

impl Replica {
    fn new(cluster: &Cluster, address: &str) -> Self {
        let volume = cluster.plane.data_dir().join(format!("tls-{}", address.replace(':', "-")));
        fs::create_dir(&volume).expect("a volume");
        Self { address: address.to_owned(), volume, lockstep: None }
    }

    async fn start(&mut self, cluster: &Cluster) {
        self.kubelet_syncs(cluster).await;
        let kubeconfig = cluster.plane.service_account(NAMESPACE, "lockstep").expect("a kubeconfig");
        let (certificate, key) = (self.volume.join("tls.crt"), self.volume.join("tls.key"));
        let (certificate, key) = (certificate.to_str().expect("text"), key.to_str().expect("text"));
        let flags = ["--webhook-bind", &self.address, "--tls-cert", certificate, "--tls-key", key];
        let mut lockstep = Lockstep::spawn(&cluster.domain(), &kubeconfig, &flags);
        lockstep.wait_ready().await;
        self.lockstep = Some(lockstep);
    }

    /// Writes the Secret into the volume as kubelet does: into a new directory, to which a symlink above the files is
    /// moved. kubelet does so a minute or two after a change; a test, when it wants to.
    async fn kubelet_syncs(&self, cluster: &Cluster) {
        let object = cluster.get(&secret(NAMESPACE, "lockstep-tls")).await.expect("the Secret");
        let version = object["metadata"]["resourceVersion"].as_str().expect("a version");
        let (dir, data) = (self.volume.join(format!("..{version}")), self.volume.join("..data"));
        fs::create_dir(&dir).expect("a directory");
        let files = object["data"].as_object().expect("files");
        for (name, content) in files {
            fs::write(dir.join(name), decoded(content.as_str().expect("text"))).expect("a file");
        }
        let former = fs::read_link(&data).ok();
        let temporary = self.volume.join("..data_tmp");
        symlink(dir.file_name().expect("a name"), &temporary).expect("a link");
        fs::rename(&temporary, &data).expect("a link");
        match former {
            Some(former) => fs::remove_dir_all(self.volume.join(former)).expect("the former directory"),
            None => files
                .keys()
                .for_each(|name| symlink(format!("..data/{name}"), self.volume.join(name)).expect("a link")),
        }
    }

    fn reloads(&self) -> usize {
        self.lockstep.as_ref().expect("it runs").log().matches(RELOADED).count()
    }

    /// The certificate that it presents to somebody who trusts this bundle.
    async fn served(&self, bundle: &str) -> Certificate {
        let peer = Peer::trusting(&decoded(bundle), &self.address, None).expecting(SERVICE);
        let stream = peer.connect().await.expect("a connection");
        let chain = stream.get_ref().1.peer_certificates().expect("a certificate");
        Certificate::parse(chain[0].clone().into_owned()).expect("a certificate")
    }
}

/// Edits that the webhook must refuse and changes of sources that it must allow, in rounds of many at once.
struct Load {
    home: String,
    start: Instant,
    progress: Arc<Progress>,
    task: Option<JoinHandle<()>>,
}

#[derive(Default)]
struct Progress {
    stop: AtomicBool,
    /// How many rounds are complete.
    rounds: AtomicU64,
    failures: Mutex<Vec<String>>,
}

impl Load {
    async fn start(cluster: &Arc<Cluster>, service: &Arc<TcpProxy>) -> Self {
        let home = cluster.namespace("home").await;
        for source in 0..SOURCES {
            cluster.source(&home, &format!("source-{source}")).create().await;
            cluster.wait_data(&home, &format!("source-{source}-synced"), json!({"sky": "blue"})).await;
        }
        let progress = Arc::<Progress>::default();
        let sending = Self::send(cluster.clone(), service.clone(), home.clone(), progress.clone());
        Self { home, start: Instant::now(), progress, task: Some(tokio::spawn(sending)) }
    }

    async fn send(cluster: Arc<Cluster>, service: Arc<TcpProxy>, home: String, progress: Arc<Progress>) {
        while !progress.stop.load(Ordering::SeqCst) {
            let round = progress.rounds.load(Ordering::SeqCst) + 1;
            // The API server verifies a certificate only when it connects. While it has connections, one of them is
            // often free again before a new one has failed.
            if round.is_multiple_of(2) {
                service.end_connections().await;
            }
            let mut requests = JoinSet::new();
            for index in 0..EDITS + SOURCES {
                let source = format!("source-{}", index % SOURCES);
                let (is_edit, cluster) = (index < EDITS, cluster.clone());
                let (name, sky) = if is_edit {
                    (format!("{source}-synced"), "mine".to_owned())
                } else {
                    (source, round.to_string())
                };
                let path = configmap(&home, &name);
                let change = json!({"data": {"sky": sky}}).to_string().into_bytes();
                requests.spawn(async move {
                    let answer =
                        cluster.try_text("PATCH", &path, "application/merge-patch+json", change).await;
                    match (is_edit, answer) {
                        (true, Err((403, said))) if said.contains("is a companion, kept equal to") => None,
                        (false, Ok(_)) => None,
                        (_, answer) => Some(format!("round {round}: {path}: {answer:?}")),
                    }
                });
            }
            let failed: Vec<String> = requests.join_all().await.into_iter().flatten().collect();
            progress.failures.lock().expect("a lock").extend(failed);
            progress.rounds.store(round, Ordering::SeqCst);
        }
    }

    fn rounds(&self) -> u64 {
        self.progress.rounds.load(Ordering::SeqCst)
    }

    fn requests(&self) -> u64 {
        self.rounds() * (EDITS + SOURCES) as u64
    }

    fn assert_no_failure(&self, what: &str) {
        let failures = self.progress.failures.lock().expect("a lock");
        let number = failures.len();
        assert_eq!(
            number,
            0,
            "{what}: {number} of {} requests failed: {:#?}",
            self.requests(),
            failures.first()
        );
    }

    async fn end(&mut self, cluster: &Cluster) {
        self.progress.stop.store(true, Ordering::SeqCst);
        self.task.take().expect("it runs").await.expect("every request was answered");
        self.assert_no_failure("in the end");
        let last = json!({"sky": self.rounds().to_string()});
        for source in 0..SOURCES {
            cluster.wait_data(&self.home, &format!("source-{source}-synced"), last.clone()).await;
        }
    }
}

fn decoded(base64: &str) -> Vec<u8> {
    serde_json::from_value::<ByteString>(Value::from(base64)).expect("base64").0
}

#[tokio::test]
async fn no_request_fails_while_cert_manager_renews_leaf_and_ca() {
    let Some(scene) = Scene::set("renew").await else { return };
    let first = scene.file("lockstep-tls", "ca.crt").await.expect("a CA");
    scene.wait_trusted(&[&first]).await;
    scene.withstands("installed").await;

    scene.renewed("lockstep-tls").await;
    scene.withstands("the leaf is renewed").await;
    scene.kubelets_catch_up().await;
    assert_eq!(scene.bundles().await, BTreeSet::from([first.clone()]));

    // cainjector is faster than kubelet: replicas serve leaves of the former CA.
    let key = scene.file("lockstep-ca", "tls.key").await;
    let second = scene.renewed("lockstep-ca").await;
    assert_eq!(scene.file("lockstep-ca", "tls.key").await, key, "the CA keeps its key");
    scene.withstands("the CA is renewed").await;
    assert_eq!(scene.bundles().await, BTreeSet::from([first.clone()]), "trusted once it has signed a leaf");
    scene.renewed("lockstep-tls").await;
    scene.wait_trusted(&[&first, &second]).await;
    scene.withstands("the new CA is trusted").await;
    scene.kubelets_catch_up().await;

    // cainjector is slower than kubelet: replicas serve leaves of a CA that is not in the bundle yet.
    scene.cert_manager.cainjector.kill().expect("it runs");
    let third = scene.renewed("lockstep-ca").await;
    scene.withstands("the CA is renewed again").await;
    scene.renewed("lockstep-tls").await;
    scene.kubelets_catch_up().await;
    scene.wait_trusted(&[&first, &second]).await;
    scene.cert_manager.cainjector.restart().expect("it starts");
    scene.wait_trusted(&[&first, &second, &third]).await;
    scene.withstands("cainjector is back").await;
    scene.ends_well().await;
}

/// The key has leaked: the commands of docs/operations.md replace it, and nothing that it signs is trusted any more.
#[tokio::test]
async fn commands_of_the_docs_replace_the_ca_key_of_cert_manager_without_a_failed_request() {
    let Some(scene) = Scene::set("rekey").await else { return };
    let leaked = scene.file("lockstep-ca", "tls.crt").await.expect("a CA");
    let key = scene.file("lockstep-ca", "tls.key").await;
    scene.wait_trusted(&[&leaked]).await;
    let [publish, count, renew, _logs, drop_leaked] = &documented()[..] else {
        panic!("other commands than this test knows: {:#?}", documented())
    };

    scene.shell(publish).await;
    let new = scene.issued("lockstep-ca", &leaked).await;
    assert_ne!(scene.file("lockstep-ca", "tls.key").await, key);
    scene.wait_trusted(&[&leaked, &new]).await;
    assert_eq!(scene.shell(count).await, "2\n".repeat(5), "one line for each webhook");
    scene.withstands("the new CA is published").await;

    assert_eq!(renew, "cmctl renew -n lockstep-system lockstep-tls\n");
    scene.renewed("lockstep-tls").await;
    scene.withstands("the leaf is renewed").await;
    scene.kubelets_catch_up().await;

    scene.shell(drop_leaked).await;
    scene.wait_trusted(&[&new]).await;
    scene.withstands("the leaked CA is not trusted any more").await;
    // cainjector, which is told to take the CA from the leaf's Secret again, does not bring the leaked one back.
    scene.renewed("lockstep-tls").await;
    scene.kubelets_catch_up().await;
    scene.wait_trusted(&[&new]).await;
    scene.ends_well().await;
}

#[test]
fn operations_name_the_version_of_cert_manager_that_is_tested() {
    let pins = include_str!("../cert-manager/go.mod");
    let (_, rest) = pins.split_once("github.com/cert-manager/cert-manager ").expect("a pin");
    let version = rest.split_whitespace().next().expect("a version");
    // Wherever its lines end.
    let words = OPERATIONS.split_whitespace().collect::<Vec<_>>().join(" ");
    assert!(words.contains(&format!("under load with cert-manager {version},")), "{version}");
}

/// The blocks of commands in the section of docs/operations.md about the key of the CA.
fn documented() -> Vec<String> {
    let (_, rest) =
        OPERATIONS.split_once("\n### Replace the CA's key of cert-manager\n").expect("the section");
    let section = rest.split("\n## ").next().expect("the section");
    section.split("```").skip(1).step_by(2).map(|block| block.trim_start_matches('\n').to_owned()).collect()
}
