//! The leaf of this replica: when to renew it (pure), and the task that does.

use std::{sync::Arc, time::Duration};

use k8s_openapi::jiff::Timestamp;
use tokio::sync::watch;

use super::{
    CLOCK,
    issue::{Certificate, Leaf, Names, between, later},
    phase::{Pace, Published},
    resolver::Resolver,
    state::State,
};
use crate::ops::{
    health::{Condition, Readiness},
    metrics::{Metrics, Role},
};

/// Why there should be a new leaf.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Renewal {
    /// There is none yet.
    First,
    /// It is not valid (any more), or nobody trusts it any more.
    Invalid,
    /// It has passed two thirds of its life.
    Due,
    /// It lacks a name.
    Names,
    /// Another CA signs now, and everybody trusts that one.
    Succession,
}

impl Renewal {
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::First => "first",
            Self::Invalid => "invalid",
            Self::Due => "due",
            Self::Names => "names",
            Self::Succession => "succession",
        }
    }
}

/// PURE. Whether there should be a new leaf, signed by the current CA; else when to look again.
///
/// A CA that is not known to be trusted everywhere signs only where there is no other valid leaf.
pub fn renewal(
    leaf: Option<&Leaf>,
    state: &State,
    published: &Published,
    names: &Names,
    now: Timestamp,
    pace: &Pace,
) -> Result<Renewal, Timestamp> {
    let current = &state.current.certificate;
    // What it signed would be invalid at once, and renewed without end. Another CA is on its way.
    let signs = |why| if current.is_valid(now) { Ok(why) } else { Err(later(now, CLOCK)) };
    let Some(leaf) = leaf else { return signs(Renewal::First) };
    let end = leaf.certificate.not_after;
    if !leaf.certificate.is_valid(now) {
        return signs(Renewal::Invalid);
    }
    if leaf.issuer != *current {
        return match published.spread_at(current, pace.spread()) {
            Some(at) if at <= now => Ok(Renewal::Succession),
            Some(at) => Err(at.min(end)),
            None => Err(end),
        };
    }
    if !names.is_subset(&leaf.names) {
        return Ok(Renewal::Names);
    }
    // A new one would end with its CA as this one does.
    if end >= current.not_after {
        return Err(end);
    }
    match leaf.certificate.due() {
        due if due <= now => Ok(Renewal::Due),
        due => Err(due),
    }
}

/// What the leaf depends on, and where it goes.
pub(super) struct Keeper {
    pub(super) pace: Pace,
    pub(super) state: watch::Receiver<Option<Arc<State>>>,
    pub(super) published: watch::Receiver<Published>,
    pub(super) names: watch::Receiver<Names>,
    /// Who signed the leaf that is served, and until when it is valid.
    pub(super) serving: watch::Sender<Option<(Certificate, Timestamp)>>,
    pub(super) resolver: Arc<Resolver>,
    pub(super) metrics: Metrics,
    pub(super) readiness: Readiness,
}

impl Keeper {
    /// Keeps a valid leaf in the resolver, for ever.
    pub(super) async fn run(mut self) {
        let mut leaf = None;
        loop {
            let wait = self.look(&mut leaf, Timestamp::now());
            tokio::select! {
                _ = self.state.changed() => {}
                _ = self.published.changed() => {}
                _ = self.names.changed() => {}
                () = tokio::time::sleep(wait) => {}
            }
        }
    }

