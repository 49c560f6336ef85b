//! The CA Secret: watched, and written one step at a time. Every update is good for one version of it only.

use std::{
    collections::BTreeMap,
    sync::Arc,
    time::{Duration, Instant},
};

use json_patch::Patch as Operations;
use k8s_openapi::{ByteString, jiff::Timestamp};
use kube::{
    Client,
    api::{Patch, PatchParams, PostParams},
    core::Request,
};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::sync::watch as channel;

use super::{
    CLOCK, ECHO, PATIENCE, Settings,
    backoff::Backoff,
    issue::{Ca, Certificate, between},
    phase::{Published, Step, View, next_step, outcome},
    sight::Sight,
    state::{Data, Reading, State},
};
use crate::{
    client::{Failure, with_timeout},
    object::Meta,
    ops::{
        log::LogOnce,
        metrics::{Metrics, Role},
    },
    patch,
    watch::Watched,
};

/// The Secret as it comes over the wire. It has no `Debug`: it holds keys.
#[derive(Clone, Deserialize)]
pub(super) struct SecretObject {
    metadata: Meta,
    #[serde(default)]
    data: Option<Data>,
}

impl Watched for SecretObject {
    fn meta(&self) -> &Meta {
        &self.metadata
    }
}

/// Takes every step that is due, for ever. Any replica may: the Secret's version decides who was first.
pub(super) struct Authority {
    pub(super) client: Client,
    pub(super) settings: Arc<Settings>,
    pub(super) sight: channel::Receiver<Sight<SecretObject>>,
    pub(super) published: channel::Receiver<Published>,
    pub(super) serving: channel::Receiver<Option<(Certificate, Timestamp)>>,
    /// What the others follow: the last state of the Secret that was right.
    pub(super) state: channel::Sender<Option<Arc<State>>>,
    pub(super) metrics: Metrics,
    /// The version we wrote upon, and when: until the watch shows another, there is nothing to decide.
    pub(super) written: Option<(String, Instant)>,
    pub(super) backoff: Backoff,
    pub(super) log_once: LogOnce,
}

impl Authority {
    pub(super) async fn run(mut self) {
        loop {
            let wait = self.look().await;
            tokio::select! {
                _ = self.sight.changed() => {}
                _ = self.published.changed() => {}
                _ = self.serving.changed() => {}
                () = tokio::time::sleep(wait) => {}
            }
        }
    }

    /// Takes the next step if one is due, and returns how long to sleep.
    async fn look(&mut self) -> Duration {
        let now = Timestamp::now();
        let sight = self.sight.borrow_and_update().clone();
        let published = self.published.borrow_and_update().clone();
        let serving = self.serving.borrow_and_update().clone();
        let object = match &sight {
            Sight::Unknown => return CLOCK,
            Sight::Absent => None,
            Sight::There(object) => Some(object),
        };
        let version = object.map_or("", |object| &object.metadata.resource_version);
        if let Some((upon, at)) = &self.written
            && upon == version
            && at.elapsed() < ECHO
        {
            return ECHO.saturating_sub(at.elapsed());
        }
        let none = Data::new();
        let reading = object.map(|object| Reading::of(object.data.as_ref().unwrap_or(&none)));
        let memory = self.state.borrow().clone();
        let view = View {
            secret: reading.as_ref(),
            memory: memory.as_deref(),
            published: &published,
            serving: serving.as_ref().filter(|(_, end)| now < *end).map(|(issuer, _)| issuer),
        };
        let step = next_step(view, now, &self.settings.pace);
        if let Some(state) = step.followed(reading.as_ref(), now) {
            self.follow(state);
        }
        if let Step::Rest(until) = step {
            return between(now, until).min(CLOCK);
        }
        // Steps of a rotation have their own pace; others, and failures, may come without end.
        let wait = self.backoff.wait(Instant::now());
        if !wait.is_zero() && (step.may_recur() || self.log_once.is_failing()) {
            return wait;
        }
        let made = outcome(step, view, now, &self.settings.pace, || {
            Ca::generate(&self.settings.keys.instance, self.settings.pace.ca_validity, now)
        });
        let wanted = match made {
            Ok(Some(wanted)) => wanted,
            Ok(None) => return CLOCK,
            Err(error) => {
                tracing::error!("no CA could be made: {error}");
                return CLOCK;
            }
        };
        if step.may_recur() || self.log_once.is_failing() {
            self.backoff.done(Instant::now());
        }
        let version = version.to_owned();
        let answer = self.write(object.cloned(), &wanted).await;
        self.conclude(step, &wanted, version, answer)
    }

    /// Others follow this state from now on.
    fn follow(&self, state: State) {
        self.metrics.certificate_expiry(Role::Ca, state.current.certificate.not_after.as_second());
        self.state.send_if_modified(|old| {
            let same = old.as_ref().is_some_and(|old| old.data() == state.data());
            if !same {
                *old = Some(Arc::new(state));
            }
            !same
        });
    }

