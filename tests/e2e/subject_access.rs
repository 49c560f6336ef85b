//! SubjectAccessReviews: for which user, how many, and what happens without an answer.

use std::time::Instant;

use serde_json::{Value, json};

use crate::{
    harness::{Cluster, Lockstep, eventually, output},
    kubectl_commands::assert_refused,
    users::{all_verbs, manifest},
};

/// The manifest of a source with targets.
fn source(cluster: &Cluster, name: &str, targets: &str) -> String {
    let metadata = json!({
        "name": name,
        "labels": {cluster.key("managed"): "true"},
        "annotations": {cluster.key("target-namespaces"): targets},
    });
    manifest("ConfigMap", &metadata, &json!({"data": {"sky": "blue"}}))
}

#[tokio::test]
async fn access_of_groups_service_accounts_and_impersonated_users_counts() {
    let cluster = Cluster::new("who").await;
    let (home, away) = (cluster.namespace("home").await, cluster.namespace("away").await);
    let painters = format!("painters-{}", cluster.id);
    let (_installed, _lockstep) = cluster.install_and_start(&[]).await;
    let line = format!("create -f - -n {home}");

    // A group has the rights.
    let member = cluster.user("member", &[&painters]);
    let group = json!({"kind": "Group", "name": painters});
    cluster.grant(&painters, &group, Some(&home), json!([all_verbs()])).await;
    let refused = format!("{} may not create configmaps a-synced in namespace {away}", member.name);
    assert_refused(&line, &member.fails_with(&line, &source(&cluster, "a", &away)), &refused);
    cluster.grant(&painters, &group, Some(&away), json!([all_verbs()])).await;
    eventually("the webhook knows, too", || async {
        output(&mut member.kubectl(&line), &source(&cluster, "a", &away)).status.success().then_some(())
    })
    .await;
    cluster.wait_data(&away, "a-synced", json!({"sky": "blue"})).await;

    // A ServiceAccount has them, by its name and by the group of its namespace.
    let robot = cluster.service_account(&home, "robot").await;
    let subject = json!({"kind": "ServiceAccount", "name": "robot", "namespace": home});
    cluster.grant("robot", &subject, Some(&home), json!([all_verbs()])).await;
    let refused = format!("{} may not create configmaps b-synced in namespace {away}", robot.name);
    assert_refused(&line, &robot.fails_with(&line, &source(&cluster, "b", &away)), &refused);
    let group = json!({"kind": "Group", "name": format!("system:serviceaccounts:{home}")});
    cluster.grant("robots", &group, Some(&away), json!([all_verbs()])).await;
    eventually("the webhook knows, too", || async {
        output(&mut robot.kubectl(&line), &source(&cluster, "b", &away)).status.success().then_some(())
    })
    .await;
    cluster.wait_data(&away, "b-synced", json!({"sky": "blue"})).await;

    // The impersonated user's rights count, not those of the impersonator.
    if cluster.plane.is_existing() {
        return controlplane::skip(
            "in part: in an existing cluster, the admin impersonates all users already",
        );
    }
    let alice = cluster.editor("alice", &[], &[&home, &away]).await;
    let bob = cluster.editor("bob", &[], &[&home]).await;
    let chief = cluster.cluster_editor("chief", &[]).await;
    let names = [&alice.name, &bob.name];
    let rule =
        json!({"apiGroups": [""], "resources": ["users"], "verbs": ["impersonate"], "resourceNames": names});
    cluster.grant(&format!("{}-acts", chief.name), &chief.subject(), None, json!([rule])).await;
    eventually("the chief may act for others", || async {
        let probe = format!("get cm -n {home} --as={}", bob.name);
        chief.kubectl(&probe).output().expect("kubectl").status.success().then_some(())
    })
    .await;
    let as_bob = format!("{line} --as={}", bob.name);
    let refused = format!("{} may not create configmaps c-synced in namespace {away}", bob.name);
    assert_refused(&as_bob, &chief.fails_with(&as_bob, &source(&cluster, "c", &away)), &refused);
    chief.succeeds_with(&format!("{line} --as={}", alice.name), &source(&cluster, "c", &away));
    cluster.wait_data(&away, "c-synced", json!({"sky": "blue"})).await;
    // Impersonation takes a right of its own.
    let complaint = bob.fails(&format!("label cm c -n {home} mood=good --as={}", alice.name));
    assert!(complaint.contains("cannot impersonate"), "{complaint}");
}

