//! The walk-through of the README, with the webhook behind its Service.

use serde_json::json;

use crate::{
    harness::{configmap, eventually, secret},
    installation::Installation,
    report,
};

pub(crate) async fn run(installation: &Installation) {
    let cluster = &installation.cluster;
    let (shop, team) = (cluster.namespace("shop").await, cluster.namespace("team").await);
    let refused = |line: &str| {
        let output = installation.plane.kubectl().args(line.split_whitespace()).output().expect("kubectl");
        assert!(!output.status.success(), "{line} succeeded");
        String::from_utf8_lossy(&output.stderr).into_owned()
    };

    installation.kubectl(&format!("create configmap colors --from-literal=sky=blue -n {shop}"));
    installation.kubectl(&format!("label configmap colors workshop.io/managed=true -n {shop}"));
    let first = cluster.wait_data(&shop, "colors-synced", json!({"sky": "blue"})).await;

    let edit = refused(&format!("label configmap colors-synced team=us -n {shop}"));
    let message = format!(
        "admission webhook \"companions.lockstep.workshop.io\" denied the request: configmap {shop}/colors-synced is \
         a companion, kept equal to {shop}/colors by Lockstep. Change the source instead: kubectl edit configmap \
         colors -n {shop}"
    );
    assert!(edit.contains(&message), "{edit}");

    let output = installation
        .plane
        .kubectl()
        .args(["delete", "configmap", "colors-synced", "-n", &shop, "--wait=false"])
        .output()
        .expect("kubectl");
    let warning = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success() && warning.contains("Lockstep creates it again"), "{warning}");
    let uid = &first["metadata"]["uid"];
    cluster.wait(&shop, "colors-synced", "healed", |now| now["metadata"]["uid"] != *uid).await;

    // A Secret, into another namespace.
    installation.kubectl(&format!("create secret generic pass --from-literal=word=open -n {shop}"));
    installation.kubectl(&format!("annotate secret pass workshop.io/target-namespaces={team} -n {shop}"));
    installation.kubectl(&format!("label secret pass workshop.io/managed=true -n {shop}"));
    eventually("a companion of the Secret", || async { cluster.get(&secret(&team, "pass-synced")).await })
        .await;
    let edit = refused(&format!("label secret pass-synced team=us -n {team}"));
    assert!(edit.contains("denied the request") && edit.contains(&format!("{shop}/pass")), "{edit}");

    installation.kubectl(&format!("delete configmap/colors secret/pass -n {shop}"));
    cluster.wait_collected(&configmap(&shop, "colors-synced")).await;
    cluster.wait_gone(&secret(&team, "pass-synced")).await;
    report("mirrored, refused through the Service, healed and cleaned up");
}
