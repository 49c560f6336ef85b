//! What the controller would do for a source that is only tried (`kubectl apply --dry-run=server`), as one warning:
//! every dry run in CI becomes a plan.

use std::{collections::HashMap, time::Duration};

use futures::{StreamExt, stream::FuturesUnordered};
use http::StatusCode;
use kube::{Client, api::GetParams, client::Body, core::Request as ApiRequest};

use super::fair_semaphore::{Caller, FairSemaphore};
use lockstep_core::{
    admission::admission_request::Operation,
    keys::Keys,
    object::{Kind, ObjectKey},
    plan::{
        Holder,
        outcome::{Outcome, PlaceEffect, Verb, WARNING},
    },
    text::{shorten, some_of},
    world::{NamespaceRules, ObservedSource, Source, World},
};

/// How many places are read, to see whether a foreign object has the name.
const MAX_LOOKUPS: usize = 20;
/// Reads in flight, for all requests together.
const MAX_CONCURRENT_LOOKUPS: usize = 16;
/// The API server waits three seconds for a review, and the rights have been checked before.
const LOOKUP_TIMEOUT: Duration = Duration::from_millis(800);
/// How many companions of each kind are named.
const MAX_NAMED: usize = 5;
/// The API server cuts warnings once all of a request exceed 4,096 characters.
const MAX_CHARS: usize = 900;

/// A source as it would be, without content; none if the object would be no source any more.
pub struct Preview {
    key: ObjectKey,
    source: Option<Source>,
}

impl Preview {
    /// Hashes the content, so large objects are read off the worker threads.
    pub fn of(
        keys: &Keys,
        rules: &NamespaceRules,
        kind: Kind,
        namespace: &str,
        operation: Operation,
    ) -> Self {
        let (object, is_gone) = match operation {
            Operation::Create { new } | Operation::Update { new, .. } => (new, false),
            Operation::Delete { old } => (old, true),
        };
        let key = ObjectKey::new(kind, namespace, &object.metadata.name);
        let is_source = !is_gone && keys.is_source(&object.metadata.labels);
        let source = is_source.then(|| ObservedSource::read(keys, rules, kind, object).source);
        Self { key, source }
    }

    /// Whether planning for the source looks only at namespaces that it lists, or at others that its author has the
    /// rights for. Anybody may ask for consent, so nothing is expanded for that.
    pub fn is_bounded(&self, has_rights: bool) -> bool {
        let desired = self.source.as_ref().and_then(|source| source.desired.as_ref().ok());
        let targets = desired.map(|desired| &desired.policy.targets);
        targets.is_none_or(|targets| !targets.has_patterns() || (has_rights && !targets.needs_consent))
    }

    pub fn plan(&self, world: &World) -> Outcome {
        Outcome::of(world, &self.key, self.source.as_ref())
    }

    /// Sorts out the creates that meet an object, and tells what happens. `found`: whether an object has the name,
    /// where that is known.
    pub fn warning(&self, world: &World, mut outcome: Outcome, found: &HashMap<ObjectKey, bool>) -> String {
        let adopts = self.source.as_ref().and_then(Source::active_policy).is_some_and(|policy| policy.adopt);
        let home = &self.key.namespace;
        outcome.complete(|at| {
            Some(Some(if !*found.get(at)? {
                PlaceEffect::CREATED
            } else if adopts && world.namespaces().accepts_adoption(home, &at.namespace) {
                PlaceEffect::ADOPTED
            } else {
                PlaceEffect::Conflict(Holder::Foreign)
            }))
        });
        describe(&outcome)
    }
}

