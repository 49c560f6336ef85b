//! PURE. The annotations of Reflector (`reflector.v1.k8s.emberstack.com/…`).
//!
//! A source permits copies with `reflection-allowed`, in the namespaces of `reflection-allowed-namespaces` and its
//! selector (none of both: in all), and pushes with `reflection-auto-enabled`, to those of
//! `reflection-auto-namespaces` and its selector that are permitted. A copy names its source with `reflects`; the tool adds
//! `auto-reflects`, `True` for pushed copies.

use super::{
    reason::Reason,
    regex::{Dialect, cover, intersection, patterns},
    tool::{CopyOf, Pull, Push, Role, Tool, Wish},
};
use crate::{
    object::{Kind, Meta, ObjectKey},
    policy::{pattern::Pattern, selector},
};

const TOOL: Tool = Tool::Reflector;

pub fn role(kind: Kind, meta: &Meta) -> Role {
    if let Some(source) = TOOL.get(meta, "reflects") {
        return Role::Copy(CopyOf {
            source: ObjectKey::parse(kind, source),
            pulled: !is_true(meta, "auto-reflects"),
            filled: TOOL.get(meta, "reflected-version").is_some_and(|version| !version.is_empty()),
        });
    }
    if !is_true(meta, "reflection-allowed") {
        return Role::Nothing;
    }
    Role::Source(Wish { push: push(meta), copies_labels: false })
}

fn is_true(meta: &Meta, name: &str) -> bool {
    TOOL.get(meta, name).is_some_and(|text| text.trim().eq_ignore_ascii_case("true"))
}

/// Namespaces that two annotations name together; none if they name no namespaces, which means all.
fn namespaces(meta: &Meta, list: &'static str, by_label: &'static str) -> Result<Option<Push>, Reason> {
    let text = |name| TOOL.get(meta, name).filter(|text| !text.is_empty());
    let (names, labels) = (text(list), text(by_label));
    if names.is_none() && labels.is_none() {
        return Ok(None);
    }
    let regex = |problem| Reason::Regex { annotation: list, problem };
    let patterns = names.map(|names| patterns(Dialect::DotNet, names)).transpose().map_err(regex)?;
    if let Some(labels) = labels {
        selector::parse(labels).map_err(|problem| Reason::Selector { annotation: by_label, problem })?;
    }
    Ok(Some(Push { patterns: patterns.unwrap_or_default(), selector: labels.map(str::to_owned) }))
}

fn allowed(meta: &Meta) -> Result<Option<Push>, Reason> {
    namespaces(meta, "reflection-allowed-namespaces", "reflection-allowed-namespaces-selector")
}

fn push(meta: &Meta) -> Result<Option<Push>, Reason> {
    if !is_true(meta, "reflection-auto-enabled") {
        return Ok(None);
    }
    let auto = namespaces(meta, "reflection-auto-namespaces", "reflection-auto-namespaces-selector")?;
    let push = match (auto, allowed(meta)?) {
        (None, None) => Push { patterns: vec![Pattern::new("*")], selector: None },
        (Some(only), None) | (None, Some(only)) => only,
        (Some(auto), Some(allowed)) => both(auto, allowed).ok_or(Reason::Intersection)?,
    };
    let is_empty = push == Push::default();
    Ok((!is_empty).then_some(push))
}

/// The namespaces that both match, if our annotations can say that exactly.
fn both(auto: Push, allowed: Push) -> Option<Push> {
    if auto.selector == allowed.selector {
        let patterns = intersection(&auto.patterns, &allowed.patterns)?;
        Some(Push { patterns, selector: auto.selector })
    } else if auto.selector.is_none() && cover(&allowed.patterns, &auto.patterns) {
        Some(auto)
    } else if allowed.selector.is_none() && cover(&auto.patterns, &allowed.patterns) {
        Some(allowed)
    } else {
        None
    }
}

pub fn pull(meta: &Meta) -> Pull {
    if !is_true(meta, "reflection-allowed") {
        return Pull::Nobody;
    }
    let selector = TOOL.get(meta, "reflection-allowed-namespaces-selector").filter(|text| !text.is_empty());
    let list = TOOL.get(meta, "reflection-allowed-namespaces").filter(|text| !text.is_empty());
    match (list, selector) {
        (None, None) => Pull::Everybody,
        (list, selector) => Pull::From {
            patterns: patterns(Dialect::DotNet, list.unwrap_or_default()),
            // One that cannot be parsed matches nothing.
            selector: selector.and_then(|text| selector::parse(text).ok()),
        },
    }
}
