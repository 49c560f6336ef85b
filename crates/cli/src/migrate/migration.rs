//! Carries a migration out, and takes it back. Every step looks at the live object first and does only what is left to
//! do, so both can be interrupted and continued.
//!
//! The order leaves no moment without a copy. The tool is stopped, so nobody else writes the objects. The annotations
//! of the tool come off a copy before it is adopted, because the webhook refuses edits of companions. The source gets
//! our label and loses the annotations of the tool in one write; the controller then adopts the copies in place.
//!
//! On the way back, all companions say `when-removed: keep` before the source is unlabelled. The controller then
//! releases them, and the annotations of the tool are put back.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Display,
    time::{Duration, Instant},
};

use futures::{StreamExt, stream};
use serde_json::{Value, json};

use super::{
    label,
    requests::{CONCURRENCY, ObjectPath, Requests},
    undo_file::{NamespaceEntry, ObjectEntry, SourceEntry, UndoFile},
};
use lockstep_core::{
    failure::Failure,
    keys::Keys,
    object::{Kind, Meta, ObjectKey},
    policy::marks::say_keep,
};

/// Sources that are moved at a time. An interruption leaves at most so many half moved.
const BATCH: usize = 20;
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// How often a patch is tried again because the object has changed since it was read.
const MAX_CONFLICTS: usize = 5;
/// How many lines an error has.
const MAX_LINES: usize = 10;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{what}: {failure}")]
    Api { what: String, failure: Failure },
    #[error("{0}")]
    Changed(String),
    #[error(
        "Lockstep has not {step} within {timeout:?}:\n{}\nCheck that it runs and mirrors this kind (lockstep manifests \
         --secrets), and the Events of the sources",
        lines(.places)
    )]
    TimedOut { step: &'static str, places: Vec<String>, timeout: Duration },
    #[error("{} errors:\n{}", .0.len(), lines(.0))]
    Several(Vec<Error>),
}

/// The first lines of a list, each indented.
pub fn lines(all: &[impl Display]) -> String {
    let mut text: Vec<String> = all.iter().take(MAX_LINES).map(|line| format!("  {line}")).collect();
    if all.len() > MAX_LINES {
        text.push(format!("  and {} more", all.len() - MAX_LINES));
    }
    text.join("\n")
}

/// One migration, as its undo file says.
pub struct Migration<'a> {
    pub requests: &'a Requests,
    pub keys: &'a Keys,
    pub file: &'a UndoFile,
    /// How long the controller may take for one step.
    pub timeout: Duration,
    /// Nothing is stored.
    pub dry_run: bool,
    /// Shows progress, and what the person should know.
    pub say: fn(&str),
}

type CompanionsOf = BTreeMap<ObjectKey, Meta>;

