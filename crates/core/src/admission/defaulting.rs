//! The mutating webhook: writes the defaults that apply to a source into one annotation, as a JSON patch.

use json_patch::Patch;
use serde_json::json;

use super::{admission_request::Request, review::Rules};
use crate::{
    keys::Keys,
    object::{Object, patch},
    policy::{MAX_QUOTED_CHARS, Protect, Targets, defaults::Defaults, list::BadList, selector},
    text::shorten,
    world::World,
};

/// Rewrites every object unchanged. Its rights are not those that a changed default may need, and a migration that is
/// refused never ends, so it does not bring changed defaults.
const STORAGE_MIGRATOR: &str = "system:serviceaccount:kube-system:storage-version-migrator-controller";

/// The patch that makes the annotation `defaults` of a source right, and warnings. The annotation is computed from what
/// people wrote and from the defaults of now, never from its former value, so that the same manifest always gives the
/// same companions. The patch is empty if the annotation is right already.
pub fn stamp_defaults(rules: &Rules, world: &World, request: &Request) -> (Patch, Vec<String>) {
    let keys = &*rules.keys;
    let home = &*request.namespace;
    let (old, Some(new)) = request.objects() else { return Default::default() };
    let meta = &new.metadata;
    let is_migration = || request.user.name == STORAGE_MIGRATOR && request.changes_nothing();
    if !keys.is_source(&meta.labels) || keys.has_marks(meta) || meta.is_terminating() || is_migration() {
        return Default::default();
    }
    let targeted = keys.sets_targets(meta);
    let protected = meta.annotations.contains_key(&keys.protect);
    let mut warnings = Vec::new();
    let mut defaults = Defaults::default();
    if !targeted || !protected {
        let Some(of_namespace) = world.namespaces().defaults(home) else {
            let warning = format!(
                "namespace {home} is not known yet: its defaults apply when this source is next changed"
            );
            return (Patch::default(), vec![warning]);
        };
        let mut valid = ValidDefaults { rules, home, of_namespace, warnings };
        if !targeted {
            (defaults.target_namespaces, defaults.target_selector) = valid.targets();
        }
        if !protected {
            defaults.protect = valid.protect();
        }
        warnings = valid.warnings;
    }
    if defaults.targets() != stamped_before(keys, old).targets() {
        warnings.extend(warnings_of_targets(keys, home, &defaults));
    }
    (patch_of(keys, new, defaults.to_annotation()), warnings)
}

/// What is stamped on a source before an update; nothing on an object that was no source.
fn stamped_before(keys: &Keys, old: Option<&Object>) -> Defaults {
    let old = old.map(|old| &old.metadata).filter(|old| keys.is_source(&old.labels));
    old.map(|old| Defaults::stamped(keys, old)).unwrap_or_default()
}

/// The author did not write these targets, and must see where the content goes.
fn warnings_of_targets(keys: &Keys, home: &str, defaults: &Defaults) -> Vec<String> {
    let (names, selector) = defaults.targets();
    let beyond = |text: &&str| !Targets::list(text, home).is_ok_and(|targets| targets.only_own());
    let shown = [(&keys.target_namespaces, names.filter(beyond)), (&keys.target_selector, selector)];
    let warning = |(key, text): (&String, Option<&str>)| {
        text.map(|text| {
            format!(
                "{key} is `{}`, a default: this source is mirrored to other namespaces than {home}",
                shorten(text, MAX_QUOTED_CHARS)
            )
        })
    };
    shown.into_iter().filter_map(warning).collect()
}

/// The defaults of a namespace, else of the flags. Leaves out an invalid one, with a warning: the source would be
/// denied for something that its author never wrote. Leaves out what is built in, too: most sources then need no
/// annotation.
struct ValidDefaults<'a> {
    rules: &'a Rules,
    home: &'a str,
    of_namespace: &'a Defaults,
    warnings: Vec<String>,
}

impl ValidDefaults<'_> {
    /// `target-namespaces` and `target-selector`.
    fn targets(&mut self) -> (Option<String>, Option<String>) {
        let (names, selector) = self.of_namespace.targets();
        let parse = |text: &str| selector::parse(text).map_err(|error| error.to_string());
        let key = &self.rules.keys.default_target_selector;
        let selector = self.valid(key, selector, parse).map(|(text, _)| text);
        let home = self.home;
        let parse = |text: &str| match Targets::list(text, home)? {
            targets if targets.is_empty() && selector.is_none() => Err(BadList::OnlyExclusions.to_string()),
            targets => Ok(targets),
        };
        let mut names = self.valid(&self.rules.keys.default_target_namespaces, names, parse);
        if names.is_none() && selector.is_none() {
            names = self.valid("--default-targets", Some(&self.rules.default_targets), parse);
        }
        let built_in = Targets { own: true, ..Targets::default() };
        let names = names.filter(|(_, targets)| selector.is_some() || *targets != built_in);
        (names.map(|(text, _)| text), selector)
    }

    fn protect(&mut self) -> Option<String> {
        let key = &self.rules.keys.default_protect;
        let text = self.of_namespace.protect.as_deref();
        let valid = self.valid(key, text, str::parse::<Protect>);
        let protect = valid.map_or(self.rules.default_protect, |(_, protect)| protect);
        (protect != Protect::default()).then(|| protect.as_str().to_owned())
    }

    fn valid<T>(
        &mut self,
        key: &str,
        text: Option<&str>,
        parse: impl Fn(&str) -> Result<T, String>,
    ) -> Option<(String, T)> {
        let text = text?;
        match parse(text) {
            Ok(parsed) => Some((text.to_owned(), parsed)),
            Err(problem) => {
                self.warnings
                    .push(format!("namespace {}: {key}: {problem}; this default is ignored", self.home));
                None
            }
        }
    }
}

/// Makes an object have this annotation `defaults`, or none. A JSON patch can add an annotation only to a map that
/// exists, and one that cannot be applied fails the request.
fn patch_of(keys: &Keys, object: &Object, wanted: Option<String>) -> Patch {
    let annotations = &object.metadata.annotations;
    let path = ["metadata", "annotations", &keys.defaults];
    if annotations.get(&keys.defaults) == wanted.as_ref() {
        return Patch::default();
    }
    let Some(wanted) = wanted else { return Patch(vec![patch::remove(&path)]) };
    let create_map = annotations.is_empty().then(|| patch::add(&path[..2], json!({})));
    Patch(create_map.into_iter().chain([patch::add(&path, json!(wanted))]).collect())
}

#[cfg(test)]
mod tests;
