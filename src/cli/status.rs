//! `lockstep status`: a line for each source, or each companion of one source.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::anyhow;
use clap::Args;
use k8s_openapi::jiff::Timestamp;
use serde::Serialize;
use tokio::task::JoinSet;

use super::{
    connection::{Connected, Connection, print_caveats},
    output::{Format, Table, print, print_value},
    source_name::SourceName,
};
use crate::{
    config,
    inspect::{
        instance::{Replica, age},
        snapshot::Snapshot,
        status::{SourceStatus, source_status},
    },
    object::ObjectKey,
    text::shorten,
};

/// How wide the column of targets is; `-o wide` shows them whole.
const MAX_TARGET_CHARS: usize = 32;

#[derive(Debug, Clone, Args)]
#[command(after_help = "\
Examples:
  lockstep status -A                          every source of the cluster
  lockstep status -n team-a                   the sources of one namespace
  lockstep status security/ca-bundle          each companion of a ConfigMap
  lockstep status secret/security/pull        each companion of a Secret
  lockstep status -A -o json | jq '.sources[] | select(.state != \"in-step\")'

States: in step; N conflicts (another object has the name); paused, N changes behind; matches no namespace;
refused (malformed); N deletes held until …; N to write (the mirror has not written them yet); source gone.")]
pub struct Status {
    /// A source: NAME, NAMESPACE/NAME, or secret/NAMESPACE/NAME
    #[arg(value_name = "SOURCE")]
    pub source: Option<SourceName>,

    /// The sources of this namespace [default: that of the kubeconfig]
    #[arg(short, long, value_parser = config::namespace)]
    pub namespace: Option<String>,

    /// The sources of all namespaces
    #[arg(short = 'A', long, conflicts_with = "namespace")]
    pub all_namespaces: bool,

    /// How to print it
    #[arg(short, long, value_enum, default_value_t)]
    pub output: Format,

    /// With -o json or yaml: each companion of every source, too
    #[arg(long)]
    pub companions: bool,

    /// Print sources again when they change
    #[arg(short, long, conflicts_with = "output")]
    pub watch: bool,

    #[command(flatten)]
    pub connection: Connection,
}

/// What `-o json` and `-o yaml` print.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Report<'a> {
    sources: Vec<SourceStatus>,
    summary: Health,
    instance: InstanceReport<'a>,
    /// What may make this incomplete or wrong: what the person may not see, and settings that are not known.
    caveats: Vec<String>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct InstanceReport<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    leader: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    ca_expires: Option<Timestamp>,
    replicas: &'a [Replica],
}

pub async fn run(settings: &Status) -> anyhow::Result<()> {
    let connected = settings.connection.open().await?;
    let namespace = settings.namespace.as_ref().unwrap_or(&connected.namespace);
    let asked = settings.source.as_ref().map(|source| source.key(namespace));
    let asked_in = asked.as_ref().map(|key| key.namespace.to_string());
    let mut snapshot =
        connected.snapshot(asked_in.as_deref().into_iter().chain([namespace.as_str()])).await?;
    let all = existing(&snapshot);
    snapshot.look_up_missing(&connected.client, asked.as_ref().map_or(&all, std::slice::from_ref)).await;
    let now = Timestamp::now();
    let held_until = connected.instance.deletes_held_until(now);
    let query = Query { settings, namespace, now, held_until };
    let wanted = query.select(&snapshot, &all)?;
    let all: Vec<(ObjectKey, SourceStatus)> =
        all.into_iter().map(|key| (key.clone(), source_status(&snapshot, &key, held_until))).collect();
    let health = Health::of(&all);
    let is_wanted = |(key, _): &(ObjectKey, SourceStatus)| wanted.contains(key);
    let mut statuses: Vec<SourceStatus> =
        all.into_iter().filter(is_wanted).map(|(_, status)| status).collect();
    if matches!(settings.output, Format::Json | Format::Yaml) {
        if settings.source.is_none() && !settings.companions {
            statuses.iter_mut().for_each(|status| status.companions.clear());
        }
        return print_value(settings.output, &report(&connected, &snapshot, health, statuses));
    }
    print_caveats(&connected, &snapshot);
    let mut lines = match (&settings.source, statuses.first()) {
        (Some(_), Some(status)) => query.companion_lines(status),
        _ if statuses.is_empty() => vec![query.nothing()],
        _ => query.table(&statuses).lines(),
    };
    if settings.source.is_none() {
        lines.push(String::new());
        lines.push(summary(&connected, health, query.now));
    }
    print(&(lines.join("\n") + "\n"))?;
    if settings.watch { watch(&connected, &snapshot, &query).await } else { Ok(()) }
}

