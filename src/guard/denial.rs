//! PURE. Every reason to deny a request, and its message to the user.

use super::messages;
use crate::{
    keys::Keys,
    object::{Kind, ObjectKey},
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
    Squatting { at: ObjectKey, of: ObjectKey },
    /// A source is malformed or cannot be mirrored.
    Fault { at: ObjectKey, fault: Fault },
    /// A source of another namespace already has a companion of that name.
    Taken { at: ObjectKey, of: ObjectKey },
    /// The user may not do themselves what the mirror would do for them. No `namespace` means all
    /// namespaces.
    NoRight {
        user: String,
        verb: &'static str,
        kind: Kind,
        namespace: Option<String>,
        name: String,
        home: String,
        /// The source names no targets, so default ones apply or applied.
        default_targets: bool,
    },
    /// A deputy writes a source whose target namespace does not accept it. No `namespace` means that
    /// a prefix or a selector matches the target.
    Deputy { user: String, namespace: Option<String>, home: String, default_targets: bool },
    /// The user's access could not be checked.
    Unanswered(String),
}

impl Denial {
    /// The `reason` label in metrics, logs and the audit annotation.
    #[must_use]
    pub const fn label(&self) -> &'static str {
        match self {
            Self::Edit { .. } => "edit",
            Self::Strip { .. } => "strip",
            Self::Delete { .. } => "delete",
            Self::Forged { .. } => "forged",
            Self::Squatting { .. } => "squatting",
            Self::Fault { fault, .. } => fault.label(),
            Self::Taken { .. } => "taken",
            Self::NoRight { .. } => "no_right",
            Self::Deputy { .. } => "deputy",
            Self::Unanswered(_) => "unanswered",
        }
    }

    /// What is denied and why, and the command that does what the user probably wants.
    #[must_use]
    pub fn message(&self, keys: &Keys) -> String {
        let render = |template: &str, at: &ObjectKey, of: Option<&ObjectKey>| {
            messages::render(template, keys, at, of.map(ToString::to_string).as_deref())
        };
        // The author wrote no targets, and would look for them in vain.
        let of_a_default = |default_targets: bool, advice: &str| match default_targets {
            true => format!(". The source names no targets, so those of a default apply{advice}"),
            false => String::new(),
        };
        let choose = format!(": to choose others, set {} on it", keys.target_namespaces);
        match self {
            Self::Edit { at, of } => render(messages::EDIT, at, Some(of)),
            Self::Strip { at, of } => render(messages::STRIP, at, Some(of)),
            Self::Delete { at, of } => {
                let allow = match keys.is_kept_free(&at.name) {
                    true => messages::OR_ALLOW_DELETES,
                    false => messages::OR_RENAME,
                };
                render(messages::DELETE, at, Some(of)) + &render(allow, at, Some(of))
            }
            Self::Forged { at } => render(messages::FORGED, at, None),
            Self::Squatting { at, of } => render(messages::SQUATTING, at, Some(of)),
            Self::Fault { at, fault } => {
                format!("{} {at} cannot be a source: {fault}", messages::kind(at.kind))
            }
            Self::Taken { at, of } => format!(
                "{at} is already the companion of {of}: choose another name with the annotation {}",
                keys.companion_name
            ),
            Self::NoRight { user, verb, kind, namespace, name, home, default_targets } => {
                let forbidden = format!("{user} may not {verb} {} {name}", kind.plural());
                match namespace {
                    Some(namespace) if namespace == home => format!(
                        "{forbidden} in namespace {home}, so Lockstep does not keep it there on their behalf. \
                         Ask for that right, or choose another {}",
                        keys.companion_name
                    ),
                    Some(namespace) => format!(
                        "{forbidden} in namespace {namespace}, so Lockstep does not do it on their behalf. \
                         Ask for that right, or for this: kubectl annotate namespace {namespace} {}={home}{}",
                        keys.accept_from,
                        of_a_default(*default_targets, &choose)
                    ),
                    None => format!(
                        "{forbidden} in all namespaces, which a prefix or a selector needs. \
                         Ask for that right, or list the namespaces in {}{}",
                        keys.target_namespaces,
                        of_a_default(*default_targets, "")
                    ),
                }
            }
            Self::Deputy { user, namespace: Some(namespace), home, default_targets } => format!(
                "{user} writes on behalf of others, so its own rights do not count. \
                 Namespace {namespace} has to agree: kubectl annotate namespace {namespace} {}={home}{}",
                keys.accept_from,
                of_a_default(*default_targets, &choose)
            ),
            Self::Deputy { user, namespace: None, home, default_targets } => format!(
                "{user} writes on behalf of others, so its own rights do not count, and a prefix or a selector \
                 reaches namespaces that have not agreed. List them in {}, and let each agree with {}={home}{}",
                keys.target_namespaces,
                keys.accept_from,
                of_a_default(*default_targets, "")
            ),
            Self::Unanswered(why) => {
                format!("your rights could not be checked ({why}), so nothing was changed: try again")
            }
        }
    }
}
