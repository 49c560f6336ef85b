use k8s_openapi::ByteString;
use proptest::prelude::*;

use super::*;
use crate::certs::{
    issue::{Leaf, Names},
    leaf::{Renewal, renewal},
    state::Data,
};

const SECONDS: Pace = Pace { ca_validity: Duration::from_secs(24), leaf_validity: Duration::from_secs(6) };
const DAY: u64 = 24 * 3600;
const DAYS: Pace =
    Pace { ca_validity: Duration::from_secs(365 * DAY), leaf_validity: Duration::from_secs(7 * DAY) };

/// Milliseconds since the test began.
fn at(ms: i64) -> Timestamp {
    Timestamp::from_millisecond(1_800_000_000_000 + ms).unwrap()
}

fn ca_at(now: Timestamp, pace: &Pace) -> Ca {
    Ca::generate("lockstep.workshop.io", pace.ca_validity, now).unwrap()
}

fn ca() -> Arc<Ca> {
    Arc::new(ca_at(at(0), &SECONDS))
}

fn stored(state: &State) -> Data {
    state.data().into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?))).collect()
}

fn held(certificates: &[&Certificate], since: Timestamp) -> Published {
    Published::Held(certificates.iter().map(|one| (one.der().to_vec(), since)).collect())
}

/// Everything that a step depends on, in one place.
struct Case {
    data: Option<Data>,
    memory: Option<State>,
    published: Published,
    serving: Option<Certificate>,
    pace: Pace,
}

impl Case {
    fn of(state: &State) -> Self {
        Self {
            data: Some(stored(state)),
            memory: None,
            published: Published::Unknown,
            serving: None,
            pace: SECONDS,
        }
    }

    fn published(mut self, published: Published) -> Self {
        self.published = published;
        self
    }

    fn remembering(mut self, state: &State) -> Self {
        self.memory = Some(state.clone());
        self
    }

    fn with(mut self, key: &str, value: &str) -> Self {
        self.data.get_or_insert_default().insert(key.to_owned(), ByteString(value.as_bytes().to_vec()));
        self
    }

    fn without(mut self, key: &str) -> Self {
        self.data.get_or_insert_default().remove(key);
        self
    }

    fn step(&self, now: i64) -> Step {
        self.decide(now).0
    }

    fn decide(&self, now: i64) -> (Step, Option<State>) {
        let reading = self.data.as_ref().map(Reading::of);
        let view = View {
            secret: reading.as_ref(),
            memory: self.memory.as_ref(),
            published: &self.published,
            serving: self.serving.as_ref(),
        };
        let now = at(now);
        let step = next_step(view, now, &self.pace);
        let state = outcome(step, view, now, &self.pace, || Ok(ca_at(now, &self.pace))).unwrap();
        (step, state)
    }

    /// What the Secret holds after the step.
    fn after(&self, now: i64) -> State {
        self.decide(now).1.expect("a step")
    }
}

fn same(one: &State, other: &State) -> bool {
    one.data() == other.data()
}

#[test]
fn the_time_to_spread_follows_the_validity_within_bounds() {
    assert_eq!(SECONDS.spread(), Duration::from_secs(2));
    assert_eq!(DAYS.spread(), Duration::from_mins(1));
    let short = Pace { ca_validity: Duration::from_secs(3), ..SECONDS };
    assert_eq!(short.spread(), Duration::from_secs(1));
}

// ---------------------------------------------------------------- every phase, resumed from the Secret alone

#[test]
fn a_stable_ca_is_left_alone_for_two_thirds_of_its_life() {
    let case = Case::of(&State::new(ca()));
    assert_eq!(case.step(0), Step::Rest(at(16_000)));
    assert_eq!(case.step(15_999), Step::Rest(at(16_000)));
    assert_eq!(case.step(16_000), Step::Prepare);
    let ca = Arc::new(ca_at(at(0), &DAYS));
    let case = Case { pace: DAYS, ..Case::of(&State::new(ca.clone())) };
    let due = ca.certificate.due().as_millisecond() - at(0).as_millisecond();
    assert_eq!(due, 365 * 24 * 3_600_000 * 2 / 3);
    assert_eq!(case.step(due - 1), Step::Rest(ca.certificate.due()));
    assert_eq!(case.step(due), Step::Prepare);
}

