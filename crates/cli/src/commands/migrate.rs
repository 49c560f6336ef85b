//! `lockstep migrate`: moves sources and copies of kubernetes-replicator or Reflector to Lockstep, with the rights of
//! the person who runs it.

use std::{
    collections::BTreeMap,
    fmt::Write,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, bail};
use clap::Args;
use futures::{StreamExt, TryStreamExt, stream};
use kube::Client;

use super::{
    connection::{Connected, Connection},
    output::{print, printable},
};
use crate::{
    commands::flags::{self, KindName},
    migrate::{
        label,
        migration::{Migration, lines},
        migration_plan::{self, ByHand, MigrationPlan, Move},
        requests::{CONCURRENCY, Requests},
        tool::Tool,
        undo_file::UndoFile,
    },
};
use lockstep_core::{
    failure::Failure,
    keys::Keys,
    object::{Kind, Object, ObjectKey},
    policy::pattern::Pattern,
    text::{counted, some_of},
    world::{Scope, World},
};

/// How many objects of each kind a line names.
const MAX_NAMED: usize = 5;

#[derive(Args)]
pub struct MigrateArgs {
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

    /// Where --apply writes how to take it back, before anything else [default: lockstep-undo-replicator.json or
    /// …-reflector.json]
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
    #[arg(long, default_value = "1m", value_parser = flags::duration)]
    pub timeout: Duration,

    #[command(flatten)]
    pub connection: Connection,
}

pub async fn run(settings: &MigrateArgs) -> anyhow::Result<()> {
    let Connected { client, instance, .. } = settings.connection.open().await?;
    if let Some(path) = &settings.undo {
        return undo(settings, client, path).await;
    }
    let Some(tool) = settings.from else { bail!("--from is needed: replicator or reflector") };
    let default = || PathBuf::from(format!("lockstep-undo-{}.json", tool.as_str()));
    let path = settings.undo_file.clone().unwrap_or_else(default);
    let scope = instance.scope();
    let requests = Requests::new(client, &scope.keys);
    let is_begun = settings.apply && path.exists();
    let mut file = if is_begun {
        begun(settings, tool, &path)?
    } else {
        let plan = make_plan(settings, tool, &scope, &requests).await?;
        print(&render(&scope.keys, &plan))?;
        if plan.moves.is_empty() {
            return Ok(());
        }
        UndoFile::new(tool, &settings.connection.domain, plan)
    };
    let migration = migration(settings, &requests, &scope.keys, &file);
    if !settings.apply {
        return show_obstacles(settings, &migration).await;
    }
    require_stopped(settings, &requests, tool).await?;
    let refused = migration.refused().await;
    if !refused.is_empty() {
        bail!("nothing was written, because this would be refused:\n{}", lines(&refused));
    }
    if !is_begun {
        file.create(&path)?;
        println!("\n{} says how to take this back", path.display());
    }
    let shown = path.display();
    migration.apply().await.with_context(|| {
        format!("not finished; continue with the same command, or take it back with lockstep migrate --undo {shown}")
    })?;
    file.finish(&path)?;
    let copies: usize = file.sources.iter().map(|source| source.copies.len()).sum();
    println!(
        "{} and {copies} copies belong to Lockstep now. To take it back: lockstep migrate --undo {shown}\n\
         {} ignores them from now on: start it again only if something was left to you.",
        counted(file.sources.len(), "source"),
        tool.title()
    );
    Ok(())
}

/// Says what would keep `--apply` from beginning.
async fn show_obstacles(settings: &MigrateArgs, migration: &Migration<'_>) -> anyhow::Result<()> {
    let mut text = "\nNothing was written.\n".to_owned();
    if let Err(running) = require_stopped(settings, migration.requests, migration.file.tool).await {
        let _ = writeln!(text, "Before --apply: {running:#}");
    }
    let refused = migration.refused().await;
    if !refused.is_empty() {
        let _ = writeln!(text, "--apply would be refused:\n{}", lines(&refused));
    }
    print(&text)
}

/// The file of a migration that was interrupted.
fn begun(settings: &MigrateArgs, tool: Tool, path: &Path) -> anyhow::Result<UndoFile> {
    let file = UndoFile::read(path)?;
    let shown = path.display();
    if file.finished || file.tool != tool || file.domain != settings.connection.domain {
        bail!("{shown} exists already and is of another migration: choose another with --undo-file");
    }
    println!("{shown} was begun before: going on with it");
    Ok(file)
}

