//! The task that observes the CA Secret and the webhook configurations and carries out what [`decide`] says.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use futures::{StreamExt, stream::FuturesUnordered};
use k8s_openapi::jiff::Timestamp;
use kube::{
    Client,
    api::{Patch, PatchParams, PostParams},
    core::Request,
};
use serde::de::IgnoredAny;
use tokio::{sync::watch as channel, task::JoinSet};

use super::resolver::{Resolver, certified_key};
use crate::ops::{
    health::{Condition, Readiness},
    metrics::{CertificateRole, Metrics},
};
use lockstep_cluster::{
    client,
    watch::{Restores, single_object::watch_object},
};
use lockstep_core::{
    certs::{
        decide::{CaWrite, CertSettings, CertSnapshot, LeafRequest, Memory, decide},
        issue::{Error, Leaf},
        leaf::Renewal,
        rotation::{SecretChange, is_plausible},
        secret::SecretObject,
        webhooks::{WebhookConfiguration, WebhookKind},
    },
    failure::{Failure, backoff::LogOnce},
    object::time::Moment,
    object::watched::Observed,
};

const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
const ISSUE_RETRY_DELAY: Duration = Duration::from_secs(1);

/// Spawns the tasks that keep a valid leaf in the returned resolver, and the CA in the Secret and in the webhook
/// configurations. They never end. People ask for a rotation by an annotation of the Lease.
pub fn start(
    tasks: &mut JoinSet<()>,
    client: &Client,
    settings: CertSettings,
    lease: channel::Receiver<BTreeMap<String, String>>,
    metrics: &Metrics,
    readiness: &Readiness,
    restores: &Restores,
) -> Arc<Resolver> {
    let name = settings.keys.instance.clone();
    let task = CertificateTask {
        secret: watch_object(tasks, client, "CA Secret", secrets_path(&settings), &name, restores),
        configurations: WebhookKind::ALL
            .map(|kind| watch_object(tasks, client, kind.as_str(), kind.path().to_owned(), &name, restores)),
        lease,
        client: client.clone(),
        settings,
        resolver: Arc::default(),
        metrics: metrics.clone(),
        readiness: readiness.clone(),
        memory: Memory::default(),
        leaf: None,
        problems: BTreeMap::new(),
    };
    let resolver = task.resolver.clone();
    tasks.spawn(task.run());
    resolver
}

/// What may be wrong. Each is logged once until it changes or is gone.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
enum Topic {
    Request,
    SecretWrite,
    BundleWrite(WebhookKind),
    Absence(WebhookKind),
}

struct CertificateTask {
    client: Client,
    settings: CertSettings,
    resolver: Arc<Resolver>,
    metrics: Metrics,
    readiness: Readiness,
    secret: channel::Receiver<Observed<SecretObject>>,
    /// In the order of [`WebhookKind::ALL`].
    configurations: [channel::Receiver<Observed<WebhookConfiguration>>; 2],
    /// The annotations of the Lease.
    lease: channel::Receiver<BTreeMap<String, String>>,
    memory: Memory,
    leaf: Option<Leaf>,
    problems: BTreeMap<Topic, LogOnce>,
}

impl CertificateTask {
    /// Never returns.
    async fn run(mut self) {
        // A write that hangs holds up neither the leaf nor the writes to other objects.
        let mut in_flight = FuturesUnordered::new();
        loop {
            let now = Moment { wall: Timestamp::now(), instant: Instant::now() };
            let (writes, wait) = self.reconcile(now);
            for write in writes {
                in_flight.push(send(self.client.clone(), self.settings.clone(), write));
            }
            let [validating, mutating] = &mut self.configurations;
            tokio::select! {
                Some((write, answer)) = in_flight.next() => self.finish(&write, answer, Instant::now()),
                Ok(()) = self.secret.changed() => {}
                Ok(()) = validating.changed() => {}
                Ok(()) = mutating.changed() => {}
                Ok(()) = self.lease.changed() => {}
                () = tokio::time::sleep(wait) => {}
            }
        }
    }

