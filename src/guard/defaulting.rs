//! PURE. The mutating webhook: adds the defaults that a source lacks, as a JSON patch.

use json_patch::Patch;
use serde_json::json;

use super::{
    request::{Operation, Request},
    review::Rules,
};
use crate::{
    patch,
    policy::{Protect, Targets, selector},
    text::shorten,
    world::World,
};

/// How much of a default a warning quotes: the API server may cut warnings to 256 characters.
const MAX_QUOTED_CHARS: usize = 60;

/// The defaults that are added to a source, and warnings. Present values are never changed, so this is
/// idempotent.
#[must_use]
pub fn add_defaults(rules: &Rules, world: &World, request: &Request) -> (Patch, Vec<String>) {
    let keys = &rules.keys;
    let (Operation::Create { new } | Operation::Update { new, .. }) = &request.operation else {
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
    // An added default stays, so none is added before the namespace's own defaults are known.
    let Some(defaults) = world.namespaces().defaults(&request.namespace) else {
        let warning = format!(
            "namespace {} is not known yet: its defaults are added when this source is next changed",
            request.namespace
        );
        return (Patch(Vec::new()), vec![warning]);
    };
    let mut added = Added { namespace: &request.namespace, values: Vec::new(), warnings: Vec::new() };
    if !targeted {
        let names =
            added.valid(&keys.default_target_namespaces, defaults.target_namespaces.as_ref(), |text| {
                Targets::list(text, &request.namespace).map(drop)
            });
        let selector =
            added.valid(&keys.default_target_selector, defaults.target_selector.as_ref(), |text| {
                selector::parse(text).map(drop).map_err(|error| error.to_string())
            });
        match (names, selector) {
            (None, None) => added.put_targets(&keys.target_namespaces, &rules.default_targets),
            (names, selector) => {
                names.into_iter().for_each(|text| added.put_targets(&keys.target_namespaces, text));
                selector.into_iter().for_each(|text| {
                    added.put(&keys.target_selector, text);
                    added.warn_of_targets(&keys.target_selector, text);
                });
            }
        }
    }
    if !protected {
        let protect = added.valid(&keys.default_protect, defaults.protect.as_ref(), |text| {
            text.parse::<Protect>().map(drop)
        });
        added.put(&keys.protect, protect.map_or(rules.default_protect.as_str(), String::as_str));
    }
    let Added { values, warnings, .. } = added;
    (patch_of(values, !meta.annotations.is_empty()), warnings)
}

struct Added<'a> {
    namespace: &'a str,
    values: Vec<(String, String)>,
    warnings: Vec<String>,
}

impl Added<'_> {
    fn put(&mut self, key: &str, value: &str) {
        self.values.push((key.to_owned(), value.to_owned()));
    }

    fn put_targets(&mut self, key: &str, value: &str) {
        self.put(key, value);
        let home = |item: &str| item.is_empty() || item == "." || item == self.namespace;
        if !value.split(',').map(str::trim).all(home) {
            self.warn_of_targets(key, value);
        }
    }

    /// The author did not write these targets, and must see where the content goes.
    fn warn_of_targets(&mut self, key: &str, value: &str) {
        self.warnings.push(format!(
            "{key} is set to `{}`, a default: this source is mirrored to other namespaces than {}",
            shorten(value, MAX_QUOTED_CHARS),
            self.namespace
        ));
    }

    /// Leaves out an invalid default: the source would be denied for something that its author never wrote.
    fn valid<'a>(
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
                    .push(format!("namespace {}: {key}: {problem}; this default is ignored", self.namespace));
                None
            }
        }
    }
}

/// A JSON patch can add an annotation only to a map that exists.
fn patch_of(values: Vec<(String, String)>, has_annotations: bool) -> Patch {
    if values.is_empty() {
        return Patch(Vec::new());
    }
    let create_map = (!has_annotations).then(|| patch::add(&["metadata", "annotations"], json!({})));
    let values = values
        .into_iter()
        .map(|(key, value)| patch::add(&["metadata", "annotations", key.as_str()], json!(value)));
    Patch(create_map.into_iter().chain(values).collect())
}

#[cfg(test)]
mod tests;
