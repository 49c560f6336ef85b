//! Carries a migration out, and takes it back. Every step looks at the live object first and does only what is left to
//! do, so both can be interrupted and continued.
//!
//! The order leaves no moment without a copy. The tool is stopped, so nobody else writes the objects. The annotations of
//! the tool come off a copy before it is adopted, because the guard refuses edits of companions. The source gets our
//! label and loses the annotations of the tool in one write; the mirror then adopts the copies in place.
//!
//! On the way back, all companions say `when-removed: keep` before the source is unlabelled. The mirror then releases
//! them, and the annotations of the tool are put back.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use futures::{StreamExt, stream};
use serde_json::{Value, json};

use super::{
    cluster::{CONCURRENCY, Cluster, Place},
    label,
    record::{NamespaceEntry, ObjectEntry, Record, SourceEntry},
};
use crate::{
    client::Failure,
    keys::Keys,
    marks::say_keep,
    object::{Kind, Meta, ObjectKey},
};

/// Sources that are moved at a time. An interruption leaves at most so many half moved.
const BATCH: usize = 20;
const POLL_INTERVAL: Duration = Duration::from_millis(200);
/// How often a patch is tried again because the object has changed since it was read.
const MAX_CONFLICTS: usize = 5;
/// How many lines of one kind an error has.
const MAX_LINES: usize = 10;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{what}: {failure}")]
    Api { what: String, failure: Failure },
    #[error("nothing was written, because this would be refused:\n{}", lines(.0))]
    Refused(Vec<String>),
    #[error("{0}")]
    Changed(String),
    #[error(
        "Lockstep has not adopted within {timeout:?}:\n{}\nCheck that it runs and mirrors this kind (lockstep manifests \
         --secrets), and the Events of the sources",
        lines(.places)
    )]
    NotAdopted { places: Vec<String>, timeout: Duration },
    #[error(
        "these companions do not say `when-removed: keep` within {timeout:?}, so no source was unlabelled:\n{}\nCheck that \
         Lockstep runs",
        lines(.places)
    )]
    NotKept { places: Vec<String>, timeout: Duration },
    #[error("Lockstep has not released these companions within {timeout:?}:\n{}\nCheck that it runs", lines(.places))]
    NotReleased { places: Vec<String>, timeout: Duration },
    #[error("{} sources could not be moved:\n{}", .0.len(), lines(.0))]
    Several(Vec<String>),
}

fn lines(all: &[String]) -> String {
    let mut text: Vec<String> = all.iter().take(MAX_LINES).map(|line| format!("  {line}")).collect();
    if all.len() > MAX_LINES {
        text.push(format!("  and {} more", all.len() - MAX_LINES));
    }
    text.join("\n")
}

/// One migration, as its record says.
pub struct Migration<'a> {
    pub cluster: &'a Cluster,
    pub keys: &'a Keys,
    pub record: &'a Record,
    /// How long the mirror may take for one step.
    pub timeout: Duration,
    /// Shows progress.
    pub say: &'a (dyn Fn(&str) + Sync),
}

