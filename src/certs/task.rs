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
use tokio::sync::watch as channel;

use super::{
    CertSettings, Error,
    decide::{CaWrite, LeafRequest, Memory, Now, Snapshot, decide},
    issue::Leaf,
    leaf::Renewal,
    request::{Progress, is_plausible},
    resolver::Resolver,
    rotation::SecretChange,
    secret::{CaSet, SecretObject},
    webhooks::{WebhookConfiguration, WebhookKind},
};
use crate::{
    client::{Failure, with_timeout},
    leader::LeaseAnnotations,
    ops::{
        health::{Condition, Readiness},
        log::LogOnce,
        metrics::{Metrics, Role},
    },
    text,
    watch::{
        Restores,
        object::{Observed, watch_object},
    },
};

const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// Bounds the names of foreign webhooks in the log.
const MAX_NAMES_CHARS: usize = 500;
const ISSUE_RETRY_DELAY: Duration = Duration::from_secs(1);

pub(super) struct CertificateTask {
    client: Client,
    settings: CertSettings,
    resolver: Arc<Resolver>,
    metrics: Metrics,
    readiness: Readiness,
    secret: channel::Receiver<Observed<SecretObject>>,
    configurations: [channel::Receiver<Observed<WebhookConfiguration>>; 2],
    annotations: LeaseAnnotations,
    lease: channel::Receiver<BTreeMap<String, String>>,
    memory: Memory,
    leaf: Option<Leaf>,
    secret_failure: LogOnce,
    bundle_failures: [LogOnce; 2],
    absences: [LogOnce; 2],
    unknown_webhooks: [LogOnce; 2],
    bad_request: LogOnce,
}

/// What the watches send to a [`CertificateTask`].
struct Senders {
    secret: channel::Sender<Observed<SecretObject>>,
    configurations: [channel::Sender<Observed<WebhookConfiguration>>; 2],
}

impl CertificateTask {
    /// Keeps a valid leaf in the resolver, the CA in the Secret and in the webhook configurations. Never returns.
    pub(super) async fn observe_and_run(
        client: Client,
        settings: CertSettings,
        resolver: Arc<Resolver>,
        annotations: LeaseAnnotations,
        metrics: Metrics,
        readiness: Readiness,
        restores: Restores,
    ) {
        let (instance, namespace) = (settings.keys.instance.clone(), settings.namespace.clone());
        let (task, Senders { secret, configurations: [validating, mutating] }) =
            Self::new(client.clone(), settings, resolver, annotations, metrics, readiness);
        let watch_configuration = |kind: WebhookKind, sender| {
            let description = format!("the {} {instance}", kind.as_str());
            watch_object(
                client.clone(),
                description,
                kind.path().to_owned(),
                &instance,
                restores.clone(),
                sender,
            )
        };
        let description = format!("the CA Secret {namespace}/{instance}");
        let collection = format!("/api/v1/namespaces/{namespace}/secrets");
        tokio::select! {
            () = watch_object(client.clone(), description, collection, &instance, restores.clone(), secret) => {}
            () = watch_configuration(WebhookKind::Validating, validating) => {}
            () = watch_configuration(WebhookKind::Mutating, mutating) => {}
            () = task.run() => {}
        }
    }

    fn new(
        client: Client,
        settings: CertSettings,
        resolver: Arc<Resolver>,
        annotations: LeaseAnnotations,
        metrics: Metrics,
        readiness: Readiness,
    ) -> (Self, Senders) {
        let (secret_sender, secret) = channel::channel(Observed::Unknown);
        let (validating_sender, validating) = channel::channel(Observed::Unknown);
        let (mutating_sender, mutating) = channel::channel(Observed::Unknown);
        let task = Self {
            client,
            settings,
            resolver,
            metrics,
            readiness,
            secret,
            configurations: [validating, mutating],
            lease: annotations.observed(),
            annotations,
            memory: Memory::default(),
            leaf: None,
            secret_failure: LogOnce::default(),
            bundle_failures: <[LogOnce; 2]>::default(),
            absences: <[LogOnce; 2]>::default(),
            unknown_webhooks: <[LogOnce; 2]>::default(),
            bad_request: LogOnce::default(),
        };
        let configurations = [validating_sender, mutating_sender];
        (task, Senders { secret: secret_sender, configurations })
    }

    async fn run(mut self) {
        // A write that hangs holds up neither the leaf nor the writes to other objects.
        let mut in_flight = FuturesUnordered::new();
        loop {
            let now = Now { time: Timestamp::now(), instant: Instant::now() };
            let (writes, wait) = self.reconcile(now);
            for write in writes {
                in_flight.push(send(self.client.clone(), self.settings.clone(), write));
            }
            let [validating, mutating] = &mut self.configurations;
            tokio::select! {
                Some((write, answer)) = in_flight.next() => self.finish(write, answer, Instant::now()),
                Ok(()) = self.secret.changed() => {}
                Ok(()) = validating.changed() => {}
                Ok(()) = mutating.changed() => {}
                Ok(()) = self.lease.changed() => {}
                () = tokio::time::sleep(wait) => {}
            }
        }
    }

