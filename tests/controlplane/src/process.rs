//! One process of the control plane: start, kill, pause, resume, restart.

use std::fmt;
use std::fs::OpenOptions;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, waitid};

use crate::cleanup::Cleanup;
use crate::wait::eventually;
use crate::{Error, files};

/// How long a process may take to become ready: far more than it needs, for machines that are busy.
const READY_TIMEOUT: Duration = Duration::from_mins(2);

/// How many lines of its log an error quotes.
const TAIL_LINES: usize = 25;

/// Returns whether a process is ready.
pub(crate) type Probe = Box<dyn Fn() -> bool + Send + Sync>;

/// A program with its arguments, and the probe for its readiness.
pub(crate) struct Spec {
    pub(crate) name: &'static str,
    pub(crate) program: PathBuf,
    pub(crate) args: Vec<String>,
    pub(crate) ready: Probe,
}

/// A process of the control plane, which tests can kill, pause and restart.
///
/// A restart keeps its data, port and flags, and appends to the same log. Dropping it kills it.
pub struct Process {
    spec: Spec,
    dir: PathBuf,
    log: PathBuf,
    group: u32,
    /// `None` once it was killed or found dead. A process id is only used while its `Child` is unreaped, when it cannot
    /// belong to another process.
    child: Mutex<Option<Child>>,
}

impl Process {
    /// Starts the process and returns at once.
    pub(crate) fn start(spec: Spec, cleanup: &Cleanup) -> Result<Self, Error> {
        let process = Self {
            log: cleanup.dir().join(format!("{}.log", spec.name)),
            dir: cleanup.dir().to_owned(),
            group: cleanup.group(),
            child: Mutex::new(None),
            spec,
        };
        *process.child() = Some(process.spawn()?);
        Ok(process)
    }

    /// Waits until the process is ready; fails at once if it ends.
    pub(crate) fn wait_ready(&self) -> Result<(), Error> {
        let mut ended = None;
        let ready = eventually(READY_TIMEOUT, || {
            ended = self.ended();
            ended.is_some() || (self.spec.ready)()
        });
        match ended {
            Some(error) => Err(error),
            None if ready => Ok(()),
            None => Err(Error::NotReady {
                name: self.spec.name,
                after: READY_TIMEOUT,
                log: self.log.clone(),
                tail: files::tail(&self.log, TAIL_LINES),
            }),
        }
    }

    /// The process id, or `None` if it does not run.
    #[must_use]
    pub fn id(&self) -> Option<u32> {
        self.child().as_ref().map(Child::id)
    }

    /// The log file, inside the data directory.
    #[must_use]
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Kills the process (SIGKILL), if it runs, and returns when it has ended.
    ///
    /// # Errors
    /// When the system refuses the signal.
    pub fn kill(&self) -> Result<(), Error> {
        end(&mut self.child())
    }

    /// Pauses the process (SIGSTOP) and returns when it is stopped: it answers nobody, but its connections stay open.
    /// [`kill`](Self::kill) works on a paused process.
    ///
    /// # Errors
    /// [`Error::NotRunning`] when it does not run.
    pub fn pause(&self) -> Result<(), Error> {
        self.signal(Signal::STOP, |pid| {
            // Without EXITED, the exit status is left for `Child`. Without NOWAIT, a second pause in a row would wait
            // forever.
            waitid(WaitId::Pid(pid), WaitIdOptions::STOPPED | WaitIdOptions::NOWAIT).map(|_| ())
        })
    }

    /// Resumes a paused process (SIGCONT).
    ///
    /// # Errors
    /// [`Error::NotRunning`] when it does not run.
    pub fn resume(&self) -> Result<(), Error> {
        self.signal(Signal::CONT, |_| Ok(()))
    }

    /// Kills the process if it runs, starts it again on the same data and port, and waits until it is ready. The others
    /// reconnect after a moment: see [`ControlPlane::wait_ready`](crate::ControlPlane::wait_ready).
    ///
    /// After a restart, the controller manager counts as ready as soon as it runs.
    ///
    /// # Errors
    /// [`Error::Ended`] or [`Error::NotReady`].
    pub fn restart(&self) -> Result<(), Error> {
        let mut child = self.child();
        end(&mut child)?;
        *child = Some(self.spawn()?);
        drop(child);
        self.wait_ready()
    }

    fn signal(
        &self,
        signal: Signal,
        confirm: impl FnOnce(Pid) -> rustix::io::Result<()>,
    ) -> Result<(), Error> {
        let child = self.child();
        let running = child.as_ref().ok_or(Error::NotRunning(self.spec.name))?;
        let pid = Pid::from_child(running);
        match kill_process(pid, signal).and_then(|()| confirm(pid)) {
            // It has ended and was not reaped yet.
            Err(rustix::io::Errno::CHILD) => Err(Error::NotRunning(self.spec.name)),
            done => done.map_err(|error| Error::Io(error.into())),
        }
    }

    /// The error for a process that does not run, if so.
    fn ended(&self) -> Option<Error> {
        let mut child = self.child();
        let Some(running) = child.as_mut() else {
            return Some(Error::NotRunning(self.spec.name));
        };
        let status = running.try_wait().ok()??;
        *child = None;
        Some(Error::Ended {
            name: self.spec.name,
            status,
            log: self.log.clone(),
            tail: files::tail(&self.log, TAIL_LINES),
        })
    }

    /// Starts it without this process's environment: variables like `ETCD_NAME` would override flags.
    fn spawn(&self) -> Result<Child, Error> {
        let log = OpenOptions::new()
            .create(true)
            .append(true)
            .mode(0o600)
            .open(&self.log)
            .map_err(Error::at(&self.log))?;
        Command::new(&self.spec.program)
            .args(&self.spec.args)
            .env_clear()
            .current_dir(&self.dir)
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .process_group(self.group.cast_signed())
            .spawn()
            .map_err(Error::at(&self.spec.program))
    }

    fn child(&self) -> MutexGuard<'_, Option<Child>> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Kills and reaps a process, if there is one.
fn end(child: &mut Option<Child>) -> Result<(), Error> {
    if let Some(running) = child.as_mut() {
        running.kill()?;
        running.wait()?;
        *child = None;
    }
    Ok(())
}

impl fmt::Debug for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(self.spec.name).field("id", &self.id()).field("log", &self.log).finish_non_exhaustive()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // If this fails, the cleaner kills it in the end.
        let _ = self.kill();
    }
}
