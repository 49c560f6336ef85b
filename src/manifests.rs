//! `lockstep manifests`: prints the files of `deploy/` with the domain, suffix and namespace of one instance.

pub mod cert_manager;
mod dashboard;

use std::{
    fmt::Write as _,
    io::{Write as _, stdout},
    net::Ipv6Addr,
};

use anyhow::Context;
use clap::{Args, Command, FromArgMatches, builder::Resettable};
use http::Uri;
use serde_json::Value;

use lockstep_cli::program::Installation;
use lockstep_core::{keys, object::names, text::substitute};

const NAMESPACE_FILE: &str = include_str!("../deploy/components/namespace/namespace.yaml");
const RBAC_FILE: &str = include_str!("../deploy/base/rbac.yaml");
const WEBHOOK_FILE: &str = include_str!("../deploy/base/webhook.yaml");
const DEPLOYMENT_FILE: &str = include_str!("../deploy/base/deployment.yaml");
const SECRETS_RBAC_FILE: &str = include_str!("../deploy/components/secrets/rbac.yaml");
const POLICY_FILE: &str = include_str!("../deploy/components/policy/policy.yaml");
const CERTIFICATES_FILE: &str = include_str!("../deploy/components/cert-manager/certificates.yaml");
const PODMONITOR_FILE: &str = include_str!("../deploy/components/monitoring/podmonitor.yaml");
const RULES_FILE: &str = include_str!("../deploy/components/monitoring/rules.yaml");

/// The `clientConfig` of webhooks up to the path: `--webhook-url` replaces it.
const SERVICE: &str = "service:
        name: lockstep
        namespace: lockstep-system
        path: ";
/// The kinds that webhooks and policy match.
const KINDS: &str = "resources: [configmaps]";
/// The users that the policy does not restrict: none in the file.
const EXEMPT_USERS: &str = "username in []";
const EXEMPT_GROUPS: &str = "group in []";
/// The page with a section for each alert, to which their annotation `runbook_url` links.
const RUNBOOKS: &str = "docs/operations.md";
/// The image that `make image` builds.
const IMAGE: &str = concat!("lockstep:", env!("CARGO_PKG_VERSION"));
/// The PriorityClass of the pods, and of the quota that admits them.
const PRIORITY_CLASS: &str = "system-cluster-critical";
/// The kinds that the Deployment mirrors: further environment variables are inserted after it.
const DEPLOYED_KINDS: &str = "value: configmaps
";

/// The flags of `lockstep manifests`. Domain, suffix and namespace must be the same as for `lockstep run`, so they have
/// the same environment variables.
#[derive(Debug, Args)]
pub struct Manifests {
    /// URL at which the API server reaches a webhook outside the cluster, such as `https://10.0.0.7:9443`; leaves out
    /// Deployment and Service
    #[arg(long, value_name = "URL", value_parser = webhook_url)]
    pub webhook_url: Option<String>,

    /// Mirror and protect Secrets as well
    #[arg(long)]
    pub secrets: bool,

    /// Add a ValidatingAdmissionPolicy that protects companions even while the webhooks are missing; it refuses
    /// deletes of all companions except those with `protect: none`
    #[arg(long)]
    pub policy: bool,

    /// Have cert-manager issue the webhook's certificate and inject its CA
    #[arg(long, conflicts_with = "webhook_url")]
    pub cert_manager: bool,

    /// Add a PodMonitor and alerts for the Prometheus operator, and a Grafana dashboard
    #[arg(long, conflicts_with = "webhook_url")]
    pub monitoring: bool,

    /// Where the runbooks of the alerts are published: the address of docs/operations.md in your copy of this
    /// repository
    #[arg(long, value_name = "URL", default_value = RUNBOOKS, value_parser = runbook_url, conflicts_with = "webhook_url")]
    pub runbook_url: String,

    /// Prefix of all labels and annotations
    #[arg(long, env = "LOCKSTEP_DOMAIN", default_value = keys::DOMAIN, value_parser = keys::domain)]
    pub domain: String,

    /// Suffix of companion names: source `config` gets companion `config-synced`
    #[arg(long, env = "LOCKSTEP_SUFFIX", default_value = keys::SUFFIX, allow_hyphen_values = true, value_parser = keys::suffix)]
    pub suffix: String,

    /// Lockstep's own namespace: it has neither sources nor companions. `default` and `kube-*` are refused
    #[arg(long, env = "LOCKSTEP_NAMESPACE", default_value = keys::NAMESPACE, value_parser = namespace)]
    pub namespace: String,

    /// Print the Namespace, too. Not with `kubectl delete`: it deletes a namespace with everything in it
    #[arg(long)]
    pub create_namespace: bool,

    /// Users that webhook and policy do not restrict; a webhook outside the cluster needs the flag as well
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub exempt_user: Vec<String>,

