//! What holds for every plan, whatever people did: a small alphabet, so that their deeds collide.

use std::collections::BTreeMap;

use proptest::{prelude::*, sample::select};

use super::*;
use crate::object::Kind;

const NAMESPACES: [&str; 4] = ["home", "away", "team-a", "kube-x"];
const NAMES: [&str; 2] = ["a", "b"];
/// Where companions may stand: by default, by annotation, and where sources stand.
const COMPANIONS: [&str; 3] = ["a-synced", "b-synced", "b"];

/// What somebody does.
#[derive(Debug, Clone)]
enum Deed {
    Namespace(&'static str, Nature),
    DropNamespace(&'static str),
    Source {
        at: Place,
        policy: Vec<(&'static str, &'static str)>,
        value: &'static str,
        immutable: bool,
    },
    SourceAnew {
        at: Place,
        value: &'static str,
    },
    Unlabel(Place),
    Finalize(Place),
    Delete(Place),
    Stranger(Place, Vec<Trait>),
    Edit(Place, Vec<Edit>),
    CollectGarbage,
    Restart,
    /// The mirror looks at one source.
    Look(Place),
}

type Place = (Kind, &'static str, &'static str);

#[derive(Debug, Clone, Copy)]
enum Nature {
    Plain,
    Dev,
    Excluded,
    Accepting,
    Terminating,
}

/// What an object that we did not make is like.
#[derive(Debug, Clone, Copy)]
enum Trait {
    Labelled,
    OfHomeA,
    Controlled,
    Immutable,
    Finalizer,
    Managed,
}

#[derive(Debug, Clone, Copy)]
enum Edit {
    Data,
    Binary,
    Immutable,
    StripLabel,
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
    ]);
    prop::collection::vec(one, 0..4)
}

fn deed() -> impl Strategy<Value = Deed> {
    use Edit as E;
    use Nature as N;
    use Trait as T;
    let nature = select(vec![N::Plain, N::Plain, N::Dev, N::Excluded, N::Accepting, N::Terminating]);
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
        2 => (select(&NAMESPACES[..]), nature).prop_map(|(name, nature)| Deed::Namespace(name, nature)),
        1 => select(&NAMESPACES[..]).prop_map(Deed::DropNamespace),
        6 => (place(&NAMES), policy(), value(), prop::bool::weighted(0.2)).prop_map(
            |(at, policy, value, immutable)| Deed::Source { at, policy, value, immutable }
        ),
        1 => (place(&NAMES), value()).prop_map(|(at, value)| Deed::SourceAnew { at, value }),
        1 => place(&NAMES).prop_map(Deed::Unlabel),
        1 => place(&NAMES).prop_map(Deed::Finalize),
        2 => prop_oneof![place(&NAMES), place(&COMPANIONS)].prop_map(Deed::Delete),
        2 => (place(&COMPANIONS), prop::collection::vec(traits, 0..3))
            .prop_map(|(at, traits)| Deed::Stranger(at, traits)),
        6 => (place(&COMPANIONS), prop::collection::vec(edits, 1..3))
            .prop_map(|(at, edits)| Deed::Edit(at, edits)),
        1 => Just(Deed::CollectGarbage),
        1 => Just(Deed::Restart),
        6 => place(&NAMES).prop_map(Deed::Look),
    ]
}

fn history() -> impl Strategy<Value = Vec<Deed>> {
    prop::collection::vec(deed(), 1..40)
}

fn key((kind, namespace, name): Place) -> ObjectKey {
    ObjectKey::new(kind, namespace, name)
}

fn draft((kind, namespace, name): Place) -> ObjectBuilder {
    let draft = object(namespace, name);
    if kind == Kind::Secret { draft.of_type("Opaque") } else { draft }
}

/// Lets somebody do something, `look` for what the mirror does in between.
fn perform(cluster: &mut Cluster, deed: Deed, look: &mut impl FnMut(&mut Cluster, &ObjectKey)) {
    match deed {
        Deed::Namespace(name, nature) => cluster.namespace(match nature {
            Nature::Plain => namespace(name),
            Nature::Excluded => namespace(name).label("exclude", "true"),
            Nature::Accepting => namespace(name).annotate("accept-from", "home"),
            Nature::Terminating => namespace(name).terminating(),
            Nature::Dev => {
                let mut draft = namespace(name);
                draft.object.metadata.labels.insert("env".to_owned(), "dev".to_owned());
                draft
            }
        }),
        Deed::DropNamespace(name) => cluster.drop_namespace(name),
        Deed::Source { at, policy, value, immutable } => {
            let base = draft(at).label("managed", "true").label("example.com/l", value).data("x", value);
            let base = if immutable { base.immutable() } else { base };
            let wanted = policy.iter().fold(base, |draft, (key, value)| draft.annotate(key, value));
            cluster.put(wanted);
        }
        Deed::SourceAnew { at, value } => {
            cluster.put_anew(draft(at).label("managed", "true").data("x", value));
        }
        Deed::Unlabel(at) => cluster.edit(&key(at), |object| object.metadata.labels.clear()),
        Deed::Finalize(at) => {
            cluster.edit(&key(at), |object| object.metadata.finalizers.push("example.com/f".to_owned()));
            cluster.delete(&key(at));
        }
        Deed::Delete(at) => cluster.delete(&key(at)),
        Deed::Stranger(at, traits) => {
            let stranger = traits.iter().fold(draft(at).data("theirs", "1"), |draft, which| match which {
                Trait::Labelled => draft.label("companion", "true"),
                Trait::OfHomeA => draft.of("home/a"),
                Trait::Controlled => draft.controlled_by("Deployment", "another"),
                Trait::Immutable => draft.immutable(),
                Trait::Finalizer => draft.finalizer("example.com/f"),
                Trait::Managed => draft.label("managed", "true"),
            });
            if cluster.object(&key(at)).is_none() {
                cluster.put(stranger);
            }
        }
        Deed::Edit(at, edits) => {
            cluster.edit(&key(at), |object| edits.into_iter().for_each(|edit| edit.perform(object)));
        }
        Deed::CollectGarbage => cluster.collect_garbage(),
        Deed::Restart => cluster.restart(),
        Deed::Look(at) => look(cluster, &key(at)),
    }
}

