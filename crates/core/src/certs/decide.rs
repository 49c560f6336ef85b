//! What to do about the certificates, given what is observed, what is remembered, and the time.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use k8s_openapi::jiff::Timestamp;

use super::{
    issue::{Ca, Error, Leaf, SubjectNames},
    leaf::{Renewal, renewal},
    lifetimes::{Due, Lifetimes, MAX_SLEEP},
    rotation::{Inputs, SecretChange},
    secret::{CaSet, ParsedSecret, SecretObject},
    webhooks::{BundleDiff, Published, WebhookConfiguration, WebhookKind, names},
};
use crate::{
    certs::write_history::WriteHistory,
    keys::Keys,
    object::time::{Moment, between},
    object::watched::Observed,
};

#[derive(Debug, Clone)]
pub struct CertSettings {
    pub keys: Arc<Keys>,
    /// Lockstep's own namespace, which has the CA Secret.
    pub namespace: String,
    pub lifetimes: Lifetimes,
}

/// What the watches show.
#[derive(Clone, Default)]
pub struct CertSnapshot {
    pub secret: Observed<SecretObject>,
    /// In the order of [`WebhookKind::ALL`].
    pub configurations: [Observed<WebhookConfiguration>; 2],
    /// When somebody last asked for a rotation.
    pub request: Option<Timestamp>,
}

/// What is remembered from one decision to the next.
#[derive(Debug, Clone, Default)]
pub struct Memory {
    /// The last usable content of the Secret: these CAs are published, and the current one signs.
    pub cas: Option<Arc<CaSet>>,
    pub published: Published,
    pub secret_writes: WriteHistory,
    /// In the order of [`WebhookKind::ALL`].
    pub configurations: [ConfigurationMemory; 2],
}

#[derive(Debug, Clone, Default)]
pub struct ConfigurationMemory {
    /// Since when it trusts more CAs than it should.
    extra_since: Option<Instant>,
    pub writes: WriteHistory,
}

/// What to do now.
#[derive(Default)]
pub struct Actions {
    pub memory: Memory,
    /// Writes to send now; `memory` has them as in flight.
    pub writes: Vec<CaWrite>,
    /// A change of the Secret needs a CA that could not be generated.
    pub failure: Option<Error>,
    pub leaf: Option<LeafRequest>,
    /// Every webhook configuration that exists trusts the CA that signs. One that is missing is never waited for: no
    /// pod would get ready, and a rollout would hang.
    pub is_published: bool,
    /// How long to wait for the next decision if nothing happens before.
    pub check_after: Duration,
}

/// A leaf to issue.
pub struct LeafRequest {
    pub reason: Renewal,
    pub ca: Arc<Ca>,
    pub names: SubjectNames,
}

/// A write to the API server.
#[derive(Clone)]
pub enum CaWrite {
    /// Patches this version of the Secret, or creates it if the version is empty.
    Secret { change: SecretChange, cas: CaSet, version: String },
    /// Sets the caBundle of the webhooks of the observed configuration.
    Bundle { kind: WebhookKind, cas: Arc<CaSet>, observed: Arc<WebhookConfiguration> },
}

impl CaWrite {
    /// The resourceVersion it is based on; empty if it creates the object.
    pub fn version(&self) -> &str {
        match self {
            Self::Secret { version, .. } => version,
            Self::Bundle { observed, .. } => &observed.metadata.resource_version,
        }
    }

    pub const fn may_recur(&self) -> bool {
        match self {
            Self::Secret { change, .. } => change.may_recur(),
            Self::Bundle { .. } => true,
        }
    }
}

