//! Certificates: one CA for all replicas, published before it is used, put back whatever is done to it.

use std::{
    cell::Cell,
    collections::BTreeMap,
    slice::from_ref,
    sync::Arc,
    time::{Duration, Instant},
};

use k8s_openapi::{ByteString, jiff::Timestamp};
use kube::config::{KubeConfigOptions, Kubeconfig};
use lockstep::{
    certs::{
        self, Settings,
        issue::{Ca, Certificate},
        phase::Pace,
        resolver::{Resolver, server_config},
        state::State,
    },
    client,
    keys::Keys,
    ops::{
        health::{Condition, Readiness},
        metrics::Metrics,
    },
};
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, ServerName},
};
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::harness::{Cluster, eventually, run, secret};

const NAMESPACE: &str = "lockstep-system";
const HOST: &str = "guard.example";
const LONG: Pace = Pace { ca_validity: days(365), leaf_validity: days(7) };

const fn days(n: u64) -> Duration {
    Duration::from_hours(24 * n)
}

/// A cluster with webhook configurations of its own, whose entries match nothing.
struct Stage {
    cluster: Cluster,
    instance: String,
}

impl Stage {
    async fn new(test: &str) -> Self {
        let stage = Self::bare(test).await;
        for kind in ["Validating", "Mutating"] {
            stage.configuration(kind).await;
        }
        stage
    }

    /// Without webhook configurations.
    async fn bare(test: &str) -> Self {
        let cluster = Cluster::new(test).await;
        let stage = Self { instance: format!("lockstep.{}", cluster.domain()), cluster };
        stage.grant().await;
        stage
    }

    /// Exactly what Lockstep's identity needs for its certificates.
    async fn grant(&self) {
        let (name, cluster) = (&self.instance, &self.cluster);
        let subjects = json!([{"kind": "ServiceAccount", "namespace": NAMESPACE, "name": "lockstep"}]);
        let rbac = "/apis/rbac.authorization.k8s.io/v1";
        let group = "rbac.authorization.k8s.io";
        let hooks = ["validatingwebhookconfigurations", "mutatingwebhookconfigurations"];
        let in_namespace = format!("{rbac}/namespaces/{NAMESPACE}");
        for (path, kind, rules) in [
            (
                rbac.to_owned(),
                "ClusterRole",
                json!([{"apiGroups": ["admissionregistration.k8s.io"], "resources": hooks,
                        "resourceNames": [name], "verbs": ["list", "watch", "patch"]}]),
            ),
            (
                in_namespace,
                "Role",
                json!([
                    {"apiGroups": [""], "resources": ["secrets"], "verbs": ["create"]},
                    {"apiGroups": [""], "resources": ["secrets"], "resourceNames": [name],
                     "verbs": ["list", "watch", "patch"]},
                ]),
            ),
        ] {
            let plural = format!("{}s", kind.to_lowercase());
            cluster
                .post(&format!("{path}/{plural}"), &json!({"metadata": {"name": name}, "rules": rules}))
                .await;
            let binding = json!({
                "metadata": {"name": name},
                "roleRef": {"apiGroup": group, "kind": kind, "name": name},
                "subjects": subjects,
            });
            cluster.post(&format!("{path}/{}bindings", kind.to_lowercase()), &binding).await;
        }
    }

    fn collection(kind: &str) -> String {
        format!("/apis/admissionregistration.k8s.io/v1/{}webhookconfigurations", kind.to_lowercase())
    }

    fn configuration_path(&self, kind: &str) -> String {
        format!("{}/{}", Self::collection(kind), self.instance)
    }

    fn secret_path(&self) -> String {
        secret(NAMESPACE, &self.instance)
    }

    async fn configuration(&self, kind: &str) {
        let entry = |name: &str, client: Value| {
            json!({
                "name": format!("{name}.{}", self.cluster.domain()),
                "clientConfig": client,
                "admissionReviewVersions": ["v1"],
                "sideEffects": "None",
                "failurePolicy": "Ignore",
                // An object that nobody makes: other tests must not wait for us.
                "objectSelector": {"matchLabels": {self.cluster.key("nobody"): "makes-this"}},
                "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["configmaps"]}],
            })
        };
        let entries = [
            entry("service", json!({"service": {"name": "lockstep", "namespace": NAMESPACE, "path": "/"}})),
            entry("url", json!({"url": format!("https://{HOST}:8443/x")})),
        ];
        let body = json!({"metadata": {"name": self.instance}, "webhooks": entries});
        self.cluster.post(&Self::collection(kind), &body).await;
    }

