//! `lockstep run`: starts the parts, and stops them in order.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use anyhow::Context;
use axum::Router;
use kube::Client;
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
    sync::watch,
    task::JoinSet,
};

use crate::{
    certs, config,
    controller::{Controller, queue::Queue},
    leader::{self, Claim, Election, LeaseAnnotations},
    ops::{
        health::{Condition, Readiness, readyz, routes},
        log,
        metrics::Metrics,
        watches::WatchReport,
    },
    tls::{
        ConnectionLimits, Server, Tls,
        client_ca::{ClientCa, server_configs},
    },
    webhook,
    webhook::{access::AccessChecker, http::Webhook},
};
use lockstep_cluster::{client, informer::Informers, watch::Restores};
use lockstep_core::{
    failure::{
        Failure,
        backoff::{Backoff, LogOnce, Retry},
    },
    world::{Scope, SharedWorld, World},
};

pub async fn run(settings: config::Run) -> anyhow::Result<()> {
    log::init(settings.log_format);
    let metrics = Metrics::new();
    let counted = metrics.clone();
    let count = move |verb, status| counted.api_call(verb, status);
    let client = client::build(client::config().await?, count)?;
    let scope = settings.scope();
    let readiness = Readiness::new(conditions(&settings, &scope));

    // First, so that a port in use is reported at once.
    let ops = bind(settings.ops_bind, "--ops-bind").await?;
    let webhook =
        if settings.no_webhook { None } else { Some(bind(settings.webhook_bind, "--webhook-bind").await?) };
    let address = |listener: &TcpListener| listener.local_addr().map(|a| a.to_string()).unwrap_or_default();
    let ops_address = address(&ops);
    let webhook_address = webhook.as_ref().map(address);
    let drain = if settings.no_webhook { Duration::ZERO } else { settings.drain };
    let stop = stop_signal(readiness.clone(), drain)?;
    // Never stopped: the probes must not fail while requests and writes under way are finished.
    let router = routes(metrics.clone(), readiness.clone());
    // Probes and scrapes are few and short.
    let limits = ConnectionLimits {
        max_connections: 64,
        max_closing: 16,
        header_timeout: Duration::from_secs(10),
        ..ConnectionLimits::default()
    };
    tokio::spawn(serve_plain(ops, router, readiness.clone(), limits));

    let identity = tokio::select! {
        biased;
        () = stopped(stop.clone()) => return Ok(()),
        identity = identify(&client) => identity,
    };
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        identity,
        domain = settings.domain,
        namespace = scope.rules.own_namespace,
        kinds = scope.kinds.iter().map(|kind| kind.plural()).collect::<Vec<_>>().join(","),
        ops = ops_address,
        webhook = webhook_address,
        "lockstep starts"
    );
    let mut replica = Process {
        world: SharedWorld::new(&scope, settings.source_cache),
        settings,
        scope,
        client,
        annotations: LeaseAnnotations::default(),
        restores: Restores::default(),
        metrics,
        readiness,
        tasks: JoinSet::new(),
        stop,
    };
    let queue = replica.start_watches();
    let webhook = match webhook {
        None => None,
        Some(listener) => Some((listener, replica.webhook(identity)?)),
    };
    tokio::select! {
        biased;
        () = stopped(replica.stop.clone()) => {
            tracing::info!("lockstep stops");
            return Ok(());
        }
        () = replica.readiness.all_listed() => {}
    }
    tracing::info!(
        sources = replica.world.read(World::source_count),
        companions = replica.world.read(World::companion_count),
        "all watches have listed"
    );
    let serve_webhook = async {
        if let Some((listener, server)) = webhook {
            // Only now, because a review needs the complete world. Connections made before wait in the backlog.
            replica.readiness.mark_true(Condition::Serving);
            server.serve(listener, replica.stop.clone()).await;
        }
    };
    tokio::join!(replica.run_controller(queue), serve_webhook);
    tracing::info!("lockstep stops");
    Ok(())
}

