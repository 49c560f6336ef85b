//! What the annotations of the Lease say about deletes that are held: written by the leader and by `lockstep
//! deletes`, read by every replica and by people's commands.

use std::{collections::BTreeMap, time::Duration};

use k8s_openapi::jiff::Timestamp;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::{
    keys::Keys,
    object::time::{between, later},
    text,
};

/// How far in the future a hold may end: a mistyped extension does not keep companions for years.
pub const MAX_HOLD: Duration = Duration::from_hours(24 * 30);
/// A longer annotation is not one of ours.
const MAX_ANNOTATION_BYTES: usize = 2048;
/// Names of users have no bound of their own.
const MAX_USER_CHARS: usize = 256;

/// The value of the annotation `deletes-held`, which the leader writes. There is at most one hold at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeldDeletes {
    /// When the leader began to hold deletes; also the identity of this hold in [`Release`] and [`Extension`].
    pub since: Timestamp,
    /// When the last of these deletes happens.
    pub until: Timestamp,
    pub companions: usize,
    pub sources: usize,
}

/// The value of the annotation `deletes-released`: a hold that must not go on. People write it; the leader does when a
/// hold ends before its time because nothing is left to hold.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Release {
    /// [`HeldDeletes::since`] of the hold, so that no later hold is released by it.
    pub hold: Timestamp,
    pub at: Timestamp,
    pub by: String,
}

/// The value of the annotation `deletes-extended`: somebody wants a hold to last longer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extension {
    /// [`HeldDeletes::since`] of the hold.
    pub hold: Timestamp,
    pub until: Timestamp,
    pub at: Timestamp,
    pub by: String,
}

/// All of it, as read from the Lease.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HoldAnnotations {
    pub held: Option<HeldDeletes>,
    pub released: Option<Release>,
    pub extended: Option<Extension>,
    /// The annotations that cannot be read, which count as absent.
    pub malformed: Vec<String>,
}

impl HoldAnnotations {
    pub fn read(keys: &Keys, annotations: &BTreeMap<String, String>) -> Self {
        let mut malformed = Vec::new();
        let held = parse(annotations, &keys.deletes_held, &mut malformed);
        let released = parse::<Release>(annotations, &keys.deletes_released, &mut malformed);
        let extended = parse::<Extension>(annotations, &keys.deletes_extended, &mut malformed);
        Self {
            held,
            released: released.map(|release| Release { by: user(&release.by), ..release }),
            extended: extended.map(|extension| Extension { by: user(&extension.by), ..extension }),
            malformed,
        }
    }

    /// The release of this hold, if one was recorded.
    pub fn release_of(&self, hold: &HeldDeletes) -> Option<&Release> {
        self.released.as_ref().filter(|release| release.hold == hold.since)
    }

    /// The extension of this hold, if somebody asked for one that ends later than it does.
    pub(crate) fn extension_of(&self, hold: &HeldDeletes) -> Option<&Extension> {
        self.extended.as_ref().filter(|wanted| wanted.hold == hold.since && wanted.until > hold.until)
    }

    /// The hold that is in force: neither over nor released.
    pub fn in_force(&self, now: Timestamp) -> Option<HeldDeletes> {
        self.held.filter(|hold| now < hold.until && self.release_of(hold).is_none())
    }
}

impl Release {
    pub fn new(hold: &HeldDeletes, at: Timestamp, by: &str) -> Self {
        Self { hold: hold.since, at: seconds(at), by: user(by) }
    }
}

impl Extension {
    pub fn new(hold: &HeldDeletes, by_time: Duration, at: Timestamp, by: &str) -> Self {
        let until = seconds(later(hold.until, by_time));
        Self { hold: hold.since, until, at: seconds(at), by: user(by) }
    }
}

/// The value of an annotation.
pub fn to_annotation(value: &impl Serialize) -> String {
    // Times, numbers and texts: nothing that JSON cannot have.
    serde_json::to_string(value).unwrap_or_default()
}

