//! What holds for every plan after random histories. Few names are used, so that operations collide.

use std::collections::{BTreeMap, HashSet};

use proptest::prelude::*;

use super::*;
use crate::{
    object::Kind,
    testing::{
        history::{
            COMPANIONS, ClusterOperation, NAMESPACES, NamespaceState, history, just_reconcile, key, run,
            says_keep,
        },
        read_companion,
    },
};

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
        cluster.companion(at).is_some_and(|found| !found.state.labelled || found.state.source != named(at))
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
    Err(TestCaseError::fail("the controller does not converge"))
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
    fn controller_converges_and_a_new_process_finds_nothing_to_do(history in history()) {
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
                let barred = cluster.world.read(|world| world.is_refused(key, &at.namespace));
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
                let digest = |object: Object| read_companion(at.kind, object).companion().state.content;
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
