//! What the mirror would do for a source that is only tried (`kubectl apply --dry-run=server`), as one warning: every
//! dry run in CI becomes a plan.

use std::{collections::HashSet, fmt, time::Duration};

use futures::{StreamExt, stream};
use http::StatusCode;
use kube::{Client, api::GetParams, client::Body, core::Request as ApiRequest};

use super::{
    admission_request::Operation,
    fair_semaphore::{Caller, FairSemaphore},
};
use crate::{
    keys::Keys,
    object::{Kind, ObjectKey},
    plan::{Action, Holder, Trouble, plan_as},
    policy::Targets,
    text::shorten,
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

/// The plan for a source, by what happens to its companions.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    pub create: Vec<ObjectKey>,
    update: usize,
    adopt: usize,
    delete: Vec<ObjectKey>,
    release: Vec<ObjectKey>,
    conflicts: Vec<String>,
    not_checked: usize,
    /// Where objects that have the name of a companion are taken over.
    adopts: HashSet<ObjectKey>,
}

impl Preview {
    /// Hashes the content, so large objects are read off the worker threads.
    #[must_use]
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

    /// Whether planning for the source looks at more namespaces than it lists.
    #[must_use]
    pub fn has_patterns(&self) -> bool {
        self.targets().is_some_and(Targets::has_patterns)
    }

    /// Anybody may ask for consent, so nothing is expanded for that here.
    #[must_use]
    pub fn needs_consent(&self) -> bool {
        self.targets().is_some_and(|targets| targets.needs_consent)
    }

    fn targets(&self) -> Option<&Targets> {
        Some(&self.source.as_ref()?.desired.as_ref().ok()?.policy.targets)
    }

    #[must_use]
    pub fn plan(&self, world: &World) -> Outcome {
        let plan = plan_as(world, &self.key, self.source.as_ref(), None);
        let policy = self.source.as_ref().and_then(Source::active_policy);
        let mut outcome = Outcome::default();
        for change in plan.changes {
            match change.action {
                Action::Create { .. } => {
                    let home = &self.key.namespace;
                    let accepts = world.namespaces().accepts_adoption(home, &change.at.namespace);
                    if accepts && policy.is_some_and(|policy| policy.adopt) {
                        outcome.adopts.insert(change.at.clone());
                    }
                    outcome.create.push(change.at);
                }
                Action::Update { .. } | Action::Recreate { .. } => outcome.update += 1,
                Action::Delete { .. } => outcome.delete.push(change.at),
                Action::Release { .. } => outcome.release.push(change.at),
                Action::DeleteLost { .. } => {}
            }
        }
        for trouble in plan.troubles {
            if let Trouble::Conflict { at, holder } = trouble {
                outcome.conflicts.push(match holder {
                    Holder::Companion { of } => format!("{at}, of {of}"),
                    Holder::Foreign | Holder::Bound | Holder::NotAccepting => format!("{at}, not ours"),
                });
            }
        }
        outcome
    }
}

impl Outcome {
    /// Sorts out the creates that meet an object. `found`: whether each of the first creates does, if that is known.
    fn met(&mut self, found: &[Option<bool>]) {
        let creates = std::mem::take(&mut self.create);
        for (n, at) in creates.into_iter().enumerate() {
            match found.get(n).copied().flatten() {
                Some(true) if self.adopts.contains(&at) => self.adopt += 1,
                Some(true) => self.conflicts.push(format!("{at}, not ours")),
                Some(false) => self.create.push(at),
                None => {
                    self.not_checked += 1;
                    self.create.push(at);
                }
            }
        }
    }
}

/// `lockstep plan: create 37, update 4, delete 2 (team-b, team-c), conflict 1 (payments/trusted-ca, not ours)`
impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let named = |names: Vec<String>| {
            let more = match names.len().checked_sub(MAX_NAMED) {
                Some(more @ 1..) => format!(" and {more} more"),
                _ => String::new(),
            };
            let first = names.into_iter().take(MAX_NAMED).collect::<Vec<_>>().join("; ");
            format!("({first}{more})")
        };
        let places = |at: &[ObjectKey]| named(at.iter().map(|at| at.namespace.to_string()).collect());
        let parts = [
            ("create", self.create.len(), String::new()),
            ("update", self.update, String::new()),
            ("adopt", self.adopt, String::new()),
            ("delete", self.delete.len(), places(&self.delete)),
            ("release", self.release.len(), places(&self.release)),
            ("conflict", self.conflicts.len(), named(self.conflicts.clone())),
        ];
        let mut texts: Vec<String> = parts
            .into_iter()
            .filter(|(_, count, _)| *count > 0)
            .map(|(what, count, names)| format!("{what} {count} {names}").trim_end().to_owned())
            .collect();
        if texts.is_empty() {
            texts.push("nothing to do".to_owned());
        }
        if self.not_checked > 0 {
            texts.push(format!("{} not checked for other objects of that name", self.not_checked));
        }
        f.write_str(&shorten(&format!("lockstep plan: {}", texts.join(", ")), MAX_CHARS))
    }
}

/// Reads whether objects exist.
pub struct Lookups {
    client: Client,
    calls: FairSemaphore,
}

