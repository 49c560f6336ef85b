//! Which namespaces a source reaches: patterns, exclusions, consent.

use serde_json::json;

use crate::{
    harness::{Cluster, configmap, secret},
    users::manifest,
};

/// A source in `home` with these annotations, as a manifest.
fn source(cluster: &Cluster, kind: &str, home: &str, name: &str, annotations: &[(&str, &str)]) -> String {
    let annotations: serde_json::Map<_, _> =
        annotations.iter().map(|(key, value)| (cluster.key(key), json!(value))).collect();
    let metadata = json!({
        "name": name, "namespace": home, "labels": {cluster.key("managed"): "true"}, "annotations": annotations,
    });
    manifest(kind, &metadata, &json!({"data": {"sky": "Ymx1ZQ=="}}))
}

#[tokio::test]
async fn patterns_match_anywhere_and_exclusions_win_whatever_their_order() {
    let cluster = Cluster::new("globs").await;
    let (_installed, _lockstep) = cluster.install_and_start(&[]).await;
    let home = cluster.namespace("home").await;
    let [a_prod, b_prod, a_qa] = ["team-a-prod", "team-b-prod", "team-a-qa"].map(|name| cluster.ns(name));
    for name in ["team-a-prod", "team-b-prod", "team-a-qa"] {
        cluster.namespace_with(name, json!({"test": cluster.id}), json!({})).await;
    }
    let chief = cluster.cluster_editor("chief", &[]).await;
    let id = &cluster.id;
    chief.succeeds_with("create -f -", &source(&cluster, "ConfigMap", &home, "colors", &[]));
    let annotate = |key: &str, value: &str| {
        chief.succeeds(&format!("annotate --overwrite cm colors -n {home} {}={value}", cluster.key(key)))
    };
    let reaches = |expected: Vec<&String>| {
        let (cluster, all) = (&cluster, [&home, &a_prod, &b_prod, &a_qa]);
        let expected: Vec<String> = expected.into_iter().cloned().collect();
        async move {
            for namespace in all {
                if expected.contains(namespace) {
                    cluster.wait_data(namespace, "colors-synced", json!({"sky": "Ymx1ZQ=="})).await;
                } else {
                    cluster.wait_gone(&configmap(namespace, "colors-synced")).await;
                }
            }
        }
    };
    reaches(vec![&home]).await;
    annotate("target-namespaces", &format!("{id}-team-*-prod"));
    reaches(vec![&a_prod, &b_prod]).await;
    annotate("target-namespaces", &format!("!{b_prod},{id}-*-qa,{id}-*-prod"));
    reaches(vec![&a_prod, &a_qa]).await;
    annotate("target-namespaces", &format!("{id}-*,!.,!{id}-*-qa"));
    reaches(vec![&a_prod, &b_prod]).await;
    // An exclusion narrows a selector, too.
    annotate("target-selector", &format!("test={id}"));
    annotate("target-namespaces", &format!("!{id}-team-a-*"));
    reaches(vec![&b_prod]).await;
    // The selector alone can exclude names.
    chief.succeeds(&format!("annotate cm colors -n {home} {}-", cluster.key("target-namespaces")));
    let line = format!("annotate --overwrite cm colors -n {home}");
    let selector =
        format!("{}=test={id},kubernetes.io/metadata.name notin ({b_prod})", cluster.key("target-selector"));
    let mut command = chief.kubectl(&line);
    assert!(command.arg(selector).status().expect("kubectl").success());
    reaches(vec![&a_prod, &a_qa]).await;
}

