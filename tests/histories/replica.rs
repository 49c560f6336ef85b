//! One of the two replicas of a history: a `lockstep run` process behind a proxy to the API server.

use std::{
    env,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use controlplane::{LockstepProcess, Signal};
use model::generate::VALUE_TOKENS;

use crate::{proxy::Proxy, traffic::Traffic};

/// How long a replica may take to stop after SIGTERM.
const STOP_TIMEOUT: Duration = Duration::from_secs(30);

/// A build of Lockstep.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Build {
    /// This one.
    Current,
    /// The one that users had before: `make test-skew` builds it.
    Previous,
}

impl Build {
    pub(crate) fn program(self) -> PathBuf {
        match self {
            Self::Current => PathBuf::from(env!("CARGO_BIN_EXE_lockstep")),
            Self::Previous => previous().expect("LOCKSTEP_PREVIOUS_BINARY"),
        }
    }

    pub(crate) const fn other(self) -> Self {
        match self {
            Self::Current => Self::Previous,
            Self::Previous => Self::Current,
        }
    }
}

/// The program of the previous build, if there is one.
pub(crate) fn previous() -> Option<PathBuf> {
    env::var_os("LOCKSTEP_PREVIOUS_BINARY").filter(|path| !path.is_empty()).map(PathBuf::from)
}

pub(crate) struct Replica {
    index: usize,
    pub proxy: Arc<Proxy>,
    traffic: Arc<Traffic>,
    kubeconfig: PathBuf,
    /// Flags that it always has.
    flags: Vec<String>,
    /// Flags that a fault sets.
    pub extra_flags: Vec<String>,
    /// A resync would hide a wake-up that was lost, so there is none at first.
    pub resync: &'static str,
    /// By how many minutes its clock is ahead.
    pub clock: i32,
    pub build: Build,
    process: Option<LockstepProcess>,
    paused: bool,
    ready: bool,
}

impl Replica {
    pub(crate) fn new(
        index: usize,
        proxy: Arc<Proxy>,
        traffic: Arc<Traffic>,
        kubeconfig: PathBuf,
        flags: Vec<String>,
    ) -> Self {
        Self {
            index,
            proxy,
            traffic,
            kubeconfig,
            flags,
            extra_flags: Vec::new(),
            resync: "1h",
            clock: 0,
            build: Build::Current,
            process: None,
            paused: false,
            ready: false,
        }
    }

    pub(crate) fn is_ready(&self) -> bool {
        self.ready
    }

    /// Starts it, unless it runs.
    pub(crate) fn start(&mut self) {
        if self.process.is_some() {
            return;
        }
        self.traffic.started(self.index);
        self.note(&format!("starts ({:?})", self.build));
        let mut flags: Vec<&str> = self.flags.iter().chain(&self.extra_flags).map(String::as_str).collect();
        flags.extend(["--resync", self.resync]);
        let environment = match (self.clock, libfaketime()) {
            (0, _) | (_, None) => Vec::new(),
            (minutes, Some(library)) => vec![
                ("LD_PRELOAD", library.display().to_string()),
                ("FAKETIME", format!("{minutes:+}m")),
                ("FAKETIME_DONT_FAKE_MONOTONIC", "1".to_owned()),
            ],
        };
        let program = self.build.program();
        let process = LockstepProcess::start_in(&program, &self.kubeconfig, &flags, &environment);
        self.process = Some(process.expect("lockstep starts"));
    }

    /// Looks whether it has become ready, and whether it still runs.
    pub(crate) async fn tick(&mut self) {
        let Some(process) = self.process.as_mut().filter(|_| !self.paused) else { return };
        if let Ok(Some(status)) = process.has_ended() {
            let log = process.log();
            self.traffic.recorder.violation(format!("replica {} has ended ({status}): {log}", self.index));
            self.bury();
        } else if !self.ready {
            self.ready = process.wait_ready(Duration::ZERO).await.is_ok();
        }
    }

    /// SIGKILL.
    pub(crate) fn kill(&mut self) {
        self.note("is killed");
        if let Some(process) = &self.process {
            drop(process.signal(Signal::KILL));
        }
        self.bury();
    }

    /// SIGTERM.
    pub(crate) async fn stop(&mut self) {
        self.resume();
        self.note("is stopped");
        if let Some(process) = &mut self.process {
            match process.stop(STOP_TIMEOUT).await {
                Ok(status) if status.success() => {}
                // It had just begun, and had not asked to be told of the signal.
                Ok(_) if !self.ready => {}
                Ok(status) => self.traffic.recorder.violation(format!("replica {}: {status}", self.index)),
                Err(error) => self.traffic.recorder.violation(format!("replica {}: {error}", self.index)),
            }
        }
        self.bury();
    }

    /// SIGSTOP.
    pub(crate) fn pause(&mut self) {
        if let Some(process) = &self.process {
            drop(process.signal(Signal::STOP));
            self.paused = true;
            self.note("is paused");
        }
    }

    /// SIGCONT.
    pub(crate) fn resume(&mut self) {
        if let Some(process) = self.process.as_ref().filter(|_| self.paused) {
            self.traffic.resumed(self.index);
            drop(process.signal(Signal::CONT));
            self.note("goes on");
        }
        self.paused = false;
    }

    /// Resident memory in KiB; `None` if it does not run.
    pub(crate) fn memory_kib(&self) -> Option<u64> {
        self.process.as_ref().map(|process| process.memory_kib("VmRSS"))
    }

    pub(crate) fn metric(&self, name: &str) -> Option<f64> {
        self.process.as_ref().filter(|_| self.ready && !self.paused).map(|process| process.metric(name))
    }

    /// No value is in its metrics and its log.
    pub(crate) fn check_output(&self) {
        let Some(process) = &self.process else { return };
        let metrics = if self.ready && !self.paused { process.http_get("/metrics") } else { String::new() };
        for (what, text) in [("log", process.log()), ("metrics", metrics)] {
            for line in text.lines() {
                let leaks = VALUE_TOKENS.iter().any(|token| line.contains(token));
                if leaks || line.contains("panicked at") {
                    self.traffic.recorder.violation(format!("replica {}: its {what}: {line}", self.index));
                }
            }
        }
    }

    /// Its log, if it runs.
    pub(crate) fn log(&self) -> String {
        self.process.as_ref().map(LockstepProcess::log).unwrap_or_default()
    }

    fn bury(&mut self) {
        self.ready = false;
        self.paused = false;
        self.check_output();
        self.process = None;
    }

    fn note(&self, what: &str) {
        self.traffic.recorder.note(format!("replica {} {what}", self.index));
    }
}

/// The library that gives a process another clock, if it is installed.
pub(crate) fn libfaketime() -> Option<PathBuf> {
    let directories = ["/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib"];
    let library = |directory: &&str| Path::new(directory).join("faketime/libfaketime.so.1");
    directories.iter().map(library).find(|library| library.exists())
}