#[test]
fn the_next_ca_is_written_beside_the_current_one_and_both_are_published() {
    let state = State::new(ca());
    let after = Case::of(&state).after(16_000);
    assert_eq!(after.current.certificate, state.current.certificate);
    let next = after.next.as_ref().expect("a next CA");
    assert_eq!(next.published, None);
    assert_eq!(after.trusted(), [&after.current.certificate, &next.ca.certificate]);
    assert_eq!(Certificate::parse_all(after.bundle().as_bytes()).unwrap().len(), 2);
}

#[test]
fn a_next_ca_is_noted_only_when_it_has_been_read_back() {
    let state = State::new(ca()).prepared(ca());
    let next = &state.next.as_ref().unwrap().ca.certificate;
    let current = &state.current.certificate;
    let end = Step::Rest(current.not_after);
    assert_eq!(Case::of(&state).step(17_000), end, "nothing seen yet");
    assert_eq!(Case::of(&state).published(held(&[current], at(0))).step(17_000), end, "not there yet");
    let case = Case::of(&state).published(held(&[current, next], at(17_000)));
    assert_eq!(case.step(17_000), Step::Note);
    assert_eq!(case.after(17_000).next.unwrap().published, Some(at(17_000)));
    // Nobody asks us: there is nothing to wait for but the time.
    assert_eq!(Case::of(&state).published(Published::Nowhere).step(17_000), Step::Note);
}

#[test]
fn a_noted_ca_has_time_to_spread_before_it_is_promoted() {
    let state = State::new(ca()).prepared(ca()).noted(Some(at(17_000)));
    let next = state.next.as_ref().unwrap().ca.certificate.clone();
    let case = Case::of(&state).published(held(&[&next], at(18_500)));
    assert_eq!(case.step(17_000), Step::Rest(at(19_000)));
    assert_eq!(case.step(18_999), Step::Rest(at(19_000)));
    assert_eq!(case.step(19_000), Step::Promote);
    // A replica that has not seen the configurations yet does not know.
    assert_eq!(Case::of(&state).step(19_000), Step::Rest(state.current.certificate.not_after));

    let after = case.after(19_000);
    assert_eq!(after.current.certificate, next);
    assert!(after.next.is_none());
    assert_eq!((&after.old[..], after.since), (&[state.current.certificate.clone()][..], Some(at(19_000))));
    let former = state.current.key_pem();
    assert!(stored(&after).values().all(|value| value.0 != former.as_bytes()), "the former key is forgotten");
    assert_eq!(after.bundle(), state.bundle(), "a promotion alone writes no bundle");
}

#[test]
fn a_noted_ca_that_is_published_no_more_starts_over() {
    let state = State::new(ca()).prepared(ca()).noted(Some(at(17_000)));
    let case = Case::of(&state).published(held(&[&state.current.certificate], at(0)));
    assert_eq!(case.step(30_000 - 7_000), Step::Doubt);
    assert_eq!(case.after(23_000).next.unwrap().published, None);
}

#[test]
fn an_old_ca_is_trusted_until_no_leaf_of_it_can_be_alive() {
    let young = Arc::new(ca_at(at(17_000), &SECONDS));
    let state = State::new(ca()).prepared(young).promoted(at(15_000));
    let case = Case::of(&state);
    assert_eq!(case.step(15_000), Step::Rest(at(23_000)));
    assert_eq!(case.step(22_999), Step::Rest(at(23_000)));
    assert_eq!(case.step(23_000), Step::Retire);
    let after = case.after(23_000);
    assert!(after.old.is_empty() && after.since.is_none());
    assert_eq!(after.trusted(), [&state.current.certificate]);
    // Or until it has expired itself.
    let late = Case::of(&State { since: Some(at(20_000)), ..state.clone() });
    assert_eq!(late.step(23_999), Step::Rest(at(24_000)));
    assert_eq!(late.step(24_000), Step::Retire);
    assert!(late.after(24_000).old.is_empty());
}

// ---------------------------------------------------------------- what goes wrong

