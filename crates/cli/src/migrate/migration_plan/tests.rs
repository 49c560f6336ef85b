use super::*;
use lockstep_core::{
    object::Kind,
    testing::{ObjectBuilder, keys, namespace, object, world},
};

const REPLICATOR: &str = "replicator.v1.mittwald.de";
const REFLECTOR: &str = "reflector.v1.k8s.emberstack.com";

/// A Secret with content, and these annotations of a tool.
fn secret(place: &str, prefix: &str, annotations: &[(&str, &str)]) -> ObjectBuilder {
    let (home, name) = place.split_once('/').unwrap();
    let draft = object(home, name).of_type("Opaque").data("a", "MQ==").uid(&format!("uid-{home}-{name}"));
    annotations.iter().fold(draft, |draft, (key, value)| draft.annotate(&format!("{prefix}/{key}"), value))
}

fn replicator(place: &str, annotations: &[(&str, &str)]) -> ObjectBuilder {
    secret(place, REPLICATOR, annotations)
}

fn reflector(place: &str, annotations: &[(&str, &str)]) -> ObjectBuilder {
    secret(place, REFLECTOR, annotations)
}

/// A copy as kubernetes-replicator pushes it.
fn pushed(place: &str) -> ObjectBuilder {
    replicator(
        place,
        &[
            ("replicated-at", "2026-01-01T00:00:00Z"),
            ("replicated-from-version", "7"),
            ("replicated-keys", "a"),
        ],
    )
}

/// A copy as Reflector pushes it.
fn reflected(place: &str, source: &str) -> ObjectBuilder {
    reflector(
        place,
        &[
            ("auto-reflects", "True"),
            ("reflects", source),
            ("reflected-version", "7"),
            ("reflected-at", "2026-01-01T00:00:00.0000000+00:00"),
        ],
    )
}

fn default_namespaces() -> Vec<ObjectBuilder> {
    let mut all: Vec<ObjectBuilder> = ["home", "team-a", "team-b", "other", "kube-system", "lockstep-system"]
        .iter()
        .map(|name| namespace(name).label("kubernetes.io/metadata.name", name))
        .collect();
    all.push(namespace("closed").label("exclude", "true"));
    all.push(namespace("labelled").label("env/name", "dev"));
    all
}

/// The plan for a cluster with these objects.
fn plan_with(
    tool: Tool,
    objects: Vec<ObjectBuilder>,
    namespaces: Vec<ObjectBuilder>,
    allow_all: bool,
    only: Option<&str>,
) -> MigrationPlan {
    let mut world = world();
    for namespace in &namespaces {
        world.apply_namespace(namespace.meta());
    }
    let namespaces =
        namespaces.iter().map(|draft| (draft.meta().name.clone(), draft.meta().clone())).collect();
    let (keys, only) = (keys(), only.map(Pattern::new));
    let (keys, namespaces) = (&keys, &namespaces);
    let context = Context { tool, keys, world: &world, namespaces, allow_all, only: only.as_ref() };
    let metas = objects.iter().map(|draft| (draft.key(), draft.meta().clone())).collect();
    let live: BTreeMap<ObjectKey, Object> =
        objects.into_iter().map(|draft| (draft.key(), draft.object())).collect();
    let (mut plan, sources) = MigrationPlan::find(&context, &metas);
    for source in sources {
        let key = &source.key;
        let is_read = |at: &ObjectKey| at.kind == key.kind && *at.name == *source.copy_name || at == key;
        let found =
            live.iter().filter(|(at, _)| is_read(at)).map(|(at, object)| (at.clone(), object.clone()));
        plan.add(&context, &source, found.collect());
    }
    plan.finish(&context)
}

fn plan_of(tool: Tool, objects: Vec<ObjectBuilder>) -> MigrationPlan {
    plan_with(tool, objects, default_namespaces(), false, None)
}

/// Our annotations for the only source, without the domain and `adopt`.
fn written(plan: &MigrationPlan) -> String {
    assert_eq!((plan.moves.len(), plan.by_hand.len()), (1, 0), "{plan:?}");
    let ours = plan.moves[0].entry.written.iter().filter(|(key, _)| **key != keys().adopt);
    assert_eq!(plan.moves[0].entry.written[&keys().adopt], "true");
    let line = |(key, value): (&String, &String)| format!("{}: {value}", key.split_once('/').unwrap().1);
    ours.map(line).collect::<Vec<_>>().join("; ")
}

