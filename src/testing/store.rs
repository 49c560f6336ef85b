//! What an API server stores, and what it refuses: objects with versions, UIDs, field managers and finalizers.
//!
//! Behaves as kube-apiserver does for ConfigMaps, Secrets and Namespaces, as far as Lockstep can tell. What is
//! validated only by syntax (names, labels) is not validated here.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    sync::Arc,
};

use json_patch::{Patch, PatchOperation};
use serde_json::Value;

use lockstep_core::{
    failure::Failure,
    object::{Kind, ManagedFields, Object, ObjectKey},
    testing::{CREATED, DELETED},
};

/// The label that the API server sets on every namespace.
const NAME_LABEL: &str = "kubernetes.io/metadata.name";

/// Where an object is.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Place {
    Namespace(Arc<str>),
    Object(ObjectKey),
}

/// One change of one object. A namespace is an object without content.
#[derive(Clone)]
pub struct Change {
    pub at: Place,
    pub before: Option<Arc<Object>>,
    pub after: Option<Arc<Object>>,
    pub version: u64,
}

/// All objects, as of one version. Cheap to clone.
#[derive(Clone, Default)]
pub struct Store {
    objects: BTreeMap<Place, Stored>,
    version: u64,
    /// Changes that nobody has taken yet.
    changes: Vec<Change>,
}

#[derive(Clone)]
struct Stored {
    object: Arc<Object>,
    /// The fields that each manager owns. A manager without fields has no entry.
    fields: Arc<BTreeMap<String, BTreeSet<Field>>>,
}

