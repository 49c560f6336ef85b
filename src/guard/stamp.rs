//! PURE. The defaults that a source lacks, as a JSON patch.

use json_patch::Patch;
use serde_json::json;

use super::review::{Change, Request, Rules};
use crate::{
    patch,
    policy::{Protect, Targets, selector},
    world::state::World,
};

/// What is added to a source. Present values are never touched, so that stamping twice is stamping once.
#[must_use]
pub fn stamp(rules: &Rules, world: &World, request: &Request) -> (Patch, Vec<String>) {
    let keys = &rules.keys;
    let (Change::Create { new } | Change::Update { new, .. }) = &request.change else {
        return (Patch(Vec::new()), Vec::new());
    };
    let meta = &new.metadata;
    if !keys.is_source(&meta.labels) || keys.has_marks(meta) || meta.is_terminating() {
        return (Patch(Vec::new()), Vec::new());
    }
    let targeted = [&keys.target_namespaces, &keys.target_selector]
        .iter()
        .any(|key| meta.annotations.contains_key(*key));
    let protected = meta.annotations.contains_key(&keys.protect);
    if targeted && protected {
        return (Patch(Vec::new()), Vec::new());
    }
    // What is stamped stays: rather nothing than what the namespace did not want.
    let Some(wanted) = world.defaults(&request.namespace) else {
        let warning = format!(
            "namespace {} is not known yet: its defaults are added when this source is next changed",
            request.namespace
        );
        return (Patch(Vec::new()), vec![warning]);
    };
    let mut stamps = Stamps { namespace: &request.namespace, values: Vec::new(), warnings: Vec::new() };
    if !targeted {
        let names =
            stamps.checked(&keys.default_target_namespaces, wanted.target_namespaces.as_ref(), |text| {
                Targets::default().add(text)
            });
        let selector =
            stamps.checked(&keys.default_target_selector, wanted.target_selector.as_ref(), |text| {
                selector::parse(text).map(drop).map_err(|error| error.to_string())
            });
        match (names, selector) {
            (None, None) => stamps.put(&keys.target_namespaces, &rules.default_targets),
            (names, selector) => {
                names.into_iter().for_each(|text| stamps.put(&keys.target_namespaces, text));
                selector.into_iter().for_each(|text| stamps.put(&keys.target_selector, text));
            }
        }
    }
    if !protected {
        let protect = stamps.checked(&keys.default_protect, wanted.protect.as_ref(), |text| {
            text.parse::<Protect>().map(drop)
        });
        stamps.put(&keys.protect, protect.map_or(rules.default_protect.as_str(), String::as_str));
    }
    let Stamps { values, warnings, .. } = stamps;
    (operations(values, !meta.annotations.is_empty()), warnings)
}

struct Stamps<'a> {
    namespace: &'a str,
    values: Vec<(String, String)>,
    warnings: Vec<String>,
}

impl Stamps<'_> {
    fn put(&mut self, key: &str, value: &str) {
        self.values.push((key.to_owned(), value.to_owned()));
    }

    /// A default that cannot be used is not stamped: the source would be refused for what its author never wrote.
    fn checked<'a>(
        &mut self,
        key: &str,
        text: Option<&'a String>,
        check: impl Fn(&str) -> Result<(), String>,
    ) -> Option<&'a String> {
        let text = text?;
        match check(text) {
            Ok(()) => Some(text),
            Err(problem) => {
                self.warnings
                    .push(format!("namespace {}: {key}: {problem}; it was passed over", self.namespace));
                None
            }
        }
    }
}

/// An object without annotations has no place to add them to.
fn operations(values: Vec<(String, String)>, has_annotations: bool) -> Patch {
    if values.is_empty() {
        return Patch(Vec::new());
    }
    let place = (!has_annotations).then(|| patch::add(&["metadata", "annotations"], json!({})));
    let values = values
        .into_iter()
        .map(|(key, value)| patch::add(&["metadata", "annotations", key.as_str()], json!(value)));
    Patch(place.into_iter().chain(values).collect())
}

#[cfg(test)]
mod tests;
