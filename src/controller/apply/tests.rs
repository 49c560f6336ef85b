//! Payloads that the world does not keep, and other live reads.

use std::sync::atomic::{AtomicUsize, Ordering};

use futures::{FutureExt, future::join_all};
use tokio::sync::Semaphore as Gate;

use super::*;
use lockstep_core::{
    plan::{DeleteReason, Trouble},
    policy::content::Digest,
    testing::{
        cluster::{Cluster, Store},
        configmap, keys, namespace, object, source,
    },
    writes::companion_write::{Applied, BYTES_PER_PERMIT},
};

/// Creates and reads wait for a permit of their gate.
struct Gated {
    store: Store,
    creates: Gate,
    reads: Gate,
    /// How many reads have begun.
    reads_begun: AtomicUsize,
}

impl Gated {
    async fn read(&self) {
        self.reads_begun.fetch_add(1, Ordering::Relaxed);
        self.reads.acquire().await.unwrap().forget();
    }
}

impl CompanionApi for Arc<Gated> {
    async fn send(&self, at: &ObjectKey, request: CompanionRequest) -> Result<Object, Failure> {
        match request {
            CompanionRequest::Get | CompanionRequest::GetMetadata => self.read().await,
            CompanionRequest::Create(_) => self.creates.acquire().await.unwrap().forget(),
            CompanionRequest::Patch(_) | CompanionRequest::Delete { .. } => {}
        }
        self.store.send(at, request)
    }
}

/// An applier for a source in `home` with this text and targets `a` and `b`, whose world keeps so many bytes of
/// payloads.
fn fixture(source_cache: usize, text: &str) -> (Cluster, Arc<Gated>, Applier<Arc<Gated>>) {
    let mut cluster = Cluster::with_source_cache(&["home", "a", "b"], source_cache);
    cluster.put(source("home", "colors").annotate("target-namespaces", "a,b").data("text", text));
    let (store, reads_begun) = (cluster.api(), AtomicUsize::new(0));
    let api = Arc::new(Gated { store, creates: Gate::new(100), reads: Gate::new(100), reads_begun });
    let applier =
        Applier::new(api.clone(), Claim::permanent(), keys(), cluster.world.clone(), Arc::default(), 64);
    (cluster, api, applier)
}

fn write_to(namespace: &str) -> PlannedWrite {
    PlannedWrite {
        source: configmap("home", "colors"),
        at: configmap(namespace, "colors-synced"),
        removal: None,
        permits: 1,
    }
}

const NEW: History = History { in_step: None, failed: false };

fn text_in(cluster: &Cluster, namespace: &str) -> Option<String> {
    cluster.object(&configmap(namespace, "colors-synced"))?.data?.remove("text")
}

#[tokio::test]
async fn no_source_is_read_while_the_budget_suffices() {
    let (cluster, api, applier) = fixture(1 << 20, "blue");
    for namespace in ["a", "b"] {
        assert!(applier.apply(&write_to(namespace), NEW).await.unwrap().is_some());
        assert_eq!(text_in(&cluster, namespace).as_deref(), Some("blue"));
    }
    assert_eq!(api.store.reads(), 0);
}

#[tokio::test]
async fn payload_that_is_not_kept_is_read_once_for_all_writes_in_flight() {
    let (cluster, api, applier) = fixture(0, "blue");
    api.creates.forget_permits(100);
    let (to_a, to_b) = (write_to("a"), write_to("b"));
    let both = async { tokio::join!(applier.apply(&to_a, NEW), applier.apply(&to_b, NEW)) };
    let release = async {
        // Both have their payload, for neither create has been answered.
        while api.store.reads() == 0 {
            tokio::task::yield_now().await;
        }
        api.creates.add_permits(2);
    };
    let ((first, second), ()) = tokio::join!(both, release);
    assert!(first.unwrap().is_some() && second.unwrap().is_some());
    assert_eq!(text_in(&cluster, "a").zip(text_in(&cluster, "b")), Some(("blue".into(), "blue".into())));
    assert_eq!(api.store.reads(), 1);

    // Nobody uses it any more, and nothing of it is left.
    assert!(applier.live_reads.of(&configmap("home", "other")).lock().await.get(Digest::default()).is_none());
    assert_eq!(applier.live_reads.count(), 1);
}

#[tokio::test]
async fn what_a_live_read_returns_is_written_and_planned_with() {
    let (mut cluster, api, applier) = fixture(0, "blue");
    let key = configmap("home", "colors");
    let edited = |object: &mut Object| {
        object.data.get_or_insert_default().insert("text".to_owned(), "red".to_owned());
    };
    cluster.edit_unseen(&key, edited);
    assert!(applier.apply(&write_to("a"), NEW).await.unwrap().is_some());
    assert_eq!(text_in(&cluster, "a").as_deref(), Some("red"));
    assert!(applier.queue.depth() == 0 && cluster.plan_companion(&key, &write_to("a").at).is_none());
    cluster.show();
    assert!(cluster.plan_companion(&key, &write_to("a").at).is_none());
    assert_eq!(api.store.reads(), 1);
}

