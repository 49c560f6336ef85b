//! `lockstep run`: puts the parts together and takes them down in order.

use std::time::Duration;

use anyhow::{Context, anyhow};
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
    sync::watch,
};

use crate::{
    client::{self, Failure},
    config, mirror,
    ops::{
        health::{Pulse, routes},
        log,
        metrics::Metrics,
    },
};

pub async fn run(settings: config::Run) -> anyhow::Result<()> {
    log::init(settings.log_format);
    let metrics = Metrics::new();
    let client = client::build(client::config().await?, &metrics)?;
    let mirror = settings.mirror();
    let pulse = Pulse::new(mirror.streams());

    let listener = TcpListener::bind(settings.ops_bind)
        .await
        .with_context(|| format!("cannot listen on {}: choose another --ops-bind", settings.ops_bind))?;
    let ops_address = listener.local_addr().unwrap_or(settings.ops_bind);
    let stop = stop_signal()?;
    // Served to the very end: a probe must not fail while what is under way is finished.
    let ops = tokio::spawn(axum::serve(listener, routes(metrics.clone(), pulse.clone())).into_future());

    tokio::select! {
        biased;
        () = stopped(stop.clone()) => return Ok(()),
        name = introduce(&client) => tracing::info!(
            version = env!("CARGO_PKG_VERSION"),
            identity = name,
            domain = settings.domain,
            namespace = mirror.limits.own_namespace,
            kinds = mirror.kinds.iter().map(|kind| kind.plural()).collect::<Vec<_>>().join(","),
            ops = %ops_address,
            "lockstep starts"
        ),
    }
    let outcome = tokio::select! {
        outcome = mirror::run(client, mirror, metrics, pulse, stop) => outcome,
        _ = ops => Err("ops server"),
    };
    outcome
        .map_err(|task| anyhow!("the {task} ended unexpectedly: see the log above, then restart Lockstep"))?;
    tracing::info!("lockstep stops");
    Ok(())
}

/// Asks who we are, for as long as it takes: an API server that is away for a while is no reason to give up.
async fn introduce(client: &kube::Client) -> String {
    let mut wait = Duration::from_millis(250);
    let mut complaint = String::new();
    loop {
        match client::who_am_i(client).await {
            Ok(name) => return name,
            Err(failure) => {
                let text = match failure {
                    Failure::Forbidden(detail) => {
                        format!(
                            "the API server does not know us ({detail}): check the token or certificate of the kubeconfig"
                        )
                    }
                    other => format!(
                        "the API server cannot be reached ({other}): check the address in the kubeconfig and that it is up"
                    ),
                };
                if text != complaint {
                    tracing::warn!("{text}; retrying");
                    complaint = text;
                }
                tokio::time::sleep(wait).await;
                wait = (wait * 2).min(Duration::from_secs(5));
            }
        }
    }
}

/// Turns true on Ctrl+C or SIGTERM.
fn stop_signal() -> anyhow::Result<watch::Receiver<bool>> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot listen for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot listen for Ctrl+C")?;
    let (sender, receiver) = watch::channel(false);
    tokio::spawn(async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        tracing::info!("stopping: what is under way is finished first");
        sender.send_replace(true);
        // The channel stays open: a closed one would read as an error, not as a stop.
        sender.closed().await;
    });
    Ok(receiver)
}

async fn stopped(mut stop: watch::Receiver<bool>) {
    drop(stop.wait_for(|stop| *stop).await);
}
