//! How many reviews the webhook answers, compared with a server that gives every request the same answer; and how much
//! longer a patch takes because of a review.

use std::{
    net::{Ipv4Addr, SocketAddr, TcpListener},
    path::{Path, PathBuf},
    process::Command,
    sync::Arc,
    time::{Duration, Instant},
};

use axum::body::{Body, to_bytes};
use hyper_util::{
    rt::{TokioExecutor, TokioIo},
    server::conn::auto,
};
use rcgen::{CertifiedKey, generate_simple_self_signed};
use serde_json::{Value, json};
use tokio::{io::BufStream, task::JoinSet};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{
        ServerConfig,
        pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    },
};

use crate::{
    exchange::{Expected, exchange, reviews},
    harness::{Cluster, client_for, configmap},
    peer::Peer,
    plane::{Bench, Program, cpu},
    report::{Report, Row, median, millis, quantile},
};

/// Connections of the API server.
const CONNECTIONS: usize = 16;
const ANSWER: &str =
    r#"{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","response":{"uid":"u","allowed":true}}"#;

/// How many reviews each program answers in a second of CPU time.
pub(crate) async fn reviews_a_cpu_second(bench: &Bench, report: &mut Report) {
    let cluster = Cluster::new("bench").await;
    let home = cluster.namespace("home").await;
    let (_installed, lockstep) = cluster.install_and_start(&[]).await;
    let mut expected = reviews(&cluster, &home);
    // Without those about which the webhook asks the API server.
    expected.truncate(5);
    let expected = Arc::new(expected);
    let certificates = Certificates::make();
    let time = Duration::from_millis(if bench.quick { 500 } else { 2000 });
    let (bare_address, peer_address) = (free_address(), free_address());
    let mut bare = Command::new(std::env::current_exe().expect("this program"));
    let bare =
        Program::start(bare.args(["bare-webhook", &bare_address.to_string()]).arg(&certificates.directory));
    let port = peer_address.port().to_string();
    let flags =
        ["-webhook-port".as_ref(), port.as_ref(), "-cert-dir".as_ref(), certificates.directory.as_os_str()];
    let peer = bench.spawn_peer(&flags);
    let trusted = |address: SocketAddr| {
        Arc::new(Peer::trusting(certificates.certificate.as_bytes(), &address.to_string(), None))
    };
    let lockstep_peer = Arc::new(cluster.peer().await.at(Ipv4Addr::new(127, 0, 0, 3)));
    let mut row = Row::rate("webhook: reviews in a second of CPU time", 0.8, "reviews");
    for _ in 0..bench.repetitions() {
        row.floor.push(rate(&trusted(bare_address), bare.id(), &expected, time).await);
        row.lockstep.push(rate(&lockstep_peer, lockstep.0.id(), &expected, time).await);
        if let Some(peer) = &peer {
            row.peer.push(rate(&trusted(peer_address), peer.id(), &expected, time).await);
        }
    }
    let times = (!row.peer.is_empty()).then(|| median(&row.lockstep) / median(&row.peer));
    report.add(row);
    if let Some(times) = times {
        report.figure(
            "webhook: reviews in a second of CPU time, beside the peer",
            "≥ 2.5 ×",
            format!("{times:.2} ×"),
        );
    }
}

/// Reviews for a while over connections that stay open; how many were answered in a second of the server's CPU time.
async fn rate(server: &Arc<Peer>, pid: u32, reviews: &Arc<Vec<Expected>>, time: Duration) -> f64 {
    let mut calls = JoinSet::new();
    // The first reviews are on new connections, which are not counted.
    let (begin, end) = (Instant::now() + time / 4, Instant::now() + time + time / 4);
    for first in 0..CONNECTIONS {
        let (server, reviews) = (server.clone(), reviews.clone());
        calls.spawn(async move {
            let mut connection = BufStream::new(connect(&server).await);
            let mut answered = 0_usize;
            for review in reviews.iter().cycle().skip(first) {
                let (status, _) = exchange(&mut connection, &review.body).await.expect("an answer");
                assert_eq!(status, 200);
                if Instant::now() >= begin {
                    answered += 1;
                }
                if Instant::now() >= end {
                    break;
                }
            }
            answered
        });
    }
    tokio::time::sleep_until(begin.into()).await;
    let before = cpu(pid);
    tokio::time::sleep_until(end.into()).await;
    let used = cpu(pid) - before;
    let mut answered = 0;
    while let Some(call) = calls.join_next().await {
        answered += call.expect("a caller ends");
    }
    answered as f64 / used.as_secs_f64()
}

