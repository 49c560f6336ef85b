//! PURE. The webhook configurations: whom they call, what they trust, and the patch that puts that right.

use std::collections::BTreeSet;

use json_patch::Patch as Operations;
use k8s_openapi::ByteString;
use serde::Deserialize;
use serde_json::json;

use super::{
    issue::{Certificate, Names, name},
    state::State,
};
use crate::{object::Meta, patch, watch::Watched};

/// The two kinds of webhook configurations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HookKind {
    Validating,
    Mutating,
}

impl HookKind {
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Validating => "ValidatingWebhookConfiguration",
            Self::Mutating => "MutatingWebhookConfiguration",
        }
    }

    /// The path of its collection.
    #[must_use]
    pub const fn path(self) -> &'static str {
        match self {
            Self::Validating => "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations",
            Self::Mutating => "/apis/admissionregistration.k8s.io/v1/mutatingwebhookconfigurations",
        }
    }
}

/// A webhook configuration: only the fields we use.
#[derive(Clone, Deserialize)]
pub struct Hooks {
    pub metadata: Meta,
    #[serde(default)]
    pub webhooks: Vec<Entry>,
}

#[derive(Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Entry {
    pub name: String,
    #[serde(default)]
    pub client_config: ClientConfig,
}

#[derive(Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ClientConfig {
    service: Option<Service>,
    url: Option<String>,
    ca_bundle: Option<ByteString>,
}

#[derive(Clone, Deserialize)]
struct Service {
    name: String,
    namespace: String,
}

impl Watched for Hooks {
    fn meta(&self) -> &Meta {
        &self.metadata
    }
}

/// How a configuration differs from what it should trust.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Need {
    Nothing,
    /// Some entry lacks a CA: requests may fail.
    Lack,
    /// All is there, and more, or written otherwise. Perhaps another replica knows something that we do not yet.
    Surplus,
}

impl Entry {
    fn bundle(&self) -> &[u8] {
        self.client_config.ca_bundle.as_ref().map_or(&[], |bundle| &bundle.0)
    }

    fn certificates(&self) -> Vec<Certificate> {
        Certificate::parse_all(self.bundle()).unwrap_or_default()
    }

    /// The host it calls: a Service's name, or that of its URL. None where the URL makes no sense.
    fn host(&self) -> Option<String> {
        if let Some(Service { name: service, namespace }) = &self.client_config.service {
            return name(&format!("{service}.{namespace}.svc"));
        }
        name(self.client_config.url.as_ref()?.parse::<http::Uri>().ok()?.host()?)
    }
}

impl Hooks {
    #[must_use]
    pub fn need(&self, state: &State) -> Need {
        let (trusted, bundle) = (state.trusted(), state.bundle());
        let lacks = |entry: &Entry| {
            let there = entry.certificates();
            trusted.iter().any(|certificate| !there.contains(certificate))
        };
        if self.webhooks.iter().any(lacks) {
            Need::Lack
        } else if self.webhooks.iter().any(|entry| entry.bundle() != bundle.as_bytes()) {
            Need::Surplus
        } else {
            Need::Nothing
        }
    }

    /// Writes the bundle into every entry that has another, good for just this object with just these entries: a
    /// patch goes by position, and a manifest applied meanwhile may have moved them.
    #[must_use]
    pub fn patch(&self, state: &State) -> Operations {
        let bundle = ByteString(state.bundle().into_bytes());
        let mut ops = vec![patch::test(&["metadata", "uid"], json!(self.metadata.uid))];
        for (n, entry) in self.webhooks.iter().enumerate() {
            if entry.bundle() == bundle.0 {
                continue;
            }
            let n = n.to_string();
            ops.push(patch::test(&["webhooks", &n, "name"], json!(entry.name)));
            ops.push(patch::add(&["webhooks", &n, "clientConfig", "caBundle"], json!(bundle)));
        }
        Operations(ops)
    }
}

/// What a leaf must be valid for: the hosts that are called, the Service we come with, and ourselves.
#[must_use]
pub fn names<'a>(hooks: impl Iterator<Item = &'a Hooks>, own_namespace: &str) -> Names {
    hooks
        .flat_map(|hooks| &hooks.webhooks)
        .filter_map(Entry::host)
        .chain([format!("lockstep.{own_namespace}.svc"), "localhost".to_owned()])
        .collect()
}

/// The certificates, DER, that every entry trusts; none if there is no entry.
#[must_use]
pub fn held<'a>(hooks: impl Iterator<Item = &'a Hooks>) -> Option<BTreeSet<Vec<u8>>> {
    let of = |entry: &Entry| -> BTreeSet<Vec<u8>> {
        entry.certificates().iter().map(|certificate| certificate.der().to_vec()).collect()
    };
    hooks.flat_map(|hooks| &hooks.webhooks).map(of).reduce(|all, these| &all & &these)
}

