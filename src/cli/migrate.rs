//! `lockstep migrate`: moves sources and copies of kubernetes-replicator or Reflector to Lockstep, with the rights of the
//! person who runs it.

use std::{collections::BTreeMap, fmt::Write, path::PathBuf, time::Duration};

use anyhow::{Context, bail};
use clap::Args;
use futures::{StreamExt, TryStreamExt, stream};

use super::connection::{Connected, Connection};
use crate::{
    client::Failure,
    config::{self, KindName},
    keys::Keys,
    migrate::{
        carry_out::{Error, Migration},
        cluster::{CONCURRENCY, Cluster, Running},
        label,
        plan::{self, ByHand, Candidate, Move, Plan, judge, survey},
        reason::Reason,
        record::{Record, State},
        tool::Tool,
    },
    object::{Kind, Object, ObjectKey},
    policy::pattern::Pattern,
    world::{Scope, World},
};

/// How many objects of each kind a line names.
const MAX_NAMED: usize = 5;

#[derive(Debug, Clone, Args)]
pub struct Migrate {
    /// The tool to move from
    #[arg(long, required_unless_present = "undo")]
    pub from: Option<Tool>,

    /// Show what would be done, and write nothing; the default
    #[arg(long, conflicts_with_all = ["apply", "undo"])]
    pub plan: bool,

    /// Move everything that the plan shows; continue if it was interrupted
    #[arg(long, conflicts_with = "undo")]
    pub apply: bool,

    /// Take a migration back, as this file says
    #[arg(long, value_name = "FILE")]
    pub undo: Option<PathBuf>,

    /// Where --apply writes how to take it back, before anything else [default: lockstep-undo-replicator.json or …-reflector.json]
    #[arg(long, value_name = "FILE", requires = "apply")]
    pub undo_file: Option<PathBuf>,

    /// Only sources whose namespace/name matches, such as 'platform/*'
    #[arg(long, value_name = "PATTERN")]
    pub only: Option<String>,

    /// Kinds to move
    #[arg(long, default_value = "configmaps,secrets", value_delimiter = ',')]
    pub kinds: Vec<KindName>,

    /// kubernetes-replicator ran with --allow-all, so its sources need not permit copies that pull
    #[arg(long)]
    pub allow_all: bool,

    /// The other tool is stopped: do not look for its Deployments and CronJobs
    #[arg(long)]
    pub assume_stopped: bool,

    /// How long Lockstep may take for each step
    #[arg(long, default_value = "1m", value_parser = config::duration)]
    pub timeout: Duration,

    #[command(flatten)]
    pub connection: Connection,
}

pub async fn run(settings: &Migrate) -> anyhow::Result<()> {
    let Connected { client, instance, .. } = settings.connection.open().await?;
    let step = Step { settings, client, scope: instance.scope() };
    if let Some(path) = &settings.undo {
        return step.undo(path).await;
    }
    let Some(tool) = settings.from else { bail!("--from is needed: replicator or reflector") };
    let default = || PathBuf::from(format!("lockstep-undo-{}.json", tool.as_str()));
    let path = settings.undo_file.clone().unwrap_or_else(default);
    if settings.apply && path.exists() {
        return step.resume(tool, &path).await;
    }
    step.plan(tool, &path).await
}

struct Step<'a> {
    settings: &'a Migrate,
    client: kube::Client,
    /// Of the Lockstep that takes over.
    scope: Scope,
}

