//! PURE. Why a namespace has or lacks the companion of a source, step by step, and the command that would change it.

use k8s_openapi::jiff::Timestamp;
use serde::Serialize;

use super::{
    instance::age,
    snapshot::Snapshot,
    status::{CompanionState, companion_state, describe_targets},
};
use lockstep_core::{
    admission::messages,
    keys::Keys,
    object::ObjectKey,
    policy::{Policy, Targets},
    world::{Eligibility, Source, World},
};

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Explanation {
    pub source: String,
    pub namespace: String,
    /// In the order in which the controller decides. The first that is not met is the reason.
    pub steps: Vec<Step>,
    /// What would change it, if there is something.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub commands: Vec<String>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Step {
    pub met: Met,
    pub text: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Met {
    Yes,
    No,
    /// This person may not see it.
    Unknown,
}

impl Met {
    pub const fn symbol(self) -> &'static str {
        match self {
            Self::Yes => "✓",
            Self::No => "✗",
            Self::Unknown => "?",
        }
    }
}

/// The steps so far. A step that is not met ends the explanation.
struct Steps<'a> {
    steps: Vec<Step>,
    commands: Vec<String>,
    keys: &'a Keys,
}

/// The explanation is complete: the rest depends on what was not met.
struct Ended;

impl Steps<'_> {
    fn met(&mut self, text: String) {
        self.steps.push(Step { met: Met::Yes, text });
    }

    fn ends(&mut self, met: Met, text: String, commands: impl IntoIterator<Item = String>) -> Ended {
        self.steps.push(Step { met, text });
        self.commands.extend(commands);
        Ended
    }

    fn not_met(&mut self, text: String, commands: impl IntoIterator<Item = String>) -> Ended {
        self.ends(Met::No, text, commands)
    }
}

pub fn explain(snapshot: &Snapshot, key: &ObjectKey, namespace: &str, now: Timestamp) -> Explanation {
    let mut steps = Steps { steps: Vec::new(), commands: Vec::new(), keys: &snapshot.scope.keys };
    snapshot.world.read(|world| {
        let case = Case { snapshot, world, key, namespace, now };
        // Whether it ended early or not, the steps say it all.
        let _ = case.explain(&mut steps);
    });
    Explanation {
        source: format!("{} {key}", key.kind.as_str()),
        namespace: namespace.to_owned(),
        steps: steps.steps,
        commands: steps.commands,
    }
}

struct Case<'a> {
    snapshot: &'a Snapshot,
    world: &'a World,
    key: &'a ObjectKey,
    namespace: &'a str,
    now: Timestamp,
}

