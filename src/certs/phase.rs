//! PURE. What to do next about the CA Secret.
//!
//! A rotation: prepare the next CA → it is published beside the current one → note that this has been read back → let
//! it spread → promote → retire the old one. Where it stands is in the Secret, so any replica takes the next step.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use k8s_openapi::jiff::Timestamp;

use super::{
    Error,
    issue::{Ca, Certificate, Unusable, later},
    state::{Reading, State},
};

/// How long things last and how long they take.
#[derive(Debug, Clone, Copy)]
pub struct Pace {
    pub ca_validity: Duration,
    pub leaf_validity: Duration,
}

impl Pace {
    /// From the webhook configurations to every API server.
    #[must_use]
    pub fn spread(&self) -> Duration {
        (self.ca_validity / 12).clamp(Duration::from_secs(1), Duration::from_mins(1))
    }

    /// How long what is too much stays in the webhook configurations: longer than a watch may stall, for the Secret may
    /// hold a next CA that ours has not brought yet.
    #[must_use]
    pub fn linger(&self) -> Duration {
        self.spread() * 4
    }

    /// How long after its last signature there may be leaves of a CA.
    fn afterlife(&self) -> Duration {
        self.leaf_validity + self.spread()
    }
}

/// Which CAs the webhook configurations hold, in every entry, and since when.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Published {
    /// They have not been seen yet.
    #[default]
    Unknown,
    /// There is no entry, so nobody asks us.
    Nowhere,
    Held(BTreeMap<Vec<u8>, Timestamp>),
}

impl Published {
    /// Whether it is published, as far as is known.
    #[must_use]
    pub fn holds(&self, certificate: &Certificate) -> Option<bool> {
        match self {
            Self::Unknown => None,
            Self::Nowhere => Some(true),
            Self::Held(held) => Some(held.contains_key(certificate.der().as_ref())),
        }
    }

    /// When what is published will have spread.
    #[must_use]
    pub fn spread_at(&self, certificate: &Certificate, spread: Duration) -> Option<Timestamp> {
        match self {
            Self::Unknown => None,
            Self::Nowhere => Some(Timestamp::MIN),
            Self::Held(held) => held.get(certificate.der().as_ref()).map(|since| later(*since, spread)),
        }
    }
}

/// What is known when a step is decided.
#[derive(Clone, Copy)]
pub struct View<'a> {
    /// What the Secret holds; none if there is no Secret.
    pub secret: Option<&'a Reading>,
    /// What it last held that was right.
    pub memory: Option<&'a State>,
    pub published: &'a Published,
    /// Who signed the leaf that is being served, while that leaf is valid.
    pub serving: Option<&'a Certificate>,
}

/// The next step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// There is no Secret: make it, with what we remember if that is still good.
    Create,
    /// The CA in it cannot be used: put back the one we remember.
    Restore(Unusable),
    /// The CA in it cannot be used, nor can another: make a new one.
    Replace(Unusable),
    /// Something beside the current CA is broken: put it right.
    Mend,
    /// Somebody put another CA there: trust those on that replicas may still serve with.
    Keep,
    /// The current CA has passed two thirds of its life: write the next one beside it.
    Prepare,
    /// The next CA has been read back from the webhook configurations: remember when.
    Note,
    /// The next CA is in the webhook configurations no more: forget when it was.
    Doubt,
    /// The next CA signs from now on.
    Promote,
    /// No leaf of an old CA can be alive: trust it no more.
    Retire,
    /// Nothing, before this instant.
    Rest(Timestamp),
}

impl Step {
    /// What to publish and to sign with meanwhile: what the Secret holds, unless this step comes first.
    #[must_use]
    pub fn followed(self, secret: Option<&Reading>, now: Timestamp) -> Option<State> {
        let reading = secret.filter(|_| !self.comes_first())?;
        let current = usable(&reading.current, now).ok()?;
        Some(reading.state(current.clone()))
    }

    /// Whether what the Secret holds must not be followed before this is done.
    #[must_use]
    pub const fn comes_first(self) -> bool {
        matches!(self, Self::Create | Self::Restore(_) | Self::Replace(_) | Self::Mend | Self::Keep)
    }

    /// Whether it may be called for again and again: somebody undoes what is put right, or sees what we do not.
    #[must_use]
    pub const fn may_recur(self) -> bool {
        self.comes_first() || matches!(self, Self::Doubt)
    }

    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Create => "created",
            Self::Restore(_) => "restored",
            Self::Replace(_) => "replaced",
            Self::Mend => "mended",
            Self::Keep => "kept",
            Self::Prepare => "prepared",
            Self::Note => "noted",
            Self::Doubt => "doubted",
            Self::Promote => "promoted",
            Self::Retire => "retired",
            Self::Rest(_) => "rest",
        }
    }
}