    /// Groups whose members webhook and policy do not restrict
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub exempt_group: Vec<String>,

    /// Users that write sources on behalf of others (cert-manager, Argo CD): accept-from decides, not their RBAC
    #[arg(long, value_name = "NAME", value_delimiter = ',', conflicts_with = "webhook_url")]
    pub deputy_user: Vec<String>,

    /// Groups whose members write sources on behalf of others: accept-from decides, not their RBAC
    #[arg(long, value_name = "NAME", value_delimiter = ',', conflicts_with = "webhook_url")]
    pub deputy_group: Vec<String>,

    /// The PriorityClass of the pods
    #[arg(long, value_name = "NAME", default_value = PRIORITY_CLASS, value_parser = priority_class, conflicts_with = "webhook_url")]
    pub priority_class: String,

    /// The image of the Deployment
    #[arg(long, default_value = IMAGE, value_parser = image, conflicts_with = "webhook_url")]
    pub image: String,
}

pub fn run(manifests: &Manifests) -> anyhow::Result<()> {
    stdout().write_all(manifests.render().as_bytes()).context("cannot write to standard output")
}

impl Default for Manifests {
    /// The defaults of the flags, whatever the environment says.
    fn default() -> Self {
        let command = Self::augment_args(Command::new("manifests"));
        let flags = command.mut_args(|flag| flag.env(Resettable::Reset)).get_matches_from(["manifests"]);
        Self::from_arg_matches(&flags).unwrap_or_else(|error| error.exit())
    }
}

impl From<Installation> for Manifests {
    fn from(Installation { domain, namespace, secrets, cert_manager }: Installation) -> Self {
        Self { domain, namespace, secrets, cert_manager, ..Self::default() }
    }
}

impl Manifests {
    /// All documents, as YAML.
    pub fn render(&self) -> String {
        // The namespace comes first, because the other objects are created in it.
        let mut files: Vec<&str> = self.create_namespace.then_some(NAMESPACE_FILE).into_iter().collect();
        files.extend([RBAC_FILE, WEBHOOK_FILE]);
        files.extend(self.webhook_url.is_none().then_some(DEPLOYMENT_FILE));
        files.extend(self.secrets.then_some(SECRETS_RBAC_FILE));
        files.extend(self.policy.then_some(POLICY_FILE));
        files.extend(self.cert_manager.then_some(CERTIFICATES_FILE));
        let dashboard = dashboard::configmap();
        if self.monitoring {
            files.extend([PODMONITOR_FILE, RULES_FILE, &dashboard]);
        }
        self.render_files(files)
    }

    /// The documents with the roles, as YAML.
    pub fn rbac(&self) -> String {
        let mut files = vec![RBAC_FILE];
        files.extend(self.secrets.then_some(SECRETS_RBAC_FILE));
        self.render_files(files)
    }

    fn render_files(&self, files: Vec<&str>) -> String {
        files.into_iter().map(|file| self.substitute_names(file)).collect::<Vec<_>>().join("---\n")
    }

    fn substitute_names(&self, file: &str) -> String {
        let users = format!("username in {}", cel_list(&self.exempt_user));
        let groups = format!("group in {}", cel_list(&self.exempt_group));
        let url = self.webhook_url.as_ref().map(|url| format!("url: {url}"));
        let environment = self.environment();
        let cert_manager =
            if self.cert_manager { cert_manager::changes(&self.namespace) } else { Vec::new() };
        let mut pairs = vec![
            (keys::DOMAIN, self.domain.as_str()),
            (keys::SUFFIX, &self.suffix),
            (keys::NAMESPACE, &self.namespace),
            (EXEMPT_USERS, &users),
            (EXEMPT_GROUPS, &groups),
            (IMAGE, &self.image),
            (PRIORITY_CLASS, &self.priority_class),
            (DEPLOYED_KINDS, &environment),
        ];
        let runbooks = [format!("runbook_url: {RUNBOOKS}"), format!("runbook_url: {}", self.runbook_url)];
        pairs.push((&runbooks[0], &runbooks[1]));
        pairs.extend(cert_manager.iter().map(|(word, value)| (*word, value.as_str())));
        pairs.extend(url.as_ref().map(|url| (SERVICE, url.as_str())));
        // The RBAC for Secrets is a file of its own.
        if self.secrets && file != RBAC_FILE {
            pairs.push((KINDS, "resources: [configmaps, secrets]"));
        }
        substitute(file, &pairs)
    }