#[test]
fn a_secret_that_is_gone_is_made_again_as_it_was_or_anew() {
    let none = || Case { data: None, ..Case::of(&State::new(ca())) };
    let state = State::new(ca()).prepared(ca()).noted(Some(at(17_000)));
    let case = none().remembering(&state);
    assert_eq!(case.step(18_000), Step::Create);
    assert!(same(&case.after(18_000), &state));
    let late = case.after(25_000);
    assert!(late.current.certificate != state.current.certificate, "what we remember has expired");
    assert!(none().after(0).old.is_empty());
    // What we serve with is trusted on.
    let serving = State::new(ca()).current.certificate.clone();
    let case = Case { serving: Some(serving.clone()), ..none() };
    assert_eq!(case.after(10_000).old, [serving]);
}

#[test]
fn a_ca_that_cannot_be_used_is_put_back_or_replaced() {
    let state = State::new(ca());
    let other = ca();
    let good = || Case::of(&state);
    for (case, why) in [
        (good().without("ca.crt"), Unusable::Missing),
        (good().without("ca.key"), Unusable::Missing),
        (good().with("ca.crt", "nonsense"), Unusable::Certificate),
        (good().with("ca.key", "nonsense"), Unusable::Key),
        (good().with("ca.key", &other.key_pem()), Unusable::Mismatch),
        (Case { data: Some(Data::new()), ..good() }, Unusable::Missing),
    ] {
        assert_eq!(case.step(1_000), Step::Replace(why));
        let replaced = case.after(1_000);
        assert!(replaced.current.certificate != state.current.certificate);
        // There may be leaves of it, as long as one can tell whose.
        let known = case.data.as_ref().unwrap().get("ca.crt").is_some_and(|pem| pem.0 != b"nonsense");
        assert_eq!(replaced.old.len(), usize::from(known), "{why:?}");
        let case = case.remembering(&state);
        assert_eq!(case.step(1_000), Step::Restore(why));
        assert!(same(&case.after(1_000), &state));
        assert_eq!(case.step(24_000), Step::Replace(why), "what we remember has expired");
    }
}

#[test]
fn an_expired_ca_is_replaced_and_one_from_the_future_too() {
    let state = State::new(ca());
    let case = Case::of(&state).remembering(&state);
    assert_eq!(case.step(24_000), Step::Replace(Unusable::Expired));
    assert!(case.after(24_000).old.is_empty(), "nothing of it can be alive");
    assert_eq!(case.step(-301_000), Step::Replace(Unusable::NotYet));
    // It is our clock that is wrong, and the others serve with it.
    assert_eq!(case.after(-301_000).old, std::slice::from_ref(&state.current.certificate));
    let serving = Some(state.current.certificate.clone());
    assert_eq!(
        Case { serving, ..Case::of(&State::new(Arc::new(ca_at(at(-310_000), &DAYS)))) }.step(-301_000),
        Step::Keep
    );
    let next = state.prepared(Arc::new(ca_at(at(310_000), &SECONDS)));
    assert!(matches!(Case::of(&next).step(0), Step::Rest(_)), "the next one as well");
    assert!(matches!(case.step(-299_000), Step::Rest(_)), "within what clocks may differ");
}

#[test]
fn when_the_current_ca_ends_the_next_one_takes_over_seen_or_not() {
    let next = Arc::new(ca_at(at(16_000), &SECONDS));
    let state = State::new(ca()).prepared(next.clone());
    let case = Case::of(&state);
    assert!(matches!(case.step(23_999), Step::Rest(_)));
    assert_eq!(case.step(24_000), Step::Promote);
    let after = case.after(24_000);
    assert_eq!(after.current.certificate, next.certificate);
    assert!(after.old.is_empty());
    // Both have ended while nobody looked.
    assert_eq!(case.step(40_000), Step::Replace(Unusable::Expired));
}

