//! `--client-ca`: the webhook takes reviews only from API servers that present a certificate of that CA.

use std::path::{Path, PathBuf};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, ExtendedKeyUsagePurpose, IsCa, KeyPair};
use serde_json::{Value, json};

use crate::{
    harness::{Cluster, dedicated_control_plane},
    peer::review_of,
};

/// A CA of client certificates.
struct ClientCa(CertifiedIssuer<'static, KeyPair>);

impl ClientCa {
    fn new() -> Self {
        let mut params = CertificateParams::new(Vec::new()).expect("parameters");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        Self(CertifiedIssuer::self_signed(params, KeyPair::generate().expect("a key")).expect("a CA"))
    }

    /// A client certificate and its key, PEM.
    fn issue(&self) -> (String, String) {
        let mut params = CertificateParams::new(Vec::new()).expect("parameters");
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        let key = KeyPair::generate().expect("a key");
        let certificate = params.signed_by(&key, &self.0).expect("a certificate");
        (certificate.pem(), key.serialize_pem())
    }
}

/// Files of an API server that presents a certificate to webhooks at `address`, as docs/security.md describes them.
/// Returns the AdmissionConfiguration.
fn admission_configuration(dir: &Path, address: &str, (certificate, key): &(String, String)) -> PathBuf {
    let file = |name: &str, content: &str| {
        std::fs::write(dir.join(name), content).expect("a file");
        dir.join(name)
    };
    let user = json!({
        "client-certificate": file("webhook-client.crt", certificate),
        "client-key": file("webhook-client.key", key),
    });
    let kubeconfig =
        json!({"apiVersion": "v1", "kind": "Config", "users": [{"name": address, "user": user}]});
    let kubeconfig = file("webhooks.kubeconfig", &kubeconfig.to_string());
    let plugins = ["ValidatingAdmissionWebhook", "MutatingAdmissionWebhook"].map(|name| {
        json!({"name": name, "configuration": {
            "apiVersion": "apiserver.config.k8s.io/v1", "kind": "WebhookAdmissionConfiguration",
            "kubeConfigFile": kubeconfig,
        }})
    });
    let configuration = json!({
        "apiVersion": "apiserver.config.k8s.io/v1", "kind": "AdmissionConfiguration", "plugins": plugins,
    });
    file("admission.json", &configuration.to_string())
}

/// A directory that is removed when dropped.
struct TempDir(PathBuf);

impl TempDir {
    fn new(test: &str) -> Self {
        let path = std::env::temp_dir().join(format!("{test}-{}", std::process::id()));
        std::fs::create_dir(&path).expect("a directory");
        Self(path)
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        drop(std::fs::remove_dir_all(&self.0));
    }
}

/// A control plane of its own whose API server presents a certificate to the webhook of its only test.
pub struct VerifiedCluster {
    pub cluster: Cluster,
    ca: ClientCa,
    ca_file: String,
    _dir: TempDir,
}

impl VerifiedCluster {
    /// `None` on an existing cluster. Each test has a `network` of its own.
    pub async fn new(test: &str, network: u8) -> Option<Self> {
        let (dir, ca) = (TempDir::new(test), ClientCa::new());
        let [.., high, low] = std::process::id().to_be_bytes();
        let address = format!("127.{network}.{high}.{low}:9443");
        let configuration = admission_configuration(&dir.0, &address, &ca.issue());
        let flag = format!("--admission-control-config-file={}", configuration.display());
        let mut cluster = Cluster::on(dedicated_control_plane(&[&flag])?, test).await;
        cluster.address = address;
        let ca_file = dir.0.join("ca.crt");
        std::fs::write(&ca_file, ca.0.pem()).expect("a file");
        let ca_file = ca_file.to_str().expect("a path").to_owned();
        Some(Self { cluster, ca, ca_file, _dir: dir })
    }

    /// The flags with which the webhook takes reviews from this API server alone.
    pub fn flags(&self) -> [&str; 2] {
        ["--client-ca", &self.ca_file]
    }
}

#[tokio::test]
async fn reviews_need_a_client_certificate_and_probes_do_not() {
    let Some(verified) = VerifiedCluster::new("clientca", 201).await else { return };
    let VerifiedCluster { cluster, ca, .. } = &verified;
    // The API server presents its certificate to both webhooks: otherwise this would not become ready.
    let (_installed, _lockstep) = cluster.install_and_start(&verified.flags()).await;
    let (home, away, alice) = cluster.alice().await;
    cluster.make_sources(&home, &away, &[]).await;
    cluster.wait_companions(&home, &away).await;
    let refused = alice.fails(&format!("label configmap colors-synced -n {away} a=b"));
    assert!(refused.contains("is a companion, kept equal to"), "{refused}");

    let source =
        json!({"metadata": {"name": "x", "namespace": home, "labels": {cluster.key("managed"): "true"}}});
    let review = review_of("CREATE", &home, &alice.name, &Value::Null, &source).to_string();
    let stranger = cluster.peer().await;
    let (status, body) = stranger.review(&review).await.expect("an answer");
    assert_eq!(status, 401, "{body}");
    assert!(body.contains("client certificate") && !body.contains("allowed"), "{body}");
    assert_eq!(stranger.request("GET", "/readyz", "").await.expect("an answer").0, 200);

    let (certificate, key) = ClientCa::new().issue();
    let forger = cluster.peer_with(Some((&certificate, &key))).await;
    assert!(forger.review(&review).await.is_err(), "the handshake fails");
    let (certificate, key) = ca.issue();
    let (status, body) = cluster.peer_with(Some((&certificate, &key))).await.review(&review).await.unwrap();
    assert_eq!(status, 200, "{body}");
}
