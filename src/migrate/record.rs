//! The undo file: what a migration changes, written before anything is changed. It has metadata only, never content.
//!
//! It is also the journal of the migration: a run that was interrupted continues from it.

use std::{
    collections::BTreeMap,
    fs::{self, File, OpenOptions},
    io::Write,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

use serde::{Deserialize, Serialize};

use super::{
    plan::{Acceptance, Move, Plan, Subject},
    tool::Tool,
};
use crate::object::{Kind, ObjectKey};

/// The format of the file.
const VERSION: u32 = 1;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    pub version: u32,
    pub tool: Tool,
    pub domain: String,
    pub state: State,
    pub sources: Vec<SourceEntry>,
    pub namespaces: Vec<NamespaceEntry>,
}

/// How far the migration is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    Begun,
    Done,
    Undone,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SourceEntry {
    #[serde(flatten)]
    pub object: ObjectEntry,
    /// The annotations of Lockstep that are written.
    pub written: BTreeMap<String, String>,
    pub copies: Vec<ObjectEntry>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ObjectEntry {
    pub kind: Kind,
    pub namespace: String,
    pub name: String,
    pub uid: String,
    /// The annotations of the tool that are removed.
    pub removed: BTreeMap<String, String>,
}

/// The `accept-adopt-from` of a Namespace: as it was, and while copies are adopted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NamespaceEntry {
    pub name: String,
    pub uid: String,
    pub before: Option<String>,
    pub during: String,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{path} exists already: choose another file with --undo-file")]
    Exists { path: PathBuf },
    #[error("{path} cannot be written: {problem}")]
    Write { path: PathBuf, problem: std::io::Error },
    #[error("{path} cannot be read: {problem}")]
    Read { path: PathBuf, problem: std::io::Error },
    #[error("{path} is not an undo file of `lockstep migrate`: {problem}")]
    Malformed { path: PathBuf, problem: String },
}

impl ObjectEntry {
    #[must_use]
    pub fn key(&self) -> ObjectKey {
        ObjectKey::new(self.kind, &self.namespace, &self.name)
    }
}

impl From<Subject> for ObjectEntry {
    fn from(subject: Subject) -> Self {
        let Subject { key, uid, theirs } = subject;
        let (namespace, name) = (key.namespace.to_string(), key.name.to_string());
        Self { kind: key.kind, namespace, name, uid, removed: theirs }
    }
}

impl Record {
    #[must_use]
    pub fn new(tool: Tool, domain: &str, plan: Plan) -> Self {
        let source = |Move { source, ours, copies, .. }: Move| SourceEntry {
            object: source.into(),
            written: ours,
            copies: copies.into_iter().map(ObjectEntry::from).collect(),
        };
        let namespace = |Acceptance { namespace, uid, before, during }: Acceptance| NamespaceEntry {
            name: namespace,
            uid,
            before,
            during,
        };
        Self {
            version: VERSION,
            tool,
            domain: domain.to_owned(),
            state: State::Begun,
            sources: plan.moves.into_iter().map(source).collect(),
            namespaces: plan.acceptances.into_iter().map(namespace).collect(),
        }
    }

    /// Reads a file, and checks every name in it: they become parts of URLs.
    pub fn read(path: &Path) -> Result<Self, Error> {
        let text =
            fs::read_to_string(path).map_err(|problem| Error::Read { path: path.to_owned(), problem })?;
        let malformed = |problem: String| Error::Malformed { path: path.to_owned(), problem };
        let record: Self = serde_json::from_str(&text).map_err(|error| malformed(error.to_string()))?;
        if record.version != VERSION {
            return Err(malformed(format!("its version is {}, this build knows {VERSION}", record.version)));
        }
        let objects = record.sources.iter().flat_map(|source| source.copies.iter().chain([&source.object]));
        let is_valid = |key: &ObjectKey| ObjectKey::parse(key.kind, &key.to_string()).as_ref() == Some(key);
        if let Some(bad) = objects.map(ObjectEntry::key).find(|key| !is_valid(key)) {
            return Err(malformed(format!("`{bad}` names no object")));
        }
        match record.namespaces.iter().find(|namespace| !crate::names::is_label(&namespace.name)) {
            Some(bad) => Err(malformed(format!("`{}` names no namespace", bad.name))),
            None => Ok(record),
        }
    }

    /// Writes a new file that only its owner can read. An existing one is never overwritten: it may be the only way back.
    pub fn create(&self, path: &Path) -> Result<(), Error> {
        self.write_new(path).map_err(|problem| match problem.kind() {
            std::io::ErrorKind::AlreadyExists => Error::Exists { path: path.to_owned() },
            _ => Error::Write { path: path.to_owned(), problem },
        })
    }

    /// Replaces the file by one that says how far the migration is.
    pub fn update(&mut self, path: &Path, state: State) -> Result<(), Error> {
        self.state = state;
        let mut name = path.as_os_str().to_owned();
        name.push(".new");
        let new = PathBuf::from(name);
        drop(fs::remove_file(&new));
        self.write_new(&new)
            .and_then(|()| fs::rename(&new, path))
            .map_err(|problem| Error::Write { path: path.to_owned(), problem })
    }

    fn write_new(&self, path: &Path) -> std::io::Result<()> {
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
    use crate::testing::TempDir;

    fn record() -> Record {
        let object = |namespace: &str| ObjectEntry {
            kind: Kind::Secret,
            namespace: namespace.to_owned(),
            name: "db".to_owned(),
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
        Record {
            version: VERSION,
            tool: Tool::Replicator,
            domain: "workshop.io".to_owned(),
            state: State::Begun,
            sources: vec![source],
            namespaces: vec![namespace],
        }
    }

    #[test]
    fn file_is_private_and_never_overwritten_and_its_state_can_change() {
        let scratch = TempDir::new();
        let path = scratch.path().join("undo.json");
        let mut record = record();
        record.create(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(Record::read(&path).unwrap(), record);
        let error = record.create(&path).unwrap_err().to_string();
        assert!(error.contains("exists already") && error.contains("--undo-file"), "{error}");
        record.update(&path, State::Done).unwrap();
        assert_eq!(Record::read(&path).unwrap().state, State::Done);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[test]
    fn file_of_another_version_or_with_names_that_are_none_is_refused() {
        let scratch = TempDir::new();
        let read = |record: &Record| {
            let path = scratch.path().join("undo.json");
            drop(fs::remove_file(&path));
            record.create(&path).unwrap();
            Record::read(&path).unwrap_err().to_string()
        };
        let mut other = record();
        other.version = 2;
        assert!(read(&other).contains("its version is 2, this build knows 1"));
        let mut other = record();
        other.sources[0].copies[0].name = "../x".to_owned();
        assert!(read(&other).contains("`a/../x` names no object"));
        let mut other = record();
        other.namespaces[0].name = "a/b".to_owned();
        assert!(read(&other).contains("`a/b` names no namespace"));
    }
}