#[test]
fn whatever_else_is_broken_is_mended_and_the_current_ca_stays() {
    let (next, old) = (ca(), ca());
    let stable = State::new(ca());
    let mut rich =
        stable.prepared(next.clone()).noted(Some(at(9_000))).kept(old.certificate.clone(), at(8_000));
    for (key, value) in [
        ("next.crt", "nonsense"),
        ("next.key", "nonsense"),
        ("next.key", &*old.key_pem()),
        ("next.published", "soon"),
        ("old.crt", "nonsense"),
        ("old.crt", ""),
        ("old.since", "yesterday"),
    ] {
        for state in [&stable, &rich] {
            let case = Case::of(state).with(key, value);
            assert_eq!(case.step(10_000), Step::Mend, "{key}: {value}");
            let mended = case.after(10_000);
            assert_eq!(mended.current.certificate, stable.current.certificate);
            assert!(!Reading::of(&stored(&mended)).flawed);
            assert!(same(&case.remembering(state).after(10_000), state), "memory knows it all");
        }
    }
    for key in ["next.crt", "next.key", "old.crt", "old.since"] {
        assert_eq!(Case::of(&rich).without(key).step(10_000), Step::Mend, "{key}");
    }
    // Without the instant, an old CA is trusted for a whole time more, rather than not.
    assert_eq!(Case::of(&rich).without("old.since").after(10_000).since, Some(at(10_000)));
    // Without its instant, a next CA is merely not noted yet.
    assert!(matches!(Case::of(&rich).without("next.published").step(10_000), Step::Rest(_)));
    // A next CA that has expired is none.
    let expired = Arc::new(ca_at(at(-20_000), &SECONDS));
    rich.next.as_mut().unwrap().ca = expired;
    assert_eq!(Case::of(&rich).step(10_000), Step::Mend);
    assert!(Case::of(&rich).after(10_000).next.is_none());
    // What is not ours is not looked at.
    assert!(matches!(Case::of(&stable).with("notes", "nonsense").step(0), Step::Rest(_)));
}

#[test]
fn somebody_elses_ca_is_taken_and_the_one_we_serve_with_is_kept() {
    let (ours, theirs) = (State::new(ca()), State::new(ca()));
    let mut case = Case::of(&theirs);
    assert!(matches!(case.step(1_000), Step::Rest(_)), "we know of nothing to keep");
    case.serving = Some(ours.current.certificate.clone());
    assert_eq!(case.step(1_000), Step::Keep);
    assert!(Step::Keep.comes_first(), "or it would be published without ours");
    let kept = case.after(1_000);
    assert_eq!(kept.current.certificate, theirs.current.certificate);
    assert_eq!(kept.old, std::slice::from_ref(&ours.current.certificate));
    let settled = Case { serving: case.serving, ..Case::of(&kept) };
    assert!(matches!(settled.step(1_000), Step::Rest(_)), "once is enough");
    // Other replicas may serve what is trusted besides.
    let rich = ours.prepared(ca()).kept(ca().certificate.clone(), at(0));
    let case = Case::of(&theirs).remembering(&rich);
    assert_eq!(case.step(1_000), Step::Keep);
    assert_eq!(case.after(1_000).old.len(), 3);
    // A backup from before the promotion: ours is in it, as the next.
    let before = theirs.prepared(ours.current);
    assert!(!Case { serving: settled.serving, ..Case::of(&before) }.step(1_000).comes_first());
}

#[test]
fn a_clock_that_was_ahead_holds_nothing_up() {
    let state = State::new(ca()).prepared(ca()).noted(Some(at(3_600_000)));
    let next = state.next.as_ref().unwrap().ca.certificate.clone();
    let case = Case::of(&state).published(held(&[&next], at(17_000)));
    assert_eq!(case.step(17_000), Step::Note);
    assert_eq!(case.after(17_000).next.unwrap().published, Some(at(17_000)));
    // Clocks differ by a little, always.
    let near = Case { data: Some(stored(&state.noted(Some(at(17_500))))), ..case };
    assert_eq!(near.step(17_000), Step::Rest(at(19_500)));

    let state = State::new(ca()).kept(ca().certificate.clone(), at(0));
    let case = Case::of(&State { since: Some(at(3_600_000)), ..state });
    assert_eq!(case.step(1_000), Step::Retire);
    let after = case.after(1_000);
    assert_eq!((after.old.len(), after.since), (1, Some(at(1_000))), "trusted on, for its time");
}