fn places(copies: &[ObjectEntry]) -> Vec<String> {
    copies.iter().map(|copy| copy.key.to_string()).collect()
}

/// Why the only object is left to a person.
fn reason(plan: &MigrationPlan) -> &NotMovable {
    assert_eq!((plan.moves.len(), plan.by_hand.len()), (0, 1), "{plan:?}");
    assert_eq!(plan.by_hand[0].reasons.len(), 1, "{plan:?}");
    &plan.by_hand[0].reasons[0]
}

#[test]
fn pushes_of_replicator_become_targets() {
    for (annotations, expected) in [
        (
            &[("replicate-to", "team-a,team-b")][..],
            "companion-name: =; copy-labels: *; target-namespaces: team-a,team-b",
        ),
        (&[("replicate-to", "team-.*")], "companion-name: =; copy-labels: *; target-namespaces: team-*"),
        (
            &[("replicate-to", "home,team-a"), ("strip-labels", "true")],
            "companion-name: =; target-namespaces: team-a",
        ),
        // Its value does not matter to the tool.
        (
            &[("replicate-to", "team-a"), ("strip-labels", "false")],
            "companion-name: =; target-namespaces: team-a",
        ),
        (
            &[("replicate-to-matching", "env/name=dev\n")],
            "companion-name: =; copy-labels: *; target-selector: env/name=dev",
        ),
        (&[("replicate-to-matching", "")], "companion-name: =; copy-labels: *; target-namespaces: *"),
        (
            &[("replicate-to", "other"), ("replicate-to-matching", "env/name in (dev)")],
            "companion-name: =; copy-labels: *; target-namespaces: other; target-selector: env/name in (dev)",
        ),
    ] {
        let plan = plan_of(Tool::Replicator, vec![replicator("home/db", annotations)]);
        assert_eq!(written(&plan), expected, "{annotations:?}");
    }
}

#[test]
fn pushes_of_reflector_become_what_both_lists_allow() {
    let on = [("reflection-allowed", "true"), ("reflection-auto-enabled", "true")];
    for (annotations, expected) in [
        (&[][..], "companion-name: =; target-namespaces: *"),
        (&[("reflection-auto-namespaces", "")], "companion-name: =; target-namespaces: *"),
        (&[("reflection-auto-namespaces", "team-.*")], "companion-name: =; target-namespaces: team-*"),
        (
            &[("reflection-allowed-namespaces", "team-a,team-b")],
            "companion-name: =; target-namespaces: team-a,team-b",
        ),
        (
            &[("reflection-allowed-namespaces", "team-.*,x"), ("reflection-auto-namespaces", "team-a")],
            "companion-name: =; target-namespaces: team-a",
        ),
        (
            &[("reflection-auto-namespaces-selector", "env/name=dev")],
            "companion-name: =; target-selector: env/name=dev",
        ),
        (
            &[
                ("reflection-auto-namespaces-selector", "env/name=dev"),
                ("reflection-allowed-namespaces", ".*"),
            ],
            "companion-name: =; target-selector: env/name=dev",
        ),
        (
            &[
                ("reflection-auto-namespaces-selector", "env/name=dev"),
                ("reflection-allowed-namespaces-selector", "env/name=dev"),
                ("reflection-auto-namespaces", "team-.*"),
                ("reflection-allowed-namespaces", "team-a"),
            ],
            "companion-name: =; target-namespaces: team-a; target-selector: env/name=dev",
        ),
        (
            &[
                ("reflection-auto-namespaces", "team-a"),
                ("reflection-allowed-namespaces", "team-.*"),
                ("reflection-allowed-namespaces-selector", "env/name=dev"),
            ],
            "companion-name: =; target-namespaces: team-a",
        ),
    ] {
        let plan = plan_of(Tool::Reflector, vec![reflector("home/db", &[&on, annotations].concat())]);
        assert_eq!(written(&plan), expected, "{annotations:?}");
    }
}

