//! Reviews straight to the webhook, over connections that stay open as those of an API server do, alone and beside
//! clients that are slow, broken or hostile, while a source changes and is mirrored.

use std::{
    net::Ipv4Addr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use kube::Client;
use serde_json::json;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, BufStream},
    task::JoinSet,
    time::{sleep, timeout},
};

use crate::{
    Measurement,
    exchange::{Connection, Expected, exchange, is_right, reviews},
    harness::{Cluster, configmap},
    hostile_reviews, measure,
    peer::Peer,
};

const ALONE: Duration = Duration::from_secs(10);
const UNDER_SIEGE: Duration = Duration::from_secs(30);
/// Each has one review on the way at a time.
const CONNECTIONS: usize = 16;
/// An API server gives up after this time, in the manifests that are shipped.
const API_SERVER_TIMEOUT: Duration = Duration::from_secs(3);
/// How long a change may take to be mirrored before it counts as lost.
const MIRROR_TIMEOUT: Duration = Duration::from_secs(10);
/// More connections than the webhook keeps open.
const HELD_CONNECTIONS: usize = 300;

/// One connection of an API server, with one review after the other.
async fn call(peer: &Peer, reviews: &[Expected], first: usize, time: Duration) -> Measurement {
    let mut measurement = Measurement::default();
    let mut connection: Option<Connection> = None;
    let start = Instant::now();
    for expected in reviews.iter().cycle().skip(first) {
        if start.elapsed() >= time {
            break;
        }
        let begun = Instant::now();
        let answer = async {
            let mut open = match connection.take() {
                Some(open) => open,
                None => BufStream::new(peer.connect().await?),
            };
            let answer = exchange(&mut open, &expected.body).await;
            connection = Some(open);
            answer
        };
        let answer = timeout(API_SERVER_TIMEOUT, answer).await;
        measurement.latencies.push(begun.elapsed());
        let problem = match answer {
            Ok(Ok((status, answer))) if is_right(expected, status, &answer) => None,
            Ok(Ok((status, answer))) => Some(format!("{status} {}", String::from_utf8_lossy(&answer))),
            Ok(Err(error)) => Some(error.to_string()),
            Err(_) => Some("no answer in time".to_owned()),
        };
        if let Some(problem) = problem {
            measurement.errors += 1;
            connection = None;
            println!("{} after {:.1?}: {problem:.300}", expected.uid, begun.elapsed());
        }
    }
    measurement.took = start.elapsed();
    measurement
}

async fn call_all(peer: &Arc<Peer>, expected: &Arc<Vec<Expected>>, time: Duration) -> Measurement {
    let mut calls = JoinSet::new();
    for first in 0..CONNECTIONS {
        let (peer, expected) = (peer.clone(), expected.clone());
        calls.spawn(async move { call(&peer, &expected, first, time).await });
    }
    let mut all = Measurement::default();
    while let Some(measurement) = calls.join_next().await {
        all.add(measurement.expect("a caller ends"));
    }
    all
}

/// Changes a source, and waits until its companion has the change.
async fn mirrored(cluster: &Cluster, home: &str, time: Duration) -> Measurement {
    let mut measurement = Measurement::default();
    let start = Instant::now();
    while start.elapsed() < time {
        let turn = start.elapsed().as_nanos().to_string();
        let begun = Instant::now();
        cluster.merge(&configmap(home, "shades"), &json!({"data": {"turn": turn}})).await;
        let mut arrived = false;
        while !arrived && begun.elapsed() < MIRROR_TIMEOUT {
            sleep(Duration::from_millis(5)).await;
            let companion = cluster.configmap(home, "shades-synced").await;
            arrived = companion.is_some_and(|companion| companion["data"]["turn"] == *turn);
        }
        measurement.latencies.push(begun.elapsed());
        measurement.errors += usize::from(!arrived);
        sleep(Duration::from_millis(50)).await;
    }
    measurement.took = start.elapsed();
    measurement
}

