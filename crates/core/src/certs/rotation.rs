//! The next change of the CA Secret.
//!
//! A rotation: add the next CA → publish it beside the current one → record that it has been read back → wait until
//! every API server trusts it → promote it → drop the old one. Its progress is in the Secret, so any replica continues.

use std::{fmt, sync::Arc, time::Duration};

use k8s_openapi::jiff::Timestamp;

use super::{
    issue::{Ca, Certificate, Error, SubjectNames, UnusableCa},
    lifetimes::{Due, Lifetimes},
    secret::{CaSet, ParsedSecret},
    webhooks::Published,
};
use crate::object::time::later;

/// The most that the clock of a client may be ahead of that of a replica.
const MAX_CLOCK_SKEW: Duration = Duration::from_mins(5);

/// Whether somebody can have asked for a rotation at this time. Replicas take up only later requests than the last one,
/// so a request for the year 9999 would be the last for ever: such a one is not taken up, and counts as absent where it
/// is recorded.
pub fn is_plausible(request: Timestamp, now: Timestamp) -> bool {
    request <= later(now, MAX_CLOCK_SKEW)
}

/// What the next change of the Secret depends on.
#[derive(Clone, Copy)]
pub(crate) struct Inputs<'a> {
    /// None if there is no Secret.
    pub secret: Option<&'a ParsedSecret>,
    /// The last usable content of the Secret.
    pub remembered: Option<&'a CaSet>,
    pub published: &'a Published,
    /// The names that a leaf must have.
    pub names: &'a SubjectNames,
    /// The CA that signed the leaf being served, while that leaf is valid.
    pub serving: Option<&'a Certificate>,
    /// When somebody last asked for a rotation.
    pub request: Option<Timestamp>,
    pub now: Timestamp,
    pub lifetimes: &'a Lifetimes,
}

/// A change of the Secret, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SecretChange {
    /// There is no Secret: create it, with the CAs we remember if they are still valid.
    Create,
    /// Its CA is unusable: put back the one we remember.
    RestoreCa(UnusableCa),
    /// Its CA is unusable and we remember none: generate a new one.
    ReplaceCa(UnusableCa),
    /// A field other than the current CA is malformed.
    RepairFields,
    /// The next CA cannot be used: remove it.
    DropNextCa(UnusableCa),
    /// Somebody put another CA there: keep trusting the CAs whose leaves replicas may still serve.
    KeepFormerCas,
    /// Somebody asked for a rotation: add a next CA, and revoke all others.
    Rotate(Timestamp),
    /// The current CA has passed two thirds of its lifetime, or is revoked.
    AddNextCa,
    /// The next CA was read back from the webhook configurations: record when.
    RecordPublished,
    /// The next CA is no longer in the webhook configurations: clear that record.
    ClearPublished,
    /// The next CA signs from now on.
    PromoteNextCa,
    /// No leaf of an old CA can be valid any more: stop trusting it.
    DropOldCas,
}

impl SecretChange {
    /// Whether it undoes damage.
    pub const fn is_repair(self) -> bool {
        matches!(
            self,
            Self::RestoreCa(_)
                | Self::ReplaceCa(_)
                | Self::RepairFields
                | Self::DropNextCa(_)
                | Self::KeepFormerCas
        )
    }

    /// Whether the content of the Secret must not be published or used before this change is made.
    const fn blocks_use(self) -> bool {
        self.is_repair() || matches!(self, Self::Create)
    }

    /// Whether it may be due again at once: somebody undoes it, or another replica observes something else.
    pub const fn may_recur(self) -> bool {
        self.blocks_use() || matches!(self, Self::ClearPublished)
    }
}

/// The log line after the change was made.
impl fmt::Display for SecretChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Create => "created the CA Secret",
            Self::RestoreCa(why) => {
                return write!(f, "the CA in the CA Secret was unusable ({why}); put back the former one");
            }
            Self::ReplaceCa(why) => {
                return write!(f, "the CA in the CA Secret was unusable ({why}); replaced it by a new one");
            }
            Self::RepairFields => "the CA Secret had malformed fields; repaired it",
            Self::DropNextCa(why) => {
                return write!(f, "the next CA in the CA Secret was unusable ({why}); removed it");
            }
            Self::KeepFormerCas => {
                "somebody put another CA into the CA Secret; former CAs stay trusted until it is published and used"
            }
            Self::Rotate(_) => "somebody asked for a rotation; added the next CA to the CA Secret",
            Self::AddNextCa => "added the next CA to the CA Secret",
            Self::RecordPublished => "the next CA is published",
            Self::ClearPublished => "the next CA is no longer published; publishing it again",
            Self::PromoteNextCa => "the next CA is the current one from now on",
            Self::DropOldCas => "removed old CAs from the CA Secret",
        })
    }
}

