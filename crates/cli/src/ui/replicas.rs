//! What replicas say about themselves. Only their metrics count denials, and know their certificates; the API server's
//! pod proxy reaches them with the rights of the person who looks.

use std::collections::BTreeMap;

use k8s_openapi::jiff::Timestamp;
use kube::Client;

use crate::inspect::instance::Replica;
use lockstep_cluster::client::{REQUEST_TIMEOUT, with_timeout};
use lockstep_core::failure::Failure;

/// By reason.
pub type Counts = BTreeMap<String, u64>;

/// What the page shows of the metrics of one replica.
#[derive(Debug, Default, PartialEq)]
pub struct ReplicaMetrics {
    pub denials: Counts,
    pub heals: u64,
    pub is_leader: bool,
    /// When the certificate that the webhook serves with expires.
    pub leaf_expiry: Option<Timestamp>,
}

/// PURE. What each replica has counted.
#[derive(Default)]
pub struct Denials(BTreeMap<String, Counts>);

impl Denials {
    /// Takes the counts of a replica. Returns what is new since the last time; nothing the first time.
    pub fn count(&mut self, replica: &str, now: Counts) -> Counts {
        let Some(before) = self.0.insert(replica.to_owned(), now.clone()) else { return Counts::new() };
        let new = |(reason, count): (String, u64)| {
            let before = before.get(&reason).copied().unwrap_or_default();
            // A replica that was restarted counts from zero.
            Some((reason, count.checked_sub(before).unwrap_or(count))).filter(|(_, new)| *new > 0)
        };
        now.into_iter().filter_map(new).collect()
    }

    /// Forgets replicas that are gone.
    pub fn retain(&mut self, replicas: &[Replica]) {
        self.0.retain(|name, _| replicas.iter().any(|replica| replica.name == *name));
    }

    /// What all replicas have counted since they were started.
    pub fn total(&self) -> Counts {
        let mut total = Counts::new();
        for (reason, count) in self.0.values().flatten() {
            *total.entry(reason.clone()).or_default() += count;
        }
        total.retain(|_, count| *count > 0);
        total
    }
}

impl ReplicaMetrics {
    /// PURE. Reads metrics in either format of `/metrics`.
    pub fn parse(text: &str) -> Self {
        let mut metrics = Self::default();
        for line in text.lines() {
            let Some((series, value)) = line.rsplit_once(' ') else { continue };
            let reason =
                |name: &str| series.strip_prefix(name)?.strip_prefix("{reason=\"")?.strip_suffix("\"}");
            if let Some(reason) = reason("lockstep_denials_total") {
                metrics.denials.insert(reason.to_owned(), value.parse().unwrap_or_default());
            } else if reason("lockstep_heals_total").is_some() {
                metrics.heals += value.parse::<u64>().unwrap_or_default();
            } else if series == "lockstep_leader" {
                metrics.is_leader = value == "1";
            } else if series == "lockstep_certificate_expiry_timestamp_seconds{certificate=\"leaf\"}" {
                let seconds = value.trim_end_matches(".0").parse().ok().filter(|seconds| *seconds > 0);
                metrics.leaf_expiry = seconds.and_then(|seconds| Timestamp::from_second(seconds).ok());
            }
        }
        metrics
    }

    /// Asks one replica.
    pub async fn read(client: &Client, namespace: &str, replica: &Replica) -> Result<Self, Failure> {
        let Replica { name, ops_port, .. } = replica;
        let path = format!("/api/v1/namespaces/{namespace}/pods/{name}:{ops_port}/proxy/metrics");
        let request = http::Request::get(path).body(Vec::new());
        let request = request.map_err(|error| Failure::Unavailable(error.to_string()))?;
        Ok(Self::parse(&with_timeout(REQUEST_TIMEOUT, client.request_text(request)).await?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What a replica serves at `/metrics`, as `ops::metrics` tests.
    const REPLICA_METRICS: &str = include_str!("testing/replica_metrics.txt");

    fn counts(all: &[(&str, u64)]) -> Counts {
        all.iter().map(|(reason, count)| ((*reason).to_owned(), *count)).collect()
    }

    #[test]
    fn metrics_that_a_replica_renders_are_read() {
        let read = ReplicaMetrics::parse(REPLICA_METRICS);
        assert_eq!((read.denials["edit"], read.is_leader), (1, true));
        assert_eq!(read.leaf_expiry.map(Timestamp::as_second), Some(1_900_000_000));
        assert_eq!(ReplicaMetrics::parse("<html> 1"), ReplicaMetrics::default());
    }

    #[test]
    fn new_denials_are_counted_for_each_replica_and_after_a_restart() {
        let mut denials = Denials::default();
        assert_eq!(
            denials.count("a", counts(&[("edit", 5)])),
            counts(&[]),
            "from before the page was opened"
        );
        assert_eq!(denials.count("b", counts(&[("edit", 1)])), counts(&[]));
        let new = denials.count("a", counts(&[("edit", 7), ("forged", 1)]));
        assert_eq!(new, counts(&[("edit", 2), ("forged", 1)]));
        assert_eq!(denials.count("b", counts(&[("edit", 1)])), counts(&[]));
        assert_eq!(denials.total(), counts(&[("edit", 8), ("forged", 1)]));
        assert_eq!(denials.count("a", counts(&[("edit", 1)])), counts(&[("edit", 1)]), "restarted");
        denials.retain(&[]);
        assert_eq!(denials.total(), counts(&[]));
    }
}