impl Case<'_> {
    fn explain(&self, steps: &mut Steps<'_>) -> Result<(), Ended> {
        let source = self.source(steps)?;
        let policy = self.policy(source, steps)?;
        self.namespace_exists(steps)?;
        self.is_target(policy, steps)?;
        self.is_eligible(policy, steps)?;
        self.companion(source, policy, steps)
    }

    /// `configmap NAME -n NAMESPACE`, as kubectl takes it.
    fn object(&self) -> String {
        format!("{} {} -n {}", messages::kind(self.key.kind), self.key.name, self.key.namespace)
    }

    fn source(&self, steps: &mut Steps<'_>) -> Result<&Source, Ended> {
        let (key, kind) = (self.key, self.key.kind.as_str());
        if let Some(source) = self.world.source(key) {
            if source.terminating {
                let text = format!("{kind} {key} is being deleted: nothing is written for it");
                return Err(steps.not_met(text, []));
            }
            steps.met(format!("{kind} {key} is a source"));
            return Ok(source);
        }
        if !self.snapshot.view.sees_sources(key.kind, &key.namespace) {
            let text = format!("you may not see whether {kind} {key} is a source");
            return Err(steps.ends(Met::Unknown, text, []));
        }
        let managed = &steps.keys.managed;
        Err(match self.snapshot.read_of(key) {
            Some(Some(_)) => steps.not_met(
                format!("{kind} {key} is no source: it lacks the label {managed}=true"),
                [format!("kubectl label --overwrite {} {managed}=true", self.object())],
            ),
            Some(None) => steps.not_met(format!("{kind} {key} does not exist"), []),
            None => steps.not_met(format!("there is no source {kind} {key}"), []),
        })
    }

    fn policy<'s>(&self, source: &'s Source, steps: &mut Steps<'_>) -> Result<&'s Policy, Ended> {
        match &source.desired {
            Ok(desired) => {
                steps.met("its settings are well-formed".to_owned());
                Ok(&desired.policy)
            }
            Err(fault) => {
                let text = format!("it cannot be mirrored: {fault}");
                Err(steps.not_met(text, [format!("kubectl edit {}", self.object())]))
            }
        }
    }

    fn namespace_exists(&self, steps: &mut Steps<'_>) -> Result<(), Ended> {
        let name = self.namespace;
        if !self.snapshot.view.sees_companions(self.key.kind, name) {
            let text = format!("you may not see namespace {name} and the companions in it");
            return Err(steps.ends(Met::Unknown, text, []));
        }
        if name == self.world.namespaces().rules().own_namespace {
            let text = format!("{name} is Lockstep's own namespace, which is never a target");
            return Err(steps.not_met(text, []));
        }
        match self.world.namespaces().get(name) {
            Some(_) => {
                steps.met(format!("namespace {name} exists"));
                Ok(())
            }
            None => Err(steps.not_met(
                format!("namespace {name} does not exist"),
                [format!("kubectl create namespace {name}")],
            )),
        }
    }

    fn is_target(&self, policy: &Policy, steps: &mut Steps<'_>) -> Result<(), Ended> {
        let (home, name, targets) = (&*self.key.namespace, self.namespace, &policy.targets);
        let shown = describe_targets(targets);
        if let Some(why) = self.why_wanted(targets) {
            steps.met(why);
            return Ok(());
        }
        if home == name && policy.companion == *self.key.name {
            let text = format!(
                "its companions have its own name, {}, so that there is none in {name}",
                policy.companion
            );
            return Err(steps.not_met(text, []));
        }
        let key = &steps.keys.target_namespaces;
        if let Some(exclusion) = targets.excluded.iter().find(|pattern| pattern.matches(name)) {
            let text = format!("`!{exclusion}` in its {key} excludes {name}");
            return Err(steps.not_met(text, [format!("kubectl edit {}", self.object())]));
        }
        let item = if home == name { "." } else { name };
        let listed = describe_targets(&Targets { selector: None, ..targets.clone() });
        let value = if listed.is_empty() { item.to_owned() } else { format!("{listed},{item}") };
        let text = if home == name && targets.needs_consent && targets.has_patterns() {
            let consent = &steps.keys.consent;
            format!("patterns of a source with {consent}=required do not reach its own namespace")
        } else {
            format!("none of its targets ({shown}) matches {name}")
        };
        Err(steps.not_met(text, [format!("kubectl annotate --overwrite {} '{key}={value}'", self.object())]))
    }

    /// Which of its targets matches the namespace.
    fn why_wanted(&self, targets: &Targets) -> Option<String> {
        let (home, name) = (&*self.key.namespace, self.namespace);
        if !self.world.namespaces().is_wanted(home, targets, name) {
            return None;
        }
        Some(if targets.names_explicitly(home, name) {
            let item = if home == name && targets.own { "." } else { name };
            format!("its targets list {name} by name (`{item}`)")
        } else if let Some(pattern) = targets.patterns.iter().find(|pattern| pattern.matches(name)) {
            format!("its target `{pattern}` matches {name}")
        } else {
            let selector = targets.selector.as_ref().map(ToString::to_string).unwrap_or_default();
            format!("its selector `{selector}` matches the labels of {name}")
        })
    }

    fn is_eligible(&self, policy: &Policy, steps: &mut Steps<'_>) -> Result<(), Ended> {
        let (home, name, keys) = (&*self.key.namespace, self.namespace, steps.keys);
        let namespaces = self.world.namespaces();
        let accept = || namespaces.how_to_accept(home, name);
        Err(match namespaces.eligibility(home, name, &policy.targets) {
            Eligibility::Eligible => {
                steps.met(format!("{name} may have companions of sources in {home}"));
                return Ok(());
            }
            Eligibility::Missing => steps.not_met(format!("namespace {name} does not exist"), []),
            Eligibility::Terminating => steps.not_met(format!("namespace {name} is being deleted"), []),
            Eligibility::Never => steps.not_met(
                format!("the label {}=true keeps all companions out of {name}", keys.exclude),
                [format!("kubectl label namespace {name} {}-", keys.exclude)],
            ),
            Eligibility::NotAccepted => {
                let why = if policy.targets.needs_consent {
                    format!("the source asks for consent ({}=required)", keys.consent)
                } else {
                    "kube-* namespaces, and those that a flag excludes, take companions only on request"
                        .to_owned()
                };
                let text = format!("the {} of {name} does not name {home}, and {why}", keys.accept_from);
                steps.not_met(text, [accept()])
            }
        })
    }

    fn companion(&self, source: &Source, policy: &Policy, steps: &mut Steps<'_>) -> Result<(), Ended> {
        let at = ObjectKey::new(self.key.kind, self.namespace, &policy.companion);
        if at == *self.key {
            let text = format!("the companion would have the name of its source, {at}: there is none here");
            return Err(steps.not_met(text, []));
        }
        let state = companion_state(self.snapshot, self.world, source, &at);
        if let CompanionState::Conflict(holder) = &state {
            return Err(self.conflict(&at, holder, policy, steps));
        }
        steps.met(format!("the name {at} is free, or its own"));
        let events = format!(
            "kubectl events --for {}/{} -n {}",
            messages::kind(self.key.kind),
            self.key.name,
            self.key.namespace
        );
        let behind = match state {
            CompanionState::InStep => {
                let written = self.snapshot.written(&at);
                let written = written.map(|written| format!(", written {} ago", age(written, self.now)));
                steps.met(format!("{at} is in step{}", written.unwrap_or_default()));
                return Ok(());
            }
            CompanionState::Missing if self.snapshot.read_of(&at).is_none() => {
                let text = format!("{at} is missing, or is an object that you may not see");
                return Err(steps.ends(Met::Unknown, text, [events]));
            }
            CompanionState::BeingDeleted => format!("{at} is being deleted, and is created again after that"),
            other => format!("{at}: {other}"),
        };
        if policy.paused {
            let text = format!("{behind}; the source is paused");
            return Err(
                steps.not_met(text, [format!("kubectl annotate {} {}-", self.object(), steps.keys.paused)])
            );
        }
        Err(steps.not_met(
            format!("{behind}; Events and the leader's log say what keeps the controller from it"),
            [events],
        ))
    }

    fn conflict(&self, at: &ObjectKey, holder: &str, policy: &Policy, steps: &mut Steps<'_>) -> Ended {
        let (keys, home) = (steps.keys, &*self.key.namespace);
        let taken_by_source =
            self.snapshot.object(self.world, at).is_some_and(|found| found.source.is_some());
        let mut commands = Vec::new();
        if taken_by_source {
            commands.push(format!(
                "kubectl annotate --overwrite {} {}=NAME",
                self.object(),
                keys.companion_name
            ));
        } else {
            if !policy.adopt {
                commands.push(format!("kubectl annotate --overwrite {} {}=true", self.object(), keys.adopt));
            }
            if !self.world.namespaces().accepts_adoption(home, &at.namespace) {
                commands.push(self.world.namespaces().how_to_accept_adoption(home, &at.namespace));
            }
        }
        steps.not_met(
            format!("the name {at} is held by {holder}; Lockstep overwrites nothing that is not its own"),
            commands,
        )
    }
}