#[test]
fn copies_that_pull_become_targets_of_their_source() {
    let allowed = [("replication-allowed", "true"), ("replication-allowed-namespaces", "team-.*,home")];
    let pull =
        |place: &str| replicator(place, &[("replicate-from", "home/db"), ("replicated-from-version", "7")]);
    for (copies, expected) in [
        (vec!["team-a/db", "team-b/db"], "companion-name: =; target-namespaces: team-a,team-b"),
        (vec!["team-a/copy", "home/copy"], "companion-name: copy; target-namespaces: .,team-a"),
        (vec!["team-a/db-synced"], "target-namespaces: team-a"),
    ] {
        let mut objects = vec![replicator("home/db", &allowed)];
        objects.extend(copies.iter().map(|place| pull(place)));
        let plan = plan_of(Tool::Replicator, objects);
        assert_eq!(written(&plan), expected, "{copies:?}");
        assert_eq!(plan.moves[0].entry.copies.len(), copies.len());
    }
    // Reflector leaves copies that people created when the source is deleted.
    let plan = plan_of(
        Tool::Reflector,
        vec![
            reflector("home/db", &[("reflection-allowed", "true")]),
            reflector(
                "team-a/mine",
                &[("reflects", "home/db"), ("auto-reflects", "False"), ("reflected-version", "7")],
            ),
        ],
    );
    assert_eq!(written(&plan), "companion-name: mine; target-namespaces: team-a; when-removed: keep");
}

#[test]
fn source_that_pushes_and_is_pulled_gets_both_kinds_of_targets() {
    let source = replicator(
        "home/db",
        &[
            ("replicate-to", "team-.*"),
            ("replication-allowed", "1"),
            ("replication-allowed-namespaces", ".*"),
        ],
    );
    let pull =
        |place: &str| replicator(place, &[("replicate-from", "home/db"), ("replicated-from-version", "7")]);
    let plan =
        plan_of(Tool::Replicator, vec![source, pushed("team-a/db"), pull("team-b/db"), pull("other/db")]);
    assert_eq!(written(&plan), "companion-name: =; copy-labels: *; target-namespaces: team-*,other");
    assert_eq!(places(&plan.moves[0].entry.copies), ["other/db", "team-a/db", "team-b/db"]);
    assert_eq!(plan.moves[0].notes, ["its pulled copies get the labels of the source, too"]);
}

#[test]
fn copies_are_adopted_missing_ones_are_created_and_different_content_is_counted() {
    let source = || replicator("home/db", &[("replicate-to", "team-.*,other")]);
    let plan =
        plan_of(Tool::Replicator, vec![source(), pushed("team-a/db"), pushed("team-b/db").data("a", "b2xk")]);
    let moved = &plan.moves[0];
    assert_eq!(
        (places(&moved.entry.copies), moved.outdated),
        (vec!["team-a/db".to_owned(), "team-b/db".to_owned()], 1)
    );
    assert_eq!(moved.creates.iter().map(ToString::to_string).collect::<Vec<_>>(), ["other/db"]);
    assert_eq!(moved.entry.object.removed.len(), 1);
    assert_eq!(moved.entry.copies[0].removed.len(), 3);
    let accepted: Vec<_> = plan.namespaces.iter().map(|entry| (&*entry.name, &*entry.during)).collect();
    assert_eq!(accepted, [("team-a", "home"), ("team-b", "home")]);

    // What a namespace accepts already is kept.
    let mut namespaces = default_namespaces();
    namespaces[1] = namespaces[1].clone().annotate("accept-adopt-from", "x-*");
    namespaces[2] = namespaces[2].clone().annotate("accept-adopt-from", "ho*");
    let objects = vec![source(), pushed("team-a/db"), pushed("team-b/db")];
    let plan = plan_with(Tool::Replicator, objects, namespaces, false, None);
    let accepted: Vec<_> =
        plan.namespaces.iter().map(|entry| (entry.before.as_deref(), &*entry.during)).collect();
    assert_eq!(accepted, [(Some("x-*"), "x-*,home")]);
}

