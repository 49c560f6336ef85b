//! Clears up after this process, whichever way it ends: return, panic, Ctrl+C or SIGKILL.
//!
//! Two small shells do it, and need no list of processes that could be out of date:
//!
//! - The **keeper** leads a process group which every process of the control plane joins. While it
//!   lives, the number of the group cannot be given to others.
//! - The **sweeper** reads a pipe whose only writer is this process. At its end, which the kernel
//!   brings about when we are gone, it kills the whole group and removes the data directory. What else
//!   there is to do, a script in that directory says: see [`SCRIPT`].
//!
//! Nothing can slip through between start and record. A child joins the group before it executes
//! its program, and until then holds a copy of the pipe (close-on-exec): when the sweeper sees the
//! end of the pipe, every child is in the group.

use std::fs::File;
use std::io::Read;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::Error;

const SHELL: &str = "sh";

/// A script in the data directory which the sweeper runs between killing and removing.
pub(crate) const SCRIPT: &str = "sweep.sh";

/// Passes on the one line that says the sweeper is ready, then waits for the sweeper to end.
const KEEPER: &str = r#"read -r ready && echo "$ready" && read -r never"#;

/// `$1` is the data directory, `$2` the group. The directory is created here, so that there is no
/// moment in which it exists and nobody would remove it. Killed processes may still be finishing
/// their last write when `rm` runs: hence the repetition.
const SWEEPER: &str = r#"
trap '' HUP INT TERM
mkdir -m 700 "$1" || exit 1
echo ready
while read -r _; do :; done
kill -KILL "-$2" 2>/dev/null
[ ! -e "$1/sweep.sh" ] || sh "$1/sweep.sh" 2>/dev/null
tries=0
until rm -rf "$1" 2>/dev/null || [ "$tries" -ge 100 ]; do
    tries=$((tries + 1))
    sleep 0.1
done
"#;

/// The two helpers, and the data directory they look after.
///
/// Dropping it kills what is left of the group, removes the directory, and returns when that is
/// done. Leaking it, as in a `static`, only leaves the same work to the end of the process.
pub(crate) struct Cleanup {
    dir: PathBuf,
    keeper: Child,
    sweeper: Child,
}

impl Cleanup {
    /// Creates `dir`, which must not exist, with access for the owner only.
    pub(crate) fn start(dir: PathBuf) -> Result<Self, Error> {
        Self::start_with(dir, Stdio::null())
    }

    /// As [`start`](Self::start), with a locked file that is unlocked when all is cleared up, and not before.
    pub(crate) fn start_locked(dir: PathBuf, lock: File) -> Result<Self, Error> {
        Self::start_with(dir, lock.into())
    }

    /// What is handed to the sweeper as its standard error stays open for as long as the sweeper lives.
    fn start_with(dir: PathBuf, held: Stdio) -> Result<Self, Error> {
        let mut keeper = shell(KEEPER, "controlplane-keeper")
            .arg(&dir)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(Error::at(Path::new(SHELL)))?;
        let (keeper_in, keeper_out) = (keeper.stdin.take(), keeper.stdout.take());
        let sweeper = shell(SWEEPER, "controlplane-sweeper")
            .arg(&dir)
            .arg(keeper.id().to_string())
            .stdin(Stdio::piped())
            .stdout(keeper_in.map_or_else(Stdio::null, Stdio::from))
            .stderr(held)
            .spawn()
            .map_err(Error::at(Path::new(SHELL)))?;
        let cleanup = Self { dir, keeper, sweeper };

        let mut ready = String::new();
        if let Some(mut out) = keeper_out {
            let mut byte = [0];
            while out.read(&mut byte)? == 1 && byte != *b"\n" {
                ready.push(char::from(byte[0]));
            }
        }
        if ready == "ready" { Ok(cleanup) } else { Err(Error::Cleanup(cleanup.dir.clone())) }
    }

    /// The data directory.
    pub(crate) fn dir(&self) -> &Path {
        &self.dir
    }

    /// The process group to start every process of the control plane in.
    pub(crate) fn group(&self) -> u32 {
        self.keeper.id()
    }
}

impl Drop for Cleanup {
    fn drop(&mut self) {
        drop(self.sweeper.stdin.take());
        // Errors have no one to go to here; both children end by themselves.
        let _ = self.sweeper.wait();
        let _ = self.keeper.wait();
    }
}

/// A shell in a process group of its own, so that Ctrl+C in a terminal does not reach it.
fn shell(script: &str, name: &str) -> Command {
    let mut command = Command::new(SHELL);
    command.args(["-c", script, name]).current_dir("/").stderr(Stdio::null()).process_group(0);
    command
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    fn directory(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("cleanup-{name}-{}", std::process::id()))
    }

    #[test]
    fn the_directory_is_private_and_gone_afterwards() {
        let cleanup = Cleanup::start(directory("private")).unwrap();
        let dir = cleanup.dir().to_owned();
        assert_eq!(fs::metadata(&dir).unwrap().permissions().mode() & 0o777, 0o700);
        fs::write(dir.join("file"), "content").unwrap();
        drop(cleanup);
        assert!(!dir.exists());
    }

    #[test]
    fn the_directory_of_somebody_else_is_left_alone() {
        let dir = directory("foreign");
        fs::create_dir(&dir).unwrap();
        assert!(matches!(Cleanup::start(dir.clone()), Err(Error::Cleanup(_))));
        assert!(dir.exists());
        fs::remove_dir(dir).unwrap();
    }

    #[test]
    fn a_process_of_the_group_is_killed_even_when_paused() {
        let cleanup = Cleanup::start(directory("group")).unwrap();
        let group = i32::try_from(cleanup.group()).unwrap();
        let mut child =
            Command::new("sh").args(["-c", "kill -STOP $$"]).process_group(group).spawn().unwrap();
        drop(cleanup);
        assert!(!child.wait().unwrap().success());
    }

    #[test]
    fn the_script_runs_before_the_lock_is_released() {
        let (dir, path) = (directory("script"), directory("lock"));
        let lock = File::create(&path).unwrap();
        lock.lock().unwrap();
        let cleanup = Cleanup::start_locked(dir.clone(), lock).unwrap();
        let other = File::open(&path).unwrap();
        assert!(other.try_lock().is_err());
        let script = format!("rm '{}'", path.display());
        fs::write(dir.join(SCRIPT), script).unwrap();
        drop(cleanup);
        other.try_lock().unwrap();
        assert!(!path.exists() && !dir.exists());
    }
}
