//! An admission request and the world in, a verdict out.
//!
//! The world does not contain the rights of users: a verdict names the access that it depends on, and `webhook::access`
//! in the binary checks it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use super::{
    admission_request::{Operation, Request, Subjects, User},
    denial::{AskConsent, Denial, DenialPlace, DeniedPlace},
    required_access::{Access, AccessError, RequiredAccess, Verbs},
    restore::Restored,
};
use crate::{
    keys::Keys,
    object::{Meta, Object, ObjectKey},
    plan::{Decision, plan_companion, targets, unmatched},
    policy::{Fault, Policy, Protect, WhenRemoved, defaults::Defaults, list::MAX_ITEMS, mistake::Mistake},
    text::some_of,
    world::{Eligibility, World},
};

/// How many companions of other sources a warning names.
const MAX_NAMED_CONFLICTS: usize = 3;

/// The webhook's configuration.
#[derive(Debug, Clone)]
pub struct Rules {
    pub keys: Arc<Keys>,
    /// Lockstep's own namespace, which has no sources.
    pub own_namespace: String,
    /// Lockstep itself, and the users and groups that flags exempt: the webhook allows all their requests.
    pub exempt: Subjects,
    /// Users and groups that write on behalf of others, so that their own rights do not count.
    pub deputies: Subjects,
    pub default_targets: String,
    pub default_protect: Protect,
}

/// The decision about a request. The variants are in the order in which they are decided.
#[derive(Debug, PartialEq)]
pub enum Verdict {
    /// Denied whatever the user's rights are: a protected companion, forged marks, a malformed source, a
    /// deputy.
    Deny(Denial),
    /// Denied unless the user has the required access. With that access, `then` decides: allowed with
    /// warnings, or denied after all. It may name sources in other namespaces, so a user without the
    /// required access must not see it; and it may look at every namespace, so nobody without that access
    /// must cause it.
    CheckAccess {
        required: RequiredAccess,
        then: Claims,
    },
    /// Denied with `otherwise`, unless it is certain that this is the user, the user may read the source, and this is
    /// what the controller would write.
    CheckRestore {
        restored: Box<Restored>,
        otherwise: Denial,
    },
    Allow {
        warnings: Vec<String>,
    },
}

/// What a source asks for, to be decided once it is known that its author may. Without content: the check of the
/// access may take seconds.
#[derive(Debug, Clone, PartialEq)]
pub struct Claims {
    key: ObjectKey,
    /// None if the source keeps its settings.
    new_policy: Option<Box<Policy>>,
    ask_consent: AskConsent,
    /// About the object as a companion.
    warnings: Vec<String>,
    /// See [`Review::default_targets`].
    default_targets: bool,
}

impl Verdict {
    pub const ALLOWED: Self = Self::Allow { warnings: Vec::new() };
}

/// A request, and what its object asks for as a source before and after it. Objects may be large: they are
/// parsed and compared here, before the lock on the world is taken.
pub struct Review<'a> {
    rules: &'a Rules,
    request: &'a Request,
    key: ObjectKey,
    /// None if the object was no source before the request.
    before: Option<Result<Policy, Fault>>,
    /// None if the object is no source after the request.
    after: Option<Result<Policy, Fault>>,
    /// The object was a source that was being deleted already.
    terminating: bool,
    /// The request changes labels or annotations of Lockstep's domain.
    settings_changed: bool,
    /// Companions stay as they are, now and when the source is deleted.
    companions_unaffected: bool,
    /// What its author should know about the object as it will be.
    warnings: Vec<String>,
    /// The source names no targets, and default ones are stamped on it or were so before the request.
    default_targets: bool,
    /// The object, if it may be a companion from a backup.
    restored: Option<Restored>,
}