    /// Renews the leaf if it should be, and returns how long to sleep.
    fn look(&mut self, leaf: &mut Option<Leaf>, now: Timestamp) -> Duration {
        let state = self.state.borrow_and_update().clone();
        let published = self.published.borrow_and_update().clone();
        let names = self.names.borrow_and_update().clone();
        let mut wait = CLOCK;
        if let Some(state) = state {
            match renewal(leaf.as_ref(), &state, &published, &names, now, &self.pace) {
                Ok(why) => match self.renew(&state, &names, now, why) {
                    Ok(new) => {
                        *leaf = Some(new);
                        wait = Duration::ZERO;
                    }
                    Err(error) => {
                        tracing::error!("no certificate could be issued: {error}; retrying in a second");
                        wait = Duration::from_secs(1);
                    }
                },
                Err(at) => wait = between(now, at).min(CLOCK),
            }
        }
        let valid = leaf.as_ref().filter(|leaf| leaf.certificate.is_valid(now));
        match valid {
            Some(_) => self.readiness.mark_true(Condition::Certificate),
            None => self.readiness.mark_false(Condition::Certificate),
        }
        let serving = valid.map(|leaf| (leaf.issuer.clone(), leaf.certificate.not_after));
        self.serving.send_if_modified(|old| {
            let changed = *old != serving;
            *old = serving;
            changed
        });
        wait
    }

    fn renew(
        &self,
        state: &State,
        names: &Names,
        now: Timestamp,
        why: Renewal,
    ) -> Result<Leaf, super::Error> {
        let leaf = state.current.issue(names, self.pace.leaf_validity, now)?;
        self.resolver.serve(vec![leaf.certificate.der().clone()], leaf.key_der())?;
        self.metrics.certificate_expiry(Role::Leaf, leaf.certificate.not_after.as_second());
        if why != Renewal::First {
            self.metrics.certificate_rotated(Role::Leaf);
        }
        tracing::info!(
            why = why.as_str(),
            issuer = leaf.issuer.subject,
            expires = %leaf.certificate.not_after,
            names = leaf.names.iter().map(String::as_str).collect::<Vec<_>>().join(","),
            "the guard serves with a new certificate"
        );
        Ok(leaf)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::certs::issue::Ca;

    const PACE: Pace = Pace { ca_validity: Duration::from_hours(24), leaf_validity: Duration::from_hours(1) };

    #[test]
    fn readiness_and_metrics_follow_the_leaf() {
        let now = Timestamp::from_second(1_800_000_000).unwrap();
        let (state_of, state) = watch::channel(None);
        let (_published, published) = watch::channel(Published::Unknown);
        let (_names, names) = watch::channel(Names::from(["localhost".to_owned()]));
        let (serving, served) = watch::channel(None);
        let readiness = Readiness::new([Condition::Certificate]);
        let mut keeper = Keeper {
            pace: PACE,
            state,
            published,
            names,
            serving,
            resolver: Arc::default(),
            metrics: Metrics::new(),
            readiness: readiness.clone(),
        };
        let mut leaf = None;
        assert_eq!(keeper.look(&mut leaf, now), CLOCK);
        assert_eq!(readiness.unmet(), [Condition::Certificate]);

        let ca = Arc::new(Ca::generate("x", PACE.ca_validity, now).unwrap());
        state_of.send_replace(Some(Arc::new(State::new(ca.clone()))));
        assert_eq!(keeper.look(&mut leaf, now), Duration::ZERO);
        assert!(readiness.unmet().is_empty() && keeper.resolver.chain().is_some());
        let end = later(now, PACE.leaf_validity);
        assert_eq!(*served.borrow(), Some((ca.certificate.clone(), end)));
        assert_eq!(keeper.look(&mut leaf, now), CLOCK, "never longer, whenever it is due");
        let first = keeper.resolver.chain();
        let due = later(now, Duration::from_mins(40));
        keeper.look(&mut leaf, due);
        assert_ne!(keeper.resolver.chain(), first);
        let metrics = keeper.metrics.render();
        let end = later(due, PACE.leaf_validity).as_second();
        for line in [
            "lockstep_certificate_rotations_total{certificate=\"leaf\"} 1".to_owned(),
            format!("lockstep_certificate_expiry_timestamp_seconds{{certificate=\"leaf\"}} {end}"),
        ] {
            assert!(metrics.contains(&line), "{line} in\n{metrics}");
        }

        // The CA has ended, and no other is there yet: nothing valid can be issued.
        assert_eq!(keeper.look(&mut leaf, later(now, PACE.ca_validity)), CLOCK);
        assert_eq!(readiness.unmet(), [Condition::Certificate]);
        assert_eq!(*served.borrow(), None);
    }
}
