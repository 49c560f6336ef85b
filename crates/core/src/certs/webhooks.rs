//! The webhook configurations: which hosts they call, which CAs they trust, and the patch that sets the caBundle.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use json_patch::Patch;
use k8s_openapi::{ByteString, jiff::Timestamp};
use serde::Deserialize;
use serde_json::json;

use super::{
    issue::{Certificate, SubjectNames, subject_name},
    secret::CaSet,
};
use crate::{
    object::time::later,
    object::{Meta, patch, watched::Watched},
};

/// The two kinds of webhook configurations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum WebhookKind {
    Validating,
    Mutating,
}

impl WebhookKind {
    pub const ALL: [Self; 2] = [Self::Validating, Self::Mutating];

    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Validating => "ValidatingWebhookConfiguration",
            Self::Mutating => "MutatingWebhookConfiguration",
        }
    }

    /// What the API server does without it.
    pub const fn without_it(self) -> &'static str {
        match self {
            Self::Validating => "lets everybody write companions, and sources without a review",
            Self::Mutating => "adds no defaults to sources",
        }
    }

    /// The path of its collection.
    pub const fn path(self) -> &'static str {
        match self {
            Self::Validating => "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations",
            Self::Mutating => "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations",
        }
    }
}

/// What `lockstep manifests --cert-manager` adds to the webhook configurations: cert-manager writes their caBundle.
const CERT_MANAGER_ANNOTATION: &str = "cert-manager.io/inject-ca-from";
/// What the names of our webhooks begin with; the name of their configuration follows.
const OURS: [&str; 5] = ["companions", "sources", "newcomers", "mislabelled", "defaults"];

/// A webhook configuration: only the fields we use.
#[derive(Clone, Deserialize)]
pub struct WebhookConfiguration {
    pub metadata: Meta,
    #[serde(default)]
    webhooks: Vec<WebhookEntry>,
}

#[derive(Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
struct WebhookEntry {
    name: String,
    #[serde(default)]
    client_config: ClientConfig,
}

#[derive(Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct ClientConfig {
    service: Option<ServiceReference>,
    url: Option<String>,
    ca_bundle: Option<ByteString>,
}

#[derive(Clone, Deserialize)]
struct ServiceReference {
    name: String,
    namespace: String,
}

impl Watched for WebhookConfiguration {
    fn meta(&self) -> &Meta {
        &self.metadata
    }
}

/// How the caBundles of a configuration differ from what they should be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BundleDiff {
    Same,
    /// A webhook lacks a CA: calls may fail.
    Missing,
    /// Every CA is there, with others or in another encoding. Another replica may have seen a newer Secret than we.
    Extra,
}

impl WebhookEntry {
    fn bundle(&self) -> &[u8] {
        self.client_config.ca_bundle.as_ref().map_or(&[], |bundle| &bundle.0)
    }

    fn certificates(&self) -> Vec<Certificate> {
        Certificate::parse_all(self.bundle()).unwrap_or_default()
    }

    /// The host that the API server calls: the Service's DNS name or the URL's host; none if the URL is invalid.
    fn host(&self) -> Option<String> {
        if let Some(ServiceReference { name, namespace }) = &self.client_config.service {
            return subject_name(&format!("{name}.{namespace}.svc"));
        }
        subject_name(self.client_config.url.as_ref()?.parse::<http::Uri>().ok()?.host()?)
    }
}

impl WebhookConfiguration {
    fn is_ours(&self, webhook: &WebhookEntry) -> bool {
        let prefix = webhook.name.strip_suffix(&self.metadata.name).and_then(|name| name.strip_suffix('.'));
        prefix.is_some_and(|prefix| OURS.contains(&prefix))
    }

    /// Our webhooks. Others in our configuration may call anything: our CA does not go there.
    fn ours(&self) -> impl Iterator<Item = &WebhookEntry> {
        self.webhooks.iter().filter(|webhook| self.is_ours(webhook))
    }

    pub fn is_injected_by_cert_manager(&self) -> bool {
        self.metadata.annotations.contains_key(CERT_MANAGER_ANNOTATION)
    }

    /// The names of webhooks that are not ours.
    pub fn unknown(&self) -> impl Iterator<Item = &str> {
        self.webhooks.iter().filter(|webhook| !self.is_ours(webhook)).map(|webhook| webhook.name.as_str())
    }

    pub fn diff(&self, cas: &CaSet) -> BundleDiff {
        let trusted = cas.trusted();
        let bundle = cas.bundle();
        let lacks_one = |webhook: &WebhookEntry| {
            let present = webhook.certificates();
            trusted.iter().any(|certificate| !present.contains(certificate))
        };
        if self.ours().any(lacks_one) {
            BundleDiff::Missing
        } else if self.ours().any(|webhook| webhook.bundle() != bundle.as_bytes()) {
            BundleDiff::Extra
        } else {
            BundleDiff::Same
        }
    }

