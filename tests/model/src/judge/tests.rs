//! The judge accepts what the reference says, and nothing else.

use super::*;
use crate::object::Strings;

const DOMAIN: &str = "workshop.io";

struct Scene {
    judge: Judge,
    version: u64,
}

fn configmap(namespace: &str, name: &str) -> Key {
    Key::new(Kind::ConfigMap, namespace, name)
}

fn strings(pairs: &[(&str, &str)]) -> Strings {
    let own = |key: &str| if key.contains('/') { key.to_owned() } else { format!("{DOMAIN}/{key}") };
    pairs.iter().map(|(key, value)| (own(key), (*value).to_owned())).collect()
}

/// A source `home/a` with these annotations.
fn source(annotations: &[(&str, &str)], value: &str) -> Object {
    Object {
        labels: strings(&[("managed", "true")]),
        annotations: strings(annotations),
        data: [("x".to_owned(), value.to_owned())].into(),
        uid: "uid-a".to_owned(),
        ..Object::default()
    }
}

impl Scene {
    fn new() -> Self {
        let mut scene = Self { judge: Judge::new(Names::new(DOMAIN, "")), version: 0 };
        for name in ["home", "away"] {
            let labels = [("kubernetes.io/metadata.name".to_owned(), name.to_owned())].into();
            scene.put(Writer::Person, &Key::namespace(name), Object { labels, ..Object::default() });
        }
        scene
    }

    fn put(&mut self, by: Writer, at: &Key, mut object: Object) {
        self.version += 1;
        object.version = self.version.to_string();
        if object.uid.is_empty() {
            object.uid = format!("uid-{}", self.version);
        }
        self.judge.record(Change { by, at: at.clone(), after: Some(object) });
    }

    fn delete(&mut self, by: Writer, at: &Key) {
        self.judge.record(Change { by, at: at.clone(), after: None });
    }

    fn edit(&mut self, by: Writer, at: &Key, edit: impl FnOnce(&mut Object)) {
        let mut object = self.judge.now()[at].clone();
        edit(&mut object);
        self.put(by, at, object);
    }

    /// Lockstep writes the companion that the model expects.
    fn mirror(&mut self, at: &Key) {
        let key = configmap("home", "a");
        let object = self.judge.now()[&key].clone();
        let Reading::Source(policy) = Reading::of(&self.judge.names, &key, &object) else {
            panic!("no source")
        };
        let right = policy.companion_in(&self.judge.names, &key, &object, &at.namespace);
        let mut annotations = right.annotations;
        annotations.insert(format!("{DOMAIN}/source-checksum"), "0123456789ab".to_owned());
        let uid = self.judge.now().get(at).map(|found| found.uid.clone()).unwrap_or_default();
        let companion = Object {
            labels: right.labels,
            annotations,
            owners: right.owners,
            data: right.data,
            uid,
            managers: vec![self.judge.names.manager()],
            ..Object::default()
        };
        self.put(Writer::Lockstep, at, companion);
    }

    fn unsettled(&self) -> String {
        self.judge.unsettled().iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    }

    fn violations(&self) -> String {
        self.judge.violations().iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
    }

    /// `home/a` is mirrored to `home` and `away`.
    fn mirrored(annotations: &[(&str, &str)]) -> Self {
        let mut scene = Self::new();
        let all = [&[("target-namespaces", ".,away")], annotations].concat();
        scene.put(Writer::Person, &configmap("home", "a"), source(&all, "1"));
        scene.mirror(&configmap("home", "a-synced"));
        scene.mirror(&configmap("away", "a-synced"));
        assert_eq!((scene.unsettled(), scene.violations()), (String::new(), String::new()));
        scene
    }
}

#[test]
fn missing_outdated_and_edited_companions_are_unsettled() {
    let mut scene = Scene::mirrored(&[]);
    let away = configmap("away", "a-synced");
    scene.delete(Writer::Person, &away);
    assert_eq!(scene.unsettled(), "ConfigMap away/a-synced, companion of ConfigMap home/a: missing");
    scene.mirror(&away);
    assert_eq!(scene.unsettled(), "");

    scene.edit(Writer::Person, &configmap("home", "a"), |source| {
        drop(source.data.insert("x".into(), "2".into()))
    });
    assert_eq!(scene.unsettled().lines().count(), 2, "{}", scene.unsettled());
    scene.mirror(&configmap("home", "a-synced"));
    scene.mirror(&away);
    assert_eq!(scene.unsettled(), "");

    for edit in [
        |o: &mut Object| drop(o.labels.remove("workshop.io/companion")),
        |o: &mut Object| o.annotations.clear(),
        |o: &mut Object| o.finalizers.push("f".to_owned()),
        |o: &mut Object| drop(o.labels.insert("workshop.io/managed".into(), "true".into())),
    ] {
        scene.edit(Writer::Person, &away, edit);
        assert!(scene.unsettled().starts_with("ConfigMap away/a-synced"), "{}", scene.unsettled());
        scene.mirror(&away);
        assert_eq!(scene.unsettled(), "");
    }
    // What others add stays, whatever its name is. What Lockstep once copied does not.
    for label in ["others.example/x", "example.com/x"] {
        scene.edit(Writer::Person, &away, |o| drop(o.labels.insert(label.into(), "1".into())));
    }
    assert_eq!((scene.unsettled(), scene.violations()), (String::new(), String::new()));
}

