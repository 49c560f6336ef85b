use k8s_openapi::ByteString;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::certs::{
    issue::Certificate,
    secret::SecretData,
    testing::{LIFETIMES, at, ca, ca_at, cas, configuration, data, secret, service, settings},
    write_history::WATCH_LAG,
};

/// What one replica observes and remembers, with a monotonic clock in milliseconds.
struct Replica {
    start: Instant,
    snapshot: CertSnapshot,
    memory: Memory,
    leaf: Option<Leaf>,
}

impl Replica {
    fn new(start: Instant) -> Self {
        Self { start, snapshot: CertSnapshot::default(), memory: Memory::default(), leaf: None }
    }

    fn sees_secret(&mut self, version: u64, cas: &CaSet) {
        self.snapshot.secret = Observed::Present(Arc::new(secret(&version.to_string(), data(cas))));
    }

    fn sees_bundle(&mut self, version: u64, bundle: &str) {
        let configuration = configuration(&version.to_string(), &[(service(), Some(bundle))]);
        self.snapshot.configurations[0] = Observed::Present(Arc::new(configuration));
        self.snapshot.configurations[1] = Observed::Absent;
    }

    fn decide(&mut self, time: Timestamp, ms: u64) -> (Vec<CaWrite>, Duration) {
        let now = Moment { wall: time, instant: self.start + Duration::from_millis(ms) };
        let actions = decide(&settings(), &self.snapshot, &self.memory, self.leaf.as_ref(), now);
        self.memory = actions.memory;
        if let Some(request) = actions.leaf {
            self.leaf = Some(request.ca.issue(&request.names, LIFETIMES.leaf_validity, time).unwrap());
        }
        (actions.writes, actions.check_after)
    }

    /// Answers a write as the API server does if it succeeds or conflicts.
    fn answered(&mut self, write: &CaWrite, ms: u64) {
        let writes = match write {
            CaWrite::Secret { .. } => &mut self.memory.secret_writes,
            CaWrite::Bundle { kind, .. } => &mut self.memory.configurations[*kind as usize].writes,
        };
        writes.answered(write.version(), self.start + Duration::from_millis(ms));
    }
}

// ---------------------------------------------------------------- when to write

#[test]
fn missing_ca_is_published_at_once_and_an_extra_one_is_removed_after_the_delay() {
    let (wanted, other) = (cas(), cas());
    let both = format!("{}{}", wanted.bundle(), other.bundle());
    let mut replica = Replica::new(Instant::now());
    replica.sees_secret(1, &wanted);
    let mut version = 0;
    let mut check = |bundle: &str, ms| {
        version += 1;
        replica.sees_bundle(version, bundle);
        let (writes, wait) = replica.decide(at(0), ms);
        writes.iter().for_each(|write| replica.answered(write, ms));
        (!writes.is_empty(), wait.as_millis())
    };
    assert!(check("", 0).0);
    assert!(!check(&both, 100).0);
    assert_eq!(check(&both, 7_600), (false, 500));
    assert!(!check(&wanted.bundle(), 7_700).0);
    assert!(!check(&both, 8_700).0, "it was right in between");
    assert_eq!(check(&both, 16_200), (false, 500));
    assert!(check(&both, 16_700).0);
}

#[test]
fn bundle_that_somebody_keeps_undoing_is_written_with_backoff() {
    let cas = cas();
    let mut replica = Replica::new(Instant::now());
    replica.sees_secret(1, &cas);
    let (mut waits, mut ms) = (Vec::new(), 0);
    let write = |replica: &mut Replica, ms| {
        let (writes, wait) = replica.decide(at(0), ms);
        assert!(replica.decide(at(0), ms).0.is_empty(), "one write is in flight, or none is due");
        writes.iter().for_each(|write| replica.answered(write, ms));
        (writes.len(), u64::try_from(wait.as_millis()).unwrap())
    };
    for version in 0..6 {
        replica.sees_bundle(version, "");
        let (mut written, wait) = write(&mut replica, ms);
        if written == 0 {
            ms += wait;
            waits.push(wait);
            written = write(&mut replica, ms).0;
        }
        assert_eq!(written, 1);
    }
    assert_eq!(waits, [100, 200, 400, 800, 1600]);
    let lag = u64::try_from(WATCH_LAG.as_millis()).unwrap();
    assert_eq!(write(&mut replica, ms + lag - 1).0, 0, "the watch has not shown the last write yet");
    replica.sees_secret(2, &cas.with_next(ca()));
    assert_eq!(write(&mut replica, ms + lag - 1).0, 1, "a new CA does not wait");
    assert_eq!(write(&mut replica, ms + 2 * lag).0, 1, "the watch is late: written again");
}

