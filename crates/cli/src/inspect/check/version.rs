//! PURE. Whether the API server has a version of Kubernetes on which Lockstep works.

use k8s_openapi::apimachinery::pkg::version::Info;

use super::{Check, bad, good, unknown, warning};

/// The oldest version of Kubernetes that is supported: `MINOR` of 1.MINOR.
pub const MIN_MINOR: u32 = 30;
/// The newest version on which the end-to-end tests run. Newer ones probably work.
pub const NEWEST_TESTED_MINOR: u32 = 37;

pub(super) fn judge(version: &Info) -> Check {
    let text = format!("Kubernetes {}", version.git_version);
    // Some clouds write `31+`.
    let digits = version.minor.split(|char: char| !char.is_ascii_digit()).next().unwrap_or_default();
    match (version.major.as_str(), digits.parse::<u32>()) {
        ("1", Ok(minor)) if minor < MIN_MINOR => {
            bad(text, format!("Lockstep needs Kubernetes 1.{MIN_MINOR} or newer"))
        }
        ("1", Ok(minor)) if minor > NEWEST_TESTED_MINOR => warning(
            text,
            format!(
                "this version of Lockstep is tested on 1.{MIN_MINOR} to 1.{NEWEST_TESTED_MINOR}: is there a newer one?"
            ),
        ),
        ("1", Ok(_)) => good(text),
        _ => unknown(format!("{text}, whose minor version cannot be read")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inspect::check::Level;

    fn judged(minor: &str, git_version: &str) -> Check {
        let (major, git_version) = ("1".to_owned(), git_version.to_owned());
        judge(&Info { major, minor: minor.to_owned(), git_version, ..Info::default() })
    }

    #[test]
    fn supported_versions_of_clouds_and_distributions_are_good() {
        for (minor, version) in [
            ("30", "v1.30.0"),
            ("30", "v1.30.0-rc.1"),
            ("31", "v1.31.4-gke.100"),
            ("32+", "v1.32.9-eks-113cf36"),
            ("33", "v1.33.1+k3s1"),
            ("36", "v1.36.3"),
            ("37", "v1.37.1"),
        ] {
            let check = judged(minor, version);
            assert_eq!((check.level, check.text), (Level::Good, format!("Kubernetes {version}")));
        }
    }

    #[test]
    fn older_version_is_bad_and_a_newer_one_than_the_tests_know_is_a_warning() {
        for (minor, version) in [("29", "v1.29.14"), ("29+", "v1.29.8-eks-a737599"), ("9", "v1.9.0")] {
            let check = judged(minor, version);
            assert_eq!(check.level, Level::Bad, "{version}");
            assert_eq!(check.remedy.as_deref(), Some("Lockstep needs Kubernetes 1.30 or newer"));
        }
        let check = judged("38", "v1.38.0");
        assert_eq!(check.level, Level::Warning);
        assert!(check.remedy.is_some_and(|remedy| remedy.contains("tested on 1.30 to 1.37")));
    }

    #[test]
    fn unreadable_version_is_not_taken_for_an_old_one() {
        for minor in ["", "x", "+"] {
            assert_eq!(judged(minor, "v1").level, Level::Unknown, "{minor:?}");
        }
    }
}