#[test]
fn old_cas_do_not_pile_up() {
    let mut state = State::new(ca());
    for _ in 0..20 {
        state = state.kept(ca().certificate.clone(), at(0));
    }
    let latest = ca().certificate.clone();
    let state = state.kept(latest.clone(), at(0)).kept(latest.clone(), at(1));
    assert_eq!((state.old.len(), state.old.last(), state.since), (8, Some(&latest), Some(at(0))));
}

#[test]
fn no_key_shows() {
    let state = State::new(ca()).prepared(ca());
    let shown = format!("{state:?} {:?}", Reading::of(&stored(&state)));
    assert!(
        shown.contains("CN=lockstep") && !shown.contains("PRIVATE") && !shown.contains("BEGIN"),
        "{shown}"
    );
}

// ---------------------------------------------------------------- the leaf

#[test]
fn a_leaf_is_renewed_in_time_or_when_it_lacks_a_name() {
    let state = State::new(ca());
    let names = |all: &[&str]| all.iter().map(|name| (*name).to_owned()).collect::<Names>();
    let leaf = state.current.issue(&names(&["a", "b"]), SECONDS.leaf_validity, at(0)).unwrap();
    let look = |leaf: Option<&Leaf>, wanted: &[&str], now| {
        renewal(leaf, &state, &Published::Unknown, &names(wanted), at(now), &SECONDS)
    };
    assert_eq!(look(None, &["a"], 0), Ok(Renewal::First));
    assert_eq!(look(Some(&leaf), &["a", "b"], 0), Err(at(4_000)));
    assert_eq!(look(Some(&leaf), &["a", "b"], 3_999), Err(at(4_000)));
    assert_eq!(look(Some(&leaf), &["a", "b"], 4_000), Ok(Renewal::Due));
    assert_eq!(look(Some(&leaf), &["a"], 1_000), Err(at(4_000)), "one name too many does no harm");
    assert_eq!(look(Some(&leaf), &["a", "c"], 1_000), Ok(Renewal::Names));
    assert_eq!(look(Some(&leaf), &["a"], 6_000), Ok(Renewal::Invalid));
    let noon = state.current.issue(&names(&["a"]), SECONDS.leaf_validity, at(12_000)).unwrap();
    assert_eq!(look(Some(&noon), &["a"], -290_000), Ok(Renewal::Invalid), "the clock was put back");
    assert_eq!(look(Some(&leaf), &["a"], 24_000), Err(at(84_000)), "its CA has ended, too");
    assert_eq!(look(None, &["a"], 24_000), Err(at(84_000)));
    // Nothing is gained by a leaf that ends with its CA as well.
    let last = state.current.issue(&names(&["a"]), SECONDS.leaf_validity, at(20_000)).unwrap();
    assert_eq!(look(Some(&last), &["a"], 23_500), Err(at(24_000)));
}

#[test]
fn another_ca_signs_only_once_it_has_spread_unless_there_is_no_other_leaf() {
    let (former, state) = (ca(), State::new(ca()));
    let names = Names::from(["a".to_owned()]);
    let leaf = former.issue(&names, SECONDS.leaf_validity, at(0)).unwrap();
    let current = &state.current.certificate;
    let look =
        |published: &Published, now| renewal(Some(&leaf), &state, published, &names, at(now), &SECONDS);
    let end = leaf.certificate.not_after;
    assert_eq!(look(&Published::Unknown, 1_000), Err(end));
    assert_eq!(look(&held(&[&former.certificate], at(0)), 5_000), Err(end));
    let published = held(&[&former.certificate, current], at(1_000));
    assert_eq!(look(&published, 2_999), Err(at(3_000)));
    assert_eq!(look(&published, 3_000), Ok(Renewal::Succession));
    assert_eq!(look(&Published::Nowhere, 0), Ok(Renewal::Succession), "nobody asks");
    assert_eq!(look(&Published::Unknown, 6_000), Ok(Renewal::Invalid));
}

// ---------------------------------------------------------------- all together, in every order

/// One replica of the simulation: what its watches have brought so far.
#[derive(Default)]
struct Replica {
    secret: Option<(u64, Option<Data>)>,
    published: Published,
    memory: Option<State>,
    leaf: Option<Leaf>,
    /// Since when more is published than it would.
    surplus: Option<i64>,
}

