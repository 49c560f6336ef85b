//! The flags of commands that read the cluster as the person who runs them.

use std::{collections::BTreeSet, path::PathBuf};

use anyhow::{Context, anyhow};
use clap::Args;
use k8s_openapi::jiff::Timestamp;
use kube::{Client, Config};

use super::output::note;
use crate::inspect::{instance::Instance, snapshot::Snapshot};
use lockstep_cluster::client;
use lockstep_core::{failure::Failure, keys};

/// How many namespaces are read one by one for a person who may not list objects in all of them.
const MAX_NAMESPACES: usize = 50;

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Cluster")]
pub struct Connection {
    /// The kubeconfig file [default: KUBECONFIG, else ~/.kube/config]
    #[arg(long, value_name = "FILE")]
    pub kubeconfig: Option<PathBuf>,

    /// The context of the kubeconfig [default: its current one]
    #[arg(long)]
    pub context: Option<String>,

    /// Prefix of all labels and annotations of the Lockstep to ask about
    #[arg(long, env = "LOCKSTEP_DOMAIN", default_value = keys::DOMAIN, value_parser = keys::domain)]
    pub domain: String,

    /// The namespace that Lockstep itself runs in
    #[arg(long, env = "LOCKSTEP_NAMESPACE", value_name = "NAME", default_value = keys::NAMESPACE, value_parser = keys::namespace)]
    pub lockstep_namespace: String,
}

/// A cluster, and the Lockstep in it.
pub struct Connected {
    pub client: Client,
    pub instance: Instance,
    /// The namespace of the kubeconfig's context.
    pub namespace: String,
}

impl Connection {
    pub async fn config(&self) -> Result<Config, client::Error> {
        match (&self.kubeconfig, &self.context) {
            (None, None) => client::config().await,
            (file, context) => client::config_of(file.as_deref(), context.as_deref()).await,
        }
    }

    /// How a person asks the same cluster with kubectl.
    pub fn kubectl(&self) -> String {
        let is_plain = |text: &str| text.chars().all(|c| c.is_ascii_alphanumeric() || "-_./:@".contains(c));
        let quote = |text: &str| {
            if is_plain(text) { text.to_owned() } else { format!("'{}'", text.replace('\'', r"'\''")) }
        };
        let mut command = "kubectl".to_owned();
        if let Some(file) = &self.kubeconfig {
            command.push_str(&format!(" --kubeconfig {}", quote(&file.to_string_lossy())));
        }
        if let Some(context) = &self.context {
            command.push_str(&format!(" --context {}", quote(context)));
        }
        command
    }

    pub async fn open(&self) -> anyhow::Result<Connected> {
        let config = self.config().await?;
        let (namespace, server) = (config.default_namespace.clone(), config.cluster_url.to_string());
        let client = client::build(config, |_, _| {})?;
        let instance =
            Instance::read(&client, &self.domain, &self.lockstep_namespace, Timestamp::now()).await;
        match &instance.lease {
            Err(Failure::Unavailable(why)) => {
                Err(anyhow!("the API server at {server} cannot be reached: {why}"))
            }
            Err(Failure::Unauthorized) => Err(anyhow!(
                "the API server at {server} does not accept your credentials: check the token or certificate of the \
                 kubeconfig"
            )),
            _ => Ok(()),
        }?;
        Ok(Connected { client, instance, namespace })
    }
}

impl Connected {
    /// Reads sources, companions and namespaces: all, or what can be seen in these namespaces, and in those that the
    /// sources there list by name.
    pub async fn snapshot<'a>(
        &self,
        namespaces: impl IntoIterator<Item = &'a str>,
    ) -> anyhow::Result<Snapshot> {
        let mut namespaces: BTreeSet<String> = namespaces.into_iter().map(str::to_owned).collect();
        let snapshot = self.read(&namespaces).await?;
        let more = snapshot.unseen_targets().into_iter().filter(|name| !namespaces.contains(name));
        let more: Vec<String> = more.take(MAX_NAMESPACES).collect();
        if more.is_empty() {
            return Ok(snapshot);
        }
        namespaces.extend(more);
        self.read(&namespaces).await
    }

    /// Reads everything, or what can be seen in just these namespaces.
    pub async fn read(&self, namespaces: &BTreeSet<String>) -> anyhow::Result<Snapshot> {
        let snapshot = Snapshot::read(&self.client, self.instance.scope(), namespaces).await;
        snapshot.context("the cluster cannot be read")
    }

    /// What may make the answer incomplete or wrong.
    pub fn caveats(&self, snapshot: &Snapshot) -> Vec<String> {
        self.instance.caveat().into_iter().chain(snapshot.view.caveats()).collect()
    }
}

/// Says on standard error what may make the answer incomplete.
pub fn print_caveats(connected: &Connected, snapshot: &Snapshot) {
    connected.caveats(snapshot).iter().for_each(|caveat| note(caveat));
}
