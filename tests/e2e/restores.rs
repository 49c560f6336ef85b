//! Companions that somebody restores from a backup.

use serde_json::{Value, json};

use crate::{
    client_ca::VerifiedCluster,
    harness::{Cluster, configmap, eventually, secret},
    kubectl_commands::{Subject, assert_refused},
};

const FORGED: &str = "carries the companion label or annotations of Lockstep; only Lockstep may set these";

/// Restores are tried while no controller runs: it would create the companions first.
const NO_CONTROLLER: &str = "--no-controller";

fn companions<'a>(cluster: &'a Cluster, away: &'a str) -> [Subject<'a>; 2] {
    [("configmap", "colors-synced"), ("secret", "token-synced")].map(|(kind, name)| Subject {
        cluster,
        kind,
        namespace: away,
        name: name.to_owned(),
    })
}

/// Changes the last character of a value, which is base64 in a Secret.
fn one_byte_differs(object: &mut Value) {
    let data = object["data"].as_object_mut().expect("data");
    let value = data.values_mut().next().expect("a value");
    let (last, rest) = value.as_str().and_then(|text| text.as_bytes().split_last()).expect("a text");
    assert_ne!(*last, b'1');
    *value = json!(format!("{}1", String::from_utf8_lossy(rest)));
}

#[tokio::test]
async fn companion_is_restored_by_users_who_may_read_the_source_and_by_nobody_else() {
    let Some(verified) = VerifiedCluster::new("restores", 202).await else { return };
    let cluster = &verified.cluster;
    let (installed, mut lockstep) = cluster.install_and_start(&verified.flags()).await;
    let (home, away, alice) = cluster.alice().await;
    let bob = cluster.editor("bob", &[], &[&away]).await;
    let make_sources = || async {
        cluster.source(&home, "colors").annotate("target-namespaces", &format!(".,{away}")).create().await;
        let token = cluster.source(&home, "token").secret("Opaque", json!({"token": "YmFzZTY0"}));
        token.annotate("target-namespaces", &away).create().await;
    };
    make_sources().await;
    let uids = || async {
        let path = [configmap(&away, "colors-synced"), secret(&away, "token-synced")];
        let mut uids = Vec::new();
        for path in path {
            let companion = eventually("the companion", || async { cluster.get(&path).await }).await;
            uids.push(companion["metadata"]["annotations"][cluster.key("source-uid")].clone());
        }
        uids
    };
    let first_uids = uids().await;
    let mut backups = Vec::new();
    for companion in companions(cluster, &away) {
        backups.push((companion.file(|_| {}).await, companion.file(one_byte_differs).await));
    }
    assert!(lockstep.stop().await.success());
    let flags = [&verified.flags()[..], &[NO_CONTROLLER]].concat();
    let mut webhook = cluster.start_webhook(&flags).await;

    // The sources are lost, too, and restored first: they have other UIDs.
    for line in [format!("delete cm colors -n {home}"), format!("delete secret token -n {home}")] {
        alice.succeeds(&line);
    }
    make_sources().await;
    for (companion, (backup, different)) in companions(cluster, &away).into_iter().zip(&backups) {
        let Subject { kind, name, .. } = &companion;
        alice.succeeds(&format!("delete {kind} {name} -n {away}"));
        let create = format!("create -f - -n {away}");
        let tried = format!("{create} --dry-run=server");
        // Bob may write here, but not read the source: the answer does not tell him whether his guess is right.
        for line in [&create, &tried] {
            for guess in [backup, different] {
                assert_refused(line, &bob.fails_with(line, guess), FORGED);
            }
            assert_refused(line, &alice.fails_with(line, different), FORGED);
        }
        alice.succeeds_with(&tried, backup);
        assert_eq!(cluster.get(&companion.path()).await, None);
        alice.succeeds_with(&create, backup);

        // It is there already: `kubectl apply` adds an annotation, Velero a label.
        let edited = "is a companion, kept equal to";
        let apply = format!("apply -f - -n {away}");
        let label = format!("label {kind} {name} -n {away} velero.io/restore-name=monday");
        for line in [format!("{apply} --dry-run=server"), apply] {
            assert_refused(&line, &bob.fails_with(&line, backup), edited);
            assert_refused(&line, &alice.fails_with(&line, different), edited);
            alice.succeeds_with(&line, backup);
        }
        assert_refused(&label, &bob.fails(&label), edited);
        alice.succeeds(&label);
        let line = format!("label {kind} {name} -n {away} team=mine");
        assert_refused(&line, &alice.fails(&line), edited);
    }
    assert_eq!(uids().await, first_uids, "no controller runs yet");

    // The controller keeps them, and only corrects the UIDs.
    let before: Vec<_> = companions(cluster, &away).iter().map(Subject::path).collect();
    assert!(webhook.stop().await.success());
    let mut lockstep = cluster.start_webhook(&verified.flags()).await;
    for path in &before {
        eventually("the UID of the source is corrected", || async {
            let companion = cluster.get(path).await?;
            let uid = &companion["metadata"]["annotations"][cluster.key("source-uid")];
            (!first_uids.contains(uid)).then_some(())
        })
        .await;
    }
    assert!(lockstep.stop().await.success());
    drop(installed);
}

#[tokio::test]
async fn companion_is_restored_by_nobody_where_reviews_come_without_a_client_certificate() {
    let cluster = Cluster::new("unverified").await;
    let (home, away, alice) = cluster.alice().await;
    let (_installed, mut lockstep) = cluster.install_and_start(&[]).await;
    cluster.make_sources(&home, &away, &[]).await;
    cluster.wait_companions(&home, &away).await;
    let [companion, _] = companions(&cluster, &away);
    let backup = companion.file(|_| {}).await;
    assert!(lockstep.stop().await.success());
    let _webhook = cluster.start_webhook(&[NO_CONTROLLER]).await;
    alice.succeeds(&format!("delete cm colors-synced -n {away}"));
    let line = format!("create -f - -n {away}");
    assert_refused(&line, &alice.fails_with(&line, &backup), FORGED);
}
