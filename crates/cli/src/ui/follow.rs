//! Watches → feed: each task follows one thing, and tells the feed about it.

use std::{sync::Arc, time::Duration};

use futures::future::join_all;
use k8s_openapi::jiff::Timestamp;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep_until},
};

use super::{
    Page,
    activity::{Entry, EntryKind, EventObject},
    feed::ClusterView,
    replicas::{Denials, ReplicaMetrics},
    rows::{self, Row, Rows},
};
use crate::inspect::{instance::Instance, snapshot::Snapshot, status::statuses};
use lockstep_cluster::watch::{self, Event, Restores, WatchSpec};
use lockstep_core::failure::Failure;

/// The page is told about sources at most this often.
const REFRESH_INTERVAL: Duration = Duration::from_millis(250);
/// Of the time, this part is for other things than the computation of states.
const REST: u32 = 3;
/// How often Lease, certificates, replicas and their metrics are read.
const CLUSTER_INTERVAL: Duration = Duration::from_secs(5);
/// How often it is read again what has the name of a missing companion: no watch shows it.
const LOOKUP_INTERVAL: Duration = Duration::from_secs(30);
/// How many replicas are asked for their metrics.
const MAX_REPLICAS: usize = 10;

/// Starts to follow. None of the tasks ever ends.
pub async fn start(ui: &Arc<Page>, instance: Instance) -> JoinSet<()> {
    let mut tasks = JoinSet::new();
    let changes = ui.snapshot.read().await.follow(&ui.client, &mut tasks);
    tasks.spawn(follow_sources(ui.clone(), changes));
    let events = follow_events(ui, &mut tasks).await;
    tasks.spawn(follow_cluster(ui.clone(), instance, events));
    tasks
}

/// Recomputes the states of all sources when something has changed. Reads what has the name of missing companions: soon
/// after the first is missing, and now and then while any are.
async fn follow_sources(ui: Arc<Page>, mut changes: tokio::sync::watch::Receiver<u64>) {
    let mut holds = ui.held_until.subscribe();
    let mut next_lookup = None;
    loop {
        let started = Instant::now();
        changes.mark_unchanged();
        let held_until = *holds.borrow_and_update();
        let (rows, namespaces) = read(&*ui.snapshot.read().await, held_until);
        // A companion that the controller is about to write is not worth a read.
        let soon = started + REFRESH_INTERVAL * 4;
        next_lookup = rows.values().any(Row::has_open_questions).then(|| next_lookup.unwrap_or(soon));
        ui.feed.set_rows(rows);
        ui.feed.set_namespaces(namespaces);
        tokio::time::sleep(REFRESH_INTERVAL.max(started.elapsed() * REST)).await;
        let changed = tokio::select! {
            changed = changes.changed() => changed,
            changed = holds.changed() => changed,
            () = sleep_until(next_lookup.unwrap_or(started)), if next_lookup.is_some() => {
                look_up_missing(&ui).await;
                next_lookup = Some(Instant::now() + LOOKUP_INTERVAL);
                Ok(())
            }
        };
        if changed.is_err() {
            return;
        }
    }
}

async fn look_up_missing(ui: &Page) {
    let found = {
        let snapshot = ui.snapshot.read().await;
        snapshot.read_objects(&ui.client, snapshot.missing(&snapshot.sources())).await
    };
    ui.snapshot.write().await.remember(found);
}

fn read(snapshot: &Snapshot, held_until: Option<Timestamp>) -> (Rows, Vec<String>) {
    let namespaces = snapshot.world.read(|world| world.namespaces().names().map(str::to_owned).collect());
    (statuses(snapshot, held_until).into_iter().map(rows::row).collect(), namespaces)
}

