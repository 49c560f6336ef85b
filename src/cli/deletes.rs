//! `lockstep deletes`: shows the deletes that the leader holds, and asks it through the Lease to release or extend the
//! hold.

use std::{
    fmt::Write,
    time::{Duration, Instant},
};

use anyhow::{anyhow, bail};
use clap::{Args, Subcommand};
use k8s_openapi::{
    api::coordination::v1::Lease,
    jiff::{SignedDuration, Timestamp},
};

use super::lease::{Instance, LeaseHandle, POLL_INTERVAL};
use crate::{
    client, config,
    hold::{Extension, HeldDeletes, HoldAnnotations, MAX_HOLD, Release, later, time_left, to_annotation},
};

/// When more than half of the companions in other namespaces than their source would be deleted at once, Lockstep holds
/// these deletes for --delete-grace. Restore the sources, labels or namespaces in that time, and nothing is lost.
#[derive(Debug, Clone, Args)]
#[command(after_help = "Examples:
  lockstep deletes list         # how many, since when, until when
  lockstep deletes extend 2h    # two more hours to restore the sources
  lockstep deletes release      # the deletes are intended: do them now")]
pub struct Deletes {
    #[command(subcommand)]
    pub command: DeletesCommand,
}

#[derive(Debug, Clone, Subcommand)]
pub enum DeletesCommand {
    /// Show what is held; needs the verb get on the Lease
    List(Instance),
    /// Let the leader delete now what it holds; needs the verb patch on the Lease
    Release(ReleaseArgs),
    /// Hold the deletes for longer; needs the verb patch on the Lease
    Extend(ExtendArgs),
}

#[derive(Debug, Clone, Args)]
pub struct ReleaseArgs {
    #[command(flatten)]
    pub instance: Instance,

    /// How long to wait until the leader has deleted them; it goes on without this command
    #[arg(long, default_value = "5m", value_parser = config::duration)]
    pub timeout: Duration,
}

#[derive(Debug, Clone, Args)]
pub struct ExtendArgs {
    /// How much later the hold ends, such as `30m` or `2h`
    #[arg(value_name = "TIME", value_parser = config::positive_duration)]
    pub time: Duration,

    #[command(flatten)]
    pub instance: Instance,

    /// How long to wait until the leader has taken it up
    #[arg(long, default_value = "1m", value_parser = config::duration)]
    pub timeout: Duration,
}

pub async fn run(settings: &Deletes) -> anyhow::Result<()> {
    match &settings.command {
        DeletesCommand::List(instance) => list(instance).await,
        DeletesCommand::Release(settings) => release(settings).await,
        DeletesCommand::Extend(settings) => extend(settings).await,
    }
}

async fn list(instance: &Instance) -> anyhow::Result<()> {
    let lease = LeaseHandle::connect(instance).await?;
    let found = lease.read().await.map_err(|failure| lease.explain("get", &failure))?;
    let flags = config::instance_flags(&instance.domain, &instance.namespace);
    print!("{}", describe(&annotations(&lease, found), &flags, Timestamp::now()));
    Ok(())
}

async fn release(settings: &ReleaseArgs) -> anyhow::Result<()> {
    let lease = LeaseHandle::connect(&settings.instance).await?;
    let seen = read(&lease).await?;
    let hold = seen.held.ok_or_else(|| anyhow!("no deletes are held: there is nothing to release"))?;
    match seen.release_of(&hold) {
        Some(release) => println!("{} released them already, at {}", release.by, release.at),
        None => {
            let release = Release::new(&hold, Timestamp::now(), &who(&lease).await);
            annotate(&lease, &lease.keys.deletes_released, &to_annotation(&release)).await?;
            println!("asked for a release; the leader sees that within seconds");
        }
    }
    let HeldDeletes { companions, sources, .. } = hold;
    let is_over = |seen: &HoldAnnotations| seen.held.is_none_or(|held| held.since != hold.since);
    if wait(&lease, settings.timeout, is_over).await {
        println!("done: deletes of {companions} companions of {sources} sources are no longer held");
        return Ok(());
    }
    bail!(
        "the leader has not deleted all of them within {:?}: the release stays recorded. Check that a replica leads \
         (kubectl -n {} get lease {}), and Warning Events on the sources",
        settings.timeout,
        settings.instance.namespace,
        lease.keys.instance
    )
}

async fn extend(settings: &ExtendArgs) -> anyhow::Result<()> {
    let lease = LeaseHandle::connect(&settings.instance).await?;
    let seen = read(&lease).await?;
    let hold = seen.held.ok_or_else(|| anyhow!("no deletes are held: there is nothing to extend"))?;
    if let Some(release) = seen.release_of(&hold) {
        bail!("{} released them at {}: there is nothing to extend", release.by, release.at);
    }
    let now = Timestamp::now();
    let extension = Extension::new(&hold, settings.time, now, &who(&lease).await);
    if extension.until > later(now, MAX_HOLD) {
        bail!("deletes are held for at most {} days: choose a shorter time", MAX_HOLD.as_secs() / 86_400);
    }
    annotate(&lease, &lease.keys.deletes_extended, &to_annotation(&extension)).await?;
    println!("asked for an extension; the leader sees that within seconds");
    let mut is_over = false;
    let acted = wait(&lease, settings.timeout, |seen| {
        let held = seen.held.filter(|held| held.since == hold.since);
        is_over = held.is_none();
        held.is_none_or(|held| held.until >= extension.until)
    })
    .await;
    if acted && is_over {
        bail!("the hold has ended meanwhile: nothing was extended");
    }
    if acted {
        println!("done: deletes are held until {}", extension.until);
        return Ok(());
    }
    bail!(
        "no replica has taken the extension up within {:?}: check that one leads (kubectl -n {} get lease {})",
        settings.timeout,
        settings.instance.namespace,
        lease.keys.instance
    )
}