/// What the person asked for.
struct Query<'a> {
    settings: &'a Status,
    namespace: &'a str,
    now: Timestamp,
    /// Until when deletes are held, if they are.
    held_until: Option<Timestamp>,
}

impl Query<'_> {
    /// The sources that were asked for.
    fn select(&self, snapshot: &Snapshot, all: &[ObjectKey]) -> anyhow::Result<BTreeSet<ObjectKey>> {
        if let Some(source) = &self.settings.source {
            let key = source.key(self.namespace);
            if !all.contains(&key) {
                return Err(no_source(snapshot, &key));
            }
            return Ok([key].into());
        }
        let is_asked = |key: &&ObjectKey| self.settings.all_namespaces || *key.namespace == *self.namespace;
        Ok(all.iter().filter(is_asked).cloned().collect())
    }

    fn nothing(&self) -> String {
        match self.settings.all_namespaces {
            true => "There are no sources.".to_owned(),
            false => format!("There are no sources in namespace {}; -A shows those of all.", self.namespace),
        }
    }

    fn table(&self, statuses: &[SourceStatus]) -> Table {
        let mut table = Table::new(self.header());
        statuses.iter().for_each(|status| table.add(self.row(status)));
        table
    }

    fn header(&self) -> &'static [&'static str] {
        match self.settings.all_namespaces {
            true => &["NAMESPACE", "SOURCE", "KIND", "TARGETS", "IN STEP", "CHANGED", "STATE"],
            false => &["SOURCE", "KIND", "TARGETS", "IN STEP", "CHANGED", "STATE"],
        }
    }

    fn row(&self, status: &SourceStatus) -> Vec<String> {
        let wide = self.settings.output == Format::Wide;
        let targets = match status.targets.as_str() {
            "" => "-".to_owned(),
            targets if wide => targets.to_owned(),
            targets => shorten(targets, MAX_TARGET_CHARS),
        };
        let mut state = status.message.clone();
        if status.not_seen > 0 {
            state.push_str(&format!(" ({} not seen)", status.not_seen));
        }
        if wide {
            status.troubles.iter().for_each(|trouble| state.push_str(&format!("; {}", trouble.message)));
        }
        let namespace = self.settings.all_namespaces.then(|| status.namespace.clone());
        let changed = status.changed.map_or_else(|| "-".to_owned(), |at| age(at, self.now));
        let in_step = format!("{}/{}", status.in_step, status.wanted);
        let cells = [status.name.clone(), status.kind.to_owned(), targets, in_step, changed, state];
        namespace.into_iter().chain(cells).collect()
    }

    fn companion_lines(&self, status: &SourceStatus) -> Vec<String> {
        let SourceStatus { kind, namespace, name, targets, in_step, wanted, message, .. } = status;
        let mut lines = vec![format!("{kind} {namespace}/{name}: {message}, {in_step} of {wanted} in step")];
        if !targets.is_empty() {
            lines.push(format!("targets: {targets}"));
        }
        lines
            .extend(status.troubles.iter().map(|trouble| format!("{}: {}", trouble.reason, trouble.message)));
        if !status.companions.is_empty() {
            let mut table = Table::new(&["NAMESPACE", "COMPANION", "WRITTEN", "STATE"]);
            for one in &status.companions {
                let written = one.written.map_or_else(|| "-".to_owned(), |at| age(at, self.now));
                table.add(vec![one.namespace.clone(), one.name.clone(), written, one.state.to_string()]);
            }
            lines.push(String::new());
            lines.extend(table.lines());
        }
        lines
    }
}

/// How many sources there are, and how many of them are as their author asked for.
#[derive(Clone, Copy, Serialize)]
struct Health {
    healthy: usize,
    sources: usize,
}

impl Health {
    fn of(all: &[(ObjectKey, SourceStatus)]) -> Self {
        let is_healthy = |(_, status): &&(ObjectKey, SourceStatus)| status.state.is_healthy();
        Self { healthy: all.iter().filter(is_healthy).count(), sources: all.len() }
    }
}

/// Every source that exists or has companions, in order. Others are remembered only because they had some.
fn existing(snapshot: &Snapshot) -> Vec<ObjectKey> {
    snapshot.world.read(|world| {
        let exists =
            |key: &ObjectKey| world.source(key).is_some() || world.companions_of(key).next().is_some();
        let mut all: Vec<ObjectKey> = world.all_sources().into_iter().filter(exists).collect();
        all.sort_unstable_by(|a, b| (&a.namespace, &a.name, a.kind).cmp(&(&b.namespace, &b.name, b.kind)));
        all
    })
}