/// A field that a manager can own: a map or list, and an entry of it (`.` is the map itself).
type Field = (&'static str, String);

impl Place {
    /// The namespace that an object is in; of a namespace, itself.
    pub fn namespace(&self) -> &str {
        match self {
            Self::Namespace(name) => name,
            Self::Object(key) => &key.namespace,
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Namespace(name) => write!(f, "Namespace {name}"),
            Self::Object(key) => write!(f, "{} {key}", key.kind.as_str()),
        }
    }
}

impl Store {
    pub const fn version(&self) -> u64 {
        self.version
    }

    /// Something else in the cluster was written, or etcd was told to skip versions.
    pub const fn skip_versions(&mut self, count: u64) {
        self.version += count;
    }

    pub fn take_changes(&mut self) -> Vec<Change> {
        std::mem::take(&mut self.changes)
    }

    pub fn get(&self, at: &Place) -> Option<&Arc<Object>> {
        self.objects.get(at).map(|stored| &stored.object)
    }

    pub fn objects(&self) -> impl Iterator<Item = (&Place, &Arc<Object>)> {
        self.objects.iter().map(|(at, stored)| (at, &stored.object))
    }

    pub fn namespace(&self, name: &str) -> Option<&Arc<Object>> {
        self.get(&Place::Namespace(name.into()))
    }

    pub fn create(
        &mut self,
        at: &Place,
        mut object: Object,
        uid: String,
        manager: &str,
    ) -> Result<Arc<Object>, Failure> {
        if let Place::Object(key) = at {
            let namespace = self.namespace(&key.namespace).ok_or(Failure::NotFound)?;
            if namespace.metadata.is_terminating() {
                return Err(Failure::NamespaceTerminating);
            }
        }
        if self.objects.contains_key(at) {
            return Err(Failure::AlreadyExists);
        }
        let meta = &mut object.metadata;
        meta.uid = uid;
        meta.creation_timestamp = Some(CREATED.to_owned());
        meta.deletion_timestamp = None;
        normalise(at, &mut object);
        validate(None, &object)?;
        Ok(self.put(at, None, object, manager))
    }

    /// Replaces an object. With a version in `object`, only that version.
    pub fn replace(&mut self, at: &Place, object: Object, manager: &str) -> Result<Arc<Object>, Failure> {
        let before = self.objects.get(at).cloned().ok_or(Failure::NotFound)?;
        let version = &object.metadata.resource_version;
        if !version.is_empty() && *version != before.object.metadata.resource_version {
            return Err(Failure::Conflict);
        }
        self.update(at, before, object, manager)
    }

    pub fn patch(&mut self, at: &Place, operations: Patch, manager: &str) -> Result<Arc<Object>, Failure> {
        let before = self.objects.get(at).cloned().ok_or(Failure::NotFound)?;
        let mut object = Object::clone(&before.object);
        // The API server leaves out an empty map, and nothing can be added to what is not there.
        let maps = [&object.metadata.labels, &object.metadata.annotations];
        let mut exist = maps.map(|map| !map.is_empty());
        for operation in operations.0 {
            // The API server answers that the patch does not fit, which the client takes for a conflict.
            perform(&mut object, &mut exist, operation).ok_or(Failure::Conflict)?;
        }
        if object.metadata.resource_version != before.object.metadata.resource_version {
            return Err(Failure::Conflict);
        }
        self.update(at, before, object, manager)
    }

    /// Deletes an object; with preconditions, only with this UID and version. Finalizers delay it, and a namespace is
    /// only marked.
    pub fn delete(&mut self, at: &Place, only: Option<(&str, &str)>) -> Result<(), Failure> {
        let before = self.objects.get(at).cloned().ok_or(Failure::NotFound)?;
        let meta = &before.object.metadata;
        if only.is_some_and(|only| only != (&meta.uid, &meta.resource_version)) {
            return Err(Failure::Conflict);
        }
        if meta.is_terminating() {
            return Ok(());
        }
        if meta.finalizers.is_empty() && matches!(at, Place::Object(_)) {
            self.remove(at);
            return Ok(());
        }
        let mut object = Object::clone(&before.object);
        object.metadata.deletion_timestamp = Some(DELETED.to_owned());
        self.insert(at, Some(before.object), object, before.fields);
        Ok(())
    }

    /// Removes an object, whatever its finalizers say.
    pub fn remove(&mut self, at: &Place) {
        if let Some(stored) = self.objects.remove(at) {
            self.version += 1;
            let (before, version) = (Some(stored.object), self.version);
            self.changes.push(Change { at: at.clone(), before, after: None, version });
        }
    }

    fn update(
        &mut self,
        at: &Place,
        before: Stored,
        mut object: Object,
        manager: &str,
    ) -> Result<Arc<Object>, Failure> {
        let (old, new) = (&before.object.metadata, &mut object.metadata);
        // Nobody can change these.
        new.uid.clone_from(&old.uid);
        new.creation_timestamp.clone_from(&old.creation_timestamp);
        new.deletion_timestamp.clone_from(&old.deletion_timestamp);
        normalise(at, &mut object);
        validate(Some(&before.object), &object)?;
        if is_same(&before.object, &object) {
            return Ok(before.object);
        }
        Ok(self.put(at, Some(before), object, manager))
    }

    fn put(&mut self, at: &Place, before: Option<Stored>, mut object: Object, manager: &str) -> Arc<Object> {
        let (before, mut fields) = match before {
            Some(Stored { object, fields }) => (Some(object), BTreeMap::clone(&fields)),
            None => (None, BTreeMap::new()),
        };
        take_over(&mut fields, before.as_deref(), &object, manager);
        let entry = |manager: &String| ManagedFields { manager: manager.clone(), ..ManagedFields::default() };
        object.metadata.managed_fields = fields.keys().map(entry).collect();
        let meta = &object.metadata;
        if meta.is_terminating() && meta.finalizers.is_empty() && matches!(at, Place::Object(_)) {
            self.remove(at);
            // The update that removes the last finalizer returns the object once more.
            object.metadata.resource_version = self.version.to_string();
            return Arc::new(object);
        }
        self.insert(at, before, object, Arc::new(fields))
    }

    fn insert(
        &mut self,
        at: &Place,
        before: Option<Arc<Object>>,
        mut object: Object,
        fields: Arc<BTreeMap<String, BTreeSet<Field>>>,
    ) -> Arc<Object> {
        self.version += 1;
        object.metadata.resource_version = self.version.to_string();
        let object = Arc::new(object);
        self.objects.insert(at.clone(), Stored { object: object.clone(), fields });
        let (after, version) = (Some(object.clone()), self.version);
        self.changes.push(Change { at: at.clone(), before, after, version });
        object
    }
}

/// What the API server sets, and leaves out.
fn normalise(at: &Place, object: &mut Object) {
    let meta = &mut object.metadata;
    match at {
        Place::Namespace(name) => {
            meta.name = name.to_string();
            meta.labels.insert(NAME_LABEL.to_owned(), name.to_string());
        }
        Place::Object(key) => {
            meta.name = key.name.to_string();
            meta.namespace = key.namespace.to_string();
            object.binary_data = object.binary_data.take().filter(|_| key.kind == Kind::ConfigMap);
            object.type_ = match key.kind {
                Kind::ConfigMap => None,
                Kind::Secret => Some(object.type_.take().unwrap_or_else(|| "Opaque".to_owned())),
            };
        }
    }
    object.data = object.data.take().filter(|data| !data.is_empty());
    object.binary_data = object.binary_data.take().filter(|data| !data.is_empty());
}

/// An immutable object keeps its content, a Secret its type, an object that is being deleted gets no new finalizer, and
/// there is one controller at most.
fn validate(before: Option<&Object>, after: &Object) -> Result<(), Failure> {
    let invalid = |field: &str| Err(Failure::Invalid(field.to_owned()));
    let owners = &after.metadata.owner_references;
    if owners.iter().filter(|owner| owner.controller == Some(true)).count() > 1 {
        return invalid("metadata.ownerReferences");
    }
    let Some(before) = before else { return Ok(()) };
    if before.type_ != after.type_ {
        return invalid("type");
    }
    let content = |object: &Object| (object.data.clone(), object.binary_data.clone(), object.immutable);
    if before.immutable == Some(true) && content(before) != content(after) {
        return invalid("data");
    }
    let known = &before.metadata.finalizers;
    if before.metadata.is_terminating() && after.metadata.finalizers.iter().any(|name| !known.contains(name))
    {
        return invalid("metadata.finalizers");
    }
    Ok(())
}

/// Whether an update changes nothing, so that nothing is written.
fn is_same(before: &Object, after: &Object) -> bool {
    let (a, b) = (&before.metadata, &after.metadata);
    a.labels == b.labels
        && a.annotations == b.annotations
        && a.owner_references == b.owner_references
        && a.finalizers == b.finalizers
        && before.data == after.data
        && before.binary_data == after.binary_data
        && before.type_ == after.type_
        && before.immutable == after.immutable
}

/// A manager owns what it changes, and nobody owns what is gone.
fn take_over(
    fields: &mut BTreeMap<String, BTreeSet<Field>>,
    before: Option<&Object>,
    after: &Object,
    manager: &str,
) {
    let (mut changed, mut removed) = (Vec::new(), Vec::new());
    let none = BTreeMap::new();
    let mut compare = |name: &'static str, old: &BTreeMap<String, String>, new: &BTreeMap<String, String>| {
        if old == new {
            return;
        }
        let whole = || (name, ".".to_owned());
        match (old.is_empty(), new.is_empty()) {
            (true, false) => changed.push(whole()),
            (false, true) => removed.push(whole()),
            _ => {}
        }
        let new_entries = new.iter().filter(|(key, value)| old.get(*key) != Some(value));
        changed.extend(new_entries.map(|(key, _)| (name, key.clone())));
        let gone = old.keys().filter(|key| !new.contains_key(*key));
        removed.extend(gone.map(|key| (name, key.clone())));
    };
    let old = before.map(|before| &before.metadata);
    compare("labels", old.map_or(&none, |meta| &meta.labels), &after.metadata.labels);
    compare("annotations", old.map_or(&none, |meta| &meta.annotations), &after.metadata.annotations);
    let data = before.and_then(|before| before.data.as_ref());
    compare("data", data.unwrap_or(&none), after.data.as_ref().unwrap_or(&none));
    let binary = before.and_then(|before| before.binary_data.as_ref());
    compare("binaryData", binary.unwrap_or(&none), after.binary_data.as_ref().unwrap_or(&none));
    let scalars = |object: &Object| {
        let mut scalars = BTreeMap::new();
        let mut add = |key: &str, value: String| drop(scalars.insert(key.to_owned(), value));
        object.type_.iter().for_each(|type_| add("type", type_.clone()));
        object.immutable.iter().for_each(|immutable| add("immutable", immutable.to_string()));
        object.metadata.finalizers.iter().for_each(|name| add(name, String::new()));
        object.metadata.owner_references.iter().for_each(|owner| add(&owner.uid, owner.name.clone()));
        scalars
    };
    let old = before.map_or_else(BTreeMap::new, scalars);
    compare("other", &old, &scalars(after));
    if changed.is_empty() && removed.is_empty() {
        return;
    }
    for owned in fields.values_mut() {
        changed.iter().chain(&removed).for_each(|field| _ = owned.remove(field));
    }
    fields.entry(manager.to_owned()).or_default().extend(changed);
    fields.retain(|_, owned| !owned.is_empty());
}

