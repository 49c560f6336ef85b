//! `lockstep plan`: what Lockstep would do if manifests were applied, or has left to do for a source.

use std::{collections::BTreeMap, io::Read, path::PathBuf, process::ExitCode};

use anyhow::{Context, bail};
use clap::Args;
use serde_json::Value;

use super::{
    connection::{Connection, print_caveats},
    output::{Format, print, print_value},
    source_name::SourceName,
};
use crate::{
    config,
    inspect::proposal::{Author, KeyDiff, Proposal, ProposedChange, Verb, pending, propose},
    object::Kind,
};

const NOTHING: u8 = 0;
const CHANGES: u8 = 1;
/// Refused by the guard, or an error.
const REFUSED: u8 = 2;

/// The largest file that is read.
const MAX_FILE_BYTES: u64 = 64 << 20;
/// How many companions with the same change are named.
const MAX_NAMED: usize = 10;

#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Reads only, with your own rights. Shows keys, never values. Exit codes: 0 nothing to do, 1 changes, 2 refused or an error.

Examples:
  lockstep plan -f ca-bundle.yaml             before kubectl apply -f ca-bundle.yaml
  kustomize build . | lockstep plan -f -      other objects are ignored
  lockstep plan security/ca-bundle            what is left to do for a source as it is")]
pub struct Plan {
    /// A source as it is: NAMESPACE/NAME, or secret/NAMESPACE/NAME
    #[arg(value_name = "SOURCE", required_unless_present = "file", conflicts_with = "file")]
    pub source: Option<SourceName>,

    /// Manifests in YAML or JSON; `-` is standard input
    #[arg(short, long, value_name = "FILE")]
    pub file: Option<PathBuf>,

    /// The namespace of objects that name none [default: that of the kubeconfig]
    #[arg(short, long, value_parser = config::namespace)]
    pub namespace: Option<String>,

    /// How to print it
    #[arg(short, long, value_enum, default_value_t)]
    pub output: Format,

    #[command(flatten)]
    pub connection: Connection,
}

/// An error must not look like a plan with changes.
pub async fn run(settings: &Plan) -> anyhow::Result<ExitCode> {
    match try_run(settings).await {
        Ok(code) => Ok(ExitCode::from(code)),
        Err(error) => {
            eprintln!("lockstep: {error:#}");
            Ok(ExitCode::from(REFUSED))
        }
    }
}

async fn try_run(settings: &Plan) -> anyhow::Result<u8> {
    // First, so that a wrong file is reported at once.
    let manifests = settings.file.as_ref().map(read_manifests).transpose()?;
    let connected = settings.connection.open().await?;
    let namespace = settings.namespace.as_ref().unwrap_or(&connected.namespace);
    let mut snapshot = connected.snapshot(namespace).await?;
    print_caveats(&connected, &snapshot);
    let mut proposals = Vec::new();
    if let Some(source) = &settings.source {
        let key = source.key(namespace);
        if !snapshot.world.read(|world| world.all_sources().contains(&key)) {
            bail!("{} {key} is no source: check its name, and its label", key.kind.as_str());
        }
        proposals.push(pending(&connected.client, &mut snapshot, &key).await);
    }
    if let Some(Manifests { objects, others }) = manifests {
        let rules = connected.instance.settings().rules(&snapshot.scope);
        let author = Author::new(&connected.client, rules).await?;
        for (kind, manifest) in objects {
            let namespace = manifest["metadata"]["namespace"].as_str().unwrap_or(namespace).to_owned();
            let proposal =
                propose(&connected.client, &mut snapshot, &author, kind, &namespace, manifest).await?;
            proposals.push(proposal);
        }
        if others > 0 {
            eprintln!("note: {others} objects of other kinds are ignored");
        }
    }
    match settings.output {
        Format::Json | Format::Yaml => print_value(settings.output, &proposals)?,
        Format::Table | Format::Wide => print(&proposals.iter().map(describe).collect::<String>())?,
    }
    Ok(if proposals.iter().any(|proposal| proposal.refused.is_some()) {
        REFUSED
    } else if proposals.iter().any(|proposal| !proposal.changes.is_empty() || !proposal.conflicts.is_empty())
    {
        CHANGES
    } else {
        NOTHING
    })
}

struct Manifests {
    objects: Vec<(Kind, Value)>,
    /// How many there are of other kinds.
    others: usize,
}