    /// Decides what to do and does all of it but the writes, which it returns together with how long to sleep.
    fn reconcile(&mut self, now: Moment) -> (Vec<CaWrite>, Duration) {
        let request = self.request(now.wall);
        let snapshot = CertSnapshot {
            secret: self.secret.borrow_and_update().clone(),
            configurations: self.configurations.each_mut().map(|one| one.borrow_and_update().clone()),
            request,
        };
        for (kind, observed) in WebhookKind::ALL.into_iter().zip(&snapshot.configurations) {
            self.report_absence(kind, observed);
        }
        let actions = decide(&self.settings, &snapshot, &self.memory, self.leaf.as_ref(), now);
        self.memory = actions.memory;
        if let Some(error) = actions.failure {
            tracing::error!("no CA could be generated: {error}");
        }
        if let Some(cas) = &self.memory.cas {
            self.metrics
                .certificate_expiry
                .of(CertificateRole::Ca)
                .set(cas.current.certificate.not_after.as_second());
        }
        let issued = actions.leaf.map(|request| self.issue(&request, now.wall));
        let wait = match &issued {
            None => actions.check_after,
            // What is due now depends on the leaf being served.
            Some(Ok(())) => Duration::ZERO,
            Some(Err(error)) => {
                tracing::error!("no leaf could be issued: {error}; retrying in {ISSUE_RETRY_DELAY:?}");
                actions.check_after.min(ISSUE_RETRY_DELAY)
            }
        };
        // Only now: the leaf that was served before may lack a name that the webhook configurations call.
        if actions.is_published && !matches!(issued, Some(Err(_))) {
            self.readiness.mark_true(Condition::Bundle);
        }
        if self.leaf.as_ref().is_some_and(|leaf| leaf.certificate.is_valid(now.wall)) {
            self.readiness.mark_true(Condition::Certificate);
        } else {
            self.readiness.mark_false(Condition::Certificate);
        }
        (actions.writes, wait)
    }

    /// When somebody last asked for a rotation.
    fn request(&mut self, now: Timestamp) -> Option<Timestamp> {
        let key = &self.settings.keys.rotate_ca;
        let request = self.lease.borrow_and_update().get(key)?.parse().ok();
        let problem = match request {
            Some(request) if is_plausible(request, now) => None,
            Some(_) => Some("is in the future: check the clocks, and ask again"),
            None => Some("is no time: ask"),
        };
        let problem =
            problem.map(|why| format!("the annotation {key} of the Lease {why} with lockstep certs rotate"));
        self.note(Topic::Request, problem);
        request
    }

    fn report_absence(&mut self, kind: WebhookKind, observed: &Observed<WebhookConfiguration>) {
        if observed.is_unknown() {
            return;
        }
        let is_absent = observed.present().is_none();
        self.metrics.webhook_configuration_missing.of(kind.as_str()).set(is_absent.into());
        let problem = is_absent.then(|| {
            let text = kind.as_str();
            let name = &self.settings.keys.instance;
            let effect = kind.without_it();
            format!(
                "there is no {text} {name}, so the API server {effect}: run lockstep manifests | kubectl apply -f -"
            )
        });
        self.note(Topic::Absence(kind), problem);
    }

    fn issue(&mut self, request: &LeafRequest, now: Timestamp) -> Result<(), Error> {
        let leaf = request.ca.issue(&request.names, self.settings.lifetimes.leaf_validity, now)?;
        self.resolver.serve(certified_key(vec![leaf.certificate.der().clone()], leaf.key_der())?);
        self.metrics.certificate_expiry.of(CertificateRole::Leaf).set(leaf.certificate.not_after.as_second());
        if request.reason != Renewal::First {
            self.metrics.certificate_rotations.of(CertificateRole::Leaf).inc();
        }
        tracing::info!(
            reason = ?request.reason,
            issuer = leaf.issuer.subject,
            expires = %leaf.certificate.not_after,
            names = leaf.names.iter().map(String::as_str).collect::<Vec<_>>().join(","),
            "the webhook serves a new certificate"
        );
        self.leaf = Some(leaf);
        Ok(())
    }