#[test]
fn companion_without_a_source_that_wants_it_is_unsettled() {
    let (a, home, away) =
        (configmap("home", "a"), configmap("home", "a-synced"), configmap("away", "a-synced"));
    for change in [
        |scene: &mut Scene, a: &Key| scene.delete(Writer::Person, a),
        |scene: &mut Scene, a: &Key| scene.edit(Writer::Person, a, |o| o.labels.clear()),
    ] {
        let mut scene = Scene::mirrored(&[]);
        change(&mut scene, &a);
        assert_eq!(scene.unsettled().lines().count(), 2, "{}", scene.unsettled());
        // It is found although somebody took marks off, unless nobody can know it.
        scene.edit(Writer::Person, &away, |o| {
            o.labels.clear();
            o.annotations.remove("workshop.io/source");
        });
        assert_eq!(scene.unsettled().lines().count(), 2, "{}", scene.unsettled());
        scene.judge.memory_lost();
        assert_eq!(scene.unsettled().lines().count(), 1, "{}", scene.unsettled());
        // Without any mark, it may be one that was released.
        scene.edit(Writer::Person, &home, |o| {
            o.labels.clear();
            o.annotations.clear();
        });
        assert_eq!(scene.unsettled(), "");
        scene.delete(Writer::Kubernetes, &home);
        assert_eq!((scene.unsettled(), scene.violations()), (String::new(), String::new()));
    }
    let mut scene = Scene::mirrored(&[]);
    scene.edit(Writer::Person, &Key::namespace("away"), |o| {
        o.labels.insert("workshop.io/exclude".into(), "true".into());
    });
    assert!(scene.unsettled().contains("takes no companions"), "{}", scene.unsettled());
    // A paused source leaves its companions alone, but not there.
    scene.edit(Writer::Person, &a, |o| o.annotations.extend(strings(&[("paused", "true")])));
    assert_eq!(scene.unsettled().lines().count(), 1, "{}", scene.unsettled());
    scene.delete(Writer::Lockstep, &away);
    scene.edit(Writer::Person, &home, |o| o.data.clear());
    assert_eq!((scene.unsettled(), scene.violations()), (String::new(), String::new()));
}

#[test]
fn foreign_object_is_touched_only_where_its_namespace_lets_the_source_adopt_it() {
    let (a, away) = (configmap("home", "a"), configmap("away", "a-synced"));
    let begin = |adopt: &str| {
        let mut scene = Scene::new();
        let annotations = [("target-namespaces", "away"), ("adopt", adopt)];
        scene.put(Writer::Person, &a, source(&annotations, "1"));
        scene.put(Writer::Person, &away, Object { data: strings(&[("theirs", "1")]), ..Object::default() });
        assert_eq!(scene.unsettled(), "", "a conflict");
        scene
    };
    let mut scene = begin("false");
    scene.mirror(&away);
    assert_eq!(scene.violations(), "ConfigMap away/a-synced: Lockstep touches a foreign object");
    let mut scene = begin("false");
    scene.delete(Writer::Lockstep, &away);
    assert_eq!(scene.violations(), "ConfigMap away/a-synced: Lockstep touches a foreign object");
    let mut scene = begin("true");
    scene.edit(Writer::Person, &Key::namespace("away"), |o| {
        o.annotations.extend(strings(&[("accept-adopt-from", "home")]));
    });
    assert!(scene.unsettled().contains("may adopt"), "{}", scene.unsettled());
    scene.mirror(&away);
    assert_eq!((scene.unsettled(), scene.violations()), (String::new(), String::new()));
}

#[test]
fn immutable_object_is_deleted_only_for_a_source_that_may_adopt_it() {
    for (adopt, violations) in [("true", 0), ("false", 1)] {
        let (mut scene, at) = (Scene::new(), configmap("home", "a-synced"));
        scene.put(Writer::Person, &at, Object { immutable: true, ..Object::default() });
        scene.put(Writer::Person, &configmap("home", "a"), source(&[("adopt", adopt)], "1"));
        scene.delete(Writer::Lockstep, &at);
        assert_eq!(scene.judge.violations().len(), violations, "{}", scene.violations());
    }
}

#[test]
fn labels_that_people_put_on_a_companion_stay_and_those_of_nobody_are_wrong() {
    let mut scene = Scene::mirrored(&[]);
    let away = configmap("away", "a-synced");
    let label = |o: &mut Object| o.labels.extend(strings(&[("example.com/team", "red")]));
    scene.edit(Writer::Person, &away, label);
    assert_eq!(scene.unsettled(), "");
    scene.edit(Writer::Lockstep, &configmap("home", "a-synced"), label);
    assert!(
        scene.violations().contains("label example.com/team should not be there"),
        "{}",
        scene.violations()
    );
}

