//! PURE. Why something is left to the person, and what to do about it.

use lockstep_core::{
    object::ObjectKey,
    policy::{Fault, selector::BadSelector},
};

#[derive(Debug, PartialEq, thiserror::Error)]
pub enum NotMovable {
    #[error(
        "{annotation}: the regular expression `{item}` is not supported: list the namespaces in that annotation (`.*` stands \
         for any characters), or move the source by hand"
    )]
    Expression { annotation: &'static str, item: String },
    #[error("{annotation}: {problem}")]
    Selector { annotation: &'static str, problem: BadSelector },
    #[error(
        "reflection-auto-namespaces and reflection-allowed-namespaces overlap: make one of the two lists part of the other, \
         or move the source by hand"
    )]
    TwoLists,
    #[error(
        "keep-owner-references: Lockstep removes ownerReferences of others from companions; remove that annotation, \
         and the references from the copies, if nobody needs them"
    )]
    KeepsOwners,
    #[error(
        "it may be pulled, and no copy that can move pulls it. Lockstep has no pulling, so there is nothing to write: when \
         somebody needs a copy, add their namespace to its target-namespaces"
    )]
    NobodyPulls,
    #[error(
        "its copies have different names ({0}), and a source has one companion-name: rename or delete all copies but those \
         of one name"
    )]
    Names(String),
    #[error("it names no source as `namespace/name`: correct or remove the annotation")]
    NoSource,
    #[error("its source {0} has {1}")]
    OfSource(ObjectKey, Box<NotMovable>),
    #[error("its source {0} does not exist")]
    SourceMissing(ObjectKey),
    #[error("its source {0} is itself a copy, and a companion cannot be a source: let it name the original")]
    SourceIsCopy(ObjectKey),
    #[error(
        "its source {0} does not permit a copy in this namespace: permit it there, or delete the copy. If \
         kubernetes-replicator ran with --allow-all, repeat that flag here"
    )]
    NotPermitted(ObjectKey),
    #[error("it names no namespace but its own: there is nothing to copy")]
    NoTargets,
    #[error(
        "it already has labels or annotations of Lockstep: finish by hand what was begun, or remove them first"
    )]
    AlreadyOurs,
    #[error("it is being deleted")]
    Terminating,
    #[error("{at} exists and is no copy of it, so it is not taken over: rename or delete it")]
    Foreign { at: ObjectKey },
    #[error(
        "{at} has an ownerReference or a finalizer, and such an object is never adopted: remove it, or delete the copy"
    )]
    Bound { at: ObjectKey },
    #[error(
        "{at} has another Secret type than its source, or is immutable and differs: Lockstep would have to delete and \
         create it. Delete the copy when nobody needs it for a moment; Lockstep then creates it"
    )]
    Recreate { at: ObjectKey },
    #[error(
        "{at} has keys that its source does not have ({keys}), and Lockstep would remove them: move them elsewhere"
    )]
    ExtraKeys { at: ObjectKey, keys: String },
    #[error("{at} has labels or annotations of a companion: delete it, or unlabel the source that it names")]
    Companion { at: ObjectKey },
    #[error(
        "{at} is part of {by}, which would be refused when it writes the copy: remove it there, and let it leave the \
         object in the cluster"
    )]
    ManagedCopy { at: ObjectKey, by: String },
    #[error("{at} is in a namespace that accepts companions only on request: {command}; or delete the copy")]
    NotAccepted { at: ObjectKey, command: String },
    #[error("{at} is in a namespace with the label exclude=true: remove the label, or delete the copy")]
    Excluded { at: ObjectKey },
    #[error(
        "the {key} of namespace {namespace} cannot be extended: correct it with kubectl edit namespace {namespace}"
    )]
    Adoption { namespace: String, key: String },
    #[error("{other} wants the same copy {at}: leave it to one of the two")]
    Contested { at: ObjectKey, other: ObjectKey },
    #[error("{0}")]
    Fault(Fault),
}
