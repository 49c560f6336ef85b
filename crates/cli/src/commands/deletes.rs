//! `lockstep deletes`: shows the deletes that the leader holds, and asks it through the Lease to release or extend the
//! hold.

use std::time::{Duration, Instant};

use anyhow::{anyhow, bail};
use clap::{Args, Subcommand};
use k8s_openapi::jiff::Timestamp;

use super::{
    connection::{Connected, Connection},
    lease_handle::{LeaseHandle, POLL_INTERVAL, explain},
    output::{Table, print},
};
use crate::{
    commands::flags,
    inspect::{
        instance::age,
        status::{SourceStatus, statuses},
    },
};
use lockstep_cluster::client;
use lockstep_core::{
    keys,
    lease::{
        hold::{Extension, HeldDeletes, HoldAnnotations, MAX_HOLD, Release, to_annotation},
        record::LeaseRecord,
    },
    object::time::later,
    text::some_of,
};

/// How many sources are listed, and how many namespaces of each are named.
const MAX_LISTED: usize = 50;
const MAX_NAMED: usize = 5;

/// When more than half of the companions in other namespaces than their source would be deleted at once, Lockstep holds
/// these deletes for --delete-grace. Restore the sources, labels or namespaces in that time, and nothing is lost.
#[derive(Args)]
#[command(after_help = "Examples:
  lockstep deletes list         # how many, since when, until when
  lockstep deletes extend 2h    # two more hours to restore the sources
  lockstep deletes release      # the deletes are intended: do them now")]
pub struct DeletesArgs {
    #[command(subcommand)]
    pub command: DeletesCommand,
}

#[derive(Subcommand)]
pub enum DeletesCommand {
    /// Show what is held; needs the verb get on the Lease
    List(Connection),
    /// Let the leader delete now what it holds; needs the verb patch on the Lease
    Release(LeaderRequest),
    /// Hold the deletes for longer; needs the verb patch on the Lease
    Extend {
        /// How much later the hold ends, such as `30m` or `2h`
        #[arg(value_name = "TIME", value_parser = flags::positive_duration)]
        time: Duration,

        #[command(flatten)]
        request: LeaderRequest,
    },
}

/// What the leader is asked for through the Lease.
#[derive(Args)]
pub struct LeaderRequest {
    #[command(flatten)]
    pub connection: Connection,

    /// How long to wait until the leader has done it; it goes on without this command
    #[arg(long, default_value = "5m", value_parser = flags::duration)]
    pub timeout: Duration,
}

pub async fn run(settings: &DeletesArgs) -> anyhow::Result<()> {
    match &settings.command {
        DeletesCommand::List(connection) => list(connection).await,
        DeletesCommand::Release(request) => release(request).await,
        DeletesCommand::Extend { time, request } => extend(*time, request).await,
    }
}

async fn list(connection: &Connection) -> anyhow::Result<()> {
    let connected = connection.open().await?;
    let lease = connected.instance.lease.as_ref();
    let lease = lease.map_err(|failure| explain(connection, "get", failure))?;
    let seen = HoldAnnotations::read(&connected.instance.keys, &lease.annotations);
    let now = Timestamp::now();
    let flags = keys::instance_flags(&connection.domain, &connection.lockstep_namespace);
    print(&describe(&seen, &flags, now))?;
    if seen.in_force(now).is_some() { print(&held_companions(&connected).await?) } else { Ok(()) }
}

/// The companions in other namespaces than their source that would be deleted, as far as this person sees them.
async fn held_companions(connected: &Connected) -> anyhow::Result<String> {
    let snapshot = connected.snapshot([connected.namespace.as_str()]).await?;
    let mut table = Table::new(&["SOURCE", "KIND", "COMPANIONS", "WHERE"]);
    for SourceStatus { key, companions, .. } in statuses(&snapshot, None) {
        let held = companions.iter().filter(|one| one.may_be_held(&key.namespace));
        let held: Vec<String> = held.map(|one| one.at.namespace.to_string()).collect();
        if !held.is_empty() {
            let places = some_of(&held, MAX_NAMED, ", ");
            table.add(&[&key, &key.kind, &held.len(), &places]);
        }
    }
    let mut lines = table.lines();
    let more = lines.len().saturating_sub(MAX_LISTED + 1);
    lines.truncate(MAX_LISTED + 1);
    lines.extend((more > 0).then(|| format!("and {more} more sources")));
    lines.extend(snapshot.view.caveats());
    Ok(format!("\n{}\n", lines.join("\n")))
}

