//! `lockstep run`: starts the parts, and stops them in order.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use anyhow::{Context, anyhow};
use axum::Router;
use kube::Client;
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
    sync::watch,
    task::JoinSet,
};

use crate::{
    certs, config, controller,
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
    object::ObjectKey,
    world::{Scope, SharedWorld, World},
};

pub async fn run(settings: config::Run) -> anyhow::Result<()> {
    log::init(settings.log_format);
    let metrics = Metrics::new();
    let client = client::build(client::config().await?, metrics.count_calls())?;
    let scope = settings.scope();
    let readiness = Readiness::new(conditions(&settings, &scope));

    // First, so that a port in use is reported at once.
    let ops_listener = bind(settings.ops_bind, "--ops-bind").await?;
    let webhook_listener = match settings.no_webhook {
        true => None,
        false => Some(bind(settings.webhook_bind, "--webhook-bind").await?),
    };
    let address = |listener: &TcpListener| listener.local_addr().map(|a| a.to_string()).unwrap_or_default();
    let (ops_address, webhook_address) = (address(&ops_listener), webhook_listener.as_ref().map(address));
    let stop =
        stop_signal(readiness.clone(), if settings.no_webhook { Duration::ZERO } else { settings.drain })?;
    let mut tasks = JoinSet::new();
    let ops = Server {
        tls: None,
        router: routes(metrics.clone(), readiness.clone()),
        readiness: readiness.clone(),
        limits: ops_limits(),
    };
    tasks.spawn(async move {
        // Never stopped: the probes must not fail while requests and writes under way are finished.
        let (_never, stop) = watch::channel(false);
        ops.serve(ops_listener, stop).await;
        "ops server"
    });

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
    let annotations = LeaseAnnotations::default();
    let world = SharedWorld::new(&scope, settings.source_cache);
    let restores = Restores::default();
    let queue: Arc<Queue<ObjectKey>> = Arc::default();
    let requeue: Arc<dyn Fn(Vec<ObjectKey>) + Send + Sync> = {
        let queue = queue.clone();
        Arc::new(move |keys| queue.push_all(keys))
    };
    let informers = Informers {
        scope: scope.clone(),
        world: world.clone(),
        requeue,
        restores: restores.clone(),
        observer: Arc::new(WatchReport {
            world: world.clone(),
            readiness: readiness.clone(),
            metrics: metrics.clone(),
        }),
    };
    informers.start(&mut tasks, &client);

    let webhook = match webhook_listener {
        None => None,
        Some(listener) => {
            if !identity.starts_with("system:serviceaccount:") {
                tracing::warn!(
                    identity,
                    "the webhook does not restrict {identity}, the user that Lockstep runs as, nor anybody else with \
                     this identity: run Lockstep with a ServiceAccount of its own, as in `lockstep manifests`"
                );
            }
            let resolver = match settings.certificate_files() {
                Some(files) => certs::files::start(&mut tasks, files, &metrics, &readiness)?,
                None => certs::task::start(
                    &mut tasks,
                    &client,
                    settings.certs(&scope),
                    annotations.observed(),
                    &metrics,
                    &readiness,
                    &restores,
                ),
            };
            let rules = settings.rules(&scope, identity);
            let access = AccessChecker::new(client.clone(), metrics.clone());
            let clients = settings.client_ca.as_deref().map(ClientCa::load).transpose()?;
            let verified_only = clients.is_some();
            let configs = server_configs(&mut tasks, resolver, clients)?;
            let webhook = Webhook::new(rules, world.clone(), access, metrics.clone(), verified_only);
            Some((
                listener,
                configs,
                webhook::http::routes(Arc::new(webhook)).merge(readyz(readiness.clone())),
            ))
        }
    };

    let work = async {
        tokio::select! {
            biased;
            () = stopped(stop.clone()) => return Ok(()),
            () = readiness.all_listed() => {}
        }
        tracing::info!(
            sources = world.read(World::source_count),
            companions = world.read(World::companion_count),
            "all watches have listed"
        );
        let webhook = async {
            if let Some((listener, config, router)) = webhook {
                // Only now, because a review needs the complete world. Connections made before wait in the backlog.
                readiness.mark_true(Condition::Serving);
                let tls = Some(Tls { config, metrics: metrics.clone() });
                let server =
                    Server { tls, router, readiness: readiness.clone(), limits: ConnectionLimits::default() };
                server.serve(listener, stop.clone()).await;
            }
            Ok(())
        };
        let controller = async {
            if settings.no_controller {
                tokio::select! {
                    () = stopped(stop.clone()) => return Ok(()),
                    never = controller::without_controller(world.clone(), settings.resync) => match never {},
                }
            }
            let (claim, election) =
                claim(&settings, &scope, &client, annotations.clone(), &restores, &metrics, &readiness);
            let release = async {
                if let Some(election) = election {
                    election.release().await;
                }
            };
            let settings = settings.controller(&scope);
            let (world, metrics) = (world.clone(), metrics.clone());
            let controller = Controller { client, settings, world, queue, claim, annotations, metrics };
            controller.run(release, stop.clone()).await
        };
        tokio::try_join!(controller, webhook).map(drop)
    };
    let outcome = tokio::select! {
        outcome = work => outcome,
        ended = tasks.join_next() => Err(ended.and_then(Result::ok).unwrap_or("task")),
    };
    outcome
        .map_err(|task| anyhow!("the {task} ended unexpectedly: see the log above, then restart Lockstep"))?;
    tracing::info!("lockstep stops");
    Ok(())
}

/// The right to write: by leader election, or permanent with `--no-leader-elect`.
fn claim(
    settings: &config::Run,
    scope: &Scope,
    client: &Client,
    annotations: LeaseAnnotations,
    restores: &Restores,
    metrics: &Metrics,
    readiness: &Readiness,
) -> (Claim, Option<Election>) {
    if settings.no_leader_elect {
        metrics.leader.set(1);
        return (Claim::permanent(), None);
    }
    let (claim, election) = leader::start(
        client.clone(),
        settings.leader(scope),
        annotations,
        restores.clone(),
        metrics.clone(),
        readiness.clone(),
    );
    (claim, Some(election))
}

/// Serves the page of `lockstep ui` until the process ends.
pub async fn serve_page(listener: TcpListener, router: Router, max_connections: usize) {
    let server = Server {
        tls: None,
        router,
        readiness: Readiness::new([]),
        limits: ConnectionLimits {
            max_connections,
            max_closing: max_connections / 4,
            header_timeout: Duration::from_secs(30),
            // A stream of changes counts as idle, and lasts as long as somebody looks.
            idle_timeout: Duration::MAX,
            ..ConnectionLimits::default()
        },
    };
    let (_never, stop) = watch::channel(false);
    server.serve(listener, stop).await;
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

/// Probes and scrapes are few and short.
fn ops_limits() -> ConnectionLimits {
    ConnectionLimits {
        max_connections: 64,
        max_closing: 16,
        header_timeout: Duration::from_secs(10),
        ..ConnectionLimits::default()
    }
}

async fn stopped(mut stop: watch::Receiver<bool>) {
    drop(stop.wait_for(|stop| *stop).await);
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
        let (metrics, client) = (Metrics::new(), api_server(|_| std::future::pending()));
        let annotations = LeaseAnnotations::default();
        let (claim, _) = claim(
            &settings,
            &settings.scope(),
            &client,
            annotations,
            &Restores::default(),
            &metrics,
            &Readiness::new([]),
        );
        assert!(claim.is_held());
        assert_eq!(metrics.leader.get(), 1);
    }
}