#[tokio::test]
async fn source_that_grew_before_its_live_read_is_written_with_enough_permits() {
    let (mut cluster, _, applier) = fixture(0, "blue");
    let large = "x".repeat(3 * BYTES_PER_PERMIT);
    let grown = large.clone();
    cluster.edit_unseen(&configmap("home", "colors"), |object| {
        object.data.get_or_insert_default().insert("text".to_owned(), grown);
    });
    assert!(applier.apply(&write_to("a"), NEW).await.unwrap().is_none());
    assert_eq!(text_in(&cluster, "a"), None);
    assert!(applier.apply(&write_to("a"), NEW).await.unwrap().is_none(), "it is kept now");
    let enough = PlannedWrite { permits: 4, ..write_to("a") };
    assert!(applier.apply(&enough, NEW).await.unwrap().is_some());
    assert_eq!(text_in(&cluster, "a"), Some(large));
}

#[tokio::test]
async fn source_that_is_gone_replaced_or_unlabelled_at_its_live_read_is_not_written() {
    let unlabelled = |object: &mut Object| object.metadata.labels.clear();
    let replaced = |object: &mut Object| object.metadata.uid = "another".to_owned();
    let gone = |object: &mut Object| object.metadata.deletion_timestamp = Some(String::new());
    for change in [unlabelled, replaced, gone] {
        let (mut cluster, api, applier) = fixture(0, "blue");
        cluster.edit_unseen(&configmap("home", "colors"), change);
        let outcome = applier.apply(&write_to("a"), NEW).await;
        assert!(matches!(outcome, Err(ApplyError::StaleCache)), "{outcome:?}");
        assert_eq!(text_in(&cluster, "a"), None);
        assert_eq!(api.store.reads(), 1);
    }
}

#[tokio::test]
async fn source_that_became_malformed_or_paused_is_not_written() {
    for (annotation, value) in [("protect", "everything"), ("paused", "true")] {
        let (mut cluster, _, applier) = fixture(0, "blue");
        let draft = object("home", "colors").annotate(annotation, value);
        cluster.edit_unseen(&configmap("home", "colors"), |object| {
            object.metadata.annotations = draft.object.metadata.annotations;
        });
        assert!(applier.apply(&write_to("a"), NEW).await.unwrap().is_none());
        assert_eq!(text_in(&cluster, "a"), None);
    }
}

#[tokio::test]
async fn few_objects_are_read_at_a_time_however_many_creates_meet_one() {
    let (mut cluster, api, applier) = fixture(1 << 20, "blue");
    let namespaces: Vec<String> = (0..3 * MAX_CONCURRENT_READS).map(|n| format!("n{n}")).collect();
    for name in &namespaces {
        cluster.namespace(namespace(name));
        cluster.put(object(name, "colors-synced"));
    }
    cluster.put(source("home", "colors").annotate("target-namespaces", "n*"));
    api.reads.forget_permits(100);
    let writes: Vec<PlannedWrite> = namespaces.iter().map(|name| write_to(name)).collect();
    let mut all = Box::pin(join_all(writes.iter().map(|write| applier.apply(write, NEW))));
    assert!(all.as_mut().now_or_never().is_none());
    assert_eq!(api.reads_begun.load(Ordering::Relaxed), MAX_CONCURRENT_READS);
    api.reads.add_permits(100);
    for outcome in all.await {
        assert!(matches!(outcome, Err(ApplyError::Retry { trouble: Some(_), .. })), "{outcome:?}");
    }
}

#[tokio::test]
async fn deletes_read_no_content() {
    let (mut cluster, api, applier) = fixture(1 << 20, "blue");
    let (key, PlannedWrite { at, .. }) = (configmap("home", "colors"), write_to("a"));
    assert!(applier.apply(&write_to("a"), NEW).await.unwrap().is_some());
    cluster.show();
    cluster.edit(&at, |object| object.metadata.labels.clear());
    cluster.delete(&key);
    assert!(applier.apply(&write_to("a"), NEW).await.unwrap().is_none(), "it is found");
    let delete = vec![(at.clone(), Removal::Delete)];
    assert_eq!(applier.confirm_removals(&key, delete.clone()).await.unwrap().removals, delete);
    let done =
        applier.apply(&PlannedWrite { removal: Some(Removal::Delete), ..write_to("a") }, NEW).await.unwrap();
    assert!(done.is_some() && cluster.object(&at).is_none());
    assert_eq!((api.store.reads(), api.reads_begun.load(Ordering::Relaxed)), (0, 3));
}