/// Decides the next step.
#[must_use]
pub fn next_step(view: View<'_>, now: Timestamp, pace: &Pace) -> Step {
    let Some(reading) = view.secret else { return Step::Create };
    let current = match usable(&reading.current, now) {
        Ok(current) => current,
        // Its successor is there. Without this, no leaf at all could be issued.
        Err(Unusable::Expired) if reading.next.as_ref().is_some_and(|next| is_valid(&next.ca, now)) => {
            return Step::Promote;
        }
        Err(why) if remembered(view.memory, now).is_some() => return Step::Restore(why),
        Err(why) => return Step::Replace(why),
    };
    if reading.flawed {
        return Step::Mend;
    }
    let state = reading.state(current.clone());
    if alive(view, &state, now).any(|certificate| !state.trusts(certificate)) {
        return Step::Keep;
    }
    let mut rest = current.certificate.not_after;
    match &state.next {
        None if now >= current.certificate.due() => return Step::Prepare,
        None => rest = rest.min(current.certificate.due()),
        Some(next) if next.ca.certificate.has_ended(now) => return Step::Mend,
        Some(next) => {
            // An instant that lies ahead by more than clocks differ: a clock was wrong when it was written.
            let noted = next.published.filter(|at| *at <= later(now, pace.spread()));
            match (noted, view.published.holds(&next.ca.certificate)) {
                (None, Some(true)) => return Step::Note,
                (Some(_), Some(false)) => return Step::Doubt,
                (Some(at), Some(true)) if now >= later(at, pace.spread()) => return Step::Promote,
                (Some(at), Some(true)) => rest = rest.min(later(at, pace.spread())),
                _ => {}
            }
        }
    }
    if let Some(since) = state.since {
        let end = later(since, pace.afterlife());
        let first = state.old.iter().map(|certificate| certificate.not_after).min().unwrap_or(end).min(end);
        // Written by a clock that was ahead: it must not keep the old CA for as long as that.
        if now >= first || since > later(now, pace.afterlife()) {
            return Step::Retire;
        }
        rest = rest.min(first);
    }
    Step::Rest(rest)
}

/// Carries a step out, in memory: what the Secret should hold then. `make` makes a new CA.
pub fn outcome(
    step: Step,
    view: View<'_>,
    now: Timestamp,
    pace: &Pace,
    make: impl FnOnce() -> Result<Ca, Error>,
) -> Result<Option<State>, Error> {
    let memory = remembered(view.memory, now);
    let read = view.secret.and_then(|reading| Some(reading.state(reading.current.clone().ok()?)));
    Ok(match step {
        Step::Rest(_) => None,
        Step::Create | Step::Restore(_) if memory.is_some() => memory,
        Step::Create | Step::Restore(_) | Step::Replace(_) => {
            let mut state = State::new(Arc::new(make()?));
            // There may be leaves of what cannot sign any more, in other replicas.
            for certificate in view.secret.into_iter().flat_map(remains).chain(view.serving) {
                state = state.kept(certificate.clone(), now);
            }
            Some(state)
        }
        Step::Mend => {
            let same = |state: &State| {
                read.as_ref().is_some_and(|read| read.current.certificate == state.current.certificate)
            };
            let read = read.clone().map(|mut state| {
                state.since = state.since.or((!state.old.is_empty()).then_some(now));
                state.retired(now, false)
            });
            memory.filter(same).or(read)
        }
        Step::Keep => read.map(|state| {
            let kept = alive(view, &state, now).cloned().collect::<Vec<_>>();
            kept.into_iter().fold(state, |state, certificate| state.kept(certificate, now))
        }),
        Step::Prepare => match read {
            Some(state) => Some(state.prepared(Arc::new(make()?))),
            None => None,
        },
        Step::Note => read.map(|state| state.noted(Some(now))),
        Step::Doubt => read.map(|state| state.noted(None)),
        Step::Promote => read.map(|state| state.promoted(now)),
        Step::Retire => read.map(|state| {
            let since = state.since.unwrap_or(now);
            if since > later(now, pace.afterlife()) {
                return State { since: Some(now), ..state };
            }
            state.retired(now, now >= later(since, pace.afterlife()))
        }),
    })
}

fn usable(current: &Result<Arc<Ca>, Unusable>, now: Timestamp) -> Result<&Arc<Ca>, Unusable> {
    let ca = current.as_ref().map_err(|why| *why)?;
    ca.certificate.check(now)?;
    Ok(ca)
}

fn is_valid(ca: &Ca, now: Timestamp) -> bool {
    ca.certificate.is_valid(now)
}

/// What we remember, without what has ended; none if its CA cannot sign any more.
fn remembered(memory: Option<&State>, now: Timestamp) -> Option<State> {
    memory.filter(|state| is_valid(&state.current, now)).map(|state| state.retired(now, false))
}

/// The CAs whose leaves may be served although the Secret may know nothing of them: ours, and, where somebody put a
/// strange CA there, all that were trusted until then. It would be published at once, without them.
fn alive<'a>(
    view: View<'a>,
    state: &State,
    now: Timestamp,
) -> impl Iterator<Item = &'a Certificate> + use<'a> {
    let strange = |memory: &&State| !memory.trusts(&state.current.certificate);
    let before = view.memory.filter(strange).map(State::trusted).unwrap_or_default();
    before.into_iter().chain(view.serving).filter(move |certificate| !certificate.has_ended(now))
}

/// Every certificate that can still be read.
fn remains(reading: &Reading) -> impl Iterator<Item = &Certificate> {
    let next = reading.next.iter().map(|next| &next.ca.certificate);
    reading.certificate.iter().chain(next).chain(&reading.old)
}

#[cfg(test)]
mod tests;
