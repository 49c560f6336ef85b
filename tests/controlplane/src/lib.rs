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
//! etcd, kube-apiserver, kube-controller-manager and kubectl are the real ones, compiled from the
//! Go modules that `go.mod` pins: the only place to bump a version. The first build takes minutes
//! and is cached for the user; a boot takes seconds. No process and no file outlives the process
//! that called [`ControlPlane::start`], whichever way it ends: see `cleanup.rs`. For Linux.
//!
//! | variable | effect |
//! | --- | --- |
//! | `KUBEBUILDER_ASSETS` | a directory with the four binaries, taken instead of building them |
//! | `LOCKSTEP_TEST_KUBECONFIG` | an existing cluster, used instead of booting one |
//!
//! The rooms: `compile` and `binaries` find the programs, `pki` and `port` make what they need,
//! `components` are their flags, `process` and `cleanup` run and end them, `users` writes kubeconfigs,
//! `control_plane` puts it together. `image` wraps a static program for container runtimes.
//!
//! [`Node`] adds a real node to it, for root on a machine with containerd, runc and iptables: `node/sandbox` is where it
//! lives, `node/cgroups` where it is counted, `node/programs` what runs there, `node/preflight` why it cannot.

#![forbid(unsafe_code)]

#[cfg(not(target_os = "linux"))]
compile_error!("the control plane for tests, demo and benchmarks runs on Linux only");

mod binaries;
mod cleanup;
mod compile;
mod components;
mod control_plane;
mod error;
mod files;
mod image;
mod kubeconfig;
mod kubectl;
mod lockstep;
mod node;
mod pki;
mod port;
mod process;
mod users;
mod wait;

pub use binaries::Binaries;
pub use control_plane::ControlPlane;
pub use error::Error;
pub use image::Image;
pub use lockstep::LockstepProcess;
pub use node::Node;
pub use process::Process;
pub use rustix::process::Signal;
pub use wait::{eventually, poll};
