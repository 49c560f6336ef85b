//! Puts what is to be trusted into the webhook configurations, and tells what they hold.

use std::{
    collections::BTreeSet,
    sync::Arc,
    time::{Duration, Instant},
};

use k8s_openapi::jiff::Timestamp;
use kube::{
    Client,
    api::{Patch, PatchParams},
    core::Request,
};
use tokio::sync::watch as channel;

use super::{
    CLOCK, ECHO, PATIENCE, Settings,
    backoff::Backoff,
    hooks::{HookKind, Hooks, Need, held, names},
    issue::Names,
    phase::Published,
    sight::Sight,
    state::State,
};
use crate::{
    client::{Failure, with_timeout},
    ops::{
        health::{Condition, Readiness},
        log::LogOnce,
        metrics::Metrics,
    },
};

/// One of the two configurations, and what we did about it.
pub(super) struct Side {
    kind: HookKind,
    sight: channel::Receiver<Sight<Hooks>>,
    /// The bundle we wrote last, upon which version, and when.
    written: Option<(String, String, Instant)>,
    /// Grows while somebody undoes what we write.
    backoff: Backoff,
    /// Since when it has held more than it should.
    surplus: Option<Instant>,
    warned: bool,
    log_once: LogOnce,
}

impl Side {
    pub(super) fn new(kind: HookKind, sight: channel::Receiver<Sight<Hooks>>) -> Self {
        Self {
            kind,
            sight,
            written: None,
            backoff: Backoff::default(),
            surplus: None,
            warned: false,
            log_once: LogOnce::default(),
        }
    }
}

pub(super) struct Publisher {
    pub(super) client: Client,
    pub(super) settings: Arc<Settings>,
    pub(super) state: channel::Receiver<Option<Arc<State>>>,
    pub(super) published: channel::Sender<Published>,
    pub(super) names: channel::Sender<Names>,
    pub(super) metrics: Metrics,
    pub(super) readiness: Readiness,
    pub(super) sides: [Side; 2],
}

impl Publisher {
    /// Keeps both configurations right, for ever.
    pub(super) async fn run(mut self) {
        loop {
            let wait = self.look().await;
            let [one, other] = &mut self.sides;
            tokio::select! {
                _ = self.state.changed() => {}
                _ = one.sight.changed() => {}
                _ = other.sight.changed() => {}
                () = tokio::time::sleep(wait) => {}
            }
        }
    }

    /// Tells what is published, writes what is due, and returns how long to sleep.
    async fn look(&mut self) -> Duration {
        let state = self.state.borrow_and_update().clone();
        let seen = self.sides.each_mut().map(|side| side.sight.borrow_and_update().clone());
        self.tell(&seen, state.as_deref());
        let mut wait = CLOCK;
        for (side, seen) in self.sides.iter_mut().zip(seen) {
            side.mind_absence(&seen, &self.settings);
            if let (Some(hooks), Some(state)) = (seen.get(), &state) {
                let due = side.due(hooks, state, self.settings.pace.linger(), Instant::now());
                let again = match due {
                    Some(Duration::ZERO) => {
                        side.write(&self.client, &self.settings, hooks, state, &self.metrics).await
                    }
                    Some(later) => later,
                    None => CLOCK,
                };
                wait = wait.min(again);
            }
        }
        wait
    }

    fn tell(&self, seen: &[Sight<Hooks>; 2], state: Option<&State>) {
        if seen.iter().any(|sight| matches!(sight, Sight::Unknown)) {
            return;
        }
        let hooks = || seen.iter().filter_map(Sight::get).map(AsRef::as_ref);
        let now = Timestamp::now();
        self.published.send_if_modified(|old| replace(old, since(old, held(hooks()), now)));
        self.names.send_if_modified(|old| replace(old, names(hooks(), &self.settings.namespace)));
        let everywhere = hooks().count() == seen.len();
        let current = state.map(|state| &state.current.certificate);
        if everywhere && current.and_then(|current| self.published.borrow().holds(current)) == Some(true) {
            self.readiness.mark_true(Condition::Bundle);
        }
    }
}

