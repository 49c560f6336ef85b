//! The flags of `lockstep run`, their validation, and the settings of each part that follow from them.

use std::{net::SocketAddr, path::PathBuf, sync::Arc, time::Duration};

use clap::Args;

use crate::{certs::files::Files, controller, leader, ops::log};
use lockstep_cli::commands::flags::{KindName, duration, positive_duration, validity};
use lockstep_core::{
    admission::{admission_request::Subjects, review::Rules},
    certs::{decide::CertSettings, lifetimes::Lifetimes},
    keys::{DOMAIN, Keys, NAMESPACE, SUFFIX, domain, instance_flags, namespace, suffix},
    lease::settings::PublishedSettings,
    object::Kind,
    policy::{self, Protect, Targets, list::BadList, pattern::Patterns},
    world::{NamespaceRules, Scope},
};

/// The flags of `lockstep run`. Each is also an environment variable, `LOCKSTEP_…`.
#[derive(Debug, Args)]
pub struct Run {
    /// Prefix of all labels and annotations; instances with different domains can share a cluster
    #[arg(long, help_heading = "What is mirrored", env = "LOCKSTEP_DOMAIN", default_value = DOMAIN, value_parser = domain)]
    pub domain: String,

    /// Suffix of companion names: source `config` gets companion `config-synced`
    #[arg(long, help_heading = "What is mirrored", env = "LOCKSTEP_SUFFIX", default_value = SUFFIX, allow_hyphen_values = true, value_parser = suffix)]
    pub suffix: String,