#[test]
fn what_cannot_be_said_with_our_annotations_is_left_to_a_person() {
    let on = [("reflection-allowed", "true"), ("reflection-auto-enabled", "true")];
    for (tool, draft, expected) in [
        (
            Tool::Replicator,
            replicator("home/db", &[("replicate-to", "app-[0-9]+")]),
            "replicate-to: the regular expression `app-[0-9]+` is not supported",
        ),
        (
            Tool::Replicator,
            replicator("home/db", &[("replicate-to-matching", "a>5")]),
            "replicate-to-matching: `a>5` is not a requirement such as",
        ),
        (
            Tool::Replicator,
            replicator("home/db", &[("replicate-to", "a"), ("keep-owner-references", "true")]),
            "keep-owner-references: ",
        ),
        (
            Tool::Replicator,
            replicator("home/db", &[("replicate-to", "home")]),
            "it names no namespace but its own",
        ),
        (
            Tool::Replicator,
            replicator("home/db", &[("replication-allowed", "true")]),
            "it may be pulled, and no copy",
        ),
        (Tool::Replicator, replicator("home/db", &[("replicate-from", "nowhere")]), "it names no source"),
        (
            Tool::Replicator,
            replicator("home/db", &[("replicate-from", "home/gone")]),
            "its source home/gone does not exist",
        ),
        (
            Tool::Replicator,
            replicator("home/db", &[("replicate-to", "team-a")]).label("managed", "true"),
            "it already has labels or annotations of Lockstep",
        ),
        (
            Tool::Replicator,
            replicator("home/db", &[("replicate-to", "team-a")]).terminating(),
            "it is being deleted",
        ),
        (
            Tool::Replicator,
            replicator("home/db", &[("replicate-to", "team-a")])
                .of_type("kubernetes.io/service-account-token"),
            "Secrets of type kubernetes.io/service-account-token",
        ),
        (
            Tool::Replicator,
            replicator("lockstep-system/db", &[("replicate-to", "team-a")]),
            "sources are not allowed in Lockstep's own namespace",
        ),
        (
            Tool::Reflector,
            reflector(
                "home/db",
                &[
                    &on[..],
                    &[("reflection-auto-namespaces", "a.*"), ("reflection-allowed-namespaces", ".*b")],
                ]
                .concat(),
            ),
            "reflection-auto-namespaces and reflection-allowed-namespaces overlap",
        ),
        // The selector may match namespaces that are not permitted.
        (
            Tool::Reflector,
            reflector(
                "home/db",
                &[
                    &on[..],
                    &[
                        ("reflection-auto-namespaces-selector", "env/name=dev"),
                        ("reflection-allowed-namespaces", "team-.*"),
                    ],
                ]
                .concat(),
            ),
            "reflection-auto-namespaces and reflection-allowed-namespaces overlap",
        ),
        // A list without items names no namespace, which is not the same as no list.
        (
            Tool::Reflector,
            reflector("home/db", &[&on[..], &[("reflection-auto-namespaces", ",")]].concat()),
            "it may be pulled, and no copy",
        ),
        (
            Tool::Reflector,
            reflector("home/db", &[&on[..], &[("reflection-allowed-namespaces", "a|ab")]].concat()),
            "reflection-allowed-namespaces: the regular expression `a|ab` is not supported",
        ),
    ] {
        let plan = plan_of(tool, vec![draft]);
        let text = reason(&plan).to_string();
        assert!(text.starts_with(expected), "{text}");
    }
}

#[test]
fn copy_that_cannot_be_adopted_in_place_keeps_its_source_from_moving() {
    let at = || ObjectKey::new(Kind::Secret, "team-a", "db");
    let managed = |key: &str| {
        replicator("team-a/db", &[("replicate-from", "home/db"), ("replicated-from-version", "7")])
            .annotate(key, "x")
    };
    for (copy, expected) in [
        (secret("team-a/db", REPLICATOR, &[]), NotMovable::Foreign { at: at() }),
        (replicator("team-a/db", &[("replicate-to", "x")]), NotMovable::Foreign { at: at() }),
        (pushed("team-a/db").controlled_by("Deployment", "u"), NotMovable::Bound { at: at() }),
        (pushed("team-a/db").finalizer("x/y"), NotMovable::Bound { at: at() }),
        (pushed("team-a/db").terminating(), NotMovable::Bound { at: at() }),
        (pushed("team-a/db").of_type("other"), NotMovable::Recreate { at: at() }),
        (pushed("team-a/db").immutable(), NotMovable::Recreate { at: at() }),
        (pushed("team-a/db").data("own", "MQ=="), NotMovable::ExtraKeys { at: at(), keys: "own".to_owned() }),
        (pushed("team-a/db").label("companion", "true").of("else/where"), NotMovable::Companion { at: at() }),
        (
            managed("meta.helm.sh/release-name"),
            NotMovable::ManagedCopy { at: at(), by: "the Helm release x".to_owned() },
        ),
        (
            managed("argocd.argoproj.io/tracking-id"),
            NotMovable::ManagedCopy { at: at(), by: "an Argo CD application".to_owned() },
        ),
    ] {
        let source = replicator(
            "home/db",
            &[
                ("replicate-to", "team-a"),
                ("replication-allowed", "true"),
                ("replication-allowed-namespaces", ".*"),
            ],
        );
        let plan = plan_of(Tool::Replicator, vec![source, copy]);
        let item = plan.by_hand.iter().find(|item| item.object.to_string() == "home/db").unwrap();
        assert_eq!(item.reasons, [expected]);
    }
    // A copy of another source of Reflector is no copy of this one.
    let source = reflector("home/db", &[("reflection-allowed", "true"), ("reflection-auto-enabled", "true")]);
    let plan = plan_of(Tool::Reflector, vec![source, reflected("team-a/db", "else/db")]);
    assert_eq!(reason(&plan), &NotMovable::Foreign { at: at() });
}