/// What is held now, each since it was first seen without a break.
fn since(old: &Published, held: Option<BTreeSet<Vec<u8>>>, now: Timestamp) -> Published {
    let Some(held) = held else { return Published::Nowhere };
    let before = |der: &Vec<u8>| match old {
        Published::Held(old) => old.get(der).copied(),
        _ => None,
    };
    // An instant that lies ahead was told by a clock that has been put back.
    let at = |der: &Vec<u8>| before(der).map_or(now, |at| at.min(now));
    Published::Held(held.into_iter().map(|der| (der.clone(), at(&der))).collect())
}

fn replace<T: PartialEq>(old: &mut T, new: T) -> bool {
    let changed = *old != new;
    *old = new;
    changed
}

impl Side {
    fn mind_absence(&mut self, seen: &Sight<Hooks>, settings: &Settings) {
        match seen {
            Sight::Unknown => {}
            Sight::There(_) => self.warned = false,
            Sight::Absent if self.warned => {}
            Sight::Absent => {
                self.warned = true;
                tracing::warn!(
                    "there is no {} {}, so the guard is not asked: lockstep manifests | kubectl apply -f -",
                    self.kind.as_str(),
                    settings.keys.instance
                );
            }
        }
    }

    /// In what time to write, if at all.
    fn due(&mut self, hooks: &Hooks, state: &State, linger: Duration, now: Instant) -> Option<Duration> {
        let need = hooks.need(state);
        if need != Need::Surplus {
            self.surplus = None;
        }
        let wait = match need {
            Need::Nothing => return None,
            Need::Lack => Duration::ZERO,
            // The Secret may hold a next CA that our watch has not brought yet, and another replica's has.
            Need::Surplus => {
                let since = *self.surplus.get_or_insert(now);
                linger.saturating_sub(now.saturating_duration_since(since))
            }
        };
        let again = match &self.written {
            Some((bundle, version, at)) if *bundle == state.bundle() => {
                let echo = if *version == hooks.metadata.resource_version { ECHO } else { Duration::ZERO };
                echo.saturating_sub(now.saturating_duration_since(*at)).max(self.backoff.wait(now))
            }
            _ => Duration::ZERO,
        };
        Some(wait.max(again))
    }

    /// Writes the bundle, and returns how long to sleep.
    async fn write(
        &mut self,
        client: &Client,
        settings: &Settings,
        hooks: &Hooks,
        state: &State,
        metrics: &Metrics,
    ) -> Duration {
        let bundle = state.bundle();
        if self.written.as_ref().is_none_or(|(written, ..)| *written != bundle) {
            self.backoff = Backoff::default();
        }
        self.backoff.done(Instant::now());
        let instance = &settings.keys.instance;
        let patch: Patch<()> = Patch::Json(hooks.patch(state));
        let params = PatchParams { field_manager: Some(instance.clone()), ..PatchParams::default() };
        let request = Request::new(self.kind.path()).patch(instance, &params, &patch);
        let answer = match request {
            Ok(request) => {
                with_timeout(PATIENCE, client.request::<serde::de::IgnoredAny>(request)).await.map(drop)
            }
            Err(error) => Err(Failure::Unavailable(error.to_string())),
        };
        self.written = Some((bundle, hooks.metadata.resource_version.clone(), Instant::now()));
        match answer {
            Ok(()) => {
                self.log_once.resolved();
                metrics.bundle_writes.inc();
                tracing::info!(
                    kind = self.kind.as_str(),
                    name = instance,
                    cas = state.trusted().len(),
                    "the CA bundle is written"
                );
                ECHO
            }
            // It changed or went meanwhile: the watch will show how.
            Err(Failure::Conflict | Failure::NotFound) => ECHO,
            Err(failure) => {
                let text = explain(self.kind, instance, &failure);
                if self.log_once.is_new(&text) {
                    tracing::warn!("{text}; retrying");
                }
                // Nothing was written, so there is nothing for the watch to show.
                self.written = self.written.take().map(|(bundle, _, at)| (bundle, String::new(), at));
                self.backoff.wait(Instant::now())
            }
        }
    }
}