impl Step<'_> {
    /// Shows the plan, and carries it out if that was asked for.
    async fn plan(&self, tool: Tool, path: &std::path::Path) -> anyhow::Result<()> {
        let keys = (*self.scope.keys).clone();
        let cluster = Cluster::new(self.client.clone(), &keys);
        let plan = make_plan(self.settings, tool, &self.scope, &cluster).await?;
        print!("{}", render(tool, &keys, &plan));
        if plan.moves.is_empty() {
            return Ok(());
        }
        let mut record = Record::new(tool, &self.settings.connection.domain, plan);
        let migration = self.migration(&cluster, &keys, &record);
        if !self.settings.apply {
            println!("\nNothing was written.");
            if let Err(running) = self.is_stopped(&cluster, tool).await {
                println!("Before --apply: {running:#}");
            }
            if let Err(Error::Refused(lines)) = migration.check().await {
                println!("--apply would be refused:");
                lines.iter().for_each(|line| println!("  {line}"));
            }
            return Ok(());
        }
        self.is_stopped(&cluster, tool).await?;
        migration.check().await?;
        record.create(path)?;
        println!("\n{} says how to take this back", path.display());
        self.apply(&cluster, &keys, &mut record, path).await
    }

    async fn apply(
        &self,
        cluster: &Cluster,
        keys: &Keys,
        record: &mut Record,
        path: &std::path::Path,
    ) -> anyhow::Result<()> {
        let file = path.display();
        let notes = self.migration(cluster, keys, record).apply().await.with_context(|| {
            format!("not finished; continue with the same command, or take it back with lockstep migrate --undo {file}")
        })?;
        record.update(path, State::Done)?;
        notes.iter().for_each(|note| println!("note: {note}"));
        let copies: usize = record.sources.iter().map(|source| source.copies.len()).sum();
        println!(
            "{} and {copies} copies belong to Lockstep now. To take it back: lockstep migrate --undo {file}\n\
             {} ignores them from now on: start it again only if something was left to you.",
            count(record.sources.len(), "source"),
            record.tool.title()
        );
        Ok(())
    }

    /// Continues a migration that was interrupted.
    async fn resume(&self, tool: Tool, path: &std::path::Path) -> anyhow::Result<()> {
        let mut record = Record::read(path)?;
        if (record.tool, record.state, &record.domain)
            != (tool, State::Begun, &self.settings.connection.domain)
        {
            bail!(
                "{} exists already and is of another migration: choose another with --undo-file",
                path.display()
            );
        }
        println!("{} was begun before: going on with it", path.display());
        let keys = Keys::new(&record.domain, &self.scope.keys.suffix);
        let cluster = Cluster::new(self.client.clone(), &keys);
        self.is_stopped(&cluster, tool).await?;
        self.migration(&cluster, &keys, &record).check().await?;
        self.apply(&cluster, &keys, &mut record, path).await
    }

    async fn undo(&self, path: &std::path::Path) -> anyhow::Result<()> {
        let mut record = Record::read(path)?;
        if self.settings.from.is_some_and(|tool| tool != record.tool) {
            bail!("{} is of a migration from {}", path.display(), record.tool.as_str());
        }
        let keys = Keys::new(&record.domain, &self.scope.keys.suffix);
        let cluster = Cluster::new(self.client.clone(), &keys);
        self.is_stopped(&cluster, record.tool).await?;
        let notes = self.migration(&cluster, &keys, &record).undo().await;
        let notes = notes.context("not finished; the same command continues")?;
        record.update(path, State::Undone)?;
        notes.iter().for_each(|note| println!("note: {note}"));
        println!(
            "{} and their copies belong to {} again; start it now",
            count(record.sources.len(), "source"),
            record.tool.title()
        );
        Ok(())
    }

    fn migration<'a>(&'a self, cluster: &'a Cluster, keys: &'a Keys, record: &'a Record) -> Migration<'a> {
        Migration { cluster, keys, record, timeout: self.settings.timeout, say: &|line| println!("{line}") }
    }

    /// Fails while the other tool runs: it would overwrite or delete copies on their way.
    async fn is_stopped(&self, cluster: &Cluster, tool: Tool) -> anyhow::Result<()> {
        if self.settings.assume_stopped {
            return Ok(());
        }
        let running = cluster.running(tool).await.with_context(|| {
            format!("it cannot be checked whether {} runs: stop it, then add --assume-stopped", tool.title())
        })?;
        if running.is_empty() { Ok(()) } else { bail!("{}", still_running(tool, &running)) }
    }
}

fn still_running(tool: Tool, running: &[Running]) -> String {
    let mut text =
        format!("{} runs, and would overwrite or delete copies while they move: stop it first", tool.title());
    for Running { what, command } in running {
        let command = command.as_deref().unwrap_or("it is stopping, wait for its pods to end");
        let _ = write!(text, "\n  {what}: {command}");
    }
    text
}

