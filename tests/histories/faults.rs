//! What goes wrong while people work.

use std::{
    fmt,
    path::PathBuf,
    time::{Duration, Instant},
};

use fastrand::Rng;

use crate::{
    proxy::Disturbance,
    replica::{Build, Replica, libfaketime, previous},
    scene::{LEASE_DURATION, Scene},
};

/// Longer than the Lease of a leader that is gone, and than another one needs to take over.
const BEYOND_THE_LEASE: Duration = Duration::from_millis(LEASE_DURATION.as_millis() as u64 + 2000);
/// How often connections are cut, and the probability of errors in percent.
const CUT_INTERVAL: Duration = Duration::from_millis(400);
const ERROR_PERCENTAGE: u8 = 40;
/// How far a restore may move revisions ahead.
const REVISION_BUMP: u64 = 1_000_000_000;
/// By how many minutes clocks differ from that of the API server.
const CLOCK_MINUTES: i32 = 10;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Fault {
    KillLeader,
    KillStandby,
    KillAll,
    TerminateLeader,
    PauseLeader,
    PartitionLeader,
    RefuseLease,
    CutConnections,
    StallWatches,
    DelayWatches,
    SlowRequests,
    LoseAnswers,
    Answer409,
    Answer429,
    Answer500,
    Answer503,
    RemoveWebhooks,
    DeleteCa,
    RotateCertificates,
    ClockAhead,
    ClockBehind,
    KillApiServer,
    KillEtcd,
    Compact,
    RestoreBackup,
    Update,
    Rollback,
    Swap,
}

/// A fault that has begun.
pub(crate) struct Active {
    pub fault: Fault,
    victim: usize,
    began: Instant,
    lasts: Duration,
    ticked: Instant,
    backup: Option<(PathBuf, u64)>,
}

impl Fault {
    pub(crate) const ALL: [Self; 25] = [
        Self::KillLeader,
        Self::KillStandby,
        Self::KillAll,
        Self::TerminateLeader,
        Self::PauseLeader,
        Self::PartitionLeader,
        Self::RefuseLease,
        Self::CutConnections,
        Self::StallWatches,
        Self::DelayWatches,
        Self::SlowRequests,
        Self::LoseAnswers,
        Self::Answer409,
        Self::Answer429,
        Self::Answer500,
        Self::Answer503,
        Self::RemoveWebhooks,
        Self::DeleteCa,
        Self::RotateCertificates,
        Self::ClockAhead,
        Self::ClockBehind,
        Self::KillApiServer,
        Self::KillEtcd,
        Self::Compact,
        Self::RestoreBackup,
    ];
    /// Those of [`Build::Previous`] beside this one. They are not in [`Self::ALL`], because they need another program.
    pub(crate) const OF_VERSIONS: [Self; 3] = [Self::Update, Self::Rollback, Self::Swap];

