//! What metrics and `/readyz` say about the watches.

use super::{
    health::{Condition, Readiness},
    metrics::Metrics,
};
use lockstep_cluster::informer::WatchObserver;
use lockstep_core::world::{SharedWorld, WatchId, World};

pub(crate) struct WatchReport {
    pub world: SharedWorld,
    pub readiness: Readiness,
    pub metrics: Metrics,
}

impl WatchObserver for WatchReport {
    fn list_begins(&self, watch: WatchId) {
        self.metrics.watch_restarts.of(watch.as_str()).inc();
        self.metrics.undecodable_objects.of(watch.as_str());
    }

    fn received(&self, watch: WatchId) {
        self.readiness.watch_received(watch.as_str());
        if matches!(watch, WatchId::Sources(_)) {
            let kept = self.world.read(World::payload_bytes);
            self.metrics.source_cache.set(kept.try_into().unwrap_or(i64::MAX));
        }
    }

    fn listed(&self, watch: WatchId) {
        self.readiness.mark_true(Condition::Listed(watch.as_str()));
    }

    fn undecodable(&self, watch: WatchId) {
        self.metrics.undecodable_objects.of(watch.as_str()).inc();
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use super::*;
    use lockstep_cluster::{
        informer::Informers,
        watch::{Event, Restores},
    };
    use lockstep_core::{object::Kind, testing, world::Scope};

    #[tokio::test(start_paused = true)]
    async fn request_for_a_list_does_not_count_as_received() {
        let watch = WatchId::Namespaces;
        let scope = Scope { keys: testing::keys(), rules: testing::rules(), kinds: Kind::ALL.to_vec() };
        let world = SharedWorld::new(&scope, 0);
        let readiness = Readiness::new([Condition::Listed(watch.as_str())]);
        let report =
            WatchReport { world: world.clone(), readiness: readiness.clone(), metrics: Metrics::new() };
        let requeue = Arc::new(|_| {});
        let shared =
            Informers { world, scope, requeue, restores: Restores::default(), observer: Arc::new(report) };
        let age = || readiness.watch_ages()[0].1;
        let a_while = Duration::from_secs(5);
        tokio::time::advance(a_while).await;
        shared.handle(watch, Event::Init);
        assert_eq!(age(), a_while);
        assert!(readiness.is_false(Condition::Listed(watch.as_str())));
        shared.handle(watch, Event::InitDone("1".to_owned()));
        assert_eq!(age(), Duration::ZERO);
        readiness.all_listed().await;
    }
}
