//! A third-party webhook that answers late for one target namespace.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
};

use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::watch,
};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{ServerConfig, pki_types::PrivateKeyDer},
};

use crate::harness::{Cluster, configmap, eventually};

/// A validating webhook that allows every request, but answers only after [`SlowWebhook::release`].
pub struct SlowWebhook {
    address: SocketAddr,
    certificate: String,
    released: watch::Sender<bool>,
    /// The `data` of the reviewed objects, in the order of their arrival.
    reviewed: Mutex<Vec<Value>>,
}

impl SlowWebhook {
    pub async fn start(host: &str) -> Arc<Self> {
        let listener = TcpListener::bind((host, 0)).await.expect("a port");
        let pair = rcgen::generate_simple_self_signed([host.to_owned()]).expect("a certificate");
        let key = PrivateKeyDer::try_from(pair.signing_key.serialize_der()).expect("a key");
        let config = ServerConfig::builder()
            .with_no_client_auth()
            .with_single_cert(vec![pair.cert.der().clone()], key)
            .expect("a TLS configuration");
        let acceptor = TlsAcceptor::from(Arc::new(config));
        let webhook = Arc::new(Self {
            address: listener.local_addr().expect("an address"),
            certificate: pair.cert.pem(),
            released: watch::Sender::new(false),
            reviewed: Mutex::default(),
        });
        let server = webhook.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (server, acceptor) = (server.clone(), acceptor.clone());
                tokio::spawn(async move { server.answer(stream, acceptor).await });
            }
        });
        webhook
    }

    /// Answers one request over HTTP/1.1 and closes the connection.
    async fn answer(&self, stream: TcpStream, acceptor: TlsAcceptor) -> Option<()> {
        let mut stream = acceptor.accept(stream).await.ok()?;
        let mut bytes = Vec::new();
        let review: Value = loop {
            let complete = bytes.windows(4).position(|window| window == b"\r\n\r\n");
            let body = complete.map(|end| &bytes[end + 4..]).unwrap_or_default();
            if let Ok(review) = serde_json::from_slice(body) {
                break review;
            }
            if stream.read_buf(&mut bytes).await.ok()? == 0 {
                return None;
            }
        };
        self.reviewed.lock().unwrap().push(review["request"]["object"]["data"].clone());
        self.released.subscribe().wait_for(|released| *released).await.ok()?;
        let answer = json!({
            "apiVersion": "admission.k8s.io/v1",
            "kind": "AdmissionReview",
            "response": {"uid": review["request"]["uid"], "allowed": true},
        })
        .to_string();
        let head = format!(
            "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
            answer.len()
        );
        stream.write_all((head + &answer).as_bytes()).await.ok()?;
        stream.shutdown().await.ok()
    }

    pub fn release(&self) {
        self.released.send_replace(true);
    }

    fn reviewed(&self) -> Vec<Value> {
        self.reviewed.lock().unwrap().clone()
    }

    /// The configuration that sends every write of this test's companions in one namespace here.
    pub fn configuration(&self, cluster: &Cluster, namespace: &str) -> Value {
        json!({
            "metadata": {"name": format!("slow-{}", cluster.id)},
            "webhooks": [{
                "name": "slow.example.com",
                "admissionReviewVersions": ["v1"],
                "sideEffects": "None",
                "failurePolicy": "Fail",
                "timeoutSeconds": 30,
                "clientConfig": {
                    "url": format!("https://{}/", self.address),
                    "caBundle": k8s_openapi::ByteString(self.certificate.clone().into_bytes()),
                },
                "rules": [{
                    "apiGroups": [""],
                    "apiVersions": ["v1"],
                    "operations": ["CREATE", "UPDATE"],
                    "resources": ["configmaps"],
                }],
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
                "objectSelector": {"matchLabels": {cluster.key("companion"): "true"}},
            }],
        })
    }
}

#[tokio::test]
async fn hanging_write_delays_no_other_target_and_superseded_content_is_not_written() {
    let cluster = Cluster::new("slow").await;
    let (home, fast, slow) =
        (cluster.namespace("home").await, cluster.namespace("fast").await, cluster.namespace("slow").await);
    let host = cluster.address.rsplit_once(':').expect("a port").0.to_owned();
    let webhook = SlowWebhook::start(&host).await;
    let configurations = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations";
    let configuration = webhook.configuration(&cluster, &slow);
    cluster.post(configurations, &configuration).await;
    let _lockstep = cluster.start_controller().await;

    // The API server calls the webhook a moment after it was configured: probe with sources until one write hangs.
    let mut probes = 0;
    while webhook.reviewed().is_empty() {
        let name = format!("probe{probes}");
        cluster.source(&home, &name).annotate("target-namespaces", &slow).create().await;
        eventually("the companion is written or its write hangs", || async {
            let written = cluster.configmap(&slow, &format!("{name}-synced")).await.is_some();
            (written || !webhook.reviewed().is_empty()).then_some(())
        })
        .await;
        probes += 1;
    }
    let before = webhook.reviewed().len();

    let targets = format!("{fast},{slow}");
    let source = cluster.source(&home, "colors").annotate("target-namespaces", &targets);
    source.with("/data", json!({"turn": "0"})).create().await;
    eventually("the write into the slow namespace hangs", || async {
        (webhook.reviewed().len() > before).then_some(())
    })
    .await;
    for turn in ["1", "2", "3"] {
        cluster.merge(&configmap(&home, "colors"), &json!({"data": {"turn": turn}})).await;
        cluster.wait_data(&fast, "colors-synced", json!({"turn": turn})).await;
        assert!(cluster.configmap(&slow, "colors-synced").await.is_none(), "the write did not hang");
    }

    webhook.release();
    cluster.wait_data(&slow, "colors-synced", json!({"turn": "3"})).await;
    let turns: Vec<Value> = webhook.reviewed().into_iter().filter(|data| data["turn"].is_string()).collect();
    assert_eq!(turns, [json!({"turn": "0"}), json!({"turn": "3"})], "superseded content was written");
    cluster.delete(&format!("{configurations}/slow-{}", cluster.id)).await;
}