async fn release(request: &LeaderRequest) -> anyhow::Result<()> {
    let asked = Asked::new(&request.connection, "release").await?;
    match asked.seen.release_of(&asked.hold) {
        Some(release) => println!("{} released them already, at {}", release.by, release.at),
        None => {
            let release = Release::new(&asked.hold, Timestamp::now(), &asked.user);
            asked.lease.annotate(&asked.lease.keys.deletes_released, &to_annotation(&release)).await?;
            println!("asked for a release; the leader sees that within seconds");
        }
    }
    asked.wait(request.timeout, |held| held.is_none()).await?;
    let HeldDeletes { companions, sources, .. } = asked.hold;
    println!("done: deletes of {companions} companions of {sources} sources are no longer held");
    Ok(())
}

async fn extend(time: Duration, request: &LeaderRequest) -> anyhow::Result<()> {
    let asked = Asked::new(&request.connection, "extend").await?;
    if let Some(release) = asked.seen.release_of(&asked.hold) {
        bail!("{} released them at {}: there is nothing to extend", release.by, release.at);
    }
    let now = Timestamp::now();
    let extension = Extension::new(&asked.hold, time, now, &asked.user);
    if extension.until > later(now, MAX_HOLD) {
        bail!("deletes are held for at most {} days: choose a shorter time", MAX_HOLD.as_secs() / 86_400);
    }
    asked.lease.annotate(&asked.lease.keys.deletes_extended, &to_annotation(&extension)).await?;
    println!("asked for an extension; the leader sees that within seconds");
    let is_extended = |held: Option<HeldDeletes>| held.is_none_or(|held| held.until >= extension.until);
    if asked.wait(request.timeout, is_extended).await?.is_none() {
        bail!("the hold has ended meanwhile: nothing was extended");
    }
    println!("done: deletes are held until {}", extension.until);
    Ok(())
}

/// A hold that the leader is asked about.
struct Asked {
    lease: LeaseHandle,
    seen: HoldAnnotations,
    hold: HeldDeletes,
    /// For the record. Whoever may patch the Lease can write any name; the API server's audit log has the right one.
    user: String,
}

impl Asked {
    async fn new(connection: &Connection, verb: &str) -> anyhow::Result<Self> {
        let lease = LeaseHandle::connect(connection).await?;
        let found = lease.read_with_patch().await?;
        let seen = annotations(&lease, found);
        let hold = seen.held.ok_or_else(|| anyhow!("no deletes are held: there is nothing to {verb}"))?;
        let user = client::who_am_i(&lease.client).await.unwrap_or_else(|_| "somebody".to_owned());
        Ok(Self { lease, seen, hold, user })
    }

    /// Waits until the Lease shows what is wanted of this hold, and returns the hold; none once it is over.
    async fn wait(
        &self,
        timeout: Duration,
        wanted: impl Fn(Option<HeldDeletes>) -> bool,
    ) -> anyhow::Result<Option<HeldDeletes>> {
        let start = Instant::now();
        while start.elapsed() <= timeout {
            // The API server may be away for a moment.
            if let Ok(found) = self.lease.read_with_patch().await {
                let held = annotations(&self.lease, found).held.filter(|held| held.since == self.hold.since);
                if wanted(held) {
                    return Ok(held);
                }
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
        bail!(
            "the leader has not done all of it within {timeout:?}: the request stays recorded. Check that a replica leads \
             (kubectl -n {} get lease {}), and Warning Events on the sources",
            self.lease.connection.lockstep_namespace,
            self.lease.keys.instance
        )
    }
}

fn annotations(lease: &LeaseHandle, found: LeaseRecord) -> HoldAnnotations {
    HoldAnnotations::read(&lease.keys, &found.metadata.annotations.unwrap_or_default())
}

fn describe(seen: &HoldAnnotations, flags: &str, now: Timestamp) -> String {
    let Some(hold) = &seen.held else {
        let released = seen.released.as_ref();
        let last =
            released.map(|Release { at, by, .. }| format!("the last hold was released at {at} by {by}\n"));
        return "no deletes are held\n".to_owned() + &last.unwrap_or_default();
    };
    let HeldDeletes { since, until, companions, sources } = hold;
    let text = format!(
        "deletes of {companions} companions of {sources} sources are held\nsince {since} ({} ago)\nuntil {until} (in {})\n",
        age(*since, now),
        age(now, *until),
    );
    text + &match seen.release_of(hold) {
        Some(Release { at, by, .. }) => format!("released at {at} by {by}: the leader deletes them now\n"),
        None => format!(
            "\nIf this is an accident, restore the sources, labels or namespaces: their companions stay as they are.\n\
             To keep them longer:    lockstep deletes extend 2h{flags}\n\
             To delete them now:     lockstep deletes release{flags}\n"
        ),
    }
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