    /// The bundles of all entries of both configurations.
    async fn bundles(&self) -> Vec<Vec<Certificate>> {
        let mut bundles = Vec::new();
        for kind in ["Validating", "Mutating"] {
            let object = self.cluster.get(&self.configuration_path(kind)).await.expect("a configuration");
            for entry in object["webhooks"].as_array().expect("entries") {
                let bundle =
                    serde_json::from_value::<Option<ByteString>>(entry["clientConfig"]["caBundle"].clone());
                let pem = bundle.expect("a bundle").unwrap_or_default();
                bundles.push(Certificate::parse_all(&pem.0).expect("certificates"));
            }
        }
        bundles
    }

    /// The one bundle that all entries hold.
    async fn bundle(&self) -> Option<Vec<Certificate>> {
        let mut bundles = self.bundles().await;
        let first = bundles.pop()?;
        bundles.iter().all(|bundle| *bundle == first).then_some(first)
    }

    async fn secret(&self) -> Option<BTreeMap<String, ByteString>> {
        let object = self.cluster.get(&self.secret_path()).await?;
        Some(serde_json::from_value(object["data"].clone()).expect("data"))
    }

    /// The CA that the Secret says is the current one.
    async fn current(&self) -> Option<Certificate> {
        let data = self.secret().await?;
        Certificate::parse_all(&data.get("ca.crt")?.0).ok()?.pop()
    }

    /// Waits until the Secret and all entries hold just this one CA, beside some.
    async fn settled_on_other_than(&self, former: &[Certificate]) -> Certificate {
        eventually("one CA in the Secret and in every entry", || async {
            let current = self.current().await.filter(|current| !former.contains(current))?;
            let bundle = self.bundle().await?;
            bundle.iter().filter(|one| !former.contains(one)).eq([&current]).then_some(current)
        })
        .await
    }

    async fn settled(&self) -> Certificate {
        self.settled_on_other_than(&[]).await
    }

    /// Replaces fields of the Secret; a null takes one away.
    async fn tamper(&self, data: Value) {
        self.cluster.merge(&self.secret_path(), &json!({"data": data})).await;
    }

    async fn replica(&self, pace: Pace) -> Replica {
        let kubeconfig = self.cluster.plane.service_account(NAMESPACE, "lockstep").expect("a kubeconfig");
        let kubeconfig = Kubeconfig::read_from(kubeconfig).expect("a kubeconfig");
        let config = kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default())
            .await
            .expect("a config");
        let metrics = Metrics::new();
        let client = client::build(config, &metrics).expect("a client");
        let readiness = Readiness::new([Condition::Certificate, Condition::Bundle]);
        let settings = Settings {
            keys: Arc::new(Keys::new(&self.cluster.domain(), "-synced")),
            namespace: NAMESPACE.to_owned(),
            pace,
            files: None,
        };
        let mut tasks = JoinSet::new();
        let resolver =
            certs::start(&mut tasks, &client, settings, &metrics, &readiness).expect("certificates");
        Replica { _tasks: tasks, resolver, metrics, readiness }
    }

    async fn ready_replica(&self, pace: Pace) -> Replica {
        let replica = self.replica(pace).await;
        replica.wait_ready().await;
        replica
    }
}

/// The certificates of one replica. Its tasks end when it is dropped.
struct Replica {
    _tasks: JoinSet<&'static str>,
    resolver: Arc<Resolver>,
    metrics: Metrics,
    readiness: Readiness,
}

impl Replica {
    async fn wait_ready(&self) {
        eventually("a certificate is served and the CA published", || async {
            self.readiness.unmet().is_empty().then_some(())
        })
        .await;
    }

    fn metric(&self, name: &str) -> f64 {
        let text = self.metrics.render();
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.map_or(0.0, |value| value.trim().parse().expect("a number"))
    }

