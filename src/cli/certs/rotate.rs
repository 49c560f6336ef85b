//! `lockstep certs rotate`: asks the running replicas for a new CA, and shows how far they are.

use std::time::{Duration, Instant};

use anyhow::{Context, anyhow, bail};
use clap::Args;
use k8s_openapi::{api::coordination::v1::Lease, jiff::Timestamp};
use kube::{
    Api,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};

use crate::{
    certs::request::{Phase, Progress},
    client::{self, Failure, with_timeout},
    config,
    keys::Keys,
    ops::metrics::Metrics,
};

const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// How long the leader may take to see the request. It reads the Lease whenever it renews it.
const TAKE_UP_TIMEOUT: Duration = Duration::from_mins(1);

#[derive(Debug, Clone, Args)]
pub struct Rotate {
    /// Prefix of all labels and annotations
    #[arg(long, env = "LOCKSTEP_DOMAIN", default_value = config::DOMAIN, value_parser = config::domain)]
    pub domain: String,

    /// Lockstep's own namespace
    #[arg(long, env = "LOCKSTEP_NAMESPACE", default_value = config::NAMESPACE, value_parser = config::namespace)]
    pub namespace: String,

    /// How long to wait until the rotation is done; it continues without this command
    #[arg(long, default_value = "30m", value_parser = config::duration)]
    pub timeout: Duration,
}

pub async fn run(settings: &Rotate) -> anyhow::Result<()> {
    let client = client::build(client::config().await?, &Metrics::new())?;
    let lease = LeaseHandle {
        api: Api::namespaced(client, &settings.namespace),
        keys: Keys::new(&settings.domain, config::SUFFIX),
        namespace: &settings.namespace,
    };
    let request = lease.ask(Timestamp::now()).await?;
    println!("asked for a new CA; the leader sees that within seconds");
    let (start, mut last) = (Instant::now(), None);
    loop {
        let phase = lease.phase(request).await;
        if phase.is_some() && phase != last {
            if let Some(Phase::Unsupported) = phase {
                bail!(
                    "Lockstep serves a certificate from files, so it has no CA to replace: replace the files, or with \
                     cert-manager delete the Secrets lockstep-ca and lockstep-tls"
                );
            }
            println!("{}", phase.map_or("", describe));
            last = phase;
        }
        if last == Some(Phase::Done) {
            return Ok(());
        }
        let waited = start.elapsed();
        if last.is_none() && waited > TAKE_UP_TIMEOUT.min(settings.timeout) {
            bail!(
                "no replica has taken the request up: check that one leads (kubectl -n {} get lease {}). With \
                 --no-leader-elect, --no-controller or --no-webhook none reads it",
                settings.namespace,
                lease.keys.instance
            );
        }
        if waited > settings.timeout {
            bail!(
                "the rotation is not done yet; it continues. Its progress is in the annotation {}",
                lease.keys.ca_rotation
            );
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

const fn describe(phase: Phase) -> &'static str {
    match phase {
        Phase::Publishing => "a new CA with a new key is published beside the old one",
        Phase::Spreading => "it is published; waiting until every API server trusts it",
        Phase::Replacing => "the new CA signs; waiting until every replica serves a certificate of it",
        Phase::Removing => "the old CA is removed from the webhook configurations",
        Phase::Done => {
            "done: the old key is worthless, no webhook configuration trusts its CA (API servers may take \
             another minute to see that)"
        }
        Phase::Unsupported => "not supported",
    }
}

struct LeaseHandle<'a> {
    api: Api<Lease>,
    keys: Keys,
    namespace: &'a str,
}

impl LeaseHandle<'_> {
    /// Writes the request, and returns it.
    async fn ask(&self, now: Timestamp) -> anyhow::Result<Timestamp> {
        let lease = self.patch(&json!({})).await.map_err(|failure| self.explain(&failure))?;
        let request = next_request(annotation(&lease, &self.keys.rotate_ca), now)?;
        let patch = json!({"metadata": {"annotations": {&self.keys.rotate_ca: request.to_string()}}});
        self.patch(&patch).await.map_err(|failure| self.explain(&failure))?;
        Ok(request)
    }

    /// How far the rotation is; none if no replica has taken it up, or the API server does not answer.
    async fn phase(&self, request: Timestamp) -> Option<Phase> {
        let lease = self.patch(&json!({})).await.ok()?;
        let asked = annotation(&lease, &self.keys.rotate_ca)?;
        phase(asked, annotation(&lease, &self.keys.ca_rotation)?, request)
    }

    /// Reads the Lease with an empty patch: the right to patch it is enough for everything.
    async fn patch(&self, patch: &Value) -> Result<Lease, Failure> {
        let (name, params) = (&self.keys.instance, PatchParams::default());
        with_timeout(REQUEST_TIMEOUT, self.api.patch(name, &params, &Patch::Merge(patch))).await
    }

    fn explain(&self, failure: &Failure) -> anyhow::Error {
        let (namespace, name) = (self.namespace, &self.keys.instance);
        match failure {
            Failure::NotFound => anyhow!(
                "there is no Lease {namespace}/{name}: check --namespace and --domain, and that Lockstep runs with \
                 leader election"
            ),
            Failure::Forbidden(detail) => {
                anyhow!(
                    "the Lease {namespace}/{name} cannot be patched ({detail}): ask for the verb patch on it"
                )
            }
            other => anyhow!("the Lease {namespace}/{name} cannot be patched: {other}"),
        }
    }
}