async fn undo(settings: &MigrateArgs, client: Client, path: &Path) -> anyhow::Result<()> {
    let mut file = UndoFile::read(path)?;
    if settings.from.is_some_and(|tool| tool != file.tool) {
        bail!("{} is of a migration from {}", path.display(), file.tool.as_str());
    }
    let keys = Keys::new(&file.domain, "");
    let requests = Requests::new(client, &keys);
    require_stopped(settings, &requests, file.tool).await?;
    let undone = migration(settings, &requests, &keys, &file).undo().await;
    undone.context("not finished; the same command continues")?;
    file.finish(path)?;
    println!(
        "{} and their copies belong to {} again; start it now",
        counted(file.sources.len(), "source"),
        file.tool.title()
    );
    Ok(())
}

fn migration<'a>(
    settings: &MigrateArgs,
    requests: &'a Requests,
    keys: &'a Keys,
    file: &'a UndoFile,
) -> Migration<'a> {
    let say = |line: &str| println!("{}", printable(line));
    Migration { requests, keys, file, timeout: settings.timeout, dry_run: false, say }
}

/// Fails while the other tool runs: it would overwrite or delete copies on their way.
async fn require_stopped(settings: &MigrateArgs, requests: &Requests, tool: Tool) -> anyhow::Result<()> {
    if settings.assume_stopped {
        return Ok(());
    }
    let title = tool.title();
    let running = requests.running(tool).await.with_context(|| {
        format!("it cannot be checked whether {title} runs: stop it, then add --assume-stopped")
    })?;
    if running.is_empty() {
        return Ok(());
    }
    bail!(
        "{title} runs, and would overwrite or delete copies while they move: stop it first\n{}",
        lines(&running)
    )
}

async fn make_plan(
    settings: &MigrateArgs,
    tool: Tool,
    scope: &Scope,
    requests: &Requests,
) -> anyhow::Result<MigrationPlan> {
    let namespaces = requests.namespaces().await.map_err(|failure| cannot_list("namespaces", &failure))?;
    let keys = &*scope.keys;
    let mut world = World::new(scope.keys.clone(), scope.rules.clone(), 0);
    for meta in namespaces.values() {
        world.apply_namespace(meta);
    }
    let mut objects = BTreeMap::new();
    for kind in settings.kinds.iter().map(|kind| Kind::from(*kind)) {
        let found = requests.objects(kind, None).await;
        objects.extend(found.map_err(|failure| cannot_list(kind.plural(), &failure))?);
    }
    let (only, allow_all) = (settings.only.as_deref().map(Pattern::new), settings.allow_all);
    let (world, namespaces, only) = (&world, &namespaces, only.as_ref());
    let context = migration_plan::Context { tool, keys, world, namespaces, allow_all, only };
    let (mut plan, sources) = MigrationPlan::find(&context, &objects);
    for source in sources {
        let key = &source.key;
        let is_read = |at: &&ObjectKey| at.kind == key.kind && *at.name == *source.copy_name || *at == key;
        let reads = stream::iter(objects.keys().filter(is_read)).map(|at| read(requests, at));
        let found: Vec<_> = reads.buffered(CONCURRENCY).try_collect().await?;
        plan.add(&context, &source, found.into_iter().flatten().collect());
    }
    Ok(plan.finish(&context))
}

async fn read(requests: &Requests, at: &ObjectKey) -> anyhow::Result<Option<(ObjectKey, Object)>> {
    let object = requests.get(at).await;
    let object = object.with_context(|| format!("{} cannot be read: ask for the verb get", label(at)))?;
    Ok(object.map(|object| (at.clone(), object)))
}

fn cannot_list(what: &str, failure: &Failure) -> anyhow::Error {
    let kinds = if what == "secrets" { ", or leave Secrets out with --kinds configmaps" } else { "" };
    anyhow::anyhow!("{what} cannot be listed in all namespaces ({failure}): ask for the verb list{kinds}")
}