async fn make_plan(settings: &Migrate, tool: Tool, scope: &Scope, cluster: &Cluster) -> anyhow::Result<Plan> {
    let namespaces = cluster.namespaces().await.map_err(|failure| cannot_list("namespaces", &failure))?;
    let keys = &*scope.keys;
    let mut world = World::new(scope.keys.clone(), scope.rules.clone(), 0);
    for meta in namespaces.values() {
        world.apply_namespace(meta);
    }
    let mut objects = BTreeMap::new();
    for kind in settings.kinds.iter().map(|kind| Kind::from(*kind)) {
        let found = cluster.objects(kind, None).await;
        objects.extend(found.map_err(|failure| cannot_list(kind.plural(), &failure))?);
    }
    let only = settings.only.as_deref().map(Pattern::new);
    let context =
        plan::Context { tool, keys, world: &world, allow_all: settings.allow_all, only: only.as_ref() };
    let (candidates, mut by_hand) = survey(&context, &objects);
    let mut by_name: BTreeMap<(Kind, &str), Vec<&ObjectKey>> = BTreeMap::new();
    for key in objects.keys() {
        by_name.entry((key.kind, &*key.name)).or_default().push(key);
    }
    let judged = stream::iter(&candidates).map(|candidate| {
        let named = by_name.get(&(candidate.source.kind, candidate.companion.as_str()));
        read_and_judge(cluster, &context, named.map_or(&[], Vec::as_slice), candidate)
    });
    let judged: Vec<Result<Move, ByHand>> = judged.buffered(CONCURRENCY).try_collect().await?;
    let mut moves = Vec::new();
    for result in judged {
        match result {
            Ok(planned) => moves.push(planned),
            Err(item) => by_hand.push(item),
        }
    }
    Ok(Plan::new(&context, &objects, &namespaces, moves, by_hand))
}

fn cannot_list(what: &str, failure: &Failure) -> anyhow::Error {
    let kinds = if what == "secrets" { ", or leave Secrets out with --kinds configmaps" } else { "" };
    anyhow::anyhow!("{what} cannot be listed in all namespaces ({failure}): ask for the verb list{kinds}")
}

/// Reads a source and the objects that have the name of its copies, and judges them.
async fn read_and_judge(
    cluster: &Cluster,
    context: &plan::Context<'_>,
    named: &[&ObjectKey],
    candidate: &Candidate,
) -> anyhow::Result<Result<Move, ByHand>> {
    let cannot_read = |key: &ObjectKey| format!("{} cannot be read: ask for the verb get", label(key));
    let by_hand = |reasons: Vec<Reason>| Err(ByHand { object: candidate.source.clone(), reasons });
    let key = &candidate.source;
    let Some(source) = cluster.get(key).await.with_context(|| cannot_read(key))? else {
        return Ok(by_hand(vec![Reason::SourceMissing(key.clone())]));
    };
    let places = stream::iter(named.iter().copied().filter(|at| *at != key));
    let found = places.map(|at| async {
        let object = cluster.get(at).await.with_context(|| cannot_read(at))?;
        anyhow::Ok(object.map(|object| (at.clone(), object)))
    });
    let found: Vec<Option<(ObjectKey, Object)>> = found.buffered(CONCURRENCY).try_collect().await?;
    let found = found.into_iter().flatten().collect();
    Ok(judge(context, candidate, source, found).or_else(by_hand))
}

fn render(tool: Tool, keys: &Keys, plan: &Plan) -> String {
    let mut text = String::new();
    for planned in &plan.moves {
        render_move(&mut text, keys, planned);
    }
    if !plan.by_hand.is_empty() {
        text.push_str("\nLeft to you:\n");
    }
    for ByHand { object, reasons } in &plan.by_hand {
        let _ = writeln!(text, "{}", label(object));
        for reason in reasons {
            let _ = writeln!(text, "  {}", one_line(&reason.to_string()));
        }
    }
    if !plan.leftovers.is_empty() {
        let named = names(plan.leftovers.iter());
        let _ = writeln!(
            text,
            "\nWith annotations of {}, but neither a source nor a copy of one: {named}",
            tool.title()
        );
    }
    if !plan.acceptances.is_empty() {
        let named = shorten_list(
            plan.acceptances.iter().map(|entry| entry.namespace.clone()),
            plan.acceptances.len(),
        );
        let key = &keys.accept_adopt_from;
        let _ = writeln!(text, "\nNamespaces that get {key} for as long as copies are adopted: {named}");
    }
    let copies: usize = plan.moves.iter().map(|planned| planned.copies.len()).sum();
    let _ = writeln!(
        text,
        "\n{} with {copies} copies can move, {} left to you.",
        count(plan.moves.len(), "source"),
        plan.by_hand.len()
    );
    text
}

