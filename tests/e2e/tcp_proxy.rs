//! A TCP proxy: it balances connections over several replicas, as a Service does, and can stall all of them, as a network
//! that is down does.

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

pub struct TcpProxy {
    /// Addresses, and whether each is ready.
    backends: Vec<(String, AtomicBool)>,
    next: AtomicUsize,
    stalled: watch::Sender<bool>,
}

impl Cluster {
    /// A proxy to the API server, and a kubeconfig for Lockstep's ServiceAccount that uses it; `None` if the API server
    /// is not on this machine.
    pub async fn api_server_proxy(&self) -> Option<(Arc<TcpProxy>, PathBuf)> {
        if self.plane.is_existing() {
            eprintln!("{} is skipped: it needs an API server on this machine", self.id);
            return None;
        }
        let server = self.plane.server_url();
        // The host part is unique to this test.
        let address = self.address.replace(":9443", ":6443");
        let proxy = TcpProxy::start(&address, &[server.trim_start_matches("https://").to_owned()]).await;
        proxy.set_ready(0, true);
        let kubeconfig = self.plane.service_account("lockstep-system", "lockstep").expect("a kubeconfig");
        let text = std::fs::read_to_string(kubeconfig).expect("a kubeconfig");
        let mut document: serde_json::Value = serde_json::from_str(&text).expect("a kubeconfig");
        let cluster = &mut document["clusters"][0]["cluster"];
        cluster["server"] = format!("https://{address}").into();
        // The API server's certificate does not include the proxy's address.
        cluster["tls-server-name"] = "127.0.0.1".into();
        let path = self.plane.data_dir().join(format!("{}.kubeconfig", self.id));
        std::fs::write(&path, document.to_string()).expect("a kubeconfig");
        Some((proxy, path))
    }
}

impl TcpProxy {
    /// Listens at an address. No backend is ready yet.
    pub async fn start(address: &str, backends: &[String]) -> Arc<Self> {
        let listener = TcpListener::bind(address).await.expect("an address");
        let backends = backends.iter().map(|backend| (backend.clone(), AtomicBool::new(false))).collect();
        let stalled = watch::Sender::new(false);
        let proxy = Arc::new(Self { backends, next: AtomicUsize::new(0), stalled });
        let balancer = proxy.clone();
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let (backend, mut stalled) = (balancer.next_backend(), balancer.stalled.subscribe());
                tokio::spawn(async move {
                    let mut backend = TcpStream::connect(backend?).await.ok()?;
                    tokio::select! {
                        biased;
                        _ = stalled.wait_for(|stalled| *stalled) => {}
                        done = copy_bidirectional(&mut client, &mut backend) => return done.ok(),
                    }
                    // While stalled, the connection stays open and silent; afterwards it is closed.
                    let _ = stalled.wait_for(|stalled| !*stalled).await;
                    None
                });
            }
        });
        proxy
    }

    fn next_backend(&self) -> Option<String> {
        let ready = self.backends.iter().filter(|(_, ready)| ready.load(Ordering::SeqCst));
        let ready: Vec<&String> = ready.map(|(address, _)| address).collect();
        let index = self.next.fetch_add(1, Ordering::SeqCst).checked_rem(ready.len())?;
        Some(ready[index].clone())
    }

    pub fn set_ready(&self, backend: usize, ready: bool) {
        self.backends[backend].1.store(ready, Ordering::SeqCst);
    }

    /// Stops forwarding without closing any connection.
    pub fn stall(&self) {
        self.stalled.send_replace(true);
    }

    /// Forwards new connections again.
    pub fn resume(&self) {
        self.stalled.send_replace(false);
    }
}