    fn leaf(&self) -> Option<CertificateDer<'static>> {
        self.resolver.chain()?.into_iter().next()
    }

    /// A handshake as the API server would do it, with what an entry trusts.
    async fn handshake(&self, roots: &[Certificate], host: &str) -> Result<(), String> {
        let mut store = RootCertStore::empty();
        for root in roots {
            store.add(root.der().clone()).map_err(|error| error.to_string())?;
        }
        let client = ClientConfig::builder().with_root_certificates(store).with_no_client_auth();
        let acceptor = TlsAcceptor::from(server_config(self.resolver.clone()).expect("a configuration"));
        let (near, far) = tokio::io::duplex(16 * 1024);
        let host = ServerName::try_from(host.to_owned()).expect("a name");
        let (client, _server) =
            tokio::join!(TlsConnector::from(Arc::new(client)).connect(host, near), acceptor.accept(far));
        client.map(drop).map_err(|error| error.to_string())
    }
}

fn encoded(text: &str) -> Value {
    json!(ByteString(text.as_bytes().to_vec()))
}

/// A CA that Lockstep did not make just now, as the Secret's data.
fn pair(validity: Duration, at: Timestamp) -> (Certificate, Value) {
    let ca = Ca::generate("somebody else", validity, at).expect("a CA");
    let data = State::new(Arc::new(ca)).data();
    let certificate = data["ca.crt"].as_ref().expect("a certificate");
    let certificate = Certificate::parse_all(&certificate.0).expect("a certificate").remove(0);
    (certificate, json!(data))
}

