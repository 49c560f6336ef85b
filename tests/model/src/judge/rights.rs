//! Requests that the API server accepted although the webhook had to refuse them.
//!
//! The webhook may not have seen the last changes of sources and namespaces yet, so a request counts as wrong only if
//! it was wrong in every state that they ever had.

use super::{Judge, Reading, State, Violation, has_marks, is_labelled, named_source};
use crate::{
    history::Actor,
    object::{Key, Kind, Object},
    rules::{self, Policy},
};

impl Judge {
    /// The API server has accepted a request of somebody, with the webhooks in force. `before` is the object as it was
    /// then, `after` as it is now.
    pub fn accepted(&mut self, by: Actor, at: &Key, before: Option<&Object>, after: Option<&Object>) {
        if by == Actor::Exempt || at.kind == Kind::Namespace || self.ever_terminating(&at.namespace) {
            return;
        }
        let sides = [before, after].into_iter().flatten();
        let mut wrong: Vec<String> = sides
            .filter_map(|side| self.exceeded(by, at, side))
            .filter(|_| self.is_change(at, before, after))
            .collect();
        wrong.extend(before.and_then(|before| self.edit_of_companion(at, before, after)));
        let forged = |after: &&Object| {
            before.is_none_or(|before| !is_labelled(&self.names, before)) && is_labelled(&self.names, after)
        };
        if after.filter(forged).is_some() {
            wrong.push("it now has the label of a companion".to_owned());
        }
        self.violations
            .extend(wrong.into_iter().map(|why| Violation(format!("{at}: {by:?} wrote it, and {why}"))));
    }

    /// Whether companions are affected.
    fn is_change(&self, at: &Key, before: Option<&Object>, after: Option<&Object>) -> bool {
        let companion = |object: Option<&Object>| {
            let object = object?;
            match Reading::of(&self.names, at, object) {
                Reading::Source(policy) => {
                    Some((policy.companion_in(&self.names, at, object, "elsewhere"), policy))
                }
                _ => None,
            }
        };
        companion(before) != companion(after)
    }

    /// Why a user may not write a source.
    fn exceeded(&self, by: Actor, at: &Key, source: &Object) -> Option<String> {
        let Reading::Source(policy) = Reading::of(&self.names, at, source) else { return None };
        if source.terminating {
            return None;
        }
        let Policy { targets, .. } = &*policy;
        match by {
            Actor::Tenant | Actor::Deputy if targets.consent => None,
            Actor::Tenant | Actor::Deputy if targets.reach_all() => {
                Some("it reaches namespaces that a pattern or selector matches".to_owned())
            }
            Actor::Tenant | Actor::Deputy => {
                // A deputy needs the consent of the source's own namespace, too.
                let own = (by == Actor::Deputy && targets.own).then_some(&at.namespace);
                let refused = |name: &&String| !self.ever_accepted(name, &at.namespace);
                targets.names.iter().chain(own).find(refused).map(|name| format!("it reaches {name}"))
            }
            Actor::Exempt | Actor::Admin => None,
        }
    }

    fn edit_of_companion(&self, at: &Key, before: &Object, after: Option<&Object>) -> Option<String> {
        let source = named_source(&self.names, at, before).filter(|_| is_labelled(&self.names, before))?;
        // A delete is allowed with `protect: edits`, and the controller creates the companion again.
        let forbidden = if after.is_some() { &["edits", "all"][..] } else { &["all"][..] };
        let says = |protect: &str| forbidden.contains(&protect);
        let known = self.companions.get(&before.uid).is_some_and(|known| known.source == source);
        let exists = self.now.get(&source).is_some_and(|now| !now.terminating);
        let changed = after.is_none_or(|after| {
            let comparable =
                |object: &Object| Object { managers: Vec::new(), version: String::new(), ..object.clone() };
            comparable(before) != comparable(after)
        });
        let all = |state: &State| matches!(&state.reading, Reading::Source(policy) if says(&policy.protect));
        let protected = self.states.get(&source)?.iter().all(all)
            && before.annotations.get(&self.names.key("protect")).is_some_and(|protect| says(protect));
        (known && exists && changed && protected && !before.terminating && has_marks(&self.names, before))
            .then(|| format!("it is a protected companion of {source}"))
    }

    fn ever_accepted(&self, namespace: &str, home: &str) -> bool {
        let mut states = self.states.get(&Key::namespace(namespace)).into_iter().flatten();
        states.any(|state| rules::accepts(&self.names, &state.object, "accept-from", home))
    }

    fn ever_terminating(&self, namespace: &str) -> bool {
        let states = self.states.get(&Key::namespace(namespace));
        states.is_some_and(|states| states.iter().any(|state| state.object.terminating))
    }
}
