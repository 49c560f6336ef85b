//! `lockstep certs rotate`: asks the running replicas for a new CA, and watches the webhook configurations until none
//! trusts an old one.

use std::{
    collections::BTreeSet,
    time::{Duration, Instant},
};

use anyhow::{anyhow, bail};
use clap::Args;
use k8s_openapi::jiff::Timestamp;

use crate::{
    commands::{
        connection::Connection,
        flags,
        lease_handle::{LeaseHandle, POLL_INTERVAL},
    },
    inspect::instance::read_webhooks,
};
use lockstep_core::{
    certs::{issue::Certificate, rotation::is_plausible, webhooks::WebhookConfiguration},
    failure::Failure,
};

/// How long a new CA may take to show. The leader reads the Lease whenever it renews it, and other replicas more often.
const TAKE_UP_TIMEOUT: Duration = Duration::from_mins(1);

#[derive(Args)]
pub struct Rotate {
    #[command(flatten)]
    pub connection: Connection,

    /// How long to wait until the rotation is done; it continues without this command
    #[arg(long, default_value = "30m", value_parser = flags::duration)]
    pub timeout: Duration,
}

/// How far the rotation is, as the webhook configurations show it.
#[derive(Debug, Clone, Copy, PartialEq)]
enum RotationProgress {
    Asked,
    /// A new CA is trusted beside the old one.
    Published,
    /// No webhook trusts a CA that was trusted when we asked.
    Done,
}

impl RotationProgress {
    fn of(old: &BTreeSet<String>, trusted: &BTreeSet<String>) -> Self {
        if trusted.is_subset(old) {
            Self::Asked
        } else if trusted.is_disjoint(old) {
            Self::Done
        } else {
            Self::Published
        }
    }

    const fn as_str(self) -> &'static str {
        match self {
            Self::Asked => "the old CA alone is trusted",
            Self::Published => {
                "a new CA with a new key is published beside the old one; waiting until every API server trusts it, and \
                 every replica serves a certificate of it"
            }
            Self::Done => {
                "done: the old key is worthless, no webhook configuration trusts its CA (API servers may take another \
                 minute to see that)"
            }
        }
    }
}

pub async fn run(settings: &Rotate) -> anyhow::Result<()> {
    let lease = LeaseHandle::connect(&settings.connection).await?;
    let found = lease.read_with_patch().await?;
    let configurations = read(&lease).await.map_err(|failure| explain(&lease, &failure))?;
    if configurations.iter().any(WebhookConfiguration::is_injected_by_cert_manager) {
        bail!(
            "cert-manager issues the webhook's certificate, so Lockstep has no CA to replace: follow `Replace the CA's key \
             of cert-manager` in docs/operations.md"
        );
    }
    let old = trusted(&configurations);
    if old.is_empty() {
        bail!("no webhook trusts a CA, so there is none to replace: run lockstep check");
    }
    let asked = found.annotation(&lease.keys.rotate_ca).and_then(|text| text.parse().ok());
    let request = next_request(asked, Timestamp::now())?.to_string();
    lease.annotate(&lease.keys.rotate_ca, &request).await?;
    println!("asked for a new CA; the replicas see that within seconds");
    // Before it has begun, nothing tells a rotation that somebody else asked for from one that nobody takes up.
    let take_up_timeout = if old.len() > 1 {
        println!(
            "more than one CA is trusted: if another rotation is under way, this one begins when that one is done"
        );
        settings.timeout
    } else {
        TAKE_UP_TIMEOUT.min(settings.timeout)
    };
    let (start, mut last) = (Instant::now(), RotationProgress::Asked);
    while last != RotationProgress::Done {
        tokio::time::sleep(POLL_INTERVAL).await;
        // An API server that does not answer for a while ends nothing.
        let progress = read(&lease).await.map_or(last, |found| RotationProgress::of(&old, &trusted(&found)));
        if progress != last {
            println!("{}", progress.as_str());
            last = progress;
        }
        let waited = start.elapsed();
        if last == RotationProgress::Asked && waited > take_up_timeout {
            bail!(
                "no replica has taken the request up: check that one leads (kubectl -n {} get lease {}), and the clock of \
                 this machine. With --no-leader-elect, --no-controller or --no-webhook none reads it, and with --tls-cert \
                 none has a CA",
                settings.connection.lockstep_namespace,
                lease.keys.instance
            );
        }
        if last == RotationProgress::Published && waited > settings.timeout {
            bail!("the rotation is not done yet; it continues. See the log of the replicas");
        }
    }
    Ok(())
}

async fn read(lease: &LeaseHandle) -> Result<Vec<WebhookConfiguration>, Failure> {
    let found = read_webhooks(&lease.client, &lease.keys.instance).await.into_iter().map(|(_, found)| found);
    found.filter(|found| !matches!(found, Err(Failure::NotFound))).collect()
}

fn explain(lease: &LeaseHandle, failure: &Failure) -> anyhow::Error {
    let name = &lease.keys.instance;
    match failure {
        Failure::Forbidden(detail) => anyhow!(
            "no right to see which CA the webhook configurations {name} trust ({detail}): ask for the verb get on both"
        ),
        other => anyhow!("cannot get the webhook configurations {name}: {other}"),
    }
}

/// The SHA-256 of each CA that one of our webhooks trusts.
fn trusted(configurations: &[WebhookConfiguration]) -> BTreeSet<String> {
    let all = configurations.iter().flat_map(WebhookConfiguration::trusted);
    all.map(|certificate: Certificate| certificate.sha256()).collect()
}

/// A request that is later than the last one, even if a clock was ahead: replicas take up only later ones. One that
/// replicas would not take up does not count.
fn next_request(asked: Option<Timestamp>, now: Timestamp) -> anyhow::Result<Timestamp> {
    let now = Timestamp::from_second(now.as_second())?;
    let Some(last) = asked.filter(|at| is_plausible(*at, now)) else { return Ok(now) };
    Ok(now.max(last.checked_add(Duration::from_secs(1))?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rotation_is_done_when_no_webhook_trusts_a_ca_of_before() {
        let set = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
        let progress = |trusted: &[&str]| RotationProgress::of(&set(&["old", "next"]), &set(trusted));
        for trusted in [&["old", "next"][..], &["old"], &["next"], &[]] {
            assert_eq!(progress(trusted), RotationProgress::Asked, "{trusted:?}");
        }
        for trusted in [&["old", "new"][..], &["next", "new"]] {
            assert_eq!(progress(trusted), RotationProgress::Published, "{trusted:?}");
        }
        assert_eq!(progress(&["new"]), RotationProgress::Done);
    }

    #[test]
    fn request_is_later_than_the_last_one_whatever_the_clocks() {
        let at = |second: i64| Timestamp::from_second(1_800_000_000 + second).unwrap();
        let next = |asked| next_request(asked, at(0)).unwrap();
        assert_eq!(next(None), at(0));
        assert_eq!(next(Some(at(-60))), at(0));
        assert_eq!(next(Some(at(0))), at(1));
        assert_eq!(next(Some(at(60))), at(61));
        assert_eq!(next("9999-12-30T22:00:00Z".parse().ok()), at(0), "replicas would not take it up");
    }
}
