//! Random histories from a seed.

use fastrand::Rng;

use crate::{
    history::{Actor, Draft, Edit, History, Op, Step},
    names::{COMPANIONS, NAMESPACES, Names, SOURCES},
    object::{Key, Kind, Strings},
};

/// Every value of a ConfigMap or Secret contains this, in plain text or as base64: it must not be found in a log, an
/// Event, a metric or an error.
pub const VALUE_TOKENS: [&str; 2] = ["v4lue", "djRsdWU"];

/// A random history with this many steps. The same seed gives the same history.
#[must_use]
pub fn generate(seed: u64, length: usize, names: &Names) -> History {
    let mut generator = Generator { random: Rng::with_seed(seed), names };
    let steps = (0..length).map(|_| generator.step()).collect();
    History { seed, names: names.clone(), steps }
}

struct Generator<'a> {
    random: Rng,
    names: &'a Names,
}

impl Generator<'_> {
    fn step(&mut self) -> Step {
        match self.random.u32(0..24) {
            0..=1 => self.namespace(),
            2..=8 => self.put_source(),
            9..=12 => self.edit_source(),
            13 => self.delete_source(),
            14..=15 => self.foreign(),
            16..=17 => self.delete_companion(),
            _ => self.edit_companion(),
        }
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.random.usize(0..from.len())]
    }

    fn chance(&mut self, one_in: u32) -> bool {
        self.random.u32(0..one_in) == 0
    }

    fn own(&self, name: &str) -> String {
        self.names.key(name)
    }

    fn place(&mut self, names: &[&str]) -> Key {
        let kind = if self.chance(5) { Kind::Secret } else { Kind::ConfigMap };
        let namespace = match self.random.u32(0..8) {
            0..=3 => "home",
            4..=5 => "away",
            _ => self.pick(&NAMESPACES),
        };
        let name = self.pick(names);
        Key::new(kind, &self.names.namespace(namespace), name)
    }

    fn author(&mut self) -> Actor {
        self.pick(&[
            Actor::Exempt,
            Actor::Exempt,
            Actor::Exempt,
            Actor::Admin,
            Actor::Admin,
            Actor::Tenant,
            Actor::Deputy,
        ])
    }

    // --- namespaces

    fn namespace(&mut self) -> Step {
        let short = self.pick(&NAMESPACES);
        let at = Key::namespace(&self.names.namespace(short));
        let op = match self.random.u32(0..8) {
            0 if short != "home" || self.chance(4) => Op::Delete,
            1 => Op::Recreate(self.namespace_draft()),
            _ => Op::Put(self.namespace_draft()),
        };
        Step { by: Actor::Exempt, at, op }
    }

    fn namespace_draft(&mut self) -> Draft {
        let mut draft = Draft::default();
        if self.chance(2) {
            draft.labels.insert("env".to_owned(), format!("{}dev", self.names.prefix));
        }
        if self.chance(6) {
            draft.labels.insert(self.own("exclude"), "true".to_owned());
        }
        if self.chance(2) {
            let from = self.pick(&["home", "home,away", "team-*", "*", "!team-a,*"]);
            draft.annotations.insert(self.own("accept-from"), self.list(from));
        }
        if self.chance(3) {
            draft.annotations.insert(self.own("accept-adopt-from"), self.list("home"));
        }
        draft
    }

    /// A list of namespaces, with their full names.
    fn list(&self, text: &str) -> String {
        let item = |item: &str| match item.strip_prefix('!') {
            Some(excluded) => format!("!{}", self.names.namespace(excluded)),
            None if item == "." => item.to_owned(),
            None => self.names.namespace(item),
        };
        text.split(',').map(item).collect::<Vec<_>>().join(",")
    }

    // --- sources

    fn put_source(&mut self) -> Step {
        let (by, at) = (self.author(), self.place(&SOURCES));
        let draft = self.source_draft(at.kind);
        let op = if self.chance(5) { Op::Recreate(draft) } else { Op::Put(draft) };
        Step { by, at, op }
    }

    fn source_draft(&mut self, kind: Kind) -> Draft {
        let mut draft = Draft { immutable: self.chance(10), ..Draft::default() };
        let managed = if self.chance(20) { "false" } else { "true" };
        draft.labels.insert(self.own("managed"), managed.to_owned());
        draft.labels.insert("example.com/team".to_owned(), self.pick(&["red", "blue"]).to_owned());
        if self.chance(3) {
            draft.labels.insert("app.kubernetes.io/instance".to_owned(), "argo".to_owned());
            draft.labels.insert("other.io/managed".to_owned(), "true".to_owned());
            draft.annotations.insert("example.com/owner".to_owned(), "somebody".to_owned());
        }
        for _ in 0..self.random.u32(0..4) {
            let (name, value) = self.annotation();
            draft.annotations.insert(self.own(name), value);
        }
        self.fill(kind, &mut draft);
        draft
    }

    fn fill(&mut self, kind: Kind, draft: &mut Draft) {
        if kind == Kind::Secret {
            let tls = self.chance(4);
            draft.type_ = Some(if tls { "kubernetes.io/tls" } else { "Opaque" }.to_owned());
            for key in if tls { &["tls.crt", "tls.key"][..] } else { &["x", "y"][..] } {
                draft.data.insert((*key).to_owned(), self.value(kind));
            }
            return;
        }
        for key in ["x", "y"] {
            if !self.chance(6) {
                draft.data.insert(key.to_owned(), self.value(kind));
            }
        }
        if self.chance(5) {
            draft.binary_data.insert("z".to_owned(), self.value(Kind::Secret));
        }
    }

    /// One of few values, so that content also changes back.
    fn value(&mut self, kind: Kind) -> String {
        // `v4lue-1` and `v4lue-2` in base64.
        match kind {
            Kind::Secret => self.pick(&["djRsdWUtMQ==", "djRsdWUtMg=="]).to_owned(),
            _ => self.pick(&["v4lue-1", "v4lue-2"]).to_owned(),
        }
    }

    /// One of the annotations that `docs/reference.md` has for sources, some of them malformed.
    fn annotation(&mut self) -> (&'static str, String) {
        let (name, value) = self.pick(&[
            ("target-namespaces", "."),
            ("target-namespaces", ".,away"),
            ("target-namespaces", ".,away"),
            ("target-namespaces", "away,team-a,late"),
            ("target-namespaces", "*"),
            ("target-namespaces", "team-*,away"),
            ("target-namespaces", "*,!team-a"),
            ("target-namespaces", ".,kube-x"),
            ("target-namespaces", "team-*,!."),
            ("target-namespaces", "away,!away"),
            ("target-namespaces", "Not_a_namespace"),
            ("target-selector", "env=dev"),
            ("target-selector", "env!=prod,env in (dev)"),
            ("target-selector", "env in (dev,prod),!absent"),
            ("target-selector", "((("),
            ("consent", "required"),
            ("consent", "required"),
            ("consent", "perhaps"),
            ("companion-name", "shared"),
            ("companion-name", "b-synced"),
            ("companion-name", "b"),
            ("companion-name", "="),
            ("companion-name", "No Name"),
            ("keys", "x"),
            ("keys", "x=y"),
            ("keys", "absent"),
            ("keys", "x=y,z=y"),
            ("copy-labels", "example.com/*"),
            ("copy-labels", "*"),
            ("copy-annotations", "*,!example.com/owner"),
            ("copy-annotations", "example.com/owner"),
            ("set-labels", "example.com/set=1"),
            ("set-labels", "example.com/team=green"),
            ("set-annotations", "example.com/note=hello"),
            ("set-annotations", "no-value"),
            ("protect", "all"),
            ("protect", "none"),
            ("protect", "edits"),
            ("adopt", "true"),
            ("adopt", "true"),
            ("adopt", "false"),
            ("paused", "true"),
            ("paused", "true"),
            ("paused", "false"),
            ("paused", "perhaps"),
            ("when-removed", "keep"),
            ("when-removed", "keep"),
            ("when-removed", "delete"),
        ]);
        let value = match name {
            "target-namespaces" if value != "Not_a_namespace" => self.list_with_own(value),
            // Namespaces of other histories have other values.
            "target-selector" => value.replace("dev", &format!("{}dev", self.names.prefix)),
            _ => value.to_owned(),
        };
        (name, value)
    }

    fn list_with_own(&self, text: &str) -> String {
        text.split(',')
            .map(|item| if item == "!." { item.to_owned() } else { self.list(item) })
            .collect::<Vec<_>>()
            .join(",")
    }

    fn edit_source(&mut self) -> Step {
        let (by, at) = (self.author(), self.place(&SOURCES));
        let edits = match self.random.u32(0..12) {
            0 => vec![Edit::Label(self.own("managed"), None)],
            1 => vec![Edit::Label(self.own("managed"), Some("true".to_owned()))],
            2..=4 => {
                let (name, value) = self.annotation();
                vec![Edit::Annotation(self.own(name), Some(value))]
            }
            5..=6 => {
                let name = self.pick(&[
                    "target-namespaces",
                    "target-selector",
                    "consent",
                    "companion-name",
                    "keys",
                    "paused",
                    "adopt",
                    "when-removed",
                ]);
                vec![Edit::Annotation(self.own(name), None)]
            }
            7 => vec![Edit::Label("example.com/team".to_owned(), Some("green".to_owned()))],
            8 => vec![Edit::ClearFinalizers],
            _ => {
                let (key, value) = (self.pick(&["x", "y"]), self.value(at.kind));
                vec![Edit::Data(key.to_owned(), Some(value))]
            }
        };
        Step { by, at, op: Op::Edit(edits) }
    }

    fn delete_source(&mut self) -> Step {
        let (by, at) = (self.author(), self.place(&SOURCES));
        let op = match self.chance(5) {
            true => Op::Edit(vec![Edit::Finalizer("example.com/wait".to_owned())]),
            false => Op::Delete,
        };
        Step { by, at, op }
    }

    // --- objects in the way, and companions

    fn foreign(&mut self) -> Step {
        let at = self.place(&COMPANIONS);
        let mut draft = Draft::default();
        draft.data.insert("theirs".to_owned(), self.value(at.kind));
        if at.kind == Kind::Secret {
            draft.type_ = Some("Opaque".to_owned());
        }
        // Most are plain: these must never be touched.
        match self.random.u32(0..12) {
            0 => draft.controlled = true,
            1 => draft.immutable = true,
            2 => draft.finalizers.push("example.com/wait".to_owned()),
            3 => drop(draft.labels.insert(self.own("companion"), "true".to_owned())),
            4 => self.forge(&mut draft.annotations),
            5 => {
                draft.labels.insert(self.own("companion"), "true".to_owned());
                self.forge(&mut draft.annotations);
            }
            _ => {}
        }
        let by = if self.chance(3) { Actor::Admin } else { Actor::Exempt };
        Step { by, at, op: Op::Create(draft) }
    }

    fn forge(&mut self, annotations: &mut Strings) {
        let source = format!("{}/{}", self.names.namespace("home"), self.pick(&SOURCES));
        annotations.insert(self.own("source"), source);
    }

    fn delete_companion(&mut self) -> Step {
        let by = self.pick(&[Actor::Exempt, Actor::Exempt, Actor::Admin, Actor::Tenant]);
        Step { by, at: self.place(&COMPANIONS), op: Op::Delete }
    }

    fn edit_companion(&mut self) -> Step {
        let at = self.place(&COMPANIONS);
        let edits = (0..self.random.u32(1..3)).map(|_| self.companion_edit(at.kind)).collect();
        let by = self.pick(&[Actor::Exempt, Actor::Exempt, Actor::Exempt, Actor::Admin, Actor::Tenant]);
        Step { by, at, op: Op::Edit(edits) }
    }

    fn companion_edit(&mut self, kind: Kind) -> Edit {
        let some = |text: &str| Some(text.to_owned());
        match self.random.u32(0..16) {
            0..=1 => Edit::Data("x".to_owned(), Some(self.value(kind))),
            2 => Edit::Data("extra".to_owned(), Some(self.value(kind))),
            3 => Edit::Data("x".to_owned(), None),
            4 if kind == Kind::ConfigMap => Edit::BinaryData("z".to_owned(), Some(self.value(Kind::Secret))),
            4..=5 => Edit::Label(self.own("companion"), None),
            6 => Edit::Label(self.own("source-name"), None),
            7 => Edit::Annotation(self.own("source"), Some(format!("{}/b", self.names.namespace("away")))),
            8 => Edit::Annotation(self.own("source"), some("nonsense")),
            9 => Edit::Annotation(self.own("source-uid"), None),
            10 => Edit::Annotation(self.own("protect"), some("none")),
            11 => Edit::ClearAnnotations,
            12 => Edit::Label("others.example/note".to_owned(), some("1")),
            13 => self.pick_edit(Edit::ClearOwners, Edit::Controller),
            14 => self.pick_edit(Edit::Finalizer("example.com/wait".to_owned()), Edit::Immutable),
            _ => Edit::Label(self.own("managed"), some("true")),
        }
    }

    fn pick_edit(&mut self, one: Edit, other: Edit) -> Edit {
        if self.random.bool() { one } else { other }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{rules::Reading, shrink};

    #[test]
    fn seed_determines_the_history_and_the_printed_one_is_the_same() {
        let names = Names::new("workshop.io", "h1-");
        let history = generate(7, 50, &names);
        assert_eq!(history, generate(7, 50, &names));
        assert_ne!(history.steps, generate(8, 50, &names).steps);
        assert_eq!(History::parse(&history.to_string()), Ok(history));
        assert!(History::parse("[1,{").is_err());
    }

    /// A generator that makes nothing but malformed sources would test nothing.
    #[test]
    fn most_sources_are_well_formed_and_every_reason_to_refuse_one_occurs() {
        let names = Names::new("workshop.io", "h1-");
        let (mut right, mut wrong) = (0, std::collections::BTreeSet::new());
        for step in generate(1, 20_000, &names).steps {
            let Op::Put(_) = &step.op else { continue };
            let Some(crate::Write::Create(object)) = step.writes(None).pop() else { continue };
            match Reading::of(&names, &step.at, &object) {
                Reading::Source(_) => right += 1,
                Reading::Malformed(why) => drop(wrong.insert(why)),
                Reading::NoSource => {}
            }
        }
        assert!(right > 2000 && wrong.len() >= 9, "{right} {wrong:?}");
    }

    #[test]
    fn shrunk_history_is_the_shortest_that_still_fails() {
        let names = Names::new("workshop.io", "");
        let history = generate(3, 40, &names);
        let culprits = [history.steps[7].clone(), history.steps[31].clone()];
        let fails = |history: &History| culprits.iter().all(|culprit| history.steps.contains(culprit));
        assert_eq!(shrink(&history, 1000, fails).steps, culprits);
    }
}
