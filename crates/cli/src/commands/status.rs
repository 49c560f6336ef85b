//! `lockstep status`: a line for each source, or each companion of one source.

use anyhow::anyhow;
use clap::Args;
use k8s_openapi::jiff::Timestamp;
use serde::Serialize;
use tokio::task::JoinSet;

use super::{
    connection::{Connected, Connection, print_caveats},
    output::{Format, Table, print, print_value},
};
use crate::inspect::{
    instance::{Instance, InstanceSummary, age},
    snapshot::Snapshot,
    source_name::SourceName,
    status::{CompanionStatus, SourceStatus, statuses},
};
use lockstep_core::{keys, lease::lease_state::LeaseState, object::ObjectKey, text::shorten};

/// How wide the column of targets is; `-o wide` shows them whole.
const MAX_TARGET_CHARS: usize = 32;

#[derive(Args)]
#[command(after_help = "\
Examples:
  lockstep status -A                          every source of the cluster
  lockstep status -n team-a                   the sources of one namespace
  lockstep status security/ca-bundle          each companion of a ConfigMap
  lockstep status secret/security/pull        each companion of a Secret
  lockstep status -A -o json | jq '.sources[] | select(.state != \"in-step\")'

States: in step; N conflicts (another object has the name); paused, N changes behind; matches no namespace;
refused (malformed); N deletes held until …; N to write (the controller has not written them yet); source gone.")]
pub struct StatusArgs {
    /// A source: NAME, NAMESPACE/NAME, or secret/NAMESPACE/NAME
    #[arg(value_name = "SOURCE")]
    pub source: Option<SourceName>,

    /// The sources of this namespace [default: that of the kubeconfig]
    #[arg(short, long, value_parser = keys::namespace)]
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
struct Report {
    sources: Vec<SourceStatus>,
    summary: Health,
    instance: InstanceSummary,
    /// What may make this incomplete or wrong: what the person may not see, and settings that are not known.
    caveats: Vec<String>,
}

/// How many sources there are, and how many of them are as their author asked for.
#[derive(Serialize)]
struct Health {
    healthy: usize,
    sources: usize,
}

pub async fn run(settings: &StatusArgs) -> anyhow::Result<()> {
    let connected = settings.connection.open().await?;
    let namespace = settings.namespace.as_ref().unwrap_or(&connected.namespace);
    let asked = settings.source.as_ref().map(|source| source.key(namespace));
    let of_asked = asked.as_ref().map(|key| &*key.namespace);
    let mut snapshot = connected.snapshot(of_asked.into_iter().chain([namespace.as_str()])).await?;
    let looked_at = asked.as_ref().map_or_else(|| snapshot.sources(), |key| vec![key.clone()]);
    snapshot.look_up(&connected.client, snapshot.missing(&looked_at)).await;
    let held_until = connected.instance.deletes_held(Timestamp::now()).map(|hold| hold.until);
    let query = Query { settings, namespace, asked, held_until };
    let mut sources = query.statuses(&snapshot);
    let healthy = sources.iter().filter(|status| status.healthy).count();
    let health = Health { healthy, sources: sources.len() };
    sources.retain(|status| query.asks_for(&status.key));
    if let (Some(key), true) = (&query.asked, sources.is_empty()) {
        return Err(no_source(&snapshot, key));
    }
    if matches!(settings.output, Format::Json | Format::Yaml) {
        if query.asked.is_none() && !settings.companions {
            sources.iter_mut().for_each(|status| status.companions.clear());
        }
        let (instance, caveats) = (connected.instance.summary(), connected.caveats(&snapshot));
        return print_value(settings.output, &Report { sources, summary: health, instance, caveats });
    }
    print_caveats(&connected, &snapshot);
    let now = Timestamp::now();
    let mut lines = match (&query.asked, &sources[..]) {
        (Some(_), [status]) => companion_lines(status, now),
        (_, []) => vec![query.nothing()],
        _ => query.table(&sources, now).lines(),
    };
    if query.asked.is_none() {
        lines.push(String::new());
        lines.push(summary(&connected.instance, &health, now));
    }
    print(&(lines.join("\n") + "\n"))?;
    if settings.watch { query.watch(&connected, &snapshot).await } else { Ok(()) }
}

/// What the person asked for.
struct Query<'a> {
    settings: &'a StatusArgs,
    namespace: &'a str,
    asked: Option<ObjectKey>,
    /// Until when deletes are held, if they are.
    held_until: Option<Timestamp>,
}

