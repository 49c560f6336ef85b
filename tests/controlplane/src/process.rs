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

/// How long a process may take to become ready: far more than the seconds it needs, for machines
/// that are busy with other things.
const PATIENCE: Duration = Duration::from_mins(2);

/// How much of its log an error quotes.
const TAIL_LINES: usize = 25;

/// Says whether a process does its work.
pub(crate) type Probe = Box<dyn Fn() -> bool + Send + Sync>;

/// What to run, and how to tell that it is ready.
pub(crate) struct Spec {
    pub(crate) name: &'static str,
    pub(crate) program: PathBuf,
    pub(crate) args: Vec<String>,
    pub(crate) ready: Probe,
}

/// A process of the control plane, for tests to harm.
///
/// Its data, ports and flags stay the same over restarts; its log goes on in the same file.
/// Dropping it kills it.
pub struct Process {
    spec: Spec,
    dir: PathBuf,
    log: PathBuf,
    group: u32,
    /// `None` once it was killed, or found dead. The number of a process is only used while its
    /// `Child` is here and unreaped: it cannot belong to another process then.
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

    /// Waits until the process is ready; fails at once when it ends instead.
    pub(crate) fn wait_ready(&self) -> Result<(), Error> {
        let mut ended = None;
        let ready = eventually(PATIENCE, || {
            ended = self.ended();
            ended.is_some() || (self.spec.ready)()
        });
        match ended {
            Some(error) => Err(error),
            None if ready => Ok(()),
            None => Err(Error::NotReady {
                name: self.spec.name,
                after: PATIENCE,
                log: self.log.clone(),
                tail: files::tail(&self.log, TAIL_LINES),
            }),
        }
    }

    /// The process id, or `None` while it is killed.
    #[must_use]
    pub fn id(&self) -> Option<u32> {
        self.child().as_ref().map(Child::id)
    }

    /// The log file, inside the data directory.
    #[must_use]
    pub fn log(&self) -> &Path {
        &self.log
    }

    /// Kills the process (SIGKILL) and returns when it is gone. Fine if it is gone already.
    ///
    /// # Errors
    /// When the system refuses the signal.
    pub fn kill(&self) -> Result<(), Error> {
        end(&mut self.child())
    }

    /// Freezes the process (SIGSTOP) and returns when it stands still: from then on it answers
    /// nobody, but its connections stay open. [`kill`](Self::kill) works on a frozen process.
    ///
    /// # Errors
    /// [`Error::NotRunning`] when there is nothing to freeze.
    pub fn pause(&self) -> Result<(), Error> {
        self.signal(Signal::STOP, |pid| {
            // Without EXITED, the exit status stays where `Child` looks for it. With NOWAIT, so
            // does the news that it stopped: a second pause in a row would wait forever for it.
            waitid(WaitId::Pid(pid), WaitIdOptions::STOPPED | WaitIdOptions::NOWAIT).map(|_| ())
        })
    }

    /// Lets a frozen process go on (SIGCONT).
    ///
    /// # Errors
    /// [`Error::NotRunning`] when there is nothing to wake.
    pub fn resume(&self) -> Result<(), Error> {
        self.signal(Signal::CONT, |_| Ok(()))
    }

    /// Kills the process if it runs, starts it again on the same data and ports, and waits until it
    /// is ready. The others find their way back to it by themselves, which can take a moment:
    /// see [`ControlPlane::wait_ready`](crate::ControlPlane::wait_ready).
    ///
    /// The controller manager has nothing to ask: it counts as ready when it runs.
    ///
    /// # Errors
    /// [`Error::Ended`] or [`Error::NotReady`] when it does not come up.
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
            // It has died but nobody has looked yet.
            Err(rustix::io::Errno::CHILD) => Err(Error::NotRunning(self.spec.name)),
            done => done.map_err(|error| Error::Io(error.into())),
        }
    }

    /// Why there is nothing to wait for, if so.
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

    /// The environment is left behind: variables like `ETCD_NAME` would change what runs.
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
        // What cannot be killed here is left to the cleanup.
        let _ = self.kill();
    }
}