fn parse<T: DeserializeOwned>(
    annotations: &BTreeMap<String, String>,
    key: &str,
    malformed: &mut Vec<String>,
) -> Option<T> {
    let text = annotations.get(key)?;
    let value = if text.len() > MAX_ANNOTATION_BYTES { None } else { serde_json::from_str(text).ok() };
    if value.is_none() {
        malformed.push(key.to_owned());
    }
    value
}

/// The name of a user, as the log and people's commands show it: anybody with a right on the Lease can write any text.
fn user(name: &str) -> String {
    text::shorten(name, MAX_USER_CHARS).replace(char::is_control, " ")
}

/// This many whole seconds: annotations show no fractions.
pub fn seconds(at: Timestamp) -> Timestamp {
    Timestamp::from_second(at.as_second()).unwrap_or(at)
}

/// The time from `now` until `at`; zero if it is over, and never more than [`MAX_HOLD`].
pub(crate) fn time_left(now: Timestamp, at: Timestamp) -> Duration {
    between(now, at).min(MAX_HOLD)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;

    fn at(text: &str) -> Timestamp {
        text.parse().unwrap()
    }

    fn hold() -> HeldDeletes {
        let (since, until) = (at("2026-11-17T18:00:00Z"), at("2026-11-17T19:00:00Z"));
        HeldDeletes { since, until, companions: 37, sources: 22 }
    }

    fn read(key: &str, value: &str) -> HoldAnnotations {
        HoldAnnotations::read(&testing::keys(), &[(key.to_owned(), value.to_owned())].into())
    }

    #[test]
    fn annotations_are_read_as_they_were_written() {
        let keys = testing::keys();
        let text = to_annotation(&hold());
        let expected =
            r#"{"since":"2026-11-17T18:00:00Z","until":"2026-11-17T19:00:00Z","companions":37,"sources":22}"#;
        assert_eq!(text, expected);
        assert_eq!(read(&keys.deletes_held, &text).held, Some(hold()));
        let release = Release::new(&hold(), at("2026-11-17T18:10:00.5Z"), "alice");
        assert_eq!(read(&keys.deletes_released, &to_annotation(&release)).released, Some(release));
        let extension =
            Extension::new(&hold(), Duration::from_hours(2), at("2026-11-17T18:10:00Z"), &"x".repeat(10_000));
        assert_eq!(extension.until, at("2026-11-17T21:00:00Z"));
        let text = to_annotation(&extension);
        assert!(text.len() < MAX_ANNOTATION_BYTES);
        assert_eq!(read(&keys.deletes_extended, &text).extended, Some(extension));
    }

    #[test]
    fn what_cannot_be_read_counts_as_absent_and_is_named() {
        let key = &testing::keys().deletes_held;
        for text in
            ["", "soon", "{}", r#"{"since":1,"until":2,"companions":3,"sources":4}"#, &" ".repeat(10_000)]
        {
            let seen = read(key, text);
            assert_eq!((seen.held, seen.malformed), (None, vec![key.clone()]), "{text:.20}");
        }
        // A later version may add fields.
        let text = to_annotation(&hold()).replacen('{', r#"{"more":true,"#, 1);
        assert_eq!(read(key, &text).held, Some(hold()));
    }

    #[test]
    fn hold_is_in_force_until_its_end_unless_it_was_released() {
        let (before, end) = (at("2026-11-17T18:59:59Z"), hold().until);
        let mut seen = HoldAnnotations { held: Some(hold()), ..HoldAnnotations::default() };
        assert_eq!((seen.in_force(before), seen.in_force(end)), (Some(hold()), None));
        let earlier = HeldDeletes { since: at("2026-11-17T17:00:00Z"), ..hold() };
        seen.released = Some(Release::new(&earlier, before, "alice"));
        assert_eq!(seen.in_force(before), Some(hold()), "that was another hold");
        seen.released = Some(Release::new(&hold(), before, "alice"));
        assert_eq!(seen.in_force(before), None);
    }

    #[test]
    fn time_left_is_bounded() {
        assert_eq!(time_left(at("2026-11-17T18:00:00Z"), hold().until), Duration::from_hours(1));
        assert_eq!(time_left(hold().until, hold().since), Duration::ZERO);
        assert_eq!(time_left(hold().since, Timestamp::MAX), MAX_HOLD);
    }
}