impl Edit {
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

fn run(history: Vec<Deed>, mut look: impl FnMut(&mut Cluster, &ObjectKey)) -> Cluster {
    let mut cluster = Cluster::with(&NAMESPACES);
    for deed in history {
        perform(&mut cluster, deed, &mut look);
    }
    cluster
}

fn just_settle(cluster: &mut Cluster, key: &ObjectKey) {
    cluster.reconcile(key);
}

/// What a plan touches of what is there.
fn touched(plan: &Plan) -> impl Iterator<Item = (&ObjectKey, bool)> {
    plan.changes.iter().filter_map(|change| match &change.action {
        Action::Create { .. } => None,
        Action::Update { reason, .. } | Action::Recreate { reason, .. } => {
            Some((&change.at, *reason == WriteReason::Adopted))
        }
        Action::Delete { .. } => Some((&change.at, false)),
    })
}

/// Places where a fresh process cannot know what the old one knew: companions of sources that have nothing written
/// (paused, terminating, refused) and whose marks no longer say whose they are. And one where the old one is behind:
/// of what bears no label, no watch tells it that it went.
fn unclear(cluster: &Cluster) -> Vec<ObjectKey> {
    let everywhere = Kind::ALL.into_iter().flat_map(|kind| {
        NAMESPACES.into_iter().flat_map(move |namespace| COMPANIONS.map(|name| key((kind, namespace, name))))
    });
    let named = |at: &ObjectKey| {
        ObjectKey::parse(at.kind, cluster.object(at)?.metadata.annotations.get(&full("source"))?)
    };
    let is_unclear = |at: &ObjectKey| {
        cluster.companion(at).is_some_and(|found| !found.labelled || found.source != named(at))
            || cluster.is_known_by_entry_only(at)
    };
    everywhere.filter(is_unclear).collect()
}

/// Every source is looked at until nothing is left to do but what is obstructed.
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
    Err(TestCaseError::fail("the mirror does not come to rest"))
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn after_a_plan_is_carried_out_there_is_nothing_left_to_do(history in history()) {
        let mut cluster = run(history, just_settle);
        for key in cluster.all_sources() {
            let plan = cluster.plan(&key);
            // What a finalizer holds up goes first and is made again after.
            let is_held = |at: &ObjectKey| {
                cluster.object(at).is_some_and(|there| !there.metadata.finalizers.is_empty())
            };
            let places = plan.changes.iter().map(|change| change.at.clone());
            let held: Vec<ObjectKey> = places.filter(is_held).collect();
            let obstacles = cluster.apply(&key, plan);
            let is_open = |at: &ObjectKey| !held.contains(at) && obstacles.iter().all(|(other, _)| other != at);
            let again = cluster.plan(&key);
            let left = again.changes.iter().any(|change| is_open(&change.at));
            prop_assert!(!left, "{key}: {:?}", planned(&again));
        }
    }

    #[test]
    fn the_mirror_comes_to_rest_and_a_fresh_process_finds_nothing_to_do(history in history()) {
        let mut cluster = run(history, just_settle);
        converge(&mut cluster)?;
        let unclear = unclear(&cluster);
        let places = |cluster: &Cluster, key: &ObjectKey| {
            let places = cluster.plan(key).changes.into_iter().map(|change| change.at);
            places.filter(|at| !unclear.contains(at)).collect::<Vec<_>>()
        };
        let before: BTreeMap<ObjectKey, Vec<ObjectKey>> =
            cluster.all_sources().into_iter().map(|key| (key.clone(), places(&cluster, &key))).collect();
        cluster.restart();
        for key in cluster.all_sources() {
            // Creates that meet a stranger are all that is ever left, before and after.
            let after = places(&cluster, &key);
            let there = |at: &ObjectKey| cluster.companion(at).is_some();
            prop_assert!(!after.iter().any(there), "{key}: {:?}", planned(&cluster.plan(&key)));
            prop_assert_eq!(after, before.get(&key).cloned().unwrap_or_default(), "{}", key);
        }
    }

    #[test]
    fn nothing_is_touched_that_does_not_bear_our_marks_for_that_source(history in history()) {
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
        };
        let cluster = run(history, |cluster, key| {
            check(cluster, key);
            cluster.reconcile(key);
        });
        cluster.all_sources().iter().for_each(|key| check(&cluster, key));
    }

    #[test]
    fn two_sources_never_both_write_an_object_that_is_there(history in history()) {
        let cluster = run(history, just_settle);
        let mut writers: BTreeMap<ObjectKey, ObjectKey> = BTreeMap::new();
        for key in cluster.all_sources() {
            for (at, adopted) in touched(&cluster.plan(&key)) {
                // Whose these are is open: the first to write has them, the version turns the other away.
                if adopted {
                    continue;
                }
                let other = writers.insert(at.clone(), key.clone());
                prop_assert!(other.is_none(), "{at}: {key} and {}", other.unwrap());
            }
        }
    }
}