fn ago(time: Duration) -> Timestamp {
    Timestamp::now() - time
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_that_start_at_once_share_one_ca_and_each_serves_what_the_configurations_trust() {
    let stage = Stage::new("shared").await;
    let (one, other) = tokio::join!(stage.ready_replica(LONG), stage.ready_replica(LONG));
    let ca = stage.settled().await;
    let names = [HOST, "lockstep.lockstep-system.svc", "localhost"];
    for (replica, host) in [&one, &other].into_iter().flat_map(|replica| names.map(|host| (replica, host))) {
        eventually(host, || async { replica.handshake(from_ref(&ca), host).await.ok() }).await;
    }
    assert_ne!(one.leaf(), other.leaf(), "each has a leaf of its own");
    assert!(one.handshake(from_ref(&ca), "elsewhere.example").await.is_err());
    let expiry = one.metric("lockstep_certificate_expiry_timestamp_seconds{certificate=\"ca\"}");
    assert!((expiry - ca.not_after.as_second() as f64).abs() < f64::EPSILON);

    let object = stage.cluster.get(&stage.secret_path()).await.unwrap();
    assert_eq!(object["type"], "Opaque");
    assert_eq!(object["metadata"]["labels"]["app.kubernetes.io/name"], "lockstep");
    let configuration = stage.cluster.get(&stage.configuration_path("Validating")).await.unwrap();
    let managers = configuration["metadata"]["managedFields"].as_array().unwrap();
    assert!(managers.iter().any(|entry| entry["manager"] == json!(stage.instance)), "{managers:?}");

    // A third one that comes later takes what is there.
    let third = stage.ready_replica(LONG).await;
    assert_eq!(third.handshake(from_ref(&ca), "localhost").await, Ok(()));
    assert_eq!(third.metric("lockstep_bundle_writes_total"), 0.0);
    assert_eq!(stage.settled().await, ca);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secret_that_is_deleted_or_broken_gets_its_ca_back_from_memory() {
    let stage = Stage::new("broken").await;
    let replica = stage.ready_replica(LONG).await;
    let ca = stage.settled().await;
    let right = stage.secret().await.unwrap();
    let back = || async {
        eventually("the same CA", || async { (stage.secret().await? == right).then_some(()) }).await;
    };
    stage.cluster.delete(&stage.secret_path()).await;
    back().await;
    let (_, other) = pair(days(1), Timestamp::now());
    // Every further repair waits longer than the one before; each field by itself is a matter of unit tests.
    for broken in [
        json!({"ca.crt": null}),
        json!({"ca.crt": encoded("nonsense"), "ca.key": encoded("nonsense")}),
        json!({"ca.key": other["ca.key"]}),
        json!({"next.crt": encoded("nonsense"), "next.published": encoded("soon"), "old.crt": encoded("nonsense")}),
    ] {
        stage.tamper(broken).await;
        back().await;
    }
    assert_eq!(replica.handshake(from_ref(&ca), HOST).await, Ok(()));
    assert_eq!(stage.settled().await, ca);
    assert_eq!(replica.metric("lockstep_certificate_rotations_total{certificate=\"ca\"}"), 0.0);

    // What others keep there is none of our business.
    stage.tamper(json!({"notes": encoded("mine")})).await;
    stage.tamper(json!({"ca.crt": null})).await;
    eventually("the CA is back, the notes are there", || async {
        let data = stage.secret().await?;
        (data.get("ca.crt") == right.get("ca.crt") && data.contains_key("notes")).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_secret_that_is_expired_or_broken_at_start_is_replaced() {
    let expired = pair(days(1), ago(days(2))).1;
    let early = pair(days(9), Timestamp::now() + days(2)).1;
    let broken = json!({"ca.crt": encoded("nonsense"), "ca.key": encoded("nonsense")});
    for (n, data) in [expired, early, broken, json!({})].into_iter().enumerate() {
        let stage = Stage::new(&format!("expired{n}")).await;
        let former: Vec<Certificate> = data["ca.crt"]
            .as_str()
            .and_then(|_| serde_json::from_value::<ByteString>(data["ca.crt"].clone()).ok())
            .and_then(|pem| Certificate::parse_all(&pem.0).ok())
            .unwrap_or_default();
        let data: serde_json::Map<String, Value> =
            data.as_object().unwrap().clone().into_iter().filter(|(_, value)| !value.is_null()).collect();
        let body = json!({"metadata": {"name": stage.instance}, "data": data});
        stage.cluster.post(&format!("/api/v1/namespaces/{NAMESPACE}/secrets"), &body).await;
        let replica = stage.ready_replica(LONG).await;
        let ca = stage.settled_on_other_than(&former).await;
        assert!(ca.is_valid(Timestamp::now()));
        assert_eq!(replica.handshake(&[ca], "localhost").await, Ok(()));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn somebody_elses_ca_is_published_before_it_is_used() {
    let stage = Stage::new("restored").await;
    // Twelve seconds make a spread of one.
    let pace = Pace { ca_validity: Duration::from_secs(12), ..LONG };
    let replica = stage.ready_replica(LONG).await;
    let ours = stage.settled().await;
    drop(replica);
    let replica = stage.ready_replica(pace).await;
    let (theirs, data) = pair(days(9), Timestamp::now());
    stage.tamper(json!({"ca.crt": data["ca.crt"], "ca.key": data["ca.key"]})).await;
    let both = Cell::new(false);
    eventually("their CA signs", || async {
        let bundles = stage.bundles().await;
        for bundle in &bundles {
            assert_eq!(replica.handshake(bundle, "localhost").await, Ok(()), "{bundle:?}");
        }
        if bundles.iter().all(|bundle| bundle.contains(&ours) && bundle.contains(&theirs)) {
            both.set(true);
        }
        replica.handshake(from_ref(&theirs), "localhost").await.ok()
    })
    .await;
    assert!(both.get(), "the former one was trusted meanwhile");
    assert_eq!(stage.current().await, Some(theirs));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bundle_that_is_wiped_or_replaced_is_back_within_seconds() {
    let stage = Stage::new("wiped").await;
    let replica = stage.ready_replica(LONG).await;
    let ca = stage.settled().await;
    let writes = replica.metric("lockstep_bundle_writes_total");
    let (theirs, _) = pair(days(9), Timestamp::now());
    for kind in ["Validating", "Mutating"] {
        let path = stage.configuration_path(kind);
        let entry = "/webhooks/1/clientConfig/caBundle";
        for (op, value) in [("remove", Value::Null), ("replace", encoded(&theirs.pem()))] {
            let patch = json!([{"op": op, "path": entry, "value": value}]);
            stage
                .cluster
                .try_request("PATCH", &path, Some(("application/json-patch+json", &patch)))
                .await
                .unwrap();
            let start = Instant::now();
            assert_eq!(stage.settled().await, ca);
            assert!(start.elapsed() < Duration::from_secs(5), "{kind} {op}: {:?}", start.elapsed());
        }
        assert!(replica.readiness.unmet().is_empty(), "that is no reason not to be ready");
    }
    // Counted when the answer has come, which is after others can see it.
    eventually("four writes", || async {
        (replica.metric("lockstep_bundle_writes_total") >= writes + 4.0).then_some(())
    })
    .await;
    assert_eq!(replica.metric("lockstep_bundle_writes_total"), writes + 4.0);
    assert_eq!(replica.handshake(&[ca], HOST).await, Ok(()));
}

#[tokio::test(flavor = "multi_thread")]
async fn configurations_that_come_later_are_taken_up_and_names_with_them() {
    let stage = Stage::bare("later").await;
    let replica = stage.replica(LONG).await;
    let ca = eventually("a CA", || stage.current()).await;
    eventually("a certificate", || async { replica.handshake(from_ref(&ca), "localhost").await.ok() }).await;
    assert_eq!(replica.readiness.unmet(), [Condition::Bundle]);
    assert!(replica.handshake(from_ref(&ca), HOST).await.is_err());
    stage.configuration("Validating").await;
    eventually("the name", || async { replica.handshake(from_ref(&ca), HOST).await.ok() }).await;
    assert_eq!(replica.readiness.unmet(), [Condition::Bundle]);
    stage.configuration("Mutating").await;
    replica.wait_ready().await;
    assert_eq!(stage.settled().await, ca);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rotation_runs_through_all_phases_and_no_handshake_fails_on_the_way() {
    let stage = Stage::new("rotation").await;
    let pace = Pace { ca_validity: Duration::from_secs(24), leaf_validity: Duration::from_secs(6) };
    let (one, other) = tokio::join!(stage.ready_replica(pace), stage.ready_replica(pace));
    let first = stage.settled().await;
    let mut second = None;
    let mut phases: Vec<String> = Vec::new();
    let start = Instant::now();
    loop {
        for bundle in stage.bundles().await {
            for replica in [&one, &other] {
                let outcome = replica.handshake(&bundle, "localhost").await;
                assert_eq!(outcome, Ok(()), "after {phases:?} with {bundle:?}");
            }
        }
        let data = stage.secret().await.expect("the Secret");
        let phase: Vec<&str> = ["next.crt", "next.key", "next.published", "old.crt", "old.since"]
            .into_iter()
            .filter(|key| data.contains_key(*key))
            .collect();
        let phase = phase.join("+");
        if phases.last() != Some(&phase) {
            phases.push(phase);
        }
        let current = stage.current().await.expect("a CA");
        if current != first {
            second.get_or_insert(current);
        }
        // The first rotation is over when its old CA is trusted no more, whatever the second one does meanwhile.
        let bundle = stage.bundle().await.unwrap_or_else(|| vec![first.clone()]);
        if second.is_some() && !bundle.contains(&first) {
            break;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "{phases:?}");
    }
    let expected = ["", "next.crt+next.key", "next.crt+next.key+next.published", "old.crt+old.since"];
    let seen: Vec<&str> = phases.iter().map(String::as_str).collect();
    // The time between two of our own steps may be shorter than our look at them.
    let seen_all = expected.iter().filter(|phase| seen.contains(phase)).count();
    assert!(seen_all >= 3 && seen.contains(&expected[2]) && seen.contains(&expected[3]), "{phases:?}");
    let rotations = |replica: &Replica, what: &str| {
        replica.metric(&format!("lockstep_certificate_rotations_total{{certificate=\"{what}\"}}"))
    };
    assert!(rotations(&one, "ca") + rotations(&other, "ca") >= 1.0);
    for replica in [&one, &other] {
        assert!(rotations(replica, "leaf") >= 4.0);
        assert!(replica.readiness.unmet().is_empty());
    }
    run(stage.cluster.plane.kubectl().args(["-n", NAMESPACE, "get", "secret", &stage.instance]));
}
