use proptest::prelude::*;

use super::*;
use lockstep_core::{
    object::Kind,
    plan::Trouble,
    testing::{
        cluster::Cluster,
        companion,
        history::{history, just_reconcile, run},
        keys, namespace, object, rules, source,
    },
    world::Scope,
};

fn snapshot(cluster: &Cluster) -> Snapshot {
    let scope = Scope { keys: keys(), rules: rules(), kinds: Kind::ALL.to_vec() };
    Snapshot::of(scope, cluster.world.clone())
}

fn status(cluster: &Cluster, key: &ObjectKey) -> SourceStatus {
    source_status(&snapshot(cluster), key.clone(), None)
}

fn states(status: &SourceStatus) -> Vec<(String, String)> {
    status.companions.iter().map(|one| (one.at.to_string(), one.state.to_string())).collect()
}

#[test]
fn every_companion_that_a_source_wants_or_has_is_listed_with_its_state() {
    let mut cluster = Cluster::with(&["home", "a", "b", "c"]);
    cluster.namespace(namespace("d").label("exclude", "true"));
    let draft = |targets: &str| source("home", "s").data("k", "1").annotate("target-namespaces", targets);
    let key = cluster.put(draft("a,b,c"));
    cluster.reconcile(&key);
    assert_eq!(status(&cluster, &key).state, SourceHealth::InStep);
    // One is edited, one is not wanted any more, one namespace is missing and one takes none.
    cluster.put(draft("a,b,d,nowhere"));
    let at = ObjectKey::new(Kind::ConfigMap, "a", "s-synced");
    cluster.edit(&at, |object| drop(object.data.get_or_insert_default().insert("k".into(), "2".into())));
    let now = status(&cluster, &key);
    let expected = [
        ("a/s-synced", "differs: content"),
        ("b/s-synced", "in step"),
        ("c/s-synced", "to be removed: no longer a target"),
        ("d/s-synced", "the namespace is never a target"),
        ("nowhere/s-synced", "the namespace does not exist"),
    ];
    assert_eq!(states(&now), expected.map(|(place, state)| (place.to_owned(), state.to_owned())));
    assert_eq!((now.wanted, now.in_step), (2, 1));
    assert_eq!(now.state, SourceHealth::Behind { count: 2 });
    // A companion of another source holds the name.
    cluster.delete(&at);
    cluster.put(companion("a", "s-synced").of("else/s"));
    assert_eq!(status(&cluster, &key).state, SourceHealth::Conflicts { count: 1 });
    let until = "2026-01-01T00:00:00Z".parse().unwrap();
    let held = source_status(&snapshot(&cluster), key, Some(until)).state;
    assert_eq!(held, SourceHealth::DeletesHeld { count: 1, until });
}

#[test]
fn paused_refused_and_missing_sources_have_states_of_their_own() {
    let mut cluster = Cluster::with(&["home", "away"]);
    let key = cluster.put(source("home", "s").annotate("target-namespaces", "away"));
    cluster.reconcile(&key);
    cluster.put(
        source("home", "s").data("k", "2").annotate("target-namespaces", "away").annotate("paused", "true"),
    );
    assert_eq!(status(&cluster, &key).state, SourceHealth::Paused { count: 1 });
    cluster.put(source("home", "s").annotate("target-namespaces", "Not Valid"));
    let refused = status(&cluster, &key);
    assert!(matches!(refused.state, SourceHealth::Refused { .. }), "{:?}", refused.state);
    assert_eq!(
        states(&refused),
        [("away/s-synced".to_owned(), "stays as it is while its source is refused".to_owned())]
    );
    cluster.delete(&key);
    assert_eq!(status(&cluster, &key).state, SourceHealth::SourceGone { count: 1 });
    let none = cluster.put(source("home", "t").annotate("target-namespaces", "no-*"));
    assert_eq!(status(&cluster, &none).state, SourceHealth::NoTarget { consent: false });
    // An object that is no companion is not listed.
    cluster.put(object("away", "t-synced"));
    assert!(status(&cluster, &none).companions.is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn status_is_behind_where_the_plan_has_changes(history in history()) {
        let cluster = run(history, just_reconcile);
        for key in cluster.all_sources() {
            let (status, plan) = (status(&cluster, &key), cluster.plan(&key));
            // What a paused source would do, the plan leaves out; a lost companion is looked for first.
            if matches!(status.state, SourceHealth::Paused { .. } | SourceHealth::BeingDeleted) {
                continue;
            }
            let mut planned: Vec<String> = plan
                .changes
                .iter()
                .filter(|change| !matches!(change.action, Action::DeleteLost { .. }))
                .map(|change| change.at.to_string())
                .collect();
            let mut behind: Vec<String> = status
                .companions
                .iter()
                .filter(|one| one.state.is_behind())
                .map(|one| one.at.to_string())
                .collect();
            let is_conflict = |trouble: &&Trouble| matches!(trouble, Trouble::Conflict { .. });
            let conflicts = status.companions.iter().filter(|one| matches!(one.state, PlaceState::Conflict(_)));
            prop_assert_eq!(conflicts.count(), plan.troubles.iter().filter(is_conflict).count());
            planned.sort();
            behind.sort();
            prop_assert_eq!(behind, planned, "{:?}", status);
        }
    }
}
