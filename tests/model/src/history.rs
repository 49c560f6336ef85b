//! What people do to a cluster: a list of steps that can be printed, parsed and replayed.

use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::{
    names::Names,
    object::{Key, Object, Owner, Strings},
};

/// A list of steps, and the seed that they were made from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct History {
    pub seed: u64,
    pub names: Names,
    pub steps: Vec<Step>,
}

/// Somebody does something to one object.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    pub by: Actor,
    pub at: Key,
    pub op: Op,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Actor {
    /// Exempt from the webhook: everything that the API server itself allows.
    Exempt,
    /// May do anything by RBAC; the webhook reviews it.
    Admin,
    /// May write ConfigMaps and Secrets in the namespace `home` only.
    Tenant,
    /// Writes sources on behalf of others (`--deputy-user`); may write ConfigMaps and Secrets everywhere by RBAC.
    Deputy,
}

/// What is done to the object of a step.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Op {
    /// Creates it, or replaces all that people own of it (labels, annotations, content); finalizers stay.
    Put(Draft),
    /// Deletes it, if it exists, and creates it again at once.
    Recreate(Draft),
    /// Creates it, unless an object is there.
    Create(Draft),
    /// Changes parts of it, if it exists.
    Edit(Vec<Edit>),
    /// Deletes it, if it exists.
    Delete,
}

/// What people write of an object.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Draft {
    #[serde(default, skip_serializing_if = "Strings::is_empty")]
    pub labels: Strings,
    #[serde(default, skip_serializing_if = "Strings::is_empty")]
    pub annotations: Strings,
    #[serde(default, skip_serializing_if = "Strings::is_empty")]
    pub data: Strings,
    #[serde(default, skip_serializing_if = "Strings::is_empty")]
    pub binary_data: Strings,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub type_: Option<String>,
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub immutable: bool,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub finalizers: Vec<String>,
    /// It is controlled by an object that does not exist, of a kind that the garbage collector does not know.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub controlled: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub enum Edit {
    Label(String, Option<String>),
    Annotation(String, Option<String>),
    Data(String, Option<String>),
    BinaryData(String, Option<String>),
    Immutable,
    ClearAnnotations,
    ClearOwners,
    /// Another controller owns it now.
    Controller,
    Finalizer(String),
    ClearFinalizers,
}

/// A request to the API server for the object of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Write {
    Create(Object),
    /// `version` is that of the object that it was computed from.
    Replace(Object),
    Delete,
}

impl Step {
    /// The requests for this step, given the object that is there now. The API server may refuse them.
    #[must_use]
    pub fn writes(&self, now: Option<&Object>) -> Vec<Write> {
        match (&self.op, now) {
            (Op::Put(draft) | Op::Create(draft) | Op::Recreate(draft), None) => {
                vec![Write::Create(draft.object())]
            }
            (Op::Put(draft), Some(now)) => {
                let draft = draft.object();
                let mut object = Object {
                    labels: draft.labels,
                    annotations: draft.annotations,
                    data: draft.data,
                    binary_data: draft.binary_data,
                    immutable: draft.immutable,
                    ..now.clone()
                };
                // The namespace controller's label is not ours to remove.
                let own = "kubernetes.io/metadata.name";
                if let Some(name) = now.labels.get(own) {
                    object.labels.insert(own.to_owned(), name.clone());
                }
                vec![Write::Replace(object)]
            }
            (Op::Recreate(draft), Some(_)) => vec![Write::Delete, Write::Create(draft.object())],
            (Op::Edit(edits), Some(now)) => {
                let mut object = now.clone();
                edits.iter().for_each(|edit| edit.perform(&mut object));
                vec![Write::Replace(object)]
            }
            (Op::Delete, Some(_)) => vec![Write::Delete],
            (Op::Create(_), Some(_)) | (Op::Edit(_) | Op::Delete, None) => Vec::new(),
        }
    }
}

impl Draft {
    fn object(&self) -> Object {
        Object {
            labels: self.labels.clone(),
            annotations: self.annotations.clone(),
            data: self.data.clone(),
            binary_data: self.binary_data.clone(),
            type_: self.type_.clone(),
            immutable: self.immutable,
            finalizers: self.finalizers.clone(),
            owners: if self.controlled { vec![other_controller()] } else { Vec::new() },
            ..Object::default()
        }
    }
}

/// The garbage collector does not know this kind, so it leaves the object alone.
fn other_controller() -> Owner {
    Owner {
        kind: "ReplicaSet".to_owned(),
        name: "another".to_owned(),
        uid: "another-uid".to_owned(),
        controller: true,
    }
}

impl Edit {
    fn perform(&self, object: &mut Object) {
        let set = |map: &mut Strings, key: &String, value: &Option<String>| match value {
            Some(value) => drop(map.insert(key.clone(), value.clone())),
            None => drop(map.remove(key)),
        };
        match self {
            Self::Label(key, value) => set(&mut object.labels, key, value),
            Self::Annotation(key, value) => set(&mut object.annotations, key, value),
            Self::Data(key, value) => set(&mut object.data, key, value),
            Self::BinaryData(key, value) => set(&mut object.binary_data, key, value),
            Self::Immutable => object.immutable = true,
            Self::ClearAnnotations => object.annotations.clear(),
            Self::ClearOwners => object.owners.clear(),
            Self::Controller => object.owners = vec![other_controller()],
            Self::Finalizer(name) if !object.finalizers.contains(name) => {
                object.finalizers.push(name.clone())
            }
            Self::Finalizer(_) => {}
            Self::ClearFinalizers => object.finalizers.clear(),
        }
    }
}

impl std::fmt::Display for History {
    /// One line of JSON with seed and names, then one for each step: [`History::parse`] reads it.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "{}", json!([self.seed, self.names]))?;
        self.steps.iter().try_for_each(|step| writeln!(f, "{}", json!(step)))
    }
}

impl History {
    /// Reads what `Display` prints. The error names the line that cannot be read.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut lines = text.lines().filter(|line| !line.trim().is_empty()).enumerate();
        let bad = |number: usize, error: serde_json::Error| format!("line {}: {error}", number + 1);
        let (number, first) = lines.next().ok_or("an empty history")?;
        let (seed, names) = serde_json::from_str(first).map_err(|error| bad(number, error))?;
        let steps =
            lines.map(|(number, line)| serde_json::from_str(line).map_err(|error| bad(number, error)));
        Ok(Self { seed, names, steps: steps.collect::<Result<_, _>>()? })
    }
}
