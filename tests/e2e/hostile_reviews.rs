//! Reviews that no API server sends, posted straight to the webhook's port: they cost little memory, and the writes of
//! users succeed meanwhile.

use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::{
    harness::{Cluster, configmap},
    peer::review_of,
};

/// What all hostile reviews together may add to the memory of a replica: the budgets for bodies and for parsing, and
/// what the allocator keeps.
const MAX_GROWTH_BYTES: u64 = 160 << 20;

fn source(cluster: &Cluster, home: &str, annotations: Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "ConfigMap",
        "metadata": {"name": "hostile", "namespace": home, "labels": {cluster.key("managed"): "true"},
            "annotations": annotations},
    })
}

/// Reviews of many megabytes, in shapes that take much more memory once parsed.
pub(crate) fn hostile(cluster: &Cluster, home: &str) -> Vec<(&'static str, String)> {
    const MEGABYTE: usize = 1 << 20;
    let plain = source(cluster, home, json!({}));
    let create = |object: &Value| review_of("CREATE", home, "mallory", &Value::Null, object).to_string();
    let annotated = |value: String| create(&source(cluster, home, json!({cluster.key("keys"): value})));
    let with = |field: &str, value: &str| {
        create(&plain).replacen("\"annotations\":{}", &format!("\"annotations\":{{}},{field}:{value}"), 1)
    };
    let keys = |many: usize| {
        let entries: Vec<String> = (0..many).map(|number| format!("\"{number:x}\":\"\"")).collect();
        format!("{{{}}}", entries.join(","))
    };
    let twice = |object: &str| {
        let review = review_of("UPDATE", home, "mallory", &json!("OLD"), &json!("NEW")).to_string();
        review.replacen("\"OLD\"", object, 1).replacen("\"NEW\"", object, 1)
    };
    let with_data = |many| {
        let data = format!("\"data\":{},\"metadata\":", keys(many));
        plain.to_string().replacen("\"metadata\":", &data, 1)
    };
    vec![
        ("commas in an annotation", annotated(",".repeat(8 * MEGABYTE))),
        ("items in an annotation", annotated((0..MEGABYTE).map(|item| format!("{item:x},")).collect())),
        ("escapes in an annotation", annotated("\u{1}".repeat(2 * MEGABYTE))),
        (
            "owner references",
            with("\"ownerReferences\"", &format!("[{}]", vec!["{}"; 3 * MEGABYTE].join(","))),
        ),
        ("managed fields", with("\"managedFields\"", &format!("[{}]", vec!["{}"; 3 * MEGABYTE].join(",")))),
        ("finalizers", with("\"finalizers\"", &format!("[{}]", vec!["\"\""; 2 * MEGABYTE].join(",")))),
        ("labels", with("\"labels\"", &keys(MEGABYTE)).replacen("\"labels\":", "\"labelz\":", 1)),
        ("data in both objects", twice(&with_data(800_000))),
        ("data in both objects, as much as is parsed", twice(&with_data(180_000))),
        ("nesting", with("\"finalizers\"", &"[".repeat(8 * MEGABYTE))),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_reviews_take_little_memory_and_delay_no_user() {
    let cluster = Cluster::new("hostile").await;
    let (home, _, alice) = cluster.alice().await;
    let (_installed, lockstep) = cluster.install_and_start(&[]).await;
    cluster.source(&home, "colors").create().await;
    let peer = std::sync::Arc::new(cluster.peer().await);
    let before = lockstep.peak_memory();

    for (what, body) in hostile(&cluster, &home) {
        let (size, start) = (body.len(), Instant::now());
        let (floods, body): (Vec<_>, _) = ((0..4).collect(), std::sync::Arc::new(body));
        let floods: Vec<_> = floods
            .into_iter()
            .map(|_: i32| {
                let (peer, body) = (peer.clone(), body.clone());
                tokio::spawn(async move { peer.review(&body).await.map(|(status, _)| status) })
            })
            .collect();
        // A user's write, reviewed by the same webhook.
        alice.succeeds(&format!(
            "annotate --overwrite configmap colors -n {home} example.com/turn={}",
            start.elapsed().as_nanos()
        ));
        for flood in floods {
            let status = flood.await.unwrap();
            assert!(!matches!(status, Ok(200)) || what.ends_with("is parsed"), "{what}: {status:?}");
        }
        let grown = lockstep.peak_memory() - before;
        println!("{what}, {} MiB four times: {} MiB more, {:?}", size >> 20, grown >> 20, start.elapsed());
        assert!(grown < MAX_GROWTH_BYTES, "{what}: {} MiB", grown >> 20);
        assert!(start.elapsed() < Duration::from_secs(20), "{what}: {:?}", start.elapsed());
    }
    assert!(cluster.get(&configmap(&home, "colors")).await.is_some());
}