impl<'a> Inputs<'a> {
    /// The next change of the Secret, or when to check again.
    pub(crate) fn next_change(&self) -> Due<SecretChange> {
        use SecretChange as Change;
        let Self { now, lifetimes, .. } = *self;
        let Some(secret) = self.secret else { return Due::Now(Change::Create) };
        let next_ca = secret.cas.as_ref().ok().and_then(|cas| cas.next.as_ref());
        let next_ca = next_ca.map(|next| next.ca.check(self.names, now));
        let cas = match self.usable(secret) {
            Ok(cas) => cas,
            // Even if it is not published everywhere yet: no other CA could sign a leaf.
            Err(UnusableCa::Expired) if next_ca == Some(Ok(())) => return Due::Now(Change::PromoteNextCa),
            Err(why) if self.still_usable().is_some() => return Due::Now(Change::RestoreCa(why)),
            Err(why) => return Due::Now(Change::ReplaceCa(why)),
        };
        if secret.malformed {
            return Due::Now(Change::RepairFields);
        }
        // A backup of the Secret, or a replica that was cut off, brings back a CA whose key may have leaked.
        let current = &cas.current.certificate;
        let brings_back = |remembered: &CaSet| {
            remembered.revokes(current) && !remembered.revokes(&remembered.current.certificate)
        };
        if self.still_usable().is_some_and(|remembered| brings_back(&remembered)) {
            return Due::Now(Change::RestoreCa(UnusableCa::Revoked));
        }
        if let Some(Err(why)) = next_ca {
            return Due::Now(Change::DropNextCa(why));
        }
        if self.maybe_served(cas).iter().any(|certificate| !cas.trusts(certificate)) {
            return Due::Now(Change::KeepFormerCas);
        }
        // One requested rotation at a time: a request that arrives during one waits until the CAs which that one
        // revoked are gone. Otherwise requests in a row would replace the next CA before it signs, and the leaked one
        // would go on. The rotation under way does not count for the request: the key of its next CA may have leaked
        // before the request.
        let recorded = cas.revocation.request.filter(|last| is_plausible(*last, now));
        let is_new = |request: &Timestamp| is_plausible(*request, now) && recorded < Some(*request);
        if let Some(request) = self.request.filter(is_new)
            && !cas.trusts_revoked()
        {
            return Due::Now(Change::Rotate(request));
        }
        let mut check_at = current.not_after;
        let delay = lifetimes.propagation_delay();
        match &cas.next {
            None if now >= current.renew_at() || cas.revokes(current) => return Due::Now(Change::AddNextCa),
            None => check_at = check_at.min(current.renew_at()),
            Some(next) => {
                // A time further in the future than clocks differ was written by a wrong clock.
                let recorded = next.published.filter(|at| *at <= later(now, delay));
                match (recorded, self.published.contains(&next.ca.certificate)) {
                    (None, Some(true)) => return Due::Now(Change::RecordPublished),
                    (Some(_), Some(false)) => return Due::Now(Change::ClearPublished),
                    (Some(at), Some(true)) if now >= later(at, delay) => {
                        return Due::Now(Change::PromoteNextCa);
                    }
                    (Some(at), Some(true)) => check_at = check_at.min(later(at, delay)),
                    _ => {}
                }
            }
        }
        if let Some(since) = cas.old_since {
            let drop_at = cas.old.iter().map(|old| self.retire_at(cas, old, since)).min().unwrap_or(now);
            if now >= drop_at || self.is_ahead(since) {
                return Due::Now(Change::DropOldCas);
            }
            check_at = check_at.min(drop_at);
        }
        Due::At(check_at)
    }