    /// Its name in reports.
    pub(crate) const fn describe(self) -> &'static str {
        match self {
            Self::KillLeader => "leader killed (SIGKILL) and restarted",
            Self::KillStandby => "standby killed and restarted",
            Self::KillAll => "all replicas killed and restarted",
            Self::TerminateLeader => "leader stopped (SIGTERM) and restarted",
            Self::PauseLeader => "leader paused (SIGSTOP) beyond its Lease",
            Self::PartitionLeader => "leader cut off from the API server",
            Self::RefuseLease => "leader can write everything but its Lease",
            Self::CutConnections => "connections cut every 0.4 s",
            Self::StallWatches => "watches stall",
            Self::DelayWatches => "watches delayed by 1.5 s",
            Self::SlowRequests => "requests take 0.5 s longer",
            Self::LoseAnswers => "answers to writes lost after delivery (40 %)",
            Self::Answer409 => "409 for 40 % of writes",
            Self::Answer429 => "429 for 40 % of requests",
            Self::Answer500 => "500 for 40 % of requests",
            Self::Answer503 => "503 for 40 % of requests",
            Self::RemoveWebhooks => "webhook configurations removed and restored",
            Self::DeleteCa => "CA Secret deleted",
            Self::RotateCertificates => "certificates rotate every few seconds",
            Self::ClockAhead => "clock of a replica 10 min ahead",
            Self::ClockBehind => "clock of a replica 10 min behind",
            Self::KillApiServer => "API server killed and restarted",
            Self::KillEtcd => "etcd killed and restarted",
            Self::Compact => "etcd compacted, API server restarted (410)",
            Self::RestoreBackup => "etcd restored from a backup",
            Self::Update => "updated to this version",
            Self::Rollback => "rolled back to the previous version",
            Self::Swap => "leader replaced by one of the other version",
        }
    }

    /// Whether replicas of two versions meet.
    pub(crate) fn is_of_versions(self) -> bool {
        Self::OF_VERSIONS.contains(&self)
    }

    /// Whether it disturbs everybody on the control plane.
    pub(crate) const fn needs_own_plane(self) -> bool {
        matches!(self, Self::KillApiServer | Self::KillEtcd | Self::Compact | Self::RestoreBackup)
    }

    /// Whether people cannot work before it has ended.
    pub(crate) const fn is_outage(self) -> bool {
        self.needs_own_plane() || matches!(self, Self::KillAll)
    }

    /// Whether it ends the process of a replica.
    pub(crate) const fn ends_replicas(self) -> bool {
        matches!(
            self,
            Self::KillLeader
                | Self::KillStandby
                | Self::KillAll
                | Self::TerminateLeader
                | Self::RotateCertificates
                | Self::ClockAhead
                | Self::ClockBehind
                | Self::Update
                | Self::Rollback
                | Self::Swap
        )
    }

    /// Why this machine cannot have it.
    pub(crate) fn missing(self) -> Option<&'static str> {
        match self {
            Self::ClockAhead | Self::ClockBehind if libfaketime().is_none() => {
                Some("libfaketime is not installed (Debian: faketime)")
            }
            Self::Update | Self::Rollback | Self::Swap if previous().is_none() => {
                Some("there is no previous build (make test-skew)")
            }
            _ => None,
        }
    }

    fn lasts(self, random: &mut Rng) -> Duration {
        match self {
            Self::PauseLeader | Self::PartitionLeader | Self::RefuseLease => BEYOND_THE_LEASE,
            Self::RotateCertificates => Duration::from_secs(10),
            Self::DeleteCa => Duration::ZERO,
            Self::KillLeader | Self::KillStandby | Self::KillAll | Self::TerminateLeader => {
                Duration::from_millis(random.u64(0..1000))
            }
            _ => Duration::from_millis(random.u64(500..4000)),
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

impl std::str::FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut all = Self::ALL.into_iter().chain(Self::OF_VERSIONS);
        let found = all.find(|fault| format!("{fault:?}") == text);
        found
            .ok_or_else(|| format!("{text} is no fault; these are: {:?}, {:?}", Self::ALL, Self::OF_VERSIONS))
    }
}

impl Active {
    /// Whether it has lasted long enough.
    pub(crate) fn is_over(&self) -> bool {
        self.began.elapsed() >= self.lasts
    }
}

