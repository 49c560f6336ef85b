//! `lockstep plan`: what Lockstep would do if manifests were applied, or has left to do for a source.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::Read,
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, anyhow, bail};
use clap::Args;
use serde_json::Value;

use super::{
    connection::{Connection, print_caveats},
    output::{Format, exit_code, note, print, print_value},
    status::no_source,
};
use crate::inspect::{
    proposal::{KeyDiff, Manifest, Proposal, pending, propose},
    source_name::SourceName,
};
use lockstep_core::{keys, object::Kind, plan::outcome::Verb, text::some_of};

const NOTHING: u8 = 0;
const CHANGES: u8 = 1;
/// Refused, not all seen, or an error.
const REFUSED: u8 = 2;

/// The largest file that is read.
const MAX_FILE_BYTES: u64 = 64 << 20;
/// How many companions with the same change are named.
const MAX_NAMED: usize = 10;

#[derive(Args)]
#[command(after_help = "\
Writes nothing. A file is planned with a dry run, which needs the right to write its objects. Shows keys, never values.
Exit codes: 0 nothing to do, 1 changes, 2 refused, cannot tell, or an error.

Examples:
  lockstep plan -f ca-bundle.yaml             before kubectl apply -f ca-bundle.yaml
  kustomize build . | lockstep plan -f -      other objects are ignored
  lockstep plan security/ca-bundle            what is left to do for a source as it is")]
pub struct PlanArgs {
    /// A source as it is: NAMESPACE/NAME, or secret/NAMESPACE/NAME
    #[arg(value_name = "SOURCE", required_unless_present = "file", conflicts_with = "file")]
    pub source: Option<SourceName>,

    /// Manifests in YAML or JSON; `-` is standard input
    #[arg(short, long, value_name = "FILE")]
    pub file: Option<PathBuf>,

    /// The namespace of objects that name none [default: that of the kubeconfig]
    #[arg(short, long, value_parser = keys::namespace)]
    pub namespace: Option<String>,

    /// How to print it
    #[arg(short, long, value_enum, default_value_t)]
    pub output: Format,

    #[command(flatten)]
    pub connection: Connection,
}

/// Exit code 1 means changes, so errors exit with 2.
pub async fn run(settings: &PlanArgs) -> anyhow::Result<ExitCode> {
    exit_code(try_run(settings).await, REFUSED)
}

async fn try_run(settings: &PlanArgs) -> anyhow::Result<u8> {
    // First, so that a wrong file is reported at once.
    let documents = settings.file.as_deref().map(read_documents).transpose()?;
    let connected = settings.connection.open().await?;
    let namespace = settings.namespace.as_ref().unwrap_or(&connected.namespace);
    let source = settings.source.as_ref().map(|source| source.key(namespace));
    let manifests = documents.map(|documents| manifests(documents, namespace)).unwrap_or_default();
    let keys = connected.instance.scope().keys;
    let mut namespaces: BTreeSet<String> = [namespace.clone()].into();
    namespaces.extend(source.iter().map(|key| key.namespace.to_string()));
    namespaces.extend(manifests.iter().flat_map(|manifest| manifest.namespaces(&keys)));
    let mut snapshot = connected.snapshot(namespaces.iter().map(String::as_str)).await?;
    print_caveats(&connected, &snapshot);
    let mut proposals = Vec::new();
    if let Some(key) = &source {
        if !snapshot.sources().contains(key) {
            return Err(no_source(&snapshot, key));
        }
        proposals.push(pending(&connected.client, &mut snapshot, key).await);
    }
    for manifest in manifests {
        proposals.push(propose(&connected.client, &mut snapshot, manifest).await?);
    }
    match settings.output {
        Format::Json | Format::Yaml => print_value(settings.output, &proposals)?,
        Format::Table | Format::Wide => print(&proposals.iter().map(describe).collect::<String>())?,
    }
    let is_refused = |proposal: &Proposal| proposal.refused.is_some() || !proposal.not_seen.is_empty();
    Ok(if proposals.iter().any(is_refused) {
        REFUSED
    } else if proposals.iter().any(|proposal| !proposal.changes.is_empty()) {
        CHANGES
    } else {
        NOTHING
    })
}