/// Waits until the Lease shows what is wanted, and says whether it did in time.
async fn wait(
    lease: &LeaseHandle,
    timeout: Duration,
    mut wanted: impl FnMut(&HoldAnnotations) -> bool,
) -> bool {
    let start = Instant::now();
    loop {
        // The API server may be away for a moment.
        if let Ok(found) = lease.read_with_patch().await
            && wanted(&annotations(lease, found))
        {
            return true;
        }
        if start.elapsed() > timeout {
            return false;
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
}

async fn read(lease: &LeaseHandle) -> anyhow::Result<HoldAnnotations> {
    let found = lease.read_with_patch().await.map_err(|failure| lease.explain("patch", &failure))?;
    Ok(annotations(lease, found))
}

async fn annotate(lease: &LeaseHandle, key: &str, value: &str) -> anyhow::Result<()> {
    lease.annotate(key, value).await.map(drop).map_err(|failure| lease.explain("patch", &failure))
}

fn annotations(lease: &LeaseHandle, found: Lease) -> HoldAnnotations {
    HoldAnnotations::read(&lease.keys, &found.metadata.annotations.unwrap_or_default())
}

/// For the record. Whoever may patch the Lease can write any name; the API server's audit log has the right one.
async fn who(lease: &LeaseHandle) -> String {
    client::who_am_i(&lease.client).await.unwrap_or_else(|_| "somebody".to_owned())
}

fn describe(seen: &HoldAnnotations, flags: &str, now: Timestamp) -> String {
    let Some(HeldDeletes { since, until, companions, sources }) = seen.held else {
        let mut text = "no deletes are held\n".to_owned();
        if let Some(Release { at, by, .. }) = &seen.released {
            let _ = writeln!(text, "the last hold was released at {at} by {by}");
        }
        return text;
    };
    let mut text = format!(
        "deletes of {companions} companions of {sources} sources are held\nsince {since} ({} ago)\nuntil {until} (in {})\n",
        rounded(time_left(since, now)),
        rounded(time_left(now, until)),
    );
    if let Some(release) = seen.held.as_ref().and_then(|hold| seen.release_of(hold)) {
        let _ = writeln!(text, "released at {} by {}: the leader deletes them now", release.at, release.by);
        return text;
    }
    let _ = write!(
        text,
        "\nIf this is an accident, restore the sources, labels or namespaces: their companions stay as they are.\n\
         To keep them longer:    lockstep deletes extend 2h{flags}\n\
         To delete them now:     lockstep deletes release{flags}\n"
    );
    text
}

/// In minutes if it is long.
fn rounded(time: Duration) -> String {
    let seconds = time.as_secs();
    let shown = if seconds < 120 { seconds } else { seconds / 60 * 60 };
    format!("{:#}", SignedDuration::from_secs(shown.try_into().unwrap_or(i64::MAX)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen() -> HoldAnnotations {
        let at = |text: &str| text.parse().unwrap();
        let (since, until) = (at("2026-11-17T18:00:00Z"), at("2026-11-17T19:00:00Z"));
        let held = Some(HeldDeletes { since, until, companions: 37, sources: 22 });
        HoldAnnotations { held, ..HoldAnnotations::default() }
    }

    #[test]
    fn hold_is_described_with_the_commands_for_this_instance() {
        let now = "2026-11-17T18:12:30Z".parse().unwrap();
        let text = describe(&seen(), " --domain a.example", now);
        assert_eq!(
            text,
            "deletes of 37 companions of 22 sources are held\n\
             since 2026-11-17T18:00:00Z (12m ago)\n\
             until 2026-11-17T19:00:00Z (in 47m)\n\
             \n\
             If this is an accident, restore the sources, labels or namespaces: their companions stay as they are.\n\
             To keep them longer:    lockstep deletes extend 2h --domain a.example\n\
             To delete them now:     lockstep deletes release --domain a.example\n"
        );
        assert_eq!(rounded(Duration::from_secs(90)), "1m 30s");
    }

    #[test]
    fn release_is_described_with_who_and_when() {
        let now = "2026-11-17T18:12:30Z".parse().unwrap();
        let mut seen = seen();
        seen.released = seen.held.as_ref().map(|hold| Release::new(hold, now, "alice"));
        let text = describe(&seen, "", now);
        assert!(text.contains("released at 2026-11-17T18:12:30Z by alice"), "{text}");
        seen.held = None;
        let text = describe(&seen, "", now);
        assert!(text.starts_with("no deletes are held\n") && text.contains("by alice"), "{text}");
        assert_eq!(describe(&HoldAnnotations::default(), "", now), "no deletes are held\n");
    }
}