    /// The Deployment's kinds, and the environment variables that the file does not have.
    fn environment(&self) -> String {
        let kinds = if self.secrets { "configmaps,secrets" } else { "configmaps" };
        let mut environment = format!("value: {kinds}\n");
        for (variable, names) in [
            ("LOCKSTEP_EXEMPT_USER", &self.exempt_user),
            ("LOCKSTEP_EXEMPT_GROUP", &self.exempt_group),
            ("LOCKSTEP_DEPUTY_USER", &self.deputy_user),
            ("LOCKSTEP_DEPUTY_GROUP", &self.deputy_group),
        ] {
            if !names.is_empty() {
                // A JSON string is valid YAML. Kubernetes expands `$(NAME)` in values, and `$$` is a literal dollar.
                let value = Value::from(names.join(",").replace('$', "$$"));
                // Writing to a string cannot fail.
                let _ = write!(environment, "            - name: {variable}\n              value: {value}\n");
            }
        }
        environment
    }
}

/// Parses `--namespace`. Lockstep mirrors neither from nor into its own namespace, so it must not be one that every
/// cluster uses for something else.
fn namespace(text: &str) -> Result<String, String> {
    let name = keys::namespace(text)?;
    if name == "default" || name.starts_with("kube-") {
        return Err("Lockstep needs a namespace of its own, such as `lockstep-system`".to_owned());
    }
    Ok(name)
}

/// Parses `--image`. Only the characters are checked: the image must not break the YAML.
fn image(text: &str) -> Result<String, String> {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || "._-/:@".contains(c);
    if text.starts_with(|c: char| c.is_ascii_alphanumeric()) && text.chars().all(is_allowed) {
        Ok(text.to_owned())
    } else {
        Err("expected an image such as `registry.example.com/lockstep:0.1.0`".to_owned())
    }
}

/// Parses `--runbook-url`: the alert's name is appended as the fragment.
fn runbook_url(text: &str) -> Result<String, String> {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || "._-~/:@%?=&+".contains(c);
    let is_url = text.strip_prefix("https://").or_else(|| text.strip_prefix("http://"));
    if (text == RUNBOOKS || is_url.is_some_and(|rest| !rest.is_empty())) && text.chars().all(is_allowed) {
        Ok(text.to_owned())
    } else {
        Err("expected a URL without a fragment, such as `https://git.example.com/lockstep/docs/operations.md`"
            .to_owned())
    }
}

/// Parses `--priority-class`.
fn priority_class(text: &str) -> Result<String, String> {
    if names::is_subdomain(text) {
        Ok(text.to_owned())
    } else {
        Err("expected the name of a PriorityClass".to_owned())
    }
}

/// A list of strings in CEL, in printable ASCII, which needs no escaping in a YAML block.
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
            _ => literal += &format!("\\U{:08x}", u32::from(c)),
        }
    }
    literal + "'"
}

/// Parses `--webhook-url`: a `clientConfig.url` without its path, which differs between webhooks.
fn webhook_url(text: &str) -> Result<String, String> {
    let bad = || "expected a URL such as `https://10.0.0.7:9443`: https, a host, no path".to_owned();
    // The parser would drop a fragment, and accept credentials as a part of the authority.
    if text.contains(['#', '?', '@']) {
        return Err(bad());
    }
    let uri: Uri = text.parse().map_err(|_| bad())?;
    let authority = uri.authority().ok_or_else(bad)?;
    let host = authority.host();
    let v6 = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let valid_host = match v6 {
        Some(address) => address.parse::<Ipv6Addr>().is_ok(),
        None => names::is_subdomain(&host.to_ascii_lowercase()),
    };
    let valid_port = authority.as_str() == host || authority.port_u16().is_some_and(|port| port > 0);
    let valid = uri.scheme_str() == Some("https") && valid_host && valid_port && uri.path() == "/";
    if valid { Ok(format!("https://{authority}")) } else { Err(bad()) }
}

#[cfg(test)]
mod roles_tests;
#[cfg(test)]
mod tests {
    use super::*;

    fn manifests() -> Manifests {
        Manifests { secrets: true, policy: true, ..Manifests::default() }
    }

    #[test]
    fn namespace_is_printed_first_and_only_with_the_flag() {
        assert!(!manifests().render().contains("kind: Namespace\n"));
        let text = Manifests { create_namespace: true, namespace: "own".into(), ..manifests() }.render();
        let (first, _) = text.split_once("---\n").unwrap();
        assert!(first.contains("kind: Namespace\nmetadata:\n  name: own\n"), "{first}");
    }

    #[test]
    fn namespaces_that_every_cluster_has_are_refused() {
        for name in ["default", "kube-system", "kube-public", "kube-node-lease", "kube-flannel", "a b"] {
            assert!(namespace(name).is_err(), "{name}");
        }
        for name in ["lockstep-system", "platform", "kubernetes", "default-x"] {
            assert_eq!(namespace(name).as_deref(), Ok(name));
        }
    }