#[cfg(test)]
mod tests {
    use std::{sync::Arc, time::Duration};

    use k8s_openapi::jiff::Timestamp;
    use serde_json::Value;

    use super::*;
    use crate::certs::issue::Ca;

    fn state() -> State {
        let now = Timestamp::from_second(1_800_000_000).unwrap();
        State::new(Arc::new(Ca::generate("lockstep.workshop.io", Duration::from_hours(1), now).unwrap()))
    }

    fn hooks(entries: &[(Value, Option<&str>)]) -> Hooks {
        let entry = |(n, (client, bundle)): (usize, &(Value, Option<&str>))| {
            let mut client = client.clone();
            if let Some(bundle) = bundle {
                client["caBundle"] = json!(ByteString(bundle.as_bytes().to_vec()));
            }
            json!({"name": format!("entry{n}"), "clientConfig": client, "sideEffects": "None"})
        };
        let webhooks: Vec<Value> = entries.iter().enumerate().map(entry).collect();
        serde_json::from_value(json!({"metadata": {"name": "x", "uid": "u1"}, "webhooks": webhooks})).unwrap()
    }

    fn service() -> Value {
        json!({"service": {"name": "guard", "namespace": "home"}})
    }

    fn url(url: &str) -> Value {
        json!({"url": url})
    }

    #[test]
    fn only_entries_that_differ_are_patched_and_only_if_they_are_what_they_were() {
        let state = state();
        let bundle = state.bundle();
        let hooks = hooks(&[
            (service(), Some(&bundle)),
            (service(), None),
            (url("https://a.example"), Some("other")),
        ]);
        let value = json!(ByteString(bundle.into_bytes()));
        let expected = json!([
            {"op": "test", "path": "/metadata/uid", "value": "u1"},
            {"op": "test", "path": "/webhooks/1/name", "value": "entry1"},
            {"op": "add", "path": "/webhooks/1/clientConfig/caBundle", "value": value},
            {"op": "test", "path": "/webhooks/2/name", "value": "entry2"},
            {"op": "add", "path": "/webhooks/2/clientConfig/caBundle", "value": value},
        ]);
        assert_eq!(json!(hooks.patch(&state)), expected);
    }

    #[test]
    fn what_lacks_is_told_from_what_is_too_much() {
        let (one, other) = (state(), state());
        let (bundle, both) = (one.bundle(), format!("{}{}", other.bundle(), one.bundle()));
        let need = |bundles: &[Option<&str>]| {
            let entries: Vec<_> = bundles.iter().map(|bundle| (service(), *bundle)).collect();
            hooks(&entries).need(&one)
        };
        let right = Some(&*bundle);
        assert_eq!(need(&[]), Need::Nothing);
        assert_eq!(need(&[right, right]), Need::Nothing);
        assert_eq!(need(&[right, None]), Need::Lack);
        assert_eq!(need(&[right, Some("nonsense")]), Need::Lack);
        assert_eq!(need(&[Some(&other.bundle()), right]), Need::Lack);
        assert_eq!(need(&[Some(&both), right]), Need::Surplus);
        assert_eq!(need(&[Some(&format!("# ours\n{bundle}"))]), Need::Surplus);
        assert_eq!(need(&[Some(&both), None]), Need::Lack);
    }

    #[test]
    fn held_is_what_every_entry_of_both_configurations_trusts() {
        let (one, other) = (state(), state());
        let der = |state: &State| state.current.certificate.der().to_vec();
        let both = format!("{}{}", one.bundle(), other.bundle());
        let first = hooks(&[(service(), Some(&both)), (service(), Some(&one.bundle()))]);
        let second = hooks(&[(service(), Some(&both))]);
        assert_eq!(held([&first, &second].into_iter()), Some([der(&one)].into()));
        assert_eq!(held([&second].into_iter()), Some([der(&one), der(&other)].into()));
        assert_eq!(held([&second, &hooks(&[(service(), None)])].into_iter()), Some([].into()));
        assert_eq!(held([&hooks(&[])].into_iter()), None, "nobody asks");
    }

    #[test]
    fn names_are_the_hosts_that_are_called_and_always_our_own() {
        let hooks = hooks(&[
            (service(), None),
            (url("https://Guard.Example:8443/validate"), None),
            (url("https://10.0.0.7:9443/x"), None),
            (url("https://[2001:db8::7]:9443/x"), None),
            (url("no url at all"), None),
            (url(""), None),
            (url("https://under_score.example"), None),
            (json!({}), None),
        ]);
        let found = names([&hooks].into_iter(), "lockstep-system");
        let expected = [
            "10.0.0.7",
            "2001:db8::7",
            "guard.example",
            "guard.home.svc",
            "localhost",
            "lockstep.lockstep-system.svc",
        ];
        assert_eq!(found.iter().map(String::as_str).collect::<Vec<_>>(), expected);
    }
}