    /// Kinds to mirror; Secrets need the RBAC of deploy/components/secrets
    #[arg(
        long,
        help_heading = "What is mirrored",
        env = "LOCKSTEP_KINDS",
        default_value = "configmaps",
        value_delimiter = ','
    )]
    pub kinds: Vec<KindName>,

    /// Sources reconciled concurrently
    #[arg(long, help_heading = "Controller", env = "LOCKSTEP_WORKERS", default_value = "4", value_parser = clap::value_parser!(u16).range(1..=256))]
    pub workers: u16,

    /// Concurrent writes to the API server
    #[arg(long, help_heading = "Controller", env = "LOCKSTEP_WRITES", default_value = "64", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub writes: u16,

    /// How much content of sources is kept in memory; content beyond it is read again when it is written
    #[arg(long, help_heading = "Controller", env = "LOCKSTEP_SOURCE_CACHE", default_value = "64Mi", value_parser = bytes)]
    pub source_cache: usize,

    /// How often every source is planned, and reconciled if anything is missing, even if no event said so
    #[arg(long, help_heading = "Controller", env = "LOCKSTEP_RESYNC", default_value = "30s", value_parser = positive_duration)]
    pub resync: Duration,

    /// Lockstep's own namespace; sources and companions are not allowed in it [default: the pod's, else
    /// lockstep-system]
    #[arg(long, help_heading = "Replicas", env = "LOCKSTEP_NAMESPACE", value_parser = namespace)]
    pub namespace: Option<String>,

    /// Names or patterns of namespaces that get companions only if their accept-from allows it, in addition to kube-*
    #[arg(long, help_heading = "What is mirrored", env = "LOCKSTEP_EXCLUDE_NAMESPACES", value_parser = policy::namespace_patterns)]
    pub exclude_namespaces: Option<Patterns>,

    /// How long deletes are held when more than half of all companions in other namespaces than their source would be
    /// deleted at once; 0s disables this
    #[arg(long, help_heading = "Controller", env = "LOCKSTEP_DELETE_GRACE", default_value = "1h", value_parser = duration)]
    pub delete_grace: Duration,

    /// Run only the webhook, without the controller
    #[arg(long, help_heading = "Controller", env = "LOCKSTEP_NO_CONTROLLER", conflicts_with = "no_webhook")]
    pub no_controller: bool,

    /// Write without leader election; use it only with a single replica
    #[arg(long, help_heading = "Replicas", env = "LOCKSTEP_NO_LEADER_ELECT")]
    pub no_leader_elect: bool,

    /// How long after a leader dies before another takes over
    #[arg(long, help_heading = "Replicas", env = "LOCKSTEP_LEASE_DURATION", default_value = "15s", value_parser = lease_duration)]
    pub lease_duration: Duration,

    /// Address on which the webhook serves admission reviews over HTTPS
    #[arg(long, help_heading = "Webhook", env = "LOCKSTEP_WEBHOOK_BIND", default_value = "0.0.0.0:9443")]
    pub webhook_bind: SocketAddr,

    /// Run only the controller, without the webhook; then nothing checks that the author of a source may write to its
    /// targets
    #[arg(long, help_heading = "Webhook", env = "LOCKSTEP_NO_WEBHOOK")]
    pub no_webhook: bool,

    /// target-namespaces of sources that set no targets, unless their namespace has a default
    #[arg(long, help_heading = "What is mirrored", env = "LOCKSTEP_DEFAULT_TARGETS", default_value = ".", value_parser = targets)]
    pub default_targets: String,

    /// protect of sources that do not set it (edits, all or none), unless their namespace has a default
    #[arg(
        long,
        help_heading = "What is mirrored",
        env = "LOCKSTEP_DEFAULT_PROTECT",
        default_value = "edits"
    )]
    pub default_protect: Protect,

    /// Users that the webhook does not restrict
    #[arg(
        long,
        help_heading = "Webhook",
        env = "LOCKSTEP_EXEMPT_USER",
        value_name = "NAME",
        value_delimiter = ','
    )]
    pub exempt_user: Vec<String>,

    /// Groups whose members the webhook does not restrict
    #[arg(
        long,
        help_heading = "Webhook",
        env = "LOCKSTEP_EXEMPT_GROUP",
        value_name = "NAME",
        value_delimiter = ','
    )]
    pub exempt_group: Vec<String>,

    /// Users that write sources on behalf of others (cert-manager, Argo CD): accept-from decides, not their RBAC
    #[arg(
        long,
        help_heading = "Webhook",
        env = "LOCKSTEP_DEPUTY_USER",
        value_name = "NAME",
        value_delimiter = ','
    )]
    pub deputy_user: Vec<String>,

    /// Groups whose members write sources on behalf of others: accept-from decides, not their RBAC
    #[arg(
        long,
        help_heading = "Webhook",
        env = "LOCKSTEP_DEPUTY_GROUP",
        value_name = "NAME",
        value_delimiter = ','
    )]
    pub deputy_group: Vec<String>,

    /// The webhook's certificate chain, PEM; reloaded when the file changes [default: generated]
    #[arg(
        long,
        help_heading = "Certificates",
        env = "LOCKSTEP_TLS_CERT",
        value_name = "FILE",
        requires = "tls_key"
    )]
    pub tls_cert: Option<PathBuf>,

    /// The webhook's private key, PEM
    #[arg(
        long,
        help_heading = "Certificates",
        env = "LOCKSTEP_TLS_KEY",
        value_name = "FILE",
        requires = "tls_cert"
    )]
    pub tls_key: Option<PathBuf>,

    /// Take reviews only from clients with a certificate of this CA, PEM; reloaded when the file changes [default: from
    /// all]
    #[arg(long, help_heading = "Webhook", env = "LOCKSTEP_CLIENT_CA", value_name = "FILE")]
    pub client_ca: Option<PathBuf>,

    /// How long a generated CA is valid; it is replaced before it expires
    #[arg(long, help_heading = "Certificates", env = "LOCKSTEP_CA_VALIDITY", default_value = "365d", value_parser = validity)]
    pub ca_validity: Duration,

    /// How long a generated serving certificate is valid; it is replaced before it expires
    #[arg(long, help_heading = "Certificates", env = "LOCKSTEP_LEAF_VALIDITY", default_value = "7d", value_parser = validity)]
    pub leaf_validity: Duration,

    /// How long the webhook keeps serving after SIGTERM, while it is removed from the Service endpoints
    #[arg(long, help_heading = "Webhook", env = "LOCKSTEP_DRAIN", default_value = "5s", value_parser = duration)]
    pub drain: Duration,

    /// Address on which /metrics, /healthz and /readyz are served
    #[arg(long, help_heading = "Operations", env = "LOCKSTEP_OPS_BIND", default_value = "0.0.0.0:8080")]
    pub ops_bind: SocketAddr,

    /// Format of the log [default: text on a terminal, else json]
    #[arg(long, help_heading = "Operations", env = "LOCKSTEP_LOG_FORMAT")]
    pub log_format: Option<log::Format>,
}

