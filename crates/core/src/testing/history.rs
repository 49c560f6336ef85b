//! Random histories of a cluster. Few names are used, so that operations collide.

use proptest::{prelude::*, sample::select};

use super::{ObjectBuilder, cluster::Cluster, full, namespace, object};
use crate::object::{Kind, Object, ObjectKey};

pub const NAMESPACES: [&str; 4] = ["home", "away", "team-a", "kube-x"];
pub const NAMES: [&str; 2] = ["a", "b"];
/// Names of companions: by default, by annotation, and one that sources have, too.
pub const COMPANIONS: [&str; 3] = ["a-synced", "b-synced", "b"];

/// A change of the cluster by a user, by Kubernetes or by the controller.
#[derive(Debug, Clone)]
pub enum ClusterOperation {
    Namespace(&'static str, NamespaceState),
    DropNamespace(&'static str),
    Source {
        at: Place,
        policy: Vec<(&'static str, &'static str)>,
        value: &'static str,
        immutable: bool,
    },
    SourceAnew {
        at: Place,
        policy: Vec<(&'static str, &'static str)>,
        value: &'static str,
    },
    Unlabel(Place),
    Finalize(Place),
    Delete(Place),
    Foreign(Place, Vec<ForeignTrait>),
    Edit(Place, Vec<CompanionEdit>),
    CollectGarbage,
    Restart,
    /// The controller reconciles one source.
    Reconcile(Place),
}

pub type Place = (Kind, &'static str, &'static str);

#[derive(Debug, Clone, Copy)]
pub enum NamespaceState {
    Plain,
    Dev,
    Excluded,
    Accepting,
    Terminating,
}

/// What a foreign object is like.
#[derive(Debug, Clone, Copy)]
pub enum ForeignTrait {
    Labelled,
    OfHomeA,
    Controlled,
    Immutable,
    Finalizer,
    Managed,
}

#[derive(Debug, Clone, Copy)]
pub enum CompanionEdit {
    Data,
    Binary,
    Immutable,
    StripLabel,
    StripSourceLabels,
    StripMarks,
    NameOther,
    BreakSource,
    Protect,
    Manage,
    Foreign,
    Owners,
    Controller,
    Finalizer,
}

fn place(names: &'static [&'static str]) -> impl Strategy<Value = Place> {
    let kind = prop_oneof![4 => Just(Kind::ConfigMap), 1 => Just(Kind::Secret)];
    let namespace = prop_oneof![4 => Just("home"), 2 => Just("away"), 1 => select(&NAMESPACES[..])];
    (kind, namespace, select(names))
}

fn policy() -> impl Strategy<Value = Vec<(&'static str, &'static str)>> {
    let one = select(vec![
        ("target-namespaces", ".,away"),
        ("target-namespaces", "*"),
        ("target-namespaces", "home,team-*,kube-x"),
        ("target-namespaces", ""),
        ("target-selector", "env=dev"),
        ("companion-name", "b-synced"),
        ("companion-name", "b"),
        ("keys", "x=y"),
        ("copy-labels", "example.com/*"),
        ("protect", "all"),
        ("adopt", "true"),
        ("paused", "true"),
        ("when-removed", "keep"),
        ("when-removed", "keep"),
    ]);
    prop::collection::vec(one, 0..4)
}

fn operation() -> impl Strategy<Value = ClusterOperation> {
    use CompanionEdit as E;
    use ForeignTrait as T;
    use NamespaceState as N;
    let state = select(vec![N::Plain, N::Plain, N::Dev, N::Excluded, N::Accepting, N::Terminating]);
    let traits = select(vec![
        T::Labelled,
        T::Labelled,
        T::OfHomeA,
        T::Controlled,
        T::Immutable,
        T::Finalizer,
        T::Managed,
    ]);
    let edits = select(vec![
        E::Data,
        E::Binary,
        E::Immutable,
        E::StripLabel,
        E::StripSourceLabels,
        E::StripMarks,
        E::NameOther,
        E::BreakSource,
        E::Protect,
        E::Manage,
        E::Foreign,
        E::Owners,
        E::Controller,
        E::Finalizer,
    ]);
    let value = || select(vec!["1", "2"]);
    prop_oneof![
        2 => (select(&NAMESPACES[..]), state).prop_map(|(name, state)| ClusterOperation::Namespace(name, state)),
        1 => select(&NAMESPACES[..]).prop_map(ClusterOperation::DropNamespace),
        6 => (place(&NAMES), policy(), value(), prop::bool::weighted(0.2)).prop_map(
            |(at, policy, value, immutable)| ClusterOperation::Source { at, policy, value, immutable }
        ),
        1 => (place(&NAMES), policy(), value())
            .prop_map(|(at, policy, value)| ClusterOperation::SourceAnew { at, policy, value }),
        1 => place(&NAMES).prop_map(ClusterOperation::Unlabel),
        1 => place(&NAMES).prop_map(ClusterOperation::Finalize),
        2 => prop_oneof![place(&NAMES), place(&COMPANIONS)].prop_map(ClusterOperation::Delete),
        2 => (place(&COMPANIONS), prop::collection::vec(traits, 0..3))
            .prop_map(|(at, traits)| ClusterOperation::Foreign(at, traits)),
        6 => (place(&COMPANIONS), prop::collection::vec(edits, 1..3))
            .prop_map(|(at, edits)| ClusterOperation::Edit(at, edits)),
        1 => Just(ClusterOperation::CollectGarbage),
        1 => Just(ClusterOperation::Restart),
        6 => place(&NAMES).prop_map(ClusterOperation::Reconcile),
    ]
}

pub fn history() -> impl Strategy<Value = Vec<ClusterOperation>> {
    prop::collection::vec(operation(), 1..40)
}

pub fn key((kind, namespace, name): Place) -> ObjectKey {
    ObjectKey::new(kind, namespace, name)
}

/// The source of which an operation says `when-removed: keep`.
pub fn says_keep(operation: &ClusterOperation) -> Option<ObjectKey> {
    match operation {
        ClusterOperation::Source { at, policy, .. } | ClusterOperation::SourceAnew { at, policy, .. } => {
            policy.contains(&("when-removed", "keep")).then(|| key(*at))
        }
        _ => None,
    }
}

fn draft((kind, namespace, name): Place) -> ObjectBuilder {
    let draft = object(namespace, name);
    if kind == Kind::Secret { draft.of_type("Opaque") } else { draft }
}

/// Carries out one operation; `reconcile` is what the controller does.
fn perform(
    cluster: &mut Cluster,
    operation: ClusterOperation,
    reconcile: &mut impl FnMut(&mut Cluster, &ObjectKey),
) {
    match operation {
        ClusterOperation::Namespace(name, state) => cluster.namespace(match state {
            NamespaceState::Plain => namespace(name),
            NamespaceState::Excluded => namespace(name).label("exclude", "true"),
            NamespaceState::Accepting => namespace(name).annotate("accept-from", "home"),
            NamespaceState::Terminating => namespace(name).terminating(),
            NamespaceState::Dev => {
                let mut draft = namespace(name);
                draft.object.metadata.labels.insert("env".to_owned(), "dev".to_owned());
                draft
            }
        }),
        ClusterOperation::DropNamespace(name) => cluster.drop_namespace(name),
        ClusterOperation::Source { at, policy, value, immutable } => {
            let base = draft(at).label("managed", "true").label("example.com/l", value).data("x", value);
            let base = if immutable { base.immutable() } else { base };
            let wanted = policy.iter().fold(base, |draft, (key, value)| draft.annotate(key, value));
            cluster.put(wanted);
        }
        ClusterOperation::SourceAnew { at, policy, value } => {
            let base = draft(at).label("managed", "true").data("x", value);
            cluster.put_anew(policy.iter().fold(base, |draft, (key, value)| draft.annotate(key, value)));
        }
        ClusterOperation::Unlabel(at) => cluster.edit(&key(at), |object| object.metadata.labels.clear()),
        ClusterOperation::Finalize(at) => {
            cluster.edit(&key(at), |object| object.metadata.finalizers.push("example.com/f".to_owned()));
            cluster.delete(&key(at));
        }
        ClusterOperation::Delete(at) => cluster.delete(&key(at)),
        ClusterOperation::Foreign(at, traits) => {
            let foreign = traits.iter().fold(draft(at).data("theirs", "1"), |draft, which| match which {
                ForeignTrait::Labelled => draft.label("companion", "true"),
                ForeignTrait::OfHomeA => draft.of("home/a"),
                ForeignTrait::Controlled => draft.controlled_by("Deployment", "another"),
                ForeignTrait::Immutable => draft.immutable(),
                ForeignTrait::Finalizer => draft.finalizer("example.com/f"),
                ForeignTrait::Managed => draft.label("managed", "true"),
            });
            if cluster.object(&key(at)).is_none() {
                cluster.put(foreign);
            }
        }
        ClusterOperation::Edit(at, edits) => {
            cluster.edit(&key(at), |object| edits.into_iter().for_each(|edit| edit.perform(object)));
        }
        ClusterOperation::CollectGarbage => cluster.collect_garbage(),
        ClusterOperation::Restart => cluster.restart(),
        ClusterOperation::Reconcile(at) => reconcile(cluster, &key(at)),
    }
}

impl CompanionEdit {
    fn perform(self, object: &mut crate::object::Object) {
        let meta = &mut object.metadata;
        let annotations = &mut meta.annotations;
        match self {
            Self::Data => drop(object.data.get_or_insert_default().insert("x".into(), "edited".into())),
            Self::Binary => {
                drop(object.binary_data.get_or_insert_default().insert("z".into(), "AAEC".into()));
            }
            Self::Immutable => object.immutable = Some(true),
            Self::StripLabel => drop(meta.labels.remove(&full("companion"))),
            Self::StripSourceLabels => strip_source_labels(object),
            Self::StripMarks => annotations.clear(),
            Self::NameOther => drop(annotations.insert(full("source"), "away/b".into())),
            Self::BreakSource => drop(annotations.insert(full("source"), "nonsense".into())),
            Self::Protect => drop(annotations.insert(full("protect"), "none".into())),
            Self::Manage => drop(meta.labels.insert(full("managed"), "true".into())),
            Self::Foreign => drop(meta.labels.insert("example.com/foreign".into(), "1".into())),
            Self::Owners => meta.owner_references.clear(),
            Self::Controller => {
                let other = crate::testing::object("", "").controlled_by("Deployment", "another");
                meta.owner_references = other.object.metadata.owner_references;
            }
            Self::Finalizer => meta.finalizers.push("example.com/f".into()),
        }
    }
}

pub fn run(history: Vec<ClusterOperation>, mut reconcile: impl FnMut(&mut Cluster, &ObjectKey)) -> Cluster {
    // With an even number of operations no payload is kept, and each write reads its source live.
    let source_cache = if history.len().is_multiple_of(2) { 0 } else { crate::testing::SOURCE_CACHE };
    let mut cluster = Cluster::with_source_cache(&NAMESPACES, source_cache);
    for operation in history {
        perform(&mut cluster, operation, &mut reconcile);
    }
    cluster
}

pub fn just_reconcile(cluster: &mut Cluster, key: &ObjectKey) {
    cluster.reconcile(key);
}

pub fn strip_source_labels(object: &mut Object) {
    object.metadata.labels.retain(|key, _| !key.contains("/source-"));
}