impl Query<'_> {
    fn asks_for(&self, key: &ObjectKey) -> bool {
        match &self.asked {
            Some(asked) => key == asked,
            None => self.settings.all_namespaces || *key.namespace == *self.namespace,
        }
    }

    /// Of every source, whether or not it was asked for.
    fn statuses(&self, snapshot: &Snapshot) -> Vec<SourceStatus> {
        let mut all = statuses(snapshot, self.held_until);
        all.sort_by(|SourceStatus { key: a, .. }, SourceStatus { key: b, .. }| {
            (&a.namespace, &a.name, a.kind).cmp(&(&b.namespace, &b.name, b.kind))
        });
        all
    }

    fn nothing(&self) -> String {
        if self.settings.all_namespaces {
            return "There are no sources.".to_owned();
        }
        format!("There are no sources in namespace {}; -A shows those of all.", self.namespace)
    }

    fn table(&self, sources: &[SourceStatus], now: Timestamp) -> Table {
        let header = ["NAMESPACE", "SOURCE", "KIND", "TARGETS", "IN STEP", "CHANGED", "STATE"];
        let first = usize::from(!self.settings.all_namespaces);
        let mut table = Table::new(&header[first..]);
        let wide = self.settings.output == Format::Wide;
        for status in sources {
            let SourceStatus { key, targets, in_step, wanted, not_seen, troubles, .. } = status;
            let targets = match targets.as_str() {
                "" => "-".to_owned(),
                targets if wide => targets.to_owned(),
                targets => shorten(targets, MAX_TARGET_CHARS),
            };
            let mut state = status.message.clone();
            if *not_seen > 0 {
                state.push_str(&format!(" ({not_seen} not seen)"));
            }
            if wide {
                troubles.iter().for_each(|trouble| state.push_str(&format!("; {trouble}")));
            }
            let in_step = format!("{in_step}/{wanted}");
            let changed = ago(status.changed, now);
            let row: [&dyn ToString; 7] =
                [&key.namespace, &key.name, &key.kind, &targets, &in_step, &changed, &state];
            table.add(&row[first..]);
        }
        table
    }

    /// Prints the row of each source that changes, without end. What holds a name, and held deletes, are as they were
    /// at first.
    async fn watch(&self, connected: &Connected, snapshot: &Snapshot) -> anyhow::Result<()> {
        let mut tasks = JoinSet::new();
        let mut changes = snapshot.follow(&connected.client, &mut tasks);
        let read = || {
            let mut statuses = self.statuses(snapshot);
            statuses.retain(|status| self.asks_for(&status.key));
            statuses
        };
        // The age changes all the time.
        let shown = |status: &SourceStatus| (status.in_step, status.wanted, status.message.clone());
        let mut known = read();
        loop {
            changes.changed().await?;
            let now = read();
            // With the rows that were there, so that the columns keep their width.
            let lines = self.table(&now, Timestamp::now()).lines();
            for (line, status) in lines.iter().skip(1).zip(&now) {
                let before = known.iter().find(|known| known.key == status.key);
                if before.map(shown) != Some(shown(status)) {
                    print(&format!("{line}\n"))?;
                }
            }
            known = now;
        }
    }
}

fn ago(time: Option<Timestamp>, now: Timestamp) -> String {
    time.map_or_else(|| "-".to_owned(), |at| age(at, now))
}

fn companion_lines(status: &SourceStatus, now: Timestamp) -> Vec<String> {
    let SourceStatus { key, targets, in_step, wanted, message, .. } = status;
    let mut lines = vec![format!("{} {key}: {message}, {in_step} of {wanted} in step", key.kind)];
    if !targets.is_empty() {
        lines.push(format!("targets: {targets}"));
    }
    lines.extend(status.troubles.iter().map(|trouble| format!("{}: {trouble}", trouble.event_reason())));
    if !status.companions.is_empty() {
        let mut table = Table::new(&["NAMESPACE", "COMPANION", "WRITTEN", "STATE"]);
        for CompanionStatus { at, written, message, .. } in &status.companions {
            table.add(&[&at.namespace, &at.name, &ago(*written, now), message]);
        }
        lines.push(String::new());
        lines.extend(table.lines());
    }
    lines
}

/// Why nothing can be said about this source.
pub fn no_source(snapshot: &Snapshot, key: &ObjectKey) -> anyhow::Error {
    let (kind, plural) = (key.kind.as_str(), key.kind.plural());
    let ObjectKey { namespace, name, .. } = key;
    if !snapshot.scope.kinds.contains(&key.kind) {
        return anyhow!("{plural} are not mirrored here: start Lockstep with --kinds configmaps,secrets");
    }
    if !snapshot.view.sees_sources(key.kind, namespace) {
        return anyhow!(
            "you may not see whether {kind} {key} is a source: ask for the verb list on {plural} there"
        );
    }
    anyhow!(
        "{kind} {key} is no source: check its name and namespace, and its label (kubectl get {plural} {name} -n {namespace} \
         --show-labels)"
    )
}

/// The last line: whether all is well, and who looks after it.
fn summary(instance: &Instance, Health { healthy, sources }: &Health, now: Timestamp) -> String {
    let leader = match &instance.lease {
        Ok(LeaseState { leader: Some(leader), .. }) => format!("leader {leader}"),
        Ok(LeaseState { renewed: Some(renewed), .. }) => format!("NO LEADER for {}", age(*renewed, now)),
        Ok(_) => "NO LEADER".to_owned(),
        Err(_) => "leader not known".to_owned(),
    };
    let ca = match instance.ca_expiry() {
        Ok(Some(expiry)) if expiry <= now => "the CA HAS EXPIRED".to_owned(),
        Ok(Some(expiry)) => format!("CA valid for {}", age(now, expiry)),
        Ok(None) => "a webhook trusts no CA".to_owned(),
        Err(_) => "CA not known".to_owned(),
    };
    let replicas = match &instance.replicas {
        Ok(replicas) if replicas.is_empty() => format!("no pods in {}", instance.namespace),
        Ok(replicas) => {
            let ready = replicas.iter().filter(|replica| replica.ready).count();
            format!("{ready} of {} replicas ready", replicas.len())
        }
        Err(_) => "replicas not known".to_owned(),
    };
    let version = instance.summary().version.map(|version| format!(", version {version}"));
    format!(
        "{healthy} of {sources} sources healthy · {leader} · {ca} · {replicas}{}",
        version.unwrap_or_default()
    )
}