#[tokio::test]
async fn nothing_is_released_while_the_source_is_there_or_has_changed() {
    let (mut cluster, _, applier) = fixture(1 << 20, "blue");
    let (key, PlannedWrite { at, .. }) = (configmap("home", "colors"), write_to("a"));
    let kept = || source("home", "colors").annotate("when-removed", "keep").data("text", "blue");
    cluster.put(kept().annotate("target-namespaces", "a"));
    assert!(applier.apply(&write_to("a"), NEW).await.unwrap().is_some());
    cluster.show();
    let release = vec![(at.clone(), Removal::Release)];
    cluster.put(kept().annotate("target-namespaces", "b"));
    assert_eq!(applier.confirm_removals(&key, release.clone()).await.unwrap().removals, release);
    // The world does not know of this change yet, which may want the companion again.
    cluster.edit_unseen(&key, |object| drop(object.metadata.labels.insert("x".into(), "y".into())));
    assert!(applier.confirm_removals(&key, release).await.is_err());
    // What was approved is a delete, and what is planned now is a release.
    let delete = PlannedWrite { removal: Some(Removal::Delete), ..write_to("a") };
    assert!(applier.apply(&delete, NEW).await.unwrap().is_none());
    assert!(cluster.companion(&at).is_some());
}

#[tokio::test]
async fn released_companion_shows_first_that_it_stays() {
    let (mut cluster, _, applier) = fixture(1 << 20, "blue");
    let PlannedWrite { at, .. } = write_to("a");
    let draft = || source("home", "colors").data("text", "blue");
    cluster.put(draft().annotate("target-namespaces", "a"));
    assert!(applier.apply(&write_to("a"), NEW).await.unwrap().is_some());
    cluster.show();
    cluster.put(draft().annotate("target-namespaces", "b").annotate("when-removed", "keep"));
    let release = PlannedWrite { removal: Some(Removal::Release), ..write_to("a") };
    let done = applier.apply(&release, NEW).await.unwrap().expect("released");
    assert!(matches!(done.applied, Applied::Released(_)));
    // Otherwise, a replica that sees this late would take it for a companion that somebody else took the marks off.
    assert!(cluster.was_marked_to_stay(&at));
    assert_eq!(
        cluster.object(&at).unwrap().metadata.annotations.keys().find(|key| keys().is_ours(key)),
        None
    );
}

/// An API server with an admission plugin that puts our label back.
struct Relabelling(Store);

impl CompanionApi for Relabelling {
    async fn send(&self, at: &ObjectKey, mut request: CompanionRequest) -> Result<Object, Failure> {
        if let CompanionRequest::Patch(operations) = &mut request {
            operations.0.push(lockstep_core::object::patch::add(
                &["metadata", "labels", &keys().companion],
                "true".into(),
            ));
        }
        self.0.send(at, request)
    }
}

#[tokio::test]
async fn companion_whose_label_a_plugin_puts_back_is_released_again_later_and_not_deleted() {
    let mut cluster = Cluster::with(&["home", "a"]);
    let kept = source("home", "colors").annotate("when-removed", "keep").annotate("target-namespaces", "a");
    let key = cluster.put(kept);
    cluster.reconcile(&key);
    cluster.delete(&key);
    let applier = Applier::new(
        Relabelling(cluster.api()),
        Claim::permanent(),
        keys(),
        cluster.world.clone(),
        Arc::default(),
        64,
    );
    let release = PlannedWrite { removal: Some(Removal::Release), ..write_to("a") };
    let Err(ApplyError::Retry { trouble, .. }) = applier.apply(&release, NEW).await else {
        panic!("released")
    };
    assert!(matches!(trouble.as_deref(), Some(Trouble::Rewritten { .. })), "{trouble:?}");
    cluster.show();
    // The annotations are gone, and with them what says that it stays.
    let planned = cluster.plan_companion(&key, &release.at);
    assert_eq!(planned, Some(lockstep_core::testing::cluster::Planned::Release(DeleteReason::SourceGone)));
}

#[tokio::test]
async fn nothing_is_sent_without_the_claim() {
    let (cluster, api, mut applier) = fixture(1 << 20, "blue");
    applier.claim = Claim::never();
    let at = write_to("a").at;
    for request in [CompanionRequest::Create(Vec::new()), CompanionRequest::GetMetadata] {
        assert_eq!(applier.send(&at, request).await.err(), Some(Failure::NotLeader));
    }
    assert_eq!((text_in(&cluster, "a"), api.store.reads()), (None, 0));
}
