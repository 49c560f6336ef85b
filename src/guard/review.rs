//! PURE. An admission request and the world in, a verdict out.
//!
//! What a verdict asks about the rights of the user is for [`super::access`] to find out: it is no part of the world.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::denial::Denial;
use crate::{
    keys::Keys,
    object::{Kind, Meta, Object, ObjectKey},
    plan::{plan, targets},
    policy::{Fault, MAX_NAMES, Policy, Protect},
    world::state::{Admission, World},
};

/// Who sends a request, as the API server tells it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct User {
    pub name: String,
    pub uid: String,
    pub groups: Vec<String>,
    pub extra: BTreeMap<String, Vec<String>>,
}

/// What somebody wants to do to one ConfigMap or Secret.
pub struct Request {
    pub kind: Kind,
    pub namespace: String,
    pub user: User,
    pub change: Change,
}

// One at a time, and never moved far.
#[allow(clippy::large_enum_variant)]
pub enum Change {
    Create {
        new: Object,
    },
    /// `idle`: nothing differs but managedFields.
    Update {
        old: Object,
        new: Object,
        idle: bool,
    },
    Delete {
        old: Object,
    },
}

/// Users and groups, by name.
#[derive(Debug, Clone, Default)]
pub struct People {
    pub users: Vec<String>,
    pub groups: Vec<String>,
}

/// What the guard goes by.
#[derive(Debug, Clone)]
pub struct Rules {
    pub keys: Arc<Keys>,
    /// It holds no sources.
    pub own_namespace: String,
    /// Whom nothing is refused: ourselves, and whoever was named by a flag.
    pub exempt: People,
    /// Who acts for others, so that their own rights count for nothing.
    pub deputies: People,
    pub default_targets: String,
    pub default_protect: Protect,
}

/// What becomes of a request: first `ask`, and if that is granted, `denial`.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Verdict {
    pub ask: Option<Reach>,
    pub denial: Option<Denial>,
    pub warnings: Vec<String>,
}

/// What the mirror would do on behalf of a user: they must be allowed all of it themselves.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Reach {
    /// By the companion's name, in whatever namespace a prefix or a selector may ever match.
    pub wide: BTreeMap<String, Verbs>,
    /// By namespace and name.
    pub places: BTreeMap<(String, String), Verbs>,
}

/// What is done to a companion.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Verbs {
    Delete,
    /// Create, update and delete.
    All,
}

/// The clean-up that Kubernetes does itself. It has one identity where its controllers have none of their own.
const CLEANERS: [&str; 3] = [
    "system:serviceaccount:kube-system:generic-garbage-collector",
    "system:serviceaccount:kube-system:namespace-controller",
    "system:kube-controller-manager",
];

/// A request, and what its objects ask for as sources. They may be large: they are read and compared before the world
/// is looked at, which others wait for.
pub struct Case<'a> {
    rules: &'a Rules,
    request: &'a Request,
    before: Option<Side<'a>>,
    after: Option<Side<'a>>,
    /// Something of ours on the object is not as it was.
    ours_changed: bool,
    /// Nothing changes that reaches companions.
    alike: bool,
}

/// A source as one side of a request shows it.
struct Side<'a> {
    object: &'a Object,
    policy: Result<Policy, Fault>,
}

impl<'a> Case<'a> {
    /// `None` for what passes whatever the world is like.
    #[must_use]
    pub fn read(rules: &'a Rules, request: &'a Request) -> Option<Self> {
        if rules.exempt.include(&request.user) || CLEANERS.contains(&&*request.user.name) {
            return None;
        }
        let (old, new) = match &request.change {
            Change::Create { new } => (None, Some(new)),
            Change::Update { idle: true, .. } => return None,
            Change::Update { old, new, .. } => (Some(old), Some(new)),
            Change::Delete { old } => (Some(old), None),
        };
        let keys = &*rules.keys;
        let side = |object: &'a Object| {
            let policy = || Policy::of(keys, &rules.own_namespace, &request.key(object), object);
            keys.is_source(&object.metadata.labels).then(|| Side { object, policy: policy() })
        };
        let (before, after) = (old.and_then(side), new.and_then(side));
        let (ours_changed, alike) = match (&before, &after) {
            (Some(before), Some(after)) => (
                !same_keys(keys, &before.object.metadata, &after.object.metadata),
                before.means_the_same(keys, after),
            ),
            _ => (true, false),
        };
        Some(Self { rules, request, before, after, ours_changed, alike })
    }

    /// Judges a request.
    #[must_use]
    pub fn judge(&self, world: &World) -> Verdict {
        let Self { rules, request, .. } = self;
        let court = Court { case: self, rules, world, request, keys: &rules.keys };
        match &request.change {
            Change::Create { new } => court.create(new),
            Change::Update { old, new, .. } => court.update(old, new),
            Change::Delete { old } => court.delete(old),
        }
    }
}

