//! `lockstep ui`: a page about the controller, on this machine, with the rights of the person who runs it.

use std::net::{Ipv4Addr, SocketAddr};

use anyhow::{Context, anyhow};
use clap::Args;
use tokio::{
    net::TcpListener,
    sync::{RwLock, watch},
};

use super::{
    connection::{Connection, print_caveats},
    output::print,
};
use crate::{
    program::Program,
    ui::{self, feed::Feed, page_access::PageAccess},
};
use lockstep_core::keys;

#[derive(Args)]
#[command(after_help = "\
Examples:
  lockstep ui                       print an address, and serve the page there until Ctrl+C
  lockstep ui --port 8090           on a port of your choice, to forward it with ssh -L 8090:127.0.0.1:8090
  lockstep ui --context staging     of another cluster

The page listens on 127.0.0.1 only. It shows what you may read, and no value of a ConfigMap or Secret. Its address
contains a token: whoever knows the address sees what you see, so do not share it.")]
pub struct UiArgs {
    /// The port on 127.0.0.1; 0 is any that is free
    #[arg(long, default_value_t = 0)]
    pub port: u16,

    /// The namespace to show if you may not read all of them [default: that of the kubeconfig]
    #[arg(short, long, value_parser = keys::namespace)]
    pub namespace: Option<String>,

    #[command(flatten)]
    pub connection: Connection,
}

pub async fn run(settings: &UiArgs, program: Program) -> anyhow::Result<()> {
    // First, so that a port in use is reported at once.
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, settings.port));
    let listener = TcpListener::bind(address)
        .await
        .with_context(|| format!("cannot listen on {address}: choose another --port"))?;
    let port = listener.local_addr().context("the listener has no address")?.port();
    let connected = settings.connection.open().await?;
    let namespace = settings.namespace.clone().unwrap_or_else(|| connected.namespace.clone());
    // Just one namespace, for a person who may not see all: several cannot be followed.
    let snapshot = connected.read(&[namespace.clone()].into()).await?;
    print_caveats(&connected, &snapshot);
    let (access, token) = PageAccess::new(port).ok_or_else(|| anyhow!("the system has no random numbers"))?;
    let page = ui::Page {
        client: connected.client,
        snapshot: RwLock::new(snapshot),
        namespace,
        feed: Feed::default(),
        held_until: watch::Sender::new(None),
        kubectl: settings.connection.kubectl(),
    };
    // Not opened in a browser: other users could read the token in the list of processes.
    print(&format!(
        "http://127.0.0.1:{port}/{token}/\n\nOpen this address in a browser on this machine. Ctrl+C ends it.\n"
    ))?;
    tokio::select! {
        () = page.serve(program, listener, access, connected.instance) => Err(anyhow!("the page ended unexpectedly")),
        signal = tokio::signal::ctrl_c() => signal.context("cannot listen for Ctrl+C"),
    }
}
