//! Every reason to deny a request, and its message to the user.

use super::messages;
use crate::{
    keys::Keys,
    object::{ObjectKey, names},
    policy::Fault,
};

/// Why a request is denied. `at` is the object of the request, `of` the source whose companion it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Denial {
    /// A companion would be changed.
    Edit { at: ObjectKey, of: ObjectKey },
    /// A companion would lose its label.
    Strip { at: ObjectKey, of: ObjectKey },
    /// A companion would be deleted whose source sets `protect: all`, or `edits` if no webhook keeps its name free.
    Delete { at: ObjectKey, of: ObjectKey },
    /// Somebody other than Lockstep would set a companion's label or annotations.
    Forged { at: ObjectKey },
    /// A new object would take the name of a companion that a source wants.
    NameNeeded { at: ObjectKey, of: ObjectKey },
    /// A source is malformed or cannot be mirrored.
    Fault { at: ObjectKey, fault: Fault },
    /// A source of another namespace already has a companion of that name.
    Taken { at: ObjectKey, of: ObjectKey },
    /// The user may not do to the companion `name` themselves what the controller would do for them.
    NoRight { user: String, verb: &'static str, name: String, source: ObjectKey, denied: Box<DeniedPlace> },
    /// A deputy writes a source that reaches namespaces which have not agreed.
    Deputy { user: String, source: ObjectKey, denied: Box<DeniedPlace> },
    /// The user's access could not be checked.
    Unanswered(String),
}

/// Where a source is not allowed to have companions.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeniedPlace {
    pub place: DenialPlace,
    /// The source names no targets, so those of a default apply or applied.
    pub by_default: bool,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DenialPlace {
    /// In a namespace, which can agree with this command.
    Namespace { name: String, accept: String },
    /// In all namespaces, because of a pattern or a selector.
    Everywhere(AskConsent),
}

/// Whether a source without the rights for patterns can ask the namespaces for consent instead.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AskConsent {
    /// The source exists: it can be annotated.
    Annotate,
    /// The source is new: the annotation belongs into its manifest.
    InManifest,
    /// It has such companions already, and they would be deleted.
    TooLate,
}

impl Denial {
    /// The `reason` label in metrics, logs and the audit annotation.
    pub const fn label(&self) -> &'static str {
        match self {
            Self::Edit { .. } => "edit",
            Self::Strip { .. } => "strip",
            Self::Delete { .. } => "delete",
            Self::Forged { .. } => "forged",
            Self::NameNeeded { .. } => "squatting",
            Self::Fault { fault, .. } => fault.label(),
            Self::Taken { .. } => "taken",
            Self::NoRight { .. } => "no_right",
            Self::Deputy { .. } => "deputy",
            Self::Unanswered(_) => "unanswered",
        }
    }

    /// What is denied and why, and the command that does what the user probably wants.
    pub fn message(&self, keys: &Keys) -> String {
        let render =
            |template: &str, at: &ObjectKey, of: &ObjectKey| messages::render(template, keys, at, Some(of));
        match self {
            Self::Edit { at, of } => render(messages::EDIT, at, of),
            Self::Strip { at, of } => render(messages::STRIP, at, of),
            Self::Delete { at, of } => {
                let kept_free = keys.is_kept_free(&at.name);
                let allow = if kept_free { messages::OR_ALLOW_DELETES } else { messages::OR_RENAME };
                render(messages::DELETE, at, of) + &render(allow, at, of)
            }
            Self::Forged { at } => messages::render(messages::FORGED, keys, at, None),
            Self::NameNeeded { at, of } => render(messages::NAME_NEEDED, at, of),
            Self::Fault { at, fault } => {
                format!("{} {at} cannot be a source: {fault}", messages::kind(at.kind))
            }
            Self::Taken { at, of } => format!(
                "{at} is already the companion of {of}: choose another name with the annotation {}",
                keys.companion_name
            ),
            Self::NoRight { user, verb, name, source, denied } => {
                let forbidden = format!("{user} may not {verb} {} {name}", source.kind.plural());
                let text = match &denied.place {
                    DenialPlace::Namespace { name, .. } if **name == *source.namespace => format!(
                        "{forbidden} in namespace {name}, so Lockstep does not keep it there on their behalf. \
                         Ask for that right, or choose another {}",
                        keys.companion_name
                    ),
                    DenialPlace::Namespace { name, accept } => format!(
                        "{forbidden} in namespace {name}, so Lockstep does not do it on their behalf. \
                         Ask for that right, or for this: {accept}"
                    ),
                    DenialPlace::Everywhere(ask) => format!(
                        "{forbidden} in all namespaces, which a pattern or a selector needs. \
                         Ask for that right, or list the namespaces in {}{}",
                        keys.target_namespaces,
                        ask.hint(keys, source)
                    ),
                };
                denied.by_default(keys) + &text
            }
            Self::Deputy { user, source, denied } => {
                let deputy = format!("{user} writes on behalf of others, so its own rights do not count");
                let text = match &denied.place {
                    DenialPlace::Namespace { name, accept } => {
                        format!("{deputy}. Namespace {name} has to agree: {accept}")
                    }
                    DenialPlace::Everywhere(ask) => format!(
                        "{deputy}, and a pattern or a selector reaches namespaces that have not agreed. \
                         List the namespaces in {}{}",
                        keys.target_namespaces,
                        ask.hint(keys, source)
                    ),
                };
                denied.by_default(keys) + &text
            }
            Self::Unanswered(why) => {
                format!("your rights could not be checked ({why}), so nothing was changed: try again")
            }
        }
    }
}

impl DeniedPlace {
    /// The author wrote no targets, and would look for them in vain.
    fn by_default(&self, keys: &Keys) -> String {
        if !self.by_default {
            return String::new();
        }
        format!(
            "the source names no targets, so those of a default apply (to choose others, set {} on it): ",
            keys.target_namespaces
        )
    }
}

impl AskConsent {
    fn hint(self, keys: &Keys, source: &ObjectKey) -> String {
        let ObjectKey { kind, namespace, name } = source;
        // Anybody who reaches the port may have written it, and the log repeats the command.
        let name = if names::is_subdomain(name) { name } else { "NAME" };
        let annotation = format!("{}=required", keys.consent);
        let how = match self {
            Self::Annotate => {
                format!("kubectl annotate {} {name} -n {namespace} {annotation}", messages::kind(*kind))
            }
            Self::InManifest => format!("add the annotation {annotation}"),
            Self::TooLate => return String::new(),
        };
        format!(", or reach only namespaces whose {} names {namespace}: {how}", keys.accept_from)
    }
}