#[tokio::test]
async fn source_that_requires_consent_reaches_exactly_the_namespaces_that_accept() {
    let cluster = Cluster::new("consent").await;
    let (_installed, _lockstep) = cluster.install_and_start(&[]).await;
    let home = cluster.namespace("home").await;
    let (open, shut) = (cluster.namespace("open").await, cluster.namespace("shut").await);
    let accept = json!({cluster.key("accept-from"): format!("*,!{}", cluster.ns("other"))});
    let wide = cluster.namespace_with("wide", json!({}), accept).await;
    let bob = cluster.editor("bob", &[], &[&home]).await;
    let (admin, pattern) = (cluster.admin(), format!("{}-*", cluster.id));
    let targets = ("target-namespaces", pattern.as_str());

    // Bob may write only in `home`: the denial names the way out, for a source that exists as a command.
    let refused = bob.fails_with("create -f -", &source(&cluster, "ConfigMap", &home, "cert", &[targets]));
    let hint = format!("names {home}: add the annotation {}=required", cluster.key("consent"));
    assert!(refused.contains(&hint), "{refused}");
    bob.succeeds_with("create -f -", &source(&cluster, "ConfigMap", &home, "cert", &[]));
    let line = format!("annotate cm cert -n {home} {}={pattern}", cluster.key("target-namespaces"));
    let refused = bob.fails(&line);
    let command = refused.rsplit(": ").next().expect("a command").trim();
    assert_eq!(
        command,
        format!("kubectl annotate configmap cert -n {home} {}=required", cluster.key("consent"))
    );
    assert!(bob.shell(command).status.success());
    bob.succeeds(&line);
    cluster.wait_data(&wide, "cert-synced", json!({"sky": "Ymx1ZQ=="})).await;

    // A namespace agrees, and withdraws its consent.
    admin.succeeds(&format!("annotate namespace {open} {}={home}", cluster.key("accept-from")));
    cluster.wait_data(&open, "cert-synced", json!({"sky": "Ymx1ZQ=="})).await;
    admin.succeeds(&format!("annotate namespace {open} {}-", cluster.key("accept-from")));
    cluster.wait_gone(&configmap(&open, "cert-synced")).await;
    for namespace in [&shut, &home] {
        assert!(cluster.configmap(namespace, "cert-synced").await.is_none(), "{namespace} has not agreed");
    }

    // Changes and deletes need no right in the namespaces that agreed.
    bob.succeeds(&format!(r#"patch cm cert -n {home} --type merge -p {{"data":{{"sky":"red"}}}}"#));
    cluster.wait_data(&wide, "cert-synced", json!({"sky": "red"})).await;
    let complaint = bob.fails(&format!("annotate cm cert -n {home} {}-", cluster.key("consent")));
    assert!(complaint.contains("in all namespaces, which a pattern or a selector needs"), "{complaint}");
    bob.succeeds(&format!("delete cm cert -n {home}"));
    cluster.wait_gone(&configmap(&wide, "cert-synced")).await;

    // A namespace that is listed by name has to agree, too; the author is told how.
    let annotations = [("target-namespaces", shut.as_str()), ("consent", "required")];
    let mut create = bob.kubectl("create -f -");
    let output =
        crate::harness::output(&mut create, &source(&cluster, "ConfigMap", &home, "one", &annotations));
    let warned = String::from_utf8_lossy(&output.stderr).into_owned();
    let command = format!("kubectl annotate namespace {shut} {}={home}", cluster.key("accept-from"));
    assert!(output.status.success() && warned.contains(&command), "{warned}");
    assert!(cluster.wait_event(&home, "one", "NotAccepted").await.contains(&command));
    assert!(admin.shell(&command).status.success());
    cluster.wait_data(&shut, "one-synced", json!({"sky": "Ymx1ZQ=="})).await;
}

#[tokio::test]
async fn deputy_mirrors_a_certificate_into_every_namespace_that_accepts() {
    let cluster = Cluster::new("wildcard").await;
    let manager = format!("manager-{}", cluster.id);
    let (_installed, _lockstep) = cluster.install_and_start(&["--deputy-user", &manager]).await;
    let home = cluster.namespace("certs").await;
    let accept = json!({cluster.key("accept-from"): home});
    let mut open = Vec::new();
    for n in 0..3 {
        open.push(cluster.namespace_with(&format!("team-{n}"), json!({}), accept.clone()).await);
    }
    let shut = cluster.namespace("team-shut").await;
    let deputy = cluster.cluster_editor("manager", &[]).await;
    let pattern = format!("{}-team-*", cluster.id);
    let targets = ("target-namespaces", pattern.as_str());
    let refused = deputy.fails_with("create -f -", &source(&cluster, "Secret", &home, "tls", &[targets]));
    assert!(
        refused.contains(&format!("add the annotation {}=required", cluster.key("consent"))),
        "{refused}"
    );
    let consent = ("consent", "required");
    deputy.succeeds_with("create -f -", &source(&cluster, "Secret", &home, "tls", &[targets, consent]));
    for namespace in &open {
        crate::harness::eventually(&format!("a Secret in {namespace}"), || async {
            cluster.get(&secret(namespace, "tls-synced")).await
        })
        .await;
    }
    // The Event is written after all writes of the reconcile.
    let note = cluster.wait_event(&home, "tls", "Mirrored").await;
    assert!(note.starts_with("created 3: "), "{note}");
    assert!(cluster.get(&secret(&shut, "tls-synced")).await.is_none());
    deputy.succeeds(&format!("delete secret tls -n {home}"));
    for namespace in &open {
        cluster.wait_gone(&secret(namespace, "tls-synced")).await;
    }
}