    /// What the Secret holds after a change; none if the change does not fit the Secret. Fails if no CA can be
    /// generated.
    pub(crate) fn contents_after(
        &self,
        change: SecretChange,
        instance: &str,
    ) -> Result<Option<CaSet>, Error> {
        use SecretChange as Change;
        let now = self.now;
        let new_ca = || Ca::generate(instance, self.lifetimes.ca_validity, now).map(Arc::new);
        let remembered = self.still_usable();
        let parsed = self.secret.and_then(|secret| secret.cas.clone().ok());
        Ok(Some(match (change, parsed) {
            (Change::Create | Change::RestoreCa(_), _) if remembered.is_some() => return Ok(remembered),
            (Change::Create | Change::RestoreCa(_) | Change::ReplaceCa(_), _) => {
                // A CA whose key may have leaked is not trusted again.
                let in_secret = self.secret.map(|secret| &secret.revocation);
                let in_memory = self.remembered.map(|cas| &cas.revocation);
                let known = in_secret.filter(|known| !known.digests.is_empty()).or(in_memory);
                let cas = CaSet { revocation: known.cloned().unwrap_or_default(), ..CaSet::new(new_ca()?) };
                // Other replicas may serve leaves of CAs that are unusable here.
                let former =
                    self.secret.into_iter().flat_map(|secret| &secret.certificates).chain(self.serving);
                let former: Vec<Certificate> = former.filter(|one| !cas.revokes(one)).cloned().collect();
                former.into_iter().fold(cas, |cas, certificate| cas.with_old(certificate, now))
            }
            (_, None) => return Ok(None),
            (Change::RepairFields, Some(mut cas)) => {
                cas.old_since = cas.old_since.or((!cas.old.is_empty()).then_some(now));
                let same_ca = |known: &CaSet| known.current.certificate == cas.current.certificate;
                remembered.filter(same_ca).unwrap_or_else(|| cas.without_expired(now))
            }
            (Change::DropNextCa(_), Some(cas)) => CaSet { next: None, ..cas },
            (Change::KeepFormerCas, Some(cas)) => {
                let former = self.maybe_served(&cas);
                former.into_iter().fold(cas, |cas, certificate| cas.with_old(certificate.clone(), now))
            }
            (Change::Rotate(request), Some(cas)) => cas.rotating(new_ca()?, request),
            (Change::AddNextCa, Some(cas)) => cas.with_next(new_ca()?),
            (Change::RecordPublished, Some(cas)) => cas.with_published(Some(now)),
            (Change::ClearPublished, Some(cas)) => cas.with_published(None),
            (Change::PromoteNextCa, Some(cas)) => cas.promoted(now),
            (Change::DropOldCas, Some(cas)) => {
                let since = cas.old_since.unwrap_or(now);
                if self.is_ahead(since) {
                    return Ok(Some(CaSet { old_since: Some(now), ..cas }));
                }
                let is_needed = |old: &&Certificate| self.retire_at(&cas, old, since) > now;
                let old: Vec<Certificate> = cas.old.iter().filter(is_needed).cloned().collect();
                CaSet { old_since: cas.old_since.filter(|_| !old.is_empty()), old, ..cas }
            }
        }))
    }

    /// The CAs to publish and to sign with: those in the Secret, unless a change must be made first.
    pub(crate) fn usable_cas(&self, due: Due<SecretChange>) -> Option<CaSet> {
        let secret = self.secret.filter(|_| !matches!(due, Due::Now(change) if change.blocks_use()))?;
        self.usable(secret).ok().cloned()
    }

    /// The CAs in the Secret, if the current one can be used.
    fn usable<'s>(&self, secret: &'s ParsedSecret) -> Result<&'s CaSet, UnusableCa> {
        let cas = secret.cas.as_ref().map_err(|why| *why)?;
        cas.current.check(self.names, self.now)?;
        Ok(cas)
    }

    /// Until when an old CA is trusted.
    fn retire_at(&self, cas: &CaSet, old: &Certificate, since: Timestamp) -> Timestamp {
        let revoked = cas.revokes(old);
        let delay = if revoked { self.lifetimes.revoke_after() } else { self.lifetimes.retire_after() };
        later(since, delay).min(old.not_after)
    }

    /// Whether `old.since` was written by a clock that was ahead. The old CAs would be trusted for too long.
    fn is_ahead(&self, since: Timestamp) -> bool {
        since > later(self.now, self.lifetimes.retire_after())
    }

    /// The remembered CAs without expired ones; none if the current one cannot be used any more.
    fn still_usable(&self) -> Option<CaSet> {
        let remembered = self.remembered.filter(|cas| cas.current.check(self.names, self.now).is_ok());
        remembered.map(|cas| cas.without_expired(self.now))
    }

    /// The CAs whose leaves may be served although the Secret may not list them: our leaf's, and, if the Secret has a
    /// foreign CA, all that were trusted before. The Secret is published at once, and calls would fail without them.
    /// Not those that are revoked: a replica that was cut off for long gets a new leaf instead.
    fn maybe_served(&self, cas: &CaSet) -> Vec<&'a Certificate> {
        let is_foreign = |remembered: &&CaSet| !remembered.trusts(&cas.current.certificate);
        let mut served = self.remembered.filter(is_foreign).map(CaSet::trusted).unwrap_or_default();
        served.extend(self.serving);
        served.retain(|certificate| !certificate.has_expired(self.now) && !cas.revokes(certificate));
        served
    }
}

#[cfg(test)]
mod tests;
