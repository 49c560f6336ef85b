//! What holds for every plan after random histories. Few names are used, so that operations collide.

use std::collections::{BTreeMap, HashSet};

use proptest::{prelude::*, sample::select};

use super::*;
use crate::{object::Kind, testing::read_companion};

const NAMESPACES: [&str; 4] = ["home", "away", "team-a", "kube-x"];
const NAMES: [&str; 2] = ["a", "b"];
/// Names of companions: by default, by annotation, and one that sources have, too.
const COMPANIONS: [&str; 3] = ["a-synced", "b-synced", "b"];

/// A change of the cluster by a user, by Kubernetes or by the mirror.
#[derive(Debug, Clone)]
pub(crate) enum ClusterOperation {
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
    /// The mirror reconciles one source.
    Reconcile(Place),
}

type Place = (Kind, &'static str, &'static str);

#[derive(Debug, Clone, Copy)]
pub(crate) enum NamespaceState {
    Plain,
    Dev,
    Excluded,
    Accepting,
    Terminating,
}

/// What a foreign object is like.
#[derive(Debug, Clone, Copy)]
pub(crate) enum ForeignTrait {
    Labelled,
    OfHomeA,
    Controlled,
    Immutable,
    Finalizer,
    Managed,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum CompanionEdit {
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

pub(crate) fn history() -> impl Strategy<Value = Vec<ClusterOperation>> {
    prop::collection::vec(operation(), 1..40)
}

fn key((kind, namespace, name): Place) -> ObjectKey {
    ObjectKey::new(kind, namespace, name)
}

/// The source of which an operation says `when-removed: keep`.
fn says_keep(operation: &ClusterOperation) -> Option<ObjectKey> {
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

/// Carries out one operation; `reconcile` is what the mirror does.
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

pub(crate) fn run(
    history: Vec<ClusterOperation>,
    mut reconcile: impl FnMut(&mut Cluster, &ObjectKey),
) -> Cluster {
    // With an even number of operations no payload is kept, and each write reads its source live.
    let source_cache = if history.len().is_multiple_of(2) { 0 } else { crate::testing::SOURCE_CACHE };
    let mut cluster = Cluster::with_source_cache(&NAMESPACES, source_cache);
    for operation in history {
        perform(&mut cluster, operation, &mut reconcile);
    }
    cluster
}

pub(crate) fn just_reconcile(cluster: &mut Cluster, key: &ObjectKey) {
    cluster.reconcile(key);
}

/// The existing objects that a plan touches, and whether it adopts them.
fn touched(plan: &Plan) -> impl Iterator<Item = (&ObjectKey, bool)> {
    plan.changes.iter().filter_map(|change| match &change.action {
        Action::Create { .. } => None,
        Action::Update { reason, .. } | Action::Recreate { reason, .. } => {
            Some((&change.at, *reason == WriteReason::Adopted))
        }
        Action::Delete { .. } | Action::Release { .. } => Some((&change.at, false)),
        // It is read first.
        Action::DeleteLost { .. } => None,
    })
}

fn only_lost(changes: Vec<Change>) -> Vec<Change> {
    changes.into_iter().filter(|change| matches!(change.action, Action::DeleteLost { .. })).collect()
}

/// Every name that a companion may have.
fn everywhere() -> impl Iterator<Item = ObjectKey> {
    Kind::ALL.into_iter().flat_map(|kind| {
        NAMESPACES.into_iter().flat_map(move |namespace| COMPANIONS.map(|name| key((kind, namespace, name))))
    })
}

/// Companions about which a restarted process may decide differently. Either the old process knew their source by the
/// UID, their marks no longer name it, and nothing is written for that source (it is paused, terminating or refused).
/// Or the old process knows an object without our label, whose deletion no watch shows.
fn unclear(cluster: &Cluster) -> Vec<ObjectKey> {
    let named = |at: &ObjectKey| {
        ObjectKey::parse(at.kind, cluster.object(at)?.metadata.annotations.get(&full("source"))?)
    };
    let is_unclear = |at: &ObjectKey| {
        cluster.companion(at).is_some_and(|found| !found.labelled || found.source != named(at))
            || cluster.is_known_by_entry_only(at)
    };
    everywhere().filter(is_unclear).collect()
}

/// Reconciles every source until nothing is left to do but writes that fail.
fn converge(cluster: &mut Cluster) -> Result<(), TestCaseError> {
    for _ in 0..6 {
        let mut changed = false;
        for key in cluster.all_sources() {
            let plan = cluster.plan(&key);
            let planned = plan.changes.len();
            changed |= planned > cluster.apply(&key, plan).len();
        }
        if !changed {
            return Ok(());
        }
    }
    Err(TestCaseError::fail("the mirror does not converge"))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn applied_plan_leaves_nothing_to_do(history in history()) {
        let mut cluster = run(history, just_reconcile);
        for key in cluster.all_sources() {
            let plan = cluster.plan(&key);
            // A finalizer delays the delete; the create follows later.
            let is_held = |at: &ObjectKey| {
                cluster.object(at).is_some_and(|there| !there.metadata.finalizers.is_empty())
            };
            let changed = plan.changes.iter().map(|change| change.at.clone());
            let held: Vec<ObjectKey> = changed.filter(is_held).collect();
            let failed = cluster.apply(&key, plan);
            let is_open = |at: &ObjectKey| !held.contains(at) && failed.iter().all(|(other, _)| other != at);
            // A lost companion that was found is deleted by the next plan.
            let found = cluster.plan(&key);
            cluster.apply(&key, Plan { changes: only_lost(found.changes), ..Plan::default() });
            let again = cluster.plan(&key);
            let left = again.changes.iter().any(|change| is_open(&change.at));
            prop_assert!(!left, "{key}: {:?}", planned(&again));
        }
    }

    #[test]
    fn mirror_converges_and_a_new_process_finds_nothing_to_do(history in history()) {
        let mut cluster = run(history, just_reconcile);
        converge(&mut cluster)?;
        let unclear = unclear(&cluster);
        let changed = |cluster: &Cluster, key: &ObjectKey| {
            let changed = cluster.plan(key).changes.into_iter().map(|change| change.at);
            changed.filter(|at| !unclear.contains(at)).collect::<Vec<_>>()
        };
        let before: BTreeMap<ObjectKey, Vec<ObjectKey>> =
            cluster.all_sources().into_iter().map(|key| (key.clone(), changed(&cluster, &key))).collect();
        cluster.restart();
        for key in cluster.all_sources() {
            // The only changes left, before and after, are creates that a foreign object prevents.
            let after = changed(&cluster, &key);
            let there = |at: &ObjectKey| cluster.companion(at).is_some();
            prop_assert!(!after.iter().any(there), "{key}: {:?}", planned(&cluster.plan(&key)));
            prop_assert_eq!(after, before.get(&key).cloned().unwrap_or_default(), "{}", key);
        }
    }

    #[test]
    fn only_objects_with_our_marks_for_the_source_are_touched(history in history()) {
        let check = |cluster: &Cluster, key: &ObjectKey| {
            for (at, adopted) in touched(&cluster.plan(key)) {
                let adopt = cluster.object(key).is_some_and(|source| {
                    source.metadata.annotations.get(&full("adopt")).is_some_and(|value| value == "true")
                });
                let found = &cluster.object(at).expect("it is there").metadata;
                let free = found.controller().is_none() && !found.labels.contains_key(&full("managed"));
                let allowed = if adopted { adopt && free } else { cluster.is_marked_for(key, at) };
                assert!(allowed, "{key} touches {at}");
            }
            for Change { at, action } in cluster.plan(key).changes {
                let Action::DeleteLost { lost, .. } = action else { continue };
                let found = cluster.object(&at).map(|object| read_companion(at.kind, object));
                let deleted = found.is_some_and(|found| lost.is(found.companion()));
                assert!(!deleted || cluster.is_marked_for(key, &at), "{key} deletes {at}");
            }
        };
        let cluster = run(history, |cluster, key| {
            check(cluster, key);
            cluster.reconcile(key);
        });
        cluster.all_sources().iter().for_each(|key| check(&cluster, key));
    }

    #[test]
    fn plan_of_a_source_and_plan_of_each_companion_agree(history in history()) {
        let cluster = run(history, just_reconcile);
        for key in cluster.all_sources() {
            let whole = cluster.plan(&key);
            for at in everywhere().filter(|at| at.kind == key.kind) {
                let whole = planned(&whole).into_iter().find(|(planned_at, _)| *planned_at == at.to_string());
                let single = cluster.plan_companion(&key, &at);
                prop_assert_eq!(whole.map(|(_, planned)| planned), single, "{} at {}", key, at);
            }
        }
    }

    #[test]
    fn no_two_sources_write_the_same_object(history in history()) {
        let cluster = run(history, just_reconcile);
        let mut writers: BTreeMap<ObjectKey, ObjectKey> = BTreeMap::new();
        for key in cluster.all_sources() {
            for (at, adopted) in touched(&cluster.plan(&key)) {
                // The first source to write adopts them; the other one gets a conflict.
                if adopted {
                    continue;
                }
                let other = writers.insert(at.clone(), key.clone());
                prop_assert!(other.is_none(), "{at}: {key} and {}", other.unwrap());
            }
        }
    }

    #[test]
    fn companion_that_is_to_stay_is_deleted_only_where_its_namespace_takes_none(history in history()) {
        let check = |cluster: &Cluster, key: &ObjectKey| {
            let says_keep = |object: &Object| {
                object.metadata.annotations.get(&full("when-removed")).is_some_and(|value| value == "keep")
            };
            let is_source = |object: &Object| object.metadata.labels.contains_key(&full("managed"));
            let source = cluster.object(key).filter(is_source);
            for Change { at, action } in cluster.plan(key).changes {
                let released = match action {
                    Action::Delete { .. } => false,
                    Action::Release { .. } => true,
                    _ => continue,
                };
                let found = cluster.object(&at).expect("it is there");
                let uid = found.metadata.annotations.get(&full("source-uid"));
                // Who says so: the source, if it is the one that the companion names, and else the companion.
                let is_named = |source: &&Object| uid.is_none_or(|uid| *uid == source.metadata.uid);
                let says = match source.as_ref().filter(is_named) {
                    Some(source) if cluster.is_well_formed(key) => says_keep(source),
                    // Marks that somebody removed are remembered.
                    _ if uid.is_none() => continue,
                    _ => says_keep(&found),
                };
                let barred = cluster.world.read(|world| world.is_barred(key, &at.namespace));
                assert_eq!(released, says && !barred, "{key} at {at}");
            }
        };
        let cluster = run(history, |cluster, key| {
            check(cluster, key);
            cluster.reconcile(key);
        });
        cluster.all_sources().iter().for_each(|key| check(&cluster, key));
    }

    #[test]
    fn released_companion_has_no_marks_and_is_not_touched_again(history in history()) {
        let is_ours = |key: &&String| crate::testing::keys().is_ours(key);
        let check = |cluster: &Cluster| {
            for (at, then) in cluster.released() {
                let now = cluster.object(&at).expect("it exists");
                // A source with `adopt` may take any object of that name.
                if now.metadata.labels.contains_key(&full("companion")) {
                    continue;
                }
                assert_eq!(now.metadata.resource_version, then.metadata.resource_version, "{at} was written");
                let mut keys = now.metadata.labels.keys().chain(now.metadata.annotations.keys());
                assert_eq!(keys.find(is_ours), None, "{at}");
            }
        };
        let mut cluster = run(history, |cluster, key| {
            let changes = cluster.plan(key).changes.into_iter();
            let releases = changes.filter(|change| matches!(change.action, Action::Release { .. }));
            let before: Vec<_> =
                releases.map(|Change { at, .. }| (cluster.object(&at).expect("it is there"), at)).collect();
            cluster.reconcile(key);
            for (before, at) in before {
                let after = cluster.object(&at).expect("a released companion stays");
                assert_eq!(after.metadata.uid, before.metadata.uid, "{at}");
                let digest = |object: Object| read_companion(at.kind, object).companion().content;
                assert_eq!(digest(after), digest(before), "{at}");
                assert!(cluster.companion(&at).is_none(), "{at} is still known");
            }
            check(cluster);
        });
        converge(&mut cluster)?;
        check(&cluster);
        cluster.restart();
        converge(&mut cluster)?;
        check(&cluster);
    }

    #[test]
    fn no_companion_outlives_its_source_unless_it_is_kept(history in history()) {
        let is_possible = |operation: &ClusterOperation| match operation {
            // A new process may know a stripped companion by nothing.
            ClusterOperation::Restart => false,
            // A namespace that is terminating never becomes another one.
            ClusterOperation::Namespace(_, state) => !matches!(state, NamespaceState::Terminating),
            _ => true,
        };
        let kept_once: HashSet<ObjectKey> = history.iter().filter_map(says_keep).collect();
        let mut cluster = run(history.into_iter().filter(is_possible).collect(), just_reconcile);
        // Sources may have owners, too.
        cluster.collect_garbage();
        converge(&mut cluster)?;
        cluster.collect_garbage();
        for at in everywhere() {
            let (Some(object), Some(source)) = (cluster.object(&at), cluster.created_for(&at)) else { continue };
            let meta = &object.metadata;
            let gone = cluster.object(&source)
                .is_none_or(|source| !source.metadata.labels.contains_key(&full("managed")));
            let is_a_source =
                meta.labels.contains_key(&full("managed")) && !meta.annotations.contains_key(&full("source"));
            // Without our label it is left alone if its marks said that it stays, or its source did when it no longer
            // wanted it. One that was released is not known to be created for the source.
            let to_stay = cluster.was_marked_to_stay(&at) || kept_once.contains(&source);
            let stays = to_stay && !meta.labels.contains_key(&full("companion"));
            let kept = is_a_source || stays || !meta.finalizers.is_empty();
            prop_assert!(!gone || kept, "{at} outlives {source}");
        }
    }
}
