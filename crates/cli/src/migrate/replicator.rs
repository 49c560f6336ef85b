//! PURE. The annotations of kubernetes-replicator (`replicator.v1.mittwald.de/…`).
//!
//! A source pushes with `replicate-to` and `replicate-to-matching`; a copy pulls with `replicate-from`, which the
//! source must permit with `replication-allowed` and `replication-allowed-namespaces`. Pushed copies do not name their
//! source.

use super::{
    expression::patterns,
    not_movable::NotMovable,
    tool::{NamespaceSelection, Tool, ToolRole},
};
use lockstep_core::object::{Kind, Meta, ObjectKey};

const TOOL: Tool = Tool::Replicator;
const SELECTOR: &str = "replicate-to-matching";
const PERMITTED: &str = "replication-allowed-namespaces";

pub fn role(kind: Kind, meta: &Meta) -> ToolRole {
    let get = |name: &str| TOOL.get(meta, name);
    let has_any = |names: &[&str]| names.iter().any(|name| get(name).is_some());
    // It wins over all others on the same object.
    if let Some(source) = get("replicate-from") {
        ToolRole::Copy { source: ObjectKey::parse(kind, source), pulled: true }
    } else if has_any(&["replicate-to", SELECTOR, "replication-allowed"]) {
        // Any value strips the labels: the tool checks only whether the annotation is there.
        ToolRole::Source { push: push(meta), copies_labels: get("strip-labels").is_none() }
    } else if has_any(&["replicated-from-version", "replicated-keys"]) {
        ToolRole::Copy { source: None, pulled: false }
    } else {
        ToolRole::Nothing
    }
}

fn push(meta: &Meta) -> Result<NamespaceSelection, NotMovable> {
    if TOOL.get(meta, "keep-owner-references") == Some("true") {
        return Err(NotMovable::KeepsOwners);
    }
    // An empty selector matches everything.
    if TOOL.get(meta, SELECTOR).is_some_and(|text| text.trim().is_empty()) {
        return Ok(NamespaceSelection::all());
    }
    Ok(NamespaceSelection::read(TOOL, meta, "replicate-to", SELECTOR)?.unwrap_or_default())
}

/// Version 2.12.4 asks for permission only for Secrets.
pub fn permitted(kind: Kind, meta: &Meta, allow_all: bool) -> Result<NamespaceSelection, NotMovable> {
    if allow_all || kind == Kind::ConfigMap {
        return Ok(NamespaceSelection::all());
    }
    // What Go reads as true.
    let is_true = |text: &str| matches!(text, "1" | "t" | "T" | "true" | "TRUE" | "True");
    let is_allowed = TOOL.get(meta, "replication-allowed").is_some_and(is_true);
    let list = TOOL.get(meta, PERMITTED).filter(|_| is_allowed);
    Ok(NamespaceSelection { patterns: patterns(PERMITTED, list.unwrap_or_default())?, selector: None })
}