    /// The CAs that our webhooks trust, each as often as there are webhooks that do.
    pub fn trusted(&self) -> impl Iterator<Item = Certificate> {
        self.ours().flat_map(WebhookEntry::certificates)
    }

    /// Whether one of our webhooks trusts a CA that is revoked.
    pub(crate) fn trusts_revoked(&self, cas: &CaSet) -> bool {
        self.trusted().any(|one| cas.revokes(&one))
    }

    /// Sets the caBundle of each of our webhooks that has another. Operations address webhooks by position, and a
    /// manifest applied meanwhile may have moved them, so the patch tests the object's UID and each webhook's name.
    pub fn patch(&self, cas: &CaSet) -> Patch {
        let bundle = ByteString(cas.bundle().into_bytes());
        let mut ops = vec![patch::test(&["metadata", "uid"], json!(self.metadata.uid))];
        for (n, webhook) in self.webhooks.iter().enumerate() {
            if !self.is_ours(webhook) || webhook.bundle() == bundle.0 {
                continue;
            }
            let n = n.to_string();
            ops.push(patch::test(&["webhooks", &n, "name"], json!(webhook.name)));
            ops.push(patch::add(&["webhooks", &n, "clientConfig", "caBundle"], json!(bundle)));
        }
        Patch(ops)
    }
}

/// The names that a leaf must have: the hosts that our webhooks call, our own Service, and localhost.
pub fn names<'a>(
    configurations: impl Iterator<Item = &'a WebhookConfiguration>,
    own_namespace: &str,
) -> SubjectNames {
    configurations
        .flat_map(WebhookConfiguration::ours)
        .filter_map(WebhookEntry::host)
        .chain([format!("lockstep.{own_namespace}.svc"), "localhost".to_owned()])
        .collect()
}

/// When the first of our webhooks trusts no CA any more: the latest expiry in each caBundle, and the earliest of these.
/// None if a webhook trusts no CA, or if there is no webhook.
pub fn ca_expiry<'a>(configurations: impl Iterator<Item = &'a WebhookConfiguration>) -> Option<Timestamp> {
    let latest = |webhook: &WebhookEntry| webhook.certificates().iter().map(|one| one.not_after).max();
    // None is less than any time.
    configurations.flat_map(WebhookConfiguration::ours).map(latest).min().flatten()
}

/// The CAs, as DER, that each of our webhooks trusts; none if there is none.
fn trusted_by_all<'a>(
    configurations: impl Iterator<Item = &'a WebhookConfiguration>,
) -> Option<BTreeSet<Vec<u8>>> {
    let trusted = |webhook: &WebhookEntry| -> BTreeSet<Vec<u8>> {
        webhook.certificates().iter().map(|one| one.der().to_vec()).collect()
    };
    configurations.flat_map(WebhookConfiguration::ours).map(trusted).reduce(|all, these| &all & &these)
}

/// Which CAs every webhook trusts, and since when.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Published {
    /// The webhook configurations have not been observed yet.
    #[default]
    Unknown,
    /// None of our webhooks is registered, so the API server never calls this process.
    NoWebhooks,
    /// The DER of each CA, and since when it has been there without a break.
    Since(BTreeMap<Vec<u8>, Timestamp>),
}

