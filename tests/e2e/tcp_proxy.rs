//! A TCP proxy: it balances connections over several replicas, as a Service does, and can stall all of them, as a
//! network that is down does.

use std::{
    path::PathBuf,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use tokio::{
    io::{AsyncWriteExt, copy, copy_bidirectional, sink},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinSet,
};

use crate::harness::Cluster;

pub(crate) struct TcpProxy {
    backends: Vec<Backend>,
    next: AtomicUsize,
    accepted: AtomicUsize,
    stalled: watch::Sender<bool>,
    /// How often all connections were ended.
    ends: watch::Sender<u64>,
    connections: Mutex<JoinSet<Option<(u64, u64)>>>,
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
    pub(crate) async fn api_server_proxy(&self) -> Option<(Arc<TcpProxy>, PathBuf)> {
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
    pub(crate) async fn start(address: &str, backends: &[String]) -> Arc<Self> {
        let listener = TcpListener::bind(address).await.expect("an address");
        let backend = |address: &String| Backend {
            address: address.clone(),
            ready: AtomicBool::new(false),
            cuts: watch::Sender::new(0),
        };
        let backends = backends.iter().map(backend).collect();
        let stalled = watch::Sender::new(false);
        let proxy = Arc::new(Self {
            backends,
            next: AtomicUsize::new(0),
            accepted: AtomicUsize::new(0),
            stalled,
            ends: watch::Sender::new(0),
            connections: Mutex::default(),
        });
        let balancer = proxy.clone();
        tokio::spawn(async move {
            while let Ok((mut client, _)) = listener.accept().await {
                balancer.accepted.fetch_add(1, Ordering::SeqCst);
                let (backend, mut stalled) = (balancer.next_backend(), balancer.stalled.subscribe());
                let mut ends = balancer.ends.subscribe();
                let mut connections = balancer.connections.lock().expect("a lock");
                while connections.try_join_next().is_some() {}
                connections.spawn(async move {
                    let (address, mut cuts) = backend?;
                    let mut backend = TcpStream::connect(address).await.ok()?;
                    let ended = tokio::select! {
                        biased;
                        _ = cuts.changed() => return None,
                        _ = ends.changed() => true,
                        _ = stalled.wait_for(|stalled| *stalled) => false,
                        done = copy_bidirectional(&mut client, &mut backend) => return done.ok(),
                    };
                    if ended {
                        client.shutdown().await.ok()?;
                        copy(&mut client, &mut sink()).await.ok()?;
                        return None;
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

    pub(crate) fn set_ready(&self, backend: usize, ready: bool) {
        self.backends[backend].ready.store(ready, Ordering::SeqCst);
    }

    /// How many connections it has accepted. For tests/e2e.
    #[allow(dead_code)]
    pub(crate) fn accepted(&self) -> usize {
        self.accepted.load(Ordering::SeqCst)
    }

    /// Ends all connections as a server does that closes idle ones, and waits until the clients have closed them, too.
    /// No request may be in flight. For tests/e2e.
    #[allow(dead_code)]
    pub(crate) async fn end_connections(&self) {
        let connections = std::mem::take(&mut *self.connections.lock().expect("a lock"));
        self.ends.send_modify(|ends| *ends += 1);
        connections.join_all().await;
    }

    /// Sends nothing more to a backend, and closes its connections. For tests/histories.
    #[allow(dead_code)]
    pub(crate) fn remove(&self, backend: usize) {
        self.set_ready(backend, false);
        self.backends[backend].cuts.send_modify(|cuts| *cuts += 1);
    }

    /// Stops forwarding without closing any connection.
    pub(crate) fn stall(&self) {
        self.stalled.send_replace(true);
    }

    /// Forwards new connections again.
    pub(crate) fn resume(&self) {
        self.stalled.send_replace(false);
    }
}
