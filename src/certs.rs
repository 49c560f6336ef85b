//! The guard's certificates: one CA in a Secret that all replicas share, a leaf per replica, and the CA in the webhook
//! configurations. Or a pair from files.
//!
//! One task observes the Secret and the webhook configurations (`task`), a pure function decides (`decide`: `rotation`
//! for the Secret, `leaf` for the leaf, `webhooks` for the caBundle, `writes` for when to write), and the task carries
//! that out. Somebody may ask for a rotation through the Lease (`request`).

pub mod decide;
pub mod files;
pub mod issue;
pub mod leaf;
pub mod request;
pub mod resolver;
pub mod rotation;
pub mod secret;
mod task;
#[cfg(test)]
pub(crate) mod testing;
pub mod webhooks;
pub mod writes;

use std::{path::PathBuf, sync::Arc, time::Duration};

use k8s_openapi::jiff::Timestamp;
use kube::Client;
use tokio::task::JoinSet;

use crate::{
    keys::Keys,
    leader::LeaseAnnotations,
    ops::{
        health::{Condition, Readiness},
        metrics::Metrics,
    },
    watch::Restores,
};
use files::{Files, Reloader};
use issue::UnusableCa;
use resolver::Resolver;
use task::CertificateTask;

/// Certificates are checked at least this often: timers of a machine that was suspended fire late.
const MAX_SLEEP: Duration = Duration::from_mins(1);

#[derive(Debug, Clone)]
pub struct CertSettings {
    pub keys: Arc<Keys>,
    /// Lockstep's own namespace, which has the CA Secret.
    pub namespace: String,
    pub lifetimes: Lifetimes,
    /// Files to serve. With files, neither the Secret nor the webhook configurations are written.
    pub files: Option<Files>,
}

/// How long certificates are valid, and the delays of a rotation that follow from that.
#[derive(Debug, Clone, Copy)]
pub struct Lifetimes {
    pub ca_validity: Duration,
    pub leaf_validity: Duration,
}

impl Lifetimes {
    /// How long a change of the webhook configurations takes to reach every API server.
    #[must_use]
    pub fn propagation_delay(&self) -> Duration {
        (self.ca_validity / 12).clamp(Duration::from_secs(1), Duration::from_mins(1))
    }

    /// How long an extra CA stays in the webhook configurations. Longer than a watch may stall: the Secret may have a
    /// next CA that our watch has not shown yet.
    #[must_use]
    pub fn removal_delay(&self) -> Duration {
        self.propagation_delay() * 4
    }

    /// How long after a revoked CA was replaced it stays trusted. Longer than a watch may stall: by then every replica
    /// that reaches the API server serves a leaf of the new one.
    #[must_use]
    pub fn revoke_after(&self) -> Duration {
        self.removal_delay().min(self.retire_after())
    }

    /// How long after a CA was replaced its leaves may be served.
    #[must_use]
    pub fn retire_after(&self) -> Duration {
        self.leaf_validity + self.propagation_delay()
    }
}

/// Something to do now, or the time to check again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Due<T> {
    Now(T),
    At(Timestamp),
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("a certificate could not be generated: {0}")]
    Generate(#[from] rcgen::Error),
    #[error("a generated certificate is unusable: {0}")]
    Generated(#[from] UnusableCa),
    #[error("TLS does not accept the certificate: {0}")]
    Tls(#[from] rustls::Error),
    #[error("{} cannot be read: {error}; check --tls-cert and --tls-key", path.display())]
    UnreadableFile { path: PathBuf, error: String },
    #[error("{} cannot be used: {why}; it must be PEM, the certificate first in its chain, with its own key", path.display())]
    UnusableFile { path: PathBuf, why: &'static str },
}

/// Spawns the task that keeps a valid certificate in the returned resolver. It never ends.
pub fn start(
    tasks: &mut JoinSet<&'static str>,
    client: &Client,
    settings: CertSettings,
    annotations: &LeaseAnnotations,
    metrics: &Metrics,
    readiness: &Readiness,
    restores: &Restores,
) -> Result<Arc<Resolver>, Error> {
    let resolver: Arc<Resolver> = Arc::default();
    let (metrics, readiness, annotations) = (metrics.clone(), readiness.clone(), annotations.clone());
    if let Some(files) = settings.files {
        let reloader = Reloader::start(files, resolver.clone(), metrics, readiness.clone())?;
        // The tool that writes the files also sets the caBundle.
        readiness.mark_true(Condition::Bundle);
        tasks.spawn(async move {
            tokio::join!(reloader.run(), request::refuse(&settings.keys, &annotations));
            "certificate reloader"
        });
    } else {
        let client = client.clone();
        let (serving, restores) = (resolver.clone(), restores.clone());
        tasks.spawn(async move {
            CertificateTask::observe_and_run(
                client,
                settings,
                serving,
                annotations,
                metrics,
                readiness,
                restores,
            )
            .await;
            "certificates"
        });
    }
    Ok(resolver)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn propagation_delay_is_a_twelfth_of_the_ca_validity_between_a_second_and_a_minute() {
        let delay = |ca_validity| {
            Lifetimes { ca_validity, leaf_validity: Duration::from_secs(6) }.propagation_delay()
        };
        assert_eq!(delay(Duration::from_secs(24)), Duration::from_secs(2));
        assert_eq!(delay(Duration::from_hours(365 * 24)), Duration::from_mins(1));
        assert_eq!(delay(Duration::from_secs(3)), Duration::from_secs(1));
    }
}
