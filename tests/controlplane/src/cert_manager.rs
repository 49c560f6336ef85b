//! cert-manager beside a control plane: its controllers and its cainjector, which tests can kill and restart.

use crate::process::{Process, Spec};
use crate::{Binaries, ControlPlane, Error};

/// A running cert-manager. Dropping it kills its processes.
#[derive(Debug)]
pub struct CertManager {
    /// Issues certificates into Secrets.
    pub controller: Process,
    /// Writes CAs from Secrets into webhook configurations.
    pub cainjector: Process,
}

impl CertManager {
    /// Starts it on a control plane that has its CRDs. Does not wait until it has issued anything.
    ///
    /// # Errors
    /// As for [`Binaries::build`], and when a process ends at once.
    pub fn start(plane: &ControlPlane) -> Result<Self, Error> {
        let program = Binaries::build_cert_manager()?.program("cert-manager");
        let start = |name, component: &str| {
            plane.add(Spec {
                name,
                program: program.clone(),
                args: vec![component.to_owned(), plane.admin().display().to_string()],
                ready: Box::new(|| true),
            })
        };
        Ok(Self {
            controller: start("cert-manager-controller", "controller")?,
            cainjector: start("cert-manager-cainjector", "cainjector")?,
        })
    }
}