fn render_move(text: &mut String, keys: &Keys, planned: &Move) {
    let _ = writeln!(text, "{}", label(&planned.source.key));
    for (key, value) in planned.ours.iter().filter(|(key, _)| **key != keys.adopt) {
        let name = key.split_once('/').map_or(key.as_str(), |(_, name)| name);
        let _ = writeln!(text, "  {name}: {}", one_line(value));
    }
    if !planned.copies.is_empty() {
        let outdated = match planned.outdated {
            0 => String::new(),
            n => format!(" ({n} of them with other content, which is replaced by that of the source)"),
        };
        let named = names(planned.copies.iter().map(|copy| &copy.key));
        let _ = writeln!(text, "  adopts {}: {named}{outdated}", planned.copies.len());
    }
    if !planned.creates.is_empty() {
        let _ = writeln!(text, "  creates {}: {}", planned.creates.len(), names(planned.creates.iter()));
    }
    for note in &planned.notes {
        let _ = writeln!(text, "  note: {}", one_line(note));
    }
}

fn names<'a>(keys: impl ExactSizeIterator<Item = &'a ObjectKey>) -> String {
    let total = keys.len();
    shorten_list(keys.map(ToString::to_string), total)
}

fn shorten_list(items: impl Iterator<Item = String>, total: usize) -> String {
    let shown = items.take(MAX_NAMED).collect::<Vec<_>>().join(", ");
    match total.saturating_sub(MAX_NAMED) {
        0 => shown,
        more => format!("{shown} and {more} more"),
    }
}

/// Annotations may have any characters: none of them may control the terminal, or begin a line.
fn one_line(text: &str) -> String {
    text.trim_end().chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

fn count(number: usize, what: &str) -> String {
    let plural = if number == 1 { "" } else { "s" };
    format!("{number} {what}{plural}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::migrate::plan::{Acceptance, Subject};

    #[test]
    fn plan_names_what_moves_and_what_does_not_and_no_text_controls_the_terminal() {
        let keys = Keys::new("workshop.io", "-synced");
        let key = |namespace: &str| ObjectKey::new(Kind::Secret, namespace, "db");
        let subject =
            |namespace: &str| Subject { key: key(namespace), uid: String::new(), theirs: BTreeMap::new() };
        let moved = Move {
            source: subject("home"),
            ours: BTreeMap::from([
                (keys.adopt.clone(), "true".to_owned()),
                (keys.target_selector.clone(), "env=dev\n".to_owned()),
            ]),
            copies: (0..7).map(|n| subject(&format!("t{n}"))).collect(),
            outdated: 1,
            creates: vec![key("new")],
            notes: vec!["red \u{1b}[31m".to_owned()],
        };
        let reason = Reason::ManagedCopy { at: key("a"), by: "x\ny".to_owned() };
        let acceptance = Acceptance {
            namespace: "t0".to_owned(),
            uid: String::new(),
            before: None,
            during: "home".to_owned(),
        };
        let plan = Plan {
            moves: vec![moved],
            by_hand: vec![ByHand {
                object: ObjectKey::new(Kind::ConfigMap, "home", "x"),
                reasons: vec![reason],
            }],
            acceptances: vec![acceptance],
            leftovers: vec![key("old")],
        };
        let text = render(Tool::Replicator, &keys, &plan);
        assert!(!text.contains('\u{1b}'), "{text}");
        for line in [
            "secret/home/db",
            "  target-selector: env=dev",
            "  adopts 7: t0/db, t1/db, t2/db, t3/db, t4/db and 2 more (1 of them with other content, which is replaced by \
             that of the source)",
            "  creates 1: new/db",
            "Left to you:",
            "home/x",
            "With annotations of kubernetes-replicator, but neither a source nor a copy of one: old/db",
            "Namespaces that get workshop.io/accept-adopt-from for as long as copies are adopted: t0",
            "1 source with 7 copies can move, 1 left to you.",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}: {text}");
        }
        assert!(!text.contains("\n  adopt: "), "it is taken away at the end: {text}");
    }
}