impl<'a> Review<'a> {
    /// `None` for a request that is allowed whatever the state of the world.
    pub fn read(rules: &'a Rules, request: &'a Request) -> Option<Self> {
        let user = &request.user;
        if rules.exempt.contain(user) || user.is_kubernetes_cleanup() || request.changes_nothing() {
            return None;
        }
        let (old, new) = request.objects();
        let keys = &*rules.keys;
        let key = request.key(new.or(old)?);
        let policy = |object: &Object| Policy::of(keys, &rules.own_namespace, &key, object);
        let source = |object: &&Object| keys.is_source(&object.metadata.labels);
        let before = old.filter(source).map(policy);
        let after = new.filter(source).map(policy);
        let (settings_changed, companions_unaffected) =
            match (old.zip(before.as_ref()), new.zip(after.as_ref())) {
                (Some((old, before)), Some((new, after))) => (
                    !old.metadata.has_same_marks(&new.metadata, |key| {
                        // What is stamped on a source that was and stays faulty is not a change by its author.
                        let is_stamped = key == keys.defaults && before.is_err() && after.is_err();
                        keys.is_ours(key) && !is_stamped
                    }),
                    same_companions(keys, (old, before), (new, after)),
                ),
                _ => (true, false),
            };
        let terminating = before.is_some() && old.is_some_and(|old| old.metadata.is_terminating());
        let stamped = |object: &Object| Defaults::stamped(keys, &object.metadata).has_targets();
        let default_targets = new.filter(source).is_some_and(|new| !keys.sets_targets(&new.metadata))
            && [old, new].into_iter().flatten().any(stamped);
        let restored = new
            .filter(|_| !rules.deputies.contain(&request.user))
            .and_then(|new| Restored::read(keys, &key, old, new));
        let mut review = Self {
            rules,
            request,
            key,
            before,
            after,
            terminating,
            settings_changed,
            companions_unaffected,
            warnings: Vec::new(),
            default_targets,
            restored,
        };
        review.warnings = new.map_or_else(Vec::new, |new| review.warnings_about(&new.metadata));
        Some(review)
    }

    /// What the author should know about the object as it will be.
    fn warnings_about(&self, new: &Meta) -> Vec<String> {
        let keys = self.keys();
        let key = &self.key;
        match &self.after {
            Some(Ok(policy)) => {
                let mistakes =
                    if self.settings_changed { Mistake::on_source(keys, new, policy) } else { Vec::new() };
                let paused = (policy.paused && !self.companions_unaffected).then(|| {
                    let paused = &keys.paused;
                    format!("{key} is paused: its companions do not follow until the annotation {paused} is removed")
                });
                mistakes.iter().map(ToString::to_string).chain(paused).collect()
            }
            Some(Err(fault)) => {
                vec![format!("{key} cannot be a source: {fault}; its companions stay as they are")]
            }
            None => {
                let companions = match &self.before {
                    Some(Ok(policy)) if policy.when_removed == WhenRemoved::Keep => {
                        ": Lockstep leaves its companions to their namespaces"
                    }
                    Some(_) => ": its companions are deleted",
                    None => "",
                };
                let warning = |value: &String| {
                    let managed = &keys.managed;
                    format!(
                        "the label {managed} is `{value}`, and only `true` makes {key} a source{companions}"
                    )
                };
                new.labels.get(&keys.managed).map(warning).into_iter().collect()
            }
        }
    }

    /// Whether the object is a source, before or after the request.
    pub const fn is_about_a_source(&self) -> bool {
        self.before.is_some() || self.after.is_some()
    }

    pub fn judge(&self, world: &World) -> Verdict {
        let verdict = match &self.request.operation {
            Operation::Create { new } => self.create(world, new),
            Operation::Update { old, new } => self.update(world, old, new),
            Operation::Delete { old } => self.delete(world, old),
        };
        verdict.unwrap_or_else(Verdict::Deny)
    }

    fn create(&self, world: &World, new: &Object) -> Result<Verdict, Denial> {
        let at = || self.key.clone();
        if self.keys().has_marks(&new.metadata) {
            return self.restore(world, None, Denial::Forged { at: at() });
        }
        if let Some(of) = world.competing_source(&self.key, None) {
            return Err(Denial::NameNeeded { at: at(), of });
        }
        self.change_of_source(world, Vec::new())
    }

    fn update(&self, world: &World, old: &Object, new: &Object) -> Result<Verdict, Denial> {
        let warnings = match self.companion_of(world, old) {
            Some(source) => match self.edit_of_companion(world, old, new, source.clone()) {
                Ok(warnings) => warnings,
                Err(denial) => return self.restore(world, Some(&source), denial),
            },
            None if self.gains_marks(&old.metadata, &new.metadata) => {
                return Err(Denial::Forged { at: self.key.clone() });
            }
            None => Vec::new(),
        };
        // A companion that may be edited may be turned into a source, which requires the same access as any
        // other source.
        self.change_of_source(world, warnings)
    }