fn render(keys: &Keys, plan: &MigrationPlan) -> String {
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
    if !plan.namespaces.is_empty() {
        let named = names(plan.namespaces.iter().map(|entry| &entry.name));
        let key = &keys.accept_adopt_from;
        let _ = writeln!(text, "\nNamespaces that get {key} for as long as copies are adopted: {named}");
    }
    let copies: usize = plan.moves.iter().map(|planned| planned.entry.copies.len()).sum();
    let _ = writeln!(
        text,
        "\n{} with {copies} copies can move, {} left to you.",
        counted(plan.moves.len(), "source"),
        plan.by_hand.len()
    );
    text
}

fn render_move(text: &mut String, keys: &Keys, planned: &Move) {
    let entry = &planned.entry;
    let _ = writeln!(text, "{}", label(&entry.object.key));
    for (key, value) in entry.written.iter().filter(|(key, _)| **key != keys.adopt) {
        let name = key.split_once('/').map_or(key.as_str(), |(_, name)| name);
        let _ = writeln!(text, "  {name}: {}", one_line(value));
    }
    if !entry.copies.is_empty() {
        let outdated = match planned.outdated {
            0 => String::new(),
            n => format!(" ({n} of them with other content, which is replaced by that of the source)"),
        };
        let named = names(entry.copies.iter().map(|copy| &copy.key));
        let _ = writeln!(text, "  adopts {}: {named}{outdated}", entry.copies.len());
    }
    if !planned.creates.is_empty() {
        let _ = writeln!(text, "  creates {}: {}", planned.creates.len(), names(planned.creates.iter()));
    }
    for note in &planned.notes {
        let _ = writeln!(text, "  note: {}", one_line(note));
    }
}

/// The first of these, and how many more there are.
fn names(all: impl Iterator<Item = impl ToString>) -> String {
    some_of(&all.map(|name| name.to_string()).collect::<Vec<_>>(), MAX_NAMED, ", ")
}

/// Annotations may have any characters: none may begin a line that looks like one of ours.
fn one_line(text: &str) -> String {
    text.trim_end().replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::migrate::{
        not_movable::NotMovable,
        undo_file::{NamespaceEntry, ObjectEntry, SourceEntry},
    };
    use lockstep_core::object::Meta;

    #[test]
    fn plan_names_what_moves_and_what_does_not_and_each_text_in_one_line() {
        let keys = Keys::new("workshop.io", "-synced");
        let key = |namespace: &str| ObjectKey::new(Kind::Secret, namespace, "db");
        let object = |namespace: &str| ObjectEntry::new(&key(namespace), &Meta::default(), Tool::Replicator);
        let written = BTreeMap::from([
            (keys.adopt.clone(), "true".to_owned()),
            (keys.target_selector.clone(), "env=dev\n".to_owned()),
        ]);
        let copies = (0..7).map(|n| object(&format!("t{n}"))).collect();
        let moved = Move {
            entry: SourceEntry { object: object("home"), written, copies },
            outdated: 1,
            creates: vec![key("new")],
            notes: vec!["two\nlines".to_owned()],
        };
        let reason = NotMovable::ManagedCopy { at: key("a"), by: "x\ny".to_owned() };
        let namespace = NamespaceEntry {
            name: "t0".to_owned(),
            uid: String::new(),
            before: None,
            during: "home".to_owned(),
        };
        let plan = MigrationPlan {
            moves: vec![moved],
            by_hand: vec![ByHand {
                object: ObjectKey::new(Kind::ConfigMap, "home", "x"),
                reasons: vec![reason],
            }],
            namespaces: vec![namespace],
        };
        let text = render(&keys, &plan);
        for line in [
            "secret/home/db",
            "  target-selector: env=dev",
            "  adopts 7: t0/db, t1/db, t2/db, t3/db, t4/db and 2 more (1 of them with other content, which is replaced by \
             that of the source)",
            "  creates 1: new/db",
            "  note: two lines",
            "Left to you:",
            "home/x",
            "Namespaces that get workshop.io/accept-adopt-from for as long as copies are adopted: t0",
            "1 source with 7 copies can move, 1 left to you.",
        ] {
            assert!(text.lines().any(|found| found == line), "{line}: {text}");
        }
        assert!(!text.contains("\n  adopt: "), "it is taken away at the end: {text}");
    }
}
