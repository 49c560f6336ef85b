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
    backends: Vec<Backend>,
    next: AtomicUsize,
    stalled: watch::Sender<bool>,
}

struct Backend {
    address: String,
    ready: AtomicBool,
    /// How often all connections to it were closed.
    cuts: watch::Sender<u64>,
}

impl Cluster {
    /// A proxy to the API server, and a kubeconfig for Lockstep's ServiceAccount that uses it; `None` if the API server
    /// is not on this machine.
    pub async fn api_server_proxy(&self) -> Option<(Arc<TcpProxy>, PathBuf)> {
        if self.plane.is_existing() {
            controlplane::skip("it needs an API server on this machine, and LOCKSTEP_TEST_KUBECONFIG is set");
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
        let backend = |address: &String| Backend {
            address: address.clone(),
            ready: AtomicBool::new(false),
            cuts: watch::Sender::new(0),
        };
        let backends = backends.iter().map(backend).collect();
        let stalled = watch::Sender::new(false);
        let proxy = Arc::new(Self { backends, next: AtomicUsize::new(0), stalled });
        let balancer = proxy.clone();
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                let (backend, mut stalled) = (balancer.next_backend(), balancer.stalled.subscribe());
                tokio::spawn(async move {
                    let (address, mut cuts) = backend?;
                    let mut backend = TcpStream::connect(address).await.ok()?;
                    tokio::select! {
                        biased;
                        _ = cuts.changed() => return None,
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

    /// The address of the next backend that is ready, and a receiver that changes when its connections are closed.
    fn next_backend(&self) -> Option<(String, watch::Receiver<u64>)> {
        let is_ready = |backend: &&Backend| backend.ready.load(Ordering::SeqCst);
        let ready: Vec<&Backend> = self.backends.iter().filter(is_ready).collect();
        let index = self.next.fetch_add(1, Ordering::SeqCst).checked_rem(ready.len())?;
        Some((ready[index].address.clone(), ready[index].cuts.subscribe()))
    }

    pub fn set_ready(&self, backend: usize, ready: bool) {
        self.backends[backend].ready.store(ready, Ordering::SeqCst);
    }

    /// Sends nothing more to a backend, and closes its connections. For tests/histories.
    #[allow(dead_code)]
    pub fn remove(&self, backend: usize) {
        self.set_ready(backend, false);
        self.backends[backend].cuts.send_modify(|cuts| *cuts += 1);
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