struct Court<'a> {
    case: &'a Case<'a>,
    rules: &'a Rules,
    world: &'a World,
    request: &'a Request,
    keys: &'a Keys,
}

impl Court<'_> {
    fn create(&self, new: &Object) -> Verdict {
        let at = self.request.key(new);
        if self.keys.has_marks(&new.metadata) {
            return Verdict::deny(Denial::Forged { at });
        }
        if let Some(source) = self.world.claimant(&at, None) {
            return Verdict::deny(Denial::Squatting { at, of: source });
        }
        self.source()
    }

    fn update(&self, old: &Object, new: &Object) -> Verdict {
        let edit = match self.companion_of(old) {
            Some(source) => self.edit(old, new, source),
            None if self.gains_marks(&old.metadata, &new.metadata) => {
                Verdict::deny(Denial::Forged { at: self.request.key(new) })
            }
            None => Verdict::default(),
        };
        if edit.denial.is_some() {
            return edit;
        }
        // Where a companion may be edited, it may be turned into a source: that takes the rights that any source takes.
        let mut verdict = self.source();
        verdict.warnings.splice(..0, edit.warnings);
        verdict
    }

    fn delete(&self, old: &Object) -> Verdict {
        let Some(source) = self.companion_of(old) else { return self.source() };
        if self.world.is_terminating(&self.request.namespace) || old.metadata.is_terminating() {
            return Verdict::default();
        }
        let at = self.request.key(old);
        match self.protection(old, &source) {
            Protect::All => Verdict::deny(Denial::Delete { at, of: source }),
            // Nobody brings it back.
            _ if self.world.source(&source).is_none() => Verdict::default(),
            Protect::Edits | Protect::None => Verdict::warn(format!(
                "{at} is a companion: Lockstep creates it again for as long as {source} wants it"
            )),
        }
    }

    // --- companions

    /// Whose companion an object is. One that bears our label and nothing else is nobody's.
    fn companion_of(&self, object: &Object) -> Option<ObjectKey> {
        let meta = &object.metadata;
        if !meta.labels.contains_key(&self.keys.companion) {
            return None;
        }
        let known = self.world.companion(&self.request.key(object)).filter(|known| known.uid == meta.uid);
        known
            .and_then(|known| known.source.clone())
            .or_else(|| ObjectKey::parse(self.request.kind, meta.annotations.get(&self.keys.source)?))
    }

    fn edit(&self, old: &Object, new: &Object, source: ObjectKey) -> Verdict {
        if self.world.is_terminating(&self.request.namespace) {
            return Verdict::default();
        }
        let at = self.request.key(old);
        // Its marks are never anybody else's to write: they tell the mirror whose it is.
        if self.protection(old, &source) == Protect::None && !self.gains_marks(&old.metadata, &new.metadata) {
            return Verdict::warn(format!("{at} is a companion: Lockstep makes it equal to {source} again"));
        }
        if new.metadata.labels.contains_key(&self.keys.companion) {
            Verdict::deny(Denial::Edit { at, of: source })
        } else {
            Verdict::deny(Denial::Strip { at, of: source })
        }
    }

    /// The source says how its companions are protected; what stands on a companion is a copy of that.
    fn protection(&self, companion: &Object, source: &ObjectKey) -> Protect {
        let policy = self.world.source(source).and_then(|source| source.wish.as_ref().ok());
        let copied = || companion.metadata.annotations.get(&self.keys.protect)?.parse().ok();
        policy.map(|wish| wish.policy.protect).or_else(copied).unwrap_or_default()
    }

    /// Whether a mark is put on an object, or changed. That some of them were there counts for nothing: annotations of
    /// what bears no label of ours are written without anybody being asked.
    fn gains_marks(&self, old: &Meta, new: &Meta) -> bool {
        let gains = |old: &BTreeMap<String, String>, new: &BTreeMap<String, String>, key: &str| {
            new.contains_key(key) && new.get(key) != old.get(key)
        };
        gains(&old.labels, &new.labels, &self.keys.companion)
            || self.keys.source_annotations().iter().any(|key| gains(&old.annotations, &new.annotations, key))
    }

    // --- sources

    /// Judges what becomes of a source: made, changed, or no source any more.
    fn source(&self) -> Verdict {
        let Case { before, after, ours_changed, alike, .. } = self.case;
        let Some(side) = after.as_ref().or(before.as_ref()) else { return Verdict::default() };
        // Its end has been reviewed, and nothing is written for it until then.
        if before.as_ref().is_some_and(|before| before.object.metadata.is_terminating()) {
            return Verdict::default();
        }
        let key = self.request.key(side.object);
        let mut verdict = Verdict::default();
        match after.as_ref().map(|after| &after.policy) {
            Some(Err(fault)) if *ours_changed => {
                return Verdict::deny(Denial::Fault { at: key, fault: fault.clone() });
            }
            Some(Ok(policy)) if *ours_changed => self.names(&key, policy, &mut verdict),
            // What the mirror will find, on whichever replica it runs. Whether companions are settled changes no trouble.
            Some(Ok(_)) => {
                verdict
                    .warnings
                    .extend(plan(self.world, &key, false).troubles.iter().map(ToString::to_string));
            }
            Some(Err(_)) | None => {}
        }
        if *alike {
            return verdict;
        }
        let reach = self.reach(&key);
        if self.rules.deputies.include(&self.request.user) {
            match reach.first() {
                None => verdict,
                Some(namespace) => Verdict::deny(Denial::Deputy {
                    user: self.request.user.name.clone(),
                    home: key.namespace.to_string(),
                    namespace,
                }),
            }
        } else {
            verdict.ask = (!reach.is_empty()).then_some(reach);
            verdict
        }
    }

    /// Whether the places a source asks for are free, and may be targets at all.
    fn names(&self, key: &ObjectKey, policy: &Policy, verdict: &mut Verdict) {
        let home = &*key.namespace;
        for target in targets(self.world, home, &policy.targets) {
            verdict.warnings.extend(target.trouble(home).map(|trouble| trouble.to_string()));
            match target.admission {
                Admission::Admitted => {}
                Admission::Absent if target.outright => {
                    verdict.warnings.push(format!(
                        "namespace {} does not exist (yet): no companion there",
                        target.namespace
                    ));
                    continue;
                }
                _ => continue,
            }
            let at = ObjectKey::new(key.kind, target.namespace, &policy.companion);
            match self.world.claimant(&at, Some(key)) {
                None => {}
                Some(other) if other.namespace == key.namespace => verdict
                    .warnings
                    .push(format!("{at} belongs to {other}: it is handed over when that one lets go of it")),
                Some(other) => {
                    verdict.denial = Some(Denial::Taken { at, of: other });
                    return;
                }
            }
        }
    }

    /// Everything that the mirror would do, or undo, because of this change.
    fn reach(&self, key: &ObjectKey) -> Reach {
        let mut reach = Reach::default();
        for (side, verbs) in [(&self.case.before, Verbs::Delete), (&self.case.after, Verbs::All)] {
            let Some(Side { policy: Ok(policy), .. }) = side else { continue };
            if !policy.targets.prefixes.is_empty() || policy.targets.selector.is_some() {
                reach.widen(&policy.companion, verbs);
            }
            let own = policy.targets.own.then(|| key.namespace.to_string());
            for namespace in policy.targets.names.iter().cloned().chain(own) {
                reach.add(namespace, &policy.companion, verbs);
            }
        }
        // What there is from an earlier policy, or an earlier source of that name, goes, too, unless it is going anyway.
        let strays: BTreeSet<&ObjectKey> = self
            .world
            .companions_of(key)
            .filter(|(at, found)| !found.terminating && !self.world.is_terminating(&at.namespace))
            .map(|(at, _)| at)
            .filter(|at| !reach.covers(at))
            .collect();
        let many = strays.len() > MAX_NAMES;
        for at in strays {
            if many {
                reach.widen(&at.name, Verbs::Delete);
            } else {
                reach.add(at.namespace.to_string(), &at.name, Verbs::Delete);
            }
        }
        // An invitation is for others: to its own people a namespace gives rights by name. A deputy has none that count.
        let deputy = self.rules.deputies.include(&self.request.user);
        let invited = |namespace: &str| {
            (deputy || *namespace != *key.namespace) && self.world.invites(&key.namespace, namespace)
        };
        reach.places.retain(|(namespace, _), _| !invited(namespace));
        reach
    }
}