fn annotation<'a>(lease: &'a Lease, key: &str) -> Option<&'a str> {
    lease.metadata.annotations.as_ref()?.get(key).map(String::as_str)
}

/// How far our request is, given the annotations of the Lease. If somebody asks after us, their rotation replaces
/// all that ours would have. Progress of any other request, one from before the Lease was deleted for example, says
/// nothing.
fn phase(asked: &str, progress: &str, request: Timestamp) -> Option<Phase> {
    let asked: Timestamp = asked.parse().ok()?;
    let progress: Progress = progress.parse().ok()?;
    (asked >= request && progress.request == asked).then_some(progress.phase)
}

/// A request that is later than the last one, whatever the clocks: replicas take up only later ones.
fn next_request(last: Option<&str>, now: Timestamp) -> anyhow::Result<Timestamp> {
    let now = Timestamp::from_second(now.as_second())?;
    let Some(last) = last.and_then(|text| text.parse::<Timestamp>().ok()) else { return Ok(now) };
    let after = last
        .checked_add(Duration::from_secs(1))
        .context("remove the annotation rotate-ca of the Lease: it is too late")?;
    Ok(now.max(after))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_progress_of_this_request_or_of_a_later_one_counts() {
        let at = |second: i64| Timestamp::from_second(1_800_000_000 + second).unwrap();
        let check = |asked: i64, progress: i64| {
            let progress = Progress { request: at(progress), phase: Phase::Done }.to_string();
            phase(&at(asked).to_string(), &progress, at(0))
        };
        assert_eq!(check(0, 0), Some(Phase::Done));
        assert_eq!(check(60, 60), Some(Phase::Done), "somebody asked after us");
        assert_eq!(check(0, -60), None, "not taken up yet");
        assert_eq!(check(60, 0), None, "another rotation begins");
        assert_eq!(check(0, 60), None, "an earlier request by a clock that was ahead");
        assert_eq!(check(-60, -60), None);
    }

    #[test]
    fn request_is_later_than_the_last_one_whatever_the_clocks() {
        let at = |second: i64| Timestamp::from_second(1_800_000_000 + second).unwrap();
        assert_eq!(next_request(None, at(0)).unwrap(), at(0));
        assert_eq!(next_request(Some("nonsense"), at(0)).unwrap(), at(0));
        assert_eq!(next_request(Some(&at(-60).to_string()), at(0)).unwrap(), at(0));
        assert_eq!(next_request(Some(&at(0).to_string()), at(0)).unwrap(), at(1));
        assert_eq!(next_request(Some(&at(3600).to_string()), at(0)).unwrap(), at(3601));
        assert!(next_request(Some(&Timestamp::MAX.to_string()), at(0)).is_err());
    }
}