    async fn write(&self, object: Option<Arc<SecretObject>>, wanted: &State) -> Result<(), Failure> {
        let (keys, namespace) = (&self.settings.keys, &self.settings.namespace);
        let collection = Request::new(format!("/api/v1/namespaces/{namespace}/secrets"));
        let manager = Some(keys.instance.clone());
        let request = match object {
            None => {
                let body = body(&keys.instance, namespace, wanted).to_string().into_bytes();
                collection.create(&PostParams { field_manager: manager, ..PostParams::default() }, body)
            }
            Some(object) => {
                let patch: Patch<()> = Patch::Json(operations(&object, wanted));
                let params = PatchParams { field_manager: manager, ..PatchParams::default() };
                collection.patch(&keys.instance, &params, &patch)
            }
        };
        let request = request.map_err(|error| Failure::Unavailable(error.to_string()))?;
        with_timeout(PATIENCE, self.client.request::<serde::de::IgnoredAny>(request)).await.map(drop)
    }

    /// Tells what came of a step, and returns how long to sleep.
    fn conclude(
        &mut self,
        step: Step,
        wanted: &State,
        version: String,
        answer: Result<(), Failure>,
    ) -> Duration {
        let place = format!("{}/{}", self.settings.namespace, self.settings.keys.instance);
        match answer {
            Ok(()) => {
                self.log_once.resolved();
                self.report(step, wanted, &place);
            }
            // Another replica was first: the watch will show what it did.
            Err(Failure::AlreadyExists | Failure::Conflict) => self.log_once.resolved(),
            // It went meanwhile: the watch will show that, too.
            Err(Failure::NotFound) if !version.is_empty() => self.log_once.resolved(),
            Err(failure) => {
                let text = explain(&place, &failure);
                // The first failure of a step that was not counted when it was taken.
                if !self.log_once.is_failing() && !step.may_recur() {
                    self.backoff.done(Instant::now());
                }
                if self.log_once.is_new(&text) {
                    tracing::warn!("{text}; retrying");
                }
                return self.backoff.wait(Instant::now());
            }
        }
        self.written = Some((version, Instant::now()));
        ECHO
    }

    fn report(&self, step: Step, wanted: &State, secret: &str) {
        if matches!(step, Step::Replace(_) | Step::Promote) {
            self.metrics.certificate_rotated(Role::Ca);
        }
        let (step_name, ca) = (step.as_str(), &wanted.current.certificate);
        match step {
            Step::Restore(why) => {
                tracing::warn!(secret, ca = ca.subject, "the CA could not be used ({why}): it is put back");
            }
            Step::Replace(why) => tracing::warn!(
                secret,
                ca = ca.subject,
                expires = %ca.not_after,
                "the CA could not be used ({why}): it is replaced by a new one"
            ),
            Step::Mend => tracing::warn!(secret, "the CA Secret held what cannot be read: it is put right"),
            Step::Keep => tracing::warn!(
                secret,
                "somebody put another CA there: it is published, then used; ours is trusted until then"
            ),
            _ => tracing::info!(
                secret,
                step = step_name,
                ca = ca.subject,
                next = wanted.next.as_ref().map(|next| &*next.ca.certificate.subject),
                "the CA Secret is one step on"
            ),
        }
    }
}

fn body(name: &str, namespace: &str, wanted: &State) -> Value {
    let data: BTreeMap<&str, ByteString> =
        wanted.data().into_iter().filter_map(|(key, value)| Some((key, value?))).collect();
    json!({
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"namespace": namespace, "name": name, "labels": {"app.kubernetes.io/name": "lockstep"}},
        "type": "Opaque",
        "data": data,
    })
}

/// Sets our part of the data, good for this version only (409 for any other). What others put there stays.
fn operations(object: &SecretObject, wanted: &State) -> Operations {
    let mut ops = vec![patch::only_if_version(&object.metadata.resource_version)];
    if object.data.is_none() {
        ops.push(patch::add(&["data"], json!({})));
    }
    for (key, value) in wanted.data() {
        let there = object.data.as_ref().and_then(|data| data.get(key));
        match value {
            Some(value) if there == Some(&value) => {}
            Some(value) => ops.push(patch::add(&["data", key], json!(value))),
            None if there.is_some() => ops.push(patch::remove(&["data", key])),
            None => {}
        }
    }
    Operations(ops)
}

