//! Every label and annotation key that Lockstep reads or writes, derived from the domain.

use std::collections::BTreeMap;

use crate::object::{Meta, names};

const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";
/// The labels by which Velero finds what a restore has made.
const VELERO_RESTORE: [&str; 2] = ["velero.io/backup-name", "velero.io/restore-name"];
/// The only key of Velero that people set.
const VELERO_EXCLUDE: &str = "velero.io/exclude-from-backup";

/// The defaults of `--domain`, `--suffix` and `--namespace`. The files in `deploy/` contain the same.
pub const DOMAIN: &str = "workshop.io";
pub const SUFFIX: &str = "-synced";
pub const NAMESPACE: &str = "lockstep-system";

/// The struct with a field for each key.
macro_rules! keys {
    ($($(#[$doc:meta])* $field:ident = $name:literal;)*) => {
        /// The keys of one instance. Several instances with different domains can share a cluster.
        #[derive(Debug, Clone)]
        pub struct Keys {
            /// `<domain>/`, the prefix of all keys.
            prefix: String,
            /// Appended to the name of a source to make the default name of its companions.
            pub suffix: String,
            /// `lockstep.<domain>`: the field manager, and the name of the Lease, the CA Secret and the webhook
            /// configurations.
            pub instance: String,
            $($(#[$doc])* pub $field: String,)*
        }

        impl Keys {
            pub fn new(domain: &str, suffix: &str) -> Self {
                Self {
                    prefix: format!("{domain}/"),
                    suffix: suffix.to_owned(),
                    instance: format!("lockstep.{domain}"),
                    $($field: format!("{domain}/{}", $name),)*
                }
            }
        }
    };
}

keys! {
    // on a source
    managed = "managed";
    target_namespaces = "target-namespaces";
    target_selector = "target-selector";
    companion_name = "companion-name";
    keys = "keys";
    copy_labels = "copy-labels";
    copy_annotations = "copy-annotations";
    set_labels = "set-labels";
    set_annotations = "set-annotations";
    consent = "consent";
    protect = "protect";
    /// Written by the webhook: what a source's author left out, in one annotation.
    defaults = "defaults";
    adopt = "adopt";
    paused = "paused";
    when_removed = "when-removed";

    // on a companion (and `protect` and `when_removed`)
    companion = "companion";
    /// With `source_name`, a label for people to select by. Nothing is decided by it: anybody can set it.
    source_namespace = "source-namespace";
    source_name = "source-name";
    source = "source";
    source_uid = "source-uid";
    source_checksum = "source-checksum";
    copied = "copied";

    // on a Namespace
    exclude = "exclude";
    accept_from = "accept-from";
    accept_adopt_from = "accept-adopt-from";
    default_target_namespaces = "default-target-namespaces";
    default_target_selector = "default-target-selector";
    default_protect = "default-protect";

    // on the Lease
    /// When somebody asked for a rotation of the CA.
    rotate_ca = "rotate-ca";
    /// When the leader noticed a restore of etcd.
    restore_noticed_at = "restore-noticed-at";
    /// What people's commands should know about the leader.
    settings = "settings";
    /// Deletes that the leader holds.
    deletes_held = "deletes-held";
    /// A hold that was released.
    deletes_released = "deletes-released";
    /// Until when somebody wants a hold to last.
    deletes_extended = "deletes-extended";
}

impl Keys {
    /// The annotations that people write on a source.
    pub(crate) fn on_source(&self) -> [&str; 13] {
        [
            &self.target_namespaces,
            &self.target_selector,
            &self.companion_name,
            &self.keys,
            &self.copy_labels,
            &self.copy_annotations,
            &self.set_labels,
            &self.set_annotations,
            &self.consent,
            &self.protect,
            &self.adopt,
            &self.paused,
            &self.when_removed,
        ]
    }

    /// What a source may have and people do not write: the webhook's annotation, and what a copy of a companion has.
    pub(crate) fn left_on_source(&self) -> [&str; 5] {
        let Self { defaults, source_checksum, copied, source_namespace, source_name, .. } = self;
        [defaults, source_checksum, copied, source_namespace, source_name]
    }

    /// The annotations that have a meaning on a Namespace.
    pub(crate) fn on_namespace(&self) -> [&str; 5] {
        [
            &self.accept_from,
            &self.accept_adopt_from,
            &self.default_target_namespaces,
            &self.default_target_selector,
            &self.default_protect,
        ]
    }

    /// Whether an object's labels make it a source.
    pub fn is_source(&self, labels: &BTreeMap<String, String>) -> bool {
        labels.get(&self.managed).is_some_and(|value| value == "true")
    }

    /// Whether a person chose the targets of a source. If so, no default targets apply.
    pub(crate) fn sets_targets(&self, meta: &Meta) -> bool {
        [&self.target_namespaces, &self.target_selector].iter().any(|key| meta.annotations.contains_key(*key))
    }

    /// Whether an object has any of a companion's marks. Such an object is never a source.
    pub fn has_marks(&self, meta: &Meta) -> bool {
        meta.labels.contains_key(&self.companion)
            || self.source_annotations().iter().any(|key| meta.annotations.contains_key(*key))
    }

    /// Whether the webhook for new objects is called for this name, and so keeps it free for a companion that was
    /// deleted. It cannot be called for every name.
    pub(crate) fn is_kept_free(&self, name: &str) -> bool {
        name.ends_with(&self.suffix)
    }

    /// The annotations that name the source of a companion.
    pub(crate) fn source_annotations(&self) -> [&str; 2] {
        [&self.source, &self.source_uid]
    }

    /// Every label that Lockstep writes on companions.
    pub(crate) fn companion_labels(&self) -> [&str; 3] {
        [&self.companion, &self.source_namespace, &self.source_name]
    }

    /// Every annotation that Lockstep writes on companions.
    pub fn companion_annotations(&self) -> [&str; 6] {
        let Self { source, source_uid, source_checksum, protect, when_removed, copied, .. } = self;
        [source, source_uid, source_checksum, protect, when_removed, copied]
    }

    /// Whether a label or annotation key belongs to this instance.
    pub fn is_ours(&self, key: &str) -> bool {
        key.starts_with(&self.prefix)
    }

    /// Whether Velero or `kubectl apply` adds this label or annotation to an object that they restore.
    pub(crate) fn is_left_by_restore(&self, key: &str) -> bool {
        key == LAST_APPLIED || VELERO_RESTORE.contains(&key)
    }

    /// Whether a label or annotation may be copied to a companion. These may not:
    ///
    /// - keys under our domain;
    /// - `last-applied-configuration`, which contains the values of a Secret;
    /// - keys by which other tools would take the companion for one of their own objects and delete it: Argo CD, Flux,
    ///   Helm, `kubectl apply --prune`, cli-utils, kapp, Fleet, OLM, Velero;
    /// - keys that would make it a source or a companion of another instance, whose webhook trusts our writes if both
    ///   run with the same ServiceAccount.
    ///
    /// ```
    /// use lockstep_core::keys::Keys;
    ///
    /// let keys = Keys::new("workshop.io", "-synced");
    /// assert!(keys.may_copy("team"));
    /// assert!(!keys.may_copy("workshop.io/protect"));
    /// assert!(!keys.may_copy("argocd.argoproj.io/tracking-id"));
    /// ```
    pub fn may_copy(&self, key: &str) -> bool {
        const NEVER_COPIED: [&str; 5] = [
            LAST_APPLIED,
            "argocd.argoproj.io/instance",
            "argocd.argoproj.io/tracking-id",
            "app.kubernetes.io/instance",
            "app.kubernetes.io/managed-by",
        ];
        const NEVER_COPIED_UNDER: [&str; 14] = [
            "kustomize.toolkit.fluxcd.io/",
            "helm.toolkit.fluxcd.io/",
            "meta.helm.sh/",
            "helm.sh/",
            "applyset.kubernetes.io/",
            // cli-utils, kpt
            "config.k8s.io/",
            "cli-utils.sigs.k8s.io/",
            "kapp.k14s.io/",
            // Fleet and other tools of Rancher; the first also contains the object as it was applied
            "objectset.rio.cattle.io/",
            "fleet.cattle.io/",
            // OLM; those of its owner have no slash
            "operators.coreos.com/",
            "olm.",
            "velero.io/",
            "kubernetes.io/service-account.",
        ];
        let other_instance = key.ends_with("/managed") || key.ends_with("/companion");
        !self.is_ours(key)
            && !other_instance
            && !NEVER_COPIED.contains(&key)
            && (key == VELERO_EXCLUDE || !NEVER_COPIED_UNDER.iter().any(|p| key.starts_with(p)))
    }
}

/// The flags, each after a space, with which a command finds the instance with this domain and namespace.
pub fn instance_flags(domain: &str, namespace: &str) -> String {
    let flags = [("domain", domain, DOMAIN), ("lockstep-namespace", namespace, NAMESPACE)];
    let needed = flags.into_iter().filter(|(_, value, default)| value != default);
    needed.map(|(flag, value, _)| format!(" --{flag} {value}")).collect()
}

/// Parses `--domain`.
pub fn domain(text: &str) -> Result<String, String> {
    // `lockstep.<domain>` is the field manager, which has at most 128 characters.
    if names::is_subdomain(text) && text.len() <= 100 {
        Ok(text.to_owned())
    } else {
        Err("expected a DNS name of at most 100 characters, such as `workshop.io`".to_owned())
    }
}

/// Parses `--suffix`.
pub fn suffix(text: &str) -> Result<String, String> {
    let fits = (1..=63).contains(&text.len()) && names::is_subdomain(&format!("x{text}"));
    if fits {
        Ok(text.to_owned())
    } else {
        Err("expected at most 63 characters that can end the name of an object, such as `-synced`".to_owned())
    }
}

/// Parses `--namespace`.
pub fn namespace(text: &str) -> Result<String, String> {
    if names::is_label(text) { Ok(text.to_owned()) } else { Err("not a valid namespace name".to_owned()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_that_track_ownership_or_contain_values_are_never_copied() {
        let keys = Keys::new("workshop.io", "-synced");
        for key in [
            "workshop.io/protect",
            "kubectl.kubernetes.io/last-applied-configuration",
            "argocd.argoproj.io/tracking-id",
            "argocd.argoproj.io/instance",
            "app.kubernetes.io/instance",
            "kapp.k14s.io/app",
            "kapp.k14s.io/original",
            "objectset.rio.cattle.io/hash",
            "fleet.cattle.io/bundle-name",
            "cli-utils.sigs.k8s.io/inventory-id",
            "config.k8s.io/owning-inventory",
            "olm.owner",
            "olm.managed",
            "operators.coreos.com/prometheus.monitoring",
            "velero.io/backup-name",
            "velero.io/restore-name",
            "kustomize.toolkit.fluxcd.io/name",
            "helm.toolkit.fluxcd.io/namespace",
            "meta.helm.sh/release-name",
            "kubernetes.io/service-account.name",
            "other-instance.io/managed",
            "other-instance.io/companion",
        ] {
            assert!(!keys.may_copy(key), "{key}");
        }
        for key in [
            "team",
            "app.kubernetes.io/name",
            "workshop.io.example/x",
            // Argo CD reads its clusters and repositories from Secrets with this label.
            "argocd.argoproj.io/secret-type",
            "argocd.argoproj.io/sync-wave",
            "velero.io/exclude-from-backup",
            "olmec",
        ] {
            assert!(keys.may_copy(key), "{key}");
        }
    }

    #[test]
    fn commands_name_the_instance_only_where_it_is_not_the_default() {
        assert_eq!(instance_flags(DOMAIN, NAMESPACE), "");
        assert_eq!(
            instance_flags("a.example", "lockstep-a"),
            " --domain a.example --lockstep-namespace lockstep-a"
        );
    }

    #[test]
    fn invalid_domains_and_suffixes_are_rejected() {
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