impl Run {
    /// What this instance watches.
    pub fn scope(&self) -> Scope {
        let mut kinds: Vec<Kind> = self.kinds.iter().map(|kind| Kind::from(*kind)).collect();
        kinds.sort_unstable();
        kinds.dedup();
        Scope {
            keys: Arc::new(Keys::new(&self.domain, &self.suffix)),
            rules: NamespaceRules {
                own_namespace: self.namespace.clone().unwrap_or_else(own_namespace),
                excluded: self.exclude_namespaces.clone().unwrap_or_default(),
            },
            kinds,
        }
    }

    pub fn leader(&self, scope: &Scope) -> leader::ElectionConfig {
        leader::ElectionConfig {
            namespace: scope.rules.own_namespace.clone(),
            name: scope.keys.instance.clone(),
            identity: leader::identity(),
            lease_duration: self.lease_duration,
            restore_annotation: scope.keys.restore_noticed_at.clone(),
            published: [(scope.keys.settings.clone(), self.published().to_annotation())].into(),
        }
    }

    pub fn published(&self) -> PublishedSettings {
        let plural = |kind: &KindName| Kind::from(*kind).plural().to_owned();
        PublishedSettings {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            suffix: self.suffix.clone(),
            kinds: self.kinds.iter().map(plural).collect(),
            exclude_namespaces: self.exclude_namespaces.as_ref().map(ToString::to_string).unwrap_or_default(),
            exempt_users: self.exempt_user.clone(),
            exempt_groups: self.exempt_group.clone(),
            deputy_users: self.deputy_user.clone(),
            deputy_groups: self.deputy_group.clone(),
        }
    }

    /// The rules of the webhook. `identity` is the user of this process, which the webhook does not restrict.
    pub fn rules(&self, scope: &Scope, identity: String) -> Rules {
        let mut exempt = Subjects { users: self.exempt_user.clone(), groups: self.exempt_group.clone() };
        exempt.users.push(identity);
        Rules {
            keys: scope.keys.clone(),
            own_namespace: scope.rules.own_namespace.clone(),
            exempt,
            deputies: Subjects { users: self.deputy_user.clone(), groups: self.deputy_group.clone() },
            default_targets: self.default_targets.clone(),
            default_protect: self.default_protect,
        }
    }

    pub fn controller(&self, scope: &Scope) -> controller::Settings {
        controller::Settings {
            keys: scope.keys.clone(),
            workers: self.workers.into(),
            writes: self.writes.into(),
            resync: self.resync,
            delete_grace: self.delete_grace,
            instance_flags: instance_flags(&self.domain, &scope.rules.own_namespace),
        }
    }

    pub fn certs(&self, scope: &Scope) -> CertSettings {
        CertSettings {
            keys: scope.keys.clone(),
            namespace: scope.rules.own_namespace.clone(),
            lifetimes: Lifetimes { ca_validity: self.ca_validity, leaf_validity: self.leaf_validity },
        }
    }

    /// The certificate to serve from files. With one, neither the Secret nor the webhook configurations are written.
    pub fn certificate_files(&self) -> Option<Files> {
        let files = self.tls_cert.clone().zip(self.tls_key.clone());
        files.map(|(certificate, key)| Files { certificate, key })
    }
}