/// An attack: its name, how many times it was tried, and how it goes on.
struct Attacks {
    peer: Arc<Peer>,
    over: Arc<AtomicBool>,
    running: JoinSet<()>,
    counts: Vec<(&'static str, Arc<AtomicUsize>)>,
}

impl Attacks {
    /// Repeats an attack on so many connections at once until the siege is over.
    fn start<F, Fut>(&mut self, name: &'static str, connections: usize, pause: Duration, attack: F)
    where
        F: Fn(Arc<Peer>, usize) -> Fut + Clone + Send + Sync + 'static,
        Fut: Future<Output = std::io::Result<()>> + Send + 'static,
    {
        let count = Arc::new(AtomicUsize::new(0));
        self.counts.push((name, count.clone()));
        for _ in 0..connections {
            let (peer, over, count, attack) =
                (self.peer.clone(), self.over.clone(), count.clone(), attack.clone());
            self.running.spawn(async move {
                while !over.load(Ordering::Relaxed) {
                    let number = count.fetch_add(1, Ordering::Relaxed);
                    // The webhook ends most of these connections: that is what it should do.
                    drop(timeout(Duration::from_secs(10), attack(peer.clone(), number)).await);
                    sleep(pause).await;
                }
            });
        }
    }
}

fn start_attacks(attacks: &mut Attacks, hostile: Arc<Vec<String>>) {
    let (short, long) = (Duration::from_millis(20), Duration::from_millis(500));
    attacks.start("TCP without TLS, held open", HELD_CONNECTIONS, short, async |peer: Arc<Peer>, _| {
        let mut stream = peer.connect_plain().await?;
        // The beginning of a ClientHello.
        stream.write_all(&[22, 3, 1, 2, 0, 1]).await?;
        stream.read_u8().await.map(drop)
    });
    attacks.start("headers, one byte at a time", 50, short, async |peer: Arc<Peer>, _| {
        let mut stream = peer.connect().await?;
        for byte in b"POST /validate HTTP/1.1\r\nhost: webhook\r\nx: ".iter().chain([b'x'; 1000].iter()) {
            stream.write_all(&[*byte]).await?;
            stream.flush().await?;
            sleep(Duration::from_millis(200)).await;
        }
        Ok(())
    });
    attacks.start("bodies, a few bytes at a time", 20, short, async |peer: Arc<Peer>, _| {
        let mut stream = peer.connect().await?;
        let head = "POST /validate HTTP/1.1\r\nhost: webhook\r\ncontent-type: application/json\r\ncontent-length: 4000000\r\n\r\n";
        stream.write_all(head.as_bytes()).await?;
        loop {
            stream.write_all(b"{\"a\":").await?;
            stream.flush().await?;
            sleep(Duration::from_millis(200)).await;
        }
    });
    attacks.start("random bytes instead of TLS", 4, short, async |peer: Arc<Peer>, number| {
        let mut rng = fastrand::Rng::with_seed(number as u64);
        let bytes: Vec<u8> = (0..4096).map(|_| rng.u8(..)).collect();
        let mut stream = peer.connect_plain().await?;
        stream.write_all(&bytes).await?;
        stream.read_u8().await.map(drop)
    });
    attacks.start("random bytes instead of HTTP", 4, short, async |peer: Arc<Peer>, number| {
        let mut rng = fastrand::Rng::with_seed(number as u64);
        let bytes: Vec<u8> = (0..4096).map(|_| rng.u8(..)).collect();
        let mut stream = peer.connect().await?;
        stream.write_all(&bytes).await?;
        stream.read_u8().await.map(drop)
    });
    attacks.start("bodies of 100 megabytes", 4, long, async |peer: Arc<Peer>, _| {
        let mut stream = peer.connect().await?;
        let head = "POST /validate HTTP/1.1\r\nhost: webhook\r\ncontent-type: application/json\r\ncontent-length: 104857600\r\n\r\n";
        stream.write_all(head.as_bytes()).await?;
        let chunk = vec![b' '; 1 << 20];
        for _ in 0..100 {
            stream.write_all(&chunk).await?;
        }
        Ok(())
    });
    attacks.start("requests cut off in the middle", 8, short, async |peer: Arc<Peer>, _| {
        let mut stream = peer.connect().await?;
        let head = "POST /validate HTTP/1.1\r\nhost: webhook\r\ncontent-type: application/json\r\ncontent-length: 400\r\n\r\n{";
        stream.write_all(head.as_bytes()).await?;
        stream.flush().await
    });
    attacks.start("connections, closed at once", 8, short, async |peer: Arc<Peer>, _| {
        peer.connect_plain().await.map(drop)
    });
    attacks.start("reviews that take much memory", 2, long, move |peer: Arc<Peer>, number| {
        let hostile = hostile.clone();
        async move { peer.review(&hostile[number % hostile.len()]).await.map(drop) }
    });
}

/// Returns the errors that are the webhook's fault.
pub(crate) async fn run(cluster: &Arc<Cluster>, home: &str, tenant: &Client) -> usize {
    cluster.source(home, "shades").create().await;
    cluster.wait_data(home, "shades-synced", json!({"sky": "blue"})).await;
    let expected = Arc::new(reviews(cluster, home));
    // As another API server: the limits are per address.
    let api_server = Arc::new(cluster.peer().await.at(Ipv4Addr::new(127, 0, 0, 3)));
    let mut errors = call_all(&api_server, &expected, ALONE).await.print("reviews, alone");

    let over = Arc::new(AtomicBool::new(false));
    let mallory = Arc::new(cluster.peer().await.at(Ipv4Addr::new(127, 0, 0, 2)));
    let hostile = hostile_reviews::hostile(cluster, home).into_iter().map(|(_, review)| review).collect();
    let mut attacks =
        Attacks { peer: mallory, over: over.clone(), running: JoinSet::new(), counts: Vec::new() };
    start_attacks(&mut attacks, Arc::new(hostile));
    let path = configmap(home, "colors");
    let (reviews, changes, writes) = tokio::join!(
        call_all(&api_server, &expected, UNDER_SIEGE),
        mirrored(cluster, home, UNDER_SIEGE),
        measure(tenant, &path),
    );
    over.store(true, Ordering::Relaxed);
    errors += reviews.print("reviews, under siege");
    errors += writes.print("a tenant's writes meanwhile");
    errors += changes.print("changes of a source until they are mirrored, meanwhile");
    println!("\n| attack, in {UNDER_SIEGE:?} | times |\n| --- | --- |");
    for (name, count) in &attacks.counts {
        println!("| {name} | {} |", count.load(Ordering::Relaxed));
    }
    attacks.running.shutdown().await;
    errors
}
