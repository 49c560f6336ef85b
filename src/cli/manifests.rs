//! `lockstep manifests`: prints the files of `deploy/`, with the names of one instance in them.

pub mod cert_manager;
mod dashboard;

use std::{
    fmt::Write as _,
    io::{Write as _, stdout},
    net::Ipv6Addr,
};

use anyhow::Context;
use clap::Args;
use http::Uri;
use serde_json::Value;

use crate::{config, names, substitute::substitute};

const NAMESPACE_FILE: &str = include_str!("../../deploy/base/namespace.yaml");
const RBAC_FILE: &str = include_str!("../../deploy/base/rbac.yaml");
const WEBHOOK_FILE: &str = include_str!("../../deploy/base/webhook.yaml");
const DEPLOYMENT_FILE: &str = include_str!("../../deploy/base/deployment.yaml");
const SECRETS_RBAC_FILE: &str = include_str!("../../deploy/components/secrets/rbac.yaml");
const POLICY_FILE: &str = include_str!("../../deploy/components/policy/policy.yaml");
const CERTIFICATES_FILE: &str = include_str!("../../deploy/components/cert-manager/certificates.yaml");
const PODMONITOR_FILE: &str = include_str!("../../deploy/components/monitoring/podmonitor.yaml");
const RULES_FILE: &str = include_str!("../../deploy/components/monitoring/rules.yaml");

/// How webhooks reach the guard, up to the path: an address takes the place of all of it.
const SERVICE: &str = "service:
        name: lockstep
        namespace: lockstep-system
        path: ";
/// The kinds that webhooks and policy look at.
const KINDS: &str = "resources: [configmaps]";
/// Whom the policy lets do anything: nobody, as the file stands.
const EXEMPT_USERS: &str = "username in []";
const EXEMPT_GROUPS: &str = "group in []";
/// The image that `make image` makes.
const IMAGE: &str = concat!("lockstep:", env!("CARGO_PKG_VERSION"));
/// The kinds that the Deployment mirrors; further settings follow here.
const DEPLOYED_KINDS: &str = "value: configmaps
";

/// Names as for `lockstep run`, and from the same environment variables: both must be given the same.
#[derive(Debug, Clone, Args)]
pub struct Manifests {
    /// Where the API server reaches the guard, a process outside the cluster, such as `https://10.0.0.7:9443`: neither
    /// Deployment nor Service
    #[arg(long, value_name = "URL", value_parser = webhook_url)]
    pub webhook_url: Option<String>,

    /// Mirror and guard Secrets too
    #[arg(long)]
    pub secrets: bool,

    /// Add a ValidatingAdmissionPolicy that protects companions while no replica runs; it refuses all deletes of them,
    /// whatever protect says, but for none
    #[arg(long)]
    pub policy: bool,

    /// Have cert-manager make the guard's certificate and publish its CA
    #[arg(long, conflicts_with = "webhook_url")]
    pub cert_manager: bool,

    /// Add a PodMonitor and alerts for the Prometheus operator, and a dashboard for Grafana
    #[arg(long, conflicts_with = "webhook_url")]
    pub monitoring: bool,

    /// Prefix of all labels and annotations
    #[arg(long, env = "LOCKSTEP_DOMAIN", default_value = config::DOMAIN, value_parser = config::domain)]
    pub domain: String,

    /// Appended to a source's name to make its companion's
    #[arg(long, env = "LOCKSTEP_SUFFIX", default_value = config::SUFFIX, allow_hyphen_values = true, value_parser = config::suffix)]
    pub suffix: String,

    /// Lockstep's own namespace
    #[arg(long, env = "LOCKSTEP_NAMESPACE", default_value = config::NAMESPACE, value_parser = config::namespace)]
    pub namespace: String,

    /// Users whom guard and policy let do anything; a guard outside the cluster must be told itself
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub exempt_user: Vec<String>,

    /// Groups whose members guard and policy let do anything
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub exempt_group: Vec<String>,

