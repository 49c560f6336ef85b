//! When the leaf of this replica is replaced.

use k8s_openapi::jiff::Timestamp;

use super::{
    issue::{Leaf, SubjectNames},
    lifetimes::{Due, Lifetimes, MAX_SLEEP},
    secret::CaSet,
    webhooks::Published,
};
use crate::object::time::later;

/// Why a new leaf is issued.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Renewal {
    First,
    /// The leaf has expired, or the clock was set back to before it is valid.
    Invalid,
    /// Two thirds of its lifetime have passed.
    Expiring,
    /// It lacks a name that a webhook calls.
    MissingName,
    /// Another CA signs now, and every API server trusts it.
    NewCa,
}

/// Whether the current CA should sign a new leaf, or when to check again.
///
/// A CA that some API server may not trust yet signs only if there is no other valid leaf.
pub(crate) fn renewal(
    leaf: Option<&Leaf>,
    cas: &CaSet,
    published: &Published,
    names: &SubjectNames,
    now: Timestamp,
    lifetimes: &Lifetimes,
) -> Due<Renewal> {
    let current = &cas.current.certificate;
    // A leaf of an invalid CA would be invalid, and renewed without end. The Secret gets another CA soon.
    let if_ca_valid =
        |why| if current.is_valid(now) { Due::Now(why) } else { Due::At(later(now, MAX_SLEEP)) };
    let Some(leaf) = leaf else { return if_ca_valid(Renewal::First) };
    let expiry = leaf.certificate.not_after;
    if !leaf.certificate.is_valid(now) {
        return if_ca_valid(Renewal::Invalid);
    }
    if leaf.issuer != *current {
        // It is revoked: waiting for the new CA would not make this leaf trusted again.
        if !cas.trusts(&leaf.issuer) {
            return if_ca_valid(Renewal::NewCa);
        }
        return match published.propagated_at(current, lifetimes.propagation_delay()) {
            Some(at) if at <= now => Due::Now(Renewal::NewCa),
            Some(at) => Due::At(at.min(expiry)),
            None => Due::At(expiry),
        };
    }
    if !names.is_subset(&leaf.names) {
        return Due::Now(Renewal::MissingName);
    }
    // A new leaf would expire with its CA as this one does.
    if expiry >= current.not_after {
        return Due::At(expiry);
    }
    if leaf.renew_at <= now { Due::Now(Renewal::Expiring) } else { Due::At(leaf.renew_at) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::certs::{
        issue::BACKDATE,
        testing::{LIFETIMES, at, ca, cas, published},
    };

    #[test]
    fn leaf_is_renewed_after_two_thirds_of_its_lifetime_or_when_it_lacks_a_name() {
        let cas = cas();
        let names = |all: &[&str]| all.iter().map(|name| (*name).to_owned()).collect::<SubjectNames>();
        let issue =
            |all: &[&str], ms| cas.current.issue(&names(all), LIFETIMES.leaf_validity, at(ms)).unwrap();
        let leaf = issue(&["a", "b"], 0);
        let check = |leaf: Option<&Leaf>, wanted: &[&str], now| {
            renewal(leaf, &cas, &Published::Unknown, &names(wanted), at(now), &LIFETIMES)
        };
        assert_eq!(check(None, &["a"], 0), Due::Now(Renewal::First));
        assert_eq!(check(Some(&leaf), &["a", "b"], 0), Due::At(at(4_000)));
        assert_eq!(check(Some(&leaf), &["a", "b"], 3_999), Due::At(at(4_000)));
        assert_eq!(check(Some(&leaf), &["a", "b"], 4_000), Due::Now(Renewal::Expiring));
        assert_eq!(check(Some(&leaf), &["a"], 1_000), Due::At(at(4_000)), "an extra name does no harm");
        assert_eq!(check(Some(&leaf), &["a", "c"], 1_000), Due::Now(Renewal::MissingName));
        assert_eq!(check(Some(&leaf), &["a"], 6_000), Due::Now(Renewal::Invalid));
        let later = issue(&["a"], 12_000);
        let before_the_ca = -i64::try_from(BACKDATE.as_millis()).unwrap() - 1;
        assert_eq!(check(Some(&later), &["a"], -290_000), Due::At(at(16_000)), "the clock was set back");
        assert_eq!(
            check(Some(&later), &["a"], before_the_ca),
            Due::At(at(before_the_ca + 60_000)),
            "the clock was set back to before the CA is valid"
        );
        assert_eq!(check(Some(&leaf), &["a"], 24_000), Due::At(at(84_000)), "its CA has expired, too");
        assert_eq!(check(None, &["a"], 24_000), Due::At(at(84_000)));
        // A new leaf would not be valid any longer than this one, which expires with the CA.
        let last = issue(&["a"], 20_000);
        assert_eq!(check(Some(&last), &["a"], 23_500), Due::At(at(24_000)));
    }

    #[test]
    fn new_ca_signs_only_after_the_propagation_delay_unless_there_is_no_valid_leaf() {
        let former = ca();
        let cas = cas().with_old(former.certificate.clone(), at(0));
        let names = SubjectNames::from(["a".to_owned()]);
        let leaf = former.issue(&names, LIFETIMES.leaf_validity, at(0)).unwrap();
        let check =
            |published: &Published, now| renewal(Some(&leaf), &cas, published, &names, at(now), &LIFETIMES);
        let expiry = Due::At(leaf.certificate.not_after);
        assert_eq!(check(&Published::Unknown, 1_000), expiry);
        assert_eq!(check(&published(&[&former.certificate], at(0)), 5_000), expiry);
        let published = published(&[&former.certificate, &cas.current.certificate], at(1_000));
        assert_eq!(check(&published, 2_999), Due::At(at(3_000)));
        assert_eq!(check(&published, 3_000), Due::Now(Renewal::NewCa));
        assert_eq!(check(&Published::NoWebhooks, 0), Due::Now(Renewal::NewCa), "no webhook calls us");
        assert_eq!(check(&Published::Unknown, 6_000), Due::Now(Renewal::Invalid));
        let revoked = CaSet::new(cas.current.clone());
        let due = renewal(Some(&leaf), &revoked, &Published::Unknown, &names, at(0), &LIFETIMES);
        assert_eq!(due, Due::Now(Renewal::NewCa), "its CA is no longer trusted");
    }
}
