//! Connections pass through here: to one replica after the other, as through a Service, or to nobody, as through a
//! network that is down.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use tokio::{
    io::copy_bidirectional,
    net::{TcpListener, TcpStream},
    sync::watch,
};

use crate::harness::Cluster;

pub struct Relay {
    ends: Vec<(String, AtomicBool)>,
    next: AtomicUsize,
    cut: watch::Sender<bool>,
}

impl Cluster {
    /// A line to the API server that can be cut, and a kubeconfig for Lockstep's identity that goes through it; none
    /// where the API server is elsewhere.
    pub async fn line(&self) -> Option<(Arc<Relay>, PathBuf)> {
        if self.plane.is_existing() {
            eprintln!("{} is skipped: it needs an API server on this machine", self.id);
            return None;
        }
        let server = self.plane.server_url();
        // No other test has this address.
        let address = self.address.replace(":9443", ":6443");
        let relay = Relay::start(&address, &[server.trim_start_matches("https://").to_owned()]).await;
        relay.set(0, true);
        let kubeconfig = self.plane.service_account("lockstep-system", "lockstep").expect("a kubeconfig");
        let text = std::fs::read_to_string(kubeconfig).expect("a kubeconfig");
        let mut document: serde_json::Value = serde_json::from_str(&text).expect("a kubeconfig");
        let cluster = &mut document["clusters"][0]["cluster"];
        cluster["server"] = format!("https://{address}").into();
        // The API server's certificate does not know the relay's address.
        cluster["tls-server-name"] = "127.0.0.1".into();
        let path = self.plane.data_dir().join(format!("{}.kubeconfig", self.id));
        std::fs::write(&path, document.to_string()).expect("a kubeconfig");
        Some((relay, path))
    }
}

impl Relay {
    /// Listens at an address. None of the ends is in use yet.
    pub async fn start(address: &str, ends: &[String]) -> Arc<Self> {
        let listener = TcpListener::bind(address).await.expect("an address");
        let ends = ends.iter().map(|end| (end.clone(), AtomicBool::new(false))).collect();
        let relay = Arc::new(Self { ends, next: AtomicUsize::new(0), cut: watch::Sender::new(false) });
        let turns = relay.clone();
        tokio::spawn(async move {
            while let Ok((mut peer, _)) = listener.accept().await {
                let (end, mut cut) = (turns.turn(), turns.cut.subscribe());
                tokio::spawn(async move {
                    let mut end = TcpStream::connect(end?).await.ok()?;
                    tokio::select! {
                        biased;
                        _ = cut.wait_for(|cut| *cut) => {}
                        done = copy_bidirectional(&mut peer, &mut end) => return done.ok(),
                    }
                    // Nothing moves, and nobody is told, until the line is back; then all is lost.
                    let _ = cut.wait_for(|cut| !*cut).await;
                    None
                });
            }
        });
        relay
    }

    fn turn(&self) -> Option<String> {
        let ready: Vec<&String> =
            self.ends.iter().filter(|(_, ready)| ready.load(Ordering::SeqCst)).map(|(end, _)| end).collect();
        let at = self.next.fetch_add(1, Ordering::SeqCst).checked_rem(ready.len())?;
        Some(ready[at].clone())
    }

    pub fn set(&self, end: usize, ready: bool) {
        self.ends[end].1.store(ready, Ordering::SeqCst);
    }

    /// The line goes silent, or is back.
    pub fn cut(&self, cut: bool) {
        self.cut.send_replace(cut);
    }
}