#[test]
fn immutable_copy_of_an_immutable_source_moves() {
    let source = replicator("home/db", &[("replicate-to", "team-a")]).immutable();
    let plan = plan_of(Tool::Replicator, vec![source, pushed("team-a/db").immutable()]);
    assert_eq!(places(&plan.moves[0].entry.copies), ["team-a/db"]);
}

#[test]
fn copies_in_namespaces_that_take_no_companions_need_a_decision() {
    let source = || replicator("home/db", &[("replicate-to", ".*")]);
    // A pattern that matches such namespaces is no problem by itself.
    assert_eq!(plan_of(Tool::Replicator, vec![source()]).moves.len(), 1);
    let plan = plan_of(Tool::Replicator, vec![source(), pushed("kube-system/db")]);
    let text = reason(&plan).to_string();
    assert!(text.contains("kubectl annotate namespace kube-system workshop.io/accept-from=home"), "{text}");
    let plan = plan_of(Tool::Replicator, vec![source(), pushed("closed/db")]);
    assert!(matches!(reason(&plan), NotMovable::Excluded { .. }));
    // Nobody needs a copy in Lockstep's own namespace.
    let plan = plan_of(Tool::Replicator, vec![source(), pushed("lockstep-system/db")]);
    assert!(plan.moves[0].notes[0].starts_with("lockstep-system/db is in Lockstep's own namespace"));
    // Accepted, it moves as any other.
    let mut namespaces = default_namespaces();
    namespaces[4] = namespaces[4].clone().annotate("accept-from", "home");
    let plan = plan_with(Tool::Replicator, vec![source(), pushed("kube-system/db")], namespaces, false, None);
    assert_eq!(places(&plan.moves[0].entry.copies), ["kube-system/db"]);
}

#[test]
fn pull_needs_permission_of_the_source() {
    let pull = || replicator("team-a/db", &[("replicate-from", "home/db")]);
    let yes = ("replication-allowed", "true");
    for (source, permitted) in [
        (&[][..], false),
        (&[yes], false),
        (&[("replication-allowed", "no"), ("replication-allowed-namespaces", ".*")], false),
        (&[yes, ("replication-allowed-namespaces", "team-b")], false),
        (&[yes, ("replication-allowed-namespaces", "team-.*")], true),
    ] {
        let objects = || vec![replicator("home/db", source), pull()];
        let plan = plan_of(Tool::Replicator, objects());
        assert_eq!(plan.moves.len(), usize::from(permitted), "{source:?}");
        let refused = plan.by_hand.iter().any(|item| matches!(item.reasons[0], NotMovable::NotPermitted(_)));
        assert_eq!(refused, !permitted, "{source:?}");
        let plan = plan_with(Tool::Replicator, objects(), default_namespaces(), true, None);
        assert_eq!(plan.moves.len(), 1, "--allow-all: {source:?}");
    }
    // What cannot be read exactly permits nothing.
    let source = replicator("home/db", &[yes, ("replication-allowed-namespaces", "team-[a-z]+")]);
    let plan = plan_of(Tool::Replicator, vec![source, pull()]);
    let copy = plan.by_hand.iter().find(|item| *item.object.namespace == *"team-a").unwrap();
    let text = copy.reasons[0].to_string();
    let expected =
        "its source home/db has replication-allowed-namespaces: the regular expression `team-[a-z]+`";
    assert!(plan.moves.is_empty() && text.starts_with(expected), "{text}");
    // ConfigMaps need none.
    let draft = |place: &str| {
        let (home, name) = place.split_once('/').unwrap();
        object(home, name).data("a", "1")
    };
    let copy = draft("team-a/db").annotate(&format!("{REPLICATOR}/replicate-from"), "home/db");
    assert_eq!(plan_of(Tool::Replicator, vec![draft("home/db"), copy]).moves.len(), 1);

    let copy = || reflector("team-a/db", &[("reflects", "home/db"), ("reflected-version", "7")]);
    for (source, permitted) in [
        (&[][..], false),
        (&[("reflection-allowed", "False")], false),
        (&[("reflection-allowed", "True")], true),
        (&[("reflection-allowed", "true"), ("reflection-allowed-namespaces", "team-b")], false),
        (
            &[("reflection-allowed", "true"), ("reflection-allowed-namespaces-selector", "env/name=dev")],
            false,
        ),
        (
            &[
                ("reflection-allowed", "true"),
                ("reflection-allowed-namespaces-selector", "kubernetes.io/metadata.name=team-a"),
            ],
            true,
        ),
    ] {
        let plan = plan_of(Tool::Reflector, vec![reflector("home/db", source), copy()]);
        assert_eq!(plan.moves.len(), usize::from(permitted), "{source:?}");
    }
}

