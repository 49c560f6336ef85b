//! The undo file: what a migration changes, written before anything is changed. It has metadata only, never content.
//!
//! It is also the journal of the migration: a run that was interrupted continues from it.

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::Path,
};

use anyhow::{Context, bail};
use serde::{Deserialize, Serialize};

use super::{migration_plan::MigrationPlan, tool::Tool};
use lockstep_core::object::{Meta, ObjectKey, names};

#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub struct UndoFile {
    pub tool: Tool,
    pub domain: String,
    /// The migration was carried out or taken back: nothing continues it.
    pub finished: bool,
    pub sources: Vec<SourceEntry>,
    pub namespaces: Vec<NamespaceEntry>,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub struct SourceEntry {
    #[serde(flatten)]
    pub object: ObjectEntry,
    /// The annotations of Lockstep that are written.
    pub written: BTreeMap<String, String>,
    /// What is adopted.
    pub copies: Vec<ObjectEntry>,
}

#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub struct ObjectEntry {
    #[serde(flatten)]
    pub key: ObjectKey,
    pub uid: String,
    /// The annotations of the tool that are removed.
    pub removed: BTreeMap<String, String>,
}

/// The `accept-adopt-from` of a Namespace: as it was, and while copies are adopted.
#[derive(Debug, PartialEq, Serialize, Deserialize)]
pub struct NamespaceEntry {
    pub name: String,
    pub uid: String,
    pub before: Option<String>,
    pub during: String,
}

impl ObjectEntry {
    pub fn new(key: &ObjectKey, meta: &Meta, tool: Tool) -> Self {
        Self { key: key.clone(), uid: meta.uid.clone(), removed: tool.annotations(meta) }
    }
}

impl UndoFile {
    pub fn new(tool: Tool, domain: &str, plan: MigrationPlan) -> Self {
        let sources = plan.moves.into_iter().map(|planned| planned.entry).collect();
        Self { tool, domain: domain.to_owned(), finished: false, sources, namespaces: plan.namespaces }
    }

    /// Reads a file, and checks every name in it: they become parts of URLs.
    pub fn read(path: &Path) -> anyhow::Result<Self> {
        let text = fs::read_to_string(path).with_context(|| format!("{} cannot be read", path.display()))?;
        let undo = serde_json::from_str::<Self>(&text).map_err(Into::into).and_then(Self::checked);
        undo.with_context(|| format!("{} is not an undo file of `lockstep migrate`", path.display()))
    }

    fn checked(self) -> anyhow::Result<Self> {
        let objects = self.sources.iter().flat_map(|source| source.copies.iter().chain([&source.object]));
        let is_valid = |key: &ObjectKey| names::is_label(&key.namespace) && names::is_subdomain(&key.name);
        if let Some(bad) = objects.map(|object| &object.key).find(|key| !is_valid(key)) {
            bail!("`{bad}` names no object");
        }
        if let Some(bad) = self.namespaces.iter().find(|namespace| !names::is_label(&namespace.name)) {
            bail!("`{}` names no namespace", bad.name);
        }
        Ok(self)
    }

    /// Writes a new file that only its owner can read. An existing one is never overwritten: it may be the only way
    /// back.
    pub fn create(&self, path: &Path) -> anyhow::Result<()> {
        let shown = path.display();
        match self.write_new(path) {
            Err(problem) if problem.kind() == io::ErrorKind::AlreadyExists => {
                bail!("{shown} exists already: choose another file with --undo-file")
            }
            written => written.with_context(|| format!("{shown} cannot be written")),
        }
    }

    /// Replaces the file by one that says that nothing is left to do.
    pub fn finish(&mut self, path: &Path) -> anyhow::Result<()> {
        self.finished = true;
        let new = path.with_added_extension("new");
        let _ = fs::remove_file(&new);
        let written = self.write_new(&new).and_then(|()| fs::rename(&new, path));
        written.with_context(|| format!("{} cannot be written", path.display()))
    }

    fn write_new(&self, path: &Path) -> io::Result<()> {
        let mut file: File = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
        serde_json::to_writer_pretty(&mut file, self)?;
        file.write_all(b"\n")?;
        file.sync_all()
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use super::*;
    use lockstep_core::{object::Kind, testing::TempDir};

    fn undo_file() -> UndoFile {
        let object = |namespace: &str| ObjectEntry {
            key: ObjectKey::new(Kind::Secret, namespace, "db"),
            uid: "u1".to_owned(),
            removed: BTreeMap::from([("replicator.v1.mittwald.de/replicate-to".to_owned(), "a".to_owned())]),
        };
        let source =
            SourceEntry { object: object("home"), written: BTreeMap::new(), copies: vec![object("a")] };
        let namespace = NamespaceEntry {
            name: "a".to_owned(),
            uid: "u2".to_owned(),
            before: None,
            during: "home".to_owned(),
        };
        UndoFile {
            tool: Tool::Replicator,
            domain: "workshop.io".to_owned(),
            finished: false,
            sources: vec![source],
            namespaces: vec![namespace],
        }
    }

    #[test]
    fn file_is_private_and_never_overwritten_until_it_is_finished() {
        let scratch = TempDir::new();
        let path = scratch.path().join("undo.json");
        let mut undo = undo_file();
        undo.create(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(UndoFile::read(&path).unwrap(), undo);
        let error = undo.create(&path).unwrap_err().to_string();
        assert!(error.contains("exists already") && error.contains("--undo-file"), "{error}");
        undo.finish(&path).unwrap();
        assert!(UndoFile::read(&path).unwrap().finished);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn file_of_something_else_or_with_names_that_are_none_is_refused() {
        let scratch = TempDir::new();
        let path = scratch.path().join("undo.json");
        let error = || format!("{:#}", UndoFile::read(&path).unwrap_err());
        fs::write(&path, "{}").unwrap();
        assert!(error().contains("is not an undo file of `lockstep migrate`"));
        let mut object = undo_file();
        object.sources[0].copies[0].key.name = "../x".into();
        let mut namespace = undo_file();
        namespace.namespaces[0].name = "a/b".to_owned();
        for (mut undo, expected) in
            [(object, "`a/../x` names no object"), (namespace, "`a/b` names no namespace")]
        {
            undo.finish(&path).unwrap();
            assert!(error().contains(expected));
        }
    }
}