impl Side<'_> {
    /// Whether a change leaves everything alone that reaches companions, now or when the source goes.
    fn means_the_same(&self, keys: &Keys, other: &Self) -> bool {
        let (a, b) = (&self.object.metadata, &other.object.metadata);
        let wishes = || match (&self.policy, &other.policy) {
            (Ok(before), Ok(after)) => {
                before == after && after.same_companion(keys, self.object, other.object)
            }
            // Neither reaches anything.
            (Err(_), Err(_)) => true,
            _ => false,
        };
        a.owner_references == b.owner_references && a.finalizers == b.finalizers && wishes()
    }
}

/// Whether everything of ours on an object is as it was.
fn same_keys(keys: &Keys, old: &Meta, new: &Meta) -> bool {
    let same = |old: &BTreeMap<String, String>, new: &BTreeMap<String, String>| {
        let ours = |(key, _): &(&String, &String)| keys.is_ours(key);
        old.iter().filter(ours).eq(new.iter().filter(ours))
    };
    same(&old.labels, &new.labels) && same(&old.annotations, &new.annotations)
}

impl Request {
    fn key(&self, object: &Object) -> ObjectKey {
        ObjectKey::new(self.kind, &self.namespace, &object.metadata.name)
    }
}

impl Reach {
    fn widen(&mut self, name: &str, verbs: Verbs) {
        let entry = self.wide.entry(name.to_owned()).or_insert(verbs);
        *entry = verbs.max(*entry);
    }

