//! Events on sources, for `kubectl describe`. An Event that repeats is one Event with a count. Companions go first:
//! Events wait while companions are written.

use std::{
    collections::HashMap,
    hash::{BuildHasher, RandomState},
    sync::Arc,
    time::{Duration, Instant},
};

use k8s_openapi::{
    api::{
        core::v1::ObjectReference,
        events::v1::{Event, EventSeries},
    },
    apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta},
};
use kube::{
    Api, Client,
    api::{Patch, PatchParams, PostParams},
};
use parking_lot::Mutex;
use tokio::{
    sync::{mpsc, watch},
    time::{sleep_until, timeout_at},
};

use super::write_queue::WriteQueue;
use crate::{clock, ops::metrics::Metrics};
use lockstep_cluster::client::with_timeout;
use lockstep_core::{keys::Keys, object::ObjectKey, text, writes::fair_queue::QueuedRequest};

/// An Event that repeats within this time is counted in a series.
const SERIES_WINDOW: Duration = Duration::from_secs(600);
/// The API server accepts notes of 1 KiB.
const MAX_NOTE_BYTES: usize = 1000;
/// An Event's name may have 253 bytes: this many of the source's name, and a random suffix.
const MAX_NAME_STEM_BYTES: usize = 200;
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Every Event waits so long, because what has changed one companion often changes others.
const DELAY: Duration = Duration::from_secs(1);
/// An Event waits no longer than this for companions to be written.
const MAX_DELAY: Duration = Duration::from_secs(10);
/// Events that wait to be written; more are dropped and counted.
const MAX_PENDING: usize = 10_000;
/// So many Events on the sources of one namespace are written at once, of each type; further ones are suppressed
/// unless they are this far apart.
const BURST: u32 = 300;
const INTERVAL: Duration = Duration::from_secs(3);
/// How often expired entries are removed; each time scans all of them.
const EXPIRE_INTERVAL: Duration = Duration::from_secs(60);

/// An Event about a source.
#[derive(Hash)]
pub struct NewEvent {
    pub source: ObjectKey,
    /// Without it, `kubectl describe` does not show the Event.
    pub uid: String,
    pub warning: bool,
    pub reason: &'static str,
    pub note: String,
}

impl NewEvent {
    const fn type_(&self) -> &'static str {
        if self.warning { "Warning" } else { "Normal" }
    }

    fn name(&self, suffix: u64) -> String {
        let stem = text::prefix(&self.source.name, MAX_NAME_STEM_BYTES).trim_end_matches(['.', '-']);
        format!("{stem}.{suffix:016x}")
    }
}

/// Accepts Events from anywhere; an [`EventWriter`] writes them.
pub struct EventRecorder {
    pending: mpsc::Sender<(NewEvent, Instant)>,
    limit: Mutex<RateLimit>,
    metrics: Metrics,
}

/// PURE. Limits the Events that the tenants of one namespace can cause, so that they delay nobody else's.
#[derive(Default)]
struct RateLimit {
    /// By namespace and type: when the next Event would be due if they were all [`INTERVAL`] apart.
    next: HashMap<(Arc<str>, bool), Instant>,
    last_expired: Option<Instant>,
}

impl RateLimit {
    fn admits(&mut self, event: &NewEvent, now: Instant) -> bool {
        if self.last_expired.is_none_or(|last| last + EXPIRE_INTERVAL <= now) {
            self.last_expired = Some(now);
            self.next.retain(|_, next| *next > now);
        }
        let next = self.next.entry((event.source.namespace.clone(), event.warning)).or_insert(now);
        let due = (*next).max(now);
        let admitted = due < now + BURST * INTERVAL;
        if admitted {
            *next = due + INTERVAL;
        }
        admitted
    }
}

impl EventRecorder {
    pub fn new(client: Client, keys: &Keys, metrics: Metrics) -> (Self, EventWriter) {
        let (pending, events) = mpsc::channel(MAX_PENDING);
        let writer = EventWriter {
            events,
            client,
            controller: keys.instance.clone(),
            recent: HashMap::new(),
            hasher: RandomState::new(),
            last_expired: clock::now(),
            metrics: metrics.clone(),
        };
        (Self { pending, limit: Mutex::default(), metrics }, writer)
    }

    /// Counts the Events and writes none.
    #[cfg(test)]
    pub fn discarding(metrics: Metrics) -> Self {
        Self { pending: mpsc::channel(1).0, limit: Mutex::default(), metrics }
    }

    pub fn record(&self, event: NewEvent) {
        let now = clock::now();
        if !self.limit.lock().admits(&event, now) {
            self.metrics.events_suppressed.inc();
        } else if self.pending.try_send((event, now)).is_err() {
            self.metrics.events_dropped.inc();
        }
    }
}

pub struct EventWriter {
    /// With when each was recorded.
    events: mpsc::Receiver<(NewEvent, Instant)>,
    client: Client,
    controller: String,
    /// By the hash of the event, without its texts: a cold start writes as many Events as there are sources.
    recent: HashMap<u64, Series>,
    hasher: RandomState,
    last_expired: Instant,
    metrics: Metrics,
}

struct Series {
    /// Ends the Event's name: see [`NewEvent::name`].
    suffix: u64,
    count: i32,
    last: Instant,
}

