//! PURE. The annotations of kubernetes-replicator (`replicator.v1.mittwald.de/…`).
//!
//! A source pushes with `replicate-to` and `replicate-to-matching`; a copy pulls with `replicate-from`, which the source
//! must permit with `replication-allowed` and `replication-allowed-namespaces`. Pushed copies do not name their source.

use super::{
    reason::Reason,
    regex::{Dialect, patterns},
    tool::{CopyOf, Pull, Push, Role, Tool, Wish},
};
use crate::{
    object::{Kind, Meta, ObjectKey},
    policy::{pattern::Pattern, selector},
};

const TOOL: Tool = Tool::Replicator;

pub fn role(kind: Kind, meta: &Meta) -> Role {
    let get = |name: &str| TOOL.get(meta, name);
    let filled = get("replicated-from-version").is_some();
    // It wins over all others on the same object.
    if let Some(source) = get("replicate-from") {
        return Role::Copy(CopyOf { source: ObjectKey::parse(kind, source), pulled: true, filled });
    }
    let is_source = ["replicate-to", "replicate-to-matching", "replication-allowed"];
    if is_source.iter().any(|name| get(name).is_some()) {
        return Role::Source(Wish {
            push: push(meta),
            // Any value strips them: the tool checks only whether the annotation is there.
            copies_labels: get("strip-labels").is_none(),
        });
    }
    match filled || get("replicated-keys").is_some() {
        true => Role::Copy(CopyOf { source: None, pulled: false, filled }),
        false => Role::Nothing,
    }
}

fn push(meta: &Meta) -> Result<Option<Push>, Reason> {
    if TOOL.get(meta, "keep-owner-references") == Some("true") {
        return Err(Reason::KeepsOwners);
    }
    let mut push = Push::default();
    if let Some(list) = TOOL.get(meta, "replicate-to") {
        push.patterns = patterns(Dialect::Go, list)
            .map_err(|problem| Reason::Regex { annotation: "replicate-to", problem })?;
    }
    match TOOL.get(meta, "replicate-to-matching").map(str::trim) {
        None => {}
        // An empty selector matches everything.
        Some("") => push.patterns = vec![Pattern::new("*")],
        Some(text) => {
            selector::parse(text)
                .map_err(|problem| Reason::Selector { annotation: "replicate-to-matching", problem })?;
            push.selector = Some(text.to_owned());
        }
    }
    let is_empty = push == Push::default();
    Ok((!is_empty).then_some(push))
}

/// Version 2.12.4 asks for permission only for Secrets.
pub fn pull(kind: Kind, meta: &Meta, allow_all: bool) -> Pull {
    if allow_all || kind == Kind::ConfigMap {
        return Pull::Everybody;
    }
    // What Go reads as true.
    let is_true = |text: &str| matches!(text, "1" | "t" | "T" | "true" | "TRUE" | "True");
    let allowed = TOOL.get(meta, "replication-allowed").is_some_and(is_true);
    match TOOL.get(meta, "replication-allowed-namespaces") {
        Some(list) if allowed => Pull::From { patterns: patterns(Dialect::Go, list), selector: None },
        _ => Pull::Nobody,
    }
}