/// What is wrong, and what to do about it.
fn explain(place: &str, failure: &Failure) -> String {
    match failure {
        Failure::Forbidden(detail) => {
            format!(
                "the CA Secret {place} may not be written ({detail}): apply the RBAC of deploy/ for this identity"
            )
        }
        Failure::NotFound => {
            format!(
                "the CA Secret {place} cannot be made, for its namespace is missing: apply deploy/, or choose another --namespace"
            )
        }
        Failure::Invalid(detail) => {
            format!(
                "the CA Secret {place} cannot be changed ({detail}): if it is immutable, delete it, and it is made again"
            )
        }
        other => format!("the CA Secret {place} could not be written: {other}"),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::{
        certs::phase::Pace,
        testing::api::{api_server, refusal},
    };

    fn state() -> State {
        State::new(Arc::new(Ca::generate("x", Duration::from_hours(1), Timestamp::now()).unwrap()))
    }

    fn object(data: Value) -> SecretObject {
        serde_json::from_value(json!({"metadata": {"name": "x", "resourceVersion": "7"}, "data": data}))
            .unwrap()
    }

    fn paths(operations: &Operations) -> Vec<(String, String)> {
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let all = json!(operations);
        all.as_array().unwrap().iter().map(|op| (text(&op["op"]), text(&op["path"]))).collect()
    }

    #[test]
    fn a_write_is_good_for_one_version_and_leaves_what_is_not_ours() {
        let state = state();
        let mut data = json!(body("x", "home", &state)["data"]);
        data["notes"] = json!("bWluZQ==");
        data["old.crt"] = json!("bm9uc2Vuc2U=");
        data["ca.key"] = json!("bm9uc2Vuc2U=");
        let operations = operations(&object(data), &state);
        let expected =
            [("replace", "/metadata/resourceVersion"), ("add", "/data/ca.key"), ("remove", "/data/old.crt")]
                .map(|(op, path)| (op.to_owned(), path.to_owned()));
        assert_eq!(paths(&operations), expected);
        assert_eq!(json!(operations)[0]["value"], "7");
    }

    /// An authority whose calls are answered with this code, the Secret it sees, and what it has written so far.
    fn authority(code: u16) -> (Authority, channel::Sender<Sight<SecretObject>>, Arc<AtomicUsize>) {
        let ((see, sight), writes) = (channel::channel(Sight::Unknown), Arc::<AtomicUsize>::default());
        let count = writes.clone();
        let client = api_server(move |_| {
            count.fetch_add(1, Ordering::SeqCst);
            async move { if code == 200 { (code, json!({})) } else { refusal(code, "") } }
        });
        let settings = Settings {
            keys: crate::testing::keys(),
            namespace: "home".to_owned(),
            pace: Pace { ca_validity: Duration::from_hours(1), leaf_validity: Duration::from_mins(9) },
            files: None,
        };
        let authority = Authority {
            client,
            settings: Arc::new(settings),
            sight,
            published: channel::channel(Published::Held(BTreeMap::new())).1,
            serving: channel::channel(None).1,
            state: channel::channel(None).0,
            metrics: Metrics::new(),
            written: None,
            backoff: Backoff::default(),
            log_once: LogOnce::default(),
        };
        (authority, see, writes)
    }

    fn seen(state: &State, version: u64) -> Sight<SecretObject> {
        let mut object = object(body("x", "home", state)["data"].clone());
        object.metadata.resource_version = version.to_string();
        Sight::There(Arc::new(object))
    }

    /// Some replicas see the next CA published, this one does not: they would contradict each other without end.
    #[tokio::test]
    async fn who_doubts_again_and_again_does_so_ever_later() {
        let (mut authority, see, writes) = authority(200);
        let noted = state().prepared(state().current).noted(Some(Timestamp::now()));
        see.send_replace(seen(&noted, 1));
        assert_eq!(authority.look().await, ECHO);
        see.send_replace(seen(&noted, 3));
        assert!(authority.look().await < ECHO);
        assert_eq!(writes.load(Ordering::SeqCst), 1);
    }

    #[tokio::test]
    async fn a_failure_counts_once_and_is_over_when_another_replica_was_first() {
        let first = Duration::from_millis(100);
        let (mut failing, see, writes) = authority(500);
        see.send_replace(Sight::Absent);
        let wait = failing.look().await;
        assert!(
            wait <= first && failing.log_once.is_failing() && writes.load(Ordering::SeqCst) == 1,
            "{wait:?}"
        );
        let (late, ..) = authority(409);
        failing.client = late.client;
        tokio::time::sleep(wait).await;
        failing.look().await;
        assert!(!failing.log_once.is_failing());
    }

    #[test]
    fn a_secret_without_data_gets_some() {
        let operations = operations(&object(Value::Null), &state());
        let paths: Vec<String> = paths(&operations).into_iter().map(|(_, path)| path).collect();
        assert_eq!(paths, ["/metadata/resourceVersion", "/data", "/data/ca.crt", "/data/ca.key"]);
    }

    #[test]
    fn a_new_secret_says_whose_it_is() {
        let body = body("lockstep.workshop.io", "home", &state());
        assert_eq!(body["metadata"]["labels"]["app.kubernetes.io/name"], "lockstep");
        assert_eq!((&body["type"], &body["metadata"]["namespace"]), (&json!("Opaque"), &json!("home")));
        assert_eq!(body["data"].as_object().unwrap().keys().collect::<Vec<_>>(), ["ca.crt", "ca.key"]);
    }
}
