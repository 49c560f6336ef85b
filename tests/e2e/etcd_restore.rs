//! etcd is restored from a backup under a running Lockstep: what the restore erased and what came after it is seen.

use controlplane::ControlPlane;
use serde_json::json;

use crate::harness::{
    Cluster, InstalledManifests, Lockstep, TAKEOVER, configmap, dedicated_control_plane, eventually, within,
};

/// `early` has a companion in the backup, `half` is in the backup without its companion, `erased` comes after it.
struct Restored {
    cluster: Cluster,
    home: String,
    replicas: Vec<Lockstep>,
    _installed: InstalledManifests,
}

impl Restored {
    /// Restores with these flags of etcdutl. A single replica runs without leader election. With `overtaken`, versions
    /// have passed those that the replicas have seen when these go on.
    async fn with(
        plane: &'static ControlPlane,
        test: &str,
        replicas: usize,
        flags: &[&str],
        overtaken: bool,
    ) -> Self {
        let cluster = Cluster::on(plane, test).await;
        let _installed = cluster.install(&["--webhook-url", &cluster.url()]);
        for kind in ["validating", "mutating"] {
            let name = format!("lockstep.{}", cluster.domain());
            cluster.admin().succeeds(&format!("delete {kind}webhookconfiguration {name}"));
        }
        let home = cluster.namespace("home").await;
        let election: &[&str] = match replicas {
            1 => &["--no-leader-elect"],
            _ => &["--lease-duration", "4s"],
        };
        let kubeconfig = plane.service_account("lockstep-system", "lockstep").expect("a kubeconfig");
        let start =
            || Lockstep::spawn(&cluster.domain(), &kubeconfig, &[&["--no-webhook"], election].concat());
        let mut replicas: Vec<Lockstep> = (0..replicas).map(|_| start()).collect();
        for replica in &mut replicas {
            replica.wait_ready().await;
        }
        let mirrored = async |name: &str| {
            cluster.wait_data(&home, &format!("{name}-synced"), json!({"sky": "blue"})).await;
        };
        cluster.source(&home, "early").create().await;
        mirrored("early").await;
        replicas.iter().for_each(Lockstep::pause);
        cluster.source(&home, "half").create().await;
        let backup = plane.back_up().expect("a backup");
        replicas.iter().for_each(Lockstep::resume);
        mirrored("half").await;
        cluster.source(&home, "erased").create().await;
        mirrored("erased").await;
        // The watches are ahead of the backup by more than what the restarted control plane writes by itself.
        write(&cluster, &home, 300).await;
        cluster.source(&home, "marker").create().await;
        mirrored("marker").await;
        if replicas.len() > 1 {
            // The Lease shows a restore to replicas that have seen it renewed since the backup, the standby, too.
            let renewed =
                async || cluster.get(&lease(&cluster)).await.expect("the Lease")["spec"]["renewTime"].clone();
            for _ in 0..2 {
                let before = renewed().await;
                eventually("the Lease is renewed", || async { (renewed().await != before).then_some(()) })
                    .await;
            }
        }

        if overtaken {
            replicas.iter().for_each(Lockstep::pause);
        }
        plane.restore(&backup, flags).expect("a restore");
        cluster.source(&home, "after").create().await;
        if overtaken {
            write(&cluster, &home, 600).await;
            replicas.iter().for_each(Lockstep::resume);
        }
        Self { cluster, home, replicas, _installed }
    }

    async fn assert_in_step(&self) {
        let Self { cluster, home, replicas, .. } = self;
        for source in ["after", "half", "early"] {
            cluster.wait_data(home, &format!("{source}-synced"), json!({"sky": "blue"})).await;
        }
        for replica in replicas {
            replica.wait_log("etcd was restored").await;
            let log = replica.log();
            log.lines()
                .filter(|line| line.contains("etcd was restored from"))
                .for_each(|sign| println!("{sign}"));
        }
        if replicas.len() > 1 {
            // The standby knows the same: it reconciles everything when it takes over.
            let leads = |replica: &&Lockstep| replica.metric("lockstep_leader") == 1.0;
            let leader = eventually("one replica leads", || async { replicas.iter().find(leads) }).await;
            leader.kill();
        }
        cluster.merge(&configmap(home, "after"), &json!({"data": {"sky": "red"}})).await;
        within(TAKEOVER, cluster.wait_data(home, "after-synced", json!({"sky": "red"}))).await;
        for erased in ["erased", "marker"] {
            assert_eq!(cluster.get(&configmap(home, &format!("{erased}-synced"))).await, None);
        }
        for replica in replicas {
            let log = replica.log();
            let after = log.lines().skip_while(|line| !line.contains("etcd was restored from"));
            let written = |line: &&str| line.contains("/erased-synced") || line.contains("/marker-synced");
            assert_eq!(
                after.filter(written).collect::<Vec<_>>(),
                [""; 0],
                "for sources that the restore erased"
            );
        }
    }
}

/// The path of the Lease.
fn lease(cluster: &Cluster) -> String {
    let name = format!("lockstep.{}", cluster.domain());
    format!("/apis/coordination.k8s.io/v1/namespaces/lockstep-system/leases/{name}")
}

/// Changes a ConfigMap that is neither source nor companion, so that versions run ahead.
async fn write(cluster: &Cluster, home: &str, changes: usize) {
    let path = configmap(home, "counter");
    if cluster.get(&path).await.is_none() {
        cluster
            .post(&format!("/api/v1/namespaces/{home}/configmaps"), &json!({"metadata": {"name": "counter"}}))
            .await;
    }
    for n in 0..changes {
        cluster.merge(&path, &json!({"data": {"n": n.to_string()}})).await;
    }
}

#[tokio::test]
async fn recent_backup_that_the_watches_are_ahead_of_is_noticed_without_leader_election() {
    let Some(plane) = dedicated_control_plane(&[]) else { return };
    Restored::with(plane, "recent", 1, &[], false).await.assert_in_step().await;
}

#[tokio::test]
async fn recent_backup_is_noticed_although_versions_have_overtaken_the_watches() {
    let Some(plane) = dedicated_control_plane(&[]) else { return };
    Restored::with(plane, "overtaken", 2, &[], true).await.assert_in_step().await;
}

#[tokio::test]
async fn backup_restored_with_bumped_revision_is_noticed() {
    let Some(plane) = dedicated_control_plane(&[]) else { return };
    let flags = ["--bump-revision", "1000000000", "--mark-compacted"];
    Restored::with(plane, "bumped", 2, &flags, false).await.assert_in_step().await;
}
