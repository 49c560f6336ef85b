//! PURE. The annotations of Reflector (`reflector.v1.k8s.emberstack.com/…`).
//!
//! A source permits copies with `reflection-allowed`, in the namespaces of `reflection-allowed-namespaces` and its
//! selector (none of both: in all), and pushes with `reflection-auto-enabled`, to those of `reflection-auto-namespaces`
//! and its selector that are permitted. A copy names its source with `reflects`; the tool adds `auto-reflects`, `True`
//! for pushed copies.

use super::{
    not_movable::NotMovable,
    tool::{NamespaceSelection, Tool, ToolRole},
};
use lockstep_core::object::{Kind, Meta, ObjectKey};

const TOOL: Tool = Tool::Reflector;

pub fn role(kind: Kind, meta: &Meta) -> ToolRole {
    if let Some(source) = TOOL.get(meta, "reflects") {
        ToolRole::Copy { source: ObjectKey::parse(kind, source), pulled: !is_true(meta, "auto-reflects") }
    } else if is_true(meta, "reflection-allowed") {
        ToolRole::Source { push: push(meta), copies_labels: false }
    } else {
        ToolRole::Nothing
    }
}

fn is_true(meta: &Meta, name: &str) -> bool {
    TOOL.get(meta, name).is_some_and(|text| text.trim().eq_ignore_ascii_case("true"))
}

fn push(meta: &Meta) -> Result<NamespaceSelection, NotMovable> {
    if !is_true(meta, "reflection-auto-enabled") {
        return Ok(NamespaceSelection::default());
    }
    let selector = "reflection-auto-namespaces-selector";
    let auto = NamespaceSelection::read(TOOL, meta, "reflection-auto-namespaces", selector)?;
    let auto = auto.unwrap_or_else(NamespaceSelection::all);
    let permitted = permitted(meta)?;
    if permitted.covers(&auto) {
        Ok(auto)
    } else if auto.covers(&permitted) {
        Ok(permitted)
    } else {
        Err(NotMovable::TwoLists)
    }
}

pub fn permitted(meta: &Meta) -> Result<NamespaceSelection, NotMovable> {
    if !is_true(meta, "reflection-allowed") {
        return Ok(NamespaceSelection::default());
    }
    let selector = "reflection-allowed-namespaces-selector";
    let listed = NamespaceSelection::read(TOOL, meta, "reflection-allowed-namespaces", selector)?;
    Ok(listed.unwrap_or_else(NamespaceSelection::all))
}