    fn add(&mut self, namespace: String, name: &str, verbs: Verbs) {
        let entry = self.places.entry((namespace, name.to_owned())).or_insert(verbs);
        *entry = verbs.max(*entry);
    }

    fn covers(&self, at: &ObjectKey) -> bool {
        self.wide.contains_key(&*at.name)
            || self.places.contains_key(&(at.namespace.to_string(), at.name.to_string()))
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.wide.is_empty() && self.places.is_empty()
    }

    /// One namespace of it; `None` within if it is any that a pattern matches.
    fn first(&self) -> Option<Option<String>> {
        if self.wide.is_empty() {
            self.places.keys().next().map(|(namespace, _)| Some(namespace.clone()))
        } else {
            Some(None)
        }
    }
}

impl User {
    /// How many bytes there are in it.
    #[must_use]
    pub fn weight(&self) -> usize {
        let extra = self.extra.iter().flat_map(|(key, values)| std::iter::once(key).chain(values));
        let texts = [&self.name, &self.uid].into_iter().chain(&self.groups).chain(extra);
        texts.map(|text| size_of::<String>() + text.len()).sum()
    }
}

impl People {
    #[must_use]
    pub fn include(&self, user: &User) -> bool {
        self.users.contains(&user.name) || user.groups.iter().any(|group| self.groups.contains(group))
    }
}

impl Verdict {
    fn deny(denial: Denial) -> Self {
        Self { denial: Some(denial), ..Self::default() }
    }

    fn warn(warning: String) -> Self {
        Self { warnings: vec![warning], ..Self::default() }
    }
}

#[cfg(test)]
mod tests;
