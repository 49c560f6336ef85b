//! PURE. Why a namespace has or lacks the companion of a source, step by step, and the command that would change it.

use k8s_openapi::jiff::Timestamp;
use serde::Serialize;

use super::{
    instance::age,
    snapshot::Snapshot,
    status::{PlaceState, describe_holder, describe_targets, wanted_state},
};
use lockstep_core::{
    admission::messages,
    keys::Keys,
    object::ObjectKey,
    plan::{Decision, Holder, Place, Target, Trouble},
    policy::{Policy, Targets},
    world::{Eligibility, Source, World},
};

#[derive(Serialize)]
pub struct Explanation {
    pub source: String,
    pub namespace: String,
    /// In the order in which the controller decides. The first that is not met is the reason.
    pub steps: Vec<ExplanationStep>,
    /// What would change it, if there is something.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub commands: Vec<String>,
}

#[derive(Serialize)]
pub struct ExplanationStep {
    pub met: Met,
    pub text: String,
}

#[derive(Clone, Copy, Serialize)]
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

/// The first step that is not met: the rest depends on it.
struct Obstacle {
    step: ExplanationStep,
    commands: Vec<String>,
}

impl Obstacle {
    fn new(text: String, commands: impl IntoIterator<Item = String>) -> Self {
        Self { step: ExplanationStep { met: Met::No, text }, commands: commands.into_iter().collect() }
    }

    fn unknown(text: String, commands: impl IntoIterator<Item = String>) -> Self {
        let mut obstacle = Self::new(text, commands);
        obstacle.step.met = Met::Unknown;
        obstacle
    }
}

pub fn explain(snapshot: &Snapshot, key: &ObjectKey, namespace: &str, now: Timestamp) -> Explanation {
    let mut met = Vec::new();
    let outcome =
        snapshot.world.read(|world| Case { snapshot, world, key, namespace, now }.explain(&mut met));
    let mut steps: Vec<ExplanationStep> =
        met.into_iter().map(|text| ExplanationStep { met: Met::Yes, text }).collect();
    let mut commands = Vec::new();
    if let Err(obstacle) = outcome {
        steps.push(obstacle.step);
        commands = obstacle.commands;
    }
    let source = format!("{} {key}", key.kind.as_str());
    Explanation { source, namespace: namespace.to_owned(), steps, commands }
}

/// What is read before [`explain`]: what has the name of the companion, or the object that is no source. No list shows
/// it.
pub fn unlisted(snapshot: &Snapshot, key: &ObjectKey, namespace: &str) -> ObjectKey {
    snapshot.world.read(|world| match world.source(key).map(|source| &source.desired) {
        Some(Ok(desired)) => ObjectKey::new(key.kind, namespace, &desired.policy.companion),
        _ => key.clone(),
    })
}

struct Case<'a> {
    snapshot: &'a Snapshot,
    world: &'a World,
    key: &'a ObjectKey,
    namespace: &'a str,
    now: Timestamp,
}

