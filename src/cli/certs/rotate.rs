//! `lockstep certs rotate`: asks the running replicas for a new CA, and shows how far they are.

use std::time::{Duration, Instant};

use anyhow::bail;
use clap::Args;
use k8s_openapi::jiff::Timestamp;

use crate::{
    certs::request::{Phase, Progress, is_plausible},
    cli::{
        connection::Connection,
        lease::{LeaseHandle, POLL_INTERVAL, annotation},
    },
    config,
};

/// How long the leader may take to see the request. It reads the Lease whenever it renews it.
const TAKE_UP_TIMEOUT: Duration = Duration::from_mins(1);

#[derive(Debug, Clone, Args)]
pub struct Rotate {
    #[command(flatten)]
    pub connection: Connection,

    /// How long to wait until the rotation is done; it continues without this command
    #[arg(long, default_value = "30m", value_parser = config::duration)]
    pub timeout: Duration,
}

pub async fn run(settings: &Rotate) -> anyhow::Result<()> {
    let lease = LeaseHandle::connect(&settings.connection).await?;
    let request = ask(&lease, Timestamp::now()).await?;
    println!("asked for a new CA; the leader sees that within seconds");
    let (start, mut last) = (Instant::now(), None);
    loop {
        let status = read_status(&lease, request).await;
        if status.is_some() && status != last {
            if let Some(Status::TakenUp(Phase::Unsupported)) = status {
                bail!(
                    "Lockstep serves a certificate from files, so it has no CA to replace: replace the files, or with \
                     cert-manager follow `Replace the CA's key of cert-manager` in docs/operations.md"
                );
            }
            println!("{}", status.map_or("", describe));
            last = status;
        }
        if last == Some(Status::TakenUp(Phase::Done)) {
            return Ok(());
        }
        let waited = start.elapsed();
        if last.is_none() && waited > TAKE_UP_TIMEOUT.min(settings.timeout) {
            bail!(
                "no replica has taken the request up: check that one leads (kubectl -n {} get lease {}), and the \
                 clock of this machine. With --no-leader-elect, --no-controller or --no-webhook none reads it",
                settings.connection.lockstep_namespace,
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

/// What the annotations of the Lease say about our request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Status {
    /// An earlier rotation is under way.
    Waiting,
    TakenUp(Phase),
}

const fn describe(status: Status) -> &'static str {
    let Status::TakenUp(phase) = status else {
        return "another rotation is under way; this one begins when that one is done";
    };
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

/// Writes the request, and returns it.
async fn ask(lease: &LeaseHandle, now: Timestamp) -> anyhow::Result<Timestamp> {
    let found = lease.read_with_patch().await.map_err(|failure| lease.explain("patch", &failure))?;
    let asked = annotation(&found, &lease.keys.rotate_ca).and_then(|text| text.parse().ok());
    let progress = annotation(&found, &lease.keys.ca_rotation).and_then(|text| text.parse().ok());
    let request = next_request(asked, progress, now)?;
    lease
        .annotate(&lease.keys.rotate_ca, &request.to_string())
        .await
        .map_err(|failure| lease.explain("patch", &failure))?;
    Ok(request)
}

/// How far the rotation is; none if no replica has taken it up, or the API server does not answer.
async fn read_status(lease: &LeaseHandle, request: Timestamp) -> Option<Status> {
    let found = lease.read_with_patch().await.ok()?;
    let asked = annotation(&found, &lease.keys.rotate_ca)?;
    status(asked, annotation(&found, &lease.keys.ca_rotation)?, request)
}

/// How far our request is, given the annotations of the Lease. If somebody asks after us, their rotation replaces
/// all that ours would have. Progress of a request that is later than the last one asked, one from before the Lease was
/// deleted for example, says nothing.
fn status(asked: &str, progress: &str, request: Timestamp) -> Option<Status> {
    let asked: Timestamp = asked.parse().ok()?;
    let progress: Progress = progress.parse().ok()?;
    let is_over = matches!(progress.phase, Phase::Done | Phase::Unsupported);
    if progress.request > asked || asked < request {
        None
    } else if progress.request >= request {
        Some(Status::TakenUp(progress.phase))
    } else {
        (!is_over).then_some(Status::Waiting)
    }
}

/// A request that is later than the last one, even if a clock was ahead: replicas take up only later ones. Those that
/// replicas would not take up do not count.
fn next_request(
    asked: Option<Timestamp>,
    progress: Option<Progress>,
    now: Timestamp,
) -> anyhow::Result<Timestamp> {
    let now = Timestamp::from_second(now.as_second())?;
    let all = [asked, progress.map(|progress| progress.request)].into_iter().flatten();
    let Some(last) = all.filter(|at| is_plausible(*at, now)).max() else { return Ok(now) };
    Ok(now.max(last.checked_add(Duration::from_secs(1))?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_progress_of_this_request_or_of_a_later_one_counts() {
        let at = |second: i64| Timestamp::from_second(1_800_000_000 + second).unwrap();
        let check = |asked: i64, progress: i64| {
            let progress = Progress { request: at(progress), phase: Phase::Done }.to_string();
            status(&at(asked).to_string(), &progress, at(0))
        };
        let done = Some(Status::TakenUp(Phase::Done));
        assert_eq!(check(0, 0), done);
        assert_eq!(check(60, 60), done, "somebody asked after us");
        assert_eq!(check(60, 0), done, "somebody asked after us, and waits");
        assert_eq!(check(0, -60), None, "not taken up yet");
        assert_eq!(check(0, 60), None, "an earlier request by a clock that was ahead");
        assert_eq!(check(-60, -60), None);
        let other = Progress { request: at(-60), phase: Phase::Spreading }.to_string();
        assert_eq!(status(&at(0).to_string(), &other, at(0)), Some(Status::Waiting));
    }

    #[test]
    fn request_is_later_than_the_last_one_whatever_the_clocks() {
        let at = |second: i64| Timestamp::from_second(1_800_000_000 + second).unwrap();
        let next = |asked, taken_up: Option<Timestamp>| {
            let progress = taken_up.map(|request| Progress { request, phase: Phase::Done });
            next_request(asked, progress, at(0)).unwrap()
        };
        assert_eq!(next(None, None), at(0));
        assert_eq!(next(Some(at(-60)), None), at(0));
        assert_eq!(next(Some(at(0)), None), at(1));
        assert_eq!(next(Some(at(60)), Some(at(60))), at(61));
        assert_eq!(next(None, Some(at(60))), at(61), "somebody removed the request");
    }

    #[test]
    fn request_in_the_far_future_does_not_count() {
        let now = Timestamp::from_second(1_800_000_000).unwrap();
        let far = "9999-12-30T22:00:00Z".parse().unwrap();
        let progress = Some(Progress { request: far, phase: Phase::Done });
        assert_eq!(next_request(Some(far), progress, now).unwrap(), now);
    }
}