    /// Users who write sources on behalf of others (cert-manager, Argo CD): only accept-from counts, not their rights
    #[arg(long, value_name = "NAME", value_delimiter = ',', conflicts_with = "webhook_url")]
    pub deputy_user: Vec<String>,

    /// Groups whose members write sources on behalf of others
    #[arg(long, value_name = "NAME", value_delimiter = ',', conflicts_with = "webhook_url")]
    pub deputy_group: Vec<String>,

    /// The image of the Deployment
    #[arg(long, default_value = IMAGE, value_parser = image, conflicts_with = "webhook_url")]
    pub image: String,
}

pub fn run(wanted: &Manifests) -> anyhow::Result<()> {
    stdout().write_all(wanted.render().as_bytes()).context("cannot print")
}

impl Manifests {
    /// All documents, as YAML.
    #[must_use]
    pub fn render(&self) -> String {
        let mut files = vec![NAMESPACE_FILE, RBAC_FILE, WEBHOOK_FILE];
        files.extend(self.webhook_url.is_none().then_some(DEPLOYMENT_FILE));
        files.extend(self.secrets.then_some(SECRETS_RBAC_FILE));
        files.extend(self.policy.then_some(POLICY_FILE));
        files.extend(self.cert_manager.then_some(CERTIFICATES_FILE));
        let dashboard = dashboard::configmap();
        if self.monitoring {
            files.extend([PODMONITOR_FILE, RULES_FILE, &dashboard]);
        }
        files.into_iter().map(|file| self.fill_in(file)).collect::<Vec<_>>().join("---\n")
    }

    fn fill_in(&self, file: &str) -> String {
        let users = format!("username in {}", cel_list(&self.exempt_user));
        let groups = format!("group in {}", cel_list(&self.exempt_group));
        let url = self.webhook_url.as_ref().map(|url| format!("url: {url}"));
        let settings = self.settings();
        let cert_manager =
            if self.cert_manager { cert_manager::changes(&self.namespace) } else { Vec::new() };
        let mut pairs = vec![
            (config::DOMAIN, self.domain.as_str()),
            (config::SUFFIX, &self.suffix),
            (config::NAMESPACE, &self.namespace),
            (EXEMPT_USERS, &users),
            (EXEMPT_GROUPS, &groups),
            (IMAGE, &self.image),
            (DEPLOYED_KINDS, &settings),
        ];
        pairs.extend(cert_manager.iter().map(|(word, value)| (*word, value.as_str())));
        pairs.extend(url.as_ref().map(|url| (SERVICE, url.as_str())));
        // Rights on Secrets are in a file of their own.
        if self.secrets && file != RBAC_FILE {
            pairs.push((KINDS, "resources: [configmaps, secrets]"));
        }
        substitute(file, &pairs)
    }

    /// The Deployment's kinds, and whatever else is not in the file.
    fn settings(&self) -> String {
        let kinds = if self.secrets { "configmaps,secrets" } else { "configmaps" };
        let mut settings = format!("value: {kinds}\n");
        for (variable, names) in [
            ("LOCKSTEP_EXEMPT_USER", &self.exempt_user),
            ("LOCKSTEP_EXEMPT_GROUP", &self.exempt_group),
            ("LOCKSTEP_DEPUTY_USER", &self.deputy_user),
            ("LOCKSTEP_DEPUTY_GROUP", &self.deputy_group),
        ] {
            if !names.is_empty() {
                // A JSON string is one of YAML, and a lone dollar might begin a reference to a variable.
                let value = Value::from(names.join(",").replace('$', "$$"));
                // Writing to a string cannot fail.
                let _ = write!(settings, "            - name: {variable}\n              value: {value}\n");
            }
        }
        settings
    }
}

/// A reference to an image. Only what it is made of is checked: it must not break the file it lands in.
fn image(text: &str) -> Result<String, String> {
    let part_of_a_name = |c: char| c.is_ascii_alphanumeric() || "._-/:@".contains(c);
    if text.starts_with(|c: char| c.is_ascii_alphanumeric()) && text.chars().all(part_of_a_name) {
        Ok(text.to_owned())
    } else {
        Err("the name of an image is needed, such as `registry.example.com/lockstep:0.1.0`".to_owned())
    }
}