/// What is wrong, and what to do about it.
fn explain(kind: HookKind, name: &str, failure: &Failure) -> String {
    let kind = kind.as_str();
    match failure {
        Failure::Forbidden(detail) => {
            format!(
                "the CA bundle of the {kind} {name} may not be written ({detail}): apply the RBAC of deploy/ for this identity"
            )
        }
        other => format!("the CA bundle of the {kind} {name} could not be written: {other}"),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::certs::issue::Ca;

    const LINGER: Duration = Duration::from_secs(2);

    fn state() -> State {
        State::new(Arc::new(Ca::generate("x", Duration::from_hours(1), Timestamp::now()).unwrap()))
    }

    fn hooks(version: &str, bundle: &str) -> Hooks {
        let bundle = k8s_openapi::ByteString(bundle.as_bytes().to_vec());
        serde_json::from_value(json!({
            "metadata": {"name": "x", "resourceVersion": version},
            "webhooks": [{"name": "a", "clientConfig": {"caBundle": bundle}}],
        }))
        .unwrap()
    }

    fn side() -> Side {
        Side::new(HookKind::Validating, channel::channel(Sight::Unknown).1)
    }

    #[test]
    fn what_lacks_is_written_at_once_and_what_is_too_much_after_a_while() {
        let (state, other, now) = (state(), state(), Instant::now());
        let both = format!("{}{}", state.bundle(), other.bundle());
        let mut side = side();
        let due = |side: &mut Side, bundle: &str, after| {
            side.due(&hooks("1", bundle), &state, LINGER, now + Duration::from_millis(after))
        };
        assert_eq!(due(&mut side, "", 0), Some(Duration::ZERO));
        assert_eq!(due(&mut side, &both, 0), Some(LINGER));
        assert_eq!(due(&mut side, &both, 1500), Some(Duration::from_millis(500)));
        assert_eq!(due(&mut side, &state.bundle(), 1600), None);
        assert_eq!(due(&mut side, &both, 1700), Some(LINGER), "it was right in between");
        assert_eq!(due(&mut side, &both, 3700), Some(Duration::ZERO));
    }

    #[test]
    fn who_undoes_it_again_and_again_is_answered_ever_later() {
        let (state, now) = (state(), Instant::now());
        let mut side = side();
        let (mut waits, mut clock) = (Vec::new(), now);
        for version in 0..6 {
            let wait = side.due(&hooks(&version.to_string(), ""), &state, LINGER, clock).unwrap();
            waits.push(wait.as_millis());
            clock += wait;
            side.backoff.done(clock);
            side.written = Some((state.bundle(), version.to_string(), clock));
        }
        assert_eq!(waits, [0, 100, 200, 400, 800, 1600]);
        // Until the watch shows what came of it, the same version is not written upon again.
        assert_eq!(side.due(&hooks("5", ""), &state, LINGER, clock), Some(ECHO));
        // Another bundle is another matter.
        assert_eq!(side.due(&hooks("5", ""), &self::state(), LINGER, clock), Some(Duration::ZERO));
    }

    #[test]
    fn what_is_held_is_held_since_it_was_first_seen_without_a_break() {
        let at = |second| Timestamp::from_second(second).unwrap();
        let set = |ders: &[u8]| Some(ders.iter().map(|der| vec![*der]).collect::<BTreeSet<_>>());
        let held =
            |all: &[(u8, i64)]| Published::Held(all.iter().map(|(der, s)| (vec![*der], at(*s))).collect());
        let first = since(&Published::Unknown, set(&[1]), at(10));
        assert_eq!(first, held(&[(1, 10)]));
        let second = since(&first, set(&[1, 2]), at(20));
        assert_eq!(second, held(&[(1, 10), (2, 20)]));
        let third = since(&second, set(&[2]), at(30));
        assert_eq!(since(&third, set(&[1, 2]), at(40)), held(&[(1, 40), (2, 20)]));
        assert_eq!(since(&third, set(&[2]), at(15)), held(&[(2, 15)]), "the clock was put back");
        assert_eq!(since(&third, None, at(40)), Published::Nowhere);
    }
}