#[tokio::test]
async fn deputy_needs_accept_from_and_exempt_user_needs_nothing() {
    let cluster = Cluster::new("deputies").await;
    let (home, away) = (cluster.namespace("home").await, cluster.namespace("away").await);
    let accept = json!({cluster.key("accept-from"): home});
    let open = cluster.namespace_with("open", json!({}), accept).await;
    let group = format!("robots-{}", cluster.id);
    let (by_name, exempt) = (format!("manager-{}", cluster.id), format!("root-{}", cluster.id));
    let flags =
        ["--deputy-user", by_name.as_str(), "--deputy-group", &group, "--exempt-user", exempt.as_str()];
    let (_installed, lockstep) = cluster.install_and_start(&flags).await;
    let manager = cluster.cluster_editor("manager", &[]).await;
    let robot = cluster.cluster_editor("robot", &[&group]).await;
    let root = cluster.editor("root", &[], &[&home]).await;
    let line = format!("create -f - -n {home}");
    for deputy in [&manager, &robot] {
        let agree = |namespace: &str| {
            format!(
                "{} writes on behalf of others, so its own rights do not count. Namespace {namespace} has to agree: \
                 kubectl annotate namespace {namespace} {}={home}\n",
                deputy.name,
                cluster.key("accept-from")
            )
        };
        for (targets, text) in [
            (".", agree(&home)),
            (away.as_str(), agree(&away)),
            (&format!("{open},{away}"), agree(&away)),
            (&format!("{}-op*", cluster.id), "reaches namespaces that have not agreed".to_owned()),
            ("*", "reaches namespaces that have not agreed".to_owned()),
        ] {
            assert_refused(&line, &deputy.fails_with(&line, &source(&cluster, "x", targets)), &text);
        }
        deputy.succeeds_with(&line, &source(&cluster, "x", &open));
        cluster.wait_data(&open, "x-synced", json!({"sky": "blue"})).await;
        deputy.succeeds(&format!(r#"patch cm x -n {home} --type merge -p {{"data":{{"sky":"red"}}}}"#));
        cluster.wait_data(&open, "x-synced", json!({"sky": "red"})).await;
        deputy.succeeds(&format!("delete cm x -n {home}"));
        cluster.wait_gone(&crate::harness::configmap(&open, "x-synced")).await;
    }
    // A deputy neither changes nor deletes a source of others that has more targets.
    cluster.source(&home, "colors").annotate("target-namespaces", &away).create().await;
    for line in [
        format!(r#"patch cm colors -n {home} --type merge -p {{"data":{{"sky":"red"}}}}"#),
        format!("label cm colors -n {home} {}-", cluster.key("managed")),
        format!("delete cm colors -n {home}"),
    ] {
        assert_refused(&line, &manager.fails(&line), "its own rights do not count");
    }
    assert_eq!(lockstep.metric("lockstep_access_reviews_total{result=\"denied\"}"), 0.0, "no access reviews");

    // An exempt user has no rights in the other namespace, and needs none.
    root.succeeds_with(&line, &source(&cluster, "y", &away));
    cluster.wait_data(&away, "y-synced", json!({"sky": "blue"})).await;
}

fn reviews(lockstep: &Lockstep) -> f64 {
    ["allowed", "denied"]
        .iter()
        .map(|result| lockstep.metric(&format!("lockstep_access_reviews_total{{result=\"{result}\"}}")))
        .sum()
}

#[tokio::test]
async fn fifty_namespaces_take_few_access_reviews() {
    let cluster = Cluster::new("fifty").await;
    let home = cluster.namespace("home").await;
    let mut namespaces = vec![home.clone()];
    for n in 0..50 {
        namespaces.push(cluster.namespace(&format!("n{n}")).await);
    }
    let all: Vec<&str> = namespaces.iter().map(String::as_str).collect();
    let (_installed, lockstep) = cluster.install_and_start(&[]).await;
    let alice = cluster.editor("alice", &[], &all).await;
    let bob = cluster.editor("bob", &[], &[&home]).await;
    let ranger = cluster.cluster_editor("ranger", &[]).await;
    let line = format!("create -f - -n {home}");
    let targets = all[1..].join(",");
    // Users with rights in all namespaces, in each of them, and in none: at most three reviews for each
    // namespace and three for all, and after the first that is not allowed only those in flight.
    for (name, person, most) in [("a", &ranger, 3.0), ("b", &alice, 3.0 + 150.0), ("c", &bob, 3.0 + 6.0)] {
        eventually("an answer in time", || async {
            let before = reviews(&lockstep);
            let done = output(&mut person.kubectl(&line), &source(&cluster, name, &targets));
            let sent = reviews(&lockstep) - before;
            assert!(sent <= most, "{name}: {sent} access reviews");
            // On a busy machine the check may time out; a second try, as the message says, finds the earlier
            // answers in the cache.
            let complaint = String::from_utf8_lossy(&done.stderr).into_owned();
            let late = complaint.contains("your rights could not be checked");
            assert!(late || done.status.success() == (name != "c"), "{complaint}");
            (!late).then_some(())
        })
        .await;
    }
    for namespace in &all[1..] {
        for name in ["a-synced", "b-synced"] {
            cluster.wait_data(namespace, name, json!({"sky": "blue"})).await;
        }
        assert!(cluster.configmap(namespace, "c-synced").await.is_none());
    }
    // Answers are cached for a moment: the same request again takes fewer reviews.
    let (before, start) = (reviews(&lockstep), Instant::now());
    for sky in ["red", "green", "white"] {
        ranger.succeeds(&format!(r#"patch cm a -n {home} --type merge -p {{"data":{{"sky":"{sky}"}}}}"#));
    }
    let (sent, rounds) = (reviews(&lockstep) - before, 1.0 + (start.elapsed().as_secs_f64() / 3.0).floor());
    assert!(sent <= 3.0 * rounds, "{sent} access reviews in {:?}", start.elapsed());
}

#[tokio::test]
async fn revoked_right_counts_within_seconds() {
    let cluster = Cluster::new("withdrawn").await;
    let (home, away) = (cluster.namespace("home").await, cluster.namespace("away").await);
    let alice = cluster.editor("alice", &[], &[&home, &away]).await;
    let (_installed, _lockstep) = cluster.install_and_start(&[]).await;
    alice.succeeds_with(&format!("create -f - -n {home}"), &source(&cluster, "colors", &away));
    cluster.wait_data(&away, "colors-synced", json!({"sky": "blue"})).await;
    cluster.admin().succeeds(&format!("delete rolebinding {} -n {away}", alice.name));
    let line = format!(r#"patch cm colors -n {home} --type merge -p {{"data":{{"sky":"red"}}}}"#);
    let refused = format!("{} may not create configmaps colors-synced in namespace {away}", alice.name);
    let start = Instant::now();
    eventually("it is noticed", || async {
        let output = alice.kubectl(&format!("{line} --dry-run=server")).output().expect("kubectl");
        String::from_utf8_lossy(&output.stderr).contains(&refused).then_some(())
    })
    .await;
    assert!(start.elapsed().as_secs() < 10, "{:?}", start.elapsed());
    for line in [line, format!("delete cm colors -n {home}")] {
        assert!(alice.fails(&line).contains("may not"), "{line}");
    }
    let companion = cluster.configmap(&away, "colors-synced").await.unwrap();
    assert_eq!(companion["data"], json!({"sky": "blue"}));
}

#[tokio::test]
async fn source_is_refused_when_access_cannot_be_checked() {
    let cluster = Cluster::new("unanswered").await;
    let home = cluster.namespace("home").await;
    // This Lockstep has its own identity, so that the other tests keep their rights.
    let own = cluster.ns("system");
    let url = format!("https://{}", cluster.address);
    let _installed = cluster.install(&["--webhook-url", &url, "--namespace", &own, "--create-namespace"]);
    let kubeconfig = cluster.plane.service_account(&own, "lockstep").expect("a kubeconfig");
    let flags = ["--webhook-bind", &cluster.address, "--namespace", &own];
    let mut lockstep = Lockstep::spawn(&cluster.domain(), &kubeconfig, &flags);
    lockstep.wait_ready().await;
    let alice = cluster.editor("alice", &[], &[&home]).await;
    alice.succeeds_with(&format!("create -f - -n {home}"), &source(&cluster, "a", "."));
    cluster.wait_data(&home, "a-synced", json!({"sky": "blue"})).await;

    let role = format!("/apis/rbac.authorization.k8s.io/v1/clusterroles/lockstep.{}", cluster.domain());
    let mut rules = cluster.get(&role).await.expect("the role")["rules"].clone();
    let kept = |rule: &Value| rule["apiGroups"] != json!(["authorization.k8s.io"]);
    rules.as_array_mut().expect("rules").retain(kept);
    cluster.merge(&role, &json!({"rules": rules})).await;

    let line = format!("create -f - -n {home}");
    let text = "your rights could not be checked";
    let patch = format!(r#"patch cm a -n {home} --type merge -p {{"data":{{"sky":"red"}}}}"#);
    eventually("access cannot be checked, and the cache has expired", || async {
        let output = alice.kubectl(&format!("{patch} --dry-run=server")).output().expect("kubectl");
        String::from_utf8_lossy(&output.stderr).contains(text).then_some(())
    })
    .await;
    let complaint = alice.fails_with(&line, &source(&cluster, "b", "."));
    assert_refused(&line, &complaint, text);
    assert!(complaint.contains("so nothing was changed: try again"), "{complaint}");
    for line in
        [patch, format!("label cm a -n {home} {}-", cluster.key("managed")), format!("delete cm a -n {home}")]
    {
        assert_refused(&line, &alice.fails(&line), text);
    }
    // A change that does not affect companions needs no access review.
    alice.succeeds(&format!("label cm a -n {home} mood=good"));
    assert!(cluster.configmap(&home, "b").await.is_none());
    assert!(lockstep.metric("lockstep_denials_total{reason=\"unanswered\"}") >= 4.0);
    cluster.delete(&format!("/api/v1/namespaces/{own}")).await;
}
