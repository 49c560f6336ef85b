//! The minor versions of Kubernetes whose control plane can be compiled, each pinned by a `go.mod` of its own.

use std::env;

use crate::Error;

/// Which one tests, demo and benchmarks run on.
pub(crate) const VARIABLE: &str = "LOCKSTEP_TEST_KUBERNETES";

/// A minor version, and the Go module that pins its patch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Minor {
    /// Like `1.37`.
    pub(crate) name: &'static str,
    pub(crate) go_mod: &'static str,
    pub(crate) go_sum: &'static str,
}

macro_rules! minor {
    ($name:literal, $dir:literal) => {
        Minor {
            name: $name,
            go_mod: include_str!(concat!(env!("CARGO_MANIFEST_DIR"), $dir, "/go.mod")),
            go_sum: include_str!(concat!(env!("CARGO_MANIFEST_DIR"), $dir, "/go.sum")),
        }
    };
}

/// The one that is used unless [`VARIABLE`] names another. Its module also pins etcd and the node: a store is not part
/// of Kubernetes, and all API servers in this list work with the same etcd.
pub(crate) const DEFAULT: Minor = minor!("1.37", "");

/// From the oldest that Lockstep supports to the newest.
const ALL: [Minor; 8] = [
    minor!("1.30", "/versions/1.30"),
    minor!("1.31", "/versions/1.31"),
    minor!("1.32", "/versions/1.32"),
    minor!("1.33", "/versions/1.33"),
    minor!("1.34", "/versions/1.34"),
    minor!("1.35", "/versions/1.35"),
    minor!("1.36", "/versions/1.36"),
    DEFAULT,
];

/// Their names, from the oldest to the newest.
pub fn versions() -> impl Iterator<Item = &'static str> {
    ALL.iter().map(|minor| minor.name)
}

/// The minor version of this name.
pub(crate) fn named(name: &str) -> Option<Minor> {
    ALL.into_iter().find(|minor| minor.name == name)
}

/// The one that [`VARIABLE`] names; an empty variable counts as unset.
pub(crate) fn asked_for() -> Result<Option<Minor>, Error> {
    match env::var_os(VARIABLE).filter(|value| !value.is_empty()) {
        None => Ok(None),
        Some(value) => named(&value.to_string_lossy())
            .map(Some)
            .ok_or_else(|| Error::UnknownVersion { name: value.to_string_lossy().into_owned() }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn minor_has_the_version_that_its_module_pins() {
        for minor in ALL {
            let pinned = format!("k8s.io/kubernetes v{}.", minor.name);
            assert!(minor.go_mod.contains(&pinned), "{}", minor.name);
            assert!(minor.go_sum.contains(&pinned), "{}", minor.name);
        }
    }

    #[test]
    fn all_modules_of_kubernetes_have_the_same_patch() {
        for minor in ALL {
            let lines = minor.go_mod.lines().filter(|line| line.contains("=> k8s.io/"));
            let patches: Vec<&str> =
                lines.filter_map(|line| line.rsplit_once(" v0.").map(|(_, v)| v)).collect();
            let kubernetes = minor.go_mod.split("k8s.io/kubernetes v1.").nth(1).unwrap();
            let kubernetes = kubernetes.split_whitespace().next().unwrap();
            assert!(patches.len() > 20, "{}", minor.name);
            assert!(patches.iter().all(|patch| *patch == kubernetes), "{}: {patches:?}", minor.name);
        }
    }

    #[test]
    fn names_are_found_exactly() {
        assert_eq!(named("1.30").map(|minor| minor.name), Some("1.30"));
        for unknown in ["", "1.3", "1.29", "v1.30", "1.30.14", "newest"] {
            assert_eq!(named(unknown), None, "{unknown}");
        }
    }
}