    fn delete(&self, world: &World, old: &Object) -> Result<Verdict, Denial> {
        let Some(source) = self.companion_of(world, old) else {
            return self.change_of_source(world, Vec::new());
        };
        if world.namespaces().is_terminating_with(&self.request.namespace, &old.metadata)
            || old.metadata.is_terminating()
        {
            return Ok(Verdict::ALLOWED);
        }
        let denied = || Err(Denial::Delete { at: self.key.clone(), of: source.clone() });
        match self.protection(world, old, &source) {
            // The controller deletes it, too.
            _ if world.is_refused(&source, &self.request.namespace) => Ok(Verdict::ALLOWED),
            Protect::All => denied(),
            // Without its source, the companion is not created again.
            _ if world.source(&source).is_none() => Ok(Verdict::ALLOWED),
            // A delete and a create would get around the protection from edits: the new object keeps the name.
            Protect::Edits if !self.keys().is_kept_free(&self.key.name) => denied(),
            Protect::Edits | Protect::None => Ok(Verdict::Allow {
                warnings: vec![format!(
                    "{} is a companion: Lockstep creates it again for as long as {source} wants it",
                    self.key
                )],
            }),
        }
    }

    // --- companions

    /// The source of an object that is a companion. An object with our label that names no source is no
    /// companion.
    fn companion_of(&self, world: &World, object: &Object) -> Option<ObjectKey> {
        let keys = self.keys();
        let meta = &object.metadata;
        if !meta.labels.contains_key(&keys.companion) {
            return None;
        }
        let known = world.companion(&self.key).filter(|known| known.uid == *meta.uid);
        known
            .and_then(|known| known.state.source.clone())
            .or_else(|| ObjectKey::parse(self.key.kind, meta.annotations.get(&keys.source)?))
    }

    /// Returns warnings if the edit is allowed.
    fn edit_of_companion(
        &self,
        world: &World,
        old: &Object,
        new: &Object,
        source: ObjectKey,
    ) -> Result<Vec<String>, Denial> {
        if world.namespaces().is_terminating_with(&self.request.namespace, &old.metadata) {
            return Ok(Vec::new());
        }
        let at = self.key.clone();
        // Only Lockstep may write marks, even where edits are allowed: the controller trusts them.
        let protect = self.protection(world, old, &source);
        if protect == Protect::None && !self.gains_marks(&old.metadata, &new.metadata) {
            Ok(vec![format!("{at} is a companion: Lockstep makes it equal to {source} again")])
        } else if new.metadata.labels.contains_key(&self.keys().companion) {
            Err(Denial::Edit { at, of: source })
        } else {
            Err(Denial::Strip { at, of: source })
        }
    }

    /// What is denied to everybody but those who may know that it is right. `of` is the source of the companion that
    /// the object is before the request.
    fn restore(&self, world: &World, of: Option<&ObjectKey>, otherwise: Denial) -> Result<Verdict, Denial> {
        let same_source = |restored: &&Restored| of.is_none_or(|source| source == restored.source());
        match self.restored.as_ref().filter(same_source).filter(|restored| restored.is_wanted(world)) {
            Some(restored) => Ok(Verdict::CheckRestore { restored: Box::new(restored.clone()), otherwise }),
            None => Err(otherwise),
        }
    }

    /// The source says how its companions are protected. The annotation on a companion is a copy of that, and
    /// counts only where the source is not known.
    fn protection(&self, world: &World, companion: &Object, source: &ObjectKey) -> Protect {
        let copied = || companion.metadata.annotations.get(&self.keys().protect)?.parse().ok();
        world.policy(source).map(|policy| policy.protect).or_else(copied).unwrap_or_default()
    }

    /// Whether the request adds or changes a mark. Marks that the object already has do not excuse this: no
    /// webhook is called for annotations of an object without our label, so anybody may have written them.
    fn gains_marks(&self, old: &Meta, new: &Meta) -> bool {
        let gains = |old: &BTreeMap<String, String>, new: &BTreeMap<String, String>, key: &str| {
            new.contains_key(key) && new.get(key) != old.get(key)
        };
        let keys = self.keys();
        gains(&old.labels, &new.labels, &keys.companion)
            || keys.source_annotations().iter().any(|key| gains(&old.annotations, &new.annotations, key))
    }

    // --- sources