impl Migration<'_> {
    // --- there

    /// Asks the API server and the webhook, with dry runs, what of everything that is left to do would be refused.
    pub async fn refused(&self) -> Vec<Error> {
        let dry = Self { dry_run: true, ..*self };
        let copies = self.file.sources.iter().flat_map(|source| &source.copies);
        let mut refused = errors(&self.file.namespaces, |entry| dry.accept(entry)).await;
        refused.extend(errors(copies, |copy| dry.clean(copy)).await);
        refused.extend(errors(&self.file.sources, |entry| dry.write(entry)).await);
        refused
    }

    /// Moves all sources. The first one alone: if Lockstep does not adopt its copies, it is put back.
    pub async fn apply(&self) -> Result<(), Error> {
        each(&self.file.namespaces, |entry| self.accept(entry)).await?;
        let (first, others) = self.file.sources.split_at(self.file.sources.len().min(1));
        let mut moved = 0;
        for batch in [first].into_iter().chain(others.chunks(BATCH)) {
            let outcome = self.apply_batch(batch).await;
            if moved == 0 && matches!(outcome, Err(Error::TimedOut { .. })) {
                self.undo_sources(batch).await?;
                self.take_back_acceptances().await?;
            }
            outcome?;
            moved += batch.len();
            (self.say)(&format!("moved {moved} of {} sources", self.file.sources.len()));
        }
        self.take_back_acceptances().await
    }

    async fn apply_batch(&self, batch: &[SourceEntry]) -> Result<(), Error> {
        each(batch.iter().flat_map(|entry| &entry.copies), |copy| self.clean(copy)).await?;
        each(batch, |entry| self.write(entry)).await?;
        let missing = |companions: &CompanionsOf| {
            let copies = batch.iter().flat_map(|of| of.copies.iter().map(move |copy| (&copy.key, of)));
            let missing = copies.filter(|(at, _)| !companions.contains_key(*at));
            missing.map(|(at, of)| format!("{}, of {}", label(at), of.object.key)).collect()
        };
        self.wait_for_companions("adopted", batch, missing).await?;
        // Nothing is left to adopt.
        each(batch, |entry| {
            self.patch(ObjectPath::Object(&entry.object.key), |live| {
                let is_set = live.is_some_and(|live| live.annotations.contains_key(&self.keys.adopt));
                Ok(is_set.then(|| json!({"annotations": {&self.keys.adopt: null}})))
            })
        })
        .await
    }

    /// Takes the annotations of the tool off a copy, unless it is a companion already, or gone.
    async fn clean(&self, copy: &ObjectEntry) -> Result<(), Error> {
        let key = &copy.key;
        self.patch(ObjectPath::Object(key), |live| {
            let Some(live) = live.filter(|live| !self.keys.has_marks(live)) else { return Ok(None) };
            if live.uid != copy.uid {
                return Err(Error::Changed(format!("{} was deleted and created again", label(key))));
            }
            let theirs = self.file.tool.annotations(live);
            Ok((!theirs.is_empty()).then(|| json!({"annotations": nulls(theirs.keys())})))
        })
        .await
    }

    /// Makes the object a source of ours, and no longer one of the tool, unless it is a source already.
    async fn write(&self, SourceEntry { object, written, .. }: &SourceEntry) -> Result<(), Error> {
        let key = &object.key;
        self.patch(ObjectPath::Object(key), |live| {
            let as_planned =
                |live: &Meta| live.uid == object.uid && self.file.tool.annotations(live) == object.removed;
            match live {
                Some(live) if self.keys.is_source(&live.labels) => Ok(None),
                Some(live) if as_planned(live) => {
                    let mut annotations = nulls(object.removed.keys());
                    annotations.extend(written.iter().map(|(key, value)| (key.clone(), json!(value))));
                    Ok(Some(json!({"labels": {&self.keys.managed: "true"}, "annotations": annotations})))
                }
                _ => Err(Error::Changed(format!(
                    "{} has changed since the plan was made: take back what was done so far with --undo, and start again",
                    label(key)
                ))),
            }
        })
        .await
    }

    /// Lets copies in a namespace be adopted.
    async fn accept(&self, entry: &NamespaceEntry) -> Result<(), Error> {
        let key = &self.keys.accept_adopt_from;
        self.patch(ObjectPath::Namespace(&entry.name), |live| match live {
            Some(live) if live.uid == entry.uid => {
                let is_as_before = live.annotations.get(key) == entry.before.as_ref();
                Ok(is_as_before.then(|| json!({"annotations": {key: entry.during}})))
            }
            _ => Err(Error::Changed(format!("namespace {} was deleted or created again", entry.name))),
        })
        .await
    }

    async fn take_back_acceptances(&self) -> Result<(), Error> {
        each(&self.file.namespaces, |entry| self.take_back(entry)).await
    }

    /// Takes `accept-adopt-from` back where it is still as the migration set it.
    async fn take_back(
        &self,
        NamespaceEntry { name, uid, before, during }: &NamespaceEntry,
    ) -> Result<(), Error> {
        let key = &self.keys.accept_adopt_from;
        let mut is_foreign = false;
        self.patch(ObjectPath::Namespace(name), |live| {
            let Some(live) = live.filter(|live| live.uid == *uid) else { return Ok(None) };
            let value = live.annotations.get(key);
            let is_ours = value == Some(during);
            is_foreign = !is_ours && value != before.as_ref();
            Ok(is_ours.then(|| json!({"annotations": {key: before}})))
        })
        .await?;
        if is_foreign {
            self.note(&format!(
                "somebody has changed {key} of namespace {name}: check whether `{during}` is still needed there"
            ));
        }
        Ok(())
    }

    // --- and back

    pub async fn undo(&self) -> Result<(), Error> {
        self.undo_sources(&self.file.sources).await?;
        self.take_back_acceptances().await
    }

    async fn undo_sources(&self, entries: &[SourceEntry]) -> Result<(), Error> {
        each(entries, |entry| self.keep(entry)).await?;
        (self.say)("waiting until all companions say when-removed: keep");
        let says_otherwise = |companions: &CompanionsOf| {
            let missing = companions.iter().filter(|(_, companion)| !say_keep(self.keys, companion));
            missing.map(|(at, _)| label(at)).collect()
        };
        let step = "passed on when-removed: keep, so no source was unlabelled";
        let released = self.wait_for_companions(step, entries, says_otherwise).await?;
        each(entries, |entry| self.write_back(entry)).await?;
        (self.say)("sources are unlabelled; waiting until Lockstep has released all companions");
        let all = |companions: &CompanionsOf| companions.keys().map(label).collect();
        self.wait_for_companions("released its companions", entries, all).await?;
        let copies = || entries.iter().flat_map(|entry| &entry.copies);
        each(copies(), |copy| self.restore(copy, &released)).await?;
        let known: BTreeSet<&ObjectKey> = copies().map(|copy| &copy.key).collect();
        for at in released.keys().filter(|at| !known.contains(at)).map(label) {
            self.note(&format!(
                "{at} was created by Lockstep after the migration, and stays without annotations"
            ));
        }
        Ok(())
    }

    /// Lets all companions of a source stay when it is unlabelled. A paused source would not tell them.
    async fn keep(&self, entry: &SourceEntry) -> Result<(), Error> {
        self.patch(ObjectPath::Object(&entry.object.key), |live| {
            let is_due = live.is_some_and(|live| {
                let is_ours = live.uid == entry.object.uid && self.keys.is_source(&live.labels);
                let is_set = say_keep(self.keys, live) && !live.annotations.contains_key(&self.keys.paused);
                is_ours && !is_set
            });
            let annotations = json!({&self.keys.when_removed: "keep", &self.keys.paused: null});
            Ok(is_due.then(|| json!({"annotations": annotations})))
        })
        .await
    }

    /// Makes the object a source of the tool, and no longer one of ours.
    async fn write_back(&self, entry: &SourceEntry) -> Result<(), Error> {
        self.patch(ObjectPath::Object(&entry.object.key), |live| {
            let Some(live) = live.filter(|live| live.uid == entry.object.uid) else { return Ok(None) };
            let ours =
                |map: &BTreeMap<String, String>| nulls(map.keys().filter(|key| self.keys.is_ours(key)));
            let mut annotations = ours(&live.annotations);
            annotations.extend(entry.object.removed.iter().map(|(key, value)| (key.clone(), json!(value))));
            Ok(Some(json!({"labels": ours(&live.labels), "annotations": annotations})))
        })
        .await
    }

    /// Puts the annotations of the tool back on a copy, or on the companion that was released in its place.
    async fn restore(&self, copy: &ObjectEntry, released: &CompanionsOf) -> Result<(), Error> {
        let key = &copy.key;
        let uids = [Some(&copy.uid), released.get(key).map(|companion| &companion.uid)];
        let mut is_there = false;
        self.patch(ObjectPath::Object(key), |live| {
            let live = live.filter(|live| uids.contains(&Some(&live.uid)));
            is_there = live.is_some();
            let is_due = live.is_some_and(|live| self.file.tool.annotations(live) != copy.removed);
            Ok(is_due.then(|| json!({"annotations": copy.removed})))
        })
        .await?;
        if !is_there {
            self.note(&format!(
                "{} does not exist any more, or is another object now: left alone",
                label(key)
            ));
        }
        Ok(())
    }

    /// Waits until nothing is missing for the companions of these sources, and returns the companions.
    async fn wait_for_companions(
        &self,
        step: &'static str,
        of: &[SourceEntry],
        missing: impl Fn(&CompanionsOf) -> Vec<String>,
    ) -> Result<CompanionsOf, Error> {
        let sources: BTreeSet<&ObjectKey> = of.iter().map(|entry| &entry.object.key).collect();
        let kinds: BTreeSet<Kind> = sources.iter().map(|source| source.kind).collect();
        let labels = format!("{}=true", self.keys.companion);
        let deadline = Instant::now() + self.timeout;
        loop {
            let mut companions = CompanionsOf::new();
            for kind in &kinds {
                let found = self.requests.objects(*kind, Some(&labels)).await;
                let what = format!("{} with the label {labels} cannot be listed", kind.plural());
                let found = found.map_err(|failure| Error::Api { what, failure })?;
                companions.extend(found.into_iter().filter(|(_, meta)| {
                    let source = meta.annotations.get(&self.keys.source);
                    let source = source.and_then(|text| ObjectKey::parse(*kind, text));
                    source.is_some_and(|source| sources.contains(&source))
                }));
            }
            let places = missing(&companions);
            if places.is_empty() {
                return Ok(companions);
            }
            if Instant::now() > deadline {
                return Err(Error::TimedOut { step, places, timeout: self.timeout });
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    fn note(&self, text: &str) {
        (self.say)(&format!("note: {text}"));
    }

    /// Reads an object, and patches its metadata as `change` says, if it says anything. The patch applies to just the
    /// object that was read; if that has changed, it is read again.
    async fn patch(
        &self,
        place: ObjectPath<'_>,
        mut change: impl FnMut(Option<&Meta>) -> Result<Option<Value>, Error>,
    ) -> Result<(), Error> {
        let failed = |verb: &str, failure| Error::Api { what: format!("{place} cannot be {verb}"), failure };
        let mut conflicts = 0;
        loop {
            let live = self.requests.metadata(place).await.map_err(|failure| failed("read", failure))?;
            let Some(mut metadata) = change(live.as_ref())? else { return Ok(()) };
            if let Some(live) = live {
                metadata["uid"] = json!(live.uid);
                metadata["resourceVersion"] = json!(live.resource_version);
            }
            match self.requests.patch(place, &metadata, self.dry_run).await {
                Err(Failure::Conflict) if conflicts < MAX_CONFLICTS => conflicts += 1,
                answer => return answer.map_err(|failure| failed("patched", failure)),
            }
        }
    }
}

/// Does something for each item, several at a time, and returns the errors when all have ended.
async fn errors<'a, T: 'a, F: Future<Output = Result<(), Error>>>(
    items: impl IntoIterator<Item = &'a T>,
    step: impl Fn(&'a T) -> F,
) -> Vec<Error> {
    let outcomes = stream::iter(items).map(step).buffered(CONCURRENCY);
    outcomes.filter_map(|outcome| async { outcome.err() }).collect().await
}

/// As [`errors`], and fails if there are any.
async fn each<'a, T: 'a, F: Future<Output = Result<(), Error>>>(
    items: impl IntoIterator<Item = &'a T>,
    step: impl Fn(&'a T) -> F,
) -> Result<(), Error> {
    let mut errors = errors(items, step).await;
    match errors.len() {
        0 => Ok(()),
        1 => Err(errors.remove(0)),
        _ => Err(Error::Several(errors)),
    }
}

fn nulls<'a>(keys: impl Iterator<Item = &'a String>) -> serde_json::Map<String, Value> {
    keys.map(|key| (key.clone(), Value::Null)).collect()
}
