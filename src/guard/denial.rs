//! Every reason to say no, and what it says to a person.

use super::text;
use crate::{
    keys::Keys,
    object::{Kind, ObjectKey},
    policy::Fault,
};

/// Why a request is refused. `at` is the object of the request, `of` the source whose companion it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Denial {
    Edit {
        at: ObjectKey,
        of: ObjectKey,
    },
    Strip {
        at: ObjectKey,
        of: ObjectKey,
    },
    Delete {
        at: ObjectKey,
        of: ObjectKey,
    },
    Forged {
        at: ObjectKey,
    },
    Squatting {
        at: ObjectKey,
        of: ObjectKey,
    },
    Fault {
        at: ObjectKey,
        fault: Fault,
    },
    /// The place is the companion of another source already.
    Taken {
        at: ObjectKey,
        of: ObjectKey,
    },
    /// The user may not do themselves what the mirror would do for them; in no namespace in particular if there is none.
    NoRight {
        user: String,
        verb: &'static str,
        kind: Kind,
        namespace: Option<String>,
        name: String,
        home: String,
    },
    /// A deputy reaches a namespace that has not agreed.
    Deputy {
        user: String,
        namespace: Option<String>,
        home: String,
    },
    /// The API server could not be asked about the user's rights.
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

    /// What was refused, and the command that does what was probably wanted.
    #[must_use]
    pub fn message(&self, keys: &Keys) -> String {
        let render = |text: &str, at: &ObjectKey, of: Option<&ObjectKey>| {
            text::render(text, keys, at, of.map(ToString::to_string).as_deref())
        };
        match self {
            Self::Edit { at, of } => render(text::EDIT, at, Some(of)),
            Self::Strip { at, of } => render(text::STRIP, at, Some(of)),
            Self::Delete { at, of } => {
                render(text::DELETE, at, Some(of)) + &render(text::OR_ALLOW_DELETES, at, Some(of))
            }
            Self::Forged { at } => render(text::FORGED, at, None),
            Self::Squatting { at, of } => render(text::SQUATTING, at, Some(of)),
            Self::Fault { at, fault } => {
                format!("{} {at} cannot be a source: {fault}", text::kind(at.kind))
            }
            Self::Taken { at, of } => format!(
                "{at} is the companion of {of} already: choose another name with the annotation {}",
                keys.companion_name
            ),
            Self::NoRight { user, verb, kind, namespace, name, home } => {
                let refused = format!("{user} may not {verb} {} {name}", kind.plural());
                match namespace {
                    Some(namespace) if namespace == home => format!(
                        "{refused} in namespace {home}, so Lockstep does not keep it there on their behalf. \
                         Ask for that right, or choose another {}",
                        keys.companion_name
                    ),
                    Some(namespace) => format!(
                        "{refused} in namespace {namespace}, so Lockstep does not do it on their behalf. \
                         Ask for that right, or for this: kubectl annotate namespace {namespace} {}={home}",
                        keys.accept_from
                    ),
                    None => format!(
                        "{refused} in all namespaces, which a prefix or a selector needs. \
                         Ask for that right, or list the namespaces in {}",
                        keys.target_namespaces
                    ),
                }
            }
            Self::Deputy { user, namespace: Some(namespace), home } => format!(
                "{user} writes on behalf of others, so its own rights do not count. \
                 Namespace {namespace} has to agree: kubectl annotate namespace {namespace} {}={home}",
                keys.accept_from
            ),
            Self::Deputy { user, namespace: None, home } => format!(
                "{user} writes on behalf of others, so its own rights do not count, and a prefix or a selector \
                 reaches namespaces that have not agreed. List them in {}, and let each agree with {}={home}",
                keys.target_namespaces, keys.accept_from
            ),
            Self::Unanswered(why) => {
                format!("your rights could not be checked ({why}), so nothing was changed: try again")
            }
        }
    }
}
