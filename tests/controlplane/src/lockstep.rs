//! A `lockstep run` process for tests, demo and benchmarks: start it, wait until it is ready, read its log and its
//! metrics, stop it.

use std::env;
use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{self, Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::process::{Pid, Resource, Rlimit, Signal, kill_process, prlimit};
use serde_json::Value;

use crate::Error;
use crate::wait::poll;

/// A request to a paused process gets no answer.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);

/// The variable for `--drain`.
const DRAIN: &str = "LOCKSTEP_DRAIN";

/// A running Lockstep. Dropping it kills it and removes its log.
#[derive(Debug)]
pub struct LockstepProcess {
    child: Child,
    /// `None` if it logs to this process's standard error.
    log: Option<PathBuf>,
    /// Where it serves health and metrics, once that is known.
    ops: Option<String>,
}

impl LockstepProcess {
    /// Starts `lockstep run` with these flags. It logs JSON to a temporary file.
    ///
    /// # Errors
    /// When the program or its log file cannot be opened.
    pub fn start(program: &Path, kubeconfig: &Path, flags: &[&str]) -> Result<Self, Error> {
        Self::start_in(program, kubeconfig, flags, &[])
    }

    /// As [`start`](Self::start), with these environment variables.
    ///
    /// # Errors
    /// When the program or its log file cannot be opened.
    pub fn start_in(
        program: &Path,
        kubeconfig: &Path,
        flags: &[&str],
        environment: &[(&str, String)],
    ) -> Result<Self, Error> {
        let mut command = command(program, kubeconfig, "127.0.0.1:0", flags);
        command.envs(environment.iter().map(|(name, value)| (name, value)));
        Self::spawn(command)
    }

    /// As [`start`](Self::start), but it drains as users' replicas do when it is asked to stop.
    ///
    /// # Errors
    /// When the program or its log file cannot be opened.
    pub fn start_behind_a_service(program: &Path, kubeconfig: &Path, flags: &[&str]) -> Result<Self, Error> {
        let mut command = command(program, kubeconfig, "127.0.0.1:0", flags);
        command.env_remove(DRAIN);
        Self::spawn(command)
    }

    fn spawn(mut command: Command) -> Result<Self, Error> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let name = format!("lockstep-{}-{}.log", process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
        let log = env::temp_dir().join(name);
        command.args(["--log-format", "json"]).stderr(File::create(&log).map_err(Error::at(&log))?);
        let child = command.spawn().map_err(Error::at(Path::new(command.get_program())))?;
        Ok(Self { child, log: Some(log), ops: None })
    }

    /// As [`start`](Self::start), but logs to this process's standard error, and serves health and metrics at `ops`.
    ///
    /// # Errors
    /// When the program cannot be started.
    pub fn start_in_foreground(
        program: &Path,
        kubeconfig: &Path,
        ops: &str,
        flags: &[&str],
    ) -> Result<Self, Error> {
        let child = command(program, kubeconfig, ops, flags).spawn().map_err(Error::at(program))?;
        Ok(Self { child, log: None, ops: Some(ops.to_owned()) })
    }

    /// Waits until `/readyz` says so; fails at once if the process ends instead.
    ///
    /// # Errors
    /// [`Error::Lockstep`] when it ends, or is not ready in time.
    pub async fn wait_ready(&mut self, timeout: Duration) -> Result<(), Error> {
        let this = &mut *self;
        let outcome = poll(timeout, || {
            let outcome = match this.child.try_wait() {
                Err(error) => Some(Err(error.into())),
                Ok(Some(status)) => Some(Err(this.error(format!("ended ({status})")))),
                Ok(None) => this.is_ready().then_some(Ok(())),
            };
            async { outcome }
        });
        outcome.await.unwrap_or_else(|| Err(self.error(format!("is not ready after {timeout:?}"))))
    }

    fn is_ready(&mut self) -> bool {
        if self.ops.is_none() {
            let log = self.log();
            let mut lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
            self.ops = lines.find_map(|line| Some(line.get("ops")?.as_str()?.to_owned()));
        }
        self.ops.is_some() && self.http_get("/readyz").starts_with("HTTP/1.1 200")
    }

    /// The response of the ops server, status line included; empty if it refuses the connection.
    ///
    /// # Panics
    /// When the process is not ready yet.
    #[must_use]
    pub fn http_get(&self, path: &str) -> String {
        let address = self.ops.as_deref().expect("lockstep is ready");
        let request = format!("GET {path} HTTP/1.1\r\nhost: lockstep\r\nconnection: close\r\n\r\n");
        let mut response = String::new();
        let exchange = |response: &mut String| -> io::Result<()> {
            let mut stream = TcpStream::connect(address)?;
            stream.set_read_timeout(Some(RESPONSE_TIMEOUT))?;
            stream.write_all(request.as_bytes())?;
            stream.read_to_string(response)?;
            Ok(())
        };
        drop(exchange(&mut response));
        response
    }

    /// The value of a metric, with its labels as they are printed; zero if there is no such series.
    ///
    /// # Panics
    /// When there are no metrics, or the value is not a number.
    #[must_use]
    pub fn metric(&self, name: &str) -> f64 {
        let metrics = self.http_get("/metrics");
        assert!(metrics.starts_with("HTTP/1.1 200"), "no metrics: {metrics}");
        let value = metrics.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        value.map_or(0.0, |value| value.trim().parse().expect("a number"))
    }

    /// Whether it has ended, by itself or by a signal.
    ///
    /// # Errors
    /// When the system cannot say.
    pub fn has_ended(&mut self) -> Result<Option<ExitStatus>, Error> {
        Ok(self.child.try_wait()?)
    }

    /// What it has logged so far; empty in the foreground.
    #[must_use]
    pub fn log(&self) -> String {
        self.log.as_ref().and_then(|log| fs::read_to_string(log).ok()).unwrap_or_default()
    }

    /// The process id.
    #[must_use]
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// A field of `/proc/<pid>/status` in KiB: `VmRSS` is its resident memory, `VmHWM` the peak of that.
    ///
    /// # Panics
    /// When the process has ended, or there is no such field.
    #[must_use]
    pub fn memory_kib(&self, field: &str) -> u64 {
        let status = fs::read_to_string(format!("/proc/{}/status", self.id())).expect("a running process");
        let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        line.and_then(|value| value.trim().trim_end_matches(" kB").parse().ok()).expect("a size in kB")
    }

    /// Lets it allocate no more than this many bytes: it aborts when it tries. Unlike the memory limit of a pod, this
    /// also counts what was allocated and never touched, and it needs no privileges.
    ///
    /// # Errors
    /// When the process has ended.
    pub fn limit_memory(&self, bytes: u64) -> Result<(), Error> {
        let limit = Rlimit { current: Some(bytes), maximum: Some(bytes) };
        let limited = prlimit(Some(Pid::from_child(&self.child)), Resource::Data, limit);
        limited.map(drop).map_err(|error| Error::Io(error.into()))
    }

    /// Sends a signal.
    ///
    /// # Errors
    /// When the process has ended.
    pub fn signal(&self, signal: Signal) -> Result<(), Error> {
        kill_process(Pid::from_child(&self.child), signal).map_err(|error| Error::Io(error.into()))
    }

    /// Asks it to stop (SIGTERM) and waits until it has ended.
    ///
    /// # Errors
    /// [`Error::Lockstep`] when it does not end in time.
    pub async fn stop(&mut self, timeout: Duration) -> Result<ExitStatus, Error> {
        self.signal(Signal::TERM)?;
        self.wait_exit(timeout).await
    }

    /// Waits until it has ended by itself or by a signal.
    ///
    /// # Errors
    /// [`Error::Lockstep`] when it does not end in time.
    pub async fn wait_exit(&mut self, timeout: Duration) -> Result<ExitStatus, Error> {
        let child = &mut self.child;
        let status = poll(timeout, || {
            let status = child.try_wait().transpose();
            async { status }
        });
        match status.await {
            Some(status) => Ok(status?),
            None => Err(self.error(format!("still runs after {timeout:?}"))),
        }
    }

    fn error(&self, problem: String) -> Error {
        Error::Lockstep { problem, log: self.log() }
    }
}

impl Drop for LockstepProcess {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
        if let Some(log) = &self.log {
            drop(fs::remove_file(log));
        }
    }
}

fn command(program: &Path, kubeconfig: &Path, ops: &str, flags: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(["run", "--ops-bind", ops]).args(flags).env("KUBECONFIG", kubeconfig);
    // As in deploy/base/deployment.yaml.
    command.env("GLIBC_TUNABLES", "glibc.malloc.arena_max=1:glibc.malloc.tcache_count=64");
    // No Service routes to this process, so there is nothing to drain; as a variable, so that a flag overrides it.
    command.env(DRAIN, "0s").stdin(Stdio::null());
    command
}
