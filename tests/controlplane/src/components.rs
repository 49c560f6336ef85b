//! Flags and readiness probes of etcd, the API server and the controller manager.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rcgen::KeyPair;

use crate::binaries::Binaries;
use crate::pki::Authority;
use crate::port::Port;
use crate::process::{Probe, Spec};
use crate::{Error, files};

/// Name of the audit log in the data directory.
pub(crate) const AUDIT_LOG: &str = "audit.log";

/// The names in the API server's certificate. The last is the address of the Service `kubernetes`, the first one of
/// `--service-cluster-ip-range`.
const SERVER_NAMES: [&str; 5] =
    ["localhost", "127.0.0.1", "kubernetes.default", "kubernetes.default.svc", "10.0.0.1"];

/// One line for each request, reads included. Stage `RequestReceived` would only double the lines.
const AUDIT_POLICY: &str = "\
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Metadata
";

/// Where the API server runs.
pub(crate) struct Site {
    pub(crate) address: Ipv4Addr,
    pub(crate) port: u16,
    /// Keeps other processes from taking the port.
    pub(crate) reservation: Option<Port>,
    /// A wrapper program and its arguments, to start it in another network namespace.
    pub(crate) enter: Option<(PathBuf, Vec<String>)>,
    pub(crate) flags: Vec<String>,
}

impl Site {
    /// The loopback interface of this machine.
    pub(crate) fn machine() -> Result<Self, Error> {
        let port = Port::reserve()?;
        Ok(Self {
            address: Ipv4Addr::LOCALHOST,
            port: port.number(),
            reservation: Some(port),
            enter: None,
            flags: vec![],
        })
    }
}

/// Writes the files that the flags below name. The CA's key is not among them.
pub(crate) fn write_files(dir: &Path, authority: &Authority, site: &Site) -> Result<(), Error> {
    let address = site.address.to_string();
    let mut names = SERVER_NAMES.to_vec();
    names.extend((site.address != Ipv4Addr::LOCALHOST).then_some(address.as_str()));
    let server = authority.server(&names)?;
    let service_accounts = KeyPair::generate()?;
    for (name, content) in [
        ("ca.crt", authority.certificate()),
        ("server.crt", server.certificate),
        ("server.key", server.key),
        ("service-accounts.key", service_accounts.serialize_pem()),
        ("service-accounts.pub", service_accounts.public_key_pem()),
        ("audit-policy.yaml", AUDIT_POLICY.to_owned()),
    ] {
        files::write_private(&dir.join(name), &content)?;
    }
    Ok(())
}

pub(crate) fn etcd_data(dir: &Path) -> PathBuf {
    dir.join("etcd")
}

pub(crate) fn etcd_socket(dir: &Path) -> PathBuf {
    dir.join("etcd.sock")
}

/// etcd listens on a socket in the private data directory: it needs no port and no certificates, and no other user of
/// the machine can read the Secrets in it. The advertised address must look like a port, but no client uses it.
pub(crate) fn etcd(binaries: &Binaries, dir: &Path) -> Spec {
    let socket = etcd_socket(dir);
    Spec {
        name: "etcd",
        program: binaries.program("etcd"),
        args: vec![
            format!("--data-dir={}", etcd_data(dir).display()),
            format!("--listen-client-urls=unix://{}", socket.display()),
            "--advertise-client-urls=http://127.0.0.1:2379".into(),
            "--listen-peer-urls=http://127.0.0.1:0".into(),
            // A single member need not wait for other candidates.
            "--heartbeat-interval=10".into(),
            "--election-timeout=50".into(),
            // Data must survive a crash of etcd, not of the machine.
            "--unsafe-no-fsync".into(),
            // For benchmarks: at the default of 2 GiB, etcd refuses to write.
            "--quota-backend-bytes=8589934592".into(),
            "--log-level=warn".into(),
        ],
        ready: Box::new(move || etcd_is_healthy(&socket).unwrap_or(false)),
    }
}

/// Flags of the site and `extra` come last, so they override those set here.
pub(crate) fn apiserver(binaries: &Binaries, dir: &Path, site: &Site, extra: &[&str], ready: Probe) -> Spec {
    let (address, port) = (site.address, site.port);
    let file = |name: &str| dir.join(name).display().to_string();
    let mut args = vec![
        format!("--etcd-servers=unix://{}", file("etcd.sock")),
        "--bind-address=127.0.0.1".into(),
        // Otherwise it looks for a public address, and fails on a machine without a network.
        "--advertise-address=127.0.0.1".into(),
        format!("--secure-port={port}"),
        // This process reserves the port: see `port.rs`.
        "--permit-port-sharing".into(),
        // Otherwise the server keeps failing to publish 127.0.0.1 as an endpoint.
        "--endpoint-reconciler-type=none".into(),
        "--service-cluster-ip-range=10.0.0.0/24".into(),
        format!("--tls-cert-file={}", file("server.crt")),
        format!("--tls-private-key-file={}", file("server.key")),
        format!("--client-ca-file={}", file("ca.crt")),
        "--anonymous-auth=false".into(),
        "--authorization-mode=RBAC".into(),
        "--service-account-issuer=https://kubernetes.default.svc".into(),
        format!("--service-account-key-file={}", file("service-accounts.pub")),
        format!("--service-account-signing-key-file={}", file("service-accounts.key")),
        format!("--audit-policy-file={}", file("audit-policy.yaml")),
        format!("--audit-log-path={}", file(AUDIT_LOG)),
        // Each line is written before the response is complete, and the file is never rotated.
        "--audit-log-mode=blocking".into(),
        "--audit-log-maxsize=1000000".into(),
    ];
    args.extend(site.flags.iter().cloned());
    args.extend(extra.iter().map(ToString::to_string));
    let mut program = binaries.program("kube-apiserver");
    if let Some((enter, how)) = &site.enter {
        args.splice(0..0, how.iter().cloned().chain([program.display().to_string()]));
        program.clone_from(enter);
    }
    // Connecting is cheaper than running kubectl.
    let ready: Probe = Box::new(move || {
        TcpStream::connect_timeout(&(address, port).into(), Duration::from_secs(1)).is_ok() && ready()
    });
    Spec { name: "kube-apiserver", program, args, ready }
}

/// `kubeconfig` holds its own credentials.
pub(crate) fn controller_manager(binaries: &Binaries, dir: &Path, kubeconfig: &Path, ready: Probe) -> Spec {
    let file = |name: &str| dir.join(name).display().to_string();
    Spec {
        name: "kube-controller-manager",
        program: binaries.program("kube-controller-manager"),
        args: vec![
            format!("--kubeconfig={}", kubeconfig.display()),
            "--use-service-account-credentials".into(),
            "--leader-elect=false".into(),
            // It needs no port, because nothing calls it.
            "--secure-port=0".into(),
            format!("--root-ca-file={}", file("ca.crt")),
            format!("--service-account-private-key-file={}", file("service-accounts.key")),
            // At the default of 20 requests a second, tests would wait for the garbage collector.
            "--kube-api-qps=500".into(),
            "--kube-api-burst=1000".into(),
        ],
        ready,
    }
}

fn etcd_is_healthy(socket: &Path) -> io::Result<bool> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    stream.write_all(b"GET /health HTTP/1.1\r\nHost: etcd\r\nConnection: close\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    Ok(answer.starts_with("HTTP/1.1 200"))
}