impl EventWriter {
    /// Ends when the recorder is dropped and all Events are written. Once `stop` turns true, none waits.
    pub async fn run<T: QueuedRequest>(
        mut self,
        companions: Arc<WriteQueue<T>>,
        mut stop: watch::Receiver<bool>,
    ) {
        while let Some((event, recorded)) = self.events.recv().await {
            let companions_first = async {
                sleep_until((recorded + DELAY).into()).await;
                let _ = timeout_at((recorded + MAX_DELAY).into(), companions.idle()).await;
            };
            // Rather now than dropped.
            if self.events.len() < MAX_PENDING / 2 {
                tokio::select! {
                    _ = stop.wait_for(|stop| *stop) => {}
                    () = companions_first => {}
                }
            }
            // A failure is not retried: the namespace of the source may be gone by now.
            if let Err(failure) = with_timeout(REQUEST_TIMEOUT, self.write(event)).await {
                tracing::debug!(error = %failure, "an Event could not be written");
                self.metrics.events_dropped.inc();
            }
        }
    }

    async fn write(&mut self, mut event: NewEvent) -> Result<(), kube::Error> {
        event.note.truncate(text::prefix(&event.note, MAX_NOTE_BYTES).len());
        if clock::elapsed(self.last_expired) >= EXPIRE_INTERVAL {
            self.last_expired = clock::now();
            self.recent.retain(|_, series| clock::elapsed(series.last) < SERIES_WINDOW);
            self.recent.shrink_to_fit();
        }
        let events: Api<Event> = Api::namespaced(self.client.clone(), &event.source.namespace);
        let now = MicroTime(clock::wall());

        let hash = self.hasher.hash_one(&event);
        if let Some(series) = self.recent.get_mut(&hash) {
            series.count += 1;
            series.last = clock::now();
            let patch = EventSeries { count: series.count, last_observed_time: now };
            let patch = Patch::Merge(serde_json::json!({ "series": patch }));
            return events.patch(&event.name(series.suffix), &PatchParams::default(), &patch).await.map(drop);
        }
        let suffix = fastrand::u64(..);
        events.create(&PostParams::default(), &self.object(&event, suffix, now)).await?;
        self.recent.insert(hash, Series { suffix, count: 1, last: clock::now() });
        Ok(())
    }

    fn object(&self, event: &NewEvent, suffix: u64, now: MicroTime) -> Event {
        let source = &event.source;
        Event {
            metadata: ObjectMeta {
                namespace: Some(source.namespace.to_string()),
                name: Some(event.name(suffix)),
                ..ObjectMeta::default()
            },
            event_time: Some(now),
            action: Some("Reconcile".to_owned()),
            reason: Some(event.reason.to_owned()),
            type_: Some(event.type_().to_owned()),
            note: Some(event.note.clone()),
            regarding: Some(ObjectReference {
                api_version: Some("v1".to_owned()),
                kind: Some(source.kind.as_str().to_owned()),
                namespace: Some(source.namespace.to_string()),
                name: Some(source.name.to_string()),
                uid: Some(event.uid.clone()),
                ..ObjectReference::default()
            }),
            reporting_controller: Some(self.controller.clone()),
            reporting_instance: Some(self.controller.clone()),
            ..Event::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lockstep_cluster::testing::api::api_server;
    use lockstep_core::testing::{self, configmap, queue_items::item};

    fn event(namespace: &str, warning: bool) -> NewEvent {
        let (source, uid) = (configmap(namespace, "colors"), String::new());
        NewEvent { source, uid, warning, reason: "Conflict", note: String::new() }
    }

    #[test]
    fn events_of_one_namespace_are_limited_and_those_of_others_are_not() {
        let (mut limit, now) = (RateLimit::default(), Instant::now());
        let mut admitted = |namespace, warning, now, asked: u32| {
            (0..asked).filter(|_| limit.admits(&event(namespace, warning), now)).count()
        };
        assert_eq!(admitted("busy", true, now, 4000), 300);
        assert_eq!(admitted("busy", false, now, 10), 10, "the other type");
        assert_eq!(admitted("quiet", true, now, 10), 10);
        assert_eq!(admitted("busy", true, now + 10 * INTERVAL, 4000), 10);
        assert_eq!(admitted("busy", true, now + 1000 * INTERVAL, 4000), 300);
        assert_eq!(limit.next.len(), 1, "namespaces without recent Events are forgotten");
    }

    #[tokio::test(start_paused = true)]
    async fn events_wait_for_companions_but_not_for_ever_and_not_at_a_stop() {
        let (written, mut times) = mpsc::unbounded_channel();
        let client = api_server(move |_| {
            written.send(clock::now()).unwrap();
            std::future::ready((201, serde_json::json!({"metadata": {}})))
        });
        let (recorder, writer) = EventRecorder::new(client, &testing::keys(), Metrics::new());
        let companions = Arc::new(WriteQueue::new(8));
        companions.open();
        let (stop, stopped) = watch::channel(false);
        let writer = tokio::spawn(writer.run(companions.clone(), stopped));
        let mut wait = async |note: &str| {
            let start = clock::now();
            recorder.record(NewEvent { note: note.to_owned(), ..event("home", false) });
            times.recv().await.unwrap() - start
        };
        let seconds = |time: Duration| time.as_secs();
        assert_eq!(seconds(wait("nothing is written").await), 1);
        companions.push_all(vec![item("colors", "home", 1, ())]);
        let (_, write) = companions.next().await;
        assert_eq!(seconds(wait("a write hangs").await), 10);
        let (waited, ()) = tokio::join!(wait("a write ends"), async {
            tokio::time::sleep(Duration::from_secs(4)).await;
            companions.done(write);
        });
        assert_eq!(seconds(waited), 4);
        stop.send(true).unwrap();
        assert_eq!(seconds(wait("Lockstep stops").await), 0);
        drop(recorder);
        writer.await.unwrap();
    }
}