impl Published {
    /// What is published now, given what was before.
    pub fn updated<'a>(
        &self,
        configurations: impl Iterator<Item = &'a WebhookConfiguration>,
        now: Timestamp,
    ) -> Self {
        let Some(trusted) = trusted_by_all(configurations) else { return Self::NoWebhooks };
        let before = |der: &Vec<u8>| match self {
            Self::Since(before) => before.get(der).copied(),
            _ => None,
        };
        // A time in the future means that the clock has been set back.
        let since = |der: &Vec<u8>| before(der).map_or(now, |since| since.min(now));
        Self::Since(trusted.into_iter().map(|der| (der.clone(), since(&der))).collect())
    }

    /// Whether every webhook trusts this CA; none if that is unknown.
    pub fn contains(&self, certificate: &Certificate) -> Option<bool> {
        match self {
            Self::Unknown => None,
            Self::NoWebhooks => Some(true),
            Self::Since(since) => Some(since.contains_key(certificate.der().as_ref())),
        }
    }

    /// When every API server trusts this CA, given how long that takes; none while it is not published.
    pub(crate) fn propagated_at(&self, certificate: &Certificate, delay: Duration) -> Option<Timestamp> {
        match self {
            Self::Unknown => None,
            Self::NoWebhooks => Some(Timestamp::MIN),
            Self::Since(since) => since.get(certificate.der().as_ref()).map(|since| later(*since, delay)),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;
    use crate::certs::testing::{LIFETIMES, at, ca_at, cas, service};

    fn configuration(webhooks: &[(Value, Option<&str>)]) -> WebhookConfiguration {
        crate::certs::testing::configuration("1", webhooks)
    }

    fn url(url: &str) -> Value {
        json!({"url": url})
    }

    #[test]
    fn patch_sets_only_differing_webhooks_and_tests_their_identity() {
        let cas = cas();
        let bundle = cas.bundle();
        let configuration = configuration(&[
            (service(), Some(&bundle)),
            (service(), None),
            (url("https://a.example"), Some("other")),
        ]);
        let value = json!(ByteString(bundle.into_bytes()));
        let expected = json!([
            {"op": "test", "path": "/metadata/uid", "value": "u1"},
            {"op": "test", "path": "/webhooks/1/name", "value": "sources.x"},
            {"op": "add", "path": "/webhooks/1/clientConfig/caBundle", "value": value},
            {"op": "test", "path": "/webhooks/2/name", "value": "sources.x"},
            {"op": "add", "path": "/webhooks/2/clientConfig/caBundle", "value": value},
        ]);
        assert_eq!(json!(configuration.patch(&cas)), expected);
    }

    #[test]
    fn webhooks_of_others_in_our_configuration_are_left_alone() {
        let cas = cas();
        let names = ["sources.x", "scan.vendor.example", "sources.other.x", "sourcesx", "my.sources.x"];
        let webhooks =
            names.map(|name| json!({"name": name, "clientConfig": url(&format!("https://{name}"))}));
        let metadata = json!({"name": "x", "uid": "u1", "resourceVersion": "1"});
        let mut object = json!({"metadata": metadata, "webhooks": webhooks});
        let read = |object: &Value| serde_json::from_value::<WebhookConfiguration>(object.clone()).unwrap();
        let configuration = read(&object);
        assert!(configuration.unknown().eq(names[1..].iter().copied()));
        let paths: Vec<Value> = json!(configuration.patch(&cas)).as_array().unwrap().clone();
        assert!(paths.iter().skip(1).all(|op| op["path"].as_str().unwrap().starts_with("/webhooks/0/")));
        let called: Vec<String> = names_of(&configuration);
        assert_eq!(called, ["localhost", "lockstep.home.svc", "sources.x"]);
        // Once ours has the bundle, nothing is left to do, and the CA is published.
        object["webhooks"][0]["clientConfig"]["caBundle"] = json!(ByteString(cas.bundle().into_bytes()));
        assert_eq!(read(&object).diff(&cas), BundleDiff::Same);
        let published = Published::Unknown.updated([&read(&object)].into_iter(), at(0));
        assert_eq!(published.contains(&cas.current.certificate), Some(true));
    }

    fn names_of(configuration: &WebhookConfiguration) -> Vec<String> {
        names([configuration].into_iter(), "home").into_iter().collect()
    }

    /// A webhook that the manifests have and this list lacks would never get the CA.
    #[test]
    fn every_webhook_of_the_manifests_is_known() {
        let manifest = include_str!("../../../../deploy/base/webhook.yaml");
        let names = manifest.lines().filter_map(|line| line.strip_prefix("  - name: "));
        let expected: Vec<String> = OURS.iter().map(|name| format!("{name}.lockstep.workshop.io")).collect();
        assert_eq!(names.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn diff_distinguishes_missing_cas_from_extra_ones() {
        let (one, other) = (cas(), cas());
        let (bundle, both) = (one.bundle(), format!("{}{}", other.bundle(), one.bundle()));
        let diff = |bundles: &[Option<&str>]| {
            let webhooks: Vec<_> = bundles.iter().map(|bundle| (service(), *bundle)).collect();
            configuration(&webhooks).diff(&one)
        };
        let right = Some(&*bundle);
        assert_eq!(diff(&[]), BundleDiff::Same);
        assert_eq!(diff(&[right, right]), BundleDiff::Same);
        assert_eq!(diff(&[right, None]), BundleDiff::Missing);
        assert_eq!(diff(&[right, Some("nonsense")]), BundleDiff::Missing);
        assert_eq!(diff(&[Some(&other.bundle()), right]), BundleDiff::Missing);
        assert_eq!(diff(&[Some(&both), right]), BundleDiff::Extra);
        assert_eq!(diff(&[Some(&format!("# ours\n{bundle}"))]), BundleDiff::Extra);
        assert_eq!(diff(&[Some(&both), None]), BundleDiff::Missing);
    }

    #[test]
    fn published_is_what_every_webhook_of_both_configurations_trusts() {
        let (one, other) = (cas(), cas());
        let der = |cas: &CaSet| cas.current.certificate.der().to_vec();
        let both = format!("{}{}", one.bundle(), other.bundle());
        let first = configuration(&[(service(), Some(&both)), (service(), Some(&one.bundle()))]);
        let second = configuration(&[(service(), Some(&both))]);
        assert_eq!(trusted_by_all([&first, &second].into_iter()), Some([der(&one)].into()));
        assert_eq!(trusted_by_all([&second].into_iter()), Some([der(&one), der(&other)].into()));
        assert_eq!(
            trusted_by_all([&second, &configuration(&[(service(), None)])].into_iter()),
            Some([].into())
        );
        assert_eq!(trusted_by_all([&configuration(&[])].into_iter()), None, "no webhook calls us");
    }

    #[test]
    fn ca_expiry_is_that_of_the_webhook_that_is_first_without_a_valid_ca() {
        let (early, late) = (CaSet::new(ca_at(at(0), &LIFETIMES)), CaSet::new(ca_at(at(5000), &LIFETIMES)));
        let expiry = |cas: &CaSet| Some(cas.current.certificate.not_after);
        assert!(expiry(&early) < expiry(&late));
        let both = format!("{}{}", late.bundle(), early.bundle());
        let (early_bundle, late_bundle) = (early.bundle(), late.bundle());
        let (early_bundle, late_bundle, both) = (Some(&*early_bundle), Some(&*late_bundle), Some(&*both));
        for (first, second, expected) in [
            (vec![both], vec![late_bundle], expiry(&late)),
            (vec![late_bundle, early_bundle], vec![late_bundle], expiry(&early)),
            (vec![late_bundle], vec![both, early_bundle], expiry(&early)),
            (vec![late_bundle, None], vec![late_bundle], None),
            (vec![late_bundle], vec![Some("nonsense")], None),
            (vec![late_bundle], vec![], expiry(&late)),
            (vec![], vec![], None),
        ] {
            let read = |bundles: &[Option<&str>]| {
                configuration(&bundles.iter().map(|bundle| (service(), *bundle)).collect::<Vec<_>>())
            };
            let configurations = [read(&first), read(&second)];
            assert_eq!(ca_expiry(configurations.iter()), expected, "{} {}", first.len(), second.len());
        }
    }

    #[test]
    fn names_are_the_called_hosts_and_always_our_own_service_and_localhost() {
        let configuration = configuration(&[
            (service(), None),
            (url("https://Webhook.Example:8443/validate"), None),
            (url("https://10.0.0.7:9443/x"), None),
            (url("https://[2001:db8::7]:9443/x"), None),
            (url("no url at all"), None),
            (url(""), None),
            (url("https://under_score.example"), None),
            (json!({}), None),
        ]);
        let found = names([&configuration].into_iter(), "lockstep-system");
        let expected = [
            "10.0.0.7",
            "2001:db8::7",
            "localhost",
            "lockstep.lockstep-system.svc",
            "webhook.example",
            "webhook.home.svc",
        ];
        assert_eq!(found.iter().map(String::as_str).collect::<Vec<_>>(), expected);
    }

    #[test]
    fn a_ca_is_published_since_it_was_first_seen_without_a_break() {
        let (one, other) = (cas(), cas());
        let der = |cas: &CaSet| cas.current.certificate.der().to_vec();
        let see = |before: &Published, cas: &[&CaSet], second: i64| {
            let bundle: String = cas.iter().map(|cas| cas.bundle()).collect();
            let configuration = configuration(&[(service(), Some(&*bundle))]);
            before.updated([&configuration].into_iter(), at(1000 * second))
        };
        let since = |all: &[(&CaSet, i64)]| {
            Published::Since(all.iter().map(|(cas, second)| (der(cas), at(1000 * *second))).collect())
        };
        let first = see(&Published::Unknown, &[&one], 10);
        assert_eq!(first, since(&[(&one, 10)]));
        let second = see(&first, &[&one, &other], 20);
        assert_eq!(second, since(&[(&one, 10), (&other, 20)]));
        let third = see(&second, &[&other], 30);
        assert_eq!(see(&third, &[&one, &other], 40), since(&[(&one, 40), (&other, 20)]));
        assert_eq!(see(&third, &[&other], 15), since(&[(&other, 15)]), "the clock was set back");
        assert_eq!(third.updated(std::iter::empty(), at(40_000)), Published::NoWebhooks);
    }
}