    /// Decides about a source that is created, changed, unlabelled or deleted. `warnings` are those about the
    /// object as a companion.
    fn change_of_source(&self, world: &World, mut warnings: Vec<String>) -> Result<Verdict, Denial> {
        warnings.extend_from_slice(&self.warnings);
        // The delete of a terminating source was reviewed when it began, and its companions are no longer
        // written.
        if !self.is_about_a_source() || self.terminating {
            return Ok(Verdict::Allow { warnings });
        }
        let new_policy = match self.after.clone().filter(|_| self.settings_changed).transpose() {
            Ok(policy) => policy.map(Box::new),
            Err(fault) => return Err(Denial::Fault { at: self.key.clone(), fault }),
        };
        let claims = Claims {
            key: self.key.clone(),
            new_policy,
            ask_consent: self.ask_consent(world),
            warnings,
            default_targets: self.default_targets,
        };
        let required =
            if self.companions_unaffected { RequiredAccess::default() } else { self.required_access(world) };
        if required.is_empty() {
            // Anybody may repeat such a request, so it must not look at every namespace.
            let warnings = if self.after.is_some() { claims.decide(world, false)? } else { claims.warnings };
            return Ok(Verdict::Allow { warnings });
        }
        if self.is_by_deputy() {
            return Err(Denial::Deputy {
                user: self.request.user.name.clone(),
                denied: claims.denied_place(world, required.first_namespace()),
                source: self.key.clone(),
            });
        }
        Ok(Verdict::CheckAccess { required, then: claims })
    }

    /// Whether consent could replace the rights that this request needs.
    fn ask_consent(&self, world: &World) -> AskConsent {
        let accepts = |name: &String| world.namespaces().accept_from_matches(&self.key.namespace, name);
        let deletes_companions = |Policy { targets, .. }: &Policy| {
            !targets.needs_consent && (targets.has_patterns() || !targets.names.iter().all(accepts))
        };
        match (&self.before, &self.after) {
            (_, None) => AskConsent::TooLate,
            (Some(Ok(before)), _) if deletes_companions(before) => AskConsent::TooLate,
            _ if matches!(self.request.operation, Operation::Create { .. }) => AskConsent::InManifest,
            _ => AskConsent::Annotate,
        }
    }

    /// Everything that the controller would do because of this request.
    fn required_access(&self, world: &World) -> RequiredAccess {
        let mut required = RequiredAccess::default();
        for (policy, verbs) in [(&self.before, Verbs::Delete), (&self.after, Verbs::All)] {
            let Some(Ok(policy)) = policy else { continue };
            let targets = &policy.targets;
            if targets.own {
                required.add(Some(&self.key.namespace), &policy.companion, verbs);
            }
            // Namespaces that have agreed decide for themselves, and no others are reached.
            if targets.needs_consent {
                continue;
            }
            if targets.has_patterns() {
                required.add(None, &policy.companion, verbs);
            }
            for namespace in &targets.names {
                required.add(Some(namespace), &policy.companion, verbs);
            }
        }
        // `accept-from` replaces the access of users to other namespaces. In the source's own namespace it does
        // so only for a deputy, whose access is never checked.
        let accepted = |namespace: &str| {
            (self.is_by_deputy() || *namespace != *self.key.namespace)
                && world.namespaces().accept_from_matches(&self.key.namespace, namespace)
        };
        // The controller also deletes companions that remain from an earlier policy, or from an earlier source of
        // that name, even if they have lost our label, unless they are terminating anyway.
        let labelled = world.companions_of(&self.key).filter(|(_, found)| !found.state.terminating);
        let leftover: BTreeSet<&ObjectKey> = labelled
            .map(|(at, _)| at)
            .chain(world.lost_with_known_uid(&self.key))
            .filter(|at| !accepted(&at.namespace))
            .filter(|at| !required.covers(at) && !world.namespaces().is_terminating(&at.namespace))
            .collect();
        let many = leftover.len() > MAX_ITEMS;
        for at in leftover {
            required.add((!many).then_some(&at.namespace), &at.name, Verbs::Delete);
        }
        required.remove_namespaces(accepted);
        required
    }

    fn keys(&self) -> &Keys {
        &self.rules.keys
    }

    fn is_by_deputy(&self) -> bool {
        self.rules.deputies.contain(&self.request.user)
    }
}

impl Claims {
    /// Warnings or a denial, once it is known whether the user has the required access.
    pub fn decide_after(
        self,
        world: &World,
        user: &User,
        checked: Result<(), AccessError>,
    ) -> Result<Vec<String>, Denial> {
        match checked {
            Ok(()) => self.decide(world, true),
            Err(AccessError::Unavailable(why)) => Err(Denial::Unanswered(why)),
            Err(AccessError::Forbidden(Access { verb, namespace, name, .. })) => Err(Denial::NoRight {
                user: user.name.clone(),
                verb,
                denied: self.denied_place(world, namespace.as_deref()),
                name,
                source: self.key,
            }),
        }
    }