/// A Secret with versions, one entry of a webhook configuration, and replicas that look at them.
#[derive(Default)]
struct Simulation {
    version: u64,
    secret: Option<Data>,
    bundle: String,
    replicas: [Replica; 2],
    promotions: usize,
}

#[derive(Debug, Clone, Copy)]
enum Happening {
    /// Time goes on.
    Pass(i64),
    /// A replica's watches catch up.
    See(usize),
    /// A replica does what it finds to do.
    Act(usize),
    /// A replica is started anew.
    Restart(usize),
    Delete,
    Break,
    /// Somebody puts another CA there.
    Swap,
}

impl Simulation {
    fn happen(&mut self, what: Happening, now: i64) {
        match what {
            Happening::Pass(_) => {}
            Happening::See(n) => {
                self.see_secret(n);
                self.see_hooks(n, now);
            }
            Happening::Act(n) => self.act(n, now),
            Happening::Restart(n) => self.replicas[n] = Replica::default(),
            Happening::Delete => self.store(None),
            Happening::Swap => self.store(Some(stored(&State::new(Arc::new(ca_at(at(now), &SECONDS)))))),
            Happening::Break => {
                if let Some(data) = &mut self.secret {
                    data.insert("ca.key".to_owned(), ByteString(b"nonsense".to_vec()));
                    self.version += 1;
                }
            }
        }
    }

    fn store(&mut self, data: Option<Data>) {
        self.secret = data;
        self.version += 1;
    }

    fn see_secret(&mut self, n: usize) {
        self.replicas[n].secret = Some((self.version, self.secret.clone()));
    }

    fn see_hooks(&mut self, n: usize, now: i64) {
        let held = Certificate::parse_all(self.bundle.as_bytes()).unwrap();
        let replica = &mut self.replicas[n];
        let before = match &replica.published {
            Published::Held(before) => before.clone(),
            _ => BTreeMap::new(),
        };
        let since = |der: Vec<u8>| (der.clone(), before.get(&der).copied().unwrap_or(at(now)));
        replica.published = Published::Held(held.iter().map(|one| since(one.der().to_vec())).collect());
    }

    fn act(&mut self, n: usize, now: i64) {
        let names = Names::from(["a".to_owned()]);
        let now = at(now);
        let replica = &mut self.replicas[n];
        let Some((version, data)) = replica.secret.clone() else { return };
        let reading = data.as_ref().map(Reading::of);
        let serving = replica.leaf.as_ref().filter(|leaf| leaf.certificate.is_valid(now));
        let serving = serving.map(|leaf| leaf.issuer.clone());
        let view = View {
            secret: reading.as_ref(),
            memory: replica.memory.as_ref(),
            published: &replica.published,
            serving: serving.as_ref(),
        };
        let step = next_step(view, now, &SECONDS);
        let wanted = outcome(step, view, now, &SECONDS, || Ok(ca_at(now, &SECONDS))).unwrap();
        if let Some(state) = step.followed(reading.as_ref(), now) {
            replica.memory = Some(state);
        }
        if let Some(state) = &replica.memory {
            if renewal(replica.leaf.as_ref(), state, &replica.published, &names, now, &SECONDS).is_ok()
                && is_valid(&state.current, now)
            {
                replica.leaf = Some(state.current.issue(&names, SECONDS.leaf_validity, now).unwrap());
            }
            // As in `bundle`: what lacks is written at once, what is too much stays for a while.
            let there = Certificate::parse_all(self.bundle.as_bytes()).unwrap();
            let ms = now.as_millisecond();
            let linger = i64::try_from(SECONDS.linger().as_millis()).unwrap();
            let lacks = state.trusted().iter().any(|one| !there.contains(one));
            let same = state.trusted().len() == there.len();
            let surplus = *replica.surplus.get_or_insert(ms);
            if lacks || ms - surplus >= linger {
                self.bundle = state.bundle();
            }
            if lacks || same {
                replica.surplus = None;
            }
        }
        if let Some(wanted) = wanted
            && version == self.version
        {
            self.promotions += usize::from(step == Step::Promote);
            self.store(Some(stored(&wanted)));
        }
    }