    /// Records the answer to a write, and logs a change or a failure.
    fn finish(&mut self, write: &CaWrite, answer: Result<(), Failure>, now: Instant) {
        let problem = match answer {
            Ok(()) => {
                self.report_write(write);
                None
            }
            // Another replica was first, or the object was deleted: the watch shows it.
            Err(Failure::AlreadyExists | Failure::Conflict) => None,
            Err(Failure::NotFound) if !write.version().is_empty() => None,
            Err(failure) => Some(format!("{}; retrying", explain(write, &self.settings, &failure))),
        };
        let (writes, topic) = match write {
            CaWrite::Secret { .. } => (&mut self.memory.secret_writes, Topic::SecretWrite),
            CaWrite::Bundle { kind, .. } => {
                (&mut self.memory.configurations[*kind as usize].writes, Topic::BundleWrite(*kind))
            }
        };
        if problem.is_some() {
            writes.failed(write.may_recur(), now);
        } else {
            writes.answered(write.version(), now);
        }
        self.note(topic, problem);
    }

    /// Logs and counts a change that was made.
    fn report_write(&self, write: &CaWrite) {
        match write {
            CaWrite::Bundle { kind, cas, .. } => {
                self.metrics.bundle_writes.inc();
                let name = &self.settings.keys.instance;
                tracing::info!(
                    kind = kind.as_str(),
                    name,
                    cas = cas.trusted().len(),
                    "the caBundle was written"
                );
            }
            CaWrite::Secret { change, cas, .. } => {
                if matches!(change, SecretChange::ReplaceCa(_) | SecretChange::PromoteNextCa) {
                    self.metrics.certificate_rotations.of(CertificateRole::Ca).inc();
                }
                let secret = secret_name(&self.settings);
                let current = &cas.current.certificate;
                let ca = &current.subject;
                let expires = current.not_after;
                let next = cas.next.as_ref().map(|next| &*next.ca.certificate.subject);
                if change.is_repair() {
                    tracing::warn!(secret, ca, %expires, next, "{change}");
                } else {
                    tracing::info!(secret, ca, %expires, next, "{change}");
                }
            }
        }
    }

    fn note(&mut self, topic: Topic, problem: Option<String>) {
        let log_once = self.problems.entry(topic).or_default();
        match problem {
            None => log_once.resolved(),
            Some(text) if log_once.is_new(&text) => tracing::warn!("{text}"),
            Some(_) => {}
        }
    }
}

async fn send(client: Client, settings: CertSettings, write: CaWrite) -> (CaWrite, Result<(), Failure>) {
    let name = &settings.keys.instance;
    let params = PatchParams { field_manager: Some(name.clone()), ..PatchParams::default() };
    let request = match &write {
        CaWrite::Secret { cas, version, .. } if version.is_empty() => {
            let params = PostParams { field_manager: Some(name.clone()), ..PostParams::default() };
            let body = cas.body(name, &settings.namespace).to_string().into_bytes();
            Request::new(secrets_path(&settings)).create(&params, body)
        }
        CaWrite::Secret { cas, version, .. } => Request::new(secrets_path(&settings)).patch(
            name,
            &params,
            &Patch::Merge(cas.merge_patch(version)),
        ),
        CaWrite::Bundle { kind, cas, observed } => {
            Request::new(kind.path()).patch(name, &params, &Patch::<()>::Json(observed.patch(cas)))
        }
    };
    let answer = client::send::<IgnoredAny>(&client, REQUEST_TIMEOUT, request).await;
    (write, answer.map(|_| ()))
}

fn secrets_path(settings: &CertSettings) -> String {
    format!("/api/v1/namespaces/{}/secrets", settings.namespace)
}

fn secret_name(settings: &CertSettings) -> String {
    format!("{}/{}", settings.namespace, settings.keys.instance)
}

fn explain(write: &CaWrite, settings: &CertSettings, failure: &Failure) -> String {
    let what = match write {
        CaWrite::Bundle { kind, .. } => {
            format!("writing the caBundle of the {} {}", kind.as_str(), settings.keys.instance)
        }
        CaWrite::Secret { .. } => format!("writing the CA Secret {}", secret_name(settings)),
    };
    match (write, failure) {
        (CaWrite::Secret { .. }, Failure::NotFound) => format!(
            "{what} failed, because its namespace does not exist: apply `lockstep manifests \
             --create-namespace`, or choose another --namespace"
        ),
        (CaWrite::Secret { .. }, Failure::Invalid(detail)) => {
            format!("{what} failed ({detail}): if it is immutable, delete it; Lockstep creates it again")
        }
        (_, other) => other.explain(&what),
    }
}

#[cfg(test)]
mod tests;