/// Waits until the server listens.
async fn connect(server: &Peer) -> tokio_rustls::client::TlsStream<tokio::net::TcpStream> {
    for _ in 0..500 {
        if let Ok(stream) = server.connect().await {
            return stream;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!("the server does not listen");
}

/// A patch of a source and of a companion, in turn with one of an equal object that the webhook does not review.
pub(crate) async fn share_in_a_patch(bench: &Bench, report: &mut Report) {
    let cluster = Cluster::new("share").await;
    let (home, _, alice) = cluster.alice().await;
    let (_installed, _lockstep) = cluster.install_and_start(&[]).await;
    cluster.source(&home, "colors").annotate("protect", "none").create().await;
    cluster.wait_data(&home, "colors-synced", json!({"sky": "blue"})).await;
    // Nothing is mirrored or healed meanwhile.
    let paused = json!({"metadata": {"annotations": {cluster.key("paused"): "true"}}});
    cluster.merge(&configmap(&home, "colors"), &paused).await;
    cluster
        .post(
            &format!("/api/v1/namespaces/{home}/configmaps"),
            &json!({"metadata": {"name": "plain"}, "data": {"sky": "blue"}}),
        )
        .await;
    let alice = client_for(alice.kubeconfig()).await;
    let patch = async |name: &str, turn: usize| {
        let body = json!({"data": {"turn": turn.to_string()}});
        let request = http::Request::patch(configmap(&home, name))
            .header("content-type", "application/merge-patch+json");
        let request = request.body(serde_json::to_vec(&body).expect("JSON")).expect("a request");
        let start = Instant::now();
        alice.request::<Value>(request).await.expect("alice may");
        millis(start.elapsed())
    };
    let count = bench.scaled(100, 30);
    for (name, what) in [("colors", "a source"), ("colors-synced", "a companion")] {
        let mut differences = Vec::new();
        let (mut reviewed, mut plain) = (Vec::new(), Vec::new());
        for repetition in 0..bench.repetitions() {
            let (mut with, mut without) = (Vec::new(), Vec::new());
            for n in 0..count {
                let turn = repetition * count + n;
                with.push(patch(name, turn).await);
                without.push(patch("plain", turn).await);
            }
            differences.push(median(&with) - median(&without));
            reviewed.push(median(&with));
            plain.push(median(&without));
        }
        let (least, most) = (quantile(&differences, 0), quantile(&differences, 100));
        let verdict = if least > 0.0 { "told apart from noise" } else { "not told apart from noise" };
        report.figure(
            format!("webhook's share in a patch of {what}, p50"),
            "told apart or not",
            format!(
                "{:+.2} ms ({least:+.2} to {most:+.2}) of {:.2} ms, {:.2} ms without: {verdict}",
                median(&differences),
                median(&reviewed),
                median(&plain),
            ),
        );
    }
}

/// A serving certificate in files, for the servers that are compared with the webhook.
struct Certificates {
    directory: PathBuf,
    certificate: String,
}

impl Certificates {
    fn make() -> Self {
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join("bench-certificates");
        std::fs::create_dir_all(&directory).expect("a directory");
        let CertifiedKey { cert, signing_key } =
            generate_simple_self_signed(vec!["127.0.0.1".to_owned()]).expect("a certificate");
        std::fs::write(directory.join("tls.crt"), cert.pem()).expect("a file");
        std::fs::write(directory.join("tls.key"), signing_key.serialize_pem()).expect("a file");
        Self { directory, certificate: cert.pem() }
    }
}

fn free_address() -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address")
}

/// The floor: TLS and HTTP as Lockstep has them, and the same answer to everything.
pub(crate) async fn serve_bare(address: &str, certificates: &Path) -> ! {
    let certificate = CertificateDer::from_pem_file(certificates.join("tls.crt")).expect("a certificate");
    let key = PrivateKeyDer::from_pem_file(certificates.join("tls.key")).expect("a key");
    let config = ServerConfig::builder().with_no_client_auth().with_single_cert(vec![certificate], key);
    let acceptor = TlsAcceptor::from(Arc::new(config.expect("a TLS configuration")));
    let listener = tokio::net::TcpListener::bind(address).await.expect("a port");
    loop {
        let (stream, _) = listener.accept().await.expect("a connection");
        let acceptor = acceptor.clone();
        tokio::spawn(async move {
            drop(stream.set_nodelay(true));
            let Ok(stream) = acceptor.accept(stream).await else { return };
            let service =
                hyper::service::service_fn(async |request: http::Request<hyper::body::Incoming>| {
                    drop(to_bytes(Body::new(request.into_body()), usize::MAX).await);
                    let answer = http::Response::builder().header("content-type", "application/json");
                    answer.body(ANSWER.to_owned())
                });
            let server = auto::Builder::new(TokioExecutor::new());
            drop(server.serve_connection(TokioIo::new(stream), service).await);
        });
    }
}