/// `lockstep plan: create 37, update 4, delete 2 (team-b; team-c), conflict 1 (payments/trusted-ca, not ours)`
fn describe(outcome: &Outcome) -> String {
    let names = |verb: Verb| -> Vec<String> {
        let changed = outcome.effects.iter().filter(|(_, effect)| effect.verb() == verb);
        changed.map(|(at, _)| at.namespace.to_string()).collect()
    };
    let conflicts = outcome.effects.iter().filter_map(|(at, effect)| match effect {
        PlaceEffect::Conflict(Holder::Companion { of }) => Some(format!("{at}, of {of}")),
        PlaceEffect::Conflict(_) => Some(format!("{at}, not ours")),
        PlaceEffect::Change(..) => None,
    });
    let mut texts = Vec::new();
    let mut tell = |what: &str, names: Vec<String>, are_named: bool| {
        let named =
            if are_named { format!(" ({})", some_of(&names, MAX_NAMED, "; ")) } else { String::new() };
        texts.extend((!names.is_empty()).then(|| format!("{what} {}{named}", names.len())));
    };
    tell("create", names(Verb::Create), false);
    tell("update", [names(Verb::Update), names(Verb::Recreate)].concat(), false);
    tell("adopt", names(Verb::Adopt), false);
    tell("delete", names(Verb::Delete), true);
    tell("release", names(Verb::Release), true);
    tell("conflict", conflicts.collect(), true);
    if texts.is_empty() {
        texts.push("nothing to do".to_owned());
    }
    if outcome.not_checked > 0 {
        texts.push(format!("{} not checked for other objects of that name", outcome.not_checked));
    }
    shorten(&format!("{WARNING}{}", texts.join(", ")), MAX_CHARS)
}

/// Reads whether objects exist.
pub struct Lookups {
    client: Client,
    calls: FairSemaphore,
}

impl Lookups {
    pub fn new(client: Client) -> Self {
        Self { client, calls: FairSemaphore::new(MAX_CONCURRENT_LOOKUPS) }
    }

    /// Whether objects have the names of the first companions that would be created. What is not answered in time is
    /// left out.
    pub async fn find(&self, caller: Caller, outcome: &Outcome) -> HashMap<ObjectKey, bool> {
        let read = async |at: ObjectKey| (self.exists(caller.clone(), &at).await, at);
        let mut reads: FuturesUnordered<_> = outcome.creates().take(MAX_LOOKUPS).cloned().map(read).collect();
        let mut found = HashMap::new();
        let all = async {
            while let Some((exists, at)) = reads.next().await {
                found.extend(exists.map(|exists| (at, exists)));
            }
        };
        let _ = tokio::time::timeout(LOOKUP_TIMEOUT, all).await;
        found
    }