impl Scene {
    pub(crate) async fn begin(&mut self, fault: Fault, random: &mut Rng) -> Active {
        self.recorder.note(format!("FAULT {fault} begins"));
        let leader = self.traffic.leader().unwrap_or_else(|| random.usize(0..2));
        let victim = if fault == Fault::KillStandby { 1 - leader } else { leader };
        let mut backup = None;
        match fault {
            Fault::KillLeader | Fault::KillStandby => self.kill(victim),
            Fault::KillAll => [0, 1].into_iter().for_each(|replica| self.kill(replica)),
            Fault::TerminateLeader => self.stop(victim).await,
            Fault::PauseLeader => {
                self.replicas[victim].pause();
                self.balancer.remove(victim);
            }
            Fault::PartitionLeader => self.replicas[victim].proxy.disturb(|network| network.partition = true),
            Fault::RefuseLease => self.replicas[victim].proxy.disturb(|network| network.refuse_lease = true),
            Fault::CutConnections => self.replicas.iter().for_each(|replica| replica.proxy.cut()),
            Fault::RemoveWebhooks => self.remove_webhooks(),
            Fault::DeleteCa => {
                let instance = format!("lockstep.{}", self.cluster.domain());
                self.cluster
                    .admin()
                    .succeeds(&format!("delete -n lockstep-system secret {instance} --ignore-not-found"));
            }
            Fault::RotateCertificates => {
                let flags = ["--ca-validity", "36s", "--leaf-validity", "8s"].map(ToOwned::to_owned).to_vec();
                self.replace_all(|replica| replica.extra_flags.clone_from(&flags)).await;
            }
            Fault::ClockAhead => self.replace(victim, |replica| replica.clock = CLOCK_MINUTES).await,
            Fault::ClockBehind => self.replace(victim, |replica| replica.clock = -CLOCK_MINUTES).await,
            Fault::KillApiServer => {
                self.plane.apiserver().and_then(|process| process.kill()).expect("our own")
            }
            Fault::KillEtcd => self.plane.etcd().and_then(|process| process.kill()).expect("our own"),
            Fault::RestoreBackup => {
                let file = blocking(|| self.plane.back_up()).expect("a backup");
                let revision = blocking(|| self.plane.backup_revision(&file)).expect("its revision");
                backup = Some((file, revision));
            }
            Fault::Update | Fault::Rollback => {
                // As a rollout does: the manifests come first, then one replica after the other. People go on working
                // while there is one of each version.
                let build = fault.target();
                self.apply_manifests(build);
                self.replace(0, |replica| replica.build = build).await;
            }
            Fault::Swap => self.replace(victim, |replica| replica.build = replica.build.other()).await,
            Fault::StallWatches
            | Fault::DelayWatches
            | Fault::SlowRequests
            | Fault::LoseAnswers
            | Fault::Answer409
            | Fault::Answer429
            | Fault::Answer500
            | Fault::Answer503 => self.disturb(|network| fault.set(network, true)),
            Fault::Compact => {
                self.plane.apiserver().and_then(|process| process.kill()).expect("our own");
                let revision = self.feed.etcd.revision().await.expect("etcd answers");
                self.recorder.catch_up().await;
                self.feed.etcd.compact(revision).await.expect("a compaction");
            }
        }
        let now = Instant::now();
        Active { fault, victim, began: now, lasts: fault.lasts(random), ticked: now, backup }
    }

    /// Goes on with a fault that has begun.
    pub(crate) fn go_on(&self, active: &mut Active) {
        if active.fault == Fault::CutConnections && active.ticked.elapsed() >= CUT_INTERVAL {
            active.ticked = Instant::now();
            self.replicas.iter().for_each(|replica| replica.proxy.cut());
        }
    }

    pub(crate) async fn end(&mut self, active: Active) {
        let Active { fault, victim, .. } = active;
        match fault {
            Fault::KillLeader | Fault::KillStandby | Fault::KillAll | Fault::TerminateLeader => {
                self.replicas.iter_mut().for_each(Replica::start);
            }
            Fault::PauseLeader => {
                self.replicas[victim].resume();
                self.balancer.set_ready(victim, self.replicas[victim].is_ready());
            }
            Fault::PartitionLeader => {
                self.replicas[victim].proxy.disturb(|network| network.partition = false)
            }
            Fault::RefuseLease => self.replicas[victim].proxy.disturb(|network| network.refuse_lease = false),
            Fault::CutConnections | Fault::DeleteCa | Fault::Swap => {}
            Fault::Update | Fault::Rollback => {
                self.wait_replica(0).await;
                self.replace(1, |replica| replica.build = fault.target()).await;
                self.wait_replica(1).await;
            }
            Fault::RemoveWebhooks => self.restore_webhooks(),
            Fault::RotateCertificates => self.replace_all(|replica| replica.extra_flags.clear()).await,
            Fault::ClockAhead | Fault::ClockBehind => self.replace(victim, |replica| replica.clock = 0).await,
            Fault::KillApiServer | Fault::Compact => {
                blocking(|| self.plane.apiserver()?.restart()).expect("the API server starts");
                self.restart_controller_manager();
            }
            Fault::KillEtcd => {
                blocking(|| self.plane.etcd()?.restart()).expect("etcd starts");
                blocking(|| self.plane.wait_ready()).expect("the API server is ready");
                self.restart_controller_manager();
            }
            Fault::RestoreBackup => {
                let (file, revision) = active.backup.expect("a backup");
                // As etcd's documentation recommends, or as people do it.
                let bump = if revision % 2 == 0 { 0 } else { REVISION_BUMP };
                let bumped = format!("--bump-revision={REVISION_BUMP}");
                let flags: &[&str] = if bump == 0 { &[] } else { &[&bumped, "--mark-compacted"] };
                self.recorder.catch_up().await;
                self.feed.stop();
                self.traffic.requests.forget();
                blocking(|| self.plane.restore(&file, flags)).expect("a restore");
                self.recorder.note(format!("restored {revision} with {flags:?}"));
                self.feed.restored(revision + bump).await;
            }
            Fault::StallWatches
            | Fault::DelayWatches
            | Fault::SlowRequests
            | Fault::LoseAnswers
            | Fault::Answer409
            | Fault::Answer429
            | Fault::Answer500
            | Fault::Answer503 => self.disturb(|network| fault.set(network, false)),
        }
        self.recorder.note(format!("FAULT {fault} has ended"));
    }