impl Migration<'_> {
    // --- there

    /// Asks the API server and the guard, with dry runs, whether everything that is left to do would be allowed.
    pub async fn check(&self) -> Result<(), Error> {
        let mut refused = errors(&self.record.namespaces, |entry| self.accept(entry, true)).await;
        let sources = stream::iter(&self.record.sources).map(|entry| async {
            match self.is_written(entry).await {
                Ok(true) => Vec::new(),
                Ok(false) => {
                    let mut refused = errors(&entry.copies, |copy| self.clean(copy, true)).await;
                    refused.extend(self.write(entry, true).await.err());
                    refused
                }
                Err(error) => vec![error],
            }
        });
        refused.extend(sources.buffered(CONCURRENCY).collect::<Vec<_>>().await.into_iter().flatten());
        if refused.is_empty() {
            return Ok(());
        }
        Err(Error::Refused(refused.iter().map(ToString::to_string).collect()))
    }

    /// Moves all sources. The first one alone: if Lockstep does not adopt its copies, it is put back.
    pub async fn apply(&self) -> Result<Vec<String>, Error> {
        each(&self.record.namespaces, |entry| self.accept(entry, false)).await?;
        let (first, others) = self.record.sources.split_at(self.record.sources.len().min(1));
        let mut moved = 0;
        for batch in [first].into_iter().chain(others.chunks(BATCH)) {
            match self.apply_batch(batch).await {
                Ok(()) => {}
                Err(error @ Error::NotAdopted { .. }) if moved == 0 => {
                    self.undo_sources(batch).await?;
                    self.take_back_acceptances().await?;
                    return Err(error);
                }
                Err(error) => return Err(error),
            }
            moved += batch.len();
            (self.say)(&format!("moved {moved} of {} sources", self.record.sources.len()));
        }
        self.take_back_acceptances().await
    }

    async fn apply_batch(&self, batch: &[SourceEntry]) -> Result<(), Error> {
        let mut errors = errors(batch, |entry| self.move_source(entry)).await;
        match (errors.pop(), errors.is_empty()) {
            (None, _) => {}
            (Some(error), true) => return Err(error),
            (Some(error), false) => {
                errors.push(error);
                return Err(Error::Several(errors.iter().map(ToString::to_string).collect()));
            }
        }
        self.wait_until_adopted(batch).await?;
        each(batch, |entry| self.finish(entry)).await.map(drop)
    }

    /// Nothing is left to adopt.
    async fn finish(&self, entry: &SourceEntry) -> Result<(), Error> {
        let key = entry.object.key();
        self.patch(Place::Object(&key), false, |live| {
            let live = live.ok_or_else(|| gone(&key))?;
            let is_set = live.annotations.contains_key(&self.keys.adopt);
            Ok(is_set.then(|| json!({"annotations": {&self.keys.adopt: null}})))
        })
        .await
    }

    /// Whether the source has our label already.
    async fn is_written(&self, entry: &SourceEntry) -> Result<bool, Error> {
        let key = entry.object.key();
        let live = self.metadata(Place::Object(&key)).await?.ok_or_else(|| gone(&key))?;
        Ok(self.keys.is_source(&live.labels))
    }

    async fn move_source(&self, entry: &SourceEntry) -> Result<(), Error> {
        if self.is_written(entry).await? {
            return Ok(());
        }
        each(&entry.copies, |copy| self.clean(copy, false)).await?;
        if let Err(error) = self.write(entry, false).await {
            // The tool must know its copies again when it is started.
            drop(each(&entry.copies, |copy| self.restore(copy, None)).await);
            return Err(error);
        }
        Ok(())
    }

    /// Takes the annotations of the tool off a copy, unless it is a companion already, or gone.
    async fn clean(&self, copy: &ObjectEntry, dry_run: bool) -> Result<(), Error> {
        let key = copy.key();
        self.patch(Place::Object(&key), dry_run, |live| {
            let Some(live) = live else { return Ok(None) };
            if live.uid != copy.uid {
                return Err(Error::Changed(format!("{} was deleted and created again", label(&key))));
            }
            let theirs = self.record.tool.annotations(live);
            let is_done = theirs.is_empty() || self.keys.has_marks(live);
            Ok((!is_done).then(|| json!({"annotations": nulls(theirs.keys())})))
        })
        .await
    }

    /// Makes the object a source of ours, and no longer one of the tool.
    async fn write(&self, entry: &SourceEntry, dry_run: bool) -> Result<(), Error> {
        let key = entry.object.key();
        self.patch(Place::Object(&key), dry_run, |live| {
            let live = live.ok_or_else(|| gone(&key))?;
            if live.uid != entry.object.uid || self.record.tool.annotations(live) != entry.object.removed {
                return Err(Error::Changed(format!(
                    "{} has changed since the plan was made: take back what was done so far with --undo, and start again",
                    label(&key)
                )));
            }
            let mut annotations = nulls(entry.object.removed.keys());
            annotations.extend(entry.written.iter().map(|(key, value)| (key.clone(), json!(value))));
            Ok(Some(json!({"labels": {&self.keys.managed: "true"}, "annotations": annotations})))
        })
        .await
    }

    async fn wait_until_adopted(&self, batch: &[SourceEntry]) -> Result<(), Error> {
        let of_source = |entry: &SourceEntry| {
            let source = entry.object.key().to_string();
            entry.copies.iter().map(move |copy| (copy.key(), source.clone())).collect::<Vec<_>>()
        };
        let mut waiting: Vec<(ObjectKey, String)> = batch.iter().flat_map(of_source).collect();
        let deadline = Instant::now() + self.timeout;
        loop {
            let reads = stream::iter(waiting).map(|(copy, source)| async {
                let live = self.metadata(Place::Object(&copy)).await?;
                let is_adopted = live.is_some_and(|live| self.is_companion_of(&live, &source));
                Ok((!is_adopted).then_some((copy, source)))
            });
            let reads: Vec<Result<_, Error>> = reads.buffered(CONCURRENCY).collect().await;
            waiting = reads.into_iter().collect::<Result<Vec<_>, Error>>()?.into_iter().flatten().collect();
            if waiting.is_empty() {
                return Ok(());
            }
            if Instant::now() > deadline {
                let places = waiting.iter().map(|(copy, source)| format!("{}, of {source}", label(copy)));
                return Err(Error::NotAdopted { places: places.collect(), timeout: self.timeout });
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    fn is_companion_of(&self, live: &Meta, source: &str) -> bool {
        let is_labelled = live.labels.get(&self.keys.companion).is_some_and(|value| value == "true");
        is_labelled && live.annotations.get(&self.keys.source).is_some_and(|named| named == source)
    }

    async fn accept(&self, entry: &NamespaceEntry, dry_run: bool) -> Result<(), Error> {
        let key = &self.keys.accept_adopt_from;
        self.patch(Place::Namespace(&entry.name), dry_run, |live| match live {
            Some(live) if live.uid == entry.uid => {
                let is_as_before = live.annotations.get(key) == entry.before.as_ref();
                Ok(is_as_before.then(|| json!({"annotations": {key: entry.during}})))
            }
            _ => Err(Error::Changed(format!("namespace {} was deleted or created again", entry.name))),
        })
        .await
    }

    /// Takes `accept-adopt-from` back where it is still as the migration set it. Returns where it is not.
    async fn take_back_acceptances(&self) -> Result<Vec<String>, Error> {
        let notes = each(&self.record.namespaces, |entry| self.take_back(entry)).await?;
        Ok(notes.into_iter().flatten().collect())
    }

    async fn take_back(&self, entry: &NamespaceEntry) -> Result<Option<String>, Error> {
        let key = &self.keys.accept_adopt_from;
        let mut is_foreign = false;
        self.patch(Place::Namespace(&entry.name), false, |live| {
            let value = live.filter(|live| live.uid == entry.uid).map(|live| live.annotations.get(key));
            let is_ours = value == Some(Some(&entry.during));
            is_foreign = !is_ours && value.is_some_and(|value| value != entry.before.as_ref());
            Ok(is_ours.then(|| json!({"annotations": {key: entry.before}})))
        })
        .await?;
        Ok(is_foreign.then(|| {
            format!(
                "somebody has changed {key} of namespace {}: check whether `{}` is still needed there",
                entry.name, entry.during
            )
        }))
    }

    // --- and back

    /// Takes the migration back. Returns what a person should know.
    pub async fn undo(&self) -> Result<Vec<String>, Error> {
        self.check_undo().await?;
        let mut notes = self.undo_sources(&self.record.sources).await?;
        notes.extend(self.take_back_acceptances().await?);
        Ok(notes)
    }

    async fn check_undo(&self) -> Result<(), Error> {
        let all = self.record.sources.iter().flat_map(|source| source.copies.iter().chain([&source.object]));
        let places: BTreeSet<(Kind, &str)> =
            all.map(|object| (object.kind, object.namespace.as_str())).collect();
        let mut refused = errors(&places, |(kind, namespace)| self.may_patch(*kind, namespace)).await;
        refused.extend(errors(&self.record.sources, |entry| self.keep(entry, true)).await);
        if refused.is_empty() {
            return Ok(());
        }
        Err(Error::Refused(refused.iter().map(ToString::to_string).collect()))
    }

    /// Fails unless the person may patch objects of a kind in a namespace. A dry run cannot tell: the guard refuses
    /// changes of companions, which the copies still are.
    async fn may_patch(&self, kind: Kind, namespace: &str) -> Result<(), Error> {
        let what = || format!("{} in namespace {namespace} cannot be patched", kind.plural());
        match self.cluster.may_patch(kind, namespace).await {
            Ok(true) => Ok(()),
            Ok(false) => {
                let failure = Failure::Forbidden("you do not have the right to patch them".to_owned());
                Err(Error::Api { what: what(), failure })
            }
            Err(failure) => Err(Error::Api { what: what(), failure }),
        }
    }

    async fn undo_sources(&self, entries: &[SourceEntry]) -> Result<Vec<String>, Error> {
        each(entries, |entry| self.keep(entry, false)).await?;
        let sources: BTreeSet<ObjectKey> = entries.iter().map(|entry| entry.object.key()).collect();
        (self.say)("waiting until all companions say when-removed: keep");
        let says_keep = |companions: &Companions| {
            let missing = companions.iter().filter(|(_, companion)| !say_keep(self.keys, companion));
            missing.map(|(at, _)| label(at)).collect::<Vec<_>>()
        };
        let timeout = self.timeout;
        let (released, missing) = self.wait_for_companions(&sources, says_keep).await?;
        if !missing.is_empty() {
            return Err(Error::NotKept { places: missing, timeout });
        }
        each(entries, |entry| self.write_back(entry)).await?;
        (self.say)("sources are unlabelled; waiting until Lockstep has released all companions");
        let all = |companions: &Companions| companions.keys().map(label).collect::<Vec<_>>();
        let (_, missing) = self.wait_for_companions(&sources, all).await?;
        if !missing.is_empty() {
            return Err(Error::NotReleased { places: missing, timeout });
        }
        let copies: Vec<&ObjectEntry> = entries.iter().flat_map(|entry| &entry.copies).collect();
        let restored = each(&copies, |copy| self.restore(copy, released.get(&copy.key()))).await?;
        let mut notes: Vec<String> = restored.into_iter().flatten().collect();
        let known: BTreeSet<ObjectKey> = copies.iter().map(|copy| copy.key()).collect();
        let newer = released.keys().filter(|at| !known.contains(*at));
        notes.extend(newer.map(|at| {
            format!(
                "{} was created by Lockstep after the migration, and stays without annotations",
                label(at)
            )
        }));
        Ok(notes)
    }

    /// Lets all companions of a source stay when it is unlabelled. A paused source would not tell them.
    async fn keep(&self, entry: &SourceEntry, dry_run: bool) -> Result<(), Error> {
        let key = entry.object.key();
        self.patch(Place::Object(&key), dry_run, |live| {
            let ours = live.filter(|live| live.uid == entry.object.uid && self.keys.is_source(&live.labels));
            let is_due = ours.is_some_and(|live| {
                !say_keep(self.keys, live) || live.annotations.contains_key(&self.keys.paused)
            });
            let annotations = json!({&self.keys.when_removed: "keep", &self.keys.paused: null});
            Ok(is_due.then(|| json!({"annotations": annotations})))
        })
        .await
    }

    /// Makes the object a source of the tool, and no longer one of ours.
    async fn write_back(&self, entry: &SourceEntry) -> Result<(), Error> {
        let key = entry.object.key();
        self.patch(Place::Object(&key), false, |live| {
            let Some(live) = live.filter(|live| live.uid == entry.object.uid) else { return Ok(None) };
            let ours =
                |map: &BTreeMap<String, String>| nulls(map.keys().filter(|key| self.keys.is_ours(key)));
            let mut annotations = ours(&live.annotations);
            annotations.extend(entry.object.removed.iter().map(|(key, value)| (key.clone(), json!(value))));
            Ok(Some(json!({"labels": ours(&live.labels), "annotations": annotations})))
        })
        .await
    }

    /// Puts the annotations of the tool back on a copy. `released` is the companion that was there, which may be a newer
    /// object than the copy that moved. Returns what a person should know.
    async fn restore(&self, copy: &ObjectEntry, released: Option<&Meta>) -> Result<Option<String>, Error> {
        let key = copy.key();
        let mut note = None;
        self.patch(Place::Object(&key), false, |live| {
            let is_copy =
                |live: &&Meta| live.uid == copy.uid || released.is_some_and(|meta| meta.uid == live.uid);
            note = match live {
                None => Some(format!("{} does not exist any more", label(&key))),
                Some(live) if !is_copy(&live) => {
                    Some(format!("{} is another object now: left alone", label(&key)))
                }
                Some(_) => None,
            };
            let Some(live) = live.filter(is_copy) else { return Ok(None) };
            let is_done = self.record.tool.annotations(live) == copy.removed;
            Ok((!is_done).then(|| json!({"annotations": copy.removed})))
        })
        .await?;
        Ok(note)
    }

    /// Waits until nothing is missing for the companions of these sources. Returns the companions, and what is still
    /// missing when time is up.
    async fn wait_for_companions(
        &self,
        sources: &BTreeSet<ObjectKey>,
        missing: impl Fn(&Companions) -> Vec<String>,
    ) -> Result<(Companions, Vec<String>), Error> {
        let kinds: BTreeSet<Kind> = sources.iter().map(|source| source.kind).collect();
        let labels = format!("{}=true", self.keys.companion);
        let deadline = Instant::now() + self.timeout;
        loop {
            let mut companions = Companions::new();
            for kind in &kinds {
                let found = self.cluster.objects(*kind, Some(&labels)).await;
                let what = format!("{} with the label {labels} cannot be listed", kind.plural());
                let found = found.map_err(|failure| Error::Api { what, failure })?;
                companions.extend(found.into_iter().filter(|(_, meta)| {
                    let source = meta.annotations.get(&self.keys.source);
                    source
                        .and_then(|text| ObjectKey::parse(*kind, text))
                        .is_some_and(|key| sources.contains(&key))
                }));
            }
            let missing = missing(&companions);
            if missing.is_empty() || Instant::now() > deadline {
                return Ok((companions, missing));
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    // --- requests

    async fn metadata(&self, place: Place<'_>) -> Result<Option<Meta>, Error> {
        let failed = |failure| Error::Api { what: format!("{} cannot be read", describe(place)), failure };
        self.cluster.metadata(place).await.map_err(failed)
    }

    /// Reads an object, and patches its metadata as `change` says, if it says anything. The patch applies to just the
    /// object that was read; if that has changed, it is read again.
    async fn patch(
        &self,
        place: Place<'_>,
        dry_run: bool,
        mut change: impl FnMut(Option<&Meta>) -> Result<Option<Value>, Error>,
    ) -> Result<(), Error> {
        let mut conflicts = 0;
        loop {
            let live = self.metadata(place).await?;
            let Some(mut metadata) = change(live.as_ref())? else { return Ok(()) };
            if let Some(live) = live {
                metadata["uid"] = json!(live.uid);
                metadata["resourceVersion"] = json!(live.resource_version);
            }
            match self.cluster.patch(place, &metadata, dry_run).await {
                Ok(()) => return Ok(()),
                Err(Failure::Conflict) if conflicts < MAX_CONFLICTS => conflicts += 1,
                Err(failure) => {
                    return Err(Error::Api {
                        what: format!("{} cannot be patched", describe(place)),
                        failure,
                    });
                }
            }
        }
    }
}

type Companions = BTreeMap<ObjectKey, Meta>;

/// Does something for each item, several at a time, and fails with the first error when all have ended.
async fn each<'a, T: 'a, R, F: Future<Output = Result<R, Error>>>(
    items: impl IntoIterator<Item = &'a T>,
    step: impl Fn(&'a T) -> F,
) -> Result<Vec<R>, Error> {
    let done: Vec<Result<R, Error>> = stream::iter(items).map(step).buffered(CONCURRENCY).collect().await;
    done.into_iter().collect()
}

/// As [`each`], and returns all errors.
async fn errors<'a, T: 'a, F: Future<Output = Result<(), Error>>>(
    items: impl IntoIterator<Item = &'a T>,
    step: impl Fn(&'a T) -> F,
) -> Vec<Error> {
    let done: Vec<Result<(), Error>> = stream::iter(items).map(step).buffered(CONCURRENCY).collect().await;
    done.into_iter().filter_map(Result::err).collect()
}

fn nulls<'a>(keys: impl Iterator<Item = &'a String>) -> serde_json::Map<String, Value> {
    keys.map(|key| (key.clone(), Value::Null)).collect()
}

fn gone(key: &ObjectKey) -> Error {
    Error::Changed(format!("{} does not exist any more", label(key)))
}

fn describe(place: Place<'_>) -> String {
    match place {
        Place::Object(key) => label(key),
        Place::Namespace(name) => format!("namespace {name}"),
    }
}
