//! An update of the Deployment, which nobody notices.

use crate::{
    harness::eventually,
    installation::{Installation, Pod},
    say,
    traffic::Traffic,
};

pub async fn restart(installed: &Installation) {
    let before: Vec<Pod> = installed.pods().await;
    let stream = Traffic::start(installed, "rollout").await;
    installed.kubectl("rollout restart deployment/lockstep -n lockstep-system");
    installed.kubectl("rollout status deployment/lockstep -n lockstep-system --timeout=2m");
    for pod in &before {
        eventually(&format!("{} is gone", pod.name), || async {
            (!installed.exists(pod).await).then_some(())
        })
        .await;
    }
    let [edits, changes] = stream.end(installed).await;
    say(&format!(
        "rollout restart: {} edits refused, {} changes arrived, {} and {} failures",
        edits.requests,
        changes.requests,
        edits.failures.len(),
        changes.failures.len()
    ));
    assert!(edits.failures.is_empty() && changes.failures.is_empty(), "{edits:#?} {changes:#?}");
    assert!(edits.requests > 50 && changes.requests > 50, "hardly a stream: {edits:?} {changes:?}");
}