/// What the parts of this process share.
struct Process {
    settings: config::Run,
    scope: Scope,
    client: Client,
    world: SharedWorld,
    annotations: LeaseAnnotations,
    restores: Restores,
    metrics: Metrics,
    readiness: Readiness,
    /// None of them ends before the process.
    tasks: JoinSet<()>,
    /// Becomes true when the process has to stop.
    stop: watch::Receiver<bool>,
}

impl Process {
    /// Returns the queue to which the watches add the sources that have to be reconciled.
    fn start_watches(&mut self) -> Arc<Queue> {
        let queue: Arc<Queue> = Arc::default();
        let requeue = queue.clone();
        let informers = Informers {
            scope: self.scope.clone(),
            world: self.world.clone(),
            requeue: Arc::new(move |keys| requeue.push_all(keys)),
            restores: self.restores.clone(),
            observer: Arc::new(WatchReport {
                world: self.world.clone(),
                readiness: self.readiness.clone(),
                metrics: self.metrics.clone(),
            }),
        };
        informers.start(&mut self.tasks, &self.client);
        queue
    }

    /// The server of the webhook, and the tasks that keep its certificates. `identity` is the user of this process.
    fn webhook(&mut self, identity: String) -> anyhow::Result<Server> {
        let Self { settings, client, metrics, readiness, tasks, .. } = self;
        if !identity.starts_with("system:serviceaccount:") {
            tracing::warn!(
                identity,
                "the webhook does not restrict {identity}, the user that Lockstep runs as, nor anybody else with this \
                 identity: run Lockstep with a ServiceAccount of its own, as in `lockstep manifests`"
            );
        }
        let resolver = match settings.certificate_files() {
            Some(files) => certs::files::start(tasks, files, metrics, readiness)?,
            None => certs::task::start(
                tasks,
                client,
                settings.certs(&self.scope),
                self.annotations.observed(),
                metrics,
                readiness,
                &self.restores,
            ),
        };
        let clients = settings.client_ca.as_deref().map(ClientCa::load).transpose()?;
        let verified_only = clients.is_some();
        let tls = Some(Tls { config: server_configs(tasks, resolver, clients)?, metrics: metrics.clone() });
        let access = AccessChecker::new(client.clone(), metrics.clone());
        let rules = settings.rules(&self.scope, identity);
        let webhook = Webhook::new(
            rules,
            self.world.clone(),
            access,
            metrics.clone(),
            readiness.clone(),
            verified_only,
        );
        let router = webhook::http::routes(Arc::new(webhook)).merge(readyz(readiness.clone()));
        Ok(Server { tls, router, readiness: readiness.clone(), limits: ConnectionLimits::default() })
    }

    /// Runs the controller until the process has to stop.
    async fn run_controller(&self, queue: Arc<Queue>) {
        let (claim, election) = self.claim();
        let release = async {
            if let Some(election) = election {
                election.release().await;
            }
        };
        let controller = Controller {
            client: self.client.clone(),
            settings: self.settings.controller(&self.scope),
            world: self.world.clone(),
            queue,
            claim,
            annotations: self.annotations.clone(),
            metrics: self.metrics.clone(),
        };
        controller.run(release, self.stop.clone()).await;
    }

    /// The right to write: by leader election, permanent with `--no-leader-elect`, never with `--no-controller`.
    fn claim(&self) -> (Claim, Option<Election>) {
        if self.settings.no_controller {
            return (Claim::never(), None);
        }
        if self.settings.no_leader_elect {
            self.metrics.leader.set(1);
            return (Claim::permanent(), None);
        }
        let (claim, election) = leader::start(
            self.client.clone(),
            self.settings.leader(&self.scope),
            self.annotations.clone(),
            self.restores.clone(),
            self.metrics.clone(),
            self.readiness.clone(),
        );
        (claim, Some(election))
    }
}

/// Serves the page of `lockstep ui` until the process ends.
pub async fn serve_page(listener: TcpListener, router: Router, max_connections: usize) {
    let limits = ConnectionLimits {
        max_connections,
        max_closing: max_connections / 4,
        header_timeout: Duration::from_secs(30),
        // A stream of changes counts as idle, and lasts as long as somebody looks.
        idle_timeout: Duration::MAX,
        ..ConnectionLimits::default()
    };
    serve_plain(listener, router, Readiness::new([]), limits).await;
}