/// Carries out one operation of a JSON patch. None if it does not fit.
/// `exist` says whether there are labels and annotations.
fn perform(object: &mut Object, exist: &mut [bool; 2], operation: PatchOperation) -> Option<()> {
    let tokens = |path: &json_patch::jsonptr::PointerBuf| -> Vec<String> {
        path.tokens().map(|token| token.decoded().into_owned()).collect()
    };
    match operation {
        PatchOperation::Replace(operation) => {
            let path = tokens(&operation.path);
            assert_eq!(path, ["metadata", "resourceVersion"], "the store cannot replace this");
            operation.value.as_str()?.clone_into(&mut object.metadata.resource_version);
        }
        PatchOperation::Add(operation) => {
            let path = tokens(&operation.path);
            let path: Vec<&str> = path.iter().map(String::as_str).collect();
            add(object, exist, &path, operation.value)?;
        }
        PatchOperation::Remove(operation) => {
            let path = tokens(&operation.path);
            let path: Vec<&str> = path.iter().map(String::as_str).collect();
            match path[..] {
                ["metadata", "labels", key] => drop(object.metadata.labels.remove(key)?),
                ["metadata", "annotations", key] => drop(object.metadata.annotations.remove(key)?),
                ["metadata", "ownerReferences", position] => {
                    let (owners, position) = (&mut object.metadata.owner_references, position.parse().ok()?);
                    (owners.len() > position).then(|| owners.remove(position))?;
                }
                _ => panic!("the store cannot remove {path:?}"),
            }
        }
        other => panic!("the store does not know the operation {other:?}"),
    }
    Some(())
}

