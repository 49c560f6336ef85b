//! Certificates: all replicas share one CA; it is published before it is used and restored after any damage.

use std::{
    cell::Cell,
    collections::BTreeMap,
    slice::from_ref,
    sync::Arc,
    time::{Duration, Instant},
};

use k8s_openapi::{ByteString, jiff::Timestamp};
use kube::config::{KubeConfigOptions, Kubeconfig};
use rustls::{
    ClientConfig, RootCertStore,
    pki_types::{CertificateDer, ServerName},
};
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::harness::{Cluster, eventually, run, secret};
use lockstep::{
    certs::{self, resolver::Resolver},
    leader::LeaseAnnotations,
    ops::{
        health::{Condition, Readiness},
        metrics::Metrics,
    },
    tls::client_ca::server_config,
};
use lockstep_cluster::client;
use lockstep_core::{
    certs::{
        decide::CertSettings,
        issue::{Ca, Certificate},
        lifetimes::Lifetimes,
        secret::CaSet,
    },
    keys::Keys,
};

const NAMESPACE: &str = "lockstep-system";
const HOST: &str = "webhook.example";
const LONG: Lifetimes = Lifetimes { ca_validity: days(365), leaf_validity: days(7) };

const fn days(n: u64) -> Duration {
    Duration::from_hours(24 * n)
}

/// A cluster with webhook configurations of its own, whose webhooks match nothing.
struct Fixture {
    cluster: Cluster,
    instance: String,
}

impl Fixture {
    async fn new(test: &str) -> Self {
        let fixture = Self::bare(test).await;
        for kind in ["Validating", "Mutating"] {
            fixture.configuration(kind).await;
        }
        fixture
    }

    /// Without webhook configurations.
    async fn bare(test: &str) -> Self {
        let cluster = Cluster::new(test).await;
        let fixture = Self { instance: format!("lockstep.{}", cluster.domain()), cluster };
        fixture.grant().await;
        fixture
    }