/// Decides what to do now.
pub fn decide(
    settings: &CertSettings,
    snapshot: &CertSnapshot,
    memory: &Memory,
    leaf: Option<&Leaf>,
    now: Moment,
) -> Actions {
    let mut actions = Actions { memory: memory.clone(), check_after: MAX_SLEEP, ..Actions::default() };
    let all_known = !snapshot.configurations.iter().any(Observed::is_unknown);
    let configurations = || {
        let present = snapshot.configurations.iter().filter_map(Observed::present);
        present.map(AsRef::as_ref).filter(|_| all_known)
    };
    if all_known {
        actions.memory.published = memory.published.updated(configurations(), now.wall);
    }
    let names = names(configurations(), &settings.namespace);
    actions.change_secret(settings, snapshot, leaf, &names, now);
    let Some(cas) = actions.memory.cas.clone() else { return actions };
    let published = &actions.memory.published;
    actions.is_published = published.contains(&cas.current.certificate) == Some(true);
    match renewal(leaf, &cas, published, &names, now.wall, &settings.lifetimes) {
        Due::Now(reason) => actions.leaf = Some(LeafRequest { reason, ca: cas.current.clone(), names }),
        Due::At(at) => actions.check_at(at, now),
    }
    for (kind, observed) in WebhookKind::ALL.into_iter().zip(&snapshot.configurations) {
        if let Observed::Present(configuration) = observed {
            actions.set_bundle(settings, kind, configuration, &cas, now);
        }
    }
    actions
}

impl Actions {
    fn change_secret(
        &mut self,
        settings: &CertSettings,
        CertSnapshot { secret: observed, request, .. }: &CertSnapshot,
        leaf: Option<&Leaf>,
        names: &SubjectNames,
        now: Moment,
    ) {
        if observed.is_unknown() {
            return;
        }
        let object = observed.present();
        let secret = object.map(|object| ParsedSecret::parse(&object.data));
        let remembered = self.memory.cas.clone();
        let published = self.memory.published.clone();
        let inputs = Inputs {
            secret: secret.as_ref(),
            remembered: remembered.as_deref(),
            published: &published,
            names,
            request: *request,
            serving: leaf.filter(|leaf| leaf.certificate.is_valid(now.wall)).map(|leaf| &leaf.issuer),
            now: now.wall,
            lifetimes: &settings.lifetimes,
        };
        let due = inputs.next_change();
        if let Some(cas) = inputs.usable_cas(due) {
            self.memory.cas = Some(Arc::new(cas));
        }
        let version = object.map_or("", |object| &object.metadata.resource_version);
        self.memory.secret_writes.seen(version);
        let change = match due {
            Due::Now(change) => change,
            Due::At(at) => return self.check_at(at, now),
        };
        let writes = &mut self.memory.secret_writes;
        match writes.wait("", version, change.may_recur(), now.instant) {
            None => {}
            Some(Duration::ZERO) => match inputs.contents_after(change, &settings.keys.instance) {
                Ok(Some(cas)) => {
                    writes.started("", change.may_recur(), now.instant);
                    self.writes.push(CaWrite::Secret { change, cas, version: version.to_owned() });
                }
                Ok(None) => {}
                Err(error) => self.failure = Some(error),
            },
            Some(wait) => self.check_after = self.check_after.min(wait),
        }
    }

    fn set_bundle(
        &mut self,
        settings: &CertSettings,
        kind: WebhookKind,
        configuration: &Arc<WebhookConfiguration>,
        cas: &Arc<CaSet>,
        now: Moment,
    ) {
        let memory = &mut self.memory.configurations[kind as usize];
        let diff = configuration.diff(cas);
        if diff != BundleDiff::Extra {
            memory.extra_since = None;
        }
        let delay = match diff {
            BundleDiff::Same => return,
            BundleDiff::Missing => Duration::ZERO,
            BundleDiff::Extra if configuration.trusts_revoked(cas) => Duration::ZERO,
            BundleDiff::Extra => {
                let since = *memory.extra_since.get_or_insert(now.instant);
                let passed = now.instant.saturating_duration_since(since);
                settings.lifetimes.removal_delay().saturating_sub(passed)
            }
        };
        let bundle = cas.bundle();
        let version = &configuration.metadata.resource_version;
        let Some(wait) = memory.writes.wait(&bundle, version, true, now.instant) else { return };
        if wait.max(delay).is_zero() {
            memory.writes.started(&bundle, true, now.instant);
            self.writes.push(CaWrite::Bundle { kind, cas: cas.clone(), observed: configuration.clone() });
        } else {
            self.check_after = self.check_after.min(wait.max(delay));
        }
    }

    fn check_at(&mut self, at: Timestamp, now: Moment) {
        self.check_after = self.check_after.min(between(now.wall, at));
    }
}

#[cfg(test)]
mod tests;