impl Case<'_> {
    /// `met` gets the steps that are met.
    fn explain(&self, met: &mut Vec<String>) -> Result<(), Obstacle> {
        let (key, name) = (self.key, self.namespace);
        let source = self.source()?;
        met.push(format!("{} {key} is a source", key.kind));
        let policy = match &source.desired {
            Ok(desired) => &desired.policy,
            Err(fault) => {
                let text = format!("it cannot be mirrored: {fault}");
                return Err(Obstacle::new(text, [format!("kubectl edit {}", self.object())]));
            }
        };
        met.push("its settings are well-formed".to_owned());
        self.namespace_exists()?;
        met.push(format!("namespace {name} exists"));
        let places = self.snapshot.places(self.world, key, Some(source));
        let mut wanted = places.filter_map(|place| Some((place.target?, place)));
        let (target, place) =
            wanted.find(|(target, _)| target.namespace == name).ok_or_else(|| self.not_a_target(policy))?;
        met.push(self.why_wanted(target, &policy.targets));
        self.is_eligible(target, policy)?;
        met.push(format!("{name} may have companions of sources in {}", key.namespace));
        self.companion(source, policy, &place, met)
    }

    fn keys(&self) -> &Keys {
        &self.snapshot.scope.keys
    }

    /// `configmap NAME -n NAMESPACE`, as kubectl takes it.
    fn object(&self) -> String {
        format!("{} {} -n {}", messages::kind(self.key.kind), self.key.name, self.key.namespace)
    }

    /// The command that sets an annotation of the source.
    fn annotate(&self, annotation: &str) -> String {
        format!("kubectl annotate --overwrite {} {annotation}", self.object())
    }

    fn source(&self) -> Result<&Source, Obstacle> {
        let (key, kind, managed) = (self.key, self.key.kind, &self.keys().managed);
        match self.world.source(key) {
            Some(source) if source.terminating => {
                let text = format!("{kind} {key} is being deleted: nothing is written for it");
                return Err(Obstacle::new(text, []));
            }
            Some(source) => return Ok(source),
            None => {}
        }
        if !self.snapshot.view.sees_sources(kind, &key.namespace) {
            return Err(Obstacle::unknown(format!("you may not see whether {kind} {key} is a source"), []));
        }
        Err(match self.snapshot.read_of(key) {
            Some(Some(_)) => Obstacle::new(
                format!("{kind} {key} is no source: it lacks the label {managed}=true"),
                [format!("kubectl label --overwrite {} {managed}=true", self.object())],
            ),
            Some(None) => Obstacle::new(format!("{kind} {key} does not exist"), []),
            None => Obstacle::new(format!("there is no source {kind} {key}"), []),
        })
    }

    fn namespace_exists(&self) -> Result<(), Obstacle> {
        let (name, namespaces) = (self.namespace, self.world.namespaces());
        if !self.snapshot.view.sees_companions(self.key.kind, name) {
            let text = format!("you may not see namespace {name} and the companions in it");
            return Err(Obstacle::unknown(text, []));
        }
        if name == namespaces.rules().own_namespace {
            let text = format!("{name} is Lockstep's own namespace, which is never a target");
            return Err(Obstacle::new(text, []));
        }
        if namespaces.get(name).is_none() {
            let text = format!("namespace {name} does not exist");
            return Err(Obstacle::new(text, [format!("kubectl create namespace {name}")]));
        }
        Ok(())
    }

    /// Why the source does not want a companion here.
    fn not_a_target(&self, policy: &Policy) -> Obstacle {
        let (home, name, targets) = (&*self.key.namespace, self.namespace, &policy.targets);
        let (key, consent) = (&self.keys().target_namespaces, &self.keys().consent);
        let is_home = home == name;
        if is_home && policy.companion == *self.key.name {
            let companion = &policy.companion;
            let text =
                format!("its companions have its own name, {companion}, so that there is none in {name}");
            return Obstacle::new(text, []);
        }
        if let Some(exclusion) = targets.excluded.iter().find(|pattern| pattern.matches(name)) {
            let text = format!("`!{exclusion}` in its {key} excludes {name}");
            return Obstacle::new(text, [format!("kubectl edit {}", self.object())]);
        }
        let text = if is_home && targets.needs_consent && targets.has_patterns() {
            format!("patterns of a source with {consent}=required do not reach its own namespace")
        } else {
            format!("none of its targets ({}) matches {name}", describe_targets(targets))
        };
        let listed = describe_targets(&Targets { selector: None, ..targets.clone() });
        let separator = if listed.is_empty() { "" } else { "," };
        let item = if is_home { "." } else { name };
        Obstacle::new(text, [self.annotate(&format!("'{key}={listed}{separator}{item}'"))])
    }

    /// Which of its targets matches the namespace.
    fn why_wanted(&self, target: Target<'_>, targets: &Targets) -> String {
        let name = target.namespace;
        if target.explicit {
            let item = if *self.key.namespace == *name && targets.own { "." } else { name };
            format!("its targets list {name} by name (`{item}`)")
        } else if let Some(pattern) = targets.patterns.iter().find(|pattern| pattern.matches(name)) {
            format!("its target `{pattern}` matches {name}")
        } else {
            let selector = targets.selector.as_ref().map(ToString::to_string).unwrap_or_default();
            format!("its selector `{selector}` matches the labels of {name}")
        }
    }

    fn is_eligible(&self, target: Target<'_>, policy: &Policy) -> Result<(), Obstacle> {
        let (home, name, keys) = (&self.key.namespace, target.namespace, self.keys());
        Err(match target.eligibility {
            Eligibility::Eligible | Eligibility::Missing => return Ok(()),
            Eligibility::Terminating => Obstacle::new(format!("namespace {name} is being deleted"), []),
            Eligibility::Never => Obstacle::new(
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
                Obstacle::new(text, [self.world.namespaces().how_to_accept(home, name)])
            }
        })
    }

    fn companion(
        &self,
        source: &Source,
        policy: &Policy,
        place: &Place<'_>,
        met: &mut Vec<String>,
    ) -> Result<(), Obstacle> {
        let at = &*place.at;
        if at == self.key {
            let text = format!("the companion would have the name of its source, {at}: there is none here");
            return Err(Obstacle::new(text, []));
        }
        if let Decision::Trouble(Trouble::Conflict { holder, .. }) = &place.decision {
            let shown = describe_holder(holder);
            let text =
                format!("the name {at} is held by {shown}; Lockstep overwrites nothing that is not its own");
            return Err(Obstacle::new(text, self.ways_out(at, holder, policy)));
        }
        met.push(format!("the name {at} is free, or its own"));
        let (kind, name, home) = (messages::kind(self.key.kind), &self.key.name, &self.key.namespace);
        let events = format!("kubectl events --for {kind}/{name} -n {home}");
        let behind = match wanted_state(self.snapshot, self.world, source, place) {
            PlaceState::InStep => {
                let written = self.snapshot.written(at);
                let written = written.map(|written| format!(", written {} ago", age(written, self.now)));
                met.push(format!("{at} is in step{}", written.unwrap_or_default()));
                return Ok(());
            }
            PlaceState::Missing if self.snapshot.read_of(at).is_none() => {
                let text = format!("{at} is missing, or is an object that you may not see");
                return Err(Obstacle::unknown(text, [events]));
            }
            PlaceState::BeingDeleted => format!("{at} is being deleted, and is created again after that"),
            other => format!("{at}: {other}"),
        };
        Err(if policy.paused {
            let resume = format!("kubectl annotate {} {}-", self.object(), self.keys().paused);
            Obstacle::new(format!("{behind}; the source is paused"), [resume])
        } else {
            let text = format!("{behind}; Events and the leader's log say what keeps the controller from it");
            Obstacle::new(text, [events])
        })
    }

    /// The commands that end a conflict.
    fn ways_out(&self, at: &ObjectKey, holder: &Holder, policy: &Policy) -> Vec<String> {
        let (keys, home, namespaces) = (self.keys(), &self.key.namespace, self.world.namespaces());
        if let Holder::Companion { .. } = holder {
            return vec![self.annotate(&format!("{}=NAME", keys.companion_name))];
        }
        let adopt = (!policy.adopt).then(|| self.annotate(&format!("{}=true", keys.adopt)));
        let accept = (!namespaces.accepts_adoption(home, &at.namespace))
            .then(|| namespaces.how_to_accept_adoption(home, &at.namespace));
        adopt.into_iter().chain(accept).collect()
    }
}