/// Follows the Events of this instance, everywhere or in one namespace. Returns what a person may not see of them.
async fn follow_events(ui: &Arc<Page>, tasks: &mut JoinSet<()>) -> Option<String> {
    let keys = ui.snapshot.read().await.scope.keys.clone();
    let sink = {
        let (ui, keys) = (ui.clone(), keys.clone());
        move |event: Event<EventObject>| {
            if let Event::Apply(event) = event
                && let Some(entry) = Entry::of(event, &keys)
            {
                ui.feed.add(entry);
            }
        }
    };
    let mut refused = None;
    for namespace in [None, Some(&ui.namespace)] {
        let within = namespace.map(|namespace| format!("/namespaces/{namespace}")).unwrap_or_default();
        let spec = WatchSpec {
            name: "events".to_owned(),
            path: format!("/apis/events.k8s.io/v1{within}/events"),
            label_selector: None,
            field_selector: Some(format!("reportingController={}", keys.instance)),
        };
        let listed = watch::list(ui.client.clone(), spec.clone(), sink.clone()).await;
        if let Err(Failure::Forbidden(why)) = listed {
            refused.get_or_insert(why);
            continue;
        }
        // The watch repeats what has failed otherwise.
        let (client, sink) = (ui.client.clone(), sink.clone());
        tasks.spawn(async move {
            watch::run(client, spec, Restores::default(), sink).await;
        });
        return refused
            .map(|why| format!("you may not see Events outside of namespace {} ({why})", ui.namespace));
    }
    refused.map(|why| format!("you may not see Events ({why})"))
}

/// Reads Lease, certificates, replicas and their metrics again and again.
async fn follow_cluster(ui: Arc<Page>, mut instance: Instance, events: Option<String>) {
    let settings = instance.settings();
    let gaps = ui.snapshot.read().await.view.caveats();
    let mut denials = Denials::default();
    loop {
        let held = instance.deletes_held(Timestamp::now());
        let held_until = held.map(|hold| hold.until);
        ui.held_until.send_if_modified(|until| std::mem::replace(until, held_until) != held_until);
        let mut view = ClusterView {
            kubectl: ui.kubectl.clone(),
            domain: instance.domain.clone(),
            namespace: instance.namespace.clone(),
            instance: instance.summary(),
            held,
            notes: instance.caveat().iter().chain(&events).chain(&gaps).cloned().collect(),
            ..ClusterView::default()
        };
        match &instance.lease {
            Err(Failure::Unavailable(why)) => view.unreachable = Some(why.clone()),
            Ok(lease) if lease.settings.is_some() && instance.settings() != settings => {
                let text = "Lockstep runs with other settings since this page was started: start it again";
                view.notes.insert(0, text.to_owned());
            }
            _ => {}
        }
        for (what, failure) in
            [("certificates", instance.ca_expiry().err()), ("replicas", instance.replicas.as_ref().err())]
        {
            if let Some(Failure::Forbidden(why)) = failure {
                view.notes.push(format!("you may not see {what} ({why})"));
            }
        }
        denials.retain(&view.instance.replicas);
        read_metrics(&ui, &mut view, &mut denials).await;
        ui.feed.set_cluster(view);
        tokio::time::sleep(CLUSTER_INTERVAL).await;
        instance = Instance::read(&ui.client, &instance.domain, &instance.namespace, Timestamp::now()).await;
    }
}

async fn read_metrics(ui: &Page, view: &mut ClusterView, denials: &mut Denials) {
    let replicas = view.instance.replicas.clone();
    let asked = replicas.iter().filter(|replica| replica.ready).take(MAX_REPLICAS);
    let read = asked
        .map(async |replica| (replica, ReplicaMetrics::read(&ui.client, &view.namespace, replica).await));
    for (replica, outcome) in join_all(read).await {
        let metrics = match outcome {
            Ok(metrics) => metrics,
            Err(failure) => {
                let note = match failure {
                    Failure::Forbidden(why) => format!("you may not see denials ({why})"),
                    _ => format!("the metrics of {} cannot be read", replica.name),
                };
                if !view.notes.contains(&note) {
                    view.notes.push(note);
                }
                continue;
            }
        };
        if metrics.is_leader {
            view.leading_replica = Some(replica.name.clone());
        }
        *view.heals.get_or_insert_default() += metrics.heals;
        view.leaf_expires = [view.leaf_expires, metrics.leaf_expiry].into_iter().flatten().min();
        let time = Timestamp::now();
        for (reason, count) in denials.count(&replica.name, metrics.denials) {
            let note = match count {
                1 => format!("{} refused a write", replica.name),
                _ => format!("{} refused {count} writes", replica.name),
            };
            let id = format!("{}/{reason}/{}", replica.name, time.as_millisecond());
            let kind = EntryKind::Denial;
            ui.feed.add(Entry { id, time, kind, reason, note, count, source: None });
        }
    }
    view.denials = view.heals.map(|_| denials.total());
}