    /// Decides what to do and does all of it but the writes, which it returns together with how long to sleep.
    fn reconcile(&mut self, now: Now) -> (Vec<CaWrite>, Duration) {
        let request = self.request(now.time);
        let snapshot = Snapshot {
            secret: self.secret.borrow_and_update().clone(),
            configurations: self.configurations.each_mut().map(|one| one.borrow_and_update().clone()),
            request,
        };
        self.report_absence(&snapshot);
        let actions = decide(&self.settings, &snapshot, &self.memory, self.leaf.as_ref(), now);
        self.memory = actions.memory;
        if let Some(error) = actions.failure {
            tracing::error!("no CA could be generated: {error}");
        }
        if let Some(cas) = &self.memory.cas {
            self.metrics.certificate_expiry(Role::Ca, cas.current.certificate.not_after.as_second());
        }
        if let Some(progress) = actions.progress {
            self.report_progress(progress);
        }
        let mut wait = actions.check_after;
        let mut has_leaf = true;
        if let Some(request) = actions.leaf {
            match self.issue(&request, now.time) {
                Ok(leaf) => {
                    self.leaf = Some(leaf);
                    // What is due now depends on the leaf being served.
                    wait = Duration::ZERO;
                }
                Err(error) => {
                    tracing::error!("no leaf could be issued: {error}; retrying in {ISSUE_RETRY_DELAY:?}");
                    wait = wait.min(ISSUE_RETRY_DELAY);
                    has_leaf = false;
                }
            }
        }
        // Only now: the leaf that was served before may lack a name that the webhook configurations call.
        if actions.is_published && has_leaf {
            self.readiness.mark_true(Condition::Bundle);
        }
        if self.leaf.as_ref().is_some_and(|leaf| leaf.certificate.is_valid(now.time)) {
            self.readiness.mark_true(Condition::Certificate);
        } else {
            self.readiness.mark_false(Condition::Certificate);
        }
        (actions.writes, wait)
    }

    /// When somebody last asked for a rotation.
    fn request(&mut self, now: Timestamp) -> Option<Timestamp> {
        let lease = self.lease.borrow_and_update();
        let key = &self.settings.keys.rotate_ca;
        let text = lease.get(key)?;
        let request = text.parse().ok();
        let problem = match request {
            Some(request) if is_plausible(request, now) => None,
            Some(_) => Some("is in the future: check the clocks, and ask again"),
            None => Some("is no time: ask"),
        };
        match problem {
            None => self.bad_request.resolved(),
            Some(problem) if self.bad_request.is_new(text) => {
                tracing::warn!("the annotation {key} of the Lease {problem} with lockstep certs rotate")
            }
            Some(_) => {}
        }
        request
    }

    /// Writes the progress to the Lease, if this replica leads.
    fn report_progress(&self, progress: Progress) {
        let (key, text) = (&self.settings.keys.ca_rotation, progress.to_string());
        if self.lease.borrow().get(key) != Some(&text) {
            self.annotations.set(key, Some(text));
        }
    }

    fn warn_of_unknown_webhooks(&mut self, n: usize, configuration: &WebhookConfiguration) {
        let names: Vec<&str> = configuration.unknown().collect();
        if names.is_empty() {
            return self.unknown_webhooks[n].resolved();
        }
        let (kind, name) = (WebhookKind::ALL[n].as_str(), &self.settings.keys.instance);
        let text = format!(
            "the {kind} {name} has webhooks that are not Lockstep's ({}): they do not get its CA; move them to a \
             configuration of their own",
            text::shorten(&names.join(", "), MAX_NAMES_CHARS)
        );
        if self.unknown_webhooks[n].is_new(&text) {
            tracing::warn!("{text}");
        }
    }

    fn report_absence(&mut self, snapshot: &Snapshot) {
        for (n, observed) in snapshot.configurations.iter().enumerate() {
            let kind = WebhookKind::ALL[n];
            if !observed.is_unknown() {
                self.metrics.webhook_configuration_missing(kind.as_str(), observed.present().is_none());
            }
            let text = format!("there is no {} {}", kind.as_str(), self.settings.keys.instance);
            match observed {
                Observed::Unknown => {}
                Observed::Present(configuration) => {
                    self.absences[n].resolved();
                    self.warn_of_unknown_webhooks(n, configuration);
                }
                Observed::Absent if self.absences[n].is_new(&text) => tracing::warn!(
                    "{text}, so the API server {}: run lockstep manifests | kubectl apply -f -",
                    kind.without_it()
                ),
                Observed::Absent => {}
            }
        }
    }

