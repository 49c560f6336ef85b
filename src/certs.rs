//! The guard's certificates: one CA in a Secret that all replicas share, a leaf of its own in each, and the CA in the
//! webhook configurations. Or a pair from files.

mod authority;
pub mod backoff;
mod bundle;
pub mod files;
pub mod hooks;
pub mod issue;
pub mod leaf;
pub mod phase;
pub mod resolver;
mod sight;
pub mod state;

use std::{path::PathBuf, sync::Arc, time::Duration};

use kube::Client;
use tokio::{sync::watch, task::JoinSet};

use crate::{
    keys::Keys,
    ops::{
        health::{Condition, Readiness},
        log::LogOnce,
        metrics::Metrics,
    },
};
use authority::Authority;
use backoff::Backoff;
use bundle::{Publisher, Side};
use files::{Files, Reloader};
use hooks::HookKind;
use issue::Unusable;
use phase::{Pace, Published};
use resolver::Resolver;
use sight::{Sight, look_out};

/// No sleep is longer: a machine that was suspended finds its certificates expired, and its timers late.
const CLOCK: Duration = Duration::from_mins(1);

/// How long one call may take.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long the watch may take to show what we wrote, before we look again.
const ECHO: Duration = Duration::from_secs(5);

/// What this room needs to know.
#[derive(Debug, Clone)]
pub struct Settings {
    pub keys: Arc<Keys>,
    /// Lockstep's own namespace, where the CA Secret is.
    pub namespace: String,
    pub pace: Pace,
    /// Serve with these; no Secret and no webhook configuration is touched then.
    pub files: Option<Files>,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("a certificate could not be made: {0}")]
    Issue(#[from] rcgen::Error),
    #[error("a certificate that was just made cannot be used: {0}")]
    Made(#[from] Unusable),
    #[error("TLS does not take the certificate: {0}")]
    Tls(#[from] rustls::Error),
    #[error("{} cannot be read: {error}; check --tls-cert and --tls-key", path.display())]
    Unreadable { path: PathBuf, error: String },
    #[error("{} cannot be used: {why}; it must be PEM, the certificate first in its chain, with its own key", path.display())]
    Broken { path: PathBuf, why: &'static str },
}

/// Starts to keep certificates, and returns where they are served from. None of the tasks ever ends.
pub fn start(
    tasks: &mut JoinSet<&'static str>,
    client: &Client,
    settings: Settings,
    metrics: &Metrics,
    readiness: &Readiness,
) -> Result<Arc<Resolver>, Error> {
    let resolver: Arc<Resolver> = Arc::default();
    if let Some(files) = settings.files {
        let reloader = Reloader::start(files, resolver.clone(), metrics.clone(), readiness.clone())?;
        // Who writes the files sees to the webhook configurations, too.
        readiness.mark_true(Condition::Bundle);
        tasks.spawn(async move {
            reloader.run().await;
            "certificate reloader"
        });
        return Ok(resolver);
    }
    let settings = Arc::new(settings);
    let (see_secret, secret) = watch::channel(Sight::Unknown);
    let (state_of, state) = watch::channel(None);
    let (published_of, published) = watch::channel(Published::Unknown);
    let (names_of, names) = watch::channel(hooks::names(std::iter::empty(), &settings.namespace));
    let (serving_of, serving) = watch::channel(None);

    let sides = [HookKind::Validating, HookKind::Mutating].map(|kind| {
        let (see, sight) = watch::channel(Sight::Unknown);
        let (client, instance) = (client.clone(), settings.keys.instance.clone());
        tasks.spawn(async move {
            let what = format!("the {} {instance}", kind.as_str());
            look_out(client, what, kind.path().to_owned(), &instance, see).await;
            "watch of a webhook configuration"
        });
        Side::new(kind, sight)
    });
    {
        let (client, settings) = (client.clone(), settings.clone());
        tasks.spawn(async move {
            let (namespace, instance) = (&settings.namespace, &settings.keys.instance);
            let what = format!("the CA Secret {namespace}/{instance}");
            let path = format!("/api/v1/namespaces/{namespace}/secrets");
            look_out(client, what, path, instance, see_secret).await;
            "watch of the CA Secret"
        });
    }
    let authority = Authority {
        client: client.clone(),
        settings: settings.clone(),
        sight: secret,
        published: published.clone(),
        serving,
        state: state_of,
        metrics: metrics.clone(),
        written: None,
        backoff: Backoff::default(),
        log_once: LogOnce::default(),
    };
    tasks.spawn(async move {
        authority.run().await;
        "certificate authority"
    });
    let keeper = leaf::Keeper {
        pace: settings.pace,
        state: state.clone(),
        published,
        names,
        serving: serving_of,
        resolver: resolver.clone(),
        metrics: metrics.clone(),
        readiness: readiness.clone(),
    };
    tasks.spawn(async move {
        keeper.run().await;
        "certificate keeper"
    });
    let publisher = Publisher {
        client: client.clone(),
        settings,
        state,
        published: published_of,
        names: names_of,
        metrics: metrics.clone(),
        readiness: readiness.clone(),
        sides,
    };
    tasks.spawn(async move {
        publisher.run().await;
        "bundle publisher"
    });
    Ok(resolver)
}