/// The namespace of the pod, or the default outside of a pod.
fn own_namespace() -> String {
    std::fs::read_to_string("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
        .ok()
        .map(|text| text.trim().to_owned())
        .filter(|text| !text.is_empty())
        .unwrap_or_else(|| NAMESPACE.to_owned())
}

fn targets(text: &str) -> Result<String, String> {
    let targets = Targets::list(text, "")?;
    if targets.is_empty() { Err(BadList::OnlyExclusions.to_string()) } else { Ok(text.to_owned()) }
}

/// `0`, `64Mi`, `1G`: a quantity of Kubernetes in whole bytes.
fn bytes(text: &str) -> Result<usize, String> {
    const UNITS: [(&str, usize); 6] = [
        ("Ki", 1 << 10),
        ("Mi", 1 << 20),
        ("Gi", 1 << 30),
        ("k", 1000),
        ("M", 1_000_000),
        ("G", 1_000_000_000),
    ];
    let unit = UNITS.iter().find_map(|(name, bytes)| Some((text.strip_suffix(name)?, *bytes)));
    let (number, unit) = unit.unwrap_or((text, 1));
    let digits = number.bytes().all(|byte| byte.is_ascii_digit());
    let number = number.parse::<usize>().ok().filter(|_| digits);
    number
        .and_then(|number| number.checked_mul(unit))
        .ok_or_else(|| "expected a number of bytes such as `64Mi`, or `0`".to_owned())
}

/// A Lease has its duration in whole seconds.
fn lease_duration(text: &str) -> Result<Duration, String> {
    duration(text).and_then(|duration| match duration.subsec_nanos() {
        0 if duration.as_secs() >= 2 => Ok(duration),
        _ => Err("expected whole seconds, at least 2s".to_owned()),
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    #[test]
    fn sizes_are_quantities_in_whole_bytes() {
        for (text, size) in [("0", 0), ("1024", 1024), ("64Mi", 64 << 20), ("2G", 2_000_000_000)] {
            assert_eq!(bytes(text), Ok(size), "{text}");
        }
        for text in ["", "Mi", "-1", "+1", "1.5Mi", "64 Mi", "64MB", "99999999999Gi"] {
            assert!(bytes(text).is_err(), "{text}");
        }
    }

    #[test]
    fn reference_lists_every_flag_with_its_default() {
        let reference = include_str!("../docs/reference.md");
        let (_, table) = reference.split_once("## Flags of `lockstep run`").unwrap();
        let (table, _) = table.split_once("\n## ").unwrap();
        let documented: Vec<&str> =
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
        assert_eq!(documented.len(), flags.len(), "{documented:?}");
    }

    #[test]
    fn published_settings_describe_the_same_instance_as_the_flags() {
        let flags = "lockstep run --domain d.test --suffix=-copy --kinds secrets --namespace own \
                     --exclude-namespaces infra-*,!infra-x --default-targets team-* --default-protect all \
                     --exempt-user root --deputy-group bots,robots";
        let cli = Cli::try_parse_from(flags.split_whitespace()).unwrap();
        let Command::Run(run) = cli.command else { panic!("not run") };
        let text = run.published().to_annotation();
        let read: PublishedSettings = serde_json::from_str(&text).unwrap();
        assert_eq!(read, run.published());
        let (scope, expected) = (read.scope("d.test", "own"), run.scope());
        assert_eq!(scope.kinds, expected.kinds);
        assert_eq!(scope.keys.suffix, expected.keys.suffix);
        assert_eq!(scope.rules.excluded, expected.rules.excluded);
        let expected = run.rules(&expected, "system:me".to_owned());
        assert_eq!(read.deputies().groups, expected.deputies.groups);
        // The identity of a replica is not published.
        assert_eq!(read.exempt().users, ["root"]);
        assert_eq!(expected.exempt.users, ["root", "system:me"]);
    }
}
