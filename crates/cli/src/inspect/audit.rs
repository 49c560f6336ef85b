//! PURE. What is not as sources ask for, over everything that a person sees.

use std::collections::HashSet;

use serde::Serialize;

use super::{
    snapshot::Snapshot,
    status::{PlaceState, SourceHealth, SourceStatus, statuses},
};
use lockstep_core::{
    admission::messages,
    keys::Keys,
    object::{Kind, Meta, ObjectKey},
    plan::Trouble,
    world::World,
};

/// The result of an audit.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Audit {
    pub verdict: AuditVerdict,
    pub findings: Vec<Finding>,
    pub sources: usize,
    pub companions: usize,
    /// What this person may not see: nothing can be said about it.
    pub not_seen: Vec<String>,
    #[serde(skip)]
    pub statuses: Vec<SourceStatus>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Finding {
    pub rule: Rule,
    pub kind: Kind,
    /// The object that it is about, as `namespace/name`.
    pub object: String,
    /// The source that it belongs to, as `namespace/name`.
    pub source: String,
    pub message: String,
}

/// What can be wrong. Each has a name, which outputs for tools use.
#[derive(Clone, Copy, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Rule {
    Missing,
    Differs,
    Conflict,
    Unwanted,
    SourceGone,
    Refused,
    /// Marks without our label: no watch shows such an object.
    Stray,
    /// The author asked for something that has no effect.
    Ineffective,
}

/// The verdict of an audit, and the exit code of the command.
#[derive(PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum AuditVerdict {
    InStep = 0,
    Drift = 1,
    /// Nothing wrong was seen, but not everything could be seen.
    CannotTell = 2,
}

/// Their names and descriptions, in the order of the variants.
pub const RULES: [(Rule, &str, &str); 8] = [
    (Rule::Missing, "missing", "A companion that its source wants does not exist"),
    (Rule::Differs, "differs", "A companion differs from what its source asks for"),
    (Rule::Conflict, "conflict", "Another object has the name of a companion"),
    (Rule::Unwanted, "unwanted", "A companion exists that its source does not want"),
    (Rule::SourceGone, "source-gone", "A companion exists and its source does not"),
    (Rule::Refused, "refused", "A source is malformed, so that its companions do not follow it"),
    (Rule::Stray, "stray", "An object has Lockstep's annotations but not its label"),
    (Rule::Ineffective, "ineffective", "A source asks for something that has no effect"),
];

impl Rule {
    pub const fn name(self) -> &'static str {
        RULES[self as usize].1
    }

    /// Whether companions are not as they should be. Otherwise it is only worth knowing.
    pub const fn is_drift(self) -> bool {
        !matches!(self, Self::Ineffective)
    }
}

impl AuditVerdict {
    fn of(findings: &[Finding], not_seen: &[String]) -> Self {
        if findings.iter().any(|finding| finding.rule.is_drift()) {
            Self::Drift
        } else if not_seen.is_empty() {
            Self::InStep
        } else {
            Self::CannotTell
        }
    }
}

/// Looks at every source that exists or has companions. `marked` are objects with our
/// annotations and without our label. `caveat`: why the settings of the instance are not known, if they are not.
pub fn audit(snapshot: &Snapshot, marked: &[(Kind, Meta)], caveat: Option<String>) -> Audit {
    let statuses = statuses(snapshot, None);
    // Skip strays where a source wants a companion: its own finding covers them.
    let places: HashSet<&ObjectKey> =
        statuses.iter().flat_map(|status| &status.companions).map(|one| &one.at).collect();
    let strays = marked.iter().map(|(kind, meta)| (ObjectKey::of(*kind, meta), meta));
    let strays = strays.filter(|(at, _)| !places.contains(at));
    let mut findings: Vec<Finding> = statuses.iter().flat_map(findings_of).collect();
    snapshot.world.read(|world| {
        findings.extend(strays.map(|(at, meta)| stray(&snapshot.scope.keys, world, &at, meta)));
    });
    let mut not_seen = snapshot.view.gaps.clone();
    not_seen.extend(caveat);
    let companions = snapshot.world.read(World::companion_count);
    let verdict = AuditVerdict::of(&findings, &not_seen);
    Audit { verdict, findings, sources: statuses.len(), companions, not_seen, statuses }
}

/// What is wrong with one source and its companions.
fn findings_of(status: &SourceStatus) -> Vec<Finding> {
    let source = &status.key;
    let finding = |rule, object: &ObjectKey, message| Finding {
        rule,
        kind: source.kind,
        object: object.to_string(),
        source: source.to_string(),
        message,
    };
    let mut findings = Vec::new();
    if let SourceHealth::Refused { reason } = &status.state {
        findings.push(finding(Rule::Refused, source, reason.clone()));
    }
    let paused =
        if matches!(status.state, SourceHealth::Paused { .. }) { ", and its source is paused" } else { "" };
    // Nothing is written for a source that is being deleted.
    let checked = status.companions.iter().filter(|_| status.state != SourceHealth::BeingDeleted);
    findings.extend(checked.filter_map(|one| {
        let rule = match &one.state {
            PlaceState::Missing | PlaceState::Adopting => Rule::Missing,
            PlaceState::Differs(_) => Rule::Differs,
            PlaceState::Conflict(_) => Rule::Conflict,
            PlaceState::Unwanted(_) if matches!(status.state, SourceHealth::SourceGone { .. }) => {
                Rule::SourceGone
            }
            PlaceState::Unwanted(_) => Rule::Unwanted,
            PlaceState::NoNamespace | PlaceState::Excluded | PlaceState::NotAccepted => Rule::Ineffective,
            PlaceState::InStep
            | PlaceState::Frozen
            | PlaceState::BeingDeleted
            | PlaceState::NamespaceTerminating
            | PlaceState::NotSeen => return None,
        };
        Some(finding(rule, &one.at, format!("{}{paused}", one.message)))
    }));
    // Those about a place stand above.
    let is_of_source = |trouble: &&Trouble| matches!(trouble, Trouble::Mistake(_) | Trouble::NoMatch { .. });
    let of_source = status.troubles.iter().filter(is_of_source);
    findings.extend(of_source.map(|trouble| finding(Rule::Ineffective, source, trouble.to_string())));
    findings
}

/// An object that names a source in Lockstep's annotations and lacks its label. A companion loses its label while no
/// replica runs; a restored or exported copy may have the annotations, too.
fn stray(keys: &Keys, world: &World, at: &ObjectKey, meta: &Meta) -> Finding {
    let source = meta.annotations.get(&keys.source).and_then(|text| ObjectKey::parse(at.kind, text));
    let of = match &source {
        Some(source) if world.source(source).is_some() => format!("of {source}"),
        Some(source) => format!("of {source}, which is no source now"),
        None => "that name no source".to_owned(),
    };
    let ours = keys.companion_annotations().into_iter().filter(|key| meta.annotations.contains_key(*key));
    let remove: Vec<String> = ours.map(|key| format!("{key}-")).collect();
    let (kind, ObjectKey { namespace, name, .. }) = (messages::kind(at.kind), at);
    Finding {
        rule: Rule::Stray,
        kind: at.kind,
        object: at.to_string(),
        source: source.map(|source| source.to_string()).unwrap_or_default(),
        message: format!(
            "it has Lockstep's annotations {of} and lacks its label {}=true: a companion whose label was removed, or \
             a restored copy. Delete it (kubectl delete {kind} {name} -n {namespace}), or keep it as an object of \
             its own: kubectl annotate {kind} {name} -n {namespace} {}",
            keys.companion,
            remove.join(" "),
        ),
    }
}