/// Some replicas see the next CA published and this one does not: they would undo each other's change without end.
#[test]
fn repeated_clearing_of_the_published_time_backs_off() {
    let cas = cas().with_next(ca()).with_published(Some(at(0)));
    let mut replica = Replica::new(Instant::now());
    replica.sees_bundle(1, &cas.current.certificate.pem());
    let mut clears = |version, ms| {
        replica.sees_secret(version, &cas);
        let (writes, wait) = replica.decide(at(0), ms);
        let clear = writes.iter().find(|write| {
            matches!(write, CaWrite::Secret { change: SecretChange::ClearPublished, cas, .. }
                if cas.next.as_ref().is_some_and(|next| next.published.is_none()))
        });
        clear.inspect(|write| replica.answered(write, ms));
        (clear.is_some(), wait)
    };
    assert!(clears(1, 0).0);
    assert_eq!(clears(3, 0), (false, Duration::from_millis(100)));
    assert!(clears(3, 100).0);
    assert_eq!(clears(5, 100), (false, Duration::from_millis(200)));
    assert!(clears(5, 60_100).0, "the first attempt after a quiet minute is immediate");
}

// ---------------------------------------------------------------- replicas in every order

/// A cluster with the Secret and two webhook configurations, and replicas that observe and write them.
struct Simulation {
    version: u64,
    secret: Option<SecretData>,
    secret_version: u64,
    configurations: [Value; 2],
    replicas: [Replica; 2],
    promotions: usize,
    request: Option<Timestamp>,
    /// How far the monotonic clock is ahead of the wall clock.
    ahead_ms: u64,
}

#[derive(Debug, Clone, Copy)]
enum SimulatedEvent {
    Advance(i64),
    /// The watches of a replica catch up.
    CatchUp(usize),
    Reconcile(usize),
    Restart(usize),
    DeleteSecret,
    BreakKey,
    /// Somebody puts another CA into the Secret.
    SwapCa,
    /// Somebody asks for a rotation.
    Request,
}

impl Simulation {
    fn new() -> Self {
        let start = Instant::now();
        let configuration = |kind: &str| {
            let webhook = json!({"name": "sources.x", "clientConfig": service()});
            json!({"metadata": {"name": "x", "uid": kind, "resourceVersion": "0"}, "webhooks": [webhook]})
        };
        Self {
            version: 0,
            secret: None,
            secret_version: 0,
            configurations: [configuration("validating"), configuration("mutating")],
            replicas: [Replica::new(start), Replica::new(start)],
            promotions: 0,
            request: None,
            ahead_ms: 0,
        }
    }

    fn apply(&mut self, event: SimulatedEvent, now: i64) {
        match event {
            SimulatedEvent::Advance(_) => {}
            SimulatedEvent::CatchUp(n) => {
                self.see_secret(n);
                self.see_configurations(n);
                self.replicas[n].snapshot.request = self.request;
            }
            SimulatedEvent::Request => self.request = Some(at(now)),
            SimulatedEvent::Reconcile(n) => self.reconcile(n, now),
            SimulatedEvent::Restart(n) => self.replicas[n] = Replica::new(self.replicas[n].start),
            SimulatedEvent::DeleteSecret => self.store(None),
            SimulatedEvent::SwapCa => self.store(Some(data(&CaSet::new(ca_at(at(now), &LIFETIMES))))),
            SimulatedEvent::BreakKey => {
                if let Some(mut data) = self.secret.clone() {
                    data.insert("ca.key".to_owned(), ByteString(b"nonsense".to_vec()));
                    self.store(Some(data));
                }
            }
        }
    }

    fn next_version(&mut self) -> u64 {
        self.version += 1;
        self.version
    }

    fn store(&mut self, data: Option<SecretData>) {
        self.secret = data;
        self.secret_version = self.next_version();
    }

    fn see_secret(&mut self, n: usize) {
        let version = self.secret_version.to_string();
        self.replicas[n].snapshot.secret = match self.secret.clone() {
            Some(data) => Observed::Present(Arc::new(secret(&version, data))),
            None => Observed::Absent,
        };
    }

    fn see_configurations(&mut self, n: usize) {
        let parse = |json: &Value| Observed::Present(Arc::new(serde_json::from_value(json.clone()).unwrap()));
        self.replicas[n].snapshot.configurations = self.configurations.each_ref().map(parse);
    }

    fn reconcile(&mut self, n: usize, now: i64) {
        let ms = u64::try_from(now).unwrap() + self.ahead_ms;
        let (writes, _) = self.replicas[n].decide(at(now), ms);
        for write in writes {
            match &write {
                CaWrite::Secret { change, cas, version } => {
                    let exists = self.secret.is_some();
                    if exists != version.is_empty()
                        && (!exists || *version == self.secret_version.to_string())
                    {
                        self.promotions += usize::from(*change == SecretChange::PromoteNextCa);
                        self.store(Some(data(cas)));
                    }
                }
                CaWrite::Bundle { kind, cas, observed } => {
                    let version = self.next_version();
                    let object = &mut self.configurations[*kind as usize];
                    if json_patch::patch(object, &observed.patch(cas)).is_ok() {
                        object["metadata"]["resourceVersion"] = json!(version.to_string());
                    }
                }
            }
            self.replicas[n].answered(&write, ms);
        }
    }

