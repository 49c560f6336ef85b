//! A rollout of the Deployment under load: no request fails.

use crate::{
    harness::{CONTROLLERS, eventually, within},
    installation::{Installation, Pod},
    report,
    traffic::Traffic,
};

pub(crate) async fn restart(installation: &Installation) {
    let before: Vec<Pod> = installation.pods().await;
    let traffic = Traffic::start(installation, "rollout").await;
    installation.kubectl("rollout restart deployment/lockstep -n lockstep-system");
    installation.kubectl("rollout status deployment/lockstep -n lockstep-system --timeout=2m");
    for pod in &before {
        let what = format!("{} is gone", pod.name);
        let gone = eventually(&what, || async { (!installation.exists(pod).await).then_some(()) });
        within(CONTROLLERS, gone).await;
    }
    let [edits, changes] = traffic.stop(installation).await;
    report(&format!(
        "rollout restart: {} edits refused, {} changes mirrored, {} and {} failures",
        edits.requests,
        changes.requests,
        edits.failures.len(),
        changes.failures.len()
    ));
    assert!(edits.failures.is_empty() && changes.failures.is_empty(), "{edits:#?} {changes:#?}");
    assert!(edits.requests > 50 && changes.requests > 50, "too little traffic: {edits:?} {changes:?}");
}