    /// None if the API server does not say.
    async fn exists(&self, caller: Caller, at: &ObjectKey) -> Option<bool> {
        let _permit = self.calls.acquire(caller, 1).await;
        let path = format!("/api/v1/namespaces/{}/{}", at.namespace, at.kind.plural());
        let request = ApiRequest::new(path).get_metadata(&at.name, &GetParams::default()).ok()?;
        // The answer is not read: tenants choose how long an object's metadata is.
        let answer = self.client.send(request.map(Body::from)).await.ok()?;
        match answer.status() {
            status if status.is_success() => Some(true),
            StatusCode::NOT_FOUND => Some(false),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_core::testing::{cluster::Cluster, companion, configmap, keys, namespace, rules, source};

    /// The plan for a source that exists already, in another state, or that is new.
    fn preview(cluster: &Cluster, mut draft: lockstep_core::testing::ObjectBuilder) -> String {
        let key = draft.key();
        if let Some(known) = cluster.object(&key) {
            draft = draft.uid(&known.metadata.uid);
        }
        let source = Some(ObservedSource::read(&keys(), &rules(), draft.kind, draft.object).source);
        told(cluster, &Preview { key, source }, &[])
    }

    /// The warning, given whether objects have the names of new companions; of the others nothing has the name.
    fn told(cluster: &Cluster, preview: &Preview, found: &[(&str, Option<bool>)]) -> String {
        cluster.world.read(|world| {
            let outcome = preview.plan(world);
            let exists = |at: &ObjectKey| {
                let answer = found.iter().find(|(namespace, _)| **namespace == *at.namespace);
                answer.map_or(Some(false), |(_, exists)| *exists).map(|exists| (at.clone(), exists))
            };
            let found = outcome.creates().filter_map(exists).collect();
            preview.warning(world, outcome, &found)
        })
    }

    #[test]
    fn plan_of_a_source_that_is_only_tried_counts_what_would_happen() {
        let mut cluster = Cluster::with(&["home", "team-a", "team-b", "other"]);
        let draft = |targets: &str| source("home", "c").data("a", "1").annotate("target-namespaces", targets);
        assert_eq!(preview(&cluster, draft("team-*")), "lockstep plan: create 2");
        let key = cluster.put(draft("team-*,."));
        cluster.reconcile(&key);
        assert_eq!(preview(&cluster, draft("team-*,.")), "lockstep plan: nothing to do");
        assert_eq!(
            preview(&cluster, draft("team-a").data("a", "2")),
            "lockstep plan: update 1, delete 2 (home; team-b)"
        );
        let kept = draft("team-a,.").annotate("when-removed", "keep");
        assert_eq!(preview(&cluster, kept), "lockstep plan: update 2, release 1 (team-b)");
        // The world itself is unchanged.
        assert!(cluster.plan(&key).is_empty());
        cluster.put(companion("other", "c-synced").of("else/c"));
        assert_eq!(
            preview(&cluster, draft("team-*,.,other")),
            "lockstep plan: conflict 1 (other/c-synced, of else/c)"
        );
        let gone = Preview { key, source: None };
        assert_eq!(told(&cluster, &gone, &[]), "lockstep plan: delete 3 (home; team-a; team-b)");
    }

    #[test]
    fn creates_that_meet_an_object_are_conflicts_or_adoptions_and_others_are_not_checked() {
        let mut cluster = Cluster::with(&["home", "n0", "n1", "n2", "n3"]);
        let draft = |adopt: &str| {
            let source = source("home", "x").annotate("target-namespaces", "n*").annotate("adopt", adopt);
            let key = source.key();
            let source = ObservedSource::read(&keys(), &rules(), source.kind, source.object).source;
            Preview { key, source: Some(source) }
        };
        let found = [("n0", Some(true)), ("n2", None), ("n3", None)];
        assert_eq!(
            told(&cluster, &draft("false"), &found),
            "lockstep plan: create 3, conflict 1 (n0/x-synced, not ours), 2 not checked for other objects of that name"
        );
        // A namespace that does not accept the adoption keeps its object.
        assert!(told(&cluster, &draft("true"), &found).contains("conflict 1 (n0/x-synced, not ours)"));
        cluster.namespace(namespace("n0").annotate("accept-adopt-from", "home"));
        let adopted = told(&cluster, &draft("true"), &found);
        assert!(adopted.starts_with("lockstep plan: create 3, adopt 1, 2 not checked"), "{adopted}");
    }

    #[test]
    fn text_is_short_however_many_and_long_the_names_are() {
        let at = |n: usize| configmap(&format!("{n:063}"), &"x".repeat(253));
        let deleted = (0..500).map(|n| (at(n), PlaceEffect::Change(Verb::Delete, "source gone")));
        let taken = (0..500).map(|n| (at(n), PlaceEffect::Conflict(Holder::Foreign)));
        let text = describe(&Outcome { effects: deleted.chain(taken).collect(), ..Outcome::default() });
        assert!(text.chars().count() <= MAX_CHARS + 1);
        assert!(text.contains("delete 500"));
    }

    #[test]
    fn excluded_namespace_is_not_counted() {
        let mut cluster = Cluster::with(&["home"]);
        cluster.namespace(namespace("away").label("exclude", "true"));
        let draft = source("home", "c").annotate("target-namespaces", ".,away");
        assert_eq!(preview(&cluster, draft), "lockstep plan: create 1");
    }
}