    /// Every webhook trusts every valid leaf that is served.
    fn all_leaves_are_trusted(&self, now: i64) -> bool {
        let served = self.replicas.iter().filter_map(|replica| replica.leaf.as_ref());
        let mut valid = served.filter(|leaf| leaf.certificate.is_valid(at(now)));
        let trusted = self.configurations.each_ref().map(|configuration| {
            let bundle = configuration["webhooks"][0]["clientConfig"]["caBundle"].clone();
            let bundle = serde_json::from_value::<Option<ByteString>>(bundle).unwrap().unwrap_or_default();
            Certificate::parse_all(&bundle.0).unwrap()
        });
        valid.all(|leaf| trusted.iter().all(|cas| cas.contains(&leaf.issuer)))
    }
}

fn event() -> impl Strategy<Value = SimulatedEvent> {
    prop_oneof![
        6 => (50..400_i64).prop_map(SimulatedEvent::Advance),
        6 => (0..2_usize).prop_map(SimulatedEvent::CatchUp),
        6 => (0..2_usize).prop_map(SimulatedEvent::Reconcile),
    ]
}

#[test]
fn replica_with_a_stalled_secret_watch_does_not_unpublish_the_next_ca() {
    let mut simulation = Simulation::new();
    for now in (0..40_000).step_by(100) {
        for n in [0, 1] {
            // A watch may stall for three times the propagation delay before that is noticed.
            let stalled = n == 1 && (15_900..22_000).contains(&now);
            if !stalled {
                simulation.see_secret(n);
            }
            simulation.see_configurations(n);
            if n == 0 || now % 300 == 0 {
                simulation.reconcile(n, now);
            }
        }
        assert!(simulation.all_leaves_are_trusted(now), "at {now}");
    }
    assert!(simulation.promotions > 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, failure_persistence: None, ..ProptestConfig::default() })]

    /// In any order of events, as long as each replica reconciles at least once in the propagation delay.
    #[test]
    fn every_leaf_that_is_served_is_trusted(
        events in proptest::collection::vec(event(), 300..500),
        disruption in prop_oneof![
            (0..2_usize).prop_map(SimulatedEvent::Restart), Just(SimulatedEvent::SwapCa), Just(SimulatedEvent::Request),
        ],
        disrupt_at in 0..300_usize,
    ) {
        let mut simulation = Simulation::new();
        let (mut now, mut reconciled, mut disrupted) = (0, [0_i64; 2], 0);
        for n in [0, 1, 0, 1] {
            simulation.apply(SimulatedEvent::CatchUp(n), now);
            simulation.apply(SimulatedEvent::Reconcile(n), now);
        }
        for (n, event) in events.into_iter().enumerate() {
            if let SimulatedEvent::Advance(ms) = event {
                now += ms;
            }
            if n == disrupt_at {
                simulation.apply(disruption, now);
                disrupted = now;
            }
            simulation.apply(event, now);
            for (replica, last) in reconciled.iter_mut().enumerate() {
                if now - *last > 900 {
                    simulation.apply(SimulatedEvent::CatchUp(replica), now);
                    simulation.apply(SimulatedEvent::Reconcile(replica), now);
                    *last = now;
                }
            }
            prop_assert!(simulation.all_leaves_are_trusted(now), "at {now} after {event:?}");
        }
        let revoked = |cas: &CaSet| simulation.configurations.iter().any(|configuration| {
            serde_json::from_value::<WebhookConfiguration>(configuration.clone()).unwrap().trusts_revoked(cas)
        });
        if simulation.request.is_some() && now - disrupted > 20_000 {
            let cas = simulation.replicas[0].memory.cas.clone().expect("CAs");
            prop_assert!(cas.revocation.request.is_some() && !revoked(&cas), "the old CA is trusted at {now}");
        }
        // The disruption may have started a new CA's lifetime.
        if now - disrupted > 24_000 {
            prop_assert!(simulation.promotions > 0);
        }
    }

    #[test]
    fn every_damage_to_the_secret_is_repaired_once_the_replicas_have_reconciled(
        events in proptest::collection::vec(prop_oneof![
            Just(SimulatedEvent::DeleteSecret), Just(SimulatedEvent::BreakKey), (0..2_usize).prop_map(SimulatedEvent::Restart),
            (0..60_000_i64).prop_map(SimulatedEvent::Advance),
        ], 1..12),
    ) {
        let mut simulation = Simulation::new();
        let mut now = 0;
        for event in events {
            if let SimulatedEvent::Advance(ms) = event {
                now += ms;
            }
            // Repairs back off, and each event comes after a quiet minute; certificates do not age by that.
            simulation.ahead_ms += 60_000;
            simulation.apply(event, now);
            for n in [0, 1, 0, 1, 0, 1] {
                simulation.apply(SimulatedEvent::CatchUp(n), now);
                simulation.apply(SimulatedEvent::Reconcile(n), now);
            }
            let secret = ParsedSecret::parse(simulation.secret.as_ref().expect("a Secret"));
            prop_assert!(!secret.malformed);
            prop_assert!(secret.cas.is_ok_and(|cas| cas.current.certificate.is_valid(at(now))));
            for replica in &simulation.replicas {
                prop_assert!(replica.leaf.as_ref().is_some_and(|leaf| leaf.certificate.is_valid(at(now))));
            }
            prop_assert!(simulation.all_leaves_are_trusted(now));
        }
    }
}