/// A list of strings in CEL. It lands in a block of YAML, which takes printable ASCII as it is.
fn cel_list(names: &[String]) -> String {
    let literals: Vec<String> = names.iter().map(|name| cel_string(name)).collect();
    format!("[{}]", literals.join(", "))
}

fn cel_string(text: &str) -> String {
    let mut literal = String::from("'");
    for c in text.chars() {
        match c {
            '\'' | '\\' => literal.extend(['\\', c]),
            ' '..='~' => literal.push(c),
            // Writing to a string cannot fail.
            _ => drop(write!(literal, "\\U{:08x}", u32::from(c))),
        }
    }
    literal + "'"
}

/// An address such as the API server takes in `clientConfig.url`, without the path, which differs.
fn webhook_url(text: &str) -> Result<String, String> {
    let bad = || "an address such as `https://10.0.0.7:9443` is needed: https, a host, no path".to_owned();
    // A fragment is dropped by the parser, credentials are part of the authority.
    if text.contains(['#', '?', '@']) {
        return Err(bad());
    }
    let uri: Uri = text.parse().map_err(|_| bad())?;
    let authority = uri.authority().ok_or_else(bad)?;
    let host = authority.host();
    let v6 = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let host_is_right = match v6 {
        Some(address) => address.parse::<Ipv6Addr>().is_ok(),
        None => names::is_subdomain(&host.to_ascii_lowercase()),
    };
    let port_is_right = authority.as_str() == host || authority.port_u16().is_some_and(|port| port > 0);
    let right = uri.scheme_str() == Some("https") && host_is_right && port_is_right && uri.path() == "/";
    if right { Ok(format!("https://{authority}")) } else { Err(bad()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn wanted() -> Manifests {
        Manifests {
            webhook_url: None,
            secrets: true,
            policy: true,
            cert_manager: false,
            monitoring: false,
            domain: config::DOMAIN.to_owned(),
            suffix: config::SUFFIX.to_owned(),
            namespace: config::NAMESPACE.to_owned(),
            exempt_user: vec![],
            exempt_group: vec![],
            deputy_user: vec![],
            deputy_group: vec![],
            image: IMAGE.to_owned(),
        }
    }

    #[test]
    fn names_are_replaced_everywhere_even_by_each_other() {
        let everything = || Manifests { cert_manager: true, monitoring: true, ..wanted() };
        let other = Manifests {
            domain: "lockstep-system.example".into(),
            suffix: "-workshop.io".into(),
            namespace: "x-synced".into(),
            ..everything()
        }
        .render();
        let back = [
            ("lockstep-system.example", config::DOMAIN),
            ("-workshop.io", config::SUFFIX),
            ("x-synced", config::NAMESPACE),
        ];
        assert_eq!(substitute(&other, &back), everything().render());
        assert!(other.contains("lockstep.lockstep-system.example-secrets"), "{other}");
        assert!(other.contains("endsWith('-workshop.io')"), "{other}");
        assert!(other.contains("'system:serviceaccount:x-synced:lockstep'"), "{other}");
        assert!(other.contains("- lockstep.x-synced.svc"), "{other}");
        assert!(other.contains("inject-ca-from: x-synced/lockstep-tls"), "{other}");
        assert!(other.contains("{job=\"x-synced/lockstep\"}"), "{other}");
    }

    #[test]
    fn an_address_takes_the_place_of_the_service_in_every_webhook() {
        let url = Some("https://127.0.0.1:9443".to_owned());
        let text = Manifests { webhook_url: url, ..wanted() }.render();
        assert_eq!(text.matches("      url: https://127.0.0.1:9443/validate\n").count(), 3, "{text}");
        assert_eq!(text.matches("      url: https://127.0.0.1:9443/mutate\n").count(), 1, "{text}");
        assert!(!text.contains("service:\n") && !text.contains("kind: Service\n"), "{text}");
        for kind in ["Deployment", "PodDisruptionBudget", "NetworkPolicy"] {
            assert!(!text.contains(&format!("kind: {kind}\n")), "{kind}");
            assert!(wanted().render().contains(&format!("kind: {kind}\n")), "{kind}");
        }
    }

    #[test]
    fn webhooks_and_policy_look_at_secrets_only_where_asked_to() {
        assert_eq!(wanted().render().matches("resources: [configmaps, secrets]").count(), 5);
        assert!(
            wanted().render().contains("- name: LOCKSTEP_KINDS\n              value: configmaps,secrets\n")
        );
        let without = Manifests { secrets: false, ..wanted() }.render();
        assert!(!without.contains("configmaps, secrets") && !without.contains("workshop.io-secrets"));
        assert!(without.contains("- name: LOCKSTEP_KINDS\n              value: configmaps\n"));
    }

    #[test]
    fn whoever_is_exempt_is_named_in_the_policy_and_cannot_break_it() {
        let exempt_user = vec!["alice".to_owned(), "o'brien\\ \n- ü workshop.io".to_owned()];
        let text = Manifests { exempt_user, exempt_group: vec!["ops".to_owned()], ..wanted() }.render();
        let users = r"username in ['alice', 'o\'brien\\ \U0000000a- \U000000fc workshop.io'])";
        assert!(text.contains(users), "{text}");
        assert!(text.contains("exists(group, group in ['ops']))"), "{text}");
        assert!(!text.contains("in []"), "{text}");
    }

    #[test]
    fn the_deployment_is_told_what_differs_from_the_file() {
        let exempt_user = vec!["a\"b: #$(X)".to_owned(), "bob".to_owned()];
        let text = Manifests {
            exempt_user,
            exempt_group: vec!["ops".to_owned()],
            deputy_user: vec!["argo".to_owned()],
            deputy_group: vec!["robots".to_owned()],
            domain: "example.com".into(),
            suffix: "-1".into(),
            image: "registry.example.com/lockstep@sha256:0".into(),
            ..wanted()
        }
        .render();
        for part in [
            r#"- name: LOCKSTEP_EXEMPT_USER
              value: "a\"b: #$$(X),bob"
            - name: LOCKSTEP_EXEMPT_GROUP
              value: "ops"
            - name: LOCKSTEP_DEPUTY_USER
              value: "argo"
            - name: LOCKSTEP_DEPUTY_GROUP
              value: "robots"
"#,
            "- name: LOCKSTEP_DOMAIN\n              value: \"example.com\"\n",
            "- name: LOCKSTEP_SUFFIX\n              value: \"-1\"\n",
            "image: registry.example.com/lockstep@sha256:0\n",
        ] {
            assert!(text.contains(part), "{text}");
        }
    }

    #[test]
    fn the_image_is_that_of_this_version_and_cannot_break_the_file() {
        assert!(DEPLOYMENT_FILE.contains(&format!("image: {IMAGE}\n")), "deploy/base has another version");
        for text in ["", " ", "-x", "a b", "a\n- b", "a'b", "a#b"] {
            assert!(image(text).is_err(), "{text}");
        }
    }

    #[test]
    fn only_the_address_of_a_host_is_taken() {
        for text in ["https://10.0.0.7:9443", "https://guard.example.com", "https://[::1]:9443"] {
            assert_eq!(webhook_url(text).as_deref(), Ok(text));
        }
        assert_eq!(webhook_url("https://guard:9443/").as_deref(), Ok("https://guard:9443"));
        for text in [
            "",
            "guard:9443",
            "http://guard:9443",
            "https://",
            "https://:9443",
            "https://guard:9443/validate",
            "https://guard:9443?x=y",
            "https://guard:9443#x",
            "https://me:secret@guard:9443",
            "https://guard:0",
            "https://guard:99999",
            "https://guard:",
            "https://[::zz]:9443",
            "https://under_score:9443",
            "https://guard:9443\n- x",
        ] {
            assert!(webhook_url(text).is_err(), "{text}");
        }
    }
}