/// The objects in a file, those of lists included.
fn read_documents(file: &Path) -> anyhow::Result<Vec<Value>> {
    let (mut text, shown) = (String::new(), file.display());
    let input: Box<dyn Read> = if file.as_os_str() == "-" {
        Box::new(std::io::stdin())
    } else {
        Box::new(std::fs::File::open(file).with_context(|| format!("{shown} cannot be opened"))?)
    };
    let read = input.take(MAX_FILE_BYTES + 1).read_to_string(&mut text);
    read.with_context(|| format!("{shown} cannot be read"))?;
    if text.len() as u64 > MAX_FILE_BYTES {
        bail!("{shown} has more than {} MiB: split it", MAX_FILE_BYTES >> 20);
    }
    // The text of the error would quote the file, Secrets included.
    let documents: Vec<Value> = serde_saphyr::from_multiple(&text).map_err(|error| {
        let line = error.location().map(|at| format!(" at line {}", at.line()));
        anyhow!("{shown} is neither YAML nor JSON: it cannot be parsed{}", line.unwrap_or_default())
    })?;
    Ok(documents.into_iter().flat_map(flatten).collect())
}

fn flatten(mut document: Value) -> Vec<Value> {
    if document["apiVersion"] != "v1" || document["kind"] != "List" {
        return vec![document];
    }
    let items = document["items"].as_array_mut().map(std::mem::take).unwrap_or_default();
    items.into_iter().flat_map(flatten).collect()
}

/// The ConfigMaps and Secrets; those without a namespace are in this one.
fn manifests(documents: Vec<Value>, default: &str) -> Vec<Manifest> {
    let (mut manifests, mut others) = (Vec::new(), 0);
    for object in documents {
        let is_kind = |kind: &Kind| object["apiVersion"] == "v1" && object["kind"] == kind.as_str();
        match Kind::ALL.into_iter().find(is_kind) {
            Some(kind) => {
                let namespace = object["metadata"]["namespace"].as_str().unwrap_or(default).to_owned();
                manifests.push(Manifest { kind, namespace, object });
            }
            None => others += usize::from(!object.is_null()),
        }
    }
    if others > 0 {
        note(&format!("{others} objects of other kinds are ignored"));
    }
    if manifests.is_empty() {
        note("there are no ConfigMaps and Secrets in the input");
    }
    manifests
}

fn describe(proposal: &Proposal) -> String {
    let Proposal { key, refused, warnings, changes, not_seen, .. } = proposal;
    let mut lines = vec![format!("{} {key}", key.kind)];
    lines.extend(refused.iter().map(|denial| format!("  refused: {denial}")));
    lines.extend(warnings.iter().map(|warning| format!("  warning: {warning}")));
    // Companions with the same change are shown together.
    let mut groups: BTreeMap<(Verb, &str, Option<&KeyDiff>), Vec<String>> = BTreeMap::new();
    for change in changes {
        let group = groups.entry((change.verb, &change.reason, change.keys.as_ref())).or_default();
        group.push(change.at.to_string());
    }
    for ((verb, reason, keys), places) in groups {
        let named = some_of(&places, MAX_NAMED, ", ");
        lines.push(format!("  {} {} ({reason}): {named}", verb.as_str(), places.len()));
        if let Some(KeyDiff { added, changed, removed }) = keys.filter(|keys| **keys != KeyDiff::default()) {
            let signed = [("+", added), ("~", changed), ("-", removed)].into_iter();
            let signed =
                signed.flat_map(|(sign, names)| names.iter().map(move |name| format!(" {sign}{name}")));
            lines.push(format!("    keys:{}", signed.collect::<String>()));
        }
    }
    if proposal.not_checked > 0 {
        lines.push(format!(
            "  {} of the new ones could not be checked for other objects of that name",
            proposal.not_checked
        ));
    }
    lines.extend(not_seen.iter().map(|what| format!("  cannot tell: you may not see {what}")));
    if refused.is_none() && changes.is_empty() && not_seen.is_empty() {
        lines.push(
            if proposal.is_source { "  nothing to do" } else { "  no source: nothing to do" }.to_owned(),
        );
    }
    lines.join("\n") + "\n"
}
