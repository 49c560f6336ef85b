//! A rotation that somebody asked for with `lockstep certs rotate`: the request and its progress are annotations of the
//! Lease, so that the person needs no right on the CA Secret.

use std::{fmt, str::FromStr, time::Duration};

use k8s_openapi::jiff::Timestamp;

use super::{issue::later, secret::CaSet, webhooks::WebhookConfiguration};
use crate::{keys::Keys, leader::LeaseAnnotations};

/// The most that the clock of a client may be ahead of that of a replica.
const MAX_CLOCK_SKEW: Duration = Duration::from_mins(5);

/// Whether a request can have been made by now. Replicas take up only later requests than the last one, so a request
/// for the year 9999 would be the last for ever: such a one is not taken up, and counts as absent where it is recorded.
#[must_use]
pub fn is_plausible(request: Timestamp, now: Timestamp) -> bool {
    request <= later(now, MAX_CLOCK_SKEW)
}

/// How far a requested rotation is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    Publishing,
    Spreading,
    Replacing,
    Removing,
    Done,
    /// The certificate comes from files.
    Unsupported,
}

impl Phase {
    const ALL: [Self; 6] =
        [Self::Publishing, Self::Spreading, Self::Replacing, Self::Removing, Self::Done, Self::Unsupported];

    const fn as_str(self) -> &'static str {
        match self {
            Self::Publishing => "publishing",
            Self::Spreading => "spreading",
            Self::Replacing => "replacing",
            Self::Removing => "removing",
            Self::Done => "done",
            Self::Unsupported => "unsupported",
        }
    }

    /// How far a rotation is whose request the Secret records. It revoked every CA of that time, and is done when
    /// nothing trusts any of them.
    fn of<'a>(cas: &CaSet, mut configurations: impl Iterator<Item = &'a WebhookConfiguration>) -> Self {
        if cas.revokes(&cas.current.certificate) {
            match cas.next.as_ref().and_then(|next| next.published) {
                None => Self::Publishing,
                Some(_) => Self::Spreading,
            }
        } else if cas.old.iter().any(|old| cas.revokes(old)) {
            Self::Replacing
        } else if configurations.any(|configuration| configuration.trusts_revoked(cas)) {
            Self::Removing
        } else {
            Self::Done
        }
    }
}

/// The value of the annotation `ca-rotation`, which the leader writes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// The request that it is about.
    pub request: Timestamp,
    pub phase: Phase,
}

impl Progress {
    /// The progress of the latest request that was taken up; none if there was none.
    #[must_use]
    pub fn of<'a>(
        cas: &CaSet,
        configurations: impl Iterator<Item = &'a WebhookConfiguration>,
    ) -> Option<Self> {
        cas.rotation.map(|request| Self { request, phase: Phase::of(cas, configurations) })
    }
}

impl fmt::Display for Progress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.request, self.phase.as_str())
    }
}

impl FromStr for Progress {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let (request, phase) = text.split_once(' ').ok_or(())?;
        let phase = Phase::ALL.into_iter().find(|known| known.as_str() == phase).ok_or(())?;
        Ok(Self { request: request.parse().map_err(drop)?, phase })
    }
}

/// Answers every request with [`Phase::Unsupported`]: for a certificate from files. Never returns.
pub(super) async fn refuse(keys: &Keys, annotations: &LeaseAnnotations) {
    let mut observed = annotations.observed();
    while observed.changed().await.is_ok() {
        let asked = observed.borrow_and_update().get(&keys.rotate_ca).and_then(|text| text.parse().ok());
        if let Some(request) = asked {
            let progress = Progress { request, phase: Phase::Unsupported }.to_string();
            if observed.borrow().get(&keys.ca_rotation) != Some(&progress) {
                annotations.set(&keys.ca_rotation, Some(progress));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::certs::testing::{at, ca, cas, configuration, service};

    #[test]
    fn progress_is_read_as_it_was_written() {
        for phase in Phase::ALL {
            let progress = Progress { request: at(1_000), phase };
            assert_eq!(progress.to_string().parse(), Ok(progress));
        }
        for text in ["", "done", "yesterday done", "2026-11-16T18:00:00Z finished"] {
            assert_eq!(text.parse::<Progress>(), Err(()), "{text}");
        }
    }

    #[test]
    fn rotation_is_done_when_nothing_trusts_a_ca_of_before() {
        let former = cas();
        let old = configuration("1", &[(service(), Some(&former.bundle()))]);
        let phase = |cas: &CaSet| Progress::of(cas, [&old].into_iter()).map(|progress| progress.phase);
        assert_eq!(phase(&former), None, "nobody asked");
        let asked = former.rotating(ca(), at(1_000));
        assert_eq!(phase(&asked), Some(Phase::Publishing));
        let published = asked.with_published(Some(at(2_000)));
        assert_eq!(phase(&published), Some(Phase::Spreading));
        let promoted = published.promoted(at(3_000));
        assert_eq!(phase(&promoted), Some(Phase::Replacing));
        let dropped = CaSet { old: Vec::new(), old_since: None, ..promoted };
        assert_eq!(phase(&dropped), Some(Phase::Removing));
        let new = configuration("2", &[(service(), Some(&dropped.bundle()))]);
        let done = Progress { request: at(1_000), phase: Phase::Done };
        assert_eq!(Progress::of(&dropped, [&new].into_iter()), Some(done));
        // A later rotation by age is not that of the request.
        assert_eq!(Progress::of(&dropped.with_next(ca()), [&new].into_iter()), Some(done));
    }
}
