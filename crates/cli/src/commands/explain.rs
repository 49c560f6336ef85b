//! `lockstep explain`: why a namespace has or lacks the companion of a source.

use clap::Args;
use k8s_openapi::jiff::Timestamp;

use super::{
    connection::{Connection, print_caveats},
    output::{Format, print, print_value},
};
use crate::inspect::{
    explain::{explain, unlisted},
    source_name::SourceName,
};
use lockstep_core::keys;

#[derive(Args)]
#[command(after_help = "\
Examples:
  lockstep explain -n team-b security/ca-bundle          why team-b has, or lacks, its copy
  lockstep explain -n team-b secret/security/pull        the same for a Secret")]
pub struct ExplainArgs {
    /// The source: NAMESPACE/NAME, or secret/NAMESPACE/NAME
    #[arg(value_name = "SOURCE")]
    pub source: SourceName,

    /// The namespace that has or lacks a companion [default: that of the kubeconfig]
    #[arg(short, long, value_parser = keys::namespace)]
    pub namespace: Option<String>,

    /// How to print it
    #[arg(short, long, value_enum, default_value_t)]
    pub output: Format,

    #[command(flatten)]
    pub connection: Connection,
}

pub async fn run(settings: &ExplainArgs) -> anyhow::Result<()> {
    let connected = settings.connection.open().await?;
    let namespace = settings.namespace.as_ref().unwrap_or(&connected.namespace);
    let key = settings.source.key(&connected.namespace);
    let mut snapshot = connected.snapshot([namespace.as_str(), &key.namespace]).await?;
    let unlisted = unlisted(&snapshot, &key, namespace);
    snapshot.look_up(&connected.client, vec![unlisted]).await;
    let explanation = explain(&snapshot, &key, namespace, Timestamp::now());
    if matches!(settings.output, Format::Json | Format::Yaml) {
        return print_value(settings.output, &explanation);
    }
    print_caveats(&connected, &snapshot);
    let mut text: String =
        explanation.steps.iter().map(|step| format!("{} {}\n", step.met.symbol(), step.text)).collect();
    if let Some((first, more)) = explanation.commands.split_first() {
        text.push_str(&format!("\nTo change that:\n  {first}\n"));
        more.iter().for_each(|command| text.push_str(&format!("  {command}\n")));
    }
    print(&text)
}
