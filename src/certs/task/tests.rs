use std::sync::atomic::{AtomicU16, Ordering};

use serde_json::json;

use super::*;
use lockstep_cluster::testing::api::{ApiRequest, api_server, refusal};
use lockstep_core::{
    certs::{
        lifetimes::MAX_SLEEP,
        secret::CaSet,
        testing::{LIFETIMES, at, ca_at, configuration, data, secret, service, settings},
    },
    object::time::later,
};

/// What a test sends in place of the watches.
struct Senders {
    secret: channel::Sender<Observed<SecretObject>>,
    configurations: [channel::Sender<Observed<WebhookConfiguration>>; 2],
}

fn task(client: Client) -> (CertificateTask, Senders) {
    let senders = Senders {
        secret: channel::channel(Observed::Unknown).0,
        configurations: [channel::channel(Observed::Unknown).0, channel::channel(Observed::Unknown).0],
    };
    let task = CertificateTask {
        client,
        settings: settings(),
        resolver: Arc::default(),
        metrics: Metrics::new(),
        readiness: Readiness::new([Condition::Certificate, Condition::Bundle]),
        secret: senders.secret.subscribe(),
        configurations: senders.configurations.each_ref().map(channel::Sender::subscribe),
        lease: channel::channel(BTreeMap::new()).1,
        memory: Memory::default(),
        leaf: None,
        problems: BTreeMap::new(),
    };
    (task, senders)
}

fn unused() -> Client {
    api_server(|_| std::future::pending())
}

#[tokio::test]
async fn readiness_and_metrics_follow_the_leaf() {
    let (mut task, senders) = task(unused());
    let readiness = task.readiness.clone();
    let start = Instant::now();
    let reconcile =
        |task: &mut CertificateTask, ms| task.reconcile(Moment { wall: at(ms), instant: start }).1;
    assert_eq!(reconcile(&mut task, 0), MAX_SLEEP);
    assert_eq!(readiness.unmet(), [Condition::Certificate, Condition::Bundle]);

    let cas = CaSet::new(ca_at(at(0), &LIFETIMES));
    senders.secret.send_replace(Observed::Present(Arc::new(secret("1", data(&cas)))));
    assert_eq!(reconcile(&mut task, 0), Duration::ZERO, "a new leaf may make something else due");
    assert_eq!(readiness.unmet(), [Condition::Bundle]);
    assert_eq!(reconcile(&mut task, 0), Duration::from_secs(4), "until the leaf is renewed");
    let first = task.resolver.chain();
    assert!(first.is_some());
    reconcile(&mut task, 4_000);
    assert_ne!(task.resolver.chain(), first);
    let metrics = task.metrics.render();
    let expiry = later(at(4_000), LIFETIMES.leaf_validity).as_second();
    for line in [
        "lockstep_certificate_rotations_total{certificate=\"leaf\"} 1".to_owned(),
        format!("lockstep_certificate_expiry_timestamp_seconds{{certificate=\"leaf\"}} {expiry}"),
    ] {
        assert!(metrics.contains(&line), "{line} in\n{metrics}");
    }

    // A configuration that exists must trust the CA; one that is missing is a warning.
    let observed = |bundle| Observed::Present(Arc::new(configuration("1", &[(service(), bundle)])));
    senders.configurations[0].send_replace(observed(None));
    reconcile(&mut task, 4_000);
    assert_eq!(readiness.unmet(), [Condition::Bundle], "the other one may exist");
    senders.configurations[1].send_replace(Observed::Absent);
    reconcile(&mut task, 4_000);
    assert_eq!(readiness.unmet(), [Condition::Bundle]);
    senders.configurations[0].send_replace(observed(Some(&cas.bundle())));
    reconcile(&mut task, 4_000);
    assert!(readiness.unmet().is_empty());
    let metrics = task.metrics.render();
    for (kind, value) in [("Validating", 0), ("Mutating", 1)] {
        let line = format!("webhook_configuration_missing{{kind=\"{kind}WebhookConfiguration\"}} {value}");
        assert!(metrics.contains(&line), "{line} in\n{metrics}");
    }

    // The CA has expired and there is no other yet, so no valid leaf can be issued.
    reconcile(&mut task, 24_000);
    assert_eq!(readiness.unmet(), [Condition::Certificate]);
}

/// A task whose writes fail, and another replica that creates the Secret in the end.
#[tokio::test]
async fn failed_secret_write_is_retried_with_backoff_until_another_replica_was_first() {
    let code = Arc::new(AtomicU16::new(500));
    let answer = code.clone();
    let client = api_server(move |_| {
        let code = answer.load(Ordering::SeqCst);
        async move { refusal(code, "") }
    });
    let (mut task, senders) = task(client.clone());
    senders.secret.send_replace(Observed::Absent);
    let mut instant = Instant::now();
    let mut waits = Vec::new();
    for attempt in 0..4 {
        code.store(if attempt == 3 { 409 } else { 500 }, Ordering::SeqCst);
        let (writes, _) = task.reconcile(Moment { wall: at(0), instant });
        let [write] = &writes[..] else { panic!("{} writes", writes.len()) };
        let (write, answer) = send(client.clone(), settings(), write.clone()).await;
        task.finish(&write, answer, instant);
        assert_eq!(task.problems[&Topic::SecretWrite].is_failing(), attempt < 3);
        let (writes, wait) = task.reconcile(Moment { wall: at(0), instant });
        assert!(writes.is_empty());
        waits.push(wait.as_millis());
        instant += wait;
    }
    assert_eq!(waits, [100, 200, 400, 5_000], "the last one waits for the watch");
}

#[tokio::test]
async fn hanging_write_to_one_configuration_holds_up_neither_the_other_nor_the_secret_nor_the_leaf() {
    let (sender, mut requests) = tokio::sync::mpsc::unbounded_channel();
    let client = api_server(move |ApiRequest { method, uri, .. }| {
        let hangs = uri.contains("validatingwebhookconfigurations");
        sender.send(format!("{method} {uri}")).unwrap();
        async move {
            if hangs {
                std::future::pending::<()>().await;
            }
            (200, json!({}))
        }
    });
    let (task, senders) = task(client);
    let resolver = task.resolver.clone();
    let running = tokio::spawn(task.run());
    let observed = |version: &str| Observed::Present(Arc::new(configuration(version, &[(service(), None)])));
    let cas = CaSet::new(ca_at(Timestamp::now(), &LIFETIMES));
    for sender in &senders.configurations {
        sender.send_replace(observed("1"));
    }
    senders.secret.send_replace(Observed::Present(Arc::new(secret("1", data(&cas)))));
    let mut next = async |part: &str| {
        let request = async {
            loop {
                let request = requests.recv().await.expect("a request");
                if request.contains(part) {
                    return request;
                }
            }
        };
        tokio::time::timeout(Duration::from_secs(5), request).await.expect("a request in time")
    };
    next("validatingwebhookconfigurations").await;
    // From here on, the write to the validating configuration hangs.
    senders.configurations[1].send_replace(observed("2"));
    next("mutatingwebhookconfigurations").await;
    senders.secret.send_replace(Observed::Absent);
    assert!(next("secrets").await.starts_with("POST"));
    let before = resolver.chain();
    assert!(before.is_some());
    let other_host = configuration("3", &[(json!({"url": "https://webhook.example"}), None)]);
    senders.configurations[1].send_replace(Observed::Present(Arc::new(other_host)));
    let renewed = async {
        while resolver.chain() == before {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(Duration::from_secs(5), renewed).await.expect("a new leaf in time");
    running.abort();
}