    #[test]
    fn names_are_replaced_everywhere_even_where_they_contain_each_other() {
        let everything =
            || Manifests { create_namespace: true, cert_manager: true, monitoring: true, ..manifests() };
        let other = Manifests {
            domain: "lockstep-system.example".into(),
            suffix: "-workshop.io".into(),
            namespace: "x-synced".into(),
            ..everything()
        }
        .render();
        let back = [
            ("lockstep-system.example", keys::DOMAIN),
            ("-workshop.io", keys::SUFFIX),
            ("x-synced", keys::NAMESPACE),
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
    fn webhook_url_replaces_the_service_in_every_webhook() {
        let url = Some("https://127.0.0.1:9443".to_owned());
        let text = Manifests { webhook_url: url, ..manifests() }.render();
        assert_eq!(text.matches("      url: https://127.0.0.1:9443/validate\n").count(), 4, "{text}");
        assert_eq!(text.matches("      url: https://127.0.0.1:9443/mutate\n").count(), 1, "{text}");
        assert!(!text.contains("service:\n") && !text.contains("kind: Service\n"), "{text}");
        for kind in ["Deployment", "PodDisruptionBudget", "NetworkPolicy", "ResourceQuota"] {
            assert!(!text.contains(&format!("kind: {kind}\n")), "{kind}");
            assert!(manifests().render().contains(&format!("kind: {kind}\n")), "{kind}");
        }
    }

    #[test]
    fn webhooks_and_policy_match_secrets_only_with_the_flag() {
        assert_eq!(manifests().render().matches("resources: [configmaps, secrets]").count(), 6);
        assert!(
            manifests()
                .render()
                .contains("- name: LOCKSTEP_KINDS\n              value: configmaps,secrets\n")
        );
        let without = Manifests { secrets: false, ..manifests() }.render();
        assert!(!without.contains("configmaps, secrets") && !without.contains("workshop.io-secrets"));
        assert!(without.contains("- name: LOCKSTEP_KINDS\n              value: configmaps\n"));
    }

    #[test]
    fn names_of_exempt_users_are_escaped_in_the_policy() {
        let exempt_user = vec!["alice".to_owned(), "o'brien\\ \n- ü workshop.io".to_owned()];
        let text = Manifests { exempt_user, exempt_group: vec!["ops".to_owned()], ..manifests() }.render();
        let users = r"username in ['alice', 'o\'brien\\ \U0000000a- \U000000fc workshop.io'])";
        assert!(text.contains(users), "{text}");
        assert!(text.contains("exists(group, group in ['ops']))"), "{text}");
        assert!(!text.contains("in []"), "{text}");
    }

    #[test]
    fn flags_become_environment_variables_of_the_deployment() {
        let exempt_user = vec!["a\"b: #$(X)".to_owned(), "bob".to_owned()];
        let text = Manifests {
            exempt_user,
            exempt_group: vec!["ops".to_owned()],
            deputy_user: vec!["argo".to_owned()],
            deputy_group: vec!["robots".to_owned()],
            domain: "example.com".into(),
            suffix: "-1".into(),
            image: "registry.example.com/lockstep@sha256:0".into(),
            ..manifests()
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
    fn runbooks_are_where_the_flag_says() {
        let url = runbook_url("https://git.example.com/x?ref=v1").unwrap();
        let text = Manifests { monitoring: true, runbook_url: url, ..manifests() }.render();
        let expected = "runbook_url: https://git.example.com/x?ref=v1#lockstepnoleader\n";
        assert!(text.contains(expected) && !text.contains("runbook_url: docs"), "{text}");
        for bad in ["", "docs", "https://", "ftp://x", "https://x#y", "https://x y", "https://x\n- y"] {
            assert!(runbook_url(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn default_image_is_this_version_and_invalid_images_are_rejected() {
        assert!(DEPLOYMENT_FILE.contains(&format!("image: {IMAGE}\n")), "deploy/base has another version");
        for text in ["", " ", "-x", "a b", "a\n- b", "a'b", "a#b"] {
            assert!(image(text).is_err(), "{text}");
        }
    }

    #[test]
    fn webhook_url_is_https_with_a_host_and_no_path() {
        for text in ["https://10.0.0.7:9443", "https://webhook.example.com", "https://[::1]:9443"] {
            assert_eq!(webhook_url(text).as_deref(), Ok(text));
        }
        assert_eq!(webhook_url("https://webhook:9443/").as_deref(), Ok("https://webhook:9443"));
        for text in [
            "",
            "webhook:9443",
            "http://webhook:9443",
            "https://",
            "https://:9443",
            "https://webhook:9443/validate",
            "https://webhook:9443?x=y",
            "https://webhook:9443#x",
            "https://me:secret@webhook:9443",
            "https://webhook:0",
            "https://webhook:99999",
            "https://webhook:",
            "https://[::zz]:9443",
            "https://under_score:9443",
            "https://webhook:9443\n- x",
        ] {
            assert!(webhook_url(text).is_err(), "{text}");
        }
    }
}