/// Why nothing can be said about this source.
pub fn no_source(snapshot: &Snapshot, key: &ObjectKey) -> anyhow::Error {
    let (kind, plural) = (key.kind.as_str(), key.kind.plural());
    let ObjectKey { namespace, name, .. } = key;
    if !snapshot.scope.kinds.contains(&key.kind) {
        return anyhow!("{plural} are not mirrored here: start Lockstep with --kinds configmaps,secrets");
    }
    match snapshot.view.sees_sources(key.kind, namespace) {
        false => anyhow!(
            "you may not see whether {kind} {key} is a source: ask for the verb list on {plural} there"
        ),
        true => anyhow!(
            "{kind} {key} is no source: check its name and namespace, and its label (kubectl get {plural} {name} -n \
             {namespace} --show-labels)"
        ),
    }
}

/// The last line: whether all is well, and who looks after it.
fn summary(connected: &Connected, Health { healthy, sources }: Health, now: Timestamp) -> String {
    let instance = &connected.instance;
    let leader = match &instance.lease {
        Ok(lease) => match (&lease.leader, lease.renewed) {
            (Some(leader), _) => format!("leader {leader}"),
            (None, Some(renewed)) => format!("NO LEADER for {}", age(renewed, now)),
            (None, None) => "NO LEADER".to_owned(),
        },
        Err(_) => "leader not known".to_owned(),
    };
    let ca = match &instance.ca_expiry {
        Ok(Some(expiry)) if *expiry <= now => "the CA HAS EXPIRED".to_owned(),
        Ok(Some(expiry)) => format!("CA valid for {}", age(now, *expiry)),
        Ok(None) => "a webhook trusts no CA".to_owned(),
        Err(_) => "CA not known".to_owned(),
    };
    let version = instance.lease.as_ref().ok().and_then(|lease| lease.settings.as_ref());
    let version = version.map(|settings| format!(", version {}", settings.version)).unwrap_or_default();
    let replicas = match &instance.replicas {
        Ok(replicas) if replicas.is_empty() => format!("no pods in {}", instance.name.namespace),
        Ok(replicas) => {
            let ready = replicas.iter().filter(|replica| replica.ready).count();
            format!("{ready} of {} replicas ready", replicas.len())
        }
        Err(_) => "replicas not known".to_owned(),
    };
    format!("{healthy} of {sources} sources healthy · {leader} · {ca} · {replicas}{version}")
}

fn report<'a>(
    connected: &'a Connected,
    snapshot: &'a Snapshot,
    summary: Health,
    statuses: Vec<SourceStatus>,
) -> Report<'a> {
    let instance = &connected.instance;
    let lease = instance.lease.as_ref().ok();
    Report {
        sources: statuses,
        summary,
        instance: InstanceReport {
            leader: lease.and_then(|lease| lease.leader.as_deref()),
            version: lease.and_then(|lease| Some(lease.settings.as_ref()?.version.clone())),
            ca_expires: instance.ca_expiry.as_ref().ok().copied().flatten(),
            replicas: instance.replicas.as_deref().unwrap_or_default(),
        },
        caveats: connected.caveats(snapshot),
    }
}

/// Prints the row of each source that changes, without end. What holds a name, and held deletes, are as they were at first.
async fn watch(connected: &Connected, snapshot: &Snapshot, query: &Query<'_>) -> anyhow::Result<()> {
    let mut tasks = JoinSet::new();
    let mut changes = snapshot.follow(&connected.client, &mut tasks);
    let rows = || -> BTreeMap<ObjectKey, (String, Vec<String>)> {
        let query = Query { now: Timestamp::now(), ..*query };
        // A source that is gone has no row.
        let keys = query.select(snapshot, &existing(snapshot)).unwrap_or_default();
        let row = |key: ObjectKey| {
            let status = source_status(snapshot, &key, query.held_until);
            // The age changes all the time.
            let identity = format!("{}/{} {}", status.in_step, status.wanted, status.message);
            (key, (identity, query.row(&status)))
        };
        keys.into_iter().map(row).collect()
    };
    let mut known = rows();
    loop {
        changes.changed().await?;
        let now = rows();
        let is_new =
            |key: &ObjectKey, identity: &String| known.get(key).map(|(old, _)| old) != Some(identity);
        // With the rows that were there, so that the columns keep their width.
        let mut table = Table::new(query.header());
        now.values().for_each(|(_, row)| table.add(row.clone()));
        let lines = table.lines().into_iter().skip(1).zip(&now);
        for (line, _) in lines.filter(|(_, (key, (identity, _)))| is_new(key, identity)) {
            print(&format!("{line}\n"))?;
        }
        known = now;
    }
}
