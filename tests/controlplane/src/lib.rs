//! Builds, caches and boots a real Kubernetes control plane for tests, demo and benchmarks.
//!
//! ```no_run
//! # fn main() -> Result<(), controlplane::Error> {
//! let plane = controlplane::ControlPlane::start()?;
//! let alice = plane.user("alice", &["developers"])?;
//! plane.kubectl_as(&alice).args(["auth", "whoami"]).status()?;
//! # Ok(()) }
//! ```
//!
//! etcd, kube-apiserver, kube-controller-manager and kubectl are compiled from the Go modules that `go.mod` pins, or
//! for another minor version of Kubernetes from those of `versions/*/go.mod`; there is no other place to change a
//! version. The first build takes minutes and is cached for the user; a boot takes seconds. No process and no file
//! outlives the process that called [`ControlPlane::start`], whichever way it ends: see `cleanup.rs`. Linux only.
//!
//! | variable | effect |
//! | --- | --- |
//! | `KUBEBUILDER_ASSETS` | a directory with the binaries, used instead of building them |
//! | `LOCKSTEP_TEST_KUBERNETES` | a minor version of Kubernetes, like `1.30`, instead of the default |
//! | `LOCKSTEP_TEST_KUBECONFIG` | an existing cluster, used instead of booting one |
//!
//! | module | what it does |
//! | --- | --- |
//! | `binaries`, `compile` | find or compile the binaries |
//! | `versions` | the minor versions of Kubernetes that can be compiled |
//! | `go`, `beside` | run Go, and cargo at the same time |
//! | `progress`, `display` | how far Go is, and how that is shown |
//! | `pki`, `port`, `files`, `kubeconfig` | create certificates, ports and files |
//! | `components` | flags and readiness probes of each component |
//! | `process`, `cleanup` | start, kill, pause and clean up processes |
//! | `users`, `kubectl` | kubeconfigs of users, and kubectl with them |
//! | `control_plane` | puts these together |
//! | `lockstep` | a `lockstep run` process for harness, demo and benchmark |
//! | `cert_manager` | cert-manager's controllers and cainjector as processes beside the control plane |
//! | `skip` | counts tests that are skipped |
//! | `image`, `archive` | an OCI archive of a static program; tar and gzip, reproducibly |
//! | `node` | a real node, for root on a machine with containerd, runc and iptables |
//! | `node/preflight` | what this machine lacks to run a node |
//! | `node/sandbox`, `node/cgroups` | the node's namespaces, network and cgroups |
//! | `node/programs` | configuration of containerd, kubelet and kube-proxy |

#![forbid(unsafe_code)]

#[cfg(not(target_os = "linux"))]
compile_error!("the control plane for tests, demo and benchmarks runs on Linux only");

mod archive;
mod beside;
mod binaries;
mod cert_manager;
mod cleanup;
mod compile;
mod components;
mod control_plane;
mod display;
mod error;
mod files;
mod go;
mod image;
mod kubeconfig;
mod kubectl;
mod lockstep;
mod node;
mod pki;
mod port;
mod process;
mod progress;
mod skip;
mod users;
mod versions;
mod wait;

pub use archive::{Tar, gzip};
pub use binaries::{Binaries, Purpose};
pub use cert_manager::CertManager;
pub use control_plane::ControlPlane;
pub use error::Error;
pub use image::{Image, ReleasedImage};
pub use lockstep::LockstepProcess;
pub use node::Node;
pub use process::Process;
pub use rustix::process::Signal;
pub use skip::skip;
pub use versions::versions;
pub use wait::{eventually, poll};