    /// Where the source is not allowed to have companions, and what can be done about it. No `namespace` means all.
    fn denied_place(&self, world: &World, namespace: Option<&str>) -> Box<DeniedPlace> {
        let place = match namespace {
            None => DenialPlace::Everywhere(self.ask_consent),
            Some(name) => DenialPlace::Namespace {
                accept: world.namespaces().how_to_accept(&self.key.namespace, name),
                name: name.to_owned(),
            },
        };
        Box::new(DeniedPlace { place, by_default: self.default_targets })
    }

    /// Whether the names that a source wants for its companions are free. Returns warnings if they are. Without
    /// `patterns`, it looks only at the targets that are listed by name, at most [`MAX_ITEMS`], and at the source's own
    /// namespace.
    fn decide(mut self, world: &World, patterns: bool) -> Result<Vec<String>, Denial> {
        let known = || world.source(&self.key)?.active_policy();
        let Some(policy) = self.new_policy.as_deref().or_else(known) else { return Ok(self.warnings) };
        // Anybody may ask for consent, so nothing is expanded for that here. An Event says later what matches nothing.
        let patterns = patterns && !policy.targets.needs_consent;
        let wanted = if patterns { policy.targets.clone() } else { policy.targets.listed_by_name() };
        let home = &*self.key.namespace;
        let mut warnings = Vec::new();
        let mut conflicts = Vec::new();
        for target in targets(world, home, &wanted) {
            warnings.extend(target.trouble(world, home).map(|trouble| trouble.to_string()));
            let namespace = target.namespace;
            if target.eligibility == Eligibility::Terminating && target.explicit && self.new_policy.is_some()
            {
                warnings.push(format!(
                    "namespace {namespace} is terminating; it gets a companion once it exists again"
                ));
            }
            if target.eligibility != Eligibility::Eligible {
                continue;
            }
            let at = ObjectKey::new(self.key.kind, namespace, &policy.companion);
            if self.new_policy.is_none() {
                if let Decision::Trouble(trouble) = plan_companion(world, &self.key, &at, None) {
                    warnings.push(trouble.to_string());
                }
                continue;
            }
            match world.competing_source(&at, Some(&self.key)) {
                None => {}
                // Otherwise a source in one matched namespace could keep this one out of all of them.
                Some(of) if !target.explicit => conflicts.push(format!("{at} of {of}")),
                Some(of) if of.namespace == self.key.namespace => {
                    warnings.push(format!(
                        "{at} is the companion of {of}; it is handed over once {of} no longer wants it"
                    ));
                }
                Some(of) => return Err(Denial::Taken { at, of }),
            }
        }
        warnings.extend(warning_of_conflicts(&conflicts));
        if patterns {
            warnings.extend(unmatched(world, home, &wanted).map(|trouble| trouble.to_string()));
        }
        self.warnings.extend(warnings);
        Ok(self.warnings)
    }
}

/// About companions of other sources that have the name of this one's, where a pattern matches.
fn warning_of_conflicts(conflicts: &[String]) -> Option<String> {
    let named = some_of(conflicts, MAX_NAMED_CONFLICTS, ", ");
    let namespaces = if conflicts.len() == 1 { "namespace" } else { "namespaces" };
    (!conflicts.is_empty()).then(|| {
        format!(
            "{} {namespaces} that a pattern matches have a companion of this name from another source and keep it: \
             {named}; all others get one of this source",
            conflicts.len(),
        )
    })
}

/// Whether an update of a source leaves its companions as they are, now and when the source is deleted:
/// finalizers and owners decide when that happens.
fn same_companions(
    keys: &Keys,
    (old, before): (&Object, &Result<Policy, Fault>),
    (new, after): (&Object, &Result<Policy, Fault>),
) -> bool {
    let same_copies = || match (before, after) {
        (Ok(before), Ok(after)) => before == after && after.same_companion(keys, old, new),
        // The controller leaves the companions of a faulty source alone.
        (Err(_), Err(_)) => true,
        _ => false,
    };
    old.metadata.owner_references == new.metadata.owner_references
        && old.metadata.finalizers == new.metadata.finalizers
        && same_copies()
}

#[cfg(test)]
mod tests;