    /// Otherwise, garbage collector and namespace controller do nothing for up to a minute after an outage, and it
    /// would be their convergence that is measured.
    fn restart_controller_manager(&self) {
        blocking(|| self.plane.controller_manager()?.restart()).expect("the controller manager starts");
    }

    fn disturb(&self, change: impl Fn(&mut Disturbance)) {
        self.replicas.iter().for_each(|replica| replica.proxy.disturb(&change));
    }

    fn kill(&mut self, replica: usize) {
        self.replicas[replica].kill();
        self.balancer.remove(replica);
    }

    async fn stop(&mut self, replica: usize) {
        self.balancer.set_ready(replica, false);
        self.replicas[replica].stop().await;
        self.balancer.remove(replica);
    }

    /// Stops a replica and starts it again with other settings.
    async fn replace(&mut self, replica: usize, change: impl Fn(&mut Replica)) {
        self.stop(replica).await;
        change(&mut self.replicas[replica]);
        self.replicas[replica].start();
    }

    /// Replaces one replica after the other, as a rollout does.
    async fn replace_all(&mut self, change: impl Fn(&mut Replica)) {
        for replica in 0..2 {
            self.replace(replica, &change).await;
            self.wait_replica(replica).await;
        }
    }

    /// Waits some time until a replica is ready.
    async fn wait_replica(&mut self, replica: usize) {
        let deadline = Instant::now() + Duration::from_secs(10);
        while !self.replicas[replica].is_ready() && Instant::now() < deadline {
            self.tick().await;
            tokio::time::sleep(crate::scene::LOOK_INTERVAL).await;
        }
    }
}

impl Fault {
    /// The build that all replicas have after it.
    const fn target(self) -> Build {
        match self {
            Self::Rollback => Build::Previous,
            _ => Build::Current,
        }
    }

    /// Begins or ends it on the way to the API server.
    fn set(self, network: &mut Disturbance, on: bool) {
        let percentage = if on { ERROR_PERCENTAGE } else { 0 };
        let refuse = |status: u16| on.then_some((status, ERROR_PERCENTAGE));
        match self {
            Self::StallWatches => network.stall_watches = on,
            Self::DelayWatches => network.delay_watches = Duration::from_millis(if on { 1500 } else { 0 }),
            Self::SlowRequests => network.latency = Duration::from_millis(if on { 500 } else { 0 }),
            Self::LoseAnswers => network.lose_answers = percentage,
            Self::Answer409 => network.refuse = refuse(409),
            Self::Answer429 => network.refuse = refuse(429),
            Self::Answer500 => network.refuse = refuse(500),
            Self::Answer503 => network.refuse = refuse(503),
            _ => {}
        }
    }
}

/// Runs something that waits for other processes.
fn blocking<T>(job: impl FnOnce() -> T) -> T {
    tokio::task::block_in_place(job)
}