impl Lookups {
    #[must_use]
    pub fn new(client: Client) -> Self {
        Self { client, calls: FairSemaphore::new(MAX_CONCURRENT_LOOKUPS) }
    }

    /// Looks whether foreign objects have the names of the first companions that would be created.
    pub async fn complete(&self, caller: Caller, outcome: &mut Outcome) {
        let places: Vec<ObjectKey> = outcome.create.iter().take(MAX_LOOKUPS).cloned().collect();
        let mut found = vec![None; places.len()];
        let read = |(n, at): (usize, ObjectKey)| {
            let caller = caller.clone();
            async move { (n, self.exists(caller, &at).await) }
        };
        let reads: Vec<_> = places.into_iter().enumerate().map(read).collect();
        let mut reads = stream::iter(reads).buffer_unordered(MAX_CONCURRENT_LOOKUPS);
        let all = async {
            while let Some((n, exists)) = reads.next().await {
                found[n] = exists;
            }
        };
        // What has not been answered by then is not checked.
        drop(tokio::time::timeout(LOOKUP_TIMEOUT, all).await);
        drop(reads);
        outcome.met(&found);
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
    use crate::testing::{cluster::Cluster, companion, configmap, keys, namespace, rules, source};

    /// The plan for a source that exists already, in another state, or that is new.
    fn preview(cluster: &Cluster, mut draft: crate::testing::ObjectBuilder) -> Outcome {
        let key = draft.key();
        if let Some(known) = cluster.object(&key) {
            draft = draft.uid(&known.metadata.uid);
        }
        let source = Some(ObservedSource::read(&keys(), &rules(), draft.kind, draft.object).source);
        cluster.world.read(|world| Preview { key, source }.plan(world))
    }

    #[test]
    fn plan_of_a_source_that_is_only_tried_counts_what_would_happen() {
        let mut cluster = Cluster::with(&["home", "team-a", "team-b", "other"]);
        let draft = |targets: &str| source("home", "c").data("a", "1").annotate("target-namespaces", targets);
        assert_eq!(preview(&cluster, draft("team-*")).to_string(), "lockstep plan: create 2");
        let key = cluster.put(draft("team-*,."));
        cluster.reconcile(&key);
        assert_eq!(preview(&cluster, draft("team-*,.")).to_string(), "lockstep plan: nothing to do");
        assert_eq!(
            preview(&cluster, draft("team-a").data("a", "2")).to_string(),
            "lockstep plan: update 1, delete 2 (home; team-b)"
        );
        let kept = draft("team-a,.").annotate("when-removed", "keep");
        assert_eq!(preview(&cluster, kept).to_string(), "lockstep plan: update 2, release 1 (team-b)");
        // The world itself is unchanged.
        assert!(cluster.plan(&key).is_empty());
        cluster.put(companion("other", "c-synced").of("else/c"));
        assert_eq!(
            preview(&cluster, draft("team-*,.,other")).to_string(),
            "lockstep plan: conflict 1 (other/c-synced, of else/c)"
        );
        let gone = Preview { key, source: None };
        let outcome = cluster.world.read(|world| gone.plan(world));
        assert_eq!(outcome.to_string(), "lockstep plan: delete 3 (home; team-a; team-b)");
    }

    #[test]
    fn creates_that_meet_an_object_are_conflicts_or_adoptions_and_others_are_not_checked() {
        let at = |n: usize| configmap(&format!("n{n}"), "x");
        let outcome = || Outcome { create: (0..4).map(at).collect(), ..Outcome::default() };
        let found = [Some(true), Some(false), None];
        let mut conflict = outcome();
        conflict.met(&found);
        assert_eq!(
            conflict.to_string(),
            "lockstep plan: create 3, conflict 1 (n0/x, not ours), 2 not checked for other objects of that name"
        );
        let mut adopted = Outcome { adopts: (0..4).map(at).collect(), ..outcome() };
        adopted.met(&found);
        assert!(
            adopted.to_string().starts_with("lockstep plan: create 3, adopt 1, 2 not checked"),
            "{adopted}"
        );
        // A namespace that does not accept the adoption keeps its object.
        let mut kept = Outcome { adopts: [at(1)].into(), ..outcome() };
        kept.met(&found);
        assert!(kept.to_string().contains("conflict 1 (n0/x, not ours)"), "{kept}");
    }

    #[test]
    fn text_is_short_however_many_and_long_the_names_are() {
        let long = |n: usize| configmap(&format!("{n:063}"), &"x".repeat(253));
        let conflicts = (0..500).map(|n| format!("{}, not ours", long(n))).collect();
        let outcome = Outcome { delete: (0..500).map(long).collect(), conflicts, ..Outcome::default() };
        assert!(outcome.to_string().chars().count() <= MAX_CHARS + 1);
        assert!(outcome.to_string().contains("delete 500"));
    }

    #[test]
    fn excluded_namespace_is_not_counted() {
        let mut cluster = Cluster::with(&["home"]);
        cluster.namespace(namespace("away").label("exclude", "true"));
        let draft = source("home", "c").annotate("target-namespaces", ".,away");
        assert_eq!(preview(&cluster, draft).to_string(), "lockstep plan: create 1");
    }
}
