//! Sources in Git, with the engine by which Argo CD syncs, compares and prunes, builds its tree and judges health.

use controlplane::Binaries;
use serde_json::{Value, json};

use crate::{
    gitops::{Program, Repository, committed},
    harness::{Cluster, configmap, eventually},
};

/// Argo CD 3 recognises its objects by this annotation by default, earlier versions by this label. Here they have both.
const TRACKING_ID: &str = "argocd.argoproj.io/tracking-id";
const INSTANCE: &str = "app.kubernetes.io/instance";

#[tokio::test]
async fn argo_cd_syncs_and_prunes_sources_finds_no_difference_and_leaves_companions_alone() {
    let cluster = Cluster::new("argocd").await;
    let mut git = Repository::new(&cluster).await;
    // Beside `away`, in its own namespace: there, the companion has its source as owner.
    let targets = json!(format!(".,{}", git.away));
    git.manifests[0]["metadata"]["annotations"][cluster.key("target-namespaces")] = targets;
    let (_installed, _lockstep) = cluster.install_and_start(&[]).await;
    let program = Program::new(&cluster, Binaries::build_argocd(), "argocd");
    let argocd =
        |command: &str, manifests: &[Value]| program.does(&[command, &git.home, &git.away], manifests);

    assert_eq!(argocd("sync", &git.manifests), git.each("created"));
    let mut live = Vec::new();
    for path in &git.companions {
        live.push(eventually(&format!("{path} exists"), || async { cluster.get(path).await }).await);
    }
    cluster.wait(&git.home, "flags-synced", "a companion", |_| true).await;

    // Labels and annotations are copied, but not those by which Argo CD would take a companion for its own.
    let source = cluster.configmap(&git.home, "flags").await.expect("a source");
    assert!(source["metadata"]["annotations"][TRACKING_ID].is_string(), "{source}");
    assert_eq!(source["metadata"]["labels"][INSTANCE], "platform");
    let copied = &live[0]["metadata"];
    assert_eq!(copied["labels"]["team"], "platform");
    assert_eq!(copied["labels"].get(INSTANCE), None);
    assert_eq!(copied["annotations"]["example.com/owner"], "platform");
    assert_eq!(copied["annotations"].get(TRACKING_ID), None);

    // Nothing differs, although the webhook has written an annotation, whichever way Argo CD compares and applies.
    let proxy = cluster.configmap(&git.home, "proxy").await.expect("a source");
    assert!(proxy["metadata"]["annotations"][cluster.key("defaults")].is_string(), "{proxy}");
    let in_sync = |when: &str| {
        for diff in ["diff", "diff-structured", "diff-server-side"] {
            assert_eq!(argocd(diff, &git.manifests), git.each("Synced"), "{diff} {when}");
        }
    };
    in_sync("after the first sync");
    assert_eq!(argocd("sync", &git.manifests), git.each("unchanged"));
    in_sync("after another sync");
    assert_eq!(argocd("sync-server-side", &git.manifests), git.each("serverside-applied"));
    in_sync("after a sync with server-side apply");

    // Sources are healthy, and the tree has the companion that a source owns.
    let mut tree = git.each("Healthy").to_vec();
    tree.push("ConfigMap/home/flags-synced below flags".to_owned());
    tree.sort();
    assert_eq!(argocd("tree", &git.manifests), tree);

    // With a companion in Git, a sync fails.
    let manifests = [&git.manifests[..], &[committed(&live[0], "ConfigMap")]].concat();
    for sync in ["sync", "sync-server-side"] {
        let refused = program.try_to(&[sync, &git.home, &git.away], &manifests);
        let said = String::from_utf8_lossy(&refused.stderr).into_owned();
        assert!(!refused.status.success() && said.contains("is a companion, kept equal to"), "{said}");
    }

    // What has left Git is pruned, and its companions go with it; no sync has written or pruned another one.
    let [flags, proxy, token] = git.each("serverside-applied");
    let pruned = flags.replace("serverside-applied", "pruned");
    assert_eq!(argocd("sync-server-side", &git.manifests[1..]), [pruned, proxy, token]);
    cluster.wait_gone(&git.companions[0]).await;
    cluster.wait_collected(&configmap(&git.home, "flags-synced")).await;
    for (path, before) in git.companions.iter().zip(&live).skip(1) {
        let now = cluster.get(path).await.expect("a companion");
        assert_eq!(now["metadata"]["resourceVersion"], before["metadata"]["resourceVersion"], "{path}");
    }
}