    fn issue(&self, request: &LeafRequest, now: Timestamp) -> Result<Leaf, Error> {
        let leaf = request.ca.issue(&request.names, self.settings.lifetimes.leaf_validity, now)?;
        self.resolver.serve(vec![leaf.certificate.der().clone()], leaf.key_der())?;
        self.metrics.certificate_expiry(Role::Leaf, leaf.certificate.not_after.as_second());
        if request.reason != Renewal::First {
            self.metrics.certificate_rotated(Role::Leaf);
        }
        tracing::info!(
            reason = ?request.reason,
            issuer = leaf.issuer.subject,
            expires = %leaf.certificate.not_after,
            names = leaf.names.iter().map(String::as_str).collect::<Vec<_>>().join(","),
            "the guard serves a new certificate"
        );
        Ok(leaf)
    }

    /// Records the answer to a write, and logs a change or a failure.
    fn finish(&mut self, write: CaWrite, answer: Result<(), Failure>, now: Instant) {
        let (writes, log_once) = match &write {
            CaWrite::Secret { .. } => (&mut self.memory.secret_writes, &mut self.secret_failure),
            CaWrite::Bundle { kind, .. } => {
                let n = *kind as usize;
                (&mut self.memory.configurations[n].writes, &mut self.bundle_failures[n])
            }
        };
        match answer {
            // Another replica was first, or the object was deleted: the watch shows it.
            Err(Failure::AlreadyExists | Failure::Conflict) => {}
            Err(Failure::NotFound) if !write.version().is_empty() => {}
            Err(failure) => {
                writes.failed(write.may_recur(), now);
                let text = explain(&write, &self.settings, &failure);
                if log_once.is_new(&text) {
                    tracing::warn!("{text}; retrying");
                }
                return;
            }
            Ok(()) => match &write {
                CaWrite::Secret { change, cas, .. } => {
                    report_change(*change, cas, &self.settings, &self.metrics)
                }
                CaWrite::Bundle { kind, cas, .. } => {
                    self.metrics.bundle_writes.inc();
                    let (kind, name) = (kind.as_str(), &self.settings.keys.instance);
                    tracing::info!(kind, name, cas = cas.trusted().len(), "the caBundle was written");
                }
            },
        }
        writes.answered(write.version(), now);
        log_once.resolved();
    }
}

async fn send(client: Client, settings: CertSettings, write: CaWrite) -> (CaWrite, Result<(), Failure>) {
    let name = &settings.keys.instance;
    let field_manager = Some(name.clone());
    let patch = |path: &str, operations| {
        let params = PatchParams { field_manager: field_manager.clone(), ..PatchParams::default() };
        Request::new(path).patch(name, &params, &Patch::<()>::Json(operations))
    };
    let secrets = format!("/api/v1/namespaces/{}/secrets", settings.namespace);
    let request = match &write {
        CaWrite::Secret { cas, observed: None, .. } => {
            let params = PostParams { field_manager: field_manager.clone(), ..PostParams::default() };
            let body = cas.body(name, &settings.namespace).to_string().into_bytes();
            Request::new(secrets).create(&params, body)
        }
        CaWrite::Secret { cas, observed: Some(secret), .. } => patch(&secrets, cas.patch(secret)),
        CaWrite::Bundle { kind, cas, observed } => patch(kind.path(), observed.patch(cas)),
    };
    let answer = match request {
        Ok(request) => with_timeout(REQUEST_TIMEOUT, client.request::<IgnoredAny>(request)).await.map(drop),
        Err(error) => Err(Failure::Unavailable(error.to_string())),
    };
    (write, answer)
}

fn secret_name(settings: &CertSettings) -> String {
    format!("{}/{}", settings.namespace, settings.keys.instance)
}

/// Logs and counts a change of the Secret.
fn report_change(change: SecretChange, cas: &CaSet, settings: &CertSettings, metrics: &Metrics) {
    if matches!(change, SecretChange::ReplaceCa(_) | SecretChange::PromoteNextCa) {
        metrics.certificate_rotated(Role::Ca);
    }
    let (secret, current) = (secret_name(settings), &cas.current.certificate);
    let (ca, expires) = (&current.subject, current.not_after);
    let next = cas.next.as_ref().map(|next| &*next.ca.certificate.subject);
    if change.is_repair() {
        tracing::warn!(secret, ca, %expires, next, "{change}");
    } else {
        tracing::info!(secret, ca, %expires, next, "{change}");
    }
}

fn explain(write: &CaWrite, settings: &CertSettings, failure: &Failure) -> String {
    match write {
        CaWrite::Bundle { kind, .. } => {
            let (kind, name) = (kind.as_str(), &settings.keys.instance);
            failure.explain(&format!("writing the caBundle of the {kind} {name}"))
        }
        CaWrite::Secret { .. } => {
            let what = format!("writing the CA Secret {}", secret_name(settings));
            match failure {
                Failure::NotFound => format!(
                    "{what} failed, because its namespace does not exist: apply `lockstep manifests \
                     --create-namespace`, or choose another --namespace"
                ),
                Failure::Invalid(detail) => {
                    format!(
                        "{what} failed ({detail}): if it is immutable, delete it; Lockstep creates it again"
                    )
                }
                other => other.explain(&what),
            }
        }
    }
}

#[cfg(test)]
mod tests;
