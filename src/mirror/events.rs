//! Events on sources: what `kubectl describe` tells. Told once, then counted.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use k8s_openapi::{
    api::{
        core::v1::ObjectReference,
        events::v1::{Event, EventSeries},
    },
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
    jiff::Timestamp,
};
use kube::{
    Api, Client,
    api::{Patch, PatchParams, PostParams},
};
use tokio::sync::mpsc;

use crate::{keys::Keys, object::ObjectKey, ops::metrics::Metrics, text};

/// The same Event within this time is one Event with a count.
const SAME: Duration = Duration::from_secs(600);
/// The API server takes a note of 1 KiB at most.
const NOTE: usize = 1000;
/// How long one may take to be written.
const PATIENCE: Duration = Duration::from_secs(10);
/// Events that wait to be written; more are dropped and counted.
const BACKLOG: usize = 10_000;

/// Something to tell about a source.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Story {
    pub source: ObjectKey,
    /// Without it, `kubectl describe` does not show the Event.
    pub uid: String,
    pub warning: bool,
    pub reason: &'static str,
    pub note: String,
}

/// Takes stories from anywhere; one task writes them.
#[derive(Clone)]
pub struct Teller {
    stories: mpsc::Sender<Story>,
    metrics: Metrics,
}

impl Teller {
    /// The task ends when every `Teller` is gone and what was told is written.
    #[must_use]
    pub fn start(client: Client, keys: &Keys, metrics: Metrics) -> (Self, tokio::task::JoinHandle<()>) {
        let (stories, inbox) = mpsc::channel(BACKLOG);
        let scribe = Scribe {
            client,
            controller: keys.instance.clone(),
            told: HashMap::new(),
            metrics: metrics.clone(),
        };
        (Self { stories, metrics }, tokio::spawn(scribe.run(inbox)))
    }

    pub fn tell(&self, story: Story) {
        if self.stories.try_send(story).is_err() {
            self.metrics.events_dropped.inc();
        }
    }
}

struct Scribe {
    client: Client,
    controller: String,
    told: HashMap<Story, Told>,
    metrics: Metrics,
}

struct Told {
    name: String,
    count: i32,
    last: Instant,
}

impl Scribe {
    async fn run(mut self, mut inbox: mpsc::Receiver<Story>) {
        while let Some(story) = inbox.recv().await {
            // An Event is no more than a courtesy: its namespace may be gone by now.
            match tokio::time::timeout(PATIENCE, self.write(story)).await {
                Ok(Ok(())) => continue,
                Ok(Err(error)) => {
                    tracing::debug!(error = %crate::client::Failure::from(error), "an Event could not be written");
                }
                Err(_) => tracing::debug!("an Event could not be written in time"),
            }
            self.metrics.events_dropped.inc();
        }
    }

    async fn write(&mut self, mut story: Story) -> Result<(), kube::Error> {
        story.note.truncate(text::prefix(&story.note, NOTE).len());
        self.told.retain(|_, told| told.last.elapsed() < SAME);
        let events: Api<Event> = Api::namespaced(self.client.clone(), &story.source.namespace);
        let now = MicroTime(Timestamp::now());

        if let Some(told) = self.told.get_mut(&story) {
            told.count += 1;
            told.last = Instant::now();
            let series = EventSeries { count: told.count, last_observed_time: now };
            let patch = Patch::Merge(serde_json::json!({ "series": series }));
            return events.patch(&told.name, &PatchParams::default(), &patch).await.map(drop);
        }
        let event = self.event(&story, now);
        let name = event.metadata.name.clone().unwrap_or_default();
        events.create(&PostParams::default(), &event).await?;
        self.told.insert(story, Told { name, count: 1, last: Instant::now() });
        Ok(())
    }

    fn event(&self, story: &Story, now: MicroTime) -> Event {
        let source = &story.source;
        // An Event's name may be as long as a source's, and no longer.
        let stem = text::prefix(&source.name, 200);
        Event {
            metadata: ObjectMeta {
                namespace: Some(source.namespace.to_string()),
                name: Some(format!("{}.{:016x}", stem.trim_end_matches(['.', '-']), fastrand::u64(..))),
                ..ObjectMeta::default()
            },
            event_time: Some(now),
            action: Some("Mirror".to_owned()),
            reason: Some(story.reason.to_owned()),
            type_: Some(if story.warning { "Warning" } else { "Normal" }.to_owned()),
            note: Some(story.note.clone()),
            regarding: Some(ObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some(source.kind.as_str().to_owned()),
                namespace: Some(source.namespace.to_string()),
                name: Some(source.name.to_string()),
                uid: Some(story.uid.clone()),
                ..ObjectReference::default()
            }),
            reporting_controller: Some(self.controller.clone()),
            reporting_instance: Some(self.controller.clone()),
            ..Event::default()
        }
    }
}