/// Serves without TLS until the process ends.
async fn serve_plain(listener: TcpListener, router: Router, readiness: Readiness, limits: ConnectionLimits) {
    let (_never, stop) = watch::channel(false);
    Server { tls: None, router, readiness, limits }.serve(listener, stop).await;
}

fn conditions(settings: &config::Run, scope: &Scope) -> Vec<Condition> {
    let mut conditions: Vec<Condition> =
        scope.watches().iter().map(|watch| Condition::Listed(watch.as_str())).collect();
    if !settings.no_webhook {
        conditions.extend([Condition::Certificate, Condition::Bundle, Condition::Serving]);
    }
    conditions
}

async fn bind(address: SocketAddr, flag: &str) -> anyhow::Result<TcpListener> {
    TcpListener::bind(address)
        .await
        .with_context(|| format!("cannot listen on {address}: choose another {flag}"))
}

/// The user of this process. Retries without end, because an outage of the API server must not end the process.
async fn identify(client: &Client) -> String {
    let mut retry = Retry::new(Backoff::new(Duration::from_millis(250), Duration::from_secs(5)));
    let mut log_once = LogOnce::default();
    loop {
        match client::who_am_i(client).await {
            Ok(name) => return name,
            Err(failure) => {
                let text = match failure {
                    Failure::Unauthorized => {
                        format!("{failure}: check the token or certificate of the kubeconfig")
                    }
                    Failure::Forbidden(detail) => {
                        format!(
                            "the API server does not say who this is ({detail}): allow this identity to create selfsubjectreviews"
                        )
                    }
                    other => format!(
                        "the API server cannot be reached ({other}): check its address in the kubeconfig and that it is running"
                    ),
                };
                if log_once.is_new(&text) {
                    tracing::warn!("{text}; retrying");
                }
                tokio::time::sleep(retry.next_delay()).await;
            }
        }
    }
}

/// Becomes true on Ctrl+C at once, and on SIGTERM after `drain`, when the endpoints no longer list this replica.
fn stop_signal(readiness: Readiness, drain: Duration) -> anyhow::Result<watch::Receiver<bool>> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for Ctrl+C")?;
    let (sender, receiver) = watch::channel(false);
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {
                readiness.mark_false(Condition::NotStopping);
                tracing::info!(drain = ?drain, "SIGTERM received: serving until the endpoints no longer list this replica");
                tokio::select! {
                    () = tokio::time::sleep(drain) => {}
                    _ = terminate.recv() => {}
                    _ = interrupt.recv() => {}
                }
            }
            _ = interrupt.recv() => readiness.mark_false(Condition::NotStopping),
        }
        tracing::info!("stopping: finishing requests and writes under way");
        sender.send_replace(true);
        // The sender lives on, because a closed channel would be an error for its receivers.
        sender.closed().await;
    });
    Ok(receiver)
}

async fn stopped(mut stop: watch::Receiver<bool>) {
    // It fails only if the sender is gone, and then nobody can say any more when to stop.
    let _ = stop.wait_for(|stop| *stop).await;
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};
    use lockstep_cluster::testing::api::api_server;

    #[tokio::test]
    async fn without_leader_election_the_claim_is_held_at_once() {
        let cli = Cli::try_parse_from(["lockstep", "run", "--no-leader-elect"]).unwrap();
        let Command::Run(settings) = cli.command else { panic!("not run") };
        let scope = settings.scope();
        let replica = Process {
            world: SharedWorld::new(&scope, 0),
            settings: *settings,
            scope,
            client: api_server(|_| std::future::pending()),
            annotations: LeaseAnnotations::default(),
            restores: Restores::default(),
            metrics: Metrics::new(),
            readiness: Readiness::new([]),
            tasks: JoinSet::new(),
            stop: watch::channel(false).1,
        };
        assert!(replica.claim().0.is_held());
        assert_eq!(replica.metrics.leader.get(), 1);
    }
}