fn read_manifests(file: &PathBuf) -> anyhow::Result<Manifests> {
    let mut text = String::new();
    let shown = file.display();
    let read = if file.as_os_str() == "-" {
        std::io::stdin().lock().take(MAX_FILE_BYTES + 1).read_to_string(&mut text)
    } else {
        let opened = std::fs::File::open(file).with_context(|| format!("{shown} cannot be opened"))?;
        opened.take(MAX_FILE_BYTES + 1).read_to_string(&mut text)
    };
    read.with_context(|| format!("{shown} cannot be read"))?;
    if text.len() as u64 > MAX_FILE_BYTES {
        bail!("{shown} has more than {} MiB: split it", MAX_FILE_BYTES >> 20);
    }
    parse_manifests(&text).with_context(|| format!("{shown} is neither YAML nor JSON"))
}

fn parse_manifests(text: &str) -> anyhow::Result<Manifests> {
    // The text of the error would quote the file, Secrets included.
    let documents: Vec<Value> =
        serde_saphyr::from_multiple(text).map_err(|error| match error.location() {
            Some(at) => anyhow::anyhow!("it cannot be parsed at line {}", at.line()),
            None => anyhow::anyhow!("it cannot be parsed"),
        })?;
    let mut manifests = Manifests { objects: Vec::new(), others: 0 };
    documents.into_iter().for_each(|document| manifests.add(document));
    Ok(manifests)
}

impl Manifests {
    fn add(&mut self, document: Value) {
        let kind = document["kind"].as_str().unwrap_or_default();
        let in_core = document["apiVersion"] == "v1";
        match kind {
            "ConfigMap" if in_core => self.objects.push((Kind::ConfigMap, document)),
            "Secret" if in_core => self.objects.push((Kind::Secret, document)),
            "List" if in_core => {
                let items = document["items"].as_array().cloned().unwrap_or_default();
                items.into_iter().for_each(|item| self.add(item));
            }
            _ if document.is_null() => {}
            _ => self.others += 1,
        }
    }
}

fn describe(proposal: &Proposal) -> String {
    let Proposal { kind, namespace, name, refused, warnings, changes, conflicts, .. } = proposal;
    let mut lines = vec![format!("{kind} {namespace}/{name}")];
    if !proposal.is_source {
        lines.push("  no source: nothing to do".to_owned());
        return lines.join("\n") + "\n";
    }
    if let Some(denial) = refused {
        lines.push(format!("  refused: {denial}"));
    }
    lines.extend(warnings.iter().map(|warning| format!("  warning: {warning}")));
    // Companions with the same change are shown together.
    let mut groups: BTreeMap<(Verb, &str, Option<&KeyDiff>), Vec<&ProposedChange>> = BTreeMap::new();
    for change in changes {
        groups.entry((change.verb, change.reason, change.keys.as_ref())).or_default().push(change);
    }
    for ((verb, reason, keys), group) in groups {
        let places: Vec<String> = group
            .iter()
            .take(MAX_NAMED)
            .map(|change| format!("{}/{}", change.namespace, change.name))
            .collect();
        let more = match group.len().checked_sub(MAX_NAMED) {
            Some(more @ 1..) => format!(" and {more} more"),
            _ => String::new(),
        };
        lines.push(format!("  {} {} ({reason}): {}{more}", verb.as_str(), group.len(), places.join(", ")));
        if let Some(keys) = keys {
            lines.extend(describe_keys(keys).map(|text| format!("    keys: {text}")));
        }
    }
    for conflict in conflicts {
        lines.push(format!(
            "  conflict {}/{}: held by {}",
            conflict.namespace, conflict.name, conflict.holder
        ));
    }
    if proposal.not_checked > 0 {
        lines.push(format!(
            "  {} of the new ones could not be checked for other objects of that name",
            proposal.not_checked
        ));
    }
    if refused.is_none() && changes.is_empty() && conflicts.is_empty() {
        lines.push("  nothing to do".to_owned());
    }
    lines.join("\n") + "\n"
}

fn describe_keys(diff: &KeyDiff) -> Option<String> {
    let sign =
        |sign: char, names: &[String]| names.iter().map(|name| format!("{sign}{name}")).collect::<Vec<_>>();
    let all = [sign('+', &diff.added), sign('~', &diff.changed), sign('-', &diff.removed)].concat();
    (!all.is_empty()).then(|| all.join(" "))
}