#[test]
fn companion_that_is_kept_must_be_released_and_not_deleted() {
    let (a, home, away) =
        (configmap("home", "a"), configmap("home", "a-synced"), configmap("away", "a-synced"));
    let mut scene = Scene::mirrored(&[("when-removed", "keep")]);
    scene.delete(Writer::Person, &a);
    for at in [&home, &away] {
        scene.edit(Writer::Lockstep, at, |o| {
            o.labels.clear();
            o.annotations.clear();
        });
    }
    assert_eq!((scene.unsettled(), scene.violations()), (String::new(), String::new()));
    scene.delete(Writer::Lockstep, &home);
    assert!(scene.violations().contains("touches a foreign object"), "{}", scene.violations());

    let mut scene = Scene::mirrored(&[("when-removed", "keep")]);
    scene.delete(Writer::Person, &a);
    scene.delete(Writer::Lockstep, &away);
    assert!(scene.violations().contains("that was to stay"), "{}", scene.violations());
}

#[test]
fn companion_without_any_mark_may_be_left_alone_only_if_it_was_to_stay() {
    let away = configmap("away", "a-synced");
    for (annotations, left_alone) in [(&[][..], false), (&[("when-removed", "keep")][..], true)] {
        let mut scene = Scene::mirrored(annotations);
        scene.edit(Writer::Person, &away, |companion| companion.labels.clear());
        assert_ne!(scene.unsettled(), "", "its annotations are left");
        scene.edit(Writer::Person, &away, |companion| companion.annotations.clear());
        assert_eq!(scene.unsettled().is_empty(), left_alone, "{annotations:?}");
    }
}

#[test]
fn object_that_lockstep_never_wrote_may_stay_with_a_source_that_it_named_before() {
    let mut scene = Scene::new();
    scene.put(Writer::Person, &configmap("home", "c"), source(&[("protect", "nonsense")], "1"));
    for named_before in [false, true] {
        let marks = strings(&[("source", if named_before { "home/c" } else { "nonsense" })]);
        let at = configmap("home", "a-synced");
        scene.put(Writer::Person, &at, Object { annotations: marks, ..Object::default() });
        scene.edit(Writer::Person, &at, |forged| forged.annotations = strings(&[("source", "nonsense")]));
        scene.put(Writer::Person, &configmap("home", "a"), source(&[("adopt", "true")], "1"));
        assert_eq!(scene.unsettled().is_empty(), named_before, "{}", scene.unsettled());
        scene.delete(Writer::Person, &at);
    }
}

#[test]
fn content_that_the_source_never_had_is_a_violation() {
    let mut scene = Scene::mirrored(&[]);
    let away = configmap("away", "a-synced");
    scene.edit(Writer::Lockstep, &away, |o| drop(o.data.insert("x".into(), "3".into())));
    assert!(scene.violations().contains("never said: data differs"), "{}", scene.violations());
    let mut scene = Scene::mirrored(&[]);
    scene.put(Writer::Person, &Key::namespace("other"), Object::default());
    scene.mirror(&configmap("other", "a-synced"));
    assert!(scene.violations().contains("never wanted a companion here"), "{}", scene.violations());
}

#[test]
fn accepted_request_beyond_the_rights_of_its_author_is_a_violation() {
    use crate::history::Actor;
    let a = configmap("home", "a");
    let accepted = |by: Actor, annotations: &[(&str, &str)]| {
        let mut scene = Scene::new();
        scene.edit(Writer::Person, &Key::namespace("away"), |o| {
            o.annotations.extend(strings(&[("accept-from", "home")]));
        });
        scene.put(Writer::Person, &Key::namespace("other"), Object::default());
        scene.judge.accepted(by, &a, None, Some(&source(annotations, "1")));
        scene.violations()
    };
    for (by, targets, consent, wrong) in [
        (Actor::Admin, "other,team-*", false, false),
        (Actor::Tenant, ".,away", false, false),
        (Actor::Tenant, ".,other", false, true),
        (Actor::Tenant, "team-*", false, true),
        (Actor::Tenant, "team-*,other", true, false),
        (Actor::Deputy, "away", false, false),
        (Actor::Deputy, ".", false, true),
    ] {
        let mut annotations = vec![("target-namespaces", targets)];
        annotations.extend(consent.then_some(("consent", "required")));
        assert_eq!(!accepted(by, &annotations).is_empty(), wrong, "{by:?} {annotations:?}");
    }

    let mut scene = Scene::mirrored(&[]);
    let away = configmap("away", "a-synced");
    let (before, mut after) = (scene.judge.now()[&away].clone(), scene.judge.now()[&away].clone());
    scene.judge.accepted(Actor::Admin, &away, Some(&before), None);
    assert_eq!(scene.violations(), "", "a delete is allowed, and healed");
    after.data.clear();
    scene.judge.accepted(Actor::Admin, &away, Some(&before), Some(&after));
    assert!(scene.violations().contains("a protected companion"), "{}", scene.violations());
}