    /// Grants exactly what Lockstep needs for its certificates.
    async fn grant(&self) {
        let (name, cluster) = (&self.instance, &self.cluster);
        let subjects = json!([{"kind": "ServiceAccount", "namespace": NAMESPACE, "name": "lockstep"}]);
        let rbac = "/apis/rbac.authorization.k8s.io/v1";
        let group = "rbac.authorization.k8s.io";
        let webhooks = ["validatingwebhookconfigurations", "mutatingwebhookconfigurations"];
        let in_namespace = format!("{rbac}/namespaces/{NAMESPACE}");
        for (path, kind, rules) in [
            (
                rbac.to_owned(),
                "ClusterRole",
                json!([{"apiGroups": ["admissionregistration.k8s.io"], "resources": webhooks,
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
        let url = json!({"url": format!("https://{HOST}:8443/x")});
        let service = json!({"service": {"name": "lockstep", "namespace": NAMESPACE, "path": "/"}});
        let webhooks = [("companions", service), ("sources", url)]
            .map(|(name, client)| (format!("{name}.{}", self.instance), client));
        self.configuration_with(kind, &webhooks).await;
    }

    /// Creates a configuration with webhooks of these names, which call these hosts.
    async fn configuration_with(&self, kind: &str, webhooks: &[(String, Value)]) {
        let webhook = |(name, client): &(String, Value)| {
            json!({
                "name": name,
                "clientConfig": client,
                "admissionReviewVersions": ["v1"],
                "sideEffects": "None",
                "failurePolicy": "Ignore",
                // Matches no object: other tests must not wait for this webhook.
                "objectSelector": {"matchLabels": {self.cluster.key("matches"): "nothing"}},
                "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["configmaps"]}],
            })
        };
        let webhooks: Vec<Value> = webhooks.iter().map(webhook).collect();
        let body = json!({"metadata": {"name": self.instance}, "webhooks": webhooks});
        self.cluster.post(&Self::collection(kind), &body).await;
    }

    /// The caBundle of every webhook of both configurations.
    async fn bundles(&self) -> Vec<Vec<Certificate>> {
        [self.bundles_of("Validating").await, self.bundles_of("Mutating").await].concat()
    }

    /// The caBundle of every webhook of one configuration.
    async fn bundles_of(&self, kind: &str) -> Vec<Vec<Certificate>> {
        let object = self.cluster.get(&self.configuration_path(kind)).await.expect("a configuration");
        let bundle = |webhook: &Value| {
            let bundle =
                serde_json::from_value::<Option<ByteString>>(webhook["clientConfig"]["caBundle"].clone());
            Certificate::parse_all(&bundle.expect("a bundle").unwrap_or_default().0).expect("certificates")
        };
        object["webhooks"].as_array().expect("webhooks").iter().map(bundle).collect()
    }

    /// The caBundle of all webhooks; none if they differ.
    async fn bundle(&self) -> Option<Vec<Certificate>> {
        let mut bundles = self.bundles().await;
        let first = bundles.pop()?;
        bundles.iter().all(|bundle| *bundle == first).then_some(first)
    }

    async fn secret(&self) -> Option<BTreeMap<String, ByteString>> {
        let object = self.cluster.get(&self.secret_path()).await?;
        Some(serde_json::from_value(object["data"].clone()).expect("data"))
    }

    /// The current CA in the Secret.
    async fn current(&self) -> Option<Certificate> {
        let data = self.secret().await?;
        Certificate::parse_all(&data.get("ca.crt")?.0).ok()?.pop()
    }

    /// Waits until the Secret has a current CA that is not among the former ones, and every webhook trusts just this
    /// one beside the former ones.
    async fn settled_on_other_than(&self, former: &[Certificate]) -> Certificate {
        eventually("the same CA in the Secret and in every webhook", || async {
            let current = self.current().await.filter(|current| !former.contains(current))?;
            let bundle = self.bundle().await?;
            bundle.iter().filter(|one| !former.contains(one)).eq([&current]).then_some(current)
        })
        .await
    }

    async fn settled(&self) -> Certificate {
        self.settled_on_other_than(&[]).await
    }

    /// Replaces keys of the Secret; null removes a key.
    async fn tamper(&self, data: Value) {
        self.cluster.merge(&self.secret_path(), &json!({"data": data})).await;
    }

    async fn replica(&self, lifetimes: Lifetimes) -> Replica {
        let kubeconfig = self.cluster.plane.service_account(NAMESPACE, "lockstep").expect("a kubeconfig");
        let kubeconfig = Kubeconfig::read_from(kubeconfig).expect("a kubeconfig");
        let config = kube::Config::from_custom_kubeconfig(kubeconfig, &KubeConfigOptions::default())
            .await
            .expect("a config");
        let metrics = Metrics::new();
        let client = client::build(config, |_, _| {}).expect("a client");
        let readiness = Readiness::new([Condition::Certificate, Condition::Bundle]);
        let settings = CertSettings {
            keys: Arc::new(Keys::new(&self.cluster.domain(), "-synced")),
            namespace: NAMESPACE.to_owned(),
            lifetimes,
        };
        let mut tasks = JoinSet::new();
        let resolver = certs::task::start(
            &mut tasks,
            &client,
            settings,
            LeaseAnnotations::default().observed(),
            &metrics,
            &readiness,
            &lockstep_cluster::watch::Restores::default(),
        );
        Replica { _tasks: tasks, resolver, metrics, readiness }
    }

    async fn ready_replica(&self, lifetimes: Lifetimes) -> Replica {
        let replica = self.replica(lifetimes).await;
        replica.wait_ready().await;
        replica
    }
}

/// The certificates of one replica. Its tasks end when it is dropped.
struct Replica {
    _tasks: JoinSet<()>,
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

    /// A handshake as the API server does it, with the CAs that a webhook trusts.
    async fn handshake(&self, roots: &[Certificate], host: &str) -> Result<(), String> {
        let mut store = RootCertStore::empty();
        for root in roots {
            store.add(root.der().clone()).map_err(|error| error.to_string())?;
        }
        let client = ClientConfig::builder().with_root_certificates(store).with_no_client_auth();
        let acceptor =
            TlsAcceptor::from(server_config(self.resolver.clone(), None).expect("a configuration"));
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

/// A CA that Lockstep did not generate, and the Secret's data for it.
fn pair(validity: Duration, at: Timestamp) -> (Certificate, Value) {
    let ca = Ca::generate("somebody else", validity, at).expect("a CA");
    let data = CaSet::new(Arc::new(ca)).data();
    let certificate = data["ca.crt"].as_ref().expect("a certificate");
    let certificate = Certificate::parse_all(&certificate.0).expect("a certificate").remove(0);
    (certificate, json!(data))
}

fn ago(time: Duration) -> Timestamp {
    Timestamp::now() - time
}

#[tokio::test(flavor = "multi_thread")]
async fn replicas_that_start_together_share_one_ca_and_each_serves_a_trusted_leaf() {
    let fixture = Fixture::new("shared").await;
    let (one, other) = tokio::join!(fixture.ready_replica(LONG), fixture.ready_replica(LONG));
    let ca = fixture.settled().await;
    let names = [HOST, "lockstep.lockstep-system.svc", "localhost"];
    for (replica, host) in [&one, &other].into_iter().flat_map(|replica| names.map(|host| (replica, host))) {
        eventually(host, || async { replica.handshake(from_ref(&ca), host).await.ok() }).await;
    }
    assert_ne!(one.leaf(), other.leaf(), "each has a leaf of its own");
    assert!(one.handshake(from_ref(&ca), "elsewhere.example").await.is_err());
    let expiry = one.metric("lockstep_certificate_expiry_timestamp_seconds{certificate=\"ca\"}");
    assert!((expiry - ca.not_after.as_second() as f64).abs() < f64::EPSILON);

    let object = fixture.cluster.get(&fixture.secret_path()).await.unwrap();
    assert_eq!(object["type"], "Opaque");
    assert_eq!(object["metadata"]["labels"]["app.kubernetes.io/name"], "lockstep");
    let configuration = fixture.cluster.get(&fixture.configuration_path("Validating")).await.unwrap();
    let managers = configuration["metadata"]["managedFields"].as_array().unwrap();
    assert!(managers.iter().any(|entry| entry["manager"] == json!(fixture.instance)), "{managers:?}");

    // A replica that starts later uses the existing CA and writes nothing.
    let third = fixture.ready_replica(LONG).await;
    assert_eq!(third.handshake(from_ref(&ca), "localhost").await, Ok(()));
    assert_eq!(third.metric("lockstep_bundle_writes_total"), 0.0);
    assert_eq!(fixture.settled().await, ca);
}

#[tokio::test(flavor = "multi_thread")]
async fn deleted_or_damaged_secret_is_restored_from_memory() {
    let fixture = Fixture::new("broken").await;
    let replica = fixture.ready_replica(LONG).await;
    let ca = fixture.settled().await;
    let right = fixture.secret().await.unwrap();
    let restored = || async {
        eventually("the same CA", || async { (fixture.secret().await? == right).then_some(()) }).await;
    };
    // Twice: the second time, right after a write of ours.
    for _ in 0..2 {
        let start = Instant::now();
        fixture.cluster.delete(&fixture.secret_path()).await;
        restored().await;
        assert!(start.elapsed() < Duration::from_secs(4), "it waited for the watch: {:?}", start.elapsed());
    }
    let (_, other) = pair(days(1), Timestamp::now());
    // Repairs back off, so only a few damages are tried here; unit tests try every field.
    for broken in [
        json!({"ca.crt": null}),
        json!({"ca.crt": encoded("nonsense"), "ca.key": encoded("nonsense")}),
        json!({"ca.key": other["ca.key"]}),
        json!({"next.crt": encoded("nonsense"), "next.published": encoded("soon"), "old.crt": encoded("nonsense")}),
    ] {
        fixture.tamper(broken).await;
        restored().await;
    }
    assert_eq!(replica.handshake(from_ref(&ca), HOST).await, Ok(()));
    assert_eq!(fixture.settled().await, ca);
    assert_eq!(replica.metric("lockstep_certificate_rotations_total{certificate=\"ca\"}"), 0.0);

    // Foreign keys of the Secret are kept.
    fixture.tamper(json!({"notes": encoded("mine")})).await;
    fixture.tamper(json!({"ca.crt": null})).await;
    eventually("the CA is restored and the foreign key kept", || async {
        let data = fixture.secret().await?;
        (data.get("ca.crt") == right.get("ca.crt") && data.contains_key("notes")).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn expired_or_damaged_ca_at_start_is_replaced() {
    let expired = pair(days(1), ago(days(2))).1;
    let early = pair(days(9), Timestamp::now() + days(2)).1;
    let broken = json!({"ca.crt": encoded("nonsense"), "ca.key": encoded("nonsense")});
    for (n, data) in [expired, early, broken, json!({})].into_iter().enumerate() {
        let fixture = Fixture::new(&format!("expired{n}")).await;
        let former: Vec<Certificate> = data["ca.crt"]
            .as_str()
            .and_then(|_| serde_json::from_value::<ByteString>(data["ca.crt"].clone()).ok())
            .and_then(|pem| Certificate::parse_all(&pem.0).ok())
            .unwrap_or_default();
        let data: serde_json::Map<String, Value> =
            data.as_object().unwrap().clone().into_iter().filter(|(_, value)| !value.is_null()).collect();
        let body = json!({"metadata": {"name": fixture.instance}, "data": data});
        fixture.cluster.post(&format!("/api/v1/namespaces/{NAMESPACE}/secrets"), &body).await;
        let replica = fixture.ready_replica(LONG).await;
        let ca = fixture.settled_on_other_than(&former).await;
        assert!(ca.is_valid(Timestamp::now()));
        assert_eq!(replica.handshake(&[ca], "localhost").await, Ok(()));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn foreign_ca_is_published_before_it_signs() {
    let fixture = Fixture::new("restored").await;
    // A propagation delay of one second.
    let lifetimes = Lifetimes { ca_validity: Duration::from_secs(12), ..LONG };
    let replica = fixture.ready_replica(LONG).await;
    let ours = fixture.settled().await;
    drop(replica);
    let replica = fixture.ready_replica(lifetimes).await;
    let (theirs, data) = pair(days(9), Timestamp::now());
    fixture.tamper(json!({"ca.crt": data["ca.crt"], "ca.key": data["ca.key"]})).await;
    let both = Cell::new(false);
    eventually("their CA signs", || async {
        let bundles = fixture.bundles().await;
        for bundle in &bundles {
            assert_eq!(replica.handshake(bundle, "localhost").await, Ok(()), "{bundle:?}");
        }
        if bundles.iter().all(|bundle| bundle.contains(&ours) && bundle.contains(&theirs)) {
            both.set(true);
        }
        replica.handshake(from_ref(&theirs), "localhost").await.ok()
    })
    .await;
    assert!(both.get(), "the former CA was trusted meanwhile");
    assert_eq!(fixture.current().await, Some(theirs));
}

#[tokio::test(flavor = "multi_thread")]
async fn ca_that_the_api_server_would_not_accept_is_neither_adopted_nor_published() {
    let fixture = Fixture::new("unfit").await;
    let replica = fixture.ready_replica(LONG).await;
    let ours = fixture.settled().await;
    let right = fixture.secret().await.unwrap();
    let clients_only = restricted(|params| {
        params.extended_key_usages = vec![rcgen::ExtendedKeyUsagePurpose::ClientAuth];
    });
    let elsewhere = restricted(|params| {
        let permitted_subtrees = vec![rcgen::GeneralSubtree::DnsName("example.com".to_owned())];
        params.name_constraints =
            Some(rcgen::NameConstraints { permitted_subtrees, excluded_subtrees: vec![] });
    });
    let early = restricted(|params| {
        params.not_before += Duration::from_hours(48);
        params.not_after += Duration::from_hours(48);
    });
    let damages = [&clients_only, &elsewhere, &early].into_iter().flat_map(|(certificate, key)| {
        let [certificate, key] = [certificate, key].map(|text| encoded(text));
        [json!({"next.crt": certificate, "next.key": key}), json!({"ca.crt": certificate, "ca.key": key})]
    });
    for damage in damages {
        fixture.tamper(damage).await;
        eventually("the Secret is as it was", || async {
            for bundle in fixture.bundles().await {
                assert_eq!(bundle, from_ref(&ours), "a CA that cannot serve was published");
            }
            (fixture.secret().await? == right).then_some(())
        })
        .await;
        assert_eq!(replica.handshake(from_ref(&ours), HOST).await, Ok(()));
    }
}

/// A CA with restrictions, as PEM, and its key.
fn restricted(restrict: impl FnOnce(&mut rcgen::CertificateParams)) -> (String, String) {
    let mut params = rcgen::CertificateParams::default();
    params.is_ca = rcgen::IsCa::Ca(rcgen::BasicConstraints::Unconstrained);
    params.key_usages = vec![rcgen::KeyUsagePurpose::KeyCertSign];
    let now = std::time::SystemTime::now();
    params.not_before = now.into();
    params.not_after = (now + days(9)).into();
    restrict(&mut params);
    let key = rcgen::KeyPair::generate().expect("a key");
    let certificate = params.self_signed(&key).expect("a certificate");
    (certificate.pem(), key.serialize_pem())
}

#[tokio::test(flavor = "multi_thread")]
async fn removed_or_replaced_ca_bundle_is_restored_within_seconds() {
    let fixture = Fixture::new("wiped").await;
    let replica = fixture.ready_replica(LONG).await;
    let ca = fixture.settled().await;
    let writes = replica.metric("lockstep_bundle_writes_total");
    let (theirs, _) = pair(days(9), Timestamp::now());
    for kind in ["Validating", "Mutating"] {
        let path = fixture.configuration_path(kind);
        let bundle = "/webhooks/1/clientConfig/caBundle";
        for (op, value) in [("remove", Value::Null), ("replace", encoded(&theirs.pem()))] {
            let patch = json!([{"op": op, "path": bundle, "value": value}]);
            fixture
                .cluster
                .try_request("PATCH", &path, Some(("application/json-patch+json", &patch)))
                .await
                .unwrap();
            let start = Instant::now();
            assert_eq!(fixture.settled().await, ca);
            assert!(start.elapsed() < Duration::from_secs(5), "{kind} {op}: {:?}", start.elapsed());
        }
        assert!(replica.readiness.unmet().is_empty(), "the replica stays ready");
    }
    // Writes are counted when the answer arrives, which is after others can see them.
    eventually("four writes", || async {
        (replica.metric("lockstep_bundle_writes_total") >= writes + 4.0).then_some(())
    })
    .await;
    assert_eq!(replica.metric("lockstep_bundle_writes_total"), writes + 4.0);
    assert_eq!(replica.handshake(&[ca], HOST).await, Ok(()));
}

#[tokio::test(flavor = "multi_thread")]
async fn webhook_configurations_created_later_get_the_ca_and_their_hosts_get_into_the_leaf() {
    let fixture = Fixture::bare("later").await;
    // The API server calls no webhook: there is nothing to wait for.
    let replica = fixture.ready_replica(LONG).await;
    let ca = eventually("a CA", || fixture.current()).await;
    assert_eq!(replica.handshake(from_ref(&ca), "localhost").await, Ok(()));
    assert!(replica.handshake(from_ref(&ca), HOST).await.is_err());
    fixture.configuration("Validating").await;
    eventually("the host is a name of the leaf", || async {
        replica.handshake(from_ref(&ca), HOST).await.ok()
    })
    .await;
    fixture.configuration("Mutating").await;
    assert_eq!(fixture.settled().await, ca);
}

#[tokio::test(flavor = "multi_thread")]
async fn new_replica_gets_ready_while_one_webhook_configuration_is_missing() {
    let missing =
        |kind: &str| format!("lockstep_webhook_configuration_missing{{kind=\"{kind}WebhookConfiguration\"}}");
    for (kind, other) in [("Mutating", "Validating"), ("Validating", "Mutating")] {
        let fixture = Fixture::new(&format!("only{}", other.to_lowercase())).await;
        let former = fixture.ready_replica(LONG).await;
        let ca = fixture.settled().await;
        fixture.cluster.delete(&fixture.configuration_path(kind)).await;
        let replica = fixture.ready_replica(LONG).await;
        assert_eq!(replica.handshake(&[ca], HOST).await, Ok(()));
        for replica in [&former, &replica] {
            eventually("the metric names the one that is missing", || async {
                (replica.metric(&missing(kind)) == 1.0).then_some(())
            })
            .await;
            assert_eq!(replica.metric(&missing(other)), 0.0);
        }
        fixture.configuration(kind).await;
        fixture.settled().await;
        eventually("the metric follows", || async { (replica.metric(&missing(kind)) == 0.0).then_some(()) })
            .await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn bundle_goes_only_into_the_webhooks_that_lockstep_knows() {
    let fixture = Fixture::bare("entries").await;
    let ours = (format!("companions.{}", fixture.instance), json!({"url": format!("https://{HOST}:8443/x")}));
    let foreign = ("scan.vendor.example".to_owned(), json!({"url": "https://scan.vendor.example/x"}));
    fixture.configuration_with("Validating", &[foreign, ours]).await;
    let replica = fixture.ready_replica(LONG).await;
    let ca = eventually("our webhook trusts the CA", || async {
        let [_, ours] = &fixture.bundles_of("Validating").await[..] else { panic!("two webhooks") };
        ours.first().cloned()
    })
    .await;
    assert_eq!(fixture.bundles_of("Validating").await, [vec![], vec![ca.clone()]]);
    assert_eq!(replica.handshake(from_ref(&ca), HOST).await, Ok(()));
    assert!(replica.handshake(from_ref(&ca), "scan.vendor.example").await.is_err(), "it is not our name");
}

#[tokio::test(flavor = "multi_thread")]
async fn rotation_passes_all_phases_without_a_failed_handshake() {
    let fixture = Fixture::new("rotation").await;
    let lifetimes = Lifetimes { ca_validity: Duration::from_secs(24), leaf_validity: Duration::from_secs(6) };
    let (one, other) = tokio::join!(fixture.ready_replica(lifetimes), fixture.ready_replica(lifetimes));
    let first = fixture.settled().await;
    let mut second = None;
    let mut phases: Vec<String> = Vec::new();
    let start = Instant::now();
    loop {
        for bundle in fixture.bundles().await {
            for replica in [&one, &other] {
                let outcome = replica.handshake(&bundle, "localhost").await;
                assert_eq!(outcome, Ok(()), "after {phases:?} with {bundle:?}");
            }
        }
        let data = fixture.secret().await.expect("the Secret");
        let phase: Vec<&str> = ["next.crt", "next.key", "next.published", "old.crt", "old.since"]
            .into_iter()
            .filter(|key| data.contains_key(*key))
            .collect();
        let phase = phase.join("+");
        if phases.last() != Some(&phase) {
            phases.push(phase);
        }
        let current = fixture.current().await.expect("a CA");
        if current != first {
            second.get_or_insert(current);
        }
        // The first rotation ends when its old CA is no longer trusted; the second one may have begun by then.
        let bundle = fixture.bundle().await.unwrap_or_else(|| vec![first.clone()]);
        if second.is_some() && !bundle.contains(&first) {
            break;
        }
        assert!(start.elapsed() < Duration::from_secs(60), "{phases:?}");
    }
    let expected = ["", "next.crt+next.key", "next.crt+next.key+next.published", "old.crt+old.since"];
    let seen: Vec<&str> = phases.iter().map(String::as_str).collect();
    // A phase may be shorter than one iteration of the loop above.
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
    run(fixture.cluster.plane.kubectl().args(["-n", NAMESPACE, "get", "secret", &fixture.instance]));
}