#[test]
fn copies_of_copies_and_copies_under_several_names_are_left_to_a_person() {
    let pull = |place: &str, from: &str| {
        replicator(place, &[("replicate-from", from), ("replicated-from-version", "7")])
    };
    let plan = plan_with(
        Tool::Replicator,
        vec![
            replicator("home/db", &[("replicate-to", "team-a")]),
            pushed("team-a/db"),
            pull("team-b/db", "team-a/db"),
        ],
        default_namespaces(),
        true,
        None,
    );
    assert_eq!((plan.moves.len(), plan.by_hand.len()), (1, 1));
    assert!(matches!(plan.by_hand[0].reasons[0], NotMovable::SourceIsCopy(_)));

    let plan = plan_with(
        Tool::Replicator,
        vec![replicator("home/db", &[("replicate-to", "other")]), pull("team-a/x", "home/db")],
        default_namespaces(),
        true,
        None,
    );
    assert_eq!(reason(&plan), &NotMovable::Names("db, x".to_owned()));
}

#[test]
fn sources_that_want_the_same_copy_are_left_to_a_person() {
    let plan = plan_of(
        Tool::Replicator,
        vec![
            replicator("home/db", &[("replicate-to", "team-a")]),
            replicator("other/db", &[("replicate-to", "team-.*")]),
            pushed("team-a/db"),
        ],
    );
    assert!(plan.moves.is_empty() && plan.namespaces.is_empty());
    assert!(
        plan.by_hand.iter().all(|item| matches!(item.reasons[0], NotMovable::Contested { .. })),
        "{plan:?}"
    );
    assert_eq!(plan.by_hand.len(), 2);
}

#[test]
fn only_limits_the_plan_and_annotations_of_the_other_tool_are_ignored() {
    let objects = || {
        vec![
            replicator("home/db", &[("replicate-to", "team-a")]),
            pushed("team-a/db"),
            replicator("other/key", &[("replicate-to", "team-a")]),
            pushed("team-b/orphan"),
        ]
    };
    let plan = plan_of(Tool::Replicator, objects());
    assert_eq!((plan.moves.len(), plan.by_hand.len()), (2, 0));
    let plan = plan_with(Tool::Replicator, objects(), default_namespaces(), false, Some("home/*"));
    assert_eq!(plan.moves.len(), 1);
    assert_eq!(plan_of(Tool::Reflector, objects()), MigrationPlan::default());
}

#[test]
fn source_that_another_tool_writes_moves_with_a_note() {
    let source = replicator("home/db", &[("replicate-to", "team-a")]);
    for (key, by) in [
        ("meta.helm.sh/release-name", "the Helm release x"),
        ("cert-manager.io/certificate-name", "the Certificate x (secretTemplate)"),
    ] {
        let plan = plan_of(Tool::Replicator, vec![source.clone().annotate(key, "x")]);
        assert!(plan.moves[0].notes[0].starts_with(&format!("it is part of {by}: ")), "{plan:?}");
    }
    // Labels come to a pushed copy from its source, and say nothing about the copy.
    let flux = "kustomize.toolkit.fluxcd.io/name";
    let plan = plan_of(Tool::Replicator, vec![source.label(flux, "x"), pushed("team-a/db").label(flux, "x")]);
    assert_eq!(places(&plan.moves[0].entry.copies), ["team-a/db"]);
}

#[test]
fn acceptance_that_cannot_be_extended_is_left_to_a_person() {
    let mut namespaces = default_namespaces();
    namespaces[1] = namespaces[1].clone().annotate("accept-adopt-from", "*,!home");
    let objects = vec![replicator("home/db", &[("replicate-to", "team-a")]), pushed("team-a/db")];
    let plan = plan_with(Tool::Replicator, objects, namespaces, false, None);
    assert!(matches!(reason(&plan), NotMovable::Adoption { .. }));
    assert!(plan.namespaces.is_empty());
}
