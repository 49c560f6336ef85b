//! Settings as they are given, and the checks that make them valid.

use std::{net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use clap::{Args, ValueEnum};
use k8s_openapi::jiff::{Span, SpanRelativeTo};

use crate::{
    certs::{self, files::Files, phase::Pace},
    guard::{request::Subjects, review::Rules},
    keys::Keys,
    leader, mirror, names,
    object::Kind,
    ops::log,
    policy::{
        Protect, Targets,
        pattern::{Pattern, Patterns},
    },
    world::{Scope, state::Limits},
};

/// The domain, suffix and namespace where nothing else is said, as they stand in `deploy/`.
pub const DOMAIN: &str = "workshop.io";
pub const SUFFIX: &str = "-synced";
pub const NAMESPACE: &str = "lockstep-system";

/// `lockstep run`: every flag is also an environment variable, `LOCKSTEP_…`.
#[derive(Debug, Clone, Args)]
pub struct Run {
    /// Prefix of all labels and annotations; instances with different domains live side by side
    #[arg(long, env = "LOCKSTEP_DOMAIN", default_value = DOMAIN, value_parser = domain)]
    pub domain: String,

    /// Appended to a source's name to make its companion's
    #[arg(long, env = "LOCKSTEP_SUFFIX", default_value = SUFFIX, allow_hyphen_values = true, value_parser = suffix)]
    pub suffix: String,

    /// What is mirrored; Secrets need the RBAC of deploy/components/secrets
    #[arg(long, env = "LOCKSTEP_KINDS", default_value = "configmaps", value_delimiter = ',')]
    pub kinds: Vec<KindName>,

    /// Sources planned at a time
    #[arg(long, env = "LOCKSTEP_WORKERS", default_value = "4", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub workers: u16,

    /// Requests to the API server at a time
    #[arg(long, env = "LOCKSTEP_WRITES", default_value = "64", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub writes: u16,

    /// How often every source is looked at, changed or not
    #[arg(long, env = "LOCKSTEP_RESYNC", default_value = "30s", value_parser = positive_duration)]
    pub resync: Duration,

    /// Lockstep's own namespace, which holds neither sources nor targets [default: the pod's, else lockstep-system]
    #[arg(long, env = "LOCKSTEP_NAMESPACE", value_parser = namespace)]
    pub namespace: Option<String>,

    /// Namespaces (names or prefixes) that are targets only where their accept-from allows; kube-* always is one
    #[arg(long, env = "LOCKSTEP_EXCLUDE_NAMESPACES", value_delimiter = ',', value_parser = pattern)]
    pub exclude_namespaces: Vec<Pattern>,

    /// How long companions stay when more than half of them would go at once; 0s turns this off
    #[arg(long, env = "LOCKSTEP_DELETE_GRACE", default_value = "5m", value_parser = duration)]
    pub delete_grace: Duration,

    /// Run the guard alone, without the mirror
    #[arg(long, env = "LOCKSTEP_NO_CONTROLLER", conflicts_with = "no_webhook")]
    pub no_controller: bool,

    /// Write without asking other replicas: only where there are none
    #[arg(long, env = "LOCKSTEP_NO_LEADER_ELECT")]
    pub no_leader_elect: bool,

    /// How long the Lease of a replica that is gone keeps the others from writing
    #[arg(long, env = "LOCKSTEP_LEASE_DURATION", default_value = "15s", value_parser = lease_duration)]
    pub lease_duration: Duration,

    /// Where the guard serves admission reviews over HTTPS
    #[arg(long, env = "LOCKSTEP_WEBHOOK_BIND", default_value = "0.0.0.0:9443")]
    pub webhook_bind: SocketAddr,

    /// Run the mirror alone, without the guard: nobody then checks who may mirror where
    #[arg(long, env = "LOCKSTEP_NO_WEBHOOK")]
    pub no_webhook: bool,

    /// target-namespaces of sources that set no targets, where their namespace has no default
    #[arg(long, env = "LOCKSTEP_DEFAULT_TARGETS", default_value = ".", value_parser = targets)]
    pub default_targets: String,

    /// protect of sources that do not set it, where their namespace has no default
    #[arg(long, env = "LOCKSTEP_DEFAULT_PROTECT", default_value = "edits")]
    pub default_protect: Protect,

    /// Users whom the guard lets do anything
    #[arg(long, env = "LOCKSTEP_EXEMPT_USER", value_name = "NAME", value_delimiter = ',')]
    pub exempt_user: Vec<String>,

    /// Groups whose members the guard lets do anything
    #[arg(long, env = "LOCKSTEP_EXEMPT_GROUP", value_name = "NAME", value_delimiter = ',')]
    pub exempt_group: Vec<String>,

    /// Users who write sources on behalf of others (cert-manager, Argo CD): only accept-from counts, not their rights
    #[arg(long, env = "LOCKSTEP_DEPUTY_USER", value_name = "NAME", value_delimiter = ',')]
    pub deputy_user: Vec<String>,

    /// Groups whose members write sources on behalf of others
    #[arg(long, env = "LOCKSTEP_DEPUTY_GROUP", value_name = "NAME", value_delimiter = ',')]
    pub deputy_group: Vec<String>,

    /// Certificate chain of the guard, PEM, read again when it changes [default: generated]
    #[arg(long, env = "LOCKSTEP_TLS_CERT", value_name = "FILE", requires = "tls_key")]
    pub tls_cert: Option<PathBuf>,

    /// Private key of the guard, PEM
    #[arg(long, env = "LOCKSTEP_TLS_KEY", value_name = "FILE", requires = "tls_cert")]
    pub tls_key: Option<PathBuf>,

    /// How long a generated CA is valid; it is replaced well before
    #[arg(long, env = "LOCKSTEP_CA_VALIDITY", default_value = "365d", value_parser = validity)]
    pub ca_validity: Duration,

    /// How long a generated certificate is valid; it is replaced well before
    #[arg(long, env = "LOCKSTEP_LEAF_VALIDITY", default_value = "7d", value_parser = validity)]
    pub leaf_validity: Duration,

    /// How long the guard serves on after SIGTERM, while others learn that we go
    #[arg(long, env = "LOCKSTEP_DRAIN", default_value = "5s", value_parser = duration)]
    pub drain: Duration,

    /// Where /metrics, /healthz and /readyz are served
    #[arg(long, env = "LOCKSTEP_OPS_BIND", default_value = "0.0.0.0:8080")]
    pub ops_bind: SocketAddr,

    /// [default: text on a terminal, else json]
    #[arg(long, env = "LOCKSTEP_LOG_FORMAT")]
    pub log_format: Option<log::Format>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum KindName {
    Configmaps,
    Secrets,
}

impl Run {
    /// What this instance looks at.
    #[must_use]
    pub fn scope(&self) -> Scope {
        let mut kinds: Vec<Kind> = self.kinds.iter().map(|kind| Kind::from(*kind)).collect();
        kinds.sort_unstable();
        kinds.dedup();
        Scope {
            keys: Arc::new(Keys::new(&self.domain, &self.suffix)),
            limits: Limits {
                own_namespace: self.namespace.clone().unwrap_or_else(own_namespace),
                excluded: Patterns(self.exclude_namespaces.clone()),
            },
            kinds,
        }
    }

    #[must_use]
    pub fn leader(&self, scope: &Scope) -> leader::ElectionConfig {
        leader::ElectionConfig {
            namespace: scope.limits.own_namespace.clone(),
            name: scope.keys.instance.clone(),
            identity: leader::identity(),
            lease_duration: self.lease_duration,
        }
    }

    /// What the guard goes by, when we are `identity`.
    #[must_use]
    pub fn rules(&self, scope: &Scope, identity: String) -> Rules {
        let mut exempt = Subjects { users: self.exempt_user.clone(), groups: self.exempt_group.clone() };
        exempt.users.push(identity);
        Rules {
            keys: scope.keys.clone(),
            own_namespace: scope.limits.own_namespace.clone(),
            exempt,
            deputies: Subjects { users: self.deputy_user.clone(), groups: self.deputy_group.clone() },
            default_targets: self.default_targets.clone(),
            default_protect: self.default_protect,
        }
    }

    #[must_use]
    pub fn mirror(&self, keys: Arc<Keys>) -> mirror::Settings {
        mirror::Settings {
            keys,
            workers: self.workers.into(),
            writes: self.writes.into(),
            resync: self.resync,
            delete_grace: self.delete_grace,
        }
    }

    #[must_use]
    pub fn certs(&self, scope: &Scope) -> certs::Settings {
        let files = self.tls_cert.clone().zip(self.tls_key.clone());
        certs::Settings {
            keys: scope.keys.clone(),
            namespace: scope.limits.own_namespace.clone(),
            pace: Pace { ca_validity: self.ca_validity, leaf_validity: self.leaf_validity },
            files: files.map(|(certificate, key)| Files { certificate, key }),
        }
    }
}

impl From<KindName> for Kind {
    fn from(name: KindName) -> Self {
        match name {
            KindName::Configmaps => Self::ConfigMap,
            KindName::Secrets => Self::Secret,
        }
    }
}

/// The pod's namespace, if we are in a pod.
fn own_namespace() -> String {
    std::fs::read_to_string("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
        .ok()
        .map(|text| text.trim().to_owned())
        .filter(|text| !text.is_empty())
        .unwrap_or_else(|| NAMESPACE.to_owned())
}

/// A domain, as `--domain` takes it.
pub fn domain(text: &str) -> Result<String, String> {
    // `lockstep.<domain>` must fit into a field manager's 128 characters.
    if names::is_subdomain(text) && text.len() <= 100 {
        Ok(text.to_owned())
    } else {
        Err("a DNS name of at most 100 characters is needed, such as `workshop.io`".to_owned())
    }
}

/// A suffix, as `--suffix` takes it.
pub fn suffix(text: &str) -> Result<String, String> {
    let fits = (1..=63).contains(&text.len()) && names::is_subdomain(&format!("x{text}"));
    if fits {
        Ok(text.to_owned())
    } else {
        Err("a name must be able to end with it, as with `-synced`".to_owned())
    }
}

/// A namespace, as `--namespace` takes it.
pub fn namespace(text: &str) -> Result<String, String> {
    if names::is_label(text) {
        Ok(text.to_owned())
    } else {
        Err("that is not the name of a namespace".to_owned())
    }
}

fn pattern(text: &str) -> Result<Pattern, String> {
    text.trim().parse::<Pattern>().map_err(|error| error.to_string())
}

fn targets(text: &str) -> Result<String, String> {
    Targets::default().add(text).map(|()| text.to_owned())
}

/// `90s`, `5m`, `1h30m`, `365d`.
fn duration(text: &str) -> Result<Duration, String> {
    let bad = || "a duration is needed, such as `30s`, `5m` or `365d`".to_owned();
    let span: Span = text.parse().map_err(|_| bad())?;
    let signed = span.to_duration(SpanRelativeTo::days_are_24_hours()).map_err(|_| bad())?;
    Duration::try_from(signed).map_err(|_| bad())
}

/// A Lease knows whole seconds.
fn lease_duration(text: &str) -> Result<Duration, String> {
    duration(text).and_then(|duration| match duration.subsec_nanos() {
        0 if duration.as_secs() >= 2 => Ok(duration),
        _ => Err("whole seconds are needed, two at least".to_owned()),
    })
}

/// Certificates know whole seconds, and are replaced well before they end: with less, again and again without a pause.
pub(crate) fn validity(text: &str) -> Result<Duration, String> {
    duration(text).and_then(|duration| {
        if duration < Duration::from_secs(5) {
            Err("it must be 5s at least".to_owned())
        } else {
            Ok(duration)
        }
    })
}

fn positive_duration(text: &str) -> Result<Duration, String> {
    duration(text).and_then(|duration| {
        if duration.is_zero() { Err("it must be longer than nothing".to_owned()) } else { Ok(duration) }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_as_people_write_them() {
        for (text, seconds) in [("30s", 30), ("5m", 300), ("1h30m", 5400), ("365d", 31_536_000), ("0s", 0)] {
            assert_eq!(duration(text), Ok(Duration::from_secs(seconds)), "{text}");
        }
        for text in ["", "5", "-5s", "soon", "1mo"] {
            assert!(duration(text).is_err(), "{text}");
        }
        assert!(positive_duration("0s").is_err());
        for text in ["0s", "500ms", "4s"] {
            assert!(validity(text).is_err(), "{text}");
        }
        assert_eq!(validity("5s"), Ok(Duration::from_secs(5)));
    }

    #[test]
    fn the_reference_has_every_flag_with_its_default() {
        let reference = include_str!("../docs/reference.md");
        let (_, table) = reference.split_once("## Flags of `lockstep run`").unwrap();
        let (table, _) = table.split_once("\n## ").unwrap();
        let told: Vec<&str> =
            table.lines().filter_map(|line| line.strip_prefix("| `--")?.split('`').next()).collect();
        let command = Run::augment_args(clap::Command::new("run"));
        let flags: Vec<&clap::Arg> =
            command.get_arguments().filter(|flag| flag.get_long().is_some()).collect();
        for flag in &flags {
            let name = flag.get_long().unwrap();
            let default: Vec<String> =
                flag.get_default_values().iter().map(|value| format!("`{}`", value.display())).collect();
            let default = match default.as_slice() {
                [default] if flag.get_action().takes_values() => default,
                _ => "",
            };
            let row = format!("| `--{name}` | {default}");
            assert!(table.contains(&row), "{row}");
        }
        assert_eq!(told.len(), flags.len(), "{told:?}");
    }

    #[test]
    fn names_are_checked() {
        assert!(
            domain("example.com").is_ok()
                && domain("Not A Domain").is_err()
                && domain(&"x".repeat(101)).is_err()
        );
        assert!(
            suffix("-synced").is_ok() && suffix("_x").is_err() && suffix("-").is_err() && suffix("").is_err()
        );
    }
}