fn add(object: &mut Object, exist: &mut [bool; 2], path: &[&str], value: Value) -> Option<()> {
    let meta = &mut object.metadata;
    let [labels, annotations] = exist;
    match *path {
        ["metadata", "labels"] => {
            meta.labels = serde_json::from_value(value).ok()?;
            *labels = true;
        }
        ["metadata", "annotations"] => {
            meta.annotations = serde_json::from_value(value).ok()?;
            *annotations = true;
        }
        ["metadata", "labels", key] if *labels => {
            meta.labels.insert(key.to_owned(), value.as_str()?.to_owned());
        }
        ["metadata", "annotations", key] if *annotations => {
            meta.annotations.insert(key.to_owned(), value.as_str()?.to_owned());
        }
        ["metadata", "labels" | "annotations", _] => return None,
        ["metadata", "ownerReferences"] => meta.owner_references = serde_json::from_value(value).ok()?,
        ["metadata", "finalizers"] => meta.finalizers = serde_json::from_value(value).ok()?,
        ["data"] => object.data = serde_json::from_value(value).ok()?,
        ["binaryData"] => object.binary_data = serde_json::from_value(value).ok()?,
        ["immutable"] => object.immutable = serde_json::from_value(value).ok()?,
        _ => panic!("the store cannot add {path:?}"),
    }
    Some(())
}