    /// A leaf that is served and valid is trusted by what is published.
    fn all_are_trusted(&self, now: i64) -> bool {
        let there = Certificate::parse_all(self.bundle.as_bytes()).unwrap();
        let served = self.replicas.iter().filter_map(|replica| replica.leaf.as_ref());
        served.filter(|leaf| leaf.certificate.is_valid(at(now))).all(|leaf| there.contains(&leaf.issuer))
    }
}

fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        6 => (50..400_i64).prop_map(Happening::Pass),
        6 => (0..2_usize).prop_map(Happening::See),
        6 => (0..2_usize).prop_map(Happening::Act),
    ]
}

#[test]
fn who_has_not_heard_of_the_next_ca_does_not_take_it_away_while_others_turn_to_it() {
    let mut simulation = Simulation::default();
    for now in (0..40_000).step_by(100) {
        for n in [0, 1] {
            // A watch may stall for three times the time to spread before that is noticed.
            let stalled = n == 1 && (15_900..22_000).contains(&now);
            if !stalled {
                simulation.see_secret(n);
            }
            simulation.see_hooks(n, now);
            if n == 0 || now % 300 == 0 {
                simulation.act(n, now);
            }
        }
        assert!(simulation.all_are_trusted(now), "at {now}");
    }
    assert!(simulation.promotions > 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 16, failure_persistence: None, ..ProptestConfig::default() })]

    /// However replicas interleave, as long as each looks at least once in the time to spread.
    #[test]
    fn no_leaf_is_served_that_is_not_trusted(
        happenings in proptest::collection::vec(happening(), 300..500),
        upheaval in prop_oneof![(0..2_usize).prop_map(Happening::Restart), Just(Happening::Swap)],
        when in 0..300_usize,
    ) {
        let mut simulation = Simulation::default();
        let (mut now, mut looked, mut begun) = (0, [0_i64; 2], 0);
        let settle = |simulation: &mut Simulation, now| {
            for n in [0, 1, 0, 1] {
                simulation.happen(Happening::See(n), now);
                simulation.happen(Happening::Act(n), now);
            }
        };
        settle(&mut simulation, now);
        for (n, what) in happenings.into_iter().enumerate() {
            if let Happening::Pass(ms) = what {
                now += ms;
            }
            if n == when {
                simulation.happen(upheaval, now);
                begun = now;
            }
            simulation.happen(what, now);
            for (replica, last) in looked.iter_mut().enumerate() {
                if now - *last > 900 {
                    simulation.happen(Happening::See(replica), now);
                    simulation.happen(Happening::Act(replica), now);
                    *last = now;
                }
            }
            prop_assert!(simulation.all_are_trusted(now), "at {now} after {what:?}");
        }
        // The last CA may have been made at the upheaval.
        if now - begun > 24_000 {
            prop_assert!(simulation.promotions > 0);
        }
    }

    /// Whatever was done to the Secret, it is right again and stays so.
    #[test]
    fn every_accident_is_over_once_replicas_have_looked(
        accidents in proptest::collection::vec(prop_oneof![
            Just(Happening::Delete), Just(Happening::Break), (0..2_usize).prop_map(Happening::Restart),
            (0..60_000_i64).prop_map(Happening::Pass),
        ], 1..12),
    ) {
        let mut simulation = Simulation::default();
        let mut now = 0;
        for what in accidents {
            if let Happening::Pass(ms) = what {
                now += ms;
            }
            simulation.happen(what, now);
            for n in [0, 1, 0, 1, 0, 1] {
                simulation.happen(Happening::See(n), now);
                simulation.happen(Happening::Act(n), now);
            }
            let reading = Reading::of(simulation.secret.as_ref().expect("a Secret"));
            prop_assert!(!reading.flawed);
            prop_assert!(reading.current.is_ok_and(|ca| is_valid(&ca, at(now))));
            for replica in &simulation.replicas {
                prop_assert!(replica.leaf.as_ref().is_some_and(|leaf| leaf.certificate.is_valid(at(now))));
            }
            prop_assert!(simulation.all_are_trusted(now));
        }
    }
}
