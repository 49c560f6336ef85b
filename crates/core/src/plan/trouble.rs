//! What keeps a source from having its companions.

use std::fmt;

use super::Heal;
use crate::{
    object::ObjectKey,
    policy::{Fault, mistake::Mistake},
};

/// What keeps a source from having what it asks for, or from asking for what its author meant. Its message is the text
/// of a Warning Event.
#[derive(Debug, Clone, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Trouble {
    #[error("{0}")]
    Fault(Fault),
    #[error("{at}: the name is held by {holder}; nothing was overwritten")]
    Conflict { at: ObjectKey, holder: Holder },
    #[error("{0}")]
    Mistake(Mistake),
    #[error(
        "namespace {namespace} takes no companions from {home} until its accept-from names {home}: {command}"
    )]
    NotAccepted { namespace: String, home: String, command: String },
    #[error("namespace {0} does not exist; it gets a companion once it exists")]
    NoNamespace(String),
    #[error("`{pattern}` matches no namespace{}", if *.consent { " that accepts this source" } else { "" })]
    NoMatch { pattern: String, consent: bool },
    #[error("it is paused; companions that do not follow it until the annotation paused is removed: {0}")]
    Paused(usize),
    #[error("namespace {0} is excluded and never a target: choose other target-namespaces")]
    Excluded(String),
    #[error(
        "{at}: the API server rejects it as invalid: {detail}; Lockstep tries again when the source changes, and every few minutes"
    )]
    Invalid { at: ObjectKey, detail: String },
    #[error("{at}: the API server does not allow the write: {detail}")]
    Forbidden { at: ObjectKey, detail: String },
    #[error(
        "{at}: an admission plugin changes {} when Lockstep writes it; exempt Lockstep's ServiceAccount, or objects with its companion label, from that plugin",
        what.of_object()
    )]
    Rewritten { at: ObjectKey, what: Heal },
    #[error(
        "{manager} overwrote {at} {times} times; backing off. Remove it from that tool, or set paused on the source"
    )]
    Fight { at: ObjectKey, manager: String, times: u32 },
    #[error(
        "{companions} companions of {sources} sources, more than half of all in other namespaces than their source, would be deleted at once: they are kept until {until}, in case this is an accident. To delete them now: lockstep deletes release{flags}. To keep them longer: lockstep deletes extend 2h{flags}"
    )]
    DeletesHeld {
        companions: usize,
        sources: usize,
        until: String,
        /// The flags with which the commands find this instance.
        flags: String,
    },
}

/// The object that has the name that a source wants for its companion.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Holder {
    /// A foreign object, and the source does not say `adopt`.
    Foreign,
    /// A foreign object that `adopt` must not take: it has a controller or a finalizer, is itself a source, or is
    /// being deleted.
    Bound,
    /// A foreign object in a namespace whose `accept-adopt-from` does not name the source's namespace.
    NotAccepting,
    Companion {
        of: ObjectKey,
    },
}

impl Trouble {
    /// All values of [`Self::label`].
    pub const LABELS: [&str; 16] = [
        "malformed",
        "name_too_long",
        "is_companion",
        "refused",
        "mistake",
        "no_namespace",
        "no_match",
        "paused",
        "conflict",
        "not_accepted",
        "excluded",
        "invalid",
        "forbidden",
        "rewritten",
        "fight",
        "accident",
    ];

    /// The trouble without what changes while it lasts, such as a count: equal identities are reported once.
    pub fn identity(&self) -> Self {
        let mut identity = self.clone();
        match &mut identity {
            Self::Fight { times, .. } => *times = 0,
            // The message of an exceeded quota contains what is in use.
            Self::Forbidden { detail, .. } => detail.clear(),
            Self::DeletesHeld { companions, sources, until, .. } => {
                *companions = 0;
                *sources = 0;
                until.clear();
            }
            Self::NotAccepted { command, .. } => command.clear(),
            Self::Paused(count) => *count = 0,
            _ => {}
        }
        identity
    }

    /// The companion or namespace that it is about; none if it is about the source. Those with the same label are
    /// reported together.
    pub fn place(&self) -> Option<String> {
        match self {
            Self::Fault(_)
            | Self::Mistake(_)
            | Self::NoMatch { .. }
            | Self::Paused(_)
            | Self::DeletesHeld { .. } => None,
            Self::NotAccepted { namespace, .. }
            | Self::NoNamespace(namespace)
            | Self::Excluded(namespace) => Some(namespace.clone()),
            Self::Conflict { at, .. }
            | Self::Invalid { at, .. }
            | Self::Forbidden { at, .. }
            | Self::Rewritten { at, .. }
            | Self::Fight { at, .. } => Some(at.to_string()),
        }
    }

    /// The reason of its Warning Event.
    pub const fn event_reason(&self) -> &'static str {
        self.names().0
    }

    /// The `reason` label of metrics.
    pub const fn label(&self) -> &'static str {
        self.names().1
    }

    const fn names(&self) -> (&'static str, &'static str) {
        match self {
            Self::Fault(fault) => ("Refused", fault.label()),
            Self::Mistake(_) => ("Mistake", "mistake"),
            Self::NoNamespace(_) => ("NoNamespace", "no_namespace"),
            Self::NoMatch { .. } => ("NoMatch", "no_match"),
            Self::Paused(_) => ("Paused", "paused"),
            Self::Conflict { .. } => ("Conflict", "conflict"),
            Self::NotAccepted { .. } => ("NotAccepted", "not_accepted"),
            Self::Excluded(_) => ("NotAccepted", "excluded"),
            Self::Invalid { .. } => ("Invalid", "invalid"),
            Self::Forbidden { .. } => ("Forbidden", "forbidden"),
            Self::Rewritten { .. } => ("Rewritten", "rewritten"),
            Self::Fight { .. } => ("Fight", "fight"),
            Self::DeletesHeld { .. } => ("DeletesHeld", "accident"),
        }
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Foreign => f.write_str(
                "an object that is not managed by Lockstep (to take it over, set adopt=true on the source, \
                 and in another namespace accept-adopt-from on that)",
            ),
            Self::Bound => f.write_str(
                "an object that cannot be adopted: it has a controller or a finalizer, is a source, \
                 or is being deleted",
            ),
            Self::NotAccepting => f.write_str(
                "an object that is not managed by Lockstep, \
                 and its namespace's accept-adopt-from does not allow its adoption",
            ),
            Self::Companion { of } => write!(f, "the companion of {of}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The compiler does not say that a variant is missing in a list, so every label of the source above is looked for.
    #[test]
    fn all_labels_are_listed() {
        let source = include_str!("trouble.rs");
        let (_, labels) = source.split_once("const fn names(").unwrap();
        let (labels, _) = labels.split_once("\n}\n").unwrap();
        let texts = labels.split('"').skip(1).step_by(2);
        let texts: Vec<&str> = texts.filter(|text| text.starts_with(char::is_lowercase)).collect();
        assert!(texts.len() >= 12, "{texts:?}");
        for label in texts {
            assert!(Trouble::LABELS.contains(&label), "{label}");
        }
        for fault in ["malformed", "name_too_long", "is_companion", "refused"] {
            assert!(Trouble::LABELS.contains(&fault), "{fault}");
        }
    }
}
